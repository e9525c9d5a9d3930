//! Time: the queue of deadlines, the clock that does not count standstills, and what happens when an endpoint's time is up.

use std::{cmp::Reverse, collections::BinaryHeap, hash::Hash, time::Duration};

use uct::{ErrorKind, Time};

use super::{
    engine::{Engine, nanos},
    ep::{Ep, EpId, Is, Owed, Owner, State},
    event::Event,
    stats::EngineStats,
};

/// Deadlines of endpoints, earliest first. An entry is a promise to look at the endpoint, not the deadline itself: moving a
/// deadline back, or stopping a timer, costs nothing; the entry is looked at when it comes up, and dropped or renewed.
pub(super) struct TimerQueue {
    heap: BinaryHeap<Reverse<(Time, u32, u32)>>,
    /// The time of the first entry; `Time::MAX` if there is none.
    first: Time,
    armed: usize,
}

impl TimerQueue {
    pub(super) fn new() -> Self {
        TimerQueue { heap: BinaryHeap::new(), first: Time::MAX, armed: 0 }
    }

    /// Endpoints with a deadline.
    pub(super) fn armed(&self) -> usize {
        self.armed
    }

    /// No deadline lies before this time.
    #[inline]
    pub(super) fn earliest(&self) -> Time {
        if self.armed > 0 { self.first } else { Time::MAX }
    }

    /// Whether an entry has come up, if only to be dropped.
    #[inline]
    fn is_up(&self, now: Time) -> bool {
        self.first <= now
    }

    /// Sets an endpoint's deadline; `Time::MAX` stops its timer.
    #[inline]
    pub(super) fn set<L, R>(&mut self, slot: u32, ep: &mut Ep<L, R>, at: Time) {
        match (ep.deadline == Time::MAX, at == Time::MAX) {
            (true, false) => self.armed += 1,
            (false, true) => self.armed -= 1,
            _ => {}
        }
        ep.deadline = at;
        if at < ep.queued_at {
            self.enqueue(slot, ep, at);
        }
    }

    /// Once in a tick at most for an endpoint that is always busy.
    #[cold]
    fn enqueue<L, R>(&mut self, slot: u32, ep: &mut Ep<L, R>, at: Time) {
        ep.queued_at = at;
        self.heap.push(Reverse((at, slot, ep.id)));
        self.first = self.first.min(at);
    }

    fn pop_due(&mut self, now: Time) -> Option<(Time, EpId)> {
        let Reverse((t, slot, id)) = *self.heap.peek()?;
        if t > now {
            return None;
        }
        self.heap.pop();
        self.first = self.heap.peek().map_or(Time::MAX, |Reverse((t, ..))| *t);
        Some((t, EpId { slot, id }))
    }
}

/// A clock that leaves out the times when this process did not run: a process that was stopped for a minute must not, on
/// waking, take its peers for dead. It notices by a deadline that nobody served although it was due.
pub(super) struct RunClock {
    last: Time,
    stopped: u64,
    slack: u64,
}

impl RunClock {
    pub(super) fn new(slack: Duration) -> Self {
        RunClock { last: Time::ZERO, stopped: 0, slack: nanos(slack) }
    }

    /// Takes note of a time so soon after the one before that there was no standstill, whatever was due. False: it is not
    /// soon after, and [`RunClock::observe`] finds out.
    #[inline]
    pub(super) fn observe_soon(&mut self, now: Time) -> bool {
        let is_soon = now.nanos_since(self.last) <= self.slack;
        if is_soon {
            self.last = self.last.max(now);
        }
        is_soon
    }

    /// Takes note of the time. `due`: the earliest deadline. True if a standstill was found.
    pub(super) fn observe(&mut self, now: Time, due: Time) -> bool {
        let since = due.max(self.last);
        self.last = self.last.max(now);
        let overdue = now.nanos_since(since);
        if overdue <= self.slack {
            return false;
        }
        self.stopped = self.stopped.saturating_add(overdue);
        true
    }

    /// Run time of a time.
    #[inline]
    pub(super) fn run(&self, t: Time) -> Time {
        Time::from_nanos(t.as_nanos().saturating_sub(self.stopped))
    }

    /// The time at which the run time will be `t`, if we do not stand still until then.
    #[inline]
    pub(super) fn real(&self, t: Time) -> Time {
        t.add_nanos(self.stopped)
    }

    #[inline]
    pub(super) fn last(&self) -> Time {
        self.last
    }
}

/// How long an endpoint may be silent, and linger.
#[derive(Copy, Clone)]
pub(super) struct TimeLimits {
    /// Nanoseconds.
    pub(super) timeout: u64,
    /// Nanoseconds.
    pub(super) linger: u64,
    /// See [`Engine::count_answers`].
    pub(super) answers_count: bool,
}

impl TimeLimits {
    /// [`TimeLimits::rearm`] after the silence and the interval have started anew, for an endpoint that neither lingers nor
    /// has failed: there is nothing to be told apart. The base interval, and so the first one, is not longer than the
    /// time-out ([`EngineConfig::validate`](super::EngineConfig::validate)).
    #[inline(always)]
    pub(super) fn restart<L, R>(self, timers: &mut TimerQueue, slot: u32, ep: &mut Ep<L, R>, now: Time, tick0: u64) {
        ep.start_interval(now, tick0);
        if !ep.is.contains(Is::LOSS_EPISODE) {
            ep.is.insert(Is::FIRST_TICK);
        }
        timers.set(slot, ep, ep.tick_at);
    }

    /// What the acks and sends since the last restart have left to do: nearly all of them leave alone the interval that runs
    /// ([`Is::FIRST_TICK`]), which may end too early then, but not too late. It ends where the newest of them would have put
    /// it.
    #[inline]
    pub(super) fn catch_up<L, R>(clock: &RunClock, ep: &mut Ep<L, R>, tick0: u64) {
        if !ep.is.contains(Is::FIRST_TICK) || ep.in_flight() == 0 {
            return;
        }
        let at = clock.real(ep.send_time).add_nanos(ep.first_interval(tick0));
        if at > ep.tick_at {
            // Unless it is there for something else as well, which is then looked at.
            if ep.deadline == ep.tick_at && !ep.is_lingering() {
                ep.deadline = at;
            }
            ep.tick_at = at;
        }
    }

    /// Sets the endpoint's deadline from what it waits for.
    #[inline]
    pub(super) fn rearm<L, R>(self, clock: &RunClock, timers: &mut TimerQueue, slot: u32, ep: &mut Ep<L, R>) {
        let mut at = ep.tick_at;
        if ep.in_flight() > 0 && !ep.is_failed() {
            let base = silence_start(ep, self.answers_count);
            let dead_at = clock.real(base).add_nanos(self.timeout).add_nanos(1);
            // A verdict that had to be put off, because our own queue was full, is looked at with the next tick.
            if dead_at > clock.last() {
                at = at.min(dead_at);
            }
        }
        if let Owner::Lingering { since } = ep.owner {
            let over = since.add_nanos(self.linger);
            // Past its time the record waits for an ack, a verdict or a post, each of which comes by itself.
            if over > clock.last() {
                at = at.min(over);
            }
        }
        timers.set(slot, ep, at);
    }
}

impl<T, P: Clone + Eq + Hash, L, R> Engine<T, P, L, R> {
    /// When [`Engine::handle_timeout`] wants to be called; `None`: nothing is outstanding, lingering or unclaimed. Calling
    /// late is allowed and delays resends; calling early does nothing.
    pub fn poll_timeout(&self) -> Option<Time> {
        let t = self.timers.earliest().min(self.sweep_at);
        (t != Time::MAX).then_some(t)
    }

    /// Whether [`Engine::handle_timeout`] has something to do.
    #[inline]
    pub fn is_due(&self, now: Time) -> bool {
        self.timers.is_up(now) || self.sweep_at <= now
    }

    /// Serves every deadline that is due: asks for acks, starts resends, declares peers dead, ends lingering. The cost follows
    /// the number of endpoints that are due.
    pub fn handle_timeout(&mut self, now: Time) {
        self.observe(now);
        while let Some((t, id)) = self.timers.pop_due(now) {
            let Some(slot) = self.find(id) else { continue };
            let ep = &mut self.eps[slot];
            if ep.queued_at != t {
                continue; // an earlier entry has taken over
            }
            ep.queued_at = Time::MAX;
            TimeLimits::catch_up(&self.clock, ep, self.tick0);
            if ep.deadline > now {
                let at = ep.deadline;
                if at != Time::MAX {
                    self.timers.set(slot, ep, at);
                }
                continue;
            }
            self.on_deadline(now, slot);
            self.debug_check(slot);
        }
        if self.sweep_at <= now {
            self.sweep_passive(now);
        }
    }

    /// Takes note of the time, and answers it; if it has gone back, the latest. Every call that takes a time does this, but
    /// [`Engine::handle_plain`]: many packets may come at one time.
    #[inline(always)]
    pub fn observe(&mut self, now: Time) -> Time {
        observe(&mut self.clock, &self.timers, &mut self.stats, now)
    }

    /// Sets the endpoint's deadline from what it waits for.
    #[inline]
    pub(super) fn rearm(&mut self, slot: u32) {
        self.limits.rearm(&self.clock, &mut self.timers, slot, &mut self.eps[slot]);
    }

    /// (Re)starts the resend interval.
    pub(super) fn start_tick(&mut self, now: Time, slot: u32) {
        let ep = &mut self.eps[slot];
        ep.set_tick_at(now.add_nanos(ep.tick));
        self.rearm(slot);
    }

    fn on_deadline(&mut self, now: Time, slot: u32) {
        let ep = &self.eps[slot];
        if ep.is_failed() || (ep.in_flight() == 0 && !ep.is.contains(Is::BYE_SENT)) {
            self.eps[slot].set_tick_at(Time::MAX);
        } else if ep.in_flight() == 0 {
            self.on_bye_tick(now, slot);
        } else {
            self.on_tick(now, slot);
        }
        if self.eps.get(slot).is_some() && !self.maybe_close(now, slot) {
            self.rearm(slot);
        }
    }

    /// The resend interval is over, or the verdict is due, while packets are in flight (`docs/ud-protocol.md` "Timer").
    fn on_tick(&mut self, now: Time, slot: u32) {
        let run = self.clock.run(now);
        let tick0 = self.tick0;
        // What is owed, or was resent, has not left yet: our own queue is full. That is no sign of loss, nor of a dead peer.
        // But a queue that took a resend of ours lately is merely slow: the peer is being asked all the time.
        let is_queued = self.first_unacked(slot).is_some_and(|k| self.pkts[k].is_resend_queued(self.tx_done));
        let ep = &mut self.eps[slot];
        let is_moving = ep.resends > 0 && run.since(ep.last_resend) < self.cfg.timeout / QUEUE_SHARE;
        let own_queue_full =
            !is_moving && (is_queued || ep.owed.intersects(Owed::ACK_REQ | Owed::RESEND | Owed::CREQ | Owed::CREP));
        if !own_queue_full {
            let silent = nanos(run.since(silence_start(ep, self.limits.answers_count)));
            if silent > nanos(self.cfg.timeout) {
                let kind =
                    if ep.is.contains(Is::HEARD) { ErrorKind::EndpointTimeout } else { ErrorKind::NeverAnswered };
                self.fail(now, slot, kind);
                return;
            }
            // At two, three, four and five sixths of the time-out. Once is not enough: the link that replaces a stale one may
            // be as old, made for another endpoint before the peer moved.
            let sixth = nanos(self.cfg.timeout / 6);
            let id = EpId { slot, id: ep.id };
            let told = ep.stalls & !STUCK;
            if silent >= sixth.saturating_mul(2 + u64::from(told)) && told < STALLS_MAX {
                ep.stalls += 1;
                // Also of a lingering endpoint: what it was given is to arrive where the peer is now.
                self.events.push_back(Event::Stalled(id));
            }
            let stuck = nanos(run.since(ep.send_time));
            if stuck >= sixth.saturating_mul(2) && ep.answered > ep.send_time && ep.stalls & STUCK == 0 {
                ep.stalls |= STUCK;
                self.events.push_back(Event::Stuck { ep: id, since: Duration::from_nanos(stuck) });
            }
        }
        let ep = &mut self.eps[slot];
        if now < ep.tick_at {
            return; // only the verdict was looked at
        }
        if own_queue_full {
            // The peer could not answer what it was not asked: this interval does not count.
            ep.send_time = run.min(silence_start(ep, self.limits.answers_count) + Duration::from_nanos(ep.tick));
        } else {
            let idle = nanos(run.since(ep.send_time.max(ep.last_resend)));
            if idle < tick0 && ep.tick == tick0 {
                self.ask_early(now, slot, idle);
                return;
            }
            if idle >= tick0 && ep.state == State::Connected {
                self.owe(slot, Owed::ACK_REQ);
            }
            if idle >= tick0.saturating_mul(3) {
                self.stats.timer_resends += 1;
                self.start_timer_resend(slot);
            }
        }
        let interval = self.back_off(slot);
        self.eps[slot].set_tick_at(now + interval);
    }

    /// Before the first base interval is over: asks after some round trips, and again whenever the silence (`idle`, in
    /// nanoseconds) has doubled. The question has the number behind the newest packet, so that a peer that lacks one says
    /// so: what was lost without a successor is resent then, and not after three ticks.
    fn ask_early(&mut self, now: Time, slot: u32, idle: u64) {
        let tick0 = self.tick0;
        let ep = &mut self.eps[slot];
        let first = ep.first_interval(tick0);
        let is_time = idle >= first;
        let wait = if is_time { idle.min(tick0 - idle) } else { first - idle };
        ep.set_tick_at(now.add_nanos(wait.max(1)));
        if is_time && ep.state == State::Connected {
            self.owe(slot, Owed::ACK_REQ);
        }
    }

    /// Lengthens the endpoint's interval. It ends at 256 base intervals, as UCX's timer wheel does in practice: were it to
    /// grow to a third of the time-out, a few losses in a row would be taken for death.
    pub(super) fn back_off(&mut self, slot: u32) -> Duration {
        let max = self.tick0.saturating_mul(256).min(nanos(self.cfg.timeout / 3)).max(1);
        let ep = &mut self.eps[slot];
        ep.tick = ((ep.tick as f64 * self.cfg.timer_backoff).min(max as f64) as u64).max(1);
        Duration::from_nanos(ep.tick)
    }
}

/// [`Engine::observe`], for who has borrowed other parts of the engine.
#[inline(always)]
pub(super) fn observe(clock: &mut RunClock, timers: &TimerQueue, stats: &mut EngineStats, now: Time) -> Time {
    if !clock.observe_soon(now) {
        observe_late(clock, timers, stats, now);
    }
    clock.last()
}

#[cold]
fn observe_late(clock: &mut RunClock, timers: &TimerQueue, stats: &mut EngineStats, now: Time) {
    if clock.observe(now, timers.earliest()) {
        stats.stopped += 1;
    }
}

/// A resend may be in our own queue for this part of the time-out before the time in it stops to count as the peer's silence.
const QUEUE_SHARE: u32 = 8;

/// How often a stall is told before the verdict.
const STALLS_MAX: u8 = 4;

/// In [`Ep::stalls`]: it was told that the peer answers and does not take what is sent.
const STUCK: u8 = 0x80;

/// Since when the peer has been silent (run time). An answer without progress counts as a sign of life while somebody cares
/// for the endpoint: a peer whose application is busy does not accept messages for a while, but its engine answers. A
/// lingering endpoint waits for progress only, so that closing is bounded; so does everybody if answers do not count.
pub(super) fn silence_start<L, R>(ep: &Ep<L, R>, answers_count: bool) -> Time {
    if ep.is_lingering() || !answers_count { ep.send_time } else { ep.send_time.max(ep.answered) }
}
