//! [`SoftDevice`]: the device, its address handles, and what its queue pairs share.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use parking_lot::Mutex;
use tracing::{debug, info, warn};
use uct::{Error, ErrorKind, Result, mem::Block};

use super::{
    config::SoftConfig, frame::ROCE_PORT, icrc::Flow, netdev, open, pcap::PcapWriter, qp::SoftQp, rx::RxState,
    sockaddr::SockAddr, socket::UdpSocket,
};
use crate::{
    device::{
        Access, AhAttr, AsyncEvent, Device, DeviceAttr, GidEntry, LinkLayer, MrKeys, PortAttr, QpInit, RoceVersion,
        SoftIdentity, VerbsError, VerbsResult,
    },
    sw::{
        AsyncQueue, Counters, FilterSlot, GidRef, LongMessage, MrTable, PortConfig, PortState, QpCore, QpTable, Stats,
        entropy,
    },
    types::{Gid, Lid},
};

/// The one port.
const PORT: u8 = 1;
/// Entries of the GID table; one is used, tests add others.
const GID_TABLE_LEN: usize = 8;
/// Queue pairs of one device.
const QP_MAX: usize = 1 << 16;

/// Where a peer's socket is, and how packets for it look.
#[derive(Copy, Clone, Debug)]
pub(super) struct Dest {
    pub(super) to: SockAddr,
    pub(super) tos: u8,
    pub(super) flow: Flow,
    pub(super) dgid: Gid,
    pub(super) udp_port: u16,
}

impl Dest {
    /// The way from the socket at `local`; `None` if the GID is of the other family.
    pub(super) fn new(local: SocketAddr, dgid: Gid, udp_port: u16, tos: u8) -> Option<Dest> {
        let mut to = SocketAddr::new(dgid.to_ip(), udp_port);
        if let (SocketAddr::V6(to), SocketAddr::V6(local)) = (&mut to, local)
            && dgid.is_link_local()
        {
            to.set_scope_id(local.scope_id());
        }
        Some(Dest { to: to.into(), tos, flow: Flow::new(local, to)?, dgid, udp_port })
    }
}

/// An address handle: a copy of where the peer's socket is. Making one never blocks.
#[derive(Debug)]
pub struct SoftAh {
    pub(super) dest: Dest,
    pub(super) sgid: GidRef,
}

/// How the device's wire went, beyond [`Stats`].
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub struct WireStats {
    /// Sends of more than one packet.
    pub gso_runs: u64,
    /// Receives of more than one packet.
    pub gro_merges: u64,
    /// Sends that the kernel refused.
    pub send_errors: u64,
    /// True while sends are joined to runs.
    pub gso: bool,
}

/// A soft device. See the [module](super).
pub struct SoftDevice {
    name: String,
    socket: UdpSocket,
    local: SocketAddr,
    gid: Gid,
    identity: SoftIdentity,
    port: PortState,
    events: AsyncQueue,
    mrs: Arc<MrTable>,
    counters: Arc<Counters>,
    qps: QpTable<QpCore>,
    rx: Mutex<RxState>,
    /// Frames wait in `rx` for a receive to be posted.
    staged: AtomicBool,
    tx_filter: FilterSlot,
    rx_filter: FilterSlot,
    gso: AtomicBool,
    gso_runs: AtomicU64,
    gro_merges: AtomicU64,
    send_errors: AtomicU64,
    refused_ahs: AtomicU64,
    pcap: Option<Mutex<PcapWriter>>,
}

impl SoftDevice {
    /// Opens a device: binds its socket and allocates all memory of its data path but that of queue pairs.
    ///
    /// # Errors
    /// `InvalidConfig`, `NoDevice`, `ExceedsLimit` or `Io`; the text names the setting, its value and what to do.
    pub fn open(cfg: &SoftConfig) -> Result<Arc<SoftDevice>> {
        let seed = cfg.seed.unwrap_or_else(entropy);
        let opened = open::open(cfg, seed)?;
        let pcap = match &cfg.pcap {
            None => None,
            Some(path) => Some(Mutex::new(PcapWriter::create(path).map_err(|e| {
                let text = format!(
                    "UCX_SOFT_PCAP={}: cannot be written: {e}; name a file in a writable directory",
                    path.display()
                );
                Error::new(ErrorKind::InvalidConfig, text)
            })?)),
        };
        let local = opened.local;
        let gid = Gid::from_ip(local.ip());
        let identity = SoftIdentity {
            udp_port: local.port(),
            host_id: netdev::host_id(),
            rx_budget: u32::try_from(opened.rcvbuf).unwrap_or(u32::MAX),
        };
        info!(
            "{}: {local} on {}, MTU {}, {} bytes of receive memory",
            cfg.name,
            opened.netdev,
            opened.mtu.bytes(),
            opened.rcvbuf
        );
        Ok(Arc::new(SoftDevice {
            name: cfg.name.clone(),
            socket: opened.socket,
            local,
            gid,
            identity,
            port: PortState::new(PortConfig {
                port: PORT,
                link_layer: LinkLayer::Ethernet,
                mtu: opened.mtu,
                lid: Lid(0),
                gids: vec![(gid, RoceVersion::V2)],
                gid_table_len: GID_TABLE_LEN,
                bandwidth_bps: super::netdev::bandwidth_bps(&opened.netdev),
                netdev: Some(opened.netdev),
            }),
            events: AsyncQueue::default(),
            mrs: Arc::new(MrTable::new(seed, usize::MAX)),
            counters: Arc::default(),
            qps: QpTable::new(seed, QP_MAX),
            rx: Mutex::new(RxState::new()),
            staged: AtomicBool::new(false),
            tx_filter: FilterSlot::default(),
            rx_filter: FilterSlot::default(),
            gso: AtomicBool::new(cfg.gso),
            gso_runs: AtomicU64::new(0),
            gro_merges: AtomicU64::new(0),
            send_errors: AtomicU64::new(0),
            refused_ahs: AtomicU64::new(0),
            pcap,
        }))
    }

    /// The address of its socket.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Its GID.
    pub fn gid(&self) -> Gid {
        self.gid
    }

    /// What peers must know of it.
    pub fn identity(&self) -> SoftIdentity {
        self.identity
    }

    /// Packets, bytes, and drops by reason.
    pub fn stats(&self) -> Stats {
        self.counters.stats()
    }

    /// How well batching works.
    pub fn wire_stats(&self) -> WireStats {
        WireStats {
            gso_runs: self.gso_runs.load(Ordering::Relaxed),
            gro_merges: self.gro_merges.load(Ordering::Relaxed),
            send_errors: self.send_errors.load(Ordering::Relaxed),
            gso: self.uses_gso(),
        }
    }

    /// The hook for packets on their way out, for tests.
    pub fn tx_filter(&self) -> &FilterSlot {
        &self.tx_filter
    }

    /// The hook for packets that have come in and passed their checksum, for tests.
    pub fn rx_filter(&self) -> &FilterSlot {
        &self.rx_filter
    }

    /// The port, whose attributes and GIDs tests change.
    pub fn port(&self) -> &PortState {
        &self.port
    }

    /// The async events, which changes of the port are told to.
    pub fn events(&self) -> &AsyncQueue {
        &self.events
    }

    /// The queue pairs, by number.
    pub fn qps(&self) -> &QpTable<QpCore> {
        &self.qps
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn socket(&self) -> &UdpSocket {
        &self.socket
    }

    pub(super) fn counters(&self) -> &Counters {
        &self.counters
    }

    pub(super) fn mrs(&self) -> &MrTable {
        &self.mrs
    }

    pub(super) fn rx(&self) -> &Mutex<RxState> {
        &self.rx
    }

    pub(super) fn has_staged(&self) -> bool {
        self.staged.load(Ordering::Acquire)
    }

    pub(super) fn set_staged(&self, staged: bool) {
        // Mostly unchanged, and then a load is cheaper than a store to a shared line.
        if self.has_staged() != staged {
            self.staged.store(staged, Ordering::Release);
        }
    }

    pub(super) fn uses_gso(&self) -> bool {
        self.gso.load(Ordering::Relaxed)
    }

    /// True if it was on.
    pub(super) fn disable_gso(&self) -> bool {
        self.gso.swap(false, Ordering::Relaxed)
    }

    #[cfg(test)]
    pub(super) fn enable_gso(&self) {
        self.gso.store(true, Ordering::Relaxed);
    }

    pub(super) fn count_sent(&self, packets: u64, bytes: u64, gso_runs: u64) {
        self.counters.add_tx(packets, bytes);
        if gso_runs > 0 {
            self.gso_runs.fetch_add(gso_runs, Ordering::Relaxed);
        }
    }

    pub(super) fn count_coalesced(&self) {
        self.gro_merges.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts, and answers the count if it is time for a line in the log.
    pub(super) fn count_send_error(&self) -> Option<u64> {
        let count = self.send_errors.fetch_add(1, Ordering::Relaxed) + 1;
        count.is_power_of_two().then_some(count)
    }

    pub(super) fn is_capturing(&self) -> bool {
        self.pcap.is_some()
    }

    #[cold]
    pub(super) fn capture(&self, flow: &Flow, id: u16, frame: &[u8]) {
        let Some(pcap) = &self.pcap else { return };
        if let Err(e) = pcap.lock().write(flow, id, frame) {
            debug!("{}: capture: {e}", self.name);
        }
    }

    /// Why a destination cannot be reached from here, in words, if that is known without sending.
    fn unreachable(&self, dgid: Gid, host_id: u64) -> Option<String> {
        if host_id == self.identity.host_id {
            return None;
        }
        if dgid.is_loopback() {
            return Some(format!(
                "loopback address {dgid} belongs to another host or network namespace; set UCX_SOFT_NETDEV or UCX_SOFT_ADDR \
                 there, to an address that both sides reach"
            ));
        }
        self.gid.is_loopback().then(|| {
            format!(
                "{dgid} is on another host or network namespace, and this device is bound to loopback address {}; set \
                 UCX_SOFT_NETDEV or UCX_SOFT_ADDR here",
                self.gid
            )
        })
    }
}

impl std::fmt::Debug for SoftDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SoftDevice({} at {}, {})", self.name, self.local, self.stats())
    }
}

impl Device for SoftDevice {
    type Ah = SoftAh;
    type UdQp = SoftQp;

    fn attr(&self) -> DeviceAttr {
        DeviceAttr {
            name: self.name.clone(),
            port_count: 1,
            ah_max: 0,
            ah_create_sleeps: false,
            soft: Some(self.identity),
        }
    }

    fn query_port(&self, port: u8) -> VerbsResult<PortAttr> {
        self.port.check_number("query_port", port)?;
        Ok(self.port.attr())
    }

    fn query_gids(&self, port: u8) -> VerbsResult<Vec<GidEntry>> {
        self.port.check_number("query_gid_table", port)?;
        Ok(self.port.gids())
    }

    fn create_ah(&self, attr: &AhAttr) -> VerbsResult<SoftAh> {
        const EINVAL: VerbsError = VerbsError::new("create_ah", libc::EINVAL);
        let sgid = self.port.check_ah(attr)?.ok_or(EINVAL)?;
        let route = attr.grh.as_ref().ok_or(EINVAL)?;
        if let Some(why) = self.unreachable(route.dgid, attr.soft.host_id) {
            // A caller that tries again and again is told at the first, second, fourth, eighth... time.
            let count = self.refused_ahs.fetch_add(1, Ordering::Relaxed) + 1;
            if count.is_power_of_two() {
                warn!("{}: no address handle: {why}", self.name);
            }
            return Err(VerbsError::new("create_ah", libc::ENETUNREACH));
        }
        let udp_port = if attr.soft.udp_port == 0 { ROCE_PORT } else { attr.soft.udp_port };
        let dest = Dest::new(self.local, route.dgid, udp_port, route.traffic_class).ok_or(EINVAL)?;
        Ok(SoftAh { dest, sgid })
    }

    fn destroy_ah(&self, _ah: SoftAh) -> VerbsResult<()> {
        Ok(())
    }

    fn reg_mr(&self, block: &Arc<Block>, access: Access) -> VerbsResult<MrKeys> {
        self.mrs.register(block, access)
    }

    fn dereg_mr(&self, keys: MrKeys) -> VerbsResult<()> {
        self.mrs.deregister(keys)
    }

    fn create_ud_qp(self: &Arc<Self>, init: &QpInit) -> VerbsResult<SoftQp> {
        let core = self.qps.insert(|qpn| {
            let (mrs, counters) = (self.mrs.clone(), self.counters.clone());
            let core = QpCore::new(qpn, init, &self.port, mrs, counters, LongMessage::Drop)?;
            Ok(Arc::new(core.newest_first()))
        })?;
        Ok(SoftQp::new(self.clone(), core, init))
    }

    fn poll_async_event(&self) -> Option<AsyncEvent> {
        self.events.pop()
    }
}
