use std::{any::Any, num::NonZeroUsize, sync::Arc, time::Duration};

use clap::Parser;
use uct::{
    Error, ErrorKind, Iface, IfaceAttr, IfaceParams, MemRegion, Worker,
    iface::{Caps, Counter},
    md::{Component, DeviceResource, Md, MemoryDomain, PortResource, Transport},
};

use super::{text::WIDTH, *};
use crate::registry;

fn options(args: &[&str]) -> Options {
    Options::try_parse_from(["uct_info"].iter().chain(args)).unwrap()
}

fn show(args: &[&str], pairs: &[(&str, &str)]) -> Report {
    run(&options(args), &fake_registry(), &Env::from_pairs(pairs.iter().copied())).unwrap()
}

/// A component with a device that works, one that cannot be used and one that fails to open; a transport that does not
/// work on it.
struct Fake;

impl Component for Fake {
    fn name(&self) -> &'static str {
        "fake"
    }

    fn devices(&self, _: &Env) -> Result<Vec<DeviceResource>> {
        let device = |name: &str, unusable: Option<&str>| DeviceResource {
            name: name.into(),
            unusable: unusable.map(String::from),
        };
        Ok(vec![device("good0", None), device("bad0", Some("its driver is missing")), device("worse0", None)])
    }

    fn open(&self, device: &str, _: &Env) -> Result<Arc<dyn MemoryDomain>> {
        match device {
            "good0" => Ok(Arc::new(Fake)),
            _ => Err(Error::new(ErrorKind::NoDevice, format!("{device}: gone"))),
        }
    }
}

impl MemoryDomain for Fake {
    fn device_name(&self) -> String {
        "good0".into()
    }

    fn mem_alloc(&self, _: usize) -> Result<MemRegion> {
        Err(Error::new(ErrorKind::NoMemory, "none"))
    }

    fn ports(&self) -> Result<Vec<PortResource>> {
        let facts = vec![("link layer", "Ethernet".to_string()), ("gid", "[0] ::ffff:10.0.0.1 RoCE v2".to_string())];
        let bare = vec![("link layer", "Ethernet".to_string())];
        Ok(vec![PortResource { port: 1, active: true, facts }, PortResource { port: 2, active: false, facts: bare }])
    }

    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }

    fn counters(&self) -> Vec<Counter> {
        vec![Counter { name: "ah.hits", value: 3 }]
    }
}

impl Transport for Fake {
    fn name(&self) -> &'static str {
        "ud_verbs"
    }

    fn aliases(&self) -> &'static [&'static str] {
        &["ud"]
    }

    fn supports(&self, _: &Md) -> Result<(), String> {
        Err("good0 has no UD queue pairs".into())
    }

    fn open_iface(&self, _: &Md, _: &Worker, _: u8, _: &IfaceParams, _: &Env) -> Result<Iface> {
        Err(Error::new(ErrorKind::Unsupported, "not asked"))
    }
}

fn fake_registry() -> Registry {
    let mut registry = Registry::new();
    registry.add_component(Arc::new(Fake)).add_transport(Arc::new(Fake));
    registry.add_settings(ib::config::SECTIONS).add_settings(ud::config::SECTIONS);
    registry
}

#[test]
fn devices_that_do_not_work_are_shown_with_the_reason() {
    let text = show(&["-d"], &[]).text;
    assert_eq!(
        text,
        "\
good0 (component fake)
  port 1
    state       up
    link layer  Ethernet
    gid         [0] ::ffff:10.0.0.1 RoCE v2
    transport ud_verbs
      unsupported  good0 has no UD queue pairs
  port 2
    state       down
    link layer  Ethernet
    gid         none: is the network interface in this network namespace, and has it an address?
    transport ud_verbs
      unsupported  good0 has no UD queue pairs

bad0 (component fake)
  cannot be used  its driver is missing

worse0 (component fake)
  cannot be opened  no such device: worse0: gone
"
    );
    assert!(show(&["-d", "bad"], &[]).text.starts_with("bad0"));
    assert_eq!(show(&["-d", "nothing"], &[]).text, "no device `nothing`; there are: good0, bad0, worse0\n");
    let text = show(&["-d", "good0:2"], &[]).text;
    assert!(text.starts_with("good0 (component fake)\n  port 2\n") && !text.contains("port 1"), "{text}");
    assert!(show(&["-d", "good0:3"], &[]).text.ends_with("  no port 3, only 2\n"));
    assert_eq!(show(&["-d", "good:1"], &[]).text, "no device `good:1`; there are: good0, bad0, worse0\n");
    assert!(show(&["-ds", "good"], &[]).text.ends_with("  counters\n    ah.hits  3\n"));
}

#[test]
fn limits_are_shown_in_words() {
    let mut attr = IfaceAttr::empty("ud_verbs", "good0:1".into());
    attr.am.max_short = NonZeroUsize::new(56);
    attr.am.max_bcopy = NonZeroUsize::new(4088);
    attr.am.max_zcopy = NonZeroUsize::new(1 << 20);
    (attr.am.max_hdr, attr.am.max_iov, attr.am.opt_zcopy_align, attr.am.align_mtu) = (3992, 5, 512, 1 << 14);
    attr.caps = Caps::CONNECT_TO_IFACE | Caps::HANDLER_SYNC | Caps::HANDLER_ASYNC | Caps::PENDING | Caps::EP_CHECK;
    (attr.latency, attr.overhead) = (Duration::from_nanos(900), Duration::from_nanos(105));
    attr.bandwidth_bps = 12.5e9;
    (attr.device_addr_len, attr.iface_addr_len, attr.ep_addr_len) = (45, 3, 6);
    let mut out = String::new();
    text::columns(&mut out, 0, &devices::attr_rows(&attr));
    assert_eq!(
        out,
        "\
am_short     up to 56 bytes, its 8-byte header included
am_bcopy     up to 4088 bytes
am_zcopy     up to 1 MiB in 5 pieces, of which header up to 3992 bytes
alignment    best 512 bytes for am_zcopy, unit 16 KiB
connects to  interfaces
handlers     in progress, in the background
features     pending queue, endpoint check
latency      about 900 ns, overhead 105 ns per message
bandwidth    about 12500 MB/s, shared by all users of the port
paths        1
addresses    device 45, interface 3, endpoint 6 bytes
"
    );
    // What is not supported has no row.
    let none = devices::attr_rows(&IfaceAttr::empty("x", "y".into()));
    assert!(none.iter().all(|(name, _)| !name.starts_with("am_")));
}

#[test]
fn versions_name_what_is_built_in() {
    let text = show(&["-v"], &[]).text;
    assert!(text.starts_with(&format!("uct_info     {}\n", env!("CARGO_PKG_VERSION"))), "{text}");
    assert!(text.contains("components   fake\n") && text.contains("transports   ud_verbs (also ud)\n"), "{text}");
    let parts = show(&["-vd"], &[]).text;
    assert!(parts.starts_with("uct_info") && parts.contains("\n\ngood0 (component fake)\n"), "{parts}");
}

#[test]
fn settings_are_a_file_that_can_be_read_back() {
    let pairs = [
        ("UCX_IB_AH_CACHE_TTL", "90s"),
        ("UCX_UD_MAX_WINDOW", "64"),
        ("UCX_SOFT_ADDR", "10.0.0.1"),
        ("UCX_IB_SUBNET_PREFIX", "fe80:0:0:0"),
    ];
    for args in [&["-c"][..], &["-cf"]] {
        let text = show(args, &pairs).text;
        let mut env = Env::empty();
        env.add_file_text("ucx.conf", &text);
        let catalog = fake_registry();
        let expected = catalog.settings().changed(&Env::from_pairs(pairs));
        assert_eq!(catalog.settings().changed(&env), expected);
        // Every setting is there.
        let count = catalog.settings().sections().iter().map(|s| s.table.fields.len()).sum::<usize>();
        assert_eq!(text.lines().filter(|l| !l.starts_with('#') && l.contains('=')).count(), count);
        assert!(text.lines().all(|l| !l.starts_with('#') || l.chars().count() <= WIDTH), "{text}");
    }
}

#[test]
fn short_listings_comment_only_what_is_changed() {
    assert_eq!(
        show(&["-c", "ah_cache"], &[]).text,
        "\
#
# Device settings (transports: ud_verbs, srd)
#
UCX_IB_AH_CACHE_TTL=inf
UCX_IB_AH_CACHE_MAX=65536
"
    );
    assert_eq!(
        show(&["-c", "CACHE_TTL"], &[("UCX_IB_AH_CACHE_TTL", "60s")]).text,
        "\
#
# Device settings (transports: ud_verbs, srd)
#
# from environment variable UCX_IB_AH_CACHE_TTL, default inf
UCX_IB_AH_CACHE_TTL=1m
"
    );
}

#[test]
fn full_listings_document_everything() {
    assert_eq!(
        show(&["-cf", "TIMER_BACKOFF"], &[("UCX_UD_TIMER_BACKOFF", "1.5")]).text,
        "\
#
# UD settings (transports: ud_verbs)
#

# By how much this wait is multiplied each time the peer does not answer.
#   accepts  a decimal number; must be at least 1
#   names    UCX_UD_TIMER_BACKOFF, UCX_UD_VERBS_TIMER_BACKOFF (a later one wins)
#   default  2
#   origin   environment variable UCX_UD_TIMER_BACKOFF
UCX_UD_TIMER_BACKOFF=1.5
"
    );
}

#[test]
fn mistakes_are_shown_in_place_and_at_the_end() {
    let report = show(&["-c"], &[("UCX_UD_TIMEOUT", "10msx"), ("UCX_IB_AH_CACHE_TLL", "1s")]);
    assert!(
        report.text.contains("# NOT VALID: invalid setting: UCX_UD_TIMEOUT=10msx: 'msx' is not a unit;"),
        "{report:?}"
    );
    assert!(report.text.contains("\nUCX_UD_TIMEOUT=10msx\n"));
    let tail = "\n# Set, but read by nobody:\n# unknown UCX_IB_AH_CACHE_TLL, did you mean UCX_IB_AH_CACHE_TTL?\n";
    assert!(report.text.ends_with(tail), "{}", report.text);
    assert_eq!(report.problems.len(), 1);
    // A setting that several transports read is one setting for each; a good listing has no problems.
    assert!(show(&["-c"], &[]).problems.is_empty());
}

#[test]
fn reachability_is_a_table_with_reasons() {
    let text = show(&["-r", "10.0.0.2"], &[]).text;
    assert_eq!(
        text,
        "\
Can 10.0.0.2 be reached?
  ud_verbs/good0:1  no: good0 has no UD queue pairs
  ud_verbs/good0:2  no: the port is down
  bad0              no: its driver is missing
  worse0            no: no such device: worse0: gone
"
    );
    assert_eq!(reach::parse("10.0.0.2").unwrap().len(), 17);
    assert_eq!(reach::parse("003412").unwrap(), [0, 0x34, 0x12]);
    for bad in ["", "abc", "host", "0x00", "10.0.0"] {
        let e = reach::parse(bad).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidParam, "{bad}");
    }
}

#[test]
fn the_command_line_is_checked() {
    for bad in [&["-f"][..], &["-s"], &["-x"], &["-r"]] {
        assert!(Options::try_parse_from(["uct_info"].iter().chain(bad)).is_err(), "{bad:?}");
    }
    Options::command().debug_assert();
    // Asked for nothing, it explains itself.
    assert!(show(&[], &[]).text.contains("Usage: uct_info"));
}

/// A writer whose reader has gone away, or whose disk is full.
struct Failing(io::ErrorKind);

impl Write for Failing {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(self.0.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_reader_that_has_seen_enough_is_no_error() {
    assert!(print(&mut Failing(io::ErrorKind::BrokenPipe), "text").is_ok());
    assert!(print(&mut Failing(io::ErrorKind::StorageFull), "text").is_err());
}

/// Words in capitals that need no explanation to who sets such variables.
const COMMON: [&str; 4] = ["UCX", "UDP", "IP", "UD"];

#[test]
fn every_setting_is_documented_in_plain_sentences() {
    let registry = registry();
    let fields: Vec<_> = registry.settings().sections().iter().flat_map(|s| s.table.fields).collect();
    assert!(fields.len() > 40);
    for field in &fields {
        let doc = field.doc();
        let name = field.name;
        assert!(doc.len() > 20 && doc.ends_with('.'), "{name}: not a sentence: {doc}");
        assert!(doc.starts_with(|c: char| c.is_uppercase()), "{name}: {doc}");
        assert!(!doc.contains("  ") && !doc.contains('`') && !doc.contains("[["), "{name}: {doc}");
        assert!(!field.forms().is_empty(), "{name}");
        field.canonical(field.default).unwrap_or_else(|e| panic!("{name}: default {}: {e}", field.default));
        for word in doc.split(|c: char| !c.is_ascii_alphanumeric() && c != '_') {
            let capitals = word.bytes().filter(u8::is_ascii_uppercase).count();
            // UCX_ is how all names begin.
            let known = COMMON.contains(&word) || word == "UCX_" || fields.iter().any(|f| f.name == word);
            let explained = doc.contains(&format!("({word})"));
            let mode = word.starts_with("ROCE_") || word.chars().any(char::is_lowercase);
            assert!(capitals < 2 || known || explained || mode, "{name}: what is {word}?");
        }
    }
}

/// The whole way with nothing faked: the soft device of this process and the transports on it.
#[test]
fn the_soft_device_works_out_of_the_box() {
    let show = |args: &[&str]| run(&options(args), &registry(), &Env::empty()).unwrap();
    let text = show(&["-ds", "soft0"]).text;
    assert!(text.starts_with("soft0 (component ib)\n  port 1\n    state       up\n"), "{text}");
    for expected in ["    transport ud_verbs\n      am_short ", "\n      counters\n", "\n  counters\n    ah.hits "] {
        assert!(text.contains(expected), "{text}");
    }
    assert!(!text.contains("cannot be") && !text.contains("unsupported"), "{text}");
    let reach = show(&["-r", "127.0.0.1"]).text;
    assert_eq!(reach, "Can 127.0.0.1 be reached?\n  ud_verbs/soft0:1  yes\n");
    // Garbage has a reason too.
    let reach = show(&["-r", "ff00"]).text;
    assert!(reach.contains("ud_verbs/soft0:1  no: "), "{reach}");
}
