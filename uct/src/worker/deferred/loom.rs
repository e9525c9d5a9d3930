//! Deferred work and a user who sleeps, in every interleaving. `ci/test --only loom` runs it.
//!
//! Seen to fail: without the fence of `sleep_begins`, or with that of `push` behind its look at `waiting`, a wake-up is lost
//! (loom reports a deadlock); with `any` cleared after the queue was taken, a closure is never run.

use std::sync::Arc;

use ::loom::thread;

use super::DeferredQueue;
use crate::sync::{AtomicUsize, Condvar, Mutex, Ordering};

/// The fd that a user sleeps on.
struct Bell {
    rung: Mutex<bool>,
    changed: Condvar,
}

impl Bell {
    fn new() -> Bell {
        Bell { rung: Mutex::new(false), changed: Condvar::new() }
    }

    fn ring(&self) {
        *self.rung.lock() = true;
        self.changed.notify_all();
    }

    fn drain(&self) {
        *self.rung.lock() = false;
    }

    fn wait(&self) {
        let mut rung = Some(self.rung.lock());
        while rung.as_ref().is_some_and(|r| !**r) {
            self.changed.wait(&mut rung);
        }
    }
}

struct World {
    queue: DeferredQueue,
    bell: Bell,
    ran: AtomicUsize,
}

fn world() -> Arc<World> {
    Arc::new(World { queue: DeferredQueue::default(), bell: Bell::new(), ran: AtomicUsize::new(0) })
}

/// As `WorkerShared::defer`.
fn defer(w: &Arc<World>) {
    let inner = w.clone();
    let f = move || _ = inner.ran.fetch_add(1, Ordering::Relaxed);
    if w.queue.push(Box::new(f)) {
        w.bell.ring();
    }
}

/// As `Worker::wait`.
fn wait(w: &World) {
    w.bell.drain();
    w.queue.sleep_begins();
    if !w.queue.has_any() {
        w.bell.wait();
    }
    w.queue.sleep_ends();
}

fn run_all(w: &World, n: usize) {
    let mut done = 0;
    while done < n {
        let ran = w.queue.run();
        done += ran;
        if ran == 0 {
            wait(w);
        }
    }
    assert_eq!((w.queue.run(), w.ran.load(Ordering::Relaxed)), (0, n), "each once");
}

#[test]
fn a_sleeping_user_is_woken_for_deferred_work() {
    ::loom::model(|| {
        let w = world();
        let other = {
            let w = w.clone();
            thread::spawn(move || defer(&w))
        };
        run_all(&w, 1);
        other.join().unwrap();
    });
}

#[test]
fn work_of_two_threads_runs_once_each() {
    ::loom::model(|| {
        let w = world();
        let others: Vec<_> = (0..2)
            .map(|_| {
                let w = w.clone();
                thread::spawn(move || defer(&w))
            })
            .collect();
        run_all(&w, 2);
        others.into_iter().for_each(|t| t.join().unwrap());
    });
}
