//! The UD transport.
#![deny(missing_docs)]
#![deny(unsafe_code)]

pub mod proto;
