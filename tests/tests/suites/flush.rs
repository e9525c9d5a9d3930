//! Flush, completions, close, destroy: every accepted operation is settled exactly once, and what was accepted arrives.
//! (UCX: test_flush, test_uct_ep, the keep-alive part of test_peer_failure.)

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use parking_lot::Mutex;
use uct::{
    AmId, Completion, Endpoint, Ep, EpParams, ErrorKind, FlushMode, MemSlice, Posted, SendError,
    ep::{PendingRefused, PendingStatus},
};
use uct_tests::{
    check::{Ledger, fill, fill_zcopy, region},
    hooks::Hooks,
    on_fabrics,
    world::{Motion, World},
};

on_fabrics! { sim, soft;
    am_flush_ep_no_comp,
    am_flush_iface_no_comp,
    am_zcopy_flush_ep_no_comp,
    am_zcopy_flush_iface_no_comp,
    am_flush_ep_nb,
    am_zcopy_flush_ep_nb,
    am_zcopy_flush_iface,
    am_pending_flush_nb,
    flushes_complete_in_order,
    flush_of_nothing_leaves_the_completion_alone,
    creq_flush,
    flush_from_a_flush_completion,
    iface_flush_waits_for_destroyed_endpoints,
    remote_flush_is_refused,
    counted_completion_of_many_operations,
    cancel_settles_at_once_and_refuses_the_rest,
    cancel_then_destroy,
    cancel_the_interface,
    close_without_outstanding_data,
    close_with_outstanding_data,
    close_of_what_never_connected,
    close_in_callbacks,
    close_after_the_interface,
    close_to_a_dead_peer,
    destroy_entity_after_send,
    destroying_two_endpoints_loses_no_completion,
    disconnect_after_send,
    interface_close_settles_everything,
    invalidate_settles_then_reports,
    ep_check_comps,
    a_panicking_completion_spoils_no_other,
    every_accepted_operation_is_settled_once,
}

const ID: AmId = AmId::truncate(1);

fn pair<F: Hooks>(w: World<F>) -> (World<F>, Ep) {
    let mut w = w.nodes(2);
    let ep = w.nodes[0].connect(&w.nodes[1]);
    w.send(|| ep.am_short(ID, 0, b""));
    w.settle();
    w.nodes[1].take();
    (w, ep)
}

fn slices<F: Hooks>(w: &World<F>) -> Vec<MemSlice> {
    let r = region(&*w.nodes[0].md, b"zero-copy");
    vec![r.slice(0..9).unwrap()]
}

#[track_caller]
fn flush<F: Hooks>(w: &mut World<F>, ep: &dyn Endpoint, ledger: &Ledger) -> Posted {
    let comp = ledger.completion();
    w.send(|| ep.flush(FlushMode::Local, Some(&comp)))
}

/// Asks until the flush is over, without a completion.
#[track_caller]
fn poll_ep<F: Hooks>(w: &mut World<F>, ep: &dyn Endpoint) {
    w.run_until("the endpoint is flushed", |_| matches!(ep.flush(FlushMode::Local, None), Ok(Posted::Done)));
}

fn am_flush_ep_no_comp<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w);
    for i in 0..20 {
        w.send(|| ep.am_bcopy(ID, &mut |_| 100 + i));
    }
    poll_ep(&mut w, &*ep);
    assert_eq!(w.nodes[1].inbox.lock().len(), 20, "delivered before");
    drop(ep);
    w.finish();
}

/// Flushed by the interface, and everything closed at once: nothing is lost.
fn am_flush_iface_no_comp<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w);
    let other = w.nodes[0].connect(&w.nodes[1]);
    for i in 0..20 {
        w.send(|| ep.am_bcopy(ID, &mut |_| 100 + i));
        w.send(|| other.am_bcopy(ID, &mut |_| 100 + i));
    }
    w.run_until("the interface is flushed", |w| {
        matches!(w.nodes[0].iface().flush(FlushMode::Local, None), Ok(Posted::Done))
    });
    drop((ep, other));
    w.nodes[0].iface = None;
    w.run_until("all arrive", |w| w.nodes[1].inbox.lock().len() == 40);
    w.finish();
}

/// Sends zero-copy messages that have not completed.
fn zcopies<F: Hooks>(w: &mut World<F>, ep: &dyn Endpoint, iov: &[MemSlice]) -> Ledger {
    let ledger = Ledger::new();
    for _ in 0..5 {
        let comp = ledger.completion();
        let _posted = w.send(|| ep.am_zcopy(ID, b"h", iov, Some(&comp)));
    }
    ledger
}

fn am_zcopy_flush_ep_no_comp<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w);
    let iov = slices(&w);
    let ledger = zcopies(&mut w, &*ep, &iov);
    poll_ep(&mut w, &*ep);
    // A completion is called by the progress that found out; a flush that is done says that this has happened.
    assert_eq!(ledger.all(), [Ok(()); 5]);
    drop((ep, iov));
    w.finish();
}

fn am_zcopy_flush_iface_no_comp<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w);
    let iov = slices(&w);
    let ledger = zcopies(&mut w, &*ep, &iov);
    w.settle();
    assert_eq!(ledger.all(), [Ok(()); 5]);
    drop((ep, iov));
    w.finish();
}

fn am_flush_ep_nb<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w);
    let ledger = Ledger::new();
    for i in 0..20 {
        w.send(|| ep.am_bcopy(ID, &mut |_| 100 + i));
    }
    if flush(&mut w, &*ep, &ledger) == Posted::InProgress {
        assert_eq!(ledger.fired(), 0, "nothing fires inside the call");
    }
    w.run_until("the flush completes", |_| ledger.open() == 0);
    assert_eq!(w.nodes[1].inbox.lock().len(), 20, "delivered before");
    assert_eq!(ledger.all(), [Ok(())]);
    drop(ep);
    w.finish();
}

fn am_zcopy_flush_ep_nb<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w);
    let (ledger, iov) = (Ledger::new(), slices(&w));
    for _ in 0..5 {
        let comp = ledger.completion();
        let _posted = w.send(|| ep.am_zcopy(ID, b"h", &iov, Some(&comp)));
    }
    assert_eq!(flush(&mut w, &*ep, &ledger), Posted::InProgress);
    w.run_until("the flush completes", |_| ledger.open() == 0);
    assert_eq!(ledger.order(), [0, 1, 2, 3, 4, 5]);
    drop((ep, iov));
    w.finish();
}

fn am_zcopy_flush_iface<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w);
    let other = w.nodes[0].connect(&w.nodes[1]);
    w.send(|| other.am_short(ID, 0, b""));
    w.settle();
    let (zcopies, flushes, iov) = (Ledger::new(), Ledger::new(), slices(&w));
    w.nodes[1].motion = Motion::Stopped;
    for e in [&ep, &other] {
        let comp = zcopies.completion();
        assert!(matches!(e.am_zcopy(ID, b"h", &iov, Some(&comp)), Ok(Posted::InProgress)));
    }
    let comp = flushes.completion();
    assert!(matches!(w.nodes[0].iface().flush(FlushMode::Local, Some(&comp)), Ok(Posted::InProgress)));
    drop(comp);
    for _ in 0..20 {
        w.step();
    }
    assert_eq!(flushes.fired(), 0);
    w.nodes[1].motion = Motion::User;
    w.run_until("it completes", |_| flushes.open() == 0);
    assert_eq!(zcopies.all(), [Ok(()), Ok(())], "the zero-copies are done by then");
    assert_eq!(flushes.all(), [Ok(())]);
    drop((ep, other, iov));
    w.finish();
}

fn am_pending_flush_nb<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w);
    w.nodes[1].motion = Motion::Stopped;
    let mut n = 0;
    fill(&*ep, ID, &mut n);
    for i in 0..10 {
        let r = ep.pending_add(Box::new(move |ep| match ep.am_short(ID, n + i, b"") {
            Ok(()) => PendingStatus::Done,
            Err(_) => PendingStatus::NoResource,
        }));
        assert!(r.is_ok());
    }
    let ledger = Ledger::new();
    let mut comp = Some(ledger.completion());
    assert!(matches!(ep.flush(FlushMode::Local, comp.as_ref()), Err(SendError::NoResource)));
    // By way of the queue it is in order with what is queued.
    let r = ep.pending_add(Box::new(move |ep| match ep.flush(FlushMode::Local, comp.as_ref()) {
        Ok(_) => {
            comp = None;
            PendingStatus::Done
        }
        Err(_) => PendingStatus::NoResource,
    }));
    assert!(r.is_ok());
    // The interface does not pass over them either.
    let iface = Ledger::new();
    assert!(matches!(
        w.nodes[0].iface().flush(FlushMode::Local, Some(&iface.completion())),
        Err(SendError::NoResource)
    ));
    w.nodes[1].motion = Motion::User;
    w.run_until("the flush completes", |_| ledger.open() == 0);
    assert_eq!(w.nodes[1].inbox.lock().len() as u64, n + 10);
    drop(ep);
    w.finish();
}

fn flushes_complete_in_order<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w);
    let ledger = Ledger::new();
    w.nodes[1].motion = Motion::Stopped;
    for i in 0..3 {
        w.send(|| ep.am_short(ID, i, b""));
        // Two without a message in between.
        for _ in 0..2 {
            assert_eq!(flush(&mut w, &*ep, &ledger), Posted::InProgress);
        }
        if i > 0 {
            w.nodes[1].motion = Motion::User;
        }
    }
    w.run_until("all complete", |_| ledger.open() == 0);
    assert_eq!(ledger.order(), [0, 1, 2, 3, 4, 5]);
    drop(ep);
    w.finish();
}

fn flush_of_nothing_leaves_the_completion_alone<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w);
    let ledger = Ledger::new();
    let comp = ledger.completion();
    w.run_until("all is acknowledged", |_| matches!(ep.flush(FlushMode::Local, None), Ok(Posted::Done)));
    assert!(matches!(ep.flush(FlushMode::Local, Some(&comp)), Ok(Posted::Done)));
    let idle = w.nodes[0].iface().ep(&EpParams::unconnected()).unwrap();
    assert!(matches!(idle.flush(FlushMode::Local, Some(&comp)), Ok(Posted::Done)));
    w.settle();
    assert!(matches!(w.nodes[0].iface().flush(FlushMode::Local, Some(&comp)), Ok(Posted::Done)));
    assert_eq!(ledger.fired(), 0);
    drop(comp);
    assert_eq!(ledger.all(), [Ok(())], "no operation: it fires when its handle is dropped");
    assert!(ep.fence().is_ok() && w.nodes[0].iface().fence().is_ok());
    drop((ep, idle));
    w.finish();
}

fn creq_flush<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(2);
    w.nodes[1].motion = Motion::Stopped;
    let ep = w.nodes[0].connect(&w.nodes[1]);
    let ledger = Ledger::new();
    for _ in 0..10 {
        w.step();
        assert_eq!(flush(&mut w, &*ep, &ledger), Posted::InProgress, "the handshake is under way");
        let r = w.nodes[0].iface().flush(FlushMode::Local, None);
        assert!(matches!(r, Ok(Posted::InProgress)), "{r:?}");
    }
    assert_eq!(ledger.fired(), 0);
    w.nodes[1].motion = Motion::User;
    w.run_until("all complete", |_| ledger.open() == 0);
    assert_eq!(ledger.order(), (0..10).collect::<Vec<_>>());
    assert!(ledger.all().iter().all(|r| r.is_ok()));
    drop(ep);
    w.finish();
}

fn flush_from_a_flush_completion<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w);
    let ep = Arc::new(ep);
    let depth = Arc::new(AtomicUsize::new(0));

    fn again(ep: &Arc<Ep>, depth: &Arc<AtomicUsize>) {
        if depth.fetch_add(1, Ordering::Relaxed) == 20 {
            return;
        }
        let (e, d) = (ep.clone(), depth.clone());
        // Also if there was nothing to wait for: then it runs when the handle is dropped.
        let comp = Completion::new(move |r| {
            assert_eq!(r, Ok(()));
            again(&e, &d);
        });
        let _ = ep.am_short(ID, 7, b"");
        let _posted = ep.flush(FlushMode::Local, Some(&comp)).unwrap();
    }
    again(&ep, &depth);
    w.run_until("twenty levels", |_| depth.load(Ordering::Relaxed) == 21);
    w.all_home();
    drop(ep);
    w.finish();
}

fn iface_flush_waits_for_destroyed_endpoints<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w);
    w.nodes[1].motion = Motion::Stopped;
    for i in 0..2 {
        ep.am_short(ID, i, b"").unwrap();
    }
    drop(ep);
    let ledger = Ledger::new();
    let comp = ledger.completion();
    assert!(matches!(w.nodes[0].iface().flush(FlushMode::Local, Some(&comp)), Ok(Posted::InProgress)));
    drop(comp);
    for _ in 0..10 {
        w.step();
    }
    assert_eq!(ledger.fired(), 0);
    w.nodes[1].motion = Motion::User;
    w.run_until("it completes", |_| ledger.open() == 0);
    assert_eq!(ledger.all(), [Ok(())]);
    assert_eq!(w.nodes[1].inbox.lock().len(), 2);
    w.finish();
}

fn remote_flush_is_refused<F: Hooks>(w: World<F>) {
    let (w, ep) = pair(w);
    for r in [ep.flush(FlushMode::Remote, None), w.nodes[0].iface().flush(FlushMode::Remote, None)] {
        assert!(matches!(r, Err(SendError::Failed(e)) if e.kind() == ErrorKind::Unsupported));
    }
    drop(ep);
    w.finish();
}

fn counted_completion_of_many_operations<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w);
    let others: Vec<Ep> = (0..3).map(|_| w.nodes[0].connect(&w.nodes[1])).collect();
    let (ledger, iov) = (Ledger::new(), slices(&w));
    let comp = ledger.completion();
    let mut posted = 0;
    for i in 0..400 {
        let e = if i % 4 == 0 { &ep } else { &others[i % 4 - 1] };
        match w.send(|| e.am_zcopy(ID, b"", &iov, Some(&comp))) {
            Posted::InProgress => posted += 1,
            Posted::Done => {}
        }
    }
    let _posted = w.send(|| ep.flush(FlushMode::Local, Some(&comp)));
    let _posted = w.send(|| ep.check(Some(&comp)));
    w.settle();
    assert_eq!(ledger.fired(), 0, "more may be added while its handle lives");
    drop(comp);
    w.run_until("it fires", |_| ledger.fired() == 1);
    assert_eq!(ledger.all(), [Ok(())]);
    assert_eq!(posted, 400);
    w.all_home();
    drop((ep, others, iov));
    w.finish();
}

fn cancel_settles_at_once_and_refuses_the_rest<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w);
    w.nodes[1].motion = Motion::Stopped;
    let (ledger, iov) = (Ledger::new(), slices(&w));
    let sent = fill_zcopy(&*ep, ID, &iov, &ledger);
    assert!(sent > 0);
    assert_eq!(flush(&mut w, &*ep, &ledger), Posted::InProgress);
    assert!(matches!(ep.flush(FlushMode::Cancel, None), Ok(Posted::Done)));
    let all = ledger.all();
    assert_eq!(all.iter().filter(|r| **r == Err(ErrorKind::Canceled)).count(), sent + 1, "{all:?}");
    let canceled = |e: SendError| matches!(e, SendError::Failed(e) if e.kind() == ErrorKind::Canceled);
    let comp = ledger.completion();
    assert!(canceled(ep.am_short(ID, 0, b"").unwrap_err()));
    assert!(canceled(ep.am_bcopy(ID, &mut |_| panic!("packed")).unwrap_err()));
    assert!(canceled(ep.am_zcopy(ID, b"", &iov, Some(&comp)).unwrap_err()));
    assert!(canceled(ep.flush(FlushMode::Local, Some(&comp)).unwrap_err()));
    assert!(canceled(ep.check(Some(&comp)).unwrap_err()));
    drop(comp);
    assert!(matches!(ep.flush(FlushMode::Cancel, None), Ok(Posted::Done)), "twice is once");
    w.nodes[1].motion = Motion::User;
    w.settle();
    assert!(w.nodes[0].failures.lock().is_empty(), "nobody failed");
    w.all_home();
    // A new endpoint to the same peer works.
    let new = w.nodes[0].connect(&w.nodes[1]);
    w.send(|| new.am_short(AmId::truncate(2), 0, b""));
    w.run_until("it arrives", |w| w.nodes[1].inbox.lock().iter().any(|m| m.id == 2));
    drop((ep, new, iov));
    w.finish();
}

fn cancel_then_destroy<F: Hooks>(w: World<F>) {
    let (mut w, mut ep) = pair(w);
    let (ledger, iov) = (Ledger::new(), slices(&w));
    for _ in 0..20 {
        fill_zcopy(&*ep, ID, &iov, &ledger);
        assert!(matches!(ep.flush(FlushMode::Cancel, None), Ok(Posted::Done)));
        assert_eq!(ledger.open(), 0);
        drop(ep);
        ep = w.nodes[0].connect(&w.nodes[1]);
        w.send(|| ep.am_short(ID, 0, b""));
    }
    w.all_home();
    assert!(w.nodes[0].failures.lock().is_empty());
    drop((ep, iov));
    w.finish();
}

fn cancel_the_interface<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w);
    let other = w.nodes[0].connect(&w.nodes[1]);
    let (ledger, iov) = (Ledger::new(), slices(&w));
    let comp = ledger.completion();
    assert!(matches!(ep.am_zcopy(ID, b"", &iov, Some(&comp)), Ok(Posted::InProgress)));
    drop(comp);
    assert_eq!(flush(&mut w, &*other, &ledger), Posted::InProgress);
    assert!(matches!(w.nodes[0].iface().flush(FlushMode::Cancel, None), Ok(Posted::Done)));
    assert_eq!(ledger.all(), [Err(ErrorKind::Canceled); 2]);
    assert!(matches!(ep.am_short(ID, 0, b""), Err(SendError::Failed(_))));
    w.settle();
    drop((ep, other, iov));
    w.finish();
}

fn close_without_outstanding_data<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w);
    w.run_until("all is acknowledged", |_| matches!(ep.flush(FlushMode::Local, None), Ok(Posted::Done)));
    let ledger = Ledger::new();
    ep.close(Some(ledger.completion()));
    w.run_until("it completes", |_| ledger.open() == 0);
    assert_eq!(ledger.all(), [Ok(())]);
    let ep = w.nodes[0].connect(&w.nodes[1]);
    ep.close(None);
    w.finish();
}

fn close_with_outstanding_data<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w);
    w.nodes[1].motion = Motion::Stopped;
    let (ledger, iov) = (Ledger::new(), slices(&w));
    let sent = fill_zcopy(&*ep, ID, &iov, &ledger);
    let closed = Ledger::new();
    ep.close(Some(closed.completion()));
    for _ in 0..10 {
        w.step();
    }
    assert_eq!(closed.fired(), 0, "the peer has nothing yet");
    w.nodes[1].motion = Motion::User;
    w.run_until("it completes", |_| closed.open() == 0);
    assert_eq!(closed.all(), [Ok(())]);
    assert!(ledger.all().iter().all(|r| r.is_ok()), "flushed, not given up");
    assert_eq!(w.nodes[1].inbox.lock().len(), sent);
    w.all_home();
    drop(iov);
    w.finish();
}

fn close_of_what_never_connected<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(2);
    let ledger = Ledger::new();
    w.nodes[0].iface().ep(&EpParams::unconnected()).unwrap().close(Some(ledger.completion()));
    assert_eq!(ledger.all(), [Ok(())], "nothing was accepted");
    // While the handshake is under way.
    w.nodes[0].connect(&w.nodes[1]).close(Some(ledger.completion()));
    let ep = w.nodes[0].connect(&w.nodes[1]);
    w.step();
    ep.close(Some(ledger.completion()));
    w.run_until("both complete", |_| ledger.open() == 0);
    assert_eq!(ledger.all(), [Ok(()); 3]);
    w.finish();
}

fn close_in_callbacks<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w);
    let ledger = Ledger::new();
    // The other end of the endpoint that closes first. The later ones are connections of their own.
    let claimed = w.nodes[1].connect(&w.nodes[0]);
    // In a completion of its own.
    let slot = Arc::new(Mutex::new(None));
    let (s, l) = (slot.clone(), ledger.clone());
    let comp = Completion::new(move |r| {
        assert_eq!(r, Ok(()));
        let ep: Option<Ep> = s.lock().take();
        ep.expect("an endpoint").close(Some(l.completion()));
    });
    w.send(|| ep.am_short(ID, 1, b""));
    assert!(matches!(ep.flush(FlushMode::Local, Some(&comp)), Ok(Posted::InProgress)));
    *slot.lock() = Some(ep);
    drop(comp);
    w.run_until("it closed itself", |_| slot.lock().is_none() && ledger.open() == 0);
    assert_eq!(ledger.all(), [Ok(())]);
    // In a handler, of an endpoint with data under way; and in a completion of its close another one.
    let (a, b) = (w.nodes[1].connect(&w.nodes[0]), w.nodes[1].connect(&w.nodes[0]));
    for e in [&a, &b] {
        w.send(|| e.am_short(ID, 3, b""));
    }
    let (s, l) = (Arc::new(Mutex::new(Some((a, b)))), ledger.clone());
    let ss = s.clone();
    w.nodes[1]
        .iface()
        .on_am(AmId::truncate(7), move |_| {
            let Some((a, b)) = ss.lock().take() else { return };
            let inner = l.completion();
            a.close(Some(Completion::new(move |r| {
                assert_eq!(r, Ok(()));
                b.close(Some(inner));
            })));
        })
        .unwrap();
    let ep = w.nodes[0].connect(&w.nodes[1]);
    w.send(|| ep.am_short(AmId::truncate(7), 0, b""));
    w.run_until("both closed", |_| s.lock().is_none() && ledger.open() == 0);
    assert_eq!(ledger.all(), [Ok(()); 2]);
    w.all_home();
    drop((ep, claimed));
    w.finish();
}

fn close_after_the_interface<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w);
    let ledger = Ledger::new();
    ep.am_short(ID, 1, b"").unwrap();
    let waiting = w.nodes[0].connect(&w.nodes[1]);
    waiting.close(Some(ledger.completion()));
    w.nodes[0].iface = None;
    assert_eq!(ledger.all(), [Err(ErrorKind::Canceled)], "closing settles what closes");
    ep.close(Some(ledger.completion()));
    assert_eq!(ledger.result(1), Some(Err(ErrorKind::Closed)), "not Ok: nobody knows");
    w.finish();
}

fn close_to_a_dead_peer<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w);
    w.nodes[1].motion = Motion::Stopped;
    ep.am_short(ID, 1, b"").unwrap();
    ep.invalidate().unwrap();
    let ledger = Ledger::new();
    ep.close(Some(ledger.completion()));
    w.run_until("it completes", |_| ledger.open() == 0);
    assert_eq!(ledger.all(), [Err(ErrorKind::EndpointTimeout)], "with the error that prevented it");
    for _ in 0..20 {
        w.step();
    }
    assert!(w.nodes[0].failures.lock().is_empty(), "reported after it was closed");
    w.finish();
}

fn destroy_entity_after_send<F: Hooks>(w: World<F>) {
    for peer in [Motion::Stopped, Motion::User] {
        let mut w = World::<F>::new("destroy_entity_after_send").nodes(2);
        let ep = w.nodes[0].connect(&w.nodes[1]);
        w.send(|| ep.am_short(ID, 0, b""));
        w.settle();
        w.nodes[1].motion = peer;
        let ledger = Ledger::new();
        let mut r = region(&*w.nodes[0].md, b"zero-copy");
        let iov = vec![r.slice(0..9).unwrap()];
        let mut sent = 0;
        for _ in 0..3 {
            let comp = ledger.completion();
            sent += usize::from(ep.am_zcopy(ID, b"", &iov, Some(&comp)).is_ok());
        }
        let _posted = flush(&mut w, &*ep, &ledger);
        drop(iov);
        drop(ep);
        assert_eq!(ledger.open(), 0, "destroy settles before it returns");
        // User memory is not read any more, and what was accepted arrives all the same.
        w.run_until("the memory is back", |_| r.bytes_mut().is_some());
        r.bytes_mut().unwrap().fill(b'!');
        w.nodes[1].motion = Motion::User;
        w.run_until("all arrive", |w| w.nodes[1].inbox.lock().len() == 1 + sent);
        assert!(w.nodes[1].take()[1..].iter().all(|m| m.data == b"zero-copy"));
        w.all_home();
        drop(r);
        w.finish();
    }
    w.finish();
}

/// The progress thread has taken the acks of both endpoints, so that completions of both wait for the user when the first is
/// destroyed: each is settled with its own endpoint, and none is lost.
fn destroying_two_endpoints_loses_no_completion<F: Hooks>(w: World<F>) {
    let (mut w, a) = pair(w);
    let b = w.nodes[0].connect(&w.nodes[1]);
    w.send(|| b.am_short(ID, 0, b""));
    w.settle();
    let iov = slices(&w);
    for acknowledged in [true, false] {
        let (of_a, of_b) = (Ledger::new(), Ledger::new());
        let victim = w.nodes[0].connect(&w.nodes[1]);
        w.send(|| victim.am_short(ID, 0, b""));
        w.settle();
        w.nodes[1].motion = if acknowledged { Motion::User } else { Motion::Stopped };
        for (ep, ledger) in [(&victim, &of_a), (&b, &of_b)] {
            let comp = ledger.completion();
            let _posted = ep.am_zcopy(ID, b"", &iov, Some(&comp)).unwrap();
            drop(comp);
            let comp = ledger.completion();
            assert_eq!(ep.flush(FlushMode::Local, Some(&comp)).unwrap(), Posted::InProgress);
        }
        w.nodes[0].motion = Motion::Stopped;
        for _ in 0..50 {
            w.step();
            w.nodes[0].iface().progress_async();
        }
        assert_eq!((of_a.fired(), of_b.fired()), (0, 0), "completions are for the user's thread");
        drop(victim);
        assert_eq!(of_a.open(), 0, "settled when destroy returns");
        let settled = of_a.all();
        w.nodes[0].motion = Motion::User;
        w.nodes[1].motion = Motion::User;
        w.run_until("the other's complete", |_| of_b.open() == 0);
        assert_eq!(of_b.all(), [Ok(()), Ok(())]);
        assert_eq!(of_a.all(), settled);
        w.settle();
    }
    drop((a, b, iov));
    w.finish();
}

fn disconnect_after_send<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(2);
    let (ledger, iov) = (Ledger::new(), slices(&w));
    let mut sent = 0;
    for _ in 0..100 {
        let ep = w.nodes[0].connect(&w.nodes[1]);
        w.send(|| ep.am_short(ID, 0, b""));
        sent += 1;
        sent += fill_zcopy(&*ep, ID, &iov, &ledger);
        drop(ep);
        assert_eq!(ledger.open(), 0);
        w.step();
    }
    w.run_until("all arrive", |w| w.nodes[1].inbox.lock().len() == sent);
    w.all_home();
    drop(iov);
    w.finish();
}

fn interface_close_settles_everything<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w);
    let unconnected = w.nodes[0].iface().ep(&EpParams::unconnected()).unwrap();
    let connecting = w.nodes[0].connect(&w.nodes[1]);
    let (ledger, iov) = (Ledger::new(), slices(&w));
    let comp = ledger.completion();
    let _posted = ep.am_zcopy(ID, b"", &iov, Some(&comp)).unwrap();
    let _posted = ep.check(Some(&comp)).unwrap();
    drop(comp);
    let _posted = flush(&mut w, &*connecting, &ledger);
    let comp = ledger.completion();
    let _posted = w.nodes[0].iface().flush(FlushMode::Local, Some(&comp)).unwrap();
    drop(comp);
    let alive = Arc::new(());
    let held = alive.clone();
    let r = connecting.pending_add(Box::new(move |_| {
        let _held = &held;
        panic!("called")
    }));
    assert!(r.is_ok());
    w.nodes[0].iface = None;
    assert_eq!(ledger.all(), [Err(ErrorKind::Canceled); 3]);
    assert_eq!(Arc::strong_count(&alive), 1, "requests are let go");
    for e in [&ep, &unconnected, &connecting] {
        assert!(matches!(e.am_short(ID, 0, b""), Err(SendError::Failed(e)) if e.kind() == ErrorKind::Closed));
        assert!(matches!(e.flush(FlushMode::Local, None), Err(SendError::Failed(e)) if e.kind() == ErrorKind::Closed));
        assert!(e.address().is_err() && e.connect(b"", b"").is_err() && e.invalidate().is_err());
        assert!(matches!(
            e.pending_add(Box::new(|_| PendingStatus::Done)),
            Err(PendingRefused::Failed(_, e)) if e.kind() == ErrorKind::Closed
        ));
        assert!(e.pending_purge().is_empty());
    }
    assert!(w.nodes[0].failures.lock().is_empty());
    drop((ep, unconnected, connecting, iov));
    w.finish();
}

fn invalidate_settles_then_reports<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w);
    w.nodes[1].motion = Motion::Stopped;
    let (ledger, iov) = (Ledger::new(), slices(&w));
    let comp = ledger.completion();
    let _posted = ep.am_zcopy(ID, b"", &iov, Some(&comp)).unwrap();
    drop(comp);
    ep.invalidate().unwrap();
    assert_eq!(ledger.fired(), 0, "nothing of the user's inside the call");
    w.run_until("the failure is told", |w| !w.nodes[0].failures.lock().is_empty());
    assert_eq!(ledger.all(), [Err(ErrorKind::EndpointTimeout)]);
    for _ in 0..10 {
        w.step();
        ep.invalidate().unwrap();
    }
    let failures = w.nodes[0].failures.lock().clone();
    assert_eq!(failures.len(), 1, "told once");
    assert_eq!((failures[0].ep_id, failures[0].kind), (ep.id(), ErrorKind::EndpointTimeout));
    drop((ep, iov));
    w.finish();
}

fn ep_check_comps<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(2);
    let idle = w.nodes[0].iface().ep(&EpParams::unconnected()).unwrap();
    assert!(matches!(idle.check(None), Err(SendError::Failed(e)) if e.kind() == ErrorKind::NotConnected));
    let ep = w.nodes[0].connect(&w.nodes[1]);
    let ledger = Ledger::new();
    // During the handshake, idle, and busy.
    for round in 0..3 {
        let comp = ledger.completion();
        let _posted = ep.check(Some(&comp)).unwrap();
        assert!(ep.check(None).is_ok());
        drop(comp);
        w.run_until("it is answered", |_| ledger.open() == 0);
        if round == 1 {
            w.send(|| ep.am_short(ID, 0, b""));
        }
    }
    assert_eq!(ledger.all(), [Ok(()); 3]);
    w.all_home();
    drop((ep, idle));
    w.finish();
}

fn a_panicking_completion_spoils_no_other<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w);
    let (ledger, iov) = (Ledger::new(), slices(&w));
    w.nodes[1].motion = Motion::Stopped;
    let bad = Completion::new(|_| panic!("a completion that panics"));
    let _posted = ep.am_zcopy(ID, b"", &iov, Some(&bad)).unwrap();
    drop(bad);
    let mut n = 0;
    loop {
        let comp = ledger.completion();
        if ep.flush(FlushMode::Local, Some(&comp)).is_err() || n == 5 {
            break;
        }
        n += 1;
    }
    w.nodes[1].motion = Motion::User;
    let mut panics = 0;
    let end = w.now() + w.fabric.patience();
    while ledger.open() > 0 && w.now() < end {
        let step = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| w.step()));
        panics += usize::from(step.is_err());
    }
    assert_eq!(panics, 1);
    assert!(ledger.all().iter().all(|r| *r == Ok(())), "{:?}", ledger.all());
    w.all_home();
    drop((ep, iov));
    w.finish();
}

/// Random operations on several endpoints that come and go, with loss; every completion is settled once.
fn every_accepted_operation_is_settled_once<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(2);
    for n in &w.nodes {
        F::set_loss(&n.device, w.seed, 20_000);
    }
    let (ledger, iov) = (Ledger::new(), slices(&w));
    let mut rng = ib::sw::Rng::new(w.seed);
    let mut eps: Vec<Ep> = Vec::new();
    let mut want = 0;
    for _ in 0..3000 {
        if eps.len() < 4 {
            eps.push(w.nodes[0].connect(&w.nodes[1]));
        }
        let i = rng.below(eps.len() as u64) as usize;
        let comp = ledger.completion();
        let ok = match rng.below(40) {
            0 => {
                drop(eps.swap_remove(i));
                false
            }
            1 => {
                eps.swap_remove(i).close(Some(comp));
                false
            }
            2..6 => {
                let _ = eps[i].flush(FlushMode::Local, Some(&comp));
                false
            }
            6..8 => {
                let _ = eps[i].check(Some(&comp));
                false
            }
            8 => {
                let _ = w.nodes[0].iface().flush(FlushMode::Local, Some(&comp));
                false
            }
            9..20 => {
                w.step();
                false
            }
            20..30 => eps[i].am_short(ID, 0, b"").is_ok(),
            _ => eps[i].am_zcopy(ID, b"", &iov, Some(&comp)).is_ok(),
        };
        want += usize::from(ok);
    }
    w.run_until("all is settled", |_| ledger.open() == 0);
    w.run_until("all that was accepted arrives", |w| w.nodes[1].inbox.lock().len() == want);
    w.all_home();
    assert!(ledger.all().iter().all(|r| matches!(r, Ok(()) | Err(ErrorKind::Canceled))));
    drop((eps, iov));
    w.finish();
}
