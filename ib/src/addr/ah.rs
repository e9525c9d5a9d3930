//! From a device address to what an address handle is made of.

use uct::{Error, ErrorKind, Result};

use super::{DeviceAddr, LinkAddr, ROCE_V2_PORT};
use crate::{
    device::{AhAttr, GlobalRoute, LinkLayer, SoftAv},
    gid::LocalPort,
    types::{Gid, Lid},
};

/// Set in the source-port seed of every RoCE path, so that the UDP source port lies in the dynamic range.
const ROCE_DLID_BASE: u16 = 0xc000;

/// The attributes of an address handle from `local` to `remote` over path `path_index`, filled in as UCX does: equal
/// addresses and paths give equal attributes.
///
/// The local GID goes in by value. For soft devices the peer's UDP port and host id are part of the attributes, because
/// they are part of who the peer is.
///
/// # Errors
/// `Unreachable` if no packet can get there however it is routed: another kind of network, a loopback address of another
/// host, a GID that cannot be a destination. Whether there is a route is for [`reach`](crate::reach) to say.
pub fn ah_attr(local: &LocalPort, remote: &DeviceAddr, path_index: u8) -> Result<AhAttr> {
    match (local.link_layer, remote.link) {
        (LinkLayer::Ethernet, LinkAddr::Ethernet { gid, .. }) => {
            check_loopback(local, remote, gid).map_err(|why| unreachable(local, remote, why))?;
            Ok(ethernet(local, remote, gid, path_index))
        }
        (LinkLayer::InfiniBand, LinkAddr::InfiniBand { lid, prefix, .. }) => {
            Ok(infiniband(local, remote, lid, prefix, path_index))
        }
        (LinkLayer::Ethernet, _) => Err(unreachable(local, remote, "the peer is on InfiniBand, this port on Ethernet")),
        (LinkLayer::InfiniBand, _) => {
            Err(unreachable(local, remote, "the peer is on Ethernet, this port on InfiniBand"))
        }
    }
}

/// Refuses loopback addresses of other hosts.
///
/// # Errors
/// The reason and the way out.
pub(crate) fn check_loopback(local: &LocalPort, remote: &DeviceAddr, gid: Gid) -> Result<(), &'static str> {
    let here = local.soft.map_or(0, |s| s.host_id);
    let there = remote.trailer.map_or(0, |t| t.soft.host_id);
    // 0 is "not told", by a peer that may well be on this host.
    let apart = here != 0 && there != 0 && here != there;
    if apart && gid.is_loopback() {
        return Err("the peer gave a loopback address and runs on another host or in another network namespace; \
                    set UCX_SOFT_ADDR or UCX_SOFT_NETDEV there");
    }
    if apart && local.gid.gid.is_loopback() {
        return Err("this device has a loopback address and the peer runs on another host or in another network \
                    namespace; set UCX_SOFT_ADDR or UCX_SOFT_NETDEV here");
    }
    Ok(())
}

fn unreachable(local: &LocalPort, remote: &DeviceAddr, why: &str) -> Error {
    Error::new(ErrorKind::Unreachable, format!("{}:{} to {remote}: {why}", local.device, local.port))
}

fn ethernet(local: &LocalPort, remote: &DeviceAddr, gid: Gid, path_index: u8) -> AhAttr {
    let seed = local.path_factor.wrapping_mul(u32::from(path_index));
    AhAttr {
        port: local.port,
        sl: local.sl,
        src_path_bits: 0,
        static_rate: 0,
        // The lower 16 bits: some drivers make the UDP source port of it.
        dlid: Lid(ROCE_DLID_BASE | seed as u16),
        grh: Some(GlobalRoute { flow_label: !seed, ..route(local, gid) }),
        soft: match local.soft {
            // Only soft devices look at it; for others it would only split equal keys.
            None => SoftAv::default(),
            Some(_) => SoftAv {
                udp_port: remote.trailer.map_or(ROCE_V2_PORT, |t| t.soft.udp_port),
                host_id: remote.trailer.map_or(0, |t| t.soft.host_id),
            },
        },
    }
}

fn infiniband(local: &LocalPort, remote: &DeviceAddr, lid: Lid, prefix: [u8; 8], path_index: u8) -> AhAttr {
    let local_prefix = local.gid.gid.subnet_prefix();
    let path_bits = match local.path_bits.len() {
        0 => 0,
        count => local.path_bits[usize::from(path_index) % count],
    };
    // Between subnets with a forwarding identifier, switches take that instead of the LID.
    let routed = local.flid_route && prefix[6..] != local_prefix[6..] && flid(local_prefix).is_some();
    let base = match flid(prefix) {
        Some(id) if routed => id,
        _ => lid.0,
    };
    let global = remote.gid().filter(|_| local.force_global || prefix != local_prefix);
    AhAttr {
        port: local.port,
        sl: local.sl,
        src_path_bits: path_bits,
        static_rate: 0,
        dlid: Lid(base | u16::from(path_bits)),
        grh: global.map(|gid| route(local, gid)),
        soft: SoftAv::default(),
    }
}

fn route(local: &LocalPort, dgid: Gid) -> GlobalRoute {
    GlobalRoute {
        dgid,
        sgid: local.gid.gid,
        hop_limit: local.hop_limit,
        traffic_class: local.traffic_class,
        flow_label: 0,
    }
}

/// The forwarding identifier in a subnet prefix fec0:0:flid:subnet, if there is one.
pub(crate) fn flid(prefix: [u8; 8]) -> Option<u16> {
    match prefix {
        [0xfe, 0xc0, 0, 0, a, b, ..] if (a, b) != (0, 0) => Some(u16::from_be_bytes([a, b])),
        _ => None,
    }
}
