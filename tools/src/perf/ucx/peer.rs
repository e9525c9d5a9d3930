//! A connected pair of one of us and one `ucx_perftest`, and the order of its steps.

use std::time::{Duration, Instant};

use uct::{Completion, Ep, EpParams, FlushMode, Posted, SendError};

use super::{
    super::{
        failure::{Failure, Result},
        idle::Idle,
        local::Local,
        options::WaitMode,
    },
    run::{self, Outcome, Seen},
    talk::Talk,
    task::Task,
};

/// Which side a process is.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(crate) enum Role {
    Client,
    Server,
}

/// UCX's status for what this side cannot do.
const UNSUPPORTED: i8 = -22;
/// A packed memory key, which UCX reads and active messages do not use.
const RKEY: [u8; 8] = [0; 8];
/// See [`Idle::new`].
const SLEEP: Duration = Duration::from_millis(5);
/// Turns between two looks at the clock and at the control connection while messages are waited for.
const LOOK_EVERY: u32 = 1024;

/// One side of a test. The order of the fields is the order of closing.
pub(crate) struct Peer {
    ep: Option<Ep>,
    pub(crate) local: Local,
    talk: Talk,
    pub(crate) role: Role,
    idle: Idle,
    /// The receiving half of the current run.
    pub(crate) seen: std::sync::Arc<Seen>,
}

impl Peer {
    pub(crate) fn new(local: Local, talk: Talk, role: Role, (wait, has_cpu): (WaitMode, bool)) -> Result<Peer> {
        let seen = std::sync::Arc::new(Seen::default());
        local.iface.progress_enable(true);
        Ok(Peer { ep: None, local, talk, role, idle: Idle::new(wait, has_cpu, SLEEP), seen })
    }

    /// Goes through the whole test with the other side.
    pub(crate) fn play(&mut self, task: &Task) -> Result<Outcome> {
        let limit = self.local.side.limits.of(task.layout);
        let unfit = match limit {
            Some(max) if task.size <= max => None,
            _ => Some(format!(
                "{} bytes as {}: {} sends at most {} that way",
                task.size,
                task.layout.name(),
                self.local.side.transport,
                limit.unwrap_or(0)
            )),
        };
        let theirs = self.status(if unfit.is_some() { UNSUPPORTED } else { 0 })?;
        if let Some(why) = unfit {
            return Err(Failure::new(format!("the test is refused: {why}")));
        }
        if theirs != 0 {
            return Err(Failure::new(format!(
                "{} refuses the test with status {theirs}; its own output says why",
                self.talk.peer()
            )));
        }
        self.connect()?;
        self.flush()?;
        self.barrier("the barrier after connecting")?;

        let mut received = 0;
        let (mut done, mut part) = (0, 1u64);
        while done < task.warmup {
            received += run::run(self, task, part)?.received;
            self.barrier("the barrier after a part of the warm-up")?;
            // 1 asks for more. This side never does: it follows the other's clock.
            if self.status(0)? != 1 {
                break;
            }
            done += part;
            part = part.saturating_mul(2);
        }
        let mut outcome = run::run(self, task, task.iters)?;
        outcome.received += received;
        self.barrier("the barrier after the run")?;
        self.barrier("the last barrier")?;
        let resends = self.local.iface.counters().iter().find(|c| c.name == "tx.resends").map_or(0, |c| c.value);
        // Nothing is under way any more: both sides have flushed.
        self.ep = None;
        Ok(Outcome { resends, ..outcome })
    }

    /// Exchanges a status; the other side's.
    fn status(&mut self, ours: i8) -> Result<i8> {
        self.talk.send_blob(&ours.to_le_bytes())?;
        let blob = self.await_talk("a status", Talk::blob)?;
        match blob[..] {
            [b] => Ok(i8::from_le_bytes([b])),
            _ => Err(Failure::new(format!(
                "{} sent {} bytes where a status of one byte was due",
                self.talk.peer(),
                blob.len()
            ))),
        }
    }

    /// Waits until the other side is at the same point.
    pub(crate) fn barrier(&mut self, what: &str) -> Result<()> {
        self.talk.send_barrier()?;
        self.await_talk(what, Talk::barrier)
    }

    /// Exchanges the addresses of the endpoints and joins them.
    fn connect(&mut self) -> Result<()> {
        let ep = self.local.iface.ep(&EpParams::unconnected())?;
        let (device, iface) = (self.local.iface.device_address(), self.local.iface.iface_address());
        let endpoint = ep.address()?;
        let mut blob = Vec::with_capacity(40 + RKEY.len() + device.len() + iface.len() + endpoint.len());
        for n in [device.len(), iface.len(), endpoint.len(), RKEY.len()] {
            blob.extend((n as u64).to_le_bytes());
        }
        // Where our receive buffer is, for tests that write to it: there are none.
        blob.extend(0u64.to_le_bytes());
        for part in [&RKEY[..], &device, &iface, &endpoint] {
            blob.extend_from_slice(part);
        }
        self.talk.send_blob(&blob)?;
        let theirs = self.await_talk("its endpoint address", Talk::blob)?;
        let Some((device, endpoint)) = addresses(&theirs) else {
            return Err(Failure::new(format!(
                "{} sent {} bytes where the addresses of its endpoint were due, and they do not add up",
                self.talk.peer(),
                theirs.len()
            )));
        };
        let side = &self.local.side;
        self.local.iface.is_reachable(device).map_err(|why| {
            Failure::new(format!(
                "{} on {} ({}) cannot reach {}: {why}",
                side.transport,
                side.device,
                side.address,
                self.talk.peer()
            ))
        })?;
        ep.connect(device, endpoint)?;
        self.ep = Some(ep);
        Ok(())
    }

    /// Calls `send` with the endpoint, progressing while there is no room.
    #[inline]
    pub(crate) fn send(&mut self, send: impl Fn(&Ep) -> Result<(), SendError>) -> Result<()> {
        self.until("room for sending", |p| match &p.ep {
            None => Err(Failure::new("there is no endpoint yet")),
            Some(ep) => match send(ep) {
                Ok(()) => Ok(true),
                Err(SendError::NoResource) => Ok(false),
                Err(SendError::Failed(e)) => {
                    p.attend()?;
                    Err(e.into())
                }
            },
        })
    }

    /// Waits until the other transport has everything.
    pub(crate) fn flush(&mut self) -> Result<()> {
        let (comp, status) = Completion::polled();
        match self.local.iface.flush(FlushMode::Local, Some(&comp)) {
            Ok(Posted::Done) => return Ok(()),
            Ok(Posted::InProgress) => {}
            Err(e) => return Err(Failure::new(format!("flush: {e}"))),
        }
        comp.seal();
        self.until("acknowledgement", |_| Ok(status.poll().is_some()))?;
        match status.poll() {
            Some(Err(e)) => Err(Failure::new(format!("flush: {e}"))),
            _ => Ok(()),
        }
    }

    /// Progresses until `done`; gives up when nothing has arrived for the time-out.
    #[inline]
    pub(crate) fn until(&mut self, what: &str, mut done: impl FnMut(&mut Peer) -> Result<bool>) -> Result<()> {
        let mut turns = 0u32;
        let mut quiet: Option<(u64, Instant)> = None;
        while !done(self)? {
            self.turn()?;
            turns = turns.wrapping_add(1);
            if turns.is_multiple_of(LOOK_EVERY) || self.idle.mode() != WaitMode::Spin {
                self.talk.poll()?;
                if self.talk.is_over() {
                    return Err(self.talk.gone(what));
                }
                self.patience(&mut quiet, what)?;
            }
        }
        Ok(())
    }

    /// Progresses until `take` finds something on the control connection: UCX wants its packets acknowledged meanwhile.
    fn await_talk<T>(&mut self, what: &str, take: impl Fn(&mut Talk) -> Result<Option<T>>) -> Result<T> {
        let mut quiet = None;
        loop {
            self.talk.poll()?;
            if let Some(t) = take(&mut self.talk)? {
                return Ok(t);
            }
            if self.talk.is_over() {
                return Err(self.talk.gone(what));
            }
            self.turn()?;
            self.patience(&mut quiet, what)?;
        }
    }

    fn patience(&self, quiet: &mut Option<(u64, Instant)>, what: &str) -> Result<()> {
        let (now, count) = (Instant::now(), self.seen.count());
        match *quiet {
            Some((old, since)) if old == count => {
                if now - since > self.talk.timeout() {
                    return Err(Failure::new(format!(
                        "no {what} from {} for {:.1} s (a longer --timeout waits longer)",
                        self.talk.peer(),
                        self.talk.timeout().as_secs_f64()
                    )));
                }
            }
            _ => *quiet = Some((count, now)),
        }
        Ok(())
    }

    #[inline]
    fn turn(&mut self) -> Result<()> {
        let events = self.local.worker.progress();
        if self.local.alert.is_raised() {
            self.attend()?;
        }
        self.idle.turn(&self.local.worker, events)
    }

    /// Finds out why the alert was raised.
    #[cold]
    fn attend(&self) -> Result<()> {
        self.local.alert.take();
        if let Some(wrong) = self.seen.wrong() {
            return Err(Failure::new(format!("verification failed: {wrong}")));
        }
        match self.local.failures.lock().first() {
            Some(f) => Err(Failure::from(f.error.clone())),
            None => Ok(()),
        }
    }
}

/// The device and the endpoint address in an endpoint blob.
fn addresses(blob: &[u8]) -> Option<(&[u8], &[u8])> {
    let length = |i: usize| {
        let b = blob.get(8 * i..8 * i + 8)?.first_chunk()?;
        usize::try_from(u64::from_le_bytes(*b)).ok().filter(|&n| n <= blob.len())
    };
    let (device, iface, ep, rkey) = (length(0)?, length(1)?, length(2)?, length(3)?);
    if 40 + rkey + device + iface + ep != blob.len() {
        return None;
    }
    let rest = &blob[40 + rkey..];
    Some((&rest[..device], &rest[device + iface..]))
}

#[cfg(test)]
mod tests {
    use super::addresses;

    #[test]
    fn addresses_are_found_in_a_captured_blob() {
        // What a UCX 1.23 on soft-RoCE sent.
        let mut blob = Vec::new();
        for n in [17u64, 3, 6, 8, 0x7f76_cc68_2000] {
            blob.extend(n.to_le_bytes());
        }
        blob.extend([0, 0x0a, 0, 0, 0x10, 0x0a, 0, 0]);
        let device = [0x48, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0x0a, 0x4d, 0, 1];
        blob.extend(device);
        blob.extend([0x1b, 0, 0]);
        blob.extend([0x1b, 0, 0, 5, 0, 0]);
        assert_eq!(addresses(&blob), Some((&device[..], &[0x1b, 0, 0, 5, 0, 0][..])));
        for len in 0..blob.len() {
            assert_eq!(addresses(&blob[..len]), None, "{len}");
        }
        blob[0] = 18;
        assert_eq!(addresses(&blob), None);
        blob[..8].fill(0xff);
        assert_eq!(addresses(&blob), None);
    }
}
