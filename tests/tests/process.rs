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

/// The same on an RDMA device, with and without what makes registered memory safe.
#[cfg(feature = "rdma-core")]
mod rdma {
    #[test]
    fn child_on_an_rdma_device() {
        let Some(device) = uct_tests::rdma::first() else {
            println!("child_on_an_rdma_device: skipped: no RDMA device with an active port 1");
            return;
        };
        for (fork_init, what) in [("n", "use"), ("try", "use"), ("n", "fork")] {
            super::parent_goes_on_after(what, &[("PEER_DEVICE", &device), ("UCX_IB_FORK_INIT", fork_init)]);
        }
    }
}
