//! Handing things to the user: messages to handlers, results to completions, failures to the error handler.
//!
//! All of it happens with no lock held. The right to do it is a [`Delivery`], of which an interface has exactly one:
//! whoever takes it out of the state delivers, and puts it back. While it is out, `progress` calls (from inside a
//! handler, say) move the network only, and what they receive waits its turn. That keeps the order of messages.

use std::{collections::VecDeque, sync::Arc};

use ib::device::Device;
use uct::{
    AmId, AmMessage, MemSlice,
    am::{HandlerEntry, HandlerKind, HandlerView},
    completion::CompletionToken,
    ep::{EpFailure, FailureAction, PendingFn},
    error::ErrorKind,
    mem::Buf,
    sync::Ordering,
};

use crate::{core::Core, live::Who, proto::EpId};

/// A table of handlers.
pub(crate) type Handlers = [HandlerEntry; AmId::COUNT];

/// A message that waits for its handler.
pub(crate) struct Ready {
    /// There until its handler keeps it.
    pub(crate) buf: Option<Buf>,
    /// Payload bytes.
    pub(crate) len: u32,
    pub(crate) am_id: u8,
    pub(crate) ep: EpId,
}

/// Something of the user's that must wait until no lock is held.
pub(crate) enum Later {
    /// Settle an operation of this endpoint.
    Complete(EpId, CompletionToken, Result<(), ErrorKind>),
    /// Settle something that belongs to no endpoint.
    Settle(CompletionToken, Result<(), ErrorKind>),
    /// Report a failed endpoint.
    Failure(EpId, EpFailure),
    /// Let go of regions.
    Regions(#[allow(dead_code)] Box<[MemSlice]>),
    /// Let go of requests.
    Pending(EpId, #[allow(dead_code)] VecDeque<PendingFn>),
}

impl Later {
    /// True for what must not be left when the endpoint was destroyed.
    pub(crate) fn belongs_to(&self, id: EpId) -> bool {
        matches!(self, Later::Complete(ep, ..) | Later::Failure(ep, _) | Later::Pending(ep, _) if *ep == id)
    }

    /// Does it. `failed_peer` learns which endpoint's peer the error handler wants to fail as a whole.
    pub(crate) fn run<D: Device>(self, core: &Core<D>, failed_peer: &mut Vec<EpId>) {
        match self {
            Later::Complete(_, token, result) => token.settle(result),
            Later::Settle(token, result) => token.settle(result),
            // A callback before this one may have destroyed it: then nobody wants to know.
            Later::Failure(ep, _) if !core.has_ep(ep) => {}
            Later::Failure(ep, failure) => {
                let handler = core.error_handler.lock().clone();
                match handler {
                    Some(h) => {
                        if h(&failure) == FailureAction::WholePeer {
                            failed_peer.push(ep);
                        }
                    }
                    None => tracing::warn!("{}", failure.error),
                }
            }
            Later::Regions(_) | Later::Pending(..) => {}
        }
    }
}

/// Tells live threads apart, at the cost of an address: `ThreadId` is counted by reference.
#[cfg(not(uct_loom))]
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(crate) struct ThreadMark(usize);

#[cfg(not(uct_loom))]
impl ThreadMark {
    pub(crate) fn current() -> Self {
        thread_local!(static MARK: u8 = const { 0 });
        MARK.with(|m| ThreadMark(std::ptr::from_ref(m).addr()))
    }
}

/// The threads of a model are all on one of the system's.
#[cfg(uct_loom)]
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(crate) struct ThreadMark(loom::thread::ThreadId);

#[cfg(uct_loom)]
impl ThreadMark {
    pub(crate) fn current() -> Self {
        ThreadMark(loom::thread::current().id())
    }
}

/// The right to deliver, and its working memory.
pub(crate) struct Delivery {
    /// Empty unless it is out.
    pub(crate) batch: Vec<Ready>,
    /// How many of the batch were handed to their handlers.
    pub(crate) delivered: usize,
    pub(crate) later: VecDeque<Later>,
    handlers: HandlerView,
}

impl Delivery {
    pub(crate) fn new<D: Device>(core: &Core<D>) -> Box<Self> {
        Box::new(Delivery {
            batch: Vec::new(),
            delivered: 0,
            later: VecDeque::new(),
            handlers: HandlerView::new(&core.handlers),
        })
    }

    /// Takes the table that is in force. The one before comes back, to be dropped where user code may run.
    #[inline]
    pub(crate) fn refresh<D: Device>(&mut self, core: &Core<D>) -> Option<Arc<Handlers>> {
        self.handlers.refresh(&core.handlers)
    }
}

/// A [`Delivery`] that is out. Dropping it, also by a panic of a handler, puts it back.
pub(crate) struct Delivering<'a, D: Device> {
    core: &'a Core<D>,
    delivery: Option<Box<Delivery>>,
}

impl<'a, D: Device> Delivering<'a, D> {
    /// Called with the state's lock held, right before it is released.
    pub(crate) fn start(core: &'a Core<D>, delivery: Box<Delivery>, on: &mut Option<ThreadMark>) -> Self {
        *on = Some(ThreadMark::current());
        Delivering { core, delivery: Some(delivery) }
    }

    /// Puts the delivery back, then does what callbacks have left for the end of their batch.
    #[inline]
    pub(crate) fn finish(mut self) {
        let (core, delivery) = (self.core, self.delivery.take());
        // With nothing in it there is nothing to drop.
        std::mem::forget(self);
        if let Some(d) = delivery
            && core.end_delivery(d)
        {
            core.run_later(core.take_left(Who::User));
        }
    }

    /// Calls handlers for the batch. Returns how many messages there were. What the progress thread may not deliver stays
    /// in the batch.
    #[inline(always)]
    pub(crate) fn messages(&mut self, who: Who) -> usize {
        let Some(d) = self.delivery.as_deref_mut() else { return 0 };
        // A handler may close the interface: nothing is called after that.
        while d.delivered < d.batch.len() && !self.core.closed.load(Ordering::Relaxed) {
            drop(d.refresh(self.core));
            let Some(Ready { buf, len, am_id, ep }) = d.batch.get_mut(d.delivered) else { break };
            if who == Who::Thread && is_sync(d.handlers.table(), *am_id) {
                // It was async when the batch was taken.
                break;
            }
            // Counted before the handler runs: if that panics, the message is not delivered again.
            d.delivered += 1;
            // If the handler replaces the table it is called from, this reference keeps the old one alive.
            match &d.handlers.table()[*am_id as usize & (AmId::COUNT - 1)] {
                Some((handler, _)) => {
                    handler(AmMessage::new(buf, &self.core.am_home, *len as usize, u64::from(ep.wire_id())));
                }
                None => self.core.no_handler(*am_id, *len),
            }
        }
        d.delivered
    }

    /// Settles, reports and drops what waited. Returns how many things there were.
    #[inline]
    pub(crate) fn later(&mut self) -> usize {
        if self.delivery.as_ref().is_none_or(|d| d.later.is_empty()) { 0 } else { self.all_later() }
    }

    fn all_later(&mut self) -> usize {
        let Some(d) = &mut self.delivery else { return 0 };
        let mut failed_peer = Vec::new();
        let mut n = 0;
        // Callbacks put new work into the state, not in here, so this ends.
        while let Some(l) = d.later.pop_front() {
            n += 1;
            l.run(self.core, &mut failed_peer);
        }
        for ep in failed_peer {
            self.core.fail_peer_of(ep);
        }
        n
    }
}

impl<D: Device> Drop for Delivering<'_, D> {
    fn drop(&mut self) {
        if let Some(d) = self.delivery.take() {
            // The progress thread, or a callback has panicked: what is left waits for the next progress. Only what an
            // interface has left that was closed meanwhile is for here.
            if self.core.end_delivery(d) {
                self.core.run_later(self.core.take_left(Who::Thread));
            }
        }
    }
}

/// True if this message's handler must not run on the progress thread.
pub(crate) fn is_sync(table: &Handlers, am_id: u8) -> bool {
    matches!(&table[am_id as usize & (AmId::COUNT - 1)], Some((_, HandlerKind::Sync)))
}
