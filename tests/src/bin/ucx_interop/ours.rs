//! Our side: an interface on a soft device, its endpoints, what is to be sent and what has arrived.

use std::{
    collections::{BTreeMap, VecDeque},
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
    time::{Duration, Instant},
};

use ib::{
    ah::Executor,
    config::{IfaceConfig, MdConfig},
    md::Md,
    soft::{SoftConfig, SoftDevice},
};
use parking_lot::Mutex;
use uct::{
    AmId, Completion, CompletionStatus, Ep, EpParams, FailureAction, FlushMode, Iface, IfaceParams, MemRegion, Posted,
    SendError, SendResult, Worker, WorkerParams, ep::EpFailure, md::MemoryDomain, time::MonotonicClock,
};
use uct_tests::lines::{hex, ucx as lines, unhex};
use ud::{Tuning, UdConfig};

const AM: AmId = AmId::truncate(3);
/// Bytes of the pattern that messages are cut from.
const PATTERN: usize = 8192;

/// How a message is sent, in the words of the UCX program.
pub(crate) const FORMS: [&str; 3] = ["short", "bcopy", "zcopy"];

#[derive(Default)]
struct Inbox {
    next: BTreeMap<u32, u32>,
    wrong: Option<String>,
}

struct Job {
    ep: u32,
    form: &'static str,
    size: usize,
    left: u32,
}

/// Our side. The order of the fields is the order of closing.
pub(crate) struct Ours {
    eps: BTreeMap<u32, Ep>,
    iface: Iface,
    worker: Worker,
    region: MemRegion,
    inbox: Arc<Mutex<Inbox>>,
    failures: Arc<Mutex<Vec<EpFailure>>>,
    jobs: VecDeque<Job>,
    /// Next number of each stream; a stream has the number of its endpoint.
    pub(crate) sent: BTreeMap<u32, u32>,
    /// Zero-copy operations under way.
    zcopies: Vec<CompletionStatus>,
}

fn words(e: impl std::fmt::Display) -> String {
    format!("ours: {e}")
}

impl Ours {
    /// Opens a device and an interface. The same seed gives the same queue pair number.
    pub(crate) fn open(seed: u64) -> Result<Ours, String> {
        let mut config = SoftConfig::at(IpAddr::V4(Ipv4Addr::new(10, 77, 0, 2)));
        config.seed = Some(seed);
        config.pcap = std::env::var_os("UCX_SOFT_PCAP").filter(|p| !p.is_empty()).map(Into::into);
        // UCX sends to no other port. One that was closed just now may be in use still: what is left of the device goes with
        // a helper thread.
        config.port = Some(ib::addr::ROCE_V2_PORT);
        let end = Instant::now() + Duration::from_secs(20);
        let device = loop {
            match SoftDevice::open(&config) {
                Ok(device) => break device,
                Err(e) if Instant::now() > end => return Err(words(e)),
                Err(_) => std::thread::yield_now(),
            }
        };
        let clock = Arc::new(MonotonicClock::new());
        let md = Md::new(device, MdConfig::default(), clock, Executor::Threads { helpers: 2 });
        let worker = Worker::new(WorkerParams::default()).map_err(words)?;
        let failures = Arc::new(Mutex::new(Vec::new()));
        let f = failures.clone();
        let params = IfaceParams::default().on_error(Arc::new(move |e: &EpFailure| {
            f.lock().push(e.clone());
            FailureAction::Endpoint
        }));
        let (iface_config, ud) = (IfaceConfig::default(), UdConfig::default());
        let iface = ud::open(&md, &worker, 1, &params, iface_config, ud, &Tuning::default()).map_err(words)?;
        let inbox = Arc::new(Mutex::new(Inbox::default()));
        let i = inbox.clone();
        iface.on_am(AM, move |m| i.lock().accept(m.data())).map_err(words)?;
        iface.progress_enable(true);
        let mut region = md.mem_alloc(PATTERN).map_err(words)?;
        let bytes = region.bytes_mut().ok_or("new memory is in use")?;
        bytes.iter_mut().enumerate().for_each(|(i, b)| *b = lines::pattern(i));
        Ok(Ours {
            eps: BTreeMap::new(),
            iface,
            worker,
            region,
            inbox,
            failures,
            jobs: VecDeque::new(),
            sent: BTreeMap::new(),
            zcopies: Vec::new(),
        })
    }

    /// Device and interface address, in hexadecimal, separated by a blank.
    pub(crate) fn address(&self) -> String {
        format!("{} {}", hex(&self.iface.device_address()), hex(&self.iface.iface_address()))
    }

    /// Device address alone.
    pub(crate) fn device(&self) -> String {
        hex(&self.iface.device_address())
    }

    /// Makes endpoint `n` to an interface.
    pub(crate) fn to(&mut self, n: u32, device: &str, iface: &str) -> Result<(), String> {
        let device = unhex(device)?;
        self.iface.is_reachable(&device).map_err(words)?;
        let ep = self.iface.ep(&EpParams::to_iface(&device, &unhex(iface)?)).map_err(words)?;
        self.eps.insert(n, ep);
        Ok(())
    }

    /// Makes endpoint `n` without a peer; its address.
    pub(crate) fn ep(&mut self, n: u32) -> Result<String, String> {
        let ep = self.iface.ep(&EpParams::unconnected()).map_err(words)?;
        let address = hex(&ep.address().map_err(words)?);
        self.eps.insert(n, ep);
        Ok(address)
    }

    /// Joins endpoint `n` with the peer's.
    pub(crate) fn join(&mut self, n: u32, device: &str, ep: &str) -> Result<(), String> {
        self.eps[&n].connect(&unhex(device)?, &unhex(ep)?).map_err(words)
    }

    /// Queues messages on endpoint `n`.
    pub(crate) fn send(&mut self, n: u32, form: &'static str, size: u32, count: u32) {
        self.jobs.push_back(Job { ep: n, form, size: size as usize, left: count });
    }

    /// Destroys endpoint `n`: nothing is waited for.
    pub(crate) fn destroy(&mut self, n: u32) {
        self.eps.remove(&n);
    }

    /// Progresses, and sends what there is room for.
    pub(crate) fn step(&mut self) -> Result<(), String> {
        // The order per endpoint is that of the jobs; those of one endpoint do not hold up another.
        let mut blocked = Vec::new();
        for job in &mut self.jobs {
            while job.left > 0 && !blocked.contains(&job.ep) {
                let number = self.sent.get(&job.ep).copied().unwrap_or(0);
                let ep = self.eps.get(&job.ep).ok_or_else(|| format!("ours: no endpoint {}", job.ep))?;
                match send_one(ep, job, number, &self.region, &mut self.zcopies) {
                    Ok(()) => {
                        self.sent.insert(job.ep, number + 1);
                        job.left -= 1;
                    }
                    Err(SendError::NoResource) => blocked.push(job.ep),
                    Err(SendError::Failed(e)) => return Err(format!("ours: send on endpoint {}: {e}", job.ep)),
                }
            }
        }
        self.jobs.retain(|j| j.left > 0);
        if self.worker.progress() == 0 {
            std::thread::yield_now();
        }
        match &self.inbox.lock().wrong {
            Some(why) => Err(format!("ours: {why}")),
            None => Ok(()),
        }
    }

    /// Progresses until `done`.
    pub(crate) fn until(&mut self, what: &str, mut done: impl FnMut(&mut Ours) -> bool) -> Result<(), String> {
        let end = Instant::now() + Duration::from_secs(60);
        while !done(self) {
            self.step()?;
            if Instant::now() > end {
                return Err(format!("ours: no {what} within a minute; {}", self.tell()));
            }
        }
        Ok(())
    }

    /// Waits until `count` messages have arrived on `stream`.
    pub(crate) fn wait(&mut self, stream: u32, count: u32) -> Result<(), String> {
        self.until(&format!("message {count} of stream {stream}"), |o| o.has_arrived(stream) >= count)?;
        match self.has_arrived(stream) {
            n if n > count => Err(format!("ours: stream {stream}: {n} messages, expected {count}")),
            _ => Ok(()),
        }
    }

    /// Messages of `stream` that have arrived.
    pub(crate) fn has_arrived(&self, stream: u32) -> u32 {
        self.inbox.lock().next.get(&stream).copied().unwrap_or(0)
    }

    /// Sends everything, then waits until it is acknowledged.
    pub(crate) fn flush(&mut self) -> Result<(), String> {
        self.until("room for sending", |o| o.jobs.is_empty())?;
        let (comp, status) = Completion::polled();
        match self.iface.flush(FlushMode::Local, Some(&comp)) {
            Ok(Posted::Done) => return Ok(()),
            Ok(Posted::InProgress) => comp.seal(),
            Err(e) => return Err(words(e)),
        }
        self.until("flush", |_| status.poll().is_some())?;
        status.poll().unwrap_or(Ok(())).map_err(|e| format!("ours: flush: {e:?}"))?;
        // What a flush waits for is complete.
        for status in std::mem::take(&mut self.zcopies) {
            if status.poll() != Some(Ok(())) {
                return Err(format!("ours: zero copy after a flush: {:?}", status.poll()));
            }
        }
        Ok(())
    }

    /// Whether everything that was queued has been handed to the transport.
    pub(crate) fn is_sent(&self) -> bool {
        self.jobs.is_empty()
    }

    /// A stream starts over: its sender is another process.
    pub(crate) fn restart_stream(&mut self, stream: u32) {
        self.inbox.lock().next.remove(&stream);
        self.sent.remove(&stream);
    }

    /// What the error handler was told, and forgets it.
    pub(crate) fn failures(&self) -> Vec<EpFailure> {
        std::mem::take(&mut *self.failures.lock())
    }

    /// A counter.
    pub(crate) fn counter(&self, name: &str) -> u64 {
        self.iface.counters().iter().find(|c| c.name == name).map_or(0, |c| c.value)
    }

    /// Everything there is to know, for the message of a failure.
    pub(crate) fn tell(&self) -> String {
        let counters: Vec<_> =
            self.iface.counters().iter().filter(|c| c.value > 0).map(|c| format!("{}={}", c.name, c.value)).collect();
        format!("arrived {:?}, sent {:?}, {}", self.inbox.lock().next, self.sent, counters.join(" "))
    }
}

fn send_one(
    ep: &Ep,
    job: &Job,
    number: u32,
    region: &MemRegion,
    zcopies: &mut Vec<CompletionStatus>,
) -> SendResult<()> {
    let head = lines::header(job.ep, number);
    let range = lines::payload(number, job.size);
    match job.form {
        "short" => ep.am_short(AM, u64::from_ne_bytes(head), &region.bytes()[range]),
        "bcopy" => {
            ep.am_bcopy(AM, &mut |to| {
                to[..8].copy_from_slice(&head);
                to[8..job.size].copy_from_slice(&region.bytes()[range.clone()]);
                job.size
            })?;
            Ok(())
        }
        _ => {
            let (comp, status) = Completion::polled();
            if ep.am_zcopy(AM, &head, &[region.slice(range)?], Some(&comp))? == Posted::InProgress {
                comp.seal();
                zcopies.push(status);
            }
            Ok(())
        }
    }
}

impl Inbox {
    fn accept(&mut self, data: &[u8]) {
        let Some((stream, number, is_whole)) = lines::read(data) else {
            self.wrong.get_or_insert(format!("a message of {} bytes", data.len()));
            return;
        };
        let next = self.next.entry(stream).or_insert(0);
        if number == *next && is_whole {
            *next += 1;
            return;
        }
        let text = format!(
            "stream {stream}: message {number} of {} bytes where {next} was due{}",
            data.len(),
            if is_whole { "" } else { ", and its content is wrong" }
        );
        self.wrong.get_or_insert(text);
    }
}
