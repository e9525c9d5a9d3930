//! Creations that are under way ([`Flights`]), who waits for them ([`PendingAh`]), and those that failed lately
//! ([`Failures`]).

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    fmt,
    time::Duration,
};

use uct::{Error, Time};

use super::{AhRef, AhWaker, Grade, Origin, TryGet};
use crate::{
    device::{AhAttr, Device},
    sync::{Arc, Mutex},
};

/// How a creation ended.
pub(super) enum Outcome<D: Device> {
    Ready(AhRef<D>),
    Failed(Error, Duration),
}

impl<D: Device> From<Outcome<D>> for TryGet<D> {
    fn from(outcome: Outcome<D>) -> Self {
        match outcome {
            Outcome::Ready(ah) => TryGet::Ready(ah),
            Outcome::Failed(error, retry_after) => TryGet::Failed { error, retry_after },
        }
    }
}

/// One waiter's place.
pub(super) struct Ticket<D: Device> {
    slot: Mutex<Option<Outcome<D>>>,
    waker: Option<AhWaker>,
}

impl<D: Device> Ticket<D> {
    pub(super) fn new(waker: Option<&AhWaker>) -> Arc<Self> {
        Arc::new(Ticket { slot: Mutex::new(None), waker: waker.cloned() })
    }

    /// Leaves the outcome and wakes the waiter. Called with no lock held.
    pub(super) fn fill(&self, outcome: Outcome<D>) {
        let old = self.slot.lock().replace(outcome);
        drop(old);
        if let Some(wake) = &self.waker {
            wake();
        }
    }
}

/// A place in the queue for an address handle that is being created.
///
/// After the waker has been called, [`PendingAh::take`] has the outcome. The outcome waits here with a reference of its
/// own, so that nothing can end the handle in between; dropping the token gives that up too. At TTL 0 a second `try_get`
/// would make a second handle, so keep the token.
pub struct PendingAh<D: Device> {
    pub(super) ticket: Arc<Ticket<D>>,
    pub(super) generation: u64,
}

impl<D: Device> PendingAh<D> {
    /// The outcome, or the token again if there is none yet. Never blocks.
    pub fn take(self) -> TryGet<D> {
        let outcome = self.ticket.slot.lock().take();
        match outcome {
            Some(outcome) => outcome.into(),
            None => TryGet::Pending(self),
        }
    }

    /// True if [`PendingAh::take`] has an outcome.
    pub fn is_done(&self) -> bool {
        self.ticket.slot.lock().is_some()
    }
}

impl<D: Device> fmt::Debug for PendingAh<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PendingAh(generation {})", self.generation)
    }
}

pub(super) struct Flight<D: Device> {
    pub(super) attr: AhAttr,
    pub(super) hash: u64,
    pub(super) origin: Origin,
    pub(super) running: bool,
    /// For the one who asked and can have no one else's (TTL 0).
    pub(super) private: bool,
    pub(super) waiters: Vec<Arc<Ticket<D>>>,
    /// Usage tags of the waiters.
    pub(super) users: u32,
    /// An event that came after the creation was started and concerns it.
    pub(super) doom: Option<Grade>,
    /// How often it was started again because of that.
    pub(super) restarts: u8,
}

/// Creations queued or running. Under the state lock.
pub(super) struct Flights<D: Device> {
    /// By generation, in the order they were asked for.
    all: BTreeMap<u64, Flight<D>>,
    /// Those that others may join.
    by_key: HashMap<AhAttr, u64>,
    local: VecDeque<u64>,
    stranger: VecDeque<u64>,
    stranger_count: usize,
    stranger_running: usize,
}

impl<D: Device> Flights<D> {
    pub(super) fn new() -> Self {
        Flights {
            all: BTreeMap::new(),
            by_key: HashMap::new(),
            local: VecDeque::new(),
            stranger: VecDeque::new(),
            stranger_count: 0,
            stranger_running: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn get_mut(&mut self, generation: u64) -> Option<&mut Flight<D>> {
        self.all.get_mut(&generation)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Flight<D>> {
        self.all.values_mut()
    }

    /// How many wait for somebody to run them; some may be counted twice.
    #[cfg(not(uct_loom))]
    pub(super) fn queued_len(&self) -> usize {
        self.local.len() + self.stranger.len()
    }

    /// How many are in flight that only strangers want.
    pub(super) fn stranger_count(&self) -> usize {
        self.stranger_count
    }

    /// The flight for `attr` that others may join.
    pub(super) fn find(&self, attr: &AhAttr) -> Option<u64> {
        self.by_key.get(attr).copied()
    }

    pub(super) fn insert(&mut self, generation: u64, flight: Flight<D>) {
        if !flight.private {
            self.by_key.insert(flight.attr, generation);
        }
        if flight.origin == Origin::Stranger {
            self.stranger_count += 1;
            self.stranger_running += usize::from(flight.running);
        }
        if !flight.running {
            match flight.origin {
                Origin::Local => self.local.push_back(generation),
                Origin::Stranger => self.stranger.push_back(generation),
            }
        }
        self.all.insert(generation, flight);
    }

    /// Adds a waiter. A local one lifts a stranger's flight into the local queue; true if a helper may run it now that
    /// could not before.
    pub(super) fn join(&mut self, generation: u64, waiter: Arc<Ticket<D>>, origin: Origin, users: u32) -> bool {
        let Some(f) = self.all.get_mut(&generation) else { return false };
        f.waiters.push(waiter);
        f.users |= users;
        if origin == Origin::Local && f.origin == Origin::Stranger {
            f.origin = Origin::Local;
            self.stranger_count -= 1;
            if f.running {
                self.stranger_running -= 1;
            } else {
                // Its old place is skipped when it comes up: the flight is running or over by then, or local.
                self.local.push_back(generation);
                return true;
            }
        }
        false
    }

    #[cfg(not(uct_loom))]
    /// True if [`Flights::start_next`] has something for a helper.
    pub(super) fn has_next(&self, stranger_running_max: usize) -> bool {
        !self.local.is_empty() || (!self.stranger.is_empty() && self.stranger_running < stranger_running_max)
    }

    /// The next queued flight, now marked as running: local ones first, and no more than `stranger_running_max` of the
    /// others at a time.
    pub(super) fn start_next(&mut self, stranger_running_max: usize) -> Option<u64> {
        while let Some(generation) = self.local.pop_front() {
            if let Some(f) = self.all.get_mut(&generation)
                && !f.running
            {
                f.running = true;
                return Some(generation);
            }
        }
        while self.stranger_running < stranger_running_max {
            let generation = self.stranger.pop_front()?;
            if let Some(f) = self.all.get_mut(&generation)
                && !f.running
                && f.origin == Origin::Stranger
            {
                f.running = true;
                self.stranger_running += 1;
                return Some(generation);
            }
        }
        None
    }

    pub(super) fn remove(&mut self, generation: u64) -> Option<Flight<D>> {
        let f = self.all.remove(&generation)?;
        if !f.private {
            self.by_key.remove(&f.attr);
        }
        if f.origin == Origin::Stranger {
            self.stranger_count -= 1;
            self.stranger_running -= usize::from(f.running);
        }
        Some(f)
    }

    /// Ends all of them; in the order they were asked for.
    pub(super) fn take_all(&mut self) -> Vec<Flight<D>> {
        let old = std::mem::replace(self, Flights::new());
        old.all.into_values().collect()
    }
}

struct Failure {
    error: Error,
    until: Time,
    serial: u64,
}

/// Failed creations, each remembered for a bounded time and in bounded number. Under the state lock.
pub(super) struct Failures {
    by_key: HashMap<AhAttr, Failure>,
    /// In order of age: key and serial, for local gets and for strangers'.
    order: [VecDeque<(AhAttr, u64)>; 2],
    serial: u64,
}

impl Failures {
    pub(super) fn new() -> Self {
        Failures { by_key: HashMap::new(), order: [VecDeque::new(), VecDeque::new()], serial: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &AhAttr> {
        self.by_key.keys()
    }

    /// Remembers that `attr` failed. The oldest of the same origin goes if there are more than `max`.
    pub(super) fn remember(&mut self, attr: AhAttr, origin: Origin, error: Error, until: Time, max: usize) {
        self.serial += 1;
        self.by_key.insert(attr, Failure { error, until, serial: self.serial });
        let order = &mut self.order[origin as usize];
        order.push_back((attr, self.serial));
        while order.len() > max {
            let Some((attr, serial)) = order.pop_front() else { break };
            if self.by_key.get(&attr).is_some_and(|f| f.serial == serial) {
                self.by_key.remove(&attr);
            }
        }
    }

    /// The failure of `attr`, if it is still remembered at `now`, and for how much longer.
    pub(super) fn get(&self, attr: &AhAttr, now: Time) -> Option<(Error, Duration)> {
        let f = self.by_key.get(attr)?;
        (now < f.until).then(|| (f.error.clone(), f.until.since(now)))
    }

    /// Forgets what is over at `now`.
    pub(super) fn expire(&mut self, now: Time) {
        for order in &mut self.order {
            // All are remembered for equally long, so the oldest are in front.
            while let Some((attr, serial)) = order.front() {
                let current = self.by_key.get(attr).filter(|f| f.serial == *serial);
                match current {
                    Some(f) if f.until > now => break,
                    Some(_) => drop(self.by_key.remove(attr)),
                    None => {}
                }
                order.pop_front();
            }
        }
    }

    /// Forgets those that `concerns` names and returns how many those were.
    pub(super) fn forget(&mut self, concerns: impl Fn(&AhAttr) -> bool) -> usize {
        let before = self.by_key.len();
        self.by_key.retain(|attr, _| !concerns(attr));
        if self.by_key.len() < before {
            let by_key = &self.by_key;
            for order in &mut self.order {
                order.retain(|(attr, serial)| by_key.get(attr).is_some_and(|f| f.serial == *serial));
            }
        }
        before - self.by_key.len()
    }

    pub(super) fn clear(&mut self) {
        *self = Failures::new();
    }
}
