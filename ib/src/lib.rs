//! Verbs-shaped devices and what transports share above them.
//!
//! Start reading at [`device`]: the [`Device`](device::Device) trait is the contract between a transport and a NIC.
#![deny(missing_docs)]
#![deny(unsafe_code)]

pub mod addr;
pub mod ah;
mod away;
pub mod component;
pub mod config;
pub mod device;
#[cfg(any(test, uct_fuzz))]
pub mod fuzz;
pub mod gid;
pub mod growth;
pub mod md;
pub mod mock;
#[cfg(feature = "rdma-core")]
pub mod rdma_core;
pub mod reach;
pub mod sim;
pub mod soft;
mod subnets;
pub mod sw;
pub mod types;

use uct::sync;
