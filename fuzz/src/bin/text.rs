//! See `ib::fuzz::text`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ib::fuzz::text(bytes));
