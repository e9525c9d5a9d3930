//! The send side of the queue pair: credits, serial numbers, doorbells, and what must wait for a send to leave the queue.
//!
//! Every send has a serial number, counting up. A completion of serial *n* says that all sends up to *n* have left the
//! queue, so that "is this buffer, or this address handle, still needed by a posted send" is one comparison. What is
//! dropped earlier is [retired](Tx::retire) with the serial of the last send that may name it.

use std::{collections::VecDeque, hint::cold_path};

use ib::{
    ah::AhRef,
    device::{Device, QpCaps, SendWc, SendWr, Sge, UdQp, VerbsError, WcStatus},
    types::{QKey, Qpn},
};
use uct::{MemSlice, mem::Buf};

/// Where an endpoint's packets go: the address handle it holds, and the queue pair there.
pub(crate) struct Link<D: Device> {
    pub(crate) ah: AhRef<D>,
    pub(crate) qpn: Qpn,
}

/// Memory that a posted send may still read.
pub(crate) enum Retired {
    /// A buffer of a send pool.
    Buf(Buf),
    /// Regions of the user.
    Regions(Box<[MemSlice]>),
}

/// How many sends may go without asking for a completion.
const SIGNAL_EVERY: u64 = 64;

/// See the module.
pub(crate) struct Tx<D: Device> {
    caps: QpCaps,
    depth: u64,
    /// Serial of the send posted last; 0 before the first.
    posted: u64,
    /// All sends up to here have left the queue.
    done: u64,
    /// The last send that asked for a completion.
    signaled: u64,
    /// The last send whose payload the device reads from where it is: others were copied when they were posted.
    read: u64,
    /// Credits promised to messages that are being packed.
    reserved: u64,
    /// Less than half of the credits were left at the last send that asked for a completion, or none at any later one.
    is_low: bool,
    /// Posted sends that wait for a ring.
    held: u32,
    /// A send has left in this round: further ones may wait for company.
    rung: bool,
    retired: VecDeque<(u64, Retired)>,
    /// Address handles that were replaced or whose endpoint was freed. Apart from memory: a device that copies what it sends
    /// lets go of memory at once, but must report a send before its address handle may be destroyed.
    links: VecDeque<(u64, Link<D>)>,
    wcs: Vec<SendWc>,
    pub(crate) rings: u64,
}

/// What polling the send queue found.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct TxPolled {
    pub(crate) events: usize,
    pub(crate) failed: Option<WcStatus>,
}

impl<D: Device> Tx<D> {
    pub(crate) fn new(caps: QpCaps, depth: u32) -> Self {
        Tx {
            caps,
            depth: u64::from(depth),
            posted: 0,
            done: 0,
            signaled: 0,
            read: 0,
            reserved: 0,
            is_low: false,
            held: 0,
            rung: false,
            retired: VecDeque::new(),
            links: VecDeque::new(),
            wcs: Vec::with_capacity(16),
            rings: 0,
        }
    }

    /// True if a send can be posted.
    #[inline]
    pub(crate) fn has_credit(&mut self) -> bool {
        let has = self.posted - self.done + self.reserved < self.depth;
        if !has {
            cold_path();
            self.is_low = true;
        }
        has
    }

    /// Sets a credit aside, for a message that is being packed.
    pub(crate) fn reserve(&mut self) {
        self.reserved += 1;
    }

    /// Undoes [`Tx::reserve`]; the credit is there for the taking.
    pub(crate) fn unreserve(&mut self) {
        self.reserved = self.reserved.saturating_sub(1);
    }

    /// True if credits have run low, or out: poll the send queue even if there is much else to do.
    #[inline]
    pub(crate) fn is_low(&self) -> bool {
        self.is_low
    }

    /// The serial that the next send will have.
    pub(crate) fn next_serial(&self) -> u64 {
        self.posted + 1
    }

    /// Everything up to here has left the queue, as far as memory is concerned.
    #[inline]
    pub(crate) fn released(&self) -> u64 {
        if self.read <= self.done { self.posted } else { self.done }
    }

    /// True if every send has left the queue.
    pub(crate) fn is_idle(&self) -> bool {
        self.done == self.posted || (self.caps.copies_sends && self.held == 0)
    }

    /// Posts one send. The caller has seen [`Tx::has_credit`].
    #[inline]
    pub(crate) fn post(
        &mut self,
        qp: &mut D::UdQp,
        link: &Link<D>,
        sges: &[Sge<'_>],
        flags: PostFlags,
    ) -> Result<u64, VerbsError> {
        let serial = self.posted + 1;
        let signaled = flags.signaled || self.is_signal_due(serial);
        let inline = sges.iter().map(|s| s.bytes.len()).sum::<usize>() <= self.caps.inline_len as usize;
        qp.post_send(&SendWr {
            serial,
            ah: link.ah.ah(),
            remote_qpn: link.qpn,
            remote_qkey: QKey::UCX,
            sges,
            inline,
            signaled,
            solicited: flags.solicited,
        })?;
        self.note_posted(serial, signaled, inline);
        self.held += 1;
        Ok(self.posted)
    }

    /// Posts a send of the user's, as [`Tx::post`] and [`Tx::doorbell`] do.
    #[inline(always)]
    pub(crate) fn send(
        &mut self,
        qp: &mut D::UdQp,
        link: &Link<D>,
        bytes: &[u8],
        lkey: u32,
        may_batch: impl FnOnce() -> bool,
    ) -> Result<u64, VerbsError> {
        if self.held > 0 || self.rung {
            // Perhaps not alone.
            let may_batch = self.caps.send_batch > 1 && may_batch();
            if self.held > 0 || may_batch {
                return self.send_batched(qp, link, (bytes, lkey), may_batch);
            }
        }
        let serial = self.posted + 1;
        let (signaled, inline) = (self.is_signal_due(serial), bytes.len() <= self.caps.inline_len as usize);
        // Before it is so, that nothing is left to be done after calls into the provider: if it fails, the interface is lost.
        self.note_posted(serial, signaled, inline);
        self.rung = true;
        self.rings += 1;
        qp.post_send_now(&SendWr {
            serial,
            ah: link.ah.ah(),
            remote_qpn: link.qpn,
            remote_qkey: QKey::UCX,
            sges: &[Sge { bytes, lkey }],
            inline,
            signaled,
            solicited: false,
        })?;
        Ok(serial)
    }

    #[inline(never)]
    fn send_batched(
        &mut self,
        qp: &mut D::UdQp,
        link: &Link<D>,
        (bytes, lkey): (&[u8], u32),
        may_batch: bool,
    ) -> Result<u64, VerbsError> {
        let serial = self.post(qp, link, &[Sge { bytes, lkey }], PostFlags::default())?;
        self.doorbell(qp, || may_batch);
        Ok(serial)
    }

    /// One unsignaled run at most is outstanding, so that every credit comes back.
    #[inline]
    fn is_signal_due(&self, serial: u64) -> bool {
        serial - self.signaled >= SIGNAL_EVERY
    }

    #[inline]
    fn note_posted(&mut self, serial: u64, signaled: bool, inline: bool) {
        self.posted = serial;
        if signaled {
            self.signaled = serial;
            self.is_low |= (serial - self.done) * 2 > self.depth;
        }
        if !(inline || self.caps.copies_sends) {
            self.read = serial;
        }
    }

    /// After a send of the user's: rings at once, or leaves the send for a later ring if the device gains by it and one
    /// is sure to come. The first send of a round always leaves at once, so that a lone message is not delayed.
    #[inline]
    pub(crate) fn doorbell(&mut self, qp: &mut D::UdQp, may_batch: impl FnOnce() -> bool) {
        if self.caps.send_batch <= 1 || !self.rung || self.held >= self.caps.send_batch || !may_batch() {
            self.ring(qp);
        }
    }

    /// Lets everything leave.
    #[inline]
    pub(crate) fn ring(&mut self, qp: &mut D::UdQp) {
        if self.held > 0 {
            self.held = 0;
            self.rung = true;
            self.rings += 1;
            qp.ring();
        }
    }

    /// True if nothing has left since the round began.
    pub(crate) fn is_round_fresh(&self) -> bool {
        !self.rung
    }

    /// A new round begins: the next send leaves at once.
    pub(crate) fn start_round(&mut self) {
        self.rung = false;
    }

    /// Polls completions; credits come back.
    pub(crate) fn poll(&mut self, qp: &mut D::UdQp, max: usize) -> TxPolled {
        self.wcs.clear();
        self.is_low = false;
        let events = qp.poll_send(&mut self.wcs, max);
        let mut failed = None;
        for wc in &self.wcs {
            self.done = self.done.max(wc.serial.min(self.posted));
            if wc.status != WcStatus::Success {
                failed.get_or_insert(wc.status);
            }
        }
        TxPolled { events, failed }
    }

    /// The queue pair is being reset: there are no credits until [`Tx::resume`], and nothing waits for a ring.
    pub(crate) fn suspend(&mut self) {
        self.reserved += self.depth;
        self.held = 0;
    }

    /// Undoes [`Tx::suspend`].
    pub(crate) fn resume(&mut self) {
        self.reserved = self.reserved.saturating_sub(self.depth);
    }

    /// The queue pair was reset: nothing is in it any more.
    pub(crate) fn flushed(&mut self) {
        self.done = self.posted;
        self.held = 0;
    }

    /// True if a send that nobody will report is the last obstacle for something that was retired: ask for a report with
    /// the next one.
    pub(crate) fn wants_signal(&self) -> bool {
        let unreported = |s: u64, released: u64| s > self.signaled && s > released;
        self.retired.back().is_some_and(|(s, _)| unreported(*s, self.released()))
            || self.links.back().is_some_and(|(s, _)| unreported(*s, self.done))
    }

    /// True if the last send was posted without asking for a report.
    pub(crate) fn is_last_unreported(&self) -> bool {
        self.posted > self.signaled && self.posted > self.done
    }

    /// Keeps memory until all sends up to `serial` have left the queue.
    pub(crate) fn retire(&mut self, serial: u64, what: Retired) {
        self.retired.push_back((serial, what));
    }

    /// Keeps an address handle until all sends up to `serial` are reported.
    pub(crate) fn retire_link(&mut self, serial: u64, link: Link<D>) {
        self.links.push_back((serial, link));
    }

    /// 0 if no memory and no address handle waits for sends to leave the queue.
    #[inline]
    pub(crate) fn retired_len(&self) -> usize {
        self.retired.len() | self.links.len()
    }

    /// How many address handles are kept for sends that were not reported yet.
    pub(crate) fn links_len(&self) -> usize {
        self.links.len()
    }

    /// Takes memory that is no longer needed by a posted send. Order of retirement, which is nearly that of the serials.
    pub(crate) fn next_released(&mut self) -> Option<Retired> {
        let released = self.released();
        self.retired.pop_front_if(|(s, _)| *s <= released).map(|(_, r)| r)
    }

    /// Lets go of address handles that are no longer needed by a posted send.
    #[inline]
    pub(crate) fn release_links(&mut self) {
        let done = self.done;
        while self.links.pop_front_if(|(s, _)| *s <= done).is_some() {}
    }

    pub(crate) fn caps(&self) -> &QpCaps {
        &self.caps
    }
}

/// How a send is posted.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct PostFlags {
    pub(crate) signaled: bool,
    pub(crate) solicited: bool,
}
