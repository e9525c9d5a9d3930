//! Random traffic over a bad network: every message exactly once and in order, every operation finished exactly once, nothing
//! left behind. One seed decides everything; a failure prints it and how to run it again.

use std::{
    collections::HashMap,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    time::Duration,
};

use super::net::*;
use crate::proto::{EngineConfig, EpId, Features, Refused, SendKind};

/// Runs `body` for `SIM_SEED`, or for `count` seeds.
pub(super) fn for_seeds(test: &str, count: u64, body: impl Fn(u64)) {
    if let Some(seed) = std::env::var("SIM_SEED").ok().and_then(|s| s.parse().ok()) {
        return body(seed);
    }
    for seed in 0..count {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| body(seed))) {
            eprintln!("seed {seed} fails; to repeat it: SIM_SEED={seed} cargo test -p ud {test}");
            resume_unwind(panic);
        }
    }
}

/// One stream of numbered messages from an endpoint, and what became of it.
struct Stream {
    node: usize,
    peer: usize,
    ep: EpId,
    sent: Vec<u64>,
}

/// Payload of a message: where it comes from, which one it is, and bytes that follow from both.
fn payload(stream: usize, number: usize, len: usize) -> Vec<u8> {
    let mut p = vec![stream as u8];
    p.extend_from_slice(&(number as u32).to_le_bytes());
    p.extend((0..len).map(|i| (stream * 31 + number * 7 + i) as u8));
    p
}

/// Settings drawn from the seed. `linger` is common: an endpoint with none takes nothing after its own last ack.
fn edit(rng: &Rng, linger: Duration) -> impl Fn(usize, &mut EngineConfig) + use<> {
    let rng = rng.clone();
    move |i, cfg| {
        let mut rng = Rng::new(rng.clone().next() + i as u64);
        match rng.below(4) {
            0 => cfg.foreign_ident = Some([i as u8 + 1; 20]),
            1 => cfg.features = Features::from_bits_truncate(rng.next() as u16),
            _ => {}
        }
        cfg.hold_max = [0, 4, 64][rng.below(3) as usize];
        cfg.rx_budget = [0, 0, 9000, 200_000][rng.below(4) as usize];
        cfg.max_window = [2, 3, 16, 1025][rng.below(4) as usize];
        cfg.first_ep_id = Some([0, 0xff_fffe, 5000][rng.below(3) as usize]);
        cfg.linger = linger;
        cfg.timeout = Duration::from_secs(60);
    }
}

fn traffic(seed: u64, max_fault: u64, messages: u64) {
    let mut rng = Rng::new(seed);
    let nodes = 2 + rng.below(2) as usize;
    let linger = Duration::from_millis([0, 50, 100_000][rng.below(3) as usize]);
    let mut net = Net::with(nodes, rng.next(), edit(&rng, linger));
    net.checks = seed.is_multiple_of(8);
    net.faults =
        Faults { loss: rng.below(max_fault + 1), dup: rng.below(max_fault + 1), reorder: rng.below(max_fault + 1) };
    let mut streams = connect_all(&mut net, &mut rng);
    for _ in 0..messages {
        let s = rng.below(streams.len() as u64) as usize;
        send_some(&mut net, &mut rng, &mut streams, s);
        for _ in 0..rng.below(3) {
            net.step();
        }
        let n = rng.below(nodes as u64) as usize;
        net.nodes[n].can_deliver = rng.percent(90);
        net.nodes[n].reports_tx = rng.percent(80);
        net.nodes[n].credit = if rng.percent(10) { rng.below(2) as usize } else { usize::MAX };
    }
    finish(&mut net, &streams, linger > Duration::from_secs(1));
}

fn connect_all(net: &mut Net, rng: &mut Rng) -> Vec<Stream> {
    let mut streams = Vec::new();
    for a in 0..net.nodes.len() {
        for b in 0..net.nodes.len() {
            for _ in 0..rng.below(3) {
                if a != b {
                    streams.push(Stream { node: a, peer: b, ep: net.connect(a, b), sent: Vec::new() });
                }
                if rng.percent(50) {
                    net.step();
                }
            }
        }
    }
    if streams.is_empty() {
        streams.push(Stream { node: 0, peer: 1, ep: net.connect(0, 1), sent: Vec::new() });
    }
    streams
}

fn send_some(net: &mut Net, rng: &mut Rng, streams: &mut [Stream], s: usize) {
    for _ in 0..1 + rng.below(6) {
        let (node, ep, number) = (streams[s].node, streams[s].ep, streams[s].sent.len());
        let len = if rng.percent(20) { 3000 } else { rng.below(64) as usize };
        let kind = if rng.percent(20) { SendKind::Zcopy } else { SendKind::Copy };
        match net.send_as(node, ep, 3, &payload(s, number, len), kind) {
            Ok(op) => streams[s].sent.push(op),
            Err(Refused::NoResource) => break,
            Err(e) => panic!("stream {s}: {e:?}\n{}", net.tail()),
        }
    }
    if rng.percent(10) {
        let op = net.flush(streams[s].node, streams[s].ep);
        // Flushes finish exactly once, too, but are no messages.
        net.nodes[streams[s].node].done.entry(op).or_default();
    }
}

fn finish(net: &mut Net, streams: &[Stream], destroy_early: bool) {
    for n in &mut net.nodes {
        (n.can_deliver, n.credit, n.reports_tx) = (true, usize::MAX, true);
    }
    if destroy_early {
        for s in streams {
            net.destroy(s.node, s.ep);
        }
    }
    let ok = net.run_until(Duration::from_secs(50), |net| delivered(net, streams));
    assert!(ok, "not everything arrived\n{}", net.tail());
    if std::env::var("SIM_SEED").is_ok() {
        for s in streams {
            eprintln!("{:?} {} {}", net.now, s.node, net.nodes[s.node].eng.dump(s.ep));
        }
    }
    if !destroy_early {
        let ok = net.run_until(Duration::from_secs(50), |net| {
            streams.iter().all(|s| !net.nodes[s.node].eng.has_outstanding(s.ep))
        });
        let left: Vec<String> = streams.iter().map(|s| net.nodes[s.node].eng.dump(s.ep)).collect();
        assert!(ok, "something stays outstanding\n{}\n{}", left.join("\n"), net.tail());
        for s in streams {
            net.destroy(s.node, s.ep);
        }
    }
    check_operations(net, streams, destroy_early);
    check_order(net, streams);
    net.faults = Faults::default();
    let ok = net.run_until(Duration::from_secs(300), |net| {
        net.nodes.iter().all(|n| n.eng.ep_count() == n.eng.passive_count() && n.eng.packet_count() == 0)
    });
    assert!(ok, "records stay\n{}", net.tail());
    for n in &mut net.nodes {
        n.eng.check_invariants();
        n.eng.close_all(net.now, |_| {});
    }
    net.pump();
    for n in &net.nodes {
        assert_eq!((n.links_made, n.held), (n.links_back, 0), "links, kept buffers\n{}", net.tail());
        assert!(n.failed.is_empty(), "{:?}\n{}", n.failed, net.tail());
    }
}

fn delivered(net: &Net, streams: &[Stream]) -> bool {
    let sent: usize = streams.iter().map(|s| s.sent.len()).sum();
    let got: usize = net.nodes.iter().map(|n| n.delivered.len()).sum();
    got >= sent
}

fn check_operations(net: &Net, streams: &[Stream], cancelled: bool) {
    for s in streams {
        for op in &s.sent {
            let results = net.nodes[s.node].done.get(op).map_or(&[][..], |r| r);
            assert_eq!(results.len(), 1, "operation {op}: {results:?}");
            assert!(cancelled || results[0].is_ok(), "operation {op}: {results:?}");
        }
    }
    for (op, results) in net.nodes.iter().flat_map(|n| &n.done) {
        assert_eq!(results.len(), 1, "operation {op}: {results:?}");
    }
}

fn check_order(net: &Net, streams: &[Stream]) {
    let mut next: HashMap<u8, usize> = HashMap::new();
    for (n, node) in net.nodes.iter().enumerate() {
        for (_, am_id, bytes) in &node.delivered {
            let number = next.entry(bytes[0]).or_default();
            let s = usize::from(bytes[0]);
            assert_eq!(*am_id, 3);
            assert_eq!(streams[s].peer, n);
            assert_eq!(bytes, &payload(s, *number, bytes.len() - 5), "stream {s}, message {number}\n{}", net.tail());
            *number += 1;
        }
    }
    for (s, stream) in streams.iter().enumerate() {
        assert_eq!(next.get(&(s as u8)).copied().unwrap_or(0), stream.sent.len(), "stream {s}");
    }
}

#[test]
fn a_thousand_seeds() {
    for_seeds("a_thousand_seeds", 1000, |seed| traffic(seed, 30, 40));
}

#[test]
fn long_runs_over_a_clean_network() {
    for_seeds("long_runs_over_a_clean_network", 5, |seed| traffic(seed, 0, 3000));
}

#[test]
fn long_runs_over_a_bad_network() {
    for_seeds("long_runs_over_a_bad_network", 10, |seed| traffic(seed, 30, 400));
}
