//! How much memory the process uses, as its allocator tells.
#![allow(unsafe_code)]

/// Bytes of the heap in use, large blocks included.
#[cfg(target_env = "gnu")]
pub fn heap_in_use() -> usize {
    // SAFETY: takes no arguments and returns a plain structure.
    let m = unsafe { libc::mallinfo2() };
    m.uordblks + m.hblkhd
}
