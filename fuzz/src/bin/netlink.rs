//! See `ib::fuzz::netlink`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ib::fuzz::netlink(bytes));
