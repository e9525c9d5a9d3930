//! The UD transport: reliable, ordered active messages over unreliable datagrams, wire-compatible with UCX's `ud_verbs`.
//!
//! ```text
//!  uct::Ep ──► ep.rs ──┐ lock                         ┌──► proto: the protocol engine, without I/O
//!  uct::Iface ► iface.rs├────► core.rs: State ► live.rs┼──► tx.rs: queue pair, credits, serials
//!  uct::Worker ► progress.rs ┘        │               └──► pools.rs: buffers
//!                                     └─ unlock ─► deliver.rs: handlers, completions, failures
//! ```
//!
//! Start reading at [`proto`] for the protocol, at `progress.rs` for the loop that moves everything, and at `live.rs` for
//! what happens in it. An endpoint's address handle lives in the engine's record of the endpoint: it can be replaced,
//! never taken, and goes when the record is freed after the linger period.
#![deny(missing_docs)]
#![deny(unsafe_code)]

pub mod config;
mod core;
mod counters;
mod deliver;
mod ep;
mod gids;
mod iface;
mod live;
#[cfg(all(test, uct_loom))]
mod loom;
mod op;
mod pending;
mod pools;
mod port;
mod progress;
pub mod proto;
#[cfg(test)]
mod sizes;
mod transport;
mod tx;
mod wake;

pub use config::UdConfig;
pub use iface::{TRANSPORT, Tuning, open};
pub use transport::{register, worker_params};
