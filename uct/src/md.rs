//! Memory domains and the registry of components.
//!
//! A [`Component`] knows kinds of devices and opens a memory domain on one. A memory domain registers memory and opens
//! interfaces of the transports that work on its device. [`Registry`] finds both by name. Components and transports are
//! added by explicit calls (a `register` function per crate), because linkers drop crates that nobody refers to.

use std::{any::Any, fmt, ops::Deref, sync::Arc};

use crate::{
    config::{Catalog, Env, ProcessConfig, Section},
    error::{Error, ErrorKind, Result},
    fork::{Birth, gone_md},
    iface::{Iface, IfaceParams},
    mem::MemRegion,
    worker::Worker,
};

/// A device that a component offers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceResource {
    /// Its name, for example `soft0`.
    pub name: String,
    /// Why it cannot be used, if it cannot: probing is quiet, the reason is data.
    pub unusable: Option<String>,
}

/// A kind of device.
pub trait Component: Send + Sync {
    /// Its name, for example `ib`.
    fn name(&self) -> &'static str;

    /// The devices that are there. Quiet: what is wrong with one is told in the resource.
    fn devices(&self, env: &Env) -> Result<Vec<DeviceResource>>;

    /// Opens a memory domain on the device of this name.
    fn open(&self, device: &str, env: &Env) -> Result<Arc<dyn MemoryDomain>>;
}

/// One port of an opened device, with what a table of devices shows.
#[derive(Clone, PartialEq, Debug)]
pub struct PortResource {
    /// Port number, from 1.
    pub port: u8,
    /// True if it can carry traffic.
    pub active: bool,
    /// Facts, as (name, value) pairs in the order to show them.
    pub facts: Vec<(&'static str, String)>,
}

/// An open device: registers memory, and is what interfaces are opened on.
pub trait MemoryDomain: Send + Sync {
    /// The device's name.
    fn device_name(&self) -> String;

    /// Allocates `len` zero bytes, registered for local access.
    ///
    /// # Errors
    /// `InvalidParam` for 0 bytes; `NoMemory` names the limit in force.
    fn mem_alloc(&self, len: usize) -> Result<MemRegion>;

    /// Its ports.
    fn ports(&self) -> Result<Vec<PortResource>>;

    /// For transports, which know the type behind.
    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync>;

    /// Counters of the domain (address-handle cache, device drops).
    fn counters(&self) -> Vec<crate::iface::Counter>;
}

/// The handle of a memory domain. Cloning shares it; interfaces and regions keep it alive.
///
/// In a child that was forked since it was opened, calls fail and dropping does nothing, see [`fork`](crate::fork).
#[derive(Clone)]
pub struct Md {
    inner: Arc<dyn MemoryDomain>,
    born: Birth,
}

impl Md {
    /// For components.
    pub fn from_component(inner: Arc<dyn MemoryDomain>) -> Self {
        Md { inner, born: Birth::here() }
    }

    /// The object behind, for transports.
    pub fn inner(&self) -> &Arc<dyn MemoryDomain> {
        &self.inner
    }
}

impl Deref for Md {
    type Target = dyn MemoryDomain;
    fn deref(&self) -> &Self::Target {
        if self.born.is_here() { &*self.inner } else { gone_md() }
    }
}

impl Drop for Md {
    fn drop(&mut self) {
        if !self.born.is_here() {
            // The parent's: what it refers to must not end here.
            std::mem::forget(self.inner.clone());
        }
    }
}

impl fmt::Debug for Md {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Md({})", self.device_name())
    }
}

/// A transport: opens interfaces on the memory domains it knows.
pub trait Transport: Send + Sync {
    /// Its name, for example `ud_verbs`.
    fn name(&self) -> &'static str;

    /// Other names users may give, for example `ud`.
    fn aliases(&self) -> &'static [&'static str];

    /// `Ok(())` if it works on this domain, else why not. Quiet.
    fn supports(&self, md: &Md) -> Result<(), String>;

    /// Opens an interface on port `port` (from 1) of the domain's device.
    fn open_iface(&self, md: &Md, worker: &Worker, port: u8, params: &IfaceParams, env: &Env) -> Result<Iface>;
}

/// The components and transports of a program, and what can be set for them.
#[derive(Clone)]
pub struct Registry {
    components: Vec<Arc<dyn Component>>,
    transports: Vec<Arc<dyn Transport>>,
    settings: Catalog,
}

impl Default for Registry {
    fn default() -> Self {
        let process = Section { table: ProcessConfig::TABLE, scope: &ProcessConfig::SCOPE };
        Registry { components: Vec::new(), transports: Vec::new(), settings: Catalog::new([process]) }
    }
}

impl Registry {
    /// An empty registry.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a component.
    pub fn add_component(&mut self, c: Arc<dyn Component>) -> &mut Self {
        self.components.push(c);
        self
    }

    /// Adds a transport.
    pub fn add_transport(&mut self, t: Arc<dyn Transport>) -> &mut Self {
        self.transports.push(t);
        self
    }

    /// Adds the settings that components and transports read, so that listings show them and misspelt names are found.
    pub fn add_settings(&mut self, sections: &[Section]) -> &mut Self {
        self.settings.extend(sections.iter().copied());
        self
    }

    /// Everything that can be set.
    pub fn settings(&self) -> &Catalog {
        &self.settings
    }

    /// All components.
    pub fn components(&self) -> &[Arc<dyn Component>] {
        &self.components
    }

    /// All transports.
    pub fn transports(&self) -> &[Arc<dyn Transport>] {
        &self.transports
    }

    /// The transport of this name or alias.
    ///
    /// # Errors
    /// `Unsupported`, with the names there are.
    pub fn transport(&self, name: &str) -> Result<&Arc<dyn Transport>> {
        self.transports.iter().find(|t| t.name() == name || t.aliases().contains(&name)).ok_or_else(|| {
            let names: Vec<_> = self.transports.iter().map(|t| t.name()).collect();
            Error::new(ErrorKind::Unsupported, format!("no transport `{name}`; there are: {}", names.join(", ")))
        })
    }

    /// Opens a domain on the device of this name, whichever component has it. Warns about variables that nobody reads,
    /// once in the life of the process, and logs at info level which settings differ from their defaults.
    ///
    /// # Errors
    /// `NoDevice`, with the names there are; or what opening it failed with.
    pub fn open_md(&self, device: &str, env: &Env) -> Result<Md> {
        self.settings.warn_unknown(env);
        let mut names = Vec::new();
        for c in &self.components {
            for d in c.devices(env)? {
                if d.name == device {
                    let md = Md::from_component(c.open(device, env)?);
                    match self.settings.changed(env) {
                        none if none.is_empty() => tracing::info!("opened {device}; all settings have their defaults"),
                        changed => tracing::info!("opened {device}; changed from default: {changed}"),
                    }
                    return Ok(md);
                }
                names.push(d.name);
            }
        }
        Err(Error::new(ErrorKind::NoDevice, format!("no device `{device}`; there are: {}", names.join(", "))))
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry")
            .field("components", &self.components.iter().map(|c| c.name()).collect::<Vec<_>>())
            .field("transports", &self.transports.iter().map(|t| t.name()).collect::<Vec<_>>())
            .finish()
    }
}
