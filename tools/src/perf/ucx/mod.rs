//! `uct_perf --ucx`: a stock `ucx_perftest` as the other side.
//!
//! UCX's program agrees on the test over TCP in a protocol of its own, then exchanges active messages over the transport.
//! Played here, both roles, the tests `am_lat` and `am_bw`:
//!
//! ```text
//! client                                    server
//!   parameters (a C struct), sizes  ──────►             task: the structs of UCX versions
//!   ◄────────────── status ───────────────►             talk: status, blob, barrier
//!   ◄──────── endpoint addresses ─────────►
//!   ◄────── barrier ─► warm-up runs, each begun by a barrier and ended by barrier and status
//!   ◄────── barrier ─► the run ◄─ barrier ►             run: the messages
//!   ◄────────────── barrier ──────────────►
//! ```
//!
//! Start reading at [`Peer::play`]. Neither side shakes hands over the network: the endpoints are connected by address.

mod peer;
mod run;
pub(super) mod talk;
pub(super) mod task;

use std::{
    io::{self, Write},
    net::TcpStream,
};

pub(crate) use task::Version;

use super::{
    failure::{Failure, Result},
    local::Local,
    options::{Layout, Options, Test},
    report::thousands,
};
use peer::{Peer, Role};
use run::Outcome;
use talk::Talk;
use task::Task;

/// What perftest runs if nobody says: here it takes a second or less.
const ITERS: u64 = 10_000;
const SIZE: usize = 8;
/// UCX's flow-control window of stream tests, the most that its 8-bit numbers allow.
const WINDOW: u32 = 127;

/// Tests with the `ucx_perftest` server at the other end of `stream`.
pub(crate) fn client(local: Local, stream: TcpStream, host: &str, o: &Options, version: Version) -> Result<()> {
    let task = plan(&local, o)?;
    let device = match (&o.ucx_device, version) {
        (Some(d), _) => d,
        (None, Version::V1_13) => {
            return Err(Failure::new(
                "a ucx_perftest server of this version takes its device from the client: name it with --ucx-device, for \
                 example --ucx-device rxe0:1",
            ));
        }
        // Later ones keep their own.
        (None, _) => "none",
    };
    let mut talk = Talk::new(stream, format!("ucx_perftest server {host}"), o.timeout)?;
    talk.send(&task.encode(version, device))?;
    let name = talk.peer().to_string();
    let mut peer = Peer::new(local, talk, Role::Client, (o.wait(), o.has_cpu()))?;
    let outcome = peer
        .play(&task)
        .map_err(|f| f.suffix(Some(format!("the server was spoken to as UCX {version}, see --ucx=VERSION"))))?;
    line(&format!("{} with {name}: {}", task.describe(), outcome.describe(&task)))?;
    if !o.final_only {
        line(&format!("{} messages arrived, each verified in number", thousands(outcome.received)))?;
        if outcome.resends > 0 {
            line(&format!("packets sent again: {}", thousands(outcome.resends)))?;
        }
    }
    Ok(())
}

/// Serves the `ucx_perftest` client at the other end of `stream`. With a version, only clients of it.
pub(crate) fn server(local: Local, stream: TcpStream, from: &str, o: &Options, version: Option<Version>) -> Result<()> {
    let mut talk = Talk::new(stream, format!("ucx_perftest client {from}"), o.timeout)?;
    let (task, version) = talk.task(version)?;
    if !o.final_only {
        line(&format!("{} speaks UCX {version} and asks for {}", talk.peer(), task.describe()))?;
    }
    let mut peer = Peer::new(local, talk, Role::Server, (o.wait(), o.has_cpu()))?;
    let Outcome { received, resends, .. } = peer.play(&task)?;
    if !o.final_only {
        let again = if resends > 0 { format!("; packets sent again: {}", thousands(resends)) } else { String::new() };
        line(&format!("done: {} messages arrived, each verified in number{again}", thousands(received)))?;
    }
    Ok(())
}

/// What a client was asked to do.
fn plan(local: &Local, o: &Options) -> Result<Task> {
    let test = match o.tests[..] {
        [t @ (Test::Lat | Test::Bw)] => t,
        [Test::Rate] => {
            return Err(Failure::new("ucx_perftest has no am_rate; -t am_bw with a small size measures the same"));
        }
        _ => {
            return Err(Failure::new(
                "a ucx_perftest server runs one test and ends: choose it with -t am_lat or -t am_bw",
            ));
        }
    };
    let limits = &local.side.limits;
    let max = limits.bcopy.or(limits.short).unwrap_or(0);
    let max = o.layout.map_or(Some(max), |l| limits.of(l)).unwrap_or(0);
    let sizes = match &o.sizes {
        Some(list) => list.resolve(max).map_err(|n| {
            let layout = o.layout.map_or(String::new(), |l| format!("{} ", l.name()));
            Failure::new(format!(
                "{n} bytes are too many: {} sends at most {max} in one {layout}message",
                local.side.transport
            ))
        })?,
        None => vec![SIZE],
    };
    let [size] = sizes[..] else {
        return Err(Failure::new("a ucx_perftest server runs one test and ends: give one size with -s"));
    };
    let layout = o.layout.unwrap_or(match limits.short {
        Some(short) if size <= short => Layout::Short,
        _ => Layout::Bcopy,
    });
    let iters = o.iters.unwrap_or(ITERS);
    Ok(Task { test, layout, size, iters, warmup: o.warmup.unwrap_or(iters.min(ITERS)), window: WINDOW })
}

fn line(text: &str) -> Result<()> {
    let mut out = io::stdout();
    writeln!(out, "{text}").and_then(|()| out.flush()).map_err(|e| Failure::output(&e))
}
