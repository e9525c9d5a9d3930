//! `uct_perf`: measures active messages between two processes.
//!
//! ```text
//!            options ──► mod: which role?
//!                         │
//!        ┌────────────────┼──────────────────┐
//!     self-test         client             server
//!   (second: starts    (link: connects)   (link: listens)
//!    one more of us)      │                  │
//!        └────────► client.rs ◄─ control ─► server.rs
//!                         │     (message)    │
//!                       bench ◄─ messages ─► bench      over session (endpoint, progress) and
//!                         │     (payload)    │          sender (layouts)
//!                      report, display
//! ```
//!
//! Start reading at `session` (what a connected side can do) and `bench` (the tests). What is verified, and how, is in
//! `payload`; what the two sides say to each other beside the test is in `message`.

mod alert;
mod bench;
mod client;
mod cpu;
mod display;
mod failure;
#[cfg(test)]
mod fake;
#[cfg(any(test, uct_fuzz))]
pub mod fuzz;
mod hist;
mod idle;
mod link;
mod local;
mod message;
mod options;
mod payload;
mod report;
mod second;
mod sender;
mod server;
mod session;
mod sizes;
#[cfg(test)]
mod tests;
mod ucx;

use std::{
    io::{self, Write},
    process::ExitCode,
    sync::Arc,
};

use clap::Parser;
use uct::{Registry, config::Env};

use alert::Alert;
use cpu::CpuArg;
use failure::{Failure, Result, clean, plain};
use link::{Link, LinkParams, Stream};
use local::Local;
use message::{Message, Side};
use options::{ConnectMode, Options};
use second::SecondProcess;
use server::Served;
use session::{Manner, Session};
use ucx::Version;

/// The program: reads the command line, runs, and prints. One line on standard error tells a failure, with exit status 1;
/// 2 is for a command line that makes no sense.
pub fn main(registry: &Registry, env: &Env) -> ExitCode {
    let options = match Options::try_parse() {
        Ok(o) => o,
        Err(e) => {
            // Help and version are "errors" of this kind too. If they cannot be printed, nobody can be told.
            let _ = e.print();
            return ExitCode::from(u8::try_from(e.exit_code()).unwrap_or(2));
        }
    };
    let mut ctx = Context { registry, env, options };
    let ready = uct::log::init(env).map_err(Failure::from).and_then(|()| ctx.bind());
    let result = if ready.is_err() {
        ready
    } else if ctx.options.second_process {
        ctx.second_process()
    } else if ctx.options.server {
        ctx.serve()
    } else if let Some(host) = ctx.options.host.clone() {
        ctx.visit(&host)
    } else if ctx.options.ucx.is_some() {
        Err(Failure::new(
            "--ucx needs the other side: the host of a ucx_perftest server, or --server to wait for a client",
        ))
    } else {
        ctx.self_test()
    };
    match result {
        Ok(()) | Err(Failure::BrokenPipe) => ExitCode::SUCCESS,
        Err(Failure::Text(t)) => {
            if !ctx.options.second_process {
                let _ = writeln!(io::stderr(), "uct_perf: {t}");
            }
            ExitCode::FAILURE
        }
    }
}

struct Context<'a> {
    registry: &'a Registry,
    env: &'a Env,
    options: Options,
}

impl Context<'_> {
    /// Takes this process to the CPU it is meant for, before there are other threads.
    fn bind(&mut self) -> Result<()> {
        let o = &mut self.options;
        // It depends on the number of CPUs, which is one afterwards.
        o.wait = Some(o.wait());
        let self_test = o.host.is_none() && !o.server && !o.second_process;
        match o.cpu {
            None if self_test => {
                // Where the system does not allow it, or with one CPU, it does without.
                let mine = |(a, b)| cpu::bind(a).ok().map(|()| CpuArg::These(a, Some(b)));
                o.cpu = cpu::pair(None).and_then(mine);
                Ok(())
            }
            None | Some(CpuArg::Any) => Ok(()),
            Some(CpuArg::These(cpu, second)) => {
                // The second process would inherit this one's only CPU.
                let second = second.or_else(|| self_test.then(|| cpu::pair(Some(cpu))).flatten().map(|p| p.1));
                o.cpu = Some(CpuArg::These(cpu, second));
                cpu::bind(cpu)
            }
        }
    }

    fn manner(&self) -> Manner {
        Manner { wait: self.options.wait(), has_cpu: self.options.has_cpu(), timeout: self.options.timeout }
    }

    fn open(&self, transport: Option<&str>, alert: &Arc<Alert>) -> Result<Local> {
        let mut local = Local::open(self.registry, self.env, transport, self.options.device.as_ref(), alert.clone())?;
        if let Some(CpuArg::These(cpu, _)) = self.options.cpu {
            local.side.cpu = Some(cpu);
        }
        Ok(local)
    }

    fn link_params(&self, peer: String, alert: &Arc<Alert>) -> LinkParams {
        LinkParams { peer, timeout: self.options.timeout, bound_to_peer: false, alert: alert.clone() }
    }

    /// Both sides on this host.
    fn self_test(&self) -> Result<()> {
        let alert = Arc::new(Alert::default());
        // First, so that what is wrong with this host is told once and without a second process.
        let local = self.open(self.options.transport.as_deref(), &alert)?;
        let (mut second, stream) = SecondProcess::start(&self.options)?;
        let run = || {
            let link = Link::open(Stream::Local(stream), self.link_params(second.name(), &alert))?;
            self.client(local, link, true)
        };
        run().map_err(|f| second.explain(f))
    }

    /// The client of a server elsewhere.
    fn visit(&self, host: &str) -> Result<()> {
        let alert = Arc::new(Alert::default());
        let local = self.open(self.options.transport.as_deref(), &alert)?;
        let port = self.options.port;
        let stream = link::connect(host, port, self.options.timeout)?;
        if let Some(version) = self.options.ucx {
            return ucx::client(local, stream, host, &self.options, version.unwrap_or(Version::NEWEST));
        }
        let link = Link::open(Stream::Tcp(stream), self.link_params(format!("{host} port {port}"), &alert))?;
        self.client(local, link, false)
    }

    fn client(&self, local: Local, link: Link, self_test: bool) -> Result<()> {
        let mut session = Session::new(local, link, self.manner())?;
        let out = io::BufWriter::new(io::stdout());
        let result = client::run(&mut session, &self.options, self_test, out);
        session.end(result)
    }

    /// The server of one client.
    fn serve(&self) -> Result<()> {
        // What is wrong with this host is told now, not when the client comes.
        let alert = Arc::new(Alert::default());
        let local = self.open(self.options.transport.as_deref(), &alert)?;
        let listener = link::listen(self.options.port)?;
        let at = listener.local_addr().map_err(|e| Failure::new(format!("no address to listen on: {}", plain(&e))))?;
        say(&format!("listening on {at}"))?;
        let (stream, from) =
            listener.accept().map_err(|e| Failure::new(format!("cannot accept a client: {}", plain(&e))))?;
        drop(listener);
        if let Some(version) = self.options.ucx {
            return ucx::server(local, stream, &from.ip().to_canonical().to_string(), &self.options, version);
        }
        let peer = format!("client {}", from.ip().to_canonical());
        let link = Link::open(Stream::Tcp(stream), self.link_params(peer.clone(), &alert))?;
        let served = self.server(Some(local), link, &alert, &mut |client: &Side, ours: &Side| {
            if self.options.final_only {
                return Ok(());
            }
            say(&format!(
                "{peer} ({} pid {}, {}) over {} on {} ({})",
                clean(&client.host),
                client.pid,
                clean(&client.device),
                ours.transport,
                ours.device,
                ours.address
            ))
        })?;
        if self.options.final_only {
            return Ok(());
        }
        let messages = report::thousands(served.messages);
        say(&format!("done: {} runs, {messages} messages arrived, each verified in number and content", served.runs))
    }

    /// The other half of [`Context::self_test`]. Silent: what happens is told to the first process.
    fn second_process(&self) -> Result<()> {
        let alert = Arc::new(Alert::default());
        let mut params = self.link_params("the first process".into(), &alert);
        params.bound_to_peer = true;
        let link = Link::open(Stream::Local(second::inherited()?), params)?;
        self.server(None, link, &alert, &mut |_, _| Ok(())).map(|_| ())
    }

    fn server(
        &self,
        local: Option<Local>,
        mut link: Link,
        alert: &Arc<Alert>,
        hello: &mut dyn FnMut(&Side, &Side) -> Result<()>,
    ) -> Result<Served> {
        let (client, mode) = first_message(&mut link, self.options.timeout)?;
        let local = match local {
            // With -x, a client of another transport is refused by `server::run`.
            Some(l) if l.side.transport == client.transport || self.options.transport.is_some() => Ok(l),
            // The transport of a server that names none is the client's choice.
            other => {
                drop(other);
                self.open(Some(&client.transport), alert)
            }
        };
        let local = match local {
            Ok(l) => l,
            Err(f) => {
                // The client prints it as well; if it is gone, this side still does.
                let _ = link.send(&Message::Abort { reason: f.to_string() });
                return Err(f);
            }
        };
        let mut session = Session::new(local, link, self.manner())?;
        let result = hello(&client, &session.local.side).and_then(|()| server::run(&mut session, &client, mode));
        session.end(result)
    }
}

/// Waits for the client's setup, with nothing to progress yet.
fn first_message(link: &mut Link, timeout: std::time::Duration) -> Result<(Side, ConnectMode)> {
    match link.wait(timeout)? {
        Some(Message::Setup { side, connect }) => Ok((*side, connect)),
        Some(m) => Err(Failure::new(format!("{} sent `{}` where `setup` was due", link.peer(), m.name()))),
        None => Err(Failure::new(format!(
            "{} connected and asked for nothing within {:.1} s",
            link.peer(),
            timeout.as_secs_f64()
        ))),
    }
}

/// One line of a server, which has no results to print.
fn say(line: &str) -> Result<()> {
    let mut out = io::stdout();
    writeln!(out, "{line}").and_then(|()| out.flush()).map_err(|e| Failure::output(&e))
}
