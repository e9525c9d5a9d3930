//! Resends: which packets go again, in which order, and how the window shrinks for it.
//!
//! A round of resends is a range of PSNs with a cursor in the send list. Three things start one: a NACK (the peer keeps
//! nothing beyond the gap: all from there on), a selective ack (the holes), the timer (last resort). `docs/ud-protocol.md`,
//! "Resends".

use std::hash::Hash;

use uct::Time;

use super::{
    budget::charge_of,
    engine::Engine,
    ep::{Is, Owed},
    packet::PacketKind,
    psn::Psn,
    slab::NIL,
    wire::CTL_PACKET_LEN,
};

impl<T, P: Clone + Eq + Hash, L, R> Engine<T, P, L, R> {
    /// Starts a round over everything unacknowledged. `why`: `NACKED`, or nothing for the timer.
    pub(super) fn start_resend(&mut self, slot: u32, why: Is) {
        let end = self.eps[slot].psn.prev();
        self.start_resend_upto(slot, why, end);
    }

    pub(super) fn start_timer_resend(&mut self, slot: u32) {
        self.start_resend(slot, Is::empty());
    }

    pub(super) fn start_resend_upto(&mut self, slot: u32, why: Is, end: Psn) {
        let Some(first) = self.first_unacked(slot) else { return };
        self.cut_window(slot);
        let e = &mut self.eps[slot];
        e.resend_cur = first;
        e.resend_end = end;
        e.is.remove(Is::NACKED | Is::SACK_RESEND);
        e.is.insert(why);
        self.owe(slot, Owed::RESEND);
    }

    /// More news of loss while a round is under way: it goes on to the newest packet.
    pub(super) fn extend_resend(&mut self, slot: u32) {
        let e = &mut self.eps[slot];
        e.resend_end = e.psn.prev();
        e.is.insert(Is::NACKED);
        e.is.remove(Is::SACK_RESEND);
        self.owe(slot, Owed::RESEND);
    }

    /// After a new ack: an unfinished round goes on, since the window has moved.
    pub(super) fn continue_resend(&mut self, slot: u32) {
        let e = &self.eps[slot];
        if e.resend_cur == NIL {
            if e.owed.contains(Owed::RESEND) {
                self.end_resend(slot);
            }
        } else if e.resend_end.is_upto(e.acked) {
            self.end_resend(slot);
        } else {
            self.owe(slot, Owed::RESEND);
        }
    }

    /// Halves the congestion window, once per loss: not again before everything sent so far is acknowledged. No new data
    /// until an ack comes.
    fn cut_window(&mut self, slot: u32) {
        let e = &mut self.eps[slot];
        if !e.is.contains(Is::LOSS_EPISODE) {
            e.is.insert(Is::LOSS_EPISODE);
            e.recover = e.psn.prev();
            e.cwnd = (e.cwnd / 2).max(2);
            self.stats.cwnd_cuts += 1;
        }
        let e = &mut self.eps[slot];
        e.max_psn = e.acked.add(e.cwnd);
        if e.max_psn.is_after(e.psn) {
            e.max_psn = e.psn;
        }
    }

    pub(super) fn end_resend(&mut self, slot: u32) {
        let e = &mut self.eps[slot];
        e.resend_cur = NIL;
        e.is.remove(Is::NACKED | Is::SACK_RESEND);
        e.owed.remove(Owed::RESEND);
    }

    /// The next packet of the round, if one may go now. Moves the cursor past what need not go; ends the round, or leaves it
    /// to be continued by the next ack.
    pub(super) fn next_resend(&mut self, now: Time, slot: u32) -> Option<u32> {
        let hold_off = self.hold_off(slot);
        let small = charge_of(CTL_PACKET_LEN + self.cfg.device_addr.len());
        let tx_done = self.tx_done;
        loop {
            let e = &mut self.eps[slot];
            let nacked = e.is.contains(Is::NACKED);
            let at = e.resend_cur;
            let Some(k) = self.pkts.get(at) else { break };
            if k.psn.is_after(e.resend_end) {
                break;
            }
            let is_first = k.psn == e.acked.next();
            let is_settled = k.kind == PacketKind::Marker || k.sacked || k.psn.is_upto(e.acked);
            let is_fresh = k.resends > 0 && nacked && now.since(k.sent) < hold_off;
            if is_settled || is_fresh || k.is_resend_queued(tx_done) {
                e.resend_cur = k.next;
                continue;
            }
            if !is_first && !e.is.contains(Is::SACK_RESEND) && !k.psn.is_before(e.max_psn) {
                // Beyond the window: the next ack goes on from here.
                e.owed.remove(Owed::RESEND);
                return None;
            }
            if !is_first && !nacked && k.charge > small {
                // Without news from the peer it is not worth repeating much: it may merely be slow.
                break;
            }
            return Some(at);
        }
        self.end_resend(slot);
        None
    }
}
