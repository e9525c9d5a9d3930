//! The fuzz target [`lines`]. `ci/fuzz` runs it under libFuzzer; the test at the end replays what it has found.

use super::{bench, hex, peer, pingpong, ucx, unhex};

/// Lines, one after the other, each taken for everything that it could be, and the whole for a greeting and a message. What is
/// understood reads the same when it is written again, and what is not says why, in one line.
///
/// # Panics
/// If that is not so.
pub fn lines(bytes: &[u8]) {
    if let Ok(hello) = pingpong::Hello::parse(bytes) {
        assert_eq!(pingpong::Hello::parse(&hello.to_bytes()), Ok(hello));
    }
    if let Some((stream, number, is_whole)) = ucx::read(bytes) {
        assert_eq!(bytes[..ucx::HEADER], ucx::header(stream, number));
        let right: Vec<u8> = ucx::payload(number, bytes.len()).map(ucx::pattern).collect();
        assert_eq!(is_whole, right == bytes[ucx::HEADER..]);
    }
    let text = String::from_utf8_lossy(bytes);
    for line in text.lines() {
        one(line);
    }
}

fn one(line: &str) {
    if let Ok(b) = unhex(line) {
        assert!(hex(&b).eq_ignore_ascii_case(line), "{line:?}");
    }
    match again(line, peer::Command::parse) {
        Some(command) => assert!(command.to_string().eq_ignore_ascii_case(line), "{command}"),
        None => assert!(line != "addr" && line != "close"),
    }
    again(line, peer::Answer::parse);
    again(line, bench::Hello::parse);
    again(line, bench::Run::parse);
    match ucx::Said::parse(line) {
        ucx::Said::Done(text) => {
            if let Ok(opened) = checked(text, ucx::Opened::parse(text)) {
                assert!(unhex(&opened.device).is_ok() && unhex(&opened.iface).is_ok());
            }
        }
        ucx::Said::Failed(text) => assert!(line.starts_with("error") && line.contains(text)),
        ucx::Said::Log(text) => assert_eq!(text, line),
    }
}

/// Reads a line, writes what was read, and reads that.
fn again<T>(line: &str, parse: impl Fn(&str) -> Result<T, String>) -> Option<T>
where
    T: std::fmt::Display + std::fmt::Debug + PartialEq,
{
    let read = checked(line, parse(line)).ok()?;
    let written = read.to_string();
    assert_eq!(written.lines().count(), 1, "{written:?}");
    assert_eq!(parse(&written).as_ref(), Ok(&read), "{line:?} is written as {written:?}");
    Some(read)
}

/// What was refused says why, and does not break the line that it is told in.
fn checked<T>(line: &str, read: Result<T, String>) -> Result<T, String> {
    if let Err(why) = &read {
        assert!(!why.is_empty() && !why.contains('\n'), "{line:?}: {why:?}");
    }
    read
}

#[cfg(test)]
#[path = "../../../fuzz/src/replay.rs"]
mod replay;

#[cfg(test)]
#[test]
fn what_fuzzing_found() {
    replay::replay(&[("lines", lines)]);
}
