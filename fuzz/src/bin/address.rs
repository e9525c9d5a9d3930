//! See `ib::fuzz::address`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ib::fuzz::address(bytes));
