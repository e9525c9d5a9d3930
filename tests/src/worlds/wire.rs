//! [`WireCheck`] reads along what the engines say to each other, and knows nothing of them: no sender has more packets in
//! flight than its window allows. It also makes one number of all packets, by which two runs are compared.

use std::collections::BTreeMap;

use ib::sim::{NodeId, TappedPacket, TraceEvent};

use crate::packets::{AM, CTL, NACK, NO_EP, PUT};

/// What an endpoint has sent, and what its peer has acknowledged as far as it can know.
#[derive(Copy, Clone, Debug)]
struct Flight {
    last: u16,
    acked: u16,
}

/// See the module.
#[derive(Debug, Default)]
pub struct WireCheck {
    /// Of each process: its window, and where its PSNs start.
    limits: BTreeMap<NodeId, (u32, u16)>,
    /// By sender, receiver and the receiver's endpoint: the sender's endpoint, which no packet names.
    sources: BTreeMap<(NodeId, NodeId, u32), u32>,
    flights: BTreeMap<(NodeId, u32), Flight>,
    wrong: Vec<String>,
    digest: u64,
    packets: u64,
}

fn is_after(a: u16, b: u16) -> bool {
    (1..=0x7fff).contains(&a.wrapping_sub(b))
}

fn le(bytes: &[u8], at: usize, len: usize) -> Option<u32> {
    let mut out = [0; 4];
    out[..len].copy_from_slice(bytes.get(at..at + len)?);
    Some(u32::from_le_bytes(out))
}

impl WireCheck {
    /// A process starts.
    pub fn open(&mut self, node: NodeId, window: u32, first_psn: u16) {
        self.limits.insert(node, (window, first_psn));
    }

    /// What must never be, since the last call.
    pub fn take_wrong(&mut self) -> Vec<String> {
        std::mem::take(&mut self.wrong)
    }

    /// A number that all packets and their times have gone into.
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// Packets that have left.
    pub fn packets(&self) -> u64 {
        self.packets
    }

    /// Reads a packet.
    pub fn see(&mut self, p: &TappedPacket<'_>) {
        let mut fold = |x: u64| self.digest = (self.digest ^ x).wrapping_mul(0x100_0000_01b3).rotate_left(23);
        fold(p.time.as_nanos());
        fold(u64::from(p.src.0) << 32 | p.payload.len() as u64);
        for chunk in p.payload.chunks(8).take(6) {
            fold(chunk.iter().fold(0, |n, b| n << 8 | u64::from(*b)));
        }
        let Some(to) = p.dst else { return };
        match p.event {
            TraceEvent::Sent => {
                self.packets += 1;
                self.sent(p.src, to, p.payload);
            }
            TraceEvent::Delivered => self.delivered(to, p.payload),
            TraceEvent::Dropped(_) | TraceEvent::Corrupted => {}
        }
    }

    fn sent(&mut self, from: NodeId, to: NodeId, bytes: &[u8]) {
        let Some(kind) = le(bytes, 0, 4) else { return };
        let (Some(psn), dest) = (le(bytes, 4, 2), kind & NO_EP) else { return };
        let psn = psn as u16;
        let ctl = (kind & AM == 0 && kind & CTL != 0).then(|| bytes.get(8).copied().unwrap_or(0));
        let source = match ctl {
            Some(1) => le(bytes, 15, 3),
            Some(2) => {
                let own = le(bytes, 12, 4);
                if let Some(own) = own {
                    self.sources.insert((from, to, dest), own);
                    self.sources.insert((to, from, own), dest);
                }
                own
            }
            Some(_) => return,
            None if kind & (AM | PUT) != 0 => self.sources.get(&(from, to, dest)).copied(),
            // Acks and questions take no number.
            None => return,
        };
        debug_assert!(kind & AM != 0 || kind & NACK == 0, "a packet that takes a number complains");
        let Some(source) = source else { return };
        let (window, first) = self.limits.get(&from).copied().unwrap_or((1025, psn));
        let f = self.flights.entry((from, source)).or_insert(Flight { last: psn, acked: first.wrapping_sub(1) });
        if is_after(psn, f.last) {
            f.last = psn;
        }
        // The window's last number stays free. A request that crosses another counts as its answer, which does not show here.
        let in_flight = u32::from(f.last.wrapping_sub(f.acked));
        if in_flight > window + 1 && in_flight < 0x8000 && self.wrong.len() < 16 {
            let text = format!("node {} ep {source}: {in_flight} packets in flight, window {window}", from.0);
            self.wrong.push(text);
        }
    }

    fn delivered(&mut self, at: NodeId, bytes: &[u8]) {
        let (Some(kind), Some(ack)) = (le(bytes, 0, 4), le(bytes, 6, 2)) else { return };
        if let Some(f) = self.flights.get_mut(&(at, kind & NO_EP)) {
            let ack = ack as u16;
            if is_after(ack, f.acked) && !is_after(ack, f.last) {
                f.acked = ack;
            }
        }
    }
}
