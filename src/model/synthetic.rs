//! Owns synthetic weights: values that are a pure function of (seed, tensor name, element index).
//!
//! A counter-based generator, so that any row of any tensor can be made alone, in any order, by any number of threads,
//! and two builds of one synthetic model agree on every bit without a file between them.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{LazyLock, Mutex, PoisonError};

use half::bf16;

use crate::random::{GOLDEN, mix};

/// One tensor of a synthetic model.
///
/// Element `i` is `round_to_bf16(mean + std * NORMAL[u])`, `u` being twelve bits of lane `i % 4` of
/// `mix(key + (i / 4 + 1) * GOLDEN)`: one hash serves four elements. The table holds 4096 normal-like values of
/// mean 0 and deviation 1, none beyond 3.5, so there are no outliers that would decide a tolerance. Every value is
/// exact in bf16, so an fp32 and a bf16 build of one model share weights.
#[derive(Clone, Copy, PartialEq)]
pub struct SyntheticTensor {
    key: u64,
    mean: f32,
    std: f32,
    values: &'static Values,
}

/// What an element can be: `round_to_bf16(mean + std * NORMAL[u])` for each `u`.
type Values = [bf16; 1 << TABLE_BITS];

impl fmt::Debug for SyntheticTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // What names the tensor in keys; `values` follow from it.
        let SyntheticTensor { key, mean, std, values: _ } = self;
        f.debug_struct("SyntheticTensor").field("key", key).field("mean", mean).field("std", std).finish()
    }
}

/// What a draft reads beside its token at `position` where no model gave it anything, as in checks: evenly spread in -2 to 2, about as
/// large as what a norm leaves, and exact in bf16.
pub fn given_value(position: u32, column: u32) -> f32 {
    let bits = mix(u64::from(position) << 32 | u64::from(column)) >> 57;
    (bits as f32 - 63.5) * (1.0 / 32.0)
}

const TABLE_BITS: u32 = 12;

/// Sums of four uniform 16-bit lanes of a fixed hash, mirrored for a mean of exactly 0 and scaled to a deviation of 1.
/// Integers, one square root and one division: the same bits on every machine.
static NORMAL: LazyLock<[f32; 1 << TABLE_BITS]> = LazyLock::new(|| {
    let half: Vec<i64> = (0..1u64 << (TABLE_BITS - 1))
        .map(|i| {
            let h = mix((i + 1).wrapping_mul(GOLDEN));
            let lanes = (h & 0xFFFF) + (h >> 16 & 0xFFFF) + (h >> 32 & 0xFFFF) + (h >> 48);
            lanes as i64 - 2 * 65535
        })
        .collect();
    let squares: i64 = half.iter().map(|v| v * v).sum();
    let std = (squares as f64 / half.len() as f64).sqrt();
    std::array::from_fn(|i| {
        let value = half[i / 2] as f64 / std;
        (if i % 2 == 0 { value } else { -value }) as f32
    })
});

/// The values for `mean` and `std`. Tensors of one shape share them: a model has few, and they stay for the next one.
fn values(mean: f32, std: f32) -> &'static Values {
    static ALL: Mutex<BTreeMap<(u32, u32), &'static Values>> = Mutex::new(BTreeMap::new());
    let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    let made = || -> &'static Values { Box::leak(Box::new(NORMAL.map(|normal| round_bf16(mean + std * normal)))) };
    all.entry((mean.to_bits(), std.to_bits())).or_insert_with(made)
}

impl SyntheticTensor {
    /// `mean` and `std` of the values before rounding.
    pub fn new(seed: u64, name: &str, mean: f32, std: f32) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"monobloc synthetic tensor\0").update(&seed.to_le_bytes()).update(name.as_bytes());
        let mut key = [0; 8];
        hasher.finalize_xof().fill(&mut key);
        SyntheticTensor { key: u64::from_le_bytes(key), mean, std, values: values(mean, std) }
    }

    /// Element `index`, counted in row-major order over the whole tensor.
    pub fn value(&self, index: u64) -> bf16 {
        self.group(index / 4)[(index % 4) as usize]
    }

    /// Elements `4 group..4 group + 4`.
    fn group(&self, group: u64) -> [bf16; 4] {
        let hash = mix(self.key.wrapping_add(group.wrapping_add(1).wrapping_mul(GOLDEN)));
        let lane = |lane: u32| self.values[(hash >> (16 * lane + 16 - TABLE_BITS)) as usize % (1 << TABLE_BITS)];
        [lane(0), lane(1), lane(2), lane(3)]
    }

    fn fill<T: Copy>(&self, first: u64, out: &mut [T], convert: impl Fn(bf16) -> T) {
        let head = out.len().min((first.wrapping_neg() % 4) as usize);
        let (head, rest) = out.split_at_mut(head);
        for (i, slot) in head.iter_mut().enumerate() {
            *slot = convert(self.value(first + i as u64));
        }
        let mut group = (first + head.len() as u64) / 4;
        let mut whole = rest.chunks_exact_mut(4);
        for slots in &mut whole {
            let [a, b, c, d] = self.group(group);
            slots.copy_from_slice(&[convert(a), convert(b), convert(c), convert(d)]);
            group += 1;
        }
        whole.into_remainder().iter_mut().zip(self.group(group)).for_each(|(slot, value)| *slot = convert(value));
    }

    /// Elements `first..first + out.len()`.
    pub fn fill_f32(&self, first: u64, out: &mut [f32]) {
        self.fill(first, out, |v| f32::from_bits(u32::from(v.to_bits()) << 16));
    }

    /// Elements `first..first + out.len()`.
    pub fn fill_bf16(&self, first: u64, out: &mut [bf16]) {
        self.fill(first, out, |v| v);
    }
}

/// Round to nearest even; `x` is finite, so the NaN case of `bf16::from_f32` is not paid for per element.
fn round_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    bf16::from_bits(((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_a_function_of_seed_name_and_index_alone() {
        let a = SyntheticTensor::new(7, "model.norm.weight", 0.0, 1.0);
        let mut whole = vec![bf16::ZERO; 1000];
        a.fill_bf16(0, &mut whole);
        for first in 0..9 {
            for len in 0..9 {
                let mut part = vec![0.0; len];
                a.fill_f32(first, &mut part);
                let range = first as usize..first as usize + len;
                assert_eq!(part, whole[range].iter().map(|v| v.to_f32()).collect::<Vec<_>>());
            }
        }
        assert!((0..1000).all(|i| a.value(i) == whole[i as usize]));
        // Pinned: a change of the generator changes every synthetic model and must be deliberate.
        assert_eq!(whole[..4].iter().map(|v| v.to_bits()).collect::<Vec<_>>(), PINNED);
        for other in [SyntheticTensor::new(8, "model.norm.weight", 0.0, 1.0), SyntheticTensor::new(7, "x", 0.0, 1.0)] {
            let mut different = vec![bf16::ZERO; 1000];
            other.fill_bf16(0, &mut different);
            assert!(whole.iter().zip(&different).filter(|(a, b)| a == b).count() < 20);
        }
    }

    const PINNED: [u16; 4] = [49110, 16030, 49008, 16400];

    #[test]
    fn values_have_the_asked_mean_and_deviation() {
        let t = SyntheticTensor::new(1, "w", 1.0, 0.25);
        let mut v = vec![0.0; 1 << 18];
        t.fill_f32(0, &mut v);
        let n = v.len() as f64;
        let mean = v.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
        let var = v.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / n;
        let neighbours = v.windows(2).map(|w| (f64::from(w[0]) - mean) * (f64::from(w[1]) - mean)).sum::<f64>() / n;
        assert!((mean - 1.0).abs() < 2e-3, "{mean}");
        assert!((var.sqrt() - 0.25).abs() < 2e-3, "{}", var.sqrt());
        assert!((neighbours / var).abs() < 1e-2, "{neighbours}");
        assert!(v.iter().all(|&x| (x - 1.0).abs() <= 0.25 * 3.5));
    }

    #[test]
    fn rounding_agrees_with_half() {
        for i in 0..100_000u32 {
            let x = f32::from_bits(0x3F80_0000 - 50_000 + i * 97);
            assert_eq!(round_bf16(x), bf16::from_f32(x));
            assert_eq!(round_bf16(-x), bf16::from_f32(-x));
        }
    }
}
