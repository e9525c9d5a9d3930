//! Sends that wait for [`ring`](crate::device::UdQp::ring): frames built in place, in runs that leave together.
//!
//! A run is a row of frames to one destination that the kernel takes as one send (GSO): all of one length, the last may be
//! shorter. Frame *i* of a run leaves with IPv4 ID *i*, so its ICRC depends on its place, and a run that must leave frame
//! by frame after all is sealed again.

use tracing::{trace, warn};

use super::{
    device::{Dest, SoftDevice},
    frame::{HEADER_LEN, Header, frame_len, parse, seal, write_header},
    icrc::{Flow, Prefix},
    sockaddr::SockAddr,
    socket::{CALL_MAX, Outgoing},
};
use crate::sw::DropReason;

/// How many sends wait at most. Also what kernels before 6.2 take as segments of one run.
pub(super) const BATCH_MAX: usize = 64;
/// Bytes of a run; a little below what one UDP send takes on IPv4 and IPv6.
const RUN_MAX: usize = 65_000;

#[derive(Copy, Clone, Debug)]
struct Run {
    to: SockAddr,
    tos: u8,
    flow: Flow,
    prefix: Prefix,
    start: usize,
    end: usize,
    /// Length of all frames but the last.
    segment: usize,
    count: u16,
    /// No shorter frame has ended it yet.
    open: bool,
    payload_bytes: u64,
}

impl Run {
    fn outgoing<'a>(&'a self, buf: &'a [u8]) -> Outgoing<'a> {
        let segment = if self.count > 1 { self.segment as u16 } else { 0 };
        Outgoing { to: &self.to, bytes: &buf[self.start..self.end], segment, tos: self.tos }
    }
}

/// What one [`TxStage::flush`] did.
#[derive(Default)]
struct Sent {
    packets: u64,
    bytes: u64,
    gso_runs: u64,
}

/// The staging memory of one queue pair. Nothing is allocated after `new`.
#[derive(Debug)]
pub(super) struct TxStage {
    buf: Box<[u8]>,
    used: usize,
    frames: usize,
    runs: Vec<Run>,
    /// The sum over the headers of the last run's frames: the next run is often like it.
    last: Option<(Flow, usize, Prefix)>,
}

impl TxStage {
    /// Room for [`BATCH_MAX`] frames of the MTU. The pages are touched when they are used.
    pub(super) fn new(mtu: usize) -> TxStage {
        TxStage {
            buf: vec![0; BATCH_MAX * frame_len(mtu)].into_boxed_slice(),
            used: 0,
            frames: 0,
            runs: Vec::with_capacity(BATCH_MAX),
            last: None,
        }
    }

    /// True if a frame of this length must wait for a flush.
    pub(super) fn is_full(&self, payload_len: usize) -> bool {
        self.frames == BATCH_MAX || self.used + frame_len(payload_len) > self.buf.len()
    }

    /// Builds a frame. `fill` writes the `payload_len` bytes of payload. The stage is not full and the payload not above
    /// the MTU: the caller has looked.
    #[inline]
    pub(super) fn push(
        &mut self,
        dest: &Dest,
        header: &Header,
        payload_len: usize,
        gso: bool,
        fill: impl FnOnce(&mut [u8]),
    ) {
        let len = frame_len(payload_len);
        let start = self.used;
        let (prefix, id) = self.place(dest, len, gso);
        if let Some(run) = self.runs.last_mut() {
            run.payload_bytes += payload_len as u64;
        }
        self.used += len;
        self.frames += 1;
        let frame = &mut self.buf[start..start + len];
        if let Some(head) = frame.first_chunk_mut::<HEADER_LEN>() {
            write_header(head, header, payload_len);
        }
        fill(&mut frame[HEADER_LEN..HEADER_LEN + payload_len]);
        seal(frame, payload_len, &prefix, id);
    }

    /// Appends room for a frame to the last run or starts a new one. Answers the prefix for its ICRC and its ID.
    #[inline]
    fn place(&mut self, dest: &Dest, len: usize, gso: bool) -> (Prefix, u16) {
        if gso
            && let Some(run) = self.runs.last_mut()
            && run.open
            && len <= run.segment
            && run.end - run.start + len <= RUN_MAX
            && run.to == dest.to
            && run.tos == dest.tos
        {
            let id = run.count;
            run.count += 1;
            run.end += len;
            run.open = len == run.segment;
            let prefix = if run.open { run.prefix } else { dest.flow.prefix(len) };
            return (prefix, id);
        }
        let prefix = match &self.last {
            Some((flow, n, prefix)) if *n == len && *flow == dest.flow => *prefix,
            _ => {
                let prefix = dest.flow.prefix(len);
                self.last = Some((dest.flow, len, prefix));
                prefix
            }
        };
        self.runs.push(Run {
            to: dest.to,
            tos: dest.tos,
            flow: dest.flow,
            prefix,
            start: self.used,
            end: self.used + len,
            segment: len,
            count: 1,
            open: true,
            payload_bytes: 0,
        });
        (prefix, 0)
    }

    /// Lets everything leave. What the kernel refuses is counted and gone, as a UD packet may be.
    pub(super) fn flush(&mut self, dev: &SoftDevice) {
        if self.runs.is_empty() {
            return;
        }
        if dev.is_capturing() {
            self.capture(dev);
        }
        let mut sent = Sent::default();
        match &self.runs[..] {
            [run] => {
                let m = run.outgoing(&self.buf);
                let plain = m.segment == 0 && m.tos == 0;
                let result = if plain { dev.socket().send(m.to, m.bytes) } else { dev.socket().send_run(&m) };
                match result {
                    Ok(()) => sent.add(run),
                    Err(errno) => self.refused(dev, 0, errno, &mut sent),
                }
            }
            _ => self.flush_many(dev, &mut sent),
        }
        dev.count_sent(sent.packets, sent.bytes, sent.gso_runs);
        self.runs.clear();
        self.used = 0;
        self.frames = 0;
    }

    fn flush_many(&mut self, dev: &SoftDevice, sent: &mut Sent) {
        let mut next = 0;
        // Each turn sends or gives up at least one run.
        while next < self.runs.len() {
            let chunk = &self.runs[next..self.runs.len().min(next + CALL_MAX)];
            let mut messages = [Outgoing { to: &SockAddr::UNSPECIFIED, bytes: &[], segment: 0, tos: 0 }; CALL_MAX];
            for (m, run) in messages.iter_mut().zip(chunk) {
                *m = run.outgoing(&self.buf);
            }
            match dev.socket().send_many(&messages[..chunk.len()]) {
                Ok(n) if n > 0 => {
                    let n = n.min(chunk.len());
                    chunk[..n].iter().for_each(|run| sent.add(run));
                    next += n;
                }
                result => {
                    self.refused(dev, next, result.err().unwrap_or(libc::EIO), sent);
                    next += 1;
                }
            }
        }
    }

    /// The kernel did not take a run. If that may be for its being a run, its frames leave one by one.
    #[cold]
    fn refused(&mut self, dev: &SoftDevice, which: usize, errno: i32, sent: &mut Sent) {
        let run = self.runs[which];
        let about_runs = matches!(errno, libc::EINVAL | libc::EIO | libc::EOPNOTSUPP | libc::ENOPROTOOPT);
        if run.count < 2 || !about_runs {
            lost(dev, &run, errno, u64::from(run.count));
            return;
        }
        let mut start = run.start;
        let mut left = 0u64;
        while start < run.end {
            let end = run.end.min(start + run.segment);
            let frame = &mut self.buf[start..end];
            let payload_len = parse(frame).map_or(0, |(_, payload)| payload.len());
            seal(frame, payload_len, &run.flow.prefix(end - start), 0);
            match dev.socket().send_run(&Outgoing { to: &run.to, bytes: frame, segment: 0, tos: run.tos }) {
                Ok(()) => {
                    left += 1;
                    sent.packets += 1;
                    sent.bytes += payload_len as u64;
                }
                Err(errno) => lost(dev, &run, errno, 1),
            }
            start = end;
        }
        // Frame by frame it went: it was the run that the kernel did not like.
        if left > 0 && dev.disable_gso() {
            warn!(
                "{}: the kernel refuses to segment UDP sends to {:?} (errno {errno}: {}); sending one by one from now on, \
                 which UCX_SOFT_GSO=n asks for from the start",
                dev.name(),
                run.to,
                uct::error::errno_text(errno)
            );
        }
    }

    fn capture(&self, dev: &SoftDevice) {
        for run in &self.runs {
            for (id, frame) in self.buf[run.start..run.end].chunks(run.segment).enumerate() {
                dev.capture(&run.flow, id as u16, frame);
            }
        }
    }
}

impl Sent {
    fn add(&mut self, run: &Run) {
        self.packets += u64::from(run.count);
        self.bytes += run.payload_bytes;
        self.gso_runs += u64::from(run.count > 1);
    }
}

fn lost(dev: &SoftDevice, run: &Run, errno: i32, frames: u64) {
    let why = match errno {
        libc::ENETUNREACH | libc::EHOSTUNREACH | libc::ENETDOWN | libc::EADDRNOTAVAIL => DropReason::NoRoute,
        libc::EMSGSIZE => DropReason::Oversize,
        _ => DropReason::TxFailed,
    };
    dev.counters().drop_many(why, frames);
    // At the first, second, fourth, eighth... loss: a flood of errors is not a flood of lines.
    if let Some(count) = dev.count_send_error() {
        let text = uct::error::errno_text(errno);
        warn!("{}: sending to {:?} failed (errno {errno}: {text}), {count} failed sends so far", dev.name(), run.to);
    } else {
        trace!("{}: sending to {:?} failed (errno {errno})", dev.name(), run.to);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        device::{AhAttr, Device, GlobalRoute, SoftAv},
        soft::{SoftAh, SoftConfig, icrc::IdSolver, socket::Slot},
        types::{Gid, Lid, PKey, QKey, Qpn},
    };

    fn device() -> std::sync::Arc<SoftDevice> {
        let cfg = SoftConfig { port: Some(0), ..SoftConfig::at("127.0.0.1".parse().unwrap()) };
        SoftDevice::open(&cfg).unwrap()
    }

    fn ah(from: &SoftDevice, to: &SoftDevice) -> SoftAh {
        let id = to.identity();
        from.create_ah(&AhAttr {
            port: 1,
            sl: 0,
            src_path_bits: 0,
            static_rate: 0,
            dlid: Lid(0),
            grh: Some(GlobalRoute {
                dgid: Gid::from_ip(to.local_addr().ip()),
                sgid: from.gid(),
                hop_limit: 64,
                traffic_class: 0,
                flow_label: 0,
            }),
            soft: SoftAv { udp_port: id.udp_port, host_id: id.host_id },
        })
        .unwrap()
    }

    fn push(stage: &mut TxStage, ah: &SoftAh, len: usize) {
        let header = Header {
            solicited: false,
            pkey: PKey::DEFAULT,
            dest_qpn: Qpn::truncate(2),
            psn: 0,
            qkey: QKey(3),
            src_qpn: Qpn::truncate(4),
            imm: None,
        };
        assert!(!stage.is_full(len));
        stage.push(&ah.dest, &header, len, true, |out| out.fill(len as u8));
    }

    fn lengths(stage: &TxStage) -> Vec<(u16, usize)> {
        stage.runs.iter().map(|r| (r.count, r.end - r.start)).collect()
    }

    #[test]
    fn runs_end_at_another_destination_size_or_limit() {
        let (a, b, c) = (device(), device(), device());
        let (to_b, to_c) = (ah(&a, &b), ah(&a, &c));
        let mut stage = TxStage::new(4096);
        for (ah, len) in [(&to_b, 8), (&to_b, 8), (&to_c, 8), (&to_b, 8), (&to_b, 4), (&to_b, 4), (&to_b, 9)] {
            push(&mut stage, ah, len);
        }
        // The shorter frame ends its run; a longer one starts a new one.
        assert_eq!(lengths(&stage), [(2, 64), (1, 32), (2, 60), (1, 28), (1, 36)]);
        stage.flush(&a);
        assert_eq!(lengths(&stage), []);
        (0..BATCH_MAX).for_each(|_| push(&mut stage, &to_b, 4096));
        assert!(stage.is_full(0));
        assert_eq!(lengths(&stage)[0], (15, 15 * frame_len(4096)));
        assert_eq!(stage.runs.iter().map(|r| usize::from(r.count)).sum::<usize>(), BATCH_MAX);
    }

    #[test]
    fn a_run_that_the_kernel_refuses_leaves_frame_by_frame() {
        let (a, b) = (device(), device());
        let to_b = ah(&a, &b);
        a.socket().disable_checksums();
        let mut stage = TxStage::new(4096);
        let mut slots: Vec<Slot> = (0..16).map(|_| Slot::new()).collect();
        let flow = Flow::new(a.local_addr(), b.local_addr()).unwrap();
        // Alone, and as one of several runs.
        for lens in [&[8, 8, 8, 3][..], &[8, 8, 5, 100, 100]] {
            lens.iter().for_each(|&len| push(&mut stage, &to_b, len));
            stage.flush(&a);
            assert_eq!(b.socket().receive(&mut slots), Ok(lens.len()));
            for (slot, &len) in slots.iter_mut().zip(lens) {
                let frame = &mut slot.buf[..slot.len];
                // Strictly ID 0, which is what a datagram of its own has: the solver would forgive another.
                let icrc = flow.prefix(frame.len()).icrc(0, frame).to_le_bytes();
                assert_eq!(icrc, frame[frame.len() - 4..]);
                assert_eq!(parse(frame).unwrap().1, vec![len as u8; len]);
                assert_eq!(flow.prefix(frame.len()).check(0, frame, &mut IdSolver::default()), Some(0));
            }
            assert!(!a.uses_gso());
            a.enable_gso();
        }
        let s = a.stats();
        assert_eq!((s.tx_packets, s.tx_bytes, s.dropped_total()), (9, 27 + 221, 0), "{s}");
    }
}
