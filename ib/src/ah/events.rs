//! What events do to entries: the mapping from [`AsyncEvent`] to a [`Grade`] and the entries it concerns.
//! The module above has the table.

use std::collections::BTreeMap;

use super::{
    AhPath, Grade, Invalidated, PathNews,
    entry::Entry,
    shared::{Shared, State, Stray},
};
use crate::{
    device::{AhAttr, AsyncEvent, Device, GidEntry, VerbsResult},
    sync::Arc,
    types::Gid,
};

impl<D: Device> State<D> {
    /// Takes an entry out of the table and marks it. Drop it after unlocking.
    #[must_use]
    fn withdraw(&mut self, hash: u64, generation: u64, grade: Grade) -> Option<Arc<Entry<D>>> {
        let e = self.table.remove(hash, generation)?;
        self.stats.invalidated += u64::from(e.raise(grade));
        self.strays.insert(generation, Stray::of(&e));
        Some(e)
    }

    fn raise_stray(&mut self, generation: u64, grade: Grade) -> bool {
        let raised = self.strays.get(&generation).is_some_and(|s| s.status.raise(grade));
        self.stats.invalidated += u64::from(raised);
        raised
    }

    /// Marks the handles that `concerns` names and returns how many that changed. Entries taken out go to `removed`, to be
    /// dropped after unlocking.
    fn mark(&mut self, grade: Grade, concerns: impl Fn(&AhAttr) -> bool, removed: &mut Vec<Arc<Entry<D>>>) -> usize {
        let mut found: Vec<_> =
            self.table.iter().filter(|e| concerns(&e.attr)).map(|e| (e.generation, e.hash)).collect();
        found.sort_unstable();
        let strays: Vec<_> =
            self.strays.iter().filter(|(_, s)| concerns(&s.attr)).map(|(generation, _)| *generation).collect();
        let mut changed = found.len();
        for (generation, hash) in found {
            removed.extend(self.withdraw(hash, generation, grade));
        }
        for generation in strays {
            changed += usize::from(self.raise_stray(generation, grade));
        }
        changed
    }

    /// Has the creations done again that `concerns` names, and forgets such failures; returns how many failures those were.
    fn restart(&mut self, grade: Grade, concerns: impl Fn(&AhAttr) -> bool) -> usize {
        for flight in self.flights.iter_mut().filter(|f| concerns(&f.attr)) {
            flight.doom = flight.doom.max(Some(grade));
        }
        self.failures.forget(concerns)
    }

    /// Both for everything that `concerns` names.
    fn invalidate(
        &mut self,
        grade: Grade,
        concerns: impl Fn(&AhAttr) -> bool,
        removed: &mut Vec<Arc<Entry<D>>>,
    ) -> Invalidated {
        let forgotten = self.restart(grade, &concerns);
        let changed = self.mark(grade, concerns, removed);
        match grade {
            Grade::Stale => Invalidated { stale: changed, forgotten, ..Invalidated::default() },
            Grade::Poisoned => Invalidated { poisoned: changed, forgotten, ..Invalidated::default() },
        }
    }
}

impl<D: Device> Shared<D> {
    pub(super) fn handle_event(this: &Arc<Self>, event: &AsyncEvent) -> Invalidated {
        match *event {
            AsyncEvent::NeighbourChange(gid) => {
                this.invalidate_all(Grade::Stale, |attr| attr.grh.is_some_and(|g| g.dgid == gid))
            }
            AsyncEvent::PortError(port) | AsyncEvent::SmChange(port) | AsyncEvent::ClientReregister(port) => {
                this.invalidate_all(Grade::Stale, |attr| attr.port == port)
            }
            AsyncEvent::PortActive(port) => {
                // The table may have been filled again, with other indexes, while the port was down.
                let by_gid = Self::refresh_gids(this, port, None);
                let by_port = this.invalidate_all(Grade::Stale, |attr| attr.port == port);
                Invalidated {
                    stale: by_port.stale,
                    poisoned: by_gid.poisoned,
                    forgotten: by_gid.forgotten + by_port.forgotten,
                }
            }
            AsyncEvent::GidChange(port) => Self::refresh_gids(this, port, None),
            AsyncEvent::LidChange(port) => this.invalidate_all(Grade::Poisoned, |attr| attr.port == port),
            AsyncEvent::DeviceFatal => this.invalidate_all(Grade::Poisoned, |_| true),
            AsyncEvent::PkeyChange(_) | AsyncEvent::QpFatal(_) | AsyncEvent::Unknown(_) => Invalidated::default(),
        }
    }

    fn invalidate_all(&self, grade: Grade, concerns: impl Fn(&AhAttr) -> bool) -> Invalidated {
        let mut removed = Vec::new();
        let outcome = self.state.lock().invalidate(grade, concerns, &mut removed);
        drop(removed);
        outcome
    }

    pub(super) fn handle_gids(&self, port: u8, table: VerbsResult<Vec<GidEntry>>) -> Invalidated {
        if let Err(error) = &table {
            tracing::error!(
                "{}:{port}: cannot read the GID table after it changed ({error}): every address handle of the port is \
                 taken as changed",
                self.device_name()
            );
        }
        let new = table.ok();
        let mut removed = Vec::new();
        let mut st = self.state.lock();
        let old = st.gids.insert(port, new.clone()).flatten();
        let is_proven_same = |gid: Gid| match (&old, &new) {
            (Some(old), Some(new)) => {
                let of = |t: &[GidEntry]| t.iter().filter(|e| e.gid == gid).cloned().collect::<Vec<_>>();
                let (old, new) = (of(old), of(new));
                !new.is_empty() && old == new
            }
            _ => false,
        };
        let mut outcome = Invalidated::default();
        // Only a proven "nothing has changed" keeps what is cached.
        if old.is_none() || old != new {
            outcome = st.invalidate(
                Grade::Poisoned,
                |attr| attr.port == port && attr.grh.is_some_and(|g| !is_proven_same(g.sgid)),
                &mut removed,
            );
        }
        outcome.forgotten += st.failures.forget(|attr| attr.port == port);
        drop(st);
        drop(removed);
        outcome
    }

    pub(super) fn invalidate_one(&self, attr: &AhAttr, generation: u64, grade: Grade) -> bool {
        let hash = self.hasher.hash(attr);
        let mut st = self.state.lock();
        let removed = st.withdraw(hash, generation, grade);
        let raised = removed.is_some() || st.raise_stray(generation, grade);
        drop(st);
        drop(removed);
        raised
    }

    pub(super) fn handle_paths(&self, news: &BTreeMap<AhPath, PathNews>) -> Invalidated {
        let of = |attr: &AhAttr| AhPath::of(attr).and_then(|path| news.get(&path)).copied();
        let mut removed = Vec::new();
        let mut st = self.state.lock();
        let mut outcome =
            Invalidated { forgotten: st.failures.forget(|a| of(a) == Some(PathNews::Found)), ..Default::default() };
        // Most news are that somebody answers, and concern no handle.
        if news.values().any(|n| *n > PathNews::Found) {
            outcome.forgotten += st.restart(Grade::Stale, |a| of(a) == Some(PathNews::Moved));
            outcome.stale = st.mark(Grade::Stale, |a| of(a) > Some(PathNews::Found), &mut removed);
        }
        drop(st);
        drop(removed);
        outcome
    }

    pub(super) fn paths(&self) -> Vec<AhPath> {
        let mut st = self.state.lock();
        let mut all: Vec<AhPath> = st.table.iter().filter_map(|e| AhPath::of(&e.attr)).collect();
        all.extend(st.strays.values().filter_map(|s| AhPath::of(&s.attr)));
        all.extend(st.flights.iter_mut().filter_map(|f| AhPath::of(&f.attr)));
        all.extend(st.failures.keys().filter_map(AhPath::of));
        drop(st);
        all.sort_unstable();
        all.dedup();
        all
    }
}
