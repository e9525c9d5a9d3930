//! Active messages of every kind and size, on every kind of connection. (UCX: test_p2p_am, test_p2p_err.)

use std::{io::IoSlice, sync::Arc, time::Duration};

use ib::{
    config::{IfaceConfig, MdConfig, PathMtu},
    types::Mtu,
};
use parking_lot::Mutex;
use uct::{
    AmId, Ep, EpParams, ErrorKind, IfaceParams, Scope, SendError, SendResult, Worker, WorkerParams,
    config::{Bytes, Env},
};
use uct_tests::{
    check::{Ledger, bytes, region},
    fabric::Sim,
    flow::{self, Flow, draw_message},
    hooks::Hooks,
    on_fabrics,
    world::{Motion, NodeOptions, Received, World},
};
use ud::UdConfig;

on_fabrics! { sim, soft;
    am_short_reaches_the_peer,
    every_kind_at_every_size_boundary,
    every_kind_by_connect_to_ep,
    every_kind_to_oneself,
    every_kind_under_loss,
    small_segments,
    one_over_each_limit_names_value_and_limit,
    several_endpoints_per_pair_keep_their_order,
    all_ids_find_their_handler,
    two_interfaces_of_one_domain,
    two_interfaces_of_one_worker,
    zcopy_memory_is_shared_until_completion,
    am_sync,
    am_async,
    am_async_response,
    am_max_short_multi,
    am_max_short_iov_multi,
    mix_10000,
    mix1000_last_byte_offset;
    only sim; a_peer_with_smaller_packets
}

fn am_short_reaches_the_peer<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(2);
    let ep = w.nodes[0].connect(&w.nodes[1]);
    let id = AmId::truncate(5);
    for i in 0..200u64 {
        w.send(|| ep.am_short(id, i, b"payload"));
    }
    w.run_until("all arrive", |w| w.nodes[1].inbox.lock().len() == 200);
    for (i, m) in w.nodes[1].take().iter().enumerate() {
        let mut want = (i as u64).to_ne_bytes().to_vec();
        want.extend(b"payload");
        assert_eq!((m.id, &m.data), (5, &want));
    }
    w.settle();
    drop(ep);
    w.finish();
}

/// Sizes where something changes: headers, the small send buffers, MTUs, the limits of the interface.
fn sizes(max: usize, limits: &[usize]) -> Vec<usize> {
    let mut all = vec![0, 1, 7, 8, 9, 16, 63, 64, 65];
    for edge in [248, 256, 512 - 8, 1024 - 8, 2048 - 8, 4096 - 8].iter().chain(limits) {
        all.extend([edge.saturating_sub(1), *edge, edge + 1]);
    }
    all.retain(|n| *n <= max);
    all.sort_unstable();
    all.dedup();
    all
}

/// Cuts `data` in `n` pieces of different lengths, some of them empty.
fn cut(data: &[u8], n: usize) -> Vec<std::ops::Range<usize>> {
    let mut out = Vec::new();
    let mut at = 0;
    for i in 0..n {
        let end = match i {
            _ if i + 1 == n => data.len(),
            // Every third piece is empty.
            _ if i % 3 == 1 => at,
            _ => at + (data.len() - at) / 2,
        };
        out.push(at..end);
        at = end;
    }
    out
}

/// Sends every kind at every boundary over `ep` of node `from`, and checks that node `to` gets all in order.
fn every_kind<F: Hooks>(w: &mut World<F>, ep: &Ep, from: usize, to: usize) {
    let am = w.nodes[from].iface().attr().am;
    let (short, bcopy) = (am.max_short.unwrap().get(), am.max_bcopy.unwrap().get());
    let zcopy = am.max_zcopy.unwrap().get();
    let limits = [short, bcopy, zcopy, am.max_hdr];
    let md = w.nodes[from].md.clone();
    let ledger = Ledger::new();
    let mut want: Vec<(u8, Vec<u8>)> = Vec::new();
    let mut next = |len: usize| {
        let n = want.len();
        want.push(((n % 32) as u8, bytes(n as u64, len)));
        (AmId::truncate((n % 32) as u8), want[n].1.clone())
    };
    for len in sizes(short, &limits) {
        if len >= 8 {
            let (id, data) = next(len);
            let header = u64::from_ne_bytes(data[..8].try_into().unwrap());
            w.send(|| ep.am_short(id, header, &data[8..]));
        }
        for pieces in [0, 1, 2, 5, 17] {
            if pieces == 0 && len > 0 {
                continue;
            }
            let (id, data) = next(len);
            let iov: Vec<IoSlice<'_>> = cut(&data, pieces).into_iter().map(|r| IoSlice::new(&data[r])).collect();
            w.send(|| ep.am_short_iov(id, &iov));
        }
    }
    for len in sizes(bcopy, &limits) {
        let (id, data) = next(len);
        let n = w.send(|| {
            ep.am_bcopy(id, &mut |to| {
                assert_eq!(to.len(), bcopy, "exactly the room there is");
                to[..data.len()].copy_from_slice(&data);
                data.len()
            })
        });
        assert_eq!(n, len);
    }
    for len in sizes(zcopy, &limits) {
        for (head, pieces) in [(0, 1), (1, 1), (8, 2), (am.max_hdr, am.max_iov), (len, 0), (0, am.max_iov)] {
            let head = head.min(len).min(am.max_hdr);
            if pieces == 0 && head < len {
                continue;
            }
            let (id, data) = next(len);
            let r = region(&*md, &data[head..]);
            let iov: Vec<_> = cut(&data[head..], pieces).into_iter().map(|range| r.slice(range).unwrap()).collect();
            let comp = ledger.completion();
            let _posted = w.send(|| ep.am_zcopy(id, &data[..head], &iov, Some(&comp)));
        }
    }
    let count = want.len();
    w.run_until("all arrive", |w| w.nodes[to].inbox.lock().len() >= count && ledger.open() == 0);
    let got = w.nodes[to].take();
    assert_eq!(got.len(), count);
    for (i, ((id, data), m)) in want.iter().zip(&got).enumerate() {
        assert_eq!((m.id, m.data.len()), (*id, data.len()), "message {i}");
        assert!(m.data == *data, "message {i} of {} bytes is damaged", data.len());
    }
    assert!(ledger.all().iter().all(|r| r.is_ok()));
}

fn every_kind_at_every_size_boundary<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(2);
    let ep = w.nodes[0].connect(&w.nodes[1]);
    every_kind(&mut w, &ep, 0, 1);
    w.all_home();
    drop(ep);
    w.finish();
}

/// Two endpoints joined by address.
fn joined<F: Hooks>(w: &World<F>, a: usize, b: usize) -> (Ep, Ep) {
    let (na, nb) = (&w.nodes[a], &w.nodes[b]);
    let ea = na.iface().ep(&EpParams::unconnected()).unwrap();
    let eb = nb.iface().ep(&EpParams::unconnected()).unwrap();
    ea.connect(&nb.iface().device_address(), &eb.address().unwrap()).unwrap();
    eb.connect(&na.iface().device_address(), &ea.address().unwrap()).unwrap();
    (ea, eb)
}

fn every_kind_by_connect_to_ep<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(2);
    let (a, b) = joined(&w, 0, 1);
    every_kind(&mut w, &a, 0, 1);
    every_kind(&mut w, &b, 1, 0);
    w.all_home();
    let e = a.connect(&w.nodes[1].iface().device_address(), &b.address().unwrap()).unwrap_err();
    assert!(e.to_string().contains("connected already"), "{e}");
    drop((a, b));
    w.finish();
}

fn every_kind_to_oneself<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(1);
    let ep = w.nodes[0].connect(&w.nodes[0]);
    every_kind(&mut w, &ep, 0, 0);
    w.all_home();
    drop(ep);
    w.finish();
}

fn every_kind_under_loss<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(2);
    for n in &w.nodes {
        F::set_loss(&n.device, w.seed, 50_000);
    }
    let ep = w.nodes[0].connect(&w.nodes[1]);
    every_kind(&mut w, &ep, 0, 1);
    w.all_home();
    drop(ep);
    w.finish();
}

fn small_segments<F: Hooks>(mut w: World<F>) {
    // Less than a small send buffer and a receive buffer for the handshake's longest packet hold.
    for seg in ["256", "300", "1024"] {
        let iface = IfaceConfig::from_env(&Env::from_pairs([("UCX_IB_SEG_SIZE", seg)]), &ib::config::UD).unwrap();
        let options = NodeOptions { iface, ..NodeOptions::default() };
        let (a, b) = (w.add(&options), w.add(&options));
        let am = w.nodes[a].iface().attr().am;
        assert_eq!(am.max_bcopy.unwrap().get(), seg.parse::<usize>().unwrap() - 8);
        let ep = w.nodes[a].connect(&w.nodes[b]);
        every_kind(&mut w, &ep, a, b);
    }
    w.finish();
}

#[track_caller]
fn refused<T: std::fmt::Debug>(r: SendResult<T>, words: &[String]) {
    match r {
        Err(SendError::Failed(e)) => {
            assert_eq!((e.kind(), e.scope()), (ErrorKind::InvalidParam, Scope::Operation), "{e}");
            for word in words {
                assert!(e.to_string().contains(word.as_str()), "no {word:?} in: {e}");
            }
        }
        other => panic!("{other:?} instead of a refusal"),
    }
}

fn one_over_each_limit_names_value_and_limit<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(2);
    let ep = w.nodes[0].connect(&w.nodes[1]);
    w.send(|| ep.am_short(AmId::truncate(1), 0, b""));
    let am = w.nodes[0].iface().attr().am;
    let id = AmId::truncate(3);
    let words = |a: usize, b: usize| [format!("{a}"), format!("at most {b}")];

    let n = am.max_short.unwrap().get();
    refused(ep.am_short(id, 1, &vec![0; n - 8 + 1]), &words(n + 1, n));
    refused(ep.am_short_iov(id, &[IoSlice::new(&vec![0; n]), IoSlice::new(&[1])]), &words(n + 1, n));
    let n = am.max_bcopy.unwrap().get();
    refused(ep.am_bcopy(id, &mut |to| to.len() + 1), &words(n + 1, n));
    refused(ep.am_bcopy(id, &mut |_| usize::MAX), &words(usize::MAX, n));

    let n = am.max_zcopy.unwrap().get();
    let r = region(&*w.nodes[0].md, &vec![1; n + 1]);
    let all = [r.slice(0..n + 1).unwrap()];
    let ledger = Ledger::new();
    let comp = ledger.completion();
    refused(ep.am_zcopy(id, &[], &all, Some(&comp)), &words(n + 1, n));
    refused(ep.am_zcopy(id, &[1], &[r.slice(0..n).unwrap()], Some(&comp)), &words(n + 1, n));
    refused(ep.am_zcopy(id, &vec![0; am.max_hdr + 1], &[], Some(&comp)), &words(am.max_hdr + 1, am.max_hdr));
    let iov: Vec<_> = (0..am.max_iov + 1).map(|i| r.slice(i..i + 1).unwrap()).collect();
    refused(ep.am_zcopy(id, &[], &iov, Some(&comp)), &words(am.max_iov + 1, am.max_iov));
    assert_eq!(ledger.fired(), 0);
    drop(comp);
    // Nobody counted: the completion belongs to no operation.
    assert_eq!(ledger.all(), [Ok(())]);
    let e = AmId::new(32).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::InvalidParam);
    assert!(r.slice(0..n + 2).is_err());

    // And nothing was harmed.
    w.send(|| ep.am_short(AmId::truncate(2), 0, b""));
    w.all_home();
    let ids: Vec<u8> = w.nodes[1].take().iter().map(|m| m.id).collect();
    assert_eq!(ids, [1, 2]);
    drop((ep, all, iov, r));
    w.finish();
}

fn several_endpoints_per_pair_keep_their_order<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(2);
    let eps: Vec<(usize, Ep)> = (0..8).map(|i| (i % 2, w.nodes[i % 2].connect(&w.nodes[1 - i % 2]))).collect();
    let rounds = 150u64;
    for r in 0..rounds {
        for (i, (_, ep)) in eps.iter().enumerate() {
            w.send(|| ep.am_short(AmId::truncate(i as u8), r, b""));
        }
    }
    w.run_until("all arrive", |w| w.nodes.iter().all(|n| n.inbox.lock().len() == 4 * rounds as usize));
    for to in 0..2 {
        let got = w.nodes[to].take();
        for i in (0..8usize).filter(|i| i % 2 != to) {
            let mine: Vec<_> = got.iter().filter(|m| m.id == i as u8).collect();
            assert!(mine.iter().enumerate().all(|(k, m)| m.data == (k as u64).to_ne_bytes()), "order of endpoint {i}");
            // One number for all messages of an endpoint, another for each endpoint.
            assert!(mine.iter().all(|m| m.ep == mine[0].ep));
            assert!(got.iter().all(|m| m.id == i as u8 || m.ep != mine[0].ep));
        }
    }
    w.all_home();
    drop(eps);
    w.finish();
}

fn all_ids_find_their_handler<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(2);
    let ep = w.nodes[0].connect(&w.nodes[1]);
    for id in (0..32).rev() {
        w.send(|| ep.am_short_iov(AmId::new(id).unwrap(), &[IoSlice::new(&[id])]));
    }
    w.run_until("all arrive", |w| w.nodes[1].inbox.lock().len() == 32);
    for (i, m) in w.nodes[1].take().iter().enumerate() {
        assert_eq!((m.id, &m.data[..]), (31 - i as u8, &[m.id][..]));
    }
    w.settle();
    drop(ep);
    w.finish();
}

fn two_interfaces_of_one_domain<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(1);
    // A second interface on the first one's domain, moved by a worker of its own.
    let n = &w.nodes[0];
    let worker = Worker::new(WorkerParams::manual(w.fabric.clock())).unwrap();
    let (params, tuning) = (IfaceParams::default(), NodeOptions::default().tuning);
    let two =
        ud::open(&n.md, &worker, 1, &params, IfaceConfig::default(), UdConfig::default(), &tuning).expect("a second");
    let inbox: Arc<Mutex<Vec<Vec<u8>>>> = Arc::default();
    let i = inbox.clone();
    two.on_am(AmId::truncate(1), move |m| i.lock().push(m.data().to_vec())).unwrap();
    two.progress_enable(true);
    assert_ne!(n.iface().iface_address(), two.iface_address());

    let there = n.iface().ep(&EpParams::to_iface(&two.device_address(), &two.iface_address())).unwrap();
    let back = two.ep(&EpParams::to_iface(&n.iface().device_address(), &n.iface().iface_address())).unwrap();
    for i in 0..100u64 {
        w.send(|| {
            worker.progress();
            there.am_short(AmId::truncate(1), i, b"")
        });
        w.send(|| {
            worker.progress();
            back.am_short(AmId::truncate(2), i, b"")
        });
    }
    let done = |w: &World<F>| {
        worker.progress();
        inbox.lock().len() == 100 && w.nodes[0].inbox.lock().len() == 100
    };
    w.run_until("both ways", done);
    assert!(inbox.lock().iter().enumerate().all(|(i, d)| *d == (i as u64).to_ne_bytes()));
    // One address handle: the cache is the domain's.
    assert_eq!(w.nodes[0].md.ah_cache().stats().created, 1);
    drop((there, back, two));
    // Only now it lets go of what was closed.
    worker.progress();
    w.finish();
}

fn two_interfaces_of_one_worker<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(2);
    let n = &w.nodes[0];
    let md = ib::md::Md::new(w.fabric.device(), MdConfig::default(), w.fabric.clock(), w.fabric.executor());
    let (params, tuning) = (IfaceParams::default(), NodeOptions::default().tuning);
    let two = ud::open(&md, &n.worker, 1, &params, IfaceConfig::default(), UdConfig::default(), &tuning).unwrap();
    two.progress_enable(true);
    two.progress_enable(true);
    let peer = &w.nodes[1];
    let ep = two.ep(&EpParams::to_iface(&peer.iface().device_address(), &peer.iface().iface_address())).unwrap();
    let other = n.connect(peer);
    for i in 0..50 {
        w.send(|| {
            md.ah_cache().run_jobs();
            ep.am_short(AmId::truncate(1), i, b"")
        });
        w.send(|| other.am_short(AmId::truncate(2), i, b""));
    }
    w.run_until("all arrive", |w| w.nodes[1].inbox.lock().len() == 100);
    // Without progress nothing moves on it, and with it again everything does.
    two.progress_enable(false);
    w.run_until("its window fills", |_| matches!(ep.am_short(AmId::truncate(1), 0, b""), Err(SendError::NoResource)));
    two.progress_enable(true);
    w.send(|| ep.am_short(AmId::truncate(1), 1, b""));
    w.settle();
    drop((ep, other, two, md));
    w.finish();
}

fn zcopy_memory_is_shared_until_completion<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(2);
    let ep = w.nodes[0].connect(&w.nodes[1]);
    let mut r = region(&*w.nodes[0].md, b"abcdef");
    let ledger = Ledger::new();
    let comp = ledger.completion();
    let slice = r.slice(2..5).unwrap();
    let _posted = w.send(|| ep.am_zcopy(AmId::truncate(9), b"<", std::slice::from_ref(&slice), Some(&comp)));
    drop((comp, slice));
    assert!(r.bytes_mut().is_none(), "an operation in flight may read it");
    w.run_until("it completes", |_| ledger.open() == 0);
    w.run_until("the memory is back", |_| r.bytes_mut().is_some());
    assert_eq!(w.nodes[1].take()[0].data, b"<cde");
    drop((ep, r));
    w.finish();
}

/// Its port has a smaller MTU, or its settings say so.
fn a_peer_with_smaller_packets(_: World<Sim>) {
    for case in ["MTU", "PATH_MTU", "SEG_SIZE"] {
        let mut w: World<Sim> = World::new("a_peer_with_smaller_packets").nodes(1);
        let mut config = w.fabric.config();
        let mut options = NodeOptions::default();
        match case {
            "MTU" => config.mtu = Mtu::M1024,
            "PATH_MTU" => options.iface.path_mtu = PathMtu::Is(Mtu::M1024),
            _ => options.iface.seg_size = Bytes(1024),
        }
        w.fabric.next_config = Some(config);
        let smaller = w.add(&options);
        assert_eq!(w.nodes[smaller].iface().attr().am.max_bcopy.map(usize::from), Some(1016), "{case}");
        sends_what_the_peer_takes(w);
    }
}

fn sends_what_the_peer_takes(mut w: World<Sim>) {
    let ep = w.nodes[0].connect(&w.nodes[1]);
    let id = AmId::truncate(1);
    w.send(|| ep.am_bcopy(id, &mut |_| 1024 - 8));
    refused(ep.am_bcopy(id, &mut |_| 1024 - 8 + 1), &["at most 1016".into()]);
    let r = region(&*w.nodes[0].md, &[0; 1017]);
    let s = [r.slice(0..1017).unwrap()];
    refused(ep.am_zcopy(id, &[], &s, None), &["at most 1016".into()]);
    // The endpoint is as good as before, and nothing is lost on the way.
    for _ in 0..1500 {
        refused(ep.am_bcopy(id, &mut |_| 2000), &["at most 1016".into()]);
    }
    w.send(|| ep.am_bcopy(id, &mut |_| 3));
    w.run_until("both arrive", |w| w.nodes[1].inbox.lock().len() == 2);
    w.all_home();
    drop((ep, s, r));
    w.finish();
}

/// Sends one message of each kind, as long as it may be, and returns what must arrive: id and payload.
fn longest_of_each_kind<F: Hooks>(w: &mut World<F>, ep: &Ep) -> Vec<(u8, Vec<u8>)> {
    let am = w.nodes[0].iface().attr().am;
    let lens = [am.max_short, am.max_short, am.max_bcopy, am.max_zcopy].map(|n| n.map_or(0, |n| n.get()));
    let want: Vec<(u8, Vec<u8>)> = lens.iter().enumerate().map(|(i, n)| (i as u8, bytes(i as u64, *n))).collect();
    let id = AmId::truncate;
    let header = u64::from_ne_bytes(want[0].1[..8].try_into().unwrap());
    w.send(|| ep.am_short(id(0), header, &want[0].1[8..]));
    w.send(|| ep.am_short_iov(id(1), &[IoSlice::new(&want[1].1[..20]), IoSlice::new(&want[1].1[20..])]));
    w.send(|| {
        ep.am_bcopy(id(2), &mut |to| {
            to.copy_from_slice(&want[2].1);
            to.len()
        })
    });
    let (head, body) = want[3].1.split_at(am.max_hdr.min(100));
    let r = region(&*w.nodes[0].md, body);
    let iov = [r.slice(0..body.len()).unwrap()];
    let _posted = w.send(|| ep.am_zcopy(id(3), head, &iov, None));
    want
}

fn got<F: Hooks>(w: &World<F>) -> Vec<(u8, Vec<u8>)> {
    w.nodes[1].take().into_iter().map(|m| (m.id, m.data)).collect()
}

/// The handlers of `progress` run in `progress`: time passes, the peer's thread has acknowledged everything, and nothing is
/// delivered before its user comes.
fn am_sync<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(2);
    let ep = w.nodes[0].connect(&w.nodes[1]);
    w.nodes[1].motion = Motion::ThreadOnly;
    let want = longest_of_each_kind(&mut w, &ep);
    w.run_for(Duration::from_millis(500));
    w.settle();
    assert!(w.nodes[1].inbox.lock().is_empty(), "delivered without progress");
    w.nodes[1].motion = Motion::User;
    w.run_until("all arrive", |w| w.nodes[1].inbox.lock().len() == 4);
    assert_eq!(got(&w), want);
    w.all_home();
    drop(ep);
    w.finish();
}

/// Async handlers run without any progress of the receiver's user.
fn am_async<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(2);
    for id in 0..4 {
        let inbox = w.nodes[1].inbox.clone();
        let handler = move |m: uct::AmMessage<'_>| {
            inbox.lock().push(Received { id, ep: m.ep_id(), data: m.data().to_vec() });
        };
        w.nodes[1].iface().on_am_async(AmId::truncate(id), handler).unwrap();
    }
    let ep = w.nodes[0].connect(&w.nodes[1]);
    w.nodes[1].motion = Motion::ThreadOnly;
    let want = longest_of_each_kind(&mut w, &ep);
    w.run_until("all arrive", |w| w.nodes[1].inbox.lock().len() == 4);
    assert_eq!(got(&w), want);
    w.nodes[1].motion = Motion::User;
    w.all_home();
    drop(ep);
    w.finish();
}

/// An async handler answers from within; its user never progresses, and every answer comes.
fn am_async_response<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(2);
    let back = w.nodes[1].connect(&w.nodes[0]);
    w.send(|| back.am_short(AmId::truncate(9), 0, b""));
    w.settle();
    let refused: Arc<Mutex<Vec<u64>>> = Arc::default();
    let r = refused.clone();
    let answer = move |m: uct::AmMessage<'_>| {
        let n = u64::from_ne_bytes(m.data()[..8].try_into().unwrap());
        if back.am_short(AmId::truncate(2), n, b"answer").is_err() {
            r.lock().push(n);
        }
    };
    w.nodes[1].iface().on_am_async(AmId::truncate(1), answer).unwrap();
    w.nodes[1].motion = Motion::ThreadOnly;
    let ep = w.nodes[0].connect(&w.nodes[1]);
    w.nodes[0].take();
    for n in 0..50 {
        w.send(|| ep.am_short(AmId::truncate(1), n, b""));
        // One at a time, so that there is room for the answer.
        w.run_until("it is answered", |w| w.nodes[0].inbox.lock().len() as u64 == n + 1);
    }
    assert!(w.nodes[0].take().iter().enumerate().all(|(i, m)| m.id == 2 && m.data[..8] == (i as u64).to_ne_bytes()));
    assert!(refused.lock().is_empty());
    w.nodes[1].motion = Motion::User;
    w.nodes[1].iface().set_am_handler(AmId::truncate(1), None, uct::am::HandlerKind::Sync).unwrap();
    w.settle();
    drop(ep);
    w.finish();
}

/// Messages of the greatest length back to back.
fn max_multi<F: Hooks>(w: World<F>, send: impl Fn(&Ep, AmId, &[u8]) -> SendResult<()>) {
    let mut w = w.nodes(2);
    let ep = w.nodes[0].connect(&w.nodes[1]);
    let max = w.nodes[0].iface().attr().am.max_short.unwrap().get();
    let id = |i: u64| AmId::truncate((i % 32) as u8);
    for i in 0..500 {
        let data = bytes(i, max);
        w.send(|| send(&ep, id(i), &data));
    }
    w.run_until("all arrive", |w| w.nodes[1].inbox.lock().len() == 500);
    for (i, m) in (0..).zip(w.nodes[1].take()) {
        assert_eq!((m.id, m.data), (id(i).get(), bytes(i, max)));
    }
    w.all_home();
    drop(ep);
    w.finish();
}

fn am_max_short_multi<F: Hooks>(w: World<F>) {
    max_multi(w, |ep, id, data| ep.am_short(id, u64::from_ne_bytes(data[..8].try_into().unwrap()), &data[8..]));
}

fn am_max_short_iov_multi<F: Hooks>(w: World<F>) {
    max_multi(w, |ep, id, data| ep.am_short_iov(id, &[IoSlice::new(&data[..1]), IoSlice::new(&data[1..])]));
}

/// Operations of every kind at random: each message arrives once and in order, each completion fires once.
fn mix_10000<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(2);
    let ep = w.nodes[0].connect(&w.nodes[1]);
    let mut rng = ib::sw::Rng::new(w.seed);
    let (mut flow, mut arrived, zcopies) = (Flow::new(1), flow::Ledger::default(), Ledger::new());
    while flow.sent < 10_000 {
        if rng.below(200) == 0 {
            let comp = zcopies.completion();
            let _posted = w.send(|| ep.flush(uct::FlushMode::Local, Some(&comp)));
        }
        let (kind, len) = draw_message(&mut rng);
        w.run_until("it is accepted", |w| {
            let comp = (kind == flow::Kind::Zcopy).then(|| zcopies.completion());
            let sent = flow.send(&w.nodes[0], &ep, kind, len, comp.as_ref());
            arrived.collect(w, 1);
            sent.is_ok()
        });
    }
    arrived.await_flow(&mut w, 1, &flow);
    w.run_until("all completions fire", |_| zcopies.open() == 0);
    assert!(zcopies.all().iter().all(|r| *r == Ok(())));
    w.all_home();
    drop(ep);
    w.finish();
}

/// The payload lies in the last bytes of a page, with nothing of ours behind it.
fn mix1000_last_byte_offset<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(2);
    let ep = w.nodes[0].connect(&w.nodes[1]);
    let data = bytes(3, 4096);
    // A registered page of its own.
    let r = region(&*w.nodes[0].md, &data);
    assert_eq!((r.bytes().as_ptr() as usize % 4096, r.len()), (0, 4096));
    let page = r.bytes();
    let id = AmId::truncate;
    let mut rng = ib::sw::Rng::new(w.seed);
    let mut want = Vec::new();
    for _ in 0..1000 {
        let len = rng.below(9) as usize;
        let last = 4096 - len..4096;
        let tail = &page[last.clone()];
        match rng.below(4) {
            0 => {
                w.send(|| ep.am_short(id(0), 7, tail));
                want.push((0, [&7u64.to_ne_bytes()[..], tail].concat()));
            }
            1 => {
                w.send(|| ep.am_short_iov(id(1), &[IoSlice::new(tail), IoSlice::new(tail)]));
                want.push((1, [tail, tail].concat()));
            }
            2 => {
                let pack = &mut |to: &mut [u8]| {
                    to[..len].copy_from_slice(tail);
                    len
                };
                w.send(|| ep.am_bcopy(id(2), pack));
                want.push((2, tail.to_vec()));
            }
            _ => {
                let iov = [r.slice(last.clone()).unwrap()];
                let _posted = w.send(|| ep.am_zcopy(id(3), tail, &iov, None));
                want.push((3, [tail, tail].concat()));
            }
        }
    }
    w.run_until("all arrive", |w| w.nodes[1].inbox.lock().len() == 1000);
    assert_eq!(got(&w), want);
    w.all_home();
    drop((ep, r));
    w.finish();
}
