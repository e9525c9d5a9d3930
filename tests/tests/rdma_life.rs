//! What happens to users of an RDMA device in real life: addresses, links and devices that go away under traffic, and
//! settings, rights and limits under which nothing opens.
//!
//! The tests change the network configuration, so they run only in the machine that `ci/soft-roce` boots (it sets `SOFT_ROCE=1`):
//! soft-RoCE device rxe0 on v0, 10.77.0.1/24, and in the network namespace `soft` the other end, v1 with 10.77.0.2, where the
//! peer has a soft device. Else they print `skipped`.
#![cfg(feature = "rdma-core")]

/// The name by which `ci/rdma` finds suites.
mod rdma {
    use std::{
        process::Command,
        sync::{Mutex, MutexGuard},
        thread::yield_now,
        time::{Duration, Instant},
    };

    use uct_tests::procs::Peer;

    static TURN: Mutex<()> = Mutex::new(());
    const PATIENCE: Duration = Duration::from_secs(60);
    const PEER: &str = env!("CARGO_BIN_EXE_peer");
    const SOFT: [&str; 4] = ["ip", "netns", "exec", "soft"];
    const UVERBS: &str = "/dev/infiniband/uverbs0";

    /// The right to change things.
    struct Rig {
        _turn: MutexGuard<'static, ()>,
    }

    impl Rig {
        fn get(test: &str) -> Option<Rig> {
            let turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
            if std::env::var_os("SOFT_ROCE").is_none() {
                println!("{test}: skipped: runs under ci/soft-roce only");
                return None;
            }
            Some(Rig { _turn: turn })
        }

        fn run(&self, line: &str) {
            let mut words = line.split(' ');
            let out = Command::new(words.next().unwrap()).args(words).output().unwrap();
            assert!(out.status.success(), "{line}: {}", String::from_utf8_lossy(&out.stderr));
        }

        /// A process on rxe0.
        fn near(&self, settings: &[(&str, &str)]) -> Peer {
            self.try_near(&[], settings).unwrap_or_else(|e| panic!("{e}"))
        }

        /// The same behind other words, if it can be.
        fn try_near(&self, wrap: &[&str], settings: &[(&str, &str)]) -> Result<Peer, String> {
            let mut all = vec![("PEER_DEVICE", "rxe0")];
            all.extend(settings);
            Peer::start(PEER, wrap, &all)
        }

        /// Why a process on rxe0 has no interface.
        fn refusal(&self, wrap: &[&str], settings: &[(&str, &str)], words: &[&str]) {
            let said = match self.try_near(wrap, settings) {
                Err(said) => said,
                Ok(_) => panic!("{wrap:?} {settings:?}: it opens"),
            };
            println!("{}", said.trim_end());
            for part in words {
                assert!(said.contains(part), "no `{part}` in: {said}");
            }
            assert!(!said.contains("panicked"), "{said}");
        }

        /// A process on a soft device at the other end.
        fn far(&self, settings: &[(&str, &str)]) -> Peer {
            let mut all = vec![("UCX_SOFT_NETDEV", "v1")];
            all.extend(settings);
            Peer::start(PEER, &SOFT, &all).unwrap_or_else(|e| panic!("{e}"))
        }
    }

    fn until(what: &str, mut done: impl FnMut() -> bool) {
        let end = Instant::now() + PATIENCE;
        while !done() {
            assert!(Instant::now() < end, "{what}");
            yield_now();
        }
    }

    fn number(answer: &str) -> u64 {
        answer.rsplit(' ').next().and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("{answer}"))
    }

    /// Connected both ways, with a first message each way.
    fn pair(a: &mut Peer, b: &mut Peer) {
        for (x, y) in [(0, 1), (1, 0)] {
            let [from, to] = if (x, y) == (0, 1) { [&mut *a, &mut *b] } else { [&mut *b, &mut *a] };
            assert_eq!(from.connect(to), "ep 0");
            assert_eq!(from.ask("send 0 1"), "sent 1");
            assert_eq!(to.ask("expect 1"), "got 1");
        }
    }

    fn gid_is_there(ip: &str) -> bool {
        let ip: std::net::Ipv4Addr = ip.parse().unwrap();
        let wanted = ib::types::Gid::from_ip(ip.into());
        let dev = ib::rdma_core::RdmaDevice::open("rxe0").unwrap();
        ib::device::Device::query_gids(&*dev, 1).unwrap().iter().any(|g| g.gid == wanted)
    }

    /// The address is removed and added again while messages flow in both directions, and nothing is lost. Without events the old
    /// handle is used again: the queue pair falls into ERROR, and is set up anew.
    #[test]
    fn own_address_removed_and_added_again() {
        let Some(rig) = Rig::get("own_address_removed_and_added_again") else { return };
        for events in ["y", "n"] {
            rig.run("ip addr add 10.77.0.201/24 dev v0");
            until("the GID", || gid_is_there("10.77.0.201"));
            let settings = [("UCX_IB_GID", "10.77.0.201"), ("UCX_IB_ASYNC_EVENTS", events)];
            let (mut a, mut b) = (rig.near(&settings), rig.far(&[]));
            pair(&mut a, &mut b);
            let mut total = 1;
            for round in 0..2 {
                rig.run("ip addr del 10.77.0.201/24 dev v0");
                // Sends meet the old handle, or wait for a new one.
                a.tell("send 0 50");
                b.tell("send 0 50");
                until("the GID to go", || !gid_is_there("10.77.0.201"));
                if round == 0 {
                    // Something else takes its place in the table.
                    rig.run("ip addr add 10.77.0.202/24 dev v0");
                }
                rig.run("ip addr add 10.77.0.201/24 dev v0");
                total += 50;
                assert_eq!((a.answer(), b.answer()), ("sent 50".into(), "sent 50".into()));
                assert_eq!(a.ask(&format!("expect {total}")), format!("got {total}"));
                assert_eq!(b.ask(&format!("expect {total}")), format!("got {total}"));
            }
            for p in [&mut a, &mut b] {
                assert_eq!(p.ask("failures 0"), "failed");
            }
            let (resets, replaced) = (number(&a.ask("counter qp.resets")), number(&a.ask("counter ah.re_resolved")));
            println!("events {events}: queue pair set up again {resets} times, handles replaced {replaced} times");
            assert!((1..100).contains(&replaced) && resets <= 8, "{replaced}, {resets}");
            assert!(events == "y" || resets > 0, "without events only the queue pair tells");
            for p in [&mut a, &mut b] {
                assert_eq!(p.ask("close"), "closed");
            }
            rig.run("ip addr del 10.77.0.201/24 dev v0");
            rig.run("ip addr del 10.77.0.202/24 dev v0");
        }
    }

    #[test]
    fn link_down_and_up_under_traffic() {
        let Some(rig) = Rig::get("link_down_and_up_under_traffic") else { return };
        let (mut a, mut b) = (rig.near(&[]), rig.far(&[]));
        pair(&mut a, &mut b);
        let mut total = 1;
        for _ in 0..2 {
            rig.run("ip link set v0 down");
            a.tell("send 0 100");
            b.tell("send 0 100");
            let state = || std::fs::read_to_string("/sys/class/infiniband/rxe0/ports/1/state").unwrap();
            until("the port to go down", || !state().contains("ACTIVE"));
            rig.run("ip link set v0 up");
            total += 100;
            assert_eq!((a.answer(), b.answer()), ("sent 100".into(), "sent 100".into()));
            assert_eq!(a.ask(&format!("expect {total}")), format!("got {total}"));
            assert_eq!(b.ask(&format!("expect {total}")), format!("got {total}"));
        }
        for p in [&mut a, &mut b] {
            assert_eq!(p.ask("failures 0"), "failed");
            assert_eq!(p.ask("close"), "closed");
        }
        // The interface's addresses of version 6 went with the link.
        rig.run("ip addr replace fd77::1/64 dev v0 nodad");
    }

    /// Nothing tells of it, and packets that are too long disappear while short ones are answered.
    #[test]
    fn mtu_that_shrinks_under_an_open_interface() {
        let Some(rig) = Rig::get("mtu_that_shrinks_under_an_open_interface") else { return };
        let (mut a, mut b) = (rig.near(&[("UCX_UD_TIMEOUT", "20s")]), rig.far(&[]));
        pair(&mut a, &mut b);
        assert_eq!(a.ask("long 0 10 4000"), "sent 10");
        assert_eq!(b.ask("expect 11"), "got 11");
        // For a moment: all arrives when it is back.
        rig.run("ip link set v0 mtu 1500");
        assert_eq!(a.ask("long 0 1 4000"), "sent 1");
        assert_eq!(b.ask("send 0 5"), "sent 5");
        assert_eq!(a.ask("expect 6"), "got 6");
        rig.run("ip link set v0 mtu 4500");
        assert_eq!(b.ask("expect 12"), "got 12");
        // For good: an error that says why, in bounded time.
        rig.run("ip link set v0 mtu 1500");
        assert_eq!(a.ask("long 0 1 4000"), "sent 1");
        assert_eq!(a.ask("failures 1"), "failed EndpointTimeout");
        let why = a.ask("why");
        println!("{why}");
        assert!(why.contains("MTU of port 1 fell from 4096 to 1024"), "{why}");
        rig.run("ip link set v0 mtu 4500");
        assert_eq!(a.ask("close"), "closed");
    }

    #[test]
    fn what_does_not_open_says_why() {
        let Some(rig) = Rig::get("what_does_not_open_says_why") else { return };
        let nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
        rig.refusal(&[], &[("PEER_DEVICE", "rxe9")], &["rxe9", "there are", "soft0", "rxe0"]);
        rig.refusal(&[], &[("UCX_IB_GID_INDEX", "100000")], &["UCX_IB_GID_INDEX=100000", "at most 255"]);
        rig.refusal(&[], &[("UCX_IB_GID_INDEX", "200")], &["rxe0:1", "index 200, which is empty", "10.77.0.1"]);
        rig.refusal(
            &[],
            &[("UCX_UD_VERBS_RX_QUEUE_LEN", "1000000")],
            &["rxe0:1", "create_cq", "UCX_UD_VERBS_RX_QUEUE_LEN=1000000", "that the device allows"],
        );
        // Rights.
        rig.run(&format!("chmod 600 {UVERBS}"));
        rig.refusal(&nobody, &[], &["rxe0", UVERBS, "group", "udev", "--device=/dev/infiniband"]);
        rig.run(&format!("chmod 666 {UVERBS}"));
        // Locked memory: enough for a region, not for an interface.
        let mut small = vec!["prlimit", "--memlock=65536:65536"];
        small.extend(nobody);
        rig.refusal(&small, &[], &["rxe0", "reg_mr", "65536 bytes", "ulimit -l"]);
        // The port.
        rig.run("ip link set v0 down");
        rig.refusal(&[], &[], &["rxe0:1", "not active", "ip link"]);
        rig.run("ip link set v0 up");
        rig.run("ip addr replace fd77::1/64 dev v0 nodad");
        drop(rig.near(&[]));
    }

    /// Last by name: it takes the device away, and makes a new one of the same name.
    #[test]
    fn zz_device_removed_under_load() {
        let Some(rig) = Rig::get("zz_device_removed_under_load") else { return };
        let (mut a, mut b) = (rig.near(&[]), rig.far(&[("UCX_UD_TIMEOUT", "5s")]));
        pair(&mut a, &mut b);
        for ep in 1..4 {
            assert_eq!(a.connect(&b), format!("ep {ep}"));
            assert_eq!(a.ask(&format!("send {ep} 1")), "sent 1");
        }
        b.tell("send 0 1000000");
        let mut removal = Command::new("rdma").args(["link", "delete", "rxe0"]).spawn().unwrap();
        // More than can be sent before that is noticed.
        let answer = a.ask("send 0 100000000");
        assert!(answer.starts_with("error") && answer.contains("gone") && answer.contains("open it again"), "{answer}");
        println!("{answer}");
        assert_eq!(a.ask("failures 4"), "failed Io Io Io Io");
        // Nothing hangs: everything can be closed, and then the removal ends.
        assert_eq!(a.ask("close"), "closed");
        let (status, said) = a.end();
        assert!(status.success() && !said.contains("panicked"), "{status}: {said}");
        let end = Instant::now() + PATIENCE;
        while removal.try_wait().unwrap().is_none() {
            assert!(Instant::now() < end, "the removal waits for somebody");
            yield_now();
        }
        assert!(removal.wait().unwrap().success());
        drop(b);
        // A new device of the same name.
        rig.run("rdma link add rxe0 type rxe netdev v0");
        until("the new device", || gid_is_there("10.77.0.1"));
        let (mut a, mut b) = (rig.near(&[]), rig.far(&[]));
        pair(&mut a, &mut b);
        for p in [&mut a, &mut b] {
            assert_eq!(p.ask("close"), "closed");
        }
    }
}
