//! Registrations: which bytes the device may read and write.
//!
//! - **R1** An entry of the table holds the block's `Arc`, so its range stays allocated and initialised while it is there.
#![allow(unsafe_code)]

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use hashbrown::HashMap;
use parking_lot::RwLock;
use uct::mem::Block;

use super::rng::entropy;
use crate::device::{Access, MrKeys, VerbsError, VerbsResult};

struct Mr {
    start: usize,
    end: usize,
    access: Access,
    rkey: u32,
    // R1.
    _block: Arc<Block>,
}

impl Mr {
    fn covers(&self, addr: usize, len: usize) -> bool {
        addr >= self.start && addr.checked_add(len).is_some_and(|end| end <= self.end)
    }
}

struct Inner {
    by_lkey: HashMap<u32, Mr>,
    /// Counts keys that were handed out.
    serial: u32,
}

/// The registrations of one device.
///
/// Keys come from a walk through all 32-bit numbers in a scattered order that differs from process to process: none is
/// handed out twice before 2^31 registrations, so that a key of old names nothing rather than something else.
pub struct MrTable {
    inner: RwLock<Inner>,
    /// Moves when a registration goes, so that caches of ranges know.
    generation: AtomicU64,
    mask: u32,
    max: usize,
}

impl MrTable {
    /// A table of at most `max` registrations, with keys derived from `seed`.
    pub fn new(seed: u64, max: usize) -> Self {
        let inner = RwLock::new(Inner { by_lkey: HashMap::new(), serial: 0 });
        MrTable { inner, generation: AtomicU64::new(1), mask: seed as u32, max }
    }

    /// A table without a limit and with keys that differ from process to process.
    pub fn unlimited() -> Self {
        Self::new(entropy(), usize::MAX)
    }

    /// Registers a block and holds it until [`MrTable::deregister`].
    ///
    /// # Errors
    /// `ENOMEM` at the limit.
    pub fn register(&self, block: &Arc<Block>, access: Access) -> VerbsResult<MrKeys> {
        let mut inner = self.inner.write();
        if inner.by_lkey.len() >= self.max {
            return Err(VerbsError::new("reg_mr", libc::ENOMEM));
        }
        let mut next = || loop {
            inner.serial = inner.serial.wrapping_add(1);
            let key = scatter(inner.serial) ^ self.mask;
            // Zero means "no key". After a full turn some keys may still be in use.
            if key != 0 && !inner.by_lkey.contains_key(&key) {
                return key;
            }
        };
        let keys = MrKeys { lkey: next(), rkey: next() };
        let start = block.addr();
        let mr = Mr { start, end: start + block.len(), access, rkey: keys.rkey, _block: block.clone() };
        inner.by_lkey.insert(keys.lkey, mr);
        Ok(keys)
    }

    /// Forgets a registration.
    ///
    /// # Errors
    /// `EINVAL` for keys that are not those of one registration.
    pub fn deregister(&self, keys: MrKeys) -> VerbsResult<()> {
        let mut inner = self.inner.write();
        if inner.by_lkey.get(&keys.lkey).is_none_or(|mr| mr.rkey != keys.rkey) {
            return Err(VerbsError::new("dereg_mr", libc::EINVAL));
        }
        let gone = inner.by_lkey.remove(&keys.lkey);
        self.generation.fetch_add(1, Ordering::Release);
        drop(inner);
        // Freeing a large block takes long: not under the lock.
        drop(gone);
        Ok(())
    }

    /// Registrations that are alive.
    pub fn live(&self) -> usize {
        self.inner.read().by_lkey.len()
    }

    /// Copies `len` bytes at `addr` onto the end of `out`, as a device's DMA engine does: from memory, now, whatever the
    /// owner does with it. Answers false, and copies nothing, unless a registration of this key covers all of them.
    ///
    /// A device that reads late relies on what it demands of its callers: the bytes stay unchanged until the send
    /// has completed.
    pub fn read(&self, lkey: u32, addr: usize, len: usize, out: &mut Vec<u8>) -> bool {
        let inner = self.inner.read();
        let Some(mr) = inner.by_lkey.get(&lkey) else { return false };
        if !mr.covers(addr, len) {
            return false;
        }
        // `Block::addr` exposed the provenance of the whole block.
        let ptr = std::ptr::with_exposed_provenance::<u8>(addr);
        // SAFETY: R1, the lock held here keeps the entry, and so the block, in place; `covers` has checked the range. That
        // nobody writes it at the same time is the caller's part of the contract of `UdQp::post_send`.
        let bytes = unsafe { std::slice::from_raw_parts(ptr, len) };
        out.extend_from_slice(bytes);
        true
    }
}

impl std::fmt::Debug for MrTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "MrTable({} registrations)", self.live())
    }
}

/// A bijection on 32 bits whose neighbouring inputs have far outputs (the finaliser of MurmurHash3).
fn scatter(mut x: u32) -> u32 {
    x ^= x >> 16;
    x = x.wrapping_mul(0x85eb_ca6b);
    x ^= x >> 13;
    x = x.wrapping_mul(0xc2b2_ae35);
    x ^ (x >> 16)
}

#[derive(Copy, Clone)]
struct Range {
    lkey: u32,
    start: usize,
    end: usize,
    access: Access,
}

const SLOTS: usize = 4;
const NOTHING: Range = Range { lkey: 0, start: 0, end: 0, access: Access::empty() };

/// The registrations that one queue hit last. A hit costs one atomic load and a few comparisons, a miss the table's lock.
pub struct MrCache {
    slots: [Range; SLOTS],
    generation: u64,
    victim: usize,
}

impl MrCache {
    /// An empty cache.
    pub const fn new() -> Self {
        MrCache { slots: [NOTHING; SLOTS], generation: 0, victim: 0 }
    }

    /// True if a registration of `table` with this key covers `len` bytes at `addr` and allows `need`. Use one cache with
    /// one table only.
    #[inline]
    pub fn covers(&mut self, table: &MrTable, lkey: u32, addr: usize, len: usize, need: Access) -> bool {
        let generation = table.generation.load(Ordering::Acquire);
        if generation != self.generation {
            self.slots = [NOTHING; SLOTS];
            self.generation = generation;
        }
        let Some(end) = addr.checked_add(len) else { return false };
        for r in &self.slots {
            if r.lkey == lkey && lkey != 0 {
                return addr >= r.start && end <= r.end && r.access.contains(need);
            }
        }
        self.miss(table, lkey) && self.covers(table, lkey, addr, len, need)
    }

    #[cold]
    fn miss(&mut self, table: &MrTable, lkey: u32) -> bool {
        let inner = table.inner.read();
        // Under the lock no registration goes, so the entry below is as new as the generation.
        let generation = table.generation.load(Ordering::Acquire);
        if generation != self.generation {
            self.slots = [NOTHING; SLOTS];
            self.generation = generation;
        }
        let Some(mr) = inner.by_lkey.get(&lkey) else { return false };
        self.slots[self.victim] = Range { lkey, start: mr.start, end: mr.end, access: mr.access };
        self.victim = (self.victim + 1) % SLOTS;
        true
    }
}

impl Default for MrCache {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for MrCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "MrCache(generation {})", self.generation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_registered_bytes_are_covered() {
        let t = MrTable::new(1, 2);
        let block = Block::new(100, 8).unwrap();
        let a = block.addr();
        let keys = t.register(&block, Access::LOCAL_WRITE).unwrap();
        let mut c = MrCache::new();
        for (addr, len, ok) in [
            (a, 100, true),
            (a, 0, true),
            (a + 100, 0, true),
            (a + 1, 100, false),
            (a - 1, 2, false),
            (a, 101, false),
            (a + 50, usize::MAX, false),
        ] {
            assert_eq!(c.covers(&t, keys.lkey, addr, len, Access::LOCAL_WRITE), ok, "{} {len}", addr.wrapping_sub(a));
            assert_eq!(t.read(keys.lkey, addr, len, &mut Vec::new()), ok);
        }
        assert!(!c.covers(&t, keys.lkey, a, 1, Access::REMOTE_READ), "access that was not asked for");
        assert!(!c.covers(&t, keys.rkey, a, 1, Access::empty()), "an rkey is not an lkey");
        assert!(!c.covers(&t, 0, 0, 0, Access::empty()), "key 0 is no key");
    }

    #[test]
    fn deregistering_reaches_the_caches_and_keys_do_not_come_back() {
        let t = MrTable::new(9, 1);
        let block = Block::new(8, 8).unwrap();
        let k1 = t.register(&block, Access::LOCAL_WRITE).unwrap();
        assert_eq!(t.register(&block, Access::LOCAL_WRITE), Err(VerbsError::new("reg_mr", libc::ENOMEM)));
        let mut c = MrCache::new();
        assert!(c.covers(&t, k1.lkey, block.addr(), 8, Access::LOCAL_WRITE));
        assert_eq!(Arc::strong_count(&block), 2);
        assert!(t.deregister(MrKeys { rkey: k1.rkey ^ 1, ..k1 }).is_err());
        t.deregister(k1).unwrap();
        assert!(t.deregister(k1).is_err());
        assert_eq!((Arc::strong_count(&block), t.live()), (1, 0));
        assert!(!c.covers(&t, k1.lkey, block.addr(), 8, Access::LOCAL_WRITE));
        let mut seen = std::collections::HashSet::new();
        for _ in 0..1000 {
            let k = t.register(&block, Access::LOCAL_WRITE).unwrap();
            assert!(seen.insert(k.lkey) && seen.insert(k.rkey));
            t.deregister(k).unwrap();
        }
    }

    #[test]
    fn more_keys_than_slots_still_work() {
        let t = MrTable::new(3, 100);
        let blocks: Vec<_> = (0..10).map(|_| Block::new(8, 8).unwrap()).collect();
        let keys: Vec<_> = blocks.iter().map(|b| t.register(b, Access::LOCAL_WRITE).unwrap()).collect();
        let mut c = MrCache::new();
        for _ in 0..3 {
            for (b, k) in blocks.iter().zip(&keys) {
                assert!(c.covers(&t, k.lkey, b.addr(), 8, Access::LOCAL_WRITE));
            }
        }
    }
}
