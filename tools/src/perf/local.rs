//! This side of the test: transport, device, worker and interface.

use std::{fmt::Write, sync::Arc};

use parking_lot::Mutex;
use uct::{
    Iface, IfaceParams, Md, Registry, Worker, WorkerParams,
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
        let worker = Worker::new(WorkerParams::default())?;
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
            transport: attr.transport.into(),
            device: attr.device.clone(),
            address: address(&md, port),
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

/// The port's network address as the memory domain shows it, for people.
fn address(md: &Md, port: u8) -> String {
    let ports = md.ports().unwrap_or_default();
    let facts = ports.iter().find(|p| p.port == port).map(|p| &p.facts[..]).unwrap_or_default();
    ["address", "ip", "gid"]
        .iter()
        .find_map(|want| facts.iter().find(|(name, _)| name.to_ascii_lowercase().contains(want)))
        .map(|(_, value)| value.clone())
        .unwrap_or_default()
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
            .map_err(|_| Failure::new(format!("there is no transport `{name}`; {}", usable(registry, env))))?,
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
                None => try_device(&**c, transport, &d.name, device.and_then(|w| w.port), env),
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
            why.context(format!("{} cannot use device {name}", transport.name())).suffix(&usable(registry, env))
        }
        (Some(w), None) => Failure::new(format!("there is no device `{}`; {}", w.name, usable(registry, env))),
        (None, None) => Failure::new("this host has no device for any transport"),
    })
}

fn try_device(
    component: &dyn uct::md::Component,
    transport: &Arc<dyn Transport>,
    device: &str,
    port: Option<u8>,
    env: &Env,
) -> Result<(Md, u8)> {
    let md = Md::from_component(component.open(device, env)?);
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

/// The pairs of transport and device that work on this host, in words.
fn usable(registry: &Registry, env: &Env) -> String {
    let mut pairs = String::new();
    for t in registry.transports() {
        for c in registry.components() {
            for d in c.devices(env).unwrap_or_default() {
                if d.unusable.is_some() {
                    continue;
                }
                if let Ok((_, port)) = try_device(&**c, t, &d.name, None, env) {
                    let comma = if pairs.is_empty() { "" } else { ", " };
                    // Writing to a string cannot fail.
                    let _ = write!(pairs, "{comma}-x {} -d {}:{port}", t.name(), d.name);
                }
            }
        }
    }
    if pairs.is_empty() { "nothing works on this host".into() } else { format!("what works on this host: {pairs}") }
}
