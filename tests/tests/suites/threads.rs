//! The progress thread, real and on the soft device: what goes on while the user's thread is away.
//! (UCX: the async parts of test_p2p_am, test_ud_timer and test_uct_event.)

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread::ThreadId,
    time::{Duration, Instant},
};

use ib::{md::Md, soft::SoftDevice};
use parking_lot::Mutex;
use uct::{AmId, Completion, Endpoint, Ep, EpParams, FlushMode, Iface, Posted, SendError, Worker, WorkerParams};
use uct_tests::{
    check::Ledger,
    fabric::{Fabric, Sim, Soft},
    hooks::Hooks,
    world::{Motion, NodeOptions, World},
};

const ID: AmId = AmId::truncate(1);
const ASYNC: AmId = AmId::truncate(2);

/// A process with a progress thread.
struct Process {
    device: Arc<SoftDevice>,
    md: Arc<Md<SoftDevice>>,
    worker: Worker,
    iface: Option<Iface>,
}

impl Process {
    fn new(w: &mut World<Soft>) -> Process {
        let device = w.fabric.device();
        let md = Md::new(device.clone(), Default::default(), w.fabric.clock(), w.fabric.executor());
        let mut params = WorkerParams::default();
        params.clock = w.fabric.clock();
        params.async_tick = Duration::from_millis(2);
        let worker = Worker::new(params).unwrap();
        let mut p = Process { device, md, worker, iface: None };
        p.open();
        p
    }

    fn open(&mut self) {
        let o = NodeOptions::default();
        let iface = ud::open(&self.md, &self.worker, 1, &o.params, o.iface, o.ud, &o.tuning).unwrap();
        iface.progress_enable(true);
        self.iface = Some(iface);
    }

    fn iface(&self) -> &Iface {
        self.iface.as_ref().unwrap()
    }

    fn connect(&self, to: &Process) -> Ep {
        self.iface().ep(&EpParams::to_iface(&to.iface().device_address(), &to.iface().iface_address())).unwrap()
    }

    fn counter(&self, name: &str) -> u64 {
        self.iface().counters().iter().find(|c| c.name == name).map_or(0, |c| c.value)
    }

    fn finish(self) {
        let Process { device, md, worker, iface } = self;
        drop(iface);
        drop(worker);
        md.ah_cache().close();
        spin("the address handles are gone", || md.ah_cache().stats().live == 0);
        let s = md.ah_cache().stats();
        assert_eq!(s.created, s.destroyed);
        // The thread may be about to let go of the interface.
        spin("nothing leaked", || Arc::strong_count(&md) == 1 && Soft::device_leaks(&device).is_empty());
    }
}

/// Waits for what other threads do. The bound is for a test that hangs.
#[track_caller]
fn spin(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !done() {
        assert!(Instant::now() < end, "never: {what}");
        std::thread::yield_now();
    }
}

/// Sends, with the progress of `p` in between.
#[track_caller]
fn send(p: &Process, ep: &dyn Endpoint, id: AmId, n: u64) {
    spin("a send is accepted", || match ep.am_short(id, n, b"") {
        Ok(()) => true,
        Err(SendError::NoResource) => {
            p.worker.progress();
            false
        }
        Err(e) => panic!("{e}"),
    });
}

type Log = Arc<Mutex<Vec<(u64, ThreadId)>>>;

fn log_on(p: &Process, id: AmId, is_async: bool, log: &Log) {
    let log = log.clone();
    let f = move |m: uct::AmMessage<'_>| {
        let n = u64::from_ne_bytes(m.data()[..8].try_into().unwrap());
        log.lock().push((n, std::thread::current().id()));
    };
    if is_async { p.iface().on_am_async(id, f) } else { p.iface().on_am(id, f) }.unwrap();
}

fn pair(name: &str) -> (World<Soft>, Process, Process) {
    let mut w = World::<Soft>::new(name);
    let (a, b) = (Process::new(&mut w), Process::new(&mut w));
    (w, a, b)
}

#[test]
fn am_async_without_receiver_progress() {
    let (_w, a, b) = pair("am_async");
    let log = Log::default();
    log_on(&b, ASYNC, true, &log);
    // The user of b never calls progress: handshake, acks and async handlers are the thread's.
    let ep = a.connect(&b);
    for i in 0..3000 {
        send(&a, &*ep, ASYNC, i);
    }
    spin("all is acknowledged", || {
        a.worker.progress();
        matches!(ep.flush(FlushMode::Local, None), Ok(Posted::Done))
    });
    spin("all are delivered", || log.lock().len() == 3000);
    let me = std::thread::current().id();
    assert!(log.lock().iter().enumerate().all(|(i, (n, t))| *n == i as u64 && *t != me));
    drop(ep);
    a.finish();
    b.finish();
}

#[test]
fn am_sync_waits_for_the_user() {
    let (_w, a, b) = pair("am_sync");
    let log = Log::default();
    log_on(&b, ID, false, &log);
    let ep = a.connect(&b);
    for i in 0..1000 {
        send(&a, &*ep, ID, i);
    }
    spin("all is acknowledged", || {
        a.worker.progress();
        matches!(ep.flush(FlushMode::Local, None), Ok(Posted::Done))
    });
    assert_eq!(b.counter("rx.waiting"), 1000);
    assert!(log.lock().is_empty(), "delivered without the user");
    spin("all are delivered", || {
        b.worker.progress();
        log.lock().len() == 1000
    });
    let me = std::thread::current().id();
    assert!(log.lock().iter().enumerate().all(|(i, (n, t))| *n == i as u64 && *t == me));
    drop(ep);
    a.finish();
    b.finish();
}

#[test]
fn both_sides_away() {
    let (_w, a, b) = pair("both_sides_away");
    let log = Log::default();
    log_on(&b, ASYNC, true, &log);
    let ep = a.connect(&b);
    // No progress of any user: what the thread of a does opens the window.
    for i in 0..500 {
        spin("a send is accepted", || ep.am_short(ASYNC, i, b"").is_ok());
    }
    spin("all are delivered", || log.lock().len() == 500);
    spin("all is acknowledged", || matches!(ep.flush(FlushMode::Local, None), Ok(Posted::Done)));
    drop(ep);
    a.finish();
    b.finish();
}

#[test]
fn am_async_response() {
    let (_w, a, b) = pair("am_async_response");
    let log = Log::default();
    log_on(&a, ID, false, &log);
    let back = Arc::new(b.connect(&a));
    let (bb, lost) = (back.clone(), Arc::new(AtomicUsize::new(0)));
    let l = lost.clone();
    b.iface()
        .on_am_async(ASYNC, move |m| {
            let n = u64::from_ne_bytes(m.data()[..8].try_into().unwrap());
            if bb.am_short(ID, n, b"").is_err() {
                l.fetch_add(1, Ordering::Relaxed);
            }
        })
        .unwrap();
    let ep = a.connect(&b);
    for i in 0..500 {
        send(&a, &*ep, ASYNC, i);
        // One at a time, so that the answer always has room.
        let want = i as usize + 1;
        spin("it is answered", || {
            a.worker.progress();
            log.lock().len() + lost.load(Ordering::Relaxed) >= want
        });
    }
    // Refused only while the answerer's own handshake was under way.
    assert!(log.lock().len() >= 400, "{} answers", log.lock().len());
    drop(ep);
    b.iface().set_am_handler(ASYNC, None, uct::am::HandlerKind::Sync).unwrap();
    drop(back);
    a.finish();
    b.finish();
}

#[test]
fn order_between_async_and_sync() {
    let (_w, a, b) = pair("order_between_async_and_sync");
    let log = Log::default();
    log_on(&b, ID, false, &log);
    log_on(&b, ASYNC, true, &log);
    let ep = a.connect(&b);
    let total = 3000;
    for i in 0..total {
        send(&a, &*ep, if i % 7 == 3 { ID } else { ASYNC }, i);
        // The user of b comes and goes.
        if i % 100 < 20 {
            b.worker.progress();
        }
    }
    spin("all are delivered", || {
        a.worker.progress();
        b.worker.progress();
        log.lock().len() as u64 == total
    });
    let log = log.lock();
    assert!(log.iter().enumerate().all(|(i, (n, _))| *n == i as u64), "an async message overtook a sync one");
    let me = std::thread::current().id();
    assert!(log.iter().all(|(n, t)| n % 7 != 3 || *t == me));
    drop(ep);
    a.finish();
    b.finish();
}

#[test]
fn without_async_progress_nothing_goes_on() {
    let mut w = World::<Sim>::new("without_async_progress_nothing_goes_on");
    w.add(&NodeOptions::default());
    let mut o = NodeOptions::default();
    o.ud.async_progress = false;
    w.add(&o);
    let ep = w.nodes[0].connect(&w.nodes[1]);
    w.send(|| ep.am_short(ID, 0, b""));
    w.settle();
    w.nodes[1].motion = Motion::ThreadOnly;
    ep.am_short(ID, 1, b"").unwrap();
    w.run_for(Duration::from_secs(5));
    assert_eq!(w.nodes[1].counter("rx.waiting"), 0);
    assert!(matches!(ep.flush(FlushMode::Local, None), Ok(Posted::InProgress)), "acknowledged by nobody");
    w.nodes[1].motion = Motion::User;
    w.settle();
    assert_eq!(w.nodes[1].inbox.lock().len(), 2);
    drop(ep);
    w.finish();
}

/// The crash that this project started from: endpoints destroyed while the progress thread resends on them.
#[test]
fn destroy_under_load_with_loss() {
    let (w, a, b) = pair("destroy_under_load_with_loss");
    let got = Arc::new(AtomicUsize::new(0));
    let g = got.clone();
    b.iface()
        .on_am_async(ID, move |_| {
            g.fetch_add(1, Ordering::Relaxed);
        })
        .unwrap();
    for p in [&a, &b] {
        Soft::set_loss(&p.device, w.seed, 100_000);
    }
    let ledger = Ledger::new();
    let mut accepted = 0;
    for round in 0..150u64 {
        let ep = a.connect(&b);
        spin("a send is accepted", || {
            if round % 3 == 0 {
                a.worker.progress();
            }
            ep.am_short(ID, 0, b"").is_ok()
        });
        accepted += 1;
        for _ in 0..round % 20 {
            let comp = ledger.completion();
            accepted += usize::from(ep.am_zcopy(ID, b"abc", &[], Some(&comp)).is_ok());
        }
        match round % 4 {
            0 => ep.close(Some(ledger.completion())),
            _ => drop(ep),
        }
    }
    spin("all is settled", || {
        a.worker.progress();
        ledger.open() == 0
    });
    spin("all that was accepted arrives", || got.load(Ordering::Relaxed) >= accepted);
    assert_eq!(got.load(Ordering::Relaxed), accepted, "delivered twice");
    for p in [&a, &b] {
        Soft::set_loss(&p.device, 0, 0);
    }
    a.finish();
    b.finish();
}

#[test]
fn interfaces_close_while_the_thread_runs() {
    let (_w, mut a, b) = pair("interfaces_close_while_the_thread_runs");
    for round in 0..60u64 {
        let ledger = Ledger::new();
        let calls = Arc::new(AtomicUsize::new(0));
        let c = calls.clone();
        a.iface()
            .on_am_async(ASYNC, move |_| {
                c.fetch_add(1, Ordering::Relaxed);
            })
            .unwrap();
        // Both send, and neither user progresses.
        let (ab, ba) = (a.connect(&b), b.connect(&a));
        spin("both are connected", || {
            let _ = ab.am_short(ASYNC, 0, b"");
            let _ = ba.am_short(ASYNC, 0, b"");
            calls.load(Ordering::Relaxed) > (round % 5) as usize
        });
        let comp = ledger.completion();
        let _ = ab.am_zcopy(ID, b"x", &[], Some(&comp));
        let _ = ab.flush(FlushMode::Local, Some(&comp));
        drop(comp);
        if round % 2 == 0 {
            drop(ab);
            a.iface = None;
        } else {
            a.iface = None;
            drop(ab);
        }
        assert_eq!(ledger.open(), 0, "settled by close");
        drop(ba);
        a.open();
    }
    a.finish();
    b.finish();
}

#[test]
fn a_panicking_async_handler_does_not_end_the_thread() {
    let (_w, a, b) = pair("a_panicking_async_handler");
    let log = Log::default();
    log_on(&b, ASYNC, true, &log);
    b.iface().on_am_async(AmId::truncate(3), |_| panic!("a handler that panics on the progress thread")).unwrap();
    let ep = a.connect(&b);
    for i in 0..20 {
        send(&a, &*ep, if i % 5 == 2 { AmId::truncate(3) } else { ASYNC }, i);
    }
    spin("the others are delivered", || {
        a.worker.progress();
        log.lock().len() == 16
    });
    spin("all is acknowledged", || {
        a.worker.progress();
        matches!(ep.flush(FlushMode::Local, None), Ok(Posted::Done))
    });
    drop(ep);
    a.finish();
    b.finish();
}

#[test]
fn an_async_handler_that_destroys_endpoints() {
    let (_w, a, b) = pair("an_async_handler_that_destroys_endpoints");
    let slot: Arc<Mutex<Option<Ep>>> = Arc::default();
    let s = slot.clone();
    b.iface()
        .on_am_async(ASYNC, move |_| {
            let ep = s.lock().take();
            drop(ep);
        })
        .unwrap();
    let ep = a.connect(&b);
    send(&a, &*ep, ASYNC, 0);
    // The other end of `ep`; the victims are connections of their own.
    let claimed = b.connect(&a);
    for round in 0..50 {
        let victim = b.connect(&a);
        let ledger = Ledger::new();
        let comp: Completion = ledger.completion();
        spin("the victim has something outstanding", || victim.flush(FlushMode::Local, Some(&comp)).is_ok());
        drop(comp);
        *slot.lock() = Some(victim);
        send(&a, &*ep, ASYNC, round);
        spin("it is destroyed", || {
            a.worker.progress();
            slot.lock().is_none()
        });
        spin("settled in the user's next progress", || {
            b.worker.progress();
            ledger.open() == 0
        });
        ledger.all();
    }
    drop((ep, claimed));
    a.finish();
    b.finish();
}

/// Who sends to an id without a handler must not stop the others until the user comes back.
#[test]
fn messages_without_handler_do_not_stop_async_ones() {
    let (_w, a, b) = pair("messages_without_handler_do_not_stop_async_ones");
    let log = Log::default();
    log_on(&b, ASYNC, true, &log);
    let ep = a.connect(&b);
    // More than may wait for the user.
    for i in 0..6000 {
        send(&a, &*ep, if i % 3 == 0 { ASYNC } else { ID }, i);
    }
    spin("all are delivered", || {
        a.worker.progress();
        log.lock().len() == 2000
    });
    spin("the others are dropped", || b.counter("rx.no_handler") == 4000);
    assert_eq!(b.counter("rx.waiting"), 0);
    drop(ep);
    a.finish();
    b.finish();
}

/// A handler that becomes sync in the middle of a batch is the user's from the next message on.
#[test]
fn async_handler_replaced_by_sync_in_its_batch() {
    let (_w, a, b) = pair("async_handler_replaced_by_sync_in_its_batch");
    let log = Log::default();
    let gate = Arc::new(AtomicUsize::new(0));
    let (iface, l, g) = (Arc::downgrade(b.iface().transport()), log.clone(), gate.clone());
    let number = |m: &uct::AmMessage<'_>| u64::from_ne_bytes(m.data()[..8].try_into().unwrap());
    b.iface()
        .on_am_async(ASYNC, move |m| {
            let n = number(&m);
            l.lock().push((n, std::thread::current().id()));
            if n == 0 {
                spin("the others have arrived", || g.load(Ordering::Relaxed) == 1);
                return;
            }
            let l = l.clone();
            let next = move |m: uct::AmMessage<'_>| l.lock().push((number(&m), std::thread::current().id()));
            let iface = iface.upgrade().unwrap();
            iface.set_am_handler(ASYNC, Some(Arc::new(next)), uct::am::HandlerKind::Sync).unwrap();
        })
        .unwrap();
    let ep = a.connect(&b);
    send(&a, &*ep, ASYNC, 0);
    spin("the first is delivered", || log.lock().len() == 1);
    // What arrives while the thread is in the handler is one batch later.
    for n in 1..4 {
        spin("a send is accepted", || {
            a.worker.progress();
            // Only the network: the thread has the right to deliver.
            b.worker.progress();
            ep.am_short(ASYNC, n, b"").is_ok()
        });
    }
    spin("they wait", || {
        a.worker.progress();
        b.worker.progress();
        b.counter("rx.waiting") == 3
    });
    gate.store(1, Ordering::Relaxed);
    spin("the second is delivered", || log.lock().len() >= 2);
    spin("all are delivered", || {
        b.worker.progress();
        log.lock().len() == 4
    });
    let me = std::thread::current().id();
    let log = log.lock();
    assert!(log.iter().enumerate().all(|(i, (n, t))| *n == i as u64 && (*t == me) == (i > 1)), "{log:?}");
    drop(ep);
    a.finish();
    b.finish();
}
