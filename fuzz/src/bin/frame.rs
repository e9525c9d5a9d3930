//! See `ib::fuzz::frame`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ib::fuzz::frame(bytes));
