//! What the software devices share: the verbs semantics of UD queue pairs, without a wire.
//!
//! [`soft`](crate::soft) puts these parts on a UDP socket, [`sim`](crate::sim) on a simulated network. Start reading at
//! [`QpCore`]: it joins the others to one queue pair.
//!
//! ```text
//!   post_send -> SendQueue::admit  --- wire ---  QpTable::get -> QpCore::rx -> RxGuard::deliver -> poll_recv
//!                  |        |                                                     |
//!               MrTable  PortState (GIDs, MTU)                          posted Buf + GRH + payload
//! ```
//!
//! | part | what it decides |
//! |---|---|
//! | [`MrTable`] | which bytes the device may touch |
//! | [`SendQueue`] | limits, serials, completions and flush of the send side |
//! | [`QpCore`], [`RxGuard`] | key checks, posted buffers, completions and flush of the receive side; arming |
//! | [`QpTable`] | queue pair numbers |
//! | [`PortState`], [`GidRef`] | port attributes, the GID table, async events |
//! | [`Counters`], [`DropReason`] | every silent drop, by reason |
//! | [`FilterSlot`] | hooks on packets, for tests |
//!
//! Locks, in the order in which they may be taken: a device's own receive lock, then the receive lock of one queue pair
//! ([`QpCore::rx`]), then the tables ([`QpTable`], [`MrTable`], [`PortState`]). No two receive locks of queue pairs are
//! held at once unless a device lock above both is held too. None is held over a system call that may sleep.

mod counters;
pub(crate) mod event;
mod filter;
pub mod grh;
mod mr;
mod port;
mod qp;
mod rng;
mod send;
mod table;
#[cfg(test)]
mod tests;

pub use counters::{Counters, DropReason, Stats};
pub use event::Notifier;
pub use filter::{Filter, FilterSlot, FilterVerdict, Injector, OwnedPacket, PacketMeta, PacketView, Passed};
pub use mr::{MrCache, MrTable};
pub use port::{AsyncQueue, GidRef, PortConfig, PortState};
pub use qp::{Datagram, LongMessage, QpCore, RxGuard};
pub use rng::{Rng, entropy};
pub use send::{Admit, SendEnv, SendLimits, SendQueue};
pub use table::QpTable;
