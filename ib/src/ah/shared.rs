//! [`Shared`]: the cache without threads. It creates when it is told to run a flight, destroys and expires when it is
//! polled ([`ending`](super::ending)); [`threads`](super::threads) or the owner does the telling.
//!
//! Two locks: `state`, and `grave`, which may be taken while `state` is held but not the other way round. The device, the
//! wakers and the drops of entries are called with neither. A third, `reaping`, makes those take turns who destroy, and a
//! fourth, `running_errand`, those who run errands; nobody else waits for them, and the first two are taken inside them.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::OnceLock,
    time::Duration,
};

use uct::{Clock, Time};

use super::{
    AhCacheConfig, AhCacheStats, AhPath, AhRef, AhTtl, AhWaker, Executor, Origin, PathHook,
    entry::{Entry, Status},
    errands::Errand,
    explain,
    flight::{Failures, Flight, Flights, Outcome, Ticket},
    table::{KeyHasher, Table, is_past_ttl},
    tags::Tags,
};
use crate::{
    device::{AhAttr, Device, GidEntry, VerbsError, VerbsResult},
    sync::{Arc, AtomicU64, Condvar, Mutex, MutexGuard, Ordering},
};

/// Buckets looked at when an entry is added to a table above its bound: small tables are swept whole.
pub(super) const SWEEP_ON_INSERT: usize = 256;
/// How often a creation is done again because an event concerned it. After that its result is handed out with the grade
/// the event gave it.
const RESTARTS_MAX: u8 = 3;

/// An address handle whose last reference is gone.
pub(super) struct Dead<D: Device> {
    pub(super) generation: u64,
    pub(super) ah: D::Ah,
}

/// Where dead handles wait for the reaper and errands for whom may sleep, and what wakes the domain's thread.
pub(super) struct Grave<D: Device> {
    pub(super) dead: Vec<Dead<D>>,
    /// Taken out by the reaper and not yet counted as destroyed.
    pub(super) dying: usize,
    pub(super) errands: VecDeque<Errand>,
    /// Set to make the domain's thread look at the state.
    pub(super) kicked: bool,
}

impl<D: Device> Grave<D> {
    #[cfg(not(uct_loom))]
    pub(super) fn is_quiet(&self) -> bool {
        self.dead.is_empty() && self.errands.is_empty() && !self.kicked
    }
}

/// A live handle that is not in the table (private, invalidated, or left over from closing): what an event needs to reach
/// it.
pub(super) struct Stray {
    pub(super) attr: AhAttr,
    pub(super) status: Arc<Status>,
    pub(super) users: u32,
}

impl Stray {
    pub(super) fn of<D: Device>(e: &Entry<D>) -> Self {
        Stray { attr: e.attr, status: Arc::clone(&e.status), users: e.users.load(Ordering::Relaxed) }
    }
}

#[cfg(not(uct_loom))]
/// How many threads there are; see [`threads`](super::threads).
#[derive(Default)]
pub(super) struct ThreadCounts {
    pub(super) helpers: usize,
    pub(super) idle_helpers: usize,
    pub(super) domain: bool,
}

pub(super) struct State<D: Device> {
    pub(super) table: Table<D>,
    pub(super) flights: Flights<D>,
    pub(super) failures: Failures,
    pub(super) strays: BTreeMap<u64, Stray>,
    /// The GID tables last read, by port; `None` after a failed read.
    pub(super) gids: BTreeMap<u8, Option<Vec<GidEntry>>>,
    pub(super) tags: Tags,
    pub(super) stats: AhCacheStats,
    generation: u64,
    pub(super) closed: bool,
    /// Device calls that may still bring a handle into the world.
    creating: usize,
    pub(super) next_sweep: Time,
    #[cfg(not(uct_loom))]
    pub(super) threads: ThreadCounts,
}

impl<D: Device> State<D> {
    pub(super) fn live(&self) -> u64 {
        self.stats.created - self.stats.destroyed
    }

    /// True if nothing is left to do, ever.
    #[cfg(not(uct_loom))]
    pub(super) fn is_over(&self) -> bool {
        self.closed && self.creating == 0 && self.live() == 0
    }
}

/// A get as it goes down the slow path.
#[derive(Copy, Clone)]
pub(super) struct Ask<'a> {
    pub(super) attr: &'a AhAttr,
    pub(super) hash: u64,
    pub(super) usage: &'static str,
    pub(super) origin: Origin,
    pub(super) waker: Option<&'a AhWaker>,
}

/// What a miss comes to.
pub(super) enum Miss<D: Device> {
    Over(Outcome<D>),
    Wait(Arc<Ticket<D>>, u64),
}

pub(super) struct Shared<D: Device> {
    pub(super) device: std::sync::Arc<D>,
    pub(super) name: String,
    ah_max: usize,
    /// True if calls of the device may sleep: creations are queued instead of being run by the get that misses, GID tables are
    /// read on an errand.
    pub(super) queued: bool,
    pub(super) cfg: AhCacheConfig,
    pub(super) hasher: KeyHasher,
    clock: std::sync::Arc<dyn Clock>,
    /// What a put leaves behind in the entry: at a finite TTL the clock when it was last read, else the count of gets.
    pub(super) tick: AtomicU64,
    pub(super) state: Mutex<State<D>>,
    /// Signalled when a flight is queued. Goes with `state`.
    #[cfg_attr(uct_loom, allow(dead_code))]
    pub(super) queue_ready: Condvar,
    pub(super) grave: Mutex<Grave<D>>,
    /// Held while handles are destroyed, so that who needs room on the device can wait for what is being destroyed.
    pub(super) reaping: Mutex<()>,
    /// Signalled when the domain's thread has something to do. Goes with `grave`.
    pub(super) domain_wake: Condvar,
    /// See [`AhCache::on_creation`](super::AhCache::on_creation).
    pub(super) creation_hook: OnceLock<PathHook>,
    /// Held while an errand is run. The other locks may be taken inside it.
    pub(super) running_errand: Mutex<()>,
    /// GID tables that were read on an errand.
    pub(super) tables_read: AtomicU64,
}

impl<D: Device> Shared<D> {
    pub(super) fn new(device: std::sync::Arc<D>, cfg: AhCacheConfig, clock: std::sync::Arc<dyn Clock>) -> Self {
        let attr = device.attr();
        // Known before the first event, so that the first event can be found to have changed nothing.
        let gids = (1..=attr.port_count).map(|port| (port, device.query_gids(port).ok())).collect();
        let hasher = match cfg.executor {
            Executor::Threads { .. } => KeyHasher::random(),
            Executor::Manual => KeyHasher::fixed(),
        };
        Shared {
            name: attr.name,
            ah_max: attr.ah_max,
            queued: attr.ah_create_sleeps,
            cfg,
            hasher,
            clock,
            tick: AtomicU64::new(0),
            state: Mutex::new(State {
                table: Table::new(),
                flights: Flights::new(),
                failures: Failures::new(),
                strays: BTreeMap::new(),
                gids,
                tags: Tags::default(),
                stats: AhCacheStats::default(),
                generation: 0,
                closed: false,
                creating: 0,
                next_sweep: Time::ZERO,
                #[cfg(not(uct_loom))]
                threads: ThreadCounts::default(),
            }),
            queue_ready: Condvar::new(),
            grave: Mutex::new(Grave { dead: Vec::new(), dying: 0, errands: VecDeque::new(), kicked: false }),
            reaping: Mutex::new(()),
            domain_wake: Condvar::new(),
            creation_hook: OnceLock::new(),
            running_errand: Mutex::new(()),
            tables_read: AtomicU64::new(0),
            device,
        }
    }

    pub(super) fn device_name(&self) -> &str {
        &self.name
    }

    /// The clock, remembered as the coarse tick of puts.
    pub(super) fn read_clock(&self) -> Time {
        let now = self.clock.now();
        self.note_time(now);
        now
    }

    pub(super) fn note_time(&self, now: Time) {
        if let AhTtl::Finite(_) = self.cfg.ttl
            && now.as_nanos() > self.tick.load(Ordering::Relaxed)
        {
            self.tick.store(now.as_nanos(), Ordering::Relaxed);
        }
    }

    /// What a reference that is about to be dropped leaves as the time of its put.
    #[inline]
    pub(super) fn put_stamp(&self, entry: &Arc<Entry<D>>) -> u64 {
        // At a finite TTL the last holder reads the clock. Two last holders that let go at once may both take the other
        // for a later one; then the coarse tick makes the entry a little older than it is, never younger.
        if let AhTtl::Finite(_) = self.cfg.ttl
            && Arc::strong_count(entry) <= 2
        {
            return self.read_clock().as_nanos();
        }
        self.tick.load(Ordering::Relaxed)
    }

    /// Answers from the table if it can: the path that has to be fast. `None` says nothing.
    #[inline]
    pub(super) fn hit(&self, hash: u64, attr: &AhAttr, usage: &'static str) -> Option<AhRef<D>> {
        let mut guard = self.state.lock();
        let st = &mut *guard;
        let user = st.tags.bit(usage);
        let entry = match self.cfg.ttl {
            AhTtl::Infinite => {
                let entry = st.table.get(hash, attr, user, None::<fn(u64) -> bool>)?.ok()?;
                // Counts the hit too: `stats` takes it from here.
                self.tick.store(self.tick.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                entry
            }
            AhTtl::Finite(ttl) => {
                let is_over = |stamp| is_past_ttl(stamp, self.read_clock().as_nanos(), ttl);
                let entry = st.table.get(hash, attr, user, Some(is_over))?.ok()?;
                st.stats.hits += 1;
                entry
            }
            AhTtl::Bypass => return None,
        };
        Some(AhRef { entry })
    }

    /// Answers when [`Shared::hit`] could not.
    #[cold]
    #[inline(never)]
    pub(super) fn get(this: &Arc<Self>, ask: Ask<'_>) -> Miss<D> {
        loop {
            if let Some(ah) = this.hit(ask.hash, ask.attr, ask.usage) {
                return Miss::Over(Outcome::Ready(ah));
            }
            let mut guard = this.state.lock();
            let st = &mut *guard;
            let user = st.tags.bit(ask.usage);
            let Some(e) = st.table.find(ask.hash, ask.attr) else { return Self::miss(this, guard, ask, user) };
            let generation = e.generation;
            // Somebody may have got it, or put another one there, since it was looked at.
            if let AhTtl::Finite(ttl) = this.cfg.ttl
                && Entry::is_idle(e)
                && is_past_ttl(e.stamp(), this.read_clock().as_nanos(), ttl)
            {
                st.stats.expired += 1;
                let old = st.table.remove(ask.hash, generation);
                // Given up before its successor is made, so that a full device has room for that.
                drop(guard);
                drop(old);
            }
        }
    }

    fn count_miss(&self, st: &mut State<D>) {
        st.stats.misses += 1;
        if let AhTtl::Infinite = self.cfg.ttl {
            self.tick.store(self.tick.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        }
    }

    fn miss(this: &Arc<Self>, mut guard: MutexGuard<'_, State<D>>, ask: Ask<'_>, user: u32) -> Miss<D> {
        let st = &mut *guard;
        if st.closed {
            drop(guard);
            return Miss::Over(Outcome::Failed(explain::closed(&this.name, ask.attr), Duration::MAX));
        }
        let private = this.cfg.ttl == AhTtl::Bypass;
        if !private && let Some(generation) = st.flights.find(ask.attr) {
            this.count_miss(st);
            let ticket = Ticket::new(ask.waker);
            let lifted = st.flights.join(generation, Arc::clone(&ticket), ask.origin, user);
            Self::unlock_and_help(this, guard, lifted);
            return Miss::Wait(ticket, generation);
        }
        if !st.failures.is_empty() {
            let now = this.read_clock();
            if let Some((error, left)) = st.failures.get(ask.attr, now) {
                return Miss::Over(Outcome::Failed(error, left));
            }
        }
        if ask.origin == Origin::Stranger && st.flights.stranger_count() >= this.cfg.stranger_quota {
            drop(guard);
            let error = explain::quota(&this.name, ask.attr, this.cfg.stranger_quota);
            return Miss::Over(Outcome::Failed(error, this.cfg.failure_hold));
        }
        this.count_miss(st);
        st.generation += 1;
        let generation = st.generation;
        let ticket = this.queued.then(|| Ticket::new(ask.waker));
        let flight = Flight {
            attr: *ask.attr,
            hash: ask.hash,
            origin: ask.origin,
            running: !this.queued,
            private,
            waiters: ticket.iter().cloned().collect(),
            users: user,
            doom: None,
            restarts: 0,
        };
        st.flights.insert(generation, flight);
        Self::unlock_and_help(this, guard, true);
        match ticket {
            Some(ticket) => Miss::Wait(ticket, generation),
            None => Miss::Over(Self::run_flight(this, generation)),
        }
    }

    /// Unlocks, and with `news` sees to it that somebody looks at the flights.
    #[cfg(not(uct_loom))]
    fn unlock_and_help(this: &Arc<Self>, mut guard: MutexGuard<'_, State<D>>, news: bool) {
        let wanted = news.then(|| this.wanted_threads(&mut guard));
        drop(guard);
        if let Some(wanted) = wanted {
            Self::start_threads(this, wanted);
        }
    }

    /// Models have no threads of the cache.
    #[cfg(uct_loom)]
    fn unlock_and_help(_: &Arc<Self>, guard: MutexGuard<'_, State<D>>, _: bool) {
        drop(guard);
    }

    /// Runs errands and queued creations in this thread until there is none left that nobody else runs; returns how many.
    pub(super) fn run_jobs(this: &Arc<Self>) -> usize {
        let mut count = this.run_errands();
        loop {
            let next = this.state.lock().flights.start_next(usize::MAX);
            let Some(generation) = next else { return count };
            Self::run_flight(this, generation);
            count += 1;
        }
    }

    /// Creates what a running flight asks for, tells its waiters and returns the outcome.
    pub(super) fn run_flight(this: &Arc<Self>, generation: u64) -> Outcome<D> {
        loop {
            let mut guard = this.state.lock();
            let Some(flight) = guard.flights.get_mut(generation) else {
                // Closing has told the waiters; this is for the one that runs the flight itself.
                drop(guard);
                return this.closed_outcome();
            };
            flight.doom = None;
            let attr = flight.attr;
            guard.creating += 1;
            let destroyed = guard.stats.destroyed;
            drop(guard);
            if let (Some(hook), Some(path)) = (this.creation_hook.get(), AhPath::of(&attr)) {
                hook(&path);
            }
            let result = this.create(&attr, destroyed);
            if let Some(outcome) = Self::land(this, generation, &attr, result) {
                return outcome;
            }
        }
    }

    /// Takes in the result of a device call. `None`: an event has overtaken it, create again.
    fn land(this: &Arc<Self>, generation: u64, attr: &AhAttr, result: VerbsResult<D::Ah>) -> Option<Outcome<D>> {
        let now = this.read_clock();
        let mut guard = this.state.lock();
        let st = &mut *guard;
        st.creating -= 1;
        st.stats.created += u64::from(result.is_ok());
        st.stats.failed += u64::from(result.is_err());
        let Some(flight) = st.flights.get_mut(generation) else {
            drop(guard);
            if let Ok(ah) = result {
                this.bury(generation, ah);
            }
            // The domain's thread may have waited for this call only.
            this.kick();
            return Some(this.closed_outcome());
        };
        let doom = flight.doom;
        if doom.is_some() && flight.restarts < RESTARTS_MAX {
            flight.restarts += 1;
            drop(guard);
            if let Ok(ah) = result {
                this.bury(generation, ah);
            }
            return None;
        }
        let flight = st.flights.remove(generation)?;
        let mut evicted = Vec::new();
        let outcome = match result {
            Ok(ah) => {
                let entry = Entry::new(this, (flight.attr, flight.hash), generation, ah, flight.private);
                entry.users.store(flight.users, Ordering::Relaxed);
                if let Some(grade) = doom {
                    entry.raise(grade);
                    st.stats.invalidated += 1;
                }
                let entry = Arc::new(entry);
                let held = AhRef { entry: Arc::clone(&entry) };
                if flight.private || doom.is_some() {
                    st.strays.insert(generation, Stray::of(&entry));
                    // `held` keeps it, so this is not the last reference.
                    drop(entry);
                } else {
                    st.table.insert(entry);
                    this.enforce_bound(st, SWEEP_ON_INSERT, &mut evicted);
                }
                Outcome::Ready(held)
            }
            Err(why) => {
                let error = explain::creation(&this.situation(st, attr), attr, why);
                // Room appears when any holder lets go, which no event announces: that failure is not the key's.
                let hold = if why.errno == libc::ENOMEM { Duration::ZERO } else { this.cfg.failure_hold };
                if hold > Duration::ZERO && doom.is_none() {
                    let (until, max) = (now.saturating_add(hold), this.cfg.failure_max);
                    st.failures.expire(now);
                    st.failures.remember(*attr, flight.origin, error.clone(), until, max);
                }
                Outcome::Failed(error, hold)
            }
        };
        let has_timer = matches!(this.cfg.ttl, AhTtl::Finite(_)) || st.table.len() > this.cfg.idle_max;
        drop(guard);
        drop(evicted);
        for waiter in flight.waiters {
            waiter.fill(match &outcome {
                Outcome::Ready(ah) => Outcome::Ready(ah.clone()),
                Outcome::Failed(error, retry_after) => Outcome::Failed(error.clone(), *retry_after),
            });
        }
        if has_timer {
            this.kick();
        }
        Some(outcome)
    }

    /// Asks the device. When it is full, gives up what can be given up and asks once more. `destroyed` is the counter from
    /// before.
    fn create(&self, attr: &AhAttr, destroyed: u64) -> VerbsResult<D::Ah> {
        match self.device.create_ah(attr) {
            Err(VerbsError { errno: libc::ENOMEM, .. }) if self.make_room(destroyed) => self.device.create_ah(attr),
            result => result,
        }
    }

    fn situation(&self, st: &State<D>, attr: &AhAttr) -> explain::Situation<'_> {
        let table = st.gids.get(&attr.port).and_then(Option::as_ref);
        let sgid = attr.grh.map(|g| g.sgid);
        explain::Situation {
            device: &self.name,
            sgid_index: table.and_then(|t| t.iter().find(|e| Some(e.gid) == sgid)).map(|e| e.index),
            ah_max: self.ah_max,
            live: st.live(),
            // For a full device all of the table was just looked at.
            idle: st.table.idle_len(),
        }
    }

    pub(super) fn closed_outcome(&self) -> Outcome<D> {
        Outcome::Failed(explain::closed_during(&self.name), Duration::MAX)
    }
}
