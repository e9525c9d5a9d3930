//! The end of endpoints: destroyed with data that nobody has acknowledged yet, while timers and the progress thread go on
//! resending it. Every message that was accepted arrives or the peer is gone, every operation is settled once before the
//! destroy returns, the address handle lives exactly as long as the record needs it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use ib::{sim::Faults, sw::Rng};
use uct::{Completion, Ep, ErrorKind, FlushMode, SendError};
use uct_tests::{
    fabric::{Fabric, Sim, Soft},
    flow::{Flow, Kind, Ledger, draw_message},
    hooks::{Hooks, Weather, lose_first},
    on_fabrics,
    world::{Motion, NodeOptions, World},
};

on_fabrics! { sim, soft;
    destroy_with_unacknowledged_data,
    close_completes_when_all_is_there,
    bye_ends_linger_early,
    a_lost_bye_is_repeated,
    destroy_before_the_handshake_ends,
    destroy_entity_after_send,
}

macro_rules! only_sim {
    ($($name:ident),+ $(,)?) => {
        mod only_sim {
            use super::*;
            $(#[test] fn $name() { super::$name(World::new(stringify!($name))) })+
        }
    };
}

only_sim! {
    destroy_matrix,
    linger_lasts_as_long_as_it_says,
    the_peer_is_gone,
    plain_peers,
    a_quiet_queue_gives_address_handles_back,
}

fn quick() -> NodeOptions {
    let mut o = NodeOptions::default();
    o.ud.timer_tick = Duration::from_millis(2);
    o.ud.timer_backoff = 1.5;
    o.ud.linger_timeout = Duration::from_millis(30);
    o.iface.rx_queue_len = 512;
    o
}

/// Operations that were accepted and those that were settled.
#[derive(Clone, Default)]
struct Count {
    settled: Arc<AtomicU64>,
    canceled: Arc<AtomicU64>,
    accepted: u64,
}

impl Count {
    fn completion(&self) -> Completion {
        let (settled, canceled) = (self.settled.clone(), self.canceled.clone());
        Completion::new(move |r| {
            settled.fetch_add(1, Ordering::Relaxed);
            if r == Err(ErrorKind::Canceled) {
                canceled.fetch_add(1, Ordering::Relaxed);
            }
        })
    }
}

/// Sends messages of all kinds until `n` are accepted or the endpoint is busy.
fn burst<F: Fabric>(w: &World<F>, node: usize, ep: &Ep, flow: &mut Flow, n: u32, rng: &mut Rng, count: &mut Count) {
    for _ in 0..n {
        let (kind, len) = draw_message(rng);
        let comp = count.completion();
        let token = comp.token();
        let accepted = flow.send(&w.nodes[node], ep, kind, len, Some(&comp));
        match accepted {
            // The token stands for those that are done at once.
            Ok(()) => count.accepted += 1,
            Err(SendError::NoResource) => {
                // Not accepted: settled by nobody but us.
                count.settled.fetch_sub(1, Ordering::Relaxed);
                drop(comp);
                token.settle(Ok(()));
                return;
            }
            Err(SendError::Failed(e)) => w.fail(&format!("{e}")),
        }
        drop(comp);
        token.settle(Ok(()));
    }
}

/// Destroys `ep`, and sees that everything outstanding is settled when that returns, and nothing afterwards.
#[track_caller]
fn destroy_now<F: Fabric>(w: &World<F>, node: usize, ep: Ep, count: &Count) {
    drop(ep);
    let settled = count.settled.load(Ordering::Relaxed);
    if settled != count.accepted {
        w.fail(&format!("{settled} of {} operations are settled after destroy", count.accepted));
    }
    // While there is a record there is an address handle.
    if w.nodes[node].counter("eps") > 0 {
        assert!(w.nodes[node].counter("ah.live") > 0, "records without an address handle");
    }
}

fn destroy_with_unacknowledged_data<F: Hooks>(mut w: World<F>) {
    w.add(&quick());
    w.add(&quick());
    w.set_weather(Weather { loss: 20, dup: 5, reorder: 5 });
    let mut rng = Rng::new(w.seed);
    let mut ledger = Ledger::default();
    let mut count = Count::default();
    for round in 0..if F::NAME == Soft::NAME { 20 } else { 100 } {
        let ep = w.nodes[0].connect(&w.nodes[1]);
        let mut flow = Flow::new(round);
        flow.send_mixed(&mut w, 0, &ep, 1, &mut rng);
        burst(&w, 0, &ep, &mut flow, rng.below(60) as u32, &mut rng, &mut count);
        for _ in 0..rng.below(4) {
            w.step();
        }
        destroy_now(&w, 0, ep, &count);
        ledger.await_flow(&mut w, 1, &flow);
    }
    assert_eq!(count.settled.load(Ordering::Relaxed), count.accepted);
    // A lost BYE leaves the peer with a record until it finds out.
    w.run_until("the records are freed", |w| w.nodes[0].counter("eps") == 0);
    assert!(w.nodes[0].worker.next_timeout().is_none());
    w.buffers_come_home();
    w.finish();
}

/// The crash this project started from, in every combination: linger none, short and long; address handles never cached,
/// for a moment, for ever; a good and a bad network; a device that copies what it sends, and one that reads it late.
fn destroy_matrix(w: World<Sim>) {
    drop(w);
    let mut seed = 1;
    for linger in [Duration::ZERO, Duration::from_millis(5), Duration::from_secs(20)] {
        for ttl in [Duration::ZERO, Duration::from_millis(1), Duration::MAX] {
            for loss in [0, 20] {
                for late in [None, Some((500, 40_000))] {
                    for plain in [false, true] {
                        seed += 1;
                        destroy_rounds(seed, linger, ttl, loss, late, plain);
                    }
                }
            }
        }
    }
}

fn destroy_rounds(seed: u64, linger: Duration, ttl: Duration, loss: u32, late: Option<(u64, u64)>, plain: bool) {
    let mut w = World::<Sim>::with_seed("destroy_matrix", seed);
    let mut o = quick();
    o.ud.linger_timeout = linger;
    o.md.ah_cache_ttl = ttl;
    // Beyond this the peer counts as gone, so it must be far away.
    o.ud.timeout = Duration::from_secs(30);
    if plain {
        o.tuning.features = Some(ud::proto::Features::empty());
    }
    for _ in 0..2 {
        let mut c = w.fabric.config();
        c.late_sends = late;
        c.inline_max = if late.is_some() { 0 } else { c.inline_max };
        if plain {
            c.soft = None;
        }
        w.fabric.next_config = Some(c);
        w.add(&o);
    }
    w.fabric.net.set_faults(Weather { loss, dup: loss / 4, reorder: loss / 4 }.faults());
    let what = format!("linger {linger:?}, ttl {ttl:?}, loss {loss} %, late {late:?}, plain {plain}");
    let mut rng = Rng::new(seed);
    let mut ledger = Ledger::default();
    let mut count = Count::default();
    for round in 0..8 {
        let ep = w.nodes[0].connect(&w.nodes[1]);
        let mut flow = Flow::new(round);
        flow.send_mixed(&mut w, 0, &ep, 1, &mut rng);
        burst(&w, 0, &ep, &mut flow, 1 + rng.below(50) as u32, &mut rng, &mut count);
        // The user goes away: only the progress thread moves this node from now on, also while it is being destroyed.
        w.nodes[0].motion = Motion::ThreadOnly;
        for _ in 0..rng.below(5) {
            w.step();
            w.nodes[0].iface().progress_async();
        }
        destroy_now(&w, 0, ep, &count);
        w.nodes[0].iface().progress_async();
        if rng.below(2) == 0 {
            w.nodes[0].motion = Motion::User;
        }
        w.run_until(&format!("round {round} arrives: {what}"), |w| {
            ledger.collect(w, 1);
            ledger.got(flow.number) == flow.sent
        });
        w.nodes[0].motion = Motion::User;
        w.check_violations();
    }
    // The peer claims nothing, so its records go when it hears BYE, or when it finds out that nobody is there.
    w.run_until(&format!("records of the destroyer are freed: {what}"), |w| w.nodes[0].counter("eps") == 0);
    assert_eq!(w.total("ep.failures"), 0, "{what}");
    if ttl.is_zero() {
        w.run_until(&format!("private address handles go with the records: {what}"), |w| {
            w.nodes[0].counter("ah.live") == 0
        });
    }
    w.finish();
}

/// Without a word from the peer that it has closed, too, a record stays for the linger time: not less, and not much more.
fn linger_lasts_as_long_as_it_says(w: World<Sim>) {
    drop(w);
    for linger in [0, 1, 50, 400, 300_000].map(Duration::from_millis) {
        let mut w = World::<Sim>::new("linger_lasts_as_long_as_it_says");
        let mut o = quick();
        o.ud.linger_timeout = linger;
        o.tuning.features = Some(ud::proto::Features::empty());
        w.add(&o);
        w.add(&o);
        let ep = w.nodes[0].connect(&w.nodes[1]);
        let mut flow = Flow::new(0);
        flow.send_mixed(&mut w, 0, &ep, 10, &mut Rng::new(1));
        w.settle();
        let start = w.now();
        drop(ep);
        w.run_until("the record is freed", |w| w.nodes[0].counter("eps") == 0);
        let took = w.now().since(start);
        assert!(took >= linger && took <= linger + Duration::from_millis(1), "{took:?} instead of {linger:?}");
        w.finish();
    }
}

fn bye_ends_linger_early<F: Hooks>(mut w: World<F>) {
    let mut o = quick();
    // Longer than any test has patience.
    o.ud.linger_timeout = Duration::from_secs(100_000);
    w.add(&o);
    w.add(&o);
    let (a, b) = (w.nodes[0].connect(&w.nodes[1]), w.nodes[1].connect(&w.nodes[0]));
    let (mut fa, mut fb) = (Flow::new(0), Flow::new(1));
    let mut rng = Rng::new(1);
    fa.send_mixed(&mut w, 0, &a, 20, &mut rng);
    fb.send_mixed(&mut w, 1, &b, 20, &mut rng);
    Ledger::default().await_flow(&mut w, 0, &fb);
    w.settle();
    burst(&w, 0, &a, &mut fa, 20, &mut rng, &mut Count::default());
    drop(a);
    Ledger::default().await_flow(&mut w, 1, &fa);
    // This side is told; its endpoint is its user's until that destroys it.
    w.run_for(Duration::from_millis(10));
    assert_eq!((w.nodes[0].counter("eps"), w.nodes[1].counter("eps")), (0, 1));
    drop(b);
    w.run_until("both records are freed", |w| w.total("eps") == 0);
    // And an unclaimed endpoint goes with the peer's.
    let a = w.nodes[0].connect(&w.nodes[1]);
    w.settle();
    drop(a);
    w.run_until("both records are freed", |w| w.total("eps") == 0);
    w.finish();
}

fn a_lost_bye_is_repeated<F: Hooks>(mut w: World<F>) {
    for kind in ["BYE", "BYE_ACK"] {
        let mut o = quick();
        o.ud.linger_timeout = Duration::from_secs(100_000);
        // Once the peer has forgotten the endpoint, this ends the repetition.
        o.ud.timeout = Duration::from_millis(200);
        let (i, j) = (w.add(&o), w.add(&o));
        let ep = w.nodes[i].connect(&w.nodes[j]);
        w.settle();
        for n in [i, j] {
            F::set_tx_filter(&w.nodes[n].device, Some(lose_first(kind, 3)));
        }
        drop(ep);
        w.run_until("both records are freed", |w| w.total("eps") == 0);
        assert!(w.nodes[i].counter("tx.byes") >= 3, "{kind}");
    }
    w.finish();
}

fn close_completes_when_all_is_there<F: Hooks>(mut w: World<F>) {
    w.add(&quick());
    w.add(&quick());
    w.set_weather(Weather { loss: 20, dup: 5, reorder: 5 });
    let mut rng = Rng::new(w.seed);
    let mut ledger = Ledger::default();
    for round in 0..10 {
        let ep = w.nodes[0].connect(&w.nodes[1]);
        let mut flow = Flow::new(round);
        flow.send_mixed(&mut w, 0, &ep, 30, &mut rng);
        let (comp, status) = Completion::polled();
        ep.close(Some(comp));
        w.run_until("close completes", |_| status.poll().is_some());
        assert_eq!(status.poll(), Some(Ok(())));
        // The peer's transport has everything, its user after its next progress.
        w.nodes[1].worker.progress();
        ledger.await_flow(&mut w, 1, &flow);
    }
    w.run_until("the records are freed", |w| w.nodes[0].counter("eps") == 0);
    w.buffers_come_home();
    w.finish();
}

/// Destroyed while resolving, while asking, and with the answer on its way.
fn destroy_before_the_handshake_ends<F: Hooks>(mut w: World<F>) {
    let mut o = quick();
    o.ud.timeout = Duration::from_millis(300);
    w.add(&o);
    w.add(&o);
    for steps in 0..6 {
        for loss in [0, 30] {
            w.set_weather(Weather { loss, ..Weather::default() });
            let ep = w.nodes[0].connect(&w.nodes[1]);
            for _ in 0..steps {
                w.step();
            }
            drop(ep);
            w.run_until("both records are freed", |w| w.total("eps") == 0);
        }
    }
    w.buffers_come_home();
    w.finish();
}

/// Zero-copy operations and a flush are outstanding, the endpoint is destroyed without waiting for them: both are settled
/// at once, and the user's memory is the user's again, though its contents still travel.
fn destroy_entity_after_send<F: Hooks>(mut w: World<F>) {
    w.add(&quick());
    w.add(&quick());
    let ep = w.nodes[0].connect(&w.nodes[1]);
    let mut flow = Flow::new(0);
    flow.send_mixed(&mut w, 0, &ep, 1, &mut Rng::new(2));
    w.settle();
    // Everything is lost until the endpoint is gone.
    w.set_weather(Weather { loss: 100, ..Weather::default() });
    let mut count = Count::default();
    for _ in 0..5 {
        let comp = count.completion();
        if flow.send(&w.nodes[0], &ep, Kind::Zcopy, 3000, Some(&comp)).is_err() {
            // The window is small at first. The refused operation has left the completion alone.
            assert!(count.accepted >= 2);
            drop(comp);
            count.settled.store(0, Ordering::Relaxed);
            break;
        }
        count.accepted += 1;
    }
    let comp = count.completion();
    assert_eq!(ep.flush(FlushMode::Local, Some(&comp)).unwrap(), uct::Posted::InProgress);
    drop(comp);
    count.accepted += 1;
    for _ in 0..3 {
        w.step();
    }
    assert_eq!(count.settled.load(Ordering::Relaxed), 0);
    destroy_now(&w, 0, ep, &count);
    assert_eq!(
        count.canceled.load(Ordering::Relaxed),
        count.accepted,
        "delivery is unknown: that is what Canceled says"
    );
    w.set_weather(Weather::default());
    Ledger::default().await_flow(&mut w, 1, &flow);
    w.run_until("all records are freed", |w| w.total("eps") == 0);
    w.buffers_come_home();
    w.finish();
}

/// The peer does not answer any more: what it was sent is lost, but the record goes, at the later of its linger time and
/// the verdict.
fn the_peer_is_gone(w: World<Sim>) {
    drop(w);
    for (linger, timeout) in [(0, 200), (50, 200), (1000, 200)] {
        let mut w = World::<Sim>::new("the_peer_is_gone");
        let mut o = quick();
        let (linger, timeout) = (Duration::from_millis(linger), Duration::from_millis(timeout));
        o.ud.linger_timeout = linger;
        o.ud.timeout = timeout;
        w.add(&o);
        w.add(&o);
        let ep = w.nodes[0].connect(&w.nodes[1]);
        let mut flow = Flow::new(0);
        flow.send_mixed(&mut w, 0, &ep, 3, &mut Rng::new(3));
        w.settle();
        w.fabric.net.set_faults(Faults { partition: true, ..Faults::default() });
        let mut count = Count::default();
        burst(&w, 0, &ep, &mut flow, 20, &mut Rng::new(4), &mut count);
        let start = w.now();
        destroy_now(&w, 0, ep, &count);
        w.run_until("the record is freed", |w| w.nodes[0].counter("eps") == 0);
        let took = w.now().since(start);
        assert!(took >= linger.max(timeout), "{took:?}");
        assert!(took <= linger.max(timeout) * 2, "{took:?}");
        assert_eq!(w.nodes[0].failures.lock().len(), 0, "nobody is told of an endpoint that nobody has");
        w.run_until("nothing is left to do", |w| w.nodes.iter().all(|n| n.worker.next_timeout().is_none()));
        w.finish();
    }
}

/// Neither device tells of extensions, as with UCX on the other side: no packet of ours is seen there, and all of the above
/// holds but the early end.
fn plain_peers(mut w: World<Sim>) {
    let mut o = quick();
    o.tuning.features = Some(ud::proto::Features::empty());
    for _ in 0..2 {
        let mut c = w.fabric.config();
        c.soft = None;
        w.fabric.next_config = Some(c);
        w.add(&o);
    }
    w.fabric.net.set_faults(Weather { loss: 10, dup: 5, reorder: 5 }.faults());
    let mut rng = Rng::new(w.seed);
    let (mut there, mut back) = (Ledger::default(), Ledger::default());
    for round in 0..10 {
        let (a, b) = (w.nodes[0].connect(&w.nodes[1]), w.nodes[1].connect(&w.nodes[0]));
        let (mut fa, mut fb) = (Flow::new(2 * round), Flow::new(2 * round + 1));
        fa.send_mixed(&mut w, 0, &a, 50, &mut rng);
        fb.send_mixed(&mut w, 1, &b, 50, &mut rng);
        drop(a);
        there.await_flow(&mut w, 1, &fa);
        back.await_flow(&mut w, 0, &fb);
        drop(b);
    }
    assert_eq!(w.total("tx.byes") + w.total("tx.xacks"), 0);
    w.run_until("all records are freed", |w| w.total("eps") == 0);
    w.finish();
}

/// After the last packet of an interface nothing makes the device report it, unless somebody sees to it: an address handle
/// whose record was freed must not wait for the next packet, which may never come.
fn a_quiet_queue_gives_address_handles_back(w: World<Sim>) {
    drop(w);
    for plain in [false, true] {
        let mut w = World::<Sim>::new("a_quiet_queue_gives_address_handles_back");
        let mut o = quick();
        o.md.ah_cache_ttl = Duration::ZERO;
        if plain {
            o.tuning.features = Some(ud::proto::Features::empty());
        }
        for _ in 0..2 {
            let mut c = w.fabric.config();
            c.late_sends = Some((1_000, 2_000));
            w.fabric.next_config = Some(c);
            w.add(&o);
        }
        let ep = w.nodes[0].connect(&w.nodes[1]);
        let mut flow = Flow::new(0);
        flow.send_mixed(&mut w, 0, &ep, 3, &mut Rng::new(5));
        w.settle();
        drop(ep);
        w.run_until("the address handle is given back", |w| {
            w.nodes[0].counter("eps") == 0 && w.nodes[0].counter("ah.live") == 0
        });
        w.check_violations();
        w.finish();
    }
}

/// The same with a real thread that resends, on a real socket: the user destroys in the middle of it.
#[test]
fn destroy_while_the_thread_resends() {
    for ttl in [Duration::ZERO, Duration::MAX] {
        for linger in [Duration::ZERO, Duration::from_millis(5)] {
            let mut w = World::<Soft>::new("destroy_while_the_thread_resends");
            let mut o = quick();
            o.md.ah_cache_ttl = ttl;
            o.ud.linger_timeout = linger;
            o.ud.timer_tick = Duration::from_micros(200);
            o.ud.async_timer_tick = Duration::from_millis(1);
            o.progress_thread = true;
            w.add(&o);
            o.progress_thread = false;
            w.add(&o);
            w.set_weather(Weather { loss: 20, dup: 5, reorder: 5 });
            let mut rng = Rng::new(7);
            let mut ledger = Ledger::default();
            let mut count = Count::default();
            for round in 0..15 {
                let ep = w.nodes[0].connect(&w.nodes[1]);
                let mut flow = Flow::new(round);
                flow.send_mixed(&mut w, 0, &ep, 1, &mut rng);
                burst(&w, 0, &ep, &mut flow, 50, &mut rng, &mut count);
                // From here on only its thread moves node 0.
                w.nodes[0].motion = Motion::Stopped;
                let before = w.nodes[0].counter("tx.resends");
                let part = rng.below(u64::from(flow.sent)) as u32;
                w.run_until("the thread resends, or enough has arrived", |w| {
                    ledger.collect(w, 1);
                    w.nodes[0].counter("tx.resends") > before || ledger.got(round) >= part
                });
                destroy_now(&w, 0, ep, &count);
                ledger.await_flow(&mut w, 1, &flow);
                w.nodes[0].motion = Motion::User;
            }
            w.set_weather(Weather::default());
            // A lost BYE leaves the peer with a record until it finds out.
            w.run_until("the records are freed", |w| w.nodes[0].counter("eps") == 0);
            w.finish();
        }
    }
}
