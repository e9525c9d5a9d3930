//! Queue pair numbers and the way from a number to its queue pair.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use hashbrown::HashMap;
use parking_lot::RwLock;

use super::rng::Rng;
use crate::{
    device::{VerbsError, VerbsResult},
    types::Qpn,
};

struct Inner<T> {
    by_qpn: HashMap<u32, Arc<T>>,
    next: u32,
}

/// The queue pairs of one device by number.
///
/// Numbers count up from a random start, so that a number of old is not met again soon, neither in this process nor in
/// the one that takes over its address. 0, 1 (reserved) and 0xffffff (multicast) are never handed out.
pub struct QpTable<T> {
    inner: RwLock<Inner<T>>,
    generation: AtomicU64,
    max: usize,
}

const FIRST: u32 = 2;
const LAST: u32 = Qpn::MAX - 1;

impl<T> QpTable<T> {
    /// A table of at most `max` queue pairs whose first number is derived from `seed`.
    pub fn new(seed: u64, max: usize) -> Self {
        let next = FIRST + Rng::new(seed).below(u64::from(LAST - FIRST)) as u32;
        let inner = RwLock::new(Inner { by_qpn: HashMap::new(), next });
        // The numbers must not run out before `max` is reached.
        QpTable { inner, generation: AtomicU64::new(1), max: max.min((LAST - FIRST) as usize) }
    }

    /// The number to try next: with it a test makes a restarted process meet its old one. Numbers that cannot be handed
    /// out are passed over.
    pub fn set_next(&self, qpn: Qpn) {
        self.inner.write().next = qpn.get();
    }

    /// Adds what `make` makes of a free number.
    ///
    /// # Errors
    /// `ENOMEM` at the limit; those of `make`.
    pub fn insert(&self, make: impl FnOnce(Qpn) -> VerbsResult<Arc<T>>) -> VerbsResult<Arc<T>> {
        let mut inner = self.inner.write();
        if inner.by_qpn.len() >= self.max {
            return Err(VerbsError::new("create_qp", libc::ENOMEM));
        }
        // Ends: fewer than all numbers are taken.
        let qpn = loop {
            let n = inner.next;
            inner.next = if (FIRST..LAST).contains(&n) { n + 1 } else { FIRST };
            if (FIRST..=LAST).contains(&n) && !inner.by_qpn.contains_key(&n) {
                break Qpn::truncate(n);
            }
        };
        let qp = make(qpn)?;
        inner.by_qpn.insert(qpn.get(), qp.clone());
        // A cached "no such number" may be wrong now.
        self.generation.fetch_add(1, Ordering::Release);
        Ok(qp)
    }

    /// Takes a queue pair out. Packets for its number are dropped from now on.
    pub fn remove(&self, qpn: Qpn) -> Option<Arc<T>> {
        let gone = self.inner.write().by_qpn.remove(&qpn.get());
        self.generation.fetch_add(1, Ordering::Release);
        gone
    }

    /// The queue pair of a number. Costs a lock: keep the answer while packets for the same number arrive and
    /// [`QpTable::generation`] stands still.
    pub fn get(&self, qpn: Qpn) -> Option<Arc<T>> {
        self.inner.read().by_qpn.get(&qpn.get()).cloned()
    }

    /// Moves with every insertion and removal.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// The queue pairs, by number.
    pub fn all(&self) -> Vec<Arc<T>> {
        let inner = self.inner.read();
        let mut all: Vec<_> = inner.by_qpn.iter().collect();
        all.sort_unstable_by_key(|(n, _)| **n);
        all.into_iter().map(|(_, qp)| qp.clone()).collect()
    }

    /// Queue pairs that are alive.
    pub fn live(&self) -> usize {
        self.inner.read().by_qpn.len()
    }
}

impl<T> fmt::Debug for QpTable<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QpTable({} queue pairs)", self.live())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(t: &QpTable<Qpn>) -> u32 {
        t.insert(|q| Ok(Arc::new(q))).unwrap().get()
    }

    #[test]
    fn numbers_wrap_past_the_reserved_ones() {
        let t = QpTable::new(5, 100);
        for start in [0, 1, 0xff_ffff] {
            t.set_next(Qpn::new(start).unwrap());
            let n = take(&t);
            assert!((2..0xff_ffff).contains(&n), "{n:#x}");
        }
        t.set_next(Qpn::new(0xff_fffe).unwrap());
        assert_eq!(take(&t), 0xff_fffe);
        assert_eq!(take(&t), 5, "2, 3 and 4 are taken");
        assert_eq!(t.all().iter().map(|q| q.get()).collect::<Vec<_>>(), [2, 3, 4, 5, 0xff_fffe]);
    }

    #[test]
    fn a_freed_number_is_not_the_next_but_can_be_asked_for() {
        let t = QpTable::new(5, 2);
        let a = take(&t);
        assert!(t.remove(Qpn::truncate(a)).is_some());
        assert!(t.get(Qpn::truncate(a)).is_none());
        assert_ne!(take(&t), a);
        t.set_next(Qpn::truncate(a));
        assert_eq!(take(&t), a);
        assert_eq!(t.insert(|q| Ok(Arc::new(q))), Err(VerbsError::new("create_qp", libc::ENOMEM)));
    }
}
