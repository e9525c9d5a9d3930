//! Everything at once: kills, restarts, cancels, destroys, partitions, slow links, loopback, endpoints of both kinds. Little
//! can be said about what arrives, but: nothing panics, every operation finishes exactly once, every endpoint fails at most
//! once, what arrives is in order and never twice, and in the end nothing is left.

use std::{collections::BTreeMap, time::Duration};

use super::{chaos::for_seeds, net::*};
use crate::proto::{EpId, SendKind};

const NODES: u64 = 3;

/// An endpoint a test holds, and how much it has sent.
struct Held {
    node: usize,
    ep: EpId,
    name: u32,
    sent: u32,
}

struct World {
    net: Net,
    rng: Rng,
    held: Vec<Held>,
    /// Number of the process on each node.
    life: [u32; NODES as usize],
    names: u32,
    /// No packet outlives a restart. If some do, a packet for the process before may reach its successor: data packets have
    /// no room to tell, so nothing can be said about order then.
    is_strict: bool,
    /// Newest message by receiving process and stream.
    newest: BTreeMap<(usize, u32, u32), u32>,
}

impl World {
    fn new(seed: u64) -> World {
        let mut rng = Rng::new(seed);
        let draw = rng.clone();
        let mut net = Net::with(NODES as usize, rng.next(), move |i, cfg| {
            let mut rng = Rng::new(draw.clone().next() ^ i as u64);
            if rng.percent(30) {
                cfg.foreign_ident = Some([i as u8 + 1; 20]);
            }
            cfg.timeout = Duration::from_millis(500);
            cfg.linger = Duration::from_millis([0, 100, 2000][rng.below(3) as usize]);
            cfg.rx_budget = [0, 20_000][rng.below(2) as usize];
            cfg.hold_max = [0, 8, 64][rng.below(3) as usize];
            cfg.passive_max = [3, 100][rng.below(2) as usize];
        });
        net.checks = seed.is_multiple_of(4);
        World {
            net,
            rng,
            held: Vec::new(),
            life: [0; NODES as usize],
            names: 0,
            is_strict: !seed.is_multiple_of(3),
            newest: BTreeMap::new(),
        }
    }

    fn node(&mut self) -> usize {
        self.rng.below(NODES) as usize
    }

    fn hold(&mut self, node: usize, ep: EpId) {
        self.names += 1;
        self.held.push(Held { node, ep, name: self.names, sent: 0 });
    }

    fn pick(&mut self) -> Option<usize> {
        (!self.held.is_empty()).then(|| self.rng.below(self.held.len() as u64) as usize)
    }

    fn act(&mut self) {
        let (a, b) = (self.node(), self.node());
        match self.rng.below(100) {
            0..12 => {
                let ep = self.net.connect(a, b);
                self.hold(a, ep);
            }
            12..15 if a != b => self.join(a, b),
            15..55 => self.send(),
            55..62 => self.end(|net, n, ep| net.destroy(n, ep)),
            62..64 => self.cancel(),
            64..68 => self.wait_for_it(),
            68..70 => self.restart(a),
            70..72 => self.net.nodes[a].is_running = self.rng.percent(70),
            72..74 => self.faults(),
            74..76 => self.net.nodes[a].resolves = self.rng.percent(60),
            76..78 => self.net.nodes[a].can_deliver = self.rng.percent(60),
            78..80 => self.net.nodes[a].credit = [0, 3, usize::MAX, usize::MAX][self.rng.below(4) as usize],
            80..82 => self.net.nodes[a].reports_tx = self.rng.percent(60),
            82 => {
                let ms = self.rng.below(300);
                self.net.run_for(Duration::from_millis(ms));
            }
            _ => {
                self.net.step();
            }
        }
        self.take();
    }

    fn join(&mut self, a: usize, b: usize) {
        let now = self.net.now;
        let ea = self.net.nodes[a].eng.create_ep(now).unwrap();
        let eb = self.net.nodes[b].eng.create_ep(now).unwrap();
        self.net.p2p_half(a, ea, b, eb);
        self.hold(a, ea);
        if self.rng.percent(80) {
            self.net.p2p_half(b, eb, a, ea);
        }
        self.hold(b, eb);
    }

    fn send(&mut self) {
        let Some(i) = self.pick() else { return };
        for _ in 0..1 + self.rng.below(5) {
            let h = &mut self.held[i];
            let mut payload = h.name.to_le_bytes().to_vec();
            payload.extend_from_slice(&h.sent.to_le_bytes());
            payload.resize(8 + self.rng.below(100) as usize, 0);
            let kind = if self.rng.percent(10) { SendKind::Zcopy } else { SendKind::Copy };
            if self.net.send_as(h.node, h.ep, 2, &payload, kind).is_err() {
                break;
            }
            h.sent += 1;
        }
    }

    fn cancel(&mut self) {
        let Some(i) = self.pick() else { return };
        self.net.cancel(self.held[i].node, self.held[i].ep);
    }

    /// Flush or check or want_writable.
    fn wait_for_it(&mut self) {
        let Some(i) = self.pick() else { return };
        let way = self.rng.below(3);
        self.net.wait_for(self.held[i].node, self.held[i].ep, way);
    }

    fn end(&mut self, how: impl Fn(&mut Net, usize, EpId)) {
        let Some(i) = self.pick() else { return };
        let h = self.held.swap_remove(i);
        how(&mut self.net, h.node, h.ep);
    }

    fn restart(&mut self, n: usize) {
        self.check_node(n);
        self.net.restart_process(n);
        if self.is_strict {
            self.net.clear_wire();
        }
        self.held.retain(|h| h.node != n);
        self.life[n] += 1;
    }

    fn faults(&mut self) {
        let mut draw = || self.rng.below(40);
        self.net.faults = Faults { loss: draw(), dup: draw(), reorder: draw() };
        if self.rng.percent(20) {
            self.net.faults.loss = 100;
        }
    }

    /// Looks at what arrived: in order and never twice. Gaps are allowed only where an endpoint was lost, which this test
    /// does not follow.
    fn take(&mut self) {
        for n in 0..NODES as usize {
            for (ep, am_id, bytes) in std::mem::take(&mut self.net.nodes[n].delivered) {
                assert_eq!(am_id, 2);
                let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
                let (name, number) = (word(0), word(4));
                let last = self.newest.insert((n, self.life[n], name), number);
                if !self.is_strict {
                    continue;
                }
                assert!(
                    last.is_none_or(|l| number == l + 1),
                    "stream {name}: {number} after {last:?} at {n} {ep:?}\n{}",
                    self.net.tail()
                );
                assert!(
                    last.is_some() || number == 0 || self.life[n] > 0,
                    "stream {name} begins with {number} at {n} {ep:?}\n{}",
                    self.net.tail()
                );
            }
        }
    }

    fn check_node(&self, n: usize) {
        let node = &self.net.nodes[n];
        node.eng.check_invariants();
        for (op, results) in &node.done {
            assert!(results.len() == 1, "operation {op}: {results:?}\n{}", self.net.tail());
        }
        let mut failed: Vec<EpId> = node.failed.iter().map(|f| f.0).collect();
        failed.sort_by_key(|e| e.id);
        failed.dedup();
        assert_eq!(failed.len(), node.failed.len(), "failed twice");
    }

    fn finish(&mut self) {
        for n in &mut self.net.nodes {
            (n.is_running, n.resolves, n.can_deliver, n.reports_tx, n.credit) = (true, true, true, true, usize::MAX);
        }
        self.net.faults = Faults::default();
        for h in std::mem::take(&mut self.held) {
            self.net.destroy(h.node, h.ep);
        }
        let done = self.net.run_until(Duration::from_secs(60), |net| {
            net.nodes.iter().all(|n| n.eng.ep_count() == n.eng.passive_count() && n.eng.packet_count() == 0)
        });
        let left: Vec<String> = (0..NODES as usize).map(|n| self.net.nodes[n].eng.dump_all()).collect();
        assert!(done, "{}\n{}", left.join("\n"), self.net.tail());
        self.take();
        for n in 0..NODES as usize {
            self.check_node(n);
            let now = self.net.now;
            self.net.nodes[n].eng.close_all(now, |_| {});
            self.net.pump();
            let node = &self.net.nodes[n];
            assert_eq!(
                (node.eng.ep_count(), node.links_made, node.held),
                (0, node.links_back, 0),
                "{}",
                self.net.tail()
            );
        }
    }
}

#[test]
fn violence() {
    for_seeds("violence", 1000, |seed| {
        let mut world = World::new(seed);
        for _ in 0..200 {
            world.act();
        }
        world.finish();
    });
}
