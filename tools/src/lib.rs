//! The command-line tools of the workspace, as a library so that they can be tested.
//!
//! `uct_perf` is [`perf`], `uct_info` is [`info`]. [`registry`] is the one place that names every component and transport:
//! a linker drops crates that nobody refers to, so they are added by explicit calls.
#![deny(missing_docs)]
#![deny(unsafe_code)]

pub mod info;
pub mod perf;

use uct::{Registry, config::Env};

/// Every component and transport of the workspace, and their settings.
pub fn registry() -> Registry {
    let mut registry = Registry::new();
    ib::component::register(&mut registry);
    ud::register(&mut registry);
    registry
}

/// The settings of this process.
pub fn environment() -> Env {
    Env::process()
}
