//! [`Table`]: the shared entries by key, and those of them that were seen idle by age. All of it under the state lock.
//!
//! Holders let go without the lock, so the table is not told when an entry becomes idle: it looks ([`Table::sweep`]). What
//! it saw idle stays idle until a `get`, which happens under the same lock and takes the entry off the list again. So
//! everything on the list is idle, with a stamp that is final, and the list is exactly ordered by last use; an idle entry
//! that is not on the list yet is found by the next sweep.

use std::{collections::BTreeMap, hash::BuildHasher, hash::RandomState, time::Duration};

use hashbrown::HashTable;

use super::entry::{Entry, LISTED};
use crate::{
    device::{AhAttr, Device},
    sync::{Arc, Ordering},
};

/// Hashes keys: three multiplications over the attributes as 64-bit words.
#[derive(Copy, Clone)]
pub(super) struct KeyHasher([u64; 2]);

impl KeyHasher {
    /// With secrets, because peers choose addresses and could choose them to collide.
    pub(super) fn random() -> Self {
        let r = RandomState::new();
        KeyHasher([r.hash_one(1u8), r.hash_one(2u8)])
    }

    /// The same in each run, for simulation.
    pub(super) const fn fixed() -> Self {
        KeyHasher([0x9e37_79b9_7f4a_7c15, 0xc2b2_ae3d_27d4_eb4f])
    }

    #[inline]
    pub(super) fn hash(&self, attr: &AhAttr) -> u64 {
        fn fold(a: u64, b: u64) -> u64 {
            let p = u128::from(a) * u128::from(b);
            (p >> 64) as u64 ^ p as u64
        }
        fn halves(b: &[u8; 16]) -> (u64, u64) {
            let n = u128::from_ne_bytes(*b);
            (n as u64, (n >> 64) as u64)
        }
        let [k0, k1] = self.0;
        let local = u64::from(attr.port)
            | u64::from(attr.sl) << 8
            | u64::from(attr.src_path_bits) << 16
            | u64::from(attr.static_rate) << 24
            | u64::from(attr.dlid.0) << 32
            | u64::from(attr.soft.udp_port) << 48;
        let h = fold(local ^ k0, attr.soft.host_id ^ k1);
        match &attr.grh {
            None => h,
            Some(g) => {
                let route =
                    1 << 63 | u64::from(g.hop_limit) << 40 | u64::from(g.traffic_class) << 32 | u64::from(g.flow_label);
                let (d0, d1) = halves(&g.dgid.0);
                let (s0, s1) = halves(&g.sgid.0);
                h ^ fold(d0 ^ k1, d1 ^ k0) ^ fold(s0 ^ route ^ k0, s1 ^ k1).rotate_left(17)
            }
        }
    }
}

pub(super) struct Table<D: Device> {
    map: HashTable<Arc<Entry<D>>>,
    /// Entries seen idle: (stamp, generation) to hash.
    idle: BTreeMap<(u64, u64), u64>,
    /// The bucket where the next sweep goes on.
    cursor: usize,
}

impl<D: Device> Table<D> {
    pub(super) fn new() -> Self {
        Table { map: HashTable::new(), idle: BTreeMap::new(), cursor: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.map.len()
    }

    /// How many entries were seen idle and have not been got since.
    pub(super) fn idle_len(&self) -> usize {
        self.idle.len()
    }

    /// How many buckets a full sweep looks at.
    pub(super) fn bucket_count(&self) -> usize {
        self.map.num_buckets()
    }

    /// The entry of `attr`. Not inlined: the caller would load the whole key before it takes the lock, into more registers
    /// than there are, and each spilled word is a store that the lock has to wait for.
    #[inline(never)]
    pub(super) fn find(&self, hash: u64, attr: &AhAttr) -> Option<&Arc<Entry<D>>> {
        self.map.find(hash, |e| e.attr == *attr)
    }

    /// A reference to the entry of `attr`, now marked as used under the tag `user`. `is_over` decides about an idle entry by
    /// its stamp: `Err` is one that nobody may get any more, still in the table.
    #[inline]
    pub(super) fn get(
        &mut self,
        hash: u64,
        attr: &AhAttr,
        user: u32,
        is_over: Option<impl FnOnce(u64) -> bool>,
    ) -> Option<Result<Arc<Entry<D>>, u64>> {
        let e = self.find(hash, attr)?;
        if let Some(is_over) = is_over
            && Entry::is_idle(e)
            && is_over(e.stamp())
        {
            return Some(Err(e.generation));
        }
        let entry = Arc::clone(e);
        let users = entry.users.load(Ordering::Relaxed);
        if users & (user | LISTED) != user {
            self.mark_used(&entry, user);
        }
        Some(Ok(entry))
    }

    #[cold]
    fn mark_used(&mut self, e: &Entry<D>, user: u32) {
        let users = e.users.load(Ordering::Relaxed);
        e.users.store((users | user) & !LISTED, Ordering::Relaxed);
        if users & LISTED != 0 {
            self.idle.remove(&(e.stamp(), e.generation));
        }
    }

    /// Adds an entry whose key is not in the table.
    pub(super) fn insert(&mut self, entry: Arc<Entry<D>>) {
        self.map.insert_unique(entry.hash, entry, |e| e.hash);
    }

    /// Takes an entry out. Drop it after unlocking.
    #[must_use]
    pub(super) fn remove(&mut self, hash: u64, generation: u64) -> Option<Arc<Entry<D>>> {
        let (entry, _) = self.map.find_entry(hash, |e| e.generation == generation).ok()?.remove();
        let users = entry.users.load(Ordering::Relaxed);
        if users & LISTED != 0 {
            entry.users.store(users & !LISTED, Ordering::Relaxed);
            self.idle.remove(&(entry.stamp(), generation));
        }
        Some(entry)
    }

    /// Takes out everything. Drop it after unlocking.
    #[must_use]
    pub(super) fn take_all(&mut self) -> Vec<Arc<Entry<D>>> {
        self.idle.clear();
        let mut all: Vec<_> = self.map.drain().collect();
        all.sort_unstable_by_key(|e| e.generation);
        all
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Arc<Entry<D>>> {
        self.map.iter()
    }

    /// Looks at the next `buckets` buckets and lists the entries that have become idle.
    pub(super) fn sweep(&mut self, buckets: usize) {
        let total = self.map.num_buckets();
        for _ in 0..buckets.min(total) {
            if self.cursor >= total {
                self.cursor = 0;
            }
            let bucket = self.cursor;
            self.cursor += 1;
            let Some(e) = self.map.get_bucket(bucket) else { continue };
            let users = e.users.load(Ordering::Relaxed);
            if users & LISTED == 0 && Entry::is_idle(e) {
                e.users.store(users | LISTED, Ordering::Relaxed);
                self.idle.insert((e.stamp(), e.generation), e.hash);
            }
        }
    }

    /// The stamp of the listed entry that has been idle for longest.
    pub(super) fn oldest_stamp(&self) -> Option<u64> {
        self.idle.first_key_value().map(|((stamp, _), _)| *stamp)
    }

    /// Takes out the listed entry that has been idle for longest. Drop it after unlocking.
    #[must_use]
    pub(super) fn pop_oldest(&mut self) -> Option<Arc<Entry<D>>> {
        let (&(_, generation), &hash) = self.idle.first_key_value()?;
        self.remove(hash, generation)
    }
}

/// True if an entry that is idle since `stamp` has outlived `ttl` at `now`, all in nanoseconds.
pub(super) fn is_past_ttl(stamp: u64, now: u64, ttl: Duration) -> bool {
    u128::from(now.saturating_sub(stamp)) >= ttl.as_nanos()
}
