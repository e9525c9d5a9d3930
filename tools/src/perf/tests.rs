//! Whole sessions, client and server in two threads, over the fake transport.

use std::{os::unix::net::UnixStream, sync::atomic::AtomicU64, sync::atomic::Ordering::Relaxed, thread};

use super::{
    fake::{Fabric, Fate, MAX},
    payload::Header,
    session::DATA_ID,
    *,
};

struct Outcome {
    /// The client's output, or its failure.
    client: std::result::Result<String, String>,
    server: std::result::Result<Served, String>,
}

fn text<T>(r: Result<T>) -> std::result::Result<T, String> {
    r.map_err(|f| f.to_string())
}

fn options(args: &[&str]) -> Options {
    Options::parse_from([&["uct_perf", "--wait", "yield"], args].concat())
}

fn session(fabric: &Arc<Fabric>, args: &[&str]) -> Outcome {
    sides(fabric, args, &[])
}

fn sides(fabric: &Arc<Fabric>, client_args: &[&str], server_args: &[&str]) -> Outcome {
    let (a, b) = UnixStream::pair().unwrap();
    let (registry, env) = (fabric.registry(), crate::environment());
    let of = |args| Context { registry: &registry, env: &env, options: options(args) };
    let (client, server) = (of(client_args), of(server_args));
    thread::scope(|scope| {
        let server = scope.spawn(move || {
            let alert = Arc::new(Alert::default());
            let link = Link::open(Stream::Local(b), server.link_params("the client".into(), &alert))?;
            server.server(None, link, &alert, &mut |_, _| Ok(()))
        });
        let run = || {
            let alert = Arc::new(Alert::default());
            let local = client.open(client.options.transport.as_deref(), &alert)?;
            let link = Link::open(Stream::Local(a), client.link_params("the server".into(), &alert))?;
            let mut s = Session::new(local, link, client.manner())?;
            let mut out = Vec::new();
            let r = client::run(&mut s, &client.options, true, &mut out);
            s.end(r)?;
            Ok(String::from_utf8(out).unwrap())
        };
        let client = text(run());
        Outcome { client, server: text(server.join().unwrap()) }
    })
}

/// Spoils the `n`-th (from 0) data message of 40 bytes.
fn spoil(n: u64, f: impl Fn(&mut Vec<u8>) -> Fate + Send + Sync + 'static) -> Arc<Fabric> {
    let seen = AtomicU64::new(0);
    Fabric::with_fault(move |id, m| {
        if id == DATA_ID && m.len() == 40 && seen.fetch_add(1, Relaxed) == n { f(m) } else { Fate::Arrives }
    })
}

#[test]
fn every_test_and_layout_verifies_every_message() {
    for connect in ["iface", "ep"] {
        for layout in ["short", "shortiov", "bcopy", "zcopy"] {
            let o = session(
                &Fabric::new(),
                &["-n", "100", "-w", "7", "-s", "8,40,max", "-D", layout, "--connect", connect, "--format", "json"],
            );
            let v: serde_json::Value = serde_json::from_str(&o.client.unwrap()).unwrap();
            let results = v["results"].as_array().unwrap();
            assert_eq!(results.len(), 9);
            let max = if layout.starts_with("short") { 64 } else { MAX };
            for (r, want) in results.iter().zip([8, 8, 8, 40, 40, 40, max, max, max]) {
                assert_eq!((&r["size"], &r["layout"]), (&want.into(), &layout.into()));
                assert_eq!((&r["iterations"], &r["warmup"]), (&100.into(), &7.into()));
            }
            // Latency counts both directions at the client, one at the server; the first exchange is one more.
            assert_eq!(v["verified_messages"], 3 * (2 + 1 + 1) * 107);
            assert_eq!(o.server.unwrap(), Served { runs: 9, messages: 9 * 107 + 1 });
        }
    }
}

#[test]
fn a_time_limit_ends_a_run() {
    let o = session(&Fabric::new(), &["--time", "0.01", "-s", "8", "--format", "csv"]);
    let out = o.client.unwrap();
    assert_eq!(out.lines().count(), 4, "{out}");
    assert!(o.server.unwrap().messages > 0);
}

#[test]
fn one_message_without_warm_up_is_a_run() {
    let o = session(&Fabric::new(), &["-n", "1", "-w", "0", "-s", "40", "-v"]);
    assert_eq!(o.server.unwrap(), Served { runs: 3, messages: 4 });
    assert!(o.client.unwrap().contains("\nam_bw,bcopy,40,1,0,"));
}

#[test]
fn the_table_is_for_people() {
    let out = session(&Fabric::new(), &["-n", "10", "-s", "8,40"]).client.unwrap();
    let lines: Vec<_> = out.lines().collect();
    assert!(lines[0].ends_with("active messages over fake, between two processes of this host"), "{out}");
    assert!(lines[1].contains("client  fake0:1  66616b65"), "{out}");
    assert_eq!(lines[6].split_whitespace().count(), 7, "{out}");
    assert!(lines.last().unwrap().contains("each verified in number and content"), "{out}");
}

#[test]
fn damage_is_found_and_told_to_both_sides() {
    for test in ["am_lat", "am_bw", "am_rate"] {
        let flip = |m: &mut Vec<u8>| {
            m[33] ^= 4;
            Fate::Arrives
        };
        let o = session(&spoil(20, flip), &["-t", test, "-n", "100", "-w", "5", "-s", "40"]);
        let want = format!("{test}, 40 bytes: ");
        let (c, s) = (o.client.unwrap_err(), o.server.unwrap_err());
        assert!(
            c.starts_with(&want) && c.contains("verification failed: message ") && c.contains(": byte 33 of 40 is 0x"),
            "{c}"
        );
        assert!(s.contains("verification failed: message ") && s.contains(": byte 33 of 40 is 0x"), "{s}");
    }
}

#[test]
fn duplicates_and_losses_are_found() {
    let o = session(&spoil(9, |_| Fate::ArrivesTwice), &["-t", "am_bw", "-n", "100", "-w", "0", "-s", "40"]);
    let e = o.server.unwrap_err();
    assert!(e.contains("message 10: message 9 arrived in its place (delivered twice or late)"), "{e}");
    let o = session(&spoil(9, |_| Fate::Lost), &["-t", "am_bw", "-n", "100", "-w", "0", "-s", "40"]);
    let e = o.server.unwrap_err();
    assert!(e.contains("message 9: message 10 arrived in its place (1 lost or overtaken)"), "{e}");
}

#[test]
fn a_silent_network_is_called_so_within_the_time_out() {
    let fabric = Fabric::with_fault(|_, _| Fate::Lost);
    let o = sides(&fabric, &["--timeout", "0.2", "-n", "1"], &["--timeout", "30"]);
    let e = o.client.unwrap_err();
    assert!(
        e.starts_with("the first message: no reply for 0.2 s over fake, though the control connection is open"),
        "{e}"
    );
    let e = o.server.unwrap_err();
    assert!(e.contains("the client gave up: the first message: no reply"), "{e}");
}

#[test]
fn a_message_of_another_run_is_refused() {
    let old = |m: &mut Vec<u8>| {
        let h = Header::parse(m).unwrap();
        m[..8].copy_from_slice(&Header { run: h.run + 1, ..h }.to_bytes());
        Fate::Arrives
    };
    let o = session(&spoil(3, old), &["-t", "am_rate", "-n", "100", "-s", "40"]);
    let e = o.server.unwrap_err();
    assert!(e.contains("message 3: it belongs to run 2 instead of run 1"), "{e}");
}

#[test]
fn each_side_picks_its_own_device_and_errors_list_what_works() {
    let o = sides(&Fabric::new(), &["-d", "fake0:2", "-n", "1", "-s", "8"], &["-d", "fake0:1"]);
    let out = o.client.unwrap();
    assert!(out.contains("client  fake0:2 ") && out.contains("server  fake0:1 "), "{out}");

    let works = "what works on this host: -x fake -d fake0:1";
    for (args, words) in [
        (["-x", "warp"], "there is no transport `warp`; "),
        (["-d", "fake9"], "there is no device `fake9`; "),
        (["-d", "fake0:3"], "fake cannot use device fake0: it has no port 3, only 1, 2; "),
        (["-d", "broken0"], "fake cannot use device broken0: its cable is cut; "),
    ] {
        let want = format!("{words}{works}");
        let o = sides(&Fabric::new(), &args, &[]);
        assert_eq!(o.client.unwrap_err(), want);
        // In this harness the client has a connection before it has a device, and drops it.
        assert!(o.server.is_err());
        if args[0] == "-d" {
            let o = sides(&Fabric::new(), &[], &args);
            assert_eq!(o.client.unwrap_err(), format!("the server gave up: {want}"));
            assert_eq!(o.server.unwrap_err(), want);
        }
    }
}

#[test]
fn sizes_beyond_the_limit_are_refused_before_anything_is_sent() {
    let o = session(&Fabric::new(), &["-s", "8:4096:x2"]);
    let e = o.client.unwrap_err();
    assert!(e.starts_with("1024 bytes are too many: fake sends at most 1000 in one copying message"), "{e}");
}
