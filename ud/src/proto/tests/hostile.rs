//! Any bytes into the engine, in any state: no panic, no endless loop, all invariants hold, memory stays bounded.

use std::time::Duration;

use proptest::prelude::*;

use super::net::*;
use crate::proto::wire;

/// Endpoints in all states at node 0: idle, connecting, connected (handshake, p2p), lingering, failed, with data both ways
/// outstanding and packets kept beyond a gap. Node 1 is silent from then on.
fn zoo(plain: bool) -> (Net, Vec<Vec<u8>>) {
    let mut net = Net::with(2, 1, |i, cfg| {
        cfg.passive_max = 8;
        cfg.foreign_ident = plain.then_some([i as u8 + 1; 20]);
        cfg.rx_budget = 100_000;
        cfg.first_ep_id = Some(0);
    });
    net.records = true;
    let (a, b) = net.pair(0, 1);
    let (p, q) = net.p2p(0, 1);
    let (lingering, _) = net.pair(0, 1);
    let (failed, _) = net.pair(0, 1);
    let now = net.now;
    net.nodes[0].eng.create_ep(now).unwrap();
    net.nodes[0].eng.invalidate(now, failed);
    net.filter = Some(Box::new(|_, _| false));
    net.send(0, a, b"out").unwrap();
    net.send(0, p, b"out").unwrap();
    net.send(0, lingering, b"out").unwrap();
    net.send(1, b, b"in").unwrap();
    net.send(1, q, b"in").unwrap();
    net.filter = None;
    net.send(1, b, b"kept").unwrap();
    net.destroy(0, lingering);
    net.nodes[0].credit = 0;
    net.settle();
    net.connect(0, 1);
    net.pump();
    net.nodes[0].credit = usize::MAX;
    net.nodes[1].is_running = false;
    let valid = net.sent.iter().filter(|(from, _)| *from == 1).map(|(_, b)| b.clone()).collect();
    (net, valid)
}

fn feed(net: &mut Net, packets: impl IntoIterator<Item = (bool, Vec<u8>)>) {
    for (is_peer, bytes) in packets {
        let src_qpn = if is_peer { 0x101 } else { 0x777 };
        let _ = net.receive(0, src_qpn, &bytes);
        net.nodes[0].eng.check_invariants();
    }
    net.pump();
    net.sent.clear();
    net.run_for(Duration::from_secs(40));
    net.nodes[0].eng.check_invariants();
    assert!(net.sent.len() < 10_000, "answers without end");
    let eng = &net.nodes[0].eng;
    assert!(eng.passive_count() <= 8 && eng.ep_count() <= 20 && eng.peer_count() <= 10);
    let now = net.now;
    net.nodes[0].eng.close_all(now, |_| {});
    net.pump();
    net.nodes[0].eng.check_invariants();
    assert_eq!((net.nodes[0].eng.ep_count(), net.nodes[0].held), (0, 0));
    assert_eq!(net.nodes[0].links_made, net.nodes[0].links_back);
}

/// A packet that is nearly right: a known destination, a near PSN, a real control type.
fn nearly_right() -> impl Strategy<Value = Vec<u8>> {
    let head = (any::<u8>(), 0u32..10, -6i16..8, -6i16..8, any::<u8>());
    (head, prop::collection::vec(any::<u8>(), 0..64)).prop_map(|((flags, dest, psn, ack, kind), mut rest)| {
        let dest = if dest == 9 { wire::NO_EP } else { dest };
        let neth = wire::Neth {
            packet_type: dest | u32::from(flags) << 24,
            psn: crate::proto::psn::Psn::new(0xfff8u16.wrapping_add_signed(psn)),
            ack: crate::proto::psn::Psn::new(0xfff8u16.wrapping_add_signed(ack)),
        };
        if let Some(first) = rest.first_mut() {
            *first = [wire::CREQ, wire::CREP, wire::XACK, wire::BYE, wire::BYE_ACK, kind][usize::from(kind) % 6];
        }
        let mut bytes = neth.emit().to_vec();
        bytes.extend(rest);
        bytes
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bytes(
        plain: bool,
        packets in prop::collection::vec((any::<bool>(), prop::collection::vec(any::<u8>(), 0..80)), 1..60),
    ) {
        let (mut net, _) = zoo(plain);
        feed(&mut net, packets);
    }

    #[test]
    fn nearly_right_packets(
        plain: bool,
        packets in prop::collection::vec((prop::bool::weighted(0.9), nearly_right()), 1..100),
    ) {
        let (mut net, _) = zoo(plain);
        feed(&mut net, packets);
    }

    /// Real packets with a byte changed, cut, or lengthened, in any order.
    #[test]
    fn mutated_packets(
        plain: bool,
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), any::<u8>(), 0usize..4), 1..80),
    ) {
        let (mut net, valid) = zoo(plain);
        let packets: Vec<_> = edits
            .iter()
            .map(|(which, at, value, how)| {
                let mut bytes = which.get(&valid).clone();
                let i = at.index(bytes.len());
                match how {
                    0 => bytes[i] = *value,
                    1 => bytes[i] ^= 1 << (value % 8),
                    2 => bytes.truncate(i),
                    _ => bytes.extend(vec![*value; i]),
                }
                (true, bytes)
            })
            .collect();
        feed(&mut net, packets);
    }

    #[test]
    fn describe_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
        prop_assert!(!crate::proto::describe(&bytes).to_string().is_empty());
    }
}

/// The same with plain loops and far more packets than proptest's cases give in the time.
#[test]
fn many_random_packets() {
    super::chaos::for_seeds("many_random_packets", 100, |seed| {
        let (mut net, valid) = zoo(seed.is_multiple_of(2));
        let mut rng = super::net::Rng::new(seed);
        let packets: Vec<_> = (0..300)
            .map(|_| {
                let mut bytes = valid[rng.below(valid.len() as u64) as usize].clone();
                for _ in 0..rng.below(3) {
                    let i = rng.below(bytes.len() as u64) as usize;
                    bytes[i] = rng.next() as u8;
                }
                (true, bytes)
            })
            .collect();
        feed(&mut net, packets);
    });
}

/// Requests that name ever other processes end the connections of an address again and again, at no growing cost.
#[test]
fn a_flood_of_restarts() {
    let (mut net, _) = zoo(false);
    for i in 0..10_000u32 {
        let mut ident = [0; 20];
        ident[..4].copy_from_slice(&i.to_le_bytes());
        let creq = super::handshake::creq_from(1, 0x101, i % 5, i % 7, ident);
        let _ = net.receive(0, 0x101, &creq);
        if i % 16 == 0 {
            net.pump();
        }
    }
    net.pump();
    net.nodes[0].eng.check_invariants();
    assert!(net.nodes[0].eng.ep_count() < 20);
}
