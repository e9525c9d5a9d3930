//! How large the objects are that there are many of: a table that is kept, so that growth is a decision.
//!
//! After a change that is meant, `UPDATE_EXPECT=1 cargo test -p ud sizes` writes `snapshots/sizes.txt` anew.

use std::fmt::Write;

use expect_test::expect_file;
use ib::{ah::AhRef, sim::SimDevice};
use uct::mem::Buf;

use crate::{
    core::{EpRecord, UdEngine},
    ep::EpShared,
    op::Op,
    proto,
    tx::Link,
};

type D = SimDevice;

#[test]
#[cfg(target_pointer_width = "64")]
fn sizes() {
    let mut text = String::from("Bytes of what there is one of per ...\n\n");
    let (record, packet) = proto::record_sizes::<Op, Link<D>, Buf>();
    let mut line = |what: &str, size: usize| writeln!(text, "{size:>5}  {what}").unwrap();
    line("endpoint: its record in the engine", record);
    line("endpoint: its link", size_of::<Link<D>>());
    line("endpoint: what the glue keeps", size_of::<EpRecord<D>>());
    line("endpoint: what the user's handle leads to", size_of::<EpShared<D>>());
    line("endpoint: the user's handle", size_of::<uct::Ep>());
    line("packet in a window: its place in the send list", packet);
    line("packet in a window: the operation", size_of::<Op>());
    line("buffer: its handle", size_of::<Buf>());
    line("address handle: a reference", size_of::<AhRef<D>>());
    line("interface: the engine without its tables", size_of::<UdEngine<D>>());
    line("call: a refused send", size_of::<uct::SendError>());
    expect_file!["snapshots/sizes.txt"].assert_eq(&text);
}
