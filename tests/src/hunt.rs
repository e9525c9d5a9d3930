//! Runs something from seeds: kept ones, the usual ones, one, so many fresh ones, or fresh ones for some minutes.
//!
//! | variable | meaning |
//! |---|---|
//! | `SIM_SEED=n` | this seed alone |
//! | `SIM_SEEDS=n` | so many fresh ones |
//! | `SIM_MINUTES=n` | fresh ones for so long |
//! | `SIM_FROM=n` | where fresh ones begin, to repeat a hunt |
//! | `SIM_KEEP_GOING` | do not stop at the first that fails |

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    time::{Duration, Instant},
};

use ib::sw::{Rng, entropy};
use parking_lot::Mutex;

/// A number in the environment.
///
/// # Panics
/// If it is none.
pub fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable}={text}: not a number")))
}

/// The seeds of a text: one a line, `#` begins a comment.
pub fn kept(text: &str) -> Vec<u64> {
    text.lines().filter_map(|l| l.split('#').next()?.trim().parse().ok()).collect()
}

/// Seeds drawn at random from a number: short, so that they are easily told.
pub fn drawn(from: u64) -> Box<dyn Iterator<Item = u64> + Send> {
    let mut draw = Rng::new(from);
    Box::new(std::iter::from_fn(move || Some(draw.next_u64() >> 32)))
}

/// The seeds from a number on, one after the other.
pub fn counted(from: u64) -> Box<dyn Iterator<Item = u64> + Send> {
    Box::new(from..)
}

/// The first line of what a panic said.
pub fn why(panic: &(dyn Any + Send)) -> &str {
    // A message without arguments comes as a literal.
    let literal = panic.downcast_ref::<&str>().copied();
    let text = panic.downcast_ref::<String>().map(String::as_str).or(literal);
    text.and_then(|t| t.lines().next()).unwrap_or("a panic, see above")
}

/// Calls `one`, on all processors, with what the environment asks for; without, that is `kept`, and `usual` seeds that are
/// the same in every run. `order` makes fresh seeds. `one` panics if its seed fails, after it has told how to repeat it; the
/// first that fails ends it all.
///
/// # Panics
/// If one fails, and if a variable is not a number.
pub fn run(kept: &[u64], usual: u64, order: fn(u64) -> Box<dyn Iterator<Item = u64> + Send>, one: impl Fn(u64) + Sync) {
    if let Some(seed) = number("SIM_SEED") {
        return one(seed);
    }
    let (minutes, count) = (number("SIM_MINUTES"), number("SIM_SEEDS"));
    let is_fresh = minutes.is_some() || count.is_some();
    let from = number("SIM_FROM").unwrap_or_else(|| if is_fresh { entropy() >> 20 } else { 1 });
    let end = minutes.map(|m| Instant::now() + Duration::from_secs(m * 60));
    let count = count.unwrap_or(if minutes.is_some() { u64::MAX } else { usual });
    println!("SIM_FROM={from}, {} kept seeds", kept.len());
    let fresh = order(from).take(usize::try_from(count).unwrap_or(usize::MAX));
    let seeds = Mutex::new(kept.iter().copied().chain(fresh));
    let failed = Mutex::new(Vec::new());
    let keep_going = std::env::var_os("SIM_KEEP_GOING").is_some();
    std::thread::scope(|s| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |n| n.get()) {
            s.spawn(|| {
                while (keep_going || failed.lock().is_empty()) && end.is_none_or(|t| Instant::now() < t) {
                    let Some(seed) = seeds.lock().next() else { break };
                    if let Err(e) = catch_unwind(AssertUnwindSafe(|| one(seed))) {
                        failed.lock().push(format!("{seed}: {}", why(&*e)));
                    }
                }
            });
        }
    });
    let failed = failed.into_inner();
    assert!(failed.is_empty(), "{} seeds failed, see above:\n{}", failed.len(), failed.join("\n"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_seeds_come_first_and_a_failure_names_its_seed() {
        let seen = Mutex::new(Vec::new());
        run(&kept("7 # found something\n\n# none\n8"), 3, counted, |seed| seen.lock().push(seed));
        let mut seen = seen.into_inner();
        seen.sort_unstable();
        assert_eq!(seen, [1, 2, 3, 7, 8]);

        let failed = catch_unwind(|| run(&[], 3, counted, |seed| assert!(seed != 2, "two is even\nand more")));
        let text = failed.expect_err("seed 2 fails").downcast::<String>().expect("a text");
        assert_eq!(*text, "1 seeds failed, see above:\n2: two is even");
    }

    #[test]
    fn drawn_seeds_are_short_and_the_same_again() {
        let some = |from| drawn(from).take(20).collect::<Vec<_>>();
        assert_eq!(some(1), some(1));
        assert_ne!(some(1), some(2));
        assert!(some(1).iter().all(|s| *s <= u64::from(u32::MAX)));
    }
}
