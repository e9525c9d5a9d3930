//! The window, its growth and cuts, and when acks are asked for. All near the PSN wrap.

use std::time::Duration;

use uct::Time;

use super::net::*;
use crate::proto::{psn::Psn, wire, *};

fn is_asking(bytes: &[u8]) -> bool {
    bytes[3] & 2 != 0
}

/// Fills the window; the number of packets it took and which of them (from 0) asked for an ack.
fn fill(net: &mut Net, ep: EpId) -> (usize, Vec<usize>) {
    net.records = true;
    net.sent.clear();
    while net.send(0, ep, b"x").is_ok() {}
    let asked = net.sent.iter().enumerate().filter(|(_, (_, b))| is_asking(b)).map(|(i, _)| i).collect();
    (net.sent.len(), asked)
}

fn cwnd(net: &Net, ep: EpId) -> u16 {
    net.nodes[0].eng.eps[ep.slot].cwnd
}

#[test]
fn psn_compare_for_all_differences() {
    for base in [0u16, 1, 0x7fff, 0x8000, 0xffff] {
        for d in 0..=u16::MAX {
            let (a, b) = (Psn::new(base), Psn::new(base.wrapping_add(d)));
            assert_eq!(b.is_after(a), (1..=0x7fff).contains(&d), "{base} + {d}");
            assert_eq!(b.is_before(a), d > 0x8000, "{base} + {d}");
            assert_eq!(a.is_after(b), b.is_before(a));
            assert_eq!(b.is_upto(a), d == 0 || d > 0x8000);
            assert_eq!(b.since(a), d);
            assert_eq!(a.add(d), b);
        }
    }
}

/// A fresh connect-to-endpoint pair may send two packets, the second of which asks.
#[test]
fn tx_window1() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.p2p(0, 1);
    assert_eq!(fill(&mut net, a), (2, vec![1]));
    assert!(!net.nodes[0].eng.can_send(a));
    net.settle();
    assert!(net.nodes[0].eng.can_send(a));
}

/// After the handshake the window is 3, so two packets; then it grows by one per ack.
#[test]
fn tx_window2() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    assert_eq!(cwnd(&net, a), 3);
    assert_eq!(fill(&mut net, a).0, 2);
    net.settle();
    assert_eq!((cwnd(&net, a), fill(&mut net, a).0), (4, 3));
}

/// With the smallest window every packet asks.
#[test]
fn ack_req_single() {
    let mut net = Net::with(2, 1, |_, cfg| cfg.max_window = 2);
    let (a, _) = net.pair(0, 1);
    for _ in 0..20 {
        assert_eq!(fill(&mut net, a), (1, vec![0]));
        net.settle();
    }
}

/// A window asks at its quarter and at its end, whatever the PSN, also where the PSN wraps.
#[test]
fn ack_req_window() {
    let mut net = Net::with(2, 1, |_, cfg| cfg.max_window = 17);
    let (a, _) = net.pair(0, 1);
    for _ in 0..30 {
        fill(&mut net, a);
        net.settle();
    }
    for _ in 0..10 {
        assert_eq!(fill(&mut net, a), (16, vec![3, 15]));
        net.settle();
    }
}

/// The window grows by one for each new ack, not for each packet, and ends at its maximum.
#[test]
fn ca_ai() {
    let mut net = Net::with(2, 1, |_, cfg| cfg.max_window = 40);
    let (a, _) = net.pair(0, 1);
    for _ in 0..60 {
        let (before, acks) = (cwnd(&net, a), net.nodes[0].eng.stats().acks_new);
        fill(&mut net, a);
        net.settle();
        let news = (net.nodes[0].eng.stats().acks_new - acks) as u16;
        assert!((1..=2).contains(&news), "two acks per window at most");
        assert_eq!(cwnd(&net, a), (before + news).min(40));
    }
    assert_eq!(cwnd(&net, a), 40);
}

#[test]
fn at_most_1024_in_flight() {
    let mut net = Net::new(2, 1);
    net.checks = false;
    let (a, _) = net.pair(0, 1);
    net.open_window(a, 1024);
    assert_eq!(fill(&mut net, a).0, 1024);
    net.settle();
    assert!(!net.nodes[0].eng.has_outstanding(a));
}

/// A loss halves the window, once, however many packets of it were lost; the floor is 2.
#[test]
fn ca_md() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    net.open_window(a, 63);
    let cuts = net.nodes[0].eng.stats().cwnd_cuts;
    net.filter = Some(Box::new(|from, _| from == 1));
    fill(&mut net, a);
    net.filter = None;
    let before = cwnd(&net, a);
    net.run_until(Duration::from_secs(1), |n| n.nodes[0].eng.stats().cwnd_cuts > cuts);
    assert_eq!(cwnd(&net, a), before / 2);
    assert!(net.run_until(Duration::from_secs(5), |n| !n.nodes[0].eng.has_outstanding(a)));
    assert_eq!(net.nodes[0].eng.stats().cwnd_cuts, cuts + 1, "one loss, one cut");
    for _ in 0..20 {
        net.filter = Some(Box::new(|from, _| from == 1));
        fill(&mut net, a);
        net.filter = None;
        assert!(
            net.run_until(Duration::from_secs(5), |n| !n.nodes[0].eng.has_outstanding(a)),
            "what was lost is not repaired\n{}",
            net.tail()
        );
    }
    assert!((2..=8).contains(&cwnd(&net, a)), "{}", cwnd(&net, a));
}

/// A resend does not exceed the window, and goes on as acks come.
#[test]
fn ca_resend() {
    let mut net = Net::with(2, 1, |_, cfg| {
        cfg.features = Features::empty();
        cfg.hold_max = 0;
    });
    let (a, _) = net.pair(0, 1);
    net.open_window(a, 31);
    net.filter = Some(Box::new(|from, _| from == 1));
    let (lost, _) = fill(&mut net, a);
    net.filter = None;
    net.sent.clear();
    net.nodes[1].is_running = false;
    net.run_for(Duration::from_millis(35));
    let first_round = net.sent.iter().filter(|(n, b)| *n == 0 && b[3] & 1 == 1).count();
    assert_eq!(first_round, 15, "half of 32, less one");
    net.nodes[1].is_running = true;
    assert!(
        net.run_until(Duration::from_secs(3), |n| !n.nodes[0].eng.has_outstanding(a)),
        "what was lost is not repaired\n{}",
        net.tail()
    );
    assert!(net.nodes[1].delivered.len() > lost);
}

#[test]
fn zcopy_always_asks() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    for _ in 0..20 {
        fill(&mut net, a);
        net.settle();
    }
    net.sent.clear();
    net.send_as(0, a, 1, b"z", SendKind::Zcopy).unwrap();
    assert!(is_asking(&net.sent[0].1));
}

/// Data carries the ack that is owed; then no packet of its own goes out.
#[test]
fn a_reply_carries_the_ack() {
    let mut net = Net::new(2, 1);
    let (a, b) = net.pair(0, 1);
    net.send(0, a, b"1").unwrap();
    net.send(0, a, b"2").unwrap();
    let packet = Vec::new();
    net.records = true;
    net.sent = packet;
    let acks = net.nodes[1].eng.stats().tx_acks;
    // Both arrive and are answered before the engine gets a word in.
    net.nodes[1].credit = 0;
    net.settle();
    net.send(1, b, b"reply").unwrap();
    net.nodes[1].credit = usize::MAX;
    net.settle();
    assert_eq!(net.nodes[1].eng.stats().tx_acks, acks);
    assert!(!net.nodes[0].eng.has_outstanding(a));
}

/// Nobody acks what nobody asked for: no traffic for a lone message but the timer's one question.
#[test]
fn unasked_messages_are_acked_by_the_timer() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    for _ in 0..8 {
        fill(&mut net, a);
        net.settle();
    }
    net.sent.clear();
    net.send(0, a, b"lone").unwrap();
    assert!(!is_asking(&net.sent[0].1));
    net.run_for(Duration::from_secs(1));
    assert_eq!(net.sent.iter().map(|(n, b)| (*n, b.len())).collect::<Vec<_>>(), [(0, 12), (0, 8), (1, 8)]);
}

#[test]
fn writable_comes_once_and_when_there_is_room() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    net.nodes[0].eng.want_writable(a);
    net.pump();
    assert_eq!(net.nodes[0].writable, [a], "at once if there is room");
    fill(&mut net, a);
    net.nodes[0].eng.want_writable(a);
    net.nodes[0].eng.want_writable(a);
    net.pump();
    assert_eq!(net.nodes[0].writable.len(), 1);
    net.settle();
    assert_eq!(net.nodes[0].writable.len(), 2);
}

/// A reserved slot is nobody else's, and is there when it is used.
#[test]
fn reserved_slots() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    let now = net.now;
    assert_eq!(net.nodes[0].eng.reserve(a, 100), Ok(()));
    assert_eq!(fill(&mut net, a).0, 1, "one of two is reserved");
    assert_eq!(net.nodes[0].eng.reserve(a, 100), Err(Refused::NoResource));
    let node = &mut net.nodes[0];
    let begun = node.eng.begin_send(a, 1, 5, SendKind::Copy, true).unwrap();
    assert_ne!(begun.neth[3] & 2, 0, "the last of the window asks");
    let op = node.op(b"later");
    node.serial += 1;
    node.eng.commit_send(now, begun, node.serial, op);
    assert_eq!(node.eng.reserve(a, 1), Err(Refused::NoResource));
    net.run_for(Duration::from_millis(100));
    assert_eq!(net.nodes[1].delivered.len(), 2);
    net.nodes[0].eng.reserve(a, 1).unwrap();
    net.nodes[0].eng.unreserve(a);
    net.nodes[0].eng.check_invariants();
    assert_eq!(net.nodes[0].eng.eps[a.slot].reserved, 0);
}

#[test]
fn begin_changes_nothing() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    let first = net.nodes[0].eng.begin_send(a, 1, 5, SendKind::Copy, false).unwrap();
    let second = net.nodes[0].eng.begin_send(a, 1, 5, SendKind::Copy, false).unwrap();
    assert_eq!(first.neth, second.neth);
    assert!(!net.nodes[0].eng.has_outstanding(a));
}

#[test]
fn begin_checks_its_arguments() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    let eng = &net.nodes[0].eng;
    let begin = |id, len| eng.begin_send(a, id, len, SendKind::Copy, false).map(|_| ()).unwrap_err();
    assert_eq!(begin(32, 0), Refused::Failed(uct::ErrorKind::InvalidParam));
    assert_eq!(begin(0, 4096 - 7), Refused::Failed(uct::ErrorKind::ExceedsLimit));
    assert!(eng.begin_send(a, 0, 4096 - 8, SendKind::Copy, false).is_ok());
    let gone = EpId { slot: 999, id: 1 };
    assert!(matches!(eng.begin_send(gone, 0, 0, SendKind::Copy, false), Err(Refused::Failed(_))));
}

/// The shorter packet size of the two is the limit.
#[test]
fn a_peer_with_shorter_packets_is_respected() {
    let mut net = Net::with(2, 1, |i, cfg| cfg.max_packet = [4096, 1024][i]);
    let (a, _) = net.pair(0, 1);
    assert_eq!(net.send(0, a, &[0; 1017]), Err(Refused::Failed(uct::ErrorKind::ExceedsLimit)));
    assert!(net.send(0, a, &[0; 1016]).is_ok());
}

/// Local back-pressure is no loss: nothing is resent, nothing cut, the order stays.
#[test]
fn a_full_send_queue_is_no_loss() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    net.filter = Some(Box::new(|_, _| false));
    net.send(0, a, b"1").unwrap();
    net.filter = None;
    net.nodes[0].credit = 0;
    net.run_for(Duration::from_secs(30));
    assert!(net.nodes[0].failed.is_empty(), "the peer was not asked");
    let stats = net.nodes[0].eng.stats();
    assert_eq!((stats.tx_resends, stats.cwnd_cuts), (0, 0));
    net.nodes[0].credit = usize::MAX;
    assert!(net.run_until(Duration::from_secs(5), |n| !n.nodes[0].eng.has_outstanding(a)));
}

#[test]
fn an_ack_of_what_was_never_sent_is_ignored_and_counted() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.p2p(0, 1);
    let op = net.send(0, a, b"x").unwrap();
    let psn = net.nodes[0].eng.eps[a.slot].psn;
    let now = net.nodes[0].eng.eps[a.slot].clone_window();
    for ack in [psn, psn.add(1), psn.add(7), psn.add(0x7fff), psn.add(0x8000)] {
        let neth = wire::Neth { packet_type: a.wire_id(), psn: Psn::new(0xfff8), ack };
        let _ = net.inject(1, 0, &neth.emit());
    }
    assert_eq!(net.nodes[0].eng.eps[a.slot].clone_window(), now);
    let stats = net.nodes[0].eng.stats();
    assert_eq!(stats.acks_beyond + stats.acks_old, 5);
    assert_eq!(net.is_done(0, op), None);
}

impl<L, R> crate::proto::ep::Ep<L, R> {
    fn clone_window(&self) -> (Psn, Psn, Psn, u16, u32) {
        (self.psn, self.acked, self.max_psn, self.cwnd, self.head)
    }
}

/// An interval that acks leave as it is ends where it would if each of them had moved it, and never later.
#[test]
fn an_interval_that_is_moved_later_ends_where_it_should() {
    use crate::proto::{
        ep::{Ep, Is},
        timer::{RunClock, TimeLimits, TimerQueue},
    };
    const TICK: u64 = 10_000_000;
    let limits = TimeLimits { timeout: 30_000_000_000, linger: 1, answers_count: true };
    // Round trips below, within and above the bounds of the first interval, in nanoseconds; 0: not known.
    for srtt in [0, 10_000, 300_000, 9_000_000] {
        let mut clock = RunClock::new(Duration::from_secs(1));
        let make = || {
            let mut ep: Ep<(), ()> = Ep::new(7, Psn::new(1), TICK);
            (ep.srtt, ep.psn) = (srtt, Psn::new(40));
            (ep, TimerQueue::new())
        };
        let ((mut at_once, mut a), (mut later, mut b)) = (make(), make());
        limits.restart(&mut a, 0, &mut at_once, Time::ZERO, TICK);
        limits.restart(&mut b, 0, &mut later, Time::ZERO, TICK);
        let mut rng = Rng::new(srtt + 1);
        let mut now = Time::ZERO;
        for ack in 1..39 {
            now = now.add_nanos(rng.below(2_000_000));
            let run = clock.run(now);
            assert!(clock.observe_soon(now));
            // Halfway a repair takes the interval away; the next ack is the first to start it anew.
            if ack == 20 {
                at_once.set_tick_at(now.add_nanos(3 * TICK));
                later.set_tick_at(now.add_nanos(3 * TICK));
            }
            at_once.take_ack(Psn::new(ack), 64, TICK, run);
            limits.restart(&mut a, 0, &mut at_once, now, TICK);
            if later.is.contains(Is::FIRST_TICK) {
                later.take_plain_ack(Psn::new(ack), 64, run);
            } else {
                later.take_ack(Psn::new(ack), 64, TICK, run);
                limits.restart(&mut b, 0, &mut later, now, TICK);
            }
            assert!(later.tick_at <= at_once.tick_at && later.deadline <= at_once.deadline, "srtt {srtt}, ack {ack}");
            assert_eq!((b.armed(), later.is.contains(Is::FIRST_TICK)), (1, true));
            if rng.percent(30) {
                TimeLimits::catch_up(&clock, &mut later, TICK);
                assert_eq!(
                    (later.tick_at, later.deadline),
                    (at_once.tick_at, at_once.deadline),
                    "srtt {srtt}, ack {ack}"
                );
            }
        }
        // Nothing is in flight: the interval is left alone, and a send that follows finds it running.
        TimeLimits::catch_up(&clock, &mut later, TICK);
        later.take_plain_ack(Psn::new(39), 64, clock.run(now));
        let (ends, sent) = (later.tick_at, now.add_nanos(1000));
        TimeLimits::catch_up(&clock, &mut later, TICK);
        assert_eq!((b.armed(), later.tick_at, later.deadline), (1, ends, ends));
        (later.psn, later.send_time) = (Psn::new(41), clock.run(sent));
        TimeLimits::catch_up(&clock, &mut later, TICK);
        assert_eq!(later.tick_at, sent.add_nanos(later.first_interval(TICK)));
        assert_eq!(later.deadline, later.tick_at);
    }
}

/// An ack makes room although nothing is released yet, because the packet's resend is in the send queue still: who waits for room
/// hears of it at once, not when the queue has moved.
#[test]
fn room_is_told_while_a_resend_is_in_the_send_queue() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    net.filter = Some(Box::new(|from, _| from == 1));
    let (n, _) = fill(&mut net, a);
    net.nodes[0].eng.want_writable(a);
    net.settle();
    net.filter = None;
    net.nodes[0].reports_tx = false;
    assert!(
        net.run_until(Duration::from_secs(1), |net| net.nodes[1].delivered.len() == n),
        "what was lost is not repaired\n{}",
        net.tail()
    );
    net.settle();
    assert!(net.nodes[0].eng.can_send(a), "the ack makes room\n{}", net.tail());
    assert_eq!(net.nodes[0].writable, [a], "who waits is not told\n{}", net.tail());
    assert!(net.nodes[0].eng.has_outstanding(a), "the resend is in the queue still");
}
