//! Plays with a UCX process what its perftest does not: connections by interface address, crossing ones, zero copy, loss and
//! reordering, either side destroying first, restarts. Neither side may abort, hang, or lose a message.
//!
//! The UCX process is `ci/interop/uct_peer.c` on the kernel's soft-RoCE in the initial network namespace; this one runs in
//! namespace `soft` of `ci/soft-roce`, on a soft device. `ci/interop/ucx-libuct` starts it. Start reading at `scenarios`.
#![deny(unsafe_code)]

mod ours;
mod scenarios;
mod ucx;

use std::{process::ExitCode, time::Instant};

use clap::Parser;

/// Plays scenarios with a UCX process.
#[derive(Parser)]
struct Options {
    /// Program of the UCX side
    #[arg(long, value_name = "FILE")]
    peer: String,
    /// Only the scenarios whose names contain this
    #[arg(value_name = "WORDS")]
    only: Option<String>,
    /// Names the scenarios and ends
    #[arg(long)]
    list: bool,
}

fn main() -> ExitCode {
    let o = Options::parse();
    let mut failed = 0;
    let all: Vec<_> =
        scenarios::ALL.iter().filter(|(name, _)| o.only.as_ref().is_none_or(|w| name.contains(w.as_str()))).collect();
    if all.is_empty() {
        println!("no scenario has `{}` in its name, see --list", o.only.unwrap_or_default());
        return ExitCode::FAILURE;
    }
    for (name, play) in &all {
        if o.list {
            println!("{name}");
            continue;
        }
        let began = Instant::now();
        let outcome = ucx::network(&[]).and_then(|()| play(&o.peer));
        // The next one starts on a network without faults, whatever became of this one.
        let mended = ucx::network(&[]);
        let seconds = began.elapsed().as_secs();
        match outcome.and_then(|said| mended.map(|()| said)) {
            Ok(said) if said.is_empty() => println!("ok    {name}  [{seconds} s]"),
            Ok(said) => println!("ok    {name}, {said}  [{seconds} s]"),
            Err(why) => {
                failed += 1;
                println!("FAIL  {name}  [{seconds} s]\n      {}", why.replace('\n', "\n      "));
            }
        }
    }
    if failed > 0 {
        println!("{failed} of {} scenarios FAILED", all.len());
        return ExitCode::FAILURE;
    }
    if !o.list {
        println!("all {} scenarios ok", all.len());
    }
    ExitCode::SUCCESS
}
