//! Opening, describing and closing a UD interface.

use std::{collections::VecDeque, num::NonZeroUsize, os::fd::RawFd, sync::Arc, time::Duration};

use hashbrown::HashMap;
use ib::{
    addr::{DeviceAddr, IfaceAddr},
    ah::{AhWaker, Origin},
    config::IfaceConfig,
    device::{Access, ArmFor, ArmResult, Device, GRH_LEN, QpInit, QueueLimits, UdQp, VerbsError},
    md::Md,
    types::{Mtu, QKey},
};
use uct::{
    AmId, Blame, Completion, Endpoint, EpParams, Error, ErrorKind, FlushMode, Iface, IfaceAttr, IfaceParams, Posted,
    Result, Scope, SendError, SendResult, Time, Worker,
    am::{AmHandler, AmHome, HandlerKind, HandlerTable},
    iface::{Arm, Caps, Counter, Events, Interface},
    mem::ArenaLayout,
    sync::{AtomicBool, AtomicU32, AtomicU64, Mutex, Ordering},
    time::NearClock,
};

use crate::{
    config::UdConfig,
    core::{Core, Counters, Limits, Live, State},
    deliver::{Delivery, Later, ThreadMark},
    ep::new_shared,
    gids::OwnGids,
    live::{FEATURES, peer_caps},
    op::{MAX_SGE, NETH_LEN, Op},
    pools::{Pool, Returns, SMALL_LEN},
    port::PortWatch,
    proto::{ConnectOutcome, Engine, EngineConfig, EpStateView, Features, FlushOutcome, Refused},
    tx::Tx,
    wake::UserWake,
};

/// What UCX's transport of the same wire format is called.
pub const TRANSPORT: &str = "ud_verbs";

/// What a port counts for that does not tell its speed: 10 Gbit/s.
const UNKNOWN_BANDWIDTH_BPS: f64 = 1.25e9;

/// UCX's zero-copy descriptor: the limit for headers leaves room for it.
const ZCOPY_DESC_LEN: usize = 136;

/// Settings that have no environment variable: for tests, and for restarting at a known state.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Tuning {
    /// Seed of everything random; drawn from the system if absent.
    pub seed: Option<u64>,
    /// First endpoint id.
    pub first_ep_id: Option<u32>,
    /// First PSN of every endpoint, 1 on the wire; both sides must agree.
    pub initial_psn: Option<u16>,
    /// First connection number towards each peer.
    pub first_conn_sn: Option<u32>,
    /// Tells this process from an earlier one at the same address.
    pub incarnation: Option<u64>,
    /// Extensions to offer; all of them if absent.
    pub features: Option<Features>,
    /// Endpoints made by strangers' requests that nobody claims; 65,536 if absent.
    pub passive_max: Option<usize>,
    /// Messages beyond gaps that are kept, over all endpoints, until the gap is closed; 8192 if absent. What comes beyond
    /// the bound is dropped, and the peer sends it again.
    pub held_max: Option<usize>,
}

/// Opens a UD interface on port `port` of the domain's device.
///
/// # Errors
/// `NoDevice` if the port cannot be used, with the reason; `InvalidConfig` for settings that contradict each other or the
/// device; `InvalidParam` for parameters; `NoMemory` and `Io` if the device refuses a queue or memory.
pub fn open<D: Device>(
    md: &Arc<Md<D>>,
    worker: &Worker,
    port: u8,
    params: &IfaceParams,
    iface_config: IfaceConfig,
    config: UdConfig,
    tuning: &Tuning,
) -> Result<Iface> {
    let core = Core::open(md, worker, port, params, iface_config, config, tuning)?;
    tracing::info!("using {}: {}", core.name(), core.port);
    Ok(Iface::from_transport(core))
}

fn alignment(params: &IfaceParams) -> Result<(usize, usize)> {
    let bad = |text| Err(Error::new(ErrorKind::InvalidParam, text));
    let (align, offset) = (params.am_alignment, params.am_align_offset);
    if align == 0 {
        return if offset == 0 {
            // By default the GRH area starts on a cache line.
            Ok((64, 0))
        } else {
            bad(format!("am_align_offset {offset} without am_alignment"))
        };
    }
    if !align.is_power_of_two() || align > 1 << 20 {
        return bad(format!("am_alignment {align}: a power of two, at most 1 MiB"));
    }
    if offset >= align {
        return bad(format!("am_align_offset {offset}: less than am_alignment {align}"));
    }
    Ok((align, GRH_LEN + NETH_LEN + offset))
}

/// A random number from the system, without a dependency: hasher keys come from the kernel's generator.
fn random_u64() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::hash::RandomState::new().build_hasher().finish()
}

impl<D: Device> Core<D> {
    pub(crate) fn open(
        md: &Arc<Md<D>>,
        worker: &Worker,
        port: u8,
        params: &IfaceParams,
        iface_config: IfaceConfig,
        config: UdConfig,
        tuning: &Tuning,
    ) -> Result<Arc<Self>> {
        let device = md.device();
        md.check()?;
        worker.check()?;
        let mut port = ib::gid::local_port(&**device, port, md.config(), &iface_config)?;
        let name = format!("{}:{}", port.device, port.port);
        let (align, align_offset) = alignment(params)?;
        crate::config::check_iface(&iface_config)?;

        let init = QpInit {
            port: port.port,
            pkey_index: port.pkey_index,
            qkey: QKey::UCX,
            send_depth: iface_config.tx_queue_len,
            recv_depth: iface_config.rx_queue_len,
            send_sge: (iface_config.tx_min_sge + 1).min(MAX_SGE as u32),
            inline_len: iface_config.tx_min_inline.0 as usize as u32,
        };
        let qp = device.create_ud_qp(&init).map_err(|e| qp_error(&name, &init, device.queue_limits(), &e))?;
        let caps = qp.caps();

        let max_packet = port.path_mtu.bytes().min(iface_config.seg_size.0 as usize);
        // Peers are told no more than what receive buffers hold, and the buffers hold what they are told.
        port.path_mtu = Mtu::at_least(max_packet).map_or(port.path_mtu, |m| m.min(port.path_mtu));
        let limits = Limits {
            short: (caps.inline_len as usize).min(SMALL_LEN).saturating_sub(NETH_LEN).min(max_packet - NETH_LEN),
            bcopy: max_packet - NETH_LEN,
            zcopy: max_packet - NETH_LEN,
            hdr: (max_packet + GRH_LEN).saturating_sub(NETH_LEN + ZCOPY_DESC_LEN).min(max_packet - NETH_LEN),
            iov: (caps.send_sge as usize).saturating_sub(1).min(MAX_SGE - 2),
        };
        let incarnation = tuning.incarnation.unwrap_or_else(random_u64);
        let features = tuning.features.unwrap_or(Features::all());
        let device_addr = port.device_addr(incarnation, wire_features(features));
        let mut attr = describe(&name, &port, &device_addr, &limits, &caps);
        // Loopback has no speed to report; libraries divide by this.
        let speed = device.query_port(port.port).map_or(0.0, |p| p.bandwidth_bps);
        attr.bandwidth_bps = if speed > 0.0 { speed } else { UNKNOWN_BANDWIDTH_BPS };

        let mut engine_config = EngineConfig {
            local_qpn: qp.qpn().get(),
            device_addr: device_addr.to_bytes(),
            max_packet,
            timeout: config.timeout,
            timer_tick: config.timer_tick,
            timer_backoff: config.timer_backoff,
            linger: config.linger_timeout,
            min_poke: config.min_poke_time,
            max_window: config.max_window as u16,
            passive_max: tuning.passive_max.unwrap_or(65_536),
            rx_budget: port.soft.map_or(0, |s| s.rx_budget),
            features,
            incarnation,
            seed: tuning.seed.unwrap_or_else(random_u64),
            first_ep_id: tuning.first_ep_id,
            ..EngineConfig::default()
        };
        if let Some(psn) = tuning.initial_psn {
            engine_config.initial_psn = psn;
        }
        if let Some(sn) = tuning.first_conn_sn {
            engine_config.first_conn_sn = sn;
        }
        let engine = Engine::new(engine_config)?;

        let front = params.rx_headroom.saturating_sub(GRH_LEN + NETH_LEN);
        let rx_layout = ArenaLayout { count: 1, len: port.path_mtu.bytes() + GRH_LEN, front, align, align_offset };
        let tx_layout = |len| ArenaLayout { count: 1, len, front: 0, align: 64, align_offset: 0 };
        let gids = device.query_gids(port.port).map_err(|e| open_error(&name, "GID table", &e))?;

        let resolutions = Arc::new(AtomicBool::new(false));
        let user_wake = Arc::new(UserWake::default());
        let (flag, wake, thread) = (resolutions.clone(), user_wake.clone(), worker.shared().clone());
        let waker: AhWaker = Arc::new(move || {
            flag.store(true, Ordering::SeqCst);
            wake.wake();
            thread.kick();
        });
        let returns = Returns::new();
        let am_home = AmHome { pool: returns.clone(), offset: GRH_LEN + NETH_LEN, headroom: params.rx_headroom };
        let depth = iface_config.tx_queue_len;
        let first = config.rx_queue_len_init.min(iface_config.rx_queue_len) as usize;
        let live = Live {
            now: worker.clock().now(),
            engine,
            tx: Tx::new(caps, depth),
            qp,
            small: Pool::new("small send", tx_layout(SMALL_LEN), Access::LOCAL_WRITE, 1024, usize::MAX),
            large: Pool::new("send", tx_layout(max_packet), Access::LOCAL_WRITE, 256, usize::MAX),
            rx: Pool::new("receive", rx_layout, Access::LOCAL_WRITE, 1024, iface_config.rx_max_bufs as usize),
            rx_posted: 0,
            rx_target: 0,
            rx_low: 0,
            eps: HashMap::new(),
            pending: Default::default(),
            resolving: Vec::new(),
            flushes: Vec::new(),
            gids: OwnGids::new(gids.into_iter().map(|g| g.gid).collect()),
            gid_lost: false,
            stuck_quiet_until: Time::ZERO,
            gids_asked: Time::ZERO,
            events_seen: md.event_count(),
            failed: None,
            recovering: None,
            endpoints_failed: false,
            rx_failed: false,
            held: 0,
            held_max: tuning.held_max.unwrap_or(8192),
            wcs: Vec::with_capacity(64),
            post_scratch: Vec::new(),
            ready: VecDeque::new(),
            later: Vec::new(),
            counters: Counters::default(),
            port_watch: PortWatch::default(),
            idle_rounds: 0,
            was_busy: false,
            looked_at: Time::ZERO,
            nudged_at: 0,
            events_polled: worker.clock().now(),
            look_for_events: false,
        };
        let state = State { live: Some(live), delivery: None, delivering_on: None, orphans: Vec::new() };
        let core = Arc::new_cyclic(|me| Core {
            me: me.clone(),
            md: md.clone(),
            worker: worker.shared().clone(),
            clock: NearClock::new(worker.clock().clone()),
            attr,
            port,
            device_addr,
            config,
            iface_config,
            limits,
            handlers: HandlerTable::new(),
            error_handler: Mutex::new(params.error_handler.clone()),
            returns,
            am_home,
            state: Mutex::new(state),
            resolutions,
            waker,
            user_wake,
            warned_ids: AtomicU32::new(0),
            no_handler: AtomicU64::new(0),
            closed: AtomicBool::new(false),
        });
        {
            let mut st = core.state.lock();
            st.delivery = Some(Delivery::new(&core));
            let live = st.live(&core)?;
            if core.md.ah_cache().defers() {
                for pool in [&mut live.small, &mut live.large, &mut live.rx] {
                    pool.ahead(core.waker.clone());
                }
                live.small.prepare(&core.md)?;
                live.large.prepare(&core.md)?;
            }
            live.set_rx_target(&core, first);
            live.rx.grow_by(&core.md, first)?;
            live.refill(&core);
            if let Some(e) = &live.failed {
                return Err(e.clone());
            }
        }
        Ok(core)
    }

    fn arm_device(&self, live: &mut Live<D>, events: Events) -> Result<Arm> {
        live.tx.ring(&mut live.qp);
        // An operation completes when its acknowledgement is received.
        let mut what = ArmFor::RECV;
        what.set(ArmFor::SEND, events.contains(Events::SEND_COMP) && !live.tx.is_idle());
        match live.qp.arm(what) {
            Ok(ArmResult::Armed) => Ok(Arm::Armed),
            Ok(ArmResult::Busy) => Ok(Arm::Busy),
            Err(e) => Err(Error::new(ErrorKind::Unsupported, format!("{}: {}: no events", self.name(), e.call))
                .with_errno(e.errno)),
        }
    }

    /// Everything that is left is settled; the queue pair goes first, then the address handles, then the memory.
    fn close(&self) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Some(me) = self.me.upgrade() {
            let me: Arc<dyn Interface> = me;
            self.worker.remove_iface(&me);
        }
        let mut guard = self.state.lock();
        let st = &mut *guard;
        let Some(mut live) = st.live.take() else { return };
        let in_callback = self.in_callback(st);
        let delivery = st.delivery.take();
        live.now = self.clock.now();
        for ep in live.engine.ep_ids().collect::<Vec<_>>() {
            live.give_up(self, ep, true);
        }
        // What was outstanding has been settled above.
        live.engine.close_all(live.now, |_| {});
        live.pump(self);
        live.tx.ring(&mut live.qp);
        self.returns.close();
        drop(guard);

        let mut later = std::mem::take(&mut live.later);
        let requests = live.pending.purge_all();
        for (token, _) in live.flushes.drain(..) {
            later.push(Later::Settle(token, Err(ErrorKind::Canceled)));
        }
        let Live { qp, tx, engine, resolving, wcs, ready, small, large, rx, .. } = live;
        // What posted sends may name and read, and what receives write, goes after the queue pair: a reset under way keeps both.
        qp.destroy(Box::new((tx, engine, small, large, rx)));
        drop((resolving, wcs, ready));
        if in_callback {
            // As with destroy: nothing of the user's is called inside a callback of his.
            self.state.lock().orphans.append(&mut later);
        }
        self.run_later(later);
        drop(requests);
        // Handlers may hold endpoints of this interface, which hold it. They end last: settling was theirs to see.
        let error_handler = self.error_handler.lock().take();
        drop((self.handlers.clear(), delivery, error_handler));
    }
}

/// Extensions as a device address tells them.
fn wire_features(ours: Features) -> ib::addr::Features {
    let mut wire = ib::addr::Features::empty();
    for (bit, feature) in FEATURES {
        wire.set(bit, ours.contains(feature));
    }
    wire
}

fn open_error(name: &str, what: &str, e: &VerbsError) -> Error {
    let kind = if e.errno == libc_enomem() { ErrorKind::NoMemory } else { ErrorKind::Io };
    Error::new(kind, format!("{TRANSPORT}/{name}: no {what}: {} failed{}", e.call, ib::md::memlock_hint(e)))
        .with_errno(e.errno)
        .scoped(Scope::Interface)
        .blaming(Blame::System)
}

/// Why there is no queue pair, with what the device allows if that may be the reason.
fn qp_error(name: &str, init: &QpInit, limits: QueueLimits, e: &VerbsError) -> Error {
    let error = open_error(name, "queue pair", e);
    let queues = [("UCX_UD_VERBS_TX_QUEUE_LEN", init.send_depth), ("UCX_UD_VERBS_RX_QUEUE_LEN", init.recv_depth)];
    for (knob, depth) in queues {
        if limits.depth > 0 && depth > limits.depth {
            return error.context(format!("{knob}={depth} is more than the {} that the device allows", limits.depth));
        }
    }
    if e.errno == libc_enomem() && limits.qps > 0 {
        return error.context(format!("out of memory, or of the device's {} queue pairs", limits.qps));
    }
    error
}

/// ENOMEM, without a dependency for one number.
const fn libc_enomem() -> i32 {
    12
}

fn describe(
    name: &str,
    port: &ib::gid::LocalPort,
    addr: &DeviceAddr,
    limits: &Limits,
    caps: &ib::device::QpCaps,
) -> IfaceAttr {
    let mut attr = IfaceAttr::empty(TRANSPORT, name.to_string());
    attr.caps = Caps::PENDING
        | Caps::CONNECT_TO_IFACE
        | Caps::CONNECT_TO_EP
        | Caps::EP_CHECK
        | Caps::HANDLER_SYNC
        | Caps::HANDLER_ASYNC
        | Caps::PEER_FAILURE;
    attr.caps.set(Caps::INTER_NODE, !port.gid.gid.is_loopback());
    attr.caps.set(Caps::EVENT_FD, caps.events);
    // The header argument of 8 bytes must fit.
    attr.am.max_short = NonZeroUsize::new(limits.short).filter(|n| n.get() >= 8);
    attr.am.max_bcopy = NonZeroUsize::new(limits.bcopy);
    attr.am.max_zcopy = NonZeroUsize::new(limits.zcopy);
    attr.am.max_hdr = limits.hdr;
    attr.am.max_iov = limits.iov;
    attr.am.opt_zcopy_align = 512;
    attr.am.align_mtu = port.mtu.bytes();
    attr.device_addr_len = addr.packed_len();
    attr.iface_addr_len = IfaceAddr::LEN;
    attr.ep_addr_len = ib::addr::EpAddr::LEN;
    // UCX's estimates: link base, RoCE and UD adders; a soft device adds the kernel's UDP path.
    let soft = if port.soft.is_some() { 5_000 } else { 0 };
    attr.latency = Duration::from_nanos(600 + 200 + 30 + soft);
    attr.overhead = Duration::from_nanos(105);
    attr.num_paths = port.num_paths;
    attr
}

impl<D: Device> Interface for Core<D> {
    fn attr(&self) -> &IfaceAttr {
        &self.attr
    }

    fn device_address(&self) -> Vec<u8> {
        self.device_addr.to_bytes()
    }

    fn iface_address(&self) -> Vec<u8> {
        let mut st = self.state.lock();
        match &mut st.live {
            Some(live) => IfaceAddr { qpn: live.qp.qpn() }.to_bytes().to_vec(),
            None => vec![0; IfaceAddr::LEN],
        }
    }

    fn is_reachable(&self, device_addr: &[u8]) -> Result<(), String> {
        let addr = DeviceAddr::parse(device_addr).map_err(|e| e.to_string())?.0;
        ib::reach::check(&self.port, &addr, &self.iface_config, &ib::reach::KernelRoutes)
            .map_err(|e| e.reason().to_string())
    }

    fn create_ep(self: Arc<Self>, params: &EpParams) -> Result<Arc<dyn Endpoint>> {
        let bad = |what: &str, e: &dyn std::fmt::Display| {
            Error::new(ErrorKind::InvalidAddress, format!("{}: {what}: {e}", self.name()))
        };
        if params.path_index >= self.attr.num_paths.max(1) {
            return Err(Error::new(
                ErrorKind::InvalidParam,
                format!(
                    "{}: path {}: there are {} (UCX_IB_NUM_PATHS)",
                    self.name(),
                    params.path_index,
                    self.attr.num_paths
                ),
            ));
        }
        let remote = match &params.remote {
            None => None,
            Some((dev, iface)) => {
                let addr = DeviceAddr::parse(dev).map_err(|e| bad("device address", &e))?.0;
                let iface = IfaceAddr::parse(iface).map_err(|e| bad("interface address", &e))?;
                Some((addr, iface, ib::addr::ah_attr(&self.port, &addr, params.path_index)?))
            }
        };
        let full = |kind: ErrorKind| {
            Error::new(
                kind,
                format!("{}: no endpoint could be made: out of endpoint ids or connection numbers", self.name()),
            )
        };
        let mut guard = self.state.lock();
        let st = &mut *guard;
        let live = st.live(&self)?;
        if let Some(e) = &live.failed {
            return Err(e.clone());
        }
        live.touch_clock(&self);
        let now = live.now;
        let Some((addr, iface, attr)) = remote else {
            let id = live.engine.create_ep(now).map_err(full)?;
            return Ok(new_shared(&self, live, id, params)?);
        };
        let (id, outcome) = live
            .engine
            .connect_to_iface(now, attr, iface.qpn.get(), params.path_index, peer_caps(&addr))
            .map_err(full)?;
        if outcome == ConnectOutcome::New
            && let Err(e) = live.resolve(&self, id, Origin::Local)
        {
            live.destroy(&self, id);
            live.pump(&self);
            return Err(e);
        }
        let shared = new_shared(&self, live, id, params)?;
        live.pump(&self);
        live.tx.ring(&mut live.qp);
        Ok(shared)
    }

    fn set_am_handler(&self, id: AmId, handler: Option<AmHandler>, kind: HandlerKind) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(self.closed_error());
        }
        let old = self.handlers.set(id, handler.map(|h| (h, kind)));
        // Also out of the table that the next delivery would start with.
        let table = self.state.lock().delivery.as_mut().and_then(|d| d.refresh(self));
        // Dropped here, with no lock held: it is the user's.
        drop((old, table));
        Ok(())
    }

    fn flush(&self, mode: FlushMode, comp: Option<&Completion>) -> SendResult<Posted> {
        let mut guard = self.state.lock();
        let st = &mut *guard;
        let live = st.live(self)?;
        if let Some(e) = &live.failed {
            return Err(e.clone().into());
        }
        if mode == FlushMode::Local && live.has_pending() {
            // Flushed now, they would be missing: as on an endpoint, they go first.
            return Err(SendError::NoResource);
        }
        live.touch_clock(self);
        let now = live.now;
        let mut posted = Posted::Done;
        match mode {
            FlushMode::Remote => {
                let text = format!("{}: flush of remote memory: no remote memory operations here", self.name());
                return Err(Error::new(ErrorKind::Unsupported, text).into());
            }
            FlushMode::Cancel => {
                for ep in live.engine.ep_ids().collect::<Vec<_>>() {
                    if !live.eps.contains_key(&ep) {
                        continue;
                    }
                    live.give_up(self, ep, true);
                }
            }
            FlushMode::Local => {
                let mut lingering = Vec::new();
                for ep in live.engine.ep_ids().collect::<Vec<_>>() {
                    if !live.eps.contains_key(&ep) {
                        // What strangers' endpoints owe is nothing that the user has sent.
                        let is_ours = live.engine.state(ep) == Some(EpStateView::Lingering);
                        if is_ours && live.engine.has_outstanding(ep) {
                            lingering.push(ep);
                        }
                        continue;
                    }
                    let op = Op::Marker { ep, comp: comp.map(Completion::token), closes: false };
                    let mut left = match live.engine.flush(now, ep, op) {
                        Ok(FlushOutcome::InProgress) => {
                            posted = Posted::InProgress;
                            continue;
                        }
                        Ok(FlushOutcome::Done(op)) => op,
                        // A connecting endpoint has accepted nothing; a failed one has settled everything.
                        Err((op, Refused::NoResource | Refused::Failed(_))) => op,
                    };
                    if let Some(token) = left.take_completion() {
                        // The user's handle still counts: this runs nothing.
                        token.settle(Ok(()));
                    }
                }
                if !lingering.is_empty() {
                    posted = Posted::InProgress;
                    if let Some(c) = comp {
                        live.flushes.push((c.token(), lingering));
                    }
                }
            }
        }
        live.pump(self);
        live.tx.ring(&mut live.qp);
        let mut later = Vec::new();
        if mode == FlushMode::Cancel
            && st.delivering_on != Some(ThreadMark::current())
            && let Some(live) = &mut st.live
        {
            std::mem::swap(&mut later, &mut live.later);
        }
        drop(guard);
        self.run_later(later);
        Ok(posted)
    }

    fn fence(&self) -> SendResult<()> {
        // Every endpoint is ordered, and nothing else is promised between endpoints but by flush.
        let mut st = self.state.lock();
        st.live(self)?;
        Ok(())
    }

    fn progress_enable(&self, on: bool) {
        let Some(me) = self.me.upgrade() else { return };
        let dynamic: Arc<dyn Interface> = me.clone();
        if !on {
            self.worker.remove_iface(&dynamic);
            return;
        }
        // Memory is registered with the lock open: the progress thread has none to wait for.
        let target = self.iface_config.rx_queue_len as usize;
        let shortage = |live: &Live<D>| live.rx.shortage(target.saturating_sub(live.rx_posted));
        let (layout, access) = match &self.state.lock().live {
            Some(live) => shortage(live),
            None => return,
        };
        // If there is no memory, progress says so and goes on trying.
        let more = if layout.count > 0 { self.md.register_arena(layout, access).ok() } else { None };
        {
            let mut st = self.state.lock();
            let Some(live) = &mut st.live else { return };
            if let Some((bufs, registration)) = more {
                live.rx.add(bufs, registration);
            }
            live.set_rx_target(self, target);
            live.refill(self);
        }
        self.worker.add_iface(dynamic);
    }

    fn progress(&self) -> usize {
        self.progress_user()
    }

    fn is_async(&self) -> bool {
        self.config.async_progress
    }

    fn progress_async(&self) -> usize {
        self.progress_thread()
    }

    fn ring(&self) {
        if let Some(mut st) = self.state.try_lock()
            && let Some(live) = &mut st.live
        {
            live.tx.ring(&mut live.qp);
        }
    }

    fn next_timeout(&self) -> Option<Time> {
        let st = self.state.lock();
        let live = st.live.as_ref()?;
        live.engine.poll_timeout().into_iter().chain(live.wants_memory_at()).min()
    }

    fn arm(&self, events: Events) -> Result<Arm> {
        let mut guard = self.state.lock();
        let st = &mut *guard;
        let live = st.live(self)?;
        self.user_wake.arm();
        if live.has_user_work() || self.resolutions.load(Ordering::SeqCst) {
            return Ok(Arm::Busy);
        }
        self.arm_device(live, events)
    }

    fn arm_async(&self) -> Option<(RawFd, Arm)> {
        // What waits for the user is no reason for the progress thread to stay awake, nor is the user's fd, which stays
        // readable until he looks.
        let mut guard = self.state.lock();
        let live = guard.live.as_mut()?;
        let fd = live.qp.event_fd()?;
        Some((fd, self.arm_device(live, Events::RECV | Events::SEND_COMP).ok()?))
    }

    fn event_fd(&self) -> Option<RawFd> {
        let st = self.state.lock();
        let live = st.live.as_ref()?;
        self.user_wake.fd(live.qp.event_fd())
    }

    fn counters(&self) -> Vec<Counter> {
        let st = self.state.lock();
        let Some(live) = &st.live else { return Vec::new() };
        let c = |name, value| Counter { name, value };
        let k = &live.counters;
        let mut all = vec![
            c("eps", live.engine.ep_count() as u64),
            c("tx.rings", live.tx.rings),
            c("tx.buffers", (live.small.total() + live.large.total()) as u64),
            c("tx.buffers_free", (live.small.free_count() + live.large.free_count()) as u64),
            c("rx.buffers", live.rx.total() as u64),
            c("rx.buffers_free", live.rx.free_count() as u64),
            c("rx.buffers_posted", live.rx_posted as u64),
            c("rx.waiting", live.ready.len() as u64),
            c("rx.short", k.rx_short),
            c("rx.dgid", k.rx_dgid),
            c("rx.bad_creq", k.rx_bad_creq),
            c("rx.queue_full", k.rx_queue_full),
            c("rx.held_full", k.rx_held_full),
            c("rx.no_memory", live.rx.failures()),
            c("rx.errors", k.rx_errors),
            c("rx.no_handler", self.no_handler.load(Ordering::Relaxed)),
            c("qp.resets", k.qp_resets),
            c("ah.re_resolved", k.re_resolved),
            c("ah.kept", live.tx.links_len() as u64),
        ];
        crate::counters::engine(live.engine.stats(), &mut all);
        all
    }

    fn close_iface(&self) {
        self.close();
    }
}

impl<D: Device> Drop for Core<D> {
    fn drop(&mut self) {
        // Only if the handle was leaked past its drop; closing twice does nothing.
        self.close();
    }
}
