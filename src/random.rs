//! Owns `Random`: pseudo-random numbers that depend on the random seed alone, so they are equal on every machine. Not for secrets.

use crate::digest::Digest;

/// Increment of the state: 2^64 divided by the golden ratio.
pub const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// The output function: every bit of the result depends on every bit of `state`.
pub fn mix(state: u64) -> u64 {
    let state = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let state = (state ^ (state >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    state ^ (state >> 31)
}

/// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): one word of state.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    pub fn new(state: u64) -> Random {
        Random(state)
    }

    /// A stream for one purpose: drawing from one stream does not change another.
    pub fn stream(seed: u64, purpose: &str, at: u64) -> Random {
        let digest = Digest::of(format!("{purpose} {seed} {at}").as_bytes());
        let head = digest.as_bytes().iter().take(8);
        Random(head.fold(0, |word, byte| word << 8 | u64::from(*byte)))
    }

    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN);
        mix(self.0)
    }

    /// A number below `count`; 0 if `count` is 0.
    pub fn below(&mut self, count: usize) -> usize {
        ((u128::from(self.word()) * count as u128) >> 64) as usize
    }

    /// From 0 up to 1, in steps of 2^-53.
    pub fn unit(&mut self) -> f64 {
        (self.word() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_those_of_the_paper_and_streams_differ() {
        // The first words for state 0, as the reference implementation (Vigna, splitmix64.c) prints them.
        let mut random = Random::new(0);
        let words = [0xE220_A839_7B1D_CDAF, 0x6E78_9E6A_A1B9_65F4, 0x06C4_5D18_8009_454F];
        assert_eq!(words.map(|_| random.word()), words);
        let first = |seed, purpose, at| Random::stream(seed, purpose, at).word();
        let streams = [first(0, "a", 0), first(1, "a", 0), first(0, "b", 0), first(0, "a", 1)];
        assert!((1..4).all(|at| !streams[..at].contains(&streams[at])));
    }

    #[test]
    fn numbers_stay_below_their_bound_and_reach_it() {
        let mut random = Random::new(1);
        let mut seen = [false; 7];
        (0..200).for_each(|_| seen[random.below(7)] = true);
        assert_eq!((seen, random.below(0), random.below(1)), ([true; 7], 0, 0));
        assert!((0..200).map(|_| random.unit()).all(|unit| (0.0..1.0).contains(&unit)));
    }
}
