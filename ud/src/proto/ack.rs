//! What acknowledgements do: release the window, let it grow, repair losses.

use std::{hash::Hash, hint::cold_path, time::Duration};

use uct::Time;

use super::{
    conn::Peer,
    engine::Engine,
    ep::{Ep, EpId, Eps, Is},
    packet::{Later, PacketKind, Packets, Settle},
    psn::Psn,
    slab::{NIL, Slab},
    stats::EngineStats,
    wire::Xack,
};

/// What an ack number said.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) enum AckNews {
    /// Something new was acknowledged.
    New,
    /// The newest number again.
    Same,
    /// Older than the newest, or of a packet never sent: ignored.
    Ignored,
}

impl<T, P: Clone + Eq + Hash, L, R> Engine<T, P, L, R> {
    /// Takes the ack number of any packet.
    pub(super) fn on_ack_psn(&mut self, now: Time, slot: u32, ack: Psn) -> AckNews {
        let e = &self.eps[slot];
        if ack == e.acked {
            return AckNews::Same;
        }
        if ack.is_after(e.acked) && ack.is_before(e.psn) {
            self.new_ack(now, slot, ack);
            return AckNews::New;
        }
        self.count_odd_ack(slot, ack);
        AckNews::Ignored
    }

    #[cold]
    fn count_odd_ack(&mut self, slot: u32, ack: Psn) {
        if ack.is_before(self.eps[slot].acked) {
            self.stats.acks_old += 1;
        } else {
            // Of an earlier life of the peer's endpoint, or made up.
            self.stats.acks_beyond += 1;
        }
    }

    /// Everything up to `ack` has arrived. Never frees the endpoint.
    pub(super) fn new_ack(&mut self, now: Time, slot: u32, ack: Psn) {
        self.stats.acks_new += 1;
        let e = &mut self.eps[slot];
        e.take_ack(ack, self.cfg.max_window, self.tick0, self.clock.run(now));
        let released = Released::of(e, &mut self.pkts, self.tx_done);
        if let Some(sent) = released.sent {
            e.note_round_trip(now.nanos_since(sent));
        }
        if e.is_lingering() {
            e.start_interval(now, self.tick0);
            self.limits.rearm(&self.clock, &mut self.timers, slot, e);
        } else {
            self.limits.restart(&mut self.timers, slot, e, now, self.tick0);
        }
        if e.is.contains(Is::LOSS_EPISODE) && e.recover.is_upto(ack) {
            e.is.remove(Is::LOSS_EPISODE);
        }
        let resends = e.is_resending();
        let peer = e.peer;
        self.note_released(slot, peer, &released);
        if resends {
            self.continue_resend(slot);
        }
        self.wake_writer(slot);
    }

    /// The endpoints, and beside them what [`Acks::take_one`] needs.
    #[inline(always)]
    pub(super) fn acks(&mut self, now: Time) -> (&mut Eps<L, R>, Acks<'_, T, P>) {
        let run = self.clock.run(now);
        let Engine { eps, peers, pkts, stats, cfg, .. } = self;
        (eps, Acks { peers, pkts, stats, max_window: cfg.max_window, run })
    }

    /// How long a resent packet is given to be acknowledged before news of the same gap resends it again.
    pub(super) fn hold_off(&self, slot: u32) -> Duration {
        let srtt = self.eps[slot].srtt;
        let ns = if srtt == 0 { self.tick0 } else { srtt.clamp(self.tick0 / 1024, self.tick0) };
        Duration::from_nanos(ns)
    }

    /// Releases what can be released of the acknowledged entries.
    fn release(&mut self, slot: u32) {
        let e = &mut self.eps[slot];
        let (released, peer) = (Released::of(e, &mut self.pkts, self.tx_done), e.peer);
        self.note_released(slot, peer, &released);
    }

    /// What a release means to others: the peer has more room, or must wait.
    fn note_released(&mut self, slot: u32, peer: u32, released: &Released) {
        if released.any
            && let Some(p) = self.peers.get_mut(peer)
        {
            p.in_flight -= released.charge;
            if p.waiting > 0 {
                self.wake_peer(peer);
            }
        }
        if released.is_blocked {
            self.block_on_tx(slot);
        }
    }

    #[cold]
    fn block_on_tx(&mut self, slot: u32) {
        let e = &mut self.eps[slot];
        if !e.is.contains(Is::TX_BLOCKED) {
            e.is.insert(Is::TX_BLOCKED);
            self.tx_blocked.push(EpId { slot, id: e.id });
        }
    }

    /// All packets posted with a serial number up to `serial` have left the send queue.
    pub fn handle_tx_done(&mut self, serial: u64) {
        self.tx_done = self.tx_done.max(serial);
        if self.tx_blocked.is_empty() {
            return;
        }
        let now = self.clock.last();
        for id in std::mem::take(&mut self.tx_blocked) {
            let Some(slot) = self.find(id) else { continue };
            self.eps[slot].is.remove(Is::TX_BLOCKED);
            self.release(slot);
            self.maybe_close(now, slot);
            self.debug_check(slot);
        }
    }

    /// The peer saw a gap after everything acknowledged.
    pub(super) fn on_nack(&mut self, now: Time, slot: u32) {
        self.stats.rx_nacks += 1;
        let e = &self.eps[slot];
        if e.in_flight() == 0 {
            return;
        }
        let (is_active, hold_off) = (e.resend_cur != NIL, self.hold_off(slot));
        let Some(first) = self.first_unacked(slot) else { return };
        let k = &self.pkts[first];
        // Each packet that follows a gap provokes a NACK; one round of resends answers them all.
        if k.resends > 0 && now.since(k.sent) < hold_off {
            if is_active {
                self.extend_resend(slot);
            }
            return;
        }
        self.start_resend(slot, Is::NACKED);
    }

    /// The peer says what it has beyond the gap: only the holes are resent.
    pub(super) fn on_xack(&mut self, now: Time, slot: u32, xack: &Xack) {
        if !xack.gap {
            return;
        }
        if xack.sacked == 0 {
            return self.on_nack(now, slot);
        }
        self.stats.rx_nacks += 1;
        let (base, hold_off) = (self.eps[slot].acked.next(), self.hold_off(slot));
        // The highest PSN the peer has; what is missing lies before it.
        let high = base.add(63 - xack.sacked.leading_zeros() as u16);
        if !high.is_before(self.eps[slot].psn) {
            self.stats.acks_beyond += 1;
            return;
        }
        let Some(mut at) = self.first_unacked(slot) else { return };
        let mut is_missing = false;
        while let Some(k) = self.pkts.get_mut(at) {
            if k.psn.is_after(high) {
                break;
            }
            at = k.next;
            if k.kind == PacketKind::Marker {
                continue;
            }
            if xack.sacked >> k.psn.since(base) & 1 == 1 {
                k.sacked = true;
            } else {
                is_missing |= k.resends == 0 || now.since(k.sent) >= hold_off;
            }
        }
        if is_missing {
            self.start_resend_upto(slot, Is::NACKED | Is::SACK_RESEND, high.prev());
        }
    }

    /// The first entry that is a packet the peer has not acknowledged.
    pub(super) fn first_unacked(&self, slot: u32) -> Option<u32> {
        let e = &self.eps[slot];
        let mut at = e.head;
        loop {
            let k = self.pkts.get(at)?;
            if k.kind != PacketKind::Marker && k.psn.is_after(e.acked) {
                return Some(at);
            }
            at = k.next;
        }
    }
}

/// The parts of an engine that an ack of one message changes, besides the endpoint's record.
pub(super) struct Acks<'a, T, P> {
    peers: &'a mut Slab<Peer<P>>,
    pkts: &'a mut Packets<T>,
    stats: &'a mut EngineStats,
    max_window: u16,
    /// The run time.
    run: Time,
}

impl<T, P> Acks<'_, T, P> {
    /// [`Engine::new_ack`] for what most are that come with messages: of the oldest packet in flight and no other, a message
    /// that was sent once and did not ask for it, on an endpoint that neither lingers nor repairs a loss. The message is
    /// settled by `with`. False: it is another ack, and nothing was done.
    #[inline(always)]
    pub(super) fn take_one<L, R>(&mut self, e: &mut Ep<L, R>, ack: Psn, with: &mut impl Settle<T>) -> bool {
        let head = e.head;
        let Some(k) = self.pkts.get(head) else { return false };
        let Some(peer) = self.peers.get_mut(e.peer) else { return false };
        let is_one = ack == e.acked.next()
            && k.psn == ack
            && k.kind == PacketKind::Am
            && k.resends == 0
            && !k.ack_req
            && (e.granted.acks || e.grant_acks())
            && peer.waiting == 0;
        // Two packets are never acknowledged at once: behind it a marker may wait for the same number.
        let (next, charge) = (k.next, k.charge);
        if !is_one || self.pkts.get(next).is_some_and(|k| k.psn == ack) {
            cold_path();
            return false;
        }
        self.pkts.release(head, with);
        peer.in_flight -= u64::from(charge);
        self.stats.acks_new += 1;
        e.head = next;
        if next == NIL {
            e.tail = NIL;
        }
        e.take_plain_ack(ack, self.max_window, self.run);
        true
    }
}

/// What [`Released::of`] did.
struct Released {
    any: bool,
    /// Sum over the packets.
    charge: u64,
    /// If the newest packet asked for its ack and was sent once (after Karn), when that was.
    sent: Option<Time>,
    /// The next one could not be released.
    is_blocked: bool,
}

impl Released {
    /// Moves the acknowledged entries from the endpoint's list to that of what is done, strictly in order, and stops at one
    /// whose resend is still in the send queue: the device may read its memory until then.
    fn of<T, L, R>(e: &mut Ep<L, R>, pkts: &mut Packets<T>, tx_done: u64) -> Released {
        let mut at = e.head;
        let mut released = Released { any: false, charge: 0, sent: None, is_blocked: false };
        while let Some(k) = pkts.get(at) {
            if !k.psn.is_upto(e.acked) {
                break;
            }
            if k.is_resend_queued(tx_done) {
                // The newest acknowledged packet was sent more than once.
                (released.sent, released.is_blocked) = (None, true);
                break;
            }
            if k.kind != PacketKind::Marker {
                released.sent = (k.resends == 0 && k.ack_req).then_some(k.sent);
            }
            if e.resend_cur == at {
                e.resend_cur = k.next;
            }
            released.any = true;
            released.charge += u64::from(k.charge);
            let next = k.next;
            pkts.release(at, &mut Later);
            at = next;
        }
        e.head = at;
        if at == NIL {
            e.tail = NIL;
        }
        released
    }
}
