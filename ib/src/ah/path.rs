//! [`AhPath`]: what news about routes and neighbours is about.

use std::{fmt, sync::Arc};

use crate::{device::AhAttr, types::Gid};

/// From where to where the packets of an address handle go. Which gateway and which link address that leads to is decided
/// by the network between the two, so all handles of one path are resolved alike.
///
/// In the order of destinations, so that those of one subnet are next to each other.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct AhPath {
    /// Where to.
    pub dgid: Gid,
    /// From which local GID.
    pub sgid: Gid,
    /// Local port, from 1.
    pub port: u8,
}

impl AhPath {
    /// The path of a handle; `None` without a GRH.
    pub fn of(attr: &AhAttr) -> Option<AhPath> {
        attr.grh.map(|g| AhPath { dgid: g.dgid, sgid: g.sgid, port: attr.port })
    }
}

impl fmt::Display for AhPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "dgid {} sgid {} port {}", self.dgid, self.sgid, self.port)
    }
}

/// What has become of a path. A later variant outdoes an earlier one.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum PathNews {
    /// It leads somewhere again: failures are forgotten. Handles are as good as before.
    Found,
    /// Its neighbour does not answer, or there is no route: handles become stale. Creations under way find out by
    /// themselves.
    Lost,
    /// It leads to another link address now: handles become stale, creations under way are done again, failures are
    /// forgotten.
    Moved,
}

/// Told of a path when a creation for it begins.
pub type PathHook = Arc<dyn Fn(&AhPath) + Send + Sync>;
