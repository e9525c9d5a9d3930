//! The UD engine: the protocol without any I/O.
//!
//! ```text
//!   user calls         begin_send ─ commit_send   flush   connect_*   destroy
//!                              │                    │         │          │
//!   packets  ── handle_packet ─┤                                         │
//!   clock    ── handle_timeout ┼────────►  Engine  ◄─────────────────────┘
//!   QP       ── handle_tx_done ┘             │
//!                                            ├──► poll_transmit   control packets and resends, ready to be posted
//!                                            ├──► poll_held       messages that arrived early and are in order now
//!                                            ├──► poll_event      completions, failures, requests to the glue
//!                                            └──► poll_timeout    when to come back
//! ```
//!
//! The engine decides everything about connections, order, acknowledgement, loss and the end of endpoints. It has no clock,
//! lock, socket, thread or callback: the same calls give the same packets on every machine, and tests run hours of protocol
//! in milliseconds. `docs/ud-protocol.md` describes the protocol; the wire format is that of UCX's `ud_verbs`, with
//! extensions that only peers of ours ever see.
//!
//! Start reading at [`Engine`] for the tables, `recv` for a packet's way in, `send` and `sched` for the two ways out; then
//! `conn` (handshake), `ack` and `resend` (reliability), `timer`, `close` (destroy, linger, BYE, failure), `budget`.

#![forbid(unsafe_code)]

mod ack;
mod budget;
mod close;
mod config;
mod conn;
mod describe;
mod engine;
mod ep;
mod event;
mod held;
mod packet;
mod psn;
mod recv;
mod resend;
mod sched;
mod send;
mod slab;
mod stats;
mod timer;
mod wire;

#[cfg(test)]
mod tests;

pub use config::{EngineConfig, ExtCaps, Features, PeerCaps};
pub use describe::{Describe, describe};
pub use engine::Engine;
pub use ep::EpId;
pub use event::{
    Begun, ConnectOutcome, CreqInfo, CreqOutcome, EpStateView, Event, FailDetail, FlushOutcome, Outstanding, Refused,
    RxMeta, RxVerdict, SendKind, Transmit, TransmitKind,
};
pub use stats::{DropReason, EngineStats};
