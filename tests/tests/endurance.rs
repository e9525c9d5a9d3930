//! Long runs, each in a process of its own so that its memory can be told from that of other tests; see `src/bin/soak.rs`.
//! `ci/memcheck` runs longer ones.

use std::process::Command;

fn soak(args: &[&str]) {
    let out = Command::new(env!("CARGO_BIN_EXE_soak")).args(args).output().expect("it starts");
    let (said, errors) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    print!("{said}");
    assert!(out.status.success(), "soak {}: {errors}", args.join(" "));
    assert_eq!(said.lines().count(), 2, "{said}");
}

#[test]
fn connects_and_messages_leave_nothing_on_sim() {
    soak(&["sim", "--connects", "20000", "--messages", "100000"]);
}

#[test]
fn connects_and_messages_leave_nothing_on_soft() {
    soak(&["soft", "--connects", "5000", "--messages", "100000"]);
}
