//! What `ib::rdma_core` says of the machine's RDMA devices is what the crate `ibverbs` says of them, a binding that shares
//! nothing with ours but the C library.
#![cfg(feature = "ibverbs")]

/// The name by which `ci/rdma` finds suites.
mod rdma {
    use ib::{
        device::{Device, LinkLayer, RoceVersion},
        rdma_core::{RdmaDevice, devices},
    };

    /// A GID table entry: port, index, GID, version, name of the network interface.
    type Entry = (u8, u32, [u8; 16], String, String);

    fn netdev(index: u32) -> String {
        let of = |e: std::io::Result<std::fs::DirEntry>| {
            let name = e.ok()?.file_name().into_string().ok()?;
            let number = std::fs::read_to_string(format!("/sys/class/net/{name}/ifindex")).ok()?;
            (number.trim() == index.to_string()).then_some(name)
        };
        std::fs::read_dir("/sys/class/net").ok().and_then(|mut d| d.find_map(of)).unwrap_or_default()
    }

    #[test]
    fn both_bindings_tell_the_same() {
        let list = match ibverbs::devices() {
            Ok(list) => list,
            Err(e) => {
                assert!(devices().is_empty(), "ibverbs finds nothing: {e}");
                println!("both_bindings_tell_the_same: skipped: no RDMA devices ({e})");
                return;
            }
        };
        let theirs: Vec<_> = list.iter().collect();
        let mut names: Vec<String> = theirs.iter().filter_map(|d| Some(d.name()?.to_str().ok()?.to_string())).collect();
        names.sort();
        assert_eq!(devices().into_iter().map(|d| d.name).collect::<Vec<_>>(), names);

        let mut compared = 0;
        for device in &theirs {
            let name = device.name().and_then(|n| n.to_str().ok()).expect("a name");
            let context = match device.open() {
                Ok(context) => context,
                Err(e) => {
                    // It wants port 1 to be active.
                    println!("{name}: not compared: ibverbs: {e}");
                    continue;
                }
            };
            let ours = RdmaDevice::open(name).expect("what they open, we open");
            let ports = 1..=ours.attr().port_count;
            let mut here: Vec<Entry> = Vec::new();
            for port in ports.clone() {
                let ethernet = ours.query_port(port).unwrap().link_layer == LinkLayer::Ethernet;
                for g in ours.query_gids(port).unwrap() {
                    let version = match (ethernet, g.version) {
                        (false, _) => "IB",
                        (true, RoceVersion::V1) => "1",
                        (true, RoceVersion::V2) => "2",
                        (true, RoceVersion::Unknown) => "?",
                    };
                    here.push((port, u32::from(g.index), g.gid.0, version.into(), g.netdev.unwrap_or_default()));
                }
            }
            let mut there: Vec<Entry> = context
                .gid_table()
                .iter()
                .map(|g| {
                    // `enum ibv_gid_type`.
                    let version = match g.gid_type {
                        0 => "IB",
                        1 => "1",
                        2 => "2",
                        _ => "?",
                    };
                    let mut gid = [0; 16];
                    gid[..8].copy_from_slice(&g.gid.subnet_prefix().to_be_bytes());
                    gid[8..].copy_from_slice(&g.gid.interface_id().to_be_bytes());
                    (g.port_num as u8, g.gid_index, gid, version.into(), netdev(g.ndev_ifindex))
                })
                .collect();
            here.sort();
            there.sort();
            assert_eq!(here, there, "{name}");
            assert!(there.iter().all(|e| ports.contains(&e.0)), "{name}: {there:?}");
            println!("{name}: {} ports, {} GIDs, the same in both", ports.end(), here.len());
            compared += 1;
        }
        assert!(std::env::var_os("SOFT_ROCE").is_none() || compared > 0, "nothing was compared");
    }
}
