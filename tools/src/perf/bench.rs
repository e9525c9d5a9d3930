//! The tests themselves: ping-pong and stream, both sides of each.
//!
//! The client times and ends a run; the server follows what the headers of the messages ask ([`Ask`]). Neither talks on
//! the control connection meanwhile.

use std::time::Duration;

use uct::{
    Time,
    time::{Clock, MonotonicClock},
};

use super::{
    failure::Result,
    hist::Histogram,
    message::Run,
    options::{Extent, Test},
    payload::{Ask, Receiver},
    sender::Sender,
    session::Session,
};

/// Stream messages between two looks at the clock.
const CLOCK_EVERY: u64 = 64;
/// How often the progress display hears of a run.
const TICK: Duration = Duration::from_millis(250);

/// What a run yielded.
#[derive(Clone, Debug)]
pub(crate) struct Sample {
    /// Messages (round trips) measured.
    pub(crate) iters: u64,
    /// Messages (round trips) before.
    pub(crate) warmup: u64,
    pub(crate) elapsed: Duration,
    /// Ping-pong only: times one way, half of each round trip, in nanoseconds.
    pub(crate) one_way: Option<Histogram>,
}

/// The extents of a run and whom to tell how far it is, from 0 to 1.
pub(crate) struct Plan<'a> {
    pub(crate) warmup: Extent,
    pub(crate) measure: Extent,
    pub(crate) tick: &'a mut dyn FnMut(f64),
}

/// Follows one part of a run: when it ends, and when the display is due.
///
/// Its clock is the library's, which is read in place: what a round does besides the message is in its latency.
struct Course<'a> {
    clock: &'a MonotonicClock,
    extent: Extent,
    start: Time,
    /// The part ends with the round of this number, or with the first that begins at this time or later.
    last: u64,
    end: Time,
    next_tick: Time,
    /// Time spent in the display, which is not part of the measurement.
    away: Duration,
}

impl Course<'_> {
    fn new(extent: Extent, clock: &MonotonicClock) -> Course<'_> {
        let start = clock.now();
        Course {
            clock,
            extent,
            start,
            last: extent.iters.map_or(u64::MAX, |n| n.saturating_sub(1)),
            end: extent.time.map_or(Time::MAX, |t| start + t),
            next_tick: start + TICK,
            away: Duration::ZERO,
        }
    }

    /// Whether a part that has done `done` rounds at `now` shall do only one more.
    fn ends_with_next(&self, done: u64, now: Time) -> bool {
        done >= self.last || now >= self.end
    }

    #[inline]
    fn tick(&mut self, done: u64, now: Time, tick: &mut dyn FnMut(f64)) -> Time {
        if now < self.next_tick { now } else { self.tell(done, now, tick) }
    }

    #[cold]
    fn tell(&mut self, done: u64, now: Time, tick: &mut dyn FnMut(f64)) -> Time {
        let by_count = self.extent.iters.map_or(0.0, |n| done as f64 / n as f64);
        let by_time = self.extent.time.map_or(0.0, |t| (now - self.start).as_secs_f64() / t.as_secs_f64());
        tick(by_count.max(by_time).min(1.0));
        let after = self.clock.now();
        self.away += after - now;
        self.next_tick = after + TICK;
        after
    }

    /// Since the start, without the time in the display.
    fn elapsed(&self, now: Time) -> Duration {
        (now - self.start).saturating_sub(self.away)
    }
}

/// The client's side of `run`.
pub(crate) fn client(s: &mut Session, run: &Run, tx: &Sender, rx: &Receiver, plan: Plan<'_>) -> Result<Sample> {
    match run.test {
        Test::Lat => ping(s, tx, rx, plan),
        Test::Bw | Test::Rate => stream(s, run, tx, plan),
    }
}

/// The server's side of `run`. Returns when the last message was answered.
pub(crate) fn server(s: &mut Session, run: &Run, tx: &Sender, rx: &Receiver) -> Result<()> {
    match run.test {
        Test::Lat => pong(s, tx, rx),
        Test::Bw | Test::Rate => sink(s, run, rx),
    }
}

fn ping(s: &mut Session, tx: &Sender, rx: &Receiver, plan: Plan<'_>) -> Result<Sample> {
    let mut round = |seq: u64, ask: Ask| {
        s.send(tx, seq, ask)?;
        s.until("reply", || 0, || rx.received() > seq)
    };
    let clock = MonotonicClock::new();
    let mut seq = 0;
    if plan.warmup.iters != Some(0) {
        let course = Course::new(plan.warmup, &clock);
        loop {
            let last = course.ends_with_next(seq, clock.now());
            round(seq, Ask::Nothing)?;
            seq += 1;
            if last {
                break;
            }
        }
    }
    let warmup = seq;
    let mut one_way = Histogram::new();
    let mut course = Course::new(plan.measure, &clock);
    let mut sent_at = course.start;
    loop {
        let last = course.ends_with_next(seq - warmup, sent_at);
        round(seq, if last { Ask::Last } else { Ask::Nothing })?;
        seq += 1;
        let now = clock.now();
        one_way.record(now.nanos_since(sent_at) / 2);
        if last {
            let elapsed = course.elapsed(now);
            return Ok(Sample { iters: seq - warmup, warmup, elapsed, one_way: Some(one_way) });
        }
        sent_at = course.tick(seq - warmup, now, plan.tick);
    }
}

fn pong(s: &mut Session, tx: &Sender, rx: &Receiver) -> Result<()> {
    let mut seq = 0;
    loop {
        s.until("ping", || 0, || rx.received() > seq)?;
        let last = rx.is_over();
        s.send(tx, seq, if last { Ask::Last } else { Ask::Nothing })?;
        seq += 1;
        if last {
            return Ok(());
        }
    }
}

fn stream(s: &mut Session, run: &Run, tx: &Sender, plan: Plan<'_>) -> Result<Sample> {
    let clock = MonotonicClock::new();
    let mut seq = 0;
    if plan.warmup.iters != Some(0) {
        let course = Course::new(plan.warmup, &clock);
        loop {
            let now = if seq % CLOCK_EVERY == 0 { clock.now() } else { course.start };
            let last = course.ends_with_next(seq, now);
            s.send(tx, seq, if last { Ask::Ack } else { Ask::Nothing })?;
            seq += 1;
            if last {
                break;
            }
        }
        s.wait_count(run.run, seq)?;
    }
    let warmup = seq;
    let mut course = Course::new(plan.measure, &clock);
    let mut now = course.start;
    loop {
        let done = seq - warmup;
        if done % CLOCK_EVERY == CLOCK_EVERY - 1 {
            now = course.tick(done, clock.now(), plan.tick);
        }
        let last = course.ends_with_next(done, now);
        s.send(tx, seq, if last { Ask::Last } else { Ask::Nothing })?;
        seq += 1;
        if last {
            break;
        }
    }
    s.wait_count(run.run, seq)?;
    let elapsed = course.elapsed(clock.now());
    Ok(Sample { iters: seq - warmup, warmup, elapsed, one_way: None })
}

fn sink(s: &mut Session, run: &Run, rx: &Receiver) -> Result<()> {
    let mut answered = 0;
    loop {
        s.until("message", || rx.received(), || rx.asked() > answered)?;
        answered = rx.asked();
        let last = rx.is_over();
        s.send_count(run.run, answered)?;
        if last {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_ends_by_count_or_by_time() {
        let clock = MonotonicClock::new();
        let c = Course::new(Extent { iters: Some(3), time: None }, &clock);
        assert_eq!([0, 1, 2, 3].map(|n| c.ends_with_next(n, c.start)), [false, false, true, true]);
        let c = Course::new(Extent { iters: Some(3), time: Some(Duration::from_secs(1)) }, &clock);
        assert!(c.ends_with_next(0, c.start + Duration::from_secs(1)));
        assert!(!c.ends_with_next(0, c.start));
    }

    #[test]
    fn the_display_is_told_now_and_then_and_its_time_does_not_count() {
        let clock = MonotonicClock::new();
        let mut c = Course::new(Extent { iters: Some(100), time: None }, &clock);
        let mut told = Vec::new();
        let t0 = c.start;
        assert_eq!(c.tick(1, t0, &mut |f| told.push(f)), t0);
        let after = c.tick(40, t0 + TICK, &mut |f| told.push(f));
        assert_eq!(c.next_tick, after + TICK);
        assert_eq!(told, [0.4]);
    }
}
