use std::net::TcpListener;

use super::*;

/// A connection within this process: the other side of the talk, and the talk.
fn pair() -> (TcpStream, Talk) {
    let l = TcpListener::bind("127.0.0.1:0").unwrap();
    let theirs = TcpStream::connect(l.local_addr().unwrap()).unwrap();
    let ours = l.accept().unwrap().0;
    (theirs, Talk::new(ours, "the peer".into(), Duration::from_secs(10)).unwrap())
}

/// Polls until `take` has something or fails.
fn until<T>(t: &mut Talk, take: impl Fn(&mut Talk) -> Result<Option<T>>) -> Result<T> {
    loop {
        t.poll()?;
        if let Some(v) = take(t)? {
            return Ok(v);
        }
        assert!(!t.is_over(), "closed");
    }
}

#[test]
fn barriers_and_blobs_come_whole() {
    let (mut theirs, mut t) = pair();
    theirs.write_all(&[0xef, 0xbe, 0xad]).unwrap();
    t.poll().unwrap();
    assert_eq!(t.barrier().unwrap(), None);
    theirs.write_all(&[0xde, 1, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0]).unwrap();
    until(&mut t, Talk::barrier).unwrap();
    assert_eq!(until(&mut t, Talk::blob).unwrap(), [7]);
    assert!(until(&mut t, Talk::blob).unwrap().is_empty());
    t.send_blob(&[9, 8]).unwrap();
    t.send_barrier().unwrap();
    let mut got = [0; 14];
    theirs.read_exact(&mut got).unwrap();
    assert_eq!(got, [2, 0, 0, 0, 0, 0, 0, 0, 9, 8, 0xef, 0xbe, 0xad, 0xde]);
    drop(theirs);
    while !t.is_over() {
        t.poll().unwrap();
    }
}

#[test]
fn a_peer_out_of_step_is_told_apart() {
    let (mut theirs, mut t) = pair();
    theirs.write_all(&[1, 2, 3, 4]).unwrap();
    let e = until(&mut t, Talk::barrier).unwrap_err();
    assert!(e.to_string().contains("the peer sent [01, 02, 03, 04] where a barrier was due"), "{e}");
    theirs.write_all(&4097u64.to_le_bytes()).unwrap();
    let e = until(&mut t, Talk::blob).unwrap_err();
    assert!(e.to_string().contains("announced 4097 bytes"), "{e}");
}

#[test]
fn parameters_of_an_unknown_version_are_refused() {
    let (mut theirs, mut t) = pair();
    theirs.write_all(&[0; 700]).unwrap();
    let e = t.task(None).unwrap_err();
    assert!(e.to_string().contains("unknown version of UCX: 700 bytes came"), "{e}");
    let (theirs, mut t) = pair();
    drop(theirs);
    let e = t.task(None).unwrap_err();
    assert!(e.to_string().contains("closed the control connection where its parameters was due"), "{e}");
}
