//! Owns `Random`: numbers that a seed and a purpose decide, so that a search is a function of its seed and its history.

use crate::digest::Digest;

/// A stream of numbers. SplitMix64 (Steele, Lea, Flood 2014) seeded by blake3: every purpose has a stream of its own, so
/// that one question more does not change the answers to the others.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64, purpose: &str, at: u64) -> Random {
        let digest = Digest::of(format!("{purpose} {seed} {at}").as_bytes());
        let head = digest.as_bytes().iter().take(8);
        Random(head.fold(0, |word, byte| word << 8 | u64::from(*byte)))
    }

    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `count`; 0 where there is none. The bias of the remainder is below 2^-50 here.
    pub fn below(&mut self, count: usize) -> usize {
        (self.word() % count.max(1) as u64) as usize
    }

    /// From 0 up to 1.
    pub fn unit(&mut self) -> f64 {
        (self.word() >> 11) as f64 / (1u64 << 53) as f64
    }
}
