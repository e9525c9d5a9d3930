//! Known faults of UCX's `ud_verbs`, each with the test that shows that they are not ours.
//!
//! | | the fault | tests |
//! |---|---|---|
//! | H1 | "connected" while the answer to the request is still owed: a message that overtakes it can be skipped for good, and yet acknowledged | here `h1_…`; the engine's `hazards` |
//! | H2 | cancel and destroy forget packets: a lost one leaves a hole for ever | here `h2_…`; `legacy_peer::lingering_endpoint_answers_and_says_no_bye` |
//! | H3 | a receive queue of less than 4 loops for ever at open | here `h3_…` |
//! | H4 | service level 16 and more are accepted | here `h4_…` |
//! | H5 | timers shorter than a slot of the wheel end the process, long ones are cut | here `h5_…` |
//! | H6 | a restarted peer with the same numbers is never answered | `legacy_peer::restarted_process_with_the_same_numbers_gets_a_fresh_endpoint`, `failure::restart_at_the_same_address_resets_old_endpoints` |
//! | H7 | a remote write goes to any address | here `h7_…` |
//! | H8 | packets of strangers reach assertions | here `h8_…`; `hostile` |
//! | H9 | destroy recycles buffers that the device has not read yet | here `h9_…` |
//! | H10 | endpoints of strangers that nobody claims live until the interface is closed | here `h10_…` |
//! | H11 | closing the interface loses completions | here `h11_…` |
//! | H12 | errno is overwritten, tables are read once, senders are not checked, ids have no generation | here `h12_…` |
//! | H13 | counters of 16 bits, exhausted numbers | here `h13_…` |
//! | H14 | repetitions carry old acks, one loss costs three ticks | here `h14_…` |

use std::{sync::Arc, time::Duration};

use ib::{
    sim::{Faults, SimConfig, SimDevice},
    sw::FilterVerdict,
    types::Gid,
};
use parking_lot::Mutex;
use uct::{
    AmId, Completion, Ep, ErrorKind, FlushMode, Posted, SendError,
    config::{Env, Units},
    md::MemoryDomain,
};
use uct_tests::{
    fabric::{Fabric, Sim},
    packets::{self, ACK_REQ, Creq, Parsed, UCX_IDENT},
    raw::{Raw, Target},
    world::{NodeOptions, World},
};

const ID: AmId = AmId::truncate(4);

/// The usual options but for the first PSN, which foreign packets count from 1.
fn from_one() -> NodeOptions {
    let mut o = NodeOptions::default();
    o.tuning.initial_psn = None;
    o
}

/// One node and a bare queue pair on a device of its own.
fn with_stranger(name: &str, options: &NodeOptions) -> (World<Sim>, Raw<SimDevice>, Target<SimDevice>) {
    let mut w: World<Sim> = World::new(name);
    w.add(options);
    let device = w.fabric.device();
    let raw = Raw::new(&w, device);
    let to = raw.target(&w.nodes[0]);
    (w, raw, to)
}

fn request(raw: &Raw<SimDevice>, ep_id: u32, conn_sn: u32) -> Creq {
    Creq { qpn: raw.qpn(), ep_id, conn_sn, path: 0, ident: UCX_IDENT, addr: raw.plain_device_address(), junk: 0 }
}

/// Lets a stranger connect; returns our endpoint's id.
fn accepted(w: &mut World<Sim>, raw: &mut Raw<SimDevice>, to: &Target<SimDevice>, ep_id: u32, conn_sn: u32) -> u32 {
    let creq = request(raw, ep_id, conn_sn).packet(1, false);
    raw.send(to, &creq);
    w.run_for(Duration::from_micros(50));
    let got = raw.take();
    let crep = got.iter().find(|p| p.is_crep()).expect("an answer");
    let ours = crep.src_ep_id();
    raw.send(to, &packets::ack(ours, 0, 2, 1));
    w.run_for(Duration::from_micros(50));
    ours
}

type Results = Arc<Mutex<Vec<Result<(), ErrorKind>>>>;

/// Results of operations, and what makes completions that report there.
fn tally() -> (Results, impl Fn() -> Completion) {
    let all = Results::default();
    let a = all.clone();
    (all, move || {
        let a = a.clone();
        Completion::new(move |r| a.lock().push(r))
    })
}

#[test]
fn h1_no_data_overtakes_the_answer_to_a_request() {
    let (mut w, mut raw, to) = with_stranger("h1_no_data_overtakes_the_answer_to_a_request", &from_one());
    // The answers are lost for a while, and the user claims the endpoint and sends as soon as it may.
    let ours = request(&raw, 3, 0).packet(1, false);
    raw.send(&to, &ours);
    let params = uct::EpParams::to_iface(&raw.plain_device_address(), &raw.iface_address());
    let mut ep = None;
    let mut order = Vec::new();
    for _ in 0..200 {
        w.step();
        if w.nodes[0].counter("ep.passive_created") == 1 && ep.is_none() {
            ep = Some(w.nodes[0].iface().ep(&params).expect("an endpoint"));
        }
        if let Some(ep) = &ep {
            let _ = ep.am_short(ID, 0, b"");
        }
        order.extend(raw.take());
    }
    let first = order.iter().position(Parsed::is_crep).expect("an answer");
    assert!(order[..first].iter().all(|p| !p.is_am()), "{order:?}");
    assert_eq!(order[first].psn, 1);
    assert!(order.iter().any(|p| p.is_am() && p.psn == 2));
}

#[test]
fn h2_destroy_and_cancel_leave_no_hole() {
    let mut w: World<Sim> = World::new("h2_destroy_and_cancel_leave_no_hole").nodes(2);
    let ep = w.nodes[0].connect(&w.nodes[1]);
    w.send(|| ep.am_short(ID, 0, b"first"));
    w.settle();
    // Everything is lost until after destroy; what was accepted still arrives, in order, once.
    w.fabric.net.set_faults(Faults { partition: true, ..Faults::default() });
    let mut accepted = 1;
    while ep.am_short(ID, accepted, b"").is_ok() {
        accepted += 1;
    }
    let (all, comp) = tally();
    let c = comp();
    // Nothing of the flush is promised any more.
    assert_eq!(ep.flush(FlushMode::Local, Some(&c)).expect("a flush"), Posted::InProgress);
    drop(c);
    assert_eq!(ep.flush(FlushMode::Cancel, None).expect("cancel"), Posted::Done);
    assert_eq!(*all.lock(), [Err(ErrorKind::Canceled)], "canceled operations say so");
    match ep.am_short(ID, 0, b"") {
        Err(SendError::Failed(e)) => assert_eq!(e.kind(), ErrorKind::Canceled),
        other => panic!("after cancel only destroy is left: {other:?}"),
    }
    drop(ep);
    w.run_for(Duration::from_millis(50));
    w.fabric.net.set_faults(Faults::default());
    w.run_until("the accepted messages arrive", |w| w.nodes[1].inbox.lock().len() as u64 == accepted);
    let got: Vec<u64> =
        w.nodes[1].take().iter().map(|m| u64::from_ne_bytes(m.data[..8].try_into().expect("8 bytes"))).collect();
    assert!(got.iter().copied().eq(0..accepted), "{got:?}");
}

#[test]
fn h3_short_receive_queue_is_refused_or_works() {
    for n in ["0", "1", "3"] {
        let e = ud::config::iface_config(&Env::from_pairs([("UCX_IB_RX_QUEUE_LEN", n)])).expect_err("too short");
        let text = e.to_string();
        assert!(text.contains(&format!("UCX_IB_RX_QUEUE_LEN={n}")) && text.contains("from 4"), "{text}");
    }
    // The shortest that is allowed works, and so does a batch longer than the queue.
    let mut w: World<Sim> = World::new("h3_short_receive_queue_is_refused_or_works");
    let mut o = NodeOptions::default();
    o.iface.rx_queue_len = 4;
    o.iface.rx_max_batch = 100;
    w.add(&o);
    w.add(&o);
    let ep = w.nodes[0].connect(&w.nodes[1]);
    for i in 0..100 {
        w.send(|| ep.am_short(ID, i, b""));
    }
    w.run_until("all arrive", |w| w.nodes[1].inbox.lock().len() == 100);
}

#[test]
fn h4_service_level_hop_limit_and_traffic_class_have_limits() {
    for (name, value, part) in [
        ("UCX_IB_SL", "16", "from 0 to 15"),
        ("UCX_IB_TRAFFIC_CLASS", "256", "from 0 to 255"),
        ("UCX_IB_HOP_LIMIT", "256", "UCX_IB_HOP_LIMIT=256"),
        ("UCX_IB_HOP_LIMIT", "0", "from 1 to 255"),
    ] {
        let e = ud::config::iface_config(&Env::from_pairs([(name, value)])).expect_err("out of range");
        assert_eq!(e.kind(), ErrorKind::InvalidConfig);
        assert!(e.to_string().contains(part), "{e}");
    }
}

#[test]
fn h5_any_timer_tick_works() {
    // From a nanosecond to longer than UCX's wheel turns.
    for (tick, timeout) in [(1, 1_000_000_000), (1_000, 500_000_000), (7_000_000_000, 30_000_000_000)] {
        let mut w: World<Sim> = World::new("h5_any_timer_tick_works");
        let mut o = NodeOptions::default();
        o.ud.timer_tick = Duration::from_nanos(tick);
        o.ud.timeout = Duration::from_nanos(timeout);
        w.add(&o);
        w.add(&o);
        let ep = w.nodes[0].connect(&w.nodes[1]);
        w.send(|| ep.am_short(ID, 0, b""));
        w.settle();
        // A lost packet is repeated all the same.
        let mut n = 0;
        w.nodes[1].device.set_rx_filter(Some(Box::new(move |_| {
            n += 1;
            if n == 1 { FilterVerdict::Drop } else { FilterVerdict::Pass }
        })));
        w.send(|| ep.am_short(ID, 1, b""));
        w.run_until("it arrives", |w| w.nodes[1].inbox.lock().len() == 2);
        assert!(w.nodes[0].failures.lock().is_empty());
    }
}

#[test]
fn h7_remote_writes_with_data_are_refused() {
    let (mut w, mut raw, to) = with_stranger("h7_remote_writes_with_data_are_refused", &from_one());
    let ours = accepted(&mut w, &mut raw, &to, 3, 0);
    let victim = Box::new([0x11u8; 64]);
    let addr = std::ptr::from_ref(&*victim).addr() as u64;
    raw.send(&to, &packets::put(ours, 2, 1, addr, &[0x66; 64]));
    raw.send(&to, &packets::put(ours, 3, 1, u64::MAX, &[0x66; 64]));
    // It takes its PSN, so that the peer is not stuck, and has no other effect.
    raw.send(&to, &packets::am(ours, 4, ACK_REQ, 4, 1, b"go on"));
    w.run_for(Duration::from_micros(50));
    assert_eq!(raw.take().last().expect("an ack").ack, 4);
    assert_eq!(*victim, [0x11; 64]);
    assert_eq!(w.nodes[0].counter("rx.drop.put_refused"), 2);
    assert_eq!(w.nodes[0].take().len(), 1);
}

#[test]
fn h8_every_rule_of_the_protocol_can_be_broken() {
    let (mut w, mut raw, to) = with_stranger("h8_every_rule_of_the_protocol_can_be_broken", &from_one());
    let ours = accepted(&mut w, &mut raw, &to, 3, 0);
    let base = request(&raw, 3, 0);
    let mut empty_gid = base.addr.clone();
    empty_gid[1..17].fill(0);
    let no_addr = Creq { addr: Vec::new(), ..base.clone() };
    let bad: Vec<Vec<u8>> = vec![
        // 1. Anything but a CREQ without an endpoint.
        packets::am(packets::NO_EP, 1, 0, 1, 0, b"x"),
        packets::ack(packets::NO_EP, ACK_REQ, 1, 0),
        packets::crep(packets::NO_EP, 1, 1, 3, &UCX_IDENT, 0),
        packets::put(packets::NO_EP, 1, 0, 0, b""),
        // 2. A CREQ to an endpoint.
        {
            let mut p = base.packet(1, false);
            p[..3].copy_from_slice(&ours.to_le_bytes()[..3]);
            p
        },
        // 3. A CREQ with another PSN, for an endpoint that exists.
        base.packet(900, false),
        // 4. The reserved connection number; another path for the same connection.
        Creq { conn_sn: u32::MAX, ep_id: 4, ..base.clone() }.packet(1, false),
        Creq { path: 200, ..base.clone() }.packet(1, false),
        // 5. A CREP that names another endpoint.
        packets::crep(ours, 2, 1, 77, &UCX_IDENT, 0),
        // 6. Old ones that never were.
        packets::crep(ours, 0, 1, 3, &UCX_IDENT, 0),
        packets::crep(ours, 65_000, 1, 3, &UCX_IDENT, 0),
        // Endpoint ids beyond 24 bits, and the one that means none.
        packets::crep(ours, 2, 1, 0xff00_0003, &UCX_IDENT, 0),
        Creq { ep_id: packets::NO_EP, conn_sn: 9, ..base.clone() }.packet(1, false),
        // Addresses: none, one that would end a UCX process, garbage, cut off.
        no_addr.packet(1, false),
        Creq { addr: empty_gid, conn_sn: 9, ..base.clone() }.packet(1, false),
        Creq { addr: vec![0xff; 60], conn_sn: 9, ..base.clone() }.packet(1, false),
        Creq { addr: base.addr[..9].to_vec(), conn_sn: 9, ..base.clone() }.packet(1, false),
        // Headers that are cut off.
        Vec::new(),
        vec![0; 7],
        base.packet(1, false)[..40].to_vec(),
        packets::crep(ours, 2, 1, 3, &UCX_IDENT, 0)[..30].to_vec(),
        packets::put(ours, 2, 1, 0, b"")[..12].to_vec(),
        packets::neth(packets::CTL | ours, 2, 1),
        // Reserved bits.
        packets::ack(ours | 0xc000_0000, 0, 2, 1),
    ];
    for p in &bad {
        raw.send(&to, p);
        w.run_for(Duration::from_micros(20));
    }
    let _ = raw.take();
    assert!(w.nodes[0].inbox.lock().is_empty() && w.nodes[0].failures.lock().is_empty());
    // And after all that the connection works as if nothing had been.
    raw.send(&to, &packets::am(ours, 4, ACK_REQ, 2, 1, b"well"));
    w.run_for(Duration::from_micros(50));
    assert!(raw.take().iter().any(|p| p.dest() == 3 && p.ack == 2));
    assert_eq!(w.nodes[0].take().len(), 1);
}

#[test]
fn h9_buffers_wait_for_the_device() {
    // The device reads each buffer long after it was posted; endpoints are destroyed at once, and new ones use the pool.
    for ttl in [Duration::ZERO, Duration::MAX] {
        destroy_with_a_slow_device(ttl);
    }
}

fn destroy_with_a_slow_device(ttl: Duration) {
    let mut w: World<Sim> = World::new("h9_buffers_wait_for_the_device");
    let mut o = NodeOptions::default();
    o.md.ah_cache_ttl = ttl;
    for _ in 0..2 {
        let config = SimConfig { late_sends: Some((1_000, 400_000)), ..w.fabric.config() };
        w.fabric.next_config = Some(config);
        w.add(&o);
    }
    let mut sent: u64 = 0;
    for round in 0..60 {
        let ep = w.nodes[0].connect(&w.nodes[1]);
        let mut region = w.nodes[0].md.mem_alloc(1000).expect("memory");
        region.bytes_mut().expect("not shared").fill(round as u8);
        let slice = region.slice(0..1000).expect("a slice");
        let _ = w.send(|| ep.am_zcopy(ID, &[round as u8; 9], std::slice::from_ref(&slice), None));
        w.send(|| {
            ep.am_bcopy(ID, &mut |to| {
                to[..1009].fill(round as u8);
                1009
            })
        });
        sent += 2;
        drop((slice, ep, region));
        for _ in 0..5 {
            w.step();
        }
    }
    w.run_until("all arrive", |w| w.nodes[1].inbox.lock().len() as u64 == sent);
    for m in w.nodes[1].take() {
        assert_eq!(m.data.len(), 1009);
        assert!(m.data.iter().all(|&b| b == m.data[0]), "a buffer was used again before it was read: {:?}", m.data);
    }
    w.settle();
    for n in &w.nodes {
        assert!(n.device.violations().is_empty(), "{:?}", n.device.violations());
    }
}

#[test]
fn h10_unclaimed_endpoints_are_bounded_and_expire() {
    let mut o = from_one();
    o.tuning.passive_max = Some(16);
    let (mut w, mut raw, to) = with_stranger("h10_unclaimed_endpoints_are_bounded_and_expire", &o);
    for i in 0..200 {
        let creq = request(&raw, 100 + i, i).packet(1, false);
        raw.send(&to, &creq);
        w.step();
        let _ = raw.take();
    }
    w.run_for(Duration::from_millis(1));
    let c = |w: &World<Sim>, name: &str| w.nodes[0].counter(name);
    assert_eq!((c(&w, "eps"), c(&w, "ep.passive_created")), (16, 16));
    assert_eq!(c(&w, "ep.passive_refused"), 184);
    // What they have not been answered holds no flush of the interface up.
    assert_eq!(w.nodes[0].iface().flush(FlushMode::Local, None).expect("a flush"), Posted::Done);
    for p in raw.take() {
        if p.is_crep() {
            raw.send(&to, &packets::ack(p.src_ep_id(), 0, 2, 1));
        }
    }
    // Nobody claims them and their peer is gone: after the linger time they are, too.
    w.run_for(Duration::from_secs(700));
    assert_eq!(c(&w, "eps"), 0);
    assert_eq!((c(&w, "ah.held"), w.nodes[0].failures.lock().len()), (0, 0), "silently");
    assert_eq!(w.nodes[0].worker.next_timeout(), None, "nothing is left to wait for");
}

#[test]
fn h11_closing_the_interface_completes_everything() {
    let mut w: World<Sim> = World::new("h11_closing_the_interface_completes_everything").nodes(2);
    let (a, b) = (w.nodes[0].connect(&w.nodes[1]), w.nodes[0].connect(&w.nodes[1]));
    w.send(|| a.am_short(ID, 0, b""));
    w.send(|| b.am_short(ID, 0, b""));
    w.settle();
    let (all, comp) = tally();
    let region = w.nodes[0].md.mem_alloc(64).expect("memory");
    for ep in [&a, &b] {
        let c = comp();
        let posted = ep.am_zcopy(ID, b"", &[region.slice(0..64).expect("a slice")], Some(&c));
        assert_eq!(posted.expect("a send"), Posted::InProgress);
    }
    // One of them is acknowledged while only the progress thread looks: its completion waits for the user's thread.
    w.nodes[0].motion = uct_tests::world::Motion::ThreadOnly;
    w.run_for(Duration::from_millis(300));
    assert!(all.lock().is_empty(), "completions are for the user's thread");
    w.nodes[1].motion = uct_tests::world::Motion::Stopped;
    let c = comp();
    assert_eq!(w.nodes[0].iface().flush(FlushMode::Local, Some(&c)).map_err(|e| e.to_string()), Ok(Posted::Done));
    drop(c);
    all.lock().clear();
    let c = comp();
    w.nodes[0].iface().flush(FlushMode::Cancel, None).map(drop).expect("cancel");
    drop(c);
    w.nodes[0].iface = None;
    let got = all.lock().clone();
    assert_eq!(got.iter().filter(|r| **r != Err(ErrorKind::Canceled)).count(), 3, "{got:?}");
    drop((a, b));
}

#[test]
fn h11_closing_with_operations_outstanding_cancels_each_once() {
    let mut w: World<Sim> = World::new("h11_closing_with_operations_outstanding_cancels_each_once").nodes(2);
    let eps: Vec<Ep> = (0..3).map(|_| w.nodes[0].connect(&w.nodes[1])).collect();
    for ep in &eps {
        w.send(|| ep.am_short(ID, 0, b""));
    }
    w.settle();
    w.nodes[1].motion = uct_tests::world::Motion::Stopped;
    let (all, comp) = tally();
    let region = w.nodes[0].md.mem_alloc(64).expect("memory");
    for ep in &eps {
        let c = comp();
        let posted = ep.am_zcopy(ID, b"", &[region.slice(0..64).expect("a slice")], Some(&c));
        assert_eq!(posted.expect("a send"), Posted::InProgress);
        drop(c);
        let c = comp();
        assert_eq!(ep.flush(FlushMode::Local, Some(&c)).expect("a flush"), Posted::InProgress);
    }
    w.nodes[0].iface = None;
    assert_eq!(*all.lock(), [Err(ErrorKind::Canceled); 6]);
    // The handles of endpoints outlive it, and say so.
    match eps[0].am_short(ID, 0, b"") {
        Err(SendError::Failed(e)) => assert_eq!(e.kind(), ErrorKind::Closed),
        other => panic!("{other:?}"),
    }
    drop(eps);
    assert_eq!(all.lock().len(), 6);
}

#[test]
fn h12_packets_of_another_queue_pair_are_dropped() {
    let mut w: World<Sim> = World::new("h12_packets_of_another_queue_pair_are_dropped");
    w.add(&from_one());
    let device = w.fabric.device();
    let mut friend = Raw::new(&w, device.clone());
    let mut other = Raw::new(&w, device);
    let to = friend.target(&w.nodes[0]);
    let ours = accepted(&mut w, &mut friend, &to, 3, 0);
    // Whoever knows endpoint id and PSN but sends from another queue pair has no effect: no data, no ack, no NACK.
    other.send(&to, &packets::am(ours, 4, ACK_REQ, 2, 1, b"forged"));
    other.send(&to, &packets::am(ours, 4, ACK_REQ, 9, 1, b"forged"));
    let borrowed = request(&friend, 3, 7).packet(1, false);
    other.send(&to, &borrowed);
    w.run_for(Duration::from_micros(50));
    assert!(friend.take().is_empty() && other.take().is_empty());
    assert_eq!(w.nodes[0].counter("rx.drop.wrong_source"), 3);
    assert!(w.nodes[0].inbox.lock().is_empty());
    friend.send(&to, &packets::am(ours, 4, 0, 2, 1, b"true"));
    w.run_for(Duration::from_micros(50));
    assert_eq!(w.nodes[0].take()[0].data, b"true");
}

#[test]
fn h12_new_local_addresses_are_accepted_and_foreign_ones_not() {
    let mut w: World<Sim> = World::new("h12_new_local_addresses_are_accepted_and_foreign_ones_not").nodes(3);
    let ep = w.nodes[1].connect(&w.nodes[0]);
    w.send(|| ep.am_short(ID, 0, b""));
    w.settle();
    // Node 0 gets a second address while it runs. UCX reads the table once, at open, and would drop what comes for it.
    let second = Gid::from_ip("10.0.0.99".parse().expect("an address"));
    let dev = w.nodes[0].device.clone();
    dev.add_gid(second, ib::device::RoceVersion::V2).expect("room");
    w.run_for(Duration::from_millis(200));
    let mut addr = ib::addr::DeviceAddr::parse(&w.nodes[0].iface().device_address()).expect("an address").0;
    addr.link = ib::addr::LinkAddr::Ethernet { gid: second, version: ib::addr::AddrVersion::V2 };
    let params = uct::EpParams::to_iface(&addr.to_bytes(), &w.nodes[0].iface().iface_address());
    let by_second = w.nodes[2].iface().ep(&params).expect("an endpoint");
    w.send(|| by_second.am_short(ID, 1, b""));
    w.run_until("the new address works", |w| w.nodes[0].inbox.lock().len() == 2);
    // What came before the table was read again was dropped; that it came was the reason to read it.
    assert!(w.nodes[0].counter("rx.dgid") <= 1);

    // The check can be switched off, as in UCX.
    let mut o = NodeOptions::default();
    o.ud.eth_dgid_check = false;
    let i = w.add(&o);
    let third = Gid::from_ip("10.0.0.98".parse().expect("an address"));
    w.nodes[i].device.add_gid(third, ib::device::RoceVersion::V2).expect("room");
    addr.link = ib::addr::LinkAddr::Ethernet { gid: third, version: ib::addr::AddrVersion::V2 };
    let params = uct::EpParams::to_iface(&addr.to_bytes(), &w.nodes[i].iface().iface_address());
    let _unchecked = w.nodes[1].iface().ep(&params).expect("an endpoint");
    w.run_for(Duration::from_micros(10));
    assert_eq!((w.nodes[i].counter("rx.dgid"), w.nodes[i].counter("ep.passive_created")), (0, 1));
}

#[test]
fn h13_long_send_queues_work_and_too_long_ones_are_refused() {
    for n in ["32768", "64", "1"] {
        let e = ud::config::iface_config(&Env::from_pairs([("UCX_IB_TX_QUEUE_LEN", n)])).expect_err("out of range");
        assert!(e.to_string().contains(&format!("TX_QUEUE_LEN={n}")), "{e}");
    }
    for n in [65, 32_767] {
        let mut w: World<Sim> = World::new("h13_long_send_queues_work_and_too_long_ones_are_refused");
        let mut o = NodeOptions::default();
        o.iface.tx_queue_len = n;
        w.add(&o);
        w.add(&o);
        let ep = w.nodes[0].connect(&w.nodes[1]);
        for i in 0..500 {
            w.send(|| ep.am_short(ID, i, b""));
        }
        w.run_until("all arrive", |w| w.nodes[1].inbox.lock().len() == 500);
        w.settle();
    }
}

#[test]
fn h13_connection_numbers_run_out_with_an_error() {
    let mut w: World<Sim> = World::new("h13_connection_numbers_run_out_with_an_error");
    let mut o = NodeOptions::default();
    o.tuning.first_conn_sn = Some(u32::MAX - 2);
    w.add(&o);
    w.add(&o);
    let (a, b) = (w.nodes[0].connect(&w.nodes[1]), w.nodes[0].connect(&w.nodes[1]));
    let to = w.nodes[1].iface();
    let params = uct::EpParams::to_iface(&to.device_address(), &to.iface_address());
    let e = w.nodes[0].iface().ep(&params).expect_err("the numbers are used up");
    assert_eq!(e.kind(), ErrorKind::ExceedsLimit);
    assert!(e.to_string().contains("connection numbers"), "{e}");
    for ep in [&a, &b] {
        w.send(|| ep.am_short(ID, 0, b""));
    }
    w.run_until("the last two work", |w| w.nodes[1].inbox.lock().len() == 2);
}

#[test]
fn h13_endpoint_ids_wrap_within_24_bits() {
    let mut w: World<Sim> = World::new("h13_endpoint_ids_wrap_within_24_bits").nodes(2);
    let eps: Vec<Ep> = (0..20).map(|_| w.nodes[0].connect(&w.nodes[1])).collect();
    for (i, ep) in eps.iter().enumerate() {
        assert!(ep.id() < 0x00ff_ffff, "{:#x}", ep.id());
        w.send(|| ep.am_short(ID, i as u64, b""));
    }
    w.run_until("all arrive", |w| w.nodes[1].inbox.lock().len() == 20);
    assert!(eps.iter().any(|e| e.id() < 100), "the wrap was crossed");
}

#[test]
fn h14_one_loss_costs_less_than_a_tick() {
    let mut w: World<Sim> = World::new("h14_one_loss_costs_less_than_a_tick").nodes(2);
    let ep = w.nodes[0].connect(&w.nodes[1]);
    for i in 0..50 {
        w.send(|| ep.am_short(ID, i, b""));
    }
    w.settle();
    let mut n = 0;
    w.nodes[1].device.set_rx_filter(Some(Box::new(move |_| {
        n += 1;
        if n == 2 { FilterVerdict::Drop } else { FilterVerdict::Pass }
    })));
    let start = w.now();
    for i in 0..10 {
        w.send(|| ep.am_short(ID, 50 + i, b""));
    }
    w.run_until("all arrive", |w| w.nodes[1].inbox.lock().len() == 60);
    // UCX needs three ticks of 10 ms; a NACK that is obeyed at once needs two round trips of 2 us.
    let took = w.now().since(start);
    assert!(took < Duration::from_millis(1), "{took:?}");
    assert_eq!(w.nodes[0].counter("tx.timer_resends"), 0);
}

#[test]
fn h4_auto_is_not_a_number() {
    // The defaults pass their own checks.
    let c = ud::config::iface_config(&Env::empty()).expect("the defaults");
    assert_eq!((c.sl, c.traffic_class, c.hop_limit), (Units::Auto, Units::Auto, 255));
}
