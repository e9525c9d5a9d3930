use std::any::Any;

use super::*;
use crate::{
    Error, ErrorKind, Iface, IfaceParams, MemRegion, Worker,
    iface::Counter,
    md::{Component, DeviceResource, MemoryDomain},
};

/// Devices: `a` with ports 1 (up) and 2 (down), `b` that cannot be opened, `c` that is unusable.
struct Devices;

/// A transport of this name; `picky` works nowhere.
struct Named(&'static str);

struct DeviceA;

impl Component for Devices {
    fn name(&self) -> &'static str {
        "devices"
    }

    fn devices(&self, _: &Env) -> Result<Vec<DeviceResource>> {
        let device = |name: &str, unusable: Option<&str>| DeviceResource {
            name: name.into(),
            unusable: unusable.map(String::from),
        };
        Ok(vec![device("a", None), device("b", None), device("c", Some("no driver"))])
    }

    fn open(&self, device: &str, _: &Env) -> Result<Arc<dyn MemoryDomain>> {
        match device {
            "a" => Ok(Arc::new(DeviceA)),
            _ => Err(Error::new(ErrorKind::NoDevice, "gone")),
        }
    }
}

impl MemoryDomain for DeviceA {
    fn device_name(&self) -> String {
        "a".into()
    }

    fn mem_alloc(&self, _: usize) -> Result<MemRegion> {
        Err(Error::new(ErrorKind::NoMemory, "none"))
    }

    fn ports(&self) -> Result<Vec<PortResource>> {
        let port = |port, active| PortResource { port, active, facts: vec![] };
        Ok(vec![port(1, true), port(2, false)])
    }

    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }

    fn counters(&self) -> Vec<Counter> {
        vec![]
    }
}

impl Transport for Named {
    fn name(&self) -> &'static str {
        self.0
    }

    fn aliases(&self) -> &'static [&'static str] {
        &[]
    }

    fn supports(&self, _: &Md) -> Result<(), String> {
        if self.0 == "picky" { Err("no queue pairs".into()) } else { Ok(()) }
    }

    fn open_iface(&self, _: &Md, _: &Worker, _: u8, _: &IfaceParams, _: &Env) -> Result<Iface> {
        Err(Error::new(ErrorKind::Unsupported, "not asked"))
    }
}

fn resources(pairs: &[(&str, &str)]) -> (Vec<String>, Vec<String>) {
    let mut registry = Registry::new();
    registry.add_component(Arc::new(Devices));
    registry.add_transport(Arc::new(Named("ud_verbs"))).add_transport(Arc::new(Named("picky")));
    let found = registry.resources(&Env::from_pairs(pairs.iter().copied())).unwrap();
    let usable = found.usable.iter().map(ToString::to_string).collect();
    (usable, found.refused.into_iter().map(|(name, why)| format!("{name}: {why}")).collect())
}

#[test]
fn what_works_is_usable_and_the_rest_has_a_reason() {
    let (usable, refused) = resources(&[]);
    assert_eq!(usable, ["ud_verbs/a:1"]);
    let expected = [
        "picky/a:1: no queue pairs",
        "ud_verbs/a:2: the port is down",
        "picky/a:2: the port is down",
        "b: no such device: gone",
        "c: no driver",
    ];
    assert_eq!(refused, expected);
}

#[test]
fn settings_limit_the_choice() {
    let (usable, refused) = resources(&[("UCX_TLS", "^ud")]);
    assert!(usable.is_empty());
    assert_eq!(refused[0], "ud_verbs/a:1: not allowed by UCX_TLS");
    let (usable, refused) = resources(&[("UCX_NET_DEVICES", "b,c")]);
    assert!(usable.is_empty());
    assert_eq!(refused[0], "a: not allowed by UCX_NET_DEVICES", "it is not even opened");
    let (usable, refused) = resources(&[("UCX_NET_DEVICES", "a:2")]);
    assert!(usable.is_empty());
    assert_eq!(refused[0], "ud_verbs/a:1: not allowed by UCX_NET_DEVICES");
    assert_eq!(resources(&[("UCX_NET_DEVICES", "a"), ("UCX_TLS", "ud")]).0, ["ud_verbs/a:1"]);
    let mut registry = Registry::new();
    registry.add_component(Arc::new(Devices));
    let e = registry.resources(&Env::from_pairs([("UCX_NET_DEVICES", "a:x")])).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::InvalidConfig);
}
