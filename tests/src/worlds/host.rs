//! [`Life`]: a process, from its start to its end, with everything that it has opened. A host is an address at which one
//! follows another.

use std::{
    collections::{BTreeSet, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use ib::{
    ah::{AhCacheStats, Executor},
    config::{IfaceConfig, MdConfig},
    md::Md,
    sim::SimDevice,
};
use parking_lot::Mutex;
use uct::{
    AmId, Clock, FailureAction, Iface, IfaceParams, Time, Worker, WorkerParams,
    am::{AmDesc, HandlerKind},
    ep::EpFailure,
    time::ManualClock,
};
use ud::{Tuning, UdConfig};

use super::draw::{HostPlan, Plan};
use crate::world::{Motion, Received};

/// The clock of one process: that of the world, and what it has jumped ahead.
#[derive(Debug)]
pub struct HostClock {
    world: Arc<ManualClock>,
    ahead: AtomicU64,
}

impl HostClock {
    /// Jumps.
    pub fn jump(&self, nanos: u64) {
        self.ahead.fetch_add(nanos, Ordering::Relaxed);
    }

    /// When the world's clock shows what this one will show as `t`.
    pub fn world_time(&self, t: Time) -> Time {
        Time::from_nanos(t.as_nanos().saturating_sub(self.ahead.load(Ordering::Relaxed)))
    }
}

impl Clock for HostClock {
    fn now(&self) -> Time {
        self.world.now().add_nanos(self.ahead.load(Ordering::Relaxed))
    }
}

/// What a user wants done inside a callback.
pub type Task = Box<dyn FnOnce() + Send>;

/// What callbacks of one process reach.
#[derive(Default)]
pub struct Desk {
    /// Messages that have arrived.
    pub inbox: Vec<Received>,
    /// What the error handler was told.
    pub failures: Vec<EpFailure>,
    /// For the next callbacks, one each.
    pub tasks: VecDeque<Task>,
    /// How many of the next messages handlers keep.
    pub keep: usize,
    /// Those that they kept, and what was in them.
    pub kept: Vec<(AmDesc, Vec<u8>)>,
    /// Endpoints that were destroyed, by their lines' numbers: nothing of them may be told any more. What was destroyed inside
    /// a callback may be told of until the end of its batch.
    pub gone: BTreeSet<u64>,
    /// Handlers were called after the interface was closed, or told of what is gone.
    pub late_calls: usize,
    /// The interface is closed.
    pub closed: bool,
}

/// Does what the user wanted done in a callback. Call it with nothing locked.
pub fn run_task(desk: &Mutex<Desk>) {
    let task = desk.lock().tasks.pop_front();
    if let Some(task) = task {
        task();
    }
}

/// Looks in a row that may find jobs before time passes.
const BUSY_MAX: u32 = 100;

/// A process.
pub struct Life {
    /// Which host it is on.
    pub host: usize,
    /// Its device.
    pub device: Arc<SimDevice>,
    /// Its domain; taken away at the end.
    pub md: Option<Arc<Md<SimDevice>>>,
    /// Its worker; taken away at the end.
    pub worker: Option<Worker>,
    /// Its interface; taken away at the end.
    pub iface: Option<Iface>,
    /// Its clock.
    pub clock: Arc<HostClock>,
    /// What its callbacks reach.
    pub desk: Arc<Mutex<Desk>>,
    /// Device and interface address.
    pub address: (Vec<u8>, Vec<u8>),
    /// Who moves it.
    pub motion: Motion,
    /// How often the progress thread comes by.
    pub async_tick: Duration,
    /// When the progress thread comes by next, by the world's clock.
    pub next_async: Time,
    /// The cache's jobs wait until then, by the world's clock.
    pub jobs_at: Time,
    /// When the cache's jobs were looked at last, and how many looks at that time have found some.
    jobs_seen: Time,
    busy: u32,
    /// When it began.
    pub began: Time,
    /// When it ended.
    pub ended: Option<Time>,
    /// Its device is dead.
    pub lost: bool,
    /// Address handles were refused at some time.
    pub ah_trouble: bool,
    /// Memory was refused at some time.
    pub memory_trouble: bool,
    /// Its local address was taken away at some time.
    pub gid_trouble: bool,
    /// The most records it has had.
    pub eps_peak: u64,
    /// The most messages that its handlers kept.
    pub kept_peak: usize,
    /// What its last look at the cache has said.
    pub stats: AhCacheStats,
}

/// Where endpoint ids of the `n`-th process of a host start: near the largest, and so far from those before that a late
/// packet finds nobody. (Real ones start at random.)
fn first_ep_id(n: usize) -> u32 {
    0x00ff_fffa - (n as u32 % 4000) * 4096
}

impl Life {
    /// Opens everything on `device`, as the `n`-th process of its host.
    ///
    /// # Errors
    /// Those of opening.
    pub fn open(
        plan: &Plan,
        (host, n): (usize, usize),
        device: Arc<SimDevice>,
        world: &Arc<ManualClock>,
        seed: u64,
    ) -> uct::Result<Life> {
        let p = &plan.hosts[host];
        let clock = Arc::new(HostClock { world: world.clone(), ahead: AtomicU64::new(0) });
        let (md_config, iface_config, ud_config, tuning) = settings(plan, p, n, seed);
        let dynamic: Arc<dyn Clock> = clock.clone();
        let md = Md::new(device.clone(), md_config, dynamic.clone(), Executor::Manual);
        let mut params = WorkerParams::manual(dynamic);
        params.async_tick = p.async_tick;
        let worker = Worker::new(params)?;
        let desk: Arc<Mutex<Desk>> = Arc::default();
        let told = desk.clone();
        let params = IfaceParams::default().on_error(Arc::new(move |f: &EpFailure| {
            {
                let mut d = told.lock();
                d.late_calls += usize::from(d.closed || d.gone.contains(&f.user_data));
                d.failures.push(f.clone());
            }
            run_task(&told);
            FailureAction::Endpoint
        }));
        let iface = ud::open(&md, &worker, 1, &params, iface_config, ud_config, &tuning)?;
        let kind = if p.async_handlers { HandlerKind::Async } else { HandlerKind::Sync };
        for id in 0..AmId::COUNT as u8 {
            let desk = desk.clone();
            let handler = move |m: uct::am::AmMessage<'_>| {
                {
                    let mut d = desk.lock();
                    d.late_calls += usize::from(d.closed);
                    let data = m.data().to_vec();
                    d.inbox.push(Received { id, ep: m.ep_id(), data: data.clone() });
                    if d.keep > 0 {
                        d.keep -= 1;
                        d.kept.push((m.into_owned(), data));
                    }
                }
                run_task(&desk);
            };
            iface.set_am_handler(AmId::truncate(id), Some(Arc::new(handler)), kind)?;
        }
        iface.progress_enable(true);
        let address = (iface.device_address(), iface.iface_address());
        let now = world.now();
        Ok(Life {
            host,
            device,
            md: Some(md),
            worker: Some(worker),
            iface: Some(iface),
            clock,
            desk,
            address,
            motion: Motion::User,
            async_tick: p.async_tick,
            next_async: now,
            jobs_at: now,
            jobs_seen: now,
            busy: 0,
            began: now,
            ended: None,
            lost: false,
            ah_trouble: false,
            memory_trouble: false,
            gid_trouble: false,
            eps_peak: 0,
            kept_peak: 0,
            stats: AhCacheStats::default(),
        })
    }

    /// True until it ends.
    pub fn is_alive(&self) -> bool {
        self.ended.is_none()
    }

    /// True while it can be used: its interface is open and its device works.
    pub fn is_well(&self) -> bool {
        self.iface.is_some() && !self.lost
    }

    /// Moves it once. Answers what happened, and when it wants to be moved again, by the world's clock.
    pub fn turn(&mut self, now: Time) -> (usize, Option<Time>) {
        let (Some(worker), Some(md)) = (&self.worker, &self.md) else { return (0, None) };
        let mut next: Option<Time> = None;
        let mut soonest = |t: Option<Time>| next = [next, t].into_iter().flatten().min();
        let mut events = 0;
        match self.motion {
            Motion::Stopped => return (0, None),
            Motion::User => {
                events += worker.progress();
                soonest(worker.next_timeout().map(|t| self.clock.world_time(t)));
            }
            Motion::ThreadOnly => {
                if now >= self.next_async
                    && let Some(i) = &self.iface
                {
                    // What the thread finds for others to do is no reason to come again at once.
                    i.progress_async();
                    self.next_async = now + self.async_tick;
                }
                soonest(Some(self.next_async));
            }
        }
        if now >= self.jobs_at {
            let jobs = md.ah_cache().run_jobs();
            self.busy = if self.jobs_seen == now { self.busy + u32::from(jobs > 0) } else { 0 };
            self.jobs_seen = now;
            // One that fails (there is no memory) may be ordered again in each round. Time passes for it, too.
            match self.busy < BUSY_MAX {
                true => events += jobs,
                false => soonest(Some(now + Duration::from_micros(100))),
            }
            soonest(md.ah_cache().poll(self.clock.now()).map(|t| self.clock.world_time(t)));
        } else {
            soonest(Some(self.jobs_at));
        }
        (events, next)
    }

    /// The value of a counter; 0 after the end.
    ///
    /// # Panics
    /// If there is none of this name.
    pub fn counter(&self, name: &str) -> u64 {
        let Some(iface) = &self.iface else { return 0 };
        match iface.counters().iter().find(|c| c.name == name) {
            Some(c) => c.value,
            None => panic!("no counter {name}"),
        }
    }
}

fn settings(plan: &Plan, p: &HostPlan, n: usize, seed: u64) -> (MdConfig, IfaceConfig, UdConfig, Tuning) {
    let md = MdConfig { ah_cache_ttl: p.ttl, ah_cache_max: p.idle_max, ..MdConfig::default() };
    let mut iface = IfaceConfig { tx_queue_len: p.tx_queue, rx_queue_len: p.rx_queue, ..IfaceConfig::default() };
    if let Some(spare) = p.rx_spare {
        iface.rx_max_bufs = p.rx_queue + spare;
    }
    let ud = UdConfig {
        linger_timeout: p.linger,
        timeout: plan.timeout,
        timer_tick: p.tick,
        timer_backoff: p.backoff,
        async_timer_tick: p.async_tick,
        max_window: p.window,
        rx_queue_len_init: 4,
        ..UdConfig::default()
    };
    let mut tuning = Tuning::default();
    tuning.seed = Some(seed);
    tuning.incarnation = Some(seed);
    tuning.first_ep_id = Some(first_ep_id(n));
    tuning.initial_psn = Some(plan.psn);
    tuning.first_conn_sn = Some(plan.conn_sn);
    tuning.passive_max = Some(p.passive_max);
    tuning.held_max = Some(p.held_max);
    if p.plain {
        tuning.features = Some(ud::proto::Features::empty());
    }
    (md, iface, ud, tuning)
}
