//! Who is connected to whom: records of peers, matching of requests by (peer, conn_sn), CREQ and CREP, restarts.
//!
//! The n-th connections that two interfaces open to each other are the same connection; `conn_sn` is that n. Start reading at
//! [`Engine::connect_to_iface`] (we ask) and [`Engine::handle_creq`] (they ask). `docs/ud-protocol.md`, "Connections".

use std::hash::Hash;

use uct::{ErrorKind, Time};

use super::{
    config::{ExtCaps, PeerCaps},
    engine::Engine,
    ep::{EpId, Is, Link, Owed, Owner, State},
    event::{ConnectOutcome, CreqInfo, CreqOutcome, Event, RxMeta, RxVerdict},
    packet::PacketKind,
    psn::Psn,
    slab::NIL,
    stats::DropReason,
    wire::{self, Neth},
};

/// What is known about one queue pair at one address.
pub(super) struct Peer<P> {
    pub(super) addr: P,
    pub(super) qpn: u32,
    pub(super) next_conn_sn: u32,
    /// A local connect has used a number here: the record must stay, since numbers are never used twice.
    pub(super) is_local: bool,
    /// Keeps the record while its endpoints are being freed.
    pub(super) is_pinned: bool,
    /// Stands for the process there, and for the one before it.
    pub(super) process: Option<u64>,
    pub(super) process_before: Option<u64>,
    /// Another process that claims to be there.
    pub(super) claim: Option<Claim>,
    pub(super) ext: Option<ExtCaps>,
    pub(super) max_packet: u32,
    /// First of the list of endpoints.
    pub(super) first_ep: u32,
    /// Charges of what we have in flight to it, and what it allows (0: it says nothing).
    pub(super) in_flight: u64,
    pub(super) share: u32,
    /// Endpoints here that want to be told when they can send.
    pub(super) waiting: u32,
    /// Last epoch in which it sent, and the share of our budget it was told.
    pub(super) epoch: u32,
    pub(super) advertised: u32,
}

/// A handshake packet of a process that is not the known one: it has followed that, or the packet is late. Who lives goes
/// on asking, and who is dead does not.
#[derive(Copy, Clone)]
pub(super) struct Claim {
    process: u64,
    since: Time,
}

impl<T, P: Clone + Eq + Hash, L, R> Engine<T, P, L, R> {
    /// Connects to an interface: `peer` and `qpn` name it, `caps` comes from its device address.
    ///
    /// Either the peer asked first and its endpoint is taken over, or a new endpoint is made; then call
    /// [`Engine::resolved`] when its link is there, which sends the request. Fails with `ExceedsLimit` when the 2^32 - 1
    /// connection numbers to this peer, or the endpoint ids, are used up.
    pub fn connect_to_iface(
        &mut self,
        now: Time,
        peer: P,
        qpn: u32,
        path_index: u8,
        caps: PeerCaps,
    ) -> Result<(EpId, ConnectOutcome), ErrorKind> {
        self.observe(now);
        let p = self.peer_for(peer, qpn, &caps);
        if let Some(ext) = caps.ext {
            self.note_told_process(p, ext.incarnation);
        }
        let result = self.connect_on(p, path_index);
        self.drop_idle_peer(p);
        if let Ok((id, _)) = result {
            self.debug_check(id.slot);
        }
        result
    }

    fn connect_on(&mut self, p: u32, path_index: u8) -> Result<(EpId, ConnectOutcome), ErrorKind> {
        loop {
            let sn = self.peers[p].next_conn_sn;
            if sn == u32::MAX {
                return Err(ErrorKind::ExceedsLimit);
            }
            match self.matches.get(&(p, sn)).copied() {
                Some(slot) if self.eps[slot].owner == Owner::Passive => {
                    self.take_conn_sn(p);
                    return Ok((self.claim(slot), ConnectOutcome::Claimed));
                }
                // The number is that of an endpoint that outlived a restart of the peer.
                Some(_) => self.take_conn_sn(p),
                None => {
                    let slot = self.insert_ep().ok_or(ErrorKind::ExceedsLimit)?;
                    self.take_conn_sn(p);
                    let ep = &mut self.eps[slot];
                    ep.path_index = path_index;
                    ep.transition(State::Resolving);
                    self.link_to_peer(slot, p);
                    self.insert_match(slot, sn);
                    return Ok((self.ep_id(slot), ConnectOutcome::New));
                }
            }
        }
    }

    fn take_conn_sn(&mut self, p: u32) {
        let peer = &mut self.peers[p];
        peer.next_conn_sn += 1;
        peer.is_local = true;
    }

    fn claim(&mut self, slot: u32) -> EpId {
        self.eps[slot].owner = Owner::User;
        self.forget_passive();
        self.stats.passive_claimed += 1;
        self.ep_id(slot)
    }

    /// An endpoint for connect-to-endpoint: it has an id to tell the peer, and nothing else. Fails with `ExceedsLimit` when
    /// the ids are used up.
    pub fn create_ep(&mut self, now: Time) -> Result<EpId, ErrorKind> {
        self.observe(now);
        let slot = self.insert_ep().ok_or(ErrorKind::ExceedsLimit)?;
        self.eps[slot].is.insert(Is::P2P);
        Ok(self.ep_id(slot))
    }

    /// Connects an endpoint of [`Engine::create_ep`] to the peer's endpoint `remote_ep`. No handshake follows: the endpoint
    /// is connected when [`Engine::resolved`] brings its link. `InvalidParam` if it has a peer already, `InvalidAddress` if
    /// `remote_ep` is not an endpoint id, `Closed` if the endpoint is gone.
    pub fn connect_to_ep(
        &mut self,
        now: Time,
        ep: EpId,
        peer: P,
        qpn: u32,
        remote_ep: u32,
        caps: PeerCaps,
    ) -> Result<(), ErrorKind> {
        self.observe(now);
        let slot = self.find(ep).ok_or(ErrorKind::Closed)?;
        if self.eps[slot].state != State::Idle {
            return Err(ErrorKind::InvalidParam);
        }
        if remote_ep >= wire::NO_EP {
            return Err(ErrorKind::InvalidAddress);
        }
        let p = self.peer_for(peer, qpn, &caps);
        if let Some(ext) = caps.ext {
            self.note_told_process(p, ext.incarnation);
        }
        if self.eps[slot].src_qpn != NIL && self.eps[slot].src_qpn != qpn {
            // What came early was not the peer's: its numbering does not concern us.
            self.jump_head(slot, Psn::new(self.cfg.initial_psn).prev());
        }
        let ep = &mut self.eps[slot];
        ep.dest = remote_ep;
        ep.transition(State::Resolving);
        self.link_to_peer(slot, p);
        self.debug_check(slot);
        Ok(())
    }

    /// The link of a resolving endpoint, or why there is none (the endpoint fails; an unclaimed one is forgotten). Gives the
    /// link back if nobody waits for it any more.
    pub fn resolved(&mut self, now: Time, ep: EpId, link: Result<L, ErrorKind>) -> Option<L> {
        self.observe(now);
        let slot = match self.find(ep) {
            Some(slot) if self.eps[slot].state == State::Resolving => slot,
            _ => return link.ok(),
        };
        match link {
            Err(kind) if self.eps[slot].owner == Owner::User => self.fail(now, slot, kind),
            Err(_) => self.free_ep(slot),
            Ok(link) => {
                let ep = &mut self.eps[slot];
                ep.link = Link::Live(link);
                ep.send_time = self.clock.run(now);
                if ep.is_dest_known() {
                    self.connected(slot);
                } else {
                    ep.transition(State::Connecting);
                    self.owe(slot, Owed::CREQ);
                }
                self.enqueue(slot);
                self.maybe_close(now, slot);
            }
        }
        self.debug_check(slot);
        None
    }

    /// Swaps the link of an endpoint (its address handle was found stale) and gives the old one back for the caller to
    /// retire. If the endpoint is gone or has no link yet, `link` itself comes back.
    pub fn replace_link(&mut self, ep: EpId, link: L) -> Option<L> {
        match self.find(ep) {
            Some(slot) => Some(self.eps[slot].link.replace(link)),
            None => Some(link),
        }
    }

    fn connected(&mut self, slot: u32) {
        let ep = &mut self.eps[slot];
        ep.transition(State::Connected);
        let id = EpId { slot, id: ep.id };
        if ep.owner == Owner::User {
            self.events.push_back(Event::Connected(id));
        }
        if !ep.is.contains(Is::P2P) && ep.owner != Owner::Passive {
            // An endpoint that asked before the peer restarted may have a number from beyond the restarted numbering.
            let used = ep.conn_sn.saturating_add(1);
            let peer = &mut self.peers[ep.peer];
            peer.next_conn_sn = peer.next_conn_sn.max(used);
        }
        self.wake_writer(slot);
    }

    // --- requests of peers

    /// Checks the shape of a CREQ.
    pub(super) fn on_creq_packet(&self, neth: Neth, meta: &RxMeta, bytes: &[u8]) -> Result<RxVerdict, DropReason> {
        if neth.is_am() || !neth.is(wire::CTL) {
            return Err(DropReason::Malformed);
        }
        let creq = wire::Creq::parse(bytes).ok_or(DropReason::Short)?;
        if creq.ep_id == wire::NO_EP {
            return Err(DropReason::Malformed);
        }
        if creq.qpn != meta.src_qpn {
            return Err(DropReason::WrongSource);
        }
        if creq.conn_sn == u32::MAX {
            return Err(DropReason::BadConnSn);
        }
        Ok(RxVerdict::Creq(CreqInfo {
            qpn: creq.qpn,
            ep_id: creq.ep_id,
            conn_sn: creq.conn_sn,
            path_index: creq.path_index,
            dev_addr: wire::CTL_PACKET_LEN..bytes.len(),
            ident: creq.ident,
            psn: neth.psn.raw(),
        }))
    }

    /// Feeds a connection request whose address the caller has unpacked: `peer` is built from the address and the packet's
    /// path, so that paths which share an address handle share a numbering.
    ///
    /// May make an unclaimed endpoint; then an [`Event::Resolve`] asks for its link. Their number is bounded
    /// (`passive_max`).
    pub fn handle_creq(&mut self, now: Time, info: CreqInfo, peer: P, caps: PeerCaps) -> CreqOutcome {
        self.observe(now);
        if info.conn_sn == u32::MAX || info.ep_id >= wire::NO_EP {
            return self.refuse_creq(DropReason::BadConnSn);
        }
        let caps = PeerCaps { ext: wire::parse_ext(&info.ident), ..caps };
        let Some(p) = self.find_peer(&peer, info.qpn) else {
            return self.accept_stranger(now, &info, peer, caps);
        };
        if let Err(why) = self.note_process(now, p, &info.ident, NIL) {
            return self.refuse_creq(why);
        }
        self.note_caps(p, &caps);
        let known = self.matches.get(&(p, info.conn_sn)).copied();
        let outcome = match known.and_then(|slot| self.on_matched_creq(now, slot, &info)) {
            Some(outcome) => outcome,
            None => self.accept_stranger(now, &info, peer, caps),
        };
        self.drop_idle_peer(p);
        if let CreqOutcome::Matched(id) | CreqOutcome::Created(id) = outcome {
            self.debug_check(id.slot);
        }
        outcome
    }

    fn refuse_creq(&mut self, why: DropReason) -> CreqOutcome {
        self.stats.drops[why as usize] += 1;
        CreqOutcome::Dropped(why)
    }

    /// Makes an unclaimed endpoint for a request that matches none.
    fn accept_stranger(&mut self, now: Time, info: &CreqInfo, peer: P, caps: PeerCaps) -> CreqOutcome {
        if self.passive_count >= self.cfg.passive_max {
            self.stats.passive_refused += 1;
            // Perhaps some of them are dead: look soon.
            self.sweep_at = self.sweep_at.min(now + self.cfg.timer_tick.saturating_mul(8));
            return self.refuse_creq(DropReason::TooManyPassive);
        }
        let Some(slot) = self.insert_ep() else {
            return self.refuse_creq(DropReason::NoEpId);
        };
        let p = self.peer_for(peer, info.qpn, &caps);
        self.peers[p].process.get_or_insert(wire::process_of(&info.ident));
        let ep = &mut self.eps[slot];
        ep.transition(State::Resolving);
        ep.owner = Owner::Passive;
        ep.path_index = info.path_index;
        ep.dest = info.ep_id;
        ep.rx_head = Psn::new(info.psn);
        ep.is.insert(Is::CREQ_RCVD | Is::RX_ANY | Is::HEARD);
        ep.owed.insert(Owed::CREP);
        ep.last_heard = now;
        self.link_to_peer(slot, p);
        self.insert_match(slot, info.conn_sn);
        let id = self.ep_id(slot);
        self.note_passive(now, id);
        self.stats.passive_created += 1;
        self.events.push_back(Event::Resolve { ep: id, passive: true });
        CreqOutcome::Created(id)
    }

    /// A request for an endpoint that exists. `None`: it does not belong to that one after all; treat it as a stranger's.
    fn on_matched_creq(&mut self, now: Time, slot: u32, info: &CreqInfo) -> Option<CreqOutcome> {
        let ep = &mut self.eps[slot];
        ep.last_heard = now;
        let id = EpId { slot, id: ep.id };
        if ep.dest == info.ep_id {
            return Some(self.on_duplicate_creq(slot));
        }
        if ep.is_dest_known() && ep.is_lingering() || ep.is_failed() {
            // The peer opens this connection anew. The old endpoint finishes its own business, if it can, by itself.
            self.remove_match(slot);
            return None;
        }
        if !ep.is_dest_known() {
            self.on_crossing_creq(now, slot, info);
            return Some(CreqOutcome::Matched(id));
        }
        if self.peers[ep.peer].ext.is_some() {
            // Peers of ours never use a number twice for one process of ours: this request was meant for the one before us.
            return Some(self.refuse_creq(DropReason::WrongEpId));
        }
        // Same process, other endpoint: follow it, and keep our own numbering (`docs/ud-protocol.md` "Restart").
        self.stats.stale_dest += 1;
        ep.dest = info.ep_id;
        ep.is.remove(Is::PEER_CLOSED);
        self.jump_head(slot, Psn::new(info.psn));
        self.owe(slot, Owed::CREP);
        Some(CreqOutcome::Matched(id))
    }

    /// The request again. If our answer is not acknowledged, it is repeated at once, under its old PSN.
    fn on_duplicate_creq(&mut self, slot: u32) -> CreqOutcome {
        if self.eps[slot].is_failed() {
            return self.refuse_creq(DropReason::EpFailed);
        }
        self.stats.drops[DropReason::Duplicate as usize] += 1;
        if self.unacked_crep(slot).is_some() {
            self.owe(slot, Owed::CREP_AGAIN);
        }
        CreqOutcome::Matched(self.ep_id(slot))
    }

    /// The CREP in the endpoint's send list; it is among the first entries or not there.
    pub(super) fn unacked_crep(&self, slot: u32) -> Option<u32> {
        let mut at = self.eps[slot].head;
        for _ in 0..4 {
            let k = self.pkts.get(at)?;
            if k.kind == PacketKind::Crep {
                return k.psn.is_after(self.eps[slot].acked).then_some(at);
            }
            at = k.next;
        }
        None
    }

    /// Both sides asked at once. The peer's request counts as an ack of ours, which it will not answer otherwise.
    fn on_crossing_creq(&mut self, now: Time, slot: u32, info: &CreqInfo) {
        let ep = &mut self.eps[slot];
        ep.dest = info.ep_id;
        ep.is.insert(Is::CREQ_RCVD | Is::HEARD);
        ep.owed.remove(Owed::CREQ | Owed::RESEND);
        let own = ep.psn.prev();
        self.jump_head(slot, Psn::new(info.psn));
        if self.eps[slot].in_flight() > 0 {
            self.new_ack(now, slot, own);
        }
        self.owe(slot, Owed::CREP);
        if self.eps[slot].link.is_live() {
            self.connected(slot);
        }
    }

    /// The answer to our request, or the peer's half of a crossing.
    pub(super) fn on_crep(
        &mut self,
        now: Time,
        slot: u32,
        neth: Neth,
        crep: &wire::Crep,
    ) -> Result<RxVerdict, DropReason> {
        let ep = &self.eps[slot];
        if ep.is.contains(Is::P2P) || !ep.link.is_live() {
            return Err(DropReason::Unexpected);
        }
        if crep.src_ep_id >= wire::NO_EP {
            return Err(DropReason::Malformed);
        }
        let (peer, is_known) = (ep.peer, ep.is_dest_known());
        // An endpoint that still asks does not mind which process answers. A connected one has lost its peer, if another
        // process answers a request that it got from the one before.
        self.note_process(now, peer, &crep.ident, if is_known { NIL } else { slot })?;
        let Some(ep) = self.eps.get_mut(slot) else {
            self.drop_idle_peer(peer);
            return Err(DropReason::StaleProcess);
        };
        ep.last_heard = now;
        if ep.is_failed() {
            return Err(DropReason::StaleProcess);
        }
        if is_known && ep.dest != crep.src_ep_id {
            return Err(DropReason::WrongEpId);
        }
        let caps = PeerCaps { max_packet: self.peers[peer].max_packet as usize, ext: wire::parse_ext(&crep.ident) };
        self.note_caps(peer, &caps);
        if !self.eps[slot].is_dest_known() {
            self.eps[slot].dest = crep.src_ep_id;
            self.eps[slot].owed.remove(Owed::CREQ);
            self.connected(slot);
            self.on_ack_psn(now, slot, neth.ack);
        }
        // Only now there is somebody to send an ack to.
        if neth.is(wire::ACK_REQ) {
            self.owe(slot, Owed::ACK);
        }
        let ep = &self.eps[slot];
        if !ep.is.contains(Is::RX_ANY) || neth.psn == ep.rx_head.next() {
            // Nothing was accepted before: whatever was lost before the CREP was part of the handshake. Afterwards a jump
            // would skip messages for good.
            self.jump_head(slot, neth.psn);
            return Ok(RxVerdict::Control);
        }
        if neth.psn.is_upto(ep.rx_head) {
            return Err(DropReason::Duplicate);
        }
        self.owe(slot, Owed::NACK);
        Err(DropReason::Gap)
    }

    // --- processes and peers

    /// An address says which process made it. It may be old or damaged, so that is believed only of a peer that has not
    /// spoken for itself; packets tell the truth, see [`Engine::note_process`].
    fn note_told_process(&mut self, p: u32, incarnation: u64) {
        self.peers[p].process.get_or_insert(wire::process_of_incarnation(incarnation));
    }

    /// Takes note of which process stands behind a peer's address. If another one has followed the known one, the endpoints
    /// of that are given up, except `except`. An error says why the packet means nothing, or nothing yet.
    fn note_process(
        &mut self,
        now: Time,
        p: u32,
        ident: &[u8; wire::IDENT_LEN],
        except: u32,
    ) -> Result<(), DropReason> {
        let process = wire::process_of(ident);
        let peer = &mut self.peers[p];
        let Some(known) = peer.process else {
            peer.process = Some(process);
            return Ok(());
        };
        if known == process {
            peer.claim = None;
            return Ok(());
        }
        let was_before = peer.process_before == Some(process);
        // A UCX process that has followed another one of UCX, with the same ids, must not get a packet that is meant for
        // that: an ack of what it has not sent aborts it. So nobody is asked.
        let may_ask = peer.ext.is_some() && wire::parse_ext(ident).is_some();
        let is_doubtful = was_before || may_ask && self.has_company(p, except);
        if is_doubtful && !(may_ask && self.is_claim_proven(now, p, process)) {
            return Err(if was_before { DropReason::StaleProcess } else { DropReason::DoubtfulProcess });
        }
        let peer = &mut self.peers[p];
        peer.claim = None;
        peer.process_before = Some(known);
        peer.process = Some(process);
        peer.ext = None;
        peer.next_conn_sn = self.cfg.first_conn_sn;
        self.stats.restarts += 1;
        self.give_up_old_process(now, p, except);
        Ok(())
    }

    /// True if a process goes on claiming to be there, half a tick after it began or more, and that which is known has not
    /// been heard meanwhile though it was asked.
    fn is_claim_proven(&mut self, now: Time, p: u32, process: u64) -> bool {
        let begun = self.peers[p].claim.filter(|c| c.process == process).map(|c| c.since);
        let was_heard = |since| self.company(p, NIL).any(|slot| self.eps[slot].last_heard > since);
        if let Some(since) = begun.filter(|since| !was_heard(*since)) {
            return now.since(since) >= self.cfg.timer_tick / 2;
        }
        self.peers[p].claim = Some(Claim { process, since: now });
        let company: Vec<u32> = self.company(p, NIL).collect();
        for slot in company {
            self.owe(slot, Owed::ACK_REQ);
        }
        false
    }

    fn has_company(&self, p: u32, except: u32) -> bool {
        self.company(p, except).next().is_some()
    }

    /// The endpoints, except one, that a living process would miss if another one were taken for its successor.
    fn company(&self, p: u32, except: u32) -> impl Iterator<Item = u32> {
        self.handshaken(p, except).filter(|slot| {
            let ep = &self.eps[*slot];
            let is_done = ep.is_failed() || ep.is_lingering() && ep.in_flight() == 0;
            !is_done
        })
    }

    /// The endpoints, except one, that a handshake has connected with this peer. One that only asks does not care who answers;
    /// connect-to-endpoint pairs are made by the user, who may well have made this one for a new process.
    fn handshaken(&self, p: u32, except: u32) -> impl Iterator<Item = u32> {
        let mut at = self.peers[p].first_ep;
        std::iter::from_fn(move || {
            let slot = at;
            at = self.eps.get(slot)?.peer_next;
            Some(slot)
        })
        .filter(move |slot| {
            let ep = &self.eps[*slot];
            *slot != except && ep.is_dest_known() && !ep.is.contains(Is::P2P)
        })
    }

    fn give_up_old_process(&mut self, now: Time, p: u32, except: u32) {
        self.peers[p].is_pinned = true;
        for slot in self.handshaken(p, except).collect::<Vec<_>>() {
            if self.eps[slot].owner == Owner::User {
                self.remove_match(slot);
                if !self.eps[slot].is_failed() {
                    self.fail(now, slot, ErrorKind::ConnectionReset);
                }
            } else {
                self.free_ep(slot);
            }
        }
        self.peers[p].is_pinned = false;
    }

    /// The record of a peer, made if need be.
    fn peer_for(&mut self, addr: P, qpn: u32, caps: &PeerCaps) -> u32 {
        if let Some(p) = self.find_peer(&addr, qpn) {
            self.peers[p].max_packet = self.packet_limit(caps);
            if self.peers[p].ext.is_none() {
                self.note_caps(p, caps);
            }
            return p;
        }
        self.insert_peer(Peer {
            addr,
            qpn,
            next_conn_sn: self.cfg.first_conn_sn,
            is_local: false,
            is_pinned: false,
            process: None,
            process_before: None,
            claim: None,
            ext: caps.ext,
            max_packet: self.packet_limit(caps),
            first_ep: NIL,
            in_flight: 0,
            share: caps.ext.map_or(0, |e| e.rx_budget),
            waiting: 0,
            epoch: 0,
            advertised: 0,
        })
    }

    fn packet_limit(&self, caps: &PeerCaps) -> u32 {
        caps.max_packet.min(self.cfg.max_packet) as u32
    }

    fn note_caps(&mut self, p: u32, caps: &PeerCaps) {
        let limit = self.packet_limit(caps);
        let peer = &mut self.peers[p];
        peer.max_packet = limit;
        let first = peer.ext.is_none();
        peer.ext = caps.ext;
        // Later handshakes do not undo what extended acks have said meanwhile.
        if let (true, Some(ext)) = (first, caps.ext) {
            peer.share = ext.rx_budget;
        }
    }

    fn link_to_peer(&mut self, slot: u32, p: u32) {
        let first = self.peers[p].first_ep;
        if first != NIL {
            self.eps[first].peer_prev = slot;
        }
        let ep = &mut self.eps[slot];
        ep.peer = p;
        ep.src_qpn = self.peers[p].qpn;
        ep.peer_next = first;
        ep.peer_prev = NIL;
        self.peers[p].waiting += u32::from(ep.is.contains(Is::WANT_WRITABLE));
        self.peers[p].first_ep = slot;
    }

    pub(super) fn unlink_from_peer(&mut self, slot: u32) {
        let ep = &self.eps[slot];
        let (p, prev, next) = (ep.peer, ep.peer_prev, ep.peer_next);
        if p == NIL {
            return;
        }
        if ep.is.contains(Is::WANT_WRITABLE) {
            self.peers[p].waiting -= 1;
        }
        if prev == NIL {
            self.peers[p].first_ep = next;
        } else {
            self.eps[prev].peer_next = next;
        }
        if next != NIL {
            self.eps[next].peer_prev = prev;
        }
        self.eps[slot].peer = NIL;
        self.drop_idle_peer(p);
    }

    /// Forgets a peer that only strangers' requests made known, once no endpoint is left.
    fn drop_idle_peer(&mut self, p: u32) {
        if self.peers.get(p).is_some_and(|r| r.first_ep == NIL && !r.is_local && !r.is_pinned) {
            self.remove_peer(p);
        }
    }

    fn insert_match(&mut self, slot: u32, conn_sn: u32) {
        let ep = &mut self.eps[slot];
        ep.conn_sn = conn_sn;
        ep.is.insert(Is::MATCHED);
        self.matches.insert((ep.peer, conn_sn), slot);
    }

    pub(super) fn remove_match(&mut self, slot: u32) {
        let ep = &mut self.eps[slot];
        if ep.is.contains(Is::MATCHED) {
            ep.is.remove(Is::MATCHED);
            self.matches.remove(&(ep.peer, ep.conn_sn));
        }
    }
}
