//! What the handles of an interface share: [`Core`], its locked [`State`], and the part of it that ends with the
//! interface, [`Live`].
//!
//! Lock order: the state's mutex, then (inside the address-handle cache) its own. No user code, no system call that may
//! sleep, happens under either.

use std::{
    collections::VecDeque,
    sync::{Arc, Weak},
};

use hashbrown::HashMap;
use ib::{
    addr::DeviceAddr,
    ah::{AhWaker, PendingAh},
    config::IfaceConfig,
    device::{AhAttr, Device, RecvWc},
    gid::LocalPort,
    md::Md,
};
use uct::{
    Error, ErrorKind, IfaceAttr, Scope, Time,
    am::{AmHome, HandlerTable},
    ep::ErrorHandler,
    mem::Buf,
    sync::{AtomicBool, AtomicU32, AtomicU64, Mutex, Ordering},
    time::NearClock,
    worker::WorkerShared,
};

use crate::{
    config::UdConfig,
    deliver::{Delivery, Later, Ready, ThreadMark},
    ep::EpShared,
    gids::OwnGids,
    live::Who,
    op::Op,
    pending::PendingQueues,
    pools::{Pool, Returns},
    port::PortWatch,
    proto::{Engine, EpId},
    tx::{Link, Tx},
    wake::UserWake,
};

/// The engine with our types in it.
pub(crate) type UdEngine<D> = Engine<Op, AhAttr, Link<D>, Buf>;

/// What all handles of one interface share.
pub(crate) struct Core<D: Device> {
    pub(crate) me: Weak<Core<D>>,
    pub(crate) md: Arc<Md<D>>,
    pub(crate) worker: Arc<WorkerShared>,
    pub(crate) clock: NearClock,
    pub(crate) attr: IfaceAttr,
    pub(crate) port: LocalPort,
    pub(crate) device_addr: DeviceAddr,
    pub(crate) config: UdConfig,
    pub(crate) iface_config: IfaceConfig,
    pub(crate) limits: Limits,
    pub(crate) handlers: HandlerTable,
    /// Taken away when the interface is closed, as the handlers are: what they hold may hold us.
    pub(crate) error_handler: Mutex<Option<ErrorHandler>>,
    pub(crate) returns: Arc<Returns>,
    pub(crate) am_home: AmHome,
    pub(crate) state: Mutex<State<D>>,
    /// Set by the address-handle cache when a resolution that was pending is over.
    pub(crate) resolutions: Arc<AtomicBool>,
    pub(crate) waker: AhWaker,
    pub(crate) user_wake: Arc<UserWake>,
    /// One bit per id: "no handler" was warned about.
    pub(crate) warned_ids: AtomicU32,
    pub(crate) no_handler: AtomicU64,
    pub(crate) closed: AtomicBool,
}

/// The limits that the data calls check, as plain numbers.
#[derive(Copy, Clone, Debug)]
pub(crate) struct Limits {
    pub(crate) short: usize,
    pub(crate) bcopy: usize,
    pub(crate) zcopy: usize,
    pub(crate) hdr: usize,
    pub(crate) iov: usize,
}

/// What the lock protects.
pub(crate) struct State<D: Device> {
    /// `None` once the interface is closed.
    pub(crate) live: Option<Live<D>>,
    /// The right to deliver; `None` while somebody delivers.
    pub(crate) delivery: Option<Box<Delivery>>,
    /// Who delivers.
    pub(crate) delivering_on: Option<ThreadMark>,
    /// What the interface left behind that was closed inside a callback, for the end of that batch.
    pub(crate) orphans: Vec<Later>,
}

/// What ends with the interface.
pub(crate) struct Live<D: Device> {
    pub(crate) now: Time,
    pub(crate) engine: UdEngine<D>,
    pub(crate) qp: D::UdQp,
    pub(crate) tx: Tx<D>,
    pub(crate) small: Pool,
    pub(crate) large: Pool,
    pub(crate) rx: Pool,
    /// Receives in the queue pair.
    pub(crate) rx_posted: usize,
    /// How many there should be, and how many must be missing before some are posted.
    pub(crate) rx_target: usize,
    /// So few or fewer, and more are posted.
    pub(crate) rx_low: usize,
    pub(crate) eps: HashMap<EpId, EpRecord<D>>,
    pub(crate) pending: PendingQueues,
    /// Endpoints whose address handle is being made.
    pub(crate) resolving: Vec<Resolving<D>>,
    /// Flushes of the whole interface that also wait for destroyed endpoints.
    pub(crate) flushes: Vec<(uct::completion::CompletionToken, Vec<EpId>)>,
    pub(crate) gids: OwnGids,
    /// The interface's own is not among them, which was told.
    pub(crate) gid_lost: bool,
    /// Until then nothing more is logged about peers that take nothing.
    pub(crate) stuck_quiet_until: Time,
    /// When the GID table was last asked for while it is not.
    pub(crate) gids_asked: Time,
    /// The domain's event count at the last look.
    pub(crate) events_seen: u64,
    pub(crate) failed: Option<Error>,
    /// The queue pair is in ERROR, and what is done about it.
    pub(crate) recovering: Option<Recovery>,
    /// The endpoints have been told of it.
    pub(crate) endpoints_failed: bool,
    /// A receive completed with an error: look at the state of the queue pair.
    pub(crate) rx_failed: bool,
    /// Messages that the engine keeps beyond gaps, of all endpoints: what strangers can make us keep has a bound.
    pub(crate) held: usize,
    pub(crate) held_max: usize,
    pub(crate) wcs: Vec<RecvWc>,
    pub(crate) post_scratch: Vec<Buf>,
    /// Messages that wait for the user's thread.
    pub(crate) ready: VecDeque<Ready>,
    /// Everything else that waits for it.
    pub(crate) later: Vec<Later>,
    pub(crate) counters: Counters,
    pub(crate) port_watch: PortWatch,
    pub(crate) idle_rounds: u32,
    /// The last round has found something: a message, or the end of a send.
    pub(crate) was_busy: bool,
    /// When the send queue was last polled.
    pub(crate) looked_at: Time,
    /// The last send when a report was last asked for out of turn.
    pub(crate) nudged_at: u64,
    /// When the device was last asked for events.
    pub(crate) events_polled: Time,
    /// Ask it in this round.
    pub(crate) look_for_events: bool,
}

/// What an interface waits for whose queue pair is in ERROR.
pub(crate) enum Recovery {
    /// The GID table, which has been read when this is set.
    Gids(Arc<AtomicBool>),
    /// The end of the queue pair's reset.
    Reset,
}

/// Counters of the glue; the engine and the device have their own.
#[derive(Copy, Clone, Default, Debug)]
pub(crate) struct Counters {
    pub(crate) rx_short: u64,
    pub(crate) rx_dgid: u64,
    pub(crate) rx_bad_creq: u64,
    pub(crate) rx_queue_full: u64,
    pub(crate) rx_held_full: u64,
    pub(crate) rx_errors: u64,
    pub(crate) qp_resets: u64,
    pub(crate) re_resolved: u64,
}

/// A resolution under way.
pub(crate) struct Resolving<D: Device> {
    pub(crate) ep: EpId,
    pub(crate) pending: PendingAh<D>,
}

/// What the interface knows of an endpoint that the user has a handle of.
pub(crate) struct EpRecord<D: Device> {
    pub(crate) user_data: u64,
    pub(crate) shared: Weak<EpShared<D>>,
    /// Why calls are refused.
    pub(crate) failed: Option<Error>,
    /// What went wrong here last (a resolution, memory for a packet), to explain a failure of the endpoint.
    pub(crate) trouble: Option<Error>,
}

impl<D: Device> Live<D> {
    /// What is left of a batch whose callback has panicked keeps its place before what is newer.
    #[cold]
    fn put_back(&mut self, d: &mut Delivery) {
        while d.batch.len() > d.delivered
            && let Some(r) = d.batch.pop()
        {
            self.ready.push_front(r);
        }
        self.later.splice(0..0, d.later.drain(..));
    }
}

impl<D: Device> State<D> {
    #[inline]
    pub(crate) fn live(&mut self, core: &Core<D>) -> Result<&mut Live<D>, Error> {
        match &mut self.live {
            Some(l) => Ok(l),
            None => Err(core.closed_error()),
        }
    }
}

impl<D: Device> Core<D> {
    /// `ud_verbs/soft0:1`.
    pub(crate) fn name(&self) -> String {
        format!("{}/{}", self.attr.transport, self.attr.device)
    }

    #[cold]
    pub(crate) fn closed_error(&self) -> Error {
        Error::new(ErrorKind::Closed, format!("{}: the interface is closed", self.name())).scoped(Scope::Interface)
    }

    /// Counts a message nobody wants; warns once per id.
    pub(crate) fn no_handler(&self, am_id: u8, len: u32) {
        self.no_handler.fetch_add(1, Ordering::Relaxed);
        let bit = 1u32 << (am_id & 31);
        if self.warned_ids.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
            tracing::warn!(
                "{}: dropped a message of {len} bytes: no handler for active message id {am_id} (install it before the \
                 peers send; warned once)",
                self.name()
            );
        }
    }

    /// Ends a delivery: buffers go home, the right to deliver goes back, what callbacks sent leaves. True if callbacks have
    /// left something for the end of their batch, which [`Core::take_left`] gives.
    #[inline]
    pub(crate) fn end_delivery(&self, mut d: Box<Delivery>) -> bool {
        let mut guard = self.state.lock();
        let st = &mut *guard;
        st.delivering_on = None;
        let Some(live) = &mut st.live else {
            drop(guard);
            drop(d);
            return true;
        };
        if d.batch.len() > d.delivered || !d.later.is_empty() {
            live.put_back(&mut d);
        }
        d.delivered = 0;
        while let Some(r) = d.batch.pop() {
            if let Some(buf) = r.buf {
                live.rx.put(buf);
            }
        }
        live.tx.ring(&mut live.qp);
        // There is one, and it was out.
        std::mem::forget(st.delivery.replace(d));
        !live.later.is_empty()
    }

    /// What callbacks have left for the end of their batch. `who`: for [`Who::Thread`] that stays in the state, also for a
    /// moment: while the progress thread had it, a destroy in the user's thread would miss what it must settle.
    pub(crate) fn take_left(&self, who: Who) -> Vec<Later> {
        let mut st = self.state.lock();
        match (&mut st.live, who) {
            (Some(live), Who::User) => std::mem::take(&mut live.later),
            (Some(_), Who::Thread) => Vec::new(),
            (None, _) => std::mem::take(&mut st.orphans),
        }
    }

    /// Keeps things for the next progress; without an interface there is none, and they are done here.
    pub(crate) fn put_back_later(&self, later: Vec<Later>) {
        let mut st = self.state.lock();
        match &mut st.live {
            Some(live) => live.later.extend(later),
            None => {
                drop(st);
                self.run_later(later);
            }
        }
    }

    /// True if the user has a handle of this endpoint.
    pub(crate) fn has_ep(&self, ep: EpId) -> bool {
        self.state.lock().live.as_ref().is_some_and(|live| live.eps.contains_key(&ep))
    }

    /// True on the thread that is inside a callback of this interface.
    pub(crate) fn in_callback(&self, st: &State<D>) -> bool {
        st.delivering_on == Some(ThreadMark::current())
    }
}
