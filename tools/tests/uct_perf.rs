//! `uct_perf` as a user runs it: the program alone, as a pair, and everything that can go wrong between two processes.
//!
//! Nothing here sleeps to wait: the tests read the line that says "listening", the line that says that runs have begun,
//! or the end of a stream. A watchdog kills what does not end, so that a failure is a failure and not a hang.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    process::{Child, ChildStderr, ChildStdout, Command, ExitStatus, Stdio},
    sync::{Mutex, MutexGuard, mpsc},
    thread,
    time::Duration,
};

/// No run takes nearly as long; it only turns a hang into a failure.
const WATCHDOG: Duration = Duration::from_secs(120);

/// The processes of one test are enough for the CPUs of a small machine.
fn one_at_a_time() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(|e| e.into_inner())
}

struct Running {
    child: Child,
    out: BufReader<ChildStdout>,
    err: ChildStderr,
    /// Dropped at the end, which calls the watchdog off.
    _watchdog: mpsc::Sender<()>,
}

struct Ended {
    status: ExitStatus,
    out: String,
    err: String,
}

fn start(args: &[&str]) -> Running {
    let mut child = Command::new(env!("CARGO_BIN_EXE_uct_perf"))
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let (out, err) = (BufReader::new(child.stdout.take().unwrap()), child.stderr.take().unwrap());
    let (tx, rx) = mpsc::channel();
    let pid = child.id();
    thread::spawn(move || {
        if rx.recv_timeout(WATCHDOG) == Err(mpsc::RecvTimeoutError::Timeout) {
            signal(pid, "KILL");
        }
    });
    Running { child, out, err, _watchdog: tx }
}

/// Sends a signal to a process that the caller knows to exist.
fn signal(pid: u32, name: &str) {
    let s = Command::new("kill").args(["-s", name, &pid.to_string()]).status().unwrap();
    assert!(s.success(), "kill -s {name} {pid}");
}

impl Running {
    /// Reads up to the line with `words` in it, and returns that line.
    fn line_with(&mut self, words: &str) -> String {
        loop {
            let mut line = String::new();
            if self.out.read_line(&mut line).unwrap() == 0 {
                let mut err = String::new();
                self.err.read_to_string(&mut err).unwrap();
                panic!("the program ended without a line with `{words}`: {err}");
            }
            if line.contains(words) {
                return line;
            }
        }
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
    }

    fn end(mut self) -> Ended {
        let (mut out, mut err) = (String::new(), String::new());
        // One after the other is safe: neither stream gets more than a pipe holds after the other is closed.
        self.out.read_to_string(&mut out).unwrap();
        self.err.read_to_string(&mut err).unwrap();
        Ended { status: self.child.wait().unwrap(), out, err }
    }
}

impl Ended {
    fn ok(self) -> String {
        assert!(self.status.success(), "{}: {}\n{}", self.status, self.err, self.out);
        assert_eq!(self.err, "");
        self.out
    }

    /// The one line that explains the failure.
    #[track_caller]
    fn failure(self) -> String {
        assert_eq!(self.status.code(), Some(1), "{}\n{}", self.err, self.out);
        assert_eq!(self.err.lines().count(), 1, "{}", self.err);
        let line = self.err.trim_end().strip_prefix("uct_perf: ").unwrap_or_else(|| panic!("{}", self.err));
        line.to_string()
    }
}

fn run(args: &[&str]) -> Ended {
    start(args).end()
}

/// A server on a free port, and that port.
fn server(args: &[&str]) -> (Running, String) {
    let mut s = start(&[&["--server", "-p", "0", "--wait", "yield"], args].concat());
    let line = s.line_with("listening on ");
    let port = line.trim_end().rsplit(':').next().unwrap().to_string();
    (s, port)
}

const QUICK: [&str; 8] = ["--wait", "yield", "-n", "50", "-w", "5", "-s", "8,64,max"];
/// A run that does not end by itself within the life of a test.
const ENDLESS: [&str; 6] = ["--wait", "yield", "--time", "3600", "-s", "8"];

/// The number of the process in a line of the heading.
fn pid_in(line: &str) -> u32 {
    let mut words = line.split_whitespace().skip_while(|&w| w != "pid");
    words.nth(1).unwrap_or_default().parse().unwrap_or_else(|_| panic!("{line}"))
}

/// Waits for the end of a process that is not ours to wait for.
fn gone(pid: u32) {
    let state = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // A zombie (`Z` after the name in parentheses) has ended; only its new parent has not looked yet.
    while !state(pid).rsplit(')').next().unwrap_or_default().trim_start().starts_with('Z')
        && Path::new(&format!("/proc/{pid}")).exists()
    {
        thread::yield_now();
    }
}

#[test]
fn alone_it_tests_with_a_second_process_and_ends_with_a_table() {
    let _one = one_at_a_time();
    let out = run(&QUICK).ok();
    let lines: Vec<&str> = out.lines().collect();
    assert!(lines[0].contains("between two processes of this host"), "{out}");
    assert_ne!(pid_in(lines[1]), pid_in(lines[2]));
    assert!(lines[5].contains("am_lat") && lines[5].contains("am_bw") && lines[5].contains("am_rate"), "{out}");
    assert_eq!(
        lines[6].split_whitespace().collect::<Vec<_>>(),
        ["bytes", "p50", "p99", "avg", "max", "MB/s", "messages/s"]
    );
    for (line, size) in lines[7..10].iter().zip(["8", "64", ""]) {
        let cells: Vec<_> = line.split_whitespace().collect();
        assert_eq!(cells.len(), 7, "{out}");
        assert!(cells[0].starts_with(size), "{out}");
        for c in cells {
            let n: f64 = c.replace(',', "").parse().unwrap();
            assert!(n > 0.0, "{out}");
        }
        assert_eq!(line.len(), lines[6].len(), "{out}");
    }
    assert!(lines[11].contains("each verified"), "{out}");
}

#[test]
fn every_layout_and_way_to_connect() {
    let _one = one_at_a_time();
    for connect in ["iface", "ep"] {
        for layout in ["short", "shortiov", "bcopy", "zcopy"] {
            let args = [&QUICK[..], &["-D", layout, "--connect", connect, "--format", "json"]].concat();
            let v: serde_json::Value = serde_json::from_str(&run(&args).ok()).unwrap();
            let results = v["results"].as_array().unwrap();
            // `max` is 64 itself for some layouts.
            assert!(results.len() == 9 || results.len() == 6);
            assert!(results.iter().all(|r| r["layout"] == layout && r["iterations"] == 50));
            assert_eq!(v["connect"], connect);
        }
    }
}

#[test]
fn csv_and_final_numbers() {
    let _one = one_at_a_time();
    let out = run(&[&QUICK[..], &["-v", "-t", "am_lat"]].concat()).ok();
    let fields: Vec<usize> = out.lines().map(|l| l.split(',').count()).collect();
    assert_eq!(fields, [16; 4], "{out}");
    let out = run(&[&QUICK[..], &["-f", "-t", "am_bw"]].concat()).ok();
    assert_eq!(out.lines().count(), 5, "{out}");
}

#[test]
fn sleeping_for_events_works_too() {
    let _one = one_at_a_time();
    let out = run(&["--wait", "events", "-n", "20", "-w", "2", "-s", "8", "-v"]).ok();
    assert_eq!(out.lines().count(), 4, "{out}");
}

#[test]
fn a_server_serves_one_client() {
    let _one = one_at_a_time();
    let (server, port) = server(&[]);
    let out = run(&[&QUICK[..], &["127.0.0.1", "-p", &port]].concat()).ok();
    assert!(out.starts_with("uct_perf ") && out.contains("between client and server"), "{out}");
    let out = server.end().ok();
    assert!(out.starts_with("client 127.0.0.1 ("), "{out}");
    assert!(out.ends_with("done: 9 runs, 496 messages arrived, each verified in number and content\n"), "{out}");
}

#[test]
fn a_killed_client_is_noticed_by_the_server() {
    let _one = one_at_a_time();
    let (server, port) = server(&[]);
    let mut client = start(&[&ENDLESS[..], &["127.0.0.1", "-p", &port]].concat());
    client.line_with("messages/s");
    client.kill();
    let e = server.end().failure();
    // Where the server was in its part of the run is a matter of chance.
    assert!(e.contains("client 127.0.0.1 closed the control connection: it ended, was killed"), "{e}");
    client.end();
}

#[test]
fn a_killed_server_is_noticed_by_the_client_in_every_test() {
    let _one = one_at_a_time();
    for test in ["am_lat", "am_bw", "am_rate"] {
        let (mut server, port) = server(&[]);
        let mut client = start(&[&ENDLESS[..], &["127.0.0.1", "-p", &port, "-t", test]].concat());
        client.line_with("bytes ");
        server.kill();
        let e = client.end().failure();
        let want = format!("{test}, 8 bytes: 127.0.0.1 port {port} closed the control connection");
        assert!(e.starts_with(&want), "{e}");
        server.end();
    }
}

#[test]
fn neither_process_of_a_self_test_outlives_the_other() {
    let _one = one_at_a_time();
    let mut first = start(&ENDLESS);
    let second = pid_in(&first.line_with("server "));
    first.line_with("messages/s");
    signal(second, "KILL");
    let e = first.end().failure();
    let want = format!("am_lat, 8 bytes: the second process (pid {second}) closed the control connection");
    assert!(e.starts_with(&want) && e.ends_with("it ended with signal: 9 (SIGKILL)"), "{e}");

    let mut first = start(&ENDLESS);
    let second = pid_in(&first.line_with("server "));
    first.line_with("messages/s");
    first.kill();
    gone(second);
    first.end();
}

#[test]
fn an_interrupt_ends_both_without_a_word() {
    let _one = one_at_a_time();
    let mut first = start(&ENDLESS);
    let second = pid_in(&first.line_with("server "));
    first.line_with("messages/s");
    signal(first.child.id(), "INT");
    let end = first.end();
    assert!(!end.status.success());
    assert_eq!(end.err, "");
    gone(second);
}

#[test]
fn a_stopped_peer_is_given_up() {
    let _one = one_at_a_time();
    let (server, port) = server(&[]);
    let mut client = start(&[&ENDLESS[..], &["127.0.0.1", "-p", &port, "--timeout", "1.5"]].concat());
    client.line_with("messages/s");
    signal(server.child.id(), "STOP");
    let e = client.end().failure();
    // It may have been stopped before or after it was ready for the run.
    assert!(e.contains(" 1.5 s") && e.contains("may be stopped or overloaded"), "{e}");
    signal(server.child.id(), "CONT");
    let e = server.end().failure();
    assert!(e.contains("client 127.0.0.1 gave up: am_lat, 8 bytes: "), "{e}");
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let _one = one_at_a_time();
    let Running { mut child, out, mut err, _watchdog } = start(&QUICK);
    drop(out);
    let mut text = String::new();
    err.read_to_string(&mut text).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(text, "");
}

#[test]
fn bad_options_are_explained() {
    for (args, words) in [
        (&["-t", "put_lat"][..], "invalid value 'put_lat' for '--test <TEST>'"),
        (&["-s", "3"], "the smallest message has 8"),
        (&["-n", "0"], "'--iters <COUNT>'"),
        (&["-D", "rndv"], "[possible values: short, shortiov, bcopy, zcopy]"),
        (&["--frobnicate"], "unexpected argument '--frobnicate'"),
        (&["-l", "host"], "cannot be used with"),
    ] {
        let e = run(args);
        assert_eq!(e.status.code(), Some(2));
        assert!(e.err.contains(words), "{args:?}: {}", e.err);
        assert_eq!(e.out, "");
    }
    assert!(run(&["--help"]).ok().contains("Examples:"));
    assert!(run(&["--version"]).ok().starts_with("uct_perf "));
}

#[test]
fn what_is_not_there_is_named_with_what_is() {
    let _one = one_at_a_time();
    let e = run(&["-x", "warp"]).failure();
    assert!(e.starts_with("there is no transport `warp`; what works on this host: -x ud"), "{e}");
    let e = run(&["-d", "soft99"]).failure();
    assert!(e.starts_with("there is no device `soft99`; what works on this host: -x ud"), "{e}");
    let e = run(&["-s", "1m", "-n", "1"]).failure();
    assert!(e.starts_with("1048576 bytes are too many: "), "{e}");

    let e = run(&["--server", "-p", "0", "-d", "soft99"]).failure();
    assert!(e.starts_with("there is no device `soft99`"), "{e}");
}

#[test]
fn ports_that_do_not_answer_as_they_should() {
    let _one = one_at_a_time();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let client = ["127.0.0.1", "-p", &port, "-n", "1", "--timeout"];
    let quick = [&client[..], &["0.3"]].concat();
    let client = [&client[..], &["30"]].concat();

    // In use.
    let e = run(&["--server", "-p", &port]).failure();
    assert!(e.starts_with(&format!("TCP port {port} is in use by another process")), "{e}");

    // Accepted by the kernel, and never a word.
    let e = run(&quick).failure();
    assert!(e.contains("said nothing for 0.3 s"), "{e}");
    drop(listener.accept().unwrap());

    // Another program.
    let p = start(&client);
    listener.accept().unwrap().0.write_all(b"220 mail ready\r\n").unwrap();
    let e = p.end().failure();
    assert_eq!(
        e,
        format!(
            "127.0.0.1 port {port} is no uct_perf: it said \"220 mail ready..\"; check host and port, on both sides"
        )
    );

    // Another version.
    let p = start(&client);
    let (mut s, _) = listener.accept().unwrap();
    let mut hello = [0; 32];
    s.read_exact(&mut hello).unwrap();
    hello[8] = hello[8].wrapping_add(1);
    hello[12..17].copy_from_slice(b"9.8.7");
    s.write_all(&hello).unwrap();
    let e = p.end().failure();
    assert!(e.starts_with(&format!("version mismatch: 127.0.0.1 port {port} is uct_perf 9.8.7")), "{e}");

    // Nobody any more.
    drop((s, listener));
    let e = run(&["127.0.0.1", "-p", &port]).failure();
    assert_eq!(
        e,
        format!("127.0.0.1 port {port} refused the connection: start `uct_perf --server -p {port}` there first")
    );
}

#[test]
fn strangers_at_the_server() {
    let _one = one_at_a_time();
    let visit = |first: &[u8]| {
        let (server, port) = server(&["--timeout", "5"]);
        let mut s = TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
        s.write_all(first).unwrap();
        server.end().failure()
    };
    let e = visit(b"GET / HTTP/1.1\r\n\r\n");
    assert!(e.starts_with("client 127.0.0.1 is no uct_perf: it said \"GET / HTTP"), "{e}");
    let e = visit(&[0; 584]);
    assert!(e.contains("it looks like a ucx_perftest client"), "{e}");

    // The right first words, and then garbage.
    let hello = {
        let (server, port) = server(&[]);
        let mut s = TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
        let mut hello = [0; 32];
        s.read_exact(&mut hello).unwrap();
        drop(s);
        server.end().failure();
        hello
    };
    let e = visit(&[&hello[..], &[0xff; 64]].concat());
    assert!(e.starts_with("client 127.0.0.1 sent garbage on the control connection: a frame of 4294967295"), "{e}");
    let e = visit(&[&hello[..], b"\x02\0\0\0{}"].concat());
    assert!(e.contains("a frame that is no message"), "{e}");
    let e = visit(&[&hello[..], b"\x0e\0\0\0{\"type\":\"bye\"}"].concat());
    assert!(e.ends_with("sent `bye` where `setup` was due"), "{e}");
    let mut other = hello;
    other[8] += 1;
    let e = visit(&other);
    assert!(e.starts_with("version mismatch: client 127.0.0.1 is uct_perf "), "{e}");
}
