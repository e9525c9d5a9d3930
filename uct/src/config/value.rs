//! Types of settings: how their text is read and printed.
//!
//! Everything UCX accepts is accepted, but for trailing junk: UCX reads `300abc` as 300 and `10msx` as 10 ms, here both
//! are errors.

use std::{net::IpAddr, time::Duration};

/// A type that a setting can have. Printing a value and parsing it again gives the same value.
pub trait Value: Sized {
    /// What is accepted, with the unit and with the meaning of a bare number; completes "accepted: …".
    const FORMS: &'static str;

    /// Reads a value.
    ///
    /// # Errors
    /// What is wrong with `text`, in a few words.
    fn parse(text: &str) -> Result<Self, String>;

    /// The value as a person would write it.
    fn print(&self) -> String;
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    let digits = text.strip_prefix('-').unwrap_or(text);
    if digits.is_empty() {
        return Err("a number is missing".into());
    }
    if !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err("not a whole number".into());
    }
    text.parse().map_err(|_| "out of range".to_string())
}

fn is(text: &str, words: &[&str]) -> bool {
    words.iter().any(|w| w.eq_ignore_ascii_case(text))
}

fn is_inf(text: &str) -> bool {
    is(text, &["inf", "infinity"])
}

impl Value for bool {
    const FORMS: &'static str = "y, yes, on or 1; n, no, off or 0";

    fn parse(text: &str) -> Result<Self, String> {
        match text {
            t if is(t, &["y", "yes", "on", "1"]) => Ok(true),
            t if is(t, &["n", "no", "off", "0"]) => Ok(false),
            _ => Err("neither yes nor no".into()),
        }
    }

    fn print(&self) -> String {
        if *self { "y" } else { "n" }.into()
    }
}

/// Yes, no, or "if it can be had".
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Ternary {
    /// Do not.
    No,
    /// Do, or fail.
    Yes,
    /// Do if it can be done.
    Try,
}

impl Value for Ternary {
    const FORMS: &'static str = "y, n, or try";

    fn parse(text: &str) -> Result<Self, String> {
        if is(text, &["try", "maybe"]) {
            return Ok(Ternary::Try);
        }
        match bool::parse(text) {
            Ok(true) => Ok(Ternary::Yes),
            Ok(false) => Ok(Ternary::No),
            Err(_) => Err("neither yes, no nor try".into()),
        }
    }

    fn print(&self) -> String {
        match self {
            Ternary::No => "n",
            Ternary::Yes => "y",
            Ternary::Try => "try",
        }
        .into()
    }
}

/// A [`Ternary`], or left to the library.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum TernaryAuto {
    /// The library decides.
    Auto,
    /// The user decided.
    Is(Ternary),
}

impl Value for TernaryAuto {
    const FORMS: &'static str = "y, n, try, or auto";

    fn parse(text: &str) -> Result<Self, String> {
        if is(text, &["auto"]) {
            return Ok(TernaryAuto::Auto);
        }
        Ternary::parse(text).map(TernaryAuto::Is).map_err(|_| "neither yes, no, try nor auto".into())
    }

    fn print(&self) -> String {
        match self {
            TernaryAuto::Auto => "auto".into(),
            TernaryAuto::Is(t) => t.print(),
        }
    }
}

impl Value for u32 {
    const FORMS: &'static str = "a whole number from 0, or inf";

    fn parse(text: &str) -> Result<Self, String> {
        if is_inf(text) { Ok(u32::MAX) } else { number(text) }
    }

    fn print(&self) -> String {
        if *self == u32::MAX { "inf".into() } else { self.to_string() }
    }
}

impl Value for u16 {
    const FORMS: &'static str = "a whole number from 0 to 65535";

    fn parse(text: &str) -> Result<Self, String> {
        number(text)
    }

    fn print(&self) -> String {
        self.to_string()
    }
}

impl Value for u8 {
    const FORMS: &'static str = "a whole number from 0 to 255";

    fn parse(text: &str) -> Result<Self, String> {
        number(text)
    }

    fn print(&self) -> String {
        self.to_string()
    }
}

impl Value for f64 {
    const FORMS: &'static str = "a decimal number";

    fn parse(text: &str) -> Result<Self, String> {
        match text.parse::<f64>() {
            Ok(n) if n.is_finite() => Ok(n),
            Ok(_) => Err("not a finite number".into()),
            Err(_) => Err("not a decimal number".into()),
        }
    }

    fn print(&self) -> String {
        self.to_string()
    }
}

impl Value for String {
    const FORMS: &'static str = "any text";

    fn parse(text: &str) -> Result<Self, String> {
        Ok(text.into())
    }

    fn print(&self) -> String {
        self.clone()
    }
}

/// A number, without limit, or left to the library.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Units {
    /// The library decides.
    Auto,
    /// Without limit.
    Inf,
    /// The user decided.
    Is(u64),
}

impl Units {
    /// The number, if the user gave one.
    pub fn number(self) -> Option<u64> {
        match self {
            Units::Is(n) => Some(n),
            _ => None,
        }
    }

    /// True for a number of at most `max`, and for auto.
    pub fn is_auto_or_at_most(self, max: u64) -> bool {
        match self {
            Units::Auto => true,
            Units::Inf => false,
            Units::Is(n) => n <= max,
        }
    }
}

impl Value for Units {
    const FORMS: &'static str = "a whole number from 0, auto, or inf";

    fn parse(text: &str) -> Result<Self, String> {
        match text {
            t if is(t, &["auto"]) => Ok(Units::Auto),
            t if is_inf(t) => Ok(Units::Inf),
            t => number(t).map(Units::Is),
        }
    }

    fn print(&self) -> String {
        match self {
            Units::Auto => "auto".into(),
            Units::Inf => "inf".into(),
            Units::Is(n) => n.to_string(),
        }
    }
}

/// An amount of memory in bytes.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Bytes(pub u64);

impl Bytes {
    /// Without limit.
    pub const INF: Bytes = Bytes(u64::MAX);

    /// As a length of this machine; a larger amount becomes the largest length.
    pub fn as_len(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }
}

const MEMORY_UNITS: [(char, u32); 4] = [('t', 40), ('g', 30), ('m', 20), ('k', 10)];

impl Value for Bytes {
    const FORMS: &'static str = "a whole number of bytes, or with k, m, g or t for powers of 1024 (8k), or inf";

    fn parse(text: &str) -> Result<Self, String> {
        if is_inf(text) {
            return Ok(Bytes::INF);
        }
        let lower = text.to_ascii_lowercase();
        let digits = lower.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let unit = &lower[digits.len()..];
        let mut letters = unit.chars();
        let shift = match (letters.next(), letters.next(), letters.next()) {
            (None, ..) => 0,
            (Some('b'), None, None) => 0,
            (Some(c), None | Some('b'), None) if c != 'b' => {
                MEMORY_UNITS.iter().find(|(u, _)| *u == c).map(|(_, s)| *s).ok_or_else(|| bad_unit(unit))?
            }
            _ => return Err(bad_unit(unit)),
        };
        let n: u64 = number(digits)?;
        n.checked_mul(1 << shift).map(Bytes).ok_or_else(|| "out of range".into())
    }

    fn print(&self) -> String {
        if *self == Bytes::INF {
            return "inf".into();
        }
        match MEMORY_UNITS.iter().find(|(_, s)| self.0 != 0 && self.0.trailing_zeros() >= *s) {
            Some((unit, shift)) => format!("{}{unit}", self.0 >> shift),
            None => self.0.to_string(),
        }
    }
}

/// An amount of memory, or left to the library.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum BytesAuto {
    /// The library decides.
    Auto,
    /// The user decided.
    Is(Bytes),
}

impl Value for BytesAuto {
    const FORMS: &'static str = "a whole number of bytes, or with k, m, g or t for powers of 1024 (8k), inf, or auto";

    fn parse(text: &str) -> Result<Self, String> {
        if is(text, &["auto"]) { Ok(BytesAuto::Auto) } else { Bytes::parse(text).map(BytesAuto::Is) }
    }

    fn print(&self) -> String {
        match self {
            BytesAuto::Auto => "auto".into(),
            BytesAuto::Is(bytes) => bytes.print(),
        }
    }
}

impl Value for IpAddr {
    const FORMS: &'static str = "an IP address";

    fn parse(text: &str) -> Result<Self, String> {
        text.parse().map_err(|_| "not an IP address".into())
    }

    fn print(&self) -> String {
        self.to_string()
    }
}

fn bad_unit(unit: &str) -> String {
    format!("'{unit}' is not a unit")
}

/// Units of time in nanoseconds, longest first.
const TIME_UNITS: [(&str, u64); 5] =
    [("m", 60_000_000_000), ("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1_000), ("ns", 1)];

/// Times. `inf` is [`Duration::MAX`], which [`Time::saturating_add`](crate::Time::saturating_add) takes for "never".
impl Value for Duration {
    const FORMS: &'static str =
        "a number with m (minutes), s, ms, us or ns, such as 10ms or 1.5s; without a unit, seconds; or inf";

    fn parse(text: &str) -> Result<Self, String> {
        if is_inf(text) {
            return Ok(Duration::MAX);
        }
        let digits = text.trim_end_matches(|c: char| c.is_alphabetic());
        let unit = &text[digits.len()..];
        if !digits.starts_with(|c: char| c.is_ascii_digit() || c == '.') {
            return Err(if digits.starts_with('-') { "a time cannot be negative" } else { "not a time" }.into());
        }
        if digits.ends_with(char::is_whitespace) {
            return Err("a time is written without spaces".into());
        }
        let unit_ns = match unit {
            "" => 1_000_000_000,
            _ => TIME_UNITS
                .iter()
                .find(|(u, _)| u.eq_ignore_ascii_case(unit))
                .map(|(_, ns)| *ns)
                .ok_or_else(|| bad_unit(unit))?,
        };
        let ns = if digits.bytes().all(|b| b.is_ascii_digit()) {
            digits.parse::<u64>().ok().and_then(|n| n.checked_mul(unit_ns))
        } else {
            fraction_ns(digits, unit_ns)?
        };
        ns.map(Duration::from_nanos).ok_or_else(|| "longer than 584 years, write inf for no limit".into())
    }

    fn print(&self) -> String {
        if *self == Duration::MAX {
            return "inf".into();
        }
        let ns = self.as_nanos();
        match TIME_UNITS.iter().find(|(_, u)| ns.is_multiple_of(u128::from(*u))) {
            Some((unit, u)) if ns > 0 => format!("{}{unit}", ns / u128::from(*u)),
            _ => "0".into(),
        }
    }
}

/// Nanoseconds of a decimal number of units; `None` if there are too many to count.
fn fraction_ns(digits: &str, unit_ns: u64) -> Result<Option<u64>, String> {
    let n: f64 = digits.parse().map_err(|_| "not a number".to_string())?;
    let ns = (n * unit_ns as f64).round();
    if n > 0.0 && ns < 1.0 {
        // Rounding it to 0 would change its meaning: for several settings 0 means "off".
        return Err("shorter than a nanosecond".into());
    }
    // 2^64 as a float is exact; everything below it fits.
    Ok((ns < 18_446_744_073_709_551_616.0).then_some(ns as u64))
}

/// A 16-bit number in hexadecimal, or left to the library.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Hex {
    /// The library decides.
    Auto,
    /// The user decided.
    Is(u16),
}

impl Value for Hex {
    const FORMS: &'static str = "a hexadecimal number such as 0x8001, or auto";

    fn parse(text: &str) -> Result<Self, String> {
        if is(text, &["auto"]) {
            return Ok(Hex::Auto);
        }
        let digits = text
            .strip_prefix("0x")
            .or_else(|| text.strip_prefix("0X"))
            .ok_or_else(|| "a hexadecimal number starts with 0x".to_string())?;
        if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err("not a hexadecimal number".into());
        }
        u16::from_str_radix(digits, 16).map(Hex::Is).map_err(|_| "more than 16 bits".into())
    }

    fn print(&self) -> String {
        match self {
            Hex::Auto => "auto".into(),
            Hex::Is(n) => format!("{n:#x}"),
        }
    }
}

/// Finds `text` among named choices, in any case. For the [`Value::parse`] of enums.
///
/// # Errors
/// That `text` is none of them.
pub fn choices<T: Copy>(text: &str, all: &[(&str, T)]) -> Result<T, String> {
    let found = all.iter().find(|(name, _)| name.eq_ignore_ascii_case(text));
    found.map(|(_, v)| *v).ok_or_else(|| "not one of the choices".into())
}

/// An optional value: empty text is "none". The documentation of the setting says what that means.
impl<T: Value> Value for Option<T> {
    const FORMS: &'static str = T::FORMS;

    fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() { Ok(None) } else { T::parse(text).map(Some) }
    }

    fn print(&self) -> String {
        self.as_ref().map(Value::print).unwrap_or_default()
    }
}
