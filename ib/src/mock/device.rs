//! [`MockDevice`] and its queue pair.

use std::{
    collections::VecDeque,
    fmt,
    os::fd::RawFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use parking_lot::Mutex;
use uct::mem::{Block, Buf};

use super::script::{Call, MockLive, Script};
use crate::{
    away::{Lendable, busy},
    device::{
        Access, AhAttr, ArmFor, ArmResult, AsyncEvent, Device, DeviceAttr, GidEntry, MrKeys, PortAttr, QpCaps, QpInit,
        QpState, QueueLimits, RecvWc, ResetJob, ResetWaker, SendWc, SendWr, UdQp, VerbsError, VerbsResult, WcStatus,
    },
    sw::AsyncQueue,
    types::Qpn,
};

/// Decides about `create_ah` by destination: an errno, or `None` to go on. It runs under the mock's lock.
pub type AhHook = Box<dyn FnMut(&AhAttr) -> Option<i32> + Send>;

#[derive(Default)]
struct State {
    script: Script,
    events: AsyncQueue,
    ahs: Gauge,
    qps: Gauge,
    mrs: Gauge,
    attr: Mutex<Option<DeviceAttr>>,
    limits: Mutex<Option<QueueLimits>>,
    ah_hook: Mutex<Option<AhHook>>,
    send_status: Mutex<VecDeque<WcStatus>>,
    recv_status: Mutex<VecDeque<WcStatus>>,
    resets: Mutex<Resets>,
}

/// Resets that hang.
#[derive(Default)]
struct Resets {
    hold: bool,
    held: Vec<ResetJob>,
}

/// Things alive, and how many there may be; 0 for any number.
#[derive(Debug, Default)]
struct Gauge {
    live: AtomicU64,
    max: AtomicU64,
}

impl Gauge {
    fn add(&self, call: Call) -> VerbsResult<()> {
        let max = self.max.load(Ordering::Relaxed);
        let room = |n: u64| (max == 0 || n < max).then_some(n + 1);
        match self.live.fetch_update(Ordering::Relaxed, Ordering::Relaxed, room) {
            Ok(_) => Ok(()),
            Err(_) => Err(VerbsError::new(call.name(), libc::ENOMEM)),
        }
    }

    fn sub(&self) {
        self.live.fetch_sub(1, Ordering::Relaxed);
    }

    fn make<T>(&self, call: Call, make: impl FnOnce() -> VerbsResult<T>) -> VerbsResult<T> {
        self.add(call)?;
        make().inspect_err(|_| self.sub())
    }

    fn live(&self) -> u64 {
        self.live.load(Ordering::Relaxed)
    }
}

/// A device in front of `D`. See the [module](crate::mock). All methods may be called from any thread.
pub struct MockDevice<D: Device> {
    inner: Arc<D>,
    state: Arc<State>,
}

impl<D: Device> MockDevice<D> {
    /// A mock that lets everything through.
    pub fn new(inner: Arc<D>) -> Arc<Self> {
        Arc::new(MockDevice { inner, state: Arc::default() })
    }

    /// The device behind.
    pub fn inner(&self) -> &Arc<D> {
        &self.inner
    }

    /// How often a call was made, failures included.
    pub fn calls(&self, call: Call) -> u64 {
        self.state.script.calls(call)
    }

    /// How often a call failed, by script or by itself.
    pub fn failures(&self, call: Call) -> u64 {
        self.state.script.failures(call)
    }

    /// What is alive.
    pub fn live(&self) -> MockLive {
        MockLive { ahs: self.state.ahs.live(), qps: self.state.qps.live(), mrs: self.state.mrs.live() }
    }

    /// What is alive, in words; `None` if nothing is.
    pub fn leaks(&self) -> Option<String> {
        let MockLive { ahs, qps, mrs } = self.live();
        let parts = [(ahs, "address handle"), (qps, "queue pair"), (mrs, "registration")];
        let words: Vec<_> = parts
            .iter()
            .filter(|(n, _)| *n > 0)
            .map(|(n, what)| format!("{n} {what}{}", if *n == 1 { "" } else { "s" }))
            .collect();
        (!words.is_empty()).then(|| words.join(", "))
    }

    /// Fails the next call. Several add up: the next two fail, and so on.
    pub fn fail_next(&self, call: Call, errno: i32) {
        self.state.script.add_next(call, [Some(errno)]);
    }

    /// Sets the results of the next calls, after those set before: an errno, or `None` to go through.
    pub fn script(&self, call: Call, results: impl IntoIterator<Item = Option<i32>>) {
        self.state.script.add_next(call, results);
    }

    /// Fails the `n`-th call from now; 1 is the next.
    pub fn fail_nth(&self, call: Call, n: u64, errno: i32) {
        self.state.script.add_nth(call, n, errno);
    }

    /// Fails every call that nothing else decides about, until it is set to `None`.
    pub fn fail_always(&self, call: Call, errno: Option<i32>) {
        self.state.script.set_always(call, errno);
    }

    /// Forgets all scripts; limits, hook and gate stay.
    pub fn clear_scripts(&self) {
        self.state.script.clear();
    }

    /// Bounds what may be alive; one more is `ENOMEM`. 0 lifts the bound.
    pub fn set_max(&self, ahs: u64, qps: u64, mrs: u64) {
        self.state.ahs.max.store(ahs, Ordering::Relaxed);
        self.state.qps.max.store(qps, Ordering::Relaxed);
        self.state.mrs.max.store(mrs, Ordering::Relaxed);
    }

    /// Lets a hook decide about address handles, by destination. Scripts come first.
    pub fn set_ah_hook(&self, hook: Option<AhHook>) {
        *self.state.ah_hook.lock() = hook;
    }

    /// Makes every `create_ah` wait, on its caller's thread, until the gate is opened: a resolution as slow as a test wants it.
    pub fn close_ah_gate(&self) {
        self.state.script.gate().set_closed(true);
    }

    /// Lets those go on that wait, and those that come.
    pub fn open_ah_gate(&self) {
        self.state.script.gate().set_closed(false);
    }

    /// Callers that wait at the gate.
    pub fn ah_gate_waiting(&self) -> usize {
        self.state.script.gate().waiting()
    }

    /// Blocks until `n` callers wait at the gate.
    pub fn wait_for_ah_gate(&self, n: usize) {
        self.state.script.gate().wait_for(n);
    }

    /// Lets every reset hang that is done in two steps, as all are while the device tells that its calls may sleep
    /// ([`MockDevice::set_attr`]). The thread that calls the job goes on: it is the reset that does not end. Must be undone, for
    /// what hangs keeps the device.
    pub fn hold_resets(&self) {
        self.state.resets.lock().hold = true;
    }

    /// Resets that hang.
    pub fn held_resets(&self) -> usize {
        self.state.resets.lock().held.len()
    }

    /// Does those that hang, here, and those that come as they come.
    pub fn release_resets(&self) {
        let held = {
            let mut resets = self.state.resets.lock();
            resets.hold = false;
            std::mem::take(&mut resets.held)
        };
        held.into_iter().for_each(|job| job());
    }

    fn reset_or_hold(&self, job: ResetJob) {
        let mut resets = self.state.resets.lock();
        if resets.hold {
            resets.held.push(job);
        } else {
            drop(resets);
            job();
        }
    }

    /// Changes what the device tells about itself, for example that making address handles sleeps.
    pub fn set_attr(&self, change: impl FnOnce(&mut DeviceAttr)) {
        let mut attr = self.attr();
        change(&mut attr);
        *self.state.attr.lock() = Some(attr);
    }

    /// Changes what the device tells about its limits.
    pub fn set_queue_limits(&self, limits: QueueLimits) {
        *self.state.limits.lock() = Some(limits);
    }

    /// Queues an async event. Injected ones come before those of the device behind.
    pub fn inject_event(&self, event: AsyncEvent) {
        self.state.events.push(event);
    }

    /// Gives the next send completion that is polled, on any queue pair, this status. The queue pair behind stays as it is;
    /// for one that really falls into ERROR see [`SimDevice::fail_qps`](crate::sim::SimDevice::fail_qps).
    pub fn force_send_status(&self, status: WcStatus) {
        self.state.send_status.lock().push_back(status);
    }

    /// The same for receive completions.
    pub fn force_recv_status(&self, status: WcStatus) {
        self.state.recv_status.lock().push_back(status);
    }

    /// Counts, plans, and counts the failure.
    fn run<T>(&self, call: Call, f: impl FnOnce() -> VerbsResult<T>) -> VerbsResult<T> {
        let result = self.state.script.enter(call).and_then(|()| f());
        self.state.script.leave(call, result)
    }
}

impl<D: Device> fmt::Debug for MockDevice<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MockDevice({:?}, {:?})", self.attr().name, self.live())
    }
}

impl<D: Device> Device for MockDevice<D> {
    type Ah = D::Ah;
    type UdQp = MockQp<D>;

    fn attr(&self) -> DeviceAttr {
        self.state.attr.lock().clone().unwrap_or_else(|| self.inner.attr())
    }

    fn query_port(&self, port: u8) -> VerbsResult<PortAttr> {
        self.run(Call::QueryPort, || self.inner.query_port(port))
    }

    fn query_gids(&self, port: u8) -> VerbsResult<Vec<GidEntry>> {
        self.run(Call::QueryGids, || self.inner.query_gids(port))
    }

    fn create_ah(&self, attr: &AhAttr) -> VerbsResult<D::Ah> {
        self.run(Call::CreateAh, || {
            self.state.script.gate().pass();
            if let Some(errno) = self.state.ah_hook.lock().as_mut().and_then(|hook| hook(attr)) {
                return Err(VerbsError::new(Call::CreateAh.name(), errno));
            }
            self.state.ahs.make(Call::CreateAh, || self.inner.create_ah(attr))
        })
    }

    fn destroy_ah(&self, ah: D::Ah) -> VerbsResult<()> {
        let planned = self.state.script.enter(Call::DestroyAh);
        self.state.ahs.sub();
        let result = planned.and(self.inner.destroy_ah(ah));
        self.state.script.leave(Call::DestroyAh, result)
    }

    fn reg_mr(&self, block: &Arc<Block>, access: Access) -> VerbsResult<MrKeys> {
        self.run(Call::RegMr, || self.state.mrs.make(Call::RegMr, || self.inner.reg_mr(block, access)))
    }

    fn dereg_mr(&self, keys: MrKeys) -> VerbsResult<()> {
        self.run(Call::DeregMr, || {
            self.inner.dereg_mr(keys)?;
            self.state.mrs.sub();
            Ok(())
        })
    }

    fn create_ud_qp(self: &Arc<Self>, init: &QpInit) -> VerbsResult<MockQp<D>> {
        self.run(Call::CreateUdQp, || {
            let inner = self.state.qps.make(Call::CreateUdQp, || self.inner.create_ud_qp(init))?;
            let (qpn, caps) = (inner.qpn(), inner.caps());
            Ok(MockQp { inner: Lendable::Here(inner), qpn, caps, fd: None, rest: None, dev: self.clone() })
        })
    }

    fn queue_limits(&self) -> QueueLimits {
        self.state.limits.lock().unwrap_or_else(|| self.inner.queue_limits())
    }

    fn poll_async_event(&self) -> Option<AsyncEvent> {
        // Cannot fail: only counted.
        let _ = self.state.script.enter(Call::PollAsyncEvent);
        self.state.events.pop().or_else(|| self.inner.poll_async_event())
    }
}

/// A queue pair of a [`MockDevice`].
pub struct MockQp<D: Device> {
    inner: Lendable<D::UdQp>,
    qpn: Qpn,
    caps: QpCaps,
    /// For while it is away.
    fd: Option<RawFd>,
    /// See [`UdQp::destroy`].
    rest: Option<Box<dyn Send>>,
    dev: Arc<MockDevice<D>>,
}

impl<D: Device> MockQp<D> {
    /// The queue pair behind; `None` while it is away to be reset.
    pub fn inner(&mut self) -> Option<&mut D::UdQp> {
        self.inner.get_mut()
    }
}

impl<D: Device> fmt::Debug for MockQp<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MockQp({})", self.qpn)
    }
}

impl<D: Device> UdQp for MockQp<D> {
    type Ah = D::Ah;

    fn qpn(&self) -> Qpn {
        self.qpn
    }

    fn caps(&self) -> QpCaps {
        self.caps
    }

    fn state(&self) -> QpState {
        self.inner.get().map_or(QpState::Error, UdQp::state)
    }

    fn reset(&mut self) -> VerbsResult<()> {
        let inner = self.inner.get_mut().ok_or(busy(Call::Reset.name()))?;
        self.dev.run(Call::Reset, || inner.reset())
    }

    fn begin_reset(&mut self, wake: ResetWaker) -> VerbsResult<Option<ResetJob>> {
        if !self.dev.attr().ah_create_sleeps {
            return self.reset().map(|()| None);
        }
        self.fd = self.event_fd();
        let dev = self.dev.clone();
        let work = move |inner: &mut D::UdQp| dev.run(Call::Reset, || inner.reset());
        let job = self.inner.lend(work, wake).ok_or(busy(Call::Reset.name()))?;
        let dev = self.dev.clone();
        Ok(Some(Box::new(move || dev.reset_or_hold(job))))
    }

    fn finish_reset(&mut self) -> Option<VerbsResult<()>> {
        self.inner.take_back()
    }

    fn destroy(mut self, rest: Box<dyn Send>) {
        self.rest = Some(rest);
    }

    fn post_send(&mut self, wr: &SendWr<'_, D::Ah>) -> VerbsResult<()> {
        let inner = &mut self.inner;
        self.dev.run(Call::PostSend, || inner.get_mut().ok_or(busy(Call::PostSend.name()))?.post_send(wr))
    }

    fn ring(&mut self) {
        let _ = self.dev.state.script.enter(Call::Ring);
        if let Some(inner) = self.inner.get_mut() {
            inner.ring();
        }
    }

    fn post_recv(&mut self, bufs: &mut Vec<Buf>) -> VerbsResult<()> {
        let inner = &mut self.inner;
        self.dev.run(Call::PostRecv, || inner.get_mut().ok_or(busy(Call::PostRecv.name()))?.post_recv(bufs))
    }

    fn poll_send(&mut self, out: &mut Vec<SendWc>, max: usize) -> usize {
        let _ = self.dev.state.script.enter(Call::PollSend);
        let n = self.inner.get_mut().map_or(0, |inner| inner.poll_send(out, max));
        let mut forced = self.dev.state.send_status.lock();
        let start = out.len() - n;
        for wc in &mut out[start..] {
            let Some(status) = forced.pop_front() else { break };
            wc.status = status;
        }
        n
    }

    fn poll_recv(&mut self, out: &mut Vec<RecvWc>, max: usize) -> usize {
        let _ = self.dev.state.script.enter(Call::PollRecv);
        let n = self.inner.get_mut().map_or(0, |inner| inner.poll_recv(out, max));
        let mut forced = self.dev.state.recv_status.lock();
        let start = out.len() - n;
        for wc in &mut out[start..] {
            let Some(status) = forced.pop_front() else { break };
            wc.status = status;
        }
        n
    }

    fn arm(&mut self, what: ArmFor) -> VerbsResult<ArmResult> {
        let inner = &mut self.inner;
        self.dev.run(Call::Arm, || inner.get_mut().map_or(Ok(ArmResult::Armed), |inner| inner.arm(what)))
    }

    fn event_fd(&self) -> Option<RawFd> {
        self.inner.get().map_or(self.fd, UdQp::event_fd)
    }
}

impl<D: Device> Drop for MockQp<D> {
    fn drop(&mut self) {
        let (dev, rest) = (self.dev.clone(), self.rest.take());
        let end = move |inner: D::UdQp| {
            let _ = dev.state.script.enter(Call::DestroyUdQp);
            dev.state.qps.sub();
            // The queue pair goes before what may be the last hold on the device.
            drop(inner);
            drop((rest, dev));
        };
        self.inner.end(end);
    }
}
