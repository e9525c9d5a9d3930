//! Waking a user who sleeps on the interface's event fd.
//!
//! The fd is readable when the queue pair's is, and when somebody else has done the work that the user sleeps for: the
//! progress thread takes messages and failures off the device, helper threads finish address handles. No wake-up is lost:
//! arming sets the flag first and looks for work after it; who leaves work looks at the flag after it.

use std::{
    os::fd::{AsRawFd, RawFd},
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

use ib::soft::epoll::Epoll;
use uct::EventFd;

#[derive(Default)]
pub(crate) struct UserWake {
    /// Made when first asked for: most programs only poll.
    fds: OnceLock<(EventFd, Epoll)>,
    armed: AtomicBool,
}

impl UserWake {
    /// The fd to sleep on. `None` without a queue pair fd, or out of file descriptors.
    pub(crate) fn fd(&self, qp: Option<RawFd>) -> Option<RawFd> {
        if let Some((_, set)) = self.fds.get() {
            return Some(set.as_raw_fd());
        }
        let event = EventFd::new().ok()?;
        let set = Epoll::of(&[qp?, event.fd()]).ok()?;
        Some(self.fds.get_or_init(|| (event, set)).1.as_raw_fd())
    }

    /// The user is about to sleep, unless there is work: look for it after this call.
    pub(crate) fn arm(&self) {
        if let Some((event, _)) = self.fds.get() {
            event.drain();
        }
        self.armed.store(true, Ordering::SeqCst);
    }

    /// There is work for the user. One load if nobody sleeps.
    pub(crate) fn wake(&self) {
        if self.armed.load(Ordering::SeqCst)
            && self.armed.swap(false, Ordering::SeqCst)
            && let Some((event, _)) = self.fds.get()
        {
            event.signal();
        }
    }
}
