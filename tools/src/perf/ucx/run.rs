//! The messages of one run. Each starts with a byte that numbers it, from 0 to 255 and round again; the rest is anything.
//!
//! *am_lat*: the server sends 0, the client answers 0, the server sends 1, and so on. *am_bw*: the client sends 1, 2, 3, …
//! and has at most a window of them unanswered; the server answers now and then with the number of the last one.

use std::{
    io::IoSlice,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use uct::{Ep, MemRegion, SendResult};

use super::{
    super::{
        alert::Alert,
        failure::{Failure, Result},
        options::{Layout, Test},
        session::DATA_ID,
    },
    peer::{Peer, Role},
    task::Task,
};

/// What came of a run.
#[derive(Copy, Clone, Debug, Default)]
pub(crate) struct Outcome {
    /// Messages that arrived here.
    pub(crate) received: u64,
    pub(crate) elapsed: Duration,
    pub(crate) resends: u64,
}

impl Outcome {
    /// In numbers.
    pub(crate) fn describe(&self, task: &Task) -> String {
        let s = self.elapsed.as_secs_f64().max(1e-9);
        let n = task.iters as f64;
        match task.test {
            Test::Lat => format!("{:.2} us one way", s * 1e6 / n / 2.0),
            _ => format!("{:.2} MB/s, {:.0} messages/s", n * task.size as f64 / s / 1e6, n / s),
        }
    }
}

/// The receiving half of a run, shared with the handler.
#[derive(Default)]
pub(crate) struct Seen {
    /// How far the other side has come: messages, or with `jumps` messages of ours that it has answered.
    count: AtomicU64,
    /// Messages.
    messages: AtomicU64,
    /// The number before the first.
    start: u8,
    /// Whether numbers are left out: true for the answers of a stream.
    jumps: bool,
    size: usize,
    wrong: Mutex<Option<String>>,
    alert: Arc<Alert>,
}

impl Seen {
    fn new(task: &Task, role: Role, alert: Arc<Alert>) -> Seen {
        let (start, jumps) = match task.test {
            Test::Lat => (u8::MAX, false),
            _ => (0, role == Role::Client),
        };
        Seen { start, jumps, size: task.size, alert, ..Seen::default() }
    }

    pub(crate) fn count(&self) -> u64 {
        self.count.load(Relaxed)
    }

    /// What was wrong with a message, if one was.
    pub(crate) fn wrong(&self) -> Option<String> {
        self.wrong.lock().clone()
    }

    fn accept(&self, data: &[u8]) {
        let count = self.count();
        // The number's eight bits are the low ones of the count.
        let last = self.start.wrapping_add(count as u8);
        let step = data.first().map_or(0, |n| n.wrapping_sub(last));
        let good = if self.jumps { (1..=127).contains(&step) } else { step == 1 };
        if !good || data.len() != self.size {
            let text = format!(
                "message {} of the run has number {:?} and {} bytes; number {} and {} bytes were due",
                self.messages.load(Relaxed) + 1,
                data.first(),
                data.len(),
                last.wrapping_add(1),
                self.size
            );
            self.wrong.lock().get_or_insert(text);
            self.alert.raise();
            return;
        }
        self.messages.fetch_add(1, Relaxed);
        self.count.store(count + u64::from(step), Relaxed);
    }
}

/// The sending half of a run.
struct Sender {
    layout: Layout,
    bytes: Vec<u8>,
    /// Everything behind the first eight bytes, for zero copy.
    region: Option<MemRegion>,
}

impl Sender {
    fn new(peer: &Peer, task: &Task) -> Result<Sender> {
        let bytes: Vec<u8> = (0..task.size).map(|i| i as u8).collect();
        let region = match task.layout {
            Layout::Zcopy if task.size > 8 => {
                let mut region = peer.local.md.mem_alloc(task.size - 8)?;
                let to = region.bytes_mut().ok_or_else(|| Failure::new("new memory is in use already"))?;
                to[..task.size - 8].copy_from_slice(&bytes[8..]);
                Some(region)
            }
            Layout::Short if task.size < 8 => {
                return Err(Failure::new(format!("{} bytes: a short message has 8 or more", task.size)));
            }
            _ => None,
        };
        Ok(Sender { layout: task.layout, bytes, region })
    }

    #[inline]
    fn send(&self, ep: &Ep, number: u8) -> SendResult<()> {
        let b = &self.bytes[..];
        let n = b.len().min(8);
        let mut head = [0; 8];
        head[..n].copy_from_slice(&b[..n]);
        head[0] = number;
        match self.layout {
            Layout::Short => ep.am_short(DATA_ID, u64::from_ne_bytes(head), &b[n..]),
            Layout::Shortiov => ep.am_short_iov(DATA_ID, &[IoSlice::new(&head[..n]), IoSlice::new(&b[n..])]),
            Layout::Bcopy => {
                ep.am_bcopy(DATA_ID, &mut |to| {
                    to[..n].copy_from_slice(&head[..n]);
                    to[n..b.len()].copy_from_slice(&b[n..]);
                    b.len()
                })?;
                Ok(())
            }
            Layout::Zcopy => {
                // The flush at the end of the run stands for the completion.
                let _ = match &self.region {
                    Some(r) => ep.am_zcopy(DATA_ID, &head, &[r.slice(0..b.len() - 8)?], None)?,
                    None => ep.am_zcopy(DATA_ID, &head[..n], &[], None)?,
                };
                Ok(())
            }
        }
    }
}

/// Runs `n` rounds. Begins with a barrier, ends with everything acknowledged.
pub(crate) fn run(peer: &mut Peer, task: &Task, n: u64) -> Result<Outcome> {
    let seen = Arc::new(Seen::new(task, peer.role, peer.local.alert.clone()));
    let s = seen.clone();
    // Before the barrier: behind it the other side sends.
    peer.local.iface.on_am(DATA_ID, move |m| s.accept(m.data()))?;
    peer.seen = seen.clone();
    let tx = Sender::new(peer, task)?;
    peer.barrier("the barrier before a run")?;
    let start = Instant::now();
    match (task.test, peer.role) {
        (Test::Lat, role) => ping_pong(peer, &seen, &tx, role, n)?,
        (_, Role::Client) => stream(peer, &seen, &tx, task.window, n)?,
        (_, Role::Server) => sink(peer, &seen, &tx, task.window, n)?,
    }
    let elapsed = start.elapsed();
    peer.flush()?;
    Ok(Outcome { received: seen.messages.load(Relaxed), elapsed, resends: 0 })
}

fn ping_pong(peer: &mut Peer, seen: &Seen, tx: &Sender, role: Role, n: u64) -> Result<()> {
    for i in 0..n {
        if role == Role::Server {
            peer.send(|ep| tx.send(ep, i as u8))?;
        }
        peer.until("message", |_| Ok(seen.count() > i))?;
        if role == Role::Client {
            peer.send(|ep| tx.send(ep, i as u8))?;
        }
    }
    Ok(())
}

fn stream(peer: &mut Peer, seen: &Seen, tx: &Sender, window: u32, n: u64) -> Result<()> {
    for i in 1..=n {
        peer.until("answer", |_| Ok(i <= seen.count() + u64::from(window)))?;
        peer.send(|ep| tx.send(ep, i as u8))?;
    }
    peer.until("the last answer", |_| Ok(seen.count() >= n))
}

fn sink(peer: &mut Peer, seen: &Seen, tx: &Sender, window: u32, n: u64) -> Result<()> {
    // One less than nothing: so UCX counts, and its first answer is due one message early.
    let mut answered = -1i64;
    loop {
        peer.until("message", |_| Ok(seen.count() as i64 > answered.max(0)))?;
        // Several may have arrived in one turn.
        let count = seen.count();
        if count as i64 - answered > i64::from(window / 2) || count >= n {
            if answered != count as i64 {
                peer.send(|ep| tx.send(ep, count as u8))?;
            }
            answered = count as i64;
        } else {
            peer.until("message", |_| Ok(seen.count() > count))?;
        }
        if count >= n {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(test: Test, role: Role) -> Seen {
        let task = Task { test, layout: Layout::Bcopy, size: 16, iters: 1, warmup: 0, window: 127 };
        Seen::new(&task, role, Arc::new(Alert::default()))
    }

    fn give(s: &Seen, number: u8) {
        s.accept(&[&[number][..], &[0; 15]].concat());
    }

    #[test]
    fn numbers_go_round() {
        let s = seen(Test::Lat, Role::Client);
        for i in 0..1000 {
            give(&s, i as u8);
        }
        assert_eq!((s.count(), s.wrong()), (1000, None));
        let s = seen(Test::Bw, Role::Server);
        for i in 1..1000 {
            give(&s, i as u8);
        }
        assert_eq!((s.count(), s.wrong()), (999, None));
        let s = seen(Test::Bw, Role::Client);
        for i in [63, 126, 200, 255, 318, 400] {
            give(&s, i as u8);
        }
        assert_eq!((s.count(), s.messages.load(Relaxed), s.wrong()), (400, 6, None));
    }

    #[test]
    fn what_is_lost_doubled_or_cut_is_told() {
        for (test, role, numbers) in [
            (Test::Lat, Role::Client, &[1u8][..]),
            (Test::Lat, Role::Server, &[0, 0]),
            (Test::Bw, Role::Server, &[1, 3]),
            (Test::Bw, Role::Client, &[5, 5]),
            (Test::Bw, Role::Client, &[5, 4]),
        ] {
            let s = seen(test, role);
            numbers.iter().for_each(|&n| give(&s, n));
            assert!(s.wrong().is_some() && s.alert.is_raised(), "{test:?} {role:?} {numbers:?}");
        }
        let s = seen(Test::Lat, Role::Client);
        s.accept(&[0; 15]);
        s.accept(&[]);
        let text = s.wrong().unwrap();
        assert_eq!(text, "message 1 of the run has number Some(0) and 15 bytes; number 0 and 16 bytes were due");
    }
}
