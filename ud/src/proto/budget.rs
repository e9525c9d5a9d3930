//! The receive budget: how much may be in flight to one peer, and how much we grant to each of ours.
//!
//! A receiver's socket buffer is far smaller than a full window, and it is shared by all its senders. So a receiver of ours
//! divides its budget among the peers that sent something recently and tells each its share; a sender keeps what is in
//! flight to a peer, over all its endpoints, within that share, but always allows itself one packet.

use std::{hash::Hash, time::Duration};

use uct::Time;

use super::{config::Features, conn::Peer, engine::Engine, slab::NIL};

/// What a datagram costs in a socket buffer besides its bytes, and how much its bytes cost: a careful model of the kernel's
/// accounting, which rounds buffers up to powers of two.
const PACKET_COST: u32 = 768;

/// What a packet of `len` bytes counts against a budget.
pub(super) fn charge_of(len: usize) -> u32 {
    PACKET_COST.saturating_add(u32::try_from(len).unwrap_or(u32::MAX).saturating_mul(2))
}

/// Who sent something recently, in coarse steps: one comparison per packet.
pub(super) struct Epochs {
    len: Duration,
    until: Time,
    /// Number of the current epoch; peers remember the last one in which they sent.
    number: u32,
    senders: u32,
    senders_before: u32,
}

impl Epochs {
    pub(super) fn new(len: Duration) -> Self {
        Epochs { len, until: Time::ZERO, number: 0, senders: 0, senders_before: 0 }
    }

    /// Marks a peer, which last sent in epoch `last`, as a sender of this moment.
    #[inline]
    pub(super) fn note(&mut self, now: Time, last: &mut u32) {
        if now >= self.until {
            self.senders_before = if now.since(self.until) > self.len { 0 } else { self.senders };
            self.senders = 0;
            self.number = self.number.wrapping_add(1);
            self.until = now + self.len;
        }
        if *last != self.number {
            *last = self.number;
            self.senders += 1;
        }
    }

    pub(super) fn active(&self) -> u32 {
        self.senders.max(self.senders_before).max(1)
    }
}

/// Whether a packet of this charge is so far from the end of the peer's budget that it may go, and need not ask for an ack on
/// its account ([`Engine::budget_allows`], [`Engine::budget_asks`]). `share` is what the peer said, 0 if it said nothing.
#[inline]
pub(super) fn budget_is_far(share: u32, before: u64, charge: u32, max_packet: usize) -> bool {
    let (share, after) = (u64::from(share), before + u64::from(charge));
    share == 0 || after + u64::from(charge_of(max_packet)) <= share && !(before < share / 2 && after >= share / 2)
}

impl<T, P: Clone + Eq + Hash, L, R> Engine<T, P, L, R> {
    /// The share of our budget that each sender has now; 0 if we state none.
    pub(super) fn share(&self) -> u32 {
        let b = self.cfg.rx_budget;
        if b == 0 { 0 } else { (b / self.epochs.active()).max(1) }
    }

    /// Whether the share is so different from what this endpoint's peer was told that it should hear.
    pub(super) fn is_share_news(&self, slot: u32) -> bool {
        if self.cfg.rx_budget == 0 || !self.features_of(slot).contains(Features::BUDGET) {
            return false;
        }
        let (now, told) = (self.share(), self.peers[self.eps[slot].peer].advertised);
        now / 2 >= told || now <= told / 2
    }

    /// What the peer allows in flight; `None` if it states nothing.
    #[inline]
    pub(super) fn peer_share(&self, p: &Peer<P>) -> Option<u64> {
        if p.share == 0 {
            return None;
        }
        let negotiated = p.ext.is_some_and(|e| (e.features & self.features).contains(Features::BUDGET));
        negotiated.then_some(u64::from(p.share))
    }

    /// Whether a packet of this charge may be in flight to the peer besides what is.
    #[inline]
    pub(super) fn budget_allows(&self, p: &Peer<P>, charge: u32) -> bool {
        match self.peer_share(p) {
            None => true,
            Some(share) => p.in_flight == 0 || p.in_flight + u64::from(charge) <= share,
        }
    }

    /// Whether a packet of this charge should ask for an ack because the budget runs out: at half of it, and from where one
    /// full packet more would not fit.
    #[inline]
    pub(super) fn budget_asks(&self, p: &Peer<P>, charge: u32) -> bool {
        let Some(share) = self.peer_share(p) else { return false };
        let before = p.in_flight;
        let after = before + u64::from(charge);
        let full = u64::from(charge_of(self.cfg.max_packet));
        after + full > share || (before < share / 2 && after >= share / 2)
    }

    /// A peer said how much it takes.
    pub(super) fn set_peer_share(&mut self, peer: u32, share: u32) {
        let grew = share == 0 || share > self.peers[peer].share;
        self.peers[peer].share = share;
        if grew {
            self.wake_peer(peer);
        }
    }

    /// Tells the endpoints of a peer that wait for room that there is some.
    pub(super) fn wake_peer(&mut self, peer: u32) {
        if self.peers.get(peer).is_none_or(|p| p.waiting == 0) {
            return;
        }
        let mut at = self.peers[peer].first_ep;
        while at != NIL {
            let next = self.eps[at].peer_next;
            self.wake_writer(at);
            at = next;
        }
    }
}
