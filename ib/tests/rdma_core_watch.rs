//! What the watch of neighbours and routes does on a real kernel, seen through the counters of the address-handle cache:
//! soft-RoCE looks a neighbour up for each packet and does not care what its handles hold.
//!
//! These tests change the network configuration, so they run only in the machine that `ci/soft-roce` boots (it sets
//! `SOFT_ROCE=1`): soft-RoCE device rxe0 on v0, 10.77.0.1/24 and fd77::1/64. Else they print `skipped`.
#![cfg(feature = "rdma-core")]

mod soft_roce;

use std::{
    cell::Cell,
    sync::{Arc, MutexGuard},
    time::{Duration, Instant},
};

use ib::{ah::AhRef, device::*, md::Md, rdma_core::RdmaDevice, types::Gid};
use soft_roce::{attr, gid, run, until_within};
use uct::{Registry, config::Env};

const PATIENCE: Duration = Duration::from_secs(60);
/// A peer that changes its link address so that all can be seen that the kernel told before.
const SENTINEL: &str = "10.77.0.99";

type Ah = AhRef<RdmaDevice>;

struct Rig {
    _turn: MutexGuard<'static, ()>,
    md: Arc<Md<RdmaDevice>>,
    macs: Cell<u8>,
}

fn until<T>(what: &str, look: impl FnMut() -> Option<T>) -> T {
    until_within(PATIENCE, what, look)
}

impl Rig {
    /// `None` where this is not the machine for it.
    fn get(test: &str, settings: &[(&str, &str)]) -> Option<Rig> {
        let turn = soft_roce::turn(test)?;
        let env = settings.iter().fold(Env::empty(), |env, (name, value)| env.with(name, value));
        let mut registry = Registry::new();
        ib::component::register(&mut registry);
        let md = registry.open_md("rxe0", &env).unwrap().inner().clone();
        let md = md.as_any().downcast::<Md<RdmaDevice>>().unwrap();
        let rig = Rig { _turn: turn, md, macs: Cell::new(0) };
        rig.moves(SENTINEL);
        Some(rig)
    }

    fn fresh_mac(&self) -> String {
        self.macs.set(self.macs.get() + 1);
        format!("02:00:00:00:77:{:02x}", self.macs.get())
    }

    /// The neighbour appears, or changes its link address. Nobody is there: one that the kernel could doubt would fail.
    fn moves(&self, ip: &str) {
        run(&format!("ip neigh replace {ip} lladdr {} dev v0 nud permanent", self.fresh_mac()));
    }

    fn local(&self, peer: &str) -> Gid {
        let table = self.md.device().query_gids(1).unwrap();
        let own = match peer {
            p if p.starts_with("fe80") => table.iter().find(|g| g.gid.is_link_local()).expect("a link-local GID").gid,
            p if p.contains(':') => gid("fd77::1"),
            _ => gid("10.77.0.1"),
        };
        assert!(table.iter().any(|g| g.gid == own));
        own
    }

    fn try_ah(&self, peer: &str) -> uct::Result<Ah> {
        let attr = attr(self.local(peer), gid(peer));
        self.md.ah_cache().get(&attr, "test")
    }

    fn ah(&self, peer: &str) -> Ah {
        let ah = self.try_ah(peer).unwrap_or_else(|e| panic!("{peer}: {e}"));
        assert!(!ah.is_stale(), "{peer}");
        ah
    }

    fn invalidated(&self) -> u64 {
        self.md.ah_cache().stats().invalidated
    }

    fn created(&self) -> u64 {
        self.md.ah_cache().stats().created
    }

    /// Until everything has been seen that the kernel has told so far, and the routes are known of all handles. Handles of
    /// the sentinel are the price.
    fn sync(&self) {
        let sentinel = self.ah(SENTINEL);
        self.moves(SENTINEL);
        until("the sentinel to be stale", || sentinel.is_stale().then_some(()));
    }

    /// `change` concerns the handle of `peer` and none of `others`; a new get makes a new one.
    fn concerns(&self, peer: &str, others: &[&str], change: impl FnOnce()) {
        let old = self.ah(peer);
        let others: Vec<Ah> = others.iter().map(|o| self.ah(o)).collect();
        self.sync();
        let (before, created) = (self.invalidated(), self.created());
        assert!(!old.is_stale());
        change();
        until("the handle to be stale", || old.is_stale().then_some(()));
        assert!(!old.is_poisoned());
        self.sync();
        assert_eq!(self.invalidated(), before + 2, "{peer}, the sentinel, and no other");
        assert!(others.iter().all(|o| !o.is_stale()));
        let new = self.ah(peer);
        assert_ne!(new.generation(), old.generation());
        assert_eq!(self.created(), created + 2, "{peer}, and the sentinel's");
        assert!(self.ah(peer).is_same(&new), "from now on it is shared");
    }

    /// `change` concerns nobody.
    fn concerns_nobody(&self, peers: &[&str], change: impl FnOnce()) {
        let all: Vec<Ah> = peers.iter().map(|o| self.ah(o)).collect();
        self.sync();
        let before = self.invalidated();
        change();
        self.sync();
        assert_eq!(self.invalidated(), before + 1, "the sentinel");
        assert!(all.iter().all(|a| !a.is_stale()));
    }
}

#[test]
fn a_link_address_that_changes_ends_the_sharing_of_exactly_that_handle() {
    let Some(rig) = Rig::get("a_link_address_that_changes", &[]) else { return };
    let peers = ["10.77.0.50", "10.77.0.51", "fd77::50", "fd77::51", "fe80::50"];
    for peer in peers {
        rig.moves(peer);
    }
    for peer in peers {
        let others: Vec<&str> = peers.into_iter().filter(|p| *p != peer).collect();
        rig.concerns(peer, &others, || rig.moves(peer));
    }
    // An idle handle is given up, and the next get makes another one.
    let idle = rig.ah(peers[0]).generation();
    assert_eq!(rig.ah(peers[0]).generation(), idle);
    rig.moves(peers[0]);
    until("another handle", || (rig.ah(peers[0]).generation() != idle).then_some(()));
}

#[test]
fn being_more_or_less_sure_and_collecting_do_nothing() {
    let Some(rig) = Rig::get("being_more_or_less_sure", &[]) else { return };
    let (peer, other) = ("10.77.0.50", "10.77.0.51");
    rig.moves(peer);
    rig.moves(other);
    let mac = rig.fresh_mac();
    let set = |state: &str| drop(run(&format!("ip neigh replace {peer} lladdr {mac} dev v0 nud {state}")));
    set("reachable");
    rig.concerns_nobody(&[peer, other], || {
        for state in ["stale", "reachable", "delay", "stale", "permanent", "stale"] {
            set(state);
        }
    });
    // The kernel collects entries that are not in use when they have been so for long.
    rig.concerns_nobody(&[peer, other], || {
        for setting in
            ["neigh.v0.gc_stale_time=1", "neigh.default.gc_thresh1=0", "neigh.default.base_reachable_time_ms=1000"]
        {
            run(&format!("sysctl -qw net.ipv4.{setting}"));
        }
        until("the entry to be collected", || run(&format!("ip neigh show {peer} dev v0")).is_empty().then_some(()));
    });
    // What handles hold is not forgotten with it.
    rig.concerns(peer, &[other], || rig.moves(peer));
    run("sysctl -qw net.ipv4.neigh.default.gc_thresh1=128");
    run("sysctl -qw net.ipv4.neigh.v0.gc_stale_time=60");
    run("sysctl -qw net.ipv4.neigh.default.base_reachable_time_ms=30000");
}

#[test]
fn a_neighbour_that_fails_concerns_its_handle() {
    let Some(rig) = Rig::get("a_neighbour_that_fails", &[]) else { return };
    let (peer, other) = ("10.77.0.50", "10.77.0.51");
    rig.moves(peer);
    rig.moves(other);
    let old = rig.ah(peer);
    let others = rig.ah(other);
    rig.sync();
    // Nobody is there to answer: the kernel asks a few times and gives up.
    run(&format!("ip neigh replace {peer} lladdr {} dev v0 nud reachable", mac_of(peer)));
    run(&format!("ip neigh change {peer} lladdr {} dev v0 nud probe", mac_of(peer)));
    until("the handle to be stale", || old.is_stale().then_some(()));
    assert!(!others.is_stale());
    // Once it cannot be resolved, that is said in bounded time and named.
    let began = Instant::now();
    let e = rig.try_ah(peer).unwrap_err();
    println!("after {:?}: {e}", began.elapsed());
    let text = e.to_string();
    assert_eq!(e.kind(), uct::ErrorKind::EndpointTimeout);
    assert!(text.contains("rxe0:1") && text.contains(peer) && text.contains("10.77.0.1"), "{text}");
    // It answers again.
    rig.moves(peer);
    until("a new handle", || rig.try_ah(peer).ok());
}

/// The link address that the kernel has for a neighbour.
fn mac_of(ip: &str) -> String {
    let line = run(&format!("ip neigh show {ip} dev v0"));
    let mut words = line.split_whitespace();
    words.find(|w| *w == "lladdr").and_then(|_| words.next()).expect("a link address").to_string()
}

#[test]
fn behind_a_gateway_the_route_and_the_gateway_count() {
    let Some(rig) = Rig::get("behind_a_gateway", &[]) else { return };
    let families = [
        ("10.99.0.5", "10.99.0.0/16", "10.99.0.0/24", "10.98.0.0/16", "10.77.0.60", "10.77.0.61", "10.77.0.50"),
        ("fd99::5", "fd99::/48", "fd99::/64", "fd98::/64", "fd77::60", "fd77::61", "fd77::50"),
    ];
    for (far, net, subnet, elsewhere, gateway, second, near) in families {
        for ip in [gateway, second, near] {
            rig.moves(ip);
        }
        run(&format!("ip route add {net} via {gateway} dev v0"));
        rig.concerns(far, &[near], || rig.moves(gateway));
        rig.concerns(near, &[far], || rig.moves(near));
        rig.concerns_nobody(&[far, near], || rig.moves(second));
        rig.concerns_nobody(&[far, near], || drop(run(&format!("ip route add {elsewhere} via {second} dev v0"))));
        rig.concerns(far, &[near], || drop(run(&format!("ip route replace {net} via {second} dev v0"))));
        rig.concerns(far, &[near], || rig.moves(second));
        // The same way by other words.
        rig.concerns_nobody(&[far, near], || drop(run(&format!("ip route add {subnet} via {second} dev v0"))));
        rig.concerns(far, &[near], || drop(run(&format!("ip route replace {subnet} via {gateway} dev v0"))));
        rig.concerns_nobody(&[far, near], || drop(run(&format!("ip route del {net}"))));
        let old = rig.ah(far);
        rig.sync();
        run(&format!("ip route del {subnet}"));
        until("the handle to be stale", || old.is_stale().then_some(()));
        println!("without a route: {}", rig.try_ah(far).unwrap_err());
        run(&format!("ip route del {elsewhere}"));
    }
}

/// The kernel tells of IPv4 routes, and of addresses, before they are gone.
#[test]
fn a_route_that_goes_is_noticed_each_time() {
    let Some(rig) = Rig::get("a_route_that_goes_each_time", &[]) else { return };
    let (far, subnet, gateway) = ("10.99.0.5", "10.99.0.0/24", "10.77.0.60");
    rig.moves(gateway);
    for _ in 0..30 {
        run(&format!("ip route add {subnet} via {gateway} dev v0"));
        let old = until("a handle", || rig.try_ah(far).ok());
        rig.sync();
        run(&format!("ip route del {subnet}"));
        until("the handle to be stale", || old.is_stale().then_some(()));
    }
}

#[test]
fn it_can_be_switched_off_and_ends_with_the_domain() {
    let watchers = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        tasks
            .filter(|t| {
                std::fs::read_to_string(t.as_ref().unwrap().path().join("comm")).is_ok_and(|n| n == "ah-watch\n")
            })
            .count()
    };
    let Some(rig) = Rig::get("it_can_be_switched_off", &[]) else { return };
    let fds = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    until("one thread, when those of other tests have ended", || (watchers() == 1).then_some(()));
    let open = fds();
    drop(rig);
    until("the thread to end", || (watchers() == 0).then_some(()));
    until("its sockets to close", || (fds() < open).then_some(()));
    let Some(rig) = Rig::get("it_can_be_switched_off", &[("IB_NEIGHBOUR_WATCH", "n")]) else { return };
    assert_eq!(watchers(), 0);
    drop(rig);
}
