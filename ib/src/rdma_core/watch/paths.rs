//! [`Paths`]: what events of the kernel mean for the paths of the cache. No socket, no thread, no clock: events, paths and
//! answers go in, questions and news come out.
//!
//! Nothing may be missed between the moment a handle is made and the moment its next hop is known here. So every event has
//! a number; a path remembers the last event before it was added, which is before its first handle was made; and a neighbour
//! remembers the event that changed it last. When the next hop is known at last, one comparison tells whether it has changed
//! since. A change of routes has no such memory: it makes the paths it covers stale whose next hop is not known yet, and
//! those whose route has changed twice before it could be asked for, because a handle may have been made in between.
//!
//! The kernel tells of some changes before it makes them: of an IPv4 route or an address that goes, and of an interface that
//! goes down. Whoever asks at once is told the old route, and nothing follows. So a barrier is wanted before questions are
//! asked that come from such an event: something that ends when all changes are made that were told before.
//!
//! What a neighbour's link address was stays known while a path leads through it, also when the kernel has collected the
//! entry: the handles still have that address.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use crate::{
    ah::{AhPath, PathNews},
    types::Gid,
};

/// Questions that wait for an answer at a time: their answers have to fit into the socket.
const QUESTIONS_MAX: usize = 32;
/// Neighbours that are remembered. The kernel keeps 1,024 unless it is told otherwise.
const NEIGHBOURS_MAX: usize = 1 << 17;
/// So many paths may be there before it is worth while to look for those that nobody uses any more.
const CROWD_MIN: usize = 1024;

/// A link address. Those of other lengths are not Ethernet's.
pub(super) type Mac = [u8; 6];

/// A neighbour: an address next to an interface.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Hop {
    pub(super) ifindex: u32,
    pub(super) ip: IpAddr,
}

/// What the kernel says of a neighbour.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) enum Neighbour {
    /// It has this link address, however sure of it the kernel is.
    At(Mac),
    /// It does not answer, or somebody took its entry out.
    Failed,
    /// It is being asked.
    Asked,
    /// Its entry was collected.
    Gone,
}

/// What has happened.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) enum Event {
    Neighbour(Hop, Neighbour),
    /// A route to this subnet came, went or changed.
    Route(IpAddr, u8),
    /// The state or an address of this interface changed, and with it perhaps routes.
    Interface(u32),
    /// Anything about routes may have changed.
    Routing,
    /// There were events that nobody will tell of any more.
    Lost,
}

/// What the kernel has to be asked: the route from one address to another by an interface (0 for any).
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) struct Question {
    pub(super) id: u32,
    pub(super) from: IpAddr,
    pub(super) to: IpAddr,
    pub(super) ifindex: u32,
}

/// What the kernel answers.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) enum Answer {
    /// By this interface, through a gateway or directly.
    Via {
        ifindex: u32,
        gateway: Option<IpAddr>,
    },
    /// It is this host, or a group.
    Here,
    NoRoute,
    /// It could not say.
    Unknown,
}

/// Where a path leads.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
enum Way {
    /// Not known yet; handles may have been made since this event.
    Unknown {
        since: u64,
    },
    Via(Hop),
    Here,
    NoRoute,
}

#[derive(Debug)]
struct Track {
    ifindex: u32,
    way: Way,
    /// Changes of routes that the last answer does not know of.
    changes: u32,
}

#[derive(Default, Debug)]
struct Known {
    mac: Option<Mac>,
    failed: bool,
    /// The kernel has collected the entry.
    gone: bool,
    /// The events that changed the link address last and that made it fail last.
    changed_at: u64,
    failed_at: u64,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Paths {
    /// In the order of destinations, so that those of a subnet are a range.
    tracks: BTreeMap<AhPath, Track>,
    by_hop: BTreeMap<Hop, BTreeSet<AhPath>>,
    neighbours: BTreeMap<Hop, Known>,
    /// Neighbours that may be forgotten once it is clear that no path leads through them.
    to_forget: BTreeSet<Hop>,
    /// Paths whose route is to be asked for, and those that were asked for by the number of the question.
    to_ask: BTreeSet<AhPath>,
    asked: BTreeMap<u32, AhPath>,
    news: BTreeMap<AhPath, PathNews>,
    /// The number of the last event.
    serial: u64,
    last_id: u32,
    dump_wanted: bool,
    barrier_wanted: bool,
    crowd: usize,
}

/// Questions have numbers above this one; those from 1 on are free for others.
pub(super) const ID_RESERVED: u32 = 2;

impl Paths {
    /// No paths yet. A dump of the neighbours is wanted first.
    pub(super) fn new() -> Self {
        Paths {
            tracks: BTreeMap::new(),
            by_hop: BTreeMap::new(),
            neighbours: BTreeMap::new(),
            to_forget: BTreeSet::new(),
            to_ask: BTreeSet::new(),
            asked: BTreeMap::new(),
            news: BTreeMap::new(),
            serial: 0,
            last_id: ID_RESERVED,
            dump_wanted: true,
            barrier_wanted: false,
            crowd: CROWD_MIN,
        }
    }

    /// Watches a path from now on; false if it is watched already, or leads to no neighbour. `ifindex` is the interface of
    /// its local GID, 0 if that is not known. To be called after the events were read and before they are handled that may
    /// have come since the last such call.
    pub(super) fn add(&mut self, path: AhPath, ifindex: u32) -> bool {
        let (from, to) = (path.sgid.to_ip(), path.dgid.to_ip());
        if from.is_ipv4() != to.is_ipv4() || to.is_multicast() {
            return false;
        }
        match self.tracks.get(&path) {
            Some(track) if track.ifindex == ifindex => return false,
            // The local GID is on another interface now; so are the handles that are made from now on.
            Some(_) => self.remove(&path),
            None => {}
        }
        self.tracks.insert(path, Track { ifindex, way: Way::Unknown { since: self.serial }, changes: 0 });
        self.to_ask.insert(path);
        true
    }

    /// As [`Paths::add`], for a path that came up between the events that were handled and the end of the barrier: its handle
    /// may have been made before a change of which no event will tell any more.
    pub(super) fn add_in_doubt(&mut self, path: AhPath, ifindex: u32) {
        if self.add(path, ifindex) {
            self.tell(path, PathNews::Moved);
        }
    }

    /// True if there are so many paths that [`Paths::retain`] is worth while.
    pub(super) fn is_crowded(&self) -> bool {
        self.tracks.len() >= self.crowd
    }

    /// Forgets all paths but these, which are sorted. To be called before the inbox of paths is looked at.
    pub(super) fn retain(&mut self, known: &[AhPath]) {
        let unused: Vec<AhPath> = self.tracks.keys().filter(|p| known.binary_search(p).is_err()).copied().collect();
        for path in &unused {
            self.remove(path);
        }
        self.forget();
        self.crowd = CROWD_MIN.max(self.tracks.len().saturating_mul(2));
    }

    fn remove(&mut self, path: &AhPath) {
        let Some(track) = self.tracks.remove(path) else { return };
        self.to_ask.remove(path);
        self.asked.retain(|_, p| p != path);
        if let Way::Via(hop) = track.way {
            self.detach(hop, path);
        }
    }

    fn detach(&mut self, hop: Hop, path: &AhPath) {
        if let Some(paths) = self.by_hop.get_mut(&hop) {
            paths.remove(path);
            if paths.is_empty() {
                self.by_hop.remove(&hop);
                self.to_forget.insert(hop);
            }
        }
    }

    fn tell(&mut self, path: AhPath, news: PathNews) {
        let told = self.news.entry(path).or_insert(news);
        *told = news.max(*told);
    }

    fn tell_all(&mut self, hop: Hop, news: PathNews) {
        let paths: Vec<AhPath> = self.by_hop.get(&hop).into_iter().flatten().copied().collect();
        for path in paths {
            self.tell(path, news);
        }
    }

    /// What has come of all events and answers since the last call.
    pub(super) fn take_news(&mut self) -> BTreeMap<AhPath, PathNews> {
        std::mem::take(&mut self.news)
    }

    /// True once each time that a dump of all neighbours is wanted. What it says is handled like events.
    pub(super) fn take_dump_request(&mut self) -> bool {
        std::mem::take(&mut self.dump_wanted)
    }

    /// True once after events whose changes may not be made yet. The barrier comes before the questions and before the news
    /// are acted on; the paths that came up until it ended go to [`Paths::add_in_doubt`].
    pub(super) fn take_barrier_request(&mut self) -> bool {
        std::mem::take(&mut self.barrier_wanted)
    }

    pub(super) fn handle(&mut self, event: Event) {
        self.serial += 1;
        self.barrier_wanted |= !matches!(event, Event::Neighbour(..));
        match event {
            Event::Neighbour(hop, state) => self.neighbour(hop, state),
            Event::Route(net, len) => self.route(net, len),
            Event::Interface(ifindex) => {
                self.to_ask.extend(self.tracks.iter().filter(|(_, t)| t.ifindex == ifindex).map(|(p, _)| *p));
            }
            Event::Routing => self.routes_between(Gid::ZERO, Gid([0xff; 16]), |_| true),
            Event::Lost => self.lost(),
        }
    }

    fn neighbour(&mut self, hop: Hop, state: Neighbour) {
        let serial = self.serial;
        let fits = self.by_hop.contains_key(&hop) || self.neighbours.len() < NEIGHBOURS_MAX;
        match state {
            Neighbour::At(mac) if fits => {
                let known = self.neighbours.entry(hop).or_default();
                known.gone = false;
                let before = known.mac.replace(mac);
                let failed = std::mem::take(&mut known.failed);
                if before.is_some_and(|b| b != mac) {
                    known.changed_at = serial;
                    self.tell_all(hop, PathNews::Moved);
                } else if failed || before.is_none() {
                    self.tell_all(hop, PathNews::Found);
                }
            }
            Neighbour::Failed if fits => {
                let known = self.neighbours.entry(hop).or_default();
                known.gone = false;
                if !std::mem::replace(&mut known.failed, true) {
                    known.failed_at = serial;
                    self.tell_all(hop, PathNews::Lost);
                }
            }
            Neighbour::At(_) | Neighbour::Failed | Neighbour::Asked => {}
            Neighbour::Gone => {
                if let Some(known) = self.neighbours.get_mut(&hop) {
                    known.gone = true;
                    self.to_forget.insert(hop);
                    self.forget();
                }
            }
        }
    }

    /// True if what is known of this neighbour may matter to a path: any may, while next hops are being asked for.
    fn is_needed(&self, hop: Hop) -> bool {
        self.by_hop.contains_key(&hop) || !self.to_ask.is_empty() || !self.asked.is_empty()
    }

    fn forget(&mut self) {
        if !self.to_ask.is_empty() || !self.asked.is_empty() {
            return;
        }
        for hop in std::mem::take(&mut self.to_forget) {
            if !self.is_needed(hop) && self.neighbours.get(&hop).is_some_and(|n| n.gone) {
                self.neighbours.remove(&hop);
            }
        }
    }

    fn route(&mut self, net: IpAddr, len: u8) {
        let (bits, is_v4) = match net {
            IpAddr::V4(_) => (96 + len.min(32), true),
            IpAddr::V6(_) => (len.min(128), false),
        };
        let mask = u128::MAX.checked_shl(128 - u32::from(bits)).unwrap_or(0);
        let low = u128::from_be_bytes(Gid::from_ip(net).0) & mask;
        let gid = |n: u128| Gid(n.to_be_bytes());
        self.routes_between(gid(low), gid(low | !mask), |p| p.dgid.to_ip().is_ipv4() == is_v4);
    }

    /// Routes to these destinations may have changed.
    fn routes_between(&mut self, low: Gid, high: Gid, concerns: impl Fn(&AhPath) -> bool) {
        let serial = self.serial;
        let first = AhPath { dgid: low, sgid: Gid::ZERO, port: 0 };
        let last = AhPath { dgid: high, sgid: Gid([0xff; 16]), port: u8::MAX };
        let mut in_doubt = Vec::new();
        for (path, track) in self.tracks.range_mut(first..=last).filter(|(p, _)| concerns(p)) {
            self.to_ask.insert(*path);
            track.changes = track.changes.saturating_add(1);
            if let Way::Unknown { since } = &mut track.way {
                *since = serial;
                in_doubt.push(*path);
            }
        }
        for path in in_doubt {
            self.tell(path, PathNews::Moved);
        }
    }

    fn lost(&mut self) {
        let serial = self.serial;
        self.dump_wanted = true;
        // Answers may be lost too; late ones are not listened to.
        self.asked.clear();
        let mut in_doubt = Vec::new();
        for (path, track) in &mut self.tracks {
            self.to_ask.insert(*path);
            track.changes = track.changes.saturating_add(1);
            let known = match &mut track.way {
                Way::Unknown { since } => {
                    *since = serial;
                    false
                }
                // Without an address to compare with, the dump will not tell.
                Way::Via(hop) => self.neighbours.get(hop).is_some_and(|n| n.mac.is_some()),
                Way::Here | Way::NoRoute => true,
            };
            if !known {
                in_doubt.push(*path);
            }
        }
        for path in in_doubt {
            self.tell(path, PathNews::Moved);
        }
        // The dump brings back those that are left.
        let by_hop = &self.by_hop;
        self.neighbours.retain(|hop, _| by_hop.contains_key(hop));
    }

    /// The next question to ask; `None` if there is none, or as many are unanswered as may be.
    pub(super) fn next_question(&mut self) -> Option<Question> {
        if self.asked.len() >= QUESTIONS_MAX {
            return None;
        }
        let path = self.to_ask.pop_first()?;
        let track = self.tracks.get(&path)?;
        self.last_id = self.last_id.checked_add(1).unwrap_or(ID_RESERVED + 1);
        self.asked.insert(self.last_id, path);
        Some(Question { id: self.last_id, from: path.sgid.to_ip(), to: path.dgid.to_ip(), ifindex: track.ifindex })
    }

    /// Takes in the answer to the question of this number. Others are not listened to.
    pub(super) fn answer(&mut self, id: u32, answer: Answer) {
        if let Some(path) = self.asked.remove(&id) {
            self.answer_for(path, answer);
            self.forget();
        }
    }

    fn answer_for(&mut self, path: AhPath, answer: Answer) {
        let Some(track) = self.tracks.get_mut(&path) else { return };
        let new = match answer {
            Answer::Via { ifindex, gateway } => Way::Via(Hop { ifindex, ip: gateway.unwrap_or(path.dgid.to_ip()) }),
            Answer::Here => Way::Here,
            Answer::NoRoute => Way::NoRoute,
            // As good a guess as any, where nothing better is known.
            Answer::Unknown if matches!(track.way, Way::Unknown { .. }) && track.ifindex != 0 => {
                Way::Via(Hop { ifindex: track.ifindex, ip: path.dgid.to_ip() })
            }
            Answer::Unknown => return,
        };
        let old = std::mem::replace(&mut track.way, new);
        let changes = std::mem::take(&mut track.changes);
        if old == new {
            if changes > 1 {
                self.tell(path, PathNews::Moved);
            }
            return;
        }
        if let Way::Via(hop) = new {
            self.by_hop.entry(hop).or_default().insert(path);
        }
        if let Way::Via(hop) = old {
            self.detach(hop, &path);
        }
        match (old, new) {
            (Way::Unknown { since }, Way::Via(hop)) => match self.neighbours.get(&hop) {
                Some(known) if known.changed_at > since => self.tell(path, PathNews::Moved),
                Some(known) if known.failed_at > since => self.tell(path, PathNews::Lost),
                _ => {}
            },
            (Way::Unknown { .. }, _) => {}
            (Way::NoRoute, _) => self.tell(path, PathNews::Found),
            (_, Way::NoRoute) => self.tell(path, PathNews::Lost),
            _ => self.tell(path, PathNews::Moved),
        }
    }

    #[cfg(test)]
    pub(super) fn knows(&self, hop: Hop) -> bool {
        self.neighbours.contains_key(&hop)
    }

    /// How many paths are watched.
    pub(super) fn len(&self) -> usize {
        self.tracks.len()
    }
}
