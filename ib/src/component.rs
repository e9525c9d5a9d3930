//! The component `ib`: which devices there are, and how one is opened.

use std::sync::Arc;

use uct::{
    Registry, Result,
    config::Env,
    md::{Component, DeviceResource, MemoryDomain},
    time::MonotonicClock,
};

use crate::{
    ah::Executor,
    config::{MdConfig, SoftSettings},
    device::Device,
    md::Md,
    soft::SoftDevice,
};

/// The name of the soft device of a process.
pub const SOFT_DEVICE: &str = "soft0";

/// What to tell users who miss their RDMA devices, `None` in a build that knows them.
pub const RDMA_CORE_HINT: Option<&str> = if cfg!(feature = "rdma-core") { None } else { Some(WITHOUT_RDMA_CORE) };

const WITHOUT_RDMA_CORE: &str = "RDMA devices need a build with `--features rdma-core` (and libibverbs)";

/// Address handles that may be in creation at a time, on devices where that sleeps.
const AH_HELPERS: usize = 8;

struct IbComponent;

/// Adds the component to a registry.
pub fn register(registry: &mut Registry) {
    registry.add_component(Arc::new(IbComponent));
    registry.add_settings(crate::config::SECTIONS);
}

impl Component for IbComponent {
    fn name(&self) -> &'static str {
        "ib"
    }

    fn devices(&self, env: &Env) -> Result<Vec<DeviceResource>> {
        // The soft device is made when it is opened; only then can it turn out that its settings do not work.
        let mut all = vec![DeviceResource { name: SOFT_DEVICE.into(), unusable: None }];
        all.extend(verbs::devices(env)?);
        Ok(all)
    }

    fn open(&self, device: &str, env: &Env) -> Result<Arc<dyn MemoryDomain>> {
        let config = MdConfig::from_env(env)?;
        if device != SOFT_DEVICE {
            return verbs::open(device, config);
        }
        Ok(domain(SoftDevice::open(&SoftSettings::from_env(env)?.into())?, config))
    }
}

fn domain<D: Device>(device: Arc<D>, config: MdConfig) -> Arc<Md<D>> {
    let executor = Executor::Threads { helpers: AH_HELPERS };
    Md::new(device, config, Arc::new(MonotonicClock::new()), executor)
}

/// Devices of libibverbs.
#[cfg(feature = "rdma-core")]
mod verbs {
    use super::*;
    use crate::rdma_core::{self, RdmaDevice};

    pub(super) fn devices(env: &Env) -> Result<Vec<DeviceResource>> {
        // Before anything else is asked of the library. Whether it failed is told when a device is opened.
        let _ = rdma_core::init_fork(MdConfig::from_env(env)?.fork_init);
        let resource = |d: rdma_core::FoundDevice| DeviceResource { name: d.name, unusable: d.unusable };
        Ok(rdma_core::devices().into_iter().map(resource).collect())
    }

    pub(super) fn open(name: &str, config: MdConfig) -> Result<Arc<dyn MemoryDomain>> {
        rdma_core::init_fork(config.fork_init)?;
        let md = domain(RdmaDevice::open(name)?, config);
        rdma_core::watch(&md);
        Ok(md)
    }
}

/// Devices of libibverbs, in a build without it.
#[cfg(not(feature = "rdma-core"))]
mod verbs {
    use uct::{Error, ErrorKind};

    use super::*;

    pub(super) fn devices(_env: &Env) -> Result<Vec<DeviceResource>> {
        Ok(Vec::new())
    }

    pub(super) fn open(name: &str, _config: MdConfig) -> Result<Arc<dyn MemoryDomain>> {
        let text = format!("no device `{name}`; there is {SOFT_DEVICE}. {WITHOUT_RDMA_CORE}");
        Err(Error::new(ErrorKind::NoDevice, text))
    }
}
