//! The progress display: one line on the terminal, gone when the results are there.

use std::{fmt, io::IsTerminal};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

/// Steps of the bar per test and size.
const STEPS: u64 = 1000;

/// Shows how far the runs are, if somebody can see it.
pub(crate) struct Display {
    bar: ProgressBar,
    runs: u64,
}

impl Display {
    /// A display of `count` runs. Nothing is shown if standard error is no terminal, or with `quiet`.
    pub(crate) fn new(count: usize, quiet: bool) -> Self {
        let target = if quiet || !std::io::stderr().is_terminal() {
            ProgressDrawTarget::hidden()
        } else {
            ProgressDrawTarget::stderr()
        };
        let bar = ProgressBar::with_draw_target(Some(count as u64 * STEPS), target);
        if let Ok(style) = ProgressStyle::with_template("{bar:30.cyan} {percent:>3}%  {msg}  {left}") {
            let left = |s: &ProgressState, w: &mut dyn fmt::Write| {
                // There is no estimate before the first step. What cannot be drawn is left out.
                if s.pos() > 0 {
                    let _ = write!(w, "{} s left", s.eta().as_secs());
                }
            };
            bar.set_style(style.progress_chars("━╸─").with_key("left", left));
        }
        Display { bar, runs: 0 }
    }

    /// A run starts.
    pub(crate) fn start(&self, what: String) {
        self.bar.set_message(what);
    }

    /// The current run has come this far, from 0 to 1.
    pub(crate) fn tick(&self, part: f64) {
        self.bar.set_position(self.runs * STEPS + (part * STEPS as f64) as u64);
    }

    /// The current run is done.
    pub(crate) fn done(&mut self) {
        self.runs += 1;
        self.bar.set_position(self.runs * STEPS);
    }

    /// Takes the line away while `f` writes to the terminal.
    pub(crate) fn aside<R>(&self, f: impl FnOnce() -> R) -> R {
        self.bar.suspend(f)
    }
}

impl Drop for Display {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
