//! One fd that is readable while any of several is: an epoll instance, meant for other people's `poll` and `epoll`.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use super::socket::{SysError, last_errno};

/// See the module.
#[derive(Debug)]
pub struct Epoll(OwnedFd);

impl Epoll {
    /// An instance that watches the given fds for input, level-triggered.
    ///
    /// # Errors
    /// Those of `epoll_create1` and `epoll_ctl`.
    pub fn of(fds: &[RawFd]) -> Result<Epoll, SysError> {
        // SAFETY: no pointers.
        let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if fd < 0 {
            return Err(SysError { call: "epoll_create1", errno: last_errno() });
        }
        // SAFETY: a new fd that nobody else owns.
        let epoll = Epoll(unsafe { OwnedFd::from_raw_fd(fd) });
        for &watched in fds {
            let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: watched as u64 };
            // SAFETY: `event` lives until the call returns.
            let rc = unsafe { libc::epoll_ctl(epoll.0.as_raw_fd(), libc::EPOLL_CTL_ADD, watched, &raw mut event) };
            if rc < 0 {
                return Err(SysError { call: "epoll_ctl", errno: last_errno() });
            }
        }
        Ok(epoll)
    }
}

impl AsRawFd for Epoll {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
