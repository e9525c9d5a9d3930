//! Compares the soft device with a bare UDP socket, between two processes that spin: round trips and one-way rate of
//! small and of large messages. Both are measured in turns in one run; only their ratio means anything.
//!
//! `cargo run --release -p ib --example soft_bench [rounds]`

use std::{
    env,
    io::{BufRead, BufReader, Write},
    net::{SocketAddr, UdpSocket},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use ib::{
    device::*,
    soft::{SoftAh, SoftConfig, SoftDevice, SoftQp},
    types::*,
};
use uct::mem::{Arena, ArenaLayout, Buf};

const QKEY: QKey = QKey(7);
const SIZES: [usize; 2] = [8, 4096];
/// Messages in a batch; two batches must fit the default receive buffer of a bare socket.
const fn batch(len: usize) -> usize {
    if len > 1024 { 8 } else { 64 }
}
/// Batches in flight.
const WINDOW: usize = 2;
/// Round trips in a turn.
const PINGS: usize = 50;
/// Batches in a turn.
const BATCHES: usize = 20;
const PATIENCE: Duration = Duration::from_secs(10);

struct Soft {
    dev: Arc<SoftDevice>,
    qp: SoftQp,
    ah: Option<(SoftAh, Qpn)>,
    serial: u64,
    spare: Vec<Buf>,
    out: Buf,
    got: Vec<RecvWc>,
    sends: Vec<SendWc>,
}

impl Soft {
    fn open() -> Soft {
        let dev = SoftDevice::open(&SoftConfig::default()).unwrap();
        let init = QpInit {
            port: 1,
            pkey_index: 0,
            qkey: QKEY,
            send_depth: 256,
            recv_depth: 2048,
            send_sge: 1,
            inline_len: SIZES[0] as u32,
        };
        let mut qp = dev.create_ud_qp(&init).unwrap();
        let (arena, mut spare) =
            Arena::new(ArenaLayout { count: 1025, len: GRH_LEN + 4096, front: 0, align: 64, align_offset: 40 })
                .unwrap();
        arena.set_lkey(dev.reg_mr(arena.block(), Access::LOCAL_WRITE).unwrap().lkey);
        let out = spare.pop().unwrap();
        qp.post_recv(&mut spare).unwrap();
        Soft { dev, qp, ah: None, serial: 0, spare, out, got: Vec::with_capacity(1024), sends: Vec::with_capacity(256) }
    }

    fn describe(&self) -> String {
        format!("{} {}", self.dev.local_addr(), self.qp.qpn().get())
    }

    fn connect(&mut self, peer: &str) {
        let (addr, qpn) = peer.split_once(' ').unwrap();
        let addr: SocketAddr = addr.parse().unwrap();
        let attr = AhAttr {
            port: 1,
            sl: 0,
            src_path_bits: 0,
            static_rate: 0,
            dlid: Lid(0),
            grh: Some(GlobalRoute {
                dgid: Gid::from_ip(addr.ip()),
                sgid: self.dev.gid(),
                hop_limit: 64,
                traffic_class: 0,
                flow_label: 0,
            }),
            soft: SoftAv { udp_port: addr.port(), host_id: self.dev.identity().host_id },
        };
        self.ah = Some((self.dev.create_ah(&attr).unwrap(), Qpn::truncate(qpn.parse().unwrap())));
    }

    fn post(&mut self, len: usize) {
        let (ah, qpn) = self.ah.as_ref().unwrap();
        self.serial += 1;
        let wr = SendWr {
            serial: self.serial,
            ah,
            remote_qpn: *qpn,
            remote_qkey: QKEY,
            sges: &[Sge { bytes: &self.out[..len], lkey: self.out.lkey() }],
            inline: len <= SIZES[0],
            signaled: self.serial.is_multiple_of(64),
            solicited: false,
        };
        self.qp.post_send(&wr).unwrap();
        if wr.signaled {
            self.sends.clear();
            self.qp.poll_send(&mut self.sends, 64);
        }
    }

    fn poll(&mut self, max: usize) -> usize {
        let n = self.qp.poll_recv(&mut self.got, max);
        if n > 0 {
            for wc in self.got.drain(..) {
                assert_eq!(wc.status, WcStatus::Success);
                self.spare.push(wc.buf);
            }
            self.qp.post_recv(&mut self.spare).unwrap();
        }
        n
    }
}

struct Bare {
    socket: UdpSocket,
    peer: Option<SocketAddr>,
    buf: [u8; 8192],
}

impl Bare {
    fn open() -> Bare {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.set_nonblocking(true).unwrap();
        Bare { socket, peer: None, buf: [0; 8192] }
    }

    fn post(&self, len: usize) {
        self.socket.send_to(&self.buf[..len], self.peer.unwrap()).unwrap();
    }

    fn poll(&mut self) -> usize {
        usize::from(self.socket.recv_from(&mut self.buf).is_ok())
    }
}

trait Wire {
    fn send(&mut self, count: usize, len: usize);
    fn poll(&mut self, max: usize) -> usize;

    fn await_messages(&mut self, count: usize) {
        let mut got = 0;
        let mut spins = 0u32;
        let end = Instant::now() + PATIENCE;
        while got < count {
            got += self.poll(count - got);
            spins = spins.wrapping_add(1);
            if spins.is_multiple_of(1 << 16) {
                assert!(Instant::now() < end, "a message was lost: {got} of {count}");
            }
        }
    }
}

impl Wire for Soft {
    fn send(&mut self, count: usize, len: usize) {
        for _ in 0..count {
            self.post(len);
        }
        self.qp.ring();
    }

    fn poll(&mut self, max: usize) -> usize {
        Soft::poll(self, max)
    }
}

impl Wire for Bare {
    fn send(&mut self, count: usize, len: usize) {
        for _ in 0..count {
            self.post(len);
        }
    }

    fn poll(&mut self, _max: usize) -> usize {
        Bare::poll(self)
    }
}

fn ping(w: &mut impl Wire, len: usize) {
    for _ in 0..PINGS {
        w.send(1, len);
        w.await_messages(1);
    }
}

fn pong(w: &mut impl Wire, len: usize) {
    for _ in 0..PINGS {
        w.await_messages(1);
        w.send(1, len);
    }
}

fn stream(w: &mut impl Wire, len: usize) {
    for sent in 0..BATCHES {
        if sent >= WINDOW {
            w.await_messages(1);
        }
        w.send(batch(len), len);
    }
    w.await_messages(WINDOW);
}

fn sink(w: &mut impl Wire, len: usize) {
    for _ in 0..BATCHES {
        w.await_messages(batch(len));
        w.send(1, SIZES[0]);
    }
}

/// Pins this process to a CPU, if there are two: two spinners on one measure the scheduler.
fn pin(cpu: usize) {
    let pid = std::process::id().to_string();
    let _ = Command::new("taskset").args(["-pc", &cpu.to_string(), &pid]).stdout(Stdio::null()).status();
}

fn child() {
    pin(1);
    let (mut soft, mut bare) = (Soft::open(), Bare::open());
    println!("{}", soft.describe());
    println!("{}", bare.socket.local_addr().unwrap());
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let (what, arg) = line.split_once(' ').unwrap();
        let rounds = || arg.parse::<usize>().unwrap();
        match what {
            "soft" => soft.connect(arg),
            "bare" => bare.peer = Some(arg.parse().unwrap()),
            "pong" => {
                for len in SIZES {
                    for _ in 0..rounds() {
                        pong(&mut bare, len);
                        pong(&mut soft, len);
                    }
                }
            }
            "sink" => {
                for len in SIZES {
                    for _ in 0..rounds() {
                        sink(&mut bare, len);
                        sink(&mut soft, len);
                    }
                }
            }
            other => panic!("{other}"),
        }
    }
}

struct Peer {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Peer {
    fn start() -> Peer {
        let mut child = Command::new(env::current_exe().unwrap())
            .arg("child")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let to = child.stdin.take().unwrap();
        let from = BufReader::new(child.stdout.take().unwrap());
        Peer { child, to, from }
    }

    fn line(&mut self) -> String {
        let mut s = String::new();
        self.from.read_line(&mut s).unwrap();
        s.trim().to_string()
    }

    fn say(&mut self, s: &str) {
        writeln!(self.to, "{s}").unwrap();
        self.to.flush().unwrap();
    }
}

fn timed(f: impl FnOnce()) -> f64 {
    let t = Instant::now();
    f();
    t.elapsed().as_secs_f64()
}

/// Both ends in one thread: no scheduler, no wait, only the work.
fn alone(bare: &mut Bare, soft: &mut Soft, len: usize) -> (f64, f64) {
    let own = (soft.ah.take(), bare.peer.take());
    soft.connect(&soft.describe());
    bare.peer = bare.socket.local_addr().ok();
    let result = (timed(|| ping(bare, len)), timed(|| ping(soft, len)));
    (soft.ah, bare.peer) = own;
    result
}

/// Turns of few messages: what disturbs one of them disturbs few, and the quiet ones are compared.
fn report(what: &str, turns: Vec<(f64, f64)>, ratio: fn(f64, f64) -> f64) {
    let (mut bare, mut soft): (Vec<f64>, Vec<f64>) = turns.into_iter().unzip();
    bare.sort_by(f64::total_cmp);
    soft.sort_by(f64::total_cmp);
    let at = |percent: usize| ratio(bare[bare.len() * percent / 100], soft[soft.len() * percent / 100]);
    println!("{what}: {:.2} (median {:.2}, best {:.2})", at(25), at(50), at(0));
}

fn main() {
    if env::args().nth(1).as_deref() == Some("child") {
        return child();
    }
    let rounds: usize = env::args().nth(1).map_or(500, |s| s.parse().unwrap());
    pin(0);
    let mut peer = Peer::start();
    let (mut soft, mut bare) = (Soft::open(), Bare::open());
    soft.connect(&peer.line());
    bare.peer = Some(peer.line().parse().unwrap());
    peer.say(&format!("soft {}", soft.describe()));
    peer.say(&format!("bare {}", bare.socket.local_addr().unwrap()));

    println!("soft device / bare UDP socket, {rounds} turns of {PINGS} round trips or {BATCHES} batches one way");
    peer.say(&format!("pong {rounds}"));
    for len in SIZES {
        let turns = (0..rounds).map(|_| (timed(|| ping(&mut bare, len)), timed(|| ping(&mut soft, len)))).collect();
        report(&format!("round trip of {len} bytes"), turns, |bare, soft| soft / bare);
    }
    peer.say(&format!("sink {rounds}"));
    for len in SIZES {
        let turns = (0..rounds).map(|_| (timed(|| stream(&mut bare, len)), timed(|| stream(&mut soft, len)))).collect();
        report(&format!("messages of {len} bytes per second"), turns, |bare, soft| bare / soft);
    }
    for len in SIZES {
        let turns = (0..rounds).map(|_| alone(&mut bare, &mut soft, len)).collect();
        report(&format!("cost of {len} bytes to oneself"), turns, |bare, soft| soft / bare);
    }
    println!("{} {:?}", soft.dev.stats(), soft.dev.wire_stats());
    drop(peer.to);
    peer.child.wait().unwrap();
}
