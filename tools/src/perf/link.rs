//! The control connection: one stream between the two processes, watched all the time.
//!
//! A thread of its own reads it, so that a message, garbage or the death of the peer raises the [`Alert`] at once, also in
//! the middle of a measurement; while nothing happens that thread sleeps and costs nothing. See
//! [`message`](super::message) for the bytes.

use std::{
    io::{self, Read, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs},
    os::unix::net::UnixStream,
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, TryRecvError, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    alert::Alert,
    failure::{Failure, Result, clean, plain},
    message::{FRAME_MAX, MAGIC, Message, PREAMBLE_LEN, PROTOCOL, VERSION, preamble},
};

/// Frames the reader holds for the main thread; more wait in the socket.
const QUEUE: usize = 16;
/// For a connection and for the first bytes on it; never more than the time-out that the user set.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a second process may take to end by itself after its parent is gone.
const ORPHAN_GRACE: Duration = Duration::from_secs(3);

/// A connected stream of bytes.
pub(crate) enum Stream {
    /// Between hosts.
    Tcp(TcpStream),
    /// To the second process of a self-test.
    Local(UnixStream),
}

impl Stream {
    fn try_clone(&self) -> io::Result<Stream> {
        Ok(match self {
            Stream::Tcp(s) => Stream::Tcp(s.try_clone()?),
            Stream::Local(s) => Stream::Local(s.try_clone()?),
        })
    }

    fn set_read_timeout(&self, t: Option<Duration>) -> io::Result<()> {
        match self {
            Stream::Tcp(s) => s.set_read_timeout(t),
            Stream::Local(s) => s.set_read_timeout(t),
        }
    }

    fn set_write_timeout(&self, t: Option<Duration>) -> io::Result<()> {
        match self {
            Stream::Tcp(s) => s.set_write_timeout(t),
            Stream::Local(s) => s.set_write_timeout(t),
        }
    }

    fn shutdown(&self) {
        // It may be closed already, which is what is wanted.
        let _ = match self {
            Stream::Tcp(s) => s.shutdown(Shutdown::Both),
            Stream::Local(s) => s.shutdown(Shutdown::Both),
        };
    }
}

impl Read for Stream {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(s) => s.read(buf),
            Stream::Local(s) => s.read(buf),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(s) => s.write(buf),
            Stream::Local(s) => s.write(buf),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What the reader found.
enum News {
    Message(Message),
    /// The connection is of no more use, for this reason.
    Lost(String),
}

/// The control connection of one side.
pub(crate) struct Link {
    stream: Stream,
    news: Receiver<News>,
    peer: String,
    lost: Option<String>,
}

/// How to open a [`Link`].
pub(crate) struct LinkParams {
    /// What to call the peer in messages, for example `host7 port 13337`.
    pub(crate) peer: String,
    /// How long the peer may take to say who it is.
    pub(crate) timeout: Duration,
    /// Whether this process shall not outlive the connection.
    pub(crate) bound_to_peer: bool,
    /// Raised with every piece of news.
    pub(crate) alert: Arc<Alert>,
}

impl Link {
    /// Exchanges preambles and starts the reader.
    pub(crate) fn open(mut stream: Stream, params: LinkParams) -> Result<Link> {
        let LinkParams { peer, timeout, bound_to_peer, alert } = params;
        let failed = |e: io::Error| Failure::new(format!("the control connection to {peer} failed: {}", plain(&e)));
        if let Stream::Tcp(s) = &stream {
            s.set_nodelay(true).map_err(failed)?;
        }
        stream.set_write_timeout(Some(timeout)).map_err(failed)?;
        // A peer that speaks first and closes leaves its words to be read: they explain more than the failed write.
        let written = stream.write_all(&preamble());
        read_preamble(&mut stream, &peer, timeout.min(CONNECT_TIMEOUT))?;
        written.map_err(failed)?;
        stream.set_read_timeout(None).map_err(failed)?;
        let (tx, news) = sync_channel(QUEUE);
        let mut reader = stream.try_clone().map_err(failed)?;
        thread::Builder::new()
            .name("control".into())
            .spawn(move || {
                read_frames(&mut reader, &tx, &alert);
                if bound_to_peer {
                    // The main thread sees the alert and ends. This is for the case that it is stuck in the transport.
                    thread::sleep(ORPHAN_GRACE);
                    std::process::exit(1);
                }
            })
            .map_err(|e| Failure::new(format!("cannot start a thread: {}", plain(&e))))?;
        Ok(Link { stream, news, peer, lost: None })
    }

    /// What to call the peer in messages.
    pub(crate) fn peer(&self) -> &str {
        &self.peer
    }

    /// Sends one message.
    pub(crate) fn send(&mut self, m: &Message) -> Result<()> {
        let frame = frame(m)?;
        self.stream.write_all(&frame).map_err(|e| {
            // What the peer said before it closed explains more.
            match self.poll() {
                Err(f) => f,
                Ok(_) => Failure::new(format!("{} went away: {}", self.peer, plain(&e))),
            }
        })
    }

    /// The next message, if there is one.
    ///
    /// # Errors
    /// The connection is lost, or the peer gave up.
    pub(crate) fn poll(&mut self) -> Result<Option<Message>> {
        if let Some(why) = &self.lost {
            return Err(Failure::new(why.clone()));
        }
        match self.news.try_recv() {
            Ok(news) => self.take(news).map(Some),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Err(Failure::new(format!("{} went away", self.peer))),
        }
    }

    /// The next message, or `None` if there is none within `timeout`. For the time before there is anything to progress.
    ///
    /// # Errors
    /// As [`Link::poll`].
    pub(crate) fn wait(&mut self, timeout: Duration) -> Result<Option<Message>> {
        if self.lost.is_some() {
            return self.poll();
        }
        match self.news.recv_timeout(timeout) {
            Ok(news) => self.take(news).map(Some),
            Err(_) => Ok(None),
        }
    }

    fn take(&mut self, news: News) -> Result<Message> {
        match news {
            News::Message(Message::Abort { reason }) => Err(self.aborted(&reason)),
            News::Message(m) => Ok(m),
            News::Lost(why) => {
                let why = format!("{} {why}", self.peer);
                self.lost = Some(why.clone());
                Err(Failure::new(why))
            }
        }
    }

    /// Whether the connection is known to be lost.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.is_some()
    }

    fn aborted(&mut self, reason: &str) -> Failure {
        let why = format!("{} gave up: {}", self.peer, clean(reason));
        self.lost = Some(why.clone());
        Failure::new(why)
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // Ends the reader, which holds a duplicate.
        self.stream.shutdown();
    }
}

fn read_frames(stream: &mut Stream, tx: &SyncSender<News>, alert: &Alert) {
    loop {
        let news = match read_frame(stream) {
            Ok(m) => News::Message(m),
            Err(why) => News::Lost(why),
        };
        let end = matches!(news, News::Lost(_));
        let sent = tx.send(news).is_ok();
        alert.raise();
        if end || !sent {
            return;
        }
    }
}

/// A message as it travels.
pub(super) fn frame(m: &Message) -> Result<Vec<u8>> {
    let mut frame = vec![0; 4];
    serde_json::to_writer(&mut frame, m).map_err(|e| Failure::new(format!("cannot write a message: {e}")))?;
    let len = u32::try_from(frame.len() - 4).unwrap_or(u32::MAX);
    frame[..4].copy_from_slice(&len.to_le_bytes());
    Ok(frame)
}

/// Reads the next message. `Err`: what the peer did, for people.
pub(super) fn read_frame(stream: &mut impl Read) -> Result<Message, String> {
    let lost = |e: io::Error| match e.kind() {
        // A process that is killed with something unread resets its connections.
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
            "closed the control connection: it ended, was killed, or lost its host".into()
        }
        _ => format!("is lost: {}", plain(&e)),
    };
    let mut len = [0; 4];
    stream.read_exact(&mut len).map_err(lost)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > FRAME_MAX {
        return Err(format!("sent garbage on the control connection: a frame of {len} bytes (at most {FRAME_MAX})"));
    }
    let mut frame = vec![0; len];
    stream.read_exact(&mut frame).map_err(lost)?;
    serde_json::from_slice(&frame).map_err(|e| {
        format!("sent garbage on the control connection: a frame that is no message ({})", clean(&e.to_string()))
    })
}

/// Reads and checks the peer's preamble.
fn read_preamble(stream: &mut Stream, peer: &str, timeout: Duration) -> Result<()> {
    let deadline = Instant::now() + timeout;
    let mut p = [0u8; PREAMBLE_LEN];
    let mut have = 0;
    while have < PREAMBLE_LEN {
        let left = deadline.saturating_duration_since(Instant::now());
        let r = if left.is_zero() {
            Err(io::ErrorKind::TimedOut.into())
        } else {
            stream.set_read_timeout(Some(left)).and_then(|()| stream.read(&mut p[have..]))
        };
        match r {
            Ok(0) => {
                return Err(Failure::new(format!(
                    "{peer} closed the control connection before it said who it is: no uct_perf there, or it ended"
                )));
            }
            Ok(n) => have += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                return Err(Failure::new(format!(
                    "{peer} accepted the control connection and said nothing for {:.1} s: no uct_perf there, or it is \
                     busy with another client",
                    timeout.as_secs_f64()
                )));
            }
            Err(e) => return Err(Failure::new(format!("the control connection to {peer} failed: {}", plain(&e)))),
        }
        judge(peer, &p[..have])?;
    }
    Ok(())
}

/// Checks the preamble of a peer, or as much as has come of it.
pub(super) fn judge(peer: &str, p: &[u8]) -> Result<()> {
    let known = p.len().min(MAGIC.len());
    if p[..known] != MAGIC[..known] {
        return Err(Failure::new(not_us(peer, p)));
    }
    let Some(p) = p.first_chunk::<PREAMBLE_LEN>() else { return Ok(()) };
    let protocol = u32::from_le_bytes([p[8], p[9], p[10], p[11]]);
    let text = String::from_utf8_lossy(&p[12..]);
    let version = clean(text.trim_end_matches('\0'));
    if protocol != PROTOCOL {
        return Err(Failure::new(format!(
            "version mismatch: {peer} is uct_perf {version} with control protocol {protocol}, this is uct_perf {VERSION} \
             with control protocol {PROTOCOL}; use the same version on both sides"
        )));
    }
    Ok(())
}

fn not_us(peer: &str, bytes: &[u8]) -> String {
    let said = if bytes.iter().take(8).all(|&b| b == 0) {
        "it looks like a ucx_perftest client".into()
    } else {
        let text: String =
            bytes.iter().map(|&b| if b.is_ascii_graphic() || b == b' ' { b as char } else { '.' }).collect();
        format!("it said \"{text}\"")
    };
    format!("{peer} is no uct_perf: {said}; check host and port, on both sides")
}

/// Connects to a server.
pub(crate) fn connect(host: &str, port: u16, timeout: Duration) -> Result<TcpStream> {
    let timeout = timeout.min(CONNECT_TIMEOUT);
    let deadline = Instant::now() + timeout;
    let addrs = resolve(host, port, timeout)?;
    let mut last = None;
    for a in &addrs {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        match TcpStream::connect_timeout(a, left) {
            Ok(s) => return Ok(s),
            Err(e) => last = Some(e),
        }
    }
    Err(Failure::new(match last {
        Some(e) if e.kind() == io::ErrorKind::ConnectionRefused => format!(
            "{host} port {port} refused the connection: start `uct_perf --server{}` there first",
            if port == 13337 { String::new() } else { format!(" -p {port}") }
        ),
        Some(e) if e.kind() != io::ErrorKind::TimedOut => {
            format!("cannot connect to {host} port {port}: {}", plain(&e))
        }
        _ => format!(
            "cannot connect to {host} port {port}: no answer within {:.1} s; check the host and that no firewall drops TCP \
             port {port}",
            timeout.as_secs_f64()
        ),
    }))
}

/// Resolves a name on a thread of its own, because the system's resolver takes no time-out.
fn resolve(host: &str, port: u16, timeout: Duration) -> Result<Vec<SocketAddr>> {
    let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host).to_string();
    let (tx, rx) = sync_channel(1);
    thread::spawn(move || {
        let r = (bare.as_str(), port).to_socket_addrs().map(|a| a.collect::<Vec<_>>());
        // Nobody listens any more after the time-out.
        let _ = tx.send(r);
    });
    match rx.recv_timeout(timeout) {
        Ok(Ok(addrs)) if !addrs.is_empty() => Ok(addrs),
        Ok(Ok(_)) => Err(Failure::new(format!("host `{host}` has no address"))),
        Ok(Err(e)) => {
            let why = plain(&e);
            let why = why.strip_prefix("failed to lookup address information: ").unwrap_or(&why);
            Err(Failure::new(format!(
                "host `{host}` is unknown: {why}; give a name or an address (the port goes to -p)"
            )))
        }
        Err(_) => Err(Failure::new(format!(
            "host `{host}`: its name server did not answer within {:.1} s; give an address instead",
            timeout.as_secs_f64()
        ))),
    }
}

/// Listens on all addresses of this host.
pub(crate) fn listen(port: u16) -> Result<TcpListener> {
    let any6 = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), port);
    let any4 = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), port);
    TcpListener::bind(any6)
        // A host without IPv6.
        .or_else(|e| if e.kind() == io::ErrorKind::AddrInUse { Err(e) } else { TcpListener::bind(any4) })
        .map_err(|e| match e.kind() {
            io::ErrorKind::AddrInUse => Failure::new(format!(
                "TCP port {port} is in use by another process (another uct_perf?); choose one with -p on both sides"
            )),
            io::ErrorKind::PermissionDenied => {
                Failure::new(format!("TCP port {port} needs privileges; choose one from 1024 with -p on both sides"))
            }
            _ => Failure::new(format!("cannot listen on TCP port {port}: {}", plain(&e))),
        })
}

#[cfg(test)]
#[path = "link_tests.rs"]
mod tests;
