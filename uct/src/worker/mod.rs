//! Workers: a progress domain, and the thread that stands in while the user's thread is away.
//!
//! A [`Worker`] is used by one thread at a time, which it may be moved to. Its [`progress`](Worker::progress) moves
//! everything: it polls the devices of its interfaces, runs timers, and calls handlers, completions and pending requests.
//! See `thread.rs` for the progress thread.

mod deferred;
mod thread;

use std::{
    cell::RefCell,
    fmt,
    os::fd::RawFd,
    sync::{Arc, OnceLock},
    time::Duration,
};

use deferred::{Deferred, DeferredQueue};

use crate::{
    error::{Error, ErrorKind, Result},
    eventfd::EventFd,
    fork::Birth,
    iface::{Arm, Events, Interface},
    sync::{AtomicBool, AtomicU64, Mutex, Ordering},
    time::{Clock, MonotonicClock, Time},
};

/// How a worker is made.
#[derive(Clone)]
#[non_exhaustive]
pub struct WorkerParams {
    /// The clock of everything below the worker.
    pub clock: Arc<dyn Clock>,
    /// Whether a progress thread stands in while the user's thread is away.
    pub progress_thread: bool,
    /// How often the progress thread looks, at least, while the user is away.
    pub async_tick: Duration,
}

impl Default for WorkerParams {
    fn default() -> Self {
        WorkerParams {
            clock: Arc::new(MonotonicClock::new()),
            progress_thread: true,
            async_tick: Duration::from_millis(100),
        }
    }
}

impl WorkerParams {
    /// A worker on virtual time: nothing happens but in `progress`, so every run is the same.
    pub fn manual(clock: Arc<dyn Clock>) -> Self {
        WorkerParams { clock, progress_thread: false, ..Self::default() }
    }

    /// With or without a progress thread. Without, a process that does not call `progress` does not acknowledge either,
    /// and its peers declare it dead after their time-out.
    pub fn progress_thread(mut self, on: bool) -> Self {
        self.progress_thread = on;
        self
    }
}

impl fmt::Debug for WorkerParams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WorkerParams(progress_thread {}, async_tick {:?})", self.progress_thread, self.async_tick)
    }
}

type IfaceList = Arc<[Arc<dyn Interface>]>;

/// What the worker, its interfaces and its thread share.
pub struct WorkerShared {
    clock: Arc<dyn Clock>,
    /// Interfaces with progress enabled. An interface removes itself when it is closed, which ends the cycle.
    ifaces: Mutex<IfaceList>,
    /// Counts the changes of that list.
    version: AtomicU64,
    deferred: DeferredQueue,
    /// Counts the user's `progress` calls: how the progress thread sees that the user is there.
    user_seq: AtomicU64,
    /// True while the progress thread looks every millisecond, so that sends may wait for company that long.
    batching: AtomicBool,
    /// Somebody has asked for that since the thread's last look.
    batching_wanted: AtomicBool,
    has_thread: bool,
    /// Ends [`Worker::wait`]. Made at the first.
    user_wake: OnceLock<EventFd>,
    /// Shared with the thread, which may be about to sleep on it when the worker ends.
    wake: Option<Arc<EventFd>>,
}

impl WorkerShared {
    /// The clock.
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    /// True if a send may be left un-rung for the moment, because the progress thread will ring within about a
    /// millisecond. Without one, a program that sends and then waits for something else would never be heard.
    ///
    /// Ask only with a second send in hand: the thread looks so often only while it is asked for, and takes some milliseconds
    /// to begin.
    #[inline]
    pub fn may_batch(&self) -> bool {
        if !self.has_thread {
            return false;
        }
        // Stored once per look only, so that the two do not fight for the cache line.
        if !self.batching_wanted.load(Ordering::Relaxed) {
            self.batching_wanted.store(true, Ordering::Relaxed);
        }
        self.batching.load(Ordering::Relaxed)
    }

    /// Adds an interface to `progress`. For transports.
    pub fn add_iface(&self, iface: Arc<dyn Interface>) {
        let mut list = self.ifaces.lock();
        if !list.iter().any(|i| same(i, &iface)) {
            *list = list.iter().cloned().chain([iface]).collect();
            self.note_change();
        }
    }

    /// Takes an interface out of `progress`. For transports. The worker lets go of it with its next `progress`.
    pub fn remove_iface(&self, iface: &Arc<dyn Interface>) {
        let old = {
            let mut list = self.ifaces.lock();
            let kept: IfaceList = list.iter().filter(|i| !same(i, iface)).cloned().collect();
            self.note_change();
            std::mem::replace(&mut *list, kept)
        };
        // The last reference may go here; not under the lock.
        drop(old);
    }

    /// Runs `f` in the next `progress`, with no lock held. Callable from any thread.
    pub fn defer(&self, f: Deferred) {
        if self.deferred.push(f)
            && let Some(w) = self.user_wake.get()
        {
            w.signal();
        }
    }

    /// Lets the progress thread look now. For what ends on helper threads.
    pub fn kick(&self) {
        if let Some(w) = &self.wake {
            w.signal();
        }
    }

    fn snapshot(&self) -> IfaceList {
        self.ifaces.lock().clone()
    }

    /// The list has changed. Called with its lock held.
    fn note_change(&self) {
        self.version.store(self.version.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
    }

    /// What `progress` goes through.
    #[cold]
    fn view(&self) -> View {
        let list = self.ifaces.lock();
        View { list: list.clone(), version: self.version.load(Ordering::Relaxed) }
    }
}

impl Drop for WorkerShared {
    fn drop(&mut self) {
        // The thread holds only a weak reference: woken, it finds nothing to upgrade, and ends.
        if let Some(w) = &self.wake {
            w.signal();
        }
    }
}

impl fmt::Debug for WorkerShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WorkerShared({} interfaces)", self.snapshot().len())
    }
}

/// An fd to end the sleep of the progress thread, or of the user's.
fn wake_fd() -> Result<EventFd> {
    EventFd::new().map_err(|e| {
        Error::new(
            ErrorKind::Io,
            "worker: no event fd to wake a sleeping thread; raise the open-file limit (ulimit -n)",
        )
        .with_errno(e.raw_os_error().unwrap_or(0))
    })
}

fn same(a: &Arc<dyn Interface>, b: &Arc<dyn Interface>) -> bool {
    // Addresses only: two vtables of one type may differ.
    std::ptr::addr_eq(Arc::as_ptr(a), Arc::as_ptr(b))
}

/// A copy of the list of interfaces, good while the list has this version.
#[derive(Clone)]
struct View {
    list: IfaceList,
    version: u64,
}

impl View {
    #[inline(always)]
    fn progress(&self) -> usize {
        let mut events = 0;
        for i in self.list.iter() {
            events += i.progress();
        }
        events
    }
}

/// The handle of a worker. Dropping it stops nothing: interfaces keep what they need.
///
/// It can be moved to another thread, but two cannot use it at a time. An interface that was closed is let go of with the
/// next `progress`, or with the handle: until then its memory domain stays open.
///
/// In a child that was forked since it was made, `progress` does nothing and other calls fail, see [`fork`](crate::fork).
pub struct Worker {
    shared: Arc<WorkerShared>,
    born: Birth,
    /// What `progress` goes through.
    view: RefCell<View>,
}

impl Worker {
    /// Makes a worker and, if asked for, its progress thread.
    ///
    /// # Errors
    /// `Io` if the thread or its wake-up fd cannot be made.
    pub fn new(params: WorkerParams) -> Result<Worker> {
        let wake = if params.progress_thread { Some(Arc::new(wake_fd()?)) } else { None };
        let shared = Arc::new(WorkerShared {
            clock: params.clock,
            ifaces: Mutex::new(Arc::new([])),
            version: AtomicU64::new(0),
            deferred: DeferredQueue::default(),
            user_seq: AtomicU64::new(0),
            batching: AtomicBool::new(false),
            batching_wanted: AtomicBool::new(false),
            has_thread: params.progress_thread,
            user_wake: OnceLock::new(),
            wake,
        });
        if params.progress_thread {
            thread::spawn(&shared, params.async_tick)?;
        }
        let view = RefCell::new(shared.view());
        Ok(Worker { shared, born: Birth::here(), view })
    }

    /// Moves everything once: a bounded amount of work. Returns the number of events handled; 0 does not mean that
    /// nothing is outstanding (for that, flush).
    pub fn progress(&self) -> usize {
        if !self.born.is_here() {
            return 0;
        }
        let s = &self.shared;
        s.user_seq.store(s.user_seq.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        let events = if let Ok(view) = self.view.try_borrow()
            && view.version == s.version.load(Ordering::Acquire)
        {
            view.progress()
        } else {
            self.progress_anew()
        };
        events + s.deferred.run()
    }

    /// [`Worker::progress`] when the list has changed.
    #[cold]
    #[inline(never)]
    fn progress_anew(&self) -> usize {
        let view = self.shared.view();
        // Not while it is gone through: this is a `progress` in a callback.
        let old = self.view.try_borrow_mut().ok().map(|mut v| std::mem::replace(&mut *v, view.clone()));
        // The last reference to an interface may go here, with nothing borrowed.
        drop(old);
        view.progress()
    }

    /// # Errors
    /// `UsedAfterFork` in a process that was forked since it was made.
    pub fn check(&self) -> Result<()> {
        self.born.check()
    }

    /// What transports and callbacks share with the worker.
    pub fn shared(&self) -> &Arc<WorkerShared> {
        &self.shared
    }

    /// The worker's clock.
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.shared.clock
    }

    /// When timers need `progress` next; `None` if no interface has anything due.
    pub fn next_timeout(&self) -> Option<Time> {
        self.check().ok()?;
        self.shared.snapshot().iter().filter_map(|i| i.next_timeout()).min()
    }

    /// Sleeps until an interface has something to do or `max` is over. Returns at once if there is work already. Typical
    /// loop: `if worker.progress() == 0 { worker.wait(d)? }`.
    ///
    /// # Errors
    /// `Unsupported` if an interface has no event fd; `UsedAfterFork`.
    pub fn wait(&self, max: Duration) -> Result<()> {
        self.check()?;
        let wake = match self.shared.user_wake.get() {
            Some(w) => w,
            None => {
                let new = wake_fd()?;
                self.shared.user_wake.get_or_init(|| new)
            }
        };
        wake.drain();
        self.shared.deferred.sleep_begins();
        let result = self.wait_armed(wake, max);
        self.shared.deferred.sleep_ends();
        result
    }

    fn wait_armed(&self, wake: &EventFd, max: Duration) -> Result<()> {
        let list = self.shared.snapshot();
        let mut fds = Vec::with_capacity(list.len() + 1);
        fds.push(wake.fd());
        for i in list.iter() {
            let fd: RawFd = i.event_fd().ok_or_else(|| {
                Error::new(ErrorKind::Unsupported, format!("{} has no event fd to wait on", i.attr().device))
            })?;
            if i.arm(Events::RECV | Events::SEND_COMP)? == Arm::Busy {
                return Ok(());
            }
            fds.push(fd);
        }
        if self.shared.deferred.has_any() {
            return Ok(());
        }
        let due = self.next_timeout().map(|t| t.since(self.shared.clock.now()));
        thread::poll_fds(&fds, due.map_or(max, |d| d.min(max)));
        Ok(())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if !self.born.is_here() {
            // The parent's: what it refers to must not end here.
            std::mem::forget(self.shared.clone());
        }
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shared.fmt(f)
    }
}

#[cfg(test)]
mod tests;
