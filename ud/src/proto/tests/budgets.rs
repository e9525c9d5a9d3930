//! The receive budget: what is in flight to one peer stays within what that peer grants.

use std::time::Duration;

use super::net::*;
use crate::proto::{budget::charge_of, *};

fn budget_net(senders: usize, budget: u32) -> Net {
    Net::with(senders + 1, 1, move |i, cfg| cfg.rx_budget = if i == 0 { budget } else { 0 })
}

fn in_flight(net: &Net, n: usize) -> u64 {
    net.nodes[n].eng.peers.iter().map(|(_, p)| p.in_flight).max().unwrap_or(0)
}

/// Opens the window wide with empty packets.
fn open_window(net: &mut Net, n: usize, ep: EpId) {
    for _ in 0..300 {
        net.send_wait(n, ep, b"");
    }
    net.flush(n, ep);
    net.settle();
    net.nodes[n].writable.clear();
}

#[test]
fn the_budget_bounds_what_is_in_flight() {
    let budget = 10 * charge_of(1008);
    let mut net = budget_net(1, budget);
    let (a, _) = net.pair(1, 0);
    open_window(&mut net, 1, a);
    let mut sent = 0;
    while net.send(1, a, &[0; 1000]).is_ok() {
        sent += 1;
    }
    assert_eq!(sent, 10);
    assert_eq!(in_flight(&net, 1), u64::from(budget));
    assert_eq!(net.send(1, a, &[0; 1000]), Err(Refused::NoResource));
    net.nodes[1].eng.want_writable(a);
    net.settle();
    assert_eq!(net.nodes[1].writable, [a], "asked for and acked without a timer");
    assert_eq!(in_flight(&net, 1), 0);
}

/// All endpoints to one peer share its budget, and one that waits is woken by another's acks.
#[test]
fn endpoints_share_the_budget_of_their_peer() {
    let mut net = budget_net(1, 4 * charge_of(4096));
    let a: Vec<EpId> = (0..4).map(|_| net.connect(1, 0)).collect();
    net.settle();
    for &ep in &a {
        open_window(&mut net, 1, ep);
    }
    for &ep in &a[..2] {
        net.send(1, ep, &[0; 4088]).unwrap();
        net.send(1, ep, &[0; 4088]).unwrap();
    }
    assert_eq!(net.send(1, a[3], &[0; 4088]), Err(Refused::NoResource));
    net.nodes[1].eng.want_writable(a[3]);
    net.settle();
    assert_eq!(net.nodes[1].writable, [a[3]]);
}

/// A budget smaller than one packet still lets one packet through.
#[test]
fn one_packet_always_fits() {
    let mut net = budget_net(1, 1);
    let (a, _) = net.pair(1, 0);
    for i in 0..20u8 {
        net.send_wait(1, a, &[i; 3000]);
        assert_eq!(in_flight(&net, 1), u64::from(charge_of(3008)));
    }
    net.settle();
    assert_eq!(net.nodes[0].delivered.len(), 20);
    assert_eq!(net.nodes[1].eng.stats().tx_resends, 0);
    assert!(
        net.now < uct::Time::from_nanos(1_100_000_000),
        "acks came when asked for, not by the timer: {:?}",
        net.now
    );
}

/// Thirty-two senders at once: each learns its share, and the sum in flight comes down to the budget.
#[test]
fn many_to_one() {
    let budget = 64 * charge_of(4096);
    let mut net = budget_net(32, budget);
    net.checks = false;
    let eps: Vec<(usize, EpId)> = (1..=32).map(|n| (n, net.connect(n, 0))).collect();
    net.settle();
    let mut highest = 0;
    for round in 0..200u32 {
        for &(n, ep) in &eps {
            while net.send(n, ep, &[round as u8; 4000]).is_ok() {}
        }
        let sum: u64 = eps.iter().map(|&(n, _)| in_flight(&net, n)).sum();
        if round > 20 {
            highest = highest.max(sum);
        }
        net.run_for(Duration::from_micros(100));
    }
    assert!(highest <= u64::from(budget), "{highest} of {budget}");
    assert!(highest >= u64::from(budget) / 4, "{highest} of {budget}: not throttled to nothing either");
    assert!(net.nodes[0].eng.stats().tx_xacks >= 32);
    assert_eq!(net.nodes[1].eng.stats().tx_resends, 0);
    // When the others have fallen silent, the one that goes on gets more.
    let (n, ep) = eps[0];
    let mut most = 0;
    for _ in 0..5000 {
        while net.send(n, ep, &[0; 4000]).is_ok() {}
        most = most.max(in_flight(&net, n));
        net.run_for(Duration::from_micros(100));
    }
    assert!(most > u64::from(budget) / 2, "{most} of {budget}");
}

#[test]
fn a_peer_that_states_no_budget_is_not_limited() {
    let mut net = budget_net(1, 0);
    let (a, _) = net.pair(1, 0);
    open_window(&mut net, 1, a);
    let mut sent = 0;
    while net.send(1, a, &[0; 4000]).is_ok() {
        sent += 1;
    }
    assert!(sent > 20);
}

/// A failed endpoint gives back what it had in flight.
#[test]
fn failure_gives_the_budget_back() {
    let mut net = budget_net(1, 2 * charge_of(4096));
    let a = net.connect(1, 0);
    let b = net.connect(1, 0);
    net.settle();
    net.filter = Some(Box::new(|_, _| false));
    net.send(1, a, &[0; 4000]).unwrap();
    net.send(1, a, &[0; 4000]).unwrap();
    net.nodes[1].eng.want_writable(b);
    let now = net.now;
    net.nodes[1].eng.invalidate(now, a);
    net.pump();
    assert_eq!(net.nodes[1].writable, [b]);
    assert_eq!(in_flight(&net, 1), 0);
}
