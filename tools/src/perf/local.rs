//! This side of the test: transport, device, worker and interface.

use std::{
    fmt::Write,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use ib::addr::{DeviceAddr, LinkAddr};
use parking_lot::Mutex;
use uct::{
    Iface, IfaceParams, Md, Registry, Worker,
    config::Env,
    ep::{EpFailure, FailureAction},
    iface::Caps,
    md::Transport,
};

use super::{
    alert::Alert,
    failure::{Failure, Result},
    message::{Limits, Side, VERSION, to_hex},
    options::{ConnectMode, DeviceArg},
};

/// The transport if the user names none.
const TRANSPORT: &str = "ud";

/// What one side has open. The order of the fields is the order of closing.
pub(crate) struct Local {
    pub(crate) iface: Iface,
    pub(crate) md: Md,
    pub(crate) worker: Worker,
    /// Raised when there is news for the main thread.
    pub(crate) alert: Arc<Alert>,
    /// Endpoints that the transport has declared dead.
    pub(crate) failures: Arc<Mutex<Vec<EpFailure>>>,
    /// What the peer is told, the endpoint address still missing.
    pub(crate) side: Side,
}

impl Local {
    /// Opens an interface on the device of the user's choice, or on the first that works.
    pub(crate) fn open(
        registry: &Registry,
        env: &Env,
        transport: Option<&str>,
        device: Option<&DeviceArg>,
        alert: Arc<Alert>,
    ) -> Result<Local> {
        let (transport, md, port) = choose(registry, env, transport, device)?;
        let worker = Worker::new(crate::worker_params(env)?)?;
        let failures = Arc::new(Mutex::new(Vec::new()));
        let (f, a) = (failures.clone(), alert.clone());
        let params = IfaceParams::default().on_error(Arc::new(move |e: &EpFailure| {
            f.lock().push(e.clone());
            a.raise();
            FailureAction::Endpoint
        }));
        let iface = transport.open_iface(&md, &worker, port, &params, env)?;
        let attr = iface.attr();
        let limits = Limits {
            short: attr.am.max_short.map(usize::from),
            bcopy: attr.am.max_bcopy.map(usize::from),
            zcopy: attr.am.max_zcopy.map(usize::from),
        };
        let side = Side {
            version: VERSION.into(),
            host: hostname(),
            pid: std::process::id(),
            cpu: None,
            transport: attr.transport.into(),
            device: attr.device.clone(),
            address: show(&iface.device_address()),
            limits,
            device_addr: to_hex(&iface.device_address()),
            iface_addr: to_hex(&iface.iface_address()),
            ep_addr: None,
        };
        Ok(Local { iface, md, worker, alert, failures, side })
    }

    /// How to connect: as the user says, if the transport can, or as the transport can.
    pub(crate) fn connect_mode(&self, wanted: Option<ConnectMode>) -> Result<ConnectMode> {
        let caps = self.iface.attr().caps;
        let can = |m: ConnectMode| match m {
            ConnectMode::Iface => caps.contains(Caps::CONNECT_TO_IFACE),
            ConnectMode::Ep => caps.contains(Caps::CONNECT_TO_EP),
        };
        match wanted {
            Some(m) if can(m) => Ok(m),
            Some(m) => Err(Failure::new(format!(
                "{} on {} cannot connect with --connect {}; leave the option out",
                self.side.transport,
                self.side.device,
                m.name()
            ))),
            None => Ok(if can(ConnectMode::Iface) { ConnectMode::Iface } else { ConnectMode::Ep }),
        }
    }
}

fn hostname() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").map(|s| s.trim().to_string()).unwrap_or_default()
}

/// A device address as people write it: IP address and UDP port, or what else it consists of.
fn show(device_addr: &[u8]) -> String {
    let Ok(a) = DeviceAddr::parse_exact(device_addr) else { return to_hex(device_addr) };
    match (a.link, a.trailer) {
        (LinkAddr::Ethernet { gid, .. }, Some(_)) => {
            SocketAddr::new(IpAddr::V6(gid.0.into()).to_canonical(), a.udp_port()).to_string()
        }
        (LinkAddr::Ethernet { gid, .. }, None) => IpAddr::V6(gid.0.into()).to_canonical().to_string(),
        (LinkAddr::InfiniBand { .. }, _) => a.to_string(),
    }
}

fn choose(
    registry: &Registry,
    env: &Env,
    transport: Option<&str>,
    device: Option<&DeviceArg>,
) -> Result<(Arc<dyn Transport>, Md, u8)> {
    let transport = match transport {
        Some(name) => registry
            .transport(name)
            .map_err(|_| Failure::new(format!("there is no transport `{name}`")).suffix(usable(registry, env)))?,
        None => registry
            .transport(TRANSPORT)
            .ok()
            .or(registry.transports().first())
            .ok_or_else(|| Failure::new("this build has no transport"))?,
    };
    let mut why_not = None;
    for c in registry.components() {
        for d in c.devices(env)? {
            if device.is_some_and(|w| w.name != d.name) {
                continue;
            }
            let tried = match d.unusable {
                Some(why) => Err(Failure::new(why)),
                None => try_device(registry, transport, &d.name, device.and_then(|w| w.port), env),
            };
            match tried {
                Ok((md, port)) => return Ok((transport.clone(), md, port)),
                Err(e) => {
                    why_not.get_or_insert((d.name, e));
                }
            }
        }
    }
    Err(match (device, why_not) {
        (_, Some((name, why))) => {
            why.context(format!("{} cannot use device {name}", transport.name())).suffix(usable(registry, env))
        }
        (Some(w), None) => Failure::new(format!("there is no device `{}`", w.name))
            .suffix(usable(registry, env))
            .suffix(how_to_get_more(registry)),
        (None, None) => Failure::new("this host has no device for any transport"),
    })
}

fn try_device(
    registry: &Registry,
    transport: &Arc<dyn Transport>,
    device: &str,
    port: Option<u8>,
    env: &Env,
) -> Result<(Md, u8)> {
    let md = registry.open_md(device, env)?;
    transport.supports(&md).map_err(Failure::new)?;
    let ports = md.ports()?;
    let port = match port {
        Some(p) if ports.iter().any(|q| q.port == p) => p,
        Some(p) => {
            let there: Vec<_> = ports.iter().map(|q| q.port.to_string()).collect();
            return Err(Failure::new(format!("it has no port {p}, only {}", there.join(", "))));
        }
        None => {
            ports.iter().find(|q| q.active).map(|q| q.port).ok_or_else(|| Failure::new("no port of it is active"))?
        }
    };
    Ok((md, port))
}

/// The pairs of transport and device that work on this host, in words, if any do.
fn usable(registry: &Registry, env: &Env) -> Option<String> {
    let mut pairs = String::new();
    for t in registry.transports() {
        for c in registry.components() {
            for d in c.devices(env).unwrap_or_default() {
                if d.unusable.is_some() {
                    continue;
                }
                if let Ok((_, port)) = try_device(registry, t, &d.name, None, env) {
                    let comma = if pairs.is_empty() { "" } else { ", " };
                    // Writing to a string cannot fail.
                    let _ = write!(pairs, "{comma}-x {} -d {}:{port}", t.name(), d.name);
                }
            }
        }
    }
    (!pairs.is_empty()).then(|| format!("what works on this host: {pairs}"))
}

/// What to do about devices that this build does not know.
fn how_to_get_more(registry: &Registry) -> Option<String> {
    let has_ib = registry.components().iter().any(|c| c.name() == "ib");
    ib::component::RDMA_CORE_HINT.filter(|_| has_ib).map(str::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_look_as_people_write_them() {
        // RoCE v2, IPv4 in a GID, as UCX packs it: there is no UDP port in it.
        let mut bare = vec![0x48];
        bare.extend_from_slice(&std::net::Ipv4Addr::new(10, 77, 0, 1).to_ipv6_mapped().octets());
        assert_eq!(show(&bare), "10.77.0.1");
        assert_eq!(show(&[0x48, 1]), "4801");
        assert_eq!(show(&[]), "");
    }
}
