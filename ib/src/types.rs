//! The small values of the verbs world: GIDs, LIDs, queue pair numbers and keys.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

/// A 128-bit global identifier, in network order. On RoCE v2 it is the IP address (IPv4 as `::ffff:a.b.c.d`).
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// The empty table entry.
    pub const ZERO: Gid = Gid([0; 16]);

    /// The GID of an IP address.
    pub fn from_ip(ip: IpAddr) -> Gid {
        match ip {
            IpAddr::V4(v4) => Gid(v4.to_ipv6_mapped().octets()),
            IpAddr::V6(v6) => Gid(v6.octets()),
        }
    }

    /// The IP address this GID stands for on RoCE v2.
    pub fn to_ip(self) -> IpAddr {
        let v6 = Ipv6Addr::from(self.0);
        match v6.to_ipv4_mapped() {
            Some(v4) => IpAddr::V4(v4),
            None => IpAddr::V6(v6),
        }
    }

    /// True for `::ffff:a.b.c.d` and for the IPv4-mapped multicast form `ff0e::ffff:a.b.c.d`.
    pub fn is_ipv4(self) -> bool {
        let b = &self.0;
        let mapped = b[10] == 0xff && b[11] == 0xff && b[2..10].iter().all(|&x| x == 0);
        mapped && ((b[0] == 0 && b[1] == 0) || (b[0] == 0xff && b[1] == 0x0e))
    }

    /// The IPv4 address in the last four bytes, if this is an IPv4-mapped GID.
    pub fn to_ipv4(self) -> Option<Ipv4Addr> {
        self.is_ipv4().then(|| Ipv4Addr::new(self.0[12], self.0[13], self.0[14], self.0[15]))
    }

    /// True for fe80::/64.
    pub fn is_link_local(self) -> bool {
        self.0[..8] == [0xfe, 0x80, 0, 0, 0, 0, 0, 0]
    }

    /// True for 127.0.0.0/8 and ::1.
    pub fn is_loopback(self) -> bool {
        self.to_ip().is_loopback()
    }

    /// The first eight bytes.
    pub fn subnet_prefix(self) -> [u8; 8] {
        [self.0[0], self.0[1], self.0[2], self.0[3], self.0[4], self.0[5], self.0[6], self.0[7]]
    }

    /// The last eight bytes.
    pub fn interface_id(self) -> [u8; 8] {
        [self.0[8], self.0[9], self.0[10], self.0[11], self.0[12], self.0[13], self.0[14], self.0[15]]
    }

    /// False for an empty table entry: verbs marks it by interface id 0.
    pub fn is_valid(self) -> bool {
        self.interface_id() != [0; 8]
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Ipv6Addr writes mapped addresses as ::ffff:10.0.0.1, the form `show_gids` and UCX users know.
        Ipv6Addr::from(self.0).fmt(f)
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gid({self})")
    }
}

/// A local identifier of an InfiniBand port.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct Lid(pub u16);

/// A 24-bit queue pair number.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Qpn(u32);

impl Qpn {
    /// The largest number, 24 bits.
    pub const MAX: u32 = 0x00ff_ffff;

    /// The number `n`, or `None` if it has more than 24 bits.
    pub const fn new(n: u32) -> Option<Qpn> {
        if n <= Self::MAX { Some(Qpn(n)) } else { None }
    }

    /// The low 24 bits of `n`.
    pub const fn truncate(n: u32) -> Qpn {
        Qpn(n & Self::MAX)
    }

    /// The number.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// Little-endian, as in UCX's addresses and control packets.
    pub const fn to_le24(self) -> [u8; 3] {
        let b = self.0.to_le_bytes();
        [b[0], b[1], b[2]]
    }

    /// See [`Qpn::to_le24`].
    pub const fn from_le24(b: [u8; 3]) -> Qpn {
        Qpn(u32::from_le_bytes([b[0], b[1], b[2], 0]))
    }
}

impl fmt::Display for Qpn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Debug for Qpn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Qpn({:#x})", self.0)
    }
}

/// A queue key: a UD packet whose key differs from the receiving queue pair's is dropped silently.
#[derive(Copy, Clone, PartialEq, Eq, Hash)]
pub struct QKey(pub u32);

impl QKey {
    /// The key that every UCX UD and SRD queue pair uses.
    pub const UCX: QKey = QKey(0x1ee7_a330);
}

impl fmt::Debug for QKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QKey({:#x})", self.0)
    }
}

/// A partition key: 15 bits of partition and, in bit 15, full membership.
#[derive(Copy, Clone, PartialEq, Eq, Hash)]
pub struct PKey(pub u16);

impl PKey {
    /// The default partition, full member; the only one on RoCE.
    pub const DEFAULT: PKey = PKey(0xffff);

    /// The partition number.
    pub const fn partition(self) -> u16 {
        self.0 & 0x7fff
    }

    /// Full members talk to everybody in the partition, limited ones only to full ones.
    pub const fn is_full_member(self) -> bool {
        self.0 & 0x8000 != 0
    }

    /// True if two ports with these keys may talk.
    pub const fn matches(self, other: PKey) -> bool {
        self.partition() == other.partition() && (self.is_full_member() || other.is_full_member())
    }
}

impl fmt::Debug for PKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PKey({:#x})", self.0)
    }
}

/// An IB path MTU.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum Mtu {
    /// 256 bytes.
    M256 = 1,
    /// 512 bytes.
    M512 = 2,
    /// 1024 bytes.
    M1024 = 3,
    /// 2048 bytes.
    M2048 = 4,
    /// 4096 bytes.
    M4096 = 5,
}

impl Mtu {
    /// All of them, smallest first.
    pub const ALL: [Mtu; 5] = [Mtu::M256, Mtu::M512, Mtu::M1024, Mtu::M2048, Mtu::M4096];

    /// Payload bytes per packet.
    pub const fn bytes(self) -> usize {
        128 << self as u8
    }

    /// The verbs encoding, 1 to 5.
    pub const fn from_code(code: u8) -> Option<Mtu> {
        match code {
            1..=5 => Some(Self::ALL[code as usize - 1]),
            _ => None,
        }
    }

    /// The smallest MTU of at least `bytes`, or `None` above 4096.
    pub fn at_least(bytes: usize) -> Option<Mtu> {
        Self::ALL.into_iter().find(|m| m.bytes() >= bytes)
    }

    /// The largest MTU of at most `bytes`, or `None` below 256.
    pub fn at_most(bytes: usize) -> Option<Mtu> {
        Self::ALL.into_iter().rev().find(|m| m.bytes() <= bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gid_knows_ipv4() {
        let g = Gid::from_ip("10.0.0.1".parse().unwrap());
        assert_eq!(g.to_string(), "::ffff:10.0.0.1");
        assert!(g.is_ipv4() && g.is_valid() && !g.is_loopback());
        assert_eq!(g.to_ip().to_string(), "10.0.0.1");
        assert!(Gid::from_ip("127.9.9.9".parse().unwrap()).is_loopback());
        let v6 = Gid::from_ip("fe80::1".parse().unwrap());
        assert!(v6.is_link_local() && !v6.is_ipv4());
        assert!(!Gid::ZERO.is_valid());
    }

    #[test]
    fn mtu_codes_and_sizes() {
        assert_eq!(Mtu::ALL.map(Mtu::bytes), [256, 512, 1024, 2048, 4096]);
        assert_eq!(Mtu::at_most(1500 - 80), Some(Mtu::M1024));
        assert_eq!(Mtu::at_most(255), None);
        assert_eq!(Mtu::from_code(0), None);
        assert_eq!(Mtu::from_code(6), None);
        assert_eq!(Mtu::from_code(5), Some(Mtu::M4096));
    }

    #[test]
    fn pkeys_match_when_one_side_is_full() {
        assert!(PKey(0xffff).matches(PKey(0x7fff)));
        assert!(!PKey(0x7fff).matches(PKey(0x7fff)));
        assert!(!PKey(0x8001).matches(PKey(0x8002)));
    }
}
