//! See `ud::proto::fuzz::packet`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ud::proto::fuzz::packet(bytes));
