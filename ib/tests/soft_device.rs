//! The soft device as a transport sees it: two devices in one process, over real sockets.

mod soft_common;

use std::{
    net::UdpSocket,
    os::fd::RawFd,
    sync::atomic::{AtomicUsize, Ordering},
};

use ib::{
    device::*,
    soft::{SoftConfig, SoftDevice},
    sw::{DropReason, FilterVerdict, grh},
    types::*,
};
use soft_common::*;
use uct::mem::Buf;

fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (seed * 31 + i * 7 + (i >> 8)) as u8).collect()
}

#[test]
fn messages_of_all_sizes_arrive_with_their_grh() {
    for bind in ["127.0.0.1", "::1"] {
        let (mut a, mut b) = (Node::new(bind, 8), Node::new(bind, 512));
        let ah = a.ah(&b);
        let mut buf = registered(&a.dev, 4096);
        // All short sizes and all sizes around those where headers, words and pages end.
        let sizes: Vec<usize> = (0..300).chain((300..4096).step_by(97)).chain(4080..=4096).collect();
        for group in sizes.chunks(100) {
            for &len in group {
                buf[..len].copy_from_slice(&pattern(len, len));
                a.post_long(&ah, b.qp.qpn(), &buf, len);
            }
            a.qp.ring();
            let done = b.receive(group.len());
            for (&len, wc) in group.iter().zip(&done) {
                assert_eq!(wc.status, WcStatus::Success);
                assert_eq!(wc.byte_len as usize, GRH_LEN + len, "{bind}");
                assert_eq!(payload_of(wc), pattern(len, len), "{bind}, {len} bytes");
                assert_eq!((wc.src_qpn, wc.solicited, wc.grh), (a.qp.qpn(), true, true));
                let area: &[u8; GRH_LEN] = wc.buf.first_chunk().unwrap();
                assert_eq!(grh::gids(area), Some((a.dev.gid(), b.dev.gid())));
            }
            b.recycle(done);
        }
        assert_eq!(b.dev.stats().dropped_total(), 0, "{:?}", b.dev);
        assert_eq!(a.dev.stats().tx_packets, sizes.len() as u64);
        assert_eq!(b.dev.stats().rx_bytes, sizes.iter().sum::<usize>() as u64);
    }
}

#[test]
fn equal_messages_leave_and_arrive_as_runs_in_order() {
    for (bind, gso) in [("127.0.0.1", true), ("127.0.0.1", false), ("::1", true)] {
        let cfg = SoftConfig { port: Some(0), gso, ..SoftConfig::at(bind.parse().unwrap()) };
        let mut a = Node::on(&SoftDevice::open(&cfg).unwrap(), 1);
        let mut b = Node::new(bind, 200);
        let ah = a.ah(&b);
        for i in 0..200u32 {
            // The last of each eight is shorter: it ends a run.
            let len = if i % 8 == 7 { 4 } else { 12 };
            let bytes = [i.to_le_bytes(), [1; 4], [2; 4]].concat();
            a.post(&ah, b.qp.qpn(), QKEY, &bytes[..len]);
        }
        a.qp.ring();
        let done = b.receive(200);
        for (i, wc) in done.iter().enumerate() {
            assert_eq!(payload_of(wc)[..4], (i as u32).to_le_bytes());
        }
        let (tx, rx) = (a.dev.wire_stats(), b.dev.wire_stats());
        assert_eq!((tx.gso_runs, tx.send_errors), (if gso { 25 } else { 0 }, 0), "{bind}");
        assert_eq!(rx.gro_merges > 0, gso, "{bind}: {rx:?}");
        assert_eq!(b.dev.stats().dropped_total(), 0);
    }
}

#[test]
fn mixed_destinations_and_sizes_in_one_ring() {
    let mut a = Node::new("127.0.0.1", 1);
    let mut peers: Vec<Node> = (0..5).map(|_| Node::new("127.0.0.1", 64)).collect();
    let ahs: Vec<_> = peers.iter().map(|p| a.ah(p)).collect();
    let mut sent = vec![Vec::new(); peers.len()];
    for i in 0..150usize {
        let to = i * i % peers.len();
        let bytes = pattern(i, i * 13 % 60);
        a.post(&ahs[to], peers[to].qp.qpn(), QKEY, &bytes);
        sent[to].push(bytes);
    }
    a.qp.ring();
    for (peer, sent) in peers.iter_mut().zip(&sent) {
        let got = peer.receive(sent.len());
        let got: Vec<&[u8]> = got.iter().map(payload_of).collect();
        assert_eq!(got, *sent);
    }
}

#[test]
fn strangers_and_wrong_keys_are_dropped_by_reason() {
    let (mut a, mut b) = (Node::new("127.0.0.1", 1), Node::new("127.0.0.1", 4));
    let ah = a.ah(&b);
    let qpn = b.qp.qpn();
    let other = Qpn::truncate(qpn.get() ^ 1);
    a.post(&ah, other, QKEY, b"no such queue pair");
    a.post(&ah, qpn, QKey(QKEY.0 ^ 1), b"wrong key");
    // A partition key cannot be chosen per send: change the table, make a queue pair.
    let events = a.dev.events();
    a.dev.port().set_pkeys(vec![PKey(0x8001)], events);
    let mut c = Node::on(&a.dev, 1);
    let ah_c = c.ah(&b);
    c.post(&ah_c, qpn, QKEY, b"wrong partition");
    a.post(&ah, qpn, QKEY, b"good");
    a.qp.ring();
    c.qp.ring();
    a.post(&ah, qpn, QKEY, b"last");
    a.qp.ring();
    let got = b.receive(2);
    assert_eq!([payload_of(&got[0]), payload_of(&got[1])], [&b"good"[..], b"last"]);
    let s = b.dev.stats();
    for (why, n) in [(DropReason::NoQp, 1), (DropReason::QKey, 1), (DropReason::PKey, 1)] {
        assert_eq!(s.dropped(why), n, "{why}: {s}");
    }
    assert_eq!(s.dropped_total(), 3);
}

#[test]
fn damaged_and_arbitrary_datagrams_are_counted_and_harmless() {
    let (mut a, mut b) = (Node::new("127.0.0.1", 1), Node::new("127.0.0.1", 64));
    let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
    let to = b.dev.local_addr();
    let mut rng = ib::sw::Rng::new(42);
    let mut sent = 0;
    for round in 0..2000u64 {
        let len = rng.below(120) as usize;
        let mut bytes: Vec<u8> = (0..len).map(|_| rng.next_u64() as u8).collect();
        // Half of them look right from afar.
        if round % 2 == 0 && len > 8 {
            bytes[..5].copy_from_slice(&[0x64 | (round as u8 >> 1 & 1), 0, 0xff, 0xff, 0]);
            bytes[5..8].copy_from_slice(&b.qp.qpn().get().to_be_bytes()[1..]);
        }
        stranger.send_to(&bytes, to).unwrap();
        sent += 1;
        if round % 16 == 0 {
            let mut none = Vec::new();
            while b.qp.poll_recv(&mut none, 8) > 0 {}
        }
    }
    // A message behind all the noise shows that everything before it has been looked at.
    let ah = a.ah(&b);
    a.post(&ah, b.qp.qpn(), QKEY, b"still alive");
    a.qp.ring();
    let got = b.receive(1);
    assert_eq!(payload_of(&got[0]), b"still alive");
    let s = b.dev.stats();
    assert_eq!(s.dropped_total(), sent, "{s}");
    assert!(s.dropped(DropReason::Icrc) > 400 && s.dropped(DropReason::Opcode) > 500, "{s}");
}

#[test]
fn a_copied_frame_from_another_port_fails_its_icrc() {
    // The sender's UDP port is covered: a replay from elsewhere is damage.
    use ib::soft::{frame::*, icrc::Flow};
    let mut b = Node::new("127.0.0.1", 8);
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let header = Header {
        solicited: false,
        pkey: PKey::DEFAULT,
        dest_qpn: b.qp.qpn(),
        psn: 1,
        qkey: QKEY,
        src_qpn: Qpn::truncate(77),
        imm: None,
    };
    let build = |from| {
        let mut frame = vec![0; frame_len(5)];
        write_header(frame.first_chunk_mut().unwrap(), &header, 5);
        frame[HEADER_LEN..HEADER_LEN + 5].copy_from_slice(b"hello");
        let flow = Flow::new(from, b.dev.local_addr()).unwrap();
        let prefix = flow.prefix(frame.len());
        // As the kernel's soft-RoCE: an ID that nobody can foretell.
        seal(&mut frame, 5, &prefix, 0xbeef);
        frame
    };
    let local = socket.local_addr().unwrap();
    let mut wrong = local;
    wrong.set_port(local.port() ^ 1);
    socket.send_to(&build(wrong), b.dev.local_addr()).unwrap();
    socket.send_to(&build(local), b.dev.local_addr()).unwrap();
    let got = b.receive(1);
    assert_eq!((payload_of(&got[0]), got[0].src_qpn.get()), (&b"hello"[..], 77));
    assert_eq!(got[0].buf[24..26], [0xbe, 0xef], "the ID was solved for");
    assert_eq!(b.dev.stats().dropped(DropReason::Icrc), 1);
}

#[test]
fn messages_wait_in_the_socket_while_no_receive_is_posted() {
    let mut a = Node::new("127.0.0.1", 1);
    let mut b = Node::without_receives(&device("127.0.0.1"), 100);
    let ah = a.ah(&b);
    for i in 0..100u32 {
        a.post(&ah, b.qp.qpn(), QKEY, &i.to_le_bytes());
    }
    a.qp.ring();
    let mut out = Vec::new();
    assert_eq!(b.qp.poll_recv(&mut out, 8), 0);
    // Ten at a time: the rest of a run waits, too.
    let mut hidden = b.spare.split_off(10);
    for round in 0..10u32 {
        b.post_all();
        let done = b.receive(10);
        assert_eq!(b.qp.poll_recv(&mut out, 8), 0);
        for (i, wc) in done.iter().enumerate() {
            assert_eq!(payload_of(wc), (round * 10 + i as u32).to_le_bytes());
        }
        b.spare = hidden.split_off(hidden.len().saturating_sub(10));
    }
    assert_eq!(b.dev.stats().dropped_total(), 0);
}

#[test]
fn several_queue_pairs_share_a_socket_and_drop_for_want_of_receives() {
    let mut a = Node::new("127.0.0.1", 1);
    let dev = device("127.0.0.1");
    let (mut b, mut c) = (Node::on(&dev, 8), Node::on(&dev, 2));
    let ah = a.ah(&b);
    for i in 0..4u8 {
        a.post(&ah, b.qp.qpn(), QKEY, &[b'b', i]);
        a.post(&ah, c.qp.qpn(), QKEY, &[b'c', i]);
    }
    a.qp.ring();
    // b's poll serves both.
    let got = b.receive(4);
    assert_eq!(payload_of(&got[3]), [b'b', 3]);
    let mut out = Vec::new();
    assert_eq!(c.qp.poll_recv(&mut out, 8), 2);
    assert_eq!(payload_of(&out[1]), [b'c', 1]);
    assert_eq!(dev.stats().dropped(DropReason::NoReceive), 2);
    // A queue pair that is gone gets nothing, and its number names nobody.
    let gone = c.qp.qpn();
    drop(c);
    a.post(&ah, gone, QKEY, b"late");
    a.post(&ah, b.qp.qpn(), QKEY, b"end");
    a.qp.ring();
    assert_eq!(payload_of(&b.receive(1)[0]), b"end");
    assert_eq!(dev.stats().dropped(DropReason::NoQp), 1);
}

#[test]
fn a_message_longer_than_its_receive_is_dropped_and_the_queue_pair_lives() {
    let (mut a, mut b) = (Node::new("127.0.0.1", 1), Node::without_receives(&device("127.0.0.1"), 1));
    let ah = a.ah(&b);
    let (arena, mut short) = uct::mem::Arena::new(uct::mem::ArenaLayout {
        count: 2,
        len: GRH_LEN + 10,
        front: 0,
        align: 8,
        align_offset: 0,
    })
    .unwrap();
    arena.set_lkey(b.dev.reg_mr(arena.block(), Access::LOCAL_WRITE).unwrap().lkey);
    b.qp.post_recv(&mut short).unwrap();
    a.post(&ah, b.qp.qpn(), QKEY, &[1; 11]);
    a.post(&ah, b.qp.qpn(), QKEY, &[2; 10]);
    a.qp.ring();
    assert_eq!(payload_of(&b.receive(1)[0]), [2; 10]);
    assert_eq!(b.dev.stats().dropped(DropReason::TooLong), 1);
    assert_eq!(b.qp.state(), QpState::ReadyToSend);
}

#[test]
fn a_send_above_the_mtu_succeeds_and_is_not_sent() {
    let cfg = SoftConfig { mtu: Some(Mtu::M1024), port: Some(0), ..SoftConfig::at("127.0.0.1".parse().unwrap()) };
    let mut a = Node::on(&SoftDevice::open(&cfg).unwrap(), 1);
    let mut b = Node::new("127.0.0.1", 4);
    assert_eq!(a.dev.query_port(1).unwrap().active_mtu, Mtu::M1024);
    assert_eq!(b.dev.query_port(1).unwrap().active_mtu, Mtu::M4096);
    let ah = a.ah(&b);
    let buf = registered(&a.dev, 2000);
    a.post_long(&ah, b.qp.qpn(), &buf, 1025);
    a.post_long(&ah, b.qp.qpn(), &buf, 1024);
    a.qp.ring();
    assert_eq!(payload_of(&b.receive(1)[0]).len(), 1024);
    assert_eq!((a.dev.stats().dropped(DropReason::Oversize), a.dev.stats().tx_packets), (1, 1));
}

#[test]
fn address_handles_are_checked() {
    let a = Node::new("127.0.0.1", 1);
    let b = Node::new("127.0.0.1", 1);
    let v6 = Node::new("::1", 1);
    let good = a.ah_attr(&b);
    let route = good.grh.unwrap();
    let errno = |attr: AhAttr| a.dev.create_ah(&attr).map(|_| ()).map_err(|e| e.errno);
    let gid = |ip: &str| Gid::from_ip(ip.parse().unwrap());
    assert_eq!(errno(good), Ok(()));
    let with = |sgid, dgid| AhAttr { grh: Some(GlobalRoute { sgid, dgid, ..route }), ..good };
    assert_eq!(errno(with(gid("127.0.0.9"), route.dgid)), Err(libc::ENODATA));
    assert_eq!(errno(with(route.sgid, v6.dev.gid())), Err(libc::EINVAL));
    assert_eq!(errno(with(route.sgid, Gid::ZERO)), Err(libc::EINVAL));
    assert_eq!(errno(AhAttr { grh: None, ..good }), Err(libc::EINVAL));
    assert_eq!(errno(AhAttr { port: 2, ..good }), Err(libc::EINVAL));
    let elsewhere = SoftAv { host_id: good.soft.host_id ^ 1, ..good.soft };
    assert_eq!(errno(AhAttr { soft: elsewhere, ..good }), Err(libc::ENETUNREACH), "their loopback is not ours");
    let remote = AhAttr { soft: elsewhere, ..with(route.sgid, gid("192.0.2.1")) };
    assert_eq!(errno(remote), Err(libc::ENETUNREACH), "nothing leaves the host from a loopback address");
    let lo = v6.ah_attr(&v6);
    let foreign = AhAttr { soft: SoftAv { host_id: 1, ..lo.soft }, ..lo };
    assert_eq!(v6.dev.create_ah(&foreign).map(|_| ()).unwrap_err().errno, libc::ENETUNREACH);
}

#[test]
fn a_local_gid_that_is_gone_fails_the_queue_pair_until_reset() {
    let (mut a, b) = (Node::new("127.0.0.1", 3), Node::new("127.0.0.1", 1));
    let ah = a.ah(&b);
    a.dev.port().remove_gid(a.dev.gid(), a.dev.events());
    let sges = [Sge { bytes: b"x", lkey: 0 }];
    let wr = |serial| SendWr {
        serial,
        ah: &ah,
        remote_qpn: b.qp.qpn(),
        remote_qkey: QKEY,
        sges: &sges,
        inline: true,
        signaled: false,
        solicited: false,
    };
    a.qp.post_send(&wr(1)).unwrap();
    a.qp.post_send(&wr(2)).unwrap();
    let mut sends = Vec::new();
    a.qp.poll_send(&mut sends, 8);
    let want = [(1, WcStatus::LocalQpOp), (2, WcStatus::WrFlush)];
    assert_eq!(sends.iter().map(|wc| (wc.serial, wc.status)).collect::<Vec<_>>(), want);
    assert_eq!(a.qp.state(), QpState::Error);
    let mut recvs = Vec::new();
    assert_eq!(a.qp.poll_recv(&mut recvs, 8), 3);
    assert!(recvs.iter().all(|wc| wc.status == WcStatus::WrFlush));
    let mut events = Vec::new();
    while let Some(e) = a.dev.poll_async_event() {
        events.push(e);
    }
    assert_eq!(events, [AsyncEvent::GidChange(1), AsyncEvent::QpFatal(a.qp.qpn())]);
    a.qp.reset().unwrap();
    assert_eq!(a.qp.state(), QpState::ReadyToSend);
}

fn readable(fd: RawFd, timeout_ms: i32) -> bool {
    let mut p = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one valid pollfd.
    unsafe { libc::poll(&raw mut p, 1, timeout_ms) == 1 }
}

#[test]
fn arm_says_busy_or_wakes() {
    let (mut a, mut b) = (Node::new("127.0.0.1", 1), Node::new("127.0.0.1", 4));
    let ah = a.ah(&b);
    let fd = b.qp.event_fd().unwrap();
    assert_eq!(b.qp.arm(ArmFor::RECV), Ok(ArmResult::Armed));
    assert!(!readable(fd, 0));
    a.post(&ah, b.qp.qpn(), QKEY, b"1");
    a.qp.ring();
    assert!(readable(fd, 10_000));
    assert_eq!(b.qp.arm(ArmFor::RECV), Ok(ArmResult::Busy), "the socket is readable");
    b.receive(1);
    assert_eq!(b.qp.arm(ArmFor::RECV), Ok(ArmResult::Armed));
    assert!(!readable(fd, 0));
    assert_eq!(a.qp.arm(ArmFor::SEND), Ok(ArmResult::Armed), "sends complete when they are posted");
}

#[test]
fn no_wake_up_is_lost_when_another_queue_pair_drains_the_socket() {
    let mut a = Node::new("127.0.0.1", 1);
    let dev = device("127.0.0.1");
    let (mut b, mut c) = (Node::on(&dev, 8), Node::on(&dev, 8));
    let ah = a.ah(&b);
    let fd = c.qp.event_fd().unwrap();
    assert_eq!(c.qp.arm(ArmFor::RECV), Ok(ArmResult::Armed));
    a.post(&ah, c.qp.qpn(), QKEY, b"for c");
    a.post(&ah, b.qp.qpn(), QKEY, b"for b");
    a.qp.ring();
    b.receive(1);
    assert!(readable(fd, 0), "the socket is empty now, so this is the eventfd");
    assert_eq!(c.qp.arm(ArmFor::RECV), Ok(ArmResult::Busy));
    assert_eq!(payload_of(&c.receive(1)[0]), b"for c");
    assert_eq!(c.qp.arm(ArmFor::RECV), Ok(ArmResult::Armed));
    assert!(!readable(fd, 0));
}

#[test]
fn threads_with_a_queue_pair_each_share_one_device() {
    const EACH: usize = 3000;
    let dev = device("127.0.0.1");
    let peer = device("127.0.0.1");
    let received = AtomicUsize::new(0);
    std::thread::scope(|s| {
        for t in 0..3u8 {
            let (mut rx, mut tx) = (Node::on(&dev, 64), Node::on(&peer, 1));
            let ah = tx.ah(&rx);
            let ack = rx.ah(&tx);
            let received = &received;
            s.spawn(move || {
                // Ping-pong in small bursts: never more in flight than receives.
                for round in 0..EACH / 30 {
                    for i in 0..30usize {
                        tx.post(&ah, rx.qp.qpn(), QKEY, &[t, i as u8, round as u8]);
                    }
                    tx.qp.ring();
                    let done = rx.receive(30);
                    for (i, wc) in done.iter().enumerate() {
                        assert_eq!(payload_of(wc), [t, i as u8, round as u8]);
                    }
                    received.fetch_add(30, Ordering::Relaxed);
                    rx.recycle(done);
                    rx.post(&ack, tx.qp.qpn(), QKEY, &[round as u8]);
                    rx.qp.ring();
                    let done = tx.receive(1);
                    tx.recycle(done);
                }
            });
        }
    });
    assert_eq!(received.into_inner(), 3 * EACH);
    assert_eq!(dev.stats().dropped_total() + peer.stats().dropped_total(), 0, "{dev:?} {peer:?}");
}

#[test]
fn filters_see_packets_in_both_directions() {
    let (mut a, mut b) = (Node::new("127.0.0.1", 1), Node::new("127.0.0.1", 16));
    let ah = a.ah(&b);
    a.dev.tx_filter().set(Some(Box::new(|p| match p.payload[0] {
        0 => FilterVerdict::Drop,
        1 => FilterVerdict::Duplicate,
        2 => FilterVerdict::Swap,
        _ => FilterVerdict::Pass,
    })));
    b.dev.rx_filter().set(Some(Box::new(
        |p| {
            if p.payload[0] == 4 { FilterVerdict::Drop } else { FilterVerdict::Pass }
        },
    )));
    for i in 0..6u8 {
        a.post(&ah, b.qp.qpn(), QKEY, &[i]);
    }
    a.qp.ring();
    let got: Vec<u8> = b.receive(5).iter().map(|wc| payload_of(wc)[0]).collect();
    assert_eq!(got, [1, 1, 3, 2, 5]);
    for n in [&a, &b] {
        assert_eq!(n.dev.stats().dropped(DropReason::Filtered), 1, "{:?}", n.dev);
    }
}

#[test]
fn held_packets_go_to_where_they_were_sent() {
    let (mut a, mut b) = (Node::new("127.0.0.1", 1), Node::new("127.0.0.1", 16));
    let mut c = Node::new("127.0.0.1", 16);
    let (to_b, to_c) = (a.ah(&b), a.ah(&c));
    a.dev.tx_filter().set(Some(Box::new(|_| FilterVerdict::Hold)));
    a.post(&to_b, b.qp.qpn(), QKEY, b"b");
    a.post(&to_c, c.qp.qpn(), QKEY, b"c");
    a.qp.ring();
    assert_eq!((a.dev.tx_filter().held(), a.dev.stats().tx_packets), (2, 0));
    a.dev.tx_filter().set(None);
    a.qp.ring();
    assert_eq!(payload_of(&b.receive(1)[0]), b"b");
    assert_eq!(payload_of(&c.receive(1)[0]), b"c");
}

#[test]
fn default_devices_have_addresses_of_their_own() {
    let a = SoftDevice::open(&SoftConfig::default()).unwrap();
    let b = SoftDevice::open(&SoftConfig::default()).unwrap();
    assert_ne!(a.local_addr(), b.local_addr());
    assert!(a.gid().is_loopback() && b.gid().is_loopback());
    assert_eq!(a.identity().host_id, b.identity().host_id);
    assert!(a.identity().rx_budget > 100_000);
    let attr = a.attr();
    assert_eq!((attr.name.as_str(), attr.port_count, attr.ah_create_sleeps), ("soft0", 1, false));
    let gids = a.query_gids(1).unwrap();
    assert_eq!((gids.len(), gids[0].index, gids[0].gid), (1, 0, a.gid()));
    assert_eq!(gids[0].netdev.as_deref(), Some("lo"));
    assert!(a.query_port(2).is_err() && a.query_gids(0).is_err());
    let (mut a, mut b) = (Node::on(&a, 1), Node::on(&b, 1));
    let ah = a.ah(&b);
    a.post(&ah, b.qp.qpn(), QKEY, b"hello");
    a.qp.ring();
    assert_eq!(payload_of(&b.receive(1)[0]), b"hello");
}

#[test]
fn traffic_class_is_accepted_and_runs_keep_it() {
    for bind in ["127.0.0.1", "::1"] {
        let (mut a, mut b) = (Node::new(bind, 1), Node::new(bind, 8));
        let mut attr = a.ah_attr(&b);
        if let Some(g) = &mut attr.grh {
            g.traffic_class = 0x68;
        }
        let ah = a.dev.create_ah(&attr).unwrap();
        for n in [1, 4] {
            for i in 0..n {
                a.post(&ah, b.qp.qpn(), QKEY, &[i]);
            }
            a.qp.ring();
            b.receive(usize::from(n));
        }
        assert_eq!(a.dev.wire_stats().send_errors, 0);
    }
}

#[test]
fn a_send_to_nowhere_completes_and_is_counted() {
    // No route for TEST-NET from loopback: the kernel says EINVAL or ENETUNREACH.
    let (mut a, b) = (Node::new("127.0.0.1", 1), Node::new("127.0.0.1", 1));
    let mut attr = a.ah_attr(&b);
    if let Some(g) = &mut attr.grh {
        g.dgid = Gid::from_ip("192.0.2.1".parse().unwrap());
    }
    let ah = a.dev.create_ah(&attr).unwrap();
    for i in 0..4u8 {
        a.post(&ah, b.qp.qpn(), QKEY, &[i]);
    }
    a.qp.ring();
    let s = a.dev.stats();
    assert_eq!((s.tx_packets, s.dropped(DropReason::TxFailed) + s.dropped(DropReason::NoRoute)), (0, 4), "{s}");
    assert!(a.dev.wire_stats().gso, "an address that does not work is no reason to give up on runs");
}

#[test]
fn unregistered_memory_fails_the_send() {
    let (mut a, b) = (Node::new("127.0.0.1", 1), Node::new("127.0.0.1", 1));
    let ah = a.ah(&b);
    let buf = Buf::alloc(100).unwrap();
    let sges = [Sge { bytes: &buf, lkey: 12345 }];
    let wr = SendWr {
        serial: 1,
        ah: &ah,
        remote_qpn: b.qp.qpn(),
        remote_qkey: QKEY,
        sges: &sges,
        inline: false,
        signaled: true,
        solicited: false,
    };
    a.qp.post_send(&wr).unwrap();
    let mut out = Vec::new();
    a.qp.poll_send(&mut out, 1);
    assert_eq!(out[0].status, WcStatus::LocalProtection);
    assert_eq!(a.qp.state(), QpState::Error);
}

#[test]
fn what_the_kernel_drops_is_counted() {
    const SENT: u64 = 200;
    let mut a = Node::on(
        &SoftDevice::open(&SoftConfig { gso: false, port: Some(0), ..SoftConfig::at("127.0.0.1".parse().unwrap()) })
            .unwrap(),
        1,
    );
    let small = SoftConfig { rcvbuf: Some(100_000), port: Some(0), ..SoftConfig::at("127.0.0.1".parse().unwrap()) };
    let mut b = Node::on(&SoftDevice::open(&small).unwrap(), 256);
    assert_eq!(b.dev.identity().rx_budget, 100_000);
    let ah = a.ah(&b);
    let buf = registered(&a.dev, 4096);
    for _ in 0..SENT {
        a.post_long(&ah, b.qp.qpn(), &buf, 4096);
    }
    a.qp.ring();
    let mut out = Vec::new();
    while b.qp.poll_recv(&mut out, 64) > 0 {}
    let got = out.len() as u64;
    assert!(got > 0 && got < SENT, "{got}");
    // The kernel tells with the first message behind the gap.
    a.post_long(&ah, b.qp.qpn(), &buf, 0);
    a.qp.ring();
    b.receive(1);
    assert_eq!(b.dev.stats().dropped(DropReason::RxOverflow), SENT - got, "{:?}", b.dev);
}

#[test]
fn a_device_that_cannot_be_opened_says_what_to_change() {
    let cfg = SoftConfig { pcap: Some("/nonexistent/x.pcap".into()), ..SoftConfig::default() };
    let text = SoftDevice::open(&cfg).unwrap_err().to_string();
    assert!(text.contains("UCX_SOFT_PCAP=/nonexistent/x.pcap"), "{text}");
    let cfg = SoftConfig { bind: ib::soft::SoftBind::Netdev("nosuch0".into()), ..SoftConfig::default() };
    let text = SoftDevice::open(&cfg).unwrap_err().to_string();
    assert!(text.contains("UCX_SOFT_NETDEV=nosuch0") && text.contains("lo: "), "{text}");
}

#[test]
fn the_receive_posted_last_is_filled_first_and_messages_keep_their_order() {
    let (mut a, mut b) = (Node::new("127.0.0.1", 1), Node::new("127.0.0.1", 16));
    let ah = a.ah(&b);
    let mut hot = None;
    for i in 0..5u8 {
        a.post(&ah, b.qp.qpn(), QKEY, &[i]);
        a.qp.ring();
        let done = b.receive(1);
        assert_eq!(payload_of(&done[0]), [i]);
        assert_eq!(*hot.get_or_insert(done[0].buf.index()), done[0].buf.index());
        b.recycle(done);
    }
    for i in 0..16u8 {
        a.post(&ah, b.qp.qpn(), QKEY, &[i]);
    }
    a.qp.ring();
    let got: Vec<u8> = b.receive(16).iter().map(|wc| payload_of(wc)[0]).collect();
    assert_eq!(got, (0..16).collect::<Vec<u8>>());
}

#[test]
fn sleepers_on_one_socket_are_always_woken() {
    // Two threads sleep on queue pairs of one device, so that either may drain the socket just before the other sleeps.
    const ROUNDS: usize = 1000;
    let dev = device("127.0.0.1");
    let mut a = Node::new("127.0.0.1", 64);
    let mut sleepers: Vec<Node> = (0..2).map(|_| Node::on(&dev, 64)).collect();
    let ah = a.ah(&sleepers[0]);
    let qpns: Vec<Qpn> = sleepers.iter().map(|n| n.qp.qpn()).collect();
    std::thread::scope(|s| {
        for n in &mut sleepers {
            let back = n.ah(&a);
            let to = a.qp.qpn();
            s.spawn(move || {
                let fd = n.qp.event_fd().unwrap();
                let (mut seen, mut out) = (0, Vec::new());
                while seen < ROUNDS {
                    while n.qp.poll_recv(&mut out, 8) > 0 {}
                    for wc in std::mem::take(&mut out) {
                        seen += 1;
                        n.recycle(vec![wc]);
                        n.post(&back, to, QKEY, b"awake");
                        n.qp.ring();
                    }
                    if seen < ROUNDS && n.qp.arm(ArmFor::RECV).unwrap() == ArmResult::Armed {
                        assert!(readable(fd, PATIENCE.as_millis() as i32), "asleep with {seen} of {ROUNDS} messages");
                    }
                }
            });
        }
        for round in 0..ROUNDS {
            // In turns first for the one and first for the other.
            for i in 0..2 {
                a.post(&ah, qpns[(round + i) % 2], QKEY, b"wake up");
            }
            a.qp.ring();
            let done = a.receive(2);
            a.recycle(done);
        }
    });
    assert_eq!(dev.stats().dropped_total(), 0, "{dev:?}");
}
