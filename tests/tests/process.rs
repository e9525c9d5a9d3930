//! Real processes on the soft device: killed, stopped, forked, ended with everything open. What they do is in
//! `src/bin/peer.rs`.

use uct_tests::procs::Peer;

fn peer(settings: &[(&str, &str)]) -> Peer {
    Peer::start(env!("CARGO_BIN_EXE_peer"), &[], settings).expect("a peer")
}

const QUICK: &[(&str, &str)] = &[("UCX_UD_TIMEOUT", "600ms"), ("UCX_UD_LINGER_TIMEOUT", "1s")];

#[test]
fn killed_process_is_reported_once_and_another_takes_over() {
    let (mut a, mut b, mut c) = (peer(QUICK), peer(QUICK), peer(QUICK));
    assert_eq!(a.connect(&b), "ep 0");
    assert_eq!(a.ask("send 0 100"), "sent 100");
    assert_eq!(b.ask("expect 100"), "got 100");
    assert_eq!(a.ask("flush"), "flushed");
    b.kill();
    // It does not know yet: some are accepted, and then the report comes.
    let said = a.ask("send 0 100000");
    assert!(said.contains("EndpointTimeout") || said.contains("endpoint timeout"), "{said}");
    assert!(said.contains("UCX_UD_TIMEOUT=0.6s"), "{said}");
    assert_eq!(a.ask("failures 1"), "failed EndpointTimeout");
    assert_eq!(a.connect(&c), "ep 1");
    assert_eq!(a.ask("send 1 1000"), "sent 1000");
    assert_eq!(c.ask("expect 1000"), "got 1000");
    assert_eq!(a.ask("failures 1"), "failed EndpointTimeout", "still one");
}

#[test]
fn stopped_process_blames_nobody_when_it_wakes() {
    // The peers wait for long; the one that is stopped has a short time-out, and something in flight.
    let (mut a, mut b) = (peer(QUICK), peer(&[]));
    assert_eq!(a.connect(&b), "ep 0");
    assert_eq!(a.ask("send 0 10"), "sent 10");
    assert_eq!(b.ask("expect 10"), "got 10");
    b.signal("STOP");
    assert_eq!(a.ask("send 0 1"), "sent 1");
    a.signal("STOP");
    // Nothing can be waited for while both stand still, but a clock.
    let start = std::time::Instant::now();
    while start.elapsed() < std::time::Duration::from_millis(1500) {
        std::thread::yield_now();
    }
    b.signal("CONT");
    a.signal("CONT");
    assert_eq!(a.ask("send 0 10"), "sent 10");
    assert_eq!(b.ask("expect 21"), "got 21");
    assert_eq!(a.ask("flush"), "flushed");
    assert_eq!(a.ask("failures 0"), "failed");
}

#[test]
fn five_processes_all_to_all() {
    let mut all: Vec<Peer> = (0..5).map(|_| peer(&[])).collect();
    let addrs: Vec<String> = all.iter().map(|p| p.addr.clone()).collect();
    for (i, p) in all.iter_mut().enumerate() {
        for (j, addr) in addrs.iter().enumerate().filter(|(j, _)| *j != i) {
            assert!(p.ask(&format!("connect {addr}")).starts_with("ep "), "{i} to {j}");
        }
    }
    // All at once: everybody has its orders before anybody is asked for the result.
    for p in &mut all {
        for ep in 0..4 {
            p.tell(&format!("send {ep} 500"));
        }
        p.tell("expect 2000");
        p.tell("flush");
    }
    for p in &mut all {
        for _ in 0..4 {
            assert_eq!(p.answer(), "sent 500");
        }
        assert_eq!(p.answer(), "got 2000");
        assert_eq!(p.answer(), "flushed");
    }
    for p in &mut all {
        assert_eq!(p.ask("failures 0"), "failed");
    }
}

#[test]
fn end_with_everything_open_is_quiet() {
    let (mut a, mut b) = (peer(&[]), peer(&[]));
    assert_eq!(a.connect(&b), "ep 0");
    assert_eq!(a.ask("send 0 100"), "sent 100");
    assert_eq!(b.ask("expect 100"), "got 100");
    a.tell("quit");
    let (status, said) = a.end();
    assert!(status.success(), "{status}: {said}");
    assert_eq!(said, "");
    // In order, with a peer that is gone: bounded, whatever the peer does.
    b.signal("CONT");
    assert_eq!(b.ask("close"), "closed");
    let (status, said) = b.end();
    assert!(status.success() && said.is_empty(), "{status}: {said}");
}

#[test]
fn closing_does_not_wait_for_a_stopped_peer() {
    let (mut a, mut b) = (peer(&[]), peer(&[]));
    assert_eq!(a.connect(&b), "ep 0");
    assert_eq!(a.ask("send 0 10"), "sent 10");
    assert_eq!(b.ask("expect 10"), "got 10");
    b.signal("STOP");
    assert_eq!(a.ask("send 0 1"), "sent 1");
    // The default time-out of 30 s and linger time of 5 minutes must not hold it up: the answer is the proof.
    assert_eq!(a.ask("close"), "closed");
    let (status, said) = a.end();
    assert!(status.success(), "{status}: {said}");
    b.signal("CONT");
}

#[test]
fn no_signal_handlers_are_installed() {
    let (mut a, b) = (peer(&[]), peer(&[]));
    assert_eq!(a.connect(&b), "ep 0");
    assert_eq!(a.ask("send 0 1"), "sent 1");
    let mask = u64::from_str_radix(a.ask("signals").strip_prefix("signals ").expect("a mask"), 16).expect("a mask");
    // Rust's runtime catches SIGSEGV (11) and SIGBUS (7), to tell a stack overflow, and the C library keeps 32 and 33 for
    // itself. Nobody else catches anything.
    let runtime = [7, 11, 32, 33].iter().fold(0u64, |m, s| m | 1 << (s - 1));
    assert_eq!(mask & !runtime, 0, "{mask:x}");
}

/// A child ends at once, or first uses and drops everything that it has inherited: the parent goes on as if nothing were.
fn parent_goes_on_after(what: &str, settings: &[(&str, &str)]) {
    let mut all = QUICK.to_vec();
    all.extend(settings);
    let (mut a, mut b) = (peer(&all), peer(&all));
    assert_eq!(a.connect(&b), "ep 0");
    assert_eq!(a.ask("send 0 100"), "sent 100");
    for i in 1..=3 {
        let answer = a.ask(what);
        if answer != "forked 0" {
            a.signal("KILL");
            panic!("{answer}: {}", a.end().1);
        }
        assert_eq!(a.ask("send 0 100"), "sent 100");
        assert_eq!(b.ask(&format!("expect {}", 100 + i * 100)), format!("got {}", 100 + i * 100));
    }
    assert_eq!(a.ask("failures 0"), "failed");
    assert_eq!(b.ask("failures 0"), "failed");
    assert_eq!(a.ask("close"), "closed");
}

#[test]
fn child_that_ends_leaves_the_parent_unharmed() {
    parent_goes_on_after("fork", &[]);
}

#[test]
fn child_that_uses_everything_is_refused_and_leaves_the_parent_unharmed() {
    parent_goes_on_after("use", &[]);
    parent_goes_on_after("use", &[("UCX_UD_ASYNC_PROGRESS", "n")]);
}

/// The soft device pins nothing, and nobody guesses by the limit what would be possible. (UCX: test_md_memlock_limit.)
#[test]
fn md_open_with_no_lockable_memory() {
    let limited = || {
        let wrap = ["sh", "-c", "ulimit -l 0 && exec \"$0\""];
        Peer::start(env!("CARGO_BIN_EXE_peer"), &wrap, &[]).expect("a peer")
    };
    let (mut a, mut b) = (limited(), limited());
    assert_eq!(a.connect(&b), "ep 0");
    assert_eq!(a.ask("send 0 1000"), "sent 1000");
    assert_eq!(b.ask("expect 1000"), "got 1000");
    assert_eq!(a.ask("close"), "closed");
    let (status, said) = a.end();
    assert!(status.success() && said.is_empty(), "{status}: {said}");
}

/// Processes on an RDMA device.
#[cfg(feature = "rdma-core")]
mod rdma {
    use std::{
        process::Command,
        time::{Duration, Instant},
    };

    use super::*;

    const PEER: &str = "10.77.0.2";
    const PATIENCE: Duration = Duration::from_secs(60);

    /// A child of a process on it, with and without what makes registered memory safe.
    #[test]
    fn child_on_an_rdma_device() {
        let Some(device) = uct_tests::rdma::first() else {
            println!("child_on_an_rdma_device: skipped: no RDMA device with an active port 1");
            return;
        };
        for (fork_init, what) in [("n", "use"), ("try", "use"), ("n", "fork")] {
            parent_goes_on_after(what, &[("PEER_DEVICE", &device), ("UCX_IB_FORK_INIT", fork_init)]);
        }
    }

    /// In the machine that `ci/soft-roce` boots (it sets `SOFT_ROCE=1`): a process on rxe0, and its peer on the soft device in
    /// the network namespace `soft`, at the other end of a veth pair.
    fn pair(test: &str) -> Option<(Peer, Peer)> {
        if std::env::var_os("SOFT_ROCE").is_none() {
            println!("{test}: skipped: runs under ci/soft-roce only");
            return None;
        }
        let settings = [("UCX_SOFT_ADDR", PEER), ("UCX_SOFT_PORT", "4791")];
        let b = Peer::start(env!("CARGO_BIN_EXE_peer"), &["ip", "netns", "exec", "soft"], &settings).expect("a peer");
        Some((peer(&[("PEER_DEVICE", "rxe0"), ("UCX_UD_TIMEOUT", "3s")]), b))
    }

    fn run(line: &str) {
        let mut words = line.split(' ');
        let status = Command::new(words.next().expect("a word")).args(words).status();
        assert!(status.expect("it runs").success(), "{line}");
    }

    fn until(a: &mut Peer, name: &str, value: u64) {
        let end = Instant::now() + PATIENCE;
        while a.counter(name) != value {
            assert!(Instant::now() < end, "{name} is {}, not {value}", a.counter(name));
        }
    }

    #[test]
    fn peer_with_another_link_address_gets_a_new_handle_with_the_next_endpoint() {
        let Some((mut a, mut b)) = pair("peer_with_another_link_address") else { return };
        let pid = std::process::id().to_be_bytes();
        assert_eq!(a.connect(&b), "ep 0");
        assert_eq!(a.ask("send 0 100"), "sent 100");
        assert_eq!(b.ask("expect 100"), "got 100");
        assert_eq!(a.ask("flush"), "flushed");
        assert_eq!((a.counter("ah.created"), a.counter("ah.invalidated")), (1, 0));
        let mac = format!("02:00:{:02x}:{:02x}:{:02x}:{:02x}", pid[0], pid[1], pid[2], pid[3]);
        run(&format!("ip netns exec soft ip link set v1 address {mac}"));
        run(&format!("ip neigh replace {PEER} lladdr {mac} dev v0 nud reachable"));
        until(&mut a, "ah.invalidated", 1);
        assert_eq!(a.ask("send 0 100"), "sent 100");
        assert_eq!(b.ask("expect 200"), "got 200");
        assert_eq!(a.ask("flush"), "flushed");
        assert_eq!((a.counter("ah.created"), a.counter("ah.live")), (1, 1), "its holder keeps it");
        for ep in 1..=2 {
            assert_eq!(a.connect(&b), format!("ep {ep}"));
            assert_eq!(a.ask(&format!("send {ep} 10")), "sent 10");
            assert_eq!(b.ask(&format!("expect {}", 200 + ep * 10)), format!("got {}", 200 + ep * 10));
            assert_eq!((a.counter("ah.created"), a.counter("ah.live")), (2, 2), "a new one, and then that one");
        }
        assert_eq!(a.counter("ah.invalidated"), 1);
        assert_eq!(a.ask("failures 0"), "failed");
        assert_eq!(a.ask("close"), "closed");
    }

    #[test]
    fn peer_whose_address_goes_is_reported_once_and_found_when_it_is_back() {
        let Some((mut a, mut b)) = pair("peer_whose_address_goes") else { return };
        assert_eq!(a.connect(&b), "ep 0");
        assert_eq!(a.ask("send 0 100"), "sent 100");
        assert_eq!(b.ask("expect 100"), "got 100");
        assert_eq!(a.ask("flush"), "flushed");
        run(&format!("ip netns exec soft ip addr del {PEER}/24 dev v1"));
        // What the kernel finds out by itself within a minute.
        run(&format!("ip neigh flush to {PEER} dev v0"));
        until(&mut a, "ah.invalidated", 1);
        let began = Instant::now();
        let said = a.ask("send 0 100000");
        println!("after {:?}: {said}", began.elapsed());
        assert!(said.starts_with("error") && said.contains(PEER), "{said}");
        assert_eq!(a.ask("failures 1"), "failed EndpointTimeout");
        run(&format!("ip netns exec soft ip addr add {PEER}/24 dev v1"));
        // That it could not be found is remembered for a moment, and is told by `ep` or by the endpoint.
        let end = Instant::now() + PATIENCE;
        let mut ep = 1;
        loop {
            let mut said = a.connect(&b);
            if said == format!("ep {ep}") {
                said = a.ask(&format!("send {ep} 10"));
                if said == "sent 10" {
                    break;
                }
                ep += 1;
            }
            assert!(said.contains("create_ah") && Instant::now() < end, "{said}");
        }
        // What the kernel held back while it asked for the address may come as well.
        assert_eq!(a.ask("flush"), "flushed");
        assert!(b.ask("expect 110").starts_with("got 1"));
        let each_once = " EndpointTimeout".repeat(ep);
        assert_eq!(a.ask(&format!("failures {ep}")), format!("failed{each_once}"));
        assert_eq!(a.ask("close"), "closed");
    }
}
