//! Port counters, and one counter for every reason to drop a packet. UD drops are silent: this is where they show.

use std::{
    fmt,
    sync::atomic::{AtomicU64, Ordering},
};

macro_rules! drop_reasons {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// Why a packet did not arrive, or a send did not leave.
        #[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        #[repr(u8)]
        pub enum DropReason { $($(#[$doc])* $name,)* }

        impl DropReason {
            /// All of them, in the order in which they are shown.
            pub const ALL: &'static [DropReason] = &[$(DropReason::$name),*];

            /// A short name, as in `uct_info`.
            pub const fn name(self) -> &'static str {
                match self { $(DropReason::$name => $text,)* }
            }
        }
    };
}

drop_reasons! {
    /// Too short, or a header field that no peer may send.
    Malformed = "malformed",
    /// Not an opcode of UD.
    Opcode = "opcode",
    /// The checksum is wrong.
    Icrc = "icrc",
    /// No queue pair of that number.
    NoQp = "no_qp",
    /// The queue pair is in the ERROR state.
    QpError = "qp_error",
    /// The partition keys do not match.
    PKey = "pkey",
    /// The queue keys differ.
    QKey = "qkey",
    /// No receive was posted.
    NoReceive = "no_receive",
    /// The message is longer than the posted receive.
    TooLong = "too_long",
    /// The posted receive is not covered by a registration.
    Protection = "protection",
    /// A send above the port's MTU.
    Oversize = "oversize",
    /// A send without a local or remote address that works.
    NoRoute = "no_route",
    /// The socket refused a send.
    TxFailed = "tx_failed",
    /// The kernel's receive queue was full.
    RxOverflow = "rx_overflow",
    /// The port is down.
    PortDown = "port_down",
    /// A filter said so.
    Filtered = "filtered",
    /// The simulated network lost it.
    Loss = "loss",
    /// The simulated network is partitioned.
    Partition = "partition",
    /// The address handle's link address belongs to nobody, or the one it belongs to has not the GID.
    StaleMac = "stale_mac",
    /// The peer's device is gone.
    Gone = "gone",
}

impl fmt::Display for DropReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

const REASONS: usize = DropReason::ALL.len();

/// The counters of one device. Shared; all methods cost one or two relaxed atomic additions, so call them per batch.
#[derive(Debug, Default)]
pub struct Counters {
    tx_packets: AtomicU64,
    tx_bytes: AtomicU64,
    rx_packets: AtomicU64,
    rx_bytes: AtomicU64,
    drops: [AtomicU64; REASONS],
}

impl Counters {
    /// Counts packets that left, and their payload bytes.
    pub fn add_tx(&self, packets: u64, bytes: u64) {
        self.tx_packets.fetch_add(packets, Ordering::Relaxed);
        self.tx_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts packets that reached a posted receive, and their payload bytes. [`RxGuard`](super::RxGuard) does it itself.
    pub fn add_rx(&self, packets: u64, bytes: u64) {
        self.rx_packets.fetch_add(packets, Ordering::Relaxed);
        self.rx_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts one drop.
    pub fn drop_one(&self, why: DropReason) {
        self.drop_many(why, 1);
    }

    /// Counts `n` drops.
    pub fn drop_many(&self, why: DropReason, n: u64) {
        self.drops[why as usize].fetch_add(n, Ordering::Relaxed);
    }

    /// The values now. They are read one by one.
    pub fn stats(&self) -> Stats {
        Stats {
            tx_packets: self.tx_packets.load(Ordering::Relaxed),
            tx_bytes: self.tx_bytes.load(Ordering::Relaxed),
            rx_packets: self.rx_packets.load(Ordering::Relaxed),
            rx_bytes: self.rx_bytes.load(Ordering::Relaxed),
            drops: std::array::from_fn(|i| self.drops[i].load(Ordering::Relaxed)),
        }
    }
}

/// A snapshot of [`Counters`]. Displays as one line with the drops that are not zero.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Stats {
    /// Packets sent.
    pub tx_packets: u64,
    /// Payload bytes sent.
    pub tx_bytes: u64,
    /// Packets that reached a posted receive.
    pub rx_packets: u64,
    /// Their payload bytes.
    pub rx_bytes: u64,
    drops: [u64; REASONS],
}

impl Stats {
    /// Drops for one reason.
    pub fn dropped(&self, why: DropReason) -> u64 {
        self.drops[why as usize]
    }

    /// Drops for all reasons.
    pub fn dropped_total(&self) -> u64 {
        self.drops.iter().sum()
    }

    /// The reasons that occurred, with their counts.
    pub fn drops(&self) -> impl Iterator<Item = (DropReason, u64)> {
        DropReason::ALL.iter().map(|&r| (r, self.dropped(r))).filter(|&(_, n)| n > 0)
    }
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Stats { tx_packets, tx_bytes, rx_packets, rx_bytes, .. } = self;
        write!(f, "tx {tx_packets} packets {tx_bytes} bytes, rx {rx_packets} packets {rx_bytes} bytes")?;
        for (why, n) in self.drops() {
            write!(f, ", {why} {n}")?;
        }
        Ok(())
    }
}
