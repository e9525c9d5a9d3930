//! [`Line`]: an endpoint of a user and what was sent over it; [`Ops`]: the ledger of operations, each of which ends once.

use std::sync::{Arc, Weak};

use ib::{md::Md, sim::SimDevice, sw::Rng};
use parking_lot::Mutex;
use uct::{
    AmId, Completion, Endpoint, Ep, ErrorKind, FlushMode, MemRegion, Posted, SendError, SendResult, Time,
    ep::{PendingFn, PendingRefused, PendingStatus},
    iface::AmLimits,
    md::MemoryDomain,
};

use super::host::{Desk, run_task};
use crate::flow::{Kind, bytes, draw_message};

/// What is known of a line, also by callbacks.
#[derive(Debug, Default)]
pub struct Book {
    /// The number that its messages carry.
    pub flow: u32,
    /// Messages that were accepted.
    pub sent: u32,
    /// So many of them are at the peer, by what completions have said.
    pub promised: u32,
    /// Its user has destroyed it.
    pub destroyed: bool,
    /// Its user has closed it, canceled what was on it, or declared the peer dead.
    pub given_up: bool,
    /// It has failed: the kind, and the words.
    pub failed: Option<(ErrorKind, String)>,
    /// The error handler was told.
    pub reported: bool,
    /// Requests that are queued.
    pub pending: usize,
    /// What must never be.
    pub wrong: Vec<String>,
}

/// Of an operation.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum What {
    /// A zero-copy message.
    Zcopy,
    /// A flush.
    Flush,
    /// A probe of the peer.
    Check,
    /// The end of the endpoint.
    Close,
}

#[derive(Debug)]
struct Op {
    line: usize,
    what: What,
    /// So many messages are at the peer if it ends well.
    promises: u32,
    accepted: bool,
    result: Option<Result<(), ErrorKind>>,
    region: Option<MemRegion>,
}

/// Operations with a completion, in the order in which they were begun.
#[derive(Debug, Default)]
pub struct Ops {
    list: Vec<Op>,
    wrong: Vec<String>,
    open: usize,
}

impl Ops {
    /// How many were accepted and have not ended.
    pub fn open(&self) -> usize {
        self.open
    }

    /// Which have not ended, of a line, in words.
    pub fn open_on(&self, line: usize) -> usize {
        self.list.iter().filter(|o| o.line == line && o.accepted && o.result.is_none()).count()
    }

    /// All that was accepted and has ended: the line, what it was, and how it went.
    pub fn ended(&self) -> impl Iterator<Item = (usize, What, Result<(), ErrorKind>)> {
        self.list.iter().filter(|o| o.accepted).filter_map(|o| Some((o.line, o.what, o.result?)))
    }

    /// How many there were.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// True if there were none.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// What must never be, since the last call.
    pub fn take_wrong(&mut self) -> Vec<String> {
        std::mem::take(&mut self.wrong)
    }

    /// Memory that users got back and that somebody still has a view of.
    pub fn regions_in_use(&mut self) -> usize {
        self.list
            .iter_mut()
            .filter_map(|o| o.region.as_mut())
            .filter_map(|r| r.bytes_mut().is_none().then_some(()))
            .count()
    }

    /// Gives back the memory of operations of these lines.
    pub fn drop_regions(&mut self, of: impl Fn(usize) -> bool) {
        self.list.iter_mut().filter(|o| of(o.line)).for_each(|o| o.region = None);
    }

    fn end(&mut self, n: usize, result: Result<(), ErrorKind>) -> Option<u32> {
        let op = &mut self.list[n];
        if let Some(first) = op.result {
            self.wrong
                .push(format!("operation {n} of line {}, {:?}, ended with {first:?}, and again", op.line, op.what));
            return None;
        }
        op.result = Some(result);
        if !op.accepted {
            // Refused, so that it ends when the user lets go of it.
            return None;
        }
        self.open -= 1;
        if let Some(bytes) = op.region.as_mut().and_then(MemRegion::bytes_mut) {
            // It is the user's again: whoever still reads it gets what shows.
            bytes.fill(0xdb);
        }
        result.is_ok().then_some(op.promises)
    }
}

/// An endpoint, while its user has it. Never locked while a callback may run.
pub type Slot = Arc<Mutex<Option<Arc<Ep>>>>;

/// What is needed to operate on a line, from anywhere.
#[derive(Clone)]
pub struct Line {
    /// Its number.
    pub number: usize,
    /// The process that it belongs to.
    pub life: usize,
    /// Where it leads.
    pub to_host: usize,
    /// The process whose address was used.
    pub to_life: usize,
    /// When it was made.
    pub born: Time,
    /// The host it leads to had another process, or none, when it was made: it may never get anywhere.
    pub doubtful: bool,
    /// The other end, of a pair that users connect.
    pub partner: Option<usize>,
    /// The endpoint.
    pub slot: Slot,
    /// What was sent.
    pub book: Arc<Mutex<Book>>,
    /// All operations of the world.
    pub ops: Arc<Mutex<Ops>>,
    /// Of its process.
    pub desk: Arc<Mutex<Desk>>,
    /// Of its process.
    pub md: Weak<Md<SimDevice>>,
    /// Of its interface.
    pub limits: AmLimits,
}

impl Line {
    /// The endpoint, if the user still has it.
    pub fn ep(&self) -> Option<Arc<Ep>> {
        self.slot.lock().clone()
    }

    /// True if the user still has it.
    pub fn is_open(&self) -> bool {
        self.slot.lock().is_some()
    }

    /// Begins an operation, and calls `f` with its completion.
    fn operate(
        &self,
        what: What,
        promises: u32,
        region: Option<MemRegion>,
        f: impl FnOnce(Completion) -> Option<SendResult<Posted>>,
    ) {
        let n = {
            let mut ops = self.ops.lock();
            ops.list.push(Op { line: self.number, what, promises, accepted: false, result: None, region });
            ops.list.len() - 1
        };
        let (ops, book, desk) = (self.ops.clone(), self.book.clone(), self.desk.clone());
        let comp = Completion::new(move |result| {
            let promised = ops.lock().end(n, result);
            if let Some(upto) = promised {
                let mut b = book.lock();
                b.promised = b.promised.max(upto);
            }
            run_task(&desk);
        });
        // The handle that is kept here lets nothing end before it is known whether the operation was accepted.
        let token = comp.token();
        let result = f(comp);
        let accepted = matches!(result, None | Some(Ok(Posted::InProgress)));
        {
            let mut ops = self.ops.lock();
            ops.list[n].accepted = accepted;
            ops.open += usize::from(accepted);
            if !accepted {
                ops.list[n].region = None;
            }
        }
        match result {
            Some(Ok(Posted::Done)) => {
                let mut b = self.book.lock();
                b.promised = b.promised.max(promises);
            }
            Some(Err(e)) => self.note_refusal(&e),
            _ => {}
        }
        token.settle(Ok(()));
    }

    /// Takes note of why something was refused.
    pub fn note_refusal(&self, e: &SendError) {
        let SendError::Failed(e) = e else { return };
        // No memory for this message: it was not accepted, and nothing has failed.
        if e.kind() == ErrorKind::NoMemory {
            return;
        }
        self.book.lock().failed.get_or_insert_with(|| (e.kind(), e.to_string()));
    }

    /// Sends the next message through `ep`, which is this line's endpoint.
    ///
    /// # Errors
    /// Those of the send.
    pub fn send_on(&self, ep: &dyn Endpoint, kind: Kind, len: usize) -> SendResult<()> {
        let (flow, seq) = {
            let b = self.book.lock();
            (b.flow, b.sent)
        };
        let id = AmId::truncate(flow as u8);
        let max = |n: Option<std::num::NonZeroUsize>| n.map_or(8, |n| n.get());
        let result = match kind {
            Kind::Short if self.limits.max_short.is_none() => return self.send_on(ep, Kind::Bcopy, len),
            Kind::Short => {
                let data = bytes(flow, seq, len.min(max(self.limits.max_short)));
                ep.am_short(id, u64::from(flow) << 32 | u64::from(seq), &data[8..])
            }
            Kind::Bcopy => {
                let data = bytes(flow, seq, len.min(max(self.limits.max_bcopy)));
                let mut pack = |to: &mut [u8]| {
                    to[..data.len()].copy_from_slice(&data);
                    data.len()
                };
                ep.am_bcopy(id, &mut pack).map(drop)
            }
            Kind::Zcopy => return self.send_zcopy(ep, (flow, seq), len.min(max(self.limits.max_zcopy))),
        };
        self.accept(seq, &result);
        result
    }

    fn accept(&self, seq: u32, result: &SendResult<()>) {
        match result {
            Ok(()) => self.book.lock().sent = seq + 1,
            Err(e) => self.note_refusal(e),
        }
    }

    fn send_zcopy(&self, ep: &dyn Endpoint, (flow, seq): (u32, u32), len: usize) -> SendResult<()> {
        let data = bytes(flow, seq, len);
        let (head, body) = data.split_at(8);
        let Some(md) = self.md.upgrade() else { return Ok(()) };
        let region = md.mem_alloc(body.len().max(1));
        drop(md);
        let Ok(mut region) = region else { return Err(SendError::NoResource) };
        if let Some(bytes) = region.bytes_mut() {
            bytes[..body.len()].copy_from_slice(body);
        }
        let half = body.len() / 2;
        let iov = [region.slice(0..half)?, region.slice(half..body.len())?];
        let mut answer = Ok(());
        self.operate(What::Zcopy, seq + 1, Some(region), |comp| {
            let posted = ep.am_zcopy(AmId::truncate(flow as u8), head, &iov, Some(&comp));
            drop(iov);
            match posted {
                Ok(p) => {
                    self.book.lock().sent = seq + 1;
                    Some(Ok(p))
                }
                Err(e) => {
                    self.note_refusal(&e);
                    answer = Err(e);
                    Some(Err(SendError::NoResource))
                }
            }
        });
        answer
    }

    /// Sends up to `n` messages; queues a request for the next one if that does not go and `queue` says so.
    pub fn burst(&self, n: u64, queue: bool, rng: &mut Rng) {
        let Some(ep) = self.ep() else { return };
        for _ in 0..n {
            let (kind, len) = draw_message(rng);
            match self.send_on(&**ep, kind, len) {
                Ok(()) => {}
                Err(SendError::NoResource) if queue => return self.queue(&ep, kind, len, 1 + rng.below(3)),
                Err(_) => return,
            }
        }
    }

    /// Queues a request that sends `n` messages, in as many calls as it takes.
    fn queue(&self, ep: &Ep, kind: Kind, len: usize, mut n: u64) {
        let line = self.clone();
        let guard = PendingGuard::new(&self.book);
        // Its own line would keep it: a queue holds the request, and the request must not hold the queue's endpoint.
        let weak = Arc::downgrade(&self.slot);
        let line = Line { slot: Arc::default(), ..line };
        let request: PendingFn = Box::new(move |ep: &dyn Endpoint| {
            let _counted = &guard;
            if weak.upgrade().is_none_or(|s| s.lock().is_none()) && !line.book.lock().given_up {
                line.book.lock().wrong.push("a queued request was called after its endpoint was destroyed".to_string());
            }
            match line.send_on(ep, kind, len) {
                Ok(()) => n -= 1,
                Err(SendError::NoResource) => return PendingStatus::NoResource,
                Err(SendError::Failed(_)) => return PendingStatus::Done,
            }
            if n == 0 { PendingStatus::Done } else { PendingStatus::Partial }
        });
        match ep.pending_add(request) {
            Ok(()) | Err(PendingRefused::Busy(_)) => {}
            Err(PendingRefused::Failed(_, e)) => self.note_refusal(&SendError::Failed(e)),
        }
    }

    /// Flushes.
    pub fn flush(&self) {
        let Some(ep) = self.ep() else { return };
        let upto = self.book.lock().sent;
        self.operate(What::Flush, upto, None, |c| Some(ep.flush(FlushMode::Local, Some(&c))));
    }

    /// Probes the peer.
    pub fn check(&self) {
        let Some(ep) = self.ep() else { return };
        self.operate(What::Check, 0, None, |c| Some(ep.check(Some(&c))));
    }

    /// Cancels what is outstanding.
    pub fn cancel(&self) {
        let Some(ep) = self.ep() else { return };
        self.book.lock().given_up = true;
        if let Err(e) = ep.flush(FlushMode::Cancel, None) {
            self.note_refusal(&e);
        }
    }

    /// Declares the peer dead.
    pub fn invalidate(&self) {
        let Some(ep) = self.ep() else { return };
        self.book.lock().given_up = true;
        // It may be closed already.
        let _ = ep.invalidate();
    }

    /// Takes back what is queued.
    pub fn purge(&self) {
        if let Some(ep) = self.ep() {
            drop(ep.pending_purge());
        }
    }

    /// Destroys the endpoint. If this is not in a callback, everything of it has ended when this returns.
    pub fn destroy(&self, in_callback: bool) {
        let Some(ep) = self.slot.lock().take() else { return };
        self.book.lock().destroyed = true;
        drop(ep);
        if in_callback {
            return;
        }
        self.desk.lock().gone.insert(self.number as u64);
        let open = self.ops.lock().open_on(self.number);
        let mut b = self.book.lock();
        if open > 0 {
            let text = format!("{open} operations of line {} were open when destroy returned", self.number);
            b.wrong.push(text);
        }
        if b.pending > 0 {
            let text = format!("{} requests of line {} were queued when destroy returned", b.pending, self.number);
            b.wrong.push(text);
        }
    }

    /// Closes the endpoint: flushes, then destroys.
    pub fn close(&self) {
        let Some(ep) = self.slot.lock().take() else { return };
        let upto = {
            let mut b = self.book.lock();
            b.given_up = true;
            b.sent
        };
        // Somebody is inside a call of it otherwise.
        let Ok(ep) = Arc::try_unwrap(ep) else { return };
        self.operate(What::Close, upto, None, |c| {
            ep.close(Some(c));
            None
        });
    }
}

/// Counts a queued request until it is gone.
struct PendingGuard(Arc<Mutex<Book>>);

impl PendingGuard {
    fn new(book: &Arc<Mutex<Book>>) -> PendingGuard {
        book.lock().pending += 1;
        PendingGuard(book.clone())
    }
}

impl Drop for PendingGuard {
    fn drop(&mut self) {
        self.0.lock().pending -= 1;
    }
}
