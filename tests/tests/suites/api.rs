//! What the API tells: addresses, reachability, attributes, counters; and that no bytes in an address do harm.
//! (UCX: test_uct_ep.is_connected, test_uct_iface.is_reachable, test_ud_ds.if_addr, test_ud_iface_attrs.)

use std::sync::OnceLock;

use parking_lot::Mutex;
use proptest::prelude::*;
use uct::{AmId, Blame, Ep, EpParams, ErrorKind, Scope, SendError, iface::Caps};
use uct_tests::{
    check::region,
    fabric::Sim,
    hooks::Hooks,
    on_fabrics,
    world::{NodeOptions, World},
};

on_fabrics! { sim, soft;
    is_connected,
    is_connected_to_an_endpoint,
    is_reachable,
    if_addr,
    iface_attrs,
    ep_ids_and_user_data,
    counters_have_a_fixed_order,
    bad_addresses_are_refused_by_name,
    memory_of_another_device_is_refused,
    random_enable_disable,
    local_subnet_only,
    each_kind_of_message_counts_once;
    only sim; non_default_gid_idx
}

const ID: AmId = AmId::truncate(1);

fn is_connected<F: Hooks>(w: World<F>) {
    F::need_own_addresses();
    let mut w = w.nodes(3);
    let ep = w.nodes[0].connect(&w.nodes[1]);
    let addr = |i: usize| (w.nodes[i].iface().device_address(), w.nodes[i].iface().iface_address());
    let (own, peer, third) = (addr(0), addr(1), addr(2));
    let check = |ep: &Ep| {
        assert!(ep.is_connected(&peer.0, &peer.1, None));
        assert!(!ep.is_connected(&third.0, &third.1, None) && !ep.is_connected(&own.0, &own.1, None));
        // Both count.
        assert!(!ep.is_connected(&peer.0, &third.1, None) && !ep.is_connected(&third.0, &peer.1, None));
        assert!(!ep.is_connected(&[], &peer.1, None) && !ep.is_connected(&peer.0, &[], None));
        assert!(!ep.is_connected(&peer.0, &peer.1, Some(&[1, 2])));
    };
    // A local question, from the beginning.
    check(&ep);
    w.send(|| ep.am_short(ID, 0, b""));
    check(&ep);
    w.settle();
    // A second interface of the same peer process is another peer.
    let again = w.nodes[0].connect(&w.nodes[2]);
    assert!(again.is_connected(&third.0, &third.1, None));
    w.nodes[0].iface = None;
    assert!(!ep.is_connected(&peer.0, &peer.1, None));
    drop((ep, again));
    w.finish();
}

fn is_connected_to_an_endpoint<F: Hooks>(w: World<F>) {
    let w = w.nodes(2);
    let (na, nb) = (&w.nodes[0], &w.nodes[1]);
    let a = na.iface().ep(&EpParams::unconnected()).unwrap();
    let (b, c) = (nb.iface().ep(&EpParams::unconnected()).unwrap(), nb.iface().ep(&EpParams::unconnected()).unwrap());
    let (dev, ifa) = (nb.iface().device_address(), nb.iface().iface_address());
    let (ba, ca) = (b.address().unwrap(), c.address().unwrap());
    assert!(!a.is_connected(&dev, &ifa, Some(&ba)) && !a.is_connected(&dev, &ifa, None));
    a.connect(&dev, &ba).unwrap();
    assert!(a.is_connected(&dev, &ifa, Some(&ba)) && a.is_connected(&dev, &ifa, None));
    assert!(!a.is_connected(&dev, &ifa, Some(&ca)));
    drop((a, b, c));
    w.finish();
}

fn is_reachable<F: Hooks>(mut w: World<F>) {
    let mut o = NodeOptions::default();
    // The kernel has no routes to simulated devices.
    o.iface.roce_reachability_mode = ib::config::ReachabilityMode::All;
    w.add(&o);
    w.add(&o);
    let n = w.nodes[0].iface();
    n.is_reachable(&n.device_address()).expect("oneself");
    n.is_reachable(&w.nodes[1].iface().device_address()).expect("the other");
    let mut unreachable = 0;
    let mut rng = ib::sw::Rng::new(w.seed);
    for _ in 0..100 {
        let len = rng.below(60) as usize;
        let bytes: Vec<u8> = (0..len).map(|_| rng.below(256) as u8).collect();
        if let Err(why) = n.is_reachable(&bytes) {
            assert!(why.len() > 5, "no reason in {why:?}");
            unreachable += 1;
        }
    }
    assert!(unreachable > 0);
    w.finish();
}

fn if_addr<F: Hooks>(w: World<F>) {
    let w = w.nodes(1);
    let n = &w.nodes[0];
    let o = NodeOptions::default();
    let two = ud::open(&n.md, &n.worker, 1, &o.params, o.iface, o.ud, &o.tuning).unwrap();
    // UCX's part of the device address is that of the device; the interface address is the queue pair's.
    assert_eq!(n.iface().device_address()[..17], two.device_address()[..17]);
    assert_ne!(n.iface().iface_address(), two.iface_address());
    drop(two);
    w.finish();
}

fn iface_attrs<F: Hooks>(w: World<F>) {
    let w = w.nodes(1);
    let i = w.nodes[0].iface();
    let a = i.attr();
    assert_eq!(i.device_address().len(), a.device_addr_len);
    assert_eq!(i.iface_address().len(), a.iface_addr_len);
    let ep = i.ep(&EpParams::unconnected()).unwrap();
    assert_eq!(ep.address().unwrap().len(), a.ep_addr_len);
    assert!(a.caps.contains(Caps::PENDING | Caps::CONNECT_TO_IFACE | Caps::CONNECT_TO_EP | Caps::EP_CHECK));
    assert!(a.caps.contains(Caps::HANDLER_ASYNC | Caps::HANDLER_SYNC | Caps::PEER_FAILURE | Caps::EVENT_FD));
    assert_eq!(i.event_fd().is_some(), a.caps.contains(Caps::EVENT_FD));
    let (short, bcopy) = (a.am.max_short.unwrap().get(), a.am.max_bcopy.unwrap().get());
    assert!((8..=bcopy).contains(&short) && a.am.max_hdr <= a.am.max_zcopy.unwrap().get());
    // As many as the queue pair gathers, less one for the header: UCX_IB_TX_MIN_SGE.
    assert_eq!(a.am.max_iov, 5);
    assert!(a.num_paths >= 1 && a.max_num_eps > 10_000);
    assert!(a.bandwidth_bps > 0.0 && !a.latency.is_zero() && !a.overhead.is_zero());
    drop(ep);
    w.finish();
}

fn ep_ids_and_user_data<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(2);
    let (dev, ifa) = (w.nodes[1].iface().device_address(), w.nodes[1].iface().iface_address());
    let ep = w.nodes[0].iface().ep(&EpParams::to_iface(&dev, &ifa).user_data(0xdead_beef_0000)).unwrap();
    assert_eq!(ep.user_data(), 0xdead_beef_0000);
    ep.invalidate().unwrap();
    w.run_until("it is told", |w| w.nodes[0].failures.lock().len() == 1);
    let f = w.nodes[0].failures.lock()[0].clone();
    assert_eq!((f.ep_id, f.user_data), (ep.id(), 0xdead_beef_0000));
    assert!(f.error.to_string().contains(&w.nodes[0].iface().attr().device), "{}", f.error);
    let e = w.nodes[0].iface().ep(&EpParams::to_iface(&dev, &ifa).path_index(200)).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::InvalidParam);
    assert!(e.to_string().contains("path 200") && e.to_string().contains("UCX_IB_NUM_PATHS"), "{e}");
    drop(ep);
    w.finish();
}

fn counters_have_a_fixed_order<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(2);
    let names = |w: &World<F>| w.nodes[0].iface().counters().iter().map(|c| c.name).collect::<Vec<_>>();
    let before = names(&w);
    let ep = w.nodes[0].connect(&w.nodes[1]);
    for i in 0..100 {
        w.send(|| ep.am_short(ID, i, b""));
    }
    w.settle();
    assert_eq!(names(&w), before);
    let mut unique = before.clone();
    unique.sort_unstable();
    unique.dedup();
    assert_eq!(unique.len(), before.len(), "a name comes twice");
    assert_eq!(w.nodes[0].counter("tx.am"), 100);
    assert_eq!(w.nodes[1].counter("rx.delivered"), 100);
    drop(ep);
    w.finish();
}

fn bad_addresses_are_refused_by_name<F: Hooks>(w: World<F>) {
    let w = w.nodes(2);
    let (dev, ifa) = (w.nodes[1].iface().device_address(), w.nodes[1].iface().iface_address());
    let iface = w.nodes[0].iface();
    for (d, i, words) in [
        (&b""[..], &ifa[..], "device address"),
        (&dev[..3], &ifa[..], "device address"),
        (&dev[..], &b""[..], "interface address"),
        (&dev[..], &ifa[..2], "interface address"),
    ] {
        let e = iface.ep(&EpParams::to_iface(d, i)).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidAddress, "{e}");
        assert!(e.to_string().contains(words), "{e}");
    }
    let ep = iface.ep(&EpParams::unconnected()).unwrap();
    let e = ep.connect(&dev, &[1]).unwrap_err();
    assert!(e.kind() == ErrorKind::InvalidAddress && e.to_string().contains("endpoint address"), "{e}");
    let e = ep.connect(&[1], &ep.address().unwrap()).unwrap_err();
    assert!(e.kind() == ErrorKind::InvalidAddress && e.to_string().contains("device address"), "{e}");
    drop(ep);
    w.finish();
}

/// A world for all cases: garbage must leave it usable for the next.
fn shared() -> &'static Mutex<World<Sim>> {
    static WORLD: OnceLock<Mutex<World<Sim>>> = OnceLock::new();
    WORLD.get_or_init(|| Mutex::new(World::<Sim>::new("garbage").nodes(2)))
}

/// Any bytes, or a true address with some bytes changed.
fn garbage(len: usize) -> impl Strategy<Value = (Vec<u8>, Vec<(usize, u8)>, bool)> {
    (prop::collection::vec(any::<u8>(), 0..2 * len), prop::collection::vec((0..len, any::<u8>()), 0..4), any::<bool>())
}

fn apply(real: &[u8], (any, changes, use_real): &(Vec<u8>, Vec<(usize, u8)>, bool)) -> Vec<u8> {
    if !use_real {
        return any.clone();
    }
    let mut out = real.to_vec();
    for (at, b) in changes {
        let n = out.len();
        out[at % n] = *b;
    }
    out
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn garbage_in_every_address(dev in garbage(64), ifa in garbage(8), epa in garbage(8)) {
        let mut guard = shared().lock();
        let w = &mut *guard;
        // New in each case: an address that tells of another incarnation of the peer ends the endpoints of this one.
        let ep: Ep = w.nodes[0].connect(&w.nodes[1]);
        let peer = w.nodes[1].iface();
        let dev = apply(&peer.device_address(), &dev);
        let ifa = apply(&peer.iface_address(), &ifa);
        let epa = apply(&ep.address().unwrap(), &epa);
        let iface = w.nodes[0].iface();
        let _ = iface.is_reachable(&dev);
        let _ = ep.is_connected(&dev, &ifa, Some(&epa));
        let one = iface.ep(&EpParams::to_iface(&dev, &ifa));
        let two = iface.ep(&EpParams::unconnected()).unwrap();
        let _ = two.connect(&dev, &epa);
        if let Ok(one) = &one {
            let _ = one.am_short(ID, 0, b"");
            let _ = one.connect(&dev, &epa);
        }
        let _ = two.am_short(ID, 0, b"");
        for _ in 0..3 {
            w.step();
        }
        drop((one, two, ep));
        let good = w.nodes[0].connect(&w.nodes[1]);
        w.send(|| good.am_short(AmId::truncate(2), 1, b""));
        w.run_until("a good endpoint works", |w| w.nodes[1].inbox.lock().iter().any(|m| m.id == 2));
        w.nodes[1].take();
    }
}

/// Its keys mean nothing here, or something else: on a device the send would end the queue pair.
fn memory_of_another_device_is_refused<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(2);
    let ep = w.nodes[0].connect(&w.nodes[1]);
    w.send(|| ep.am_short(ID, 0, b""));
    w.settle();
    let theirs = region(&*w.nodes[1].md, &[1; 64]);
    let ours = region(&*w.nodes[0].md, &[2; 64]);
    let mixed = [ours.slice(0..8).unwrap(), theirs.slice(0..8).unwrap()];
    match ep.am_zcopy(ID, b"", &mixed, None) {
        Err(SendError::Failed(e)) => {
            assert_eq!((e.kind(), e.scope(), e.blame()), (ErrorKind::InvalidParam, Scope::Operation, Blame::Caller));
            assert!(e.to_string().contains("another device"), "{e}");
        }
        other => w.fail(&format!("{other:?}")),
    }
    w.nodes[1].take();
    let _ = w.send(|| ep.am_zcopy(ID, b"", &mixed[..1], None));
    w.settle();
    assert_eq!(w.nodes[1].take()[0].data, [2; 8]);
    assert_eq!(w.total("qp.resets"), 0);
    drop((ep, mixed, ours, theirs));
    w.finish();
}

/// Taken out of the worker's progress and put in again at random: it works whenever it is in.
fn random_enable_disable<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(2);
    let ep = w.nodes[0].connect(&w.nodes[1]);
    let mut rng = ib::sw::Rng::new(w.seed);
    let mut sent = 0;
    for _ in 0..100 {
        for n in &w.nodes {
            n.iface().progress_enable(rng.below(2) == 0);
        }
        for _ in 0..rng.below(5) {
            sent += u64::from(ep.am_short(ID, sent, b"").is_ok());
            w.turn();
        }
    }
    for n in &w.nodes {
        n.iface().progress_enable(true);
    }
    w.send(|| ep.am_short(ID, sent, b""));
    w.run_until("all arrive", |w| w.nodes[1].inbox.lock().len() as u64 == sent + 1);
    assert!(w.nodes[1].take().iter().enumerate().all(|(i, m)| m.data == (i as u64).to_ne_bytes()));
    w.all_home();
    drop(ep);
    w.finish();
}

/// UCX_IB_ROCE_REACHABILITY_MODE=local_subnet: peers of the subnet are reachable, and others are not.
fn local_subnet_only<F: Hooks>(mut w: World<F>) {
    let mut o = NodeOptions::default();
    o.iface.roce_reachability_mode = ib::config::ReachabilityMode::LocalSubnet;
    // The kernel does not know the addresses of simulated devices.
    o.iface.roce_subnet_prefix_len = uct::config::Units::Is(8);
    w.add(&o);
    w.add(&o);
    w.nodes[0].iface().is_reachable(&w.nodes[1].iface().device_address()).expect("the same subnet");
    let mut far = ib::addr::DeviceAddr::parse(&w.nodes[1].iface().device_address()).unwrap().0;
    let gid = ib::types::Gid::from_ip("192.0.2.1".parse().unwrap());
    far.link = ib::addr::LinkAddr::Ethernet { gid, version: ib::addr::AddrVersion::V2 };
    let why = w.nodes[0].iface().is_reachable(&far.to_bytes()).expect_err("another subnet");
    assert!(why.contains("192.0.2.1"), "{why}");
    let ep = w.nodes[0].connect(&w.nodes[1]);
    w.send(|| ep.am_short(ID, 1, b"here"));
    w.run_until("it arrives", |w| w.nodes[1].inbox.lock().len() == 1);
    w.settle();
    drop(ep);
    w.finish();
}

/// UCX_IB_GID_INDEX=1: that address is told to peers, and it is what they answer to.
fn non_default_gid_idx(mut w: World<Sim>) {
    let other = ib::types::Gid::from_ip("10.0.0.200".parse().unwrap());
    let mut config = w.fabric.config();
    config.gids.push((other, config.gids[0].1));
    w.fabric.next_config = Some(config);
    let mut o = NodeOptions::default();
    o.md.gid_index = uct::config::Units::Is(1);
    w.add(&o);
    w.add(&NodeOptions::default());
    let told = ib::addr::DeviceAddr::parse(&w.nodes[0].iface().device_address()).unwrap().0;
    assert_eq!(told.gid(), Some(other));
    let (ep, back) = (w.nodes[0].connect(&w.nodes[1]), w.nodes[1].connect(&w.nodes[0]));
    w.send(|| ep.am_short(ID, 1, b""));
    w.send(|| back.am_short(ID, 1, b""));
    w.run_until("both arrive", |w| w.nodes.iter().all(|n| n.inbox.lock().len() == 1));
    w.settle();
    drop((ep, back));
    w.finish();
}

/// One message, one more on either side, whatever its kind; a refusal counts nothing.
fn each_kind_of_message_counts_once<F: Hooks>(w: World<F>) {
    let mut w = w.nodes(2);
    let ep = w.nodes[0].connect(&w.nodes[1]);
    assert!(matches!(ep.am_short(ID, 0, b""), Err(SendError::NoResource)));
    w.run_until("it is connected", |_| ep.am_short(ID, 0, b"").is_ok());
    w.settle();
    let r = region(&*w.nodes[0].md, &[7; 100]);
    let iov = [r.slice(0..100).unwrap()];
    let counters = |w: &World<F>| (w.nodes[0].counter("tx.am"), w.nodes[1].counter("rx.delivered"));
    assert_eq!(counters(&w), (1, 1));
    for kind in 0..4 {
        let before = counters(&w);
        w.send(|| match kind {
            0 => ep.am_short(ID, 1, b"payload"),
            1 => ep.am_short_iov(ID, &[std::io::IoSlice::new(b"pay"), std::io::IoSlice::new(b"load")]),
            2 => ep.am_bcopy(ID, &mut |to| to.len()).map(drop),
            _ => ep.am_zcopy(ID, b"header", &iov, None).map(drop),
        });
        w.settle();
        assert_eq!(counters(&w), (before.0 + 1, before.1 + 1), "kind {kind}");
    }
    assert_eq!(w.nodes[1].inbox.lock().len(), 5);
    drop((ep, iov, r));
    w.finish();
}
