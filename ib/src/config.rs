//! Settings of IB-level devices and interfaces: UCX's names, defaults and meanings.
//!
//! [`MdConfig`] is read once per device, under `UCX_IB_` only. [`IfaceConfig`] is read once per interface, under `UCX_IB_`
//! and the prefixes of the transport, see [`UD`] and [`SRD`].

mod soft;

use std::{net::IpAddr, time::Duration};

use uct::{
    Result,
    config::{AllowList, Bytes, Env, Hex, RangeList, Scope, Section, Ternary, Units, Value, choices},
};

pub use soft::{SoftMtu, SoftSettings};

use crate::types::Mtu;

/// Names of settings of a device.
pub const MD: Scope = Scope { prefixes: &["IB_"], transports: "ud_verbs, srd" };

/// Names of settings of an interface, for the UD transport.
pub const UD: Scope = Scope { prefixes: &["IB_", "UD_", "UD_VERBS_"], transports: "ud_verbs" };

/// Names of settings of an interface, for the SRD transport.
pub const SRD: Scope = Scope { prefixes: &["IB_", "SRD_"], transports: "srd" };

/// Names of settings of the soft device.
pub const SOFT: Scope = Scope { prefixes: &["SOFT_"], transports: "all on the soft device" };

/// The settings of devices, for a [`Catalog`](uct::config::Catalog).
pub const SECTIONS: &[Section] =
    &[Section { table: MdConfig::TABLE, scope: &MD }, Section { table: SoftSettings::TABLE, scope: &SOFT }];

/// Which device addresses count as reachable over RoCE v2.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum ReachabilityMode {
    /// Those to which the kernel has a route through the network interface of the local GID.
    Route,
    /// Those in the subnet of the local GID.
    LocalSubnet,
    /// All.
    All,
}

const MODES: [(&str, ReachabilityMode); 3] = [
    ("route", ReachabilityMode::Route),
    ("local_subnet", ReachabilityMode::LocalSubnet),
    ("all", ReachabilityMode::All),
];

impl Value for ReachabilityMode {
    const FORMS: &'static str = "route, local_subnet or all";

    fn parse(text: &str) -> Result<Self, String> {
        choices(text, &MODES)
    }

    fn print(&self) -> String {
        MODES.iter().find(|(_, m)| m == self).map_or("", |(name, _)| name).into()
    }
}

/// The MTU of the paths to peers.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum PathMtu {
    /// The port's active MTU.
    Default,
    /// This one.
    Is(Mtu),
}

impl Value for PathMtu {
    const FORMS: &'static str = "default, 512, 1024, 2048 or 4096";

    fn parse(text: &str) -> Result<Self, String> {
        let of = |mtu| PathMtu::Is(mtu);
        choices(
            text,
            &[
                ("default", PathMtu::Default),
                ("512", of(Mtu::M512)),
                ("1024", of(Mtu::M1024)),
                ("2048", of(Mtu::M2048)),
                ("4096", of(Mtu::M4096)),
            ],
        )
    }

    fn print(&self) -> String {
        match self {
            PathMtu::Default => "default".into(),
            PathMtu::Is(mtu) => mtu.bytes().to_string(),
        }
    }
}

/// The upper half of an InfiniBand GID, written as four groups of hexadecimal digits, or nothing.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct SubnetPrefix(pub Option<[u8; 8]>);

impl Value for SubnetPrefix {
    const FORMS: &'static str = "four hexadecimal numbers such as fe80:0:0:0, or nothing";

    fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Ok(SubnetPrefix(None));
        }
        let parts: Vec<&str> = text.split(':').collect();
        if parts.len() != 4 {
            return Err("not four numbers".into());
        }
        let mut prefix = [0; 8];
        for (out, part) in prefix.chunks_exact_mut(2).zip(parts) {
            if part.is_empty() || part.len() > 4 || !part.bytes().all(|b| b.is_ascii_hexdigit()) {
                return Err(format!("'{part}' is not a hexadecimal number of up to four digits"));
            }
            let n = u16::from_str_radix(part, 16).map_err(|e| e.to_string())?;
            out.copy_from_slice(&n.to_be_bytes());
        }
        Ok(SubnetPrefix(Some(prefix)))
    }

    fn print(&self) -> String {
        let Some(p) = self.0 else { return String::new() };
        p.chunks_exact(2).map(|c| format!("{:x}", u16::from_be_bytes([c[0], c[1]]))).collect::<Vec<_>>().join(":")
    }
}

/// IP subnets that are allowed, or with a leading `^` not allowed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Subnets {
    list: AllowList,
    nets: Vec<(String, IpAddr, u8)>,
}

impl Subnets {
    /// True if nothing is filtered.
    pub fn is_all(&self) -> bool {
        self.list.is_all()
    }

    /// True if addresses like `ip` are allowed.
    pub fn allows(&self, ip: IpAddr) -> bool {
        self.list.allows(|item| self.nets.iter().any(|(text, net, len)| text == item && in_subnet(ip, *net, *len)))
    }
}

/// True if the first `len` bits of two addresses of one family are equal.
pub(crate) fn in_subnet(ip: IpAddr, net: IpAddr, len: u8) -> bool {
    match (ip, net) {
        (IpAddr::V4(a), IpAddr::V4(b)) => {
            let differing = a.to_bits() ^ b.to_bits();
            differing.leading_zeros() >= u32::from(len.min(32))
        }
        (IpAddr::V6(a), IpAddr::V6(b)) => {
            let differing = a.to_bits() ^ b.to_bits();
            differing.leading_zeros() >= u32::from(len.min(128))
        }
        _ => false,
    }
}

impl Value for Subnets {
    const FORMS: &'static str =
        "subnets such as 10.1.0.0/16, separated by commas; a leading ^ for all but these; or all";

    fn parse(text: &str) -> Result<Self, String> {
        let list = AllowList::parse(text)?;
        let mut nets = Vec::new();
        for item in list.items() {
            let bad = || format!("'{item}' is not a subnet");
            let (ip, len) = item.split_once('/').ok_or_else(bad)?;
            let ip: IpAddr = ip.parse().map_err(|_| bad())?;
            let len = u8::parse(len).map_err(|_| bad())?;
            if len > if ip.is_ipv4() { 32 } else { 128 } {
                return Err(bad());
            }
            nets.push((item.clone(), ip, len));
        }
        Ok(Subnets { list, nets })
    }

    fn print(&self) -> String {
        self.list.print()
    }
}

uct::config_table! {
    /// Settings of a device and what all its interfaces share.
    pub struct MdConfig ("Device") {
        /// The index of the local address (GID) in the port's table. By default the address is chosen by its content:
        /// routable before link-local, RoCE v2 before v1. The index may differ from node to node.
        gid_index: Units = "GID_INDEX", "auto", where |n| n.is_auto_or_at_most(255), "must be auto or at most 255";
        /// The local address (GID) by content: an IP address, or the name of a network interface. Of this library, not of
        /// UCX. Empty to choose by rank.
        gid: String = "GID", "";
        /// Use only InfiniBand ports with this subnet prefix. Empty for all.
        subnet_prefix: SubnetPrefix = "SUBNET_PREFIX", "";
        /// Follow events of the device, such as a port that goes down or an address that changes.
        async_events: bool = "ASYNC_EVENTS", "y";
        /// Make registered memory safe in a process that forks: without it, on kernels before 5.12, what the parent writes
        /// after a fork may not reach its device. try means where the device supports it; the soft device needs nothing
        /// for it. What the parent has opened cannot be used in the child either way.
        fork_init: Ternary = "FORK_INIT", "try";
        /// How long an address handle that nobody holds stays in the cache for the next user. inf keeps it until its
        /// peer is known to have changed; 0 disables sharing, so that each user gets a handle of its own. An address
        /// handle in use never expires.
        ah_cache_ttl: Duration = "AH_CACHE_TTL", "inf";
        /// How many address handles that nobody holds the cache keeps; those not used for longest are given up first.
        /// Of this library, not of UCX.
        ah_cache_max: u32 = "AH_CACHE_MAX", "65536";
        /// Follow changes of neighbours (address resolution) and routes (gateways) on RoCE devices, so that the next
        /// connection to a peer whose link address has changed uses the new one. Of this library, not of UCX.
        neighbour_watch: bool = "NEIGHBOUR_WATCH", "y";
    }
}

impl MdConfig {
    /// Reads the settings.
    ///
    /// # Errors
    /// `InvalidConfig` for a value that does not parse, is out of range or contradicts another.
    pub fn from_env(env: &Env) -> Result<Self> {
        let config = Self::read(env, &MD)?;
        if config.gid_index != Units::Auto && !config.gid.is_empty() {
            return Err(conflict("UCX_IB_GID_INDEX", "UCX_IB_GID"));
        }
        Ok(config)
    }
}

uct::config_table! {
    /// Settings of an interface that all transports over IB-level devices share.
    pub struct IfaceConfig ("Interface") {
        /// The size of the buffers for packets, in bytes. A packet carries at most this much or the device's packet size
        /// limit (MTU), whichever is less. Peers must use equal values: larger packets are lost.
        seg_size: Bytes = "SEG_SIZE", "8192", where |b| b.0 >= 256, "must be at least 256";
        /// How many packets can wait in the device's send queue.
        tx_queue_len: u32 = "TX_QUEUE_LEN", "256", where |n| (2..=32767).contains(n), "must be from 2 to 32767";
        /// How many send completions are taken from the device at once.
        tx_max_poll: u32 = "TX_MAX_POLL", "16", where |n| *n >= 1, "must be at least 1";
        /// How many bytes the device should be able to send without reading them from registered memory.
        tx_min_inline: Bytes = "TX_MIN_INLINE", "64", where |b| b.0 <= 65536, "must be at most 64k";
        /// How many pieces of memory one packet may be gathered from.
        tx_min_sge: u32 = "TX_MIN_SGE", "5", where |n| (1..=255).contains(n), "must be from 1 to 255";
        /// How many receive buffers are given to the device. Each takes the size of a packet.
        rx_queue_len: u32 = "RX_QUEUE_LEN", "4096", where |n| (4..=1 << 20).contains(n), "must be from 4 to 1048576";
        /// How many receive buffers there are at most, with those that the program keeps and those that wait for it. When
        /// none is left for the device, packets are lost and peers send them again until their time-out.
        rx_max_bufs: u32 = "RX_MAX_BUFS", "inf", where |n| *n >= 4, "must be at least 4";
        /// How many receive buffers are given to the device at once.
        rx_max_batch: u32 = "RX_MAX_BATCH", "16", where |n| *n >= 1, "must be at least 1";
        /// How many received packets are taken from the device at once.
        rx_max_poll: u32 = "RX_MAX_POLL", "16", where |n| *n >= 1, "must be at least 1";
        /// Always address peers globally, by a global routing header (GRH), also within an InfiniBand subnet.
        is_global: bool = "IS_GLOBAL", "n";
        /// Route between InfiniBand subnets by the forwarding identifier in the subnet prefix, where there is one.
        flid_route: bool = "FLID_ROUTE", "y";
        /// The service level of packets; on RoCE the Ethernet priority. auto is 0.
        sl: Units = "SL", "auto", where |n| n.is_auto_or_at_most(15), "must be auto or from 0 to 15";
        /// The traffic class of packets with a global address. auto is 106 on RoCE v2 and 0 elsewhere.
        traffic_class: Units = "TRAFFIC_CLASS", "auto", where |n| n.is_auto_or_at_most(255), "must be auto or from 0 to 255";
        /// The hop limit (time to live) of packets with a global address.
        hop_limit: u8 = "HOP_LIMIT", "255", where |n| *n >= 1, "must be from 1 to 255";
        /// How many network paths between two peers are used. auto is 1 on RoCE and the number of path bits on InfiniBand.
        num_paths: Units = "NUM_PATHS", "auto",
            where |n| n.is_auto_or_at_most(128) && *n != Units::Is(0), "must be auto or from 1 to 128";
        /// The older way to say ROCE_REACHABILITY_MODE=local_subnet.
        roce_local_subnet: bool = "ROCE_LOCAL_SUBNET", "n";
        /// How many bits of an IP address name its subnet, for ROCE_REACHABILITY_MODE=local_subnet. auto asks the network
        /// interface; inf allows only the local address itself.
        roce_subnet_prefix_len: Units = "ROCE_SUBNET_PREFIX_LEN", "auto",
            where |n| *n == Units::Inf || n.is_auto_or_at_most(128), "must be auto, inf, or from 0 to 128";
        /// Choose the local address only from these IP subnets. Cannot be combined with GID_INDEX.
        roce_subnets: Subnets = "ROCE_SUBNETS", "all";
        /// Which peers count as reachable over RoCE v2: those the kernel has a route to, those in the local subnet, or all.
        roce_reachability_mode: ReachabilityMode = "ROCE_REACHABILITY_MODE", "route";
        /// The distance between the source ports of two paths on RoCE; 0 makes all paths the same.
        roce_path_factor: u32 = "ROCE_PATH_FACTOR", "1", where |n| *n <= 65535, "must be at most 65535";
        /// The path bits to use on InfiniBand, one path for each; those beyond what the port has are skipped.
        lid_path_bits: RangeList = "LID_PATH_BITS", "0",
            where |l| l.numbers().iter().all(|n| *n < 128), "path bits are from 0 to 127";
        /// The partition to use, by the lower 15 bits of its key. auto takes the first with full membership. On RoCE there
        /// is only the default partition.
        pkey: Hex = "PKEY", "auto", where |k| !matches!(k, Hex::Is(n) if *n > 0x7fff), "must be auto or from 0x0 to 0x7fff";
        /// The longest packet (MTU) that the paths to peers carry, in bytes: no longer ones are sent, and peers are told so.
        /// default is what the port has, and no value makes it more.
        path_mtu: PathMtu = "PATH_MTU", "default";
    }
}

impl IfaceConfig {
    /// Reads the settings under the names of a transport: [`UD`] or [`SRD`].
    ///
    /// # Errors
    /// `InvalidConfig` for a value that does not parse or is out of range.
    pub fn from_env(env: &Env, scope: &Scope) -> Result<Self> {
        Self::read(env, scope)
    }

    /// The reachability mode, with the older setting taken into account.
    pub fn reachability_mode(&self) -> ReachabilityMode {
        match (self.roce_reachability_mode, self.roce_local_subnet) {
            (ReachabilityMode::Route, true) => ReachabilityMode::LocalSubnet,
            (mode, _) => mode,
        }
    }
}

/// The error for two settings that exclude each other.
pub(crate) fn conflict(a: &str, b: &str) -> uct::Error {
    uct::Error::new(uct::ErrorKind::InvalidConfig, format!("{a} and {b} cannot be combined: unset one of them"))
}

#[cfg(test)]
mod tests;
