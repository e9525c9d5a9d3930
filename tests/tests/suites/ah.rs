//! The contract of the address-handle cache, as far as it shows through a UD interface; and creations that are slow or fail.

use std::time::Duration;

use ib::{
    addr::DeviceAddr,
    device::SoftIdentity,
    sim::{AhScript, SimConfig, SimDevice},
    types::Gid,
};
use uct::{Ep, EpParams, ErrorKind};
use uct_tests::{
    fabric::{Fabric, Sim},
    flow::{Flow, Kind, Ledger},
    hooks::Hooks,
    on_fabrics,
    world::{Motion, NodeOptions, World},
};

on_fabrics! { sim, soft;
    endpoints_to_one_peer_share_one_handle,
    ttl_zero_makes_private_handles,
    idle_handles_are_reused,
    the_handle_is_given_back_when_the_record_is_freed,
    closing_the_cache_leaves_holders_alone,
}

macro_rules! only_sim {
    ($($name:ident),+ $(,)?) => {
        mod only_sim {
            use super::*;
            $(#[test] fn $name() { super::$name(World::new(stringify!($name))) })+
        }
    };
}

only_sim! {
    idle_handles_expire_and_steady_use_does_not,
    the_bound_on_idle_handles_evicts_the_oldest,
    slow_creation_makes_only_its_endpoint_wait,
    slow_creation_whose_endpoint_is_destroyed_meanwhile,
    failing_creation_names_everything,
    failing_creation_that_was_deferred_reaches_the_error_handler,
    the_device_limit_evicts_or_says_enomem,
    bogus_addresses_cannot_starve_local_connects,
}

fn options(ttl: Duration) -> NodeOptions {
    let mut o = NodeOptions::default();
    o.md.ah_cache_ttl = ttl;
    o.ud.timer_tick = Duration::from_millis(2);
    o.ud.linger_timeout = Duration::from_millis(10);
    o.iface.rx_queue_len = 256;
    o
}

#[track_caller]
fn say<F: Fabric>(w: &mut World<F>, from: usize, to: usize, ep: &Ep, flow: &mut Flow, ledger: &mut Ledger) {
    w.run_until("a message is accepted", |w| flow.send(&w.nodes[from], ep, Kind::Short, 16, None).is_ok());
    ledger.await_flow(w, to, flow);
}

#[track_caller]
fn until_freed<F: Fabric>(w: &mut World<F>, node: usize) {
    w.run_until("the records are freed", |w| w.nodes[node].counter("eps") == 0);
}

fn endpoints_to_one_peer_share_one_handle<F: Hooks>(mut w: World<F>) {
    F::need_own_addresses();
    for _ in 0..3 {
        w.add(&options(Duration::MAX));
    }
    let eps: Vec<Ep> = (0..20).map(|i| w.nodes[0].connect(&w.nodes[1 + i % 2])).collect();
    w.settle();
    let c = |w: &World<F>, name| w.nodes[0].counter(name);
    assert_eq!((c(&w, "ah.live"), c(&w, "ah.held"), c(&w, "ah.created")), (2, 2, 2));
    assert_eq!(c(&w, "ah.hits"), 18);
    // The other sides hold one, too, for endpoints that nobody there has asked for.
    assert_eq!((w.nodes[1].counter("ah.live"), w.nodes[2].counter("ah.live")), (1, 1));
    drop(eps);
    until_freed(&mut w, 0);
    w.run_until("nobody holds them", |w| c(w, "ah.held") == 0);
    assert_eq!(c(&w, "ah.live"), 2, "idle, for the next one");
    w.finish();
}

fn ttl_zero_makes_private_handles<F: Hooks>(mut w: World<F>) {
    w.add(&options(Duration::ZERO));
    w.add(&options(Duration::MAX));
    let mut eps: Vec<Ep> = (0..5).map(|_| w.nodes[0].connect(&w.nodes[1])).collect();
    w.settle();
    assert_eq!((w.nodes[0].counter("ah.live"), w.nodes[0].counter("ah.hits")), (5, 0));
    assert_eq!(w.nodes[1].counter("ah.live"), 1);
    eps.truncate(2);
    w.run_until("three records are freed, and their handles with them", |w| {
        w.nodes[0].counter("eps") == 2 && w.nodes[0].counter("ah.live") == 2
    });
    drop(eps);
    w.run_until("all handles are gone", |w| w.nodes[0].counter("ah.live") == 0);
    w.finish();
}

fn idle_handles_are_reused<F: Hooks>(mut w: World<F>) {
    w.add(&options(Duration::MAX));
    w.add(&options(Duration::MAX));
    for _ in 0..5 {
        let ep = w.nodes[0].connect(&w.nodes[1]);
        w.settle();
        drop(ep);
        until_freed(&mut w, 0);
    }
    assert_eq!(w.nodes[0].counter("ah.created"), 1);
    w.finish();
}

/// Never in destroy: a lingering endpoint still resends and acknowledges.
fn the_handle_is_given_back_when_the_record_is_freed<F: Hooks>(mut w: World<F>) {
    w.add(&options(Duration::MAX));
    w.add(&options(Duration::MAX));
    let ep = w.nodes[0].connect(&w.nodes[1]);
    w.settle();
    // The peer stops, so that nothing is acknowledged.
    w.nodes[1].motion = Motion::Stopped;
    let mut flow = Flow::new(0);
    flow.send(&w.nodes[0], &ep, Kind::Short, 16, None).unwrap();
    drop(ep);
    w.run_for(Duration::from_millis(30));
    assert_eq!((w.nodes[0].counter("eps"), w.nodes[0].counter("ah.held")), (1, 1));
    w.nodes[1].motion = Motion::User;
    Ledger::default().await_flow(&mut w, 1, &flow);
    until_freed(&mut w, 0);
    w.run_until("the handle is given back", |w| w.nodes[0].counter("ah.held") == 0);
    w.finish();
}

fn closing_the_cache_leaves_holders_alone<F: Hooks>(mut w: World<F>) {
    for _ in 0..3 {
        w.add(&options(Duration::MAX));
    }
    let ep = w.nodes[0].connect(&w.nodes[1]);
    let (mut flow, mut ledger) = (Flow::new(0), Ledger::default());
    say(&mut w, 0, 1, &ep, &mut flow, &mut ledger);
    w.nodes[0].md.ah_cache().close();
    let target = w.nodes[2].iface();
    let e = w.nodes[0]
        .iface()
        .ep(&EpParams::to_iface(&target.device_address(), &target.iface_address()))
        .expect_err("a closed cache gives nothing");
    assert_eq!(e.kind(), ErrorKind::Closed);
    assert!(e.to_string().contains("open the device again"), "{e}");
    say(&mut w, 0, 1, &ep, &mut flow, &mut ledger);
    drop(ep);
    until_freed(&mut w, 0);
    w.run_until("it dies with its last holder", |w| w.nodes[0].counter("ah.live") == 0);
    w.finish();
}

fn idle_handles_expire_and_steady_use_does_not(mut w: World<Sim>) {
    let ttl = Duration::from_millis(100);
    for _ in 0..3 {
        w.add(&options(ttl));
    }
    let old = w.nodes[0].connect(&w.nodes[1]);
    let (mut flow, mut ledger) = (Flow::new(0), Ledger::default());
    // One is held for longer than the TTL, the other is used for a moment again and again.
    for _ in 0..20 {
        say(&mut w, 0, 1, &old, &mut flow, &mut ledger);
        let ep = w.nodes[0].connect(&w.nodes[2]);
        w.settle();
        drop(ep);
        w.run_until("the short-lived record is freed", |w| w.nodes[0].counter("eps") == 1);
        w.run_for(ttl / 2);
    }
    assert_eq!((w.nodes[0].counter("ah.created"), w.nodes[0].counter("ah.expired")), (2, 0));
    // Nobody asks for it any more: it is freed by the domain's own timer.
    w.run_for(ttl * 3);
    assert_eq!((w.nodes[0].counter("ah.live"), w.nodes[0].counter("ah.expired")), (1, 1));
    say(&mut w, 0, 1, &old, &mut flow, &mut ledger);
    let ep = w.nodes[0].connect(&w.nodes[2]);
    assert_eq!(w.nodes[0].counter("ah.created"), 3, "resolved again");
    drop((old, ep));
    w.finish();
}

fn the_bound_on_idle_handles_evicts_the_oldest(mut w: World<Sim>) {
    let mut o = options(Duration::MAX);
    o.md.ah_cache_max = 3;
    w.add(&o);
    for _ in 0..6 {
        w.add(&options(Duration::MAX));
    }
    for i in 1..=6 {
        let ep = w.nodes[0].connect(&w.nodes[i]);
        w.settle();
        drop(ep);
        until_freed(&mut w, 0);
    }
    w.run_for(Duration::from_secs(20));
    assert_eq!((w.nodes[0].counter("ah.idle"), w.nodes[0].counter("ah.evicted")), (3, 3));
    // The last ones are there still.
    let created = w.nodes[0].counter("ah.created");
    let eps: Vec<Ep> = (4..=6).map(|i| w.nodes[0].connect(&w.nodes[i])).collect();
    assert_eq!(w.nodes[0].counter("ah.created"), created);
    drop(eps);
    w.finish();
}

fn slow(w: &mut World<Sim>) {
    let c = w.fabric.config();
    w.fabric.next_config = Some(SimConfig { ah_create_sleeps: true, ..c });
}

/// The helper's work stands for a creation that sleeps. Meanwhile other endpoints go on.
fn slow_creation_makes_only_its_endpoint_wait(mut w: World<Sim>) {
    slow(&mut w);
    for _ in 0..3 {
        w.add(&options(Duration::MAX));
    }
    let a = w.nodes[0].connect(&w.nodes[1]);
    let (mut fa, mut fb) = (Flow::new(0), Flow::new(1));
    let mut ledger = Ledger::default();
    say(&mut w, 0, 1, &a, &mut fa, &mut ledger);
    let b = w.nodes[0].connect(&w.nodes[2]);
    assert_eq!(w.nodes[0].md.ah_cache().stats().pending, 1);
    // Without the world's turns, which run the helper's work, everything else of this node and its peer still moves.
    for _ in 0..20 {
        assert!(matches!(fb.send(&w.nodes[0], &b, Kind::Short, 16, None), Err(uct::SendError::NoResource)));
        let _busy = fa.send(&w.nodes[0], &a, Kind::Short, 16, None);
        for i in 0..2 {
            w.nodes[i].worker.progress();
        }
        w.fabric.net.run_for(Duration::from_micros(5));
        ledger.collect(&w, 1);
    }
    assert!(ledger.got(0) > 10, "{} messages arrived", ledger.got(0));
    assert_eq!(w.nodes[2].counter("rx.packets"), 0);
    say(&mut w, 0, 2, &b, &mut fb, &mut Ledger::default());
    w.settle();
    drop((a, b));
    w.finish();
}

fn slow_creation_whose_endpoint_is_destroyed_meanwhile(mut w: World<Sim>) {
    slow(&mut w);
    w.add(&options(Duration::ZERO));
    w.add(&options(Duration::MAX));
    let ep = w.nodes[0].connect(&w.nodes[1]);
    let (comp, status) = uct::Completion::polled();
    ep.close(Some(comp));
    w.run_until("closing completes", |_| status.poll().is_some());
    let ep = w.nodes[0].connect(&w.nodes[1]);
    drop(ep);
    until_freed(&mut w, 0);
    w.run_until("nothing is left of it", |w| w.nodes[0].counter("ah.live") == 0);
    assert_eq!(w.nodes[0].md.ah_cache().stats().pending, 0);
    w.finish();
}

/// Every errno in words, with device and port, both GIDs, the index and the way out.
fn failing_creation_names_everything(mut w: World<Sim>) {
    w.add(&options(Duration::MAX));
    w.add(&options(Duration::MAX));
    let target = w.nodes[1].iface();
    let params = EpParams::to_iface(&target.device_address(), &target.iface_address());
    for (errno, kind, hint) in [
        (libc::ETIMEDOUT, ErrorKind::EndpointTimeout, "ip neigh"),
        (libc::ENETUNREACH, ErrorKind::Unreachable, "ip route get"),
        (libc::EINVAL, ErrorKind::InvalidAddress, "UCX_IB_GID_INDEX"),
        (libc::ENOMEM, ErrorKind::NoMemory, "close endpoints"),
        (libc::EIO, ErrorKind::Io, "the device refused"),
    ] {
        w.nodes[0].device.script_ah(AhScript { dgid: None, errno, times: Some(2) });
        let e = w.nodes[0].iface().ep(&params).expect_err("the creation fails");
        w.nodes[0].device.clear_ah_script();
        let text = e.to_string();
        assert_eq!((e.kind(), e.errno()), (kind, Some(errno)), "{text}");
        for part in ["sim0:1", "::ffff:10.0.0.1", "::ffff:10.0.0.2", "sgid index 0", hint] {
            assert!(text.contains(part), "no {part} in: {text}");
        }
        // Remembered for a moment, so that a storm of connects costs one system call; then tried again.
        // But room may come at any time.
        if errno != libc::ENOMEM {
            let again = w.nodes[0].iface().ep(&params).expect_err("remembered");
            assert_eq!(again.kind(), kind);
        }
        w.run_for(Duration::from_secs(2));
        assert_eq!(w.nodes[0].counter("eps"), 0);
    }
    let ep = w.nodes[0].connect(&w.nodes[1]);
    w.settle();
    drop(ep);
    w.finish();
}

fn failing_creation_that_was_deferred_reaches_the_error_handler(mut w: World<Sim>) {
    slow(&mut w);
    w.add(&options(Duration::MAX));
    w.add(&options(Duration::MAX));
    w.nodes[0].device.script_ah(AhScript { dgid: None, errno: libc::ETIMEDOUT, times: None });
    let ep = w.nodes[0].connect(&w.nodes[1]);
    let comp = uct::Completion::polled();
    let _posted = ep.flush(uct::FlushMode::Local, Some(&comp.0)).unwrap();
    drop(comp.0);
    w.run_until("the error handler is told", |w| !w.nodes[0].failures.lock().is_empty());
    let failures = std::mem::take(&mut *w.nodes[0].failures.lock());
    assert_eq!(failures.len(), 1);
    let text = failures[0].error.to_string();
    assert!(text.contains("ip neigh") && text.contains("::ffff:10.0.0.2"), "{text}");
    assert_eq!(comp.1.poll(), Some(Err(ErrorKind::EndpointTimeout)));
    drop(ep);
    w.nodes[0].device.clear_ah_script();
    w.run_for(Duration::from_secs(2));
    let ep = w.nodes[0].connect(&w.nodes[1]);
    let mut flow = Flow::new(0);
    say(&mut w, 0, 1, &ep, &mut flow, &mut Ledger::default());
    drop(ep);
    w.finish();
}

fn the_device_limit_evicts_or_says_enomem(mut w: World<Sim>) {
    let c = w.fabric.config();
    w.fabric.next_config = Some(SimConfig { ah_max: 2, ..c });
    for _ in 0..4 {
        w.add(&options(Duration::MAX));
    }
    let a = w.nodes[0].connect(&w.nodes[1]);
    let b = w.nodes[0].connect(&w.nodes[2]);
    let connect = |w: &World<Sim>, to: usize| {
        let n = w.nodes[to].iface();
        w.nodes[0].iface().ep(&EpParams::to_iface(&n.device_address(), &n.iface_address()))
    };
    let e = connect(&w, 3).expect_err("both are held");
    assert_eq!((e.kind(), e.errno()), (ErrorKind::NoMemory, Some(libc::ENOMEM)));
    assert!(e.to_string().contains("a limit of 2") && e.to_string().contains("close endpoints"), "{e}");
    w.settle();
    drop(a);
    w.run_until("one is idle", |w| w.nodes[0].counter("ah.held") == 1);
    w.run_for(Duration::from_secs(2));
    let c = connect(&w, 3).expect("the idle one makes room");
    assert_eq!(w.nodes[0].counter("ah.evicted"), 1);
    let mut flow = Flow::new(0);
    say(&mut w, 0, 3, &c, &mut flow, &mut Ledger::default());
    drop((b, c));
    w.finish();
}

/// Requests with addresses that lead nowhere: their resolutions have a quota of their own, and local ones go first.
fn bogus_addresses_cannot_starve_local_connects(mut w: World<Sim>) {
    slow(&mut w);
    w.add(&options(Duration::MAX));
    w.add(&options(Duration::MAX));
    // A device that claims to be a different host in each request.
    let mut attackers = Vec::new();
    for i in 0..200u32 {
        let mut c = w.fabric.config();
        c.name = format!("bogus{i}");
        c.gids = vec![(Gid::from_ip(std::net::IpAddr::from((0x0b00_0000 + i).to_be_bytes())), c.gids[0].1)];
        c.soft = Some(SoftIdentity { udp_port: 4791, host_id: 1, rx_budget: 0 });
        w.fabric.next_config = Some(c);
        let mut o = options(Duration::MAX);
        o.record = false;
        o.iface.rx_queue_len = 4;
        o.ud.rx_queue_len_init = 1;
        let node = w.add(&o);
        attackers.push(w.nodes[node].connect(&w.nodes[0]));
    }
    // Their requests are on their way, and nobody runs the creations that they ask for.
    w.fabric.net.run_for(Duration::from_millis(1));
    for _ in 0..40 {
        w.nodes[0].worker.progress();
    }
    let pending = w.nodes[0].md.ah_cache().stats().pending;
    assert!((1..=64).contains(&pending), "{pending} creations for strangers");
    let ep = w.nodes[0].connect(&w.nodes[1]);
    // The very next creation is the local one.
    let device: &SimDevice = &w.nodes[0].device;
    let before = device.live().ahs;
    w.nodes[0].md.ah_cache().run_jobs();
    assert!(device.live().ahs > before);
    let mut flow = Flow::new(0);
    say(&mut w, 0, 1, &ep, &mut flow, &mut Ledger::default());
    drop((attackers, ep));
    w.finish();
}

/// A device address is parsed, not trusted.
#[test]
fn garbage_is_no_address() {
    for len in 0..64 {
        for fill in [0u8, 0xff, 0x5a] {
            let _any = DeviceAddr::parse(&vec![fill; len]);
        }
    }
}
