//! The second process of a self-test: this program once more, with the control connection as its standard input.
//!
//! Neither outlives the other. The connection closes with whoever dies, which the reader of the other one notices at
//! once; and dropping [`SecondProcess`] kills what is left.

use std::{
    ffi::OsString,
    io,
    os::{fd::AsFd, unix::net::UnixStream},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use super::{
    cpu::CpuArg,
    failure::{Failure, Result, plain},
    options::Options,
};

/// How long the second process may take to end by itself.
const GRACE: Duration = Duration::from_secs(2);

/// A running second process.
pub(crate) struct SecondProcess {
    child: Child,
}

impl SecondProcess {
    /// Starts it. Returns this side's end of the control connection too.
    pub(crate) fn start(o: &Options) -> Result<(SecondProcess, UnixStream)> {
        let failed = |e: io::Error| Failure::new(format!("cannot start the second process: {}", plain(&e)));
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        let program = std::env::current_exe().map_err(failed)?;
        let child = Command::new(program)
            .args(arguments(o))
            .stdin(Stdio::from(std::os::fd::OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            // This process has said it already.
            .env("UCX_WARN_UNUSED_ENV_VARS", "n")
            .spawn()
            .map_err(failed)?;
        Ok((SecondProcess { child }, ours))
    }

    /// What to call it in messages.
    pub(crate) fn name(&self) -> String {
        format!("the second process (pid {})", self.child.id())
    }

    /// Adds how it ended, if it did, to a failure that this may explain.
    pub(crate) fn explain(&mut self, f: Failure) -> Failure {
        match self.wait(GRACE / 10) {
            Some(status) if status.code() != Some(1) && !status.success() => {
                f.suffix(Some(format!("it ended with {status}")))
            }
            _ => f,
        }
    }

    fn wait(&mut self, time: Duration) -> Option<std::process::ExitStatus> {
        let deadline = Instant::now() + time;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if Instant::now() < deadline => thread::sleep(Duration::from_millis(2)),
                _ => return None,
            }
        }
    }
}

impl Drop for SecondProcess {
    fn drop(&mut self) {
        if self.wait(GRACE).is_none() {
            // It is ours and has not been waited for, so neither call can hit another process.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// The options that concern the side of the second process.
fn arguments(o: &Options) -> Vec<OsString> {
    let mut a = vec!["--second-process".into(), "--timeout".into(), o.timeout.as_secs_f64().to_string().into()];
    if let Some(d) = &o.device {
        let port = d.port.map_or(String::new(), |p| format!(":{p}"));
        a.extend(["-d".into(), format!("{}{port}", d.name).into()]);
    }
    if let Some(t) = &o.transport {
        a.extend(["-x".into(), t.into()]);
    }
    if let Some(CpuArg::These(first, Some(cpu))) = o.cpu {
        // The same one twice says that it is shared.
        let cpus = if first == cpu { format!("{cpu},{cpu}") } else { cpu.to_string() };
        a.extend(["-c".into(), cpus.into()]);
    }
    a.extend(["--wait".into(), o.wait().name().into()]);
    a
}

/// The control connection of this process, if it is a second process.
pub(crate) fn inherited() -> Result<UnixStream> {
    let fd = io::stdin().as_fd().try_clone_to_owned();
    fd.map(UnixStream::from)
        .map_err(|e| Failure::new(format!("standard input is no control connection: {}", plain(&e))))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::perf::options::WaitMode;

    #[test]
    fn the_second_process_understands_its_arguments() {
        let first = Options::parse_from([
            "uct_perf",
            "-d",
            "soft0:1",
            "-x",
            "ud",
            "--timeout",
            "3.5",
            "--wait",
            "events",
            "-c",
            "4,7",
        ]);
        let second = Options::try_parse_from(std::iter::once("uct_perf".into()).chain(arguments(&first))).unwrap();
        assert!(second.second_process);
        assert_eq!((second.device, second.transport, second.timeout), (first.device, first.transport, first.timeout));
        assert_eq!(second.cpu, Some(CpuArg::These(7, None)));
        assert_eq!(second.wait, Some(WaitMode::Events));
    }

    #[test]
    fn the_second_process_knows_whether_it_shares_its_cpu() {
        for (cpus, has_cpu) in [("4,7", true), ("4,4", false)] {
            let first = Options::parse_from(["uct_perf", "--wait", "spin", "-c", cpus]);
            let second = Options::try_parse_from(std::iter::once("uct_perf".into()).chain(arguments(&first))).unwrap();
            assert_eq!((first.has_cpu(), second.has_cpu()), (has_cpu, has_cpu), "{cpus}");
        }
    }
}
