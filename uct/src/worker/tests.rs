//! What `progress` calls: interfaces and deferred work. As UCX's `test_callbackq` and `test_uct_progress` test its queue of
//! callbacks, with their names: an interface is a callback that stays, deferred work one that runs once.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Weak, atomic::AtomicUsize},
};

use super::*;
use crate::{
    SendResult,
    am::{AmHandler, HandlerKind},
    completion::Completion,
    ep::{Endpoint, EpParams, FlushMode, Posted},
    iface::{Counter, IfaceAttr},
    time::ManualClock,
};

type Hook = Box<dyn Fn() + Send + Sync>;

/// An interface that counts its `progress` calls and does what the test says in them.
struct Callback {
    attr: IfaceAttr,
    calls: AtomicUsize,
    hook: Mutex<Option<Hook>>,
    /// Rounds of the test so far, and the one in which this interface was taken out (0: it was not).
    round: Arc<AtomicUsize>,
    removed: AtomicUsize,
    /// The progress thread takes care of it, and has looked at it so often.
    is_async: bool,
    looks: AtomicUsize,
    rings: AtomicUsize,
}

impl Callback {
    fn new() -> Arc<Callback> {
        Callback::in_rounds(Arc::default())
    }

    fn in_rounds(round: Arc<AtomicUsize>) -> Arc<Callback> {
        Arc::new(Callback::make(round, true))
    }

    fn make(round: Arc<AtomicUsize>, is_async: bool) -> Callback {
        let attr = IfaceAttr::empty("test", "none".into());
        Callback {
            attr,
            calls: AtomicUsize::new(0),
            hook: Mutex::default(),
            round,
            removed: AtomicUsize::new(0),
            is_async,
            looks: AtomicUsize::new(0),
            rings: AtomicUsize::new(0),
        }
    }

    fn does(self: &Arc<Self>, f: impl Fn() + Send + Sync + 'static) -> Arc<Self> {
        *self.hook.lock() = Some(Box::new(f));
        self.clone()
    }

    fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }
}

impl Interface for Callback {
    fn progress(&self) -> usize {
        let removed = self.removed.load(Ordering::SeqCst);
        assert!(removed == 0 || self.round.load(Ordering::SeqCst) <= removed, "called after it was removed");
        self.calls.fetch_add(1, Ordering::SeqCst);
        if let Some(f) = &*self.hook.lock() {
            f();
        }
        1
    }
    fn attr(&self) -> &IfaceAttr {
        &self.attr
    }
    fn device_address(&self) -> Vec<u8> {
        Vec::new()
    }
    fn iface_address(&self) -> Vec<u8> {
        Vec::new()
    }
    fn is_reachable(&self, _: &[u8]) -> std::result::Result<(), String> {
        Ok(())
    }
    fn create_ep(self: Arc<Self>, _: &EpParams) -> Result<Arc<dyn Endpoint>> {
        Err(Error::new(ErrorKind::Unsupported, "none"))
    }
    fn set_am_handler(&self, _: crate::AmId, _: Option<AmHandler>, _: HandlerKind) -> Result<()> {
        Ok(())
    }
    fn flush(&self, _: FlushMode, _: Option<&Completion>) -> SendResult<Posted> {
        Ok(Posted::Done)
    }
    fn fence(&self) -> SendResult<()> {
        Ok(())
    }
    fn progress_enable(&self, _: bool) {}
    fn is_async(&self) -> bool {
        self.is_async
    }
    fn progress_async(&self) -> usize {
        self.looks.fetch_add(1, Ordering::SeqCst);
        0
    }
    fn ring(&self) {
        self.rings.fetch_add(1, Ordering::SeqCst);
    }
    fn next_timeout(&self) -> Option<Time> {
        if self.is_async {
            return None;
        }
        self.looks.fetch_add(1, Ordering::SeqCst);
        Some(Time::ZERO)
    }
    fn arm_async(&self) -> Option<(RawFd, Arm)> {
        self.looks.fetch_add(1, Ordering::SeqCst);
        None
    }
    fn arm(&self, _: Events) -> Result<Arm> {
        Ok(Arm::Armed)
    }
    fn event_fd(&self) -> Option<RawFd> {
        None
    }
    fn counters(&self) -> Vec<Counter> {
        Vec::new()
    }
    fn close_iface(&self) {}
}

fn worker() -> Worker {
    Worker::new(WorkerParams::manual(Arc::new(ManualClock::new(Time::ZERO)))).unwrap()
}

#[test]
fn deferred_work_survives_a_panic_before_it() {
    let w = worker();
    let order = Arc::new(AtomicUsize::new(0));
    let append = |n: usize| {
        let o = order.clone();
        w.shared().defer(Box::new(move || o.store(o.load(Ordering::Relaxed) * 10 + n, Ordering::Relaxed)));
    };
    append(1);
    w.shared().defer(Box::new(|| panic!("expected")));
    append(2);
    append(3);
    assert!(catch_unwind(AssertUnwindSafe(|| w.progress())).is_err());
    append(4);
    assert_eq!(w.progress(), 3);
    assert_eq!((order.load(Ordering::Relaxed), w.progress()), (1234, 0));
}

/// A timer that is overdue for ever, because the thread does not move its interface, would keep the thread awake.
#[test]
fn the_thread_leaves_alone_what_is_the_users() {
    let params = WorkerParams { async_tick: std::time::Duration::from_millis(1), ..WorkerParams::default() };
    let w = Worker::new(params).unwrap();
    let (served, left) = (Callback::new(), Arc::new(Callback::make(Arc::default(), false)));
    w.shared().add_iface(served.clone());
    w.shared().add_iface(left.clone());
    while served.looks.load(Ordering::SeqCst) < 20 {
        std::thread::yield_now();
    }
    assert_eq!(left.looks.load(Ordering::SeqCst), 0);
    // What the user held back right before he went away leaves all the same: it is looked for after the first looks, too.
    assert!(left.rings.load(Ordering::SeqCst) > 5);
}

#[test]
fn single() {
    let (w, c) = (worker(), Callback::new());
    let iface: Arc<dyn Interface> = c.clone();
    w.shared().add_iface(iface.clone());
    w.shared().add_iface(iface.clone());
    assert_eq!((w.progress(), c.calls()), (1, 1), "added twice is there once");
    w.shared().remove_iface(&iface);
    assert_eq!((w.progress(), c.calls()), (0, 1));
    drop(iface);
    assert_eq!(Arc::strong_count(&c), 1, "nobody keeps it");
}

/// `progress` returns what its callbacks did; any number of them is called, each as often.
#[test]
fn multi() {
    for n in 0..20 {
        let w = worker();
        let all: Vec<Arc<Callback>> = (0..n).map(|_| Callback::new()).collect();
        for c in &all {
            w.shared().add_iface(c.clone());
        }
        for _ in 0..10 {
            assert_eq!(w.progress(), n);
        }
        assert!(all.iter().all(|c| c.calls() == 10));
    }
}

#[test]
fn remove_self() {
    let (w, c, other) = (worker(), Callback::new(), Callback::new());
    let (shared, me): (_, Weak<Callback>) = (w.shared().clone(), Arc::downgrade(&c));
    c.does(move || {
        let me: Arc<dyn Interface> = me.upgrade().expect("it is being called");
        shared.remove_iface(&me);
    });
    w.shared().add_iface(c.clone());
    w.shared().add_iface(other.clone());
    for _ in 0..5 {
        w.progress();
    }
    assert_eq!((c.calls(), other.calls()), (1, 5));
}

#[test]
fn add_another() {
    let (w, c, another) = (worker(), Callback::new(), Callback::new());
    let (shared, a) = (w.shared().clone(), another.clone());
    c.does(move || shared.add_iface(a.clone()));
    w.shared().add_iface(c.clone());
    assert_eq!((w.progress(), another.calls()), (1, 0), "from the next round on");
    assert_eq!((w.progress(), another.calls()), (2, 1));
    *c.hook.lock() = None;
}

/// Other threads add and remove while this one dispatches: whoever stays is called in every round, and whoever was removed
/// before a round began is not called in it.
#[test]
fn threads() {
    let w = worker();
    let shared = w.shared();
    let round = Arc::new(AtomicUsize::new(1));
    let stays = Callback::new();
    shared.add_iface(stays.clone());
    let done = AtomicUsize::new(0);
    std::thread::scope(|s| {
        for _ in 0..9 {
            s.spawn(|| {
                for _ in 0..200 {
                    let c = Callback::in_rounds(round.clone());
                    let iface: Arc<dyn Interface> = c.clone();
                    shared.add_iface(iface.clone());
                    std::thread::yield_now();
                    shared.remove_iface(&iface);
                    c.removed.store(round.load(Ordering::SeqCst), Ordering::SeqCst);
                }
                done.fetch_add(1, Ordering::SeqCst);
            });
        }
        while done.load(Ordering::SeqCst) < 9 {
            round.fetch_add(1, Ordering::SeqCst);
            w.progress();
        }
    });
    let rounds = stays.calls();
    assert_eq!(w.progress(), 1, "all others are gone");
    assert_eq!(stays.calls(), rounds + 1);
}

/// One-shot work from ten threads runs once each.
#[test]
fn oneshot_mt() {
    let w = worker();
    let ran: Arc<Vec<AtomicUsize>> = Arc::new((0..10_000).map(|_| AtomicUsize::new(0)).collect());
    std::thread::scope(|s| {
        for t in 0..10 {
            let (ran, shared) = (ran.clone(), w.shared().clone());
            s.spawn(move || {
                for i in t * 1000..(t + 1) * 1000 {
                    let ran = ran.clone();
                    shared.defer(Box::new(move || {
                        ran[i].fetch_add(1, Ordering::Relaxed);
                    }));
                }
            });
        }
        let mut n = 0;
        while n < 10_000 {
            n += w.progress();
        }
    });
    assert!(ran.iter().all(|r| r.load(Ordering::Relaxed) == 1));
    assert_eq!(w.progress(), 0);
}

/// One-shot work that leaves more behind: that runs in the next round, so a round ends.
#[test]
fn oneshot_add_recursive() {
    let w = worker();
    let ran = Arc::new(AtomicUsize::new(0));
    fn again(shared: &Arc<WorkerShared>, ran: &Arc<AtomicUsize>) {
        let (s, r) = (shared.clone(), ran.clone());
        shared.defer(Box::new(move || {
            if r.fetch_add(1, Ordering::Relaxed) < 9 {
                again(&s, &r);
            }
        }));
    }
    again(w.shared(), &ran);
    for n in 1..=10 {
        assert_eq!((w.progress(), ran.load(Ordering::Relaxed)), (1, n));
    }
    assert_eq!(w.progress(), 0);
}

#[test]
fn oneshot_ordering() {
    let w = worker();
    let order: Arc<Mutex<Vec<u32>>> = Arc::default();
    for n in 0..1000 {
        let o = order.clone();
        w.shared().defer(Box::new(move || o.lock().push(n)));
    }
    assert_eq!(w.progress(), 1000);
    assert_eq!(*order.lock(), (0..1000).collect::<Vec<_>>());
}

/// It runs once, and is then gone.
#[test]
fn oneshot_progress() {
    let w = worker();
    let (ran, held) = (Arc::new(AtomicUsize::new(0)), Arc::new(()));
    let (r, h) = (ran.clone(), held.clone());
    w.shared().defer(Box::new(move || {
        let _h = &h;
        r.fetch_add(1, Ordering::Relaxed);
    }));
    assert_eq!((w.progress(), w.progress(), ran.load(Ordering::Relaxed)), (1, 0, 1));
    assert_eq!(Arc::strong_count(&held), 1, "and what it held is let go");
}
