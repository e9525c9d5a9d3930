//! Locks, reference counts and atomics under one name, so that the same code runs on the real ones and, with
//! `--cfg uct_loom`, on loom's, which try every interleaving. The address-handle cache uses nothing else.
//!
//! The signatures are parking_lot's: `lock` returns the guard itself.

#[cfg(not(uct_loom))]
mod imp {
    pub(crate) use std::sync::{
        Arc,
        atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence},
    };

    pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard};
}

#[cfg(uct_loom)]
mod imp {
    use std::sync::PoisonError;

    pub(crate) use loom::sync::{
        Arc, MutexGuard,
        atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence},
    };

    /// loom's mutex with parking_lot's signature.
    #[derive(Debug)]
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Mutex(loom::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }
    }

    /// loom's condition variable. It has no waits with a time-out: threads that need those are not modelled.
    #[derive(Debug)]
    pub(crate) struct Condvar(loom::sync::Condvar);

    impl Condvar {
        pub(crate) fn new() -> Self {
            Condvar(loom::sync::Condvar::new())
        }

        /// Waits once, like parking_lot's `wait`; a loop around it checks the condition.
        pub(crate) fn wait<T>(&self, guard: &mut Option<MutexGuard<'_, T>>) {
            if let Some(g) = guard.take() {
                *guard = Some(self.0.wait(g).unwrap_or_else(PoisonError::into_inner));
            }
        }

        pub(crate) fn notify_one(&self) {
            self.0.notify_one();
        }

        pub(crate) fn notify_all(&self) {
            self.0.notify_all();
        }
    }
}

pub(crate) use imp::*;
