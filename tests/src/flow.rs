//! Numbered messages of every kind: [`Flow`] sends them over one endpoint, [`Ledger`] checks on the other side that
//! they arrive exactly once, in order and unchanged.

use std::collections::BTreeMap;

use ib::sw::Rng;
use uct::{AmId, Completion, Ep, SendResult, md::MemoryDomain};

use crate::{
    fabric::Fabric,
    world::{Node, Received, World},
};

/// How a message is sent.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Kind {
    /// `am_short`.
    Short,
    /// `am_bcopy`.
    Bcopy,
    /// `am_zcopy`, a part in the header and two pieces.
    Zcopy,
}

/// A sequence of messages that one endpoint sends.
#[derive(Clone, Debug)]
pub struct Flow {
    /// Its number, which every message carries.
    pub number: u32,
    /// Messages that were accepted.
    pub sent: u32,
}

/// Message `seq` of flow `number`: both in the first 8 bytes, and what only that message looks like.
pub(crate) fn bytes(number: u32, seq: u32, len: usize) -> Vec<u8> {
    let tag = u64::from(number) << 32 | u64::from(seq);
    let mut rng = Rng::new(tag);
    let mut out = tag.to_ne_bytes().to_vec();
    while out.len() < len {
        out.extend(rng.next_u64().to_ne_bytes());
    }
    out.truncate(len.max(8));
    out
}

impl Flow {
    /// The flow of this number, which nothing was sent on.
    pub fn new(number: u32) -> Self {
        Flow { number, sent: 0 }
    }

    /// Tries to send the next message, of about `len` bytes; limits of the endpoint's interface apply.
    ///
    /// # Errors
    /// Those of the send.
    pub fn send<F: Fabric>(
        &mut self,
        from: &Node<F>,
        ep: &Ep,
        kind: Kind,
        len: usize,
        comp: Option<&Completion>,
    ) -> SendResult<()> {
        let limits = from.iface().attr().am;
        let max = |n: Option<std::num::NonZeroUsize>| n.map_or(8, |n| n.get());
        let id = AmId::truncate(self.number as u8);
        match kind {
            // A device that can send nothing inline has no short messages.
            Kind::Short if limits.max_short.is_none() => return self.send(from, ep, Kind::Bcopy, len, comp),
            Kind::Short => {
                let data = bytes(self.number, self.sent, len.min(max(limits.max_short)));
                let header = u64::from(self.number) << 32 | u64::from(self.sent);
                ep.am_short(id, header, &data[8..])?;
            }
            Kind::Bcopy => {
                let data = bytes(self.number, self.sent, len.min(max(limits.max_bcopy)));
                let _len = ep.am_bcopy(id, &mut |to| {
                    to[..data.len()].copy_from_slice(&data);
                    data.len()
                })?;
            }
            Kind::Zcopy => {
                let data = bytes(self.number, self.sent, len.min(max(limits.max_zcopy)));
                let (head, body) = data.split_at(8);
                let mut region = from.md.mem_alloc(body.len().max(1))?;
                region.bytes_mut().expect("a fresh region")[..body.len()].copy_from_slice(body);
                let half = body.len() / 2;
                let iov = [region.slice(0..half)?, region.slice(half..body.len())?];
                let _in_progress = ep.am_zcopy(id, head, &iov, comp)?;
            }
        }
        self.sent += 1;
        Ok(())
    }

    /// Sends `n` messages of random kinds and lengths, moving the world whenever the endpoint is busy.
    #[track_caller]
    pub fn send_mixed<F: Fabric>(&mut self, w: &mut World<F>, node: usize, ep: &Ep, n: u32, rng: &mut Rng) {
        let end = self.sent + n;
        w.run_until("all messages are accepted", |w| {
            while self.sent < end {
                let (kind, len) = draw_message(rng);
                match self.send(&w.nodes[node], ep, kind, len, None) {
                    Ok(()) => {}
                    Err(uct::SendError::NoResource) => return false,
                    Err(uct::SendError::Failed(e)) => w.fail(&format!("flow {}: {e}", self.number)),
                }
            }
            true
        });
    }
}

/// A kind and a length; short ones are more frequent.
pub fn draw_message(rng: &mut Rng) -> (Kind, usize) {
    match rng.below(8) {
        0..4 => (Kind::Short, rng.below(200) as usize),
        4..7 => (Kind::Bcopy, rng.below(4096) as usize),
        _ => (Kind::Zcopy, 8 + rng.below(4096) as usize),
    }
}

/// What a receiver has got of each flow.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    got: BTreeMap<u32, u32>,
}

impl Ledger {
    /// Messages that have arrived of a flow.
    pub fn got(&self, flow: u32) -> u32 {
        self.got.get(&flow).copied().unwrap_or(0)
    }

    /// Messages that have arrived of all flows.
    pub fn total(&self) -> u32 {
        self.got.values().sum()
    }

    /// Enters a message.
    ///
    /// # Errors
    /// What is wrong with it: damaged, lost, double, out of order.
    pub fn enter(&mut self, m: &Received) -> Result<(), String> {
        let Some(tag) = m.data.first_chunk::<8>().map(|b| u64::from_ne_bytes(*b)) else {
            return Err(format!("a message of {} bytes", m.data.len()));
        };
        let (flow, seq) = ((tag >> 32) as u32, tag as u32);
        if m.data != bytes(flow, seq, m.data.len()) || m.id != AmId::truncate(flow as u8).get() {
            return Err(format!("message {seq} of flow {flow} is damaged"));
        }
        let next = self.got.entry(flow).or_default();
        if seq != *next {
            return Err(format!("message {seq} of flow {flow} came instead of {next}"));
        }
        *next += 1;
        Ok(())
    }

    /// Enters what has arrived at a node. Fails the test on the first thing that is wrong.
    #[track_caller]
    pub fn collect<F: Fabric>(&mut self, w: &World<F>, node: usize) {
        for m in w.nodes[node].take() {
            if let Err(e) = self.enter(&m) {
                w.fail(&format!("node {node}: {e}"));
            }
        }
    }

    /// Runs until all of a flow has arrived.
    #[track_caller]
    pub fn await_flow<F: Fabric>(&mut self, w: &mut World<F>, node: usize, flow: &Flow) {
        w.run_until(&format!("all {} messages of flow {} arrive", flow.sent, flow.number), |w| {
            self.collect(w, node);
            self.got(flow.number) >= flow.sent
        });
    }
}
