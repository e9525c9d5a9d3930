//! Sent packets that are not acknowledged yet: one slab for the whole engine, one list per endpoint.
//!
//! Memory follows the packets in flight, not the number of endpoints. What was acknowledged moves, as a piece of its list, to
//! the list of what is done ([`Packets::release`]), and from there one by one to whoever asks.

use std::ops::{Index, IndexMut};

use uct::Time;

use super::{psn::Psn, slab::NIL};

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

/// The entries of all send lists, by index. A place that is free has no operation, and is chained by `next`.
///
/// Indexes come from [`Packets::insert`] and are good until [`Packets::remove`] or [`Packets::poll_done`]; the lists of the
/// engine hold no others.
pub(super) struct Packets<T> {
    places: Vec<Packet<T>>,
    free: u32,
    len: usize,
    /// The list of what is done.
    done: u32,
    done_tail: u32,
    done_len: usize,
}

impl<T> Packets<T> {
    pub(super) const fn new() -> Self {
        Packets { places: Vec::new(), free: NIL, len: 0, done: NIL, done_tail: NIL, done_len: 0 }
    }

    /// How many there are, those that are done included.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// How many are done.
    pub(super) fn done_len(&self) -> usize {
        self.done_len
    }

    #[inline]
    pub(super) fn insert(&mut self, packet: Packet<T>) -> u32 {
        self.len += 1;
        let i = self.free;
        match self.places.get_mut(i as usize) {
            Some(place) => {
                self.free = place.next;
                *place = packet;
                i
            }
            None => self.push(packet),
        }
    }

    #[cold]
    fn push(&mut self, packet: Packet<T>) -> u32 {
        self.places.push(packet);
        self.places.len() as u32 - 1
    }

    /// Frees the place and gives back the operation that was in it, and the serial number of its last posting.
    #[inline]
    pub(super) fn remove(&mut self, i: u32) -> Option<(T, u64)> {
        let place = self.places.get_mut(i as usize)?;
        place.next = self.free;
        self.free = i;
        self.len -= 1;
        Some((place.op.take()?, place.serial))
    }

    #[inline]
    pub(super) fn get(&self, i: u32) -> Option<&Packet<T>> {
        self.places.get(i as usize)
    }

    #[inline]
    pub(super) fn get_mut(&mut self, i: u32) -> Option<&mut Packet<T>> {
        self.places.get_mut(i as usize)
    }

    /// Moves the `count` entries from `first` to `last`, which follow one another, to the list of what is done.
    #[inline]
    pub(super) fn release(&mut self, first: u32, last: u32, count: usize) {
        self[last].next = NIL;
        match self.places.get_mut(self.done_tail as usize) {
            Some(tail) => tail.next = first,
            None => self.done = first,
        }
        self.done_tail = last;
        self.done_len += count;
    }

    pub(super) fn has_done(&self) -> bool {
        self.done != NIL
    }

    /// Shows each operation that is done to `settle`, with the serial number of its last posting, and forgets those for
    /// which it says true; stops at the first of the others.
    #[inline]
    pub(super) fn settle_done(&mut self, mut settle: impl FnMut(&mut T, u64) -> bool) {
        while let Some(k) = self.places.get_mut(self.done as usize) {
            if let Some(op) = &mut k.op {
                if !settle(op, k.serial) {
                    return;
                }
                k.op = None;
            }
            let i = self.done;
            self.done = std::mem::replace(&mut k.next, self.free);
            self.free = i;
            self.len -= 1;
            self.done_len -= 1;
        }
        self.done_tail = NIL;
    }

    /// The next operation that is done, with the serial number of its last posting.
    #[inline]
    pub(super) fn poll_done(&mut self) -> Option<(T, u64)> {
        while let Some(k) = self.places.get(self.done as usize) {
            let i = self.done;
            self.done = k.next;
            self.done_len -= 1;
            if self.done == NIL {
                self.done_tail = NIL;
            }
            // The engine's own packets have no operation.
            let done = self.remove(i);
            if done.is_some() {
                return done;
            }
        }
        None
    }
}

impl<T> Index<u32> for Packets<T> {
    type Output = Packet<T>;
    #[inline]
    fn index(&self, i: u32) -> &Packet<T> {
        &self.places[i as usize]
    }
}

impl<T> IndexMut<u32> for Packets<T> {
    #[inline]
    fn index_mut(&mut self, i: u32) -> &mut Packet<T> {
        &mut self.places[i as usize]
    }
}
