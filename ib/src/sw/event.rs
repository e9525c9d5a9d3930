//! Waking who sleeps: the arm-once logic of a completion queue pair, [`Notifier`].
//!
//! No wake-up is lost: [`Notifier::arm`] sets the flag first and the caller looks at the queues, under their locks,
//! after it; who completes pushes under the same lock first and looks at the flag after it. One of the two sees the other.

use std::{
    os::fd::RawFd,
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

use uct::EventFd;

use crate::device::{ArmFor, VerbsError, VerbsResult};

/// The arm state of one queue pair. The eventfd is opened at first use: most queue pairs are only ever polled.
#[derive(Debug, Default)]
pub struct Notifier {
    fd: OnceLock<EventFd>,
    armed: AtomicU32,
}

impl Notifier {
    /// The fd, opened if need be. `None` if the process is out of file descriptors.
    pub fn fd(&self) -> Option<RawFd> {
        self.event_fd().ok().map(EventFd::fd)
    }

    fn event_fd(&self) -> VerbsResult<&EventFd> {
        if let Some(fd) = self.fd.get() {
            return Ok(fd);
        }
        let new = EventFd::new()
            .map_err(|e| VerbsError::new("create_comp_channel", e.raw_os_error().unwrap_or(libc::EIO)))?;
        Ok(self.fd.get_or_init(|| new))
    }

    /// Drains the fd and arms it for one completion of the kinds in `what`. The caller then looks at its queues, under
    /// their locks, and calls [`Notifier::disarm`] if one has a completion.
    ///
    /// # Errors
    /// The errno of `eventfd` at first use.
    pub fn arm(&self, what: ArmFor) -> VerbsResult<()> {
        self.event_fd()?.drain();
        self.armed.store(what.bits(), Ordering::SeqCst);
        Ok(())
    }

    /// Takes [`Notifier::arm`] back.
    pub fn disarm(&self) {
        self.armed.store(0, Ordering::SeqCst);
    }

    /// Signals the fd if it is armed for one of `what`. Call it after the completion was pushed. One load if not armed.
    pub fn notify(&self, what: ArmFor) {
        if self.armed.load(Ordering::SeqCst) & what.bits() == 0 {
            return;
        }
        // Two completions may race here: only the one that takes the flag signals.
        if self.armed.swap(0, Ordering::SeqCst) != 0
            && let Some(fd) = self.fd.get()
        {
            fd.signal();
        }
    }
}

/// True if the fd is readable now.
#[cfg(test)]
pub(crate) fn is_readable(fd: RawFd) -> bool {
    wait_readable(fd, 0)
}

/// True as soon as the fd is readable, false if it is not within the time.
#[cfg(test)]
#[allow(unsafe_code)]
pub(crate) fn wait_readable(fd: RawFd, timeout_ms: i32) -> bool {
    let mut p = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one valid pollfd.
    unsafe { libc::poll(&mut p, 1, timeout_ms) == 1 }
}
