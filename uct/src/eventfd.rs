//! [`EventFd`]: one thread wakes another that sleeps in `poll` or `epoll`.
//!
//! `unsafe` is here for the one system call that std has no wrapper for.
#![allow(unsafe_code)]

use std::{
    fs::File,
    io::{self, Read, Write},
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
};

/// A non-blocking eventfd, closed when dropped.
#[derive(Debug)]
pub struct EventFd(File);

impl EventFd {
    /// Opens one, unreadable.
    ///
    /// # Errors
    /// Those of `eventfd`, for example `EMFILE`: out of file descriptors.
    pub fn new() -> io::Result<EventFd> {
        // SAFETY: a call without pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel just returned this descriptor, and nobody else knows it.
        Ok(EventFd(File::from(unsafe { OwnedFd::from_raw_fd(fd) })))
    }

    /// Makes it readable. Never blocks: a full counter is readable already. One system call.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn counter(e: &EventFd) -> Option<u64> {
        let mut bytes = [0; 8];
        (&e.0).read(&mut bytes).ok().map(|_| u64::from_ne_bytes(bytes))
    }

    #[test]
    fn signals_add_up_until_drained() {
        let e = EventFd::new().unwrap();
        assert!(e.fd() >= 0 && counter(&e).is_none());
        e.signal();
        e.signal();
        assert_eq!(counter(&e), Some(2));
        e.signal();
        e.drain();
        e.drain();
        assert_eq!(counter(&e), None);
    }
}
