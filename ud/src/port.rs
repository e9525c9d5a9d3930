//! What the port is like while packets are lost: down, or with a smaller MTU than at open, of which no event tells.
//!
//! A packet above the port's MTU disappears without a word while the peer goes on answering shorter ones, so that without this
//! an endpoint would send it again for ever. The port is looked at while there are resends, once a second at most.

use std::time::Duration;

use ib::device::Device;
use uct::Time;

use crate::core::{Core, Live};

/// The time between two looks at least.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// When the port was last looked at.
#[derive(Default)]
pub(crate) struct PortWatch {
    looked_at: Time,
    resends_then: u64,
    is_bad: bool,
}

impl<D: Device> Live<D> {
    /// Called now and then. Takes the result of the last look, and looks again if there is reason to.
    pub(crate) fn watch_port(&mut self, core: &Core<D>) {
        let resends = self.engine.stats().timer_resends;
        let w = &mut self.port_watch;
        if resends == w.resends_then || self.now.since(w.looked_at) < LOOK_EVERY {
            return;
        }
        (w.resends_then, w.looked_at) = (resends, self.now);
        let port = core.port.port;
        let trouble = core.md.port_trouble(port, core.port.mtu);
        if trouble.is_some() != std::mem::replace(&mut w.is_bad, trouble.is_some()) {
            match &trouble {
                Some(why) => tracing::warn!("{}: {why}", core.name()),
                None => tracing::info!("{}: port {port} is as it was when the interface was opened", core.name()),
            }
        }
        self.engine.count_answers(trouble.is_none());
        core.md.look_at_port(port);
    }
}
