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
//! Two engines, joined by hand:
//!
//! ```
//! use uct::Time;
//! use ud::proto::*;
//!
//! type Side = Engine<&'static str, u8, (), ()>; // operations are words, addresses small numbers, links nothing
//!
//! /// Carries what `from` has to say to `to`, until it is silent.
//! fn carry(from: &mut Side, to: &mut Side, from_addr: u8, now: Time) {
//!     let meta = RxMeta { src_qpn: from.config().local_qpn, can_deliver: true };
//!     while let Some(Transmit { kind: TransmitKind::Control { bytes }, .. }) = from.poll_transmit(now, 1) {
//!         if let RxVerdict::Creq(info) = to.handle_packet(now, &meta, bytes) {
//!             to.handle_creq(now, info, from_addr, PeerCaps { max_packet: 4096, ext: None });
//!         }
//!         while let Some(event) = to.poll_event() {
//!             if let Event::Resolve { ep, .. } = event {
//!                 to.resolved(now, ep, Ok(()));
//!             }
//!         }
//!     }
//! }
//!
//! let now = Time::ZERO;
//! let side = |qpn| Side::new(EngineConfig { local_qpn: qpn, device_addr: vec![0], ..EngineConfig::default() }).unwrap();
//! let (mut a, mut b) = (side(1), side(2));
//! let (ep, _) = a.connect_to_iface(now, 20, 2, 0, PeerCaps { max_packet: 4096, ext: None }).unwrap();
//! a.resolved(now, ep, Ok(()));
//! carry(&mut a, &mut b, 10, now); // CREQ
//! carry(&mut b, &mut a, 20, now); // CREP
//! assert!(a.is_connected(ep));
//!
//! let begun = a.begin_send(ep, 7, 5, SendKind::Copy, false).unwrap();
//! let packet = [&begun.neth[..], b"hello"].concat(); // this is what is posted
//! a.commit_send(now, begun, 2, "the operation");
//! let verdict = b.handle_packet(now, &RxMeta { src_qpn: 1, can_deliver: true }, &packet);
//! assert!(matches!(verdict, RxVerdict::Deliver { am_id: 7, .. }));
//! ```
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

#[cfg(any(all(test, not(uct_loom)), uct_fuzz))]
mod tests;
#[cfg(any(all(test, not(uct_loom)), uct_fuzz))]
pub use tests::fuzz;

pub use config::{EngineConfig, ExtCaps, Features, PeerCaps};
pub use describe::{Describe, describe};
pub use engine::Engine;
pub(crate) use engine::rare;
pub use ep::EpId;
pub use event::{
    Begun, ConnectOutcome, CreqInfo, CreqOutcome, EpStateView, Event, FailDetail, FlushOutcome, Outstanding, Refused,
    RxMeta, RxVerdict, SendKind, Transmit, TransmitKind,
};
pub use packet::Settle;
pub use stats::{DropReason, EngineStats};

/// Bytes of an endpoint's record and of a packet's place in its send list.
#[cfg(test)]
pub(crate) fn record_sizes<T, L, R>() -> (usize, usize) {
    (size_of::<ep::Ep<L, R>>(), size_of::<packet::Packet<T>>())
}
