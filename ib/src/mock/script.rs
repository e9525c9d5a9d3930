//! What a mock knows of each verbs call: how often it was made, and what comes of the next ones.

use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    sync::atomic::{AtomicU64, Ordering},
};

use parking_lot::{Condvar, Mutex};

use crate::device::{VerbsError, VerbsResult};

macro_rules! calls {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// A verbs call.
        #[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        #[repr(u8)]
        pub enum Call { $($(#[$doc])* $name,)* }

        impl Call {
            /// All of them.
            pub const ALL: &'static [Call] = &[$(Call::$name),*];

            /// The name in errors.
            pub const fn name(self) -> &'static str {
                match self { $(Call::$name => $text,)* }
            }
        }
    };
}

calls! {
    /// [`Device::query_port`](crate::device::Device::query_port).
    QueryPort = "query_port",
    /// [`Device::query_gids`](crate::device::Device::query_gids).
    QueryGids = "query_gid",
    /// [`Device::create_ah`](crate::device::Device::create_ah).
    CreateAh = "create_ah",
    /// [`Device::destroy_ah`](crate::device::Device::destroy_ah). If it is scripted to fail the handle is gone all the same.
    DestroyAh = "destroy_ah",
    /// [`Device::reg_mr`](crate::device::Device::reg_mr).
    RegMr = "reg_mr",
    /// [`Device::dereg_mr`](crate::device::Device::dereg_mr). If it is scripted to fail the registration stays.
    DeregMr = "dereg_mr",
    /// [`Device::create_ud_qp`](crate::device::Device::create_ud_qp).
    CreateUdQp = "create_qp",
    /// The drop of a queue pair; cannot fail.
    DestroyUdQp = "destroy_qp",
    /// [`Device::poll_async_event`](crate::device::Device::poll_async_event); cannot fail.
    PollAsyncEvent = "get_async_event",
    /// [`UdQp::reset`](crate::device::UdQp::reset).
    Reset = "modify_qp",
    /// [`UdQp::post_send`](crate::device::UdQp::post_send).
    PostSend = "post_send",
    /// [`UdQp::ring`](crate::device::UdQp::ring); cannot fail.
    Ring = "ring",
    /// [`UdQp::post_recv`](crate::device::UdQp::post_recv).
    PostRecv = "post_recv",
    /// [`UdQp::poll_send`](crate::device::UdQp::poll_send); cannot fail, see
    /// [`force_send_status`](super::MockDevice::force_send_status).
    PollSend = "poll_cq(send)",
    /// [`UdQp::poll_recv`](crate::device::UdQp::poll_recv); cannot fail, see
    /// [`force_recv_status`](super::MockDevice::force_recv_status).
    PollRecv = "poll_cq(recv)",
    /// [`UdQp::arm`](crate::device::UdQp::arm).
    Arm = "req_notify_cq",
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

const CALLS: usize = Call::ALL.len();

/// What is alive of the things that calls make.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub struct MockLive {
    /// Address handles.
    pub ahs: u64,
    /// Queue pairs.
    pub qps: u64,
    /// Registrations.
    pub mrs: u64,
}

#[derive(Debug, Default)]
struct Plan {
    /// Results of the next calls: an errno, or through to the device.
    next: VecDeque<Option<i32>>,
    /// Errnos of calls by their number, from 1 since the mock was made.
    nth: BTreeMap<u64, i32>,
    always: Option<i32>,
}

/// Counters and plans. One lock for all: a mock is not for measuring.
#[derive(Debug, Default)]
pub(super) struct Script {
    calls: [AtomicU64; CALLS],
    failures: [AtomicU64; CALLS],
    plans: Mutex<BTreeMap<Call, Plan>>,
    gate: Gate,
}

impl Script {
    /// Counts a call, and fails it if that is the plan.
    pub(super) fn enter(&self, call: Call) -> VerbsResult<()> {
        let number = self.calls[call as usize].fetch_add(1, Ordering::Relaxed) + 1;
        let mut plans = self.plans.lock();
        let Some(plan) = plans.get_mut(&call) else { return Ok(()) };
        let nth = plan.nth.remove(&number);
        let next = plan.next.pop_front().flatten();
        match nth.or(next).or(plan.always) {
            Some(errno) => Err(VerbsError::new(call.name(), errno)),
            None => Ok(()),
        }
    }

    /// Counts a failure, planned or not.
    pub(super) fn leave<T>(&self, call: Call, result: VerbsResult<T>) -> VerbsResult<T> {
        if result.is_err() {
            self.failures[call as usize].fetch_add(1, Ordering::Relaxed);
        }
        result
    }

    pub(super) fn calls(&self, call: Call) -> u64 {
        self.calls[call as usize].load(Ordering::Relaxed)
    }

    pub(super) fn failures(&self, call: Call) -> u64 {
        self.failures[call as usize].load(Ordering::Relaxed)
    }

    pub(super) fn add_next(&self, call: Call, results: impl IntoIterator<Item = Option<i32>>) {
        self.plans.lock().entry(call).or_default().next.extend(results);
    }

    pub(super) fn add_nth(&self, call: Call, n: u64, errno: i32) {
        let number = self.calls(call) + n.max(1);
        self.plans.lock().entry(call).or_default().nth.insert(number, errno);
    }

    pub(super) fn set_always(&self, call: Call, errno: Option<i32>) {
        self.plans.lock().entry(call).or_default().always = errno;
    }

    pub(super) fn clear(&self) {
        self.plans.lock().clear();
    }

    pub(super) fn gate(&self) -> &Gate {
        &self.gate
    }
}

#[derive(Debug, Default)]
struct GateState {
    closed: bool,
    waiting: usize,
}

/// Where `create_ah` waits while a test wants it to be slow.
#[derive(Debug, Default)]
pub(super) struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

impl Gate {
    pub(super) fn set_closed(&self, closed: bool) {
        self.state.lock().closed = closed;
        self.changed.notify_all();
    }

    pub(super) fn pass(&self) {
        let mut s = self.state.lock();
        if !s.closed {
            return;
        }
        s.waiting += 1;
        self.changed.notify_all();
        while s.closed {
            self.changed.wait(&mut s);
        }
        s.waiting -= 1;
    }

    pub(super) fn waiting(&self) -> usize {
        self.state.lock().waiting
    }

    pub(super) fn wait_for(&self, n: usize) {
        let mut s = self.state.lock();
        while s.waiting < n {
            self.changed.wait(&mut s);
        }
    }
}
