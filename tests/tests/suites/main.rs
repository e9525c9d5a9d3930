//! The conformance suites, one module each: one program, because every program of its own would generate and link the whole
//! stack once more. A suite is run by its name: `cargo test -p uct-tests --test suites am::`.
//!
//! What looks at the whole process (memory, descriptors), starts others, or takes devices away has a program of its own beside
//! this directory; the random worlds (`seeds`, `storms`), too, because they are also run as release builds.

mod ah;
mod am;
mod api;
mod config;
mod connect;
mod events;
mod failure;
mod flush;
mod golden;
mod goodput;
mod handlers;
mod hazards;
mod hostile;
mod legacy_peer;
mod linger;
mod loss;
mod md;
mod mock;
mod pending;
mod reconnect;
mod threads;
mod window;
