//! Lost, doubled and overtaken packets: messages arrive exactly once, in order and unchanged, and every buffer comes home.

use std::{sync::Arc, time::Duration};

use ib::{
    config::IfaceConfig,
    sim::{Faults, SimConfig},
    soft::{SoftConfig, SoftDevice},
    sw::Rng,
};
use parking_lot::Mutex;
use uct::{AmId, Ep, SendError, am::AmDesc, config::Bytes};
use uct_tests::{
    fabric::{Fabric, Sim, Soft},
    flow::{Flow, Kind, Ledger, draw_message},
    hooks::{Hooks, Weather},
    on_fabrics,
    world::{Motion, NodeOptions, World},
};

on_fabrics! { sim, soft;
    weather_matrix,
    psn_wraps_under_loss,
    descriptors_are_kept_under_loss,
    few_places_for_what_is_early,
}

mod only_sim {
    use super::*;

    #[test]
    fn weather_matrix_of_the_network() {
        super::weather_matrix_of_the_network(World::new("weather_matrix_of_the_network"));
    }

    #[test]
    fn late_sends_with_nothing_inline() {
        super::late_sends_with_nothing_inline(World::new("late_sends_with_nothing_inline"));
    }

    #[test]
    fn tiny_queues() {
        super::tiny_queues(World::new("tiny_queues"));
    }

    #[test]
    fn receiver_is_away_under_loss() {
        super::receiver_is_away_under_loss(World::new("receiver_is_away_under_loss"));
    }

    #[test]
    fn many_to_one() {
        super::many_to_one(World::new("many_to_one"));
    }

    #[test]
    fn damaged_packets_are_lost_packets() {
        super::damaged_packets_are_lost_packets(World::new("damaged_packets_are_lost_packets"));
    }
}

fn quick() -> NodeOptions {
    let mut o = NodeOptions::default();
    o.ud.timer_tick = Duration::from_millis(1);
    o.ud.timer_backoff = 1.5;
    o.ud.linger_timeout = Duration::from_millis(10);
    // Less memory to touch for each of many worlds.
    o.iface.rx_queue_len = 512;
    o
}

fn pair<F: Fabric>(mut w: World<F>, options: &NodeOptions) -> World<F> {
    w.add(options);
    w.add(options);
    w
}

/// Mixed messages both ways at once over one pair of endpoints.
#[track_caller]
fn both_ways<F: Hooks>(w: &mut World<F>, eps: [&Ep; 2], n: u32) {
    let mut rng = Rng::new(w.seed);
    let mut flows = [Flow::new(0), Flow::new(1)];
    let mut ledgers = [Ledger::default(), Ledger::default()];
    w.run_until("everything arrives", |w| {
        for i in 0..2 {
            while flows[i].sent < n {
                let (kind, len) = draw_message(&mut rng);
                match flows[i].send(&w.nodes[i], eps[i], kind, len, None) {
                    Ok(()) => {}
                    Err(SendError::NoResource) => break,
                    Err(SendError::Failed(e)) => w.fail(&format!("{e}")),
                }
            }
            ledgers[1 - i].collect(w, 1 - i);
        }
        ledgers[0].got(1) == n && ledgers[1].got(0) == n
    });
}

/// A fresh world for each weather, so that all of them meet the handshake and the close, too.
fn in_weather<F: Hooks>(weather: Weather, n: u32, by_network: impl FnOnce(&World<F>, Weather)) {
    let mut w = pair(World::<F>::new("weather_matrix"), &quick());
    by_network(&w, weather);
    let (a, b) = (w.nodes[0].connect(&w.nodes[1]), w.nodes[1].connect(&w.nodes[0]));
    both_ways(&mut w, [&a, &b], n);
    w.settle();
    w.buffers_come_home();
    assert_eq!(w.total("ep.failures"), 0, "{weather:?}");
    assert!(weather.loss == 0 || w.total("tx.resends") > 0, "{weather:?}");
    drop((a, b));
    w.run_until("the records are freed", |w| w.total("eps") == 0);
    w.buffers_come_home();
    w.finish();
}

const PERCENT: [u32; 4] = [0, 1, 10, 30];

fn weather_matrix<F: Hooks>(w: World<F>) {
    drop(w);
    let n = if F::NAME == Soft::NAME { 60 } else { 250 };
    for loss in PERCENT {
        for dup in PERCENT {
            for reorder in PERCENT {
                if F::NAME == Soft::NAME && (loss == 1 || dup == 1 || reorder == 1) {
                    continue;
                }
                in_weather::<F>(Weather { loss, dup, reorder }, n, |w, weather| w.set_weather(weather));
            }
        }
    }
}

/// The same with faults on the way, where copies have delays of their own.
fn weather_matrix_of_the_network(w: World<Sim>) {
    drop(w);
    for loss in PERCENT {
        for dup in PERCENT {
            for reorder in PERCENT {
                in_weather::<Sim>(Weather { loss, dup, reorder }, 250, |w, weather| {
                    w.fabric.net.set_faults(Faults { jitter_ns: 3_000, ..weather.faults() });
                });
            }
        }
    }
}

/// 16-bit sequence numbers come round more than once. They start close to the wrap as it is, see `FIRST_PSN`.
fn psn_wraps_under_loss<F: Hooks>(w: World<F>) {
    let mut w = pair(w, &quick());
    w.set_weather(Weather { loss: 1, dup: 1, reorder: 1 });
    let ep = w.nodes[0].connect(&w.nodes[1]);
    let n = if F::NAME == Soft::NAME { 70_000 } else { 140_000 };
    let (mut flow, mut ledger) = (Flow::new(0), Ledger::default());
    w.run_until("everything arrives", |w| {
        while flow.sent < n {
            match flow.send(&w.nodes[0], &ep, Kind::Short, 8, None) {
                Ok(()) => {}
                Err(SendError::NoResource) => break,
                Err(SendError::Failed(e)) => w.fail(&format!("{e}")),
            }
        }
        ledger.collect(w, 1);
        ledger.got(0) == n
    });
    w.settle();
    drop(ep);
    w.finish();
}

/// A receiver that keeps every fourth descriptor for a while gives each back once.
fn descriptors_are_kept_under_loss<F: Hooks>(mut w: World<F>) {
    let mut options = quick();
    options.record = false;
    w.add(&options);
    w.add(&options);
    w.set_weather(Weather { loss: 10, dup: 10, reorder: 10 });
    let kept: Arc<Mutex<Vec<AmDesc>>> = Arc::default();
    let seen: Arc<Mutex<(Ledger, Vec<String>)>> = Arc::default();
    let id = AmId::truncate(0);
    let (k, s) = (kept.clone(), seen.clone());
    w.nodes[1]
        .iface()
        .on_am(id, move |m| {
            let received = uct_tests::world::Received { id: 0, ep: m.ep_id(), data: m.data().to_vec() };
            let s = &mut *s.lock();
            s.1.extend(s.0.enter(&received).err());
            if s.0.total() % 4 == 0 {
                k.lock().push(m.into_owned());
            }
        })
        .unwrap();
    let ep = w.nodes[0].connect(&w.nodes[1]);
    let mut flow = Flow::new(0);
    let mut rng = Rng::new(w.seed);
    for _ in 0..10 {
        flow.send_mixed(&mut w, 0, &ep, 40, &mut rng);
        let done = flow.sent;
        w.run_until("this part arrives", |_| seen.lock().0.total() == done);
        assert!(seen.lock().1.is_empty(), "{:?}", seen.lock().1);
        if rng.below(3) == 0 {
            kept.lock().clear();
        }
    }
    let n = kept.lock().len() as u64;
    w.run_until("all but the kept ones are home", |w| {
        let c = |name| w.nodes[1].counter(name);
        c("rx.buffers") == c("rx.buffers_free") + c("rx.buffers_posted") + n
    });
    kept.lock().clear();
    w.buffers_come_home();
    drop(ep);
    w.finish();
}

/// A device that reads what it sends from memory, late: a buffer that is used again too early shows as a damaged message.
fn late_sends_with_nothing_inline(w: World<Sim>) {
    drop(w);
    for (min, max) in [(0, 0), (500, 3_000), (20_000, 200_000)] {
        for loss in [0, 20] {
            let mut w = World::<Sim>::new("late_sends_with_nothing_inline");
            for _ in 0..2 {
                let mut c = w.fabric.config();
                c.late_sends = Some((min, max));
                c.inline_max = 0;
                w.fabric.next_config = Some(c);
                w.add(&quick());
            }
            w.fabric.net.set_faults(Weather { loss, dup: 5, reorder: 5 }.faults());
            let (a, b) = (w.nodes[0].connect(&w.nodes[1]), w.nodes[1].connect(&w.nodes[0]));
            both_ways(&mut w, [&a, &b], 600);
            w.settle();
            w.check_violations();
            assert_eq!(w.total("ep.failures"), 0);
            drop((a, b));
            w.run_until("the records are freed", |w| w.total("eps") == 0);
            w.buffers_come_home();
            w.finish();
        }
    }
}

/// The shortest send queue there can be, few receives, and a small window.
fn tiny_queues(w: World<Sim>) {
    drop(w);
    for late in [None, Some((1_000, 50_000))] {
        for window in [2, 3, 1025] {
            let mut w = World::<Sim>::new("tiny_queues");
            let mut o = quick();
            o.iface.tx_queue_len = 65;
            o.iface.rx_queue_len = 4;
            o.ud.rx_queue_len_init = 2;
            o.ud.max_window = window;
            for _ in 0..2 {
                let mut c = w.fabric.config();
                c.late_sends = late;
                w.fabric.next_config = Some(c);
                w.add(&o);
            }
            w.fabric.net.set_faults(Weather { loss: 5, dup: 5, reorder: 5 }.faults());
            let (a, b) = (w.nodes[0].connect(&w.nodes[1]), w.nodes[1].connect(&w.nodes[0]));
            both_ways(&mut w, [&a, &b], 500);
            w.settle();
            drop((a, b));
            w.finish();
        }
    }
}

/// The receiver's user computes while thousands of messages come: what its thread may keep is bounded, and when the user
/// comes back all of it is there, once and in order.
fn receiver_is_away_under_loss(mut w: World<Sim>) {
    let mut o = quick();
    o.ud.timeout = Duration::from_secs(300);
    w.add(&o);
    w.add(&o);
    w.fabric.net.set_faults(Weather { loss: 3, dup: 3, reorder: 3 }.faults());
    let eps: Vec<Ep> = (0..8).map(|_| w.nodes[0].connect(&w.nodes[1])).collect();
    w.settle();
    w.nodes[1].motion = Motion::ThreadOnly;
    let mut flows: Vec<Flow> = (0..8).map(Flow::new).collect();
    let mut ledger = Ledger::default();
    let end = w.now() + Duration::from_secs(60);
    w.run_until("the user has been away for a minute", |w| {
        for (flow, ep) in flows.iter_mut().zip(&eps) {
            while flow.sent < 2000 && flow.send(&w.nodes[0], ep, Kind::Short, 8, None).is_ok() {}
        }
        w.now() >= end
    });
    assert_eq!(w.nodes[1].take(), [], "a handler of the user's ran while the user was away");
    assert!(w.nodes[1].counter("rx.waiting") <= 4096);
    w.nodes[1].motion = Motion::User;
    w.run_until("everything arrives", |w| {
        for (flow, ep) in flows.iter_mut().zip(&eps) {
            while flow.sent < 2000 && flow.send(&w.nodes[0], ep, Kind::Short, 8, None).is_ok() {}
        }
        ledger.collect(w, 1);
        ledger.total() == 8 * 2000
    });
    assert_eq!(w.total("ep.failures"), 0);
    w.settle();
    w.buffers_come_home();
    drop(eps);
    w.finish();
}

fn damaged_packets_are_lost_packets(w: World<Sim>) {
    let mut w = pair(w, &quick());
    w.fabric.net.set_faults(Faults { corrupt_ppm: 100_000, ..Faults::default() });
    let (a, b) = (w.nodes[0].connect(&w.nodes[1]), w.nodes[1].connect(&w.nodes[0]));
    both_ways(&mut w, [&a, &b], 500);
    w.settle();
    drop((a, b));
    w.finish();
}

/// 32 senders, one receiver whose receives are scarce. No collapse means: the work is done in a bounded time, most packets
/// that are sent are needed, and no sender is left behind.
fn many_to_one(mut w: World<Sim>) {
    const SENDERS: usize = 32;
    const EACH: u32 = 200;
    let mut scarce = quick();
    scarce.iface.rx_queue_len = 64;
    scarce.ud.rx_queue_len_init = 16;
    let mut c = w.fabric.config();
    // What a kernel's socket buffer would hold, 50 packets of 4 KiB, is what it tells its peers.
    if let Some(soft) = &mut c.soft {
        soft.rx_budget = 50 * 4352;
    }
    w.fabric.next_config = Some(c);
    // A network slow enough for the work to take many ticks of the timer: what is lost at the start and has nothing behind
    // it that could show the gap waits for that.
    w.fabric.net.set_faults(Faults { delay_ns: 100_000, ..Faults::default() });
    w.add(&scarce);
    for _ in 0..SENDERS {
        w.add(&quick());
    }
    let eps: Vec<Ep> = (1..=SENDERS).map(|i| w.nodes[i].connect(&w.nodes[0])).collect();
    let mut flows: Vec<Flow> = (0..SENDERS as u32).map(Flow::new).collect();
    let mut ledger = Ledger::default();
    // Their handshakes have met a queue that is too short already. An endpoint's flush is refused until it is connected.
    w.run_until("everybody is connected", |_| {
        eps.iter().all(|e| matches!(e.flush(uct::FlushMode::Local, None), Ok(uct::Posted::Done)))
    });
    let start = w.now();
    let mut half = None;
    w.run_until("everything arrives", |w| {
        for (i, flow) in flows.iter_mut().enumerate() {
            while flow.sent < EACH && flow.send(&w.nodes[i + 1], &eps[i], Kind::Bcopy, 4000, None).is_ok() {}
        }
        ledger.collect(w, 0);
        if half.is_none() && ledger.total() >= SENDERS as u32 * EACH / 2 {
            half = Some((0..SENDERS as u32).map(|f| ledger.got(f)).collect::<Vec<_>>());
        }
        ledger.total() == SENDERS as u32 * EACH
    });
    let took = w.now().since(start);
    let (resends, sent) = (w.total("tx.resends"), w.total("tx.am"));
    // Each round trip of 200 us can bring a receive queue full of packets; a hundredth of that rate is no collapse.
    let text = format!("took {took:?}, {resends} resends for {sent} messages, at half time {half:?}");
    assert!(took < Duration::from_secs(2), "{text}");
    assert!(resends < sent, "{text}");
    let half = half.unwrap();
    assert!(half.iter().filter(|n| **n == 0).count() <= SENDERS / 4, "{text}");
    assert_eq!(w.total("ep.failures"), 0);
    w.settle();
    drop(eps);
    w.finish();
}

/// The same over sockets: the receiver's kernel buffer holds a few dozen packets.
#[test]
fn many_to_one_over_sockets() {
    const SENDERS: usize = 32;
    const EACH: u32 = 40;
    let mut w = World::<Soft>::new("many_to_one_over_sockets");
    let config = SoftConfig { name: "few".into(), rcvbuf: Some(256 << 10), ..SoftConfig::default() };
    let device = SoftDevice::open(&config).unwrap();
    w.add_on(device, &quick());
    for _ in 0..SENDERS {
        w.add(&quick());
    }
    let eps: Vec<Ep> = (1..=SENDERS).map(|i| w.nodes[i].connect(&w.nodes[0])).collect();
    let mut flows: Vec<Flow> = (0..SENDERS as u32).map(Flow::new).collect();
    let mut ledger = Ledger::default();
    w.run_until("everything arrives", |w| {
        for (i, flow) in flows.iter_mut().enumerate() {
            while flow.sent < EACH && flow.send(&w.nodes[i + 1], &eps[i], Kind::Bcopy, 4000, None).is_ok() {}
        }
        ledger.collect(w, 0);
        ledger.total() == SENDERS as u32 * EACH
    });
    // Resends by timers depend on how busy this machine is. Windows at their floor are 64 packets for some 29 places, so
    // half of them find no place at worst; what counts is that it does not become more.
    let dropped = w.nodes[0].device.stats().dropped(ib::sw::DropReason::RxOverflow);
    let sent = w.total("tx.am") + w.total("tx.resends");
    assert!(dropped * 3 < sent * 2, "{dropped} of {sent} packets found the receiver's buffer full");
    assert_eq!(w.total("ep.failures"), 0);
    w.settle();
    drop(eps);
    w.finish();
}

/// Settings that the compiler should see used: they are what the suites above vary.
#[test]
fn settings_reach_the_device() {
    let mut w = World::<Sim>::new("settings_reach_the_device");
    let mut c: SimConfig = w.fabric.config();
    c.inline_max = 0;
    w.fabric.next_config = Some(c);
    let mut o = quick();
    o.iface = IfaceConfig { seg_size: Bytes(1024), ..o.iface };
    w.add(&o);
    let limits = w.nodes[0].iface().attr().am;
    assert_eq!((limits.max_short, limits.max_bcopy.map(|n| n.get())), (None, Some(1016)));
    w.finish();
}

/// What comes early on all endpoints together has a bound: the rest is dropped, and comes again.
fn few_places_for_what_is_early<F: Hooks>(w: World<F>) {
    let mut o = quick();
    o.tuning.held_max = Some(2);
    let mut w = pair(w, &o);
    w.set_weather(Weather { loss: 10, dup: 5, reorder: 20 });
    let (a, b) = (w.nodes[0].connect(&w.nodes[1]), w.nodes[1].connect(&w.nodes[0]));
    both_ways(&mut w, [&a, &b], 1000);
    w.settle();
    w.buffers_come_home();
    assert!(w.total("rx.held") > 0 && w.total("rx.held_full") > 0);
    assert_eq!(w.total("ep.failures"), 0);
}
