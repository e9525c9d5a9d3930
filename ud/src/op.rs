//! What the protocol engine keeps for each operation, and does not look into: buffers, regions, completion.

use std::fmt;

use ib::device::Sge;
use uct::{MemSlice, completion::CompletionToken, mem::Buf};

use crate::proto::EpId;

/// The first bytes of every packet: the transport header.
pub(crate) const NETH_LEN: usize = 8;

/// One operation in the engine's window.
pub(crate) enum Op {
    /// A message. `buf[..len]` is NETH, header and copied payload; `iov` follows it on the wire. The buffer is there until
    /// [`Op::take_plain`].
    Packet { ep: EpId, buf: Option<Buf>, len: u32, iov: Option<Box<[MemSlice]>>, comp: Option<CompletionToken> },
    /// Something that completes when all before it has: a flush, a check. `closes`: then the endpoint is destroyed.
    Marker { ep: EpId, comp: Option<CompletionToken>, closes: bool },
}

impl Op {
    /// Takes the completion out: the operation will complete without telling anybody.
    pub(crate) fn take_completion(&mut self) -> Option<CompletionToken> {
        match self {
            Op::Packet { comp, .. } | Op::Marker { comp, .. } => comp.take(),
        }
    }

    /// Takes the buffer out of a message that has nothing else: then nothing is left to be dropped.
    #[inline(always)]
    pub(crate) fn take_plain(&mut self) -> Option<Buf> {
        match self {
            Op::Packet { buf, iov: None, comp: None, .. } => buf.take(),
            _ => None,
        }
    }

    /// Bytes of the packet, from the NETH on; 0 for a marker.
    pub(crate) fn packet_len(&self) -> usize {
        match self {
            Op::Packet { len, .. } => *len as usize + self.iov_len(),
            Op::Marker { .. } => 0,
        }
    }

    /// Payload bytes in registered memory of the user.
    pub(crate) fn iov_len(&self) -> usize {
        match self {
            Op::Packet { iov: Some(iov), .. } => iov.iter().map(MemSlice::len).sum(),
            _ => 0,
        }
    }
}

impl fmt::Debug for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Op::Packet { len, iov, .. } => {
                write!(f, "Packet({len} bytes + {} pieces)", iov.as_ref().map_or(0, |v| v.len()))
            }
            Op::Marker { .. } => f.write_str("Marker"),
        }
    }
}

/// The most pieces a send is gathered from: header, and as many regions as UCX allows.
pub(crate) const MAX_SGE: usize = 10;

/// A gather list on the stack.
pub(crate) struct SgeList<'a> {
    list: [Sge<'a>; MAX_SGE],
    count: usize,
}

impl<'a> SgeList<'a> {
    pub(crate) fn new() -> Self {
        SgeList { list: [Sge { bytes: &[], lkey: 0 }; MAX_SGE], count: 0 }
    }

    /// Appends a piece; empty ones are left out, as devices may refuse them.
    pub(crate) fn push(&mut self, bytes: &'a [u8], lkey: u32) {
        if !bytes.is_empty() && self.count < MAX_SGE {
            self.list[self.count] = Sge { bytes, lkey };
            self.count += 1;
        }
    }

    pub(crate) fn as_slice(&self) -> &[Sge<'a>] {
        &self.list[..self.count]
    }
}
