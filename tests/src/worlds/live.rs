//! Runs worlds: one, or many with an account of them.

use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use uct::Time;

use super::{draw::Plan, run::Run};
use crate::hunt;

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
        let why = hunt::why(&*e).to_string();
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

/// Hunts in worlds, see [`crate::hunt`], and says at the end what a minute has bought.
///
/// # Panics
/// If one fails.
pub fn hunt(kept: &[u64], usual: u64) {
    let (tally, start) = (Mutex::new(Tally::default()), Instant::now());
    let result = catch_unwind(AssertUnwindSafe(|| {
        hunt::run(kept, usual, hunt::drawn, |seed| {
            let lived = live(seed);
            if hunt::number("SIM_SEED").is_some() {
                println!("world {seed}: {lived:?}");
            }
            tally.lock().add(&lived);
        });
    }));
    println!("{}", tally.lock().report(start.elapsed()));
    if let Err(e) = result {
        resume_unwind(e);
    }
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
