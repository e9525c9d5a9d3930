//! The window and the other limits on what is under way, acknowledgements and resends, as far as a user sees them.
//! (UCX: the window, ack and connect groups of test_ud, test_ud_timer.)

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use ib::sw::FilterVerdict;
use parking_lot::Mutex;
use uct::{AmId, Ep, EpParams, FlushMode, Posted, SendError};
use uct_tests::{
    check::{Ledger, fill, region},
    hooks::Hooks,
    on_fabrics,
    packets::Parsed,
    world::{Motion, NodeOptions, World},
};

on_fabrics! { sim, soft;
    basic_tx,
    duplex_tx,
    resend_iov,
    tx_window1,
    tx_window_is_the_setting,
    tx_queue_is_back_pressure,
    unconnected_is_back_pressure,
    psn_wraps_both_ways,
    an_idle_connection_needs_no_timer,
    retransmit1,
    retransmitn,
    every_packet_doubled,
    ep_ids_are_not_used_again,
    connect_iface_many,
    no_handler_is_counted,
    a_full_ready_queue_drops_without_an_ack
}

const ID: AmId = AmId::truncate(1);

/// Node 1 has received the numbers from 0 to `n`, in order.
fn check_numbers<F: Hooks>(w: &mut World<F>, n: u64) {
    w.run_until("all arrive", |w| w.nodes[1].inbox.lock().len() as u64 >= n);
    w.all_home();
    let got = w.nodes[1].take();
    assert_eq!(got.len() as u64, n);
    assert!(got.iter().enumerate().all(|(i, m)| m.data == (i as u64).to_ne_bytes()), "out of order");
}

fn connected<F: Hooks>(w: &mut World<F>) -> Ep {
    let ep = w.nodes[0].connect(&w.nodes[1]);
    w.send(|| ep.am_short(ID, 0, b""));
    w.settle();
    ep
}

fn with_window<F: Hooks>(mut w: World<F>, window: u32) -> World<F> {
    for _ in 0..2 {
        let mut o = NodeOptions::default();
        o.ud.max_window = window;
        w.add(&o);
    }
    w
}

/// What a node has sent.
type Sent = Arc<Mutex<Vec<Parsed>>>;

/// Two nodes, joined both ways, with wide windows, nothing outstanding, and timers that stay out of it. From now on what
/// they send is recorded.
fn wide<F: Hooks>(mut w: World<F>) -> (World<F>, [Ep; 2], [Sent; 2]) {
    for _ in 0..2 {
        let mut o = NodeOptions::default();
        (o.ud.timer_tick, o.ud.timeout) = (Duration::from_secs(10), Duration::from_secs(300));
        w.add(&o);
    }
    let eps = [w.nodes[0].connect(&w.nodes[1]), w.nodes[1].connect(&w.nodes[0])];
    for i in 0..1000 {
        w.send(|| eps[0].am_short(ID, i, b""));
        w.send(|| eps[1].am_short(ID, i, b""));
    }
    w.settle();
    let sent: [Sent; 2] = Default::default();
    for (n, s) in w.nodes.iter().zip(&sent) {
        n.take();
        let s = s.clone();
        F::set_tx_filter(
            &n.device,
            Some(Box::new(move |p| {
                s.lock().push(Parsed::new(p.payload));
                FilterVerdict::Pass
            })),
        );
    }
    (w, eps, sent)
}

fn no_filters<F: Hooks>(w: &World<F>) {
    w.nodes.iter().for_each(|n| F::set_tx_filter(&n.device, None));
}

/// 13 messages in a wide window: all arrive, nobody says a word, and all stay in the sender's window.
fn basic_tx<F: Hooks>(w: World<F>) {
    let (mut w, eps, sent) = wide(w);
    for i in 0..13 {
        eps[0].am_short(ID, i, b"").unwrap();
    }
    w.run_until("all arrive", |w| w.nodes[1].inbox.lock().len() == 13);
    for _ in 0..20 {
        w.turn();
    }
    {
        let (a, b) = (sent[0].lock(), sent[1].lock());
        assert!(a.len() == 13 && a.iter().all(Parsed::is_am), "{a:?}");
        assert!(a.windows(2).all(|p| p[0].psn.wrapping_add(1) == p[1].psn && p[0].ack == p[1].ack));
        assert!(b.is_empty(), "{b:?}");
    }
    assert!(matches!(eps[0].flush(FlushMode::Local, None), Ok(Posted::InProgress)), "acknowledged by nobody");
    no_filters(&w);
    w.all_home();
    drop(eps);
    w.finish();
}

/// Messages in turn carry each other's acks: the one who spoke last has one message left, the other none, and no packet is
/// sent but the messages.
fn duplex_tx<F: Hooks>(w: World<F>) {
    let (mut w, eps, sent) = wide(w);
    for i in 0..5 {
        for (from, ep) in eps.iter().enumerate() {
            ep.am_short(ID, i, b"").unwrap();
            w.run_until("it arrives", |w| w.nodes[1 - from].inbox.lock().len() as u64 == i + 1);
        }
    }
    let (a, b) = (std::mem::take(&mut *sent[0].lock()), std::mem::take(&mut *sent[1].lock()));
    assert!(a.len() == 5 && b.len() == 5 && a.iter().chain(&b).all(Parsed::is_am), "{a:?} {b:?}");
    for i in 0..5 {
        assert_eq!(b[i].ack, a[i].psn, "answer {i}");
        assert!(i == 0 || a[i].ack == b[i - 1].psn, "message {i}");
    }
    assert!(matches!(eps[0].flush(FlushMode::Local, None), Ok(Posted::Done)), "all of it is acknowledged");
    assert!(matches!(eps[1].flush(FlushMode::Local, None), Ok(Posted::InProgress)), "the last one is not");
    no_filters(&w);
    w.all_home();
    drop(eps);
    w.finish();
}

/// A repetition carries what the message said when it was sent, whatever has become of the caller's memory since.
fn resend_iov<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(2);
    let ep = connected(&mut w);
    w.nodes[1].take();
    let lost = Arc::new(AtomicUsize::new(0));
    let l = lost.clone();
    F::set_tx_filter(
        &w.nodes[0].device,
        Some(Box::new(move |p| match Parsed::new(p.payload).is_am() && l.fetch_add(1, Ordering::Relaxed) == 0 {
            true => FilterVerdict::Drop,
            false => FilterVerdict::Pass,
        })),
    );
    let (mut a, mut b) = (*b"scattered ", *b"in pieces");
    w.send(|| ep.am_short_iov(ID, &[&a[..], &b[..]].map(std::io::IoSlice::new)));
    a.fill(0xee);
    b.fill(0xee);
    w.run_until("it arrives", |w| w.nodes[1].inbox.lock().len() == 1);
    assert_eq!(w.nodes[1].take()[0].data, b"scattered in pieces");
    assert!(lost.load(Ordering::Relaxed) >= 2, "the first copy was lost");
    F::set_tx_filter(&w.nodes[0].device, None);
    w.all_home();
    drop(ep);
    w.finish();
}

fn tx_window1<F: Hooks>(w: World<F>) {
    let mut w = with_window(w, 14);
    let ep = connected(&mut w);
    let mut next = 1;
    w.nodes[1].motion = Motion::Stopped;
    let n = fill(&*ep, ID, &mut next);
    assert!((1..=13).contains(&n), "{n} accepted");
    for _ in 0..10 {
        w.step();
        assert!(ep.am_short(ID, 0, b"").is_err(), "nothing was acknowledged");
    }
    w.nodes[1].motion = Motion::User;
    w.send(|| ep.am_short(ID, next, b""));
    check_numbers(&mut w, next + 1);
    drop(ep);
    w.finish();
}

fn tx_window_is_the_setting<F: Hooks>(w: World<F>) {
    let mut w = with_window(w, 14);
    let ep = connected(&mut w);
    let mut next = 1;
    // The window grows with what is acknowledged.
    for _ in 0..500 {
        w.send(|| ep.am_short(ID, next, b""));
        next += 1;
    }
    w.settle();
    assert_eq!(fill(&*ep, ID, &mut next), 13);
    check_numbers(&mut w, next);
    drop(ep);
    w.finish();
}

fn tx_queue_is_back_pressure<F: Hooks>(mut w: World<F>) {
    let mut o = NodeOptions::default();
    o.iface.tx_queue_len = 65;
    w.add(&o);
    w.add(&NodeOptions::default());
    let ep = connected(&mut w);
    let mut next = 1;
    for _ in 0..1000 {
        w.send(|| ep.am_short(ID, next, b""));
        next += 1;
    }
    w.settle();
    let n = fill(&*ep, ID, &mut next);
    assert!(n <= 65, "{n} sends in a queue of 65");
    assert!(n >= 32, "only {n} of 65");
    // Another endpoint shares the queue: it is refused as well, and pack is not called.
    let other = w.nodes[0].connect(&w.nodes[1]);
    let r = other.am_bcopy(ID, &mut |_| panic!("packed, and cannot be sent"));
    assert!(matches!(r, Err(SendError::NoResource)));
    for _ in 0..1000 {
        w.send(|| ep.am_short(ID, next, b""));
        next += 1;
    }
    check_numbers(&mut w, next);
    drop((ep, other));
    w.finish();
}

fn unconnected_is_back_pressure<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(2);
    let ledger = Ledger::new();
    let r = region(&*w.nodes[0].md, b"x");
    let slices = [r.slice(0..1).unwrap()];
    let refuses = |ep: &Ep| {
        let comp = ledger.completion();
        assert!(matches!(ep.am_short(ID, 0, b""), Err(SendError::NoResource)));
        assert!(matches!(ep.am_short_iov(ID, &[]), Err(SendError::NoResource)));
        assert!(matches!(ep.am_bcopy(ID, &mut |_| panic!("packed")), Err(SendError::NoResource)));
        assert!(matches!(ep.am_zcopy(ID, b"", &slices, Some(&comp)), Err(SendError::NoResource)));
    };
    // Not joined with anything.
    let idle = w.nodes[0].iface().ep(&EpParams::unconnected()).unwrap();
    refuses(&idle);
    // No packet has come back yet.
    let ep = w.nodes[0].connect(&w.nodes[1]);
    refuses(&ep);
    w.nodes[1].motion = Motion::Stopped;
    for _ in 0..20 {
        w.step();
    }
    refuses(&ep);
    w.nodes[1].motion = Motion::User;
    w.send(|| ep.am_short(ID, 0, b""));
    refuses(&idle);
    assert!(ledger.all().iter().all(|r| *r == Ok(())), "a refused operation leaves its completion alone");
    check_numbers(&mut w, 1);
    drop((idle, ep, slices, r));
    w.finish();
}

fn psn_wraps_both_ways<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(2);
    let (a, b) = (w.nodes[0].connect(&w.nodes[1]), w.nodes[1].connect(&w.nodes[0]));
    // The 16-bit number starts just below the wrap, and goes round once more.
    let n = if F::NAME == "sim" { 70_000 } else { 3_000 };
    for i in 0..n {
        w.send(|| a.am_short(ID, i, b""));
        if i % 2 == 0 {
            w.send(|| b.am_short(ID, i / 2, b""));
        }
    }
    w.run_until("the answers arrive", |w| w.nodes[0].inbox.lock().len() as u64 == n / 2);
    let got = w.nodes[0].take();
    assert!(got.iter().enumerate().all(|(i, m)| m.data == (i as u64).to_ne_bytes()));
    check_numbers(&mut w, n);
    assert_eq!(w.nodes[0].counter("tx.resends"), 0, "nothing was lost");
    drop((a, b));
    w.finish();
}

fn an_idle_connection_needs_no_timer<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(2);
    let ep = connected(&mut w);
    // The other side keeps an unclaimed endpoint, which is looked after rarely.
    w.run_until("the handshake is over", |w| w.nodes[0].worker.next_timeout().is_none());
    for _ in 0..200 {
        w.step();
        assert_eq!(w.nodes[0].worker.next_timeout(), None);
    }
    assert_eq!(w.nodes[0].counter("tx.probes"), 0);
    w.nodes[1].motion = Motion::Stopped;
    w.send(|| ep.am_short(ID, 1, b""));
    assert!(w.nodes[0].worker.next_timeout().is_some(), "what is under way is watched");
    w.nodes[1].motion = Motion::User;
    check_numbers(&mut w, 2);
    drop(ep);
    w.finish();
}

/// Sends `n` messages whose first copies are all lost.
fn first_copies_lost<F: Hooks>(w: World<F>, n: usize) {
    let mut w = w.nodes(2);
    let ep = connected(&mut w);
    let mut next = 1;
    // Wide enough for all of them at once.
    for _ in 0..200 {
        w.send(|| ep.am_short(ID, next, b""));
        next += 1;
    }
    w.settle();
    let lost = Arc::new(AtomicUsize::new(0));
    let l = lost.clone();
    F::set_tx_filter(
        &w.nodes[0].device,
        Some(Box::new(move |p| {
            let is_message = p.payload.len() == 16;
            if is_message && l.fetch_add(1, Ordering::Relaxed) < n { FilterVerdict::Drop } else { FilterVerdict::Pass }
        })),
    );
    for _ in 0..n {
        w.send(|| ep.am_short(ID, next, b""));
        next += 1;
    }
    check_numbers(&mut w, next);
    assert!(lost.load(Ordering::Relaxed) >= 2 * n, "each was sent again");
    assert!(w.nodes[0].counter("tx.resends") >= n as u64);
    F::set_tx_filter(&w.nodes[0].device, None);
    drop(ep);
    w.finish();
}

fn retransmit1<F: Hooks>(w: World<F>) {
    first_copies_lost(w, 1);
}

fn retransmitn<F: Hooks>(w: World<F>) {
    first_copies_lost(w, 42);
}

fn every_packet_doubled<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(2);
    for n in &w.nodes {
        F::set_tx_filter(&n.device, Some(Box::new(|_| FilterVerdict::Duplicate)));
    }
    let ep = w.nodes[0].connect(&w.nodes[1]);
    for i in 0..500 {
        w.send(|| ep.am_short(ID, i, b""));
    }
    check_numbers(&mut w, 500);
    assert!(w.nodes[1].counter("rx.drop.duplicate") >= 400);
    for n in &w.nodes {
        F::set_tx_filter(&n.device, None);
    }
    drop(ep);
    w.finish();
}

fn ep_ids_are_not_used_again<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(2);
    let mut ids = Vec::new();
    for i in 0..20u64 {
        let ep = w.nodes[0].connect(&w.nodes[1]);
        ids.push(ep.id());
        if i % 2 == 0 {
            w.send(|| ep.am_short(ID, i / 2, b""));
        }
    }
    let mut sorted = ids.clone();
    sorted.sort_unstable();
    sorted.dedup();
    assert_eq!(sorted.len(), 20, "an id was used twice: {ids:x?}");
    assert!(ids.contains(&0) && ids.contains(&0xff_fffe), "the wrap was not crossed: {ids:x?}");
    assert!(!ids.contains(&0xff_ffff), "the id that means nobody");
    w.run_until("all arrive", |w| w.nodes[1].inbox.lock().len() == 10);
    w.finish();
}

fn connect_iface_many<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(2);
    let n = if F::NAME == "sim" { 2000 } else { 200 };
    let eps: Vec<Ep> = (0..n).map(|_| w.nodes[0].connect(&w.nodes[1])).collect();
    w.settle();
    for (i, ep) in eps.iter().enumerate() {
        // Connected: a flush is in progress before that. The send queue is shared, so it may be busy for a moment.
        assert!(matches!(ep.flush(FlushMode::Local, None), Ok(Posted::Done)), "endpoint {i} is not connected");
        w.send(|| ep.am_short(ID, i as u64, b""));
    }
    w.run_until("all arrive", |w| w.nodes[1].inbox.lock().len() == n);
    let mut from: Vec<u64> = w.nodes[1].take().iter().map(|m| m.ep).collect();
    from.sort_unstable();
    from.dedup();
    assert_eq!(from.len(), n, "each has its own endpoint there");
    w.all_home();
    // One address handle for all.
    assert_eq!(w.nodes[0].md.ah_cache().stats().created, 1);
    drop(eps);
    w.finish();
}

fn no_handler_is_counted<F: Hooks>(mut w: World<F>) {
    w.add(&NodeOptions::default());
    w.add(&NodeOptions { record: false, ..NodeOptions::default() });
    let ep = connected(&mut w);
    for i in 1..100 {
        w.send(|| ep.am_short(AmId::truncate(i as u8), i, b""));
    }
    w.run_until("all are dropped", |w| w.nodes[1].counter("rx.no_handler") == 100);
    w.all_home();
    drop(ep);
    w.finish();
}

fn a_full_ready_queue_drops_without_an_ack<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(2);
    let ep = connected(&mut w);
    // The peer computes; its thread queues what arrives, up to a bound.
    w.nodes[1].motion = Motion::ThreadOnly;
    let mut next = 1;
    let mut fed = 0;
    let tick = Duration::from_millis(1);
    let end = w.now() + w.fabric.patience();
    while w.nodes[1].counter("rx.queue_full") == 0 {
        // Beside those that wait there is a window of them under way.
        assert!(fed < 3 * 4096 && w.now() < end, "the queue has no end: {} wait", w.nodes[1].counter("rx.waiting"));
        fed += fill(&*ep, ID, &mut next);
        w.nodes[1].iface().progress_async();
        w.run_for(tick);
    }
    let waiting = w.nodes[1].counter("rx.waiting");
    assert!((4000..=4096).contains(&waiting), "{waiting} wait");
    assert!(fed as u64 >= waiting);
    w.nodes[1].motion = Motion::User;
    check_numbers(&mut w, next);
    assert!(w.nodes.iter().all(|n| n.failures.lock().is_empty()));
    drop(ep);
    w.finish();
}
