//! [`Removal`]: notices that the kernel takes a device away.
//!
//! Drivers that can part from their users tell them by a fatal event. Others cannot, soft-RoCE among them: the device's file
//! and its place in the lists go, its users see nothing, and whoever removes it waits until the last of them has closed it.
//! The kernel announces to everybody who listens that the device's file goes, and that is what is listened for here.
#![allow(unsafe_code)]

use std::{
    ffi::c_void,
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    path::{Path, PathBuf},
};

use super::ffi::last_errno;

/// Where the kernel shows the files of RDMA devices.
const SYSFS: &str = "/sys/class/infiniband_verbs";
/// Announcements looked at in one go.
const LOOK_MAX: usize = 64;
/// The beginning of an announcement is all that counts.
const TEXT_MAX: usize = 512;

/// Listens for the end of one device file.
pub(super) struct Removal {
    socket: OwnedFd,
    /// `/uverbs0`.
    suffix: String,
    sysfs: PathBuf,
}

impl Removal {
    /// Listens for the end of `file`, for example `uverbs0`. `None` where that cannot be done: then only the device's own
    /// events tell.
    pub(super) fn watch(file: &str) -> Option<Removal> {
        let sysfs = Path::new(SYSFS).join(file);
        if file.is_empty() || !sysfs.exists() {
            return None;
        }
        match listen() {
            Ok(socket) => Some(Removal { socket, suffix: format!("/{file}"), sysfs }),
            Err(e) => {
                tracing::debug!("the removal of {file} will not be noticed early: {e}");
                None
            }
        }
    }

    /// True once the file is gone. Never blocks; mostly one system call.
    pub(super) fn has_happened(&self) -> bool {
        let mut text = [0u8; TEXT_MAX];
        for _ in 0..LOOK_MAX {
            let concerns_us = match self.receive(&mut text) {
                Ok(n) => is_removal(&text[..n], &self.suffix),
                // Some were lost: it may have been among them.
                Err(libc::ENOBUFS) => true,
                Err(_) => return false,
            };
            // A file of the same name may be another device's by now; then this one is gone as well, but that is rare enough to
            // be left to the device's own answers.
            if concerns_us && !self.sysfs.exists() {
                return true;
            }
        }
        false
    }

    fn receive(&self, text: &mut [u8]) -> Result<usize, i32> {
        let (ptr, len) = (text.as_mut_ptr().cast::<c_void>(), text.len());
        // SAFETY: `len` bytes to fill.
        let n = unsafe { libc::recv(self.socket.as_raw_fd(), ptr, len, libc::MSG_DONTWAIT) };
        usize::try_from(n).map_err(|_| last_errno())
    }
}

/// A socket on which the kernel announces what devices come and go.
fn listen() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no pointers.
    let fd = unsafe { libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_KOBJECT_UEVENT) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just made, and nobody else's.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: integers.
    let mut addr: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
    addr.nl_family = libc::AF_NETLINK as u16;
    // The group of the kernel's own announcements.
    addr.nl_groups = 1;
    // SAFETY: an address of this length.
    let rc = unsafe { libc::bind(fd, (&raw const addr).cast(), size_of::<libc::sockaddr_nl>() as u32) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(socket) }
}

/// True for `remove@/devices/.../uverbs0`, which is the first string of an announcement.
fn is_removal(text: &[u8], suffix: &str) -> bool {
    let first = text.split(|b| *b == 0).next().unwrap_or_default();
    first.starts_with(b"remove@") && first.ends_with(suffix.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_end_of_this_file_counts() {
        let rest = "\0ACTION=remove\0SUBSYSTEM=infiniband_verbs\0";
        for (text, ours) in [
            ("remove@/devices/virtual/infiniband_verbs/uverbs1", true),
            ("remove@/devices/pci0000:00/0000:00:03.0/infiniband_verbs/uverbs1", true),
            ("remove@/devices/virtual/infiniband_verbs/uverbs11", false),
            ("remove@/devices/virtual/infiniband_verbs/xuverbs1", false),
            ("add@/devices/virtual/infiniband_verbs/uverbs1", false),
            ("remove@/devices/virtual/net/v0", false),
            ("", false),
        ] {
            assert_eq!(is_removal(format!("{text}{rest}").as_bytes(), "/uverbs1"), ours, "{text}");
        }
        assert!(!is_removal(b"", "/uverbs1"));
    }

    #[test]
    fn what_is_not_there_is_not_watched() {
        assert!(Removal::watch("").is_none());
        assert!(Removal::watch("no-such-file").is_none());
    }

    /// Announcements of this machine, if there are any, neither block nor concern a file that is there.
    #[test]
    fn looking_never_blocks() {
        let Ok(socket) = listen() else {
            println!("looking_never_blocks: skipped: no announcements here");
            return;
        };
        let there = Removal { socket, suffix: "/zero".into(), sysfs: "/dev/zero".into() };
        for _ in 0..10 {
            assert!(!there.has_happened());
        }
    }
}
