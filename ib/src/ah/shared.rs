//! [`Shared`]: the cache without threads. It creates when it is told to run a flight, destroys and expires when it is
//! polled; [`threads`](super::threads) or the owner does the telling.
//!
//! Two locks: `state`, and `grave`, which may be taken while `state` is held but not the other way round. The device, the
//! wakers and the drops of entries are called with neither.

use std::{collections::BTreeMap, mem, time::Duration};

use uct::{Clock, Time};

use super::{
    AhCacheConfig, AhCacheStats, AhRef, AhTtl, AhWaker, Executor, Origin,
    entry::{Entry, Status},
    explain,
    flight::{Failures, Flight, Flights, Outcome, Ticket},
    table::{KeyHasher, Lookup, Table, is_past_ttl},
    tags::Tags,
};
use crate::{
    device::{AhAttr, Device, GidEntry, VerbsError, VerbsResult},
    sync::{Arc, AtomicU64, Condvar, Mutex, MutexGuard, Ordering},
    types::Gid,
};

/// Buckets looked at when an entry is added to a table above its bound: small tables are swept whole.
const SWEEP_ON_INSERT: usize = 256;
/// Buckets looked at, and entries taken out, per hold of the state lock in [`Shared::poll`].
const SWEEP_CHUNK: usize = 4096;
/// The longest time between two full sweeps.
const SWEEP_PERIOD_MAX: Duration = Duration::from_secs(10);
/// How often a creation is done again because an event concerned it. After that its result is handed out with the grade
/// the event gave it.
const RESTARTS_MAX: u8 = 3;

/// An address handle whose last reference is gone.
struct Dead<D: Device> {
    generation: u64,
    ah: D::Ah,
}

/// Where dead handles wait for the reaper, and what wakes the domain's thread.
pub(super) struct Grave<D: Device> {
    dead: Vec<Dead<D>>,
    /// Set to make the domain's thread look at the state.
    pub(super) kicked: bool,
}

impl<D: Device> Grave<D> {
    #[cfg(not(uct_loom))]
    pub(super) fn is_quiet(&self) -> bool {
        self.dead.is_empty() && !self.kicked
    }
}

/// A live handle that is not in the table (private, invalidated, or left over from closing): what an event needs to reach
/// it.
pub(super) struct Stray {
    pub(super) attr: AhAttr,
    pub(super) status: Arc<Status>,
    users: u32,
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
    /// Next hops of destinations that are reached through a gateway, as far as anybody told.
    pub(super) hops: BTreeMap<Gid, Gid>,
    /// The GID tables last read, by port; `None` after a failed read.
    pub(super) gids: BTreeMap<u8, Option<Vec<GidEntry>>>,
    tags: Tags,
    pub(super) stats: AhCacheStats,
    generation: u64,
    pub(super) closed: bool,
    /// Device calls that may still bring a handle into the world.
    creating: usize,
    next_sweep: Time,
    #[cfg(not(uct_loom))]
    pub(super) threads: ThreadCounts,
}

impl<D: Device> State<D> {
    fn live(&self) -> u64 {
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
    name: String,
    ah_max: usize,
    /// True if creations are queued instead of being run by the get that misses.
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
    /// Signalled when the domain's thread has something to do. Goes with `grave`.
    pub(super) domain_wake: Condvar,
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
                hops: BTreeMap::new(),
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
            grave: Mutex::new(Grave { dead: Vec::new(), kicked: false }),
            domain_wake: Condvar::new(),
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

    fn note_time(&self, now: Time) {
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

    /// Answers from the table, or goes down the slow path.
    #[inline]
    pub(super) fn get(this: &Arc<Self>, ask: Ask<'_>) -> Result<AhRef<D>, Miss<D>> {
        loop {
            let mut guard = this.state.lock();
            let st = &mut *guard;
            let user = st.tags.bit(ask.usage);
            let lookup = match this.cfg.ttl {
                AhTtl::Infinite => st.table.get(ask.hash, ask.attr, user, None::<fn(u64) -> bool>),
                AhTtl::Finite(ttl) => {
                    let expired = |stamp| is_past_ttl(stamp, this.read_clock().as_nanos(), ttl);
                    st.table.get(ask.hash, ask.attr, user, Some(expired))
                }
                AhTtl::Bypass => Lookup::Miss,
            };
            match lookup {
                Lookup::Hit(entry) => {
                    st.stats.hits += 1;
                    if let AhTtl::Infinite = this.cfg.ttl {
                        this.tick.store(st.stats.hits + st.stats.misses, Ordering::Relaxed);
                    }
                    return Ok(AhRef { entry });
                }
                Lookup::Expired(old) => {
                    st.stats.expired += 1;
                    // Given up before its successor is made, so that a full device has room for that.
                    drop(guard);
                    drop(old);
                }
                Lookup::Miss => return Err(Self::miss(this, guard, ask, user)),
            }
        }
    }

    #[cold]
    #[inline(never)]
    fn miss(this: &Arc<Self>, mut guard: MutexGuard<'_, State<D>>, ask: Ask<'_>, user: u32) -> Miss<D> {
        let st = &mut *guard;
        if st.closed {
            drop(guard);
            return Miss::Over(Outcome::Failed(explain::closed(&this.name, ask.attr), Duration::MAX));
        }
        let private = this.cfg.ttl == AhTtl::Bypass;
        if !private && let Some(generation) = st.flights.find(ask.attr) {
            st.stats.misses += 1;
            let ticket = Ticket::new(ask.waker);
            st.flights.join(generation, Arc::clone(&ticket), ask.origin, user);
            drop(guard);
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
        st.stats.misses += 1;
        if let AhTtl::Infinite = this.cfg.ttl {
            this.tick.store(st.stats.hits + st.stats.misses, Ordering::Relaxed);
        }
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
        #[cfg(not(uct_loom))]
        let wanted = this.wanted_threads(st);
        drop(guard);
        #[cfg(not(uct_loom))]
        Self::start_threads(this, wanted);
        match ticket {
            Some(ticket) => Miss::Wait(ticket, generation),
            None => Miss::Over(Self::run_flight(this, generation)),
        }
    }

    /// Runs queued creations in this thread until there is none left that nobody else runs; returns how many.
    pub(super) fn run_jobs(this: &Arc<Self>) -> usize {
        let mut count = 0;
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
            drop(guard);
            let result = this.create(&attr);
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
        drop(guard);
        drop(evicted);
        for waiter in flight.waiters {
            waiter.fill(match &outcome {
                Outcome::Ready(ah) => Outcome::Ready(ah.clone()),
                Outcome::Failed(error, retry_after) => Outcome::Failed(error.clone(), *retry_after),
            });
        }
        if let AhTtl::Finite(_) = this.cfg.ttl {
            this.kick();
        }
        Some(outcome)
    }

    /// Asks the device. When it is full, gives up what can be given up and asks once more.
    fn create(&self, attr: &AhAttr) -> VerbsResult<D::Ah> {
        match self.device.create_ah(attr) {
            Err(VerbsError { errno: libc::ENOMEM, .. }) if self.make_room() => self.device.create_ah(attr),
            result => result,
        }
    }

    /// Destroys what waits for it, else the entry that has been idle for longest. True if anything was destroyed.
    fn make_room(&self) -> bool {
        if self.reap() > 0 {
            return true;
        }
        let mut guard = self.state.lock();
        let st = &mut *guard;
        st.table.sweep(st.table.bucket_count());
        let victim = st.table.pop_oldest();
        st.stats.evicted += u64::from(victim.is_some());
        drop(guard);
        drop(victim);
        self.reap() > 0
    }

    /// Takes out idle entries above the bound, after a look at `buckets` buckets for new ones.
    fn enforce_bound(&self, st: &mut State<D>, buckets: usize, out: &mut Vec<Arc<Entry<D>>>) {
        if st.table.len() <= self.cfg.idle_max {
            return;
        }
        st.table.sweep(buckets);
        while st.table.idle_len() > self.cfg.idle_max
            && let Some(e) = st.table.pop_oldest()
        {
            st.stats.evicted += 1;
            out.push(e);
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
            idle: st.table.iter().filter(|e| Entry::is_idle(e)).count(),
        }
    }

    fn closed_outcome(&self) -> Outcome<D> {
        Outcome::Failed(explain::closed_during(&self.name), Duration::MAX)
    }

    /// Takes a handle whose last reference is gone. Called by drops anywhere, also under `state`.
    pub(super) fn bury(&self, generation: u64, ah: D::Ah) {
        let mut grave = self.grave.lock();
        let was_empty = grave.dead.is_empty();
        grave.dead.push(Dead { generation, ah });
        drop(grave);
        if was_empty {
            self.domain_wake.notify_one();
        }
    }

    /// Makes the domain's thread look at the state.
    pub(super) fn kick(&self) {
        self.grave.lock().kicked = true;
        self.domain_wake.notify_one();
    }

    /// Destroys the handles whose last reference is gone; returns how many those were.
    pub(super) fn reap(&self) -> usize {
        let dead = mem::take(&mut self.grave.lock().dead);
        if dead.is_empty() {
            return 0;
        }
        let count = dead.len();
        let mut generations = Vec::with_capacity(count);
        for Dead { generation, ah } in dead {
            generations.push(generation);
            if let Err(error) = self.device.destroy_ah(ah) {
                tracing::debug!("{}: {error}; the address handle is gone all the same", self.name);
            }
        }
        let mut st = self.state.lock();
        st.stats.destroyed += count as u64;
        let strays: Vec<_> = generations.iter().filter_map(|g| st.strays.remove(g)).collect();
        drop(st);
        drop(strays);
        count
    }

    /// Destroys, expires and evicts what is due at `now`; returns when it wants to be called again.
    pub(super) fn poll(&self, now: Time) -> Option<Time> {
        self.note_time(now);
        let mut gone = Vec::new();
        let due = self.expire(now, &mut gone);
        drop(gone);
        self.reap();
        due
    }

    fn expire(&self, now: Time, gone: &mut Vec<Arc<Entry<D>>>) -> Option<Time> {
        let mut st = self.state.lock();
        st.failures.expire(now);
        let wanted = st.table.len() > self.cfg.idle_max || matches!(self.cfg.ttl, AhTtl::Finite(_));
        if !wanted || st.table.len() == 0 {
            return None;
        }
        if now >= st.next_sweep {
            let mut left = st.table.bucket_count();
            while left > 0 {
                let chunk = left.min(SWEEP_CHUNK);
                st.table.sweep(chunk);
                left -= chunk;
                if left > 0 {
                    // Others wait: an entry that moves meanwhile is found by the next sweep.
                    drop(st);
                    st = self.state.lock();
                }
            }
            st.next_sweep = now.saturating_add(self.sweep_period(&st));
        }
        let AhTtl::Finite(ttl) = self.cfg.ttl else {
            self.enforce_bound(&mut st, SWEEP_ON_INSERT, gone);
            return (st.table.len() > self.cfg.idle_max).then_some(st.next_sweep);
        };
        let mut chunk = 0;
        while let Some(stamp) = st.table.oldest_stamp()
            && is_past_ttl(stamp, now.as_nanos(), ttl)
            && let Some(e) = st.table.pop_oldest()
        {
            st.stats.expired += 1;
            gone.push(e);
            chunk += 1;
            if chunk == SWEEP_CHUNK {
                chunk = 0;
                drop(st);
                st = self.state.lock();
            }
        }
        self.enforce_bound(&mut st, SWEEP_ON_INSERT, gone);
        let expiry = st.table.oldest_stamp().map(|stamp| Time::from_nanos(stamp).saturating_add(ttl));
        let sweep = (st.table.len() > st.table.idle_len()).then_some(st.next_sweep);
        expiry.into_iter().chain(sweep).min()
    }

    /// At most the TTL, so that who is idle for a TTL was seen in time; and in proportion to the table, so that looking at
    /// it takes a few percent of a core at most.
    fn sweep_period(&self, st: &State<D>) -> Duration {
        let floor = Duration::from_micros(st.table.len() as u64);
        let ceiling = match self.cfg.ttl {
            AhTtl::Finite(ttl) => ttl.min(SWEEP_PERIOD_MAX),
            _ => Duration::from_secs(1),
        };
        ceiling.max(floor)
    }

    /// See [`AhCache::stats`](super::AhCache::stats).
    pub(super) fn stats(&self) -> AhCacheStats {
        let st = self.state.lock();
        let idle = st.table.iter().filter(|e| Entry::is_idle(e)).count();
        let dead = self.grave.lock().dead.len();
        let live = st.live() as usize;
        let held = live.saturating_sub(idle + dead);
        AhCacheStats { live, held, idle, pending: st.flights.len(), ..st.stats }
    }

    /// See [`AhCache::close`](super::AhCache::close).
    pub(super) fn close(&self) {
        let mut guard = self.state.lock();
        let st = &mut *guard;
        if mem::replace(&mut st.closed, true) {
            return;
        }
        let entries = st.table.take_all();
        let flights = st.flights.take_all();
        st.failures.clear();
        st.hops.clear();
        let (mut handles, mut references, mut users) = (0, 0, 0);
        {
            let grave = self.grave.lock();
            for (generation, stray) in &st.strays {
                if !grave.dead.iter().any(|d| d.generation == *generation) {
                    handles += 1;
                    references += 1;
                    users |= stray.users;
                }
            }
        }
        for e in &entries {
            let holders = Arc::strong_count(e) - 1;
            if holders > 0 {
                handles += 1;
                references += holders;
                users |= e.users.load(Ordering::Relaxed);
                // Events still reach those who hold it.
                st.strays.insert(e.generation, Stray::of(e));
            }
        }
        let words = st.tags.words(users);
        drop(guard);
        if handles > 0 {
            tracing::warn!(
                "{}: closed with {handles} address handles held by {references} or more references ({words}): each is \
                 destroyed with its last reference",
                self.name
            );
        }
        drop(entries);
        for waiter in flights.into_iter().flat_map(|f| f.waiters) {
            waiter.fill(self.closed_outcome());
        }
        self.queue_ready.notify_all();
        self.kick();
    }
}

impl<D: Device> Drop for Shared<D> {
    fn drop(&mut self) {
        // With threads, the domain's thread stays until nothing is left. Without, the owner has stopped polling, and
        // nobody else will do it.
        self.reap();
    }
}
