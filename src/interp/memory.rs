//! Owns the memory a schedule's tasks touch: arenas for exchange, output and cache buffers, and how ops reach them.

use super::from_device::FromDevice;
use super::kernel::HistoryRows;
use super::ops::Input;
use crate::dtype::DType;
use crate::format::{e4m3, to_e4m3};
use crate::ir::BufferId;
use crate::model::synthetic::given_value;
use crate::random::mix;
use half::bf16;
use std::cell::UnsafeCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, Ordering};

/// Columns of a buffer that one task touches, resolved to elements of an arena.
#[derive(Debug, Clone, PartialEq)]
pub struct Region {
    pub buffer: BufferId,
    pub place: Place,
    pub dtype: DType,
    /// First column, within the buffer.
    pub first: usize,
    pub len: usize,
    /// First element of phase 0, within the arena.
    pub offset: usize,
    pub phases: u32,
    /// Elements from one phase to the next.
    pub phase_stride: usize,
    /// Elements from one row of the step to the next.
    pub row_stride: usize,
}

/// The arenas that ops read and write by [`Region`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    Exchange,
    Output,
    Private,
}

impl Region {
    /// Columns `first..first + len` of the region, cut off at its end.
    pub fn columns(&self, first: usize, len: usize) -> Region {
        let first = first.min(self.len);
        Region {
            first: self.first + first,
            offset: self.offset + first,
            len: len.min(self.len - first),
            ..self.clone()
        }
    }

    /// The same columns of row `row` of the step.
    pub fn row(&self, row: usize) -> Region {
        Region { offset: self.offset + row * self.row_stride, ..self.clone() }
    }

    /// First element at the step that decodes `position`: phases take turns.
    pub fn at(&self, position: u32) -> usize {
        self.offset + (position % self.phases) as usize * self.phase_stride
    }
}

/// Columns of one row of a cache buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheColumns {
    /// Index into [`Memory::caches`].
    pub cache: usize,
    pub first: usize,
    pub len: usize,
}

/// How an op reaches its operands. Values are fp32 in the op's hands; a store rounds to the type of the buffer.
pub trait Access {
    /// Whether what was loaded once in a step may be used again. Not if every load is to be judged.
    fn trusted(&self) -> bool;
    fn load(&mut self, region: &Region, out: &mut [f32]);
    fn store(&mut self, region: &Region, values: &[f32]);
    /// 32-bit words of a buffer of token ids.
    fn load_words(&mut self, region: &Region, out: &mut [u32]);
    fn store_words(&mut self, region: &Region, words: &[u32]);
    /// Words that the previous step wrote (a carried event orders them).
    fn load_previous_words(&mut self, region: &Region, out: &mut [u32]);
    /// A recurrent state before `position`, which the task of the position before left on this SM.
    fn load_state(&mut self, region: &Region, position: u32, out: &mut [f32]);
    /// The state after `position`.
    fn store_state(&mut self, region: &Region, position: u32, values: &[f32]);
    /// The cache row of row `row` of the step; `values` already have the cache's precision.
    fn append(&mut self, row: usize, columns: CacheColumns, values: &[f32]);
}

/// Memory as one row of the step sees it.
pub struct OfRow<'a, M> {
    pub memory: &'a mut M,
    pub row: usize,
}

impl<M: Access> Access for OfRow<'_, M> {
    fn trusted(&self) -> bool {
        self.memory.trusted()
    }

    fn load(&mut self, region: &Region, out: &mut [f32]) {
        self.memory.load(&region.row(self.row), out);
    }

    fn store(&mut self, region: &Region, values: &[f32]) {
        self.memory.store(&region.row(self.row), values);
    }

    fn load_words(&mut self, region: &Region, out: &mut [u32]) {
        self.memory.load_words(&region.row(self.row), out);
    }

    fn store_words(&mut self, region: &Region, words: &[u32]) {
        self.memory.store_words(&region.row(self.row), words);
    }

    fn load_previous_words(&mut self, region: &Region, out: &mut [u32]) {
        self.memory.load_previous_words(&region.row(self.row), out);
    }

    fn load_state(&mut self, region: &Region, position: u32, out: &mut [f32]) {
        self.memory.load_state(region, position, out);
    }

    fn store_state(&mut self, region: &Region, position: u32, values: &[f32]) {
        self.memory.store_state(region, position, values);
    }

    fn append(&mut self, _: usize, columns: CacheColumns, values: &[f32]) {
        self.memory.append(self.row, columns, values);
    }
}

/// What a step decodes.
#[derive(Debug, Clone)]
pub struct StepRows {
    /// The largest of its rows.
    pub position: u32,
    pub rows: Vec<StepRow>,
    /// What it takes in place of its own.
    pub device: Option<Arc<FromDevice>>,
    /// Rounds at random in place of to the nearest.
    pub at_random: Option<RoundAtRandom>,
}

/// Rounds to bf16 up or down at random, with the right mean. A value in one place of a step is always rounded alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoundAtRandom {
    pub seed: u64,
    /// Whether the inputs of products are rounded, too, as tensor cores take them.
    pub staged: bool,
}

impl RoundAtRandom {
    /// `values` of a step at `position`; `place` is that of the first.
    pub fn round(self, position: u32, place: u64, values: impl Iterator<Item = f32>) -> impl Iterator<Item = f32> {
        let seed = mix(self.seed ^ mix(u64::from(position) << 32 ^ place.rotate_left(20)));
        (0u64..).zip(values).map(move |(i, value)| {
            let bits = value.to_bits().wrapping_add(mix(seed.wrapping_add(i)) as u32 & 0xffff) & 0xffff_0000;
            // A number near the end of the range would become infinite.
            if f32::from_bits(bits).is_finite() { f32::from_bits(bits) } else { value }
        })
    }
}

/// A row of a step: a token of a sequence at a position.
#[derive(Debug, Clone)]
pub struct StepRow {
    pub position: u32,
    pub input: Input,
    /// Rows of its sequence before it in the step: the positions just below its own.
    pub before: usize,
    /// Whether the head computes it.
    pub wants_logits: bool,
    /// The row of a recurrent state that its sequence has.
    pub sequence: usize,
    /// Where the positions of its sequence lie; `None`: position `p` is row `p` of the cache.
    pub pages: Option<Pages>,
    /// What a draft reads in addition to the token; `None`: [`given_value`].
    pub given: Option<Arc<[f32]>>,
}

/// The pages of a sequence, by block of positions.
#[derive(Debug, Clone)]
pub struct Pages {
    pub pages: Arc<[u32]>,
    /// Positions of a page.
    pub rows: usize,
}

impl StepRow {
    /// The value of a column that a draft reads beside the token.
    pub fn given(&self, column: usize) -> f32 {
        match &self.given {
            Some(given) => given.get(column).copied().unwrap_or(0.0),
            None => given_value(self.position, column as u32),
        }
    }

    /// Where its history ends: the position of the first row of its sequence in the step.
    pub fn past(&self) -> u32 {
        self.position - self.before as u32
    }

    /// Positions from `position` on whose cache rows lie one after another.
    pub fn rows_together(&self, position: usize) -> usize {
        self.pages.as_ref().map_or(usize::MAX, |pages| pages.rows - position % pages.rows)
    }

    /// The cache row that holds `position` of its sequence.
    pub fn cache_row(&self, position: usize) -> usize {
        match &self.pages {
            Some(Pages { pages, rows }) => pages[position / rows] as usize * rows + position % rows,
            None => position,
        }
    }
}

/// `value` as `dtype` would keep it.
pub fn round_to(dtype: DType, value: f32) -> f32 {
    match dtype {
        DType::Bf16 => bf16::from_f32(value).to_f32(),
        _ => value,
    }
}

/// `value` as a cache of `dtype` would keep it; one in fp8 in units of `scale`.
pub fn round_to_cache(dtype: DType, scale: f32, value: f32) -> f32 {
    match dtype {
        DType::E4m3 => e4m3(to_e4m3(value / scale)) * scale,
        _ => round_to(dtype, value),
    }
}

/// What SMs share.
///
/// Exchange and output elements are relaxed atomics, so that even a schedule with a race executes without undefined
/// behaviour: it computes wrong values. Events order them.
pub struct Memory {
    pub exchange: Box<[AtomicU32]>,
    pub output: Box<[AtomicU32]>,
    pub caches: Vec<Cache>,
}

impl Memory {
    pub fn new(exchange: usize, output: usize, caches: Vec<Cache>) -> Memory {
        let words = |n: usize| (0..n).map(|_| AtomicU32::new(0)).collect();
        Memory { exchange: words(exchange), output: words(output), caches }
    }

    /// Values of the exchange arena, as the last step left them.
    pub fn exchanged(&self, at: usize, len: usize) -> Vec<f32> {
        let words = self.exchange.get(at..at + len).unwrap_or_default();
        words.iter().map(|word| f32::from_bits(word.load(Ordering::Relaxed))).collect()
    }
}

/// Keys or values of one layer, (positions, columns).
///
/// Rows are read as plain slices, because attention over a long history is bound by vector loads; hence the `unsafe`.
pub struct Cache {
    data: CacheData,
    cols: usize,
    rows: usize,
    /// In fp8, the scale of each KV head's columns; otherwise empty.
    scales: Vec<f32>,
}

enum CacheData {
    F32(Box<[UnsafeCell<f32>]>),
    Bf16(Box<[UnsafeCell<u16>]>),
    E4m3(Box<[UnsafeCell<u8>]>),
}

// SAFETY: elements change through atomic stores in `append` alone; `history` hands out plain references under the
// contract that no task appends to those rows while they live.
unsafe impl Sync for Cache {}

impl Cache {
    /// A cache of zeros. Pages are taken from the operating system when they are first touched. One in fp8 has a scale for each KV head,
    /// which are equal parts of its columns.
    pub fn new(dtype: DType, rows: usize, cols: usize, scales: Vec<f32>) -> Cache {
        let n = rows * cols;
        let data = match dtype {
            DType::Bf16 => CacheData::Bf16(cells(vec![0; n])),
            DType::E4m3 => CacheData::E4m3(cells(vec![0; n])),
            _ => CacheData::F32(cells(vec![0.0; n])),
        };
        Cache { data, cols, rows, scales }
    }

    pub fn dtype(&self) -> DType {
        match self.data {
            CacheData::F32(_) => DType::F32,
            CacheData::Bf16(_) => DType::Bf16,
            CacheData::E4m3(_) => DType::E4m3,
        }
    }

    /// What the values of a column are multiples of.
    pub fn scale(&self, column: usize) -> f32 {
        let head = column * self.scales.len() / self.cols.max(1);
        self.scales.get(head).copied().unwrap_or(1.0)
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Writes columns `first..` of row `row`, rounding to the cache's type.
    pub fn append(&self, row: usize, first: usize, values: &[f32]) {
        assert!(row < self.rows && first + values.len() <= self.cols, "row {row} of {} outside the cache", self.rows);
        let at = row * self.cols + first;
        match &self.data {
            CacheData::F32(cells) => {
                for (cell, value) in cells[at..].iter().zip(values) {
                    // SAFETY: the pointer is that of a live element, aligned for 4 bytes; concurrent accesses to it are
                    // other appends, which are atomic too (`history` excludes the rest).
                    unsafe { AtomicU32::from_ptr(cell.get().cast()) }.store(value.to_bits(), Ordering::Relaxed);
                }
            }
            CacheData::Bf16(cells) => {
                for (cell, value) in cells[at..].iter().zip(values) {
                    // SAFETY: as above, 2 bytes.
                    unsafe { AtomicU16::from_ptr(cell.get()) }
                        .store(bf16::from_f32(*value).to_bits(), Ordering::Relaxed);
                }
            }
            CacheData::E4m3(cells) => {
                for ((column, cell), value) in (first..).zip(&cells[at..]).zip(values) {
                    let code = to_e4m3(value / self.scale(column));
                    // SAFETY: as above, 1 byte.
                    unsafe { AtomicU8::from_ptr(cell.get()) }.store(code, Ordering::Relaxed);
                }
            }
        }
    }

    /// Copies columns `first..first + len` of rows to the end of `out`, in the cache's type.
    ///
    /// # Safety
    /// No thread appends to one of these rows meanwhile, and every append to one happened before.
    pub unsafe fn copy_rows(&self, rows: impl Iterator<Item = usize>, first: usize, len: usize, out: &mut Vec<u8>) {
        for row in rows {
            // SAFETY: as the caller promises.
            match unsafe { self.history(row, row + 1, first, len) } {
                HistoryRows::F32 { data, .. } => out.extend_from_slice(bytemuck::cast_slice(data)),
                HistoryRows::Bf16 { data, .. } => out.extend_from_slice(bytemuck::cast_slice(data)),
                HistoryRows::E4m3 { data, .. } => out.extend_from_slice(data),
                HistoryRows::Paged(_) | HistoryRows::Then { .. } => unreachable!("a cache lies in one of its types"),
            }
        }
    }

    /// Rows `start..end`, columns `first..first + len`, as [`HistoryRows`] counted from `start`.
    ///
    /// # Safety
    /// No thread appends to a row below `end` while the result lives, and every append to one happened before.
    pub unsafe fn history(&self, start: usize, end: usize, first: usize, len: usize) -> HistoryRows<'_> {
        assert!(end <= self.rows && first + len <= self.cols, "rows up to {end} outside the cache of {}", self.rows);
        let stride = self.cols;
        let range = if start < end { start * stride + first..(end - 1) * stride + first + len } else { 0..0 };
        match &self.data {
            CacheData::F32(cells) => {
                let cells = &cells[range];
                // SAFETY: `UnsafeCell<f32>` has the layout of `f32`; the caller excludes writes.
                let data = unsafe { std::slice::from_raw_parts(cells.as_ptr().cast(), cells.len()) };
                HistoryRows::F32 { data, stride }
            }
            CacheData::Bf16(cells) => {
                let cells = &cells[range];
                // SAFETY: as above for `u16`.
                let data = unsafe { std::slice::from_raw_parts(cells.as_ptr().cast(), cells.len()) };
                HistoryRows::Bf16 { data, stride }
            }
            CacheData::E4m3(cells) => {
                let cells = &cells[range];
                // SAFETY: as above for `u8`.
                let data = unsafe { std::slice::from_raw_parts(cells.as_ptr().cast(), cells.len()) };
                HistoryRows::E4m3 { data, stride, scale: self.scale(first) }
            }
        }
    }
}

/// Four bytes as a little-endian word; bytes that are missing are zeros.
pub fn word(bytes: &[u8]) -> u32 {
    let mut word = [0; 4];
    word[..bytes.len()].copy_from_slice(bytes);
    u32::from_le_bytes(word)
}

fn cells<T>(values: Vec<T>) -> Box<[UnsafeCell<T>]> {
    let raw = Box::into_raw(values.into_boxed_slice());
    // SAFETY: `UnsafeCell<T>` has the layout of `T`, and the box is given up by `into_raw` and taken over here. Mapping
    // over the elements instead would touch every page of a cache that may stay mostly unused.
    unsafe { Box::from_raw(raw as *mut [UnsafeCell<T>]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_keeps_rows_apart_and_rounds_to_its_type() {
        for dtype in [DType::F32, DType::Bf16] {
            let cache = Cache::new(dtype, 4, 6, vec![]);
            cache.append(1, 2, &[1.0, 1.0 + 1.0 / 256.0]);
            cache.append(2, 2, &[-2.0, 3.0]);
            // SAFETY: one thread.
            let rows = unsafe { cache.history(1, 3, 2, 2) };
            let mut row = [0.0; 2];
            rows.read(0, 2, &mut row);
            let second = if dtype == DType::Bf16 { 1.0 } else { 1.0 + 1.0 / 256.0 };
            assert_eq!(row, [1.0, second], "{dtype}");
            rows.read(1, 2, &mut row);
            assert_eq!(row, [-2.0, 3.0]);
        }
    }

    #[test]
    fn a_cache_in_fp8_keeps_codes_in_units_of_the_scale_of_their_head() {
        let cache = Cache::new(DType::E4m3, 2, 6, vec![1.0, 0.25, 2.0]);
        // Half-way to the even neighbour, beyond the largest code, below the smallest.
        cache.append(1, 0, &[17.0, 19.0, 1000.0, -0.25 * 0.001, 3.0, -5000.0]);
        let row = |first, len| {
            let mut row = [0.0; 2];
            // SAFETY: one thread.
            unsafe { cache.history(1, 2, first, len) }.read(0, len, &mut row);
            row
        };
        assert_eq!([row(0, 2), row(2, 2), row(4, 2)], [[16.0, 20.0], [112.0, -0.25 / 512.0], [3.0, -896.0]]);
        let mut bytes = vec![];
        // SAFETY: one thread.
        unsafe { cache.copy_rows(1..2, 2, 2, &mut bytes) };
        assert_eq!(bytes, [0x7e, 0x81]);
    }

    #[test]
    fn phases_take_turns() {
        let region = Region {
            buffer: BufferId(0),
            place: Place::Exchange,
            dtype: DType::I32,
            first: 4,
            len: 2,
            offset: 104,
            phases: 2,
            phase_stride: 50,
            row_stride: 10,
        };
        assert_eq!([region.at(0), region.at(1), region.at(2)], [104, 154, 104]);
        assert_eq!([region.row(0).at(1), region.row(3).at(1)], [154, 184]);
    }
}
