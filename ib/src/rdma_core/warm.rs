//! [`resolve_ahead`]: lets the kernel find the neighbour before an address handle asks for it.
//!
//! When a neighbour answers the kernel's ARP at once (same host, same switch), soft-RoCE misses the answer and sleeps a
//! full second in `create_ah`. One empty datagram to the peer before starts the same resolution in the IP stack, where
//! nothing is missed, and `create_ah` then takes milliseconds.

use std::net::{IpAddr, SocketAddr, SocketAddrV6, UdpSocket};

use crate::types::Gid;

/// The discard service: a datagram to it is thrown away, or refused by an ICMP message that nobody waits for.
const DISCARD: u16 = 9;

/// Sends one empty datagram from the address of `sgid` to that of `dgid`. `scope` is the number of the interface, for
/// link-local addresses. Best effort: what `create_ah` then says is what counts.
pub(super) fn resolve_ahead(sgid: Gid, dgid: Gid, scope: u32) {
    let at = |ip: IpAddr, port| match ip {
        IpAddr::V6(v6) if v6.is_unicast_link_local() => SocketAddr::V6(SocketAddrV6::new(v6, port, 0, scope)),
        ip => SocketAddr::new(ip, port),
    };
    let (from, to) = (sgid.to_ip(), dgid.to_ip());
    if from.is_ipv4() != to.is_ipv4() || to.is_multicast() {
        return;
    }
    let sent = UdpSocket::bind(at(from, 0)).and_then(|socket| {
        socket.set_nonblocking(true)?;
        socket.send_to(&[], at(to, DISCARD))
    });
    if let Err(e) = sent {
        tracing::debug!("no datagram from {sgid} to {dgid} ahead of its address handle: {e}");
    }
}
