//! The one source of pseudo-random numbers of the software devices: xoshiro256**, seeded by splitmix64.

use std::{
    collections::hash_map::RandomState,
    hash::{BuildHasher, Hasher},
};

/// xoshiro256** of Blackman and Vigna: 256 bits of state, period 2^256 - 1. Equal seeds give equal sequences on every
/// machine. Not for secrets.
#[derive(Clone, Debug)]
pub struct Rng([u64; 4]);

impl Rng {
    /// The generator of `seed`; every seed is a good one.
    pub fn new(seed: u64) -> Self {
        let mut x = seed;
        // splitmix64: the state must not be all zero, and near seeds must give far states.
        Rng(std::array::from_fn(|_| {
            x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = x;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        }))
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        let s = &mut self.0;
        let out = s[1].wrapping_mul(5).rotate_left(7).wrapping_mul(9);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        out
    }

    /// A number from 0 to `n - 1`; 0 if `n` is 0. The bias is below 2^-32 for the `n` that occur here.
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(n)) >> 64) as u64
    }

    /// True with a probability of `ppm` in a million. Draws a number only if the answer is open, so that switching a
    /// fault off and on does not shift the others.
    pub fn chance(&mut self, ppm: u32) -> bool {
        match ppm {
            0 => false,
            1_000_000.. => true,
            _ => self.below(1_000_000) < u64::from(ppm),
        }
    }
}

/// A seed that differs from process to process, from the keys the standard library's hash maps use.
pub fn entropy() -> u64 {
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequence_is_the_published_one() {
        // First outputs of the reference splitmix64 for seed 1234567 and of xoshiro256** on the state 1, 2, 3, 4.
        assert_eq!(Rng::new(1_234_567).0[0], 6_457_827_717_110_365_317);
        let mut r = Rng([1, 2, 3, 4]);
        assert_eq!([r.next_u64(), r.next_u64(), r.next_u64()], [11520, 0, 1_509_978_240]);
    }

    #[test]
    fn chances_and_bounds_hold() {
        let mut r = Rng::new(7);
        assert!((0..1000).all(|_| r.below(3) < 3 && !r.chance(0) && r.chance(1_000_000)));
        assert_eq!(r.below(0), 0);
        let hits = (0..100_000).filter(|_| r.chance(250_000)).count();
        assert!((24_000..26_000).contains(&hits), "{hits}");
    }
}
