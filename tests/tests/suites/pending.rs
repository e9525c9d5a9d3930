//! Pending requests: what waits for resources, in which order it goes, and what it may do to its own endpoint.
//! (UCX: test_pending, test_ud_pending.)

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use parking_lot::Mutex;
use uct::{
    AmId, Completion, Endpoint, Ep, EpParams, ErrorKind, FlushMode, Iface, SendError,
    ep::{PendingRefused, PendingStatus},
};
use uct_tests::{
    check::{Ledger, fill, region},
    fabric::{Fabric, Sim},
    hooks::Hooks,
    on_fabrics,
    world::{Motion, NodeOptions, World},
};

on_fabrics! { sim, soft;
    pending_op,
    tx_wqe,
    pending_ucs_ok_dc_arbiter_bug,
    busy_while_it_could_send,
    send_ooo_with_pending,
    send_ooo_from_a_handler,
    send_ooo_with_comp,
    send_ooo_from_a_pack_closure,
    send_ooo_with_pending_another_ep,
    partial_stays_first_and_lets_others_go,
    fairness_over_eight_endpoints,
    purge_gives_back_the_oldest_first,
    purge_touches_one_endpoint,
    cancel_keeps_the_requests,
    err_busy_keeps_the_request,
    connect,
    connect_to_ep_later,
    flush,
    async_progress_does_not_dispatch,
    a_request_that_destroys_its_endpoint,
    a_request_that_closes_the_interface,
    a_request_that_adds_itself_again,
    a_request_that_makes_progress,
    a_request_that_panics,
    dropped_with_the_endpoint,
    refused_where_it_would_wait_for_ever,
}

const ID: AmId = AmId::truncate(1);

/// Two nodes and an endpoint between them whose window is full. The peer is stopped.
fn full<F: Hooks>(w: World<F>) -> (World<F>, Ep, u64) {
    let mut w = w.nodes(2);
    let ep = w.nodes[0].connect(&w.nodes[1]);
    w.send(|| ep.am_short(ID, 0, b""));
    w.settle();
    w.nodes[1].motion = Motion::Stopped;
    let mut next = 1;
    fill(&*ep, ID, &mut next);
    (w, ep, next)
}

/// Queues a request that sends `n`.
fn queue(ep: &dyn Endpoint, n: u64) {
    let r = ep.pending_add(Box::new(move |ep| match ep.am_short(ID, n, b"") {
        Ok(()) => PendingStatus::Done,
        Err(SendError::NoResource) => PendingStatus::NoResource,
        Err(e) => panic!("{e}"),
    }));
    assert!(r.is_ok(), "{r:?}");
}

fn numbers<F: Hooks>(w: &World<F>, node: usize) -> Vec<u64> {
    w.nodes[node].take().iter().map(|m| u64::from_ne_bytes(m.data[..8].try_into().unwrap())).collect()
}

#[track_caller]
fn in_order<F: Hooks>(w: &mut World<F>, n: u64) {
    w.nodes[1].motion = Motion::User;
    w.run_until("all arrive", |w| w.nodes[1].inbox.lock().len() as u64 >= n);
    w.all_home();
    assert_eq!(numbers(w, 1), (0..n).collect::<Vec<_>>());
}

fn pending_op<F: Hooks>(w: World<F>) {
    let (mut w, ep, next) = full(w);
    for i in 0..13 {
        queue(&*ep, next + i);
    }
    in_order(&mut w, next + 13);
    assert!(ep.pending_purge().is_empty());
    drop(ep);
    w.finish();
}

/// The send queue is what is exhausted: a request runs when the device has reported what it sent.
fn tx_wqe<F: Hooks>(mut w: World<F>) {
    let mut o = NodeOptions::default();
    o.iface.tx_queue_len = 65;
    w.add(&o);
    w.add(&NodeOptions::default());
    let ep = w.nodes[0].connect(&w.nodes[1]);
    let mut next = 0;
    // The window becomes much wider than the queue.
    for _ in 0..2000 {
        w.send(|| ep.am_short(ID, next, b""));
        next += 1;
    }
    w.settle();
    let before = next;
    fill(&*ep, ID, &mut next);
    assert!(next - before <= 65, "{} sends in a queue of 65", next - before);
    for _ in 0..13 {
        queue(&*ep, next);
        next += 1;
    }
    in_order(&mut w, next);
    assert!(ep.pending_purge().is_empty());
    drop(ep);
    w.finish();
}

/// Many endpoints exhaust what they share, and each has a request: all requests run.
fn pending_ucs_ok_dc_arbiter_bug<F: Hooks>(mut w: World<F>) {
    let mut o = NodeOptions::default();
    o.iface.tx_queue_len = 65;
    w.add(&o);
    w.add(&NodeOptions::default());
    let n = if F::NAME == "sim" { 2048 } else { 256 };
    let eps: Vec<Ep> = (0..n).map(|_| w.nodes[0].connect(&w.nodes[1])).collect();
    w.settle();
    let (mut sent, mut queued) = (0u64, 0);
    for (i, ep) in eps.iter().enumerate() {
        let mut next = 0;
        fill(&**ep, ID, &mut next);
        sent += next;
        queue(&**ep, i as u64);
        queued += 1;
    }
    w.run_until("all requests run", |w| w.nodes[1].inbox.lock().len() as u64 == sent + queued);
    assert!(eps.iter().all(|e| e.pending_purge().is_empty()));
    w.all_home();
    drop(eps);
    w.finish();
}

fn busy_while_it_could_send<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(2);
    let ep = w.nodes[0].connect(&w.nodes[1]);
    w.send(|| ep.am_short(ID, 0, b""));
    w.settle();
    let called = Arc::new(AtomicUsize::new(0));
    let c = called.clone();
    match ep.pending_add(Box::new(move |_| {
        c.fetch_add(1, Ordering::Relaxed);
        PendingStatus::Done
    })) {
        Err(PendingRefused::Busy(mut request)) => {
            w.step();
            assert_eq!(called.load(Ordering::Relaxed), 0, "refused and called all the same");
            // It came back whole.
            assert_eq!(request(&*ep), PendingStatus::Done);
            assert_eq!(called.load(Ordering::Relaxed), 1);
        }
        other => panic!("{other:?} instead of Busy"),
    }
    // NoResource and Busy never go on for ever: what a send refuses, pending_add takes, with nothing moving in between.
    let mut next = 1;
    w.nodes[1].motion = Motion::Stopped;
    fill(&*ep, ID, &mut next);
    queue(&*ep, next);
    in_order(&mut w, next + 1);
    drop(ep);
    w.finish();
}

fn send_ooo_with_pending<F: Hooks>(w: World<F>) {
    let (mut w, ep, next) = full(w);
    queue(&*ep, next);
    // Let the acks arrive without dispatching: the peer moves, and then this side's progress thread.
    w.step();
    w.nodes[1].motion = Motion::User;
    w.nodes[0].motion = Motion::Stopped;
    w.run_until("the peer has all", |w| w.nodes[1].inbox.lock().len() as u64 == next);
    for _ in 0..50 {
        w.step();
        w.nodes[0].iface().progress_async();
    }
    assert!(matches!(ep.am_short(ID, 99, b""), Err(SendError::NoResource)), "it would overtake");
    assert!(matches!(ep.am_bcopy(ID, &mut |_| panic!("packed")), Err(SendError::NoResource)));
    let ledger = Ledger::new();
    assert!(matches!(ep.am_zcopy(ID, b"", &[], Some(&ledger.completion())), Err(SendError::NoResource)));
    assert!(matches!(ep.flush(FlushMode::Local, Some(&ledger.completion())), Err(SendError::NoResource)));
    w.nodes[0].motion = Motion::User;
    w.send(|| ep.am_short(ID, next + 1, b""));
    in_order(&mut w, next + 2);
    drop(ep);
    w.finish();
}

/// What a callback saw when it tried to send `n` directly.
fn try_direct(ep: &dyn Endpoint, n: &AtomicU64, tries: &Mutex<Vec<bool>>) {
    let ok = ep.am_short(ID, n.load(Ordering::Relaxed), b"").is_ok();
    tries.lock().push(ok);
    if ok {
        n.fetch_add(1, Ordering::Relaxed);
    }
}

fn send_ooo_from_a_handler<F: Hooks>(w: World<F>) {
    let (mut w, ep, next) = full(w);
    let ep = Arc::new(ep);
    let tries: Arc<Mutex<Vec<bool>>> = Arc::default();
    let direct = Arc::new(AtomicU64::new(next + 20));
    let (e, t, d) = (ep.clone(), tries.clone(), direct.clone());
    w.nodes[0].iface().on_am(AmId::truncate(9), move |_| try_direct(&**e, &d, &t)).unwrap();
    for i in 0..20 {
        queue(&**ep, next + i);
    }
    // The peer's messages carry acks: its handler runs right after the window opened, before the queue is served.
    let back = w.nodes[1].connect(&w.nodes[0]);
    w.nodes[1].motion = Motion::User;
    for i in 0..40 {
        w.send(|| back.am_short(AmId::truncate(9), i, b""));
    }
    w.run_until("the handler ran", |_| tries.lock().len() == 40);
    let sent = tries.lock().iter().filter(|t| **t).count() as u64;
    assert!(tries.lock().iter().any(|t| !t), "never tried while requests were queued");
    // The order at the peer is the proof.
    in_order(&mut w, next + 20 + sent);
    w.nodes[0].iface().set_am_handler(AmId::truncate(9), None, uct::am::HandlerKind::Sync).unwrap();
    drop((ep, back));
    w.finish();
}

fn send_ooo_with_comp<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(2);
    let ep = Arc::new(w.nodes[0].connect(&w.nodes[1]));
    w.send(|| ep.am_short(ID, 0, b""));
    w.settle();
    w.nodes[1].motion = Motion::Stopped;
    let tries: Arc<Mutex<Vec<bool>>> = Arc::default();
    let mut next = 1;
    let r = region(&*w.nodes[0].md, &1u64.to_ne_bytes());
    let direct = Arc::new(AtomicU64::new(0));
    let (e, t, d) = (ep.clone(), tries.clone(), direct.clone());
    let comp = Completion::new(move |_| try_direct(&**e, &d, &t));
    let _posted = w.send(|| ep.am_zcopy(ID, b"", &[r.slice(0..8).unwrap()], Some(&comp)));
    drop(comp);
    next += 1;
    fill(&**ep, ID, &mut next);
    for i in 0..20 {
        queue(&**ep, next + i);
    }
    direct.store(next + 20, Ordering::Relaxed);
    w.nodes[1].motion = Motion::User;
    w.run_until("the completion ran", |_| tries.lock().len() == 1);
    assert_eq!(*tries.lock(), [false], "the completion's send overtook the queue");
    in_order(&mut w, next + 20);
    drop((ep, r));
    w.finish();
}

fn send_ooo_from_a_pack_closure<F: Hooks>(w: World<F>) {
    // The window has one place: the message being packed has it, so the closure's own send goes to the queue.
    let mut w = w.nodes(2);
    let ep = w.nodes[0].connect(&w.nodes[1]);
    w.send(|| ep.am_short(ID, 0, b""));
    w.settle();
    let mut n = 1u64;
    let mut queued = 0;
    for _ in 0..3000 {
        let mut inner = None;
        let mut own = n;
        let r = ep.am_bcopy(ID, &mut |to| {
            // Nested, so it is numbered first.
            match ep.am_short(ID, n, b"") {
                Ok(()) => own = n + 1,
                Err(SendError::NoResource) => inner = Some(n + 1),
                Err(e) => panic!("{e}"),
            }
            if let Some(later) = inner {
                // What could not go now goes after what is being packed.
                queue(&*ep, later);
            }
            to[..8].copy_from_slice(&own.to_ne_bytes());
            8
        });
        match r {
            Ok(8) => n += 2,
            Ok(other) => panic!("packed {other}"),
            Err(SendError::NoResource) => {
                assert!(inner.is_none() && own == n, "packed, and not sent");
                w.step();
            }
            Err(e) => panic!("{e}"),
        }
        queued += usize::from(inner.is_some());
    }
    assert!(queued > 0, "the window was never exhausted inside the closure");
    in_order(&mut w, n);
    drop(ep);
    w.finish();
}

fn send_ooo_with_pending_another_ep<F: Hooks>(w: World<F>) {
    let (mut w, a, mut next) = full(w);
    let b = Arc::new(w.nodes[0].connect(&w.nodes[1]));
    let bb = b.clone();
    let mut left = 50u64;
    let other = AmId::truncate(2);
    let r = a.pending_add(Box::new(move |_| {
        // Sends on another endpoint, and stays in line until all is sent.
        while left > 0 {
            match bb.am_short(other, 50 - left, b"") {
                Ok(()) => left -= 1,
                Err(SendError::NoResource) => return PendingStatus::NoResource,
                Err(e) => panic!("{e}"),
            }
        }
        PendingStatus::Done
    }));
    assert!(r.is_ok());
    queue(&*a, next);
    next += 1;
    w.nodes[1].motion = Motion::User;
    w.run_until("all arrive", |w| w.nodes[1].inbox.lock().len() as u64 == next + 50);
    w.all_home();
    let (one, two): (Vec<_>, Vec<_>) = w.nodes[1].take().into_iter().partition(|m| m.id == 1);
    assert!(one.iter().enumerate().all(|(i, m)| m.data == (i as u64).to_ne_bytes()));
    assert!(two.iter().enumerate().all(|(i, m)| m.data == (i as u64).to_ne_bytes()));
    drop((a, b));
    w.finish();
}

/// `n` endpoints to node 1 with full windows; the peer is stopped.
fn several_full<F: Hooks>(w: World<F>, n: usize) -> (World<F>, Vec<Ep>) {
    let mut w = w.nodes(2);
    let eps: Vec<Ep> = (0..n).map(|_| w.nodes[0].connect(&w.nodes[1])).collect();
    for ep in &eps {
        w.send(|| ep.am_short(AmId::truncate(0), 0, b""));
    }
    w.settle();
    w.nodes[1].motion = Motion::Stopped;
    for ep in &eps {
        while ep.am_short(AmId::truncate(0), 0, b"").is_ok() {}
    }
    (w, eps)
}

fn partial_stays_first_and_lets_others_go<F: Hooks>(w: World<F>) {
    let (mut w, eps) = several_full(w, 2);
    let log: Arc<Mutex<Vec<(usize, u64)>>> = Arc::default();
    for (i, ep) in eps.iter().enumerate() {
        for k in 0..2u64 {
            let log = log.clone();
            let mut parts = 0;
            let r = ep.pending_add(Box::new(move |_| {
                log.lock().push((i, k));
                parts += 1;
                if parts < 4 { PendingStatus::Partial } else { PendingStatus::Done }
            }));
            assert!(r.is_ok());
        }
    }
    w.nodes[1].motion = Motion::User;
    w.run_until("all ran", |_| log.lock().len() == 16);
    let log = log.lock().clone();
    for i in 0..2 {
        let mine: Vec<u64> = log.iter().filter(|(e, _)| *e == i).map(|(_, k)| *k).collect();
        assert_eq!(mine, [0, 0, 0, 0, 1, 1, 1, 1], "the first is done before the second is called");
    }
    // While both are in line they take turns.
    let first = log.iter().position(|(e, _)| *e != log[0].0).expect("the other one runs");
    let both = &log[first - 1..];
    let turns = both.windows(2).take_while(|p| p[0].0 != p[1].0).count();
    assert!(turns >= 7 || first > 8, "no turns: {log:?}");
    w.all_home();
    drop(eps);
    w.finish();
}

fn fairness_over_eight_endpoints<F: Hooks>(mut w: World<F>) {
    let mut o = NodeOptions::default();
    // The send queue is what they compete for.
    o.iface.tx_queue_len = 65;
    w.add(&o);
    w.add(&NodeOptions::default());
    let eps: Vec<Ep> = (0..8).map(|_| w.nodes[0].connect(&w.nodes[1])).collect();
    for _ in 0..100 {
        for ep in &eps {
            w.send(|| ep.am_short(AmId::truncate(0), 0, b""));
        }
    }
    w.settle();
    // All windows are wide.
    w.nodes[1].motion = Motion::Stopped;
    for ep in &eps {
        while ep.am_short(AmId::truncate(0), 0, b"").is_ok() {}
    }
    let goal = 300u64;
    let counts: Arc<Mutex<[u64; 8]>> = Arc::default();
    let worst = Arc::new(AtomicU64::new(0));
    for (i, ep) in eps.iter().enumerate() {
        let (counts, worst) = (counts.clone(), worst.clone());
        let r = ep.pending_add(Box::new(move |ep| {
            let mut c = counts.lock();
            match ep.am_short(AmId::truncate(1 + i as u8), c[i], b"") {
                Ok(()) => c[i] += 1,
                Err(SendError::NoResource) => return PendingStatus::NoResource,
                Err(e) => panic!("{e}"),
            }
            let spread = c.iter().max().unwrap() - c.iter().min().unwrap();
            if c.iter().all(|n| *n < goal) {
                worst.fetch_max(spread, Ordering::Relaxed);
            }
            if c[i] == goal { PendingStatus::Done } else { PendingStatus::Partial }
        }));
        assert!(r.is_ok(), "{r:?}");
    }
    w.nodes[1].motion = Motion::User;
    let mut uncut = 0;
    w.run_until("all are sent", |w| {
        // Whose window was cut is rightly behind. On a busy machine timers that are up cut windows of any network.
        if w.nodes[0].counter("tx.cwnd_cuts") == 0 {
            uncut = worst.load(Ordering::Relaxed);
        }
        counts.lock().iter().all(|n| *n == goal)
    });
    w.run_until("all arrive", |w| w.nodes[1].inbox.lock().iter().filter(|m| m.id > 0).count() as u64 == 8 * goal);
    assert!(F::NAME != Sim::NAME || w.nodes[0].counter("tx.cwnd_cuts") == 0, "nothing is lost or late there");
    // A window may shut for a moment, so it is not one by one.
    assert!(uncut <= 64, "one was {uncut} messages ahead of another");
    let got = w.nodes[1].take();
    for i in 1..=8u8 {
        let mine: Vec<_> = got.iter().filter(|m| m.id == i).collect();
        assert!(mine.iter().enumerate().all(|(k, m)| m.data == (k as u64).to_ne_bytes()));
    }
    w.all_home();
    drop(eps);
    w.finish();
}

fn purge_gives_back_the_oldest_first<F: Hooks>(w: World<F>) {
    let (mut w, ep, next) = full(w);
    let called: Arc<Mutex<Vec<u64>>> = Arc::default();
    for i in 0..13 {
        let called = called.clone();
        let r = ep.pending_add(Box::new(move |_| {
            called.lock().push(i);
            PendingStatus::Done
        }));
        assert!(r.is_ok());
    }
    let mut back = ep.pending_purge();
    assert_eq!(back.len(), 13);
    assert!(ep.pending_purge().is_empty());
    in_order(&mut w, next);
    assert!(called.lock().is_empty(), "purged and called");
    assert!(back.iter_mut().all(|r| r(&*ep) == PendingStatus::Done));
    assert_eq!(*called.lock(), (0..13).collect::<Vec<_>>());
    // Direct sends go again.
    w.send(|| ep.am_short(ID, 0, b""));
    drop((back, ep));
    w.finish();
}

fn purge_touches_one_endpoint<F: Hooks>(w: World<F>) {
    let (mut w, eps) = several_full(w, 5);
    for (i, ep) in eps.iter().enumerate() {
        queue(&**ep, i as u64);
    }
    for i in [2, 0, 4] {
        assert_eq!(eps[i].pending_purge().len(), 1);
    }
    w.nodes[1].motion = Motion::User;
    w.run_until("the others run", |w| w.nodes[1].inbox.lock().iter().filter(|m| m.id == 1).count() == 2);
    w.all_home();
    assert!(eps.iter().all(|e| e.pending_purge().is_empty()));
    drop(eps);
    w.finish();
}

/// A cancel settles operations. Requests are no operations yet: they stay the user's, to be purged.
fn cancel_keeps_the_requests<F: Hooks>(w: World<F>) {
    let (mut w, ep, next) = full(w);
    for _ in 0..5 {
        let r = ep.pending_add(Box::new(|_| panic!("called after cancel")));
        assert!(r.is_ok());
    }
    assert!(matches!(ep.flush(FlushMode::Cancel, None), Ok(uct::Posted::Done)));
    w.nodes[1].motion = Motion::User;
    w.run_until("what was sent arrives", |w| w.nodes[1].inbox.lock().len() as u64 == next);
    for _ in 0..20 {
        w.step();
    }
    assert_eq!(ep.pending_purge().len(), 5);
    w.all_home();
    drop(ep);
    w.finish();
}

fn err_busy_keeps_the_request<F: Hooks>(w: World<F>) {
    let (mut w, ep, next) = full(w);
    let calls = Arc::new(AtomicUsize::new(0));
    for _ in 0..13 {
        let calls = calls.clone();
        let r = ep.pending_add(Box::new(move |_| {
            calls.fetch_add(1, Ordering::Relaxed);
            PendingStatus::NoResource
        }));
        assert!(r.is_ok());
    }
    w.nodes[1].motion = Motion::User;
    w.run_until("the first is called, again and again", |_| calls.load(Ordering::Relaxed) >= 5);
    assert_eq!(ep.pending_purge().len(), 13);
    in_order(&mut w, next);
    drop(ep);
    w.finish();
}

fn connect<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(2);
    let ep = w.nodes[0].connect(&w.nodes[1]);
    assert!(matches!(ep.am_short(ID, 0, b""), Err(SendError::NoResource)));
    for i in 0..13 {
        queue(&*ep, i);
    }
    in_order(&mut w, 13);
    drop(ep);
    w.finish();
}

fn connect_to_ep_later<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(2);
    let (na, nb) = (&w.nodes[0], &w.nodes[1]);
    let a = na.iface().ep(&EpParams::unconnected()).unwrap();
    let b = nb.iface().ep(&EpParams::unconnected()).unwrap();
    for i in 0..13 {
        queue(&*a, i);
    }
    for _ in 0..20 {
        w.step();
    }
    assert!(w.nodes[1].inbox.lock().is_empty());
    let (na, nb) = (&w.nodes[0], &w.nodes[1]);
    a.connect(&nb.iface().device_address(), &b.address().unwrap()).unwrap();
    b.connect(&na.iface().device_address(), &a.address().unwrap()).unwrap();
    in_order(&mut w, 13);
    drop((a, b));
    w.finish();
}

fn flush<F: Hooks>(w: World<F>) {
    let (mut w, ep, next) = full(w);
    for i in 0..13 {
        queue(&*ep, next + i);
    }
    w.nodes[1].motion = Motion::User;
    // A flush loop alone dispatches them all before it ends: on the interface, and then there is nothing on the endpoint.
    w.settle();
    assert!(ep.pending_purge().is_empty(), "flushed, and requests are left");
    assert!(matches!(ep.flush(FlushMode::Local, None), Ok(uct::Posted::Done)));
    in_order(&mut w, next + 13);
    drop(ep);
    w.finish();
}

fn async_progress_does_not_dispatch<F: Hooks>(w: World<F>) {
    let (mut w, ep, next) = full(w);
    for i in 0..13 {
        queue(&*ep, next + i);
    }
    w.nodes[1].motion = Motion::User;
    w.nodes[0].motion = Motion::Stopped;
    for _ in 0..200 {
        w.step();
        w.nodes[0].iface().progress_async();
    }
    assert_eq!(w.nodes[1].inbox.lock().len() as u64, next, "dispatched on the progress thread");
    assert_eq!(ep.pending_purge().len(), 13);
    w.nodes[0].motion = Motion::User;
    in_order(&mut w, next);
    drop(ep);
    w.finish();
}

fn a_request_that_destroys_its_endpoint<F: Hooks>(w: World<F>) {
    let (mut w, _keep, next) = full(w);
    for answer in [PendingStatus::Done, PendingStatus::Partial, PendingStatus::NoResource] {
        let slot = Arc::new(Mutex::new(Some(w.nodes[0].connect(&w.nodes[1]))));
        let (s, calls) = (slot.clone(), Arc::new(AtomicUsize::new(0)));
        let c = calls.clone();
        let guard = slot.lock();
        let ep = guard.as_ref().unwrap();
        let r = ep.pending_add(Box::new(move |ep| {
            c.fetch_add(1, Ordering::Relaxed);
            let mine = s.lock().take();
            drop(mine);
            let e = ep.am_short(ID, 0, b"").unwrap_err();
            assert!(matches!(e, SendError::Failed(e) if e.kind() == ErrorKind::Closed));
            let again = ep.pending_add(Box::new(|_| panic!("called after destroy")));
            assert!(matches!(again, Err(PendingRefused::Failed(_, e)) if e.kind() == ErrorKind::Closed));
            answer
        }));
        assert!(r.is_ok());
        // It goes with the endpoint.
        let alive = Arc::new(());
        let held = alive.clone();
        let r = ep.pending_add(Box::new(move |_| {
            let _held = &held;
            panic!("called after destroy")
        }));
        assert!(r.is_ok());
        drop(guard);
        w.nodes[1].motion = Motion::User;
        w.run_until("it runs", |_| calls.load(Ordering::Relaxed) == 1);
        for _ in 0..20 {
            w.step();
        }
        assert_eq!(calls.load(Ordering::Relaxed), 1, "called again after {answer:?}");
        assert_eq!(Arc::strong_count(&alive), 1, "the request behind it is still there");
    }
    in_order(&mut w, next);
    drop(_keep);
    w.finish();
}

fn a_request_that_closes_the_interface<F: Hooks>(w: World<F>) {
    let (mut w, ep, next) = full(w);
    let ledger = Ledger::new();
    let comp = ledger.completion();
    // Outstanding, so that closing has something to settle.
    let iface: Arc<Mutex<Option<Iface>>> = Arc::new(Mutex::new(w.nodes[0].iface.take()));
    let (i, l) = (iface.clone(), ledger.clone());
    let r = ep.pending_add(Box::new(move |ep| {
        let it = i.lock().take();
        drop(it);
        // Not inside this callback.
        assert_eq!(l.fired(), 0, "a completion fired inside the callback");
        assert!(matches!(ep.am_short(ID, 0, b""), Err(SendError::Failed(e)) if e.kind() == ErrorKind::Closed));
        PendingStatus::NoResource
    }));
    assert!(r.is_ok());
    let other = {
        let guard = iface.lock();
        let peer = &w.nodes[1];
        guard.as_ref().unwrap().ep(&EpParams::to_iface(&peer.iface().device_address(), &peer.iface().iface_address()))
    }
    .unwrap();
    // A flush of a connecting endpoint, which stays open because its peer does not answer it before the request runs.
    assert!(matches!(other.flush(FlushMode::Local, Some(&comp)), Ok(uct::Posted::InProgress)));
    drop(comp);
    w.nodes[1].motion = Motion::User;
    F::set_tx_filter(
        &w.nodes[1].device,
        Some(Box::new(
            |p| if p.payload.len() > 40 { ib::sw::FilterVerdict::Drop } else { ib::sw::FilterVerdict::Pass },
        )),
    );
    w.run_until("it is closed", |_| iface.lock().is_none());
    assert_eq!(ledger.all(), [Err(ErrorKind::Canceled)], "settled by the end of that progress");
    F::set_tx_filter(&w.nodes[1].device, None);
    assert!(w.nodes[1].inbox.lock().len() as u64 >= next - 1);
    drop((ep, other));
    w.finish();
}

fn a_request_that_adds_itself_again<F: Hooks>(w: World<F>) {
    let (mut w, ep, next) = full(w);

    fn add(ep: &dyn Endpoint, n: u64, end: u64) {
        let r = ep.pending_add(Box::new(move |ep| match ep.am_short(ID, n, b"") {
            Ok(()) => {
                if n + 2 < end {
                    // Behind the one that waits, so the two alternate.
                    add(ep, n + 2, end);
                }
                PendingStatus::Done
            }
            Err(SendError::NoResource) => PendingStatus::NoResource,
            Err(e) => panic!("{e}"),
        }));
        match r {
            Ok(()) => {}
            // It could send at once, which nothing forbids.
            Err(PendingRefused::Busy(mut r)) => assert_eq!(r(ep), PendingStatus::Done),
            Err(e) => panic!("{e:?}"),
        }
    }
    add(&*ep, next, next + 60);
    add(&*ep, next + 1, next + 60);
    w.nodes[1].motion = Motion::User;
    w.run_until("all arrive", |w| w.nodes[1].inbox.lock().len() as u64 == next + 60);
    w.all_home();
    let got = numbers(&w, 1);
    assert_eq!(got[..next as usize + 2], (0..next + 2).collect::<Vec<_>>());
    let mut sorted = got.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, (0..next + 60).collect::<Vec<_>>());
    drop(ep);
    w.finish();
}

fn a_request_that_makes_progress<F: Hooks>(w: World<F>) {
    let (mut w, ep, next) = full(w);
    let node = w.nodes[0].iface().transport().clone();
    for i in 0..13 {
        let node = node.clone();
        let r = ep.pending_add(Box::new(move |ep| {
            for _ in 0..5 {
                node.progress();
            }
            match ep.am_short(ID, next + i, b"") {
                Ok(()) => PendingStatus::Done,
                Err(SendError::NoResource) => PendingStatus::NoResource,
                Err(e) => panic!("{e}"),
            }
        }));
        assert!(r.is_ok());
    }
    in_order(&mut w, next + 13);
    drop((node, ep));
    w.finish();
}

fn a_request_that_panics<F: Hooks>(w: World<F>) {
    let (mut w, ep, next) = full(w);
    let r = ep.pending_add(Box::new(|_| panic!("a request that panics")));
    assert!(r.is_ok());
    for i in 0..13 {
        queue(&*ep, next + i);
    }
    w.nodes[1].motion = Motion::User;
    let mut panics = 0;
    let end = w.now() + w.fabric.patience();
    while panics == 0 && w.now() < end {
        panics += usize::from(catch_unwind(AssertUnwindSafe(|| w.step())).is_err());
    }
    assert_eq!(panics, 1);
    // It is over; the others are where they were.
    in_order(&mut w, next + 13);
    drop(ep);
    w.finish();
}

fn dropped_with_the_endpoint<F: Hooks>(w: World<F>) {
    let (mut w, ep, next) = full(w);
    let alive = Arc::new(());
    for _ in 0..5 {
        let held = alive.clone();
        let r = ep.pending_add(Box::new(move |_| {
            let _held = &held;
            panic!("called after destroy")
        }));
        assert!(r.is_ok());
    }
    drop(ep);
    assert_eq!(Arc::strong_count(&alive), 1, "destroy returns them");
    in_order(&mut w, next);
    w.finish();
}

fn refused_where_it_would_wait_for_ever<F: Hooks>(w: World<F>) {
    let (mut w, ep, next) = full(w);
    let _done = ep.flush(FlushMode::Cancel, None).unwrap();
    match ep.pending_add(Box::new(|_| panic!("called"))) {
        Err(PendingRefused::Failed(_, e)) => assert_eq!(e.kind(), ErrorKind::Canceled),
        other => panic!("{other:?}"),
    }
    let dead = w.nodes[0].connect(&w.nodes[1]);
    dead.invalidate().unwrap();
    match dead.pending_add(Box::new(|_| panic!("called"))) {
        Err(PendingRefused::Failed(_, e)) => assert_eq!(e.kind(), ErrorKind::EndpointTimeout),
        other => panic!("{other:?}"),
    }
    w.nodes[1].motion = Motion::User;
    w.run_until("what was sent arrives", |w| w.nodes[1].inbox.lock().len() as u64 == next);
    w.run_until("the failure is told", |w| w.nodes[0].failures.lock().len() == 1);
    // An interface flush does not wait for what nobody will do.
    w.settle();
    drop((ep, dead));
    w.finish();
}
