//! RoCEv2 UD frames as pure functions: what stands between the UDP header and the end of the datagram.
//!
//! ```text
//!  BTH 12 | DETH 8 | immediate 4 (opcode 0x65 only) | payload | pad 0..3 | ICRC 4
//! ```
//!
//! Sending: [`frame_len`], [`write_header`], copy the payload to [`HEADER_LEN`], [`seal`]. Receiving: [`parse`], then
//! [`Prefix::check`]. Nothing here knows sockets or queue pairs.

use super::icrc::Prefix;
use crate::types::{PKey, QKey, Qpn};

/// The UDP port of RoCEv2.
pub const ROCE_PORT: u16 = 4791;
/// Bytes of the base transport header.
pub const BTH_LEN: usize = 12;
/// Bytes of the datagram extended transport header.
pub const DETH_LEN: usize = 8;
/// Bytes of an immediate.
pub const IMM_LEN: usize = 4;
/// Bytes of the invariant CRC.
pub const ICRC_LEN: usize = 4;
/// Where the payload of a frame without immediate starts.
pub const HEADER_LEN: usize = BTH_LEN + DETH_LEN;
/// The shortest frame.
pub const FRAME_MIN: usize = HEADER_LEN + ICRC_LEN;

/// Opcode: UD, send only.
pub const UD_SEND_ONLY: u8 = 0x64;
/// Opcode: UD, send only with immediate.
pub const UD_SEND_ONLY_WITH_IMM: u8 = 0x65;

/// The hop limit that is sent, and that a synthesised GRH shows.
pub const HOP_LIMIT: u8 = 64;

/// The length of the frame around `payload_len` bytes.
pub const fn frame_len(payload_len: usize) -> usize {
    FRAME_MIN + payload_len.next_multiple_of(4)
}

/// The headers of one UD message.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Header {
    /// Wake a receiver that armed for solicited completions.
    pub solicited: bool,
    /// Partition.
    pub pkey: PKey,
    /// The receiving queue pair.
    pub dest_qpn: Qpn,
    /// Packet sequence number, 24 bits; counts per sending queue pair, receivers ignore it.
    pub psn: u32,
    /// The receiving queue pair's key.
    pub qkey: QKey,
    /// The sending queue pair.
    pub src_qpn: Qpn,
    /// The immediate, in network order. Only ever received.
    pub imm: Option<[u8; 4]>,
}

/// Writes BTH and DETH of a message of `payload_len` bytes, without immediate.
pub fn write_header(out: &mut [u8; HEADER_LEN], h: &Header, payload_len: usize) {
    let pad = (payload_len.wrapping_neg() & 3) as u8;
    out[0] = UD_SEND_ONLY;
    out[1] = u8::from(h.solicited) << 7 | pad << 4;
    out[2..4].copy_from_slice(&h.pkey.0.to_be_bytes());
    out[4..8].copy_from_slice(&h.dest_qpn.get().to_be_bytes());
    out[8..12].copy_from_slice(&(h.psn & Qpn::MAX).to_be_bytes());
    out[12..16].copy_from_slice(&h.qkey.0.to_be_bytes());
    out[16..20].copy_from_slice(&h.src_qpn.get().to_be_bytes());
}

/// Zeroes the pad behind `payload_len` bytes of payload and writes the ICRC of a packet with this IPv4 ID.
///
/// `frame` has [`frame_len`]`(payload_len)` bytes, header and payload are in place, `prefix` was made for its length.
pub fn seal(frame: &mut [u8], payload_len: usize, prefix: &Prefix, id: u16) {
    let end = frame.len() - ICRC_LEN;
    frame[HEADER_LEN + payload_len..end].fill(0);
    let icrc = prefix.icrc(id, frame);
    frame[end..].copy_from_slice(&icrc.to_le_bytes());
}

/// Why a frame is not a UD message.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Hash, thiserror::Error)]
pub enum FrameError {
    /// Shorter than its headers and pad.
    #[error("shorter than its headers")]
    Short,
    /// Not a UD send.
    #[error("opcode {0:#x} is not a UD send")]
    Opcode(u8),
    /// Transport header version other than 0.
    #[error("transport header version {0}")]
    Version(u8),
}

/// Takes a frame apart into headers and payload. Accepts any byte string; does not look at the ICRC.
///
/// # Errors
/// The reason why the frame must be dropped.
pub fn parse(frame: &[u8]) -> Result<(Header, &[u8]), FrameError> {
    let Some((head, rest)) = frame.split_first_chunk::<HEADER_LEN>() else {
        return Err(FrameError::Short);
    };
    let (imm, rest) = match head[0] {
        UD_SEND_ONLY => (None, rest),
        UD_SEND_ONLY_WITH_IMM => match rest.split_first_chunk::<IMM_LEN>() {
            Some((imm, rest)) => (Some(*imm), rest),
            None => return Err(FrameError::Short),
        },
        other => return Err(FrameError::Opcode(other)),
    };
    let version = head[1] & 0x0f;
    if version != 0 {
        return Err(FrameError::Version(version));
    }
    let pad = usize::from(head[1] >> 4 & 3);
    let payload_len = rest.len().checked_sub(ICRC_LEN + pad).ok_or(FrameError::Short)?;
    let word = |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    let header = Header {
        solicited: head[1] & 0x80 != 0,
        pkey: PKey(u16::from_be_bytes([head[2], head[3]])),
        dest_qpn: Qpn::truncate(word(4)),
        psn: word(8) & Qpn::MAX,
        qkey: QKey(word(12)),
        src_qpn: Qpn::truncate(word(16)),
        imm,
    };
    Ok((header, &rest[..payload_len]))
}

#[cfg(test)]
mod tests;
