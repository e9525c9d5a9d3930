//! A device in front of another that counts verbs calls and lets tests decide their results.
//!
//! Start reading at [`MockDevice`]. What is not scripted goes through to the device behind, usually a
//! [`SimDevice`](crate::sim::SimDevice), so that a whole transport runs over it:
//!
//! ```
//! # use std::sync::Arc;
//! # use ib::{device::Device, mock::{Call, MockDevice}, sim::{SimConfig, SimNet}};
//! let net = SimNet::new(1, Arc::default());
//! let dev = MockDevice::new(net.add_device(SimConfig::new("a", "10.0.0.1".parse().unwrap())));
//! dev.fail_next(Call::RegMr, 12); // ENOMEM
//! let block = uct::mem::Block::new(64, 64).unwrap();
//! assert_eq!(dev.reg_mr(&block, ib::device::Access::LOCAL_WRITE).unwrap_err().errno, 12);
//! let keys = dev.reg_mr(&block, ib::device::Access::LOCAL_WRITE).unwrap();
//! assert!(dev.leaks().unwrap().contains("1 registration"));
//! dev.dereg_mr(keys).unwrap();
//! assert_eq!((dev.calls(Call::RegMr), dev.failures(Call::RegMr), dev.leaks()), (2, 1, None));
//! ```

mod device;
mod script;
#[cfg(test)]
mod tests;

pub use device::{AhHook, MockDevice, MockQp};
pub use script::{Call, MockLive};
