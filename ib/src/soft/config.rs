//! How to open a soft device.

use std::{net::IpAddr, path::PathBuf};

use uct::config::{BytesAuto, Units};

use crate::{config::SoftSettings, types::Mtu};

/// Where a soft device binds its socket.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum SoftBind {
    /// A 127.x.y.z of its own: works with no setup, and reaches devices of the same host and network namespace only.
    #[default]
    OwnLoopback,
    /// A local address. Variable `UCX_SOFT_ADDR`.
    Addr(IpAddr),
    /// The first address of this interface: IPv4, else IPv6 (link-local last). Variable `UCX_SOFT_NETDEV`.
    Netdev(String),
}

/// The settings of a soft device. `Default` is what a process on one host wants.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SoftConfig {
    /// The device's name.
    pub name: String,
    /// Where to bind.
    pub bind: SoftBind,
    /// UDP port. `None`: 4791 if it is free there, else any. Kernel and hardware peers send to 4791 only; devices of this
    /// library learn the port from the address. Variable `UCX_SOFT_PORT`.
    pub port: Option<u16>,
    /// MTU. `None`: the largest that the interface carries, as the kernel's soft-RoCE chooses it. Variable `UCX_SOFT_MTU`.
    pub mtu: Option<Mtu>,
    /// Bytes of kernel receive memory, headers and bookkeeping included (it is what `SO_RCVBUF` reports). `None`: 8 MiB,
    /// or less if the kernel does not grant it. Variable `UCX_SOFT_RCVBUF`.
    pub rcvbuf: Option<usize>,
    /// Send runs of equal messages as one (UDP segmentation offload). It turns itself off where the kernel refuses. Switch
    /// it off for peers behind a NIC that does not count IPv4 IDs up. Variable `UCX_SOFT_GSO`.
    pub gso: bool,
    /// Write all frames to this capture file. Slow. Variable `UCX_SOFT_PCAP`.
    pub pcap: Option<PathBuf>,
    /// The seed of queue pair numbers, keys and the default address; `None` takes one from the system.
    pub seed: Option<u64>,
}

impl Default for SoftConfig {
    fn default() -> Self {
        SoftConfig {
            name: "soft0".into(),
            bind: SoftBind::default(),
            port: None,
            mtu: None,
            rcvbuf: None,
            gso: true,
            pcap: None,
            seed: None,
        }
    }
}

impl SoftConfig {
    /// The defaults, bound to a local address.
    pub fn at(addr: IpAddr) -> Self {
        SoftConfig { bind: SoftBind::Addr(addr), ..Self::default() }
    }
}

impl From<SoftSettings> for SoftConfig {
    fn from(s: SoftSettings) -> Self {
        let bind = match (s.addr, s.netdev.is_empty()) {
            (Some(addr), _) => SoftBind::Addr(addr),
            (None, false) => SoftBind::Netdev(s.netdev),
            (None, true) => SoftBind::OwnLoopback,
        };
        SoftConfig {
            bind,
            port: match s.port {
                Units::Is(n) => u16::try_from(n).ok(),
                _ => None,
            },
            mtu: s.mtu.0,
            rcvbuf: match s.rcvbuf {
                BytesAuto::Is(b) => usize::try_from(b.0).ok(),
                BytesAuto::Auto => None,
            },
            gso: s.gso,
            pcap: (!s.pcap.is_empty()).then(|| PathBuf::from(s.pcap)),
            ..SoftConfig::default()
        }
    }
}
