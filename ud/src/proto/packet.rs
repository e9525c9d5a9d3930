//! Sent packets that are not acknowledged yet: one slab for the whole engine, one list per endpoint.
//!
//! Memory follows the packets in flight, not the number of endpoints. What was acknowledged is shown to whoever handles the
//! ack ([`Packets::release`]); what is not finished with that moves to the list of what is done, and from there one by one to
//! whoever asks.

use std::{
    hint::cold_path,
    ops::{Index, IndexMut},
};

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
    /// When it was last posted, or a little earlier: see [`Engine::send_plain`](super::Engine::send_plain).
    pub(super) sent: Time,
    /// The user's operation; `None` in the engine's own packets.
    pub(super) op: Option<T>,
}

impl<T> Packet<T> {
    /// What is no packet: it waits for `psn` to be acknowledged.
    pub(super) fn marker(psn: Psn, op: Option<T>) -> Self {
        Packet {
            next: NIL,
            psn,
            kind: PacketKind::Marker,
            sacked: false,
            ack_req: false,
            resends: 0,
            packet_type: 0,
            charge: 0,
            serial: 0,
            sent: Time::ZERO,
            op,
        }
    }

    /// A resend of it may still be in the send queue, where the device reads the payload.
    #[inline]
    pub(super) fn is_resend_queued(&self, tx_done: u64) -> bool {
        self.resends > 0 && self.serial > tx_done
    }
}

/// Finishes operations that ended well where they lie.
///
/// A trait, not a closure, because an implementation can say that it is to be inlined.
pub trait Settle<T> {
    /// Finishes `op`, whose last posting had this serial number: takes out of it whatever must be dropped, for what is left
    /// is forgotten. False: it is not finished, and [`Engine::poll_done`](super::Engine::poll_done) will give it.
    fn settle(&mut self, op: &mut T, serial: u64) -> bool;
}

/// Finishes nothing.
pub(super) struct Later;

impl<T> Settle<T> for Later {
    fn settle(&mut self, _: &mut T, _: u64) -> bool {
        false
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

    /// Sees to it that there is a free place.
    #[inline(always)]
    pub(super) fn make_room(&mut self) {
        if self.free == NIL {
            self.grow();
        }
    }

    /// Takes a free place as the last of the list whose last is `tail`, or of a new one, for who
    /// writes an entry where it stays. The place has no operation. `None`: there was no [`Packets::make_room`] before.
    #[inline(always)]
    pub(super) fn append(&mut self, tail: u32) -> Option<(u32, &mut Packet<T>)> {
        let i = self.free;
        if i as usize >= self.places.len() {
            return None;
        }
        if let Some(last) = self.places.get_mut(tail as usize) {
            last.next = i;
        }
        let place = self.places.get_mut(i as usize)?;
        self.free = std::mem::replace(&mut place.next, NIL);
        self.len += 1;
        Some((i, place))
    }

    /// Puts an entry in, as the last of the list whose last is `tail`, or of a new one.
    #[inline]
    pub(super) fn insert(&mut self, tail: u32, packet: Packet<T>) -> u32 {
        self.make_room();
        match self.append(tail) {
            Some((i, place)) => {
                *place = Packet { next: NIL, ..packet };
                i
            }
            None => NIL,
        }
    }

    /// Makes a free place.
    #[cold]
    #[inline(never)]
    fn grow(&mut self) {
        self.free = self.places.len() as u32;
        self.places.push(Packet::marker(Psn::default(), None));
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

    /// Settles the operation in entry `i`, which is out of its list, or moves it to the list of what is done.
    #[inline(always)]
    pub(super) fn release(&mut self, i: u32, with: &mut impl Settle<T>) {
        if let Some(k) = self.places.get_mut(i as usize)
            && let Some(op) = &mut k.op
            && with.settle(op, k.serial)
        {
            std::mem::forget(k.op.take());
            k.next = self.free;
            self.free = i;
            self.len -= 1;
        } else {
            cold_path();
            self.append_done(i);
        }
    }

    #[inline(never)]
    fn append_done(&mut self, i: u32) {
        self[i].next = NIL;
        match self.places.get_mut(self.done_tail as usize) {
            Some(tail) => tail.next = i,
            None => self.done = i,
        }
        self.done_tail = i;
        self.done_len += 1;
    }

    #[inline]
    pub(super) fn has_done(&self) -> bool {
        self.done != NIL
    }

    /// Settles what is done, up to the first operation that cannot be settled.
    pub(super) fn settle_done(&mut self, mut with: impl Settle<T>) {
        while let Some(k) = self.places.get_mut(self.done as usize) {
            if let Some(op) = &mut k.op {
                if !with.settle(op, k.serial) {
                    return;
                }
                std::mem::forget(k.op.take());
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
