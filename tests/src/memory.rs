//! How much memory the process uses, as its allocator tells.
#![allow(unsafe_code)]

/// Bytes of the heap in use, large blocks included.
#[cfg(target_env = "gnu")]
pub fn heap_in_use() -> usize {
    // SAFETY: takes no arguments and returns a plain structure.
    let m = unsafe { libc::mallinfo2() };
    m.uordblks + m.hblkhd
}

/// Where the C library does not tell.
#[cfg(not(target_env = "gnu"))]
pub fn heap_in_use() -> usize {
    0
}

/// Bytes of memory that the process occupies; 0 where the system does not tell.
pub fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"));
    line.and_then(|l| l.trim().strip_suffix(" kB")?.trim().parse::<usize>().ok()).unwrap_or(0) << 10
}
