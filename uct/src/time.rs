//! Time as the library sees it: a [`Time`] is nanoseconds on a clock that is *passed in*.
//!
//! Nothing below the public API reads the system clock by itself. Production code passes a [`MonotonicClock`]; tests and
//! the simulator pass a [`ManualClock`] and move it. A clock is read once per `progress` call and the value is cached for
//! the sends until the next one, because a clock read costs about as much as the rest of a short send.

use std::{
    fmt,
    ops::{Add, AddAssign, Sub},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// A point in time: nanoseconds since an origin that the [`Clock`] chose. Comparable only with times of the same clock.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Time(u64);

impl Time {
    /// The clock's origin.
    pub const ZERO: Time = Time(0);
    /// Later than every time a clock returns; "never" in comparisons.
    pub const MAX: Time = Time(u64::MAX);

    /// A time `ns` nanoseconds after the origin.
    pub const fn from_nanos(ns: u64) -> Self {
        Time(ns)
    }

    /// Nanoseconds since the origin.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// The time that has passed since `earlier`, zero if `earlier` is later.
    pub fn since(self, earlier: Time) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// `self + delta`, held at [`Time::MAX`]: adding an "infinite" time-out never wraps round.
    pub fn saturating_add(self, delta: Duration) -> Time {
        let ns = u64::try_from(delta.as_nanos()).unwrap_or(u64::MAX);
        Time(self.0.saturating_add(ns))
    }
}

impl Add<Duration> for Time {
    type Output = Time;
    fn add(self, rhs: Duration) -> Time {
        self.saturating_add(rhs)
    }
}

impl AddAssign<Duration> for Time {
    fn add_assign(&mut self, rhs: Duration) {
        *self = *self + rhs;
    }
}

impl Sub for Time {
    type Output = Duration;
    fn sub(self, rhs: Time) -> Duration {
        self.since(rhs)
    }
}

impl fmt::Debug for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:06}ms", self.0 / 1_000_000, self.0 % 1_000_000)
    }
}

/// A source of monotonic time.
pub trait Clock: Send + Sync {
    /// The time now. Never goes back.
    fn now(&self) -> Time;
}

impl<C: Clock + ?Sized> Clock for Arc<C> {
    fn now(&self) -> Time {
        (**self).now()
    }
}

/// The system's monotonic clock. Its origin is the moment it was made.
#[derive(Debug, Clone)]
pub struct MonotonicClock(Instant);

impl MonotonicClock {
    /// A clock that starts at zero now.
    pub fn new() -> Self {
        MonotonicClock(Instant::now())
    }
}

impl Default for MonotonicClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for MonotonicClock {
    fn now(&self) -> Time {
        Time::ZERO.saturating_add(self.0.elapsed())
    }
}

/// A clock that stands still until it is moved: virtual time for tests and the simulator.
#[derive(Debug, Default)]
pub struct ManualClock(AtomicU64);

impl ManualClock {
    /// A clock that shows `start`.
    pub fn new(start: Time) -> Self {
        ManualClock(AtomicU64::new(start.as_nanos()))
    }

    /// Moves the clock to `t`. A `t` in the past is ignored: time does not go back.
    pub fn set(&self, t: Time) {
        self.0.fetch_max(t.as_nanos(), Ordering::Relaxed);
    }

    /// Moves the clock forward by `delta`.
    pub fn advance(&self, delta: Duration) {
        self.set(self.now() + delta);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Time {
        Time(self.0.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_saturates_instead_of_wrapping() {
        assert_eq!(Time::MAX + Duration::from_secs(1), Time::MAX);
        assert_eq!(Time::ZERO + Duration::MAX, Time::MAX);
        assert_eq!(Time::ZERO - Time::MAX, Duration::ZERO);
    }

    #[test]
    fn manual_clock_never_goes_back() {
        let c = ManualClock::new(Time::from_nanos(5));
        c.set(Time::from_nanos(3));
        assert_eq!(c.now(), Time::from_nanos(5));
        c.advance(Duration::from_nanos(2));
        assert_eq!(c.now(), Time::from_nanos(7));
    }
}
