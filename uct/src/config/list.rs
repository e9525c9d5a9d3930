//! Settings that are lists: allow lists, ranges, and the choice of devices and transports.

use super::Value;

/// At most this many elements, as in UCX; more is an error instead of a cut.
const MAX_ITEMS: usize = 128;

fn items(text: &str) -> Result<Vec<String>, String> {
    let items: Vec<String> = text.split(',').map(|s| s.trim().to_string()).filter(|s| !s.is_empty()).collect();
    if items.len() > MAX_ITEMS {
        return Err(format!("more than {MAX_ITEMS} elements"));
    }
    Ok(items)
}

impl Value for Vec<String> {
    const FORMS: &'static str = "names separated by commas";

    fn parse(text: &str) -> Result<Self, String> {
        items(text)
    }

    fn print(&self) -> String {
        self.join(",")
    }
}

/// A list of what is allowed, or with a leading `^` of what is not. `all` allows everything.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AllowList {
    negated: bool,
    /// The elements; `None` is `all`.
    items: Option<Vec<String>>,
}

impl AllowList {
    /// Allows everything.
    pub const ALL: AllowList = AllowList { negated: false, items: None };

    /// The elements as written, without `^`; none for `all`.
    pub fn items(&self) -> &[String] {
        self.items.as_deref().unwrap_or(&[])
    }

    /// True for `all`.
    pub fn is_all(&self) -> bool {
        self.items.is_none()
    }

    /// True if something is allowed of which `matches` tells whether an element names it.
    pub fn allows(&self, matches: impl Fn(&str) -> bool) -> bool {
        match &self.items {
            None => true,
            Some(items) => items.iter().any(|i| matches(i)) != self.negated,
        }
    }
}

impl Value for AllowList {
    const FORMS: &'static str = "names separated by commas, a leading ^ to allow all but these, or all";

    fn parse(text: &str) -> Result<Self, String> {
        let (negated, rest) = match text.strip_prefix('^') {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let items = items(rest)?;
        if items.is_empty() {
            return Err("the list is empty".into());
        }
        if items.iter().any(|i| i.contains('^')) {
            return Err("^ stands once, in front of the whole list".into());
        }
        if items.iter().any(|i| i.eq_ignore_ascii_case("all")) {
            return match negated || items.len() > 1 {
                true => Err("all cannot be combined with anything".into()),
                false => Ok(AllowList::ALL),
            };
        }
        Ok(AllowList { negated, items: Some(items) })
    }

    fn print(&self) -> String {
        match &self.items {
            None => "all".into(),
            Some(items) => format!("{}{}", if self.negated { "^" } else { "" }, items.join(",")),
        }
    }
}

/// Small numbers and ranges of them, such as `0-3,8`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RangeList(Vec<(u8, u8)>);

impl RangeList {
    /// Every number in it, in the order written, without repetition.
    pub fn numbers(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for &(from, to) in &self.0 {
            for n in from..=to {
                if !out.contains(&n) {
                    out.push(n);
                }
            }
        }
        out
    }
}

impl Value for RangeList {
    const FORMS: &'static str = "numbers from 0 to 255 or ranges of them, separated by commas, such as 0-3,8";

    fn parse(text: &str) -> Result<Self, String> {
        let mut ranges = Vec::new();
        for item in items(text)? {
            let (a, b) = item.split_once('-').unwrap_or((&item, &item));
            let (a, b) = (u8::parse(a)?, u8::parse(b)?);
            if a > b {
                return Err(format!("the range {item} runs backwards"));
            }
            ranges.push((a, b));
        }
        if ranges.is_empty() {
            return Err("the list is empty".into());
        }
        Ok(RangeList(ranges))
    }

    fn print(&self) -> String {
        let item = |&(a, b): &(u8, u8)| if a == b { a.to_string() } else { format!("{a}-{b}") };
        self.0.iter().map(item).collect::<Vec<_>>().join(",")
    }
}

/// Which devices and ports to use: `mlx5_0:1` is one port, `mlx5_0` all its ports, `mlx5_[0-3]` four devices.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceFilter {
    list: AllowList,
    /// The list's elements with ranges written out: device, and port unless all.
    names: Vec<(String, Option<u8>)>,
}

impl DeviceFilter {
    /// True if the port of the device may be used.
    pub fn allows(&self, device: &str, port: u8) -> bool {
        if self.list.is_all() {
            return true;
        }
        let named = self.names.iter().any(|(d, p)| d == device && p.is_none_or(|p| p == port));
        named != self.list.negated
    }

    /// False if no port of the device may be used, however many it has.
    pub fn may_allow(&self, device: &str) -> bool {
        let named = self.names.iter().any(|(d, p)| d == device && (p.is_none() || !self.list.negated));
        self.list.is_all() || named != self.list.negated
    }

    /// Elements that name none of the `available` (device, port) pairs, as messages for the user.
    pub fn unmatched(&self, available: &[(String, u8)]) -> Vec<String> {
        let missing = self
            .names
            .iter()
            .filter(|(d, p)| !available.iter().any(|(device, port)| d == device && p.is_none_or(|p| p == *port)));
        let list = available.iter().map(|(d, p)| format!("{d}:{p}")).collect::<Vec<_>>().join(", ");
        let list = if list.is_empty() { "none".into() } else { list };
        missing
            .map(|(d, p)| match p {
                Some(p) => format!("{d}:{p} is not available; available: {list}"),
                None => format!("{d} is not available; available: {list}"),
            })
            .collect()
    }
}

/// Writes out a `[a-b]` in a name.
fn expand(name: &str) -> Result<Vec<String>, String> {
    let Some((head, rest)) = name.split_once('[') else { return Ok(vec![name.to_string()]) };
    let (range, tail) = rest.split_once(']').ok_or_else(|| format!("{name}: the closing ] is missing"))?;
    let (from, to) = range.split_once('-').unwrap_or((range, range));
    match (u8::parse(from), u8::parse(to)) {
        (Ok(from), Ok(to)) if from <= to => Ok((from..=to).map(|n| format!("{head}{n}{tail}")).collect()),
        _ => Err(format!("{name}: [{range}] is not a range")),
    }
}

impl Value for DeviceFilter {
    const FORMS: &'static str = "device or device:port, separated by commas, with ranges such as soft[0-3]:1; a leading ^ for all but these; or all";

    fn parse(text: &str) -> Result<Self, String> {
        let list = AllowList::parse(text)?;
        let mut names = Vec::new();
        for item in list.items() {
            for name in expand(item)? {
                names.push(match name.rsplit_once(':') {
                    Some((device, port)) => {
                        let port = u8::parse(port).map_err(|e| format!("the port of {name}: {e}"))?;
                        (device.to_string(), Some(port))
                    }
                    None => (name, None),
                });
            }
        }
        if names.len() > MAX_ITEMS * 2 {
            return Err("more than 256 names".into());
        }
        Ok(DeviceFilter { list, names })
    }

    fn print(&self) -> String {
        self.list.print()
    }
}

/// Which transports to use, by name or by the aliases UCX has for groups of them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TransportFilter(AllowList);

/// UCX's aliases as far as they contain transports of ours.
const ALIASES: [(&str, &[&str]); 5] =
    [("ud", &["ud_verbs"]), ("ud_v", &["ud_verbs"]), ("ib", &["ud_verbs", "srd"]), ("efa", &["srd"]), ("ud_x", &[])];

impl TransportFilter {
    /// True if the transport may be used. A leading backslash in the list takes a name literally, not as an alias; the
    /// suffix `:aux`, which restricts a transport to helping others, allows it too.
    pub fn allows(&self, transport: &str) -> bool {
        self.0.allows(|item| {
            let item = item.strip_suffix(":aux").unwrap_or(item);
            if let Some(literal) = item.strip_prefix('\\') {
                return literal == transport;
            }
            match ALIASES.iter().find(|(alias, _)| *alias == item) {
                Some((_, names)) => names.contains(&transport),
                None => item == transport,
            }
        })
    }
}

impl Value for TransportFilter {
    const FORMS: &'static str =
        "transports separated by commas, such as ud_verbs or its short form ud; a leading ^ for all but these; or all";

    fn parse(text: &str) -> Result<Self, String> {
        AllowList::parse(text).map(TransportFilter)
    }

    fn print(&self) -> String {
        self.0.print()
    }
}
