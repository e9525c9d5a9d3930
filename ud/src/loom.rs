//! Whole interfaces under loom: the user's thread, the progress thread and helper threads, in every interleaving of what they
//! share. `ci/test --only loom` runs it.
//!
//! It is the code that ships, from `uct::Ep` calls to the queue pairs of the simulated device; only locks and atomics are
//! loom's ([`uct::sync`]). The thread that races with the user's is the network as well: what is on the wire arrives when it
//! begins. Nearly all is behind one lock, so the interleavings are few.
//!
//! Seen to fail: without the fence of `UserWake::arm`, or without `Core::wake_user`, a user sleeps for ever; with `take_left`
//! the same for the progress thread as for the user's, an operation is not settled when destroy returns; without the
//! `want_writable` of `serve_pending`, a request is forgotten; with `take_later_of` taking what is of other endpoints too, an
//! operation is not settled when the destroy of its own returns; with `Returns::drain_all` clearing its flag outside of the
//! lock, a buffer is lost; without the `recover` of `pump`, a queue pair is never set up again.

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

    fn count(&self, name: &str) -> u64 {
        self.core.counters().iter().find(|c| c.name == name).map_or(0, |c| c.value)
    }

    /// The user's thread, which sleeps whenever it may.
    fn sleep_until(&self, done: impl Fn() -> bool) {
        while !done() {
            match self.core.arm(Events::RECV).expect("events") {
                Arm::Busy => {
                    self.core.progress();
                }
                Arm::Armed => self.core.user_wake.sleep(),
            }
        }
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

    /// A round of node a after so much time that, idle or not, it does everything.
    fn whole_round(&self) {
        self.net.run_for(std::time::Duration::from_micros(100));
        self.a.core.progress();
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

/// A world with endpoints that are connected to each other, and quiet. Its end is [`World::end`].
struct Scene {
    w: World,
    /// Of node a.
    ea: Arc<dyn Endpoint>,
    /// Of node b.
    eb: Arc<dyn Endpoint>,
}

impl std::ops::Deref for Scene {
    type Target = World;

    fn deref(&self) -> &World {
        &self.w
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

/// A scene, with other settings of node a, in every interleaving of the threads that `play` starts. Nothing may be left of it.
fn scene(edit: impl Fn(&mut UdConfig) + Send + Sync + 'static, play: impl Fn(&Scene) + Send + Sync + 'static) {
    model(move || {
        let w = World::new(|_, ud| edit(ud));
        let ea = w.a.ep(&w.b);
        w.settle();
        let eb = w.b.ep(&w.a);
        w.settle();
        let scene = Scene { w, ea, eb };
        play(&scene);
        let Scene { w, ea, eb } = scene;
        drop((ea, eb));
        w.end();
    });
}

/// A race on node a: when `prepare` is done, the progress thread and `user`; when both have come to an
/// end, `check`. Nobody moves node b meanwhile.
fn race<S>(
    prepare: impl Fn(&Scene) -> S + Send + Sync + 'static,
    user: impl Fn(&Scene, &S) + Send + Sync + 'static,
    check: impl Fn(&Scene, S) + Send + Sync + 'static,
) {
    race_with(|_| {}, prepare, user, check);
}

/// [`race`], with other settings of node a.
fn race_with<S>(
    edit: impl Fn(&mut UdConfig) + Send + Sync + 'static,
    prepare: impl Fn(&Scene) -> S + Send + Sync + 'static,
    user: impl Fn(&Scene, &S) + Send + Sync + 'static,
    check: impl Fn(&Scene, S) + Send + Sync + 'static,
) {
    scene(edit, move |s| {
        let state = prepare(s);
        let other = progress_thread(s);
        user(s, &state);
        other.join().expect("no panic");
        check(s, state);
    });
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
fn acknowledged(s: &Scene) -> CompletionStatus {
    s.a.listen(true);
    s.b.listen(false);
    send(&s.ea, 7);
    let status = flush(&s.ea);
    s.arrive();
    while s.b.core.progress() > 0 {}
    send(&s.eb, 8);
    assert_eq!(status.poll(), None, "nobody has looked yet");
    status
}

fn flush(ep: &Arc<dyn Endpoint>) -> CompletionStatus {
    let (comp, status) = Completion::polled();
    assert!(matches!(ep.flush(FlushMode::Local, Some(&comp)), Ok(Posted::InProgress)));
    status
}

/// Messages for node a, on the wire.
fn two_messages(s: &Scene, is_async: bool) {
    s.a.listen(is_async);
    send(&s.eb, 0);
    send(&s.eb, 1);
}

/// Who destroys learns here what has become of an operation: either way it has one end, and has it when destroy returns.
fn assert_settled(status: &CompletionStatus) {
    let result = status.poll().expect("settled before destroy returns");
    assert!(matches!(result, Ok(()) | Err(ErrorKind::Canceled)), "{result:?}");
}

/// The endpoint is destroyed while the progress thread handles the acknowledgement of its last message.
#[test]
fn destroying_an_endpoint_while_its_acknowledgement_is_handled() {
    race(
        acknowledged,
        |s, status| {
            s.ea.destroy_ep();
            assert_settled(status);
        },
        |s, _| {
            s.settle();
            assert_eq!(s.b.inbox(), [7]);
        },
    );
}

/// The same with the whole interface.
#[test]
fn closing_an_interface_while_an_acknowledgement_is_handled() {
    race(
        acknowledged,
        |s, _| s.a.core.close_iface(),
        |s, status| {
            assert!(status.poll().is_some(), "settled in the end");
            assert!(matches!(s.ea.am_short(ID, 1, b""), Err(SendError::Failed(_))));
        },
    );
}

/// Two threads destroy the same endpoint while the progress thread handles the acknowledgement of its last message. It ends
/// once; the operation has its end when both are done, since who comes second need not wait for what the first one calls.
#[test]
fn two_threads_destroy_the_same_endpoint() {
    race(
        acknowledged,
        |s, status| {
            let ep = s.ea.clone();
            let second = thread::spawn(move || ep.destroy_ep());
            s.ea.destroy_ep();
            second.join().expect("no panic");
            assert_settled(status);
        },
        |s, _| {
            assert!(matches!(s.ea.am_short(ID, 1, b""), Err(SendError::Failed(_))));
            s.settle();
            assert_eq!(s.b.inbox(), [7]);
        },
    );
}

/// Two threads destroy an endpoint each, both with an operation under way. Each has its own operation's end when its destroy
/// returns, whoever of the three threads it was that had it in hand.
#[test]
fn two_threads_destroy_different_endpoints() {
    race(
        |s| {
            let other = s.a.ep(&s.b);
            s.settle();
            let first = acknowledged(s);
            send(&other, 9);
            let second = flush(&other);
            (other, first, Arc::new(second))
        },
        |s, (other, first, second)| {
            let (ep, status) = (other.clone(), second.clone());
            let helper = thread::spawn(move || {
                ep.destroy_ep();
                assert_settled(&status);
            });
            s.ea.destroy_ep();
            assert_settled(first);
            helper.join().expect("no panic");
        },
        |s, _| {
            s.settle();
            let mut got = s.b.inbox();
            got.sort_unstable();
            assert_eq!(got, [7, 9]);
        },
    );
}

/// An endpoint is destroyed while another thread closes the interface, and the progress thread handles an acknowledgement.
/// Whoever comes first, the operation ends once; a destroy that finds no interface does nothing.
#[test]
fn destroying_an_endpoint_while_its_interface_is_closed() {
    race(
        acknowledged,
        |s, _| {
            let core = s.a.core.clone();
            let closer = thread::spawn(move || core.close_iface());
            s.ea.destroy_ep();
            closer.join().expect("no panic");
        },
        |s, status| {
            assert_settled(&status);
            assert!(matches!(s.ea.am_short(ID, 1, b""), Err(SendError::Failed(_))));
            assert_eq!(s.a.core.progress_async() + s.a.core.progress(), 0);
            assert_eq!(Arc::strong_count(&s.a.inbox), 1, "the handler is kept");
        },
    );
}

/// Messages that have arrived are handed over once each and in order, whichever thread takes them.
#[test]
fn both_threads_deliver_in_order_and_once() {
    race(
        |s| two_messages(s, true),
        |s, ()| {
            s.a.core.progress();
        },
        |s, ()| {
            s.settle();
            assert_eq!(s.a.inbox(), [0, 1]);
        },
    );
}

/// An interface is closed while the progress thread delivers: no message after that, no memory that is left behind.
#[test]
fn closing_an_interface_while_messages_are_delivered() {
    race(
        |s| two_messages(s, true),
        |s, ()| s.a.core.close_iface(),
        |s, ()| {
            let got = s.a.inbox();
            assert!([&[][..], &[0], &[0, 1]].contains(&&got[..]), "{got:?}");
            assert_eq!(s.a.core.progress_async() + s.a.core.progress(), 0);
            assert_eq!(Arc::strong_count(&s.a.inbox), 1, "the handler is kept");
        },
    );
}

/// The user sleeps, and the progress thread takes the message for him off the queue pair: he is woken.
#[test]
fn a_user_who_sleeps_is_woken_for_what_the_progress_thread_leaves() {
    race(
        |s| {
            s.a.listen(false);
            send(&s.eb, 5);
        },
        |s, ()| s.a.sleep_until(|| !s.a.inbox().is_empty()),
        |s, ()| assert_eq!(s.a.inbox(), [5]),
    );
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
        w.a.sleep_until(|| w.net.in_flight() > 0);
        helper.join().expect("no panic");
        drop(ea);
        w.end();
    });
}

/// The queue pair fell into ERROR. The user sleeps until a helper thread has read the GID table, after which it is set up again.
#[test]
fn a_user_who_sleeps_is_woken_to_set_the_queue_pair_up_again() {
    model(|| {
        let w = World::new(|sim, _| sim.ah_create_sleeps = sim.name == "sim1");
        w.a.md.device().fail_qps();
        w.a.core.progress();
        let md = w.a.md.clone();
        let helper = thread::spawn(move || assert_eq!(md.ah_cache().run_jobs(), 1));
        w.a.core.progress();
        w.a.sleep_until(|| w.a.count("qp.resets") > 0);
        helper.join().expect("no panic");
        assert!(w.a.count("rx.buffers_posted") > 0);
        w.end();
    });
}

/// A request waits for room in the window, which the progress thread sees first. The user's next progress calls it.
#[test]
fn a_pending_request_is_not_forgotten() {
    race_with(
        |ud| ud.max_window = 2,
        |s| {
            s.b.listen(false);
            let mut n = 0;
            while s.ea.am_short(ID, n, b"").is_ok() {
                n += 1;
            }
            s.arrive();
            while s.b.core.progress() > 0 {}
            (n, Arc::new(Mutex::new((false, 0))))
        },
        |s, (n, seen)| {
            let (n, calls, ep) = (*n, seen.clone(), s.ea.clone());
            let request = move |_: &dyn Endpoint| {
                if ep.am_short(ID, n, b"").is_err() {
                    return PendingStatus::NoResource;
                }
                calls.lock().expect("no panic").1 += 1;
                PendingStatus::Done
            };
            let is_queued = s.ea.pending_add(Box::new(request)).is_ok();
            seen.lock().expect("no panic").0 = is_queued;
            s.a.core.progress();
        },
        |s, (n, seen)| {
            s.a.core.progress();
            s.a.core.progress();
            let (is_queued, calls) = *seen.lock().expect("no panic");
            assert_eq!(calls, u64::from(is_queued), "it is called once, and soon");
            s.settle();
            assert_eq!(s.b.inbox().len() as u64, n + calls);
        },
    );
}

/// Descriptors that a handler kept are given back by another thread, while the interface goes on, and while it ends.
#[test]
fn kept_descriptors_come_home_from_another_thread() {
    for closes in [false, true] {
        scene(
            |_| {},
            move |s| {
                let kept: Arc<Mutex<Vec<AmDesc>>> = Arc::default();
                let k = kept.clone();
                let keep = move |m: uct::AmMessage<'_>| k.lock().expect("no panic").push(m.into_owned());
                s.a.core.set_am_handler(ID, Some(Arc::new(keep)), uct::am::HandlerKind::Sync).expect("a handler");
                send(&s.eb, 1);
                send(&s.eb, 2);
                s.settle();
                let descs = std::mem::take(&mut *kept.lock().expect("no panic"));
                assert_eq!(descs.len(), 2);
                let total = s.a.count("rx.buffers");
                let other = thread::spawn(move || drop(descs));
                if closes {
                    s.a.core.close_iface();
                    other.join().expect("no panic");
                } else {
                    s.whole_round();
                    other.join().expect("no panic");
                    s.whole_round();
                    let (free, posted) = (s.a.count("rx.buffers_free"), s.a.count("rx.buffers_posted"));
                    assert_eq!(free + posted, total, "a buffer is not home");
                }
            },
        );
    }
}
