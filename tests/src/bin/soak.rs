//! Runs for long in a process of its own, and fails if memory grows: connects and closes, then messages of all kinds over
//! endpoints that come and go.
//!
//! ```text
//! soak sim --connects 20000 --messages 1000000
//! ```
//!
//! Both nodes are in this process. The work is cut into parts; after each everything is closed and comes to rest, and what the
//! heap has in use then must not be more at the end than after half of it: by then caches, pools and tables have their size.
#![deny(unsafe_code)]

use std::{
    collections::VecDeque,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use clap::{Parser, ValueEnum};
use parking_lot::Mutex;
use uct::{AmDesc, AmId, Completion, Ep, FlushMode, MemSlice, am::HandlerKind, md::MemoryDomain};
use uct_tests::{
    fabric::{Sim, Soft},
    hooks::Hooks,
    memory::{heap_in_use, resident},
    world::{NodeOptions, World},
};

const ID: AmId = AmId::truncate(9);
const PARTS: u64 = 10;
/// Endpoints open at a time.
const OPEN: usize = 32;
/// Messages after which one of them is replaced.
const REPLACE_EVERY: u64 = 100;
/// Descriptors that the handler keeps for a while.
const KEPT: usize = 64;
/// What the heap may have grown by: the tables of hash maps double now and then, and the resolution of addresses has its own.
const HEAP_SLACK: usize = 64 << 10;
/// What the process may have grown by: the allocator's arenas have holes.
const RESIDENT_SLACK: usize = 4 << 20;

#[derive(Parser)]
struct Options {
    fabric: Which,
    /// Connects and closes, each with a message
    #[arg(long, default_value_t = 20_000)]
    connects: u64,
    /// Messages over endpoints that come and go
    #[arg(long, default_value_t = 100_000)]
    messages: u64,
}

#[derive(Copy, Clone, ValueEnum)]
enum Which {
    Sim,
    Soft,
}

/// What arrived, and some of it.
#[derive(Default)]
struct Seen {
    count: AtomicU64,
    kept: Mutex<VecDeque<AmDesc>>,
}

struct Soak<F: Hooks> {
    w: World<F>,
    seen: Arc<Seen>,
    sent: u64,
    zcopies: u64,
    /// Of them, those whose completion has come.
    settled: Arc<AtomicU64>,
    memory: MemSlice,
}

impl<F: Hooks> Soak<F> {
    fn new() -> Self {
        let mut w: World<F> = World::new("soak");
        let options = NodeOptions { record: false, ..NodeOptions::default() };
        w.add(&options);
        w.add(&options);
        let seen = Arc::new(Seen::default());
        let s = seen.clone();
        let handler = move |m: uct::AmMessage<'_>| {
            let n = s.count.fetch_add(1, Ordering::Relaxed);
            if n.is_multiple_of(7) {
                let mut kept = s.kept.lock();
                kept.push_back(m.into_owned());
                if kept.len() > KEPT {
                    kept.pop_front();
                }
            }
        };
        let iface = w.nodes[1].iface().transport().clone();
        iface.set_am_handler(ID, Some(Arc::new(handler)), HandlerKind::Sync).expect("a handler");
        let region = w.nodes[0].md.clone().mem_alloc(2048).expect("memory");
        let memory = region.slice(0..2048).expect("a slice");
        Soak { w, seen, sent: 0, zcopies: 0, settled: Arc::default(), memory }
    }

    /// One message, of the kind that is due.
    fn send(&mut self, ep: &Ep) {
        let n = self.sent;
        self.sent += 1;
        let len = (n * 37 % 2000) as usize;
        match n % 4 {
            0 | 1 => self.w.send(|| ep.am_short(ID, n, b"soak")),
            2 => drop(self.w.send(|| {
                ep.am_bcopy(ID, &mut |b| {
                    b[..len].fill(n as u8);
                    len
                })
            })),
            _ => {
                let settled = self.settled.clone();
                let comp = Completion::new(move |_| _ = settled.fetch_add(1, Ordering::Relaxed));
                let iov = [self.memory.clone()];
                let _posted = self.w.send(|| ep.am_zcopy(ID, b"head", &iov, Some(&comp)));
                self.zcopies += 1;
            }
        }
        if n.is_multiple_of(16) {
            self.w.turn();
        }
    }

    fn connect(&self) -> Ep {
        self.w.nodes[0].connect(&self.w.nodes[1])
    }

    /// Waits until everything has arrived and every record is gone.
    fn rest(&mut self) {
        let (seen, sent) = (self.seen.clone(), self.sent);
        self.w.run_until("everything arrives and is closed", |w| {
            seen.count.load(Ordering::Relaxed) == sent && w.nodes.iter().all(|n| n.counter("eps") == 0)
        });
        self.seen.kept.lock().clear();
        assert_eq!(self.settled.load(Ordering::Relaxed), self.zcopies, "completions are missing");
        self.w.buffers_come_home();
    }

    fn connects(&mut self, count: u64) {
        for i in 0..count {
            let ep = self.connect();
            self.send(&ep);
            if i.is_multiple_of(3) {
                ep.close(None)
            } else {
                drop(ep)
            }
            self.w.step();
        }
    }

    fn messages(&mut self, count: u64) {
        let mut open: VecDeque<Ep> = (0..OPEN).map(|_| self.connect()).collect();
        for i in 0..count {
            let ep = open.pop_front().expect("an endpoint");
            self.send(&ep);
            if i.is_multiple_of(REPLACE_EVERY) {
                // Destroyed with messages under way: they still arrive.
                drop(ep);
                open.push_back(self.connect());
            } else {
                open.push_back(ep);
            }
        }
        for ep in &open {
            let _posted = self.w.send(|| ep.flush(FlushMode::Local, None));
        }
    }

    /// Does the work in parts. Returns what is wrong with its memory.
    fn run(&mut self, what: &str, count: u64, work: fn(&mut Self, u64)) -> Result<(), String> {
        let began = Instant::now();
        let mut sizes = Vec::new();
        for _ in 0..PARTS {
            work(self, count / PARTS);
            self.rest();
            sizes.push((heap_in_use(), resident()));
        }
        let kib = |bytes: usize| bytes >> 10;
        let (&(heap, res), &(heap_end, res_end)) = (&sizes[sizes.len() / 2 - 1], &sizes[sizes.len() - 1]);
        println!(
            "{}: {count} {what}: heap {} KiB, at the end {} KiB; resident {} KiB, at the end {} KiB; {:.1} s",
            F::NAME,
            kib(heap),
            kib(heap_end),
            kib(res),
            kib(res_end),
            began.elapsed().as_secs_f64()
        );
        if heap_end > heap + HEAP_SLACK || res_end > res + RESIDENT_SLACK {
            let all: Vec<String> = sizes.iter().map(|(h, r)| format!("{}/{}", kib(*h), kib(*r))).collect();
            return Err(format!("{what}: memory grows; heap/resident in KiB after each part: {}", all.join(", ")));
        }
        Ok(())
    }
}

fn soak<F: Hooks>(o: &Options) -> Result<(), String> {
    let mut s = Soak::<F>::new();
    s.run("connects", o.connects, Soak::connects)?;
    s.run("messages", o.messages, Soak::messages)?;
    if s.w.nodes.iter().any(|n| !n.failures.lock().is_empty()) {
        return Err("an endpoint failed".into());
    }
    let Soak { w, seen, memory, .. } = s;
    drop((seen, memory));
    // Nothing of the devices is left, nothing keeps anything else.
    w.finish();
    Ok(())
}

fn main() -> ExitCode {
    let o = Options::parse();
    let result = match o.fabric {
        Which::Sim => soak::<Sim>(&o),
        Which::Soft => soak::<Soft>(&o),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("soak: {why}");
            ExitCode::FAILURE
        }
    }
}
