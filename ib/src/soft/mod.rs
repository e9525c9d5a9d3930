//! The soft device: RoCEv2 UD from an ordinary process, over one UDP socket.
//!
//! On the wire it is the same as the kernel's soft-RoCE, so the two can talk; it needs no privilege, no kernel module and
//! no system package.
//!
//! ```text
//!  post_send ──> frame built in place ──> runs of equal (destination, size) ──ring()──> sendto | sendmsg+GSO | sendmmsg
//!                                                                                            │
//!  poll_recv <── CQ <── GRH, payload <── queue pair by QPN <── parse, ICRC <── split <── recvmsg+GRO | recvmmsg
//! ```
pub mod config;
pub mod epoll;
pub mod frame;
pub mod icrc;
pub mod netdev;
pub mod pcap;
pub mod sockaddr;
pub mod socket;
