//! Owns made-up values: the cache contents that let a deep position be checked without a long prompt.

use crate::format::to_e4m3;
use crate::random::mix;

/// The two halves of the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CacheKind {
    Key,
    Value,
}

/// In a cache in fp8, a generated value is multiplied by this, in units of the scale: it is then about as large as a real key.
const FP8_UNITS: f32 = 8.0;

/// A generated value of a state is multiplied by this: sums over a state are then about as large as values.
const STATE_UNITS: f32 = 1.0 / 16.0;

/// The code of a generated value in a cache in fp8.
pub fn cache_code(value: f32) -> u8 {
    to_e4m3(FP8_UNITS * value)
}

/// The value that `fill_cache` puts into column `column` (KV head times `head_dim`, plus the dimension) of row
/// `position`, before it is rounded to the cache's type: evenly spread in `-1.0..1.0`, a function of its arguments alone.
pub fn cache_value(seed: u64, layer: u32, kind: CacheKind, position: u32, column: u32) -> f32 {
    let kind = match kind {
        CacheKind::Key => 0,
        CacheKind::Value => 1,
    };
    let place = (u64::from(layer) << 1 | kind).wrapping_mul(0xd134_2543_de82_ef95);
    signed(mix(mix(seed.wrapping_add(place)).wrapping_add(u64::from(position) << 32 | u64::from(column))))
}

/// The value that `fill_cache` puts into a column of a layer's recurrent state.
pub fn state_value(seed: u64, layer: u32, column: u32) -> f32 {
    STATE_UNITS * cache_value(seed, layer, CacheKind::Key, u32::MAX, column)
}

/// The upper 24 bits as a multiple of 2^-23, less 1: exact in fp32.
pub(super) fn signed(bits: u64) -> f32 {
    (bits >> 40) as f32 * (1.0 / 8_388_608.0) - 1.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_values_differ_in_every_argument_and_fill_the_interval() {
        let base = cache_value(1, 2, CacheKind::Key, 3, 4);
        for other in [
            cache_value(2, 2, CacheKind::Key, 3, 4),
            cache_value(1, 3, CacheKind::Key, 3, 4),
            cache_value(1, 2, CacheKind::Value, 3, 4),
            cache_value(1, 2, CacheKind::Key, 4, 4),
            cache_value(1, 2, CacheKind::Key, 3, 5),
        ] {
            assert_ne!(base, other);
        }
        let values: Vec<f32> = (0..1000).map(|p| cache_value(7, 0, CacheKind::Value, p, 0)).collect();
        let mean = values.iter().sum::<f32>() / 1000.0;
        assert!(mean.abs() < 0.06 && values.iter().all(|v| (-1.0..1.0).contains(v)), "mean {mean}");
        assert!(values.iter().any(|v| *v < -0.98) && values.iter().any(|v| *v > 0.98));
    }
}
