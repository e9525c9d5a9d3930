//! The happy path, and the life of one endpoint.

use std::time::Duration;

use super::net::*;

#[test]
fn connect_send_ack_flush_destroy() {
    let mut net = Net::new(2, 1);
    let (a, b) = net.pair(0, 1);
    let op = net.send(0, a, b"hello").unwrap();
    let flush = net.flush(0, a);
    net.settle();
    assert_eq!(net.payloads(1), [b"hello"]);
    assert_eq!(net.nodes[1].delivered[0].0, b);
    assert_eq!(net.is_done(0, op), Some(Ok(())));
    assert_eq!(net.is_done(0, flush), Some(Ok(())));
    net.destroy(0, a);
    net.settle();
    assert_eq!(net.nodes[1].closed_by_peer, [b]);
    net.destroy(1, b);
    net.run_for(Duration::from_secs(3));
    for n in &net.nodes {
        assert_eq!((n.eng.ep_count(), n.links_made), (0, n.links_back));
        assert_eq!(n.eng.poll_timeout(), None);
        assert!(n.failed.is_empty());
    }
}

#[test]
fn crossing_connects_make_one_connection() {
    let mut net = Net::new(2, 1);
    let (a, b) = (net.connect(0, 1), net.connect(1, 0));
    net.settle();
    assert_eq!(net.nodes[0].eng.remote_ep_id(a), Some(b.wire_id()));
    assert_eq!(net.nodes[1].eng.remote_ep_id(b), Some(a.wire_id()));
    assert_eq!((net.nodes[0].eng.ep_count(), net.nodes[1].eng.ep_count()), (1, 1));
}

#[test]
fn the_last_message_lost_is_repaired_by_the_timer() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    net.filter = Some(Box::new(|_, _| false));
    let op = net.send(0, a, b"lost").unwrap();
    net.filter = None;
    assert!(
        net.run_until(Duration::from_millis(20), |n| n.is_done(0, op) == Some(Ok(()))),
        "the lost message is not repaired within 20 ms\n{}",
        net.tail()
    );
    assert_eq!(net.payloads(1), [b"lost"]);
}

#[test]
fn idle_endpoints_have_no_timer() {
    let mut net = Net::new(2, 1);
    let (_, _) = net.pair(0, 1);
    assert!(net.nodes.iter().all(|n| n.eng.poll_timeout().is_none()));
}

#[test]
fn a_thousand_messages_in_order() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    for i in 0..1000u32 {
        net.send_wait(0, a, &i.to_le_bytes());
    }
    net.flush(0, a);
    net.settle();
    let got: Vec<u32> = net.payloads(1).iter().map(|p| u32::from_le_bytes((*p).try_into().unwrap())).collect();
    assert_eq!(got, (0..1000).collect::<Vec<_>>());
    assert_eq!(net.nodes[0].eng.stats().tx_resends, 0);
    assert!(!net.nodes[0].eng.has_outstanding(a));
}

#[test]
fn writable_may_be_asked_for_before_there_is_a_peer() {
    let mut net = Net::new(2, 1);
    let now = net.now;
    let a = net.nodes[0].eng.create_ep(now).unwrap();
    let b = net.nodes[1].eng.create_ep(now).unwrap();
    net.nodes[0].eng.want_writable(a);
    net.nodes[1].eng.want_writable(b);
    net.destroy(1, b);
    net.p2p_half(0, a, 1, b);
    net.settle();
    assert_eq!(net.nodes[0].writable, [a]);
}

/// Every change of state there is.
#[test]
fn state_changes() {
    use crate::proto::ep::State::*;
    let kind = uct::ErrorKind::Canceled;
    let all = [Idle, Resolving, Connecting, Connected, Failed(kind)];
    let name = |s| match s {
        Idle => "idle",
        Resolving => "resolving",
        Connecting => "connecting",
        Connected => "connected",
        Failed(_) => "failed",
    };
    let mut table = Vec::new();
    for from in all {
        for to in all.into_iter().filter(|&to| from.may_become(to)) {
            table.push(format!("{} -> {}", name(from), name(to)));
        }
    }
    assert_eq!(
        table,
        [
            "idle -> resolving",
            "idle -> failed",
            "resolving -> connecting",
            "resolving -> connected",
            "resolving -> failed",
            "connecting -> connected",
            "connecting -> failed",
            "connected -> failed",
        ]
    );
}
