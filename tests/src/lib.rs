//! Conformance suites, the simulator's world, and what they share.
//!
//! A test is a function generic over a [`Fabric`](fabric::Fabric); [`on_fabrics!`] makes one `#[test]` of it for the simulated device,
//! one for the soft device and, with the feature `rdma-core`, one for the RDMA device of the machine. Start reading at [`world`].
#![deny(missing_docs)]
#![deny(unsafe_code)]

pub mod check;
pub mod fabric;
pub mod fd;
pub mod flow;
pub mod hooks;
pub mod hunt;
pub mod lines;
pub mod log;
pub mod memory;
pub mod packets;
pub mod procs;
pub mod raw;
#[cfg(feature = "rdma-core")]
pub mod rdma;
pub mod teardown;
pub mod world;
pub mod worlds;

/// Instantiates generic tests: for each `name` there must be `fn name<F: Fabric>(w: World<F>)` in scope.
///
/// ```text
/// on_fabrics! { sim, soft; am_short_all_sizes, am_bcopy_all_sizes }
/// ```
#[macro_export]
macro_rules! on_fabrics {
    (sim, soft; $($name:ident),+ $(,)?) => {
        $crate::on_fabrics! { sim; $($name),+ }
        $crate::on_fabrics! { soft; $($name),+ }
        $crate::on_fabrics! { rdma; $($name),+ }
    };
    (sim, soft; $($name:ident),+ $(,)?; only sim; $($alone:ident),+ $(,)?) => {
        $crate::on_fabrics! { sim; $($name,)+ $($alone),+ }
        $crate::on_fabrics! { soft; $($name),+ }
        $crate::on_fabrics! { rdma; $($name),+ }
    };
    (sim, soft; $($name:ident),+ $(,)?; only soft; $($alone:ident),+ $(,)?) => {
        $crate::on_fabrics! { sim; $($name),+ }
        $crate::on_fabrics! { soft; $($name,)+ $($alone),+ }
        $crate::on_fabrics! { rdma; $($name),+ }
    };
    (sim; $($name:ident),+ $(,)?) => {
        mod sim {
            $(#[test] fn $name() { super::$name($crate::world::World::<$crate::fabric::Sim>::new(stringify!($name))) })+
        }
    };
    (soft; $($name:ident),+ $(,)?) => {
        mod soft {
            $(#[test] fn $name() { super::$name($crate::world::World::<$crate::fabric::Soft>::new(stringify!($name))) })+
        }
    };
    (rdma; $($name:ident),+ $(,)?) => {
        #[cfg(feature = "rdma-core")]
        mod rdma {
            $(#[test] fn $name() { $crate::rdma::run(stringify!($name), super::$name) })+
        }
    };
}
