//! The endpoint record: its states, who owns it, its window, and the one place where its state changes.

use std::ops::{Index, IndexMut};

use uct::{ErrorKind, Time};

use super::{
    held::Held,
    psn::Psn,
    slab::{NIL, Slab},
    wire::NO_EP,
};

/// Names an endpoint of one engine. It stays invalid after the endpoint is freed: the wire id in it is not given out again
/// before all other 16 million ids have been.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug)]
pub struct EpId {
    pub(super) slot: u32,
    pub(super) id: u32,
}

impl EpId {
    /// The id by which peers address the endpoint; below 0xffffff.
    pub fn wire_id(self) -> u32 {
        self.id
    }
}

/// How far the endpoint has come. Who owns it is another question: [`Owner`].
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// No peer yet (connect-to-endpoint).
    Idle,
    /// The peer is known, its link is being made.
    Resolving,
    /// The link is there, the peer's endpoint id is not: a CREQ is on its way.
    Connecting,
    /// The peer's endpoint id is known.
    Connected,
    /// Given up. Nothing is outstanding, nothing is sent.
    Failed(ErrorKind),
}

impl State {
    pub(super) fn may_become(self, to: State) -> bool {
        match (self, to) {
            (State::Idle, State::Resolving) => true,
            (State::Resolving, State::Connecting | State::Connected) => true,
            (State::Connecting, State::Connected) => true,
            (State::Failed(_), _) => false,
            (_, State::Failed(_)) => true,
            _ => false,
        }
    }
}

/// Who would miss the endpoint.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) enum Owner {
    /// The user.
    User,
    /// Nobody: a stranger asked for it and no local connect has claimed it.
    Passive,
    /// Nobody any more: destroyed at `since`, kept to finish what it owes.
    Lingering { since: Time },
}

/// The way to the peer. It can be replaced; only freeing the record drops it, so a lingering endpoint always has it.
pub(super) enum Link<L> {
    Unresolved,
    Live(L),
}

impl<L> Link<L> {
    pub(super) fn get(&self) -> Option<&L> {
        match self {
            Link::Unresolved => None,
            Link::Live(l) => Some(l),
        }
    }

    pub(super) fn is_live(&self) -> bool {
        matches!(self, Link::Live(_))
    }

    /// Puts `new` in place of a live link and gives the old one back; an unresolved link stays, and `new` comes back.
    pub(super) fn replace(&mut self, new: L) -> L {
        match self {
            Link::Unresolved => new,
            Link::Live(old) => std::mem::replace(old, new),
        }
    }

    /// For the record that is being freed.
    pub(super) fn into_inner(self) -> Option<L> {
        match self {
            Link::Unresolved => None,
            Link::Live(l) => Some(l),
        }
    }
}

bitflags::bitflags! {
    /// What an endpoint has yet to send on its own account.
    #[derive(Copy, Clone, PartialEq, Eq, Debug)]
    pub(super) struct Owed: u16 {
        const CREQ = 1;
        const CREP = 1 << 1;
        /// The unacknowledged CREP again: the peer repeated its CREQ.
        const CREP_AGAIN = 1 << 2;
        const RESEND = 1 << 3;
        const PROBE = 1 << 4;
        const BYE = 1 << 5;
        const BYE_ACK = 1 << 6;
        const XACK = 1 << 7;
        const NACK = 1 << 8;
        const ACK = 1 << 9;
        const ACK_REQ = 1 << 10;
    }
}

bitflags::bitflags! {
    /// Yes-or-no facts about an endpoint.
    #[derive(Copy, Clone, PartialEq, Eq, Debug)]
    pub(super) struct Is: u32 {
        /// Made for connect-to-endpoint: no handshake, not in the match table.
        const P2P = 1;
        /// In the match table under (peer, conn_sn).
        const MATCHED = 1 << 1;
        const CREQ_RCVD = 1 << 2;
        /// Some packet that takes a PSN was accepted.
        const RX_ANY = 1 << 3;
        /// The peer was heard at least once.
        const HEARD = 1 << 4;
        const CANCELED = 1 << 5;
        const PEER_CLOSED = 1 << 6;
        const WANT_WRITABLE = 1 << 7;
        /// In the ready queue.
        const READY = 1 << 8;
        /// In the list of those that wait for a resend to leave the send queue.
        const TX_BLOCKED = 1 << 9;
        /// In the queue of those with kept packets to deliver.
        const HELD_READY = 1 << 10;
        /// The window was cut for a loss that is not repaired yet.
        const LOSS_EPISODE = 1 << 11;
        /// The interval that runs is the first one after an ack or a send, with the usual patience: acks and sends may put off
        /// moving its end, see [`TimeLimits::catch_up`](super::timer::TimeLimits::catch_up).
        const FIRST_TICK = 1 << 12;
        /// The current resend range was started by news from the receiver rather than by the timer.
        const NACKED = 1 << 13;
        /// The current resend range consists of the holes of a selective ack.
        const SACK_RESEND = 1 << 14;
        /// To be freed as soon as no borrow of its link is out.
        const DOOMED = 1 << 15;
        /// The interface is closing: say BYE once whatever is unacknowledged, then be gone.
        const IFACE_CLOSING = 1 << 16;
        /// BYE was sent at least once.
        const BYE_SENT = 1 << 17;
        /// To be freed once the answer to the peer's BYE is posted.
        const FREE_AFTER_BYE_ACK = 1 << 18;
    }
}

/// The first question about a missing ack comes at most so many times earlier than the base interval says.
const EARLY_MAX: u64 = 16;

/// What the short ways of [`Engine::send_plain`](super::Engine::send_plain) and
/// [`Engine::handle_plain`](super::Engine::handle_plain) need not ask, because it was asked and the record has not been
/// changed since but by them: [`Eps`] sees to that.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Granted {
    /// So many messages may be sent, as far as the endpoint is concerned, none of which has to ask for an ack. While acks come
    /// in it falls short of what could be granted.
    pub(super) room: u16,
    /// Connected, not lingering, and nothing is kept beyond a gap.
    pub(super) hears: bool,
    /// The ack of one message changes nothing but the window: no loss is being repaired, nobody waits for room, and there is an
    /// interval that runs and may be left alone ([`Is::FIRST_TICK`]).
    pub(super) acks: bool,
}

/// One endpoint. See `docs/ud-protocol.md` for the meaning of the window fields.
pub(super) struct Ep<L, R> {
    pub(super) granted: Granted,
    pub(super) id: u32,
    pub(super) state: State,
    pub(super) owner: Owner,
    pub(super) link: Link<L>,
    /// Index of the peer's record; `NIL` before there is one.
    pub(super) peer: u32,
    pub(super) peer_next: u32,
    pub(super) peer_prev: u32,
    pub(super) conn_sn: u32,
    /// The peer's endpoint id, or `NO_EP`.
    pub(super) dest: u32,
    /// The peer's queue pair; before there is a peer the source of what arrived so far, or `NIL`.
    pub(super) src_qpn: u32,
    pub(super) path_index: u8,
    pub(super) is: Is,
    pub(super) owed: Owed,

    /// Next PSN to send.
    pub(super) psn: Psn,
    /// Newest PSN the peer acknowledged.
    pub(super) acked: Psn,
    /// First PSN that may not be sent yet.
    pub(super) max_psn: Psn,
    pub(super) cwnd: u16,
    /// Sends that have a window slot but no PSN yet.
    pub(super) reserved: u16,
    /// Acknowledging this PSN ends the loss episode.
    pub(super) recover: Psn,
    /// First and last entry of the send list.
    pub(super) head: u32,
    pub(super) tail: u32,
    /// Next entry to consider for a resend, and the last PSN of the range.
    pub(super) resend_cur: u32,
    pub(super) resend_end: Psn,

    /// Newest PSN received in order.
    pub(super) rx_head: Psn,
    pub(super) held: Option<Box<Held<R>>>,

    /// Current timer interval, in nanoseconds.
    pub(super) tick: u64,
    /// Smoothed round trip, in nanoseconds; 0 before the first sample.
    pub(super) srtt: u64,
    /// Start of the silence that is being measured (run time).
    pub(super) send_time: Time,
    /// Last time the peer answered without acknowledging anything new (run time).
    pub(super) answered: Time,
    /// Last resend (run time).
    pub(super) last_resend: Time,
    /// When any packet of the peer last arrived.
    pub(super) last_heard: Time,
    /// When the resend or BYE interval is over, or earlier ([`Is::FIRST_TICK`]); `Time::MAX`: not running.
    pub(super) tick_at: Time,
    /// When this endpoint's timer is due; `Time::MAX`: never.
    pub(super) deadline: Time,
    /// Time of this endpoint's entry in the timer queue; `Time::MAX`: it has none.
    pub(super) queued_at: Time,
    /// Last posting that used the link.
    pub(super) last_serial: u64,
    /// Resends since the last progress.
    pub(super) resends: u32,
    /// Packets that came again since the last one that was new: the peer does not hear our acks.
    pub(super) repeated: u16,
    /// How often this stall was told, see [`Event::Stalled`](super::Event::Stalled); and whether, see
    /// [`Event::Stuck`](super::Event::Stuck), in the highest bit.
    pub(super) stalls: u8,
    /// When the first of them came.
    pub(super) repeated_since: Time,
}

// An idle endpoint is the record and one place in two hash tables; see `Engine` for the whole sum.
const _: () = assert!(size_of::<Ep<[u64; 3], u64>>() <= 256);

impl<L, R> Ep<L, R> {
    pub(super) fn new(id: u32, initial: Psn, tick: u64) -> Self {
        Ep {
            granted: Granted::default(),
            id,
            state: State::Idle,
            owner: Owner::User,
            link: Link::Unresolved,
            peer: NIL,
            peer_next: NIL,
            peer_prev: NIL,
            conn_sn: 0,
            dest: NO_EP,
            src_qpn: NIL,
            path_index: 0,
            is: Is::empty(),
            owed: Owed::empty(),
            psn: initial,
            acked: initial.prev(),
            max_psn: initial.add(2),
            cwnd: 2,
            reserved: 0,
            recover: initial.prev(),
            head: NIL,
            tail: NIL,
            resend_cur: NIL,
            resend_end: initial,
            rx_head: initial.prev(),
            held: None,
            tick,
            srtt: 0,
            send_time: Time::ZERO,
            answered: Time::ZERO,
            last_resend: Time::ZERO,
            last_heard: Time::ZERO,
            tick_at: Time::MAX,
            deadline: Time::MAX,
            queued_at: Time::MAX,
            last_serial: 0,
            resends: 0,
            repeated: 0,
            stalls: 0,
            repeated_since: Time::ZERO,
        }
    }

    /// The only place where the state changes. An impossible change is a bug of the engine: refused, and fatal in debug builds.
    pub(super) fn transition(&mut self, to: State) {
        debug_assert!(self.state.may_become(to), "ep {}: {:?} -> {to:?}", self.id, self.state);
        if self.state.may_become(to) {
            self.state = to;
        }
    }

    /// [`Ep::take_ack`] where acks are [granted](Granted): nothing was waited for in vain.
    #[inline]
    pub(super) fn take_plain_ack(&mut self, ack: Psn, max_window: u16, run: Time) {
        self.acked = ack;
        self.cwnd = (self.cwnd + 1).min(max_window);
        self.max_psn = ack.add(self.cwnd);
        self.send_time = run;
    }

    /// A new number was acknowledged: the window moves and grows, the resend interval and the silence start anew.
    #[inline]
    pub(super) fn take_ack(&mut self, ack: Psn, max_window: u16, tick: u64, run: Time) {
        self.acked = ack;
        self.cwnd = (self.cwnd + 1).min(max_window);
        self.max_psn = ack.add(self.cwnd);
        self.stalls = 0;
        self.tick = tick;
        self.send_time = run;
        self.resends = 0;
    }

    /// Packets sent and not acknowledged.
    pub(super) fn in_flight(&self) -> u16 {
        self.psn.since(self.acked).wrapping_sub(1)
    }

    /// Takes a measured round trip, in nanoseconds. Behind a lost packet, or a lost ack, a packet waits for the repair, and
    /// its time says nothing about the network: so a sample counts for at most twice of what is known. A network that has
    /// become slow is still learned, by an eighth with each sample.
    #[inline]
    pub(super) fn note_round_trip(&mut self, sample: u64) {
        let sample = sample.max(8);
        if self.srtt == 0 {
            self.srtt = sample;
        } else {
            self.srtt = self.srtt - self.srtt / 8 + sample.min(2 * self.srtt) / 8;
        }
    }

    /// How long to wait for an ack before asking for one, in nanoseconds: four round trips, if the round trip is known and
    /// nothing was waited for in vain so far; `tick0`, the base interval, otherwise, and never more. The floor keeps the
    /// timers of fast networks from becoming the work of the processor.
    #[inline]
    pub(super) fn first_interval(&self, tick0: u64) -> u64 {
        if self.srtt == 0 || self.tick != tick0 {
            return self.tick;
        }
        // At its floor the window cannot shrink any more: where many send to one, patience is what is left to give.
        let patience = if self.cwnd <= 2 && self.is.contains(Is::LOSS_EPISODE) { 4 } else { 1 };
        (self.srtt * 4 * patience).clamp(tick0 / EARLY_MAX * patience, tick0)
    }

    /// Whether the endpoint's state lets data out, window and budget aside.
    #[inline]
    pub(super) fn lets_data_out(&self) -> bool {
        // Data must not overtake an owed CREP: if it were lost, the CREP would make the peer's head jump over it
        // (`docs/ud-protocol.md` "CREP first").
        self.state == State::Connected
            && !self.is_lingering()
            && !self.is.intersects(Is::CANCELED | Is::PEER_CLOSED)
            && !self.owed.contains(Owed::CREP)
    }

    /// What can be granted now.
    pub(super) fn grants(&self) -> Granted {
        let may_send = self.lets_data_out() && self.link.is_live() && !self.owed.contains(Owed::ACK_REQ);
        Granted {
            room: if may_send { self.quiet_room() } else { 0 },
            hears: self.state == State::Connected && !self.is_lingering() && self.held.is_none(),
            acks: self.is.contains(Is::FIRST_TICK)
                && self.tick_at != Time::MAX
                && self.stalls == 0
                && self.resends == 0
                && !self.is.intersects(Is::LOSS_EPISODE | Is::WANT_WRITABLE)
                && !self.is_resending(),
        }
    }

    /// How many messages fit into the window before one has to ask for an ack.
    fn quiet_room(&self) -> u16 {
        let ahead = self.psn.since(self.acked);
        // The last one asks.
        let room = self.max_psn.since(self.acked).saturating_sub(ahead).saturating_sub(self.reserved).saturating_sub(1);
        self.quarter().checked_sub(ahead).map_or(room, |n| room.min(n))
    }

    /// Acks are asked for at a quarter of the window, counted from the newest one, and at its end, so that a full window costs
    /// two acks.
    fn quarter(&self) -> u16 {
        self.max_psn.since(self.acked) >> 2
    }

    /// Whether the next message asks for an ack.
    pub(super) fn is_asking(&self) -> bool {
        self.psn.since(self.acked) == self.quarter() || !self.psn.next().is_before(self.max_psn)
    }

    /// Grants messages anew; false: something is in their way, or the first of them is to ask for an ack.
    #[cold]
    #[inline(never)]
    pub(super) fn grant_room(&mut self) -> bool {
        self.granted.room = self.grants().room;
        if self.psn.since(self.acked) > self.quarter() {
            // An ack could bring back to here the number that asks.
            self.granted.acks = false;
        }
        self.granted.room > 0
    }

    /// Grants receiving anew, if nothing is in its way; answers that.
    #[cold]
    #[inline(never)]
    pub(super) fn grant_hearing(&mut self) -> bool {
        self.granted.hears = self.grants().hears;
        self.granted.hears
    }

    /// Grants acks anew, if nothing is in their way; answers that. See [`Ep::grant_room`].
    #[cold]
    #[inline(never)]
    pub(super) fn grant_acks(&mut self) -> bool {
        self.granted.acks = self.grants().acks;
        self.granted.room = 0;
        self.granted.acks
    }

    /// Starts the resend interval anew; stops it if nothing is in flight.
    #[inline]
    pub(super) fn start_interval(&mut self, now: Time, tick0: u64) {
        let at = if self.in_flight() == 0 { Time::MAX } else { now.add_nanos(self.first_interval(tick0)) };
        self.set_tick_at(at);
    }

    /// When the interval is over; `Time::MAX` stops it.
    #[inline]
    pub(super) fn set_tick_at(&mut self, at: Time) {
        self.tick_at = at;
        self.is.remove(Is::FIRST_TICK);
    }

    pub(super) fn is_window_open(&self, reserved: u16) -> bool {
        self.psn.add(reserved).is_before(self.max_psn)
    }

    /// A round of resends is under way, or will be.
    pub(super) fn is_resending(&self) -> bool {
        self.resend_cur != NIL || self.owed.contains(Owed::RESEND)
    }

    #[inline]
    pub(super) fn is_lingering(&self) -> bool {
        matches!(self.owner, Owner::Lingering { .. })
    }

    pub(super) fn is_failed(&self) -> bool {
        matches!(self.state, State::Failed(_))
    }

    pub(super) fn is_dest_known(&self) -> bool {
        self.dest != NO_EP
    }
}

/// The endpoints of an engine, by slot.
///
/// Whoever reaches for a record to change it takes back what it was [granted](Granted), so that no change can be missed; only
/// the short ways, which use [`Eps::plain_mut`], do not.
pub(super) struct Eps<L, R>(Slab<Ep<L, R>>);

impl<L, R> Eps<L, R> {
    pub(super) const fn new() -> Self {
        Eps(Slab::new())
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn insert(&mut self, ep: Ep<L, R>) -> u32 {
        self.0.insert(ep)
    }

    pub(super) fn remove(&mut self, slot: u32) -> Option<Ep<L, R>> {
        self.0.remove(slot)
    }

    #[inline]
    pub(super) fn get(&self, slot: u32) -> Option<&Ep<L, R>> {
        self.0.get(slot)
    }

    #[inline]
    pub(super) fn get_mut(&mut self, slot: u32) -> Option<&mut Ep<L, R>> {
        let ep = self.0.get_mut(slot)?;
        ep.granted = Granted::default();
        Some(ep)
    }

    /// For changes that leave everything as it is that was asked for [`Granted`].
    #[inline(always)]
    pub(super) fn plain_mut(&mut self, slot: u32) -> Option<&mut Ep<L, R>> {
        self.0.get_mut(slot)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &Ep<L, R>)> {
        self.0.iter()
    }
}

impl<L, R> Index<u32> for Eps<L, R> {
    type Output = Ep<L, R>;
    #[inline]
    fn index(&self, slot: u32) -> &Ep<L, R> {
        &self.0[slot]
    }
}

impl<L, R> IndexMut<u32> for Eps<L, R> {
    #[inline]
    fn index_mut(&mut self, slot: u32) -> &mut Ep<L, R> {
        let ep = &mut self.0[slot];
        ep.granted = Granted::default();
        ep
    }
}
