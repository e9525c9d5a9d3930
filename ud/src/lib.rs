//! The UD transport: reliable active messages over unreliable datagrams.
#![deny(missing_docs)]
#![deny(unsafe_code)]

pub mod config;
