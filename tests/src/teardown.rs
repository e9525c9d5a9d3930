//! The end of a world: everything goes home. Suites call [`World::finish`] last.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{hooks::Hooks, world::World};

impl<F: Hooks> World<F> {
    /// Flushes, and runs until [`World::buffers_come_home`].
    #[track_caller]
    pub fn all_home(&mut self) {
        self.settle();
        self.buffers_come_home();
    }

    /// Runs until nothing but posted receives is in use: send buffers are free, received messages delivered.
    #[track_caller]
    pub fn buffers_come_home(&mut self) {
        self.run_until("buffers come home", |w| {
            w.nodes.iter().filter(|n| n.iface.is_some()).all(|n| {
                n.counter("tx.buffers") == n.counter("tx.buffers_free")
                    && n.counter("rx.buffers") == n.counter("rx.buffers_free") + n.counter("rx.buffers_posted")
                    && n.counter("rx.waiting") == 0
            })
        });
    }

    /// Closes everything and checks that nothing is left: address handles created and destroyed are equal in number, no
    /// device saw anything forbidden, nothing is alive on any, and nothing keeps a domain: handlers, endpoints and pools of a
    /// closed interface must not keep one another. The test's own endpoints must be gone.
    #[track_caller]
    pub fn finish(mut self) {
        for n in &mut self.nodes {
            n.iface = None;
        }
        for n in &self.nodes {
            n.md.ah_cache().close();
        }
        self.run_until_within("address handles are destroyed", Duration::from_secs(30), |w| {
            w.nodes.iter().all(|n| {
                let _next = n.md.ah_cache().poll(w.now());
                n.md.ah_cache().stats().live == 0
            })
        });
        for (i, n) in self.nodes.iter().enumerate() {
            let s = n.md.ah_cache().stats();
            if s.created != s.destroyed || s.held != 0 {
                self.fail(&format!("node {i}: {s:?}"));
            }
        }
        self.check_violations();
        let report = self.fabric.report();
        let World { nodes, fabric, .. } = self;
        for (i, n) in nodes.into_iter().enumerate() {
            let md = n.md.clone();
            drop(n);
            // A progress thread ends by itself: closing does not wait for the round that it is in, in which it holds what it
            // serves.
            let end = Instant::now() + Duration::from_secs(30);
            while Arc::strong_count(&md) > 1 {
                assert!(Instant::now() < end, "node {i}: something keeps its domain\n{report}");
                std::thread::yield_now();
            }
        }
        let leaks = fabric.leaks();
        assert!(leaks.is_empty(), "still alive: {leaks:?}\n{report}");
    }

    /// Fails if a device saw something that verbs forbids.
    #[track_caller]
    pub fn check_violations(&self) {
        for (i, n) in self.nodes.iter().enumerate() {
            let v = F::violations(&n.device);
            if !v.is_empty() {
                self.fail(&format!("node {i}: {v:?}"));
            }
        }
    }

    /// Sum of a counter over all open interfaces.
    pub fn total(&self, counter: &str) -> u64 {
        self.nodes.iter().filter(|n| n.iface.is_some()).map(|n| n.counter(counter)).sum()
    }
}
