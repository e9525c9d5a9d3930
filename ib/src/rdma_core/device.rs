//! [`RdmaDevice`]: an open device with its protection domain.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use hashbrown::HashMap;
use parking_lot::Mutex;
use uct::{Error, ErrorKind, Result, mem::Block};

use super::{
    attr, ffi, gids,
    handles::{Ah, Context, Mr, Pd},
    list,
    qp::RdmaQp,
    removal::Removal,
    warm,
};
use crate::{
    device::{
        Access, AhAttr, AsyncEvent, Device, DeviceAttr, GidEntry, LinkLayer, MrKeys, PortAttr, QpInit, QueueLimits,
        VerbsError, VerbsResult,
    },
    types::PKey,
};

/// The errno of an address handle whose local GID is not in the table, as the kernel answers.
const NO_GID: VerbsError = VerbsError::new("create_ah", libc::ENODATA);

/// The vendor that soft-RoCE claims to be of.
const SOFT_ROCE_VENDOR: u32 = 0xff_ffff;

/// An address handle of an [`RdmaDevice`]. Given back by [`Device::destroy_ah`]; one that is dropped instead stays with the
/// device until it is closed.
pub struct RdmaAh(pub(super) Ah);

impl std::fmt::Debug for RdmaAh {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RdmaAh({:?})", self.0.ptr())
    }
}

/// A device of libibverbs. See the [module](super).
///
/// Creating an address handle resolves the peer's link address, in the kernel, and sleeps up to a second for a peer that
/// does not answer. On RoCE an empty datagram is sent to the peer before, which lets the IP stack begin.
///
/// An address handle names its local GID by value. The value is looked up when the handle is made; if the table has it in
/// both RoCE versions, the handle is of version 2.
pub struct RdmaDevice {
    name: String,
    sysfs: PathBuf,
    pd: Arc<Pd>,
    max_ah: usize,
    max_sge: u32,
    vendor_id: u32,
    /// By port, from 1; it does not change while the device is open.
    link: Vec<LinkLayer>,
    /// Lengths of all GID tables together.
    gid_slots: usize,
    mrs: Mutex<HashMap<u32, Mr>>,
    /// When events were last looked for and there was none, see [`RdmaDevice::expect_event`].
    quiet_at: AtomicU64,
    /// The device is gone, and that has been told.
    dead: AtomicBool,
    removal: Option<Removal>,
    limits: QueueLimits,
}

impl RdmaDevice {
    /// Opens the device of this name.
    ///
    /// # Errors
    /// `NoDevice` if it is not there or cannot be opened; the text says why and what to do.
    pub fn open(name: &str) -> Result<Arc<RdmaDevice>> {
        if let Some(found) = list::devices().into_iter().find(|d| d.name == name)
            && let Some(why) = found.unusable
        {
            return Err(Error::new(ErrorKind::NoDevice, format!("{name}: {why}")));
        }
        Self::try_open(name).map_err(|e| {
            let text = format!("{name}: {} failed: {}", e.call, list::open_hint(&e));
            Error::new(ErrorKind::NoDevice, text).with_errno(e.errno)
        })
    }

    fn try_open(name: &str) -> VerbsResult<Arc<RdmaDevice>> {
        let (ctx, sysfs, file) = list::open(name)?;
        let removal = Removal::watch(&file);
        let attr = ctx.query_device()?;
        let (mut link, mut gid_slots) = (Vec::new(), 0);
        for port in 1..=attr.phys_port_cnt {
            let p = ffi::query_port(ctx.ptr(), port)?;
            link.push(attr::link_layer(&p));
            gid_slots += usize::try_from(p.gid_tbl_len).unwrap_or(0);
        }
        let pd = Arc::new(Pd::alloc(Arc::new(ctx))?);
        Ok(Arc::new(RdmaDevice {
            name: name.to_string(),
            sysfs,
            pd,
            max_ah: usize::try_from(attr.max_ah).unwrap_or(0),
            vendor_id: attr.vendor_id,
            max_sge: u32::try_from(attr.max_sge).unwrap_or(1),
            link,
            gid_slots,
            mrs: Mutex::default(),
            quiet_at: AtomicU64::new(0),
            dead: AtomicBool::new(false),
            removal,
            limits: attr::queue_limits(&attr),
        }))
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// True if there is a port whose address handles hold link addresses.
    pub(super) fn has_ethernet(&self) -> bool {
        self.link.contains(&LinkLayer::Ethernet)
    }

    pub(super) fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    pub(super) fn max_sge(&self) -> u32 {
        self.max_sge
    }

    /// True for the kernel's soft-RoCE, whose provider (until a fix of June 2026) takes the first element of a list for the length
    /// of all in `ibv_wr_set_sge_list`: packets are cut short, or take the queue pair down.
    pub(super) fn is_soft_roce(&self) -> bool {
        self.vendor_id == SOFT_ROCE_VENDOR
    }

    /// Something has happened that an event may explain: the next look is not skipped. Else a look is a system call, which a
    /// waiting user would make millions of times for nothing, so that there is one in a few milliseconds at most.
    pub(super) fn expect_event(&self) {
        self.quiet_at.store(0, Ordering::Relaxed);
    }

    fn ctx(&self) -> &Arc<Context> {
        self.pd.ctx()
    }

    fn link_of(&self, call: &'static str, port: u8) -> VerbsResult<LinkLayer> {
        let place = usize::from(port).checked_sub(1);
        place.and_then(|p| self.link.get(p).copied()).ok_or(VerbsError::new(call, libc::EINVAL))
    }

    /// After a fatal event nothing new is made, also on devices that would.
    fn alive(&self, call: &'static str) -> VerbsResult<()> {
        if self.dead.load(Ordering::Acquire) { Err(VerbsError::new(call, libc::EIO)) } else { Ok(()) }
    }

    /// The local GID of an address handle: where it is in the table.
    fn local_gid(&self, attr: &AhAttr, link: LinkLayer) -> VerbsResult<u8> {
        let Some(grh) = &attr.grh else { return Ok(0) };
        let table = self.query_gids(attr.port)?;
        let local = gids::find(&table, grh.sgid).ok_or(NO_GID)?;
        if link == LinkLayer::Ethernet {
            let scope = match &local.netdev {
                Some(name) if grh.dgid.is_link_local() => ffi::netdev_index(name),
                _ => 0,
            };
            warm::resolve_ahead(grh.sgid, grh.dgid, scope);
        }
        Ok(local.index)
    }
}

impl std::fmt::Debug for RdmaDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RdmaDevice({})", self.name)
    }
}

impl Drop for RdmaDevice {
    fn drop(&mut self) {
        if !self.ctx().is_here() {
            return;
        }
        for (lkey, mr) in self.mrs.get_mut().drain() {
            if let Err(e) = mr.dereg() {
                tracing::debug!("{}: lkey {lkey:#x} at close: {e}", self.name);
            }
        }
    }
}

impl Device for RdmaDevice {
    type Ah = RdmaAh;
    type UdQp = RdmaQp;

    fn attr(&self) -> DeviceAttr {
        DeviceAttr {
            name: self.name.clone(),
            port_count: self.link.len() as u8,
            ah_max: self.max_ah,
            ah_create_sleeps: true,
            soft: None,
        }
    }

    fn query_port(&self, port: u8) -> VerbsResult<PortAttr> {
        let link = self.link_of("query_port", port)?;
        let p = ffi::query_port(self.ctx().ptr(), port)?;
        // On RoCE there is the default partition only, at index 0.
        let count = if link == LinkLayer::Ethernet { 1 } else { p.pkey_tbl_len };
        let pkeys = (0..i32::from(count)).map(|i| self.ctx().query_pkey(port, i).map(PKey));
        Ok(attr::port(&p, pkeys.collect::<VerbsResult<_>>()?))
    }

    fn query_gids(&self, port: u8) -> VerbsResult<Vec<GidEntry>> {
        let link = self.link_of("query_gid_table", port)?;
        let p = ffi::query_port(self.ctx().ptr(), port)?;
        let len = usize::try_from(p.gid_tbl_len).unwrap_or(0);
        gids::table(self.ctx(), &self.sysfs, port, len, self.gid_slots.max(len), link)
    }

    fn create_ah(&self, attr: &AhAttr) -> VerbsResult<RdmaAh> {
        self.alive("create_ah")?;
        let link = self.link_of("create_ah", attr.port)?;
        let sgid_index = self.local_gid(attr, link)?;
        Ah::create(&self.pd, attr::ah(attr, sgid_index)).map(RdmaAh)
    }

    fn destroy_ah(&self, ah: RdmaAh) -> VerbsResult<()> {
        ah.0.destroy()
    }

    fn reg_mr(&self, block: &Arc<Block>, access: Access) -> VerbsResult<MrKeys> {
        self.alive("reg_mr")?;
        let mr = Mr::reg(&self.pd, block, attr::access(access))?;
        let (lkey, rkey) = mr.keys();
        self.mrs.lock().insert(lkey, mr);
        Ok(MrKeys { lkey, rkey })
    }

    fn dereg_mr(&self, keys: MrKeys) -> VerbsResult<()> {
        let mr = self.mrs.lock().remove(&keys.lkey);
        mr.ok_or(VerbsError::new("dereg_mr", libc::EINVAL))?.dereg()
    }

    fn create_ud_qp(self: &Arc<Self>, init: &QpInit) -> VerbsResult<RdmaQp> {
        self.alive("create_qp")?;
        self.link_of("create_qp", init.port)?;
        RdmaQp::create(self.clone(), init)
    }

    fn queue_limits(&self) -> QueueLimits {
        self.limits
    }

    fn poll_async_event(&self) -> Option<AsyncEvent> {
        if self.dead.load(Ordering::Acquire) {
            return None;
        }
        let now = ffi::coarse_millis();
        if self.quiet_at.load(Ordering::Relaxed) == now {
            return None;
        }
        let event = match self.ctx().async_event() {
            Ok(Some(raw)) => attr::event(&raw),
            Ok(None) if self.removal.as_ref().is_some_and(Removal::has_happened) => AsyncEvent::DeviceFatal,
            Ok(None) => {
                self.quiet_at.store(now, Ordering::Relaxed);
                return None;
            }
            Err(e) => {
                tracing::debug!("{}: {e}", self.name);
                AsyncEvent::DeviceFatal
            }
        };
        // It is told once, and nothing can follow.
        if event == AsyncEvent::DeviceFatal && self.dead.swap(true, Ordering::AcqRel) {
            return None;
        }
        Some(event)
    }
}
