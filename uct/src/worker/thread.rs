//! The progress thread: keeps handshakes, acknowledgements, resends and timers going while the user computes.
//!
//! It is in one of two modes. *Present*: the user has called `progress` since the last look; it does nothing but let
//! held-back sends leave, once a millisecond while sends are held back at all, and else it gets rarer, not to disturb who
//! spins on the same processor ([`Pace`]). *Away*: the user has not; it sleeps on the interfaces' event fds, with the next
//! timer (and at least `async_tick`) as the limit, and progresses what wakes it. It only tries the lock of an interface to
//! begin a round: if the user's thread is inside, there is nothing to stand in for.
//!
//! Sleeping needs `poll`, which has no safe wrapper in std, hence `unsafe` here.
#![allow(unsafe_code)]

use std::{
    os::fd::RawFd,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Weak, atomic::Ordering},
    time::Duration,
};

use super::{IfaceList, WorkerShared};
use crate::{
    error::{Error, ErrorKind, Result},
    iface::Arm,
};

/// The shortest time between two looks while the user is there.
const PRESENT_TICK: Duration = Duration::from_millis(1);
/// The longest. Together with [`AWAY_AFTER`] it is as long as a peer waits, at the least, before it sends again what a user
/// who has gone away does not acknowledge (`UCX_UD_TIMER_TICK`).
const PRESENT_TICK_MAX: Duration = Duration::from_millis(8);
/// Looks without user progress after which the user counts as away.
const AWAY_AFTER: u32 = 3;

/// Sleeps until one of `fds` is readable or `max` is over; rounds up to milliseconds.
pub(crate) fn poll_fds(fds: &[RawFd], max: Duration) {
    let mut p: Vec<libc::pollfd> =
        fds.iter().map(|&fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 }).collect();
    let ms = max.as_millis() + u128::from(!max.subsec_nanos().is_multiple_of(1_000_000));
    let ms = i32::try_from(ms).unwrap_or(i32::MAX);
    // SAFETY: `p` is an array of `p.len()` pollfd structs.
    unsafe { libc::poll(p.as_mut_ptr(), p.len() as libc::nfds_t, ms) };
}

pub(super) fn spawn(shared: &Arc<WorkerShared>, async_tick: Duration) -> Result<()> {
    let weak = Arc::downgrade(shared);
    std::thread::Builder::new().name("uct-progress".into()).spawn(move || run(&weak, async_tick)).map_err(|e| {
        Error::new(
            ErrorKind::Io,
            "worker: the progress thread cannot be started; set UCX_UD_ASYNC_PROGRESS=n to do without",
        )
        .with_errno(e.raw_os_error().unwrap_or(0))
    })?;
    Ok(())
}

/// How often the thread looks, and what for.
struct Pace {
    /// The user's `progress` calls at the last look.
    seen: u64,
    /// Looks since then that have found no more of them.
    quiet: u32,
    tick: Duration,
}

impl Pace {
    fn new() -> Self {
        Pace { seen: 0, quiet: 0, tick: PRESENT_TICK }
    }

    /// A look that finds `seq` calls, and whether somebody `holds_back` sends. Answers when to look again; `None`: the user is
    /// away.
    fn look(&mut self, seq: u64, holds_back: bool) -> Option<Duration> {
        let is_there = seq != self.seen;
        self.seen = seq;
        self.quiet = if is_there { 0 } else { self.quiet.saturating_add(1) };
        if is_there && !holds_back {
            // From a millisecond on: what was held back until now is not to wait for longer.
            let tick = self.tick;
            self.tick = (tick * 2).min(PRESENT_TICK_MAX);
            return Some(tick);
        }
        self.tick = PRESENT_TICK;
        (self.quiet < AWAY_AFTER).then_some(PRESENT_TICK)
    }
}

fn run(weak: &Weak<WorkerShared>, async_tick: Duration) {
    let mut pace = Pace::new();
    loop {
        let Some(w) = weak.upgrade() else { return };
        let holds_back = w.batching_wanted.swap(false, Ordering::Relaxed);
        let next = pace.look(w.user_seq.load(Ordering::Relaxed), holds_back);
        w.batching.store(next.is_some() && holds_back, Ordering::Relaxed);
        let list = w.snapshot();
        // Also for who is away: what he held back right before has nobody else, where this thread may do no more.
        for i in list.iter() {
            i.ring();
        }
        match next {
            Some(tick) => {
                // Nothing of the worker is kept during the sleep.
                drop((list, w));
                std::thread::sleep(tick);
            }
            None => away(w, list, async_tick),
        }
    }
}

/// One round of standing in: progress, then sleep until something happens.
fn away(w: Arc<WorkerShared>, list: IfaceList, async_tick: Duration) {
    let mut fds = Vec::with_capacity(list.len() + 1);
    let mut busy = false;
    let mut limit = async_tick;
    // What the others wait for is not done here: an event or a timer of theirs would have this thread look again at once,
    // for ever.
    for i in list.iter().filter(|i| i.is_async()) {
        // A handler that panics must not end the acknowledgements of the whole process. The panic hook has told of it.
        if catch_unwind(AssertUnwindSafe(|| i.progress_async())).is_err() {
            let device = &i.attr().device;
            tracing::error!("{device}: a handler panicked on the progress thread; its message counts as handled");
        }
        // An interface without events is looked after at every tick.
        if let Some((fd, arm)) = i.arm_async() {
            busy |= arm == Arm::Busy;
            fds.push(fd);
        }
        if let Some(t) = i.next_timeout() {
            limit = limit.min(t.since(w.clock.now()));
        }
    }
    let wake = w.wake.clone();
    fds.extend(wake.iter().map(|f| f.fd()));
    // Nothing of the worker is kept during the sleep, so that it can end meanwhile; its end writes the wake fd. An
    // interface that is closed meanwhile leaves a stale fd in the list, which at worst ends this one sleep early.
    drop(list);
    drop(w);
    let limit = if busy { PRESENT_TICK.min(limit) } else { limit };
    poll_fds(&fds, limit);
    if let Some(f) = wake {
        f.drain();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(pace: &mut Pace, seq: u64, holds_back: bool) -> Option<u128> {
        pace.look(seq, holds_back).map(|t| t.as_millis())
    }

    #[test]
    fn who_spins_and_holds_nothing_back_is_looked_at_rarely() {
        let mut p = Pace::new();
        let ticks: Vec<_> = (1..=6).map(|seq| ms(&mut p, seq, false)).collect();
        assert_eq!(ticks, [Some(1), Some(2), Some(4), Some(8), Some(8), Some(8)]);
    }

    #[test]
    fn held_back_sends_wait_for_a_millisecond() {
        let mut p = Pace::new();
        for seq in 1..=5 {
            ms(&mut p, seq, false);
        }
        // From when it is asked for, and once more after that.
        let ticks: Vec<_> = (6..=10).map(|seq| ms(&mut p, seq, seq < 8)).collect();
        assert_eq!(ticks, [Some(1), Some(1), Some(1), Some(2), Some(4)]);
    }

    #[test]
    fn who_goes_away_is_missed_within_some_milliseconds() {
        let mut p = Pace::new();
        for seq in 1..=5 {
            ms(&mut p, seq, false);
        }
        let ticks: Vec<_> = (0..4).map(|_| ms(&mut p, 5, false)).collect();
        assert_eq!(ticks, [Some(1), Some(1), None, None]);
        // Back again: as in the beginning.
        assert_eq!([ms(&mut p, 6, false), ms(&mut p, 7, false)], [Some(1), Some(2)]);
    }
}
