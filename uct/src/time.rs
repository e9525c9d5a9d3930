//! Time as the library sees it: a [`Time`] is nanoseconds on a clock that is *passed in*.
//!
//! Nothing below the public API reads the system clock by itself. Production code passes a [`MonotonicClock`]; tests and
//! the simulator pass a [`ManualClock`] and move it. A clock is read once per `progress` call and the value is cached for
//! the sends until the next one. Reading the system's clock costs as much as the rest of a short send, so the
//! [`MonotonicClock`] reads the processor's time stamp counter where that one counts time.

use std::{
    fmt,
    ops::{Add, AddAssign, Sub},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
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

    /// `ns` nanoseconds later, held at [`Time::MAX`].
    #[inline]
    pub const fn add_nanos(self, ns: u64) -> Time {
        Time(self.0.saturating_add(ns))
    }

    /// Nanoseconds since `earlier`, 0 if `earlier` is later.
    #[inline]
    pub const fn nanos_since(self, earlier: Time) -> u64 {
        self.0.saturating_sub(earlier.0)
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

    /// The clock itself, if it is a [`MonotonicClock`]: a [`NearClock`] reads that one without a call.
    fn as_monotonic(&self) -> Option<&MonotonicClock> {
        None
    }
}

impl<C: Clock + ?Sized> Clock for Arc<C> {
    fn now(&self) -> Time {
        (**self).now()
    }

    fn as_monotonic(&self) -> Option<&MonotonicClock> {
        (**self).as_monotonic()
    }
}

/// Time that passes. Its origin is the moment it was made.
///
/// It reads the time stamp counter where the processor says that this one runs evenly and never stops, and else the
/// system's monotonic clock. The first clock of a process measures the counter's speed, for about a millisecond. Reads on
/// two threads may differ by the little that the counters of two processors do.
#[derive(Debug, Clone)]
pub struct MonotonicClock {
    counter: quanta::Clock,
    origin: u64,
    /// Nanoseconds in 2^32 steps of the counter: a product and a shift make nanoseconds of steps, with an error of less than one
    /// in 2^32 steps.
    scale: u64,
}

impl MonotonicClock {
    /// A clock that starts at zero now.
    pub fn new() -> Self {
        let counter = quanta::Clock::new();
        MonotonicClock { origin: counter.raw(), scale: counter.delta_as_nanos(0, 1 << 32), counter }
    }

    /// [`Clock::now`], in the place where it is called.
    #[inline(always)]
    fn read(&self) -> Time {
        Time::from_nanos(self.nanos_of(self.counter.raw().saturating_sub(self.origin)))
    }

    #[inline(always)]
    fn nanos_of(&self, steps: u64) -> u64 {
        ((u128::from(steps) * u128::from(self.scale)) >> 32) as u64
    }
}

impl Default for MonotonicClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for MonotonicClock {
    fn now(&self) -> Time {
        self.read()
    }

    fn as_monotonic(&self) -> Option<&MonotonicClock> {
        Some(self)
    }
}

/// A clock for who reads it with every message: a [`MonotonicClock`], which it nearly always is, it reads without a call.
/// Shows what the clock shows that it was made of.
#[derive(Clone)]
pub struct NearClock {
    monotonic: Option<MonotonicClock>,
    clock: Arc<dyn Clock>,
}

impl NearClock {
    /// Another way to read `clock`.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        NearClock { monotonic: clock.as_monotonic().cloned(), clock }
    }

    /// The time now.
    #[inline(always)]
    pub fn now(&self) -> Time {
        match &self.monotonic {
            Some(m) => m.read(),
            None => self.clock.now(),
        }
    }
}

impl fmt::Debug for NearClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NearClock(monotonic {})", self.monotonic.is_some())
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
    fn the_monotonic_clock_keeps_the_time_of_the_system() {
        use std::time::Instant;
        let before = Instant::now();
        let clock = MonotonicClock::new();
        let after = Instant::now();
        let mut last = clock.now();
        while after.elapsed() < Duration::from_millis(30) {
            let now = clock.now();
            assert!(now >= last, "{last:?} {now:?}");
            last = now;
        }
        // However long this thread is kept waiting between two lines, these two enclose the clock's time; its speed was
        // measured to a few in 10,000.
        let least = after.elapsed().mul_f64(0.97);
        let shown = clock.now().since(Time::ZERO);
        let most = before.elapsed().mul_f64(1.03);
        assert!((least..=most).contains(&shown), "{shown:?}, not within {least:?} to {most:?}");
    }

    #[test]
    fn steps_become_nanoseconds_as_the_counter_says() {
        let clock = MonotonicClock::new();
        for steps in [1, 1000, u64::from(u32::MAX), 1 << 45, 1 << 55] {
            let ours = clock.nanos_of(steps);
            let exact = clock.counter.delta_as_nanos(0, steps);
            assert!(ours.abs_diff(exact) <= 2 + steps / (1 << 31), "{steps} steps: {ours}, {exact}");
        }
    }

    #[test]
    fn a_near_clock_shows_what_the_clock_shows() {
        let manual = Arc::new(ManualClock::new(Time::from_nanos(5)));
        let near = NearClock::new(manual.clone());
        assert!(near.monotonic.is_none());
        manual.set(Time::from_nanos(9));
        assert_eq!(near.now(), Time::from_nanos(9));

        let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::new());
        let near = NearClock::new(Arc::new(clock.clone()));
        assert!(near.monotonic.is_some(), "also behind another pointer");
        let (a, b, c) = (clock.now(), near.now(), clock.now());
        assert!(a <= b && b <= c, "{a:?} {b:?} {c:?}");
    }

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
