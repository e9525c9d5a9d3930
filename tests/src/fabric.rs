//! What a test runs on: devices, their clock, and how time passes when nobody has anything to do.

use std::{
    collections::hash_map::DefaultHasher,
    hash::{Hash, Hasher},
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
    time::{Duration, Instant},
};

use ib::{
    ah::Executor,
    device::{Device, SoftIdentity},
    mock::MockDevice,
    sim::{SimConfig, SimDevice, SimNet},
    soft::{SoftConfig, SoftDevice},
};
use uct::{
    Clock, Time,
    time::{ManualClock, MonotonicClock},
};

/// A kind of network to run a suite on.
pub trait Fabric: Sized {
    /// Its devices.
    type Device: Device;

    /// Its name, for reports.
    const NAME: &'static str;

    /// A fabric whose faults and choices follow from `seed`.
    fn new(seed: u64) -> Self;

    /// One more device.
    fn device(&mut self) -> Arc<Self::Device>;

    /// The clock of everything on it.
    fn clock(&self) -> Arc<dyn Clock>;

    /// Who runs the jobs of address-handle caches.
    fn executor(&self) -> Executor;

    /// Nobody has anything to do before `next` (`None`: ever), the network aside. Lets time pass. False if nothing can
    /// happen any more.
    fn idle(&mut self, next: Option<Time>) -> bool;

    /// How long, on its clock, a condition may take at most, unless a test says otherwise.
    fn patience(&self) -> Duration;

    /// What helps to understand a failure.
    fn report(&self) -> String;

    /// For tests that need devices with addresses of their own: does not return where all share one.
    fn need_own_addresses() {}
}

/// The simulated network, in virtual time.
pub struct Sim {
    /// The network, for its faults.
    pub net: Arc<SimNet>,
    clock: Arc<ManualClock>,
    next_ip: u32,
    /// What the next device is made from, instead of the usual.
    pub next_config: Option<SimConfig>,
}

impl Sim {
    /// What a device is usually made from.
    pub fn config(&self) -> SimConfig {
        let ip = Ipv4Addr::from(0x0a00_0000 + self.next_ip);
        let mut c = SimConfig::new(format!("sim{}", self.next_ip - 1), IpAddr::V4(ip));
        c.soft = Some(SoftIdentity { udp_port: 4791, host_id: 1, rx_budget: 8 << 20 });
        c.sge_max = 6;
        c
    }
}

impl Fabric for Sim {
    type Device = SimDevice;
    const NAME: &'static str = "sim";

    fn new(seed: u64) -> Self {
        let clock = Arc::new(ManualClock::new(Time::from_nanos(1_000_000)));
        let net = SimNet::new(seed, clock.clone());
        // How many lines of packets a failure shows.
        if let Some(n) = std::env::var("SIM_TRACE").ok().and_then(|n| n.parse().ok()) {
            net.set_trace_max(n);
        }
        net.set_formatter(Some(Arc::new(|b: &[u8]| ud::proto::describe(b).to_string())));
        Sim { net, clock, next_ip: 1, next_config: None }
    }

    fn device(&mut self) -> Arc<SimDevice> {
        let config = self.next_config.take().unwrap_or_else(|| self.config());
        self.next_ip += 1;
        self.net.add_device(config)
    }

    fn clock(&self) -> Arc<dyn Clock> {
        self.clock.clone()
    }

    fn executor(&self) -> Executor {
        Executor::Manual
    }

    fn idle(&mut self, next: Option<Time>) -> bool {
        let t = match (next, self.net.next_event()) {
            (Some(a), Some(b)) => a.min(b),
            (Some(a), None) | (None, Some(a)) => a,
            (None, None) => return false,
        };
        // Always forward: a timer that is due now and does nothing must not stop the world.
        let t = t.max(self.net.now() + Duration::from_nanos(1));
        self.net.run_until(t);
        true
    }

    fn patience(&self) -> Duration {
        Duration::from_secs(600)
    }

    fn report(&self) -> String {
        self.net.report()
    }
}

/// The simulated network, behind devices whose verbs calls can be told to fail.
pub struct Mocked(pub Sim);

impl Fabric for Mocked {
    type Device = MockDevice<SimDevice>;
    const NAME: &'static str = "mocked";

    fn new(seed: u64) -> Self {
        Mocked(Sim::new(seed))
    }

    fn device(&mut self) -> Arc<MockDevice<SimDevice>> {
        MockDevice::new(self.0.device())
    }

    fn clock(&self) -> Arc<dyn Clock> {
        self.0.clock()
    }

    fn executor(&self) -> Executor {
        self.0.executor()
    }

    fn idle(&mut self, next: Option<Time>) -> bool {
        self.0.idle(next)
    }

    fn patience(&self) -> Duration {
        self.0.patience()
    }

    fn report(&self) -> String {
        self.0.report()
    }
}

/// The soft device, over loopback and in real time.
pub struct Soft {
    clock: Arc<MonotonicClock>,
    seed: u64,
    count: u64,
    idle_since: Option<Instant>,
}

impl Fabric for Soft {
    type Device = SoftDevice;
    const NAME: &'static str = "soft";

    fn new(seed: u64) -> Self {
        Soft { clock: Arc::new(MonotonicClock::new()), seed, count: 0, idle_since: None }
    }

    fn device(&mut self) -> Arc<SoftDevice> {
        self.count += 1;
        // Seeds of their own for each process: tests run beside one another.
        let mut h = DefaultHasher::new();
        (self.seed, self.count, std::process::id()).hash(&mut h);
        let config =
            SoftConfig { seed: Some(h.finish()), name: format!("soft{}", self.count - 1), ..SoftConfig::default() };
        match SoftDevice::open(&config) {
            Ok(d) => d,
            Err(e) => panic!("no soft device: {e}"),
        }
    }

    fn clock(&self) -> Arc<dyn Clock> {
        self.clock.clone()
    }

    fn executor(&self) -> Executor {
        Executor::Threads { helpers: 2 }
    }

    fn idle(&mut self, _next: Option<Time>) -> bool {
        // The peer is usually in this very thread, so idling is short; the yield lets other tests run.
        std::thread::yield_now();
        self.idle_since.get_or_insert_with(Instant::now);
        true
    }

    fn patience(&self) -> Duration {
        Duration::from_secs(60)
    }

    fn report(&self) -> String {
        String::new()
    }
}
