//! The threads that drive a [`Shared`] whose executor is [`Executor::Threads`]: helpers, in which creations sleep, and the
//! domain's thread, which destroys, expires and runs [errands](super::errands).
//!
//! All are started by the first get or errand that needs them. Helpers end when they have had nothing to do for a while. The domain's
//! thread ends when the cache is closed and the last handle is destroyed, however long a holder keeps it; so nobody ever
//! waits for these threads.

use std::{io, thread, time::Duration};

use super::{
    Executor, explain,
    flight::Outcome,
    shared::{Shared, State},
};
use crate::{device::Device, sync::Arc};

/// How long a helper waits for another creation before it ends.
const HELPER_IDLE_MAX: Duration = Duration::from_secs(5);

/// The threads that a get found missing; it starts them after unlocking.
#[must_use]
pub(super) struct Wanted {
    helper: bool,
    domain: bool,
}

impl<D: Device> Shared<D> {
    fn helper_max(&self) -> usize {
        match self.cfg.executor {
            // With two, a stranger's resolution that sleeps leaves one for local ones.
            Executor::Threads { helpers } => helpers.max(2),
            Executor::Manual => 0,
        }
    }

    /// Counts the threads in that the caller then starts. Called with a flight queued, under the state lock.
    pub(super) fn wanted_threads(&self, st: &mut State<D>) -> Wanted {
        let max = self.helper_max();
        if max == 0 {
            return Wanted { helper: false, domain: false };
        }
        let domain = self.wants_domain(st);
        let helper = self.queued && st.flights.queued_len() > st.threads.idle_helpers && st.threads.helpers < max;
        st.threads.helpers += usize::from(helper);
        Wanted { helper, domain }
    }

    /// Counts the domain's thread in, if it has to be started.
    fn wants_domain(&self, st: &mut State<D>) -> bool {
        matches!(self.cfg.executor, Executor::Threads { .. }) && !std::mem::replace(&mut st.threads.domain, true)
    }

    /// Sees to it that somebody runs what was queued for the domain's thread. False if nobody will.
    pub(super) fn call_domain(this: &Arc<Self>) -> bool {
        let domain = this.wants_domain(&mut this.state.lock());
        this.domain_wake.notify_one();
        !domain || Self::start_domain(this)
    }

    fn start_domain(this: &Arc<Self>) -> bool {
        let Err(e) = Self::start(this, "ah-domain", Self::domain) else { return true };
        tracing::warn!("{}: cannot start the thread that destroys address handles ({e})", this.device_name());
        this.state.lock().threads.domain = false;
        false
    }

    /// Starts what [`Shared::wanted_threads`] found missing and wakes a helper for the flight that was queued.
    pub(super) fn start_threads(this: &Arc<Self>, wanted: Wanted) {
        if wanted.domain {
            Self::start_domain(this);
        }
        if wanted.helper
            && let Err(e) = Self::start(this, "ah-helper", Self::help)
        {
            this.give_up_helper(&e);
        }
        if this.queued {
            this.queue_ready.notify_one();
        }
    }

    fn start(this: &Arc<Self>, name: &str, body: fn(&Arc<Self>)) -> io::Result<()> {
        let this = Arc::clone(this);
        thread::Builder::new().name(name.to_string()).spawn(move || body(&this)).map(drop)
    }

    /// A helper could not be started: without any, nobody would run what is queued.
    fn give_up_helper(&self, why: &io::Error) {
        let mut failed = Vec::new();
        let mut st = self.state.lock();
        st.threads.helpers -= 1;
        if st.threads.helpers == 0 {
            while let Some(generation) = st.flights.start_next(usize::MAX) {
                failed.extend(st.flights.remove(generation));
            }
        }
        drop(st);
        for flight in failed {
            let error =
                explain::no_thread(self.device_name(), &flight.attr, why.raw_os_error().unwrap_or(libc::EAGAIN));
            for waiter in flight.waiters {
                waiter.fill(Outcome::Failed(error.clone(), self.cfg.failure_hold));
            }
        }
    }

    fn help(this: &Arc<Self>) {
        let stranger_max = this.helper_max() / 2;
        let mut st = this.state.lock();
        loop {
            if let Some(generation) = st.flights.start_next(stranger_max) {
                drop(st);
                Self::run_flight(this, generation);
                st = this.state.lock();
                continue;
            }
            if st.closed {
                break;
            }
            st.threads.idle_helpers += 1;
            let timed_out = this.queue_ready.wait_for(&mut st, HELPER_IDLE_MAX).timed_out();
            st.threads.idle_helpers -= 1;
            if timed_out && !st.flights.has_next(stranger_max) {
                break;
            }
        }
        st.threads.helpers -= 1;
    }

    fn domain(this: &Arc<Self>) {
        loop {
            let now = this.read_clock();
            let due = this.poll(now);
            if this.state.lock().is_over() {
                return;
            }
            let mut grave = this.grave.lock();
            if grave.is_quiet() {
                match due {
                    Some(due) => drop(this.domain_wake.wait_for(&mut grave, due.since(now))),
                    None => this.domain_wake.wait(&mut grave),
                }
            }
            grave.kicked = false;
        }
    }
}
