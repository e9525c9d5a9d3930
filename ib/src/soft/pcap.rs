//! A capture file of the frames that a soft device sends and receives, for tshark and Wireshark.
//!
//! A socket sees neither IP nor UDP headers, so both are synthesised (TTL 64, TOS 0, valid checksums); the ICRC and all
//! that it covers is real. Every record is written at once: a capture survives the death of its process. That makes one
//! `write` per frame, which is what a debugging aid may cost.

use std::{
    fs::File,
    io::{self, Write},
    path::Path,
    time::SystemTime,
};

use super::icrc::{Flow, IPV4_LEN, UDP_LEN};
use crate::device::GRH_LEN;

/// Link type "raw IP": each record starts with an IPv4 or IPv6 header.
const LINKTYPE_RAW: u32 = 101;
/// The magic of a capture file with time stamps in nanoseconds.
const MAGIC_NANOS: u32 = 0xa1b2_3c4d;
const RECORD_LEN: usize = 16;

/// Writes frames to a capture file.
#[derive(Debug)]
pub struct PcapWriter {
    file: File,
    record: Vec<u8>,
}

impl PcapWriter {
    /// Creates or truncates the file and writes its header.
    ///
    /// # Errors
    /// Those of opening and writing a file.
    pub fn create(path: &Path) -> io::Result<PcapWriter> {
        let mut file = File::create(path)?;
        let mut head = Vec::with_capacity(24);
        head.extend_from_slice(&MAGIC_NANOS.to_le_bytes());
        head.extend_from_slice(&2u16.to_le_bytes());
        head.extend_from_slice(&4u16.to_le_bytes());
        head.extend_from_slice(&[0; 8]);
        head.extend_from_slice(&65535u32.to_le_bytes());
        head.extend_from_slice(&LINKTYPE_RAW.to_le_bytes());
        file.write_all(&head)?;
        Ok(PcapWriter { file, record: Vec::with_capacity(8192) })
    }

    /// Appends one frame that travelled over `flow` in a packet with this IPv4 ID.
    ///
    /// # Errors
    /// Those of writing a file; the record may then be incomplete.
    pub fn write(&mut self, flow: &Flow, id: u16, frame: &[u8]) -> io::Result<()> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let mut area = [0; GRH_LEN];
        flow.grh(frame.len(), id).write(&mut area);
        let ip = if flow.is_ipv4() { &area[GRH_LEN - IPV4_LEN..] } else { &area[..] };
        let mut udp = [0; UDP_LEN];
        flow.write_udp(&mut udp, frame.len());
        let sum = udp_checksum(flow, &udp, frame);
        udp[6..].copy_from_slice(&sum.to_be_bytes());
        let len = (ip.len() + UDP_LEN + frame.len()) as u32;

        let r = &mut self.record;
        r.clear();
        for word in [now.as_secs() as u32, now.subsec_nanos(), len, len] {
            r.extend_from_slice(&word.to_le_bytes());
        }
        debug_assert_eq!(r.len(), RECORD_LEN);
        r.extend_from_slice(ip);
        r.extend_from_slice(&udp);
        r.extend_from_slice(frame);
        self.file.write_all(r)
    }
}

/// The checksum over pseudo header (addresses, protocol and length), header and frame; never 0, which would say "none".
fn udp_checksum(flow: &Flow, udp: &[u8; UDP_LEN], frame: &[u8]) -> u16 {
    let len = ((UDP_LEN + frame.len()) as u16).to_be_bytes();
    let parts = [flow.addresses(), &[0, 17, len[0], len[1]], udp, frame];
    // All parts but the last have an even length, so words do not straddle them. 64 bits cannot overflow.
    let words = parts.iter().flat_map(|p| p.chunks(2));
    let mut sum: u64 = words.map(|w| u64::from(w[0]) << 8 | w.get(1).map_or(0, |&b| u64::from(b))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    match !(sum as u16) {
        0 => 0xffff,
        sum => sum,
    }
}
