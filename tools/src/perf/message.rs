//! What the two sides tell each other on the control connection, and the bytes that carry it.
//!
//! Each side first sends a preamble of fixed form, so that another program (or another version) at the other end is
//! recognised whatever it speaks:
//!
//! ```text
//! 8 bytes  "uct_perf"
//! 4 bytes  protocol version, little-endian
//! 20 bytes program version, text, padded with zeros
//! ```
//!
//! Then come frames in both directions: a length (four bytes, little-endian, at most [`FRAME_MAX`]) and that many bytes
//! of JSON, one [`Message`].

use serde::{Deserialize, Serialize};

use super::options::{ConnectMode, Layout, Test};

/// The version of this protocol. Two sides with different numbers refuse each other.
pub(crate) const PROTOCOL: u32 = 1;
/// The program's version.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Length of the preamble.
pub(crate) const PREAMBLE_LEN: usize = 32;
/// The largest frame.
pub(crate) const FRAME_MAX: usize = 64 * 1024;
pub(crate) const MAGIC: &[u8; 8] = b"uct_perf";

/// This program's preamble.
pub(crate) fn preamble() -> [u8; PREAMBLE_LEN] {
    let mut p = [0; PREAMBLE_LEN];
    p[..8].copy_from_slice(MAGIC);
    p[8..12].copy_from_slice(&PROTOCOL.to_le_bytes());
    let v = VERSION.as_bytes();
    let n = v.len().min(20);
    p[12..12 + n].copy_from_slice(&v[..n]);
    p
}

/// One side of the test: where it runs, and what the other needs to reach it.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub(crate) struct Side {
    /// Program version.
    pub(crate) version: String,
    /// Host name.
    pub(crate) host: String,
    pub(crate) pid: u32,
    /// The CPU that the process is bound to, if it is.
    pub(crate) cpu: Option<usize>,
    /// Name of the transport, for example `ud_verbs`.
    pub(crate) transport: String,
    /// Device and port, for example `soft0:1`.
    pub(crate) device: String,
    /// The device's network address, as its memory domain shows it.
    pub(crate) address: String,
    pub(crate) limits: Limits,
    /// In hexadecimal, as the next two.
    pub(crate) device_addr: String,
    pub(crate) iface_addr: String,
    /// Only for connecting endpoint to endpoint.
    pub(crate) ep_addr: Option<String>,
}

/// The largest message per layout, header included; absent if the transport cannot send that way.
#[derive(Copy, Clone, Debug, Serialize, Deserialize, PartialEq, Eq, Default)]
pub(crate) struct Limits {
    pub(crate) short: Option<usize>,
    pub(crate) bcopy: Option<usize>,
    pub(crate) zcopy: Option<usize>,
}

impl Limits {
    /// The largest message with this layout.
    pub(crate) fn of(&self, layout: Layout) -> Option<usize> {
        match layout {
            Layout::Short | Layout::Shortiov => self.short,
            Layout::Bcopy => self.bcopy,
            Layout::Zcopy => self.zcopy,
        }
    }

    /// What both sides can do.
    pub(crate) fn common(&self, other: &Limits) -> Limits {
        let min = |a: Option<usize>, b: Option<usize>| Some(a?.min(b?));
        Limits {
            short: min(self.short, other.short),
            bcopy: min(self.bcopy, other.bcopy),
            zcopy: min(self.zcopy, other.zcopy),
        }
    }
}

/// One run of messages: what the receiving side must know of it. How long it takes is the sender's business.
#[derive(Copy, Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub(crate) struct Run {
    /// Number of the run, from 1.
    pub(crate) run: u16,
    pub(crate) test: Test,
    pub(crate) layout: Layout,
    pub(crate) size: usize,
}

/// A frame's content.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum Message {
    /// Client to server, first: who I am, and how to connect.
    Setup { side: Box<Side>, connect: ConnectMode },
    /// Server to client: who I am. My endpoint is made.
    Opened { side: Box<Side> },
    /// Client to server: my endpoint is connected too.
    Connected,
    /// Client to server: get ready for a run.
    Run { run: Run },
    /// Server to client: ready, send.
    Ready,
    /// Client to server: the run is over, this many were sent.
    Sent { count: u64 },
    /// Server to client: this many arrived, and were right.
    Received { count: u64 },
    /// Either: no more runs; all is well.
    Bye,
    /// Either: I give up.
    Abort { reason: String },
}

impl Message {
    /// Its name, for errors.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Message::Setup { .. } => "setup",
            Message::Opened { .. } => "opened",
            Message::Connected => "connected",
            Message::Run { .. } => "run",
            Message::Ready => "ready",
            Message::Sent { .. } => "sent",
            Message::Received { .. } => "received",
            Message::Bye => "bye",
            Message::Abort { .. } => "abort",
        }
    }
}

/// Bytes as lower-case hexadecimal.
pub(crate) fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// The bytes of a hexadecimal string.
pub(crate) fn from_hex(s: &str) -> Option<Vec<u8>> {
    let digit = |b: u8| (b as char).to_digit(16).map(|d| d as u8);
    let b = s.as_bytes();
    if !b.len().is_multiple_of(2) {
        return None;
    }
    b.chunks_exact(2).map(|p| Some(digit(p[0])? << 4 | digit(p[1])?)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hex_there_and_back() {
        assert_eq!(to_hex(&[0, 0x4a, 0xff]), "004aff");
        assert_eq!(from_hex("004aFF"), Some(vec![0, 0x4a, 0xff]));
        for bad in ["0", "0g", "é", "+1"] {
            assert_eq!(from_hex(bad), None, "{bad}");
        }
    }

    #[test]
    fn messages_survive_json() {
        let run = Run { run: 7, test: Test::Bw, layout: Layout::Shortiov, size: 64 };
        for m in [Message::Run { run }, Message::Ready, Message::Sent { count: 1 << 60 }, Message::Bye] {
            let text = serde_json::to_string(&m).unwrap();
            assert_eq!(serde_json::from_str::<Message>(&text).unwrap(), m, "{text}");
        }
        assert!(serde_json::from_str::<Message>(r#"{"type":"run","run":{"run":-1}}"#).is_err());
    }

    #[test]
    fn both_sides_limit() {
        let a = Limits { short: Some(100), bcopy: Some(4000), zcopy: None };
        let b = Limits { short: Some(60), bcopy: Some(5000), zcopy: Some(1) };
        assert_eq!(a.common(&b), Limits { short: Some(60), bcopy: Some(4000), zcopy: None });
    }

    #[test]
    fn the_preamble_has_the_documented_form() {
        let p = preamble();
        assert_eq!(&p[..8], b"uct_perf");
        assert_eq!(p[8..12], [1, 0, 0, 0]);
        assert!(p[12..].starts_with(VERSION.as_bytes()));
    }
}
