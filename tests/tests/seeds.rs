//! Random worlds: a seed draws a network, its faults, the settings of every node, and what their users do; then the faults
//! stop and everything must come to rest. What is checked: messages arrive exactly once, in order and unchanged; every
//! operation is settled once; endpoints fail only with a reason; buffers and address handles go home; who has nothing to do
//! sets no timer.
//!
//! Which seeds run the environment says, see `uct_tests::hunt`. Those that have found something are kept in `seeds.txt`.

use std::{
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use ib::{sim::Faults, sw::Rng};
use uct::{Completion, Ep, EpParams, FlushMode, Posted, SendError};
use uct_tests::{
    fabric::Sim,
    flow::{Flow, Ledger, draw_message},
    world::{Motion, NodeOptions, World},
};

mod sim {
    use uct_tests::hunt;

    /// See the module. The name is part of the command that a failing world prints.
    #[test]
    fn seeds() {
        hunt::run(&hunt::kept(include_str!("seeds.txt")), super::USUAL, hunt::drawn, super::run_one);
    }
}

/// Seeds of a run that asks for none.
const USUAL: u64 = if cfg!(debug_assertions) { 100 } else { 1000 };

fn run_one(seed: u64) {
    let mut rng = Rng::new(seed);
    let draw = Draw::new(&mut rng);
    if let Err(e) = catch_unwind(AssertUnwindSafe(|| run(seed, &draw, rng))) {
        eprintln!("seed {seed}: {draw:#?}\nrepeat with: SIM_SEED={seed} cargo test -p uct-tests --test seeds");
        resume_unwind(e);
    }
}

/// What a seed decides before anything happens.
#[derive(Debug)]
struct Draw {
    faults: Faults,
    nodes: Vec<NodeDraw>,
    /// Only nodes of lower number connect, so that the others' endpoints stay unclaimed.
    one_way: bool,
    actions: u32,
    mac_changes: bool,
}

#[derive(Debug)]
struct NodeDraw {
    plain: bool,
    soft: bool,
    late: Option<(u64, u64)>,
    inline: u32,
    send_batch: u32,
    slow_ah: bool,
    ttl: Duration,
    linger: Duration,
    tick: Duration,
    backoff: f64,
    tx_queue: u32,
    rx_queue: u32,
    window: u32,
}

fn pick<T: Copy>(rng: &mut Rng, from: &[T]) -> T {
    from[rng.below(from.len() as u64) as usize]
}

impl Draw {
    fn new(rng: &mut Rng) -> Self {
        let ms = Duration::from_millis;
        let mut percent = |of: &[u32]| pick(rng, of) * 10_000;
        let faults = Faults {
            loss_ppm: percent(&[0, 0, 1, 5, 15, 30]),
            dup_ppm: percent(&[0, 0, 2, 20]),
            reorder_ppm: percent(&[0, 0, 5, 30]),
            corrupt_ppm: percent(&[0, 0, 2]),
            no_receive_ppm: percent(&[0, 0, 3]),
            reorder_ns: pick(rng, &[3_000, 50_000, 5_000_000]),
            jitter_ns: pick(rng, &[0, 0, 2_000, 100_000]),
            ..Faults::default()
        };
        let all_plain = rng.below(4) == 0;
        let nodes = (0..2 + rng.below(4))
            .map(|_| NodeDraw {
                plain: all_plain || rng.below(5) == 0,
                soft: rng.below(3) > 0,
                late: pick(rng, &[None, None, Some((0, 2_000)), Some((10_000, 300_000))]),
                inline: pick(rng, &[0, 64, 64]),
                send_batch: pick(rng, &[1, 1, 8]),
                slow_ah: rng.below(3) == 0,
                ttl: pick(rng, &[Duration::ZERO, ms(1), ms(1000), Duration::MAX]),
                linger: pick(rng, &[Duration::ZERO, ms(1), ms(20), ms(2_000), ms(300_000)]),
                tick: pick(rng, &[ms(1), ms(10)]),
                backoff: pick(rng, &[1.5, 2.0, 3.0]),
                tx_queue: pick(rng, &[65, 256]),
                rx_queue: pick(rng, &[4, 32, 256]),
                window: pick(rng, &[2, 8, 1025]),
            })
            .collect();
        Draw {
            faults,
            nodes,
            one_way: rng.below(2) == 0,
            actions: 60 + rng.below(200) as u32,
            mac_changes: rng.below(4) == 0,
        }
    }
}

/// An endpoint of a user, also after its end.
struct Conn {
    node: usize,
    to: usize,
    /// It is the n-th from `node` to `to`, which makes it the other end of the n-th from `to` to `node`.
    n: usize,
    ep: Option<Ep>,
    flow: Flow,
    closed: Option<uct::completion::CompletionStatus>,
    failed: bool,
}

struct Run<'a> {
    w: World<Sim>,
    draw: &'a Draw,
    rng: Rng,
    conns: Vec<Conn>,
    ledgers: Vec<Ledger>,
    accepted: u64,
    settled: Arc<AtomicU64>,
}

const OPEN_MAX: usize = 12;

fn run(seed: u64, draw: &Draw, rng: Rng) {
    let mut w = World::<Sim>::with_seed("seeds", seed);
    for d in &draw.nodes {
        let mut c = w.fabric.config();
        c.late_sends = d.late;
        c.inline_max = d.inline;
        c.send_batch = d.send_batch;
        c.ah_create_sleeps = d.slow_ah;
        c.soft = c.soft.filter(|_| d.soft);
        w.fabric.next_config = Some(c);
        let mut o = NodeOptions::default();
        o.tuning.seed = Some(seed);
        o.tuning.incarnation = Some(seed ^ w.nodes.len() as u64);
        if d.plain {
            o.tuning.features = Some(ud::proto::Features::empty());
        }
        o.md.ah_cache_ttl = d.ttl;
        o.ud.linger_timeout = d.linger;
        // Nobody dies here: whoever is declared dead was given up too early.
        o.ud.timeout = Duration::from_secs(if draw.mac_changes { 100 } else { 20 });
        o.ud.timer_tick = d.tick;
        o.ud.timer_backoff = d.backoff;
        o.ud.max_window = d.window;
        o.ud.rx_queue_len_init = 4;
        o.iface.tx_queue_len = d.tx_queue;
        o.iface.rx_queue_len = d.rx_queue;
        w.add(&o);
    }
    w.fabric.net.set_faults(draw.faults);
    let ledgers = vec![Ledger::default(); draw.nodes.len()];
    let mut r = Run { w, draw, rng, conns: Vec::new(), ledgers, accepted: 0, settled: Arc::default() };
    for _ in 0..draw.actions {
        r.act();
        r.collect();
    }
    r.come_to_rest();
}

impl Run<'_> {
    fn completion(&mut self) -> Completion {
        let settled = self.settled.clone();
        Completion::new(move |_| {
            settled.fetch_add(1, Ordering::Relaxed);
        })
    }

    /// Does an operation. Its completion must fire exactly once: when the operation is over, or at the end of this call if
    /// it was done at once or refused.
    fn operate(
        &mut self,
        i: usize,
        f: impl FnOnce(&World<Sim>, &Ep, &mut Flow, &Completion) -> Result<Posted, SendError>,
    ) {
        let comp = self.completion();
        self.accepted += 1;
        let conn = &mut self.conns[i];
        let Some(ep) = &conn.ep else { return };
        if let Err(SendError::Failed(e)) = f(&self.w, ep, &mut conn.flow, &comp)
            && !conn.failed
            && !self.may_fail(i)
        {
            self.w.fail(&format!("endpoint {i}: {e}"));
        }
    }

    /// An endpoint may fail, and what it was given may be lost, if the other end's user has destroyed that.
    fn may_fail(&self, i: usize) -> bool {
        let (node, to, n) = (self.conns[i].node, self.conns[i].to, self.conns[i].n);
        self.conns.iter().any(|c| (c.node, c.to, c.n) == (to, node, n) && c.ep.is_none())
    }

    fn describe(&self, i: usize) -> String {
        let c = &self.conns[i];
        format!(
            "endpoint {i}: {} -> {} number {}, open {}, failed {}, closed {:?}, got {} of {}, may fail {}\n",
            c.node,
            c.to,
            c.n,
            c.ep.is_some(),
            c.failed,
            c.closed.as_ref().map(|s| s.poll()),
            self.ledgers[c.to].got(c.flow.number),
            c.flow.sent,
            self.may_fail(i)
        )
    }

    fn act(&mut self) {
        let open: Vec<usize> = (0..self.conns.len()).filter(|&i| self.conns[i].ep.is_some()).collect();
        match self.rng.below(100) {
            0..15 if open.len() < OPEN_MAX => self.connect(),
            0..60 if !open.is_empty() => {
                let i = pick(&mut self.rng, &open);
                for _ in 0..1 + self.rng.below(20) {
                    let (kind, len) = draw_message(&mut self.rng);
                    self.operate(i, |w, ep, flow, comp| {
                        let node = &w.nodes[flow_node(flow)];
                        flow.send(node, ep, kind, len, Some(comp)).map(|()| Posted::InProgress)
                    });
                }
            }
            60..63 if !open.is_empty() => {
                let i = pick(&mut self.rng, &open);
                self.operate(i, |_, ep, _, comp| ep.flush(FlushMode::Local, Some(comp)));
            }
            63..65 if !open.is_empty() => {
                let i = pick(&mut self.rng, &open);
                self.operate(i, |_, ep, _, comp| ep.check(Some(comp)));
            }
            65..72 if !open.is_empty() => {
                let i = pick(&mut self.rng, &open);
                self.conns[i].ep = None;
            }
            72..75 if !open.is_empty() => {
                let i = pick(&mut self.rng, &open);
                let (comp, status) = Completion::polled();
                if let Some(ep) = self.conns[i].ep.take() {
                    ep.close(Some(comp));
                }
                self.conns[i].closed = Some(status);
            }
            75..77 => {
                let i = self.rng.below(self.w.nodes.len() as u64) as usize;
                let n = &mut self.w.nodes[i];
                n.motion = if n.motion == Motion::User { Motion::ThreadOnly } else { Motion::User };
            }
            77..79 if self.draw.mac_changes => {
                let i = self.rng.below(self.w.nodes.len() as u64) as usize;
                let mac = self.w.fabric.net.fresh_mac();
                self.w.nodes[i].device.set_mac(mac, self.rng.below(2) == 0);
            }
            79..90 => {
                let most = pick(&mut self.rng, &[5_000, 500_000, 50_000_000]);
                self.w.run_for(Duration::from_nanos(self.rng.below(most)));
            }
            _ => {
                for _ in 0..1 + self.rng.below(5) {
                    let _events = self.w.step();
                }
            }
        }
    }

    fn connect(&mut self) {
        let nodes = self.w.nodes.len() as u64;
        let (mut node, mut to) = (self.rng.below(nodes) as usize, self.rng.below(nodes) as usize);
        if node == to {
            return;
        }
        if self.draw.one_way && node > to {
            (node, to) = (to, node);
        }
        let n = self.conns.iter().filter(|c| (c.node, c.to) == (node, to)).count();
        let number = (self.conns.len() as u32) << 4 | node as u32;
        let target = self.w.nodes[to].iface();
        let params = EpParams::to_iface(&target.device_address(), &target.iface_address());
        match self.w.nodes[node].iface().ep(&params.user_data(self.conns.len() as u64)) {
            Ok(ep) => {
                let flow = Flow::new(number);
                self.conns.push(Conn { node, to, n, ep: Some(ep), flow, closed: None, failed: false });
            }
            Err(e) => self.w.fail(&format!("no endpoint: {e}")),
        }
    }

    /// Takes what has arrived and what has failed.
    fn collect(&mut self) {
        for node in 0..self.w.nodes.len() {
            self.ledgers[node].collect(&self.w, node);
            let failures = std::mem::take(&mut *self.w.nodes[node].failures.lock());
            for f in failures {
                let i = f.user_data as usize;
                if self.conns[i].failed {
                    self.w.fail(&format!("endpoint {i} failed twice: {}", f.error));
                }
                self.conns[i].failed = true;
                if !self.may_fail(i) {
                    self.w.fail(&format!("endpoint {i} failed: {}", f.error));
                }
            }
        }
    }

    #[track_caller]
    fn until(&mut self, what: &str, mut done: impl FnMut(&Self) -> bool) {
        let end = self.w.now() + Duration::from_secs(1_000);
        loop {
            let (events, next) = self.w.turn();
            self.collect();
            if done(self) {
                return;
            }
            use uct_tests::fabric::Fabric;
            if self.w.now() > end || (events == 0 && !self.w.fabric.idle(next)) {
                let conns: String = (0..self.conns.len()).map(|i| self.describe(i)).collect();
                self.w.fail(&format!("not in time: {what}\n{conns}"));
            }
        }
    }

    fn come_to_rest(mut self) {
        self.w.fabric.net.set_faults(Faults::default());
        for n in &mut self.w.nodes {
            n.motion = Motion::User;
        }
        self.until("what was accepted arrives", |r| {
            (0..r.conns.len()).all(|i| {
                let c = &r.conns[i];
                r.ledgers[c.to].got(c.flow.number) == c.flow.sent || r.may_fail(i)
            })
        });
        self.until("operations are settled", |r| r.settled.load(Ordering::Relaxed) >= r.accepted);
        self.until("closing completes", |r| {
            r.conns.iter().all(|c| c.closed.as_ref().is_none_or(|s| s.poll().is_some()))
        });
        for c in &mut self.conns {
            c.ep = None;
        }
        self.until("records are freed", |r| r.w.nodes.iter().all(|n| n.counter("eps") == 0));
        if self.settled.load(Ordering::Relaxed) != self.accepted {
            self.w.fail("an operation was settled twice");
        }
        self.until("nobody has a timer", |r| r.w.nodes.iter().all(|n| n.worker.next_timeout().is_none()));
        let per_node: BTreeMap<usize, u32> = self.ledgers.iter().enumerate().map(|(i, l)| (i, l.total())).collect();
        let sent: u32 = self.conns.iter().map(|c| c.flow.sent).sum();
        assert!(per_node.values().sum::<u32>() <= sent);
        let Run { mut w, .. } = self;
        w.buffers_come_home();
        w.finish();
    }
}

/// Flow numbers have the sender's node in their low bits.
fn flow_node(flow: &Flow) -> usize {
    (flow.number & 15) as usize
}
