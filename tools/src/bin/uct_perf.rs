//! Measures active messages: latency, bandwidth and message rate. See `uct_perf --help` and [`uct_tools::perf`].
#![deny(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    uct_tools::perf::main(&uct_tools::registry(), &uct_tools::environment())
}
