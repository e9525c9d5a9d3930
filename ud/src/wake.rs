//! Waking a user who sleeps on the interface's event fd.
//!
//! The fd is readable when the queue pair's is, and when somebody else has done the work that the user sleeps for: the
//! progress thread takes messages and failures off the device, helper threads finish address handles. No wake-up is lost:
//! arming sets the flag first and looks for work after it; who leaves work looks at the flag after it.

use std::os::fd::RawFd;

use uct::sync::{AtomicBool, Ordering, fence};

#[derive(Default)]
pub(crate) struct UserWake {
    bell: Bell,
    armed: AtomicBool,
}

impl UserWake {
    /// The fd to sleep on. `None` without a queue pair fd, or out of file descriptors.
    pub(crate) fn fd(&self, qp: Option<RawFd>) -> Option<RawFd> {
        self.bell.fd(qp)
    }

    /// The user is about to sleep, unless there is work: look for it after this call.
    pub(crate) fn arm(&self) {
        self.bell.drain();
        self.armed.store(true, Ordering::Relaxed);
        // Between the flag and the look for work; the other one is in `wake`.
        fence(Ordering::SeqCst);
    }

    /// There is work for the user, which was left before this call. A fence and a load if nobody sleeps.
    pub(crate) fn wake(&self) {
        fence(Ordering::SeqCst);
        if self.armed.load(Ordering::Relaxed) && self.armed.swap(false, Ordering::Relaxed) {
            self.bell.ring();
        }
    }

    /// The queue pair's own fd is readable.
    #[cfg(all(test, uct_loom))]
    pub(crate) fn device_rings(&self) {
        self.bell.ring();
    }

    /// Sleeps, as a user does who polls the fd.
    #[cfg(all(test, uct_loom))]
    pub(crate) fn sleep(&self) {
        self.bell.wait();
    }
}

#[cfg(not(uct_loom))]
mod bell {
    use std::{
        os::fd::{AsRawFd, RawFd},
        sync::OnceLock,
    };

    use ib::soft::epoll::Epoll;
    use uct::EventFd;

    /// Made when first asked for: most programs only poll.
    #[derive(Default)]
    pub(super) struct Bell(OnceLock<(EventFd, Epoll)>);

    impl Bell {
        pub(super) fn fd(&self, qp: Option<RawFd>) -> Option<RawFd> {
            if let Some((_, set)) = self.0.get() {
                return Some(set.as_raw_fd());
            }
            let event = EventFd::new().ok()?;
            let set = Epoll::of(&[qp?, event.fd()]).ok()?;
            Some(self.0.get_or_init(|| (event, set)).1.as_raw_fd())
        }

        pub(super) fn drain(&self) {
            if let Some((event, _)) = self.0.get() {
                event.drain();
            }
        }

        pub(super) fn ring(&self) {
            if let Some((event, _)) = self.0.get() {
                event.signal();
            }
        }
    }
}

/// What loom can wait for in place of a file.
#[cfg(uct_loom)]
mod bell {
    use std::os::fd::RawFd;

    use uct::sync::{Condvar, Mutex};

    pub(super) struct Bell(Mutex<bool>, Condvar);

    impl Default for Bell {
        fn default() -> Self {
            Bell(Mutex::new(false), Condvar::new())
        }
    }

    impl Bell {
        pub(super) fn fd(&self, _: Option<RawFd>) -> Option<RawFd> {
            None
        }

        pub(super) fn drain(&self) {
            *self.0.lock() = false;
        }

        pub(super) fn ring(&self) {
            *self.0.lock() = true;
            self.1.notify_all();
        }

        #[cfg(test)]
        pub(super) fn wait(&self) {
            let mut rung = Some(self.0.lock());
            while rung.as_ref().is_some_and(|r| !**r) {
                self.1.wait(&mut rung);
            }
        }
    }
}

use bell::Bell;
