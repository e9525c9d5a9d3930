//! Anything at all on the wire: arbitrary bytes, cut and mutated packets, forged ones, floods. No panic, the traffic of
//! others unharmed, every packet accounted for, memory bounded.

use std::{net::UdpSocket, time::Duration};

use ib::{
    addr::DeviceAddr,
    sim::Faults,
    sw::{FilterVerdict, Rng},
};
use parking_lot::Mutex;
use uct::{AmId, Ep};
use uct_tests::{
    fabric::{Fabric, Sim, Soft},
    hooks::Hooks,
    on_fabrics,
    packets::{self, ACK_REQ, Creq, NACK, Parsed, UCX_IDENT},
    raw::Raw,
    world::{NodeOptions, World},
};

on_fabrics! { sim, soft;
    arbitrary_bytes_beside_traffic,
    mutated_packets_beside_traffic,
    truncated_packets_beside_traffic,
    forged_acks_and_data_have_no_effect,
    creq_flood_with_bogus_addresses_is_bounded,
    packets_to_every_endpoint_id_nearby,
}

const ID: AmId = AmId::truncate(2);

/// Traffic in both directions between nodes 0 and 1, checked to be exactly once and in order.
struct Traffic {
    eps: [Ep; 2],
    sent: [u64; 2],
    got: [u64; 2],
}

impl Traffic {
    fn new<F: Fabric>(w: &World<F>) -> Self {
        Traffic { eps: [w.nodes[0].connect(&w.nodes[1]), w.nodes[1].connect(&w.nodes[0])], sent: [0; 2], got: [0; 2] }
    }

    fn go<F: Fabric>(&mut self, w: &mut World<F>) {
        for i in 0..2 {
            if self.eps[i].am_short(ID, self.sent[i], b"traffic").is_ok() {
                self.sent[i] += 1;
            }
        }
        w.step();
        self.check(w);
    }

    #[track_caller]
    fn check<F: Fabric>(&mut self, w: &World<F>) {
        for i in 0..2 {
            for m in w.nodes[1 - i].take() {
                let mut want = self.got[i].to_ne_bytes().to_vec();
                want.extend(b"traffic");
                assert!(m.id == ID.get() && m.data == want, "node {}: foreign message {m:?}", 1 - i);
                self.got[i] += 1;
            }
        }
    }

    #[track_caller]
    fn finish<F: Fabric>(mut self, w: &mut World<F>, at_least: u64) {
        w.run_until("the traffic arrives", |w| {
            self.check(w);
            self.got == self.sent
        });
        assert!(self.sent.iter().all(|&n| n >= at_least), "{:?}", self.sent);
        for n in &w.nodes {
            assert!(n.failures.lock().is_empty(), "{:?}", n.failures.lock());
            // Every packet of the attacker's was either dropped for a reason, or taken for what it said it was.
            assert!(n.counter("rx.buffers_posted") + n.counter("rx.buffers_free") <= n.counter("rx.buffers"));
        }
        w.settle();
        assert_eq!(w.nodes[0].counter("rx.waiting"), 0);
    }
}

/// Two nodes and an attacker with a queue pair of its own, who knows everything.
fn attacked<F: Fabric>(w: World<F>) -> (World<F>, Raw<F::Device>) {
    let mut w = w;
    let mut o = NodeOptions::default();
    o.tuning.passive_max = Some(64);
    w.add(&o);
    w.add(&o);
    let device = w.fabric.device();
    let raw = Raw::new(&w, device);
    (w, raw)
}

fn dropped<F: Fabric>(w: &World<F>, i: usize) -> u64 {
    let c = w.nodes[i].iface().counters();
    c.iter()
        .filter(|c| c.name.starts_with("rx.drop.") || ["rx.short", "rx.bad_creq"].contains(&c.name))
        .map(|c| c.value)
        .sum()
}

fn rounds<F: Fabric>() -> usize {
    match F::NAME {
        "sim" => 6_000,
        // In an emulated machine.
        "rdma" => 500,
        _ => 2_000,
    }
}

fn arbitrary_bytes_beside_traffic<F: Fabric>(w: World<F>) {
    let (mut w, mut raw) = attacked(w);
    let (mut t, mut rng) = (Traffic::new(&w), Rng::new(w.seed));
    let to = [raw.target(&w.nodes[0]), raw.target(&w.nodes[1])];
    let n = rounds::<F>();
    for i in 0..n {
        // Short ones are the interesting ones, but the longest must be there, too.
        let len = if rng.below(16) == 0 { rng.below(4097) } else { rng.below(100) } as usize;
        let bytes: Vec<u8> = (0..len).map(|_| rng.next_u64() as u8).collect();
        raw.send(&to[i % 2], &bytes);
        t.go(&mut w);
        let _ = raw.take();
    }
    let refused = dropped(&w, 0) + dropped(&w, 1);
    assert!(refused > 0, "nothing arrived");
    if F::NAME == "sim" {
        // Nothing is lost on the way here, so (nearly) all of it shows in the counters: arbitrary bytes are a valid
        // request about never.
        w.run_for(Duration::from_millis(1));
        assert!(dropped(&w, 0) + dropped(&w, 1) >= n as u64 * 99 / 100, "{refused} of {n}");
    }
    t.finish(&mut w, 100);
}

/// Packets of every kind, to an endpoint of a node.
fn corpus<D: ib::device::Device>(raw: &Raw<D>, ours: u32, theirs: u32) -> Vec<Vec<u8>> {
    let psn = uct_tests::world::FIRST_PSN;
    let creq = Creq {
        qpn: raw.qpn(),
        ep_id: theirs,
        conn_sn: 0,
        path: 0,
        ident: UCX_IDENT,
        addr: raw.plain_device_address(),
        junk: 0,
    };
    let mut ours_ident = UCX_IDENT;
    ours_ident[..6].copy_from_slice(b"UCTx\x01\0");
    ours_ident[6] = 7;
    let control = |kind: u8| {
        let mut p = packets::neth(packets::CTL | ours, psn, psn);
        p.extend([kind, 1, 0, 0]);
        p.extend([0xff; 16]);
        p
    };
    vec![
        creq.packet(psn, false),
        creq.packet(psn, true),
        Creq { ident: ours_ident, conn_sn: 1, ..creq.clone() }.packet(psn, false),
        packets::crep(ours, psn, psn, theirs, &UCX_IDENT, 0),
        packets::crep(ours, psn, psn, theirs, &ours_ident, 0),
        packets::am(ours, 2, ACK_REQ, psn + 1, psn, b"forged"),
        packets::am(ours, 31, 0, psn + 2, psn, &[1; 1000]),
        packets::ack(ours, ACK_REQ | NACK, psn + 2, psn + 1),
        packets::put(ours, psn + 1, psn, 0xdead_beef, b"data"),
        packets::put(ours, psn + 1, psn, 0, b""),
        control(0x40),
        control(0x41),
        control(0x42),
        control(0x77),
    ]
}

fn mutated_packets_beside_traffic<F: Fabric>(w: World<F>) {
    let (mut w, mut raw) = attacked(w);
    let (mut t, mut rng) = (Traffic::new(&w), Rng::new(w.seed));
    let to = [raw.target(&w.nodes[0]), raw.target(&w.nodes[1])];
    for _ in 0..50 {
        t.go(&mut w);
    }
    let ids = [t.eps[0].id() as u32, t.eps[1].id() as u32];
    for i in 0..rounds::<F>() {
        let all = corpus(&raw, ids[i % 2], 5);
        let mut p = all[rng.below(all.len() as u64) as usize].clone();
        for _ in 0..rng.below(4) {
            let at = rng.below(p.len() as u64) as usize;
            p[at] = match rng.below(3) {
                0 => 0xff,
                1 => p[at] ^ 1 << rng.below(8),
                _ => rng.next_u64() as u8,
            };
        }
        if rng.below(8) == 0 {
            p.truncate(rng.below(p.len() as u64 + 1) as usize);
        }
        if rng.below(16) == 0 {
            p.resize(4096, rng.next_u64() as u8);
        }
        raw.send(&to[i % 2], &p);
        t.go(&mut w);
        let _ = raw.take();
        // Unclaimed endpoints are the only memory a stranger gets.
        assert!(w.nodes[i % 2].counter("eps") <= 64 + 2);
    }
    // What the attacker opened in its own name stays its own; the messages it sent there are not part of the traffic.
    t.finish(&mut w, 100);
}

fn truncated_packets_beside_traffic<F: Fabric>(w: World<F>) {
    let (mut w, mut raw) = attacked(w);
    let mut t = Traffic::new(&w);
    let to = raw.target(&w.nodes[0]);
    for _ in 0..50 {
        t.go(&mut w);
    }
    let id = t.eps[0].id() as u32;
    for p in corpus(&raw, id, 5) {
        for len in 0..p.len().min(120) {
            raw.send(&to, &p[..len]);
            t.go(&mut w);
        }
        let _ = raw.take();
    }
    assert!(w.nodes[0].counter("rx.short") > 0);
    t.finish(&mut w, 50);
}

fn forged_acks_and_data_have_no_effect<F: Fabric>(w: World<F>) {
    let (mut w, mut raw) = attacked(w);
    let mut t = Traffic::new(&w);
    let to = raw.target(&w.nodes[0]);
    for _ in 0..50 {
        t.go(&mut w);
    }
    let ours = t.eps[0].id() as u32;
    let before = w.nodes[0].counter("rx.drop.wrong_source");
    // Acks for everything, NACKs for nothing, data for every PSN: from a queue pair that is not the peer's.
    for psn in (0..=65_535u16).step_by(97) {
        raw.send(&to, &packets::ack(ours, NACK, psn, psn));
        raw.send(&to, &packets::am(ours, 2, ACK_REQ, psn, psn.wrapping_sub(3), b"forged"));
        t.go(&mut w);
        t.go(&mut w);
    }
    assert!(raw.take().is_empty(), "nobody answers a forger");
    w.run_until("they arrive", |w| w.nodes[0].counter("rx.drop.wrong_source") > before);
    t.finish(&mut w, 100);
}

fn creq_flood_with_bogus_addresses_is_bounded<F: Fabric>(w: World<F>) {
    let (mut w, mut raw) = attacked(w);
    let (mut t, mut rng) = (Traffic::new(&w), Rng::new(w.seed));
    let to = raw.target(&w.nodes[0]);
    for _ in 0..50 {
        t.go(&mut w);
    }
    let good = raw.device_address();
    for i in 0..5_000u32 {
        let mut addr = good.clone();
        match rng.below(4) {
            // Another host each time: hosts that do not exist, and cannot be asked to go away.
            0 => addr[13..17].copy_from_slice(&rng.next_u64().to_le_bytes()[..4]),
            1 => addr.iter_mut().skip(1).take(16).for_each(|b| *b = rng.next_u64() as u8),
            2 => addr[0] = rng.next_u64() as u8,
            _ => {}
        }
        let creq = Creq {
            qpn: raw.qpn(),
            ep_id: i,
            conn_sn: i,
            path: rng.next_u64() as u8,
            ident: UCX_IDENT,
            addr,
            junk: rng.next_u64() as u8,
        };
        raw.send(&to, &creq.packet(uct_tests::world::FIRST_PSN, false));
        if i % 4 == 0 {
            t.go(&mut w);
            let _ = raw.take();
        }
    }
    t.go(&mut w);
    let n = &w.nodes[0];
    assert!(n.counter("eps") <= 64 + 2, "{} endpoints", n.counter("eps"));
    // A device that waits for its neighbours' link addresses before it sends may keep handles of endpoints that are gone.
    let (held, kept) = (n.counter("ah.held"), n.counter("ah.kept"));
    assert!(held <= 64 + 2 + kept, "{held} address handles, {kept} of them for sends under way");
    assert!(n.counter("ep.passive_refused") > 500, "{}", n.counter("ep.passive_refused"));
    // Local connects are not starved by strangers.
    let ep = n.connect(&w.nodes[1]);
    t.finish(&mut w, 50);
    w.send(|| ep.am_short(ID, 0, b"a new one"));
    w.run_until("it connects", |w| !w.nodes[1].inbox.lock().is_empty());
    w.run_until("nothing is kept for sends", |w| w.nodes[0].counter("ah.kept") == 0);
}

fn packets_to_every_endpoint_id_nearby<F: Fabric>(w: World<F>) {
    // No probing of ids brings anything but counters.
    let (mut w, mut raw) = attacked(w);
    let mut t = Traffic::new(&w);
    let to = raw.target(&w.nodes[0]);
    for id in (0..200).chain(0x00ff_ff00..=0x00ff_ffff) {
        raw.send(&to, &packets::am(id, 2, ACK_REQ, uct_tests::world::FIRST_PSN + 1, 0, b"probe"));
        t.go(&mut w);
    }
    assert!(raw.take().is_empty());
    w.run_until("they arrive", |w| w.nodes[0].counter("rx.drop.unknown_ep") > 300);
    t.finish(&mut w, 50);
}

// --- single fabrics

#[test]
fn corrupted_traffic_never_panics() {
    // Damage that the checksum does not see, anywhere in real traffic: what is delivered may be wrong, but nothing breaks,
    // and when the damage stops, new endpoints work.
    for seed in 0..8 {
        let mut w: World<Sim> = World::with_seed("corrupted_traffic_never_panics", seed);
        w.add(&NodeOptions::default());
        w.add(&NodeOptions::default());
        let eps: Vec<Ep> = (0..4).map(|i| w.nodes[i % 2].connect(&w.nodes[1 - i % 2])).collect();
        let faults = Faults { corrupt_ppm: 50_000, corrupt_passes: true, loss_ppm: 20_000, ..Faults::default() };
        w.fabric.net.set_faults(faults);
        for i in 0..2_000u64 {
            let _ = eps[i as usize % 4].am_short(ID, i, &[i as u8; 30]);
            w.step();
        }
        w.fabric.net.set_faults(Faults::default());
        drop(eps);
        w.run_for(Duration::from_secs(1));
        let ep = w.nodes[0].connect(&w.nodes[1]);
        let before = w.nodes[1].take().len();
        let mut sent = false;
        w.run_until("a new endpoint works", |w| {
            sent = sent || ep.am_short(AmId::truncate(30), 0, b"well").is_ok();
            w.nodes[1].inbox.lock().iter().any(|m| m.id == 30 && m.data[8..] == *b"well")
        });
        assert!(before > 0);
        assert!(w.nodes.iter().all(|n| n.device.violations().is_empty()));
    }
}

#[test]
fn messages_longer_than_the_buffers_cost_a_reset_at_most() {
    // Verbs hardware puts the queue pair into ERROR for a message that does not fit: one packet of anybody who knows QPN
    // and queue key. The interface sets it up again and goes on.
    let mut w: World<Sim> = World::new("messages_longer_than_the_buffers_cost_a_reset_at_most");
    let mut o = NodeOptions::default();
    o.iface.seg_size = uct::config::Bytes(1024);
    w.add(&o);
    w.add(&o);
    let device = w.fabric.device();
    let mut raw = Raw::new(&w, device);
    let to = raw.target(&w.nodes[0]);
    let mut t = Traffic::new(&w);
    for i in 0..400 {
        if i % 50 == 49 {
            raw.send(&to, &[0x5a; 4096]);
        }
        t.go(&mut w);
    }
    assert!(w.nodes[0].counter("qp.resets") > 0, "the device is as unkind as hardware");
    t.finish(&mut w, 50);
}

#[test]
fn reflected_packets_are_harmless() {
    // Everything a node sends comes back to it.
    let mut w: World<Sim> = World::new("reflected_packets_are_harmless").nodes(2);
    let device = w.fabric.device();
    let mut raw = Raw::new(&w, device);
    let to = raw.target(&w.nodes[0]);
    let log: std::sync::Arc<Mutex<Vec<Vec<u8>>>> = Default::default();
    let l = log.clone();
    Sim::set_tx_filter(
        &w.nodes[0].device,
        Some(Box::new(move |p| {
            l.lock().push(p.payload.to_vec());
            FilterVerdict::Pass
        })),
    );
    let mut t = Traffic::new(&w);
    for _ in 0..1_000 {
        t.go(&mut w);
        let packets = std::mem::take(&mut *log.lock());
        for p in packets {
            raw.send(&to, &p);
        }
        let _ = raw.take();
    }
    t.finish(&mut w, 100);
}

#[test]
fn garbage_datagrams_into_the_udp_socket() {
    let mut w: World<Soft> = World::new("garbage_datagrams_into_the_udp_socket").nodes(2);
    let to = w.nodes[0].device.local_addr();
    let socket = UdpSocket::bind((to.ip(), 0)).expect("a socket");
    let (mut t, mut rng) = (Traffic::new(&w), Rng::new(w.seed));
    for _ in 0..50 {
        t.go(&mut w);
    }
    let own = ib::addr::IfaceAddr::parse(&w.nodes[0].iface().iface_address()).expect("an address").qpn.get();
    for i in 0..3_000 {
        let len = if rng.below(20) == 0 { rng.below(9_000) } else { rng.below(120) } as usize;
        let mut b: Vec<u8> = (0..len).map(|_| rng.next_u64() as u8).collect();
        if i % 2 == 0 && b.len() >= 24 {
            // A plausible frame for our queue pair, but for the checksum.
            b[..4].copy_from_slice(&[0x64, (rng.below(4) << 4) as u8, 0xff, 0xff]);
            b[4..8].copy_from_slice(&own.to_be_bytes());
            b[12..16].copy_from_slice(&[0x1e, 0xe7, 0xa3, 0x30]);
        }
        socket.send_to(&b, to).expect("loopback");
        t.go(&mut w);
    }
    let stats = w.nodes[0].device.stats();
    assert!(stats.dropped_total() > 1_000, "{stats:?}");
    assert!(stats.dropped(ib::sw::DropReason::Icrc) > 100, "{stats:?}");
    t.finish(&mut w, 100);
}

#[test]
fn stranger_without_an_address_of_its_own_cannot_make_us_send() {
    // A request whose address is somebody else's: that somebody gets a few small answers, not more than requests.
    let mut w: World<Sim> = World::new("stranger_without_an_address_of_its_own_cannot_make_us_send");
    let mut o = NodeOptions::default();
    o.tuning.initial_psn = None;
    w.add(&o);
    let (d1, d2) = (w.fabric.device(), w.fabric.device());
    let (mut forger, mut victim) = (Raw::new(&w, d1), Raw::new(&w, d2));
    let to = forger.target(&w.nodes[0]);
    let creq = Creq {
        qpn: victim.qpn(),
        ep_id: 1,
        conn_sn: 0,
        path: 0,
        ident: UCX_IDENT,
        addr: victim.plain_device_address(),
        junk: 0,
    };
    forger.send(&to, &creq.packet(1, false));
    w.run_for(Duration::from_secs(1));
    // The source queue pair is not the one that the request names.
    assert!(victim.take().is_empty());
    assert_eq!(w.nodes[0].counter("rx.drop.wrong_source"), 1);
    let addr = DeviceAddr::parse(&creq.addr).expect("an address").0;
    assert!(addr.trailer.is_none());
    let _: Vec<Parsed> = forger.take();
}
