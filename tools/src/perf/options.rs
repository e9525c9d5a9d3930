//! The command line.

use std::{str::FromStr, time::Duration};

use clap::{Parser, ValueEnum};
use serde::{Deserialize, Serialize};

use super::{cpu::CpuArg, sizes::SizeList, ucx::Version};

/// What is measured.
#[derive(Copy, Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Test {
    /// Ping-pong: latency one way, which is half of the round trip
    #[value(name = "am_lat")]
    #[serde(rename = "am_lat")]
    Lat,
    /// Stream in one direction: MB/s (1 MB is 10^6 bytes)
    #[value(name = "am_bw")]
    #[serde(rename = "am_bw")]
    Bw,
    /// The same stream sent the cheapest way: messages/s
    #[value(name = "am_rate")]
    #[serde(rename = "am_rate")]
    Rate,
}

impl Test {
    pub(crate) const ALL: [Test; 3] = [Test::Lat, Test::Bw, Test::Rate];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Test::Lat => "am_lat",
            Test::Bw => "am_bw",
            Test::Rate => "am_rate",
        }
    }
}

/// How a message is handed to the transport.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Layout {
    /// One small buffer, copied
    Short,
    /// Several small buffers, copied
    Shortiov,
    /// Packed by a function straight into the send buffer
    Bcopy,
    /// Read by the device from registered memory
    Zcopy,
}

impl Layout {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Layout::Short => "short",
            Layout::Shortiov => "shortiov",
            Layout::Bcopy => "bcopy",
            Layout::Zcopy => "zcopy",
        }
    }
}

/// How the two endpoints find each other.
#[derive(Copy, Clone, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ConnectMode {
    /// By interface address: the transports shake hands over the network
    #[default]
    Iface,
    /// By endpoint address, exchanged beforehand: no handshake
    Ep,
}

impl ConnectMode {
    pub(crate) fn name(self) -> &'static str {
        match self {
            ConnectMode::Iface => "iface",
            ConnectMode::Ep => "ep",
        }
    }
}

/// What a side does while nothing has arrived.
#[derive(Copy, Clone, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum WaitMode {
    /// Look again at once, and let other threads run only after a while: the lowest latency, and a whole CPU
    Spin,
    /// Let other threads run each time, then look again
    Yield,
    /// Sleep until the device has an event: no CPU while idle
    Events,
}

impl WaitMode {
    pub(crate) fn name(self) -> &'static str {
        match self {
            WaitMode::Spin => "spin",
            WaitMode::Yield => "yield",
            WaitMode::Events => "events",
        }
    }
}

/// The form of the results.
#[derive(Copy, Clone, Debug, PartialEq, Eq, ValueEnum, Default)]
pub(crate) enum Format {
    /// Aligned columns for people
    #[default]
    Table,
    /// One line per test and size
    Csv,
    /// One object
    Json,
}

/// A device and, optionally, its port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeviceArg {
    pub(crate) name: String,
    pub(crate) port: Option<u8>,
}

impl FromStr for DeviceArg {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        let bad = || "expected DEVICE or DEVICE:PORT with a port from 1, for example soft0:1".to_string();
        let (name, port) = match s.rsplit_once(':') {
            None => (s, None),
            Some((name, p)) => (name, Some(p.parse::<u8>().ok().filter(|&p| p > 0).ok_or_else(bad)?)),
        };
        if name.is_empty() {
            return Err(bad());
        }
        Ok(DeviceArg { name: name.into(), port })
    }
}

fn seconds(s: &str) -> Result<Duration, String> {
    let n = s.strip_suffix('s').unwrap_or(s);
    n.parse::<f64>()
        .ok()
        .filter(|v| (0.001..=86_400.0).contains(v))
        .map(Duration::from_secs_f64)
        .ok_or_else(|| "expected seconds from 0.001 to 86400, for example 0.5 or 10".to_string())
}

const ABOUT: &str = "Measures active messages between two processes: latency, bandwidth, message rate.";

const LONG_ABOUT: &str = "\
Measures active messages between two processes: latency, bandwidth, message rate.

Without HOST and without --server it starts its own second process on this host and tests the transport between the two. \
With --server it waits for one client. With HOST it is the client of the server there. The server needs no options but its \
own device: transport, tests, sizes and layout come from the client.

Every message is verified by its receiver, in number and content.";

const EXAMPLES: &str = "\
Examples:
  uct_perf                                    all tests between two processes of this host
  uct_perf -t am_lat -s 8:4096:x2 -n 100000   latency of ten sizes, 100,000 round trips each
  uct_perf -l                                 on host a: wait for a client
  uct_perf a -t am_bw -s 8,1k,max             on host b: bandwidth to host a
  uct_perf a --ucx -t am_lat -s 64            with a ucx_perftest on host a; see --ucx for its version
  uct_perf --format json > result.json        for programs";

/// What `uct_perf` was asked to do.
#[derive(Parser, Debug, Clone)]
#[command(name = "uct_perf", version, about = ABOUT, long_about = LONG_ABOUT, after_help = EXAMPLES, max_term_width = 110)]
pub(crate) struct Options {
    /// Host of a `uct_perf --server`: a name or an address
    #[arg(value_name = "HOST")]
    pub(crate) host: Option<String>,

    /// Wait for one client, and serve it
    #[arg(short = 'l', long, conflicts_with = "host")]
    pub(crate) server: bool,

    /// Tests to run, separated by commas [default: all]
    #[arg(short, long = "test", value_name = "TEST", value_enum, value_delimiter = ',', help_heading = "Test")]
    pub(crate) tests: Vec<Test>,

    /// Message sizes in bytes: a list (8,64,1k,max) or sweeps (8:4096:x2, 8:512:+8) [default: 8:2048:x4,max]
    #[arg(short, long = "size", value_name = "SIZES", help_heading = "Test")]
    pub(crate) sizes: Option<SizeList>,

    /// How messages are sent [default: short while it fits, then bcopy; am_bw always bcopy]
    #[arg(short = 'D', long, value_enum, value_name = "LAYOUT", help_heading = "Test")]
    pub(crate) layout: Option<Layout>,

    /// Messages (round trips) per test and size [default: as many as fit into --time]
    #[arg(short = 'n', long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..1 << 47), help_heading = "Test")]
    pub(crate) iters: Option<u64>,

    /// Time per test and size, at most [default: 0.7, or no limit with -n]
    #[arg(long, value_name = "SECONDS", value_parser = seconds, help_heading = "Test")]
    pub(crate) time: Option<Duration>,

    /// Messages per test and size before the measurement [default: up to 10000 in 0.05 s]
    #[arg(short, long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(0..1 << 46), help_heading = "Test")]
    pub(crate) warmup: Option<u64>,

    /// Transport [default: ud; a server takes the client's]
    #[arg(short = 'x', long, value_name = "NAME", help_heading = "Transport")]
    pub(crate) transport: Option<String>,

    /// Device of this side, and its port [default: the first that works]
    #[arg(short, long, value_name = "DEVICE[:PORT]", help_heading = "Transport")]
    pub(crate) device: Option<DeviceArg>,

    /// How the endpoints are connected [default: iface, or ep if the transport has nothing else]
    #[arg(long, value_enum, value_name = "HOW", help_heading = "Transport")]
    pub(crate) connect: Option<ConnectMode>,

    /// What to do while nothing has arrived [default: spin, or yield if both processes are on one CPU]
    #[arg(long, value_enum, value_name = "HOW", help_heading = "Transport")]
    pub(crate) wait: Option<WaitMode>,

    /// CPU of this process, and of the second one in a self-test: a number, two numbers like 2,3, or `any` [default: two in
    /// a self-test, else any]
    #[arg(short, long, value_name = "CPU", help_heading = "Transport")]
    pub(crate) cpu: Option<CpuArg>,

    /// TCP port of the control connection; for --server, 0 takes any free one
    #[arg(short, long, value_name = "PORT", default_value_t = 13337, help_heading = "Control")]
    pub(crate) port: u16,

    /// The other side is UCX's `ucx_perftest`; a server recognises its version, a client may have to say [default: 1.23]
    #[arg(long, value_name = "VERSION", num_args = 0..=1, require_equals = true, conflicts_with_all = ["format", "csv"], help_heading = "Control")]
    pub(crate) ucx: Option<Option<Version>>,

    /// Device of a `ucx_perftest` server, of the versions that take it from the client: up to 1.16
    #[arg(long, value_name = "DEVICE:PORT", requires_all = ["ucx", "host"], help_heading = "Control")]
    pub(crate) ucx_device: Option<String>,

    /// How long the other side may be silent before the run is given up
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "10", help_heading = "Control")]
    pub(crate) timeout: Duration,

    /// Form of the results
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t, help_heading = "Output")]
    pub(crate) format: Format,

    /// The same as --format csv
    #[arg(short = 'v', long = "csv", conflicts_with = "format", help_heading = "Output")]
    pub(crate) csv: bool,

    /// Final numbers only: no heading lines and no progress display
    #[arg(short = 'f', long = "final", help_heading = "Output")]
    pub(crate) final_only: bool,

    /// The second process of a self-test, whose standard input is the control connection
    #[arg(long, hide = true, conflicts_with_all = ["host", "server"])]
    pub(crate) second_process: bool,
}

/// Time per test and size if the user limits neither time nor count.
const TIME: Duration = Duration::from_millis(700);
/// Limits of the warm-up if the user does not say.
const WARMUP_ITERS: u64 = 10_000;
const WARMUP_TIME: Duration = Duration::from_millis(50);

/// When a part of a run ends: at whichever comes first.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) iters: Option<u64>,
    pub(crate) time: Option<Duration>,
}

impl Options {
    /// The tests, each once, in the order of the columns.
    pub(crate) fn tests(&self) -> Vec<Test> {
        Test::ALL.into_iter().filter(|t| self.tests.is_empty() || self.tests.contains(t)).collect()
    }

    pub(crate) fn sizes(&self) -> SizeList {
        self.sizes.clone().unwrap_or_else(SizeList::standard)
    }

    /// How long to measure.
    pub(crate) fn extent(&self) -> Extent {
        let time = if self.iters.is_none() { Some(self.time.unwrap_or(TIME)) } else { self.time };
        Extent { iters: self.iters, time }
    }

    /// How long to warm up.
    pub(crate) fn warmup(&self) -> Extent {
        match self.warmup {
            Some(n) => Extent { iters: Some(n), time: None },
            // A short run is not worth a long warm-up.
            None => Extent {
                iters: Some(self.iters.map_or(WARMUP_ITERS, |n| n.min(WARMUP_ITERS))),
                time: Some(WARMUP_TIME),
            },
        }
    }

    pub(crate) fn format(&self) -> Format {
        if self.csv { Format::Csv } else { self.format }
    }

    /// What to do while nothing has arrived, by the CPUs that this process may use now.
    pub(crate) fn wait(&self) -> WaitMode {
        self.wait.unwrap_or_else(|| match (&self.cpu, std::thread::available_parallelism()) {
            // Two spinning processes on one CPU would wait for each other's time slice to end.
            (Some(CpuArg::These(a, Some(b))), _) if a == b => WaitMode::Yield,
            (_, Ok(n)) if n.get() == 1 => WaitMode::Yield,
            _ => WaitMode::Spin,
        })
    }

    /// Whether this process is bound to a CPU of its own.
    pub(crate) fn has_cpu(&self) -> bool {
        matches!(self.cpu, Some(CpuArg::These(a, b)) if b != Some(a))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(args: &[&str]) -> Result<Options, String> {
        Options::try_parse_from([&["uct_perf"], args].concat()).map_err(|e| e.to_string())
    }

    #[test]
    fn two_on_one_cpu_let_each_other_run() {
        let of = |args: &[&str]| parse(args).map(|o| (o.wait(), o.has_cpu())).unwrap();
        assert_eq!(of(&["-c", "3,3"]), (WaitMode::Yield, false));
        assert_eq!(of(&["-c", "3,3", "--wait", "spin"]), (WaitMode::Spin, false));
        assert_eq!(of(&["-c", "2,3", "--wait", "spin"]), (WaitMode::Spin, true));
        assert_eq!(of(&["-c", "2", "--wait", "spin"]), (WaitMode::Spin, true));
        assert_eq!(of(&["-c", "any", "--wait", "spin"]), (WaitMode::Spin, false));
        assert_eq!(of(&["--wait", "spin"]), (WaitMode::Spin, false));
    }

    #[test]
    fn the_definition_is_sound() {
        Options::command().debug_assert();
    }

    #[test]
    fn options_of_ucx_perftest_mean_the_same() {
        let o = parse(&[
            "host7", "-t", "am_bw", "-x", "ud", "-d", "soft1:1", "-s", "8:64:x2", "-n", "5", "-w", "2", "-D",
            "shortiov", "-p", "99", "-f", "-v",
        ])
        .unwrap();
        assert_eq!((o.host.as_deref(), o.tests(), o.port), (Some("host7"), vec![Test::Bw], 99));
        assert_eq!(o.device, Some(DeviceArg { name: "soft1".into(), port: Some(1) }));
        assert_eq!((o.layout, o.format(), o.final_only), (Some(Layout::Shortiov), Format::Csv, true));
        assert_eq!(o.extent(), Extent { iters: Some(5), time: None });
        assert_eq!(o.warmup(), Extent { iters: Some(2), time: None });
    }

    #[test]
    fn defaults() {
        let o = parse(&[]).unwrap();
        assert_eq!(o.tests(), Test::ALL);
        assert_eq!(o.extent(), Extent { iters: None, time: Some(TIME) });
        assert_eq!((o.port, o.timeout, o.format()), (13337, Duration::from_secs(10), Format::Table));
        assert_eq!(parse(&["-t", "am_rate,am_lat", "-t", "am_lat"]).unwrap().tests(), [Test::Lat, Test::Rate]);
        assert_eq!(parse(&["-n", "7"]).unwrap().warmup().iters, Some(7));
    }

    #[test]
    fn bad_values_name_the_option_and_what_is_expected() {
        for (args, words) in [
            (&["-t", "put_lat"][..], "possible values: am_lat, am_bw, am_rate"),
            (&["-s", "4"], "the smallest message has 8"),
            (&["-n", "0"], "0 is not in 1.."),
            (&["-n", "many"], "--iters <COUNT>"),
            (&["-D", "iov"], "possible values: short, shortiov, bcopy, zcopy"),
            (&["-d", "soft0:0"], "expected DEVICE or DEVICE:PORT"),
            (&["-d", ":1"], "expected DEVICE or DEVICE:PORT"),
            (&["-p", "70000"], "--port <PORT>"),
            (&["-c", "first"], "expected the number of a CPU"),
            (&["--time", "0"], "expected seconds"),
            (&["--timeout", "nan"], "expected seconds"),
            (&["-l", "host"], "cannot be used with"),
            (&["-q"], "unexpected argument '-q'"),
        ] {
            let e = parse(args).unwrap_err();
            assert!(e.contains(words), "{args:?}: {e}");
        }
    }
}
