//! The fabric of real RDMA devices, with the feature `rdma-core`.

use std::{
    io::Write,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::Arc,
    time::Duration,
};

use ib::{
    ah::Executor,
    rdma_core::{RdmaDevice, devices},
    sw::Filter,
};
use uct::{Clock, Time, time::MonotonicClock};

use crate::{fabric::Fabric, hooks::Hooks, world::World};

/// The first RDMA device that works, in real time. Every node opens it anew: to one another they are as processes are.
pub struct Rdma {
    clock: Arc<MonotonicClock>,
    name: String,
}

/// The name of the first device whose port 1 is active.
pub fn first() -> Option<String> {
    let usable = devices().into_iter().filter(|d| d.unusable.is_none());
    let works = |name: &String| {
        let Ok(dev) = RdmaDevice::open(name) else { return false };
        let port = ib::device::Device::query_port(&*dev, 1);
        port.is_ok_and(|p| p.active)
    };
    usable.map(|d| d.name).find(works)
}

/// What stops a test that wants what a device of the kernel does not have; says what.
struct Unfit(&'static str);

fn unfit(why: &'static str) -> ! {
    resume_unwind(Box::new(Unfit(why)))
}

/// Runs a suite's test on it. Prints `skipped` where there is none, and for tests that it is not fit for. In the machine of
/// `ci/soft-roce` there has to be one.
///
/// # Panics
/// If the test fails, or if there must be a device and is none.
pub fn run(name: &str, test: impl FnOnce(World<Rdma>)) {
    if first().is_none() {
        assert!(std::env::var_os("SOFT_ROCE").is_none(), "no RDMA device with an active port 1");
        println!("{name}: skipped: no RDMA device with an active port 1");
        return;
    }
    if let Err(stopped) = catch_unwind(AssertUnwindSafe(|| test(World::new(name)))) {
        match stopped.downcast::<Unfit>() {
            // Not `println`, which the test's harness keeps to itself.
            Ok(unfit) => drop(writeln!(std::io::stdout(), "{name}: skipped: needs {}", unfit.0)),
            Err(failed) => resume_unwind(failed),
        }
    }
}

impl Hooks for Rdma {
    fn set_tx_filter(_device: &RdmaDevice, filter: Option<Filter>) {
        if filter.is_some() {
            unfit("hooks on packets");
        }
    }

    fn set_rx_filter(device: &RdmaDevice, filter: Option<Filter>) {
        Self::set_tx_filter(device, filter);
    }

    fn violations(_device: &RdmaDevice) -> Vec<String> {
        Vec::new()
    }

    fn leaks(&self) -> Vec<String> {
        Vec::new()
    }

    fn device_leaks(_device: &RdmaDevice) -> Vec<String> {
        Vec::new()
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

    fn patience(&self) -> Duration {
        Duration::from_secs(60)
    }

    fn report(&self) -> String {
        format!("on {}", self.name)
    }

    fn need_own_addresses() {
        unfit("devices with addresses of their own");
    }
}
