//! See `uct_tests::lines::fuzz::lines`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| uct_tests::lines::fuzz::lines(bytes));
