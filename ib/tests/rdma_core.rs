//! Every RDMA device of this machine that works, talking to itself. Without one the tests print `skipped`.
//!
//! On a kernel with soft-RoCE (`rdma link add rxe0 type rxe netdev eth0`) they run against the real driver.
#![cfg(feature = "rdma-core")]

use std::{
    path::Path,
    sync::{Arc, Mutex, MutexGuard, mpsc},
    thread,
    time::{Duration, Instant},
};

use ib::{
    device::{
        Access, AhAttr, ArmFor, ArmResult, Device, GRH_LEN, GidEntry, GlobalRoute, LinkLayer, MrKeys, QpInit, QpState,
        RecvWc, SendWc, SendWr, Sge, SoftAv, UdQp, WcStatus,
    },
    rdma_core::{RdmaAh, RdmaDevice, RdmaQp, devices},
    types::{Gid, Lid, QKey, Qpn},
};
use uct::mem::{Arena, ArenaLayout, Block, Buf};

/// How long a packet to oneself may take before the test fails.
const PATIENCE: Duration = Duration::from_secs(30);

/// Tests take turns: they count completions, and some disturb the device.
static TURN: Mutex<()> = Mutex::new(());

/// Opens every device with an active RoCE or InfiniBand port and runs `test` on it.
fn on_each(name: &str, test: impl Fn(&Arc<RdmaDevice>, u8)) {
    let _turn: MutexGuard<'_, ()> = TURN.lock().unwrap_or_else(|e| e.into_inner());
    let mut ran = 0;
    for found in devices() {
        if let Some(why) = found.unusable {
            println!("{name}: {}: {why}", found.name);
            continue;
        }
        let dev = RdmaDevice::open(&found.name).unwrap();
        for port in 1..=dev.attr().port_count {
            if dev.query_port(port).unwrap().active && !dev.query_gids(port).unwrap().is_empty() {
                println!("{name}: {}:{port}", found.name);
                test(&dev, port);
                ran += 1;
            }
        }
    }
    if ran == 0 {
        println!("{name}: skipped: no RDMA device with an active port");
    }
}

fn init(port: u8) -> QpInit {
    QpInit { port, pkey_index: 0, qkey: QKey::UCX, send_depth: 128, recv_depth: 256, send_sge: 4, inline_len: 64 }
}

/// The GID that the tests use: the last, which on RoCE is the most routable one.
fn own_gid(dev: &RdmaDevice, port: u8) -> GidEntry {
    dev.query_gids(port).unwrap().pop().unwrap()
}

fn attr_to(dev: &RdmaDevice, port: u8, sgid: Gid, dgid: Gid) -> AhAttr {
    let p = dev.query_port(port).unwrap();
    let roce = p.link_layer == LinkLayer::Ethernet;
    AhAttr {
        port,
        sl: 0,
        src_path_bits: 0,
        static_rate: 0,
        dlid: if roce { Lid(0xc000) } else { p.lid },
        grh: Some(GlobalRoute { dgid, sgid, hop_limit: 255, traffic_class: 106, flow_label: 0xffff_ffff }),
        soft: SoftAv::default(),
    }
}

/// A queue pair with registered buffers and a way to itself.
struct Me {
    dev: Arc<RdmaDevice>,
    ah: Option<RdmaAh>,
    qp: Option<RdmaQp>,
    keys: Vec<MrKeys>,
    tx: Vec<Buf>,
    spare: Vec<Buf>,
    serial: u64,
    mtu: usize,
}

impl Me {
    fn new(dev: &Arc<RdmaDevice>, port: u8) -> Me {
        let mtu = dev.query_port(port).unwrap().active_mtu.bytes();
        let gid = own_gid(dev, port).gid;
        let ah = dev.create_ah(&attr_to(dev, port, gid, gid)).unwrap();
        let qp = dev.create_ud_qp(&init(port)).unwrap();
        let mut keys = Vec::new();
        let mut arena = |count, len| {
            let (arena, bufs) = Arena::new(ArenaLayout { count, len, front: 0, align: 64, align_offset: 0 }).unwrap();
            let k = dev.reg_mr(arena.block(), Access::LOCAL_WRITE).unwrap();
            arena.set_lkey(k.lkey);
            keys.push(k);
            bufs
        };
        let (tx, spare) = (arena(40, mtu.max(8192)), arena(256, mtu + GRH_LEN));
        Me { dev: dev.clone(), ah: Some(ah), qp: Some(qp), keys, tx, spare, serial: 0, mtu }
    }

    fn qp(&mut self) -> &mut RdmaQp {
        self.qp.as_mut().unwrap()
    }

    fn post_recvs(&mut self, n: usize) {
        let at = self.spare.len() - n;
        let mut bufs = self.spare.split_off(at);
        self.qp().post_recv(&mut bufs).unwrap();
        assert!(bufs.is_empty());
    }

    /// Sends `len` bytes of buffer `buf`, in `pieces`.
    fn post(&mut self, buf: usize, len: usize, pieces: usize, inline: bool, signaled: bool) {
        self.serial += 1;
        let b = &self.tx[buf];
        let step = len.div_ceil(pieces).max(1);
        let sges: Vec<Sge<'_>> = b[..len].chunks(step).map(|bytes| Sge { bytes, lkey: b.lkey() }).collect();
        let qp = self.qp.as_mut().unwrap();
        let wr = SendWr {
            serial: self.serial,
            ah: self.ah.as_ref().unwrap(),
            remote_qpn: qp.qpn(),
            remote_qkey: QKey::UCX,
            sges: &sges,
            inline,
            signaled,
            solicited: false,
        };
        qp.post_send(&wr).unwrap();
    }

    fn send(&mut self, buf: usize, len: usize, pieces: usize, inline: bool) {
        self.post(buf, len, pieces, inline, true);
        self.qp().ring();
    }

    fn recv(&mut self, n: usize) -> Vec<RecvWc> {
        let mut out = Vec::new();
        let until = Instant::now() + PATIENCE;
        while out.len() < n {
            let want = n - out.len();
            self.qp().poll_recv(&mut out, want);
            assert!(Instant::now() < until, "{} of {n} messages came", out.len());
        }
        out
    }

    fn sent(&mut self, serial: u64) -> Vec<SendWc> {
        let mut out: Vec<SendWc> = Vec::new();
        let until = Instant::now() + PATIENCE;
        while out.last().is_none_or(|wc| wc.serial < serial) {
            self.qp().poll_send(&mut out, 16);
            assert!(Instant::now() < until, "send {serial} did not complete, only {out:?}");
        }
        out
    }
}

impl Drop for Me {
    fn drop(&mut self) {
        self.qp = None;
        if let Some(ah) = self.ah.take() {
            let _ = self.dev.destroy_ah(ah);
        }
        for k in self.keys.drain(..) {
            let _ = self.dev.dereg_mr(k);
        }
    }
}

fn fill(buf: &mut Buf, seed: usize) {
    buf.iter_mut().enumerate().for_each(|(i, b)| *b = (i * 7 + seed) as u8);
}

#[test]
fn ports_and_gids_make_sense() {
    on_each("ports_and_gids_make_sense", |dev, port| {
        let p = dev.query_port(port).unwrap();
        let gids = dev.query_gids(port).unwrap();
        assert!(!p.pkeys.is_empty() && p.gid_table_len >= gids.len());
        assert!(gids.windows(2).all(|w| w[0].index < w[1].index), "{gids:?}");
        // sysfs is another way to the same table.
        let sysfs = Path::new("/sys/class/infiniband").join(dev.attr().name).join(format!("ports/{port}"));
        for g in &gids {
            let text = std::fs::read_to_string(sysfs.join(format!("gids/{}", g.index))).unwrap();
            let hex: String = g.gid.0.chunks(2).map(|c| format!("{:02x}{:02x}:", c[0], c[1])).collect();
            assert_eq!(text.trim(), hex.trim_end_matches(':'));
            let ndev = std::fs::read_to_string(sysfs.join(format!("gid_attrs/ndevs/{}", g.index))).ok();
            assert_eq!(ndev.map(|n| n.trim().to_string()), g.netdev);
        }
        for bad in [0, dev.attr().port_count + 1] {
            assert_eq!(dev.query_port(bad).unwrap_err().errno, libc::EINVAL);
            assert_eq!(dev.query_gids(bad).unwrap_err().errno, libc::EINVAL);
            assert_eq!(dev.create_ud_qp(&init(bad)).unwrap_err().errno, libc::EINVAL);
        }
    });
}

#[test]
fn messages_of_every_kind_arrive_as_they_were() {
    on_each("messages_of_every_kind_arrive_as_they_were", |dev, port| {
        let mut me = Me::new(dev, port);
        me.post_recvs(16);
        let inline_max = me.qp().caps().inline_len as usize;
        assert!(inline_max >= 64, "{inline_max}");
        let (mtu, qpn) = (me.mtu, me.qp().qpn());
        for (i, (len, pieces, inline)) in [
            (1, 1, true),
            (8, 1, true),
            (inline_max, 1, true),
            (inline_max, 3, true),
            (1, 1, false),
            (200, 4, false),
            // Elements of different lengths, which some providers miscount.
            (1001, 2, false),
            (2001, 4, false),
            (mtu - 1, 2, false),
            (mtu, 4, false),
        ]
        .into_iter()
        .enumerate()
        {
            fill(&mut me.tx[i], i);
            me.send(i, len, pieces, inline);
            let wc = me.recv(1).pop().unwrap();
            assert_eq!((wc.status, wc.byte_len as usize), (WcStatus::Success, GRH_LEN + len), "{len} in {pieces}");
            assert_eq!(wc.src_qpn, qpn);
            if dev.query_port(port).unwrap().link_layer == LinkLayer::Ethernet {
                assert!(wc.grh);
            }
            assert_eq!(wc.buf[GRH_LEN..][..len], me.tx[i][..len]);
            let done = me.sent(me.serial);
            assert_eq!(done, [SendWc { serial: me.serial, status: WcStatus::Success }]);
            me.spare.push(wc.buf);
        }
        assert_eq!(me.qp().state(), QpState::ReadyToSend);
    });
}

#[test]
fn one_completion_answers_for_all_sends_before_it() {
    on_each("one_completion_answers_for_all_sends_before_it", |dev, port| {
        let mut me = Me::new(dev, port);
        me.post_recvs(200);
        // More than a batch, inline and not, one completion for all. Inline bytes are free at once.
        for i in 0..100u8 {
            me.tx[0][0] = i;
            if i % 2 == 0 {
                me.post(0, 8, 1, true, i == 99);
            } else {
                let slot = 1 + usize::from(i) % 32;
                me.qp().ring();
                me.tx[slot][0] = i;
                me.post(slot, 8, 1, false, i == 99);
            }
            if i % 32 == 31 {
                // Buffers are written again only after they have been read.
                me.post(39, 0, 1, true, true);
                me.qp().ring();
                let last = me.serial;
                let wcs = me.sent(last);
                assert_eq!(wcs.last().unwrap().serial, last);
            }
        }
        me.qp().ring();
        let last = me.serial;
        let wcs = me.sent(last);
        assert_eq!(wcs.iter().map(|w| w.serial).collect::<Vec<_>>(), [last]);
        let got: Vec<u8> = me.recv(103).iter().filter(|w| w.byte_len > 40).map(|w| w.buf[GRH_LEN]).collect();
        assert_eq!(got, (0..100).collect::<Vec<u8>>(), "on one queue pair, in order");
    });
}

#[test]
fn what_does_not_fit_is_refused_before_it_is_posted() {
    on_each("what_does_not_fit_is_refused_before_it_is_posted", |dev, port| {
        let mut me = Me::new(dev, port);
        let caps = me.qp().caps();
        let ah = me.ah.take().unwrap();
        let qpn = me.qp().qpn();
        let bytes = [0u8; 4096];
        let wr = |serial, sges, inline| SendWr {
            serial,
            ah: &ah,
            remote_qpn: qpn,
            remote_qkey: QKey::UCX,
            sges,
            inline,
            signaled: true,
            solicited: false,
        };
        let long = [Sge { bytes: &bytes[..caps.inline_len as usize + 1], lkey: 0 }];
        assert_eq!(me.qp().post_send(&wr(1, &long, true)).unwrap_err().errno, libc::EINVAL);
        let many = vec![Sge { bytes: &bytes[..1], lkey: 0 }; caps.send_sge as usize + 1];
        assert_eq!(me.qp().post_send(&wr(1, &many, false)).unwrap_err().errno, libc::EINVAL);
        // An address handle of another protection domain.
        let other = RdmaDevice::open(&dev.attr().name).unwrap();
        let gid = own_gid(dev, port).gid;
        let foreign = other.create_ah(&attr_to(dev, port, gid, gid)).unwrap();
        let sges = [Sge { bytes: &bytes[..1], lkey: 0 }];
        let bad = SendWr { ah: &foreign, ..wr(1, &sges, true) };
        assert_eq!(me.qp().post_send(&bad).unwrap_err().errno, libc::EINVAL);
        other.destroy_ah(foreign).unwrap();
        // The queue: as many as were asked for, then ENOMEM.
        for serial in 1..=128 {
            me.qp().post_send(&wr(serial, &sges, true)).unwrap();
        }
        assert_eq!(me.qp().post_send(&wr(129, &sges, true)).unwrap_err().errno, libc::ENOMEM);
        me.qp().ring();
        let mut out = Vec::new();
        let until = Instant::now() + PATIENCE;
        while out.len() < 128 {
            me.qp().poll_send(&mut out, 200);
            assert!(Instant::now() < until);
        }
        assert!(out.iter().all(|wc| wc.status == WcStatus::Success));
        assert_eq!(out.iter().map(|w| w.serial).collect::<Vec<_>>(), (1..=128).collect::<Vec<_>>());
        me.qp().post_send(&wr(129, &sges, true)).unwrap();

        let mut short = vec![Buf::alloc(GRH_LEN).unwrap()];
        assert_eq!(me.qp().post_recv(&mut short).unwrap_err().errno, libc::EINVAL);
        assert_eq!(short.len(), 1);
        me.ah = Some(ah);
    });
}

#[test]
fn the_receive_queue_takes_as_many_as_it_was_made_for() {
    on_each("the_receive_queue_takes_as_many_as_it_was_made_for", |dev, port| {
        let mut me = Me::new(dev, port);
        let mut bufs: Vec<Buf> = me.spare.drain(..).collect();
        bufs.push(Buf::alloc(200).unwrap());
        bufs.swap(0, 256);
        me.qp().post_recv(&mut bufs).unwrap();
        assert_eq!(bufs.len(), 1, "one too many stays");
        assert_eq!(bufs[0].len(), 200, "they are taken from the end");
    });
}

#[test]
fn an_armed_queue_wakes_and_a_queue_with_completions_is_busy() {
    on_each("an_armed_queue_wakes_and_a_queue_with_completions_is_busy", |dev, port| {
        let readable = |fd: i32, timeout: i32| {
            let mut p = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            // SAFETY: one valid pollfd.
            unsafe { libc::poll(&mut p, 1, timeout) == 1 }
        };
        let mut me = Me::new(dev, port);
        me.post_recvs(8);
        let fd = me.qp().event_fd().unwrap();
        assert!(!readable(fd, 0));
        assert_eq!(me.qp().arm(ArmFor::RECV).unwrap(), ArmResult::Armed);
        me.send(0, 8, 1, true);
        assert!(readable(fd, 30_000), "the receive wakes");
        let wcs = me.recv(1);
        me.spare.extend(wcs.into_iter().map(|w| w.buf));
        me.sent(me.serial);

        // What was there before arming makes it busy, and is not lost by that.
        me.send(0, 8, 1, true);
        let until = Instant::now() + PATIENCE;
        while me.qp().arm(ArmFor::RECV).unwrap() == ArmResult::Armed {
            assert!(Instant::now() < until);
        }
        assert_eq!(me.recv(1).len(), 1);
        let serial = me.serial;
        while me.qp().arm(ArmFor::SEND).unwrap() == ArmResult::Armed {
            assert!(Instant::now() < until);
        }
        assert_eq!(me.sent(serial).len(), 1);

        // Draining leaves nothing readable; a send completion wakes who armed for it.
        assert_eq!(me.qp().arm(ArmFor::SEND).unwrap(), ArmResult::Armed);
        assert!(!readable(fd, 0));
        me.send(0, 8, 1, true);
        assert!(readable(fd, 30_000), "the send completion wakes");
    });
}

#[test]
fn a_queue_pair_that_fell_into_error_is_reset_and_goes_on() {
    on_each("a_queue_pair_that_fell_into_error_is_reset_and_goes_on", |dev, port| {
        let mut me = Me::new(dev, port);
        // A receive that is too short for what comes takes the queue pair down, and with it the receives behind.
        let (arena, mut short) =
            Arena::new(ArenaLayout { count: 1, len: 64, front: 0, align: 64, align_offset: 0 }).unwrap();
        let keys = dev.reg_mr(arena.block(), Access::LOCAL_WRITE).unwrap();
        arena.set_lkey(keys.lkey);
        me.qp().post_recv(&mut short).unwrap();
        me.post_recvs(20);
        me.send(0, 512, 1, false);
        let mut failed = me.recv(1);
        assert_ne!(failed[0].status, WcStatus::Success);
        let first = failed.pop().unwrap();
        assert_eq!((first.buf.len(), me.qp().state()), (64, QpState::Error));

        me.qp().reset().unwrap();
        assert_eq!(me.qp().state(), QpState::ReadyToSend);
        // The receives come back, each once, whether the device flushed them or the reset did.
        let back = me.recv(20);
        assert!(back.iter().all(|w| w.status == WcStatus::WrFlush && w.buf.len() > 64));
        let (mut out, qp) = (Vec::new(), me.qp());
        assert_eq!(qp.poll_recv(&mut out, 64), 0);
        me.spare.extend(back.into_iter().map(|w| w.buf));

        for round in 0..3 {
            me.post_recvs(4);
            fill(&mut me.tx[1], round);
            me.send(1, 100, 1, false);
            let wc = me.recv(1).pop().unwrap();
            assert_eq!((wc.status, &wc.buf[GRH_LEN..][..100]), (WcStatus::Success, &me.tx[1][..100]));
        }
        // Resetting one that works forgets what is posted, which comes back flushed.
        me.qp().reset().unwrap();
        assert_eq!(me.recv(9).iter().filter(|w| w.status == WcStatus::WrFlush).count(), 9);
        me.qp = None;
        dev.dereg_mr(keys).unwrap();
    });
}

/// The reset in two steps: meanwhile another thread has the queue pair, and nothing can be done to it here.
#[test]
fn a_queue_pair_is_reset_on_another_thread() {
    on_each("a_queue_pair_is_reset_on_another_thread", |dev, port| {
        let mut me = Me::new(dev, port);
        me.post_recvs(20);
        let (woke, woken) = mpsc::channel();
        let job = me.qp().begin_reset(Arc::new(move || woke.send(()).unwrap())).unwrap().expect("it may sleep");
        assert_eq!(me.qp().state(), QpState::Error);
        assert_eq!(me.qp().reset().unwrap_err().errno, libc::EBUSY);
        assert_eq!(me.qp().begin_reset(Arc::new(|| {})).err().map(|e| e.errno), Some(libc::EBUSY));
        let mut bufs: Vec<Buf> = me.spare.drain(..4).collect();
        assert_eq!(me.qp().post_recv(&mut bufs).unwrap_err().errno, libc::EBUSY);
        assert_eq!(bufs.len(), 4);
        me.spare.extend(bufs);
        let qpn = me.qp().qpn();
        let qp = me.qp.as_mut().unwrap();
        let wr = SendWr {
            serial: me.serial + 1,
            ah: me.ah.as_ref().unwrap(),
            remote_qpn: qpn,
            remote_qkey: QKey::UCX,
            sges: &[Sge { bytes: b"too early", lkey: 0 }],
            inline: true,
            signaled: true,
            solicited: false,
        };
        assert_eq!(qp.post_send(&wr).unwrap_err().errno, libc::EBUSY);
        assert_eq!(qp.post_send_now(&wr).unwrap_err().errno, libc::EBUSY);
        qp.ring();
        assert_eq!(qp.arm(ArmFor::RECV | ArmFor::SEND), Ok(ArmResult::Armed));
        assert_eq!((qp.poll_send(&mut Vec::new(), 64), qp.poll_recv(&mut Vec::new(), 64)), (0, 0));
        assert_eq!(qp.start_recv(&mut Vec::new(), 64), 0);
        assert_eq!(qp.finish_reset(), None);

        thread::spawn(job).join().unwrap();
        woken.recv_timeout(PATIENCE).unwrap();
        assert_eq!(me.qp().state(), QpState::Error, "until it has been told");
        assert_eq!((me.qp().finish_reset(), me.qp().finish_reset()), (Some(Ok(())), None));
        assert_eq!((me.qp().state(), me.qp().qpn()), (QpState::ReadyToSend, qpn));
        let back = me.recv(20);
        assert!(back.iter().all(|w| w.status == WcStatus::WrFlush));
        me.spare.extend(back.into_iter().map(|w| w.buf));
        me.post_recvs(4);
        fill(&mut me.tx[1], 1);
        me.send(1, 100, 1, false);
        let wc = me.recv(1).pop().unwrap();
        assert_eq!((wc.status, &wc.buf[GRH_LEN..][..100]), (WcStatus::Success, &me.tx[1][..100]));
    });
}

#[test]
fn a_queue_pair_that_is_left_during_its_reset_ends_with_it() {
    struct Rest(mpsc::Sender<()>);
    impl Drop for Rest {
        fn drop(&mut self) {
            self.0.send(()).unwrap();
        }
    }
    on_each("a_queue_pair_that_is_left_during_its_reset_ends_with_it", |dev, port| {
        for is_done in [true, false] {
            let mut me = Me::new(dev, port);
            me.post_recvs(20);
            let job = me.qp().begin_reset(Arc::new(|| {})).unwrap().expect("it may sleep");
            let (end, ended) = mpsc::channel();
            me.qp.take().unwrap().destroy(Box::new(Rest(end)));
            assert!(ended.try_recv().is_err(), "the queue pair is there, and what it may name");
            let holders = Arc::strong_count(dev);
            if is_done {
                thread::spawn(job).join().unwrap()
            } else {
                drop(job)
            }
            ended.recv_timeout(PATIENCE).unwrap();
            assert_eq!(Arc::strong_count(dev), holders - 1);
        }
    });
}

#[test]
fn a_send_from_unregistered_memory_fails_and_no_other() {
    on_each("a_send_from_unregistered_memory_fails_and_no_other", |dev, port| {
        let mut me = Me::new(dev, port);
        me.post_recvs(4);
        let loose = Buf::alloc(1024).unwrap();
        me.serial += 1;
        let qp = me.qp.as_mut().unwrap();
        let wr = SendWr {
            serial: me.serial,
            ah: me.ah.as_ref().unwrap(),
            remote_qpn: qp.qpn(),
            remote_qkey: QKey::UCX,
            sges: &[Sge { bytes: &loose[..512], lkey: 0xdead_beef }],
            inline: false,
            signaled: true,
            solicited: false,
        };
        qp.post_send(&wr).unwrap();
        qp.ring();
        // Some providers refuse at the doorbell, others complete with an error.
        let mut out = Vec::new();
        let until = Instant::now() + PATIENCE;
        while me.qp().state() == QpState::ReadyToSend {
            me.qp().poll_send(&mut out, 4);
            assert!(Instant::now() < until, "{out:?}");
        }
        me.qp().reset().unwrap();
        me.post_recvs(4);
        me.send(0, 64, 1, false);
        let serial = me.serial;
        let until = Instant::now() + PATIENCE;
        while !me.recv(1).iter().any(|w| w.status == WcStatus::Success) {
            assert!(Instant::now() < until);
        }
        assert_eq!(me.sent(serial).last().unwrap().status, WcStatus::Success);
    });
}

#[test]
fn address_handles_say_what_is_wrong() {
    on_each("address_handles_say_what_is_wrong", |dev, port| {
        let own = own_gid(dev, port).gid;
        let foreign = Gid::from_ip("203.0.113.77".parse().unwrap());
        let e = dev.create_ah(&attr_to(dev, port, foreign, own)).unwrap_err();
        assert_eq!((e.call, e.errno), ("create_ah", libc::ENODATA));
        let e = dev.create_ah(&AhAttr { port: 99, ..attr_to(dev, port, own, own) }).unwrap_err();
        assert_eq!(e.errno, libc::EINVAL);
        if dev.query_port(port).unwrap().link_layer == LinkLayer::Ethernet {
            // The kernel's word: it depends on the IP version of the own GID.
            let e = dev.create_ah(&attr_to(dev, port, own, Gid::ZERO)).unwrap_err();
            assert!([libc::EINVAL, libc::ENETUNREACH].contains(&e.errno), "{e}");
        }
    });
}

#[test]
fn registrations_hold_their_memory_and_end_once() {
    on_each("registrations_hold_their_memory_and_end_once", |dev, _| {
        let block = Block::new(10_000, 4096).unwrap();
        let a = dev.reg_mr(&block, Access::all()).unwrap();
        let b = dev.reg_mr(&block, Access::LOCAL_WRITE).unwrap();
        assert_ne!(a.lkey, b.lkey);
        assert_eq!(Arc::strong_count(&block), 3);
        dev.dereg_mr(a).unwrap();
        assert_eq!(dev.dereg_mr(a).unwrap_err().errno, libc::EINVAL);
        dev.dereg_mr(b).unwrap();
        assert_eq!(Arc::strong_count(&block), 1);
    });
}

#[test]
fn any_order_of_dropping_is_fine() {
    on_each("any_order_of_dropping_is_fine", |dev, port| {
        let name = dev.attr().name;
        let own = own_gid(dev, port).gid;
        let dev = RdmaDevice::open(&name).unwrap();
        let weak = Arc::downgrade(&dev);
        let mut qp = dev.create_ud_qp(&init(port)).unwrap();
        let ah = dev.create_ah(&attr_to(&dev, port, own, own)).unwrap();
        let block = Block::new(4096, 4096).unwrap();
        dev.reg_mr(&block, Access::LOCAL_WRITE).unwrap();
        assert_eq!(qp.arm(ArmFor::all()).unwrap(), ArmResult::Armed);
        drop(dev);
        // The queue pair keeps the device; a registration that nobody ended ends with it.
        assert!(weak.upgrade().is_some());
        qp.post_recv(&mut vec![Buf::alloc(4096).unwrap()]).unwrap();
        weak.upgrade().unwrap().destroy_ah(ah).unwrap();
        drop(qp);
        assert!(weak.upgrade().is_none());
        assert_eq!(Arc::strong_count(&block), 1);
    });
}

#[test]
fn polling_for_events_does_not_block() {
    on_each("polling_for_events_does_not_block", |dev, _| {
        // Whatever has happened before: it ends.
        let until = Instant::now() + PATIENCE;
        while dev.poll_async_event().is_some() {
            assert!(Instant::now() < until);
        }
        assert_eq!(dev.poll_async_event(), None);
    });
}

#[test]
fn queue_pairs_have_numbers_of_their_own() {
    on_each("queue_pairs_have_numbers_of_their_own", |dev, port| {
        let qps: Vec<RdmaQp> = (0..8).map(|_| dev.create_ud_qp(&init(port)).unwrap()).collect();
        let mut numbers: Vec<Qpn> = qps.iter().map(|q| q.qpn()).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), 8);
    });
}
