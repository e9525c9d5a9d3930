//! The last packets, for failure reports.

use std::{collections::VecDeque, fmt, sync::Arc};

use uct::time::Time;

use super::NodeId;
use crate::sw::{DropReason, PacketMeta};

/// What happened to a packet.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum TraceEvent {
    /// It left.
    Sent,
    /// It filled a receive.
    Delivered,
    /// It is lost.
    Dropped(DropReason),
    /// Its payload was changed, and it goes on.
    Corrupted,
}

impl fmt::Display for TraceEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TraceEvent::Sent => f.write_str("sent"),
            TraceEvent::Delivered => f.write_str("delivered"),
            TraceEvent::Dropped(why) => write!(f, "dropped: {why}"),
            TraceEvent::Corrupted => f.write_str("corrupted"),
        }
    }
}

/// One line of the trace.
#[derive(Clone, Debug)]
pub struct TraceEntry {
    /// When.
    pub time: Time,
    /// The sender.
    pub src: NodeId,
    /// The receiver, if the packet found one.
    pub dst: Option<NodeId>,
    /// Its headers.
    pub meta: PacketMeta,
    /// The length of its payload.
    pub len: usize,
    /// The first bytes of its payload, at most [`TraceEntry::HEAD_MAX`].
    pub head: Vec<u8>,
    /// What happened.
    pub event: TraceEvent,
}

impl TraceEntry {
    /// Payload bytes that are kept.
    pub const HEAD_MAX: usize = 96;
}

/// What a tap sees, see [`SimNet::set_tap`](super::SimNet::set_tap): the fields of [`TraceEntry`], and all of the payload.
#[derive(Copy, Clone, Debug)]
pub struct TappedPacket<'a> {
    /// When.
    pub time: Time,
    /// The sender.
    pub src: NodeId,
    /// The receiver, if the packet found one.
    pub dst: Option<NodeId>,
    /// Its headers.
    pub meta: &'a PacketMeta,
    /// Its payload.
    pub payload: &'a [u8],
    /// What happened.
    pub event: TraceEvent,
}

/// Reads along.
pub type PacketTap = Box<dyn FnMut(&TappedPacket<'_>) + Send>;

/// Turns the first bytes of a payload into words, for [`SimNet::report`](super::SimNet::report).
pub type PayloadFormatter = Arc<dyn Fn(&[u8]) -> String + Send + Sync>;

/// A ring of entries.
#[derive(Debug)]
pub(super) struct Trace {
    ring: VecDeque<TraceEntry>,
    max: usize,
}

impl Trace {
    pub(super) fn new(max: usize) -> Trace {
        Trace { ring: VecDeque::new(), max }
    }

    pub(super) fn set_max(&mut self, max: usize) {
        self.max = max;
        while self.ring.len() > max {
            self.ring.pop_front();
        }
    }

    pub(super) fn push(&mut self, entry: TraceEntry) {
        if self.ring.len() >= self.max {
            self.ring.pop_front();
        }
        if self.max > 0 {
            self.ring.push_back(entry);
        }
    }

    pub(super) fn entries(&self) -> Vec<TraceEntry> {
        self.ring.iter().cloned().collect()
    }
}
