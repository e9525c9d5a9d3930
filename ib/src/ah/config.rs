//! What a caller chooses: the cache's settings, and what it says with each `get`.

use std::{fmt, sync::Arc, time::Duration};

use uct::Error;

use super::{AhRef, PendingAh};
use crate::device::Device;

/// `UCX_IB_AH_CACHE_TTL`: how long an entry without a holder may wait for its next user.
///
/// It bounds *idle* life, not freshness: an entry in steady use never expires. Freshness is the business of invalidation
/// ([`AhCache::handle_event`](super::AhCache::handle_event)).
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum AhTtl {
    /// `0`: no caching. Every `get` makes a private address handle that nobody else can get and that dies with its last
    /// put.
    Bypass,
    /// Idle entries are reused for this long, then destroyed and resolved again.
    Finite(Duration),
    /// `inf`, the default: idle entries live until an event, the idle bound or the device's limit ends them.
    Infinite,
}

impl AhTtl {
    /// The TTL that a duration stands for: zero is [`AhTtl::Bypass`], [`Duration::MAX`] is [`AhTtl::Infinite`].
    pub fn from_duration(ttl: Duration) -> AhTtl {
        match ttl {
            Duration::ZERO => AhTtl::Bypass,
            Duration::MAX => AhTtl::Infinite,
            t => AhTtl::Finite(t),
        }
    }
}

/// Who runs what may sleep: creations on devices where they do, destruction, timers.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Executor {
    /// Threads of the cache, started when first needed: up to `helpers` (at least 2) for creations, which end after some
    /// idle seconds, and one for the domain, which destroys and expires and ends with the last address handle.
    Threads {
        /// The largest number of creations that sleep at one time.
        helpers: usize,
    },
    /// The owner: [`AhCache::run_jobs`](super::AhCache::run_jobs) creates, [`AhCache::poll`](super::AhCache::poll)
    /// destroys and expires. Nothing happens by itself, and equal calls have equal results: for tests and simulation.
    Manual,
}

/// The settings of a cache.
#[derive(Clone, Debug)]
pub struct AhCacheConfig {
    /// `UCX_IB_AH_CACHE_TTL`.
    pub ttl: AhTtl,
    /// `UCX_IB_AH_CACHE_MAX`: how many entries without a holder are kept; the least recently used goes first. Held
    /// entries do not count.
    pub idle_max: usize,
    /// For how long a failed creation is remembered, so that a storm of requests costs one system call per period.
    pub failure_hold: Duration,
    /// How many failures are remembered, separately for local gets and for those of strangers.
    pub failure_max: usize,
    /// How many creations may be in flight on behalf of strangers ([`Origin::Stranger`]).
    pub stranger_quota: usize,
    /// Who runs what may sleep.
    pub executor: Executor,
}

impl Default for AhCacheConfig {
    fn default() -> Self {
        AhCacheConfig {
            ttl: AhTtl::Infinite,
            idle_max: 65_536,
            failure_hold: Duration::from_secs(1),
            failure_max: 1024,
            stranger_quota: 64,
            executor: Executor::Threads { helpers: 4 },
        }
    }
}

/// On whose behalf an address is resolved.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Hash)]
pub enum Origin {
    /// The user of this process asked for it.
    Local,
    /// A packet asked for it. Such resolutions have a quota of their own and are served after local ones, so that bogus
    /// addresses cannot starve local connects.
    Stranger,
}

/// Called once when a pending creation is over, from whichever thread ended it and with no lock held. It must not block:
/// set a flag, or push a token into a queue.
pub type AhWaker = Arc<dyn Fn() + Send + Sync>;

/// What a caller says with a `get`.
#[derive(Copy, Clone)]
pub struct GetOptions<'a> {
    /// What the reference is for, in two words, for example `"ud endpoint"`: the warning about handles that outlive their
    /// device names it. Pass a constant; at most 30 different ones are told apart.
    pub usage: &'static str,
    /// On whose behalf.
    pub origin: Origin,
    /// Whom to wake if the answer is [`TryGet::Pending`].
    pub waker: Option<&'a AhWaker>,
}

impl<'a> GetOptions<'a> {
    /// A get for the user of this process, without a waker.
    pub const fn local(usage: &'static str) -> Self {
        GetOptions { usage, origin: Origin::Local, waker: None }
    }

    /// A get that a packet asked for, without a waker.
    pub const fn stranger(usage: &'static str) -> Self {
        GetOptions { usage, origin: Origin::Stranger, waker: None }
    }

    /// The same with a waker.
    pub fn waking(self, waker: &'a AhWaker) -> Self {
        GetOptions { waker: Some(waker), ..self }
    }
}

/// The answer of [`AhCache::try_get`](super::AhCache::try_get).
#[must_use]
pub enum TryGet<D: Device> {
    /// The address handle, with a reference of the caller's own.
    Ready(AhRef<D>),
    /// It is being created. The token is the caller's place in the queue: dropping it gives the place up.
    Pending(PendingAh<D>),
    /// It could not be created.
    Failed {
        /// Why, with device, port, both GIDs, the errno and its likely causes.
        error: Error,
        /// Asking again sooner gets the same answer, unless an event says that things have changed.
        /// [`Duration::MAX`]: never ask again.
        retry_after: Duration,
    },
}

impl<D: Device> fmt::Debug for TryGet<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TryGet::Ready(ah) => f.debug_tuple("Ready").field(ah).finish(),
            TryGet::Pending(token) => f.debug_tuple("Pending").field(token).finish(),
            TryGet::Failed { error, retry_after } => {
                f.debug_struct("Failed").field("error", error).field("retry_after", retry_after).finish()
            }
        }
    }
}

/// How much an invalidated entry is still worth.
#[derive(Copy, Clone, PartialEq, Eq, Debug, PartialOrd, Ord, Hash)]
pub enum Grade {
    /// Perhaps outdated: no new get shares it; holders keep theirs.
    Stale,
    /// Must not be posted again: holders swap in a fresh one before their next send.
    Poisoned,
}

/// What an event did to the cache.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub struct Invalidated {
    /// Entries that became stale.
    pub stale: usize,
    /// Entries that became poisoned.
    pub poisoned: usize,
    /// Remembered failures that were forgotten.
    pub forgotten: usize,
}

/// A snapshot of the counters. `live = created - destroyed`, and each live handle is held, idle, or on its way to the
/// reaper.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub struct AhCacheStats {
    /// Gets answered by an entry that was there.
    pub hits: u64,
    /// Gets that started a creation or joined one.
    pub misses: u64,
    /// Handles the device made.
    pub created: u64,
    /// Handles given back to the device.
    pub destroyed: u64,
    /// Idle entries given up for the idle bound or the device's limit.
    pub evicted: u64,
    /// Idle entries given up because of their age.
    pub expired: u64,
    /// Entries that became stale or poisoned, counted once per step.
    pub invalidated: u64,
    /// Creations that failed.
    pub failed: u64,
    /// Handles that exist.
    pub live: usize,
    /// Handles with a holder: an endpoint, an outcome that nobody has taken yet, or an interface that waits for the report of
    /// a send.
    pub held: usize,
    /// Entries that wait for their next user.
    pub idle: usize,
    /// Creations queued or running.
    pub pending: usize,
}
