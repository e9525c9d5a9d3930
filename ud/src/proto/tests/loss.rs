//! Losses and their repair: gaps, NACKs, selective acks, resends and the send queue.

use std::time::Duration;

use super::{handshake::drop_first, net::*};
use crate::proto::{wire, *};

/// Opens the window to `n` packets.
fn open_window(net: &mut Net, ep: EpId, n: u16) {
    net.open_window(ep, n);
    net.nodes[1].delivered.clear();
    net.sent.clear();
    net.records = true;
}

fn is_am(bytes: &[u8]) -> bool {
    bytes[3] & 1 == 1
}

/// A plain UCX pair, as far as the wire goes.
fn plain() -> Net {
    Net::with(2, 1, |i, cfg| {
        cfg.foreign_ident = Some([i as u8 + 1; 20]);
        cfg.hold_max = 0;
    })
}

fn numbers(net: &Net) -> Vec<u8> {
    net.payloads(1).iter().map(|p| p[0]).collect()
}

/// Loses message `lost` of `n`, big ones or small ones; how long the repair took and how many packets were sent again.
fn lose_one(net: &mut Net, a: EpId, lost: usize, n: usize, len: usize) -> (Duration, u64) {
    open_window(net, a, 32);
    let start = net.now;
    let resends = net.nodes[0].eng.stats().tx_resends;
    for i in 0..n {
        if i == lost {
            net.filter = drop_first(1, |_, b| is_am(b));
        }
        net.send(0, a, &vec![i as u8; len]).unwrap();
    }
    assert!(
        net.run_until(Duration::from_secs(1), |net| net.nodes[1].delivered.len() == n),
        "what was lost is not repaired\n{}",
        net.tail()
    );
    assert_eq!(numbers(net), (0..n as u8).collect::<Vec<_>>());
    (net.now.since(start), net.nodes[0].eng.stats().tx_resends - resends)
}

#[test]
fn a_hole_is_filled_by_one_resend_at_once() {
    for len in [1, 4000] {
        let mut net = Net::new(2, 1);
        let (a, _) = net.pair(0, 1);
        let (took, resends) = lose_one(&mut net, a, 3, 20, len);
        assert_eq!(resends, 1, "only the missing one\n{}", net.tail());
        assert!(took < Duration::from_millis(1), "{took:?}: no timer was needed");
        assert_eq!(net.nodes[0].eng.stats().cwnd_cuts, 1);
    }
}

/// UCX 6681d52f45: NACKs, and big packets repeated too; UCX itself waits for the timer.
#[test]
fn towards_ucx_a_nack_resends_everything_after_the_gap_at_once() {
    for len in [1, 4000] {
        let mut net = plain();
        let (a, _) = net.pair(0, 1);
        let (took, resends) = lose_one(&mut net, a, 3, 20, len);
        assert_eq!(resends, 17, "one round for all the NACKs\n{}", net.tail());
        assert!(took < Duration::from_millis(1), "{took:?}");
    }
}

#[test]
fn a_lost_resend_is_repaired_by_the_next_news() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    open_window(&mut net, a, 32);
    // The second message is lost twice.
    net.filter = drop_first(2, |from, b| from == 0 && is_am(b) && b.get(8) == Some(&1));
    for i in 0..8 {
        net.send(0, a, &[i]).unwrap();
    }
    let start = net.now;
    while net.nodes[1].delivered.len() < 8 {
        assert!(net.step(), "nothing can happen any more, and messages are missing\n{}", net.tail());
    }
    assert!(net.now.since(start) <= Duration::from_millis(31), "{:?}\n{}", net.now.since(start), net.tail());
}

#[test]
fn the_tail_is_found_by_a_question() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    let (took, resends) = lose_one(&mut net, a, 7, 8, 4000);
    assert_eq!(resends, 1);
    // A sixteenth of a tick, some round trips.
    assert!(
        (Duration::from_micros(620)..Duration::from_micros(700)).contains(&took),
        "{took:?}: early, not after a tick"
    );
}

#[test]
fn questions_are_repeated_until_the_first_tick() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    let op = net.send_wait(0, a, b"a round trip is known from here on");
    net.flush(0, a);
    assert!(net.run_until(Duration::from_secs(1), |n| n.is_done(0, op).is_some()));
    net.filter = Some(Box::new(|_, _| false));
    net.records = true;
    net.send(0, a, b"lost").unwrap();
    let (began, mut at) = (net.now, Vec::new());
    while net.now.since(began) < Duration::from_millis(20) {
        let before = net.sent.len();
        assert!(net.step());
        at.extend(std::iter::repeat_n(net.now.since(began).as_micros(), net.sent.len() - before));
    }
    // At 1/16, 1/8, 1/4, 1/2 and 1 of the base interval of 10 ms, and then, with the message, by the timer.
    assert_eq!(at, [625, 1250, 2500, 5000, 10_000, 30_000, 30_000], "{at:?}\n{}", net.tail());
}

#[test]
fn what_never_arrives_is_repeated_ever_more_slowly() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    let op = net.send_wait(0, a, b"a round trip is known from here on");
    net.flush(0, a);
    assert!(net.run_until(Duration::from_secs(1), |n| n.is_done(0, op).is_some()));
    // A path that lets the questions and the answers through, and no long packet.
    net.filter = Some(Box::new(|_, bytes| bytes.len() < 100));
    net.send(0, a, &[0; 1000]).unwrap();
    let before = net.nodes[0].eng.stats().tx_resends;
    net.run_for(Duration::from_secs(1));
    let resends = net.nodes[0].eng.stats().tx_resends - before;
    assert!((8..=16).contains(&resends), "{resends} in a second, a round trip being 20 us\n{}", net.tail());
}

/// UCX repeats no big packets on its timer without a NACK; ours repeats the first, in case the NACKs are lost.
#[test]
fn the_timer_repeats_little_without_news() {
    let mut net = plain();
    let (a, _) = net.pair(0, 1);
    open_window(&mut net, a, 16);
    net.nodes[1].is_running = false;
    for i in 0..10 {
        net.send(0, a, &[i; 3000]).unwrap();
    }
    net.sent.clear();
    net.run_for(Duration::from_millis(35));
    assert_eq!(
        net.sent.iter().filter(|(_, b)| is_am(b)).count(),
        1,
        "packets that were sent before the peer has answered\n{}",
        net.tail()
    );
    net.nodes[1].is_running = true;
    net.nodes[1].can_deliver = true;
    assert!(net.run_until(Duration::from_secs(5), |n| !n.nodes[0].eng.has_outstanding(a)));
}

/// The ack in a resend is today's, and a resend asks for an ack every fourth PSN, at the first and at the last packet.
#[test]
fn headers_of_resends() {
    let mut net = plain();
    let (a, b) = net.pair(0, 1);
    open_window(&mut net, a, 20);
    net.filter = Some(Box::new(|from, b| from == 1 || !is_am(b)));
    for i in 0..7 {
        net.send(0, a, &[i]).unwrap();
    }
    net.filter = None;
    net.send_wait(1, b, b"moves our head");
    net.settle();
    net.sent.clear();
    net.run_for(Duration::from_millis(100));
    let head = net.nodes[0].eng.eps[a.slot].rx_head;
    let resends: Vec<_> =
        net.sent.iter().filter(|(n, b)| *n == 0 && is_am(b)).map(|(_, b)| wire::Neth::parse(b).unwrap()).collect();
    assert_eq!(resends.len(), 7);
    for (i, neth) in resends.iter().enumerate() {
        assert_eq!(neth.ack, head, "resend {i}");
        let asks = i == 0 || i == 6 || neth.psn.raw().is_multiple_of(4);
        assert_eq!(neth.is(wire::ACK_REQ), asks, "resend {i}, psn {}", neth.psn);
    }
}

/// UCX 2f179ae9a1: an operation whose resend is still in the send queue is not finished, nor is anything after it.
#[test]
fn nothing_finishes_while_its_resend_is_in_the_send_queue() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    open_window(&mut net, a, 8);
    net.nodes[0].reports_tx = false;
    net.filter = drop_first(1, |_, b| is_am(b));
    let first = net.send(0, a, b"1").unwrap();
    let second = net.send(0, a, b"2").unwrap();
    let flush = net.flush(0, a);
    net.run_for(Duration::from_millis(100));
    assert_eq!(net.nodes[1].delivered.len(), 2);
    assert_eq!([first, second, flush].map(|op| net.is_done(0, op)), [None; 3]);
    assert!(net.nodes[0].eng.has_outstanding(a));
    net.nodes[0].reports_tx = true;
    net.pump();
    assert_eq!([first, second, flush].map(|op| net.is_done(0, op)), [Some(Ok(())); 3]);
    let order = net.nodes[0].done_order.clone();
    assert!(order.ends_with(&[first, second, flush]));
}

/// UCX 2c762507ab, 8cfe5b4972, b96281e53f: acks in the middle of a round of resends, up to and past its end.
#[test]
fn acks_in_the_middle_of_a_round() {
    for acked in 0..8u16 {
        let mut net = plain();
        let (a, _) = net.pair(0, 1);
        open_window(&mut net, a, 20);
        net.nodes[1].is_running = false;
        for i in 0..8 {
            net.send(0, a, &[i]).unwrap();
        }
        net.nodes[0].credit = 0;
        net.run_for(Duration::from_millis(31));
        // Three of the round leave.
        net.nodes[0].credit = 3;
        net.pump();
        let first = net.nodes[0].eng.eps[a.slot].acked;
        let neth = wire::Neth {
            packet_type: a.wire_id(),
            psn: net.nodes[0].eng.eps[a.slot].rx_head.next(),
            ack: first.add(acked),
        };
        let _ = net.inject(1, 0, &neth.emit());
        net.sent.clear();
        net.nodes[0].credit = usize::MAX;
        net.run_for(Duration::from_millis(1));
        let psns: Vec<u16> = net
            .sent
            .iter()
            .filter(|(n, b)| *n == 0 && is_am(b))
            .map(|(_, b)| wire::Neth::parse(b).unwrap().psn.since(first))
            .collect();
        assert!(psns.iter().all(|&p| p > acked && p > 3 && p <= 8), "acked {acked}: {psns:?}");
        net.nodes[0].eng.check_invariants();
        net.nodes[1].is_running = true;
        let rest = 8 - usize::from(acked);
        if acked == 0 {
            assert!(
                net.run_until(Duration::from_secs(5), |n| n.nodes[1].delivered.len() == rest),
                "what was lost is not repaired\n{}",
                net.tail()
            );
        }
    }
}

#[test]
fn packets_beyond_a_gap_are_kept_and_come_in_order() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    open_window(&mut net, a, 32);
    net.filter = drop_first(1, |_, b| is_am(b));
    for i in 0..10 {
        net.send(0, a, &[i]).unwrap();
    }
    net.nodes[0].credit = 0;
    net.settle();
    assert!(net.nodes[1].delivered.is_empty());
    assert_eq!(net.nodes[1].held, 9);
    net.nodes[0].credit = usize::MAX;
    net.run_for(Duration::from_millis(50));
    assert_eq!(numbers(&net), (0..10).collect::<Vec<_>>());
    assert_eq!(net.nodes[1].held, 0);
}

#[test]
fn no_more_is_kept_than_allowed() {
    let mut net = Net::with(2, 1, |_, cfg| cfg.hold_max = 4);
    let (a, _) = net.pair(0, 1);
    open_window(&mut net, a, 32);
    net.filter = drop_first(1, |_, b| is_am(b));
    for i in 0..20 {
        net.send(0, a, &[i]).unwrap();
    }
    net.nodes[0].credit = 0;
    net.settle();
    assert_eq!(net.nodes[1].held, 3, "the first place is for the missing one");
    assert_eq!(net.nodes[1].eng.stats().dropped(DropReason::Gap), 16);
    net.nodes[0].credit = usize::MAX;
    assert!(net.run_until(Duration::from_secs(1), |n| n.nodes[1].delivered.len() == 20));
    assert_eq!(numbers(&net), (0..20).collect::<Vec<_>>());
}

#[test]
fn kept_buffers_of_a_dead_endpoint_come_back() {
    let mut net = Net::new(2, 1);
    let (a, b) = net.pair(0, 1);
    open_window(&mut net, a, 32);
    net.filter = drop_first(1, |_, b| is_am(b));
    for i in 0..10 {
        net.send(0, a, &[i]).unwrap();
    }
    net.nodes[0].credit = 0;
    net.settle();
    let now = net.now;
    net.nodes[1].eng.invalidate(now, b);
    net.pump();
    assert_eq!(net.nodes[1].held, 0);
    net.nodes[1].eng.hold(b, 5, 1, vec![]);
    net.nodes[1].held += 1;
    net.pump();
    assert_eq!(net.nodes[1].held, 0, "held too late: comes back");
}

/// Without room for messages the receiver is silent about them; nothing is acked, and nothing storms.
#[test]
fn no_room_is_no_gap() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    open_window(&mut net, a, 32);
    net.nodes[1].can_deliver = false;
    for i in 0..30 {
        net.send(0, a, &[i]).unwrap();
    }
    net.run_for(Duration::from_secs(3));
    assert!(net.nodes[1].delivered.is_empty());
    assert!(net.sent.len() < 30 + 200, "{} packets in three seconds", net.sent.len());
    net.nodes[1].can_deliver = true;
    assert!(net.run_until(Duration::from_secs(6), |n| n.nodes[1].delivered.len() == 30));
}

/// Two endpoints that both miss something do not go on telling each other.
#[test]
fn nacks_do_not_provoke_nacks() {
    let mut net = plain();
    let (a, b) = net.pair(0, 1);
    open_window(&mut net, a, 8);
    net.filter = Some(Box::new(|_, _| false));
    net.send(0, a, b"1").unwrap();
    net.send(1, b, b"1").unwrap();
    net.filter = None;
    net.send(0, a, b"2").unwrap();
    net.send(1, b, b"2").unwrap();
    net.sent.clear();
    net.run_for(Duration::from_millis(200));
    assert!(net.sent.len() < 20, "NACKs that provoke NACKs\n{}", net.tail());
    assert!(!net.nodes[0].eng.has_outstanding(a) && !net.nodes[1].eng.has_outstanding(b));
}

/// At 5 % loss with default settings the stream never stands still for long.
#[test]
fn loss_makes_the_sender_slower_not_stop() {
    for seed in 0..5 {
        let mut net = Net::new(2, seed);
        net.checks = false;
        let (a, _) = net.pair(0, 1);
        net.faults = Faults { loss: 5, dup: 0, reorder: 5 };
        let mut longest = Duration::ZERO;
        let mut last = net.now;
        for i in 0..3000u32 {
            net.send_wait(0, a, &i.to_le_bytes());
            if net.nodes[1].delivered.len() > 1000 {
                net.nodes[1].delivered.clear();
            }
            longest = longest.max(net.now.since(last));
            last = net.now;
        }
        assert!(longest < Duration::from_millis(160), "seed {seed}: {longest:?}");
    }
}

#[test]
fn a_burst_of_losses_costs_one_cut() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    open_window(&mut net, a, 64);
    net.filter = drop_first(10, |_, b| is_am(b));
    for i in 0..60 {
        net.send(0, a, &[i]).unwrap();
    }
    net.run_until(Duration::from_secs(1), |n| n.nodes[1].delivered.len() == 60);
    assert_eq!(net.nodes[0].eng.stats().cwnd_cuts, 1);
    assert_eq!(net.nodes[0].eng.stats().tx_resends, 10);
}
