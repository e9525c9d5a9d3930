//! Speed of the UD transport on the soft device, as ratios to bare UDP sockets measured in the same run.
//!
//! The machine is shared and its clock speed moves, so absolute numbers say little: each round measures the bare socket and
//! the transport one after the other, and the median of the rounds' ratios counts. Two processes, both spinning.
//!
//! `bench [--rounds N] [--quick] [latency] [rate] [endpoints]`

use std::{
    io::{BufRead, BufReader, Write},
    net::{SocketAddr, UdpSocket},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio, exit},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use uct::{AmId, Ep, EpParams, FlushMode, Iface, IfaceParams, Md, Posted, Registry, SendError, Worker, config::Env};
use uct_tests::lines::bench::{Hello, Run, What};

const ID: AmId = AmId::truncate(5);
/// How many bare datagrams go out between two answers: few enough to lose none.
const RAW_WINDOW: u64 = 64;
/// A measurement that takes longer than this has failed.
const PATIENCE: Duration = Duration::from_secs(60);

type Error = Box<dyn std::error::Error>;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let result = if args.first().is_some_and(|a| a == "--peer") { peer() } else { parent(&args) };
    if let Err(e) = result {
        eprintln!("bench: {e}");
        exit(1);
    }
}

/// One side: a bare socket, and an interface.
struct Side {
    raw: UdpSocket,
    raw_peer: Option<SocketAddr>,
    /// The other side's interface.
    peer: EpParams,
    worker: Worker,
    iface: Iface,
    /// Messages that have arrived.
    arrived: Arc<AtomicU64>,
    _md: Md,
}

impl Side {
    fn new() -> Result<Side, Error> {
        let env = Env::process();
        let mut registry = Registry::new();
        ib::component::register(&mut registry);
        ud::register(&mut registry);
        let md = registry.open_md(ib::component::SOFT_DEVICE, &env)?;
        let worker = Worker::new(ud::worker_params(&env)?)?;
        let iface = open(&registry, &md, &worker, &env)?;
        let arrived = Arc::new(AtomicU64::new(0));
        let a = arrived.clone();
        iface.on_am(ID, move |_| {
            // One writer: no read-modify-write needed.
            a.store(a.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        })?;
        iface.progress_enable(true);
        let raw = UdpSocket::bind("127.0.0.1:0")?;
        raw.set_nonblocking(true)?;
        Ok(Side { raw, raw_peer: None, peer: EpParams::default(), worker, iface, arrived, _md: md })
    }

    fn hello(&self) -> Result<Hello, Error> {
        let (device, iface) = (self.iface.device_address(), self.iface.iface_address());
        Ok(Hello { raw: self.raw.local_addr()?, device, iface })
    }

    fn connect(&mut self, hello: &str) -> Result<Ep, Error> {
        let Hello { raw, device, iface } = Hello::parse(hello)?;
        self.raw_peer = Some(raw);
        self.peer = EpParams::to_iface(&device, &iface);
        Ok(self.iface.ep(&self.peer)?)
    }

    fn raw_send(&self, bytes: &[u8]) -> Result<(), Error> {
        let to = self.raw_peer.ok_or("not connected")?;
        self.raw.send_to(bytes, to)?;
        Ok(())
    }

    fn raw_wait(&self, buf: &mut [u8]) -> Result<(), Error> {
        let start = Instant::now();
        loop {
            match self.raw.recv_from(buf) {
                Ok(_) => return Ok(()),
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                    std::hint::spin_loop();
                    // Not at every turn: the clock costs as much as the loop.
                    if start.elapsed() > PATIENCE {
                        return Err("a datagram was lost".into());
                    }
                }
                Err(e) => return Err(e.into()),
            }
        }
    }

    fn send(&self, ep: &Ep, payload: u64) -> Result<(), Error> {
        let start = Instant::now();
        loop {
            match ep.am_short(ID, payload, &[]) {
                Ok(()) => return Ok(()),
                Err(SendError::NoResource) => {
                    self.worker.progress();
                    if start.elapsed() > PATIENCE {
                        return Err("no resource came back".into());
                    }
                }
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Progresses until `n` messages have arrived in all.
    fn wait_for(&self, n: u64) -> Result<(), Error> {
        let mut turns = 0u64;
        let start = Instant::now();
        while self.arrived.load(Ordering::Relaxed) < n {
            self.worker.progress();
            turns += 1;
            if turns.is_multiple_of(1 << 20) && start.elapsed() > PATIENCE {
                return Err("messages are missing".into());
            }
        }
        Ok(())
    }

    fn flush(&self) -> Result<(), Error> {
        let start = Instant::now();
        while self.iface.flush(FlushMode::Local, None)? != Posted::Done {
            self.worker.progress();
            if start.elapsed() > PATIENCE {
                return Err("flush does not end".into());
            }
        }
        Ok(())
    }
}

fn open(registry: &Registry, md: &Md, worker: &Worker, env: &Env) -> Result<Iface, Error> {
    Ok(registry.transport("ud")?.open_iface(md, worker, 1, &IfaceParams::default(), env)?)
}

// --- the other process

fn peer() -> Result<(), Error> {
    let mut side = Side::new()?;
    let mut lines = BufReader::new(std::io::stdin()).lines();
    println!("{}", side.hello()?);
    let hello = lines.next().ok_or("the parent left")??;
    let ep = side.connect(&hello)?;
    let mut buf = [0u8; 2048];
    for line in lines {
        let line = line?;
        let Run { what, count: n } = Run::parse(&line)?;
        let before = side.arrived.load(Ordering::Relaxed);
        println!("ready");
        match what {
            What::RawLatency => {
                for _ in 0..n {
                    side.raw_wait(&mut buf)?;
                    side.raw_send(&buf[..8])?;
                }
            }
            What::UdLatency => {
                for i in 1..=n {
                    side.wait_for(before + i)?;
                    side.send(&ep, i)?;
                }
                side.flush()?;
            }
            What::RawRate => {
                for i in 1..=n {
                    side.raw_wait(&mut buf)?;
                    if i.is_multiple_of(RAW_WINDOW) || i == n {
                        side.raw_send(&buf[..8])?;
                    }
                }
            }
            What::UdRate => {
                side.wait_for(before + n)?;
                side.send(&ep, n)?;
                side.flush()?;
            }
            // Answers handshakes until the parent has all it wants: one message says so.
            What::Serve => {
                side.wait_for(before + 1)?;
                side.flush()?;
            }
        }
        println!("done");
    }
    Ok(())
}

// --- this process

struct Bench {
    side: Side,
    ep: Ep,
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Bench {
    fn new() -> Result<Bench, Error> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("--peer")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut to = child.stdin.take().ok_or("no pipe")?;
        let mut from = BufReader::new(child.stdout.take().ok_or("no pipe")?);
        let mut side = Side::new()?;
        let mut hello = String::new();
        from.read_line(&mut hello)?;
        let ep = side.connect(hello.trim_end())?;
        writeln!(to, "{}", side.hello()?)?;
        let mut bench = Bench { side, ep, child, to, from };
        // Connects, and warms up caches and windows.
        bench.ud_latency(1000)?;
        bench.ud_rate(20_000)?;
        Ok(bench)
    }

    fn ask(&mut self, what: What, count: u64) -> Result<(), Error> {
        writeln!(self.to, "{}", Run { what, count })?;
        self.expect("ready")
    }

    fn expect(&mut self, word: &str) -> Result<(), Error> {
        let mut line = String::new();
        self.from.read_line(&mut line)?;
        if line.trim() == word { Ok(()) } else { Err(format!("the other process said `{}`", line.trim()).into()) }
    }

    fn raw_latency(&mut self, n: u64) -> Result<f64, Error> {
        self.ask(What::RawLatency, n)?;
        let mut buf = [0u8; 2048];
        let start = Instant::now();
        for i in 0..n {
            self.side.raw_send(&i.to_ne_bytes())?;
            self.side.raw_wait(&mut buf)?;
        }
        let t = start.elapsed().as_secs_f64() / n as f64;
        self.expect("done")?;
        Ok(t)
    }

    fn ud_latency(&mut self, n: u64) -> Result<f64, Error> {
        self.ask(What::UdLatency, n)?;
        let before = self.side.arrived.load(Ordering::Relaxed);
        let start = Instant::now();
        for i in 1..=n {
            self.side.send(&self.ep, i)?;
            self.side.wait_for(before + i)?;
        }
        let t = start.elapsed().as_secs_f64() / n as f64;
        self.side.flush()?;
        self.expect("done")?;
        Ok(t)
    }

    fn raw_rate(&mut self, n: u64) -> Result<f64, Error> {
        self.ask(What::RawRate, n)?;
        let mut buf = [0u8; 2048];
        let mut answers = n.div_ceil(RAW_WINDOW);
        let start = Instant::now();
        for i in 1..=n {
            self.side.raw_send(&i.to_ne_bytes())?;
            // The answer to a window is awaited one window later, so that both sides always have work.
            if i.is_multiple_of(RAW_WINDOW) && i > RAW_WINDOW {
                self.side.raw_wait(&mut buf)?;
                answers -= 1;
            }
        }
        for _ in 0..answers {
            self.side.raw_wait(&mut buf)?;
        }
        let t = n as f64 / start.elapsed().as_secs_f64();
        self.expect("done")?;
        Ok(t)
    }

    fn ud_rate(&mut self, n: u64) -> Result<f64, Error> {
        self.ask(What::UdRate, n)?;
        let before = self.side.arrived.load(Ordering::Relaxed);
        let start = Instant::now();
        for i in 1..=n {
            self.side.send(&self.ep, i)?;
        }
        self.side.wait_for(before + 1)?;
        let t = n as f64 / start.elapsed().as_secs_f64();
        self.side.flush()?;
        self.expect("done")?;
        Ok(t)
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        // Only matters after an error; a kill of a process that has ended does nothing.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn median(v: &mut [f64]) -> f64 {
    v.sort_by(f64::total_cmp);
    v[v.len() / 2]
}

/// Resident bytes of this process.
fn resident() -> Result<f64, Error> {
    match uct_tests::memory::resident() {
        0 => Err("the system does not tell how much memory is resident".into()),
        n => Ok(n as f64),
    }
}

fn parent(args: &[String]) -> Result<(), Error> {
    let mut rounds = 15;
    let mut scale = 1;
    let mut which = Vec::new();
    let mut it = args.iter();
    while let Some(a) = it.next() {
        match a.as_str() {
            "--rounds" => rounds = it.next().ok_or("--rounds needs a number")?.parse()?,
            "--quick" => {
                rounds = 5;
                scale = 10;
            }
            "latency" | "rate" | "endpoints" => which.push(a.as_str()),
            _ => return Err(format!("`{a}`? usage: bench [--rounds N] [--quick] [latency] [rate] [endpoints]").into()),
        }
    }
    let all = which.is_empty();
    let has = |w: &str| all || which.contains(&w);
    let mut bench = Bench::new()?;
    if has("latency") {
        let n = 20_000 / scale;
        let (mut ratios, mut raws, mut uds) = (vec![], vec![], vec![]);
        for _ in 0..rounds {
            let (raw, ud) = (bench.raw_latency(n)?, bench.ud_latency(n)?);
            ratios.push(ud / raw);
            raws.push(raw * 1e6);
            uds.push(ud * 1e6);
        }
        println!(
            "8 B ping-pong   am_short / bare UDP socket      {:5.2}  (at most 1.3; round trips {:.2} and {:.2} us)",
            median(&mut ratios),
            median(&mut uds),
            median(&mut raws)
        );
    }
    if has("rate") {
        let (mut ratios, mut raws, mut uds) = (vec![], vec![], vec![]);
        for _ in 0..rounds {
            let (raw, ud) = (bench.raw_rate(64_000 / scale)?, bench.ud_rate(512_000 / scale)?);
            ratios.push(ud / raw);
            raws.push(raw / 1e6);
            uds.push(ud / 1e6);
        }
        println!(
            "8 B one way     am_short / bare sendto+recvfrom {:5.2}  (at least 5; {:.2} and {:.2} million/s)",
            median(&mut ratios),
            median(&mut uds),
            median(&mut raws)
        );
    }
    if has("endpoints") {
        endpoints(&mut bench)?;
    }
    Ok(())
}

/// What endpoints cost in memory and time.
fn endpoints(bench: &mut Bench) -> Result<(), Error> {
    const COUNT: usize = 10_000;
    let env = Env::process();
    let mut registry = Registry::new();
    ib::component::register(&mut registry);
    ud::register(&mut registry);
    let md = registry.open_md(ib::component::SOFT_DEVICE, &env)?;
    let m0 = resident()?;
    let iface = open(&registry, &md, &bench.side.worker, &env)?;
    iface.progress_enable(true);
    bench.side.worker.progress();
    let m1 = resident()?;
    println!("one interface               {:8.0} bytes", m1 - m0);

    // Nobody listens at the address of an interface that is gone.
    let gone = open(&registry, &md, &bench.side.worker, &env)?;
    let params = EpParams::to_iface(&gone.device_address(), &gone.iface_address());
    drop(gone);
    let m2 = resident()?;
    let connecting: Vec<Ep> = (0..COUNT).map(|_| iface.ep(&params)).collect::<Result<_, _>>()?;
    let m3 = resident()?;
    println!("a connecting endpoint       {:8.0} bytes", (m3 - m2) / COUNT as f64);
    drop(connecting);
    drop(iface);

    let iface = open(&registry, &md, &bench.side.worker, &env)?;
    iface.progress_enable(true);
    bench.ask(What::Serve, 0)?;
    let target = bench.side.peer.clone();
    let m4 = resident()?;
    let start = Instant::now();
    let mut eps = Vec::with_capacity(COUNT);
    for _ in 0..COUNT {
        eps.push(iface.ep(&target)?);
        bench.side.worker.progress();
    }
    // A flush is refused while the handshake is under way.
    for ep in &eps {
        while !matches!(ep.flush(FlushMode::Local, None), Ok(Posted::Done)) {
            bench.side.worker.progress();
            if start.elapsed() > PATIENCE {
                return Err("endpoints do not connect".into());
            }
        }
    }
    let t = start.elapsed().as_secs_f64();
    let m5 = resident()?;
    println!("an idle endpoint            {:8.0} bytes", (m5 - m4) / COUNT as f64);
    println!("connections                 {:8.0} per second", COUNT as f64 / t);
    bench.side.send(&bench.ep, 0)?;
    bench.side.flush()?;
    bench.expect("done")?;
    println!("timer of {COUNT} idle endpoints: {:?}", iface.next_timeout());
    Ok(())
}
