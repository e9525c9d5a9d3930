//! How handles end: expiry, eviction, the reaper, closing. The second half of [`Shared`].

use std::{mem, time::Duration};

use uct::Time;

use super::{
    AhCacheStats, AhTtl,
    entry::Entry,
    shared::{Dead, SWEEP_ON_INSERT, Shared, State, Stray},
    table::is_past_ttl,
};
use crate::{
    device::Device,
    sync::{Arc, MutexGuard, Ordering},
};

/// Buckets looked at, and entries taken out, per hold of the state lock in [`Shared::poll`].
const SWEEP_CHUNK: usize = 4096;
/// The longest time between two full sweeps.
const SWEEP_PERIOD_MAX: Duration = Duration::from_secs(10);

impl<D: Device> Shared<D> {
    /// Destroys what waits for it, else the entry that has been idle for longest. True if anything was destroyed, by
    /// whomever, since the counter showed `destroyed`.
    pub(super) fn make_room(&self, destroyed: u64) -> bool {
        self.reap();
        let mut guard = self.state.lock();
        if guard.stats.destroyed != destroyed {
            return true;
        }
        guard = self.sweep_all(guard);
        let st = &mut *guard;
        let victim = st.table.pop_oldest();
        st.stats.evicted += u64::from(victim.is_some());
        drop(guard);
        drop(victim);
        self.reap();
        self.state.lock().stats.destroyed != destroyed
    }

    /// Takes out idle entries above the bound, after a look at `buckets` buckets for new ones.
    pub(super) fn enforce_bound(&self, st: &mut State<D>, buckets: usize, out: &mut Vec<Arc<Entry<D>>>) {
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

    /// Destroys the handles whose last reference is gone.
    pub(super) fn reap(&self) {
        let _turn = self.reaping.lock();
        let mut grave = self.grave.lock();
        let dead = mem::take(&mut grave.dead);
        if dead.is_empty() {
            return;
        }
        let count = dead.len();
        grave.dying = count;
        drop(grave);
        let mut generations = Vec::with_capacity(count);
        for Dead { generation, ah } in dead {
            generations.push(generation);
            if let Err(error) = self.device.destroy_ah(ah) {
                tracing::debug!("{}: {error}; the address handle is gone all the same", self.name);
            }
        }
        let mut st = self.state.lock();
        st.stats.destroyed += count as u64;
        self.grave.lock().dying = 0;
        let strays: Vec<_> = generations.iter().filter_map(|g| st.strays.remove(g)).collect();
        drop(st);
        drop(strays);
    }

    /// Destroys, expires and evicts what is due at `now`; returns when it wants to be called again.
    pub(super) fn poll(&self, now: Time) -> Option<Time> {
        self.note_time(now);
        self.run_errands();
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
            st = self.sweep_all(st);
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

    /// Looks at the whole table, and lets others have the lock in between: an entry that moves meanwhile is found by the
    /// next sweep.
    fn sweep_all<'a>(&'a self, mut st: MutexGuard<'a, State<D>>) -> MutexGuard<'a, State<D>> {
        let mut left = st.table.bucket_count();
        loop {
            let chunk = left.min(SWEEP_CHUNK);
            st.table.sweep(chunk);
            left -= chunk;
            if left == 0 {
                return st;
            }
            drop(st);
            st = self.state.lock();
        }
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
        let grave = self.grave.lock();
        let dead = grave.dead.len() + grave.dying;
        drop(grave);
        let live = st.live() as usize;
        let held = live.saturating_sub(idle + dead);
        let hits = match self.cfg.ttl {
            AhTtl::Infinite => self.tick.load(Ordering::Relaxed) - st.stats.misses,
            _ => st.stats.hits,
        };
        AhCacheStats { hits, live, held, idle, pending: st.flights.len(), ..st.stats }
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
        let errands = mem::take(&mut self.grave.lock().errands);
        drop(guard);
        drop(errands);
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
