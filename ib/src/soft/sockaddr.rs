//! Socket addresses and control messages in the kernel's layout, built and read without `unsafe`.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6},
};

/// Bytes of a `sockaddr_in`.
const V4_LEN: usize = 16;
/// Bytes of a `sockaddr_in6`.
const V6_LEN: usize = 28;

/// A `sockaddr_in` or `sockaddr_in6`, as bytes.
#[derive(Copy, Clone, PartialEq, Eq, Hash)]
#[repr(C, align(8))]
pub struct SockAddr([u8; SockAddr::CAPACITY]);

impl SockAddr {
    /// Room for either family.
    pub const CAPACITY: usize = 32;
    /// No address: what a slot holds before the kernel fills it in.
    pub const UNSPECIFIED: SockAddr = SockAddr([0; Self::CAPACITY]);

    fn family(&self) -> i32 {
        i32::from(u16::from_ne_bytes([self.0[0], self.0[1]]))
    }

    /// The length that the kernel wants for this family.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        if self.family() == libc::AF_INET { V4_LEN } else { V6_LEN }
    }

    /// The bytes, for the kernel to read.
    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.0.as_ptr()
    }

    /// The bytes, for the kernel to write.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.0.as_mut_ptr()
    }

    /// The address, or `None` if the family is neither IPv4 nor IPv6.
    pub fn to_std(&self) -> Option<SocketAddr> {
        let b = &self.0;
        let port = u16::from_be_bytes([b[2], b[3]]);
        match self.family() {
            libc::AF_INET => Some(SocketAddr::new(IpAddr::V4(Ipv4Addr::new(b[4], b[5], b[6], b[7])), port)),
            libc::AF_INET6 => {
                let mut ip = [0; 16];
                ip.copy_from_slice(&b[8..24]);
                let scope = u32::from_ne_bytes([b[24], b[25], b[26], b[27]]);
                Some(SocketAddr::V6(SocketAddrV6::new(Ipv6Addr::from(ip), port, 0, scope)))
            }
            _ => None,
        }
    }
}

impl From<SocketAddr> for SockAddr {
    fn from(a: SocketAddr) -> Self {
        let mut b = [0; Self::CAPACITY];
        b[2..4].copy_from_slice(&a.port().to_be_bytes());
        let family = match a {
            SocketAddr::V4(a) => {
                b[4..8].copy_from_slice(&a.ip().octets());
                libc::AF_INET
            }
            SocketAddr::V6(a) => {
                b[8..24].copy_from_slice(&a.ip().octets());
                b[24..28].copy_from_slice(&a.scope_id().to_ne_bytes());
                libc::AF_INET6
            }
        };
        b[..2].copy_from_slice(&(family as u16).to_ne_bytes());
        SockAddr(b)
    }
}

impl fmt::Debug for SockAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.to_std() {
            Some(a) => write!(f, "{a}"),
            None => f.write_str("unspecified"),
        }
    }
}

/// Room for the control messages of one datagram: two of up to 8 bytes each.
#[derive(Clone)]
#[repr(C, align(8))]
pub(crate) struct Control {
    bytes: [u8; Control::CAPACITY],
    len: usize,
}

impl Control {
    pub(crate) const CAPACITY: usize = 2 * (Self::HEAD + 8);
    /// Bytes of a `cmsghdr`: length, level and type.
    const HEAD: usize = size_of::<libc::cmsghdr>();
    const ALIGN: usize = size_of::<usize>();
    pub(crate) const EMPTY: Control = Control { bytes: [0; Self::CAPACITY], len: 0 };

    /// Appends a message of 2, 4 or 8 bytes. There is room for two.
    pub(crate) fn push(&mut self, level: i32, kind: i32, data: &[u8]) {
        let at = self.len;
        let end = at + Self::HEAD + data.len();
        self.bytes[at..at + size_of::<usize>()].copy_from_slice(&(Self::HEAD + data.len()).to_ne_bytes());
        self.bytes[at + Self::HEAD - 8..at + Self::HEAD - 4].copy_from_slice(&level.to_ne_bytes());
        self.bytes[at + Self::HEAD - 4..at + Self::HEAD].copy_from_slice(&kind.to_ne_bytes());
        self.bytes[at + Self::HEAD..end].copy_from_slice(data);
        self.len = end.next_multiple_of(Self::ALIGN);
    }

    /// How many bytes hold messages.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Says how many bytes the kernel has written.
    pub(crate) fn set_len(&mut self, len: usize) {
        self.len = len.min(Self::CAPACITY);
    }

    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.bytes.as_ptr()
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.bytes.as_mut_ptr()
    }

    /// Calls `f` with level, type and first four bytes of each message that has at least four.
    pub(crate) fn for_each_u32(&self, mut f: impl FnMut(i32, i32, u32)) {
        let mut rest = &self.bytes[..self.len];
        while rest.len() >= Self::HEAD {
            let mut word = [0; size_of::<usize>()];
            word.copy_from_slice(&rest[..size_of::<usize>()]);
            let len = usize::from_ne_bytes(word);
            if len < Self::HEAD || len > rest.len() {
                return;
            }
            let int = |at: usize| [rest[at], rest[at + 1], rest[at + 2], rest[at + 3]];
            if len >= Self::HEAD + 4 {
                f(
                    i32::from_ne_bytes(int(Self::HEAD - 8)),
                    i32::from_ne_bytes(int(Self::HEAD - 4)),
                    u32::from_ne_bytes(int(Self::HEAD)),
                );
            }
            // Saturates past the end for the last message, whose padding may be missing.
            rest = rest.get(len.next_multiple_of(Self::ALIGN)..).unwrap_or_default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_keep_all_their_parts() {
        for a in ["127.3.4.5:4791", "[fd00::1]:65535", "[fe80::1%7]:1"] {
            let a: SocketAddr = a.parse().unwrap();
            let s = SockAddr::from(a);
            assert_eq!(s.to_std(), Some(a));
            assert_eq!(
                s.len(),
                if a.is_ipv4() { size_of::<libc::sockaddr_in>() } else { size_of::<libc::sockaddr_in6>() }
            );
        }
        assert_eq!(SockAddr::UNSPECIFIED.to_std(), None);
    }

    #[test]
    fn control_messages_come_back() {
        let mut c = Control::EMPTY;
        c.push(17, 103, &1440u16.to_ne_bytes());
        c.push(0, 1, &7u32.to_ne_bytes());
        assert!(c.len() <= Control::CAPACITY);
        let mut seen = Vec::new();
        c.for_each_u32(|level, kind, v| seen.push((level, kind, v)));
        assert_eq!(seen, [(0, 1, 7)], "the two-byte message is not a u32");
    }

    #[test]
    fn nonsense_control_lengths_end_the_walk() {
        for len in [0usize, 1, 15, 49, usize::MAX] {
            let mut c = Control::EMPTY;
            c.push(1, 2, &3u32.to_ne_bytes());
            c.bytes[..size_of::<usize>()].copy_from_slice(&len.to_ne_bytes());
            c.for_each_u32(|_, _, _| panic!("length {len} was accepted"));
        }
    }
}
