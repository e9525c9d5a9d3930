//! [`Run`]: the world in motion. Time, fate, and what the users do; [`check`](super::check) says what must hold.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
    time::Duration,
};

use ib::{
    addr::IfaceAddr,
    device::{RoceVersion, SoftIdentity},
    sim::{AhScript, Faults, SimConfig, SimNet},
    sw::Rng,
    types::Gid,
};
use parking_lot::Mutex;
use uct::{Clock, EpParams, ErrorKind, Time, time::ManualClock};

use super::{
    draw::{CONN_SN_LAST, Plan, Trouble, draw_weather, log_time, pick},
    host::{Life, Task},
    line::{Book, Line, Ops},
    wire::WireCheck,
};
use crate::{flow::Ledger, world::Motion};

/// What has been going on and ends at its time.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Ending {
    /// A process goes on.
    Resume(usize),
    /// A user is back.
    Back(usize),
    /// Send completions of a process are as they were.
    Late(usize),
    /// Address handles can be made again.
    Ah(usize),
    /// A process has its local address again.
    Gid(usize, Gid),
    /// A port is up again.
    Port(usize),
    /// Memory can be registered again.
    Memory(usize),
    /// A direction is open again.
    Link(usize, usize),
    /// The process that has closed its interface is gone.
    Gone(usize),
    /// A host gets its next process.
    Up(usize),
    /// Kept messages are given back.
    Keep(usize),
    /// Look again.
    Pulse,
}

/// A world in motion.
pub struct Run {
    pub(super) plan: Plan,
    pub(super) rng: Rng,
    pub(super) net: Arc<SimNet>,
    pub(super) clock: Arc<ManualClock>,
    pub(super) lives: Vec<Life>,
    /// The process of each host, if it has one.
    pub(super) current: Vec<Option<usize>>,
    /// How many processes each host has had.
    pub(super) counts: Vec<usize>,
    /// When a process of each host last ended.
    pub(super) last_end: Vec<Option<Time>>,
    /// What the next device of each host is made from.
    pub(super) configs: Vec<SimConfig>,
    pub(super) lines: Vec<Line>,
    pub(super) ops: Arc<Mutex<Ops>>,
    pub(super) ledgers: Vec<Ledger>,
    /// Which process has got messages of a flow.
    pub(super) flow_home: BTreeMap<u32, usize>,
    pub(super) endings: BTreeMap<(Time, u64), Ending>,
    scheduled: u64,
    /// How much silence may still be caused.
    budget: Duration,
    /// The longest that a packet may have been on its way so far.
    pub(super) slowest: Duration,
    pub(super) log: Vec<String>,
    pub(super) turns: u64,
    pub(super) wire: Arc<Mutex<WireCheck>>,
}

/// Something that a user does, or that befalls somebody.
type Action = fn(&mut Run);

/// Rounds in which nothing but rounds happens. Beyond it the world runs in circles.
const SPIN_MAX: u32 = 200_000;

/// Turns of a world. Beyond it something costs far more than it should.
const TURNS_MAX: u64 = 1_500_000;

impl Run {
    /// The world of a plan, at its beginning.
    pub fn new(plan: Plan, rng: Rng) -> Run {
        let clock = Arc::new(ManualClock::new(Time::from_nanos(1_000_000)));
        let net = SimNet::new(plan.seed, clock.clone());
        if let Some(n) = std::env::var("SIM_TRACE").ok().and_then(|n| n.parse().ok()) {
            net.set_trace_max(n);
        }
        net.set_formatter(Some(Arc::new(|b: &[u8]| ud::proto::describe(b).to_string())));
        let wire = Arc::new(Mutex::new(WireCheck::default()));
        let tap = wire.clone();
        net.set_tap(Some(Box::new(move |p| tap.lock().see(p))));
        net.set_faults(plan.faults);
        let hosts = plan.hosts.len();
        let configs = (0..hosts).map(|h| device_config(&plan, h)).collect();
        let budget = plan.timeout * 2 / 5;
        let slowest = longest_way(&plan.faults);
        let mut run = Run {
            plan,
            rng,
            net,
            clock,
            lives: Vec::new(),
            current: vec![None; hosts],
            counts: vec![0; hosts],
            last_end: vec![None; hosts],
            configs,
            lines: Vec::new(),
            ops: Arc::default(),
            ledgers: Vec::new(),
            flow_home: BTreeMap::new(),
            endings: BTreeMap::new(),
            scheduled: 0,
            budget,
            slowest,
            log: Vec::new(),
            turns: 0,
            wire,
        };
        for host in 0..hosts {
            run.start(host);
        }
        run
    }

    /// Lives through everything.
    pub fn live(&mut self) {
        for _ in 0..self.plan.actions {
            self.act();
            let gap = match self.rng.below(3) {
                0 => Duration::ZERO,
                _ => log_time(&mut self.rng, Duration::from_nanos(100), self.plan.pace),
            };
            self.pass(gap);
            self.watch();
        }
        self.calm();
    }

    /// Virtual time.
    pub fn now(&self) -> Time {
        self.clock.now()
    }

    pub(super) fn note(&mut self, text: String) {
        let t = self.now();
        self.log.push(format!("{t:?} {text}"));
    }

    // --- time

    /// Moves everybody once.
    pub(super) fn turn(&mut self) -> (usize, Option<Time>) {
        let now = self.now();
        self.turns += 1;
        if self.turns > TURNS_MAX {
            self.fail("it takes too many turns");
        }
        let (mut events, mut next) = (0, None);
        for l in self.lives.iter_mut().filter(|l| l.is_alive()) {
            let (n, t) = l.turn(now);
            events += n;
            next = [next, t].into_iter().flatten().min();
        }
        (events, next)
    }

    /// Lets time pass. What ends in it, ends.
    pub(super) fn pass(&mut self, gap: Duration) {
        let end = self.now() + gap;
        let mut spins = 0;
        loop {
            let (events, next) = self.turn();
            spins = if events > 0 { spins + 1 } else { 0 };
            if spins > SPIN_MAX {
                self.fail("the world runs in circles");
            }
            if events > 0 {
                continue;
            }
            if self.now() >= end {
                return;
            }
            self.step(next, end);
        }
    }

    /// Nobody has anything to do before `next`: time goes on to what comes first, `end` at the latest.
    pub(super) fn step(&mut self, next: Option<Time>, end: Time) {
        let now = self.now();
        let ending = self.endings.first_key_value().map(|((t, _), _)| *t);
        let t = [next, self.net.next_event(), ending, Some(end)].into_iter().flatten().min().unwrap_or(end);
        // Always forward: a timer that is due now and does nothing must not stop the world.
        let t = t.max(now + Duration::from_nanos(1));
        self.net.run_until(t);
        while let Some(entry) = self.endings.first_entry()
            && entry.key().0 <= t
        {
            let ending = entry.remove();
            self.end(ending);
        }
    }

    pub(super) fn schedule(&mut self, after: Duration, ending: Ending) {
        self.scheduled += 1;
        self.endings.insert((self.now() + after, self.scheduled), ending);
        // Idle programs go round and round, and so find out what their devices have to tell.
        self.scheduled += 1;
        self.endings.insert((self.now() + Duration::from_millis(60), self.scheduled), Ending::Pulse);
    }

    /// True if silence of this length may be caused.
    fn spend(&mut self, silence: Duration) -> bool {
        if self.plan.mortal {
            return true;
        }
        match self.budget.checked_sub(silence) {
            Some(left) => {
                self.budget = left;
                true
            }
            None => false,
        }
    }

    pub(super) fn end(&mut self, ending: Ending) {
        let alive = |l: &usize| self.lives[*l].is_alive();
        match ending {
            Ending::Pulse => {}
            Ending::Resume(l) | Ending::Back(l) => {
                if alive(&l) {
                    self.lives[l].motion = Motion::User;
                }
            }
            Ending::Late(l) => {
                let (min, max) = self.lives[l].device.config().late_sends.unwrap_or((0, 0));
                self.lives[l].device.set_late_sends(min, max);
            }
            Ending::Ah(l) => {
                self.lives[l].device.clear_ah_script();
                self.lives[l].device.set_ah_max(0);
            }
            Ending::Gid(l, gid) => {
                if alive(&l) {
                    self.lives[l].device.add_gid(gid, RoceVersion::V2);
                }
            }
            Ending::Port(l) => self.lives[l].device.set_port_active(true),
            Ending::Memory(l) => self.lives[l].device.refuse_registrations(false),
            Ending::Link(a, b) => {
                let (a, b) = (self.lives[a].device.node(), self.lives[b].device.node());
                self.net.set_link_faults(a, b, None);
            }
            Ending::Gone(l) => {
                if alive(&l) {
                    self.end_life(l, false);
                }
            }
            Ending::Up(host) => {
                if self.current[host].is_none() {
                    self.start(host);
                }
            }
            Ending::Keep(l) => self.give_back(l),
        }
    }

    /// Gives back what handlers have kept, and looks whether it is what it was.
    pub(super) fn give_back(&mut self, life: usize) {
        let kept = std::mem::take(&mut self.lives[life].desk.lock().kept);
        if kept.iter().any(|(desc, data)| desc.data() != data) {
            self.fail(&format!("process {life}: a message that was kept has changed"));
        }
    }

    // --- processes

    /// A host gets a process.
    pub(super) fn start(&mut self, host: usize) {
        let n = self.counts[host];
        let mut config = self.configs[host].clone();
        config.name = format!("h{host}.{n}");
        let device = self.net.add_device(config);
        if let Some(old) = self.lives.iter().rev().find(|l| l.host == host)
            && self.rng.below(4) > 0
            && let Ok(addr) = IfaceAddr::parse(&old.address.1)
        {
            device.set_next_qpn(addr.qpn);
        }
        let seed = self.rng.next_u64();
        let life = match Life::open(&self.plan, (host, n), device, &self.clock, seed) {
            Ok(l) => l,
            Err(e) => self.fail(&format!("host {host} does not open: {e}")),
        };
        self.counts[host] += 1;
        self.current[host] = Some(self.lives.len());
        let node = life.device.node();
        self.wire.lock().open(node, self.plan.hosts[host].window, self.plan.psn);
        self.note(format!("process {} starts on host {host}, qp {:x?}", self.lives.len(), life.address.1));
        self.lives.push(life);
        self.ledgers.push(Ledger::default());
    }

    /// A process ends: in order, or, with `crash`, its packets vanish first.
    pub(super) fn end_life(&mut self, life: usize, crash: bool) {
        self.note(format!("process {life} {}", if crash { "crashes" } else { "ends" }));
        let (now, host) = (self.now(), self.lives[life].host);
        let node = self.lives[life].device.node();
        if crash {
            self.net.crash(node);
        }
        self.configs[host].mac = Some(self.net.mac(node));
        self.current[host] = None;
        self.last_end[host] = Some(now);
        self.tear_down(life);
        self.net.crash(node);
        self.lives[life].ended = Some(now);
    }

    // --- what happens

    fn act(&mut self) {
        let t = self.plan.trouble;
        let on = |flag: Trouble, weight: u32| if t.contains(flag) { weight } else { 0 };
        let churn = if t.contains(Trouble::CHURN) { 3 } else { 1 };
        let table: [(u32, Action); 29] = [
            (20 * churn, Run::connect),
            (80, Run::send),
            (8, Run::flush),
            (3 * churn, Run::destroy),
            (3 * churn, Run::close),
            (4, Run::bury),
            (on(Trouble::CRASH, 2), Run::crash),
            (on(Trouble::EXIT, 2), Run::exit),
            (on(Trouble::FATAL, 1), Run::fatal),
            (on(Trouble::PAUSE, 3), Run::pause),
            (on(Trouble::COMPUTE, 4), Run::compute),
            (on(Trouble::CLOCK, 2), Run::jump),
            (on(Trouble::LATE, 3), Run::late),
            (on(Trouble::AH_FAIL, 3), Run::ah_fail),
            (on(Trouble::AH_SLOW, 4), Run::ah_slow),
            (on(Trouble::MAC, 2), Run::mac),
            (on(Trouble::GID, 2), Run::gid),
            (on(Trouble::PORT, 2), Run::port),
            (on(Trouble::MEMORY, 4), Run::memory),
            (on(Trouble::QP, 2), Run::qp),
            (on(Trouble::PARTITION, 3), Run::partition),
            (on(Trouble::WEATHER, 3), Run::weather),
            (on(Trouble::CALLBACKS, 10), Run::callback),
            (on(Trouble::CALLBACKS & Trouble::EXIT, 1), Run::exit_in_callback),
            (on(Trouble::KEEP, 4), Run::keep),
            (on(Trouble::PAIRS, 6), Run::pair),
            (on(Trouble::CANCEL, 3), Run::check),
            (on(Trouble::CANCEL, 1), Run::cancel),
            (on(Trouble::CANCEL | Trouble::PENDING, 1), Run::purge),
        ];
        let total: u32 = table.iter().map(|(w, _)| w).sum();
        let mut at = self.rng.below(u64::from(total)) as u32;
        for (weight, action) in table {
            if at < weight {
                return action(self);
            }
            at -= weight;
        }
    }

    /// A process whose user can act.
    fn user(&mut self) -> Option<usize> {
        let host = self.rng.below(self.current.len() as u64) as usize;
        self.current[host].filter(|&l| self.lives[l].motion == Motion::User && self.lives[l].is_well())
    }

    /// Any living process.
    fn anybody(&mut self) -> Option<usize> {
        let host = self.rng.below(self.current.len() as u64) as usize;
        self.current[host]
    }

    fn may_act(&self, line: &Line) -> bool {
        let l = &self.lives[line.life];
        l.is_alive() && l.motion == Motion::User && line.is_open()
    }

    /// A line whose user can act.
    fn line(&mut self) -> Option<Line> {
        let open: Vec<usize> = self.lines.iter().filter(|l| self.may_act(l)).map(|l| l.number).collect();
        if open.is_empty() { None } else { Some(self.lines[pick(&mut self.rng, &open)].clone()) }
    }

    pub(super) fn open_lines(&self) -> usize {
        self.lines.iter().filter(|l| l.is_open()).count()
    }

    fn connect(&mut self) {
        if self.open_lines() >= self.plan.eps_max {
            return;
        }
        let Some(life) = self.user() else { return };
        let host = self.lives[life].host;
        let hosts = self.current.len();
        let others: Vec<usize> = (0..hosts).filter(|&h| if self.plan.one_way { h > host } else { h != host }).collect();
        if others.is_empty() {
            return;
        }
        let to_host = pick(&mut self.rng, &others);
        // The address of a process that is there, or was.
        let known: Vec<usize> = (0..self.lives.len()).filter(|&l| self.lives[l].host == to_host).collect();
        let old = self.plan.trouble.contains(Trouble::OLD_ADDRESS) && self.rng.below(4) == 0;
        let to_life = if old { pick(&mut self.rng, &known) } else { known[known.len() - 1] };
        let (device, iface) = self.lives[to_life].address.clone();
        self.new_line(life, to_life, &EpParams::to_iface(&device, &iface));
    }

    pub(super) fn new_line(&mut self, life: usize, to_life: usize, params: &EpParams) -> Option<usize> {
        let number = self.lines.len();
        let to_host = self.lives[to_life].host;
        let l = &self.lives[life];
        let iface = l.iface.as_ref()?;
        let ep = match iface.ep(&params.clone().user_data(number as u64)) {
            Ok(ep) => ep,
            Err(e) => {
                let excused = (self.plan.conn_sn == CONN_SN_LAST && e.kind() == ErrorKind::ExceedsLimit)
                    || self.handles_in_trouble(l.host)
                    || self.handles_in_trouble(to_host);
                if !excused {
                    self.fail(&format!("no endpoint from process {life} to {to_life}: {e}"));
                }
                self.note(format!("process {life} gets no endpoint to {to_life}: {e}"));
                return None;
            }
        };
        let line = Line {
            number,
            life,
            to_host,
            to_life,
            born: self.now(),
            doubtful: self.current[to_host] != Some(to_life) || !self.lives[to_life].is_well(),
            partner: None,
            slot: Arc::new(Mutex::new(Some(Arc::new(ep)))),
            book: Arc::new(Mutex::new(Book { flow: number as u32, ..Book::default() })),
            ops: self.ops.clone(),
            desk: l.desk.clone(),
            md: l.md.as_ref().map(Arc::downgrade).unwrap_or_default(),
            limits: iface.attr().am,
        };
        let id = line.ep().map_or(0, |e| e.id());
        self.note(format!("line {number} from process {life} to {to_life}, ep {id}"));
        self.lines.push(line);
        Some(number)
    }

    /// Two users make an endpoint each, exchange addresses, and connect them.
    fn pair(&mut self) {
        if self.open_lines() + 2 > self.plan.eps_max {
            return;
        }
        let (Some(a), Some(b)) = (self.user(), self.user()) else { return };
        if a == b {
            return;
        }
        let Some(x) = self.new_line(a, b, &EpParams::unconnected()) else { return };
        let Some(y) = self.new_line(b, a, &EpParams::unconnected()) else {
            return self.lines[x].destroy(false);
        };
        self.lines[x].partner = Some(y);
        self.lines[y].partner = Some(x);
        for (from, to, peer) in [(x, y, b), (y, x, a)] {
            let (Some(ep), Some(other)) = (self.lines[from].ep(), self.lines[to].ep()) else { continue };
            let result = other.address().and_then(|addr| ep.connect(&self.lives[peer].address.0, &addr));
            if let Err(e) = result {
                self.lines[from].note_refusal(&e.into());
            }
            // One side is faster.
            let gap = log_time(&mut self.rng, Duration::from_nanos(100), Duration::from_millis(5));
            if self.rng.below(2) == 0 {
                drop((ep, other));
                self.lines[from].burst(2, false, &mut self.rng);
                self.pass(gap);
            }
        }
    }

    fn send(&mut self) {
        let Some(line) = self.line() else { return };
        let most = pick(&mut self.rng, &[2, 20, 60]);
        let n = 1 + self.rng.below(most);
        let queue = self.plan.trouble.contains(Trouble::PENDING) && self.rng.below(2) == 0;
        line.burst(n, queue, &mut self.rng);
    }

    fn flush(&mut self) {
        if let Some(line) = self.line() {
            line.flush();
        }
    }

    fn check(&mut self) {
        if let Some(line) = self.line() {
            line.check();
        }
    }

    fn cancel(&mut self) {
        let Some(line) = self.line() else { return };
        self.note(format!("line {} given up", line.number));
        if self.rng.below(2) == 0 { line.cancel() } else { line.invalidate() }
    }

    fn purge(&mut self) {
        if let Some(line) = self.line() {
            line.purge();
        }
    }

    fn destroy(&mut self) {
        let Some(line) = self.line() else { return };
        self.note(format!("line {} destroyed after {} messages", line.number, line.book.lock().sent));
        line.destroy(false);
    }

    fn close(&mut self) {
        let Some(line) = self.line() else { return };
        self.note(format!("line {} closed after {} messages", line.number, line.book.lock().sent));
        line.close();
    }

    /// Users give up endpoints that have failed.
    fn bury(&mut self) {
        let dead: Vec<Line> =
            self.lines.iter().filter(|l| self.may_act(l) && l.book.lock().failed.is_some()).cloned().collect();
        for line in dead {
            self.note(format!("line {} buried", line.number));
            line.destroy(false);
        }
    }

    /// Something is done inside the next callback of a process.
    fn callback(&mut self) {
        let Some(line) = self.line() else { return };
        let (mut rng, what) = (Rng::new(self.rng.next_u64()), self.rng.below(8));
        let desk = line.desk.clone();
        let queue = self.plan.trouble.contains(Trouble::PENDING);
        self.note(format!("line {} in a callback: {what}", line.number));
        let task: Task = Box::new(move || match what {
            0..3 => line.burst(1 + rng.below(6), queue, &mut rng),
            3 => line.flush(),
            4 => line.check(),
            5 => line.destroy(true),
            6 => line.close(),
            _ => line.purge(),
        });
        desk.lock().tasks.push_back(task);
    }

    fn exit_in_callback(&mut self) {
        let Some(life) = self.user() else { return };
        let Some(iface) = self.lives[life].iface.take() else { return };
        self.note(format!("process {life} closes its interface in a callback"));
        self.lives[life].desk.lock().tasks.push_back(Box::new(move || drop(iface)));
        // From now on nobody can say when it goes.
        self.last_end[self.lives[life].host] = Some(self.now());
        let host = self.lives[life].host;
        let down = log_time(&mut self.rng, Duration::from_micros(1), Duration::from_millis(100));
        self.schedule(down, Ending::Gone(life));
        self.schedule(down, Ending::Up(host));
    }

    fn crash(&mut self) {
        self.go_down(true);
    }

    fn exit(&mut self) {
        self.go_down(false);
    }

    fn go_down(&mut self, crash: bool) {
        let Some(life) = self.anybody() else { return };
        let host = self.lives[life].host;
        self.end_life(life, crash);
        let longest = if self.plan.mortal { self.plan.timeout * 3 } else { Duration::from_secs(10) };
        let down = log_time(&mut self.rng, Duration::from_nanos(100), longest);
        // It may stay away, and packets of it may be on their way when another one follows.
        if self.rng.below(8) > 0 {
            self.schedule(down, Ending::Up(host));
        }
    }

    /// The device dies under its process, which is of no use from now on.
    fn fatal(&mut self) {
        let Some(life) = self.anybody() else { return };
        if std::mem::replace(&mut self.lives[life].lost, true) {
            return;
        }
        self.note(format!("the device of process {life} dies"));
        let host = self.lives[life].host;
        self.last_end[host] = Some(self.now());
        self.lives[life].device.set_fatal();
        let down = log_time(&mut self.rng, Duration::from_micros(1), Duration::from_secs(1));
        self.schedule(down, Ending::Gone(life));
        self.schedule(down, Ending::Up(host));
    }

    fn while_silent(&mut self, longest: Duration) -> Option<Duration> {
        let longest = if self.plan.mortal { self.plan.timeout * 2 } else { longest };
        let time = log_time(&mut self.rng, Duration::from_micros(1), longest);
        self.spend(time).then_some(time)
    }

    fn pause(&mut self) {
        let Some(life) = self.user() else { return };
        let Some(time) = self.while_silent(Duration::from_secs(20)) else { return };
        self.note(format!("process {life} stands still for {time:?}"));
        self.lives[life].motion = Motion::Stopped;
        self.schedule(time, Ending::Resume(life));
    }

    fn compute(&mut self) {
        let Some(life) = self.user() else { return };
        let longest = Duration::from_secs(60).min(self.plan.pace * 30);
        let time = log_time(&mut self.rng, Duration::from_micros(10), longest);
        self.note(format!("the user of process {life} computes for {time:?}"));
        self.lives[life].motion = Motion::ThreadOnly;
        self.schedule(time, Ending::Back(life));
    }

    fn jump(&mut self) {
        let Some(life) = self.anybody() else { return };
        let time = log_time(&mut self.rng, Duration::from_micros(100), Duration::from_secs(100_000));
        // The engine takes a jump for silence if it is short, and else for a standstill, but for a tick and some slack.
        if self.spend(time.min(self.plan.timeout / 8 + Duration::from_secs(3))) {
            self.note(format!("the clock of process {life} jumps by {time:?}"));
            self.lives[life].clock.jump(time.as_nanos() as u64);
        }
    }

    fn late(&mut self) {
        let Some(life) = self.anybody() else { return };
        let Some(time) = self.while_silent(Duration::from_secs(5)) else { return };
        let max = pick(&mut self.rng, &[0, 5_000, 2_000_000, 300_000_000]);
        self.note(format!("sends of process {life} take up to {max} ns for {time:?}"));
        self.lives[life].device.set_late_sends(max / 2, max);
        self.schedule(time, Ending::Late(life));
    }

    fn ah_fail(&mut self) {
        let Some(life) = self.anybody() else { return };
        let Some(time) = self.while_silent(Duration::from_secs(5)) else { return };
        self.lives[life].ah_trouble = true;
        let device = self.lives[life].device.clone();
        match self.rng.below(3) {
            0 => {
                let max = 1 + device.live().ahs;
                self.note(format!("process {life} can have {max} address handles for {time:?}"));
                device.set_ah_max(max);
            }
            _ => {
                let errno =
                    pick(&mut self.rng, &[libc::ETIMEDOUT, libc::EHOSTUNREACH, libc::EINVAL, libc::ENOMEM, libc::EIO]);
                let times = pick(&mut self.rng, &[Some(1), Some(3), None]);
                self.note(format!("process {life} gets no address handles, errno {errno}, {times:?}, {time:?}"));
                device.script_ah(AhScript { dgid: None, errno, times });
            }
        }
        self.schedule(time, Ending::Ah(life));
    }

    fn ah_slow(&mut self) {
        let Some(life) = self.anybody() else { return };
        let Some(time) = self.while_silent(Duration::from_secs(5)) else { return };
        self.note(format!("jobs of process {life} wait for {time:?}"));
        self.lives[life].jobs_at = self.now() + time;
    }

    fn mac(&mut self) {
        let Some(life) = self.anybody() else { return };
        if self.spend(self.plan.timeout / 3 + Duration::from_secs(4)) {
            let (mac, tell) = (self.net.fresh_mac(), self.rng.below(2) == 0);
            self.note(format!("process {life} moves to {mac:?}, told: {tell}"));
            self.lives[life].device.set_mac(mac, tell);
            self.schedule(Duration::ZERO, Ending::Pulse);
        }
    }

    fn gid(&mut self) {
        let Some(life) = self.anybody() else { return };
        let Some(time) = self.while_silent(Duration::from_secs(10)) else { return };
        // Its address was taken already, and comes back.
        let gid = self.lives[life].device.gid();
        if gid != self.configs[self.lives[life].host].gids[0].0 {
            return;
        }
        self.note(format!("process {life} loses its address for {time:?}"));
        self.lives[life].gid_trouble = true;
        let device = self.lives[life].device.clone();
        device.remove_gid(gid);
        if self.rng.below(2) == 0 {
            // So that it comes back in another place.
            let other = Gid::from_ip(IpAddr::V4(Ipv4Addr::new(10, 9, 0, life as u8)));
            device.add_gid(other, RoceVersion::V2);
        }
        self.schedule(time, Ending::Gid(life, gid));
    }

    fn port(&mut self) {
        let Some(life) = self.anybody() else { return };
        let Some(time) = self.while_silent(Duration::from_secs(10)) else { return };
        self.note(format!("the port of process {life} is down for {time:?}"));
        self.lives[life].device.set_port_active(false);
        self.schedule(time, Ending::Port(life));
    }

    fn memory(&mut self) {
        let Some(life) = self.anybody() else { return };
        let Some(time) = self.while_silent(Duration::from_secs(10)) else { return };
        self.note(format!("process {life} can register no memory for {time:?}"));
        self.lives[life].memory_trouble = true;
        self.lives[life].device.refuse_registrations(true);
        self.schedule(time, Ending::Memory(life));
    }

    fn qp(&mut self) {
        let Some(life) = self.anybody() else { return };
        if self.spend(Duration::from_secs(2)) {
            self.note(format!("the queue pair of process {life} falls into ERROR"));
            self.lives[life].device.fail_qps();
            self.schedule(Duration::ZERO, Ending::Pulse);
        }
    }

    fn partition(&mut self) {
        let (Some(a), Some(b)) = (self.anybody(), self.anybody()) else { return };
        let Some(time) = self.while_silent(Duration::from_secs(20)) else { return };
        self.note(format!("no way from process {a} to {b} for {time:?}"));
        let (from, to) = (self.lives[a].device.node(), self.lives[b].device.node());
        self.net.set_link_faults(from, to, Some(Faults { partition: true, ..Faults::default() }));
        self.schedule(time, Ending::Link(a, b));
    }

    fn weather(&mut self) {
        let weather = draw_weather(&mut self.rng, self.plan.mortal);
        self.slowest = self.slowest.max(longest_way(&weather));
        self.note(format!("weather: {weather:?}"));
        self.net.set_faults(weather);
    }

    fn keep(&mut self) {
        let Some(life) = self.user() else { return };
        let Some(time) = self.while_silent(Duration::from_secs(5)) else { return };
        let n = 1 + self.rng.below(30) as usize;
        self.note(format!("process {life} keeps {n} messages for {time:?}"));
        self.lives[life].desk.lock().keep = n;
        self.schedule(time, Ending::Keep(life));
    }
}

/// How long a packet may be on its way.
fn longest_way(f: &Faults) -> Duration {
    let late = if f.reorder_ppm > 0 { f.reorder_ns } else { 0 };
    Duration::from_nanos(f.delay_ns + f.jitter_ns + late + 1_000)
}

fn device_config(plan: &Plan, host: usize) -> SimConfig {
    let p = &plan.hosts[host];
    let mut c = SimConfig::new(format!("h{host}"), IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1 + host as u8)));
    c.soft = p.soft.map(|rx_budget| SoftIdentity { udp_port: 4791, host_id: 1, rx_budget });
    c.sge_max = 6;
    c.mtu = plan.mtu;
    c.late_sends = p.late;
    c.inline_max = p.inline;
    c.send_batch = p.send_batch;
    c.ah_create_sleeps = p.sleeps;
    c
}
