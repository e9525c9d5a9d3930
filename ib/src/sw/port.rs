//! A port and its GID table, which tests and address changes move, and the queue of async events.

use std::{
    collections::VecDeque,
    sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
};

use parking_lot::Mutex;

use crate::{
    device::{AhAttr, AsyncEvent, GidEntry, LinkLayer, PortAttr, RoceVersion, VerbsError, VerbsResult},
    types::{Gid, Lid, Mtu, PKey},
};

/// Async events that wait to be polled. Bounded: an event that waits already is not queued again, and past
/// [`AsyncQueue::MAX`] the oldest is lost, as on hardware.
#[derive(Debug, Default)]
pub struct AsyncQueue {
    events: Mutex<VecDeque<AsyncEvent>>,
    some: AtomicBool,
}

impl AsyncQueue {
    /// The bound.
    pub const MAX: usize = 1024;

    /// Adds an event.
    pub fn push(&self, event: AsyncEvent) {
        let mut q = self.events.lock();
        if q.contains(&event) {
            return;
        }
        if q.len() == Self::MAX {
            q.pop_front();
        }
        q.push_back(event);
        self.some.store(true, Ordering::Release);
    }

    /// The oldest event. One load if there is none.
    pub fn pop(&self) -> Option<AsyncEvent> {
        if !self.some.load(Ordering::Acquire) {
            return None;
        }
        let mut q = self.events.lock();
        let event = q.pop_front();
        self.some.store(!q.is_empty(), Ordering::Release);
        event
    }
}

/// What a port starts with.
#[derive(Clone, Debug)]
pub struct PortConfig {
    /// Its number, from 1.
    pub port: u8,
    /// Its kind of network.
    pub link_layer: LinkLayer,
    /// MTU in force.
    pub mtu: Mtu,
    /// Local identifier (InfiniBand).
    pub lid: Lid,
    /// The GIDs, at the first indexes of the table.
    pub gids: Vec<(Gid, RoceVersion)>,
    /// Length of the GID table, 1 to 255.
    pub gid_table_len: usize,
    /// The network interface to show with each GID.
    pub netdev: Option<String>,
    /// Bandwidth in bytes per second, 0 if unknown.
    pub bandwidth_bps: f64,
}

#[derive(Debug)]
struct Inner {
    active: bool,
    lid: Lid,
    pkeys: Vec<PKey>,
    /// The entry and its own number, which no other entry ever has.
    gids: Vec<Option<(u64, GidEntry)>>,
    next_index: usize,
    next_id: u64,
    netdev: Option<String>,
}

/// A port. Changes queue the async events that hardware sends.
#[derive(Debug)]
pub struct PortState {
    port: u8,
    link_layer: LinkLayer,
    bandwidth_bps: f64,
    inner: Mutex<Inner>,
    /// Moves when an entry goes; see [`GidRef`].
    generation: AtomicU64,
    mtu: AtomicUsize,
    active: AtomicBool,
}

/// A hold on one entry of the GID table, as an address handle has it: dead for good once that entry was removed, even if
/// the same GID is added again.
#[derive(Debug)]
pub struct GidRef {
    gid: Gid,
    id: u64,
    /// The generation of the table at which the entry was last seen.
    seen: AtomicU64,
}

impl GidRef {
    /// The GID.
    pub fn gid(&self) -> Gid {
        self.gid
    }
}

impl PortState {
    /// The port of a configuration, ACTIVE. GIDs beyond the table's length are left out.
    pub fn new(cfg: PortConfig) -> Self {
        let len = cfg.gid_table_len.clamp(1, 255);
        let inner = Inner {
            active: true,
            lid: cfg.lid,
            pkeys: vec![PKey::DEFAULT],
            gids: vec![None; len],
            next_index: 0,
            next_id: 1,
            netdev: cfg.netdev,
        };
        let port = PortState {
            port: cfg.port,
            link_layer: cfg.link_layer,
            bandwidth_bps: cfg.bandwidth_bps,
            inner: Mutex::new(inner),
            generation: AtomicU64::new(1),
            mtu: AtomicUsize::new(cfg.mtu.bytes()),
            active: AtomicBool::new(true),
        };
        for (gid, version) in cfg.gids {
            port.insert_gid(gid, version);
        }
        port
    }

    /// Its number.
    pub fn number(&self) -> u8 {
        self.port
    }

    /// `EINVAL` of `call` unless `port` is this one.
    ///
    /// # Errors
    /// As said.
    pub fn check_number(&self, call: &'static str, port: u8) -> VerbsResult<()> {
        if port == self.port { Ok(()) } else { Err(VerbsError::new(call, libc::EINVAL)) }
    }

    /// The MTU in bytes. One load.
    pub fn mtu_bytes(&self) -> usize {
        self.mtu.load(Ordering::Relaxed)
    }

    /// True if ACTIVE. One load.
    pub fn is_active(&self) -> bool {
        self.active.load(Ordering::Relaxed)
    }

    /// What the port tells about itself.
    pub fn attr(&self) -> PortAttr {
        let inner = self.inner.lock();
        PortAttr {
            active: inner.active,
            link_layer: self.link_layer,
            active_mtu: Mtu::at_most(self.mtu_bytes()).unwrap_or(Mtu::M256),
            lid: inner.lid,
            lmc: 0,
            pkeys: inner.pkeys.clone(),
            gid_table_len: inner.gids.len(),
            bandwidth_bps: self.bandwidth_bps,
        }
    }

    /// The partition key of an index.
    pub fn pkey(&self, index: u16) -> Option<PKey> {
        self.inner.lock().pkeys.get(usize::from(index)).copied()
    }

    /// The valid entries, by index.
    pub fn gids(&self) -> Vec<GidEntry> {
        self.inner.lock().gids.iter().flatten().map(|(_, e)| e.clone()).collect()
    }

    /// True if the GID is in the table.
    pub fn has_gid(&self, gid: Gid) -> bool {
        self.inner.lock().gids.iter().flatten().any(|(_, e)| e.gid == gid)
    }

    /// Takes hold of a GID's entry. Does not look at the RoCE version.
    ///
    /// # Errors
    /// `ENODATA`, of `create_ah`, if the GID is not in the table.
    pub fn hold_gid(&self, gid: Gid) -> VerbsResult<GidRef> {
        let inner = self.inner.lock();
        let entry = inner.gids.iter().flatten().find(|(_, e)| e.gid == gid);
        let (id, _) = entry.ok_or(VerbsError::new("create_ah", libc::ENODATA))?;
        Ok(GidRef { gid, id: *id, seen: AtomicU64::new(self.generation.load(Ordering::Acquire)) })
    }

    /// True while the entry is in the table. Two loads, unless an entry went since the last call.
    #[inline]
    pub fn is_alive(&self, held: &GidRef) -> bool {
        held.seen.load(Ordering::Relaxed) == self.generation.load(Ordering::Acquire) || self.look_again(held)
    }

    #[cold]
    fn look_again(&self, held: &GidRef) -> bool {
        let inner = self.inner.lock();
        let alive = inner.gids.iter().flatten().any(|(id, _)| *id == held.id);
        if alive {
            held.seen.store(self.generation.load(Ordering::Acquire), Ordering::Relaxed);
        }
        alive
    }

    /// Checks of `create_ah` that need no network, and the hold on the local GID. `None` for an address without GRH on
    /// InfiniBand.
    ///
    /// # Errors
    /// `EINVAL`: wrong port, service level above 15, no GRH on Ethernet, a destination that is zero or of the other
    /// IP version than the local GID. `ENODATA`: the local GID is not in the table.
    pub fn check_ah(&self, attr: &AhAttr) -> VerbsResult<Option<GidRef>> {
        const EINVAL: VerbsError = VerbsError::new("create_ah", libc::EINVAL);
        self.check_number("create_ah", attr.port)?;
        if attr.sl > 15 {
            return Err(EINVAL);
        }
        match (&attr.grh, self.link_layer) {
            (None, LinkLayer::Ethernet) => Err(EINVAL),
            (None, LinkLayer::InfiniBand) if attr.dlid == Lid(0) => Err(EINVAL),
            (None, LinkLayer::InfiniBand) => Ok(None),
            (Some(g), link) => {
                if !g.dgid.is_valid() || link == LinkLayer::Ethernet && g.dgid.is_ipv4() != g.sgid.is_ipv4() {
                    return Err(EINVAL);
                }
                self.hold_gid(g.sgid).map(Some)
            }
        }
    }

    fn insert_gid(&self, gid: Gid, version: RoceVersion) -> Option<u8> {
        let mut inner = self.inner.lock();
        if inner.gids.iter().flatten().any(|(_, e)| e.gid == gid && e.version == version) {
            return None;
        }
        let len = inner.gids.len();
        // Next fit: a GID that comes back is found at another index, as in the kernel while handles hold the old one.
        let index = (0..len).map(|i| (inner.next_index + i) % len).find(|&i| inner.gids[i].is_none())?;
        inner.next_index = (index + 1) % len;
        let id = inner.next_id;
        inner.next_id += 1;
        let entry = GidEntry { index: index as u8, gid, version, netdev: inner.netdev.clone() };
        inner.gids[index] = Some((id, entry));
        Some(index as u8)
    }

    /// Adds a GID, with a `GidChange` event. Answers its index, or `None` (and no event) if it is there already or the
    /// table is full.
    pub fn add_gid(&self, gid: Gid, version: RoceVersion, events: &AsyncQueue) -> Option<u8> {
        let index = self.insert_gid(gid, version)?;
        events.push(AsyncEvent::GidChange(self.port));
        Some(index)
    }

    /// Removes all entries of a GID, with a `GidChange` event. Answers whether there was one. A send through an address
    /// handle that holds one now fails and puts its queue pair into ERROR.
    pub fn remove_gid(&self, gid: Gid, events: &AsyncQueue) -> bool {
        let mut inner = self.inner.lock();
        let mut found = false;
        for slot in &mut inner.gids {
            if slot.as_ref().is_some_and(|(_, e)| e.gid == gid) {
                *slot = None;
                found = true;
            }
        }
        if found {
            self.generation.fetch_add(1, Ordering::Release);
            drop(inner);
            events.push(AsyncEvent::GidChange(self.port));
        }
        found
    }

    /// Takes the port up or down, with `PortActive` or `PortError` if that is a change.
    pub fn set_active(&self, active: bool, events: &AsyncQueue) {
        let was = std::mem::replace(&mut self.inner.lock().active, active);
        self.active.store(active, Ordering::Relaxed);
        if was != active {
            let event = if active { AsyncEvent::PortActive } else { AsyncEvent::PortError };
            events.push(event(self.port));
        }
    }

    /// Gives the port another LID, with a `LidChange` event.
    pub fn set_lid(&self, lid: Lid, events: &AsyncQueue) {
        self.inner.lock().lid = lid;
        events.push(AsyncEvent::LidChange(self.port));
    }

    /// Replaces the partition table, with a `PkeyChange` event. Queue pairs that exist keep the key they have.
    pub fn set_pkeys(&self, pkeys: Vec<PKey>, events: &AsyncQueue) {
        self.inner.lock().pkeys = pkeys;
        events.push(AsyncEvent::PkeyChange(self.port));
    }

    /// Changes the MTU in force.
    pub fn set_mtu(&self, mtu: Mtu) {
        self.mtu.store(mtu.bytes(), Ordering::Relaxed);
    }
}
