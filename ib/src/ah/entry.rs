//! [`Entry`]: one address handle of the device and what the cache knows about it; [`AhRef`]: a reference to it.
//!
//! An entry is idle when the table's reference is the only one left. That is decided by the count of its `Arc`, **seen
//! under the state lock**: from one, the count can only rise by a clone of the table's reference, and those are made under
//! that lock. A holder that lets go therefore needs no lock: it leaves a stamp and drops its `Arc`.

use std::fmt;

use super::{Grade, shared::Shared};
use crate::{
    device::{AhAttr, Device},
    sync::{Arc, AtomicU8, AtomicU32, AtomicU64, Ordering, fence},
};

/// In force: shared by whoever gets the key.
const FRESH: u8 = 0;
/// Private from birth (TTL 0): its [`Status`] has the answer.
const PRIVATE: u8 = 1;
/// Invalidated: its [`Status`] has the answer.
const INVALID: u8 = 2;

/// In [`Entry::users`]: it is in the list of idle entries.
pub(super) const LISTED: u32 = 1 << 31;

/// The grade of an entry, apart from it: the cache must be able to poison entries that it holds no reference to.
pub(super) struct Status(AtomicU8);

impl Status {
    fn new() -> Self {
        Status(AtomicU8::new(0))
    }

    pub(super) fn grade(&self) -> Option<Grade> {
        match self.0.load(Ordering::Acquire) {
            0 => None,
            1 => Some(Grade::Stale),
            _ => Some(Grade::Poisoned),
        }
    }

    /// Raises the grade to `grade`; true if it was lower. Called under the state lock.
    pub(super) fn raise(&self, grade: Grade) -> bool {
        let new = match grade {
            Grade::Stale => 1,
            Grade::Poisoned => 2,
        };
        self.0.fetch_max(new, Ordering::AcqRel) < new
    }
}

/// In this order in memory, so that a hit and a put touch the first two cache lines of it only.
#[repr(C)]
pub(super) struct Entry<D: Device> {
    /// When the last holder let go (or a little earlier, when several did at once): nanoseconds at a finite TTL, else the
    /// count of gets. Final once the entry is idle.
    stamp: AtomicU64,
    shared: Arc<Shared<D>>,
    /// One bit per usage tag that has got it, and [`LISTED`]. Read and written under the state lock.
    pub(super) users: AtomicU32,
    /// [`FRESH`], so that the check before a send is one load; otherwise `status` is asked.
    mark: AtomicU8,
    pub(super) attr: AhAttr,
    /// Taken by `drop` alone.
    ah: Option<D::Ah>,
    pub(super) generation: u64,
    pub(super) hash: u64,
    pub(super) status: Arc<Status>,
}

impl<D: Device> Entry<D> {
    pub(super) fn new(
        shared: &Arc<Shared<D>>,
        (attr, hash): (AhAttr, u64),
        generation: u64,
        ah: D::Ah,
        private: bool,
    ) -> Self {
        Entry {
            attr,
            hash,
            generation,
            stamp: AtomicU64::new(shared.tick.load(Ordering::Relaxed)),
            users: AtomicU32::new(0),
            mark: AtomicU8::new(if private { PRIVATE } else { FRESH }),
            status: Arc::new(Status::new()),
            ah: Some(ah),
            shared: Arc::clone(shared),
        }
    }

    /// Raises the grade to `grade`; true if it was lower. Called under the state lock.
    pub(super) fn raise(&self, grade: Grade) -> bool {
        let raised = self.status.raise(grade);
        self.mark.store(INVALID, Ordering::Release);
        raised
    }

    /// True if only the table refers to it, so that nobody holds it and nobody can but through the table. To be called
    /// under the state lock on the table's own reference.
    pub(super) fn is_idle(this: &Arc<Self>) -> bool {
        let idle = Arc::strong_count(this) == 1;
        if idle {
            // Pairs with the release in the drop of the last holder's reference: its stamp is visible from here on.
            fence(Ordering::Acquire);
        }
        idle
    }

    /// When it became idle; final if [`Entry::is_idle`].
    pub(super) fn stamp(&self) -> u64 {
        self.stamp.load(Ordering::Relaxed)
    }
}

impl<D: Device> Drop for Entry<D> {
    fn drop(&mut self) {
        if let Some(ah) = self.ah.take() {
            self.shared.bury(self.generation, ah);
        }
    }
}

/// A reference to an address handle of the cache: cloning it is `hold`, dropping it is `put`.
///
/// Both take some nanoseconds, need no lock and never call the device: when the last reference to a handle that the cache
/// has given up is dropped, the handle goes to the domain's reaper. A reference outlives the cache and keeps the device
/// alive. Its holder must not drop it while a work request that names the handle may still be outstanding.
pub struct AhRef<D: Device> {
    pub(super) entry: Arc<Entry<D>>,
}

impl<D: Device> AhRef<D> {
    /// The device's address handle, for [`SendWr::ah`](crate::device::SendWr::ah).
    #[inline]
    pub fn ah(&self) -> &D::Ah {
        match &self.entry.ah {
            Some(ah) => ah,
            // Only `Entry::drop` takes it, and that runs when no reference is left.
            None => unreachable!("an entry without an address handle has a holder"),
        }
    }

    /// What it was made from. Two references with equal attributes reach the same place: compare these, never handles.
    #[inline]
    pub fn attr(&self) -> &AhAttr {
        &self.entry.attr
    }

    /// Tells this handle from every other one this cache made, also for the same attributes. Counts up.
    #[inline]
    pub fn generation(&self) -> u64 {
        self.entry.generation
    }

    /// What events have done to it; `None` while it is as good as new. One load then, cheap enough for every send.
    #[inline]
    pub fn grade(&self) -> Option<Grade> {
        match self.entry.mark.load(Ordering::Relaxed) {
            FRESH => None,
            _ => self.entry.status.grade(),
        }
    }

    /// True if it may be outdated: a new get makes another one.
    #[inline]
    pub fn is_stale(&self) -> bool {
        self.grade().is_some()
    }

    /// True if it must not be posted again: such a send can put the queue pair into the ERROR state.
    #[inline]
    pub fn is_poisoned(&self) -> bool {
        self.grade() == Some(Grade::Poisoned)
    }

    /// True if both refer to the same handle, not merely to equal ones.
    pub fn is_same(&self, other: &AhRef<D>) -> bool {
        Arc::ptr_eq(&self.entry, &other.entry)
    }
}

impl<D: Device> Clone for AhRef<D> {
    #[inline]
    fn clone(&self) -> Self {
        AhRef { entry: Arc::clone(&self.entry) }
    }
}

impl<D: Device> Drop for AhRef<D> {
    #[inline]
    fn drop(&mut self) {
        let stamp = self.entry.shared.put_stamp(&self.entry);
        self.entry.stamp.store(stamp, Ordering::Relaxed);
    }
}

impl<D: Device> fmt::Debug for AhRef<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AhRef({}, generation {}", self.entry.attr, self.entry.generation)?;
        match self.grade() {
            None => write!(f, ")"),
            Some(Grade::Stale) => write!(f, ", stale)"),
            Some(Grade::Poisoned) => write!(f, ", poisoned)"),
        }
    }
}
