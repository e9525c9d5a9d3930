//! The transport-neutral API of the messaging layer.
#![deny(missing_docs)]
#![deny(unsafe_code)]

pub mod config;
pub mod error;
pub mod log;
pub mod mem;
pub mod time;

pub use error::{Blame, Error, ErrorKind, Result, Scope, SendError, SendResult};
pub use time::{Clock, Time};
