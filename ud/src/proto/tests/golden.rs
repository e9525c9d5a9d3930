//! Packets as a UCX process sends them, byte for byte.
//!
//! Two engines play UCX processes on host "vm" with pid 0x3631, queue pairs 0x010202 (A) and 0x030404 (B), LID 0x1234.

use std::time::Duration;

use super::net::*;
use crate::proto::{EpId, SendKind, describe, psn::Psn, wire};

fn ident() -> [u8; 20] {
    let mut i = [0; 20];
    i[..2].copy_from_slice(b"vm");
    i[16..18].copy_from_slice(&[0x31, 0x36]);
    i
}

fn ucx_pair() -> Net {
    let mut net = Net::with(2, 1, |i, cfg| {
        cfg.local_qpn = [0x01_0202, 0x03_0404][i];
        cfg.device_addr = vec![0x00, 0x34, 0x12];
        cfg.first_ep_id = Some(0);
        cfg.initial_psn = 1;
        cfg.foreign_ident = Some(ident());
    });
    // Both are at LID 0x1234; the harness takes the second byte of an address for the node.
    for n in &mut net.nodes {
        n.addr = 0x34;
    }
    net.records = true;
    net
}

fn hex(bytes: &[u8]) -> String {
    let words: Vec<String> =
        bytes.chunks(4).map(|w| w.iter().map(|b| format!("{b:02x}")).collect::<String>()).collect();
    words.join(" ")
}

fn sent(net: &mut Net, from: usize) -> Vec<String> {
    let all = std::mem::take(&mut net.sent);
    let (mine, others): (Vec<_>, Vec<_>) = all.into_iter().partition(|(n, _)| *n == from);
    net.sent = others;
    mine.iter().map(|(_, b)| hex(b)).collect()
}

/// Sends without the network: only the packet counts.
fn am(net: &mut Net, ep: EpId, id: u8, payload: &[u8], kind: SendKind) -> String {
    net.send_as(0, ep, id, payload, kind).unwrap();
    let packet = sent(net, 0).pop().unwrap();
    net.settle();
    net.sent.clear();
    packet
}

const CREQ: &str = "ffffff20 01000000 01000000 02020100 00000000 00000000 00000000 766d0000 \
                    00000000 00000000 00000000 31360000 003412";

#[test]
fn connection_and_messages() {
    let mut net = ucx_pair();
    let ep = net.connect(0, 1);
    net.settle();
    assert_eq!(sent(&mut net, 0), [CREQ, "00000000 02000100"]);
    assert_eq!(
        sent(&mut net, 1),
        ["00000022 01000100 02000000 00000000 00000000 00000000 00000000 766d0000 00000000 00000000 00000000 31360000"]
    );
    let header = 0x1122_3344_5566_7788u64.to_le_bytes();
    let short = [&header[..], b"abcd"].concat();
    assert_eq!(am(&mut net, ep, 5, &short, SendKind::Copy), "00000029 02000100 88776655 44332211 61626364");
    assert_eq!(am(&mut net, ep, 6, b"wxyz", SendKind::Copy), "00000033 03000100 7778797a");
    assert!(am(&mut net, ep, 31, &[0x55; 20], SendKind::Copy).starts_with("000000fb 04000100 55555555"));
    let zcopy = am(&mut net, ep, 7, b"HEADRZZZZZZZZZZZZZZZZ", SendKind::Zcopy);
    assert!(zcopy.starts_with("0000003b 05000100 48454144 525a5a5a"), "{zcopy}");
}

#[test]
fn a_repeated_creq_differs_in_ack_req_only() {
    let mut net = ucx_pair();
    net.filter = Some(Box::new(|_, _| false));
    net.connect(0, 1);
    net.run_for(Duration::from_millis(200));
    let all = sent(&mut net, 0);
    assert_eq!(all[0], CREQ);
    assert_eq!(all.len(), 4);
    for repeated in &all[1..] {
        assert_eq!(*repeated, CREQ.replacen("ffffff20", "ffffff22", 1));
    }
}

#[test]
fn the_second_endpoint_and_another_path() {
    let mut net = ucx_pair();
    net.connect(0, 1);
    net.settle();
    net.sent.clear();
    let caps = net.caps(1);
    let (ep, _) = net.nodes[0].eng.connect_to_iface(net.now, 0x34, 0x03_0404, 1, caps).unwrap();
    net.resolve(0, ep, true);
    net.settle();
    let creq = sent(&mut net, 0)[0].clone();
    assert!(
        creq.starts_with("ffffff20 01000000 01000000 02020101 00000000 01000000 01000000 766d0000"),
        "id 1 at 15, conn_sn 1 at 20, path 1 at 24: {creq}"
    );
    let crep = sent(&mut net, 1)[0].clone();
    assert!(crep.starts_with("01000022 01000100 02000000 01000000"), "to id 1, from id 1: {crep}");
}

/// An ack request from the timer, and the keep-alive. UCX's keep-alive asks for an ack when its place in the window says so;
/// ours always does, so that an answer comes at once.
#[test]
fn timer_and_keep_alive() {
    let mut net = ucx_pair();
    let ep = net.connect(0, 1);
    net.settle();
    // PSN 2 to 7: after that the next PSN is 8, as in the recording.
    for _ in 2..8 {
        net.send_wait(0, ep, b"");
    }
    net.flush(0, ep);
    net.settle();
    net.sent.clear();
    net.nodes[0].eng.check(net.now, ep, None).unwrap();
    net.settle();
    assert_eq!(sent(&mut net, 0), ["00000012 08000100 00000000 00000000"]);
    assert_eq!(sent(&mut net, 1), ["00000000 02000800"]);
    net.filter = Some(Box::new(|_, _| false));
    net.send(0, ep, b"").unwrap();
    net.sent.clear();
    net.run_for(Duration::from_millis(11));
    // UCX asks once in that time. Ours asks early, too, always with the same bytes.
    let asked = sent(&mut net, 0);
    assert!(asked.len() > 1 && asked.iter().all(|a| a == "00000002 0a000100"), "{asked:?}");
}

#[test]
fn nack() {
    let mut net = ucx_pair();
    let ep = net.connect(0, 1);
    net.settle();
    net.send(0, ep, b"").unwrap();
    net.settle();
    net.sent.clear();
    net.filter = Some(Box::new(|from, _| from == 1));
    net.send(0, ep, b"").unwrap();
    net.filter = None;
    net.run_for(Duration::from_millis(11));
    assert_eq!(sent(&mut net, 1)[0], "00000008 02000200");
}

#[test]
fn first_message_after_connect_to_endpoint() {
    let mut net = ucx_pair();
    let (a, _) = net.p2p(0, 1);
    assert!(net.sent.is_empty(), "no handshake");
    net.send_as(0, a, 5, &[0; 8], SendKind::Copy).unwrap();
    assert_eq!(sent(&mut net, 0), ["00000029 01000000 00000000 00000000"]);
}

#[test]
fn the_survivor_of_a_restart_answers_with_its_next_psn() {
    let mut net = ucx_pair();
    net.connect(0, 1);
    net.settle();
    net.sent.clear();
    // The same process opens its interface anew, with another first endpoint id.
    net.restart(0, |cfg| cfg.first_ep_id = Some(1));
    net.connect(0, 1);
    net.settle();
    assert!(sent(&mut net, 1)[0].starts_with("01000022 02000100 02000000 00000000"));
    // UCX's newcomer sends a NACK, for the jump; the jump itself needs no repair, so ours sends a plain ack.
    assert_eq!(sent(&mut net, 0)[1], "00000000 02000200");
}

#[test]
fn neth_is_read_as_it_is_written() {
    for bytes in [[0, 0, 0, 0x29, 2, 0, 1, 0], [0xff, 0xff, 0xff, 0x20, 1, 0, 0, 0], [0, 0, 0, 8, 2, 0, 14, 0]] {
        assert_eq!(wire::Neth::parse(&bytes).unwrap().emit(), bytes);
    }
    let neth = wire::Neth::parse(&[7, 0, 0, 0x2b, 12, 0, 9, 0]).unwrap();
    assert_eq!((neth.dest(), neth.am_id(), neth.psn, neth.ack), (7, 5, Psn::new(12), Psn::new(9)));
    assert_eq!(describe(&neth.emit()).to_string(), "AM 5 dest 7 psn 12 ack 9 A");
}

/// The extension packets are ours to define; these bytes pin them down.
#[test]
fn extension_packets() {
    let neth = wire::Neth { packet_type: wire::CTL | 7, psn: Psn::new(0x0102), ack: Psn::new(0x0304) };
    let mut out = Vec::new();
    wire::Xack { gap: true, budget: 0x0a0b_0c0d, sacked: 0x1122_3344_5566_7788 }.emit(neth, &mut out);
    assert_eq!(hex(&out), "07000020 02010403 40010000 0d0c0b0a 88776655 44332211");
    assert_eq!(wire::Xack::parse(&out).unwrap().sacked, 0x1122_3344_5566_7788);
    out.clear();
    wire::emit_bye(wire::BYE, neth, 0x0005_0607, &mut out);
    assert_eq!(hex(&out), "07000020 02010403 41000000 07060500");
    let ext = crate::proto::ExtCaps {
        features: crate::proto::Features::all(),
        incarnation: 0x0102_0304_0506_0708,
        rx_budget: 0x1122_3344,
    };
    let ident = wire::ext_ident(&ext);
    assert_eq!(hex(&ident), "55435478 01000700 08070605 04030201 44332211");
    assert_eq!(wire::parse_ext(&ident), Some(ext));
}
