//! The bytes that a whole stack puts on the wire, against those of a UCX process in the same situation.
//!
//! The expected bytes were captured from UCX's `ud_verbs`. They are ours but for one place: UCX writes its host name and
//! process id at 28..48 of CREQ and CREP, which no UCX process reads. Ours writes who it is and what it understands
//! (magic, version, features, incarnation, receive budget), and no host name. Padding that UCX leaves as it finds it is
//! zero here. On soft devices a trailer follows the device address, which a UCX process does not read either.

use std::{
    net::{Ipv4Addr, UdpSocket},
    sync::Arc,
    time::Duration,
};

use ib::{
    addr::{DeviceAddr, IfaceAddr, LinkAddr, Trailer},
    device::{Device, RoceVersion, SoftIdentity},
    sim::SimConfig,
    soft::SoftDevice,
    sw::{Filter, FilterVerdict},
    types::{Gid, Mtu, PKey, Qpn},
};
use parking_lot::Mutex;
use uct::{AmId, Ep, EpParams, Posted, md::MemoryDomain};
use uct_tests::{
    fabric::{Fabric, Sim, Soft},
    world::{NodeOptions, World},
};
use ud::proto::Features;

/// Bytes from hex digits; spaces do not count.
fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(|b| !b.is_ascii_whitespace()).collect();
    digits
        .chunks(2)
        .map(|d| u8::from_str_radix(std::str::from_utf8(d).expect("ascii"), 16).expect("hex digits"))
        .collect()
}

type Log = Arc<Mutex<Vec<Vec<u8>>>>;

fn tap() -> (Log, Filter) {
    let log = Log::default();
    let l = log.clone();
    let filter: Filter = Box::new(move |p| {
        l.lock().push(p.payload.to_vec());
        FilterVerdict::Pass
    });
    (log, filter)
}

/// What UCX would send: no extensions, the first PSN is 1, the first endpoint id 0.
fn plain() -> NodeOptions {
    let mut o = NodeOptions::default();
    o.tuning.initial_psn = None;
    o.tuning.first_ep_id = Some(0);
    o.tuning.features = Some(Features::empty());
    o.tuning.incarnation = Some(0x1122_3344_5566_7788);
    o
}

/// The bytes at 28..48 in place of name and process id.
fn ident(features: &str) -> String {
    format!("55435478 0100 {features} 8877665544332211 00000000")
}

/// Two InfiniBand interfaces: A is QPN 0x010202, LID 0x1234, B is QPN 0x030404. What each sent goes into a log.
fn infiniband(w: World<Sim>, options: &NodeOptions) -> (World<Sim>, Log, Log) {
    let mut w = w;
    let mut logs = Vec::new();
    for (lid, qpn) in [(0x1234, 0x01_0202), (0x1235, 0x03_0404)] {
        let mut config = SimConfig::infiniband(format!("ib{lid:x}"), lid);
        config.sge_max = 6;
        w.fabric.next_config = Some(config);
        let device = w.fabric.device();
        device.set_next_qpn(Qpn::truncate(qpn));
        let (log, filter) = tap();
        device.set_tx_filter(Some(filter));
        w.add_on(device, options);
        logs.push(log);
    }
    let b = logs.pop().expect("two");
    let a = logs.pop().expect("two");
    (w, a, b)
}

/// The packets since the last call.
fn sent(log: &Log) -> Vec<Vec<u8>> {
    std::mem::take(&mut *log.lock())
}

#[track_caller]
fn assert_sent(log: &Log, expected: &[String]) {
    let got: Vec<String> = sent(log).iter().map(|p| p.iter().map(|b| format!("{b:02x}")).collect()).collect();
    let want: Vec<String> =
        expected.iter().map(|e| hex(e).iter().map(|b| format!("{b:02x}")).collect::<String>()).collect();
    assert_eq!(got, want);
}

fn s(text: &str) -> String {
    text.to_string()
}

fn am(n: u8) -> AmId {
    AmId::truncate(n)
}

#[test]
fn handshake_and_every_kind_of_message() {
    let (mut w, a, b) = infiniband(World::new("handshake_and_every_kind_of_message"), &plain());
    let ident = ident("0000");
    let ep = w.nodes[0].connect(&w.nodes[1]);
    w.run_for(Duration::from_millis(1));
    assert_sent(
        &a,
        &[
            format!("ffffff20 01000000 01000000 02020100 00000000 00000000 00000000 {ident} 003412"),
            s("00000000 02000100"),
        ],
    );
    assert_sent(&b, &[format!("00000022 01000100 02000000 00000000 00000000 00000000 00000000 {ident}")]);

    ep.am_short(am(5), 0x1122_3344_5566_7788, b"abcd").expect("a send");
    let iov = [&b"wx"[..], b"", b"yz"].map(std::io::IoSlice::new);
    ep.am_short_iov(am(6), &iov).expect("a send");
    w.run_for(Duration::from_millis(1));
    assert_sent(&a, &[s("00000029 02000100 88776655 44332211 61626364"), s("00000033 03000100 7778797a")]);
    assert_sent(&b, &[s("00000000 02000300")]);

    let n = ep.am_bcopy(am(31), &mut |to| {
        to[..20].fill(0x55);
        20
    });
    assert_eq!(n.expect("a send"), 20);
    w.run_for(Duration::from_millis(1));
    assert_sent(&a, &[format!("000000fb 04000100 {}", "55".repeat(20))]);
    assert_sent(&b, &[s("00000000 02000400")]);

    let region = w.nodes[0].md.mem_alloc(16).expect("memory");
    let mut region = region;
    region.bytes_mut().expect("not shared").fill(b'Z');
    let posted = ep.am_zcopy(am(7), b"HEADR", &[region.slice(0..16).expect("a slice")], None).expect("a send");
    assert_eq!(posted, Posted::InProgress);
    w.run_for(Duration::from_millis(1));
    assert_sent(&a, &[format!("0000003b 05000100 4845414452 {}", "5a".repeat(16))]);
    assert_sent(&b, &[s("00000000 02000500")]);

    // The keep-alive is an empty remote write. Our probes ask for their answer at once.
    assert_eq!(ep.check(None).expect("a check"), Posted::InProgress);
    w.run_for(Duration::from_micros(1));
    let probe = sent(&a).remove(0);
    assert_eq!(probe[4..], hex("06000100 00000000 00000000"));
    assert!(probe[..4] == hex("00000010") || probe[..4] == hex("00000012"), "{probe:02x?}");
}

#[test]
fn repeated_request_differs_in_one_bit() {
    let (mut w, a, _b) = infiniband(World::new("repeated_request_differs_in_one_bit"), &plain());
    w.nodes[1].device.set_rx_filter(Some(Box::new(|_| FilterVerdict::Drop)));
    let _ep = w.nodes[0].connect(&w.nodes[1]);
    w.run_for(Duration::from_millis(400));
    let packets = sent(&a);
    assert!(packets.len() >= 3, "{}", packets.len());
    assert_eq!(packets[0][..4], hex("ffffff20"));
    for p in &packets[1..] {
        assert_eq!(p[..4], hex("ffffff22"));
        assert_eq!(p[4..], packets[0][4..]);
    }
}

#[test]
fn second_endpoint_and_second_path() {
    let mut o = plain();
    o.iface.num_paths = uct::config::Units::Is(2);
    let (mut w, a, b) = infiniband(World::new("second_endpoint_and_second_path"), &o);
    let ident = ident("0000");
    let connect = |w: &World<Sim>, path: u8| -> Ep {
        let to = w.nodes[1].iface();
        let params = EpParams::to_iface(&to.device_address(), &to.iface_address()).path_index(path);
        w.nodes[0].iface().ep(&params).expect("an endpoint")
    };
    let _first = connect(&w, 0);
    w.run_for(Duration::from_millis(1));
    let (_, _) = (sent(&a), sent(&b));
    // The paths of a port without path bits share one address handle, and so one numbering.
    let _second = connect(&w, 1);
    w.run_for(Duration::from_millis(1));
    let request = format!("ffffff20 01000000 01000000 02020101 00000000 01000000 01000000 {ident} 003412");
    assert_sent(&a, &[request, s("01000000 02000100")]);
    assert_sent(&b, &[format!("01000022 01000100 02000000 01000000 00000000 00000000 00000000 {ident}")]);
}

#[test]
fn gap_nack_and_ack_request() {
    let (mut w, a, b) = infiniband(World::new("gap_nack_and_ack_request"), &plain());
    let ep = w.nodes[0].connect(&w.nodes[1]);
    w.run_for(Duration::from_millis(1));
    let (_, _) = (sent(&a), sent(&b));
    // The first of two is lost: the second shows the gap.
    let mut n = 0;
    w.nodes[1].device.set_rx_filter(Some(Box::new(move |_| {
        n += 1;
        if n == 1 { FilterVerdict::Drop } else { FilterVerdict::Pass }
    })));
    ep.am_short(am(1), 1, b"").expect("a send");
    ep.am_short(am(1), 2, b"").expect("a send");
    w.run_for(Duration::from_millis(1));
    let nack = sent(&b).remove(0);
    assert_eq!(nack[4..], hex("02000100"));
    assert!(nack[..4] == hex("00000008"), "{nack:02x?}");
    w.run_until("both arrive", |w| w.nodes[1].inbox.lock().len() == 2);
    w.settle();

    // The last packet is lost: the sender asks, naming the PSN it would send next.
    let (_, _) = (sent(&a), sent(&b));
    let mut n = 0;
    w.nodes[1].device.set_rx_filter(Some(Box::new(move |p| {
        n += usize::from(p.payload[3] & 1 == 1);
        if n == 1 { FilterVerdict::Drop } else { FilterVerdict::Pass }
    })));
    ep.am_short(am(1), 3, b"").expect("a send");
    w.run_until("it arrives", |w| w.nodes[1].inbox.lock().len() == 3);
    let packets = sent(&a);
    assert!(packets.iter().any(|p| *p == hex("00000002 05000100")), "{packets:02x?}");
}

#[test]
fn connect_to_endpoint_sends_no_handshake() {
    let (mut w, a, b) = infiniband(World::new("connect_to_endpoint_sends_no_handshake"), &plain());
    let open = |w: &World<Sim>, i: usize| w.nodes[i].iface().ep(&EpParams::unconnected()).expect("an endpoint");
    let (x, y) = (open(&w, 0), open(&w, 1));
    x.connect(&w.nodes[1].iface().device_address(), &y.address().expect("an address")).expect("connect");
    y.connect(&w.nodes[0].iface().device_address(), &x.address().expect("an address")).expect("connect");
    w.run_for(Duration::from_millis(1));
    assert_sent(&a, &[]);
    assert_sent(&b, &[]);
    x.am_short(am(5), 1, b"").expect("a send");
    w.run_for(Duration::from_millis(1));
    assert_sent(&a, &[s("00000029 01000000 01000000 00000000")]);
}

#[test]
fn crossing_requests() {
    let (mut w, a, b) = infiniband(World::new("crossing_requests"), &plain());
    let ident = ident("0000");
    let (_x, _y) = (w.nodes[0].connect(&w.nodes[1]), w.nodes[1].connect(&w.nodes[0]));
    w.run_for(Duration::from_millis(1));
    let tail = format!("00000000 00000000 00000000 00000000 {ident}");
    let packets = sent(&a);
    // A: CREQ, CREP with PSN 2 that acknowledges B's request, ACK. B may see A's CREP before its own leaves.
    assert_eq!(packets[1], hex(&format!("00000022 02000100 02000000 {tail}")));
    assert_eq!(packets.last().expect("packets"), &hex("00000000 03000200"));
    let packets = sent(&b);
    assert_eq!(packets[1][..6], hex("00000022 0200"));
    assert_eq!(packets[1][8..], hex(&format!("02000000 {tail}")));
}

#[test]
fn roce_v1_request_is_65_bytes() {
    let mut w: World<Sim> = World::new("roce_v1_request_is_65_bytes");
    let mut log = None;
    for last in [1, 2] {
        let mut c = SimConfig::new(format!("v1-{last}"), Ipv4Addr::new(10, 0, 0, last).into());
        c.gids[0].1 = RoceVersion::V1;
        c.sge_max = 6;
        w.fabric.next_config = Some(c);
        let device = w.fabric.device();
        let (l, filter) = tap();
        device.set_tx_filter(Some(filter));
        w.add_on(device, &plain());
        log.get_or_insert(l);
    }
    let _ep = w.nodes[0].connect(&w.nodes[1]);
    w.run_for(Duration::from_millis(1));
    let request = sent(&log.expect("a log")).remove(0);
    assert_eq!(request.len(), 65);
    assert_eq!(request[48..], hex("08 00000000000000000000ffff0a000001"));
}

#[test]
fn extensions_are_announced_where_ucx_does_not_look() {
    let mut o = plain();
    o.tuning.features = None;
    let (mut w, a, b) = infiniband(World::new("extensions_are_announced_where_ucx_does_not_look"), &o);
    let ident = ident("0700");
    let _ep = w.nodes[0].connect(&w.nodes[1]);
    w.run_for(Duration::from_millis(1));
    let request = sent(&a).remove(0);
    assert_eq!(request, hex(&format!("ffffff20 01000000 01000000 02020100 00000000 00000000 00000000 {ident} 003412")));
    assert_eq!(sent(&b).remove(0)[28..], hex(&ident));
}

// --- RoCE v2 frames

/// CRC-32 as in zlib, one bit at a time: an independent second opinion to the device's.
fn crc32(bytes: impl IntoIterator<Item = u8>) -> u32 {
    !bytes.into_iter().fold(!0u32, |crc, b| {
        (0..8).fold(crc ^ u32::from(b), |c, _| if c & 1 == 1 { c >> 1 ^ 0xedb8_8320 } else { c >> 1 })
    })
}

/// The ICRC of an IPv4 packet: the headers with what routers may change masked, then everything up to the ICRC.
fn icrc(src: (Ipv4Addr, u16), dst: (Ipv4Addr, u16), ip_id: u16, udp_payload: &[u8]) -> [u8; 4] {
    let udp_len = 8 + udp_payload.len() as u16 + 4;
    let mut b = vec![0xff; 8];
    b.extend([0x45, 0xff]);
    b.extend((20 + udp_len).to_be_bytes());
    b.extend(ip_id.to_be_bytes());
    b.extend([0x40, 0x00, 0xff, 17, 0xff, 0xff]);
    b.extend(src.0.octets());
    b.extend(dst.0.octets());
    b.extend(src.1.to_be_bytes());
    b.extend(dst.1.to_be_bytes());
    b.extend(udp_len.to_be_bytes());
    b.extend([0xff, 0xff]);
    let bth = b.len();
    b.extend(udp_payload);
    b[bth + 4] = 0xff;
    crc32(b).to_le_bytes()
}

#[test]
fn icrc_of_a_captured_kernel_frame() {
    // Captured from the kernel's soft-RoCE: guards the second opinion itself.
    let payload = hex("6400ffff 00012345 00123458 a1b2c3d4 00000011");
    let (src, dst) = (Ipv4Addr::new(10, 77, 0, 1), Ipv4Addr::new(10, 77, 0, 2));
    assert_eq!(icrc((src, 57236), (dst, 4791), 52451, &payload).to_vec(), hex("5a81337b"));
    let payload = hex("6530ffff 00012345 00123457 a1b2c3d4 00000011 cafebabe 030a11181f 000000");
    assert_eq!(icrc((src, 57236), (dst, 4791), 52433, &payload).to_vec(), hex("72f8dca0"));
}

#[test]
fn soft_device_frames_are_rocev2() {
    let mut w: World<Soft> = World::new("soft_device_frames_are_rocev2");
    let device: Arc<SoftDevice> = w.fabric.device();
    w.add_on(device.clone(), &plain());
    // The peer is a bare socket.
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    socket.set_read_timeout(Some(Duration::from_secs(30))).expect("a time-out");
    let to = socket.local_addr().expect("an address");
    let identity = device.attr().soft.expect("a soft device");
    let addr = DeviceAddr {
        link: LinkAddr::Ethernet { gid: Gid::from_ip(to.ip()), version: ib::addr::AddrVersion::V2 },
        pkey: PKey::DEFAULT,
        path_mtu: Mtu::M4096,
        gid_index: None,
        trailer: Some(Trailer {
            soft: SoftIdentity { udp_port: to.port(), host_id: identity.host_id, rx_budget: 0 },
            incarnation: 5,
            features: ib::addr::Features::empty(),
        }),
    };
    let qpn = IfaceAddr { qpn: Qpn::truncate(0x11) };
    let ep = w.nodes[0].iface().ep(&EpParams::to_iface(&addr.to_bytes(), &qpn.to_bytes())).expect("an endpoint");
    w.run_until("the request is sent", |w| w.nodes[0].counter("tx.creq") > 0);
    let mut frame = [0; 9000];
    let (n, from) = socket.recv_from(&mut frame).expect("a frame");
    let frame = &frame[..n];

    let ours = w.nodes[0].iface().iface_address();
    let (own, own_addr) = (IfaceAddr::parse(&ours).expect("an address").qpn.get(), w.nodes[0].iface().device_address());
    // The soft device's address: flags of RoCE v2 over IPv4 (or with an MTU byte), its GID, the trailer.
    assert_eq!(own_addr[0] & !0x02, 0x48);
    let pad = (4 - (48 + own_addr.len()) % 4) % 4;
    // BTH: UD send only, solicited, pad; full default partition; the peer's queue pair; a PSN of 24 bits.
    assert_eq!(frame[..4], [0x64, 0x80 | (pad as u8) << 4, 0xff, 0xff]);
    assert_eq!(frame[4..8], [0, 0, 0, 0x11]);
    assert_eq!(frame[8], 0);
    // DETH: UCX's queue key, our queue pair.
    assert_eq!(frame[12..16], hex("1ee7a330"));
    assert_eq!(frame[16..20], own.to_be_bytes());
    // Payload as on any other device.
    let mut request = hex("ffffff20 01000000 01000000");
    request.extend(&own.to_le_bytes()[..3]);
    request.extend(hex("0000000000 00000000 00000000"));
    request.extend(hex(&ident("0000")));
    request.extend(&own_addr);
    // The receive budget at 44 is the kernel's doing.
    request[44..48].copy_from_slice(&frame[20 + 44..20 + 48]);
    assert_eq!(frame[20..20 + request.len()], request[..]);
    assert!(frame[20 + request.len()..n - 4].iter().all(|&b| b == 0), "zero pad");
    let (std::net::IpAddr::V4(src), std::net::IpAddr::V4(dst)) = (from.ip(), to.ip()) else { panic!("IPv4") };
    assert_eq!(frame[n - 4..], icrc((src, from.port()), (dst, to.port()), 0, &frame[..n - 4]));
    drop(ep);
}
