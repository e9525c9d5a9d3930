//! A device that makes address handles by script, and counts.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    os::fd::RawFd,
    sync::{Arc, Mutex},
    time::Duration,
};

use uct::{
    Time,
    mem::{Block, Buf},
    time::ManualClock,
};

use super::{AhCache, AhCacheConfig, AhTtl, Executor};
use crate::{
    device::{
        Access, AhAttr, ArmFor, ArmResult, AsyncEvent, Device, DeviceAttr, GidEntry, GlobalRoute, LinkLayer, MrKeys,
        PortAttr, QpCaps, QpInit, QpState, RecvWc, RoceVersion, SendWc, SendWr, SoftAv, UdQp, VerbsError, VerbsResult,
    },
    types::{Gid, Lid, Mtu, PKey, Qpn},
};

/// No queue pair: it has no values.
pub(super) enum NoQp {}

impl UdQp for NoQp {
    type Ah = FakeAh;
    fn qpn(&self) -> Qpn {
        match *self {}
    }
    fn caps(&self) -> QpCaps {
        match *self {}
    }
    fn state(&self) -> QpState {
        match *self {}
    }
    fn reset(&mut self) -> VerbsResult<()> {
        match *self {}
    }
    fn post_send(&mut self, _: &SendWr<'_, FakeAh>) -> VerbsResult<()> {
        match *self {}
    }
    fn ring(&mut self) {
        match *self {}
    }
    fn post_recv(&mut self, _: &mut Vec<Buf>) -> VerbsResult<()> {
        match *self {}
    }
    fn poll_send(&mut self, _: &mut Vec<SendWc>, _: usize) -> usize {
        match *self {}
    }
    fn poll_recv(&mut self, _: &mut Vec<RecvWc>, _: usize) -> usize {
        match *self {}
    }
    fn arm(&mut self, _: ArmFor) -> VerbsResult<ArmResult> {
        match *self {}
    }
    fn event_fd(&self) -> Option<RawFd> {
        match *self {}
    }
}

/// Must go back through `destroy_ah`.
#[derive(Debug)]
pub(super) struct FakeAh {
    pub(super) serial: u64,
}

type Hook = Arc<dyn Fn(&AhAttr) + Send + Sync>;
type DestroyHook = Arc<dyn Fn() + Send + Sync>;

#[derive(Default)]
struct Inner {
    serial: u64,
    live: BTreeSet<u64>,
    created: u64,
    destroyed: u64,
    calls: u64,
    limit: usize,
    next_results: VecDeque<i32>,
    broken: BTreeMap<Gid, i32>,
    gids: Vec<GidEntry>,
    gid_error: Option<i32>,
    hook: Option<Hook>,
    destroy_hook: Option<DestroyHook>,
}

pub(super) struct FakeDevice {
    sleeps: bool,
    inner: Mutex<Inner>,
}

impl FakeDevice {
    fn with<R>(&self, f: impl FnOnce(&mut Inner) -> R) -> R {
        f(&mut self.inner.lock().unwrap())
    }

    pub(super) fn new(sleeps: bool) -> Arc<Self> {
        let gids = vec![gid_entry(0, local_gid(0)), gid_entry(3, local_gid(1))];
        Arc::new(FakeDevice { sleeps, inner: Mutex::new(Inner { gids, ..Inner::default() }) })
    }

    /// The device holds `limit` handles at most.
    pub(super) fn set_limit(&self, limit: usize) {
        self.with(|i| i.limit = limit);
    }

    /// The next creations end with these errnos; 0 is success.
    pub(super) fn script(&self, results: &[i32]) {
        self.with(|i| i.next_results.extend(results));
    }

    /// Creations towards `dgid` fail with `errno`, 0 to repair it.
    pub(super) fn set_broken(&self, dgid: Gid, errno: i32) {
        self.with(|i| match errno {
            0 => drop(i.broken.remove(&dgid)),
            e => drop(i.broken.insert(dgid, e)),
        });
    }

    pub(super) fn set_gids(&self, gids: Vec<GidEntry>) {
        self.with(|i| i.gids = gids);
    }

    pub(super) fn set_gid_error(&self, errno: Option<i32>) {
        self.with(|i| i.gid_error = errno);
    }

    /// Called at the start of every creation, with no lock of the device held.
    pub(super) fn set_hook(&self, hook: impl Fn(&AhAttr) + Send + Sync + 'static) {
        self.with(|i| i.hook = Some(Arc::new(hook)));
    }

    /// Called at the start of every destruction, with no lock of the device held.
    pub(super) fn set_destroy_hook(&self, hook: impl Fn() + Send + Sync + 'static) {
        self.with(|i| i.destroy_hook = Some(Arc::new(hook)));
    }

    pub(super) fn clear_hook(&self) {
        let hooks = self.with(|i| (i.hook.take(), i.destroy_hook.take()));
        drop(hooks);
    }

    /// Calls of `create_ah`, failed ones included.
    pub(super) fn calls(&self) -> u64 {
        self.with(|i| i.calls)
    }

    pub(super) fn created(&self) -> u64 {
        self.with(|i| i.created)
    }

    pub(super) fn destroyed(&self) -> u64 {
        self.with(|i| i.destroyed)
    }

    pub(super) fn is_live(&self, serial: u64) -> bool {
        self.with(|i| i.live.contains(&serial))
    }
}

impl Device for FakeDevice {
    type Ah = FakeAh;
    type UdQp = NoQp;

    fn attr(&self) -> DeviceAttr {
        DeviceAttr {
            name: "fake0".into(),
            port_count: 1,
            ah_max: self.with(|i| i.limit),
            ah_create_sleeps: self.sleeps,
            soft: None,
        }
    }

    fn query_port(&self, _: u8) -> VerbsResult<PortAttr> {
        Ok(PortAttr {
            active: true,
            link_layer: LinkLayer::Ethernet,
            active_mtu: Mtu::M4096,
            lid: Lid(0),
            lmc: 0,
            pkeys: vec![PKey::DEFAULT],
            gid_table_len: 16,
            bandwidth_bps: 0.0,
        })
    }

    fn query_gids(&self, _: u8) -> VerbsResult<Vec<GidEntry>> {
        self.with(|i| match i.gid_error {
            Some(errno) => Err(VerbsError::new("query_gid_table", errno)),
            None => Ok(i.gids.clone()),
        })
    }

    fn create_ah(&self, attr: &AhAttr) -> VerbsResult<FakeAh> {
        let hook = self.with(|i| i.hook.clone());
        if let Some(hook) = hook {
            hook(attr);
        }
        self.with(|i| {
            i.calls += 1;
            let broken = attr.grh.and_then(|g| i.broken.get(&g.dgid).copied());
            let full = i.limit != 0 && i.live.len() >= i.limit;
            let errno = match i.next_results.pop_front().unwrap_or(0) {
                0 => broken.unwrap_or(if full { libc::ENOMEM } else { 0 }),
                e => e,
            };
            if errno != 0 {
                return Err(VerbsError::new("create_ah", errno));
            }
            i.serial += 1;
            i.created += 1;
            i.live.insert(i.serial);
            Ok(FakeAh { serial: i.serial })
        })
    }

    fn destroy_ah(&self, ah: FakeAh) -> VerbsResult<()> {
        let hook = self.with(|i| i.destroy_hook.clone());
        if let Some(hook) = hook {
            hook();
        }
        self.with(|i| {
            i.destroyed += 1;
            assert!(i.live.remove(&ah.serial), "address handle {} destroyed twice", ah.serial);
        });
        Ok(())
    }

    fn reg_mr(&self, _: &Arc<Block>, _: Access) -> VerbsResult<MrKeys> {
        Err(VerbsError::new("reg_mr", libc::EOPNOTSUPP))
    }

    fn dereg_mr(&self, _: MrKeys) -> VerbsResult<()> {
        Err(VerbsError::new("dereg_mr", libc::EOPNOTSUPP))
    }

    fn create_ud_qp(self: &Arc<Self>, _: &QpInit) -> VerbsResult<NoQp> {
        Err(VerbsError::new("create_qp", libc::EOPNOTSUPP))
    }

    fn poll_async_event(&self) -> Option<AsyncEvent> {
        None
    }
}

pub(super) fn local_gid(n: u8) -> Gid {
    Gid::from_ip([10, 0, 0, 1 + n].into())
}

pub(super) fn peer_gid(n: u32) -> Gid {
    Gid::from_ip((0x0a01_0000u32 + n).to_be_bytes().into())
}

pub(super) fn gid_entry(index: u8, gid: Gid) -> GidEntry {
    GidEntry { index, gid, version: RoceVersion::V2, netdev: Some("eth0".into()) }
}

/// The key of peer `n`, from the first local GID.
pub(super) fn key(n: u32) -> AhAttr {
    AhAttr {
        port: 1,
        sl: 0,
        src_path_bits: 0,
        static_rate: 0,
        dlid: Lid(0xc000),
        grh: Some(GlobalRoute {
            dgid: peer_gid(n),
            sgid: local_gid(0),
            hop_limit: 255,
            traffic_class: 106,
            flow_label: u32::MAX,
        }),
        soft: SoftAv::default(),
    }
}

/// A cache that does nothing by itself, its device and its clock.
pub(super) struct Rig {
    pub(super) cache: AhCache<FakeDevice>,
    pub(super) device: Arc<FakeDevice>,
    pub(super) clock: Arc<ManualClock>,
}

pub(super) fn config(ttl: AhTtl) -> AhCacheConfig {
    AhCacheConfig { ttl, executor: Executor::Manual, ..AhCacheConfig::default() }
}

impl Rig {
    pub(super) fn new(device: Arc<FakeDevice>, cfg: AhCacheConfig) -> Rig {
        let clock = Arc::new(ManualClock::new(Time::ZERO + Duration::from_secs(1)));
        Rig { cache: AhCache::new(Arc::clone(&device), cfg, clock.clone()), device, clock }
    }
}
