//! Addresses that change under living endpoints: a peer that moved to another link address, a local address that goes away
//! and comes back, handles that must not be used again.

use std::time::Duration;

use ib::{
    ah::{AhPath, Invalidated, PathNews},
    device::RoceVersion,
    sim::SimConfig,
    sw::Rng,
    types::Gid,
};
use uct::Ep;
use uct_tests::{
    fabric::Sim,
    flow::{Flow, Kind, Ledger},
    hooks::Weather,
    world::{NodeOptions, World},
};

macro_rules! tests {
    ($($name:ident),+ $(,)?) => {
        mod sim {
            use super::*;
            $(#[test] fn $name() { super::$name(World::new(stringify!($name))) })+
        }
    };
}

tests! {
    reconnect_while_the_old_endpoint_lingers,
    the_peer_moves_and_nobody_tells,
    the_peer_moves_and_an_event_tells,
    the_next_hop_moves_under_traffic,
    own_address_goes_and_comes_back,
    poisoned_handles_are_swapped_before_the_next_send,
    queue_pair_waits_for_the_gid_table,
    queue_pair_is_reset_and_goes_on,
    only_a_change_of_what_is_used_is_a_warning,
    ipv4_is_not_taken_for_what_the_buffer_held_before,
}

fn options(ttl: Duration) -> NodeOptions {
    let mut o = NodeOptions::default();
    o.md.ah_cache_ttl = ttl;
    o.ud.timer_tick = Duration::from_millis(2);
    o.ud.linger_timeout = Duration::from_secs(3);
    o.ud.timeout = Duration::from_secs(6);
    o.iface.rx_queue_len = 256;
    o
}

fn pair(w: &mut World<Sim>, ttl: Duration, late: Option<(u64, u64)>) {
    pair_on(w, ttl, late, false);
}

/// With `sleeps`, calls of the devices may sleep: GID tables are read on errands.
fn pair_on(w: &mut World<Sim>, ttl: Duration, late: Option<(u64, u64)>, sleeps: bool) {
    for _ in 0..2 {
        let c: SimConfig = w.fabric.config();
        w.fabric.next_config = Some(SimConfig { late_sends: late, ah_create_sleeps: sleeps, ..c });
        w.add(&options(ttl));
    }
}

/// Sends `n` messages on a flow and waits until they are there.
#[track_caller]
fn say(w: &mut World<Sim>, ep: &Ep, flow: &mut Flow, ledger: &mut Ledger, n: u32) {
    let mut rng = Rng::new(u64::from(flow.number));
    flow.send_mixed(w, 0, ep, n, &mut rng);
    ledger.await_flow(w, 1, flow);
}

const TTLS: [Duration; 3] = [Duration::ZERO, Duration::from_millis(1), Duration::MAX];

/// The old endpoint has data that nobody acknowledged when its user destroys it, the peer moves, and the user connects
/// again: the new endpoint works, and what was accepted on the old one arrives at the new place.
fn reconnect_while_the_old_endpoint_lingers(w: World<Sim>) {
    drop(w);
    for ttl in TTLS {
        for tell in [true, false] {
            for late in [None, Some((1_000, 100_000))] {
                let mut w = World::<Sim>::new("reconnect_while_the_old_endpoint_lingers");
                pair(&mut w, ttl, late);
                let mut ledger = Ledger::default();
                let (mut old, mut new) = (Flow::new(0), Flow::new(1));
                let ep = w.nodes[0].connect(&w.nodes[1]);
                say(&mut w, &ep, &mut old, &mut ledger, 5);
                w.settle();
                let mac = w.fabric.net.fresh_mac();
                w.nodes[1].device.set_mac(mac, tell);
                // Nobody has looked at the event yet.
                while old.send(&w.nodes[0], &ep, Kind::Bcopy, 500, None).is_ok() {}
                drop(ep);
                let start = w.now();
                let ep = w.nodes[0].connect(&w.nodes[1]);
                say(&mut w, &ep, &mut new, &mut ledger, 20);
                // With an event, or without sharing, this took no stall.
                if tell || ttl.is_zero() {
                    assert!(w.now().since(start) < Duration::from_secs(1), "ttl {ttl:?}, tell {tell}");
                }
                ledger.await_flow(&mut w, 1, &old);
                assert_eq!(w.total("ep.failures"), 0, "ttl {ttl:?}, tell {tell}, late {late:?}");
                drop(ep);
                w.run_until("all records are freed", |w| w.nodes[0].counter("eps") == 0);
                w.check_violations();
                w.finish();
            }
        }
    }
}

/// Resends stay unanswered: the endpoint asks for a fresh address handle, once if that one leads to the peer.
fn the_peer_moves_and_nobody_tells(w: World<Sim>) {
    drop(w);
    for ttl in TTLS {
        let mut w = World::<Sim>::new("the_peer_moves_and_nobody_tells");
        pair(&mut w, ttl, None);
        let mut ledger = Ledger::default();
        let mut flow = Flow::new(0);
        let ep = w.nodes[0].connect(&w.nodes[1]);
        say(&mut w, &ep, &mut flow, &mut ledger, 5);
        for moves in 1..=3 {
            w.settle();
            let mac = w.fabric.net.fresh_mac();
            w.nodes[1].device.set_mac(mac, false);
            let start = w.now();
            say(&mut w, &ep, &mut flow, &mut ledger, 20);
            let took = w.now().since(start);
            assert!(took >= Duration::from_secs(1), "found out after {took:?}: how?");
            assert!(took < Duration::from_secs(6), "{took:?}");
            assert_eq!(w.nodes[0].counter("ah.re_resolved"), moves, "once per stall");
        }
        assert_eq!(w.total("ep.failures"), 0);
        // A peer that is really gone is looked up at each sixth of the time-out from the second on, and then it is dead.
        w.settle();
        w.fabric.net.crash(w.nodes[1].device.node());
        let before = w.nodes[0].counter("ah.re_resolved");
        flow.send(&w.nodes[0], &ep, Kind::Short, 10, None).unwrap();
        w.run_until("the peer is declared dead", |w| !w.nodes[0].failures.lock().is_empty());
        let tries = w.nodes[0].counter("ah.re_resolved") - before;
        assert!((1..=4).contains(&tries), "{tries}");
        drop(ep);
        w.finish();
    }
}

/// An event makes the entry stale: holders keep it, new endpoints get a new one; an old endpoint finds out by its stall.
fn the_peer_moves_and_an_event_tells(w: World<Sim>) {
    drop(w);
    for ttl in TTLS {
        let mut w = World::<Sim>::new("the_peer_moves_and_an_event_tells");
        pair(&mut w, ttl, None);
        let mut ledger = Ledger::default();
        let (mut old, mut new) = (Flow::new(0), Flow::new(1));
        let a = w.nodes[0].connect(&w.nodes[1]);
        say(&mut w, &a, &mut old, &mut ledger, 5);
        w.settle();
        let created = w.nodes[0].counter("ah.created");
        let mac = w.fabric.net.fresh_mac();
        w.nodes[1].device.set_mac(mac, true);
        w.nodes[0].md.poll_events();
        let start = w.now();
        let b = w.nodes[0].connect(&w.nodes[1]);
        say(&mut w, &b, &mut new, &mut ledger, 20);
        assert!(w.now().since(start) < Duration::from_secs(1), "the new endpoint did not wait for a stall");
        assert_eq!(w.nodes[0].counter("ah.created"), created + 1);
        say(&mut w, &a, &mut old, &mut ledger, 20);
        assert_eq!(w.total("ep.failures"), 0);
        drop((a, b));
        w.finish();
    }
}

/// As the watch of neighbours and routes tells it: by path, whenever it likes, with sends of the old handle still being read.
/// The next endpoint has a handle that leads to the new place, and an old one gets that too when it has found out. Its old
/// handle outlives the sends that name it (else the device complains), and no more.
fn the_next_hop_moves_under_traffic(w: World<Sim>) {
    drop(w);
    for ttl in TTLS {
        let mut w = World::<Sim>::new("the_next_hop_moves_under_traffic");
        pair(&mut w, ttl, Some((1_000, 100_000)));
        let mut ledger = Ledger::default();
        let (mut old, mut new) = (Flow::new(0), Flow::new(1));
        let a = w.nodes[0].connect(&w.nodes[1]);
        say(&mut w, &a, &mut old, &mut ledger, 5);
        for moves in 1..=3 {
            while old.send(&w.nodes[0], &a, Kind::Bcopy, 500, None).is_ok() {}
            let mac = w.fabric.net.fresh_mac();
            w.nodes[1].device.set_mac(mac, false);
            let cache = w.nodes[0].md.ah_cache();
            let elsewhere = AhPath { sgid: gid_of(&w, 1), dgid: gid_of(&w, 0), port: 1 };
            assert_eq!(cache.handle_paths(&[(elsewhere, PathNews::Moved)].into()), Invalidated::default());
            let path = AhPath { sgid: gid_of(&w, 0), dgid: gid_of(&w, 1), port: 1 };
            assert_eq!(cache.paths(), [path]);
            assert_eq!(cache.handle_paths(&[(path, PathNews::Moved)].into()).stale, 1, "ttl {ttl:?}");
            let created = cache.stats().created;
            let start = w.now();
            let b = w.nodes[0].connect(&w.nodes[1]);
            say(&mut w, &b, &mut new, &mut ledger, 20);
            assert!(w.now().since(start) < Duration::from_secs(1), "the new endpoint did not wait for a stall");
            say(&mut w, &a, &mut old, &mut ledger, 20);
            ledger.await_flow(&mut w, 1, &old);
            assert_eq!(w.nodes[0].counter("ah.re_resolved"), moves, "by its stall");
            // At TTL 0 each has one of its own.
            let made = if ttl.is_zero() { 2 } else { 1 };
            assert_eq!(w.nodes[0].counter("ah.created"), created + made);
            drop(b);
            w.run_until("the second endpoint is freed", |w| w.nodes[0].counter("eps") == 1);
            w.run_until("only the handle in use is left", |w| w.nodes[0].counter("ah.live") == 1);
        }
        assert_eq!(w.total("ep.failures"), 0);
        w.check_violations();
        drop(a);
        w.finish();
    }
}

fn gid_of(w: &World<Sim>, node: usize) -> Gid {
    w.nodes[node].device.gid()
}

/// A local GID goes away, sends through it would kill the queue pair; it comes back at another index. No message is lost.
fn own_address_goes_and_comes_back(w: World<Sim>) {
    drop(w);
    let late = Some((1_000, 50_000));
    for ttl in TTLS {
        for (late, loss, sleeps) in
            [(None, 0, false), (late, 0, false), (late, 10, false), (late, 0, true), (late, 10, true)]
        {
            let mut w = World::<Sim>::new("own_address_goes_and_comes_back");
            pair_on(&mut w, ttl, late, sleeps);
            w.fabric.net.set_faults(Weather { loss, ..Weather::default() }.faults());
            let mut ledger = Ledger::default();
            let mut flow = Flow::new(0);
            let eps: Vec<Ep> = (0..3).map(|_| w.nodes[0].connect(&w.nodes[1])).collect();
            say(&mut w, &eps[0], &mut flow, &mut ledger, 5);
            for _ in 0..3 {
                while flow.send(&w.nodes[0], &eps[0], Kind::Bcopy, 200, None).is_ok() {}
                let gid = gid_of(&w, 0);
                // The table gets another entry first, so that the index is another one afterwards.
                let device = w.nodes[0].device.clone();
                let other = Gid::from_ip("10.9.9.9".parse().unwrap());
                device.remove_gid(gid);
                device.add_gid(other, RoceVersion::V2).unwrap();
                for _ in 0..5 {
                    let _refused = flow.send(&w.nodes[0], &eps[0], Kind::Short, 20, None);
                    w.step();
                }
                w.run_for(Duration::from_millis(20));
                device.add_gid(gid, RoceVersion::V2).unwrap();
                device.remove_gid(other);
                say(&mut w, &eps[0], &mut flow, &mut ledger, 10);
                w.check_violations();
            }
            // The other endpoints, which sent nothing meanwhile, work, too.
            for (i, ep) in eps.iter().enumerate().skip(1) {
                let mut flow = Flow::new(i as u32);
                say(&mut w, ep, &mut flow, &mut ledger, 10);
            }
            assert_eq!(w.total("ep.failures"), 0);
            drop(eps);
            w.finish();
        }
    }
}

/// If the event comes before the next send, nothing is sent through the old handle: the queue pair never fails.
fn poisoned_handles_are_swapped_before_the_next_send(mut w: World<Sim>) {
    pair(&mut w, Duration::MAX, None);
    let mut ledger = Ledger::default();
    let mut flow = Flow::new(0);
    let ep = w.nodes[0].connect(&w.nodes[1]);
    say(&mut w, &ep, &mut flow, &mut ledger, 5);
    w.settle();
    let gid = gid_of(&w, 0);
    let device = w.nodes[0].device.clone();
    device.remove_gid(gid);
    device.add_gid(gid, RoceVersion::V2).unwrap();
    w.nodes[0].md.poll_events();
    say(&mut w, &ep, &mut flow, &mut ledger, 50);
    assert_eq!(w.nodes[0].counter("qp.resets"), 0);
    assert_eq!(w.nodes[0].counter("ah.re_resolved"), 1);
    drop(ep);
    w.finish();
}

/// A handle that is not known to be bad yet takes the queue pair down, on a device whose GID table takes a while to read:
/// the queue pair is set up again once, when the table is known.
fn queue_pair_waits_for_the_gid_table(mut w: World<Sim>) {
    pair_on(&mut w, Duration::MAX, Some((1_000, 20_000)), true);
    let mut ledger = Ledger::default();
    let mut flow = Flow::new(0);
    let ep = w.nodes[0].connect(&w.nodes[1]);
    say(&mut w, &ep, &mut flow, &mut ledger, 5);
    w.settle();
    let gid = gid_of(&w, 0);
    let device = w.nodes[0].device.clone();
    device.remove_gid(gid);
    device.add_gid(Gid::from_ip("10.9.9.9".parse().unwrap()), RoceVersion::V2).unwrap();
    device.add_gid(gid, RoceVersion::V2).unwrap();
    flow.send(&w.nodes[0], &ep, Kind::Bcopy, 200, None).unwrap();
    // Nobody reads the table, however often progress is called.
    for _ in 0..200 {
        w.nodes[0].worker.progress();
        w.fabric.net.run_for(Duration::from_micros(10));
    }
    assert_eq!(w.nodes[0].counter("qp.resets"), 0);
    assert!(flow.send(&w.nodes[0], &ep, Kind::Short, 20, None).is_ok(), "what is sent meanwhile is sent again");
    ledger.await_flow(&mut w, 1, &flow);
    assert_eq!((w.nodes[0].counter("qp.resets"), w.nodes[0].counter("ah.re_resolved")), (1, 1));
    assert_eq!(w.total("ep.failures"), 0);
    drop(ep);
    w.finish();
}

/// Something else put the queue pair into ERROR: it is reset, and what was in it is sent again.
fn queue_pair_is_reset_and_goes_on(mut w: World<Sim>) {
    pair(&mut w, Duration::MAX, Some((1_000, 20_000)));
    let mut ledger = Ledger::default();
    let mut flow = Flow::new(0);
    let ep = w.nodes[0].connect(&w.nodes[1]);
    say(&mut w, &ep, &mut flow, &mut ledger, 5);
    for node in [0, 1, 0, 1] {
        let before = w.nodes[node].counter("qp.resets");
        while flow.send(&w.nodes[0], &ep, Kind::Bcopy, 1000, None).is_ok() {}
        w.nodes[node].device.fail_qps();
        ledger.await_flow(&mut w, 1, &flow);
        say(&mut w, &ep, &mut flow, &mut ledger, 30);
        assert_eq!(w.nodes[node].counter("qp.resets"), before + 1);
    }
    assert_eq!(w.total("ep.failures"), 0);
    w.settle();
    w.buffers_come_home();
    drop(ep);
    w.finish();
}

/// Addresses that come and go beside ours are nobody's business; ours that goes is one warning.
fn only_a_change_of_what_is_used_is_a_warning(mut w: World<Sim>) {
    pair(&mut w, Duration::MAX, None);
    let mut ledger = Ledger::default();
    let mut flow = Flow::new(0);
    let ep = w.nodes[0].connect(&w.nodes[1]);
    say(&mut w, &ep, &mut flow, &mut ledger, 5);
    let device = w.nodes[0].device.clone();
    let lines = uct_tests::log::lines_of(tracing::Level::WARN, || {
        for i in 0..10u8 {
            let other = Gid::from_ip(std::net::Ipv4Addr::new(10, 9, 9, i).into());
            device.add_gid(other, RoceVersion::V2).unwrap();
            w.run_for(Duration::from_millis(100));
            device.remove_gid(other);
            say(&mut w, &ep, &mut flow, &mut ledger, 5);
        }
    });
    assert!(lines.is_empty(), "{lines:?}");
    let gid = gid_of(&w, 0);
    let lines = uct_tests::log::lines_of(tracing::Level::WARN, || {
        w.settle();
        device.remove_gid(gid);
        for _ in 0..50 {
            w.run_for(Duration::from_millis(20));
        }
    });
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].contains(&gid.to_string()) && lines[0].contains("is gone"), "{}", lines[0]);
    device.add_gid(gid, RoceVersion::V2).unwrap();
    say(&mut w, &ep, &mut flow, &mut ledger, 5);
    drop(ep);
    w.finish();
}

/// A device leaves the first bytes of the buffer as they were when an IPv4 packet comes. Some held an IPv6 header before: by
/// that the packet would be for an address of nobody here.
fn ipv4_is_not_taken_for_what_the_buffer_held_before(mut w: World<Sim>) {
    let six = |n: u16| Gid::from_ip(std::net::Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, n).into());
    // The receiver has both kinds of address, and few buffers; its peers have one kind each.
    let mut c = w.fabric.config();
    c.gids.push((six(1), RoceVersion::V2));
    w.fabric.next_config = Some(c);
    let mut o = options(Duration::MAX);
    (o.iface.rx_queue_len, o.ud.rx_queue_len_init) = (4, 4);
    w.add(&o);
    let mut c = w.fabric.config();
    c.gids = vec![(six(2), RoceVersion::V2)];
    w.fabric.next_config = Some(c);
    w.add(&options(Duration::MAX));
    w.add(&options(Duration::MAX));
    let to = w.nodes[0].iface();
    let mut by_six = ib::addr::DeviceAddr::parse(&to.device_address()).unwrap().0;
    by_six.link = ib::addr::LinkAddr::Ethernet { gid: six(1), version: ib::addr::AddrVersion::V2 };
    let (four, ifa) = (to.device_address(), to.iface_address());
    // Requests by IPv6 come, which cannot be answered from an IPv4 address, and leave their headers in the buffers.
    let six_params = uct::EpParams::to_iface(&by_six.to_bytes(), &ifa);
    let b = w.nodes[2].iface().ep(&uct::EpParams::to_iface(&four, &ifa)).unwrap();
    let (mut flow, mut ledger, mut strangers) = (Flow::new(1), Ledger::default(), Vec::new());
    for _ in 0..100 {
        strangers.push(w.nodes[1].iface().ep(&six_params).unwrap());
        w.run_for(Duration::from_micros(10));
        flow.send_mixed(&mut w, 2, &b, 3, &mut Rng::new(2));
    }
    ledger.await_flow(&mut w, 0, &flow);
    assert!(w.nodes[0].counter("rx.packets") >= 400, "the requests came");
    assert_eq!(w.nodes[0].counter("rx.dgid"), 0, "taken for somebody else's");
    assert_eq!(w.nodes[2].counter("tx.resends"), 0);
    drop((strangers, b));
    w.finish();
}
