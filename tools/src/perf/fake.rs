//! A transport for tests: messages go from one interface's queue to another's inside this process, and a fault may spoil
//! them on the way.

use std::{
    any::Any,
    collections::{HashMap, VecDeque},
    io::IoSlice,
    num::NonZeroUsize,
    os::fd::RawFd,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use parking_lot::Mutex;
use uct::{
    AmId, AmMessage, Completion, Endpoint, EpParams, Error, ErrorKind, FlushMode, Iface, IfaceAttr, IfaceParams,
    Interface, Md, MemRegion, MemSlice, Posted, Registry, Result, SendError, SendResult, Time, Worker,
    am::{AmHandler, AmHome, DescPool, HandlerKind, HandlerTable},
    config::Env,
    ep::{PendingFn, PendingRefused},
    iface::{Arm, Caps, Counter, Events},
    md::{Component, DeviceResource, MemoryDomain, PortResource, Transport},
    mem::{Buf, Registration},
    worker::WorkerShared,
};

/// Room in a receive queue; a full one answers `NoResource`.
const ROOM: usize = 32;
/// The largest message by copy; short ones are at most 64 bytes.
pub(crate) const MAX: usize = 1000;

/// What becomes of a message.
pub(crate) enum Fate {
    Arrives,
    ArrivesTwice,
    Lost,
}

type Fault = Box<dyn Fn(AmId, &mut Vec<u8>) -> Fate + Send + Sync>;
type Queue = Arc<Mutex<VecDeque<(AmId, Vec<u8>)>>>;

/// The network.
#[derive(Default)]
pub(crate) struct Fabric {
    queues: Mutex<HashMap<u64, Queue>>,
    next: AtomicU64,
    fault: OnceLock<Fault>,
}

impl Fabric {
    pub(crate) fn new() -> Arc<Fabric> {
        Arc::default()
    }

    pub(crate) fn with_fault(fault: impl Fn(AmId, &mut Vec<u8>) -> Fate + Send + Sync + 'static) -> Arc<Fabric> {
        let f = Fabric::new();
        let _ = f.fault.set(Box::new(fault));
        f
    }

    /// A registry with transport `fake` and devices `fake0` (ports 1 and 2) and `broken0`.
    pub(crate) fn registry(self: &Arc<Self>) -> Registry {
        let mut r = Registry::new();
        r.add_component(Arc::new(FakeComponent));
        r.add_transport(Arc::new(FakeTransport(self.clone())));
        r
    }
}

struct FakeComponent;

impl Component for FakeComponent {
    fn name(&self) -> &'static str {
        "fake"
    }
    fn devices(&self, _: &Env) -> Result<Vec<DeviceResource>> {
        let broken = DeviceResource { name: "broken0".into(), unusable: Some("its cable is cut".into()) };
        Ok(vec![broken, DeviceResource { name: "fake0".into(), unusable: None }])
    }
    fn open(&self, device: &str, _: &Env) -> Result<Arc<dyn MemoryDomain>> {
        Ok(Arc::new(FakeMd(device.into())))
    }
}

struct FakeMd(String);

struct NoKey;
impl Registration for NoKey {
    fn lkey(&self) -> u32 {
        0
    }
}

impl MemoryDomain for FakeMd {
    fn device_name(&self) -> String {
        self.0.clone()
    }
    fn mem_alloc(&self, len: usize) -> Result<MemRegion> {
        Ok(MemRegion::new(Buf::alloc(len)?, Box::new(NoKey)))
    }
    fn ports(&self) -> Result<Vec<PortResource>> {
        let port = |port| PortResource { port, active: true, facts: Vec::new() };
        Ok(vec![port(1), port(2)])
    }
    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
    fn counters(&self) -> Vec<Counter> {
        Vec::new()
    }
}

struct FakeTransport(Arc<Fabric>);

impl Transport for FakeTransport {
    fn name(&self) -> &'static str {
        "fake"
    }
    fn aliases(&self) -> &'static [&'static str] {
        &[]
    }
    fn supports(&self, _: &Md) -> Result<(), String> {
        Ok(())
    }
    fn open_iface(&self, md: &Md, worker: &Worker, port: u8, _: &IfaceParams, _: &Env) -> Result<Iface> {
        let id = self.0.next.fetch_add(1, Relaxed);
        let queue = Queue::default();
        self.0.queues.lock().insert(id, queue.clone());
        let mut attr = IfaceAttr::empty("fake", format!("{}:{port}", md.device_name()));
        attr.caps = Caps::CONNECT_TO_IFACE | Caps::CONNECT_TO_EP;
        attr.am.max_short = NonZeroUsize::new(64);
        attr.am.max_bcopy = NonZeroUsize::new(MAX);
        attr.am.max_zcopy = NonZeroUsize::new(MAX);
        attr.am.max_hdr = 8;
        attr.am.max_iov = 1;
        let iface = Arc::new_cyclic(|me| FakeIface {
            me: me.clone(),
            fabric: self.0.clone(),
            worker: worker.shared().clone(),
            attr,
            id,
            queue,
            handlers: HandlerTable::new(),
            home: AmHome { pool: Arc::new(Heap), offset: 0, headroom: 0 },
        });
        Ok(Iface::from_transport(iface))
    }
}

struct Heap;
impl DescPool for Heap {
    fn give_back(&self, _: Buf) {}
}

struct FakeIface {
    me: Weak<FakeIface>,
    fabric: Arc<Fabric>,
    worker: Arc<WorkerShared>,
    attr: IfaceAttr,
    id: u64,
    queue: Queue,
    handlers: HandlerTable,
    home: AmHome,
}

impl FakeIface {
    fn find(&self, addr: &[u8]) -> Result<Queue> {
        let bad = || Error::new(ErrorKind::InvalidAddress, "fake address");
        let id = u64::from_le_bytes(addr.try_into().map_err(|_| bad())?);
        self.fabric.queues.lock().get(&id).cloned().ok_or_else(bad)
    }
}

impl Interface for FakeIface {
    fn attr(&self) -> &IfaceAttr {
        &self.attr
    }
    fn device_address(&self) -> Vec<u8> {
        b"fake".to_vec()
    }
    fn iface_address(&self) -> Vec<u8> {
        self.id.to_le_bytes().to_vec()
    }
    fn is_reachable(&self, device_addr: &[u8]) -> Result<(), String> {
        if device_addr == b"fake" { Ok(()) } else { Err("it is no fake device".into()) }
    }
    fn create_ep(self: Arc<Self>, params: &EpParams) -> Result<Arc<dyn Endpoint>> {
        let peer = OnceLock::new();
        if let Some((_, addr)) = &params.remote {
            let _ = peer.set(self.find(addr)?);
        }
        Ok(Arc::new(FakeEp { iface: self, peer }))
    }
    fn set_am_handler(&self, id: AmId, handler: Option<AmHandler>, kind: HandlerKind) -> Result<()> {
        self.handlers.set(id, handler.map(|h| (h, kind)));
        Ok(())
    }
    fn flush(&self, _: FlushMode, _: Option<&Completion>) -> SendResult<Posted> {
        Ok(Posted::Done)
    }
    fn fence(&self) -> SendResult<()> {
        Ok(())
    }
    fn progress_enable(&self, on: bool) {
        if let Some(me) = self.me.upgrade() {
            let me: Arc<dyn Interface> = me;
            if on { self.worker.add_iface(me) } else { self.worker.remove_iface(&me) }
        }
    }
    fn progress(&self) -> usize {
        let Some((id, data)) = self.queue.lock().pop_front() else { return 0 };
        if let (Some((h, _)), Ok(mut buf)) = (&self.handlers.snapshot()[id.get() as usize], Buf::alloc(data.len())) {
            buf.copy_from_slice(&data);
            h(AmMessage::new(&mut Some(buf), &self.home, data.len(), 0));
        }
        1
    }
    fn progress_async(&self) -> usize {
        0
    }
    fn ring(&self) {}
    fn next_timeout(&self) -> Option<Time> {
        None
    }
    fn arm(&self, _: Events) -> Result<Arm> {
        Err(Error::new(ErrorKind::Unsupported, "fake"))
    }
    fn event_fd(&self) -> Option<RawFd> {
        None
    }
    fn counters(&self) -> Vec<Counter> {
        Vec::new()
    }
    fn close_iface(&self) {
        self.progress_enable(false);
    }
}

struct FakeEp {
    iface: Arc<FakeIface>,
    peer: OnceLock<Queue>,
}

impl FakeEp {
    fn post(&self, id: AmId, mut data: Vec<u8>) -> SendResult<()> {
        let peer = self.peer.get().ok_or(SendError::NoResource)?;
        let mut q = peer.lock();
        if q.len() >= ROOM {
            return Err(SendError::NoResource);
        }
        match self.iface.fabric.fault.get().map_or(Fate::Arrives, |f| f(id, &mut data)) {
            Fate::Arrives => q.push_back((id, data)),
            Fate::ArrivesTwice => q.extend([(id, data.clone()), (id, data)]),
            Fate::Lost => {}
        }
        Ok(())
    }
}

impl Endpoint for FakeEp {
    fn am_short(&self, id: AmId, header: u64, payload: &[u8]) -> SendResult<()> {
        self.post(id, [&header.to_ne_bytes(), payload].concat())
    }
    fn am_short_iov(&self, id: AmId, iov: &[IoSlice<'_>]) -> SendResult<()> {
        self.post(id, iov.iter().flat_map(|s| s.iter().copied()).collect())
    }
    fn am_bcopy(&self, id: AmId, pack: &mut dyn FnMut(&mut [u8]) -> usize) -> SendResult<usize> {
        let mut buf = vec![0; MAX];
        let n = pack(&mut buf);
        buf.truncate(n);
        self.post(id, buf).map(|()| n)
    }
    fn am_zcopy(&self, id: AmId, header: &[u8], iov: &[MemSlice], _: Option<&Completion>) -> SendResult<Posted> {
        let mut m = header.to_vec();
        iov.iter().for_each(|s| m.extend_from_slice(s.bytes()));
        self.post(id, m).map(|()| Posted::Done)
    }
    fn flush(&self, _: FlushMode, comp: Option<&Completion>) -> SendResult<Posted> {
        match comp {
            // Once through the completion, since real transports take that way.
            Some(c) => {
                c.token().settle(Ok(()));
                Ok(Posted::InProgress)
            }
            None => Ok(Posted::Done),
        }
    }
    fn fence(&self) -> SendResult<()> {
        Ok(())
    }
    fn check(&self, _: Option<&Completion>) -> SendResult<Posted> {
        Ok(Posted::Done)
    }
    fn pending_add(&self, request: PendingFn) -> Result<(), PendingRefused> {
        Err(PendingRefused::Busy(request))
    }
    fn pending_purge(&self) -> Vec<PendingFn> {
        Vec::new()
    }
    fn address(&self) -> Result<Vec<u8>> {
        Ok(self.iface.iface_address())
    }
    fn connect(&self, _: &[u8], ep_addr: &[u8]) -> Result<()> {
        let _ = self.peer.set(self.iface.find(ep_addr)?);
        Ok(())
    }
    fn is_connected(&self, _: &[u8], _: &[u8], _: Option<&[u8]>) -> bool {
        self.peer.get().is_some()
    }
    fn invalidate(&self) -> Result<()> {
        Ok(())
    }
    fn id(&self) -> u64 {
        0
    }
    fn user_data(&self) -> u64 {
        0
    }
    fn close_ep(self: Arc<Self>, _: Option<Completion>) {}
    fn destroy_ep(&self) {}
}
