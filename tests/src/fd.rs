//! Looking at an event fd without sleeping.
#![allow(unsafe_code)]

use std::os::fd::RawFd;

/// True if `fd` is readable now.
pub fn is_readable(fd: RawFd) -> bool {
    let mut p = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one valid pollfd, and a timeout of 0.
    unsafe { libc::poll(&raw mut p, 1, 0) == 1 }
}
