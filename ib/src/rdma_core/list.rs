//! Which devices there are, and why some of them cannot be used. Quiet: nothing is opened, nothing is logged above debug.
#![allow(unsafe_code)]

use std::{
    ffi::{CStr, CString},
    fs,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    ptr::NonNull,
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

use rdma_sys::{ibv_device, ibv_transport_type};
use uct::{Error, ErrorKind, Result, config::Ternary};

use super::{
    ffi::{self, check, last_errno},
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

/// Lets registered memory of the parent survive a fork, if so wanted: `UCX_IB_FORK_INIT`. It must come before anything is
/// registered; only the first call in a process counts. Kernels from 5.12 on copy registered memory when a process forks,
/// and then there is nothing to do.
///
/// What a child may do with what its parent has opened does not depend on it: nothing, see [`uct::fork`].
///
/// # Errors
/// `Unsupported` if it was demanded and failed.
pub fn init_fork(wanted: Ternary) -> Result<()> {
    static FORK: ForkInit = ForkInit::new();
    FORK.init(wanted, ffi::fork_needs_care, || {
        // SAFETY: a call without arguments.
        check("fork_init", unsafe { rdma_sys::ibv_fork_init() })
    })
}

/// What came of the one call of a process, and whether it was warned of.
pub(super) struct ForkInit {
    done: OnceLock<VerbsResult<()>>,
    warned: AtomicBool,
}

impl ForkInit {
    pub(super) const fn new() -> Self {
        ForkInit { done: OnceLock::new(), warned: AtomicBool::new(false) }
    }

    /// [`init_fork`], with what it asks of kernel and library.
    pub(super) fn init(
        &self,
        wanted: Ternary,
        needs_care: impl FnOnce() -> bool,
        call: impl FnOnce() -> VerbsResult<()>,
    ) -> Result<()> {
        if wanted == Ternary::No {
            if needs_care() && !self.warned.swap(true, Ordering::Relaxed) {
                tracing::warn!(
                    "UCX_IB_FORK_INIT=n, and this kernel does not copy registered memory when a process forks: a fork, also \
                     one that starts another program, may send what is written afterwards to nowhere"
                );
            }
            return Ok(());
        }
        match (self.done.get_or_init(call), wanted) {
            (Err(e), Ternary::Yes) => Err(Error::new(
                ErrorKind::Unsupported,
                "UCX_IB_FORK_INIT=y: libibverbs cannot make registered memory safe for a fork; set it to try or n, or open \
                 devices before any other user of libibverbs registers memory",
            )
            .with_errno(e.errno)),
            (Err(e), _) => {
                if !self.warned.swap(true, Ordering::Relaxed) {
                    tracing::warn!(
                        "registered memory is not safe for a fork ({e}): open devices before any other user of libibverbs \
                         registers memory, or do not fork"
                    );
                }
                Ok(())
            }
            (Ok(()), _) => Ok(()),
        }
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

/// Opens the device of this name. Answers also where sysfs shows it, and the name of its file.
pub(super) fn open(name: &str) -> VerbsResult<(Context, PathBuf, String)> {
    let list = List::get()?;
    let device = list.find(name).ok_or(VerbsError::new("open_device", libc::ENODEV))?;
    // SAFETY: the list lives until the end of this function.
    let ctx = unsafe { Context::open(device) }?;
    Ok((ctx, Path::new(SYSFS).join(name), names(device).1))
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
    Some(format!("{}: {}; {}", file.display(), uct::error::errno_text(errno), access_hint(errno)))
}

/// What to do about a device file that cannot be opened.
fn access_hint(errno: i32) -> &'static str {
    match errno {
        libc::ENOENT => "pass the device into the container (--device=/dev/infiniband), or load ib_uverbs",
        libc::EACCES | libc::EPERM => {
            "the user needs to read and write it: join the group that owns it, or change its mode by a udev rule (rdma-core has \
             one); in a container pass it in with --device=/dev/infiniband"
        }
        _ => "is RDMA set up on this host?",
    }
}

/// What to do about a device that does not open although it is there.
pub(super) fn open_hint(e: &VerbsError) -> String {
    match e.errno {
        libc::ENODEV => "it has just been removed".into(),
        libc::ENOENT | libc::EACCES | libc::EPERM => access_hint(e.errno).into(),
        // Of the calls at open none pins memory of ours.
        libc::ENOMEM => {
            "a limit of the device (contexts, protection domains), not of memory: too many processes have it open; see dmesg".into()
        }
        libc::EMFILE | libc::ENFILE => "raise the open-file limit (ulimit -n)".into(),
        _ => "see dmesg".into(),
    }
}

/// The devices that the kernel shows.
pub(super) fn in_sysfs(root: &Path) -> Vec<String> {
    let Ok(dir) = fs::read_dir(root) else { return Vec::new() };
    let mut names: Vec<String> = dir.flatten().filter_map(|e| e.file_name().into_string().ok()).collect();
    names.sort();
    names
}
