//! What devices of ours add to a device address. See [`Trailer`].

use super::AddrError;
use crate::device::SoftIdentity;

bitflags::bitflags! {
    /// Extensions of the wire protocol that the sender of an address understands. A feature is used only if both sides
    /// have it. Unknown bits are kept and have no effect.
    #[derive(Copy, Clone, PartialEq, Eq, Debug, Hash, Default)]
    pub struct Features: u16 {
        /// Selective acknowledgement.
        const SACK = 1 << 0;
        /// The receive budget caps the sender's window.
        const BUDGET = 1 << 1;
        /// BYE ends the linger period early.
        const BYE = 1 << 2;
        /// Remote memory operations.
        const RMA = 1 << 3;
        /// Put with notification.
        const PUT_NOTIFY = 1 << 4;
        /// Bits without a meaning yet.
        const _ = !0;
    }
}

/// The part of a device address behind UCX's, all little-endian:
///
/// ```text
/// @0 magic 'U' 's'  @2 version  @3 length of the rest  @4 UDP port u16  @6 features u16
/// @8 host id u64  @16 receive budget u32  @20 incarnation u64  @28 end of version 1
/// ```
///
/// Later versions append, so that a version 1 reader takes what it knows and skips the rest. Version 0 is skipped.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Hash, Default)]
pub struct Trailer {
    /// What the device is.
    pub soft: SoftIdentity,
    /// Drawn at random by each process, so that a restarted one is not taken for its predecessor. 0 if not told.
    pub incarnation: u64,
    /// The extensions it understands.
    pub features: Features,
}

const MAGIC: [u8; 2] = *b"Us";
const VERSION: u8 = 1;
const HEADER_LEN: usize = 4;
const BODY_LEN: usize = 24;

impl Trailer {
    /// Bytes of the packed form.
    pub const LEN: usize = HEADER_LEN + BODY_LEN;

    /// Appends the packed form to `out`.
    pub fn pack(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&MAGIC);
        out.push(VERSION);
        out.push(BODY_LEN as u8);
        out.extend_from_slice(&self.soft.udp_port.to_le_bytes());
        out.extend_from_slice(&self.features.bits().to_le_bytes());
        out.extend_from_slice(&self.soft.host_id.to_le_bytes());
        out.extend_from_slice(&self.soft.rx_budget.to_le_bytes());
        out.extend_from_slice(&self.incarnation.to_le_bytes());
    }

    /// Reads a trailer from the front of `bytes` and tells how many of them it takes: none if there is no trailer.
    pub(super) fn parse(bytes: &[u8]) -> Result<(Option<Trailer>, usize), AddrError> {
        let Some((&[m0, m1, version, body_len], rest)) = bytes.split_first_chunk::<HEADER_LEN>() else {
            return Ok((None, 0));
        };
        if [m0, m1] != MAGIC {
            return Ok((None, 0));
        }
        let len = HEADER_LEN + usize::from(body_len);
        if rest.len() < usize::from(body_len) {
            return Err(AddrError::Truncated { need: len, have: bytes.len() });
        }
        if version == 0 {
            return Ok((None, len));
        }
        let Some((body, _)) = rest[..usize::from(body_len)].split_first_chunk::<BODY_LEN>() else {
            return Err(AddrError::Trailer(body_len));
        };
        let trailer = Trailer {
            soft: SoftIdentity {
                udp_port: u16::from_le_bytes(at(body, 0)),
                host_id: u64::from_le_bytes(at(body, 4)),
                rx_budget: u32::from_le_bytes(at(body, 12)),
            },
            features: Features::from_bits_retain(u16::from_le_bytes(at(body, 2))),
            incarnation: u64::from_le_bytes(at(body, 16)),
        };
        Ok((Some(trailer), len))
    }
}

/// The `N` bytes at `offset` of a body; the offsets in this file are constants within it.
fn at<const N: usize>(body: &[u8; BODY_LEN], offset: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&body[offset..offset + N]);
    out
}
