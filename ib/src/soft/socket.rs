//! The UDP socket of a soft device: every system call of its data path.
//!
//! The socket is unconnected, bound to one specific address and has path MTU discovery in PROBE mode: only then does the
//! kernel send every datagram with DF and Identification 0 (segment *i* of a GSO send has ID *i*), which the sender must
//! know to compute an ICRC. It never blocks. UDP checksums stay on: receive coalescing skips datagrams without one.
//!
//! `unsafe` is here for the system calls alone; the rules its blocks cite:
//!
//! - **K1** Every pointer handed to the kernel comes from a reference that lives until the call returns, with the length
//!   of what it points to; the kernel keeps none of them.
//! - **K2** Plain-data structures of C are valid when all their bytes are zero.
#![allow(unsafe_code)]

use std::{
    mem::{size_of, zeroed},
    net::SocketAddr,
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
};

use super::sockaddr::{Control, SockAddr};

/// The largest datagram, and so the size of a receive slot.
pub const DATAGRAM_MAX: usize = 65536;
/// The most payload that one GSO send takes on IPv4.
pub const SEND_MAX: usize = 65507;
/// How many datagrams one system call sends or receives at most.
pub const CALL_MAX: usize = 16;

/// `UDP_NO_CHECK6_RX`; the libc crate does not have it.
const UDP_NO_CHECK6_RX: i32 = 102;

/// A system call that failed.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct SysError {
    /// The call.
    pub call: &'static str,
    /// Its errno.
    pub errno: i32,
}

pub(crate) fn last_errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

fn check(call: &'static str, rc: i32) -> Result<i32, SysError> {
    if rc < 0 { Err(SysError { call, errno: last_errno() }) } else { Ok(rc) }
}

/// One datagram, or one run of equal segments, to send.
#[derive(Copy, Clone, Debug)]
pub struct Outgoing<'a> {
    /// Where to.
    pub to: &'a SockAddr,
    /// The payload; all segments in a row, the last one may be shorter.
    pub bytes: &'a [u8],
    /// Length of a segment; 0 if `bytes` is one datagram.
    pub segment: u16,
    /// TOS or traffic class.
    pub tos: u8,
}

/// Room for one receive.
pub struct Slot {
    /// The bytes; `len` of them are of the last datagram.
    pub buf: Box<[u8]>,
    /// Its length; larger than the buffer's if it was cut.
    pub len: usize,
    /// Where it came from.
    pub from: SockAddr,
    /// Length of a segment if the kernel coalesced several, else 0.
    pub segment: usize,
    /// The socket's count of datagrams lost for want of room, if the kernel told.
    pub overflow: Option<u32>,
    control: Control,
}

impl Slot {
    /// An empty slot for the largest datagram.
    pub fn new() -> Slot {
        Slot {
            buf: vec![0; DATAGRAM_MAX].into_boxed_slice(),
            len: 0,
            from: SockAddr::UNSPECIFIED,
            segment: 0,
            overflow: None,
            control: Control::EMPTY,
        }
    }

    fn filled(&mut self, len: usize, control_len: usize) {
        self.control.set_len(control_len);
        self.len = len;
        let (mut segment, mut overflow) = (0, None);
        self.control.for_each_u32(|level, kind, value| match (level, kind) {
            (libc::SOL_UDP, libc::UDP_GRO) => segment = value as usize,
            (libc::SOL_SOCKET, libc::SO_RXQ_OVFL) => overflow = Some(value),
            _ => {}
        });
        self.segment = segment;
        self.overflow = overflow;
    }
}

impl Default for Slot {
    fn default() -> Self {
        Slot::new()
    }
}

/// See the module.
#[derive(Debug)]
pub struct UdpSocket {
    fd: OwnedFd,
    ipv6: bool,
}

impl UdpSocket {
    /// Binds a socket to a specific address; port 0 takes any.
    ///
    /// # Errors
    /// Those of `socket`, `setsockopt` and `bind`.
    pub fn bind(addr: SocketAddr) -> Result<UdpSocket, SysError> {
        let ipv6 = addr.is_ipv6();
        let family = if ipv6 { libc::AF_INET6 } else { libc::AF_INET };
        // SAFETY: no pointers.
        let rc = unsafe { libc::socket(family, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, 0) };
        let fd = check("socket", rc)?;
        // SAFETY: a new fd that nobody else owns.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let s = UdpSocket { fd, ipv6 };
        if ipv6 {
            s.set(libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 1)?;
            s.set(libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_PROBE)?;
            // Kernel soft-RoCE sends without UDP checksum on IPv6, too.
            s.set(libc::SOL_UDP, UDP_NO_CHECK6_RX, 1)?;
        } else {
            s.set(libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE)?;
        }
        s.set(libc::SOL_SOCKET, libc::SO_RXQ_OVFL, 1)?;
        let sa = SockAddr::from(addr);
        // SAFETY: K1.
        check("bind", unsafe { libc::bind(s.raw(), sa.as_ptr().cast(), sa.len() as libc::socklen_t) })?;
        Ok(s)
    }

    fn raw(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    fn set(&self, level: i32, option: i32, value: i32) -> Result<(), SysError> {
        let len = size_of::<i32>() as libc::socklen_t;
        // SAFETY: K1.
        let rc = unsafe { libc::setsockopt(self.raw(), level, option, (&raw const value).cast(), len) };
        check("setsockopt", rc).map(|_| ())
    }

    fn get(&self, level: i32, option: i32) -> Result<i32, SysError> {
        let mut value = 0i32;
        let mut len = size_of::<i32>() as libc::socklen_t;
        // SAFETY: K1.
        let rc = unsafe { libc::getsockopt(self.raw(), level, option, (&raw mut value).cast(), &raw mut len) };
        check("getsockopt", rc).map(|_| value)
    }

    /// The bound address.
    ///
    /// # Errors
    /// Those of `getsockname`.
    pub fn local_addr(&self) -> Result<SocketAddr, SysError> {
        let mut sa = SockAddr::UNSPECIFIED;
        let mut len = SockAddr::CAPACITY as libc::socklen_t;
        // SAFETY: K1.
        let rc = unsafe { libc::getsockname(self.raw(), sa.as_mut_ptr().cast(), &raw mut len) };
        check("getsockname", rc)?;
        sa.to_std().ok_or(SysError { call: "getsockname", errno: libc::EAFNOSUPPORT })
    }

    /// Asks the kernel to coalesce equal datagrams of one sender into one receive.
    ///
    /// # Errors
    /// Those of `setsockopt`; kernels before 5.0 refuse.
    pub fn enable_gro(&self) -> Result<(), SysError> {
        self.set(libc::SOL_UDP, libc::UDP_GRO, 1)
    }

    /// Without checksums the kernel refuses to segment: for tests of that case.
    #[cfg(test)]
    pub(super) fn disable_checksums(&self) {
        self.set(libc::SOL_SOCKET, libc::SO_NO_CHECK, 1).unwrap();
    }

    /// Asks for `bytes` of receive memory, counted as the kernel counts, and returns what is in force. With
    /// `CAP_NET_ADMIN` the limit `net.core.rmem_max` does not apply.
    ///
    /// # Errors
    /// Those of `getsockopt`.
    pub fn set_receive_memory(&self, bytes: usize) -> Result<usize, SysError> {
        self.set_memory(libc::SO_RCVBUFFORCE, libc::SO_RCVBUF, bytes)
    }

    /// As [`UdpSocket::set_receive_memory`], for sends.
    ///
    /// # Errors
    /// Those of `getsockopt`.
    pub fn set_send_memory(&self, bytes: usize) -> Result<usize, SysError> {
        self.set_memory(libc::SO_SNDBUFFORCE, libc::SO_SNDBUF, bytes)
    }

    fn set_memory(&self, force: i32, plain: i32, bytes: usize) -> Result<usize, SysError> {
        // The kernel doubles the value to make room for its own overhead.
        let half = i32::try_from(bytes / 2).unwrap_or(i32::MAX / 2);
        if self.set(libc::SOL_SOCKET, force, half).is_err() {
            // Never fails for being too large: the kernel lowers it to its limit.
            let _ = self.set(libc::SOL_SOCKET, plain, half);
        }
        self.get(libc::SOL_SOCKET, plain).map(|n| usize::try_from(n).unwrap_or(0))
    }

    /// Sends one datagram of the default TOS: the shortest way to the wire.
    ///
    /// # Errors
    /// The errno.
    pub fn send(&self, to: &SockAddr, bytes: &[u8]) -> Result<(), i32> {
        // SAFETY: K1.
        let rc = unsafe {
            libc::sendto(
                self.raw(),
                bytes.as_ptr().cast(),
                bytes.len(),
                libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
                to.as_ptr().cast(),
                to.len() as libc::socklen_t,
            )
        };
        if rc < 0 { Err(last_errno()) } else { Ok(()) }
    }

    fn control_of(&self, m: &Outgoing<'_>, control: &mut Control) {
        if m.segment != 0 {
            control.push(libc::SOL_UDP, libc::UDP_SEGMENT, &m.segment.to_ne_bytes());
        }
        if m.tos != 0 {
            let (level, kind) =
                if self.ipv6 { (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) } else { (libc::IPPROTO_IP, libc::IP_TOS) };
            control.push(level, kind, &i32::from(m.tos).to_ne_bytes());
        }
    }

    /// Sends one datagram or one run of segments.
    ///
    /// # Errors
    /// The errno. For a run also what a kernel or route without GSO says (`EINVAL`, `EIO`).
    pub fn send_run(&self, m: &Outgoing<'_>) -> Result<(), i32> {
        let mut control = Control::EMPTY;
        self.control_of(m, &mut control);
        let mut iov = iovec_of(m.bytes);
        let header = header_of(m, &mut iov, &control);
        // SAFETY: K1: `header` points to `m`, `iov` and `control`, all alive.
        let rc = unsafe { libc::sendmsg(self.raw(), &raw const header, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
        if rc < 0 { Err(last_errno()) } else { Ok(()) }
    }

    /// Sends up to [`CALL_MAX`] datagrams or runs by one call and returns how many left.
    ///
    /// # Errors
    /// The errno of the first one, if not even that left.
    pub fn send_many(&self, messages: &[Outgoing<'_>]) -> Result<usize, i32> {
        let messages = &messages[..messages.len().min(CALL_MAX)];
        let mut controls = [const { Control::EMPTY }; CALL_MAX];
        let mut iovs = [iovec_of(&[]); CALL_MAX];
        // SAFETY: K2.
        let mut headers: [libc::mmsghdr; CALL_MAX] = unsafe { zeroed() };
        for (i, m) in messages.iter().enumerate() {
            self.control_of(m, &mut controls[i]);
            iovs[i] = iovec_of(m.bytes);
            headers[i].msg_hdr = header_of(m, &mut iovs[i], &controls[i]);
        }
        // SAFETY: K1: the first `messages.len()` headers point to locals and to `messages`, all alive.
        let rc = unsafe {
            libc::sendmmsg(
                self.raw(),
                headers.as_mut_ptr(),
                messages.len() as libc::c_uint,
                libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
            )
        };
        if rc < 0 { Err(last_errno()) } else { Ok(rc as usize) }
    }

    /// Fills slots with what has arrived and returns how many; 0 if nothing has. Takes one datagram per slot, at most
    /// [`CALL_MAX`].
    ///
    /// # Errors
    /// The errno, other than `EAGAIN`.
    pub fn receive(&self, slots: &mut [Slot]) -> Result<usize, i32> {
        match slots {
            [] => Ok(0),
            [slot] => self.receive_one(slot),
            _ => self.receive_many(slots),
        }
    }

    fn receive_one(&self, slot: &mut Slot) -> Result<usize, i32> {
        let mut iov = iovec_of_mut(&mut slot.buf);
        let mut header = receive_header_of(&mut slot.from, &mut iov, &mut slot.control);
        // MSG_TRUNC makes the answer the datagram's own length: a cut one is then recognised.
        // SAFETY: K1: `header` points into `slot` and to `iov`, both alive.
        let rc = unsafe { libc::recvmsg(self.raw(), &raw mut header, libc::MSG_DONTWAIT | libc::MSG_TRUNC) };
        if rc < 0 {
            return nothing_if_empty(last_errno());
        }
        slot.filled(rc as usize, header.msg_controllen);
        Ok(1)
    }

    fn receive_many(&self, slots: &mut [Slot]) -> Result<usize, i32> {
        let count = slots.len().min(CALL_MAX);
        let mut iovs = [iovec_of(&[]); CALL_MAX];
        // SAFETY: K2.
        let mut headers: [libc::mmsghdr; CALL_MAX] = unsafe { zeroed() };
        for ((slot, iov), header) in slots.iter_mut().zip(&mut iovs).zip(&mut headers) {
            *iov = iovec_of_mut(&mut slot.buf);
            header.msg_hdr = receive_header_of(&mut slot.from, iov, &mut slot.control);
        }
        // SAFETY: K1: the first `count` headers point into `slots` and `iovs`, both alive. No time-out.
        let rc = unsafe {
            libc::recvmmsg(
                self.raw(),
                headers.as_mut_ptr(),
                count as libc::c_uint,
                libc::MSG_DONTWAIT | libc::MSG_TRUNC,
                std::ptr::null_mut(),
            )
        };
        if rc < 0 {
            return nothing_if_empty(last_errno());
        }
        let got = (rc as usize).min(count);
        for (slot, header) in slots.iter_mut().zip(&headers).take(got) {
            slot.filled(header.msg_len as usize, header.msg_hdr.msg_controllen);
        }
        Ok(got)
    }

    /// True if something waits to be received.
    pub fn is_readable(&self) -> bool {
        let mut p = libc::pollfd { fd: self.raw(), events: libc::POLLIN, revents: 0 };
        // SAFETY: K1; a time-out of 0 never waits.
        let rc = unsafe { libc::poll(&raw mut p, 1, 0) };
        rc > 0 && p.revents & libc::POLLIN != 0
    }
}

impl AsRawFd for UdpSocket {
    fn as_raw_fd(&self) -> RawFd {
        self.raw()
    }
}

fn nothing_if_empty(errno: i32) -> Result<usize, i32> {
    // Linux has one value for EAGAIN and EWOULDBLOCK.
    if errno == libc::EAGAIN || errno == libc::EINTR { Ok(0) } else { Err(errno) }
}

fn iovec_of(bytes: &[u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
}

fn iovec_of_mut(bytes: &mut [u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }
}

fn empty_header() -> libc::msghdr {
    // SAFETY: K2.
    unsafe { zeroed() }
}

fn header_of(m: &Outgoing<'_>, iov: &mut libc::iovec, control: &Control) -> libc::msghdr {
    let mut h = empty_header();
    h.msg_name = m.to.as_ptr().cast_mut().cast();
    h.msg_namelen = m.to.len() as libc::socklen_t;
    h.msg_iov = iov;
    h.msg_iovlen = 1;
    if control.len() != 0 {
        h.msg_control = control.as_ptr().cast_mut().cast();
        h.msg_controllen = control.len() as _;
    }
    h
}

fn receive_header_of(from: &mut SockAddr, iov: &mut libc::iovec, control: &mut Control) -> libc::msghdr {
    let mut h = empty_header();
    h.msg_name = from.as_mut_ptr().cast();
    h.msg_namelen = SockAddr::CAPACITY as libc::socklen_t;
    h.msg_iov = iov;
    h.msg_iovlen = 1;
    h.msg_control = control.as_mut_ptr().cast();
    h.msg_controllen = Control::CAPACITY as _;
    h
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(a: &str, b: &str) -> (UdpSocket, UdpSocket, SockAddr) {
        let a = UdpSocket::bind(a.parse().unwrap()).unwrap();
        let b = UdpSocket::bind(b.parse().unwrap()).unwrap();
        let to = b.local_addr().unwrap().into();
        (a, b, to)
    }

    #[test]
    fn single_and_many_datagrams_arrive() {
        for addr in ["127.0.0.1:0", "[::1]:0"] {
            let (a, b, to) = pair(addr, addr);
            let mut slots = [Slot::new(), Slot::new(), Slot::new()];
            assert_eq!(b.receive(&mut slots), Ok(0));
            assert!(!b.is_readable());
            a.send(&to, b"one").unwrap();
            assert!(b.is_readable());
            assert_eq!(b.receive(&mut slots[..1]), Ok(1));
            assert_eq!(&slots[0].buf[..slots[0].len], b"one");
            assert_eq!(slots[0].from.to_std(), Some(a.local_addr().unwrap()));
            let m = |bytes| Outgoing { to: &to, bytes, segment: 0, tos: 0x20 };
            assert_eq!(a.send_many(&[m(b"a"), m(b"bc")]), Ok(2));
            assert_eq!(b.receive(&mut slots), Ok(2));
            assert_eq!((slots[0].len, slots[1].len, slots[1].segment), (1, 2, 0));
        }
    }

    #[test]
    fn a_run_of_segments_arrives_whole_with_gro_and_apart_without() {
        let (a, b, to) = pair("127.0.0.1:0", "127.0.0.1:0");
        let mut slots = [Slot::new(), Slot::new(), Slot::new(), Slot::new()];
        let run = Outgoing { to: &to, bytes: &[7; 100], segment: 40, tos: 0 };
        a.send_run(&run).unwrap();
        assert_eq!(b.receive(&mut slots), Ok(3));
        assert_eq!([slots[0].len, slots[1].len, slots[2].len], [40, 40, 20]);
        b.enable_gro().unwrap();
        a.send_run(&run).unwrap();
        assert_eq!(b.receive(&mut slots), Ok(1));
        assert_eq!((slots[0].len, slots[0].segment), (100, 40));
    }

    #[test]
    fn errors_carry_the_errno() {
        let a = UdpSocket::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let taken = a.local_addr().unwrap();
        let e = UdpSocket::bind(taken).unwrap_err();
        assert_eq!((e.call, e.errno), ("bind", libc::EADDRINUSE));
        let to = SockAddr::from(taken);
        assert_eq!(a.send(&to, &[0; 65508]), Err(libc::EMSGSIZE));
        let v6 = SockAddr::from("[::1]:9".parse::<SocketAddr>().unwrap());
        assert!(a.send(&v6, &[0]).is_err());
    }

    #[test]
    fn receive_memory_is_read_back() {
        let a = UdpSocket::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        assert_eq!(a.set_receive_memory(100_000).unwrap(), 100_000);
    }
}
