//! The fabric of real RDMA devices, with the feature `rdma-core`.

use std::{sync::Arc, time::Duration};

use ib::{
    ah::Executor,
    rdma_core::{RdmaDevice, devices},
};
use uct::{Clock, Time, time::MonotonicClock};

use crate::{fabric::Fabric, world::World};

/// The first RDMA device that works, in real time. Every node opens it anew: to one another they are as processes are.
pub struct Rdma {
    clock: Arc<MonotonicClock>,
    name: String,
}

fn first() -> Option<String> {
    let usable = devices().into_iter().filter(|d| d.unusable.is_none());
    let works = |name: &String| {
        let Ok(dev) = RdmaDevice::open(name) else { return false };
        let port = ib::device::Device::query_port(&*dev, 1);
        port.is_ok_and(|p| p.active)
    };
    usable.map(|d| d.name).find(works)
}

/// Runs a suite's test on it, or prints `skipped` where there is none.
pub fn run(name: &str, test: impl FnOnce(World<Rdma>)) {
    match first() {
        Some(_) => test(World::new(name)),
        None => println!("{name}: skipped: no RDMA device with an active port 1"),
    }
}

impl Fabric for Rdma {
    type Device = RdmaDevice;
    const NAME: &'static str = "rdma";

    fn new(_seed: u64) -> Self {
        let Some(name) = first() else { panic!("no RDMA device with an active port 1") };
        Rdma { clock: Arc::new(MonotonicClock::new()), name }
    }

    fn device(&mut self) -> Arc<RdmaDevice> {
        match RdmaDevice::open(&self.name) {
            Ok(d) => d,
            Err(e) => panic!("{e}"),
        }
    }

    fn clock(&self) -> Arc<dyn Clock> {
        self.clock.clone()
    }

    fn executor(&self) -> Executor {
        Executor::Threads { helpers: 2 }
    }

    fn idle(&mut self, _next: Option<Time>) -> bool {
        std::thread::yield_now();
        true
    }

    fn skip_to(&mut self, _end: Time) {
        std::thread::yield_now();
    }

    fn patience(&self) -> Duration {
        Duration::from_secs(60)
    }

    fn report(&self) -> String {
        format!("on {}", self.name)
    }
}
