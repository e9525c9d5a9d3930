//! The progress of an interface: the one loop that moves everything, for the user's thread and for the progress thread.
//!
//! ```text
//! lock: poll receives → engine → ready queue · poll sends · timers · control packets · ring
//! unlock: handlers for what is ready · completions, failures
//! lock, unlock per request: pending requests, one for each endpoint in line
//! ```

use std::hint::cold_path;

use ib::device::Device;
use uct::ep::{Endpoint, PendingFn, PendingStatus};

use crate::{
    core::{Core, Live, State},
    deliver::{Delivering, Handlers, is_sync},
    live::Who,
    proto::EpId,
};

impl<D: Device> Core<D> {
    /// `progress` of the user's thread.
    pub(crate) fn progress_user(&self) -> usize {
        let mut guard = self.state.lock();
        let st = &mut *guard;
        let Some(live) = &mut st.live else { return 0 };
        // From inside a callback, or while the progress thread delivers: the network only.
        let Some(mut delivery) = st.delivery.take() else { return live.network(self, Who::User, None) };
        // What arrives goes straight to the batch, if nothing waits that it would overtake.
        let direct = if live.ready.is_empty() { Some(&mut delivery.batch) } else { None };
        let mut events = live.network(self, Who::User, direct);
        if delivery.batch.is_empty() && !live.has_user_work() {
            st.delivery = Some(delivery);
            return events;
        }
        let line = live.pending.line_len();
        if !live.ready.is_empty() {
            cold_path();
            let max = self.iface_config.rx_max_poll as usize;
            delivery.batch.extend(live.ready.drain(..max.min(live.ready.len())));
        }
        if !live.later.is_empty() {
            cold_path();
            delivery.later.extend(live.later.drain(..));
        }
        let mut delivering = Delivering::start(self, delivery, &mut st.delivering_on);
        drop(guard);
        let messages = delivering.messages(Who::User);
        // Messages were counted when they were received, unless the progress thread did that.
        events = events.max(messages);
        events += delivering.later();
        if line > 0 {
            events += self.serve_pending(line);
        }
        delivering.finish();
        events
    }

    /// `progress` of the progress thread. Gives way to the user's.
    pub(crate) fn progress_thread(&self) -> usize {
        if !self.config.async_progress {
            return 0;
        }
        // Taken before the lock and let go after it: if the user replaces a handler meanwhile, this is the last reference
        // to the old one, whose drop is his code.
        let handlers = self.handlers.snapshot();
        let Some(mut guard) = self.state.try_lock() else { return 0 };
        let st = &mut *guard;
        let Some(live) = &mut st.live else { return 0 };
        let events = live.network(self, Who::Thread, None);
        self.deliver_async(guard, &handlers);
        self.wake_user();
        events
    }

    /// Wakes the user's thread, if it sleeps, for what the progress thread has left it.
    fn wake_user(&self) {
        let st = self.state.lock();
        if st.live.as_ref().is_some_and(Live::has_user_work) {
            self.user_wake.wake();
        }
    }

    /// Calls async handlers for the messages at the front of the ready queue, and drops those that have no handler. The
    /// first message for a sync handler ends it: behind it nothing may overtake.
    fn deliver_async(&self, mut guard: uct::sync::MutexGuard<'_, State<D>>, handlers: &Handlers) {
        let st = &mut *guard;
        let Some(live) = &mut st.live else { return };
        let n = live.ready.iter().take_while(|r| !is_sync(handlers, r.am_id)).count();
        if n == 0 {
            return;
        }
        let Some(mut delivery) = st.delivery.take() else { return };
        delivery.batch.extend(live.ready.drain(..n));
        let mut delivering = Delivering::start(self, delivery, &mut st.delivering_on);
        drop(guard);
        delivering.messages(Who::Thread);
        // Completions that handlers have left stay where they are, for the user's thread.
        drop(delivering);
    }

    /// One round of the pending queues: each of the first `line` endpoints in line gets one call.
    fn serve_pending(&self, line: usize) -> usize {
        let mut served = 0;
        for _ in 0..line {
            let mut guard = self.state.lock();
            let Some(live) = &mut guard.live else { break };
            if !live.tx.has_credit() {
                // Nobody can send: the line keeps its order.
                break;
            }
            let Some(ep) = live.pending.next() else { break };
            if !live.engine.can_send(ep) {
                live.engine.want_writable(ep);
                continue;
            }
            let Some(shared) = live.eps.get(&ep).and_then(|r| r.shared.upgrade()) else { continue };
            let Some(mut request) = live.pending.start(ep) else { continue };
            drop(guard);
            // If the request panics it is over.
            let mut running = Running { core: self, ep, unfinished: None };
            let status = request(&*shared as &dyn Endpoint);
            served += usize::from(status != PendingStatus::NoResource);
            running.unfinished = (status != PendingStatus::Done).then_some(request);
        }
        served
    }
}

/// A pending request that is being called. Dropping it puts its queue in order.
struct Running<'a, D: Device> {
    core: &'a Core<D>,
    ep: EpId,
    unfinished: Option<PendingFn>,
}

impl<D: Device> Drop for Running<'_, D> {
    fn drop(&mut self) {
        let unfinished = self.unfinished.take();
        let mut guard = self.core.state.lock();
        let homeless = match &mut guard.live {
            Some(live) => live.pending.finish(self.ep, unfinished),
            None => unfinished,
        };
        drop(guard);
        // A request whose endpoint was destroyed by itself ends here, with no lock held.
        drop(homeless);
    }
}
