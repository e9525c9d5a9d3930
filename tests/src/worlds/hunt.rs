//! Runs worlds: kept seeds, the usual ones, one, or fresh ones for some minutes.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    time::{Duration, Instant},
};

use ib::sw::{Rng, entropy};
use parking_lot::Mutex;
use uct::Time;

use super::{draw::Plan, run::Run};

/// What a world was like, for the account at the end.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Lived {
    /// How long it was, by its own clock.
    pub time: Duration,
    /// Packets.
    pub packets: u64,
    /// Of all packets and their times, see [`WireCheck::digest`](super::wire::WireCheck::digest).
    pub digest: u64,
    /// Processes.
    pub lives: usize,
    /// Endpoints.
    pub lines: usize,
    /// Messages that arrived.
    pub messages: u64,
}

/// Runs the world of a seed. With `SIM_LOG` it prints what has happened in it.
///
/// # Panics
/// If something does not hold, after it has printed what helps to find out why, and the command that repeats it.
pub fn live(seed: u64) -> Lived {
    let (plan, rng) = Plan::draw(seed);
    let about = format!("{plan:#?}");
    let mut run = None;
    let result = catch_unwind(AssertUnwindSafe(|| run.insert(Run::new(plan, rng)).live()));
    let Some(run) = run else {
        eprintln!("world {seed} did not begin: {about}");
        panic!("SIM_SEED={seed} cargo test -p uct-tests --test worlds -- sim::worlds repeats it");
    };
    if let Err(e) = result {
        // The first line of the report says what it is.
        let why = e.downcast_ref::<String>().and_then(|t| t.lines().next()).unwrap_or("a panic, see above").to_string();
        let first = run.log.len().saturating_sub(400);
        eprintln!("world {seed}: {about}\n{}", run.log[first..].join("\n"));
        eprintln!(
            "world {seed} failed, see above; to repeat it, with more of its packets:\n\
             SIM_SEED={seed} SIM_TRACE=2000 cargo test -p uct-tests --test worlds -- sim::worlds"
        );
        // Taking apart what is broken may fail again, in drops.
        std::mem::forget(run);
        panic!("world {seed}: {why}");
    }
    if std::env::var_os("SIM_LOG").is_some() {
        println!("world {seed}: {about}\n{}", run.log.join("\n"));
    }
    let wire = run.wire.lock();
    Lived {
        time: run.now().since(Time::ZERO),
        packets: wire.packets(),
        digest: wire.digest(),
        lives: run.lives.len(),
        lines: run.lines.len(),
        messages: run.ledgers.iter().map(|l| u64::from(l.total())).sum(),
    }
}

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable}={text}: not a number")))
}

/// The seeds of a text: one a line, `#` begins a comment.
pub fn kept(text: &str) -> Vec<u64> {
    text.lines().filter_map(|l| l.split('#').next()?.trim().parse().ok()).collect()
}

/// What the environment asks for: `SIM_SEED=n` one world; `SIM_MINUTES=n` fresh ones for so long; `SIM_SEEDS=n` so many
/// fresh ones, with `SIM_FROM=n` drawn from there; else `kept`, and `usual` ones that are the same in every run. The first
/// that fails ends it, unless `SIM_KEEP_GOING` is set.
///
/// # Panics
/// If one fails.
pub fn run(kept: &[u64], usual: u64) {
    if let Some(seed) = number("SIM_SEED") {
        let lived = live(seed);
        return println!("world {seed}: {lived:?}");
    }
    let minutes = number("SIM_MINUTES");
    let count = number("SIM_SEEDS");
    let fresh = minutes.is_some() || count.is_some();
    let from = number("SIM_FROM").unwrap_or_else(|| if fresh { entropy() >> 20 } else { 1 });
    let end = minutes.map(|m| Instant::now() + Duration::from_secs(m * 60));
    let count = match (minutes, count) {
        (Some(_), None) => u64::MAX,
        (_, Some(n)) => n,
        (None, None) => usual,
    };
    println!("SIM_FROM={from}, {} kept seeds", kept.len());
    // Seeds are short, so that they are easily told.
    let mut draw = Rng::new(from);
    let fresh = std::iter::from_fn(move || Some(draw.next_u64() >> 32));
    let worlds = Mutex::new(kept.iter().copied().chain(fresh.take(usize::try_from(count).unwrap_or(usize::MAX))));
    let (tally, failed) = (Mutex::new(Tally::default()), Mutex::new(Vec::new()));
    let keep_going = std::env::var_os("SIM_KEEP_GOING").is_some();
    let goes_on = |failed: &Vec<String>| keep_going || failed.is_empty();
    let start = Instant::now();
    std::thread::scope(|s| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |n| n.get()) {
            s.spawn(|| {
                while goes_on(&failed.lock()) && end.is_none_or(|t| Instant::now() < t) {
                    let Some(seed) = worlds.lock().next() else { break };
                    match catch_unwind(|| live(seed)) {
                        Ok(lived) => tally.lock().add(&lived),
                        Err(e) => failed.lock().push(e.downcast_ref::<String>().cloned().unwrap_or_default()),
                    }
                }
            });
        }
    });
    println!("{}", tally.lock().report(start.elapsed()));
    let failed = failed.into_inner();
    assert!(failed.is_empty(), "{} worlds failed, see above:\n{}", failed.len(), failed.join("\n"));
}

#[derive(Default)]
struct Tally {
    worlds: u64,
    time: Duration,
    packets: u64,
    lives: usize,
    lines: usize,
    messages: u64,
}

impl Tally {
    fn add(&mut self, l: &Lived) {
        self.worlds += 1;
        self.time += l.time;
        self.packets += l.packets;
        self.lives += l.lives;
        self.lines += l.lines;
        self.messages += l.messages;
    }

    fn report(&self, took: Duration) -> String {
        let hours = self.time.as_secs_f64() / 3600.0;
        let minutes = took.as_secs_f64() / 60.0;
        format!(
            "{} worlds, {hours:.0} simulated hours, {} processes, {} endpoints, {} messages, {} packets in {:.1} s: a minute buys \
             {:.0} worlds and {:.0} simulated hours",
            self.worlds,
            self.lives,
            self.lines,
            self.messages,
            self.packets,
            took.as_secs_f64(),
            self.worlds as f64 / minutes,
            hours / minutes
        )
    }
}
