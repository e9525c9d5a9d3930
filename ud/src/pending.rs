//! The pending queues: requests that wait for resources, one queue per endpoint, served in turn.
//!
//! An endpoint is *in line* when its oldest request may be able to run. A round serves each endpoint in line once; one whose
//! window is shut leaves the line until the engine says `Writable`. While an endpoint has requests, its direct sends are
//! refused, except from inside its own request: nothing is overtaken.

use std::collections::VecDeque;

use hashbrown::HashMap;
use uct::ep::PendingFn;

use crate::proto::EpId;

/// The queues of one interface.
#[derive(Default)]
pub(crate) struct PendingQueues {
    queues: HashMap<EpId, Queue>,
    line: VecDeque<EpId>,
}

#[derive(Default)]
struct Queue {
    requests: VecDeque<PendingFn>,
    in_line: bool,
    /// Its oldest request is being called, and is not in `requests`.
    running: bool,
}

impl PendingQueues {
    /// True if direct sends of `ep` would overtake a request.
    pub(crate) fn blocks(&self, ep: EpId) -> bool {
        // The map is empty in a program that does not use pending requests: then this is one comparison.
        !self.queues.is_empty() && self.queues.get(&ep).is_some_and(|q| !q.running && !q.requests.is_empty())
    }

    /// True if no endpoint has requests.
    #[inline]
    pub(crate) fn is_unused(&self) -> bool {
        self.queues.is_empty()
    }

    /// True if `ep` has requests, the one being called included.
    pub(crate) fn has(&self, ep: EpId) -> bool {
        self.queues.get(&ep).is_some_and(|q| q.running || !q.requests.is_empty())
    }

    /// The endpoints that have requests which are not being called. In no order.
    pub(crate) fn eps(&self) -> impl Iterator<Item = EpId> {
        self.queues.iter().filter(|(_, q)| !q.requests.is_empty()).map(|(ep, _)| *ep)
    }

    /// Appends a request and puts the endpoint in line.
    pub(crate) fn push(&mut self, ep: EpId, request: PendingFn) {
        self.queues.entry(ep).or_default().requests.push_back(request);
        self.enter_line(ep);
    }

    /// The endpoint may be able to send again.
    pub(crate) fn enter_line(&mut self, ep: EpId) {
        if let Some(q) = self.queues.get_mut(&ep)
            && !q.in_line
            && !q.running
            && !q.requests.is_empty()
        {
            q.in_line = true;
            self.line.push_back(ep);
        }
    }

    /// How many endpoints are in line: the length of a round.
    pub(crate) fn line_len(&self) -> usize {
        self.line.len()
    }

    /// The next endpoint in line, which leaves it.
    pub(crate) fn next(&mut self) -> Option<EpId> {
        let ep = self.line.pop_front()?;
        if let Some(q) = self.queues.get_mut(&ep) {
            q.in_line = false;
        }
        Some(ep)
    }

    /// Takes the oldest request out to be called.
    pub(crate) fn start(&mut self, ep: EpId) -> Option<PendingFn> {
        let q = self.queues.get_mut(&ep)?;
        let request = q.requests.pop_front()?;
        q.running = true;
        Some(request)
    }

    /// The request was called. One that is not done goes back to the front; it comes back to the caller if the queue was
    /// taken away meanwhile. The endpoint gets in line again if it has requests.
    pub(crate) fn finish(&mut self, ep: EpId, unfinished: Option<PendingFn>) -> Option<PendingFn> {
        let Some(q) = self.queues.get_mut(&ep) else { return unfinished };
        q.running = false;
        if let Some(r) = unfinished {
            q.requests.push_front(r);
        }
        if q.requests.is_empty() {
            self.queues.remove(&ep);
        } else {
            self.enter_line(ep);
        }
        None
    }

    /// Takes all requests of `ep` but the one being called. `gone`: the endpoint does not come back.
    pub(crate) fn purge(&mut self, ep: EpId, gone: bool) -> VecDeque<PendingFn> {
        let Some(q) = self.queues.get_mut(&ep) else { return VecDeque::new() };
        let requests = std::mem::take(&mut q.requests);
        if q.in_line {
            q.in_line = false;
            self.line.retain(|e| *e != ep);
        }
        if gone || !q.running {
            self.queues.remove(&ep);
        }
        requests
    }

    /// Takes everything, in the same order in each run: dropping requests is the user's code.
    pub(crate) fn purge_all(&mut self) -> VecDeque<PendingFn> {
        self.line.clear();
        let mut queues: Vec<_> = self.queues.drain().collect();
        queues.sort_unstable_by_key(|(ep, _)| ep.wire_id());
        queues.into_iter().flat_map(|(_, q)| q.requests).collect()
    }
}

#[cfg(all(test, not(uct_loom)))]
mod tests;
