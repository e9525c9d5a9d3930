//! [`SimDevice`]: verbs calls, and the knobs of a test.

use std::sync::{
    Arc, Weak,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use parking_lot::Mutex;
use uct::mem::Block;

use super::{
    config::{Mac, NodeId, SimConfig},
    net::{Route, SimNet, udp_port},
    qp::{Shared, SimQp},
};
use crate::{
    device::{
        Access, AhAttr, AsyncEvent, Device, DeviceAttr, GidEntry, LinkLayer, MrKeys, PortAttr, QpInit, RoceVersion,
        VerbsError, VerbsResult,
    },
    sw::{
        AsyncQueue, Counters, Datagram, DropReason, Filter, FilterSlot, GidRef, MrTable, OwnedPacket, PacketView,
        PortConfig, PortState, QpTable, Stats, grh::Grh,
    },
    types::{Gid, Lid, Mtu, PKey, Qpn},
};

/// What stays of an address handle while sends name it.
#[derive(Debug)]
pub(super) struct AhCore {
    pub(super) attr: AhAttr,
    pub(super) sgid: Option<GidRef>,
    pub(super) route: u128,
    node: NodeId,
    /// The last send of each queue pair that named it.
    uses: Mutex<Vec<(Weak<Shared>, u64)>>,
}

impl AhCore {
    pub(super) fn node(&self) -> NodeId {
        self.node
    }

    pub(super) fn note_use(&self, qp: &Arc<Shared>, serial: u64) {
        let mut uses = self.uses.lock();
        match uses.iter_mut().find(|(w, _)| w.as_ptr() == Arc::as_ptr(qp)) {
            Some(u) => u.1 = serial,
            None => {
                uses.retain(|(w, _)| w.strong_count() > 0);
                uses.push((Arc::downgrade(qp), serial));
            }
        }
    }
}

/// An address handle. It keeps the link address that its destination had when it was made.
#[derive(Debug)]
pub struct SimAh(pub(super) Arc<AhCore>);

impl SimAh {
    /// What it was made of.
    pub fn attr(&self) -> &AhAttr {
        &self.0.attr
    }
}

/// A scripted failure of `create_ah`.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct AhScript {
    /// The destination, or all.
    pub dgid: Option<Gid>,
    /// The errno.
    pub errno: i32,
    /// How often; `None` until [`SimDevice::clear_ah_script`].
    pub times: Option<u32>,
}

/// What is alive on a device.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub struct SimLive {
    /// Address handles.
    pub ahs: usize,
    /// Queue pairs.
    pub qps: usize,
    /// Registrations.
    pub mrs: usize,
}

impl SimLive {
    /// True if nothing is.
    pub fn is_zero(self) -> bool {
        self == SimLive::default()
    }
}

/// A device of a [`SimNet`]. It keeps its network alive; the network does not keep it.
#[derive(Debug)]
pub struct SimDevice {
    cfg: SimConfig,
    id: NodeId,
    net: Arc<SimNet>,
    port: PortState,
    events: AsyncQueue,
    mrs: Arc<MrTable>,
    counters: Arc<Counters>,
    pub(super) qps: QpTable<Shared>,
    ahs: AtomicUsize,
    ah_max: AtomicUsize,
    scripts: Mutex<Vec<AhScript>>,
    late: Mutex<(u64, u64)>,
    fatal: AtomicBool,
    /// Registrations are refused.
    reg_refused: AtomicBool,
    violations: Mutex<Vec<String>>,
    tx_filter: FilterSlot,
    rx_filter: FilterSlot,
}

impl SimDevice {
    pub(super) fn new(cfg: SimConfig, id: NodeId, seed: u64, net: Arc<SimNet>) -> SimDevice {
        let port = PortState::new(PortConfig {
            port: 1,
            link_layer: cfg.link_layer,
            mtu: cfg.mtu,
            lid: cfg.lid,
            gids: cfg.gids.clone(),
            gid_table_len: 16,
            netdev: Some(format!("sim{}", id.0)),
            bandwidth_bps: cfg.bandwidth_bps,
        });
        SimDevice {
            id,
            net,
            port,
            events: AsyncQueue::default(),
            mrs: Arc::new(MrTable::new(seed, cfg.mr_max)),
            counters: Arc::default(),
            qps: QpTable::new(seed, cfg.qp_max),
            ahs: AtomicUsize::new(0),
            ah_max: AtomicUsize::new(cfg.ah_max),
            scripts: Mutex::default(),
            late: Mutex::new(cfg.late_sends.unwrap_or((0, 0))),
            fatal: AtomicBool::new(false),
            reg_refused: AtomicBool::new(false),
            violations: Mutex::default(),
            tx_filter: FilterSlot::default(),
            rx_filter: FilterSlot::default(),
            cfg,
        }
    }

    /// Its place in the network.
    pub fn node(&self) -> NodeId {
        self.id
    }

    /// Its network.
    pub fn net(&self) -> &Arc<SimNet> {
        &self.net
    }

    /// What it was made of.
    pub fn config(&self) -> &SimConfig {
        &self.cfg
    }

    /// Its link address.
    pub fn mac(&self) -> Mac {
        self.net.mac(self.id)
    }

    /// Its first GID; zero without any.
    pub fn gid(&self) -> Gid {
        self.port.gids().first().map_or(Gid::ZERO, |e| e.gid)
    }

    /// Packets, bytes and drops.
    pub fn stats(&self) -> Stats {
        self.counters.stats()
    }

    /// What is alive: all zero when everything was destroyed.
    pub fn live(&self) -> SimLive {
        SimLive { ahs: self.ahs.load(Ordering::Relaxed), qps: self.qps.live(), mrs: self.mrs.live() }
    }

    /// What a transport did that verbs forbids and that would not show otherwise: address handles destroyed while a send
    /// that names them has not been completed and polled. Empty is good. At most 16 are kept.
    pub fn violations(&self) -> Vec<String> {
        self.violations.lock().clone()
    }

    /// Changes the link address. Neighbour tables learn it, and with `tell` every device gets the event; address handles
    /// to this device lead nowhere from now on.
    pub fn set_mac(&self, mac: Mac, tell: bool) {
        self.net.set_mac(self.id, mac);
        for e in self.port.gids() {
            self.net.set_neighbour(e.gid, Some(mac), tell);
        }
    }

    /// Adds a GID, also to the neighbour table. Answers its index, or `None` if it is there or the table is full.
    pub fn add_gid(&self, gid: Gid, version: RoceVersion) -> Option<u8> {
        self.net.set_neighbour(gid, Some(self.mac()), false);
        self.port.add_gid(gid, version, &self.events)
    }

    /// Removes a GID; the neighbour table forgets it if it led here. Sends through address handles that use it as their
    /// own put their queue pairs into ERROR.
    pub fn remove_gid(&self, gid: Gid) -> bool {
        if self.net.neighbour(gid) == Some(self.mac()) {
            self.net.set_neighbour(gid, None, false);
        }
        self.port.remove_gid(gid, &self.events)
    }

    /// Takes the port up or down.
    pub fn set_port_active(&self, active: bool) {
        self.port.set_active(active, &self.events);
    }

    /// Gives the port another LID.
    pub fn set_lid(&self, lid: Lid) {
        self.net.set_lid(self.id, lid);
        self.port.set_lid(lid, &self.events);
    }

    /// Changes the MTU in force.
    pub fn set_mtu(&self, mtu: Mtu) {
        self.port.set_mtu(mtu);
    }

    /// Replaces the partition table.
    pub fn set_pkeys(&self, pkeys: Vec<PKey>) {
        self.port.set_pkeys(pkeys, &self.events);
    }

    /// Queues an async event.
    pub fn inject_event(&self, event: AsyncEvent) {
        self.events.push(event);
    }

    /// The device dies under its users: every queue pair falls into ERROR and stays there, nothing new can be made.
    pub fn set_fatal(&self) {
        self.fatal.store(true, Ordering::Relaxed);
        self.qps.all().iter().for_each(|qp| qp.core.fail());
        self.events.push(AsyncEvent::DeviceFatal);
    }

    pub(super) fn is_fatal(&self) -> bool {
        self.fatal.load(Ordering::Relaxed)
    }

    /// The number for the next queue pair.
    pub fn set_next_qpn(&self, qpn: Qpn) {
        self.qps.set_next(qpn);
    }

    pub(super) fn first_qpn(&self) -> Option<Qpn> {
        self.qps.all().first().map(|qp| qp.core.qpn())
    }

    /// Puts every queue pair into ERROR, as a bad work request would.
    pub fn fail_qps(&self) {
        self.qps.all().iter().for_each(|qp| qp.core.fail());
    }

    /// Changes the delay of late sends, for a device that has them ([`SimConfig::late_sends`]).
    pub fn set_late_sends(&self, min_ns: u64, max_ns: u64) {
        *self.late.lock() = (min_ns, max_ns);
    }

    pub(super) fn draw_late(&self) -> u64 {
        let (min, max) = *self.late.lock();
        self.net.draw(min, max)
    }

    /// Changes the limit on address handles; 0 lifts it.
    pub fn set_ah_max(&self, max: usize) {
        self.ah_max.store(max, Ordering::Relaxed);
    }

    /// Refuses new registrations with `ENOMEM` while it is on, as a system does whose limit on locked memory is reached.
    /// Those that exist stay.
    pub fn refuse_registrations(&self, on: bool) {
        self.reg_refused.store(on, Ordering::Relaxed);
    }

    /// Makes `create_ah` fail. The first script that fits is used, before anything else is looked at.
    pub fn script_ah(&self, script: AhScript) {
        self.scripts.lock().push(script);
    }

    /// Forgets all scripts.
    pub fn clear_ah_script(&self) {
        self.scripts.lock().clear();
    }

    fn scripted(&self, attr: &AhAttr) -> Option<i32> {
        let dgid = attr.grh.map(|g| g.dgid);
        let mut scripts = self.scripts.lock();
        let i = scripts.iter().position(|s| s.dgid.is_none() || s.dgid == dgid)?;
        let errno = scripts[i].errno;
        if let Some(times) = &mut scripts[i].times {
            *times = times.saturating_sub(1);
            if *times == 0 {
                scripts.remove(i);
            }
        }
        Some(errno)
    }

    /// Sets the hook on packets that leave.
    pub fn set_tx_filter(&self, filter: Option<Filter>) {
        self.tx_filter.set(filter);
        self.pump_filters();
    }

    /// Sets the hook on packets that arrive, before queue pair and keys are looked at.
    pub fn set_rx_filter(&self, filter: Option<Filter>) {
        self.rx_filter.set(filter);
        self.pump_filters();
    }

    /// Lets go of what the filters hold: it leaves, or arrives, now.
    pub fn release_held(&self) {
        self.tx_filter.release();
        self.rx_filter.release();
        self.pump_filters();
    }

    fn pump_filters(&self) {
        for packet in self.tx_filter.drain() {
            self.net.transmit(self, packet);
        }
        for packet in self.rx_filter.drain() {
            let result = self.deliver(&packet, false);
            self.net.note_arrival(self.id, &packet, result);
        }
    }

    pub(super) fn send(&self, packet: OwnedPacket) {
        if !self.tx_filter.is_active() {
            return self.net.transmit(self, packet);
        }
        let passed = self.tx_filter.run(&PacketView { meta: &packet.meta, payload: &packet.payload });
        if passed.dropped {
            self.counters.drop_one(DropReason::Filtered);
            self.net.note_filtered(&packet);
        }
        for packet in passed.packets {
            self.net.transmit(self, packet);
        }
    }

    /// What became of an arriving packet, and of those that a filter brought along.
    pub(super) fn receive(&self, packet: OwnedPacket, no_receive: bool) -> Vec<(OwnedPacket, Result<(), DropReason>)> {
        let deliver = |p: OwnedPacket| {
            let result = self.deliver(&p, no_receive);
            (p, result)
        };
        if !self.rx_filter.is_active() {
            return vec![deliver(packet)];
        }
        let passed = self.rx_filter.run(&PacketView { meta: &packet.meta, payload: &packet.payload });
        let mut out: Vec<_> = passed.packets.into_iter().map(deliver).collect();
        if passed.dropped {
            self.counters.drop_one(DropReason::Filtered);
            out.push((packet, Err(DropReason::Filtered)));
        }
        out
    }

    fn deliver(&self, packet: &OwnedPacket, no_receive: bool) -> Result<(), DropReason> {
        let m = &packet.meta;
        let count = |why: DropReason| {
            self.counters.drop_one(why);
            Err(why)
        };
        if !self.port.is_active() {
            return count(DropReason::PortDown);
        }
        let has_grh = m.dst_gid != Gid::ZERO;
        // The frame came to this link address, but the address inside may have moved on.
        if has_grh && !self.port.has_gid(m.dst_gid) {
            return count(DropReason::StaleMac);
        }
        let Some(qp) = self.qps.get(m.dst_qpn) else { return count(DropReason::NoQp) };
        if no_receive {
            return count(DropReason::NoReceive);
        }
        let grh = match (has_grh, self.cfg.link_layer) {
            (false, _) => Grh::None,
            (true, LinkLayer::Ethernet) => {
                // UDP, BTH, DETH, payload, padding and checksum.
                let udp_len = packet.payload.len().next_multiple_of(4) + 8 + 12 + 8 + 4;
                Grh::between(m.src_gid, m.dst_gid, udp_len as u16)
            }
            (true, LinkLayer::InfiniBand) => Grh::V6 {
                src: m.src_gid.0.into(),
                dst: m.dst_gid.0.into(),
                traffic_class: 0,
                flow_label: 0,
                hop_limit: 64,
                udp_len: packet.payload.len() as u16,
            },
        };
        let d = Datagram { src_qpn: m.src_qpn, qkey: m.qkey, pkey: m.pkey, solicited: m.solicited, grh };
        qp.core.rx().deliver(&d, &packet.payload)
    }

    pub(super) fn port_state(&self) -> &PortState {
        &self.port
    }

    pub(super) fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    pub(super) fn mrs(&self) -> &Arc<MrTable> {
        &self.mrs
    }

    fn alive(&self, call: &'static str) -> VerbsResult<()> {
        if self.is_fatal() { Err(VerbsError::new(call, libc::EIO)) } else { Ok(()) }
    }

    fn resolve(&self, attr: &AhAttr) -> VerbsResult<Route> {
        let Some(g) = attr.grh else { return Ok(Route::Lid(attr.dlid)) };
        if self.cfg.link_layer == LinkLayer::InfiniBand && attr.dlid != Lid(0) {
            return Ok(Route::Lid(attr.dlid));
        }
        let own_host = self.cfg.soft.map_or(0, |s| s.host_id);
        if g.dgid.is_loopback() && attr.soft.host_id != own_host {
            return Err(VerbsError::new("create_ah", libc::ENETUNREACH));
        }
        match self.net.neighbour(g.dgid) {
            Some(mac) => Ok(Route::Mac(mac, udp_port(attr.soft.udp_port))),
            None => Err(VerbsError::new("create_ah", libc::ETIMEDOUT)),
        }
    }
}

impl Device for SimDevice {
    type Ah = SimAh;
    type UdQp = SimQp;

    fn attr(&self) -> DeviceAttr {
        DeviceAttr {
            name: self.cfg.name.clone(),
            port_count: 1,
            ah_max: self.ah_max.load(Ordering::Relaxed),
            ah_create_sleeps: self.cfg.ah_create_sleeps,
            soft: self.cfg.soft,
        }
    }

    fn query_port(&self, port: u8) -> VerbsResult<PortAttr> {
        self.port.check_number("query_port", port)?;
        Ok(self.port.attr())
    }

    fn query_gids(&self, port: u8) -> VerbsResult<Vec<GidEntry>> {
        self.port.check_number("query_gid", port)?;
        Ok(self.port.gids())
    }

    fn create_ah(&self, attr: &AhAttr) -> VerbsResult<SimAh> {
        self.alive("create_ah")?;
        if let Some(errno) = self.scripted(attr) {
            return Err(VerbsError::new("create_ah", errno));
        }
        let sgid = self.port.check_ah(attr)?;
        let route = self.resolve(attr)?.encode(self.id);
        let max = self.ah_max.load(Ordering::Relaxed);
        let room = |n: usize| (max == 0 || n < max).then_some(n + 1);
        if self.ahs.fetch_update(Ordering::Relaxed, Ordering::Relaxed, room).is_err() {
            return Err(VerbsError::new("create_ah", libc::ENOMEM));
        }
        Ok(SimAh(Arc::new(AhCore { attr: *attr, sgid, route, node: self.id, uses: Mutex::default() })))
    }

    fn destroy_ah(&self, ah: SimAh) -> VerbsResult<()> {
        for (qp, serial) in ah.0.uses.lock().drain(..) {
            let open = qp.upgrade().filter(|qp| qp.is_outstanding(serial));
            if let Some(qp) = open {
                let mut violations = self.violations.lock();
                if violations.len() < 16 {
                    let qpn = qp.core.qpn();
                    let text = format!("address handle ({}) destroyed before send {serial} of {qpn}", ah.0.attr);
                    violations.push(text);
                }
            }
        }
        self.ahs.fetch_sub(1, Ordering::Relaxed);
        self.alive("destroy_ah")
    }

    fn reg_mr(&self, block: &Arc<Block>, access: Access) -> VerbsResult<MrKeys> {
        self.alive("reg_mr")?;
        if self.reg_refused.load(Ordering::Relaxed) {
            return Err(VerbsError::new("reg_mr", libc::ENOMEM));
        }
        self.mrs.register(block, access)
    }

    fn dereg_mr(&self, keys: MrKeys) -> VerbsResult<()> {
        self.mrs.deregister(keys)
    }

    fn create_ud_qp(self: &Arc<Self>, init: &QpInit) -> VerbsResult<SimQp> {
        self.alive("create_qp")?;
        SimQp::create(self, init)
    }

    fn poll_async_event(&self) -> Option<AsyncEvent> {
        self.events.pop()
    }
}
