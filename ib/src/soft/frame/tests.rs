//! Golden frames captured from kernel soft-RoCE, damage, and arbitrary bytes.

use std::net::SocketAddr;

use proptest::prelude::*;

use super::*;
use crate::{
    device::GRH_LEN,
    soft::icrc::{Flow, IdSolver},
    sw::grh::gids,
    types::Gid,
};

fn hex(s: &str) -> Vec<u8> {
    let digits: Vec<u8> = s.bytes().filter(|b| !b.is_ascii_whitespace()).collect();
    digits.chunks(2).map(|d| u8::from_str_radix(std::str::from_utf8(d).unwrap(), 16).unwrap()).collect()
}

fn flow(src: &str, dst: &str) -> Flow {
    Flow::new(src.parse().unwrap(), dst.parse().unwrap()).unwrap()
}

/// A captured frame: flow, IPv4 ID, bytes with ICRC.
struct Golden {
    flow: Flow,
    id: u16,
    frame: Vec<u8>,
}

fn golden() -> [Golden; 4] {
    let counted: Vec<u8> = (0..64).collect();
    let v1 = [hex("6400ffff 00000011 00000007 11223344 0000abcd"), counted, hex("3c0110d0")].concat();
    let v2 = hex("6400ffff 00012345 00123458 a1b2c3d4 00000011 5a81337b");
    let v3 = hex("6530ffff 00012345 00123457 a1b2c3d4 00000011 cafebabe 030a11181f 000000 72f8dca0");
    let body: Vec<u8> = (0..61).map(|i| (7 * i + 3) as u8).collect();
    let v4 = [hex("6530ffff 0000004d 0012346a 0a0b0c0d 00000011 01020304"), body, hex("000000 8496b9a1")].concat();
    let rxe = || flow("10.77.0.1:57236", "10.77.0.2:4791");
    [
        Golden { flow: flow("10.77.0.2:4791", "10.77.0.1:4791"), id: 0, frame: v1 },
        Golden { flow: rxe(), id: 52451, frame: v2 },
        Golden { flow: rxe(), id: 52433, frame: v3 },
        Golden { flow: flow("[fd77::1]:57236", "[fd77::2]:4791"), id: 0, frame: v4 },
    ]
}

#[test]
fn golden_frames_have_the_captured_icrc() {
    for (n, mut g) in golden().into_iter().enumerate() {
        let prefix = g.flow.prefix(g.frame.len());
        let before = g.frame.clone();
        let icrc = prefix.icrc(g.id, &mut g.frame);
        assert_eq!(g.frame, before, "V{}: hashing changed the frame", n + 1);
        assert_eq!(icrc.to_le_bytes(), g.frame[g.frame.len() - 4..], "V{}", n + 1);
    }
}

#[test]
fn golden_frames_parse() {
    let g = golden();
    let (h, payload) = parse(&g[1].frame).unwrap();
    assert_eq!((h.dest_qpn.get(), h.psn, h.qkey, h.src_qpn.get()), (0x12345, 0x123458, QKey(0xa1b2_c3d4), 0x11));
    assert_eq!((h.pkey, h.imm, h.solicited, payload.len()), (PKey::DEFAULT, None, false, 0));
    let (h, payload) = parse(&g[2].frame).unwrap();
    assert_eq!(h.imm, Some([0xca, 0xfe, 0xba, 0xbe]));
    assert_eq!(payload, [3, 0x0a, 0x11, 0x18, 0x1f], "the pad is not payload");
    let (_, payload) = parse(&g[3].frame).unwrap();
    assert_eq!(payload.len(), 61);
}

#[test]
fn a_built_frame_equals_the_captured_one() {
    let g = &golden()[0];
    let payload: Vec<u8> = (0..64).collect();
    let h = Header {
        solicited: false,
        pkey: PKey::DEFAULT,
        dest_qpn: Qpn::truncate(0x11),
        psn: 7,
        qkey: QKey(0x1122_3344),
        src_qpn: Qpn::truncate(0xabcd),
        imm: None,
    };
    assert_eq!(build(&h, &payload, &g.flow, 0), g.frame);
}

fn build(h: &Header, payload: &[u8], flow: &Flow, id: u16) -> Vec<u8> {
    // Filled with junk: the builder must write every byte.
    let mut frame = vec![0xa5; frame_len(payload.len())];
    write_header(frame.first_chunk_mut().unwrap(), h, payload.len());
    frame[HEADER_LEN..HEADER_LEN + payload.len()].copy_from_slice(payload);
    let prefix = flow.prefix(frame.len());
    seal(&mut frame, payload.len(), &prefix, id);
    frame
}

#[test]
fn unknown_ids_are_solved_for() {
    let mut solver = IdSolver::default();
    for (n, mut g) in golden().into_iter().enumerate() {
        let prefix = g.flow.prefix(g.frame.len());
        for expected in [0, 1, 77, 0x1234] {
            // A wrong guess on IPv6 changes nothing: there is no ID.
            assert_eq!(prefix.check(expected, &mut g.frame, &mut solver), Some(g.id), "V{} from {expected}", n + 1);
        }
    }
}

#[test]
fn no_single_bit_error_passes() {
    let mut solver = IdSolver::default();
    for (n, mut g) in golden().into_iter().enumerate() {
        let prefix = g.flow.prefix(g.frame.len());
        for bit in 0..g.frame.len() * 8 {
            // The BTH's fifth byte is masked: routers mark congestion in it.
            if bit / 8 == 4 {
                continue;
            }
            g.frame[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(prefix.check(0, &mut g.frame, &mut solver), None, "V{} bit {bit}", n + 1);
            g.frame[bit / 8] ^= 1 << (bit % 8);
        }
    }
}

#[test]
fn headers_of_the_packet_are_covered() {
    let mut solver = IdSolver::default();
    let mut g = golden().into_iter().next().unwrap();
    let len = g.frame.len();
    for (src, dst) in [
        ("10.77.0.3:4791", "10.77.0.1:4791"),
        ("10.77.0.2:4791", "10.77.0.9:4791"),
        ("10.77.0.2:4792", "10.77.0.1:4791"),
        ("10.77.0.2:4791", "10.77.0.1:4790"),
    ] {
        let p = flow(src, dst).prefix(len);
        assert_eq!(p.check(0, &mut g.frame, &mut solver), None, "{src} -> {dst}");
    }
    assert_eq!(g.flow.prefix(len + 4).check(0, &mut g.frame, &mut solver), None, "another length");
}

#[test]
fn grh_shows_the_ip_header() {
    let g = golden();
    let mut grh = [0x55; GRH_LEN];
    g[1].flow.grh(g[1].frame.len(), g[1].id).write(&mut grh);
    assert_eq!(grh[..20], [0x55; 20], "left as they were");
    assert_eq!(grh[20..30], hex("4500 0034 cce3 4000 4011"));
    assert_eq!(grh[32..], hex("0a4d0001 0a4d0002"));
    let gid = |ip: &str| Gid::from_ip(ip.parse().unwrap());
    assert_eq!(gids(&grh), Some((gid("10.77.0.1"), gid("10.77.0.2"))), "the header checksum is valid");
    g[3].flow.grh(g[3].frame.len(), 0).write(&mut grh);
    assert_eq!(grh[..8], hex("60000000 0064 11 40"));
    assert_eq!(grh[8..], [hex("fd770000000000000000000000000001"), hex("fd770000000000000000000000000002")].concat());
}

#[test]
fn malformed_frames_are_told_apart() {
    let good = golden()[2].frame.clone();
    for len in 0..good.len() {
        if len < HEADER_LEN + IMM_LEN + ICRC_LEN + 3 {
            assert_eq!(parse(&good[..len]), Err(FrameError::Short), "{len} bytes");
        } else {
            assert!(parse(&good[..len]).is_ok(), "{len} bytes");
        }
    }
    let with = |at: usize, byte: u8| {
        let mut f = good.clone();
        f[at] = byte;
        parse(&f).map(|_| ())
    };
    for opcode in [0x04, 0x66, 0x81, 0] {
        assert_eq!(with(0, opcode), Err(FrameError::Opcode(opcode)));
    }
    assert_eq!(with(1, 0x31), Err(FrameError::Version(1)));
    assert_eq!(with(1, 0x70), Ok(()), "MigReq is ignored");
    assert_eq!(with(4, 0xaa), Ok(()), "congestion marks are ignored");
}

#[test]
fn flows_of_two_families_do_not_exist() {
    let v4: SocketAddr = "10.0.0.1:1".parse().unwrap();
    let v6: SocketAddr = "[::1]:1".parse().unwrap();
    assert_eq!(Flow::new(v4, v6), None);
    assert_eq!(Flow::new(v6, v4), None);
}

proptest! {
    #[test]
    fn built_frames_come_back(
        payload in proptest::collection::vec(any::<u8>(), 0..4200),
        (dest, src, psn, qkey, pkey) in (any::<u32>(), any::<u32>(), any::<u32>(), any::<u32>(), any::<u16>()),
        solicited: bool, v6: bool, id: u16, guess: u16,
    ) {
        let flow = if v6 { flow("[fd00::9]:1", "[fd00::1]:65535") } else { flow("10.0.0.9:65535", "10.0.0.1:1") };
        let h = Header {
            solicited, pkey: PKey(pkey), dest_qpn: Qpn::truncate(dest), psn: psn & 0xff_ffff, qkey: QKey(qkey),
            src_qpn: Qpn::truncate(src), imm: None,
        };
        let mut frame = build(&h, &payload, &flow, id);
        let prefix = flow.prefix(frame.len());
        let found = prefix.check(guess, &mut frame, &mut IdSolver::default());
        prop_assert_eq!(found, Some(if v6 { 0 } else { id }));
        prop_assert_eq!(parse(&frame), Ok((h, &payload[..])));
    }

    #[test]
    fn arbitrary_bytes_never_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..200), id: u16) {
        let _ = parse(&bytes);
        let before = bytes.clone();
        for flow in [flow("10.0.0.9:1", "10.0.0.1:2"), flow("[fd00::9]:1", "[fd00::1]:2")] {
            let _ = flow.prefix(bytes.len()).check(id, &mut bytes, &mut IdSolver::default());
        }
        prop_assert_eq!(before, bytes);
    }
}
