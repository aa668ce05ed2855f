//! Owns the codes of keys and values that a device stored for the rows of a step: the step takes them in place of its own.
//!
//! If two values differ in the last bit of a bf16, rounding to few bits makes that 6 to 12 % in some of the codes, and each layer builds
//! on the codes of those before. A step that takes the codes of the device has its keys and values in every layer, so it differs only
//! by the arithmetic between two roundings. The values that it would have rounded are kept: they say whether the codes are right.

use super::memory::CacheColumns;
use super::plan::CacheShape;
use super::real::Real;
use crate::format::e4m3;
use std::sync::atomic::{AtomicU32, Ordering};

/// Codes of fp8 for the rows of one step, by cache.
#[derive(Debug)]
pub struct DeviceCodes {
    rows: usize,
    caches: Vec<OfCache>,
}

#[derive(Debug)]
struct OfCache {
    cols: usize,
    /// (rows, cols).
    codes: Vec<u8>,
    /// Bits of the fp32 values that the step would have rounded; NaN where no task computed one.
    computed: Box<[AtomicU32]>,
}

impl DeviceCodes {
    /// `codes` has those of each cache in the order of [`super::Interp::caches`], (rows, cols).
    ///
    /// # Panics
    /// If there are others.
    pub(super) fn new(caches: &[CacheShape], rows: usize, codes: Vec<Vec<u8>>) -> DeviceCodes {
        assert_eq!(caches.len(), codes.len(), "codes of every cache");
        let of_cache = |(shape, codes): (&CacheShape, Vec<u8>)| {
            assert_eq!(codes.len(), rows * shape.cols, "a code for each column of each row");
            let computed = codes.iter().map(|_| AtomicU32::new(f32::NAN.to_bits())).collect();
            OfCache { cols: shape.cols, codes, computed }
        };
        DeviceCodes { rows, caches: caches.iter().zip(codes).map(of_cache).collect() }
    }

    /// Rows of the step.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The codes of a row in a cache, by column.
    pub fn codes(&self, cache: usize, row: usize) -> &[u8] {
        let OfCache { cols, codes, .. } = &self.caches[cache];
        &codes[row * cols..(row + 1) * cols]
    }

    /// What the step would have rounded, by column; NaN in columns that no head has.
    pub fn computed(&self, cache: usize, row: usize) -> Vec<f32> {
        let OfCache { cols, computed, .. } = &self.caches[cache];
        let row = &computed[row * cols..(row + 1) * cols];
        row.iter().map(|bits| f32::from_bits(bits.load(Ordering::Relaxed))).collect()
    }

    /// Keeps the values that a step computed for `columns` of a row, and replaces them by the device's: codes in units of `scale`.
    pub(super) fn take<R: Real>(&self, row: usize, columns: CacheColumns, scale: f32, values: &mut [R]) {
        let OfCache { cols, codes, computed } = &self.caches[columns.cache];
        let range = row * cols + columns.first..row * cols + columns.first + columns.len;
        for ((cell, &code), value) in computed[range.clone()].iter().zip(&codes[range]).zip(values) {
            cell.store(value.to_f32().to_bits(), Ordering::Relaxed);
            *value = R::of(e4m3(code) * scale);
        }
    }
}
