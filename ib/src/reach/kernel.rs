//! [`KernelRoutes`]: the kernel's routing tables, read from `/proc`, without netlink and without privileges.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket},
};

use super::Routes;
use crate::{addr::ROCE_V2_PORT, config::in_subnet};

/// The routing of this network namespace.
///
/// Where the interface is known, the route with the longest prefix in the main table must leave by it. Where it is not, or
/// the main table has no route (other tables and policies are not shown there), the kernel is asked to connect a UDP
/// socket, which sends nothing.
#[derive(Copy, Clone, Debug, Default)]
pub struct KernelRoutes;

/// One route of a routing table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Route {
    pub(super) net: IpAddr,
    pub(super) len: u8,
    pub(super) netdev: String,
    pub(super) gateway: bool,
    pub(super) reject: bool,
}

const RTF_UP: u32 = 1;
const RTF_GATEWAY: u32 = 2;
const RTF_REJECT: u32 = 0x200;

/// The lines of `/proc/net/route`: interface, destination, gateway, flags, three counters, mask, three more. Addresses are
/// words in network order printed as numbers of this machine.
pub(crate) fn parse_ipv4(text: &str) -> Vec<Route> {
    let hex = |s: &str| u32::from_str_radix(s, 16).ok();
    let route = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let &[netdev, net, _, flags, _, _, _, mask, ..] = fields.as_slice() else { return None };
        let flags = hex(flags)?;
        let mask = u32::from_be_bytes(hex(mask)?.to_ne_bytes());
        (flags & RTF_UP != 0).then_some(Route {
            net: Ipv4Addr::from(hex(net)?.to_ne_bytes()).into(),
            len: mask.leading_ones() as u8,
            netdev: netdev.to_string(),
            gateway: flags & RTF_GATEWAY != 0,
            reject: flags & RTF_REJECT != 0,
        })
    };
    text.lines().skip(1).filter_map(route).collect()
}

/// The lines of `/proc/net/ipv6_route`: destination, length, source, length, next hop, three counters, flags, interface.
pub(crate) fn parse_ipv6(text: &str) -> Vec<Route> {
    let route = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let &[net, len, _, _, _, _, _, _, flags, netdev] = fields.as_slice() else { return None };
        let flags = u32::from_str_radix(flags, 16).ok()?;
        (flags & RTF_UP != 0 && net.len() == 32).then_some(Route {
            net: Ipv6Addr::from(u128::from_str_radix(net, 16).ok()?).into(),
            len: u8::from_str_radix(len, 16).ok().filter(|len| *len <= 128)?,
            netdev: netdev.to_string(),
            gateway: flags & RTF_GATEWAY != 0,
            reject: flags & RTF_REJECT != 0,
        })
    };
    text.lines().filter_map(route).collect()
}

/// What a table says about a destination.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Answer {
    /// The best route leaves by the interface.
    Yes,
    /// The best route leaves by this one.
    Elsewhere(String),
    /// The best route says that there is none.
    Rejected,
    /// No route.
    Silent,
}

/// The route of the longest prefix decides; of several with one length any may leave by `netdev`.
pub(crate) fn look_up(table: &[Route], dst: IpAddr, netdev: &str) -> Answer {
    let matching = || table.iter().filter(|r| in_subnet(dst, r.net, r.len));
    let Some(longest) = matching().map(|r| r.len).max() else { return Answer::Silent };
    let best = || matching().filter(|r| r.len == longest);
    if best().any(|r| !r.reject && r.netdev == netdev) {
        return Answer::Yes;
    }
    match best().find(|r| !r.reject) {
        // A route by the loopback interface is one to this host itself, also to addresses of other routing domains.
        Some(r) if r.netdev == "lo" => Answer::Yes,
        Some(r) => Answer::Elsewhere(r.netdev.clone()),
        // The kernel keeps a rejecting default route for IPv6 where there is no other.
        None if longest == 0 => Answer::Silent,
        None => Answer::Rejected,
    }
}

/// The table of an address's family. Of this thread's network namespace, which may not be the process's.
fn table(family_of: IpAddr) -> Vec<Route> {
    let read = |name: &str| {
        let of_thread = fs::read_to_string(format!("/proc/thread-self/net/{name}"));
        of_thread.or_else(|_| fs::read_to_string(format!("/proc/net/{name}"))).unwrap_or_default()
    };
    match family_of {
        IpAddr::V4(_) => parse_ipv4(&read("route")),
        IpAddr::V6(_) => parse_ipv6(&read("ipv6_route")),
    }
}

/// Has the kernel choose a route from `src` to `dst`. Connecting a UDP socket does that and sends nothing.
fn connect(src: IpAddr, dst: IpAddr) -> Result<(), String> {
    let connected = UdpSocket::bind((src, 0)).and_then(|s| s.connect((dst, ROCE_V2_PORT)));
    connected.map_err(|e| match e.raw_os_error() {
        Some(errno) => format!("no route from {src} to {dst} ({})", uct::error::errno_text(errno)),
        None => format!("no route from {src} to {dst} ({e})"),
    })
}

impl Routes for KernelRoutes {
    fn route(&self, src: IpAddr, netdev: Option<&str>, dst: IpAddr) -> Result<(), String> {
        // Binding to an address succeeds only if it is one of this host's.
        if dst == src || dst.is_loopback() || UdpSocket::bind((dst, 0)).is_ok() {
            return Ok(());
        }
        let Some(netdev) = netdev else { return connect(src, dst) };
        match look_up(&table(dst), dst, netdev) {
            Answer::Yes => Ok(()),
            Answer::Elsewhere(other) => Err(format!("the route to {dst} leaves by {other} and not by {netdev}")),
            Answer::Rejected => Err(format!("the kernel's routes reject {dst}")),
            Answer::Silent => connect(src, dst),
        }
    }

    fn prefix_len(&self, ip: IpAddr, netdev: Option<&str>) -> Option<u8> {
        if ip.is_loopback() {
            return Some(if ip.is_ipv4() { 8 } else { 128 });
        }
        let table = table(ip);
        let direct = table.iter().filter(|r| {
            !r.gateway && !r.reject && r.len > 0 && netdev.is_none_or(|n| n == r.netdev) && in_subnet(ip, r.net, r.len)
        });
        // An address of this host has a route of its full length to itself, which is not its subnet.
        let bits = if ip.is_ipv4() { 32 } else { 128 };
        direct.map(|r| r.len).filter(|len| *len < bits).max()
    }
}
