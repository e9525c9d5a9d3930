//! Fuzz targets: [`control`] for what a `uct_perf` says on the control connection, [`perftest`] for what a `ucx_perftest` says
//! there, [`payload`] for messages of a run, [`words`] for what users write. `ci/fuzz` runs them under libFuzzer; the test at
//! the end replays what it has found.

use std::{io::Cursor, sync::Arc};

use super::{
    alert::Alert,
    link::{frame, judge, read_frame},
    message::{FRAME_MAX, PREAMBLE_LEN, from_hex, preamble, to_hex},
    payload::{Header, Pattern, Receiver},
    sizes::SizeList,
    ucx::{
        Version,
        talk::{Unread, packed_blob},
        task::{Found, Task},
    },
};

/// A preamble and frames. A message that was read and is written again reads the same.
///
/// # Panics
/// If it does not.
pub fn control(bytes: &[u8]) {
    let (head, rest) = bytes.split_at(bytes.len().min(PREAMBLE_LEN));
    let whole = judge("the peer", head);
    for n in 0..head.len() {
        // What is refused early is refused in the end.
        assert!(judge("the peer", &head[..n]).is_ok() || whole.is_err());
    }
    assert!(head != preamble() || whole.is_ok());
    let mut stream = Cursor::new(rest);
    loop {
        let m = match read_frame(&mut stream) {
            Ok(m) => m,
            Err(why) => {
                assert!(!why.is_empty() && !why.contains(|c: char| c.is_control()), "{why:?}");
                break;
            }
        };
        let Ok(again) = frame(&m) else { panic!("{} cannot be written", m.name()) };
        if again.len() <= FRAME_MAX + 4 {
            assert_eq!(read_frame(&mut again.as_slice()), Ok(m));
        }
    }
}

/// The first byte says what is due: parameters, which are recognised whatever has come of them, or barriers and blobs.
///
/// # Panics
/// If what was read and is written again does not read the same.
pub fn perftest(bytes: &[u8]) {
    let Some((due, bytes)) = bytes.split_first() else { return };
    if due & 1 == 0 {
        return parameters(bytes);
    }
    let mut unread = Unread::default();
    let mut rest = bytes;
    loop {
        // In pieces, as it may come.
        let (piece, left) = rest.split_at(rest.len().min(1 + usize::from(due >> 4)));
        rest = left;
        unread.push(piece);
        let before = unread.len();
        let taken = if due & 2 == 0 {
            unread.barrier("the peer").map(|b| b.map(|()| 4))
        } else {
            unread.blob("the peer").map(|b| {
                b.map(|b| {
                    let mut again = Unread::default();
                    again.push(&packed_blob(&b));
                    assert_eq!(again.blob("the peer").ok().flatten().as_ref(), Some(&b));
                    8 + b.len()
                })
            })
        };
        match taken {
            Ok(Some(n)) => assert_eq!(unread.len(), before - n),
            Ok(None) if piece.is_empty() => return,
            Ok(None) => {}
            Err(_) => return,
        }
    }
}

fn parameters(bytes: &[u8]) {
    let found = Task::recognise(bytes, None);
    let Ok(Found::Task(task, version, len)) = &found else { return };
    assert!(*len <= bytes.len() && task.size > 0 && task.iters > 0);
    assert_eq!(Task::recognise(bytes, Some(*version)), found);
    assert!(!task.describe().is_empty());
    for device in ["", "rxe0:1", "a name that is longer than its place has room for"] {
        let packed = task.encode(*version, device);
        assert_eq!(Task::recognise(&packed, Some(*version)), Ok(Found::Task(task.clone(), *version, packed.len())));
    }
    assert_eq!(version.to_string().split(' ').next().map(str::parse::<Version>), Some(Ok(*version)));
}

/// The first bytes choose the run, the others are messages of it, each behind a byte with its length.
///
/// # Panics
/// If one is counted that the sender has not sent.
pub fn payload(bytes: &[u8]) {
    let Some((&[run, size], mut rest)) = bytes.split_first_chunk() else { return };
    let (run, size) = (u16::from(run), 8 + usize::from(size % 32));
    let pattern = Arc::new(Pattern::new(run, size));
    let alert = Arc::new(Alert::default());
    let receiver = Receiver::new(run, size, pattern.clone(), alert.clone());
    while let Some((&how, left)) = rest.split_first() {
        let (message, left) = left.split_at(left.len().min(usize::from(how % 64)));
        rest = left;
        if let Some(h) = Header::parse(message) {
            assert_eq!(Header::parse(&h.to_bytes()), Some(h));
        }
        let (seq, was_wrong) = (receiver.received(), receiver.wrong().is_some());
        // The right one, with whatever header there is.
        let whole = [message.get(..8).unwrap_or_default(), pattern.payload(seq)].concat();
        let data = if how & 0x80 == 0 { message } else { &whole };
        receiver.accept(data);
        let is_counted = receiver.received() != seq;
        assert_eq!(is_counted, receiver.received() == seq + 1);
        assert!(!is_counted || (data.len() == size && data[8..] == *pattern.payload(seq)));
        assert!(!(is_counted && was_wrong), "counted after a wrong one");
        assert!(is_counted || (receiver.wrong().is_some() && alert.is_raised()));
        assert!(receiver.asked() <= receiver.received());
    }
}

/// Sizes, versions, addresses.
///
/// # Panics
/// If what was read and is written again does not read the same.
pub fn words(bytes: &[u8]) {
    let text = &String::from_utf8_lossy(bytes);
    if let Ok(list) = text.parse::<SizeList>() {
        assert_eq!(list.to_string().parse().as_ref(), Ok(&list), "{text:?} prints as {list}");
        for max in [8, 100, 4096, 1 << 30] {
            if let Ok(sizes) = list.resolve(max) {
                assert!(sizes.len() <= 1000 && sizes.iter().all(|n| (8..=max).contains(n)));
            }
        }
    }
    if let Ok(version) = text.parse::<Version>() {
        assert!(!version.to_string().is_empty());
    }
    if let Some(b) = from_hex(text) {
        assert!(to_hex(&b).eq_ignore_ascii_case(text));
    }
    if let Ok(b) = crate::info::parse_address(text) {
        assert!(!b.is_empty());
    }
}

#[cfg(test)]
#[path = "../../../fuzz/src/replay.rs"]
mod replay;

#[cfg(test)]
#[test]
fn what_fuzzing_found() {
    replay::replay(&[("control", control), ("perftest", perftest), ("payload", payload), ("words", words)]);
}
