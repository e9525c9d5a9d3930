//! Sent packets that are not acknowledged yet: one slab for the whole engine, one list per endpoint.
//!
//! Memory follows the packets in flight, not the number of endpoints.

use uct::Time;

use super::psn::Psn;

/// What an entry of a send list is.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) enum PacketKind {
    /// Connection request: rebuilt from the endpoint's fields for each posting.
    Creq,
    /// Its answer: likewise.
    Crep,
    /// Keep-alive: likewise.
    Probe,
    /// A user's active message.
    Am,
    /// Not a packet: a flush that waits for everything up to `psn`.
    Marker,
}

/// One entry of a send list.
pub(super) struct Packet<T> {
    /// Next in the endpoint's list.
    pub(super) next: u32,
    /// Its PSN; a marker has the PSN of the packet it waits for.
    pub(super) psn: Psn,
    pub(super) kind: PacketKind,
    /// The receiver said that it has it, though not everything before it.
    pub(super) sacked: bool,
    /// An ack was asked for in, or right after, this packet.
    pub(super) ack_req: bool,
    /// How often it was sent again; saturates.
    pub(super) resends: u8,
    /// Packet type without ACK_REQ and destination (the destination may change, `docs/ud-protocol.md` "Restart").
    pub(super) packet_type: u32,
    /// What it counts against the peer's receive budget.
    pub(super) charge: u32,
    /// Serial number of its last posting.
    pub(super) serial: u64,
    /// When it was last posted.
    pub(super) sent: Time,
    /// The user's operation; `None` in the engine's own packets.
    pub(super) op: Option<T>,
}

impl<T> Packet<T> {
    /// A resend of it may still be in the send queue, where the device reads the payload.
    pub(super) fn is_resend_queued(&self, tx_done: u64) -> bool {
        self.resends > 0 && self.serial > tx_done
    }
}
