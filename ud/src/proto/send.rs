//! Sending user data: begin reads, commit writes. And what waits for it: flush, check, writable.

use std::{hash::Hash, hint::cold_path};

use uct::{ErrorKind, Time};

use super::{
    budget::{budget_is_far, charge_of},
    engine::{Engine, rare},
    ep::{EpId, Is, Link, Owed, State},
    event::{Begun, Event, FlushOutcome, Refused, SendKind},
    packet::{Packet, PacketKind},
    slab::NIL,
    timer::observe,
    wire::{self, NETH_LEN, Neth},
};

impl<T, P: Clone + Eq + Hash, L, R> Engine<T, P, L, R> {
    /// Checks whether a message of `len` bytes (after the NETH) can be sent now and makes its header. Changes nothing: post
    /// the packet and call [`Engine::commit_send`], or forget the result.
    ///
    /// `reserved`: the window slot was taken by [`Engine::reserve`] before. `NoResource`: not connected, window or budget
    /// full, or the answer to the peer's request has to go first. `am_id` above 31 and a message longer than the peer's
    /// packets are `InvalidParam` and `ExceedsLimit`.
    #[inline(always)]
    pub fn begin_send(
        &self,
        ep: EpId,
        am_id: u8,
        len: usize,
        kind: SendKind,
        reserved: bool,
    ) -> Result<Begun, Refused> {
        let slot = self.find(ep).ok_or(Refused::Failed(ErrorKind::Closed))?;
        self.check_sendable(slot)?;
        let e = &self.eps[slot];
        if am_id > 31 {
            return Err(Refused::Failed(ErrorKind::InvalidParam));
        }
        let len = len.saturating_add(NETH_LEN);
        let peer = &self.peers[e.peer];
        if len > peer.max_packet as usize {
            return Err(Refused::Failed(ErrorKind::ExceedsLimit));
        }
        let charge = charge_of(len);
        let has_room = reserved || (e.is_window_open(e.reserved) && self.budget_allows(peer, charge));
        if !has_room {
            return Err(Refused::NoResource);
        }
        let ack_req = kind == SendKind::Zcopy
            || e.owed.contains(Owed::ACK_REQ)
            || e.is_asking()
            || self.budget_asks(peer, charge);
        let packet_type = wire::am_type(0, am_id, false);
        let neth = Neth { packet_type: wire::am_type(e.dest, am_id, ack_req), psn: e.psn, ack: e.rx_head };
        Ok(Begun { ep, psn: e.psn, charge, reserved, ack_req, packet_type, neth: neth.emit() })
    }

    /// [`Engine::begin_send`] and [`Engine::commit_send`] in one, for what nearly every message is: copied, on a connected
    /// endpoint with room, and nothing in its way. The message, of `len` bytes after the NETH and with an id of at most 31,
    /// is in the window when this returns, so it must be posted with the link and the serial number `serial`, or the
    /// endpoint must fail.
    ///
    /// `prepare` says whether the message can go by this link, and gives what it takes; it is asked last. `make` gets that
    /// and the header, puts the operation where it stays, and answers the packet's bytes in it with what else posting needs;
    /// this comes back with the link. `None`: nothing was changed, because of `prepare` or because of the endpoint's state;
    /// `begin_send` says why.
    ///
    /// `read` gives the time, if it matters: if a clock starts, or the answer to this message will measure a round trip. A
    /// message that only follows others has the time that was observed last.
    #[inline(always)]
    pub fn send_plain<B, X>(
        &mut self,
        read: impl FnOnce() -> Time,
        ep: EpId,
        (am_id, len): (u8, usize),
        serial: u64,
        prepare: impl FnOnce(&L) -> Option<B>,
        make: impl for<'a> FnOnce(B, [u8; NETH_LEN], &'a mut Option<T>) -> (&'a [u8], X),
    ) -> Option<(&L, &[u8], X)> {
        debug_assert!(am_id <= 31, "{am_id}");
        let Some(e) = self.eps.plain_mut(ep.slot) else { return rare() };
        let Some(peer) = self.peers.get_mut(e.peer) else { return rare() };
        let len = len.saturating_add(NETH_LEN);
        let charge = charge_of(len);
        let fits = e.id == ep.id
            && len <= peer.max_packet as usize
            && budget_is_far(peer.share, peer.in_flight, charge, self.cfg.max_packet)
            && (e.granted.room > 0 || e.grant_room());
        if !fits {
            return rare();
        }
        let Link::Live(link) = &e.link else { return rare() };
        let Some(prepared) = prepare(link) else { return rare() };
        let neth = Neth { packet_type: wire::am_type(e.dest, am_id, false), psn: e.psn, ack: e.rx_head };
        self.pkts.make_room();
        // The first one starts the clocks. Who only follows others has the time that was observed last.
        let was_idle = e.in_flight() == 0;
        let now = if was_idle || e.tick_at == Time::MAX {
            observe(&mut self.clock, &self.timers, &mut self.stats, read())
        } else {
            self.clock.last()
        };
        // Written field by field where it stays: built elsewhere and moved it would be copied twice.
        let (i, k) = self.pkts.append(e.tail)?;
        let (bytes, extra) = make(prepared, neth.emit(), &mut k.op);
        k.psn = e.psn;
        k.kind = PacketKind::Am;
        k.sacked = false;
        k.ack_req = false;
        k.resends = 0;
        k.packet_type = wire::am_type(0, am_id, false);
        k.charge = charge;
        k.serial = serial;
        k.sent = now;
        if std::mem::replace(&mut e.tail, i) == NIL {
            e.head = i;
        }
        e.granted.room -= 1;
        e.owed.remove(Owed::ACK | Owed::PROBE);
        e.psn = e.psn.next();
        e.last_serial = serial;
        peer.in_flight += u64::from(charge);
        self.stats.tx_am += 1;
        if was_idle {
            e.send_time = self.clock.run(now);
            if !e.granted.acks {
                cold_path();
                e.tick = self.tick0;
                self.limits.restart(&mut self.timers, ep.slot, e, now, self.tick0);
            }
        } else if e.tick_at == Time::MAX {
            cold_path();
            e.start_interval(now, self.tick0);
            e.granted.acks = false;
            self.limits.rearm(&self.clock, &mut self.timers, ep.slot, e);
        }
        Some((e.link.get()?, bytes, extra))
    }

    #[inline]
    fn check_sendable(&self, slot: u32) -> Result<(), Refused> {
        if self.eps[slot].lets_data_out() { Ok(()) } else { Err(self.why_not_sendable(slot)) }
    }

    #[cold]
    fn why_not_sendable(&self, slot: u32) -> Refused {
        let e = &self.eps[slot];
        if let State::Failed(kind) = e.state {
            return Refused::Failed(kind);
        }
        if e.is.contains(Is::CANCELED) || e.is_lingering() {
            return Refused::Failed(ErrorKind::Canceled);
        }
        if e.is.contains(Is::PEER_CLOSED) {
            return Refused::Failed(ErrorKind::ConnectionReset);
        }
        Refused::NoResource
    }

    /// Records that the packet of `begun` was posted with send-queue serial number `serial`: its PSN is taken, `op` waits
    /// for the ack. Must follow [`Engine::begin_send`] with no other call for this endpoint in between. No allocation in the
    /// steady state.
    #[inline(always)]
    pub fn commit_send(&mut self, now: Time, begun: Begun, serial: u64, op: T) {
        self.observe(now);
        let slot = begun.ep.slot;
        debug_assert_eq!(self.find(begun.ep), Some(slot), "the endpoint went between begin and commit");
        let e = &mut self.eps[slot];
        debug_assert_eq!(e.psn, begun.psn, "another packet was sent between begin and commit");
        // The header carried our head, and the ack request if one was owed; a NACK is not carried by data.
        let asked = if begun.ack_req { Owed::ACK_REQ } else { Owed::empty() };
        e.owed.remove(Owed::ACK | Owed::PROBE | asked);
        if begun.reserved {
            e.reserved = e.reserved.saturating_sub(1);
        }
        self.stats.tx_am += 1;
        let packet = Packet {
            next: NIL,
            psn: begun.psn,
            kind: PacketKind::Am,
            sacked: false,
            ack_req: begun.ack_req,
            resends: 0,
            packet_type: begun.packet_type,
            charge: begun.charge,
            serial,
            sent: now,
            op: Some(op),
        };
        self.enter_window(now, slot, packet);
        self.debug_check(slot);
    }

    /// Gives the packet the next PSN and starts the clocks if the window was empty. A user who keeps sending does not move
    /// the clock of the time-out.
    #[inline(always)]
    pub(super) fn enter_window(&mut self, now: Time, slot: u32, packet: Packet<T>) {
        let run = self.clock.run(now);
        let e = &mut self.eps[slot];
        debug_assert_eq!(e.psn, packet.psn);
        if e.in_flight() == 0 {
            e.send_time = run;
            e.tick = self.tick0;
        }
        e.psn = e.psn.next();
        e.last_serial = packet.serial;
        if e.tick_at == Time::MAX || e.in_flight() == 1 {
            e.start_interval(now, self.tick0);
            self.limits.rearm(&self.clock, &mut self.timers, slot, e);
        }
        self.push_packet(slot, packet);
    }

    /// Takes a window slot for a message of at most `len` bytes whose packing runs while the engine is unlocked.
    /// [`Engine::begin_send`] with `reserved` uses it, and its commit gives it back; on failure call [`Engine::unreserve`].
    pub fn reserve(&mut self, ep: EpId, len: usize) -> Result<(), Refused> {
        let slot = self.find(ep).ok_or(Refused::Failed(ErrorKind::Closed))?;
        self.check_sendable(slot)?;
        let e = &self.eps[slot];
        let charge = charge_of(len.saturating_add(NETH_LEN));
        let has_room = e.is_window_open(e.reserved) && self.budget_allows(&self.peers[e.peer], charge);
        if !has_room {
            return Err(Refused::NoResource);
        }
        self.eps[slot].reserved += 1;
        Ok(())
    }

    /// Gives a reserved slot back.
    pub fn unreserve(&mut self, ep: EpId) {
        if let Some(slot) = self.find(ep) {
            let e = &mut self.eps[slot];
            e.reserved = e.reserved.saturating_sub(1);
            self.wake_writer(slot);
        }
    }

    /// Whether a message of any length would be accepted now.
    pub fn can_send(&self, ep: EpId) -> bool {
        self.find(ep).is_some_and(|slot| self.can_send_slot(slot))
    }

    fn can_send_slot(&self, slot: u32) -> bool {
        let e = &self.eps[slot];
        self.check_sendable(slot).is_ok()
            && e.is_window_open(e.reserved)
            && self.budget_allows(&self.peers[e.peer], charge_of(self.peers[e.peer].max_packet as usize))
    }

    /// Asks for one [`Event::Writable`] when a message of any length would be accepted; at once, if it would be now. If the
    /// peer has closed, the endpoint fails now: somebody wants to use it.
    pub fn want_writable(&mut self, ep: EpId) {
        let Some(slot) = self.find(ep) else { return };
        let e = &self.eps[slot];
        if e.is_failed() || e.is.intersects(Is::CANCELED | Is::WANT_WRITABLE) || e.is_lingering() {
            return;
        }
        if e.is.contains(Is::PEER_CLOSED) {
            self.fail(self.clock.last(), slot, ErrorKind::ConnectionReset);
            return;
        }
        let e = &mut self.eps[slot];
        e.is.insert(Is::WANT_WRITABLE);
        if let Some(peer) = self.peers.get_mut(e.peer) {
            peer.waiting += 1;
        }
        self.wake_writer(slot);
        // The window may be full of packets none of which asks for an ack, after a cut of the window or the budget.
        if self.eps[slot].is.contains(Is::WANT_WRITABLE) && self.eps[slot].state == State::Connected {
            self.ask_for_ack(slot);
        }
    }

    /// Tells the user that the endpoint can send, if that is so and was asked for.
    #[inline]
    pub(super) fn wake_writer(&mut self, slot: u32) {
        if self.eps[slot].is.contains(Is::WANT_WRITABLE) {
            self.wake_waiting(slot);
        }
    }

    fn wake_waiting(&mut self, slot: u32) {
        if self.can_send_slot(slot) {
            self.clear_want(slot);
            self.events.push_back(Event::Writable(self.ep_id(slot)));
        }
    }

    pub(super) fn clear_want(&mut self, slot: u32) {
        let e = &mut self.eps[slot];
        if e.is.contains(Is::WANT_WRITABLE) {
            e.is.remove(Is::WANT_WRITABLE);
            if let Some(peer) = self.peers.get_mut(e.peer) {
                peer.waiting -= 1;
            }
        }
    }

    /// Makes sure that somebody asks for an ack of the newest packet.
    pub(super) fn ask_for_ack(&mut self, slot: u32) {
        let e = &self.eps[slot];
        if e.in_flight() == 0 || !e.is_dest_known() || e.state != State::Connected {
            return;
        }
        let last = e.psn.prev();
        // The tail may be a marker for that packet, which then carries its mark.
        if let Some(k) = self.pkts.get_mut(e.tail)
            && k.psn == last
            && !k.ack_req
        {
            k.ack_req = true;
            self.owe(slot, Owed::ACK_REQ);
        }
    }

    /// Completes when everything sent before is acknowledged and no resend of it is left in the send queue: at once, or in
    /// an [`Event::Done`] with `marker`. While connecting, it also waits for the handshake.
    pub fn flush(&mut self, now: Time, ep: EpId, marker: T) -> Result<FlushOutcome<T>, (T, Refused)> {
        self.observe(now);
        let Some(slot) = self.find(ep) else {
            return Err((marker, Refused::Failed(ErrorKind::Closed)));
        };
        let e = &self.eps[slot];
        match e.state {
            State::Failed(kind) => return Err((marker, Refused::Failed(kind))),
            _ if e.is.contains(Is::CANCELED) || e.is_lingering() => {
                return Err((marker, Refused::Failed(ErrorKind::Canceled)));
            }
            State::Idle => return Ok(FlushOutcome::Done(marker)),
            // Connect-to-endpoint has no handshake: nothing would ever leave by itself.
            State::Resolving if e.is.contains(Is::P2P) && e.head == NIL => return Ok(FlushOutcome::Done(marker)),
            // The handshake's own packet will have the next PSN.
            State::Resolving => self.push_marker(slot, self.eps[slot].psn, marker),
            State::Connecting if e.in_flight() == 0 => self.push_marker(slot, self.eps[slot].psn, marker),
            State::Connecting => self.push_marker(slot, self.eps[slot].psn.prev(), marker),
            State::Connected if e.owed.contains(Owed::CREP) => self.push_marker(slot, self.eps[slot].psn, marker),
            State::Connected if e.head == NIL => return Ok(FlushOutcome::Done(marker)),
            State::Connected => {
                self.ask_for_ack(slot);
                let asked = self.pkts[self.eps[slot].tail].ack_req;
                self.push_marker(slot, self.eps[slot].psn.prev(), marker);
                let tail = self.eps[slot].tail;
                self.pkts[tail].ack_req = asked;
            }
        }
        self.debug_check(slot);
        Ok(FlushOutcome::InProgress)
    }

    /// Checks that the peer is alive: an idle endpoint sends a keep-alive, a busy or connecting one has packets out anyway.
    /// `marker` completes when the peer has answered. `NotConnected` before connect-to-endpoint; the endpoint fails in the
    /// end if nobody answers.
    pub fn check(
        &mut self,
        now: Time,
        ep: EpId,
        marker: Option<T>,
    ) -> Result<FlushOutcome<Option<T>>, (Option<T>, Refused)> {
        self.observe(now);
        let Some(slot) = self.find(ep) else {
            return Err((marker, Refused::Failed(ErrorKind::Closed)));
        };
        let e = &self.eps[slot];
        let refused = match e.state {
            State::Failed(kind) => Some(kind),
            _ if e.is.contains(Is::CANCELED) || e.is_lingering() => Some(ErrorKind::Canceled),
            State::Idle => Some(ErrorKind::NotConnected),
            _ if e.is.contains(Is::PEER_CLOSED) => {
                self.fail(now, slot, ErrorKind::ConnectionReset);
                Some(ErrorKind::ConnectionReset)
            }
            _ => None,
        };
        if let Some(kind) = refused {
            return Err((marker, Refused::Failed(kind)));
        }
        let e = &self.eps[slot];
        let is_pair = e.is.contains(Is::P2P);
        let handshake_out = e.owed.intersects(Owed::CREQ | Owed::CREP) || e.state == State::Resolving && !is_pair;
        let waits_for = if handshake_out || e.in_flight() == 0 { e.psn } else { e.psn.prev() };
        if (e.state == State::Connected || is_pair) && e.in_flight() == 0 && !handshake_out {
            self.owe(slot, Owed::PROBE);
        } else {
            self.ask_for_ack(slot);
        }
        if let Some(op) = marker {
            self.push_marker(slot, waits_for, op);
        }
        self.debug_check(slot);
        Ok(FlushOutcome::InProgress)
    }
}
