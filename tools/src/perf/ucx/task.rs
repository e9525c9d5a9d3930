//! The parameters that a `ucx_perftest` client sends: a C struct as it lies in memory, without a version, so its layout is
//! that of a UCX release. Four are known. The list of message sizes follows, eight bytes each.
//!
//! Only fields that decide what two active-message tests do are read; pointers and padding are arbitrary. All numbers are
//! little-endian, as on every machine UCX interoperates with.

use std::{fmt, str::FromStr};

use super::super::options::{Layout, Test};

/// Releases of UCX that have the parameters in common.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(crate) enum Version {
    /// 264 bytes; Debian 12 has 1.13. A server takes its device from the client.
    V1_13,
    /// 528 bytes.
    V1_19,
    /// 560 bytes.
    V1_20,
    /// 584 bytes.
    V1_21,
}

impl Version {
    const ALL: [Version; 4] = [Version::V1_13, Version::V1_19, Version::V1_20, Version::V1_21];
    /// What a server is taken for if nobody says.
    pub(crate) const NEWEST: Version = Version::V1_21;

    /// The releases; the layout of 1.17 and 1.18 is not known.
    fn names(self) -> &'static [&'static str] {
        match self {
            Version::V1_13 => &["1.13", "1.14", "1.15", "1.16"],
            Version::V1_19 => &["1.19"],
            Version::V1_20 => &["1.20"],
            Version::V1_21 => &["1.21", "1.22", "1.23"],
        }
    }

    fn fields(self) -> &'static Fields {
        match self {
            Version::V1_13 => &V1_13,
            Version::V1_19 => &V1_19,
            Version::V1_20 => &V1_20,
            Version::V1_21 => &V1_21,
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.names() {
            [first, .., last] => write!(f, "{first} to {last}"),
            names => f.write_str(names.first().unwrap_or(&"")),
        }
    }
}

impl FromStr for Version {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        let is = |name: &&str| *name == s || s.strip_prefix(*name).is_some_and(|patch| patch.starts_with('.'));
        Version::ALL.into_iter().find(|v| v.names().iter().any(is)).ok_or_else(|| {
            let all: Vec<_> = Version::ALL.iter().map(|v| v.to_string()).collect();
            format!("known are the parameters of UCX {}", all.join(", "))
        })
    }
}

/// Offsets into the struct of one version.
struct Fields {
    len: usize,
    thread_mode: u32,
    /// Accelerator devices of both sides: where, and the type that means "none".
    accel: Option<(usize, u32)>,
    flags: usize,
    size_count: usize,
    alignment: usize,
    warmup: usize,
    warmup_time: usize,
    iters: usize,
    max_time: usize,
    report_interval: usize,
    percentile: usize,
    /// Settings of tests that a device runs: where, and the default.
    on_device: Option<(usize, &'static [u32])>,
    device: usize,
    transport: usize,
    layout: usize,
    window: usize,
    am_header: usize,
    test_index: usize,
}

// At the same place in both.
const API: usize = 0;
const COMMAND: usize = 4;
const TEST_TYPE: usize = 8;
const THREAD_MODE: usize = 12;
const THREADS: usize = 16;
const ASYNC_MODE: usize = 20;
const WAIT_MODE: usize = 24;

const V1_13: Fields = Fields {
    len: 264,
    thread_mode: 0,
    accel: None,
    flags: 36,
    size_count: 48,
    alignment: 64,
    warmup: 80,
    warmup_time: 88,
    iters: 96,
    max_time: 104,
    report_interval: 112,
    percentile: 120,
    on_device: None,
    device: 152,
    transport: 184,
    layout: 212,
    window: 216,
    am_header: 224,
    test_index: 256,
};

const V1_19: Fields = Fields {
    len: 528,
    thread_mode: 1,
    device: 160,
    transport: 192,
    layout: 220,
    window: 224,
    am_header: 232,
    test_index: 520,
    ..V1_13
};

const V1_20: Fields = Fields {
    len: 560,
    accel: Some((36, 9)),
    on_device: Some((152, &[1, 1])),
    device: 192,
    transport: 224,
    layout: 252,
    window: 256,
    am_header: 264,
    test_index: 552,
    ..V1_21
};

const V1_21: Fields = Fields {
    len: 584,
    thread_mode: 1,
    accel: Some((36, 10)),
    flags: 56,
    size_count: 72,
    alignment: 88,
    warmup: 104,
    warmup_time: 112,
    iters: 120,
    max_time: 128,
    report_interval: 136,
    percentile: 144,
    on_device: Some((168, &[1, 1, 4])),
    device: 216,
    transport: 248,
    layout: 276,
    window: 280,
    am_header: 288,
    test_index: 576,
};

const DEVICE_LEN: usize = 32;
const TRANSPORT_LEN: usize = 10;
const FLAG_VALIDATE: u32 = 0x2;
const FLAG_ONE_SIDED: u32 = 0x4;
const FLAG_VERBOSE: u32 = 0x80;
/// More pieces than a message of UD can be made of.
const SIZE_COUNT_MAX: u64 = 16;
/// A status follows the parameters at once: length and value.
const STATUS_LEN: usize = 9;

const TRANSPORT: &[u8] = b"ud_verbs";

/// One test.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Task {
    pub(crate) test: Test,
    pub(crate) layout: Layout,
    pub(crate) size: usize,
    pub(crate) iters: u64,
    /// Iterations of the warm-up; it may end earlier, by time.
    pub(crate) warmup: u64,
    /// Messages of a stream that may be under way.
    pub(crate) window: u32,
}

/// What the first bytes of a client turned out to be.
#[derive(PartialEq, Eq, Debug)]
pub(crate) enum Found {
    /// These parameters, so many bytes long.
    Task(Task, Version, usize),
    /// Nothing known, as far as can be told by now.
    Unknown,
}

impl Task {
    /// In words, for people.
    pub(crate) fn describe(&self) -> String {
        format!("{} {}, {} bytes, {} iterations", self.test.name(), self.layout.name(), self.size, self.iters)
    }

    /// The bytes that ask a server for this test.
    /// `device` is the server's, of which the last byte of 32 is cut off.
    pub(crate) fn encode(&self, version: Version, device: &str) -> Vec<u8> {
        let f = version.fields();
        let mut p = vec![0; f.len];
        let mut u32_at = |at: usize, v: u32| p[at..at + 4].copy_from_slice(&v.to_le_bytes());
        u32_at(API, 0);
        u32_at(COMMAND, 0);
        u32_at(TEST_TYPE, if self.test == Test::Lat { 0 } else { 2 });
        u32_at(THREAD_MODE, f.thread_mode);
        u32_at(THREADS, 1);
        u32_at(ASYNC_MODE, 1);
        u32_at(WAIT_MODE, 3);
        if let Some((at, none)) = f.accel {
            for side in [at, at + 8] {
                u32_at(side, none);
                u32_at(side + 4, u32::MAX);
            }
        }
        if let Some((at, values)) = f.on_device {
            values.iter().enumerate().for_each(|(i, &v)| u32_at(at + 4 * i, v));
        }
        u32_at(f.flags, FLAG_VERBOSE);
        u32_at(f.layout, layout_code(self.layout));
        u32_at(f.window, self.window);
        // The server takes its defaults from the place of the test in the program's own table.
        u32_at(f.test_index, if self.test == Test::Lat { 0 } else { 7 });
        let mut u64_at = |at: usize, v: u64| p[at..at + 8].copy_from_slice(&v.to_le_bytes());
        u64_at(f.size_count, 1);
        u64_at(f.alignment, 4096);
        u64_at(f.warmup, self.warmup);
        u64_at(f.warmup_time, 0.1f64.to_bits());
        u64_at(f.iters, self.iters);
        u64_at(f.report_interval, 1f64.to_bits());
        u64_at(f.percentile, 50f64.to_bits());
        u64_at(f.am_header, 8);
        let device = device.as_bytes();
        let n = device.len().min(DEVICE_LEN - 1);
        p[f.device..f.device + n].copy_from_slice(&device[..n]);
        p[f.transport..f.transport + TRANSPORT.len()].copy_from_slice(TRANSPORT);
        p.extend((self.size as u64).to_le_bytes());
        p
    }

    /// Recognises parameters by their length: `bytes` is everything that the client has sent up to now, and it sends a
    /// status behind its parameters, then waits.
    ///
    /// # Errors
    /// Recognised, and asking for something that is not played here; in words.
    pub(crate) fn recognise(bytes: &[u8], only: Option<Version>) -> Result<Found, String> {
        for v in Version::ALL.into_iter().filter(|&v| only.is_none_or(|o| o == v)) {
            let f = v.fields();
            let Some(count) = u64_at(bytes, f.size_count).filter(|n| (1..=SIZE_COUNT_MAX).contains(n)) else {
                continue;
            };
            let len = f.len + 8 * count as usize;
            // The front of a longer struct, if that is what has come by now, has no name there.
            let has_name = bytes.get(f.transport).is_some_and(u8::is_ascii_alphanumeric);
            if has_name && (len..=len + STATUS_LEN).contains(&bytes.len()) {
                return decode(bytes, f, len).map(|t| Found::Task(t, v, len));
            }
        }
        Ok(Found::Unknown)
    }

    /// The longest parameters, with the status.
    pub(crate) const LEN_MAX: usize = V1_21.len + 8 * SIZE_COUNT_MAX as usize + STATUS_LEN;
}

/// Why parameters are refused, for a client whose bytes are of no known length.
pub(crate) fn unknown(len: usize, only: Option<Version>) -> String {
    let known: Vec<_> = Version::ALL
        .into_iter()
        .filter(|&v| only.is_none_or(|o| o == v))
        .map(|v| format!("{v} ({} bytes)", v.fields().len))
        .collect();
    let params = len.saturating_sub(8 + STATUS_LEN);
    format!(
        "the parameters it sent are of an unknown version of UCX: {len} bytes came, which is a struct of some {params}; known \
         are those of {}",
        known.join(", ")
    )
}

fn decode(bytes: &[u8], f: &Fields, len: usize) -> Result<Task, String> {
    let u32_or = |at| u32_at(bytes, at).unwrap_or(u32::MAX);
    let u64_or = |at| u64_at(bytes, at).unwrap_or(u64::MAX);
    let text = |at: usize, n: usize| {
        let b = bytes.get(at..at + n).unwrap_or_default();
        String::from_utf8_lossy(b.split(|&c| c == 0).next().unwrap_or_default()).into_owned()
    };
    if u32_or(API) != 0 {
        return Err("it asks for a UCP test; played here are UCT's am_lat and am_bw (-t)".into());
    }
    let test = match (u32_or(COMMAND), u32_or(TEST_TYPE)) {
        (0, 0) => Test::Lat,
        (0, 2) => Test::Bw,
        (command, kind) => {
            return Err(format!(
                "it asks for command {command}, test type {kind}; played here are am_lat and am_bw (-t): command 0, type 0 or 2"
            ));
        }
    };
    let transport = text(f.transport, TRANSPORT_LEN);
    if transport.as_bytes() != TRANSPORT {
        return Err(format!(
            "it asks for transport `{}`; played here is ud_verbs (-x)",
            super::super::failure::clean(&transport)
        ));
    }
    if u32_or(f.flags) & (FLAG_VALIDATE | FLAG_ONE_SIDED) != 0 {
        return Err("it asks for validation or one-sided tests, which are not played here".into());
    }
    if u32_or(THREADS) != 1 {
        return Err(format!("it asks for {} threads; played here is 1 (-T)", u32_or(THREADS)));
    }
    let iters = u64_or(f.iters);
    if iters == 0 || f64::from_bits(u64_or(f.max_time)) != 0.0 {
        return Err("it asks for a run that ends by time; played here are those that end by count (-n)".into());
    }
    let layout = match u32_or(f.layout) {
        0 => Layout::Short,
        1 => Layout::Shortiov,
        2 => Layout::Bcopy,
        3 => Layout::Zcopy,
        n => return Err(format!("it asks for data layout {n}; known are 0 to 3 (-D)")),
    };
    let window = u32_or(f.window);
    if !(1..=127).contains(&window) {
        return Err(format!("it asks for a window of {window} messages, possible are 1 to 127 (-W)"));
    }
    let sizes = bytes.get(f.len..len).unwrap_or_default().chunks_exact(8);
    let size: u64 = sizes.map(|b| u64_at(b, 0).unwrap_or(u64::MAX)).fold(0, u64::saturating_add);
    let size = usize::try_from(size)
        .ok()
        .filter(|&n| n > 0)
        .ok_or("it asks for messages without content; the number is in it (-s)")?;
    Ok(Task { test, layout, size, iters, warmup: u64_or(f.warmup), window })
}

fn layout_code(layout: Layout) -> u32 {
    match layout {
        Layout::Short => 0,
        Layout::Shortiov => 1,
        Layout::Bcopy => 2,
        Layout::Zcopy => 3,
    }
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|b| u32::from_le_bytes(*b))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().map(|b| u64::from_le_bytes(*b))
}

#[cfg(test)]
#[path = "task_tests.rs"]
mod tests;
