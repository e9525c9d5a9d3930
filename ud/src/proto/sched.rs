//! What to send next: why would this endpoint send now?
//!
//! Endpoints that owe a packet stand in a queue and take turns, one packet each. Per endpoint the order is: CREQ, CREP,
//! resends, keep-alive, BYE, and last the acks, which a user's own packet carries for free if it comes first.

use std::hash::Hash;

use uct::Time;

use super::{
    config::{ExtCaps, Features},
    engine::{Engine, nanos},
    ep::{EpId, Is, Link, Owed},
    event::{Transmit, TransmitKind},
    packet::{Packet, PacketKind},
    slab::NIL,
    wire::{self, Neth},
};

/// A packet that is built: in the control buffer, or a user's packet with this header.
struct Built {
    resend: Option<(u32, [u8; 8])>,
    solicited: bool,
    signaled: bool,
}

impl<T, P: Clone + Eq + Hash, L, R> Engine<T, P, L, R> {
    /// Notes that the endpoint has something to send.
    pub(super) fn owe(&mut self, slot: u32, what: Owed) {
        self.eps[slot].owed.insert(what);
        self.enqueue(slot);
    }

    pub(super) fn enqueue(&mut self, slot: u32) {
        let ep = &mut self.eps[slot];
        if ep.link.is_live() && !ep.owed.is_empty() && !ep.is.contains(Is::READY) {
            ep.is.insert(Is::READY);
            self.ready.push_back(EpId { slot, id: ep.id });
        }
    }

    /// The next packet that the engine itself wants to send. Call it with room in the send queue, and post what it gives
    /// with exactly the serial number `serial`, which must grow with every posting.
    pub fn poll_transmit(&mut self, now: Time, serial: u64) -> Option<Transmit<'_, T, L>> {
        self.observe(now);
        self.free_doomed();
        let (slot, built) = loop {
            let id = self.ready.pop_front()?;
            let Some(slot) = self.find(id) else { continue };
            self.eps[slot].is.remove(Is::READY);
            let Some(built) = self.build(now, slot, serial) else { continue };
            break (slot, built);
        };
        self.enqueue(slot);
        let ep = &mut self.eps[slot];
        ep.last_serial = serial;
        self.debug_check(slot);
        let ep = &self.eps[slot];
        let Link::Live(link) = &ep.link else { return None };
        let kind = match built.resend {
            Some((at, neth)) => TransmitKind::Resend { neth, op: self.pkts[at].op.as_ref()? },
            None => TransmitKind::Control { bytes: &self.ctl },
        };
        Some(Transmit {
            ep: EpId { slot, id: ep.id },
            link,
            kind,
            solicited: built.solicited,
            signaled: built.signaled || ep.is_lingering(),
        })
    }

    /// Builds the most urgent packet of the endpoint, and does what its sending means. `None`: nothing after all.
    fn build(&mut self, now: Time, slot: u32, serial: u64) -> Option<Built> {
        let ep = &mut self.eps[slot];
        if !ep.link.is_live() {
            return None;
        }
        self.ctl.clear();
        if ep.is_failed() {
            // All that may still leave is the answer to a BYE.
            ep.owed &= Owed::BYE_ACK;
            return self.build_low(now, slot);
        }
        if ep.owed.contains(Owed::CREQ) {
            ep.owed.remove(Owed::CREQ);
            return Some(self.build_handshake(now, slot, serial, PacketKind::Creq));
        }
        if ep.owed.contains(Owed::CREP) {
            ep.owed.remove(Owed::CREP);
            return Some(self.build_handshake(now, slot, serial, PacketKind::Crep));
        }
        if ep.owed.contains(Owed::CREP_AGAIN) {
            ep.owed.remove(Owed::CREP_AGAIN);
            if let Some(at) = self.unacked_crep(slot)
                && !self.pkts[at].is_resend_queued(self.tx_done)
            {
                return Some(self.build_resend(now, slot, serial, at, true));
            }
        }
        if self.eps[slot].owed.contains(Owed::RESEND)
            && let Some(at) = self.next_resend(now, slot)
        {
            self.eps[slot].resend_cur = self.pkts[at].next;
            let is_last = self.next_resend(now, slot).is_none();
            return Some(self.build_resend(now, slot, serial, at, is_last));
        }
        if self.eps[slot].owed.contains(Owed::PROBE) {
            self.eps[slot].owed.remove(Owed::PROBE);
            // A packet that was sent meanwhile does as well.
            if self.eps[slot].in_flight() == 0 {
                return Some(self.build_probe(now, slot, serial));
            }
        }
        self.build_low(now, slot)
    }

    /// The packets that take no PSN.
    fn build_low(&mut self, now: Time, slot: u32) -> Option<Built> {
        let owed = self.eps[slot].owed;
        if owed.contains(Owed::BYE) {
            self.eps[slot].owed.remove(Owed::BYE);
            self.build_bye(now, slot, wire::BYE);
            return Some(Built { resend: None, solicited: true, signaled: true });
        }
        if owed.contains(Owed::BYE_ACK) {
            self.eps[slot].owed.remove(Owed::BYE_ACK);
            self.build_bye(now, slot, wire::BYE_ACK);
            return Some(Built { resend: None, solicited: false, signaled: true });
        }
        let acks = owed & (Owed::ACK | Owed::NACK | Owed::XACK | Owed::ACK_REQ);
        if acks.is_empty() {
            return None;
        }
        self.eps[slot].owed.remove(acks);
        let built = self.build_ack(slot, acks);
        self.on_ack_sent(now, slot);
        Some(built)
    }

    fn build_ack(&mut self, slot: u32, acks: Owed) -> Built {
        let ep = &self.eps[slot];
        let features = self.features_of(slot);
        let ack_req = if acks.contains(Owed::ACK_REQ) { wire::ACK_REQ } else { 0 };
        let sacked = match &ep.held {
            Some(held) if features.contains(Features::SACK) => held.bitmap(ep.rx_head),
            _ => 0,
        };
        let mut neth = Neth { packet_type: ep.dest | ack_req, psn: ep.psn, ack: ep.rx_head };
        // With the next packet here and only waiting to be taken, there is no gap to speak of.
        let gap = acks.contains(Owed::NACK) && sacked & 1 == 0;
        // Where budgets are in use every ack of its own states the share: one that is lost is made good by the next.
        let budget = if features.contains(Features::BUDGET) { self.share() } else { 0 };
        if budget != 0 || (gap && sacked != 0) {
            neth.packet_type |= wire::CTL;
            wire::Xack { gap, budget, sacked }.emit(neth, &mut self.ctl);
            let peer = self.eps[slot].peer;
            self.peers[peer].advertised = budget;
            self.stats.tx_xacks += 1;
        } else {
            let nack = acks.contains(Owed::NACK) && sacked & 1 == 0;
            neth.packet_type |= if nack { wire::NACK } else { 0 };
            self.ctl.extend_from_slice(&neth.emit());
            *(if nack { &mut self.stats.tx_nacks } else { &mut self.stats.tx_acks }) += 1;
        }
        // A peer that sleeps in the kernel is woken only once asking gently has not helped.
        let is_poke = ack_req != 0 && self.eps[slot].tick >= nanos(self.cfg.min_poke);
        Built { resend: None, solicited: is_poke, signaled: ack_req != 0 }
    }

    fn build_handshake(&mut self, now: Time, slot: u32, serial: u64, kind: PacketKind) -> Built {
        let psn = self.eps[slot].psn;
        let ack_req = kind == PacketKind::Crep;
        *(if ack_req { &mut self.stats.tx_crep } else { &mut self.stats.tx_creq }) += 1;
        let packet = self.own_packet(now, slot, serial, kind, ack_req);
        // A CREP carries the ack of the CREQ, and with it whatever ack was owed.
        self.eps[slot].owed.remove(Owed::ACK);
        self.enter_window(now, slot, packet);
        self.emit_own(slot, kind, psn, ack_req);
        if kind == PacketKind::Crep {
            self.wake_writer(slot);
        }
        Built { resend: None, solicited: true, signaled: false }
    }

    fn build_probe(&mut self, now: Time, slot: u32, serial: u64) -> Built {
        let psn = self.eps[slot].psn;
        self.stats.tx_probes += 1;
        let packet = self.own_packet(now, slot, serial, PacketKind::Probe, true);
        self.eps[slot].owed.remove(Owed::ACK | Owed::ACK_REQ);
        self.enter_window(now, slot, packet);
        self.emit_own(slot, PacketKind::Probe, psn, true);
        Built { resend: None, solicited: false, signaled: false }
    }

    fn own_packet(&self, now: Time, slot: u32, serial: u64, kind: PacketKind, ack_req: bool) -> Packet<T> {
        Packet {
            next: NIL,
            psn: self.eps[slot].psn,
            kind,
            sacked: false,
            ack_req,
            resends: 0,
            packet_type: 0,
            charge: 0,
            serial,
            sent: now,
            op: None,
        }
    }

    /// Sends an entry of the window again: with the newest ack, and asking for one by the rule that keeps acks few but sure.
    fn build_resend(&mut self, now: Time, slot: u32, serial: u64, at: u32, is_last: bool) -> Built {
        let run = self.clock.run(now);
        let ep = &mut self.eps[slot];
        let k = &mut self.pkts[at];
        let ack_req = is_last || k.psn.raw().is_multiple_of(4) || k.psn == ep.acked.next();
        k.resends = k.resends.saturating_add(1);
        k.sent = now;
        k.serial = serial;
        k.ack_req |= ack_req;
        ep.last_resend = run;
        ep.resends = ep.resends.saturating_add(1);
        if is_last {
            // The repetition may be lost, too. Each one is given twice the time: what never arrives, because it is longer
            // than the path allows, say, must not be sent as fast as the peer can ask for it.
            let patience = ep.first_interval(self.tick0) << (k.resends - 1).min(8);
            if ep.tick == self.tick0 {
                ep.set_tick_at(now.add_nanos(patience.min(self.tick0)));
            }
            self.limits.rearm(&self.clock, &mut self.timers, slot, ep);
        }
        self.stats.tx_resends += 1;
        let (kind, psn) = (k.kind, k.psn);
        let resend = match kind {
            PacketKind::Am => {
                let flag = if ack_req { wire::ACK_REQ } else { 0 };
                let neth = Neth { packet_type: k.packet_type | ep.dest | flag, psn, ack: ep.rx_head };
                Some((at, neth.emit()))
            }
            kind => {
                self.emit_own(slot, kind, psn, ack_req || kind == PacketKind::Creq);
                None
            }
        };
        Built { resend, solicited: true, signaled: true }
    }

    /// Writes one of the engine's own packets into the control buffer; a repetition differs only in ack and ACK_REQ.
    fn emit_own(&mut self, slot: u32, kind: PacketKind, psn: super::psn::Psn, ack_req: bool) {
        let ident = self.ident(slot);
        let ep = &self.eps[slot];
        let flag = if ack_req { wire::ACK_REQ } else { 0 };
        let neth = |packet_type| Neth { packet_type: packet_type | flag, psn, ack: ep.rx_head };
        match kind {
            PacketKind::Creq => {
                let creq = wire::Creq {
                    qpn: self.cfg.local_qpn,
                    ep_id: ep.id,
                    conn_sn: ep.conn_sn,
                    path_index: ep.path_index,
                    ident,
                };
                creq.emit(neth(wire::CTL | wire::NO_EP), &self.cfg.device_addr, &mut self.ctl);
            }
            PacketKind::Crep => {
                wire::Crep { src_ep_id: ep.id, ident }.emit(neth(wire::CTL | ep.dest), &mut self.ctl);
            }
            PacketKind::Probe => {
                self.ctl.extend_from_slice(&neth(wire::PUT | ep.dest).emit());
                self.ctl.extend_from_slice(&[0; 8]);
            }
            PacketKind::Am | PacketKind::Marker => {}
        }
    }

    /// The bytes by which peers recognise this process; for peers of ours with what they may send.
    fn ident(&mut self, slot: u32) -> [u8; wire::IDENT_LEN] {
        if let Some(ident) = self.cfg.foreign_ident {
            return ident;
        }
        let share = self.share();
        let peer = self.eps[slot].peer;
        let peer = &mut self.peers[peer];
        if peer.advertised == 0 {
            peer.advertised = share;
        }
        wire::ext_ident(&ExtCaps {
            features: self.features,
            incarnation: self.cfg.incarnation,
            rx_budget: peer.advertised,
        })
    }

    fn build_bye(&mut self, now: Time, slot: u32, kind: u8) {
        let ep = &self.eps[slot];
        let neth = Neth { packet_type: wire::CTL | ep.dest, psn: ep.psn, ack: ep.rx_head };
        wire::emit_bye(kind, neth, ep.id, &mut self.ctl);
        self.on_bye_sent(now, slot, kind);
    }
}
