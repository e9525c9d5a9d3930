//! The semantics of a software queue pair, without a wire: what a device calls is called by hand.

use std::sync::Arc;

use proptest::prelude::*;
use uct::mem::{Arena, ArenaLayout, Buf};

use super::*;
use crate::{
    device::{
        Access, AhAttr, ArmFor, ArmResult, AsyncEvent, GRH_LEN, GlobalRoute, LinkLayer, QpInit, QpState, RecvWc,
        RoceVersion, SendWc, SendWr, Sge, SoftAv, VerbsError, WcStatus,
    },
    types::{Gid, Lid, Mtu, PKey, QKey, Qpn},
};

fn gid(s: &str) -> Gid {
    Gid::from_ip(s.parse().unwrap())
}

struct Bench {
    port: PortState,
    mrs: Arc<MrTable>,
    counters: Arc<Counters>,
    events: AsyncQueue,
}

impl Bench {
    fn new() -> Bench {
        let port = PortState::new(PortConfig {
            port: 1,
            link_layer: LinkLayer::Ethernet,
            mtu: Mtu::M1024,
            lid: Lid(0),
            gids: vec![(gid("10.0.0.1"), RoceVersion::V2)],
            gid_table_len: 4,
            netdev: None,
            bandwidth_bps: 0.0,
        });
        let (mrs, counters) = (Arc::new(MrTable::new(1, 10)), Arc::default());
        Bench { port, mrs, counters, events: AsyncQueue::default() }
    }

    fn core(&self, depth: u32, long: LongMessage) -> QpCore {
        let init = QpInit { recv_depth: depth, ..INIT };
        QpCore::new(Qpn::truncate(7), &init, &self.port, self.mrs.clone(), self.counters.clone(), long).unwrap()
    }

    fn bufs(&self, count: usize, len: usize) -> (Arc<Arena>, Vec<Buf>) {
        let (arena, bufs) = Arena::new(ArenaLayout { count, len, front: 0, align: 64, align_offset: 0 }).unwrap();
        arena.set_lkey(self.mrs.register(arena.block(), Access::LOCAL_WRITE).unwrap().lkey);
        (arena, bufs)
    }

    fn env(&self, state: QpState) -> SendEnv<'_> {
        SendEnv { state, port: &self.port, mrs: &self.mrs, counters: &self.counters }
    }
}

const INIT: QpInit =
    QpInit { port: 1, pkey_index: 0, qkey: QKey::UCX, send_depth: 4, recv_depth: 4, send_sge: 2, inline_len: 16 };
const LIMITS: SendLimits = SendLimits { depth: 4, sge_max: 2, inline_max: 16 };

fn datagram() -> Datagram<'static> {
    Datagram {
        src_qpn: Qpn::truncate(9),
        qkey: QKey::UCX,
        pkey: PKey::DEFAULT,
        solicited: false,
        grh: grh::Grh::between(gid("10.0.0.2"), gid("10.0.0.1"), 0),
    }
}

fn poll(core: &QpCore) -> Vec<RecvWc> {
    let mut out = Vec::new();
    core.poll_recv(&mut out, usize::MAX);
    out
}

#[test]
fn a_message_fills_the_oldest_receive() {
    let b = Bench::new();
    let core = b.core(4, LongMessage::Drop);
    let (_a, mut bufs) = b.bufs(2, 64);
    core.post_recv(&mut bufs).unwrap();
    assert!(bufs.is_empty());
    let d = Datagram { solicited: true, ..datagram() };
    core.rx().deliver(&d, b"hello").unwrap();
    // Exactly as long as there is room, and empty.
    core.rx().deliver(&datagram(), &[7; 24]).unwrap();
    let got = poll(&core);
    assert_eq!(got.iter().map(|w| w.buf.index()).collect::<Vec<_>>(), [1, 0], "taken off the end, filled in order");
    assert_eq!((got[0].byte_len, got[0].src_qpn.get(), got[0].solicited, got[0].grh), (45, 9, true, true));
    assert_eq!(&got[0].buf[GRH_LEN..45], b"hello");
    assert_eq!(grh::gids(got[0].buf[..40].try_into().unwrap()), Some((gid("10.0.0.2"), gid("10.0.0.1"))));
    assert!(!got[1].solicited && got[1].byte_len == 64);
    assert_eq!((b.counters.stats().rx_packets, b.counters.stats().rx_bytes), (2, 29));
}

#[test]
fn drops_are_silent_and_counted_by_reason() {
    let b = Bench::new();
    let core = b.core(4, LongMessage::Drop);
    let (_a, mut bufs) = b.bufs(1, 64);
    let ok = datagram();
    assert_eq!(core.rx().deliver(&ok, b"x"), Err(DropReason::NoReceive));
    core.post_recv(&mut bufs).unwrap();
    let cases = [
        (Datagram { qkey: QKey(1), ..ok }, 1, DropReason::QKey),
        (Datagram { pkey: PKey(0x8001), ..ok }, 1, DropReason::PKey),
        (ok, 25, DropReason::TooLong),
    ];
    for (d, len, why) in cases {
        assert_eq!(core.rx().deliver(&d, &vec![0; len]), Err(why));
        assert_eq!(b.counters.stats().dropped(why), 1);
    }
    assert!(poll(&core).is_empty());
    assert_eq!((core.state(), core.posted()), (QpState::ReadyToSend, 1));
    // A limited member may talk to this full one.
    core.rx().deliver(&Datagram { pkey: PKey(0x7fff), ..ok }, b"x").unwrap();
    assert_eq!(b.counters.stats().dropped_total(), 4);
    assert_eq!(
        b.counters.stats().to_string(),
        "tx 0 packets 0 bytes, rx 1 packets 1 bytes, pkey 1, qkey 1, no_receive 1, too_long 1"
    );
}

#[test]
fn a_long_message_kills_a_queue_pair_of_kernel_semantics_and_reset_revives_it() {
    let b = Bench::new();
    let core = b.core(4, LongMessage::Error);
    let (_a, mut bufs) = b.bufs(4, 64);
    let spare = bufs.split_off(3);
    core.post_recv(&mut bufs).unwrap();
    assert_eq!(core.rx().deliver(&datagram(), &[0; 25]), Err(DropReason::TooLong));
    assert_eq!(core.state(), QpState::Error);
    assert_eq!(core.rx().deliver(&datagram(), b"x"), Err(DropReason::QpError));
    // A receive posted now is flushed as well.
    bufs = spare;
    core.post_recv(&mut bufs).unwrap();
    assert_eq!(core.reset(), Err(VerbsError::new("modify_qp", libc::EBUSY)));
    let got = poll(&core);
    let flush = WcStatus::WrFlush;
    assert_eq!(got.iter().map(|w| w.status).collect::<Vec<_>>(), [WcStatus::LocalQpOp, flush, flush, flush]);
    core.reset().unwrap();
    core.reset().unwrap();
    bufs.extend(got.into_iter().map(|w| w.buf));
    core.post_recv(&mut bufs).unwrap();
    core.rx().deliver(&datagram(), b"x").unwrap();
    assert_eq!(poll(&core)[0].status, WcStatus::Success);
}

#[test]
fn a_receive_outside_its_registration_is_not_written() {
    let b = Bench::new();
    for lkey in ["none", "read only", "gone"] {
        let core = b.core(4, LongMessage::Drop);
        let (arena, mut bufs) =
            Arena::new(ArenaLayout { count: 2, len: 64, front: 0, align: 64, align_offset: 0 }).unwrap();
        if lkey != "none" {
            let access = if lkey == "gone" { Access::LOCAL_WRITE } else { Access::REMOTE_READ };
            let keys = b.mrs.register(arena.block(), access).unwrap();
            arena.set_lkey(keys.lkey);
            if lkey == "gone" {
                b.mrs.deregister(keys).unwrap();
            }
        }
        core.post_recv(&mut bufs).unwrap();
        assert_eq!(core.rx().deliver(&datagram(), b"secret"), Err(DropReason::Protection));
        let got = poll(&core);
        assert_eq!(got[0].status, WcStatus::LocalProtection, "{lkey}");
        assert_eq!(got[1].status, WcStatus::WrFlush);
        assert!(got.iter().all(|w| w.buf.iter().all(|&x| x == 0)));
        assert_eq!(core.state(), QpState::Error);
    }
}

#[test]
fn receives_are_bounded_by_the_depth_until_they_are_polled() {
    let b = Bench::new();
    let core = b.core(2, LongMessage::Drop);
    let (_a, mut bufs) = b.bufs(3, 64);
    core.post_recv(&mut bufs).unwrap();
    assert_eq!(bufs.len(), 1, "the queue is full");
    core.rx().deliver(&datagram(), b"x").unwrap();
    core.post_recv(&mut bufs).unwrap();
    assert_eq!(bufs.len(), 1, "a completion that was not polled still has its slot");
    assert_eq!(poll(&core).len(), 1);
    core.post_recv(&mut bufs).unwrap();
    assert!(bufs.is_empty());
    // A buffer without room for a payload is refused, and stays with the caller.
    let core = b.core(4, LongMessage::Drop);
    let mut bufs = vec![Buf::alloc(41).unwrap(), Buf::alloc(40).unwrap(), Buf::alloc(41).unwrap()];
    assert_eq!(core.post_recv(&mut bufs), Err(VerbsError::new("post_recv", libc::EINVAL)));
    assert_eq!((bufs.len(), core.posted()), (2, 1));
}

#[test]
fn closing_gives_back_every_buffer() {
    let b = Bench::new();
    let core = b.core(4, LongMessage::Drop);
    let (arena, mut bufs) = b.bufs(3, 64);
    core.post_recv(&mut bufs).unwrap();
    core.rx().deliver(&datagram(), b"x").unwrap();
    assert_eq!(Arc::strong_count(&arena), 4);
    core.close();
    assert_eq!(Arc::strong_count(&arena), 1);
    assert_eq!(core.rx().deliver(&datagram(), b"x"), Err(DropReason::NoQp));
}

#[test]
fn bad_queue_pairs_are_refused() {
    let b = Bench::new();
    for init in [
        QpInit { port: 2, ..INIT },
        QpInit { pkey_index: 1, ..INIT },
        QpInit { recv_depth: 0, ..INIT },
        QpInit { send_depth: 0, ..INIT },
        QpInit { send_sge: 0, ..INIT },
    ] {
        let made = QpCore::new(Qpn::truncate(2), &init, &b.port, b.mrs.clone(), b.counters.clone(), LongMessage::Drop);
        assert_eq!(made.err(), Some(VerbsError::new("create_qp", libc::EINVAL)), "{init:?}");
    }
}

#[test]
fn arming_loses_no_completion() {
    let b = Bench::new();
    let core = b.core(8, LongMessage::Drop);
    let (_a, mut bufs) = b.bufs(8, 64);
    core.post_recv(&mut bufs).unwrap();
    let fd = core.event_fd().unwrap();
    let readable = || super::event::is_readable(fd);
    let (plain, solicited) = (datagram(), Datagram { solicited: true, ..datagram() });

    // Nothing armed: nothing signalled.
    core.rx().deliver(&plain, b"1").unwrap();
    assert!(!readable());
    // Armed too late: busy, and not armed.
    assert_eq!(core.arm(ArmFor::RECV, || false), Ok(ArmResult::Busy));
    core.rx().deliver(&plain, b"2").unwrap();
    assert!(!readable());
    poll(&core);
    // Armed in time: once.
    assert_eq!(core.arm(ArmFor::RECV, || false), Ok(ArmResult::Armed));
    core.notify(ArmFor::SEND);
    assert!(!readable());
    core.rx().deliver(&plain, b"3").unwrap();
    assert!(readable());
    poll(&core);
    // Arming drains the fd; only the solicited message signals.
    assert_eq!(core.arm(ArmFor::SOLICITED, || false), Ok(ArmResult::Armed));
    assert!(!readable());
    core.rx().deliver(&plain, b"4").unwrap();
    assert!(!readable());
    core.rx().deliver(&solicited, b"5").unwrap();
    assert!(readable());
    poll(&core);
    // Polled by the one who delivers: the sleeper is another thread.
    assert_eq!(core.arm(ArmFor::RECV, || false), Ok(ArmResult::Armed));
    let mut rx = core.rx();
    rx.deliver(&plain, b"6").unwrap();
    rx.poll(&mut Vec::new(), 1);
    drop(rx);
    assert!(readable());
    // Sends.
    assert_eq!(core.arm(ArmFor::SEND, || true), Ok(ArmResult::Busy));
    assert_eq!(core.arm(ArmFor::SEND, || false), Ok(ArmResult::Armed));
    core.notify(ArmFor::SEND);
    assert!(readable());
    // Falling into ERROR wakes as well: the flushed receives are completions.
    assert_eq!(core.arm(ArmFor::SOLICITED, || false), Ok(ArmResult::Armed));
    core.fail();
    assert!(readable());
    poll(&core);
    // Nothing was posted: nothing completes.
    assert_eq!(core.arm(ArmFor::RECV, || false), Ok(ArmResult::Armed));
    core.fail();
    assert!(!readable());
}

/// A consumer that sleeps whenever it is told that it may, and a producer that never waits for it: were a wake-up lost,
/// the consumer would sleep until the time-out fails the test. A run that works does not depend on the time-out.
#[test]
fn a_sleeper_is_always_woken() {
    const MESSAGES: usize = 20_000;
    let b = Bench::new();
    let core = b.core(4, LongMessage::Drop);
    let (_a, mut bufs) = b.bufs(4, 64);
    let fd = core.event_fd().unwrap();
    core.post_recv(&mut bufs).unwrap();
    std::thread::scope(|s| {
        s.spawn(|| {
            let mut sent = 0;
            while sent < MESSAGES {
                match core.rx().deliver(&datagram(), b"x") {
                    Ok(()) => sent += 1,
                    Err(_) => std::thread::yield_now(),
                }
            }
        });
        let mut got = 0;
        while got < MESSAGES {
            let mut out = Vec::new();
            got += core.poll_recv(&mut out, 4);
            let mut bufs = out.into_iter().map(|w| w.buf).collect();
            core.post_recv(&mut bufs).unwrap();
            if got < MESSAGES && core.arm(ArmFor::RECV, || false) == Ok(ArmResult::Armed) {
                assert!(super::event::wait_readable(fd, 60_000), "lost wake-up after {got}");
            }
        }
    });
}

fn wr<'a>(serial: u64, sges: &'a [Sge<'a>]) -> SendWr<'a, ()> {
    SendWr {
        serial,
        ah: &(),
        remote_qpn: Qpn::truncate(9),
        remote_qkey: QKey::UCX,
        sges,
        inline: true,
        signaled: true,
        solicited: false,
    }
}

fn poll_send(q: &mut SendQueue) -> Vec<(u64, WcStatus)> {
    let mut out: Vec<SendWc> = Vec::new();
    q.poll(&mut out, usize::MAX);
    out.into_iter().map(|w| (w.serial, w.status)).collect()
}

#[test]
fn sends_have_limits() {
    let b = Bench::new();
    let env = b.env(QpState::ReadyToSend);
    let mut q = SendQueue::new(LIMITS);
    let (eight, nine) = ([0u8; 8], [0u8; 9]);
    let s = |bytes| Sge { bytes, lkey: 0 };
    let einval = Err(VerbsError::new("post_send", libc::EINVAL));
    assert_eq!(q.admit(&env, &wr(1, &[s(&eight), s(&nine)]), None), einval, "17 bytes inline");
    assert_eq!(q.admit(&env, &wr(1, &[s(&[]), s(&[]), s(&[])]), None), einval, "three elements");
    assert_eq!(q.admit(&env, &wr(2, &[]), None), einval, "a gap in the serials");
    assert_eq!(q.admit(&env, &wr(0, &[]), None), einval);
    assert_eq!(q.last_serial(), 0, "nothing was posted");
    assert_eq!(q.admit(&env, &wr(1, &[s(&eight), s(&eight)]), None), Ok(Admit::Transmit { len: 16 }));
    assert_eq!(q.admit(&env, &wr(2, &[]), None), Ok(Admit::Transmit { len: 0 }));
}

#[test]
fn the_sum_of_lengths_does_not_wrap() {
    let b = Bench::new();
    let env = b.env(QpState::ReadyToSend);
    let mut q = SendQueue::new(SendLimits { sge_max: 8, ..LIMITS });
    // Eight views of one zero page range add up to 2^32 + 8 * 2 bytes without owning that much.
    let big = vec![0u8; (1 << 29) + 2];
    let sges = [Sge { bytes: &big, lkey: 0 }; 8];
    assert_eq!(q.admit(&env, &wr(1, &sges), None), Err(VerbsError::new("post_send", libc::EINVAL)));
}

#[test]
fn a_slot_is_free_when_its_completion_was_polled() {
    let b = Bench::new();
    let env = b.env(QpState::ReadyToSend);
    let mut q = SendQueue::new(LIMITS);
    for serial in 1..=4 {
        let w = SendWr { signaled: serial % 2 == 0, ..wr(serial, &[]) };
        assert_eq!(q.admit(&env, &w, None), Ok(Admit::Transmit { len: 0 }));
        q.complete(serial, w.signaled, WcStatus::Success);
    }
    assert_eq!(q.admit(&env, &wr(5, &[]), None), Err(VerbsError::new("post_send", libc::ENOMEM)));
    let mut out = Vec::new();
    assert_eq!(q.poll(&mut out, 1), 1);
    assert_eq!(out, [SendWc { serial: 2, status: WcStatus::Success }], "3 is covered by 4");
    for serial in [5, 6] {
        q.admit(&env, &wr(serial, &[]), None).unwrap();
    }
    assert!(q.admit(&env, &wr(7, &[]), None).is_err());
}

#[test]
fn too_long_is_a_success_that_does_not_leave() {
    let b = Bench::new();
    let env = b.env(QpState::ReadyToSend);
    let (arena, _bufs) = b.bufs(1, 2000);
    let bytes = vec![0u8; 1025];
    // Not inline, of unregistered memory: protection is checked before length.
    let mut q = SendQueue::new(LIMITS);
    let sges = [Sge { bytes: &bytes, lkey: arena.lkey() }];
    let w = SendWr { inline: false, ..wr(1, &sges) };
    assert_eq!(q.admit(&env, &w, None), Ok(Admit::Fatal(WcStatus::LocalProtection)));
    let mut q = SendQueue::new(SendLimits { inline_max: 2000, ..LIMITS });
    assert_eq!(q.admit(&env, &wr(1, &sges), None), Ok(Admit::Done));
    assert_eq!(q.admit(&env, &wr(2, &[Sge { bytes: &bytes[1..], lkey: 0 }]), None), Ok(Admit::Transmit { len: 1024 }));
    q.complete(2, true, WcStatus::Success);
    assert_eq!(poll_send(&mut q), [(1, WcStatus::Success), (2, WcStatus::Success)]);
    assert_eq!(b.counters.stats().dropped(DropReason::Oversize), 1);
}

#[test]
fn sends_read_only_registered_bytes() {
    let b = Bench::new();
    let env = b.env(QpState::ReadyToSend);
    let (_a, bufs) = b.bufs(2, 64);
    let mut q = SendQueue::new(LIMITS);
    let foreign = [1u8; 8];
    let good = Sge { bytes: &bufs[0], lkey: bufs[0].lkey() };
    let bad = Sge { bytes: &foreign, lkey: bufs[0].lkey() };
    let empty = Sge { bytes: &[], lkey: 0xdead };
    fn w<'a>(serial: u64, sges: &'a [Sge<'a>]) -> SendWr<'a, ()> {
        SendWr { inline: false, signaled: false, ..wr(serial, sges) }
    }
    assert_eq!(q.admit(&env, &w(1, &[good, empty]), None), Ok(Admit::Transmit { len: 64 }));
    q.complete(1, false, WcStatus::Success);
    assert_eq!(q.admit(&env, &w(2, &[good, bad]), None), Ok(Admit::Fatal(WcStatus::LocalProtection)));
    let env = b.env(QpState::Error);
    assert_eq!(q.admit(&env, &w(3, &[good]), None), Ok(Admit::Done));
    // Failures are told though nothing was signaled.
    assert_eq!(q.reset(), Err(VerbsError::new("modify_qp", libc::EBUSY)));
    assert_eq!(poll_send(&mut q), [(2, WcStatus::LocalProtection), (3, WcStatus::WrFlush)]);
    q.reset().unwrap();
}

fn ah(dgid: &str, sgid: &str) -> AhAttr {
    let grh = GlobalRoute { dgid: gid(dgid), sgid: gid(sgid), hop_limit: 64, traffic_class: 0, flow_label: 0 };
    AhAttr {
        port: 1,
        sl: 0,
        src_path_bits: 0,
        static_rate: 0,
        dlid: Lid(0xc000),
        grh: Some(grh),
        soft: SoftAv::default(),
    }
}

#[test]
fn a_lost_gid_is_fatal_to_sends_that_use_it_even_if_it_comes_back() {
    let b = Bench::new();
    let held = b.port.check_ah(&ah("10.0.0.2", "10.0.0.1")).unwrap().unwrap();
    let mut q = SendQueue::new(LIMITS);
    let env = b.env(QpState::ReadyToSend);
    assert_eq!(q.admit(&env, &wr(1, &[]), Some(&held)), Ok(Admit::Transmit { len: 0 }));
    // Another GID comes: no effect but the event.
    assert_eq!(b.port.add_gid(gid("10.0.0.9"), RoceVersion::V2, &b.events), Some(1));
    assert_eq!(b.events.pop(), Some(AsyncEvent::GidChange(1)));
    assert_eq!(q.admit(&env, &wr(2, &[]), Some(&held)), Ok(Admit::Transmit { len: 0 }));

    assert!(b.port.remove_gid(gid("10.0.0.1"), &b.events));
    assert!(!b.port.remove_gid(gid("10.0.0.1"), &b.events));
    let lost = b.port.check_ah(&ah("10.0.0.2", "10.0.0.1"));
    assert_eq!(lost.err(), Some(VerbsError::new("create_ah", libc::ENODATA)));
    assert_eq!(q.admit(&env, &wr(3, &[]), Some(&held)), Ok(Admit::Fatal(WcStatus::LocalQpOp)));
    assert_eq!(b.port.add_gid(gid("10.0.0.1"), RoceVersion::V2, &b.events), Some(2), "at another index");
    assert!(!b.port.is_alive(&held));
    let fresh = b.port.check_ah(&ah("10.0.0.2", "10.0.0.1")).unwrap().unwrap();
    assert_eq!(q.admit(&env, &wr(4, &[]), Some(&fresh)), Ok(Admit::Transmit { len: 0 }));
    let indexes: Vec<_> = b.port.gids().iter().map(|e| (e.index, e.gid)).collect();
    assert_eq!(indexes, [(1, gid("10.0.0.9")), (2, gid("10.0.0.1"))]);
    assert_eq!((b.events.pop(), b.events.pop()), (Some(AsyncEvent::GidChange(1)), None), "equal events are one");
}

#[test]
fn malformed_destinations_are_refused() {
    let b = Bench::new();
    let good = ah("10.0.0.2", "10.0.0.1");
    let bad = |f: &dyn Fn(&mut AhAttr)| {
        let mut a = good;
        f(&mut a);
        b.port.check_ah(&a).err().map(|e| e.errno)
    };
    assert_eq!(bad(&|_| ()), None);
    assert_eq!(bad(&|a| a.port = 2), Some(libc::EINVAL));
    assert_eq!(bad(&|a| a.sl = 16), Some(libc::EINVAL));
    assert_eq!(bad(&|a| a.grh = None), Some(libc::EINVAL));
    assert_eq!(bad(&|a| *a = ah("::", "10.0.0.1")), Some(libc::EINVAL));
    assert_eq!(bad(&|a| *a = ah("fd00::1", "10.0.0.1")), Some(libc::EINVAL));
    assert_eq!(bad(&|a| *a = ah("10.0.0.2", "10.0.0.3")), Some(libc::ENODATA));
}

#[test]
fn port_changes_are_told_once() {
    let b = Bench::new();
    b.port.set_active(true, &b.events);
    assert_eq!(b.events.pop(), None);
    b.port.set_active(false, &b.events);
    b.port.set_lid(Lid(3), &b.events);
    b.port.set_pkeys(vec![PKey(0x8001), PKey::DEFAULT], &b.events);
    b.port.set_mtu(Mtu::M4096);
    let a = b.port.attr();
    assert_eq!((a.active, a.lid, a.active_mtu, a.pkeys.len()), (false, Lid(3), Mtu::M4096, 2));
    assert_eq!(
        std::iter::from_fn(|| b.events.pop()).collect::<Vec<_>>(),
        [AsyncEvent::PortError(1), AsyncEvent::LidChange(1), AsyncEvent::PkeyChange(1)]
    );
    for n in 0..2000 {
        b.events.push(AsyncEvent::Unknown(n));
    }
    assert_eq!(b.events.pop(), Some(AsyncEvent::Unknown(2000 - AsyncQueue::MAX as u32)), "the oldest are lost");
    // A full GID table takes no more.
    for i in 2..5 {
        assert!(b.port.add_gid(gid(&format!("10.0.0.{i}")), RoceVersion::V2, &b.events).is_some());
    }
    assert_eq!(b.port.add_gid(gid("10.0.0.5"), RoceVersion::V2, &b.events), None);
}

fn meta() -> PacketMeta {
    PacketMeta {
        src_gid: gid("10.0.0.1"),
        dst_gid: gid("10.0.0.2"),
        src_port: 0,
        dst_port: 0,
        src_qpn: Qpn::truncate(2),
        dst_qpn: Qpn::truncate(3),
        qkey: QKey::UCX,
        pkey: PKey::DEFAULT,
        solicited: false,
        route: 0,
    }
}

#[test]
fn filters_drop_double_hold_and_swap() {
    let slot = FilterSlot::default();
    let m = meta();
    let run = |n: u8| {
        slot.run(&PacketView { meta: &m, payload: &[n] }).packets.iter().map(|p| p.payload[0]).collect::<Vec<_>>()
    };
    assert!(!slot.is_active());
    slot.set(Some(Box::new(|p| match p.payload[0] {
        1 => FilterVerdict::Drop,
        2 => FilterVerdict::Duplicate,
        3 => FilterVerdict::Hold,
        4 | 5 => FilterVerdict::Swap,
        _ => FilterVerdict::Pass,
    })));
    assert!(slot.is_active());
    assert_eq!(run(0), [0]);
    assert_eq!(run(1), []);
    assert_eq!(run(2), [2, 2]);
    assert_eq!(run(3), []);
    assert_eq!(run(4), []);
    assert_eq!(run(5), [4], "two in a row: the first goes on");
    assert_eq!(slot.held(), 2);
    assert_eq!(run(6), [6, 5]);
    slot.release();
    assert_eq!(run(7), [3, 7]);
    run(3);
    run(4);
    slot.set(None);
    assert!(slot.is_active(), "released packets wait");
    assert_eq!(slot.drain().iter().map(|p| p.payload[0]).collect::<Vec<_>>(), [3, 4]);
    assert!(!slot.is_active());
}

#[test]
fn the_injector_repeats_itself() {
    let verdicts = |seed| {
        let mut f = Injector { seed, loss_ppm: 200_000, dup_ppm: 200_000, reorder_ppm: 200_000 }.into_filter();
        let m = meta();
        (0..200).map(|_| f(&PacketView { meta: &m, payload: &[] })).collect::<Vec<_>>()
    };
    assert_eq!(verdicts(1), verdicts(1));
    assert_ne!(verdicts(1), verdicts(2));
}

#[derive(Clone, Debug)]
enum Op {
    Post(usize),
    Deliver { len: usize, bad_key: bool },
    PollRecv(usize),
    Send { signaled: bool, bad: bool },
    PollSend(usize),
    Fail,
    Reset,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        (0..6usize).prop_map(Op::Post),
        (0..30usize, prop::bool::weighted(0.1)).prop_map(|(len, bad_key)| Op::Deliver { len, bad_key }),
        (0..4usize).prop_map(Op::PollRecv),
        (any::<bool>(), prop::bool::weighted(0.1)).prop_map(|(signaled, bad)| Op::Send { signaled, bad }),
        (0..4usize).prop_map(Op::PollSend),
        Just(Op::Fail),
        Just(Op::Reset),
    ]
}

proptest! {
    /// What comes of a send depends on its elements as specified, and on nothing else.
    #[test]
    fn posts_are_judged_as_specified(
        lens in prop::collection::vec(0..700usize, 0..5),
        inline in any::<bool>(),
        registered in prop::collection::vec(any::<bool>(), 5),
    ) {
        let b = Bench::new();
        let (_a, bufs) = b.bufs(1, 1000);
        let mut q = SendQueue::new(SendLimits { depth: 1, sge_max: 3, inline_max: 1100 });
        let lkey = |i: usize| if registered[i] { bufs[0].lkey() } else { !bufs[0].lkey() };
        let sges: Vec<_> = lens.iter().enumerate().map(|(i, &n)| Sge { bytes: &bufs[0][..n], lkey: lkey(i) }).collect();
        let total: usize = lens.iter().sum();
        let got = q.admit(&b.env(QpState::ReadyToSend), &SendWr { inline, ..wr(1, &sges) }, None);
        let expected = if lens.len() > 3 || inline && total > 1100 {
            Err(VerbsError::new("post_send", libc::EINVAL))
        } else if !inline && lens.iter().zip(&registered).any(|(&n, &r)| n > 0 && !r) {
            Ok(Admit::Fatal(WcStatus::LocalProtection))
        } else if total > 1024 {
            Ok(Admit::Done)
        } else {
            Ok(Admit::Transmit { len: total })
        };
        prop_assert_eq!(got, expected);
        prop_assert_eq!(q.last_serial(), u64::from(got.is_ok()));
        prop_assert_eq!(q.has_completions(), matches!(got, Ok(Admit::Done | Admit::Fatal(_))));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    /// Whatever is posted, delivered, polled, failed and reset in whatever order: each buffer is in one place, each
    /// signaled or failed send completes once and in order, and neither queue holds more than its depth.
    #[test]
    fn nothing_is_lost_or_doubled(ops in prop::collection::vec(op(), 1..120), kernel in any::<bool>()) {
        const ALL: usize = 6;
        let b = Bench::new();
        let core = b.core(4, if kernel { LongMessage::Error } else { LongMessage::Drop });
        let (arena, mut home) = b.bufs(ALL, 64);
        let mut q = SendQueue::new(LIMITS);
        let (mut next, mut due, mut told) = (1u64, Vec::new(), Vec::new());
        let mut outstanding = Vec::new();
        for op in ops {
            match op {
                Op::Post(n) => {
                    let keep = home.len() - n.min(home.len());
                    let mut bufs = home.split_off(keep);
                    core.post_recv(&mut bufs).unwrap();
                    home.append(&mut bufs);
                }
                Op::Deliver { len, bad_key } => {
                    let qkey = if bad_key { QKey(0) } else { QKey::UCX };
                    let before = core.rx().waiting();
                    let r = core.rx().deliver(&Datagram { qkey, ..datagram() }, &vec![1; len]);
                    if r.is_ok() {
                        prop_assert_eq!(core.rx().waiting(), before + 1);
                    }
                }
                Op::PollRecv(n) => {
                    let mut out = Vec::new();
                    prop_assert!(core.poll_recv(&mut out, n) <= n);
                    home.extend(out.into_iter().map(|w| w.buf));
                }
                Op::Send { signaled, bad } => {
                    let foreign = [0u8; 4];
                    let sges = [Sge { bytes: &foreign, lkey: 0 }];
                    let w = SendWr { inline: !bad, signaled, ..wr(next, &sges) };
                    let full = outstanding.len() == 4;
                    match q.admit(&b.env(core.state()), &w, None) {
                        Err(e) => {
                            prop_assert!(full && e.errno == libc::ENOMEM);
                            continue;
                        }
                        Ok(Admit::Transmit { .. }) => {
                            q.complete(next, signaled, WcStatus::Success);
                            if signaled { due.push(next) }
                        }
                        Ok(Admit::Done) => due.push(next),
                        Ok(Admit::Fatal(_)) => {
                            core.fail();
                            due.push(next);
                        }
                    }
                    prop_assert!(!full);
                    outstanding.push(next);
                    next += 1;
                }
                Op::PollSend(n) => {
                    let mut out = Vec::new();
                    q.poll(&mut out, n);
                    for w in out {
                        told.push(w.serial);
                        outstanding.retain(|&s| s > w.serial);
                    }
                }
                Op::Fail => core.fail(),
                Op::Reset => {
                    if core.state() == QpState::Error && core.rx().waiting() == 0 && q.reset().is_ok() {
                        core.reset().unwrap();
                        outstanding.clear();
                    }
                }
            }
            let inside = core.posted() + core.rx().waiting();
            prop_assert!(inside <= 4);
            prop_assert_eq!(home.len() + inside, ALL);
        }
        poll_send(&mut q).iter().for_each(|w| told.push(w.0));
        prop_assert_eq!(told, due);
        core.close();
        prop_assert_eq!(Arc::strong_count(&arena), 1 + home.len());
        let mut seen: Vec<_> = home.iter().map(Buf::index).collect();
        seen.sort_unstable();
        seen.dedup();
        prop_assert_eq!(seen.len(), home.len());
    }
}
