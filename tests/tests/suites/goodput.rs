//! What loss costs, by window and size of messages, in virtual time and with default settings: a table that is kept. Nothing in
//! it depends on the machine, so a line of `snapshots/goodput.txt` changes only if the protocol behaves otherwise.
//!
//! After a change that is meant, `UPDATE_EXPECT=1 cargo test -p uct-tests --test suites goodput` writes it anew.

use std::{fmt::Write, time::Duration};

use expect_test::expect_file;
use ib::sim::Faults;
use uct::{AmId, SendError};
use uct_tests::{
    fabric::Sim,
    world::{NodeOptions, World},
};

/// One way through the network; a round trip is twice that.
const DELAY: Duration = Duration::from_micros(5);
/// Enough that the loss shows, and few enough for the worst line.
const MESSAGES: u32 = 4_000;

struct Line {
    goodput: f64,
    resends: u64,
    by_timer: u64,
}

fn measure(loss_percent: u32, window: u32, size: usize) -> Line {
    let mut w = World::<Sim>::with_seed("goodput", 1);
    for _ in 0..2 {
        let mut o = NodeOptions::default();
        o.ud.max_window = window;
        w.add(&o);
    }
    w.fabric.net.set_faults(Faults {
        loss_ppm: loss_percent * 10_000,
        delay_ns: DELAY.as_nanos() as u64,
        ..Faults::default()
    });
    let ep = w.nodes[0].connect(&w.nodes[1]);
    w.run_until("connected", |_| matches!(ep.flush(uct::FlushMode::Local, None), Ok(uct::Posted::Done)));
    let (began, data) = (w.now(), vec![7u8; size]);
    let mut sent = 0;
    w.run_until_within("all is sent", Duration::from_secs(600), |_| {
        while sent < MESSAGES {
            match ep.am_bcopy(AmId::truncate(1), &mut |to| {
                to[..size].copy_from_slice(&data);
                size
            }) {
                Ok(_) => sent += 1,
                Err(SendError::NoResource) => return false,
                Err(SendError::Failed(e)) => panic!("{e}"),
            }
        }
        true
    });
    w.run_until_within("all has arrived", Duration::from_secs(600), |w| {
        w.nodes[1].inbox.lock().len() == MESSAGES as usize
    });
    let took = w.now() - began;
    let counted = |name| w.nodes[0].counter(name);
    Line {
        goodput: f64::from(MESSAGES) * size as f64 / took.as_secs_f64() / 1e6,
        resends: counted("tx.resends"),
        by_timer: counted("tx.timer_resends"),
    }
}

#[test]
fn goodput_by_loss_window_and_size() {
    let mut text = format!(
        "{MESSAGES} messages one way, {} us there and {} us back, by loss (per cent, either way), largest window and size (bytes).\n\
         goodput: MB of payload per second; resends per 1000 messages, and those of them that waited for a timer.\n\n\
         loss window  size    goodput   resends   by timer\n",
        DELAY.as_micros(),
        DELAY.as_micros()
    );
    for loss in [0, 1, 5, 20] {
        for window in [16, 128, 1025] {
            for size in [8, 1024, 4000] {
                let l = measure(loss, window, size);
                let per_mille = |n: u64| n as f64 * 1e3 / f64::from(MESSAGES);
                writeln!(
                    text,
                    "{loss:>4} {window:>6} {size:>5} {:>10.2} {:>9.1} {:>10.1}",
                    l.goodput,
                    per_mille(l.resends),
                    per_mille(l.by_timer)
                )
                .unwrap();
            }
        }
    }
    expect_file!["snapshots/goodput.txt"].assert_eq(&text);
}
