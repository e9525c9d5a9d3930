//! Message sizes as the user writes them: `64`, `8,64,1k`, `8:4096:x2`, `8:4096:+8`, `8:max:x4`.

use std::{fmt, str::FromStr};

/// Every message starts with an eight-byte header (number, run, flags), so there is none smaller.
pub(crate) const SIZE_MIN: usize = 8;
/// How many sizes one run may have.
const COUNT_MAX: usize = 1000;

#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum Bound {
    Bytes(usize),
    Max,
}

#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum Step {
    Times(usize),
    Plus(usize),
}

#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum Item {
    One(Bound),
    Sweep { from: usize, to: Bound, step: Step },
}

/// A list of sizes and sweeps. `max` in it stands for the largest message that the chosen layout can send, which is known
/// only once both sides have opened their devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SizeList {
    items: Vec<Item>,
    /// With `true`, sizes above the limit are left out instead of refused.
    clip: bool,
}

impl SizeList {
    /// What is measured if the user does not say.
    pub(crate) fn standard() -> Self {
        let sweep = Item::Sweep { from: 8, to: Bound::Bytes(2048), step: Step::Times(4) };
        SizeList { items: vec![sweep, Item::One(Bound::Max)], clip: true }
    }

    /// The sizes in the order given, each once, with `max` for `max`. `Err` holds the first size that is too large.
    pub(crate) fn resolve(&self, max: usize) -> Result<Vec<usize>, usize> {
        let mut all = Vec::new();
        let mut add = |n: usize| {
            if n > max && self.clip {
                return Ok(());
            }
            if n > max {
                return Err(n);
            }
            // The first ones count; looking through more would take for ever.
            if all.len() < COUNT_MAX && !all.contains(&n) {
                all.push(n);
            }
            Ok(())
        };
        let of = |b: Bound| match b {
            Bound::Bytes(n) => n,
            Bound::Max => max,
        };
        for item in &self.items {
            match *item {
                Item::One(b) => add(of(b))?,
                Item::Sweep { from, to, step } => {
                    let to = of(to);
                    let mut n = from;
                    for _ in 0..COUNT_MAX {
                        if n > to {
                            break;
                        }
                        add(n)?;
                        n = match step {
                            Step::Times(k) => n.saturating_mul(k),
                            Step::Plus(k) => n.saturating_add(k),
                        };
                    }
                }
            }
        }
        Ok(all)
    }
}

impl FromStr for SizeList {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let items = s.split(',').map(item).collect::<Result<Vec<_>, _>>()?;
        let list = SizeList { items, clip: false };
        // A bound of `max` is at most 2^32 here, which only serves to count the steps.
        let count: usize = list.items.iter().map(steps).sum();
        if count > COUNT_MAX {
            return Err(format!("{count} sizes; at most {COUNT_MAX}, so use larger steps"));
        }
        Ok(list)
    }
}

impl fmt::Display for SizeList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, item) in self.items.iter().enumerate() {
            if i > 0 {
                f.write_str(",")?;
            }
            match item {
                Item::One(b) => b.fmt(f)?,
                Item::Sweep { from, to, step: Step::Times(k) } => write!(f, "{from}:{to}:x{k}")?,
                Item::Sweep { from, to, step: Step::Plus(k) } => write!(f, "{from}:{to}:+{k}")?,
            }
        }
        Ok(())
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Bound::Bytes(n) => n.fmt(f),
            Bound::Max => f.write_str("max"),
        }
    }
}

fn steps(item: &Item) -> usize {
    match *item {
        Item::One(_) => 1,
        // How far `max` reaches is not known yet; such a sweep is cut at the limit when it is resolved.
        Item::Sweep { to: Bound::Max, .. } => 1,
        Item::Sweep { from, to: Bound::Bytes(to), step: Step::Plus(k) } => (to - from) / k + 1,
        Item::Sweep { from, to: Bound::Bytes(to), step: Step::Times(k) } => (to / from).ilog(k) as usize + 1,
    }
}

fn item(s: &str) -> Result<Item, String> {
    let mut parts = s.split(':');
    let first = parts.next().unwrap_or_default();
    let Some(to) = parts.next() else {
        return Ok(Item::One(bound(first)?));
    };
    let Bound::Bytes(from) = bound(first)? else {
        return Err(format!("`{s}`: a sweep starts at a number of bytes, not at `max`"));
    };
    let to = bound(to)?;
    let step = match parts.next() {
        None => Step::Times(2),
        Some(t) => step(t)?,
    };
    if parts.next().is_some() {
        return Err(format!("`{s}`: too many colons; a sweep is FROM:TO:xFACTOR or FROM:TO:+BYTES"));
    }
    if matches!(to, Bound::Bytes(to) if to < from) {
        return Err(format!("`{s}`: the end is below the start"));
    }
    Ok(Item::Sweep { from, to, step })
}

fn step(s: &str) -> Result<Step, String> {
    let bad = || format!("step `{s}`: expected xFACTOR (from x2) or +BYTES (from +1), for example x2 or +64");
    let (sign, n) = s.split_at_checked(1).ok_or_else(bad)?;
    let n = n.parse::<usize>().map_err(|_| bad())?;
    match sign {
        "x" if n >= 2 => Ok(Step::Times(n)),
        "+" if n >= 1 => Ok(Step::Plus(n)),
        _ => Err(bad()),
    }
}

fn bound(s: &str) -> Result<Bound, String> {
    if s == "max" {
        return Ok(Bound::Max);
    }
    let (digits, unit) = match s.strip_suffix(['k', 'K']) {
        Some(d) => (d, 1024),
        None => match s.strip_suffix(['m', 'M']) {
            Some(d) => (d, 1024 * 1024),
            None => (s, 1),
        },
    };
    let n = digits.parse::<u32>().ok().and_then(|n| n.checked_mul(unit)).ok_or_else(|| {
        format!("`{s}`: expected a number of bytes (k and m allowed), `max`, or a sweep like 8:4096:x2")
    })?;
    let n = n as usize;
    if n < SIZE_MIN {
        return Err(format!("{n} bytes: the smallest message has {SIZE_MIN}, the header that is verified"));
    }
    Ok(Bound::Bytes(n))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(s: &str, max: usize) -> Vec<usize> {
        s.parse::<SizeList>().unwrap().resolve(max).unwrap()
    }

    #[test]
    fn lists_and_sweeps() {
        assert_eq!(sizes("8", 4096), [8]);
        assert_eq!(sizes("8,64,1k", 4096), [8, 64, 1024]);
        assert_eq!(sizes("8:64:x2", 4096), [8, 16, 32, 64]);
        assert_eq!(sizes("8:64", 4096), [8, 16, 32, 64]);
        assert_eq!(sizes("8:100:x4", 4096), [8, 32]);
        assert_eq!(sizes("100:120:+8", 4096), [100, 108, 116]);
        assert_eq!(sizes("64,8:64:x2,64", 4096), [64, 8, 16, 32]);
        assert_eq!(sizes("8:max:x4,max", 100), [8, 32, 100]);
        assert_eq!(sizes("8:max:+1", 1 << 20).len(), COUNT_MAX);
        assert_eq!(SizeList::standard().resolve(4088).unwrap(), [8, 32, 128, 512, 2048, 4088]);
        assert_eq!(SizeList::standard().resolve(100).unwrap(), [8, 32, 100]);
    }

    #[test]
    fn a_size_above_the_limit_is_named() {
        assert_eq!("8:8192:x2".parse::<SizeList>().unwrap().resolve(4088), Err(4096));
    }

    #[test]
    fn nonsense_is_refused_in_words() {
        for (s, words) in [
            ("", "expected a number of bytes"),
            ("x", "expected a number of bytes"),
            ("-8", "expected a number of bytes"),
            ("7", "the smallest message has 8"),
            ("0", "the smallest message has 8"),
            ("8,,16", "expected a number of bytes"),
            ("64:8:x2", "the end is below the start"),
            ("8:64:x1", "step `x1`"),
            ("8:64:+0", "step `+0`"),
            ("8:64:2", "step `2`"),
            ("8:64:", "step ``"),
            ("8:64:é", "step `é`"),
            ("8:64:x2:1", "too many colons"),
            ("max:64", "not at `max`"),
            ("8:1000000:+8", "at most 1000"),
            ("99999999999999999999", "expected a number of bytes"),
            ("4294967295m", ""),
        ] {
            match s.parse::<SizeList>() {
                Err(e) => assert!(e.contains(words), "{s}: {e}"),
                // Very large, but a number: the limit of the layout refuses it later.
                Ok(l) => assert_eq!((words, l.resolve(4096).is_err()), ("", true), "{s}"),
            }
        }
    }

    #[test]
    fn shows_as_it_was_written() {
        for s in ["8,64,1024", "8:4096:x2", "8:max:+16,max"] {
            assert_eq!(s.parse::<SizeList>().unwrap().to_string(), s);
        }
    }
}
