//! Counters. Every packet that is not what it should be ends in exactly one [`DropReason`].

/// Why a received packet had no effect (beyond the acknowledgement it may have carried).
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum DropReason {
    /// Shorter than its type demands.
    Short,
    /// Reserved bits set, an impossible field, or a type that does not exist.
    Malformed,
    /// The destination endpoint does not exist (any more).
    UnknownEp,
    /// The sending queue pair is not the one the endpoint is connected to.
    WrongSource,
    /// Seen before.
    Duplicate,
    /// Beyond a gap, and not kept.
    Gap,
    /// The application has no room now; not acknowledged, so it will come again.
    NoRoom,
    /// The endpoint was destroyed and takes no data.
    Closed,
    /// The endpoint failed earlier.
    EpFailed,
    /// A control packet that the endpoint's state has no use for.
    Unexpected,
    /// An extension packet from a peer that did not negotiate it, or of an unknown type.
    UnknownControl,
    /// A handshake packet of an earlier process at the same address.
    StaleProcess,
    /// A handshake packet of a process that may have followed the known one: it has to ask again.
    DoubtfulProcess,
    /// A CREP that contradicts the endpoint id known so far.
    WrongEpId,
    /// Too many unclaimed endpoints of strangers.
    TooManyPassive,
    /// A remote write with data: never carried out.
    PutRefused,
    /// The reserved conn_sn.
    BadConnSn,
    /// No endpoint id is free.
    NoEpId,
}

impl DropReason {
    /// How many reasons there are.
    pub const COUNT: usize = DropReason::ALL.len();

    /// All reasons, in the order of [`EngineStats::drops`].
    pub const ALL: [DropReason; 18] = [
        DropReason::Short,
        DropReason::Malformed,
        DropReason::UnknownEp,
        DropReason::WrongSource,
        DropReason::Duplicate,
        DropReason::Gap,
        DropReason::NoRoom,
        DropReason::Closed,
        DropReason::EpFailed,
        DropReason::Unexpected,
        DropReason::UnknownControl,
        DropReason::StaleProcess,
        DropReason::DoubtfulProcess,
        DropReason::WrongEpId,
        DropReason::TooManyPassive,
        DropReason::PutRefused,
        DropReason::BadConnSn,
        DropReason::NoEpId,
    ];

    /// A short name, for tables and logs.
    pub const fn name(self) -> &'static str {
        match self {
            DropReason::Short => "short",
            DropReason::Malformed => "malformed",
            DropReason::UnknownEp => "unknown_ep",
            DropReason::WrongSource => "wrong_source",
            DropReason::Duplicate => "duplicate",
            DropReason::Gap => "gap",
            DropReason::NoRoom => "no_room",
            DropReason::Closed => "closed",
            DropReason::EpFailed => "ep_failed",
            DropReason::Unexpected => "unexpected",
            DropReason::UnknownControl => "unknown_control",
            DropReason::StaleProcess => "stale_process",
            DropReason::DoubtfulProcess => "doubtful_process",
            DropReason::WrongEpId => "wrong_ep_id",
            DropReason::TooManyPassive => "too_many_passive",
            DropReason::PutRefused => "put_refused",
            DropReason::BadConnSn => "bad_conn_sn",
            DropReason::NoEpId => "no_ep_id",
        }
    }
}

/// Counters of one engine, from its start. They only grow.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Packets given to the engine.
    pub rx_packets: u64,
    /// Active messages delivered, kept ones included, at the moment the engine handed them out.
    pub rx_delivered: u64,
    /// Packets kept beyond a gap.
    pub rx_held: u64,
    /// Dropped packets by reason, indexed by `DropReason as usize`.
    pub drops: [u64; DropReason::COUNT],
    /// Acks of packets that were never sent.
    pub acks_beyond: u64,
    /// Acks older than the newest one.
    pub acks_old: u64,
    /// Acks that acknowledged something.
    pub acks_new: u64,
    /// Negative acks that came in (extended acks with a gap included).
    pub rx_nacks: u64,
    /// Active messages sent for the first time.
    pub tx_am: u64,
    /// Packets sent again.
    pub tx_resends: u64,
    /// Acks, and requests for one, sent in a packet of their own.
    pub tx_acks: u64,
    /// Negative acks sent.
    pub tx_nacks: u64,
    /// Extended acks sent.
    pub tx_xacks: u64,
    /// Connection requests sent for the first time.
    pub tx_creq: u64,
    /// Answers to connection requests sent for the first time.
    pub tx_crep: u64,
    /// Keep-alive probes sent.
    pub tx_probes: u64,
    /// BYE packets sent, repetitions included.
    pub tx_byes: u64,
    /// Times the congestion window was halved.
    pub cwnd_cuts: u64,
    /// Times the timer had to start a round of resends.
    pub timer_resends: u64,
    /// Endpoints that strangers' requests made.
    pub passive_created: u64,
    /// Requests refused because there were too many unclaimed endpoints.
    pub passive_refused: u64,
    /// Unclaimed endpoints that were claimed by a local connect.
    pub passive_claimed: u64,
    /// Times another process was found at a known address.
    pub restarts: u64,
    /// Times a peer's endpoint id changed though its process did not.
    pub stale_dest: u64,
    /// Endpoints that failed (users' ones only).
    pub ep_failures: u64,
    /// Times this process was found to have stood still; peers are not blamed for it.
    pub stopped: u64,
    /// Times a send was refused for the peer's receive budget.
    pub budget_refusals: u64,
}

impl EngineStats {
    /// The number of packets dropped for `reason`.
    pub fn dropped(&self, reason: DropReason) -> u64 {
        self.drops[reason as usize]
    }
}
