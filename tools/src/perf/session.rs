//! Two connected sides: the endpoint, the control connection, and the loop that moves both. The measuring loops in
//! [`bench`](super::bench) are built on [`Session::until`] and [`Session::send`].

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use uct::{AmId, Completion, Ep, EpParams, FlushMode, Posted, SendError, SendResult};

use super::{
    failure::{Failure, Result},
    idle::Idle,
    link::Link,
    local::Local,
    message::{Message, Run, Side, from_hex},
    options::{ConnectMode, WaitMode},
    payload::{Pattern, Receiver},
    sender::Sender,
};

/// The id of test messages; the one that UCX's perftest uses.
pub(crate) const DATA_ID: AmId = AmId::truncate(5);
/// The id of "so many have arrived", the answer in stream tests.
const COUNT_ID: AmId = AmId::truncate(6);
/// How long to wait for the reason of a failed endpoint.
const EXPLAIN: Duration = Duration::from_millis(300);
/// See [`Idle::new`].
const SLEEP: Duration = Duration::from_millis(50);

/// The settings of a session.
#[derive(Copy, Clone, Debug)]
pub(crate) struct Manner {
    pub(crate) wait: WaitMode,
    /// See [`Idle::new`].
    pub(crate) has_cpu: bool,
    /// How long the peer may be silent.
    pub(crate) timeout: Duration,
}

/// A connected pair, as one side sees it. The order of the fields is the order of closing.
pub(crate) struct Session {
    ep: Option<Ep>,
    pub(crate) local: Local,
    pub(crate) link: Link,
    manner: Manner,
    inbox: VecDeque<Message>,
    receiver: Option<Arc<Receiver>>,
    idle: Idle,
    /// The run and the number in the peer's last answer.
    counted: Arc<AtomicU64>,
}

impl Session {
    /// Joins an open side and a control connection. There is no endpoint yet.
    pub(crate) fn new(local: Local, link: Link, manner: Manner) -> Result<Session> {
        let counted = Arc::new(AtomicU64::new(u64::MAX));
        let c = counted.clone();
        local.iface.on_am(COUNT_ID, move |m| {
            if let Some(b) = m.data().first_chunk() {
                c.store(u64::from_le_bytes(*b), Relaxed);
            }
        })?;
        local.iface.progress_enable(true);
        let idle = Idle::new(manner.wait, manner.has_cpu, SLEEP);
        Ok(Session { ep: None, local, link, manner, inbox: VecDeque::new(), receiver: None, idle, counted })
    }

    /// Makes the endpoint to `peer`, or with `None` one that [`Session::join`] connects.
    pub(crate) fn make_ep(&mut self, peer: Option<&Side>) -> Result<()> {
        let params = match peer {
            Some(p) => EpParams::to_iface(&self.reachable(p)?, &address(&p.iface_addr)?),
            None => EpParams::unconnected(),
        };
        let ep = self.local.iface.ep(&params)?;
        if peer.is_none() {
            self.local.side.ep_addr = Some(super::message::to_hex(&ep.address()?));
        }
        self.ep = Some(ep);
        Ok(())
    }

    /// Connects the endpoint made by [`Session::make_ep`] with `None`.
    pub(crate) fn join(&mut self, peer: &Side) -> Result<()> {
        let device = self.reachable(peer)?;
        let ep_addr = peer.ep_addr.as_deref().ok_or_else(|| Failure::new("the peer sent no endpoint address"))?;
        Ok(self.ep()?.connect(&device, &address(ep_addr)?)?)
    }

    /// Makes and connects this side's endpoint, once the peer's addresses are known.
    pub(crate) fn connect(&mut self, mode: ConnectMode, peer: &Side) -> Result<()> {
        match mode {
            ConnectMode::Iface => self.make_ep(Some(peer)),
            ConnectMode::Ep => {
                if self.ep.is_none() {
                    self.make_ep(None)?;
                }
                self.join(peer)
            }
        }
    }

    fn reachable(&self, peer: &Side) -> Result<Vec<u8>> {
        let ours = &self.local.side;
        if peer.transport != ours.transport {
            return Err(Failure::new(format!(
                "the other side speaks {}, this one {}; choose the same transport with -x on both",
                super::failure::clean(&peer.transport),
                ours.transport
            )));
        }
        let device = address(&peer.device_addr)?;
        self.local.iface.is_reachable(&device).map_err(|why| {
            Failure::new(format!(
                "{} on {} ({}) cannot reach {} on {} ({}): {why}",
                ours.transport,
                ours.device,
                ours.host,
                super::failure::clean(&peer.device),
                super::failure::clean(&peer.host),
                super::failure::clean(&peer.address),
            ))
        })?;
        Ok(device)
    }

    pub(crate) fn ep(&self) -> Result<&Ep> {
        self.ep.as_ref().ok_or_else(|| Failure::new("there is no endpoint yet"))
    }

    /// Installs the receiving half of `run`.
    pub(crate) fn expect(&mut self, run: &Run, pattern: Arc<Pattern>) -> Result<Arc<Receiver>> {
        let rx = Arc::new(Receiver::new(run.run, run.size, pattern, self.local.alert.clone()));
        let r = rx.clone();
        self.local.iface.on_am(DATA_ID, move |m| r.accept(m.data()))?;
        self.receiver = Some(rx.clone());
        Ok(rx)
    }

    /// Progresses until `done`. Fails if `sign_of_life` does not change for the time-out, or for any reason that makes
    /// waiting pointless.
    #[inline]
    pub(crate) fn until(
        &mut self,
        what: &str,
        sign_of_life: impl Fn() -> u64,
        mut done: impl FnMut() -> bool,
    ) -> Result<()> {
        let mut patience = Patience::default();
        while !done() {
            self.turn()?;
            if patience.is_due(self.manner.wait) && !patience.goes_on(self.manner.timeout, sign_of_life()) {
                return Err(self.silent(what));
            }
        }
        Ok(())
    }

    /// Sends message `seq` of a run, progressing while there is no room.
    #[inline]
    pub(crate) fn send(&mut self, sender: &Sender, seq: u64, ask: super::payload::Ask) -> Result<()> {
        match sender.try_send(self.ep()?, seq, ask) {
            Ok(()) => Ok(()),
            Err(e) => self.send_again(e, "room for sending", |s| sender.try_send(s.ep_or_closed()?, seq, ask)),
        }
    }

    /// Tells the peer that `count` messages of `run` have arrived.
    pub(crate) fn send_count(&mut self, run: u16, count: u64) -> Result<()> {
        let word = (u64::from(run) << 48 | count).to_le();
        self.send_again(SendError::NoResource, "room for the answer", |s| {
            s.ep_or_closed()?.am_short(COUNT_ID, word, &[])
        })
    }

    /// Waits for the peer's [`Session::send_count`].
    pub(crate) fn wait_count(&mut self, run: u16, count: u64) -> Result<()> {
        let want = u64::from(run) << 48 | count;
        let counted = self.counted.clone();
        self.until("the receiver's count", || counted.load(Relaxed), || counted.load(Relaxed) == want)
    }

    #[cold]
    fn send_again(&mut self, first: SendError, what: &str, f: impl Fn(&Session) -> SendResult<()>) -> Result<()> {
        let mut r = Err(first);
        let mut patience = Patience::default();
        loop {
            match r {
                Ok(()) => return Ok(()),
                Err(SendError::Failed(e)) => {
                    // The reason that came over the control connection, or from the error handler, says more.
                    self.attend()?;
                    return Err(self.explained(e.into()));
                }
                Err(SendError::NoResource) => {}
            }
            self.turn()?;
            if patience.is_due(self.manner.wait) && !patience.goes_on(self.manner.timeout, 0) {
                return Err(self.silent(what));
            }
            r = f(self);
        }
    }

    fn ep_or_closed(&self) -> SendResult<&Ep> {
        self.ep
            .as_ref()
            .ok_or_else(|| SendError::Failed(uct::Error::new(uct::ErrorKind::NotConnected, "there is no endpoint yet")))
    }

    fn silent(&self, what: &str) -> Failure {
        Failure::new(format!(
            "no {what} for {:.1} s over {}, though the control connection is open: {} may be stopped or overloaded, or \
             the network between the devices drops packets (a longer --timeout waits longer)",
            self.manner.timeout.as_secs_f64(),
            self.local.side.transport,
            self.link.peer()
        ))
    }

    /// Progresses once, and looks after whatever asks for it.
    #[inline]
    pub(crate) fn turn(&mut self) -> Result<()> {
        let events = self.local.worker.progress();
        if self.local.alert.is_raised() {
            self.attend()?;
        }
        self.idle.turn(&self.local.worker, events)
    }

    /// Finds out why the alert was raised.
    #[cold]
    fn attend(&mut self) -> Result<()> {
        self.local.alert.take();
        if let Some(wrong) = self.receiver.as_ref().and_then(|r| r.wrong()) {
            return Err(Failure::new(format!("verification failed: {wrong}")));
        }
        while let Some(m) = self.link.poll()? {
            self.inbox.push_back(m);
        }
        let failed = self.local.failures.lock().first().map(|f| f.error.clone());
        match failed {
            Some(e) => Err(self.explained(e.into())),
            None => Ok(()),
        }
    }

    /// What to tell of an endpoint that failed: if the peer gave up or died, that is the reason, and word of it is on its
    /// way over the control connection.
    fn explained(&mut self, failed: Failure) -> Failure {
        let deadline = Instant::now() + EXPLAIN;
        loop {
            match self.link.wait(deadline.saturating_duration_since(Instant::now())) {
                Ok(Some(_)) => {}
                Ok(None) => return failed,
                Err(reason) => return reason,
            }
        }
    }

    /// Waits for the peer's next message, progressing.
    pub(crate) fn recv(&mut self, what: &str) -> Result<Message> {
        let mut patience = Patience::default();
        loop {
            if let Some(m) = self.inbox.pop_front() {
                return Ok(m);
            }
            if let Err(f) = self.turn() {
                // What was said before the connection ended still counts: a good-bye, for one.
                self.local.alert.raise();
                return self.inbox.pop_front().ok_or(f);
            }
            if patience.is_due(self.manner.wait) && !patience.goes_on(self.manner.timeout, 0) {
                return Err(Failure::new(format!(
                    "{} did not send `{what}` within {:.1} s; it may be stopped or overloaded (a longer --timeout waits longer)",
                    self.link.peer(),
                    self.manner.timeout.as_secs_f64()
                )));
            }
        }
    }

    /// A message of a kind that must not come now.
    pub(crate) fn unexpected(&self, got: &Message, wanted: &str) -> Failure {
        Failure::new(format!("{} sent `{}` where `{wanted}` was due", self.link.peer(), got.name()))
    }

    /// Waits until the peer's transport has everything. The peer must still be there.
    pub(crate) fn flush(&mut self) -> Result<()> {
        let (comp, status) = Completion::polled();
        let ep = self.ep()?;
        match ep.flush(FlushMode::Local, Some(&comp)) {
            Ok(Posted::Done) => return Ok(()),
            Ok(Posted::InProgress) => {}
            // No flush is refused for want of room but one before the endpoint is connected.
            Err(e) => return Err(Failure::new(format!("flush: {e}"))),
        }
        comp.seal();
        self.until("acknowledgement", || 0, || status.poll().is_some())?;
        match status.poll() {
            Some(Err(e)) => Err(Failure::new(format!("flush: {e}"))),
            _ => Ok(()),
        }
    }

    /// Ends the session; if it failed, the peer is told why, unless it is the one that told us.
    pub(crate) fn end<R>(mut self, result: Result<R>) -> Result<R> {
        if let Err(Failure::Text(reason)) = &result
            && !self.link.is_lost()
        {
            // If the peer cannot be told any more, it has other ways to notice.
            let _ = self.link.send(&Message::Abort { reason: reason.clone() });
        }
        result
    }
}

fn address(hex: &str) -> Result<Vec<u8>> {
    from_hex(hex).ok_or_else(|| Failure::new("the peer sent an address that is not hexadecimal"))
}

/// Counts idle turns, so that the clock is read only now and then while spinning.
#[derive(Default)]
struct Patience {
    turns: u32,
    seen: Option<(Instant, u64)>,
}

impl Patience {
    fn is_due(&mut self, wait: WaitMode) -> bool {
        self.turns = self.turns.wrapping_add(1);
        match wait {
            WaitMode::Spin => self.turns.is_multiple_of(4096),
            WaitMode::Yield => self.turns.is_multiple_of(256),
            WaitMode::Events => true,
        }
    }

    /// False once `sign` has been the same for `timeout`.
    fn goes_on(&mut self, timeout: Duration, sign: u64) -> bool {
        let now = Instant::now();
        match self.seen {
            Some((since, old)) if old == sign => now.duration_since(since) < timeout,
            _ => {
                self.seen = Some((now, sign));
                true
            }
        }
    }
}
