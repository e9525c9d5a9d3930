//! [`SoftQp`]: a queue pair of a soft device.

use std::{
    os::fd::{AsRawFd, RawFd},
    sync::{Arc, OnceLock},
};

use tracing::warn;
use uct::mem::Buf;

use super::{
    device::{Dest, SoftAh, SoftDevice},
    epoll::Epoll,
    frame::Header,
    tx::{BATCH_MAX, TxStage},
};
use crate::{
    device::{
        ArmFor, ArmResult, AsyncEvent, QpCaps, QpInit, QpState, RecvWc, SendWc, SendWr, Sge, UdQp, VerbsError,
        VerbsResult, WcStatus,
    },
    sw::{Admit, DropReason, OwnedPacket, PacketMeta, PacketView, QpCore, SendEnv, SendLimits, SendQueue},
    types::Qpn,
};

/// The most inline bytes that are granted; sends are copied in any case.
const INLINE_MAX: u32 = 1024;
/// Granted at least.
const INLINE_MIN: u32 = 256;
/// The most elements per send that are granted.
const SGE_MAX: u32 = 16;

/// See the module.
pub struct SoftQp {
    dev: Arc<SoftDevice>,
    core: Arc<QpCore>,
    send: SendQueue,
    tx: TxStage,
    caps: QpCaps,
    psn: u32,
    /// Readable while the socket is, or while another queue pair's poll has brought us something.
    wake: OnceLock<Epoll>,
}

impl SoftQp {
    pub(super) fn new(dev: Arc<SoftDevice>, core: Arc<QpCore>, init: &QpInit) -> SoftQp {
        let caps = QpCaps {
            inline_len: init.inline_len.clamp(INLINE_MIN, INLINE_MAX),
            send_sge: init.send_sge.min(SGE_MAX),
            copies_sends: true,
            send_batch: BATCH_MAX as u32,
            events: true,
        };
        let limits = SendLimits { depth: init.send_depth, sge_max: caps.send_sge, inline_max: caps.inline_len };
        let tx = TxStage::new(dev.port().mtu_bytes());
        SoftQp { dev, core, send: SendQueue::new(limits), tx, caps, psn: 0, wake: OnceLock::new() }
    }

    /// Its device.
    pub fn device(&self) -> &Arc<SoftDevice> {
        &self.dev
    }

    #[inline]
    fn stage(&mut self, wr: &SendWr<'_, SoftAh>, len: usize) {
        if self.dev.tx_filter().is_active() {
            return self.stage_filtered(wr);
        }
        if self.tx.is_full(len) {
            self.tx.flush(&self.dev);
        }
        let header = Header {
            solicited: wr.solicited,
            pkey: self.core.pkey(),
            dest_qpn: wr.remote_qpn,
            psn: self.next_psn(),
            qkey: wr.remote_qkey,
            src_qpn: self.core.qpn(),
            imm: None,
        };
        self.tx.push(&wr.ah.dest, &header, len, self.dev.uses_gso(), |out| gather(out, wr.sges));
    }

    fn next_psn(&mut self) -> u32 {
        self.psn = self.psn.wrapping_add(1) & Qpn::MAX;
        self.psn
    }

    #[cold]
    fn stage_filtered(&mut self, wr: &SendWr<'_, SoftAh>) {
        let payload: Vec<u8> = wr.sges.iter().flat_map(|s| s.bytes).copied().collect();
        let dest = &wr.ah.dest;
        let meta = PacketMeta {
            src_gid: self.dev.gid(),
            dst_gid: dest.dgid,
            src_port: self.dev.local_addr().port(),
            dst_port: dest.udp_port,
            src_qpn: self.core.qpn(),
            dst_qpn: wr.remote_qpn,
            qkey: wr.remote_qkey,
            pkey: self.core.pkey(),
            solicited: wr.solicited,
            route: u128::from(dest.tos),
        };
        let passed = self.dev.tx_filter().run(&PacketView { meta: &meta, payload: &payload });
        if passed.dropped {
            self.dev.counters().drop_one(DropReason::Filtered);
        }
        passed.packets.iter().for_each(|p| self.stage_owned(p));
    }

    /// Stages a packet that a filter has seen, now or long ago and of any queue pair of the device.
    fn stage_owned(&mut self, p: &OwnedPacket) {
        let m = &p.meta;
        // It has had a destination before, so it has one now.
        let Some(dest) = Dest::new(self.dev.local_addr(), m.dst_gid, m.dst_port, m.route as u8) else { return };
        if self.tx.is_full(p.payload.len()) {
            self.tx.flush(&self.dev);
        }
        let header = Header {
            solicited: m.solicited,
            pkey: m.pkey,
            dest_qpn: m.dst_qpn,
            psn: self.next_psn(),
            qkey: m.qkey,
            src_qpn: m.src_qpn,
            imm: None,
        };
        let gso = self.dev.uses_gso();
        self.tx.push(&dest, &header, p.payload.len(), gso, |out| out.copy_from_slice(&p.payload));
    }
}

/// Copies the elements to `out`, whose length is their sum.
#[inline]
fn gather(out: &mut [u8], sges: &[Sge<'_>]) {
    let mut at = 0;
    for sge in sges {
        let end = at + sge.bytes.len();
        out[at..end].copy_from_slice(sge.bytes);
        at = end;
    }
}

impl UdQp for SoftQp {
    type Ah = SoftAh;

    fn qpn(&self) -> Qpn {
        self.core.qpn()
    }

    fn caps(&self) -> QpCaps {
        self.caps
    }

    fn state(&self) -> QpState {
        self.core.state()
    }

    fn reset(&mut self) -> VerbsResult<()> {
        self.send.reset()?;
        self.core.reset()
    }

    #[inline]
    fn post_send(&mut self, wr: &SendWr<'_, SoftAh>) -> VerbsResult<()> {
        let dev = &*self.dev;
        let env = SendEnv { state: self.core.state(), port: dev.port(), mrs: dev.mrs(), counters: dev.counters() };
        match self.send.admit(&env, wr, Some(&wr.ah.sgid))? {
            Admit::Transmit { len } => {
                self.stage(wr, len);
                // The bytes are copied: for the caller the send is over.
                self.send.complete(wr.serial, wr.signaled, WcStatus::Success);
            }
            Admit::Done => {}
            Admit::Fatal(status) => {
                warn!("{}: queue pair {} failed a send: {status:?}", self.dev.name(), self.qpn());
                self.core.fail();
                self.dev.events().push(AsyncEvent::QpFatal(self.qpn()));
            }
        }
        Ok(())
    }

    #[inline]
    fn ring(&mut self) {
        if self.dev.tx_filter().is_active() {
            self.dev.tx_filter().drain().iter().for_each(|p| self.stage_owned(p));
        }
        self.tx.flush(&self.dev);
    }

    fn post_recv(&mut self, bufs: &mut Vec<Buf>) -> VerbsResult<()> {
        self.core.post_recv(bufs)?;
        // What waited for room is as good as arrived: wake who armed before he posted.
        if self.dev.has_staged() {
            self.core.notify(ArmFor::RECV | ArmFor::SOLICITED);
        }
        Ok(())
    }

    fn poll_send(&mut self, out: &mut Vec<SendWc>, max: usize) -> usize {
        self.send.poll(out, max)
    }

    #[inline]
    fn poll_recv(&mut self, out: &mut Vec<RecvWc>, max: usize) -> usize {
        let mut own = self.core.rx();
        let n = own.poll(out, max);
        if n > 0 || max == 0 {
            return n;
        }
        // Against the order of locks, which is why it is only tried: who has it may be waiting for ours, to deliver to us.
        let Some(mut rx) = self.dev.rx().try_lock() else { return 0 };
        rx.drain(&self.dev, &mut own, self.core.qpn());
        self.dev.set_staged(rx.has_staged());
        own.poll(out, max)
    }

    fn arm(&mut self, what: ArmFor) -> VerbsResult<ArmResult> {
        if self.wake_fd().is_none() {
            return Err(VerbsError::new("req_notify_cq", libc::EMFILE));
        }
        // From here on, who drains the socket and brings us something signals our eventfd.
        if self.core.arm(what, || self.send.has_completions())? == ArmResult::Busy {
            return Ok(ArmResult::Busy);
        }
        // And if nobody drains it, the socket itself is in our fd; this look only saves the caller a wait. Without a
        // receive posted nothing can complete.
        let for_recv = what.intersects(ArmFor::RECV | ArmFor::SOLICITED);
        if for_recv && self.core.posted() > 0 && (self.dev.has_staged() || self.dev.socket().is_readable()) {
            return Ok(ArmResult::Busy);
        }
        Ok(ArmResult::Armed)
    }

    fn event_fd(&self) -> Option<RawFd> {
        self.wake_fd()
    }
}

impl SoftQp {
    fn wake_fd(&self) -> Option<RawFd> {
        if let Some(epoll) = self.wake.get() {
            return Some(epoll.as_raw_fd());
        }
        let epoll = Epoll::of(&[self.core.event_fd()?, self.dev.socket().as_raw_fd()]).ok()?;
        Some(self.wake.get_or_init(|| epoll).as_raw_fd())
    }
}

impl Drop for SoftQp {
    fn drop(&mut self) {
        self.dev.qps().remove(self.core.qpn());
        self.core.close();
    }
}

impl std::fmt::Debug for SoftQp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SoftQp({} of {:?})", self.qpn(), self.dev)
    }
}
