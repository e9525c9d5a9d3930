//! For tests that change the network configuration of the machine that `ci/soft-roce` boots: soft-RoCE device rxe0 on v0.

use std::{
    process::Command,
    sync::{Mutex, MutexGuard},
    time::{Duration, Instant},
};

use ib::{
    device::{AhAttr, GlobalRoute, SoftAv},
    types::{Gid, Lid},
};

static TURN: Mutex<()> = Mutex::new(());

/// The right to change things, one test at a time. `None`, and a word about it, where this is not the machine for it.
pub(crate) fn turn(test: &str) -> Option<MutexGuard<'static, ()>> {
    let turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
    if std::env::var_os("SOFT_ROCE").is_none() {
        println!("{test}: skipped: runs under ci/soft-roce only");
        return None;
    }
    Some(turn)
}

/// Runs a command and returns what it prints.
pub(crate) fn run(line: &str) -> String {
    let mut words = line.split(' ');
    let out = Command::new(words.next().unwrap()).args(words).output().unwrap();
    assert!(out.status.success(), "{line}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8_lossy(&out.stdout).into_owned()
}

pub(crate) fn gid(ip: &str) -> Gid {
    Gid::from_ip(ip.parse().unwrap())
}

/// What leads from one GID to another on port 1.
pub(crate) fn attr(sgid: Gid, dgid: Gid) -> AhAttr {
    let grh = GlobalRoute { dgid, sgid, hop_limit: 255, traffic_class: 106, flow_label: 0xffff_ffff };
    AhAttr {
        port: 1,
        sl: 0,
        src_path_bits: 0,
        static_rate: 0,
        dlid: Lid(0xc000),
        grh: Some(grh),
        soft: SoftAv::default(),
    }
}

/// Looks until something is found.
pub(crate) fn until_within<T>(patience: Duration, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + patience;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < end, "{what}");
        std::thread::yield_now();
    }
}
