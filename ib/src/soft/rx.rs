//! From the socket to the queue pairs: datagrams are received into slots, split where the kernel coalesced them, checked,
//! and delivered. One thread at a time does it, for all queue pairs of the device.

use std::{net::SocketAddr, sync::Arc};

use tracing::trace;

use super::{
    device::SoftDevice,
    frame::{FrameError, Header, parse},
    icrc::{Flow, IdSolver, Prefix},
    sockaddr::SockAddr,
    socket::Slot,
};
use crate::{
    sw::{Datagram, DropReason, OwnedPacket, PacketMeta, PacketView, QpCore, RxGuard, grh::Grh},
    types::{Gid, Qpn},
};

/// Datagrams per receive call, at most. Each may be a whole run.
const SLOTS: usize = 8;
/// After so many full receives in a row the next offers twice the slots.
const STREAK: usize = 4;

/// What is known of the sender of the last datagram.
#[derive(Debug)]
struct Sender {
    from: SockAddr,
    addr: SocketAddr,
    flow: Flow,
    len: usize,
    prefix: Prefix,
}

/// The receive state of a device, behind its receive lock. Nothing is allocated after `new`.
pub(super) struct RxState {
    slots: Box<[Slot]>,
    /// Slots that the last receive filled.
    filled: usize,
    /// The slot in hand, the offset of its next frame, and the number of that frame.
    current: usize,
    offset: usize,
    position: u16,
    /// Slots to offer to the next receive: one while the wire is slow, which is the quicker call.
    batch: usize,
    /// Receives in a row that filled all slots offered.
    streak: usize,
    overflow_seen: u32,
    solver: IdSolver,
    sender: Option<Sender>,
    /// The other queue pair that was found last.
    other: Option<Arc<QpCore>>,
    /// The state of the queue pair table that `other` and `single` were read in.
    generation: u64,
    single: bool,
}

impl RxState {
    pub(super) fn new() -> RxState {
        RxState {
            slots: (0..SLOTS).map(|_| Slot::new()).collect(),
            filled: 0,
            current: 0,
            offset: 0,
            position: 0,
            batch: 1,
            streak: 0,
            overflow_seen: 0,
            solver: IdSolver::default(),
            sender: None,
            other: None,
            generation: 0,
            single: false,
        }
    }

    /// True if frames wait here that no queue pair had room for.
    pub(super) fn has_staged(&self) -> bool {
        self.current < self.filled
    }

    /// Delivers what is staged, and receives once if nothing is. Bounded by the slots. `own` is the queue pair that polls,
    /// locked.
    ///
    /// While it is the only one and has no receive posted, its packets stay in the socket: there they wait, here they
    /// would be lost.
    pub(super) fn drain(&mut self, dev: &SoftDevice, own: &mut RxGuard<'_>, own_qpn: Qpn) {
        let generation = dev.qps().generation();
        if generation != self.generation {
            self.generation = generation;
            self.single = dev.qps().live() == 1;
            self.other = None;
        }
        if dev.rx_filter().is_active() {
            for p in dev.rx_filter().drain() {
                self.deliver_owned(dev, own, own_qpn, &p);
            }
        }
        if !self.has_staged() {
            if self.single && own.posted() == 0 {
                return;
            }
            self.receive(dev);
        }
        while self.has_staged() {
            if self.single && own.posted() == 0 {
                return;
            }
            self.step(dev, own, own_qpn);
        }
    }

    fn receive(&mut self, dev: &SoftDevice) {
        self.current = 0;
        self.offset = 0;
        self.position = 0;
        self.filled = match dev.socket().receive(&mut self.slots[..self.batch]) {
            Ok(n) => n,
            Err(errno) => {
                trace!("{}: receive: errno {errno}", dev.name());
                0
            }
        };
        // A call for many is dearer than a call for one: it must be likely that there are many.
        self.streak = if self.filled == self.batch { self.streak + 1 } else { 0 };
        if self.streak == 0 {
            self.batch = self.filled.max(1);
        } else if self.streak >= STREAK {
            self.batch = SLOTS.min(self.batch * 2);
            self.streak = 0;
        }
        for slot in &self.slots[..self.filled] {
            if let Some(count) = slot.overflow {
                let lost = count.wrapping_sub(self.overflow_seen);
                self.overflow_seen = count;
                dev.counters().drop_many(DropReason::RxOverflow, u64::from(lost));
            }
            if slot.segment != 0 {
                dev.count_coalesced();
            }
        }
    }

    /// Takes the next frame of the slot in hand.
    #[inline]
    fn step(&mut self, dev: &SoftDevice, own: &mut RxGuard<'_>, own_qpn: Qpn) {
        let slot = &mut self.slots[self.current];
        let end = slot.len.min(slot.buf.len());
        let segment = if slot.segment == 0 { end } else { slot.segment };
        let range = self.offset..end.min(self.offset + segment);
        let position = self.position;
        let cut = slot.len > slot.buf.len();
        self.offset = range.end;
        self.position = self.position.wrapping_add(1);
        if range.end >= end {
            self.current += 1;
            self.offset = 0;
            self.position = 0;
        }
        let frame = &mut slot.buf[range];
        if cut {
            dev.counters().drop_one(DropReason::Malformed);
            return;
        }
        let Some(sender) = Self::sender(&mut self.sender, dev, slot.from, frame.len()) else {
            dev.counters().drop_one(DropReason::Malformed);
            return;
        };
        // The sum first: it changes the frame for a moment, `parse` borrows it for longer. Too short a frame has none.
        let id = sender.prefix.check(position, frame, &mut self.solver);
        if dev.is_capturing() {
            dev.capture(&sender.flow, id.unwrap_or(position), frame);
        }
        let (header, payload) = match parse(frame) {
            Ok(parsed) => parsed,
            Err(e) => {
                dev.counters().drop_one(match e {
                    FrameError::Opcode(_) => DropReason::Opcode,
                    FrameError::Short | FrameError::Version(_) => DropReason::Malformed,
                });
                trace!("{}: dropped a frame from {}: {e}", dev.name(), sender.addr);
                return;
            }
        };
        let Some(id) = id else {
            dev.counters().drop_one(DropReason::Icrc);
            trace!("{}: dropped a frame from {}: wrong ICRC", dev.name(), sender.addr);
            return;
        };
        let d = Datagram {
            src_qpn: header.src_qpn,
            qkey: header.qkey,
            pkey: header.pkey,
            solicited: header.solicited,
            grh: sender.flow.grh(frame_len_of(payload.len(), &header), id),
        };
        if dev.rx_filter().is_active() {
            let meta = PacketMeta {
                src_gid: Gid::from_ip(sender.addr.ip()),
                dst_gid: dev.gid(),
                src_port: sender.addr.port(),
                dst_port: dev.local_addr().port(),
                src_qpn: header.src_qpn,
                dst_qpn: header.dest_qpn,
                qkey: header.qkey,
                pkey: header.pkey,
                solicited: header.solicited,
                route: 0,
            };
            let passed = dev.rx_filter().run(&PacketView { meta: &meta, payload });
            if passed.dropped {
                dev.counters().drop_one(DropReason::Filtered);
            }
            for p in &passed.packets {
                self.deliver_owned(dev, own, own_qpn, p);
            }
        } else if header.dest_qpn == own_qpn {
            // The guard counts its drops.
            let _ = own.deliver(&d, payload);
        } else {
            Self::deliver_other(&mut self.other, dev, header.dest_qpn, &d, payload);
        }
    }

    /// The sender of a datagram, with the sum over its headers for this frame length.
    #[inline]
    fn sender<'a>(cached: &'a mut Option<Sender>, dev: &SoftDevice, from: SockAddr, len: usize) -> Option<&'a Sender> {
        if cached.as_ref().is_none_or(|s| s.from != from) {
            let addr = from.to_std()?;
            let flow = Flow::new(addr, dev.local_addr())?;
            *cached = Some(Sender { from, addr, flow, len, prefix: flow.prefix(len) });
        }
        let sender = cached.as_mut()?;
        if sender.len != len {
            sender.len = len;
            sender.prefix = sender.flow.prefix(len);
        }
        Some(sender)
    }

    fn deliver_other(other: &mut Option<Arc<QpCore>>, dev: &SoftDevice, to: Qpn, d: &Datagram<'_>, payload: &[u8]) {
        if other.as_ref().is_none_or(|qp| qp.qpn() != to) {
            *other = dev.qps().get(to);
        }
        match other {
            Some(qp) => {
                let _ = qp.rx().deliver(d, payload);
            }
            None => dev.counters().drop_one(DropReason::NoQp),
        }
    }

    /// Delivers a packet that a filter has seen.
    fn deliver_owned(&mut self, dev: &SoftDevice, own: &mut RxGuard<'_>, own_qpn: Qpn, p: &OwnedPacket) {
        let m = &p.meta;
        let udp_len = (super::icrc::UDP_LEN + super::frame::frame_len(p.payload.len())) as u16;
        let d = Datagram {
            src_qpn: m.src_qpn,
            qkey: m.qkey,
            pkey: m.pkey,
            solicited: m.solicited,
            grh: Grh::between(m.src_gid, m.dst_gid, udp_len),
        };
        if m.dst_qpn == own_qpn {
            let _ = own.deliver(&d, &p.payload);
        } else {
            Self::deliver_other(&mut self.other, dev, m.dst_qpn, &d, &p.payload);
        }
    }
}

/// The length that a parsed frame had.
fn frame_len_of(payload_len: usize, header: &Header) -> usize {
    super::frame::frame_len(payload_len) + header.imm.map_or(0, |imm| imm.len())
}
