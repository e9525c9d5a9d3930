//! A process for tests about processes: it opens a UD interface, on the soft device or the one that `PEER_DEVICE` names, and
//! does what it reads: the lines of [`uct_tests::lines::peer`].
#![allow(unsafe_code)]

use std::{
    io::{BufRead, Write},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, TryRecvError, channel},
    },
};

use ib::component::SOFT_DEVICE;
use uct::{
    AmId, Completion, Ep, EpParams, ErrorKind, FailureAction, FlushMode, Iface, IfaceParams, Md, MemRegion,
    PendingStatus, Posted, Registry, SendError, Worker, config::Env, ep::PendingRefused, iface::Events,
};
use uct_tests::lines::peer::{Answer, Command};

const ID: AmId = AmId::truncate(1);

struct Peer {
    worker: Worker,
    iface: Iface,
    eps: Vec<Ep>,
    got: Arc<AtomicU64>,
    failed: Arc<Mutex<Vec<(String, String)>>>,
    lines: Receiver<String>,
}

impl Peer {
    /// Makes progress until `done`; the test ends the process if that is never.
    fn until(&self, mut done: impl FnMut() -> bool) {
        while !done() {
            if self.worker.progress() == 0 {
                std::thread::yield_now();
            }
        }
    }

    fn next(&self) -> Option<String> {
        let mut line = None;
        let mut ended = false;
        self.until(|| {
            match self.lines.try_recv() {
                Ok(l) => line = Some(l),
                Err(TryRecvError::Empty) => {}
                Err(TryRecvError::Disconnected) => ended = true,
            }
            line.is_some() || ended
        });
        line
    }

    /// Does something with the endpoint of an index.
    fn on(&self, index: usize, what: impl FnOnce(&Ep) -> Result<Answer, uct::Error>) -> Answer {
        match self.eps.get(index).map(what) {
            Some(Ok(answer)) => answer,
            Some(Err(e)) => Answer::Error(e.to_string()),
            None => Answer::Error(format!("no endpoint {index}")),
        }
    }

    fn send(&self, ep: &Ep, count: u64) -> Result<(), uct::Error> {
        self.accept(count, |i| ep.am_short(ID, i, b"from a process"))
    }

    fn send_long(&self, ep: &Ep, count: u64, len: usize) -> Result<(), uct::Error> {
        self.accept(count, |_| ep.am_bcopy(ID, &mut |to| to.len().min(len)).map(drop))
    }

    /// Repeats a send until it was accepted `count` times.
    fn accept(&self, count: u64, send: impl Fn(u64) -> Result<(), SendError>) -> Result<(), uct::Error> {
        for i in 0..count {
            let mut result = Ok(());
            self.until(|| match send(i) {
                Ok(()) => true,
                Err(SendError::NoResource) => false,
                Err(SendError::Failed(e)) => {
                    result = Err(e);
                    true
                }
            });
            result?;
        }
        Ok(())
    }
}

/// What cannot be opened is for the test to read.
fn or_exit<T>(result: uct::Result<T>) -> T {
    result.unwrap_or_else(|e| {
        eprintln!("{e}");
        std::process::exit(3)
    })
}

fn say(answer: &Answer) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{answer}").and_then(|()| out.flush()).expect("stdout");
}

/// Everything of the parent's says that it cannot be used here, and may be dropped; what is opened here works. Says what is not
/// so.
fn use_in_child(peer: Peer, md: Md, region: MemRegion, registry: &Registry, device: &str, env: &Env) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut expect = |what: &str, error: Option<uct::Error>| match error {
        Some(e) if e.kind() == ErrorKind::UsedAfterFork => {}
        Some(e) => wrong.push(format!("{what}: {e}")),
        None => wrong.push(format!("{what} works")),
    };
    fn why<T>(result: Result<T, SendError>) -> Option<uct::Error> {
        match result {
            Err(SendError::Failed(e)) => Some(e),
            _ => None,
        }
    }
    let Peer { worker, iface, eps, got, .. } = peer;
    let (comp, _status) = Completion::polled();
    let slice = region.slice(0..64).expect("a slice");
    for ep in &eps {
        expect("am_short", why(ep.am_short(ID, 0, b"")));
        expect("am_short_iov", why(ep.am_short_iov(ID, &[])));
        expect("am_bcopy", why(ep.am_bcopy(ID, &mut |_| 1)));
        expect("am_zcopy", why(ep.am_zcopy(ID, b"", std::slice::from_ref(&slice), Some(&comp))));
        expect("flush", why(ep.flush(FlushMode::Local, Some(&comp))));
        expect("check", why(ep.check(None)));
        expect("invalidate", ep.invalidate().err());
        let added = ep.pending_add(Box::new(|_| PendingStatus::Done));
        expect(
            "pending_add",
            added.err().and_then(|r| if let PendingRefused::Failed(_, e) = r { Some(e) } else { None }),
        );
    }
    expect("an endpoint", iface.ep(&EpParams::unconnected()).err());
    expect("a handler", iface.on_am(ID, |_| {}).err());
    expect("flush of all", why(iface.flush(FlushMode::Local, None)));
    expect("arm", iface.arm(Events::RECV).err());
    expect("memory", md.mem_alloc(64).err());
    expect("ports", md.ports().err());
    expect("wait", worker.wait(std::time::Duration::from_secs(60)).err());
    let ud = registry.transport("ud").expect("ud");
    expect("an interface", ud.open_iface(&md, &worker, 1, &IfaceParams::default(), env).err());
    if worker.progress() + iface.counters().len() != 0 || iface.event_fd().is_some() {
        wrong.push("progress does something".into());
    }
    // One by one, and one that is closed.
    drop((slice, region, comp));
    for ep in eps {
        ep.close(None);
    }
    drop((md, iface, worker));

    // What is opened here works, without a progress thread and with one.
    for thread in [false, true] {
        let md = registry.open_md(device, env).expect("a device of the child's own");
        let worker = Worker::new(ud::worker_params(env).expect("settings").progress_thread(thread)).expect("a worker");
        let iface = ud.open_iface(&md, &worker, 1, &IfaceParams::default(), env).expect("an interface");
        got.store(0, Ordering::Relaxed);
        let g = got.clone();
        let count = move |_: uct::AmMessage<'_>| {
            g.fetch_add(1, Ordering::Relaxed);
        };
        iface.on_am(ID, count).expect("a handler");
        iface.progress_enable(true);
        let ep = iface.ep(&EpParams::to_iface(&iface.device_address(), &iface.iface_address())).expect("an endpoint");
        while matches!(ep.am_short(ID, 0, b"to myself"), Err(SendError::NoResource)) || got.load(Ordering::Relaxed) == 0
        {
            worker.progress();
        }
    }
    wrong
}

fn main() {
    let env = Env::process();
    let mut registry = Registry::new();
    ib::component::register(&mut registry);
    ud::register(&mut registry);
    let device = std::env::var("PEER_DEVICE").unwrap_or(SOFT_DEVICE.into());
    let md = or_exit(registry.open_md(&device, &env));
    let region = or_exit(md.mem_alloc(4096));
    let worker = Worker::new(ud::worker_params(&env).expect("settings")).expect("a worker");
    let failed: Arc<Mutex<Vec<(String, String)>>> = Arc::default();
    let f = failed.clone();
    let params = IfaceParams::default().on_error(Arc::new(move |e| {
        f.lock().expect("no panic").push((format!("{:?}", e.kind), e.error.to_string()));
        FailureAction::Endpoint
    }));
    let iface = or_exit(registry.transport("ud").expect("ud").open_iface(&md, &worker, 1, &params, &env));
    let got = Arc::new(AtomicU64::new(0));
    let g = got.clone();
    iface
        .on_am(ID, move |_| {
            let _ = g.fetch_add(1, Ordering::Relaxed);
        })
        .expect("a handler");
    iface.progress_enable(true);

    let (tx, lines) = channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            if tx.send(line).is_err() {
                break;
            }
        }
    });
    let mut peer = Peer { worker, iface, eps: Vec::new(), got, failed, lines };
    while let Some(line) = peer.next() {
        let command = match Command::parse(&line) {
            Ok(c) => c,
            Err(why) => {
                say(&Answer::Error(why));
                continue;
            }
        };
        say(&match command {
            Command::Addr => Answer::Addr(peer.iface.device_address(), peer.iface.iface_address()),
            Command::Connect(device, iface) => match peer.iface.ep(&EpParams::to_iface(&device, &iface)) {
                Ok(ep) => {
                    peer.eps.push(ep);
                    Answer::Ep(peer.eps.len() - 1)
                }
                Err(e) => Answer::Error(e.to_string()),
            },
            Command::Send(ep, count) => peer.on(ep, |ep| peer.send(ep, count).map(|()| Answer::Sent(count))),
            Command::Long(ep, count, len) => {
                peer.on(ep, |ep| peer.send_long(ep, count, len).map(|()| Answer::Sent(count)))
            }
            Command::Expect(count) => {
                peer.until(|| peer.got.load(Ordering::Relaxed) >= count);
                Answer::Got(peer.got.load(Ordering::Relaxed))
            }
            Command::Failures(count) => {
                peer.until(|| peer.failed.lock().expect("no panic").len() as u64 >= count);
                Answer::Failed(peer.failed.lock().expect("no panic").iter().map(|f| f.0.clone()).collect())
            }
            Command::Why => {
                let texts: Vec<String> = peer.failed.lock().expect("no panic").iter().map(|f| f.1.clone()).collect();
                Answer::Why(texts.join(" | "))
            }
            Command::Counter(name) => {
                let mut all = peer.iface.counters().into_iter().chain(md.counters());
                let value = all.find(|c| c.name == name).map(|c| c.value);
                value.map_or_else(|| Answer::Error(format!("no counter {name}")), Answer::Counter)
            }
            Command::Flush => {
                peer.until(|| matches!(peer.iface.flush(FlushMode::Local, None), Ok(Posted::Done)));
                Answer::Flushed
            }
            Command::Signals => {
                let status = std::fs::read_to_string("/proc/self/status").expect("procfs");
                let caught = status.lines().find_map(|l| l.strip_prefix("SigCgt:")).expect("a mask").trim();
                Answer::Signals(u64::from_str_radix(caught, 16).expect("a mask"))
            }
            Command::Fork => {
                // SAFETY: the child calls nothing but `exit`, whose handlers of this process do not wait for threads.
                let pid = unsafe { libc::fork() };
                if pid == 0 {
                    // SAFETY: ends the child, with everything of the parent's open in it.
                    unsafe { libc::exit(0) };
                }
                let mut status = 0;
                // SAFETY: `status` outlives the call.
                unsafe { libc::waitpid(pid, &mut status, 0) };
                Answer::Forked(status.into())
            }
            Command::Use => {
                // SAFETY: the child uses what is made for it, and the allocator, which the C library makes fit for it.
                let pid = unsafe { libc::fork() };
                if pid == 0 {
                    let wrong = use_in_child(peer, md, region, &registry, &device, &env);
                    wrong.iter().for_each(|w| eprintln!("in the child: {w}"));
                    // SAFETY: ends the child, with everything of the parent's open in it.
                    unsafe { libc::exit(wrong.len() as i32) };
                }
                let mut status = 0;
                // SAFETY: `status` outlives the call.
                unsafe { libc::waitpid(pid, &mut status, 0) };
                Answer::Forked(status.into())
            }
            Command::Quit => std::process::exit(0),
            Command::Close => break,
        });
    }
    let Peer { worker, iface, eps, .. } = peer;
    drop((eps, iface, worker, region, md));
    say(&Answer::Closed);
}
