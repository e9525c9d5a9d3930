//! A histogram of times with fixed memory: 128 steps per power of two, so that a percentile is off by less than 0.8 %.

/// Values below this have a bucket each.
const LINEAR: u64 = 128;
const BITS: u32 = LINEAR.ilog2();
/// Values from here on (about 18 minutes in nanoseconds) share the last bucket.
const VALUE_BITS: u32 = 40;
const BUCKETS: usize = (VALUE_BITS - BITS + 1) as usize * LINEAR as usize;

/// Counts of values in nanoseconds, with exact minimum, maximum and sum.
#[derive(Clone, Debug)]
pub(crate) struct Histogram {
    buckets: Box<[u64]>,
    count: u64,
    sum: u128,
    min: u64,
    max: u64,
}

impl Histogram {
    pub(crate) fn new() -> Self {
        Histogram { buckets: vec![0; BUCKETS].into(), count: 0, sum: 0, min: u64::MAX, max: 0 }
    }

    /// Counts one value. A few nanoseconds; no allocation.
    pub(crate) fn record(&mut self, ns: u64) {
        self.buckets[index(ns)] += 1;
        self.count += 1;
        self.sum += u128::from(ns);
        self.min = self.min.min(ns);
        self.max = self.max.max(ns);
    }

    /// The smallest value, 0 if there is none.
    pub(crate) fn min(&self) -> u64 {
        if self.count == 0 { 0 } else { self.min }
    }

    /// The largest value, 0 if there is none.
    pub(crate) fn max(&self) -> u64 {
        self.max
    }

    /// The mean, 0 if there is no value.
    pub(crate) fn mean(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum as f64 / self.count as f64 }
    }

    /// The smallest value that at least `percent` of all values do not exceed, to the accuracy of the buckets; 0 if there
    /// is no value.
    pub(crate) fn percentile(&self, percent: f64) -> u64 {
        let rank = ((percent / 100.0 * self.count as f64).ceil() as u64).clamp(1, self.count.max(1));
        let mut seen = 0;
        for (i, n) in self.buckets.iter().enumerate() {
            seen += n;
            if seen >= rank {
                return middle(i).clamp(self.min, self.max);
            }
        }
        0
    }
}

fn index(ns: u64) -> usize {
    let ns = ns.min((1 << VALUE_BITS) - 1);
    if ns < LINEAR {
        return ns as usize;
    }
    // `shift` brings the value into LINEAR .. 2 * LINEAR: its leading one and the seven bits after it.
    let shift = ns.ilog2() - BITS;
    shift as usize * LINEAR as usize + (ns >> shift) as usize
}

fn middle(index: usize) -> u64 {
    let index = index as u64;
    if index < 2 * LINEAR {
        return index;
    }
    let shift = index / LINEAR - 1;
    let low = (index % LINEAR + LINEAR) << shift;
    low + (1 << shift) / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_falls_into_a_bucket_near_it() {
        let mut last = 0;
        for shift in 0..64 {
            for v in [1u64 << shift, (1 << shift) + (1 << shift) / 3, ((1u128 << (shift + 1)) - 1) as u64] {
                let i = index(v);
                assert!(i < BUCKETS && i >= last, "{v}");
                last = i;
                if v < 1 << VALUE_BITS {
                    let m = middle(i) as f64;
                    assert!((m - v as f64).abs() <= v as f64 / 128.0, "{v} in bucket of {m}");
                }
            }
        }
        assert_eq!(index(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn percentiles_of_one_to_a_thousand() {
        let mut h = Histogram::new();
        for v in (1..=1000).rev() {
            h.record(v * 1000);
        }
        for (p, want) in [(0.0, 1000.0), (50.0, 500_000.0), (99.0, 990_000.0), (100.0, 1_000_000.0)] {
            let got = h.percentile(p) as f64;
            assert!((got - want).abs() <= want * 0.008, "p{p}: {got}");
        }
        assert_eq!((h.min(), h.max(), h.count), (1000, 1_000_000, 1000));
        assert!((h.mean() - 500_500.0).abs() < 1e-6);
    }

    #[test]
    fn an_empty_histogram_is_all_zero() {
        let h = Histogram::new();
        assert_eq!((h.min(), h.max(), h.percentile(50.0), h.mean()), (0, 0, 0, 0.0));
    }

    #[test]
    fn one_value_is_every_percentile() {
        let mut h = Histogram::new();
        h.record(123_457);
        assert_eq!([h.percentile(0.0), h.percentile(50.0), h.percentile(99.9)], [123_457; 3]);
    }
}
