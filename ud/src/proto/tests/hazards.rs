//! Weak points of UCX's implementation that ours must survive rather than copy, one test each. Most are driven by packets
//! written by hand, since our own engine does not send them.

use std::time::Duration;

use uct::ErrorKind;

use super::{handshake::creq_from, net::*};
use crate::proto::{psn::Psn, wire, *};

const FIRST: u16 = 0xfff8;

pub(super) fn neth(packet_type: u32, psn: u16, ack: u16) -> wire::Neth {
    wire::Neth { packet_type, psn: Psn::new(psn), ack: Psn::new(ack) }
}

pub(super) fn am(dest: u32, psn: u16, ack: u16, payload: &[u8]) -> Vec<u8> {
    let mut out = neth(wire::am_type(dest, 1, false), psn, ack).emit().to_vec();
    out.extend_from_slice(payload);
    out
}

pub(super) fn crep(dest: u32, psn: u16, ack: u16, src_ep_id: u32, ident: [u8; 20]) -> Vec<u8> {
    let mut out = Vec::new();
    wire::Crep { src_ep_id, ident }.emit(neth(wire::CTL | wire::ACK_REQ | dest, psn, ack), &mut out);
    out
}

/// Node 1 is a puppet: it answers nothing by itself. Node 0 is connecting to it.
pub(super) fn puppet() -> (Net, EpId) {
    let mut net = Net::with(2, 1, |i, cfg| {
        if i == 1 {
            cfg.foreign_ident = Some(IDENT);
        }
    });
    net.nodes[1].is_running = false;
    net.records = true;
    let a = net.connect(0, 1);
    net.settle();
    (net, a)
}

pub(super) const IDENT: [u8; 20] = [7; 20];

pub(super) fn sent_by(net: &Net, node: usize) -> Vec<wire::Neth> {
    net.sent.iter().filter(|(n, _)| *n == node).map(|(_, b)| wire::Neth::parse(b).unwrap()).collect()
}

/// A CREP that comes after accepted data, with a gap before it, must not jump over the gap: the message there would be lost
/// and yet acknowledged.
#[test]
fn h1_a_crep_does_not_jump_over_data() {
    let (mut net, a) = puppet();
    let dest = a.wire_id();
    assert!(matches!(net.inject(1, 0, &am(dest, FIRST, FIRST, b"first")), RxVerdict::Deliver { .. }));
    // The second message is lost, then comes the CREP with the third PSN.
    let v = net.inject(1, 0, &crep(dest, FIRST + 2, FIRST, 9, IDENT));
    assert_eq!(v, RxVerdict::Drop(DropReason::Gap));
    net.sent.clear();
    net.pump();
    let answer = sent_by(&net, 0)[0];
    assert_eq!((answer.ack.raw(), answer.dest()), (FIRST, 9), "not acked what did not come; but the peer is known now");
    assert!(answer.is(wire::NACK));
    assert!(matches!(net.inject(1, 0, &am(dest, FIRST + 1, FIRST, b"second")), RxVerdict::Deliver { .. }));
    assert_eq!(net.inject(1, 0, &crep(dest, FIRST + 2, FIRST, 9, IDENT)), RxVerdict::Control);
    assert_eq!(net.nodes[0].eng.eps[a.slot].rx_head.raw(), FIRST + 2);
}

#[test]
fn h1_no_data_before_an_owed_crep() {
    let mut net = Net::new(2, 1);
    net.nodes[1].credit = 0;
    net.connect(0, 1);
    net.settle();
    let b = net.connect(1, 0);
    assert!(net.nodes[1].eng.is_connected(b));
    assert_eq!(net.send(1, b, b"too early"), Err(Refused::NoResource));
    assert!(!net.nodes[1].eng.can_send(b));
    net.nodes[1].eng.want_writable(b);
    net.nodes[1].credit = 1;
    net.pump();
    assert_eq!(net.nodes[1].writable, [b], "the CREP has left");
    assert!(net.send(1, b, b"now").is_ok());
}

/// Cancel reports `Canceled`, and yet leaves the peer no hole.
#[test]
fn h2_cancel_leaves_no_hole() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    net.filter = Some(Box::new(|from, _| from == 1));
    let op = net.send(0, a, b"cancelled").unwrap();
    net.filter = None;
    let now = net.now;
    let mut seen = Vec::new();
    net.nodes[0].eng.cancel(now, a, |o| seen.extend(take_completion(o)));
    assert_eq!(seen, [op]);
    let refused = Err(Refused::Failed(ErrorKind::Canceled));
    assert_eq!(net.send(0, a, b"after"), refused);
    assert_eq!(net.nodes[0].eng.reserve(a, 1), Err(Refused::Failed(ErrorKind::Canceled)));
    let marker = net.nodes[0].op(b"");
    assert!(matches!(net.nodes[0].eng.flush(now, a, marker), Err((_, Refused::Failed(ErrorKind::Canceled)))));
    net.run_for(Duration::from_millis(100));
    assert_eq!(net.payloads(1), [b"cancelled"], "delivery was unknown; here it is delivered");
    assert!(!net.nodes[0].eng.has_outstanding(a));
    assert_eq!(net.is_done(0, op), None, "the completion was taken out: nothing fires later");
    net.destroy(0, a);
    net.run_for(Duration::from_secs(3));
    assert_eq!(net.nodes[0].freed, [a]);
}

/// Settings out of range are errors that name themselves.
#[test]
fn h3_h4_settings_are_checked() {
    let bad = |edit: &dyn Fn(&mut EngineConfig), name: &str| {
        let mut cfg = config(0);
        edit(&mut cfg);
        let text = cfg.validate().unwrap_err().to_string();
        assert!(text.contains(name), "{text}");
        assert!(super::net::Engine::new(cfg).is_err());
    };
    bad(&|c| c.max_window = 1, "UCX_UD_MAX_WINDOW=1:");
    bad(&|c| c.max_window = 1026, "UCX_UD_MAX_WINDOW=1026:");
    bad(&|c| c.timer_backoff = 0.5, "UCX_UD_TIMER_BACKOFF=0.5:");
    bad(&|c| c.timer_backoff = f64::NAN, "UCX_UD_TIMER_BACKOFF=NaN:");
    bad(&|c| c.timer_tick = Duration::ZERO, "UCX_UD_TIMER_TICK=0ns:");
    bad(&|c| c.timer_tick = Duration::from_secs(11), "UCX_UD_TIMER_TICK=11s:");
    bad(&|c| c.local_qpn = 1 << 24, "0x1000000");
    bad(&|c| c.device_addr.clear(), "device address");
    bad(&|c| c.max_packet = 49, "packet size 49");
    bad(&|c| c.hold_max = 65, "hold_max=65");
    bad(&|c| c.first_ep_id = Some(0xff_ffff), "first endpoint id");
    bad(&|c| c.first_conn_sn = u32::MAX, "conn_sn");
    assert!(config(0).validate().is_ok());
}

/// Ticks from a nanosecond to hours, time-outs without end: no panic, no busy loop.
#[test]
fn h5_extreme_intervals() {
    for (tick, timeout, backoff) in [
        (Duration::from_nanos(1), Duration::from_nanos(1), 1.0),
        (Duration::from_nanos(1), Duration::from_millis(1), 1000.0),
        (Duration::from_secs(3600), Duration::MAX, 2.0),
        (Duration::MAX, Duration::MAX, 1.0),
    ] {
        let mut net = Net::with(2, 1, |_, cfg| {
            (cfg.timer_tick, cfg.timeout, cfg.timer_backoff, cfg.linger) = (tick, timeout, backoff, Duration::MAX);
        });
        net.filter = Some(Box::new(|_, _| false));
        let a = net.connect(0, 1);
        for _ in 0..100 {
            net.step();
        }
        net.destroy(0, a);
        for _ in 0..100 {
            net.step();
        }
        net.nodes[0].eng.check_invariants();
    }
}

/// A restarted peer with the same queue pair, endpoint id and conn_sn: taken for a duplicate by UCX, which never answers.
#[test]
fn h6_restart_with_everything_the_same() {
    for linger in [0, 300] {
        let mut net = Net::with(2, 1, |_, cfg| {
            cfg.first_ep_id = Some(5);
            cfg.linger = Duration::from_secs(linger);
        });
        let a = net.connect(0, 1);
        net.settle();
        net.restart(0, |cfg| cfg.first_ep_id = Some(5));
        let a2 = net.connect(0, 1);
        assert_eq!(a.wire_id(), a2.wire_id());
        assert!(
            net.run_until(Duration::from_millis(100), |n| n.nodes[0].eng.is_connected(a2)),
            "the new process does not connect\n{}",
            net.tail()
        );
        let b2 = net.connect(1, 0);
        net.send_wait(0, a2, b"hello");
        net.send_wait(1, b2, b"hello");
        net.settle();
        assert_eq!((net.payloads(0).len(), net.payloads(1).len()), (1, 1));
    }
}

/// The same between plain UCX peers, told apart by name and pid only.
#[test]
fn h6_restart_of_a_plain_ucx_peer() {
    let mut net = Net::with(2, 1, |i, cfg| {
        cfg.first_ep_id = Some(5);
        cfg.foreign_ident = (i == 0).then_some([1; 20]);
    });
    let (_, b) = net.pair(0, 1);
    net.restart(0, |cfg| cfg.foreign_ident = Some([2; 20]));
    let a2 = net.connect(0, 1);
    assert!(net.run_until(Duration::from_millis(100), |n| n.nodes[0].eng.is_connected(a2)), "{}", net.tail());
    assert_eq!(net.nodes[1].failed, [(b, ErrorKind::ConnectionReset)]);
}

#[test]
fn h7_put_with_data_is_refused_but_takes_its_psn() {
    let (mut net, a) = puppet();
    let dest = a.wire_id();
    let _ = net.inject(1, 0, &crep(dest, FIRST, FIRST, 9, IDENT));
    let mut put = neth(wire::PUT | dest, FIRST + 1, FIRST).emit().to_vec();
    put.extend_from_slice(&[0xaa; 16]);
    assert_eq!(net.inject(1, 0, &put), RxVerdict::Drop(DropReason::PutRefused));
    put.truncate(16);
    put[4..6].copy_from_slice(&(FIRST + 2).to_le_bytes());
    assert_eq!(net.inject(1, 0, &put), RxVerdict::Control);
    assert!(matches!(net.inject(1, 0, &am(dest, FIRST + 3, FIRST, b"after")), RxVerdict::Deliver { .. }));
}

/// An empty PUT beyond a gap keeps its place.
#[test]
fn h7_put_out_of_order() {
    let (mut net, a) = puppet();
    let dest = a.wire_id();
    let _ = net.inject(1, 0, &crep(dest, FIRST, FIRST, 9, IDENT));
    let mut put = neth(wire::PUT | dest, FIRST + 2, FIRST).emit().to_vec();
    put.extend_from_slice(&[0; 8]);
    assert_eq!(net.inject(1, 0, &put), RxVerdict::Control);
    assert!(matches!(net.inject(1, 0, &am(dest, FIRST + 3, FIRST, b"3")), RxVerdict::Hold { .. }));
    assert!(matches!(net.inject(1, 0, &am(dest, FIRST + 1, FIRST, b"1")), RxVerdict::Deliver { .. }));
    assert_eq!(net.payloads(0), [b"1", b"3"]);
    net.nodes[0].eng.check_invariants();
}

/// What aborts a UCX process is counted and dropped.
#[test]
fn h8_what_aborts_ucx() {
    let (mut net, a) = puppet();
    let dest = a.wire_id();
    let _ = net.inject(1, 0, &crep(dest, FIRST, FIRST, 9, IDENT));
    let mut creq = creq_from(1, 0x101, 3, 0, IDENT);
    let drop = RxVerdict::Drop;
    // Data, ack and CREP for "no endpoint".
    assert_eq!(net.inject(1, 0, &am(wire::NO_EP, 1, 0, b"")), drop(DropReason::Malformed));
    assert_eq!(net.inject(1, 0, &neth(wire::NO_EP, 1, 0).emit()), drop(DropReason::Malformed));
    assert_eq!(net.inject(1, 0, &crep(wire::NO_EP, 1, 0, 9, IDENT)), drop(DropReason::Short));
    // A control packet that is no CREP, and a CREQ for an endpoint.
    creq[0..3].copy_from_slice(&dest.to_le_bytes()[..3]);
    assert_eq!(net.inject(1, 0, &creq), drop(DropReason::Malformed));
    creq[8] = 77;
    assert_eq!(net.inject(1, 0, &creq), drop(DropReason::UnknownControl));
    // Another endpoint id in a CREP, and one that is none.
    assert_eq!(net.inject(1, 0, &crep(dest, FIRST + 1, FIRST, 8, IDENT)), drop(DropReason::WrongEpId));
    assert_eq!(net.inject(1, 0, &crep(dest, FIRST + 1, FIRST, 0x0100_0009, IDENT)), drop(DropReason::Malformed));
    // The reserved conn_sn, and an impossible endpoint id.
    assert_eq!(net.inject(1, 0, &creq_from(1, 0x101, 3, u32::MAX, IDENT)), drop(DropReason::BadConnSn));
    assert_eq!(net.inject(1, 0, &creq_from(1, 0x101, 0xff_ffff, 1, IDENT)), drop(DropReason::Malformed));
    // Short ones.
    for len in 0..8 {
        assert_eq!(net.inject(1, 0, &vec![0xff; len]), drop(DropReason::Short));
    }
    assert_eq!(net.inject(1, 0, &creq_from(1, 0x101, 3, 1, IDENT)[..48]), drop(DropReason::Short), "no address");
    assert_eq!(net.inject(1, 0, &crep(dest, FIRST + 1, FIRST, 9, IDENT)[..47]), drop(DropReason::Short));
    assert_eq!(net.inject(1, 0, &[0, 0, 0, 0xc0, 0, 0, 0, 0]), drop(DropReason::Malformed), "reserved bits");
    // Garbage in the padding is none of our business.
    let mut padded = crep(dest, FIRST, FIRST, 9, IDENT);
    for i in (9..12).chain(16..28) {
        padded[i] = 0xaa;
    }
    assert_eq!(net.inject(1, 0, &padded), drop(DropReason::Duplicate));
    assert!(net.nodes[0].eng.is_connected(a));
    assert!(net.nodes[0].failed.is_empty());
}

/// A control packet lives in the caller's hands; a freed endpoint names the last posting that used its link.
#[test]
fn h9_freed_names_the_last_posting() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    net.nodes[1].is_running = false;
    net.destroy(0, a);
    net.run_for(Duration::from_millis(1));
    let last = net.nodes[0].serial;
    let now = net.now + Duration::from_secs(3);
    let eng = &mut net.nodes[0].eng;
    eng.handle_timeout(now);
    while let Some(t) = eng.poll_transmit(now, last + 1) {
        assert_eq!(t.ep, a);
    }
    let freed = std::iter::from_fn(|| eng.poll_event()).find_map(|e| match e {
        Event::Freed { ep, link, serial } => Some((ep, link.is_some(), serial)),
        _ => None,
    });
    assert!(matches!(freed, Some((ep, true, serial)) if ep == a && serial >= last), "{freed:?}");
}

/// Whatever is outstanding when the interface closes is handed out.
#[test]
fn h11_nothing_outstanding_is_forgotten_at_close() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    let a2 = net.connect(0, 1);
    net.settle();
    net.filter = Some(Box::new(|_, _| false));
    let ops = [net.send(0, a, b"1").unwrap(), net.flush(0, a), net.send(0, a2, b"2").unwrap()];
    let a3 = net.connect(0, 1);
    let ops = [&ops[..], &[net.flush(0, a3)]].concat();
    let (now, mut seen) = (net.now, Vec::new());
    net.nodes[0].eng.close_all(now, |o| seen.extend(take_completion(o)));
    seen.sort_unstable();
    assert_eq!(seen, ops);
    net.filter = None;
    net.settle();
    assert_eq!(net.nodes[0].eng.ep_count(), 0);
    assert_eq!(net.nodes[0].links_made, net.nodes[0].links_back);
}

/// A packet from another queue pair than the endpoint's peer is nobody's.
#[test]
fn h12_the_source_is_checked() {
    let mut net = Net::new(3, 1);
    let (a, _) = net.pair(0, 1);
    let head = net.nodes[0].eng.eps[a.slot].rx_head.raw();
    let packet = am(a.wire_id(), head.wrapping_add(1), FIRST, b"forged");
    assert_eq!(net.inject(2, 0, &packet), RxVerdict::Drop(DropReason::WrongSource));
    assert!(matches!(net.inject(1, 0, &packet), RxVerdict::Deliver { .. }));
    // A request names its queue pair; another one's request is not believed.
    let creq = creq_from(1, 0x101, 3, 5, IDENT);
    assert_eq!(net.inject(2, 0, &creq), RxVerdict::Drop(DropReason::WrongSource));
    // Before connect-to-endpoint: the first one heard is the one.
    let now = net.now;
    let p = net.nodes[0].eng.create_ep(now).unwrap();
    assert!(matches!(net.inject(1, 0, &am(p.wire_id(), FIRST, 0, b"")), RxVerdict::Deliver { .. }));
    assert_eq!(net.inject(2, 0, &am(p.wire_id(), FIRST + 1, 0, b"")), RxVerdict::Drop(DropReason::WrongSource));
}

/// Endpoint ids are 24 bits, go round, skip what is in use, and never are "no endpoint"; an old id stays unknown.
#[test]
fn h13_endpoint_ids() {
    let mut net = Net::with(2, 1, |_, cfg| cfg.first_ep_id = Some(0xff_fffd));
    let now = net.now;
    let eng = &mut net.nodes[0].eng;
    let ids: Vec<EpId> = (0..4).map(|_| eng.create_ep(now).unwrap()).collect();
    assert_eq!(ids.iter().map(|e| e.wire_id()).collect::<Vec<_>>(), [0xff_fffd, 0xff_fffe, 0, 1]);
    eng.destroy(now, ids[1], |_| {});
    let next = eng.create_ep(now).unwrap();
    assert_eq!((next.wire_id(), next.slot), (2, ids[1].slot), "the place is used again, the id is not");
    assert_eq!(eng.state(ids[1]), None);
    assert_eq!(net.inject(1, 0, &am(ids[1].wire_id(), FIRST, 0, b"late")), RxVerdict::Drop(DropReason::UnknownEp));
}

#[test]
fn h13_first_ids_differ_between_processes() {
    let ids: std::collections::BTreeSet<u32> = (0..100)
        .map(|seed| {
            let cfg = EngineConfig { seed, ..config(0) };
            super::net::Engine::new(cfg).unwrap().create_ep(uct::Time::ZERO).unwrap().wire_id()
        })
        .collect();
    assert!(ids.len() >= 99);
}
