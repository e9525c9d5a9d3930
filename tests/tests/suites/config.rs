//! Settings, from the environment to what an interface does; and the limits that an interface states.

use std::{sync::Arc, time::Duration};

use ib::{sim::SimConfig, types::Mtu};
use uct::{
    AmId, ErrorKind, IfaceParams, Registry, SendError, Worker, WorkerParams,
    config::{Bytes, Env, Units},
    iface::Caps,
    md::MemoryDomain,
};
use uct_tests::{
    fabric::{Fabric, Sim},
    world::{NodeOptions, World},
};
use ud::UdConfig;

const ID: AmId = AmId::truncate(0);

fn registry() -> Registry {
    let mut r = Registry::new();
    ib::component::register(&mut r);
    ud::register(&mut r);
    r
}

/// Opens an interface the way a program does: by name, from the environment.
fn open(env: &Env) -> uct::Result<uct::Iface> {
    let r = registry();
    let md = r.open_md(ib::component::SOFT_DEVICE, env)?;
    let worker = Worker::new(WorkerParams::default().progress_thread(false))?;
    r.transport("ud")?.open_iface(&md, &worker, 1, &IfaceParams::default(), env)
}

/// Node options from an environment.
fn options(pairs: &[(&str, &str)]) -> NodeOptions {
    let env = Env::from_pairs(pairs.iter().copied());
    NodeOptions {
        md: ib::config::MdConfig::from_env(&env).expect("settings of the domain"),
        iface: ud::config::iface_config(&env).expect("settings of the interface"),
        ud: UdConfig::from_env(&env).expect("settings of UD"),
        ..NodeOptions::default()
    }
}

#[test]
fn soft_mtu_reaches_the_limits() {
    for (mtu, bytes) in [("1024", 1024), ("2048", 2048), ("4096", 4096)] {
        let iface = open(&Env::from_pairs([("UCX_SOFT_MTU", mtu)])).expect("an interface");
        assert_eq!(iface.attr().am.max_bcopy.map(usize::from), Some(bytes - 8));
        assert_eq!(iface.attr().am.align_mtu, bytes);
    }
    let iface = open(&Env::from_pairs([("UCX_IB_SEG_SIZE", "1k"), ("UCX_SOFT_MTU", "4096")])).expect("an interface");
    assert_eq!(iface.attr().am.max_bcopy.map(usize::from), Some(1016));
}

#[test]
fn later_names_win_up_to_the_interface() {
    let env = Env::from_pairs([
        ("UCX_SEG_SIZE", "300"),
        ("UCX_IB_SEG_SIZE", "1k"),
        ("UCX_UD_SEG_SIZE", "2k"),
        ("UCX_SOFT_MTU", "4096"),
    ]);
    assert_eq!(open(&env).expect("an interface").attr().am.max_bcopy.map(usize::from), Some(2040));
    let env = env.with("UCX_UD_VERBS_SEG_SIZE", "512");
    assert_eq!(open(&env).expect("an interface").attr().am.max_bcopy.map(usize::from), Some(504));
}

#[test]
fn wrong_values_are_named_with_what_is_accepted() {
    for (name, value, accepted) in [
        ("UCX_UD_TIMEOUT", "soon", "s"),
        ("UCX_UD_LINGER_TIMEOUT", "5h", "ms"),
        ("UCX_UD_MAX_WINDOW", "1", "from 2 to 1025"),
        ("UCX_UD_TIMER_BACKOFF", "0.5", "at least 1"),
        ("UCX_UD_ETH_DGID_CHECK", "perhaps", "y"),
        ("UCX_IB_SL", "16", "from 0 to 15"),
        ("UCX_IB_RX_QUEUE_LEN", "3", "from 4"),
        ("UCX_IB_TX_QUEUE_LEN", "40000", "32767"),
        ("UCX_IB_SEG_SIZE", "1.5k", "UCX_IB_SEG_SIZE"),
        ("UCX_IB_PATH_MTU", "1500", "1024"),
        ("UCX_IB_AH_CACHE_TTL", "x", "inf"),
        ("UCX_IB_ROCE_REACHABILITY_MODE", "hope", "route"),
        ("UCX_SOFT_MTU", "9000", "4096"),
        ("UCX_SOFT_ADDR", "nowhere", "UCX_SOFT_ADDR"),
        ("UCX_SOFT_PORT", "0", "65535"),
        ("UCX_UD_RX_QUEUE_LEN_INIT", "300abc", "300abc"),
    ] {
        let e = open(&Env::from_pairs([(name, value)])).expect_err(name);
        let text = e.to_string();
        assert_eq!(e.kind(), ErrorKind::InvalidConfig, "{text}");
        for part in [name, value, accepted] {
            assert!(text.contains(part), "no `{part}` in: {text}");
        }
    }
}

#[test]
fn unknown_names_get_a_suggestion() {
    let env = Env::from_pairs([("UCX_UD_TIMEOUTS", "1s"), ("UCX_TX_QUEUE_LEN", "100")]);
    let r = registry();
    let unknown = r.settings().unknown(&env);
    let text = format!("{unknown:?}");
    assert!(text.contains("UCX_UD_TIMEOUTS") && text.contains("UCX_UD_TIMEOUT\""), "{text}");
    // It is a warning, not an error.
    open(&env).expect("an interface");
}

#[test]
fn limits_follow_ucx_at_each_mtu() {
    // M: the port's MTU, I: the inline size the device gives, G: pieces per send.
    for mtu in Mtu::ALL {
        for (inline, sge) in [(64, 6), (188, 4), (16, 6), (0, 30)] {
            let mut w: World<Sim> = World::new("limits_follow_ucx_at_each_mtu");
            w.fabric.next_config =
                Some(SimConfig { mtu, inline_max: inline, sge_max: sge, soft: None, ..w.fabric.config() });
            let mut o = NodeOptions::default();
            o.iface.tx_min_inline = Bytes(256);
            o.iface.tx_min_sge = sge - 1;
            let i = w.add(&o);
            let (m, inline, sge) = (mtu.bytes(), inline as usize, sge as usize);
            let am = w.nodes[i].iface().attr().am;
            // UCX advertises I - 8, of which 8 are the header argument of am_short. Ours is absent if that alone does not
            // fit.
            let short = inline.saturating_sub(8).min(m - 8);
            assert_eq!(am.max_short.map(usize::from), Some(short).filter(|n| *n >= 8), "{mtu:?}, inline {inline}");
            let seg = m + 40;
            assert_eq!(am.max_bcopy.map(usize::from), Some(seg - 48));
            assert_eq!(am.max_zcopy.map(usize::from), Some(seg - 48));
            // UCX: seg - 8 - 136, which with its 40 bytes of GRH exceeds nothing but at small packets.
            assert_eq!(am.max_hdr, (seg - 8 - 136).min(m - 8), "{mtu:?}");
            assert_eq!(am.max_iov, (sge - 1).min(am.max_iov.max(4)).min(8), "{sge} pieces");
            assert_eq!((am.opt_zcopy_align, am.align_mtu), (512, m));
            let attr = w.nodes[i].iface().attr();
            assert_eq!((attr.iface_addr_len, attr.ep_addr_len), (3, 6));
            assert_eq!(attr.device_addr_len, w.nodes[i].iface().device_address().len());
            assert_eq!(attr.device_addr_len, if mtu == Mtu::M4096 { 17 } else { 18 });
            assert_eq!(attr.overhead, Duration::from_nanos(105));
        }
    }
    let mut w: World<Sim> = World::new("limits_follow_ucx_at_each_mtu");
    let i = w.add(&NodeOptions::default());
    let attr = w.nodes[i].iface().attr();
    let all = Caps::PENDING | Caps::CONNECT_TO_IFACE | Caps::CONNECT_TO_EP | Caps::EP_CHECK | Caps::HANDLER_SYNC;
    assert!(attr.caps.contains(all | Caps::HANDLER_ASYNC | Caps::PEER_FAILURE | Caps::EVENT_FD | Caps::INTER_NODE));
    assert_eq!((attr.am.max_short.map(usize::from), attr.am.max_hdr), (Some(56), 3992));
}

#[test]
fn timeout_setting_decides_when_a_peer_is_dead() {
    for (value, limit) in [("100ms", 100), ("2s", 2_000), ("0.1m", 6_000)] {
        let mut w: World<Sim> = World::new("timeout_setting_decides_when_a_peer_is_dead");
        w.add(&options(&[("UCX_UD_TIMEOUT", value)]));
        w.add(&options(&[]));
        w.nodes[1].motion = uct_tests::world::Motion::Stopped;
        let _ep = w.nodes[0].connect(&w.nodes[1]);
        let start = w.now();
        w.run_until("the failure", |w| !w.nodes[0].failures.lock().is_empty());
        let took = w.now().since(start).as_millis() as u64;
        assert!((limit..limit * 2 + 50).contains(&took), "{value}: {took} ms");
    }
}

#[test]
fn linger_setting_decides_how_long_a_record_stays() {
    for (value, limit) in [("0", 0), ("3s", 3_000)] {
        let mut w: World<Sim> = World::new("linger_setting_decides_how_long_a_record_stays");
        // Without BYE, as towards UCX: nothing ends it early.
        let mut o = options(&[("UCX_UD_LINGER_TIMEOUT", value)]);
        o.tuning.features = Some(ud::proto::Features::empty());
        w.add(&o);
        w.add(&o);
        let ep = w.nodes[0].connect(&w.nodes[1]);
        w.send(|| ep.am_short(ID, 0, b""));
        w.settle();
        drop(ep);
        if limit > 0 {
            w.run_for(Duration::from_millis(limit - 100));
            assert_eq!(w.nodes[0].counter("eps"), 1, "{value}");
        }
        w.run_for(Duration::from_millis(200));
        assert_eq!(w.nodes[0].counter("eps"), 0, "{value}");
    }
}

#[test]
fn window_setting_bounds_what_is_in_flight() {
    for (value, most) in [("2", 1), ("5", 4), ("1025", 1024)] {
        let mut w: World<Sim> = World::new("window_setting_bounds_what_is_in_flight");
        w.add(&options(&[("UCX_UD_MAX_WINDOW", value), ("UCX_IB_TX_QUEUE_LEN", "4096")]));
        w.add(&options(&[]));
        let ep = w.nodes[0].connect(&w.nodes[1]);
        for i in 0..6_000 {
            w.send(|| ep.am_short(ID, i, b""));
        }
        w.settle();
        let mut n = 0;
        while ep.am_short(ID, 0, b"").is_ok() {
            n += 1;
        }
        assert!(n <= most && n >= most.min(64), "{value}: {n} in flight");
    }
}

#[test]
fn ah_cache_settings_reach_the_cache() {
    let mut w: World<Sim> = World::new("ah_cache_settings_reach_the_cache");
    w.add(&options(&[("UCX_IB_AH_CACHE_TTL", "0")]));
    w.add(&options(&[]));
    let eps: Vec<_> = (0..5).map(|_| w.nodes[0].connect(&w.nodes[1])).collect();
    w.run_for(Duration::from_millis(1));
    assert_eq!(w.nodes[0].counter("ah.live"), 5, "0: one for each endpoint");
    assert_eq!(w.nodes[1].counter("ah.live"), 1, "inf: one for all");
    drop(eps);
    // A finite one: idle handles go when it is over, without anybody asking for them.
    let mut w: World<Sim> = World::new("ah_cache_settings_reach_the_cache");
    w.add(&options(&[("UCX_IB_AH_CACHE_TTL", "10s")]));
    w.add(&options(&[]));
    let ep = w.nodes[0].connect(&w.nodes[1]);
    w.send(|| ep.am_short(ID, 0, b""));
    drop(ep);
    w.run_until("the endpoint is freed", |w| w.nodes[0].counter("eps") == 0);
    assert_eq!(w.nodes[0].counter("ah.live"), 1);
    w.run_for(Duration::from_secs(9));
    assert_eq!(w.nodes[0].counter("ah.live"), 1);
    w.run_for(Duration::from_secs(3));
    assert_eq!((w.nodes[0].counter("ah.live"), w.nodes[0].counter("ah.expired")), (0, 1));
}

/// What is set on one side holds for both ways of the path. A port does not get larger by it.
#[test]
fn path_mtu_setting_limits_what_both_sides_send() {
    let mut w: World<Sim> = World::new("path_mtu_setting_limits_what_both_sides_send");
    w.add(&options(&[("UCX_IB_PATH_MTU", "1024")]));
    w.add(&options(&[]));
    w.fabric.next_config = Some(SimConfig { mtu: Mtu::M512, ..w.fabric.config() });
    w.add(&options(&[("UCX_IB_PATH_MTU", "4096")]));
    let limit = |w: &World<Sim>, i: usize| w.nodes[i].iface().attr().am.max_bcopy.map(usize::from);
    assert_eq!([0, 1, 2].map(|i| limit(&w, i)), [Some(1016), Some(4088), Some(504)]);
    let small = w.nodes[1].connect(&w.nodes[2]);
    assert_eq!(w.send(|| small.am_bcopy(ID, &mut |to| to.len())), 504);
    let (a, b) = (w.nodes[0].connect(&w.nodes[1]), w.nodes[1].connect(&w.nodes[0]));
    w.run_for(Duration::from_millis(1));
    assert_eq!(w.send(|| a.am_bcopy(ID, &mut |to| to.len())), 1016);
    assert_eq!(w.send(|| b.am_bcopy(ID, &mut |to| to.len())), 1016);
    let region = w.nodes[1].md.mem_alloc(2000).expect("memory");
    match b.am_zcopy(ID, b"", &[region.slice(0..1017).expect("a slice")], None) {
        Err(SendError::Failed(e)) => assert_eq!(e.kind(), ErrorKind::InvalidParam),
        other => panic!("{other:?}"),
    }
}

#[test]
fn contradicting_settings_are_refused_together() {
    for pairs in [
        [("UCX_SOFT_ADDR", "127.0.0.1"), ("UCX_SOFT_NETDEV", "lo")],
        [("UCX_IB_GID_INDEX", "0"), ("UCX_IB_ROCE_SUBNETS", "10.0.0.0/8")],
        [("UCX_IB_GID_INDEX", "0"), ("UCX_IB_GID", "127.0.0.1")],
        [("UCX_UD_TIMER_TICK", "10s"), ("UCX_UD_TIMEOUT", "1s")],
    ] {
        let e = open(&Env::from_pairs(pairs)).expect_err("a contradiction");
        let text = e.to_string();
        assert_eq!(e.kind(), ErrorKind::InvalidConfig, "{text}");
        for (name, _) in pairs {
            assert!(text.contains(name), "no `{name}` in: {text}");
        }
    }
}

#[test]
fn gid_index_that_does_not_exist_is_refused_with_the_table() {
    let mut w: World<Sim> = World::new("gid_index_that_does_not_exist_is_refused_with_the_table");
    let device = w.fabric.device();
    let e = w.try_add_on(device, &options(&[("UCX_IB_GID_INDEX", "7")])).expect_err("no such entry");
    let text = e.to_string();
    assert!(text.contains('7') && text.contains("sim0"), "{text}");
    let _: Arc<dyn uct::Clock> = w.fabric.clock();
    assert_eq!(options(&[("UCX_IB_GID_INDEX", "7")]).md.gid_index, Units::Is(7));
}

#[test]
fn rx_async_max_poll_bounds_a_round_of_the_thread() {
    let mut w: World<Sim> = World::new("rx_async_max_poll_bounds_a_round_of_the_thread");
    w.add(&options(&[]));
    w.add(&options(&[("UCX_UD_RX_ASYNC_MAX_POLL", "8")]));
    let ep = w.nodes[0].connect(&w.nodes[1]);
    for i in 0..500 {
        w.send(|| ep.am_short(ID, i, b""));
    }
    w.settle();
    w.nodes[1].motion = uct_tests::world::Motion::Stopped;
    let mut sent = 0;
    while sent < 100 && ep.am_short(ID, 0, b"").is_ok() {
        sent += 1;
    }
    w.nodes[0].worker.progress();
    w.fabric.net.run_for(Duration::from_millis(1));
    // However much has come, the user's thread waits for eight packets at most.
    for round in 1..=sent / 8 {
        w.nodes[1].iface().progress_async();
        assert_eq!(w.nodes[1].counter("rx.waiting"), round * 8);
    }
}

#[test]
fn one_line_says_what_is_used_and_what_was_changed() {
    let env =
        Env::from_pairs([("UCX_UD_TIMEOUT", "60s"), ("UCX_IB_RX_QUEUE_LEN", "8192"), ("UCX_UD_MAX_WINDOW", "1025")]);
    let lines = uct_tests::log::lines_of(tracing::Level::INFO, || drop(open(&env).expect("an interface")));
    let changed: Vec<&String> = lines.iter().filter(|l| l.contains("changed from default")).collect();
    assert_eq!(changed.len(), 1, "{lines:?}");
    assert!(
        changed[0].contains("UD_TIMEOUT=1m") && changed[0].contains("IB_RX_QUEUE_LEN=8k")
            || changed[0].contains("8192")
    );
    assert!(!changed[0].contains("MAX_WINDOW"), "set to what it is anyway: {}", changed[0]);
    let using: Vec<&String> = lines.iter().filter(|l| l.starts_with("using ")).collect();
    assert_eq!(using.len(), 1, "{lines:?}");
    // Device and port, the local address with index and version, and how it was chosen.
    for part in ["soft0:1", "gid index", "RoCE v2", "mtu"] {
        assert!(using[0].contains(part), "no {part} in {}", using[0]);
    }
}
