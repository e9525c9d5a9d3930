//! Locks, reference counts and atomics under one name, so that the same code runs on the real ones and, with
//! `--cfg uct_loom`, on loom's, which try every interleaving. For the crates of the workspace; not part of the API.
//!
//! The signatures are parking_lot's: `lock` returns the guard itself.
//!
//! loom takes `SeqCst` loads and stores for acquire and release, and models the fence: where two threads each store and then
//! look at what the other has stored, the fence stands between.

#[cfg(not(uct_loom))]
mod imp {
    pub use std::sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
    };

    pub use parking_lot::{Condvar, Mutex, MutexGuard};
}

#[cfg(uct_loom)]
mod imp {
    use std::sync::PoisonError;

    pub use loom::sync::{
        Arc, MutexGuard,
        atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
    };

    /// loom's mutex with parking_lot's signature.
    #[derive(Debug)]
    pub struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        /// A mutex that nobody holds.
        pub fn new(value: T) -> Self {
            Mutex(loom::sync::Mutex::new(value))
        }

        /// Waits for it.
        pub fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }

        /// `None` if somebody holds it.
        pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            self.0.try_lock().ok()
        }
    }

    impl<T: Default> Default for Mutex<T> {
        fn default() -> Self {
            Mutex::new(T::default())
        }
    }

    /// loom's condition variable. It has no waits with a time-out: threads that need those are not modelled.
    #[derive(Debug)]
    pub struct Condvar(loom::sync::Condvar);

    impl Condvar {
        /// One that nobody waits for.
        #[allow(clippy::new_without_default)]
        pub fn new() -> Self {
            Condvar(loom::sync::Condvar::new())
        }

        /// Waits once, like parking_lot's `wait`; a loop around it checks the condition.
        pub fn wait<T>(&self, guard: &mut Option<MutexGuard<'_, T>>) {
            if let Some(g) = guard.take() {
                *guard = Some(self.0.wait(g).unwrap_or_else(PoisonError::into_inner));
            }
        }

        /// Wakes one.
        pub fn notify_one(&self) {
            self.0.notify_one();
        }

        /// Wakes all.
        pub fn notify_all(&self) {
            self.0.notify_all();
        }
    }
}

pub use imp::*;
