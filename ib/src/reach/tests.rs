use std::{cell::Cell, net::IpAddr};

use proptest::prelude::*;
use uct::config::Env;

use super::{
    kernel::{Answer, look_up, parse_ipv4, parse_ipv6},
    *,
};
use crate::{
    addr::{DEFAULT_SUBNET, Features, Trailer},
    config::UD,
    device::{GidEntry, RoceVersion, SoftIdentity},
    types::{Lid, Mtu},
};

/// Routes that answer what the test says, and note whether they were asked.
struct FakeRoutes {
    route: Result<(), String>,
    len: Option<u8>,
    asked: Cell<bool>,
}

impl FakeRoutes {
    fn new(route: Result<(), &str>) -> Self {
        FakeRoutes { route: route.map_err(String::from), len: Some(24), asked: Cell::new(false) }
    }
}

impl Routes for FakeRoutes {
    fn route(&self, _: IpAddr, netdev: Option<&str>, _: IpAddr) -> Result<(), String> {
        assert_eq!(netdev, Some("eth0"));
        self.asked.set(true);
        self.route.clone()
    }

    fn prefix_len(&self, _: IpAddr, _: Option<&str>) -> Option<u8> {
        self.len
    }
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn port(link_layer: LinkLayer, gid: &str) -> LocalPort {
    let example = LocalPort::example(link_layer, Gid::from_ip(ip(gid)));
    let gid = GidEntry { netdev: Some("eth0".into()), ..example.gid.clone() };
    LocalPort { lid: Lid(5), gid, mtu: Mtu::M4096, path_mtu: Mtu::M4096, force_global: false, ..example }
}

fn roce(gid: &str) -> LocalPort {
    port(LinkLayer::Ethernet, gid)
}

fn peer(gid: &str) -> DeviceAddr {
    roce(gid).device_addr(0, Features::empty())
}

fn reason(local: &LocalPort, remote: &DeviceAddr, vars: &[(&str, &str)], routes: &FakeRoutes) -> String {
    let config = IfaceConfig::from_env(&Env::from_pairs(vars.iter().copied()), &UD).unwrap();
    match check(local, remote, &config, routes) {
        Ok(()) => "yes".into(),
        Err(why) => why.to_string(),
    }
}

#[test]
fn route_mode_asks_the_kernel() {
    let (here, there) = (roce("10.0.0.1"), peer("10.9.0.1"));
    assert_eq!(reason(&here, &there, &[], &FakeRoutes::new(Ok(()))), "yes");
    let no = FakeRoutes::new(Err("no route to 10.9.0.1 through eth0"));
    assert_eq!(
        reason(&here, &there, &[], &no),
        "no route to 10.9.0.1 through eth0; UCX_IB_ROCE_REACHABILITY_MODE=all skips this check"
    );
    let unasked = FakeRoutes::new(Err("not asked"));
    assert_eq!(reason(&here, &there, &[("UCX_UD_ROCE_REACHABILITY_MODE", "all")], &unasked), "yes");
    assert!(!unasked.asked.get());
}

#[test]
fn version_and_family_must_agree() {
    let routes = FakeRoutes::new(Ok(()));
    let v1 = |gid| {
        let mut p = roce(gid);
        p.gid.version = RoceVersion::V1;
        p
    };
    let v1_peer = v1("10.0.0.2").device_addr(0, Features::empty());
    let refused = reason(&roce("10.0.0.1"), &v1_peer, &[], &routes);
    assert_eq!(
        refused,
        "the peer speaks RoCE v1, this port RoCE v2; UCX_IB_ROCE_REACHABILITY_MODE=all skips this check"
    );
    // RoCE v1 is not routed: nothing more to ask.
    let unasked = FakeRoutes::new(Err("not asked"));
    assert_eq!(reason(&v1("10.0.0.1"), &v1_peer, &[], &unasked), "yes");
    assert_eq!(
        reason(&roce("10.0.0.1"), &peer("fd00::2"), &[], &routes),
        "the peer has an IPv6 address, this port an IPv4 one; UCX_IB_GID chooses another, \
         UCX_IB_ROCE_REACHABILITY_MODE=all skips this check"
    );
    assert_eq!(
        reason(&roce("10.0.0.1"), &peer("fd00::2"), &[("UCX_IB_ROCE_REACHABILITY_MODE", "all")], &routes),
        "yes"
    );
    let any = LinkAddr::Ethernet { gid: Gid::from_ip(ip("fd00::2")), version: AddrVersion::Any };
    assert_eq!(reason(&roce("10.0.0.1"), &DeviceAddr { link: any, ..v1_peer }, &[], &unasked), "yes");
}

#[test]
fn local_subnet_mode_compares_prefixes() {
    let mode = ("UCX_IB_ROCE_REACHABILITY_MODE", "local_subnet");
    let routes = FakeRoutes::new(Err("not asked"));
    let here = roce("10.0.0.1");
    assert_eq!(reason(&here, &peer("10.0.0.200"), &[mode], &routes), "yes");
    assert_eq!(
        reason(&here, &peer("10.0.1.1"), &[mode], &routes),
        "10.0.1.1 is not in the local subnet, 10.0.0.1/24; UCX_IB_ROCE_REACHABILITY_MODE=all skips this check"
    );
    assert_eq!(reason(&here, &peer("10.0.1.1"), &[mode, ("UCX_IB_ROCE_SUBNET_PREFIX_LEN", "16")], &routes), "yes");
    let exact = ("UCX_IB_ROCE_SUBNET_PREFIX_LEN", "inf");
    assert!(reason(&here, &peer("10.0.0.2"), &[mode, exact], &routes).contains("10.0.0.1/32"));
    assert_eq!(reason(&here, &peer("10.0.0.1"), &[mode, exact], &routes), "yes");
    // The older way to say it.
    assert_eq!(reason(&here, &peer("10.0.0.2"), &[("UCX_IB_ROCE_LOCAL_SUBNET", "y")], &routes), "yes");
    let blind = FakeRoutes { len: None, ..FakeRoutes::new(Ok(())) };
    assert!(reason(&here, &peer("10.0.0.2"), &[mode], &blind).contains("UCX_IB_ROCE_SUBNET_PREFIX_LEN tells it"));
    assert!(!routes.asked.get());
}

#[test]
fn partitions_must_match() {
    let routes = FakeRoutes::new(Ok(()));
    let here = LocalPort { pkey: PKey(0x7fff), ..roce("10.0.0.1") };
    let limited = DeviceAddr { pkey: PKey(0x7fff), ..peer("10.0.0.2") };
    assert_eq!(
        reason(&here, &limited, &[], &routes),
        "both sides are limited members of partition 0x7fff; UCX_IB_PKEY chooses another"
    );
    let other = DeviceAddr { pkey: PKey(0x8001), ..peer("10.0.0.2") };
    assert_eq!(
        reason(&here, &other, &[], &routes),
        "the peer is in partition 0x1, this port in 0x7fff; UCX_IB_PKEY chooses another"
    );
}

#[test]
fn infiniband_needs_one_subnet_or_a_way_between() {
    let routes = FakeRoutes::new(Err("not asked"));
    let ib = |gid| port(LinkLayer::InfiniBand, gid);
    let addr = |gid| LocalPort { force_global: true, ..ib(gid) }.device_addr(0, Features::empty());
    assert_eq!(reason(&ib("fe80::1"), &addr("fe80::2"), &[], &routes), "yes");
    assert_eq!(
        reason(&ib("fe80::1"), &addr("fec0:0:0:7::2"), &[], &routes),
        "the peer is in InfiniBand subnet fec0:0000:0000:0007, this port in fe80:0000:0000:0000; \
         UCX_IB_IS_GLOBAL=y on both sides uses routers"
    );
    assert_eq!(reason(&ib("fec0:0:1:1::1"), &addr("fec0:0:2:2::2"), &[], &routes), "yes");
    let off = LocalPort { flid_route: false, ..ib("fec0:0:1:1::1") };
    assert!(reason(&off, &addr("fec0:0:2:2::2"), &[], &routes).contains("InfiniBand subnet"));
    let global = LocalPort { force_global: true, ..ib("fe80::1") };
    assert_eq!(reason(&global, &addr("fec0:0:0:7::2"), &[], &routes), "yes");
    assert_eq!(
        reason(&ib("fe80::1"), &peer("10.0.0.1"), &[], &routes),
        "the peer is on Ethernet, this port on InfiniBand"
    );
    assert_eq!(
        reason(&roce("10.0.0.1"), &addr("fe80::2"), &[], &routes),
        "the peer is on InfiniBand, this port on Ethernet"
    );
}

fn soft(gid: &str, host_id: u64) -> LocalPort {
    LocalPort { soft: Some(SoftIdentity { udp_port: 5000, host_id, rx_budget: 1 }), ..roce(gid) }
}

#[test]
fn soft_devices_know_their_hosts_and_ports() {
    let routes = FakeRoutes::new(Ok(()));
    let here = soft("127.0.0.9", 1);
    let addr = |p: LocalPort| p.device_addr(3, Features::all());
    assert_eq!(reason(&here, &addr(soft("127.0.0.8", 1)), &[], &routes), "yes");
    let all = ("UCX_IB_ROCE_REACHABILITY_MODE", "all");
    let refused = reason(&here, &addr(soft("127.0.0.8", 2)), &[all], &routes);
    assert!(refused.contains("loopback address and runs on another host"), "{refused}");
    assert!(refused.contains("UCX_SOFT_ADDR or UCX_SOFT_NETDEV there"), "{refused}");
    let refused = reason(&roce("10.0.0.1"), &addr(soft("10.0.0.2", 2)), &[], &routes);
    assert_eq!(
        refused,
        "the peer listens on UDP port 5000, and this device sends to 4791 only; set UCX_SOFT_PORT there"
    );
    assert_eq!(reason(&soft("10.0.0.1", 1), &addr(soft("10.0.0.2", 2)), &[], &routes), "yes");
}

#[test]
fn a_device_recognises_itself() {
    let here = soft("127.0.0.9", 1);
    let own = here.device_addr(9, Features::all());
    assert!(is_same_device(&here, &own));
    let with = |udp_port, host_id| {
        let soft = SoftIdentity { udp_port, host_id, rx_budget: 7 };
        DeviceAddr { trailer: Some(Trailer { soft, ..Trailer::default() }), ..own }
    };
    assert!(is_same_device(&here, &with(5000, 1)), "the budget is not identity");
    assert!(!is_same_device(&here, &with(5001, 1)));
    assert!(!is_same_device(&here, &with(5000, 2)));
    assert!(!is_same_device(&here, &DeviceAddr { trailer: None, ..own }));

    // Equal LIDs on the default prefix are the same port only if nothing speaks against it.
    let ib = port(LinkLayer::InfiniBand, "fe80::1");
    let link = |if_id| LinkAddr::InfiniBand { lid: Lid(5), prefix: DEFAULT_SUBNET, if_id };
    let addr = |if_id| DeviceAddr { link: link(if_id), ..peer("10.0.0.1") };
    assert!(is_same_device(&ib, &addr(None)));
    assert!(is_same_device(&ib, &addr(Some([0, 0, 0, 0, 0, 0, 0, 1]))));
    assert!(!is_same_device(&ib, &addr(Some([0, 0, 0, 0, 0, 0, 0, 2]))));
}

const IPV4: &str = "\
Iface	Destination	Gateway 	Flags	RefCnt	Use	Metric	Mask		MTU	Window	IRTT
eth0	00000000	010200C0	0003	0	0	0	00000000	0	0	0
eth0	000200C0	00000000	0001	0	0	0	00FFFFFF	0	0	0
eth1	0001000A	00000000	0001	0	0	0	00FFFFFF	0	0	0
eth1	0002000A	00000000	0201	0	0	0	00FFFFFF	0	0	0
eth2	0003000A	00000000	0000	0	0	0	00FFFFFF	0	0	0
short line
eth3	zzzz	00000000	0001	0	0	0	00FFFFFF	0	0	0
";

// The table is printed as numbers of the machine that made it; this one was little-endian.
#[cfg(target_endian = "little")]
#[test]
fn the_longest_ipv4_prefix_decides() {
    let table = parse_ipv4(IPV4);
    assert_eq!(table.len(), 4);
    assert_eq!((table[1].net, table[1].len), (ip("192.0.2.0"), 24));
    let ask = |dst, netdev| look_up(&table, ip(dst), netdev);
    assert_eq!(ask("192.0.2.7", "eth0"), Answer::Yes);
    assert_eq!(ask("8.8.8.8", "eth0"), Answer::Yes, "by the default route");
    assert_eq!(ask("8.8.8.8", "eth1"), Answer::Elsewhere("eth0".into()));
    assert_eq!(ask("10.0.1.9", "eth1"), Answer::Yes);
    assert_eq!(ask("10.0.1.9", "eth0"), Answer::Elsewhere("eth1".into()), "the default route does not count");
    assert_eq!(ask("10.0.2.9", "eth0"), Answer::Rejected);
    assert_eq!(ask("10.0.3.9", "eth0"), Answer::Yes, "a route that is down does not count");
    assert_eq!(look_up(&[], ip("10.0.0.1"), "eth0"), Answer::Silent);
}

const IPV6: &str = "\
fd000000000000000000000000000000 40 00000000000000000000000000000000 00 00000000000000000000000000000000 00000100 00000001 00000000 00000001     eth0
fd000000000000000000000000000002 80 00000000000000000000000000000000 00 00000000000000000000000000000000 00000000 00000003 00000000 80200001       lo
00000000000000000000000000000000 00 00000000000000000000000000000000 00 00000000000000000000000000000000 ffffffff 00000001 00000000 00200200       lo
00000000000000000000000000000000 00 00000000000000000000000000000000 00 00000000000000000000000000000000 ffffffff 00000001 00000000 00200201       lo
garbage
";

#[test]
fn the_longest_ipv6_prefix_decides() {
    let table = parse_ipv6(IPV6);
    assert_eq!(table.len(), 3);
    let ask = |dst, netdev| look_up(&table, ip(dst), netdev);
    assert_eq!(ask("fd00::77", "eth0"), Answer::Yes);
    assert_eq!(ask("fd00::77", "eth1"), Answer::Elsewhere("eth0".into()));
    assert_eq!(ask("fd00::2", "eth0"), Answer::Yes, "this host itself");
    assert_eq!(ask("2001:db8::1", "eth0"), Answer::Silent, "only the rejecting default route is left");
    assert_eq!(ask("10.0.0.1", "eth0"), Answer::Silent, "the other family");
}

#[test]
fn this_host_reaches_itself() {
    let kernel = KernelRoutes;
    assert_eq!(kernel.route(ip("127.0.0.1"), None, ip("127.0.0.2")), Ok(()));
    assert_eq!(kernel.route(ip("127.0.0.1"), Some("lo"), ip("127.9.9.9")), Ok(()));
    // A documentation address, which no host has, cannot be reached from a loopback address.
    let refused = kernel.route(ip("127.0.0.1"), None, ip("192.0.2.77")).unwrap_err();
    assert!(refused.contains("no route from 127.0.0.1 to 192.0.2.77"), "{refused}");
    assert_eq!(kernel.prefix_len(ip("127.0.0.1"), Some("lo")), Some(8));
}

proptest! {
    #[test]
    fn any_bytes_give_an_answer(bytes in proptest::collection::vec(any::<u8>(), 0..48)) {
        let routes = FakeRoutes::new(Err("no route"));
        let config = IfaceConfig::default();
        for local in [roce("10.0.0.1"), port(LinkLayer::InfiniBand, "fe80::1"), soft("127.0.0.1", 1)] {
            if let Err(why) = check_bytes(&local, &bytes, &config, &routes) {
                prop_assert!(!why.reason().is_empty());
            }
        }
    }

    #[test]
    fn any_table_is_survived(text in "[0-9A-Fa-f \\t\\neth]{0,200}") {
        let _ = (parse_ipv4(&text), parse_ipv6(&text));
    }
}
