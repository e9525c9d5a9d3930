//! The network interfaces of this host and the identity of its network namespace.
//!
//! - **K1** Every pointer handed to the kernel or to libc comes from a reference that lives until the call returns.
//! - **G1** The list of `getifaddrs` is valid, and unchanged, until `freeifaddrs`, which runs once, at the end.
#![allow(unsafe_code)]

use std::{
    ffi::CStr,
    mem::zeroed,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6},
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    ptr::NonNull,
};

use super::socket::last_errno;

/// A network interface.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Netdev {
    /// Its name.
    pub name: String,
    /// Its MTU in bytes.
    pub mtu: usize,
    /// True for `lo`.
    pub loopback: bool,
    /// True if it is up.
    pub up: bool,
    /// Its addresses with port 0, in the kernel's order. Link-local ones have the interface as scope.
    pub addrs: Vec<SocketAddr>,
}

impl Netdev {
    /// The address to speak RoCE from: IPv4 first, then IPv6 that is not link-local, then any.
    pub fn best_addr(&self) -> Option<SocketAddr> {
        let rank = |a: &&SocketAddr| match a.ip() {
            IpAddr::V4(_) => 0,
            IpAddr::V6(ip) if !ip.is_unicast_link_local() => 1,
            IpAddr::V6(_) => 2,
        };
        self.addrs.iter().min_by_key(rank).copied()
    }
}

struct List(NonNull<libc::ifaddrs>);

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: G1.
        unsafe { libc::freeifaddrs(self.0.as_ptr()) }
    }
}

/// All interfaces that have a name, in the kernel's order.
///
/// # Errors
/// The errno of `getifaddrs` or `socket`.
pub fn list() -> Result<Vec<Netdev>, i32> {
    let mut head: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: K1.
    if unsafe { libc::getifaddrs(&raw mut head) } != 0 {
        return Err(last_errno());
    }
    let Some(head) = NonNull::new(head) else { return Ok(Vec::new()) };
    let list = List(head);
    let mut out: Vec<Netdev> = Vec::new();
    let mut next = Some(list.0);
    while let Some(entry) = next {
        // SAFETY: G1: `entry` is the head or a `ifa_next` of the list, and `list` is alive.
        let ifa = unsafe { entry.as_ref() };
        next = NonNull::new(ifa.ifa_next);
        let Some(name) = NonNull::new(ifa.ifa_name) else { continue };
        // SAFETY: G1: a NUL-terminated string of the list.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) };
        let dev = match out.iter_mut().position(|d| d.name.as_bytes() == name.to_bytes()) {
            Some(i) => &mut out[i],
            None => {
                let flag = |f: i32| ifa.ifa_flags & f as u32 != 0;
                out.push(Netdev {
                    name: name.to_string_lossy().into_owned(),
                    mtu: mtu_of(name)?,
                    loopback: flag(libc::IFF_LOOPBACK),
                    up: flag(libc::IFF_UP),
                    addrs: Vec::new(),
                });
                let last = out.len() - 1;
                &mut out[last]
            }
        };
        dev.addrs.extend(addr_of(ifa));
    }
    Ok(out)
}

fn addr_of(ifa: &libc::ifaddrs) -> Option<SocketAddr> {
    let sa = NonNull::new(ifa.ifa_addr)?;
    // SAFETY: G1: a socket address starts with its family.
    let family = unsafe { sa.as_ref() }.sa_family;
    match i32::from(family) {
        libc::AF_INET => {
            // SAFETY: G1: an address of this family is a `sockaddr_in`, aligned as such by libc.
            let sin = unsafe { sa.cast::<libc::sockaddr_in>().as_ref() };
            Some(SocketAddr::new(IpAddr::V4(Ipv4Addr::from(u32::from_be(sin.sin_addr.s_addr))), 0))
        }
        libc::AF_INET6 => {
            // SAFETY: G1: an address of this family is a `sockaddr_in6`, aligned as such by libc.
            let sin6 = unsafe { sa.cast::<libc::sockaddr_in6>().as_ref() };
            let ip = Ipv6Addr::from(sin6.sin6_addr.s6_addr);
            Some(SocketAddr::V6(SocketAddrV6::new(ip, 0, 0, sin6.sin6_scope_id)))
        }
        _ => None,
    }
}

/// Asks by ioctl, not in /sys, which may show another namespace's interfaces.
fn mtu_of(name: &CStr) -> Result<usize, i32> {
    // SAFETY: no pointers.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(last_errno());
    }
    // SAFETY: a new fd that nobody else owns.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: plain data of C, for which all zero is valid.
    let mut req: libc::ifreq = unsafe { zeroed() };
    // One byte is left for the NUL.
    let room = req.ifr_name.len() - 1;
    for (to, from) in req.ifr_name[..room].iter_mut().zip(name.to_bytes()) {
        *to = *from as libc::c_char;
    }
    // SAFETY: K1.
    if unsafe { libc::ioctl(fd.as_raw_fd(), libc::SIOCGIFMTU as _, &raw mut req) } != 0 {
        return Err(last_errno());
    }
    // SAFETY: the call has filled in this member of the union, and every bit pattern of it is a number.
    let mtu = unsafe { req.ifr_ifru.ifru_mtu };
    Ok(usize::try_from(mtu).unwrap_or(0))
}

/// What the kernel's UDP path carries on one core, in bytes per second: an estimate from large messages sent in runs over
/// loopback, good for comparing with other devices only.
const KERNEL_PATH_BPS: f64 = 2.0e9;

/// Bandwidth of an interface in bytes per second, estimated: the link's speed where the driver tells one, and never more
/// than the kernel's UDP path.
pub fn bandwidth_bps(netdev: &str) -> f64 {
    // Loopback and veth have no file, an unreadable one, or -1 in it.
    let speed = std::fs::read_to_string(format!("/sys/class/net/{netdev}/speed"));
    match speed.ok().and_then(|s| s.trim().parse::<f64>().ok()).filter(|m| *m > 0.0) {
        Some(megabits) => (megabits * 1e6 / 8.0).min(KERNEL_PATH_BPS),
        None => KERNEL_PATH_BPS,
    }
}

/// Equal for devices that reach one another's loopback addresses: a hash of the boot id and the network namespace. Never 0.
pub fn host_id() -> u64 {
    let boot = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    // The link's text names the inode of the namespace: net:[4026531840].
    let net = std::fs::read_link("/proc/self/ns/net").map(|p| p.into_os_string().into_encoded_bytes());
    hash_identity(&boot, &net.unwrap_or_default())
}

/// FNV-1a with a final mix. Peers compare the value, so it must be the same in every build.
fn hash_identity(boot: &[u8], net: &[u8]) -> u64 {
    let mut h = 0xcbf2_9ce4_8422_2325u64;
    for &b in boot.iter().chain(&[0]).chain(net) {
        h = (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3);
    }
    h ^= h >> 32;
    h.wrapping_mul(0x9e37_79b9_7f4a_7c15).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_listed() {
        let all = list().unwrap();
        let lo = all.iter().find(|d| d.loopback).expect("every namespace has lo");
        assert!(lo.mtu > 1000, "{lo:?}");
        if lo.up {
            assert_eq!(lo.best_addr().map(|a| a.ip().is_loopback()), Some(true), "{lo:?}");
        }
    }

    #[test]
    fn best_address_prefers_ipv4_then_global() {
        let dev = |addrs: &[&str]| Netdev {
            name: "x".into(),
            mtu: 1500,
            loopback: false,
            up: true,
            addrs: addrs.iter().map(|a| a.parse().unwrap()).collect(),
        };
        let best = |addrs| dev(addrs).best_addr().map(|a| a.ip().to_string());
        assert_eq!(best(&["[fe80::1%3]:0", "[fd00::1]:0", "10.0.0.1:0"]).as_deref(), Some("10.0.0.1"));
        assert_eq!(best(&["[fe80::1%3]:0", "[fd00::1]:0"]).as_deref(), Some("fd00::1"));
        assert_eq!(best(&[]), None);
    }

    #[test]
    fn host_id_is_stable_and_tells_namespaces_apart() {
        assert_eq!(host_id(), host_id());
        assert_ne!(host_id(), 0);
        assert_ne!(hash_identity(b"boot", b"net:[1]"), hash_identity(b"boot", b"net:[2]"));
        assert_ne!(hash_identity(b"boot", b"net:[1]"), hash_identity(b"toob", b"net:[1]"));
    }
}
