//! Buffers: send descriptors in two sizes, receive descriptors, and the way home for those that handlers kept.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use ib::{
    device::{Access, Device},
    md::Md,
};
use parking_lot::Mutex;
use uct::{
    Result,
    am::DescPool,
    mem::{ArenaLayout, Buf, Registration},
};

/// Bytes of a small send buffer: enough for every control packet, and for short messages.
pub(crate) const SMALL_LEN: usize = 256;

/// A growing set of equal, registered buffers.
pub(crate) struct Pool {
    free: Vec<Buf>,
    layout: ArenaLayout,
    access: Access,
    grow: usize,
    max: usize,
    total: usize,
    /// Deregistered when the pool goes, after the queue pair.
    registrations: Vec<Box<dyn Registration>>,
}

impl Pool {
    /// A pool that makes its buffers when they are first needed, `grow` at a time and `max` at most.
    pub(crate) fn new(layout: ArenaLayout, access: Access, grow: usize, max: usize) -> Self {
        Pool { free: Vec::new(), layout, access, grow, max, total: 0, registrations: Vec::new() }
    }

    /// Takes a buffer, growing if there is none and the limit allows it. `None`: at the limit.
    #[inline]
    pub(crate) fn take<D: Device>(&mut self, md: &Md<D>) -> Result<Option<Buf>> {
        match self.free.pop() {
            Some(buf) => Ok(Some(buf)),
            None => self.take_new(md),
        }
    }

    #[cold]
    fn take_new<D: Device>(&mut self, md: &Md<D>) -> Result<Option<Buf>> {
        self.grow_by(md, self.grow)?;
        Ok(self.free.pop())
    }

    /// Adds up to `count` buffers, as far as the limit allows.
    pub(crate) fn grow_by<D: Device>(&mut self, md: &Md<D>, count: usize) -> Result<()> {
        let count = count.min(self.max - self.total);
        if count > 0 {
            let (bufs, registration) = md.register_arena(ArenaLayout { count, ..self.layout }, self.access)?;
            self.total += count;
            self.registrations.push(registration);
            self.free.extend(bufs);
        }
        Ok(())
    }

    pub(crate) fn put(&mut self, buf: Buf) {
        self.free.push(buf);
    }

    /// The free buffers, for batches.
    pub(crate) fn free_mut(&mut self) -> &mut Vec<Buf> {
        &mut self.free
    }

    pub(crate) fn total(&self) -> usize {
        self.total
    }

    pub(crate) fn free_count(&self) -> usize {
        self.free.len()
    }
}

/// Where kept receive descriptors come home to, from any thread.
#[derive(Default)]
pub(crate) struct Returns {
    bufs: Mutex<Vec<Buf>>,
    any: AtomicBool,
    closed: AtomicBool,
}

impl Returns {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    /// Moves what came home into `free`.
    #[inline]
    pub(crate) fn drain_into(&self, free: &mut Vec<Buf>) {
        if self.any.load(Ordering::Acquire) {
            self.drain_all(free);
        }
    }

    #[cold]
    fn drain_all(&self, free: &mut Vec<Buf>) {
        let mut bufs = self.bufs.lock();
        self.any.store(false, Ordering::Relaxed);
        free.append(&mut bufs);
    }

    /// From now on buffers are freed instead of kept.
    pub(crate) fn close(&self) {
        let bufs = {
            let mut bufs = self.bufs.lock();
            self.closed.store(true, Ordering::Relaxed);
            std::mem::take(&mut *bufs)
        };
        drop(bufs);
    }
}

impl DescPool for Returns {
    fn give_back(&self, buf: Buf) {
        let mut bufs = self.bufs.lock();
        if !self.closed.load(Ordering::Relaxed) {
            bufs.push(buf);
            self.any.store(true, Ordering::Release);
        }
    }
}
