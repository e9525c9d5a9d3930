//! The invariant CRC of RoCEv2: made, checked, and solved for the one header field that a UDP socket hides.
//!
//! The ICRC covers the IP and UDP headers, with the fields that routers change masked out. A [`Flow`] holds those masked
//! headers for one pair of sockets; [`Flow::prefix`] hashes them for one datagram length, and a [`Prefix`] finishes the sum
//! over any frame of that length. On IPv4 the sum also covers the packet's Identification. CRCs are linear, so a change of
//! the ID is an XOR with a table entry ([`Prefix::icrc`]), and an unknown ID can be solved for ([`Prefix::check`]).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::frame::{BTH_LEN, HOP_LIMIT, ICRC_LEN};
use crate::sw::grh::Grh;

/// Bytes of an IPv4 header without options.
pub const IPV4_LEN: usize = 20;
/// Bytes of an IPv6 header without extensions.
pub const IPV6_LEN: usize = 40;
/// Bytes of a UDP header.
pub const UDP_LEN: usize = 8;

/// The CRC, in finalised form, of the eight 0xff bytes that stand for the absent LRH.
const LRH_CRC: u32 = 0x2144_df1c;
/// The reflected polynomial of CRC-32/ISO-HDLC.
const POLY: u32 = 0xedb8_8320;
/// x^-8 in the reflected representation.
const X_INV_8: u32 = 0x6567_cb95;
/// x^0 in the reflected representation.
const ONE: u32 = 1 << 31;
/// Header bytes between the IPv4 ID and the first byte behind the UDP header.
const AFTER_ID: usize = IPV4_LEN - 6 + UDP_LEN;

/// `ID_DELTA[0]` by the high byte of an ID, `[1]` by its low byte: what the ID adds to the register at the prefix's end.
static ID_DELTA: [[u32; 256]; 2] = id_delta_tables();

const fn mul_x(a: u32) -> u32 {
    (a >> 1) ^ (if a & 1 == 1 { POLY } else { 0 })
}

const fn id_delta_tables() -> [[u32; 256]; 2] {
    let mut tables = [[0; 256]; 2];
    let mut which = 0;
    while which < 2 {
        let mut byte = 0;
        while byte < 256 {
            // A zero register fed with the byte and then with zeros is the byte times a power of x.
            let mut reg = byte as u32;
            let mut bits = 8 * (AFTER_ID + 2 - which);
            while bits > 0 {
                reg = mul_x(reg);
                bits -= 1;
            }
            tables[which][byte] = reg;
            byte += 1;
        }
        which += 1;
    }
    tables
}

fn id_delta(id: u16) -> u32 {
    let [hi, lo] = id.to_be_bytes();
    ID_DELTA[0][usize::from(hi)] ^ ID_DELTA[1][usize::from(lo)]
}

/// The product of two polynomials modulo the CRC's, reflected.
const fn multiply(mut a: u32, b: u32) -> u32 {
    let mut product = 0;
    let mut bit = 32;
    while bit > 0 {
        bit -= 1;
        // All ones where the bit of `b` is set: no branch to mispredict.
        product ^= a & ((b >> bit) & 1).wrapping_neg();
        a = mul_x(a);
    }
    product
}

fn power(mut a: u32, mut n: usize) -> u32 {
    let mut r = ONE;
    while n > 0 {
        if n & 1 == 1 {
            r = multiply(r, a);
        }
        a = multiply(a, a);
        n >>= 1;
    }
    r
}

/// The IP and UDP headers from one socket to another, masked as the ICRC wants them.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Flow {
    header: [u8; IPV6_LEN + UDP_LEN],
    ipv4: bool,
}

impl Flow {
    /// The flow from `src` to `dst`, or `None` if they are of different families.
    pub fn new(src: SocketAddr, dst: SocketAddr) -> Option<Flow> {
        let mut header = [0; IPV6_LEN + UDP_LEN];
        let (ipv4, udp) = match (src.ip(), dst.ip()) {
            (IpAddr::V4(s), IpAddr::V4(d)) => {
                header[..2].copy_from_slice(&[0x45, 0xff]);
                header[6] = 0x40; // DF: set by every sender that speaks RoCEv2.
                header[8..12].copy_from_slice(&[0xff, 17, 0xff, 0xff]);
                header[12..16].copy_from_slice(&s.octets());
                header[16..20].copy_from_slice(&d.octets());
                (true, IPV4_LEN)
            }
            (IpAddr::V6(s), IpAddr::V6(d)) => {
                header[..4].copy_from_slice(&[0x6f, 0xff, 0xff, 0xff]);
                header[6..8].copy_from_slice(&[17, 0xff]);
                header[8..24].copy_from_slice(&s.octets());
                header[24..40].copy_from_slice(&d.octets());
                (false, IPV6_LEN)
            }
            _ => return None,
        };
        header[udp..udp + 2].copy_from_slice(&src.port().to_be_bytes());
        header[udp + 2..udp + 4].copy_from_slice(&dst.port().to_be_bytes());
        header[udp + 6..udp + 8].copy_from_slice(&[0xff, 0xff]);
        Some(Flow { header, ipv4 })
    }

    /// True for IPv4.
    pub fn is_ipv4(&self) -> bool {
        self.ipv4
    }

    /// The sum over the headers of a datagram that carries `frame_len` bytes. About 10 ns.
    pub fn prefix(&self, frame_len: usize) -> Prefix {
        let mut header = self.header;
        let udp_len = (UDP_LEN + frame_len) as u16;
        let udp = if self.ipv4 {
            header[2..4].copy_from_slice(&(udp_len.wrapping_add(IPV4_LEN as u16)).to_be_bytes());
            IPV4_LEN
        } else {
            header[4..6].copy_from_slice(&udp_len.to_be_bytes());
            IPV6_LEN
        };
        header[udp + 4..udp + 6].copy_from_slice(&udp_len.to_be_bytes());
        Prefix { crc: hash(LRH_CRC, &header[..udp + UDP_LEN]), ipv4: self.ipv4 }
    }

    /// The IP header of a datagram with `frame_len` bytes, for a GRH area. A socket sees neither hop limit nor traffic
    /// class: these are the defaults of the senders.
    pub fn grh(&self, frame_len: usize, id: u16) -> Grh<'static> {
        let h = &self.header;
        let udp_len = (UDP_LEN + frame_len) as u16;
        if self.ipv4 {
            let ip = |i: usize| Ipv4Addr::new(h[i], h[i + 1], h[i + 2], h[i + 3]);
            Grh::V4 { src: ip(12), dst: ip(16), tos: 0, ttl: HOP_LIMIT, id, udp_len }
        } else {
            let ip = |i: usize| Ipv6Addr::from(std::array::from_fn::<u8, 16, _>(|k| h[i + k]));
            Grh::V6 { src: ip(8), dst: ip(24), traffic_class: 0, flow_label: 0, hop_limit: HOP_LIMIT, udp_len }
        }
    }

    /// The UDP header as it travels, its checksum still 0.
    pub(crate) fn write_udp(&self, out: &mut [u8; UDP_LEN], frame_len: usize) {
        let udp = if self.ipv4 { IPV4_LEN } else { IPV6_LEN };
        out.copy_from_slice(&self.header[udp..udp + UDP_LEN]);
        out[4..6].copy_from_slice(&((UDP_LEN + frame_len) as u16).to_be_bytes());
        out[6..8].copy_from_slice(&[0, 0]);
    }

    /// The source and destination addresses as they stand in the IP header.
    pub(crate) fn addresses(&self) -> &[u8] {
        if self.ipv4 { &self.header[12..20] } else { &self.header[8..40] }
    }
}

fn hash(seed: u32, bytes: &[u8]) -> u32 {
    let mut h = crc32fast::Hasher::new_with_initial(seed);
    h.update(bytes);
    h.finalize()
}

/// The sum over the masked headers of datagrams of one length, with ID 0.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Prefix {
    crc: u32,
    ipv4: bool,
}

impl Prefix {
    /// The ICRC of `frame` (BTH to ICRC, of the length the prefix was made for) in a packet with this ID. The ID counts on
    /// IPv4 only. The bytes are the same afterwards: the BTH's reserved byte is masked in place while the sum runs.
    ///
    /// A frame shorter than BTH and ICRC together has no sum; the answer is then meaningless, and the caller has dropped it.
    pub fn icrc(&self, id: u16, frame: &mut [u8]) -> u32 {
        let seed = if self.ipv4 { self.crc ^ id_delta(id) } else { self.crc };
        if frame.len() < BTH_LEN + ICRC_LEN {
            return seed;
        }
        let reserved = std::mem::replace(&mut frame[4], 0xff);
        let crc = hash(seed, &frame[..frame.len() - ICRC_LEN]);
        frame[4] = reserved;
        crc
    }

    /// Checks a received frame and returns the ID it was sent with (0 on IPv6), or `None` if it is damaged.
    ///
    /// `expected_id` is tried first: 0, or the position inside a run of segments. If it does not fit, the ID is solved for,
    /// which leaves 16 of the 32 bits as a check; kernel soft-RoCE needs that.
    pub fn check(&self, expected_id: u16, frame: &mut [u8], solver: &mut IdSolver) -> Option<u16> {
        let at = frame.len().checked_sub(ICRC_LEN)?;
        if at < BTH_LEN {
            return None;
        }
        let sent = u32::from_le_bytes([frame[at], frame[at + 1], frame[at + 2], frame[at + 3]]);
        let made = self.icrc(expected_id, frame);
        if made == sent {
            return Some(if self.ipv4 { expected_id } else { 0 });
        }
        if !self.ipv4 {
            return None;
        }
        solver.solve(made ^ sent, AFTER_ID + at).map(|difference| expected_id ^ difference)
    }
}

/// Solves for IPv4 IDs; remembers the constant of the last few frame lengths.
#[derive(Debug, Default)]
pub struct IdSolver {
    /// (bytes behind the ID, x^-8(bytes + 2)), direct mapped by length.
    constants: [(usize, u32); 16],
}

impl IdSolver {
    /// The XOR of two IDs whose ICRCs differ by `delta` with `after` covered bytes behind the ID; `None` if no ID explains
    /// the difference.
    fn solve(&mut self, delta: u32, after: usize) -> Option<u16> {
        let slot = &mut self.constants[after / 4 % 16];
        if slot.0 != after {
            *slot = (after, power(X_INV_8, after + 2));
        }
        let id = multiply(delta, slot.1);
        // The register's low byte holds the byte that was fed first.
        u16::try_from(id).ok().map(u16::swap_bytes)
    }
}
