//! [`RdmaQp`]: a queue pair of an [`RdmaDevice`].
#![allow(unsafe_code)]

use std::{collections::VecDeque, hint::cold_path, os::fd::RawFd, ptr, sync::Arc};

use rdma_sys::{ibv_recv_wr, ibv_sge, ibv_wc, ibv_wc_flags, ibv_wc_status};
use tracing::{debug, warn};
use uct::mem::Buf;

use super::{
    attr,
    device::{RdmaAh, RdmaDevice},
    ffi::{Zero, check, last_errno},
    handles::{Channel, Cq, Granted, Qp, is_gone},
    post::{self, SLOTS, SendStage},
    slab::RecvSlab,
};
use crate::{
    away::{Lendable, busy},
    device::{
        ArmFor, ArmResult, GRH_LEN, QpCaps, QpInit, QpState, RecvWc, ResetJob, ResetWaker, SendWc, SendWr, UdQp,
        VerbsError, VerbsResult, WcStatus,
    },
    types::Qpn,
};

/// Completions taken from a queue, and receives given to it, in one call.
const CHUNK: usize = 32;
/// More inline bytes than this are not used.
const INLINE_MAX: u32 = 1024;
/// More elements per send than this are not used.
const SGE_MAX: u32 = 16;

/// A UD queue pair. See the [module](super).
pub struct RdmaQp {
    /// Away while it is reset on another thread, which then has it to itself.
    qp: Lendable<Qp>,
    qpn: Qpn,
    stage: SendStage,
    recvs: RecvSlab,
    /// Completions that were taken from the device before somebody asked for them.
    ready: Ready,
    wcs: Box<[ibv_wc]>,
    /// How many of `wcs` [`UdQp::start_recv`] has found, and how many of these were taken.
    polled: usize,
    taken: usize,
    recv_wrs: RecvChain,
    init: QpInit,
    caps: QpCaps,
    posted: u64,
    done: u64,
    failed: bool,
    channel: Arc<Channel>,
    dev: Arc<RdmaDevice>,
    /// See [`UdQp::destroy`].
    rest: Option<Box<dyn Send>>,
}

/// What must not go before the queue pair has gone.
struct Remains {
    recvs: RecvSlab,
    rest: Option<Box<dyn Send>>,
    dev: Arc<RdmaDevice>,
}

#[derive(Default)]
struct Ready {
    recv: VecDeque<RecvWc>,
    send: VecDeque<SendWc>,
}

/// Room for a chain of receive work requests, each of which leads to the next and to its element.
struct RecvChain {
    wrs: Box<[ibv_recv_wr]>,
    sges: Box<[ibv_sge]>,
}

// SAFETY: its pointers lead into its own boxes.
unsafe impl Send for RecvChain {}

impl RdmaQp {
    pub(super) fn create(dev: Arc<RdmaDevice>, init: &QpInit) -> VerbsResult<RdmaQp> {
        let channel = Arc::new(Channel::create(dev.pd().ctx())?);
        let init = QpInit { send_sge: init.send_sge.clamp(1, dev.max_sge().clamp(1, SGE_MAX)), ..*init };
        let make = |init: &QpInit| {
            let send_cq = Cq::create(&channel, init.send_depth)?;
            let recv_cq = Cq::create(&channel, init.recv_depth)?;
            Qp::create(dev.pd(), send_cq, recv_cq, init)
        };
        let (qp, granted): (Qp, Granted) = match make(&init) {
            // Some providers refuse inline bytes that others round down.
            Err(e) if e.errno == libc::EINVAL && init.inline_len > 0 => make(&QpInit { inline_len: 0, ..init })?,
            other => other?,
        };
        qp.to_ready(&init)?;
        let caps = QpCaps {
            inline_len: granted.inline_len.min(INLINE_MAX),
            send_sge: granted.send_sge.clamp(1, SGE_MAX),
            copies_sends: false,
            send_batch: SLOTS as u32,
            events: true,
        };
        debug!(
            "{}: queue pair {:#x} on port {}, {} inline bytes, posting by {}",
            dev.name(),
            qp.qpn(),
            init.port,
            caps.inline_len,
            if qp.ex().is_some() { "ibv_wr_*" } else { "ibv_post_send" }
        );
        Ok(RdmaQp {
            qpn: Qpn::truncate(qp.qpn()),
            qp: Lendable::Here(qp),
            stage: SendStage::new(caps.send_sge, caps.inline_len, dev.is_soft_roce()),
            recvs: RecvSlab::new(init.recv_depth),
            ready: Ready::default(),
            wcs: (0..CHUNK).map(|_| ibv_wc::zero()).collect(),
            polled: 0,
            taken: 0,
            recv_wrs: RecvChain::new(),
            init,
            caps,
            posted: 0,
            done: 0,
            failed: false,
            channel,
            dev,
            rest: None,
        })
    }

    /// Its device.
    pub fn device(&self) -> &Arc<RdmaDevice> {
        &self.dev
    }

    #[cold]
    fn fail(&mut self, e: &VerbsError) {
        if !self.failed {
            warn!("{}: queue pair {} failed: {e}", self.dev.name(), self.qpn());
            self.failed = true;
        }
        self.dev.expect_event();
    }

    /// After a completion with an error, which takes the queue pair out of service: into SQE if it was a send, else into ERROR
    /// (InfiniBand Architecture Specification, volume 1, 10.3.1). So the device is not asked, which may sleep.
    #[cold]
    #[inline(never)]
    fn went_down(&mut self) {
        self.failed = true;
        self.dev.expect_event();
    }

    /// What can be known to be wrong before the provider sees it.
    #[inline]
    fn check_send(&self, wr: &SendWr<'_, RdmaAh>) -> VerbsResult<()> {
        if self.posted - self.done >= u64::from(self.init.send_depth) {
            return Err(VerbsError::new("post_send", libc::ENOMEM));
        }
        let too_long =
            wr.inline && wr.sges.iter().map(|s| s.bytes.len()).sum::<usize>() > self.caps.inline_len as usize;
        if too_long || !wr.ah.0.is_of(self.dev.pd()) {
            return Err(VerbsError::new("post_send", libc::EINVAL));
        }
        Ok(())
    }

    /// With what was staged before it, and several elements, if need be.
    #[inline(never)]
    fn post_staged(&mut self, wr: &SendWr<'_, RdmaAh>) -> VerbsResult<()> {
        self.post_send(wr)?;
        self.flush();
        Ok(())
    }

    #[inline]
    fn flush(&mut self) {
        // Nothing is staged while it is away.
        if let Some(qp) = self.qp.get()
            && let Err(e) = self.stage.flush(qp)
        {
            self.fail(&e);
        }
    }

    /// Gives everything back that was posted: what the device has completed comes first, then what it had not.
    fn after_reset(&mut self, result: VerbsResult<()>) -> VerbsResult<()> {
        if let Err(e) = result {
            // What is posted may still be with the device, so it stays.
            self.fail(&e);
            return Err(e);
        }
        let (mut recvs, mut sends) = (Vec::new(), Vec::new());
        while self.poll_recv_cq(&mut recvs, CHUNK) == CHUNK {}
        while self.poll_send_cq(&mut sends, CHUNK) == CHUNK {}
        self.ready.recv.extend(recvs);
        let flushed = |buf| RecvWc {
            buf,
            byte_len: 0,
            src_qpn: Qpn::truncate(0),
            grh: false,
            solicited: false,
            status: WcStatus::WrFlush,
        };
        self.ready.recv.extend(self.recvs.drain().into_iter().map(flushed));
        self.ready.send.clear();
        self.done = self.posted;
        self.failed = false;
        Ok(())
    }

    fn poll_send_cq(&mut self, out: &mut Vec<SendWc>, max: usize) -> usize {
        let (mut n, mut failed) = (0, false);
        while n < max {
            let want = (max - n).min(CHUNK);
            let Some(qp) = self.qp.get() else { break };
            let got = match poll_cq(&qp.send_cq, &mut self.wcs[..want]) {
                Ok(got) => got,
                Err(e) => {
                    self.fail(&e);
                    break;
                }
            };
            for wc in &self.wcs[..got] {
                let status = attr::status(wc.status);
                failed |= status != WcStatus::Success;
                self.done = self.done.max(wc.wr_id);
                out.push(SendWc { serial: wc.wr_id, status });
            }
            n += got;
            if got < want {
                break;
            }
        }
        if failed {
            self.went_down();
        }
        n
    }

    /// Appends at most `max` completions of the device, and no more than [`CHUNK`]; answers how many.
    #[inline]
    fn poll_recv_cq(&mut self, out: &mut Vec<RecvWc>, max: usize) -> usize {
        let Some(qp) = self.qp.get() else { return 0 };
        let got = match poll_cq(&qp.recv_cq, &mut self.wcs[..max.min(CHUNK)]) {
            Ok(got) => got,
            Err(e) => {
                self.fail(&e);
                return 0;
            }
        };
        let before = out.len();
        for i in 0..got {
            out.extend(self.take_recv(i));
        }
        out.len() - before
    }

    /// The receive that was completed by `wcs[i]`.
    #[inline]
    fn take_recv(&mut self, i: usize) -> Option<RecvWc> {
        let wc = self.wcs.get(i)?;
        let Some(buf) = self.recvs.take(wc.wr_id) else {
            unknown_receive(&self.dev);
            return None;
        };
        let (byte_len, src_qpn) = (wc.byte_len, Qpn::truncate(wc.src_qp));
        let grh = wc.wc_flags & ibv_wc_flags::IBV_WC_GRH.0 != 0;
        let mut status = WcStatus::Success;
        if wc.status != ibv_wc_status::IBV_WC_SUCCESS {
            status = attr::status(wc.status);
            self.went_down();
        }
        // Whether the sender asked to wake us a work completion does not tell.
        Some(RecvWc { buf, byte_len, src_qpn, grh, solicited: false, status })
    }

    /// Appends at most `max` completions: first those that were taken from the device before somebody asked.
    #[inline(never)]
    fn poll_recv_many(&mut self, out: &mut Vec<RecvWc>, max: usize) -> usize {
        let mut n = max.min(self.ready.recv.len());
        out.extend(self.ready.recv.drain(..n));
        while n < max {
            let want = (max - n).min(CHUNK);
            let got = self.poll_recv_cq(out, want);
            n += got;
            if got < want {
                break;
            }
        }
        n
    }
}

#[cold]
#[inline(never)]
fn unknown_receive(dev: &RdmaDevice) {
    debug!("{}: a completion of an unknown receive", dev.name());
}

/// A push in a function of its own, so that the loop has nothing to keep in memory for a panic in it.
#[cold]
#[inline(never)]
fn put_back(bufs: &mut Vec<Buf>, buf: Buf) {
    bufs.push(buf);
}

/// Takes completions from a queue.
#[inline]
fn poll_cq(cq: &Cq, wcs: &mut [ibv_wc]) -> VerbsResult<usize> {
    // SAFETY: a live queue, and room for as many completions as are asked for.
    let n = unsafe { rdma_sys::ibv_poll_cq(cq.ptr().as_ptr(), wcs.len() as i32, wcs.as_mut_ptr()) };
    match usize::try_from(n) {
        Ok(n) => Ok(n.min(wcs.len())),
        Err(_) => Err(VerbsError::new("poll_cq", if n == -1 { last_errno() } else { n.saturating_abs() })),
    }
}

impl RecvChain {
    fn new() -> Self {
        let mut sges: Box<[ibv_sge]> = vec![ibv_sge { addr: 0, length: 0, lkey: 0 }; CHUNK].into();
        let mut wrs: Box<[ibv_recv_wr]> = (0..CHUNK)
            .map(|_| ibv_recv_wr { wr_id: 0, next: ptr::null_mut(), sg_list: ptr::null_mut(), num_sge: 1 })
            .collect();
        let first_sge = sges.as_mut_ptr();
        // Exposed addresses, as in `SendStage::flush_plain`.
        let first = wrs.as_mut_ptr().expose_provenance();
        for (i, wr) in wrs.iter_mut().enumerate() {
            wr.next = ptr::with_exposed_provenance_mut(first + (i + 1) * size_of::<ibv_recv_wr>());
            wr.sg_list = first_sge.wrapping_add(i);
        }
        RecvChain { wrs, sges }
    }

    /// The work requests and their elements, of which only numbers and elements are to be written.
    #[inline]
    fn places(&mut self) -> impl Iterator<Item = (&mut ibv_recv_wr, &mut ibv_sge)> {
        self.wrs.iter_mut().zip(self.sges.iter_mut())
    }

    /// Posts the first `n`. An error says also how many were posted.
    fn post(&mut self, qp: &Qp, n: usize) -> Result<(), (usize, VerbsError)> {
        let Some(last) = n.checked_sub(1) else { return Ok(()) };
        let next = std::mem::replace(&mut self.wrs[last].next, ptr::null_mut());
        let first = self.wrs.as_mut_ptr();
        let mut bad: *mut ibv_recv_wr = ptr::null_mut();
        // SAFETY: a live queue pair, and a chain of work requests whose buffers the slab owns from now until they
        // complete or the queue pair is reset or destroyed.
        let rc = unsafe { rdma_sys::ibv_post_recv(qp.ptr().as_ptr(), first, &raw mut bad) };
        self.wrs[last].next = next;
        check("post_recv", rc).map_err(|e| {
            let posted = bad.addr().checked_sub(first.addr()).map_or(0, |bytes| bytes / size_of::<ibv_recv_wr>());
            (posted.min(n), e)
        })
    }
}

impl UdQp for RdmaQp {
    type Ah = RdmaAh;

    fn qpn(&self) -> Qpn {
        self.qpn
    }

    fn caps(&self) -> QpCaps {
        self.caps
    }

    #[inline]
    fn state(&self) -> QpState {
        if self.failed { QpState::Error } else { QpState::ReadyToSend }
    }

    fn reset(&mut self) -> VerbsResult<()> {
        let Some(qp) = self.qp.get() else { return Err(busy("modify_qp")) };
        self.stage.clear();
        let result = qp.set_up_again(&self.init);
        self.after_reset(result)
    }

    fn begin_reset(&mut self, wake: ResetWaker) -> VerbsResult<Option<ResetJob>> {
        let init = self.init;
        let job = self.qp.lend(move |qp| qp.set_up_again(&init), wake).ok_or(busy("modify_qp"))?;
        self.stage.clear();
        self.failed = true;
        Ok(Some(job))
    }

    fn finish_reset(&mut self) -> Option<VerbsResult<()>> {
        let result = self.qp.take_back()?;
        Some(self.after_reset(result))
    }

    fn destroy(mut self, rest: Box<dyn Send>) {
        self.rest = Some(rest);
    }

    #[inline]
    fn post_send(&mut self, wr: &SendWr<'_, RdmaAh>) -> VerbsResult<()> {
        self.check_send(wr)?;
        if self.qp.get().is_none() {
            cold_path();
            return Err(busy("post_send"));
        }
        if self.stage.is_full() {
            self.flush();
        }
        self.stage.push(wr)?;
        self.posted = wr.serial;
        Ok(())
    }

    #[inline(always)]
    fn post_send_now(&mut self, wr: &SendWr<'_, RdmaAh>) -> VerbsResult<()> {
        match self.qp.get().and_then(Qp::ex) {
            // The provider refuses what is too long and what is too much. So does `check_send`, but who is here has counted.
            Some(ex) if self.stage.is_empty() && wr.sges.len() == 1 => {
                if !wr.ah.0.is_of(self.dev.pd()) {
                    return Err(VerbsError::new("post_send", libc::EINVAL));
                }
                self.posted = wr.serial;
                if let Err(e) = post::post_one(ex, wr) {
                    self.fail(&e);
                }
                Ok(())
            }
            // Made anew, so that the one above need not be in memory.
            _ => match *wr.sges {
                [one] => self.post_staged(&SendWr { sges: &[one], ..*wr }),
                _ => self.post_staged(wr),
            },
        }
    }

    #[inline]
    fn ring(&mut self) {
        self.flush();
    }

    fn post_recv(&mut self, bufs: &mut Vec<Buf>) -> VerbsResult<()> {
        let Some(qp) = self.qp.get() else { return Err(busy("post_recv")) };
        loop {
            let (mut n, mut stopped) = (0, None);
            for (wr, sge) in self.recv_wrs.places() {
                let Some(buf) = bufs.pop() else { break };
                if buf.len() <= GRH_LEN {
                    put_back(bufs, buf);
                    stopped = Some(Err(VerbsError::new("post_recv", libc::EINVAL)));
                    break;
                }
                let length = u32::try_from(buf.len()).unwrap_or(u32::MAX);
                *sge = ibv_sge { addr: buf.addr() as u64, length, lkey: buf.lkey() };
                match self.recvs.insert(buf) {
                    Ok(id) => wr.wr_id = id,
                    Err(buf) => {
                        put_back(bufs, buf);
                        stopped = Some(Ok(()));
                        break;
                    }
                }
                n += 1;
            }
            if let Err((posted, e)) = self.recv_wrs.post(qp, n) {
                let ids = self.recv_wrs.wrs[posted..n].iter().rev();
                bufs.extend(ids.filter_map(|wr| self.recvs.take(wr.wr_id)));
                return Err(e);
            }
            match stopped {
                Some(end) => return end,
                None if n < CHUNK => return Ok(()),
                None => {}
            }
        }
    }

    fn poll_send(&mut self, out: &mut Vec<SendWc>, max: usize) -> usize {
        if self.ready.send.is_empty() {
            return self.poll_send_cq(out, max);
        }
        let n = max.min(self.ready.send.len());
        out.extend(self.ready.send.drain(..n));
        n + self.poll_send_cq(out, max - n)
    }

    fn poll_recv(&mut self, out: &mut Vec<RecvWc>, max: usize) -> usize {
        if max <= CHUNK && self.ready.recv.is_empty() {
            return self.poll_recv_cq(out, max);
        }
        self.poll_recv_many(out, max)
    }

    #[inline(always)]
    fn start_recv(&mut self, room: &mut Vec<RecvWc>, max: usize) -> usize {
        if !self.ready.recv.is_empty() {
            cold_path();
            let n = self.poll_recv_many(room, max);
            room.reverse();
            return n;
        }
        self.taken = 0;
        let found = match self.qp.get() {
            Some(qp) => poll_cq(&qp.recv_cq, &mut self.wcs[..max.min(CHUNK)]),
            None => Ok(0),
        };
        self.polled = match found {
            Ok(got) => got,
            Err(e) => {
                cold_path();
                self.fail(&e);
                0
            }
        };
        self.polled
    }

    fn next_recv(&mut self, room: &mut Vec<RecvWc>) -> Option<RecvWc> {
        while self.taken < self.polled {
            let i = self.taken;
            self.taken += 1;
            if let Some(wc) = self.take_recv(i) {
                return Some(wc);
            }
        }
        room.pop()
    }

    #[inline(always)]
    fn next_success(&mut self, _room: &mut Vec<RecvWc>) -> Option<RecvWc> {
        let i = self.taken;
        let wc = self.wcs.get(i)?;
        if i >= self.polled || wc.status != ibv_wc_status::IBV_WC_SUCCESS {
            cold_path();
            return None;
        }
        // Where nothing is found there is nothing to be lost, see `next_recv`.
        let buf = self.recvs.take(wc.wr_id)?;
        self.taken = i + 1;
        let (byte_len, src_qpn) = (wc.byte_len, Qpn::truncate(wc.src_qp));
        let grh = wc.wc_flags & ibv_wc_flags::IBV_WC_GRH.0 != 0;
        Some(RecvWc { buf, byte_len, src_qpn, grh, solicited: false, status: WcStatus::Success })
    }

    fn arm(&mut self, what: ArmFor) -> VerbsResult<ArmResult> {
        self.channel.drain();
        let recv = what.intersects(ArmFor::RECV | ArmFor::SOLICITED);
        if let Some(qp) = self.qp.get() {
            if recv {
                qp.recv_cq.notify(!what.contains(ArmFor::RECV))?;
            }
            if what.contains(ArmFor::SEND) {
                qp.send_cq.notify(false)?;
            }
        }
        // What completed before is not announced.
        if recv && self.ready.recv.is_empty() {
            let mut out = Vec::new();
            self.poll_recv_cq(&mut out, CHUNK);
            self.ready.recv.extend(out);
        }
        if what.contains(ArmFor::SEND) && self.ready.send.is_empty() {
            let mut out = Vec::new();
            self.poll_send_cq(&mut out, CHUNK);
            self.ready.send.extend(out);
        }
        let busy = recv && !self.ready.recv.is_empty() || what.contains(ArmFor::SEND) && !self.ready.send.is_empty();
        Ok(if busy { ArmResult::Busy } else { ArmResult::Armed })
    }

    fn event_fd(&self) -> Option<RawFd> {
        Some(self.channel.fd())
    }
}

impl Remains {
    /// Ends the queue pair, and then everything else.
    fn follow(self, mut qp: Qp) {
        let Remains { mut recvs, rest, dev } = self;
        if let Err(e) = qp.destroy()
            && !is_gone(e.errno)
            && recvs.len() > 0
        {
            // The device may still write to them, so they stay allocated for as long as the process lives.
            warn!("{}: {e}; {} receive buffers are given up", dev.name(), recvs.len());
            std::mem::forget(std::mem::replace(&mut recvs, RecvSlab::new(0)));
        }
        drop(qp);
        drop((recvs, rest, dev));
    }
}

impl Drop for RdmaQp {
    fn drop(&mut self) {
        let recvs = std::mem::replace(&mut self.recvs, RecvSlab::new(0));
        let remains = Remains { recvs, rest: self.rest.take(), dev: self.dev.clone() };
        self.qp.end(move |qp| remains.follow(qp));
    }
}

impl std::fmt::Debug for RdmaQp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RdmaQp({} of {})", self.qpn(), self.dev.name())
    }
}
