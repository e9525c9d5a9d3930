//! What a fork does to us, and how a child is kept from harming its parent.
//!
//! A child inherits every object of this library, and none of them can work there: the device, its queues and the progress
//! thread are the parent's. So objects that are opened remember the process that opened them ([`Birth`]). In a child
//!
//! - calls on the handles [`Ep`](crate::Ep), [`Iface`](crate::Iface), [`Md`](crate::Md) and [`Worker`](crate::Worker) answer
//!   [`UsedAfterFork`](crate::ErrorKind::UsedAfterFork), or nothing where there is no error to answer;
//! - dropping them leaves everything as it is: the device would otherwise be told to destroy what the parent uses, and a lock
//!   that a thread of the parent held at that moment is never let go;
//! - what the child opens itself works.
//!
//! Starting another program (exec, `posix_spawn`, `std::process::Command`) needs none of this. The parent goes on unharmed
//! if registered memory survives a fork, which is what `UCX_IB_FORK_INIT` is for.
//!
//! The test is a load and a comparison: a page that the kernel wipes in a child of any kind (`MADV_WIPEONFORK`), or where it
//! cannot, a variable that a `pthread_atfork` handler clears.
#![allow(unsafe_code)]

mod gone;

use std::{
    ptr,
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

pub(crate) use gone::{gone_endpoint, gone_interface, gone_md};

use crate::{Error, ErrorKind};

/// In which process something was made. Copying it into everything costs 16 bytes, asking it two loads.
#[derive(Copy, Clone, Debug)]
pub struct Birth {
    page: &'static AtomicU32,
    process: u32,
}

impl Birth {
    /// Now and here.
    pub fn here() -> Birth {
        static PAGE: OnceLock<&'static AtomicU32> = OnceLock::new();
        // The last number given away; a child inherits it.
        static LAST: AtomicU32 = AtomicU32::new(0);
        let page = *PAGE.get_or_init(make_page);
        let mut process = page.load(Ordering::Relaxed);
        if process == 0 {
            // The first in this process. 0 is what a child finds.
            let new = LAST.fetch_add(1, Ordering::Relaxed).wrapping_add(1).max(1);
            process = match page.compare_exchange(0, new, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => new,
                Err(other) => other,
            };
        }
        Birth { page, process }
    }

    /// False in a process that was forked since.
    #[inline]
    pub fn is_here(self) -> bool {
        self.page.load(Ordering::Relaxed) == self.process
    }

    /// # Errors
    /// `UsedAfterFork` in a process that was forked since.
    #[inline]
    pub fn check(self) -> Result<(), Error> {
        if self.is_here() { Ok(()) } else { Err(used_after_fork()) }
    }
}

/// What calls in a child answer.
#[cold]
pub fn used_after_fork() -> Error {
    Error::new(
        ErrorKind::UsedAfterFork,
        "this process was forked from the one that opened it, and there it stays; open the device anew in this process, or fork \
         before opening (a child that only starts another program need not care)",
    )
}

/// A number that is not 0 only in the process that wrote it.
fn make_page() -> &'static AtomicU32 {
    wiped_page().unwrap_or_else(|| {
        static CLEARED: AtomicU32 = AtomicU32::new(0);
        extern "C" fn in_child() {
            CLEARED.store(0, Ordering::Relaxed);
        }
        // SAFETY: a function that does nothing but store a number, which is allowed after a fork.
        let rc = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        if rc != 0 {
            tracing::warn!("a fork will not be noticed: no page is wiped and no handler is called (errno {rc})");
        }
        &CLEARED
    })
}

/// A page of its own that reads zero in a child.
fn wiped_page() -> Option<&'static AtomicU32> {
    // The smallest page there is; the kernel rounds up.
    const LEN: usize = 4096;
    let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping wherever the kernel likes.
    let page = unsafe { libc::mmap(ptr::null_mut(), LEN, prot, flags, -1, 0) };
    if page == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the mapping made above.
    let rc = unsafe { libc::madvise(page, LEN, libc::MADV_WIPEONFORK) };
    if rc != 0 {
        // SAFETY: the mapping made above, which nobody else knows.
        unsafe { libc::munmap(page, LEN) };
        return None;
    }
    // SAFETY: aligned, zero, never unmapped, and used as nothing else.
    Some(unsafe { &*page.cast::<AtomicU32>() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_is_one_birth() {
        let (a, b) = (Birth::here(), Birth::here());
        assert!(a.is_here() && b.is_here() && a.check().is_ok());
        assert_eq!(a.process, b.process);
        let elsewhere = Birth { process: a.process + 1, ..a };
        let e = elsewhere.check().unwrap_err();
        assert_eq!(e.kind(), ErrorKind::UsedAfterFork);
        assert!(e.to_string().contains("used after fork") && e.to_string().contains("open the device anew"), "{e}");
    }

    /// Both ways to notice. The child of a process with threads may not do much: it answers by its status.
    #[test]
    fn a_child_notices() {
        let before = Birth::here();
        let page = wiped_page().expect("a kernel of the last years");
        page.store(7, Ordering::Relaxed);
        // SAFETY: the child loads, compares and ends.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let ok = !before.is_here() && page.load(Ordering::Relaxed) == 0 && Birth::here().is_here();
            // SAFETY: ends the child without anything of the parent's.
            unsafe { libc::_exit(if ok { 0 } else { 1 }) };
        }
        let mut status = -1;
        // SAFETY: `status` outlives the call.
        unsafe { libc::waitpid(pid, &raw mut status, 0) };
        assert_eq!(status, 0);
        assert!(before.is_here() && page.load(Ordering::Relaxed) == 7);
    }
}
