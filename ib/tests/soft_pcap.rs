//! The capture file of a soft device, as tshark reads it. Without tshark the test says so and passes.

mod soft_common;

use std::{path::PathBuf, process::Command};

use ib::{
    device::UdQp,
    soft::{SoftConfig, SoftDevice},
};
use soft_common::*;

const FIELDS: [&str; 8] = [
    "infiniband.bth.opcode",
    "infiniband.bth.destqp",
    "infiniband.deth.srcqp",
    "infiniband.bth.padcnt",
    "data.data",
    "infiniband.invariant.crc",
    "ip.id",
    "udp.checksum.status",
];

fn tshark(file: &PathBuf, ports: [u16; 2]) -> Option<Vec<Vec<String>>> {
    let mut cmd = Command::new("tshark");
    cmd.arg("-r").arg(file).args(["-T", "fields", "-E", "separator=;", "-o", "udp.check_checksum:TRUE"]);
    for port in ports {
        cmd.args(["-d", &format!("udp.port=={port},infiniband")]);
    }
    for field in FIELDS {
        cmd.args(["-e", field]);
    }
    let out = match cmd.output() {
        Ok(out) => out,
        Err(e) => {
            println!("skipped: tshark: {e}");
            return None;
        }
    };
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let text = String::from_utf8(out.stdout).unwrap();
    Some(text.lines().map(|l| l.split(';').map(str::to_string).collect()).collect())
}

#[test]
fn tshark_reads_captures_as_rocev2() {
    for bind in ["127.0.0.1", "::1"] {
        let file = std::env::temp_dir().join(format!("soft-pcap-{}-{}.pcap", std::process::id(), bind.len()));
        let cfg = SoftConfig { port: Some(0), pcap: Some(file.clone()), ..SoftConfig::at(bind.parse().unwrap()) };
        let mut a = Node::on(&SoftDevice::open(&cfg).unwrap(), 4);
        let mut b = Node::new(bind, 8);
        let ah = a.ah(&b);
        for len in [5, 5, 0, 8] {
            a.post(&ah, b.qp.qpn(), QKEY, &b"payloads"[..len]);
        }
        a.qp.ring();
        b.receive(4);
        let back = b.ah(&a);
        b.post(&back, a.qp.qpn(), QKEY, b"answer");
        b.qp.ring();
        a.receive(1);
        let rows = tshark(&file, [a.dev.local_addr().port(), b.dev.local_addr().port()]);
        let size = std::fs::metadata(&file).unwrap().len();
        std::fs::remove_file(&file).unwrap();
        assert!(size > 24, "the capture is written at once");
        let Some(rows) = rows else { return };

        let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
        assert_eq!(rows.len(), 5, "{rows:?}");
        let (qa, qb) = (a.qp.qpn().get(), b.qp.qpn().get());
        // The first two and the empty one are a run, so the IDs count up.
        let want = [
            (qb, qa, 3, "paylo", 0),
            (qb, qa, 3, "paylo", 1),
            (qb, qa, 0, "", 2),
            (qb, qa, 0, "payloads", 0),
            (qa, qb, 2, "answer", 0),
        ];
        for (row, (dest, src, pad, text, id)) in rows.iter().zip(want) {
            assert_eq!(
                row[..4],
                ["100".into(), format!("0x{dest:06x}"), format!("0x{src:08x}"), pad.to_string()],
                "{row:?}"
            );
            assert!(row[4].replace(':', "").starts_with(&hex(text.as_bytes())), "{row:?}");
            // Of an empty message tshark 4.0 shows no ICRC.
            assert!(text.is_empty() || row[5].starts_with("0x"), "{row:?}");
            let id = if bind.contains(':') { String::new() } else { format!("0x{id:04x}") };
            assert_eq!(row[6], id, "{row:?}");
            assert_eq!(row[7], "1", "the UDP checksum is good: {row:?}");
        }
    }
}
