//! UD between two soft-RoCE devices of the kernel, on a network that loses, delays, reorders, doubles and damages packets:
//! messages arrive exactly once, in order and unchanged.
//!
//! The devices and the network are those of `ci/rxe-pair`, in the machine of `ci/soft-roce`: `ci/rdma rdma_netem`. The
//! faults are netem's, and its own counters say that it had the packets in its hands.
#![cfg(feature = "rdma-core")]

use std::{io::Write, process::Command, sync::Arc, time::Duration};

use ib::{rdma_core::RdmaDevice, sw::Rng};
use uct::{AmId, Ep, SendError, config::Units};
use uct_tests::{
    flow::{Flow, Ledger, draw_message},
    rdma::Rdma,
    world::{NodeOptions, World},
};

/// The two devices, and the ends of the network between them.
const PAIR: [(&str, &str); 2] = [("rxe1", "r0"), ("rxe2", "r1")];

/// None where there are no two such devices.
fn devices(test: &str) -> Option<[Arc<RdmaDevice>; 2]> {
    if std::env::var_os("SOFT_ROCE").is_none() {
        println!("{test}: skipped: made for ci/rdma");
        return None;
    }
    Some(PAIR.map(|(rxe, _)| RdmaDevice::open(rxe).unwrap_or_else(|e| panic!("after ci/rxe-pair: {e}"))))
}

/// Runs `tc`; what it prints.
#[track_caller]
fn tc(args: &str) -> String {
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let out = Command::new("tc").args(args.split_whitespace()).env("PATH", path).output().expect("tc of iproute2");
    assert!(out.status.success(), "tc {args}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8_lossy(&out.stdout).into_owned()
}

/// netem on both ends of the network, until dropped.
struct Netem;

impl Netem {
    fn new(faults: &str) -> Netem {
        for (_, netdev) in PAIR {
            tc(&format!("qdisc replace dev {netdev} root netem {faults}"));
        }
        Netem
    }

    /// Packets that went through it and those that it lost, on each end.
    fn counts(&self) -> [(u64, u64); 2] {
        PAIR.map(|(_, netdev)| {
            let text = tc(&format!("-s -j qdisc show dev {netdev} root"));
            assert!(text.contains("\"netem\""), "{text}");
            let number = |key: &str| -> u64 {
                let from = text.split_once(&format!("\"{key}\":")).unwrap_or_else(|| panic!("no {key} in {text}")).1;
                from.trim_start().split(|c: char| !c.is_ascii_digit()).next().and_then(|n| n.parse().ok()).expect(key)
            };
            (number("packets"), number("drops"))
        })
    }
}

impl Drop for Netem {
    fn drop(&mut self) {
        for (_, netdev) in PAIR {
            drop(Command::new("/sbin/tc").args(["qdisc", "del", "dev", netdev, "root"]).status());
        }
    }
}

fn options() -> NodeOptions {
    let mut o = NodeOptions::default();
    // The GID of the IPv4 address: its routes lead over the network.
    o.md.gid_index = Units::Is(1);
    o.ud.timer_tick = Duration::from_millis(5);
    o.ud.timer_backoff = 1.5;
    o.ud.linger_timeout = Duration::from_millis(50);
    o.iface.rx_queue_len = 512;
    o
}

/// Mixed messages both ways, `n` each, from the handshake to the end. Gives the world to `check` before it is torn down.
#[track_caller]
fn both_ways(test: &str, faults: &str, n: u32, check: impl FnOnce(&World<Rdma>)) {
    let Some(devices) = devices(test) else { return };
    let netem = Netem::new(faults);
    let mut w = World::<Rdma>::new(test);
    for d in devices {
        w.add_on(d, &options());
    }
    let eps: [Ep; 2] = [w.nodes[0].connect(&w.nodes[1]), w.nodes[1].connect(&w.nodes[0])];
    let mut rng = Rng::new(w.seed);
    let mut flows = [Flow::new(0), Flow::new(1)];
    let mut ledgers = [Ledger::default(), Ledger::default()];
    w.run_until("everything arrives", |w| {
        for i in 0..2 {
            while flows[i].sent < n {
                let (kind, len) = draw_message(&mut rng);
                match flows[i].send(&w.nodes[i], &eps[i], kind, len, None) {
                    Ok(()) => {}
                    Err(SendError::NoResource) => break,
                    Err(SendError::Failed(e)) => w.fail(&format!("{e}")),
                }
            }
            ledgers[1 - i].collect(w, 1 - i);
        }
        ledgers[0].got(1) == n && ledgers[1].got(0) == n
    });
    w.settle();
    w.buffers_come_home();
    assert_eq!(w.total("ep.failures"), 0);
    let counts = netem.counts();
    for (i, (packets, lost)) in counts.into_iter().enumerate() {
        // Every message is a packet of its own. What is lost is not among those that went through.
        assert!(packets + lost >= u64::from(n), "netem saw {packets} packets of node {i}'s, and lost {lost}");
    }
    let counter = |name| format!("{name} {}", w.total(name));
    // For the log also when all is well: the proof that netem was there.
    let _ = writeln!(
        std::io::stdout(),
        "{test}: netem let through and lost {counts:?}; {}, {}, {}, {}",
        counter("tx.resends"),
        counter("rx.held"),
        counter("rx.drop.duplicate"),
        counter("rx.packets"),
    );
    check(&w);
    let lost: u64 = counts.iter().map(|c| c.1).sum();
    assert_eq!(lost > 0, faults.contains("loss"), "{counts:?}");
    drop(eps);
    w.finish();
}

const N: u32 = 400;

#[test]
fn lost_packets() {
    both_ways("lost_packets", "loss 5%", N, |w| assert!(w.total("tx.resends") > 0));
}

#[test]
fn packets_that_overtake_others() {
    both_ways("packets_that_overtake_others", "delay 2ms reorder 25%", N, |w| assert!(w.total("rx.held") > 0));
}

#[test]
fn packets_that_come_twice() {
    both_ways("packets_that_come_twice", "duplicate 20%", N, |w| assert!(w.total("rx.drop.duplicate") > 0));
}

#[test]
fn damaged_packets() {
    // The kernel's device drops them, by their checksum.
    both_ways("damaged_packets", "corrupt 5%", N, |w| assert!(w.total("tx.resends") > 0));
}

#[test]
fn all_at_once() {
    both_ways("all_at_once", "delay 2ms 1ms reorder 25% loss 3% duplicate 5% corrupt 3%", N, |w| {
        assert!(w.total("tx.resends") > 0 && w.total("rx.drop.duplicate") > 0);
    });
}

#[test]
fn a_long_way() {
    let Some(devices) = devices("a_long_way") else { return };
    let netem = Netem::new("delay 20ms");
    let mut w = World::<Rdma>::new("a_long_way");
    for d in devices {
        w.add_on(d, &options());
    }
    let eps: [Ep; 2] = [w.nodes[0].connect(&w.nodes[1]), w.nodes[1].connect(&w.nodes[0])];
    let id = AmId::truncate(3);
    let began = w.now();
    for i in 0..10 {
        for to in [1, 0] {
            let ep = &eps[1 - to];
            w.send(|| ep.am_short(id, i, b"there and back"));
            w.run_until("it arrives", |w| !w.nodes[to].take().is_empty());
        }
    }
    // A lower bound: no machine is too slow for it.
    let took = w.now().since(began);
    assert!(took >= Duration::from_millis(400), "20 ways of 20 ms in {took:?}");
    assert!(netem.counts().iter().all(|&(packets, lost)| packets >= 10 && lost == 0), "{:?}", netem.counts());
    drop(eps);
    w.finish();
}
