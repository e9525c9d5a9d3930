//! [`Socket`]: the netlink socket, subscribed to what changes about neighbours and routes.

use std::{
    io,
    os::fd::{AsRawFd, RawFd},
};

use netlink_sys::{SocketAddr, protocols::NETLINK_ROUTE};

use super::message::{Item, parse};

/// The longest datagram. The kernel makes none above 32 KiB for a dump; a route with hundreds of gateways is as long.
const DATAGRAM_MAX: usize = 64 << 10;
/// Asked of the kernel for events that wait; it gives less where `net.core.rmem_max` is less.
const BUFFER_LEN: libc::c_int = 1 << 20;

const GROUPS: [u32; 8] = [
    libc::RTNLGRP_NEIGH,
    libc::RTNLGRP_IPV4_ROUTE,
    libc::RTNLGRP_IPV6_ROUTE,
    libc::RTNLGRP_IPV4_RULE,
    libc::RTNLGRP_IPV6_RULE,
    // When an interface goes down, its IPv4 routes go without a word of their own.
    libc::RTNLGRP_LINK,
    libc::RTNLGRP_IPV4_IFADDR,
    libc::RTNLGRP_IPV6_IFADDR,
];

/// What reading came to.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) enum Read {
    /// A datagram; there may be more.
    Some,
    /// Nothing is there.
    Nothing,
    /// The kernel had more to tell than the socket could hold, and has thrown it away.
    Lost,
}

pub(super) struct Socket {
    inner: netlink_sys::Socket,
    port: u32,
    buf: Vec<u8>,
}

impl Socket {
    /// Opens the socket; events wait in it from now on.
    pub(super) fn open() -> io::Result<Socket> {
        let mut inner = netlink_sys::Socket::new(NETLINK_ROUTE)?;
        inner.set_non_blocking(true)?;
        // A wish only.
        let _ = inner.set_rx_buf_sz(BUFFER_LEN);
        let port = inner.bind_auto()?.port_number();
        for group in GROUPS {
            inner.add_membership(group)?;
        }
        // Kernels before 5.3 have no such objects.
        let _ = inner.add_membership(libc::RTNLGRP_NEXTHOP);
        Ok(Socket { inner, port, buf: vec![0; DATAGRAM_MAX] })
    }

    pub(super) fn fd(&self) -> RawFd {
        self.inner.as_raw_fd()
    }

    /// Reads one datagram and appends what it says to `out`.
    pub(super) fn read(&mut self, out: &mut Vec<Item>) -> io::Result<Read> {
        let mut room = self.buf.as_mut_slice();
        match self.inner.recv_from(&mut room, libc::MSG_TRUNC) {
            // From another process: nobody has any business here.
            Ok((_, from)) if from.port_number() != 0 => Ok(Read::Some),
            Ok((len, _)) => match self.buf.get(..len) {
                Some(bytes) => {
                    parse(bytes, self.port, out);
                    Ok(Read::Some)
                }
                None => Ok(Read::Lost),
            },
            Err(e) => match e.raw_os_error() {
                Some(libc::EAGAIN) => Ok(Read::Nothing),
                Some(libc::EINTR) => Ok(Read::Some),
                Some(libc::ENOBUFS) => Ok(Read::Lost),
                _ => Err(e),
            },
        }
    }

    /// Sends a request to the kernel, which acts on it before this returns.
    pub(super) fn send(&self, bytes: &[u8]) -> io::Result<()> {
        self.inner.send_to(bytes, &SocketAddr::new(0, 0), 0).map(drop)
    }
}
