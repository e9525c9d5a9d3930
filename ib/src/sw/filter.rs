//! Hooks on the packets of a device, for tests: they look at a packet and pass, drop, double or hold it.

use std::{
    collections::VecDeque,
    fmt,
    sync::atomic::{AtomicBool, Ordering},
};

use parking_lot::Mutex;

use super::rng::Rng;
use crate::types::{Gid, PKey, QKey, Qpn};

/// All there is to know of a packet but its payload.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct PacketMeta {
    /// Where it comes from. [`Gid::ZERO`] for an InfiniBand packet without GRH.
    pub src_gid: Gid,
    /// Where it goes.
    pub dst_gid: Gid,
    /// UDP port of the sender's device, 0 where there is none.
    pub src_port: u16,
    /// UDP port of the receiver's device, 0 where there is none.
    pub dst_port: u16,
    /// The sending queue pair.
    pub src_qpn: Qpn,
    /// The queue pair it is for.
    pub dst_qpn: Qpn,
    /// Queue key.
    pub qkey: QKey,
    /// Partition key.
    pub pkey: PKey,
    /// It asks to wake the receiver.
    pub solicited: bool,
    /// The device's own: what it must know to bring the packet on its way after a filter held it.
    pub route: u128,
}

/// A packet as a filter sees it.
#[derive(Copy, Clone, Debug)]
pub struct PacketView<'a> {
    /// Its headers.
    pub meta: &'a PacketMeta,
    /// The UD payload.
    pub payload: &'a [u8],
}

/// A packet that a filter let pass.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OwnedPacket {
    /// Its headers.
    pub meta: PacketMeta,
    /// The UD payload.
    pub payload: Vec<u8>,
}

/// What goes on after a filter has seen a packet; see [`FilterSlot::run`].
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Passed {
    /// In this order.
    pub packets: Vec<OwnedPacket>,
    /// True if the packet that was shown is lost; false if it goes on, now or later.
    pub dropped: bool,
}

impl IntoIterator for Passed {
    type Item = OwnedPacket;
    type IntoIter = std::vec::IntoIter<OwnedPacket>;

    /// The packets that go on.
    fn into_iter(self) -> Self::IntoIter {
        self.packets.into_iter()
    }
}

/// What a filter says of a packet.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum FilterVerdict {
    /// Let it go on.
    Pass,
    /// Lose it.
    Drop,
    /// Let it go on twice.
    Duplicate,
    /// Keep it until [`FilterSlot::release`].
    Hold,
    /// Keep it until the next packet has passed: the two change places.
    Swap,
}

/// A hook. It must not touch the device that calls it.
pub type Filter = Box<dyn FnMut(&PacketView<'_>) -> FilterVerdict + Send>;

#[derive(Default)]
struct Inner {
    hook: Option<Filter>,
    held: VecDeque<OwnedPacket>,
    swapped: Option<OwnedPacket>,
    released: Vec<OwnedPacket>,
}

/// The place for one hook in one direction of a device. Costs one load while it is empty.
#[derive(Default)]
pub struct FilterSlot {
    inner: Mutex<Inner>,
    active: AtomicBool,
}

impl FilterSlot {
    /// Packets that can be held; more are dropped.
    pub const HELD_MAX: usize = 4096;

    /// Sets or takes away the hook. What was held or waits for a change of places is released.
    pub fn set(&self, hook: Option<Filter>) {
        let mut inner = self.inner.lock();
        inner.hook = hook;
        self.release_locked(&mut inner);
    }

    /// Lets go of what was held; [`FilterSlot::run`] or [`FilterSlot::drain`] brings it.
    pub fn release(&self) {
        self.release_locked(&mut self.inner.lock());
    }

    fn release_locked(&self, inner: &mut Inner) {
        let held = std::mem::take(&mut inner.held);
        inner.released.extend(held);
        inner.released.extend(inner.swapped.take());
        self.active.store(inner.hook.is_some() || !inner.released.is_empty(), Ordering::Release);
    }

    /// False if packets need not come here.
    #[inline]
    pub fn is_active(&self) -> bool {
        self.active.load(Ordering::Acquire)
    }

    /// Shows a packet to the hook and answers what goes on now: what was released before, this packet 0 to 2 times, and
    /// the one that changes places with it. The caller counts a drop.
    pub fn run(&self, packet: &PacketView<'_>) -> Passed {
        let mut inner = self.inner.lock();
        let mut passed = Passed { packets: self.take_released(&mut inner), dropped: false };
        let out = &mut passed.packets;
        let verdict = inner.hook.as_mut().map_or(FilterVerdict::Pass, |hook| hook(packet));
        let own = || OwnedPacket { meta: *packet.meta, payload: packet.payload.to_vec() };
        match verdict {
            FilterVerdict::Pass => out.push(own()),
            FilterVerdict::Duplicate => out.extend([own(), own()]),
            FilterVerdict::Drop => passed.dropped = true,
            FilterVerdict::Hold if inner.held.len() < Self::HELD_MAX => inner.held.push_back(own()),
            FilterVerdict::Hold => passed.dropped = true,
            // Two in a row: the first has waited long enough.
            FilterVerdict::Swap => out.extend(inner.swapped.replace(own())),
        }
        if matches!(verdict, FilterVerdict::Pass | FilterVerdict::Duplicate) {
            passed.packets.extend(inner.swapped.take());
        }
        passed
    }

    /// What was released and has not gone on yet.
    pub fn drain(&self) -> Vec<OwnedPacket> {
        if !self.is_active() {
            return Vec::new();
        }
        self.take_released(&mut self.inner.lock())
    }

    fn take_released(&self, inner: &mut Inner) -> Vec<OwnedPacket> {
        let out = std::mem::take(&mut inner.released);
        self.active.store(inner.hook.is_some(), Ordering::Release);
        out
    }

    /// Packets that are held, or wait for a change of places.
    pub fn held(&self) -> usize {
        let inner = self.inner.lock();
        inner.held.len() + usize::from(inner.swapped.is_some())
    }
}

impl fmt::Debug for FilterSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FilterSlot(active {}, held {})", self.is_active(), self.held())
    }
}

/// Seeded loss, duplication and reordering as a filter. Probabilities in parts per million.
#[derive(Copy, Clone, Debug, Default)]
pub struct Injector {
    /// The seed: equal seeds and equal packets give equal verdicts.
    pub seed: u64,
    /// Probability of [`FilterVerdict::Drop`].
    pub loss_ppm: u32,
    /// Probability of [`FilterVerdict::Duplicate`].
    pub dup_ppm: u32,
    /// Probability of [`FilterVerdict::Swap`].
    pub reorder_ppm: u32,
}

impl Injector {
    /// The filter.
    pub fn into_filter(self) -> Filter {
        let mut rng = Rng::new(self.seed);
        Box::new(move |_| {
            if rng.chance(self.loss_ppm) {
                FilterVerdict::Drop
            } else if rng.chance(self.dup_ppm) {
                FilterVerdict::Duplicate
            } else if rng.chance(self.reorder_ppm) {
                FilterVerdict::Swap
            } else {
                FilterVerdict::Pass
            }
        })
    }
}
