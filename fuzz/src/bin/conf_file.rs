//! See `uct::fuzz::conf_file`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| uct::fuzz::conf_file(bytes));
