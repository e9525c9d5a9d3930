//! Two ports of this process in one IP subnet: the kernel routes by subnet, so packets for one may leave by the other, and
//! answers to neighbour requests come from either. It works until it does not; one warning names both.

use std::net::IpAddr;

use parking_lot::Mutex;

use crate::{
    config::in_subnet,
    device::LinkLayer,
    gid::LocalPort,
    reach::{KernelRoutes, Routes},
};

/// A port that this process uses.
struct InUse {
    port: String,
    netdev: String,
    ip: IpAddr,
    len: u8,
}

/// The ports that this process has used, each once.
#[derive(Default)]
struct Ports(Vec<InUse>);

static PORTS: Mutex<Ports> = Mutex::new(Ports(Vec::new()));

impl Ports {
    /// Takes note of a port. Returns the warning, if it shares a subnet with one on another network interface; for each port
    /// at most once.
    fn note(&mut self, local: &LocalPort, routes: &dyn Routes) -> Option<String> {
        let netdev = local.gid.netdev.as_ref().filter(|_| local.link_layer == LinkLayer::Ethernet)?;
        let ip = local.gid.gid.to_ip();
        if ip.is_loopback() {
            return None;
        }
        let port = format!("{}:{}", local.device, local.port);
        if self.0.iter().any(|p| p.port == port && p.ip == ip) {
            return None;
        }
        let len = routes.prefix_len(ip, Some(netdev))?;
        let other =
            self.0.iter().find(|p| p.port != port && p.netdev != *netdev && p.len == len && in_subnet(ip, p.ip, len));
        let text = other.map(|o| {
            format!(
                "{port} ({ip} on {netdev}) and {} ({} on {}) are in one subnet of {len} bits: packets for one may come and go \
                 by the other; give them subnets of their own",
                o.port, o.ip, o.netdev
            )
        });
        self.0.push(InUse { port, netdev: netdev.clone(), ip, len });
        text
    }
}

/// Warns if a port that is about to be used shares its subnet with one in use. Reads the kernel's routes, once for each port.
pub(crate) fn warn_if_shared(local: &LocalPort) {
    let text = PORTS.lock().note(local, &KernelRoutes);
    if let Some(text) = text {
        tracing::warn!("{text}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Gid;

    struct Net24;

    impl Routes for Net24 {
        fn route(&self, _: IpAddr, _: Option<&str>, _: IpAddr) -> Result<(), String> {
            Ok(())
        }

        fn prefix_len(&self, ip: IpAddr, _: Option<&str>) -> Option<u8> {
            (!ip.is_ipv6()).then_some(24)
        }
    }

    fn port(device: &str, ip: &str, netdev: Option<&str>) -> LocalPort {
        let mut port = LocalPort::example(LinkLayer::Ethernet, Gid::from_ip(ip.parse().unwrap()));
        port.device = device.into();
        port.gid.netdev = netdev.map(String::from);
        port
    }

    #[test]
    fn two_ports_in_one_subnet_are_named_once() {
        let mut ports = Ports::default();
        let mut note = |device, ip, netdev| ports.note(&port(device, ip, netdev), &Net24);
        assert_eq!(note("rxe0", "10.0.0.1", Some("eth0")), None);
        assert_eq!(note("rxe0", "10.0.0.1", Some("eth0")), None, "the same again");
        assert_eq!(note("rxe1", "10.0.1.1", Some("eth1")), None, "another subnet");
        assert_eq!(note("rxe2", "10.0.0.9", Some("eth0")), None, "the same interface");
        let text = note("rxe3", "10.0.0.2", Some("eth3")).expect("a warning");
        for part in ["rxe3:1 (10.0.0.2 on eth3)", "rxe0:1 (10.0.0.1 on eth0)", "24 bits"] {
            assert!(text.contains(part), "no {part} in {text}");
        }
        assert_eq!(note("rxe3", "10.0.0.2", Some("eth3")), None, "once");
        // Nothing is known, or nothing can be wrong.
        assert_eq!(note("rxe4", "10.0.0.3", None), None);
        assert_eq!(note("rxe5", "127.0.0.1", Some("lo")), None);
        assert_eq!(note("rxe6", "fd00::1", Some("eth6")), None);
        let ib = LocalPort { link_layer: LinkLayer::InfiniBand, ..port("ib0", "10.0.0.4", Some("ib0")) };
        assert_eq!(ports.note(&ib, &Net24), None);
    }
}
