//! The UCX process, spoken to line by line, and the network between it and us.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{Receiver, TryRecvError, channel},
    time::{Duration, Instant},
};

use uct_tests::lines::ucx::{Opened, Said};

use super::ours::Ours;

/// Where the kernel's soft-RoCE is.
const INITIAL: &str = "--net=/proc/1/ns/net";
/// Longer than the UCX process allows itself for a command.
const PATIENCE: Duration = Duration::from_secs(90);

/// A running UCX process with an open interface.
pub(crate) struct Ucx {
    child: Child,
    to: ChildStdin,
    from: Receiver<String>,
    /// Device and interface address, in hexadecimal.
    pub(crate) device: String,
    pub(crate) iface: String,
    /// Major and minor version of UCX.
    pub(crate) version: (u32, u32),
    /// Next number of each stream it sends.
    pub(crate) sent: [u32; 64],
}

impl Ucx {
    /// Starts it and opens its interface.
    pub(crate) fn start(program: &str, ours: &mut Ours) -> Result<Ucx, String> {
        let mut child = Command::new("nsenter")
            .args([INITIAL, program])
            // Before 1.19, UCX drops every packet on soft-RoCE unless this check is off.
            .env("UCX_UD_VERBS_ETH_DGID_CHECK", "n")
            .env("UCX_WARN_UNUSED_ENV_VARS", "n")
            .env("UCX_LOG_LEVEL", "warn")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| format!("cannot start {program}: {e}"))?;
        let (Some(to), Some(out)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("no pipes".into());
        };
        let (tx, from) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                if tx.send(line).is_err() {
                    break;
                }
            }
        });
        let mut ucx =
            Ucx { child, to, from, device: String::new(), iface: String::new(), version: (0, 0), sent: [0; 64] };
        let answer = ucx.ask(ours, "open rxe0:1")?;
        let Opened { device, iface, version } = Opened::parse(&answer)?;
        (ucx.device, ucx.iface, ucx.version) = (device, iface, version);
        Ok(ucx)
    }

    /// Sends a command without waiting for its answer.
    pub(crate) fn tell(&mut self, command: &str) -> Result<(), String> {
        writeln!(self.to, "{command}").and_then(|()| self.to.flush()).map_err(|e| self.gone(command, &e.to_string()))
    }

    /// Waits for an answer while our side goes on.
    pub(crate) fn answer(&mut self, ours: &mut Ours, command: &str) -> Result<String, String> {
        let end = Instant::now() + PATIENCE;
        loop {
            match self.from.try_recv() {
                Ok(line) => match Said::parse(&line) {
                    Said::Done(text) => return Ok(text.into()),
                    Said::Failed(why) => return Err(format!("UCX, asked to {command}: {why}")),
                    Said::Log(line) => println!("      ucx: {line}"),
                },
                Err(TryRecvError::Empty) => ours.step()?,
                Err(TryRecvError::Disconnected) => return Err(self.gone(command, "its output ended")),
            }
            if Instant::now() > end {
                return Err(format!("UCX hangs, asked to {command}; ours: {}", ours.tell()));
            }
        }
    }

    /// Both.
    pub(crate) fn ask(&mut self, ours: &mut Ours, command: &str) -> Result<String, String> {
        self.tell(command)?;
        self.answer(ours, command)
    }

    /// Queues `count` messages on its endpoint `ep`; the stream has the number of the endpoint.
    pub(crate) fn send(&mut self, ours: &mut Ours, ep: u32, form: &str, size: u32, count: u32) -> Result<(), String> {
        self.sent[ep as usize] += count;
        self.ask(ours, &format!("send {ep} {form} {ep} {size} {count}")).map(|_| ())
    }

    fn gone(&mut self, command: &str, why: &str) -> String {
        let status = self.child.wait().map_or_else(|e| e.to_string(), |s| s.to_string());
        format!("UCX ended ({status}), asked to {command}: {why}")
    }

    /// Closes everything in order.
    pub(crate) fn quit(mut self, ours: &mut Ours) -> Result<(), String> {
        self.ask(ours, "quit")?;
        match self.child.wait() {
            Ok(s) if s.success() => Ok(()),
            Ok(s) => Err(format!("UCX ended with {s}")),
            Err(e) => Err(e.to_string()),
        }
    }

    /// Ends it as a crash would.
    pub(crate) fn kill(mut self) -> Result<(), String> {
        self.child.kill().and_then(|()| self.child.wait()).map(|_| ()).map_err(|e| e.to_string())
    }
}

impl Drop for Ucx {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill().and_then(|()| self.child.wait());
    }
}

fn run(program: &str, args: &[&str]) -> Result<(), String> {
    let out = Command::new(program).args(args).output().map_err(|e| format!("{program}: {e}"))?;
    if out.status.success() {
        return Ok(());
    }
    Err(format!("{program} {}: {}", args.join(" "), String::from_utf8_lossy(&out.stderr).trim()))
}

/// Sets the faults of the network, in both directions; none with an empty list.
pub(crate) fn network(faults: &[&str]) -> Result<(), String> {
    let words = |dev| {
        let what: &[&str] = if faults.is_empty() { &["pfifo_fast"] } else { &["netem", "limit", "10000"] };
        [&["qdisc", "replace", "dev", dev, "root"][..], what, faults].concat()
    };
    run("tc", &words("v1"))?;
    run("nsenter", &[&[INITIAL, "tc"][..], &words("v0")].concat())
}

/// Makes the kernel's device anew, so that it hands out the same queue pair numbers again.
pub(crate) fn recreate_rxe() -> Result<(), String> {
    run("nsenter", &[INITIAL, "rdma", "link", "delete", "rxe0"])?;
    run("nsenter", &[INITIAL, "rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "v0"])?;
    let end = Instant::now() + PATIENCE;
    // Its GIDs follow the addresses of the interface, soon.
    while !std::fs::read_to_string("/sys/class/infiniband/rxe0/ports/1/gids/1")
        .is_ok_and(|g| g.contains("ffff:0a4d:0001"))
    {
        if Instant::now() > end {
            return Err("rxe0 has no GID for its address".into());
        }
        std::thread::yield_now();
    }
    Ok(())
}
