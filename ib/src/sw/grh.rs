//! Writing and reading the 40 bytes in front of a UD payload.
//!
//! With IPv4 the first 20 bytes are undefined (left as they were, as hardware does it) and the last 20 hold the IPv4 header, with a header checksum
//! that is right: it is by this checksum that libibverbs tells IPv4 from IPv6. With IPv6 all 40 hold the IPv6 header, with
//! next header 17 as the kernel's soft-RoCE shows it.

use std::net::{Ipv4Addr, Ipv6Addr};

use crate::{device::GRH_LEN, types::Gid};

/// What a GRH area is filled with.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Grh<'a> {
    /// These bytes.
    Bytes(&'a [u8; GRH_LEN]),
    /// An IPv4 header made of these fields.
    V4 {
        /// Source address.
        src: Ipv4Addr,
        /// Destination address.
        dst: Ipv4Addr,
        /// Type of service.
        tos: u8,
        /// Time to live.
        ttl: u8,
        /// Identification.
        id: u16,
        /// UDP header and all after it.
        udp_len: u16,
    },
    /// An IPv6 header made of these fields.
    V6 {
        /// Source address.
        src: Ipv6Addr,
        /// Destination address.
        dst: Ipv6Addr,
        /// Traffic class.
        traffic_class: u8,
        /// Flow label, 20 bits.
        flow_label: u32,
        /// Hop limit.
        hop_limit: u8,
        /// UDP header and all after it.
        udp_len: u16,
    },
    /// No GRH in the packet (InfiniBand); the area is not written.
    None,
}

impl Grh<'_> {
    /// The header of a RoCE v2 packet between two GIDs with usual values in all other fields. `udp_len` as in
    /// [`Grh::V4`].
    pub fn between(src: Gid, dst: Gid, udp_len: u16) -> Grh<'static> {
        match (src.to_ipv4(), dst.to_ipv4()) {
            (Some(src), Some(dst)) => Grh::V4 { src, dst, tos: 0, ttl: 64, id: 0, udp_len },
            _ => Grh::V6 {
                src: src.0.into(),
                dst: dst.0.into(),
                traffic_class: 0,
                flow_label: 0,
                hop_limit: 64,
                udp_len,
            },
        }
    }

    /// Fills the area.
    pub fn write(&self, out: &mut [u8; GRH_LEN]) {
        match *self {
            Grh::Bytes(b) => *out = *b,
            Grh::V4 { src, dst, tos, ttl, id, udp_len } => {
                let h = &mut out[20..];
                h[0] = 0x45;
                h[1] = tos;
                h[2..4].copy_from_slice(&udp_len.saturating_add(20).to_be_bytes());
                h[4..6].copy_from_slice(&id.to_be_bytes());
                h[6..8].copy_from_slice(&0x4000u16.to_be_bytes());
                h[8] = ttl;
                h[9] = 17;
                h[10..12].fill(0);
                h[12..16].copy_from_slice(&src.octets());
                h[16..20].copy_from_slice(&dst.octets());
                let sum = ipv4_checksum(h);
                h[10..12].copy_from_slice(&sum.to_be_bytes());
            }
            Grh::V6 { src, dst, traffic_class, flow_label, hop_limit, udp_len } => {
                let word = 6 << 28 | u32::from(traffic_class) << 20 | flow_label & 0xf_ffff;
                out[..4].copy_from_slice(&word.to_be_bytes());
                out[4..6].copy_from_slice(&udp_len.to_be_bytes());
                out[6] = 17;
                out[7] = hop_limit;
                out[8..24].copy_from_slice(&src.octets());
                out[24..].copy_from_slice(&dst.octets());
            }
            Grh::None => {}
        }
    }
}

/// The source and destination GID of a GRH area, or `None` if it holds neither kind of header. Checks version, header
/// length and, for IPv4, the header checksum, as libibverbs does.
pub fn gids(area: &[u8; GRH_LEN]) -> Option<(Gid, Gid)> {
    let v4 = &area[20..];
    if v4[0] == 0x45 && ipv4_checksum(v4) == 0 {
        let ip = |i: usize| Gid::from_ip(Ipv4Addr::new(v4[i], v4[i + 1], v4[i + 2], v4[i + 3]).into());
        return Some((ip(12), ip(16)));
    }
    let gid = |i: usize| Gid(std::array::from_fn(|k| area[i + k]));
    (area[0] >> 4 == 6).then(|| (gid(8), gid(24)))
}

/// The one's complement of the one's-complement sum: what to store if the field is 0, and 0 if it is stored and right.
fn ipv4_checksum(h: &[u8]) -> u16 {
    let sum: u32 = h.as_chunks::<2>().0.iter().map(|w| u32::from(u16::from_be_bytes(*w))).sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    !((sum & 0xffff) + (sum >> 16)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ipv4_header_has_a_valid_checksum_and_the_addresses() {
        let (a, b) = ("10.1.2.3".parse().unwrap(), "10.9.8.7".parse().unwrap());
        let (src, dst) = (Gid::from_ip(a), Gid::from_ip(b));
        let mut g = [0xee; GRH_LEN];
        Grh::between(src, dst, 36).write(&mut g);
        assert_eq!(g[..20], [0xee; 20], "left as they were");
        assert_eq!(g[22..24], [0, 56]);
        assert_eq!(gids(&g), Some((src, dst)));
        g[29] ^= 1;
        assert_eq!(gids(&g), None);
        // The example of RFC 1071 readers: a header whose checksum is known to be b861.
        let known = [0x45, 0, 0, 0x73, 0, 0, 0x40, 0, 0x40, 0x11, 0, 0, 0xc0, 0xa8, 0, 1, 0xc0, 0xa8, 0, 0xc7];
        assert_eq!(ipv4_checksum(&known), 0xb861);
    }

    #[test]
    fn ipv6_header_is_readable() {
        let src = Gid::from_ip("fd00::1".parse().unwrap());
        let dst = Gid::from_ip("fd00::2".parse().unwrap());
        let mut g = [0xee; GRH_LEN];
        Grh::between(src, dst, 36).write(&mut g);
        assert_eq!(g[..8], [0x60, 0, 0, 0, 0, 36, 17, 64]);
        assert_eq!(gids(&g), Some((src, dst)));
        assert_eq!(gids(&[0; GRH_LEN]), None);
    }
}
