//! Whether a device address can be reached from a local port, with the reason in words where it cannot. Start reading at
//! [`check`].
//!
//! The answer is found without sending anything, so it can be wrong where routing is unusual; each refusal names the
//! setting that overrides it.

mod kernel;

use std::{fmt, net::IpAddr};

use uct::{Error, ErrorKind, config::Units};

pub use kernel::KernelRoutes;
#[cfg(any(test, uct_fuzz))]
pub(crate) use kernel::{Route, look_up, parse_ipv4, parse_ipv6};

use crate::{
    addr::{AddrVersion, DeviceAddr, LinkAddr, ROCE_V2_PORT, check_loopback, flid},
    config::{IfaceConfig, ReachabilityMode, in_subnet},
    device::LinkLayer,
    gid::LocalPort,
    types::{Gid, PKey},
};

/// Why an address cannot be reached, in one sentence.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Unreachable(String);

impl Unreachable {
    fn new(reason: impl Into<String>) -> Self {
        Unreachable(reason.into())
    }

    /// The sentence. Never empty.
    pub fn reason(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Unreachable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unreachable {}

impl From<Unreachable> for Error {
    fn from(u: Unreachable) -> Self {
        Error::new(ErrorKind::Unreachable, u.0)
    }
}

/// What [`check`] asks of the host's IP routing. [`KernelRoutes`] is the real one.
pub trait Routes {
    /// Whether packets from `src` (an address of `netdev`, if known) can get to `dst`. A route that leaves by another
    /// interface does not count; `dst` being an address of this host does.
    ///
    /// # Errors
    /// Why not, as the beginning of a sentence.
    fn route(&self, src: IpAddr, netdev: Option<&str>, dst: IpAddr) -> Result<(), String>;

    /// How many bits of `ip`, an address of `netdev`, name its subnet.
    fn prefix_len(&self, ip: IpAddr, netdev: Option<&str>) -> Option<u8>;
}

const OVERRIDE_ROCE: &str = "UCX_IB_ROCE_REACHABILITY_MODE=all skips this check";

/// Whether `remote` can be reached from `local`.
///
/// # Errors
/// The reason, and the setting that overrides it.
pub fn check(
    local: &LocalPort,
    remote: &DeviceAddr,
    config: &IfaceConfig,
    routes: &dyn Routes,
) -> Result<(), Unreachable> {
    check_pkey(local.pkey, remote.pkey)?;
    match (local.link_layer, remote.link) {
        (LinkLayer::Ethernet, LinkAddr::Ethernet { gid, version }) => {
            check_soft(local, remote, gid)?;
            check_roce(local, gid, version, config, routes)
        }
        (LinkLayer::InfiniBand, LinkAddr::InfiniBand { prefix, .. }) => check_infiniband(local, remote, prefix),
        (LinkLayer::Ethernet, _) => Err(Unreachable::new("the peer is on InfiniBand, this port on Ethernet")),
        (LinkLayer::InfiniBand, _) => Err(Unreachable::new("the peer is on Ethernet, this port on InfiniBand")),
    }
}

/// [`check`] for the bytes of a packed address. Any byte string gives an answer.
///
/// # Errors
/// As [`check`], and what is wrong with the bytes.
pub fn check_bytes(
    local: &LocalPort,
    remote: &[u8],
    config: &IfaceConfig,
    routes: &dyn Routes,
) -> Result<(), Unreachable> {
    let remote = DeviceAddr::parse_exact(remote).map_err(|e| Unreachable::new(e.to_string()))?;
    check(local, &remote, config, routes)
}

/// True if `remote` is the very port `local`.
///
/// InfiniBand ports on the default subnet may have equal LIDs in different fabrics, so the interface id counts where
/// the address carries it; without it, equal LIDs and prefixes are all there is to go by.
pub fn is_same_device(local: &LocalPort, remote: &DeviceAddr) -> bool {
    let own = local.gid.gid;
    match remote.link {
        LinkAddr::Ethernet { gid, .. } => {
            let same_socket = match (local.soft, remote.trailer) {
                (Some(here), Some(there)) => (here.udp_port, here.host_id) == (there.soft.udp_port, there.soft.host_id),
                (Some(here), None) => here.udp_port == ROCE_V2_PORT,
                (None, _) => remote.trailer.is_none(),
            };
            local.link_layer == LinkLayer::Ethernet && gid == own && same_socket
        }
        LinkAddr::InfiniBand { lid, prefix, if_id } => {
            local.link_layer == LinkLayer::InfiniBand
                && lid == local.lid
                && prefix == own.subnet_prefix()
                && if_id.is_none_or(|id| id == own.interface_id())
        }
    }
}

fn check_pkey(local: PKey, remote: PKey) -> Result<(), Unreachable> {
    if local.matches(remote) {
        return Ok(());
    }
    let (ours, theirs) = (local.partition(), remote.partition());
    Err(Unreachable::new(if ours == theirs {
        format!("both sides are limited members of partition {ours:#x}; UCX_IB_PKEY chooses another")
    } else {
        format!("the peer is in partition {theirs:#x}, this port in {ours:#x}; UCX_IB_PKEY chooses another")
    }))
}

/// What concerns soft devices: loopback addresses, and UDP ports that hardware cannot send to.
fn check_soft(local: &LocalPort, remote: &DeviceAddr, gid: Gid) -> Result<(), Unreachable> {
    check_loopback(local, remote, gid).map_err(Unreachable::new)?;
    match local.soft {
        None if remote.udp_port() != ROCE_V2_PORT => Err(Unreachable::new(format!(
            "the peer listens on UDP port {}, and this device sends to {ROCE_V2_PORT} only; set UCX_SOFT_PORT there",
            remote.udp_port()
        ))),
        _ => Ok(()),
    }
}

fn check_roce(
    local: &LocalPort,
    gid: Gid,
    version: AddrVersion,
    config: &IfaceConfig,
    routes: &dyn Routes,
) -> Result<(), Unreachable> {
    let mode = config.reachability_mode();
    if version == AddrVersion::Any || mode == ReachabilityMode::All {
        return Ok(());
    }
    let ours = AddrVersion::from(local.gid.version);
    if ours != version && ours != AddrVersion::Any {
        return Err(Unreachable::new(format!("the peer speaks {version}, this port {ours}; {OVERRIDE_ROCE}")));
    }
    if version != AddrVersion::V2 {
        return Ok(());
    }
    let (src, dst) = (local.gid.gid.to_ip(), gid.to_ip());
    if src.is_ipv4() != dst.is_ipv4() {
        let family = |ip: IpAddr| if ip.is_ipv4() { "IPv4" } else { "IPv6" };
        let (theirs, ours) = (family(dst), family(src));
        return Err(Unreachable::new(format!(
            "the peer has an {theirs} address, this port an {ours} one; UCX_IB_GID chooses another, {OVERRIDE_ROCE}"
        )));
    }
    let netdev = local.gid.netdev.as_deref();
    if mode == ReachabilityMode::LocalSubnet {
        return check_subnet(src, dst, netdev, config, routes);
    }
    routes.route(src, netdev, dst).map_err(|why| Unreachable::new(format!("{why}; {OVERRIDE_ROCE}")))
}

fn check_subnet(
    src: IpAddr,
    dst: IpAddr,
    netdev: Option<&str>,
    config: &IfaceConfig,
    routes: &dyn Routes,
) -> Result<(), Unreachable> {
    let bits = if src.is_ipv4() { 32 } else { 128 };
    let len = match config.roce_subnet_prefix_len {
        Units::Is(n) => u8::try_from(n).unwrap_or(bits).min(bits),
        Units::Inf => bits,
        Units::Auto => routes.prefix_len(src, netdev).ok_or_else(|| {
            Unreachable::new(format!(
                "the subnet of {src} is not known; UCX_IB_ROCE_SUBNET_PREFIX_LEN tells it, {OVERRIDE_ROCE}"
            ))
        })?,
    };
    if in_subnet(dst, src, len) {
        return Ok(());
    }
    Err(Unreachable::new(format!("{dst} is not in the local subnet, {src}/{len}; {OVERRIDE_ROCE}")))
}

fn check_infiniband(local: &LocalPort, remote: &DeviceAddr, prefix: [u8; 8]) -> Result<(), Unreachable> {
    let own = local.gid.gid.subnet_prefix();
    let routable = local.flid_route && flid(own).is_some() && flid(prefix).is_some();
    // With IS_GLOBAL the user says that routers lead to global addresses.
    let routers = local.force_global && remote.gid().is_some();
    if prefix == own || routable || routers {
        return Ok(());
    }
    let text =
        |p: [u8; 8]| p.chunks_exact(2).map(|c| format!("{:02x}{:02x}", c[0], c[1])).collect::<Vec<_>>().join(":");
    Err(Unreachable::new(format!(
        "the peer is in InfiniBand subnet {}, this port in {}; UCX_IB_IS_GLOBAL=y on both sides uses routers",
        text(prefix),
        text(own)
    )))
}

#[cfg(test)]
mod tests;
