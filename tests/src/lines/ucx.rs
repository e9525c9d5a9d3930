//! What the UCX process of `ci/interop/uct_peer.c` answers, [`Said`], and the messages that it sends and checks.

use super::Words;

/// A line of its.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Said<'a> {
    /// It is done, with what it has to say of it.
    Done(&'a str),
    /// It could not be done, and why.
    Failed(&'a str),
    /// None of its answers: UCX logs.
    Log(&'a str),
}

impl<'a> Said<'a> {
    /// Reads a line.
    #[must_use]
    pub fn parse(line: &'a str) -> Said<'a> {
        match line.split_once(' ').unwrap_or((line, "")) {
            ("ok", text) => Said::Done(text.trim()),
            ("error", text) => Said::Failed(text.trim()),
            _ => Said::Log(line),
        }
    }
}

/// What it says of an interface that it has opened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Opened {
    /// Address of the device, in hexadecimal.
    pub device: String,
    /// Address of the interface.
    pub iface: String,
    /// Major and minor version of UCX.
    pub version: (u32, u32),
}

impl Opened {
    /// Reads the answer.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(text: &str) -> Result<Opened, String> {
        let mut w = Words::of(text);
        let mut address = |what| w.bytes(what).map(|b| super::hex(&b));
        let (device, iface) = (address("device address")?, address("interface address")?);
        let version = (w.number("major version")?, w.number("minor version")?);
        w.end()?;
        Ok(Opened { device, iface, version })
    }
}

/// Stream and number of a message, which are its first bytes.
pub const HEADER: usize = 8;

/// The first bytes of message `number` of a stream.
#[must_use]
pub fn header(stream: u32, number: u32) -> [u8; HEADER] {
    let mut head = [0; HEADER];
    head[..4].copy_from_slice(&stream.to_le_bytes());
    head[4..].copy_from_slice(&number.to_le_bytes());
    head
}

/// The byte `i` of the pattern that payloads are cut from.
#[must_use]
pub fn pattern(i: usize) -> u8 {
    (7 * i) as u8
}

/// The part of the pattern that message `number` has behind its header, if it is `size` bytes long.
#[must_use]
pub fn payload(number: u32, size: usize) -> std::ops::Range<usize> {
    let at = number as usize % 251;
    at..at + size.saturating_sub(HEADER)
}

/// Stream and number of a message, and whether its payload is what it must be. `None`: it has no header.
#[must_use]
pub fn read(message: &[u8]) -> Option<(u32, u32, bool)> {
    let (head, data) = message.split_first_chunk::<HEADER>()?;
    let [a, b, c, d, e, f, g, h] = *head;
    let (stream, number) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]));
    let is_whole = data.iter().zip(payload(number, message.len())).all(|(&b, i)| b == pattern(i));
    Some((stream, number, is_whole))
}
