//! Whole interfaces under loom: the user's thread, the progress thread and helper threads, in every interleaving of what they
//! share. `ci/test --only loom` runs it.
//!
//! It is the code that ships, from `uct::Ep` calls to the queue pairs of the simulated device; only locks and atomics are
//! loom's ([`uct::sync`]). The thread that races with the user's is the network as well: what is on the wire arrives when it
//! begins. Nearly all is behind one lock, so the interleavings are few.
//!
//! Seen to fail: without the fence of `UserWake::arm`, or without `Core::wake_user`, a user sleeps for ever; with `take_left`
//! the same for the progress thread as for the user's, an operation is not settled when destroy returns; without the
//! `want_writable` of `serve_pending`, a request is forgotten; with `Returns::drain_all` clearing its flag outside of the
//! lock, a buffer is lost.

use std::sync::{Arc, Mutex};

use ::loom::{model::Builder, thread};
use ib::{
    ah::Executor,
    config::{IfaceConfig, MdConfig},
    md::Md,
    sim::{Faults, SimConfig, SimDevice, SimNet},
};
use uct::{
    AmDesc, AmId, Completion, CompletionStatus, Endpoint, EpParams, ErrorKind, FlushMode, IfaceParams, PendingStatus,
    Posted, SendError, Time, Worker, WorkerParams,
    config::Bytes,
    iface::{Arm, Events, Interface},
    time::ManualClock,
};

use crate::{Tuning, UdConfig, core::Core};

type TheCore = Arc<Core<SimDevice>>;

const ID: AmId = AmId::truncate(3);

/// The numbers of the messages that arrived, in order. Not loom's: handlers of one interface never run at the same time.
type Inbox = Arc<Mutex<Vec<u64>>>;

struct Node {
    core: TheCore,
    md: Arc<Md<SimDevice>>,
    inbox: Inbox,
}

struct World {
    net: Arc<SimNet>,
    a: Node,
    b: Node,
}

fn node(net: &Arc<SimNet>, i: u8, edit: impl Fn(&mut SimConfig, &mut UdConfig)) -> Node {
    let mut config = SimConfig::new(format!("sim{i}"), std::net::IpAddr::from([10, 0, 0, i]));
    config.sge_max = 6;
    let mut ud = UdConfig { rx_queue_len_init: 8, ..UdConfig::default() };
    edit(&mut config, &mut ud);
    let clock = net.clock().clone();
    let md = Md::new(net.add_device(config), MdConfig::default(), clock.clone(), Executor::Manual);
    let worker = Worker::new(WorkerParams::manual(clock)).expect("a worker");
    let iface = IfaceConfig { seg_size: Bytes(512), rx_queue_len: 8, tx_queue_len: 72, ..IfaceConfig::default() };
    let tuning = Tuning {
        seed: Some(u64::from(i)),
        incarnation: Some(u64::from(i)),
        first_ep_id: Some(u32::from(i)),
        ..Tuning::default()
    };
    let core = Core::open(&md, &worker, 1, &IfaceParams::default(), iface, ud, &tuning).expect("an interface");
    Node { core, md, inbox: Inbox::default() }
}

impl Node {
    /// Notes messages, on the progress thread too if `is_async`.
    fn listen(&self, is_async: bool) {
        let inbox = self.inbox.clone();
        let note = move |m: uct::AmMessage<'_>| {
            let bytes = m.data().first_chunk().copied().expect("a number");
            inbox.lock().expect("no panic").push(u64::from_ne_bytes(bytes));
        };
        let kind = if is_async { uct::am::HandlerKind::Async } else { uct::am::HandlerKind::Sync };
        self.core.set_am_handler(ID, Some(Arc::new(note)), kind).expect("a handler");
    }

    fn ep(&self, to: &Node) -> Arc<dyn Endpoint> {
        let params = EpParams::to_iface(&to.core.device_address(), &to.core.iface_address());
        self.core.clone().create_ep(&params).expect("an endpoint")
    }

    fn inbox(&self) -> Vec<u64> {
        self.inbox.lock().expect("no panic").clone()
    }
}

impl World {
    fn new(edit: impl Fn(&mut SimConfig, &mut UdConfig)) -> World {
        let net = SimNet::new(1, Arc::new(ManualClock::new(Time::from_nanos(1_000_000))));
        net.set_faults(Faults { delay_ns: 1, ..Faults::default() });
        let a = node(&net, 1, &edit);
        let b = node(&net, 2, |_, _| {});
        World { net, a, b }
    }

    /// Lets what is on the wire arrive.
    fn arrive(&self) {
        while self.net.step() {}
    }

    /// Moves the network and both nodes until nothing is left to do but to wait.
    fn settle(&self) {
        for _ in 0..20 {
            self.arrive();
            if self.a.core.progress() + self.b.core.progress() == 0 && self.net.in_flight() == 0 {
                return;
            }
        }
        panic!("it does not come to rest");
    }

    /// Connected endpoints, quiet.
    fn pair(&self) -> (Arc<dyn Endpoint>, Arc<dyn Endpoint>) {
        let ea = self.a.ep(&self.b);
        self.settle();
        let eb = self.b.ep(&self.a);
        self.settle();
        (ea, eb)
    }

    /// Everything of the node that the threads share has ended; nothing of the device's is left.
    fn end(self) {
        self.a.core.close_iface();
        self.b.core.close_iface();
        let World { net, a, b } = self;
        for node in [a, b] {
            let md = node.md.clone();
            drop(node);
            md.ah_cache().close();
            md.ah_cache().poll(net.now());
            drop(md);
        }
        assert!(net.leaks().is_empty(), "{:?}", net.leaks());
    }
}

fn model(f: impl Fn() + Sync + Send + 'static) {
    let mut builder = Builder::new();
    builder.max_branches = 20_000;
    let runs = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let r = runs.clone();
    builder.check(move || {
        r.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        f();
    });
    // With one run or two nothing was tried.
    let runs = runs.load(std::sync::atomic::Ordering::Relaxed);
    println!("{runs} interleavings");
    assert!(runs > 3, "{runs} interleavings");
}

/// What is on the wire arrives; the progress thread, for two rounds, and the looks between them at whether it may sleep.
fn progress_thread(w: &World) -> thread::JoinHandle<()> {
    let (net, core) = (w.net.clone(), w.a.core.clone());
    thread::spawn(move || {
        while net.step() {}
        if core.progress_async() == 0 {
            // The user was inside: it is for him to see what has come.
            core.user_wake.device_rings();
        }
        let _ = core.arm_async();
        let _ = core.next_timeout();
        core.progress_async();
    })
}

fn send(ep: &Arc<dyn Endpoint>, n: u64) {
    ep.am_short(ID, n, b"").expect("room");
}

/// A flush whose acknowledgement is on the wire, with a message for the progress thread.
fn acknowledged(w: &World, ep: &Arc<dyn Endpoint>, back: &Arc<dyn Endpoint>) -> CompletionStatus {
    w.a.listen(true);
    w.b.listen(false);
    send(ep, 7);
    let (comp, status) = Completion::polled();
    assert!(matches!(ep.flush(FlushMode::Local, Some(&comp)), Ok(Posted::InProgress)));
    drop(comp);
    w.arrive();
    while w.b.core.progress() > 0 {}
    send(back, 8);
    assert_eq!(status.poll(), None, "nobody has looked yet");
    status
}

/// The endpoint is destroyed while the progress thread handles the acknowledgement of its last message. Either way the
/// operation has one end, and has it when destroy returns.
#[test]
fn destroying_an_endpoint_while_its_acknowledgement_is_handled() {
    model(|| {
        let w = World::new(|_, _| {});
        let (ep, eb) = w.pair();
        let status = acknowledged(&w, &ep, &eb);
        let other = progress_thread(&w);
        ep.destroy_ep();
        let result = status.poll().expect("settled before destroy returns");
        assert!(matches!(result, Ok(()) | Err(ErrorKind::Canceled)), "{result:?}");
        other.join().expect("no panic");
        drop((ep, eb));
        w.settle();
        assert_eq!(w.b.inbox(), [7]);
        w.end();
    });
}

/// The same with the whole interface.
#[test]
fn closing_an_interface_while_an_acknowledgement_is_handled() {
    model(|| {
        let w = World::new(|_, _| {});
        let (ep, eb) = w.pair();
        let status = acknowledged(&w, &ep, &eb);
        let other = progress_thread(&w);
        w.a.core.close_iface();
        other.join().expect("no panic");
        assert!(status.poll().is_some(), "settled in the end");
        assert!(matches!(ep.am_short(ID, 1, b""), Err(SendError::Failed(_))));
        drop((ep, eb));
        w.end();
    });
}

/// Messages that have arrived are handed over once each and in order, whichever thread takes them.
#[test]
fn both_threads_deliver_in_order_and_once() {
    model(|| {
        let w = World::new(|_, _| {});
        let (_ea, eb) = w.pair();
        w.a.listen(true);
        send(&eb, 0);
        send(&eb, 1);
        let other = progress_thread(&w);
        w.a.core.progress();
        other.join().expect("no panic");
        w.settle();
        assert_eq!(w.a.inbox(), [0, 1]);
        drop((_ea, eb));
        w.end();
    });
}

/// An interface is closed while the progress thread delivers: no message after that, no memory that is left behind.
#[test]
fn closing_an_interface_while_messages_are_delivered() {
    model(|| {
        let w = World::new(|_, _| {});
        let (_ea, eb) = w.pair();
        w.a.listen(true);
        send(&eb, 0);
        send(&eb, 1);
        let other = progress_thread(&w);
        w.a.core.close_iface();
        other.join().expect("no panic");
        let got = w.a.inbox();
        assert!([&[][..], &[0], &[0, 1]].contains(&&got[..]), "{got:?}");
        assert_eq!(w.a.core.progress_async() + w.a.core.progress(), 0);
        assert_eq!(Arc::strong_count(&w.a.inbox), 1, "the handler is kept");
        drop((_ea, eb));
        w.end();
    });
}

/// The user sleeps, and the progress thread takes the message for him off the queue pair: he is woken.
#[test]
fn a_user_who_sleeps_is_woken_for_what_the_progress_thread_leaves() {
    model(|| {
        let w = World::new(|_, _| {});
        let (_ea, eb) = w.pair();
        w.a.listen(false);
        send(&eb, 5);
        let other = progress_thread(&w);
        while w.a.inbox().is_empty() {
            match w.a.core.arm(Events::RECV).expect("events") {
                Arm::Busy => {
                    w.a.core.progress();
                }
                Arm::Armed => w.a.core.user_wake.sleep(),
            }
        }
        other.join().expect("no panic");
        assert_eq!(w.a.inbox(), [5]);
        drop((_ea, eb));
        w.end();
    });
}

/// The user sleeps until an address handle is there, which a helper thread makes.
#[test]
fn a_user_who_sleeps_is_woken_for_an_address_handle() {
    model(|| {
        let w = World::new(|sim, _| sim.ah_create_sleeps = sim.name == "sim1");
        let ea = w.a.ep(&w.b);
        let md = w.a.md.clone();
        let helper = thread::spawn(move || {
            md.ah_cache().run_jobs();
        });
        // The request leaves when the handle is there.
        while w.net.in_flight() == 0 {
            match w.a.core.arm(Events::RECV).expect("events") {
                Arm::Busy => {
                    w.a.core.progress();
                }
                Arm::Armed => w.a.core.user_wake.sleep(),
            }
        }
        helper.join().expect("no panic");
        drop(ea);
        w.end();
    });
}

/// A request waits for room in the window, which the progress thread sees first. The user's next progress calls it.
#[test]
fn a_pending_request_is_not_forgotten() {
    model(|| {
        let w = World::new(|_, ud| ud.max_window = 2);
        let (ea, _eb) = w.pair();
        w.b.listen(false);
        let mut n = 0;
        while ea.am_short(ID, n, b"").is_ok() {
            n += 1;
        }
        w.arrive();
        while w.b.core.progress() > 0 {}
        let other = progress_thread(&w);
        let calls = Arc::new(Mutex::new(0));
        let (c, ep) = (calls.clone(), ea.clone());
        let request = move |_: &dyn Endpoint| {
            if ep.am_short(ID, n, b"").is_err() {
                return PendingStatus::NoResource;
            }
            *c.lock().expect("no panic") += 1;
            PendingStatus::Done
        };
        let is_queued = ea.pending_add(Box::new(request)).is_ok();
        w.a.core.progress();
        other.join().expect("no panic");
        w.a.core.progress();
        w.a.core.progress();
        assert_eq!(*calls.lock().expect("no panic"), i32::from(is_queued), "it is called once, and soon");
        drop((ea, _eb));
        w.settle();
        assert_eq!(w.b.inbox().len() as u64, n + u64::from(is_queued));
        w.end();
    });
}

/// Descriptors that a handler kept are given back by another thread, while the interface goes on, and while it ends.
#[test]
fn kept_descriptors_come_home_from_another_thread() {
    for closes in [false, true] {
        model(move || {
            let w = World::new(|_, _| {});
            let (_ea, eb) = w.pair();
            let kept: Arc<Mutex<Vec<AmDesc>>> = Arc::default();
            let k = kept.clone();
            let keep = move |m: uct::AmMessage<'_>| k.lock().expect("no panic").push(m.into_owned());
            w.a.core.set_am_handler(ID, Some(Arc::new(keep)), uct::am::HandlerKind::Sync).expect("a handler");
            send(&eb, 1);
            send(&eb, 2);
            w.settle();
            let descs = std::mem::take(&mut *kept.lock().expect("no panic"));
            assert_eq!(descs.len(), 2);
            let count = |w: &World, name| w.a.core.counters().iter().find(|c| c.name == name).map_or(0, |c| c.value);
            let total = count(&w, "rx.buffers");
            let other = thread::spawn(move || drop(descs));
            if closes {
                w.a.core.close_iface();
                other.join().expect("no panic");
            } else {
                w.a.core.progress();
                other.join().expect("no panic");
                w.a.core.progress();
                let (free, posted) = (count(&w, "rx.buffers_free"), count(&w, "rx.buffers_posted"));
                assert_eq!(free + posted, total, "a buffer is not home");
            }
            drop((_ea, eb));
            w.end();
        });
    }
}
