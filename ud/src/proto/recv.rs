//! Receiving: from the bytes of one packet to a verdict.
//!
//! The order of the checks is the protocol's (`docs/ud-protocol.md` "Receiving"): destination, source, ack number, ack
//! request, gap, and only then the packet's own business. Nothing a peer sends is an error of ours: what does not fit is
//! counted and dropped.

use std::{hash::Hash, hint::cold_path};

use uct::Time;

use super::{
    ack::AckNews,
    config::Features,
    engine::{Engine, rare},
    ep::{EpId, Is, Owed, State},
    event::{Event, RxMeta, RxVerdict},
    held::{Held, Kept},
    packet::{Later, Settle},
    psn::Psn,
    slab::NIL,
    stats::DropReason,
    wire::{self, NETH_LEN, Neth},
};

impl<T, P: Clone + Eq + Hash, L, R> Engine<T, P, L, R> {
    /// Feeds one received packet, from the NETH on, to its endpoint and says what to do with it.
    ///
    /// Any bytes will do. `now` must not go back. After the verdict is obeyed, call [`Engine::poll_held`] until it gives
    /// nothing, and drain the other polls some time before waiting. Constant cost, but for acks, which cost a step per
    /// packet they release; no allocation but for the first packet kept beyond a gap.
    #[inline]
    pub fn handle_packet(&mut self, now: Time, meta: &RxMeta, bytes: &[u8]) -> RxVerdict {
        self.observe(now);
        if meta.can_deliver
            && let Some((ep, am_id)) = self.handle_plain(now, meta.src_qpn, bytes, &mut Later)
        {
            return RxVerdict::Deliver { ep, am_id };
        }
        self.stats.rx_packets += 1;
        self.on_packet(now, meta, bytes).unwrap_or_else(|reason| {
            self.stats.drops[reason as usize] += 1;
            RxVerdict::Drop(reason)
        })
    }

    /// [`Engine::handle_packet`] for what nearly every packet is: the next message of a connected endpoint, with nothing
    /// waiting behind a gap, from the endpoint's peer. Does what the long way would do, without the questions whose answers
    /// are known. The message is to be delivered to the handler of the answered id; `None`: it is something else, and
    /// nothing was done. What it acknowledges is settled by `with`, or is left for [`Engine::poll_done`]. `now` is the time
    /// that [`Engine::observe`] was told last.
    #[inline(always)]
    pub fn handle_plain(
        &mut self,
        now: Time,
        src_qpn: u32,
        bytes: &[u8],
        with: &mut impl Settle<T>,
    ) -> Option<(EpId, u8)> {
        debug_assert_eq!(now, self.clock.last());
        let Some(neth) = Neth::parse(bytes) else { return rare() };
        let (dest, slot) = (neth.dest(), self.recent_slot(neth.dest()));
        let (eps, mut acks) = self.acks(now);
        let Some(ep) = eps.plain_mut(slot) else { return rare() };
        let is_next = neth.is_am() && ep.id == dest && ep.src_qpn == src_qpn && neth.psn == ep.rx_head.next();
        if !(is_next && (ep.granted.hears || ep.grant_hearing())) {
            return rare();
        }
        let is_settled = neth.ack == ep.acked || acks.take_one(ep, neth.ack, with);
        ep.last_heard = now;
        ep.rx_head = neth.psn;
        ep.repeated = 0;
        ep.is.insert(Is::HEARD | Is::RX_ANY);
        self.stats.rx_packets += 1;
        self.stats.rx_delivered += 1;
        if !is_settled {
            cold_path();
            self.on_ack_psn(now, slot, neth.ack);
        }
        if neth.is(wire::ACK_REQ) {
            cold_path();
            self.owe_ack(slot);
        }
        self.note_sender(now, slot);
        self.debug_check(slot);
        Some((EpId { slot, id: dest }, neth.am_id()))
    }

    #[inline(never)]
    fn on_packet(&mut self, now: Time, meta: &RxMeta, bytes: &[u8]) -> Result<RxVerdict, DropReason> {
        let neth = Neth::parse(bytes).ok_or(DropReason::Short)?;
        if neth.has_reserved() {
            return Err(DropReason::Malformed);
        }
        if neth.dest() == wire::NO_EP {
            return self.on_creq_packet(neth, meta, bytes);
        }
        let slot = self.find_wire(neth.dest()).ok_or(DropReason::UnknownEp)?;
        self.check_source(slot, meta)?;
        let ep = &mut self.eps[slot];
        if ep.is_failed() {
            return self.on_late_packet(slot, neth, bytes);
        }
        // Whose a CREP is has to be found out.
        if neth.is_am() || !neth.is(wire::CTL) || wire::ctl_type(bytes) != Some(wire::CREP) {
            ep.last_heard = now;
        }
        let is_lingering = ep.is_lingering();
        let verdict = self.on_ep_packet(now, slot, neth, meta, bytes);
        if let Err(DropReason::Duplicate) = verdict {
            self.note_repetition(now, slot);
        }
        if is_lingering {
            self.maybe_close(now, slot);
        }
        self.debug_check(slot);
        verdict
    }

    /// The peer sends again what arrived long ago: our acks do not reach it. Who only receives has nothing in flight that
    /// could go unanswered, so this is how it learns that its link leads nowhere.
    fn note_repetition(&mut self, now: Time, slot: u32) {
        let ep = &mut self.eps[slot];
        if ep.repeated == 0 {
            ep.repeated_since = now;
        }
        ep.repeated = ep.repeated.saturating_add(1);
        // A burst of losses is no sign; a peer that repeats itself for long is.
        if ep.repeated >= 6 && now.since(ep.repeated_since) >= self.cfg.timeout / 6 {
            ep.repeated = 0;
            let id = EpId { slot, id: ep.id };
            self.events.push_back(Event::Stalled(id));
        }
    }

    /// A failed endpoint answers one thing: the repeated BYE of a peer that closed.
    fn on_late_packet(&mut self, slot: u32, neth: Neth, bytes: &[u8]) -> Result<RxVerdict, DropReason> {
        let is_bye = !neth.is_am() && neth.is(wire::CTL) && wire::ctl_type(bytes) == Some(wire::BYE);
        if is_bye && self.eps[slot].is.contains(Is::PEER_CLOSED) {
            self.owe_bye_ack(slot);
        }
        Err(DropReason::EpFailed)
    }

    /// A packet must come from the queue pair its endpoint is connected to. An endpoint that waits for connect-to-endpoint
    /// does not know it yet and sticks to the first one it hears.
    fn check_source(&mut self, slot: u32, meta: &RxMeta) -> Result<(), DropReason> {
        let ep = &mut self.eps[slot];
        if ep.src_qpn == NIL {
            ep.src_qpn = meta.src_qpn;
        }
        if ep.src_qpn == meta.src_qpn { Ok(()) } else { Err(DropReason::WrongSource) }
    }

    fn on_ep_packet(
        &mut self,
        now: Time,
        slot: u32,
        neth: Neth,
        meta: &RxMeta,
        bytes: &[u8],
    ) -> Result<RxVerdict, DropReason> {
        self.eps[slot].is.insert(Is::HEARD);
        // While we ask for a connection, only a valid CREP (see there) counts as the answer: anything else would stop the
        // repetition of the CREQ and leave us waiting without a timer.
        let news = match self.eps[slot].state {
            State::Connecting => AckNews::Ignored,
            _ => self.on_ack_psn(now, slot, neth.ack),
        };
        if neth.is(wire::ACK_REQ) {
            self.owe_ack(slot);
        }
        let takes_data = self.takes_data(slot);
        if takes_data && provokes_nack(neth, meta) && neth.psn.is_after(self.eps[slot].rx_head.next()) {
            self.owe_nack(slot);
        }
        if neth.is_am() {
            if !takes_data {
                return Err(DropReason::Closed);
            }
            return self.on_am(now, slot, neth, meta);
        }
        if neth.is(wire::NACK) {
            self.note_answer(now, slot, neth, news);
            if news != AckNews::Ignored {
                self.on_nack(now, slot);
            }
            return Ok(RxVerdict::Control);
        }
        if bytes.len() == NETH_LEN {
            self.note_answer(now, slot, neth, news);
            return if neth.is(wire::CTL | wire::PUT) { Err(DropReason::Short) } else { Ok(RxVerdict::Control) };
        }
        if neth.is(wire::CTL) {
            return self.on_ctl(now, slot, neth, news, bytes);
        }
        if !neth.is(wire::PUT) {
            return Err(DropReason::Malformed);
        }
        if !takes_data {
            return Err(DropReason::Closed);
        }
        self.on_put(slot, neth, bytes)
    }

    /// A destroyed connect-to-endpoint endpoint takes no data any more: its id may already mean something else to the peer.
    /// One connected by handshake delivers until its linger time is over.
    fn takes_data(&self, slot: u32) -> bool {
        let ep = &self.eps[slot];
        !(ep.is.contains(Is::IFACE_CLOSING) || ep.is_lingering() && ep.is.contains(Is::P2P))
    }

    /// An answer without an ack request of its own shows that the peer heard us, even if it acknowledges nothing new.
    fn note_answer(&mut self, now: Time, slot: u32, neth: Neth, news: AckNews) {
        if news == AckNews::Same && !neth.is(wire::ACK_REQ) {
            self.eps[slot].answered = self.clock.run(now);
        }
    }

    /// An ack is owed, and an extended one if there is something to say that no data packet can carry. Nothing is owed to a
    /// peer whose endpoint id is unknown: it will ask again.
    #[inline(never)]
    fn owe_ack(&mut self, slot: u32) {
        if self.eps[slot].state != State::Connected {
            return;
        }
        let owed = if self.is_share_news(slot) { Owed::ACK | Owed::XACK } else { Owed::ACK };
        self.owe(slot, owed);
    }

    fn owe_nack(&mut self, slot: u32) {
        if self.eps[slot].state == State::Connected {
            self.owe(slot, Owed::NACK);
        }
    }

    fn on_am(&mut self, now: Time, slot: u32, neth: Neth, meta: &RxMeta) -> Result<RxVerdict, DropReason> {
        let am_id = neth.am_id();
        if self.is_next(slot, neth.psn)? {
            if !meta.can_deliver {
                return Err(DropReason::NoRoom);
            }
            self.accept(slot, neth.psn);
            self.note_sender(now, slot);
            self.stats.rx_delivered += 1;
            return Ok(RxVerdict::Deliver { ep: self.ep_id(slot), am_id });
        }
        if !meta.can_deliver {
            return Err(DropReason::NoRoom);
        }
        self.note_sender(now, slot);
        Ok(RxVerdict::Hold { ep: self.ep_id(slot), psn: neth.psn.raw(), am_id })
    }

    #[inline(always)]
    fn note_sender(&mut self, now: Time, slot: u32) {
        // Who sends matters only where there is a budget to divide.
        if self.cfg.rx_budget != 0
            && let Some(peer) = self.peers.get_mut(self.eps[slot].peer)
        {
            self.epochs.note(now, &mut peer.epoch);
        }
    }

    /// An empty PUT is a keep-alive: in order, and nothing to do. One with data would write to our memory: it takes its PSN
    /// and has no other effect.
    fn on_put(&mut self, slot: u32, neth: Neth, bytes: &[u8]) -> Result<RxVerdict, DropReason> {
        if bytes.len() < wire::PUT_LEN {
            return Err(DropReason::Short);
        }
        let has_data = bytes.len() > wire::PUT_LEN;
        if self.is_next(slot, neth.psn)? {
            self.accept(slot, neth.psn);
        } else if has_data {
            return Err(DropReason::Gap);
        } else {
            self.keep(slot, neth.psn, Kept::Put);
        }
        if has_data { Err(DropReason::PutRefused) } else { Ok(RxVerdict::Control) }
    }

    /// True: `psn` is the next one in order. False: it lies beyond a gap and may be kept.
    fn is_next(&self, slot: u32, psn: Psn) -> Result<bool, DropReason> {
        let ep = &self.eps[slot];
        let ahead = psn.since(ep.rx_head);
        if ahead == 1 {
            return Ok(true);
        }
        if psn.is_upto(ep.rx_head) {
            return Err(DropReason::Duplicate);
        }
        // Before the handshake nobody knows yet from which process, and from which numbering, it came.
        if usize::from(ahead) > self.hold_places || !ep.is_dest_known() {
            return Err(DropReason::Gap);
        }
        match &ep.held {
            Some(held) if held.has(psn) => Err(DropReason::Duplicate),
            _ => Ok(false),
        }
    }

    /// Moves the head to `psn`, the next in order.
    fn accept(&mut self, slot: u32, psn: Psn) {
        let ep = &mut self.eps[slot];
        ep.rx_head = psn;
        ep.repeated = 0;
        ep.is.insert(Is::RX_ANY);
        if ep.held.is_some() {
            // A kept copy of what just came by itself.
            if let Some(Kept::Am(_, r)) = ep.held.as_mut().and_then(|h| h.take(psn)) {
                self.events.push_back(Event::ReleaseHeld(r));
            }
            self.held_changed(slot);
        }
    }

    /// Moves the head to `psn` whatever was or was not received: a handshake says where the numbering starts.
    pub(super) fn jump_head(&mut self, slot: u32, psn: Psn) {
        let ep = &mut self.eps[slot];
        if psn != ep.rx_head.next() {
            self.drop_held(slot);
        }
        self.accept(slot, psn);
    }

    // --- packets beyond a gap

    /// Keeps the buffer of a packet for which [`Engine::handle_packet`] said `Hold`.
    pub fn hold(&mut self, ep: EpId, psn: u16, am_id: u8, buffer: R) {
        let psn = Psn::new(psn);
        match self.find(ep) {
            Some(slot) if !self.eps[slot].is_failed() && self.is_next(slot, psn) == Ok(false) => {
                self.stats.rx_held += 1;
                self.keep(slot, psn, Kept::Am(am_id, buffer));
                self.debug_check(slot);
            }
            _ => self.events.push_back(Event::ReleaseHeld(buffer)),
        }
    }

    fn keep(&mut self, slot: u32, psn: Psn, kept: Kept<R>) {
        let places = self.hold_places;
        let rings = &mut self.rings;
        let held =
            self.eps[slot].held.get_or_insert_with(|| rings.pop().unwrap_or_else(|| Box::new(Held::new(places))));
        if let Some(Kept::Am(_, r)) = held.insert(psn, kept) {
            self.events.push_back(Event::ReleaseHeld(r));
        }
    }

    /// Whether [`Engine::poll_held`] may have something.
    #[inline]
    pub fn has_held(&self) -> bool {
        !self.held_ready.is_empty()
    }

    /// The next kept message that is in order by now: deliver it to the handler of the id, like the one before it.
    pub fn poll_held(&mut self) -> Option<(EpId, u8, R)> {
        while let Some(&id) = self.held_ready.front() {
            if let Some(slot) = self.find(id) {
                if let Some((am_id, buffer)) = self.take_held(slot) {
                    self.stats.rx_delivered += 1;
                    return Some((id, am_id, buffer));
                }
                self.eps[slot].is.remove(Is::HELD_READY);
            }
            self.held_ready.pop_front();
        }
        None
    }

    /// Takes the next message in order out of the ring, and the PUTs before it.
    fn take_held(&mut self, slot: u32) -> Option<(u8, R)> {
        loop {
            let ep = &mut self.eps[slot];
            let next = ep.rx_head.next();
            let kept = ep.held.as_mut()?.take(next)?;
            ep.rx_head = next;
            self.held_changed(slot);
            if let Kept::Am(am_id, buffer) = kept {
                return Some((am_id, buffer));
            }
        }
    }

    /// After the head or the ring changed: a ring that is empty goes back to the pool, a next packet that is there is queued.
    fn held_changed(&mut self, slot: u32) {
        let ep = &mut self.eps[slot];
        let Some(held) = &ep.held else { return };
        if held.is_empty() {
            self.rings.extend(ep.held.take());
        } else if held.has(ep.rx_head.next()) && !ep.is.contains(Is::HELD_READY) {
            ep.is.insert(Is::HELD_READY);
            self.held_ready.push_back(EpId { slot, id: ep.id });
        }
    }

    /// Gives every kept buffer of the endpoint back.
    pub(super) fn drop_held(&mut self, slot: u32) {
        let Some(mut held) = self.eps[slot].held.take() else { return };
        for kept in held.drain() {
            if let Kept::Am(_, r) = kept {
                self.events.push_back(Event::ReleaseHeld(r));
            }
        }
        self.rings.push(held);
    }

    // --- control packets for an endpoint

    fn on_ctl(
        &mut self,
        now: Time,
        slot: u32,
        neth: Neth,
        news: AckNews,
        bytes: &[u8],
    ) -> Result<RxVerdict, DropReason> {
        let features = self.features_of(slot);
        match wire::ctl_type(bytes).ok_or(DropReason::Short)? {
            wire::CREP => {
                let crep = wire::Crep::parse(bytes).ok_or(DropReason::Short)?;
                self.on_crep(now, slot, neth, &crep)
            }
            wire::XACK if features.intersects(Features::SACK | Features::BUDGET) => {
                let xack = wire::Xack::parse(bytes).ok_or(DropReason::Short)?;
                self.note_answer(now, slot, neth, news);
                if features.contains(Features::BUDGET) {
                    self.set_peer_share(self.eps[slot].peer, xack.budget);
                }
                if news != AckNews::Ignored {
                    self.on_xack(now, slot, &xack);
                }
                Ok(RxVerdict::Control)
            }
            kind @ (wire::BYE | wire::BYE_ACK) if features.contains(Features::BYE) => {
                let src = wire::parse_bye(bytes).ok_or(DropReason::Short)?;
                if src != self.eps[slot].dest {
                    return Err(DropReason::WrongEpId);
                }
                if kind == wire::BYE { self.on_bye(now, slot, neth) } else { self.on_bye_ack(slot) }
            }
            wire::CREQ => Err(DropReason::Malformed),
            _ => Err(DropReason::UnknownControl),
        }
    }
}

/// Whether a gap before this packet is worth a NACK. Not when there is no room for what would be resent; and not in answer to
/// a NACK, or two endpoints that both miss something would go on telling each other as fast as the network lets them.
fn provokes_nack(neth: Neth, meta: &RxMeta) -> bool {
    meta.can_deliver && (neth.is_am() || !neth.is(wire::NACK))
}
