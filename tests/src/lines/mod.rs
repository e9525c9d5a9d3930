//! The lines that programs of this crate say to each other and to foreign peers, read and written: pure functions, which refuse
//! whatever they do not understand and say why.
//!
//! [`peer`] is what tests about processes tell `src/bin/peer.rs`; [`mod@bench`] what the two halves of the benchmark say;
//! [`ucx`] what the UCX process of `ci/interop` answers, and what its messages hold; [`pingpong`] the greeting of rdma-core's
//! example. What users write, and what `uct_perf` reads, is read in `uct-tools`.

pub mod bench;
pub mod peer;
pub mod pingpong;
pub mod ucx;

#[cfg(any(test, uct_fuzz))]
pub mod fuzz;

/// Bytes as hexadecimal digits, two each, in lower case.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// The bytes of hexadecimal digits, two each.
///
/// # Errors
/// If there is anything else, or half a byte.
pub fn unhex(text: &str) -> Result<Vec<u8>, String> {
    let digit = |b: u8| char::from(b).to_digit(16).map(|d| d as u8);
    let bytes = text.as_bytes().chunks(2).map(|pair| match *pair {
        [high, low] => Some(digit(high)? << 4 | digit(low)?),
        _ => None,
    });
    bytes.collect::<Option<_>>().ok_or_else(|| format!("{text:?} are no bytes in hexadecimal"))
}

/// The words of a line, one after the other.
struct Words<'a> {
    line: &'a str,
    rest: std::str::Split<'a, char>,
}

impl<'a> Words<'a> {
    fn of(line: &'a str) -> Words<'a> {
        Words { line, rest: line.split(' ') }
    }

    /// The next word, which is `what`.
    fn word(&mut self, what: &str) -> Result<&'a str, String> {
        self.rest.next().filter(|w| !w.is_empty()).ok_or_else(|| format!("no {what} in {:?}", self.line))
    }

    fn number<N: std::str::FromStr>(&mut self, what: &str) -> Result<N, String> {
        let word = self.word(what)?;
        // Numbers are written in one way only.
        let plain = word.bytes().all(|b| b.is_ascii_digit()) && (word == "0" || !word.starts_with('0'));
        word.parse().ok().filter(|_| plain).ok_or_else(|| format!("{what} {word:?} is no number, in {:?}", self.line))
    }

    fn bytes(&mut self, what: &str) -> Result<Vec<u8>, String> {
        unhex(self.word(what)?).map_err(|why| format!("{what}: {why}"))
    }

    /// All that is left, also nothing.
    fn all(self) -> impl Iterator<Item = &'a str> {
        self.rest.filter(|w| !w.is_empty())
    }

    fn end(mut self) -> Result<(), String> {
        match self.rest.next() {
            None => Ok(()),
            Some(w) => Err(format!("{w:?} is too much in {:?}", self.line)),
        }
    }
}
