//! UD packets as UCX's `ud_verbs` puts them on the wire, made by hand: an independent second opinion to the engine's own
//! writer. Everything is little-endian and starts at the NETH, behind the 40 bytes of the GRH area.

/// "No endpoint yet", the destination of a CREQ.
pub const NO_EP: u32 = 0x00ff_ffff;
/// The packet is an active message.
pub const AM: u32 = 1 << 24;
/// An acknowledgement is wanted at once.
pub const ACK_REQ: u32 = 1 << 25;
/// There was a gap.
pub const NACK: u32 = 1 << 27;
/// A remote write.
pub const PUT: u32 = 1 << 28;
/// A control header follows.
pub const CTL: u32 = 1 << 29;

/// The name and process id of an invented UCX process, as in CREQ and CREP.
pub const UCX_IDENT: [u8; 20] = *b"vm\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x31\x36\0\0";

/// The 8 bytes in front of everything.
pub fn neth(packet_type: u32, psn: u16, ack: u16) -> Vec<u8> {
    let mut b = packet_type.to_le_bytes().to_vec();
    b.extend(psn.to_le_bytes());
    b.extend(ack.to_le_bytes());
    b
}

/// A connection request.
#[derive(Clone, Debug)]
pub struct Creq {
    /// The sender's queue pair.
    pub qpn: u32,
    /// The sender's endpoint.
    pub ep_id: u32,
    /// Which connection between the two it is.
    pub conn_sn: u32,
    /// The sender's path.
    pub path: u8,
    /// Name and process id.
    pub ident: [u8; 20],
    /// The sender's packed device address.
    pub addr: Vec<u8>,
    /// What stands where UCX leaves memory as it finds it.
    pub junk: u8,
}

impl Creq {
    /// The packet. `repeat`: as UCX's timer sends it again.
    pub fn packet(&self, psn: u16, repeat: bool) -> Vec<u8> {
        let mut b = neth(CTL | NO_EP | if repeat { ACK_REQ } else { 0 }, psn, 0);
        b.extend([1, self.junk, self.junk, self.junk]);
        b.extend(&self.qpn.to_le_bytes()[..3]);
        b.extend(&self.ep_id.to_le_bytes()[..3]);
        b.extend([self.junk; 2]);
        b.extend(self.conn_sn.to_le_bytes());
        b.extend([self.path, self.junk, self.junk, self.junk]);
        b.extend(self.ident);
        b.extend(&self.addr);
        b
    }
}

/// The answer to a connection request.
pub fn crep(dest: u32, psn: u16, ack: u16, src_ep_id: u32, ident: &[u8; 20], junk: u8) -> Vec<u8> {
    let mut b = neth(CTL | ACK_REQ | dest, psn, ack);
    b.extend([2, junk, junk, junk]);
    b.extend(src_ep_id.to_le_bytes());
    b.extend([junk; 12]);
    b.extend(ident);
    b
}

/// An active message; `flags` may be [`ACK_REQ`].
pub fn am(dest: u32, id: u8, flags: u32, psn: u16, ack: u16, payload: &[u8]) -> Vec<u8> {
    let mut b = neth(AM | u32::from(id) << 27 | flags | dest, psn, ack);
    b.extend(payload);
    b
}

/// A pure acknowledgement; `flags` may be [`ACK_REQ`], [`NACK`] or both. `next` is the PSN the sender would send next.
pub fn ack(dest: u32, flags: u32, next: u16, ack: u16) -> Vec<u8> {
    neth(flags | dest, next, ack)
}

/// A remote write; without data it is UCX's keep-alive.
pub fn put(dest: u32, psn: u16, ack: u16, addr: u64, data: &[u8]) -> Vec<u8> {
    let mut b = neth(PUT | dest, psn, ack);
    b.extend(addr.to_le_bytes());
    b.extend(data);
    b
}

/// A received packet, taken apart.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Parsed {
    /// Flags and destination.
    pub packet_type: u32,
    /// Its PSN.
    pub psn: u16,
    /// What it acknowledges.
    pub ack: u16,
    /// All of it.
    pub bytes: Vec<u8>,
}

impl Parsed {
    /// Takes a packet apart.
    ///
    /// # Panics
    /// If it is shorter than its header.
    pub fn new(bytes: &[u8]) -> Self {
        let word = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        Parsed {
            packet_type: u32::from(word(0)) | u32::from(word(2)) << 16,
            psn: word(4),
            ack: word(6),
            bytes: bytes.to_vec(),
        }
    }

    /// True if a flag is set that does not belong to the AM id.
    pub fn is(&self, flag: u32) -> bool {
        self.packet_type & flag != 0
    }

    /// True for an active message.
    pub fn is_am(&self) -> bool {
        self.is(AM)
    }

    /// The AM id.
    pub fn am_id(&self) -> u8 {
        (self.packet_type >> 27) as u8
    }

    /// The destination endpoint.
    pub fn dest(&self) -> u32 {
        self.packet_type & NO_EP
    }

    /// True for a packet that is nothing but an acknowledgement.
    pub fn is_pure_ack(&self) -> bool {
        !self.is_am() && self.bytes.len() == 8
    }

    /// True for a negative acknowledgement.
    pub fn is_nack(&self) -> bool {
        !self.is_am() && self.is(NACK)
    }

    /// The control type, of a control packet.
    pub fn ctl(&self) -> Option<u8> {
        (!self.is_am() && self.is(CTL)).then(|| self.bytes.get(8).copied()).flatten()
    }

    /// True for a connection request.
    pub fn is_creq(&self) -> bool {
        self.ctl() == Some(1)
    }

    /// True for the answer to one.
    pub fn is_crep(&self) -> bool {
        self.ctl() == Some(2)
    }

    /// The sender's endpoint id, of a CREQ or CREP.
    pub fn src_ep_id(&self) -> u32 {
        let b = &self.bytes;
        if self.is_creq() {
            u32::from_le_bytes([b[15], b[16], b[17], 0])
        } else {
            u32::from_le_bytes([b[12], b[13], b[14], b[15]])
        }
    }

    /// The connection number of a CREQ.
    pub fn conn_sn(&self) -> u32 {
        let b = &self.bytes;
        u32::from_le_bytes([b[20], b[21], b[22], b[23]])
    }

    /// What follows the NETH.
    pub fn payload(&self) -> &[u8] {
        &self.bytes[8..]
    }
}
