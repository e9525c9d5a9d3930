//! Follows what changes about the way to peers on RoCE: link addresses of neighbours, and routes. An address handle freezes
//! the link address of its next hop; when that changes, the handles concerned become stale, and no others.
//!
//! ```text
//!  kernel ── netlink ──► socket ──► message ──► paths ──► AhCache::handle_paths
//!    ▲                                            │ ▲
//!    └────────── the route of a path? ────────────┘ └── paths of new handles (AhCache::on_creation)
//! ```
//!
//! [`paths`] decides and is pure; start reading there. This module has the thread, one per memory domain, which sleeps until
//! the kernel or the cache has something to say. The thread holds the memory domain only while it has something to do, and
//! ends when the domain does. Nobody ever waits for it.
//!
//! What the kernel reports all the time means nothing here: that it is more or less sure of a neighbour (REACHABLE, STALE,
//! DELAY, PROBE), and that it has collected the entry of one that is not in use. When it reports more than the socket holds,
//! everything is looked at afresh and compared with what was known. Where netlink cannot be had, a warning says so, and
//! everything else goes on: an endpoint whose resends stay unanswered still has its peer resolved anew.

#[cfg(any(test, uct_fuzz))]
pub(super) mod fuzz;
mod message;
mod paths;
mod socket;

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    sync::{Arc, Weak},
    thread,
    time::Duration,
};

use parking_lot::Mutex;
use uct::EventFd;

use self::{
    message::Item,
    paths::{Answer, Event, Paths},
    socket::{Read, Socket},
};
use super::{RdmaDevice, ffi, gids};
use crate::{
    ah::AhPath,
    device::{Device, GidEntry, RoceVersion},
    md::Md,
};

/// Datagrams that are read before they are acted on.
const READS_MAX: usize = 256;
/// Paths that wait to be looked at; beyond, the cache is asked for all.
const INBOX_MAX: usize = 1 << 16;
/// How long events may come in after some were lost, before everything is looked at afresh: under a storm that would be
/// done again and again.
const STORM_PAUSE: Duration = Duration::from_millis(50);
/// How often a dump that was interrupted is done again.
const DUMPS_MAX: u32 = 3;

/// Follows neighbours and routes for the address-handle cache of `md`, until that is dropped. Does nothing if
/// `UCX_IB_NEIGHBOUR_WATCH` is off, and on devices without Ethernet ports.
pub fn watch(md: &Arc<Md<RdmaDevice>>) {
    if !md.config().neighbour_watch || !md.device().has_ethernet() {
        return;
    }
    if let Err(e) = start(md) {
        tracing::warn!(
            "{}: cannot follow neighbours and routes ({e}); a peer whose link address changes is noticed only when it does \
             not answer. UCX_IB_NEIGHBOUR_WATCH=n does without",
            md.device().name()
        );
    }
}

fn start(md: &Arc<Md<RdmaDevice>>) -> io::Result<()> {
    let socket = Socket::open()?;
    let wake = Arc::new(Wake { event: EventFd::new()?, inbox: Mutex::default() });
    let watcher = Watcher {
        name: md.device().name().to_string(),
        md: Arc::downgrade(md),
        socket,
        wake: wake.clone(),
        paths: Paths::new(),
        items: Vec::new(),
        dump: Dump::default(),
    };
    let inbox = wake.clone();
    if !md.ah_cache().on_creation(Arc::new(move |path| inbox.push(path))) {
        // Watched already.
        return Ok(());
    }
    let stop = Stop(wake);
    thread::Builder::new().name("ah-watch".to_string()).spawn(move || watcher.run())?;
    md.keep(Box::new(stop));
    Ok(())
}

/// What wakes the thread besides the kernel.
struct Wake {
    event: EventFd,
    inbox: Mutex<Inbox>,
}

#[derive(Default)]
struct Inbox {
    /// Paths for which handles are being made.
    paths: BTreeSet<AhPath>,
    /// There were too many.
    overflow: bool,
    stop: bool,
}

impl Wake {
    fn push(&self, path: &AhPath) {
        let mut inbox = self.inbox.lock();
        if inbox.stop {
            return;
        }
        let first = inbox.paths.is_empty();
        if inbox.paths.len() < INBOX_MAX {
            inbox.paths.insert(*path);
        } else {
            inbox.overflow = true;
        }
        drop(inbox);
        if first {
            self.event.signal();
        }
    }

    fn stop(&self) {
        let mut inbox = self.inbox.lock();
        inbox.stop = true;
        inbox.paths.clear();
        drop(inbox);
        self.event.signal();
    }
}

/// Ends the thread when dropped, without waiting for that.
struct Stop(Arc<Wake>);

impl Drop for Stop {
    fn drop(&mut self) {
        self.0.stop();
    }
}

#[derive(Default)]
struct Dump {
    running: bool,
    interrupted: bool,
    /// Something was lost while it ran: another one has to follow.
    again: bool,
    repeats: u32,
}

struct Watcher {
    name: String,
    md: Weak<Md<RdmaDevice>>,
    socket: Socket,
    wake: Arc<Wake>,
    paths: Paths,
    /// What was read and not acted on yet.
    items: Vec<Item>,
    dump: Dump,
}

impl Watcher {
    fn run(mut self) {
        if let Err(e) = self.follow() {
            tracing::warn!("{}: no longer follows neighbours and routes: {e}", self.name);
        }
        self.wake.stop();
    }

    fn follow(&mut self) -> io::Result<()> {
        loop {
            let Some(md) = self.md.upgrade() else { return Ok(()) };
            self.turn(&md)?;
            // Not while asleep: the domain could not end.
            drop(md);
            ffi::wait_readable(&[self.socket.fd(), self.wake.event.fd()], None)?;
            self.wake.event.drain();
            if self.wake.inbox.lock().stop {
                return Ok(());
            }
        }
    }

    /// Acts on what there is. The order matters, see [`Paths::add`], [`Paths::retain`] and [`Paths::take_barrier_request`].
    fn turn(&mut self, md: &Md<RdmaDevice>) -> io::Result<()> {
        if self.paths.is_crowded() {
            self.paths.retain(&md.ah_cache().paths());
        }
        self.read()?;
        for (path, index) in self.take_inbox(md) {
            self.paths.add(path, index);
        }
        for item in std::mem::take(&mut self.items) {
            match item {
                Item::Event(event) => self.paths.handle(event),
                Item::Answer(id, answer) => self.paths.answer(id, answer),
                Item::DumpInterrupted => self.dump.interrupted = true,
                Item::DumpEnd => self.dump_end(),
            }
        }
        if self.paths.take_barrier_request() {
            self.await_changes(md);
        }
        self.ask();
        let news = self.paths.take_news();
        if !news.is_empty() {
            for (path, what) in &news {
                tracing::debug!("{}: {path}: {what:?}", self.name);
            }
            let done = md.ah_cache().handle_paths(&news);
            tracing::debug!("{}: of {} paths: {done:?}", self.name, self.paths.len());
        }
        Ok(())
    }

    fn read(&mut self) -> io::Result<()> {
        for _ in 0..READS_MAX {
            match self.socket.read(&mut self.items)? {
                Read::Some => {}
                Read::Nothing => break,
                Read::Lost => {
                    tracing::debug!("{}: news of neighbours or routes were lost; all are looked at afresh", self.name);
                    self.items.push(Item::Event(Event::Lost));
                    // Only the end of the domain or a new handle cuts this short.
                    ffi::wait_readable(&[self.wake.event.fd()], Some(STORM_PAUSE))?;
                }
            }
        }
        Ok(())
    }

    /// Sleeps until the kernel has made the changes of which it has told.
    fn await_changes(&mut self, md: &Md<RdmaDevice>) {
        if let Err(e) = self.socket.send(&message::barrier()) {
            tracing::debug!("{}: cannot wait for the end of changes: {e}", self.name);
        }
        for (path, index) in self.take_inbox(md) {
            self.paths.add_in_doubt(path, index);
        }
    }

    /// The paths for which handles are being made, with the interfaces of their local GIDs (0 for none).
    fn take_inbox(&self, md: &Md<RdmaDevice>) -> Vec<(AhPath, u32)> {
        let mut inbox = self.wake.inbox.lock();
        let mut new = std::mem::take(&mut inbox.paths);
        let overflow = std::mem::take(&mut inbox.overflow);
        drop(inbox);
        if overflow {
            new.extend(md.ah_cache().paths());
        }
        let mut with_index = Vec::new();
        let mut tables = BTreeMap::new();
        let mut indexes = BTreeMap::new();
        for path in new {
            let table = tables.entry(path.port).or_insert_with(|| {
                md.device().query_gids(path.port).unwrap_or_else(|e| {
                    tracing::debug!("{}:{}: {e}", self.name, path.port);
                    Vec::new()
                })
            });
            let local = gids::find(table, path.sgid);
            if needs_no_neighbour(local, &path) {
                continue;
            }
            let netdev = local.and_then(|g| g.netdev.clone());
            let index = netdev.map_or(0, |n| *indexes.entry(n).or_insert_with_key(|n| ffi::netdev_index(n)));
            with_index.push((path, index));
        }
        with_index
    }

    fn dump_end(&mut self) {
        let dump = std::mem::take(&mut self.dump);
        let repeat = dump.interrupted && dump.repeats < DUMPS_MAX;
        if dump.again || repeat {
            let repeats = if dump.again { 0 } else { dump.repeats + 1 };
            self.start_dump(repeats);
        }
    }

    fn start_dump(&mut self, repeats: u32) {
        match self.socket.send(&message::dump()) {
            Ok(()) => self.dump = Dump { running: true, repeats, ..Dump::default() },
            Err(e) => tracing::debug!("{}: cannot list the neighbours: {e}", self.name),
        }
    }

    fn ask(&mut self) {
        if self.paths.take_dump_request() {
            match self.dump.running {
                // The socket runs one at a time.
                true => self.dump.again = true,
                false => self.start_dump(0),
            }
        }
        while let Some(question) = self.paths.next_question() {
            if let Err(e) = self.socket.send(&message::question(&question)) {
                tracing::debug!("{}: cannot ask for a route: {e}", self.name);
                self.paths.answer(question.id, Answer::Unknown);
            }
        }
    }
}

/// True for the one kind of path that the IP stack has no part in: on RoCE v1 a link-local address has the link address in
/// it.
fn needs_no_neighbour(local: Option<&GidEntry>, path: &AhPath) -> bool {
    local.is_some_and(|g| g.version == RoceVersion::V1) && path.dgid.is_link_local()
}
