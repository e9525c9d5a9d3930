//! What goes in and out of the engine besides plain numbers.

use std::{ops::Range, time::Duration};

use uct::ErrorKind;

use super::{
    describe::{Describe, describe},
    ep::EpId,
    psn::Psn,
    stats::DropReason,
    wire::IDENT_LEN,
};

/// How [`Engine::connect_to_iface`](super::Engine::connect_to_iface) got its endpoint.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum ConnectOutcome {
    /// A new endpoint; call [`Engine::resolved`](super::Engine::resolved) with its link.
    New,
    /// The peer had asked first: its endpoint was taken over. It has its link, or its resolution is under way.
    Claimed,
}

/// State of an endpoint, as seen from outside.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum EpStateView {
    /// Made for connect-to-endpoint, not connected yet.
    Idle,
    /// Waiting for its link.
    Resolving,
    /// The request is out, the peer's endpoint not known.
    Connecting,
    /// The peer's endpoint is known.
    Connected,
    /// Failed; only destroy is left.
    Failed(ErrorKind),
    /// Destroyed by the user; the record lingers.
    Lingering,
}

/// An operation that is not finished when its endpoint is destroyed or cancelled.
#[derive(Debug)]
pub enum Outstanding<'a, T> {
    /// A packet that was sent and stays with the engine to be resent: take the completion out, copy what user memory it needs.
    Packet(&'a mut T),
    /// A flush marker; the engine has forgotten it.
    Marker(T),
}

/// Whether a send's data is copied or read from the user's memory.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum SendKind {
    /// The packet is in a buffer of ours (or was sent inline and is stored there).
    Copy,
    /// The packet reads user memory: its acknowledgement is asked for at once.
    Zcopy,
}

/// Why an operation was not accepted.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// Not now. [`Engine::want_writable`](super::Engine::want_writable) tells when.
    NoResource,
    /// Never on this endpoint.
    Failed(ErrorKind),
}

/// A send that was checked and has its header, but has changed nothing yet. Post the packet, then call
/// [`Engine::commit_send`](super::Engine::commit_send) before any other call for this endpoint; or drop it.
#[derive(Copy, Clone, Debug)]
#[must_use]
pub struct Begun {
    pub(super) ep: EpId,
    pub(super) psn: Psn,
    pub(super) charge: u32,
    pub(super) reserved: bool,
    pub(super) ack_req: bool,
    pub(super) packet_type: u32,
    /// The first 8 bytes of the packet.
    pub neth: [u8; 8],
}

/// Result of flush and check.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum FlushOutcome<T> {
    /// There was nothing to wait for; the marker comes back.
    Done(T),
    /// The marker was kept and comes back in an [`Event::Done`].
    InProgress,
}

/// What the glue knows about a received packet besides its bytes.
#[derive(Copy, Clone, Debug)]
pub struct RxMeta {
    /// Number of the queue pair that sent it.
    pub src_qpn: u32,
    /// Whether an active message could be delivered or queued for the user now. If not, it is dropped without an ack.
    pub can_deliver: bool,
}

/// What to do with a received packet.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum RxVerdict {
    /// Deliver the payload (`bytes[8..]`) to the handler of `am_id`, then call
    /// [`Engine::poll_held`](super::Engine::poll_held) until it gives nothing.
    Deliver {
        /// The endpoint it came for.
        ep: EpId,
        /// 0 to 31.
        am_id: u8,
    },
    /// Keep the buffer: call [`Engine::hold`](super::Engine::hold) with it, or drop it and the peer will send it again.
    Hold {
        /// The endpoint it came for.
        ep: EpId,
        /// Its PSN.
        psn: u16,
        /// 0 to 31.
        am_id: u8,
    },
    /// A connection request: unpack the address `bytes[dev_addr]` and call
    /// [`Engine::handle_creq`](super::Engine::handle_creq).
    Creq(CreqInfo),
    /// Nothing to do.
    Control,
    /// Dropped, and counted.
    Drop(DropReason),
}

/// A parsed connection request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CreqInfo {
    /// The sender's queue pair.
    pub qpn: u32,
    /// The sender's endpoint id.
    pub ep_id: u32,
    /// Which of the connections between the two it is.
    pub conn_sn: u32,
    /// The sender's path; the answer goes the same way.
    pub path_index: u8,
    /// Where in the packet the device address is.
    pub dev_addr: Range<usize>,
    /// The bytes that tell processes apart.
    pub ident: [u8; IDENT_LEN],
    /// Its PSN.
    pub psn: u16,
}

/// What became of a connection request.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum CreqOutcome {
    /// A new unclaimed endpoint; an [`Event::Resolve`] asks for its link.
    Created(EpId),
    /// It belongs to this endpoint, which has existed before.
    Matched(EpId),
    /// Dropped, and counted.
    Dropped(DropReason),
}

/// A packet to be posted now.
#[derive(Debug)]
pub struct Transmit<'a, T, L> {
    /// The endpoint that sends it.
    pub ep: EpId,
    /// Where to.
    pub link: &'a L,
    /// The packet.
    pub kind: TransmitKind<'a, T>,
    /// Wake the peer if it sleeps.
    pub solicited: bool,
    /// Must be reported by [`Engine::handle_tx_done`](super::Engine::handle_tx_done) without waiting for later ones.
    pub signaled: bool,
}

/// The two kinds of packets the engine sends of its own accord.
#[derive(Debug)]
pub enum TransmitKind<'a, T> {
    /// The whole packet.
    Control {
        /// From the NETH on.
        bytes: &'a [u8],
    },
    /// A user's packet again, with a fresh header.
    Resend {
        /// The header for this posting.
        neth: [u8; 8],
        /// The operation, which knows the payload.
        op: &'a T,
    },
}

impl<T, L> Transmit<'_, T, L> {
    /// The packet in words, for traces. A resent message shows its header only.
    pub fn describe(&self) -> Describe<'_> {
        match &self.kind {
            TransmitKind::Control { bytes } => describe(bytes),
            TransmitKind::Resend { neth, .. } => describe(neth),
        }
    }
}

/// Why an endpoint failed, for the error's text.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct FailDetail {
    /// How long nothing was heard that counts, not counting times when this process itself stood still.
    pub silent: Duration,
    /// Packets sent again since the last progress.
    pub resends: u32,
    /// Last PSN the peer acknowledged.
    pub acked_psn: u16,
    /// Last PSN sent.
    pub last_psn: u16,
    /// The peer's endpoint id, if it was known.
    pub remote_ep: Option<u32>,
}

/// Something the glue must act upon.
#[derive(Debug)]
pub enum Event<T, L, R> {
    /// An operation is finished. Its buffer may be used again once everything up to `serial` has left the send queue.
    Done {
        /// The operation.
        op: T,
        /// `Ok`: the peer's engine has it.
        result: Result<(), ErrorKind>,
        /// Its last posting; 0 for a marker.
        serial: u64,
    },
    /// Asked for by [`Engine::want_writable`](super::Engine::want_writable): a send would be accepted now.
    Writable(EpId),
    /// A user's endpoint is connected.
    Connected(EpId),
    /// Resolve the peer of this endpoint and call [`Engine::resolved`](super::Engine::resolved).
    Resolve {
        /// The endpoint.
        ep: EpId,
        /// It was made for a stranger's request.
        passive: bool,
    },
    /// A user's endpoint failed; comes once. Its operations come as [`Event::Done`] before it.
    EpFailed {
        /// The endpoint.
        ep: EpId,
        /// Why.
        kind: ErrorKind,
        /// More words for the log.
        detail: FailDetail,
    },
    /// Resends have gone unanswered for a third of the time-out: perhaps the link is stale. Comes again a few times before
    /// the verdict.
    Stalled(EpId),
    /// The peer answers, but has not taken what was sent for a third of the time-out: its user takes nothing, or packets of
    /// that length do not arrive. See [`Engine::oldest_unacked`](super::Engine::oldest_unacked). Comes once before there is
    /// progress again.
    Stuck {
        /// The endpoint.
        ep: EpId,
        /// For how long.
        since: Duration,
    },
    /// The record is gone. The link may be released once everything up to `serial` has left the send queue.
    Freed {
        /// The endpoint that was.
        ep: EpId,
        /// Its link, if it had one.
        link: Option<L>,
        /// The last posting that used the link.
        serial: u64,
    },
    /// A kept buffer is of no use any more.
    ReleaseHeld(R),
    /// The peer closed its side; nothing was outstanding. Later operations fail with `ConnectionReset`.
    PeerClosed(EpId),
}
