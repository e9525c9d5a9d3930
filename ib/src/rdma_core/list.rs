//! Which devices there are, and why some of them cannot be used. Quiet: nothing is opened, nothing is logged above debug.
#![allow(unsafe_code)]

use std::{
    ffi::{CStr, CString},
    fs,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    ptr::NonNull,
    sync::OnceLock,
};

use rdma_sys::{ibv_device, ibv_transport_type};
use uct::{Error, ErrorKind, Result, config::Ternary};

use super::{
    ffi::{check, last_errno},
    handles::Context,
};
use crate::device::{VerbsError, VerbsResult};

/// Where the kernel shows RDMA devices.
pub(super) const SYSFS: &str = "/sys/class/infiniband";
/// Where their device files are.
const DEV: &str = "/dev/infiniband";

/// A device that is there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FoundDevice {
    /// Its verbs name, for example `mlx5_0`.
    pub name: String,
    /// Why it cannot be used, if it cannot.
    pub unusable: Option<String>,
}

/// The library's list; devices in it are valid until it is freed.
struct List {
    ptr: NonNull<*mut ibv_device>,
    len: usize,
}

impl List {
    fn get() -> VerbsResult<List> {
        let mut len = 0i32;
        // SAFETY: a number to fill.
        let ptr = unsafe { rdma_sys::ibv_get_device_list(&raw mut len) };
        let ptr = NonNull::new(ptr).ok_or_else(|| VerbsError::new("get_device_list", last_errno()))?;
        Ok(List { ptr, len: usize::try_from(len).unwrap_or(0) })
    }

    fn devices(&self) -> impl Iterator<Item = NonNull<ibv_device>> {
        // SAFETY: the library's array of this length, which lives until the list is freed.
        let all = unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) };
        all.iter().filter_map(|p| NonNull::new(*p))
    }

    fn find(&self, name: &str) -> Option<NonNull<ibv_device>> {
        self.devices().find(|d| names(*d).0 == name)
    }
}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: the library's own pointer, freed once.
        unsafe { rdma_sys::ibv_free_device_list(self.ptr.as_ptr()) };
    }
}

/// The verbs name and the name of the device file of a device in a list.
fn names(device: NonNull<ibv_device>) -> (String, String) {
    // SAFETY: the list that it is in has not been freed.
    let device = unsafe { device.as_ref() };
    (text(&device.name), text(&device.dev_name))
}

fn text(chars: &[libc::c_char]) -> String {
    let bytes: Vec<u8> = chars.iter().map(|c| *c as u8).collect();
    CStr::from_bytes_until_nul(&bytes).map_or_else(|_| String::new(), |s| s.to_string_lossy().into_owned())
}

/// Lets registered memory survive a fork, if so wanted. It must come before anything is registered; only the first call
/// in a process counts, and warns if it was tried in vain.
///
/// # Errors
/// `Unsupported` if it was demanded and failed.
pub fn init_fork(wanted: Ternary) -> Result<()> {
    static DONE: OnceLock<VerbsResult<()>> = OnceLock::new();
    init_fork_once(&DONE, wanted, || {
        // SAFETY: a call without arguments.
        check("fork_init", unsafe { rdma_sys::ibv_fork_init() })
    })
}

/// [`init_fork`] by `call`, whose result is kept in `done`.
pub(super) fn init_fork_once(
    done: &OnceLock<VerbsResult<()>>,
    wanted: Ternary,
    call: impl FnOnce() -> VerbsResult<()>,
) -> Result<()> {
    if wanted == Ternary::No {
        return Ok(());
    }
    let done = done.get_or_init(|| {
        let result = call();
        if let (Err(e), Ternary::Try) = (&result, wanted) {
            tracing::warn!(
                "registered memory is not safe for a fork: {e}; a child must not touch it. UCX_IB_FORK_INIT=n says that \
                 nobody forks"
            );
        }
        result
    });
    match (done, wanted) {
        (Err(e), Ternary::Yes) => Err(Error::new(
            ErrorKind::Unsupported,
            "UCX_IB_FORK_INIT=y: libibverbs cannot make registered memory safe for a fork; set it to try or n, or open \
             devices before any other user of libibverbs registers memory",
        )
        .with_errno(e.errno)),
        _ => Ok(()),
    }
}

/// All devices, by name. Opens none of them.
pub fn devices() -> Vec<FoundDevice> {
    let mut found = Vec::new();
    match List::get() {
        Ok(list) => {
            for device in list.devices() {
                let (name, file) = names(device);
                // SAFETY: the list lives.
                let transport = unsafe { (*device.as_ptr()).transport_type };
                let unusable = wrong_transport(transport).or_else(|| no_access(&Path::new(DEV).join(file)));
                found.push(FoundDevice { name, unusable });
            }
        }
        // Without RDMA in the kernel there is no list.
        Err(e) => tracing::debug!("no RDMA devices: {e}"),
    }
    for name in in_sysfs(Path::new(SYSFS)) {
        if !found.iter().any(|f| f.name == name) {
            let why = "libibverbs does not know it: is the kernel module ib_uverbs loaded, and its provider (package \
                       ibverbs-providers) installed? A device that is being removed looks the same";
            found.push(FoundDevice { name, unusable: Some(why.into()) });
        }
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}

/// Opens the device of this name.
pub(super) fn open(name: &str) -> VerbsResult<(Context, PathBuf)> {
    let list = List::get()?;
    let device = list.find(name).ok_or(VerbsError::new("open_device", libc::ENODEV))?;
    // SAFETY: the list lives until the end of this function.
    let ctx = unsafe { Context::open(device) }?;
    Ok((ctx, Path::new(SYSFS).join(name)))
}

/// Why devices of this transport are of no use.
pub(super) fn wrong_transport(transport: ibv_transport_type::Type) -> Option<String> {
    match transport {
        ibv_transport_type::IBV_TRANSPORT_IB | ibv_transport_type::IBV_TRANSPORT_UNSPECIFIED => None,
        ibv_transport_type::IBV_TRANSPORT_IWARP => Some("an iWARP device, which has no datagram queue pairs".into()),
        other => Some(format!("a device of transport type {other}, which has no datagram queue pairs")),
    }
}

/// Why this process cannot open a device file.
pub(super) fn no_access(file: &Path) -> Option<String> {
    let path = CString::new(file.as_os_str().as_bytes()).ok()?;
    // SAFETY: a string that ends in a zero byte.
    let rc = unsafe { libc::faccessat(libc::AT_FDCWD, path.as_ptr(), libc::R_OK | libc::W_OK, libc::AT_EACCESS) };
    if rc == 0 {
        return None;
    }
    let errno = last_errno();
    let hint = match errno {
        libc::ENOENT => "pass the device into the container (--device=/dev/infiniband), or load ib_uverbs",
        libc::EACCES | libc::EPERM => {
            "the user needs to read and write it: see its group and the udev rules of rdma-core"
        }
        _ => "is RDMA set up on this host?",
    };
    Some(format!("{}: {}; {hint}", file.display(), uct::error::errno_text(errno)))
}

/// The devices that the kernel shows.
pub(super) fn in_sysfs(root: &Path) -> Vec<String> {
    let Ok(dir) = fs::read_dir(root) else { return Vec::new() };
    let mut names: Vec<String> = dir.flatten().filter_map(|e| e.file_name().into_string().ok()).collect();
    names.sort();
    names
}
