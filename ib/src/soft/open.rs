//! From settings to a bound socket, an MTU and a receive buffer. Every refusal names the setting and the way out.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use tracing::{info, warn};
use uct::{Error, ErrorKind, Result};

use super::{
    config::{SoftBind, SoftConfig},
    frame::{FRAME_MIN, ROCE_PORT},
    icrc::{IPV4_LEN, IPV6_LEN, UDP_LEN},
    netdev::{self, Netdev},
    socket::{SysError, UdpSocket},
};
use crate::{sw::Rng, types::Mtu};

/// Receive memory that is asked for by default.
const RCVBUF_DEFAULT: usize = 8 << 20;
/// Below this the receive budget of many peers collapses: worth a word to the operator.
const RCVBUF_POOR: usize = 1 << 20;
/// Random loopback addresses that are tried before one with any port is taken.
const LOOPBACK_TRIES: usize = 16;
/// What the kernel's soft-RoCE subtracts from an interface's MTU: all headers of IPv6 RoCE, and an extended header.
const ROCE_HEADERS: usize = 80;

/// What `open` found.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) socket: UdpSocket,
    pub(super) local: SocketAddr,
    pub(super) netdev: String,
    pub(super) mtu: Mtu,
    pub(super) rcvbuf: usize,
}

pub(super) fn open(cfg: &SoftConfig, seed: u64) -> Result<Opened> {
    let devs = netdev::list().map_err(|errno| {
        Error::new(ErrorKind::Io, format!("{}: network interfaces cannot be listed", cfg.name)).with_errno(errno)
    })?;
    let (socket, dev) = match &cfg.bind {
        SoftBind::OwnLoopback => own_loopback(cfg, &devs, seed)?,
        SoftBind::Addr(ip) => {
            let (addr, dev) = find_addr(*ip, &devs)?;
            (bind(cfg, addr)?, dev)
        }
        SoftBind::Netdev(name) => {
            let (addr, dev) = find_netdev(name, &devs)?;
            (bind(cfg, addr)?, dev)
        }
    };
    let sys = |e: SysError| {
        Error::new(ErrorKind::Io, format!("{}: {} on its UDP socket failed", cfg.name, e.call)).with_errno(e.errno)
    };
    let local = socket.local_addr().map_err(sys)?;
    let mtu = choose_mtu(cfg.mtu, local.is_ipv6(), dev)?;
    let rcvbuf = receive_memory(cfg, &socket)?;
    if let Err(e) = socket.enable_gro() {
        info!(
            "{}: this kernel does not coalesce UDP receives (errno {}); message rates will be lower",
            cfg.name, e.errno
        );
    }
    // Best effort: a small send buffer costs drops under load, nothing else.
    let _ = socket.set_send_memory(RCVBUF_DEFAULT);
    Ok(Opened { socket, local, netdev: dev.name.clone(), mtu, rcvbuf })
}

fn own_loopback<'a>(cfg: &SoftConfig, devs: &'a [Netdev], seed: u64) -> Result<(UdpSocket, &'a Netdev)> {
    let lo = devs.iter().find(|d| d.loopback && d.up).ok_or_else(|| {
        Error::new(
            ErrorKind::NoDevice,
            format!(
                "{}: the loopback interface is missing or down; take it up (`ip link set lo up`) or name another \
                 interface in UCX_SOFT_NETDEV",
                cfg.name
            ),
        )
    })?;
    let mut rng = Rng::new(seed);
    // 127.0.x.y is left to people; no octet of 0 or 255.
    let mut address = || {
        let mut octet = || 1 + rng.below(254) as u8;
        IpAddr::V4(Ipv4Addr::new(127, octet(), octet(), octet()))
    };
    let wanted = cfg.port.unwrap_or(ROCE_PORT);
    for _ in 0..LOOPBACK_TRIES {
        match UdpSocket::bind(SocketAddr::new(address(), wanted)) {
            Ok(socket) => return Ok((socket, lo)),
            // Taken there, or by a wildcard socket such as the kernel's soft-RoCE.
            Err(e) if e.errno == libc::EADDRINUSE => {}
            Err(e) => return Err(bind_error(cfg, address(), wanted, e)),
        }
    }
    // Another address does not help against a wildcard socket, another port does.
    bind(cfg, SocketAddr::new(address(), 0)).map(|socket| (socket, lo))
}

/// Binds to the configured port of an address (the port in `addr` does not count).
fn bind(cfg: &SoftConfig, mut addr: SocketAddr) -> Result<UdpSocket> {
    let first = cfg.port.unwrap_or(ROCE_PORT);
    addr.set_port(first);
    match UdpSocket::bind(addr) {
        Ok(socket) => Ok(socket),
        Err(e) if e.errno == libc::EADDRINUSE && cfg.port.is_none() => {
            addr.set_port(0);
            let socket = UdpSocket::bind(addr).map_err(|e| bind_error(cfg, addr.ip(), 0, e))?;
            info!(
                "{}: UDP port {ROCE_PORT} of {} is taken, using another: peers that are not of this library cannot send \
                 to this device",
                cfg.name,
                addr.ip()
            );
            Ok(socket)
        }
        Err(e) => Err(bind_error(cfg, addr.ip(), first, e)),
    }
}

fn bind_error(cfg: &SoftConfig, ip: IpAddr, port: u16, e: SysError) -> Error {
    let way_out = match e.errno {
        libc::EADDRINUSE => {
            "the port is taken there; choose another in UCX_SOFT_PORT, or leave it unset to take any free one"
        }
        libc::EACCES => "ports below 1024 need a privilege; choose another in UCX_SOFT_PORT",
        libc::EADDRNOTAVAIL => "the address is not (yet) usable on this host; choose another in UCX_SOFT_ADDR",
        _ => "the UDP socket cannot be had",
    };
    let kind = match e.errno {
        libc::EADDRINUSE | libc::EACCES | libc::EADDRNOTAVAIL => ErrorKind::InvalidConfig,
        _ => ErrorKind::Io,
    };
    let at = SocketAddr::new(ip, port);
    Error::new(kind, format!("{}: {} to {at}: {way_out}", cfg.name, e.call)).with_errno(e.errno)
}

/// "lo: 127.0.0.1 ::1; eth0: 10.0.0.7", for error texts.
fn describe(devs: &[Netdev]) -> String {
    let one = |d: &Netdev| {
        let addrs: Vec<String> = d.addrs.iter().map(|a| a.ip().to_string()).collect();
        let addrs = if addrs.is_empty() { "no address".into() } else { addrs.join(" ") };
        format!("{}{}: {addrs}", d.name, if d.up { "" } else { " (down)" })
    };
    devs.iter().map(one).collect::<Vec<_>>().join("; ")
}

fn find_addr(ip: IpAddr, devs: &[Netdev]) -> Result<(SocketAddr, &Netdev)> {
    if ip.is_unspecified() || ip.is_multicast() {
        return Err(Error::new(
            ErrorKind::InvalidConfig,
            format!(
                "UCX_SOFT_ADDR={ip}: a soft device needs one specific address, because packet checksums cover it; this \
                 host has {}",
                describe(devs)
            ),
        ));
    }
    let listed = devs.iter().find_map(|d| d.addrs.iter().find(|a| a.ip() == ip).map(|a| (*a, d)));
    // All of 127/8 is local, listed or not.
    let found = listed.or_else(|| {
        let lo = devs.iter().find(|d| d.loopback)?;
        matches!(ip, IpAddr::V4(v4) if v4.is_loopback()).then_some((SocketAddr::new(ip, 0), lo))
    });
    found.ok_or_else(|| {
        Error::new(
            ErrorKind::InvalidConfig,
            format!("UCX_SOFT_ADDR={ip}: not an address of this host; it has {}", describe(devs)),
        )
    })
}

fn find_netdev<'a>(name: &str, devs: &'a [Netdev]) -> Result<(SocketAddr, &'a Netdev)> {
    let bad = |what: String| {
        let text = format!("UCX_SOFT_NETDEV={name}: {what}; this host has {}", describe(devs));
        Error::new(ErrorKind::InvalidConfig, text)
    };
    let dev = devs.iter().find(|d| d.name == name).ok_or_else(|| bad("no such network interface".into()))?;
    if !dev.up {
        return Err(bad(format!("the interface is down, take it up (`ip link set {name} up`) or choose another")));
    }
    let addr = dev.best_addr();
    addr.map(|a| (a, dev)).ok_or_else(|| bad("the interface has no IP address, give it one or choose another".into()))
}

fn choose_mtu(wanted: Option<Mtu>, ipv6: bool, dev: &Netdev) -> Result<Mtu> {
    let Some(mtu) = wanted else {
        return Mtu::at_most(dev.mtu.saturating_sub(ROCE_HEADERS)).ok_or_else(|| {
            Error::new(
                ErrorKind::InvalidConfig,
                format!(
                    "interface {} has an MTU of {} bytes, RoCE needs {} at least; raise it (`ip link set {} mtu 1500`) or \
                     choose another interface in UCX_SOFT_NETDEV",
                    dev.name,
                    dev.mtu,
                    Mtu::M256.bytes() + ROCE_HEADERS,
                    dev.name
                ),
            )
        });
    };
    let headers = if ipv6 { IPV6_LEN } else { IPV4_LEN } + UDP_LEN + FRAME_MIN;
    let need = mtu.bytes() + headers;
    if need > dev.mtu {
        let fits = Mtu::at_most(dev.mtu.saturating_sub(headers)).map_or(0, Mtu::bytes);
        return Err(Error::new(
            ErrorKind::InvalidConfig,
            format!(
                "UCX_SOFT_MTU={}: needs an interface MTU of {need}, {} has {}; set UCX_SOFT_MTU={fits} or less, or raise \
                 the interface's (`ip link set {} mtu {need}`)",
                mtu.bytes(),
                dev.name,
                dev.mtu,
                dev.name
            ),
        ));
    }
    Ok(mtu)
}

fn receive_memory(cfg: &SoftConfig, socket: &UdpSocket) -> Result<usize> {
    let asked = cfg.rcvbuf.unwrap_or(RCVBUF_DEFAULT);
    let got = socket.set_receive_memory(asked).map_err(|e| {
        Error::new(ErrorKind::Io, format!("{}: {} for receive memory failed", cfg.name, e.call)).with_errno(e.errno)
    })?;
    // The kernel halves and doubles: an odd number comes back one lower.
    if cfg.rcvbuf.is_some() && got + 1 < asked {
        return Err(Error::new(
            ErrorKind::ExceedsLimit,
            format!(
                "UCX_SOFT_RCVBUF={asked}: the kernel grants {got} bytes; set UCX_SOFT_RCVBUF={got} or less, or raise the \
                 limit (`sysctl net.core.rmem_max={}`)",
                asked.div_ceil(2)
            ),
        ));
    }
    if got < RCVBUF_POOR {
        warn!(
            "{}: only {got} bytes of receive memory: many senders at once will lose packets; raise it with `sysctl \
             net.core.rmem_max={}`",
            cfg.name,
            asked.div_ceil(2)
        );
    }
    Ok(got)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devs() -> Vec<Netdev> {
        let dev = |name: &str, mtu, loopback, addrs: &[&str]| Netdev {
            name: name.into(),
            mtu,
            loopback,
            up: name != "down0",
            addrs: addrs.iter().map(|a| a.parse().unwrap()).collect(),
        };
        vec![
            dev("lo", 65536, true, &["127.0.0.1:0", "[::1]:0"]),
            dev("eth0", 1500, false, &["10.0.0.7:0", "[fe80::7%2]:0"]),
            dev("bare0", 1500, false, &[]),
            dev("down0", 1500, false, &["10.0.0.8:0"]),
        ]
    }

    fn mtu(wanted: Option<Mtu>, ipv6: bool, netdev_mtu: usize) -> Result<usize> {
        let dev = Netdev { name: "eth0".into(), mtu: netdev_mtu, loopback: false, up: true, addrs: vec![] };
        choose_mtu(wanted, ipv6, &dev).map(Mtu::bytes)
    }

    #[test]
    fn mtu_is_the_one_kernel_soft_roce_would_choose() {
        for (netdev, want) in [(1103, 512), (1104, 1024), (2128, 2048), (4176, 4096), (1500, 1024), (65536, 4096)] {
            assert_eq!(mtu(None, false, netdev).unwrap(), want, "netdev MTU {netdev}");
        }
        assert!(mtu(None, false, 335).unwrap_err().to_string().contains("335"));
    }

    #[test]
    fn an_mtu_that_does_not_fit_names_the_one_that_does() {
        assert_eq!(mtu(Some(Mtu::M4096), false, 4096 + 52).unwrap(), 4096);
        assert_eq!(mtu(Some(Mtu::M4096), true, 4096 + 72).unwrap(), 4096);
        let e = mtu(Some(Mtu::M4096), true, 4096 + 71).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidConfig);
        let text = e.to_string();
        for word in ["UCX_SOFT_MTU=4096", "4168", "4167", "UCX_SOFT_MTU=2048"] {
            assert!(text.contains(word), "{word} not in: {text}");
        }
    }

    #[test]
    fn addresses_and_interfaces_that_are_not_there_list_those_that_are() {
        let devs = devs();
        let found = |ip: &str| find_addr(ip.parse().unwrap(), &devs).map(|(a, d)| (a.to_string(), d.name.clone()));
        assert_eq!(found("127.9.9.9").unwrap(), ("127.9.9.9:0".into(), "lo".into()));
        assert_eq!(found("fe80::7").unwrap(), ("[fe80::7%2]:0".into(), "eth0".into()));
        for bad in ["10.0.0.9", "0.0.0.0", "::", "224.0.0.1"] {
            let text = found(bad).unwrap_err().to_string();
            assert!(text.contains(&format!("UCX_SOFT_ADDR={bad}")) && text.contains("10.0.0.7"), "{text}");
        }
        assert_eq!(find_netdev("eth0", &devs).unwrap().0.to_string(), "10.0.0.7:0");
        for (bad, why) in [("eth1", "no such"), ("bare0", "no IP address"), ("down0", "is down")] {
            let text = find_netdev(bad, &devs).unwrap_err().to_string();
            assert!(text.contains(&format!("UCX_SOFT_NETDEV={bad}")) && text.contains(why), "{text}");
            assert!(text.contains("eth0: 10.0.0.7"), "{text}");
        }
    }

    #[test]
    fn a_taken_port_is_an_error_only_if_it_was_asked_for() {
        let ip: IpAddr = "127.211.7.5".parse().unwrap();
        let cfg = SoftConfig::at(ip);
        let first = open(&SoftConfig { port: Some(0), ..cfg.clone() }, 1).unwrap();
        let taken = first.local.port();
        let e = open(&SoftConfig { port: Some(taken), ..cfg }, 1).unwrap_err();
        assert_eq!((e.kind(), e.errno()), (ErrorKind::InvalidConfig, Some(libc::EADDRINUSE)));
        assert!(e.to_string().contains("UCX_SOFT_PORT") && e.to_string().contains(&taken.to_string()), "{e}");
    }

    #[test]
    fn receive_memory_beyond_the_limit_is_refused() {
        let cfg = SoftConfig { rcvbuf: Some(usize::MAX), ..SoftConfig::default() };
        let e = open(&cfg, 1).unwrap_err();
        assert!(e.to_string().contains("net.core.rmem_max"), "{e}");
    }
}
