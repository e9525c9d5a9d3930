//! Faults that UCX's UD transport had once, by the commit that mended them; those that can exist in an engine like this and
//! are not covered where they belong (window, loss, handshake, closing).

use std::time::Duration;

use uct::ErrorKind;

use super::{
    handshake::{creq_from, drop_first},
    hazards::{IDENT, am, crep, neth, puppet, sent_by},
    net::*,
};
use crate::proto::{wire, *};

const FIRST: u16 = 0xfff8;

/// 24d0d10c76: crossing requests; the one that is never answered was repeated for ever.
#[test]
fn crossing_acknowledges_the_own_request() {
    let (mut net, a) = puppet();
    let verdict = net.inject(1, 0, &creq_from(1, 0x101, 9, 0, IDENT));
    assert!(matches!(verdict, RxVerdict::Creq(_)));
    assert_eq!(net.nodes[0].eng.eps[a.slot].acked.raw(), FIRST);
    net.settle();
    let crep = sent_by(&net, 0)[1];
    assert_eq!((crep.psn.raw(), crep.ack.raw(), crep.dest()), (FIRST + 1, FIRST, 9), "both sides send a CREP");
    net.run_for(Duration::from_secs(1));
    let again = sent_by(&net, 0).into_iter().filter(|n| n.dest() == wire::NO_EP).count();
    assert_eq!(again, 1, "the request is not repeated");
}

/// 6db51501f2: the peer's CREQ was lost, its CREP comes with the second PSN.
#[test]
fn a_crep_after_a_lost_creq_sets_the_head() {
    let (mut net, a) = puppet();
    assert_eq!(net.inject(1, 0, &crep(a.wire_id(), FIRST + 1, FIRST, 9, IDENT)), RxVerdict::Control);
    assert!(net.nodes[0].eng.is_connected(a));
    assert_eq!(net.nodes[0].eng.eps[a.slot].rx_head.raw(), FIRST + 1);
}

/// c04888b988: a repeated CREP moved the head back.
#[test]
fn a_repeated_crep_does_not_move_the_head_back() {
    let (mut net, a) = puppet();
    let (dest, packet) = (a.wire_id(), crep(a.wire_id(), FIRST, FIRST, 9, IDENT));
    let _ = net.inject(1, 0, &packet);
    let _ = net.inject(1, 0, &am(dest, FIRST + 1, FIRST, b"x"));
    assert_eq!(net.inject(1, 0, &packet), RxVerdict::Drop(DropReason::Duplicate));
    assert_eq!(net.nodes[0].eng.eps[a.slot].rx_head.raw(), FIRST + 1);
    net.sent.clear();
    net.pump();
    assert_eq!(sent_by(&net, 0)[0].ack.raw(), FIRST + 1, "its ack request is answered all the same");
}

/// 4febb9b4e6: CREQ and CREP lost, data comes: no ack can be sent to nobody, and none may be owed.
#[test]
fn no_ack_leaves_before_the_peer_is_known() {
    let (mut net, a) = puppet();
    net.sent.clear();
    let mut ask = am(a.wire_id(), FIRST, FIRST, b"x");
    ask[3] |= 2;
    assert!(matches!(net.inject(1, 0, &ask), RxVerdict::Deliver { .. }));
    let _ = net.inject(1, 0, &am(a.wire_id(), FIRST + 3, FIRST, b"gap"));
    net.pump();
    assert!(net.sent.is_empty());
    net.nodes[0].eng.check_invariants();
    net.run_for(Duration::from_millis(31));
    assert_eq!(sent_by(&net, 0).len(), 1, "the request is still repeated");
}

/// ab71f744d2: a CREQ that comes again, or later than the CREP of a crossing, is an old packet and nothing more.
#[test]
fn a_creq_later_than_the_crep() {
    let (mut net, a) = puppet();
    let _ = net.inject(1, 0, &crep(a.wire_id(), FIRST + 1, FIRST, 9, IDENT));
    let head = net.nodes[0].eng.eps[a.slot].rx_head;
    for _ in 0..3 {
        let _ = net.inject(1, 0, &creq_from(1, 0x101, 9, 0, IDENT));
    }
    assert_eq!(net.nodes[0].eng.eps[a.slot].rx_head, head);
    assert_eq!((net.nodes[0].eng.ep_count(), net.nodes[0].eng.stats().stale_dest), (1, 0));
}

/// d4103680de: messages may come before the CREP; the CREP is then simply next.
#[test]
fn messages_before_the_crep() {
    let (mut net, a) = puppet();
    let _ = net.inject(1, 0, &am(a.wire_id(), FIRST, FIRST, b"1"));
    let _ = net.inject(1, 0, &am(a.wire_id(), FIRST + 1, FIRST, b"2"));
    assert_eq!(net.inject(1, 0, &crep(a.wire_id(), FIRST + 2, FIRST, 9, IDENT)), RxVerdict::Control);
    assert!(net.nodes[0].eng.is_connected(a));
    assert_eq!(net.payloads(0), [b"1", b"2"]);
}

/// 0a4759cdb6: the peer's endpoint has another id though its process is the same: follow it, keep our own numbering, and do
/// not take acks of its old life for ours.
#[test]
fn the_peers_endpoint_id_changes() {
    let mut net = Net::with(2, 1, |i, cfg| cfg.foreign_ident = Some([i as u8 + 1; 20]));
    let (_, b) = net.pair(0, 1);
    for i in 0..10 {
        net.send_wait(1, b, &[i]);
    }
    net.settle();
    let psn = net.nodes[1].eng.eps[b.slot].psn;
    net.restart(0, |cfg| cfg.first_ep_id = Some(77));
    let a2 = net.connect(0, 1);
    net.settle();
    assert!(net.nodes[0].eng.is_connected(a2));
    assert_eq!(net.nodes[1].eng.remote_ep_id(b), Some(77));
    assert_eq!(net.nodes[1].eng.eps[b.slot].psn, psn.next(), "the CREP took the next PSN");
    assert_eq!(net.nodes[1].eng.stats().stale_dest, 1);
    let op = net.send(1, b, b"hello newcomer").unwrap();
    // An ack of the old life: of a PSN the newcomer has not been sent.
    let stale = neth(b.wire_id(), 5, psn.raw().wrapping_add(40)).emit();
    let _ = net.inject(0, 1, &stale);
    assert_eq!(net.is_done(1, op), None);
    assert!(
        net.run_until(Duration::from_secs(1), |n| n.is_done(1, op) == Some(Ok(()))),
        "the message is not acknowledged by the real peer\n{}",
        net.tail()
    );
    assert_eq!(net.payloads(0), [b"hello newcomer"]);
}

/// 2f7040d839: the time-out of a destroyed endpoint met repetitions that were still queued.
#[test]
fn time_out_of_a_destroyed_endpoint_with_resends_queued() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    net.nodes[1].is_running = false;
    for _ in 0..2 {
        net.send(0, a, b"x").unwrap();
    }
    net.run_for(Duration::from_millis(29));
    net.nodes[0].credit = 1;
    net.run_for(Duration::from_millis(10));
    net.destroy(0, a);
    net.nodes[0].credit = usize::MAX;
    net.run_for(Duration::from_secs(20));
    assert_eq!(net.nodes[0].freed, [a]);
    assert!(net.nodes[0].failed.is_empty(), "nobody is told about a destroyed endpoint");
}

/// 97af6d6123, c28a6325ad: flush after flush after flush; none hangs, and each asks at most once.
#[test]
fn flushes_do_not_hang() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    for i in 0..50u8 {
        if i % 3 != 0 {
            net.send_wait(0, a, &[i]);
        }
        let flushes = [net.flush(0, a), net.flush(0, a)];
        assert!(
            net.run_until(Duration::from_millis(1), |n| flushes.iter().all(|&f| n.is_done(0, f) == Some(Ok(())))),
            "flush {i}\n{}",
            net.tail()
        );
    }
}

#[test]
fn flush_of_an_idle_endpoint_is_done_at_once() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    let op = net.flush(0, a);
    assert_eq!(net.is_done(0, op), Some(Ok(())));
}

/// Flush and check in every state of a connection, under loss of its handshake: both finish.
#[test]
fn flush_while_connecting() {
    for steps in 0..6 {
        for lose in [0, 1, 2] {
            let mut net = Net::new(2, 1);
            net.filter = drop_first(1, move |from, _| from == lose);
            let a = net.connect(0, 1);
            let b = net.connect(1, 0);
            let mut ops = Vec::new();
            for _ in 0..=steps {
                ops.push((0, net.flush(0, a)));
                ops.push((1, net.flush(1, b)));
                let (now, op) = (net.now, net.nodes[0].op(b"check"));
                ops.push((0, op.id));
                net.nodes[0].eng.check(now, a, Some(op)).unwrap();
                net.step();
            }
            net.run_for(Duration::from_secs(2));
            assert!(ops.iter().all(|&(n, op)| net.is_done(n, op) == Some(Ok(()))), "{steps} {lose}\n{}", net.tail());
            assert!(!net.nodes[0].eng.has_outstanding(a) && !net.nodes[1].eng.has_outstanding(b));
        }
    }
}

/// ecd86639ca, 4eddc1b508, 45b89935f8: what follows a cancel neither hangs nor loses its completion; and the cancel of an
/// endpoint whose newest packet had asked already.
#[test]
fn cancel_then_destroy() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    let op = net.send_as(0, a, 1, b"asks", SendKind::Zcopy).unwrap();
    let flush = net.flush(0, a);
    let (now, mut seen) = (net.now, Vec::new());
    net.nodes[0].eng.cancel(now, a, |o| seen.extend(take_completion(o)));
    assert_eq!(seen, [op, flush]);
    net.nodes[0].eng.cancel(now, a, |o| seen.extend(take_completion(o)));
    assert_eq!(seen.len(), 2, "once each");
    net.destroy(0, a);
    net.run_for(Duration::from_secs(3));
    assert_eq!((&net.nodes[0].freed[..], net.nodes[0].done.is_empty()), (&[a][..], true));
}

/// 9a5c1a4132: callbacks after destroy.
#[test]
fn nothing_fires_after_destroy() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    let ops = [net.send(0, a, b"1").unwrap(), net.flush(0, a)];
    net.destroy(0, a);
    let done = net.nodes[0].done.clone();
    assert!(ops.iter().all(|&op| net.is_done(0, op) == Some(Err(ErrorKind::Canceled))));
    net.run_for(Duration::from_secs(20));
    assert_eq!(net.nodes[0].done, done);
}

/// 33e7d1d166: check of an endpoint that is connecting, idle, busy.
#[test]
fn check_in_every_state() {
    let mut net = Net::new(2, 1);
    let check = |net: &mut Net, ep| {
        let (now, op) = (net.now, net.nodes[0].op(b"check"));
        let id = op.id;
        let outcome = net.nodes[0].eng.check(now, ep, Some(op)).map_err(|e| e.1).unwrap();
        assert!(matches!(outcome, FlushOutcome::InProgress));
        id
    };
    let a = net.connect(0, 1);
    let connecting = check(&mut net, a);
    net.settle();
    assert_eq!(net.is_done(0, connecting), Some(Ok(())));
    assert_eq!(net.nodes[0].eng.stats().tx_probes, 0, "the request does as well");
    let idle = check(&mut net, a);
    net.settle();
    assert_eq!(net.is_done(0, idle), Some(Ok(())));
    assert_eq!(net.nodes[0].eng.stats().tx_probes, 1);
    net.send(0, a, b"x").unwrap();
    let busy = check(&mut net, a);
    net.settle();
    assert_eq!(net.is_done(0, busy), Some(Ok(())));
    assert_eq!(net.nodes[0].eng.stats().tx_probes, 1);
    assert_eq!(net.payloads(1), [b"x"], "the probe is not delivered");
    // A message that is sent before the probe leaves takes its place.
    net.nodes[0].credit = 0;
    let replaced = check(&mut net, a);
    net.send(0, a, b"y").unwrap();
    net.nodes[0].credit = usize::MAX;
    assert!(net.run_until(Duration::from_millis(20), |n| n.is_done(0, replaced) == Some(Ok(()))));
    assert_eq!(net.nodes[0].eng.stats().tx_probes, 1);
    let p = net.nodes[0].eng.create_ep(net.now).unwrap();
    let refused = net.nodes[0].eng.check(net.now, p, None);
    assert!(matches!(refused, Err((None, Refused::Failed(ErrorKind::NotConnected)))));
}

#[test]
fn check_of_a_dead_peer_fails() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    net.nodes[1].is_running = false;
    let (now, op) = (net.now, net.nodes[0].op(b"check"));
    let id = op.id;
    net.nodes[0].eng.check(now, a, Some(op)).unwrap();
    net.run_for(Duration::from_secs(11));
    assert_eq!(net.is_done(0, id), Some(Err(ErrorKind::EndpointTimeout)));
    assert_eq!(net.nodes[0].failed, [(a, ErrorKind::EndpointTimeout)]);
}
