use proptest::prelude::*;
use uct::ErrorKind;

use super::*;
use crate::{
    device::{AhAttr, GidEntry, GlobalRoute, LinkLayer, SoftAv, SoftIdentity},
    gid::LocalPort,
};

const IF_ID: [u8; 8] = [0xa8, 0xa9, 0xaa, 0xab, 0xac, 0xad, 0xae, 0xaf];
const LID: Lid = Lid(0x1234);

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(|b| *b != b' ').collect();
    digits.chunks(2).map(|c| u8::from_str_radix(std::str::from_utf8(c).unwrap(), 16).unwrap()).collect()
}

fn ib(prefix: [u8; 8], if_id: Option<[u8; 8]>) -> DeviceAddr {
    let link = LinkAddr::InfiniBand { lid: LID, prefix, if_id };
    DeviceAddr { link, pkey: PKey::DEFAULT, path_mtu: Mtu::M4096, gid_index: None, trailer: None }
}

fn eth(ip: &str, version: AddrVersion) -> DeviceAddr {
    let link = LinkAddr::Ethernet { gid: Gid::from_ip(ip.parse().unwrap()), version };
    DeviceAddr { link, ..ib(DEFAULT_SUBNET, None) }
}

fn trailer() -> Trailer {
    Trailer {
        soft: SoftIdentity { udp_port: 0x1122, host_id: 0x3132_3334_3536_3738, rx_budget: 0x4142_4344 },
        incarnation: 0x5152_5354_5556_5758,
        features: Features::SACK | Features::BYE,
    }
}

/// The samples were taken from UCX's own packing; ours must be the same bytes and read back to the same value.
#[test]
fn addresses_are_those_of_ucx_byte_for_byte() {
    let site_local = [0xfe, 0xc0, 0, 0, 0, 0, 0x12, 0x34];
    let f0_ff = Gid(std::array::from_fn(|i| 0xf0 + i as u8));
    let samples = [
        ("00 3412", ib(DEFAULT_SUBNET, None)),
        ("02 3412 04", DeviceAddr { path_mtu: Mtu::M2048, ..ib(DEFAULT_SUBNET, None) }),
        ("04 3412 0180", DeviceAddr { pkey: PKey(0x8001), ..ib(DEFAULT_SUBNET, None) }),
        ("06 3412 04 0180", DeviceAddr { path_mtu: Mtu::M2048, pkey: PKey(0x8001), ..ib(DEFAULT_SUBNET, None) }),
        ("10 3412 1234", ib(site_local, None)),
        (
            "56 3412 a8a9aaabacadaeaf 1234 03 0180",
            DeviceAddr { path_mtu: Mtu::M1024, pkey: PKey(0x8001), ..ib(site_local, Some(IF_ID)) },
        ),
        ("60 3412 a8a9aaabacadaeaf fec0567800001234", ib([0xfe, 0xc0, 0x56, 0x78, 0, 0, 0x12, 0x34], Some(IF_ID))),
        ("40 3412 a8a9aaabacadaeaf", ib(DEFAULT_SUBNET, Some(IF_ID))),
        (
            "40 0000 a8a9aaabacadaeaf",
            DeviceAddr {
                link: LinkAddr::InfiniBand { lid: Lid(0), prefix: DEFAULT_SUBNET, if_id: Some(IF_ID) },
                ..ib(DEFAULT_SUBNET, None)
            },
        ),
        ("08 00000000000000000000ffff0a000001", eth("10.0.0.1", AddrVersion::V1)),
        ("48 00000000000000000000ffff0a000001", eth("10.0.0.1", AddrVersion::V2)),
        ("18 fd000000000000000000000000000001", eth("fd00::1", AddrVersion::V1)),
        ("58 fd000000000000000000000000000001", eth("fd00::1", AddrVersion::V2)),
        (
            "5f f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff 03 07 0180",
            DeviceAddr {
                link: LinkAddr::Ethernet { gid: f0_ff, version: AddrVersion::V2 },
                pkey: PKey(0x8001),
                path_mtu: Mtu::M1024,
                gid_index: Some(7),
                trailer: None,
            },
        ),
    ];
    for (text, addr) in samples {
        let bytes = hex(text);
        assert_eq!(addr.to_bytes(), bytes, "{text}");
        assert_eq!(addr.packed_len(), bytes.len(), "{text}");
        assert_eq!(DeviceAddr::parse(&bytes), Ok((addr, bytes.len())), "{text}");
        assert_eq!(DeviceAddr::parse_exact(&bytes), Ok(addr), "{text}");
        for len in 0..bytes.len() {
            let cut = DeviceAddr::parse(&bytes[..len]);
            assert!(
                matches!(cut, Err(AddrError::Truncated { have, .. }) if have == len),
                "{text} cut to {len}: {cut:?}"
            );
        }
        // In a connection request the address is followed by whatever is next; UCX sends nothing.
        let mut more = bytes.clone();
        more.extend([0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(DeviceAddr::parse(&more), Ok((addr, bytes.len())), "{text}");
        assert!(matches!(DeviceAddr::parse_exact(&more), Err(AddrError::Length { .. })));
    }
}

#[test]
fn the_trailer_follows_the_address() {
    let addr = DeviceAddr { trailer: Some(trailer()), ..eth("127.1.2.3", AddrVersion::V2) };
    let bytes = addr.to_bytes();
    assert_eq!(&bytes[..17], eth("127.1.2.3", AddrVersion::V2).to_bytes());
    assert_eq!(bytes[17..], hex("5573 01 18 2211 0500 3837363534333231 44434241 5857565554535251"));
    assert_eq!(bytes.len(), addr.packed_len());
    assert_eq!(DeviceAddr::parse(&bytes), Ok((addr, bytes.len())));
    assert_eq!(addr.udp_port(), 0x1122);
    assert_eq!(eth("10.0.0.1", AddrVersion::V2).udp_port(), 4791);
    // Cut inside the trailer's header it is no trailer; inside the body it is a broken one.
    assert_eq!(DeviceAddr::parse(&bytes[..20]).unwrap().1, 17);
    assert!(matches!(DeviceAddr::parse(&bytes[..44]), Err(AddrError::Truncated { .. })));
}

#[test]
fn later_trailer_versions_are_read_as_far_as_known() {
    let base = eth("10.0.0.1", AddrVersion::V2);
    let mut bytes = DeviceAddr { trailer: Some(trailer()), ..base }.to_bytes();
    // Version 9 with two bytes more.
    bytes[19] = 9;
    bytes[20] += 2;
    bytes.extend([0xaa, 0xbb]);
    assert_eq!(DeviceAddr::parse(&bytes), Ok((DeviceAddr { trailer: Some(trailer()), ..base }, bytes.len())));
    // A version 0 does not exist; it is skipped.
    bytes[19] = 0;
    assert_eq!(DeviceAddr::parse(&bytes), Ok((base, bytes.len())));
    // Too short for any version.
    bytes[19] = 1;
    bytes[20] = 23;
    assert_eq!(DeviceAddr::parse(&bytes), Err(AddrError::Trailer(23)));
}

#[test]
fn bad_addresses_have_reasons() {
    let zeros = "00000000000000000000000000000000";
    for (text, error) in [
        ("30 3412 1234", "the address carries two subnet prefixes (flags 0x30)"),
        ("02 3412 00", "the address carries path MTU code 0, known are 1 to 5"),
        ("02 3412 06", "the address carries path MTU code 6, known are 1 to 5"),
        (&format!("88 {zeros}"), "the address carries RoCE version code 4, known are 0 to 3"),
        (&format!("48 {zeros}"), "the address carries a GID without an interface id"),
        ("40 3412 0000000000000000", "the address carries a GID without an interface id"),
        ("", "the address is cut off after 0 of 1 or more bytes"),
    ] {
        let e = DeviceAddr::parse(&hex(text)).unwrap_err();
        assert_eq!(e.to_string(), error, "{text}");
        assert_eq!(uct::Error::from(e).kind(), ErrorKind::InvalidAddress);
    }
}

#[test]
fn interface_and_endpoint_addresses() {
    let iface = IfaceAddr { qpn: Qpn::truncate(0x010202) };
    assert_eq!(iface.to_bytes(), [2, 2, 1]);
    assert_eq!(IfaceAddr::parse(&[2, 2, 1]), Ok(iface));
    let ep = EpAddr { qpn: Qpn::truncate(0x030404), ep_id: 0x050607 };
    assert_eq!(ep.to_bytes(), [4, 4, 3, 7, 6, 5]);
    assert_eq!(EpAddr::parse(&[4, 4, 3, 7, 6, 5]), Ok(ep));
    assert_eq!(IfaceAddr::parse(&[1, 2]), Err(AddrError::Length { need: 3, have: 2 }));
    assert_eq!(EpAddr::parse(&[0; 7]), Err(AddrError::Length { need: 6, have: 7 }));
}

fn local(link_layer: LinkLayer, gid: &str) -> LocalPort {
    let example = LocalPort::example(link_layer, Gid::from_ip(gid.parse().unwrap()));
    let gid = GidEntry { index: 3, ..example.gid.clone() };
    LocalPort { lid: Lid(0x99), gid, traffic_class: 106, ..example }
}

fn soft(host_id: u64) -> Option<SoftIdentity> {
    Some(SoftIdentity { udp_port: 5000, host_id, rx_budget: 8 << 20 })
}

#[test]
fn roce_attributes_are_filled_as_ucx_does() {
    let here = local(LinkLayer::Ethernet, "10.0.0.1");
    let there = eth("10.0.0.2", AddrVersion::V2);
    let expected = AhAttr {
        port: 1,
        sl: 0,
        src_path_bits: 0,
        static_rate: 0,
        dlid: Lid(0xc000),
        grh: Some(GlobalRoute {
            dgid: Gid::from_ip("10.0.0.2".parse().unwrap()),
            sgid: here.gid.gid,
            hop_limit: 255,
            traffic_class: 106,
            flow_label: 0xffff_ffff,
        }),
        soft: SoftAv::default(),
    };
    assert_eq!(ah_attr(&here, &there, 0).unwrap(), expected);
    let path1 = ah_attr(&here, &there, 1).unwrap();
    assert_eq!((path1.dlid, path1.grh.unwrap().flow_label), (Lid(0xc001), 0xffff_fffe));
    // Factor 0: all paths are one, so their attributes are equal.
    let one_path = LocalPort { path_factor: 0, ..here.clone() };
    assert_eq!(ah_attr(&one_path, &there, 7).unwrap(), expected);
    // The seed is cut to 16 bits.
    let far = LocalPort { path_factor: 65535, ..here };
    assert_eq!(ah_attr(&far, &there, 2).unwrap().dlid, Lid(0xfffe));
}

#[test]
fn soft_devices_put_port_and_host_into_the_key() {
    let here = LocalPort { soft: soft(7), ..local(LinkLayer::Ethernet, "10.0.0.1") };
    let ucx = eth("10.0.0.2", AddrVersion::V2);
    let ours = DeviceAddr { trailer: Some(trailer()), ..ucx };
    assert_eq!(ah_attr(&here, &ucx, 0).unwrap().soft, SoftAv { udp_port: 4791, host_id: 0 });
    let attr = ah_attr(&here, &ours, 0).unwrap();
    assert_eq!(attr.soft, SoftAv { udp_port: 0x1122, host_id: 0x3132_3334_3536_3738 });
    // Incarnation, features and budget are not part of who the peer's device is.
    let restarted = Trailer { incarnation: 1, features: Features::empty(), ..trailer() };
    let restarted = DeviceAddr { trailer: Some(restarted), ..ucx };
    assert_eq!(ah_attr(&here, &restarted, 0).unwrap(), attr);
}

#[test]
fn loopback_addresses_of_other_hosts_are_refused() {
    let here = LocalPort { soft: soft(7), ..local(LinkLayer::Ethernet, "127.0.0.9") };
    let peer = |ip: &str, host_id| {
        let soft = SoftIdentity { host_id, ..trailer().soft };
        DeviceAddr { trailer: Some(Trailer { soft, ..trailer() }), ..eth(ip, AddrVersion::V2) }
    };
    ah_attr(&here, &peer("127.0.0.1", 7), 0).unwrap();
    ah_attr(&here, &peer("127.0.0.1", 0), 0).unwrap();
    ah_attr(&here, &eth("127.0.0.1", AddrVersion::V2), 0).unwrap();
    let e = ah_attr(&here, &peer("127.0.0.1", 8), 0).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unreachable);
    assert_eq!(
        e.to_string(),
        "unreachable: dev0:1 to gid ::ffff:127.0.0.1 (RoCE v2) udp port 4386: the peer gave a loopback address and runs on \
         another host or in another network namespace; set UCX_SOFT_ADDR or UCX_SOFT_NETDEV there"
    );
    let e = ah_attr(&here, &peer("10.0.0.2", 8), 0).unwrap_err().to_string();
    assert!(e.ends_with("set UCX_SOFT_ADDR or UCX_SOFT_NETDEV here"), "{e}");
    let e = ah_attr(&here, &peer("::1", 8), 0).unwrap_err().to_string();
    assert!(e.contains("the peer gave a loopback address"), "{e}");
}

#[test]
fn infiniband_attributes_are_filled_as_ucx_does() {
    let here = local(LinkLayer::InfiniBand, "fe80::1");
    let near = ah_attr(&here, &ib(DEFAULT_SUBNET, Some(IF_ID)), 0).unwrap();
    assert_eq!((near.dlid, near.grh, near.src_path_bits), (LID, None, 0));
    // With one path bit all paths are one.
    assert_eq!(ah_attr(&here, &ib(DEFAULT_SUBNET, Some(IF_ID)), 5).unwrap(), near);

    let many = LocalPort { path_bits: vec![0, 3], ..here.clone() };
    let odd = ah_attr(&many, &ib(DEFAULT_SUBNET, None), 5).unwrap();
    assert_eq!((odd.dlid, odd.src_path_bits), (Lid(0x1237), 3));

    let forced = LocalPort { force_global: true, ..here.clone() };
    let grh = ah_attr(&forced, &ib(DEFAULT_SUBNET, Some(IF_ID)), 0).unwrap().grh.unwrap();
    assert_eq!(grh.dgid.interface_id(), IF_ID);
    assert_eq!((grh.hop_limit, grh.flow_label, grh.sgid), (255, 0, here.gid.gid));
    // An address without an interface id cannot be global, forced or not.
    assert_eq!(ah_attr(&forced, &ib(DEFAULT_SUBNET, None), 0).unwrap().grh, None);
    // Another subnet is global of itself.
    let other = [0xfe, 0xc0, 0, 0, 0, 0, 0, 9];
    assert!(ah_attr(&here, &ib(other, Some(IF_ID)), 0).unwrap().grh.is_some());
}

#[test]
fn forwarding_identifiers_replace_the_lid_between_subnets() {
    let here = local(LinkLayer::InfiniBand, "fec0:0:11:1::1");
    let far = ib([0xfe, 0xc0, 0, 0, 0, 0x22, 0, 2], Some(IF_ID));
    assert_eq!(ah_attr(&here, &far, 0).unwrap().dlid, Lid(0x22));
    let same_subnet = ib([0xfe, 0xc0, 0, 0, 0, 0x22, 0, 1], Some(IF_ID));
    assert_eq!(ah_attr(&here, &same_subnet, 0).unwrap().dlid, LID);
    let off = LocalPort { flid_route: false, ..here };
    assert_eq!(ah_attr(&off, &far, 0).unwrap().dlid, LID);
    let without = local(LinkLayer::InfiniBand, "fec0::1:0:0:0:1");
    assert_eq!(ah_attr(&without, &far, 0).unwrap().dlid, LID);
}

#[test]
fn link_layers_do_not_mix() {
    let e = ah_attr(&local(LinkLayer::Ethernet, "10.0.0.1"), &ib(DEFAULT_SUBNET, None), 0).unwrap_err();
    assert!(e.to_string().contains("the peer is on InfiniBand, this port on Ethernet"), "{e}");
    let e = ah_attr(&local(LinkLayer::InfiniBand, "fe80::1"), &eth("10.0.0.1", AddrVersion::V2), 0).unwrap_err();
    assert!(e.to_string().contains("the peer is on Ethernet, this port on InfiniBand"), "{e}");
}

#[test]
fn a_port_packs_what_ucx_packs() {
    let roce = LocalPort { path_mtu: Mtu::M4096, ..local(LinkLayer::Ethernet, "10.0.0.1") };
    let bytes = roce.device_addr(1, Features::BYE).to_bytes();
    assert_eq!(bytes, hex("48 00000000000000000000ffff0a000001"));
    let soft = LocalPort { soft: soft(7), ..roce };
    let parsed = DeviceAddr::parse_exact(&soft.device_addr(9, Features::BYE).to_bytes()).unwrap().trailer.unwrap();
    assert_eq!((parsed.incarnation, parsed.features, parsed.soft.udp_port), (9, Features::BYE, 5000));
    let plain = LocalPort { path_mtu: Mtu::M4096, lid: LID, ..local(LinkLayer::InfiniBand, "fe80::1") };
    assert_eq!(plain.device_addr(1, Features::empty()).to_bytes(), hex("00 3412"));
    let global = LocalPort { force_global: true, ..plain };
    assert_eq!(global.device_addr(1, Features::empty()).to_bytes(), hex("40 3412 0000000000000001"));
}

fn any_addr() -> impl Strategy<Value = DeviceAddr> {
    let versions = [AddrVersion::V1, AddrVersion::V1_5, AddrVersion::V2, AddrVersion::Any];
    let gid = any::<[u8; 16]>().prop_map(Gid).prop_filter("valid", |g| g.is_valid());
    let ethernet = (gid, proptest::sample::select(versions.to_vec()));
    let ethernet = ethernet.prop_map(|(gid, version)| LinkAddr::Ethernet { gid, version });
    let prefix = prop_oneof![
        Just(DEFAULT_SUBNET),
        any::<[u8; 2]>().prop_map(|[a, b]| [0xfe, 0xc0, 0, 0, 0, 0, a, b]),
        any::<[u8; 8]>()
    ];
    let if_id = proptest::option::of(any::<[u8; 8]>().prop_filter("valid", |id| *id != [0; 8]));
    let infiniband = (any::<u16>(), prefix, if_id);
    let infiniband = infiniband.prop_map(|(lid, prefix, if_id)| LinkAddr::InfiniBand { lid: Lid(lid), prefix, if_id });
    let trailer = (any::<u16>(), any::<u64>(), any::<u32>(), any::<u64>(), any::<u16>());
    let trailer = trailer.prop_map(|(udp_port, host_id, rx_budget, incarnation, features)| Trailer {
        soft: SoftIdentity { udp_port, host_id, rx_budget },
        incarnation,
        features: Features::from_bits_retain(features),
    });
    (
        prop_oneof![ethernet, infiniband],
        any::<u16>().prop_map(PKey),
        proptest::sample::select(Mtu::ALL.to_vec()),
        proptest::option::of(any::<u8>()),
        proptest::option::of(trailer),
    )
        .prop_map(|(link, pkey, path_mtu, gid_index, trailer)| DeviceAddr {
            link,
            pkey,
            path_mtu,
            gid_index,
            trailer,
        })
}

proptest! {
    #[test]
    fn every_address_survives_the_trip(addr in any_addr(), more in any::<[u8; 3]>()) {
        let mut bytes = addr.to_bytes();
        let len = bytes.len();
        prop_assert_eq!(len, addr.packed_len());
        prop_assert!(len <= DeviceAddr::MAX_LEN);
        prop_assert_eq!(DeviceAddr::parse(&bytes), Ok((addr, len)));
        // Three bytes cannot be a trailer.
        bytes.extend(more);
        prop_assert_eq!(DeviceAddr::parse(&bytes), Ok((addr, len)));
    }

    #[test]
    fn any_bytes_give_an_address_or_a_reason(
        bytes in proptest::collection::vec(any::<u8>(), 0..64),
        flags in any::<u8>(),
        magic in any::<bool>(),
    ) {
        let mut bytes = bytes;
        if let Some(first) = bytes.first_mut() {
            *first = flags;
        }
        // Have the generator reach the trailer often enough.
        if magic && bytes.len() > 20 {
            bytes[17..19].copy_from_slice(b"Us");
        }
        match DeviceAddr::parse(&bytes) {
            Ok((addr, used)) => {
                prop_assert!(used <= bytes.len());
                let again = DeviceAddr::parse(&addr.to_bytes()).map(|(a, _)| a);
                prop_assert_eq!(again, Ok(addr));
                for link in [LinkLayer::Ethernet, LinkLayer::InfiniBand] {
                    let _ = ah_attr(&local(link, "fec0:0:11:1::1"), &addr, flags);
                }
            }
            Err(e) => prop_assert!(!e.to_string().is_empty()),
        }
        let _ = (IfaceAddr::parse(&bytes), EpAddr::parse(&bytes));
    }
}
