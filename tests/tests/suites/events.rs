//! Sleeping and being woken: arm, event fds, `Worker::wait`. No wake-up may be lost, whoever takes the packets.
//! (UCX: test_event.)

use std::{
    sync::{
        Arc, Barrier,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use uct::{
    AmId, Ep, EpParams, Worker, WorkerParams,
    am::HandlerKind,
    ep::PendingStatus,
    iface::{Arm, Events},
};
use uct_tests::{
    fabric::{Fabric, Sim, Soft},
    fd::is_readable,
    hooks::Hooks,
    on_fabrics,
    world::{Motion, NodeOptions, World},
};

on_fabrics! { sim, soft;
    am_no_fc,
    armed_and_the_thread_takes_the_message,
    armed_and_the_thread_takes_the_ack,
    armed_and_the_thread_finds_the_peer_dead,
    busy_while_there_is_work,
    after_close_there_are_no_events;
    only sim; slow_address_handles_wake
}

const ID: AmId = AmId::truncate(1);
const ALL: Events = Events::all();

fn pair<F: Hooks>(w: World<F>) -> (World<F>, Ep) {
    let mut w = w.nodes(2);
    let ep = w.nodes[0].connect(&w.nodes[1]);
    w.send(|| ep.am_short(ID, 0, b""));
    w.settle();
    w.nodes[1].take();
    (w, ep)
}

/// Progresses node `i` until it may sleep.
fn arm<F: Hooks>(w: &World<F>, i: usize) {
    let n = &w.nodes[i];
    while n.worker.progress() > 0 || n.iface().arm(ALL).unwrap() == Arm::Busy {}
}

/// Lets the network work without any node's doing.
fn let_arrive<F: Hooks>(w: &mut World<F>, fd: i32) {
    let motions: Vec<Motion> = w.nodes.iter().map(|n| n.motion).collect();
    w.nodes.iter_mut().for_each(|n| n.motion = Motion::Stopped);
    let end = Instant::now() + Duration::from_secs(20);
    while !is_readable(fd) && w.step().is_some() && Instant::now() < end {}
    for (n, m) in w.nodes.iter_mut().zip(motions) {
        n.motion = m;
    }
}

fn am_no_fc<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w);
    let fd = w.nodes[1].iface().event_fd().expect("an event fd");
    let mut spurious = 0;
    for i in 0..200 {
        w.nodes[0].worker.progress();
        arm(&w, 1);
        spurious += usize::from(is_readable(fd));
        w.send(|| ep.am_short(ID, i, b""));
        let_arrive(&mut w, fd);
        assert!(is_readable(fd), "no event for message {i}");
        w.run_until("it is delivered", |w| w.nodes[1].inbox.lock().len() as u64 == i + 1);
        w.settle();
    }
    assert!(spurious <= 2, "{spurious} of 200 events came without a message");
    drop(ep);
    w.finish();
}

fn armed_and_the_thread_takes_the_message<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w);
    let fd = w.nodes[1].iface().event_fd().unwrap();
    for round in 0..50 {
        arm(&w, 1);
        ep.am_short(ID, round, b"").unwrap();
        w.nodes[0].worker.progress();
        // The progress thread is quicker than the user who is about to sleep, and arms for itself.
        let node = &w.nodes[1];
        let end = Instant::now() + Duration::from_secs(20);
        while node.counter("rx.waiting") == 0 && Instant::now() < end {
            node.iface().progress_async();
            let _ = node.iface().arm_async();
            w.fabric.idle(None);
        }
        assert_eq!(node.counter("rx.waiting"), 1);
        assert!(is_readable(fd), "the thread took the message, and nobody tells the sleeper");
        // The thread itself may sleep, however long the user takes.
        let (own, arm) = node.iface().arm_async().expect("an fd of the thread's own");
        assert!(arm == Arm::Armed && !is_readable(own), "the thread would spin until the user comes");
        assert_eq!(node.iface().arm(ALL).unwrap(), Arm::Busy);
        w.run_until("it is delivered", |w| w.nodes[1].inbox.lock().len() as u64 == round + 1);
        w.settle();
    }
    drop(ep);
    w.finish();
}

fn armed_and_the_thread_takes_the_ack<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w);
    let fd = w.nodes[0].iface().event_fd().unwrap();
    let (comp, status) = uct::Completion::polled();
    let _posted = ep.am_zcopy(ID, b"x", &[], Some(&comp)).unwrap();
    drop(comp);
    arm(&w, 0);
    w.nodes[0].motion = Motion::Stopped;
    let end = Instant::now() + Duration::from_secs(20);
    while !is_readable(fd) && Instant::now() < end {
        w.step();
        w.nodes[0].iface().progress_async();
        let _ = w.nodes[0].iface().arm_async();
    }
    assert!(is_readable(fd));
    assert_eq!(status.poll(), None, "completions are for the user's thread");
    w.nodes[0].motion = Motion::User;
    w.run_until("it completes", |_| status.poll() == Some(Ok(())));
    drop(ep);
    w.finish();
}

/// A user who sleeps learns that the peer is dead, though it is the progress thread that finds out.
fn armed_and_the_thread_finds_the_peer_dead<F: Hooks>(mut w: World<F>) {
    let mut o = NodeOptions::default();
    (o.ud.timeout, o.ud.timer_tick) = (Duration::from_millis(200), Duration::from_millis(5));
    w.add(&o);
    w.add(&o);
    let ep = w.nodes[0].connect(&w.nodes[1]);
    w.send(|| ep.am_short(ID, 0, b""));
    w.settle();
    w.nodes[1].motion = Motion::Stopped;
    ep.am_short(ID, 1, b"").unwrap();
    let fd = w.nodes[0].iface().event_fd().unwrap();
    arm(&w, 0);
    w.nodes[0].motion = Motion::Stopped;
    let end = w.now() + Duration::from_secs(30);
    while !is_readable(fd) && w.now() < end {
        w.run_for(Duration::from_millis(5));
        w.nodes[0].iface().progress_async();
    }
    assert!(is_readable(fd), "found out, and nobody tells the sleeper");
    assert!(w.nodes[0].failures.lock().is_empty(), "the error handler is for the user's thread");
    w.nodes[0].motion = Motion::User;
    w.run_until("it is told", |w| w.nodes[0].failures.lock().len() == 1);
    w.nodes[1].motion = Motion::User;
    drop(ep);
    w.finish();
}

fn busy_while_there_is_work<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w);
    w.nodes[1].motion = Motion::Stopped;
    let mut n = 0;
    while ep.am_short(ID, n, b"").is_ok() {
        n += 1;
    }
    assert!(ep.pending_add(Box::new(|_| PendingStatus::Done)).is_ok());
    // A request that may run.
    assert_eq!(w.nodes[0].iface().arm(ALL).unwrap(), Arm::Busy);
    arm(&w, 0);
    // A failure to report.
    ep.invalidate().unwrap();
    assert_eq!(w.nodes[0].iface().arm(ALL).unwrap(), Arm::Busy);
    w.run_until("it is told", |w| w.nodes[0].failures.lock().len() == 1);
    drop(ep);
    w.finish();
}

fn after_close_there_are_no_events<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w);
    let iface = w.nodes[0].iface().transport().clone();
    w.nodes[0].iface = None;
    assert!(iface.event_fd().is_none() && iface.arm_async().is_none());
    assert!(iface.arm(ALL).is_err());
    assert_eq!((iface.progress(), iface.progress_async()), (0, 0));
    assert_eq!(iface.next_timeout(), None);
    assert!(iface.counters().is_empty());
    assert!(iface.set_am_handler(ID, Some(Arc::new(|_| {})), HandlerKind::Sync).is_err());
    iface.progress_enable(true);
    iface.ring();
    assert!(iface.clone().create_ep(&EpParams::unconnected()).is_err());
    drop((iface, ep));
    w.finish();
}

fn slow_address_handles_wake(mut w: World<Sim>) {
    let mut config = w.fabric.config();
    config.ah_create_sleeps = true;
    w.fabric.next_config = Some(config);
    w.add(&NodeOptions::default());
    w.add(&NodeOptions::default());
    let ep = w.nodes[0].connect(&w.nodes[1]);
    let fd = w.nodes[0].iface().event_fd().unwrap();
    arm(&w, 0);
    assert!(!is_readable(fd));
    w.nodes[0].md.ah_cache().run_jobs();
    assert!(is_readable(fd), "the address handle is there, and nobody tells the sleeper");
    assert_eq!(w.nodes[0].iface().arm(ALL).unwrap(), Arm::Busy);
    w.send(|| ep.am_short(ID, 0, b""));
    w.settle();
    drop(ep);
    w.finish();
}

/// A wait that takes this long was not ended by an event.
const LONG: Duration = Duration::from_secs(15);

fn wait(worker: &Worker) {
    let start = Instant::now();
    worker.wait(LONG).unwrap();
    assert!(start.elapsed() < LONG, "a wake-up was lost");
}

#[test]
fn deferred_work_ends_a_wait() {
    for progress_thread in [false, true] {
        let worker = Worker::new(WorkerParams::default().progress_thread(progress_thread)).unwrap();
        let done = Arc::new(AtomicUsize::new(0));
        let (shared, d) = (worker.shared().clone(), done.clone());
        let barrier = Arc::new(Barrier::new(2));
        let b = barrier.clone();
        let other = std::thread::spawn(move || {
            for _ in 0..200 {
                b.wait();
                let d = d.clone();
                shared.defer(Box::new(move || {
                    d.fetch_add(1, Ordering::Relaxed);
                }));
            }
        });
        for i in 1..=200 {
            barrier.wait();
            while done.load(Ordering::Relaxed) < i {
                if worker.progress() == 0 {
                    wait(&worker);
                }
            }
        }
        other.join().unwrap();
    }
}

/// Two threads, each asleep until the other's message comes, with and without progress threads that may take it first.
#[test]
fn ping_pong_between_sleepers() {
    for progress_thread in [false, true] {
        let mut w = World::<Soft>::new("ping_pong_between_sleepers");
        let mut sides = Vec::new();
        for _ in 0..2 {
            let device = w.fabric.device();
            let md = ib::md::Md::new(device, Default::default(), w.fabric.clock(), w.fabric.executor());
            let mut params = WorkerParams::default().progress_thread(progress_thread);
            params.clock = w.fabric.clock();
            // The thread looks often, to be in the way.
            params.async_tick = Duration::from_millis(1);
            let worker = Worker::new(params).unwrap();
            let o = NodeOptions::default();
            let iface = ud::open(&md, &worker, 1, &o.params, o.iface, o.ud, &o.tuning).unwrap();
            let seen = Arc::new(AtomicUsize::new(0));
            let s = seen.clone();
            iface
                .on_am(ID, move |_| {
                    s.fetch_add(1, Ordering::Relaxed);
                })
                .unwrap();
            iface.progress_enable(true);
            sides.push((md, worker, iface, seen));
        }
        let addr = |i: usize| (sides[i].2.device_address(), sides[i].2.iface_address());
        let (a1, a0) = (addr(1), addr(0));
        let rounds = 1500;
        let threads: Vec<_> = sides
            .into_iter()
            .zip([(a1, true), (a0, false)])
            .map(|((md, worker, iface, seen), ((dev, ifa), first))| {
                std::thread::spawn(move || {
                    let ep = iface.ep(&EpParams::to_iface(&dev, &ifa)).unwrap();
                    let mut sent = 0;
                    while seen.load(Ordering::Relaxed) < rounds || sent < rounds {
                        let due = seen.load(Ordering::Relaxed) + usize::from(first);
                        if sent < due.min(rounds) && ep.am_short(ID, 0, b"").is_ok() {
                            sent += 1;
                            continue;
                        }
                        if worker.progress() == 0 {
                            wait(&worker);
                        }
                    }
                    // The peer may still miss the last one.
                    let (comp, status) = uct::Completion::polled();
                    ep.close(Some(comp));
                    while status.poll().is_none() {
                        if worker.progress() == 0 {
                            wait(&worker);
                        }
                    }
                    (md, worker, iface)
                })
            })
            .collect();
        let ends: Vec<_> = threads.into_iter().map(|t| t.join().unwrap()).collect();
        drop(ends);
    }
}
