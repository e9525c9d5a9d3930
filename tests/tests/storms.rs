//! Upheaval: peers that move to another link address, queue pairs that fall into ERROR, ways that break in one direction,
//! users that compute for a while, all at once and from a seed. After the storm every message that was accepted has arrived,
//! once, in order and unchanged; every operation is settled; and everything is given back.
//!
//! ```text
//! cargo test -p uct-tests --test storms                            a few seeds, always the same
//! SIM_SEEDS=1000 cargo test -p uct-tests --release --test storms   so many random ones
//! SIM_SEED=1234 cargo test -p uct-tests --test storms              this one; SIM_TRACE=1000 shows more of its packets
//! ```

use std::{
    fmt::Write,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    time::Duration,
};

use ib::{sim::Faults, sw::Rng, types::Mtu};
use uct::{Completion, Ep, ErrorKind, FlushMode, Posted, SendError, completion::CompletionStatus};
use uct_tests::{
    fabric::Sim,
    flow::{Flow, Ledger, draw_message},
    world::{Motion, NodeOptions, World},
};

/// Seeds of a run that asks for none.
const USUAL: u64 = 24;
/// What the users of one world do.
const ACTIONS: usize = 120;
/// Endpoints at one time.
const EPS_MAX: usize = 12;

mod sim {
    use uct_tests::hunt;

    /// The name that a failure says to repeat.
    #[test]
    fn storms() {
        hunt::run(&[], super::USUAL, hunt::counted, super::run);
    }
}

fn run(seed: u64) {
    let mut storm = Storm::new(seed);
    if let Err(e) = catch_unwind(AssertUnwindSafe(|| storm.run())) {
        eprintln!("seed {seed}: {}", storm.log);
        eprintln!("seed {seed} failed; SIM_SEED={seed} cargo test -p uct-tests --test storms repeats it");
        resume_unwind(e);
    }
}

/// What a user may be told when the other one has given up the endpoint that they shared: that it was closed, or, if that
/// one lingered too shortly to make sure that this is known, that it is silent.
fn is_peer_gone(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::ConnectionReset | ErrorKind::EndpointTimeout | ErrorKind::NeverAnswered)
}

/// An endpoint and the flow over it.
struct Line {
    from: usize,
    to: usize,
    ep: Ep,
    flow: Flow,
}

/// An operation with a completion.
struct Operation {
    status: CompletionStatus,
    flow: u32,
}

struct Storm {
    seed: u64,
    rng: Rng,
    lines: Vec<Line>,
    /// Flows whose endpoints are gone: from where, to where, and what was sent.
    gone: Vec<(usize, usize, Flow)>,
    /// Flows that were destroyed while operations were outstanding: those may be canceled.
    destroyed: Vec<u32>,
    operations: Vec<Operation>,
    ledgers: Vec<Ledger>,
    flows: u32,
    /// Peers say BYE, so that no record waits for its linger time.
    extensions: bool,
    /// Both sides connect, so that one endpoint serves both users: the end of one resets that of the other.
    mutual: bool,
    /// A node has moved. Another move in the same stall could be death.
    moved: bool,
    log: String,
}

impl Storm {
    fn new(seed: u64) -> Self {
        Storm {
            seed,
            rng: Rng::new(seed),
            lines: Vec::new(),
            gone: Vec::new(),
            destroyed: Vec::new(),
            operations: Vec::new(),
            ledgers: Vec::new(),
            flows: 0,
            extensions: true,
            mutual: false,
            moved: false,
            log: String::new(),
        }
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.rng.below(of.len() as u64) as usize]
    }

    fn note(&mut self, text: String) {
        let _ = write!(self.log, "\n  {text}");
    }

    fn run(&mut self) {
        let mut w = World::<Sim>::with_seed("storms", self.seed);
        self.build(&mut w);
        self.change_weather(&w);
        for _ in 0..ACTIONS {
            self.act(&mut w);
            self.collect(&w);
            look_for_violations(&w);
        }
        self.calm(w);
    }

    fn build(&mut self, w: &mut World<Sim>) {
        let count = 2 + self.rng.below(3) as usize;
        self.extensions = self.rng.below(4) != 0;
        self.mutual = self.rng.below(3) == 0;
        // One for all: a message that the peer's packets cannot carry is refused.
        let mtu = self.pick(&[Mtu::M1024, Mtu::M4096]);
        for _ in 0..count {
            let mut device = w.fabric.config();
            device.mtu = mtu;
            device.late_sends = self.pick(&[None, None, Some((0, 5_000)), Some((10_000, 500_000))]);
            device.ah_create_sleeps = self.rng.below(3) == 0;
            device.send_batch = self.pick(&[1, 64]);
            w.fabric.next_config = Some(device);
            let mut o = NodeOptions::default();
            o.md.ah_cache_ttl = self.pick(&[Duration::ZERO, Duration::from_millis(1), Duration::MAX]);
            o.md.ah_cache_max = self.pick(&[0, 1, 65_536]);
            o.ud.linger_timeout = Duration::from_millis(self.pick(&[0, 1, 50, 2_000]));
            o.ud.timer_tick = Duration::from_millis(self.pick(&[1, 5]));
            o.ud.timer_backoff = self.pick(&[1.0, 1.5, 2.0]);
            o.ud.max_window = self.pick(&[2, 8, 64, 1025]);
            o.iface.tx_queue_len = self.pick(&[65, 256]);
            o.iface.rx_queue_len = self.pick(&[16, 128, 512]);
            if !self.extensions {
                o.tuning.features = Some(ud::proto::Features::empty());
            }
            let said = format!(
                "node {}: mtu {} late {:?} sleeps {} batch {} ttl {:?} idle {} linger {:?} window {} rx {}",
                w.nodes.len(),
                w.fabric.next_config.as_ref().map_or(0, |d| d.mtu.bytes()),
                w.fabric.next_config.as_ref().and_then(|d| d.late_sends),
                w.fabric.next_config.as_ref().is_some_and(|d| d.ah_create_sleeps),
                w.fabric.next_config.as_ref().map_or(0, |d| d.send_batch),
                o.md.ah_cache_ttl,
                o.md.ah_cache_max,
                o.ud.linger_timeout,
                o.ud.max_window,
                o.iface.rx_queue_len,
            );
            self.note(said);
            w.add(&o);
            self.ledgers.push(Ledger::default());
        }
    }

    fn change_weather(&mut self, w: &World<Sim>) {
        let worst = self.pick(&[0, 20_000, 100_000, 300_000]);
        let mut draw = |_| self.rng.below(worst + 1) as u32;
        let (loss_ppm, dup_ppm, reorder_ppm) = (draw(0), draw(1), draw(2));
        let jitter_ns = self.pick(&[0, 0, 2_000, 100_000]);
        let no_receive_ppm = self.pick(&[0, 0, 20_000]);
        self.note(format!("loss {loss_ppm} double {dup_ppm} reorder {reorder_ppm} ppm, jitter {jitter_ns} ns"));
        let bad = Faults {
            loss_ppm,
            dup_ppm,
            reorder_ppm,
            reorder_ns: 20_000,
            jitter_ns,
            no_receive_ppm,
            ..Faults::default()
        };
        w.fabric.net.set_faults(bad);
    }

    fn act(&mut self, w: &mut World<Sim>) {
        let node = self.rng.below(w.nodes.len() as u64) as usize;
        match self.rng.below(32) {
            0..4 => self.connect(w, node),
            4..16 => self.send(w),
            16 => self.flush(w),
            17 | 18 => self.destroy(),
            19 => self.close(),
            20..26 => {
                for _ in 0..=self.rng.below(20) {
                    w.step();
                }
            }
            26 => {
                let time = Duration::from_micros(self.pick(&[50, 2_000, 40_000, 3_000_000]));
                self.note(format!("{time:?} pass"));
                w.run_for(time);
            }
            27 => self.change_weather(w),
            28 => {
                // A user that computes, and comes back.
                let to = if w.nodes[node].motion == Motion::User { Motion::ThreadOnly } else { Motion::User };
                self.note(format!("node {node} moves by {to:?}"));
                w.nodes[node].motion = to;
            }
            29 if !std::mem::replace(&mut self.moved, true) => {
                // The peer moves to another link address; handles that were made before lead nowhere.
                let tell = self.rng.below(2) == 0;
                self.note(format!("node {node} gets a new link address, told: {tell}"));
                w.nodes[node].device.set_mac(w.fabric.net.fresh_mac(), tell);
            }
            30 => {
                self.note(format!("queue pair of node {node} falls into ERROR"));
                w.nodes[node].device.fail_qps();
            }
            _ => {
                // Nothing gets through one way, for less than the time-out.
                let to = self.rng.below(w.nodes.len() as u64) as usize;
                let (a, b) = (w.nodes[node].device.node(), w.nodes[to].device.node());
                let time = Duration::from_millis(1 + self.rng.below(2_000));
                self.note(format!("no way from node {node} to {to} for {time:?}"));
                w.fabric.net.set_link_faults(a, b, Some(Faults { partition: true, ..Faults::default() }));
                w.run_for(time);
                w.fabric.net.set_link_faults(a, b, None);
            }
        }
    }

    fn connect(&mut self, w: &World<Sim>, from: usize) {
        if self.lines.len() >= EPS_MAX || w.nodes[from].motion != Motion::User {
            return;
        }
        let to = self.rng.below(w.nodes.len() as u64) as usize;
        if from >= to && !self.mutual {
            return;
        }
        let ep = w.nodes[from].connect(&w.nodes[to]);
        self.note(format!("flow {} from node {from} to {to}, ep {:#x}", self.flows, ep.id()));
        self.lines.push(Line { from, to, ep, flow: Flow::new(self.flows) });
        self.flows += 1;
    }

    /// A line whose user is there.
    fn line(&mut self, w: &World<Sim>) -> Option<usize> {
        let at = self.rng.below(self.lines.len().max(1) as u64) as usize;
        self.lines.get(at).filter(|l| w.nodes[l.from].motion == Motion::User).map(|_| at)
    }

    fn send(&mut self, w: &World<Sim>) {
        let Some(at) = self.line(w) else { return };
        for _ in 0..=self.rng.below(12) {
            let (kind, len) = draw_message(&mut self.rng);
            let (comp, status) = Completion::polled();
            let line = &mut self.lines[at];
            match line.flow.send(&w.nodes[line.from], &line.ep, kind, len, Some(&comp)) {
                Ok(()) => self.operations.push(Operation { status, flow: line.flow.number }),
                Err(SendError::NoResource) => return,
                Err(SendError::Failed(e)) => return self.refused(w, at, &e),
            }
        }
    }

    /// The user of a failed endpoint gives it up. It fails only if the peer's user has destroyed its side of it.
    fn refused(&mut self, w: &World<Sim>, at: usize, error: &uct::Error) {
        let Line { from, to, ep, flow } = self.lines.swap_remove(at);
        if !(is_peer_gone(error.kind()) && self.may_be_reset(from, to)) {
            w.fail(&format!("flow {}: {error}", flow.number));
        }
        self.note(format!("flow {} was reset", flow.number));
        drop(ep);
        self.destroyed.push(flow.number);
        self.gone.push((from, to, flow));
    }

    /// True if an endpoint of node `from` to node `to` may have been shared with a user at `to` who has given it up.
    fn may_be_reset(&self, from: usize, to: usize) -> bool {
        self.mutual && self.gone.iter().any(|(f, t, _)| (*f, *t) == (to, from))
    }

    fn flush(&mut self, w: &World<Sim>) {
        let Some(at) = self.line(w) else { return };
        let (comp, status) = Completion::polled();
        let line = &self.lines[at];
        match line.ep.flush(FlushMode::Local, Some(&comp)) {
            Ok(Posted::Done | Posted::InProgress) => {
                self.operations.push(Operation { status, flow: line.flow.number });
            }
            Err(SendError::NoResource) => {}
            Err(SendError::Failed(e)) => self.refused(w, at, &e),
        }
    }

    fn take_line(&mut self) -> Option<Line> {
        if self.lines.is_empty() {
            return None;
        }
        let at = self.rng.below(self.lines.len() as u64) as usize;
        Some(self.lines.swap_remove(at))
    }

    fn destroy(&mut self) {
        let Some(line) = self.take_line() else { return };
        self.note(format!("flow {} destroyed after {} messages", line.flow.number, line.flow.sent));
        let Line { from, to, ep, flow } = line;
        drop(ep);
        for o in self.operations.iter().filter(|o| o.flow == flow.number) {
            assert!(o.status.poll().is_some(), "flow {}: not settled when destroy returned", flow.number);
        }
        self.destroyed.push(flow.number);
        self.gone.push((from, to, flow));
    }

    fn close(&mut self) {
        let Some(Line { from, to, ep, flow }) = self.take_line() else { return };
        self.note(format!("flow {} closed after {} messages", flow.number, flow.sent));
        let (comp, status) = Completion::polled();
        ep.close(Some(comp));
        self.operations.push(Operation { status, flow: flow.number });
        self.gone.push((from, to, flow));
    }

    fn collect(&mut self, w: &World<Sim>) {
        for (node, ledger) in self.ledgers.iter_mut().enumerate() {
            ledger.collect(w, node);
        }
    }

    /// The storm is over: everything arrives, is settled, and goes home.
    fn calm(&mut self, mut w: World<Sim>) {
        self.note("calm".to_string());
        w.fabric.net.set_faults(Faults::default());
        for n in &mut w.nodes {
            n.motion = Motion::User;
        }
        while !self.lines.is_empty() {
            if self.rng.below(2) == 0 { self.destroy() } else { self.close() }
        }
        let whole: Vec<(usize, Flow)> = self
            .gone
            .iter()
            .filter(|(from, to, _)| !self.may_be_reset(*from, *to))
            .map(|(_, to, flow)| (*to, flow.clone()))
            .collect();
        w.run_until("every accepted message arrives", |w| {
            self.collect(w);
            whole.iter().all(|(to, flow)| self.ledgers[*to].got(flow.number) == flow.sent)
        });
        w.run_until("every operation is settled", |_| self.operations.iter().all(|o| o.status.poll().is_some()));
        for o in &self.operations {
            match o.status.poll() {
                Some(Ok(())) => {}
                Some(Err(ErrorKind::Canceled)) if self.destroyed.contains(&o.flow) => {}
                Some(Err(k)) if self.mutual && is_peer_gone(k) => {}
                other => w.fail(&format!("an operation of flow {} ended with {other:?}", o.flow)),
            }
        }
        for (i, n) in w.nodes.iter().enumerate() {
            let bad = |k: ErrorKind| !(self.mutual && is_peer_gone(k));
            if let Some(f) = n.failures.lock().iter().find(|f| bad(f.kind)) {
                w.fail(&format!("node {i}: {}", f.error));
            }
        }
        if self.extensions {
            w.run_until("all records are freed", |w| w.nodes.iter().all(|n| n.counter("eps") == 0));
            if let Some(i) = w.nodes.iter().position(|n| n.worker.next_timeout().is_some()) {
                w.fail(&format!("node {i} has timer work and nothing to do"));
            }
            w.run_until("buffers come home", |w| {
                w.nodes.iter().all(|n| {
                    n.counter("tx.buffers") == n.counter("tx.buffers_free")
                        && n.counter("rx.buffers") == n.counter("rx.buffers_free") + n.counter("rx.buffers_posted")
                })
            });
        }
        close(w);
    }
}

/// Fails if a device saw something that verbs forbids, above all a send through an address handle that was destroyed.
fn look_for_violations(w: &World<Sim>) {
    for (i, n) in w.nodes.iter().enumerate() {
        let v = n.device.violations();
        if !v.is_empty() {
            w.fail(&format!("node {i}: {v:?}"));
        }
    }
}

/// Closes everything: as many address handles are destroyed as were created, and nothing is left on any device.
fn close(mut w: World<Sim>) {
    for n in &mut w.nodes {
        n.iface = None;
        n.md.ah_cache().close();
    }
    w.run_until("address handles are destroyed", |w| {
        w.nodes.iter().all(|n| {
            let _next = n.md.ah_cache().poll(w.now());
            let s = n.md.ah_cache().stats();
            s.held == 0 && s.created == s.destroyed
        })
    });
    look_for_violations(&w);
    let World { nodes, fabric, .. } = w;
    drop(nodes);
    let leaks = fabric.net.leaks();
    assert!(leaks.is_empty(), "still alive: {leaks:?}");
}
