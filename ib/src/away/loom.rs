//! The owner and the thread that has the queue pair, under loom: once for every interleaving of the two. Run as the models of
//! the address-handle cache are.
//!
//! Seen to fail with a wake-up before the queue pair is back, and with a [`Away::leave`] that looks and leaves word in two
//! steps.

use ::loom::thread;
use uct::sync::{AtomicBool, AtomicUsize, Ordering};

use super::*;

/// A queue pair that tells when it goes.
struct Guest(Arc<AtomicUsize>);

impl Drop for Guest {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

struct Model {
    away: Away<Guest>,
    job: ResetJob,
    woken: Arc<AtomicBool>,
    gone: Arc<AtomicUsize>,
}

impl Model {
    fn new() -> Model {
        let (gone, woken) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let w = woken.clone();
        let wake = Arc::new(move || w.store(true, Ordering::Release));
        let (away, job) = Away::lend(Guest(gone.clone()), |_| Ok(()), wake);
        Model { away, job, woken, gone }
    }
}

#[test]
fn who_is_woken_finds_it_back_once() {
    ::loom::model(|| {
        let Model { away, job, woken, gone } = Model::new();
        let helper = thread::spawn(job);
        let was_woken = woken.load(Ordering::Acquire);
        let early = away.take();
        assert!(early.is_some() || !was_woken, "woken for nothing");
        helper.join().unwrap();
        let late = away.take();
        assert!(early.is_some() != late.is_some());
        assert_eq!(gone.load(Ordering::Relaxed), 0);
    });
}

fn leaves_while(helper: fn(ResetJob)) {
    ::loom::model(move || {
        let Model { away, job, gone, .. } = Model::new();
        let ended = Arc::new(AtomicUsize::new(0));
        let helper = thread::spawn(move || helper(job));
        let e = ended.clone();
        away.leave(move |guest| {
            assert_eq!(guest.0.load(Ordering::Relaxed), 0, "gone before its end");
            e.fetch_add(1, Ordering::Relaxed);
        });
        helper.join().unwrap();
        assert_eq!((ended.load(Ordering::Relaxed), gone.load(Ordering::Relaxed)), (1, 1));
    });
}

#[test]
fn one_whose_owner_leaves_ends_once() {
    leaves_while(|job| job());
}

#[test]
fn one_whose_owner_leaves_ends_once_also_if_nobody_does_the_work() {
    leaves_while(drop);
}

#[test]
fn one_whose_owner_is_dropped_goes_once() {
    ::loom::model(|| {
        let Model { away, job, gone, .. } = Model::new();
        let helper = thread::spawn(job);
        drop(away);
        helper.join().unwrap();
        assert_eq!(gone.load(Ordering::Relaxed), 1);
    });
}
