//! The queues by themselves, as UCX's `test_arbiter` tests its arbiter, with its names: a group is an endpoint, an element a
//! request. What a group can do beyond that, move to another arbiter, has no counterpart here.

use std::{
    collections::BTreeMap,
    sync::{Arc, OnceLock},
};

use ib::sw::Rng;
use parking_lot::Mutex;
use uct::ep::PendingStatus;

use super::*;
use crate::proto::{Engine, EngineConfig};

/// The `n`-th endpoint.
fn ep(n: u32) -> EpId {
    static EPS: OnceLock<Vec<EpId>> = OnceLock::new();
    EPS.get_or_init(|| {
        let config = EngineConfig { device_addr: vec![1], first_ep_id: Some(0), ..EngineConfig::default() };
        let mut engine = Engine::<(), u8, (), ()>::new(config).expect("an engine");
        (0..64).map(|_| engine.create_ep(uct::Time::ZERO).expect("an id")).collect()
    })[n as usize]
}

/// Elements that have come to their end, as group and number, in that order.
type Ends = Arc<Mutex<Vec<(u32, u32)>>>;

struct Mark(u32, u32, Ends);

impl Drop for Mark {
    fn drop(&mut self) {
        self.2.lock().push((self.0, self.1));
    }
}

/// Queues and what came of their elements. The requests are never called: to drop one is to finish it.
#[derive(Default)]
struct Arbiter {
    queues: PendingQueues,
    ends: Ends,
}

impl Arbiter {
    fn push(&mut self, group: u32, n: u32) {
        let mark = Mark(group, n, self.ends.clone());
        let request: PendingFn = Box::new(move |_| {
            let _mark = &mark;
            PendingStatus::Done
        });
        self.queues.push(ep(group), request);
    }

    /// One round: each endpoint in line is served once. `serve` says if its element is done; another answer keeps it.
    /// Returns the groups that were served.
    fn dispatch(&mut self, mut serve: impl FnMut(&mut PendingQueues, u32) -> bool) -> Vec<u32> {
        let mut served = Vec::new();
        for _ in 0..self.queues.line_len() {
            let Some(id) = self.queues.next() else { break };
            let Some(request) = self.queues.start(id) else { continue };
            served.push(id.wire_id());
            let done = serve(&mut self.queues, id.wire_id());
            let rest = (!done).then_some(request);
            drop(self.queues.finish(id, rest));
        }
        served
    }

    fn ended(&self) -> Vec<(u32, u32)> {
        std::mem::take(&mut *self.ends.lock())
    }
}

#[test]
fn add_purge() {
    let mut a = Arbiter::default();
    a.push(1, 0);
    a.push(2, 0);
    a.push(2, 1);
    // Done at once or purged from inside: in one round all three are gone.
    let served = a.dispatch(|q, group| {
        drop(q.purge(ep(group), false));
        true
    });
    assert_eq!(served, [1, 2]);
    assert_eq!(a.ended().len(), 3);
    assert_eq!(a.queues.line_len(), 0);
    assert!(!a.queues.has(ep(1)) && !a.queues.has(ep(2)));
}

/// 25 groups, of which every third is purged: the counts are exact, and the others are served.
#[test]
fn purge_cond() {
    let mut a = Arbiter::default();
    for group in 0..25 {
        for n in 0..=group % 4 {
            a.push(group, n);
        }
    }
    for group in (0..25).step_by(3) {
        assert_eq!(a.queues.purge(ep(group), false).len() as u32, 1 + group % 4);
        assert!(a.queues.purge(ep(group), false).is_empty());
    }
    a.ended();
    while !a.dispatch(|_, _| true).is_empty() {}
    let left: u32 = (0..25).filter(|g| g % 3 != 0).map(|g| 1 + g % 4).sum();
    let ended = a.ended();
    assert_eq!(ended.len() as u32, left);
    assert!(ended.iter().all(|(g, _)| g % 3 != 0));
}

#[test]
fn purge_corner() {
    let mut a = Arbiter::default();
    a.push(1, 0);
    assert!(a.queues.has(ep(1)) && a.queues.blocks(ep(1)));
    let mut back = a.queues.purge(ep(1), false);
    assert!(!a.queues.has(ep(1)) && !a.queues.blocks(ep(1)) && a.queues.line_len() == 0);
    // The same element again, among others.
    a.push(2, 0);
    a.queues.push(ep(1), back.pop_front().expect("it came back"));
    assert_eq!(a.dispatch(|_, _| true), [2, 1]);
    assert_eq!(a.ended(), [(2, 0), (1, 0)]);
}

/// Elements that are done, kept, and whose group leaves the line, at random: turns are taken, and each ends once.
#[test]
fn multiple_dispatch() {
    let mut a = Arbiter::default();
    let mut rng = Rng::new(1);
    let mut model: BTreeMap<u32, VecDeque<u32>> = BTreeMap::new();
    for group in 0..20 {
        for n in 0..10 {
            a.push(group, n);
            model.entry(group).or_default().push_back(n);
        }
    }
    let mut rounds = 0;
    while !model.is_empty() {
        rounds += 1;
        let before: Vec<u32> = model.keys().copied().collect();
        let mut out = Vec::new();
        let mut served = a.dispatch(|_, group| {
            let done = rng.below(3) == 0;
            if done {
                out.push((group, model[&group][0]));
            }
            done
        });
        assert_eq!(a.ended(), out);
        for (group, _) in out {
            let queue = model.get_mut(&group).expect("it was there");
            queue.pop_front();
            if queue.is_empty() {
                model.remove(&group);
            }
        }
        served.sort_unstable();
        assert_eq!(served, before, "each once in a round");
    }
    assert!(rounds >= 10);
}

#[test]
fn resched() {
    let mut a = Arbiter::default();
    a.push(1, 0);
    a.push(1, 1);
    let mut left = 5;
    for _ in 0..5 {
        assert_eq!(
            a.dispatch(|_, _| {
                left -= 1;
                left == 0
            }),
            [1]
        );
    }
    assert_eq!(a.ended(), [(1, 0)], "the first stays the first until it is done");
    assert!(a.queues.has(ep(1)));
}

#[test]
fn reuse_elem() {
    let mut a = Arbiter::default();
    a.push(1, 0);
    for _ in 0..10 {
        let id = a.queues.next().expect("in line");
        let request = a.queues.start(id).expect("an element");
        assert!(a.queues.finish(id, None).is_none());
        assert!(!a.queues.has(id));
        a.queues.push(id, request);
    }
    assert!(a.ended().is_empty());
    assert_eq!(a.dispatch(|_, _| true), [1]);
}

/// An element that is kept is served before those that came later, in a group that is in line and in one that is not.
#[test]
fn push_head_scheduled() {
    let mut a = Arbiter::default();
    for n in 0..3 {
        a.push(1, n);
    }
    a.dispatch(|_, _| false);
    assert_eq!(a.queues.line_len(), 1, "in line again");
    let id = a.queues.next().expect("in line");
    assert_eq!(a.queues.line_len(), 0);
    a.queues.enter_line(id);
    for _ in 0..3 {
        a.dispatch(|_, _| true);
    }
    assert_eq!(a.ended(), [(1, 0), (1, 1), (1, 2)]);
}

/// A group that left the line keeps its elements; back in line it is served.
#[test]
fn desched_group() {
    let mut a = Arbiter::default();
    a.push(1, 0);
    a.push(2, 0);
    assert_eq!(a.queues.next(), Some(ep(1)), "its window is shut");
    assert_eq!(a.dispatch(|_, _| true), [2]);
    assert!(a.dispatch(|_, _| true).is_empty());
    assert!(a.queues.blocks(ep(1)), "it holds direct sends up all the same");
    assert_eq!(a.queues.eps().collect::<Vec<_>>(), [ep(1)]);
    a.queues.enter_line(ep(1));
    a.queues.enter_line(ep(1));
    assert_eq!(a.dispatch(|_, _| true), [1], "once");
    assert_eq!(a.ended(), [(2, 0), (1, 0)]);
}

#[test]
fn desched_groups() {
    let mut a = Arbiter::default();
    for group in 0..17 {
        a.push(group, 0);
    }
    let out: Vec<EpId> = std::iter::from_fn(|| a.queues.next()).take(5).collect();
    assert_eq!(a.dispatch(|_, _| true), (5..17).collect::<Vec<_>>());
    for id in out.iter().rev() {
        a.queues.enter_line(*id);
    }
    assert_eq!(a.dispatch(|_, _| true), [4, 3, 2, 1, 0]);
    assert_eq!(a.ended().len(), 17);
}

/// Who stops in the middle of a round goes on there.
#[test]
fn result_stop() {
    let mut a = Arbiter::default();
    for group in 0..6 {
        a.push(group, 0);
    }
    let served: Vec<u32> = (0..6)
        .map(|_| {
            let id = a.queues.next().expect("in line");
            drop(a.queues.start(id));
            assert!(a.queues.finish(id, None).is_none());
            id.wire_id()
        })
        .collect();
    assert_eq!(served, [0, 1, 2, 3, 4, 5]);
    assert_eq!(a.queues.next(), None);
}

/// An element that goes to another group while it is being called.
#[test]
fn resched_from_dispatch() {
    let mut a = Arbiter::default();
    a.push(1, 0);
    a.push(1, 1);
    let id = a.queues.next().expect("in line");
    let request = a.queues.start(id).expect("an element");
    a.queues.push(ep(2), request);
    assert!(!a.queues.blocks(id), "while it is called its own sends may go");
    assert!(a.queues.has(id));
    assert!(a.queues.finish(id, None).is_none());
    assert_eq!(a.dispatch(|_, _| true), [2, 1]);
    assert_eq!(a.ended(), [(1, 0), (1, 1)]);
}

/// A request whose endpoint is destroyed while it is called comes back to the caller, and its successors are gone.
#[test]
fn purge_while_an_element_is_called() {
    let mut a = Arbiter::default();
    a.push(1, 0);
    a.push(1, 1);
    let id = a.queues.next().expect("in line");
    let request = a.queues.start(id).expect("an element");
    assert_eq!(a.queues.purge(id, true).len(), 1);
    assert!(a.queues.finish(id, Some(request)).is_some());
    assert!(!a.queues.has(id) && a.queues.line_len() == 0);
}

/// Random pushes, rounds, purges and shut windows: nothing is lost, nothing ends twice, each group keeps its order.
fn random_resched(groups: u64, elements: u64, seed: u64) {
    let mut a = Arbiter::default();
    let mut rng = Rng::new(seed);
    let (mut next, mut last) = (vec![0u32; groups as usize], vec![None; groups as usize]);
    let (mut pushed, mut ended) = (0, 0);
    for _ in 0..2000 {
        let group = rng.below(groups) as u32;
        match rng.below(8) {
            0..3 if u64::from(next[group as usize]) < elements * 200 => {
                a.push(group, next[group as usize]);
                next[group as usize] += 1;
                pushed += 1;
            }
            3 => drop(a.queues.purge(ep(group), rng.below(2) == 0)),
            4 => drop(a.queues.next()),
            5 => a.queues.enter_line(ep(group)),
            _ => drop(a.dispatch(|_, _| rng.below(2) == 0)),
        }
        for (group, n) in a.ended() {
            let last = &mut last[group as usize];
            assert!(last.is_none_or(|l| n == l + 1), "seed {seed}: {n} after {last:?}");
            *last = Some(n);
            ended += 1;
        }
    }
    drop(a.queues.purge_all());
    ended += a.ended().len();
    assert_eq!(pushed, ended, "seed {seed}");
    assert_eq!((a.queues.line_len(), a.queues.eps().count()), (0, 0));
}

#[test]
fn one_elem_one_group() {
    (0..20).for_each(|seed| random_resched(1, 1, seed));
}

#[test]
fn one_elem_many_groups() {
    (0..20).for_each(|seed| random_resched(50, 1, seed));
}

#[test]
fn many_elems_many_groups() {
    (0..20).for_each(|seed| random_resched(50, 50, seed));
}
