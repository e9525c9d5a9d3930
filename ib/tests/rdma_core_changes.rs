//! What happens to an RDMA device while it is in use: addresses come and go, ports go down, the device is removed.
//!
//! These tests change the network configuration, so they run only in the machine that `ci/soft-roce` boots (it sets
//! `SOFT_ROCE=1`): soft-RoCE device rxe0 on v0, 10.77.0.1/24, and 10.77.0.2 at the other end. Else they print `skipped`.
#![cfg(feature = "rdma-core")]

mod soft_roce;

use std::{
    process::Command,
    sync::{Arc, MutexGuard},
    time::{Duration, Instant},
};

use ib::{
    device::*,
    rdma_core::{RdmaAh, RdmaDevice, RdmaQp, devices},
    types::{QKey, Qpn},
};
use soft_roce::{attr, gid, until_within};
use uct::mem::{Arena, ArenaLayout, Buf};

const PATIENCE: Duration = Duration::from_secs(30);
const ADDR: &str = "10.77.0.1";
const OTHER: &str = "10.77.0.201";

const DEVICE: &str = "rxe0";

/// The right to change things.
struct Rig {
    _turn: MutexGuard<'static, ()>,
}

impl Rig {
    /// `None` where this is not the machine for it.
    fn get(test: &str) -> Option<Rig> {
        Some(Rig { _turn: soft_roce::turn(test)? })
    }

    fn run(&self, line: &str) {
        soft_roce::run(line);
    }

    fn open(&self) -> Arc<RdmaDevice> {
        RdmaDevice::open(DEVICE).unwrap()
    }
}

fn until<T>(what: &str, look: impl FnMut() -> Option<T>) -> T {
    until_within(PATIENCE, what, look)
}

/// Waits for an event and answers what came before it.
fn event(dev: &RdmaDevice, wanted: AsyncEvent) -> Vec<AsyncEvent> {
    let mut before = Vec::new();
    until("the event", || match dev.poll_async_event() {
        Some(e) if e == wanted => Some(()),
        Some(e) => {
            before.push(e);
            None
        }
        None => None,
    });
    before
}

struct Node {
    dev: Arc<RdmaDevice>,
    qp: RdmaQp,
    keys: MrKeys,
    serial: u64,
}

impl Node {
    fn new(dev: &Arc<RdmaDevice>) -> Node {
        let init = QpInit {
            port: 1,
            pkey_index: 0,
            qkey: QKey::UCX,
            send_depth: 64,
            recv_depth: 64,
            send_sge: 2,
            inline_len: 64,
        };
        let mut qp = dev.create_ud_qp(&init).unwrap();
        let (arena, mut bufs) =
            Arena::new(ArenaLayout { count: 32, len: 4136, front: 0, align: 64, align_offset: 0 }).unwrap();
        let keys = dev.reg_mr(arena.block(), Access::LOCAL_WRITE).unwrap();
        arena.set_lkey(keys.lkey);
        qp.post_recv(&mut bufs).unwrap();
        Node { dev: dev.clone(), qp, keys, serial: 0 }
    }

    fn send(&mut self, ah: &RdmaAh, to: Qpn) {
        self.serial += 1;
        let wr = SendWr {
            serial: self.serial,
            ah,
            remote_qpn: to,
            remote_qkey: QKey::UCX,
            sges: &[Sge { bytes: b"hello", lkey: 0 }],
            inline: true,
            signaled: true,
            solicited: false,
        };
        self.qp.post_send(&wr).unwrap();
        self.qp.ring();
    }

    fn sent(&mut self) -> WcStatus {
        let mut out = Vec::new();
        until("the send completion", || {
            self.qp.poll_send(&mut out, 1);
            out.pop()
        })
        .status
    }

    fn receive(&mut self) -> Buf {
        let mut out = Vec::new();
        let wc = until("the message", || {
            self.qp.poll_recv(&mut out, 1);
            out.pop()
        });
        assert_eq!(wc.status, WcStatus::Success);
        wc.buf
    }
}

#[test]
fn an_absent_peer_costs_a_second_and_says_so() {
    let Some(rig) = Rig::get("an_absent_peer") else { return };
    let dev = rig.open();
    assert!(dev.attr().ah_create_sleeps);
    for _ in 0..2 {
        let e = dev.create_ah(&attr(gid(ADDR), gid("10.77.0.250"))).unwrap_err();
        assert_eq!((e.call, e.errno), ("create_ah", libc::ETIMEDOUT));
    }
}

/// One that answers the kernel's question at once, which soft-RoCE alone would sleep a second for.
#[test]
fn a_neighbour_nobody_has_asked_for_yet_is_found() {
    let Some(rig) = Rig::get("a_neighbour_nobody_has_asked_for") else { return };
    let dev = rig.open();
    for cold in [true, false] {
        if cold {
            rig.run("ip neigh flush dev v0");
        }
        let began = Instant::now();
        let ah = dev.create_ah(&attr(gid(ADDR), gid("10.77.0.2"))).unwrap();
        println!("a {} neighbour took {:?}", if cold { "cold" } else { "known" }, began.elapsed());
        dev.destroy_ah(ah).unwrap();
    }
}

/// The way an address was lost and came back at another index is the story of a handle that must not be used again.
#[test]
fn an_own_address_that_goes_takes_the_queue_pair_down_and_a_reset_brings_it_back() {
    let Some(rig) = Rig::get("an_own_address_that_goes") else { return };
    let dev = rig.open();
    rig.run("ip addr add 10.77.0.201/24 dev v0");
    event(&dev, AsyncEvent::GidChange(1));
    let index =
        until("the new GID", || dev.query_gids(1).unwrap().into_iter().find(|g| g.gid == gid(OTHER)).map(|g| g.index));
    let mut node = Node::new(&dev);
    let qpn = node.qp.qpn();
    let ah = dev.create_ah(&attr(gid(OTHER), gid(OTHER))).unwrap();
    node.send(&ah, qpn);
    assert_eq!(node.sent(), WcStatus::Success);
    drop(node.receive());

    rig.run("ip addr del 10.77.0.201/24 dev v0");
    event(&dev, AsyncEvent::GidChange(1));
    until("the GID to go", || dev.query_gids(1).unwrap().iter().all(|g| g.gid != gid(OTHER)).then_some(()));
    // A new handle is refused at once; the old one takes the queue pair down.
    assert_eq!(dev.create_ah(&attr(gid(OTHER), gid(OTHER))).unwrap_err().errno, libc::ENODATA);
    node.send(&ah, qpn);
    assert_ne!(node.sent(), WcStatus::Success);
    assert_eq!(node.qp.state(), QpState::Error);

    node.qp.reset().unwrap();
    let mut flushed = Vec::new();
    until("31 receives", || {
        node.qp.poll_recv(&mut flushed, 64);
        (flushed.len() >= 31).then_some(())
    });
    let mut bufs: Vec<Buf> = flushed.into_iter().map(|w| w.buf).collect();
    node.qp.post_recv(&mut bufs).unwrap();
    let good = dev.create_ah(&attr(gid(ADDR), gid(ADDR))).unwrap();
    node.send(&good, qpn);
    assert_eq!(node.sent(), WcStatus::Success);
    assert_eq!(&node.receive()[GRH_LEN..][..5], b"hello");

    // It comes back while the old handle is there: a handle by value finds it wherever it is.
    rig.run("ip addr add 10.77.0.201/24 dev v0");
    let again = until("the GID to come back", || {
        dev.query_gids(1).unwrap().into_iter().find(|g| g.gid == gid(OTHER)).map(|g| g.index)
    });
    println!("{OTHER} was at index {index}, is at {again}");
    let new = dev.create_ah(&attr(gid(OTHER), gid(OTHER))).unwrap();
    node.send(&new, qpn);
    assert_eq!(node.sent(), WcStatus::Success);
    drop(node.receive());
    for a in [ah, good, new] {
        dev.destroy_ah(a).unwrap();
    }
    rig.run("ip addr del 10.77.0.201/24 dev v0");
    let keys = node.keys;
    drop(node);
    dev.dereg_mr(keys).unwrap();
}

#[test]
fn a_port_that_goes_down_and_up_is_told() {
    let Some(rig) = Rig::get("a_port_that_goes_down") else { return };
    let dev = rig.open();
    rig.run("ip link set v0 down");
    event(&dev, AsyncEvent::PortError(1));
    assert!(!dev.query_port(1).unwrap().active);
    rig.run("ip link set v0 up");
    event(&dev, AsyncEvent::PortActive(1));
    assert!(dev.query_port(1).unwrap().active);
}

/// Last by name: it takes the device away, and makes a new one of the same name.
///
/// Drivers that can part from their users tell them by a fatal event and answer EIO from then on. Soft-RoCE cannot: the
/// device is out of the lists, and its removal waits until the last user has closed it. Both are fine; an abort is not.
#[test]
fn zz_a_device_that_is_removed_under_load_can_be_left() {
    let Some(rig) = Rig::get("zz_a_device_that_is_removed") else { return };
    let dev = rig.open();
    let mut node = Node::new(&dev);
    let qpn = node.qp.qpn();
    let ah = dev.create_ah(&attr(gid(ADDR), gid(ADDR))).unwrap();
    node.send(&ah, qpn);
    assert_eq!(node.sent(), WcStatus::Success);
    let mut removal = Command::new("rdma").args(["link", "delete", DEVICE]).spawn().unwrap();
    let usable = || devices().iter().any(|d| d.name == DEVICE && d.unusable.is_none());
    let mut fatal = false;
    until("the device to leave the lists", || {
        fatal |= dev.poll_async_event() == Some(AsyncEvent::DeviceFatal);
        // Sends go on; whether they arrive is the device's affair.
        if node.qp.state() == QpState::ReadyToSend && node.serial < 1000 {
            node.serial += 1;
            let wr = SendWr {
                serial: node.serial,
                ah: &ah,
                remote_qpn: qpn,
                remote_qkey: QKey::UCX,
                sges: &[Sge { bytes: b"lost?", lkey: 0 }],
                inline: true,
                signaled: true,
                solicited: false,
            };
            if node.qp.post_send(&wr).is_err() {
                node.serial -= 1;
            }
            node.qp.ring();
            let mut sink = Vec::new();
            node.qp.poll_send(&mut sink, 64);
        }
        (!usable()).then_some(())
    });
    println!("{} removed: fatal event {fatal}, queue pair {:?}", DEVICE, node.qp.state());
    let e = RdmaDevice::open(DEVICE).unwrap_err();
    assert_eq!(e.kind(), uct::ErrorKind::NoDevice);
    println!("{e}");
    if fatal {
        let gone = [libc::EIO, libc::ENODEV];
        assert_eq!(dev.poll_async_event(), None, "told once");
        assert!(gone.contains(&node.qp.reset().unwrap_err().errno));
        assert!(gone.contains(&dev.create_ah(&attr(gid(ADDR), gid(ADDR))).unwrap_err().errno));
    }
    // Everything can be given back, whatever the device says, and then it is gone.
    let _ = dev.destroy_ah(ah);
    let keys = node.keys;
    drop(node);
    let _ = dev.dereg_mr(keys);
    let weak = Arc::downgrade(&dev);
    drop(dev);
    assert!(weak.upgrade().is_none());
    assert!(until("the removal to end", || removal.try_wait().unwrap()).success());

    rig.run("rdma link add rxe0 type rxe netdev v0");
    let dev = rig.open();
    let mut node = Node::new(&dev);
    let qpn = node.qp.qpn();
    let ah = dev.create_ah(&attr(gid(ADDR), gid(ADDR))).unwrap();
    node.send(&ah, qpn);
    assert_eq!(node.sent(), WcStatus::Success);
    drop(node.receive());
    node.dev.destroy_ah(ah).unwrap();
}
