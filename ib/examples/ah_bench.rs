//! What the address-handle cache costs over the least it could cost, as ratios from one run.
//!
//! ```text
//! cargo run --release -p ib --example ah_bench
//! ```
//!
//! Each round measures every case once, one after the other, and each case's time is the median of its rounds: what
//! disturbs the machine disturbs all alike. Absolute times are printed for orientation only.

use std::{cell::Cell, hint::black_box, os::fd::RawFd, sync::Arc, time::Duration, time::Instant};

use hashbrown::HashTable;
use ib::{
    ah::{AhCache, AhCacheConfig, AhRef, AhTtl, Executor, GetOptions, TryGet},
    device::{
        Access, AhAttr, ArmFor, ArmResult, AsyncEvent, Device, DeviceAttr, GidEntry, GlobalRoute, MrKeys, PortAttr,
        QpCaps, QpInit, QpState, RecvWc, SendWc, SendWr, SoftAv, UdQp, VerbsError, VerbsResult,
    },
    types::{Gid, Lid, Qpn},
};
use parking_lot::Mutex;
use uct::{
    mem::{Block, Buf},
    time::MonotonicClock,
};

const ROUNDS: usize = 2001;
/// Short enough that most samples are not interrupted, long enough for the clock.
const OPS: usize = 1000;
const MANY: u32 = 100_000;

/// A device whose address handles cost nothing.
struct Free;
enum NoQp {}

impl UdQp for NoQp {
    type Ah = ();
    fn qpn(&self) -> Qpn {
        match *self {}
    }
    fn caps(&self) -> QpCaps {
        match *self {}
    }
    fn state(&self) -> QpState {
        match *self {}
    }
    fn reset(&mut self) -> VerbsResult<()> {
        match *self {}
    }
    fn post_send(&mut self, _: &SendWr<'_, ()>) -> VerbsResult<()> {
        match *self {}
    }
    fn ring(&mut self) {
        match *self {}
    }
    fn post_recv(&mut self, _: &mut Vec<Buf>) -> VerbsResult<()> {
        match *self {}
    }
    fn poll_send(&mut self, _: &mut Vec<SendWc>, _: usize) -> usize {
        match *self {}
    }
    fn poll_recv(&mut self, _: &mut Vec<RecvWc>, _: usize) -> usize {
        match *self {}
    }
    fn arm(&mut self, _: ArmFor) -> VerbsResult<ArmResult> {
        match *self {}
    }
    fn event_fd(&self) -> Option<RawFd> {
        match *self {}
    }
}

const UNSUPPORTED: VerbsError = VerbsError::new("bench", libc::EOPNOTSUPP);

impl Device for Free {
    type Ah = ();
    type UdQp = NoQp;
    fn attr(&self) -> DeviceAttr {
        DeviceAttr { name: "free0".into(), port_count: 0, ah_max: 0, ah_create_sleeps: false, soft: None }
    }
    fn query_port(&self, _: u8) -> VerbsResult<PortAttr> {
        Err(UNSUPPORTED)
    }
    fn query_gids(&self, _: u8) -> VerbsResult<Vec<GidEntry>> {
        Err(UNSUPPORTED)
    }
    fn create_ah(&self, _: &AhAttr) -> VerbsResult<()> {
        Ok(())
    }
    fn destroy_ah(&self, _: ()) -> VerbsResult<()> {
        Ok(())
    }
    fn reg_mr(&self, _: &Arc<Block>, _: Access) -> VerbsResult<MrKeys> {
        Err(UNSUPPORTED)
    }
    fn dereg_mr(&self, _: MrKeys) -> VerbsResult<()> {
        Err(UNSUPPORTED)
    }
    fn create_ud_qp(self: &Arc<Self>, _: &QpInit) -> VerbsResult<NoQp> {
        Err(UNSUPPORTED)
    }
    fn poll_async_event(&self) -> Option<AsyncEvent> {
        None
    }
}

fn key(n: u32) -> AhAttr {
    AhAttr {
        port: 1,
        sl: 0,
        src_path_bits: 0,
        static_rate: 0,
        dlid: Lid(0xc000),
        grh: Some(GlobalRoute {
            dgid: Gid::from_ip((0x0a00_0000 + n).to_be_bytes().into()),
            sgid: Gid::from_ip([10, 255, 0, 1].into()),
            hop_limit: 255,
            traffic_class: 106,
            flow_label: u32::MAX,
        }),
        soft: SoftAv { udp_port: 4791, host_id: 7 },
    }
}

/// The least a cache with counted references can do: lock, find, clone, unlock; and drop.
struct Bare(Mutex<HashTable<Arc<(AhAttr, u64)>>>);

impl Bare {
    /// As cheap a hash over the whole key as the cache's own.
    fn hash(attr: &AhAttr) -> u64 {
        fn fold(a: u64, b: u64) -> u64 {
            let p = u128::from(a) * u128::from(b);
            (p >> 64) as u64 ^ p as u64
        }
        const K0: u64 = 0x9e37_79b9_7f4a_7c15;
        const K1: u64 = 0xc2b2_ae3d_27d4_eb4f;
        let local = u64::from(attr.port)
            | u64::from(attr.sl) << 8
            | u64::from(attr.src_path_bits) << 16
            | u64::from(attr.static_rate) << 24
            | u64::from(attr.dlid.0) << 32
            | u64::from(attr.soft.udp_port) << 48;
        let h = fold(local ^ K0, attr.soft.host_id ^ K1);
        let Some(g) = &attr.grh else { return h };
        let route = u64::from(g.hop_limit) << 40 | u64::from(g.traffic_class) << 32 | u64::from(g.flow_label);
        let (d, s) = (u128::from_ne_bytes(g.dgid.0), u128::from_ne_bytes(g.sgid.0));
        h ^ fold(d as u64 ^ K1, (d >> 64) as u64 ^ K0)
            ^ fold(s as u64 ^ route ^ K0, (s >> 64) as u64 ^ K1).rotate_left(17)
    }

    fn new(entries: u32) -> Bare {
        let mut table = HashTable::new();
        for n in 0..entries {
            let attr = key(n);
            table.insert_unique(Self::hash(&attr), Arc::new((attr, 0)), |e| Self::hash(&e.0));
        }
        Bare(Mutex::new(table))
    }

    fn get(&self, attr: &AhAttr) -> Option<Arc<(AhAttr, u64)>> {
        let hash = Self::hash(attr);
        self.0.lock().find(hash, |e| e.0 == *attr).cloned()
    }
}

fn cache(ttl: AhTtl, entries: u32) -> AhCache<Free> {
    let cfg = AhCacheConfig { ttl, idle_max: usize::MAX, executor: Executor::Manual, ..AhCacheConfig::default() };
    let cache = AhCache::new(Arc::new(Free), cfg, Arc::new(MonotonicClock::new()));
    for n in 0..entries {
        drop(get(&cache, &key(n)));
    }
    cache
}

#[inline]
fn get(cache: &AhCache<Free>, attr: &AhAttr) -> Option<AhRef<Free>> {
    match cache.try_get(attr, GetOptions::local("bench")) {
        TryGet::Ready(ah) => Some(ah),
        _ => None,
    }
}

/// A long random walk over the keys; each round takes the next [`OPS`] steps of it.
fn walk() -> Vec<AhAttr> {
    let mut x = 0x2545_f491_4f6c_dd1du64;
    let mut next = move || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x
    };
    (0..200 * OPS).map(|_| key((next() % u64::from(MANY)) as u32)).collect()
}

fn ns(f: impl FnOnce()) -> f64 {
    let start = Instant::now();
    f();
    start.elapsed().as_nanos() as f64 / OPS as f64
}

fn main() {
    let hot = key(0);
    let walk = walk();
    let (bare, bare_many) = (Bare::new(1), Bare::new(MANY));
    let (ours, ours_many) = (cache(AhTtl::Infinite, 1), cache(AhTtl::Infinite, MANY));
    let finite = cache(AhTtl::Finite(Duration::from_secs(3600)), 1);
    let Some(plain) = bare.get(&hot) else { return };
    // Held in a cache of its own, so that the other cases revive idle entries.
    let held_in = cache(AhTtl::Infinite, 1);
    let Some(held) = get(&held_in, &hot) else { return };

    let bare_loop = |b: &Bare, k: &AhAttr| (0..OPS).for_each(|_| drop(black_box(b.get(black_box(k)))));
    let ours_loop = |c: &AhCache<Free>, k: &AhAttr| (0..OPS).for_each(|_| drop(black_box(get(c, black_box(k)))));
    let bare_hot = || bare_loop(&bare, &hot);
    let ours_hot = || ours_loop(&ours, &hot);
    let arc = || (0..OPS).for_each(|_| drop(black_box(Arc::clone(black_box(&plain)))));
    let hold = || (0..OPS).for_each(|_| drop(black_box(black_box(&held).clone())));
    let ours_hot_many = || ours_loop(&ours_many, &hot);
    let steps = |at: &Cell<usize>| {
        let from = at.get();
        at.set((from + OPS) % walk.len());
        walk[from..from + OPS].iter()
    };
    // Each case is half the walk away from what the other has just warmed the caches with.
    let (at_bare, at_ours) = (Cell::new(0), Cell::new(walk.len() / 2));
    let bare_uniform = || steps(&at_bare).for_each(|k| drop(black_box(bare_many.get(black_box(k)))));
    let ours_uniform = || steps(&at_ours).for_each(|k| drop(black_box(get(&ours_many, black_box(k)))));
    let shared = || ours_loop(&held_in, &hot);
    let revive = || ours_loop(&finite, &hot);
    let cases: [&dyn Fn(); 9] =
        [&bare_hot, &ours_hot, &arc, &hold, &ours_hot_many, &bare_uniform, &ours_uniform, &shared, &revive];

    let mut times = vec![Vec::with_capacity(ROUNDS); cases.len()];
    for round in 0..ROUNDS + 20 {
        for (case, times) in cases.iter().zip(&mut times) {
            let t = ns(case);
            // The first rounds warm up.
            if round >= 20 {
                times.push(t);
            }
        }
    }
    let m: Vec<f64> = times
        .into_iter()
        .map(|mut t| {
            t.sort_by(f64::total_cmp);
            t[t.len() / 2]
        })
        .collect();

    println!("{:<58} {:>7} {:>7}  {:>6}  limit", "one thread, medians of interleaved rounds", "ns", "of ns", "ratio");
    let row =
        |what: &str, a: f64, b: f64, limit: &str| println!("{what:<58} {a:>7.1} {b:>7.1}  {:>6.2}  {limit}", a / b);
    row("get + put, hot key / bare lock, find, clone, unlock, drop", m[1], m[0], "1.15");
    row("hold + put / Arc clone + drop", m[3], m[2], "1.10");
    row("get + put, hot key, among 100,000 / alone", m[4], m[1], "1.20");
    row("get + put, uniform over 100,000 / bare", m[6], m[5], "");
    row("get + put, hot key that is held / idle", m[7], m[1], "");
    row("get + put, hot key, revived at a finite TTL / at TTL inf", m[8], m[1], "");
}
