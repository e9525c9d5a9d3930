//! Verbs calls that fail: each one, at each call, in each phase of an interface's life. A clear error, no panic, nothing
//! left over.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Duration,
};

use ib::{
    device::{AsyncEvent, QueueLimits, WcStatus},
    mock::{Call, MockDevice, MockLive},
    sim::{SimConfig, SimDevice},
    types::Mtu,
};
use parking_lot::Mutex;
use uct::{AmId, Completion, ErrorKind, FlushMode, Posted, Scope, SendError, md::MemoryDomain};
use uct_tests::{
    fabric::{Fabric, Mocked},
    world::{NodeOptions, World},
};

const ID: AmId = AmId::truncate(1);
const EIO: i32 = 5;
const EAGAIN: i32 = 11;
const ENOMEM: i32 = 12;
const EINVAL: i32 = 22;
const ENODATA: i32 = 61;
const ENETUNREACH: i32 = 101;
const ETIMEDOUT: i32 = 110;
const EHOSTUNREACH: i32 = 113;

type Device = Arc<MockDevice<SimDevice>>;

/// A world, a good peer at node 0, and a device for the interface under test.
fn world(name: &str) -> (World<Mocked>, Device) {
    let mut w: World<Mocked> = World::new(name);
    w.add(&quick());
    let device = w.fabric.device();
    (w, device)
}

fn quick() -> NodeOptions {
    let mut o = NodeOptions::default();
    o.ud.timeout = Duration::from_millis(500);
    o
}

/// Ends everything and checks that nothing of it is left.
#[track_caller]
fn assert_clean(w: World<Mocked>, device: &Device, at: &str) {
    let net = w.fabric.0.net.clone();
    drop(w);
    assert_eq!(device.leaks(), None, "{at}");
    assert_eq!(net.leaks(), Vec::<String>::new(), "{at}");
    assert!(device.inner().violations().is_empty(), "{at}: {:?}", device.inner().violations());
}

#[test]
fn open_fails_cleanly_at_every_call() {
    let mut refused = 0;
    for &call in Call::ALL {
        for n in 1..=3 {
            for errno in [EIO, ENOMEM] {
                let (mut w, device) = world("open_fails_cleanly_at_every_call");
                device.fail_nth(call, n, errno);
                let at = format!("{call} number {n} fails with errno {errno}");
                if let Err(e) = w.try_add_on(device.clone(), &quick()) {
                    refused += 1;
                    let text = e.to_string();
                    assert!(text.contains("sim1"), "{at}: no device in: {text}");
                    assert!(text.contains(call.name()), "{at}: no call in: {text}");
                    assert!(text.contains(&format!("errno {errno}")), "{at}: {text}");
                    assert_eq!(e.errno(), Some(errno), "{at}");
                    if errno == ENOMEM && matches!(call, Call::RegMr | Call::CreateUdQp) {
                        assert_eq!(e.kind(), ErrorKind::NoMemory, "{at}: {text}");
                        assert!(text.contains("ulimit -l"), "{at}: {text}");
                    }
                    // The device is well again: the next attempt works.
                    device.clear_scripts();
                    w.try_add_on(device.clone(), &quick()).expect("a second attempt");
                }
                device.clear_scripts();
                assert_clean(w, &device, &at);
            }
        }
    }
    assert!(refused >= 8, "{refused}: too few calls are made at open for this test to mean anything");
}

/// What happened to operations in a life.
#[derive(Clone, Default)]
struct Tally {
    posted: Arc<Mutex<usize>>,
    results: Arc<Mutex<Vec<Result<(), ErrorKind>>>>,
}

/// Connects, sends, flushes, receives, closes: as far as it gets.
fn live(w: &mut World<Mocked>, i: usize, tally: &Tally) -> Result<(), String> {
    let ep = {
        let to = w.nodes[0].iface();
        let params = uct::EpParams::to_iface(&to.device_address(), &to.iface_address());
        w.nodes[i].iface().ep(&params).map_err(|e| format!("connect: {e}"))?
    };
    let region = w.nodes[i].md.mem_alloc(256).map_err(|e| format!("memory: {e}"))?;
    let mut errors = Vec::new();
    for k in 0..300u64 {
        let results = tally.results.clone();
        let comp = Completion::new(move |r| results.lock().push(r));
        let posted = match k % 3 {
            0 => ep.am_short(ID, k, b"x").map(|()| Posted::Done),
            1 => ep.am_bcopy(ID, &mut |to| to.len().min(500)).map(|_| Posted::Done),
            _ => ep.am_zcopy(ID, b"h", &[region.slice(0..256).expect("a slice")], Some(&comp)),
        };
        // Only operations in progress will complete; the others leave the completion to us, which fires it.
        let counts = matches!(posted, Ok(Posted::InProgress));
        if counts {
            *tally.posted.lock() += 1;
        }
        drop(comp);
        if !counts {
            tally.results.lock().pop();
        }
        match posted {
            Ok(_) | Err(SendError::NoResource) => {}
            Err(SendError::Failed(e)) => errors.push(e.to_string()),
        }
        w.step();
    }
    w.run_for(Duration::from_secs(2));
    let flushed = ep.flush(FlushMode::Local, None);
    if let Err(SendError::Failed(e)) = flushed {
        errors.push(e.to_string());
    }
    drop(ep);
    w.run_for(Duration::from_millis(10));
    match errors.first() {
        Some(e) => Err(e.clone()),
        None => Ok(()),
    }
}

#[test]
fn life_goes_on_or_ends_cleanly_at_every_call() {
    let mut failed = 0;
    for &call in Call::ALL {
        for n in [1, 2, 7, 40] {
            let (mut w, device) = world("life_goes_on_or_ends_cleanly_at_every_call");
            let i = w.add_on(device.clone(), &quick());
            device.fail_nth(call, n, EIO);
            let at = format!("{call} number {n} fails");
            let tally = Tally::default();
            let outcome = catch_unwind(AssertUnwindSafe(|| live(&mut w, i, &tally))).unwrap_or_else(|_| panic!("{at}"));
            if let Err(text) = &outcome {
                failed += 1;
                assert!(text.contains("sim1"), "{at}: {text}");
                assert!(text.contains(call.name()) || text.contains("errno"), "{at}: {text}");
            }
            // A call that failed once fails at most one thing: the peer is not told apart from a healthy one.
            assert!(w.nodes[i].failures.lock().len() <= 1, "{at}");
            w.nodes[i].iface = None;
            let (posted, results) = (*tally.posted.lock(), tally.results.lock().clone());
            assert_eq!(posted, results.len(), "{at}: every accepted operation completes once");
            device.clear_scripts();
            // A deregistration or destruction that was refused is a leak of the device's own making.
            if !matches!(call, Call::DeregMr | Call::DestroyAh) || device.failures(call) == 0 {
                assert_clean(w, &device, &at);
            }
        }
    }
    assert!(failed >= 4, "{failed}");
}

#[test]
fn create_ah_errors_are_explained() {
    for (errno, kind, words) in [
        (ETIMEDOUT, ErrorKind::EndpointTimeout, "ip neigh"),
        (ENETUNREACH, ErrorKind::Unreachable, "ip route get"),
        (EHOSTUNREACH, ErrorKind::Unreachable, "ip route get"),
        (ENODATA, ErrorKind::Unreachable, "not in the port's table"),
        (EINVAL, ErrorKind::InvalidAddress, "UCX_IB_GID_INDEX"),
        (ENOMEM, ErrorKind::NoMemory, "no room for another address handle"),
        (EAGAIN, ErrorKind::Io, "the device refused"),
    ] {
        let (mut w, device) = world("create_ah_errors_are_explained");
        let i = w.add_on(device.clone(), &quick());
        device.fail_always(Call::CreateAh, Some(errno));
        let to = w.nodes[0].iface();
        let params = uct::EpParams::to_iface(&to.device_address(), &to.iface_address());
        let e = w.nodes[i].iface().ep(&params).expect_err("no address handle");
        let text = e.to_string();
        assert_eq!((e.kind(), e.errno()), (kind, Some(errno)), "{text}");
        for part in ["sim1:1", "create_ah", "::ffff:10.0.0.1", "::ffff:10.0.0.2", words] {
            assert!(text.contains(part), "no `{part}` in: {text}");
        }
        assert_eq!(e.scope(), Scope::Endpoint, "{text}");
        // Refused at once: not reported a second time.
        assert!(w.nodes[i].failures.lock().is_empty());
        // The failure is remembered for a short while, and then forgotten.
        device.fail_always(Call::CreateAh, None);
        w.run_for(Duration::from_secs(60));
        let ep = w.nodes[i].connect(&w.nodes[0]);
        w.send(|| ep.am_short(ID, 0, b""));
        w.run_until("it works again", |w| w.nodes[0].inbox.lock().len() == 1);
        drop(ep);
        assert_clean(w, &device, &text);
    }
}

#[test]
fn slow_create_ah_that_fails_reports_through_the_handler() {
    // A device whose create_ah sleeps: the endpoint is there at once, its failure comes later.
    let (mut w, device) = world("slow_create_ah_that_fails_reports_through_the_handler");
    device.set_attr(|a| a.ah_create_sleeps = true);
    let i = w.add_on(device.clone(), &quick());
    device.fail_always(Call::CreateAh, Some(ETIMEDOUT));
    let ep = w.nodes[i].connect(&w.nodes[0]);
    assert!(matches!(ep.am_short(ID, 0, b""), Err(SendError::NoResource)));
    w.run_until("the failure is reported", |w| !w.nodes[i].failures.lock().is_empty());
    let f = w.nodes[i].failures.lock()[0].clone();
    let text = f.error.to_string();
    assert!(text.contains("create_ah") && text.contains("ip neigh"), "{text}");
    assert!(text.contains("while nothing was sent") && !text.contains("was connected"), "{text}");
    assert_eq!(f.kind, ErrorKind::EndpointTimeout);
    drop(ep);
    assert_clean(w, &device, &text);
}

#[test]
fn registration_failure_while_sending_is_an_error_of_the_send() {
    let (mut w, device) = world("registration_failure_while_sending_is_an_error_of_the_send");
    let i = w.add_on(device.clone(), &quick());
    let ep = w.nodes[i].connect(&w.nodes[0]);
    w.run_for(Duration::from_millis(1));
    device.fail_always(Call::RegMr, Some(ENOMEM));
    let e = match ep.am_bcopy(ID, &mut |_| 100) {
        Err(SendError::Failed(e)) => e,
        other => panic!("no memory for it: {other:?}"),
    };
    assert_eq!(e.kind(), ErrorKind::NoMemory);
    assert!(e.to_string().contains("ulimit -l"), "{e}");
    // Said again, not asked again, until a pause is over.
    let asked = device.calls(Call::RegMr);
    for _ in 0..100 {
        match ep.am_bcopy(ID, &mut |_| 100) {
            Err(SendError::Failed(again)) => assert_eq!(again.to_string(), e.to_string()),
            other => panic!("no memory for it: {other:?}"),
        }
    }
    assert_eq!(device.calls(Call::RegMr), asked);
    // With memory it goes on where it was: the failed attempt took nothing.
    device.clear_scripts();
    w.run_for(Duration::from_millis(2));
    w.send(|| ep.am_bcopy(ID, &mut |_| 100));
    w.run_until("it arrives", |w| w.nodes[0].inbox.lock().len() == 1);
    w.settle();
    drop(ep);
    assert_clean(w, &device, "after all");
}

#[test]
fn connecting_without_memory_says_so() {
    // The request needs registered memory. Without it nothing is sent, and the error must not blame the peer alone.
    let (mut w, device) = world("connecting_without_memory_says_so");
    let i = w.add_on(device.clone(), &quick());
    device.fail_always(Call::RegMr, Some(ENOMEM));
    let ep = w.nodes[i].connect(&w.nodes[0]);
    w.run_until("the failure is reported", |w| !w.nodes[i].failures.lock().is_empty());
    let text = w.nodes[i].failures.lock()[0].error.to_string();
    assert!(text.contains("reg_mr") && text.contains("ulimit -l"), "{text}");
    drop(ep);
    device.clear_scripts();
    assert_clean(w, &device, &text);
}

#[test]
fn post_recv_failure_fails_the_interface_once() {
    let (mut w, device) = world("post_recv_failure_fails_the_interface_once");
    let i = w.add_on(device.clone(), &quick());
    let ep = w.nodes[i].connect(&w.nodes[0]);
    w.send(|| ep.am_short(ID, 0, b""));
    w.settle();
    device.fail_next(Call::PostRecv, ENOMEM);
    let back = w.nodes[0].connect(&w.nodes[i]);
    for k in 0..100 {
        let _ = back.am_short(ID, k, b"");
        w.step();
    }
    let e = match ep.am_short(ID, 0, b"") {
        Err(SendError::Failed(e)) => e,
        other => panic!("the interface is lost: {other:?}"),
    };
    let text = e.to_string();
    assert_eq!((e.kind(), e.scope(), e.errno()), (ErrorKind::Io, Scope::Interface, Some(ENOMEM)), "{text}");
    assert!(text.contains("receives") && text.contains("close the interface"), "{text}");
    // Everything says the same.
    let to = w.nodes[0].iface();
    let params = uct::EpParams::to_iface(&to.device_address(), &to.iface_address());
    assert_eq!(w.nodes[i].iface().ep(&params).expect_err("lost").to_string(), text);
    match w.nodes[i].iface().flush(FlushMode::Local, None) {
        Err(SendError::Failed(e)) => assert_eq!(e.to_string(), text),
        other => panic!("{other:?}"),
    }
    drop((ep, back));
    assert_clean(w, &device, &text);
}

#[test]
fn lost_interface_completes_what_was_accepted() {
    let (mut w, device) = world("lost_interface_completes_what_was_accepted");
    let i = w.add_on(device.clone(), &quick());
    let ep = w.nodes[i].connect(&w.nodes[0]);
    w.send(|| ep.am_short(ID, 0, b""));
    w.settle();
    w.nodes[0].motion = uct_tests::world::Motion::Stopped;
    let region = w.nodes[i].md.mem_alloc(64).expect("memory");
    let (comp, status) = Completion::polled();
    let posted = ep.am_zcopy(ID, b"", &[region.slice(0..64).expect("a slice")], Some(&comp)).expect("a send");
    assert_eq!(posted, Posted::InProgress);
    drop(comp);
    device.fail_always(Call::PostSend, Some(EIO));
    let e = match ep.am_short(ID, 0, b"") {
        Err(SendError::Failed(e)) => e.to_string(),
        other => panic!("{other:?}"),
    };
    assert!(e.contains("posting a send failed") && e.contains("post_send"), "{e}");
    // What was accepted ends with the interface, not after a time-out, and each endpoint is told once.
    w.run_for(Duration::from_millis(20));
    assert_eq!(status.poll(), Some(Err(ErrorKind::Io)));
    w.run_for(Duration::from_secs(2));
    let reported: Vec<String> = w.nodes[i].failures.lock().iter().map(|f| f.error.to_string()).collect();
    assert_eq!(reported, [e]);
    w.nodes[i].iface = None;
    drop(ep);
    device.clear_scripts();
    drop(region);
    assert_clean(w, &device, "closed");
}

#[test]
fn failed_completions_of_a_living_queue_pair_lose_packets_only() {
    let (mut w, device) = world("failed_completions_of_a_living_queue_pair_lose_packets_only");
    let i = w.add_on(device.clone(), &quick());
    let ep = w.nodes[i].connect(&w.nodes[0]);
    let back = w.nodes[0].connect(&w.nodes[i]);
    for k in 0..200 {
        if k % 40 == 5 {
            device.force_recv_status(WcStatus::LocalLength);
        }
        if k % 40 == 15 {
            device.force_send_status(WcStatus::LocalQpOp);
        }
        w.send(|| ep.am_short(ID, k, b""));
        w.send(|| back.am_short(ID, k, b""));
    }
    w.run_until("all arrive", |w| w.nodes[0].inbox.lock().len() == 200 && w.nodes[i].inbox.lock().len() == 200);
    assert!(w.nodes[i].counter("rx.errors") > 0);
    assert_eq!(w.nodes[i].counter("qp.resets"), 0);
    w.settle();
    drop((ep, back));
    assert_clean(w, &device, "after all");
}

#[test]
fn queue_pair_in_error_is_reset_and_goes_on() {
    for sleeps in [false, true] {
        queue_pair_in_error_goes_on(sleeps);
    }
}

fn queue_pair_in_error_goes_on(sleeps: bool) {
    let (mut w, device) = world("queue_pair_in_error_is_reset_and_goes_on");
    device.set_attr(|a| a.ah_create_sleeps = sleeps);
    let i = w.add_on(device.clone(), &quick());
    let ep = w.nodes[i].connect(&w.nodes[0]);
    let back = w.nodes[0].connect(&w.nodes[i]);
    for k in 0..300 {
        if k % 60 == 30 {
            device.inner().fail_qps();
        }
        w.send(|| ep.am_short(ID, k, b""));
        w.send(|| back.am_short(ID, k, b""));
    }
    w.run_until("all arrive", |w| w.nodes[0].inbox.lock().len() == 300 && w.nodes[i].inbox.lock().len() == 300);
    assert!(w.nodes[i].counter("qp.resets") >= 5, "{}", w.nodes[i].counter("qp.resets"));
    let posted = w.nodes[i].counter("rx.buffers_posted");
    assert!(posted > 4000, "{posted} receives are posted again");
    w.settle();
    drop((ep, back));
    assert_clean(w, &device, "after all");
}

#[test]
fn idle_queue_pair_in_error_is_noticed() {
    // It only receives, and nothing arrives any more: no completion of a send tells it.
    let (mut w, device) = world("idle_queue_pair_in_error_is_noticed");
    let i = w.add_on(device.clone(), &quick());
    let back = w.nodes[0].connect(&w.nodes[i]);
    w.send(|| back.am_short(ID, 0, b""));
    w.settle();
    device.inner().fail_qps();
    w.send(|| back.am_short(ID, 1, b""));
    w.run_until("it arrives all the same", |w| w.nodes[i].inbox.lock().len() == 2);
    drop(back);
    assert_clean(w, &device, "after all");
}

#[test]
fn queue_pair_that_cannot_be_reset_fails_the_interface() {
    let (mut w, device) = world("queue_pair_that_cannot_be_reset_fails_the_interface");
    let i = w.add_on(device.clone(), &quick());
    let ep = w.nodes[i].connect(&w.nodes[0]);
    w.send(|| ep.am_short(ID, 0, b""));
    w.settle();
    device.fail_always(Call::Reset, Some(EIO));
    device.inner().fail_qps();
    w.run_for(Duration::from_millis(200));
    let _ = ep.am_short(ID, 1, b"");
    w.run_for(Duration::from_millis(200));
    let text = match ep.am_short(ID, 2, b"") {
        Err(SendError::Failed(e)) => e.to_string(),
        other => panic!("the interface is lost: {other:?}"),
    };
    assert!(text.contains("cannot be reset") && text.contains("modify_qp") && text.contains("sim1"), "{text}");
    assert_eq!(w.nodes[i].counter("qp.resets"), 1, "it is not tried for ever");
    drop(ep);
    assert_clean(w, &device, &text);
}

/// A world with a good peer at node 0, and the interface under test at node 1, on a device whose calls may sleep and that
/// reads what it sends after the post.
fn sleeping(name: &str) -> (World<Mocked>, Device) {
    let mut w: World<Mocked> = World::new(name);
    w.add(&quick());
    let config = w.fabric.0.config();
    w.fabric.0.next_config = Some(SimConfig { late_sends: Some((1_000, 20_000)), ah_create_sleeps: true, ..config });
    let device = w.fabric.device();
    w.add_on(device.clone(), &quick());
    (w, device)
}

/// [`sleeping`], with an endpoint to the good peer that has sent message 0.
fn connected(name: &str) -> (World<Mocked>, Device, uct::Ep) {
    let (mut w, device) = sleeping(name);
    let ep = w.nodes[1].connect(&w.nodes[0]);
    w.send(|| ep.am_short(ID, 0, b""));
    w.settle();
    (w, device, ep)
}

/// Takes the queue pair under test down, and lets its reset hang.
#[track_caller]
fn hang(w: &mut World<Mocked>, device: &Device) {
    device.hold_resets();
    device.inner().fail_qps();
    w.run_until("the reset hangs", |_| device.held_resets() == 1);
}

/// The user under test calls `progress`, and nobody does what may sleep. No time passes, so it takes many calls until one looks
/// for events of the device.
fn progress_only(w: &World<Mocked>) {
    for _ in 0..2000 {
        w.nodes[1].worker.progress();
    }
}

/// The numbers that came with this id.
fn numbers(w: &World<Mocked>, node: usize, id: AmId) -> Vec<u64> {
    let inbox = w.nodes[node].inbox.lock();
    let number = |data: &[u8]| u64::from_ne_bytes(*data.first_chunk().expect("a number"));
    inbox.iter().filter(|m| m.id == id.get()).map(|m| number(&m.data)).collect()
}

#[test]
fn progress_does_not_reset_a_queue_pair_where_that_may_sleep() {
    let (mut w, device, ep) = connected("progress_does_not_reset_a_queue_pair_where_that_may_sleep");
    device.inner().fail_qps();
    progress_only(&w);
    // It has asked for the GID table, which somebody who may sleep reads.
    assert_eq!(w.nodes[1].md.ah_cache().run_jobs(), 1);
    progress_only(&w);
    assert_eq!((w.nodes[1].counter("qp.resets"), device.calls(Call::Reset)), (1, 0));
    assert!(matches!(ep.am_short(ID, 1, b""), Err(SendError::NoResource)));
    assert_eq!(w.nodes[1].md.ah_cache().run_jobs(), 1);
    assert_eq!(device.calls(Call::Reset), 1);
    w.send(|| ep.am_short(ID, 1, b""));
    w.run_until("it arrives", |w| numbers(w, 0, ID) == [0, 1]);
    assert_eq!((w.nodes[1].counter("qp.resets"), device.calls(Call::Reset)), (1, 1));
    drop(ep);
    assert_clean(w, &device, "after all");
}

#[test]
fn while_a_reset_hangs_everything_else_goes_on() {
    let other = AmId::truncate(2);
    let (mut w, device) = sleeping("while_a_reset_hangs_everything_else_goes_on");
    let ep = w.nodes[1].connect(&w.nodes[0]);
    let doomed = w.nodes[1].connect(&w.nodes[0]);
    let back = w.nodes[0].connect(&w.nodes[1]);
    let region = w.nodes[1].md.mem_alloc(64).expect("memory");
    for k in 0..20 {
        w.send(|| ep.am_short(ID, k, b""));
        w.send(|| back.am_short(ID, k, b""));
    }
    w.send(|| doomed.am_short(other, 0, b""));
    w.settle();

    device.hold_resets();
    device.inner().fail_qps();
    // What is posted to a queue pair in ERROR, which nobody knows of yet, is sent again later.
    ep.am_short(ID, 20, b"").expect("accepted");
    let (comp, status) = Completion::polled();
    let slices = [region.slice(0..64).expect("a slice")];
    let posted = doomed.am_zcopy(other, &1u64.to_ne_bytes(), &slices, Some(&comp)).expect("accepted");
    assert_eq!(posted, Posted::InProgress);
    drop(comp);
    w.run_until("the reset hangs", |_| device.held_resets() == 1);
    let posts = || [Call::PostSend, Call::PostRecv].map(|c| device.calls(c));
    let before = posts();

    // Sends wait, requests queue up.
    assert!(matches!(ep.am_short(ID, 99, b""), Err(SendError::NoResource)));
    assert!(matches!(ep.am_bcopy(ID, &mut |_| panic!("packed in vain")), Err(SendError::NoResource)));
    assert!(matches!(ep.am_zcopy(ID, b"", &slices, None), Err(SendError::NoResource)));
    let request = |ep: &dyn uct::Endpoint| match ep.am_short(ID, 21, b"") {
        Ok(()) => uct::PendingStatus::Done,
        Err(SendError::NoResource) => uct::PendingStatus::NoResource,
        Err(SendError::Failed(e)) => panic!("{e}"),
    };
    assert!(ep.pending_add(Box::new(request)).is_ok());
    for k in 20..25 {
        back.am_short(ID, k, b"").expect("accepted");
    }
    // A new endpoint gets its address handle; one that is destroyed settles what it has sent.
    let late = w.nodes[1].connect(&w.nodes[0]);
    assert_eq!(status.poll(), None);
    drop(doomed);
    assert_eq!(status.poll(), Some(Err(ErrorKind::Canceled)));
    w.run_for(Duration::from_millis(200));
    assert!(matches!(late.am_short(other, 2, b""), Err(SendError::NoResource)));
    assert_eq!((posts(), device.held_resets()), (before, 1), "nothing is posted meanwhile");

    device.release_resets();
    w.send(|| late.am_short(other, 2, b""));
    for k in 22..40 {
        w.send(|| ep.am_short(ID, k, b""));
    }
    w.run_until("all arrive", |w| numbers(w, 0, ID).len() >= 40 && numbers(w, 1, ID).len() >= 25);
    w.settle();
    w.run_for(Duration::from_millis(200));
    assert!(numbers(&w, 0, ID).into_iter().eq(0..40), "{:?}", numbers(&w, 0, ID));
    assert!(numbers(&w, 1, ID).into_iter().eq(0..25), "{:?}", numbers(&w, 1, ID));
    // Delivered, though it was given up.
    let mut others = numbers(&w, 0, other);
    others.sort_unstable();
    assert_eq!(others, [0, 1, 2]);
    assert_eq!((w.nodes[1].counter("qp.resets"), device.calls(Call::Reset)), (1, 1));
    assert!(w.nodes.iter().all(|n| n.failures.lock().is_empty()));
    let posted = w.nodes[1].counter("rx.buffers_posted");
    assert!(posted > 4000, "{posted} receives are posted again");
    drop((ep, late, back, region, slices));
    assert_clean(w, &device, "after all");
}

#[test]
fn a_message_that_is_being_packed_when_a_reset_begins_is_sent_later() {
    let (mut w, device, ep) = connected("a_message_that_is_being_packed_when_a_reset_begins_is_sent_later");
    device.hold_resets();
    device.inner().fail_qps();
    let sent = ep.am_bcopy(ID, &mut |to| {
        for _ in 0..100 {
            w.nodes[1].worker.progress();
            w.nodes[1].md.ah_cache().run_jobs();
        }
        to[..8].copy_from_slice(&1u64.to_ne_bytes());
        8
    });
    assert_eq!(device.held_resets(), 1);
    assert!(matches!(sent, Err(SendError::NoResource)), "{sent:?}");
    device.release_resets();
    w.send(|| ep.am_short(ID, 1, b""));
    w.run_until("it arrives", |w| numbers(w, 0, ID) == [0, 1]);
    w.settle();
    drop(ep);
    assert_clean(w, &device, "after all");
}

/// Silence is the peer's fault only while it is asked.
#[test]
fn no_peer_is_taken_for_dead_while_a_reset_hangs() {
    let (mut w, device, ep) = connected("no_peer_is_taken_for_dead_while_a_reset_hangs");
    device.hold_resets();
    device.inner().fail_qps();
    ep.am_short(ID, 1, b"").expect("accepted");
    // Ten times the time-out.
    w.run_for(Duration::from_secs(5));
    assert_eq!(device.held_resets(), 1);
    device.release_resets();
    w.run_until("it arrives", |w| numbers(w, 0, ID) == [0, 1]);
    w.settle();
    assert!(w.nodes.iter().all(|n| n.failures.lock().is_empty()));
    drop(ep);
    assert_clean(w, &device, "after all");
}

#[test]
fn an_interface_can_be_closed_while_its_queue_pair_is_reset() {
    // Before anybody has come to the reset; while it hangs; when it is over and nobody knows yet.
    for stage in 0..3 {
        let at = format!("stage {stage}");
        let (mut w, device, ep) = connected("an_interface_can_be_closed_while_its_queue_pair_is_reset");
        let had = device.live();
        let region = w.nodes[1].md.mem_alloc(64).expect("memory");
        device.hold_resets();
        device.inner().fail_qps();
        let (comp, status) = Completion::polled();
        let slices = [region.slice(0..64).expect("a slice")];
        let posted = ep.am_zcopy(ID, &1u64.to_ne_bytes(), &slices, Some(&comp)).expect("accepted");
        assert_eq!(posted, Posted::InProgress);
        drop((comp, slices, region));
        if stage == 0 {
            progress_only(&w);
            w.nodes[1].md.ah_cache().run_jobs();
            progress_only(&w);
        } else {
            w.run_until("the reset hangs", |_| device.held_resets() == 1);
        }
        if stage == 2 {
            device.release_resets();
        }
        assert_eq!(w.nodes[1].counter("qp.resets"), 1, "{at}");
        w.nodes[1].iface = None;
        assert_eq!(status.poll(), Some(Err(ErrorKind::Canceled)), "{at}");
        drop(ep);
        if stage < 2 {
            // The queue pair is with somebody else, and may read and write what it was given.
            assert_eq!((device.calls(Call::DestroyUdQp), device.live()), (0, had), "{at}");
            // That keeps nobody from closing the domain.
            w.nodes.pop();
            let left = if stage == 0 { MockLive::default() } else { had };
            assert_eq!(device.live(), left, "{at}");
            device.release_resets();
        }
        assert_eq!((device.calls(Call::DestroyUdQp), device.calls(Call::Reset)), (1, u64::from(stage > 0)), "{at}");
        assert_clean(w, &device, &at);
    }
}

#[test]
fn a_reset_that_fails_after_a_while_fails_the_interface() {
    // By itself, and because the device is gone, which says more.
    for gone in [false, true] {
        let (mut w, device, ep) = connected("a_reset_that_fails_after_a_while_fails_the_interface");
        hang(&mut w, &device);
        device.fail_always(Call::Reset, Some(EIO));
        if gone {
            device.inject_event(AsyncEvent::DeviceFatal);
        }
        device.release_resets();
        w.run_until("it is told", |w| !w.nodes[1].failures.lock().is_empty());
        let error = w.nodes[1].failures.lock()[0].error.clone();
        let text = error.to_string();
        assert_eq!((error.kind(), error.scope(), error.errno()), (ErrorKind::Io, Scope::Interface, Some(EIO)));
        let words: &[&str] = if gone { &["the device is gone"] } else { &["cannot be reset", "modify_qp"] };
        assert!(words.iter().chain(&["sim1", "open it again"]).all(|part| text.contains(part)), "{text}");
        assert!(matches!(ep.am_short(ID, 2, b""), Err(SendError::Failed(_))));
        w.run_for(Duration::from_secs(1));
        assert_eq!((w.nodes[1].counter("qp.resets"), device.calls(Call::Reset)), (1, 1), "not tried for ever");
        assert_eq!(w.nodes[1].failures.lock().len(), 1);
        drop(ep);
        assert_clean(w, &device, &text);
    }
}

#[test]
fn a_device_that_goes_while_a_reset_hangs_is_told_at_once() {
    let (mut w, device, ep) = connected("a_device_that_goes_while_a_reset_hangs_is_told_at_once");
    hang(&mut w, &device);
    device.inject_event(AsyncEvent::DeviceFatal);
    device.fail_always(Call::Reset, Some(EIO));
    progress_only(&w);
    assert_eq!(w.nodes[1].failures.lock().len(), 1);
    let text = w.nodes[1].failures.lock()[0].error.to_string();
    assert!(text.contains("sim1") && text.contains("the device is gone"), "{text}");
    assert_eq!(device.held_resets(), 1);
    // It may come to its end before or after the user closes everything.
    w.nodes[1].iface = None;
    device.release_resets();
    drop(ep);
    assert_clean(w, &device, &text);
}

#[test]
fn async_events_are_survived() {
    let (mut w, device) = world("async_events_are_survived");
    let i = w.add_on(device.clone(), &quick());
    let ep = w.nodes[i].connect(&w.nodes[0]);
    w.send(|| ep.am_short(ID, 0, b""));
    let gid = device.inner().gid();
    let events = [
        AsyncEvent::PortError(1),
        AsyncEvent::PortActive(1),
        AsyncEvent::GidChange(1),
        AsyncEvent::LidChange(1),
        AsyncEvent::SmChange(1),
        AsyncEvent::ClientReregister(1),
        AsyncEvent::PkeyChange(1),
        AsyncEvent::NeighbourChange(gid),
        AsyncEvent::Unknown(77),
        AsyncEvent::PortError(9),
    ];
    for (sent, e) in (1u64..).zip(events) {
        device.inject_event(e);
        w.run_for(Duration::from_millis(200));
        w.send(|| ep.am_short(ID, sent, b""));
        w.run_until("it goes on", |w| w.nodes[0].inbox.lock().len() as u64 == sent + 1);
    }
    w.settle();
    drop(ep);
    assert_clean(w, &device, "after all events");
}

#[test]
fn port_down_and_up_within_the_time_out_costs_nothing() {
    let (mut w, device) = world("port_down_and_up_within_the_time_out_costs_nothing");
    let i = w.add_on(device.clone(), &quick());
    let ep = w.nodes[i].connect(&w.nodes[0]);
    w.send(|| ep.am_short(ID, 0, b""));
    w.settle();
    device.inner().set_port_active(false);
    w.send(|| ep.am_short(ID, 1, b""));
    w.run_for(Duration::from_millis(200));
    assert_eq!(w.nodes[0].inbox.lock().len(), 1);
    device.inner().set_port_active(true);
    w.run_until("it arrives", |w| w.nodes[0].inbox.lock().len() == 2);
    assert!(w.nodes[i].failures.lock().is_empty());
    drop(ep);
    assert_clean(w, &device, "after all");
}

#[test]
fn fatal_device_fails_calls_and_closes_cleanly() {
    let (mut w, device) = world("fatal_device_fails_calls_and_closes_cleanly");
    let i = w.add_on(device.clone(), &quick());
    let ep = w.nodes[i].connect(&w.nodes[0]);
    w.send(|| ep.am_short(ID, 0, b""));
    w.settle();
    let region = w.nodes[i].md.mem_alloc(64).expect("memory");
    let (comp, status) = Completion::polled();
    let posted = ep.am_zcopy(ID, b"", &[region.slice(0..64).expect("a slice")], Some(&comp));
    drop(comp);
    device.inner().set_fatal();
    w.run_for(Duration::from_secs(5));
    // Either the endpoint or the whole interface has said so by now.
    match ep.am_short(ID, 1, b"") {
        Err(SendError::Failed(e)) => assert!(e.to_string().contains("sim1"), "{e}"),
        other => panic!("the device is gone: {other:?}"),
    }
    assert!(w.nodes[i].failures.lock().len() <= 1);
    drop(ep);
    w.nodes[i].iface = None;
    assert!(posted.is_err() || status.poll().is_some(), "{status:?}");
    drop(region);
}

#[test]
fn limit_of_address_handles_is_an_error_of_the_endpoint() {
    let (mut w, device) = world("limit_of_address_handles_is_an_error_of_the_endpoint");
    device.set_attr(|a| a.ah_max = 1);
    device.set_max(1, 0, 0);
    let i = w.add_on(device.clone(), &quick());
    w.add(&quick());
    let ep = w.nodes[i].connect(&w.nodes[0]);
    w.send(|| ep.am_short(ID, 0, b""));
    let other = w.nodes[2].iface();
    let params = uct::EpParams::to_iface(&other.device_address(), &other.iface_address());
    let e = w.nodes[i].iface().ep(&params).expect_err("no room");
    assert_eq!((e.kind(), e.errno()), (ErrorKind::NoMemory, Some(ENOMEM)));
    assert!(e.to_string().contains("a limit of 1") && e.to_string().contains("close endpoints"), "{e}");
    // The first goes on, and when it is gone there is room.
    w.send(|| ep.am_short(ID, 1, b""));
    drop(ep);
    w.run_until("the first is freed", |w| w.nodes[i].counter("eps") == 0);
    w.run_for(Duration::from_secs(60));
    let ep = w.nodes[i].connect(&w.nodes[2]);
    w.send(|| ep.am_short(ID, 0, b""));
    w.run_until("there is room", |w| w.nodes[2].inbox.lock().len() == 1);
    drop(ep);
    assert_clean(w, &device, "after all");
}

/// A device whose calls may sleep: while only `progress` and the user's calls run, none of them is made. Resets have tests of
/// their own.
#[test]
fn nothing_that_may_sleep_is_called_by_progress() {
    const MAY_SLEEP: [Call; 5] = [Call::QueryPort, Call::QueryGids, Call::CreateAh, Call::DestroyAh, Call::RegMr];
    let (mut w, device) = world("nothing_that_may_sleep_is_called_by_progress");
    device.set_attr(|a| a.ah_create_sleeps = true);
    let i = w.add_on(device.clone(), &quick());
    let calls = || MAY_SLEEP.map(|c| device.calls(c));
    // More endpoints than needed to use up what the pools hold at first, each with a handle and a window.
    let eps: Vec<_> = (0..200).map(|_| w.nodes[i].connect(&w.nodes[0])).collect();
    for ep in &eps {
        w.send(|| ep.am_short(ID, 0, b""));
    }
    w.settle();
    w.nodes[0].take();

    let (before, created) = (calls(), w.nodes[i].counter("tx.buffers"));
    for event in [AsyncEvent::GidChange(1), AsyncEvent::PortError(1), AsyncEvent::PortActive(1)] {
        device.inject_event(event);
    }
    let (mut sent, mut dry) = (0, 0);
    for _ in 0..20 {
        for ep in &eps {
            match ep.am_bcopy(ID, &mut |to| to.len().min(600)) {
                Ok(_) => sent += 1,
                Err(SendError::NoResource) => dry += 1,
                Err(SendError::Failed(e)) => panic!("{e}"),
            }
        }
        for _ in 0..200 {
            w.nodes[i].worker.progress();
        }
    }
    assert!(sent >= 256 && dry > 0, "{sent} sent, {dry} refused: the pool was not used up");
    assert_eq!(calls(), before, "{MAY_SLEEP:?}");
    assert_eq!(w.nodes[i].counter("tx.buffers"), created);

    // Whoever may sleep does it all, and everything goes on.
    w.run_until("all arrive", |w| w.nodes[0].inbox.lock().len() == sent);
    let [_, gids, _, _, regs] = calls();
    assert_eq!(gids, before[1] + 1, "three events, one reading");
    assert!(regs > before[4]);
    for ep in &eps {
        w.send(|| ep.am_bcopy(ID, &mut |_| 600));
    }
    assert!(w.nodes[i].counter("tx.buffers") > created);
    w.settle();
    drop(eps);
    assert_clean(w, &device, "after all");
}

#[test]
fn a_pool_that_cannot_grow_in_the_background_says_so_when_it_is_empty() {
    let (mut w, device) = world("a_pool_that_cannot_grow_in_the_background_says_so_when_it_is_empty");
    device.set_attr(|a| a.ah_create_sleeps = true);
    let i = w.add_on(device.clone(), &quick());
    let eps: Vec<_> = (0..200).map(|_| w.nodes[i].connect(&w.nodes[0])).collect();
    for ep in &eps {
        w.send(|| ep.am_short(ID, 0, b""));
    }
    w.settle();
    w.nodes[0].take();
    device.fail_always(Call::RegMr, Some(ENOMEM));
    let registered = device.calls(Call::RegMr);
    let (mut sent, mut failed) = (0, None);
    for _ in 0..20 {
        for ep in &eps {
            match ep.am_bcopy(ID, &mut |to| to.len().min(600)) {
                Ok(_) => sent += 1,
                Err(SendError::NoResource) => {}
                Err(SendError::Failed(e)) => {
                    failed.get_or_insert(e);
                    break;
                }
            }
        }
        if failed.is_some() {
            break;
        }
        w.nodes[i].worker.progress();
        w.nodes[i].md.ah_cache().run_jobs();
    }
    let (e, tries) = (failed.expect("an error"), device.calls(Call::RegMr) - registered);
    assert_eq!((e.kind(), e.errno()), (ErrorKind::NoMemory, Some(ENOMEM)));
    assert!(e.to_string().contains("sim1") && e.to_string().contains("ulimit -l"), "{e}");
    assert!(sent >= 256, "{sent}: buffers that are there are used first");
    assert!(tries <= 3, "{tries}: not tried over and over while there are buffers");
    assert!(w.nodes[i].failures.lock().is_empty(), "it is an error of the send, not of the endpoint");
    // With memory it goes on.
    device.clear_scripts();
    w.run_until("all arrive", |w| w.nodes[0].inbox.lock().len() == sent);
    w.settle();
    drop(eps);
    assert_clean(w, &device, "after all");
}

#[test]
fn a_fatal_event_is_told_to_every_endpoint_once_and_at_once() {
    for sleeps in [false, true] {
        let (mut w, device) = world("a_fatal_event_is_told_to_every_endpoint_once_and_at_once");
        device.set_attr(|a| a.ah_create_sleeps = sleeps);
        let mut o = quick();
        // Not by a time-out.
        o.ud.timeout = Duration::from_secs(3600);
        let i = w.add_on(device.clone(), &o);
        let eps: Vec<_> = (0..3).map(|_| w.nodes[i].connect(&w.nodes[0])).collect();
        for ep in &eps {
            w.send(|| ep.am_short(ID, 0, b""));
        }
        w.settle();
        w.nodes[0].motion = uct_tests::world::Motion::Stopped;
        let region = w.nodes[i].md.mem_alloc(64).expect("memory");
        let (comp, status) = Completion::polled();
        let posted = eps[0].am_zcopy(ID, b"", &[region.slice(0..64).expect("a slice")], Some(&comp)).expect("a send");
        assert_eq!(posted, Posted::InProgress);
        drop(comp);
        // The queue pair itself goes on: the kernel's soft-RoCE is like that.
        device.inject_event(AsyncEvent::DeviceFatal);
        w.run_until_within("all are told", Duration::from_secs(1), |w| w.nodes[i].failures.lock().len() == 3);
        assert_eq!(status.poll(), Some(Err(ErrorKind::Io)));
        for f in &*w.nodes[i].failures.lock() {
            let text = f.error.to_string();
            assert_eq!(
                (f.error.kind(), f.error.scope(), f.error.errno()),
                (ErrorKind::Io, Scope::Interface, Some(EIO))
            );
            assert!(text.contains("sim1") && text.contains("gone") && text.contains("open it again"), "{text}");
        }
        for ep in &eps {
            assert!(matches!(ep.am_short(ID, 1, b""), Err(SendError::Failed(_))));
        }
        w.run_for(Duration::from_secs(5));
        assert_eq!(w.nodes[i].failures.lock().len(), 3);
        // The domain is of no use for another interface either.
        let n = &w.nodes[i];
        let again = ud::open(&n.md, &n.worker, 1, &o.params, o.iface.clone(), o.ud.clone(), &o.tuning);
        let e = again.expect_err("refused");
        assert_eq!((e.kind(), e.scope()), (ErrorKind::NoDevice, Scope::Device), "{e}");
        assert!(e.to_string().contains("sim1") && e.to_string().contains("open it again"), "{e}");
        w.nodes[i].iface = None;
        drop((eps, region));
        assert_clean(w, &device, "after all");
    }
}

/// Every message is kept and there is no memory for other buffers, for a minute: it is asked for again after ever longer pauses,
/// by this thread or where it may sleep by another, and the log has one line of it. With memory it goes on by itself.
#[test]
fn memory_that_is_refused_is_asked_for_again_after_pauses() {
    for sleeps in [false, true] {
        let (mut w, device) = world("memory_that_is_refused_is_asked_for_again_after_pauses");
        device.set_attr(|a| a.ah_create_sleeps = sleeps);
        let mut o = quick();
        o.record = false;
        // The sender waits for as long as it takes.
        o.ud.timeout = Duration::from_secs(3600);
        let i = w.add_on(device.clone(), &o);
        let sender = w.add(&o);
        let kept: Arc<Mutex<Vec<uct::AmDesc>>> = Arc::default();
        let k = kept.clone();
        w.nodes[i].iface().on_am(ID, move |m| k.lock().push(m.into_owned())).expect("a handler");
        let ep = w.nodes[sender].connect(&w.nodes[i]);
        w.send(|| ep.am_short(ID, 0, b""));
        w.settle();
        device.fail_always(Call::RegMr, Some(ENOMEM));
        let mut sent = 1;
        let lines = uct_tests::log::lines_of(tracing::Level::WARN, || {
            for _ in 0..1_000_000 {
                if w.nodes[i].counter("rx.no_memory") > 0 && w.nodes[i].counter("rx.buffers_posted") == 0 {
                    break;
                }
                sent += u64::from(ep.am_short(ID, sent, b"").is_ok());
                w.step();
            }
            let before = device.calls(Call::RegMr);
            // As busy as a program that polls.
            for _ in 0..600 {
                w.run_for(Duration::from_millis(100));
                for _ in 0..100 {
                    w.nodes[i].worker.progress();
                }
            }
            let tries = device.calls(Call::RegMr) - before;
            assert!((59..=70).contains(&tries), "asked {tries} times in a minute, the pauses double from 1 ms to 1 s");
        });
        assert_eq!(w.nodes[i].counter("rx.buffers_posted"), 0, "all buffers are kept");
        assert_eq!(lines.len(), 1, "{lines:?}");
        let line = &lines[0];
        assert!(line.contains("receive buffers") && line.contains("reg_mr") && line.contains("ulimit -l"), "{line}");
        // Not by anything that happens to the interface: the timer that it asks for is enough.
        device.clear_scripts();
        w.run_until_within("with memory it goes on", Duration::from_secs(3), |w| {
            w.nodes[i].counter("rx.buffers_posted") > 0
        });
        w.run_until("all arrive", |_| kept.lock().len() as u64 == sent);
        kept.lock().clear();
        w.settle();
        drop(ep);
        assert_clean(w, &device, "after all");
    }
}

#[test]
fn what_an_interface_cannot_be_opened_on_is_named() {
    type Break<'a> = &'a dyn Fn(&Device, &mut NodeOptions);
    let cases: [(Break<'_>, ErrorKind, &[&str]); 6] = [
        (&|d, _| d.inner().set_port_active(false), ErrorKind::NoDevice, &["not active", "ip link"]),
        (&|d, _| assert!(d.inner().remove_gid(d.inner().gid())), ErrorKind::NoDevice, &["no usable GID", "namespace"]),
        (
            &|_, o| o.md.gid_index = uct::config::Units::Is(200),
            ErrorKind::InvalidConfig,
            &["UCX_IB_GID_INDEX", "index 200 of", "10.0.0.2"],
        ),
        (
            &|d, _| {
                d.set_queue_limits(QueueLimits { depth: 1000, qps: 4 });
                d.fail_next(Call::CreateUdQp, EINVAL);
            },
            ErrorKind::Io,
            &["UCX_UD_VERBS_RX_QUEUE_LEN=4096", "the 1000 that the device allows", "create_qp"],
        ),
        (
            &|d, _| {
                d.set_queue_limits(QueueLimits { depth: 10_000, qps: 4 });
                d.fail_next(Call::CreateUdQp, ENOMEM);
            },
            ErrorKind::NoMemory,
            &["4 queue pairs", "ulimit -l", "create_qp"],
        ),
        (&|d, _| d.set_max(0, 0, 1), ErrorKind::NoMemory, &["reg_mr", "ulimit -l"]),
    ];
    for (number, (break_it, kind, words)) in cases.into_iter().enumerate() {
        let (mut w, device) = world("what_an_interface_cannot_be_opened_on_is_named");
        // All that an interface of a device of the kernel makes at open.
        device.set_attr(|a| a.ah_create_sleeps = true);
        let mut o = quick();
        break_it(&device, &mut o);
        let e = w.try_add_on(device.clone(), &o).expect_err("refused");
        let text = e.to_string();
        assert_eq!(e.kind(), kind, "case {number}: {text}");
        for part in ["sim1"].iter().chain(words) {
            assert!(text.contains(part), "case {number}: no `{part}` in: {text}");
        }
        assert_clean(w, &device, &text);
    }
}

#[test]
fn a_port_that_is_down_or_has_shrunk_explains_the_silence() {
    type Break<'a> = &'a dyn Fn(&Device);
    let cases: [(Break<'_>, &[&str]); 2] = [
        (&|d| d.inner().set_port_active(false), &["port 1 is not active", "ip link"]),
        (&|d| d.inner().set_mtu(Mtu::M1024), &["MTU of port 1 fell from 4096 to 1024", "open the interface"]),
    ];
    for sleeps in [false, true] {
        for (break_it, words) in cases {
            let (mut w, device) = world("a_port_that_is_down_or_has_shrunk_explains_the_silence");
            device.set_attr(|a| a.ah_create_sleeps = sleeps);
            let mut o = quick();
            o.ud.timeout = Duration::from_secs(5);
            let i = w.add_on(device.clone(), &o);
            let ep = w.nodes[i].connect(&w.nodes[0]);
            w.send(|| ep.am_short(ID, 0, b""));
            w.settle();
            break_it(&device);
            w.send(|| ep.am_bcopy(ID, &mut |to| to.len().min(4000)));
            w.run_until("the peer is declared dead", |w| !w.nodes[i].failures.lock().is_empty());
            let text = w.nodes[i].failures.lock()[0].error.to_string();
            for part in words {
                assert!(text.contains(part), "no `{part}` in: {text}");
            }
            drop(ep);
            assert_clean(w, &device, &text);
        }
    }
}
