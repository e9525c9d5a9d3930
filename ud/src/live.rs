//! [`Live`]: what happens under the lock. Receiving, timers, control packets and resends, and the engine's events turned
//! into work for later. Nothing here calls user code.

use std::{hint::cold_path, sync::Arc, time::Duration};

use ib::{
    addr::{DeviceAddr, Trailer},
    ah::{AhRef, GetOptions, Origin, TryGet},
    device::{AhAttr, Device, GRH_LEN, RecvWc, Sge, UdQp, VerbsError, WcStatus},
    types::Qpn,
};
use uct::{
    Error, ErrorKind, MemSlice, Scope, SendError, SendResult, Time,
    completion::CompletionToken,
    ep::EpFailure,
    mem::Buf,
    sync::{AtomicBool, Ordering},
};

use crate::{
    core::{Core, Live, Recovery, Resolving},
    deliver::{Later, Ready},
    gids::OwnGids,
    op::{NETH_LEN, Op, SgeList},
    pools::{Pool, SMALL_LEN, push},
    proto::{
        Begun, CreqInfo, CreqOutcome, DropReason, EpId, EpStateView, Event, ExtCaps, FailDetail, Features, Outstanding,
        PeerCaps, Refused, RxMeta, RxVerdict, SendKind, Settle, TransmitKind, rare,
    },
    tx::{Link, PostFlags, Retired},
};

/// Who polls.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(crate) enum Who {
    /// The user's thread.
    User,
    /// The progress thread.
    Thread,
}

/// Messages that may wait for the user's thread. Beyond this they are dropped without acknowledgement, so that the peer
/// keeps them.
const READY_MAX: usize = 4096;

/// Of so many idle rounds one does more than look for messages. So does the first one, and each of whoever comes now and then.
const WHOLE_EVERY: u32 = 8;

/// Time after which the next idle round does more anyway.
const WHOLE_AFTER: Duration = Duration::from_micros(50);

/// Idle rounds between two looks for events of the device, which are system calls; a multiple of [`WHOLE_EVERY`].
const EVENT_POLL_EVERY: u32 = 1024;

/// Time after which the next idle round looks for events of the device anyway: a program that sleeps between messages has
/// few rounds.
const EVENT_POLL_AFTER: Duration = Duration::from_millis(1);

/// While the local address is gone: the time between two looks at the GID table.
const GIDS_ASK_EVERY: Duration = Duration::from_millis(100);

/// What calls answer after the device is gone.
const EIO: i32 = 5;
/// At most one line of the log in so long about peers that take nothing.
const STUCK_PAUSE: Duration = Duration::from_secs(10);

/// Control packets and resends sent in one round at most.
const TRANSMIT_MAX: usize = 256;

impl<D: Device> Live<D> {
    /// One round of the network: receives, send completions, timers, events, transmissions. Returns the number of
    /// completions handled.
    ///
    /// `direct`: where messages go, if the caller has the right to deliver them and nothing waits in the queue; else they go
    /// there.
    #[inline(always)]
    pub(crate) fn network(&mut self, core: &Core<D>, who: Who, mut direct: Option<&mut Vec<Ready>>) -> usize {
        self.set_now(core);
        let budget = match who {
            Who::User => core.iface_config.rx_max_poll,
            Who::Thread => core.config.rx_async_max_poll,
        } as usize;
        // Some may have found no room in the last round.
        if self.engine.has_held() {
            cold_path();
            self.take_held(&mut direct);
        }
        let mut events = match who {
            Who::User => self.receive_all(core, budget, direct),
            Who::Thread => self.receive_aside(core, budget),
        };
        let is_idle = events == 0;
        if !is_idle || self.is_whole_round_due(core, who) {
            events += self.rest_of_round(core, who, is_idle);
        }
        self.tx.ring(&mut self.qp);
        // What the user sends next leaves at once: it may be the answer a peer waits for.
        self.tx.start_round();
        events
    }

    /// What a round does besides receiving, which has found nothing if it `is_idle`. Answers the number of send completions.
    #[inline(always)]
    fn rest_of_round(&mut self, core: &Core<D>, who: Who, is_idle: bool) -> usize {
        let mut sent = 0;
        if is_idle || self.tx.is_low() || self.rx_failed || self.look_for_events {
            cold_path();
            sent = self.look_around(core, who, is_idle);
        }
        self.was_busy |= !is_idle;
        self.refill(core);
        if self.engine.is_due(self.now) {
            cold_path();
            self.time_out();
        }
        if self.engine.has_done() {
            cold_path();
            self.settle_done(core);
        }
        if self.has_chores(core) {
            cold_path();
            self.pump(core);
        }
        sent
    }

    /// Whether a round that has received nothing is to do all the rest as well. Nearly always there is nothing to be done, and
    /// whoever waits for a message is not to wait for that.
    #[inline(always)]
    fn is_whole_round_due(&mut self, core: &Core<D>, who: Who) -> bool {
        self.idle_rounds = self.idle_rounds.wrapping_add(1);
        self.idle_rounds.is_multiple_of(WHOLE_EVERY)
            || self.was_busy
            || who == Who::Thread
            || self.now.nanos_since(self.looked_at) >= WHOLE_AFTER.as_nanos() as u64
            || self.tx.is_low()
            || self.engine.is_due(self.now)
            || self.has_chores(core)
    }

    /// The part of a round for when it has received nothing and is a whole one, or something asks for it: send completions,
    /// and now and then events of the device. Answers the number of send completions.
    #[inline(never)]
    fn look_around(&mut self, core: &Core<D>, who: Who, received_nothing: bool) -> usize {
        self.looked_at = self.now;
        let sent = self.poll_sends(core);
        let is_idle = received_nothing && sent == 0;
        // What follows is for the next round, if that is idle.
        self.was_busy = sent > 0;
        if is_idle {
            core.returns.drain_into(self.rx.free_mut());
            // Events of the device are rare, so looking for them is for idle rounds.
            self.look_for_events |= self.idle_rounds.is_multiple_of(EVENT_POLL_EVERY)
                || who == Who::Thread
                || self.now.since(self.events_polled) >= EVENT_POLL_AFTER;
        }
        if self.look_for_events {
            self.look_for_events = false;
            self.events_polled = self.now;
            core.md.poll_events();
            self.watch_port(core);
        }
        if is_idle && self.tx.wants_signal() {
            self.nudge();
        }
        sent
    }

    /// Reads the clock. What two processors show may differ by a little; time does not go back in the engine.
    #[inline(always)]
    fn set_now(&mut self, core: &Core<D>) {
        self.now = self.engine.observe(core.clock.now());
    }

    /// Whether [`Live::pump`] may find anything to do. It nearly never has, so the lengths of what it serves are joined
    /// into one question.
    #[inline(always)]
    fn has_chores(&self, core: &Core<D>) -> bool {
        let waiting = self.engine.output_len() | self.tx.retired_len() | self.flushes.len();
        waiting != 0
            || core.md.event_count() != self.events_seen
            || core.resolutions.load(Ordering::Relaxed)
            || self.failed.is_some()
    }

    /// Timers that are due. Once the interface is lost they have nothing more to say.
    fn time_out(&mut self) {
        if self.engine.is_due(self.now) && (self.failed.is_none() || self.endpoints_failed) {
            self.engine.handle_timeout(self.now);
        }
    }

    /// Timers, resolutions, events and transmissions: everything but the completion queues.
    #[inline(never)]
    pub(crate) fn pump(&mut self, core: &Core<D>) {
        self.fail_endpoints();
        self.time_out();
        if core.resolutions.load(Ordering::Relaxed) && core.resolutions.swap(false, Ordering::AcqRel) {
            self.finish_resolutions();
            // The flag tells also that a step of this is done, and whoever takes it must look.
            if self.recovering.is_some() {
                self.recover(core);
                self.fail_endpoints();
            }
        }
        let seen = core.md.event_count();
        if seen != self.events_seen {
            self.events_seen = seen;
            self.refresh_links(core);
        }
        self.events(core);
        if self.transmit(core) > 0 {
            // What was sent may have settled something (a last resend that left the queue at once).
            self.events(core);
        }
        while let Some(r) = self.tx.next_released() {
            self.recycle(r);
        }
        self.tx.release_links();
        self.finish_flushes();
    }

    // --- receiving

    /// [`Live::receive_all`] where it need not be inlined.
    #[inline(never)]
    fn receive_aside(&mut self, core: &Core<D>, budget: usize) -> usize {
        self.receive_all(core, budget, None)
    }

    /// Polls receives and passes them to the engine, plain messages the short way. Answers how many there were.
    #[inline(always)]
    fn receive_all(&mut self, core: &Core<D>, budget: usize, mut direct: Option<&mut Vec<Ready>>) -> usize {
        let n = self.qp.start_recv(&mut self.wcs, budget);
        self.rx_posted = self.rx_posted.saturating_sub(n);
        for _ in 0..n {
            let Some(fresh) = &mut direct else {
                self.receive_any(core, &mut direct);
                continue;
            };
            let Some(wc) = self.qp.next_success(&mut self.wcs) else {
                cold_path();
                self.receive_any(core, &mut direct);
                continue;
            };
            let RecvWc { buf, byte_len, src_qpn, grh, solicited, status } = wc;
            let is_ours = !(grh && core.config.eth_dgid_check);
            if let Some((ep, am_id)) = self.receive_plain(&buf, byte_len, src_qpn, is_ours) {
                let len = byte_len.saturating_sub((GRH_LEN + NETH_LEN) as u32);
                push(fresh, Ready { buf: Some(buf), len, am_id, ep });
            } else {
                cold_path();
                self.receive(core, RecvWc { buf, byte_len, src_qpn, grh, solicited, status }, &mut direct);
            }
        }
        n
    }

    /// Takes the next completed receive, whatever became of it.
    #[inline(never)]
    fn receive_any(&mut self, core: &Core<D>, direct: &mut Option<&mut Vec<Ready>>) {
        if let Some(wc) = self.qp.next_recv(&mut self.wcs) {
            self.receive(core, wc, direct);
        }
    }

    /// Passes a packet to the engine if it is a plain message, as nearly all are; `None`: [`Live::receive`] is for it.
    #[inline(always)]
    fn receive_plain(&mut self, buf: &[u8], len: u32, src_qpn: Qpn, is_ours: bool) -> Option<(EpId, u8)> {
        let Some((grh, packet)) = buf.get(..len as usize).and_then(<[u8]>::split_first_chunk) else { return rare() };
        if !is_ours && !self.gids.is_same(grh) {
            return rare();
        }
        let Live { engine, now, small, large, tx, .. } = self;
        engine.handle_plain(*now, src_qpn.get(), packet, &mut Home { small, large, released: tx.released() })
    }

    /// Passes a completed receive to the engine, whatever it is.
    #[inline(never)]
    fn receive(&mut self, core: &Core<D>, wc: RecvWc, direct: &mut Option<&mut Vec<Ready>>) {
        let RecvWc { buf, byte_len, src_qpn, grh, status, .. } = wc;
        if status != WcStatus::Success {
            tracing::trace!("{}: a receive completed with {status:?}", core.attr.device);
            self.counters.rx_errors += 1;
            self.rx_failed = true;
            self.rx.put(buf);
            return;
        }
        let Some(len) =
            (byte_len as usize).checked_sub(GRH_LEN).filter(|&n| n >= NETH_LEN && byte_len as usize <= buf.len())
        else {
            self.counters.rx_short += 1;
            self.rx.put(buf);
            return;
        };
        if grh && core.config.eth_dgid_check && !buf.first_chunk().is_some_and(|grh| self.gids.is_ours(grh)) {
            // Perhaps the address is new here.
            self.look_for_events = true;
            self.counters.rx_dgid += 1;
            self.rx.put(buf);
            return;
        }
        let meta = RxMeta { src_qpn: src_qpn.get(), can_deliver: self.ready.len() < READY_MAX };
        let packet = &buf[GRH_LEN..GRH_LEN + len];
        let payload = (len - NETH_LEN) as u32;
        match self.engine.handle_packet(self.now, &meta, packet) {
            RxVerdict::Deliver { ep, am_id } => {
                self.deliver(Ready { buf: Some(buf), len: payload, am_id, ep }, direct);
            }
            RxVerdict::Hold { ep, psn, am_id } if self.may_hold() => {
                let mut buf = buf;
                set_held_len(&mut buf, payload);
                self.held += 1;
                self.engine.hold(ep, psn, am_id, buf);
            }
            RxVerdict::Hold { .. } => {
                // Not kept, so not named to the peer: it comes again.
                self.counters.rx_held_full += 1;
                self.rx.put(buf);
            }
            RxVerdict::Creq(info) => {
                self.creq(core, packet, info);
                self.rx.put(buf);
            }
            RxVerdict::Control => self.rx.put(buf),
            RxVerdict::Drop(reason) => {
                tracing::trace!("{}: dropped a packet from qp {src_qpn}: {reason:?}", core.attr.device);
                if reason == DropReason::NoRoom {
                    self.counters.rx_queue_full += 1;
                }
                self.rx.put(buf);
            }
        }
        // Any packet that takes a PSN may have closed the gap, also a handshake's or a keep-alive.
        self.take_held(direct);
    }

    /// True if a message beyond a gap may be kept. It comes back when the gap is closed, which takes a receive: a part of
    /// the receive buffers stays out of it, or nothing would ever come again.
    #[cold]
    fn may_hold(&self) -> bool {
        self.held < self.held_max && self.rx_posted.saturating_add(self.rx.room()) > self.rx_target / 4
    }

    /// Puts a message where the user's thread finds it.
    fn deliver(&mut self, message: Ready, direct: &mut Option<&mut Vec<Ready>>) {
        match direct {
            Some(fresh) => fresh.push(message),
            None => self.ready.push_back(message),
        }
    }

    /// Moves messages that waited beyond a gap, and are in order by now, to where the user's thread finds them.
    #[inline(never)]
    fn take_held(&mut self, direct: &mut Option<&mut Vec<Ready>>) {
        while self.ready.len() < READY_MAX
            && let Some((ep, am_id, held)) = self.engine.poll_held()
        {
            self.held = self.held.saturating_sub(1);
            // The length travels in the buffer's GRH area, see `set_held_len`.
            let len = held_len(&held);
            self.deliver(Ready { buf: Some(held), len, am_id, ep }, direct);
        }
    }

    fn creq(&mut self, core: &Core<D>, packet: &[u8], info: CreqInfo) {
        let parsed = DeviceAddr::parse(packet.get(info.dev_addr.clone()).unwrap_or(&[]));
        let addr = match parsed {
            Ok((addr, _)) => addr,
            Err(e) => {
                self.counters.rx_bad_creq += 1;
                tracing::trace!("{}: connection request with a bad address: {e}", core.attr.device);
                return;
            }
        };
        match ib::addr::ah_attr(&core.port, &addr, info.path_index) {
            Ok(attr) => {
                let outcome = self.engine.handle_creq(self.now, info, attr, peer_caps(&addr));
                // Once per endpoint; repetitions and refusals come as often as the network likes.
                match outcome {
                    CreqOutcome::Created(ep) => tracing::debug!(
                        "{}: ep {:#x} made for a connection request from {attr}",
                        core.attr.device,
                        ep.wire_id()
                    ),
                    _ => tracing::trace!("{}: connection request from {attr}: {outcome:?}", core.attr.device),
                }
            }
            Err(e) => {
                self.counters.rx_bad_creq += 1;
                tracing::trace!("{}: connection request that cannot be answered: {e}", core.attr.device);
            }
        }
    }

    /// Posts receives if enough of them are missing for it to be worth while.
    #[inline(always)]
    pub(crate) fn refill(&mut self, core: &Core<D>) {
        if self.rx_posted <= self.rx_low {
            cold_path();
            self.post_receives(core, self.rx_target.saturating_sub(self.rx_posted));
        }
    }

    /// When memory for receives is asked for again, if it was refused: who sleeps must wake up for it, since without receives
    /// nothing else wakes him.
    pub(crate) fn wants_memory_at(&self) -> Option<Time> {
        let missing = self.rx_target.saturating_sub(self.rx_posted);
        let is_missed = self.rx_posted <= self.rx_low;
        self.rx.next_attempt(missing).filter(|_| is_missed && self.failed.is_none() && self.recovering.is_none())
    }

    /// How many receives should be posted. They are posted some at a time.
    pub(crate) fn set_rx_target(&mut self, core: &Core<D>, target: usize) {
        self.rx_target = target;
        let batch = (core.iface_config.rx_max_batch as usize).min(target / 4).max(1);
        self.rx_low = target.saturating_sub(batch);
    }

    #[inline(never)]
    fn post_receives(&mut self, core: &Core<D>, missing: usize) {
        core.returns.drain_into(self.rx.free_mut());
        // A queue pair in ERROR would flush them at once, round after round.
        if missing == 0 || self.failed.is_some() || self.recovering.is_some() {
            return;
        }
        let free = self.rx.free_count();
        if free < missing {
            // It counts its failures, and tells of the first.
            let _ = self.rx.want(&core.md, self.now, missing, missing - free);
        }
        let free = self.rx.free_mut();
        let mut take = std::mem::take(&mut self.post_scratch);
        if free.len() <= missing {
            std::mem::swap(&mut take, free);
        } else {
            take.extend(free.drain(free.len() - missing..));
        }
        for b in &mut take {
            // Devices leave the first bytes undefined for IPv4: a stale header must not be taken for IPv6. Only stale ones
            // are touched, so that memory that was never used is not used now.
            if b[0] >> 4 == 6 {
                b[0] = 0xff;
            }
        }
        let before = take.len();
        let posted = self.qp.post_recv(&mut take);
        self.rx_posted += before - take.len();
        if !take.is_empty() {
            self.rx.free_mut().append(&mut take);
        }
        self.post_scratch = take;
        if let Err(e) = posted {
            self.fail(core, format!("posting receives failed: {e}"), e.errno);
        }
    }

    // --- sending

    /// Polls send completions and tells the engine; a queue pair that fell into ERROR is set up again.
    pub(crate) fn poll_sends(&mut self, core: &Core<D>) -> usize {
        self.rx_failed = false;
        let polled = self.tx.poll(&mut self.qp, core.iface_config.tx_max_poll as usize);
        if let Some(status) = polled.failed {
            tracing::trace!("{}: a send completed with {status:?}", core.attr.device);
        }
        if polled.failed.is_some() || self.qp.state() == ib::device::QpState::Error {
            self.recover(core);
        }
        if polled.events > 0 {
            self.engine.handle_tx_done(self.tx.released());
        }
        polled.events
    }

    /// Takes the queue pair out of the ERROR state, a step at a time where that may sleep. Packets that were flushed count as
    /// lost: the protocol sends them again, through fresh address handles where the old ones are poisoned.
    #[cold]
    fn recover(&mut self, core: &Core<D>) {
        if let Some(Recovery::Reset) = self.recovering {
            if let Some(result) = self.qp.finish_reset() {
                self.end_reset(core, result);
            }
            return;
        }
        let is_over = || self.failed.is_some() || core.md.is_lost() || core.closed.load(Ordering::Relaxed);
        if self.qp.state() != ib::device::QpState::Error || is_over() {
            return;
        }
        loop {
            let n = self.qp.poll_recv(&mut self.wcs, 64);
            for wc in self.wcs.drain(..) {
                self.rx_posted = self.rx_posted.saturating_sub(1);
                self.rx.put(wc.buf);
            }
            if n == 0 {
                break;
            }
        }
        while self.tx.poll(&mut self.qp, 64).events > 0 {}
        if !self.knows_gids(core) {
            return;
        }
        self.counters.qp_resets += 1;
        self.recovering = Some(Recovery::Reset);
        self.tx.suspend();
        match self.qp.begin_reset(core.waker.clone()) {
            Ok(Some(job)) => core.md.ah_cache().run_errand(job),
            Ok(None) => self.end_reset(core, Ok(())),
            Err(e) => self.end_reset(core, Err(e)),
        }
    }

    /// The queue pair is ready again, or the interface is lost.
    fn end_reset(&mut self, core: &Core<D>, result: Result<(), VerbsError>) {
        self.recovering = None;
        self.tx.resume();
        // It may have failed because the device is gone, which says more.
        core.md.poll_events();
        match result {
            Ok(()) => {
                tracing::warn!(
                    "{}: queue pair {} fell into the ERROR state and was reset; has a local address been removed?",
                    core.attr.device,
                    self.qp.qpn()
                );
                self.tx.flushed();
                self.engine.handle_tx_done(self.tx.released());
                self.refresh_links(core);
                self.refill(core);
            }
            Err(_) if core.md.is_lost() => self.refresh_links(core),
            Err(e) => self.fail(core, format!("queue pair {} cannot be reset: {e}", self.qp.qpn()), e.errno),
        }
    }

    /// True if the GID table was read since the queue pair fell into ERROR, so that address handles whose local GID is gone
    /// are known: one of them would take it down again. Where reading may sleep this is false at first.
    fn knows_gids(&mut self, core: &Core<D>) -> bool {
        if let Some(Recovery::Gids(read)) = &self.recovering {
            return read.load(Ordering::Acquire);
        }
        let read = Arc::new(AtomicBool::new(false));
        let (flag, wake) = (read.clone(), core.waker.clone());
        let then = move || {
            flag.store(true, Ordering::Release);
            wake();
        };
        core.md.ah_cache().refresh_gids(core.port.port, Some(Arc::new(then)));
        let known = read.load(Ordering::Acquire);
        self.recovering = Some(Recovery::Gids(read));
        known
    }

    /// Declares the interface lost. Calls fail from now on.
    pub(crate) fn fail(&mut self, core: &Core<D>, text: String, errno: i32) {
        if self.failed.is_none() {
            let error =
                Error::new(ErrorKind::Io, format!("{}: {text}; close the interface and open it again", core.name()))
                    .with_errno(errno)
                    .scoped(Scope::Interface);
            tracing::error!("{error}");
            self.failed = Some(error);
        }
    }

    /// The queue is quiet, and something waits for the report of a send that asked for none. Sends an ack to anybody, which
    /// repeats what they know, and asks for its report: the queue is served in order. Without anybody to send to there is
    /// nothing that waits, see [`Engine::send_farewell`](crate::proto::Engine::send_farewell), but what a failed endpoint left.
    fn nudge(&mut self) {
        let last = self.tx.next_serial() - 1;
        if std::mem::replace(&mut self.nudged_at, last) == last {
            return;
        }
        let usable = |ep: &EpId| self.engine.link(*ep).is_some_and(|l| !l.ah.is_poisoned());
        let candidate = self.engine.ep_ids().find(|ep| usable(ep) && self.engine.is_connected(*ep));
        if let Some(ep) = candidate {
            self.engine.repeat_ack(ep);
        }
    }

    /// Once the interface is lost, nothing that was accepted can end well: all endpoints fail, with the interface's error.
    fn fail_endpoints(&mut self) {
        if self.failed.is_none() || self.endpoints_failed {
            return;
        }
        self.endpoints_failed = true;
        for ep in self.engine.ep_ids().collect::<Vec<_>>() {
            self.engine.invalidate(self.now, ep);
        }
    }

    /// Sends what the engine wants to send. Returns how many packets.
    fn transmit(&mut self, core: &Core<D>) -> usize {
        let mut sent = 0;
        let mut poisoned: Option<EpId> = None;
        // Some packet was not posted. The engine must not wait for it to leave the queue.
        let mut unposted = false;
        let mut error = None;
        while sent < TRANSMIT_MAX && self.tx.has_credit() && self.failed.is_none() {
            let Some(t) = self.engine.poll_transmit(self.now, self.tx.next_serial()) else { break };
            sent += 1;
            tracing::trace!("{}: tx {}", core.attr.device, t.describe());
            if t.link.ah.is_poisoned() {
                // Not sent: to the engine a lost packet.
                poisoned = Some(t.ep);
                unposted = true;
                continue;
            }
            let flags = PostFlags { signaled: t.signaled || self.tx.wants_signal(), solicited: t.solicited };
            // What does not fit inline is read by the device, from registered memory only.
            let inline_len = self.tx.caps().inline_len as usize;
            let mut header = None;
            let bytes: &[u8] = match &t.kind {
                TransmitKind::Control { bytes } => bytes,
                TransmitKind::Resend { neth, .. } => neth,
            };
            let total = bytes.len() + if let TransmitKind::Resend { op, .. } = &t.kind { op_len(op) } else { 0 };
            if total > inline_len {
                match self.small.take(&core.md, self.now) {
                    Ok(Some(mut b)) => {
                        b[..bytes.len()].copy_from_slice(bytes);
                        header = Some(b);
                    }
                    // No memory: to the engine a lost packet. If the endpoint fails of it, this is why.
                    none => {
                        if let (Err(e), Some(r)) = (none, self.eps.get_mut(&t.ep)) {
                            r.trouble = Some(e);
                        }
                        unposted = true;
                        continue;
                    }
                }
            }
            let mut sges = SgeList::new();
            match &header {
                Some(b) => sges.push(&b[..bytes.len()], b.lkey()),
                None => sges.push(bytes, 0),
            }
            if let TransmitKind::Resend { op: Op::Packet { buf: Some(buf), len, iov, .. }, .. } = &t.kind {
                sges.push(&buf[NETH_LEN..*len as usize], buf.lkey());
                for s in iov.iter().flat_map(|v| v.iter()) {
                    sges.push(s.bytes(), s.lkey());
                }
            }
            let posted = self.tx.post(&mut self.qp, t.link, sges.as_slice(), flags);
            match (posted, header) {
                (Ok(serial), Some(b)) => self.tx.retire(serial, Retired::Buf(b)),
                (Ok(_), None) => {}
                (Err(e), _) => {
                    error = Some(e);
                    break;
                }
            }
        }
        if let Some(e) = error {
            self.fail(core, format!("posting a send failed: {e}"), e.errno);
        }
        if sent > 0 {
            self.tx.ring(&mut self.qp);
            self.engine.handle_tx_done(self.tx.released());
        }
        if unposted {
            // Its serial goes to the next packet. To call that one done early is safe: what it needs is kept by what has
            // really left the queue.
            self.engine.handle_tx_done(self.tx.next_serial());
        }
        if let Some(ep) = poisoned {
            self.re_resolve(core, ep);
        }
        sent
    }

    /// Posts a packet of the user's that the engine has begun, and commits it. `buf[..len]` is complete but for the NETH.
    pub(crate) fn send(
        &mut self,
        core: &Core<D>,
        begun: Begun,
        (ep, mut buf, len): (EpId, Buf, usize),
        iov: Option<Box<[MemSlice]>>,
        comp: Option<&uct::Completion>,
    ) -> SendResult<()> {
        buf[..NETH_LEN].copy_from_slice(&begun.neth);
        let Some(link) = self.engine.link_of(&begun).filter(|l| !l.ah.is_poisoned()) else {
            return self.poisoned(core, ep, buf);
        };
        let first = Sge { bytes: &buf[..len], lkey: buf.lkey() };
        let posted = match &iov {
            None => self.tx.post(&mut self.qp, link, &[first], PostFlags::default()),
            Some(iov) => {
                let mut sges = SgeList::new();
                sges.push(first.bytes, first.lkey);
                for s in iov {
                    sges.push(s.bytes(), s.lkey());
                }
                self.tx.post(&mut self.qp, link, sges.as_slice(), PostFlags::default())
            }
        };
        match posted {
            Ok(serial) => {
                let comp = comp.map(uct::Completion::token);
                let op = Op::Packet { ep, buf: Some(buf), len: len as u32, iov, comp };
                self.engine.commit_send(self.now, begun, serial, op);
                self.tx.doorbell(&mut self.qp, || core.worker.may_batch());
                Ok(())
            }
            Err(e) => self.post_failed(core, buf, &e),
        }
    }

    /// The short way of a short message: everything as it nearly always is, found out by looking only, and the packet on its
    /// way. `fill` writes the `len` bytes behind the NETH. False: something is not as usual, nothing was done, and the long
    /// way ([`Live::send_copy`]) finds out what it is.
    #[inline(always)]
    pub(crate) fn send_plain(
        &mut self,
        core: &Core<D>,
        (ep, am_id, len): (EpId, u8, usize),
        fill: impl FnOnce(&mut [u8]),
    ) -> bool {
        if self.failed.is_some() || !self.tx.has_credit() || NETH_LEN + len > SMALL_LEN || !self.pending.is_unused() {
            cold_path();
            return false;
        }
        let Live { engine, qp, tx, small, now, .. } = self;
        let total = NETH_LEN + len;
        // As in `touch_clock`.
        let is_fresh = tx.is_round_fresh();
        let read = || {
            if is_fresh {
                *now = (*now).max(core.clock.now());
            }
            *now
        };
        let buffer = |link: &Link<D>| if link.ah.is_poisoned() { None } else { small.pop_plenty() };
        let begun = engine.send_plain(read, ep, (am_id, len), tx.next_serial(), buffer, |mut buf: Buf, neth, op| {
            // All buffers of this pool are long enough, see above.
            if let Some((head, body)) = buf.get_mut(..total).and_then(<[u8]>::split_first_chunk_mut) {
                *head = neth;
                fill(body);
            }
            // A free place has no operation, so there is none to be dropped.
            std::mem::forget(op.replace(Op::Packet { ep, buf: Some(buf), len: total as u32, iov: None, comp: None }));
            match op {
                Some(Op::Packet { buf: Some(buf), .. }) if buf.len() >= total => (&buf[..total], buf.lkey()),
                _ => {
                    cold_path();
                    (&[], 0)
                }
            }
        });
        let Some((link, bytes, lkey)) = begun else {
            cold_path();
            return false;
        };
        if let Err(e) = tx.send(qp, link, bytes, lkey, || core.worker.may_batch()) {
            // Lost, but so is the interface, and with it the endpoint.
            self.fail_posting(core, &e);
            return false;
        }
        true
    }

    #[cold]
    #[inline(never)]
    fn fail_posting(&mut self, core: &Core<D>, e: &VerbsError) {
        self.fail(core, format!("posting a send failed: {e}"), e.errno);
    }

    /// [`Live::send`] for a message that is all in its buffer, and has no completion.
    pub(crate) fn send_copy(
        &mut self,
        core: &Core<D>,
        begun: Begun,
        (ep, mut buf, len): (EpId, Buf, usize),
    ) -> SendResult<()> {
        buf[..NETH_LEN].copy_from_slice(&begun.neth);
        let Some(link) = self.engine.link_of(&begun).filter(|l| !l.ah.is_poisoned()) else {
            return self.poisoned(core, ep, buf);
        };
        match self.tx.send(&mut self.qp, link, &buf[..len], buf.lkey(), || core.worker.may_batch()) {
            Ok(serial) => {
                let op = Op::Packet { ep, buf: Some(buf), len: len as u32, iov: None, comp: None };
                self.engine.commit_send(self.now, begun, serial, op);
                Ok(())
            }
            Err(e) => self.post_failed(core, buf, &e),
        }
    }

    /// The endpoint's address handle must not be used again: the send waits for another one.
    #[cold]
    fn poisoned(&mut self, core: &Core<D>, ep: EpId, buf: Buf) -> SendResult<()> {
        self.put_send_buf(buf);
        self.re_resolve(core, ep);
        Err(SendError::NoResource)
    }

    #[cold]
    fn post_failed(&mut self, core: &Core<D>, buf: Buf, e: &VerbsError) -> SendResult<()> {
        self.put_send_buf(buf);
        self.fail_posting(core, e);
        Err(self.failed.clone().map_or(SendError::NoResource, SendError::Failed))
    }

    /// The first send after a `progress` reads the clock: the user may have computed for long in between.
    #[inline]
    pub(crate) fn touch_clock(&mut self, core: &Core<D>) {
        if self.tx.is_round_fresh() {
            self.set_now(core);
        }
    }

    /// True if something waits for the user's `progress`.
    #[inline]
    pub(crate) fn has_user_work(&self) -> bool {
        !self.ready.is_empty() || !self.later.is_empty() || self.pending.line_len() > 0
    }

    /// True if requests are queued that may run some day: those of failed endpoints wait for the user to purge them.
    pub(crate) fn has_pending(&self) -> bool {
        self.pending.eps().any(|ep| self.refusal(ep).is_none())
    }

    /// Why the endpoint will never send again, if that is so.
    pub(crate) fn refusal(&self, ep: EpId) -> Option<Refused> {
        self.engine.begin_send(ep, 0, 0, SendKind::Copy, false).err().filter(|r| *r != Refused::NoResource)
    }

    /// Gives up what a message that was being packed had reserved.
    pub(crate) fn unreserve(&mut self, ep: EpId) {
        self.engine.unreserve(ep);
        self.tx.unreserve();
    }

    #[inline]
    pub(crate) fn put_send_buf(&mut self, buf: Buf) {
        if buf.len() == SMALL_LEN { self.small.put(buf) } else { self.large.put(buf) }
    }

    // --- events of the engine

    /// Finishes what the engine says is acknowledged.
    #[inline(never)]
    fn settle_done(&mut self, core: &Core<D>) {
        while self.engine.has_done() {
            // Messages without a completion, which are nearly all, are finished where they lie.
            let released = self.tx.released();
            self.engine.settle_done(Home { small: &mut self.small, large: &mut self.large, released });
            if !self.engine.has_done() {
                break;
            }
            self.finish_next(core);
        }
    }

    #[inline(never)]
    fn finish_next(&mut self, core: &Core<D>) {
        if let Some((op, serial)) = self.engine.poll_done() {
            self.finish_op(core, op, Ok(()), serial);
        }
    }

    fn events(&mut self, core: &Core<D>) {
        self.settle_done(core);
        while let Some(event) = self.engine.poll_event() {
            match event {
                Event::Done { op, result, serial } => self.finish_op(core, op, result, serial),
                Event::Writable(ep) => self.pending.enter_line(ep),
                Event::Connected(ep) => {
                    tracing::debug!("{}: ep {:#x} connected", core.attr.device, ep.wire_id());
                    // Requests that were queued before it led anywhere.
                    self.pending.enter_line(ep);
                    if let Some(r) = self.eps.get_mut(&ep) {
                        r.trouble = None;
                    }
                }
                Event::Resolve { ep, passive } => {
                    let origin = if passive { Origin::Stranger } else { Origin::Local };
                    // A failure reaches the endpoint through the engine.
                    let _ = self.resolve(core, ep, origin);
                }
                Event::EpFailed { ep, kind, detail } => self.ep_failed(core, ep, kind, &detail),
                Event::Stalled(ep) => self.stalled(core, ep),
                Event::Stuck { ep, since } => self.stuck(core, ep, since),
                Event::Freed { link, serial, .. } => {
                    if let Some(link) = link {
                        self.tx.retire_link(serial, link);
                    }
                }
                Event::ReleaseHeld(buf) => {
                    self.held = self.held.saturating_sub(1);
                    self.rx.put(buf);
                }
                Event::PeerClosed(ep) => {
                    tracing::debug!("{}: the peer closed ep {:#x}", core.attr.device, ep.wire_id());
                }
            }
        }
    }

    fn finish_op(&mut self, core: &Core<D>, op: Op, result: Result<(), ErrorKind>, serial: u64) {
        let result = match (&self.failed, result) {
            (Some(e), Err(ErrorKind::EndpointTimeout)) => Err(e.kind()),
            _ => result,
        };
        match op {
            Op::Packet { ep, buf, iov, comp, .. } => {
                let released = serial <= self.tx.released();
                if let Some(token) = comp {
                    self.later.push(Later::Complete(ep, token, result));
                }
                if released {
                    buf.into_iter().for_each(|b| self.put_send_buf(b));
                    self.later.extend(iov.map(Later::Regions));
                } else {
                    buf.into_iter().for_each(|b| self.tx.retire(serial, Retired::Buf(b)));
                    if let Some(iov) = iov {
                        self.tx.retire(serial, Retired::Regions(iov));
                    }
                }
            }
            Op::Marker { ep, comp, closes } => {
                if closes {
                    self.destroy(core, ep);
                }
                if let Some(token) = comp {
                    self.later.push(Later::Complete(ep, token, result));
                }
            }
        }
    }

    fn ep_failed(&mut self, core: &Core<D>, ep: EpId, kind: ErrorKind, detail: &FailDetail) {
        let peer = self.engine.peer(ep).map(|(attr, qpn, _)| (*attr, qpn));
        let Some(record) = self.eps.get_mut(&ep) else { return };
        let error = match &self.failed {
            Some(e) => e.clone(),
            None => {
                let mut text = failure_text(core, ep, peer, kind, detail);
                if self.gid_lost {
                    text += &format!("; the local address {} is gone", core.port.gid.gid);
                }
                let error = Error::new(kind, text);
                match record.trouble.take() {
                    Some(why) => error.context(why),
                    None => error,
                }
            }
        };
        record.failed = Some(error.clone());
        let failure = EpFailure::new(u64::from(ep.wire_id()), record.user_data, error);
        self.later.push(Later::Failure(ep, failure));
        // Requests stay queued for the user to purge.
    }

    // --- address handles

    /// Asks the cache for the address handle of `ep`, which waits for it.
    pub(crate) fn resolve(&mut self, core: &Core<D>, ep: EpId, origin: Origin) -> Result<(), Error> {
        let Some((attr, qpn, _)) = self.engine.peer(ep) else { return Ok(()) };
        let (attr, qpn) = (*attr, Qpn::truncate(qpn));
        if origin == Origin::Local {
            // What the device has told already counts for new endpoints, whoever has not looked yet.
            core.md.poll_events();
        }
        let options = match origin {
            Origin::Local => GetOptions::local("ud endpoint"),
            Origin::Stranger => GetOptions::stranger("ud passive endpoint"),
        };
        let answer = core.md.ah_cache().try_get(&attr, options.waking(&core.waker));
        self.resolution(ep, qpn, answer)
    }

    fn resolution(&mut self, ep: EpId, qpn: Qpn, answer: TryGet<D>) -> Result<(), Error> {
        match answer {
            TryGet::Ready(ah) => {
                self.got_ah(ep, qpn, ah);
                Ok(())
            }
            TryGet::Pending(pending) => {
                self.resolving.push(Resolving { ep, pending });
                Ok(())
            }
            TryGet::Failed { error, .. } => {
                if let Some(r) = self.eps.get_mut(&ep) {
                    r.trouble = Some(error.clone());
                }
                // An endpoint that has a link keeps it; one that waits for its first fails.
                let unused = self.engine.resolved(self.now, ep, Err(error.kind()));
                debug_assert!(unused.is_none());
                Err(error)
            }
        }
    }

    fn got_ah(&mut self, ep: EpId, qpn: Qpn, ah: AhRef<D>) {
        let link = Link { ah, qpn };
        let old = match self.engine.link(ep) {
            Some(_) => self.engine.replace_link(ep, link),
            None => self.engine.resolved(self.now, ep, Ok(link)),
        };
        if let Some(old) = old {
            let last = self.tx.next_serial() - 1;
            self.tx.retire_link(last, old);
        }
    }

    /// Looks at the resolutions that were pending.
    fn finish_resolutions(&mut self) {
        for Resolving { ep, pending } in std::mem::take(&mut self.resolving) {
            match self.engine.peer(ep).map(|(_, qpn, _)| Qpn::truncate(qpn)) {
                // Its failure reaches the endpoint through the engine.
                Some(qpn) => drop(self.resolution(ep, qpn, pending.take())),
                // The endpoint is gone, and with the token its place in the queue.
                None => drop(pending),
            }
        }
    }

    /// Swaps in a fresh address handle, unless one is on its way.
    fn re_resolve(&mut self, core: &Core<D>, ep: EpId) {
        if self.gid_lost {
            // Refused until the address is back. That is told; a device that does not tell is asked now and then.
            if self.now.since(self.gids_asked) >= GIDS_ASK_EVERY {
                self.gids_asked = self.now;
                core.md.ah_cache().refresh_gids(core.port.port, None);
                self.refresh_gids(core);
            }
            if self.gid_lost {
                return;
            }
        }
        if !self.resolving.iter().any(|r| r.ep == ep) {
            self.counters.re_resolved += 1;
            // Strangers' endpoints stay within the strangers' quota.
            let is_ours = self.eps.contains_key(&ep) || self.engine.state(ep) == Some(EpStateView::Lingering);
            let origin = if is_ours { Origin::Local } else { Origin::Stranger };
            if let Err(e) = self.resolve(core, ep, origin) {
                tracing::trace!("{}: ep {:#x} keeps its address handle: {e}", core.attr.device, ep.wire_id());
            }
        }
    }

    /// Resends stay unanswered: perhaps the address handle leads to where the peer was.
    fn stalled(&mut self, core: &Core<D>, ep: EpId) {
        if let Some(link) = self.engine.link(ep) {
            core.md.ah_cache().report_unresponsive(&link.ah);
            core.md.look_at_port(core.port.port);
            self.re_resolve(core, ep);
        }
    }

    /// The peer answers, and does not take what is sent. Nothing is wrong with the endpoint, so there is nobody to tell but the
    /// operator; one line tells of all that get stuck within [`STUCK_PAUSE`].
    #[cold]
    fn stuck(&mut self, core: &Core<D>, ep: EpId, since: Duration) {
        let now = self.now;
        if now < self.stuck_quiet_until {
            return;
        }
        self.stuck_quiet_until = now + STUCK_PAUSE;
        let Some((op, resends)) = self.engine.oldest_unacked(ep) else { return };
        let (len, times) = (op.packet_len(), u32::from(resends) + 1);
        let peer = self.engine.peer(ep).map(|(attr, qpn, _)| (*attr, qpn));
        tracing::warn!(
            "{}: the peer answers, but has not taken a packet of {len} bytes in {since:.0?}, sent {times} times or more. Either \
             its process is busy and receives nothing, or a link on the way does not carry packets of that length: compare the \
             MTU of all of them, or set UCX_IB_PATH_MTU to less at both ends",
            who(core, ep, peer)
        );
    }

    /// After events of the device: the GIDs that count as ours, and the links that must not be used again.
    fn refresh_links(&mut self, core: &Core<D>) {
        if core.md.is_lost() {
            let text = "the device is gone, or unusable after a fatal error".to_string();
            return self.fail(core, text, EIO);
        }
        self.refresh_gids(core);
        let poisoned: Vec<EpId> =
            self.engine.ep_ids().filter(|&ep| self.engine.link(ep).is_some_and(|l| l.ah.is_poisoned())).collect();
        for ep in poisoned {
            self.re_resolve(core, ep);
        }
    }

    /// The GIDs that count as ours, from the table as it was last read.
    fn refresh_gids(&mut self, core: &Core<D>) {
        if let Some(gids) = core.md.ah_cache().gids(core.port.port) {
            self.gids = OwnGids::new(gids.into_iter().map(|g| g.gid).collect());
            let own = core.port.gid.gid;
            let lost = !self.gids.contains(&own);
            if lost != std::mem::replace(&mut self.gid_lost, lost) {
                match lost {
                    true => tracing::warn!(
                        "{}: the local address {own} is gone: nothing can be sent until it is back; to use another one, \
                         close the interface and open it again",
                        core.name()
                    ),
                    false => tracing::info!("{}: the local address {own} is back", core.name()),
                }
            }
        }
    }

    // --- the end of things

    /// Destroys the endpoint: what is outstanding is settled later with `Canceled`, the engine keeps its record until the
    /// peer has everything and the linger time is over. Its address handle stays in that record.
    pub(crate) fn destroy(&mut self, core: &Core<D>, ep: EpId) {
        let requests = self.pending.purge(ep, true);
        if !requests.is_empty() {
            self.later.push(Later::Pending(ep, requests));
        }
        self.eps.remove(&ep);
        if self.tx.is_last_unreported() {
            self.engine.send_farewell(ep);
        }
        self.give_up(core, ep, false);
    }

    /// Settles what is outstanding with `Canceled`, and moves what the packets still need out of the user's memory.
    pub(crate) fn give_up(&mut self, core: &Core<D>, ep: EpId, keep_ep: bool) {
        let (large, tx, later, now) = (&mut self.large, &mut self.tx, &mut self.later, self.now);
        let visit = |o: Outstanding<'_, Op>| {
            let token = match o {
                Outstanding::Packet(op) => {
                    if let Some((iov, old)) = copy_user_data(core, (large, now), op) {
                        // What was posted may not have been read yet.
                        let last = tx.next_serial() - 1;
                        tx.retire(last, Retired::Buf(old));
                        tx.retire(last, Retired::Regions(iov));
                    }
                    op.take_completion()
                }
                Outstanding::Marker(mut op) => op.take_completion(),
            };
            if let Some(token) = token {
                later.push(Later::Complete(ep, token, Err(ErrorKind::Canceled)));
            }
        };
        if keep_ep { self.engine.cancel(self.now, ep, visit) } else { self.engine.destroy(self.now, ep, visit) }
    }

    fn recycle(&mut self, r: Retired) {
        match r {
            Retired::Buf(buf) => self.put_send_buf(buf),
            Retired::Regions(iov) => self.later.push(Later::Regions(iov)),
        }
    }

    fn finish_flushes(&mut self) {
        if self.flushes.is_empty() {
            return;
        }
        let engine = &self.engine;
        let mut done: Vec<CompletionToken> = Vec::new();
        let mut kept = Vec::new();
        for (token, mut eps) in self.flushes.drain(..) {
            eps.retain(|ep| engine.has_outstanding(*ep));
            if eps.is_empty() { done.push(token) } else { kept.push((token, eps)) }
        }
        self.flushes = kept;
        self.later.extend(done.into_iter().map(|t| Later::Settle(t, Ok(()))));
    }
}

/// Where the buffers of acknowledged messages go.
struct Home<'a> {
    small: &'a mut Pool,
    large: &'a mut Pool,
    /// [`Tx::released`](crate::tx::Tx::released).
    released: u64,
}

impl Settle<Op> for Home<'_> {
    /// Finishes a message that has no completion, if the device does not read its buffer any more.
    #[inline(always)]
    fn settle(&mut self, op: &mut Op, serial: u64) -> bool {
        if serial <= self.released
            && let Some(buf) = op.take_plain()
        {
            if buf.len() == SMALL_LEN {
                self.small.put(buf);
            } else {
                cold_path();
                put_back(self.large, buf);
            }
            true
        } else {
            cold_path();
            false
        }
    }
}

/// [`Pool::put`], not inlined.
#[inline(never)]
fn put_back(pool: &mut Pool, buf: Buf) {
    pool.put(buf);
}

/// Payload bytes of a resent operation, behind its NETH.
fn op_len(op: &Op) -> usize {
    match op {
        Op::Packet { len, .. } => *len as usize - NETH_LEN + op.iov_len(),
        Op::Marker { .. } => 0,
    }
}

/// Copies what a zero-copy packet still needs into a buffer of ours; gives back the regions and the header's buffer.
fn copy_user_data<D: Device>(
    core: &Core<D>,
    (large, now): (&mut Pool, Time),
    op: &mut Op,
) -> Option<(Box<[MemSlice]>, Buf)> {
    let extra = op.iov_len();
    let Op::Packet { buf, len, iov, .. } = op else { return None };
    iov.as_ref()?;
    let old = buf.as_ref()?;
    let head = *len as usize;
    // Without memory for a copy the packet goes on holding the regions, which keeps it correct.
    let mut copy = large.take(&core.md, now).ok().flatten().filter(|b| b.len() >= head + extra)?;
    copy[..head].copy_from_slice(&old[..head]);
    let taken = iov.take()?;
    let mut at = head;
    for s in &taken {
        copy[at..at + s.len()].copy_from_slice(s.bytes());
        at += s.len();
    }
    *len = at as u32;
    Some((taken, buf.replace(copy)?))
}

/// What a device address says about its interface, for the engine.
pub(crate) fn peer_caps(addr: &DeviceAddr) -> PeerCaps {
    PeerCaps { max_packet: addr.path_mtu.bytes(), ext: addr.trailer.map(ext_caps) }
}

/// The extensions, in a device address and in the engine.
pub(crate) const FEATURES: [(ib::addr::Features, Features); 3] = [
    (ib::addr::Features::SACK, Features::SACK),
    (ib::addr::Features::BYE, Features::BYE),
    (ib::addr::Features::BUDGET, Features::BUDGET),
];

fn ext_caps(t: Trailer) -> ExtCaps {
    let mut features = Features::empty();
    for (theirs, ours) in FEATURES {
        features.set(ours, t.features.contains(theirs));
    }
    ExtCaps { features, incarnation: t.incarnation, rx_budget: t.soft.rx_budget }
}

/// Turns the engine's refusal into the caller's error.
pub(crate) fn refused<D: Device>(core: &Core<D>, live: &Live<D>, ep: EpId, r: Refused) -> SendError {
    match r {
        Refused::NoResource => SendError::NoResource,
        Refused::Failed(kind) => {
            let known = live.eps.get(&ep).and_then(|r| r.failed.clone());
            SendError::Failed(known.unwrap_or_else(|| {
                Error::new(kind, format!("{}: ep {:#x}: destroy it and connect anew", core.name(), ep.wire_id()))
                    .scoped(Scope::Endpoint)
            }))
        }
    }
}

/// An endpoint and where it leads, for messages.
fn who<D: Device>(core: &Core<D>, ep: EpId, peer: Option<(AhAttr, u32)>) -> String {
    let text = format!("{}: ep {:#x}", core.name(), ep.wire_id());
    match peer {
        Some((attr, qpn)) => format!("{text} to {attr} qp {qpn:#x}"),
        None => text,
    }
}

fn failure_text<D: Device>(
    core: &Core<D>,
    ep: EpId,
    peer: Option<(AhAttr, u32)>,
    kind: ErrorKind,
    detail: &FailDetail,
) -> String {
    let mut text = who(core, ep, peer);
    if let Some(id) = detail.remote_ep {
        text += &format!(" ep {id:#x}");
    }
    let silent = format!("{:.3} s", detail.silent.as_secs_f64());
    let progress = format!("last psn acked {}, sent {}", detail.acked_psn, detail.last_psn);
    let limit = human(core.config.timeout);
    match kind {
        ErrorKind::NeverAnswered => {
            text += &format!(
                ": no packet came back in {silent} and {} resends ({progress}); is the process there, and does a firewall \
                 let UDP pass? The limit is UCX_UD_TIMEOUT={limit}",
                detail.resends
            );
        }
        // A handle that could not be made, or a user who has given it up.
        ErrorKind::EndpointTimeout if detail.silent.is_zero() && detail.resends == 0 => {
            text += &format!(": given up while nothing was sent that could have been answered ({progress})");
        }
        ErrorKind::EndpointTimeout => {
            text += &format!(
                ": was connected, then silent for {silent} and {} resends ({progress}); the limit is UCX_UD_TIMEOUT={limit}",
                detail.resends
            );
        }
        ErrorKind::ConnectionReset => text += &format!(": closed by the peer, or the peer restarted ({progress})"),
        _ => text += &format!(": {kind} ({progress})"),
    }
    if let (ErrorKind::NeverAnswered | ErrorKind::EndpointTimeout, Some(why)) =
        (kind, core.md.port_trouble(core.port.port, core.port.mtu))
    {
        text += &format!("; {why}");
    }
    text
}

fn human(d: Duration) -> String {
    if d == Duration::MAX { "inf".into() } else { format!("{}s", d.as_secs_f64()) }
}

/// A buffer that the engine keeps for later remembers its payload length in the GRH area, which nobody needs any more.
fn set_held_len(buf: &mut Buf, len: u32) {
    buf[..4].copy_from_slice(&len.to_ne_bytes());
}

fn held_len(buf: &Buf) -> u32 {
    u32::from_ne_bytes([buf[0], buf[1], buf[2], buf[3]])
}
