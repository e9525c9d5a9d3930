//! What events do to entries: the mapping from [`AsyncEvent`] to a [`Grade`] and the entries it concerns.
//! The module above has the table.

use std::collections::BTreeMap;

use super::{
    Grade, Invalidated,
    entry::Entry,
    shared::{Shared, State, Stray},
};
use crate::{
    device::{AhAttr, AsyncEvent, Device, GidEntry, VerbsResult},
    sync::Arc,
    types::Gid,
};

type Hops = BTreeMap<Gid, Gid>;

/// The GID whose neighbour entry decides where packets to `attr` go.
fn next_hop(hops: &Hops, attr: &AhAttr) -> Option<Gid> {
    let dgid = attr.grh?.dgid;
    Some(hops.get(&dgid).copied().unwrap_or(dgid))
}

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

    /// Marks everything that `concerns` names. Entries taken out go to `removed`, to be dropped after unlocking.
    fn invalidate(
        &mut self,
        grade: Grade,
        concerns: impl Fn(&Hops, &AhAttr) -> bool,
        removed: &mut Vec<Arc<Entry<D>>>,
    ) -> Invalidated {
        let hops = &self.hops;
        let mut found: Vec<_> =
            self.table.iter().filter(|e| concerns(hops, &e.attr)).map(|e| (e.generation, e.hash)).collect();
        found.sort_unstable();
        let strays: Vec<_> =
            self.strays.iter().filter(|(_, s)| concerns(hops, &s.attr)).map(|(generation, _)| *generation).collect();
        for flight in self.flights.iter_mut().filter(|f| concerns(hops, &f.attr)) {
            flight.doom = flight.doom.max(Some(grade));
        }
        let forgotten = self.failures.forget(|attr| concerns(hops, attr));
        let mut changed = found.len();
        for (generation, hash) in found {
            removed.extend(self.withdraw(hash, generation, grade));
        }
        for generation in strays {
            changed += usize::from(self.raise_stray(generation, grade));
        }
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
                this.invalidate_all(Grade::Stale, |hops, attr| next_hop(hops, attr) == Some(gid))
            }
            AsyncEvent::PortError(port) | AsyncEvent::SmChange(port) | AsyncEvent::ClientReregister(port) => {
                this.invalidate_all(Grade::Stale, |_, attr| attr.port == port)
            }
            AsyncEvent::PortActive(port) => {
                // The table may have been filled again, with other indexes, while the port was down.
                let by_gid = Self::refresh_gids(this, port, None);
                let by_port = this.invalidate_all(Grade::Stale, |_, attr| attr.port == port);
                Invalidated {
                    stale: by_port.stale,
                    poisoned: by_gid.poisoned,
                    forgotten: by_gid.forgotten + by_port.forgotten,
                }
            }
            AsyncEvent::GidChange(port) => Self::refresh_gids(this, port, None),
            AsyncEvent::LidChange(port) => this.invalidate_all(Grade::Poisoned, |_, attr| attr.port == port),
            AsyncEvent::DeviceFatal => this.invalidate_all(Grade::Poisoned, |_, _| true),
            AsyncEvent::PkeyChange(_) | AsyncEvent::QpFatal(_) | AsyncEvent::Unknown(_) => Invalidated::default(),
        }
    }

    fn invalidate_all(&self, grade: Grade, concerns: impl Fn(&Hops, &AhAttr) -> bool) -> Invalidated {
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
                |_, attr| attr.port == port && attr.grh.is_some_and(|g| !is_proven_same(g.sgid)),
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

    pub(super) fn set_next_hop(&self, dgid: Gid, hop: Option<Gid>) -> Invalidated {
        let mut removed = Vec::new();
        let mut st = self.state.lock();
        let hop = hop.filter(|h| *h != dgid);
        let old = match hop {
            Some(hop) => st.hops.insert(dgid, hop),
            None => st.hops.remove(&dgid),
        };
        let outcome = match old == hop {
            true => Invalidated::default(),
            false => st.invalidate(Grade::Stale, |_, attr| attr.grh.is_some_and(|g| g.dgid == dgid), &mut removed),
        };
        drop(st);
        drop(removed);
        outcome
    }

    pub(super) fn destinations(&self) -> Vec<Gid> {
        let mut st = self.state.lock();
        let of = |attr: &AhAttr| attr.grh.map(|g| g.dgid);
        let mut all: Vec<Gid> = st.table.iter().filter_map(|e| of(&e.attr)).collect();
        all.extend(st.strays.values().filter_map(|s| of(&s.attr)));
        all.extend(st.flights.iter_mut().filter_map(|f| of(&f.attr)));
        all.extend(st.failures.keys().filter_map(of));
        all.sort_unstable();
        all.dedup();
        st.hops.retain(|dgid, _| all.binary_search(dgid).is_ok());
        all
    }
}
