use std::time::Duration;

use super::*;
use crate::perf::{hist::Histogram, message::Limits};

fn side(pid: u32) -> Side {
    Side {
        version: VERSION.into(),
        host: "host7".into(),
        pid,
        cpu: (pid == 23).then_some(5),
        transport: "ud_verbs".into(),
        device: "soft0:1".into(),
        address: format!("127.0.0.{pid}"),
        limits: Limits { short: Some(64), bcopy: Some(4088), zcopy: Some(4088) },
        device_addr: String::new(),
        iface_addr: String::new(),
        ep_addr: None,
    }
}

fn report(format: Format, final_only: bool, tests: &[Test]) -> String {
    let heading = Heading {
        client: side(1),
        server: side(23),
        connect: ConnectMode::Iface,
        wait: WaitMode::Spin,
        layout: None,
        tests: tests.to_vec(),
        self_test: true,
    };
    let mut out = Vec::new();
    let mut r = Report::new(&mut out, format, final_only, heading);
    r.begin().unwrap();
    for (i, size) in [8usize, 1000].into_iter().enumerate() {
        for &test in tests {
            let mut h = Histogram::new();
            for ns in [1000, 2000, 3000, 1_234_567] {
                h.record(ns);
            }
            let lat = test == Test::Lat;
            let sample = Sample {
                iters: 1_000_000 * (i as u64 + 1),
                warmup: 10,
                elapsed: Duration::from_millis(500),
                one_way: lat.then_some(h),
            };
            r.add(Run { run: 1, test, layout: Layout::Bcopy, size }, sample);
        }
        r.end_row().unwrap();
    }
    let resends = Counter { name: "tx.resends", value: 1234 };
    r.finish(&[resends, Counter { name: "tx.none", value: 0 }]).unwrap();
    String::from_utf8(out).unwrap()
}

#[test]
fn the_table_is_aligned_and_says_what_it_measured() {
    let want = "\
uct_perf VERSION: active messages over ud_verbs, between two processes of this host
  client  soft0:1  127.0.0.1   host7 pid 1
  server  soft0:1  127.0.0.23  host7 pid 23 on cpu 5
  connected by interface address; waiting by spinning; layout short to 64 B, then bcopy; am_bw bcopy

                 am_lat, one way [us]              am_bw       am_rate
   bytes       p50      p99      avg      max       MB/s    messages/s
       8      2.00     1233    310.1     1235      16.00     2,000,000
    1000      2.00     1233    310.1     1235       4000     4,000,000

Latency is half of a round trip. 1 MB is 10^6 bytes. 12,000,080 messages (8.0 GB) arrived, each verified in number and content.
The client sent 1,234 packets again.
"
    .replace("VERSION", VERSION);
    let got = report(Format::Table, false, &Test::ALL);
    assert_eq!(got, want, "\n{got}");
}

#[test]
fn final_numbers_only() {
    let got = report(Format::Table, true, &[Test::Bw]);
    assert_eq!(
        got,
        "              am_bw\n   bytes       MB/s   messages/s\n       8      16.00    2,000,000\n    1000       4000    4,000,000\n"
    );
}

#[test]
fn csv_has_as_many_fields_as_names() {
    let got = report(Format::Csv, false, &Test::ALL);
    let lines: Vec<Vec<&str>> = got.lines().map(|l| l.split(',').collect()).collect();
    assert_eq!(lines.len(), 7);
    assert!(lines.iter().all(|l| l.len() == 16), "{got}");
    assert_eq!(lines[1][..7], ["am_lat", "bcopy", "8", "1000000", "10", "0.500000", "1.000"]);
    assert_eq!(lines[2][6..], ["", "", "", "", "", "", "", "16.000", "2000000.0", "1000010"]);
}

#[test]
fn json_is_one_object() {
    let v: serde_json::Value = serde_json::from_str(&report(Format::Json, false, &Test::ALL)).unwrap();
    assert_eq!(v["results"].as_array().unwrap().len(), 6);
    assert_eq!(v["client_counters"], serde_json::json!({"tx.resends": 1234}));
    assert_eq!(v["results"][0]["latency_us"]["max"], 1234.567);
    assert!(v["results"][1].get("latency_us").is_none());
    assert_eq!((&v["server"]["pid"], &v["connect"]), (&23.into(), &"iface".into()));
}

#[test]
fn numbers_for_people() {
    assert_eq!([0, 999, 1000, 1_234_567].map(thousands), ["0", "999", "1,000", "1,234,567"]);
    assert_eq!([0.0, 99.99, 99.999, 999.94, 12345.6].map(short_float), ["0.00", "99.99", "100.0", "999.9", "12346"]);
    assert_eq!([5, 5_000, 5_000_000, 5_000_000_000].map(volume), ["5 bytes", "5.0 kB", "5.0 MB", "5.0 GB"]);
}
