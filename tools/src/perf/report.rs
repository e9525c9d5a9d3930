//! The results: a table that grows row by row, CSV lines, or one JSON object at the end.

use std::{
    collections::BTreeMap,
    io::{self, Write},
};

use serde::Serialize;
use uct::iface::Counter;

use super::{
    bench::Sample,
    failure::clean,
    message::{PROTOCOL, Run, Side, VERSION},
    options::{ConnectMode, Format, Layout, Test, WaitMode},
};

/// What is known before the first result.
pub(crate) struct Heading {
    pub(crate) client: Side,
    pub(crate) server: Side,
    pub(crate) connect: ConnectMode,
    pub(crate) wait: WaitMode,
    /// The layout if the user chose one.
    pub(crate) layout: Option<Layout>,
    pub(crate) tests: Vec<Test>,
    /// Both sides are processes that one command started.
    pub(crate) self_test: bool,
}

/// One test at one size.
struct Cell {
    run: Run,
    sample: Sample,
}

impl Cell {
    fn seconds(&self) -> f64 {
        self.sample.elapsed.as_secs_f64().max(1e-9)
    }

    fn messages_per_s(&self) -> f64 {
        self.sample.iters as f64 / self.seconds()
    }

    fn mb_per_s(&self) -> f64 {
        self.messages_per_s() * self.run.size as f64 / 1e6
    }

    /// Messages that were verified, warm-up and both directions included.
    fn verified(&self) -> u64 {
        let n = self.sample.iters + self.sample.warmup;
        if self.run.test == Test::Lat { 2 * n } else { n }
    }

    fn latency(&self) -> Option<Latency> {
        let h = self.sample.one_way.as_ref()?;
        let us = |ns: u64| round3(ns as f64 / 1e3);
        Some(Latency {
            min: us(h.min()),
            avg: round3(h.mean() / 1e3),
            p50: us(h.percentile(50.0)),
            p90: us(h.percentile(90.0)),
            p99: us(h.percentile(99.0)),
            p999: us(h.percentile(99.9)),
            max: us(h.max()),
        })
    }
}

/// In microseconds, one way.
#[derive(Serialize)]
struct Latency {
    min: f64,
    avg: f64,
    p50: f64,
    p90: f64,
    p99: f64,
    p999: f64,
    max: f64,
}

/// Writes the results of one program run.
pub(crate) struct Report<W: Write> {
    out: W,
    format: Format,
    final_only: bool,
    heading: Heading,
    cells: Vec<Cell>,
    /// Cells that the table has shown.
    shown: usize,
}

impl<W: Write> Report<W> {
    pub(crate) fn new(out: W, format: Format, final_only: bool, heading: Heading) -> Self {
        Report { out, format, final_only, heading, cells: Vec::new(), shown: 0 }
    }

    /// What comes before the first result.
    pub(crate) fn begin(&mut self) -> io::Result<()> {
        match self.format {
            Format::Table => {
                if !self.final_only {
                    self.write_heading()?;
                }
                self.write_columns()?;
            }
            Format::Csv => writeln!(
                self.out,
                "test,layout,size,iterations,warmup,seconds,lat_min_us,lat_avg_us,lat_p50_us,lat_p90_us,lat_p99_us,\
                 lat_p999_us,lat_max_us,mb_per_s,messages_per_s,verified_messages"
            )?,
            Format::Json => {}
        }
        self.out.flush()
    }

    /// Takes a result.
    pub(crate) fn add(&mut self, run: Run, sample: Sample) {
        self.cells.push(Cell { run, sample });
    }

    /// All tests of one size are done.
    pub(crate) fn end_row(&mut self) -> io::Result<()> {
        let row = &self.cells[self.shown..];
        match self.format {
            Format::Table => {
                let line = self.table_row(row);
                writeln!(self.out, "{line}")?;
            }
            Format::Csv => {
                for c in row {
                    let line = csv_line(c);
                    writeln!(self.out, "{line}")?;
                }
            }
            Format::Json => {}
        }
        self.shown = self.cells.len();
        self.out.flush()
    }

    /// What comes after the last result. `counters` are those of the client's interface.
    pub(crate) fn finish(&mut self, counters: &[Counter]) -> io::Result<()> {
        let messages: u64 = self.cells.iter().map(Cell::verified).sum();
        let bytes: u64 = self.cells.iter().map(|c| c.verified() * c.run.size as u64).sum();
        match self.format {
            Format::Table if !self.final_only => {
                writeln!(self.out)?;
                let lat =
                    if self.heading.tests.contains(&Test::Lat) { "Latency is half of a round trip. " } else { "" };
                writeln!(
                    self.out,
                    "{lat}1 MB is 10^6 bytes. {} messages ({}) arrived, each verified in number and content.",
                    thousands(messages),
                    volume(bytes)
                )?;
                // Numbers that are lower than expected have their reason here.
                if let Some(c) = counters.iter().find(|c| c.name == RESENDS && c.value > 0) {
                    writeln!(self.out, "The client sent {} packets again.", thousands(c.value))?;
                }
            }
            Format::Table | Format::Csv => {}
            Format::Json => self.write_json(messages, bytes, counters)?,
        }
        self.out.flush()
    }

    fn write_heading(&mut self) -> io::Result<()> {
        let h = &self.heading;
        let place = if h.self_test { "between two processes of this host" } else { "between client and server" };
        writeln!(self.out, "uct_perf {VERSION}: active messages over {}, {place}", h.client.transport)?;
        let rows = [("client", &h.client), ("server", &h.server)];
        let cells = rows.map(|(role, s)| {
            let cpu = s.cpu.map_or(String::new(), |c| format!(" on cpu {c}"));
            [role.to_string(), clean(&s.device), clean(&s.address), format!("{} pid {}{cpu}", clean(&s.host), s.pid)]
        });
        let width = |i: usize| cells.iter().map(|c| c[i].chars().count()).max().unwrap_or(0);
        for c in &cells {
            let (d, a) = (width(1), width(2));
            let mut line = format!("  {}  {:d$}  {:a$}  {}", c[0], c[1], c[2], c[3]);
            if h.client.version != h.server.version {
                let v = if c[0] == "client" { &h.client.version } else { &h.server.version };
                line += &format!("  version {}", clean(v));
            }
            writeln!(self.out, "{}", line.trim_end())?;
        }
        let connected = match h.connect {
            ConnectMode::Iface => "connected by interface address",
            ConnectMode::Ep => "connected by endpoint address",
        };
        let waiting = match h.wait {
            WaitMode::Spin => "waiting by spinning",
            WaitMode::Yield => "waiting by yielding",
            WaitMode::Events => "waiting for events",
        };
        let limits = h.client.limits.common(&h.server.limits);
        let (small, stream) = (h.tests.iter().any(|&t| t != Test::Bw), h.tests.contains(&Test::Bw));
        let layout = match (h.layout, limits.short, limits.bcopy) {
            (Some(l), ..) => l.name().into(),
            (None, Some(s), Some(b)) if s < b && small => {
                format!("short to {s} B, then bcopy{}", if stream { "; am_bw bcopy" } else { "" })
            }
            (None, _, Some(_)) if stream && !small => "bcopy".into(),
            (None, ..) => format!("short{}", if stream { "; am_bw bcopy" } else { "" }),
        };
        writeln!(self.out, "  {connected}; {waiting}; layout {layout}")?;
        writeln!(self.out)
    }

    fn write_columns(&mut self) -> io::Result<()> {
        let (mut top, mut names) = (" ".repeat(SIZE), format!("{:>SIZE$}", "bytes"));
        for &t in &self.heading.tests {
            match t {
                Test::Lat => {
                    top += &format!("  {:^w$}", "am_lat, one way [us]", w = 4 * (LAT + 1) - 1);
                    for n in ["p50", "p99", "avg", "max"] {
                        names += &format!(" {n:>LAT$}");
                    }
                    names.insert(names.len() - 4 * (LAT + 1), ' ');
                }
                Test::Bw => {
                    top += &format!("  {:>BW$}", "am_bw");
                    names += &format!("  {:>BW$}", "MB/s");
                    if !self.heading.tests.contains(&Test::Rate) {
                        top += &" ".repeat(RATE + 1);
                        names += &format!(" {:>RATE$}", "messages/s");
                    }
                }
                Test::Rate => {
                    top += &format!("  {:>RATE$}", "am_rate");
                    names += &format!("  {:>RATE$}", "messages/s");
                }
            }
        }
        writeln!(self.out, "{}", top.trim_end())?;
        writeln!(self.out, "{names}")
    }

    fn table_row(&self, row: &[Cell]) -> String {
        let size = row.first().map_or(0, |c| c.run.size);
        let mut line = format!("{size:>SIZE$}");
        for &t in &self.heading.tests {
            let cell = row.iter().find(|c| c.run.test == t);
            match t {
                Test::Lat => {
                    let l = cell.and_then(Cell::latency);
                    line.push(' ');
                    for v in [
                        l.as_ref().map(|l| l.p50),
                        l.as_ref().map(|l| l.p99),
                        l.as_ref().map(|l| l.avg),
                        l.as_ref().map(|l| l.max),
                    ] {
                        line += &format!(" {:>LAT$}", v.map_or("-".into(), short_float));
                    }
                }
                Test::Bw => {
                    line += &format!("  {:>BW$}", cell.map_or("-".into(), |c| short_float(c.mb_per_s())));
                    if !self.heading.tests.contains(&Test::Rate) {
                        line +=
                            &format!(" {:>RATE$}", cell.map_or("-".into(), |c| thousands(c.messages_per_s() as u64)));
                    }
                }
                Test::Rate => {
                    line += &format!("  {:>RATE$}", cell.map_or("-".into(), |c| thousands(c.messages_per_s() as u64)));
                }
            }
        }
        line
    }

    fn write_json(&mut self, messages: u64, bytes: u64, counters: &[Counter]) -> io::Result<()> {
        let h = &self.heading;
        let document = Document {
            program: "uct_perf",
            version: VERSION,
            control_protocol: PROTOCOL,
            transport: &h.client.transport,
            connect: h.connect.name(),
            wait: h.wait.name(),
            client: JsonSide::new(&h.client),
            server: JsonSide::new(&h.server),
            results: self.cells.iter().map(JsonResult::new).collect(),
            verified_messages: messages,
            verified_bytes: bytes,
            client_counters: counters.iter().filter(|c| c.value > 0).map(|c| (c.name, c.value)).collect(),
        };
        serde_json::to_writer_pretty(&mut self.out, &document)?;
        writeln!(self.out)
    }
}

#[derive(Serialize)]
struct Document<'a> {
    program: &'a str,
    version: &'a str,
    control_protocol: u32,
    transport: &'a str,
    connect: &'a str,
    wait: &'a str,
    client: JsonSide<'a>,
    server: JsonSide<'a>,
    results: Vec<JsonResult>,
    verified_messages: u64,
    verified_bytes: u64,
    client_counters: BTreeMap<&'a str, u64>,
}

#[derive(Serialize)]
struct JsonSide<'a> {
    host: &'a str,
    pid: u32,
    cpu: Option<usize>,
    version: &'a str,
    device: &'a str,
    address: &'a str,
}

impl<'a> JsonSide<'a> {
    fn new(s: &'a Side) -> Self {
        JsonSide { host: &s.host, pid: s.pid, cpu: s.cpu, version: &s.version, device: &s.device, address: &s.address }
    }
}

#[derive(Serialize)]
struct JsonResult {
    test: &'static str,
    layout: &'static str,
    size: usize,
    iterations: u64,
    warmup: u64,
    seconds: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    latency_us: Option<Latency>,
    mb_per_s: f64,
    messages_per_s: f64,
    verified_messages: u64,
}

impl JsonResult {
    fn new(c: &Cell) -> Self {
        JsonResult {
            test: c.run.test.name(),
            layout: c.run.layout.name(),
            size: c.run.size,
            iterations: c.sample.iters,
            warmup: c.sample.warmup,
            seconds: c.sample.elapsed.as_secs_f64(),
            latency_us: c.latency(),
            mb_per_s: round3(c.mb_per_s()),
            messages_per_s: round3(c.messages_per_s()),
            verified_messages: c.verified(),
        }
    }
}

/// The counter of packets that were sent again.
const RESENDS: &str = "tx.resends";
/// Column widths.
const SIZE: usize = 8;
const LAT: usize = 8;
const BW: usize = 9;
const RATE: usize = 12;

fn csv_line(c: &Cell) -> String {
    let l = c.latency().map_or(",,,,,,".to_string(), |l| {
        [l.min, l.avg, l.p50, l.p90, l.p99, l.p999, l.max].map(|v| format!("{v:.3}")).join(",")
    });
    format!(
        "{},{},{},{},{},{:.6},{l},{:.3},{:.1},{}",
        c.run.test.name(),
        c.run.layout.name(),
        c.run.size,
        c.sample.iters,
        c.sample.warmup,
        c.seconds(),
        c.mb_per_s(),
        c.messages_per_s(),
        c.verified()
    )
}

fn round3(v: f64) -> f64 {
    (v * 1e3).round() / 1e3
}

/// Two digits after the point for small numbers, none for large ones.
fn short_float(v: f64) -> String {
    match v {
        v if v < 99.995 => format!("{v:.2}"),
        v if v < 999.95 => format!("{v:.1}"),
        v => format!("{v:.0}"),
    }
}

/// `1234567` as `1,234,567`.
pub(crate) fn thousands(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, d) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(d);
    }
    out
}

fn volume(bytes: u64) -> String {
    match bytes as f64 {
        b if b >= 1e9 => format!("{:.1} GB", b / 1e9),
        b if b >= 1e6 => format!("{:.1} MB", b / 1e6),
        b if b >= 1e3 => format!("{:.1} kB", b / 1e3),
        _ => format!("{bytes} bytes"),
    }
}

#[cfg(test)]
#[path = "report_tests.rs"]
mod tests;
