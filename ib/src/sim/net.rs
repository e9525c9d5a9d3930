//! [`SimNet`]: time, routes, faults.

use std::{
    collections::BTreeMap,
    fmt,
    fmt::Write,
    sync::{Arc, Weak},
    time::Duration,
};

use parking_lot::Mutex;
use uct::time::{Clock, ManualClock, Time};

use super::{
    config::{Faults, Mac, NodeId, SimConfig},
    device::SimDevice,
    qp::Shared,
    trace::{PacketTap, PayloadFormatter, TappedPacket, Trace, TraceEntry, TraceEvent},
};
use crate::{
    device::{AsyncEvent, Device},
    sw::{DropReason, OwnedPacket, Rng},
    types::{Gid, Lid},
};

/// Where an address handle leads. It fits the `route` of a packet's headers.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) enum Route {
    /// To the device that listens on this UDP port behind this link address.
    Mac(Mac, u16),
    /// To the device of this LID.
    Lid(Lid),
}

impl Route {
    pub(super) fn encode(self, src: NodeId) -> u128 {
        let way = match self {
            // The port is never 0: 0 marks a LID.
            Route::Mac(mac, port) => mac.0 & 0xffff_ffff_ffff | u64::from(port) << 48,
            Route::Lid(lid) => u64::from(lid.0),
        };
        u128::from(way) | u128::from(src.0) << 64
    }

    /// The sender of a packet.
    pub(super) fn source(route: u128) -> NodeId {
        NodeId((route >> 64) as u32)
    }

    fn decode(route: u128) -> Route {
        let route = route as u64;
        match (route >> 48) as u16 {
            0 => Route::Lid(Lid(route as u16)),
            port => Route::Mac(Mac(route & 0xffff_ffff_ffff), port),
        }
    }
}

enum Event {
    /// A packet comes to the device behind its route.
    Arrive { dst: NodeId, packet: OwnedPacket, no_receive: bool },
    /// A late send is read and completed.
    Execute { qp: Weak<Shared>, dev: Weak<SimDevice>, serial: u64 },
}

struct Node {
    dev: Weak<SimDevice>,
    name: String,
    alive: bool,
    mac: Mac,
    port: u16,
    lid: Lid,
}

struct Net {
    rng: Rng,
    /// By time, then by the order of scheduling.
    events: BTreeMap<(Time, u64), Event>,
    scheduled: u64,
    nodes: Vec<Node>,
    neighbours: BTreeMap<Gid, Mac>,
    gateway: Option<Mac>,
    macs: u64,
    faults: Faults,
    links: BTreeMap<(NodeId, NodeId), Faults>,
    trace: Trace,
    formatter: Option<PayloadFormatter>,
    tap: Option<PacketTap>,
}

impl Net {
    fn schedule(&mut self, at: Time, event: Event) {
        self.scheduled += 1;
        self.events.insert((at, self.scheduled), event);
    }

    /// The device a route leads to, or why to none.
    fn find(&self, route: u128) -> Result<NodeId, DropReason> {
        let route = Route::decode(route);
        let hit = |n: &Node| match route {
            Route::Mac(mac, port) => n.mac == mac && n.port == port,
            Route::Lid(lid) => n.lid == lid,
        };
        // The newest first: a restarted device takes over from its dead self.
        match self.nodes.iter().rposition(|n| hit(n) && n.alive) {
            Some(i) => Ok(NodeId(i as u32)),
            None if self.nodes.iter().any(hit) => Err(DropReason::Gone),
            None => Err(DropReason::StaleMac),
        }
    }

    fn note(&mut self, time: Time, dst: Option<NodeId>, packet: &OwnedPacket, event: TraceEvent) {
        let src = Route::source(packet.meta.route);
        if let Some(tap) = &mut self.tap {
            tap(&TappedPacket { time, src, dst, meta: &packet.meta, payload: &packet.payload, event });
        }
        let head = packet.payload[..packet.payload.len().min(TraceEntry::HEAD_MAX)].to_vec();
        self.trace.push(TraceEntry { time, src, dst, meta: packet.meta, len: packet.payload.len(), head, event });
    }
}

/// A simulated network. See the [module](crate::sim) for how to use it.
pub struct SimNet {
    seed: u64,
    clock: Arc<ManualClock>,
    net: Mutex<Net>,
}

impl SimNet {
    /// An empty network whose faults are drawn from `seed`, and which moves `clock`.
    pub fn new(seed: u64, clock: Arc<ManualClock>) -> Arc<SimNet> {
        let net = Net {
            rng: Rng::new(seed),
            events: BTreeMap::new(),
            scheduled: 0,
            nodes: Vec::new(),
            neighbours: BTreeMap::new(),
            gateway: None,
            macs: 0,
            faults: Faults::default(),
            links: BTreeMap::new(),
            trace: Trace::new(64),
            formatter: None,
            tap: None,
        };
        Arc::new(SimNet { seed, clock, net: Mutex::new(net) })
    }

    /// The seed.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The clock that [`SimNet::run_until`] moves.
    pub fn clock(&self) -> &Arc<ManualClock> {
        &self.clock
    }

    /// Virtual time.
    pub fn now(&self) -> Time {
        self.clock.now()
    }

    /// Plugs a new device in. Its GIDs enter the neighbour table.
    pub fn add_device(self: &Arc<Self>, cfg: SimConfig) -> Arc<SimDevice> {
        let mut net = self.net.lock();
        let id = NodeId(net.nodes.len() as u32);
        let known = cfg.gids.iter().find_map(|(gid, _)| net.neighbours.get(gid).copied());
        let mac = cfg.mac.or(known).unwrap_or_else(|| {
            net.macs += 1;
            Mac(0x0200_0000_0000 + net.macs)
        });
        for (gid, _) in &cfg.gids {
            net.neighbours.insert(*gid, mac);
        }
        let seed = net.rng.next_u64();
        let port = udp_port(cfg.soft.map_or(0, |s| s.udp_port));
        let (name, lid) = (cfg.name.clone(), cfg.lid);
        let dev = Arc::new(SimDevice::new(cfg, id, seed, self.clone()));
        net.nodes.push(Node { dev: Arc::downgrade(&dev), name, alive: true, mac, port, lid });
        dev
    }

    /// The process behind a device dies: what is sent to the device, or by it from now on, vanishes. What it has sent
    /// arrives.
    pub fn crash(&self, id: NodeId) {
        if let Some(node) = self.net.lock().nodes.get_mut(id.0 as usize) {
            node.alive = false;
        }
    }

    /// Crashes a device and plugs a new one in with the same configuration, link address and GIDs. Its first queue
    /// pair gets the lowest number that the old device's living ones had.
    pub fn restart(self: &Arc<Self>, old: &SimDevice) -> Arc<SimDevice> {
        self.crash(old.node());
        let mut cfg = old.config().clone();
        cfg.gids = old.port_state().gids().into_iter().map(|e| (e.gid, e.version)).collect();
        cfg.mac = Some(self.mac(old.node()));
        let new = self.add_device(cfg);
        if let Some(qpn) = old.first_qpn() {
            new.set_next_qpn(qpn);
        }
        new
    }

    /// Faults of all links that have none of their own.
    pub fn set_faults(&self, faults: Faults) {
        self.net.lock().faults = faults;
    }

    /// The faults set by [`SimNet::set_faults`].
    pub fn faults(&self) -> Faults {
        self.net.lock().faults
    }

    /// Faults of one direction between two devices; `None` goes back to the common ones.
    pub fn set_link_faults(&self, src: NodeId, dst: NodeId, faults: Option<Faults>) {
        let mut net = self.net.lock();
        match faults {
            Some(f) => net.links.insert((src, dst), f),
            None => net.links.remove(&(src, dst)),
        };
    }

    /// The link address of a device; of no device it is 0.
    pub fn mac(&self, id: NodeId) -> Mac {
        self.net.lock().nodes.get(id.0 as usize).map_or(Mac(0), |n| n.mac)
    }

    /// What the neighbour table says of a GID, or else the gateway.
    pub fn neighbour(&self, gid: Gid) -> Option<Mac> {
        let net = self.net.lock();
        net.neighbours.get(&gid).copied().or(net.gateway)
    }

    /// The link address that GIDs resolve to which are in no table. Without it, the default, address handles to them are
    /// refused with `ETIMEDOUT`. With the address of no device ([`SimNet::fresh_mac`]) any destination resolves, and
    /// packets to it vanish.
    pub fn set_gateway(&self, mac: Option<Mac>) {
        self.net.lock().gateway = mac;
    }

    /// Changes the neighbour table; address handles that exist keep what they have. With `tell`, every living device
    /// gets a `NeighbourChange` event.
    pub fn set_neighbour(&self, gid: Gid, mac: Option<Mac>, tell: bool) {
        let devices = {
            let mut net = self.net.lock();
            match mac {
                Some(mac) => net.neighbours.insert(gid, mac),
                None => net.neighbours.remove(&gid),
            };
            if tell { net.nodes.iter().filter(|n| n.alive).map(|n| n.dev.clone()).collect() } else { Vec::new() }
        };
        for dev in devices.iter().filter_map(Weak::upgrade) {
            dev.inject_event(AsyncEvent::NeighbourChange(gid));
        }
    }

    /// A link address that no device has.
    pub fn fresh_mac(&self) -> Mac {
        let mut net = self.net.lock();
        net.macs += 1;
        Mac(0x0200_0000_0000 + net.macs)
    }

    pub(super) fn set_mac(&self, id: NodeId, mac: Mac) {
        if let Some(node) = self.net.lock().nodes.get_mut(id.0 as usize) {
            node.mac = mac;
        }
    }

    pub(super) fn set_lid(&self, id: NodeId, lid: Lid) {
        if let Some(node) = self.net.lock().nodes.get_mut(id.0 as usize) {
            node.lid = lid;
        }
    }

    /// The time of the next event, `None` if there is nothing to wait for.
    pub fn next_event(&self) -> Option<Time> {
        self.net.lock().events.first_key_value().map(|((t, _), _)| *t)
    }

    /// Packets and late sends on their way.
    pub fn in_flight(&self) -> usize {
        self.net.lock().events.len()
    }

    /// Moves time to the next event and lets it happen. False if there is none.
    pub fn step(&self) -> bool {
        let event = {
            let mut net = self.net.lock();
            let Some(((t, _), event)) = net.events.pop_first() else { return false };
            self.clock.set(t);
            event
        };
        match event {
            Event::Arrive { dst, packet, no_receive } => self.arrive(dst, packet, no_receive),
            Event::Execute { qp, dev, serial } => {
                // A queue pair that was destroyed is not read any more.
                if let (Some(qp), Some(dev)) = (qp.upgrade(), dev.upgrade()) {
                    qp.execute_until(&dev, serial);
                }
            }
        }
        true
    }

    /// Lets everything happen that is due at `t` or before, and moves time to `t`. Answers the number of events.
    pub fn run_until(&self, t: Time) -> usize {
        let mut n = 0;
        while self.next_event().is_some_and(|next| next <= t) {
            self.step();
            n += 1;
        }
        self.clock.set(t);
        n
    }

    /// [`SimNet::run_until`] for a time from now.
    pub fn run_for(&self, delta: Duration) -> usize {
        self.run_until(self.now() + delta)
    }

    pub(super) fn schedule_execute(&self, at: Time, dev: &Arc<SimDevice>, qp: &Arc<Shared>, serial: u64) {
        let event = Event::Execute { qp: Arc::downgrade(qp), dev: Arc::downgrade(dev), serial };
        self.net.lock().schedule(at, event);
    }

    /// A number from `min` to `max`, both included.
    pub(super) fn draw(&self, min: u64, max: u64) -> u64 {
        min + self.net.lock().rng.below(max.saturating_sub(min).saturating_add(1))
    }

    /// Puts a packet on the way.
    pub(super) fn transmit(&self, dev: &SimDevice, mut packet: OwnedPacket) {
        let (now, src) = (self.now(), dev.node());
        let mut net = self.net.lock();
        let lost = |net: &mut Net, dst, packet: &OwnedPacket, why| {
            dev.counters().drop_one(why);
            net.note(now, dst, packet, TraceEvent::Dropped(why));
        };
        if !net.nodes.get(src.0 as usize).is_some_and(|n| n.alive) {
            return lost(&mut net, None, &packet, DropReason::Gone);
        }
        if !dev.port_state().is_active() {
            return lost(&mut net, None, &packet, DropReason::PortDown);
        }
        dev.counters().add_tx(1, packet.payload.len() as u64);
        let dst = match net.find(packet.meta.route) {
            Ok(dst) => dst,
            Err(why) => return lost(&mut net, None, &packet, why),
        };
        net.note(now, Some(dst), &packet, TraceEvent::Sent);
        let f = net.links.get(&(src, dst)).copied().unwrap_or(net.faults);
        if f.partition {
            return lost(&mut net, Some(dst), &packet, DropReason::Partition);
        }
        if net.rng.chance(f.loss_ppm) {
            return lost(&mut net, Some(dst), &packet, DropReason::Loss);
        }
        if !packet.payload.is_empty() && net.rng.chance(f.corrupt_ppm) {
            let bit = net.rng.below(packet.payload.len() as u64 * 8) as usize;
            packet.payload[bit / 8] ^= 1 << (bit % 8);
            if !f.corrupt_passes {
                return lost(&mut net, Some(dst), &packet, DropReason::Icrc);
            }
            net.note(now, Some(dst), &packet, TraceEvent::Corrupted);
        }
        let copies = if net.rng.chance(f.dup_ppm) { 2 } else { 1 };
        for _ in 0..copies {
            let mut delay = f.delay_ns;
            if f.jitter_ns > 0 {
                delay = delay.saturating_add(net.rng.below(f.jitter_ns.saturating_add(1)));
            }
            if net.rng.chance(f.reorder_ppm) {
                delay = delay.saturating_add(f.reorder_ns);
            }
            let no_receive = net.rng.chance(f.no_receive_ppm);
            let packet = packet.clone();
            net.schedule(now + Duration::from_nanos(delay), Event::Arrive { dst, packet, no_receive });
        }
    }

    fn arrive(&self, dst: NodeId, packet: OwnedPacket, no_receive: bool) {
        let dev = {
            let mut net = self.net.lock();
            let node = net.nodes.get(dst.0 as usize);
            match node.filter(|n| n.alive).and_then(|n| n.dev.upgrade()) {
                Some(dev) => dev,
                None => return net.note(self.now(), Some(dst), &packet, TraceEvent::Dropped(DropReason::Gone)),
            }
        };
        for (packet, result) in dev.receive(packet, no_receive) {
            self.note_arrival(dst, &packet, result);
        }
    }

    pub(super) fn note_arrival(&self, dst: NodeId, packet: &OwnedPacket, result: Result<(), DropReason>) {
        let event = match result {
            Ok(()) => TraceEvent::Delivered,
            Err(why) => TraceEvent::Dropped(why),
        };
        self.net.lock().note(self.now(), Some(dst), packet, event);
    }

    /// A packet that never left.
    pub(super) fn note_filtered(&self, packet: &OwnedPacket) {
        self.net.lock().note(self.now(), None, packet, TraceEvent::Dropped(DropReason::Filtered));
    }

    /// Keeps the last `max` packet lines; 64 by default.
    pub fn set_trace_max(&self, max: usize) {
        self.net.lock().trace.set_max(max);
    }

    /// Sets what turns payloads into words in [`SimNet::report`]; without it they are shown as bytes.
    pub fn set_formatter(&self, formatter: Option<PayloadFormatter>) {
        self.net.lock().formatter = formatter;
    }

    /// Shows `tap` all that happens to packets from now on, whole: a checker that reads along. It is called with the
    /// network locked and must not touch it. `None` takes it away.
    pub fn set_tap(&self, tap: Option<PacketTap>) {
        let old = std::mem::replace(&mut self.net.lock().tap, tap);
        drop(old);
    }

    /// The last packets, oldest first. A packet has a line when it leaves and another when it arrives or is lost.
    pub fn trace(&self) -> Vec<TraceEntry> {
        self.net.lock().trace.entries()
    }

    /// For failing tests: the seed, the time and the last packets, in lines.
    pub fn report(&self) -> String {
        let (entries, names, formatter) = {
            let net = self.net.lock();
            let names: Vec<_> = net.nodes.iter().map(|n| n.name.clone()).collect();
            (net.trace.entries(), names, net.formatter.clone())
        };
        let name = |id: NodeId| names.get(id.0 as usize).map_or("?", String::as_str);
        let mut out = format!("seed {}, virtual time {:?}, last packets:\n", self.seed, self.now());
        for e in entries {
            let words = match &formatter {
                Some(f) => f(&e.head),
                None => e.head.iter().take(16).map(|b| format!("{b:02x}")).collect(),
            };
            let dst = e.dst.map_or("nobody", name);
            // Writing to a string does not fail.
            let _ = writeln!(
                out,
                "{:?} {} {} -> {dst} {} {} B {}: {words}",
                e.time,
                name(e.src),
                e.meta.src_qpn,
                e.meta.dst_qpn,
                e.len,
                e.event
            );
        }
        out
    }

    /// The names of the living devices that something is alive on, for leak checks: none when all transports are closed.
    pub fn leaks(&self) -> Vec<String> {
        let devices: Vec<_> = self.net.lock().nodes.iter().filter_map(|n| n.dev.upgrade()).collect();
        let leaky = devices.iter().filter(|d| !d.live().is_zero());
        leaky.map(|d| format!("{}: {:?}", d.attr().name, d.live())).collect()
    }
}

impl fmt::Debug for SimNet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimNet(seed {}, at {:?}, {} in flight)", self.seed, self.now(), self.in_flight())
    }
}

/// A device or peer without a port of its own listens on that of RoCE v2.
pub(super) fn udp_port(port: u16) -> u16 {
    if port == 0 { 4791 } else { port }
}
