//! The progress thread: keeps handshakes, acknowledgements, resends and timers going while the user computes.
//!
//! It is in one of two modes. *Present*: the user has called `progress` since the last look; it does nothing but let
//! held-back sends leave, once a millisecond. *Away*: the user has not; it sleeps on the interfaces' event fds, with the
//! next timer (and at least `async_tick`) as the limit, and progresses what wakes it. It only tries the lock of
//! an interface to begin a round: if the user's thread is inside, there is nothing to stand in for.
//!
//! Sleeping needs `poll`, which has no safe wrapper in std, hence `unsafe` here.
#![allow(unsafe_code)]

use std::{
    os::fd::RawFd,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Weak, atomic::Ordering},
    time::Duration,
};

use super::WorkerShared;
use crate::{
    error::{Error, ErrorKind, Result},
    iface::Arm,
};

/// How long the thread sleeps between looks while the user is there.
const PRESENT_TICK: Duration = Duration::from_millis(1);
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

fn run(weak: &Weak<WorkerShared>, async_tick: Duration) {
    let mut seen = 0;
    let mut quiet = 0;
    loop {
        let Some(w) = weak.upgrade() else { return };
        let seq = w.user_seq.load(Ordering::Relaxed);
        if seq != seen {
            seen = seq;
            quiet = 0;
        } else {
            quiet += 1;
        }
        if quiet < AWAY_AFTER {
            w.batching.store(true, Ordering::Relaxed);
            for i in w.snapshot().iter() {
                i.ring();
            }
            drop(w);
            std::thread::sleep(PRESENT_TICK);
            continue;
        }
        w.batching.store(false, Ordering::Relaxed);
        away(w, async_tick);
    }
}

/// One round of standing in: progress, then sleep until something happens.
fn away(w: Arc<WorkerShared>, async_tick: Duration) {
    let list = w.snapshot();
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
