//! Owns what the rows of a step take from a device in place of their own: codes of keys and values in fp8, and the choice of experts.
//!
//! Both turn the last bit of a number into a step. If two values differ in the last bit of a bf16, rounding to few bits makes that 6 to 12 %
//! in some of the codes, and a router whose scores are nearly equal chooses another expert; each layer builds on those before. A step that
//! takes what the device stored has it in every layer, so it differs only by the arithmetic in between. What the step would have rounded,
//! and the scores that it would have chosen by, are kept: they say whether the device was right.

use super::memory::CacheColumns;
use super::plan::{CacheShape, RouterShape};
use super::real::Real;
use crate::format::e4m3;
use std::sync::atomic::{AtomicU32, Ordering};

/// What a device stored for the rows of one step.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Taken {
    /// Codes of fp8 of each cache in the order of [`super::Interp::caches`], (rows, cols). Empty: the step stores its own keys and values.
    pub codes: Vec<Vec<u8>>,
    /// Experts of each router in the order of [`super::Interp::routers`], by row and slot. A router without rows chooses itself, and so
    /// does a row whose experts are no choice: other than `top_k` different ones that there are.
    pub choices: Vec<Vec<Vec<u32>>>,
}

impl Taken {
    pub fn is_empty(&self) -> bool {
        self.codes.is_empty() && self.choices.iter().all(Vec::is_empty)
    }
}

/// What the rows of a step take, and what they would have computed.
#[derive(Debug)]
pub struct FromDevice {
    rows: usize,
    taken: Taken,
    caches: Vec<Kept>,
    routers: Vec<Kept>,
}

/// Bits of fp32 values, (rows, cols); NaN where no task computed one.
#[derive(Debug)]
struct Kept {
    cols: usize,
    words: Box<[AtomicU32]>,
}

impl Kept {
    fn new(rows: usize, cols: usize) -> Kept {
        Kept { cols, words: (0..rows * cols).map(|_| AtomicU32::new(f32::NAN.to_bits())).collect() }
    }

    fn keep<R: Real>(&self, row: usize, first: usize, values: &[R]) {
        let words = &self.words[row * self.cols + first..][..values.len()];
        words.iter().zip(values).for_each(|(word, value)| word.store(value.to_f32().to_bits(), Ordering::Relaxed));
    }

    fn row(&self, row: usize) -> Vec<f32> {
        let words = &self.words[row * self.cols..(row + 1) * self.cols];
        words.iter().map(|word| f32::from_bits(word.load(Ordering::Relaxed))).collect()
    }
}

impl FromDevice {
    /// # Panics
    /// If `taken` is not of `rows` rows of these caches and routers.
    pub(super) fn new(caches: &[CacheShape], routers: &[RouterShape], rows: usize, mut taken: Taken) -> FromDevice {
        if !taken.codes.is_empty() {
            assert_eq!(caches.len(), taken.codes.len(), "codes of every cache");
            let all = caches.iter().zip(&taken.codes).all(|(shape, codes)| codes.len() == rows * shape.cols);
            assert!(all, "a code for each column of each row");
        }
        taken.choices.resize(routers.len(), vec![]);
        assert!(taken.choices.iter().all(|of| [0, rows].contains(&of.len())), "a choice of each row");
        let caches = caches.iter().filter(|_| !taken.codes.is_empty()).map(|shape| Kept::new(rows, shape.cols));
        let routers = routers.iter().map(|router| Kept::new(rows, router.op.experts as usize));
        FromDevice { rows, caches: caches.collect(), routers: routers.collect(), taken }
    }

    /// Rows of the step.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Whether the step takes keys and values.
    pub(super) fn has_codes(&self) -> bool {
        !self.taken.codes.is_empty()
    }

    /// The codes of a row in a cache, by column.
    pub fn codes(&self, cache: usize, row: usize) -> &[u8] {
        let cols = self.caches[cache].cols;
        &self.taken.codes[cache][row * cols..(row + 1) * cols]
    }

    /// What the step would have rounded, by column; NaN in columns that no head has.
    pub fn computed(&self, cache: usize, row: usize) -> Vec<f32> {
        self.caches[cache].row(row)
    }

    /// Keeps the values that a step computed for `columns` of a row, and replaces them by the device's: codes in units of `scale`.
    pub(super) fn take<R: Real>(&self, row: usize, columns: CacheColumns, scale: f32, values: &mut [R]) {
        self.caches[columns.cache].keep(row, columns.first, values);
        let codes = &self.codes(columns.cache, row)[columns.first..];
        codes.iter().zip(values).for_each(|(&code, value)| *value = R::of(e4m3(code) * scale));
    }

    /// The experts that a device says a row has chosen, whatever they are; `None`: the row chooses itself.
    pub fn said(&self, router: usize, row: usize) -> Option<&[u32]> {
        self.taken.choices[router].get(row).map(Vec::as_slice)
    }

    /// The scores that a row would have chosen by, by expert, before any correction; NaN where the step did not come to it.
    pub fn scores(&self, router: usize, row: usize) -> Vec<f32> {
        self.routers[router].row(row)
    }

    /// Keeps the scores of a row, and replaces what it has chosen by the device's choice.
    pub(super) fn choose<R: Real>(&self, router: usize, row: usize, scores: &[R], chosen: &mut [usize]) {
        self.routers[router].keep(row, 0, scores);
        let said = self.said(router, row).unwrap_or(&[]);
        let differs = |(at, id): (usize, &u32)| (*id as usize) < scores.len() && !said[..at].contains(id);
        if said.len() == chosen.len() && said.iter().enumerate().all(differs) {
            chosen.iter_mut().zip(said).for_each(|(chosen, &said)| *chosen = said as usize);
        }
    }
}
