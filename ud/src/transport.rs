//! Finding the transport by name.

use std::sync::Arc;

#[cfg(feature = "rdma-core")]
use ib::rdma_core::RdmaDevice;
use ib::{device::Device, md::Md as IbMd, soft::SoftDevice};
use uct::{
    Error, ErrorKind, Iface, IfaceParams, Md, Registry, Result, Worker, WorkerParams, config::Env, md::Transport,
};

use crate::{TRANSPORT, Tuning, UdConfig, config::iface_config, open};

struct UdTransport;

/// Adds the transport to a registry.
pub fn register(registry: &mut Registry) {
    registry.add_transport(Arc::new(UdTransport));
    registry.add_settings(crate::config::SECTIONS);
}

/// The worker settings that the environment asks for: whether there is a progress thread, and how often it looks.
///
/// # Errors
/// `InvalidConfig` for a value that does not parse.
pub fn worker_params(env: &Env) -> Result<WorkerParams> {
    let config = UdConfig::from_env(env)?;
    let mut params = WorkerParams::default().progress_thread(config.async_progress);
    params.async_tick = config.async_timer_tick;
    Ok(params)
}

/// The domain as one on a device of type `D`, if it is that.
fn on<D: Device>(md: &Md) -> Option<Arc<IbMd<D>>> {
    md.inner().clone().as_any().downcast::<IbMd<D>>().ok()
}

impl Transport for UdTransport {
    fn name(&self) -> &'static str {
        TRANSPORT
    }

    fn aliases(&self) -> &'static [&'static str] {
        &["ud", "ud_v"]
    }

    fn supports(&self, md: &Md) -> Result<(), String> {
        #[cfg(feature = "rdma-core")]
        if on::<RdmaDevice>(md).is_some() {
            return Ok(());
        }
        match on::<SoftDevice>(md) {
            Some(_) => Ok(()),
            None => Err(format!("{} has no UD queue pairs", md.device_name())),
        }
    }

    fn open_iface(&self, md: &Md, worker: &Worker, port: u8, params: &IfaceParams, env: &Env) -> Result<Iface> {
        let config = UdConfig::from_env(env)?;
        let iface_config = iface_config(env)?;
        let tuning = Tuning::default();
        #[cfg(feature = "rdma-core")]
        if let Some(md) = on::<RdmaDevice>(md) {
            return open(&md, worker, port, params, iface_config, config, &tuning);
        }
        match on::<SoftDevice>(md) {
            Some(md) => open(&md, worker, port, params, iface_config, config, &tuning),
            None => Err(Error::new(ErrorKind::Unsupported, self.supports(md).err().unwrap_or_default())),
        }
    }
}
