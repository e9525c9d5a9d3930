//! [`Plan`]: what a seed decides before anything happens.

use std::time::Duration;

use ib::{sim::Faults, sw::Rng, types::Mtu};

/// One of `from`.
pub fn pick<T: Copy>(rng: &mut Rng, from: &[T]) -> T {
    from[rng.below(from.len() as u64) as usize]
}

/// A time from `min` to `max`, as likely between 1 and 2 milliseconds as between 1 and 2 seconds.
pub fn log_time(rng: &mut Rng, min: Duration, max: Duration) -> Duration {
    let (low, high) = (min.as_nanos().max(1) as f64, max.as_nanos().max(2) as f64);
    let unit = rng.below(1 << 20) as f64 / f64::from(1 << 20);
    Duration::from_nanos((low * (high / low).powf(unit)) as u64)
}

bitflags::bitflags! {
    /// Kinds of trouble. A seed switches some on: worlds in which everything happens hide what needs one thing often.
    #[derive(Copy, Clone, PartialEq, Eq, Debug)]
    pub struct Trouble: u32 {
        /// Processes die, and come back at the same address.
        const CRASH = 1;
        /// Processes end in order, and come back.
        const EXIT = 1 << 1;
        /// Processes stand still, their progress thread too.
        const PAUSE = 1 << 2;
        /// Users compute; the progress thread stands in.
        const COMPUTE = 1 << 3;
        /// Clocks jump ahead.
        const CLOCK = 1 << 4;
        /// Send completions get later and earlier.
        const LATE = 1 << 5;
        /// Address handles cannot be made for a while, or only so many.
        const AH_FAIL = 1 << 6;
        /// Jobs of the address-handle cache wait.
        const AH_SLOW = 1 << 7;
        /// Hosts move to another link address.
        const MAC = 1 << 8;
        /// Local addresses go away and come back, at the same or another index.
        const GID = 1 << 9;
        /// Ports go down and up.
        const PORT = 1 << 10;
        /// No memory can be registered for a while.
        const MEMORY = 1 << 11;
        /// Queue pairs fall into ERROR.
        const QP = 1 << 12;
        /// One direction between two hosts is cut.
        const PARTITION = 1 << 13;
        /// The weather changes.
        const WEATHER = 1 << 14;
        /// Users do things inside callbacks.
        const CALLBACKS = 1 << 15;
        /// Users queue requests where a send is refused.
        const PENDING = 1 << 16;
        /// Handlers keep messages.
        const KEEP = 1 << 17;
        /// Endpoints are made and given up all the time.
        const CHURN = 1 << 18;
        /// Pairs of endpoints are connected by their users.
        const PAIRS = 1 << 19;
        /// Users cancel, invalidate and probe.
        const CANCEL = 1 << 20;
        /// Addresses are kept for longer than the process that they name.
        const OLD_ADDRESS = 1 << 21;
        /// Devices die.
        const FATAL = 1 << 22;
    }
}

/// Settings of a host, which all its processes have.
#[derive(Clone, Debug)]
pub struct HostPlan {
    /// Without the extensions of ours.
    pub plain: bool,
    /// It is a soft device, with a receive budget of so many bytes.
    pub soft: Option<u32>,
    /// Send completions come so many nanoseconds late.
    pub late: Option<(u64, u64)>,
    /// Inline bytes.
    pub inline: u32,
    /// Sends that wait for a ring.
    pub send_batch: u32,
    /// Calls of the device may sleep.
    pub sleeps: bool,
    /// `UCX_IB_AH_CACHE_TTL`.
    pub ttl: Duration,
    /// `UCX_IB_AH_CACHE_MAX`.
    pub idle_max: u32,
    /// `UCX_UD_LINGER_TIMEOUT`.
    pub linger: Duration,
    /// `UCX_UD_TIMER_TICK`.
    pub tick: Duration,
    /// `UCX_UD_TIMER_BACKOFF`.
    pub backoff: f64,
    /// How often the progress thread comes by.
    pub async_tick: Duration,
    /// `UCX_UD_TX_QUEUE_LEN`.
    pub tx_queue: u32,
    /// `UCX_UD_RX_QUEUE_LEN`.
    pub rx_queue: u32,
    /// `UCX_IB_RX_MAX_BUFS`, above the queue's length.
    pub rx_spare: Option<u32>,
    /// `UCX_UD_MAX_WINDOW`.
    pub window: u32,
    /// Unclaimed endpoints at most.
    pub passive_max: usize,
    /// Messages kept beyond gaps at most.
    pub held_max: usize,
    /// Handlers may run on the progress thread.
    pub async_handlers: bool,
}

/// A world.
#[derive(Clone, Debug)]
pub struct Plan {
    /// What it is drawn from.
    pub seed: u64,
    /// Peers are declared dead as quickly as they may be, so that endpoints fail without anybody's fault. In other worlds
    /// the troubles of a life-time stay below the time-out, and nobody may be declared dead who is not.
    pub mortal: bool,
    /// Only hosts of lower number connect, so that no endpoint serves two users.
    pub one_way: bool,
    /// What happens besides traffic.
    pub trouble: Trouble,
    /// What users and fate do.
    pub actions: u32,
    /// The longest time between two actions.
    pub pace: Duration,
    /// Endpoints at one time.
    pub eps_max: usize,
    /// The network.
    pub faults: Faults,
    /// `UCX_UD_TIMEOUT`, everywhere.
    pub timeout: Duration,
    /// Where PSNs start.
    pub psn: u16,
    /// Where connection numbers start.
    pub conn_sn: u32,
    /// Of all ports.
    pub mtu: Mtu,
    /// The hosts.
    pub hosts: Vec<HostPlan>,
}

/// Connection numbers above this are used up some day.
pub const CONN_SN_LAST: u32 = u32::MAX - 40;

impl Plan {
    /// The world of `seed`, and the generator that goes on from there.
    pub fn draw(seed: u64) -> (Plan, Rng) {
        let mut rng = Rng::new(seed);
        let r = &mut rng;
        let mortal = r.below(4) == 0;
        let trouble = draw_trouble(r);
        let faults = draw_weather(r, mortal);
        let count = pick(r, &[2, 2, 3, 3, 4, 6, 9]);
        let all_plain = r.below(5) == 0;
        let timeout = match mortal {
            true => pick(r, &[100, 1_000, 3_000]),
            false => 100_000,
        };
        let timeout = Duration::from_millis(timeout);
        let most = pick(r, &[100, 400]);
        let plan = Plan {
            seed,
            mortal,
            one_way: r.below(2) == 0,
            trouble,
            actions: 60 + r.below(most) as u32,
            pace: pick(r, &[200_000, 5_000_000, 200_000_000, 4_000_000_000].map(Duration::from_nanos)),
            eps_max: pick(r, &[3, 12, 40]),
            faults,
            timeout,
            psn: pick(r, &[1, 0, 0x7ff0, 0xfff0, 0xffff]),
            conn_sn: pick(r, &[0, 0, 0, 0x7fff_fffe, CONN_SN_LAST]),
            mtu: pick(r, &[Mtu::M1024, Mtu::M4096]),
            hosts: (0..count).map(|_| draw_host(r, all_plain, timeout)).collect(),
        };
        (plan, rng)
    }

    /// The longest linger time.
    pub fn linger_max(&self) -> Duration {
        self.hosts.iter().map(|h| h.linger).max().unwrap_or_default()
    }
}

fn draw_trouble(r: &mut Rng) -> Trouble {
    let density = pick(r, &[2, 4, 8]);
    let mut trouble = Trouble::empty();
    for t in Trouble::all().iter() {
        trouble.set(t, r.below(10) < density);
    }
    trouble
}

/// The weather, which may change.
pub fn draw_weather(r: &mut Rng, mortal: bool) -> Faults {
    let worst: &[u32] = if mortal { &[0, 1, 10, 30, 60] } else { &[0, 0, 1, 5, 15, 25] };
    let mut percent = |of: &[u32]| pick(r, of) * 10_000;
    Faults {
        loss_ppm: percent(worst),
        dup_ppm: percent(&[0, 0, 2, 20]),
        reorder_ppm: percent(&[0, 0, 5, 30]),
        corrupt_ppm: percent(&[0, 0, 2]),
        no_receive_ppm: percent(&[0, 0, 0, 3]),
        reorder_ns: pick(r, &[3_000, 50_000, 5_000_000, 300_000_000]),
        delay_ns: pick(r, &[1_000, 1_000, 100_000, 20_000_000]),
        jitter_ns: pick(r, &[0, 0, 2_000, 100_000]),
        ..Faults::default()
    }
}

const TTLS_SHORT: [Duration; 4] = [Duration::ZERO, Duration::from_millis(1), Duration::from_millis(50), Duration::MAX];
const TTLS_LONG: [Duration; 4] = [Duration::ZERO, Duration::from_millis(500), Duration::from_secs(20), Duration::MAX];

fn draw_host(r: &mut Rng, plain: bool, timeout: Duration) -> HostPlan {
    let ms = Duration::from_millis;
    let is_short = timeout < Duration::from_secs(10);
    HostPlan {
        plain: plain || r.below(6) == 0,
        soft: pick(r, &[None, Some(8 << 20), Some(8 << 20), Some(40_000)]),
        late: pick(r, &[None, None, Some((0, 2_000)), Some((10_000, 300_000)), Some((0, 20_000_000))]),
        inline: pick(r, &[0, 64, 64, 256]),
        send_batch: pick(r, &[1, 1, 8, 64]),
        sleeps: r.below(2) == 0,
        // The cache looks about every TTL: a millisecond is for worlds that are short.
        ttl: pick(r, if is_short { &TTLS_SHORT } else { &TTLS_LONG }),
        idle_max: pick(r, &[0, 1, 65_536]),
        linger: pick(r, &[0, 1, 20, 2_000, if is_short { 20_000 } else { 300_000 }].map(ms)),
        tick: pick(r, &[ms(1), ms(10)]).min(timeout / 20),
        // Without any, a dead peer is asked a hundred thousand times.
        backoff: pick(r, if is_short { &[1.0, 1.5, 2.0] } else { &[1.3, 1.5, 2.0, 3.0] }),
        async_tick: pick(r, &[ms(1), ms(10), ms(100)]),
        tx_queue: pick(r, &[65, 80, 256]),
        rx_queue: pick(r, &[4, 16, 64, 256]),
        rx_spare: pick(r, &[None, None, Some(0), Some(16)]),
        window: pick(r, &[2, 3, 8, 64, 1025]),
        passive_max: pick(r, &[65_536, 65_536, 4]),
        held_max: pick(r, &[0, 4, 8192]),
        async_handlers: r.below(3) == 0,
    }
}
