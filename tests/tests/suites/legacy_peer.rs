//! A scripted peer that speaks as UCX's `ud_verbs` does, packet by packet, against a whole stack of ours.
//!
//! A UCX receiver checks what it gets by assertions that are always on: a packet that breaks one of its rules ends the
//! peer's process. [`Ucx::finish`] checks every packet that we sent to it in a test against those rules:
//!
//! 1. only a CREQ has the destination 0xffffff;
//! 2. a control packet to an endpoint is a CREP: no extension packets;
//! 3. a CREQ has PSN 1, and repetitions differ in the ack request only;
//! 4. conn_sn 0xffffffff is never used;
//! 5. a CREP never changes the endpoint id it names;
//! 6. no CREQ after a CREP for the same connection (one answers, or one asks);
//! 7. no packet is longer than the peer's buffers;
//! 8. data and CREP take PSNs without gaps, repetitions carry the PSN they had.

use std::{collections::BTreeMap, time::Duration};

use ib::sim::{SimConfig, SimDevice};
use uct::{AmId, Ep, EpParams, ErrorKind, FlushMode, Posted, SendError, md::MemoryDomain};
use uct_tests::{
    fabric::{Fabric, Sim},
    packets::{self, ACK_REQ, Creq, NACK, NO_EP, Parsed, UCX_IDENT},
    raw::{Raw, Target},
    world::{NodeOptions, World},
};

const ID: AmId = AmId::truncate(9);
/// The foreign peer's endpoint.
const THEIRS: u32 = 0x00_0003;

/// One of ours, at node 0, and the foreign peer.
struct Ucx {
    w: World<Sim>,
    raw: Raw<SimDevice>,
    to: Target<SimDevice>,
    /// The device address it gives.
    addr: Vec<u8>,
    seen: Vec<Parsed>,
    limit: usize,
}

impl Ucx {
    fn new(name: &str) -> Self {
        Self::with(name, |_| {}, |_| {})
    }

    fn with(name: &str, options: impl FnOnce(&mut NodeOptions), device: impl FnOnce(&mut SimConfig)) -> Self {
        let mut w: World<Sim> = World::new(name);
        // As between NICs: no soft devices, no trailers.
        w.fabric.next_config = Some(SimConfig { soft: None, ..w.fabric.config() });
        let ours = w.fabric.device();
        let mut config = SimConfig { soft: None, ..w.fabric.config() };
        device(&mut config);
        w.fabric.next_config = Some(config);
        let theirs = w.fabric.device();
        let mut o = NodeOptions::default();
        o.tuning.initial_psn = None;
        options(&mut o);
        w.add_on(ours, &o);
        let raw = Raw::new(&w, theirs);
        let to = raw.target(&w.nodes[0]);
        let addr = raw.plain_device_address();
        let limit = raw.port.mtu.bytes();
        Ucx { w, raw, to, addr, seen: Vec::new(), limit }
    }

    fn creq(&self) -> Creq {
        Creq {
            qpn: self.raw.qpn(),
            ep_id: THEIRS,
            conn_sn: 0,
            path: 0,
            ident: UCX_IDENT,
            addr: self.addr.clone(),
            junk: 0xa5,
        }
    }

    fn send(&mut self, bytes: &[u8]) {
        self.raw.send(&self.to, bytes);
    }

    /// What we have sent within a time.
    fn take_after(&mut self, time: Duration) -> Vec<Parsed> {
        self.w.run_for(time);
        let got = self.raw.take();
        self.seen.extend(got.iter().cloned());
        got
    }

    fn take(&mut self) -> Vec<Parsed> {
        self.take_after(Duration::from_micros(50))
    }

    /// An endpoint of ours that asks for a connection.
    fn connect(&self) -> Ep {
        self.w.nodes[0].iface().ep(&EpParams::to_iface(&self.addr, &self.raw.iface_address())).expect("an endpoint")
    }

    /// A connection that we asked for. Returns the endpoint and its id on the wire.
    fn connected(&mut self) -> (Ep, u32) {
        let ep = self.connect();
        let creq = self.take().remove(0);
        assert!(creq.is_creq());
        let ours = creq.src_ep_id();
        self.send(&packets::crep(ours, 1, 1, THEIRS, &UCX_IDENT, 0xa5));
        let ack = self.take();
        assert!(ack.len() == 1 && ack[0].is_pure_ack(), "{ack:?}");
        assert_eq!((ack[0].dest(), ack[0].psn, ack[0].ack), (THEIRS, 2, 1));
        (ep, ours)
    }

    /// A connection that the peer asked for. Returns our endpoint's id.
    fn accepted(&mut self) -> u32 {
        let creq = self.creq().packet(1, false);
        self.send(&creq);
        let got = self.take();
        assert!(got.len() == 1 && got[0].is_crep(), "{got:?}");
        let ours = got[0].src_ep_id();
        self.send(&packets::ack(ours, 0, 2, 1));
        assert!(self.take().is_empty());
        ours
    }

    fn inbox(&self) -> Vec<Vec<u8>> {
        self.w.nodes[0].take().into_iter().map(|m| m.data).collect()
    }

    fn counter(&self, name: &str) -> u64 {
        self.w.nodes[0].counter(name)
    }

    fn failures(&self) -> usize {
        self.w.nodes[0].failures.lock().len()
    }

    /// Checks everything that was sent against the rules.
    #[track_caller]
    fn finish(mut self) {
        let _ = self.take();
        let mut creqs: BTreeMap<u32, Parsed> = BTreeMap::new();
        let mut by_psn: BTreeMap<(u32, u16), Parsed> = BTreeMap::new();
        let mut names: BTreeMap<u32, u32> = BTreeMap::new();
        for p in &self.seen {
            assert!(p.bytes.len() <= self.limit, "{} bytes", p.bytes.len());
            assert!(p.is_am() || p.packet_type >> 30 == 0, "reserved bits: {p:x?}");
            if p.dest() == NO_EP {
                assert!(p.is_creq(), "{p:x?}");
            }
            if let Some(ctl) = p.ctl() {
                assert_eq!(ctl, if p.dest() == NO_EP { 1 } else { 2 }, "{p:x?}");
            }
            if p.is_creq() {
                assert_eq!(p.psn, 1);
                assert_ne!(p.conn_sn(), u32::MAX);
                let first = creqs.entry(p.conn_sn()).or_insert_with(|| p.clone());
                assert_eq!(first.bytes[8..], p.bytes[8..], "a repetition is the same");
                assert!(!names.contains_key(&p.src_ep_id()), "a request after an answer");
            } else if p.is_crep() {
                assert_eq!(*names.entry(p.src_ep_id()).or_insert(p.dest()), p.dest());
            }
            if p.is_am() || p.is_crep() {
                let first = by_psn.entry((p.dest(), p.psn)).or_insert_with(|| p.clone());
                assert_eq!(first.bytes[8..], p.bytes[8..], "a repetition has the payload it had");
            }
        }
        let mut last: BTreeMap<u32, u16> = BTreeMap::new();
        for &(dest, psn) in by_psn.keys() {
            if let Some(before) = last.insert(dest, psn) {
                assert_eq!(before.wrapping_add(1), psn, "endpoint {dest} was sent no PSN in between");
            }
        }
        assert_eq!(self.w.fabric.net.leaks().len(), 2, "still open: {:?}", self.w.fabric.net.leaks());
    }
}

#[test]
fn we_ask_and_ucx_answers() {
    let mut u = Ucx::new("we_ask_and_ucx_answers");
    let (ep, ours) = u.connected();
    // Nobody asked: nothing more is sent (a receiver does not acknowledge of its own accord).
    assert!(u.take_after(Duration::from_secs(1)).is_empty());
    ep.am_short(ID, 1, b"one").expect("a send");
    let got = u.take();
    assert_eq!((got[0].psn, got[0].ack, got[0].am_id()), (2, 1, 9));
    u.send(&packets::ack(ours, 0, 2, 2));
    u.w.settle();
    u.finish();
}

#[test]
fn ucx_asks_and_we_answer() {
    let mut u = Ucx::new("ucx_asks_and_we_answer");
    let ours = u.accepted();
    u.send(&packets::am(ours, 9, ACK_REQ, 2, 1, b"header..data"));
    let got = u.take();
    assert_eq!(got.len(), 1);
    assert!(got[0].is_pure_ack() && !got[0].is_nack());
    assert_eq!((got[0].dest(), got[0].psn, got[0].ack), (THEIRS, 2, 2));
    assert_eq!(u.inbox(), [b"header..data".to_vec()]);
    u.finish();
}

#[test]
fn request_is_repeated_until_it_is_answered() {
    let mut u = Ucx::new("request_is_repeated_until_it_is_answered");
    let _ep = u.connect();
    let got = u.take_after(Duration::from_secs(2));
    assert!((4..=12).contains(&got.len()), "{} requests in 2 s", got.len());
    assert!(got[1..].iter().all(|p| p.is_creq() && p.is(ACK_REQ)));
    let ours = got[0].src_ep_id();
    u.send(&packets::crep(ours, 1, 1, THEIRS, &UCX_IDENT, 0));
    let _ = u.take();
    assert!(!u.take_after(Duration::from_secs(2)).iter().any(Parsed::is_creq));
    u.finish();
}

#[test]
fn duplicate_request_and_late_answer_are_harmless() {
    let mut u = Ucx::new("duplicate_request_and_late_answer_are_harmless");
    let ours = u.accepted();
    for _ in 0..3 {
        let creq = u.creq().packet(1, true);
        u.send(&creq);
    }
    let got = u.take();
    assert!(got.iter().all(|p| p.is_crep() && p.psn == 1 && p.src_ep_id() == ours), "{got:?}");
    u.send(&packets::am(ours, 9, ACK_REQ, 2, 1, b"x"));
    let _ = u.take();
    assert_eq!(u.inbox().len(), 1);

    // A CREP that comes again, after data: its PSN is below what was accepted.
    let (_ep, ours) = {
        let ep = u.connect_again();
        let creq = u.take().remove(0);
        let ours = creq.src_ep_id();
        u.send(&packets::crep(ours, 1, 1, THEIRS + 1, &UCX_IDENT, 0));
        (ep, ours)
    };
    u.send(&packets::am(ours, 9, 0, 2, 1, b"y"));
    u.send(&packets::crep(ours, 1, 1, THEIRS + 1, &UCX_IDENT, 0));
    u.send(&packets::am(ours, 9, 0, 3, 1, b"z"));
    let _ = u.take();
    assert_eq!(u.inbox(), [b"y".to_vec(), b"z".to_vec()]);
    u.finish();
}

impl Ucx {
    /// The next connection. The passive endpoint of [`Ucx::accepted`] is claimed first: it is the same connection.
    fn connect_again(&mut self) -> Ep {
        let claimed = self.connect();
        assert!(self.take().is_empty(), "a claimed endpoint asks for nothing");
        std::mem::forget(claimed);
        self.connect()
    }
}

#[test]
fn passive_endpoint_is_claimed_without_a_packet() {
    let mut u = Ucx::new("passive_endpoint_is_claimed_without_a_packet");
    let ours = u.accepted();
    let ep = u.connect();
    assert_eq!(ep.id(), u64::from(ours));
    assert!(u.take_after(Duration::from_secs(1)).is_empty());
    ep.am_short(ID, 0, b"at once").expect("it is connected");
    let got = u.take();
    // The CREP took PSN 1.
    assert_eq!((got[0].psn, got[0].ack, got[0].dest()), (2, 1, THEIRS));
    u.send(&packets::ack(ours, 0, 2, 2));
    u.finish();
}

#[test]
fn crossing_requests_become_one_connection() {
    let mut u = Ucx::new("crossing_requests_become_one_connection");
    let ep = u.connect();
    let ours = u.take().remove(0).src_ep_id();
    let creq = u.creq().packet(1, false);
    u.send(&creq);
    let got = u.take();
    // The crossing request acknowledges ours; the answer is our second packet.
    assert_eq!(got.len(), 1);
    assert!(got[0].is_crep() && got[0].is(ACK_REQ));
    assert_eq!((got[0].psn, got[0].ack, got[0].src_ep_id(), got[0].dest()), (2, 1, ours, THEIRS));
    u.send(&packets::crep(ours, 2, 2, THEIRS, &UCX_IDENT, 0));
    let got = u.take();
    assert!(got.len() == 1 && got[0].is_pure_ack());
    assert_eq!((got[0].psn, got[0].ack), (3, 2));
    assert!(u.take_after(Duration::from_secs(1)).is_empty(), "nothing is repeated");
    ep.am_short(ID, 0, b"x").expect("a send");
    assert_eq!(u.take()[0].psn, 3);
    u.send(&packets::ack(ours, 0, 3, 3));
    u.finish();
}

#[test]
fn answer_beyond_a_lost_crossing_request_sets_the_head() {
    // Their request was lost, so their answer is PSN 2, and nothing was accepted yet.
    let mut u = Ucx::new("answer_beyond_a_lost_crossing_request_sets_the_head");
    let ep = u.connect();
    let ours = u.take().remove(0).src_ep_id();
    u.send(&packets::crep(ours, 2, 1, THEIRS, &UCX_IDENT, 0));
    let got = u.take();
    assert_eq!((got.len(), got[0].ack), (1, 2));
    assert!(!got[0].is_nack());
    u.send(&packets::am(ours, 9, 0, 3, 1, b"next"));
    let _ = u.take();
    assert_eq!(u.inbox(), [b"next".to_vec()]);
    drop(ep);
    u.finish();
}

#[test]
fn unasked_data_is_not_acknowledged_and_asked_data_once() {
    let mut u = Ucx::new("unasked_data_is_not_acknowledged_and_asked_data_once");
    let ours = u.accepted();
    for psn in 2..10 {
        u.send(&packets::am(ours, 9, 0, psn, 1, &psn.to_le_bytes()));
    }
    assert!(u.take().is_empty());
    u.send(&packets::am(ours, 9, ACK_REQ, 10, 1, b""));
    let got = u.take();
    assert_eq!((got.len(), got[0].ack), (1, 10));
    // A duplicate that asks is answered, and not delivered again.
    assert_eq!(u.inbox().len(), 9);
    u.send(&packets::am(ours, 9, ACK_REQ, 10, 1, b""));
    assert_eq!(u.take().len(), 1);
    u.send(&packets::ack(ours, ACK_REQ, 11, 1));
    assert_eq!(u.take().len(), 1);
    assert!(u.inbox().is_empty());
    u.finish();
}

#[test]
fn gap_is_nacked_and_filled_in_order() {
    let mut u = Ucx::new("gap_is_nacked_and_filled_in_order");
    let ours = u.accepted();
    u.send(&packets::am(ours, 9, 0, 3, 1, b"b"));
    let got = u.take();
    assert_eq!(got.len(), 1);
    assert!(got[0].is_nack() && got[0].is_pure_ack());
    assert_eq!((got[0].psn, got[0].ack), (2, 1));
    assert!(u.inbox().is_empty());
    // UCX repeats from the gap on.
    u.send(&packets::am(ours, 9, ACK_REQ, 2, 1, b"a"));
    u.send(&packets::am(ours, 9, ACK_REQ, 3, 1, b"b"));
    let got = u.take();
    assert_eq!(got.last().expect("an ack").ack, 3);
    assert_eq!(u.inbox(), [b"a".to_vec(), b"b".to_vec()]);
    u.finish();
}

#[test]
fn gap_shown_by_an_ack_request_is_nacked() {
    // The last message was lost: the sender's ack request names the PSN it would send next.
    let mut u = Ucx::new("gap_shown_by_an_ack_request_is_nacked");
    let ours = u.accepted();
    u.send(&packets::ack(ours, ACK_REQ, 3, 1));
    let got = u.take();
    assert_eq!(got.len(), 1);
    assert!(got[0].is_nack() && got[0].ack == 1);
    u.finish();
}

#[test]
fn nack_is_answered_at_once_also_with_large_packets() {
    let mut u = Ucx::new("nack_is_answered_at_once_also_with_large_packets");
    let (ep, ours) = u.connected();
    let n = ep.am_bcopy(ID, &mut |to| {
        to[..4000].fill(7);
        4000
    });
    assert_eq!(n.expect("a send"), 4000);
    ep.am_short(ID, 0, b"small").expect("a send");
    let first = u.take();
    assert_eq!(first.len(), 2);
    // UCX lost the large one and says so.
    u.send(&packets::ack(ours, NACK, 2, 1));
    let again = u.take();
    assert_eq!(again[0].psn, 2);
    assert_eq!(again[0].payload(), first[0].payload());
    u.send(&packets::ack(ours, 0, 2, 3));
    let _ = u.take();
    u.w.settle();
    u.finish();
}

#[test]
fn sender_asks_often_enough_for_a_peer_that_only_answers() {
    // The peer acknowledges when asked and never else. 500 messages get through without a time-out.
    let mut u = Ucx::new("sender_asks_often_enough_for_a_peer_that_only_answers");
    let (ep, ours) = u.connected();
    let (mut sent, mut head) = (0u64, 1u16);
    let start = u.w.now();
    while sent < 500 || ep.flush(FlushMode::Local, None).expect("flush") != Posted::Done {
        while sent < 500 && ep.am_short(ID, sent, b"").is_ok() {
            sent += 1;
        }
        let mut asked = false;
        for p in u.take() {
            if p.is_am() && p.psn == head.wrapping_add(1) {
                head = p.psn;
            }
            asked |= p.is(ACK_REQ);
        }
        if asked {
            u.send(&packets::ack(ours, 0, 2, head));
        }
    }
    assert!(u.w.now().since(start) < Duration::from_secs(1), "{:?}", u.w.now().since(start));
    assert_eq!((u.counter("tx.resends"), u.failures()), (0, 0));
    u.finish();
}

#[test]
fn peer_that_reopens_at_another_endpoint_is_followed() {
    // Same process, same connection number, another endpoint id: answer there, and keep our own numbering.
    let mut u = Ucx::new("peer_that_reopens_at_another_endpoint_is_followed");
    let ours = u.accepted();
    let ep = u.connect();
    ep.am_short(ID, 0, b"old").expect("a send");
    assert_eq!(u.take()[0].dest(), THEIRS);
    u.send(&packets::ack(ours, 0, 2, 2));
    let _ = u.take();
    let creq = Creq { ep_id: THEIRS + 5, ..u.creq() }.packet(1, false);
    u.send(&creq);
    let got = u.take();
    assert!(got.len() == 1 && got[0].is_crep(), "{got:?}");
    assert_eq!((got[0].dest(), got[0].psn, got[0].ack), (THEIRS + 5, 3, 1));
    u.send(&packets::ack(ours, 0, 2, 3));
    let _ = u.take();
    ep.am_short(ID, 0, b"new").expect("a send");
    let got = u.take();
    assert_eq!((got[0].dest(), got[0].psn), (THEIRS + 5, 4));
    u.send(&packets::ack(ours, 0, 2, 4));
    assert_eq!((u.counter("ep.stale_dest"), u.failures()), (1, 0));
    // No `finish`: an answer to another endpoint is the point of this test.
}

#[test]
fn restarted_process_with_the_same_numbers_gets_a_fresh_endpoint() {
    // Same queue pair, same endpoint id, same connection number, another process id: a plain UCX would take the request for
    // a duplicate and never answer.
    let mut u = Ucx::new("restarted_process_with_the_same_numbers_gets_a_fresh_endpoint");
    let old = u.accepted();
    let ep = u.connect();
    u.send(&packets::am(old, 9, 0, 2, 1, b"first life"));
    let _ = u.take();
    assert_eq!(u.inbox().len(), 1);
    let mut ident = UCX_IDENT;
    ident[16] = 0x77;
    let creq = Creq { ident, ..u.creq() }.packet(1, false);
    u.send(&creq);
    let got = u.take();
    let crep = got.iter().find(|p| p.is_crep()).expect("an answer");
    assert_eq!((crep.psn, crep.ack), (1, 1));
    assert_eq!(got.len(), 1, "what is meant for the process before may abort its successor: {got:?}");
    let new = crep.src_ep_id();
    assert_ne!(new, old);
    assert_eq!(u.failures(), 1);
    assert_eq!(u.w.nodes[0].failures.lock()[0].kind, ErrorKind::ConnectionReset);
    u.send(&packets::am(new, 9, 0, 2, 1, b"second life"));
    u.send(&packets::am(old, 9, 0, 3, 1, b"first life, delayed"));
    let _ = u.take();
    assert_eq!(u.inbox(), [b"second life".to_vec()]);
    assert_eq!(u.counter("ep.restarts"), 1);
    drop(ep);
}

#[test]
fn lingering_endpoint_answers_and_says_no_bye() {
    let mut u = Ucx::new("lingering_endpoint_answers_and_says_no_bye");
    let (ep, ours) = u.connected();
    ep.am_short(ID, 0, b"last words").expect("a send");
    drop(ep);
    let got = u.take();
    assert!(got.iter().any(Parsed::is_am));
    // Unacknowledged data goes on being repeated after destroy.
    let again = u.take_after(Duration::from_secs(1));
    assert!(again.iter().any(|p| p.is_am() && p.psn == 2), "{again:?}");
    u.send(&packets::ack(ours, 0, 2, 2));
    let _ = u.take_after(Duration::from_secs(1));
    // Data that UCX still sends is taken, acknowledged and delivered.
    u.send(&packets::am(ours, 9, ACK_REQ, 2, 2, b"bye"));
    let got = u.take();
    assert!(got.len() == 1 && got[0].is_pure_ack() && got[0].ack == 2, "{got:?}");
    assert_eq!(u.inbox().len(), 1);
    assert_eq!(u.counter("eps"), 1);
    // After the linger time the record is gone and packets for it vanish.
    let _ = u.take_after(Duration::from_secs(301));
    assert_eq!(u.counter("eps"), 0);
    u.send(&packets::am(ours, 9, ACK_REQ, 3, 2, b"anybody?"));
    assert!(u.take().is_empty());
    assert_eq!((u.counter("rx.drop.unknown_ep"), u.counter("tx.byes")), (1, 0));
    u.finish();
}

#[test]
fn keepalive_takes_a_psn_and_reaches_nobody() {
    let mut u = Ucx::new("keepalive_takes_a_psn_and_reaches_nobody");
    let ours = u.accepted();
    u.send(&packets::put(ours, 2, 1, 0, b""));
    u.send(&packets::am(ours, 9, ACK_REQ, 3, 1, b"x"));
    let got = u.take();
    assert_eq!((got.len(), got[0].ack), (1, 3));
    assert_eq!(u.inbox(), [b"x".to_vec()]);
    u.finish();
}

#[test]
fn stale_acks_change_nothing() {
    let mut u = Ucx::new("stale_acks_change_nothing");
    let (ep, ours) = u.connected();
    ep.am_short(ID, 0, b"x").expect("a send");
    let _ = u.take();
    // Of packets never sent, and of long ago.
    for ack in [3, 1000, 40_000, 0, 65_535] {
        u.send(&packets::ack(ours, 0, 2, ack));
    }
    let _ = u.take();
    assert_eq!(ep.flush(FlushMode::Local, None).expect("flush"), Posted::InProgress, "still unacknowledged");
    u.send(&packets::ack(ours, 0, 2, 2));
    let _ = u.take();
    assert_eq!(ep.flush(FlushMode::Local, None).expect("flush"), Posted::Done);
    assert!(u.counter("rx.acks_beyond") >= 2);
    u.finish();
}

#[test]
fn peer_with_smaller_packets_is_never_sent_more() {
    // The address carries the path MTU: 1024.
    let mut u = Ucx::with("peer_with_smaller_packets_is_never_sent_more", |_| {}, |c| c.mtu = ib::types::Mtu::M1024);
    assert_eq!(u.limit, 1024);
    assert_eq!(u.addr[0] & 0x02, 0x02, "the MTU byte");
    let (ep, ours) = u.connected();
    // The packing closure gets exactly the room that this peer has.
    assert_eq!(u.w.nodes[0].iface().attr().am.max_bcopy.map(usize::from), Some(4088));
    let n = ep.am_bcopy(ID, &mut |to| {
        to.fill(1);
        to.len()
    });
    assert_eq!(n.expect("1016 bytes fit 1024"), 1016);
    assert_eq!(u.take()[0].bytes.len(), 1024);
    u.send(&packets::ack(ours, 0, 2, 2));
    let _ = u.take();
    let region = u.w.nodes[0].md.mem_alloc(2000).expect("memory");
    let e = match ep.am_zcopy(ID, b"h", &[region.slice(0..1016).expect("a slice")], None) {
        Err(SendError::Failed(e)) => e,
        other => panic!("1017 bytes do not fit: {other:?}"),
    };
    assert_eq!(e.kind(), ErrorKind::InvalidParam);
    let text = e.to_string();
    assert!(text.contains("1017") && text.contains("1016"), "{text}");
    assert!(!text.contains("connect anew"), "the endpoint is well: {text}");
    // And it goes on working.
    ep.am_short(ID, 0, b"x").expect("a send");
    assert_eq!(u.take().len(), 1);
    u.send(&packets::ack(ours, 0, 2, 3));
    u.finish();
}

#[test]
fn extension_packets_from_a_peer_that_has_none_are_dropped() {
    let mut u = Ucx::new("extension_packets_from_a_peer_that_has_none_are_dropped");
    let ours = u.accepted();
    for kind in [0x40u8, 0x41, 0x42, 0x43, 0xff, 0, 3] {
        let mut p = packets::neth(packets::CTL | ours, 2, 1);
        p.extend([kind, 0, 0, 0]);
        p.extend([0; 36]);
        u.send(&p);
    }
    let got = u.take();
    assert!(got.is_empty(), "{got:?}");
    assert_eq!(u.counter("rx.drop.unknown_control"), 7);
    u.send(&packets::am(ours, 9, 0, 2, 1, b"x"));
    let _ = u.take();
    assert_eq!(u.inbox().len(), 1, "the connection is unharmed");
    u.finish();
}

#[test]
fn somebody_in_the_first_window_asks_for_its_ack() {
    // A peer that acknowledges only when asked would never open a window in which nobody asks.
    let mut u = Ucx::new("somebody_in_the_first_window_asks_for_its_ack");
    let (ep, ours) = u.connected();
    let mut in_flight = 0;
    while ep.am_short(ID, 0, b"").is_ok() {
        in_flight += 1;
    }
    let got = u.take();
    assert_eq!(got.len(), in_flight);
    assert!(got.iter().any(|p| p.is(ACK_REQ)), "somebody asks");
    u.send(&packets::ack(ours, 0, 2, 1 + in_flight as u16));
    let _ = u.take();
    u.finish();
}

#[test]
fn two_of_us_and_one_queue_pair() {
    // Two connections between the same two interfaces: the second is conn_sn 1, in both directions.
    let mut u = Ucx::new("two_of_us_and_one_queue_pair");
    let (a, _) = u.connected();
    let _b = u.connect();
    let creq = u.take().remove(0);
    assert_eq!(creq.conn_sn(), 1);
    let ours = creq.src_ep_id();
    assert_ne!(u64::from(ours), a.id());
    let crossing = Creq { conn_sn: 1, ep_id: THEIRS + 1, ..u.creq() }.packet(1, false);
    u.send(&crossing);
    let got = u.take();
    assert!(got[0].is_crep() && got[0].src_ep_id() == ours, "{got:?}");
    u.send(&packets::crep(ours, 2, 2, THEIRS + 1, &UCX_IDENT, 0));
    let _ = u.take();
    u.finish();
}
