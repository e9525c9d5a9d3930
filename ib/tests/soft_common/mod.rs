//! A soft device with one or more queue pairs, as the tests of the soft device use it.
#![allow(dead_code, unreachable_pub)]

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use ib::{
    device::*,
    soft::{SoftAh, SoftConfig, SoftDevice, SoftQp},
    types::*,
};
use uct::mem::{Arena, ArenaLayout, Buf};

pub const QKEY: QKey = QKey(0x1234_5678);
pub const RECV_LEN: usize = GRH_LEN + 4096;
/// Only an upper bound for a test that hangs; nothing is measured.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A queue pair with registered memory.
pub struct Node {
    pub dev: Arc<SoftDevice>,
    pub qp: SoftQp,
    pub spare: Vec<Buf>,
    pub serial: u64,
    arena: Arc<Arena>,
}

pub fn device(bind: &str) -> Arc<SoftDevice> {
    SoftDevice::open(&SoftConfig { port: Some(0), ..SoftConfig::at(bind.parse().unwrap()) }).unwrap()
}

pub fn init() -> QpInit {
    QpInit { port: 1, pkey_index: 0, qkey: QKEY, send_depth: 1024, recv_depth: 1024, send_sge: 2, inline_len: 64 }
}

impl Node {
    /// A queue pair of `dev` with `recvs` buffers, all of them posted.
    pub fn on(dev: &Arc<SoftDevice>, recvs: usize) -> Node {
        let mut node = Node::without_receives(dev, recvs);
        node.post_all();
        node
    }

    pub fn without_receives(dev: &Arc<SoftDevice>, recvs: usize) -> Node {
        let qp = dev.create_ud_qp(&init()).unwrap();
        let (arena, spare) =
            Arena::new(ArenaLayout { count: recvs, len: RECV_LEN, front: 0, align: 64, align_offset: GRH_LEN })
                .unwrap();
        arena.set_lkey(dev.reg_mr(arena.block(), Access::LOCAL_WRITE).unwrap().lkey);
        Node { dev: dev.clone(), qp, spare, serial: 0, arena }
    }

    pub fn new(bind: &str, recvs: usize) -> Node {
        Node::on(&device(bind), recvs)
    }

    pub fn post_all(&mut self) {
        self.qp.post_recv(&mut self.spare).unwrap();
        assert!(self.spare.is_empty());
    }

    pub fn ah_attr(&self, to: &Node) -> AhAttr {
        let soft = to.dev.identity();
        ah_attr(self.dev.gid(), to.dev.gid(), SoftAv { udp_port: soft.udp_port, host_id: soft.host_id })
    }

    pub fn ah(&self, to: &Node) -> SoftAh {
        self.dev.create_ah(&self.ah_attr(to)).unwrap()
    }

    /// Posts an inline send; the queue pair's limits are those of [`init`], so longer payloads go by `post_long`.
    pub fn post(&mut self, ah: &SoftAh, qpn: Qpn, qkey: QKey, payload: &[u8]) {
        self.serial += 1;
        let sges = [Sge { bytes: payload, lkey: 0 }];
        let wr = SendWr {
            serial: self.serial,
            ah,
            remote_qpn: qpn,
            remote_qkey: qkey,
            sges: &sges,
            inline: true,
            signaled: true,
            solicited: false,
        };
        self.qp.post_send(&wr).unwrap();
        let mut done = Vec::new();
        assert_eq!(self.qp.poll_send(&mut done, 8), 1);
        assert_eq!(done[0], SendWc { serial: self.serial, status: WcStatus::Success });
    }

    /// Posts a send of registered memory: `head` inline-sized from one element and the rest from another.
    pub fn post_long(&mut self, ah: &SoftAh, qpn: Qpn, bytes: &Buf, len: usize) {
        self.serial += 1;
        let (a, b) = bytes[..len].split_at(len / 3);
        let sges = [Sge { bytes: a, lkey: bytes.lkey() }, Sge { bytes: b, lkey: bytes.lkey() }];
        let wr = SendWr {
            serial: self.serial,
            ah,
            remote_qpn: qpn,
            remote_qkey: QKEY,
            sges: &sges,
            inline: false,
            signaled: true,
            solicited: true,
        };
        self.qp.post_send(&wr).unwrap();
        let mut done = Vec::new();
        assert_eq!(self.qp.poll_send(&mut done, 8), 1);
        assert_eq!(done[0].status, WcStatus::Success);
    }

    /// Polls until `count` receives have completed.
    pub fn receive(&mut self, count: usize) -> Vec<RecvWc> {
        let mut out = Vec::new();
        let end = Instant::now() + PATIENCE;
        while out.len() < count {
            let n = self.qp.poll_recv(&mut out, count);
            assert!(n > 0 || Instant::now() < end, "{} of {count} messages; {:?}", out.len(), self.dev);
            if n == 0 {
                std::thread::yield_now();
            }
        }
        out
    }

    /// Takes buffers of completions back and posts them.
    pub fn recycle(&mut self, done: Vec<RecvWc>) {
        self.spare.extend(done.into_iter().map(|wc| wc.buf));
        self.post_all();
    }
}

pub fn ah_attr(sgid: Gid, dgid: Gid, soft: SoftAv) -> AhAttr {
    AhAttr {
        port: 1,
        sl: 0,
        src_path_bits: 0,
        static_rate: 0,
        dlid: Lid(0),
        grh: Some(GlobalRoute { dgid, sgid, hop_limit: 64, traffic_class: 0, flow_label: 0 }),
        soft,
    }
}

pub fn payload_of(wc: &RecvWc) -> &[u8] {
    &wc.buf[GRH_LEN..wc.byte_len as usize]
}

pub fn registered(dev: &SoftDevice, len: usize) -> Buf {
    let (arena, mut bufs) = Arena::new(ArenaLayout { count: 1, len, front: 0, align: 64, align_offset: 0 }).unwrap();
    arena.set_lkey(dev.reg_mr(arena.block(), Access::LOCAL_WRITE).unwrap().lkey);
    bufs.pop().unwrap()
}
