//! What there is to choose from: transports on device ports, as far as `UCX_TLS` and `UCX_NET_DEVICES` allow them.

use std::{fmt, sync::Arc};

use crate::{
    config::{Env, ProcessConfig, first_time},
    error::Result,
    md::{Md, PortResource, Registry, Transport},
};

const BY_DEVICES: &str = "not allowed by UCX_NET_DEVICES";

/// A transport on a device port.
#[derive(Clone)]
pub struct Resource {
    /// The transport.
    pub transport: Arc<dyn Transport>,
    /// The device's name.
    pub device: String,
    /// The port, from 1.
    pub port: u8,
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}:{}", self.transport.name(), self.device, self.port)
    }
}

impl fmt::Debug for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Resource({self})")
    }
}

/// What can be used, and why the rest cannot.
#[derive(Clone, Debug, Default)]
pub struct Resources {
    /// What can be used: by component, device, port and transport, in the order in which they were registered.
    pub usable: Vec<Resource>,
    /// What cannot be used, as (name, reason).
    pub refused: Vec<(String, String)>,
}

impl Registry {
    /// Looks at every device that the settings allow, by opening it, and at what works on it. Entries of
    /// `UCX_NET_DEVICES` that name nothing are warned about, once each, with what there is.
    ///
    /// # Errors
    /// `InvalidConfig` for a setting that does not parse. Devices that do not work are among the refused.
    pub fn resources(&self, env: &Env) -> Result<Resources> {
        let config = ProcessConfig::from_env(env)?;
        let mut found = Resources::default();
        let mut ports = Vec::new();
        for component in self.components() {
            for device in component.devices(env)? {
                if !config.net_devices.may_allow(&device.name) {
                    ports.push((device.name.clone(), 1));
                    found.refused.push((device.name, BY_DEVICES.into()));
                    continue;
                }
                let opened = match device.unusable {
                    Some(why) => Err(why),
                    None => {
                        self.open_md(&device.name, env).and_then(|md| Ok((md.ports()?, md))).map_err(|e| e.to_string())
                    }
                };
                match opened {
                    Err(why) => found.refused.push((device.name, why)),
                    Ok((device_ports, md)) => {
                        for port in device_ports {
                            self.add_port(&mut found, &config, &md, &device.name, &port);
                            ports.push((device.name.clone(), port.port));
                        }
                    }
                }
            }
        }
        for missing in config.net_devices.unmatched(&ports) {
            let line = format!("UCX_NET_DEVICES: {missing}");
            if first_time(&line) {
                tracing::warn!("{line}");
            }
        }
        Ok(found)
    }

    fn add_port(&self, found: &mut Resources, config: &ProcessConfig, md: &Md, device: &str, port: &PortResource) {
        for transport in self.transports() {
            let resource = Resource { transport: transport.clone(), device: device.to_string(), port: port.port };
            let verdict = if !config.net_devices.allows(device, port.port) {
                Err(BY_DEVICES.to_string())
            } else if !config.transports.allows(transport.name()) {
                Err("not allowed by UCX_TLS".to_string())
            } else if !port.active {
                Err("the port is down".to_string())
            } else {
                transport.supports(md)
            };
            match verdict {
                Ok(()) => found.usable.push(resource),
                Err(why) => found.refused.push((resource.to_string(), why)),
            }
        }
    }
}

#[cfg(test)]
mod tests;
