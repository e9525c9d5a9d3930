//! The simulator, level two: whole worlds from a seed.
//!
//! A world has some hosts. On each there is one process after another: device, memory domain with its address-handle cache,
//! worker and interface, at the same address and, mostly, the same queue pair number. The seed draws the network and its
//! faults, the settings of every host, where PSNs and connection numbers start, what the users do, and what befalls them
//! ([`draw::Trouble`]). Then the faults stop, and everything must come to rest within a bound of virtual time.
//!
//! Start reading at [`run::Run::live`]; what must hold is in [`check`]. [`live`] runs one or many, and says how to repeat one.
//!
//! ```text
//! host.rs   a process, its clock, what its callbacks reach      draw.rs   what a seed decides beforehand
//! line.rs   an endpoint, its messages, its operations           run.rs    time, fate and users
//! wire.rs   reads all packets along                             check.rs  what must hold
//! ```
//!
//! In three worlds of four all silence together (processes that stand still, cut links, lost addresses ...) is shorter than
//! the time-out, so that an endpoint may fail only where a process or a user at either end has ended it; in the others the
//! time-out is short and the network worse, and what is checked is what was promised.

pub mod check;
pub mod draw;
pub mod host;
pub mod line;
pub mod live;
pub mod run;
pub mod wire;
