//! The greeting of rdma-core's `ibv_ud_pingpong`: where its queue pair is.

use ib::types::{Gid, Qpn};

/// Bytes of a greeting: `LID:QPN:PSN:GID` in hexadecimal, with a zero at the end.
pub const LEN: usize = 4 + 1 + 6 + 1 + 6 + 1 + 32 + 1;

/// Where a queue pair is. LID and PSN are of no use with RoCE.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Hello {
    /// Its number.
    pub qpn: Qpn,
    /// Its address.
    pub gid: Gid,
}

impl Hello {
    /// Reads a greeting, with the zero at its end or without. Numbers may be shorter than they are written here.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(line: &[u8]) -> Result<Hello, String> {
        let text = line.strip_suffix(&[0]).unwrap_or(line);
        let bad = || format!("{:?} is no LID:QPN:PSN:GID", String::from_utf8_lossy(text));
        let mut parts = text.split(|b| *b == b':').map(|part| {
            // `from_str_radix` would take a sign, and 40 zeros.
            let is_plain = (1..=32).contains(&part.len()) && part.iter().all(u8::is_ascii_hexdigit);
            let digits = std::str::from_utf8(part).ok().filter(|_| is_plain)?;
            u128::from_str_radix(digits, 16).ok()
        });
        let mut part = |max: u128| parts.next().flatten().filter(|n| *n <= max);
        let all = (part(0xffff), part(0xff_ffff), part(0xff_ffff), part(u128::MAX));
        let (Some(_lid), Some(qpn), Some(_psn), Some(gid)) = all else { return Err(bad()) };
        match parts.next() {
            None => Ok(Hello { qpn: Qpn::truncate(qpn as u32), gid: Gid(gid.to_be_bytes()) }),
            Some(_) => Err(bad()),
        }
    }

    /// As it goes over the wire.
    #[must_use]
    pub fn to_bytes(self) -> [u8; LEN] {
        let text = format!("0000:{:06x}:000000:{:032x}\0", self.qpn.get(), u128::from_be_bytes(self.gid.0));
        let mut bytes = [0; LEN];
        bytes.iter_mut().zip(text.bytes()).for_each(|(to, from)| *to = from);
        bytes
    }
}
