//! bindgen 0.72 in place of the 0.59 that `rdma-sys` 0.3.0 asks for, which panics with libclang 16 and later.
//!
//! `rdma-sys` is the only user. The calls of its build script mean the same in both versions, and the layouts of the
//! bindings are checked against the C headers by a test of the crate `ib`. A patch works for this workspace only: who
//! depends on these crates from another workspace and wants the feature `rdma-core` copies the `[patch.crates-io]` lines.
pub use bindgen_072::*;
