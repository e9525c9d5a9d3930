//! What an endpoint does in each of its states with everything that can happen to it, as a table that is kept: a change of
//! the protocol shows in the difference of `snapshots/states.txt`, line by line.
//!
//! After a change that is meant, `UPDATE_EXPECT=1 cargo test -p ud table` writes the file anew.

use std::{fmt::Write, time::Duration};

use expect_test::expect_file;
use uct::ErrorKind;

use super::{
    handshake::creq_from,
    hazards::{IDENT, am, crep, neth},
    net::{Engine, Net, Node},
};
use crate::proto::{EpId, ExtCaps, FlushOutcome, RxVerdict, describe, wire};

const OTHER_IDENT: [u8; 20] = [8; 20];
/// The peer's endpoint, and a number that it never had.
const PEER_EP: u32 = 77;
const OTHER_EP: u32 = 78;
/// The first PSN on either side.
const FIRST: u16 = 0xfff8;

/// An engine (node 0) with one endpoint in some state, and a peer (node 1) that says nothing by itself.
struct Scene {
    net: Net,
    ep: EpId,
    /// The next PSN that the peer would send, and the newest of ours that it has seen.
    psn: u16,
    seen: u16,
}

/// The two nodes, before there is any endpoint.
fn nodes(is_ours: bool) -> Net {
    let mut net = Net::with(2, 1, |i, cfg| {
        cfg.hold_max = 8;
        if i == 1 && !is_ours {
            cfg.foreign_ident = Some(IDENT);
        }
    });
    net.nodes[1].is_running = false;
    net.records = true;
    net
}

/// What the peer's process is recognised by.
fn ident(net: &Net) -> [u8; 20] {
    let cfg = &net.nodes[1].cfg;
    cfg.foreign_ident.unwrap_or_else(|| {
        wire::ext_ident(&ExtCaps { features: cfg.features, incarnation: cfg.incarnation, rx_budget: cfg.rx_budget })
    })
}

/// Another process of the same kind.
fn other_ident(net: &Net) -> [u8; 20] {
    let cfg = &net.nodes[1].cfg;
    let caps = ExtCaps { features: cfg.features, incarnation: !cfg.incarnation, rx_budget: cfg.rx_budget };
    if cfg.foreign_ident.is_some() { OTHER_IDENT } else { wire::ext_ident(&caps) }
}

impl Scene {
    fn of(net: Net, ep: EpId) -> Scene {
        Scene { net, ep, psn: FIRST, seen: FIRST.wrapping_sub(1) }
    }

    fn idle() -> Scene {
        let mut net = nodes(true);
        let ep = net.nodes[0].eng.create_ep(net.now).unwrap();
        Scene::of(net, ep)
    }

    fn unclaimed() -> Scene {
        let mut net = nodes(true);
        let request = creq_from(1, 0x101, PEER_EP, 0, ident(&net));
        assert!(matches!(net.receive(0, 0x101, &request), RxVerdict::Creq(_)));
        net.settle();
        let (slot, made) = net.nodes[0].eng.eps.iter().next().expect("it was made");
        let ep = EpId { slot, id: made.id };
        Scene { psn: FIRST.wrapping_add(1), seen: FIRST, ..Scene::of(net, ep) }
    }

    fn eng(&mut self) -> &mut Engine {
        &mut self.net.nodes[0].eng
    }

    fn resolving(resolves: bool, is_ours: bool) -> Scene {
        let mut net = nodes(is_ours);
        net.nodes[0].resolves = resolves;
        let ep = net.connect(0, 1);
        net.settle();
        Scene::of(net, ep)
    }

    fn hear(&mut self, bytes: &[u8]) -> RxVerdict {
        let verdict = self.net.receive(0, 0x101, bytes);
        self.net.settle();
        verdict
    }

    fn crep(&mut self, src_ep_id: u32, ident: [u8; 20]) -> Vec<u8> {
        crep(self.ep.wire_id(), self.psn, FIRST, src_ep_id, ident)
    }

    fn connected(is_ours: bool) -> Scene {
        let mut s = Scene::resolving(true, is_ours);
        let ident = ident(&s.net);
        let bytes = s.crep(PEER_EP, ident);
        assert_eq!(s.hear(&bytes), RxVerdict::Control);
        assert!(s.net.nodes[0].eng.is_connected(s.ep));
        (s.psn, s.seen) = (FIRST.wrapping_add(1), FIRST);
        s
    }

    fn sent(is_ours: bool) -> Scene {
        let mut s = Scene::connected(is_ours);
        for payload in [b"one", b"two"] {
            s.net.send(0, s.ep, payload).unwrap();
        }
        s.net.settle();
        s
    }

    fn then(mut self, act: impl FnOnce(&mut Scene)) -> Scene {
        act(&mut self);
        self.net.settle();
        self
    }
}

type Make = fn() -> Scene;

/// The states, each with how to get there.
fn states() -> Vec<(&'static str, Make)> {
    vec![
        ("idle (made for connect-to-endpoint)", Scene::idle),
        ("resolving", || Scene::resolving(false, true)),
        ("connecting", || Scene::resolving(true, true)),
        ("unclaimed (a peer asked)", Scene::unclaimed),
        ("connected", || Scene::connected(true)),
        ("connected to UCX", || Scene::connected(false)),
        ("connected, two packets unacknowledged", || Scene::sent(true)),
        ("connected, a packet kept beyond a gap", || {
            Scene::connected(true).then(|s| {
                let bytes = am(s.ep.wire_id(), s.psn.wrapping_add(1), s.seen, b"early");
                assert!(matches!(s.hear(&bytes), RxVerdict::Hold { .. }));
            })
        }),
        ("connected, the peer said BYE", || {
            Scene::connected(true).then(|s| {
                assert_eq!(bye(s, wire::BYE, 0), "control");
            })
        }),
        ("lingering", || Scene::connected(true).then(|s| s.net.destroy(0, s.ep))),
        ("lingering, two packets unacknowledged", || Scene::sent(true).then(|s| s.net.destroy(0, s.ep))),
        ("failed", || Scene::sent(true).then(|s| s.net.run_for(Duration::from_secs(60)))),
    ]
}

type Event = fn(&mut Scene) -> String;

/// A packet of the peer, as event.
fn packet(s: &mut Scene, bytes: &[u8]) -> String {
    verdict(s.hear(bytes))
}

fn verdict(v: RxVerdict) -> String {
    match v {
        RxVerdict::Deliver { .. } => "delivered".into(),
        RxVerdict::Hold { .. } => "kept".into(),
        RxVerdict::Creq(_) => "request".into(),
        RxVerdict::Control => "control".into(),
        RxVerdict::Drop(why) => format!("dropped: {}", why.name()),
    }
}

/// A packet without payload: of a type, with the peer's PSN of the moment, acknowledging up to `ack`.
fn bare(s: &mut Scene, packet_type: u32, ack: u16) -> String {
    let psn = s.psn.wrapping_sub(1);
    let bytes = neth(packet_type | s.ep.wire_id(), psn, ack).emit();
    packet(s, &bytes)
}

fn data(s: &mut Scene, ahead: u16, ack: u16) -> String {
    let bytes = am(s.ep.wire_id(), s.psn.wrapping_add(ahead), ack, b"data");
    packet(s, &bytes)
}

/// BYE or its answer, by a peer that has seen everything and sent `ahead` messages that did not arrive.
fn bye(s: &mut Scene, kind: u8, ahead: u16) -> String {
    let mut bytes = Vec::new();
    let head = neth(wire::CTL | s.ep.wire_id(), s.psn.wrapping_add(ahead), s.seen.wrapping_add(SENT));
    wire::emit_bye(kind, head, PEER_EP, &mut bytes);
    packet(s, &bytes)
}

/// Both packets that a state may have sent since the handshake.
const SENT: u16 = 2;

fn events() -> Vec<(&'static str, Event)> {
    vec![
        ("link made", |s| {
            s.net.resolve(0, s.ep, true);
            String::new()
        }),
        ("link failed", |s| {
            s.net.resolve(0, s.ep, false);
            String::new()
        }),
        ("CREQ, first connection", |s| {
            let bytes = creq_from(1, 0x101, PEER_EP, 0, ident(&s.net));
            packet(s, &bytes)
        }),
        ("CREQ, first connection, other endpoint", |s| {
            let bytes = creq_from(1, 0x101, OTHER_EP, 0, ident(&s.net));
            packet(s, &bytes)
        }),
        ("CREQ of another process at that address", |s| {
            let bytes = creq_from(1, 0x101, OTHER_EP, 0, other_ident(&s.net));
            packet(s, &bytes)
        }),
        ("CREQ of another process, again after a tick", |s| {
            let bytes = creq_from(1, 0x101, OTHER_EP, 0, other_ident(&s.net));
            let _ = s.hear(&bytes);
            s.net.now += s.net.nodes[0].cfg.timer_tick;
            packet(s, &bytes)
        }),
        ("CREQ with the reserved number", |s| {
            let bytes = creq_from(1, 0x101, PEER_EP, u32::MAX, ident(&s.net));
            packet(s, &bytes)
        }),
        ("CREP", |s| {
            let ident = ident(&s.net);
            let bytes = crep(s.ep.wire_id(), FIRST, FIRST, PEER_EP, ident);
            packet(s, &bytes)
        }),
        ("CREP, other endpoint", |s| {
            let ident = ident(&s.net);
            let bytes = crep(s.ep.wire_id(), FIRST, FIRST, OTHER_EP, ident);
            packet(s, &bytes)
        }),
        ("CREP of another process", |s| {
            let bytes = crep(s.ep.wire_id(), FIRST, FIRST, PEER_EP, other_ident(&s.net));
            packet(s, &bytes)
        }),
        ("CREP of another process, again after a tick", |s| {
            let bytes = crep(s.ep.wire_id(), FIRST, FIRST, PEER_EP, other_ident(&s.net));
            let _ = s.hear(&bytes);
            s.net.now += s.net.nodes[0].cfg.timer_tick;
            packet(s, &bytes)
        }),
        ("message in order", |s| data(s, 0, s.seen)),
        ("message in order, no room", |s| {
            s.net.nodes[0].can_deliver = false;
            data(s, 0, s.seen)
        }),
        ("message that acknowledges everything", |s| data(s, 0, s.seen.wrapping_add(SENT))),
        ("message again", |s| data(s, u16::MAX, s.seen)),
        ("message beyond a gap", |s| data(s, 2, s.seen)),
        ("message from another queue pair", |s| {
            let bytes = am(s.ep.wire_id(), s.psn, s.seen, b"data");
            let v = s.net.receive(0, 0x555, &bytes);
            s.net.settle();
            verdict(v)
        }),
        ("ack of everything", |s| bare(s, 0, s.seen.wrapping_add(SENT))),
        ("ack of one", |s| bare(s, 0, s.seen.wrapping_add(1))),
        ("ack of what was never sent", |s| bare(s, 0, s.seen.wrapping_add(500))),
        ("ack request", |s| bare(s, wire::ACK_REQ, s.seen)),
        ("NACK", |s| bare(s, wire::NACK, s.seen)),
        ("XACK with a hole", |s| {
            let mut bytes = Vec::new();
            let head = neth(wire::CTL | s.ep.wire_id(), s.psn.wrapping_sub(1), s.seen);
            wire::Xack { gap: true, budget: 0, sacked: 0b10 }.emit(head, &mut bytes);
            packet(s, &bytes)
        }),
        ("keep-alive (empty PUT)", |s| {
            let mut bytes = neth(wire::PUT | wire::ACK_REQ | s.ep.wire_id(), s.psn, s.seen).emit().to_vec();
            bytes.extend([0; 8]);
            packet(s, &bytes)
        }),
        ("PUT with data", |s| {
            let mut bytes = neth(wire::PUT | s.ep.wire_id(), s.psn, s.seen).emit().to_vec();
            bytes.extend([0; 12]);
            packet(s, &bytes)
        }),
        ("BYE", |s| bye(s, wire::BYE, 0)),
        ("BYE, a message is missing", |s| bye(s, wire::BYE, 1)),
        ("answer to BYE", |s| bye(s, wire::BYE_ACK, 0)),
        ("control of unknown type", |s| {
            let mut bytes = neth(wire::CTL | s.ep.wire_id(), s.psn, s.seen).emit().to_vec();
            bytes.extend([0x7f; 40]);
            packet(s, &bytes)
        }),
        ("7 bytes", |s| packet(s, &[0; 7])),
        ("send", |s| match s.net.send(0, s.ep, b"more") {
            Ok(_) => "accepted".into(),
            Err(why) => format!("refused: {why:?}"),
        }),
        ("flush", |s| {
            let now = s.net.now;
            let op = s.net.nodes[0].op(b"flush");
            let ep = s.ep;
            match s.eng().flush(now, ep, op) {
                Ok(FlushOutcome::Done(_)) => "done".into(),
                Ok(FlushOutcome::InProgress) => "in progress".into(),
                Err((_, why)) => format!("refused: {why:?}"),
            }
        }),
        ("destroy", |s| {
            s.net.destroy(0, s.ep);
            String::new()
        }),
        ("next timer", |s| match s.eng().poll_timeout() {
            None => "none".into(),
            Some(at) => {
                s.net.now = s.net.now.max(at);
                let now = s.net.now;
                s.eng().handle_timeout(now);
                String::new()
            }
        }),
        ("a minute of silence", |s| {
            s.net.records = false;
            s.net.run_for(Duration::from_secs(60));
            s.net.records = true;
            String::new()
        }),
        ("the interface closes", |s| {
            s.net.close_all(0);
            String::new()
        }),
    ]
}

/// What node 0 has told its user since `before`.
fn news(node: &Node, ep: EpId) -> Vec<String> {
    let mut out = Vec::new();
    let mine = |list: &[EpId]| list.contains(&ep);
    if mine(&node.connected) {
        out.push("connected".into());
    }
    if mine(&node.closed_by_peer) {
        out.push("peer closed".into());
    }
    out.extend(node.failed.iter().filter(|f| f.0 == ep).map(|f| format!("failed: {:?}", f.1)));
    let mut results: Vec<(usize, &str)> = Vec::new();
    for result in node.done.values().flatten() {
        let name = match result {
            Ok(()) => "done",
            Err(ErrorKind::Canceled) => "cancelled",
            Err(_) => "failed",
        };
        match results.last_mut() {
            Some((n, last)) if *last == name => *n += 1,
            _ => results.push((1, name)),
        }
    }
    out.extend(results.iter().map(|(n, name)| format!("{n} {name}")));
    if mine(&node.freed) {
        out.push("freed".into());
    }
    out
}

fn view(s: &Scene) -> String {
    match s.net.nodes[0].eng.state(s.ep) {
        None => "-".into(),
        Some(state) => format!("{state:?}"),
    }
}

fn row(make: Make, event: Event) -> String {
    let mut s = make();
    let node = &mut s.net.nodes[0];
    node.connected.clear();
    node.failed.clear();
    node.closed_by_peer.clear();
    node.done.clear();
    node.delivered.clear();
    node.freed.clear();
    s.net.sent.clear();
    let result = event(&mut s);
    s.net.settle();
    let mut parts = vec![result];
    parts.retain(|p| !p.is_empty());
    // A line for each kind of packet: numbers that follow from the seed say nothing.
    let mut sent: Vec<String> = Vec::new();
    for (_, bytes) in &s.net.sent {
        let what = describe(bytes).to_string();
        let kind = what.split(" dest ").next().unwrap_or_default().split(" psn ").next().unwrap_or_default();
        let flags = if what.ends_with(" A") || what.contains(" A ") { "+A" } else { "" };
        sent.push(format!("{kind}{flags}"));
    }
    if !sent.is_empty() {
        parts.push(format!("sends {}", sent.join(", ")));
    }
    parts.extend(news(&s.net.nodes[0], s.ep));
    format!("{:<13} {}", view(&s), parts.join("; "))
}

#[test]
fn states_and_events() {
    let mut text = String::from(
        "Each state of an endpoint, and for each event: the state behind it, what the call said, what was sent, what the\n\
         user was told. `-`: the record is gone. `+A` asks for an acknowledgement.\n",
    );
    for (state, make) in states() {
        let s = make();
        writeln!(text, "\n== {state}: {}", view(&s)).unwrap();
        for (name, event) in events() {
            writeln!(text, "{}", format!("{name:<40} {}", row(make, event)).trim_end()).unwrap();
        }
    }
    expect_file!["snapshots/states.txt"].assert_eq(&text);
}
