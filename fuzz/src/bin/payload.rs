//! See `uct_tools::perf::fuzz::payload`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| uct_tools::perf::fuzz::payload(bytes));
