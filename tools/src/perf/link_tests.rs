use super::*;
use crate::perf::message::Side;

const SHORT: Duration = Duration::from_millis(200);
const LONG: Duration = Duration::from_secs(30);

fn params(alert: &Arc<Alert>, timeout: Duration) -> LinkParams {
    LinkParams { peer: "peer".into(), timeout, bound_to_peer: false, alert: alert.clone() }
}

/// A link whose other end is ours to play.
fn link() -> (Link, UnixStream, Arc<Alert>) {
    let (a, mut b) = UnixStream::pair().unwrap();
    let alert = Arc::new(Alert::default());
    b.write_all(&preamble()).unwrap();
    let link = Link::open(Stream::Local(a), params(&alert, LONG)).unwrap();
    let mut p = [0; PREAMBLE_LEN];
    b.read_exact(&mut p).unwrap();
    assert_eq!(p, preamble());
    (link, b, alert)
}

fn open_against(bytes: &[u8], close: bool, timeout: Duration) -> String {
    let (a, mut b) = UnixStream::pair().unwrap();
    b.write_all(bytes).unwrap();
    let keep = (!close).then_some(b);
    let r = Link::open(Stream::Local(a), params(&Arc::new(Alert::default()), timeout));
    drop(keep);
    r.err().unwrap().to_string()
}

/// Waits for news as the main thread does, but without anything to do meanwhile.
fn next(link: &mut Link) -> Result<Message> {
    loop {
        match link.poll() {
            Ok(None) => thread::yield_now(),
            Ok(Some(m)) => return Ok(m),
            Err(e) => return Err(e),
        }
    }
}

fn frame(json: &[u8]) -> Vec<u8> {
    [&(json.len() as u32).to_le_bytes(), json].concat()
}

#[test]
fn messages_cross_and_raise_the_alert() {
    let (mut link, mut b, alert) = link();
    assert_eq!(link.poll(), Ok(None));
    b.write_all(&frame(br#"{"type":"ready"}"#)).unwrap();
    assert_eq!(next(&mut link), Ok(Message::Ready));
    while !alert.take() {
        thread::yield_now();
    }
    link.send(&Message::Sent { count: 5 }).unwrap();
    let want = frame(br#"{"type":"sent","count":5}"#);
    let mut got = vec![0; want.len()];
    b.read_exact(&mut got).unwrap();
    assert_eq!(got, want);
}

#[test]
fn the_end_of_the_peer_is_news_that_stays() {
    let (mut link, b, _alert) = link();
    drop(b);
    let e = next(&mut link).unwrap_err();
    assert!(e.to_string().starts_with("peer closed the control connection"), "{e}");
    assert_eq!(link.poll(), Err(e));
    assert!(link.is_lost());
}

#[test]
fn what_the_peer_said_last_explains_a_failed_write() {
    let (mut link, mut b, alert) = link();
    b.write_all(&frame(br#"{"type":"abort","reason":"no device \u001b[1m"}"#)).unwrap();
    drop(b);
    while !alert.is_raised() {
        thread::yield_now();
    }
    let e = link.send(&Message::Ready).unwrap_err();
    assert_eq!(e.to_string(), "peer gave up: no device \u{fffd}[1m");
}

#[test]
fn garbage_frames_end_the_link() {
    for (bytes, words) in [
        (vec![0xff; 8], "a frame of 4294967295 bytes"),
        (frame(b"hello"), "no message"),
        (frame(br#"{"type":"unheard of"}"#), "no message"),
        (frame(&[b'['; 5000]), "no message"),
        (frame(b""), "no message"),
    ] {
        let (mut link, mut b, _alert) = link();
        b.write_all(&bytes).unwrap();
        let e = next(&mut link).unwrap_err().to_string();
        assert!(e.starts_with("peer sent garbage on the control connection") && e.contains(words), "{e}");
    }
}

#[test]
fn strangers_are_recognised_by_their_first_bytes() {
    let e = open_against(b"SSH-2.0-OpenSSH_9\r\n", false, LONG);
    assert_eq!(e, r#"peer is no uct_perf: it said "SSH-2.0-OpenSSH_9.."; check host and port, on both sides"#);
    let e = open_against(&[0; 584], false, LONG);
    assert!(e.contains("looks like a ucx_perftest client"), "{e}");
    // Less than a preamble is enough to tell.
    let e = open_against(b"G", false, LONG);
    assert!(e.contains("it said \"G\""), "{e}");
}

#[test]
fn silence_and_early_ends_are_told_apart() {
    let e = open_against(b"uct_", false, SHORT);
    assert!(e.contains("said nothing for 0.2 s"), "{e}");
    let e = open_against(b"uct_perf", true, LONG);
    assert!(e.contains("closed the control connection before"), "{e}");
}

#[test]
fn another_version_is_refused_with_both_numbers() {
    let mut p = preamble();
    p[8..12].copy_from_slice(&77u32.to_le_bytes());
    p[12..32].copy_from_slice(b"9.9.9\x1b\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
    let e = open_against(&p, false, LONG);
    assert!(e.starts_with("version mismatch: peer is uct_perf 9.9.9\u{fffd} with control protocol 77, this is"), "{e}");
    assert!(e.ends_with("use the same version on both sides"), "{e}");
}

#[test]
fn a_full_side_fits_into_a_frame() {
    let side = Side {
        version: VERSION.into(),
        host: "h".repeat(255),
        pid: u32::MAX,
        cpu: Some(1023),
        transport: "ud_verbs".into(),
        device: "soft0:1".into(),
        address: "a".repeat(100),
        limits: Default::default(),
        device_addr: "00".repeat(64),
        iface_addr: "00".repeat(64),
        ep_addr: Some("00".repeat(64)),
    };
    let m = Message::Setup { side: Box::new(side), connect: Default::default() };
    assert!(serde_json::to_vec(&m).unwrap().len() < FRAME_MAX / 8);
}

#[test]
fn a_port_in_use_is_named() {
    let l = listen(0).unwrap();
    let port = l.local_addr().unwrap().port();
    let e = listen(port).unwrap_err().to_string();
    assert_eq!(
        e,
        format!("TCP port {port} is in use by another process (another uct_perf?); choose one with -p on both sides")
    );
    drop(l);
    let e = connect("127.0.0.1", port, LONG).unwrap_err().to_string();
    assert_eq!(
        e,
        format!("127.0.0.1 port {port} refused the connection: start `uct_perf --server -p {port}` there first")
    );
}

#[test]
fn an_unknown_host_is_named() {
    // An empty label is no name anywhere, so no name server is asked.
    let e = connect("no..host", 1, LONG).unwrap_err().to_string();
    assert!(e.starts_with("host `no..host` "), "{e}");
}
