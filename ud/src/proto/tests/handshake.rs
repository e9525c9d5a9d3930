//! Connections: all orders, losses and repetitions of the handshake, other processes at old addresses, strangers.

use std::time::Duration;

use uct::ErrorKind;

use super::net::*;
use crate::proto::*;

fn is_ctl(bytes: &[u8], kind: u8) -> bool {
    bytes.len() >= 48 && bytes[3] & 1 == 0 && bytes[3] & 0x20 != 0 && bytes[8] == kind
}

/// Drops the first `n` packets that `which` picks out.
pub(super) fn drop_first(n: usize, which: impl Fn(usize, &[u8]) -> bool + 'static) -> Option<Filter> {
    let mut left = n;
    Some(Box::new(move |from, bytes| {
        let hit = left > 0 && which(from, bytes);
        left -= usize::from(hit);
        !hit
    }))
}

fn assert_joined(net: &Net, a: EpId, b: EpId) {
    assert_eq!(net.nodes[0].eng.remote_ep_id(a), Some(b.wire_id()), "whom it is connected to\n{}", net.tail());
    assert_eq!(net.nodes[1].eng.remote_ep_id(b), Some(a.wire_id()), "whom the peer is connected to\n{}", net.tail());
}

/// Connects from one side, the other claims; messages flow both ways afterwards.
fn connects_despite(filter: Option<Filter>) -> Net {
    let mut net = Net::new(2, 1);
    net.filter = filter;
    let a = net.connect(0, 1);
    assert!(
        net.run_until(Duration::from_secs(5), |n| n.nodes[0].eng.is_connected(a)),
        "it does not connect\n{}",
        net.tail()
    );
    let b = net.connect(1, 0);
    assert_joined(&net, a, b);
    net.send_wait(0, a, b"to b");
    net.send_wait(1, b, b"to a");
    assert!(
        net.run_until(Duration::from_secs(5), |n| n.nodes.iter().all(|n| n.delivered.len() == 1)),
        "{}",
        net.tail()
    );
    net.run_for(Duration::from_secs(1));
    assert!(net.nodes.iter().all(|n| n.eng.poll_timeout().is_none() && n.eng.ep_count() == 1));
    net
}

#[test]
fn the_creq_is_lost() {
    let net = connects_despite(drop_first(3, |_, b| is_ctl(b, 1)));
    assert_eq!(net.nodes[0].eng.stats().tx_creq, 1);
    assert_eq!(net.nodes[0].eng.stats().tx_resends, 3);
}

#[test]
fn the_crep_is_lost() {
    connects_despite(drop_first(3, |_, b| is_ctl(b, 2)));
}

#[test]
fn the_ack_of_the_crep_is_lost() {
    connects_despite(drop_first(1, |from, b| from == 0 && b.len() == 8));
}

#[test]
fn nothing_is_lost() {
    let net = connects_despite(None);
    assert_eq!(net.nodes[0].eng.stats().tx_resends + net.nodes[1].eng.stats().tx_resends, 0);
}

#[test]
fn times_of_a_repeated_creq() {
    let mut net = Net::new(2, 1);
    net.filter = Some(Box::new(|_, _| false));
    let start = net.now;
    net.connect(0, 1);
    let mut times = vec![0];
    net.pump();
    while times.len() < 5 {
        let before = net.nodes[0].eng.stats().tx_resends;
        let in_time = net.step() && net.now.since(start) < Duration::from_secs(10);
        assert!(in_time, "requests at {times:?} ms, and no more\n{}", net.tail());
        if net.nodes[0].eng.stats().tx_resends > before {
            times.push(net.now.since(start).as_millis());
        }
    }
    assert_eq!(times, [0, 30, 70, 150, 310], "three ticks of silence, then at the end of each doubled interval");
}

fn crossing(loss: u64, per_pair: usize, rounds: u64) {
    for seed in 0..rounds {
        // At half of all packets lost, each way, patience is part of the setting.
        let mut net = Net::with(2, seed, |_, cfg| cfg.timeout = Duration::from_secs(300));
        net.checks = seed.is_multiple_of(64);
        net.faults.loss = loss;
        net.faults.reorder = net.rng.below(50);
        let (mut a, mut b) = (Vec::new(), Vec::new());
        for _ in 0..per_pair {
            // Within the same millisecond, in any order.
            for _ in 0..net.rng.below(4) {
                net.step();
            }
            a.push(net.connect(0, 1));
            for _ in 0..net.rng.below(4) {
                net.step();
            }
            b.push(net.connect(1, 0));
        }
        let all = |net: &mut Net| {
            a.iter().all(|&e| net.nodes[0].eng.is_connected(e)) && b.iter().all(|&e| net.nodes[1].eng.is_connected(e))
        };
        assert!(net.run_until(Duration::from_secs(290), all), "seed {seed}, loss {loss}\n{}", net.tail());
        for (&a, &b) in a.iter().zip(&b) {
            assert_joined(&net, a, b);
        }
        let counts = net.nodes.iter().map(|n| (n.eng.ep_count(), n.eng.passive_count()));
        assert!(counts.eq([(per_pair, 0), (per_pair, 0)]), "seed {seed}: orphans\n{}", net.tail());
    }
}

#[test]
fn crossing_10_000_times() {
    for per_pair in [1, 3] {
        crossing(0, per_pair, 10_000);
        crossing(10, per_pair, 10_000);
        crossing(50, per_pair, 10_000);
    }
}

#[test]
fn a_claimed_endpoint_sends_no_creq() {
    let mut net = Net::new(2, 1);
    net.pair(0, 1);
    assert_eq!(net.nodes[1].eng.stats().tx_creq, 0);
    assert_eq!(net.nodes[1].eng.stats().passive_claimed, 1);
}

#[test]
fn a_passive_endpoint_may_be_claimed_before_its_link_is_there() {
    let mut net = Net::new(2, 1);
    net.nodes[1].resolves = false;
    let a = net.connect(0, 1);
    net.settle();
    let b = net.connect(1, 0);
    assert_eq!(net.nodes[1].eng.state(b), Some(EpStateView::Resolving));
    net.nodes[1].resolves = true;
    net.settle();
    assert_joined(&net, a, b);
    assert_eq!(net.nodes[1].connected, [b]);
}

#[test]
fn crossing_while_the_link_is_not_there_needs_no_creq_of_ours() {
    let mut net = Net::new(2, 1);
    net.nodes[1].resolves = false;
    let (a, b) = (net.connect(0, 1), net.connect(1, 0));
    net.settle();
    net.nodes[1].resolves = true;
    net.settle();
    assert_joined(&net, a, b);
    assert_eq!((net.nodes[1].eng.stats().tx_creq, net.nodes[1].eng.stats().tx_crep), (0, 1));
}

#[test]
fn paths_with_their_own_links_have_their_own_numbering() {
    let mut net = Net::new(2, 1);
    let (now, caps) = (net.now, net.caps(1));
    for (addr, path) in [(1, 0), (99, 1), (1, 2)] {
        net.nodes[0].eng.connect_to_iface(now, addr, 0x101, path, caps).unwrap();
    }
    let eng = &net.nodes[0].eng;
    let sns: Vec<_> = eng.eps.iter().map(|(_, e)| (e.peer, e.conn_sn)).collect();
    assert_eq!(sns[0], (sns[0].0, 0));
    assert_eq!((sns[1].1, sns[1].0 != sns[0].0), (0, true), "another address value: a space of its own");
    assert_eq!(sns[2], (sns[0].0, 1), "the path index by itself makes no difference");
}

#[test]
fn the_answer_goes_the_way_of_the_request() {
    let mut net = Net::new(2, 1);
    let (now, caps) = (net.now, net.caps(1));
    let (ep, _) = net.nodes[0].eng.connect_to_iface(now, 1, 0x101, 3, caps).unwrap();
    net.resolve(0, ep, true);
    net.settle();
    let (_, passive) = net.nodes[1].eng.eps.iter().next().unwrap();
    assert_eq!(passive.path_index, 3);
}

#[test]
fn handshake_packets_again_and_late_change_nothing() {
    let mut net = Net::new(2, 1);
    net.records = true;
    let (a, b) = net.pair(0, 1);
    let handshake = std::mem::take(&mut net.sent);
    for round in 0..20 {
        net.send_wait(0, a, b"x");
        for (from, bytes) in &handshake {
            let to = 1 - from;
            for _ in 0..1 + round % 3 {
                let _ = net.inject(*from, to, bytes);
            }
        }
        net.run_for(Duration::from_millis(100));
    }
    assert_joined(&net, a, b);
    assert_eq!(net.nodes[1].delivered.len(), 20);
    assert!(net.nodes.iter().all(|n| n.failed.is_empty() && n.eng.ep_count() == 1));
    assert_eq!(net.nodes[1].eng.stats().stale_dest + net.nodes[1].eng.stats().restarts, 0);
}

#[test]
fn an_unreachable_peer_fails_the_endpoint_and_nothing_else() {
    let mut net = Net::new(2, 1);
    net.nodes[0].resolves = false;
    let a = net.connect(0, 1);
    net.resolve(0, a, false);
    net.pump();
    assert_eq!(net.nodes[0].failed, [(a, ErrorKind::Unreachable)]);
    assert_eq!(net.send(0, a, b""), Err(Refused::Failed(ErrorKind::Unreachable)));
    // Nothing was sent, so there is nobody to linger for: users who try again and again must not pile up records.
    net.destroy(0, a);
    net.pump();
    assert_eq!((&net.nodes[0].freed[..], net.nodes[0].eng.poll_timeout()), (&[a][..], None));
}

#[test]
fn an_unreachable_stranger_is_forgotten() {
    let mut net = Net::new(2, 1);
    net.nodes[1].resolves = false;
    net.connect(0, 1);
    net.settle();
    let ep = net.nodes[1].to_resolve.pop().unwrap();
    net.resolve(1, ep, false);
    net.pump();
    assert_eq!((net.nodes[1].eng.ep_count(), net.nodes[1].eng.peer_count()), (0, 0));
    assert!(net.nodes[1].failed.is_empty());
}

/// Connect-to-endpoint has no handshake, so that no packet leaves by itself: a flush has nothing to wait for while the link is
/// being made, and a check brings a keep-alive about.
#[test]
fn flush_and_check_of_a_pair_whose_link_is_being_made() {
    let mut net = Net::new(2, 1);
    let now = net.now;
    let (a, b) = (net.nodes[0].eng.create_ep(now).unwrap(), net.nodes[1].eng.create_ep(now).unwrap());
    net.nodes[0].resolves = false;
    net.p2p_half(0, a, 1, b);
    net.p2p_half(1, b, 0, a);
    let flushed = net.flush(0, a);
    assert_eq!(net.is_done(0, flushed), Some(Ok(())));
    let op = net.nodes[0].op(b"check");
    let checked = op.id;
    assert!(matches!(net.nodes[0].eng.check(now, a, Some(op)), Ok(FlushOutcome::InProgress)));
    let behind = net.flush(0, a);
    net.settle();
    assert_eq!([checked, behind].map(|op| net.is_done(0, op)), [None; 2]);
    net.resolve(0, a, true);
    net.settle();
    assert_eq!(
        [checked, behind].map(|op| net.is_done(0, op)),
        [Some(Ok(())); 2],
        "the check, and the flush behind it\n{}",
        net.tail()
    );
}

#[test]
fn a_link_for_an_endpoint_that_is_gone_comes_back() {
    let mut net = Net::new(2, 1);
    net.nodes[0].resolves = false;
    let a = net.connect(0, 1);
    net.destroy(0, a);
    let back = net.nodes[0].eng.resolved(net.now, a, Ok(Link { to: 1, qpn: 0x101 }));
    assert!(back.is_some());
    assert_eq!(net.nodes[0].eng.ep_count(), 0);
}

/// A flood of requests from ever new strangers: their number is bounded, and room returns when they die.
#[test]
fn strangers_are_bounded() {
    let mut net = Net::with(2, 1, |_, cfg| cfg.passive_max = 10);
    net.checks = false;
    net.faults.loss = 100;
    for i in 0..10_000u32 {
        let creq = creq_from(0, 0x5000 + i, i, 0, [i as u8; 20]);
        let _ = net.receive(1, 0x5000 + i, &creq);
        net.pump();
    }
    let eng = &net.nodes[1].eng;
    assert_eq!((eng.passive_count(), eng.ep_count(), eng.peer_count()), (10, 10, 10));
    assert_eq!(eng.stats().passive_refused, 9_990);
    assert_eq!(eng.stats().dropped(DropReason::TooManyPassive), 9_990);
    // Their CREPs go unanswered.
    net.run_for(Duration::from_secs(11));
    let eng = &net.nodes[1].eng;
    assert_eq!((eng.ep_count(), eng.peer_count(), eng.poll_timeout()), (0, 0, None));
    assert!(net.nodes[1].failed.is_empty(), "nobody hears of endpoints nobody made");
}

/// Strangers that answered once and then die are found by the sweep.
#[test]
fn idle_strangers_are_probed() {
    let mut net = Net::new(2, 1);
    net.connect(0, 1);
    net.settle();
    assert_eq!(net.nodes[1].eng.passive_count(), 1);
    net.run_for(Duration::from_secs(30));
    assert_eq!(net.nodes[1].eng.passive_count(), 1, "alive: it stays");
    assert!(net.nodes[1].eng.stats().tx_probes >= 2);
    net.nodes[0].is_running = false;
    net.run_for(Duration::from_secs(30));
    assert_eq!(net.nodes[1].eng.ep_count(), 0, "dead: it goes");
    assert!(net.nodes[1].failed.is_empty());
}

pub(super) fn creq_from(addr: Addr, qpn: u32, ep_id: u32, conn_sn: u32, ident: [u8; 20]) -> Vec<u8> {
    let mut out = Vec::new();
    let neth =
        wire::Neth { packet_type: wire::CTL | wire::NO_EP, psn: psn::Psn::new(0xfff8), ack: psn::Psn::new(0xfff7) };
    wire::Creq { qpn, ep_id, conn_sn, path_index: 0, ident }.emit(neth, &[0xa0, addr], &mut out);
    out
}

/// Also not one whose endpoint is long gone, if an older endpoint was connected only after it was made.
#[test]
fn a_connection_number_is_never_given_twice() {
    let mut net = Net::new(2, 1);
    let first = net.connect(0, 1);
    let second = net.connect(0, 1);
    net.settle();
    assert!(net.nodes[0].eng.is_connected(first) && net.nodes[0].eng.is_connected(second));
    net.destroy(0, second);
    net.run_for(Duration::from_secs(60));
    assert_eq!(net.nodes[0].eng.state(second), None, "freed");
    net.records = true;
    net.connect(0, 1);
    net.settle();
    let numbers: Vec<u32> = net.sent.iter().filter_map(|(_, b)| wire::Creq::parse(b)).map(|c| c.conn_sn).collect();
    assert_eq!(numbers, [2], "the numbers of the requests that were sent\n{}", net.tail());
}

// --- other processes

#[test]
fn a_restarted_peer_is_another_peer() {
    let mut net = Net::new(2, 1);
    let (_, b) = net.pair(0, 1);
    let op = net.send(1, b, b"to the dead").unwrap();
    net.restart(0, |_| {});
    let a2 = net.connect(0, 1);
    assert!(net.run_until(Duration::from_millis(100), |n| n.nodes[0].eng.is_connected(a2)), "{}", net.tail());
    assert_eq!(net.nodes[1].failed, [(b, ErrorKind::ConnectionReset)]);
    assert_eq!(net.is_done(1, op), Some(Err(ErrorKind::ConnectionReset)));
    let b2 = net.connect(1, 0);
    assert_joined(&net, a2, b2);
    net.send_wait(0, a2, b"hello again");
    net.settle();
    assert_eq!(net.nodes[1].delivered.last().unwrap().2, b"hello again");
    assert_eq!(net.nodes[1].eng.stats().restarts, 1);
}

#[test]
fn late_packets_of_the_process_before_mean_nothing() {
    let mut net = Net::new(2, 1);
    net.records = true;
    net.pair(0, 1);
    let old: Vec<_> = net.sent.drain(..).filter(|(from, _)| *from == 0).collect();
    net.restart(0, |_| {});
    let a2 = net.connect(0, 1);
    assert!(net.run_until(Duration::from_millis(100), |n| n.nodes[0].eng.is_connected(a2)), "{}", net.tail());
    for (_, bytes) in &old {
        let _ = net.inject(0, 1, bytes);
    }
    net.settle();
    assert!(net.nodes[0].eng.is_connected(a2));
    let stats = net.nodes[1].eng.stats();
    assert_eq!((stats.restarts, stats.dropped(DropReason::StaleProcess)), (1, 1));
}

#[test]
fn an_address_with_a_new_incarnation_ends_the_old_connection() {
    let mut net = Net::new(2, 1);
    let (_, b) = net.pair(0, 1);
    net.restart(0, |_| {});
    let caps = net.caps(0);
    let (b2, outcome) = net.nodes[1].eng.connect_to_iface(net.now, 0, 0x100, 0, caps).unwrap();
    assert_eq!(outcome, ConnectOutcome::New);
    net.nodes[1].to_resolve.push(b2);
    assert!(net.run_until(Duration::from_millis(100), |n| n.nodes[1].eng.is_connected(b2)), "{}", net.tail());
    assert_eq!(net.nodes[1].failed, [(b, ErrorKind::ConnectionReset)]);
}

/// Two nodes with the process before node 0's present one, whose packets node 1 gets only now, twice. `answers`: it is those
/// that answer requests of node 1.
fn late_predecessor(answers: bool) -> (Net, EpId, EpId, Vec<Vec<u8>>) {
    let mut net = Net::new(2, 1);
    net.records = true;
    net.filter = Some(Box::new(|from, _| from == 1));
    let a = if answers { net.connect(1, 0) } else { net.connect(0, 1) };
    net.run_for(Duration::from_millis(100));
    let late: Vec<_> = net.sent.drain(..).filter(|(from, _)| *from == 0).map(|(_, bytes)| bytes).collect();
    assert!(late.len() >= 2, "a handshake packet and its repetition");
    net.restart(0, |_| {});
    net.filter = None;
    let b = if answers { a } else { net.connect(1, 0) };
    let a = net.connect(0, 1);
    assert!(
        net.run_until(Duration::from_millis(200), |n| n.nodes[0].eng.is_connected(a) && n.nodes[1].eng.is_connected(b))
    );
    net.run_for(Duration::from_secs(1));
    (net, a, b, late)
}

/// A request of a process that the peer has never known, after the one of its successor: it looks as if it were the
/// successor's. So does an answer.
#[test]
fn a_late_predecessor_ends_no_connection() {
    for answers in [false, true] {
        let (mut net, a, b, late) = late_predecessor(answers);
        for bytes in &late {
            let _ = net.inject(0, 1, bytes);
            net.run_for(Duration::from_millis(20));
        }
        net.send_wait(0, a, b"there");
        net.send_wait(1, b, b"back");
        net.run_for(Duration::from_secs(1));
        assert_eq!((net.payloads(0), net.payloads(1)), (vec![&b"back"[..]], vec![&b"there"[..]]), "answers: {answers}");
        assert!(net.nodes.iter().all(|n| n.failed.is_empty()), "answers: {answers}: {}", net.tail());
        assert_eq!(net.nodes[1].eng.stats().restarts, 0);
        let again = net.connect(0, 1);
        net.settle();
        assert!(net.nodes[0].eng.is_connected(again), "answers: {answers}: {}", net.tail());
    }
}

/// If it is taken for the successor after all, because the living one could not be heard, that one is believed again as
/// soon as it asks.
#[test]
fn who_lives_is_believed_in_the_end() {
    let (mut net, _, b, late) = late_predecessor(false);
    net.filter = Some(Box::new(|_, _| false));
    for bytes in &late {
        let _ = net.inject(0, 1, bytes);
        net.run_for(Duration::from_millis(20));
    }
    assert_eq!(net.nodes[1].failed, [(b, ErrorKind::ConnectionReset)]);
    net.filter = None;
    let a2 = net.connect(0, 1);
    assert!(net.run_until(Duration::from_secs(1), |n| n.nodes[0].eng.is_connected(a2)), "{}", net.tail());
    net.send_wait(0, a2, b"I am");
    net.run_for(Duration::from_secs(1));
    assert_eq!(net.payloads(1), [b"I am"]);
    assert_eq!(net.nodes[1].eng.stats().restarts, 2);
}

#[test]
fn numbers_of_connections_run_out_with_an_error() {
    let mut net = Net::with(2, 1, |_, cfg| cfg.first_conn_sn = u32::MAX - 1);
    net.pair(0, 1);
    let caps = net.caps(1);
    let again = net.nodes[0].eng.connect_to_iface(net.now, 1, 0x101, 0, caps);
    assert_eq!(again, Err(ErrorKind::ExceedsLimit));
}

#[test]
fn connect_to_endpoint_checks_its_arguments() {
    let mut net = Net::new(2, 1);
    let (now, caps) = (net.now, net.caps(1));
    let eng = &mut net.nodes[0].eng;
    let ep = eng.create_ep(now).unwrap();
    assert_eq!(eng.connect_to_ep(now, ep, 1, 0x101, 0xff_ffff, caps), Err(ErrorKind::InvalidAddress));
    assert_eq!(eng.connect_to_ep(now, ep, 1, 0x101, 5, caps), Ok(()));
    assert_eq!(eng.connect_to_ep(now, ep, 1, 0x101, 5, caps), Err(ErrorKind::InvalidParam));
}

#[test]
fn packets_that_come_before_connect_to_endpoint_are_delivered() {
    let mut net = Net::new(2, 1);
    let now = net.now;
    let a = net.nodes[0].eng.create_ep(now).unwrap();
    let b = net.nodes[1].eng.create_ep(now).unwrap();
    net.p2p_half(0, a, 1, b);
    net.settle();
    let op = net.send(0, a, b"early").unwrap();
    net.settle();
    assert_eq!(net.payloads(1), [b"early"]);
    assert_eq!(net.is_done(0, op), None, "no ack before the peer's id is known");
    net.p2p_half(1, b, 0, a);
    assert!(net.run_until(Duration::from_secs(1), |n| n.is_done(0, op).is_some()));
    assert_eq!(net.payloads(1).len(), 1);
}

/// An interface may connect to itself: both requests are the same one, and the endpoint talks to itself.
#[test]
fn loopback() {
    let mut net = Net::new(1, 1);
    let a = net.connect(0, 0);
    net.settle();
    assert!(net.nodes[0].eng.is_connected(a), "it does not connect to itself\n{}", net.tail());
    assert_eq!(net.nodes[0].eng.remote_ep_id(a), Some(a.wire_id()));
    let b = net.connect(0, 0);
    net.settle();
    for i in 0..100 {
        net.send_wait(0, a, &[i]);
        net.send_wait(0, b, &[i]);
    }
    net.run_for(Duration::from_millis(100));
    assert_eq!(net.nodes[0].delivered.len(), 200);
    net.destroy(0, a);
    net.destroy(0, b);
    net.run_for(Duration::from_secs(5));
    assert_eq!((net.nodes[0].eng.ep_count(), net.nodes[0].failed.len()), (0, 0), "records, failures\n{}", net.tail());
}

/// A peer whose request was answered in vain asks again after we have given up: it gets a fresh endpoint.
#[test]
fn a_request_after_its_answer_was_given_up() {
    let mut net = Net::with(2, 1, |i, cfg| {
        cfg.timeout = Duration::from_secs([60, 5][i]);
        cfg.linger = Duration::from_secs(300);
    });
    net.filter = Some(Box::new(|from, _| from == 0));
    let a = net.connect(0, 1);
    net.settle();
    let b = net.connect(1, 0);
    // Requests stop, too, or they would count as signs of life.
    net.filter = Some(Box::new(|_, _| false));
    net.run_for(Duration::from_secs(6));
    assert_eq!(net.nodes[1].failed, [(b, ErrorKind::EndpointTimeout)]);
    net.destroy(1, b);
    net.filter = None;
    assert!(
        net.run_until(Duration::from_secs(5), |n| n.nodes[0].eng.is_connected(a)),
        "it does not connect\n{}",
        net.tail()
    );
}

/// A request outlives the process it was meant for, and the next one answers it: the endpoint has lost its peer.
#[test]
fn a_crep_of_another_process_ends_a_connection() {
    let mut net = Net::new(2, 1);
    net.records = true;
    let a = net.connect(0, 1);
    net.settle();
    let creq = net.sent[0].1.clone();
    assert!(net.nodes[0].eng.is_connected(a));
    net.restart(1, |_| {});
    let _ = net.inject(0, 1, &creq);
    net.run_for(Duration::from_millis(100));
    assert_eq!(net.nodes[0].failed, [(a, ErrorKind::ConnectionReset)]);
}
