//! Soft devices of several processes: on one host with no setup, and between two hosts, which two network namespaces
//! with a veth pair between them stand for. The latter needs root and `ip`; without them it says so and passes.

mod soft_common;

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use ib::{
    device::*,
    soft::{SoftConfig, SoftDevice},
    types::*,
};
use soft_common::*;

const ROLE: &str = "SOFT_TEST_ROLE";
const BIND: &str = "SOFT_TEST_BIND";
const MARK: &str = "peer: ";
/// Messages that the driving process sends before it waits for their echoes.
const WINDOW: usize = 32;

/// What a process tells the others of itself, as one line.
struct Card {
    gid: Gid,
    qpn: Qpn,
    mtu: usize,
    soft: SoftAv,
}

impl Card {
    fn of(n: &Node) -> String {
        let (id, mtu) = (n.dev.identity(), n.dev.port().mtu_bytes());
        format!("{MARK}{} {} {mtu} {} {}", n.dev.gid().to_ip(), n.qp.qpn().get(), id.udp_port, id.host_id)
    }

    fn parse(line: &str) -> Card {
        let f: Vec<&str> = line.trim().trim_start_matches(MARK).split(' ').collect();
        Card {
            gid: Gid::from_ip(f[0].parse().unwrap()),
            qpn: Qpn::truncate(f[1].parse().unwrap()),
            mtu: f[2].parse().unwrap(),
            soft: SoftAv { udp_port: f[3].parse().unwrap(), host_id: f[4].parse().unwrap() },
        }
    }
}

/// Not a test of its own: what the processes that the tests start run.
#[test]
fn peer_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let cfg = match std::env::var(BIND) {
        Ok(ip) => SoftConfig::at(ip.parse().unwrap()),
        Err(_) => SoftConfig::default(),
    };
    let mut me = Node::on(&SoftDevice::open(&cfg).unwrap(), 256);
    println!("\n{}", Card::of(&me));
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let peer = Card::parse(&line);
    let ah = me.dev.create_ah(&ah_attr(me.dev.gid(), peer.gid, peer.soft)).unwrap();
    let mtu = peer.mtu.min(me.dev.port().mtu_bytes());
    let mut buf = registered(&me.dev, 4096);
    let lengths: Vec<usize> = (0..8 * WINDOW).map(|i| [0, 8, 8, 8, mtu, mtu, mtu - 1, i][i % 8]).collect();
    if role == "drive" {
        if peer.soft.host_id != me.dev.identity().host_id {
            let loopback = ah_attr(me.dev.gid(), Gid::from_ip("127.0.0.1".parse().unwrap()), peer.soft);
            assert!(me.dev.create_ah(&loopback).is_err(), "the peer's loopback address is out of reach");
        }
        for (round, group) in lengths.chunks(WINDOW).enumerate() {
            for (i, &len) in group.iter().enumerate() {
                buf[..len].fill((round * WINDOW + i) as u8);
                me.post_long(&ah, peer.qpn, &buf, len);
            }
            me.qp.ring();
            let done = me.receive(group.len());
            for (i, (wc, &len)) in done.iter().zip(group).enumerate() {
                let want = vec![(round * WINDOW + i) as u8; len];
                assert_eq!(payload_of(wc), want, "round {round}, message {i}");
                assert_eq!(wc.src_qpn, peer.qpn);
            }
            me.recycle(done);
        }
    } else {
        for group in lengths.chunks(WINDOW) {
            let done = me.receive(group.len());
            for wc in &done {
                let len = wc.byte_len as usize - GRH_LEN;
                buf[..len].copy_from_slice(payload_of(wc));
                me.post_long(&ah, peer.qpn, &buf, len);
            }
            me.qp.ring();
            me.recycle(done);
        }
    }
    let (s, w) = (me.dev.stats(), me.dev.wire_stats());
    assert_eq!((s.dropped_total(), w.send_errors), (0, 0), "{s} {w:?}");
    assert!(w.gso_runs > 0, "{w:?}");
}

struct Process {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Process {
    fn start(role: &str, netns: Option<&str>, bind: Option<&str>) -> Process {
        let me = std::env::current_exe().unwrap();
        let mut cmd = match netns {
            None => Command::new(me),
            Some(ns) => {
                let mut c = Command::new("ip");
                c.args(["netns", "exec", ns]).arg(me);
                c
            }
        };
        cmd.args(["--exact", "peer_process", "--nocapture"]).env(ROLE, role);
        if let Some(ip) = bind {
            cmd.env(BIND, ip);
        }
        let mut child = cmd.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let to = child.stdin.take().unwrap();
        let from = BufReader::new(child.stdout.take().unwrap());
        Process { child, to, from }
    }

    fn card(&mut self) -> String {
        let mut line = String::new();
        while !line.starts_with(MARK) {
            line.clear();
            assert!(self.from.read_line(&mut line).unwrap() > 0, "the process ended before it had a device");
        }
        line
    }

    fn finish(mut self) {
        drop(self.to);
        let rest: Vec<String> = self.from.lines().map_while(Result::ok).collect();
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}: {}", rest.join("\n"));
    }
}

fn exchange(mut drive: Process, mut echo: Process) {
    let (d, e) = (drive.card(), echo.card());
    echo.to.write_all(d.as_bytes()).unwrap();
    drive.to.write_all(e.as_bytes()).unwrap();
    drive.finish();
    echo.finish();
}

#[test]
fn processes_on_one_host_need_no_setup() {
    let pairs: Vec<_> =
        (0..3).map(|_| (Process::start("drive", None, None), Process::start("echo", None, None))).collect();
    for (drive, echo) in pairs {
        exchange(drive, echo);
    }
}

struct Namespaces([String; 2]);

fn ip(args: &str) -> Result<(), String> {
    let out = Command::new("ip").args(args.split(' ')).output().map_err(|e| format!("ip: {e}"))?;
    if out.status.success() {
        return Ok(());
    }
    Err(format!("ip {args}: {}", String::from_utf8_lossy(&out.stderr).trim()))
}

impl Namespaces {
    fn make() -> Result<Namespaces, String> {
        let id = std::process::id();
        let ns = Namespaces([format!("soft-a-{id}"), format!("soft-b-{id}")]);
        let [a, b] = &ns.0;
        ip(&format!("netns add {a}"))?;
        ip(&format!("netns add {b}"))?;
        ip(&format!("-n {a} link add veth0 type veth peer name veth0 netns {b}"))?;
        for (n, name) in [a, b].into_iter().enumerate() {
            let host = n + 1;
            ip(&format!("-n {name} addr add 10.77.0.{host}/24 dev veth0"))?;
            ip(&format!("-n {name} addr add fd77::{host}/64 dev veth0 nodad"))?;
            ip(&format!("-n {name} link set veth0 up"))?;
            ip(&format!("-n {name} link set lo up"))?;
        }
        Ok(ns)
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in &self.0 {
            let _ = ip(&format!("netns del {name}"));
        }
    }
}

#[test]
fn two_hosts_exchange_messages() {
    let ns = match Namespaces::make() {
        Ok(ns) => ns,
        Err(why) => return println!("skipped: needs root and network namespaces: {why}"),
    };
    let [a, b] = &ns.0;
    for (left, right) in [("10.77.0.1", "10.77.0.2"), ("fd77::1", "fd77::2")] {
        let drive = Process::start("drive", Some(a), Some(left));
        let echo = Process::start("echo", Some(b), Some(right));
        exchange(drive, echo);
    }
}
