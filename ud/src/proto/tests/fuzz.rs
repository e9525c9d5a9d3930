//! Fuzz targets of the engine: [`packet`] for the bytes of a packet, [`engine`] for sequences of operations. `ci/fuzz` runs them
//! under libFuzzer; the test at the end replays what it has found.
//!
//! [`engine`] reads its input as a program: settings first, then one operation after another on two engines that are joined
//! by the imaginary network of the engine's own tests. What must hold whatever the program does is asserted after each step
//! and at the end. Programs of the first kind have a network with faults but without liars, and everything must arrive in
//! order and once; those of the second kind also put bytes of their own on the wire.

use std::{collections::BTreeMap, time::Duration};

use uct::ErrorKind;

use super::net::{Faults, Link, Net};
use crate::proto::{
    ConnectOutcome, EpId, Features, PeerCaps, SendKind, describe,
    wire::{self, Neth},
};

/// Any bytes as a packet: what is read and written again reads the same.
pub fn packet(bytes: &[u8]) {
    assert!(!describe(bytes).to_string().is_empty());
    let neth = Neth::parse(bytes);
    assert_eq!(neth.is_some(), bytes.len() >= wire::NETH_LEN);
    let Some(neth) = neth else { return };
    assert_eq!(neth.emit(), bytes[..wire::NETH_LEN]);
    assert!(neth.dest() <= wire::NO_EP);
    if neth.is_am() {
        // Bit 26 is UCX's for congestion; never set here.
        let again = wire::am_type(neth.dest(), neth.am_id() & 31, neth.is(wire::ACK_REQ));
        assert_eq!(again, neth.packet_type & !(1 << 26));
        assert!(!neth.has_reserved());
    }
    let mut out = Vec::new();
    if let Some(creq) = wire::Creq::parse(bytes) {
        let addr = &bytes[wire::CTL_PACKET_LEN..];
        creq.emit(neth, addr, &mut out);
        assert_eq!((out.len(), wire::Creq::parse(&out)), (bytes.len(), Some(creq)));
        ident(&creq.ident);
    }
    if let Some(crep) = wire::Crep::parse(bytes) {
        out.clear();
        crep.emit(neth, &mut out);
        assert_eq!((out.len(), wire::Crep::parse(&out)), (wire::CTL_PACKET_LEN, Some(crep)));
        ident(&crep.ident);
    }
    if let Some(xack) = wire::Xack::parse(bytes) {
        out.clear();
        xack.emit(neth, &mut out);
        assert_eq!((out.len(), wire::Xack::parse(&out)), (wire::XACK_LEN, Some(xack)));
    }
    if let (Some(src), Some(kind)) = (wire::parse_bye(bytes), wire::ctl_type(bytes)) {
        out.clear();
        wire::emit_bye(kind, neth, src, &mut out);
        assert_eq!((out.len(), wire::parse_bye(&out), wire::ctl_type(&out)), (wire::BYE_LEN, Some(src), Some(kind)));
    }
    // At most one of them is what the packet is.
    if !out.is_empty() {
        assert_eq!(Neth::parse(&out), Some(neth));
    }
}

fn ident(bytes: &[u8; wire::IDENT_LEN]) {
    let Some(ext) = wire::parse_ext(bytes) else { return };
    assert_eq!(wire::parse_ext(&wire::ext_ident(&ext)), Some(ext));
    assert_eq!(wire::process_of(bytes), wire::process_of_incarnation(ext.incarnation));
}

/// The bytes of a program. Those that are missing are zeros.
struct Tape<'a>(&'a [u8]);

impl<'a> Tape<'a> {
    fn byte(&mut self) -> u8 {
        self.take(1).first().copied().unwrap_or(0)
    }

    fn take(&mut self, n: usize) -> &'a [u8] {
        let (front, back) = self.0.split_at(n.min(self.0.len()));
        self.0 = back;
        front
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[usize::from(self.byte()) % choices.len()]
    }

    fn below(&mut self, n: usize) -> usize {
        usize::from(self.byte()) % n
    }

    fn coin(&mut self) -> bool {
        self.byte() & 1 != 0
    }
}

const NODES: usize = 2;
/// More operations only repeat what fewer can say.
const OPS_MAX: usize = 400;
/// Endpoints a program has open at a time; further connects do nothing.
const EPS_MAX: usize = 24;
const PASSIVE_MAX: usize = 6;

/// An endpoint that the program holds.
struct Held {
    node: usize,
    ep: EpId,
    name: u32,
    sent: u32,
}

struct Program<'a> {
    tape: Tape<'a>,
    net: Net,
    held: Vec<Held>,
    names: u32,
    /// Bytes of the program's own get on the wire: then nothing can be said about what arrives.
    lies: bool,
    life: [u32; NODES],
    /// Newest message by receiving process and stream.
    newest: BTreeMap<(usize, u32, u32), u32>,
}

impl<'a> Program<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        let mut tape = Tape(bytes);
        let lies = tape.coin();
        let draws: [[u8; 7]; NODES] = std::array::from_fn(|_| std::array::from_fn(|_| tape.byte()));
        let seed = u64::from(tape.byte());
        let mut net = Net::with(NODES, seed, |i, cfg| {
            let [kind, hold, budget, window, linger, psn, first] = draws[i];
            match kind % 4 {
                0 => cfg.foreign_ident = Some([i as u8 + 1; 20]),
                1 => cfg.features = Features::from_bits_truncate(u16::from(kind >> 2)),
                _ => {}
            }
            cfg.timeout = Duration::from_millis(500);
            cfg.hold_max = [64, 0, 4][usize::from(hold) % 3];
            cfg.rx_budget = [0, 9000, 20_000, 200_000][usize::from(budget) % 4];
            cfg.max_window = [1025, 2, 3, 16][usize::from(window) % 4];
            cfg.linger = Duration::from_millis([100, 0, 2000][usize::from(linger) % 3]);
            // The same at both: a receiver expects the sender's first.
            cfg.initial_psn = [1, 0xfff8, 0x7ffe][usize::from(draws[0][5]) % 3];
            cfg.first_ep_id = Some([0, 0xff_fffc, 5000][usize::from(first) % 3]);
            cfg.first_conn_sn = if psn & 1 == 0 { 0 } else { u32::MAX - 3 };
            cfg.passive_max = PASSIVE_MAX;
        });
        net.records = lies;
        Program { tape, net, held: Vec::new(), names: 0, lies, life: [0; NODES], newest: BTreeMap::new() }
    }

    fn run(mut self) {
        for _ in 0..OPS_MAX {
            if self.tape.0.is_empty() {
                break;
            }
            self.act();
            self.take();
        }
        self.finish();
    }

    fn hold(&mut self, node: usize, ep: EpId) {
        self.names += 1;
        self.held.push(Held { node, ep, name: self.names, sent: 0 });
    }

    /// One that is open. The newest first: programs use what they have just made.
    fn pick(&mut self) -> Option<usize> {
        let n = self.held.len();
        (n > 0).then(|| n - 1 - self.tape.below(n))
    }

    fn act(&mut self) {
        let op = self.tape.byte();
        let a = usize::from(op >> 7);
        match op & 0x1f {
            0 => self.connect(a),
            1 => self.join(a),
            2..6 => self.send(),
            6 => self.wait_for_it(),
            7 => self.destroy(),
            8 => self.cancel(),
            9 => self.invalidate(),
            10 => self.net.nodes[a].is_running = self.tape.coin(),
            11 => self.faults(),
            12 => self.net.nodes[a].resolves = self.tape.coin(),
            13 => self.net.nodes[a].can_deliver = self.tape.coin(),
            14 => self.net.nodes[a].credit = self.tape.of(&[usize::MAX, 0, 1, 3]),
            15 => self.net.nodes[a].reports_tx = self.tape.coin(),
            16 => self.net.clear_wire(),
            17 => self.restart(a),
            18 => self.replace_link(),
            19 => self.refuse_link(a),
            20 => self.reserve(),
            21 => self.say_again(),
            22 => self.inject(a),
            23 => self.inject_changed(a),
            24 => {
                let ms = u64::from(self.tape.byte());
                self.net.run_for(Duration::from_millis(ms));
            }
            _ => {
                self.net.step();
            }
        }
    }

    fn connect(&mut self, a: usize) {
        let b = if self.tape.byte().is_multiple_of(8) { a } else { 1 - a };
        if self.held.len() >= EPS_MAX {
            return;
        }
        let (qpn, caps) = (self.net.nodes[b].cfg.local_qpn, PeerCaps { ext: None, ..self.net.caps(b) });
        let (now, to) = (self.net.now, self.net.nodes[b].addr);
        match self.net.nodes[a].eng.connect_to_iface(now, to, qpn, 0, caps) {
            Ok((ep, outcome)) => {
                if outcome == ConnectOutcome::New {
                    self.net.nodes[a].to_resolve.push(ep);
                }
                self.hold(a, ep);
            }
            // Some programs begin near the last connection number.
            Err(e) => assert!(e == ErrorKind::ExceedsLimit && self.net.nodes[a].cfg.first_conn_sn > 0, "{e:?}"),
        }
    }

    /// Connects endpoint to endpoint, both ways or one.
    fn join(&mut self, a: usize) {
        let both = self.tape.byte() % 4 != 3;
        if self.held.len() + 2 > EPS_MAX {
            return;
        }
        let (now, b) = (self.net.now, 1 - a);
        let ends = [a, b].map(|n| self.net.nodes[n].eng.create_ep(now).expect("an endpoint"));
        self.net.p2p_half(a, ends[0], b, ends[1]);
        if both {
            self.net.p2p_half(b, ends[1], a, ends[0]);
        }
        self.hold(a, ends[0]);
        self.hold(b, ends[1]);
    }

    fn send(&mut self) {
        let Some(i) = self.pick() else { return };
        let how = self.tape.byte();
        let kind = if how & 1 == 0 { SendKind::Copy } else { SendKind::Zcopy };
        let len = [8, 64, 1000, 3000][usize::from(how >> 1) % 4];
        for _ in 0..1 + (how >> 4) {
            let h = &mut self.held[i];
            let mut payload = h.name.to_le_bytes().to_vec();
            payload.extend_from_slice(&h.sent.to_le_bytes());
            payload.resize(len, h.sent as u8);
            if self.net.send_as(h.node, h.ep, 2, &payload, kind).is_err() {
                break;
            }
            h.sent += 1;
        }
    }

    /// Flush, check, or ask for news when it is writable.
    fn wait_for_it(&mut self) {
        let Some(i) = self.pick() else { return };
        let way = u64::from(self.tape.byte() % 3);
        self.net.wait_for(self.held[i].node, self.held[i].ep, way);
    }

    fn destroy(&mut self) {
        let Some(i) = self.pick() else { return };
        let h = self.held.swap_remove(i);
        if self.tape.coin() {
            self.net.nodes[h.node].eng.send_farewell(h.ep);
        }
        self.net.destroy(h.node, h.ep);
    }

    fn cancel(&mut self) {
        let Some(i) = self.pick() else { return };
        self.net.cancel(self.held[i].node, self.held[i].ep);
    }

    fn invalidate(&mut self) {
        let Some(i) = self.pick() else { return };
        let (n, ep, now) = (self.held[i].node, self.held[i].ep, self.net.now);
        self.net.nodes[n].eng.invalidate(now, ep);
    }

    fn faults(&mut self) {
        let mut draw = || self.tape.of(&[0u64, 5, 30, 100]);
        self.net.faults = Faults { loss: draw(), dup: draw().min(30), reorder: draw().min(50) };
    }

    /// A new process at the address of one. No packet outlives the old one: data packets have no room to tell them apart.
    fn restart(&mut self, n: usize) {
        self.check_node(n);
        self.net.restart_process(n);
        self.net.clear_wire();
        self.held.retain(|h| h.node != n);
        self.life[n] += 1;
    }

    /// The address handle is found stale.
    fn replace_link(&mut self) {
        let Some(i) = self.pick() else { return };
        let node = &mut self.net.nodes[self.held[i].node];
        let ep = self.held[i].ep;
        let Some(&Link { to, qpn }) = node.eng.link(ep) else { return };
        node.links_made += 1;
        if node.eng.replace_link(ep, Link { to, qpn }).is_some() {
            node.links_back += 1;
        }
    }

    /// There is no way to the peer.
    fn refuse_link(&mut self, n: usize) {
        if let Some(ep) = self.net.nodes[n].to_resolve.pop() {
            self.net.resolve(n, ep, false);
        }
    }

    /// A message whose packing fails, or takes so long that something else happens meanwhile.
    fn reserve(&mut self) {
        let Some(i) = self.pick() else { return };
        let (n, ep) = (self.held[i].node, self.held[i].ep);
        if self.net.nodes[n].eng.reserve(ep, 100).is_ok() {
            if self.tape.coin() {
                self.net.step();
            }
            self.net.nodes[n].eng.unreserve(ep);
        }
    }

    fn say_again(&mut self) {
        let Some(i) = self.pick() else { return };
        self.net.nodes[self.held[i].node].eng.repeat_ack(self.held[i].ep);
    }

    /// Bytes from nowhere, as if from the peer's queue pair.
    fn inject(&mut self, to: usize) {
        let n = self.tape.below(80);
        let bytes = self.tape.take(n);
        self.put(to, bytes);
    }

    /// A packet that was sent before, by either side, once more: as it was, changed in a byte or two, cut or lengthened.
    fn inject_changed(&mut self, to: usize) {
        let (which, edits) = (self.tape.below(256), self.tape.byte());
        let n = self.net.sent.len();
        let Some(mut bytes) = n.checked_sub(1 + which % n.max(1)).map(|i| self.net.sent[i].1.clone()) else { return };
        for _ in 0..edits % 4 {
            let (at, value) = (self.tape.below(256) % bytes.len(), self.tape.byte());
            bytes[at] = value;
        }
        match edits >> 6 {
            2 => bytes.truncate(self.tape.below(256)),
            3 => bytes.resize(bytes.len() + self.tape.below(32), edits),
            _ => {}
        }
        self.put(to, &bytes);
    }

    fn put(&mut self, to: usize, bytes: &[u8]) {
        if self.lies && self.net.nodes[to].is_running {
            let _ = self.net.inject(1 - to, to, bytes);
        }
    }

    /// Looks at what arrived: in order and never twice. Gaps are allowed only where an endpoint was lost, which is not
    /// followed here.
    fn take(&mut self) {
        for n in 0..NODES {
            // What is sent is remembered for a while, and no longer than that.
            let old = self.net.sent.len().saturating_sub(300);
            self.net.sent.drain(..old);
            for (ep, am_id, bytes) in std::mem::take(&mut self.net.nodes[n].delivered) {
                if self.lies {
                    continue;
                }
                assert_eq!(am_id, 2);
                let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
                let (name, number) = (word(0), word(4));
                assert!(bytes[8..].iter().all(|&b| b == number as u8), "a message of another's bytes");
                let last = self.newest.insert((n, self.life[n], name), number);
                assert!(
                    last.map_or(number == 0 || self.life[n] > 0, |l| number == l + 1),
                    "stream {name}: {number} after {last:?} at {n} {ep:?}\n{}",
                    self.net.tail()
                );
            }
            self.net.nodes[n].eng.check_invariants();
            let eng = &self.net.nodes[n].eng;
            assert!(eng.passive_count() <= PASSIVE_MAX, "{} unclaimed", eng.passive_count());
        }
    }

    fn check_node(&self, n: usize) {
        let node = &self.net.nodes[n];
        node.eng.check_invariants();
        for (op, results) in &node.done {
            assert!(results.len() == 1, "operation {op}: {results:?}\n{}", self.net.tail());
        }
        let mut failed: Vec<u32> = node.failed.iter().map(|f| f.0.wire_id()).collect();
        failed.sort_unstable();
        failed.dedup();
        assert_eq!(failed.len(), node.failed.len(), "an endpoint failed twice\n{}", self.net.tail());
    }

    /// Everything is destroyed, the faults stop, and nothing may be left after a while.
    fn finish(&mut self) {
        for n in &mut self.net.nodes {
            (n.is_running, n.resolves, n.can_deliver, n.reports_tx, n.credit) = (true, true, true, true, usize::MAX);
        }
        self.net.faults = Faults::default();
        for h in std::mem::take(&mut self.held) {
            self.net.destroy(h.node, h.ep);
        }
        let done = self.net.run_until(Duration::from_secs(60), |net| {
            net.nodes.iter().all(|n| n.eng.ep_count() == n.eng.passive_count() && n.eng.packet_count() == 0)
        });
        assert!(done, "something is left\n{}", self.net.tail());
        self.take();
        for n in 0..NODES {
            self.check_node(n);
            let now = self.net.now;
            self.net.nodes[n].eng.close_all(now, |_| {});
            self.net.pump();
            let node = &self.net.nodes[n];
            assert_eq!(
                (node.eng.ep_count(), node.links_made, node.held),
                (0, node.links_back, 0),
                "records, links, kept buffers\n{}",
                self.net.tail()
            );
        }
    }
}

/// A program for two engines.
pub fn engine(bytes: &[u8]) {
    Program::new(bytes).run();
}

#[cfg(test)]
#[path = "../../../../fuzz/src/replay.rs"]
mod replay;

#[cfg(test)]
#[test]
fn what_fuzzing_found() {
    replay::replay(&[("packet", packet), ("engine", engine)]);
}
