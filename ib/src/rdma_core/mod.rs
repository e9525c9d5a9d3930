//! Devices of libibverbs: RDMA NICs, and the kernel's soft-RoCE (`rdma_rxe`). With the cargo feature `rdma-core`.
//!
//! Start reading at [`RdmaDevice`]. [`devices`] lists what there is, quietly: why a device cannot be used is part of the
//! list. What is particular about these devices:
//!
//! - Creating an address handle can sleep for a second, see [`RdmaDevice`]; it never happens on a progress path.
//! - The device reads what is posted after `post_send` has returned, unless it was posted inline. It reads and writes
//!   registered memory only, which is held by the registration; receive buffers are owned by the queue pair while posted.
//! - An address handle holds the link address it was resolved to. [`watch()`] follows neighbours and routes, so that the
//!   cache makes new ones when that has changed.
//! - A message above the port's MTU is the provider's to refuse: soft-RoCE drops it and reports success, others may put the
//!   queue pair into the ERROR state.
//! - `wc.sl` is never looked at: providers disagree about what it holds. Whether a packet came by IPv4 or IPv6 is told by
//!   the GRH flag and by the GRH area itself.
//! - After a fatal event every call fails with `EIO`, destroying included; what was held is given back all the same. That the
//!   device is being removed counts as one, also if its driver does not tell: who removes it may be waiting for us.
//!
//! Where `unsafe` is: `ffi` (what the bindings lack), `handles` (owners of verbs objects), `removal` (a socket) and the two
//! calls of the data path in `post` and `qp`. Everything that only converts values is safe code and tested without a device.

mod attr;
mod device;
mod ffi;
mod gids;
mod handles;
mod list;
mod post;
mod qp;
mod removal;
mod slab;
mod warm;
mod watch;

#[cfg(test)]
mod tests;

pub use device::{RdmaAh, RdmaDevice};
pub use list::{FoundDevice, devices, init_fork};
pub use qp::RdmaQp;
#[cfg(any(test, uct_fuzz))]
pub use watch::fuzz::netlink as netlink_fuzz;
pub use watch::watch;
