//! Settings: UCX's environment variables, with UCX's names, precedence, units and defaults.
//!
//! Start reading at [`config_table!`](crate::config_table), which declares a table of settings and the struct that holds
//! their values in one place. The pieces:
//!
//! - [`Env`] is where values come from: built-in defaults < `ucx.conf` files < environment variables < values set by the
//!   program. It is passed in, so tests never touch the environment of the process.
//! - A [`Table`] is a list of [`Field`]s; a [`Scope`] says under which prefixes a transport reads it. Of
//!   `["IB_", "UD_", "UD_VERBS_"]` the later wins: `UCX_UD_SEG_SIZE` beats `UCX_IB_SEG_SIZE`.
//! - A [`Value`] is a type that parses from text and prints so that it parses to the same value again.
//! - A [`Catalog`] knows all tables of a program: it lists every setting with value and origin, tells what differs from the
//!   default, and finds variables that nobody reads.
//!
//! Values are read once, when a device or an interface is opened. A value that does not parse is an
//! [`InvalidConfig`](crate::ErrorKind::InvalidConfig) error that names the variable, the value and what is accepted;
//! there is no silent fall-back to the default.

mod catalog;
mod env;
mod known;
mod list;
mod process;
mod table;
mod value;

pub use catalog::{Catalog, Listed, Section, Setting, Unknown};
pub use env::{Env, Origin};
pub(crate) use known::first_time;
pub use list::{AllowList, DeviceFilter, RangeList, TransportFilter};
pub use process::{LogLevel, ProcessConfig};
pub use table::{Field, Scope, Table};
pub use value::{Bytes, BytesAuto, Hex, Ternary, TernaryAuto, Units, Value, choices};

#[cfg(test)]
mod tests;
