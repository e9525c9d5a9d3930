//! Buffers: send descriptors in two sizes, receive descriptors, and the way home for those that handlers kept.

use std::{sync::Arc, time::Duration};

use ib::{
    ah::AhWaker,
    device::{Access, Device},
    growth::{Growth, Registered},
    md::Md,
};
use uct::{
    Error, Result, Time,
    am::DescPool,
    mem::{ArenaLayout, Buf, Registration},
    sync::{AtomicBool, Mutex, Ordering},
};

/// Bytes of a small send buffer: enough for every control packet, and for short messages.
pub(crate) const SMALL_LEN: usize = 256;

/// After an attempt to grow has failed, the time until the next. It doubles with each failure.
const PAUSE_MIN: Duration = Duration::from_millis(1);

/// The longest such time.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// A growing set of equal, registered buffers.
///
/// Where registering memory may sleep, a pool [grows ahead](Pool::ahead): when few buffers are left more are ordered, and
/// whoever finds none meanwhile is told to come again. Else it grows when there are none.
///
/// Where memory is refused, it is asked for again after a pause, and then after longer ones: a refusal costs a system call, or
/// wakes two threads. Until then whoever finds no buffer is told why.
pub(crate) struct Pool {
    /// What its buffers are for, to name them.
    what: &'static str,
    free: Vec<Buf>,
    layout: ArenaLayout,
    access: Access,
    grow: usize,
    max: usize,
    total: usize,
    /// With so many free buffers or fewer, [`Pool::take`] sees to it that there will be more.
    low: usize,
    /// What is told that ordered buffers are there; `None` if the pool does not grow ahead.
    wake: Option<AhWaker>,
    growing: Option<Growth>,
    /// The last attempt to grow has failed.
    trouble: Option<Trouble>,
    /// Attempts that have failed.
    failures: u64,
    /// Deregistered when the pool goes, after the queue pair.
    registrations: Vec<Box<dyn Registration>>,
}

/// An attempt that has failed.
struct Trouble {
    error: Error,
    pause: Duration,
    /// The next attempt is not before.
    until: Time,
}

impl Pool {
    /// A pool that makes its buffers when they are first needed, `grow` at a time and `max` at most.
    pub(crate) fn new(what: &'static str, layout: ArenaLayout, access: Access, grow: usize, max: usize) -> Self {
        Pool {
            what,
            free: Vec::new(),
            layout,
            access,
            grow,
            max,
            total: 0,
            low: 0,
            wake: None,
            growing: None,
            trouble: None,
            failures: 0,
            registrations: Vec::new(),
        }
    }

    /// Makes it grow ahead from now on: the lock that it is under is never held while memory is registered. `wake` is
    /// called when ordered buffers have come.
    pub(crate) fn ahead(&mut self, wake: AhWaker) {
        self.low = self.grow / 4;
        self.wake = Some(wake);
    }

    /// Takes a buffer, growing if there is none and the limit allows it. `None`: at the limit, or more are ordered.
    ///
    /// # Errors
    /// There is none, and why.
    #[inline]
    pub(crate) fn take<D: Device>(&mut self, md: &Md<D>, now: Time) -> Result<Option<Buf>> {
        if self.free.len() <= self.low {
            self.want(md, now, self.low + 1, self.grow)?;
        }
        Ok(self.free.pop())
    }

    /// Takes a buffer if there are plenty; else [`Pool::take`] knows what to do.
    #[inline(always)]
    pub(crate) fn pop_plenty(&mut self) -> Option<Buf> {
        if self.free.len() <= self.low { None } else { self.free.pop() }
    }

    /// Sees to it that `enough` buffers are free, now or soon, by `count` more if they are not.
    ///
    /// # Errors
    /// There is none, and why.
    #[cold]
    pub(crate) fn want<D: Device>(&mut self, md: &Md<D>, now: Time, enough: usize, count: usize) -> Result<()> {
        if let Some(result) = self.growing.as_ref().and_then(Growth::take) {
            self.growing = None;
            self.take_result(now, result);
        }
        let count = count.min(self.max - self.total);
        let may_try = self.growing.is_none() && self.trouble.as_ref().is_none_or(|t| now >= t.until);
        if self.free.len() < enough && count > 0 && may_try {
            let layout = ArenaLayout { count, ..self.layout };
            match &self.wake {
                Some(wake) => self.growing = Some(md.register_later(layout, self.access, wake.clone())),
                None => self.take_result(now, md.register_arena(layout, self.access)),
            }
        }
        match &self.trouble {
            Some(t) if self.free.is_empty() && self.growing.is_none() => Err(t.error.clone()),
            _ => Ok(()),
        }
    }

    /// What an attempt to grow has come to.
    fn take_result(&mut self, now: Time, result: Registered) {
        match result {
            Ok((bufs, registration)) => {
                if self.trouble.is_some() {
                    tracing::info!("there is memory for {} buffers again, after {} failures", self.what, self.failures);
                }
                self.add(bufs, registration);
            }
            Err(error) => {
                self.failures += 1;
                let pause = self.trouble.as_ref().map_or(PAUSE_MIN, |t| (t.pause * 2).min(PAUSE_MAX));
                if self.trouble.is_none() {
                    tracing::warn!(
                        "no memory for more {} buffers, {} of {} are free: {error}; said once, tried again every {} ms to {} s",
                        self.what,
                        self.free.len(),
                        self.total,
                        PAUSE_MIN.as_millis(),
                        PAUSE_MAX.as_secs()
                    );
                }
                self.trouble = Some(Trouble { error, pause, until: now + pause });
            }
        }
    }

    /// When memory is asked for again, if it was refused and there are fewer than `enough` buffers.
    pub(crate) fn next_attempt(&self, enough: usize) -> Option<Time> {
        let t = self.trouble.as_ref()?;
        (self.free.len() < enough && self.growing.is_none() && self.total < self.max).then_some(t.until)
    }

    /// Adds up to `count` buffers, as far as the limit allows.
    pub(crate) fn grow_by<D: Device>(&mut self, md: &Md<D>, count: usize) -> Result<()> {
        let count = count.min(self.max - self.total);
        if count > 0 {
            let (bufs, registration) = md.register_arena(ArenaLayout { count, ..self.layout }, self.access)?;
            self.add(bufs, registration);
        }
        Ok(())
    }

    /// Makes its first buffers, if it grows ahead: nobody shall find it empty.
    pub(crate) fn prepare<D: Device>(&mut self, md: &Md<D>) -> Result<()> {
        if self.wake.is_some() { self.grow_by(md, self.grow) } else { Ok(()) }
    }

    /// What [`Pool::add`] takes, for `count` buffers more than are free: for who registers them with no lock held.
    pub(crate) fn shortage(&self, count: usize) -> (ArenaLayout, Access) {
        let count = count.saturating_sub(self.free.len()).min(self.max - self.total);
        (ArenaLayout { count, ..self.layout }, self.access)
    }

    /// Adds buffers that were registered elsewhere.
    pub(crate) fn add(&mut self, bufs: Vec<Buf>, registration: Box<dyn Registration>) {
        self.trouble = None;
        self.total += bufs.len();
        self.registrations.push(registration);
        self.free.extend(bufs);
    }

    #[inline(always)]
    pub(crate) fn put(&mut self, buf: Buf) {
        push(&mut self.free, buf);
    }

    /// Buffers that are free, or could be made: as many as the limit leaves, none while there is no memory.
    pub(crate) fn room(&self) -> usize {
        self.free.len() + if self.trouble.is_some() { 0 } else { self.max - self.total }
    }

    /// The free buffers, for batches.
    pub(crate) fn free_mut(&mut self) -> &mut Vec<Buf> {
        &mut self.free
    }

    /// Attempts to grow that have failed, of those that a lack of buffers has caused.
    pub(crate) fn failures(&self) -> u64 {
        self.failures
    }

    pub(crate) fn total(&self) -> usize {
        self.total
    }

    pub(crate) fn free_count(&self) -> usize {
        self.free.len()
    }
}

/// [`Vec::push`] where the vector hardly ever grows: growing is a call that takes `value` over, so that the usual way has
/// nothing to keep in memory for a panic in it.
#[inline(always)]
pub(crate) fn push<T>(to: &mut Vec<T>, value: T) {
    if to.len() == to.capacity() {
        return push_growing(to, value);
    }
    to.push(value);
}

#[cold]
#[inline(never)]
fn push_growing<T>(to: &mut Vec<T>, value: T) {
    to.push(value);
}

/// Where kept receive descriptors come home to, from any thread.
#[derive(Default)]
pub(crate) struct Returns {
    bufs: Mutex<Vec<Buf>>,
    any: AtomicBool,
    closed: AtomicBool,
}

impl Returns {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    /// Moves what came home into `free`.
    #[inline]
    pub(crate) fn drain_into(&self, free: &mut Vec<Buf>) {
        if self.any.load(Ordering::Acquire) {
            self.drain_all(free);
        }
    }

    #[cold]
    fn drain_all(&self, free: &mut Vec<Buf>) {
        let mut bufs = self.bufs.lock();
        self.any.store(false, Ordering::Relaxed);
        free.append(&mut bufs);
    }

    /// From now on buffers are freed instead of kept.
    pub(crate) fn close(&self) {
        let bufs = {
            let mut bufs = self.bufs.lock();
            self.closed.store(true, Ordering::Relaxed);
            std::mem::take(&mut *bufs)
        };
        drop(bufs);
    }
}

impl DescPool for Returns {
    fn give_back(&self, buf: Buf) {
        let mut bufs = self.bufs.lock();
        if !self.closed.load(Ordering::Relaxed) {
            bufs.push(buf);
            self.any.store(true, Ordering::Release);
        }
    }
}

/// As UCX's `test_mpool` tests its pools, with its names.
#[cfg(all(test, not(uct_loom)))]
mod tests {
    use ib::{
        ah::Executor,
        config::MdConfig,
        mock::{Call, MockDevice},
        sim::{SimConfig, SimDevice, SimNet},
    };

    use super::*;

    type Device = MockDevice<SimDevice>;

    fn domain() -> (Arc<Device>, Arc<Md<Device>>) {
        let net = SimNet::new(1, Arc::default());
        let device = MockDevice::new(net.add_device(SimConfig::new("a", std::net::Ipv4Addr::new(10, 0, 0, 1).into())));
        let clock = Arc::new(uct::time::ManualClock::new(uct::Time::ZERO));
        let md = Md::new(device.clone(), MdConfig::default(), clock, Executor::Manual);
        (device, md)
    }

    const NOW: Time = Time::ZERO;

    fn pool(grow: usize, max: usize) -> Pool {
        let layout = ArenaLayout { count: 1, len: 100, front: 0, align: 128, align_offset: 0 };
        Pool::new("test", layout, Access::LOCAL_WRITE, grow, max)
    }

    #[test]
    fn no_allocs() {
        let (device, _md) = domain();
        let p = pool(8, 18);
        assert_eq!((p.total(), p.free_count(), device.calls(Call::RegMr)), (0, 0, 0));
        drop(p);
        assert_eq!(device.leaks(), None);
    }

    /// 18 objects and not one more, aligned, disjoint; for ten rounds the same memory.
    #[test]
    fn basic() {
        let (device, md) = domain();
        let mut p = pool(8, 18);
        let mut seen = std::collections::BTreeSet::new();
        for round in 0..10u8 {
            let mut bufs: Vec<Buf> = (0..18).map(|_| p.take(&md, NOW).unwrap().expect("an object")).collect();
            assert!(p.take(&md, NOW).unwrap().is_none(), "the nineteenth");
            for b in &mut bufs {
                assert_eq!((b.addr() % 128, b.len()), (0, 100));
                seen.insert(b.addr());
                b.fill(round);
            }
            assert!(bufs.iter().all(|b| b.iter().all(|x| *x == round)), "two objects share memory");
            bufs.into_iter().for_each(|b| p.put(b));
            assert_eq!((p.total(), p.free_count()), (18, 18));
        }
        assert_eq!(seen.len(), 18);
        drop(p);
        assert_eq!(device.leaks(), None);
    }

    /// Chunks of 8, 8 and 2: what is grown at a time, up to the limit.
    #[test]
    fn grow_factor1() {
        let (device, md) = domain();
        let mut p = pool(8, 18);
        let (mut totals, mut bufs) = (Vec::new(), Vec::new());
        while let Some(b) = p.take(&md, NOW).unwrap() {
            bufs.push(b);
            if totals.last() != Some(&p.total()) {
                totals.push(p.total());
            }
        }
        assert_eq!(totals, [8, 16, 18]);
        assert_eq!(device.calls(Call::RegMr), 3, "one registration for each chunk");
    }

    #[test]
    fn grow() {
        let (device, md) = domain();
        let mut p = pool(8, 18);
        p.grow_by(&md, 12).unwrap();
        assert_eq!((p.total(), p.free_count(), device.calls(Call::RegMr)), (12, 12, 1));
        p.grow_by(&md, 1000).unwrap();
        assert_eq!(p.total(), 18, "the limit holds for whoever grows it");
        p.grow_by(&md, 1).unwrap();
        assert_eq!(device.calls(Call::RegMr), 2, "at the limit nothing is made");
    }

    /// A chunk comes from the domain, registered; one that cannot be registered changes nothing, and may come later: not at once.
    #[test]
    fn custom_alloc() {
        let (device, md) = domain();
        let mut p = pool(8, 18);
        device.fail_next(Call::RegMr, 12);
        assert!(p.take(&md, NOW).is_err());
        assert_eq!((p.total(), p.free_count(), p.failures()), (0, 0, 1));
        assert_eq!(p.next_attempt(1), Some(NOW + PAUSE_MIN));
        assert!(p.take(&md, NOW + (PAUSE_MIN - Duration::from_nanos(1))).is_err());
        assert_eq!(device.calls(Call::RegMr), 1);
        let b = p.take(&md, NOW + PAUSE_MIN).unwrap().expect("an object");
        assert_eq!(p.next_attempt(usize::MAX), None, "all is well");
        assert_ne!(b.lkey(), 0);
        p.put(b);
        drop(p);
        assert_eq!((device.calls(Call::RegMr), device.calls(Call::DeregMr), device.leaks()), (2, 1, None));
    }

    /// The pauses between attempts double up to a second, and begin small again after a success.
    #[test]
    fn pauses() {
        let (device, md) = domain();
        let mut p = pool(8, 18);
        device.fail_always(Call::RegMr, Some(12));
        let (mut now, mut waits) = (NOW, Vec::new());
        for _ in 0..13 {
            assert!(p.take(&md, now).is_err());
            let next = p.next_attempt(1).expect("a time");
            waits.push(next.since(now).as_millis());
            now = next;
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 1000, 1000]);
        assert_eq!((device.calls(Call::RegMr), p.failures(), p.room()), (13, 13, 0));
        device.clear_scripts();
        let kept: Vec<Buf> = (0..8).map(|_| p.take(&md, now).unwrap().expect("an object")).collect();
        assert_eq!((kept.len(), p.room()), (8, 10));
        device.fail_always(Call::RegMr, Some(12));
        assert!(p.take(&md, now).is_err());
        assert_eq!(p.next_attempt(1), Some(now + PAUSE_MIN));
    }

    /// Kept descriptors come home from any thread; after the end they are freed.
    #[test]
    fn returns() {
        let (_device, md) = domain();
        let mut p = pool(8, 18);
        let home = Returns::new();
        let bufs: Vec<Buf> = (0..8).map(|_| p.take(&md, NOW).unwrap().expect("an object")).collect();
        std::thread::scope(|s| {
            for b in bufs {
                s.spawn(|| home.give_back(b));
            }
        });
        home.drain_into(p.free_mut());
        assert_eq!(p.free_count(), 8);
        let b = p.take(&md, NOW).unwrap().expect("an object");
        home.close();
        home.give_back(b);
        home.drain_into(p.free_mut());
        assert_eq!((p.total(), p.free_count()), (8, 7));
    }
}
