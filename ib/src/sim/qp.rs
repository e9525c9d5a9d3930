//! [`SimQp`]: posting at once or late.

use std::{collections::VecDeque, os::fd::RawFd, sync::Arc, time::Duration};

use parking_lot::Mutex;
use uct::{mem::Buf, time::Time};

use super::device::{AhCore, SimAh, SimDevice};
use crate::{
    device::{
        ArmFor, ArmResult, QpCaps, QpInit, QpState, RecvWc, SendWc, SendWr, UdQp, VerbsError, VerbsResult, WcStatus,
    },
    sw::{Admit, OwnedPacket, PacketMeta, QpCore, SendEnv, SendLimits, SendQueue},
    types::{Gid, QKey, Qpn},
};

/// A posted send, as the device remembers it.
#[derive(Debug)]
struct Posted {
    serial: u64,
    signaled: bool,
    solicited: bool,
    ah: Arc<AhCore>,
    remote_qpn: Qpn,
    remote_qkey: QKey,
    len: usize,
    /// Key, address and length of what must be covered by registrations.
    sges: Vec<(u32, usize, usize)>,
    /// The bytes, if they were copied by the post.
    copied: Option<Vec<u8>>,
}

#[derive(Debug)]
struct SendSide {
    queue: SendQueue,
    /// Late sends, in order.
    pending: VecDeque<Posted>,
    /// When the last of them is executed.
    last: Time,
    polled: u64,
    /// Sends leave nothing behind: neither buffers nor address handles are looked at after the post.
    copies: bool,
}

/// What the network and address handles know of a queue pair.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) core: QpCore,
    send: Mutex<SendSide>,
}

impl Shared {
    /// True if the send may still name its address handle: until a completion at or past `serial` was polled.
    pub(super) fn is_outstanding(&self, serial: u64) -> bool {
        let send = self.send.lock();
        !send.copies && send.polled < serial
    }

    /// Executes the late sends up to `serial`. Those that were flushed meanwhile are not there any more.
    pub(super) fn execute_until(&self, dev: &SimDevice, serial: u64) {
        loop {
            let mut send = self.send.lock();
            let due = send.pending.front().is_some_and(|p| p.serial <= serial);
            let Some(posted) = send.pending.pop_front_if(|_| due) else { return };
            let packet = self.execute(dev, &mut send, posted);
            drop(send);
            if let Some(packet) = packet {
                dev.send(packet);
            }
        }
    }

    /// Decides about a send, reads its bytes and completes it. Answers the packet that leaves.
    fn execute(&self, dev: &SimDevice, send: &mut SendSide, p: Posted) -> Option<OwnedPacket> {
        let port = dev.port_state();
        let env = SendEnv { state: self.core.state(), port, mrs: dev.mrs(), counters: dev.counters() };
        let sges = p.sges.iter().copied();
        let packet = match send.queue.decide(&env, p.serial, p.signaled, p.len, p.ah.sgid.as_ref(), sges) {
            Admit::Done => None,
            Admit::Fatal(_) => {
                self.core.fail();
                None
            }
            Admit::Transmit { len } => {
                let payload = p.copied.unwrap_or_else(|| {
                    let mut bytes = Vec::with_capacity(len);
                    for &(lkey, addr, len) in p.sges.iter().filter(|s| s.2 > 0) {
                        // `decide` has found all of them covered.
                        dev.mrs().read(lkey, addr, len, &mut bytes);
                    }
                    bytes
                });
                send.queue.complete(p.serial, p.signaled, WcStatus::Success);
                let grh = p.ah.attr.grh;
                let meta = PacketMeta {
                    src_gid: grh.map_or(Gid::ZERO, |g| g.sgid),
                    dst_gid: grh.map_or(Gid::ZERO, |g| g.dgid),
                    src_port: dev.config().soft.map_or(0, |s| s.udp_port),
                    dst_port: p.ah.attr.soft.udp_port,
                    src_qpn: self.core.qpn(),
                    dst_qpn: p.remote_qpn,
                    qkey: p.remote_qkey,
                    pkey: self.core.pkey(),
                    solicited: p.solicited,
                    route: p.ah.route,
                };
                Some(OwnedPacket { meta, payload })
            }
        };
        if send.queue.has_completions() {
            self.core.notify(ArmFor::SEND);
        }
        packet
    }

    /// In ERROR, pending sends are flushed at once: nobody waits for their time.
    fn flush_pending(&self, send: &mut SendSide) {
        if self.core.state() == QpState::Error {
            while let Some(p) = send.pending.pop_front() {
                send.queue.complete(p.serial, p.signaled, WcStatus::WrFlush);
            }
        }
    }
}

/// A UD queue pair of a [`SimDevice`].
#[derive(Debug)]
pub struct SimQp {
    dev: Arc<SimDevice>,
    qp: Arc<Shared>,
    caps: QpCaps,
    /// Posted and not rung.
    batch: Vec<Posted>,
}

impl SimQp {
    pub(super) fn create(dev: &Arc<SimDevice>, init: &QpInit) -> VerbsResult<SimQp> {
        let cfg = dev.config();
        let over = init.send_sge > cfg.sge_max || init.send_depth.max(init.recv_depth) > cfg.depth_max;
        if over {
            return Err(VerbsError::new("create_qp", libc::EINVAL));
        }
        // Callers cannot ask for the limit beforehand: they get what there is.
        let inline_max = init.inline_len.min(cfg.inline_max);
        let limits = SendLimits { depth: init.send_depth, sge_max: init.send_sge, inline_max };
        let qp = dev.qps.insert(|qpn| {
            let (mrs, counters) = (dev.mrs().clone(), dev.counters().clone());
            let core = QpCore::new(qpn, init, dev.port_state(), mrs, counters, cfg.long_message)?;
            let send = SendSide {
                queue: SendQueue::new(limits),
                pending: VecDeque::new(),
                last: Time::ZERO,
                polled: 0,
                copies: cfg.late_sends.is_none(),
            };
            Ok(Arc::new(Shared { core, send: Mutex::new(send) }))
        })?;
        let caps = QpCaps {
            inline_len: inline_max,
            send_sge: init.send_sge,
            copies_sends: cfg.late_sends.is_none(),
            send_batch: cfg.send_batch.max(1),
            events: cfg.events,
        };
        Ok(SimQp { dev: dev.clone(), qp, caps, batch: Vec::new() })
    }

    fn launch(&mut self, posted: Posted) {
        let mut send = self.qp.send.lock();
        if self.caps.copies_sends {
            let packet = self.qp.execute(&self.dev, &mut send, posted);
            drop(send);
            if let Some(packet) = packet {
                self.dev.send(packet);
            }
            return;
        }
        let serial = posted.serial;
        send.pending.push_back(posted);
        let at = (self.dev.net().now() + Duration::from_nanos(self.dev.draw_late())).max(send.last);
        send.last = at;
        drop(send);
        self.dev.net().schedule_execute(at, &self.dev, &self.qp, serial);
    }
}

impl UdQp for SimQp {
    type Ah = SimAh;

    fn qpn(&self) -> Qpn {
        self.qp.core.qpn()
    }

    fn caps(&self) -> QpCaps {
        self.caps
    }

    fn state(&self) -> QpState {
        self.qp.core.state()
    }

    fn reset(&mut self) -> VerbsResult<()> {
        if self.dev.is_fatal() {
            return Err(VerbsError::new("modify_qp", libc::EIO));
        }
        self.ring();
        if self.state() == QpState::Error {
            let mut send = self.qp.send.lock();
            self.qp.flush_pending(&mut send);
            send.queue.reset()?;
            send.polled = send.queue.last_serial();
        }
        self.qp.core.reset()
    }

    fn post_send(&mut self, wr: &SendWr<'_, SimAh>) -> VerbsResult<()> {
        if wr.ah.0.node() != self.dev.node() {
            return Err(VerbsError::new("post_send", libc::EINVAL));
        }
        let len = self.qp.send.lock().queue.post(wr.serial, wr.sges, wr.inline)?;
        wr.ah.0.note_use(&self.qp, wr.serial);
        let checked = if wr.inline { &[] } else { wr.sges };
        let copy = wr.inline || self.caps.copies_sends;
        let posted = Posted {
            serial: wr.serial,
            signaled: wr.signaled,
            solicited: wr.solicited,
            ah: wr.ah.0.clone(),
            remote_qpn: wr.remote_qpn,
            remote_qkey: wr.remote_qkey,
            len,
            sges: checked.iter().map(|s| (s.lkey, s.bytes.as_ptr() as usize, s.bytes.len())).collect(),
            // What is too long never leaves: do not copy gigabytes of it.
            copied: copy.then(|| {
                if len > self.dev.port_state().mtu_bytes() {
                    return Vec::new();
                }
                wr.sges.iter().flat_map(|s| s.bytes).copied().collect()
            }),
        };
        self.batch.push(posted);
        if self.batch.len() >= self.caps.send_batch as usize {
            self.ring();
        }
        Ok(())
    }

    fn ring(&mut self) {
        let mut batch = std::mem::take(&mut self.batch);
        for posted in batch.drain(..) {
            self.launch(posted);
        }
        self.batch = batch;
    }

    fn post_recv(&mut self, bufs: &mut Vec<Buf>) -> VerbsResult<()> {
        self.qp.core.post_recv(bufs)
    }

    fn poll_send(&mut self, out: &mut Vec<SendWc>, max: usize) -> usize {
        let mut send = self.qp.send.lock();
        self.qp.flush_pending(&mut send);
        let n = send.queue.poll(out, max);
        if n > 0 {
            send.polled = out[out.len() - 1].serial;
        }
        n
    }

    fn poll_recv(&mut self, out: &mut Vec<RecvWc>, max: usize) -> usize {
        self.qp.core.poll_recv(out, max)
    }

    fn arm(&mut self, what: ArmFor) -> VerbsResult<ArmResult> {
        if !self.caps.events {
            return Err(VerbsError::new("req_notify_cq", libc::EOPNOTSUPP));
        }
        let qp = &self.qp;
        qp.core.arm(what, || {
            let mut send = qp.send.lock();
            qp.flush_pending(&mut send);
            send.queue.has_completions()
        })
    }

    fn event_fd(&self) -> Option<RawFd> {
        if self.caps.events { self.qp.core.event_fd() } else { None }
    }
}

impl Drop for SimQp {
    fn drop(&mut self) {
        self.dev.qps.remove(self.qp.core.qpn());
        self.qp.core.close();
        let pending = {
            let mut send = self.qp.send.lock();
            send.polled = u64::MAX;
            std::mem::take(&mut send.pending)
        };
        drop(pending);
    }
}
