//! [`World`]: some nodes on a fabric, each a process as far as the library can tell, and one loop that moves them all.
//!
//! Every suite starts near the wraps of the 16-bit PSN and the 24-bit endpoint id, so that it crosses them. The seed is
//! printed when a test fails, with the command that repeats it.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use ib::{
    ah::Executor,
    config::{IfaceConfig, MdConfig},
    md::Md,
};
use parking_lot::Mutex;
use uct::{
    AmId, Clock, Ep, EpParams, FailureAction, Iface, IfaceParams, SendError, Time, Worker, WorkerParams, ep::EpFailure,
    md::MemoryDomain,
};
use ud::{Tuning, UdConfig};

use crate::fabric::Fabric;

/// How a node is made.
#[derive(Clone, Debug)]
pub struct NodeOptions {
    /// Settings of the domain.
    pub md: MdConfig,
    /// Settings of the interface.
    pub iface: IfaceConfig,
    /// Settings of UD.
    pub ud: UdConfig,
    /// Parameters of the interface. The world adds its own error handler.
    pub params: IfaceParams,
    /// Test settings.
    pub tuning: Tuning,
    /// Install a handler for every id that records what arrives.
    pub record: bool,
    /// With a real progress thread: for fabrics in real time only.
    pub progress_thread: bool,
}

/// Where every endpoint starts in tests: close to the wrap.
pub const FIRST_PSN: u16 = 65_500;
/// The first endpoint id in tests: close to the largest.
pub const FIRST_EP_ID: u32 = 0x00ff_fffa;

impl Default for NodeOptions {
    fn default() -> Self {
        let mut tuning = Tuning::default();
        tuning.initial_psn = Some(FIRST_PSN);
        tuning.first_ep_id = Some(FIRST_EP_ID);
        NodeOptions {
            md: MdConfig::default(),
            iface: IfaceConfig::default(),
            ud: UdConfig::default(),
            params: IfaceParams::default(),
            tuning,
            record: true,
            progress_thread: false,
        }
    }
}

/// A received message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Received {
    /// Its id.
    pub id: u8,
    /// The endpoint it came by, see `AmMessage::ep_id`.
    pub ep: u64,
    /// Its payload.
    pub data: Vec<u8>,
}

/// Who moves a node.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Motion {
    /// Its user calls `progress`.
    User,
    /// Its user computes; its progress thread stands in, every `async_tick` of the clock.
    ThreadOnly,
    /// Nobody: it is stopped, or has no progress thread.
    Stopped,
}

/// One process.
pub struct Node<F: Fabric> {
    /// The device.
    pub device: Arc<F::Device>,
    /// The domain.
    pub md: Arc<Md<F::Device>>,
    /// The worker.
    pub worker: Worker,
    /// The interface; `None` once closed.
    pub iface: Option<Iface>,
    /// What has arrived.
    pub inbox: Arc<Mutex<Vec<Received>>>,
    /// What the error handler was told.
    pub failures: Arc<Mutex<Vec<EpFailure>>>,
    /// Who moves it.
    pub motion: Motion,
    next_async: Time,
}

impl<F: Fabric> Node<F> {
    /// The interface.
    ///
    /// # Panics
    /// After it was closed.
    pub fn iface(&self) -> &Iface {
        self.iface.as_ref().expect("the interface is closed")
    }

    /// Messages that have arrived and were not taken.
    pub fn take(&self) -> Vec<Received> {
        std::mem::take(&mut *self.inbox.lock())
    }

    /// The value of a counter of the interface or the domain.
    ///
    /// # Panics
    /// If there is none of this name.
    pub fn counter(&self, name: &str) -> u64 {
        let mut all = self.md.counters();
        if let Some(i) = &self.iface {
            all.extend(i.counters());
        }
        match all.iter().find(|c| c.name == name) {
            Some(c) => c.value,
            None => panic!("no counter {name}; there are {:?}", all.iter().map(|c| c.name).collect::<Vec<_>>()),
        }
    }

    /// An endpoint to the interface of `to`.
    pub fn connect(&self, to: &Node<F>) -> Ep {
        let params = EpParams::to_iface(&to.iface().device_address(), &to.iface().iface_address());
        self.iface().ep(&params).expect("an endpoint")
    }
}

/// Nodes on a fabric.
pub struct World<F: Fabric> {
    /// The fabric.
    pub fabric: F,
    /// The nodes.
    pub nodes: Vec<Node<F>>,
    /// The seed of everything random.
    pub seed: u64,
    name: String,
}

impl<F: Fabric> World<F> {
    /// An empty world for the test `name`. Its seed is `SIM_SEED`, if that is set, else made of the name.
    pub fn new(name: &str) -> Self {
        let seed = match std::env::var("SIM_SEED").ok().and_then(|s| s.parse().ok()) {
            Some(seed) => seed,
            // FNV-1a: the same in every run.
            None => {
                name.bytes().fold(0xcbf2_9ce4_8422_2325, |h: u64, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
            }
        };
        Self::with_seed(name, seed)
    }

    /// An empty world with this seed.
    pub fn with_seed(name: &str, seed: u64) -> Self {
        World { fabric: F::new(seed), nodes: Vec::new(), seed, name: name.to_string() }
    }

    /// The clock's time.
    pub fn now(&self) -> Time {
        self.fabric.clock().now()
    }

    /// Adds `n` nodes with the usual options.
    pub fn nodes(mut self, n: usize) -> Self {
        for _ in 0..n {
            self.add(&NodeOptions::default());
        }
        self
    }

    /// Adds a node; returns its number.
    pub fn add(&mut self, options: &NodeOptions) -> usize {
        let device = self.fabric.device();
        self.add_on(device, options)
    }

    /// Adds a node on a device that is there.
    ///
    /// # Panics
    /// If its interface does not open.
    #[track_caller]
    pub fn add_on(&mut self, device: Arc<F::Device>, options: &NodeOptions) -> usize {
        self.try_add_on(device, options).expect("an interface")
    }

    /// Adds a node on a device that is there, if its interface opens.
    ///
    /// # Errors
    /// Those of opening.
    pub fn try_add_on(&mut self, device: Arc<F::Device>, options: &NodeOptions) -> uct::Result<usize> {
        let clock = self.fabric.clock();
        let md = Md::new(device.clone(), options.md.clone(), clock.clone(), self.fabric.executor());
        let mut worker = WorkerParams::manual(clock).progress_thread(options.progress_thread);
        worker.async_tick = options.ud.async_timer_tick;
        let worker = Worker::new(worker).expect("a worker");
        let failures: Arc<Mutex<Vec<EpFailure>>> = Arc::default();
        let inbox: Arc<Mutex<Vec<Received>>> = Arc::default();
        let mut params = options.params.clone();
        if params.error_handler.is_none() {
            let f = failures.clone();
            params.error_handler = Some(Arc::new(move |e: &EpFailure| {
                f.lock().push(e.clone());
                FailureAction::Endpoint
            }));
        }
        let iface = ud::open(&md, &worker, 1, &params, options.iface.clone(), options.ud.clone(), &options.tuning)?;
        if options.record {
            for id in 0..AmId::COUNT as u8 {
                let inbox = inbox.clone();
                iface
                    .on_am(AmId::truncate(id), move |m| {
                        inbox.lock().push(Received { id, ep: m.ep_id(), data: m.data().to_vec() });
                    })
                    .expect("a handler");
            }
        }
        iface.progress_enable(true);
        let node = Node {
            device,
            md,
            worker,
            iface: Some(iface),
            inbox,
            failures,
            motion: Motion::User,
            next_async: Time::ZERO,
        };
        self.nodes.push(node);
        Ok(self.nodes.len() - 1)
    }

    /// Moves every node once; lets time pass if none had anything to do. Returns the number of events; `None` if nothing
    /// can happen any more.
    pub fn step(&mut self) -> Option<usize> {
        let (events, next) = self.turn();
        if events == 0 && !self.fabric.idle(next) && !self.is_moving() {
            return None;
        }
        Some(events)
    }

    /// Whether some rounds more find something. An idle interface looks around only now and then: eight rounds, and nobody
    /// has left anything.
    fn is_moving(&mut self) -> bool {
        (0..8).any(|_| self.turn().0 > 0)
    }

    /// Moves every node once. Returns the number of events, and when somebody has something to do if nothing happens
    /// before.
    pub fn turn(&mut self) -> (usize, Option<Time>) {
        let mut events = 0;
        let now = self.now();
        // Where the caches have threads of their own, device calls that sleep are theirs: a node's round must not wait for them.
        let is_manual = matches!(self.fabric.executor(), Executor::Manual);
        let mut next: Option<Time> = None;
        let mut soonest = |t: Option<Time>| next = [next, t].into_iter().flatten().min();
        for n in &mut self.nodes {
            match n.motion {
                Motion::User => events += n.worker.progress(),
                Motion::ThreadOnly => {
                    if now >= n.next_async
                        && let Some(i) = &n.iface
                    {
                        i.progress_async();
                        n.next_async = now + Duration::from_millis(100);
                    }
                    soonest(Some(n.next_async));
                }
                Motion::Stopped => {}
            }
            if n.motion != Motion::Stopped && is_manual {
                events += n.md.ah_cache().run_jobs();
                soonest(n.md.ah_cache().poll(now));
            }
            if n.motion == Motion::User {
                soonest(n.worker.next_timeout());
            }
        }
        (events, next)
    }

    /// Runs until `done` says so. Fails the test, with what is known, if that takes too long or cannot happen any more.
    #[track_caller]
    pub fn run_until(&mut self, what: &str, done: impl FnMut(&World<F>) -> bool) {
        let limit = self.fabric.patience();
        self.run_until_within(what, limit, done);
    }

    /// As [`World::run_until`], with a limit on the fabric's clock.
    #[track_caller]
    pub fn run_until_within(&mut self, what: &str, limit: Duration, mut done: impl FnMut(&World<F>) -> bool) {
        let end = self.now() + limit;
        let wall = Instant::now();
        while !done(self) {
            let (events, next) = self.turn();
            // Looked at before time passes, so that a test can say when something has happened.
            if done(self) {
                return;
            }
            if events == 0 && !self.fabric.idle(next) && !self.is_moving() && !done(self) {
                self.fail(&format!("nothing can happen any more, and still not: {what}"));
            }
            // The wall-clock bound only catches a simulation that runs in circles.
            if self.now() > end || wall.elapsed() > Duration::from_secs(120) {
                self.fail(&format!("took too long: {what}"));
            }
        }
    }

    /// Runs for a time on the fabric's clock. It passes also if nothing can happen any more.
    pub fn run_for(&mut self, time: Duration) {
        let end = self.now() + time;
        while self.now() < end {
            let (events, next) = self.turn();
            if events == 0 {
                // Time passes even if nothing can happen any more.
                self.fabric.idle(Some(next.map_or(end, |t| t.min(end))));
            }
        }
    }

    /// Runs until every node's interface is flushed.
    #[track_caller]
    pub fn settle(&mut self) {
        self.run_until("everything is flushed", |w| {
            w.nodes.iter().all(|n| match &n.iface {
                Some(i) => matches!(i.flush(uct::FlushMode::Local, None), Ok(uct::Posted::Done)),
                None => true,
            })
        });
    }

    /// Repeats a send until it is accepted, moving the world in between.
    #[track_caller]
    pub fn send<T>(&mut self, mut f: impl FnMut() -> Result<T, SendError>) -> T {
        let mut out = None;
        let mut bad = None;
        self.run_until("a send is accepted", |_| match f() {
            Ok(t) => {
                out = Some(t);
                true
            }
            Err(SendError::NoResource) => false,
            Err(SendError::Failed(e)) => {
                bad = Some(e);
                true
            }
        });
        if let Some(e) = bad {
            self.fail(&format!("a send failed: {e}"));
        }
        out.expect("a result")
    }

    /// Fails the test with everything that helps to find out why.
    #[track_caller]
    pub fn fail(&self, why: &str) -> ! {
        let mut text = format!("{} on {}: {why}\n", self.name, F::NAME);
        for (i, n) in self.nodes.iter().enumerate() {
            text += &format!(
                "node {i}: {} messages in the inbox, {} failures\n",
                n.inbox.lock().len(),
                n.failures.lock().len()
            );
            if let Some(iface) = &n.iface {
                let counters: Vec<String> = iface
                    .counters()
                    .into_iter()
                    .filter(|c| c.value != 0)
                    .map(|c| format!("{} {}", c.name, c.value))
                    .collect();
                text += &format!("  {}\n", counters.join(", "));
            }
        }
        text += &self.fabric.report();
        text += &format!("\nrepeat with: SIM_SEED={} cargo test -p uct-tests {}::{}\n", self.seed, F::NAME, self.name);
        panic!("{text}");
    }
}
