//! See `uct_tools::perf::fuzz::control`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| uct_tools::perf::fuzz::control(bytes));
