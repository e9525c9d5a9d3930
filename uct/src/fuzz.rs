//! Fuzz targets: [`config`] for values of settings, [`conf_file`] for the text of a `ucx.conf`. `ci/fuzz` runs them under
//! libFuzzer; the test at the end replays what it has found.

use std::{net::IpAddr, time::Duration};

use crate::{
    Time,
    config::{
        AllowList, Bytes, BytesAuto, DeviceFilter, Env, Hex, LogLevel, Origin, RangeList, Scope, Ternary, TernaryAuto,
        TransportFilter, Units, Value,
    },
};

/// Reads `text` as a setting of type `T`. What is printed reads as the same value, and prints as the same text again.
///
/// # Panics
/// If it does not.
pub fn value<T: Value + PartialEq + std::fmt::Debug>(text: &str) -> Option<T> {
    let v = match T::parse(text) {
        Ok(v) => v,
        Err(why) => {
            assert!(!why.is_empty(), "refused without a reason");
            return None;
        }
    };
    let printed = v.print();
    assert_eq!(T::parse(&printed).as_ref(), Ok(&v), "{text:?} prints as {printed:?}");
    assert_eq!(T::parse(&printed).map(|v| v.print()).as_ref(), Ok(&printed));
    Some(v)
}

/// The first byte says which type, the others are the text.
///
/// # Panics
/// If a value does not survive printing.
pub fn config(bytes: &[u8]) {
    let Some((which, text)) = bytes.split_first() else { return };
    let text = &String::from_utf8_lossy(text);
    match which % 19 {
        0 => _ = value::<bool>(text),
        1 => _ = value::<Ternary>(text),
        2 => _ = value::<TernaryAuto>(text),
        3 => _ = value::<u32>(text),
        4 => _ = value::<u16>(text),
        5 => _ = value::<u8>(text),
        6 => _ = value::<f64>(text),
        7 => _ = value::<String>(text),
        8 => {
            if let Some(u) = value::<Units>(text) {
                assert!(u.is_auto_or_at_most(u64::MAX) || u == Units::Inf);
            }
        }
        9 => _ = value::<Bytes>(text).map(Bytes::as_len),
        10 => _ = value::<BytesAuto>(text),
        11 => _ = value::<IpAddr>(text),
        12 => {
            if let Some(d) = value::<Duration>(text) {
                let _ = Time::from_nanos(1 << 40).saturating_add(d);
            }
        }
        13 => _ = value::<Hex>(text),
        14 => _ = value::<Option<Bytes>>(text),
        15 => _ = value::<Vec<String>>(text),
        16 => {
            if let Some(list) = value::<RangeList>(text) {
                let numbers = list.numbers();
                assert!((1..=256).contains(&numbers.len()));
            }
        }
        17 => {
            if let Some(filter) = value::<DeviceFilter>(text) {
                for (device, port) in [("soft0", 1), ("mlx5_0", 1), ("", 0)] {
                    assert!(!filter.allows(device, port) || filter.may_allow(device));
                }
                let _ = filter.unmatched(&[("soft0".into(), 1)]);
            }
        }
        _ => {
            if let Some(list) = value::<AllowList>(text) {
                let item = list.items().first().cloned().unwrap_or_default();
                assert_ne!(list.allows(|i| i == item), !list.is_all() && text.starts_with('^'));
            }
            _ = value::<TransportFilter>(text).map(|f| f.allows("ud_verbs"));
            _ = value::<LogLevel>(text);
        }
    }
}

/// A settings file: what it sets is found again, under the name and with the value of one of its lines.
///
/// # Panics
/// If it is not.
pub fn conf_file(bytes: &[u8]) {
    let text = &String::from_utf8_lossy(bytes);
    let mut env = Env::empty();
    env.add_file_text("ucx.conf", text);
    for (name, value, origin) in env.variables() {
        assert!(name.starts_with("UCX_"), "{name:?}");
        let Origin::File { line, name: written, .. } = origin else { panic!("{name} comes from {origin}") };
        let line = text.lines().nth(line - 1).unwrap_or_default();
        assert!(line.contains(written.as_str()) && line.contains(value), "{name}={value} is not in {line:?}");
        let found = env.find(&Scope { prefixes: &[""], transports: "" }, &name["UCX_".len()..]);
        assert_eq!(found, Some((value, origin)));
    }
}

#[cfg(test)]
#[path = "../../fuzz/src/replay.rs"]
mod replay;

#[cfg(test)]
#[test]
fn what_fuzzing_found() {
    replay::replay(&[("config", config), ("conf_file", conf_file)]);
}
