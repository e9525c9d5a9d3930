use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use uct::{Clock, ErrorKind, Scope};

use super::{testing::*, *};
use crate::device::{AsyncEvent, VerbsError};

const TTL: Duration = Duration::from_secs(10);
const NS: Duration = Duration::from_nanos(1);

fn ready(answer: TryGet<FakeDevice>) -> AhRef<FakeDevice> {
    match answer {
        TryGet::Ready(ah) => ah,
        other => panic!("expected a handle, got {other:?}"),
    }
}

fn pending(answer: TryGet<FakeDevice>) -> PendingAh<FakeDevice> {
    match answer {
        TryGet::Pending(token) => token,
        other => panic!("expected a token, got {other:?}"),
    }
}

fn failed(answer: TryGet<FakeDevice>) -> (uct::Error, Duration) {
    match answer {
        TryGet::Failed { error, retry_after } => (error, retry_after),
        other => panic!("expected a failure, got {other:?}"),
    }
}

const LOCAL: GetOptions<'static> = GetOptions::local("test");
const STRANGER: GetOptions<'static> = GetOptions::stranger("stranger");

impl Rig {
    fn of(ttl: AhTtl) -> Rig {
        Rig::new(FakeDevice::new(false), config(ttl))
    }

    /// A rig whose creations are queued until `run_jobs`.
    fn queued(ttl: AhTtl) -> Rig {
        Rig::new(FakeDevice::new(true), config(ttl))
    }

    fn get(&self, n: u32) -> AhRef<FakeDevice> {
        ready(self.cache.try_get(&key(n), LOCAL))
    }

    fn poll(&self) -> Option<uct::Time> {
        self.cache.poll(self.clock.now())
    }

    /// Ends the rig: every handle the device made must have gone back to it.
    fn end(self) {
        self.cache.close();
        self.poll();
        assert_eq!(self.device.created(), self.device.destroyed(), "created and destroyed");
        let s = self.cache.stats();
        assert_eq!((s.created, s.destroyed), (self.device.created(), self.device.destroyed()));
        assert_eq!((s.live, s.held, s.idle, s.pending), (0, 0, 0, 0));
    }
}

// The contract: get, hold, put.

#[test]
fn get_shares_the_handle_while_somebody_holds_it() {
    for ttl in [AhTtl::Finite(TTL), AhTtl::Infinite] {
        let rig = Rig::of(ttl);
        let a = rig.get(1);
        rig.clock.advance(TTL * 5);
        let b = rig.get(1);
        assert!(a.is_same(&b), "{ttl:?}: a held entry never expires");
        assert_eq!(a.ah().serial, b.ah().serial);
        drop(a);
        rig.clock.advance(TTL * 5);
        rig.poll();
        assert!(rig.device.is_live(b.ah().serial), "{ttl:?}: nor does the timer end it");
        assert_eq!(rig.device.calls(), 1);
        drop(b);
        rig.end();
    }
}

#[test]
fn an_idle_entry_is_reused_until_it_was_idle_for_the_ttl() {
    let rig = Rig::of(AhTtl::Finite(TTL));
    let first = rig.get(1).generation();
    rig.clock.advance(TTL - NS);
    assert_eq!(rig.get(1).generation(), first, "one nanosecond early: reused, and idle from now");
    rig.clock.advance(TTL - NS);
    assert_eq!(rig.get(1).generation(), first, "idle life counts from the last put");
    rig.clock.advance(TTL);
    assert_ne!(rig.get(1).generation(), first, "over: resolved again");
    assert_eq!(rig.cache.stats().expired, 1);
    rig.end();
}

#[test]
fn at_ttl_inf_an_idle_entry_is_reused_for_ever() {
    let rig = Rig::of(AhTtl::Infinite);
    let first = rig.get(1).generation();
    rig.clock.advance(Duration::from_secs(1 << 30));
    assert_eq!(rig.poll(), None, "nothing to wait for");
    assert_eq!(rig.get(1).generation(), first);
    rig.end();
}

#[test]
fn at_ttl_zero_each_get_is_private_and_dies_with_its_last_put() {
    let rig = Rig::of(AhTtl::Bypass);
    let a = rig.get(1);
    let b = rig.get(1);
    assert_ne!(a.generation(), b.generation());
    assert_ne!(a.ah().serial, b.ah().serial);
    let held = a.clone();
    let serial = a.ah().serial;
    drop(a);
    rig.poll();
    assert!(rig.device.is_live(serial), "a second holder keeps it");
    drop(held);
    assert!(rig.device.is_live(serial), "a put never calls the device");
    rig.poll();
    assert!(!rig.device.is_live(serial));
    assert!(rig.device.is_live(b.ah().serial));
    assert_eq!(rig.cache.stats().idle, 0);
    drop(b);
    rig.end();
}

#[test]
fn hold_makes_a_reference_that_is_released_independently() {
    let rig = Rig::of(AhTtl::Finite(TTL));
    let a = rig.get(1);
    let b = a.clone();
    drop(a);
    rig.clock.advance(TTL * 2);
    rig.poll();
    assert!(rig.device.is_live(b.ah().serial));
    assert_eq!(rig.cache.stats().held, 1);
    drop(b);
    assert_eq!(rig.cache.stats().idle, 1);
    rig.clock.advance(TTL);
    rig.poll();
    assert_eq!(rig.cache.stats().live, 0);
    rig.end();
}

#[test]
fn every_part_of_the_key_makes_another_handle() {
    let rig = Rig::of(AhTtl::Infinite);
    let base = key(1);
    let grh = base.grh.unwrap();
    let with = |f: &dyn Fn(&mut crate::device::GlobalRoute)| {
        let mut g = grh;
        f(&mut g);
        crate::device::AhAttr { grh: Some(g), ..base }
    };
    let soft = base.soft;
    let keys = [
        base,
        crate::device::AhAttr { port: 2, ..base },
        crate::device::AhAttr { sl: 1, ..base },
        crate::device::AhAttr { src_path_bits: 1, ..base },
        crate::device::AhAttr { static_rate: 1, ..base },
        crate::device::AhAttr { dlid: crate::types::Lid(0xc001), ..base },
        crate::device::AhAttr { grh: None, ..base },
        crate::device::AhAttr { soft: crate::device::SoftAv { udp_port: 1, ..soft }, ..base },
        crate::device::AhAttr { soft: crate::device::SoftAv { host_id: 1, ..soft }, ..base },
        with(&|g| g.dgid = peer_gid(2)),
        with(&|g| g.sgid = local_gid(1)),
        with(&|g| g.hop_limit = 1),
        with(&|g| g.traffic_class = 0),
        with(&|g| g.flow_label = 1),
    ];
    for k in &keys {
        drop(ready(rig.cache.try_get(k, LOCAL)));
    }
    assert_eq!(rig.device.calls(), keys.len() as u64);
    for k in &keys {
        assert_eq!(ready(rig.cache.try_get(k, LOCAL)).attr(), k);
    }
    assert_eq!(rig.device.calls(), keys.len() as u64);
    rig.end();
}

// Closing.

#[test]
fn closing_leaves_held_handles_to_their_holders_and_refuses_gets() {
    for ttl in [AhTtl::Bypass, AhTtl::Finite(TTL), AhTtl::Infinite] {
        let rig = Rig::of(ttl);
        let held = rig.get(1);
        drop(rig.get(2));
        rig.cache.close();
        rig.cache.close();
        rig.poll();
        assert!(rig.device.is_live(held.ah().serial), "{ttl:?}");
        assert_eq!(rig.cache.stats().live, 1);
        let (error, retry_after) = failed(rig.cache.try_get(&key(1), LOCAL));
        assert_eq!((error.kind(), retry_after), (ErrorKind::Closed, Duration::MAX));
        assert!(error.to_string().contains("fake0:1"), "{error}");
        assert_eq!(rig.cache.get(&key(1), "test").unwrap_err().kind(), ErrorKind::Closed);
        let again = held.clone();
        drop(held);
        rig.poll();
        assert!(rig.device.is_live(again.ah().serial), "{ttl:?}: hold works after closing");
        drop(again);
        rig.end();
    }
}

/// Collects the messages of warnings.
#[derive(Clone, Default)]
struct Warnings(Arc<std::sync::Mutex<Vec<String>>>);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, meta: &tracing::Metadata<'_>) -> bool {
        *meta.level() == tracing::Level::WARN
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        struct Text(String);
        impl tracing::field::Visit for Text {
            fn record_debug(&mut self, _: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.0 += &format!("{value:?}");
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().unwrap().push(text.0);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn closing_warns_once_and_names_who_holds_what() {
    let warnings = Warnings::default();
    // With a second one, threads of other tests cannot decide alone whether a place is heard that they come to first.
    let _second = tracing::Dispatch::new(tracing::subscriber::NoSubscriber::new());
    tracing::subscriber::with_default(warnings.clone(), || {
        let rig = Rig::of(AhTtl::Infinite);
        drop(rig.get(9));
        rig.cache.close();
        drop(rig);
        assert_eq!(warnings.0.lock().unwrap().len(), 0, "nobody holds anything");

        let rig = Rig::of(AhTtl::Infinite);
        let a = ready(rig.cache.try_get(&key(1), GetOptions::local("ud endpoint")));
        let b = ready(rig.cache.try_get(&key(1), GetOptions::local("ud match")));
        let c = ready(rig.cache.try_get(&key(2), GetOptions::local("srd peer")));
        rig.cache.report_unresponsive(&c);
        drop(ready(rig.cache.try_get(&key(3), GetOptions::local("transient"))));
        rig.cache.close();
        rig.cache.close();
        drop((a, b, c));
        rig.end();
    });
    let warnings = warnings.0.lock().unwrap();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    let text = &warnings[0];
    for part in ["fake0", "2 address handles", "3 or more references", "ud endpoint, ud match, srd peer"] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    assert!(!text.contains("transient"), "{text}");
}

#[test]
fn a_reference_keeps_the_device_alive_and_dies_well_after_the_cache() {
    let rig = Rig::of(AhTtl::Infinite);
    let held = rig.get(1);
    let Rig { cache, device, .. } = rig;
    let weak = Arc::downgrade(&device);
    let other = cache.clone();
    drop(cache);
    drop(ready(other.try_get(&key(2), LOCAL)));
    drop(other);
    drop(device);
    let device = weak.upgrade().expect("the reference keeps the device");
    assert_eq!(device.created() - device.destroyed(), 2, "nobody has polled");
    drop(held);
    assert_eq!(device.created(), device.destroyed(), "the last reference leaves nothing behind");
    drop(device);
    assert!(weak.upgrade().is_none());
}

#[test]
fn closing_ends_pending_creations_and_one_that_lands_later_comes_to_nothing() {
    let rig = Rig::queued(AhTtl::Infinite);
    let woken = Arc::new(AtomicUsize::new(0));
    let waker = counting(&woken);
    let queued = pending(rig.cache.try_get(&key(1), LOCAL.waking(&waker)));
    rig.cache.close();
    assert_eq!(woken.load(Ordering::Relaxed), 1);
    assert_eq!(failed(queued.take()).0.kind(), ErrorKind::Closed);
    assert_eq!(rig.cache.run_jobs(), 0);
    rig.end();

    let rig = Rig::queued(AhTtl::Infinite);
    let running = pending(rig.cache.try_get(&key(1), LOCAL.waking(&waker)));
    let cache = rig.cache.clone();
    rig.device.set_hook(move |_| cache.close());
    rig.cache.run_jobs();
    rig.device.clear_hook();
    assert_eq!(rig.device.created(), 1, "it did land");
    assert_eq!(failed(running.take()).0.kind(), ErrorKind::Closed);
    rig.end();
}

// Creation that may sleep.

fn counting(count: &Arc<AtomicUsize>) -> AhWaker {
    let count = Arc::clone(count);
    Arc::new(move || {
        count.fetch_add(1, Ordering::Relaxed);
    })
}

#[test]
fn one_creation_serves_all_who_wait_for_the_key() {
    let rig = Rig::queued(AhTtl::Infinite);
    let woken = Arc::new(AtomicUsize::new(0));
    let waker = counting(&woken);
    let tokens: Vec<_> = (0..3).map(|_| pending(rig.cache.try_get(&key(1), LOCAL.waking(&waker)))).collect();
    assert!(tokens.iter().all(|t| !t.is_done()));
    assert_eq!((rig.device.calls(), rig.cache.stats().pending), (0, 1), "try_get does not call a device that sleeps");
    assert_eq!(rig.cache.run_jobs(), 1);
    assert_eq!((rig.device.calls(), woken.load(Ordering::Relaxed)), (1, 3));
    let got: Vec<_> = tokens.into_iter().map(|t| ready(t.take())).collect();
    assert!(got.iter().all(|ah| ah.is_same(&got[0])));
    assert!(rig.get(1).is_same(&got[0]));
    drop(got);
    rig.end();
}

#[test]
fn a_token_that_is_not_ready_gives_itself_back() {
    let rig = Rig::queued(AhTtl::Bypass);
    let token = pending(pending(rig.cache.try_get(&key(1), LOCAL)).take());
    let other = pending(rig.cache.try_get(&key(1), LOCAL));
    assert_eq!(rig.cache.run_jobs(), 2, "at TTL 0 nothing is shared, not even the waiting");
    assert_ne!(ready(token.take()).generation(), ready(other.take()).generation());
    rig.end();
}

#[test]
fn a_dropped_token_gives_its_handle_up() {
    for ttl in [AhTtl::Bypass, AhTtl::Finite(TTL)] {
        let rig = Rig::queued(ttl);
        let before = pending(rig.cache.try_get(&key(1), LOCAL));
        let after = pending(rig.cache.try_get(&key(2), LOCAL));
        drop(before);
        rig.cache.run_jobs();
        drop(after);
        let s = rig.cache.stats();
        assert_eq!((s.held, s.created), (0, 2), "{ttl:?}");
        rig.end();
    }
}

#[test]
fn a_waiting_outcome_outlives_expiry_and_eviction() {
    let rig = Rig::new(FakeDevice::new(true), AhCacheConfig { idle_max: 0, ..config(AhTtl::Finite(NS)) });
    let token = pending(rig.cache.try_get(&key(1), LOCAL));
    rig.cache.run_jobs();
    rig.clock.advance(TTL);
    rig.poll();
    let ah = ready(token.take());
    assert!(rig.device.is_live(ah.ah().serial));
    drop(ah);
    rig.end();
}

#[test]
fn another_thread_waits_for_a_creation_that_runs_inline() {
    // The device calls back while it creates: as another thread would, this get meets the flight.
    let rig = Rig::of(AhTtl::Infinite);
    let inner = Arc::new(std::sync::Mutex::new(None));
    let (cache, slot) = (rig.cache.clone(), Arc::clone(&inner));
    rig.device.set_hook(move |attr| *slot.lock().unwrap() = Some(cache.try_get(attr, LOCAL)));
    let outer = rig.get(1);
    rig.device.clear_hook();
    let token = pending(inner.lock().unwrap().take().unwrap());
    assert!(ready(token.take()).is_same(&outer));
    assert_eq!(rig.device.calls(), 1);
    drop(outer);
    rig.end();
}

#[test]
fn a_waker_may_use_the_cache() {
    let rig = Rig::queued(AhTtl::Infinite);
    let cache = rig.cache.clone();
    let seen = Arc::new(AtomicUsize::new(0));
    let out = Arc::clone(&seen);
    let waker: AhWaker = Arc::new(move || {
        let _ = ready(cache.try_get(&key(1), LOCAL));
        cache.poll(uct::Time::ZERO);
        out.store(cache.stats().created as usize, Ordering::Relaxed);
    });
    let token = pending(rig.cache.try_get(&key(1), LOCAL.waking(&waker)));
    rig.cache.run_jobs();
    assert_eq!(seen.load(Ordering::Relaxed), 1);
    drop((token, waker));
    rig.end();
}

#[test]
fn blocking_get_runs_the_jobs_of_a_manual_cache() {
    let rig = Rig::queued(AhTtl::Infinite);
    let ah = rig.cache.get(&key(1), "test").unwrap();
    assert_eq!(ah.attr(), &key(1));
    rig.device.set_broken(peer_gid(2), libc::EINVAL);
    assert_eq!(rig.cache.get(&key(2), "test").unwrap_err().errno(), Some(libc::EINVAL));
    drop(ah);
    rig.end();
}

#[test]
fn helper_threads_create_and_the_domain_thread_destroys() {
    let device = FakeDevice::new(true);
    let cfg = AhCacheConfig { ttl: AhTtl::Bypass, ..AhCacheConfig::default() };
    let clock = Arc::new(uct::time::MonotonicClock::new());
    let cache = AhCache::new(Arc::clone(&device), cfg, clock);
    let threads: Vec<_> = (0..4)
        .map(|t| {
            let cache = cache.clone();
            std::thread::spawn(move || {
                for n in 0..50 {
                    let ah = cache.get(&key(t * 100 + n), "test").unwrap();
                    assert_eq!(ah.attr(), &key(t * 100 + n));
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|t| t.join().unwrap());
    let last = cache.get(&key(1000), "test").unwrap();
    cache.close();
    drop(cache);
    let weak = Arc::downgrade(&device);
    drop(last);
    // The domain's thread ends with the last handle and lets the device go: no time-out, the suite's is enough.
    while weak.strong_count() > 1 {
        std::thread::yield_now();
    }
    assert_eq!((device.created(), device.destroyed()), (201, 201));
}

#[test]
fn strangers_whose_creation_sleeps_leave_a_helper_for_local_gets() {
    let device = FakeDevice::new(true);
    let cfg = AhCacheConfig { executor: Executor::Threads { helpers: 1 }, ..AhCacheConfig::default() };
    let cache = AhCache::new(Arc::clone(&device), cfg, Arc::new(uct::time::MonotonicClock::new()));
    let (release, gate) = std::sync::mpsc::channel::<()>();
    let gate = std::sync::Mutex::new(gate);
    device.set_hook(move |attr| {
        if *attr == key(1) {
            let _ = gate.lock().unwrap().recv();
        }
    });
    // The first one hangs, the second one waits behind it.
    let hanging = pending(cache.try_get(&key(1), STRANGER));
    let waiting = pending(cache.try_get(&key(2), STRANGER));
    assert_eq!(cache.get(&key(3), "test").unwrap().attr(), &key(3));
    assert!(!waiting.is_done(), "one stranger's at a time");
    assert_eq!(cache.get(&key(2), "test").unwrap().attr(), &key(2), "a local get takes it along");
    assert!(waiting.is_done() && !hanging.is_done());
    drop(release);
    assert_eq!(cache.get(&key(1), "test").unwrap().attr(), &key(1));
}

#[test]
fn the_domain_thread_expires_what_nobody_asks_for() {
    let device = FakeDevice::new(false);
    let cfg = AhCacheConfig { ttl: AhTtl::Finite(Duration::from_millis(1)), ..AhCacheConfig::default() };
    let cache = AhCache::new(Arc::clone(&device), cfg, Arc::new(uct::time::MonotonicClock::new()));
    for n in 0..10 {
        drop(ready(cache.try_get(&key(n), LOCAL)));
    }
    while cache.stats().destroyed < 10 {
        std::thread::yield_now();
    }
    assert_eq!((cache.stats().expired, device.destroyed()), (10, 10));
}

#[test]
fn a_full_device_counts_on_what_another_thread_is_just_destroying() {
    for ttl in [AhTtl::Bypass, AhTtl::Infinite] {
        let device = FakeDevice::new(false);
        device.set_limit(1);
        let cfg = AhCacheConfig { ttl, ..AhCacheConfig::default() };
        let cache = AhCache::new(Arc::clone(&device), cfg, Arc::new(uct::time::MonotonicClock::new()));
        // The domain's thread and this one compete for every dead handle.
        for n in 0..500 {
            drop(ready(cache.try_get(&key(n), LOCAL)));
        }
    }
}

// Failures.

#[test]
fn a_failure_is_remembered_for_a_bounded_time_at_every_ttl() {
    for ttl in [AhTtl::Bypass, AhTtl::Finite(TTL), AhTtl::Infinite] {
        let rig = Rig::of(ttl);
        rig.device.set_broken(peer_gid(1), libc::ETIMEDOUT);
        let hold = rig.cache.config().failure_hold;
        assert_eq!(failed(rig.cache.try_get(&key(1), LOCAL)).1, hold);
        rig.clock.advance(hold / 4);
        assert_eq!(failed(rig.cache.try_get(&key(1), LOCAL)).1, hold / 4 * 3, "{ttl:?}");
        rig.clock.advance(hold / 4 * 3 - NS);
        failed(rig.cache.try_get(&key(1), LOCAL));
        assert_eq!(rig.device.calls(), 1, "{ttl:?}: the device was asked once");
        rig.clock.advance(NS);
        failed(rig.cache.try_get(&key(1), LOCAL));
        assert_eq!(rig.device.calls(), 2);
        rig.device.set_broken(peer_gid(1), 0);
        rig.clock.advance(hold);
        drop(rig.get(1));
        rig.end();
    }
}

#[test]
fn remembered_failures_are_bounded_apart_for_local_gets_and_strangers() {
    let rig = Rig::new(FakeDevice::new(false), AhCacheConfig { failure_max: 2, ..config(AhTtl::Infinite) });
    let fail = |n, options| {
        rig.device.set_broken(peer_gid(n), libc::ETIMEDOUT);
        failed(rig.cache.try_get(&key(n), options));
    };
    fail(1, LOCAL);
    (10..20).for_each(|n| fail(n, STRANGER));
    let calls = rig.device.calls();
    fail(1, LOCAL);
    fail(19, STRANGER);
    fail(18, STRANGER);
    assert_eq!(rig.device.calls(), calls, "a flood of strangers pushes out none but its own");
    fail(17, STRANGER);
    assert_eq!(rig.device.calls(), calls + 1);
    rig.end();
}

#[test]
fn an_event_that_concerns_a_failure_makes_it_forgotten_at_once() {
    let events: [(AsyncEvent, bool); 6] = [
        (AsyncEvent::NeighbourChange(peer_gid(1)), true),
        (AsyncEvent::NeighbourChange(peer_gid(2)), false),
        (AsyncEvent::GidChange(1), true),
        (AsyncEvent::PortActive(1), true),
        (AsyncEvent::SmChange(2), false),
        (AsyncEvent::PkeyChange(1), false),
    ];
    for (event, forgets) in events {
        for ttl in [AhTtl::Bypass, AhTtl::Infinite] {
            let rig = Rig::of(ttl);
            rig.device.script(&[libc::ETIMEDOUT]);
            failed(rig.cache.try_get(&key(1), LOCAL));
            let outcome = rig.cache.handle_event(&event);
            assert_eq!(outcome.forgotten, usize::from(forgets), "{event:?}");
            assert_eq!(matches!(rig.cache.try_get(&key(1), LOCAL), TryGet::Ready(_)), forgets, "{event:?}");
            rig.end();
        }
    }
}

#[test]
fn strangers_have_a_quota_and_come_after_local_gets() {
    let rig = Rig::new(FakeDevice::new(true), AhCacheConfig { stranger_quota: 2, ..config(AhTtl::Infinite) });
    let order = Arc::new(std::sync::Mutex::new(Vec::new()));
    let log = Arc::clone(&order);
    rig.device.set_hook(move |attr| log.lock().unwrap().push(*attr));
    let mut tokens = vec![pending(rig.cache.try_get(&key(1), STRANGER)), pending(rig.cache.try_get(&key(2), STRANGER))];
    let (error, retry_after) = failed(rig.cache.try_get(&key(3), STRANGER));
    assert_eq!(error.kind(), ErrorKind::ExceedsLimit);
    assert!(retry_after > Duration::ZERO);
    tokens.push(pending(rig.cache.try_get(&key(4), LOCAL)));
    // A local get lifts a stranger's creation, which then no longer counts against the quota.
    tokens.push(pending(rig.cache.try_get(&key(2), LOCAL)));
    tokens.push(pending(rig.cache.try_get(&key(3), STRANGER)));
    assert_eq!(rig.cache.run_jobs(), 4);
    assert_eq!(*order.lock().unwrap(), [key(4), key(2), key(1), key(3)]);
    tokens.into_iter().for_each(|t| drop(ready(t.take())));
    assert!(matches!(rig.cache.try_get(&key(5), STRANGER), TryGet::Pending(_)), "the quota is free again");
    rig.end();
}

#[test]
fn errors_name_device_port_both_gids_errno_and_causes() {
    use ErrorKind as K;
    let cases = [
        (libc::ETIMEDOUT, K::EndpointTimeout, "ip neigh"),
        (libc::ENETUNREACH, K::Unreachable, "ip route"),
        (libc::EHOSTUNREACH, K::Unreachable, "ip route"),
        (libc::ENODATA, K::Unreachable, "not in the port's table"),
        (libc::EINVAL, K::InvalidAddress, "RoCE v1 and v2"),
        (libc::ENOMEM, K::NoMemory, "limit"),
        (libc::EIO, K::Io, "refused"),
    ];
    for (errno, kind, cause) in cases {
        let rig = Rig::of(AhTtl::Infinite);
        rig.device.script(&[errno, errno]);
        let (error, _) = failed(rig.cache.try_get(&key(1), LOCAL));
        assert_eq!((error.kind(), error.errno(), error.scope()), (kind, Some(errno), Scope::Endpoint));
        let text = error.to_string();
        for part in ["fake0:1", "10.1.0.1", "10.0.0.1", "sgid index 0", "create_ah", cause] {
            assert!(text.contains(part), "no {part:?} in {text}");
        }
        rig.end();
    }
}

// The device's limit and the idle bound.

#[test]
fn a_full_device_evicts_the_least_recently_used_idle_entry() {
    let rig = Rig::of(AhTtl::Infinite);
    rig.device.set_limit(3);
    let first: Vec<_> = (1..=3).map(|n| rig.get(n).generation()).collect();
    drop(rig.get(1));
    let held = rig.get(4);
    assert_eq!(rig.cache.stats().evicted, 1);
    assert_eq!(rig.get(1).generation(), first[0]);
    assert_eq!(rig.get(3).generation(), first[2], "2 was the oldest");
    drop(held);
    rig.end();
}

#[test]
fn a_full_device_with_all_in_use_says_so_and_works_again_after_a_put() {
    let device = FakeDevice::new(false);
    device.set_limit(4);
    let rig = Rig::new(device, config(AhTtl::Infinite));
    let mut held: Vec<_> = (1..=4).map(|n| rig.get(n)).collect();
    let (error, _) = failed(rig.cache.try_get(&key(5), LOCAL));
    assert_eq!(error.kind(), ErrorKind::NoMemory);
    let text = error.to_string();
    for part in ["limit of 4", "none of the 4", "0 idle", "close endpoints"] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    held.pop();
    held.push(rig.get(5));
    drop(held);
    rig.end();
}

#[test]
fn a_full_device_first_gets_back_what_waits_for_the_reaper() {
    let rig = Rig::of(AhTtl::Bypass);
    rig.device.set_limit(1);
    drop(rig.get(1));
    drop(rig.get(2));
    assert_eq!(rig.cache.stats().evicted, 0);
    rig.end();
}

#[test]
fn idle_entries_are_bounded_and_held_ones_do_not_count() {
    let rig = Rig::new(FakeDevice::new(false), AhCacheConfig { idle_max: 2, ..config(AhTtl::Infinite) });
    let held: Vec<_> = (100..110).map(|n| rig.get(n)).collect();
    let first: Vec<_> = (1..=2).map(|n| rig.get(n).generation()).collect();
    let other = rig.get(50);
    assert_eq!(rig.cache.stats().evicted, 0);
    assert_eq!(rig.get(1).generation(), first[0]);
    drop(other);
    drop(rig.get(3));
    let s = rig.cache.stats();
    assert_eq!((s.evicted, s.held), (1, 10));
    rig.poll();
    assert_eq!(rig.cache.stats().idle, 2, "the timer takes what has become idle since");
    assert_eq!(rig.get(3).attr(), &key(3));
    assert_eq!(rig.device.calls(), 14, "the most recent stayed");
    let due = rig.poll().expect("above the bound it asks to be called again, as no put tells it");
    assert!(due > rig.clock.now());
    drop(held);
    rig.poll();
    assert_eq!(rig.cache.stats().idle, 2);
    assert_eq!(rig.poll(), None);
    rig.end();
}

#[test]
fn the_timer_frees_idle_entries_past_their_ttl_without_a_get() {
    let rig = Rig::of(AhTtl::Finite(TTL));
    assert_eq!(rig.poll(), None);
    let held = rig.get(1);
    for n in 2..1000 {
        drop(rig.get(n));
    }
    let mut due = rig.poll().expect("entries wait for their expiry");
    assert!(due <= rig.clock.now() + TTL);
    rig.clock.advance(TTL - NS);
    rig.poll();
    assert_eq!(rig.cache.stats().idle, 998);
    rig.clock.advance(NS);
    rig.poll();
    let s = rig.cache.stats();
    assert_eq!((s.idle, s.expired, s.held), (0, 998, 1));
    assert_eq!(rig.device.destroyed(), 998);
    // Called when it asks to be, it frees the last one at the latest after two TTLs.
    drop(held);
    let put = rig.clock.now();
    while rig.device.destroyed() < 999 {
        due = rig.poll().unwrap_or(due);
        if rig.device.destroyed() < 999 {
            assert!(due > rig.clock.now() && due <= put + TTL * 2, "{due:?}");
            rig.clock.set(due);
        }
    }
    assert_eq!(rig.poll(), None);
    rig.end();
}

// Reading the clock.

struct CountingClock(AtomicUsize);

impl Clock for CountingClock {
    fn now(&self) -> uct::Time {
        self.0.fetch_add(1, Ordering::Relaxed);
        uct::Time::ZERO
    }
}

#[test]
fn hits_read_no_clock_but_for_reviving_at_a_finite_ttl_once() {
    for (ttl, revive, last_put) in [(AhTtl::Infinite, 0, 0), (AhTtl::Finite(TTL), 1, 1)] {
        let clock = Arc::new(CountingClock(AtomicUsize::new(0)));
        let cache = AhCache::new(FakeDevice::new(false), config(ttl), clock.clone());
        let reads = |f: &mut dyn FnMut()| {
            let before = clock.0.load(Ordering::Relaxed);
            f();
            clock.0.load(Ordering::Relaxed) - before
        };
        drop(ready(cache.try_get(&key(1), LOCAL)));
        let mut held = Vec::new();
        assert_eq!(reads(&mut || held.push(ready(cache.try_get(&key(1), LOCAL)))), revive, "{ttl:?}: idle");
        assert_eq!(reads(&mut || held.push(ready(cache.try_get(&key(1), LOCAL)))), 0, "{ttl:?}: shared");
        assert_eq!(reads(&mut || held.push(held[0].clone())), 0, "{ttl:?}: hold");
        assert_eq!(reads(&mut || held.truncate(1)), 0, "{ttl:?}: put");
        assert_eq!(reads(&mut || held.clear()), last_put, "{ttl:?}: last put");
    }
}

// Invalidation.

#[test]
fn stale_ends_sharing_and_leaves_holders_alone() {
    let rig = Rig::of(AhTtl::Infinite);
    let old = rig.get(1);
    let other = rig.get(2);
    let outcome = rig.cache.handle_event(&AsyncEvent::NeighbourChange(peer_gid(1)));
    assert_eq!(outcome, Invalidated { stale: 1, ..Invalidated::default() });
    assert!(old.is_stale() && !old.is_poisoned() && !other.is_stale());
    let new = rig.get(1);
    assert_ne!(new.generation(), old.generation());
    assert!(!new.is_stale() && rig.device.is_live(old.ah().serial));
    assert_eq!(rig.cache.stats().held, 3);
    drop(old);
    rig.poll();
    assert_eq!(rig.cache.stats().held, 2, "a stale handle dies with its last put");
    drop((new, other));
    rig.end();
}

#[test]
fn an_idle_entry_that_becomes_stale_is_destroyed() {
    let rig = Rig::of(AhTtl::Infinite);
    drop(rig.get(1));
    rig.cache.handle_event(&AsyncEvent::NeighbourChange(peer_gid(1)));
    rig.poll();
    assert_eq!(rig.cache.stats().live, 0);
    rig.end();
}

#[test]
fn events_map_to_grades() {
    use Grade::{Poisoned, Stale};
    let cases = [
        (AsyncEvent::PortActive(1), Some(Stale)),
        (AsyncEvent::PortError(1), Some(Stale)),
        (AsyncEvent::SmChange(1), Some(Stale)),
        (AsyncEvent::ClientReregister(1), Some(Stale)),
        (AsyncEvent::NeighbourChange(peer_gid(1)), Some(Stale)),
        (AsyncEvent::LidChange(1), Some(Poisoned)),
        (AsyncEvent::DeviceFatal, Some(Poisoned)),
        (AsyncEvent::GidChange(1), None),
        (AsyncEvent::PortError(2), None),
        (AsyncEvent::LidChange(2), None),
        (AsyncEvent::NeighbourChange(peer_gid(2)), None),
        (AsyncEvent::PkeyChange(1), None),
        (AsyncEvent::QpFatal(crate::types::Qpn::truncate(1)), None),
        (AsyncEvent::Unknown(99), None),
    ];
    for (event, grade) in cases {
        for ttl in [AhTtl::Bypass, AhTtl::Infinite] {
            let rig = Rig::of(ttl);
            let ah = rig.get(1);
            rig.cache.handle_event(&event);
            assert_eq!(ah.grade(), grade, "{event:?} at {ttl:?}");
            drop(ah);
            rig.end();
        }
    }
}

/// The path of [`key`]`(n)`.
fn path(n: u32) -> AhPath {
    AhPath { dgid: peer_gid(n), sgid: local_gid(0), port: 1 }
}

fn news(all: &[(AhPath, PathNews)]) -> BTreeMap<AhPath, PathNews> {
    all.iter().copied().collect()
}

/// Two local GIDs may reach one peer through two gateways: only one of them has changed.
#[test]
fn news_of_a_path_concern_exactly_that_path() {
    for ttl in [AhTtl::Bypass, AhTtl::Infinite] {
        let rig = Rig::of(ttl);
        let (near, far) = (rig.get(1), rig.get(2));
        let mut other = key(1);
        other.grh.as_mut().unwrap().sgid = local_gid(1);
        let other = rig.cache.get(&other, "test").unwrap();
        assert_eq!(rig.cache.paths(), [path(1), AhPath { sgid: local_gid(1), ..path(1) }, path(2)]);
        let elsewhere = AhPath { port: 2, ..path(1) };
        assert_eq!(rig.cache.handle_paths(&news(&[(elsewhere, PathNews::Moved)])), Invalidated::default());
        for what in [PathNews::Moved, PathNews::Lost] {
            let mine = rig.get(1);
            let outcome = rig.cache.handle_paths(&news(&[(path(1), what), (path(2), PathNews::Found)]));
            assert!(outcome.stale > 0 && mine.is_stale() && near.is_stale(), "{what:?} at {ttl:?}");
            assert!(!mine.is_poisoned() && !far.is_stale() && !other.is_stale());
            assert_eq!(rig.cache.handle_paths(&news(&[(path(1), what)])), Invalidated::default(), "no news");
        }
        drop((near, far, other));
        rig.end();
    }
}

#[test]
fn news_of_a_path_and_what_is_remembered_of_failures() {
    for (what, forgets) in [(PathNews::Found, true), (PathNews::Lost, false), (PathNews::Moved, true)] {
        let rig = Rig::of(AhTtl::Infinite);
        rig.device.set_broken(peer_gid(1), libc::ETIMEDOUT);
        failed(rig.cache.try_get(&key(1), LOCAL));
        assert_eq!(rig.cache.paths(), [path(1)], "failures are watched too");
        rig.device.set_broken(peer_gid(1), 0);
        let outcome = rig.cache.handle_paths(&news(&[(path(1), what)]));
        assert_eq!(outcome, Invalidated { forgotten: usize::from(forgets), ..Invalidated::default() });
        let again = rig.cache.try_get(&key(1), LOCAL);
        assert_eq!(matches!(again, TryGet::Ready(_)), forgets, "{what:?}");
        drop(again);
        rig.end();
    }
}

/// A handle may be made of what was true before the news. Of a neighbour that fails, the creation hears by itself, and
/// doing it again would only make its error late.
#[test]
fn only_a_path_that_moved_has_its_creations_done_again() {
    for (what, calls) in [(PathNews::Found, 1), (PathNews::Lost, 1), (PathNews::Moved, 2)] {
        let rig = Rig::queued(AhTtl::Infinite);
        let seen = Arc::new(Mutex::new(Vec::new()));
        let told = seen.clone();
        assert!(rig.cache.on_creation(Arc::new(move |p| told.lock().unwrap().push(*p))));
        assert!(!rig.cache.on_creation(Arc::new(|_| panic!("there is one already"))));
        let token = pending(rig.cache.try_get(&key(1), LOCAL));
        assert!(seen.lock().unwrap().is_empty(), "not by the get");
        let (cache, order) = (rig.cache.clone(), seen.clone());
        let once = AtomicUsize::new(0);
        rig.device.set_hook(move |_| {
            assert!(!order.lock().unwrap().is_empty(), "told before the device is asked");
            if once.fetch_add(1, Ordering::Relaxed) == 0 {
                cache.handle_paths(&news(&[(path(1), what)]));
            }
        });
        rig.cache.run_jobs();
        assert!(!ready(token.take()).is_stale());
        assert_eq!((rig.device.calls(), seen.lock().unwrap().len()), (calls, calls as usize), "{what:?}");
        rig.device.clear_hook();
        rig.end();
    }
}

#[test]
fn only_a_proven_unchanged_gid_table_keeps_the_handles() {
    let keep = || vec![gid_entry(0, local_gid(0)), gid_entry(3, local_gid(1))];
    let tables = [
        (Ok(keep()), None),
        (Ok(vec![gid_entry(0, local_gid(0)), gid_entry(5, local_gid(1))]), None),
        (Ok(vec![gid_entry(5, local_gid(0)), gid_entry(3, local_gid(1))]), Some(Grade::Poisoned)),
        (Ok(vec![gid_entry(3, local_gid(1))]), Some(Grade::Poisoned)),
        (Err(libc::EIO), Some(Grade::Poisoned)),
    ];
    for (table, grade) in tables {
        for direct in [true, false] {
            let rig = Rig::of(AhTtl::Infinite);
            let ah = rig.get(1);
            if direct {
                rig.cache.handle_gids(1, table.clone().map_err(|e| VerbsError::new("query_gid_table", e)));
            } else {
                match &table {
                    Ok(t) => rig.device.set_gids(t.clone()),
                    Err(e) => rig.device.set_gid_error(Some(*e)),
                }
                rig.cache.handle_event(&AsyncEvent::GidChange(1));
            }
            assert_eq!(ah.grade(), grade, "{table:?}");
            assert_eq!(rig.get(1).is_same(&ah), grade.is_none(), "{table:?}");
            drop(ah);
            rig.end();
        }
    }
}

#[test]
fn after_an_unreadable_gid_table_the_next_one_proves_nothing() {
    let rig = Rig::of(AhTtl::Infinite);
    rig.device.set_gid_error(Some(libc::EIO));
    rig.cache.handle_event(&AsyncEvent::GidChange(1));
    let ah = rig.get(1);
    rig.device.set_gid_error(None);
    rig.cache.handle_event(&AsyncEvent::GidChange(1));
    assert!(ah.is_poisoned());
    drop(ah);
    let ah = rig.get(1);
    rig.cache.handle_event(&AsyncEvent::GidChange(1));
    assert!(!ah.is_stale(), "now it does");
    drop(ah);
    rig.end();
}

#[test]
fn a_stale_handle_can_still_be_poisoned_and_not_the_other_way_round() {
    for ttl in [AhTtl::Bypass, AhTtl::Infinite] {
        let rig = Rig::of(ttl);
        let ah = rig.get(1);
        rig.cache.handle_event(&AsyncEvent::NeighbourChange(peer_gid(1)));
        assert_eq!(ah.grade(), Some(Grade::Stale), "{ttl:?}");
        rig.cache.close();
        rig.cache.handle_event(&AsyncEvent::LidChange(1));
        assert_eq!(ah.grade(), Some(Grade::Poisoned), "{ttl:?}: closing does not hide it from events");
        rig.cache.handle_event(&AsyncEvent::NeighbourChange(peer_gid(1)));
        assert_eq!(ah.grade(), Some(Grade::Poisoned), "{ttl:?}");
        assert_eq!(rig.cache.stats().invalidated, 2, "{ttl:?}");
        drop(ah);
        rig.end();
    }
}

#[test]
fn late_news_about_an_old_generation_cannot_kill_a_fresh_one() {
    let rig = Rig::of(AhTtl::Infinite);
    let (a, b) = (rig.get(1), rig.get(1));
    assert!(rig.cache.report_unresponsive(&a));
    let fresh = rig.get(1);
    assert!(!rig.cache.report_unresponsive(&b), "the second endpoint of the stall names the old one");
    assert!(!rig.cache.invalidate(&key(1), a.generation(), Grade::Stale));
    assert!(rig.get(1).is_same(&fresh) && !fresh.is_stale());
    assert!(rig.cache.invalidate(&key(1), a.generation(), Grade::Poisoned), "a graver word about the old one counts");
    assert!(b.is_poisoned() && !fresh.is_stale());
    assert!(!rig.cache.invalidate(&key(2), fresh.generation(), Grade::Poisoned), "another key");
    drop((a, b, fresh));
    rig.end();
}

#[test]
fn an_event_during_a_creation_starts_it_again() {
    let rig = Rig::of(AhTtl::Infinite);
    let cache = rig.cache.clone();
    let rounds = AtomicUsize::new(0);
    rig.device.set_hook(move |_| {
        if rounds.fetch_add(1, Ordering::Relaxed) < 2 {
            cache.handle_event(&AsyncEvent::NeighbourChange(peer_gid(1)));
        }
    });
    rig.device.script(&[0, libc::ETIMEDOUT]);
    let ah = rig.get(1);
    rig.device.clear_hook();
    assert!(!ah.is_stale());
    assert_eq!((rig.device.calls(), ah.ah().serial), (3, 2), "neither the outdated handle nor the outdated failure");
    drop(ah);
    rig.end();
}

#[test]
fn an_event_storm_cannot_keep_a_creation_from_ending() {
    let rig = Rig::of(AhTtl::Infinite);
    let cache = rig.cache.clone();
    rig.device.set_hook(move |_| {
        cache.handle_event(&AsyncEvent::LidChange(1));
    });
    let ah = rig.get(1);
    rig.device.clear_hook();
    assert!(ah.is_poisoned(), "handed out, but not as good");
    assert_eq!(rig.device.calls(), 4);
    assert!(!rig.get(1).is_poisoned());
    drop(ah);
    rig.end();
}

#[test]
fn counters_add_up() {
    let rig = Rig::of(AhTtl::Infinite);
    let a = rig.get(1);
    drop(rig.get(1));
    drop(rig.get(2));
    rig.device.script(&[libc::EINVAL]);
    failed(rig.cache.try_get(&key(3), LOCAL));
    rig.cache.report_unresponsive(&a);
    let expected = AhCacheStats {
        hits: 1,
        misses: 3,
        created: 2,
        failed: 1,
        invalidated: 1,
        live: 2,
        held: 1,
        idle: 1,
        ..AhCacheStats::default()
    };
    assert_eq!(rig.cache.stats(), expected);
    drop(a);
    rig.end();
}

#[test]
fn what_the_reaper_is_destroying_has_no_holder() {
    let rig = Rig::of(AhTtl::Bypass);
    let handles: Vec<_> = (1..=3).map(|n| rig.get(n)).collect();
    let (cache, seen) = (rig.cache.clone(), Arc::new(Mutex::new(Vec::new())));
    let notes = seen.clone();
    rig.device.set_destroy_hook(move || {
        let s = cache.stats();
        notes.lock().unwrap().push((s.live, s.held));
    });
    drop(handles);
    rig.poll();
    assert_eq!(*seen.lock().unwrap(), [(3, 0); 3]);
    rig.device.clear_hook();
    rig.end();
}

// Errands.

#[test]
fn where_calls_sleep_an_event_leaves_reading_the_table_to_who_may() {
    let rig = Rig::queued(AhTtl::Infinite);
    let token = pending(rig.cache.try_get(&key(1), LOCAL));
    rig.cache.run_jobs();
    let ah = ready(token.take());
    rig.device.set_gids(vec![gid_entry(5, local_gid(0))]);
    let woken = Arc::new(AtomicUsize::new(0));
    for _ in 0..3 {
        let outcome = rig.cache.handle_event(&AsyncEvent::GidChange(1));
        assert_eq!(outcome, Invalidated::default());
        rig.cache.refresh_gids(1, Some(counting(&woken)));
    }
    assert!(!ah.is_poisoned() && rig.cache.gids(1).unwrap()[0].index == 0);
    assert_eq!((rig.cache.tables_read(), woken.load(Ordering::Relaxed)), (0, 0));
    assert_eq!(rig.cache.run_jobs(), 1, "one reading serves all who asked before it");
    assert!(ah.is_poisoned());
    assert_eq!(rig.cache.gids(1).unwrap(), [gid_entry(5, local_gid(0))]);
    assert_eq!((rig.cache.tables_read(), woken.load(Ordering::Relaxed)), (1, 3));
    assert!(rig.cache.gids(2).is_none());
    drop(ah);
    rig.end();
}

#[test]
fn errands_run_in_order_and_end_with_the_cache() {
    let rig = Rig::queued(AhTtl::Infinite);
    let order = Arc::new(std::sync::Mutex::new(Vec::new()));
    let errand = |n: u32| {
        let order = order.clone();
        Box::new(move || order.lock().unwrap().push(n))
    };
    rig.cache.run_errand(errand(1));
    rig.cache.run_errand(errand(2));
    assert!(order.lock().unwrap().is_empty());
    rig.poll();
    assert_eq!(*order.lock().unwrap(), [1, 2]);
    rig.cache.run_errand(errand(3));
    rig.cache.close();
    rig.cache.run_errand(errand(4));
    assert_eq!(Arc::strong_count(&order), 1, "what will never run is dropped");
    rig.poll();
    assert_eq!(*order.lock().unwrap(), [1, 2]);
    rig.end();
}

#[test]
fn the_domain_thread_runs_errands_before_there_was_any_get() {
    let device = FakeDevice::new(true);
    let cfg = AhCacheConfig { executor: Executor::Threads { helpers: 1 }, ..AhCacheConfig::default() };
    let cache = AhCache::new(Arc::clone(&device), cfg, Arc::new(uct::time::MonotonicClock::new()));
    let (done, wait) = std::sync::mpsc::channel();
    for n in 0..3 {
        device.set_gids(vec![gid_entry(n, local_gid(0))]);
        let done = done.clone();
        cache.refresh_gids(1, Some(Arc::new(move || done.send(()).unwrap())));
        wait.recv_timeout(Duration::from_secs(60)).expect("it is read");
        assert_eq!(cache.gids(1).unwrap()[0].index, n);
    }
}
