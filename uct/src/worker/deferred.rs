//! [`DeferredQueue`]: closures that any thread leaves for the user's next `progress`.
//!
//! A user who sleeps is woken for them, and no wake-up is lost: who goes to sleep says so first and then looks for work; who
//! leaves work leaves it first and then looks for a sleeper.

use crate::sync::{AtomicBool, Mutex, Ordering, fence};

pub(super) type Deferred = Box<dyn FnOnce() + Send>;

#[derive(Default)]
pub(super) struct DeferredQueue {
    queue: Mutex<Vec<Deferred>>,
    any: AtomicBool,
    /// The user's thread is in a wait, or about to be.
    waiting: AtomicBool,
}

impl DeferredQueue {
    /// Appends one. True: the user sleeps, or is about to; wake it.
    #[must_use]
    pub(super) fn push(&self, f: Deferred) -> bool {
        self.queue.lock().push(f);
        self.any.store(true, Ordering::Release);
        fence(Ordering::SeqCst);
        self.waiting.load(Ordering::Relaxed)
    }

    /// Runs what is there, with no lock held. Returns how many there were. A load if there are none.
    #[inline]
    pub(super) fn run(&self) -> usize {
        if self.any.load(Ordering::Relaxed) { self.run_all() } else { 0 }
    }

    #[cold]
    fn run_all(&self) -> usize {
        if !self.any.swap(false, Ordering::Acquire) {
            return 0;
        }
        let batch = std::mem::take(&mut *self.queue.lock());
        let n = batch.len();
        let mut rest = Rest { queue: self, batch: batch.into_iter() };
        for f in rest.batch.by_ref() {
            f();
        }
        n
    }

    /// The user's thread goes to sleep, unless [`DeferredQueue::has_any`] after this call. What woke it before is taken back
    /// before this call.
    pub(super) fn sleep_begins(&self) {
        self.waiting.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    pub(super) fn sleep_ends(&self) {
        self.waiting.store(false, Ordering::Relaxed);
    }

    /// True if there is something to run.
    pub(super) fn has_any(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }
}

/// What [`DeferredQueue::run`] has not got to: if a closure panics, the others run in the next `progress`.
struct Rest<'a> {
    queue: &'a DeferredQueue,
    batch: std::vec::IntoIter<Deferred>,
}

impl Drop for Rest<'_> {
    fn drop(&mut self) {
        if self.batch.len() > 0 {
            self.queue.queue.lock().splice(0..0, self.batch.by_ref());
            self.queue.any.store(true, Ordering::Release);
        }
    }
}

#[cfg(all(test, uct_loom))]
mod loom;
