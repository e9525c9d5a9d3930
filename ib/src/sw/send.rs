//! The send side of a UD queue pair: limits, serials, completions, flush.

use std::collections::VecDeque;

use super::{
    counters::{Counters, DropReason},
    mr::{MrCache, MrTable},
    port::{GidRef, PortState},
};
use crate::device::{Access, QpState, SendWc, SendWr, Sge, VerbsError, VerbsResult, WcStatus};

/// What one send may be, and how many.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct SendLimits {
    /// Sends that can be outstanding.
    pub depth: u32,
    /// Elements per send.
    pub sge_max: u32,
    /// Inline bytes per send.
    pub inline_max: u32,
}

/// What a send queue looks at when it decides about a send.
#[derive(Copy, Clone, Debug)]
pub struct SendEnv<'a> {
    /// The state of the queue pair.
    pub state: QpState,
    /// Its port.
    pub port: &'a PortState,
    /// The registrations of its device.
    pub mrs: &'a MrTable,
    /// The counters of its device.
    pub counters: &'a Counters,
}

/// What becomes of a send that was accepted.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Admit {
    /// Transmit these many payload bytes, then call [`SendQueue::complete`] with `Success`.
    Transmit {
        /// The sum of the elements.
        len: usize,
    },
    /// It has been completed and nothing leaves: it was too long, or the queue pair is in ERROR.
    Done,
    /// It has been completed with an error: the queue pair must fall into ERROR, see [`QpCore::fail`](super::QpCore::fail).
    Fatal(WcStatus),
}

/// Serials, outstanding work requests and completions of the send side. Not synchronised: a device whose sends complete
/// within `post_send` keeps it in the queue pair, others behind a lock.
///
/// The queue has one slot per send until a completion with its serial or a later one has been *polled*; there are never
/// more completions than slots, so the completion queue cannot overflow.
#[derive(Debug)]
pub struct SendQueue {
    limits: SendLimits,
    posted: u64,
    polled: u64,
    done: VecDeque<SendWc>,
    cache: MrCache,
}

const CALL: &str = "post_send";

impl SendQueue {
    /// An empty queue.
    pub fn new(limits: SendLimits) -> Self {
        // Grows to its depth once; most queues never have more than a few completions waiting.
        let done = VecDeque::with_capacity(limits.depth.min(64) as usize);
        SendQueue { limits, posted: 0, polled: 0, done, cache: MrCache::new() }
    }

    /// Takes a slot for a send whose limits hold, and answers its length.
    ///
    /// # Errors
    /// `EINVAL`: too many elements, inline data above the limit, a length above `usize`, or a serial that is not the last
    /// plus one. `ENOMEM`: no slot. Nothing was posted.
    #[inline]
    pub fn post(&mut self, serial: u64, sges: &[Sge<'_>], inline: bool) -> VerbsResult<usize> {
        // In 64 bits: four elements of 4 GiB must not look like a short message.
        let len = sges.iter().fold(0u64, |n, s| n.saturating_add(s.bytes.len() as u64));
        let too_long = inline && len > u64::from(self.limits.inline_max);
        if sges.len() > self.limits.sge_max as usize || too_long || serial != self.posted + 1 {
            return Err(VerbsError::new(CALL, libc::EINVAL));
        }
        if self.posted - self.polled >= u64::from(self.limits.depth) {
            return Err(VerbsError::new(CALL, libc::ENOMEM));
        }
        let len = usize::try_from(len).map_err(|_| VerbsError::new(CALL, libc::EINVAL))?;
        self.posted = serial;
        Ok(len)
    }

    /// Decides about a send that has a slot: the second half of [`SendQueue::admit`], for devices that look at a send
    /// later than they accept it. `sges` gives (key, address, length) of each element, none for inline sends.
    #[inline]
    pub fn decide(
        &mut self,
        env: &SendEnv<'_>,
        serial: u64,
        signaled: bool,
        len: usize,
        sgid: Option<&GidRef>,
        sges: impl IntoIterator<Item = (u32, usize, usize)>,
    ) -> Admit {
        if env.state == QpState::Error {
            self.complete(serial, signaled, WcStatus::WrFlush);
            return Admit::Done;
        }
        if sgid.is_some_and(|g| !env.port.is_alive(g)) {
            env.counters.drop_one(DropReason::NoRoute);
            return self.fatal(serial, WcStatus::LocalQpOp);
        }
        for (lkey, addr, len) in sges {
            if len > 0 && !self.cache.covers(env.mrs, lkey, addr, len, Access::empty()) {
                return self.fatal(serial, WcStatus::LocalProtection);
            }
        }
        if len > env.port.mtu_bytes() {
            env.counters.drop_one(DropReason::Oversize);
            self.complete(serial, signaled, WcStatus::Success);
            return Admit::Done;
        }
        Admit::Transmit { len }
    }

    /// Checks a send, takes a slot for it and decides what becomes of it. `sgid` is the address handle's hold on the local
    /// GID.
    ///
    /// # Errors
    /// As [`SendQueue::post`].
    #[inline]
    pub fn admit<A>(&mut self, env: &SendEnv<'_>, wr: &SendWr<'_, A>, sgid: Option<&GidRef>) -> VerbsResult<Admit> {
        let len = self.post(wr.serial, wr.sges, wr.inline)?;
        let checked = if wr.inline { &[] } else { wr.sges };
        let sges = checked.iter().map(|s| (s.lkey, s.bytes.as_ptr() as usize, s.bytes.len()));
        Ok(self.decide(env, wr.serial, wr.signaled, len, sgid, sges))
    }

    fn fatal(&mut self, serial: u64, status: WcStatus) -> Admit {
        self.complete(serial, true, status);
        Admit::Fatal(status)
    }

    /// Completes a send. Call it in the order of the serials. A failure is told whether the send was signaled or not.
    #[inline]
    pub fn complete(&mut self, serial: u64, signaled: bool, status: WcStatus) {
        if signaled || status != WcStatus::Success {
            self.done.push_back(SendWc { serial, status });
        }
    }

    /// Appends at most `max` completions to `out` and answers how many; their slots are free.
    #[inline]
    pub fn poll(&mut self, out: &mut Vec<SendWc>, max: usize) -> usize {
        let n = max.min(self.done.len());
        if n > 0 {
            out.extend(self.done.drain(..n));
            self.polled = out[out.len() - 1].serial;
        }
        n
    }

    /// True if a completion waits.
    pub fn has_completions(&self) -> bool {
        !self.done.is_empty()
    }

    /// The serial of the last send that was posted, 0 before the first.
    pub fn last_serial(&self) -> u64 {
        self.posted
    }

    /// After [`UdQp::reset`](crate::device::UdQp::reset): all slots are free. Serials go on.
    ///
    /// # Errors
    /// `EBUSY` while completions wait.
    pub fn reset(&mut self) -> VerbsResult<()> {
        if self.has_completions() {
            return Err(VerbsError::new("modify_qp", libc::EBUSY));
        }
        self.polled = self.posted;
        Ok(())
    }
}
