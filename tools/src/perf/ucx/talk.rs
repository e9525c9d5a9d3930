//! The TCP connection to a `ucx_perftest`: exact numbers of bytes, never blocking, so that the transport can be progressed
//! while the peer lets one wait.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use super::{
    super::failure::{Failure, Result, plain},
    task::{Found, Task, Version, unknown},
};

/// The word of a barrier.
const BARRIER: u32 = 0xdead_beef;
/// UCX's limit for a blob.
const BLOB_MAX: usize = 4096;
/// A client whose parameters are not complete, and who sends no more for so long, is of an unknown version.
const QUIET: Duration = Duration::from_secs(1);

/// What was received and not yet taken.
#[derive(Default)]
pub(crate) struct Unread(Vec<u8>);

impl Unread {
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Takes `n` bytes, if they are there.
    fn take(&mut self, n: usize) -> Option<Vec<u8>> {
        (self.0.len() >= n).then(|| self.0.drain(..n).collect())
    }

    /// Takes a barrier. `Err`: what `peer` did, for people.
    pub(crate) fn barrier(&mut self, peer: &str) -> Result<Option<()>> {
        let Some(word) = self.take(4) else { return Ok(None) };
        if word == BARRIER.to_le_bytes() {
            return Ok(Some(()));
        }
        Err(Failure::new(format!("{peer} sent {word:02x?} where a barrier was due: the two sides are out of step")))
    }

    /// Takes a blob. `Err`: what `peer` did, for people.
    pub(crate) fn blob(&mut self, peer: &str) -> Result<Option<Vec<u8>>> {
        let Some(len) = self.0.first_chunk() else { return Ok(None) };
        let len = u64::from_le_bytes(*len);
        let Some(len) = usize::try_from(len).ok().filter(|&n| n <= BLOB_MAX) else {
            return Err(Failure::new(format!(
                "{peer} announced {len} bytes, at most {BLOB_MAX} are possible: the two sides are out of step"
            )));
        };
        Ok(self.take(8 + len).map(|mut b| b.split_off(8)))
    }
}

/// A blob as it travels.
pub(crate) fn packed_blob(bytes: &[u8]) -> Vec<u8> {
    let mut all = (bytes.len() as u64).to_le_bytes().to_vec();
    all.extend_from_slice(bytes);
    all
}

/// The connection, and what was received and not yet taken.
pub(crate) struct Talk {
    stream: TcpStream,
    peer: String,
    timeout: Duration,
    have: Unread,
    closed: bool,
}

impl Talk {
    pub(crate) fn new(stream: TcpStream, peer: String, timeout: Duration) -> Result<Talk> {
        let talk = Talk { stream, peer, timeout, have: Unread::default(), closed: false };
        // Each barrier is a small segment that the peer waits for.
        let set = talk.stream.set_nodelay(true).and_then(|()| talk.stream.set_nonblocking(true));
        set.map_err(|e| talk.failed(&e))?;
        Ok(talk)
    }

    /// What to call the peer in messages.
    pub(crate) fn peer(&self) -> &str {
        &self.peer
    }

    /// How long the peer may be silent.
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    fn failed(&self, e: &io::Error) -> Failure {
        Failure::new(format!("the control connection to {} failed: {}", self.peer, plain(e)))
    }

    /// That the peer went away while `what` was due.
    pub(crate) fn gone(&self, what: &str) -> Failure {
        Failure::new(format!(
            "{} closed the control connection where {what} was due; its own output says why",
            self.peer
        ))
    }

    /// Sends a few bytes. They fit into the socket's memory, since a peer is never more than one step behind.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> Result<()> {
        self.stream.write_all(bytes).map_err(|e| self.failed(&e))
    }

    /// Reads what there is.
    pub(crate) fn poll(&mut self) -> Result<()> {
        let mut chunk = [0; 1024];
        // A peer that sends more than the protocol has waits, in the socket.
        while !self.closed && self.have.len() < BLOB_MAX + 64 {
            match self.stream.read(&mut chunk) {
                Ok(0) => self.closed = true,
                Ok(n) => self.have.push(&chunk[..n]),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                // What it sent before still counts.
                Err(e) if e.kind() == io::ErrorKind::ConnectionReset => self.closed = true,
                Err(e) => return Err(self.failed(&e)),
            }
        }
        Ok(())
    }

    /// Whether the peer closed the connection and nothing of what it sent is left.
    pub(crate) fn is_over(&self) -> bool {
        self.closed && self.have.len() == 0
    }

    /// Takes a barrier.
    pub(crate) fn barrier(&mut self) -> Result<Option<()>> {
        self.have.barrier(&self.peer)
    }

    /// Takes a blob.
    pub(crate) fn blob(&mut self) -> Result<Option<Vec<u8>>> {
        self.have.blob(&self.peer)
    }

    pub(crate) fn send_barrier(&mut self) -> Result<()> {
        self.send(&BARRIER.to_le_bytes())
    }

    pub(crate) fn send_blob(&mut self, bytes: &[u8]) -> Result<()> {
        self.send(&packed_blob(bytes))
    }

    /// Waits for the parameters of a client; there is nothing to progress yet.
    pub(crate) fn task(&mut self, only: Option<Version>) -> Result<(Task, Version)> {
        let refused = |peer: &str, why: String| Failure::new(format!("{peer} is refused: {why}"));
        let mut news = Instant::now();
        let mut seen = 0;
        loop {
            self.poll()?;
            if self.have.len() > seen || self.closed {
                (seen, news) = (self.have.len(), Instant::now());
                match Task::recognise(&self.have.0, only).map_err(|why| refused(&self.peer, why))? {
                    Found::Task(task, version, len) => {
                        self.have.0.drain(..len);
                        return Ok((task, version));
                    }
                    Found::Unknown if seen > Task::LEN_MAX => return Err(refused(&self.peer, unknown(seen, only))),
                    Found::Unknown if self.closed => return Err(self.gone("its parameters")),
                    Found::Unknown => {}
                }
            }
            if seen > 0 && news.elapsed() > QUIET.min(self.timeout) {
                return Err(refused(&self.peer, unknown(seen, only)));
            }
            if news.elapsed() > self.timeout {
                return Err(Failure::new(format!(
                    "{} connected and sent nothing within {:.1} s",
                    self.peer,
                    self.timeout.as_secs_f64()
                )));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[cfg(test)]
#[path = "talk_tests.rs"]
mod tests;
