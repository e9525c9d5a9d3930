//! UCX's tests of UD, and of the structures below it, that no other file of this directory covers. They have UCX's names:
//! `test_ud`, `test_ud_ds`, `test_ud_timer`, and of ucs `test_conn_match`, `test_frag_list`, `test_twheel`, `test_datatype`,
//! `test_time`. `tests/PARITY.md` lists all of them.

use std::time::Duration;

use uct::Time;

use super::{
    handshake::{creq_from, drop_first},
    hazards::{IDENT, am, crep, neth, puppet},
    net::*,
};
use crate::proto::{slab::Slab, wire, *};

const FIRST: u16 = 0xfff8;

/// Opens the window of an endpoint of node 0 to `n` packets, leaving nothing outstanding, and starts to record.
fn open_window(net: &mut Net, ep: EpId, n: u16) {
    net.open_window(ep, n);
    net.flush(0, ep);
    net.settle();
    assert!(!net.nodes[0].eng.has_outstanding(ep));
    for n in &mut net.nodes {
        n.delivered.clear();
    }
    net.sent.clear();
    net.records = true;
}

// --- test_ud

/// 13 messages in a wide window: all arrive, nobody answers, all stay in the sender's window.
#[test]
fn basic_tx() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    open_window(&mut net, a, 64);
    let (psn, acked) = (net.nodes[0].eng.eps[a.slot].psn, net.nodes[0].eng.eps[a.slot].acked);
    let ops: Vec<u64> = (0..13u8).map(|i| net.send(0, a, &[i]).unwrap()).collect();
    net.settle();
    let ep = &net.nodes[0].eng.eps[a.slot];
    assert_eq!((ep.psn, ep.acked), (psn.add(13), acked));
    assert_eq!(net.payloads(1), (0..13u8).map(|i| vec![i]).collect::<Vec<_>>());
    assert_eq!(net.sent.iter().filter(|(from, _)| *from == 1).count(), 0, "nobody asked");
    assert!(ops.iter().all(|&op| net.is_done(0, op).is_none()));
}

/// Messages in turn carry each other's acks: the one who spoke last has one unacknowledged, the other none.
#[test]
fn duplex_tx() {
    let mut net = Net::new(2, 1);
    let (a, b) = net.pair(0, 1);
    open_window(&mut net, a, 64);
    for _ in 0..100 {
        net.send_wait(1, b, b"");
    }
    net.flush(1, b);
    net.settle();
    net.sent.clear();
    let mut ops = (Vec::new(), Vec::new());
    for i in 0..5u8 {
        ops.0.push(net.send(0, a, &[i]).unwrap());
        net.settle();
        ops.1.push(net.send(1, b, &[i]).unwrap());
        net.settle();
    }
    assert!(!net.nodes[0].eng.has_outstanding(a));
    assert!(ops.0.iter().all(|&op| net.is_done(0, op) == Some(Ok(()))));
    assert_eq!(net.nodes[1].eng.eps[b.slot].psn.since(net.nodes[1].eng.eps[b.slot].acked), 2, "exactly one is left");
    assert!(ops.1[..4].iter().all(|&op| net.is_done(1, op) == Some(Ok(()))));
    assert_eq!(net.is_done(1, ops.1[4]), None);
    assert_eq!(net.sent.len(), 10, "no packet but the messages\n{}", net.tail());
}

/// If nobody is asked for an ack, none comes, and a full window stays full.
#[test]
fn tx_window2_without_ack_requests() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    open_window(&mut net, a, 16);
    net.filter = Some(Box::new(|_, _| false));
    let mut n = 0;
    while net.send(0, a, b"x").is_ok() {
        n += 1;
    }
    net.filter = None;
    assert!(n >= 16);
    for (_, mut bytes) in std::mem::take(&mut net.sent) {
        bytes[3] &= !2;
        let _ = net.inject(0, 1, &bytes);
        net.settle();
    }
    assert_eq!(net.payloads(1).len(), n);
    assert!(net.sent.is_empty(), "a duplicate is answered\n{}", net.tail());
    assert_eq!(net.send(0, a, b"x"), Err(Refused::NoResource));
    let ep = &net.nodes[0].eng.eps[a.slot];
    assert_eq!(usize::from(ep.psn.since(ep.acked)), n + 1);
}

/// The receiver takes 10 of 24; the sender has 6 places in its queue at a time for the rest.
#[test]
fn partial_drop() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    open_window(&mut net, a, 32);
    let mut passed = 0;
    net.filter = Some(Box::new(move |from, bytes| {
        passed += usize::from(from == 0 && bytes[3] & 1 == 1);
        passed <= 10
    }));
    let ops: Vec<u64> = (0..24u8).map(|i| net.send(0, a, &[i]).unwrap()).collect();
    let psn = net.nodes[0].eng.eps[a.slot].psn;
    net.filter = None;
    for _ in 0..1000 {
        net.nodes[0].credit = 6;
        net.run_for(Duration::from_millis(1));
    }
    assert_eq!(net.payloads(1), (0..24u8).map(|i| vec![i]).collect::<Vec<_>>(), "what has arrived\n{}", net.tail());
    assert!(ops.iter().all(|&op| net.is_done(0, op) == Some(Ok(()))));
    assert_eq!(net.nodes[0].eng.eps[a.slot].psn, psn, "what is sent again has the number it had");
}

/// Each kind of control packet finds the send queue full at first: none is forgotten.
#[test]
fn control_packets_survive_a_full_send_queue() {
    let mut net = Net::new(2, 1);
    // Every second millisecond there is one place, so whoever wants to say something is turned away first.
    let life = |net: &mut Net, limit: u64, done: &dyn Fn(&Net) -> bool| {
        for ms in 0..limit {
            for n in &mut net.nodes {
                n.credit = usize::from(ms % 2 == 1);
            }
            net.run_for(Duration::from_millis(1));
            if done(net) {
                return;
            }
        }
        panic!("never\n{}", net.tail());
    };
    net.nodes.iter_mut().for_each(|n| n.credit = 0);
    let a = net.connect(0, 1);
    net.pump();
    life(&mut net, 1000, &|n| n.nodes[0].eng.is_connected(a));
    let b = net.connect(1, 0);
    // A message with a gap before it: NACK or selective ack, and an ack that is asked for.
    net.filter = drop_first(1, |from, bytes| from == 0 && bytes[3] & 1 == 1);
    let ops = [net.send(0, a, b"1").unwrap(), net.send_as(0, a, 1, b"2", SendKind::Zcopy).unwrap()];
    life(&mut net, 1000, &|n| ops.iter().all(|&op| n.is_done(0, op) == Some(Ok(()))));
    assert_eq!(net.payloads(1), [b"1", b"2"]);
    // A check of an idle peer, and the end.
    let (now, op) = (net.now, net.nodes[0].op(b"check"));
    let check = op.id;
    net.nodes[0].eng.check(now, a, Some(op)).unwrap();
    life(&mut net, 1000, &|n| n.is_done(0, check) == Some(Ok(())));
    net.destroy(0, a);
    life(&mut net, 5000, &|n| n.nodes[0].freed == [a] && n.nodes[1].closed_by_peer == [b]);
    let (x, y) = (net.nodes[0].eng.stats(), net.nodes[1].eng.stats());
    assert!(x.tx_creq > 0 && y.tx_crep > 0 && y.tx_acks > 0 && x.tx_probes > 0 && x.tx_byes > 0);
    assert!(y.tx_nacks + y.tx_xacks > 0);
    assert!(net.nodes.iter().all(|n| n.failed.is_empty()));
}

// --- test_ud_ds, test_conn_match

/// The connection number of an endpoint.
fn conn_sn(net: &Net, node: usize, ep: EpId) -> u32 {
    net.nodes[node].eng.eps[ep.slot].conn_sn
}

/// Connects from node 0 to an address, without the network.
fn connect_to(net: &mut Net, addr: Addr, qpn: u32, path: u8) -> (EpId, ConnectOutcome) {
    let (now, caps) = (net.now, PeerCaps { max_packet: 4096, ext: None });
    net.nodes[0].eng.connect_to_iface(now, addr, qpn, path, caps).unwrap()
}

/// What has come of a request to node 0 with this connection number: an endpoint that was there, or a new one.
fn look_up(net: &mut Net, addr: Addr, qpn: u32, sn: u32) -> (EpId, bool) {
    let before = net.nodes[0].eng.ep_count();
    // An id of the peer's own for each, to recognise it by.
    let theirs = (qpn & 0xfff) << 12 | sn;
    let RxVerdict::Creq(info) = net.nodes[0].eng.handle_packet(
        net.now,
        &RxMeta { src_qpn: qpn, can_deliver: true },
        &creq_from(addr, qpn, theirs, sn, IDENT),
    ) else {
        panic!("not taken for a request")
    };
    let caps = PeerCaps { max_packet: 4096, ext: None };
    let outcome = net.nodes[0].eng.handle_creq(net.now, info, addr, caps);
    let found = net.nodes[0].eng.eps.iter().find(|(_, e)| e.dest == theirs && e.conn_sn == sn);
    let Some((slot, ep)) = found else { panic!("nobody has it: {outcome:?}") };
    (EpId { slot, id: ep.id }, net.nodes[0].eng.ep_count() > before)
}

/// Two peers, a thousand endpoints each: numbers from 0, each finds its endpoint, the next one finds none.
#[test]
fn cep_insert() {
    let mut net = Net::new(1, 1);
    let eps: Vec<(EpId, EpId)> =
        (0..1000).map(|_| (connect_to(&mut net, 1, 0x101, 0).0, connect_to(&mut net, 2, 0x102, 0).0)).collect();
    for (i, (a, b)) in eps.iter().enumerate() {
        assert_eq!((conn_sn(&net, 0, *a), conn_sn(&net, 0, *b)), (i as u32, i as u32));
    }
    for i in [0, 1, 499, 998, 999] {
        assert_eq!(look_up(&mut net, 1, 0x101, i), (eps[i as usize].0, false), "conn_sn {i}");
        assert_eq!(look_up(&mut net, 2, 0x102, i), (eps[i as usize].1, false), "conn_sn {i}");
    }
    assert!(look_up(&mut net, 1, 0x101, 1000).1 && look_up(&mut net, 2, 0x102, 1000).1, "not there: a new one");
    // The same device, another queue pair: another peer.
    let (other, _) = connect_to(&mut net, 1, 0x777, 0);
    assert_eq!(conn_sn(&net, 0, other), 0);
    assert_eq!(net.nodes[0].eng.peer_count(), 3);
}

/// Paths whose addresses differ count apart.
#[test]
fn cep_insert_4_paths() {
    let mut net = Net::new(1, 1);
    for i in 0..100 {
        for path in 0..4u8 {
            let (ep, _) = connect_to(&mut net, 10 + path, 0x101, path);
            assert_eq!((conn_sn(&net, 0, ep), net.nodes[0].eng.eps[ep.slot].path_index), (i, path));
        }
    }
    assert_eq!(net.nodes[0].eng.peer_count(), 4);
}

/// Paths that look the same share one count.
#[test]
fn cep_insert_4_paths_same_addr_per_path() {
    let mut net = Net::new(1, 1);
    for i in 0..100 {
        for path in 0..4u8 {
            let (ep, _) = connect_to(&mut net, 10, 0x101, path);
            assert_eq!(conn_sn(&net, 0, ep), i * 4 + u32::from(path));
        }
    }
    assert_eq!(net.nodes[0].eng.peer_count(), 1);
}

/// What the peer asked for waits for the local endpoint of its number; the numbers between get new ones.
#[test]
fn cep_replace() {
    let mut net = Net::new(1, 1);
    const N: u32 = 5;
    for _ in 0..N {
        assert_eq!(connect_to(&mut net, 1, 0x101, 0).1, ConnectOutcome::New);
    }
    let passive: Vec<EpId> = [N + 1, N + 4, N + 5].map(|sn| look_up(&mut net, 1, 0x101, sn).0).to_vec();
    let made: Vec<(EpId, ConnectOutcome)> = (0..7).map(|_| connect_to(&mut net, 1, 0x101, 0)).collect();
    use ConnectOutcome::{Claimed, New};
    assert_eq!(made.iter().map(|m| m.1).collect::<Vec<_>>(), [New, Claimed, New, New, Claimed, Claimed, New]);
    assert_eq!([made[1].0, made[4].0, made[5].0].as_slice(), passive);
    for (i, (ep, _)) in made.iter().enumerate() {
        assert_eq!(conn_sn(&net, 0, *ep), N + i as u32);
    }
    assert_eq!(net.nodes[0].eng.passive_count(), 0);
}

/// Local and passive endpoints of 64 peers in random order, against a simple model; removed ones are not found again.
#[test]
fn random_insert_retrieve() {
    let mut net = Net::new(1, 1);
    net.checks = false;
    let mut rng = Rng::new(7);
    // By peer: the next local number, and the passive endpoints that wait.
    let mut model: Vec<(u32, std::collections::BTreeMap<u32, EpId>)> = vec![Default::default(); 64];
    for _ in 0..3000 {
        let peer = rng.below(64) as usize;
        let (next, waiting) = &mut model[peer];
        let qpn = 0x200 + peer as u32;
        match rng.below(4) {
            0 | 1 => {
                let (ep, outcome) = connect_to(&mut net, peer as u8, qpn, 0);
                let expected = waiting.remove(next);
                assert_eq!(outcome == ConnectOutcome::Claimed, expected.is_some());
                assert!(expected.is_none_or(|e| e == ep));
                assert_eq!(conn_sn(&net, 0, ep), *next);
                *next += 1;
            }
            2 => {
                let sn = *next + rng.below(10) as u32;
                let (ep, is_new) = look_up(&mut net, peer as u8, qpn, sn);
                assert_eq!(is_new, waiting.insert(sn, ep).is_none());
            }
            _ => {
                if let Some((&sn, _)) = waiting.iter().next() {
                    let ep = waiting[&sn];
                    let now = net.now;
                    net.nodes[0].eng.invalidate(now, ep);
                    net.pump();
                    assert_eq!(net.nodes[0].eng.state(ep), None, "an unclaimed one that fails is gone");
                    waiting.remove(&sn);
                }
            }
        }
    }
    net.nodes[0].eng.check_invariants();
    let waiting: usize = model.iter().map(|(_, w)| w.len()).sum();
    assert_eq!(net.nodes[0].eng.passive_count(), waiting);
}

/// Closing gives back exactly what is left.
#[test]
fn purge_elems() {
    let mut net = Net::new(1, 1);
    let local: Vec<EpId> = (0..10).map(|i| connect_to(&mut net, i, 0x300 + u32::from(i), 0).0).collect();
    let passive: Vec<EpId> = (0..10u8).map(|i| look_up(&mut net, i, 0x300 + u32::from(i), 3).0).collect();
    let now = net.now;
    net.nodes[0].eng.destroy(now, local[4], |_| {});
    net.pump();
    assert_eq!(net.nodes[0].freed, [local[4]]);
    net.nodes[0].freed.clear();
    net.nodes[0].eng.close_all(now, |_| {});
    net.pump();
    let mut freed = net.nodes[0].freed.clone();
    freed.sort_by_key(|e| e.slot);
    let mut left: Vec<EpId> = local.iter().chain(&passive).copied().filter(|e| *e != local[4]).collect();
    left.sort_by_key(|e| e.slot);
    assert_eq!(freed, left);
    // Whom we asked stays known: its connection numbers are never used twice.
    assert_eq!((net.nodes[0].eng.ep_count(), net.nodes[0].eng.peer_count()), (0, 10));
}

// --- test_frag_list

/// An endpoint of node 0 whose peer is a puppet; PSNs count from the first that the peer sends now.
struct Stream {
    net: Net,
    dest: u32,
    first: u16,
}

#[derive(PartialEq, Eq, Debug)]
enum Got {
    Delivered,
    Kept,
    Duplicate,
}

impl Stream {
    fn new() -> Stream {
        let (mut net, a) = puppet();
        assert_eq!(net.inject(1, 0, &crep(a.wire_id(), FIRST, FIRST, 9, IDENT)), RxVerdict::Control);
        net.settle();
        // Number 1 is the next.
        Stream { net, dest: a.wire_id(), first: FIRST }
    }

    fn arrive(&mut self, n: u16) -> Got {
        let packet = am(self.dest, self.first.wrapping_add(n), FIRST, &n.to_le_bytes());
        match self.net.inject(1, 0, &packet) {
            RxVerdict::Deliver { .. } => Got::Delivered,
            RxVerdict::Hold { .. } => Got::Kept,
            RxVerdict::Drop(DropReason::Duplicate) => Got::Duplicate,
            other => panic!("{other:?}"),
        }
    }

    /// What has come out since the last call.
    fn out(&mut self) -> Vec<u16> {
        let out = std::mem::take(&mut self.net.nodes[0].delivered);
        out.iter().map(|(_, _, b)| u16::from_le_bytes([b[0], b[1]])).collect()
    }
}

#[test]
fn in_order_rcv() {
    let mut s = Stream::new();
    assert_eq!([s.arrive(0), s.arrive(u16::MAX)], [Got::Duplicate, Got::Duplicate]);
    for n in 1..10 {
        assert_eq!((s.arrive(n), s.out()), (Got::Delivered, vec![n]));
    }
    assert_eq!(s.net.nodes[0].eng.stats().rx_held, 0);
}

#[test]
fn one_hole() {
    let mut s = Stream::new();
    for n in 5..10 {
        assert_eq!((s.arrive(n), s.out()), (Got::Kept, vec![]));
    }
    for n in 1..4 {
        assert_eq!((s.arrive(n), s.out()), (Got::Delivered, vec![n]));
    }
    assert_eq!(s.arrive(5), Got::Duplicate, "kept already");
    assert_eq!((s.arrive(4), s.out()), (Got::Delivered, (4..10).collect()));
    assert_eq!(s.arrive(4), Got::Duplicate);
    assert_eq!((s.net.nodes[0].eng.stats().rx_held, s.net.nodes[0].held), (5, 0));
}

#[test]
fn two_holes_basic() {
    let mut s = Stream::new();
    for n in (2..10).chain(15..20) {
        assert_eq!(s.arrive(n), Got::Kept);
    }
    assert_eq!((s.arrive(1), s.out()), (Got::Delivered, (1..10).collect()));
    for n in 11..15 {
        assert_eq!((s.arrive(n), s.out()), (Got::Kept, vec![]));
    }
    assert_eq!((s.arrive(10), s.out()), (Got::Delivered, (10..20).collect()));
}

/// Runs that grow from both sides until they meet.
#[test]
fn two_holes_advanced() {
    let mut s = Stream::new();
    for n in [5, 6, 15, 16, 4, 7, 14, 17, 13, 8, 3, 12, 9, 11, 2, 10] {
        assert_eq!((s.arrive(n), s.out()), (Got::Kept, vec![]));
    }
    assert_eq!((s.arrive(1), s.out()), (Got::Delivered, (1..18).collect()));
    assert_eq!(s.net.nodes[0].held, 0);
}

/// 10,000 packets in windows of 32, each in any order: each comes out once, in order. The numbers wrap.
#[test]
fn random_arrival() {
    let mut s = Stream::new();
    s.net.checks = false;
    let mut rng = Rng::new(3);
    let mut next = 1u16;
    while next < 10_000 {
        let mut window: Vec<u16> = (next..next + 32).collect();
        while !window.is_empty() {
            let n = window.swap_remove(rng.below(window.len() as u64) as usize);
            assert_ne!(s.arrive(n), Got::Duplicate);
            s.net.sent.clear();
        }
        assert_eq!(s.out(), (next..next + 32).collect::<Vec<_>>());
        next += 32;
    }
    s.net.nodes[0].eng.check_invariants();
}

/// What is kept beyond a gap when the endpoint ends comes back, all of it.
#[test]
fn cleanup() {
    let mut s = Stream::new();
    for n in [3, 4, 9, 12] {
        assert_eq!(s.arrive(n), Got::Kept);
    }
    assert_eq!(s.net.nodes[0].held, 4);
    let now = s.net.now;
    s.net.nodes[0].eng.close_all(now, |_| {});
    s.net.pump();
    assert_eq!((s.net.nodes[0].held, s.out()), (0, vec![]));
}

// --- test_twheel, test_time

/// Setting a timer that is set changes it: no endpoint has two.
#[test]
fn add_twice() {
    let mut net = Net::new(2, 1);
    let (a, _) = net.pair(0, 1);
    net.nodes[1].is_running = false;
    net.send(0, a, b"x").unwrap();
    let due = net.nodes[0].eng.poll_timeout().expect("a timer");
    net.now += Duration::from_millis(3);
    net.send(0, a, b"y").unwrap();
    assert_eq!(net.nodes[0].eng.timers.armed(), 1);
    assert_eq!(net.nodes[0].eng.poll_timeout(), Some(due), "the first is not put off");
    // An ack of everything stops it; the next message starts one.
    let psn = net.nodes[0].eng.eps[a.slot].psn;
    let head = net.nodes[0].eng.eps[a.slot].rx_head;
    let ack = neth(a.wire_id(), head.next().raw(), psn.prev().raw()).emit();
    let _ = net.inject(1, 0, &ack);
    assert_eq!((net.nodes[0].eng.timers.armed(), net.nodes[0].eng.poll_timeout()), (0, None));
    net.send(0, a, b"z").unwrap();
    assert_eq!(net.nodes[0].eng.timers.armed(), 1);
}

/// 10,000 timers of different lengths, looked at once a second: each is served when its time has come, none earlier.
#[test]
fn delayed_sweep() {
    let mut net = Net::with(1, 1, |_, cfg| cfg.linger = Duration::from_secs(300));
    net.checks = false;
    net.filter = Some(Box::new(|_, _| false));
    let mut rng = Rng::new(11);
    // A request that nobody answers fails after the time-out of 10 s; they begin within 10 s.
    let mut begun = std::collections::BTreeMap::new();
    for i in 0..10_000u32 {
        if i % 1000 == 0 {
            net.now += Duration::from_secs(1);
            let now = net.now;
            net.nodes[0].eng.handle_timeout(now);
            net.pump();
        }
        let (ep, _) = connect_to(&mut net, rng.below(200) as u8, 0x400 + i % 7, 0);
        net.resolve(0, ep, true);
        begun.insert(ep.slot, net.now);
    }
    net.pump();
    let mut failed = 0;
    for _ in 0..30 {
        net.now += Duration::from_secs(1);
        let now = net.now;
        net.nodes[0].eng.handle_timeout(now);
        net.pump();
        for (ep, _) in std::mem::take(&mut net.nodes[0].failed) {
            let waited = now.since(begun[&ep.slot]);
            assert!((10..=13).contains(&waited.as_secs()), "{waited:?}");
            failed += 1;
        }
    }
    assert_eq!(failed, 10_000);
    assert_eq!(net.nodes[0].eng.timers.armed(), 0);
}

/// Deadlines of many lengths, set, moved and stopped at random: the earliest is never later than the earliest of them all.
#[test]
fn timerq() {
    let mut net = Net::new(1, 1);
    let now = net.now;
    let eps: Vec<u32> = (0..50).map(|_| net.nodes[0].eng.create_ep(now).unwrap().slot).collect();
    let mut rng = Rng::new(5);
    let mut model: Vec<Time> = vec![Time::MAX; eps.len()];
    let eng = &mut net.nodes[0].eng;
    for _ in 0..5000 {
        let i = rng.below(50) as usize;
        let at = if rng.percent(30) { Time::MAX } else { Time::from_nanos(1 + rng.below(1_000_000)) };
        eng.timers.set(eps[i], &mut eng.eps[eps[i]], at);
        model[i] = at;
        let earliest = model.iter().copied().min().unwrap_or(Time::MAX);
        assert_eq!(eng.timers.armed(), model.iter().filter(|t| **t != Time::MAX).count());
        assert!(eng.timers.earliest() <= earliest, "a deadline would be missed");
        assert!(earliest != Time::MAX || eng.timers.earliest() == Time::MAX, "nothing to wait for");
    }
}

// --- test_datatype

#[test]
fn ptr_array_basic() {
    let mut s = Slab::new();
    assert_eq!((s.len(), s.get(0)), (0, None));
    assert_eq!(s.remove(0), None);
    let ids: Vec<u32> = "abc".chars().map(|c| s.insert(c)).collect();
    assert_eq!(ids, [0, 1, 2], "the first goes to place 0");
    assert_eq!((s.remove(1), s.remove(1)), (Some('b'), None));
    assert_eq!((s.get(0), s.get(1), s.get(2), s.get(3)), (Some(&'a'), None, Some(&'c'), None));
    assert_eq!((s.vacant(), s.insert('d')), (1, 1), "a hole is filled first");
    assert_eq!(s.iter().map(|(i, c)| (i, *c)).collect::<Vec<_>>(), [(0, 'a'), (1, 'd'), (2, 'c')]);
}

/// 10,000 random insertions and removals against a map.
#[test]
fn ptr_array_random() {
    let mut s = Slab::new();
    let mut model = std::collections::BTreeMap::new();
    let mut rng = Rng::new(9);
    for n in 0..10_000u32 {
        if rng.percent(60) {
            let vacant = s.vacant();
            let i = s.insert(n);
            assert_eq!(i, vacant);
            assert_eq!(model.insert(i, n), None, "place {i} is in use");
        } else {
            let i = rng.below(200) as u32;
            assert_eq!(s.remove(i), model.remove(&i));
        }
        assert_eq!(s.len(), model.len());
    }
    assert!(s.iter().map(|(i, v)| (i, *v)).eq(model.iter().map(|(i, v)| (*i, *v))));
    let top = model.keys().last().copied().unwrap_or(0);
    assert!((0..=top + 1).all(|i| s.get(i) == model.get(&i)));
}

/// An ack lets go of everything up to its number, also where the numbers wrap, and of nothing after it.
#[test]
fn queue_extract_if() {
    for upto in 0..12u16 {
        let mut net = Net::new(2, 1);
        let (a, _) = net.pair(0, 1);
        open_window(&mut net, a, 16);
        net.filter = Some(Box::new(|_, _| false));
        let before = net.nodes[0].eng.eps[a.slot].acked;
        let ops: Vec<u64> = (0..12).map(|_| net.send(0, a, b"x").unwrap()).collect();
        let head = net.nodes[0].eng.eps[a.slot].rx_head;
        let packet = neth(a.wire_id(), head.next().raw(), before.add(upto).raw()).emit();
        assert!(wire::Neth::parse(&packet).is_some());
        let _ = net.inject(1, 0, &packet);
        net.pump();
        let done = ops.iter().filter(|&&op| net.is_done(0, op) == Some(Ok(()))).count();
        assert_eq!(done, usize::from(upto));
        assert!(ops[..done].iter().all(|&op| net.is_done(0, op).is_some()));
    }
}
