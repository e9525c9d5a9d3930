//! Peers that do not answer, peers that are merely busy, and a process that stood still itself.

use std::time::Duration;

use uct::ErrorKind;

use super::net::*;
use crate::proto::*;

#[test]
fn a_dead_peer_is_found_on_time_and_everything_finishes_once() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    net.nodes[1].is_running = false;
    let mut ops = vec![net.send(0, a, b"1").unwrap(), net.send(0, a, b"2").unwrap()];
    ops.push(net.flush(0, a));
    let start = net.now;
    net.run_until(Duration::from_secs(60), |n| !n.nodes[0].failed.is_empty());
    assert_eq!(net.nodes[0].failed, [(a, ErrorKind::EndpointTimeout)]);
    let took = net.now.since(start);
    assert!((Duration::from_secs(10)..Duration::from_millis(10_011)).contains(&took), "{took:?}");
    assert!(ops.iter().all(|&op| net.is_done(0, op) == Some(Err(ErrorKind::EndpointTimeout))));
    let stalled = &net.nodes[0].stalled;
    assert!(
        (1..=4).contains(&stalled.len()) && stalled.iter().all(|&s| s == a),
        "a few times, on the way: {stalled:?}"
    );
    assert_eq!(net.send(0, a, b"3"), Err(Refused::Failed(ErrorKind::EndpointTimeout)));
    net.run_for(Duration::from_secs(60));
    assert_eq!(net.nodes[0].failed.len(), 1);
    assert_eq!(net.nodes[0].eng.poll_timeout(), None);
    net.destroy(0, a);
    net.run_for(Duration::from_secs(3));
    assert_eq!((&net.nodes[0].freed[..], net.nodes[0].links_back), (&[a][..], 1));
}

#[test]
fn a_peer_that_was_never_heard() {
    let mut net = Net::new(2, 1);
    net.nodes[1].is_running = false;
    let a = net.connect(0, 1);
    net.run_for(Duration::from_secs(11));
    assert_eq!(net.nodes[0].failed, [(a, ErrorKind::NeverAnswered)]);
    let (b, _) = net.p2p(0, 1);
    net.send(0, b, b"x").unwrap();
    net.run_for(Duration::from_secs(11));
    assert_eq!(net.nodes[0].failed[1], (b, ErrorKind::NeverAnswered));
}

/// UCX 0744afb553: a user who keeps sending must not postpone the verdict.
#[test]
fn sending_does_not_postpone_the_verdict() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    for _ in 0..200 {
        net.send_wait(0, a, b"grow");
    }
    net.settle();
    net.nodes[1].is_running = false;
    let start = net.now;
    while net.nodes[0].failed.is_empty() {
        let _ = net.send(0, a, b"more");
        net.run_for(Duration::from_millis(500));
        assert!(
            net.now.since(start) < Duration::from_secs(12),
            "silence of more than 12 s is not noticed\n{}",
            net.tail()
        );
    }
}

/// The process itself was stopped for twice the time-out with packets in flight. On waking it must not blame the peer.
#[test]
fn a_stopped_process_does_not_blame_its_peers() {
    for wakes_by_packet in [false, true] {
        let mut net = Net::new(2, 1);
        let (a, _) = net.pair(0, 1);
        net.filter = Some(Box::new(|_, _| false));
        let op = net.send(0, a, b"x").unwrap();
        net.filter = None;
        net.now += Duration::from_secs(20);
        if wakes_by_packet {
            let _ = net.receive(0, 0x101, &[0; 8]);
        }
        net.step();
        assert!(net.nodes[0].failed.is_empty(), "not on the first tick after a gap");
        assert!(
            net.run_until(Duration::from_secs(1), |n| n.is_done(0, op) == Some(Ok(()))),
            "the message is not acknowledged\n{}",
            net.tail()
        );
        assert_eq!(net.nodes[0].eng.stats().stopped, 1);
    }
}

/// If the peer died meanwhile, that is found a time-out after waking.
#[test]
fn after_waking_a_dead_peer_is_still_found() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    net.nodes[1].is_running = false;
    net.send(0, a, b"x").unwrap();
    net.run_for(Duration::from_secs(4));
    net.now += Duration::from_secs(100);
    let woke = net.now;
    net.run_until(Duration::from_secs(60), |n| !n.nodes[0].failed.is_empty());
    let took = net.now.since(woke);
    // A second and a bit of the standstill passed before anything was due, so it cannot be told from running.
    assert!((Duration::from_millis(4_800)..Duration::from_millis(10_100)).contains(&took), "{took:?}");
}

/// A process that progresses seldom, but does, finds its dead as well.
#[test]
fn seldom_progress_still_finds_the_dead() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    net.nodes[1].is_running = false;
    net.send(0, a, b"x").unwrap();
    for _ in 0..15 {
        net.now += Duration::from_secs(1);
        let now = net.now;
        net.nodes[0].eng.handle_timeout(now);
        net.pump();
    }
    assert_eq!(net.nodes[0].failed.len(), 1);
}

/// A send queue that is slow, so that there is always a resend in it when the endpoint looks, but moves: the peer is asked
/// all the time, and its silence counts.
#[test]
fn a_slow_queue_does_not_postpone_the_verdict() {
    let ms = Duration::from_millis;
    let mut net = Net::with(2, 1, move |_, cfg| {
        cfg.timer_tick = ms(1);
        cfg.timer_backoff = 1.0;
        cfg.timeout = ms(1000);
    });
    let (a, _) = net.pair(0, 1);
    net.nodes[1].is_running = false;
    net.nodes[0].reports_tx = false;
    net.send(0, a, b"x").unwrap();
    let start = net.now;
    while net.nodes[0].failed.is_empty() {
        let posted = net.nodes[0].serial;
        net.run_for(ms(20));
        net.nodes[0].eng.handle_tx_done(posted);
        assert!(net.now.since(start) < ms(1_500), "silence of more than 1.5 s is not noticed\n{}", net.tail());
    }
    assert_eq!(net.nodes[0].failed, [(a, ErrorKind::EndpointTimeout)]);
}

/// A rank that computes for a minute: its engine answers, its user takes nothing. It is not dead.
#[test]
fn a_busy_peer_is_not_dead() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    net.nodes[1].can_deliver = false;
    let op = net.send(0, a, b"x").unwrap();
    net.run_for(Duration::from_secs(60));
    assert!(net.nodes[0].failed.is_empty(), "a peer that has no room is taken for dead\n{}", net.tail());
    assert_eq!(net.is_done(0, op), None);
    assert_eq!((&net.nodes[0].stuck, &net.nodes[0].stalled), (&vec![a], &vec![]), "told once");
    let (kept, resends) = net.nodes[0].eng.oldest_unacked(a).expect("what it does not take");
    assert_eq!((&kept.payload[..], resends > 3), (&b"x"[..], true));
    net.nodes[1].can_deliver = true;
    assert!(net.run_until(Duration::from_secs(5), |n| n.is_done(0, op) == Some(Ok(()))));
    assert!(net.nodes[0].eng.oldest_unacked(a).is_none());
    // It is told again when it gets stuck again.
    net.nodes[1].can_deliver = false;
    net.send(0, a, b"y").unwrap();
    net.run_for(Duration::from_secs(60));
    assert_eq!(net.nodes[0].stuck, [a, a]);
}

/// But closing is bounded: a destroyed endpoint waits for progress, not for signs of life.
#[test]
fn a_busy_peer_does_not_keep_a_destroyed_endpoint() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    net.nodes[1].can_deliver = false;
    net.send(0, a, b"x").unwrap();
    net.run_for(Duration::from_secs(5));
    net.destroy(0, a);
    net.run_for(Duration::from_secs(12));
    assert_eq!(net.nodes[0].freed, [a]);
}

#[test]
fn invalidate_is_a_failure() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    net.filter = Some(Box::new(|_, _| false));
    let op = net.send(0, a, b"x").unwrap();
    let now = net.now;
    net.nodes[0].eng.invalidate(now, a);
    net.nodes[0].eng.invalidate(now, a);
    net.pump();
    assert_eq!(net.nodes[0].failed, [(a, ErrorKind::EndpointTimeout)]);
    assert_eq!(net.is_done(0, op), Some(Err(ErrorKind::EndpointTimeout)));
}

/// UCX e32acae75b: nobody is told of an endpoint nobody made.
#[test]
fn an_unclaimed_endpoint_dies_silently() {
    let mut net = Net::new(2, 1);
    net.filter = Some(Box::new(|from, _| from == 0));
    net.connect(0, 1);
    net.settle();
    net.nodes[0].is_running = false;
    net.run_for(Duration::from_secs(11));
    assert_eq!((net.nodes[1].eng.ep_count(), net.nodes[1].failed.len(), net.nodes[1].links_back), (0, 0, 1));
}

/// After a failure a new endpoint to the same peer connects.
#[test]
fn reconnect_after_a_failure() {
    let mut net = Net::new(2, 1);
    let (a, b) = net.pair(0, 1);
    net.filter = Some(Box::new(|_, _| false));
    net.send(0, a, b"x").unwrap();
    net.send(1, b, b"x").unwrap();
    net.run_for(Duration::from_secs(11));
    assert_eq!((net.nodes[0].failed.len(), net.nodes[1].failed.len()), (1, 1));
    net.filter = None;
    net.destroy(0, a);
    net.destroy(1, b);
    let (a2, _) = net.pair(0, 1);
    net.send_wait(0, a2, b"again");
    net.settle();
    assert_eq!(net.payloads(1), [b"again"]);
}

/// Exactly one failure per endpoint, many endpoints to one dead peer.
#[test]
fn one_failure_per_endpoint() {
    let mut net = Net::new(2, 1);
    let eps: Vec<EpId> = (0..20).map(|_| net.connect(0, 1)).collect();
    net.settle();
    net.nodes[1].is_running = false;
    for &ep in &eps {
        net.send(0, ep, b"x").unwrap();
    }
    net.run_for(Duration::from_secs(30));
    let mut failed: Vec<EpId> = net.nodes[0].failed.iter().map(|f| f.0).collect();
    failed.sort_by_key(|e| e.slot);
    assert_eq!(failed, eps);
}

/// The wait grows from one tick to 256 of them, and asks each time.
#[test]
fn back_off() {
    let mut net = Net::with(2, 1, |_, cfg| cfg.timeout = Duration::from_secs(60));
    let (a, _) = net.pair(0, 1);
    net.nodes[1].is_running = false;
    net.records = true;
    net.send(0, a, b"x").unwrap();
    let (start, mut times) = (net.now, Vec::new());
    while times.len() < 11 {
        let before = net.sent.len();
        let in_time = net.step() && net.now.since(start) < Duration::from_secs(60);
        assert!(in_time, "it asks at {times:?} ms, and no more\n{}", net.tail());
        if net.sent.len() > before {
            times.push(net.now.since(start).as_millis());
        }
    }
    assert_eq!(times, [10, 30, 70, 150, 310, 630, 1270, 2550, 5110, 7670, 10230]);
}

/// The wake-up flag comes only once gentle asking has not helped (UCX 8d05a7d50a, b21fe2a836).
#[test]
fn late_questions_are_solicited() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    net.filter = Some(Box::new(|_, _| false));
    net.send(0, a, b"x").unwrap();
    let mut asked = Vec::new();
    let eng = &mut net.nodes[0].eng;
    let mut serial = 100;
    while asked.len() < 8 {
        let now = eng.poll_timeout().unwrap();
        eng.handle_timeout(now);
        loop {
            serial += 1;
            let Some(t) = eng.poll_transmit(now, serial) else { break };
            match t.kind {
                TransmitKind::Control { bytes } if bytes.len() == 8 => asked.push(t.solicited),
                _ => assert!(t.solicited && t.signaled, "resends always"),
            }
        }
        eng.handle_tx_done(serial);
    }
    assert_eq!(asked, [false, false, false, false, true, true, true, true], "from 250 ms on");
}
