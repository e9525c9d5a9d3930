//! See `uct::fuzz::config`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| uct::fuzz::config(bytes));
