//! What a side does between two calls of `progress` while nothing arrives.

use std::time::Duration;

use uct::Worker;

use super::{failure::Result, options::WaitMode};

/// Idle turns after which a side that spins lets other threads run between turns, if it may share its CPU with the other
/// side: two that spin would wait for each other's time slice to end.
const SPINS_SHARED: u32 = 50;
/// The same with a CPU of its own: many times longer than a message is on its way, also in an emulated machine. A call that
/// lets others run takes longer than many turns, and a message that comes meanwhile waits for its end.
const SPINS_OWN: u32 = 10_000;

/// See the module.
#[derive(Debug)]
pub(crate) struct Idle {
    mode: WaitMode,
    spins: u32,
    /// How long to sleep at most with `--wait events`: news on the control connection does not end the sleep.
    sleep: Duration,
    /// Turns in a row without an event.
    turns: u32,
}

impl Idle {
    /// `has_cpu`: no other process of the test runs on this one's CPU.
    pub(crate) fn new(mode: WaitMode, has_cpu: bool, sleep: Duration) -> Self {
        Idle { mode, spins: if has_cpu { SPINS_OWN } else { SPINS_SHARED }, sleep, turns: 0 }
    }

    pub(crate) fn mode(&self) -> WaitMode {
        self.mode
    }

    /// After a turn in which `progress` answered `events`.
    #[inline]
    pub(crate) fn turn(&mut self, worker: &Worker, events: usize) -> Result<()> {
        if events > 0 {
            self.turns = 0;
            return Ok(());
        }
        self.turns = self.turns.saturating_add(1);
        match self.mode {
            WaitMode::Spin if self.turns < self.spins => std::hint::spin_loop(),
            WaitMode::Spin | WaitMode::Yield => std::thread::yield_now(),
            WaitMode::Events => worker.wait(self.sleep)?,
        }
        Ok(())
    }
}
