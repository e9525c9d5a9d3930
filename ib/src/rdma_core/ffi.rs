//! What the bindings lack or get wrong, and the errno conventions of verbs.
//!
//! `rdma-sys` never finds the extended functions of a device on 64-bit systems (it compares a pointer with `u32::MAX`), so
//! [`extended`] does; and newer functions of the library are looked up at run time, so that older libraries load.
#![allow(unsafe_code)]

use std::{
    ffi::{CStr, CString, c_void},
    io,
    mem::{offset_of, size_of, transmute},
    os::fd::RawFd,
    ptr::NonNull,
    sync::OnceLock,
    time::Duration,
};

use rdma_sys::{
    ibv_ah_attr, ibv_context, ibv_device_attr, ibv_gid, ibv_gid_entry, ibv_port_attr, ibv_qp, ibv_qp_attr,
    ibv_qp_init_attr, ibv_qp_init_attr_ex, ibv_send_wr, ibv_wc, verbs_context,
};

use crate::device::{VerbsError, VerbsResult};

/// C structures of which all bytes zero is a value.
///
/// # Safety
/// That is so.
pub(super) unsafe trait Zero: Sized {
    /// All bytes zero.
    fn zero() -> Self {
        // SAFETY: the trait's contract.
        unsafe { std::mem::zeroed() }
    }
}

macro_rules! zero {
    ($($t:ty),*) => {$(
        // SAFETY: integers, unions of integers, raw pointers and optional function pointers.
        unsafe impl Zero for $t {}
    )*};
}

zero!(
    ibv_ah_attr,
    ibv_device_attr,
    ibv_gid,
    ibv_gid_entry,
    ibv_port_attr,
    ibv_qp_attr,
    ibv_qp_init_attr,
    ibv_qp_init_attr_ex,
    ibv_send_wr,
    ibv_wc
);

/// The errno of this thread.
pub(super) fn last_errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// Milliseconds of a clock that is coarse (a few of them) and read without a system call.
pub(super) fn coarse_millis() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a structure to fill; this clock exists on every Linux that has RDMA.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut now) };
    (now.tv_sec as u64).wrapping_mul(1000).wrapping_add(now.tv_nsec as u64 / 1_000_000)
}

/// The result of a verbs call that answers 0, an errno, or -1 with `errno` set.
pub(super) fn check(call: &'static str, rc: i32) -> VerbsResult<()> {
    match rc {
        0 => Ok(()),
        -1 => Err(VerbsError::new(call, last_errno())),
        rc => Err(VerbsError::new(call, rc.saturating_abs())),
    }
}

/// The result of a verbs call that answers an object, or null with `errno` set.
pub(super) fn object<T>(call: &'static str, ptr: *mut T) -> VerbsResult<NonNull<T>> {
    NonNull::new(ptr).ok_or_else(|| VerbsError::new(call, last_errno()))
}

/// The structure around `ctx` that holds the extended functions, if the library made one that reaches back to the field
/// at `offset`: it grows at its front.
fn extended(ctx: NonNull<ibv_context>, offset: usize) -> Option<NonNull<verbs_context>> {
    // `__VERBS_ABI_IS_EXTENDED` of verbs.h.
    const MARK: *mut c_void = std::ptr::without_provenance_mut(usize::MAX);
    // SAFETY: a context of the library, open while `ctx` is used.
    let mark = unsafe { (*ctx.as_ptr()).abi_compat };
    if mark != MARK {
        return None;
    }
    let around = ctx.as_ptr().wrapping_byte_sub(offset_of!(verbs_context, context)).cast::<verbs_context>();
    let around = NonNull::new(around)?;
    // SAFETY: the mark says that the context is the last field of this structure, and `sz` is right before it.
    let sz = unsafe { (*around.as_ptr()).sz };
    (sz >= size_of::<verbs_context>() - offset).then_some(around)
}

/// `ibv_query_port`, with all fields that the library knows.
pub(super) fn query_port(ctx: NonNull<ibv_context>, port: u8) -> VerbsResult<ibv_port_attr> {
    let mut attr = ibv_port_attr::zero();
    let query = extended(ctx, offset_of!(verbs_context, query_port)).and_then(|v| {
        // SAFETY: the structure reaches back to this field.
        unsafe { (*v.as_ptr()).query_port }
    });
    let rc = match query {
        // SAFETY: an open context and a structure of the length that is told.
        Some(query) => unsafe { query(ctx.as_ptr(), port, &raw mut attr, size_of::<ibv_port_attr>()) },
        // SAFETY: an open context; the older structure is the front part of the newer one.
        None => unsafe { rdma_sys::ibv_query_port(ctx.as_ptr(), port, (&raw mut attr).cast()) },
    };
    check("query_port", rc)?;
    Ok(attr)
}

/// `ibv_create_qp_ex`.
pub(super) fn create_qp_ex(ctx: NonNull<ibv_context>, init: &mut ibv_qp_init_attr_ex) -> VerbsResult<NonNull<ibv_qp>> {
    let create = extended(ctx, offset_of!(verbs_context, create_qp_ex)).and_then(|v| {
        // SAFETY: the structure reaches back to this field.
        unsafe { (*v.as_ptr()).create_qp_ex }
    });
    let Some(create) = create else { return Err(VerbsError::new("create_qp_ex", libc::EOPNOTSUPP)) };
    // SAFETY: an open context, and an initialised structure whose objects are the caller's.
    object("create_qp_ex", unsafe { create(ctx.as_ptr(), init) })
}

type QueryGidTable = unsafe extern "C" fn(*mut ibv_context, *mut ibv_gid_entry, usize, u32, usize) -> isize;

/// `ibv_query_gid_table`, which rdma-core has since version 31; `None` in an older one.
fn gid_table_fn() -> Option<QueryGidTable> {
    static FOUND: OnceLock<Option<QueryGidTable>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        // SAFETY: a literal that ends in a zero byte.
        let f = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"_ibv_query_gid_table".as_ptr()) };
        // SAFETY: the function of this name has this signature in every version of the library; null becomes `None`.
        unsafe { transmute::<*mut c_void, Option<QueryGidTable>>(f) }
    })
}

/// Fills `entries` with the valid GIDs of all ports and tells how many there are. `None` if the library cannot.
pub(super) fn query_gid_table(ctx: NonNull<ibv_context>, entries: &mut [ibv_gid_entry]) -> Option<VerbsResult<usize>> {
    let query = gid_table_fn()?;
    let (ptr, len) = (entries.as_mut_ptr(), entries.len());
    // SAFETY: an open context, `len` entries of the size that is told.
    let n = unsafe { query(ctx.as_ptr(), ptr, len, 0, size_of::<ibv_gid_entry>()) };
    // Unlike other calls it answers a negative errno.
    Some(
        usize::try_from(n)
            .map(|n| n.min(len))
            .map_err(|_| VerbsError::new("query_gid_table", i32::try_from(n.unsigned_abs()).unwrap_or(libc::EIO))),
    )
}

/// True if a fork can tear registered memory from the parent unless `ibv_fork_init` prevents it. Older libraries do not tell,
/// and then nothing is claimed.
pub(super) fn fork_needs_care() -> bool {
    // SAFETY: a literal that ends in a zero byte.
    let f = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"ibv_is_fork_initialized".as_ptr()) };
    // SAFETY: the function of this name has this signature in every version of the library; null becomes `None`.
    let f = unsafe { transmute::<*mut c_void, Option<unsafe extern "C" fn() -> i32>>(f) };
    // `IBV_FORK_DISABLED` is 0, `IBV_FORK_UNNEEDED` 2.
    // SAFETY: a function without arguments.
    f.is_some_and(|f| unsafe { f() } == 0)
}

/// The name of a network interface of this namespace.
pub(super) fn netdev_name(index: u32) -> Option<String> {
    let mut name = [0 as libc::c_char; libc::IF_NAMESIZE];
    // SAFETY: room for the longest name.
    let found = unsafe { libc::if_indextoname(index, name.as_mut_ptr()) };
    if found.is_null() {
        return None;
    }
    let bytes: Vec<u8> = name.iter().map(|c| *c as u8).collect();
    Some(CStr::from_bytes_until_nul(&bytes).ok()?.to_string_lossy().into_owned())
}

/// The number of a network interface of this namespace, 0 if there is none of this name.
pub(super) fn netdev_index(name: &str) -> u32 {
    let Ok(name) = CString::new(name) else { return 0 };
    // SAFETY: a string that ends in a zero byte.
    unsafe { libc::if_nametoindex(name.as_ptr()) }
}

/// Waits until one of the fds is readable, or in an error that reading tells of; no longer than `timeout`.
pub(super) fn wait_readable(fds: &[RawFd], timeout: Option<Duration>) -> io::Result<()> {
    let mut polled: Vec<_> = fds.iter().map(|&fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 }).collect();
    let millis = timeout.map_or(-1, |t| i32::try_from(t.as_millis()).unwrap_or(i32::MAX));
    // SAFETY: as many structures as are told.
    match unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, millis) } {
        0.. => Ok(()),
        // A signal: the caller looks and waits again.
        _ => match io::Error::last_os_error() {
            e if e.kind() == io::ErrorKind::Interrupted => Ok(()),
            e => Err(e),
        },
    }
}

/// The bytes of a GID.
pub(super) fn gid_bytes(gid: &ibv_gid) -> [u8; 16] {
    // SAFETY: every 16 bytes are a GID.
    unsafe { gid.raw }
}
