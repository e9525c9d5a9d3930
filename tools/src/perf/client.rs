//! The client's side of a session: it connects, plans the runs, times them and reports.

use std::{io::Write, sync::Arc, time::Duration};

use super::{
    bench::{self, Plan, Sample},
    display::Display,
    failure::{Failure, Result},
    message::{Limits, Message, Run, Side},
    options::{Extent, Layout, Options, Test},
    payload::Pattern,
    report::{Heading, Report},
    sender::Sender,
    session::Session,
    sizes::SIZE_MIN,
};

/// Runs everything that `o` asks for, and says good-bye.
pub(crate) fn run(s: &mut Session, o: &Options, self_test: bool, out: impl Write) -> Result<()> {
    let mode = s.local.connect_mode(o.connect)?;
    let server = connect(s, mode)?;
    let tests = o.tests();
    let limits = s.local.side.limits.common(&server.limits);
    let rows = plan(&tests, o, &limits, &s.local.side.transport)?;
    probe(s, o, &limits)?;

    let heading = Heading {
        client: s.local.side.clone(),
        server,
        connect: mode,
        wait: o.wait(),
        layout: o.layout,
        tests,
        self_test,
    };
    let mut display = Display::new(rows.iter().map(Vec::len).sum(), o.final_only);
    let mut report = Report::new(out, o.format(), o.final_only, heading);
    display.aside(|| report.begin()).map_err(|e| Failure::output(&e))?;
    for row in rows {
        for run in row {
            let what = format!("{}, {} bytes", run.test.name(), run.size);
            display.start(what.clone());
            let plan = Plan { warmup: o.warmup(), measure: o.extent(), tick: &mut |part| display.tick(part) };
            let sample = measure(s, run, plan).map_err(|f| f.context(what))?;
            report.add(run, sample);
            display.done();
        }
        display.aside(|| report.end_row()).map_err(|e| Failure::output(&e))?;
    }
    drop(display);
    report.finish(&s.local.iface.counters()).map_err(|e| Failure::output(&e))?;

    s.flush()?;
    s.link.send(&Message::Bye)?;
    match s.recv("bye")? {
        Message::Bye => Ok(()),
        m => Err(s.unexpected(&m, "bye")),
    }
}

fn connect(s: &mut Session, mode: super::options::ConnectMode) -> Result<Side> {
    if mode == super::options::ConnectMode::Ep {
        s.make_ep(None)?;
    }
    s.link.send(&Message::Setup { side: Box::new(s.local.side.clone()), connect: mode })?;
    let server = match s.recv("opened")? {
        Message::Opened { side } => *side,
        m => return Err(s.unexpected(&m, "opened")),
    };
    s.connect(mode, &server)?;
    s.link.send(&Message::Connected)?;
    Ok(server)
}

/// How long the first exchange goes on, unless the user counts messages: caches, page tables and the scheduler's choice of
/// CPUs settle in it.
const SETTLE: Duration = Duration::from_millis(150);

/// One message there and back, so that a network that lets nothing through is called by its name; then some more.
fn probe(s: &mut Session, o: &Options, limits: &Limits) -> Result<()> {
    let run = Run { run: 0, test: Test::Lat, layout: layout(Test::Lat, 8, o.layout, limits), size: 8 };
    let once = Extent { iters: Some(1), time: None };
    let settle = match o.iters {
        Some(_) => Extent { iters: Some(0), time: None },
        None => Extent { iters: None, time: Some(SETTLE) },
    };
    measure(s, run, Plan { warmup: settle, measure: once, tick: &mut |_| {} })
        .map(|_| ())
        .map_err(|f| f.context("the first message"))
}

fn measure(s: &mut Session, run: Run, plan: Plan<'_>) -> Result<Sample> {
    let pattern = Arc::new(Pattern::new(run.run, run.size));
    let rx = s.expect(&run, pattern.clone())?;
    let tx = Sender::new(&s.local, run, pattern)?;
    s.link.send(&Message::Run { run })?;
    match s.recv("ready")? {
        Message::Ready => {}
        m => return Err(s.unexpected(&m, "ready")),
    }
    let sample = bench::client(s, &run, &tx, &rx, plan)?;
    let sent = sample.iters + sample.warmup;
    s.link.send(&Message::Sent { count: sent })?;
    match s.recv("received")? {
        Message::Received { count } if count == sent => Ok(sample),
        Message::Received { count } => {
            Err(Failure::new(format!("verification failed: {sent} messages were sent and {count} arrived")))
        }
        m => Err(s.unexpected(&m, "received")),
    }
}

/// The layout for a message, if the user does not say: the cheapest that can carry it.
fn layout(test: Test, size: usize, chosen: Option<Layout>, limits: &Limits) -> Layout {
    let order = match test {
        Test::Lat | Test::Rate => [Layout::Short, Layout::Bcopy, Layout::Zcopy],
        Test::Bw => [Layout::Bcopy, Layout::Zcopy, Layout::Short],
    };
    chosen.or(order.into_iter().find(|&l| limits.of(l).is_some_and(|max| size <= max))).unwrap_or(Layout::Bcopy)
}

/// The runs, one row per size.
fn plan(tests: &[Test], o: &Options, limits: &Limits, transport: &str) -> Result<Vec<Vec<Run>>> {
    let (name, max) = match o.layout {
        Some(l) => (l.name(), limits.of(l)),
        None => ("copying", limits.bcopy.or(limits.short).or(limits.zcopy)),
    };
    let max = max.filter(|&max| max >= SIZE_MIN).ok_or_else(|| {
        Failure::new(format!(
            "{transport} cannot send {name} messages between these devices; choose another layout with -D"
        ))
    })?;
    let sizes = o.sizes().resolve(max).map_err(|size| {
        Failure::new(format!(
            "{size} bytes are too many: {transport} sends at most {max} in one {name} message between these devices; use \
             `max` for the largest size"
        ))
    })?;
    let mut number = 0;
    Ok(sizes
        .iter()
        .map(|&size| {
            tests
                .iter()
                .map(|&test| {
                    number += 1;
                    Run { run: number, test, layout: layout(test, size, o.layout, limits), size }
                })
                .collect()
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    const LIMITS: Limits = Limits { short: Some(64), bcopy: Some(4088), zcopy: Some(4088) };

    fn rows(args: &[&str], limits: &Limits) -> Result<Vec<Vec<Run>>, String> {
        let o = Options::parse_from([&["uct_perf"], args].concat());
        plan(&o.tests(), &o, limits, "ud_verbs").map_err(|f| f.to_string())
    }

    #[test]
    fn the_cheapest_layout_that_fits_is_taken() {
        let r = rows(&[], &LIMITS).unwrap();
        assert_eq!(r.iter().map(|row| row[0].size).collect::<Vec<_>>(), [8, 32, 128, 512, 2048, 4088]);
        let layouts = |i: usize| r[i].iter().map(|r| r.layout).collect::<Vec<_>>();
        assert_eq!(layouts(0), [Layout::Short, Layout::Bcopy, Layout::Short]);
        assert_eq!(layouts(2), [Layout::Bcopy; 3]);
        assert_eq!(r.concat().iter().map(|r| r.run).collect::<Vec<_>>(), (1..=18).collect::<Vec<_>>());
    }

    #[test]
    fn limits_are_named() {
        let e = rows(&["-s", "8:8192:x2"], &LIMITS).unwrap_err();
        assert!(
            e.starts_with("8192 bytes are too many: ud_verbs sends at most 4088") || e.starts_with("4096 bytes"),
            "{e}"
        );
        let e = rows(&["-s", "100", "-D", "short"], &LIMITS).unwrap_err();
        assert!(e.contains("at most 64 in one short message"), "{e}");
        let e = rows(&["-D", "zcopy"], &Limits { zcopy: None, ..LIMITS }).unwrap_err();
        assert!(e.contains("cannot send zcopy messages"), "{e}");
        // Whatever the other side claims.
        let e = rows(&["-D", "shortiov"], &Limits { short: Some(3), ..LIMITS }).unwrap_err();
        assert!(e.contains("cannot send shortiov messages"), "{e}");
    }
}
