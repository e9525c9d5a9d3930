//! From two opened soft devices to an address handle between them: choosing a GID, packing and reading addresses,
//! reachability with the kernel's own routes.

use std::{net::IpAddr, process::Command};

use ib::{
    addr::{DeviceAddr, Features, ah_attr},
    config::{IfaceConfig, MdConfig, UD},
    device::Device,
    gid::{LocalPort, local_port},
    reach::{self, KernelRoutes, Routes},
    soft::{SoftConfig, SoftDevice},
    types::Gid,
};
use uct::{ErrorKind, config::Env};

fn open(vars: &[(&str, &str)]) -> (std::sync::Arc<SoftDevice>, uct::Result<LocalPort>) {
    let env = Env::from_pairs(vars.iter().copied());
    let device = SoftDevice::open(&SoftConfig::default()).unwrap();
    let (md, iface) = (MdConfig::from_env(&env).unwrap(), IfaceConfig::from_env(&env, &UD).unwrap());
    let port = local_port(&*device, 1, &md, &iface);
    (device, port)
}

#[test]
fn two_devices_of_one_host_reach_each_other() {
    let (a, a_port) = open(&[]);
    let (_b, b_port) = open(&[]);
    let (a_port, b_port) = (a_port.unwrap(), b_port.unwrap());
    let bytes = b_port.device_addr(7, Features::BYE).to_bytes();
    let remote = DeviceAddr::parse_exact(&bytes).unwrap();
    assert_eq!(remote.trailer.unwrap().incarnation, 7);
    let config = IfaceConfig::default();
    assert_eq!(reach::check_bytes(&a_port, &bytes, &config, &KernelRoutes), Ok(()));
    assert!(!reach::is_same_device(&a_port, &remote));
    assert!(reach::is_same_device(&b_port, &remote));
    let ah = a.create_ah(&ah_attr(&a_port, &remote, 0).unwrap()).unwrap();
    a.destroy_ah(ah).unwrap();
    // A documentation address, which a loopback address has no route to.
    let far = DeviceAddr {
        link: ib::addr::LinkAddr::Ethernet {
            gid: Gid::from_ip("198.51.100.7".parse().unwrap()),
            version: ib::addr::AddrVersion::V2,
        },
        trailer: None,
        ..remote
    };
    let why = reach::check(&a_port, &far, &config, &KernelRoutes).unwrap_err();
    assert!(why.reason().contains("UCX_IB_ROCE_REACHABILITY_MODE=all"), "{why}");
}

#[test]
fn the_device_says_which_gid_was_taken_and_refuses_others() {
    let (device, port) = open(&[]);
    let line = port.unwrap().to_string();
    assert!(line.starts_with("soft0:1 gid index 0 ::ffff:127."), "{line}");
    assert!(line.contains("RoCE v2 on lo"), "{line}");
    let count = device.query_port(1).unwrap().gid_table_len;
    let (_, port) = open(&[("UCX_IB_GID_INDEX", "200")]);
    let e = port.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::InvalidConfig);
    assert!(e.to_string().contains(&format!("index 200 of {count}")), "{e}");
    let (md, iface) = (MdConfig::default(), IfaceConfig::default());
    assert_eq!(local_port(&*device, 9, &md, &iface).unwrap_err().kind(), ErrorKind::NoDevice);
}

const ROLE: &str = "ADDRESS_TEST_ROLE";

/// Not a test of its own: what runs in the network namespace that the next test makes.
#[test]
fn process_in_namespace() {
    if std::env::var(ROLE).is_err() {
        return;
    }
    let ip = |s: &str| s.parse::<IpAddr>().unwrap();
    let route = |src: &str, netdev, dst: &str| KernelRoutes.route(ip(src), netdev, ip(dst));
    for (src, netdev, dst) in [
        ("10.77.0.1", Some("vx0"), "10.77.0.2"),
        // Through the gateway.
        ("10.77.0.1", Some("vx0"), "192.0.2.1"),
        ("10.78.0.1", Some("vx2"), "10.78.0.9"),
        // Addresses of this host, whatever the interface.
        ("10.77.0.1", Some("vx0"), "10.78.0.1"),
        ("fd77::1", Some("vx0"), "fd77::2"),
        // The interface is not known: the source address decides.
        ("10.77.0.1", None, "192.0.2.1"),
    ] {
        assert_eq!(route(src, netdev, dst), Ok(()), "{src} {netdev:?} {dst}");
    }
    let no = |src, netdev, dst| route(src, netdev, dst).unwrap_err();
    assert_eq!(no("10.78.0.1", Some("vx2"), "10.77.0.2"), "the route to 10.77.0.2 leaves by vx0 and not by vx2");
    assert_eq!(no("10.78.0.1", Some("vx2"), "192.0.2.1"), "the route to 192.0.2.1 leaves by vx0 and not by vx2");
    let v6 = no("fd77::1", Some("vx0"), "2001:db8::1");
    assert!(v6.starts_with("no route from fd77::1 to 2001:db8::1"), "{v6}");
    assert_eq!(KernelRoutes.prefix_len(ip("10.77.0.1"), Some("vx0")), Some(24));
    assert_eq!(KernelRoutes.prefix_len(ip("10.78.0.1"), Some("vx2")), Some(16));
    assert_eq!(KernelRoutes.prefix_len(ip("fd77::1"), None), Some(64));
    assert_eq!(KernelRoutes.prefix_len(ip("10.77.0.1"), Some("vx2")), None);
}

/// The kernel's own answers, in a network namespace with two interfaces and a default route. Needs root, `unshare` and
/// `ip`; without them it says so and passes.
#[test]
fn routes_are_the_kernels() {
    let set_up = "ip link set lo up && ip link add vx0 type veth peer name vx1 && ip link add vx2 type veth peer name vx3 \
                  && for d in vx0 vx1 vx2 vx3; do ip link set $d up; done \
                  && ip addr add 10.77.0.1/24 dev vx0 && ip addr add 10.78.0.1/16 dev vx2 \
                  && ip addr add fd77::1/64 dev vx0 nodad && ip route add default via 10.77.0.254";
    let try_set_up = Command::new("unshare").args(["-n", "sh", "-c", set_up]).output();
    match try_set_up {
        Ok(out) if out.status.success() => {}
        other => {
            eprintln!("skipped: a network namespace cannot be made here: {other:?}");
            return;
        }
    }
    let script = format!("{set_up} && exec \"$0\" --exact process_in_namespace --nocapture");
    let me = std::env::current_exe().unwrap();
    let out = Command::new("unshare").args(["-n", "sh", "-c", &script]).arg(me).env(ROLE, "1").output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{text}");
    assert!(text.contains("1 passed"), "{text}");
}
