//! Waking who sleeps: [`EventFd`] and the arm-once logic of a completion queue pair, [`Notifier`].
//!
//! No wake-up is lost: [`Notifier::arm`] sets the flag first and the caller looks at the queues, under their locks,
//! after it; who completes pushes under the same lock first and looks at the flag after it. One of the two sees the other.
#![allow(unsafe_code)]

use std::{
    fs::File,
    io::{Read, Write},
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

use crate::device::{ArmFor, VerbsError, VerbsResult};

/// A non-blocking eventfd.
#[derive(Debug)]
pub struct EventFd(File);

impl EventFd {
    /// Opens one.
    ///
    /// # Errors
    /// The errno of `eventfd`, for example `EMFILE`.
    pub fn new() -> VerbsResult<EventFd> {
        // SAFETY: a call without pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        if fd < 0 {
            let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
            return Err(VerbsError::new("create_comp_channel", errno));
        }
        // SAFETY: the kernel just returned this descriptor, and nobody else knows it.
        Ok(EventFd(File::from(unsafe { OwnedFd::from_raw_fd(fd) })))
    }

    /// Makes it readable. Never blocks: a full counter is readable already.
    pub fn signal(&self) {
        // The only failure of a non-blocking eventfd write is a counter at its maximum.
        let _ = (&self.0).write(&1u64.to_ne_bytes());
    }

    /// Makes it unreadable.
    pub fn drain(&self) {
        // EAGAIN, the only failure, says that it is so already.
        let _ = (&self.0).read(&mut [0; 8]);
    }

    /// For `poll` and `epoll`.
    pub fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

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
        let new = EventFd::new()?;
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
pub(crate) fn wait_readable(fd: RawFd, timeout_ms: i32) -> bool {
    let mut p = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one valid pollfd.
    unsafe { libc::poll(&mut p, 1, timeout_ms) == 1 }
}
