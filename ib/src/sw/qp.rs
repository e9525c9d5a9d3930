//! [`QpCore`]: the part of a UD queue pair that the network side sees. It checks keys, fills posted receives, and
//! falls into ERROR.

use std::{
    collections::VecDeque,
    os::fd::RawFd,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
};

use parking_lot::{Mutex, MutexGuard};
use uct::mem::Buf;

use super::{
    counters::{Counters, DropReason},
    event::Notifier,
    grh::Grh,
    mr::{MrCache, MrTable},
    port::PortState,
};
use crate::{
    device::{Access, ArmFor, ArmResult, GRH_LEN, QpInit, QpState, RecvWc, VerbsError, VerbsResult, WcStatus},
    types::{PKey, QKey, Qpn},
};

/// What becomes of a message that is longer than the receive posted for it.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum LongMessage {
    /// It is dropped and counted: one stranger's datagram does not stop the queue pair.
    Drop,
    /// The receive completes with `LocalQpOp` and the queue pair falls into ERROR, as with the kernel's soft-RoCE.
    Error,
}

/// One UD message as it comes off the wire, payload apart.
#[derive(Copy, Clone, Debug)]
pub struct Datagram<'a> {
    /// The sending queue pair.
    pub src_qpn: Qpn,
    /// The key it thinks the receiver has.
    pub qkey: QKey,
    /// Its partition key.
    pub pkey: PKey,
    /// It asked to wake the receiver.
    pub solicited: bool,
    /// What to show in the GRH area.
    pub grh: Grh<'a>,
}

#[derive(Debug)]
struct Recv {
    posted: VecDeque<Buf>,
    done: VecDeque<RecvWc>,
    depth: usize,
    state: QpState,
    closed: bool,
    cache: MrCache,
}

impl Recv {
    /// An error or flush: only the buffer has meaning.
    fn fail(&mut self, buf: Buf, status: WcStatus) {
        let wc = RecvWc { buf, byte_len: 0, src_qpn: Qpn::truncate(0), grh: false, solicited: false, status };
        self.done.push_back(wc);
    }

    fn flush(&mut self) {
        self.state = QpState::Error;
        while let Some(buf) = self.posted.pop_front() {
            self.fail(buf, WcStatus::WrFlush);
        }
    }
}

/// A UD queue pair, without its send queue (see [`SendQueue`](super::SendQueue)) and without a wire. Shared between the
/// owner's [`UdQp`](crate::device::UdQp) and the table that finds it for packets.
#[derive(Debug)]
pub struct QpCore {
    qpn: Qpn,
    qkey: QKey,
    pkey: PKey,
    long: LongMessage,
    newest_first: bool,
    /// Mirrors `Recv::state`, for the send side. Written with the receive lock held.
    state: AtomicU8,
    recv: Mutex<Recv>,
    notifier: Notifier,
    counters: Arc<Counters>,
    mrs: Arc<MrTable>,
}

impl QpCore {
    /// A ready queue pair of this number.
    ///
    /// # Errors
    /// `EINVAL`: a port that does not exist, a partition key index outside the table, or a depth of 0.
    pub fn new(
        qpn: Qpn,
        init: &QpInit,
        port: &PortState,
        mrs: Arc<MrTable>,
        counters: Arc<Counters>,
        long: LongMessage,
    ) -> VerbsResult<QpCore> {
        const CALL: &str = "create_qp";
        port.check_number(CALL, init.port)?;
        let pkey = port.pkey(init.pkey_index).ok_or(VerbsError::new(CALL, libc::EINVAL))?;
        if init.send_depth == 0 || init.recv_depth == 0 || init.send_sge == 0 {
            return Err(VerbsError::new(CALL, libc::EINVAL));
        }
        let recv = Recv {
            posted: VecDeque::new(),
            done: VecDeque::new(),
            depth: init.recv_depth as usize,
            state: QpState::ReadyToSend,
            closed: false,
            cache: MrCache::new(),
        };
        Ok(QpCore {
            qpn,
            qkey: init.qkey,
            pkey,
            long,
            newest_first: false,
            state: AtomicU8::new(0),
            recv: Mutex::new(recv),
            notifier: Notifier::default(),
            counters,
            mrs,
        })
    }

    /// Fills the receive that was posted last, not the one that was posted first. A buffer that has just come back is in
    /// the cache; going round a long queue of them, every message meets cold memory, which can double its cost. Messages
    /// keep their order.
    pub fn newest_first(mut self) -> Self {
        self.newest_first = true;
        self
    }

    /// Its number.
    pub fn qpn(&self) -> Qpn {
        self.qpn
    }

    /// Its queue key.
    pub fn qkey(&self) -> QKey {
        self.qkey
    }

    /// Its partition key.
    pub fn pkey(&self) -> PKey {
        self.pkey
    }

    /// Its state. One load.
    pub fn state(&self) -> QpState {
        if self.state.load(Ordering::Acquire) == 0 { QpState::ReadyToSend } else { QpState::Error }
    }

    /// Locks the receive side, for as many deliveries and polls as follow. Dropping the guard adds up the counters and
    /// wakes who armed, once for all of them.
    pub fn rx(&self) -> RxGuard<'_> {
        RxGuard { core: self, recv: self.recv.lock(), wake: ArmFor::empty(), packets: 0, bytes: 0 }
    }

    /// Falls into ERROR: posted receives are flushed. Takes the receive lock.
    pub fn fail(&self) {
        self.rx().fail();
    }

    /// See [`UdQp::post_recv`](crate::device::UdQp::post_recv). In ERROR the buffers are flushed at once.
    ///
    /// # Errors
    /// `EINVAL` for a buffer of no more than [`GRH_LEN`] bytes; it and those not yet taken are still in `bufs`.
    pub fn post_recv(&self, bufs: &mut Vec<Buf>) -> VerbsResult<()> {
        let mut rx = self.rx();
        while rx.recv.posted.len() + rx.recv.done.len() < rx.recv.depth
            && let Some(buf) = bufs.pop()
        {
            if buf.len() <= GRH_LEN {
                bufs.push(buf);
                return Err(VerbsError::new("post_recv", libc::EINVAL));
            }
            if rx.recv.state == QpState::Error {
                rx.recv.fail(buf, WcStatus::WrFlush);
                rx.wake |= ArmFor::RECV | ArmFor::SOLICITED;
            } else if self.newest_first {
                rx.recv.posted.push_front(buf);
            } else {
                rx.recv.posted.push_back(buf);
            }
        }
        Ok(())
    }

    /// See [`UdQp::poll_recv`](crate::device::UdQp::poll_recv). Takes the receive lock.
    pub fn poll_recv(&self, out: &mut Vec<RecvWc>, max: usize) -> usize {
        self.rx().poll(out, max)
    }

    /// Receives that are posted and empty.
    pub fn posted(&self) -> usize {
        self.recv.lock().posted.len()
    }

    /// Back to ready. A queue pair that is ready stays as it is.
    ///
    /// # Errors
    /// `EBUSY` while flushed receives wait to be polled.
    pub fn reset(&self) -> VerbsResult<()> {
        let mut recv = self.recv.lock();
        if recv.state == QpState::Error {
            if !recv.done.is_empty() {
                return Err(VerbsError::new("modify_qp", libc::EBUSY));
            }
            recv.state = QpState::ReadyToSend;
            self.state.store(0, Ordering::Release);
        }
        Ok(())
    }

    /// Ends it: buffers and completions are dropped, packets that come later find nothing. Who still holds the `Arc`
    /// holds an empty shell.
    pub fn close(&self) {
        let mut recv = self.recv.lock();
        recv.closed = true;
        recv.state = QpState::Error;
        self.state.store(1, Ordering::Release);
        let (posted, done) = (std::mem::take(&mut recv.posted), std::mem::take(&mut recv.done));
        drop(recv);
        // The last buffer may free its block: not under the lock.
        drop((posted, done));
    }

    /// Arms the event fd. `send_done` tells whether a send completion waits; it is called after arming.
    ///
    /// # Errors
    /// The errno of `eventfd` at first use.
    pub fn arm(&self, what: ArmFor, send_done: impl FnOnce() -> bool) -> VerbsResult<ArmResult> {
        self.notifier.arm(what)?;
        let recv_done = what.intersects(ArmFor::RECV | ArmFor::SOLICITED) && !self.recv.lock().done.is_empty();
        if recv_done || what.contains(ArmFor::SEND) && send_done() {
            self.notifier.disarm();
            return Ok(ArmResult::Busy);
        }
        Ok(ArmResult::Armed)
    }

    /// Wakes who armed for one of `what`. One load if nobody did.
    pub fn notify(&self, what: ArmFor) {
        self.notifier.notify(what);
    }

    /// The event fd, opened at the first call.
    pub fn event_fd(&self) -> Option<RawFd> {
        self.notifier.fd()
    }
}

/// The receive side of one queue pair, locked. See [`QpCore::rx`].
#[derive(Debug)]
pub struct RxGuard<'a> {
    core: &'a QpCore,
    recv: MutexGuard<'a, Recv>,
    wake: ArmFor,
    packets: u64,
    bytes: u64,
}

impl RxGuard<'_> {
    /// Takes one message: checks it and copies it into the oldest posted receive (the newest, see
    /// [`QpCore::newest_first`]). No allocation, no lock, no
    /// atomic but for drops.
    ///
    /// # Errors
    /// Why it was dropped. The drop has been counted.
    #[inline]
    pub fn deliver(&mut self, d: &Datagram<'_>, payload: &[u8]) -> Result<(), DropReason> {
        self.try_deliver(d, payload).inspect_err(|&why| self.core.counters.drop_one(why))
    }

    #[inline]
    fn try_deliver(&mut self, d: &Datagram<'_>, payload: &[u8]) -> Result<(), DropReason> {
        let (core, recv) = (self.core, &mut *self.recv);
        if recv.state == QpState::Error {
            return Err(if recv.closed { DropReason::NoQp } else { DropReason::QpError });
        }
        if !core.pkey.matches(d.pkey) {
            return Err(DropReason::PKey);
        }
        if core.qkey != d.qkey {
            return Err(DropReason::QKey);
        }
        let front = recv.posted.front().ok_or(DropReason::NoReceive)?;
        let len = GRH_LEN + payload.len();
        if front.len() < len {
            if core.long == LongMessage::Error {
                self.fail_front(WcStatus::LocalQpOp);
            }
            return Err(DropReason::TooLong);
        }
        if !recv.cache.covers(&core.mrs, front.lkey(), front.addr(), len, Access::LOCAL_WRITE) {
            self.fail_front(WcStatus::LocalProtection);
            return Err(DropReason::Protection);
        }
        let Some(mut buf) = recv.posted.pop_front() else { return Err(DropReason::NoReceive) };
        let (area, rest) = buf.split_at_mut(GRH_LEN);
        if let Ok(area) = area.try_into() {
            d.grh.write(area);
        }
        rest[..payload.len()].copy_from_slice(payload);
        recv.done.push_back(RecvWc {
            buf,
            byte_len: len as u32,
            src_qpn: d.src_qpn,
            grh: d.grh != Grh::None,
            solicited: d.solicited,
            status: WcStatus::Success,
        });
        self.packets += 1;
        self.bytes += payload.len() as u64;
        self.wake |= ArmFor::RECV;
        if d.solicited {
            self.wake |= ArmFor::SOLICITED;
        }
        Ok(())
    }

    #[cold]
    fn fail_front(&mut self, status: WcStatus) {
        if let Some(buf) = self.recv.posted.pop_front() {
            self.recv.fail(buf, status);
            self.wake |= ArmFor::RECV | ArmFor::SOLICITED;
        }
        self.fail();
    }

    /// Falls into ERROR; see [`QpCore::fail`].
    pub fn fail(&mut self) {
        if !self.recv.posted.is_empty() {
            self.wake |= ArmFor::RECV | ArmFor::SOLICITED;
        }
        self.recv.flush();
        self.core.state.store(1, Ordering::Release);
    }

    /// Appends at most `max` completions to `out` and answers how many.
    #[inline]
    pub fn poll(&mut self, out: &mut Vec<RecvWc>, max: usize) -> usize {
        let n = max.min(self.recv.done.len());
        out.extend(self.recv.done.drain(..n));
        n
    }

    /// Receives that are posted and empty.
    pub fn posted(&self) -> usize {
        self.recv.posted.len()
    }

    /// Completions that wait to be polled.
    pub fn waiting(&self) -> usize {
        self.recv.done.len()
    }
}

impl Drop for RxGuard<'_> {
    fn drop(&mut self) {
        if self.packets > 0 {
            self.core.counters.add_rx(self.packets, self.bytes);
        }
        // The lock is still held here: see `Notifier`. A completion signals even if this guard has polled it already, for
        // it may be another thread that sleeps.
        if !self.wake.is_empty() {
            self.core.notifier.notify(self.wake);
        }
    }
}
