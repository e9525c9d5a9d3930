//! The bytes of a UD packet: the 8-byte NETH that starts every packet, and the control packets.
//!
//! Offsets count from the NETH. All integers are little-endian. Parsing never fails halfway: a packet either has the shape
//! that its type demands, or it is refused as a whole. The layout is described in `docs/ud-protocol.md`, "Packets".

use super::{
    config::{ExtCaps, Features},
    psn::Psn,
};

/// Length of the NETH.
pub(super) const NETH_LEN: usize = 8;
/// Length of a CREQ without its address, and of a CREP.
pub(super) const CTL_PACKET_LEN: usize = 48;
/// Length of a keep-alive: NETH and the (ignored) address of an empty PUT.
pub(super) const PUT_LEN: usize = 16;
/// Length of an extended ack.
pub(super) const XACK_LEN: usize = 24;
/// Length of BYE and of its answer.
pub(super) const BYE_LEN: usize = 16;
/// Length of the bytes by which a process is recognised, in CREQ and CREP.
pub(super) const IDENT_LEN: usize = 20;
/// The destination that means "no endpoint yet"; only a CREQ may use it.
pub(super) const NO_EP: u32 = 0x00ff_ffff;

const CTL_AT: usize = NETH_LEN;
const UNION_AT: usize = CTL_AT + 4;
const CONN_SN_AT: usize = UNION_AT + 8;
const PATH_AT: usize = CONN_SN_AT + 4;
const IDENT_AT: usize = UNION_AT + 16;
const _: () = assert!(NETH_LEN == 4 + 2 + 2 && CONN_SN_AT == 20 && PATH_AT == 24 && IDENT_AT == 28);
const _: () = assert!(IDENT_AT + IDENT_LEN == CTL_PACKET_LEN && CTL_PACKET_LEN - NETH_LEN == 40);

const DEST_MASK: u32 = 0x00ff_ffff;
pub(super) const AM: u32 = 1 << 24;
pub(super) const ACK_REQ: u32 = 1 << 25;
pub(super) const NACK: u32 = 1 << 27;
pub(super) const PUT: u32 = 1 << 28;
pub(super) const CTL: u32 = 1 << 29;
const AM_ID_SHIFT: u32 = 27;
/// Without the AM bit, the two top bits are reserved and zero.
const RESERVED: u32 = 0xc000_0000;

/// Control types. The ones from 0x40 on are ours and go only to peers that announced them.
pub(super) const CREQ: u8 = 1;
pub(super) const CREP: u8 = 2;
pub(super) const XACK: u8 = 0x40;
pub(super) const BYE: u8 = 0x41;
pub(super) const BYE_ACK: u8 = 0x42;

/// The header of every packet.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) struct Neth {
    pub(super) packet_type: u32,
    pub(super) psn: Psn,
    pub(super) ack: Psn,
}

impl Neth {
    #[inline]
    pub(super) fn parse(bytes: &[u8]) -> Option<Neth> {
        let [a, b, c, d, e, f, g, h] = *bytes.first_chunk::<NETH_LEN>()?;
        Some(Neth {
            packet_type: u32::from_le_bytes([a, b, c, d]),
            psn: Psn::new(u16::from_le_bytes([e, f])),
            ack: Psn::new(u16::from_le_bytes([g, h])),
        })
    }

    #[inline]
    pub(super) fn emit(self) -> [u8; NETH_LEN] {
        let (psn, ack) = (u64::from(self.psn.raw()), u64::from(self.ack.raw()));
        (u64::from(self.packet_type) | psn << 32 | ack << 48).to_le_bytes()
    }

    pub(super) fn dest(self) -> u32 {
        self.packet_type & DEST_MASK
    }

    pub(super) fn is(self, flag: u32) -> bool {
        self.packet_type & flag != 0
    }

    pub(super) fn is_am(self) -> bool {
        self.is(AM)
    }

    /// The AM id; meaningful only with the AM bit.
    pub(super) fn am_id(self) -> u8 {
        (self.packet_type >> AM_ID_SHIFT) as u8
    }

    pub(super) fn has_reserved(self) -> bool {
        !self.is_am() && self.is(RESERVED)
    }
}

/// The packet type of an active message.
pub(super) fn am_type(dest: u32, am_id: u8, ack_req: bool) -> u32 {
    AM | (u32::from(am_id & 31) << AM_ID_SHIFT) | dest | if ack_req { ACK_REQ } else { 0 }
}

fn le24(b: &[u8]) -> u32 {
    u32::from_le_bytes([b[0], b[1], b[2], 0])
}

fn le32(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

fn le64(b: &[u8], at: usize) -> u64 {
    u64::from(le32(b, at)) | (u64::from(le32(b, at + 4)) << 32)
}

/// The control type, of a packet that has the CTL bit.
pub(super) fn ctl_type(bytes: &[u8]) -> Option<u8> {
    bytes.get(CTL_AT).copied()
}

/// The fields of a connection request.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) struct Creq {
    pub(super) qpn: u32,
    pub(super) ep_id: u32,
    pub(super) conn_sn: u32,
    pub(super) path_index: u8,
    pub(super) ident: [u8; IDENT_LEN],
}

fn ident_of(bytes: &[u8]) -> Option<[u8; IDENT_LEN]> {
    bytes.get(IDENT_AT..)?.first_chunk::<IDENT_LEN>().copied()
}

impl Creq {
    /// Reads what is behind the NETH of a CREQ. The address is `bytes[CTL_PACKET_LEN..]`.
    pub(super) fn parse(bytes: &[u8]) -> Option<Creq> {
        if bytes.len() <= CTL_PACKET_LEN || ctl_type(bytes)? != CREQ {
            return None;
        }
        Some(Creq {
            qpn: le24(&bytes[UNION_AT..]),
            ep_id: le24(&bytes[UNION_AT + 3..]),
            conn_sn: le32(bytes, CONN_SN_AT),
            path_index: bytes[PATH_AT],
            ident: ident_of(bytes)?,
        })
    }

    /// Appends a whole CREQ to `out`. Padding is zero.
    pub(super) fn emit(&self, neth: Neth, device_addr: &[u8], out: &mut Vec<u8>) {
        out.extend_from_slice(&neth.emit());
        out.extend_from_slice(&[CREQ, 0, 0, 0]);
        out.extend_from_slice(&self.qpn.to_le_bytes()[..3]);
        out.extend_from_slice(&self.ep_id.to_le_bytes()[..3]);
        out.extend_from_slice(&[0; 2]);
        out.extend_from_slice(&self.conn_sn.to_le_bytes());
        out.extend_from_slice(&[self.path_index, 0, 0, 0]);
        out.extend_from_slice(&self.ident);
        out.extend_from_slice(device_addr);
    }
}

/// The fields of the answer to a connection request.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) struct Crep {
    pub(super) src_ep_id: u32,
    pub(super) ident: [u8; IDENT_LEN],
}

impl Crep {
    pub(super) fn parse(bytes: &[u8]) -> Option<Crep> {
        if bytes.len() < CTL_PACKET_LEN || ctl_type(bytes)? != CREP {
            return None;
        }
        Some(Crep { src_ep_id: le32(bytes, UNION_AT), ident: ident_of(bytes)? })
    }

    pub(super) fn emit(&self, neth: Neth, out: &mut Vec<u8>) {
        out.extend_from_slice(&neth.emit());
        out.extend_from_slice(&[CREP, 0, 0, 0]);
        out.extend_from_slice(&self.src_ep_id.to_le_bytes());
        out.extend_from_slice(&[0; 12]);
        out.extend_from_slice(&self.ident);
    }
}

/// An extended ack: what arrived beyond the first gap, and how much the receiver can take.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) struct Xack {
    /// There is a gap after the acked PSN.
    pub(super) gap: bool,
    /// Receive budget for all packets of this peer in flight; 0: none.
    pub(super) budget: u32,
    /// Bit `i`: PSN `ack + 1 + i` is here.
    pub(super) sacked: u64,
}

impl Xack {
    pub(super) fn parse(bytes: &[u8]) -> Option<Xack> {
        if bytes.len() < XACK_LEN || ctl_type(bytes)? != XACK {
            return None;
        }
        Some(Xack { gap: bytes[CTL_AT + 1] & 1 != 0, budget: le32(bytes, UNION_AT), sacked: le64(bytes, UNION_AT + 4) })
    }

    pub(super) fn emit(&self, neth: Neth, out: &mut Vec<u8>) {
        out.extend_from_slice(&neth.emit());
        out.extend_from_slice(&[XACK, u8::from(self.gap), 0, 0]);
        out.extend_from_slice(&self.budget.to_le_bytes());
        out.extend_from_slice(&self.sacked.to_le_bytes());
    }
}

/// Reads the sender's endpoint id of a BYE or BYE_ACK.
pub(super) fn parse_bye(bytes: &[u8]) -> Option<u32> {
    if bytes.len() < BYE_LEN || !matches!(ctl_type(bytes)?, BYE | BYE_ACK) {
        return None;
    }
    Some(le32(bytes, UNION_AT))
}

/// Appends a BYE or BYE_ACK to `out`.
pub(super) fn emit_bye(kind: u8, neth: Neth, src_ep_id: u32, out: &mut Vec<u8>) {
    out.extend_from_slice(&neth.emit());
    out.extend_from_slice(&[kind, 0, 0, 0]);
    out.extend_from_slice(&src_ep_id.to_le_bytes());
}

const EXT_MAGIC: [u8; 4] = *b"UCTx";
const EXT_VERSION: u8 = 1;

/// What our own engines put where UCX has a host name and a process id: magic, version, features, incarnation, budget.
pub(super) fn ext_ident(ext: &ExtCaps) -> [u8; IDENT_LEN] {
    let mut out = [0; IDENT_LEN];
    out[..4].copy_from_slice(&EXT_MAGIC);
    out[4] = EXT_VERSION;
    out[6..8].copy_from_slice(&ext.features.bits().to_le_bytes());
    out[8..16].copy_from_slice(&ext.incarnation.to_le_bytes());
    out[16..].copy_from_slice(&ext.rx_budget.to_le_bytes());
    out
}

/// The reverse of [`ext_ident`]; `None` for a plain UCX peer and for versions we do not know.
pub(super) fn parse_ext(ident: &[u8; IDENT_LEN]) -> Option<ExtCaps> {
    if ident[..4] != EXT_MAGIC || ident[4] != EXT_VERSION {
        return None;
    }
    Some(ExtCaps {
        features: Features::from_bits_truncate(u16::from_le_bytes([ident[6], ident[7]])),
        incarnation: le64(ident, 8),
        rx_budget: le32(ident, 16),
    })
}

fn mix(h: u64, v: u64) -> u64 {
    let h = (h ^ v).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    h ^ (h >> 29)
}

/// A number that stands for one process: equal ident bytes give equal numbers. The budget is not part of it: it changes
/// while the process lives.
pub(super) fn process_of(ident: &[u8; IDENT_LEN]) -> u64 {
    match parse_ext(ident) {
        Some(ext) => process_of_incarnation(ext.incarnation),
        None => mix(mix(mix(1, le64(ident, 0)), le64(ident, 8)), u64::from(le32(ident, 16))),
    }
}

/// The same number for a process of ours, known by its incarnation.
pub(super) fn process_of_incarnation(incarnation: u64) -> u64 {
    mix(2, incarnation)
}
