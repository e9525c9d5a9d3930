//! A packet in words: one line for traces and test failures.

use std::fmt;

use super::wire::{self, Neth};

/// Displays one packet. Any bytes will do.
#[derive(Copy, Clone, Debug)]
pub struct Describe<'a>(&'a [u8]);

/// The packet in `bytes` (from the NETH on) in words, such as `AM 5 dest 7 psn 12 ack 9 A` or `CREQ psn 1 ack 0 conn_sn 0`.
/// `A` stands for "please acknowledge", `N` for a negative ack.
pub fn describe(bytes: &[u8]) -> Describe<'_> {
    Describe(bytes)
}

impl fmt::Display for Describe<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0;
        let Some(neth) = Neth::parse(bytes) else {
            return write!(f, "short packet of {} bytes", bytes.len());
        };
        let kind = if neth.is(wire::CTL) && !neth.is_am() { wire::ctl_type(bytes) } else { None };
        match kind {
            _ if neth.is_am() => write!(f, "AM {}", neth.am_id())?,
            Some(wire::CREQ) => f.write_str("CREQ")?,
            Some(wire::CREP) => f.write_str("CREP")?,
            Some(wire::XACK) => f.write_str("XACK")?,
            Some(wire::BYE) => f.write_str("BYE")?,
            Some(wire::BYE_ACK) => f.write_str("BYE_ACK")?,
            Some(other) => write!(f, "CTL {other:#x}")?,
            None if neth.is(wire::PUT) => f.write_str("PUT")?,
            None if neth.is(wire::NACK) => f.write_str("NACK")?,
            None => f.write_str("ACK")?,
        }
        if neth.dest() != wire::NO_EP {
            write!(f, " dest {}", neth.dest())?;
        }
        write!(f, " psn {} ack {}", neth.psn, neth.ack)?;
        if neth.is(wire::ACK_REQ) {
            f.write_str(" A")?;
        }
        match kind {
            Some(wire::CREQ) => match wire::Creq::parse(bytes) {
                Some(c) => write!(f, " conn_sn {} from ep {} path {}", c.conn_sn, c.ep_id, c.path_index),
                None => f.write_str(" (malformed)"),
            },
            Some(wire::CREP) => match wire::Crep::parse(bytes) {
                Some(c) => write!(f, " from ep {}", c.src_ep_id),
                None => f.write_str(" (malformed)"),
            },
            Some(wire::XACK) => match wire::Xack::parse(bytes) {
                Some(x) => write!(f, " beyond {:#x} budget {}{}", x.sacked, x.budget, if x.gap { " gap" } else { "" }),
                None => f.write_str(" (malformed)"),
            },
            _ => Ok(()),
        }
    }
}
