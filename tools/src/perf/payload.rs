//! What the messages contain, and the check of every one that arrives.
//!
//! A message is an eight-byte header (number in the stream, run, flags) and a cut from a pseudo-random pattern. The cut
//! starts at another place for each of 64 messages in turn, so that bytes of a neighbouring message are noticed as well
//! as damaged ones. Sending costs nothing extra, since the pattern is copied from (or, with zero copy, registered) as it
//! is; checking costs one comparison of memory. All messages are checked, in warm-up and measurement alike.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
};

use parking_lot::Mutex;

use super::alert::Alert;

/// Messages in a row whose patterns differ.
pub(crate) const PHASES: usize = 64;
/// Bytes of the header.
pub(crate) const HEADER_LEN: usize = 8;
const SEQ_BITS: u32 = 48;
const RUN_MASK: u64 = 0x3fff;
const ACK: u64 = 1 << 62;
const LAST: u64 = 1 << 63;

/// What the sender asks of the receiver.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ask {
    /// Nothing.
    Nothing,
    /// Say how many messages have arrived.
    Ack,
    /// As `Ack`, and the run is over.
    Last,
}

/// The first eight bytes of every message.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// Number in the run, from 0; 48 bits.
    pub(crate) seq: u64,
    /// The run; 14 bits. Messages left over from an earlier run are told apart by it.
    pub(crate) run: u16,
    pub(crate) ask: Ask,
}

impl Header {
    /// The header as the argument of `am_short`, which puts it on the wire in the order of memory: little-endian then.
    pub(crate) fn to_word(self) -> u64 {
        let flags = match self.ask {
            Ask::Nothing => 0,
            Ask::Ack => ACK,
            Ask::Last => LAST | ACK,
        };
        let seq = self.seq & ((1 << SEQ_BITS) - 1);
        (flags | (u64::from(self.run) & RUN_MASK) << SEQ_BITS | seq).to_le()
    }

    /// The header as bytes.
    pub(crate) fn to_bytes(self) -> [u8; HEADER_LEN] {
        self.to_word().to_ne_bytes()
    }

    /// Reads a header; `None` from fewer than eight bytes.
    pub(crate) fn parse(data: &[u8]) -> Option<Header> {
        let w = u64::from_le_bytes(*data.first_chunk()?);
        let ask = match (w & LAST != 0, w & ACK != 0) {
            (true, _) => Ask::Last,
            (_, true) => Ask::Ack,
            _ => Ask::Nothing,
        };
        Some(Header { seq: w & ((1 << SEQ_BITS) - 1), run: (w >> SEQ_BITS & RUN_MASK) as u16, ask })
    }
}

/// The bytes that follow the headers of one run.
#[derive(Debug)]
pub(crate) struct Pattern {
    bytes: Vec<u8>,
    len: usize,
}

impl Pattern {
    /// The pattern of a run with messages of `size` bytes. Both sides make the same.
    pub(crate) fn new(run: u16, size: usize) -> Self {
        let len = size.saturating_sub(HEADER_LEN);
        // SplitMix64: short, and no two runs or sizes share a sequence.
        let mut state = (u64::from(run) << 32 | size as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut bytes = Vec::with_capacity(len + PHASES + 8);
        while bytes.len() < len + PHASES {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            bytes.extend_from_slice(&(z ^ (z >> 31)).to_le_bytes());
        }
        bytes.truncate(len + PHASES);
        Pattern { bytes, len }
    }

    /// Where in [`Pattern::bytes`] the payload of message `seq` lies.
    pub(crate) fn range(&self, seq: u64) -> std::ops::Range<usize> {
        let start = (seq % PHASES as u64) as usize;
        start..start + self.len
    }

    /// The payload of message `seq`, without the header.
    pub(crate) fn payload(&self, seq: u64) -> &[u8] {
        &self.bytes[self.range(seq)]
    }

    /// Everything: the payloads overlap in it.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// The receiving half of one run: checks and counts what the handler gets.
///
/// One thread writes (the one in `progress`), so the counters are plain loads and stores.
#[derive(Debug)]
pub(crate) struct Receiver {
    run: u16,
    size: usize,
    pattern: Arc<Pattern>,
    received: AtomicU64,
    asked: AtomicU64,
    last: AtomicBool,
    is_wrong: AtomicBool,
    wrong: Mutex<Option<String>>,
    alert: Arc<Alert>,
}

impl Receiver {
    /// A receiver that expects messages of `size` bytes, numbered from 0. It raises `alert` at the first that is wrong.
    pub(crate) fn new(run: u16, size: usize, pattern: Arc<Pattern>, alert: Arc<Alert>) -> Self {
        Receiver {
            run,
            size,
            pattern,
            received: AtomicU64::new(0),
            asked: AtomicU64::new(0),
            last: AtomicBool::new(false),
            is_wrong: AtomicBool::new(false),
            wrong: Mutex::new(None),
            alert,
        }
    }

    /// Checks one message. After the first wrong one nothing more is counted.
    #[inline]
    pub(crate) fn accept(&self, data: &[u8]) {
        if self.is_wrong.load(Relaxed) {
            return;
        }
        let seq = self.received.load(Relaxed);
        // What nearly all are, without taking the header apart: a latency has this in it.
        let word = Header { seq, run: self.run, ask: Ask::Nothing }.to_word().to_ne_bytes();
        if let Some((w, payload)) = data.split_first_chunk()
            && *w == word
            && data.len() == self.size
            && (payload.is_empty() || payload == self.pattern.payload(seq))
        {
            self.received.store(seq + 1, Relaxed);
        } else {
            self.accept_any(seq, data);
        }
    }

    #[inline(never)]
    fn accept_any(&self, seq: u64, data: &[u8]) {
        match self.check(seq, data) {
            Ok(ask) => {
                self.received.store(seq + 1, Relaxed);
                if ask != Ask::Nothing {
                    self.asked.store(seq + 1, Relaxed);
                }
                if ask == Ask::Last {
                    self.last.store(true, Relaxed);
                }
            }
            Err(text) => {
                self.is_wrong.store(true, Relaxed);
                self.wrong.lock().get_or_insert(text);
                self.alert.raise();
            }
        }
    }

    fn check(&self, seq: u64, data: &[u8]) -> Result<Ask, String> {
        let size = self.size;
        let Some(h) = Header::parse(data).filter(|_| data.len() == size) else {
            return Err(format!("message {seq}: {} bytes arrived instead of {size}", data.len()));
        };
        if h.run != self.run {
            return Err(format!("message {seq}: it belongs to run {} instead of run {}", h.run, self.run));
        }
        if h.seq != seq {
            let what = if h.seq > seq {
                format!("{} lost or overtaken", h.seq - seq)
            } else {
                "delivered twice or late".into()
            };
            return Err(format!("message {seq}: message {} arrived in its place ({what})", h.seq));
        }
        let (got, want) = (&data[HEADER_LEN..], self.pattern.payload(seq));
        if got != want {
            let bad = got.iter().zip(want).filter(|(g, w)| g != w).count();
            let at = got.iter().zip(want).position(|(g, w)| g != w).unwrap_or(0);
            return Err(format!(
                "message {seq}: byte {} of {size} is {:#04x} instead of {:#04x} ({bad} bytes differ)",
                at + HEADER_LEN,
                got[at],
                want[at]
            ));
        }
        Ok(h.ask)
    }

    /// Messages that arrived and were right.
    pub(crate) fn received(&self) -> u64 {
        self.received.load(Relaxed)
    }

    /// How many messages had arrived, that one included, when the sender last asked for an answer; 0 if it never did.
    pub(crate) fn asked(&self) -> u64 {
        self.asked.load(Relaxed)
    }

    /// Whether the last message of the run has arrived.
    pub(crate) fn is_over(&self) -> bool {
        self.last.load(Relaxed)
    }

    /// What was wrong with the first message that was wrong.
    pub(crate) fn wrong(&self) -> Option<String> {
        self.wrong.lock().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn receiver(size: usize) -> Receiver {
        Receiver::new(3, size, Arc::new(Pattern::new(3, size)), Arc::new(Alert::default()))
    }

    fn message(seq: u64, run: u16, size: usize, ask: Ask) -> Vec<u8> {
        let mut m = Header { seq, run, ask }.to_bytes().to_vec();
        m.extend_from_slice(Pattern::new(run, size).payload(seq));
        m
    }

    #[test]
    fn headers_survive() {
        for ask in [Ask::Nothing, Ask::Ack, Ask::Last] {
            let h = Header { seq: (1 << 48) - 2, run: 0x3ffe, ask };
            assert_eq!(Header::parse(&h.to_bytes()), Some(h));
        }
        assert_eq!(Header::parse(&[0; 7]), None);
        assert_eq!(Header { seq: 0x0102, run: 0, ask: Ask::Nothing }.to_bytes(), [2, 1, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn right_messages_count() {
        let r = receiver(100);
        for seq in 0..200 {
            r.accept(&message(seq, 3, 100, if seq == 50 { Ask::Ack } else { Ask::Nothing }));
        }
        assert_eq!((r.received(), r.asked(), r.is_over(), r.wrong()), (200, 51, false, None));
        r.accept(&message(200, 3, 100, Ask::Last));
        assert_eq!((r.received(), r.asked(), r.is_over()), (201, 201, true));
        assert!(!r.alert.take());
    }

    #[test]
    fn neighbouring_messages_and_runs_differ() {
        let p = Pattern::new(1, 40);
        for seq in 1..PHASES as u64 {
            assert_ne!(p.payload(0), p.payload(seq));
        }
        assert_ne!(p.payload(0), Pattern::new(2, 40).payload(0));
        assert_eq!(p.payload(5), p.payload(5 + PHASES as u64));
        assert!(Pattern::new(1, 8).payload(9).is_empty());
    }

    #[test]
    fn each_kind_of_damage_is_named_once() {
        let mut flipped = message(0, 3, 64, Ask::Nothing);
        flipped[20] ^= 0x10;
        let want = flipped[20] ^ 0x10;
        let mut swapped = message(0, 3, 64, Ask::Nothing);
        swapped[8..].copy_from_slice(Pattern::new(3, 64).payload(1));
        let differ = format!("byte 20 of 64 is {:#04x} instead of {want:#04x} (1 bytes differ)", flipped[20]);
        for (bad, words) in [
            (flipped, differ.as_str()),
            (swapped, "message 0: byte 8 of 64"),
            (message(2, 3, 64, Ask::Nothing), "message 2 arrived in its place (2 lost or overtaken)"),
            (message(0, 2, 64, Ask::Nothing), "belongs to run 2 instead of run 3"),
            (message(0, 3, 65, Ask::Nothing), "65 bytes arrived instead of 64"),
            (vec![], "0 bytes arrived instead of 64"),
        ] {
            let r = receiver(64);
            r.accept(&bad);
            let text = r.wrong().unwrap();
            assert!(text.contains(words), "{text}");
            assert!(r.alert.take());
            r.accept(&[]);
            assert_eq!((r.wrong(), r.received()), (Some(text), 0));
        }
        let r = receiver(64);
        r.accept(&message(0, 3, 64, Ask::Nothing));
        r.accept(&message(0, 3, 64, Ask::Nothing));
        assert!(r.wrong().unwrap().contains("delivered twice or late"));
    }
}
