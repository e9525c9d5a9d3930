//! Endpoints as the user sees them: argument checks, then a short visit to the locked state.

use std::{io::IoSlice, sync::Arc};

use ib::{
    addr::{DeviceAddr, EpAddr, IfaceAddr},
    ah::Origin,
    device::Device,
};
use uct::{
    AmId, Completion, Endpoint, Error, ErrorKind, FlushMode, MemSlice, Posted, Result, Scope, SendError, SendResult,
    ep::{PendingFn, PendingRefused},
    mem::Buf,
    sync::{AtomicBool, MutexGuard, Ordering},
};

use crate::{
    core::{Core, Live, State},
    deliver::Later,
    live::{peer_caps, refused},
    op::{NETH_LEN, Op},
    pools::SMALL_LEN,
    proto::{EpId, FlushOutcome, SendKind},
};

/// What an endpoint's handle and callbacks share.
pub(crate) struct EpShared<D: Device> {
    pub(crate) core: Arc<Core<D>>,
    pub(crate) id: EpId,
    pub(crate) path_index: u8,
    pub(crate) user_data: u64,
    /// Closing or destroyed: the user's calls are refused.
    pub(crate) closed: AtomicBool,
    pub(crate) destroyed: AtomicBool,
}

impl<D: Device> EpShared<D> {
    fn err(&self, kind: ErrorKind, text: impl std::fmt::Display) -> Error {
        Error::new(kind, format!("{}: ep {:#x}: {text}", self.core.name(), self.id.wire_id()))
    }

    #[cold]
    fn too_long(&self, what: &str, len: usize, max: usize) -> SendError {
        self.err(ErrorKind::InvalidParam, format!("{what} of {len} bytes: at most {max}, see the interface attributes"))
            .into()
    }

    /// The live part of the state, if a send may be tried now.
    #[inline]
    fn sendable<'s>(&self, st: &'s mut State<D>) -> SendResult<&'s mut Live<D>> {
        let live = self.usable(st)?;
        if !live.tx.has_credit() {
            return Err(SendError::NoResource);
        }
        if live.pending.blocks(self.id) {
            return Err(self.blocked(live));
        }
        live.touch_clock(&self.core);
        Ok(live)
    }

    /// The live part of the state, if the endpoint can be used at all.
    #[inline]
    fn usable<'s>(&self, st: &'s mut State<D>) -> Result<&'s mut Live<D>> {
        let is_fine = st.live.as_ref().is_some_and(|l| l.failed.is_none()) && !self.closed.load(Ordering::Relaxed);
        if !is_fine {
            return Err(self.why_not_usable(&st.live));
        }
        st.live(&self.core)
    }

    #[cold]
    fn why_not_usable(&self, live: &Option<Live<D>>) -> Error {
        match live {
            None => self.core.closed_error(),
            Some(Live { failed: Some(e), .. }) => e.clone(),
            Some(_) => self.err(ErrorKind::Closed, "the endpoint is closed").scoped(Scope::Endpoint),
        }
    }

    fn refused(&self, live: &Live<D>, r: crate::proto::Refused) -> SendError {
        refused(&self.core, live, self.id, r)
    }

    /// Requests are queued. Those of an endpoint that will never send again wait for the user to take them back, not for
    /// resources.
    #[cold]
    fn blocked(&self, live: &Live<D>) -> SendError {
        live.refusal(self.id).map_or(SendError::NoResource, |r| self.refused(live, r))
    }

    /// A message of `len` bytes was refused.
    #[cold]
    fn send_refused(&self, live: &Live<D>, r: crate::proto::Refused, len: usize) -> SendError {
        match (r, live.engine.max_message(self.id)) {
            // The endpoint is well; only this message cannot go to this peer.
            (crate::proto::Refused::Failed(ErrorKind::ExceedsLimit), Some(max)) => self
                .err(
                    ErrorKind::InvalidParam,
                    format!(
                        "message of {len} bytes: this peer takes at most {max}, because the packet size limit (MTU) of its \
                         port is smaller than ours"
                    ),
                )
                .into(),
            _ => self.refused(live, r),
        }
    }

    /// Tries to send a short message the short way, see [`Live::send_plain`]. If it cannot be done, which has changed nothing,
    /// the lock comes back, for [`EpShared::send_copied`].
    #[inline(always)]
    fn send_short(&self, id: AmId, len: usize, fill: impl FnOnce(&mut [u8])) -> Option<MutexGuard<'_, State<D>>> {
        let mut st = self.core.state.lock();
        let sent = len <= self.core.limits.short
            && !self.closed.load(Ordering::Relaxed)
            && st.live.as_mut().is_some_and(|live| live.send_plain(&self.core, (self.id, id.get(), len), fill));
        if sent { None } else { Some(st) }
    }

    /// Sends a short message that `fill` writes behind the NETH, `len` bytes.
    #[inline(always)]
    fn send_copied(
        &self,
        mut st: MutexGuard<'_, State<D>>,
        id: AmId,
        len: usize,
        fill: impl FnOnce(&mut [u8]),
    ) -> SendResult<()> {
        if len > self.core.limits.short {
            drop(st);
            return Err(self.too_long("short message", len, self.core.limits.short));
        }
        let live = self.sendable(&mut st)?;
        let begun = match live.engine.begin_send(self.id, id.get(), len, SendKind::Copy, false) {
            Ok(b) => b,
            Err(r) => return Err(self.send_refused(live, r, len)),
        };
        let pool = if NETH_LEN + len <= SMALL_LEN { &mut live.small } else { &mut live.large };
        let Some(mut buf) = pool.take(&self.core.md, live.now)? else { return Err(SendError::NoResource) };
        fill(&mut buf[NETH_LEN..NETH_LEN + len]);
        live.send_copy(&self.core, begun, (self.id, buf, NETH_LEN + len))
    }

    /// [`Endpoint::am_short`] where something is not as usual.
    #[cold]
    #[inline(never)]
    fn am_short_slow(&self, st: MutexGuard<'_, State<D>>, id: AmId, header: u64, payload: &[u8]) -> SendResult<()> {
        self.send_copied(st, id, 8 + payload.len(), |to| put_short(to, header, payload))
    }

    #[cold]
    #[inline(never)]
    fn am_short_iov_slow(
        &self,
        st: MutexGuard<'_, State<D>>,
        id: AmId,
        len: usize,
        iov: &[IoSlice<'_>],
    ) -> SendResult<()> {
        self.send_copied(st, id, len, |to| put_iov(to, iov))
    }

    /// Gives back what a bcopy had reserved.
    fn abandon(&self, buf: Buf) {
        let mut st = self.core.state.lock();
        if let Some(live) = &mut st.live {
            live.unreserve(self.id);
            live.put_send_buf(buf);
        }
    }

    fn marker(&self, comp: Option<&Completion>, closes: bool) -> Op {
        Op::Marker { ep: self.id, comp: comp.map(Completion::token), closes }
    }

    /// A flush or check was accepted.
    fn settle_marker(&self, st: &mut State<D>, outcome: FlushOutcome<Op>) -> Posted {
        if let Some(live) = &mut st.live {
            live.pump(&self.core);
            live.tx.ring(&mut live.qp);
        }
        match outcome {
            FlushOutcome::InProgress => Posted::InProgress,
            FlushOutcome::Done(mut op) => {
                // The completion is left alone by an operation that is done at once. The user's handle still counts, so
                // taking the token back runs nothing.
                if let Some(token) = op.take_completion() {
                    token.settle(Ok(()));
                }
                Posted::Done
            }
        }
    }

    fn flush_local(&self, comp: Option<&Completion>) -> SendResult<Posted> {
        let mut guard = self.core.state.lock();
        let st = &mut *guard;
        let live = self.usable(st)?;
        if live.pending.blocks(self.id) {
            return Err(self.blocked(live));
        }
        live.touch_clock(&self.core);
        let now = live.now;
        match live.engine.flush(now, self.id, self.marker(comp, false)) {
            Ok(outcome) => Ok(self.settle_marker(st, outcome)),
            Err((op, r)) => Err(self.marker_refused(st, op, r)),
        }
    }

    fn marker_refused(&self, st: &mut State<D>, mut op: Op, r: crate::proto::Refused) -> SendError {
        if let Some(token) = op.take_completion() {
            // Refused operations leave the completion alone, see `settle_marker`.
            token.settle(Ok(()));
        }
        match &st.live {
            Some(live) => self.refused(live, r),
            None => self.core.closed_error().into(),
        }
    }

    fn flush_cancel(&self) -> SendResult<Posted> {
        let mut guard = self.core.state.lock();
        let st = &mut *guard;
        let live = self.usable(st)?;
        live.give_up(&self.core, self.id, true);
        live.pump(&self.core);
        live.tx.ring(&mut live.qp);
        let later = self.core.take_later_of(st, self.id);
        drop(guard);
        self.core.run_later(later);
        Ok(Posted::Done)
    }

    fn connect_inner(&self, addr: DeviceAddr, ep_addr: EpAddr) -> Result<()> {
        let attr = ib::addr::ah_attr(&self.core.port, &addr, self.path_index)?;
        let mut guard = self.core.state.lock();
        let st = &mut *guard;
        let live = self.usable(st)?;
        live.touch_clock(&self.core);
        let now = live.now;
        live.engine
            .connect_to_ep(now, self.id, attr, ep_addr.qpn.get(), ep_addr.ep_id, peer_caps(&addr))
            .map_err(|kind| self.err(kind, "it is connected already, or was made for connecting to an interface"))?;
        let resolved = live.resolve(&self.core, self.id, Origin::Local);
        live.pump(&self.core);
        live.tx.ring(&mut live.qp);
        resolved
    }
}

impl<D: Device> Endpoint for EpShared<D> {
    fn am_short(&self, id: AmId, header: u64, payload: &[u8]) -> SendResult<()> {
        match self.send_short(id, 8 + payload.len(), |to| put_short(to, header, payload)) {
            None => Ok(()),
            Some(st) => self.am_short_slow(st, id, header, payload),
        }
    }

    fn am_short_iov(&self, id: AmId, iov: &[IoSlice<'_>]) -> SendResult<()> {
        let len = iov.iter().fold(0usize, |n, s| n.saturating_add(s.len()));
        match self.send_short(id, len, |to| put_iov(to, iov)) {
            None => Ok(()),
            Some(st) => self.am_short_iov_slow(st, id, len, iov),
        }
    }

    fn am_bcopy(&self, id: AmId, pack: &mut dyn FnMut(&mut [u8]) -> usize) -> SendResult<usize> {
        // Window slot and buffer first, so that `pack` runs only for a message that will be sent.
        let (buf, room) = {
            let mut st = self.core.state.lock();
            let live = self.sendable(&mut st)?;
            // Exactly what this peer can take, which may be less than what the interface can send.
            let room =
                live.engine.max_message(self.id).map_or(self.core.limits.bcopy, |n| n.min(self.core.limits.bcopy));
            if let Err(r) = live.engine.reserve(self.id, room) {
                return Err(self.refused(live, r));
            }
            live.tx.reserve();
            match live.large.take(&self.core.md, live.now) {
                Ok(Some(b)) => (b, room),
                none => {
                    live.unreserve(self.id);
                    return Err(none.err().map_or(SendError::NoResource, SendError::Failed));
                }
            }
        };
        // Puts everything back if `pack` panics.
        let mut reserved = Reserved { ep: self, buf: Some(buf) };
        let n = match &mut reserved.buf {
            Some(b) => pack(&mut b[NETH_LEN..NETH_LEN + room]),
            None => 0,
        };
        if n > room {
            return Err(self.too_long("packed message", n, room));
        }
        // The closure may have sent, so only now does the message get its number.
        let mut st = self.core.state.lock();
        let Some(buf) = reserved.buf.take() else { return Err(SendError::NoResource) };
        let begun = match self.usable(&mut st) {
            Ok(live) => {
                live.tx.unreserve();
                // There is one, unless the queue pair has begun to be reset meanwhile.
                if live.tx.has_credit() {
                    live.engine
                        .begin_send(self.id, id.get(), n, SendKind::Copy, true)
                        .map_err(|r| self.send_refused(live, r, n))
                } else {
                    Err(SendError::NoResource)
                }
            }
            Err(e) => {
                if let Some(live) = &mut st.live {
                    live.tx.unreserve();
                }
                Err(e.into())
            }
        };
        // Without a live interface its buffers go where they belong, to the heap.
        let Some(live) = &mut st.live else { return Err(self.core.closed_error().into()) };
        let sent = match begun {
            Ok(begun) => live.send(&self.core, begun, (self.id, buf, NETH_LEN + n), None, None).map(|()| n),
            Err(e) => {
                live.put_send_buf(buf);
                Err(e)
            }
        };
        if sent.is_err() {
            live.engine.unreserve(self.id);
        }
        sent
    }

    fn am_zcopy(&self, id: AmId, header: &[u8], iov: &[MemSlice], comp: Option<&Completion>) -> SendResult<Posted> {
        let limits = &self.core.limits;
        if header.len() > limits.hdr {
            return Err(self.too_long("zero-copy header", header.len(), limits.hdr));
        }
        if iov.len() > limits.iov {
            let text = format!("zero-copy message of {} pieces: at most {}", iov.len(), limits.iov);
            return Err(self.err(ErrorKind::InvalidParam, text).into());
        }
        // A key of another device would put the queue pair into the ERROR state, with everybody's messages.
        let here = Arc::as_ptr(self.core.md.device()).addr();
        if iov.iter().any(|s| s.device() != here) {
            let text =
                "zero-copy message from memory of another device: allocate it from this interface's memory domain";
            return Err(self.err(ErrorKind::InvalidParam, text).into());
        }
        let len = iov.iter().fold(header.len(), |n, s| n.saturating_add(s.len()));
        if len > limits.zcopy {
            return Err(self.too_long("zero-copy message", len, limits.zcopy));
        }
        let mut st = self.core.state.lock();
        let live = self.sendable(&mut st)?;
        let begun = match live.engine.begin_send(self.id, id.get(), len, SendKind::Zcopy, false) {
            Ok(b) => b,
            Err(r) => return Err(self.send_refused(live, r, len)),
        };
        let head = NETH_LEN + header.len();
        let pool = if head <= SMALL_LEN { &mut live.small } else { &mut live.large };
        let Some(mut buf) = pool.take(&self.core.md, live.now)? else { return Err(SendError::NoResource) };
        buf[NETH_LEN..head].copy_from_slice(header);
        let regions: Box<[MemSlice]> = iov.iter().filter(|s| !s.is_empty()).cloned().collect();
        live.send(&self.core, begun, (self.id, buf, head), Some(regions), comp)?;
        Ok(Posted::InProgress)
    }

    fn flush(&self, mode: FlushMode, comp: Option<&Completion>) -> SendResult<Posted> {
        match mode {
            FlushMode::Local => self.flush_local(comp),
            FlushMode::Cancel => self.flush_cancel(),
            FlushMode::Remote => Err(self
                .err(ErrorKind::Unsupported, "flush of remote memory: this transport has no remote memory operations")
                .into()),
        }
    }

    fn fence(&self) -> SendResult<()> {
        // Active messages of an endpoint are delivered in order as it is.
        let mut st = self.core.state.lock();
        self.usable(&mut st)?;
        Ok(())
    }

    fn check(&self, comp: Option<&Completion>) -> SendResult<Posted> {
        let mut guard = self.core.state.lock();
        let st = &mut *guard;
        let live = self.usable(st)?;
        live.touch_clock(&self.core);
        let now = live.now;
        let marker = comp.map(|c| self.marker(Some(c), false));
        match live.engine.check(now, self.id, marker) {
            Ok(FlushOutcome::InProgress) => {
                live.pump(&self.core);
                live.tx.ring(&mut live.qp);
                Ok(Posted::InProgress)
            }
            Ok(FlushOutcome::Done(op)) => {
                if let Some(op) = op {
                    let _done = self.settle_marker(st, FlushOutcome::Done(op));
                }
                Ok(Posted::Done)
            }
            Err((op, r)) => match op {
                Some(op) => Err(self.marker_refused(st, op, r)),
                None => Err(self.refused(live, r)),
            },
        }
    }

    fn pending_add(&self, request: PendingFn) -> Result<(), PendingRefused> {
        let mut st = self.core.state.lock();
        let live = match self.usable(&mut st) {
            Ok(l) => l,
            Err(e) => {
                drop(st);
                return Err(PendingRefused::Failed(request, e));
            }
        };
        let never = live.refusal(self.id).map(|r| self.refused(live, r));
        if let Some(SendError::Failed(e)) = never {
            drop(st);
            return Err(PendingRefused::Failed(request, e));
        }
        if !live.pending.has(self.id) && live.tx.has_credit() && live.engine.can_send(self.id) {
            drop(st);
            return Err(PendingRefused::Busy(request));
        }
        live.pending.push(self.id, request);
        Ok(())
    }

    fn pending_purge(&self) -> Vec<PendingFn> {
        let mut st = self.core.state.lock();
        match &mut st.live {
            Some(live) => live.pending.purge(self.id, false).into(),
            None => Vec::new(),
        }
    }

    fn address(&self) -> Result<Vec<u8>> {
        let qpn = {
            let mut st = self.core.state.lock();
            use ib::device::UdQp;
            self.usable(&mut st)?.qp.qpn()
        };
        Ok(EpAddr { qpn, ep_id: self.id.wire_id() }.to_bytes().to_vec())
    }

    fn connect(&self, device_addr: &[u8], ep_addr: &[u8]) -> Result<()> {
        let addr = DeviceAddr::parse(device_addr)
            .map_err(|e| self.err(ErrorKind::InvalidAddress, format!("device address: {e}")))?
            .0;
        let ep_addr = EpAddr::parse(ep_addr)
            .map_err(|e| self.err(ErrorKind::InvalidAddress, format!("endpoint address: {e}")))?;
        self.connect_inner(addr, ep_addr)
    }

    fn is_connected(&self, device_addr: &[u8], iface_addr: &[u8], ep_addr: Option<&[u8]>) -> bool {
        let Ok((addr, _)) = DeviceAddr::parse(device_addr) else { return false };
        let Ok(iface) = IfaceAddr::parse(iface_addr) else { return false };
        let Ok(attr) = ib::addr::ah_attr(&self.core.port, &addr, self.path_index) else { return false };
        let mut st = self.core.state.lock();
        let Ok(live) = self.usable(&mut st) else { return false };
        // Values, never identities of address handles: those change when the cache makes new ones.
        let same_peer = live.engine.peer(self.id).is_some_and(|(a, qpn, _)| *a == attr && qpn == iface.qpn.get());
        let same_ep = match ep_addr.map(EpAddr::parse) {
            None => true,
            Some(Ok(e)) => live.engine.remote_ep_id(self.id) == Some(e.ep_id),
            Some(Err(_)) => false,
        };
        same_peer && same_ep
    }

    fn invalidate(&self) -> Result<()> {
        let mut guard = self.core.state.lock();
        let st = &mut *guard;
        let live = self.usable(st)?;
        live.touch_clock(&self.core);
        let now = live.now;
        live.engine.invalidate(now, self.id);
        // Settled and reported by the next progress, which whoever sleeps is told of.
        live.pump(&self.core);
        Ok(())
    }

    fn id(&self) -> u64 {
        u64::from(self.id.wire_id())
    }

    fn user_data(&self) -> u64 {
        self.user_data
    }

    fn close_ep(self: Arc<Self>, comp: Option<Completion>) {
        let mut guard = self.core.state.lock();
        let st = &mut *guard;
        let was_closed = self.closed.swap(true, Ordering::Relaxed);
        let Some(live) = st.live.as_mut().filter(|_| !was_closed) else {
            drop(guard);
            // What was accepted was given up with the interface.
            if let Some(c) = &comp {
                c.token().settle(Err(ErrorKind::Closed));
            }
            return;
        };
        let requests = live.pending.purge(self.id, false);
        live.touch_clock(&self.core);
        let now = live.now;
        // The user's handle is released after the token is taken, with the lock released.
        let op = self.marker(comp.as_ref(), true);
        let result = live.engine.flush(now, self.id, op);
        let later = match result {
            Ok(FlushOutcome::InProgress) => {
                live.pump(&self.core);
                live.tx.ring(&mut live.qp);
                Vec::new()
            }
            // Nothing outstanding, or nothing was ever accepted (not connected), or the endpoint has failed.
            Ok(FlushOutcome::Done(mut op)) => {
                let token = op.take_completion();
                self.destroy_now(st, token.map(|t| (t, Ok(()))))
            }
            Err((mut op, r)) => {
                let token = op.take_completion();
                let result = match r {
                    crate::proto::Refused::NoResource => Ok(()),
                    crate::proto::Refused::Failed(kind) => Err(kind),
                };
                self.destroy_now(st, token.map(|t| (t, result)))
            }
        };
        drop(guard);
        drop(requests);
        self.core.run_later(later);
    }

    fn destroy_ep(&self) {
        self.closed.store(true, Ordering::Relaxed);
        let mut guard = self.core.state.lock();
        let later = self.destroy_now(&mut guard, None);
        drop(guard);
        self.core.run_later(later);
    }
}

impl<D: Device> EpShared<D> {
    /// Destroys the endpoint. Returns what must be settled before the call returns, with no lock held.
    fn destroy_now(
        &self,
        st: &mut State<D>,
        last: Option<(uct::completion::CompletionToken, Result<(), ErrorKind>)>,
    ) -> Vec<Later> {
        if self.destroyed.swap(true, Ordering::Relaxed) {
            return last.into_iter().map(|(t, r)| Later::Complete(self.id, t, r)).collect();
        }
        if let Some(live) = &mut st.live {
            live.touch_clock(&self.core);
            live.destroy(&self.core, self.id);
            // Tells the peer at once, if all is acknowledged.
            live.pump(&self.core);
            live.tx.ring(&mut live.qp);
        }
        let last = last.map(|(token, result)| Later::Complete(self.id, token, result));
        match &mut st.live {
            Some(live) => {
                live.later.extend(last);
                self.core.take_later_of(st, self.id)
            }
            None => last.into_iter().collect(),
        }
    }
}

/// Writes a short message: header and payload.
#[inline(always)]
fn put_short(to: &mut [u8], header: u64, payload: &[u8]) {
    to[..8].copy_from_slice(&header.to_ne_bytes());
    // Header and nothing else is what many messages are: not worth a call.
    if !payload.is_empty() {
        to[8..].copy_from_slice(payload);
    }
}

/// Writes a short message in pieces.
fn put_iov(to: &mut [u8], iov: &[IoSlice<'_>]) {
    let mut at = 0;
    for s in iov {
        to[at..at + s.len()].copy_from_slice(s);
        at += s.len();
    }
}

impl<D: Device> Core<D> {
    /// Takes what waits for the user and belongs to an endpoint that goes away. Inside a callback it stays where it is,
    /// for the end of the batch.
    pub(crate) fn take_later_of(&self, st: &mut State<D>, id: EpId) -> Vec<Later> {
        if self.in_callback(st) {
            return Vec::new();
        }
        let Some(live) = &mut st.live else { return Vec::new() };
        let (mine, others): (Vec<_>, Vec<_>) =
            std::mem::take(&mut live.later).into_iter().partition(|l| l.belongs_to(id));
        live.later = others;
        // A failure that was not reported yet is not reported any more.
        mine.into_iter().filter(|l| !matches!(l, Later::Failure(..))).collect()
    }

    /// Does what must be done with no lock held.
    pub(crate) fn run_later(&self, later: Vec<Later>) {
        let mut failed_peer = Vec::new();
        let mut rest = Rest { core: self, later: later.into_iter() };
        for l in rest.later.by_ref() {
            l.run(self, &mut failed_peer);
        }
        for ep in failed_peer {
            self.fail_peer_of(ep);
        }
    }

    /// Fails all endpoints that lead where `ep` leads; their reports come with the next progress.
    pub(crate) fn fail_peer_of(&self, ep: EpId) {
        let mut guard = self.state.lock();
        let Some(live) = &mut guard.live else { return };
        let Some(peer) = live.engine.peer(ep).map(|(attr, qpn, _)| (*attr, qpn)) else { return };
        let now = live.now;
        let same: Vec<EpId> = live
            .engine
            .ep_ids()
            .filter(|&e| live.engine.peer(e).is_some_and(|(attr, qpn, _)| (*attr, qpn) == peer))
            .collect();
        for e in same {
            live.engine.invalidate(now, e);
        }
        // So that who looks whether he may sleep sees that there are reports.
        live.pump(self);
        live.tx.ring(&mut live.qp);
    }
}

/// What [`Core::run_later`] has not got to. If a callback panics, the others keep their results, for the next progress.
struct Rest<'a, D: Device> {
    core: &'a Core<D>,
    later: std::vec::IntoIter<Later>,
}

impl<D: Device> Drop for Rest<'_, D> {
    fn drop(&mut self) {
        let later: Vec<Later> = self.later.by_ref().collect();
        if !later.is_empty() {
            self.core.put_back_later(later);
        }
    }
}

/// What a bcopy has reserved while its closure runs.
struct Reserved<'a, D: Device> {
    ep: &'a EpShared<D>,
    buf: Option<Buf>,
}

impl<D: Device> Drop for Reserved<'_, D> {
    fn drop(&mut self) {
        if let Some(buf) = self.buf.take() {
            self.ep.abandon(buf);
        }
    }
}

/// Makes the record and the handle of an endpoint.
pub(crate) fn new_shared<D: Device>(
    core: &Core<D>,
    live: &mut Live<D>,
    id: EpId,
    params: &uct::EpParams,
) -> Result<Arc<EpShared<D>>> {
    let core = core
        .me
        .upgrade()
        .ok_or_else(|| Error::new(ErrorKind::Closed, "the interface is closed").scoped(Scope::Interface))?;
    let shared = Arc::new(EpShared {
        core,
        id,
        path_index: params.path_index,
        user_data: params.user_data,
        closed: AtomicBool::new(false),
        destroyed: AtomicBool::new(false),
    });
    let record = crate::core::EpRecord {
        user_data: params.user_data,
        shared: Arc::downgrade(&shared),
        failed: None,
        trouble: None,
    };
    live.eps.insert(id, record);
    Ok(shared)
}
