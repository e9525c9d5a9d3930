//! What the two processes of the benchmark (`src/bin/bench.rs`) say: each its [`Hello`], then one of them [`Run`]s.

use std::{fmt, net::SocketAddr};

use super::{Words, hex};

/// Where a process is: its plain UDP socket, the address of its device, that of its interface.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hello {
    /// The plain socket.
    pub raw: SocketAddr,
    /// The device.
    pub device: Vec<u8>,
    /// The interface.
    pub iface: Vec<u8>,
}

impl Hello {
    /// Reads a line.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(line: &str) -> Result<Hello, String> {
        let mut w = Words::of(line);
        let raw = w.word("socket")?;
        let raw = raw.parse().map_err(|_| format!("{raw:?} is no address of a socket"))?;
        let hello = Hello { raw, device: w.bytes("device address")?, iface: w.bytes("interface address")? };
        w.end()?;
        Ok(hello)
    }
}

impl fmt::Display for Hello {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.raw, hex(&self.device), hex(&self.iface))
    }
}

/// What is measured.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum What {
    /// There and back over plain sockets.
    RawLatency,
    /// There and back over UD.
    UdLatency,
    /// As many as go over plain sockets.
    RawRate,
    /// As many as go over UD.
    UdRate,
    /// Nothing: the peer answers handshakes until a message says that it was the last.
    Serve,
}

const WORDS: [(What, &str); 5] = [
    (What::RawLatency, "raw_latency"),
    (What::UdLatency, "ud_latency"),
    (What::RawRate, "raw_rate"),
    (What::UdRate, "ud_rate"),
    (What::Serve, "serve"),
];

/// A run: what, and how often.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Run {
    /// What.
    pub what: What,
    /// How often.
    pub count: u64,
}

impl Run {
    /// Reads a line.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(line: &str) -> Result<Run, String> {
        let mut w = Words::of(line);
        let word = w.word("command")?;
        let what = WORDS.iter().find(|(_, name)| *name == word).ok_or_else(|| format!("unknown command {word:?}"))?.0;
        let run = Run { what, count: w.number("count")? };
        w.end()?;
        Ok(run)
    }
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = WORDS.iter().find(|(what, _)| *what == self.what).map_or("", |w| w.1);
        write!(f, "{name} {}", self.count)
    }
}
