//! Engines joined by an imaginary network in virtual time, with seeded faults. Nothing sleeps, nothing is random but the seed.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap, VecDeque},
    time::Duration,
};

use uct::{ErrorKind, Time};

use crate::proto::{
    CreqOutcome, EngineConfig, EpId, Event, ExtCaps, FlushOutcome, Outstanding, PeerCaps, Refused, RxMeta, RxVerdict,
    SendKind, TransmitKind, describe, engine::scramble,
};

/// One user operation. `alive` is the completion: taken out on destroy.
#[derive(Debug)]
pub(super) struct Op {
    pub(super) id: u64,
    pub(super) payload: Vec<u8>,
    pub(super) is_alive: bool,
}

pub(super) type Addr = u8;

/// A link; counted by the node, so that a lost or doubled one shows.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) to: Addr,
    pub(super) qpn: u32,
}

pub(super) type Engine = crate::proto::Engine<Op, Addr, Link, Vec<u8>>;

/// A small generator; good enough for faults and the same everywhere.
#[derive(Clone)]
pub(super) struct Rng(u64);

impl Rng {
    pub(super) fn new(seed: u64) -> Self {
        Rng(seed)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        scramble(self.0)
    }

    pub(super) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// True `percent` times in a hundred.
    pub(super) fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// Faults of the network, in percent of the packets.
#[derive(Copy, Clone, Debug, Default)]
pub(super) struct Faults {
    pub(super) loss: u64,
    pub(super) dup: u64,
    pub(super) reorder: u64,
}

/// One process with one interface.
pub(super) struct Node {
    pub(super) eng: Engine,
    pub(super) addr: Addr,
    pub(super) cfg: EngineConfig,
    pub(super) serial: u64,
    /// Free places in the send queue for what the engine itself sends; tests set it to 0 to stop that.
    pub(super) credit: usize,
    /// Send completions are reported at once.
    pub(super) reports_tx: bool,
    /// The user has room for messages.
    pub(super) can_deliver: bool,
    /// Links are made as soon as they are asked for.
    pub(super) resolves: bool,
    /// The process runs at all.
    pub(super) is_running: bool,
    pub(super) to_resolve: Vec<EpId>,
    pub(super) delivered: Vec<(EpId, u8, Vec<u8>)>,
    /// Results by operation.
    pub(super) done: BTreeMap<u64, Vec<Result<(), ErrorKind>>>,
    pub(super) done_order: Vec<u64>,
    pub(super) failed: Vec<(EpId, ErrorKind)>,
    pub(super) connected: Vec<EpId>,
    pub(super) writable: Vec<EpId>,
    pub(super) stalled: Vec<EpId>,
    pub(super) stuck: Vec<EpId>,
    pub(super) freed: Vec<EpId>,
    pub(super) closed_by_peer: Vec<EpId>,
    pub(super) links_made: usize,
    pub(super) links_back: usize,
    pub(super) held: isize,
    next_op: u64,
}

pub(super) type Filter = Box<dyn FnMut(usize, &[u8]) -> bool>;

/// A packet on its way: arrival, order of sending, receiver, sending queue pair, bytes.
type Flying = (Time, u64, usize, u32, Vec<u8>);

/// The network and everybody on it.
pub(super) struct Net {
    pub(super) now: Time,
    pub(super) nodes: Vec<Node>,
    wire: BinaryHeap<Reverse<Flying>>,
    pub(super) rng: Rng,
    pub(super) faults: Faults,
    pub(super) delay: Duration,
    /// Sees each packet (sender, bytes); false drops it.
    pub(super) filter: Option<Filter>,
    /// The last packets, for failures.
    pub(super) log: VecDeque<String>,
    /// Everything sent: sender and bytes. Only while `records` is set.
    pub(super) sent: Vec<(usize, Vec<u8>)>,
    pub(super) records: bool,
    /// Full invariant checks after each step.
    pub(super) checks: bool,
    seq: u64,
}

pub(super) fn config(i: usize) -> EngineConfig {
    EngineConfig {
        local_qpn: 0x100 + i as u32,
        device_addr: vec![0xa0, i as u8],
        incarnation: 0x1000 + i as u64,
        seed: 77 + i as u64,
        // Every suite crosses the wrap.
        initial_psn: 0xfff8,
        linger: Duration::from_secs(2),
        timeout: Duration::from_secs(10),
        ..EngineConfig::default()
    }
}

impl Net {
    pub(super) fn new(n: usize, seed: u64) -> Net {
        Net::with(n, seed, |_, _| {})
    }

    pub(super) fn with(n: usize, seed: u64, edit: impl Fn(usize, &mut EngineConfig)) -> Net {
        let mut net = Net {
            now: Time::from_nanos(1_000_000_000),
            nodes: Vec::new(),
            wire: BinaryHeap::new(),
            rng: Rng::new(seed),
            faults: Faults::default(),
            delay: Duration::from_micros(10),
            filter: None,
            log: VecDeque::new(),
            sent: Vec::new(),
            records: false,
            checks: true,
            seq: 0,
        };
        for i in 0..n {
            let mut cfg = config(i);
            edit(i, &mut cfg);
            net.nodes.push(Node::new(i as Addr, cfg));
        }
        net
    }

    pub(super) fn caps(&self, to: usize) -> PeerCaps {
        let cfg = &self.nodes[to].cfg;
        let ext = cfg.foreign_ident.is_none().then_some(ExtCaps {
            features: cfg.features,
            incarnation: cfg.incarnation,
            rx_budget: cfg.rx_budget,
        });
        PeerCaps { max_packet: cfg.max_packet, ext }
    }

    // --- user calls

    pub(super) fn connect(&mut self, a: usize, b: usize) -> EpId {
        let (qpn, caps) = (self.nodes[b].cfg.local_qpn, PeerCaps { ext: None, ..self.caps(b) });
        let (now, to) = (self.now, self.nodes[b].addr);
        let (ep, outcome) = self.nodes[a].eng.connect_to_iface(now, to, qpn, 0, caps).unwrap();
        if outcome == crate::proto::ConnectOutcome::New {
            self.nodes[a].to_resolve.push(ep);
        }
        ep
    }

    /// A connected pair, quiet.
    pub(super) fn pair(&mut self, a: usize, b: usize) -> (EpId, EpId) {
        let ea = self.connect(a, b);
        self.settle();
        let eb = self.connect(b, a);
        self.settle();
        assert!(
            self.nodes[a].eng.is_connected(ea) && self.nodes[b].eng.is_connected(eb),
            "the pair is not connected\n{}",
            self.tail()
        );
        (ea, eb)
    }

    /// A pair by connect-to-endpoint.
    pub(super) fn p2p(&mut self, a: usize, b: usize) -> (EpId, EpId) {
        let now = self.now;
        let ea = self.nodes[a].eng.create_ep(now).unwrap();
        let eb = self.nodes[b].eng.create_ep(now).unwrap();
        self.p2p_half(a, ea, b, eb);
        self.p2p_half(b, eb, a, ea);
        self.settle();
        (ea, eb)
    }

    pub(super) fn p2p_half(&mut self, a: usize, ea: EpId, b: usize, eb: EpId) {
        let (qpn, caps, to, now) = (self.nodes[b].cfg.local_qpn, self.caps(b), self.nodes[b].addr, self.now);
        self.nodes[a].eng.connect_to_ep(now, ea, to, qpn, eb.wire_id(), caps).unwrap();
        self.nodes[a].to_resolve.push(ea);
    }

    pub(super) fn send(&mut self, n: usize, ep: EpId, payload: &[u8]) -> Result<u64, Refused> {
        self.send_as(n, ep, 1, payload, SendKind::Copy)
    }

    pub(super) fn send_as(
        &mut self,
        n: usize,
        ep: EpId,
        am_id: u8,
        payload: &[u8],
        kind: SendKind,
    ) -> Result<u64, Refused> {
        let now = self.now;
        let node = &mut self.nodes[n];
        let begun = node.eng.begin_send(ep, am_id, payload.len(), kind, false)?;
        let mut bytes = begun.neth.to_vec();
        bytes.extend_from_slice(payload);
        let (to, qpn) = {
            let link = node.eng.link(ep).unwrap();
            (link.to, link.qpn)
        };
        node.serial += 1;
        let serial = node.serial;
        let op = node.op(payload);
        let id = op.id;
        let mut op = Some(op);
        // Every other message tries the short way, which must come to the same.
        if kind == SendKind::Copy && serial.is_multiple_of(2) {
            let size = (am_id, payload.len());
            node.eng.send_plain(
                || now,
                ep,
                size,
                serial,
                |_| op.take(),
                |op, neth, place| {
                    assert_eq!(neth, begun.neth);
                    *place = Some(op);
                    (&[], ())
                },
            );
        }
        if let Some(op) = op {
            node.eng.commit_send(now, begun, serial, op);
        }
        self.post(n, to, qpn, bytes);
        Ok(id)
    }

    /// Sends, running the network until there is room.
    pub(super) fn send_wait(&mut self, n: usize, ep: EpId, payload: &[u8]) -> u64 {
        loop {
            match self.send(n, ep, payload) {
                Ok(id) => return id,
                Err(Refused::NoResource) => {
                    self.nodes[n].eng.want_writable(ep);
                    let before = self.nodes[n].writable.len();
                    let ok = self.run_until(Duration::from_secs(100), |net| {
                        net.nodes[n].writable.len() > before || net.nodes[n].failed.iter().any(|f| f.0 == ep)
                    });
                    assert!(ok, "never writable: {}", self.tail());
                }
                Err(other) => panic!("send: {other:?}\n{}", self.tail()),
            }
        }
    }

    pub(super) fn flush(&mut self, n: usize, ep: EpId) -> u64 {
        let (now, node) = (self.now, &mut self.nodes[n]);
        let op = node.op(b"flush");
        let id = op.id;
        match node.eng.flush(now, ep, op).map_err(|(_, r)| r).unwrap() {
            FlushOutcome::Done(op) => node.note_done(op, Ok(())),
            FlushOutcome::InProgress => {}
        }
        id
    }

    /// Destroys; operations count as finished with `Canceled`, as the glue does it.
    pub(super) fn destroy(&mut self, n: usize, ep: EpId) {
        let (now, node) = (self.now, &mut self.nodes[n]);
        let mut seen = Vec::new();
        node.eng.destroy(now, ep, |o| seen.extend(take_completion(o)));
        node.note_canceled(seen);
    }

    /// Gives up what is outstanding, as the glue does it.
    pub(super) fn cancel(&mut self, n: usize, ep: EpId) {
        let (now, node) = (self.now, &mut self.nodes[n]);
        let mut seen = Vec::new();
        node.eng.cancel(now, ep, |o| seen.extend(take_completion(o)));
        node.note_canceled(seen);
    }

    /// Closes the interface, as the glue does it.
    pub(super) fn close_all(&mut self, n: usize) {
        let (now, node) = (self.now, &mut self.nodes[n]);
        let mut seen = Vec::new();
        node.eng.close_all(now, |o| seen.extend(take_completion(o)));
        node.note_canceled(seen);
    }

    /// Asks for news of the endpoint in one of three ways: flush, check, or when it is writable.
    pub(super) fn wait_for(&mut self, n: usize, ep: EpId, way: u64) {
        let (now, node) = (self.now, &mut self.nodes[n]);
        let op = node.op(b"");
        match way {
            0 => {
                if let Ok(FlushOutcome::Done(op)) = node.eng.flush(now, ep, op) {
                    node.note_done(op, Ok(()));
                }
            }
            1 => drop(node.eng.check(now, ep, Some(op))),
            _ => node.eng.want_writable(ep),
        }
    }

    pub(super) fn is_done(&self, n: usize, op: u64) -> Option<Result<(), ErrorKind>> {
        let results = self.nodes[n].done.get(&op)?;
        assert_eq!(results.len(), 1, "operation {op} finished {} times", results.len());
        Some(results[0])
    }

    /// Payloads delivered at a node, in order.
    pub(super) fn payloads(&self, n: usize) -> Vec<&[u8]> {
        self.nodes[n].delivered.iter().map(|d| d.2.as_slice()).collect()
    }

    // --- the network

    fn post(&mut self, from: usize, to: Addr, qpn: u32, bytes: Vec<u8>) {
        // A replay shows more.
        let keep = if std::env::var_os("SIM_SEED").is_some() { 2000 } else { 64 };
        if self.log.len() >= keep {
            self.log.pop_front();
        }
        let passes = self.filter.as_mut().is_none_or(|f| f(from, &bytes)) && !self.rng.percent(self.faults.loss);
        let mark = if passes { "" } else { "   LOST" };
        self.log.push_back(format!("{:?} {from}->{to} {}{mark}", self.now, describe(&bytes)));
        if self.records {
            self.sent.push((from, bytes.clone()));
        }
        if !passes {
            return;
        }
        let src_qpn = self.nodes[from].cfg.local_qpn;
        let Some(dst) = self.nodes.iter().position(|n| n.addr == to && n.cfg.local_qpn == qpn) else { return };
        let copies = if self.rng.percent(self.faults.dup) { 2 } else { 1 };
        for _ in 0..copies {
            let mut at = self.now + self.delay;
            if self.rng.percent(self.faults.reorder) {
                at += self.delay * (1 + self.rng.below(30) as u32);
            }
            self.seq += 1;
            self.wire.push(Reverse((at, self.seq, dst, src_qpn, bytes.clone())));
        }
    }

    /// Puts a packet on the wire that no engine has sent.
    pub(super) fn inject(&mut self, from: usize, to: usize, bytes: &[u8]) -> RxVerdict {
        let src_qpn = self.nodes[from].cfg.local_qpn;
        self.receive(to, src_qpn, bytes)
    }

    pub(super) fn receive(&mut self, to: usize, src_qpn: u32, bytes: &[u8]) -> RxVerdict {
        let now = self.now;
        let (caps, addrs): (Vec<PeerCaps>, Vec<Addr>) =
            (0..self.nodes.len()).map(|i| (self.caps(i), self.nodes[i].addr)).unzip();
        let node = &mut self.nodes[to];
        let meta = RxMeta { src_qpn, can_deliver: node.can_deliver };
        let verdict = node.eng.handle_packet(now, &meta, bytes);
        match &verdict {
            RxVerdict::Deliver { ep, am_id } => node.delivered.push((*ep, *am_id, bytes[8..].to_vec())),
            RxVerdict::Hold { ep, psn, am_id } => {
                node.held += 1;
                node.eng.hold(*ep, *psn, *am_id, bytes[8..].to_vec());
            }
            RxVerdict::Creq(info) => {
                let addr = bytes[info.dev_addr.clone()].get(1).copied().unwrap_or(0);
                let caps =
                    addrs.iter().position(|&a| a == addr).map_or(PeerCaps { max_packet: 4096, ext: None }, |i| caps[i]);
                let _: CreqOutcome = node.eng.handle_creq(now, info.clone(), addr, caps);
            }
            RxVerdict::Control | RxVerdict::Drop(_) => {}
        }
        self.take_held(to);
        verdict
    }

    fn take_held(&mut self, n: usize) {
        let node = &mut self.nodes[n];
        while let Some((ep, am_id, bytes)) = node.eng.poll_held() {
            node.held -= 1;
            node.delivered.push((ep, am_id, bytes));
        }
    }

    /// Lets every engine say what it has to say.
    pub(super) fn pump(&mut self) {
        for n in 0..self.nodes.len() {
            while self.pump_node(n) {}
            if self.checks {
                self.nodes[n].eng.check_invariants();
            }
        }
    }

    fn pump_node(&mut self, n: usize) -> bool {
        let now = self.now;
        if !self.nodes[n].is_running {
            return false;
        }
        let mut busy = false;
        if self.nodes[n].resolves {
            for ep in std::mem::take(&mut self.nodes[n].to_resolve) {
                busy = true;
                self.resolve(n, ep, true);
            }
        }
        let mut out = Vec::new();
        let node = &mut self.nodes[n];
        while node.credit > 0 {
            let Some(t) = node.eng.poll_transmit(now, node.serial + 1) else { break };
            node.serial += 1;
            node.credit -= usize::from(node.credit != usize::MAX);
            let bytes = match t.kind {
                TransmitKind::Control { bytes } => bytes.to_vec(),
                TransmitKind::Resend { neth, op } => {
                    let mut b = neth.to_vec();
                    b.extend_from_slice(&op.payload);
                    b
                }
            };
            out.push((t.link.to, t.link.qpn, bytes));
        }
        busy |= !out.is_empty();
        if node.reports_tx {
            node.eng.handle_tx_done(node.serial);
        }
        while let Some(event) = node.eng.poll_event() {
            busy = true;
            node.on_event(event);
        }
        for (to, qpn, bytes) in out {
            self.post(n, to, qpn, bytes);
        }
        busy
    }

    pub(super) fn resolve(&mut self, n: usize, ep: EpId, ok: bool) {
        let now = self.now;
        let node = &mut self.nodes[n];
        let Some((&to, qpn, _)) = node.eng.peer(ep) else { return };
        let link = if ok {
            node.links_made += 1;
            Ok(Link { to, qpn })
        } else {
            Err(ErrorKind::Unreachable)
        };
        if node.eng.resolved(now, ep, link).is_some() {
            node.links_back += 1;
        }
    }

    fn next_time(&self) -> Option<Time> {
        let timers = self.nodes.iter().filter(|n| n.is_running).filter_map(|n| n.eng.poll_timeout());
        let wire = self.wire.peek().map(|Reverse(w)| w.0);
        timers.chain(wire).min()
    }

    /// Goes to the next moment at which something happens. False: nothing ever will.
    pub(super) fn step(&mut self) -> bool {
        self.pump();
        let Some(t) = self.next_time() else { return false };
        self.now = self.now.max(t);
        while let Some(Reverse(w)) = self.wire.peek() {
            if w.0 > self.now {
                break;
            }
            let Some(Reverse((_, _, dst, src_qpn, bytes))) = self.wire.pop() else { break };
            if self.nodes[dst].is_running {
                let _ = self.receive(dst, src_qpn, &bytes);
            }
        }
        for node in self.nodes.iter_mut().filter(|n| n.is_running) {
            if node.eng.poll_timeout().is_some_and(|t| t <= self.now) {
                node.eng.handle_timeout(self.now);
            }
        }
        self.pump();
        true
    }

    /// Runs until `done`, at most for `limit` of virtual time.
    pub(super) fn run_until(&mut self, limit: Duration, mut done: impl FnMut(&mut Net) -> bool) -> bool {
        let end = self.now + limit;
        self.pump();
        loop {
            if done(self) {
                return true;
            }
            if self.next_time().is_none_or(|t| t > end) {
                self.now = end;
                return done(self);
            }
            self.step();
        }
    }

    pub(super) fn run_for(&mut self, d: Duration) {
        self.run_until(d, |_| false);
    }

    /// Until no packet is on the wire and no engine has anything to send. Timers are not waited for.
    pub(super) fn settle(&mut self) {
        for _ in 0..100_000 {
            self.pump();
            let Some(Reverse(w)) = self.wire.peek() else { return };
            self.now = self.now.max(w.0);
            let Some(Reverse((_, _, dst, src_qpn, bytes))) = self.wire.pop() else { return };
            if self.nodes[dst].is_running {
                let _ = self.receive(dst, src_qpn, &bytes);
            }
        }
        panic!("the network does not come to rest\n{}", self.tail());
    }

    /// Opens the window of an endpoint of node 0 to `n` packets and more, with empty messages.
    #[track_caller]
    pub(super) fn open_window(&mut self, ep: EpId, n: u16) {
        // One packet more with each ack, and each round has one or two.
        for _ in 0..=n {
            if self.nodes[0].eng.eps[ep.slot].cwnd > n {
                return;
            }
            while self.send(0, ep, b"").is_ok() {}
            self.settle();
        }
        panic!("the window does not open to {n} packets\n{}", self.tail());
    }

    pub(super) fn tail(&self) -> String {
        let lines: Vec<&str> = self.log.iter().map(String::as_str).collect();
        format!("last packets:\n{}", lines.join("\n"))
    }

    /// Loses everything that is on its way.
    pub(super) fn clear_wire(&mut self) {
        self.wire.clear();
    }

    /// A new process at a node's address: same address and queue pair, new incarnation.
    pub(super) fn restart(&mut self, n: usize, edit: impl Fn(&mut EngineConfig)) {
        let mut cfg = self.nodes[n].cfg.clone();
        cfg.incarnation += 0x10_0000;
        cfg.seed += 1;
        edit(&mut cfg);
        let addr = self.nodes[n].addr;
        self.nodes[n] = Node::new(addr, cfg);
    }

    /// [`Net::restart`] with nothing else changed. What is no process of ours is told apart by its identity.
    pub(super) fn restart_process(&mut self, n: usize) {
        self.restart(n, |cfg| {
            if let Some(ident) = &mut cfg.foreign_ident {
                ident[1] = ident[1].wrapping_add(1);
            }
        });
    }
}

/// What the glue does with an unfinished operation: its completion fires now.
pub(super) fn take_completion(o: Outstanding<'_, Op>) -> Option<u64> {
    match o {
        Outstanding::Packet(op) => std::mem::take(&mut op.is_alive).then_some(op.id),
        Outstanding::Marker(op) => Some(op.id),
    }
}

impl Node {
    pub(super) fn new(addr: Addr, cfg: EngineConfig) -> Node {
        Node {
            eng: Engine::new(cfg.clone()).unwrap(),
            addr,
            cfg,
            serial: 0,
            credit: usize::MAX,
            reports_tx: true,
            can_deliver: true,
            resolves: true,
            is_running: true,
            to_resolve: Vec::new(),
            delivered: Vec::new(),
            done: BTreeMap::new(),
            done_order: Vec::new(),
            failed: Vec::new(),
            connected: Vec::new(),
            writable: Vec::new(),
            stalled: Vec::new(),
            stuck: Vec::new(),
            freed: Vec::new(),
            closed_by_peer: Vec::new(),
            links_made: 0,
            links_back: 0,
            held: 0,
            next_op: 1,
        }
    }

    pub(super) fn op(&mut self, payload: &[u8]) -> Op {
        self.next_op += 1;
        Op { id: self.next_op, payload: payload.to_vec(), is_alive: true }
    }

    pub(super) fn note_done(&mut self, op: Op, result: Result<(), ErrorKind>) {
        if op.is_alive {
            self.done.entry(op.id).or_default().push(result);
            self.done_order.push(op.id);
        }
    }

    fn note_canceled(&mut self, ops: Vec<u64>) {
        for id in ops {
            self.done.entry(id).or_default().push(Err(ErrorKind::Canceled));
        }
    }

    fn on_event(&mut self, event: Event<Op, Link, Vec<u8>>) {
        match event {
            Event::Done { op, result, .. } => self.note_done(op, result),
            Event::Writable(ep) => self.writable.push(ep),
            Event::Connected(ep) => self.connected.push(ep),
            Event::Resolve { ep, .. } => self.to_resolve.push(ep),
            Event::EpFailed { ep, kind, .. } => self.failed.push((ep, kind)),
            Event::Stalled(ep) => self.stalled.push(ep),
            Event::Stuck { ep, .. } => self.stuck.push(ep),
            Event::Freed { ep, link, .. } => {
                self.links_back += usize::from(link.is_some());
                self.freed.push(ep);
            }
            Event::ReleaseHeld(_) => self.held -= 1,
            Event::PeerClosed(ep) => self.closed_by_peer.push(ep),
        }
    }
}
