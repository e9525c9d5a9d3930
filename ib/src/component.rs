//! The component `ib`: which devices there are, and how one is opened.

use std::sync::Arc;

use uct::{
    Error, ErrorKind, Registry, Result,
    config::Env,
    md::{Component, DeviceResource, MemoryDomain},
    time::MonotonicClock,
};

use crate::{
    ah::Executor,
    config::{MdConfig, SoftSettings},
    md::Md,
    soft::SoftDevice,
};

/// The name of the soft device of a process.
pub const SOFT_DEVICE: &str = "soft0";

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

    fn devices(&self, _env: &Env) -> Result<Vec<DeviceResource>> {
        // The soft device is made when it is opened; only then can it turn out that its settings do not work.
        Ok(vec![DeviceResource { name: SOFT_DEVICE.into(), unusable: None }])
    }

    fn open(&self, device: &str, env: &Env) -> Result<Arc<dyn MemoryDomain>> {
        if device != SOFT_DEVICE {
            return Err(Error::new(ErrorKind::NoDevice, format!("no device `{device}`; there is {SOFT_DEVICE}")));
        }
        let config = MdConfig::from_env(env)?;
        let soft = SoftDevice::open(&SoftSettings::from_env(env)?.into())?;
        let executor = Executor::Threads { helpers: AH_HELPERS };
        Ok(Md::new(soft, config, Arc::new(MonotonicClock::new()), executor))
    }
}
