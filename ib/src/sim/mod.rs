//! A network in one process: devices with the semantics of verbs, virtual time, and faults drawn from a seed.
//!
//! Start reading at [`SimNet`]. A test makes one, adds devices, runs transports over them, and moves time:
//!
//! ```
//! # use std::{sync::Arc, time::Duration};
//! # use ib::sim::{Faults, SimConfig, SimNet};
//! # use uct::time::{Clock, ManualClock, Time};
//! let clock = Arc::new(ManualClock::new(Time::ZERO));
//! let net = SimNet::new(42, clock.clone());
//! net.set_faults(Faults { loss_ppm: 100_000, ..Faults::default() });
//! let a = net.add_device(SimConfig::new("a", "10.0.0.1".parse().unwrap()));
//! let b = net.add_device(SimConfig::new("b", "10.0.0.2".parse().unwrap()));
//! // ... open transports on `a` and `b`, post, and then, until all is done:
//! while let Some(t) = net.next_event() {
//!     net.run_until(t);
//!     // ... progress the transports; what they post makes new events.
//! }
//! # drop((a, b));
//! ```
//!
//! Nothing happens by itself: a packet arrives, and a late send is read and completed, when [`SimNet::step`] or
//! [`SimNet::run_until`] comes to its time. One seed and one order of calls give one run, to the bit; nothing iterates a
//! hash map. When a test fails, print [`SimNet::report`]: the seed and the last packets. A checker can read along:
//! [`SimNet::set_tap`].
//!
//! What is simulated beyond faults on the way (see [`Faults`]):
//! - address handles that freeze the link address of the peer: [`SimNet::set_neighbour`], [`SimDevice::set_mac`];
//! - send buffers read from memory some time after the post, and completed late: [`SimConfig::late_sends`];
//! - address handles that fail or run out: [`SimDevice::script_ah`], [`SimConfig::ah_max`];
//! - a local GID that goes away (the next send through it kills the queue pair): [`SimDevice::remove_gid`];
//! - memory that cannot be registered: [`SimDevice::refuse_registrations`];
//! - a peer that crashes, and restarts with the same GID and queue pair number: [`SimNet::crash`], [`SimNet::restart`].
//!
//! Locks: the network's is taken for scheduling only; packets are delivered and filters run without it. Order: a queue
//! pair's send lock, then what [`sw`](crate::sw) says.

mod config;
mod device;
mod net;
mod qp;
#[cfg(test)]
mod tests;
mod trace;

pub use config::{Faults, Mac, NodeId, SimConfig};
pub use device::{AhScript, SimAh, SimDevice, SimLive};
pub use net::SimNet;
pub use qp::SimQp;
pub use trace::{PacketTap, PayloadFormatter, TappedPacket, TraceEntry, TraceEvent};
