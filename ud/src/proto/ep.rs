//! The endpoint record: its states, who owns it, its window, and the one place where its state changes.

use uct::{ErrorKind, Time};

use super::{held::Held, psn::Psn, slab::NIL, wire::NO_EP};

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
        /// The interval that runs is the first one after an ack or a send, with the usual patience: acks may put off moving
        /// its end, see [`TimeLimits::restart_later`](super::timer::TimeLimits::restart_later).
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

/// One endpoint. See `docs/ud-protocol.md` for the meaning of the window fields.
pub(super) struct Ep<L, R> {
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
