//! Handshakes: every order, with packets lost, and nothing left over afterwards.

use std::time::Duration;

use ib::sw::Rng;
use uct::{Ep, EpParams};
use uct_tests::{
    fabric::{Fabric, Sim},
    flow::{Flow, Kind, Ledger},
    hooks::{Hooks, Weather, kind_of, lose_first},
    on_fabrics,
    world::{NodeOptions, World},
};

on_fabrics! { sim, soft;
    connect_iface_single,
    connect_iface_single_drop_creq,
    connect_iface_single_drop_crep,
    connect_iface_seq,
    connect_iface_2to1,
    connect_iface_sim,
    connect_iface_sim2v2,
    connect_iface_2k,
    crep_drop_on_both_sides,
    crep_ack_drop,
    ctls_loss,
    connect_ep_to_ep,
    connect_to_itself,
    crossing_rounds,
    an_ack_that_overtakes_the_crep_is_no_answer,
}

fn quick() -> NodeOptions {
    let mut o = NodeOptions::default();
    o.ud.timer_tick = Duration::from_millis(2);
    o.ud.timer_backoff = 1.5;
    o.ud.linger_timeout = Duration::from_millis(20);
    o
}

fn pair<F: Fabric>(mut w: World<F>) -> World<F> {
    w.add(&quick());
    w.add(&quick());
    w
}

/// Sends one message each over every endpoint and waits until all have arrived. Endpoint `i` of `eps` sends on flow
/// `first + i`, from node `from` to node `to`.
#[track_caller]
fn talk<F: Fabric>(w: &mut World<F>, from: usize, to: usize, eps: &[&Ep], first: u32) {
    let mut ledger = Ledger::default();
    let mut flows: Vec<Flow> = (0..eps.len() as u32).map(|i| Flow::new(first + i)).collect();
    w.run_until("every endpoint has sent", |w| {
        for (flow, ep) in flows.iter_mut().zip(eps) {
            if flow.sent == 0 {
                let _busy = flow.send(&w.nodes[from], ep, Kind::Short, 24, None);
            }
        }
        flows.iter().all(|f| f.sent == 1)
    });
    w.run_until("every message arrives", |w| {
        ledger.collect(w, to);
        ledger.total() as usize == eps.len()
    });
}

/// Exactly so many endpoints on each node.
#[track_caller]
fn assert_eps<F: Fabric>(w: &World<F>, counts: &[u64]) {
    let eps: Vec<u64> = w.nodes.iter().map(|n| n.counter("eps")).collect();
    assert_eq!(eps, counts, "endpoints per node");
}

fn connect_iface_single<F: Hooks>(w: World<F>) {
    let mut w = pair(w);
    let a = w.nodes[0].connect(&w.nodes[1]);
    w.settle();
    assert_eps(&w, &[1, 1]);
    assert_eq!((w.total("tx.creq"), w.total("tx.crep")), (1, 1));
    assert_eq!((w.nodes[1].counter("ep.passive_created"), w.nodes[1].counter("ep.passive_claimed")), (1, 0));
    talk(&mut w, 0, 1, &[&a], 1);
    let b = w.nodes[1].connect(&w.nodes[0]);
    talk(&mut w, 1, 0, &[&b], 1);
    assert_eps(&w, &[1, 1]);
    drop((a, b));
    w.run_until("both records are freed", |w| w.total("eps") == 0);
    w.buffers_come_home();
    w.finish();
}

fn connect_iface_single_drop_creq<F: Hooks>(w: World<F>) {
    let mut w = pair(w);
    F::set_tx_filter(&w.nodes[0].device, Some(lose_first("CREQ", 3)));
    let a = w.nodes[0].connect(&w.nodes[1]);
    talk(&mut w, 0, 1, &[&a], 0);
    let creqs = w.nodes[0].counter("tx.creq") + w.nodes[0].counter("tx.resends");
    assert!(creqs >= 4, "three were lost");
    assert_eq!(w.nodes[1].counter("ep.passive_created"), 1);
    assert_eps(&w, &[1, 1]);
    // In a mutual connect: one side hears nothing of the other's request.
    F::set_rx_filter(&w.nodes[1].device, Some(lose_first("CREQ", u32::MAX)));
    let (a2, b2) = (w.nodes[0].connect(&w.nodes[1]), w.nodes[1].connect(&w.nodes[0]));
    let b3 = w.nodes[1].connect(&w.nodes[0]);
    w.run_until("the first of these claims, the second is crossing", |w| {
        w.nodes[0].counter("eps") == 2 && w.nodes[1].counter("eps") == 2
    });
    talk(&mut w, 1, 0, &[&b2, &b3], 0);
    F::set_rx_filter(&w.nodes[1].device, None);
    talk(&mut w, 0, 1, &[&a, &a2], 0);
    assert_eps(&w, &[2, 2]);
    drop((a, a2, b2, b3));
    w.run_until("all records are freed", |w| w.total("eps") == 0);
    w.finish();
}

fn connect_iface_single_drop_crep<F: Hooks>(w: World<F>) {
    let mut w = pair(w);
    F::set_tx_filter(&w.nodes[1].device, Some(lose_first("CREP", 3)));
    let a = w.nodes[0].connect(&w.nodes[1]);
    talk(&mut w, 0, 1, &[&a], 0);
    // A lost CREP is not a second connection, and the request was repeated for it.
    assert_eq!(w.nodes[1].counter("ep.passive_created"), 1);
    assert!(w.nodes[1].counter("tx.crep") + w.nodes[1].counter("tx.resends") >= 4, "three were lost");
    assert_eps(&w, &[1, 1]);
    drop(a);
    w.run_until("both records are freed", |w| w.total("eps") == 0);
    w.finish();
}

fn connect_iface_seq<F: Hooks>(w: World<F>) {
    let mut w = pair(w);
    let a: Vec<Ep> = (0..5).map(|_| w.nodes[0].connect(&w.nodes[1])).collect();
    w.settle();
    assert_eps(&w, &[5, 5]);
    // What the peer opened is claimed in its order, and then new ones are made.
    let b: Vec<Ep> = (0..7).map(|_| w.nodes[1].connect(&w.nodes[0])).collect();
    w.settle();
    assert_eps(&w, &[7, 7]);
    assert_eq!(w.nodes[1].counter("ep.passive_claimed"), 5);
    assert_eq!(w.nodes[0].counter("ep.passive_created"), 2);
    let rest: Vec<Ep> = (0..2).map(|_| w.nodes[0].connect(&w.nodes[1])).collect();
    assert_eq!(w.nodes[0].counter("ep.passive_claimed"), 2);
    // The n-th endpoint here leads to the n-th there.
    let eps: Vec<&Ep> = a.iter().chain(&rest).collect();
    let (id0, id1): (Vec<u64>, Vec<u64>) = (eps.iter().map(|e| e.id()).collect(), b.iter().map(|e| e.id()).collect());
    for (i, ep) in eps.iter().enumerate() {
        let addr = b[i].address().unwrap();
        let iface = w.nodes[1].iface();
        assert!(
            ep.is_connected(&iface.device_address(), &iface.iface_address(), Some(&addr)),
            "{id0:?} {id1:?} at {i}"
        );
    }
    talk(&mut w, 0, 1, &eps, 0);
    talk(&mut w, 1, 0, &b.iter().collect::<Vec<_>>(), 0);
    drop((a, b, rest));
    w.run_until("all records are freed", |w| w.total("eps") == 0);
    w.finish();
}

fn connect_iface_2to1<F: Hooks>(w: World<F>) {
    let mut w = pair(w);
    let (a, b) = (w.nodes[0].connect(&w.nodes[1]), w.nodes[0].connect(&w.nodes[1]));
    assert_ne!(a.id(), b.id());
    talk(&mut w, 0, 1, &[&a, &b], 0);
    w.settle();
    assert_eps(&w, &[2, 2]);
    assert_eq!(w.nodes[1].counter("ep.passive_created"), 2);
    // Messages of the two came by different endpoints.
    let id = uct::AmId::truncate(0);
    w.send(|| a.am_short(id, 0, b""));
    w.send(|| b.am_short(id, 1, b""));
    w.run_until("both arrive", |w| w.nodes[1].inbox.lock().len() == 2);
    let got = w.nodes[1].take();
    assert_ne!(got[0].ep, got[1].ep);
    drop((a, b));
    w.finish();
}

fn connect_iface_sim<F: Hooks>(w: World<F>) {
    let mut w = pair(w);
    let (a, b) = (w.nodes[0].connect(&w.nodes[1]), w.nodes[1].connect(&w.nodes[0]));
    talk(&mut w, 0, 1, &[&a], 0);
    talk(&mut w, 1, 0, &[&b], 0);
    w.settle();
    assert_eps(&w, &[1, 1]);
    assert_eq!(w.total("ep.passive_created"), w.total("ep.passive_claimed"));
    drop((a, b));
    w.finish();
}

fn connect_iface_sim2v2<F: Hooks>(w: World<F>) {
    let mut w = pair(w);
    let a = [w.nodes[0].connect(&w.nodes[1]), w.nodes[0].connect(&w.nodes[1])];
    let b = [w.nodes[1].connect(&w.nodes[0]), w.nodes[1].connect(&w.nodes[0])];
    talk(&mut w, 0, 1, &[&a[0], &a[1]], 0);
    talk(&mut w, 1, 0, &[&b[0], &b[1]], 0);
    w.settle();
    assert_eps(&w, &[2, 2]);
    let n = [w.nodes[0].iface(), w.nodes[1].iface()];
    for i in 0..2 {
        assert!(a[i].is_connected(&n[1].device_address(), &n[1].iface_address(), Some(&b[i].address().unwrap())));
        assert!(b[i].is_connected(&n[0].device_address(), &n[0].iface_address(), Some(&a[i].address().unwrap())));
        let other = Some(b[1 - i].address().unwrap());
        assert!(!a[i].is_connected(&n[1].device_address(), &n[1].iface_address(), other.as_deref()));
    }
    drop((a, b));
    w.finish();
}

fn connect_iface_2k<F: Hooks>(w: World<F>) {
    let mut w = pair(w);
    let a: Vec<Ep> = (0..2000).map(|_| w.nodes[0].connect(&w.nodes[1])).collect();
    w.settle();
    assert_eps(&w, &[2000, 2000]);
    // Unclaimed endpoints share address handles: one in all, and one more each time a peer was slow to answer.
    for n in &w.nodes {
        let live = n.counter("ah.live");
        assert!((1..=8).contains(&live), "{live} address handles");
    }
    let b: Vec<Ep> = (0..2000).map(|_| w.nodes[1].connect(&w.nodes[0])).collect();
    assert_eq!(w.nodes[1].counter("ep.passive_claimed"), 2000);
    for (i, (a, b)) in a.iter().zip(&b).enumerate().step_by(97) {
        let n = w.nodes[1].iface();
        let addr = b.address().unwrap();
        assert!(a.is_connected(&n.device_address(), &n.iface_address(), Some(&addr)), "pair {i}");
    }
    drop((a, b));
    w.run_until("all records are freed", |w| w.total("eps") == 0);
    assert!(w.nodes.iter().all(|n| n.worker.next_timeout().is_none()), "nothing is left to wait for");
    w.buffers_come_home();
    w.finish();
}

/// Both sides connect at once while no control packet gets through for a while.
fn crep_drop_on_both_sides<F: Hooks>(w: World<F>) {
    let mut w = pair(w);
    for n in &w.nodes {
        let mut lost = 0;
        F::set_tx_filter(
            &n.device,
            Some(Box::new(move |p| {
                if matches!(&*kind_of(p.payload), "CREQ" | "CREP") && lost < 6 {
                    lost += 1;
                    return ib::sw::FilterVerdict::Drop;
                }
                ib::sw::FilterVerdict::Pass
            })),
        );
    }
    let (a, b) = (w.nodes[0].connect(&w.nodes[1]), w.nodes[1].connect(&w.nodes[0]));
    talk(&mut w, 0, 1, &[&a], 0);
    talk(&mut w, 1, 0, &[&b], 0);
    w.settle();
    assert_eps(&w, &[1, 1]);
    // No request is left in a window: nothing is to be resent.
    w.run_for(Duration::from_millis(50));
    let before = (w.total("tx.creq"), w.total("tx.crep"), w.total("tx.resends"));
    w.run_for(Duration::from_millis(50));
    assert_eq!(before, (w.total("tx.creq"), w.total("tx.crep"), w.total("tx.resends")));
    drop((a, b));
    w.finish();
}

/// The acks of the handshake are lost: messages are taken all the same, and both sides come to know that they are connected.
fn crep_ack_drop<F: Hooks>(w: World<F>) {
    let mut w = pair(w);
    for n in &w.nodes {
        F::set_tx_filter(&n.device, Some(lose_first("ACK", 3)));
    }
    let a = w.nodes[0].connect(&w.nodes[1]);
    talk(&mut w, 0, 1, &[&a], 0);
    w.settle();
    let b = w.nodes[1].connect(&w.nodes[0]);
    talk(&mut w, 1, 0, &[&b], 0);
    talk(&mut w, 0, 1, &[&a], 5);
    w.settle();
    assert_eps(&w, &[1, 1]);
    assert_eq!(w.total("ep.passive_created"), 1);
    drop((a, b));
    w.finish();
}

/// One side's requests and answers are lost for a while, though it is connected itself and sends already.
fn ctls_loss<F: Hooks>(w: World<F>) {
    let mut w = pair(w);
    let mut lost = 0;
    F::set_tx_filter(
        &w.nodes[1].device,
        Some(Box::new(move |p| {
            let is_control = matches!(&*kind_of(p.payload), "CREQ" | "CREP");
            lost += usize::from(is_control);
            if is_control && lost <= 6 { ib::sw::FilterVerdict::Drop } else { ib::sw::FilterVerdict::Pass }
        })),
    );
    let (a, b) = (w.nodes[0].connect(&w.nodes[1]), w.nodes[1].connect(&w.nodes[0]));
    talk(&mut w, 1, 0, &[&b], 0);
    talk(&mut w, 0, 1, &[&a], 0);
    w.settle();
    assert_eps(&w, &[1, 1]);
    let n = w.nodes[1].iface();
    let addr = b.address().unwrap();
    assert!(a.is_connected(&n.device_address(), &n.iface_address(), Some(&addr)));
    assert!(w.total("tx.resends") >= 6, "each loss was repaired");
    drop((a, b));
    w.finish();
}

fn connect_ep_to_ep<F: Hooks>(w: World<F>) {
    let mut w = pair(w);
    let open = |w: &World<F>, n: usize| w.nodes[n].iface().ep(&EpParams::unconnected()).unwrap();
    let (a, b) = (open(&w, 0), open(&w, 1));
    let (aa, ba) = (a.address().unwrap(), b.address().unwrap());
    let devs: Vec<Vec<u8>> = w.nodes.iter().map(|n| n.iface().device_address()).collect();
    a.connect(&devs[1], &ba).unwrap();
    assert!(a.connect(&devs[1], &ba).is_err(), "only once");
    // The peer sends before this side has connected: nothing is lost.
    let mut flow = Flow::new(0);
    w.run_until("accepted", |w| flow.send(&w.nodes[0], &a, Kind::Short, 20, None).is_ok());
    w.run_for(Duration::from_millis(5));
    b.connect(&devs[0], &aa).unwrap();
    Ledger::default().await_flow(&mut w, 1, &flow);
    talk(&mut w, 1, 0, &[&b], 3);
    w.settle();
    assert_eq!(w.total("tx.creq") + w.total("tx.crep"), 0, "no handshake");
    assert_eps(&w, &[1, 1]);
    drop((a, b));
    w.run_until("both records are freed", |w| w.total("eps") == 0);
    w.finish();
}

fn connect_to_itself<F: Hooks>(mut w: World<F>) {
    w.add(&quick());
    // The first end asks, the second one is its own answer; both can be used.
    let (a, b) = (w.nodes[0].connect(&w.nodes[0]), w.nodes[0].connect(&w.nodes[0]));
    talk(&mut w, 0, 0, &[&a, &b], 0);
    w.settle();
    drop((a, b));
    w.run_until("all records are freed", |w| w.total("eps") == 0);
    w.finish();
}

/// The heart of the matter: both sides connect at the same moment, over and over, and the network loses packets. There is
/// one endpoint per side for each round, and what they say arrives.
#[track_caller]
fn rounds<F: Hooks>(w: &mut World<F>, loss: u32, rounds: u32) {
    w.set_weather(Weather { loss, ..Weather::default() });
    let mut rng = Rng::new(w.seed ^ u64::from(loss));
    for round in 0..rounds {
        let (mut a, mut b) = (None, None);
        // Who is first, and by how much: from "in one breath" to "when the other's request is there".
        let gap = rng.below(6);
        if rng.below(2) == 0 {
            a = Some(w.nodes[0].connect(&w.nodes[1]));
        } else {
            b = Some(w.nodes[1].connect(&w.nodes[0]));
        }
        for _ in 0..gap {
            w.step();
        }
        let a = a.unwrap_or_else(|| w.nodes[0].connect(&w.nodes[1]));
        let b = b.unwrap_or_else(|| w.nodes[1].connect(&w.nodes[0]));
        talk(w, 0, 1, &[&a], 0);
        talk(w, 1, 0, &[&b], 0);
        w.settle();
        let eps: Vec<u64> = w.nodes.iter().map(|n| n.counter("eps")).collect();
        if eps != [1, 1] {
            w.fail(&format!("round {round} at {loss} % loss: {eps:?} endpoints"));
        }
        drop((a, b));
        w.run_until("both records are freed", |w| w.total("eps") == 0);
    }
    w.set_weather(Weather::default());
}

fn crossing_rounds<F: Hooks>(w: World<F>) {
    let mut w = pair(w);
    let (some, few) = if F::NAME == Sim::NAME { (300, 300) } else { (60, 15) };
    rounds(&mut w, 0, some);
    rounds(&mut w, 10, some);
    rounds(&mut w, 50, few);
    assert!(w.total("ep.restarts") == 0 && w.total("ep.failures") == 0);
    w.buffers_come_home();
    w.finish();
}

/// The peer has the request, but its answer is lost again and again, while other packets of the peer acknowledge the
/// request: the endpoint goes on asking, and fails in the end.
fn an_ack_that_overtakes_the_crep_is_no_answer<F: Hooks>(mut w: World<F>) {
    let mut o = quick();
    o.ud.timeout = Duration::from_millis(60);
    w.add(&o);
    w.add(&quick());
    F::set_tx_filter(&w.nodes[1].device, Some(lose_first("CREP", u32::MAX)));
    let a = w.nodes[0].connect(&w.nodes[1]);
    w.run_until("the endpoint is given up", |w| !w.nodes[0].failures.lock().is_empty());
    assert_eq!(w.nodes[0].failures.lock().len(), 1);
    F::set_tx_filter(&w.nodes[1].device, None);
    drop(a);
    let b = w.nodes[0].connect(&w.nodes[1]);
    talk(&mut w, 0, 1, &[&b], 0);
    w.settle();
    drop(b);
    w.finish();
}
