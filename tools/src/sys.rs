//! System calls without a safe wrapper. The only `unsafe` of the tools.
#![allow(unsafe_code)]

use std::io;

/// Lets the calling thread, and those that it starts later, run only on the CPUs whose bits are set: CPU `n` is bit
/// `n % 64` of word `n / 64`.
pub(crate) fn set_affinity(mask: &[u64]) -> io::Result<()> {
    // SAFETY: the mask is `size_of_val(mask)` readable bytes, in the form of the kernel: one bit per CPU, low word first.
    let r = unsafe { libc::sched_setaffinity(0, size_of_val(mask), mask.as_ptr().cast()) };
    if r == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
