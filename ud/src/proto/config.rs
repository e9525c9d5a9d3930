//! Settings of the engine, and what is known about a peer beforehand. Plain data; reading the environment is the glue's work.

use std::time::Duration;

use uct::{Error, ErrorKind};

bitflags::bitflags! {
    /// Protocol extensions between engines of ours. A peer that did not announce one never sees a packet of it.
    #[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, Default)]
    pub struct Features: u16 {
        /// Acks that name what arrived beyond a gap, so that only missing packets are resent.
        const SACK = 1;
        /// A destroyed endpoint tells its peer.
        const BYE = 2;
        /// The receiver says how many bytes may be in flight to it.
        const BUDGET = 4;
    }
}

/// What a peer of ours says about itself, in its device address or in the handshake.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct ExtCaps {
    /// The extensions it speaks.
    pub features: Features,
    /// Random number of the process (rather: of the engine) that tells it from an earlier one at the same address.
    pub incarnation: u64,
    /// Receive budget in bytes of kernel memory, for all its senders here together; 0 if it states none.
    pub rx_budget: u32,
}

/// What a device address tells about the peer behind it.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct PeerCaps {
    /// Longest packet it can take, NETH included, in bytes.
    pub max_packet: usize,
    /// Present for a peer of ours, absent for a UCX process.
    pub ext: Option<ExtCaps>,
}

/// Settings of an [`Engine`](super::Engine). [`Default`] gives UCX's values where UCX has the setting.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Number of our queue pair; 24 bits.
    pub local_qpn: u32,
    /// Our packed device address with its trailer; goes into each CREQ. Not empty, at most 255 bytes.
    pub device_addr: Vec<u8>,
    /// Longest packet, NETH and payload, in bytes: min(MTU, segment size). At least 48 + the address.
    pub max_packet: usize,
    /// Silence after which a peer is declared dead (`UCX_UD_TIMEOUT`).
    pub timeout: Duration,
    /// Base of the resend timer (`UCX_UD_TIMER_TICK`); greater than zero, at most `timeout`.
    pub timer_tick: Duration,
    /// Factor by which the tick grows while the peer is silent (`UCX_UD_TIMER_BACKOFF`); 1.0 to 1000.
    pub timer_backoff: f64,
    /// How long a destroyed endpoint's record is kept (`UCX_UD_LINGER_TIMEOUT`).
    pub linger: Duration,
    /// Requests for an ack wake a sleeping peer once the tick has grown to this (`UCX_UD_MIN_POKE_TIME`).
    pub min_poke: Duration,
    /// Upper limit of the congestion window (`UCX_UD_MAX_WINDOW`); 2 to 1025.
    pub max_window: u16,
    /// How many endpoints made by strangers' requests may exist unclaimed.
    pub passive_max: usize,
    /// How many packets beyond a gap are kept per endpoint; 0 to 64, rounded up to a power of two.
    pub hold_max: usize,
    /// Bytes of kernel receive memory to share out among senders of ours; 0 advertises none.
    pub rx_budget: u32,
    /// Extensions to announce.
    pub features: Features,
    /// Random number of this engine, announced to peers of ours.
    pub incarnation: u64,
    /// Where the first endpoint id comes from, unless `first_ep_id` is given.
    pub seed: u64,
    /// First endpoint id; for tests.
    pub first_ep_id: Option<u32>,
    /// First PSN of every endpoint, of the peers too; 1 on the wire, other values for tests.
    pub initial_psn: u16,
    /// First conn_sn per peer; for tests.
    pub first_conn_sn: u32,
    /// Plays a plain UCX process that names itself by these bytes and knows no extension; for tests.
    pub foreign_ident: Option<[u8; 20]>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        EngineConfig {
            local_qpn: 0,
            device_addr: Vec::new(),
            max_packet: 4096,
            timeout: Duration::from_secs(30),
            timer_tick: Duration::from_millis(10),
            timer_backoff: 2.0,
            linger: Duration::from_secs(300),
            min_poke: Duration::from_millis(250),
            max_window: 1025,
            passive_max: 1024,
            hold_max: 64,
            rx_budget: 0,
            features: Features::all(),
            incarnation: 0,
            seed: 0,
            first_ep_id: None,
            initial_psn: 1,
            first_conn_sn: 0,
            foreign_ident: None,
        }
    }
}

impl EngineConfig {
    /// Checks every range. The text of the error names the setting, its value and what is allowed.
    pub fn validate(&self) -> Result<(), Error> {
        let bad = |text: String| Err(Error::new(ErrorKind::InvalidConfig, text));
        if self.local_qpn > 0x00ff_ffff {
            return bad(format!("queue pair number {:#x}: at most 0xffffff", self.local_qpn));
        }
        if self.device_addr.is_empty() || self.device_addr.len() > 255 {
            return bad(format!("device address of {} bytes: 1 to 255", self.device_addr.len()));
        }
        if self.max_packet < 48 + self.device_addr.len() {
            return bad(format!("packet size {}: at least {}", self.max_packet, 48 + self.device_addr.len()));
        }
        if self.timer_tick.is_zero() || self.timer_tick > self.timeout {
            return bad(format!(
                "UCX_UD_TIMER_TICK={:?}: more than 0, at most UCX_UD_TIMEOUT={:?}",
                self.timer_tick, self.timeout
            ));
        }
        if !(1.0..=1000.0).contains(&self.timer_backoff) {
            return bad(format!("UCX_UD_TIMER_BACKOFF={}: 1.0 to 1000", self.timer_backoff));
        }
        if !(2..=1025).contains(&self.max_window) {
            return bad(format!("UCX_UD_MAX_WINDOW={}: 2 to 1025", self.max_window));
        }
        if self.hold_max > 64 {
            return bad(format!("hold_max={}: at most 64", self.hold_max));
        }
        if self.first_ep_id.is_some_and(|id| id >= 0x00ff_ffff) {
            return bad(format!("first endpoint id {:?}: below 0xffffff", self.first_ep_id));
        }
        if self.first_conn_sn == u32::MAX {
            return bad("first conn_sn 0xffffffff is reserved".into());
        }
        Ok(())
    }
}
