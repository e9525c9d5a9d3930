//! Destroy, linger, BYE: what was accepted is delivered, what was promised is finished, what is closed goes away, and the
//! link lives exactly as long as its record.

use std::time::Duration;

use uct::ErrorKind;

use super::{
    handshake::drop_first,
    hazards::{IDENT, am, crep, neth, puppet, sent_by},
    net::*,
};
use crate::proto::{wire, *};

fn is_bye(bytes: &[u8]) -> bool {
    bytes.len() == 16 && bytes[3] == 0x20 && bytes[8] == wire::BYE
}

fn is_bye_ack(bytes: &[u8]) -> bool {
    bytes.len() == 16 && bytes[3] == 0x20 && bytes[8] == wire::BYE_ACK
}

fn with_linger(linger: Duration, plain: bool) -> Net {
    Net::with(2, 1, move |i, cfg| {
        cfg.linger = linger;
        cfg.foreign_ident = plain.then_some([i as u8 + 1; 20]);
    })
}

/// Destroy with unacknowledged data, linger none, short and long, towards ours and UCX: everything accepted is delivered,
/// every operation is finished before destroy returns, the link lives until the record is freed.
#[test]
fn destroy_with_unacked_data() {
    for (linger, plain) in [0, 50, 60_000].into_iter().flat_map(|l| [(l, false), (l, true)]) {
        for loss in [0, 20] {
            let mut net = with_linger(Duration::from_millis(linger), plain);
            let (a, _) = net.pair(0, 1);
            net.filter = Some(Box::new(|from, _| from == 1));
            let ops = [net.send(0, a, b"1").unwrap(), net.send(0, a, b"2").unwrap(), net.flush(0, a)];
            net.filter = None;
            net.faults.loss = loss;
            net.destroy(0, a);
            assert!(ops.iter().all(|&op| net.is_done(0, op) == Some(Err(ErrorKind::Canceled))));
            assert!(net.nodes[0].eng.link(a).is_some() && net.nodes[0].links_back == 0);
            assert_eq!(net.nodes[0].eng.state(a), Some(EpStateView::Lingering));
            let delivered = net.run_until(Duration::from_secs(9), |n| n.nodes[1].delivered.len() == 2);
            assert!(delivered, "linger {linger} plain {plain}\n{}", net.tail());
            assert_eq!(net.payloads(1), [b"1", b"2"]);
            net.faults.loss = 0;
            let freed = net.run_until(Duration::from_secs(70), |n| n.nodes[0].freed == [a]);
            assert!(freed, "linger {linger} plain {plain} loss {loss}\n{}", net.tail());
            assert_eq!(net.nodes[0].links_back, 1);
            assert_eq!(net.nodes[0].done.values().map(Vec::len).max(), Some(1), "nothing fired later");
            assert_eq!(net.nodes[0].eng.poll_timeout(), None);
        }
    }
}

/// The peer closes an endpoint here on which nothing is outstanding, but whose user waits to send: he is told, as who tries
/// to send afterwards is. Else he would wait for ever.
#[test]
fn a_bye_ends_the_waiting_of_who_wants_to_send() {
    let budget = 2 * crate::proto::budget::charge_of(4096);
    let mut net = Net::with(2, 1, move |_, cfg| cfg.rx_budget = budget);
    let (a, b) = net.pair(0, 1);
    let (other, _) = net.pair(0, 1);
    // The budget is in use by another endpoint, whose acks are lost.
    net.filter = Some(Box::new(|from, bytes| from == 0 || is_bye(bytes)));
    net.send(0, other, &[0; 4088]).unwrap();
    net.send(0, other, &[0; 4088]).unwrap();
    assert_eq!(net.send(0, a, &[0; 4088]), Err(Refused::NoResource));
    net.nodes[0].eng.want_writable(a);
    net.destroy(1, b);
    net.run_for(Duration::from_secs(1));
    assert_eq!(
        net.nodes[0].failed,
        [(a, ErrorKind::ConnectionReset)],
        "the writer is not told that the peer has closed\n{}",
        net.tail()
    );
}

/// Towards a plain UCX peer the record stays for the whole linger time, and not longer.
#[test]
fn linger_ends_on_time() {
    let mut net = with_linger(Duration::from_secs(5), true);
    let (a, _) = net.pair(0, 1);
    let start = net.now;
    net.destroy(0, a);
    assert!(net.run_until(Duration::from_secs(60), |n| !n.nodes[0].freed.is_empty()));
    assert_eq!(net.now.since(start), Duration::from_secs(5));
}

#[test]
fn linger_zero_frees_with_the_last_ack() {
    let mut net = with_linger(Duration::ZERO, true);
    let (a, _) = net.pair(0, 1);
    net.send(0, a, b"x").unwrap();
    net.destroy(0, a);
    assert!(net.nodes[0].eng.link(a).is_some());
    net.settle();
    assert_eq!(net.nodes[0].freed, [a]);
    let (b, _) = net.pair(0, 1);
    net.destroy(0, b);
    net.pump();
    assert_eq!(net.nodes[0].freed, [a, b], "nothing outstanding: at once");
}

/// A lingering endpoint made by handshake still delivers, acknowledges, and tells of gaps.
#[test]
fn a_lingering_endpoint_still_delivers() {
    let (mut net, a) = puppet();
    let (dest, first) = (a.wire_id(), 0xfff8);
    let _ = net.inject(1, 0, &crep(dest, first, first, 9, IDENT));
    net.settle();
    net.destroy(0, a);
    net.sent.clear();
    assert!(matches!(net.inject(1, 0, &am(dest, first + 1, first, b"late")), RxVerdict::Deliver { .. }));
    let _ = net.inject(1, 0, &neth(wire::ACK_REQ | dest, first + 2, first).emit());
    net.pump();
    assert_eq!(sent_by(&net, 0).last().unwrap().ack.raw(), first + 1);
    let _ = net.inject(1, 0, &neth(wire::ACK_REQ | dest, first + 3, first).emit());
    net.pump();
    assert!(sent_by(&net, 0).last().unwrap().is(wire::NACK));
}

/// UCX 8de978a232: one made by connect-to-endpoint takes no data any more, but finishes its own business.
#[test]
fn a_destroyed_p2p_endpoint_takes_no_data() {
    let mut net = Net::with(2, 1, |_, cfg| cfg.features = Features::SACK);
    let (a, b) = net.p2p(0, 1);
    net.filter = Some(Box::new(|from, _| from == 1));
    net.send(0, a, b"mine").unwrap();
    net.filter = None;
    net.destroy(0, a);
    let op = net.send(1, b, b"to the successor?").unwrap();
    net.run_for(Duration::from_secs(1));
    assert_eq!(net.payloads(1), [b"mine"]);
    assert!(net.nodes[0].delivered.is_empty());
    assert_eq!(net.is_done(1, op), None, "not acknowledged");
    assert!(net.nodes[0].eng.stats().dropped(DropReason::Closed) > 0);
}

#[test]
fn a_repeated_crep_of_a_lingering_endpoint() {
    let mut net = Net::with(2, 1, |_, cfg| cfg.linger = Duration::from_secs(20));
    net.filter = Some(Box::new(|from, b: &[u8]| !(from == 1 && b.len() == 48)));
    let a = net.connect(0, 1);
    net.settle();
    let b = net.connect(1, 0);
    net.destroy(1, b);
    net.run_for(Duration::from_millis(100));
    assert!(!net.nodes[0].eng.is_connected(a));
    net.filter = None;
    assert!(
        net.run_until(Duration::from_secs(5), |n| !n.nodes[0].connected.is_empty()),
        "it does not connect anew\n{}",
        net.tail()
    );
    net.settle();
    assert_eq!(net.nodes[0].closed_by_peer, [a]);
}

#[test]
fn destroy_before_anything_was_sent_frees_at_once() {
    let mut net = Net::new(2, 1);
    net.nodes[0].resolves = false;
    let a = net.connect(0, 1);
    let now = net.now;
    let p = net.nodes[0].eng.create_ep(now).unwrap();
    net.destroy(0, a);
    net.destroy(0, p);
    net.pump();
    assert_eq!(net.nodes[0].freed, [a, p]);
}

/// Destroyed while its request is out: the request is finished, and the peer learns that nobody is there.
#[test]
fn destroy_while_connecting() {
    let mut net = Net::new(2, 1);
    let a = net.connect(0, 1);
    net.pump();
    net.destroy(0, a);
    net.run_for(Duration::from_secs(3));
    assert_eq!(net.nodes[0].freed, [a]);
    assert_eq!((net.nodes[1].eng.ep_count(), net.nodes[1].links_back), (0, 1), "the unclaimed endpoint is gone, too");
    let (a, b) = net.pair(0, 1);
    assert!(net.nodes[0].eng.is_connected(a) && net.nodes[1].eng.is_connected(b));
}

#[test]
fn destroying_twice_is_harmless() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    net.destroy(0, a);
    net.destroy(0, a);
    net.run_for(Duration::from_secs(5));
    net.destroy(0, a);
    assert_eq!(net.nodes[0].freed, [a]);
}

// --- BYE

#[test]
fn bye_ends_linger_early() {
    let mut net = with_linger(Duration::from_secs(300), false);
    let (a, b) = net.pair(0, 1);
    net.send(0, a, b"last words").unwrap();
    net.destroy(0, a);
    net.settle();
    assert_eq!(net.nodes[0].freed, [a]);
    assert_eq!(net.payloads(1), [b"last words"]);
    assert_eq!((&net.nodes[1].closed_by_peer[..], net.nodes[1].failed.len()), (&[b][..], 0));
    assert_eq!(net.send(1, b, b""), Err(Refused::Failed(ErrorKind::ConnectionReset)));
    net.destroy(1, b);
    net.run_for(Duration::from_secs(301));
    assert_eq!(net.nodes[1].eng.ep_count(), 0);
}

/// The usual end of a dialogue: question, answer, close. It costs nobody anything.
#[test]
fn closing_after_the_answer_is_no_failure() {
    let mut net = Net::new(2, 1);
    let (a, b) = net.pair(0, 1);
    net.send(0, a, b"question").unwrap();
    net.settle();
    let answer = net.send(1, b, b"answer").unwrap();
    net.settle();
    net.destroy(0, a);
    net.settle();
    assert_eq!(net.is_done(1, answer), Some(Ok(())), "the BYE carried the ack");
    assert!(net.nodes[1].failed.is_empty());
}

/// A peer with something outstanding learns by an error, at once.
#[test]
fn bye_fails_what_is_outstanding() {
    let mut net = Net::new(2, 1);
    let (a, b) = net.pair(0, 1);
    net.filter = Some(Box::new(|from, b: &[u8]| from == 0 || b[3] & 1 == 0));
    let op = net.send(1, b, b"never arrives").unwrap();
    let flush = net.flush(1, b);
    net.destroy(0, a);
    net.settle();
    assert_eq!(net.nodes[1].failed, [(b, ErrorKind::ConnectionReset)]);
    assert_eq!([op, flush].map(|o| net.is_done(1, o)), [Some(Err(ErrorKind::ConnectionReset)); 2]);
    assert_eq!(net.nodes[0].freed, [a], "answered all the same");
}

#[test]
fn a_later_use_after_bye_fails_the_endpoint() {
    for check in [false, true] {
        let mut net = Net::new(2, 1);
        let (a, b) = net.pair(0, 1);
        net.destroy(0, a);
        net.settle();
        assert!(net.nodes[1].failed.is_empty());
        let now = net.now;
        if check {
            assert!(net.nodes[1].eng.check(now, b, None).is_err());
        } else {
            net.nodes[1].eng.want_writable(b);
        }
        net.pump();
        assert_eq!(net.nodes[1].failed, [(b, ErrorKind::ConnectionReset)]);
    }
}

#[test]
fn a_lost_bye_is_repeated() {
    let mut net = with_linger(Duration::from_secs(300), false);
    let (a, b) = net.pair(0, 1);
    net.filter = drop_first(3, |_, b| is_bye(b) || is_bye_ack(b));
    net.destroy(0, a);
    net.run_for(Duration::from_millis(200));
    assert_eq!(net.nodes[0].freed, [a], "the record is not freed\n{}", net.tail());
    assert_eq!(net.nodes[1].closed_by_peer, [b], "told once");
    assert_eq!(net.nodes[0].eng.stats().tx_byes, 4);
}

/// BYE is not believed before everything that was sent before it is here.
#[test]
fn bye_waits_for_the_data() {
    let (mut net, a) = puppet_of_ours();
    let dest = a.wire_id();
    let mut bye = Vec::new();
    wire::emit_bye(wire::BYE, neth(wire::CTL | dest, 0xfff8 + 2, 0xfff8), 9, &mut bye);
    assert_eq!(net.inject(1, 0, &bye), RxVerdict::Drop(DropReason::Gap));
    net.sent.clear();
    net.pump();
    assert!(sent_by(&net, 0)[0].is(wire::NACK));
    assert!(net.nodes[0].closed_by_peer.is_empty());
    assert!(matches!(net.inject(1, 0, &am(dest, 0xfff8 + 1, 0xfff8, b"x")), RxVerdict::Deliver { .. }));
    let mut wrong = bye.clone();
    wrong[12] = 8;
    assert_eq!(net.inject(1, 0, &wrong), RxVerdict::Drop(DropReason::WrongEpId));
    assert_eq!(net.inject(1, 0, &bye), RxVerdict::Control);
    net.pump();
    assert_eq!(net.nodes[0].closed_by_peer, [a]);
}

fn puppet_of_ours() -> (Net, EpId) {
    let (mut net, a) = puppet();
    let ext = ExtCaps { features: Features::all(), incarnation: 3, rx_budget: 0 };
    let _ = net.inject(1, 0, &crep(a.wire_id(), 0xfff8, 0xfff8, 9, wire::ext_ident(&ext)));
    net.settle();
    (net, a)
}

/// Both sides destroy at the same time, with data on the way both ways.
#[test]
fn both_sides_close_at_once() {
    for loss in [0, 30] {
        for seed in 0..50 {
            let mut net = Net::with(2, seed, |_, cfg| cfg.linger = Duration::from_secs(60));
            let (a, b) = net.pair(0, 1);
            net.faults.loss = loss;
            net.send(0, a, b"to b").unwrap();
            net.send(1, b, b"to a").unwrap();
            net.destroy(0, a);
            net.destroy(1, b);
            net.run_until(Duration::from_secs(9), |n| n.nodes.iter().all(|n| n.eng.ep_count() == 0));
            assert!(net.nodes.iter().all(|n| n.delivered.len() == 1), "seed {seed}\n{}", net.tail());
        }
    }
}

/// A plain UCX peer never sees an extension packet, in anything that happens to an endpoint.
#[test]
fn plain_ucx_sees_no_extension() {
    for seed in 0..200 {
        let mut net = Net::with(2, seed, |i, cfg| {
            cfg.foreign_ident = (i == 1).then_some(IDENT);
            cfg.rx_budget = 10_000;
            cfg.linger = Duration::from_millis(200);
        });
        net.checks = false;
        let (a, b) = net.pair(0, 1);
        net.records = true;
        net.faults = Faults { loss: 20, dup: 20, reorder: 20 };
        for i in 0..30 {
            net.send_wait(0, a, &[i]);
            net.send_wait(1, b, &[i]);
        }
        net.destroy(0, a);
        net.run_for(Duration::from_secs(2));
        for (_, bytes) in &net.sent {
            let is_ctl = bytes[3] & 0x21 == 0x20;
            assert!(!is_ctl || matches!(bytes[8], wire::CREQ | wire::CREP), "{}", describe(bytes));
        }
    }
}

#[test]
fn an_extension_packet_from_a_plain_peer_is_dropped() {
    let (mut net, a) = puppet();
    let dest = a.wire_id();
    let _ = net.inject(1, 0, &crep(dest, 0xfff8, 0xfff8, 9, IDENT));
    let (mut bye, mut xack) = (Vec::new(), Vec::new());
    wire::emit_bye(wire::BYE, neth(wire::CTL | dest, 0xfff8 + 1, 0xfff8), 9, &mut bye);
    wire::Xack { gap: true, budget: 1, sacked: 2 }.emit(neth(wire::CTL | dest, 0xfff8 + 1, 0xfff8), &mut xack);
    for packet in [bye, xack] {
        assert_eq!(net.inject(1, 0, &packet), RxVerdict::Drop(DropReason::UnknownControl));
    }
}

#[test]
fn closing_the_interface_says_bye_once() {
    let mut net = Net::new(2, 1);
    let (a, b) = net.pair(0, 1);
    net.send(1, b, b"something").unwrap();
    net.settle();
    net.records = true;
    let now = net.now;
    net.nodes[0].eng.close_all(now, |_| {});
    net.settle();
    assert_eq!(net.sent.iter().filter(|(_, b)| is_bye(b)).count(), 1);
    assert_eq!((net.nodes[0].eng.ep_count(), net.nodes[0].eng.poll_timeout()), (0, None));
    assert_eq!(net.nodes[0].freed, [a]);
    assert_eq!(net.nodes[1].closed_by_peer, [b]);
}

/// Many connects and destroys leave nothing behind.
#[test]
fn connect_and_close_20_000_times() {
    let mut net = Net::new(2, 1);
    net.checks = false;
    for _ in 0..20_000 {
        let a = net.connect(0, 1);
        net.settle();
        net.destroy(0, a);
        net.settle();
    }
    for n in &net.nodes {
        assert_eq!((n.eng.ep_count(), n.eng.packet_count(), n.links_made), (0, 0, n.links_back));
        n.eng.check_invariants();
    }
    assert_eq!(net.nodes[1].eng.peer_count(), 0, "only a stranger");
}

/// Late packets for an id that was given back do not reach whoever comes next.
#[test]
fn late_packets_do_not_reach_a_successor() {
    let mut net = Net::new(2, 1);
    net.records = true;
    let (a, b) = net.pair(0, 1);
    for i in 0..5 {
        net.send_wait(1, b, &[i]);
    }
    net.settle();
    let old: Vec<_> = net.sent.iter().filter(|(n, _)| *n == 1).map(|(_, b)| b.clone()).collect();
    net.destroy(0, a);
    net.destroy(1, b);
    net.run_for(Duration::from_secs(5));
    net.pair(0, 1);
    let before = net.nodes[0].delivered.len();
    for bytes in old {
        let _ = net.inject(1, 0, &bytes);
    }
    assert_eq!(net.nodes[0].delivered.len(), before);
}
