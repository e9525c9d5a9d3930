//! Two or three devices, posts by hand, and time by hand.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use proptest::prelude::*;
use uct::{
    mem::{Arena, ArenaLayout, Buf},
    time::{Clock, ManualClock, Time},
};

use super::*;
use crate::{
    device::{
        Access, AhAttr, ArmFor, ArmResult, AsyncEvent, Device, GRH_LEN, GlobalRoute, MrKeys, QpInit, QpState, RecvWc,
        RoceVersion, SendWc, SendWr, Sge, SoftAv, SoftIdentity, UdQp, VerbsError, WcStatus,
    },
    sw::{DropReason, FilterVerdict, grh},
    types::{Gid, Lid, Mtu, QKey, Qpn},
};

const INIT: QpInit =
    QpInit { port: 1, pkey_index: 0, qkey: QKey::UCX, send_depth: 16, recv_depth: 64, send_sge: 2, inline_len: 64 };

fn net(seed: u64) -> Arc<SimNet> {
    SimNet::new(seed, Arc::new(ManualClock::new(Time::ZERO)))
}

fn cfg(ip: &str) -> SimConfig {
    SimConfig::new(ip, ip.parse().unwrap())
}

fn gid(ip: &str) -> Gid {
    Gid::from_ip(ip.parse().unwrap())
}

fn attr(from: &SimDevice, to: Gid) -> AhAttr {
    let grh = GlobalRoute { dgid: to, sgid: from.gid(), hop_limit: 64, traffic_class: 0, flow_label: 0 };
    AhAttr { port: 1, sl: 0, src_path_bits: 0, static_rate: 0, dlid: Lid(0), grh: Some(grh), soft: SoftAv::default() }
}

/// A device with one queue pair, as a transport would hold it.
struct Host {
    dev: Arc<SimDevice>,
    qp: SimQp,
    arena: Arc<Arena>,
    keys: MrKeys,
    tx: Buf,
    serial: u64,
}

impl Host {
    fn new(net: &Arc<SimNet>, cfg: SimConfig) -> Host {
        Self::on(net.add_device(cfg))
    }

    fn on(dev: Arc<SimDevice>) -> Host {
        let mut qp = dev.create_ud_qp(&INIT).unwrap();
        let (arena, mut bufs) =
            Arena::new(ArenaLayout { count: 33, len: 256, front: 0, align: 64, align_offset: 0 }).unwrap();
        let keys = dev.reg_mr(arena.block(), Access::LOCAL_WRITE).unwrap();
        arena.set_lkey(keys.lkey);
        let tx = bufs.pop().unwrap();
        qp.post_recv(&mut bufs).unwrap();
        assert!(bufs.is_empty());
        Host { dev, qp, arena, keys, tx, serial: 0 }
    }

    fn ah(&self, to: &Host) -> SimAh {
        self.dev.create_ah(&attr(&self.dev, to.dev.gid())).unwrap()
    }

    /// Sends one byte, signaled, through the registered buffer.
    fn send(&mut self, ah: &SimAh, to: Qpn, byte: u8) {
        self.tx[0] = byte;
        self.serial += 1;
        let sges = [Sge { bytes: &self.tx[..1], lkey: self.tx.lkey() }];
        let wr = SendWr {
            serial: self.serial,
            ah,
            remote_qpn: to,
            remote_qkey: QKey::UCX,
            sges: &sges,
            inline: false,
            signaled: true,
            solicited: byte == 255,
        };
        self.qp.post_send(&wr).unwrap();
    }

    fn received(&mut self) -> Vec<u8> {
        self.polled().iter().map(|w| w.buf[GRH_LEN]).collect()
    }

    fn polled(&mut self) -> Vec<RecvWc> {
        let mut out = Vec::new();
        self.qp.poll_recv(&mut out, usize::MAX);
        out
    }

    fn completions(&mut self) -> Vec<(u64, WcStatus)> {
        let mut out: Vec<SendWc> = Vec::new();
        self.qp.poll_send(&mut out, usize::MAX);
        out.into_iter().map(|w| (w.serial, w.status)).collect()
    }

    /// Destroys everything and checks that it is gone.
    fn close(self, ahs: impl IntoIterator<Item = SimAh>) {
        drop(self.qp);
        drop(self.tx);
        for ah in ahs {
            self.dev.destroy_ah(ah).unwrap();
        }
        self.dev.dereg_mr(self.keys).unwrap();
        assert!(self.dev.live().is_zero(), "{:?}", self.dev.live());
        assert_eq!(self.dev.violations(), [""; 0]);
        assert_eq!(Arc::strong_count(&self.arena), 1, "a receive buffer got lost");
    }
}

fn pair(net: &Arc<SimNet>) -> (Host, Host) {
    (Host::new(net, cfg("10.0.0.1")), Host::new(net, cfg("10.0.0.2")))
}

fn run(net: &SimNet) {
    net.run_for(Duration::from_secs(1));
}

#[test]
fn a_packet_arrives_at_its_time_with_a_grh() {
    let net = net(1);
    let (mut a, mut b) = pair(&net);
    net.set_faults(Faults { delay_ns: 500, ..Faults::default() });
    let ah = a.ah(&b);
    a.send(&ah, b.qp.qpn(), 255);
    assert_eq!(a.completions(), [(1, WcStatus::Success)], "copied, so complete");
    assert_eq!(net.next_event(), Some(Time::from_nanos(500)));
    assert_eq!(net.run_until(Time::from_nanos(499)), 0);
    assert!(b.polled().is_empty());
    assert!(net.step() && !net.step());
    assert_eq!(net.now(), Time::from_nanos(500));
    let got = b.polled();
    assert_eq!((got[0].byte_len, got[0].src_qpn, got[0].grh, got[0].solicited), (41, a.qp.qpn(), true, true));
    assert_eq!(grh::gids(got[0].buf[..40].try_into().unwrap()), Some((gid("10.0.0.1"), gid("10.0.0.2"))));
    assert_eq!(got[0].buf[GRH_LEN], 255);
    assert_eq!((a.dev.stats().tx_packets, b.dev.stats().rx_packets), (1, 1));
    drop(got);
    a.close([ah]);
    b.close([]);
    assert_eq!(net.leaks(), [""; 0]);
}

#[test]
fn faults_do_what_they_say() {
    let f = Faults::default();
    let always = 1_000_000;
    for (faults, arrive, tx_drop, rx_drop) in [
        (f, 1, None, None),
        (Faults { loss_ppm: always, ..f }, 0, Some(DropReason::Loss), None),
        (Faults { partition: true, ..f }, 0, Some(DropReason::Partition), None),
        (Faults { corrupt_ppm: always, ..f }, 0, Some(DropReason::Icrc), None),
        (Faults { dup_ppm: always, ..f }, 2, None, None),
        (Faults { no_receive_ppm: always, ..f }, 0, None, Some(DropReason::NoReceive)),
    ] {
        let net = net(2);
        let (mut a, mut b) = pair(&net);
        // As the faults of one direction: the other one works.
        net.set_link_faults(a.dev.node(), b.dev.node(), Some(faults));
        let (ab, ba) = (a.ah(&b), b.ah(&a));
        a.send(&ab, b.qp.qpn(), 1);
        b.send(&ba, a.qp.qpn(), 2);
        run(&net);
        assert_eq!(b.received(), vec![1; arrive], "{faults:?}");
        assert_eq!(a.received(), [2]);
        let all = |d: &SimDevice| d.stats().drops().collect::<Vec<_>>();
        assert_eq!(all(&a.dev), tx_drop.map(|w| (w, 1)).into_iter().collect::<Vec<_>>());
        assert_eq!(all(&b.dev), rx_drop.map(|w| (w, 1)).into_iter().collect::<Vec<_>>());
        net.set_link_faults(a.dev.node(), b.dev.node(), None);
        a.send(&ab, b.qp.qpn(), 3);
        run(&net);
        assert_eq!(b.received(), [3]);
    }
}

#[test]
fn corruption_passes_on_request() {
    let net = net(3);
    let (mut a, mut b) = pair(&net);
    net.set_faults(Faults { corrupt_ppm: 1_000_000, corrupt_passes: true, ..Faults::default() });
    let ah = a.ah(&b);
    a.send(&ah, b.qp.qpn(), 0);
    run(&net);
    assert_eq!(b.received()[0].count_ones(), 1);
}

#[test]
fn jitter_reorders_and_one_seed_gives_one_run() {
    let run_once = |seed| {
        let net = net(seed);
        net.set_trace_max(1000);
        let (mut a, mut b) = pair(&net);
        net.set_faults(Faults { loss_ppm: 100_000, dup_ppm: 100_000, jitter_ns: 5_000, ..Faults::default() });
        let ah = a.ah(&b);
        for n in 0..16 {
            a.send(&ah, b.qp.qpn(), n);
        }
        run(&net);
        (b.received(), net.report())
    };
    let (bytes, report) = run_once(4);
    assert_eq!(run_once(4), (bytes.clone(), report));
    assert_ne!(run_once(5).0, bytes);
    assert!(!bytes.is_sorted(), "{bytes:?}");
}

#[test]
fn without_jitter_the_order_is_kept_and_reordering_is_by_choice() {
    let net = net(6);
    let (mut a, mut b) = pair(&net);
    let ah = a.ah(&b);
    for n in 0..10 {
        a.send(&ah, b.qp.qpn(), n);
    }
    run(&net);
    assert_eq!(b.received(), (0..10).collect::<Vec<_>>());
    net.set_faults(Faults { reorder_ppm: 1_000_000, ..net.faults() });
    a.send(&ah, b.qp.qpn(), 10);
    net.set_faults(Faults { reorder_ppm: 0, ..net.faults() });
    a.send(&ah, b.qp.qpn(), 11);
    run(&net);
    assert_eq!(b.received(), [11, 10]);
}

#[test]
fn late_sends_read_the_buffer_late_and_complete_then() {
    let net = net(7);
    let mut a = Host::new(&net, SimConfig { late_sends: Some((100, 200)), ..cfg("10.0.0.1") });
    let mut b = Host::new(&net, cfg("10.0.0.2"));
    assert!(!a.qp.caps().copies_sends && b.qp.caps().copies_sends);
    let ah = a.ah(&b);
    a.send(&ah, b.qp.qpn(), 1);
    // What a transport must not do: the buffer is reused before the completion. The device shows it.
    a.send(&ah, b.qp.qpn(), 2);
    assert!(a.completions().is_empty());
    net.run_until(Time::from_nanos(99));
    assert!(a.completions().is_empty());
    run(&net);
    assert_eq!(a.completions(), [(1, WcStatus::Success), (2, WcStatus::Success)]);
    assert_eq!(b.received(), [2, 2]);
    // Inline data is safe, though the completion is late.
    let bytes = [9u8];
    let sges = [Sge { bytes: &bytes, lkey: 0 }];
    let (remote_qpn, remote_qkey) = (b.qp.qpn(), QKey::UCX);
    let wr = SendWr {
        serial: 3,
        ah: &ah,
        remote_qpn,
        remote_qkey,
        sges: &sges,
        inline: true,
        signaled: true,
        solicited: false,
    };
    a.qp.post_send(&wr).unwrap();
    a.serial = 3;
    assert!(a.completions().is_empty());
    run(&net);
    assert_eq!((a.completions(), b.received()), (vec![(3, WcStatus::Success)], vec![9]));
    a.close([ah]);
}

#[test]
fn late_sends_notice_memory_that_was_deregistered_too_early() {
    let net = net(8);
    let mut a = Host::new(&net, SimConfig { late_sends: Some((100, 100)), ..cfg("10.0.0.1") });
    let b = Host::new(&net, cfg("10.0.0.2"));
    let ah = a.ah(&b);
    a.send(&ah, b.qp.qpn(), 1);
    a.send(&ah, b.qp.qpn(), 2);
    a.dev.dereg_mr(a.keys).unwrap();
    run(&net);
    assert_eq!(a.completions(), [(1, WcStatus::LocalProtection), (2, WcStatus::WrFlush)]);
    assert_eq!(a.qp.state(), QpState::Error);
}

#[test]
fn a_destroyed_queue_pair_neither_reads_nor_sends() {
    let net = net(9);
    let mut a = Host::new(&net, SimConfig { late_sends: Some((100, 100)), ..cfg("10.0.0.1") });
    let mut b = Host::new(&net, cfg("10.0.0.2"));
    let ah = a.ah(&b);
    a.send(&ah, b.qp.qpn(), 1);
    a.close([ah]);
    run(&net);
    assert!(b.received().is_empty());
    // The other way round: what arrives for a queue pair that is gone.
    let ah = b.dev.create_ah(&attr(&b.dev, gid("10.0.0.1"))).unwrap();
    b.send(&ah, Qpn::truncate(77), 1);
    run(&net);
    assert_eq!(net.trace().last().unwrap().event, TraceEvent::Dropped(DropReason::Gone), "the device was dropped");
}

#[test]
fn a_posted_send_leaves_when_rung_or_when_the_batch_is_full() {
    let net = net(10);
    let mut a = Host::new(&net, SimConfig { send_batch: 3, ..cfg("10.0.0.1") });
    let mut b = Host::new(&net, cfg("10.0.0.2"));
    let ah = a.ah(&b);
    a.send(&ah, b.qp.qpn(), 1);
    a.send(&ah, b.qp.qpn(), 2);
    run(&net);
    assert!(b.received().is_empty() && a.completions().is_empty());
    a.qp.ring();
    run(&net);
    assert_eq!((b.received(), a.completions().len()), (vec![1, 2], 2));
    (3..6).for_each(|n| a.send(&ah, b.qp.qpn(), n));
    run(&net);
    assert_eq!(b.received(), [3, 4, 5]);
}

#[test]
fn address_handles_keep_the_old_link_address() {
    let net = net(11);
    let (mut a, mut b) = pair(&net);
    let old = a.ah(&b);
    let mac = net.fresh_mac();
    b.dev.set_mac(mac, true);
    assert_eq!(a.dev.poll_async_event(), Some(AsyncEvent::NeighbourChange(gid("10.0.0.2"))));
    assert_eq!(a.dev.poll_async_event(), None);
    a.send(&old, b.qp.qpn(), 1);
    run(&net);
    assert!(b.received().is_empty());
    assert_eq!(a.dev.stats().dropped(DropReason::StaleMac), 1);
    let new = a.ah(&b);
    a.send(&new, b.qp.qpn(), 2);
    run(&net);
    assert_eq!(b.received(), [2]);

    // The address moves to a third host: the old handle still leads to the second, which does not own it any more.
    let mut c = Host::new(&net, cfg("10.0.0.3"));
    assert!(b.dev.remove_gid(gid("10.0.0.2")));
    assert_eq!(c.dev.add_gid(gid("10.0.0.2"), RoceVersion::V2), Some(1));
    a.send(&new, b.qp.qpn(), 3);
    run(&net);
    assert_eq!(b.dev.stats().dropped(DropReason::StaleMac), 1);
    let third = a.dev.create_ah(&attr(&a.dev, gid("10.0.0.2"))).unwrap();
    a.send(&third, c.qp.qpn(), 4);
    run(&net);
    assert_eq!((b.received(), c.received()), (vec![], vec![4]));
    a.completions();
    a.close([old, new, third]);
}

#[test]
fn a_lost_gid_kills_the_queue_pair_and_reset_recovers() {
    for late in [None, Some((100, 100))] {
        let net = net(12);
        let mut a = Host::new(&net, SimConfig { late_sends: late, ..cfg("10.0.0.1") });
        let mut b = Host::new(&net, cfg("10.0.0.2"));
        let old = a.ah(&b);
        assert!(a.dev.remove_gid(gid("10.0.0.1")));
        assert_eq!(a.dev.poll_async_event(), Some(AsyncEvent::GidChange(1)));
        a.send(&old, b.qp.qpn(), 1);
        a.send(&old, b.qp.qpn(), 2);
        run(&net);
        assert_eq!(a.qp.state(), QpState::Error);
        assert_eq!(a.qp.reset(), Err(VerbsError::new("modify_qp", libc::EBUSY)));
        assert_eq!(a.completions(), [(1, WcStatus::LocalQpOp), (2, WcStatus::WrFlush)]);
        let mut flushed = a.polled();
        assert!(flushed.len() == 32 && flushed.iter().all(|w| w.status == WcStatus::WrFlush));
        assert_eq!(
            a.dev.create_ah(&attr(&b.dev, gid("10.0.0.2"))).err().map(|e| e.errno),
            Some(libc::ENODATA),
            "not my GID"
        );
        a.dev.add_gid(gid("10.0.0.1"), RoceVersion::V2);
        a.qp.reset().unwrap();
        a.qp.post_recv(&mut flushed.drain(..).map(|w| w.buf).collect()).unwrap();
        let new = a.ah(&b);
        a.send(&new, b.qp.qpn(), 3);
        run(&net);
        assert_eq!((a.completions(), b.received()), (vec![(3, WcStatus::Success)], vec![3]));
        let back = b.ah(&a);
        b.send(&back, a.qp.qpn(), 4);
        run(&net);
        assert_eq!(a.received(), [4]);
        a.close([old, new]);
    }
}

#[test]
fn pending_late_sends_are_flushed_when_the_queue_pair_dies() {
    let net = net(13);
    let mut a = Host::new(&net, SimConfig { late_sends: Some((1_000, 1_000)), ..cfg("10.0.0.1") });
    let mut b = Host::new(&net, cfg("10.0.0.2"));
    let ah = a.ah(&b);
    (1..4).for_each(|n| a.send(&ah, b.qp.qpn(), n));
    a.dev.fail_qps();
    assert_eq!(a.completions().iter().map(|c| c.1).collect::<Vec<_>>(), [WcStatus::WrFlush; 3]);
    a.polled();
    a.qp.reset().unwrap();
    a.send(&ah, b.qp.qpn(), 9);
    run(&net);
    assert_eq!((b.received(), a.completions()), (vec![9], vec![(4, WcStatus::Success)]), "old ones do not come back");
}

#[test]
fn scripted_address_handle_failures() {
    let net = net(14);
    let (a, b) = pair(&net);
    let to = attr(&a.dev, b.dev.gid());
    let errno = || a.dev.create_ah(&to).map(|ah| a.dev.destroy_ah(ah)).err().map(|e| e.errno);
    a.dev.script_ah(AhScript { dgid: Some(gid("10.9.9.9")), errno: libc::EINVAL, times: None });
    assert_eq!(errno(), None, "another destination");
    a.dev.script_ah(AhScript { dgid: Some(b.dev.gid()), errno: libc::ETIMEDOUT, times: Some(2) });
    a.dev.script_ah(AhScript { dgid: None, errno: libc::EIO, times: Some(1) });
    let got: Vec<_> = (0..4).map(|_| errno()).collect();
    assert_eq!(got, [Some(libc::ETIMEDOUT), Some(libc::ETIMEDOUT), Some(libc::EIO), None]);
    // Not on the network at all.
    assert_eq!(
        a.dev.create_ah(&attr(&a.dev, gid("10.0.0.99"))).err(),
        Some(VerbsError::new("create_ah", libc::ETIMEDOUT))
    );
    // The limit.
    a.dev.set_ah_max(1);
    assert_eq!(a.dev.attr().ah_max, 1);
    let first = a.dev.create_ah(&to).unwrap();
    assert_eq!(errno(), Some(libc::ENOMEM));
    a.dev.destroy_ah(first).unwrap();
    assert_eq!(errno(), None);
    assert_eq!(a.dev.live().ahs, 0);
}

#[test]
fn destroying_an_address_handle_in_use_is_noticed() {
    let net = net(15);
    // A device that copies needs nothing after the post; one that reads late needs the address handle until the poll.
    let mut a = Host::new(&net, SimConfig { late_sends: Some((100, 100)), ..cfg("10.0.0.1") });
    let b = Host::new(&net, cfg("10.0.0.2"));
    let (ah, idle) = (a.ah(&b), a.ah(&b));
    a.send(&ah, b.qp.qpn(), 1);
    a.dev.destroy_ah(idle).unwrap();
    assert!(a.dev.violations().is_empty());
    a.dev.destroy_ah(ah).unwrap();
    assert_eq!(a.dev.violations().len(), 1);
    assert!(a.dev.violations()[0].contains("before send 1"), "{:?}", a.dev.violations());
    // After the poll it is fine.
    let ah = a.ah(&b);
    a.send(&ah, b.qp.qpn(), 2);
    run(&net);
    a.completions();
    a.dev.destroy_ah(ah).unwrap();
    assert_eq!(a.dev.violations().len(), 1);

    let (mut a, b) = pair(&net);
    let ah = a.ah(&b);
    a.send(&ah, b.qp.qpn(), 1);
    a.dev.destroy_ah(ah).unwrap();
    assert!(a.dev.violations().is_empty());
}

#[test]
fn a_crashed_peer_is_silent_and_its_successor_has_its_address() {
    let net = net(16);
    let (mut a, mut b) = pair(&net);
    let (ab, ba) = (a.ah(&b), b.ah(&a));
    a.send(&ab, b.qp.qpn(), 1);
    b.send(&ba, a.qp.qpn(), 2);
    net.crash(b.dev.node());
    b.send(&ba, a.qp.qpn(), 3);
    a.send(&ab, b.qp.qpn(), 4);
    run(&net);
    assert_eq!((a.received(), b.received()), (vec![2], vec![]), "what had left arrives");
    let (qpn, mac) = (b.qp.qpn(), b.dev.mac());
    let mut b2 = Host::on(net.restart(&b.dev));
    assert_eq!((b2.qp.qpn(), b2.dev.mac(), b2.dev.gid()), (qpn, mac, b.dev.gid()));
    a.send(&ab, qpn, 5);
    run(&net);
    assert_eq!((b2.received(), b.received()), (vec![5], vec![]));
}

#[test]
fn devices_of_one_host_share_a_gid_and_differ_by_port() {
    let net = net(17);
    let soft = |udp_port| Some(SoftIdentity { udp_port, host_id: 5, rx_budget: 100 });
    let mut a = Host::new(&net, SimConfig { soft: soft(4791), ..cfg("127.0.0.1") });
    let mut b = Host::new(&net, SimConfig { soft: soft(5000), ..cfg("127.0.0.1") });
    assert_eq!(a.dev.mac(), b.dev.mac());
    let mut to_b = attr(&a.dev, b.dev.gid());
    assert_eq!(a.dev.create_ah(&to_b).err().map(|e| e.errno), Some(libc::ENETUNREACH), "loopback of another host");
    to_b.soft = SoftAv { udp_port: 5000, host_id: 5 };
    let to_a = AhAttr { soft: SoftAv { udp_port: 0, host_id: 5 }, ..to_b };
    let (ab, aa) = (a.dev.create_ah(&to_b).unwrap(), a.dev.create_ah(&to_a).unwrap());
    let (qa, qb) = (a.qp.qpn(), b.qp.qpn());
    a.send(&ab, qb, 1);
    a.send(&aa, qa, 2);
    run(&net);
    assert_eq!((b.received(), a.received()), (vec![1], vec![2]));
}

#[test]
fn infiniband_finds_its_way_by_lid() {
    let net = net(18);
    let mut a = Host::new(&net, SimConfig::infiniband("a", 1));
    let mut b = Host::new(&net, SimConfig::infiniband("b", 2));
    let by_lid = AhAttr { grh: None, dlid: Lid(2), ..attr(&a.dev, b.dev.gid()) };
    let ah = a.dev.create_ah(&by_lid).unwrap();
    a.send(&ah, b.qp.qpn(), 1);
    run(&net);
    let got = b.polled();
    assert!(!got[0].grh && got[0].buf[..40] == [0; 40]);
    let global = a.dev.create_ah(&AhAttr { dlid: Lid(2), ..attr(&a.dev, b.dev.gid()) }).unwrap();
    a.send(&global, b.qp.qpn(), 2);
    run(&net);
    assert!(b.polled()[0].grh);
    b.dev.set_lid(Lid(7));
    assert_eq!(b.dev.poll_async_event(), Some(AsyncEvent::LidChange(1)));
    a.send(&ah, b.qp.qpn(), 3);
    run(&net);
    assert!(b.received().is_empty());
}

#[test]
fn long_messages_follow_verbs() {
    let net = net(19);
    let (mut a, mut b) = pair(&net);
    let ah = a.ah(&b);
    let send = |a: &mut Host, len| {
        a.serial += 1;
        let sges = [Sge { bytes: &a.tx[..len], lkey: a.tx.lkey() }];
        let wr = SendWr {
            serial: a.serial,
            ah: &ah,
            remote_qpn: b.qp.qpn(),
            remote_qkey: QKey::UCX,
            sges: &sges,
            inline: false,
            signaled: true,
            solicited: false,
        };
        a.qp.post_send(&wr).unwrap();
    };
    // Above the sender's MTU: success, and nothing leaves.
    a.dev.set_mtu(Mtu::M256);
    send(&mut a, 256);
    assert_eq!(a.dev.stats().tx_packets, 1);
    let big = vec![0; 300];
    let block = [Sge { bytes: &big, lkey: a.tx.lkey() }];
    let wr = SendWr {
        serial: 2,
        ah: &ah,
        remote_qpn: b.qp.qpn(),
        remote_qkey: QKey::UCX,
        sges: &block,
        inline: true,
        signaled: true,
        solicited: false,
    };
    assert!(a.qp.post_send(&wr).is_err(), "inline above the limit");
    // Above the receiver's buffer of 216 bytes: its queue pair dies.
    run(&net);
    assert_eq!(b.qp.state(), QpState::Error);
    let statuses: Vec<_> = b.polled().iter().map(|w| w.status).collect();
    assert_eq!((statuses[0], statuses[1], statuses.len()), (WcStatus::LocalQpOp, WcStatus::WrFlush, 32));
}

#[test]
fn filters_hold_and_release() {
    let net = net(20);
    let (mut a, mut b) = pair(&net);
    let ah = a.ah(&b);
    let qpn = b.qp.qpn();
    a.dev.set_tx_filter(Some(Box::new(|p| match p.payload[0] {
        1 => FilterVerdict::Drop,
        2 => FilterVerdict::Hold,
        3 => FilterVerdict::Duplicate,
        _ => FilterVerdict::Pass,
    })));
    (1..5).for_each(|n| a.send(&ah, qpn, n));
    run(&net);
    assert_eq!(b.received(), [3, 3, 4]);
    a.dev.release_held();
    run(&net);
    assert_eq!((b.received(), a.dev.stats().dropped(DropReason::Filtered)), (vec![2], 1));
    a.dev.set_tx_filter(None);
    b.dev.set_rx_filter(Some(Box::new(|p| match p.payload[0] {
        1 => FilterVerdict::Drop,
        2 => FilterVerdict::Swap,
        _ => FilterVerdict::Pass,
    })));
    (1..5).for_each(|n| a.send(&ah, qpn, n));
    run(&net);
    assert_eq!((b.received(), b.dev.stats().dropped(DropReason::Filtered)), (vec![3, 2, 4], 1));
}

#[test]
fn arming_wakes_for_receives_and_late_sends() {
    let net = net(21);
    let mut a = Host::new(&net, SimConfig { late_sends: Some((100, 100)), ..cfg("10.0.0.1") });
    let mut b = Host::new(&net, SimConfig { events: false, ..cfg("10.0.0.2") });
    assert_eq!(b.qp.arm(ArmFor::RECV), Err(VerbsError::new("req_notify_cq", libc::EOPNOTSUPP)));
    assert!(b.qp.event_fd().is_none());
    let readable = |h: &Host| crate::sw::event::is_readable(h.qp.event_fd().unwrap());
    let (ab, ba) = (a.ah(&b), b.ah(&a));
    assert_eq!(a.qp.arm(ArmFor::RECV | ArmFor::SEND), Ok(ArmResult::Armed));
    b.send(&ba, a.qp.qpn(), 1);
    assert!(!readable(&a));
    run(&net);
    assert!(readable(&a));
    assert_eq!(a.qp.arm(ArmFor::RECV), Ok(ArmResult::Busy));
    a.received();
    a.send(&ab, b.qp.qpn(), 1);
    assert_eq!(a.qp.arm(ArmFor::SEND), Ok(ArmResult::Armed));
    run(&net);
    assert!(readable(&a));
    assert_eq!(a.qp.arm(ArmFor::SEND), Ok(ArmResult::Busy));
}

#[test]
fn a_dead_device_says_so() {
    let net = net(22);
    let (mut a, b) = pair(&net);
    let ah = a.ah(&b);
    a.dev.set_fatal();
    assert_eq!(a.dev.poll_async_event(), Some(AsyncEvent::DeviceFatal));
    assert_eq!(a.qp.state(), QpState::Error);
    a.send(&ah, b.qp.qpn(), 1);
    assert_eq!(a.completions(), [(1, WcStatus::WrFlush)]);
    let eio = |call| Some(VerbsError::new(call, libc::EIO));
    assert_eq!(a.dev.create_ah(&attr(&a.dev, b.dev.gid())).err(), eio("create_ah"));
    assert_eq!(a.dev.create_ud_qp(&INIT).err(), eio("create_qp"));
    assert_eq!(a.qp.reset().err(), eio("modify_qp"));
    assert_eq!(a.dev.destroy_ah(ah).err(), eio("destroy_ah"));
    assert_eq!(a.dev.live().ahs, 0, "gone all the same");
}

#[test]
fn a_port_that_is_down_loses_silently() {
    let net = net(23);
    let (mut a, mut b) = pair(&net);
    let ah = a.ah(&b);
    a.dev.set_port_active(false);
    a.send(&ah, b.qp.qpn(), 1);
    a.dev.set_port_active(true);
    b.dev.set_port_active(false);
    a.send(&ah, b.qp.qpn(), 2);
    run(&net);
    assert_eq!(a.completions(), [(1, WcStatus::Success), (2, WcStatus::Success)]);
    assert!(b.received().is_empty());
    for h in [&a, &b] {
        assert_eq!(h.dev.stats().dropped(DropReason::PortDown), 1);
    }
    assert_eq!(b.dev.poll_async_event(), Some(AsyncEvent::PortError(1)));
}

#[test]
fn limits_of_queue_pairs_and_foreign_handles() {
    let net = net(24);
    let (mut a, b) = pair(&net);
    for init in [QpInit { send_sge: 5, ..INIT }, QpInit { send_depth: 1 << 20, ..INIT }, QpInit { port: 2, ..INIT }] {
        assert_eq!(a.dev.create_ud_qp(&init).err(), Some(VerbsError::new("create_qp", libc::EINVAL)));
    }
    let generous = a.dev.create_ud_qp(&QpInit { inline_len: 1000, ..INIT }).unwrap();
    assert_eq!(generous.caps().inline_len, 64);
    drop(generous);
    assert!(a.dev.query_port(0).is_err() && a.dev.query_gids(2).is_err());
    let foreign = b.ah(&a);
    let wr = SendWr {
        serial: 1,
        ah: &foreign,
        remote_qpn: b.qp.qpn(),
        remote_qkey: QKey::UCX,
        sges: &[],
        inline: true,
        signaled: true,
        solicited: false,
    };
    assert_eq!(a.qp.post_send(&wr), Err(VerbsError::new("post_send", libc::EINVAL)));
    let many: Vec<_> = (0..2000).map_while(|_| a.dev.create_ud_qp(&INIT).ok()).collect();
    assert_eq!(many.len(), 1023);
    assert_eq!(a.dev.create_ud_qp(&INIT).err(), Some(VerbsError::new("create_qp", libc::ENOMEM)));
    drop(many);
    assert_eq!(a.dev.live().qps, 1);
}

#[test]
fn registrations_can_be_refused_for_a_while() {
    let net = net(1);
    let (a, b) = pair(&net);
    a.dev.refuse_registrations(true);
    let layout = ArenaLayout { count: 1, len: 64, front: 0, align: 64, align_offset: 0 };
    let (arena, _bufs) = Arena::new(layout).unwrap();
    let refused = a.dev.reg_mr(arena.block(), Access::LOCAL_WRITE).unwrap_err();
    assert_eq!((refused.call, refused.errno), ("reg_mr", libc::ENOMEM));
    assert_eq!(a.dev.live().mrs, 1, "what there was stays");
    b.dev.dereg_mr(b.dev.reg_mr(arena.block(), Access::LOCAL_WRITE).unwrap()).unwrap();
    a.dev.refuse_registrations(false);
    a.dev.dereg_mr(a.dev.reg_mr(arena.block(), Access::LOCAL_WRITE).unwrap()).unwrap();
    a.close([]);
    b.close([]);
}

#[test]
fn a_tap_sees_whole_packets_until_it_is_taken_away() {
    let net = net(1);
    let (mut a, b) = pair(&net);
    let seen = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let tap = seen.clone();
    net.set_tap(Some(Box::new(move |p| tap.lock().push((p.src, p.dst, p.payload.to_vec(), p.event)))));
    let ah = a.ah(&b);
    a.send(&ah, b.qp.qpn(), 7);
    run(&net);
    net.set_tap(None);
    assert_eq!(Arc::strong_count(&seen), 1, "it was dropped");
    a.send(&ah, b.qp.qpn(), 8);
    run(&net);
    let (from, to) = (a.dev.node(), Some(b.dev.node()));
    let expected = [TraceEvent::Sent, TraceEvent::Delivered].map(|event| (from, to, vec![7], event));
    assert_eq!(*seen.lock(), expected);
    a.close([ah]);
    b.close([]);
}

#[test]
fn the_report_names_the_packets() {
    let net = net(25);
    let (mut a, b) = pair(&net);
    let ah = a.ah(&b);
    net.set_trace_max(2);
    net.set_formatter(Some(Arc::new(|head| format!("byte {}", head[0]))));
    for n in 1..4 {
        a.send(&ah, b.qp.qpn(), n);
    }
    net.set_faults(Faults { partition: true, ..Faults::default() });
    a.send(&ah, b.qp.qpn(), 4);
    let report = net.report();
    let lines: Vec<_> = report.lines().collect();
    assert_eq!(lines.len(), 3, "{report}");
    assert!(lines[0].starts_with("seed 25,"));
    assert!(
        lines[1].contains("10.0.0.1 0x")
            && lines[1].contains("-> 10.0.0.2 0x")
            && lines[1].ends_with("1 B sent: byte 4"),
        "{report}"
    );
    assert!(lines[2].ends_with("dropped: partition: byte 4"));
    assert_eq!(net.clock().now(), Time::ZERO);
}

#[derive(Clone, Debug)]
enum Op {
    Send { signaled: bool, inline: bool },
    Ring,
    Time(u64),
    PollSend,
    PollRecv,
    Post,
    Kill,
    LoseGid,
    Reset,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        5 => any::<(bool, bool)>().prop_map(|(signaled, inline)| Op::Send { signaled, inline }),
        1 => Just(Op::Ring),
        3 => (0..400u64).prop_map(Op::Time),
        2 => Just(Op::PollSend),
        2 => Just(Op::PollRecv),
        2 => Just(Op::Post),
        1 => Just(Op::Kill),
        1 => Just(Op::LoseGid),
        2 => Just(Op::Reset),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    /// A queue pair that sends to itself, whatever happens in whatever order: every receive buffer is at home, posted or
    /// gone with the queue pair, and every signaled send completes exactly once, in order.
    #[test]
    fn every_buffer_and_completion_comes_home_once(
        ops in prop::collection::vec(op(), 1..150),
        late in any::<bool>(),
        send_batch in 1..4u32,
        seed in any::<u64>(),
    ) {
        let net = net(seed);
        net.set_faults(Faults { loss_ppm: 100_000, dup_ppm: 100_000, jitter_ns: 500, ..Faults::default() });
        let late_sends = late.then_some((0, 300));
        let mut a = Host::new(&net, SimConfig { late_sends, send_batch, ..cfg("10.0.0.1") });
        let me = a.qp.qpn();
        let own = a.dev.gid();
        let mut ahs = vec![a.dev.create_ah(&attr(&a.dev, own)).unwrap()];
        let (mut home, mut signaled, mut told) = (Vec::new(), Vec::new(), Vec::new());
        for op in ops {
            match op {
                Op::Send { signaled: want, inline } => {
                    let sges = [Sge { bytes: &a.tx[..8], lkey: a.tx.lkey() }];
                    let wr = SendWr {
                        serial: a.serial + 1,
                        ah: ahs.last().unwrap(),
                        remote_qpn: me,
                        remote_qkey: QKey::UCX,
                        sges: &sges,
                        inline,
                        signaled: want,
                        solicited: false,
                    };
                    match a.qp.post_send(&wr) {
                        Ok(()) => {
                            a.serial += 1;
                            if want {
                                signaled.push(a.serial);
                            }
                        }
                        Err(e) => prop_assert_eq!(e.errno, libc::ENOMEM),
                    }
                }
                Op::Ring => a.qp.ring(),
                Op::Time(ns) => {
                    net.run_for(Duration::from_nanos(ns));
                }
                Op::PollSend => told.extend(a.completions()),
                Op::PollRecv => home.extend(a.polled().into_iter().map(|w| w.buf)),
                Op::Post => a.qp.post_recv(&mut home).unwrap(),
                Op::Kill => a.dev.fail_qps(),
                Op::LoseGid => {
                    // The old handle is dead from now on; the new one is for the same GID at another index.
                    a.dev.remove_gid(own);
                    a.dev.add_gid(own, RoceVersion::V2).unwrap();
                    if ahs.len() < 8 {
                        ahs.push(a.dev.create_ah(&attr(&a.dev, own)).unwrap());
                    }
                }
                Op::Reset => {
                    if a.qp.state() == QpState::Error {
                        a.qp.ring();
                        told.extend(a.completions());
                        home.extend(a.polled().into_iter().map(|w| w.buf));
                        a.qp.reset().unwrap();
                    }
                }
            }
        }
        a.qp.ring();
        run(&net);
        told.extend(a.completions());
        home.extend(a.polled().into_iter().map(|w| w.buf));

        let serials: Vec<_> = told.iter().map(|t| t.0).collect();
        prop_assert!(serials.windows(2).all(|w| w[0] < w[1]), "once and in order: {:?}", serials);
        let set: BTreeSet<_> = serials.into_iter().collect();
        prop_assert!(signaled.iter().all(|s| set.contains(s)), "each signaled one");
        let silent_success = told.iter().any(|(s, st)| *st == WcStatus::Success && !signaled.contains(s));
        prop_assert!(!silent_success, "an unsignaled success was told");
        // 32 receive buffers: at home or inside; `close` checks that the inside ones go with the queue pair.
        let mut indexes: Vec<_> = home.iter().map(Buf::index).collect();
        indexes.sort_unstable();
        indexes.dedup();
        prop_assert_eq!(indexes.len(), home.len());
        prop_assert_eq!(Arc::strong_count(&a.arena), 1 + 32 + 1);
        home.clear();
        // The close comes before the last completion of unsignaled sends could be polled, so the queue pair goes first.
        a.close(ahs);
    }
}
