//! Whole worlds from a seed: see `uct_tests::worlds`.
//!
//! ```text
//! cargo test -p uct-tests --test worlds                 kept seeds and a few more, the same in every run
//! SIM_SEED=1234 cargo test -p uct-tests --test worlds   this one; SIM_TRACE=2000 shows more of its packets
//! ci/sim --minutes 10                                   fresh ones for ten minutes
//! ```

use uct_tests::{
    hunt,
    worlds::live::{self, live},
};

/// Seeds of a run that asks for none.
const USUAL: u64 = if cfg!(debug_assertions) { 60 } else { 1000 };

mod sim {
    use super::*;

    /// The name that a failure says to repeat.
    #[test]
    fn worlds() {
        live::hunt(&hunt::kept(include_str!("worlds.txt")), USUAL);
    }

    /// To the bit: all packets and their times.
    #[test]
    fn one_seed_gives_one_world() {
        for seed in [1, 2, 3] {
            assert_eq!(live(seed), live(seed), "world {seed}");
        }
    }
}
