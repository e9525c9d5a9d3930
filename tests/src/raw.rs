//! [`Raw`]: a bare UD queue pair that sends any bytes and keeps what it receives. It plays foreign and hostile peers.

use std::sync::Arc;

use ib::{
    addr::{DeviceAddr, IfaceAddr},
    config::{IfaceConfig, MdConfig},
    device::{Access, Device, GRH_LEN, QpInit, RecvWc, SendWr, Sge, UdQp},
    gid::LocalPort,
    md::Md,
    types::{QKey, Qpn},
};
use uct::mem::{ArenaLayout, Buf, Registration};

use crate::{
    fabric::Fabric,
    packets::Parsed,
    world::{Node, World},
};

/// Bytes behind the GRH area that a [`Raw`] can receive and send.
const ROOM: usize = 8192;

/// A bare queue pair.
pub struct Raw<D: Device> {
    qp: D::UdQp,
    device: Arc<D>,
    /// Its port, for addresses.
    pub port: LocalPort,
    free: Vec<Buf>,
    out: Buf,
    serial: u64,
    /// What has arrived and was not taken.
    pub got: Vec<Parsed>,
    _memory: Vec<Box<dyn Registration>>,
}

/// Where a [`Raw`] sends to.
pub struct Target<D: Device> {
    ah: Option<D::Ah>,
    qpn: Qpn,
    device: Arc<D>,
}

impl<D: Device> Drop for Target<D> {
    fn drop(&mut self) {
        if let Some(ah) = self.ah.take() {
            let _ = self.device.destroy_ah(ah);
        }
    }
}

impl<D: Device> Raw<D> {
    /// A queue pair on a device.
    ///
    /// # Panics
    /// If the device refuses.
    pub fn new<F: Fabric<Device = D>>(w: &World<F>, device: Arc<D>) -> Self {
        let md = Md::new(device.clone(), MdConfig::default(), w.fabric.clock(), w.fabric.executor());
        let port = ib::gid::local_port(&*device, 1, &MdConfig::default(), &IfaceConfig::default()).expect("a port");
        let layout = |count, len| ArenaLayout { count, len, front: 0, align: 64, align_offset: 0 };
        let (free, r) = md.register_arena(layout(512, ROOM + GRH_LEN), Access::LOCAL_WRITE).expect("memory");
        let (mut out, s) = md.register_arena(layout(1, ROOM), Access::LOCAL_WRITE).expect("memory");
        let init = QpInit {
            port: 1,
            pkey_index: 0,
            qkey: QKey::UCX,
            send_depth: 256,
            recv_depth: 512,
            send_sge: 1,
            inline_len: 0,
        };
        let qp = device.create_ud_qp(&init).expect("a queue pair");
        let out = out.pop().expect("a buffer");
        let mut raw = Raw { qp, device, port, free, out, serial: 0, got: Vec::new(), _memory: vec![r, s] };
        raw.qp.post_recv(&mut raw.free).expect("receives");
        raw
    }

    /// Its queue pair number.
    pub fn qpn(&self) -> u32 {
        self.qp.qpn().get()
    }

    /// Its device address, without anything that UCX does not have.
    pub fn plain_device_address(&self) -> Vec<u8> {
        DeviceAddr { trailer: None, ..self.port.device_addr(0, ib::addr::Features::empty()) }.to_bytes()
    }

    /// Its device address, with the trailer of soft devices.
    pub fn device_address(&self) -> Vec<u8> {
        self.port.device_addr(0, ib::addr::Features::empty()).to_bytes()
    }

    /// Its interface address.
    pub fn iface_address(&self) -> Vec<u8> {
        IfaceAddr { qpn: self.qp.qpn() }.to_bytes().to_vec()
    }

    /// The interface of a node.
    ///
    /// # Panics
    /// If it cannot be addressed.
    pub fn target<F: Fabric<Device = D>>(&self, node: &Node<F>) -> Target<D> {
        let addr = DeviceAddr::parse(&node.iface().device_address()).expect("an address").0;
        let qpn = IfaceAddr::parse(&node.iface().iface_address()).expect("an address").qpn;
        let attr = ib::addr::ah_attr(&self.port, &addr, 0).expect("an address");
        let ah = self.device.create_ah(&attr).expect("an address handle");
        Target { ah: Some(ah), qpn, device: self.device.clone() }
    }

    /// Sends a packet.
    ///
    /// # Panics
    /// If it is too long for a queue pair of verbs, or the device refuses.
    pub fn send(&mut self, to: &Target<D>, bytes: &[u8]) {
        self.out[..bytes.len()].copy_from_slice(bytes);
        self.serial += 1;
        let sge = [Sge { bytes: &self.out[..bytes.len()], lkey: self.out.lkey() }];
        let wr = SendWr {
            serial: self.serial,
            ah: to.ah.as_ref().expect("an address handle"),
            remote_qpn: to.qpn,
            remote_qkey: QKey::UCX,
            sges: &sge,
            inline: false,
            signaled: true,
            solicited: false,
        };
        self.qp.post_send(&wr).expect("a send");
        self.qp.ring();
        self.qp.poll_send(&mut Vec::new(), 64);
    }

    /// Takes in what has arrived.
    pub fn poll(&mut self) -> usize {
        let mut wcs: Vec<RecvWc> = Vec::new();
        let n = self.qp.poll_recv(&mut wcs, 512);
        for wc in wcs {
            self.got.push(Parsed::new(&wc.buf[GRH_LEN..wc.byte_len as usize]));
            self.free.push(wc.buf);
        }
        self.qp.post_recv(&mut self.free).expect("receives");
        n
    }

    /// What has arrived.
    pub fn take(&mut self) -> Vec<Parsed> {
        self.poll();
        std::mem::take(&mut self.got)
    }
}
