//! Which CPU a process runs on.
//!
//! Two processes that never sleep give the scheduler no occasion to move them, so it may leave them on one CPU for
//! seconds although another one is free; then latency is a matter of time slices. A self-test therefore gives each of its
//! processes a CPU of its own.

use std::{fs, str::FromStr};

use super::failure::{Failure, Result, plain};

/// CPUs that a mask has room for; what the kernel's own type has.
const CPUS: usize = 1024;

/// The user's choice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CpuArg {
    /// The scheduler decides.
    Any,
    /// For this process and, in a self-test, for the second one.
    These(usize, Option<usize>),
}

impl FromStr for CpuArg {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        let cpu = |n: &str| {
            n.parse::<usize>().ok().filter(|&n| n < CPUS).ok_or_else(|| {
                "expected the number of a CPU, two numbers like 2,3 for a self-test, or `any`".to_string()
            })
        };
        match s.split_once(',') {
            None if s == "any" => Ok(CpuArg::Any),
            None => Ok(CpuArg::These(cpu(s)?, None)),
            Some((a, b)) => Ok(CpuArg::These(cpu(a)?, Some(cpu(b)?))),
        }
    }
}

/// Binds this process (its threads that are still to be started, too) to a CPU.
pub(crate) fn bind(cpu: usize) -> Result<()> {
    let mut mask = [0u64; CPUS / 64];
    mask[cpu / 64] |= 1 << (cpu % 64);
    let Err(e) = crate::sys::set_affinity(&mask) else { return Ok(()) };
    let why = plain(&e);
    let there = list_text(&allowed());
    Err(Failure::new(format!(
        "cannot run on CPU {cpu}: {why}; this process may use {there} (-c any leaves it to the system)"
    )))
}

/// Two CPUs for two processes that are to run at the same time, the first of them if it is given; `None` if there is only
/// one. Call it before [`bind`], which leaves only one.
pub(crate) fn pair(first: Option<usize>) -> Option<(usize, usize)> {
    choose(&allowed(), first, |cpu| {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        list(&fs::read_to_string(path).unwrap_or_default())
    })
}

/// The first CPU, and another that shares no core with it, or if all do, simply another.
fn choose(allowed: &[usize], first: Option<usize>, siblings: impl Fn(usize) -> Vec<usize>) -> Option<(usize, usize)> {
    let first = first.or(allowed.first().copied())?;
    let same_core = siblings(first);
    let mut others = allowed.iter().copied().filter(|&c| c != first);
    let second = others.clone().find(|c| !same_core.contains(c)).or(others.next())?;
    Some((first, second))
}

/// The CPUs that this process may run on; empty if that cannot be told.
fn allowed() -> Vec<usize> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:")).map(list).unwrap_or_default()
}

/// Reads a list as the kernel writes them: `0-3,8`.
fn list(s: &str) -> Vec<usize> {
    let one = |part: &str| {
        let (a, b) = part.split_once('-').unwrap_or((part, part));
        Some(a.trim().parse().ok()?..=b.trim().parse::<usize>().ok()?.min(CPUS - 1))
    };
    s.split(',').filter_map(one).flatten().collect()
}

fn list_text(cpus: &[usize]) -> String {
    let all: Vec<_> = cpus.iter().map(ToString::to_string).collect();
    all.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_the_kernel() {
        assert_eq!(list("\t0-2,8,10-11\n"), [0, 1, 2, 8, 10, 11]);
        assert_eq!(list(""), [0usize; 0]);
        assert_eq!(list("0-99999999").len(), CPUS);
    }

    #[test]
    fn the_second_cpu_is_another_core_if_there_is_one() {
        let threads = |cpu: usize| vec![cpu & !1, cpu | 1];
        assert_eq!(choose(&[0, 1, 2, 3], None, threads), Some((0, 2)));
        assert_eq!(choose(&[2, 3], None, threads), Some((2, 3)));
        assert_eq!(choose(&[0, 1, 2, 3], Some(3), threads), Some((3, 0)));
        assert_eq!(choose(&[5, 9], None, |_| vec![]), Some((5, 9)));
        assert_eq!((choose(&[3], None, threads), choose(&[], None, threads)), (None, None));
    }

    #[test]
    fn what_users_write() {
        assert_eq!("any".parse(), Ok(CpuArg::Any));
        assert_eq!("3".parse(), Ok(CpuArg::These(3, None)));
        assert_eq!("3,5".parse(), Ok(CpuArg::These(3, Some(5))));
        for bad in ["", "x", "1,", ",1", "1,2,3", "1024", "-1"] {
            assert!(bad.parse::<CpuArg>().unwrap_err().starts_with("expected the number of a CPU"), "{bad}");
        }
    }

    #[test]
    fn a_thread_can_be_bound_and_a_cpu_that_is_not_there_is_named() {
        // In a thread of its own, since the binding stays.
        std::thread::spawn(|| {
            let cpu = *allowed().last().unwrap();
            bind(cpu).unwrap();
            let status = fs::read_to_string("/proc/thread-self/status").unwrap();
            assert!(status.contains(&format!("Cpus_allowed_list:\t{cpu}\n")), "{status}");
            let e = bind(CPUS - 1).unwrap_err().to_string();
            assert!(e.starts_with("cannot run on CPU 1023: Invalid argument; this process may use "), "{e}");
        })
        .join()
        .unwrap();
    }
}
