//! Peers that die, fall silent, never answer, restart; and what is left of an endpoint afterwards.
//!
//! A killed peer is one that nobody moves and whose packets all vanish; real processes are killed in `process.rs`.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use ib::sw::{Filter, FilterVerdict};
use parking_lot::Mutex;
use uct::{
    AmId, Completion, Endpoint, Ep, EpParams, ErrorKind, FailureAction, FlushMode, Interface, PendingStatus, Posted,
    SendError, ep::EpFailure, md::MemoryDomain,
};
use uct_tests::{
    fabric::{Fabric, Sim},
    hooks::Hooks,
    on_fabrics,
    world::{Motion, NodeOptions, World},
};

on_fabrics! { sim, soft;
    killed_peer_one_error_per_endpoint_and_one_completion_per_operation,
    error_texts_tell_three_kinds_apart,
    error_text_names_everything_an_operator_needs,
    whole_peer_fails_all_endpoints_of_one_peer,
    invalidate_completes_everything_once,
    invalidate_twice_reports_once,
    ep_check_on_idle_busy_connecting_and_dead_peers,
    failure_completes_flushes_and_returns_memory,
    iface_flush_over_a_dead_peer_ends,
    pending_requests_survive_a_failure_until_purged,
    error_handler_destroys_and_reconnects,
    destroy_before_the_report_silences_it,
    sends_after_failure_are_refused_with_the_same_error,
    stopped_process_does_not_blame_its_peers,
    close_of_a_failed_endpoint_reports_its_error,
    connecting_endpoint_fails_with_pending_requests,
    two_pairs_send,
    peer_failure_multiple,
    keepalive_killed,
    keepalive_killed_post_am,
    without_an_error_handler_the_next_call_tells,
}

mod virtual_time {
    use super::*;
    on_fabrics! { sim;
        computing_for_60_seconds_is_not_dying,
        a_process_that_never_progresses_is_declared_dead,
        restart_at_the_same_address_resets_old_endpoints,
        packets_of_the_old_life_are_dropped_and_counted,
        two_sided_failure_reports_on_both_sides,
        a_path_that_swallows_long_packets_is_told,
    }
}

const ID: AmId = AmId::truncate(3);

/// Peers are given up quickly.
fn quick() -> NodeOptions {
    let mut o = NodeOptions::default();
    o.ud.timeout = Duration::from_millis(400);
    o.ud.timer_tick = Duration::from_millis(5);
    o
}

fn quick_world<F: Fabric>(mut w: World<F>, n: usize) -> World<F> {
    for _ in 0..n {
        w.add(&quick());
    }
    w
}

fn drop_all() -> Option<Filter> {
    Some(Box::new(|_| FilterVerdict::Drop))
}

/// Power off.
fn kill<F: Hooks>(w: &mut World<F>, i: usize) {
    F::set_tx_filter(&w.nodes[i].device, drop_all());
    F::set_rx_filter(&w.nodes[i].device, drop_all());
    w.nodes[i].motion = Motion::Stopped;
}

/// An endpoint over which a message has been sent and acknowledged.
fn connected<F: Fabric>(w: &mut World<F>, from: usize, to: usize) -> Ep {
    let ep = w.nodes[from].connect(&w.nodes[to]);
    let before = w.nodes[to].inbox.lock().len();
    w.send(|| ep.am_short(ID, 0, b"hello"));
    w.run_until("the first message arrives", |w| w.nodes[to].inbox.lock().len() > before);
    w.settle();
    ep
}

fn failures<F: Fabric>(w: &World<F>, node: usize) -> usize {
    w.nodes[node].failures.lock().len()
}

#[track_caller]
fn await_failures<F: Fabric>(w: &mut World<F>, node: usize, n: usize) -> Vec<EpFailure> {
    w.run_until("the failures are reported", |w| failures(w, node) >= n);
    // And no more than that.
    w.run_for(Duration::from_millis(50));
    let got = w.nodes[node].failures.lock().clone();
    assert_eq!(got.len(), n, "{got:?}");
    got
}

fn failed_with(r: Result<(), SendError>) -> uct::Error {
    match r {
        Err(SendError::Failed(e)) => e,
        other => panic!("the send should have failed: {other:?}"),
    }
}

/// Counts completions by result.
#[derive(Clone, Default)]
struct Tally(Arc<Mutex<Vec<Result<(), ErrorKind>>>>);

impl Tally {
    fn one(&self) -> Completion {
        let t = self.0.clone();
        Completion::new(move |r| t.lock().push(r))
    }

    fn len(&self) -> usize {
        self.0.lock().len()
    }
}

fn killed_peer_one_error_per_endpoint_and_one_completion_per_operation<F: Hooks>(w: World<F>) {
    let mut w = quick_world(w, 4);
    let dead: Vec<Ep> = (0..3).map(|_| connected(&mut w, 0, 1)).collect();
    let alive = connected(&mut w, 0, 2);
    let region = w.nodes[0].md.mem_alloc(4096).expect("memory");
    kill(&mut w, 1);

    let tally = Tally::default();
    let mut accepted = 0;
    for ep in &dead {
        // More than any window: the rest is refused, which must leave no trace.
        for i in 0..40u64 {
            let comp = tally.one();
            match ep.am_zcopy(ID, &i.to_ne_bytes(), &[region.slice(0..1000).expect("a slice")], Some(&comp)) {
                Ok(Posted::InProgress) => accepted += 1,
                Err(SendError::NoResource) => {
                    // A refused operation leaves its completion to the caller.
                    drop(comp);
                    tally.0.lock().pop();
                    break;
                }
                other => panic!("{other:?}"),
            }
        }
        if let Ok(Posted::InProgress) = ep.flush(FlushMode::Local, Some(&tally.one())) {
            accepted += 1;
        }
    }
    assert!(accepted >= 6, "{accepted}");
    let got = await_failures(&mut w, 0, 3);
    let mut ids: Vec<u64> = got.iter().map(|f| f.ep_id).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 3, "one error per endpoint");
    assert!(got.iter().all(|f| f.kind == ErrorKind::EndpointTimeout));
    // Completions of accepted operations, and of flushes that were over at once (none: there was traffic).
    assert!(tally.0.lock().iter().filter(|r| **r == Err(ErrorKind::EndpointTimeout)).count() == accepted);

    // The process goes on: the old peer that lives, and a new one.
    let before = w.nodes[2].inbox.lock().len();
    w.send(|| alive.am_short(ID, 1, b"still"));
    w.run_until("the living peer hears us", |w| w.nodes[2].inbox.lock().len() > before);
    let new = connected(&mut w, 0, 3);
    drop((dead, alive, new));
    assert_eq!(failures(&w, 0), 3);
    drop(region);
}

fn error_texts_tell_three_kinds_apart<F: Hooks>(w: World<F>) {
    let mut w = quick_world(w, 3);
    // Unreachable: known at once, from the address alone.
    let infiniband = [0x00, 0x34, 0x12];
    let e = w.nodes[0].iface().ep(&EpParams::to_iface(&infiniband, &[1, 2, 3])).expect_err("another kind of network");
    assert_eq!(e.kind(), ErrorKind::Unreachable);
    assert!(e.to_string().contains("InfiniBand"), "{e}");

    // Never answered: the address is good and nobody is there.
    kill(&mut w, 1);
    let silent = w.nodes[0].connect(&w.nodes[1]);
    let never = await_failures(&mut w, 0, 1).remove(0);
    assert_eq!(never.kind, ErrorKind::NeverAnswered);

    // Connected, then silent.
    let ep = connected(&mut w, 0, 2);
    kill(&mut w, 2);
    w.send(|| ep.am_short(ID, 0, b"anybody?"));
    let timeout = await_failures(&mut w, 0, 2).remove(1);
    assert_eq!(timeout.kind, ErrorKind::EndpointTimeout);

    let texts = [e.to_string(), never.error.to_string(), timeout.error.to_string()];
    assert!(texts[1].contains("no packet came back") && texts[1].contains("firewall"), "{}", texts[1]);
    assert!(texts[2].contains("was connected, then silent"), "{}", texts[2]);
    drop(silent);
}

fn error_text_names_everything_an_operator_needs<F: Hooks>(w: World<F>) {
    let mut w = quick_world(w, 2);
    let ep = connected(&mut w, 0, 1);
    let back = connected(&mut w, 1, 0);
    let gid = |w: &World<F>, i: usize| {
        let dev = w.nodes[i].iface().device_address();
        ib::addr::DeviceAddr::parse(&dev).expect("an address").0.gid().expect("a gid").to_string()
    };
    let (here, there) = (gid(&w, 0), gid(&w, 1));
    let qpn = ib::addr::IfaceAddr::parse(&w.nodes[1].iface().iface_address()).expect("an address").qpn.to_string();
    kill(&mut w, 1);
    w.send(|| ep.am_short(ID, 0, b"anybody?"));
    let text = await_failures(&mut w, 0, 1)[0].error.to_string();
    let ids = [format!("ep {:#x}", ep.id()), format!("ep {:#x}", back.id())];
    let device = w.nodes[0].iface().attr().device.clone();
    for part in [&device, &here, &there, &qpn, &ids[0], &ids[1], "UCX_UD_TIMEOUT=0.4s", "resends", "psn acked", "sent"]
        .map(|s: &str| s.to_string())
    {
        assert!(text.contains(&part), "`{part}` is missing in: {text}");
    }
    // The two endpoints are one connection, so the peer's id is that of its own endpoint.
    assert!(!text.contains(" 0 resends"), "{text}");
}

fn whole_peer_fails_all_endpoints_of_one_peer<F: Hooks>(mut w: World<F>) {
    let seen: Arc<Mutex<Vec<EpFailure>>> = Arc::default();
    let mut o = quick();
    let s = seen.clone();
    o.params.error_handler = Some(Arc::new(move |f| {
        s.lock().push(f.clone());
        FailureAction::WholePeer
    }));
    w.add(&o);
    w.add(&quick());
    w.add(&quick());
    let eps: Vec<Ep> = (0..4).map(|_| connected(&mut w, 0, 1)).collect();
    let other = connected(&mut w, 0, 2);
    kill(&mut w, 1);
    // Only one of them notices by itself.
    w.send(|| eps[2].am_short(ID, 0, b"anybody?"));
    let all = seen.clone();
    w.run_until("all four are reported", |_| all.lock().len() >= 4);
    w.run_for(Duration::from_millis(50));
    let got = seen.lock().clone();
    assert_eq!(got.len(), 4, "{got:?}");
    assert_eq!(got[0].ep_id, eps[2].id());
    for ep in &eps {
        let _ = failed_with(ep.am_short(ID, 0, b"x"));
    }
    w.send(|| other.am_short(ID, 0, b"x"));
    w.run_until("the other peer is unharmed", |w| w.nodes[2].inbox.lock().len() == 2);
}

fn invalidate_completes_everything_once<F: Hooks>(w: World<F>) {
    let mut w = quick_world(w, 2);
    let ep = connected(&mut w, 0, 1);
    // What is on its way stays there: nothing is acknowledged.
    w.nodes[1].motion = Motion::Stopped;
    let region = w.nodes[0].md.mem_alloc(64).expect("memory");
    let tally = Tally::default();
    let comp = tally.one();
    let posted = ep.am_zcopy(ID, b"", &[region.slice(0..64).expect("a slice")], Some(&comp));
    assert_eq!(posted.expect("a send"), Posted::InProgress);
    drop(comp);
    let flush = tally.one();
    assert_eq!(ep.flush(FlushMode::Local, Some(&flush)).expect("a flush"), Posted::InProgress);
    drop(flush);
    ep.invalidate().expect("invalidate");
    let got = await_failures(&mut w, 0, 1);
    assert_eq!((got[0].ep_id, got[0].kind), (ep.id(), ErrorKind::EndpointTimeout));
    assert_eq!(*tally.0.lock(), [Err(ErrorKind::EndpointTimeout); 2]);
}

fn invalidate_twice_reports_once<F: Hooks>(w: World<F>) {
    let mut w = quick_world(w, 2);
    let ep = connected(&mut w, 0, 1);
    ep.invalidate().expect("invalidate");
    ep.invalidate().expect("invalidate");
    await_failures(&mut w, 0, 1);
    ep.invalidate().expect("invalidate");
    await_failures(&mut w, 0, 1);
}

fn ep_check_on_idle_busy_connecting_and_dead_peers<F: Hooks>(w: World<F>) {
    let mut w = quick_world(w, 3);
    // Connecting: accepted, and over when the peer has answered.
    let ep = w.nodes[0].connect(&w.nodes[1]);
    let tally = Tally::default();
    match ep.check(Some(&tally.one())) {
        Ok(Posted::InProgress) => {}
        other => panic!("check of a connecting endpoint: {other:?}"),
    }
    w.run_until("the check ends", |_| tally.len() == 1);
    assert_eq!(tally.0.lock()[0], Ok(()));

    // Idle: an empty packet goes out, and nothing reaches a handler.
    w.settle();
    let probes = w.nodes[0].counter("tx.probes");
    let c = tally.one();
    assert_eq!(ep.check(Some(&c)).expect("a check"), Posted::InProgress);
    drop(c);
    w.run_until("the probe is answered", |_| tally.len() == 2);
    assert_eq!(w.nodes[0].counter("tx.probes"), probes + 1);
    assert!(w.nodes[1].inbox.lock().is_empty());

    // Busy: what is on its way is check enough.
    w.nodes[1].motion = Motion::Stopped;
    w.send(|| ep.am_short(ID, 0, b"x"));
    let c = tally.one();
    assert_eq!(ep.check(Some(&c)).expect("a check"), Posted::InProgress);
    drop(c);
    assert_eq!(w.nodes[0].counter("tx.probes"), probes + 1);
    w.nodes[1].motion = Motion::User;
    w.run_until("the check ends with the message", |_| tally.len() == 3);
    assert!(tally.0.lock().iter().all(Result::is_ok));

    // Dead: the check is what finds out.
    w.settle();
    kill(&mut w, 1);
    let c = tally.one();
    assert_eq!(ep.check(Some(&c)).expect("a check"), Posted::InProgress);
    drop(c);
    await_failures(&mut w, 0, 1);
    assert_eq!(tally.0.lock()[3], Err(ErrorKind::EndpointTimeout));
    match ep.check(None) {
        Err(SendError::Failed(e)) => assert_eq!(e.kind(), ErrorKind::EndpointTimeout),
        other => panic!("check of a failed endpoint: {other:?}"),
    }

    // Without a completion it works as well.
    let ep = connected(&mut w, 0, 2);
    kill(&mut w, 2);
    assert_eq!(ep.check(None).expect("a check"), Posted::InProgress);
    await_failures(&mut w, 0, 2);
}

fn failure_completes_flushes_and_returns_memory<F: Hooks>(w: World<F>) {
    let mut w = quick_world(w, 2);
    let ep = connected(&mut w, 0, 1);
    kill(&mut w, 1);
    let mut region = w.nodes[0].md.mem_alloc(4096).expect("memory");
    let tally = Tally::default();
    {
        let comp = tally.one();
        let slice = region.slice(0..4000).expect("a slice");
        assert_eq!(ep.am_zcopy(ID, b"h", &[slice], Some(&comp)).expect("a send"), Posted::InProgress);
    }
    assert!(region.bytes_mut().is_none(), "the transport reads it");
    for _ in 0..3 {
        let comp = tally.one();
        assert_eq!(ep.flush(FlushMode::Local, Some(&comp)).expect("a flush"), Posted::InProgress);
    }
    await_failures(&mut w, 0, 1);
    assert_eq!(*tally.0.lock(), vec![Err(ErrorKind::EndpointTimeout); 4]);
    w.run_until("the memory is free", |_| region.bytes_mut().is_some());
}

fn iface_flush_over_a_dead_peer_ends<F: Hooks>(w: World<F>) {
    let mut w = quick_world(w, 3);
    let (dead, alive) = (connected(&mut w, 0, 1), connected(&mut w, 0, 2));
    kill(&mut w, 1);
    w.send(|| dead.am_short(ID, 0, b"x"));
    w.send(|| alive.am_short(ID, 0, b"x"));
    let tally = Tally::default();
    let comp = tally.one();
    assert_eq!(w.nodes[0].iface().flush(FlushMode::Local, Some(&comp)).expect("a flush"), Posted::InProgress);
    drop(comp);
    w.run_until("the flush ends", |_| tally.len() == 1);
    assert_eq!(*tally.0.lock(), [Err(ErrorKind::EndpointTimeout)]);
    await_failures(&mut w, 0, 1);
    // A failed endpoint holds no flush up.
    w.settle();
}

fn pending_requests_survive_a_failure_until_purged<F: Hooks>(w: World<F>) {
    let mut w = quick_world(w, 2);
    let ep = connected(&mut w, 0, 1);
    kill(&mut w, 1);
    // Fill the window.
    while ep.am_short(ID, 0, b"x").is_ok() {}
    let ran = Arc::new(AtomicUsize::new(0));
    for _ in 0..5 {
        let ran = ran.clone();
        let refused = ep.pending_add(Box::new(move |ep: &dyn Endpoint| {
            ran.fetch_add(1, Ordering::Relaxed);
            match ep.am_short(ID, 0, b"later") {
                Err(SendError::NoResource) => PendingStatus::NoResource,
                _ => PendingStatus::Done,
            }
        }));
        assert!(refused.is_ok(), "{refused:?}");
    }
    await_failures(&mut w, 0, 1);
    let left = ep.pending_purge().len();
    assert_eq!(left, 5, "requests that could not be sent come back, {} ran", ran.load(Ordering::Relaxed));
    match ep.pending_add(Box::new(|_: &dyn Endpoint| PendingStatus::Done)) {
        Err(uct::ep::PendingRefused::Failed(_, e)) => assert_eq!(e.kind(), ErrorKind::EndpointTimeout),
        other => panic!("a failed endpoint takes no requests: {other:?}"),
    }
}

fn connecting_endpoint_fails_with_pending_requests<F: Hooks>(w: World<F>) {
    let mut w = quick_world(w, 2);
    kill(&mut w, 1);
    let ep = w.nodes[0].connect(&w.nodes[1]);
    assert!(matches!(ep.am_short(ID, 0, b"x"), Err(SendError::NoResource)));
    assert!(ep.pending_add(Box::new(|_: &dyn Endpoint| PendingStatus::Done)).is_ok());
    let got = await_failures(&mut w, 0, 1);
    assert_eq!(got[0].kind, ErrorKind::NeverAnswered);
    assert_eq!(ep.pending_purge().len(), 1);
}

fn error_handler_destroys_and_reconnects<F: Hooks>(mut w: World<F>) {
    // What the handler works with: known only once the interface is open.
    struct Slot {
        iface: Arc<dyn Interface>,
        next: EpParams,
        ep: Mutex<Option<Ep>>,
        reported: AtomicUsize,
    }
    let slot: Arc<OnceLock<Slot>> = Arc::default();
    let mut o = quick();
    let s = slot.clone();
    o.params.error_handler = Some(Arc::new(move |_| {
        let s = s.get().expect("the slot is filled");
        s.reported.fetch_add(1, Ordering::Relaxed);
        // Destroys the failed endpoint, inside its own report, and opens one to the stand-in.
        let new = Ep::from_transport(s.iface.clone().create_ep(&s.next).expect("an endpoint"));
        let old = s.ep.lock().replace(new);
        drop(old);
        FailureAction::Endpoint
    }));
    w.add(&o);
    w.add(&quick());
    w.add(&quick());
    let ep = connected(&mut w, 0, 1);
    let next = EpParams::to_iface(&w.nodes[2].iface().device_address(), &w.nodes[2].iface().iface_address());
    let filled = Slot {
        iface: w.nodes[0].iface().transport().clone(),
        next,
        ep: Mutex::new(Some(ep)),
        reported: AtomicUsize::new(0),
    };
    assert!(slot.set(filled).is_ok());
    let s = slot.get().expect("filled");
    kill(&mut w, 1);
    let with = |f: &dyn Fn(&Ep) -> uct::SendResult<()>| f(s.ep.lock().as_ref().expect("an endpoint"));
    w.send(|| with(&|ep| ep.am_short(ID, 0, b"lost")));
    w.run_until("the handler has run", |_| s.reported.load(Ordering::Relaxed) == 1);
    w.send(|| with(&|ep| ep.am_short(ID, 0, b"found")));
    w.run_until("the stand-in hears us", |w| w.nodes[2].inbox.lock().len() == 1);
    w.run_for(Duration::from_millis(50));
    assert_eq!(s.reported.load(Ordering::Relaxed), 1);
    let last = s.ep.lock().take();
    drop(last);
}

fn destroy_before_the_report_silences_it<F: Hooks>(w: World<F>) {
    let mut w = quick_world(w, 2);
    let ep = connected(&mut w, 0, 1);
    kill(&mut w, 1);
    let tally = Tally::default();
    let comp = tally.one();
    let region = w.nodes[0].md.mem_alloc(8).expect("memory");
    let posted = ep.am_zcopy(ID, b"", &[region.slice(0..8).expect("a slice")], Some(&comp));
    assert_eq!(posted.expect("a send"), Posted::InProgress);
    drop(comp);
    drop(ep);
    // Fired before destroy returned, and delivery is unknown.
    assert_eq!(*tally.0.lock(), [Err(ErrorKind::Canceled)]);
    w.run_for(Duration::from_millis(800));
    assert_eq!((failures(&w, 0), tally.len()), (0, 1));
}

fn sends_after_failure_are_refused_with_the_same_error<F: Hooks>(w: World<F>) {
    let mut w = quick_world(w, 2);
    let ep = connected(&mut w, 0, 1);
    kill(&mut w, 1);
    w.send(|| ep.am_short(ID, 0, b"x"));
    let reported = await_failures(&mut w, 0, 1)[0].error.to_string();
    let region = w.nodes[0].md.mem_alloc(8).expect("memory");
    let slice = || region.slice(0..8).expect("a slice");
    assert_eq!(failed_with(ep.am_short(ID, 0, b"x")).to_string(), reported);
    assert_eq!(failed_with(ep.am_short_iov(ID, &[])).to_string(), reported);
    assert_eq!(failed_with(ep.am_bcopy(ID, &mut |_| panic!("packed for nobody")).map(drop)).to_string(), reported);
    assert_eq!(failed_with(ep.am_zcopy(ID, b"", &[slice()], None).map(drop)).to_string(), reported);
    assert_eq!(failed_with(ep.flush(FlushMode::Local, None).map(drop)).to_string(), reported);
    assert_eq!(failed_with(ep.check(None).map(drop)).to_string(), reported);
    // The refusals are no further failures.
    await_failures(&mut w, 0, 1);
}

fn close_of_a_failed_endpoint_reports_its_error<F: Hooks>(w: World<F>) {
    let mut w = quick_world(w, 2);
    let ep = connected(&mut w, 0, 1);
    kill(&mut w, 1);
    w.send(|| ep.am_short(ID, 0, b"x"));
    await_failures(&mut w, 0, 1);
    let tally = Tally::default();
    ep.close(Some(tally.one()));
    assert_eq!(*tally.0.lock(), [Err(ErrorKind::EndpointTimeout)]);
}

fn stopped_process_does_not_blame_its_peers<F: Hooks>(w: World<F>) {
    let mut w = quick_world(w, 2);
    let ep = connected(&mut w, 0, 1);
    // Its message gets lost and it stands still for several time-outs: on waking it must try again, not give up.
    F::set_tx_filter(&w.nodes[0].device, drop_all());
    w.send(|| ep.am_short(ID, 7, b"late"));
    w.nodes[0].motion = Motion::Stopped;
    w.run_for(Duration::from_secs(2));
    F::set_tx_filter(&w.nodes[0].device, None);
    w.nodes[0].motion = Motion::User;
    w.run_until("the message arrives late", |w| w.nodes[1].inbox.lock().len() == 2);
    w.settle();
    assert_eq!(failures(&w, 0) + failures(&w, 1), 0);
    assert!(w.nodes[0].counter("stopped") > 0);
}

/// One of two receivers is killed in the middle: the other pair goes on as if nothing were.
fn two_pairs_send<F: Hooks>(w: World<F>) {
    let mut w = quick_world(w, 3);
    let (one, two) = (connected(&mut w, 0, 1), connected(&mut w, 0, 2));
    for i in 0..20 {
        w.send(|| one.am_short(ID, i, b""));
        w.send(|| two.am_short(ID, i, b""));
    }
    kill(&mut w, 1);
    // Ten windows more, while the dead one's is full.
    let mut sent = 20;
    for _ in 0..10 {
        let _ = one.am_short(ID, 0, b"");
        loop {
            match two.am_short(ID, sent, b"") {
                Ok(()) => sent += 1,
                Err(SendError::NoResource) => break,
                Err(e) => w.fail(&format!("the living pair: {e}")),
            }
        }
        w.run_until("the window is open again", |w| {
            w.nodes[2].inbox.lock().len() as u64 == sent + 1
                && matches!(two.flush(FlushMode::Local, None), Ok(Posted::Done))
        });
    }
    let numbers: Vec<u64> =
        w.nodes[2].take()[1..].iter().map(|m| u64::from_ne_bytes(m.data[..8].try_into().expect("8 bytes"))).collect();
    assert!(numbers.iter().copied().eq(0..sent), "in order");
    await_failures(&mut w, 0, 1);
    w.settle();
    drop((one, two));
}

/// All receivers but the last are killed with messages on their way.
fn peer_failure_multiple<F: Hooks>(w: World<F>) {
    const RECEIVERS: usize = 10;
    let mut w = quick_world(w, 1 + RECEIVERS);
    let eps: Vec<Ep> = (1..=RECEIVERS).map(|i| connected(&mut w, 0, i)).collect();
    for ep in &eps {
        let _ = ep.am_short(ID, 1, b"in the window");
    }
    for i in 1..RECEIVERS {
        kill(&mut w, i);
    }
    for ep in &eps {
        while ep.am_short(ID, 2, b"").is_ok() {}
    }
    w.run_until("the flush ends", |w| {
        !matches!(w.nodes[0].iface().flush(FlushMode::Local, None), Ok(Posted::InProgress) | Err(SendError::NoResource))
    });
    await_failures(&mut w, 0, RECEIVERS - 1);
    for ep in &eps[..RECEIVERS - 1] {
        assert_eq!(failed_with(ep.am_short(ID, 3, b"")).kind(), ErrorKind::EndpointTimeout);
    }
    let before = w.nodes[RECEIVERS].inbox.lock().len();
    w.send(|| eps[RECEIVERS - 1].am_short(ID, 4, b"the last one"));
    w.run_until("the last one hears", |w| w.nodes[RECEIVERS].inbox.lock().len() > before);
    drop(eps);
}

/// Checks of a living peer change nothing; one check of a dead one finds out, once.
fn keepalive<F: Hooks>(w: World<F>, posts: bool) {
    let mut w = quick_world(w, 2);
    let ep = connected(&mut w, 0, 1);
    for _ in 0..8 {
        w.run_until("a check is accepted", |_| ep.check(None).is_ok());
        w.run_for(Duration::from_millis(30));
    }
    w.settle();
    assert_eq!(failures(&w, 0), 0);
    kill(&mut w, 1);
    assert_eq!(ep.check(None).expect("a check"), Posted::InProgress);
    if posts {
        w.send(|| ep.am_short(ID, 0, b"after the check"));
    }
    let got = await_failures(&mut w, 0, 1);
    assert_eq!((got[0].ep_id, got[0].kind), (ep.id(), ErrorKind::EndpointTimeout));
}

/// Nobody asked to be told: the process goes on, one line says so, and calls on the endpoint return the error.
fn without_an_error_handler_the_next_call_tells<F: Hooks>(w: World<F>) {
    let mut w = quick_world(w, 3);
    let (md, worker) = (w.nodes[0].md.clone(), &w.nodes[0].worker);
    let o = quick();
    let iface = ud::open(&md, worker, 1, &o.params, o.iface, o.ud, &o.tuning).expect("an interface");
    iface.progress_enable(true);
    let connect = |w: &World<F>, to: usize| {
        let to = w.nodes[to].iface();
        iface.ep(&EpParams::to_iface(&to.device_address(), &to.iface_address())).expect("an endpoint")
    };
    let (dead, alive) = (connect(&w, 1), connect(&w, 2));
    w.send(|| dead.am_short(ID, 0, b""));
    w.send(|| alive.am_short(ID, 0, b""));
    kill(&mut w, 1);
    let mut error = None;
    let lines = uct_tests::log::lines_of(tracing::Level::WARN, || {
        w.run_until("the next call tells", |_| match dead.am_short(ID, 1, b"") {
            Err(SendError::Failed(e)) => error.insert(e).kind() == ErrorKind::EndpointTimeout,
            _ => false,
        });
        w.run_for(Duration::from_millis(100));
    });
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].contains("was connected, then silent"), "{}", lines[0]);
    let before = w.nodes[2].inbox.lock().len();
    w.send(|| alive.am_short(ID, 1, b""));
    w.run_until("the other peer hears us", |w| w.nodes[2].inbox.lock().len() > before);
    drop((dead, alive, iface));
}

/// A link on the way that carries short packets only: the peer answers, so it is not dead, and what was sent is not given up.
/// One line tells what may be wrong.
fn a_path_that_swallows_long_packets_is_told(w: World<Sim>) {
    let mut w = w.nodes(2);
    let ep = connected(&mut w, 0, 1);
    w.nodes[1].take();
    let only_short: Filter =
        Box::new(|p| if p.payload.len() > 1500 { FilterVerdict::Drop } else { FilterVerdict::Pass });
    w.nodes[1].device.set_rx_filter(Some(only_short));
    let lines = uct_tests::log::lines_of(tracing::Level::WARN, || {
        w.send(|| {
            ep.am_bcopy(ID, &mut |to| {
                to[..2000].fill(7);
                2000
            })
        });
        w.send(|| ep.am_short(ID, 1, b"behind it"));
        w.run_for(Duration::from_secs(60));
    });
    assert_eq!(lines.len(), 1, "{lines:?}");
    for word in ["the peer answers", "2008 bytes", "MTU", "UCX_IB_PATH_MTU"] {
        assert!(lines[0].contains(word), "no `{word}` in: {}", lines[0]);
    }
    assert_eq!((failures(&w, 0), w.nodes[1].inbox.lock().len()), (0, 0));
    w.nodes[1].device.set_rx_filter(None);
    w.run_until("both arrive", |w| w.nodes[1].inbox.lock().len() == 2);
    w.nodes[1].take();
    drop(ep);
    w.finish();
}

fn keepalive_killed<F: Hooks>(w: World<F>) {
    keepalive(w, false);
}

fn keepalive_killed_post_am<F: Hooks>(w: World<F>) {
    keepalive(w, true);
}

fn computing_for_60_seconds_is_not_dying(w: World<Sim>) {
    let mut w = w.nodes(3);
    let (ep, other) = (connected(&mut w, 0, 1), connected(&mut w, 2, 1));
    let before = w.nodes[1].take().len();
    w.nodes[1].motion = Motion::ThreadOnly;
    let end = w.now() + Duration::from_secs(60);
    let mut sent = 0u64;
    while w.now() < end {
        if sent < 3_000 && ep.am_short(ID, sent, b"while it computes").is_ok() {
            sent += 1;
        }
        let _ = other.check(None);
        w.step();
    }
    assert_eq!((failures(&w, 0), failures(&w, 1), failures(&w, 2)), (0, 0, 0));
    assert!(sent > 100, "the thread acknowledges: {sent}");
    assert!(w.nodes[1].inbox.lock().is_empty(), "handlers run on the user's thread only; before: {before}");
    w.nodes[1].motion = Motion::User;
    w.run_until("all messages are delivered", |w| w.nodes[1].inbox.lock().len() as u64 == sent);
    let got: Vec<u64> =
        w.nodes[1].take().iter().map(|m| u64::from_ne_bytes(m.data[..8].try_into().expect("8 bytes"))).collect();
    assert!(got.iter().copied().eq(0..sent), "in order");
    w.settle();
}

fn a_process_that_never_progresses_is_declared_dead(w: World<Sim>) {
    // The counterpart: without a progress thread a rank that computes looks dead, and the default time-out is 30 s.
    let mut w = w.nodes(2);
    let ep = connected(&mut w, 0, 1);
    w.nodes[1].motion = Motion::Stopped;
    let start = w.now();
    w.send(|| ep.am_short(ID, 0, b"x"));
    await_failures(&mut w, 0, 1);
    let took = w.now().since(start);
    assert!((Duration::from_secs(30)..Duration::from_secs(45)).contains(&took), "{took:?}");
}

fn two_sided_failure_reports_on_both_sides(w: World<Sim>) {
    let mut w = quick_world(w, 2);
    let (a, b) = (connected(&mut w, 0, 1), connected(&mut w, 1, 0));
    let faults = ib::sim::Faults { partition: true, ..Default::default() };
    w.fabric.net.set_faults(faults);
    w.send(|| a.am_short(ID, 0, b"x"));
    w.send(|| b.am_short(ID, 0, b"x"));
    await_failures(&mut w, 0, 1);
    await_failures(&mut w, 1, 1);
    // The network heals: new endpoints of the same interfaces connect.
    w.fabric.net.set_faults(Default::default());
    w.nodes[0].inbox.lock().clear();
    w.nodes[1].inbox.lock().clear();
    let c = w.nodes[0].connect(&w.nodes[1]);
    w.send(|| c.am_short(ID, 1, b"again"));
    w.run_until("the new endpoint works", |w| w.nodes[1].inbox.lock().len() == 1);
    drop((a, b));
}

/// Crashes node `i` and starts another process in its place: same address, same queue pair number, same first endpoint id.
fn restart(w: &mut World<Sim>, i: usize) -> usize {
    w.nodes[i].motion = Motion::Stopped;
    let device = w.fabric.net.restart(&w.nodes[i].device);
    let new = w.add_on(device, &quick());
    assert_eq!(w.nodes[new].iface().iface_address(), w.nodes[i].iface().iface_address(), "the hardest case");
    new
}

fn restart_at_the_same_address_resets_old_endpoints(w: World<Sim>) {
    let mut w = quick_world(w, 2);
    let (a, b) = (connected(&mut w, 0, 1), connected(&mut w, 0, 1));
    let new = restart(&mut w, 1);
    // The newcomer connects: its request says that the old process is gone.
    let from_new = w.nodes[new].connect(&w.nodes[0]);
    w.send(|| from_new.am_short(ID, 1, b"new life"));
    let got = await_failures(&mut w, 0, 2);
    assert!(got.iter().all(|f| f.kind == ErrorKind::ConnectionReset), "{got:?}");
    assert!(got[0].error.to_string().contains("restarted"), "{}", got[0].error);
    assert_eq!(w.nodes[0].take().len(), 1);
    drop((a, b));
    // And the other way round, on the same interface.
    let back = connected(&mut w, 0, new);
    w.send(|| back.am_short(ID, 2, b"hello again"));
    w.run_until("the new process hears us", |w| w.nodes[new].inbox.lock().len() == 2);
    assert_eq!(failures(&w, 0), 2);
    assert_eq!(failures(&w, new), 0);
}

fn packets_of_the_old_life_are_dropped_and_counted(w: World<Sim>) {
    let mut w = quick_world(w, 2);
    let to_old = connected(&mut w, 0, 1);
    let from_old = connected(&mut w, 1, 0);
    w.nodes[0].take();
    // The old life's last packets, a request among them, are delayed in the network.
    let delay = Arc::new(AtomicBool::new(true));
    let d = delay.clone();
    w.nodes[0].device.set_rx_filter(Some(Box::new(move |_| match d.load(Ordering::Relaxed) {
        true => FilterVerdict::Hold,
        false => FilterVerdict::Pass,
    })));
    let more = w.nodes[1].connect(&w.nodes[0]);
    w.send(|| from_old.am_short(ID, 666, b"from the grave"));
    w.send(|| to_old.am_short(ID, 0, b"an ack comes back too"));
    w.run_for(Duration::from_millis(1));
    let new = restart(&mut w, 1);
    delay.store(false, Ordering::Relaxed);
    let ep = w.nodes[new].connect(&w.nodes[0]);
    w.send(|| ep.am_short(ID, 1, b"new life"));
    w.run_until("the new process is heard", |w| w.nodes[0].inbox.lock().len() == 1);
    assert_eq!(w.nodes[0].take()[0].data[8..], *b"new life");

    let dropped = |w: &World<Sim>| {
        let reasons = ["rx.drop.stale_process", "rx.drop.ep_failed", "rx.drop.unknown_ep"];
        reasons.map(|c| w.nodes[0].counter(c))
    };
    let before = dropped(&w);
    w.nodes[0].device.release_held();
    w.run_for(Duration::from_millis(100));
    let after = dropped(&w);
    assert_eq!(after[0], before[0] + 1, "the request: {before:?} {after:?}");
    assert!(after[1] + after[2] > before[1] + before[2], "the rest: {before:?} {after:?}");
    assert!(w.nodes[0].inbox.lock().is_empty(), "nothing of the old life is delivered");
    w.send(|| ep.am_short(ID, 2, b"unharmed"));
    w.run_until("the new connection is unharmed", |w| w.nodes[0].inbox.lock().len() == 1);
    drop((more, from_old, to_old));
}
