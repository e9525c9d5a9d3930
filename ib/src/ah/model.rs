//! Random sequences of calls, held against a model that is simple enough to be believed: a map, a list of holders and the
//! time. The model knows no locks, no lists of idle entries and no sweeps; where it says that a handle is shared, reused,
//! expired or evicted, the cache must agree on that very handle.

use std::{collections::BTreeMap, time::Duration};

use proptest::prelude::*;
use uct::{Clock, ErrorKind};

use super::{testing::*, *};
use crate::device::AsyncEvent;

const KEYS: u32 = 6;

#[derive(Clone, Debug)]
enum Op {
    Get(u32),
    Hold(usize),
    Put(usize),
    Advance(u64),
    Poll,
    Invalidate(usize, bool),
    Neighbour(u32),
    PortDown,
    Break(u32),
    Repair(u32),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (0..KEYS).prop_map(Op::Get),
        2 => any::<usize>().prop_map(Op::Hold),
        8 => any::<usize>().prop_map(Op::Put),
        4 => (0..1500u64).prop_map(Op::Advance),
        2 => Just(Op::Poll),
        1 => (any::<usize>(), any::<bool>()).prop_map(|(i, p)| Op::Invalidate(i, p)),
        1 => (0..KEYS).prop_map(Op::Neighbour),
        1 => Just(Op::PortDown),
        1 => (0..KEYS).prop_map(Op::Break),
        1 => (0..KEYS).prop_map(Op::Repair),
    ]
}

#[derive(Clone, Debug)]
struct Setting {
    ttl: AhTtl,
    idle_max: usize,
    limit: usize,
}

fn setting() -> impl Strategy<Value = Setting> {
    let ttl = prop_oneof![
        Just(AhTtl::Bypass),
        Just(AhTtl::Infinite),
        Just(AhTtl::Finite(Duration::from_millis(1))),
        Just(AhTtl::Finite(Duration::from_millis(700))),
    ];
    (ttl, 0..5usize, prop_oneof![Just(0usize), 2..6usize]).prop_map(|(ttl, idle_max, limit)| Setting {
        ttl,
        idle_max,
        limit,
    })
}

/// What the model knows of one handle, named by the device's serial number.
#[derive(Clone, Debug)]
struct Handle {
    key: u32,
    holders: usize,
    shared: bool,
    grade: Option<Grade>,
    /// When it became idle: milliseconds at a finite TTL, else gets.
    since: u64,
}

/// What a get comes to.
#[derive(PartialEq, Debug)]
enum Expect {
    Serial(u64),
    Fails(ErrorKind),
}

struct Model {
    setting: Setting,
    now: u64,
    gets: u64,
    serial: u64,
    handles: BTreeMap<u64, Handle>,
    /// Handles that nothing refers to and that no poll has destroyed yet.
    dead: usize,
    destroyed: u64,
    failures: BTreeMap<u32, u64>,
    broken: Vec<u32>,
}

impl Model {
    fn kill(&mut self, serial: u64) {
        self.handles.remove(&serial);
        self.dead += 1;
    }

    fn reap(&mut self) -> usize {
        let n = std::mem::take(&mut self.dead);
        self.destroyed += n as u64;
        n
    }

    fn idle(&self) -> Vec<(u64, u64)> {
        let mut idle: Vec<_> =
            self.handles.iter().filter(|(_, h)| h.shared && h.holders == 0).map(|(s, h)| (h.since, *s)).collect();
        idle.sort_unstable();
        idle
    }

    fn is_over(&self, since: u64) -> bool {
        matches!(self.setting.ttl, AhTtl::Finite(ttl) if u128::from(self.now - since) >= ttl.as_millis())
    }

    fn get(&mut self, key: u32) -> Expect {
        let found = self.handles.iter().find(|(_, h)| h.shared && h.key == key).map(|(s, h)| (*s, h.clone()));
        if let Some((serial, h)) = found {
            if h.holders > 0 || !self.is_over(h.since) {
                self.gets += 1;
                self.handles.get_mut(&serial).unwrap().holders += 1;
                return Expect::Serial(serial);
            }
            self.kill(serial);
        }
        if self.failures.get(&key).is_some_and(|until| self.now < *until) {
            return Expect::Fails(ErrorKind::EndpointTimeout);
        }
        self.gets += 1;
        if self.broken.contains(&key) {
            self.failures.insert(key, self.now + 1000);
            return Expect::Fails(ErrorKind::EndpointTimeout);
        }
        let live = self.handles.len() + self.dead;
        if self.setting.limit != 0 && live >= self.setting.limit && self.reap() == 0 {
            let Some((_, oldest)) = self.idle().first().copied() else {
                return Expect::Fails(ErrorKind::NoMemory);
            };
            self.kill(oldest);
            self.reap();
        }
        self.serial += 1;
        let shared = self.setting.ttl != AhTtl::Bypass;
        self.handles.insert(self.serial, Handle { key, holders: 1, shared, grade: None, since: 0 });
        self.bound();
        Expect::Serial(self.serial)
    }

    fn bound(&mut self) {
        let idle = self.idle();
        let excess = idle.len().saturating_sub(self.setting.idle_max);
        idle[..excess].iter().for_each(|(_, serial)| self.kill(*serial));
    }

    fn put(&mut self, serial: u64) {
        let since = if self.setting.ttl == AhTtl::Infinite { self.gets } else { self.now };
        let h = self.handles.get_mut(&serial).unwrap();
        h.holders -= 1;
        h.since = since;
        if h.holders == 0 && !h.shared {
            self.kill(serial);
        }
    }

    fn poll(&mut self) {
        for (since, serial) in self.idle() {
            if self.is_over(since) {
                self.kill(serial);
            }
        }
        self.bound();
        self.reap();
    }

    fn invalidate(&mut self, grade: Grade, concerns: impl Fn(u64, &Handle) -> bool) {
        let hit: Vec<_> = self.handles.iter().filter(|(s, h)| concerns(**s, h)).map(|(s, _)| *s).collect();
        for serial in hit {
            let h = self.handles.get_mut(&serial).unwrap();
            h.shared = false;
            h.grade = h.grade.max(Some(grade));
            if h.holders == 0 {
                self.kill(serial);
            }
        }
    }
}

fn run(setting: Setting, ops: Vec<Op>) -> Result<(), TestCaseError> {
    let device = FakeDevice::new(false);
    device.set_limit(setting.limit);
    let rig = Rig::new(device, AhCacheConfig { idle_max: setting.idle_max, ..config(setting.ttl) });
    let mut m = Model {
        setting,
        now: 0,
        gets: 0,
        serial: 0,
        handles: BTreeMap::new(),
        dead: 0,
        destroyed: 0,
        failures: BTreeMap::new(),
        broken: Vec::new(),
    };
    let mut held: Vec<AhRef<FakeDevice>> = Vec::new();
    for op in ops {
        match op {
            Op::Get(k) => {
                let got = match rig.cache.try_get(&key(k), GetOptions::local("model")) {
                    TryGet::Ready(ah) => {
                        let serial = ah.ah().serial;
                        held.push(ah);
                        Expect::Serial(serial)
                    }
                    TryGet::Failed { error, .. } => Expect::Fails(error.kind()),
                    TryGet::Pending(_) => return Err(TestCaseError::fail("pending on a device that does not sleep")),
                };
                prop_assert_eq!(got, m.get(k));
            }
            Op::Hold(i) if !held.is_empty() => {
                let ah = held[i % held.len()].clone();
                m.handles.get_mut(&ah.ah().serial).unwrap().holders += 1;
                held.push(ah);
            }
            Op::Put(i) if !held.is_empty() => {
                let ah = held.swap_remove(i % held.len());
                m.put(ah.ah().serial);
                drop(ah);
            }
            Op::Advance(ms) => {
                m.now += ms;
                rig.clock.advance(Duration::from_millis(ms));
            }
            Op::Poll => {
                rig.cache.poll(rig.clock.now());
                m.poll();
                prop_assert_eq!(rig.device.destroyed(), m.destroyed);
            }
            Op::Invalidate(i, poison) if !held.is_empty() => {
                let ah = &held[i % held.len()];
                let grade = if poison { Grade::Poisoned } else { Grade::Stale };
                rig.cache.invalidate(ah.attr(), ah.generation(), grade);
                let target = ah.ah().serial;
                // A private handle is not shared before either; the grade is what changes.
                m.invalidate(grade, |serial, _| serial == target);
            }
            Op::Hold(_) | Op::Put(_) | Op::Invalidate(..) => {}
            Op::Neighbour(k) => {
                rig.cache.handle_event(&AsyncEvent::NeighbourChange(peer_gid(k)));
                m.failures.remove(&k);
                m.invalidate(Grade::Stale, |_, h| h.key == k);
            }
            Op::PortDown => {
                rig.cache.handle_event(&AsyncEvent::PortError(1));
                m.failures.clear();
                m.invalidate(Grade::Stale, |_, _| true);
            }
            Op::Break(k) => {
                rig.device.set_broken(peer_gid(k), libc::ETIMEDOUT);
                m.broken.push(k);
            }
            Op::Repair(k) => {
                rig.device.set_broken(peer_gid(k), 0);
                m.broken.retain(|b| *b != k);
            }
        }
        for ah in &held {
            prop_assert!(rig.device.is_live(ah.ah().serial), "a held handle was destroyed");
            prop_assert_eq!(ah.grade(), m.handles[&ah.ah().serial].grade);
        }
        let s = rig.cache.stats();
        let idle = m.idle().len();
        prop_assert_eq!((s.live, s.idle, s.held), (m.handles.len() + m.dead, idle, m.handles.len() - idle));
        prop_assert_eq!((s.created, s.destroyed), (rig.device.created(), rig.device.destroyed()));
    }
    // Half of the holders outlive the cache.
    held.truncate(held.len() / 2);
    let Rig { cache, device, .. } = rig;
    cache.close();
    drop(cache);
    prop_assert!(held.iter().all(|ah| device.is_live(ah.ah().serial)));
    drop(held);
    prop_assert_eq!(device.created(), device.destroyed());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    /// On failure proptest prints the shortest sequence that fails; `PROPTEST_CASES` asks for more of them, and
    /// `PROPTEST_RNG_SEED` for the same again.
    #[test]
    fn the_cache_agrees_with_the_model(setting in setting(), ops in prop::collection::vec(op(), 1..120)) {
        run(setting, ops)?;
    }
}
