//! The transport-neutral API of a messaging layer: what UCX's UCT is in C.
//!
//! ```text
//! Registry ── Component ── Md (memory domain: one device, registers memory)
//!                           │
//! Worker (progress domain) ─┴─ Iface (transport + device port: queues, handlers) ── Ep (one peer)
//! ```
//!
//! Start reading at [`ep`] (operations), then [`iface`] (limits, handlers, events) and [`worker`] (progress).
//!
//! # Rules for callbacks
//!
//! 1. No user code runs while a lock of the library is held: handlers, completions, pack closures, pending requests and
//!    error handlers may send, connect, destroy, and call `progress` (which then moves the network, but calls nothing).
//! 2. Dropping any object in any order, also inside a callback, is safe: children keep what they need of their parents.
//! 3. Every accepted operation has exactly one completion: success, the error, or `Canceled`.
//! 4. Every queued pending request runs until it says `Done`, comes back from a purge, or is dropped with its endpoint.
//! 5. A kept receive descriptor outlives its interface.
//!
//! A process that forks: see [`fork`].
#![deny(missing_docs)]
#![deny(unsafe_code)]

pub mod am;
pub mod completion;
pub mod config;
pub mod ep;
pub mod error;
mod eventfd;
pub mod fork;
#[cfg(any(test, uct_fuzz))]
pub mod fuzz;
pub mod iface;
pub mod log;
pub mod md;
pub mod mem;
pub mod resource;
#[doc(hidden)]
pub mod sync;
pub mod time;
pub mod worker;

pub use am::{AmDesc, AmId, AmMessage};
pub use completion::{Completion, CompletionStatus};
pub use ep::{Endpoint, Ep, EpParams, FailureAction, FlushMode, PendingStatus, Posted};
pub use error::{Blame, Error, ErrorKind, Result, Scope, SendError, SendResult};
pub use eventfd::EventFd;
pub use iface::{Iface, IfaceAttr, IfaceParams, Interface};
pub use md::{Md, Registry};
pub use mem::{MemRegion, MemSlice};
pub use time::{Clock, Time};
pub use worker::{Worker, WorkerParams};
