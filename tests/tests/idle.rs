//! Doing nothing costs nothing: endpoints at rest have no timers and send no packets; what came goes again.

use std::time::Duration;

use uct::{AmId, Ep, FlushMode, Posted};
use uct_tests::{
    fabric::{Fabric, Sim, Soft},
    world::{NodeOptions, World},
};

const ID: AmId = AmId::truncate(8);

/// Connects `n` endpoints between nodes 0 and 1, all of which have sent a message. Both ends are claimed: nobody looks
/// after strangers.
fn many<F: Fabric>(w: &mut World<F>, n: usize) -> (Vec<Ep>, Vec<Ep>) {
    let (mut eps, mut back) = (Vec::with_capacity(n), Vec::with_capacity(n));
    while eps.len() < n {
        // In batches: a real socket has room for so many packets only.
        let batch: Vec<Ep> = (0..100.min(n - eps.len())).map(|_| w.nodes[0].connect(&w.nodes[1])).collect();
        for ep in &batch {
            w.send(|| ep.am_short(ID, 0, b""));
        }
        let done = eps.len() + batch.len();
        w.run_until("the batch arrives", |w| w.nodes[1].inbox.lock().len() == done);
        back.extend(batch.iter().map(|_| w.nodes[1].connect(&w.nodes[0])));
        eps.extend(batch);
    }
    (eps, back)
}

#[test]
fn ten_thousand_endpoints_at_rest_have_no_timer_and_send_nothing() {
    let mut w: World<Sim> = World::new("ten_thousand_endpoints_at_rest_have_no_timer_and_send_nothing").nodes(2);
    let (eps, _back) = many(&mut w, 10_000);
    // The timers ask for the last acks.
    w.run_for(Duration::from_secs(2));
    let stats = |w: &World<Sim>| [0, 1].map(|i| w.nodes[i].device.stats().tx_packets);
    let before = stats(&w);
    assert_eq!(w.nodes[0].worker.next_timeout(), None, "endpoints at rest have no deadline");
    w.run_for(Duration::from_secs(3600));
    assert_eq!(stats(&w), before, "an hour of nothing");
    assert_eq!(w.nodes[0].counter("eps"), 10_000);
    // Every buffer is back home; one address handle serves all.
    assert_eq!(w.nodes[0].counter("tx.buffers"), w.nodes[0].counter("tx.buffers_free"));
    assert_eq!(w.nodes[0].counter("ah.created"), 1);
    assert_eq!((w.nodes[0].counter("ah.live"), w.nodes[0].counter("rx.waiting")), (1, 0));
    // Each of them still works.
    for ep in eps.iter().step_by(997) {
        w.send(|| ep.am_short(ID, 1, b""));
    }
    w.run_for(Duration::from_secs(2));
    assert!(eps.iter().all(|e| e.flush(FlushMode::Local, None).is_ok_and(|p| p == Posted::Done)));
    assert!(w.nodes[0].failures.lock().is_empty());
}

/// Bytes of the heap that this process has in use.
#[cfg(target_env = "gnu")]
fn heap() -> usize {
    uct_tests::memory::heap_in_use()
}

#[cfg(target_env = "gnu")]
#[test]
fn an_endpoint_at_rest_takes_less_than_two_kilobytes() {
    let mut w: World<Sim> = World::new("an_endpoint_at_rest_takes_less_than_two_kilobytes").nodes(2);
    let first = many(&mut w, 100);
    w.settle();
    let before = heap();
    let eps: Vec<Ep> = (0..5_000).map(|_| w.nodes[0].connect(&w.nodes[1])).collect();
    w.run_until("all are connected", |w| w.nodes[0].counter("rx.acks_new") >= 5_000);
    w.run_for(Duration::from_secs(1));
    // Both sides of each connection are in this process, and other tests run beside this one.
    let each = heap().saturating_sub(before) / 5_000;
    println!("{each} bytes for both sides of a connection at rest");
    assert!(each < 4096, "{each} bytes for both sides");
    drop((first, eps));
}

/// Connects, sends, closes; again and again.
fn churn<F: Fabric>(w: &mut World<F>, rounds: usize) {
    let mut got = 0;
    let base = counts(w);
    for i in 0..rounds {
        let ep = w.nodes[0].connect(&w.nodes[1]);
        w.send(|| ep.am_short(ID, i as u64, b""));
        if i % 3 == 0 {
            ep.close(None);
        } else {
            drop(ep);
        }
        w.step();
        got += w.nodes[1].take().len();
        // Never more than a few that linger until their BYE is answered.
        assert!(w.nodes[0].counter("eps") < 2_000, "{}", w.nodes[0].counter("eps"));
    }
    w.run_until("everything arrived and was closed", |w| {
        got += w.nodes[1].take().len();
        got == rounds && w.nodes[0].counter("eps") == 0 && w.nodes[1].counter("eps") == 0
    });
    let after = counts(w);
    for ((name, b), (_, a)) in base.into_iter().zip(after) {
        assert!(a <= b.max(1) || name.starts_with("tx.") && a <= b + 4096, "{name}: {b} before, {a} after");
    }
    assert!(w.nodes[0].failures.lock().is_empty() && w.nodes[1].failures.lock().is_empty());
    assert_eq!(w.nodes[0].worker.next_timeout(), None);
    assert_eq!(w.nodes[1].worker.next_timeout(), None);
}

/// What must not grow.
fn counts<F: Fabric>(w: &World<F>) -> Vec<(&'static str, u64)> {
    ["eps", "ah.live", "ah.held", "rx.waiting", "tx.buffers"]
        .into_iter()
        .flat_map(|name| w.nodes.iter().map(move |n| (name, n.counter(name))))
        .collect()
}

#[test]
fn connect_and_close_20000_times_on_sim() {
    let mut w: World<Sim> = World::new("connect_and_close_20000_times_on_sim").nodes(2);
    churn(&mut w, 20_000);
    let live = w.nodes[0].device.live();
    assert!(live.ahs <= 1 && live.qps == 1, "{live:?}");
    let net = w.fabric.net.clone();
    drop(w);
    assert_eq!(net.leaks(), Vec::<String>::new());
}

#[test]
fn connect_and_close_without_sharing_of_address_handles() {
    let mut w: World<Sim> = World::new("connect_and_close_without_sharing_of_address_handles");
    let mut o = NodeOptions::default();
    o.md.ah_cache_ttl = Duration::ZERO;
    w.add(&o);
    w.add(&o);
    churn(&mut w, 3_000);
    for n in &w.nodes {
        assert_eq!(n.counter("ah.created"), n.counter("ah.destroyed"));
        assert_eq!(n.device.live().ahs, 0);
    }
}

#[test]
fn connect_and_close_2000_times_on_soft() {
    let fds = || std::fs::read_dir("/proc/self/fd").map(Iterator::count).unwrap_or(0);
    let mut w: World<Soft> = World::new("connect_and_close_2000_times_on_soft").nodes(2);
    churn(&mut w, 2_000);
    drop(w);
    // Whole interfaces as well. Other tests of this file open nothing of this kind while they run on sim.
    let mut before = None;
    for _ in 0..30 {
        let mut w: World<Soft> = World::new("connect_and_close_2000_times_on_soft").nodes(2);
        let ep = w.nodes[0].connect(&w.nodes[1]);
        w.send(|| ep.am_short(ID, 0, b""));
        w.run_until("it arrives", |w| w.nodes[1].inbox.lock().len() == 1);
        drop((ep, w));
        before.get_or_insert_with(fds);
    }
    assert!(fds() <= before.unwrap_or(0) + 4, "{} file descriptors, {before:?} after the first", fds());
}
