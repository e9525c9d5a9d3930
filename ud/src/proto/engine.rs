//! The engine itself: its tables, look-ups, and the checks that hold between any two calls.

use std::{
    collections::{HashMap, VecDeque},
    hash::{BuildHasher, BuildHasherDefault, Hash, Hasher},
    time::Duration,
};

use hashbrown::{DefaultHashBuilder, HashTable};
use uct::{Error, Time};

use super::{
    budget::Epochs,
    config::{EngineConfig, Features},
    conn::Peer,
    ep::{Ep, EpId, Eps, Is, Owed, Owner, State},
    event::{Begun, EpStateView, Event},
    held::Held,
    packet::{Packet, Packets, Settle},
    psn::Psn,
    slab::{NIL, Slab},
    stats::EngineStats,
    timer::{RunClock, TimeLimits, TimerQueue},
    wire::NO_EP,
};

/// Spreads the endpoint ids, which we hand out one after the other, over the table. Peers do not choose them.
#[derive(Default)]
pub(super) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &b in bytes {
            self.write_u32(u32::from(b));
        }
    }

    fn write_u32(&mut self, v: u32) {
        self.0 = (self.0 ^ u64::from(v)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

/// Endpoint ids, handed out one after the other, that are found without hashing.
const RECENT: usize = 256;

/// The UD protocol of one interface: all its endpoints, and every decision about what is sent, delivered, resent and given up.
///
/// `T` is one user operation (buffer, completion), `P` a peer's address value, `L` a link (what a post needs to reach the
/// peer), `R` a received buffer kept for later. The engine stores them, compares `P`, and looks into none.
///
/// Memory: about 256 bytes per endpoint with two hash-table places of 16 bytes, 100 bytes and a place per peer, 64 bytes and
/// `T` per packet in flight. Tables keep their largest size until the engine is dropped. Records of peers that a local connect
/// has named stay as well, since connection numbers are never used twice; those of strangers go with their last endpoint.
///
/// After every call that can change something, drain [`Engine::poll_event`], and [`Engine::poll_transmit`] as far as the
/// send queue has room.
pub struct Engine<T, P, L, R> {
    pub(super) cfg: EngineConfig,
    /// What we really speak: nothing beyond UCX when we play a plain UCX.
    pub(super) features: Features,
    pub(super) tick0: u64,
    pub(super) hold_places: usize,
    pub(super) limits: TimeLimits,

    pub(super) eps: Eps<L, R>,
    ids: HashMap<u32, u32, BuildHasherDefault<IdHasher>>,
    /// Where the ids that were looked up last are, by their low bits. A guess: the record itself says whose it is.
    recent: Box<[u32; RECENT]>,
    next_id: u32,

    pub(super) peers: Slab<Peer<P>>,
    peer_index: HashTable<u32>,
    hash: DefaultHashBuilder,
    /// (peer, conn_sn) to endpoint.
    pub(super) matches: hashbrown::HashMap<(u32, u32), u32>,

    pub(super) pkts: Packets<T>,
    pub(super) timers: TimerQueue,
    pub(super) clock: RunClock,
    pub(super) sweep_at: Time,
    pub(super) passive: VecDeque<EpId>,
    pub(super) passive_count: usize,

    pub(super) ready: VecDeque<EpId>,
    pub(super) tx_blocked: Vec<EpId>,
    pub(super) tx_done: u64,
    pub(super) doomed: Vec<EpId>,
    pub(super) held_ready: VecDeque<EpId>,
    #[expect(clippy::vec_box, reason = "rings move between here and the records, which hold them by one word")]
    pub(super) rings: Vec<Box<Held<R>>>,
    pub(super) events: VecDeque<Event<T, L, R>>,
    /// The control packet being handed out.
    pub(super) ctl: Vec<u8>,
    pub(super) epochs: Epochs,
    pub(super) stats: EngineStats,
}

impl<T, P: Clone + Eq + Hash, L, R> Engine<T, P, L, R> {
    /// An engine without endpoints. Fails with `InvalidConfig` if a setting is out of range.
    pub fn new(cfg: EngineConfig) -> Result<Self, Error> {
        cfg.validate()?;
        let features = if cfg.foreign_ident.is_some() { Features::empty() } else { cfg.features };
        let first_id = cfg.first_ep_id.unwrap_or_else(|| (scramble(cfg.seed) % u64::from(NO_EP)) as u32);
        let hold_places = if cfg.hold_max == 0 { 0 } else { cfg.hold_max.next_power_of_two() };
        Ok(Engine {
            features,
            tick0: nanos(cfg.timer_tick),
            hold_places,
            limits: TimeLimits { timeout: nanos(cfg.timeout), linger: nanos(cfg.linger), answers_count: true },
            eps: Eps::new(),
            ids: HashMap::default(),
            recent: Box::new([NIL; RECENT]),
            next_id: first_id,
            peers: Slab::new(),
            peer_index: HashTable::new(),
            hash: DefaultHashBuilder::default(),
            matches: hashbrown::HashMap::new(),
            pkts: Packets::new(),
            timers: TimerQueue::new(),
            clock: RunClock::new((cfg.timeout / 8).max(cfg.timer_tick)),
            sweep_at: Time::MAX,
            passive: VecDeque::new(),
            passive_count: 0,
            ready: VecDeque::new(),
            tx_blocked: Vec::new(),
            tx_done: 0,
            doomed: Vec::new(),
            held_ready: VecDeque::new(),
            rings: Vec::new(),
            events: VecDeque::new(),
            ctl: Vec::with_capacity(512),
            epochs: Epochs::new(cfg.timer_tick.saturating_mul(16)),
            stats: EngineStats::default(),
            cfg,
        })
    }

    /// The settings.
    pub fn config(&self) -> &EngineConfig {
        &self.cfg
    }

    /// Whether an answer without progress counts as a sign of life, as it does at first. The owner says no while it knows that
    /// some packets cannot pass however often they are sent.
    pub fn count_answers(&mut self, yes: bool) {
        self.limits.answers_count = yes;
    }

    /// The counters.
    pub fn stats(&self) -> &EngineStats {
        &self.stats
    }

    /// Endpoint records of all kinds: users', unclaimed, lingering.
    pub fn ep_count(&self) -> usize {
        self.eps.len()
    }

    /// Endpoints that strangers asked for and nobody has claimed.
    pub fn passive_count(&self) -> usize {
        self.passive_count
    }

    /// Records about peers.
    pub fn peer_count(&self) -> usize {
        self.peers.len()
    }

    /// Packets sent and not yet released, or released and not yet polled, flush markers included.
    pub fn packet_count(&self) -> usize {
        self.pkts.len()
    }

    /// The state of an endpoint; `None` if it is gone.
    pub fn state(&self, ep: EpId) -> Option<EpStateView> {
        let ep = &self.eps[self.find(ep)?];
        Some(match (ep.owner, ep.state) {
            (Owner::Lingering { .. }, _) => EpStateView::Lingering,
            (_, State::Idle) => EpStateView::Idle,
            (_, State::Resolving) => EpStateView::Resolving,
            (_, State::Connecting) => EpStateView::Connecting,
            (_, State::Connected) => EpStateView::Connected,
            (_, State::Failed(kind)) => EpStateView::Failed(kind),
        })
    }

    /// Whether the peer's endpoint is known and the link is there. False for failed and lingering endpoints.
    pub fn is_connected(&self, ep: EpId) -> bool {
        self.state(ep) == Some(EpStateView::Connected)
    }

    /// Whether anything that was sent, or any flush marker, is unfinished.
    pub fn has_outstanding(&self, ep: EpId) -> bool {
        self.find(ep).is_some_and(|s| self.eps[s].head != NIL)
    }

    /// The endpoint's link, once it has one.
    pub fn link(&self, ep: EpId) -> Option<&L> {
        self.eps[self.find(ep)?].link.get()
    }

    /// The operation of the oldest packet that the peer has not acknowledged, and how often it was resent (255: or more).
    /// `None` if there is none, or it is the engine's own.
    pub fn oldest_unacked(&self, ep: EpId) -> Option<(&T, u8)> {
        let k = &self.pkts[self.first_unacked(self.find(ep)?)?];
        Some((k.op.as_ref()?, k.resends))
    }

    /// The link of the endpoint whose send was begun.
    #[inline]
    pub fn link_of(&self, begun: &Begun) -> Option<&L> {
        self.eps.get(begun.ep.slot)?.link.get()
    }

    /// The peer's address value, its queue pair number, and the path.
    pub fn peer(&self, ep: EpId) -> Option<(&P, u32, u8)> {
        let ep = &self.eps[self.find(ep)?];
        let peer = self.peers.get(ep.peer)?;
        Some((&peer.addr, peer.qpn, ep.path_index))
    }

    /// Longest message (after the NETH) that the peer of an endpoint can take, as far as it is known.
    pub fn max_message(&self, ep: EpId) -> Option<usize> {
        let peer = self.peers.get(self.eps[self.find(ep)?].peer)?;
        Some((peer.max_packet as usize).saturating_sub(super::wire::NETH_LEN))
    }

    /// The peer's endpoint id, once it is known.
    pub fn remote_ep_id(&self, ep: EpId) -> Option<u32> {
        let ep = &self.eps[self.find(ep)?];
        ep.is_dest_known().then_some(ep.dest)
    }

    /// The next event. Cheap when there is none.
    pub fn poll_event(&mut self) -> Option<Event<T, L, R>> {
        self.free_doomed();
        if let Some((op, serial)) = self.pkts.poll_done() {
            return Some(Event::Done { op, result: Ok(()), serial });
        }
        self.events.pop_front()
    }

    /// The next operation that ended well, and the serial of its last posting: what [`Engine::poll_event`] would say as
    /// [`Event::Done`], for less.
    #[inline]
    pub fn poll_done(&mut self) -> Option<(T, u64)> {
        self.pkts.poll_done()
    }

    /// Whether [`Engine::settle_done`] and [`Engine::poll_done`] have something.
    #[inline]
    pub fn has_done(&self) -> bool {
        self.pkts.has_done()
    }

    /// Settles the operations that ended well, in their order. At the first that cannot be settled it ends, and
    /// [`Engine::poll_done`] gives that one.
    pub fn settle_done(&mut self, with: impl Settle<T>) {
        self.pkts.settle_done(with);
    }

    /// 0 if neither [`Engine::poll_event`] nor [`Engine::poll_transmit`] has anything.
    #[inline]
    pub fn output_len(&self) -> usize {
        self.pkts.done_len() | self.events.len() | self.ready.len() | self.doomed.len()
    }

    // --- look-ups

    #[inline]
    pub(super) fn find(&self, ep: EpId) -> Option<u32> {
        (self.eps.get(ep.slot)?.id == ep.id).then_some(ep.slot)
    }

    /// Where the endpoint of this id is, if it is one of those that were looked up last; else any place, or none.
    #[inline]
    pub(super) fn recent_slot(&self, id: u32) -> u32 {
        self.recent[id as usize % RECENT]
    }

    #[inline]
    pub(super) fn find_wire(&mut self, id: u32) -> Option<u32> {
        let guess = self.recent_slot(id);
        match self.eps.get(guess) {
            Some(ep) if ep.id == id => Some(guess),
            _ => self.look_up(id),
        }
    }

    #[cold]
    fn look_up(&mut self, id: u32) -> Option<u32> {
        let slot = self.ids.get(&id).copied()?;
        self.recent[id as usize % RECENT] = slot;
        Some(slot)
    }

    pub(super) fn ep_id(&self, slot: u32) -> EpId {
        EpId { slot, id: self.eps[slot].id }
    }

    /// A new record with the next free id. Ids go up and round, so that one is used again as late as possible.
    pub(super) fn insert_ep(&mut self) -> Option<u32> {
        if self.ids.len() >= NO_EP as usize {
            return None;
        }
        while self.ids.contains_key(&self.next_id) {
            self.next_id = (self.next_id + 1) % NO_EP;
        }
        let id = self.next_id;
        self.next_id = (id + 1) % NO_EP;
        let slot = self.eps.insert(Ep::new(id, Psn::new(self.cfg.initial_psn), self.tick0));
        self.ids.insert(id, slot);
        Some(slot)
    }

    pub(super) fn forget_id(&mut self, id: u32) {
        self.ids.remove(&id);
    }

    pub(super) fn find_peer(&self, addr: &P, qpn: u32) -> Option<u32> {
        let h = self.hash.hash_one((addr, qpn));
        self.peer_index
            .find(h, |&i| {
                let p = &self.peers[i];
                p.qpn == qpn && p.addr == *addr
            })
            .copied()
    }

    pub(super) fn insert_peer(&mut self, peer: Peer<P>) -> u32 {
        let h = self.hash.hash_one((&peer.addr, peer.qpn));
        let i = self.peers.insert(peer);
        let (peers, hash) = (&self.peers, &self.hash);
        self.peer_index.insert_unique(h, i, |&i| hash.hash_one((&peers[i].addr, peers[i].qpn)));
        i
    }

    pub(super) fn remove_peer(&mut self, i: u32) {
        let h = self.hash.hash_one((&self.peers[i].addr, self.peers[i].qpn));
        if let Ok(entry) = self.peer_index.find_entry(h, |&j| j == i) {
            entry.remove();
        }
        self.peers.remove(i);
    }

    /// What may be spoken with the peer of this endpoint.
    pub(super) fn features_of(&self, slot: u32) -> Features {
        match self.peers.get(self.eps[slot].peer).and_then(|p| p.ext) {
            Some(ext) => ext.features & self.features,
            None => Features::empty(),
        }
    }

    // --- invariants

    /// Checks what must hold between any two calls, in full; for tests. Panics where it does not hold.
    pub fn check_invariants(&self) {
        let (mut pkts, mut passive, mut armed) = (0, 0, 0);
        for (slot, ep) in self.eps.iter() {
            assert_eq!(self.ids.get(&ep.id), Some(&slot), "ep {} is not found by its id", ep.id);
            self.check_ep(slot);
            pkts += self.check_list(slot);
            passive += usize::from(ep.owner == Owner::Passive);
            armed += usize::from(ep.deadline != Time::MAX);
            if ep.is.contains(Is::MATCHED) {
                assert_eq!(self.matches.get(&(ep.peer, ep.conn_sn)), Some(&slot));
            }
        }
        assert_eq!(self.ids.len(), self.eps.len());
        assert_eq!(pkts + self.pkts.done_len(), self.pkts.len(), "packets outside every list");
        assert_eq!(passive, self.passive_count);
        assert_eq!(armed, self.timers.armed());
        for (i, peer) in self.peers.iter() {
            assert_eq!(self.find_peer(&peer.addr, peer.qpn), Some(i));
            self.check_peer(i);
        }
    }

    /// The cheap part, for one endpoint; runs after each call in debug builds.
    #[inline]
    pub(super) fn debug_check(&self, slot: u32) {
        if cfg!(debug_assertions) && self.eps.get(slot).is_some() {
            self.check_ep(slot);
        }
    }

    fn check_ep(&self, slot: u32) {
        let ep = &self.eps[slot];
        let id = ep.id;
        assert!(ep.in_flight() <= 1026, "ep {id}: {} packets in flight", ep.in_flight());
        assert!((2..=self.cfg.max_window).contains(&ep.cwnd), "ep {id}: cwnd {}", ep.cwnd);
        assert!(ep.max_psn.since(ep.acked) <= ep.cwnd + 1, "ep {id}: window beyond cwnd");
        assert_eq!(ep.head == NIL, ep.tail == NIL, "ep {id}: half a list");
        match ep.state {
            State::Connected => assert!(ep.link.is_live() && ep.is_dest_known(), "ep {id}: connected to nothing"),
            State::Connecting => assert!(ep.link.is_live() && !ep.is_dest_known(), "ep {id}: connecting"),
            State::Failed(_) => assert!(ep.head == NIL && Owed::BYE_ACK.contains(ep.owed), "ep {id}: failed and busy"),
            State::Idle | State::Resolving => assert!(!ep.link.is_live(), "ep {id}: link too early"),
        }
        if !ep.is_dest_known() {
            let acks = Owed::ACK | Owed::NACK | Owed::XACK | Owed::ACK_REQ;
            assert!(!ep.owed.intersects(acks), "ep {id}: owes an ack to nobody");
        }
        if ep.in_flight() > 0 && self.tick0 < u64::MAX / 4 {
            assert!(ep.deadline != Time::MAX, "ep {id}: packets in flight and no timer");
        }
        if let Some(held) = &ep.held {
            assert!(!held.is_empty(), "ep {id}: empty ring kept");
        }
        let (granted, now) = (ep.granted, ep.grants());
        let is_true = granted.room <= now.room && granted.hears <= now.hears && granted.acks <= now.acks;
        assert!(is_true, "ep {id}: granted {granted:?}, but it is {now:?}");
    }

    fn check_list(&self, slot: u32) -> usize {
        let ep = &self.eps[slot];
        let (mut n, mut at, mut last, mut cur) = (0, ep.head, None, ep.resend_cur == NIL);
        while at != NIL {
            let k = &self.pkts[at];
            if let Some(last) = last {
                assert!(Psn::is_upto(last, k.psn), "ep {}: list out of order", ep.id);
            }
            cur |= at == ep.resend_cur;
            last = Some(k.psn);
            n += 1;
            if k.next == NIL {
                assert_eq!(at, ep.tail);
            }
            at = k.next;
        }
        assert!(cur, "ep {}: resend cursor outside the list", ep.id);
        n
    }

    fn check_peer(&self, i: u32) {
        let (mut charge, mut waiting, mut at) = (0u64, 0, self.peers[i].first_ep);
        while at != NIL {
            let ep = &self.eps[at];
            assert_eq!(ep.peer, i);
            waiting += u32::from(ep.is.contains(Is::WANT_WRITABLE));
            let mut k = ep.head;
            while k != NIL {
                charge += u64::from(self.pkts[k].charge);
                k = self.pkts[k].next;
            }
            at = ep.peer_next;
        }
        assert_eq!(charge, self.peers[i].in_flight, "bytes in flight to peer {i}");
        assert_eq!(waiting, self.peers[i].waiting);
    }

    /// The send list of an endpoint in words, for test failures.
    #[cfg(all(test, not(uct_loom)))]
    pub(super) fn dump(&self, ep: EpId) -> String {
        let Some(slot) = self.find(ep) else { return "gone".into() };
        let e = &self.eps[slot];
        let mut out = format!(
            "ep {} {:?} {:?} dest {} psn {} acked {} max {} cwnd {} {:?} {:?} tick_at {:?} deadline {:?}",
            e.id, e.state, e.owner, e.dest, e.psn, e.acked, e.max_psn, e.cwnd, e.is, e.owed, e.tick_at, e.deadline
        );
        let mut at = e.head;
        while let Some(k) = self.pkts.get(at) {
            out += &format!("; {:?} {} resends {} serial {}/{}", k.kind, k.psn, k.resends, k.serial, self.tx_done);
            at = k.next;
        }
        out
    }

    #[cfg(all(test, not(uct_loom)))]
    pub(super) fn dump_all(&self) -> String {
        self.eps.iter().map(|(slot, ep)| self.dump(EpId { slot, id: ep.id }) + "\n").collect()
    }

    // --- the send list

    /// Appends to the endpoint's send list.
    #[inline(always)]
    pub(super) fn push_packet(&mut self, slot: u32, packet: Packet<T>) -> u32 {
        let charge = packet.charge;
        let ep = &mut self.eps[slot];
        let i = self.pkts.insert(ep.tail, packet);
        if ep.tail == NIL {
            ep.head = i;
        }
        ep.tail = i;
        if charge > 0 {
            self.peers[ep.peer].in_flight += u64::from(charge);
        }
        i
    }

    /// Takes the first entry off the send list; the resend cursor moves on if it stood there. The answer is what
    /// [`Packets::remove`] says.
    pub(super) fn pop_packet(&mut self, slot: u32) -> Option<Option<(T, u64)>> {
        let ep = &mut self.eps[slot];
        let i = ep.head;
        let k = self.pkts.get(i)?;
        ep.head = k.next;
        if ep.head == NIL {
            ep.tail = NIL;
        }
        if ep.resend_cur == i {
            ep.resend_cur = k.next;
        }
        if k.charge > 0 {
            self.peers[ep.peer].in_flight -= u64::from(k.charge);
        }
        Some(self.pkts.remove(i))
    }

    /// Appends a flush marker that waits for `psn`, or for what the marker before it waits for, if that is more: a keep-alive
    /// that has not left yet.
    pub(super) fn push_marker(&mut self, slot: u32, psn: Psn, op: T) {
        let psn = match self.pkts.get(self.eps[slot].tail) {
            Some(last) if last.psn.is_after(psn) => last.psn,
            _ => psn,
        };
        self.push_packet(slot, Packet::marker(psn, Some(op)));
    }
}

/// `None`, where that is rarely so: the compiler lays the code out for the other case, which the short ways are for.
#[inline(always)]
pub(crate) fn rare<V>() -> Option<V> {
    std::hint::cold_path();
    None
}

/// Nanoseconds, held at the largest value.
pub(super) fn nanos(d: Duration) -> u64 {
    u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)
}

/// One step of splitmix64: a well-spread number from any seed.
pub(super) fn scramble(seed: u64) -> u64 {
    let z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl<T, P: Clone + Eq + Hash, L, R> Engine<T, P, L, R> {
    /// All endpoints with a record, passive and lingering ones included, in no particular but a repeatable order.
    pub fn ep_ids(&self) -> impl Iterator<Item = EpId> {
        self.eps.iter().map(|(slot, ep)| EpId { slot, id: ep.id })
    }
}
