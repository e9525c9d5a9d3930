//! Verbs-shaped devices and what transports share above them.
//!
//! Start reading at [`device`]: the [`Device`](device::Device) trait is the contract between a transport and a NIC.
#![deny(missing_docs)]
#![deny(unsafe_code)]

pub mod device;
pub mod mock;
pub mod sim;
pub mod soft;
pub mod sw;
pub mod types;
