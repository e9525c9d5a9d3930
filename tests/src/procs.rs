//! [`Peer`]: a process of `src/bin/peer.rs`, for tests about processes.

use std::{
    io::{BufRead, BufReader, Read, Write},
    process::{Child, ChildStdin, Command, ExitStatus, Stdio},
    sync::mpsc::{Receiver, channel},
    time::Duration,
};

use crate::lines::{
    hex,
    peer::{Answer, Command as Ask},
};

/// An answer that takes longer will not come.
const PATIENCE: Duration = Duration::from_secs(120);

/// A process. It is killed if the test ends before it.
pub struct Peer {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
    errors: Receiver<String>,
    /// Its two addresses, as `connect` takes them.
    pub addr: String,
}

impl Peer {
    /// Starts `program`, behind the words of `wrap` if there are any (`ip netns exec NAME`), with these settings.
    ///
    /// # Errors
    /// What it said on its standard error, if it did not get as far as having an address.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn start(program: &str, wrap: &[&str], settings: &[(&str, &str)]) -> Result<Peer, String> {
        let words: Vec<&str> = wrap.iter().copied().chain([program]).collect();
        let mut child = Command::new(words[0])
            .args(&words[1..])
            .env("UCX_LOG_LEVEL", "warn")
            .envs(settings.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the peer starts");
        let stdin = child.stdin.take().expect("a pipe");
        let stdout = BufReader::new(child.stdout.take().expect("a pipe"));
        let (tx, lines) = channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if tx.send(line).is_err() {
                    break;
                }
            }
        });
        let mut stderr = child.stderr.take().expect("a pipe");
        let (tx, errors) = channel();
        std::thread::spawn(move || {
            let mut said = String::new();
            let _partly = stderr.read_to_string(&mut said);
            let _unwanted = tx.send(said);
        });
        let mut peer = Peer { child, stdin, lines, errors, addr: String::new() };
        match peer.try_ask(&Ask::Addr.to_string()) {
            Some(answer) => match Answer::parse(&answer)? {
                Answer::Addr(device, iface) => {
                    peer.addr = format!("{} {}", hex(&device), hex(&iface));
                    Ok(peer)
                }
                other => Err(format!("asked for its addresses: {other}")),
            },
            None => Err(peer.end().1),
        }
    }

    /// Says a line to it.
    ///
    /// # Panics
    /// If it is gone.
    pub fn tell(&mut self, line: &str) {
        if writeln!(self.stdin, "{line}").and_then(|()| self.stdin.flush()).is_err() {
            panic!("the peer is gone: {}", self.end().1);
        }
    }

    /// The next line it says.
    ///
    /// # Panics
    /// If there is none, with what it said on its standard error.
    pub fn answer(&mut self) -> String {
        match self.next_line() {
            Some(line) => line,
            None => panic!("the peer is gone, or hangs: {}", self.end().1),
        }
    }

    fn next_line(&mut self) -> Option<String> {
        self.lines.recv_timeout(PATIENCE).ok()
    }

    fn try_ask(&mut self, line: &str) -> Option<String> {
        // That it is gone shows in the answer.
        let _gone = writeln!(self.stdin, "{line}").and_then(|()| self.stdin.flush());
        self.next_line()
    }

    /// Says a line and waits for the answer.
    pub fn ask(&mut self, line: &str) -> String {
        self.tell(line);
        self.answer()
    }

    /// The value of a counter of its interface or memory domain.
    ///
    /// # Panics
    /// If there is none of that name.
    pub fn counter(&mut self, name: &str) -> u64 {
        match Answer::parse(&self.ask(&Ask::Counter(name.into()).to_string())) {
            Ok(Answer::Counter(value)) => value,
            other => panic!("asked for the counter {name}: {other:?}"),
        }
    }

    /// Connects it to another.
    pub fn connect(&mut self, to: &Peer) -> String {
        self.ask(&format!("connect {}", to.addr))
    }

    /// Sends it a signal, by name.
    ///
    /// # Panics
    /// If that fails.
    pub fn signal(&self, name: &str) {
        let done = Command::new("kill").args([&format!("-{name}"), &self.child.id().to_string()]).status();
        assert!(done.expect("kill runs").success());
    }

    /// Kills it and waits for that.
    ///
    /// # Panics
    /// If that fails.
    pub fn kill(&mut self) {
        self.child.kill().expect("kill");
        self.child.wait().expect("a status");
    }

    /// Waits for its end, which it gets if it does not come by itself; returns its status and what it said on its standard
    /// error.
    ///
    /// # Panics
    /// If it cannot be waited for.
    pub fn end(&mut self) -> (ExitStatus, String) {
        let errors = self.errors.recv_timeout(PATIENCE);
        let _ended = self.child.kill();
        let status = self.child.wait().expect("a status");
        // One that hangs says the rest when it is killed.
        let errors = errors.or_else(|_| self.errors.recv()).unwrap_or_default();
        (status, errors)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
