//! Owns synthetic weights: values that are a pure function of (seed, tensor name, element index).
//!
//! A counter-based generator, so that any row of any tensor can be made alone, in any order, by any number of threads,
//! and two builds of one synthetic model agree on every bit without a file between them.

use half::bf16;

/// One tensor of a synthetic model.
///
/// Element `i` is `round_to_bf16(mean + std * z)` with `z = (u0 + u1 + u2 + u3 - E) / S`, where `u0..u3` are the four
/// 16-bit lanes of `splitmix64(key + (i + 1) * golden)`, and `E`, `S` their expectation and deviation: a sum of four
/// uniforms is close to normal and never further than 3.46 deviations from its mean, so there are no outliers that
/// would decide a tolerance. Every value is exact in bf16, so an fp32 and a bf16 build of one model share weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SyntheticTensor {
    key: u64,
    mean: f32,
    std: f32,
}

/// Increment of SplitMix64 (Steele, Lea, Flood 2014): 2^64 / golden ratio.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
/// Expectation of the sum of four uniform 16-bit lanes.
const LANES_MEAN: i32 = 2 * 65535;
/// Deviation of that sum: sqrt(4 * (65536^2 - 1) / 12).
const LANES_STD: f32 = 37837.227;

impl SyntheticTensor {
    /// `mean` and `std` of the normal-like values before rounding.
    pub fn new(seed: u64, name: &str, mean: f32, std: f32) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"monobloc synthetic tensor\0").update(&seed.to_le_bytes()).update(name.as_bytes());
        let mut key = [0; 8];
        hasher.finalize_xof().fill(&mut key);
        SyntheticTensor { key: u64::from_le_bytes(key), mean, std }
    }

    /// Element `index`, counted in row-major order over the whole tensor.
    pub fn value(&self, index: u64) -> bf16 {
        let mut h = self.key.wrapping_add(index.wrapping_add(1).wrapping_mul(GOLDEN));
        h = (h ^ (h >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        h = (h ^ (h >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        h ^= h >> 31;
        let lanes = (h & 0xFFFF) + (h >> 16 & 0xFFFF) + (h >> 32 & 0xFFFF) + (h >> 48);
        round_bf16(self.mean + (lanes as i32 - LANES_MEAN) as f32 * (self.std / LANES_STD))
    }

    /// Elements `first..first + out.len()`.
    pub fn fill_f32(&self, first: u64, out: &mut [f32]) {
        for (i, slot) in out.iter_mut().enumerate() {
            *slot = f32::from_bits(u32::from(self.value(first + i as u64).to_bits()) << 16);
        }
    }

    /// Elements `first..first + out.len()`.
    pub fn fill_bf16(&self, first: u64, out: &mut [bf16]) {
        for (i, slot) in out.iter_mut().enumerate() {
            *slot = self.value(first + i as u64);
        }
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
        let mut tail = vec![0.0; 10];
        a.fill_f32(990, &mut tail);
        assert_eq!(tail, whole[990..].iter().map(|v| v.to_f32()).collect::<Vec<_>>());
        // Pinned: a change of the generator changes every synthetic model and must be deliberate.
        assert_eq!(whole[..4].iter().map(|v| v.to_bits()).collect::<Vec<_>>(), PINNED);
        for other in [SyntheticTensor::new(8, "model.norm.weight", 0.0, 1.0), SyntheticTensor::new(7, "x", 0.0, 1.0)] {
            let mut different = vec![bf16::ZERO; 1000];
            other.fill_bf16(0, &mut different);
            assert!(whole.iter().zip(&different).filter(|(a, b)| a == b).count() < 20);
        }
    }

    const PINNED: [u16; 4] = [49128, 48841, 48952, 48603];

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
        assert!(v.iter().all(|&x| (x - 1.0).abs() <= 0.25 * 3.47));
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
