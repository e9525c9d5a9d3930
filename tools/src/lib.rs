//! The command-line tools of the workspace, as a library so that they can be tested.
//!
//! `uct_perf` is [`perf`], `uct_info` is [`info`]. [`registry`] is the one place that names every component and transport:
//! a linker drops crates that nobody refers to, so they are added by explicit calls.
#![deny(missing_docs)]
#![deny(unsafe_code)]

pub mod info;
pub mod perf;
mod sys;

use uct::{Registry, WorkerParams, config::Env};

/// Every component and transport of the workspace, and their settings.
pub fn registry() -> Registry {
    let mut registry = Registry::new();
    ib::component::register(&mut registry);
    ud::register(&mut registry);
    registry
}

/// How a worker is made that the settings are for.
///
/// # Errors
/// `InvalidConfig` for a value that does not parse.
pub fn worker_params(env: &Env) -> uct::Result<WorkerParams> {
    ud::worker_params(env)
}

/// The settings of this process.
pub fn environment() -> Env {
    Env::process()
}
