//! Errands: calls of the device that somebody on a progress path wants made, and that may sleep. The domain's thread makes
//! them, or the owner of a cache without threads.

use super::{AhWaker, Invalidated, shared::Shared};
use crate::{
    device::Device,
    sync::{Arc, Ordering},
};

/// Something to do where sleeping is allowed.
pub(super) enum Errand {
    /// Read the GID table of a port, act on it, and call these.
    Gids(u8, Vec<AhWaker>),
    /// Anything.
    Run(Box<dyn FnOnce() + Send>),
}

impl<D: Device> Shared<D> {
    /// See [`AhCache::refresh_gids`](super::AhCache::refresh_gids).
    pub(super) fn refresh_gids(this: &Arc<Self>, port: u8, then: Option<AhWaker>) -> Invalidated {
        if this.queued {
            Self::send_errand(this, Errand::Gids(port, then.into_iter().collect()));
            return Invalidated::default();
        }
        let outcome = this.handle_gids(port, this.device.query_gids(port));
        if let Some(then) = then {
            then();
        }
        outcome
    }

    /// Queues an errand and sees to it that it is run.
    pub(super) fn send_errand(this: &Arc<Self>, errand: Errand) {
        let st = this.state.lock();
        if st.closed {
            drop(st);
            // Not under the lock: it may hold anything.
            drop(errand);
            return;
        }
        this.grave.lock().push(errand);
        drop(st);
        Self::call_for_errands(this);
    }

    #[cfg(not(uct_loom))]
    fn call_for_errands(this: &Arc<Self>) {
        if !Self::call_domain(this) {
            // Rather here and now than never.
            this.run_errands();
        }
    }

    /// Models have no threads of the cache.
    #[cfg(uct_loom)]
    fn call_for_errands(_: &Arc<Self>) {}

    /// Runs what is queued and returns how many that were.
    pub(super) fn run_errands(&self) -> usize {
        let mut count = 0;
        loop {
            // In order also among threads: what was read first must not count last.
            let _turn = self.running_errand.lock();
            let next = self.grave.lock().errands.pop_front();
            let Some(errand) = next else { return count };
            count += 1;
            match errand {
                Errand::Gids(port, then) => {
                    self.handle_gids(port, self.device.query_gids(port));
                    self.tables_read.fetch_add(1, Ordering::Release);
                    then.iter().for_each(|wake| wake());
                }
                Errand::Run(run) => run(),
            }
        }
    }
}

impl<D: Device> super::shared::Grave<D> {
    fn push(&mut self, errand: Errand) {
        if let Errand::Gids(port, then) = errand {
            // One that has not begun serves all who ask before it does.
            for queued in &mut self.errands {
                if let Errand::Gids(p, wakers) = queued
                    && *p == port
                {
                    wakers.extend(then);
                    return;
                }
            }
            self.errands.push_back(Errand::Gids(port, then));
        } else {
            self.errands.push_back(errand);
        }
    }
}
