//! What callbacks may do, who owns a received message, and that everything may be dropped in any order.
//! (UCX: the keep-data and alignment parts of test_p2p_am; the rest UCX does not have.)

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use parking_lot::Mutex;
use uct::{
    AmDesc, AmId, Completion, Ep, EpParams, ErrorKind, FailureAction, FlushMode, IfaceParams, Posted, SendError,
    am::HandlerKind,
    ep::{EpFailure, PendingStatus},
};
use uct_tests::{
    check::{Ledger, bytes, region},
    hooks::Hooks,
    on_fabrics,
    world::{Motion, NodeOptions, World},
};

on_fabrics! { sim, soft;
    descriptors_are_kept_and_released_in_any_order,
    descriptors_outlive_the_interface,
    descriptors_are_released_from_another_thread,
    kept_descriptors_do_not_stop_the_sender,
    am_short_keep_data,
    am_short_iov_keep_data,
    am_bcopy_keep_data,
    many2one_am_bcopy,
    no_rx_buffs,
    headroom_and_alignment,
    invalid_alignments_are_refused,
    a_handler_that_sends,
    a_handler_that_connects,
    a_handler_that_destroys_the_endpoint_it_answers_by,
    a_handler_that_closes_the_interface,
    a_handler_that_makes_progress,
    a_handler_that_replaces_itself,
    a_removed_handler_is_dropped_at_once,
    a_handler_that_panics,
    handlers_that_hold_their_endpoints_do_not_leak,
    a_completion_that_destroys_a_failed_endpoint,
    a_completion_that_closes_the_interface,
    an_error_handler_that_destroys_and_reconnects,
    an_error_handler_for_the_whole_peer,
    bcopy_trap_nested_sends_go_first,
    bcopy_trap_destroys_its_endpoint,
    bcopy_trap_closes_the_interface,
    bcopy_trap_panics,
    bcopy_trap_connects_and_progresses,
    every_order_of_drops
}

const ID: AmId = AmId::truncate(1);

fn pair<F: Hooks>(mut w: World<F>, record: bool) -> (World<F>, Ep) {
    w.add(&NodeOptions::default());
    w.add(&NodeOptions { record, ..NodeOptions::default() });
    let ep = w.nodes[0].connect(&w.nodes[1]);
    w.send(|| ep.am_short(AmId::truncate(31), 0, b""));
    w.settle();
    w.nodes[1].take();
    (w, ep)
}

/// A handler that keeps every message.
fn keep<F: Hooks>(w: &World<F>) -> Arc<Mutex<Vec<AmDesc>>> {
    let kept: Arc<Mutex<Vec<AmDesc>>> = Arc::default();
    let k = kept.clone();
    w.nodes[1].iface().on_am(ID, move |m| k.lock().push(m.into_owned())).unwrap();
    kept
}

fn lens() -> Vec<usize> {
    (0..60).map(|i| i * 37 % 1500).collect()
}

fn send_all<F: Hooks>(w: &mut World<F>, ep: &Ep, lens: &[usize]) {
    for (i, &len) in lens.iter().enumerate() {
        let data = bytes(i as u64, len);
        w.send(|| {
            ep.am_bcopy(ID, &mut |to| {
                to[..len].copy_from_slice(&data);
                len
            })
        });
    }
}

fn descriptors_are_kept_and_released_in_any_order<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w, false);
    let kept = keep(&w);
    send_all(&mut w, &ep, &lens());
    w.run_until("all are kept", |_| kept.lock().len() == 60);
    let mut held: Vec<(usize, AmDesc)> = kept.lock().drain(..).enumerate().collect();
    let mut rng = ib::sw::Rng::new(w.seed);
    while !held.is_empty() {
        // More traffic runs through while they are held.
        w.send(|| ep.am_short(AmId::truncate(2), 0, b"unrelated"));
        let (i, desc) = held.swap_remove(rng.below(held.len() as u64) as usize);
        assert_eq!(desc.data(), bytes(i as u64, lens()[i]), "message {i} changed while it was kept");
        drop(desc);
    }
    w.all_home();
    drop(ep);
    w.finish();
}

fn descriptors_outlive_the_interface<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w, false);
    let kept = keep(&w);
    send_all(&mut w, &ep, &lens());
    w.run_until("all are kept", |_| kept.lock().len() == 60);
    let held: Vec<AmDesc> = kept.lock().drain(..).collect();
    drop(ep);
    w.finish();
    for (i, mut desc) in held.into_iter().enumerate() {
        assert_eq!(desc.data(), bytes(i as u64, lens()[i]));
        desc.parts_mut().1.fill(1);
    }
}

fn descriptors_are_released_from_another_thread<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w, false);
    let (tx, rx) = std::sync::mpsc::channel::<AmDesc>();
    let tx = Mutex::new(tx);
    w.nodes[1]
        .iface()
        .on_am(ID, move |m| {
            let _ = tx.lock().send(m.into_owned());
        })
        .unwrap();
    let other = std::thread::spawn(move || {
        let (mut n, mut total) = (0, 0);
        for desc in rx {
            total += desc.data().len();
            drop(desc);
            n += 1;
            if n == 600 {
                break;
            }
        }
        (n, total)
    });
    for _ in 0..10 {
        send_all(&mut w, &ep, &lens());
    }
    w.settle();
    assert_eq!(other.join().unwrap(), (600, 10 * lens().iter().sum::<usize>()));
    w.all_home();
    drop(ep);
    w.finish();
}

fn kept_descriptors_do_not_stop_the_sender<F: Hooks>(mut w: World<F>) {
    w.add(&NodeOptions::default());
    let mut o = NodeOptions { record: false, ..NodeOptions::default() };
    o.iface.rx_queue_len = 64;
    w.add(&o);
    let ep = w.nodes[0].connect(&w.nodes[1]);
    let kept = keep(&w);
    for i in 0..3000 {
        w.send(|| ep.am_short(ID, i, b""));
    }
    w.run_until("all are kept", |_| kept.lock().len() == 3000);
    // Where registering may sleep, a thread of the domain does it.
    w.run_until("receives go on", |w| w.nodes[1].counter("rx.buffers_posted") >= 48);
    let held = std::mem::take(&mut *kept.lock());
    assert!(held.iter().enumerate().all(|(i, d)| d.data() == (i as u64).to_ne_bytes()));
    drop(held);
    w.all_home();
    drop(ep);
    w.finish();
}

/// A kept message stays what it was while many more come.
fn keep_data<F: Hooks>(w: World<F>, send: impl Fn(&Ep, AmId, &[u8]) -> uct::SendResult<()>) {
    let (mut w, ep) = pair(w, false);
    let kept = keep(&w);
    let data = |i: u64| bytes(i, 40);
    for i in 0..30 {
        w.send(|| send(&ep, ID, &data(i)));
    }
    w.run_until("all are kept", |_| kept.lock().len() == 30);
    let held = std::mem::take(&mut *kept.lock());
    for i in 0..3000 {
        w.send(|| send(&ep, ID, &data(1000 + i)));
        kept.lock().clear();
    }
    w.settle();
    for (i, desc) in (0..).zip(held) {
        assert_eq!(desc.data(), data(i), "message {i} changed while it was kept");
    }
    kept.lock().clear();
    w.all_home();
    drop(ep);
    w.finish();
}

fn am_short_keep_data<F: Hooks>(w: World<F>) {
    keep_data(w, |ep, id, data| ep.am_short(id, u64::from_ne_bytes(data[..8].try_into().unwrap()), &data[8..]));
}

fn am_short_iov_keep_data<F: Hooks>(w: World<F>) {
    keep_data(w, |ep, id, data| ep.am_short_iov(id, &[&data[..7], &data[7..]].map(std::io::IoSlice::new)));
}

fn am_bcopy_keep_data<F: Hooks>(w: World<F>) {
    keep_data(w, |ep, id, data| {
        ep.am_bcopy(id, &mut |to| {
            to[..data.len()].copy_from_slice(data);
            data.len()
        })
        .map(drop)
    });
}

/// Ten senders, a thousand of the longest messages in all, and a receiver that keeps every fourth.
fn many2one_am_bcopy<F: Hooks>(mut w: World<F>) {
    const SENDERS: usize = 10;
    w.add(&NodeOptions { record: false, ..NodeOptions::default() });
    for _ in 0..SENDERS {
        let mut o = NodeOptions::default();
        o.iface.rx_queue_len = 64;
        w.add(&o);
    }
    type Got = (Vec<Vec<u8>>, Vec<AmDesc>);
    let got: Arc<Mutex<Got>> = Arc::default();
    let (g, keeps) = (got.clone(), Mutex::new(ib::sw::Rng::new(w.seed)));
    w.nodes[0]
        .iface()
        .on_am(ID, move |m| {
            let mut g = g.lock();
            if keeps.lock().below(4) == 0 { g.1.push(m.into_owned()) } else { g.0.push(m.data().to_vec()) }
        })
        .unwrap();
    let eps: Vec<Ep> = (1..=SENDERS).map(|i| w.nodes[i].connect(&w.nodes[0])).collect();
    let max = w.nodes[1].iface().attr().am.max_bcopy.unwrap().get();
    let mut rng = ib::sw::Rng::new(w.seed);
    for i in 0..1000u64 {
        let ep = &eps[rng.below(SENDERS as u64) as usize];
        let mut data = bytes(i, max);
        data[..8].copy_from_slice(&i.to_ne_bytes());
        w.send(|| {
            ep.am_bcopy(ID, &mut |to| {
                to.copy_from_slice(&data);
                max
            })
        });
    }
    w.settle();
    let count = |g: &Got| g.0.len() + g.1.len();
    w.run_until("all arrive", |_| count(&got.lock()) == 1000);
    let (read, kept) = std::mem::take(&mut *got.lock());
    assert!((100..500).contains(&kept.len()), "{} kept", kept.len());
    let mut seen = std::collections::BTreeSet::new();
    for data in read.iter().map(|d| &d[..]).chain(kept.iter().map(|d| d.data())) {
        let i = u64::from_ne_bytes(data[..8].try_into().unwrap());
        assert!(seen.insert(i) && data.len() == max && data[8..] == bytes(i, max)[8..], "message {i}");
    }
    drop(kept);
    w.all_home();
    drop(eps);
    w.finish();
}

/// The receiver keeps everything until it has no buffer left: the sender is refused, nobody is blamed, and when the buffers
/// come back everything goes on.
fn no_rx_buffs<F: Hooks>(mut w: World<F>) {
    w.add(&NodeOptions::default());
    let mut o = NodeOptions { record: false, ..NodeOptions::default() };
    (o.iface.rx_queue_len, o.iface.rx_max_bufs) = (256, 1024);
    w.add(&o);
    let ep = w.nodes[0].connect(&w.nodes[1]);
    let kept = keep(&w);
    let mut next = 0;
    w.run_until("no buffer is left, and the sender is refused", |w| {
        let refused = loop {
            match ep.am_short(ID, next, b"") {
                Ok(()) => next += 1,
                Err(e) => break e.is_no_resource(),
            }
        };
        refused && w.nodes[1].counter("rx.buffers_posted") == 0
    });
    assert_eq!(w.nodes[1].counter("rx.buffers"), 1024, "not one more");
    assert!((1000..=1024).contains(&kept.lock().len()), "{} kept", kept.lock().len());
    assert!(matches!(ep.am_short(ID, next, b""), Err(SendError::NoResource)));
    let mut read = 0u64;
    let end = next + 500;
    w.run_until("all arrive", |_| {
        while next < end && ep.am_short(ID, next, b"").is_ok() {
            next += 1;
        }
        for d in kept.lock().drain(..) {
            assert_eq!(d.data(), read.to_ne_bytes());
            read += 1;
        }
        read == end
    });
    assert!(w.nodes.iter().all(|n| n.failures.lock().is_empty()));
    w.all_home();
    drop(ep);
    w.finish();
}

fn headroom_and_alignment<F: Hooks>(mut w: World<F>) {
    w.add(&NodeOptions::default());
    let from = region(&*w.nodes[0].md, &[0xab; 33]);
    let mut rng = ib::sw::Rng::new(w.seed);
    let mut cases: Vec<(usize, usize, usize)> = Vec::new();
    for headroom in [0, 1, 8, 40, 47, 48, 49, 64, 200, 5000] {
        for align in [0, 1, 2, 16, 64, 4096] {
            let offset = if align > 1 { rng.below(align as u64) as usize } else { 0 };
            cases.push((headroom, align, 0));
            cases.push((headroom, align, offset));
        }
    }
    for (headroom, align, offset) in cases {
        let mut o = NodeOptions { record: false, ..NodeOptions::default() };
        // Few buffers: there are many cases.
        o.iface.rx_queue_len = 8;
        o.ud.rx_queue_len_init = 8;
        o.params = IfaceParams::default().rx_headroom(headroom).alignment(align, offset);
        let to = w.add(&o);
        let kept: Arc<Mutex<Vec<AmDesc>>> = Arc::default();
        let k = kept.clone();
        w.nodes[to].iface().on_am(ID, move |m| k.lock().push(m.into_owned())).unwrap();
        let ep = w.nodes[0].connect(&w.nodes[to]);
        let max = w.nodes[to].iface().attr().am.max_bcopy.unwrap().get();
        for len in [0, 1, 100, max] {
            w.send(|| {
                ep.am_bcopy(ID, &mut |b| {
                    b[..len].fill(0xab);
                    len
                })
            });
        }
        // The other kinds: a short message, one in pieces, a zero-copy one.
        w.send(|| ep.am_short(ID, u64::from_ne_bytes([0xab; 8]), &[0xab; 5]));
        w.send(|| ep.am_short_iov(ID, &[std::io::IoSlice::new(&[0xab; 3]), std::io::IoSlice::new(&[0xab; 4])]));
        let iov = [from.slice(0..33).unwrap()];
        let _posted = w.send(|| ep.am_zcopy(ID, &[0xab; 2], &iov, None));
        w.run_until("all are kept", |_| kept.lock().len() == 7);
        let lens: Vec<usize> = kept.lock().iter().map(|d| d.data().len()).collect();
        assert_eq!(lens, [0, 1, 100, max, 13, 7, 35]);
        for d in kept.lock().iter_mut() {
            assert_eq!((d.data().as_ptr() as usize + offset) % align.max(1), 0, "{headroom} {align} {offset}");
            let (head, data) = d.parts_mut();
            assert_eq!(head.len(), headroom);
            assert_eq!(head.as_ptr_range().end, data.as_ptr(), "adjacent");
            // All of it belongs to the user.
            head.fill(0xff);
        }
        assert!(kept.lock().iter().all(|d| d.data().iter().all(|b| *b == 0xab)), "headroom overlaps another message");
        kept.lock().clear();
        drop((ep, iov));
        w.nodes[to].iface = None;
    }
    drop(from);
    w.finish();
}

fn invalid_alignments_are_refused<F: Hooks>(w: World<F>) {
    let w = w.nodes(1);
    let n = &w.nodes[0];
    for (align, offset, words) in [
        (3, 0, "am_alignment 3"),
        (0, 11, "am_align_offset 11 without am_alignment"),
        (8, 8, "am_align_offset 8: less than am_alignment 8"),
        (8, 11, "am_align_offset 11"),
        (1 << 21, 0, "am_alignment 2097152"),
    ] {
        let params = IfaceParams::default().alignment(align, offset);
        let e = ud::open(&n.md, &n.worker, 1, &params, Default::default(), Default::default(), &Default::default())
            .expect_err("refused");
        assert_eq!(e.kind(), ErrorKind::InvalidParam);
        assert!(e.to_string().contains(words), "{e}");
    }
    w.finish();
}

fn a_handler_that_sends<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w, true);
    // Answers every message; what cannot go now is queued, behind what is queued already.
    let back = Arc::new(w.nodes[1].connect(&w.nodes[0]));
    let b = back.clone();
    w.nodes[1]
        .iface()
        .on_am(ID, move |m| {
            let n = u64::from_ne_bytes(m.data()[..8].try_into().unwrap());
            if let Err(SendError::NoResource) = b.am_short(AmId::truncate(2), n, b"") {
                let f = move |ep: &dyn uct::Endpoint| match ep.am_short(AmId::truncate(2), n, b"") {
                    Ok(()) => PendingStatus::Done,
                    Err(_) => PendingStatus::NoResource,
                };
                if let Err(uct::ep::PendingRefused::Busy(mut f)) = b.pending_add(Box::new(move |e| f(e))) {
                    assert_eq!(f(&**b), PendingStatus::Done);
                }
            }
        })
        .unwrap();
    for i in 0..2000 {
        w.send(|| ep.am_short(ID, i, b""));
    }
    w.run_until("all are answered", |w| w.nodes[0].inbox.lock().len() == 2000);
    assert!(w.nodes[0].take().iter().enumerate().all(|(i, m)| m.data == (i as u64).to_ne_bytes()));
    w.all_home();
    drop((ep, back));
    w.finish();
}

fn a_handler_that_connects<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w, true);
    let made: Arc<Mutex<Vec<Ep>>> = Arc::default();
    let m = made.clone();
    let iface = w.nodes[1].iface().transport().clone();
    let params = EpParams::to_iface(&w.nodes[0].iface().device_address(), &w.nodes[0].iface().iface_address());
    w.nodes[1]
        .iface()
        .on_am(ID, move |_| {
            let ep = Ep::from_transport(iface.clone().create_ep(&params).unwrap());
            m.lock().push(ep);
        })
        .unwrap();
    for i in 0..20 {
        w.send(|| ep.am_short(ID, i, b""));
    }
    w.run_until("all connect", |_| made.lock().len() == 20);
    let eps = std::mem::take(&mut *made.lock());
    for e in &eps {
        w.send(|| e.am_short(AmId::truncate(3), 0, b""));
    }
    w.run_until("all arrive", |w| w.nodes[0].inbox.lock().len() == 20);
    w.all_home();
    drop((ep, eps));
    w.finish();
}

fn a_handler_that_destroys_the_endpoint_it_answers_by<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w, true);
    // The first endpoint back is the other end of ours; the later ones are not.
    let claimed = w.nodes[1].connect(&w.nodes[0]);
    for round in 0..10 {
        let slot = Arc::new(Mutex::new(Some(w.nodes[1].connect(&w.nodes[0]))));
        let ledger = Ledger::new();
        let (s, l) = (slot.clone(), ledger.clone());
        w.nodes[1]
            .iface()
            .on_am(ID, move |_| {
                let Some(ep) = s.lock().take() else { return };
                let _ = ep.am_short(AmId::truncate(2), 0, b"");
                let comp = l.completion();
                let _ = ep.flush(FlushMode::Local, Some(&comp));
                drop(comp);
                let fired = l.fired();
                drop(ep);
                assert_eq!(l.fired(), fired, "a completion fired inside the handler");
            })
            .unwrap();
        w.send(|| ep.am_short(ID, round, b""));
        w.run_until("it is destroyed", |_| slot.lock().is_none() && ledger.open() == 0);
    }
    w.settle();
    drop((ep, claimed));
    w.finish();
}

fn a_handler_that_closes_the_interface<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w, false);
    let calls = Arc::new(AtomicUsize::new(0));
    let iface = Arc::new(Mutex::new(None));
    let (c, i) = (calls.clone(), iface.clone());
    let back = w.nodes[1].connect(&w.nodes[0]);
    w.nodes[1]
        .iface()
        .on_am(ID, move |_| {
            c.fetch_add(1, Ordering::Relaxed);
            drop(i.lock().take());
        })
        .unwrap();
    let ledger = Ledger::new();
    w.nodes[1].motion = Motion::Stopped;
    let mut n = 0;
    while ep.am_short(ID, n, b"").is_ok() {
        n += 1;
    }
    assert!(n > 1);
    for _ in 0..20 {
        w.step();
    }
    let comp = ledger.completion();
    assert_eq!(back.check(Some(&comp)).unwrap(), Posted::InProgress);
    drop(comp);
    *iface.lock() = w.nodes[1].iface.take();
    w.nodes[1].motion = Motion::User;
    w.run_until("it is closed", |_| iface.lock().is_none());
    assert_eq!(ledger.fired(), 1, "settled by the end of that progress");
    for _ in 0..20 {
        w.step();
    }
    assert_eq!(calls.load(Ordering::Relaxed), 1, "called after close");
    drop((ep, back));
    w.finish();
}

fn a_handler_that_makes_progress<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w, true);
    let iface = w.nodes[1].iface().transport().clone();
    let depth = Arc::new(AtomicUsize::new(0));
    let inbox = w.nodes[1].inbox.clone();
    w.nodes[1]
        .iface()
        .on_am(ID, move |m| {
            assert_eq!(depth.fetch_add(1, Ordering::Relaxed), 0, "a handler inside a handler");
            for _ in 0..3 {
                iface.progress();
            }
            inbox.lock().push(uct_tests::world::Received { id: 1, ep: m.ep_id(), data: m.data().to_vec() });
            depth.fetch_sub(1, Ordering::Relaxed);
        })
        .unwrap();
    for i in 0..500 {
        w.send(|| ep.am_short(ID, i, b""));
    }
    w.run_until("all arrive", |w| w.nodes[1].inbox.lock().len() == 500);
    assert!(w.nodes[1].take().iter().enumerate().all(|(i, m)| m.data == (i as u64).to_ne_bytes()));
    drop(ep);
    w.finish();
}

fn a_handler_that_replaces_itself<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w, false);
    let iface = w.nodes[1].iface().transport().clone();
    let log: Arc<Mutex<Vec<u8>>> = Arc::default();

    fn install(iface: &Arc<dyn uct::Interface>, log: &Arc<Mutex<Vec<u8>>>, n: u8) {
        let (i, l) = (Arc::downgrade(iface), log.clone());
        let f = Arc::new(move |_: uct::AmMessage<'_>| {
            l.lock().push(n);
            if let Some(i) = i.upgrade() {
                install(&i, &l, n + 1);
            }
        });
        iface.set_am_handler(ID, Some(f), HandlerKind::Sync).unwrap();
    }
    install(&iface, &log, 0);
    for i in 0..100 {
        w.send(|| ep.am_short(ID, i, b""));
    }
    w.run_until("all arrive", |_| log.lock().len() == 100);
    assert_eq!(*log.lock(), (0..100).collect::<Vec<u8>>(), "each takes effect at the next message");
    drop((ep, iface));
    w.finish();
}

fn a_removed_handler_is_dropped_at_once<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w, false);
    let alive = Arc::new(());
    let held = alive.clone();
    w.nodes[1]
        .iface()
        .on_am(ID, move |_| {
            let _held = &held;
        })
        .unwrap();
    w.send(|| ep.am_short(ID, 0, b""));
    w.settle();
    assert_eq!(Arc::strong_count(&alive), 2);
    w.nodes[1].iface().set_am_handler(ID, None, HandlerKind::Sync).unwrap();
    assert_eq!(Arc::strong_count(&alive), 1);
    drop(ep);
    w.finish();
}

fn a_handler_that_panics<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w, true);
    w.nodes[1]
        .iface()
        .on_am(AmId::truncate(9), |m| {
            assert!(m.data().is_empty(), "a handler that panics");
        })
        .unwrap();
    for i in 0..100 {
        let id = if i % 10 == 5 { AmId::truncate(9) } else { ID };
        loop {
            match ep.am_short(id, i, b"") {
                Ok(()) => break,
                Err(SendError::NoResource) => drop(catch_unwind(AssertUnwindSafe(|| w.step()))),
                Err(e) => panic!("{e}"),
            }
        }
    }
    let end = w.now() + w.fabric.patience();
    while w.nodes[1].inbox.lock().len() < 90 && w.now() < end {
        drop(catch_unwind(AssertUnwindSafe(|| w.step())));
    }
    let got: Vec<u64> = w.nodes[1].take().iter().map(|m| u64::from_ne_bytes(m.data[..8].try_into().unwrap())).collect();
    assert_eq!(got, (0..100).filter(|i| i % 10 != 5).collect::<Vec<_>>(), "the others are delivered, in order");
    // The buffer that was with the handler is home as well.
    w.all_home();
    drop(ep);
    w.finish();
}

fn handlers_that_hold_their_endpoints_do_not_leak<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w, true);
    let back = w.nodes[1].connect(&w.nodes[0]);
    w.nodes[1]
        .iface()
        .on_am(ID, move |_| {
            let _ = back.am_short(ID, 0, b"");
        })
        .unwrap();
    w.send(|| ep.am_short(ID, 0, b""));
    w.send(|| ep.am_short(ID, 0, b""));
    w.settle();
    drop(ep);
    // Checks that nobody holds the domain any more.
    w.finish();
}

fn with_error_handler<F: Hooks>(
    w: &mut World<F>,
    f: impl Fn(&EpFailure) -> FailureAction + Send + Sync + 'static,
) -> usize {
    let o = NodeOptions { params: IfaceParams::default().on_error(Arc::new(f)), ..NodeOptions::default() };
    w.add(&o)
}

fn a_completion_that_destroys_a_failed_endpoint<F: Hooks>(mut w: World<F>) {
    let reported = Arc::new(AtomicUsize::new(0));
    let r = reported.clone();
    with_error_handler(&mut w, move |_| {
        r.fetch_add(1, Ordering::Relaxed);
        FailureAction::Endpoint
    });
    w.add(&NodeOptions::default());
    let ep = w.nodes[0].connect(&w.nodes[1]);
    w.send(|| ep.am_short(ID, 0, b""));
    w.settle();
    w.nodes[1].motion = Motion::Stopped;
    let slot = Arc::new(Mutex::new(Some(ep)));
    let s = slot.clone();
    let comp = Completion::new(move |r| {
        assert_eq!(r, Err(ErrorKind::EndpointTimeout));
        let ep = s.lock().take();
        drop(ep);
    });
    {
        let guard = slot.lock();
        let ep = guard.as_ref().unwrap();
        let _posted = ep.am_zcopy(ID, b"x", &[], Some(&comp)).unwrap();
        ep.invalidate().unwrap();
    }
    drop(comp);
    w.run_until("it is destroyed", |_| slot.lock().is_none());
    for _ in 0..20 {
        w.step();
    }
    assert_eq!(reported.load(Ordering::Relaxed), 0, "the error handler was called for a destroyed endpoint");
    w.finish();
}

fn a_completion_that_closes_the_interface<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w, true);
    let iface = Arc::new(Mutex::new(None));
    let ledger = Ledger::new();
    w.nodes[1].motion = Motion::Stopped;
    let i = iface.clone();
    let comp = Completion::new(move |_| drop(i.lock().take()));
    let _posted = ep.am_zcopy(ID, b"x", &[], Some(&comp)).unwrap();
    drop(comp);
    let comp = ledger.completion();
    let _posted = ep.flush(FlushMode::Local, Some(&comp)).unwrap();
    drop(comp);
    *iface.lock() = w.nodes[0].iface.take();
    w.nodes[1].motion = Motion::User;
    w.run_until("it is closed", |_| iface.lock().is_none());
    assert_eq!(ledger.open(), 0);
    drop(ep);
    w.finish();
}

fn an_error_handler_that_destroys_and_reconnects<F: Hooks>(mut w: World<F>) {
    let slot: Arc<Mutex<Option<Ep>>> = Arc::default();
    type Make = Box<dyn Fn() -> Ep + Send>;
    let again: Arc<Mutex<Option<Make>>> = Arc::default();
    let (s, a) = (slot.clone(), again.clone());
    with_error_handler(&mut w, move |f| {
        assert_eq!(f.user_data, 77);
        let old = s.lock().take();
        drop(old);
        let new = a.lock().as_ref().map(|f| f());
        *s.lock() = new;
        FailureAction::Endpoint
    });
    w.add(&NodeOptions::default());
    let params =
        EpParams::to_iface(&w.nodes[1].iface().device_address(), &w.nodes[1].iface().iface_address()).user_data(77);
    let iface = w.nodes[0].iface().transport().clone();
    let make = move || Ep::from_transport(iface.clone().create_ep(&params).unwrap());
    *slot.lock() = Some(make());
    *again.lock() = Some(Box::new(make));
    for _ in 0..5 {
        let old = slot.lock().as_ref().unwrap().id();
        slot.lock().as_ref().unwrap().invalidate().unwrap();
        w.run_until("it is replaced", |_| slot.lock().as_ref().unwrap().id() != old);
    }
    w.run_until("the new one works", |_| slot.lock().as_ref().unwrap().am_short(ID, 0, b"").is_ok());
    w.run_until("it arrives", |w| w.nodes[1].inbox.lock().len() == 1);
    *again.lock() = None;
    let ep = slot.lock().take();
    drop(ep);
    w.finish();
}

fn an_error_handler_for_the_whole_peer<F: Hooks>(mut w: World<F>) {
    let told: Arc<Mutex<Vec<u64>>> = Arc::default();
    let t = told.clone();
    with_error_handler(&mut w, move |f| {
        t.lock().push(f.ep_id);
        FailureAction::WholePeer
    });
    w.add(&NodeOptions::default());
    w.add(&NodeOptions::default());
    let eps: Vec<Ep> = (0..4).map(|_| w.nodes[0].connect(&w.nodes[1])).collect();
    let other = w.nodes[0].connect(&w.nodes[2]);
    w.send(|| other.am_short(ID, 0, b""));
    w.settle();
    eps[2].invalidate().unwrap();
    w.run_until("all are told", |_| told.lock().len() == 4);
    for _ in 0..20 {
        w.step();
    }
    let mut ids = told.lock().clone();
    ids.sort_unstable();
    let mut want: Vec<u64> = eps.iter().map(|e| e.id()).collect();
    want.sort_unstable();
    assert_eq!(ids, want, "each once, and no other");
    w.send(|| other.am_short(ID, 0, b""));
    drop((eps, other));
    w.finish();
}

fn bcopy_trap_nested_sends_go_first<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w, true);

    fn nested(ep: &Ep, depth: u8) -> Result<usize, SendError> {
        ep.am_bcopy(AmId::truncate(depth), &mut |to| {
            if depth > 0 {
                // Inside a closure nothing may wait.
                let _ = nested(ep, depth - 1);
            }
            to[0] = depth;
            1
        })
    }
    for _ in 0..100 {
        w.send(|| nested(&ep, 5));
    }
    w.settle();
    let got: Vec<u8> = w.nodes[1].take().iter().map(|m| m.id).collect();
    // Each is preceded by those of its closure.
    assert_eq!(got.iter().filter(|i| **i == 5).count(), 100);
    let mut last = None;
    for id in got {
        if let Some(last) = last {
            assert!(id == last + 1 || last == 5, "{id} after {last}");
        }
        last = Some(id);
    }
    w.all_home();
    drop(ep);
    w.finish();
}

fn bcopy_trap_destroys_its_endpoint<F: Hooks>(w: World<F>) {
    let (mut w, keep) = pair(w, true);
    for _ in 0..200 {
        let ep = w.nodes[0].connect(&w.nodes[1]);
        w.send(|| ep.am_short(AmId::truncate(2), 0, b""));
        let r = ep.am_bcopy(ID, &mut |_| {
            // What dropping the handle calls. Its memory is borrowed here, so the handle itself cannot go.
            ep.destroy_ep();
            3
        });
        assert!(matches!(r, Err(SendError::Failed(e)) if e.kind() == ErrorKind::Closed));
    }
    w.all_home();
    drop(keep);
    w.finish();
}

fn bcopy_trap_closes_the_interface<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w, true);
    let iface = Mutex::new(w.nodes[0].iface.take());
    let r = ep.am_bcopy(ID, &mut |_| {
        drop(iface.lock().take());
        3
    });
    assert!(matches!(r, Err(SendError::Failed(e)) if e.kind() == ErrorKind::Closed));
    drop(ep);
    w.nodes[1].take();
    w.finish();
}

fn bcopy_trap_panics<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w, true);
    // More often than there are window slots, queue credits or buffers.
    for i in 0..3000 {
        let r = catch_unwind(AssertUnwindSafe(|| {
            ep.am_bcopy(ID, &mut |_| std::panic::resume_unwind(Box::new("a pack closure that panics")))
        }));
        assert!(r.is_err(), "refused at round {i}: a slot is lost");
        let r = ep.am_bcopy(ID, &mut |to| to.len() + 1);
        assert!(matches!(r, Err(SendError::Failed(e)) if e.kind() == ErrorKind::InvalidParam));
    }
    w.send(|| ep.am_short(ID, 5, b""));
    w.all_home();
    assert_eq!(w.nodes[1].take().len(), 1);
    drop(ep);
    w.finish();
}

fn bcopy_trap_connects_and_progresses<F: Hooks>(w: World<F>) {
    let (mut w, ep) = pair(w, true);
    let mut made = Vec::new();
    for i in 0..20u8 {
        let (node, peer) = (&w.nodes[0], &w.nodes[1]);
        let r = ep.am_bcopy(ID, &mut |to| {
            made.push(node.connect(peer));
            for _ in 0..3 {
                node.worker.progress();
            }
            to[0] = i;
            1
        });
        if matches!(r, Err(SendError::NoResource)) {
            w.step();
        }
    }
    w.settle();
    let got: Vec<u8> = w.nodes[1].take().iter().map(|m| m.data[0]).collect();
    assert!(got.windows(2).all(|p| p[0] < p[1]) && !got.is_empty());
    w.all_home();
    drop((made, ep));
    w.finish();
}

/// Everything that can be dropped, in every order, with traffic outstanding.
fn every_order_of_drops<F: Hooks>(w: World<F>) {
    const THINGS: usize = 7;
    let mut order: Vec<usize> = (0..THINGS).collect();
    let mut all = Vec::new();
    permutations(&mut order, 0, &mut all);
    // A sample, chosen by the seed: other seeds try others.
    let mut rng = ib::sw::Rng::new(w.seed);
    if F::NAME != "sim" {
        all = (0..60).map(|_| all[rng.below(all.len() as u64) as usize].clone()).collect();
    } else {
        all.retain(|_| rng.below(8) == 0);
    }
    for order in all {
        let mut w = World::<F>::with_seed("every_order_of_drops", w.seed);
        let mut o = NodeOptions { record: false, ..NodeOptions::default() };
        o.iface.rx_queue_len = 32;
        o.ud.rx_queue_len_init = 32;
        w.add(&o);
        w.add(&o);
        let ep = w.nodes[0].connect(&w.nodes[1]);
        let back = w.nodes[1].connect(&w.nodes[0]);
        let kept: Arc<Mutex<Vec<AmDesc>>> = Arc::default();
        let k = kept.clone();
        w.nodes[1].iface().on_am(ID, move |m| k.lock().push(m.into_owned())).unwrap();
        w.send(|| ep.am_short(ID, 0, b"kept"));
        w.run_until("one is kept", |_| kept.lock().len() == 1);
        let r = region(&*w.nodes[1].md, b"zero-copy");
        let ledger = Ledger::new();
        let comp = ledger.completion();
        w.send(|| back.am_zcopy(ID, b"h", &[r.slice(0..9).unwrap()], Some(&comp)).map(drop));
        let _ = back.am_short(ID, 1, b"");
        let _ = back.flush(FlushMode::Local, Some(&comp));
        let _ = back.pending_add(Box::new(|_| PendingStatus::NoResource));
        let _ = ep.am_short(ID, 2, b"");

        let node = w.nodes.remove(1);
        let device = node.device.clone();
        let cache_probe = Arc::downgrade(&node.md);
        let (md, worker, iface) = (node.md, node.worker, node.iface);
        let (mut md, mut worker, mut iface, mut back, mut comp) =
            (Some(md), Some(worker), iface, Some(back), Some(comp));
        let (mut r, mut desc) = (Some(r), kept.lock().pop());
        for thing in &order {
            match thing {
                0 => drop(md.take()),
                1 => drop(worker.take()),
                2 => drop(iface.take()),
                3 => drop(back.take()),
                4 => drop(r.take()),
                5 => drop(desc.take()),
                _ => drop(comp.take()),
            }
            w.step();
        }
        assert_eq!(ledger.all().len(), 1, "settled once, in the order {order:?}");
        assert!(cache_probe.upgrade().is_none(), "the domain leaked in the order {order:?}");
        let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
        // Address handles are destroyed by a thread of the domain.
        while !F::device_leaks(&device).is_empty() && F::NAME != "sim" && std::time::Instant::now() < end {
            std::thread::yield_now();
        }
        let leaks = F::device_leaks(&device);
        assert!(leaks.is_empty(), "{leaks:?} in the order {order:?}");
        drop(ep);
        w.finish();
    }
    w.finish();
}

fn permutations(of: &mut Vec<usize>, from: usize, out: &mut Vec<Vec<usize>>) {
    if from + 1 >= of.len() {
        out.push(of.clone());
        return;
    }
    for i in from..of.len() {
        of.swap(from, i);
        permutations(of, from + 1, out);
        of.swap(from, i);
    }
}
