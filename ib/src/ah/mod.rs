//! The address-handle cache: one per memory domain, reference-counted, governed by a TTL, keyed by everything that makes
//! one address handle (AH) different from another ([`AhAttr`](crate::device::AhAttr)). Start reading at [`AhCache`].
//!
//! ```text
//!            try_get                    create_ah, no lock held
//!  caller ───────────► table ── miss ─► flight (one per key) ──► entry ──► table
//!    ▲                   │ hit                  │ failed                      │ idle too long, evicted,
//!    └───── AhRef ◄──────┘                      ▼                             │ stale, poisoned, closed
//!                                       remembered failure                    ▼
//!  AhRef: clone = hold, drop = put ── last one of a given-up entry ──► reaper ──► destroy_ah
//! ```
//!
//! - `get` shares the entry of a key while somebody holds it. An idle entry is reused until it has been idle for the TTL.
//!   The TTL bounds idle life, **not freshness**: an entry in steady use never expires.
//! - Freshness is the business of invalidation. Most address handles freeze what they were resolved to (on RoCE the
//!   peer's MAC), so an event about a neighbour, a port or the GID table takes the entries it concerns out of the table:
//!   *stale* ones stay usable by their holders, *poisoned* ones must be replaced before the next send.
//! - Creating may sleep for a second and is never done under a lock; on devices where it sleeps it is done by helper
//!   threads, and [`AhCache::try_get`] answers [`TryGet::Pending`].
//! - A reference may be dropped anywhere: dropping takes no lock that is held for long and never calls the device.
//! - Closing gives up the cache's own references; each handle dies with its last holder.
//!
//! What [`AhCache::handle_event`] does; [`AhCache::handle_paths`] is the same for news of routes and neighbours, by path:
//!
//! | event | entries | grade |
//! |---|---|---|
//! | link address behind a GID changed | that lead to the GID | stale |
//! | port active or down, SM change, client reregister | of the port | stale |
//! | GID table changed (read again, also when a port becomes active) | whose local GID is gone or has moved | poisoned |
//! | LID changed | of the port | poisoned |
//! | device fatal | all | poisoned |
//!
//! An event also restarts the creations it concerns and forgets the failures it concerns. On devices whose calls may sleep
//! the GID table is read a moment later, by the domain's thread: [`AhCache::tables_read`] counts up when it has been.
//!
//! One mutex guards all state. A hit holds it for some nanoseconds; no callback, no system call and no device call happens
//! under it (the clock passed in is read under it, and must not call back).

mod cache;
mod config;
mod ending;
mod entry;
mod errands;
mod events;
mod explain;
mod flight;
mod path;
mod shared;
mod table;
mod tags;
#[cfg(not(uct_loom))]
mod threads;

#[cfg(all(test, uct_loom))]
mod loom;
#[cfg(all(test, not(uct_loom)))]
mod model;
#[cfg(test)]
#[cfg_attr(uct_loom, allow(dead_code))]
mod testing;
#[cfg(all(test, not(uct_loom)))]
mod tests;

pub use cache::AhCache;
pub use config::{
    AhCacheConfig, AhCacheStats, AhTtl, AhWaker, Executor, GetOptions, Grade, Invalidated, Origin, TryGet,
};
pub use entry::AhRef;
pub use flight::PendingAh;
pub use path::{AhPath, PathHook, PathNews};
