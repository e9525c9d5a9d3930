//! The cache under loom, which runs each model once for every interleaving of its threads (up to the preemption bound).
//!
//! ```text
//! RUSTFLAGS="--cfg uct_loom" LOOM_MAX_PREEMPTIONS=3 CARGO_TARGET_DIR=target/loom \
//!     cargo test -p ib --release --lib ah::loom
//! ```
//!
//! Three preemptions are needed: a cache that decides idleness outside the lock passes with two.
//!
//! The device asserts that no handle is destroyed twice. Each model asserts that held handles are alive, and ends with as
//! many destroyed as were created.

use std::{sync::Arc, time::Duration};

use ::loom::thread;
use uct::{Clock, Time, time::ManualClock};

use super::{testing::*, *};
use crate::device::AsyncEvent;

const TTL: Duration = Duration::from_secs(10);

type Cache = AhCache<FakeDevice>;

/// One get; what it got is alive.
fn get(cache: &Cache, device: &FakeDevice, n: u32) -> Option<AhRef<FakeDevice>> {
    match cache.try_get(&key(n), GetOptions::local("loom")) {
        TryGet::Ready(ah) => {
            assert!(device.is_live(ah.ah().serial), "got a dead handle");
            Some(ah)
        }
        // Another thread creates it.
        TryGet::Pending(token) => match token.take() {
            TryGet::Ready(ah) => {
                assert!(device.is_live(ah.ah().serial), "got a dead handle");
                Some(ah)
            }
            _ => None,
        },
        TryGet::Failed { error, .. } => {
            assert_eq!(error.kind(), uct::ErrorKind::Closed);
            None
        }
    }
}

struct Model {
    cache: Cache,
    device: Arc<FakeDevice>,
    clock: Arc<ManualClock>,
}

impl Model {
    fn new(cfg: AhCacheConfig) -> Model {
        let Rig { cache, device, clock } = Rig::new(FakeDevice::new(false), cfg);
        Model { cache, device, clock }
    }

    /// Runs `bodies` at once, then closes and looks whether everything went home.
    fn run<const N: usize>(self, bodies: [fn(&Cache, &FakeDevice, Time); N]) {
        let now = self.clock.now();
        let [main, others @ ..] = &bodies[..] else { return };
        let threads: Vec<_> = others
            .iter()
            .map(|body| {
                let (cache, device, body) = (self.cache.clone(), Arc::clone(&self.device), *body);
                thread::spawn(move || body(&cache, &device, now))
            })
            .collect();
        main(&self.cache, &self.device, now);
        for t in threads {
            t.join().unwrap();
        }
        self.cache.close();
        self.cache.poll(now);
        let s = self.cache.stats();
        assert_eq!((s.live, s.held, s.idle), (0, 0, 0), "{s:?}");
        assert_eq!(self.device.created(), self.device.destroyed());
    }
}

fn get_hold_put(cache: &Cache, device: &FakeDevice, _: Time) {
    if let Some(a) = get(cache, device, 1) {
        let b = a.clone();
        drop(a);
        assert!(device.is_live(b.ah().serial), "a held handle was destroyed");
    }
}

/// Where nothing but age and bounds ends entries: while it is held, the key leads to it.
fn get_hold_put_share(cache: &Cache, device: &FakeDevice, _: Time) {
    let a = get(cache, device, 1);
    if let Some(a) = a {
        let b = a.clone();
        drop(a);
        let again = get(cache, device, 1).unwrap();
        assert!(again.is_same(&b), "a held entry was taken out of sharing");
        drop(again);
        assert!(device.is_live(b.ah().serial), "a held handle was destroyed");
    }
}

fn get_put(cache: &Cache, device: &FakeDevice, _: Time) {
    if let Some(a) = get(cache, device, 1) {
        assert!(device.is_live(a.ah().serial), "a held handle was destroyed");
    }
}

fn poll(cache: &Cache, _: &FakeDevice, now: Time) {
    cache.poll(now);
}

/// The timer's thread has read the clock later than those that get.
fn late_poll(cache: &Cache, _: &FakeDevice, now: Time) {
    cache.poll(now + TTL * 2);
}

fn close(cache: &Cache, _: &FakeDevice, now: Time) {
    cache.close();
    cache.poll(now);
}

fn neighbour(cache: &Cache, _: &FakeDevice, _: Time) {
    cache.handle_event(&AsyncEvent::NeighbourChange(peer_gid(1)));
}

/// A model with the entry of key 1 in it, idle for longer than the TTL.
fn expired() -> Model {
    let m = Model::new(config(AhTtl::Finite(TTL)));
    drop(get(&m.cache, &m.device, 1));
    m.clock.advance(TTL * 2);
    m
}

#[test]
fn get_hold_put_and_expire() {
    ::loom::model(|| expired().run([poll, get_hold_put_share, get_put]));
}

#[test]
fn the_timer_takes_no_entry_that_is_being_revived() {
    ::loom::model(|| {
        let m = Model::new(config(AhTtl::Finite(TTL)));
        drop(get(&m.cache, &m.device, 1));
        m.run([late_poll, get_hold_put_share, get_put]);
    });
}

#[test]
fn the_idle_bound_takes_no_entry_that_is_being_got() {
    ::loom::model(|| {
        let m = Model::new(AhCacheConfig { idle_max: 0, ..config(AhTtl::Infinite) });
        drop(get(&m.cache, &m.device, 1));
        m.run([poll, get_hold_put_share, get_put]);
    });
}

#[test]
fn get_hold_put_and_invalidate() {
    ::loom::model(|| {
        let m = Model::new(config(AhTtl::Infinite));
        let held = get(&m.cache, &m.device, 1).unwrap();
        let old = held.generation();
        drop(held);
        assert_eq!(old, 1);
        m.run([
            |cache, device, _| {
                neighbour(cache, device, Time::ZERO);
                // Late news about the first generation must not reach its successor.
                if let Some(ah) = get(cache, device, 1) {
                    assert_ne!(ah.generation(), 1, "a stale entry was shared after the event");
                    cache.invalidate(ah.attr(), 1, Grade::Poisoned);
                    assert!(!ah.is_poisoned());
                }
            },
            get_hold_put,
            get_put,
        ]);
    });
}

#[test]
fn get_hold_put_and_close() {
    ::loom::model(|| {
        let m = Model::new(config(AhTtl::Infinite));
        drop(get(&m.cache, &m.device, 1));
        m.run([close, get_hold_put, get_put]);
    });
}

#[test]
fn private_handles_and_close() {
    ::loom::model(|| Model::new(config(AhTtl::Bypass)).run([close, get_put, neighbour]));
}

#[test]
fn expire_invalidate_and_close() {
    ::loom::model(|| expired().run([close, neighbour, get_put]));
}

#[test]
fn one_key_is_created_once_at_a_time() {
    ::loom::model(|| {
        let m = Model::new(config(AhTtl::Infinite));
        let device = Arc::clone(&m.device);
        m.run([get_put, get_put, get_put]);
        assert_eq!(device.created(), 1);
    });
}

#[test]
fn whoever_waits_is_woken() {
    ::loom::model(|| {
        let m = Rig::new(FakeDevice::new(true), config(AhTtl::Infinite));
        let cache = m.cache.clone();
        let other = thread::spawn(move || {
            cache.run_jobs();
        });
        let ah = m.cache.get(&key(1), "loom").unwrap();
        other.join().unwrap();
        assert!(m.device.is_live(ah.ah().serial));
        drop(ah);
        m.cache.close();
        m.cache.poll(m.clock.now());
        assert_eq!(m.device.created(), m.device.destroyed());
    });
}
