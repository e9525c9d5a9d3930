//! Fuzz targets: [`address`] for the addresses that peers give, [`frame`] for a datagram on the wire, [`text`] for settings and
//! what the kernel writes into files, [`netlink`] for what it says on sockets. `ci/fuzz` runs them under libFuzzer; the test at
//! the end replays what it has found.

use std::net::{IpAddr, SocketAddr};

use uct::config::Value;

use crate::{
    addr::{DeviceAddr, EpAddr, IfaceAddr, LinkAddr, ah_attr},
    config::{PathMtu, ReachabilityMode, SoftMtu, SubnetPrefix, Subnets},
    device::{GRH_LEN, LinkLayer},
    gid::LocalPort,
    reach::{look_up, parse_ipv4, parse_ipv6},
    soft::{
        frame::{self, FrameError, Header},
        icrc::{Flow, IdSolver},
    },
    sw::grh,
    types::Gid,
};

/// A port to be reached from.
fn port(link_layer: LinkLayer, ip: [u8; 4]) -> LocalPort {
    LocalPort {
        device: "rxe0".into(),
        force_global: true,
        ..LocalPort::example(link_layer, Gid::from_ip(IpAddr::from(ip)))
    }
}

/// Any bytes as each kind of address. What was read packs into bytes that read the same, and makes an address handle or an
/// error.
///
/// # Panics
/// If it does not.
pub fn address(bytes: &[u8]) {
    match DeviceAddr::parse(bytes) {
        Ok((addr, len)) => {
            assert!((1..=bytes.len()).contains(&len));
            let packed = addr.to_bytes();
            assert_eq!(packed.len(), addr.packed_len());
            assert!(packed.len() <= DeviceAddr::MAX_LEN);
            assert_eq!(DeviceAddr::parse_exact(&packed), Ok(addr), "packs as {packed:02x?}");
            // The part that is behind it is not looked at, the part that is in it is all needed.
            assert_eq!(DeviceAddr::parse(&bytes[..len]), Ok((addr, len)));
            assert_eq!(DeviceAddr::parse_exact(bytes).is_ok(), len == bytes.len());
            use_address(&addr);
        }
        Err(e) => {
            assert!(DeviceAddr::parse_exact(bytes).is_err());
            assert!(!e.to_string().is_empty());
        }
    }
    if let Ok(addr) = IfaceAddr::parse(bytes) {
        assert_eq!(addr.to_bytes(), bytes);
    }
    if let Ok(addr) = EpAddr::parse(bytes) {
        assert_eq!(addr.to_bytes(), bytes);
        assert!(addr.ep_id < 1 << 24);
    }
}

fn use_address(addr: &DeviceAddr) {
    assert!(!addr.to_string().is_empty());
    if let LinkAddr::Ethernet { gid, .. } = addr.link {
        assert!(gid.is_valid());
    }
    for link_layer in [LinkLayer::Ethernet, LinkLayer::InfiniBand] {
        for path in [0, 1, 255] {
            let attr = |ip| ah_attr(&port(link_layer, ip), addr, path);
            // Equal addresses give equal attributes.
            assert_eq!(attr([10, 0, 0, 1]).ok(), attr([10, 0, 0, 1]).ok());
            let _ = attr([127, 0, 0, 1]);
        }
    }
}

/// The first bytes choose the sockets and the Identification, the others are a frame. It is taken apart as one that was
/// received, and one made of what is in it is taken apart to the same.
///
/// # Panics
/// If it is not.
pub fn frame(bytes: &[u8]) {
    let Some((&[how, id_hi, id_lo, flip], rest)) = bytes.split_first_chunk() else { return };
    let id = u16::from_be_bytes([id_hi, id_lo]);
    let socket = |v6: &str, v4: &str| -> SocketAddr {
        // Constants.
        if how & 1 == 0 { v4.parse().expect("an address") } else { v6.parse().expect("an address") }
    };
    let (src, dst) = (socket("[fd00::1]:4000", "10.0.0.1:4000"), socket("[fd00::2]:4791", "10.0.0.2:4791"));
    let flow = Flow::new(src, dst).expect("one family");
    let mut solver = IdSolver::default();
    // As it came.
    let mut got = rest.to_vec();
    let checked = flow.prefix(got.len()).check(id, &mut got, &mut solver);
    assert_eq!(got, rest, "looking at it changed it");
    match frame::parse(rest) {
        Err(FrameError::Short | FrameError::Opcode(_) | FrameError::Version(_)) => {
            if let Some(area) = rest.first_chunk::<GRH_LEN>() {
                let _ = grh::gids(area);
            }
        }
        Ok((header, payload)) => {
            if let Some(found) = checked {
                assert!(how & 1 == 1 || flow.prefix(rest.len()).icrc(found, &mut got).to_le_bytes() == last4(rest));
            }
            remake(&flow, header, payload, id, flip);
        }
    }
}

fn last4(frame: &[u8]) -> [u8; 4] {
    frame.last_chunk().copied().unwrap_or_default()
}

fn remake(flow: &Flow, header: Header, payload: &[u8], id: u16, flip: u8) {
    let len = frame::frame_len(payload.len());
    let mut made = vec![0xee; len];
    // Immediates are only ever received.
    let header = Header { imm: None, ..header };
    let head = made.first_chunk_mut().expect("room for the headers");
    frame::write_header(head, &header, payload.len());
    made[frame::HEADER_LEN..frame::HEADER_LEN + payload.len()].copy_from_slice(payload);
    let prefix = flow.prefix(len);
    frame::seal(&mut made, payload.len(), &prefix, id);
    assert_eq!(frame::parse(&made), Ok((header, payload)));
    let mut solver = IdSolver::default();
    let solved = prefix.check(id.wrapping_add(u16::from(flip)), &mut made, &mut solver);
    assert_eq!(solved, Some(if flow.is_ipv4() { id } else { 0 }));
    // One bit of the payload that turns over is seen.
    if let Some(at) = payload.len().checked_sub(1).map(|last| usize::from(flip) % (last + 1)) {
        made[frame::HEADER_LEN + at] ^= 1 << (flip & 7);
        let other = prefix.check(id, &mut made, &mut solver);
        // On IPv4 an Identification may exist that explains it; never the right one.
        assert!(other.is_none() || (flow.is_ipv4() && other != Some(id)), "{other:?}");
    }
    let mut area = [0; GRH_LEN];
    flow.grh(len, id).write(&mut area);
    assert!(grh::gids(&area).is_some(), "a header of ours that we do not read");
}

/// The first byte says as what the others are read: a setting of this crate, or a file of the kernel's.
///
/// # Panics
/// If a value does not survive printing.
pub fn text(bytes: &[u8]) {
    let Some((which, text)) = bytes.split_first() else { return };
    let text = &String::from_utf8_lossy(text);
    match which % 7 {
        0 => same::<ReachabilityMode>(text),
        1 => same::<PathMtu>(text),
        2 => same::<SubnetPrefix>(text),
        3 => same::<SoftMtu>(text),
        4 => {
            same::<Subnets>(text);
            if let Ok(nets) = Subnets::parse(text) {
                let all = ["10.1.2.3", "fd00::1"].map(|ip| ip.parse().is_ok_and(|ip: IpAddr| nets.allows(ip)));
                assert!(!nets.is_all() || all == [true; 2]);
            }
        }
        5 => routes(&parse_ipv4(text)),
        _ => routes(&parse_ipv6(text)),
    }
}

fn same<T: Value + PartialEq + std::fmt::Debug>(text: &str) {
    if let Ok(v) = T::parse(text) {
        let printed = v.print();
        assert_eq!(T::parse(&printed).as_ref(), Ok(&v), "{text:?} prints as {printed:?}");
    }
}

fn routes(table: &[crate::reach::Route]) {
    for ip in ["10.1.2.3", "0.0.0.0", "fd00::1", "::"] {
        if let Ok(ip) = ip.parse() {
            let _ = look_up(table, ip, "eth0");
        }
    }
}

#[cfg(feature = "rdma-core")]
pub use crate::rdma_core::netlink_fuzz as netlink;

#[cfg(test)]
#[path = "../../fuzz/src/replay.rs"]
mod replay;

#[cfg(test)]
#[test]
fn what_fuzzing_found() {
    replay::replay(&[("address", address), ("frame", frame), ("text", text)]);
    #[cfg(feature = "rdma-core")]
    replay::replay(&[("netlink", netlink)]);
}
