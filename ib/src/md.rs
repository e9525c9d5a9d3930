//! [`Md`]: an open device with what its interfaces share, above all the address-handle cache.

use std::{
    any::Any,
    collections::BTreeMap,
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use parking_lot::Mutex;
use uct::{
    Clock, Error, ErrorKind, MemRegion, Result, Scope,
    fork::Birth,
    iface::Counter,
    md::{MemoryDomain, PortResource},
    mem::{Arena, ArenaLayout, Block, Registration},
};

use crate::{
    ah::{AhCache, AhCacheConfig, AhTtl, AhWaker, Executor},
    config::MdConfig,
    device::{Access, AsyncEvent, Device, LinkLayer, MrKeys, PortAttr, RoceVersion, VerbsError, VerbsResult},
    growth::{Growth, Registered},
    types::Mtu,
};

/// A memory domain on a device of type `D`. Interfaces hold it; it closes with the last of them.
pub struct Md<D: Device> {
    device: Arc<D>,
    ahs: AhCache<D>,
    config: MdConfig,
    clock: Arc<dyn Clock>,
    events: AtomicU64,
    /// A fatal event has come.
    lost: AtomicBool,
    /// See [`Md::keep`].
    kept: OnceLock<Box<dyn Any + Send + Sync>>,
    /// Ports as they were when somebody last had reason to look.
    ports: Arc<Mutex<BTreeMap<u8, VerbsResult<PortAttr>>>>,
    born: Birth,
}

impl<D: Device> Md<D> {
    /// A domain on `device`. With `Executor::Manual` nothing happens by itself: the owner drives [`Md::ah_cache`].
    pub fn new(device: Arc<D>, config: MdConfig, clock: Arc<dyn Clock>, executor: Executor) -> Arc<Self> {
        let ah_config = AhCacheConfig {
            ttl: AhTtl::from_duration(config.ah_cache_ttl),
            idle_max: config.ah_cache_max as usize,
            executor,
            ..AhCacheConfig::default()
        };
        let ahs = AhCache::new(device.clone(), ah_config, clock.clone());
        Arc::new(Md {
            device,
            ahs,
            config,
            clock,
            events: AtomicU64::new(0),
            lost: AtomicBool::new(false),
            kept: OnceLock::new(),
            ports: Arc::default(),
            born: Birth::here(),
        })
    }

    /// The device.
    pub fn device(&self) -> &Arc<D> {
        &self.device
    }

    /// The address-handle cache, shared by all interfaces of the domain.
    pub fn ah_cache(&self) -> &AhCache<D> {
        &self.ahs
    }

    /// The domain's settings.
    pub fn config(&self) -> &MdConfig {
        &self.config
    }

    /// The domain's clock.
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    /// Takes the device's async events and lets the AH cache act on them. Interfaces call it now and then from `progress`; it
    /// never sleeps: where reading a GID table may, that is done by the domain's thread.
    pub fn poll_events(&self) {
        if !self.config.async_events {
            return;
        }
        while let Some(event) = self.device.poll_async_event() {
            let what = self.ahs.handle_event(&event);
            tracing::debug!("{}: {event:?}: {what:?}", self.device.attr().name);
            if event == AsyncEvent::DeviceFatal {
                self.lost.store(true, Ordering::Relaxed);
            }
            self.events.fetch_add(1, Ordering::Release);
        }
    }

    /// Changes when an event was handled, or its consequences have become known, so that interfaces look at their address
    /// handles again.
    pub fn event_count(&self) -> u64 {
        self.events.load(Ordering::Acquire).wrapping_add(self.ahs.tables_read())
    }

    /// True once the device has told that it is gone or unusable until it is opened again.
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// # Errors
    /// `NoDevice` once the domain is [lost](Md::is_lost); `UsedAfterFork` in a child.
    pub fn check(&self) -> Result<()> {
        self.born.check()?;
        if !self.is_lost() {
            return Ok(());
        }
        let name = self.device.attr().name;
        let text = format!(
            "{name} is gone, or unusable after a fatal error; drop this domain, and when it is back open it again"
        );
        Err(Error::new(ErrorKind::NoDevice, text).scoped(Scope::Device))
    }

    /// Keeps `guard` until the domain is dropped: what has to end with it, such as a watcher of its address handles. There
    /// is one; a second one is dropped at once.
    pub fn keep(&self, guard: Box<dyn Any + Send + Sync>) {
        // It comes back in the error.
        let _ = self.kept.set(guard);
    }

    /// Asks the device how a port is, in the background where that may sleep, for [`Md::port_trouble`].
    pub fn look_at_port(&self, port: u8) {
        let (device, ports) = (self.device.clone(), self.ports.clone());
        let look = move || {
            let attr = device.query_port(port);
            ports.lock().insert(port, attr);
        };
        match self.ahs.defers() {
            true => self.ahs.run_errand(Box::new(look)),
            false => look(),
        }
    }

    /// What was wrong with a port at the last [`Md::look_at_port`], for an interface whose packets have up to `mtu` bytes.
    /// `None` if nothing was. No system call.
    pub fn port_trouble(&self, port: u8, mtu: Mtu) -> Option<String> {
        match self.ports.lock().get(&port)? {
            Ok(p) if !p.active => Some(format!("port {port} is not active: check cable, switch and `ip link`")),
            Ok(p) if p.active_mtu < mtu => Some(format!(
                "the MTU of port {port} fell from {} to {} bytes while the interface was open, and longer packets are lost: raise \
                 it again, or close and open the interface",
                mtu.bytes(),
                p.active_mtu.bytes()
            )),
            Ok(_) => None,
            Err(e) => Some(format!("port {port}: {e}")),
        }
    }

    /// Makes buffers and registers them as one region.
    ///
    /// # Errors
    /// `NoMemory` names the limit in force.
    pub fn register_arena(&self, layout: ArenaLayout, access: Access) -> Registered {
        register_arena(&self.device, layout, access)
    }

    /// As [`Md::register_arena`], but where it may sleep it is done in the background, and the result waits in what is
    /// returned. `wake` is called when it is there.
    pub fn register_later(&self, layout: ArenaLayout, access: Access, wake: AhWaker) -> Growth {
        let (growth, promise) = Growth::new(wake);
        let device = self.device.clone();
        let register = move || promise.keep(register_arena(&device, layout, access));
        match self.ahs.defers() {
            true => self.ahs.run_errand(Box::new(register)),
            false => register(),
        }
        growth
    }
}

fn register_arena<D: Device>(device: &Arc<D>, layout: ArenaLayout, access: Access) -> Registered {
    let (arena, bufs) = Arena::new(layout)?;
    let registration = register(device, arena.block(), access)?;
    arena.set_lkey(registration.keys.lkey);
    Ok((bufs, Box::new(registration)))
}

fn register<D: Device>(device: &Arc<D>, block: &Arc<Block>, access: Access) -> Result<MrRegistration<D>> {
    let keys = device.reg_mr(block, access).map_err(|e| {
        let name = device.attr().name;
        Error::new(
            if e.errno == libc::ENOMEM { ErrorKind::NoMemory } else { ErrorKind::Io },
            format!("{name}: registering {} bytes failed in {}{}", block.len(), e.call, memlock_hint(&e)),
        )
        .with_errno(e.errno)
    })?;
    Ok(MrRegistration { device: device.clone(), keys, _block: block.clone(), born: Birth::here() })
}

impl<D: Device> fmt::Debug for Md<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Md({})", self.device.attr().name)
    }
}

impl<D: Device> Drop for Md<D> {
    fn drop(&mut self) {
        if self.born.is_here() {
            self.ahs.close();
        } else {
            // The parent's: nothing of it must end here, see `uct::fork`.
            std::mem::forget((self.device.clone(), self.ahs.clone(), self.kept.take()));
        }
    }
}

/// What to do about a failed verbs call that pins memory.
pub fn memlock_hint(e: &VerbsError) -> String {
    if e.errno != libc::ENOMEM {
        return String::new();
    }
    let limit = std::fs::read_to_string("/proc/self/limits")
        .ok()
        .and_then(|s| s.lines().find(|l| l.starts_with("Max locked memory")).map(str::to_string));
    let soft = limit.as_deref().and_then(|l| l.split_whitespace().nth(3)).unwrap_or("unknown");
    format!(
        "; the locked-memory limit of this process is {soft} bytes (ulimit -l; in containers --ulimit memlock=-1, in batch \
         systems the daemon's limit counts)"
    )
}

struct MrRegistration<D: Device> {
    device: Arc<D>,
    keys: MrKeys,
    _block: Arc<Block>,
    born: Birth,
}

impl<D: Device> Registration for MrRegistration<D> {
    fn lkey(&self) -> u32 {
        self.keys.lkey
    }

    fn device(&self) -> usize {
        Arc::as_ptr(&self.device).addr()
    }
}

impl<D: Device> Drop for MrRegistration<D> {
    fn drop(&mut self) {
        if !self.born.is_here() {
            // In a child it is not ours to give back.
            std::mem::forget(self.device.clone());
            return;
        }
        if let Err(e) = self.device.dereg_mr(self.keys) {
            // After a fatal event destroy calls fail; the memory is given back all the same.
            tracing::debug!("deregistering lkey {:#x}: {e}", self.keys.lkey);
        }
    }
}

impl<D: Device> MemoryDomain for Md<D> {
    fn device_name(&self) -> String {
        self.device.attr().name
    }

    fn mem_alloc(&self, len: usize) -> Result<MemRegion> {
        let layout = ArenaLayout { count: 1, len, front: 0, align: 4096, align_offset: 0 };
        let (mut bufs, registration) = self.register_arena(layout, Access::LOCAL_WRITE)?;
        let buf = bufs.pop().ok_or_else(|| Error::new(ErrorKind::NoMemory, "no buffer"))?;
        Ok(MemRegion::new(buf, registration))
    }

    fn ports(&self) -> Result<Vec<PortResource>> {
        let attr = self.device.attr();
        let fail = |e: VerbsError| {
            Error::new(ErrorKind::Io, format!("{}: {}", attr.name, e.call)).with_errno(e.errno).scoped(Scope::Device)
        };
        (1..=attr.port_count)
            .map(|port| {
                let p = self.device.query_port(port).map_err(fail)?;
                let mut facts = vec![
                    (
                        "link layer",
                        match p.link_layer {
                            LinkLayer::Ethernet => "Ethernet".to_string(),
                            LinkLayer::InfiniBand => "InfiniBand".to_string(),
                        },
                    ),
                    ("mtu", format!("{} bytes", p.active_mtu.bytes())),
                ];
                if p.link_layer == LinkLayer::InfiniBand {
                    facts.push(("lid", format!("{:#x}", p.lid.0)));
                }
                for g in self.device.query_gids(port).map_err(fail)? {
                    let version = match g.version {
                        RoceVersion::V1 => " RoCE v1",
                        RoceVersion::V2 => " RoCE v2",
                        RoceVersion::Unknown => " RoCE version unknown",
                    };
                    let version = if p.link_layer == LinkLayer::Ethernet { version } else { "" };
                    let netdev = g.netdev.map(|n| format!(" on {n}")).unwrap_or_default();
                    facts.push(("gid", format!("[{}] {}{version}{netdev}", g.index, g.gid)));
                }
                Ok(PortResource { port, active: p.active, facts })
            })
            .collect()
    }

    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }

    fn counters(&self) -> Vec<Counter> {
        let s = self.ahs.stats();
        let c = |name, value| Counter { name, value };
        vec![
            c("ah.hits", s.hits),
            c("ah.misses", s.misses),
            c("ah.created", s.created),
            c("ah.destroyed", s.destroyed),
            c("ah.evicted", s.evicted),
            c("ah.expired", s.expired),
            c("ah.invalidated", s.invalidated),
            c("ah.failed", s.failed),
            c("ah.live", s.live as u64),
            c("ah.held", s.held as u64),
            c("ah.idle", s.idle as u64),
        ]
    }
}
