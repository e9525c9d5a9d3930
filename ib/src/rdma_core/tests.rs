//! What needs no device: conversions, the receive slab, GID tables from files, and the layouts of the bindings.

use std::{
    fs,
    mem::{offset_of, size_of},
    path::PathBuf,
};

use rdma_sys::{
    ibv_ah_attr, ibv_async_event, ibv_event_type as Event, ibv_gid, ibv_gid_entry, ibv_global_route, ibv_port_attr,
    ibv_send_wr, ibv_transport_type, ibv_wc,
};
use uct::mem::Buf;

use super::{
    attr,
    ffi::{self, Zero, check},
    gids,
    handles::RawEvent,
    list,
    slab::RecvSlab,
};
use crate::{
    device::{Access, AhAttr, AsyncEvent, GidEntry, GlobalRoute, LinkLayer, RoceVersion, SoftAv, VerbsError, WcStatus},
    types::{Gid, Lid, Mtu, PKey, Qpn},
};

fn gid(ip: &str) -> Gid {
    Gid::from_ip(ip.parse().unwrap())
}

/// The structures that the bindings write by hand, against `sizeof` and `offsetof` of verbs.h (the same on all 64-bit
/// systems). The generated ones assert theirs when they are compiled.
#[test]
#[cfg(target_pointer_width = "64")]
fn layouts_are_those_of_c() {
    assert_eq!(size_of::<ibv_wc>(), 48);
    assert_eq!(
        (
            offset_of!(ibv_wc, status),
            offset_of!(ibv_wc, byte_len),
            offset_of!(ibv_wc, src_qp),
            offset_of!(ibv_wc, wc_flags),
            offset_of!(ibv_wc, sl),
        ),
        (8, 20, 32, 36, 44)
    );
    assert_eq!(size_of::<ibv_send_wr>(), 128);
    assert_eq!(
        (
            offset_of!(ibv_send_wr, sg_list),
            offset_of!(ibv_send_wr, num_sge),
            offset_of!(ibv_send_wr, send_flags),
            offset_of!(ibv_send_wr, wr),
            offset_of!(ibv_send_wr, qp_type),
            offset_of!(ibv_send_wr, bind_mw_tso_union),
        ),
        (16, 24, 32, 40, 72, 80)
    );
    assert_eq!(size_of::<ibv_ah_attr>(), 32);
    assert_eq!(
        (
            offset_of!(ibv_ah_attr, dlid),
            offset_of!(ibv_ah_attr, is_global),
            offset_of!(ibv_ah_attr, port_num),
            offset_of!(ibv_global_route, flow_label),
            offset_of!(ibv_global_route, sgid_index),
            offset_of!(ibv_global_route, traffic_class),
        ),
        (24, 29, 30, 16, 20, 22)
    );
    assert_eq!((size_of::<ibv_async_event>(), offset_of!(ibv_async_event, event_type)), (16, 8));
    assert_eq!((size_of::<ibv_gid_entry>(), size_of::<ibv_gid>(), size_of::<ibv_port_attr>()), (32, 16, 52));
}

#[test]
fn each_event_is_told_as_what_it_is() {
    let at = |kind: Event, port, qpn| attr::event(&RawEvent { kind: kind as u32, port, qpn });
    for (kind, told) in [
        (Event::IBV_EVENT_PORT_ACTIVE, AsyncEvent::PortActive(2)),
        (Event::IBV_EVENT_PORT_ERR, AsyncEvent::PortError(2)),
        (Event::IBV_EVENT_GID_CHANGE, AsyncEvent::GidChange(2)),
        (Event::IBV_EVENT_LID_CHANGE, AsyncEvent::LidChange(2)),
        (Event::IBV_EVENT_SM_CHANGE, AsyncEvent::SmChange(2)),
        (Event::IBV_EVENT_CLIENT_REREGISTER, AsyncEvent::ClientReregister(2)),
        (Event::IBV_EVENT_PKEY_CHANGE, AsyncEvent::PkeyChange(2)),
        (Event::IBV_EVENT_DEVICE_FATAL, AsyncEvent::DeviceFatal),
        (Event::IBV_EVENT_CQ_ERR, AsyncEvent::Unknown(0)),
        (Event::IBV_EVENT_SRQ_LIMIT_REACHED, AsyncEvent::Unknown(15)),
    ] {
        assert_eq!(at(kind, 2, None), told);
    }
    let fatal = AsyncEvent::QpFatal(Qpn::truncate(17));
    for kind in [Event::IBV_EVENT_QP_FATAL, Event::IBV_EVENT_QP_REQ_ERR, Event::IBV_EVENT_QP_ACCESS_ERR] {
        assert_eq!(at(kind, 0, Some(17)), fatal);
    }
    assert_eq!(at(Event::IBV_EVENT_COMM_EST, 0, Some(17)), AsyncEvent::Unknown(4));
    // Of a newer library.
    assert_eq!(attr::event(&RawEvent { kind: 4711, port: 1, qpn: None }), AsyncEvent::Unknown(4711));
}

#[test]
fn a_port_is_converted() {
    let mut raw = ibv_port_attr::zero();
    (raw.state, raw.active_mtu, raw.link_layer, raw.gid_tbl_len) = (4, 3, 2, 1024);
    (raw.lid, raw.lmc, raw.active_speed, raw.active_width) = (7, 2, 32, 2);
    let p = attr::port(&raw, vec![PKey::DEFAULT]);
    assert!(p.active);
    assert_eq!((p.link_layer, p.active_mtu, p.lid, p.lmc), (LinkLayer::Ethernet, Mtu::M1024, Lid(7), 2));
    assert_eq!((p.gid_table_len, p.pkeys), (1024, vec![PKey::DEFAULT]));
    // 4 lanes of 25 Gb/s.
    assert!((p.bandwidth_bps - 12.5e9).abs() < 1e6, "{}", p.bandwidth_bps);

    (raw.state, raw.active_mtu, raw.link_layer, raw.gid_tbl_len, raw.active_speed) = (1, 77, 0, -1, 3);
    let p = attr::port(&raw, Vec::new());
    assert!(!p.active);
    assert_eq!((p.link_layer, p.active_mtu, p.gid_table_len), (LinkLayer::InfiniBand, Mtu::M256, 0));
    assert_eq!(p.bandwidth_bps, 0.0);
}

#[test]
fn bandwidth_of_known_and_unknown_codes() {
    assert!((attr::bandwidth(4, 2) - 4e9).abs() < 1.0, "40 Gb/s on the wire, 32 of data");
    assert!((attr::bandwidth(1, 1) - 0.25e9).abs() < 1.0);
    // HDR and NDR are named by what they carry.
    assert!((attr::bandwidth(64, 2) - 25e9).abs() < 0.1e9, "{}", attr::bandwidth(64, 2));
    assert!((attr::bandwidth(128, 2) - 50e9).abs() < 0.1e9);
    assert_eq!((attr::bandwidth(3, 2), attr::bandwidth(4, 3)), (0.0, 0.0));
}

#[test]
fn address_handle_attributes_keep_every_field() {
    let grh = GlobalRoute {
        dgid: gid("10.0.0.2"),
        sgid: gid("10.0.0.1"),
        hop_limit: 254,
        traffic_class: 106,
        flow_label: 0xffff_ffff,
    };
    let a = AhAttr {
        port: 2,
        sl: 3,
        src_path_bits: 5,
        static_rate: 6,
        dlid: Lid(0xc001),
        grh: Some(grh),
        soft: SoftAv::default(),
    };
    let raw = attr::ah(&a, 9);
    assert_eq!((raw.port_num, raw.sl, raw.src_path_bits, raw.static_rate, raw.dlid), (2, 3, 5, 6, 0xc001));
    assert_eq!((raw.is_global, raw.grh.sgid_index, raw.grh.hop_limit), (1, 9, 254));
    assert_eq!((raw.grh.traffic_class, raw.grh.flow_label), (106, 0xffff_ffff));
    assert_eq!(super::ffi::gid_bytes(&raw.grh.dgid), gid("10.0.0.2").0);

    let local = attr::ah(&AhAttr { grh: None, ..a }, 9);
    assert_eq!((local.is_global, local.grh.sgid_index, local.grh.hop_limit, local.dlid), (0, 0, 0, 0xc001));
}

#[test]
fn remote_writing_implies_local_writing() {
    assert_eq!(attr::access(Access::LOCAL_WRITE), 1);
    assert_eq!(attr::access(Access::REMOTE_WRITE), 1 | 2);
    assert_eq!(attr::access(Access::REMOTE_READ), 4);
    assert_eq!(attr::access(Access::all()), 7);
}

#[test]
fn completion_statuses() {
    for (raw, status) in [
        (0, WcStatus::Success),
        (1, WcStatus::LocalLength),
        (2, WcStatus::LocalQpOp),
        (4, WcStatus::LocalProtection),
        (5, WcStatus::WrFlush),
        (12, WcStatus::Other(12)),
        (999, WcStatus::Other(999)),
    ] {
        assert_eq!(attr::status(raw), status);
    }
}

#[test]
fn results_of_both_conventions() {
    assert_eq!(check("x", 0), Ok(()));
    assert_eq!(check("x", libc::EBUSY), Err(VerbsError::new("x", libc::EBUSY)));
    assert_eq!(check("x", -libc::EBUSY), Err(VerbsError::new("x", libc::EBUSY)));
}

fn buf(first: u8) -> Buf {
    let mut b = Buf::alloc(64).unwrap();
    b[0] = first;
    b
}

#[test]
fn a_posted_buffer_comes_out_once() {
    let mut slab = RecvSlab::new(2);
    let a = slab.insert(buf(1)).unwrap();
    let b = slab.insert(buf(2)).unwrap();
    assert_ne!(a, b);
    assert!(slab.is_full());
    assert_eq!(slab.insert(buf(3)).unwrap_err()[0], 3, "given back");
    assert_eq!(slab.take(b).unwrap()[0], 2);
    assert!(slab.take(b).is_none());
    assert_eq!((slab.len(), slab.is_full()), (1, false));
    // The next place is the one of `a`. No queue pair completes its receives in such an order; if one did, it would wait.
    assert_eq!(slab.insert(buf(4)).unwrap_err()[0], 4, "given back");
    assert_eq!(slab.take(a).unwrap()[0], 1);
    let c = slab.insert(buf(5)).unwrap();
    assert!(c != a && c != b, "no number is used twice");
    assert!(slab.take(a).is_none(), "the place of `c` now");
    assert_eq!(slab.take(c).unwrap()[0], 5);
    assert!(slab.take(7).is_none(), "no such number yet");
}

#[test]
fn a_number_from_before_a_reset_names_nothing() {
    let mut slab = RecvSlab::new(2);
    let old = slab.insert(buf(1)).unwrap();
    slab.insert(buf(2)).unwrap();
    let mut firsts: Vec<u8> = slab.drain().iter().map(|b| b[0]).collect();
    firsts.sort_unstable();
    assert_eq!((firsts, slab.len()), (vec![1, 2], 0));
    let (a, b) = (slab.insert(buf(3)).unwrap(), slab.insert(buf(4)).unwrap());
    assert!(slab.take(old).is_none());
    assert!(slab.take(a).is_some() && slab.take(b).is_some());
}

#[test]
fn gids_and_versions_as_sysfs_writes_them() {
    assert_eq!(gids::parse_gid("0000:0000:0000:0000:0000:ffff:0a4d:0001\n"), Some(gid("10.77.0.1")));
    assert_eq!(gids::parse_gid("fe80:0000:0000:0000:0000:0000:0000:0001"), Some(gid("fe80::1")));
    for bad in ["", "0000", "fe80::1", "0000:0000:0000:0000:0000:ffff:0a4d:0001:0002", "g000:0:0:0:0:0:0:0"] {
        assert_eq!(gids::parse_gid(bad), None, "{bad}");
    }
    assert_eq!(gids::version("RoCE v2\n"), RoceVersion::V2);
    assert_eq!(gids::version("IB/RoCE v1\n"), RoceVersion::V1);
    assert_eq!(gids::version("RoCE v3\n"), RoceVersion::Unknown);
}

/// A directory of this test's own, removed at its end.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Dir {
        let dir = std::env::temp_dir().join(format!("ib-{}-{name}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        Dir(dir)
    }

    fn file(&self, path: &str, text: &str) {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_gid_table_from_sysfs() {
    let dir = Dir::new("gids");
    let zero = "0000:0000:0000:0000:0000:0000:0000:0000\n";
    dir.file("gids/0", "fe80:0000:0000:0000:0000:0000:0000:0001\n");
    dir.file("gids/1", zero);
    dir.file("gids/2", "0000:0000:0000:0000:0000:ffff:0a4d:0001\n");
    dir.file("gids/3", "0000:0000:0000:0000:0000:ffff:0a4d:0001\n");
    dir.file("gid_attrs/types/0", "RoCE v2\n");
    dir.file("gid_attrs/types/2", "IB/RoCE v1\n");
    dir.file("gid_attrs/ndevs/0", "eth0\n");
    dir.file("gid_attrs/ndevs/2", "eth0.100\n");
    let entry = |index, ip, version, netdev: Option<&str>| GidEntry {
        index,
        gid: gid(ip),
        version,
        netdev: netdev.map(String::from),
    };
    assert_eq!(
        gids::from_sysfs(&dir.0, 4, LinkLayer::Ethernet).unwrap(),
        [
            entry(0, "fe80::1", RoceVersion::V2, Some("eth0")),
            entry(2, "10.77.0.1", RoceVersion::V1, Some("eth0.100")),
            entry(3, "10.77.0.1", RoceVersion::Unknown, None),
        ]
    );
    // A version means nothing there.
    let ib = gids::from_sysfs(&dir.0, 4, LinkLayer::InfiniBand).unwrap();
    assert!(ib.iter().all(|e| e.version == RoceVersion::V2));
    // Longer in words than in files, and not there at all.
    assert_eq!(gids::from_sysfs(&dir.0, 400, LinkLayer::Ethernet).unwrap().len(), 3);
    assert_eq!(gids::from_sysfs(&dir.0.join("none"), 4, LinkLayer::Ethernet), None);
    assert_eq!(gids::from_sysfs(&dir.0, 0, LinkLayer::Ethernet), None);
}

#[test]
fn entries_as_the_library_tells_them() {
    let mut raw = ibv_gid_entry::zero();
    raw.gid = ibv_gid { raw: gid("10.77.0.1").0 };
    (raw.gid_index, raw.gid_type) = (255, 2);
    let e = gids::entry(&raw).unwrap();
    assert_eq!((e.index, e.gid, e.version, e.netdev), (255, gid("10.77.0.1"), RoceVersion::V2, None));
    for (kind, version) in [(0, RoceVersion::V2), (1, RoceVersion::V1), (3, RoceVersion::Unknown)] {
        raw.gid_type = kind;
        assert_eq!(gids::entry(&raw).unwrap().version, version);
    }
    raw.gid_index = 256;
    assert_eq!(gids::entry(&raw), None, "no address handle can name it");
    assert_eq!(gids::entry(&ibv_gid_entry::zero()), None);
}

#[test]
fn the_local_gid_is_found_by_value_as_version_2_first() {
    let entry = |index, ip, version| GidEntry { index, gid: gid(ip), version, netdev: None };
    let table = [
        entry(0, "fe80::1", RoceVersion::V2),
        entry(2, "10.0.0.1", RoceVersion::V1),
        entry(5, "10.0.0.1", RoceVersion::V2),
        entry(6, "10.0.0.1", RoceVersion::V2),
        entry(7, "10.0.0.2", RoceVersion::V1),
    ];
    assert_eq!(gids::find(&table, gid("10.0.0.1")).unwrap().index, 5);
    assert_eq!(gids::find(&table, gid("10.0.0.2")).unwrap().index, 7);
    assert_eq!(gids::find(&table, gid("10.0.0.3")), None);
}

#[test]
fn network_interfaces_by_number_and_name() {
    let lo = ffi::netdev_index("lo");
    assert_ne!(lo, 0);
    assert_eq!(ffi::netdev_name(lo).as_deref(), Some("lo"));
    assert_eq!((ffi::netdev_index("no such"), ffi::netdev_name(0)), (0, None));
}

#[test]
fn why_a_device_cannot_be_used() {
    assert_eq!(list::wrong_transport(ibv_transport_type::IBV_TRANSPORT_IB), None);
    assert_eq!(list::wrong_transport(ibv_transport_type::IBV_TRANSPORT_UNSPECIFIED), None);
    assert!(list::wrong_transport(ibv_transport_type::IBV_TRANSPORT_IWARP).unwrap().contains("iWARP"));
    assert!(list::wrong_transport(ibv_transport_type::IBV_TRANSPORT_USNIC).unwrap().contains("type 2"));

    let dir = Dir::new("dev");
    let missing = list::no_access(&dir.0.join("uverbs0")).unwrap();
    assert!(missing.contains("uverbs0: No such file") && missing.contains("--device"), "{missing}");
    dir.file("uverbs1", "");
    assert_eq!(list::no_access(&dir.0.join("uverbs1")), None);

    dir.file("sys/mlx5_1/x", "");
    dir.file("sys/mlx5_0/x", "");
    assert_eq!(list::in_sysfs(&dir.0.join("sys")), ["mlx5_0", "mlx5_1"]);
    assert!(list::in_sysfs(&dir.0.join("none")).is_empty());
}

#[test]
fn looking_for_devices_is_harmless_where_there_are_none() {
    let found = super::devices();
    assert!(found.windows(2).all(|w| w[0].name < w[1].name), "{found:?}");
    let e = super::RdmaDevice::open("no_such_device").unwrap_err();
    assert_eq!(e.kind(), uct::ErrorKind::NoDevice);
    assert!(e.to_string().contains("no_such_device"), "{e}");
}

#[test]
fn fork_init_is_called_once_and_only_if_wanted() {
    use std::{
        cell::Cell,
        sync::{Arc, Mutex},
    };

    use uct::config::Ternary;

    /// Counts lines of the log.
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<usize>>);

    impl std::io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            *self.0.lock().unwrap() += bytes.iter().filter(|b| **b == b'\n').count();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    let lines = Lines::default();
    let l = lines.clone();
    let subscriber =
        tracing_subscriber::fmt().with_max_level(tracing::Level::WARN).with_writer(move || l.clone()).finish();
    let told = || *lines.0.lock().unwrap();
    // With a second one, threads of other tests cannot decide alone whether a place is heard that they come to first.
    let _second = tracing::Dispatch::new(tracing::subscriber::NoSubscriber::new());
    tracing::subscriber::with_default(subscriber, || {
        let (fork, calls) = (list::ForkInit::new(), Cell::new(0));
        let fails = || {
            calls.set(calls.get() + 1);
            Err(VerbsError::new("fork_init", libc::EINVAL))
        };
        assert!(fork.init(Ternary::No, || false, fails).is_ok());
        assert_eq!((calls.get(), told()), (0, 0), "n: not called");
        for _ in 0..3 {
            assert!(fork.init(Ternary::Try, || true, fails).is_ok());
        }
        assert_eq!((calls.get(), told()), (1, 1), "try: one warning");
        let e = fork.init(Ternary::Yes, || true, fails).unwrap_err();
        assert_eq!((e.kind(), e.errno()), (uct::ErrorKind::Unsupported, Some(libc::EINVAL)));
        assert!(e.to_string().contains("UCX_IB_FORK_INIT=y"), "{e}");
        assert_eq!((calls.get(), told()), (1, 1));

        let well = list::ForkInit::new();
        for wanted in [Ternary::Yes, Ternary::Try] {
            assert!(well.init(wanted, || true, || Ok(())).is_ok());
        }
        assert_eq!(told(), 1);
        // Where it would have mattered, not to want it is a warning, too.
        for _ in 0..3 {
            assert!(well.init(Ternary::No, || true, || Ok(())).is_ok());
        }
        assert_eq!(told(), 2);
    });
}

#[test]
fn why_a_device_that_is_there_does_not_open() {
    for (errno, words) in [
        (libc::ENOMEM, "a limit of the device"),
        (libc::ENOMEM, "not of memory: too many processes have it open; see dmesg"),
        (libc::EMFILE, "ulimit -n"),
        (libc::ENODEV, "removed"),
        (libc::EACCES, "udev"),
        (libc::EIO, "dmesg"),
    ] {
        let hint = list::open_hint(&VerbsError::new("open_device", errno));
        assert!(hint.contains(words), "{errno}: {hint}");
    }
}
