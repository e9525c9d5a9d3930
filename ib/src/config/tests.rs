use std::time::Duration;

use uct::{ErrorKind, config::TernaryAuto};

use super::*;

fn md(name: &str, value: &str) -> Result<MdConfig> {
    MdConfig::from_env(&Env::from_pairs([(name, value)]))
}

fn iface(name: &str, value: &str) -> Result<IfaceConfig> {
    IfaceConfig::from_env(&Env::from_pairs([(name, value)]), &UD)
}

#[test]
fn defaults_are_those_of_ucx() {
    let c = IfaceConfig::from_env(&Env::empty(), &UD).unwrap();
    assert_eq!(c, IfaceConfig::default());
    assert_eq!((c.seg_size, c.tx_queue_len, c.rx_queue_len), (Bytes(8192), 256, 4096));
    assert_eq!((c.tx_max_poll, c.rx_max_poll, c.rx_max_batch), (16, 16, 16));
    assert_eq!((c.tx_min_inline, c.tx_min_sge, c.hop_limit, c.roce_path_factor), (Bytes(64), 5, 255, 1));
    assert_eq!((c.sl, c.traffic_class, c.num_paths, c.pkey), (Units::Auto, Units::Auto, Units::Auto, Hex::Auto));
    assert_eq!((c.is_global, c.flid_route, c.path_mtu), (false, true, PathMtu::Default));
    assert_eq!(c.reachability_mode(), ReachabilityMode::Route);
    assert_eq!(c.lid_path_bits.numbers(), [0]);
    let m = MdConfig::from_env(&Env::empty()).unwrap();
    assert_eq!(m, MdConfig::default());
    assert_eq!((m.ah_cache_ttl, m.ah_cache_max), (Duration::MAX, 65536));
    assert_eq!((m.gid_index, m.fork_init, m.async_events), (Units::Auto, Ternary::Try, true));
}

/// What a time to live may be. A mistake is found when settings are read, whatever the transport.
#[test]
fn ah_cache_ttl() {
    for (text, ttl) in [
        ("0", Duration::ZERO),
        ("inf", Duration::MAX),
        ("1us", Duration::from_micros(1)),
        ("1s", Duration::from_secs(1)),
        ("1", Duration::from_secs(1)),
        ("2.5m", Duration::from_secs(150)),
    ] {
        assert_eq!(md("UCX_IB_AH_CACHE_TTL", text).unwrap().ah_cache_ttl, ttl, "{text}");
    }
    for (text, why) in [
        ("1h", "'h' is not a unit"),
        ("1e30s", "longer than 584 years, write inf for no limit"),
        ("-1s", "a time cannot be negative"),
        ("", "not a time"),
        ("1 s", "a time is written without spaces"),
        ("1sec", "'sec' is not a unit"),
        ("auto", "not a time"),
        ("nan", "not a time"),
    ] {
        let e = md("UCX_IB_AH_CACHE_TTL", text).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidConfig);
        let accepted = "accepted: a number with m (minutes), s, ms, us or ns";
        let expected = format!("UCX_IB_AH_CACHE_TTL={text}: {why}; {accepted}");
        assert!(e.to_string().contains(&expected), "{e}");
    }
    // It belongs to the device, so a transport's prefix does not reach it.
    assert_eq!(md("UCX_UD_AH_CACHE_TTL", "1s").unwrap().ah_cache_ttl, Duration::MAX);
}

#[test]
fn ranges_are_checked_with_a_message_each() {
    for (name, value, message) in [
        ("UCX_IB_RX_QUEUE_LEN", "3", "must be from 4 to 1048576"),
        ("UCX_IB_RX_QUEUE_LEN", "inf", "must be from 4 to 1048576"),
        ("UCX_IB_TX_QUEUE_LEN", "32768", "must be from 2 to 32767"),
        ("UCX_UD_SL", "16", "must be auto or from 0 to 15"),
        ("UCX_UD_SL", "inf", "must be auto or from 0 to 15"),
        ("UCX_IB_TRAFFIC_CLASS", "256", "must be auto or from 0 to 255"),
        ("UCX_IB_HOP_LIMIT", "256", "out of range; accepted: a whole number from 0 to 255; must be from 1 to 255"),
        ("UCX_IB_HOP_LIMIT", "0", "must be from 1 to 255"),
        ("UCX_IB_NUM_PATHS", "0", "must be auto or from 1 to 128"),
        ("UCX_IB_SEG_SIZE", "255", "must be at least 256"),
        ("UCX_IB_RX_MAX_POLL", "0", "must be at least 1"),
        ("UCX_IB_PKEY", "0x8000", "must be auto or from 0x0 to 0x7fff"),
        ("UCX_IB_PKEY", "7fff", "starts with 0x"),
        ("UCX_IB_LID_PATH_BITS", "128", "path bits are from 0 to 127"),
        ("UCX_IB_PATH_MTU", "256", "accepted: default, 512, 1024, 2048 or 4096"),
        ("UCX_IB_ROCE_REACHABILITY_MODE", "some", "accepted: route, local_subnet or all"),
        ("UCX_IB_ROCE_SUBNETS", "10.0.0.0", "'10.0.0.0' is not a subnet"),
        ("UCX_IB_ROCE_SUBNETS", "10.0.0.0/33", "'10.0.0.0/33' is not a subnet"),
    ] {
        let e = iface(name, value).unwrap_err();
        assert!(e.to_string().contains(&format!("{name}={value}: ")), "{e}");
        assert!(e.to_string().contains(message), "{e}");
    }
}

#[test]
fn special_types_print_and_parse_again() {
    fn check<T: Value + PartialEq + std::fmt::Debug>(text: &str, printed: &str) {
        let value = T::parse(text).unwrap();
        assert_eq!(value.print(), printed);
        assert_eq!(T::parse(printed), Ok(value));
    }
    check::<ReachabilityMode>("LOCAL_SUBNET", "local_subnet");
    check::<PathMtu>("4096", "4096");
    check::<PathMtu>("default", "default");
    check::<SubnetPrefix>("fe80:0:0:0", "fe80:0:0:0");
    check::<SubnetPrefix>("", "");
    check::<Subnets>("^10.0.0.0/8, fd00::/8", "^10.0.0.0/8,fd00::/8");
    check::<TernaryAuto>("try", "try");
    for bad in ["fe80", "fe80:0:0", "fe80:0:0:0:0", "fe80:::0", "g:0:0:0", "12345:0:0:0"] {
        assert!(SubnetPrefix::parse(bad).is_err(), "{bad}");
    }
    assert_eq!(SubnetPrefix::parse("fec0:0:11:2").unwrap().0, Some([0xfe, 0xc0, 0, 0, 0, 0x11, 0, 2]));
}

#[test]
fn subnets_compare_bits() {
    let ip = |s: &str| s.parse::<IpAddr>().unwrap();
    assert!(in_subnet(ip("10.1.2.3"), ip("10.1.0.0"), 16) && !in_subnet(ip("10.2.2.3"), ip("10.1.0.0"), 16));
    assert!(in_subnet(ip("1.2.3.4"), ip("9.9.9.9"), 0) && in_subnet(ip("1.2.3.4"), ip("1.2.3.4"), 32));
    assert!(!in_subnet(ip("1.2.3.5"), ip("1.2.3.4"), 32));
    assert!(in_subnet(ip("fd00::1"), ip("fd00::2"), 126) && !in_subnet(ip("fd00::1"), ip("fd00::2"), 127));
    assert!(!in_subnet(ip("10.0.0.1"), ip("::ffff:10.0.0.1"), 0));
}

#[test]
fn soft_device() {
    let read = |pairs: &[(&str, &str)]| SoftSettings::from_env(&Env::from_pairs(pairs.iter().copied()));
    assert_eq!(read(&[]).unwrap(), SoftSettings::default());
    let c = read(&[("UCX_SOFT_ADDR", "10.0.0.1"), ("UCX_SOFT_PORT", "5000"), ("UCX_SOFT_MTU", "1024")]).unwrap();
    assert_eq!(
        (c.addr, c.port, c.mtu),
        (Some("10.0.0.1".parse().unwrap()), Units::Is(5000), SoftMtu(Some(Mtu::M1024)))
    );
    for (pairs, message) in [
        (&[("UCX_SOFT_ADDR", "10.0.0.1"), ("UCX_SOFT_NETDEV", "eth0")][..], "cannot be combined"),
        (&[("UCX_SOFT_ADDR", "eth0")], "UCX_SOFT_ADDR=eth0: not an IP address"),
        (&[("UCX_SOFT_PORT", "0")], "must be auto or from 1 to 65535"),
        (&[("UCX_SOFT_PORT", "65536")], "must be auto or from 1 to 65535"),
        (&[("UCX_SOFT_MTU", "1500")], "accepted: auto, 256, 512, 1024, 2048 or 4096"),
    ] {
        let e = read(pairs).unwrap_err();
        assert!(e.to_string().contains(message), "{e}");
    }
}
