//! The soft device: RoCEv2 UD from an ordinary process, over one UDP socket. Start reading at [`SoftDevice`].
//!
//! On the wire it is the same as the kernel's soft-RoCE, so the two can talk; it needs no privilege, no kernel module and
//! no system package.
//!
//! ```text
//!  post_send ──> frame built in place ──> runs of equal (destination, size) ──ring()──> sendto | sendmsg+GSO | sendmmsg
//!                                                                                            │
//!  poll_recv <── CQ <── GRH, payload <── queue pair by QPN <── parse, ICRC <── split <── recvmsg+GRO | recvmmsg
//! ```
//!
//! | module | what it knows |
//! |---|---|
//! | [`frame`], [`icrc`] | bytes on the wire; pure functions |
//! | [`socket`], [`sockaddr`] | system calls of the data path |
//! | `tx`, `rx` | runs of frames out, runs of frames in |
//! | `device`, `qp` | the [`Device`](crate::device::Device) contract, on top of [`sw`](crate::sw) |
//! | [`config`], `open`, [`netdev`] | where to bind, and what to say if that does not work |
//! | [`pcap`] | capture files |
//!
//! All queue pairs of a device share its socket. Whoever polls drains it, for everybody: the receive lock is only ever
//! tried, and packets of other queue pairs go straight to their completion queues. What a caller may rely on beyond the
//! contract: sends are copied when posted and complete at once; a message too long for its receive is dropped and
//! counted; of the posted receives the newest is filled first, because it is the one in the cache; and while there is one
//! queue pair, packets wait in the socket for a receive to be posted.

pub mod config;
mod device;
pub mod epoll;
pub mod frame;
pub mod icrc;
pub mod netdev;
mod open;
pub mod pcap;
mod qp;
mod rx;
pub mod sockaddr;
pub mod socket;
mod tx;

pub use config::{SoftBind, SoftConfig};
pub use device::{SoftAh, SoftDevice, WireStats};
pub use qp::SoftQp;
