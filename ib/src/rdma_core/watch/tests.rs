use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::IpAddr,
};

use netlink_packet_core::{Emitable, NLM_F_DUMP_INTR, NLM_F_MULTIPART};
use netlink_packet_route::{
    AddressFamily,
    neighbour::{NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState},
    route::{RouteAttribute, RouteFlags, RouteMessage, RouteType, RouteVia},
};
use proptest::prelude::*;

use super::{
    message::{self, Item},
    paths::{Answer, Event, Hop, ID_RESERVED, Mac, Neighbour, Paths, Question},
    socket::{Read, Socket},
};
use crate::{
    ah::{AhPath, PathNews},
    types::Gid,
};

const IF: u32 = 2;
const OTHER_IF: u32 = 3;
const MAC: Mac = [2, 0, 0, 0, 0, 1];
const NEW_MAC: Mac = [2, 0, 0, 0, 0, 2];

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn gid(text: &str) -> Gid {
    Gid::from_ip(ip(text))
}

fn path_from(sgid: &str, dgid: &str) -> AhPath {
    AhPath { dgid: gid(dgid), sgid: gid(sgid), port: 1 }
}

fn path(dgid: &str) -> AhPath {
    path_from(if dgid.contains(':') { "fd77::1" } else { "10.0.0.1" }, dgid)
}

fn hop(text: &str) -> Hop {
    Hop { ifindex: IF, ip: ip(text) }
}

fn at(text: &str, mac: Mac) -> Event {
    Event::Neighbour(hop(text), Neighbour::At(mac))
}

fn route(text: &str) -> Event {
    let (net, len) = text.split_once('/').unwrap();
    Event::Route(ip(net), len.parse().unwrap())
}

const DIRECT: Answer = Answer::Via { ifindex: IF, gateway: None };

fn by(gateway: &str) -> Answer {
    Answer::Via { ifindex: IF, gateway: Some(ip(gateway)) }
}

impl Paths {
    /// One that has had its first dump.
    fn ready() -> Paths {
        let mut paths = Paths::new();
        assert!(paths.take_dump_request() && !paths.take_dump_request());
        paths
    }

    /// Adds a path on interface [`IF`], with the answer to the question that follows.
    fn lead(&mut self, path: AhPath, answer: Answer) {
        self.add(path, IF);
        assert_eq!(self.settle(answer), [path]);
    }

    /// Answers all questions alike; returns what was asked for.
    fn settle(&mut self, answer: Answer) -> Vec<AhPath> {
        let mut asked = Vec::new();
        while let Some(q) = self.next_question() {
            asked.push(AhPath { dgid: Gid::from_ip(q.to), sgid: Gid::from_ip(q.from), port: 1 });
            self.answer(q.id, answer);
        }
        asked
    }

    fn news(&mut self) -> Vec<(AhPath, PathNews)> {
        self.take_news().into_iter().collect()
    }

    fn news_of(&mut self, events: &[Event]) -> Vec<(AhPath, PathNews)> {
        for event in events {
            self.handle(*event);
        }
        self.news()
    }
}

#[test]
fn a_link_address_that_changes_concerns_exactly_the_paths_through_that_neighbour() {
    for (peer, other) in [("10.0.0.2", "10.0.0.3"), ("fd77::2", "fd77::3"), ("fe80::2", "fe80::3")] {
        let mut paths = Paths::ready();
        paths.news_of(&[at(peer, MAC), at(other, MAC)]);
        paths.lead(path(peer), DIRECT);
        paths.lead(path(other), DIRECT);
        assert_eq!(paths.news(), []);
        assert_eq!(paths.news_of(&[at(peer, NEW_MAC)]), [(path(peer), PathNews::Moved)]);
        assert_eq!(paths.news_of(&[at(peer, NEW_MAC)]), [], "known by now");
    }
}

#[test]
fn one_address_on_two_interfaces_is_two_neighbours() {
    let mut paths = Paths::ready();
    let there = Hop { ifindex: OTHER_IF, ip: ip("fe80::2") };
    let (a, b) = (path_from("fe80::a", "fe80::2"), path_from("fe80::b", "fe80::2"));
    paths.news_of(&[at("fe80::2", MAC), Event::Neighbour(there, Neighbour::At(MAC))]);
    paths.lead(a, DIRECT);
    paths.add(b, OTHER_IF);
    let q = paths.next_question().unwrap();
    assert_eq!((q.from, q.to, q.ifindex), (ip("fe80::b"), ip("fe80::2"), OTHER_IF), "the scope is asked with");
    paths.answer(q.id, Answer::Via { ifindex: OTHER_IF, gateway: None });
    assert_eq!(paths.news_of(&[at("fe80::2", NEW_MAC)]), [(a, PathNews::Moved)]);
    assert_eq!(paths.news_of(&[Event::Neighbour(there, Neighbour::At(NEW_MAC))]), [(b, PathNews::Moved)]);
}

#[test]
fn being_more_or_less_sure_and_collecting_are_no_news() {
    let mut paths = Paths::ready();
    let peer = "10.0.0.2";
    paths.handle(at(peer, MAC));
    paths.lead(path(peer), DIRECT);
    let gone = Event::Neighbour(hop(peer), Neighbour::Gone);
    let asked = Event::Neighbour(hop(peer), Neighbour::Asked);
    let flapping = [at(peer, MAC), asked, at(peer, MAC), gone, asked, at(peer, MAC), gone];
    assert_eq!(paths.news_of(&flapping), []);
    // Handles still have the old address, whatever the kernel has forgotten.
    assert_eq!(paths.news_of(&[asked, at(peer, NEW_MAC)]), [(path(peer), PathNews::Moved)]);
}

#[test]
fn a_neighbour_that_fails_is_lost_once_and_found_again() {
    let mut paths = Paths::ready();
    let peer = "10.0.0.2";
    paths.lead(path(peer), DIRECT);
    let failed = Event::Neighbour(hop(peer), Neighbour::Failed);
    let asked = Event::Neighbour(hop(peer), Neighbour::Asked);
    assert_eq!(paths.news_of(&[at(peer, MAC)]), [(path(peer), PathNews::Found)], "a failure may be remembered");
    assert_eq!(paths.news_of(&[failed]), [(path(peer), PathNews::Lost)]);
    assert_eq!(paths.news_of(&[asked, failed, asked]), []);
    assert_eq!(paths.news_of(&[at(peer, MAC)]), [(path(peer), PathNews::Found)]);
    assert_eq!(paths.news_of(&[failed, at(peer, NEW_MAC)]), [(path(peer), PathNews::Moved)], "the graver one");
}

#[test]
fn behind_a_gateway_its_link_address_counts() {
    let mut paths = Paths::ready();
    let (gateway, far, near) = ("10.0.0.254", "10.9.0.2", "10.0.0.2");
    paths.news_of(&[at(gateway, MAC), at(near, MAC), at(far, MAC)]);
    paths.lead(path(far), by(gateway));
    paths.lead(path(near), DIRECT);
    assert_eq!(paths.news_of(&[at(far, NEW_MAC)]), []);
    assert_eq!(paths.news_of(&[at(gateway, NEW_MAC)]), [(path(far), PathNews::Moved)]);
    // An IPv4 route through an IPv6 gateway.
    paths.handle(route("10.9.0.0/16"));
    paths.settle(by("fe80::1"));
    assert_eq!(paths.news(), [(path(far), PathNews::Moved)]);
    paths.handle(at("fe80::1", MAC));
    paths.news();
    assert_eq!(paths.news_of(&[at(gateway, MAC)]), [], "no longer its business");
    assert_eq!(paths.news_of(&[at("fe80::1", NEW_MAC)]), [(path(far), PathNews::Moved)]);
}

#[test]
fn a_change_of_routes_has_those_asked_for_that_it_covers() {
    let all = ["10.9.0.2", "10.9.1.2", "10.10.0.2", "fd77::2", "fd78::2"];
    let cases: [(&str, &[&str]); 8] = [
        ("10.9.0.0/24", &["10.9.0.2"]),
        ("10.9.0.0/16", &["10.9.0.2", "10.9.1.2"]),
        ("10.9.0.7/16", &["10.9.0.2", "10.9.1.2"]),
        ("10.9.1.2/32", &["10.9.1.2"]),
        ("0.0.0.0/0", &["10.9.0.2", "10.9.1.2", "10.10.0.2"]),
        ("fd77::/64", &["fd77::2"]),
        ("::/0", &["fd77::2", "fd78::2"]),
        ("192.168.0.0/16", &[]),
    ];
    for (changed, covered) in cases {
        let mut paths = Paths::ready();
        for dgid in all {
            paths.lead(path(dgid), DIRECT);
        }
        assert_eq!(paths.news_of(&[route(changed)]), []);
        let covered: Vec<AhPath> = covered.iter().map(|c| path(c)).collect();
        assert_eq!(paths.settle(DIRECT), covered, "{changed}");
        assert_eq!(paths.news(), [], "{changed}: all as before");
        paths.handle(route(changed));
        paths.settle(by("10.0.0.254"));
        let moved: Vec<_> = covered.iter().map(|p| (*p, PathNews::Moved)).collect();
        assert_eq!(paths.news(), moved, "{changed}");
    }
}

#[test]
fn routes_come_and_go() {
    let mut paths = Paths::ready();
    let peer = "10.0.0.2";
    paths.lead(path(peer), DIRECT);
    let steps = [
        (Answer::NoRoute, Some(PathNews::Lost)),
        (Answer::NoRoute, None),
        (DIRECT, Some(PathNews::Found)),
        (Answer::Unknown, None),
        (DIRECT, Some(PathNews::Moved)),
        (DIRECT, None),
        (Answer::Here, Some(PathNews::Moved)),
        (DIRECT, Some(PathNews::Moved)),
    ];
    for (answer, what) in steps {
        paths.handle(route("10.0.0.0/24"));
        paths.settle(answer);
        assert_eq!(paths.news(), what.map(|w| (path(peer), w)).into_iter().collect::<Vec<_>>(), "{answer:?}");
    }
}

#[test]
fn between_two_changes_that_were_not_looked_at_a_handle_may_have_been_made() {
    let mut paths = Paths::ready();
    let peer = "10.0.0.2";
    paths.lead(path(peer), DIRECT);
    paths.handle(route("10.0.0.0/24"));
    paths.handle(route("10.0.0.0/24"));
    paths.settle(DIRECT);
    assert_eq!(paths.news(), [(path(peer), PathNews::Moved)]);
}

#[test]
fn what_happens_before_the_next_hop_is_known_is_not_missed() {
    let peer = "10.0.0.2";
    let failed = Event::Neighbour(hop(peer), Neighbour::Failed);
    let cases: [(&[Event], Option<PathNews>); 7] = [
        (&[], None),
        (&[at(peer, MAC)], None),
        (&[at(peer, NEW_MAC)], Some(PathNews::Moved)),
        (&[at(peer, NEW_MAC), at(peer, MAC)], Some(PathNews::Moved)),
        (&[failed], Some(PathNews::Lost)),
        (&[at("10.0.0.3", NEW_MAC)], None),
        (&[Event::Interface(IF)], None),
    ];
    for (events, what) in cases {
        let mut paths = Paths::ready();
        paths.news_of(&[at(peer, NEW_MAC), at(peer, MAC), at("10.0.0.3", MAC), failed, at(peer, MAC)]);
        paths.add(path(peer), IF);
        assert_eq!(paths.news_of(events), []);
        paths.settle(DIRECT);
        assert_eq!(paths.news(), what.map(|w| (path(peer), w)).into_iter().collect::<Vec<_>>(), "{events:?}");
    }
    for changed in [route("10.0.0.0/24"), Event::Routing] {
        let mut paths = Paths::ready();
        paths.add(path(peer), IF);
        assert_eq!(paths.news_of(&[changed]), [(path(peer), PathNews::Moved)], "of old or new? nobody knows");
    }
}

/// A handle that was begun after its change was told and before it was made.
#[test]
fn what_comes_up_before_the_changes_are_made_is_in_doubt() {
    let (old, new) = (path("10.9.0.1"), path("10.9.0.2"));
    let mut paths = Paths::ready();
    paths.lead(old, by("10.0.0.1"));
    assert!(!paths.take_barrier_request());
    paths.handle(at("10.0.0.1", MAC));
    assert!(!paths.take_barrier_request(), "neighbours are told as they are");
    for event in [route("10.9.0.0/24"), Event::Interface(IF), Event::Routing, Event::Lost] {
        paths.handle(event);
        assert!(paths.take_barrier_request() && !paths.take_barrier_request(), "{event:?}");
        paths.settle(by("10.0.0.1"));
        paths.news();
    }
    paths.add_in_doubt(old, IF);
    assert_eq!(paths.news(), [], "its change is noticed by the answer");
    paths.add_in_doubt(new, IF);
    assert_eq!(paths.news(), [(new, PathNews::Moved)]);
    assert_eq!(paths.settle(by("10.0.0.2")), [new]);
    assert_eq!(paths.news(), []);
}

#[test]
fn an_interface_has_its_paths_asked_for_and_no_others() {
    let mut paths = Paths::ready();
    paths.lead(path("10.0.0.2"), DIRECT);
    paths.add(path("10.1.0.2"), OTHER_IF);
    paths.settle(DIRECT);
    paths.handle(Event::Interface(OTHER_IF));
    assert_eq!(paths.settle(DIRECT), [path("10.1.0.2")]);
    paths.handle(Event::Interface(9));
    assert_eq!(paths.settle(DIRECT), []);
    assert_eq!(paths.news(), []);
}

#[test]
fn after_a_loss_everything_is_compared() {
    let mut paths = Paths::ready();
    let (same, moved, rerouted, blank, unknown) = ("10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5", "10.0.0.6");
    paths.news_of(&[at(same, MAC), at(moved, MAC), at(rerouted, MAC)]);
    for peer in [same, moved, rerouted, blank] {
        paths.lead(path(peer), DIRECT);
    }
    paths.add(path(unknown), IF);
    let late = paths.next_question().unwrap();
    let doubtful = [(path(blank), PathNews::Moved), (path(unknown), PathNews::Moved)];
    assert_eq!(paths.news_of(&[Event::Lost]), doubtful);
    assert!(paths.take_dump_request());
    paths.answer(late.id, by("10.0.0.254"));
    let mut asked = Vec::new();
    while let Some(q) = paths.next_question() {
        paths.answer(q.id, if q.to == ip(rerouted) { by("10.0.0.254") } else { DIRECT });
        asked.push(q.to);
    }
    assert_eq!(asked, [same, moved, rerouted, blank, unknown].map(ip), "the late answer does not count");
    let news = paths.news_of(&[at(same, MAC), at(moved, NEW_MAC), at(rerouted, MAC)]);
    assert_eq!(news, [(path(moved), PathNews::Moved), (path(rerouted), PathNews::Moved)]);
}

#[test]
fn questions_are_bounded_and_all_asked_in_the_end() {
    let mut paths = Paths::ready();
    for n in 0..100u8 {
        paths.add(path(&format!("10.0.1.{n}")), IF);
    }
    let first: Vec<Question> = std::iter::from_fn(|| paths.next_question()).collect();
    assert_eq!(first.len(), 32);
    assert!(first.iter().all(|q| q.id > ID_RESERVED));
    paths.answer(first[0].id, DIRECT);
    assert!(paths.next_question().is_some() && paths.next_question().is_none());
    for q in &first {
        paths.answer(q.id, DIRECT);
    }
    assert_eq!(paths.settle(DIRECT).len(), 67);
}

#[test]
fn an_answer_that_does_not_come_is_guessed() {
    let mut paths = Paths::ready();
    let peer = "10.0.0.2";
    paths.handle(at(peer, MAC));
    paths.lead(path(peer), Answer::Unknown);
    assert_eq!(paths.news_of(&[at(peer, NEW_MAC)]), [(path(peer), PathNews::Moved)]);
    paths.add(path("10.0.0.3"), 0);
    paths.settle(Answer::Unknown);
    paths.news_of(&[at("10.0.0.3", MAC)]);
    assert_eq!(paths.news_of(&[at("10.0.0.3", NEW_MAC)]), [], "on which interface?");
}

#[test]
fn a_local_address_that_moves_to_another_interface_takes_its_paths_along() {
    let mut paths = Paths::ready();
    let peer = "10.0.0.2";
    paths.news_of(&[at(peer, MAC)]);
    paths.lead(path(peer), DIRECT);
    paths.add(path(peer), IF);
    assert_eq!(paths.next_question(), None, "nothing new");
    paths.add(path(peer), OTHER_IF);
    assert_eq!(paths.next_question().map(|q| q.ifindex), Some(OTHER_IF));
    assert_eq!(paths.news_of(&[at(peer, NEW_MAC)]), []);
}

#[test]
fn what_nobody_uses_any_more_is_forgotten() {
    let mut paths = Paths::ready();
    let all: Vec<AhPath> = (0..1024u32).map(|n| path(&format!("10.1.{}.{}", n / 256, n % 256))).collect();
    for p in &all {
        assert!(!paths.is_crowded());
        paths.add(*p, IF);
    }
    assert!(paths.is_crowded());
    paths.settle(DIRECT);
    paths.retain(&all[..1000]);
    assert_eq!((paths.len(), paths.is_crowded()), (1000, false));
    let gone = all[1001].dgid.to_ip();
    let events = [MAC, NEW_MAC].map(|mac| Event::Neighbour(Hop { ifindex: IF, ip: gone }, Neighbour::At(mac)));
    assert_eq!(paths.news_of(&events), []);
}

#[test]
fn collected_neighbours_are_forgotten_once_no_path_leads_through_them() {
    let mut paths = Paths::ready();
    let (peer, gateway) = ("10.0.0.2", "10.0.0.254");
    let gone = |ip| Event::Neighbour(hop(ip), Neighbour::Gone);
    paths.add(path(peer), IF);
    paths.news_of(&[at(peer, MAC), gone(peer), at(gateway, MAC), gone(gateway)]);
    let known = |p: &Paths| (p.knows(hop(peer)), p.knows(hop(gateway)));
    assert_eq!(known(&paths), (true, true), "which one it is will be known when the answer is in");
    paths.settle(DIRECT);
    assert_eq!(known(&paths), (true, false));
    paths.handle(route("10.0.0.0/24"));
    paths.settle(by("10.0.0.253"));
    assert_eq!(known(&paths), (false, false));
}

#[test]
fn paths_without_neighbours_are_not_asked_for() {
    let mut paths = Paths::ready();
    for (sgid, dgid) in
        [("10.0.0.1", "fd77::2"), ("fd77::1", "10.0.0.2"), ("10.0.0.1", "224.0.0.1"), ("fd77::1", "ff02::1")]
    {
        paths.add(path_from(sgid, dgid), IF);
    }
    assert_eq!((paths.len(), paths.next_question()), (0, None));
}

// A kernel to follow, with its queue of events that arrive late.

#[derive(Copy, Clone, Debug)]
enum Op {
    SetMac(usize, u8),
    Flap(usize),
    Collect(usize),
    Fail(usize),
    Reroute(usize, usize),
    /// Tells of a change of the route that is made later, as the kernel does it when an IPv4 route or an address goes.
    Announce(usize, usize),
    /// Makes what was announced.
    Finish,
    Create(usize),
    /// Reads so many of the events that wait.
    Turn(usize),
    Overflow,
}

fn op() -> impl Strategy<Value = Op> {
    let hop = 0..HOPS;
    let path = 0..PATHS;
    prop_oneof![
        (hop.clone(), 0..3u8).prop_map(|(h, m)| Op::SetMac(h, m)),
        hop.clone().prop_map(Op::Flap),
        hop.clone().prop_map(Op::Collect),
        hop.clone().prop_map(Op::Fail),
        (path.clone(), hop.clone()).prop_map(|(p, h)| Op::Reroute(p, h)),
        (path.clone(), hop).prop_map(|(p, h)| Op::Announce(p, h)),
        Just(Op::Finish),
        path.clone().prop_map(Op::Create),
        path.prop_map(Op::Create),
        (0..4usize).prop_map(Op::Turn),
        (0..4usize).prop_map(Op::Turn),
        Just(Op::Overflow),
    ]
}

/// Neighbours that there are from the start.
const HOPS: usize = 3;
/// ... and in all, if each change brings a new one.
const HOPS_MAX: usize = 64;
const PATHS: usize = 3;

struct Handle {
    path: usize,
    hop: usize,
    mac: u8,
    /// Something has happened to what it was made of.
    outdated: bool,
    stale: bool,
}

struct Kernel {
    macs: [u8; HOPS_MAX],
    present: [bool; HOPS_MAX],
    failed: [bool; HOPS_MAX],
    routes: [usize; PATHS],
    /// The change of a route that was told and is not made yet. There is one at a time: a lock is held.
    announced: Option<(usize, usize)>,
    queue: VecDeque<Item>,
    inbox: BTreeSet<usize>,
    handles: Vec<Handle>,
    paths: Paths,
}

impl Kernel {
    fn new() -> Kernel {
        Kernel {
            macs: [0; HOPS_MAX],
            present: [false; HOPS_MAX],
            failed: [false; HOPS_MAX],
            routes: [0, 1, 1],
            announced: None,
            queue: VecDeque::new(),
            inbox: BTreeSet::new(),
            handles: Vec::new(),
            paths: Paths::new(),
        }
    }

    fn path(n: usize) -> AhPath {
        path(&format!("10.9.0.{n}"))
    }

    fn hop(n: usize) -> Hop {
        hop(&format!("10.0.0.{n}"))
    }

    fn push(&mut self, event: Event) {
        self.queue.push_back(Item::Event(event));
    }

    fn push_at(&mut self, h: usize) {
        self.present[h] = true;
        self.failed[h] = false;
        self.push(Event::Neighbour(Self::hop(h), Neighbour::At([2, 0, 0, 0, 0, self.macs[h]])));
    }

    fn outdate(&mut self, concerns: impl Fn(&Handle) -> bool) {
        for handle in self.handles.iter_mut().filter(|h| concerns(h)) {
            handle.outdated = true;
        }
    }

    fn apply(&mut self, op: Op) {
        match op {
            Op::SetMac(h, mac) => {
                if self.macs[h] != mac {
                    self.outdate(|x| x.hop == h);
                }
                self.macs[h] = mac;
                self.push_at(h);
            }
            Op::Flap(h) if self.present[h] && !self.failed[h] => self.push_at(h),
            Op::Collect(h) if self.present[h] => {
                self.present[h] = false;
                self.push(Event::Neighbour(Self::hop(h), Neighbour::Gone));
            }
            Op::Fail(h) => {
                if !self.failed[h] {
                    self.outdate(|x| x.hop == h);
                }
                (self.present[h], self.failed[h]) = (true, true);
                self.push(Event::Neighbour(Self::hop(h), Neighbour::Failed));
            }
            Op::Reroute(p, h) => {
                self.apply(Op::Announce(p, h));
                self.finish();
            }
            Op::Announce(p, h) => {
                self.finish();
                self.announced = Some((p, h));
                self.push(Event::Route(Self::path(p).dgid.to_ip(), 32));
            }
            Op::Finish => self.finish(),
            Op::Create(p) => {
                self.inbox.insert(p);
                let h = self.routes[p];
                if !self.present[h] || self.failed[h] {
                    self.push_at(h);
                }
                self.handles.push(Handle { path: p, hop: h, mac: self.macs[h], outdated: false, stale: false });
            }
            Op::Turn(n) => self.turn(n),
            Op::Overflow => {
                self.queue.clear();
                self.push(Event::Lost);
            }
            Op::Flap(_) | Op::Collect(_) => {}
        }
    }

    fn finish(&mut self) {
        let Some((p, h)) = self.announced.take() else { return };
        if std::mem::replace(&mut self.routes[p], h) != h {
            self.outdate(|x| x.path == p);
        }
    }

    /// As the watcher does it.
    fn turn(&mut self, reads: usize) {
        let items: Vec<Item> = self.queue.drain(..reads.min(self.queue.len())).collect();
        for p in std::mem::take(&mut self.inbox) {
            self.paths.add(Self::path(p), IF);
        }
        for item in items {
            match item {
                Item::Event(event) => self.paths.handle(event),
                Item::Answer(id, answer) => self.paths.answer(id, answer),
                Item::DumpInterrupted | Item::DumpEnd => {}
            }
        }
        if self.paths.take_barrier_request() {
            self.finish();
        }
        if self.paths.take_dump_request() {
            for h in 0..HOPS_MAX {
                match (self.present[h], self.failed[h]) {
                    (true, false) => self.push_at(h),
                    (true, true) => self.push(Event::Neighbour(Self::hop(h), Neighbour::Failed)),
                    _ => {}
                }
            }
        }
        while let Some(q) = self.paths.next_question() {
            let p = (0..PATHS).find(|p| Self::path(*p).dgid.to_ip() == q.to).unwrap();
            let gateway = Some(Self::hop(self.routes[p]).ip);
            self.queue.push_back(Item::Answer(q.id, Answer::Via { ifindex: IF, gateway }));
        }
        let news: BTreeMap<AhPath, PathNews> = self.paths.take_news();
        for handle in &mut self.handles {
            handle.stale |= news.get(&Self::path(handle.path)).is_some_and(|n| *n > PathNews::Found);
        }
    }

    fn settle(&mut self) {
        while !self.queue.is_empty() || !self.inbox.is_empty() {
            self.turn(usize::MAX);
        }
    }
}

proptest! {
    /// However late events arrive: no handle stays in use that holds an old link address. Nor when some are lost, unless what
    /// has changed is back where it was by the time anybody looks.
    #[test]
    fn no_change_is_missed(ops in prop::collection::vec(op(), 0..60), lossy in any::<bool>()) {
        let mut kernel = Kernel::new();
        for (op, n) in ops.iter().zip(0u8..) {
            kernel.apply(match *op {
                Op::Overflow if !lossy => continue,
                Op::SetMac(h, _) if lossy => Op::SetMac(h, n + 1),
                Op::Reroute(p, _) if lossy => Op::Reroute(p, HOPS + usize::from(n)),
                Op::Announce(p, _) if lossy => Op::Announce(p, HOPS + usize::from(n)),
                op => op,
            });
        }
        kernel.settle();
        kernel.finish();
        // The kernel cannot tell what it does not know: it has looked again by the end.
        for p in 0..PATHS {
            kernel.push_at(kernel.routes[p]);
        }
        kernel.settle();
        for h in &kernel.handles {
            let now = (kernel.routes[h.path], kernel.macs[kernel.routes[h.path]]);
            prop_assert!(h.stale || now == (h.hop, h.mac), "path {} is at {now:?}, not at {:?}", h.path, (h.hop, h.mac));
        }
    }

    /// Where there is time to look between two changes, exactly those handles become stale that are concerned.
    #[test]
    fn nothing_is_stale_without_need(ops in prop::collection::vec(op(), 0..60)) {
        let mut kernel = Kernel::new();
        for op in &ops {
            kernel.apply(*op);
            kernel.settle();
            for h in &kernel.handles {
                prop_assert_eq!(h.stale, h.outdated, "after {:?}: path {} by {:?}", op, h.path, (h.hop, h.mac));
            }
        }
    }
}

// Messages.

const PORT: u32 = 4321;

/// A message as the kernel would send it.
fn message(kind: u16, flags: u16, seq: u32, port: u32, body: &impl Emitable) -> Vec<u8> {
    let mut bytes = vec![0; 16 + body.buffer_len()];
    let len = bytes.len() as u32;
    bytes[0..4].copy_from_slice(&len.to_ne_bytes());
    bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
    bytes[6..8].copy_from_slice(&flags.to_ne_bytes());
    bytes[8..12].copy_from_slice(&seq.to_ne_bytes());
    bytes[12..16].copy_from_slice(&port.to_ne_bytes());
    body.emit(&mut bytes[16..]);
    bytes
}

struct Raw<'a>(&'a [u8]);

impl Emitable for Raw<'_> {
    fn buffer_len(&self) -> usize {
        self.0.len()
    }
    fn emit(&self, buffer: &mut [u8]) {
        buffer.copy_from_slice(self.0);
    }
}

fn parse(bytes: &[u8]) -> Vec<Item> {
    let mut items = Vec::new();
    message::parse(bytes, PORT, &mut items);
    items
}

fn neighbour(ip: &str, state: NeighbourState, mac: Option<&[u8]>) -> NeighbourMessage {
    let ip: IpAddr = ip.parse().unwrap();
    let mut m = NeighbourMessage::default();
    m.header.family = if ip.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    m.header.ifindex = IF;
    m.header.state = state;
    m.attributes.push(NeighbourAttribute::Destination(ip.into()));
    m.attributes.extend(mac.map(|m| NeighbourAttribute::LinkLayerAddress(m.to_vec())));
    m
}

fn route_message(family: AddressFamily, kind: RouteType, len: u8, attributes: Vec<RouteAttribute>) -> RouteMessage {
    let mut m = RouteMessage::default();
    m.header.address_family = family;
    m.header.kind = kind;
    m.header.destination_prefix_length = len;
    m.attributes = attributes;
    m
}

#[test]
fn neighbours_are_read() {
    use NeighbourState::{Delay, Failed, Incomplete, Noarp, Permanent, Probe, Reachable, Stale};
    let n = |ip: &str, what| Item::Event(Event::Neighbour(hop(ip), what));
    for ip in ["10.0.0.2", "fe80::2"] {
        for sure in [Reachable, Stale, Delay, Probe, Permanent, Noarp] {
            let m = message(libc::RTM_NEWNEIGH, 0, 0, 0, &neighbour(ip, sure, Some(&MAC)));
            assert_eq!(parse(&m), [n(ip, Neighbour::At(MAC))], "{sure:?}");
            let m = message(libc::RTM_DELNEIGH, 0, 0, 0, &neighbour(ip, sure, Some(&MAC)));
            assert_eq!(parse(&m), [n(ip, Neighbour::Gone)], "{sure:?}");
        }
        let m = message(libc::RTM_NEWNEIGH, 0, 0, 0, &neighbour(ip, Incomplete, None));
        assert_eq!(parse(&m), [n(ip, Neighbour::Asked)]);
        let m = message(libc::RTM_NEWNEIGH, 0, 0, 0, &neighbour(ip, Failed, None));
        assert_eq!(parse(&m), [n(ip, Neighbour::Failed)]);
        let m = message(libc::RTM_DELNEIGH, 0, 0, 0, &neighbour(ip, Failed, None));
        assert_eq!(parse(&m), [n(ip, Neighbour::Failed), n(ip, Neighbour::Gone)]);
    }
    // A link address that is not Ethernet's; one that this host answers for; an entry of a bridge.
    let m = message(libc::RTM_NEWNEIGH, 0, 0, 0, &neighbour("10.0.0.2", Reachable, Some(&[1; 20])));
    assert_eq!(parse(&m), [n("10.0.0.2", Neighbour::Asked)]);
    let mut proxy = neighbour("10.0.0.2", Reachable, Some(&MAC));
    proxy.header.flags = NeighbourFlags::Proxy;
    assert_eq!(parse(&message(libc::RTM_NEWNEIGH, 0, 0, 0, &proxy)), []);
    let mut bridge = neighbour("10.0.0.2", Reachable, Some(&MAC));
    bridge.header.family = AddressFamily::Bridge;
    bridge.attributes.remove(0);
    assert_eq!(parse(&message(libc::RTM_NEWNEIGH, 0, 0, 0, &bridge)), []);
}

#[test]
fn several_messages_in_one_datagram_are_all_read() {
    let mut bytes = message(libc::RTM_NEWNEIGH, 0, 0, 0, &neighbour("10.0.0.2", NeighbourState::Stale, Some(&MAC)));
    bytes.extend(message(99, 0, 0, 0, &Raw(&[1, 2, 3])));
    bytes.push(0);
    bytes.extend(message(libc::RTM_NEWNEIGH, 0, 0, 0, &neighbour("10.0.0.3", NeighbourState::Failed, None)));
    assert_eq!(parse(&bytes).len(), 2);
}

#[test]
fn changes_of_routes_are_read() {
    let v4 = |text: &str| RouteAttribute::Destination(ip(text).into());
    let cases = [
        (route_message(AddressFamily::Inet, RouteType::Unicast, 16, vec![v4("10.9.0.0")]), Some(route("10.9.0.0/16"))),
        (route_message(AddressFamily::Inet6, RouteType::Unicast, 64, vec![v4("fd77::")]), Some(route("fd77::/64"))),
        (route_message(AddressFamily::Inet, RouteType::Unicast, 0, vec![]), Some(route("0.0.0.0/0"))),
        (route_message(AddressFamily::Inet6, RouteType::Unicast, 0, vec![]), Some(route("::/0"))),
        (route_message(AddressFamily::Bridge, RouteType::Unicast, 0, vec![]), None),
    ];
    for (body, event) in cases {
        for kind in [libc::RTM_NEWROUTE, libc::RTM_DELROUTE] {
            // Who caused it is named by sequence number and port; somebody else's are no answers.
            for (seq, port) in [(0, 0), (7, 99), (0, PORT)] {
                let read = parse(&message(kind, 0, seq, port, &body));
                assert_eq!(read, event.map(Item::Event).into_iter().collect::<Vec<_>>(), "{body:?}");
            }
        }
    }
    let mut exception = route_message(AddressFamily::Inet, RouteType::Unicast, 32, vec![v4("10.9.0.1")]);
    exception.header.flags = RouteFlags::Cloned;
    assert_eq!(parse(&message(libc::RTM_NEWROUTE, 0, 0, 0, &exception)), []);
    // What does not parse may be anything.
    assert_eq!(parse(&message(libc::RTM_NEWROUTE, 0, 0, 0, &Raw(&[2]))), [Item::Event(Event::Routing)]);
    for kind in [libc::RTM_NEWRULE, libc::RTM_DELRULE, 104, 105] {
        assert_eq!(parse(&message(kind, 0, 0, 0, &Raw(&[]))), [Item::Event(Event::Routing)]);
    }
}

#[test]
fn interfaces_are_read() {
    let mut body = [0u8; 16];
    body[4..8].copy_from_slice(&IF.to_ne_bytes());
    for kind in [libc::RTM_NEWLINK, libc::RTM_DELLINK, libc::RTM_NEWADDR, libc::RTM_DELADDR] {
        assert_eq!(parse(&message(kind, 0, 0, 0, &Raw(&body))), [Item::Event(Event::Interface(IF))]);
        assert_eq!(parse(&message(kind, 0, ID_RESERVED, PORT, &Raw(&body))), [], "the answer to a barrier");
        assert_eq!(parse(&message(kind, 0, 0, 0, &Raw(&body[..3]))), []);
    }
}

#[test]
fn answers_are_read() {
    let of = |kind, attributes| {
        let body = route_message(AddressFamily::Inet, kind, 32, attributes);
        parse(&message(libc::RTM_NEWROUTE, 0, 7, PORT, &body))
    };
    let dst = || RouteAttribute::Destination(ip("10.9.0.1").into());
    let oif = RouteAttribute::Oif(IF);
    let gateway = RouteAttribute::Gateway(ip("10.0.0.254").into());
    let via = RouteAttribute::Via(RouteVia::Inet6("fe80::1".parse().unwrap()));
    assert_eq!(of(RouteType::Unicast, vec![dst(), oif.clone()]), [Item::Answer(7, DIRECT)]);
    assert_eq!(of(RouteType::Unicast, vec![dst(), oif.clone(), gateway]), [Item::Answer(7, by("10.0.0.254"))]);
    assert_eq!(of(RouteType::Unicast, vec![dst(), oif, via]), [Item::Answer(7, by("fe80::1"))]);
    assert_eq!(of(RouteType::Unicast, vec![dst()]), [Item::Answer(7, Answer::Unknown)]);
    for kind in [RouteType::Local, RouteType::Multicast] {
        assert_eq!(of(kind, vec![dst()]), [Item::Answer(7, Answer::Here)]);
    }
    for kind in [RouteType::Unreachable, RouteType::BlackHole, RouteType::Prohibit] {
        assert_eq!(of(kind, vec![dst()]), [Item::Answer(7, Answer::NoRoute)]);
    }
    let error =
        |seq, errno: i32| parse(&message(2, 0, seq, PORT, &Raw(&[&(-errno).to_ne_bytes()[..], &[0; 16]].concat())));
    for errno in [libc::ENETUNREACH, libc::EHOSTUNREACH, libc::EACCES, libc::EINVAL] {
        assert_eq!(error(7, errno), [Item::Answer(7, Answer::NoRoute)]);
    }
    assert_eq!(error(7, libc::ENOBUFS), [Item::Answer(7, Answer::Unknown)]);
    assert_eq!(error(7, i32::MIN + 1), [Item::Answer(7, Answer::Unknown)]);
    assert_eq!(error(7, 0), [], "an acknowledgement");
}

#[test]
fn the_end_of_a_dump_is_read() {
    let done = |flags, port| parse(&message(3, flags | NLM_F_MULTIPART, 1, port, &Raw(&[0; 4])));
    assert_eq!(done(0, PORT), [Item::DumpEnd]);
    assert_eq!(done(NLM_F_DUMP_INTR, PORT), [Item::DumpInterrupted, Item::DumpEnd]);
    assert_eq!(done(NLM_F_DUMP_INTR, 99), []);
    let refused = message(2, 0, 1, PORT, &Raw(&[&(-libc::EBUSY).to_ne_bytes()[..], &[0; 16]].concat()));
    assert_eq!(parse(&refused), [Item::DumpEnd]);
    assert_eq!(parse(&message(4, 0, 0, 0, &Raw(&[]))), [Item::Event(Event::Lost)]);
}

/// Whatever is read, it can be handled.
fn swallow(bytes: &[u8]) -> usize {
    let items = parse(bytes);
    let mut paths = Paths::new();
    for peer in ["10.0.0.2", "10.9.0.1", "fe80::2"] {
        paths.add(path(peer), IF);
    }
    paths.next_question();
    for item in &items {
        match item {
            Item::Event(event) => paths.handle(*event),
            Item::Answer(id, answer) => paths.answer(*id, *answer),
            Item::DumpInterrupted | Item::DumpEnd => {}
        }
    }
    items.len()
}

/// Valid messages of all kinds, for mutation.
fn samples() -> Vec<Vec<u8>> {
    let n = neighbour("10.0.0.2", NeighbourState::Reachable, Some(&MAC));
    let n6 = neighbour("fe80::2", NeighbourState::Failed, None);
    let attributes = vec![
        RouteAttribute::Destination(ip("10.9.0.0").into()),
        RouteAttribute::Oif(IF),
        RouteAttribute::Gateway(ip("10.0.0.254").into()),
        RouteAttribute::Via(RouteVia::Inet6("fe80::1".parse().unwrap())),
    ];
    let r = route_message(AddressFamily::Inet, RouteType::Unicast, 16, attributes);
    vec![
        message(libc::RTM_NEWNEIGH, 0, 0, 0, &n),
        message(libc::RTM_DELNEIGH, 0, 0, 0, &n6),
        message(libc::RTM_NEWROUTE, 0, 0, 0, &r),
        message(libc::RTM_NEWROUTE, 0, 2, PORT, &r),
        message(libc::RTM_DELADDR, 0, 0, 0, &Raw(&[2; 24])),
        message(libc::RTM_NEWLINK, 0, 0, 0, &Raw(&[2; 40])),
        message(2, 0, 2, PORT, &Raw(&[255; 20])),
        message(3, 0, 1, PORT, &Raw(&[0; 4])),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn random_bytes_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(swallow(&bytes) <= bytes.len());
    }

    /// A good header, so that what is behind it is looked at.
    #[test]
    fn random_bodies_do_no_harm(
        kind in prop_oneof![Just(2u16), Just(3), 16..40u16, Just(104)],
        seq in 0..4u32,
        ours in any::<bool>(),
        body in prop::collection::vec(any::<u8>(), 0..120),
    ) {
        swallow(&message(kind, 0, seq, if ours { PORT } else { 0 }, &Raw(&body)));
    }

    #[test]
    fn damaged_messages_do_no_harm(
        which in 0..8usize,
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut bytes = samples()[which].clone();
        for (at, value) in damage {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        swallow(&bytes);
        bytes.truncate(cut.index(bytes.len() + 1));
        swallow(&bytes);
    }
}

/// The kernel understands what is asked, and what it answers is understood.
#[test]
fn the_kernel_answers() {
    let mut socket = match Socket::open() {
        Ok(socket) => socket,
        Err(e) => return println!("the_kernel_answers: skipped: no netlink: {e}"),
    };
    let mut items = Vec::new();
    let mut until = |socket: &mut Socket, wanted: &dyn Fn(&Item) -> bool| {
        while !items.iter().any(wanted) {
            super::ffi::wait_readable(&[socket.fd()], None).unwrap();
            assert_ne!(socket.read(&mut items).unwrap(), Read::Lost);
        }
    };
    socket.send(&message::dump()).unwrap();
    until(&mut socket, &|i| *i == Item::DumpEnd);
    for (id, to) in [(7, "127.0.0.1"), (8, "::1")] {
        if std::net::UdpSocket::bind((ip(to), 0)).is_err() {
            println!("the_kernel_answers: no {to} here");
            continue;
        }
        socket.send(&message::question(&Question { id, from: ip(to), to: ip(to), ifindex: 0 })).unwrap();
        until(&mut socket, &|i| *i == Item::Answer(id, Answer::Here));
    }
    // A barrier is done when it is sent, and comes to nothing.
    socket.send(&message::barrier()).unwrap();
    // No such interface.
    let q = Question { id: 9, from: ip("127.0.0.1"), to: ip("10.9.0.1"), ifindex: i32::MAX as u32 };
    socket.send(&message::question(&q)).unwrap();
    until(&mut socket, &|i| *i == Item::Answer(9, Answer::NoRoute));
    assert!(!items.contains(&Item::Event(Event::Interface(1))), "{items:?}");
}

/// More answers than the socket holds: that is told, and afterwards it works as before.
#[test]
fn the_kernel_tells_what_it_could_not() {
    const ENOUGH: u32 = 20_000;
    let mut socket = match Socket::open() {
        Ok(socket) => socket,
        Err(e) => return println!("the_kernel_tells_what_it_could_not: skipped: no netlink: {e}"),
    };
    let ask = |socket: &Socket, id| {
        let q = Question { id, from: ip("127.0.0.1"), to: ip("127.0.0.1"), ifindex: 0 };
        socket.send(&message::question(&q)).unwrap();
    };
    for _ in 0..ENOUGH {
        ask(&socket, 7);
    }
    let mut items = Vec::new();
    assert_eq!(socket.read(&mut items).unwrap(), Read::Lost);
    while socket.read(&mut items).unwrap() != Read::Nothing {}
    let answers = items.iter().filter(|i| matches!(i, Item::Answer(7, _))).count();
    assert!((1..ENOUGH as usize).contains(&answers), "{answers}");
    ask(&socket, 8);
    while !items.iter().any(|i| matches!(i, Item::Answer(8, _))) {
        super::ffi::wait_readable(&[socket.fd()], None).unwrap();
        assert_ne!(socket.read(&mut items).unwrap(), Read::Lost);
    }
}
