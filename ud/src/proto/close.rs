//! The end of endpoints: destroy and linger, cancel, BYE, failure, and the one place where a record is freed.
//!
//! ```text
//!  destroy ──► lingering: resends until all is acked ──► BYE ──► BYE_ACK ──► freed
//!                   │ peer dead                           └──► linger over ──► freed
//!                   └──► failed, linger over ──► freed
//!  unclaimed ──► peer dead, peer closed, link impossible ──► freed
//!  failed    ──► waits for destroy
//! ```
//! `docs/ud-protocol.md`, "Closing".

use std::hash::Hash;

use uct::{ErrorKind, Time};

use super::{
    config::Features,
    engine::Engine,
    ep::{EpId, Is, Owed, Owner, State},
    event::{Event, FailDetail, Outstanding, RxVerdict},
    packet::PacketKind,
    slab::NIL,
    stats::DropReason,
    timer::silence_start,
    wire::{self, Neth},
};

impl<T, P: Clone + Eq + Hash, L, R> Engine<T, P, L, R> {
    /// Destroys an endpoint: every operation that is not finished is shown to `visit`. Packets stay with the engine and are
    /// resent until acknowledged; flush markers are handed out. The record and its link stay until [`Event::Freed`].
    pub fn destroy(&mut self, now: Time, ep: EpId, visit: impl FnMut(Outstanding<'_, T>)) {
        self.observe(now);
        let Some(slot) = self.find(ep) else { return };
        if self.eps[slot].is_lingering() {
            return;
        }
        if self.eps[slot].owner == Owner::Passive {
            self.forget_passive();
        }
        self.show_outstanding(slot, visit);
        self.ask_for_ack(slot);
        let ep = &mut self.eps[slot];
        ep.owner = Owner::Lingering { since: now };
        ep.reserved = 0;
        // Also if it has failed for want of a link: there never was anybody to linger for.
        let nothing_sent = !ep.link.is_live() && !ep.is.contains(Is::CREQ_RCVD);
        if nothing_sent {
            self.free_ep(slot);
            return;
        }
        if !self.maybe_close(now, slot) {
            self.rearm(slot);
            self.debug_check(slot);
        }
    }

    /// Gives up what is outstanding, shown to `visit` as in [`Engine::destroy`], but keeps the endpoint, which from now on
    /// refuses everything with `Canceled`. Its packets are still resent, so that the peer is not left with a hole.
    pub fn cancel(&mut self, now: Time, ep: EpId, visit: impl FnMut(Outstanding<'_, T>)) {
        self.observe(now);
        let Some(slot) = self.find(ep) else { return };
        self.show_outstanding(slot, visit);
        self.eps[slot].is.insert(Is::CANCELED);
        self.ask_for_ack(slot);
        self.debug_check(slot);
    }

    /// Declares an endpoint dead: it fails with `EndpointTimeout`.
    pub fn invalidate(&mut self, now: Time, ep: EpId) {
        self.observe(now);
        if let Some(slot) = self.find(ep)
            && !self.eps[slot].is_failed()
        {
            self.fail(now, slot, ErrorKind::EndpointTimeout);
        }
    }

    /// Closes everything at once, for an interface that goes away: outstanding operations are shown to `visit`, peers of
    /// ours are told once. Afterwards drain [`Engine::poll_transmit`] and [`Engine::poll_event`], and drop the engine.
    pub fn close_all(&mut self, now: Time, mut visit: impl FnMut(Outstanding<'_, T>)) {
        self.observe(now);
        let all: Vec<u32> = self.eps.iter().map(|(slot, _)| slot).collect();
        for slot in all {
            self.show_outstanding(slot, &mut visit);
            let says_bye = self.eps[slot].state == State::Connected
                && self.features_of(slot).contains(Features::BYE)
                && !self.eps[slot].is.contains(Is::PEER_CLOSED);
            if !says_bye {
                self.free_ep(slot);
                continue;
            }
            if self.eps[slot].owner == Owner::Passive {
                self.forget_passive();
            }
            let ep = &mut self.eps[slot];
            ep.owner = Owner::Lingering { since: now };
            ep.is.insert(Is::IFACE_CLOSING);
            ep.owed = Owed::empty();
            self.end_resend(slot);
            self.owe(slot, Owed::BYE);
        }
        self.sweep_at = Time::MAX;
    }

    /// Hands out markers and shows packets.
    fn show_outstanding(&mut self, slot: u32, mut visit: impl FnMut(Outstanding<'_, T>)) {
        self.clear_want(slot);
        let (mut prev, mut at) = (NIL, self.eps[slot].head);
        while at != NIL {
            let next = self.pkts[at].next;
            if self.pkts[at].kind == PacketKind::Marker {
                self.unlink_packet(slot, prev, at);
                if let Some((op, _)) = self.pkts.remove(at) {
                    visit(Outstanding::Marker(op));
                }
            } else {
                if let Some(op) = &mut self.pkts[at].op {
                    visit(Outstanding::Packet(op));
                }
                prev = at;
            }
            at = next;
        }
    }

    /// Takes entry `at`, which follows `prev`, out of the endpoint's list.
    fn unlink_packet(&mut self, slot: u32, prev: u32, at: u32) {
        let next = self.pkts[at].next;
        let ep = &mut self.eps[slot];
        if prev == NIL {
            ep.head = next;
        } else {
            self.pkts[prev].next = next;
        }
        if ep.tail == at {
            ep.tail = prev;
        }
        if ep.resend_cur == at {
            ep.resend_cur = next;
        }
    }

    // --- lingering

    /// Takes the next step of a lingering endpoint's end. True if the record was freed. Other endpoints are left alone.
    pub(super) fn maybe_close(&mut self, now: Time, slot: u32) -> bool {
        let Some(ep) = self.eps.get(slot) else { return true };
        if !ep.is_lingering() || ep.is.intersects(Is::IFACE_CLOSING | Is::DOOMED) {
            return false;
        }
        let is_over = self.is_linger_over(now, slot);
        let is_settled = ep.head == NIL && !ep.owed.intersects(Owed::CREQ | Owed::CREP | Owed::BYE | Owed::BYE_ACK);
        if !is_settled {
            return false;
        }
        let says_bye = ep.state == State::Connected
            && !ep.is.intersects(Is::BYE_SENT | Is::PEER_CLOSED)
            && self.features_of(slot).contains(Features::BYE);
        if says_bye {
            // Also with no linger time at all the peer is told once.
            self.owe(slot, Owed::BYE);
            return false;
        }
        if self.eps[slot].owed.intersects(Owed::ACK | Owed::NACK | Owed::XACK) {
            // Sent first, see `on_ack_sent`: without it the peer would resend to nobody.
            return false;
        }
        if is_over {
            self.free_ep(slot);
        }
        is_over
    }

    /// Asks for one more packet to the peer, if it would get none when the endpoint is destroyed: an ack that repeats what
    /// it knows. For callers whose device reports only some sends: what a lingering endpoint sends is always `signaled`,
    /// so that by the time its record is freed the device has reported, or will, all sends that name its link.
    pub fn send_farewell(&mut self, ep: EpId) {
        let Some(slot) = self.find(ep) else { return };
        let says_bye = self.features_of(slot).contains(Features::BYE) && !self.eps[slot].is.contains(Is::PEER_CLOSED);
        if self.eps[slot].state == State::Connected && !says_bye {
            self.owe(slot, Owed::ACK);
        }
    }

    /// Sends an ack that repeats what the peer knows.
    pub fn repeat_ack(&mut self, ep: EpId) {
        if let Some(slot) = self.find(ep)
            && self.eps[slot].state == State::Connected
        {
            self.owe(slot, Owed::ACK);
        }
    }

    /// After the last ack that a lingering endpoint owed: its record goes if the linger time was over.
    pub(super) fn on_ack_sent(&mut self, now: Time, slot: u32) {
        let is_over = self.is_linger_over(now, slot);
        let ep = &mut self.eps[slot];
        let is_settled = ep.head == NIL && ep.owed.is_empty() && !ep.is.intersects(Is::IFACE_CLOSING | Is::DOOMED);
        if is_over && is_settled {
            // The link is still lent to the caller of poll_transmit.
            ep.is.insert(Is::DOOMED);
            self.doomed.push(EpId { slot, id: ep.id });
        }
    }

    /// The linger time is over, or the peer has closed and was answered: nobody there needs this record any more.
    fn is_linger_over(&self, now: Time, slot: u32) -> bool {
        let ep = &self.eps[slot];
        match ep.owner {
            Owner::Lingering { since } => ep.is.contains(Is::PEER_CLOSED) || now >= since + self.cfg.linger,
            _ => false,
        }
    }

    pub(super) fn on_bye_sent(&mut self, now: Time, slot: u32, kind: u8) {
        let run = self.clock.run(now);
        let is_over = self.is_linger_over(now, slot);
        let ep = &mut self.eps[slot];
        let is_last = if kind == wire::BYE_ACK {
            ep.is.contains(Is::FREE_AFTER_BYE_ACK) || (is_over && ep.head == NIL)
        } else {
            if !ep.is.contains(Is::BYE_SENT) {
                ep.is.insert(Is::BYE_SENT);
                ep.send_time = run;
                ep.tick = self.tick0;
            }
            self.stats.tx_byes += 1;
            is_over || ep.is.contains(Is::IFACE_CLOSING)
        };
        if is_last {
            // The link is still lent to the caller of poll_transmit.
            let ep = &mut self.eps[slot];
            ep.is.insert(Is::DOOMED);
            self.doomed.push(EpId { slot, id: ep.id });
        } else if kind == wire::BYE {
            self.start_tick(now, slot);
        }
    }

    /// Time to repeat a BYE. A peer that has acknowledged everything and then says nothing for the time-out has forgotten
    /// the endpoint, answer and all, or is gone: there is nobody left to linger for.
    pub(super) fn on_bye_tick(&mut self, now: Time, slot: u32) {
        let ep = &mut self.eps[slot];
        ep.set_tick_at(Time::MAX);
        if self.clock.run(now).since(ep.send_time) > self.cfg.timeout {
            self.free_ep(slot);
            return;
        }
        self.back_off(slot);
        self.owe(slot, Owed::BYE);
    }

    pub(super) fn free_doomed(&mut self) {
        while let Some(id) = self.doomed.pop() {
            if let Some(slot) = self.find(id) {
                self.free_ep(slot);
            }
        }
    }

    // --- the peer closes

    /// The peer has destroyed its endpoint and everything it sent was acknowledged.
    pub(super) fn on_bye(&mut self, now: Time, slot: u32, neth: Neth) -> Result<RxVerdict, DropReason> {
        let ep = &self.eps[slot];
        if neth.psn != ep.rx_head.next() {
            return Err(DropReason::Gap); // something is missing here: the NACK that is owed says so
        }
        if ep.is_lingering() && ep.in_flight() > 0 {
            // Both sides close. The peer lingers and takes what we still have to deliver; its BYE will come again.
            return Ok(RxVerdict::Control);
        }
        let id = self.ep_id(slot);
        // Who waits to send is owed an answer as well.
        let is_costly = self.has_user_ops(slot) || self.eps[slot].is.contains(Is::WANT_WRITABLE);
        let ep = &mut self.eps[slot];
        let is_news = !ep.is.contains(Is::PEER_CLOSED);
        ep.is.insert(Is::PEER_CLOSED);
        match ep.owner {
            Owner::User if is_news && is_costly => {
                self.fail(now, slot, ErrorKind::ConnectionReset);
            }
            Owner::User => {
                if is_news {
                    self.settle_own_packets(now, slot);
                    self.events.push_back(Event::PeerClosed(id));
                }
            }
            Owner::Passive => {
                self.remove_match(slot);
                self.settle_own_packets(now, slot);
                self.eps[slot].is.insert(Is::FREE_AFTER_BYE_ACK);
            }
            Owner::Lingering { .. } => ep.is.insert(Is::FREE_AFTER_BYE_ACK),
        }
        self.owe_bye_ack(slot);
        Ok(RxVerdict::Control)
    }

    /// The answer to a BYE; without a link there is none, and the peer will say it again.
    pub(super) fn owe_bye_ack(&mut self, slot: u32) {
        if self.eps[slot].link.is_live() {
            self.owe(slot, Owed::BYE_ACK);
        }
    }

    fn has_user_ops(&self, slot: u32) -> bool {
        let mut at = self.eps[slot].head;
        while let Some(k) = self.pkts.get(at) {
            if k.op.is_some() {
                return true;
            }
            at = k.next;
        }
        false
    }

    /// A peer that says BYE has had the handshake and needs no keep-alive: nothing of ours waits for an ack any more.
    fn settle_own_packets(&mut self, now: Time, slot: u32) {
        let ep = &self.eps[slot];
        if ep.in_flight() > 0 {
            let last = ep.psn.prev();
            self.new_ack(now, slot, last);
        }
    }

    pub(super) fn on_bye_ack(&mut self, slot: u32) -> Result<RxVerdict, DropReason> {
        let ep = &self.eps[slot];
        if !ep.is_lingering() || !ep.is.contains(Is::BYE_SENT) || ep.head != NIL {
            return Err(DropReason::Unexpected);
        }
        self.free_ep(slot);
        Ok(RxVerdict::Control)
    }

    // --- failure

    /// Gives an endpoint up. Every operation comes back once with `kind`; the user is told once; an unclaimed endpoint
    /// disappears silently; a lingering one waits for the end of its time.
    pub(super) fn fail(&mut self, now: Time, slot: u32, kind: ErrorKind) {
        let detail = self.fail_detail(now, slot);
        if self.eps[slot].owed.contains(Owed::CREP) || self.unacked_crep(slot).is_some() {
            // The peer may still be asking. Its next request gets an endpoint of its own; once it has had our id in a
            // CREP, it must not get another one.
            self.remove_match(slot);
        }
        self.purge(slot, kind);
        self.drop_held(slot);
        self.clear_want(slot);
        let ep = &mut self.eps[slot];
        ep.transition(State::Failed(kind));
        ep.set_tick_at(Time::MAX);
        ep.reserved = 0;
        let id = EpId { slot, id: ep.id };
        match ep.owner {
            Owner::User => {
                self.stats.ep_failures += 1;
                self.events.push_back(Event::EpFailed { ep: id, kind, detail });
                self.rearm(slot);
            }
            Owner::Passive => self.free_ep(slot),
            Owner::Lingering { .. } => {
                if !self.maybe_close(now, slot) {
                    self.rearm(slot);
                }
            }
        }
    }

    fn fail_detail(&self, now: Time, slot: u32) -> FailDetail {
        let ep = &self.eps[slot];
        FailDetail {
            silent: if ep.in_flight() > 0 {
                self.clock.run(now).since(silence_start(ep, self.limits.answers_count))
            } else {
                Default::default()
            },
            resends: ep.resends,
            acked_psn: ep.acked.raw(),
            last_psn: ep.psn.prev().raw(),
            remote_ep: ep.is_dest_known().then_some(ep.dest),
        }
    }

    /// Empties the window: operations come back with `kind`.
    fn purge(&mut self, slot: u32, kind: ErrorKind) {
        while let Some(removed) = self.pop_packet(slot) {
            if let Some((op, serial)) = removed {
                self.events.push_back(Event::Done { op, result: Err(kind), serial });
            }
        }
        let ep = &mut self.eps[slot];
        ep.acked = ep.psn.prev();
        ep.max_psn = ep.acked.add(ep.cwnd);
        ep.owed = Owed::empty();
        self.end_resend(slot);
        let peer = self.eps[slot].peer;
        self.wake_peer(peer);
    }

    /// Frees a record. The only place where one goes, and its link with it.
    pub(super) fn free_ep(&mut self, slot: u32) {
        self.purge(slot, ErrorKind::Canceled);
        self.drop_held(slot);
        self.remove_match(slot);
        self.unlink_from_peer(slot);
        self.timers.set(slot, &mut self.eps[slot], Time::MAX);
        let Some(ep) = self.eps.remove(slot) else { return };
        self.forget_id(ep.id);
        if ep.owner == Owner::Passive {
            self.forget_passive();
        }
        let id = EpId { slot, id: ep.id };
        self.events.push_back(Event::Freed { ep: id, link: ep.link.into_inner(), serial: ep.last_serial });
    }

    // --- unclaimed endpoints

    /// A new unclaimed endpoint: from now on somebody looks after such ones.
    pub(super) fn note_passive(&mut self, now: Time, id: EpId) {
        self.passive_count += 1;
        self.passive.push_back(id);
        if self.passive.len() > 2 * self.passive_count + 16 {
            self.forget_claimed();
        }
        if self.sweep_at == Time::MAX {
            self.sweep_at = now + self.sweep_interval();
        }
    }

    /// An unclaimed endpoint is unclaimed no more. With the last one the sweep stops.
    pub(super) fn forget_passive(&mut self) {
        self.passive_count -= 1;
        if self.passive_count == 0 {
            self.sweep_at = Time::MAX;
        }
    }

    fn sweep_interval(&self) -> std::time::Duration {
        self.cfg.linger.max(self.cfg.timeout)
    }

    /// Keeps in the list only those that are still unclaimed.
    fn forget_claimed(&mut self) {
        let eps = &self.eps;
        self.passive.retain(|id| eps.get(id.slot).is_some_and(|e| e.id == id.id && e.owner == Owner::Passive));
    }

    /// Probes every unclaimed endpoint that was idle for a while: those whose peers are dead time out and go.
    pub(super) fn sweep_passive(&mut self, now: Time) {
        self.forget_claimed();
        let idle = self.cfg.linger.min(self.cfg.timeout);
        for i in 0..self.passive.len() {
            let slot = self.passive[i].slot;
            let ep = &self.eps[slot];
            if ep.state == State::Connected && ep.in_flight() == 0 && now.since(ep.last_heard) >= idle {
                self.owe(slot, Owed::PROBE);
            }
        }
        self.sweep_at = if self.passive_count == 0 { Time::MAX } else { now + self.sweep_interval() };
    }
}
