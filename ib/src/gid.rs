//! Which port, GID and partition an interface uses: [`local_port`] asks a device and decides, [`select`] decides alone.
//!
//! A GID is chosen by what it is, never by its place in the table, which differs from node to node: RoCE v2 before v1,
//! IPv4 before IPv6, routable before link-local, an unknown version last, and after all of these an address that turns
//! out not to work. The result carries the reason in words, for one line in the log at info level.

use std::{fmt, net::IpAddr};

use uct::{
    Error, ErrorKind, Result,
    config::{Hex, Units},
};

use crate::{
    addr::{DEFAULT_SUBNET, DeviceAddr, Features, LinkAddr, Trailer, flid},
    config::{IfaceConfig, MdConfig, PathMtu, conflict},
    device::{
        AhAttr, Device, DeviceAttr, GidEntry, GlobalRoute, LinkLayer, PortAttr, RoceVersion, SoftAv, SoftIdentity,
        VerbsError,
    },
    types::{Gid, Lid, Mtu, PKey},
};

/// The traffic class of RoCE v2 packets unless one is set: the class that lossless Ethernet set-ups expect.
pub const TRAFFIC_CLASS_ROCE_V2: u8 = 106;

/// A port that can be used, and everything chosen for it.
#[derive(Clone, PartialEq, Debug)]
pub struct LocalPort {
    /// The device's name.
    pub device: String,
    /// The port, from 1.
    pub port: u8,
    /// Its kind of network.
    pub link_layer: LinkLayer,
    /// Its LID (InfiniBand).
    pub lid: Lid,
    /// The chosen GID, with its place in the table at the time of choosing.
    pub gid: GidEntry,
    /// The MTU in force: no packet may be longer.
    pub mtu: Mtu,
    /// The MTU told to peers.
    pub path_mtu: Mtu,
    /// The partition.
    pub pkey: PKey,
    /// Its place in the partition table.
    pub pkey_index: u16,
    /// Service level of packets.
    pub sl: u8,
    /// Traffic class of packets with a global address.
    pub traffic_class: u8,
    /// Hop limit of packets with a global address.
    pub hop_limit: u8,
    /// Peers are addressed globally even if they are near.
    pub force_global: bool,
    /// Route between InfiniBand subnets by forwarding identifier.
    pub flid_route: bool,
    /// Distance between the source-port seeds of two paths on RoCE.
    pub path_factor: u32,
    /// Path bits in use on InfiniBand, by path index; never empty.
    pub path_bits: Vec<u8>,
    /// How many paths there are to a peer.
    pub num_paths: u8,
    /// What soft devices are besides.
    pub soft: Option<SoftIdentity>,
    /// Why this GID was chosen, in a few words.
    pub reason: String,
}

impl LocalPort {
    /// A port for tests, as of a RoCE v2 device of no distinction.
    #[cfg(any(test, uct_fuzz))]
    pub(crate) fn example(link_layer: LinkLayer, gid: Gid) -> Self {
        LocalPort {
            device: "dev0".into(),
            port: 1,
            link_layer,
            lid: Lid(1),
            gid: GidEntry { index: 0, gid, version: RoceVersion::V2, netdev: None },
            mtu: Mtu::M1024,
            path_mtu: Mtu::M1024,
            pkey: PKey::DEFAULT,
            pkey_index: 0,
            sl: 0,
            traffic_class: 0,
            hop_limit: 255,
            force_global: link_layer == LinkLayer::Ethernet,
            flid_route: true,
            path_factor: 1,
            path_bits: vec![0],
            num_paths: 1,
            soft: None,
            reason: String::new(),
        }
    }

    /// The address peers reach this port by. `incarnation` and `features` go into the trailer of soft devices.
    pub fn device_addr(&self, incarnation: u64, features: Features) -> DeviceAddr {
        let gid = self.gid.gid;
        DeviceAddr {
            link: match self.link_layer {
                LinkLayer::Ethernet => LinkAddr::Ethernet { gid, version: self.gid.version.into() },
                LinkLayer::InfiniBand => LinkAddr::InfiniBand {
                    lid: self.lid,
                    prefix: gid.subnet_prefix(),
                    if_id: self.force_global.then(|| gid.interface_id()),
                },
            },
            pkey: self.pkey,
            path_mtu: self.path_mtu,
            gid_index: None,
            trailer: self.soft.map(|soft| Trailer { soft, incarnation, features }),
        }
    }
}

impl fmt::Display for LocalPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{} gid index {} {}", self.device, self.port, self.gid.index, self.gid.gid)?;
        if self.link_layer == LinkLayer::Ethernet {
            write!(f, " {}", version_text(self.gid.version))?;
        }
        if let Some(netdev) = &self.gid.netdev {
            write!(f, " on {netdev}")?;
        }
        write!(f, " mtu {} ({})", self.mtu.bytes(), self.reason)
    }
}

/// The name of a RoCE version.
pub(crate) fn version_text(version: RoceVersion) -> &'static str {
    match version {
        RoceVersion::V1 => "RoCE v1",
        RoceVersion::V2 => "RoCE v2",
        RoceVersion::Unknown => "RoCE of unknown version",
    }
}

/// Asks `device` about `port` and decides. The result's `Display` is the line to log at info level.
///
/// On devices of the kernel, a GID is tried out by making an address handle to itself, which may sleep.
///
/// # Errors
/// As [`select`]; `NoDevice` with the errno if the port cannot be queried.
pub fn local_port<D: Device>(device: &D, port: u8, md: &MdConfig, iface: &IfaceConfig) -> Result<LocalPort> {
    let attr = device.attr();
    let fail = |e: VerbsError| {
        Error::new(ErrorKind::NoDevice, format!("{}:{port}: {} failed", attr.name, e.call)).with_errno(e.errno)
    };
    let port_attr = device.query_port(port).map_err(fail)?;
    let gids = device.query_gids(port).map_err(fail)?;
    let probe = |entry: &GidEntry| match attr.soft {
        // Its addresses are bound sockets, so they work.
        Some(_) => Ok(()),
        None => try_gid(device, port, entry.gid),
    };
    let local = select(&attr, port, &port_attr, &gids, md, iface, &probe)?;
    crate::subnets::warn_if_shared(&local);
    Ok(local)
}

/// Makes and destroys an address handle from a GID to itself.
fn try_gid<D: Device>(device: &D, port: u8, gid: Gid) -> Result<(), String> {
    let grh = GlobalRoute { dgid: gid, sgid: gid, hop_limit: 255, traffic_class: 0, flow_label: 1 };
    let attr = AhAttr {
        port,
        sl: 0,
        src_path_bits: 0,
        static_rate: 0,
        dlid: Lid(0xc000),
        grh: Some(grh),
        soft: SoftAv::default(),
    };
    let ah = device.create_ah(&attr).map_err(|e| e.to_string())?;
    // It is gone whatever destroy says; a device in trouble will say so again soon.
    let _ = device.destroy_ah(ah);
    Ok(())
}

/// Chooses GID, partition and paths of a port. `probe` tries a GID out and says what is wrong with it; such a one is taken
/// only if there is no other.
///
/// # Errors
/// `NoDevice` if the port is down or has no usable GID; `InvalidConfig` if a setting asks for what is not there.
pub fn select(
    device: &DeviceAttr,
    port: u8,
    attr: &PortAttr,
    gids: &[GidEntry],
    md: &MdConfig,
    iface: &IfaceConfig,
    probe: &dyn Fn(&GidEntry) -> Result<(), String>,
) -> Result<LocalPort> {
    let ctx = Ctx { name: format!("{}:{port}", device.name), attr, gids, md, iface };
    if !attr.active {
        return Err(ctx.no_device("the port is not active: check cable, switch and `ip link`"));
    }
    let (gid, reason) = match attr.link_layer {
        LinkLayer::Ethernet => ctx.ethernet_gid(probe)?,
        LinkLayer::InfiniBand => ctx.infiniband_gid()?,
    };
    let (pkey_index, pkey) = ctx.pkey()?;
    let path_bits = ctx.path_bits();
    let roce = attr.link_layer == LinkLayer::Ethernet;
    let auto_paths = if roce { 1 } else { path_bits.len() };
    let traffic_class = match (roce, gid.version) {
        (true, RoceVersion::V2) => TRAFFIC_CLASS_ROCE_V2,
        _ => 0,
    };
    let number = |units: Units, auto: u8| units.number().map_or(auto, |n| u8::try_from(n).unwrap_or(u8::MAX));
    Ok(LocalPort {
        device: device.name.clone(),
        port,
        link_layer: attr.link_layer,
        lid: attr.lid,
        mtu: attr.active_mtu,
        path_mtu: match iface.path_mtu {
            PathMtu::Default => attr.active_mtu,
            PathMtu::Is(mtu) => mtu.min(attr.active_mtu),
        },
        pkey,
        pkey_index,
        sl: number(iface.sl, 0),
        traffic_class: number(iface.traffic_class, traffic_class),
        hop_limit: iface.hop_limit,
        force_global: roce || iface.is_global || needs_global(gid.gid),
        flid_route: iface.flid_route,
        path_factor: iface.roce_path_factor,
        num_paths: number(iface.num_paths, auto_paths.min(128) as u8),
        path_bits,
        soft: device.soft,
        gid,
        reason,
    })
}

/// True for InfiniBand prefixes that are neither link-local nor site-local: such peers may be routers away.
fn needs_global(gid: Gid) -> bool {
    let prefix = gid.subnet_prefix();
    prefix != DEFAULT_SUBNET && prefix[..6] != [0xfe, 0xc0, 0, 0, 0, 0]
}

/// How good a RoCE GID is, best first. The order is UCX's, with unknown versions and broken addresses behind.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    broken: bool,
    version: u8,
    scope: u8,
}

impl Rank {
    fn of(entry: &GidEntry) -> Rank {
        let version = match entry.version {
            RoceVersion::V2 => 0,
            RoceVersion::V1 => 1,
            RoceVersion::Unknown => 2,
        };
        let scope = match (is_link_local(entry.gid), entry.gid.is_ipv4()) {
            (false, true) => 0,
            (false, false) => 1,
            (true, _) => 2,
        };
        Rank { broken: false, version, scope }
    }
}

/// True for fe80::/64, and for 169.254/16, which is the same in IPv4.
fn is_link_local(gid: Gid) -> bool {
    gid.is_link_local() || gid.to_ipv4().is_some_and(|ip| ip.is_link_local())
}

struct Ctx<'a> {
    name: String,
    attr: &'a PortAttr,
    gids: &'a [GidEntry],
    md: &'a MdConfig,
    iface: &'a IfaceConfig,
}

impl Ctx<'_> {
    fn no_device(&self, why: &str) -> Error {
        Error::new(ErrorKind::NoDevice, format!("{}: {why}", self.name))
    }

    fn bad_config(&self, why: String) -> Error {
        Error::new(ErrorKind::InvalidConfig, format!("{}: {why}", self.name))
    }

    fn no_gid(&self) -> Error {
        self.no_device(&format!(
            "no usable GID on {} - is the network interface in this network namespace, is it up and does it have an address?",
            self.name
        ))
    }

    /// The entry at a forced index.
    fn at_index(&self, index: u64) -> Result<(GidEntry, String)> {
        let len = self.attr.gid_table_len;
        if index >= len as u64 {
            return Err(
                self.bad_config(format!("UCX_IB_GID_INDEX asks for index {index} of {len}; {}", self.inventory()))
            );
        }
        match self.gids.iter().find(|g| u64::from(g.index) == index && g.gid.is_valid()) {
            Some(entry) => Ok((entry.clone(), "UCX_IB_GID_INDEX".into())),
            None => Err(self
                .bad_config(format!("UCX_IB_GID_INDEX asks for index {index}, which is empty; {}", self.inventory()))),
        }
    }

    /// The GIDs there are, for messages.
    fn inventory(&self) -> String {
        let describe = |g: &GidEntry| match &g.netdev {
            Some(netdev) => format!("{} {} on {netdev}", g.index, g.gid),
            None => format!("{} {}", g.index, g.gid),
        };
        let list: Vec<String> = self.gids.iter().filter(|g| g.gid.is_valid()).map(describe).collect();
        if list.is_empty() { "there are none".into() } else { format!("there are: {}", list.join(", ")) }
    }

    fn ethernet_gid(&self, probe: &dyn Fn(&GidEntry) -> Result<(), String>) -> Result<(GidEntry, String)> {
        let subnets = &self.iface.roce_subnets;
        if let Some(index) = self.md.gid_index.number() {
            if !subnets.is_all() {
                return Err(conflict("UCX_IB_GID_INDEX", "UCX_IB_ROCE_SUBNETS"));
            }
            return self.at_index(index);
        }
        let valid: Vec<&GidEntry> = self.gids.iter().filter(|g| g.gid.is_valid()).collect();
        if valid.is_empty() {
            return Err(self.no_gid());
        }
        let named: Vec<&GidEntry> = valid.iter().copied().filter(|g| self.is_named(g)).collect();
        if named.is_empty() {
            let wanted = &self.md.gid;
            return Err(self.bad_config(format!("UCX_IB_GID={wanted} matches no GID; {}", self.inventory())));
        }
        let mut allowed: Vec<(Rank, &GidEntry)> =
            named.iter().filter(|g| subnets.allows(g.gid.to_ip())).map(|g| (Rank::of(g), *g)).collect();
        if allowed.is_empty() {
            return Err(self.bad_config(format!("UCX_IB_ROCE_SUBNETS excludes every GID; {}", self.inventory())));
        }
        allowed.sort_by_key(|(rank, g)| (*rank, g.index));
        // Only as many are tried as needed: on devices of the kernel each trial is a system call that may sleep.
        let mut why_broken = None;
        for (rank, entry) in &allowed {
            match probe(entry) {
                Ok(()) => return Ok(((*entry).clone(), self.reason(*rank, allowed.len(), why_broken))),
                Err(why) => {
                    tracing::debug!("{}: gid index {} {} does not work: {why}", self.name, entry.index, entry.gid);
                    why_broken.get_or_insert((entry.gid, why));
                }
            }
        }
        let (rank, entry) = allowed[0];
        Ok((entry.clone(), self.reason(Rank { broken: true, ..rank }, allowed.len(), why_broken)))
    }

    /// True if the user's choice by content is this entry, or there is none.
    fn is_named(&self, entry: &GidEntry) -> bool {
        let wanted = self.md.gid.as_str();
        let by_netdev = entry.netdev.as_deref() == Some(wanted);
        let by_ip = wanted.parse::<IpAddr>().is_ok_and(|ip| Gid::from_ip(ip) == entry.gid);
        wanted.is_empty() || by_netdev || by_ip
    }

    fn reason(&self, rank: Rank, candidates: usize, broken: Option<(Gid, String)>) -> String {
        let mut parts = Vec::new();
        if !self.md.gid.is_empty() {
            parts.push("UCX_IB_GID".to_string());
        }
        match candidates {
            1 => parts.push("the only one".to_string()),
            n => parts.push(format!("best of {n}")),
        }
        if rank.scope == 2 {
            parts.push("link-local only".to_string());
        }
        if rank.version == 2 {
            parts.push("its RoCE version cannot be read".to_string());
        }
        match broken {
            Some((_, why)) if rank.broken => parts.push(format!("it does not seem to work: {why}")),
            Some((gid, why)) => parts.push(format!("passed over {gid}: {why}")),
            None => {}
        }
        parts.join(", ")
    }

    fn infiniband_gid(&self) -> Result<(GidEntry, String)> {
        let entry_at = |index: u8| self.gids.iter().find(|g| g.index == index && g.gid.is_valid());
        let (entry, reason) = if let Some(index) = self.md.gid_index.number() {
            self.at_index(index)?
        } else if !self.md.gid.is_empty() {
            let named = self.gids.iter().find(|g| g.gid.is_valid() && self.is_named(g));
            let wanted = &self.md.gid;
            let missing = || self.bad_config(format!("UCX_IB_GID={wanted} matches no GID; {}", self.inventory()));
            (named.ok_or_else(missing)?.clone(), "UCX_IB_GID".to_string())
        } else {
            let routed = entry_at(1).filter(|g| self.iface.flid_route && has_flid(g.gid));
            match (routed, entry_at(0)) {
                (Some(g), _) => (g.clone(), "it has a forwarding identifier".to_string()),
                (None, Some(g)) => (g.clone(), "the port's own".to_string()),
                (None, None) => return Err(self.no_device("the port has no GID: is the subnet manager running?")),
            }
        };
        let prefix = entry.gid.subnet_prefix();
        match self.md.subnet_prefix.0 {
            Some(wanted) if wanted != prefix => {
                Err(self.no_device(&format!("the port's subnet, of GID {}, is not UCX_IB_SUBNET_PREFIX", entry.gid)))
            }
            _ => Ok((entry, reason)),
        }
    }

    /// The partition: index in the table and key.
    fn pkey(&self) -> Result<(u16, PKey)> {
        if self.attr.link_layer == LinkLayer::Ethernet {
            return Ok((0, PKey::DEFAULT));
        }
        let wanted = |key: PKey| match self.iface.pkey {
            Hex::Auto => true,
            Hex::Is(n) => key.partition() == n & 0x7fff,
        };
        // An empty place in the table reads 0.
        let keys = || (0u16..).zip(self.attr.pkeys.iter().copied()).filter(|(_, key)| key.0 != 0 && wanted(*key));
        keys().find(|(_, key)| key.is_full_member()).or_else(|| keys().next()).ok_or_else(|| match self.iface.pkey {
            Hex::Auto => self.no_device("the port is in no partition"),
            Hex::Is(n) => self.bad_config(format!("UCX_IB_PKEY={n:#x}: the port is not in this partition")),
        })
    }

    /// The path bits that the port has, of those that are wanted.
    fn path_bits(&self) -> Vec<u8> {
        if self.attr.link_layer == LinkLayer::Ethernet {
            return vec![0];
        }
        let count = 1u16 << self.attr.lmc.min(7);
        let bits: Vec<u8> = self.iface.lid_path_bits.numbers().into_iter().filter(|b| u16::from(*b) < count).collect();
        if bits.is_empty() {
            tracing::warn!("{}: the port has none of the path bits of UCX_IB_LID_PATH_BITS; using 0", self.name);
            return vec![0];
        }
        bits
    }
}

/// True for a GID with a forwarding identifier and an interface id that the subnet manager made for it.
fn has_flid(gid: Gid) -> bool {
    flid(gid.subnet_prefix()).is_some() && gid.interface_id()[..3] == [0x00, 0x14, 0x05]
}

#[cfg(test)]
mod tests;
