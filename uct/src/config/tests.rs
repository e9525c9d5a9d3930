use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use proptest::prelude::*;

use super::{known::edit_distance, *};
use crate::ErrorKind;

crate::config_table! {
    /// Settings of a test.
    struct TestConfig ("Test") {
        /// How long things take.
        wait: Duration = "WAIT", "10ms", where |t| !t.is_zero(), "must be above 0";
        /// How many there are.
        count: u32 = "COUNT", "7";
        /// How much memory they take.
        room: Bytes = "ROOM", "8192";
        /// Whether to try.
        attempt: Ternary = "ATTEMPT", "try";
    }
}

const SCOPE: Scope = Scope { prefixes: &["IB_", "UD_", "UD_VERBS_"], transports: "ud_verbs" };
const SECTION: Section = Section { table: TestConfig::TABLE, scope: &SCOPE };

fn catalog() -> Catalog {
    Catalog::new([SECTION, Section { table: ProcessConfig::TABLE, scope: &ProcessConfig::SCOPE }])
}

fn unknown(name: &str) -> Option<String> {
    catalog().unknown(&Env::from_pairs([(name, "1")])).first().map(|u| u.to_string())
}

fn round_trip<T: Value + PartialEq + std::fmt::Debug>(text: &str) -> String {
    let value = T::parse(text).unwrap_or_else(|e| panic!("{text}: {e}"));
    let printed = value.print();
    assert_eq!(T::parse(&printed).as_ref(), Ok(&value), "{text} prints as {printed}");
    printed
}

#[test]
fn defaults_parse_and_read_as_declared() {
    let config = TestConfig::read(&Env::empty(), &SCOPE).unwrap();
    assert_eq!(config, TestConfig::default());
    assert_eq!(config.wait, Duration::from_millis(10));
    assert_eq!(config.room, Bytes(8192));
    let process = ProcessConfig::from_env(&Env::empty()).unwrap();
    assert_eq!(process, ProcessConfig::default());
    assert_eq!(process.log_level.level(), tracing::Level::WARN);
}

#[test]
fn later_prefixes_win_and_do_not_chain() {
    let read =
        |pairs: &[(&str, &str)]| TestConfig::read(&Env::from_pairs(pairs.iter().copied()), &SCOPE).unwrap().count;
    assert_eq!(read(&[("UCX_IB_COUNT", "1")]), 1);
    assert_eq!(read(&[("UCX_UD_COUNT", "2"), ("UCX_IB_COUNT", "1")]), 2);
    assert_eq!(read(&[("UCX_IB_COUNT", "1"), ("UCX_UD_VERBS_COUNT", "3"), ("UCX_UD_COUNT", "2")]), 3);
    assert_eq!(read(&[("UCX_COUNT", "9"), ("UCX_UD_VERBS_IB_COUNT", "9"), ("COUNT", "9")]), 7);
}

#[test]
fn the_program_beats_the_environment_beats_files() {
    let mut env = Env::from_pairs([("UCX_IB_COUNT", "2")]);
    // A layer beats those below it also with a weaker name.
    env.add_file_text(
        "/etc/ucx/ucx.conf",
        "# comment\n\nUCX_UD_VERBS_COUNT = 1\nUCX_UD_WAIT=2s\n[Machine]\nUCX_UD_WAIT=9s\n",
    );
    assert_eq!(TestConfig::read(&env, &SCOPE).unwrap().count, 2);
    assert_eq!(TestConfig::read(&env, &SCOPE).unwrap().wait, Duration::from_secs(2));
    env.set("IB_COUNT", "3");
    assert_eq!(TestConfig::read(&env, &SCOPE).unwrap().count, 3);

    let settings = SECTION.settings(&env);
    let origin = |name: &str| settings.iter().find(|s| s.field.name == name).unwrap().origin.to_string();
    assert_eq!(origin("COUNT"), "UCX_IB_COUNT set by the program");
    assert_eq!(origin("WAIT"), "UCX_UD_WAIT in /etc/ucx/ucx.conf line 4");
    assert_eq!(origin("ROOM"), "default");
    // A later file wins over an earlier one.
    env.add_file_text("./ucx.conf", "UCX_UD_WAIT=3s");
    assert_eq!(TestConfig::read(&env, &SCOPE).unwrap().wait, Duration::from_secs(3));
}

#[test]
fn a_bad_value_names_variable_value_place_and_form() {
    let error = |env: &Env| {
        let e = TestConfig::read(env, &SCOPE).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidConfig);
        e.to_string()
    };
    assert_eq!(
        error(&Env::from_pairs([("UCX_UD_WAIT", "10msx")])),
        "invalid setting: UCX_UD_WAIT=10msx: 'msx' is not a unit; accepted: a number with m (minutes), s, ms, us or ns, \
         such as 10ms or 1.5s; without a unit, seconds; or inf; must be above 0"
    );
    assert_eq!(
        error(&Env::from_pairs([("UCX_IB_COUNT", "300abc")])),
        "invalid setting: UCX_IB_COUNT=300abc: not a whole number; accepted: a whole number from 0, or inf"
    );
    // A value that parses needs no word about forms.
    let out_of_range = error(&Env::from_pairs([("UCX_UD_WAIT", "0")]));
    assert_eq!(out_of_range, "invalid setting: UCX_UD_WAIT=0: must be above 0");
    let mut env = Env::empty();
    env.add_file_text("/etc/ucx/ucx.conf", "UCX_UD_COUNT=-1");
    assert!(error(&env).contains("UCX_UD_COUNT=-1 (/etc/ucx/ucx.conf line 1): out of range"), "{}", error(&env));
}

#[test]
fn times_print_as_people_write_them() {
    for (text, printed) in [
        ("0", "0"),
        ("0ms", "0"),
        ("1", "1s"),
        ("1s", "1s"),
        ("100ms", "100ms"),
        ("2m", "2m"),
        ("5.0m", "5m"),
        ("120s", "2m"),
        ("90s", "90s"),
        ("1.5s", "1500ms"),
        ("0.5", "500ms"),
        ("1e3us", "1ms"),
        ("250MS", "250ms"),
        ("1ns", "1ns"),
        ("inf", "inf"),
        ("INF", "inf"),
        ("18446744073709551615ns", "18446744073709551615ns"),
    ] {
        assert_eq!(round_trip::<Duration>(text), printed, "{text}");
    }
}

#[test]
fn bad_times_say_what_is_wrong() {
    for (text, why) in [
        ("", "not a time"),
        ("-1s", "a time cannot be negative"),
        ("-0.5", "a time cannot be negative"),
        ("1 s", "a time is written without spaces"),
        ("1sec", "'sec' is not a unit"),
        ("1h", "'h' is not a unit"),
        ("auto", "not a time"),
        ("nan", "not a time"),
        ("s", "not a time"),
        ("1e30s", "longer than 584 years, write inf for no limit"),
        ("18446744073709551616ns", "longer than 584 years, write inf for no limit"),
        ("0.1ns", "shorter than a nanosecond"),
        ("1.2.3s", "not a number"),
        ("10ms ", "a time is written without spaces"),
        ("1s,", "not a number"),
        ("١s", "not a time"),
    ] {
        assert_eq!(Duration::parse(text), Err(why.to_string()), "{text}");
    }
}

#[test]
fn memory_sizes() {
    for (text, bytes, printed) in [
        ("8192", 8192, "8k"),
        ("8k", 8192, "8k"),
        ("8KB", 8192, "8k"),
        ("1b", 1, "1"),
        ("100", 100, "100"),
        ("3m", 3 << 20, "3m"),
        ("4G", 4 << 30, "4g"),
        ("2tb", 2 << 40, "2t"),
        ("0", 0, "0"),
        ("inf", u64::MAX, "inf"),
    ] {
        assert_eq!(Bytes::parse(text), Ok(Bytes(bytes)), "{text}");
        assert_eq!(round_trip::<Bytes>(text), printed, "{text}");
    }
    assert_eq!(round_trip::<BytesAuto>("AUTO"), "auto");
    assert_eq!(round_trip::<BytesAuto>("4m"), "4m");
    for text in ["1.5k", "1kib", "k", "", "-1", "1q", "8 k", "99999999t", "1kk", "1bb"] {
        assert!(Bytes::parse(text).is_err(), "{text}");
    }
}

#[test]
fn flags_numbers_and_choices() {
    for text in ["y", "YES", "on", "1"] {
        assert_eq!(bool::parse(text), Ok(true), "{text}");
    }
    for text in ["n", "No", "off", "0"] {
        assert_eq!(bool::parse(text), Ok(false), "{text}");
    }
    for text in ["", "true", "2", "yess", "y "] {
        assert!(bool::parse(text).is_err(), "{text}");
    }
    assert_eq!(round_trip::<bool>("Yes"), "y");
    assert_eq!(round_trip::<Ternary>("maybe"), "try");
    assert_eq!(round_trip::<Ternary>("off"), "n");
    assert_eq!(round_trip::<TernaryAuto>("AUTO"), "auto");
    assert_eq!(round_trip::<TernaryAuto>("try"), "try");
    assert_eq!(round_trip::<u32>("inf"), "inf");
    assert_eq!(round_trip::<u32>("42"), "42");
    assert_eq!(u32::parse("-1"), Err("out of range".into()));
    assert_eq!(u32::parse("4294967296"), Err("out of range".into()));
    assert!(u32::parse("+1").is_err() && u32::parse("0x10").is_err() && u32::parse("").is_err());
    assert_eq!(round_trip::<Units>("auto"), "auto");
    assert_eq!(round_trip::<Units>("inf"), "inf");
    assert_eq!(round_trip::<Units>("3"), "3");
    assert_eq!(round_trip::<Hex>("0x7FFF"), "0x7fff");
    assert_eq!(round_trip::<Hex>("auto"), "auto");
    assert_eq!(Hex::parse("7fff"), Err("a hexadecimal number starts with 0x".into()));
    assert!(Hex::parse("0x10000").is_err() && Hex::parse("0x").is_err() && Hex::parse("0x+1").is_err());
    assert_eq!(round_trip::<f64>("2.0"), "2");
    assert!(f64::parse("nan").is_err() && f64::parse("inf").is_err() && f64::parse("2x").is_err());
    assert_eq!(round_trip::<Option<std::net::IpAddr>>("10.0.0.1"), "10.0.0.1");
    assert_eq!(round_trip::<Option<std::net::IpAddr>>(""), "");
    assert!(std::net::IpAddr::parse("10.0.0").is_err());
    assert_eq!(round_trip::<LogLevel>("INFO"), "info");
    assert!(LogLevel::parse("verbose").is_err());
    assert_eq!(round_trip::<RangeList>("0-3,8"), "0-3,8");
    assert_eq!(RangeList::parse("2,0-3").unwrap().numbers(), [2, 0, 1, 3]);
    assert!(RangeList::parse("3-1").is_err() && RangeList::parse("").is_err() && RangeList::parse("256").is_err());
}

#[test]
fn allow_lists() {
    let list = |text| AllowList::parse(text).unwrap();
    assert!(list("a,b").allows(|i| i == "a") && !list("a,b").allows(|i| i == "c"));
    assert!(!list("^a,b").allows(|i| i == "a") && list("^a,b").allows(|i| i == "c"));
    assert!(list("all").allows(|_| false));
    assert_eq!(round_trip::<AllowList>("^a, b"), "^a,b");
    assert!(AllowList::parse("").is_err() && AllowList::parse("^all").is_err() && AllowList::parse("a,all").is_err());
    assert!(AllowList::parse(&"x,".repeat(129)).is_err());
}

#[test]
fn devices_are_chosen_with_or_without_port() {
    let filter = |text| DeviceFilter::parse(text).unwrap();
    assert!(filter("soft0").allows("soft0", 2) && !filter("soft0").allows("soft1", 1));
    assert!(filter("soft0:1").allows("soft0", 1) && !filter("soft0:1").allows("soft0", 2));
    assert!(filter("soft[0-3]").allows("soft3", 1) && !filter("soft[0-3]").allows("soft4", 1));
    assert!(filter("soft[0-3]:2").allows("soft1", 2) && !filter("soft[0-3]:2").allows("soft1", 1));
    assert!(!filter("^soft0").allows("soft0", 1) && filter("^soft0").allows("soft1", 1));
    assert!(filter("all").allows("anything", 7));
    for (text, may) in
        [("all", true), ("a", true), ("a:2", true), ("b", false), ("^a", false), ("^a:2", true), ("^b", true)]
    {
        assert_eq!(filter(text).may_allow("a"), may, "{text}");
    }
    let available = [("soft0".to_string(), 1), ("mlx5_0".to_string(), 1), ("mlx5_0".to_string(), 2)];
    assert_eq!(
        filter("soft9,soft0").unmatched(&available),
        ["soft9 is not available; available: soft0:1, mlx5_0:1, mlx5_0:2"]
    );
    assert_eq!(filter("soft0:3").unmatched(&[]), ["soft0:3 is not available; available: none"]);
    assert!(filter("all").unmatched(&available).is_empty());
    for bad in ["soft[0-3", "soft[3-0]", "soft[x]", "soft0:x", "soft0:", ""] {
        assert!(DeviceFilter::parse(bad).is_err(), "{bad}");
    }
}

#[test]
fn transports_have_aliases() {
    let filter = |text| TransportFilter::parse(text).unwrap();
    for text in ["all", "ud", "ud_verbs", "ud_v", "ib", "tcp,ud", "^srd", "ud:aux", "\\ud_verbs"] {
        assert!(filter(text).allows("ud_verbs"), "{text}");
    }
    for text in ["srd", "^ud", "ud_x", "\\ud", "tcp"] {
        assert!(!filter(text).allows("ud_verbs"), "{text}");
    }
}

#[test]
fn changed_settings_fit_one_line() {
    let env =
        Env::from_pairs([("UCX_UD_WAIT", "60s"), ("UCX_IB_COUNT", "7"), ("UCX_TLS", "ud"), ("UCX_IB_ROOM", "9k")]);
    // A value equal to the default is not a change, whoever wrote it.
    assert_eq!(catalog().changed(&env), "UD_WAIT=1m, IB_ROOM=9k, TLS=ud");
    assert_eq!(catalog().changed(&Env::empty()), "");
}

#[test]
fn listings_show_bad_values_without_failing() {
    let env = Env::from_pairs([("UCX_UD_COUNT", "many")]);
    let listed = catalog().list(&env);
    let count = listed[0].settings.iter().find(|s| s.field.name == "COUNT").unwrap();
    assert_eq!((count.value.as_str(), count.name.as_str()), ("many", "UCX_UD_COUNT"));
    assert_eq!(count.names, ["UCX_IB_COUNT", "UCX_UD_COUNT", "UCX_UD_VERBS_COUNT"]);
    assert!(count.error.is_some());
    assert!(catalog().check(&env).is_err());
    catalog().check(&Env::empty()).unwrap();
}

#[test]
fn misspelt_variables_are_found_with_the_nearest_name() {
    assert_eq!(unknown("UCX_IB_CUONT").unwrap(), "unknown UCX_IB_CUONT, did you mean UCX_IB_COUNT?");
    assert_eq!(unknown("UCX_UD_VERBS_WAITT").unwrap(), "unknown UCX_UD_VERBS_WAITT, did you mean UCX_UD_VERBS_WAIT?");
    assert_eq!(
        unknown("UCX_UD_NONSENSE").unwrap(),
        "unknown UCX_UD_NONSENSE; uct_info -c lists the settings there are"
    );
    assert_eq!(unknown("UCX_LOG_LEVLE").unwrap(), "unknown UCX_LOG_LEVLE, did you mean UCX_LOG_LEVEL?");
    assert_eq!(
        unknown("UCX_COUNT").unwrap(),
        "unknown UCX_COUNT, did you mean UCX_IB_COUNT or UCX_UD_COUNT or UCX_UD_VERBS_COUNT?"
    );
}

/// A log that tests can read.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_misspelt_variable_is_complained_about_once() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber =
        tracing_subscriber::fmt().with_ansi(false).without_time().with_writer(move || writer.clone()).finish();
    // With a second one, threads of other tests cannot decide alone whether a place is heard that they come to first.
    let _second = tracing::Dispatch::new(tracing::subscriber::NoSubscriber::new());
    tracing::subscriber::with_default(subscriber, || {
        // Names of no other test: what was complained about is remembered for the process.
        let env = Env::from_pairs([("UCX_UD_WAIIT", "1s"), ("UCX_IB_MLX5_DV", "y")]);
        catalog().warn_unknown(&env.clone().with("UCX_WARN_UNUSED_ENV_VARS", "n"));
        assert!(log.0.lock().is_empty());
        catalog().warn_unknown(&env);
        catalog().warn_unknown(&env);
    });
    let text = String::from_utf8(log.0.lock().clone()).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains("WARN"), "{text}");
    assert!(text.contains("unknown UCX_UD_WAIIT, did you mean UCX_UD_WAIT?"), "{text}");
}

#[test]
fn names_of_ucx_and_of_others_draw_no_warning() {
    for name in [
        "UCX_IB_COUNT",
        "UCX_TLS",
        // UCX's, also for hardware that is not here.
        "UCX_IB_MLX5_DEVX",
        "UCX_UD_MLX5_COMPACT_AV",
        "UCX_UD_VERBS_ALLOC",
        "UCX_SRD_TX_QUEUE_LEN",
        "UCX_RCACHE_MAX_REGIONS",
        "UCX_MEMTYPE_CACHE",
        "UCX_IB_REG_MT_THRESH",
        "UCX_WARN_UNUSED_ENV_VARS",
        // Parts of UCX that we do not have, and unlike anything of ours.
        "UCX_RNDV_THRESH",
        "UCX_TCP_CM_REUSEADDR",
        "UCX_RC_TX_POLLING",
        // Of a device or transport that is not in this program.
        "UCX_SOFT_ANYTHING",
        "PATH",
    ] {
        assert_eq!(unknown(name), None);
    }
}

#[test]
fn a_library_of_its_own_prefix_beats_the_plain_names() {
    let mut env = Env::empty();
    env.add_variables([("MPI_UCX_IB_COUNT", "5"), ("UCX_IB_COUNT", "4"), ("OTHER_UCX_IB_COUNT", "3")], "MPI_");
    let config = TestConfig::read(&env, &SCOPE).unwrap();
    assert_eq!(config.count, 5);
    assert_eq!(SECTION.settings(&env)[1].origin.to_string(), "environment variable MPI_UCX_IB_COUNT");
    assert!(catalog().unknown(&env).is_empty());
}

#[test]
fn old_names_work() {
    let env = Env::from_pairs([("UCX_UD_SLOW_TIMER_TICK", "20ms")]);
    let scope = Scope { prefixes: &["UD_"], transports: "ud_verbs" };
    assert_eq!(env.find(&scope, "TIMER_TICK").unwrap().0, "20ms");
    assert!(catalog().unknown(&env).is_empty() || catalog().unknown(&env)[0].name == "UCX_UD_TIMER_TICK");
}

#[test]
fn edit_distances() {
    for (a, b, d) in [("", "", 0), ("abc", "abc", 0), ("abc", "acb", 1), ("abc", "ab", 1), ("abc", "xyz", 3)] {
        assert_eq!(edit_distance(a, b, 3), d, "{a} {b}");
        assert_eq!(edit_distance(b, a, 3), d, "{b} {a}");
    }
    assert_eq!(edit_distance("kitten", "sitting", 3), 3);
    assert_eq!(edit_distance("abcdefgh", "ijklmnop", 3), 4);
    assert_eq!(edit_distance("a", "abcdefgh", 3), 4);
}

proptest! {
    #[test]
    fn every_duration_round_trips(ns in any::<u64>()) {
        let t = Duration::from_nanos(ns);
        prop_assert_eq!(Duration::parse(&t.print()), Ok(t));
    }

    #[test]
    fn every_size_round_trips(n in any::<u64>(), shift in 0u32..64) {
        let b = Bytes(n >> shift << (shift / 2));
        prop_assert_eq!(Bytes::parse(&b.print()), Ok(b));
    }

    #[test]
    fn no_text_panics(text in "\\PC{0,12}") {
        let parse: [fn(&str) -> bool; 10] = [
            |t| Duration::parse(t).is_ok(),
            |t| Bytes::parse(t).is_ok(),
            |t| Units::parse(t).is_ok(),
            |t| Hex::parse(t).is_ok(),
            |t| f64::parse(t).is_ok(),
            |t| RangeList::parse(t).is_ok(),
            |t| DeviceFilter::parse(t).is_ok(),
            |t| TransportFilter::parse(t).is_ok(),
            |t| TernaryAuto::parse(t).is_ok(),
            |t| LogLevel::parse(t).is_ok(),
        ];
        for p in parse {
            p(&text);
        }
        let mut env = Env::empty();
        env.add_file_text("x", &text);
    }

    #[test]
    fn what_parses_prints_and_parses_again(text in "[0-9a-z.^,:\\[\\]-]{0,8}") {
        fn check<T: Value + PartialEq + std::fmt::Debug>(text: &str) -> Result<(), TestCaseError> {
            if let Ok(v) = T::parse(text) {
                prop_assert_eq!(T::parse(&v.print()), Ok(v));
            }
            Ok(())
        }
        check::<Duration>(&text)?;
        check::<Bytes>(&text)?;
        check::<Units>(&text)?;
        check::<AllowList>(&text)?;
        check::<DeviceFilter>(&text)?;
        check::<RangeList>(&text)?;
        check::<f64>(&text)?;
    }
}
