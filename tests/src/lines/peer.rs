//! What tests tell a process of `src/bin/peer.rs`: a [`Command`] is a line, and has one answer.
//!
//! ```text
//! > addr                      < addr DEVICE IFACE        (hexadecimal)
//! > connect DEVICE IFACE      < ep INDEX                 (or error TEXT)
//! > send INDEX COUNT          < sent COUNT               (accepted, not yet delivered; or error TEXT)
//! > long INDEX COUNT LENGTH   < sent COUNT               (messages of LENGTH bytes)
//! > expect COUNT              < got COUNT                (messages received since the start)
//! > failures COUNT            < failed KIND...           (reports of the error handler since the start)
//! > why                       < why TEXT...              (the texts of those reports)
//! > counter NAME              < counter VALUE            (of the interface or the domain)
//! > flush                     < flushed
//! > signals                   < signals MASK             (of caught signals, hexadecimal)
//! > fork                      < forked STATUS            (of a child that ends with everything open)
//! > use                       < forked STATUS            (of a child that uses and drops everything; 0 if all is refused)
//! > quit                                                 (ends with everything open)
//! > close                     < closed                   (ends in order)
//! ```
//!
//! A line that is none of these has the answer `error TEXT`.

use std::fmt;

use super::{Words, hex};

/// What a process is told to do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Command {
    /// Say your addresses.
    Addr,
    /// Connect to the interface with these addresses.
    Connect(Vec<u8>, Vec<u8>),
    /// On the endpoint of this index, send so many short messages.
    Send(usize, u64),
    /// The same with messages of this length.
    Long(usize, u64, usize),
    /// Wait until so many messages have arrived.
    Expect(u64),
    /// Wait for so many reports of the error handler.
    Failures(u64),
    /// Say the texts of those reports.
    Why,
    /// Say the value of the counter of this name.
    Counter(String),
    /// Flush the interface.
    Flush,
    /// Say which signals are caught.
    Signals,
    /// Make a child that ends.
    Fork,
    /// Make a child that uses everything.
    Use,
    /// End with everything open.
    Quit,
    /// End in order.
    Close,
}

impl Command {
    /// Reads a line.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(line: &str) -> Result<Command, String> {
        let mut w = Words::of(line);
        let command = match w.word("command")? {
            "addr" => Command::Addr,
            "connect" => Command::Connect(w.bytes("device address")?, w.bytes("interface address")?),
            "send" => Command::Send(w.number("index")?, w.number("count")?),
            "long" => Command::Long(w.number("index")?, w.number("count")?, w.number("length")?),
            "expect" => Command::Expect(w.number("count")?),
            "failures" => Command::Failures(w.number("count")?),
            "why" => Command::Why,
            "counter" => Command::Counter(w.word("name")?.into()),
            "flush" => Command::Flush,
            "signals" => Command::Signals,
            "fork" => Command::Fork,
            "use" => Command::Use,
            "quit" => Command::Quit,
            "close" => Command::Close,
            other => return Err(format!("unknown command {other:?}")),
        };
        w.end()?;
        Ok(command)
    }
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Command::Addr => f.write_str("addr"),
            Command::Connect(device, iface) => write!(f, "connect {} {}", hex(device), hex(iface)),
            Command::Send(ep, count) => write!(f, "send {ep} {count}"),
            Command::Long(ep, count, len) => write!(f, "long {ep} {count} {len}"),
            Command::Expect(count) => write!(f, "expect {count}"),
            Command::Failures(count) => write!(f, "failures {count}"),
            Command::Why => f.write_str("why"),
            Command::Counter(name) => write!(f, "counter {name}"),
            Command::Flush => f.write_str("flush"),
            Command::Signals => f.write_str("signals"),
            Command::Fork => f.write_str("fork"),
            Command::Use => f.write_str("use"),
            Command::Quit => f.write_str("quit"),
            Command::Close => f.write_str("close"),
        }
    }
}

/// What a process answers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Answer {
    /// Device and interface address.
    Addr(Vec<u8>, Vec<u8>),
    /// The index of a new endpoint.
    Ep(usize),
    /// So many messages were accepted.
    Sent(u64),
    /// So many messages have arrived.
    Got(u64),
    /// The kinds of failures that were reported.
    Failed(Vec<String>),
    /// Their texts, as one.
    Why(String),
    /// The value of a counter.
    Counter(u64),
    /// Everything is flushed.
    Flushed,
    /// The mask of signals that are caught.
    Signals(u64),
    /// The status of a child.
    Forked(i64),
    /// Everything is closed.
    Closed,
    /// It could not be done, and why.
    Error(String),
}

impl Answer {
    /// Reads a line.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(line: &str) -> Result<Answer, String> {
        let line = &one_line(line);
        let mut w = Words::of(line);
        let text = || line.split_once(' ').map_or("", |(_, text)| text).to_string();
        let answer = match w.word("answer")? {
            "addr" => Answer::Addr(w.bytes("device address")?, w.bytes("interface address")?),
            "ep" => Answer::Ep(w.number("index")?),
            "sent" => Answer::Sent(w.number("count")?),
            "got" => Answer::Got(w.number("count")?),
            "failed" => return Ok(Answer::Failed(w.all().map(str::to_string).collect())),
            "why" => return Ok(Answer::Why(text())),
            "error" => return Ok(Answer::Error(text())),
            "counter" => Answer::Counter(w.number("value")?),
            "flushed" => Answer::Flushed,
            "signals" => {
                let mask = w.word("mask")?;
                // `from_str_radix` takes a sign.
                let plain = mask.bytes().all(|b| b.is_ascii_hexdigit());
                let mask = u64::from_str_radix(mask, 16).ok().filter(|_| plain);
                Answer::Signals(mask.ok_or_else(|| format!("no mask in {line:?}"))?)
            }
            "forked" => {
                let status = w.word("status")?;
                Answer::Forked(status.parse().map_err(|_| format!("{status:?} is no status"))?)
            }
            "closed" => Answer::Closed,
            _ => return Err(format!("unknown answer {line:?}")),
        };
        w.end()?;
        Ok(answer)
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Answer::Addr(device, iface) => write!(f, "addr {} {}", hex(device), hex(iface)),
            Answer::Ep(index) => write!(f, "ep {index}"),
            Answer::Sent(count) => write!(f, "sent {count}"),
            Answer::Got(count) => write!(f, "got {count}"),
            Answer::Failed(kinds) => {
                f.write_str("failed")?;
                kinds.iter().try_for_each(|k| write!(f, " {}", one_line(k)))
            }
            Answer::Why(text) => write!(f, "why {}", one_line(text)),
            Answer::Counter(value) => write!(f, "counter {value}"),
            Answer::Flushed => f.write_str("flushed"),
            Answer::Signals(mask) => write!(f, "signals {mask:016x}"),
            Answer::Forked(status) => write!(f, "forked {status}"),
            Answer::Closed => f.write_str("closed"),
            Answer::Error(text) => write!(f, "error {}", one_line(text)),
        }
    }
}

/// A text with nothing in it that would end a line.
fn one_line(text: &str) -> String {
    text.replace(['\n', '\r'], " ")
}
