//! See `ud::proto::fuzz::engine`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ud::proto::fuzz::engine(bytes));
