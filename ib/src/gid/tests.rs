use uct::config::Env;

use super::*;
use crate::config;

fn entry(index: u8, ip: &str, version: RoceVersion, netdev: &str) -> GidEntry {
    let netdev = (!netdev.is_empty()).then(|| netdev.to_string());
    GidEntry { index, gid: Gid::from_ip(ip.parse().unwrap()), version, netdev }
}

fn v1(index: u8, ip: &str) -> GidEntry {
    entry(index, ip, RoceVersion::V1, "eth0")
}

fn v2(index: u8, ip: &str) -> GidEntry {
    entry(index, ip, RoceVersion::V2, "eth0")
}

/// A device with one port; tests change what they are about.
struct Rig {
    port: PortAttr,
    gids: Vec<GidEntry>,
    vars: Vec<(&'static str, &'static str)>,
    broken: Vec<u8>,
}

impl Rig {
    fn ethernet(gids: impl Into<Vec<GidEntry>>) -> Rig {
        let port = PortAttr {
            active: true,
            link_layer: LinkLayer::Ethernet,
            active_mtu: Mtu::M1024,
            lid: Lid(0),
            lmc: 0,
            pkeys: vec![PKey::DEFAULT],
            gid_table_len: 8,
            bandwidth_bps: 0.0,
        };
        Rig { port, gids: gids.into(), vars: vec![], broken: vec![] }
    }

    fn infiniband(gids: impl Into<Vec<GidEntry>>) -> Rig {
        let mut rig = Rig::ethernet(gids);
        rig.port.link_layer = LinkLayer::InfiniBand;
        rig.port.lid = Lid(0x1230);
        rig
    }

    fn with(mut self, name: &'static str, value: &'static str) -> Rig {
        self.vars.push((name, value));
        self
    }

    fn broken(mut self, indexes: &[u8]) -> Rig {
        self.broken = indexes.to_vec();
        self
    }

    fn select(&self) -> Result<LocalPort> {
        let env = Env::from_pairs(self.vars.iter().copied());
        let device = DeviceAttr { name: "soft0".into(), port_count: 1, ah_max: 0, ah_create_sleeps: false, soft: None };
        let probe = |e: &GidEntry| if self.broken.contains(&e.index) { Err("not on eth0".into()) } else { Ok(()) };
        let (md, iface) = (MdConfig::from_env(&env)?, config::IfaceConfig::from_env(&env, &config::UD)?);
        select(&device, 1, &self.port, &self.gids, &md, &iface, &probe)
    }

    fn index(&self) -> u8 {
        self.select().unwrap().gid.index
    }

    fn reason(&self) -> String {
        self.select().unwrap().reason
    }

    fn error(&self) -> String {
        self.select().unwrap_err().to_string()
    }
}

#[test]
fn content_decides_and_not_the_index() {
    // The same host address at different places, as on two nodes of a cluster.
    let long = [v1(0, "fe80::1"), v2(1, "fe80::1"), v1(2, "10.0.0.1"), v2(3, "10.0.0.1")];
    assert_eq!(Rig::ethernet(long).index(), 3);
    assert_eq!(Rig::ethernet([v2(0, "fe80::2"), v2(1, "10.0.0.2")]).index(), 1);
    assert_eq!(Rig::ethernet([v2(0, "fe80::2"), v2(1, "fd00::2")]).index(), 1);
    assert_eq!(Rig::ethernet([v2(0, "fd00::2"), v2(5, "10.0.0.2")]).index(), 5);
    // RoCE v2 comes before v1, whatever the scope; 169.254/16 is as local as fe80::/64.
    assert_eq!(Rig::ethernet([v1(0, "10.0.0.1"), v2(1, "fe80::1")]).index(), 1);
    assert_eq!(Rig::ethernet([v2(0, "169.254.0.1"), v2(1, "fd00::1")]).index(), 1);
    // Of equals the lowest index, in whatever order the device lists them.
    assert_eq!(Rig::ethernet([v2(6, "10.0.0.1"), v2(4, "10.0.0.2")]).index(), 4);
}

#[test]
fn unknown_versions_are_last_and_never_guessed() {
    let unknown = entry(0, "10.0.0.1", RoceVersion::Unknown, "eth0");
    assert_eq!(Rig::ethernet([unknown.clone(), v1(1, "fe80::1")]).index(), 1);
    let only = Rig::ethernet([unknown]);
    assert_eq!(only.reason(), "the only one, its RoCE version cannot be read");
    // To peers it says "any" and not v1.
    let addr = only.select().unwrap().device_addr(0, Features::empty());
    assert!(matches!(addr.link, LinkAddr::Ethernet { version: crate::addr::AddrVersion::Any, .. }));
}

#[test]
fn the_reason_says_how_it_was_chosen() {
    assert_eq!(Rig::ethernet([v2(2, "fe80::1")]).reason(), "the only one, link-local only");
    assert_eq!(Rig::ethernet([v2(0, "10.0.0.1"), v1(1, "10.0.0.1")]).reason(), "best of 2");
    let line = Rig::ethernet([v2(3, "10.0.0.1")]).select().unwrap().to_string();
    assert_eq!(line, "soft0:1 gid index 3 ::ffff:10.0.0.1 RoCE v2 on eth0 mtu 1024 (the only one)");
}

#[test]
fn addresses_that_do_not_work_come_last() {
    let gids = [v2(0, "10.0.0.1"), v2(1, "fd00::1"), v1(2, "10.0.0.1")];
    let rig = Rig::ethernet(gids.clone()).broken(&[0]);
    assert_eq!(rig.index(), 1);
    assert_eq!(rig.reason(), "best of 3, passed over ::ffff:10.0.0.1: not on eth0");
    let all = Rig::ethernet(gids).broken(&[0, 1, 2]);
    assert_eq!(all.index(), 0);
    assert_eq!(all.reason(), "best of 3, it does not seem to work: not on eth0");
}

#[test]
fn an_index_can_be_forced() {
    let gids = [v2(0, "10.0.0.1"), v1(1, "fe80::1")];
    let forced = |index| Rig::ethernet(gids.clone()).with("UCX_IB_GID_INDEX", index);
    assert_eq!(forced("1").index(), 1);
    assert_eq!(forced("1").reason(), "UCX_IB_GID_INDEX");
    let e = forced("5").error();
    assert!(e.contains("index 5, which is empty; there are: 0 ::ffff:10.0.0.1 on eth0, 1 fe80::1 on eth0"), "{e}");
    let mut short = forced("3");
    short.port.gid_table_len = 2;
    assert!(short.error().contains("soft0:1: UCX_IB_GID_INDEX asks for index 3 of 2; "), "{}", short.error());
    assert_eq!(short.select().unwrap_err().kind(), ErrorKind::InvalidConfig);
    assert!(forced("256").error().contains("UCX_IB_GID_INDEX=256: must be auto or at most 255"));
}

#[test]
fn a_gid_can_be_named_by_address_or_interface() {
    let gids = [
        v2(1, "10.0.0.9"),
        entry(3, "10.0.0.1", RoceVersion::V2, "vx0"),
        entry(5, "10.0.0.1", RoceVersion::V2, "bond1"),
    ];
    let named = |name| Rig::ethernet(gids.clone()).with("UCX_IB_GID", name);
    assert_eq!(named("bond1").index(), 5);
    assert_eq!(named("10.0.0.1").index(), 3);
    assert_eq!(named("::ffff:10.0.0.1").index(), 3);
    assert_eq!(named("10.0.0.1").reason(), "UCX_IB_GID, best of 2");
    assert!(named("eth7").error().contains("UCX_IB_GID=eth7 matches no GID; there are: 1 ::ffff:10.0.0.9 on eth0"));
    let both = named("bond1").with("UCX_IB_GID_INDEX", "1").error();
    assert!(both.contains("UCX_IB_GID_INDEX and UCX_IB_GID cannot be combined"), "{both}");
}

#[test]
fn subnets_filter_the_choice() {
    let gids = [v2(0, "10.0.0.1"), v2(1, "10.1.0.1"), v2(2, "fd00::1")];
    let filtered = |list| Rig::ethernet(gids.clone()).with("UCX_IB_ROCE_SUBNETS", list);
    assert_eq!(filtered("10.1.0.0/16").index(), 1);
    assert_eq!(filtered("^10.0.0.0/8").index(), 2);
    assert_eq!(filtered("fd00::/8").index(), 2);
    assert!(filtered("192.168.0.0/24").error().contains("UCX_IB_ROCE_SUBNETS excludes every GID"));
    let both = filtered("10.1.0.0/16").with("UCX_IB_GID_INDEX", "1").error();
    assert!(both.contains("UCX_IB_GID_INDEX and UCX_IB_ROCE_SUBNETS cannot be combined"), "{both}");
}

#[test]
fn a_port_without_gid_points_at_the_network_interface() {
    for gids in [vec![], vec![GidEntry { gid: Gid::ZERO, ..v2(0, "::") }]] {
        let e = Rig::ethernet(gids).select().unwrap_err();
        assert_eq!(e.kind(), ErrorKind::NoDevice);
        assert!(
            e.to_string().contains("no usable GID on soft0:1 - is the network interface in this network namespace"),
            "{e}"
        );
    }
    let mut down = Rig::ethernet([v2(0, "10.0.0.1")]);
    down.port.active = false;
    assert!(down.error().contains("soft0:1: the port is not active"), "{}", down.error());
}

#[test]
fn values_for_packets_have_ucx_defaults() {
    let p = Rig::ethernet([v2(0, "10.0.0.1")]).select().unwrap();
    assert_eq!((p.sl, p.traffic_class, p.hop_limit, p.num_paths, p.path_factor), (0, 106, 255, 1, 1));
    assert_eq!((p.mtu, p.path_mtu, p.pkey, p.force_global), (Mtu::M1024, Mtu::M1024, PKey::DEFAULT, true));
    assert_eq!(Rig::ethernet([v1(0, "10.0.0.1")]).select().unwrap().traffic_class, 0);
    let rig = Rig::ethernet([v2(0, "10.0.0.1")]);
    let rig = rig.with("UCX_IB_SL", "3").with("UCX_UD_TRAFFIC_CLASS", "5").with("UCX_IB_PATH_MTU", "512");
    let p = rig.with("UCX_IB_NUM_PATHS", "4").with("UCX_IB_HOP_LIMIT", "9").select().unwrap();
    assert_eq!((p.sl, p.traffic_class, p.path_mtu, p.num_paths, p.hop_limit), (3, 5, Mtu::M512, 4, 9));
    assert_eq!(p.mtu, Mtu::M1024, "the path MTU only tells peers");
}

#[test]
fn infiniband_takes_the_first_gid_or_the_one_with_a_forwarding_identifier() {
    let own = v2(0, "fe80::1");
    let routed = v2(1, "fec0:0:11:1:14:500::1");
    let p = Rig::infiniband([own.clone()]).select().unwrap();
    assert_eq!((p.gid.index, p.force_global, p.traffic_class, p.lid), (0, false, 0, Lid(0x1230)));
    assert_eq!(Rig::infiniband([own.clone(), routed.clone()]).index(), 1);
    assert_eq!(Rig::infiniband([own.clone(), routed.clone()]).with("UCX_IB_FLID_ROUTE", "n").index(), 0);
    let p = Rig::infiniband([own.clone(), routed.clone()]).select().unwrap();
    assert!(p.force_global, "a routed prefix is neither link-local nor site-local");
    let filtered = Rig::infiniband([own.clone()]).with("UCX_IB_SUBNET_PREFIX", "fec0:0:0:1");
    assert!(filtered.error().contains("is not UCX_IB_SUBNET_PREFIX"), "{}", filtered.error());
    assert_eq!(Rig::infiniband([own]).with("UCX_IB_SUBNET_PREFIX", "fe80:0:0:0").index(), 0);
    assert!(Rig::infiniband([]).error().contains("is the subnet manager running?"));
}

#[test]
fn partitions_prefer_full_members() {
    let rig = |keys: &[u16]| {
        let mut rig = Rig::infiniband([v2(0, "fe80::1")]);
        rig.port.pkeys = keys.iter().map(|k| PKey(*k)).collect();
        rig
    };
    let chosen = |rig: Rig| rig.select().map(|p| (p.pkey_index, p.pkey.0)).unwrap();
    assert_eq!(chosen(rig(&[0x7fff, 0x8001, 0xffff])), (1, 0x8001));
    assert_eq!(chosen(rig(&[0, 0x7fff])), (1, 0x7fff));
    assert_eq!(chosen(rig(&[0xffff, 0x0002, 0x8002]).with("UCX_IB_PKEY", "0x2")), (2, 0x8002));
    assert_eq!(chosen(rig(&[0xffff, 0x0002]).with("UCX_IB_PKEY", "0x2")), (1, 0x0002));
    let missing = rig(&[0xffff]).with("UCX_IB_PKEY", "0x5").error();
    assert!(missing.contains("UCX_IB_PKEY=0x5: the port is not in this partition"), "{missing}");
    assert!(rig(&[0]).error().contains("the port is in no partition"));
    assert!(rig(&[0xffff]).with("UCX_IB_PKEY", "0x8001").error().contains("must be auto or from 0x0 to 0x7fff"));
    // RoCE has one partition, whatever is asked for.
    let roce = Rig::ethernet([v2(0, "10.0.0.1")]).with("UCX_IB_PKEY", "0x5");
    assert_eq!(chosen(roce), (0, 0xffff));
}

#[test]
fn path_bits_beyond_the_port_are_skipped() {
    let rig = |lmc, bits| {
        let mut rig = Rig::infiniband([v2(0, "fe80::1")]).with("UCX_IB_LID_PATH_BITS", bits);
        rig.port.lmc = lmc;
        let p = rig.select().unwrap();
        (p.path_bits, p.num_paths)
    };
    assert_eq!(rig(2, "0-7"), (vec![0, 1, 2, 3], 4));
    assert_eq!(rig(0, "0-7"), (vec![0], 1));
    assert_eq!(rig(1, "1"), (vec![1], 1));
    assert_eq!(rig(0, "5"), (vec![0], 1));
    // An LMC that no device may report must not overflow.
    assert_eq!(rig(255, "127"), (vec![127], 1));
}
