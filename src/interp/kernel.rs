//! Owns the inner loops of the fp32 path: dot products over granules and over cache rows, for AVX2 and for any CPU.
//!
//! Reduction orders are fixed: eight lanes a row, lane `l` takes elements `l, l + 8, ..` (fp32) or the pairs
//! `2l, 2l + 1` of every 16 (bf16), and the lanes are added as `((0+1)+(2+3)) + ((4+5)+(6+7))`. So a result depends on
//! the instruction set, which fuses multiply and add or does not, and on nothing else. AVX-512 changes none: it has two rows
//! of weights in a register, eight lanes each.
//!
//! `unsafe` here is for vector loads alone.

use crate::format::Code;
use crate::ir::layout::{GRANULE_BYTES, GRANULE_ROW_BYTES};
use crate::ir::op::UNIT_ROWS;

const GRANULE: usize = GRANULE_BYTES as usize;
const GRANULE_ROW: usize = GRANULE_ROW_BYTES as usize;
const ROWS: usize = UNIT_ROWS as usize;
/// k of one granule in bf16 and in fp32.
pub const GRANULE_K_BF16: usize = GRANULE_ROW / 2;
pub const GRANULE_K_F32: usize = GRANULE_ROW / 4;
const LANES: usize = 8;

/// Which instructions the loops are made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isa {
    /// Only constructed where [`Isa::detect`] found AVX2 and FMA, and `wide` where it found AVX-512 F, too.
    #[cfg(target_arch = "x86_64")]
    Avx2 {
        wide: bool,
    },
    Portable,
}

impl Isa {
    pub fn detect() -> Isa {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            return Isa::Avx2 { wide: is_x86_feature_detected!("avx512f") };
        }
        Isa::Portable
    }

    pub fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 { .. } => "avx2+fma",
            Isa::Portable => "portable",
        }
    }
}

/// Rows that do not lie one after another.
pub trait ReadRow {
    /// Rows of `dim` values from row `first` on as fp32, as many as `out` has room for.
    fn read_rows(&self, first: usize, dim: usize, out: &mut [f32]);
}

/// Keys or values in the order of their positions.
#[derive(Clone, Copy)]
pub enum HistoryRows<'a> {
    /// Row `i` is `data[i * stride .. i * stride + dim]`.
    F32 {
        data: &'a [f32],
        stride: usize,
    },
    Bf16 {
        data: &'a [u16],
        stride: usize,
    },
    /// Codes in units of `scale`.
    E4m3 {
        data: &'a [u8],
        stride: usize,
        scale: f32,
    },
    /// Rows of a cache, wherever its pages lie.
    Paged(&'a dyn ReadRow),
    /// `count` rows of `past`, then rows of the step, one after another.
    Then {
        past: &'a HistoryRows<'a>,
        count: usize,
        own: &'a [f32],
    },
}

impl HistoryRows<'_> {
    /// Rows of `dim` values from row `first` on as fp32, as many as `out` has room for. One call finds out once where all of
    /// them lie, because a history is read twice for each head.
    pub fn read(&self, first: usize, dim: usize, out: &mut [f32]) {
        match *self {
            HistoryRows::F32 { data, stride } => {
                for (i, row) in (first..).zip(out.chunks_exact_mut(dim)) {
                    row.copy_from_slice(&data[i * stride..][..dim]);
                }
            }
            HistoryRows::Bf16 { data, stride } => {
                for (i, row) in (first..).zip(out.chunks_exact_mut(dim)) {
                    for (o, &bits) in row.iter_mut().zip(&data[i * stride..][..dim]) {
                        *o = f32::from_bits(u32::from(bits) << 16);
                    }
                }
            }
            HistoryRows::E4m3 { data, stride, scale } => {
                let of_codes = Code::E4m3.values();
                for (i, row) in (first..).zip(out.chunks_exact_mut(dim)) {
                    for (o, &code) in row.iter_mut().zip(&data[i * stride..][..dim]) {
                        *o = of_codes[usize::from(code)] * scale;
                    }
                }
            }
            HistoryRows::Paged(rows) => rows.read_rows(first, dim, out),
            HistoryRows::Then { past, count, own } => {
                let of_past = out.len().min(count.saturating_sub(first) * dim);
                let (before, after) = out.split_at_mut(of_past);
                if !before.is_empty() {
                    past.read(first, dim, before);
                }
                if !after.is_empty() {
                    after.copy_from_slice(&own[first.saturating_sub(count) * dim..][..after.len()]);
                }
            }
        }
    }
}

/// Order in which [`unit_bf16`] wants its input: even elements of every 16, then the odd ones, so that a 32-bit load
/// holds one element of each half and widening is one shift or one mask.
pub fn permute_bf16(x: &mut [f32]) {
    for x in x.as_chunks_mut::<{ 2 * LANES }>().0 {
        let natural = *x;
        for l in 0..LANES {
            x[l] = natural[2 * l];
            x[l + LANES] = natural[2 * l + 1];
        }
    }
}

/// `W x` for the rows of one unit's granules, fp32; `w` is whole granules, `x` has `GRANULE_K_F32` values for each of their
/// PARTS. Sums of the parts of k are left apart: rows of part `p` are from `p ROWS / PARTS` on.
pub fn unit_f32<const PARTS: usize>(isa: Isa, w: &[u8], x: &[f32]) -> [f32; ROWS] {
    assert!(
        w.len().is_multiple_of(GRANULE) && x.len() >= w.len() / GRANULE * PARTS * GRANULE_K_F32,
        "input shorter than the unit"
    );
    match isa {
        // SAFETY: `Isa::Avx2` exists only where the features were detected.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 { .. } => unsafe { avx2::unit_f32::<PARTS>(w, x) },
        Isa::Portable => portable::unit_f32::<PARTS>(w, x),
    }
}

/// The same for bf16 rows; `x` in the order of [`permute_bf16`], `GRANULE_K_BF16` values for each part of a granule.
pub fn unit_bf16<const PARTS: usize>(isa: Isa, w: &[u8], x: &[f32]) -> [f32; ROWS] {
    assert!(
        w.len().is_multiple_of(GRANULE) && x.len() >= w.len() / GRANULE * PARTS * GRANULE_K_BF16,
        "input shorter than the unit"
    );
    match isa {
        // SAFETY: `Isa::Avx2` exists only where the features were detected.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 { .. } => unsafe { avx2::unit_bf16::<PARTS>(w, x) },
        Isa::Portable => portable::unit_bf16::<PARTS>(w, x),
    }
}

/// Step rows whose sums are held at once: as many accumulators as registers have room for.
pub const STEP_ROWS: usize = 8;

/// [`unit_f32`] or [`unit_bf16`] of up to [`STEP_ROWS`] inputs, row `j` of them from `x[j * k]` on. Each has the sums that it
/// has alone; the unit is read once.
pub fn unit_rows<const PARTS: usize>(isa: Isa, bf16: bool, w: &[u8], x: &[f32], k: usize, out: &mut [[f32; ROWS]]) {
    let granule_k = PARTS * if bf16 { GRANULE_K_BF16 } else { GRANULE_K_F32 };
    assert!(
        w.len().is_multiple_of(GRANULE) && k >= w.len() / GRANULE * granule_k && x.len() >= out.len() * k,
        "inputs shorter than the unit"
    );
    assert!(out.len() <= STEP_ROWS, "rows beyond the accumulators");
    #[cfg(target_arch = "x86_64")]
    if let Isa::Avx2 { wide } = isa {
        macro_rules! of_count {
            ($set:ident, $bf16:literal) => {
                match out.len() {
                    0 => {}
                    1 => $set::unit_rows::<PARTS, 1, $bf16>(w, x, k, out),
                    2 => $set::unit_rows::<PARTS, 2, $bf16>(w, x, k, out),
                    3 => $set::unit_rows::<PARTS, 3, $bf16>(w, x, k, out),
                    4 => $set::unit_rows::<PARTS, 4, $bf16>(w, x, k, out),
                    5 => $set::unit_rows::<PARTS, 5, $bf16>(w, x, k, out),
                    6 => $set::unit_rows::<PARTS, 6, $bf16>(w, x, k, out),
                    7 => $set::unit_rows::<PARTS, 7, $bf16>(w, x, k, out),
                    _ => $set::unit_rows::<PARTS, 8, $bf16>(w, x, k, out),
                }
            };
        }
        // SAFETY: `Isa::Avx2` exists only where the features were detected, and is wide only where AVX-512 F was.
        return unsafe {
            match (wide, bf16) {
                (false, true) => of_count!(avx2, true),
                (false, false) => of_count!(avx2, false),
                (true, true) => of_count!(avx512, true),
                (true, false) => of_count!(avx512, false),
            }
        };
    }
    for (x, out) in x.chunks_exact(k).zip(out) {
        *out = if bf16 { unit_bf16::<PARTS>(isa, w, x) } else { unit_f32::<PARTS>(isa, w, x) };
    }
}

/// `sum a_i b_i` over the common length.
pub fn dot(isa: Isa, a: &[f32], b: &[f32]) -> f32 {
    match isa {
        // SAFETY: `Isa::Avx2` exists only where the features were detected.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 { .. } => unsafe { avx2::dot(a, b) },
        Isa::Portable => portable::dot(a, b),
    }
}

/// Cache rows that are widened together and then used by every head: [`scores`] reduces eight accumulators at once,
/// and [`weigh`] loads and stores a sum once for eight rows.
const BLOCK: usize = 8;

/// `scores[h * rows + i] = q_h . k_i` for `q` of shape (H, dim) and `rows` keys; `block` is scratch.
pub fn scores(
    isa: Isa,
    q: &[f32],
    dim: usize,
    keys: HistoryRows<'_>,
    rows: usize,
    block: &mut Vec<f32>,
    scores: &mut [f32],
) {
    assert!(scores.len() >= q.len() / dim * rows, "room for every score");
    block.clear();
    block.resize(BLOCK * dim, 0.0);
    for first in (0..rows).step_by(BLOCK) {
        let count = BLOCK.min(rows - first);
        keys.read(first, dim, &mut block[..count * dim]);
        for (h, q) in q.chunks_exact(dim).enumerate() {
            let out = &mut scores[h * rows + first..][..count];
            match isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 { .. } if dim.is_multiple_of(LANES) => {
                    // SAFETY: `Isa::Avx2` exists only where the features were detected.
                    out.copy_from_slice(&unsafe { avx2::dots(q, block) }[..count])
                }
                _ => out.iter_mut().zip(block.chunks_exact(dim)).for_each(|(out, row)| *out = dot(isa, q, row)),
            }
        }
    }
}

/// `sums[h] += sum_i weights[h * rows + i] v_i` for `sums` of shape (H, dim); `block` is scratch.
pub fn weigh(
    isa: Isa,
    weights: &[f32],
    dim: usize,
    values: HistoryRows<'_>,
    rows: usize,
    block: &mut Vec<f32>,
    sums: &mut [f32],
) {
    block.clear();
    block.resize(BLOCK * dim, 0.0);
    for first in (0..rows).step_by(BLOCK) {
        let count = BLOCK.min(rows - first);
        values.read(first, dim, &mut block[..count * dim]);
        for (h, sums) in sums.chunks_exact_mut(dim).enumerate() {
            let weights = &weights[h * rows + first..][..count];
            match isa {
                // SAFETY: `Isa::Avx2` exists only where the features were detected.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 { .. } => unsafe { avx2::add_weighted(weights, block, sums) },
                Isa::Portable => {
                    for (weight, row) in weights.iter().zip(block.chunks_exact(dim)) {
                        sums.iter_mut().zip(row).for_each(|(s, v)| *s += weight * v);
                    }
                }
            }
        }
    }
}

/// `x_i = exp(x_i - most)`; returns their sum.
pub fn exp_sum(isa: Isa, most: f32, x: &mut [f32]) -> f32 {
    match isa {
        // SAFETY: `Isa::Avx2` exists only where the features were detected.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 { .. } => unsafe { avx2::exp_sum(most, x) },
        Isa::Portable => {
            let mut lanes = [0.0; LANES];
            for chunk in x.chunks_mut(LANES) {
                for (lane, x) in lanes.iter_mut().zip(chunk) {
                    *x = (*x - most).exp();
                    *lane += *x;
                }
            }
            portable::reduce(lanes)
        }
    }
}

mod portable {
    use super::{GRANULE, GRANULE_K_BF16, GRANULE_K_F32, GRANULE_ROW, LANES, ROWS};

    pub fn reduce(lanes: [f32; LANES]) -> f32 {
        let [a, b, c, d, e, f, g, h] = lanes;
        ((a + b) + (c + d)) + ((e + f) + (g + h))
    }

    pub fn unit_f32<const PARTS: usize>(w: &[u8], x: &[f32]) -> [f32; ROWS] {
        let mut acc = [[0.0; LANES]; ROWS];
        for (granule, x) in w.chunks_exact(GRANULE).zip(x.chunks_exact(GRANULE_K_F32 * PARTS)) {
            for (r, (acc, row)) in acc.iter_mut().zip(granule.chunks_exact(GRANULE_ROW)).enumerate() {
                let x = &x[r * PARTS / ROWS * GRANULE_K_F32..];
                for (half, x) in row.chunks_exact(4 * LANES).zip(x.chunks_exact(LANES)) {
                    for (l, w) in half.as_chunks::<4>().0.iter().enumerate() {
                        acc[l] += f32::from_le_bytes(*w) * x[l];
                    }
                }
            }
        }
        acc.map(reduce)
    }

    pub fn unit_bf16<const PARTS: usize>(w: &[u8], x: &[f32]) -> [f32; ROWS] {
        let mut acc = [[0.0; LANES]; ROWS];
        for (granule, x) in w.chunks_exact(GRANULE).zip(x.chunks_exact(GRANULE_K_BF16 * PARTS)) {
            for (r, (acc, row)) in acc.iter_mut().zip(granule.chunks_exact(GRANULE_ROW)).enumerate() {
                let x = &x[r * PARTS / ROWS * GRANULE_K_BF16..];
                for (half, x) in row.chunks_exact(4 * LANES).zip(x.chunks_exact(2 * LANES)) {
                    for (l, pair) in half.as_chunks::<4>().0.iter().enumerate() {
                        let pair = u32::from_le_bytes(*pair);
                        acc[l] += f32::from_bits(pair << 16) * x[l];
                        acc[l] += f32::from_bits(pair & 0xffff_0000) * x[l + LANES];
                    }
                }
            }
        }
        acc.map(reduce)
    }

    pub fn dot(a: &[f32], b: &[f32]) -> f32 {
        let mut lanes = [0.0; LANES];
        let (a, b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
        let (a_rest, b_rest) = (a.remainder(), b.remainder());
        for (a, b) in a.zip(b) {
            for l in 0..LANES {
                lanes[l] += a[l] * b[l];
            }
        }
        for (lane, (a, b)) in lanes.iter_mut().zip(a_rest.iter().zip(b_rest)) {
            *lane += a * b;
        }
        reduce(lanes)
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::{BLOCK, GRANULE, GRANULE_K_BF16, GRANULE_K_F32, GRANULE_ROW, LANES, ROWS};
    use std::arch::x86_64::*;

    /// Bytes ahead of the current granule that are asked for: the hardware prefetcher stops at 4 KiB page ends.
    const PREFETCH_AHEAD_BYTES: usize = 2048;

    /// The sums of eight accumulators, each in the order the head of the file fixes.
    #[target_feature(enable = "avx2,fma")]
    pub fn reduce(acc: &[__m256; ROWS]) -> [f32; ROWS] {
        let quad = |a: usize| {
            let sums = _mm256_hadd_ps(_mm256_hadd_ps(acc[a], acc[a + 1]), _mm256_hadd_ps(acc[a + 2], acc[a + 3]));
            _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps::<1>(sums))
        };
        let mut out = [0.0; ROWS];
        // SAFETY: `out` is eight floats, written in two halves of four.
        unsafe {
            _mm_storeu_ps(out.as_mut_ptr(), quad(0));
            _mm_storeu_ps(out.as_mut_ptr().add(4), quad(4));
        }
        out
    }

    #[target_feature(enable = "avx2,fma")]
    fn sum(acc: __m256) -> f32 {
        let pairs = _mm256_hadd_ps(acc, acc);
        let quads = _mm256_hadd_ps(pairs, pairs);
        _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(quads), _mm256_extractf128_ps::<1>(quads)))
    }

    #[target_feature(enable = "avx2,fma")]
    pub fn unit_f32<const PARTS: usize>(w: &[u8], x: &[f32]) -> [f32; ROWS] {
        let mut acc = [_mm256_setzero_ps(); ROWS];
        for (granule, x) in w.chunks_exact(GRANULE).zip(x.chunks_exact(GRANULE_K_F32 * PARTS)) {
            for (p, x) in x.chunks_exact(GRANULE_K_F32).enumerate() {
                // SAFETY: a granule is 8 rows of 64 bytes, `x` here 16 floats; every load is unaligned and inside. A prefetch
                // never faults, and `wrapping_add` makes no claim about where it points.
                unsafe {
                    let (x0, x1) = (_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(LANES)));
                    for (r, acc) in acc.iter_mut().enumerate().skip(p * (ROWS / PARTS)).take(ROWS / PARTS) {
                        let row = granule.as_ptr().add(r * GRANULE_ROW);
                        _mm_prefetch::<_MM_HINT_T0>(row.wrapping_add(PREFETCH_AHEAD_BYTES).cast());
                        let row = row.cast::<f32>();
                        *acc = _mm256_fmadd_ps(_mm256_loadu_ps(row), x0, *acc);
                        *acc = _mm256_fmadd_ps(_mm256_loadu_ps(row.add(LANES)), x1, *acc);
                    }
                }
            }
        }
        reduce(&acc)
    }

    #[target_feature(enable = "avx2,fma")]
    pub fn unit_bf16<const PARTS: usize>(w: &[u8], x: &[f32]) -> [f32; ROWS] {
        let high = _mm256_set1_epi32(0xffff_0000_u32 as i32);
        let mut acc = [_mm256_setzero_ps(); ROWS];
        for (granule, x) in w.chunks_exact(GRANULE).zip(x.chunks_exact(GRANULE_K_BF16 * PARTS)) {
            for (p, x) in x.chunks_exact(GRANULE_K_BF16).enumerate() {
                // SAFETY: a granule is 8 rows of 64 bytes, `x` here 32 floats; every load is unaligned and inside. A prefetch
                // never faults, and `wrapping_add` makes no claim about where it points.
                unsafe {
                    let x0 = _mm256_loadu_ps(x.as_ptr());
                    let x1 = _mm256_loadu_ps(x.as_ptr().add(LANES));
                    let x2 = _mm256_loadu_ps(x.as_ptr().add(2 * LANES));
                    let x3 = _mm256_loadu_ps(x.as_ptr().add(3 * LANES));
                    for (r, acc) in acc.iter_mut().enumerate().skip(p * (ROWS / PARTS)).take(ROWS / PARTS) {
                        let row = granule.as_ptr().add(r * GRANULE_ROW);
                        _mm_prefetch::<_MM_HINT_T0>(row.wrapping_add(PREFETCH_AHEAD_BYTES).cast());
                        let row = row.cast::<__m256i>();
                        let (a, b) = (_mm256_loadu_si256(row), _mm256_loadu_si256(row.add(1)));
                        *acc = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(a)), x0, *acc);
                        *acc = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(a, high)), x1, *acc);
                        *acc = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(b)), x2, *acc);
                        *acc = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(b, high)), x3, *acc);
                    }
                }
            }
        }
        reduce(&acc)
    }

    /// Granules whose inputs stay in the first cache: 16 KiB of bf16's for eight rows.
    pub const BLOCK_GRANULES: usize = 16;

    /// One row of weights after another over a block of k, against all inputs: a weight is widened once. The sums of each
    /// input are those of [`unit_bf16`] and [`unit_f32`], in their order.
    #[target_feature(enable = "avx2,fma")]
    pub fn unit_rows<const PARTS: usize, const N: usize, const BF16: bool>(
        w: &[u8],
        x: &[f32],
        k: usize,
        out: &mut [[f32; ROWS]],
    ) {
        let granule_k = if BF16 { GRANULE_K_BF16 } else { GRANULE_K_F32 };
        let high = _mm256_set1_epi32(0xffff_0000_u32 as i32);
        let granules = w.len() / GRANULE;
        assert!(x.len() >= N * k && k >= granules * PARTS * granule_k && out.len() >= N, "whole inputs");
        let mut sums = [[_mm256_setzero_ps(); ROWS]; N];
        for block in (0..granules).step_by(BLOCK_GRANULES) {
            let end = granules.min(block + BLOCK_GRANULES);
            for r in 0..ROWS {
                let part = r / (ROWS / PARTS);
                let mut acc = [_mm256_setzero_ps(); N];
                acc.iter_mut().zip(&sums).for_each(|(acc, sums)| *acc = sums[r]);
                for g in block..end {
                    // SAFETY: granule `g` is 8 rows of 64 bytes inside `w`; input `n` has `k` values from `n * k` on, and the
                    // values of part `part` of granule `g` lie inside them. Loads are unaligned.
                    unsafe {
                        let row = w.as_ptr().add(g * GRANULE + r * GRANULE_ROW);
                        let x = x.as_ptr().add((g * PARTS + part) * granule_k);
                        // A pass reads every eighth line of weights, which the prefetchers of a core do not follow. The line
                        // of the next block may lie after the weights: a hint reads nothing.
                        _mm_prefetch::<_MM_HINT_T0>(row.wrapping_add(BLOCK_GRANULES * GRANULE).cast());
                        if BF16 {
                            let row = row.cast::<__m256i>();
                            let (a, b) = (_mm256_loadu_si256(row), _mm256_loadu_si256(row.add(1)));
                            let w0 = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(a));
                            let w1 = _mm256_castsi256_ps(_mm256_and_si256(a, high));
                            let w2 = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(b));
                            let w3 = _mm256_castsi256_ps(_mm256_and_si256(b, high));
                            for (n, acc) in acc.iter_mut().enumerate() {
                                let x = x.add(n * k);
                                *acc = _mm256_fmadd_ps(w0, _mm256_loadu_ps(x), *acc);
                                *acc = _mm256_fmadd_ps(w1, _mm256_loadu_ps(x.add(LANES)), *acc);
                                *acc = _mm256_fmadd_ps(w2, _mm256_loadu_ps(x.add(2 * LANES)), *acc);
                                *acc = _mm256_fmadd_ps(w3, _mm256_loadu_ps(x.add(3 * LANES)), *acc);
                            }
                        } else {
                            let row = row.cast::<f32>();
                            let (a, b) = (_mm256_loadu_ps(row), _mm256_loadu_ps(row.add(LANES)));
                            for (n, acc) in acc.iter_mut().enumerate() {
                                let x = x.add(n * k);
                                *acc = _mm256_fmadd_ps(a, _mm256_loadu_ps(x), *acc);
                                *acc = _mm256_fmadd_ps(b, _mm256_loadu_ps(x.add(LANES)), *acc);
                            }
                        }
                    }
                }
                sums.iter_mut().zip(&acc).for_each(|(sums, acc)| sums[r] = *acc);
            }
        }
        for (out, sums) in out.iter_mut().zip(&sums) {
            *out = reduce(sums);
        }
    }

    #[target_feature(enable = "avx2,fma")]
    pub fn dot(a: &[f32], b: &[f32]) -> f32 {
        let len = a.len().min(b.len());
        let whole = len / LANES * LANES;
        let mut acc = _mm256_setzero_ps();
        for i in (0..whole).step_by(LANES) {
            // SAFETY: `i + 8 <= whole`, which is at most the length of both.
            unsafe {
                acc = _mm256_fmadd_ps(_mm256_loadu_ps(a.as_ptr().add(i)), _mm256_loadu_ps(b.as_ptr().add(i)), acc);
            }
        }
        if whole < len {
            let (mut a_rest, mut b_rest) = ([0.0; LANES], [0.0; LANES]);
            a_rest[..len - whole].copy_from_slice(&a[whole..len]);
            b_rest[..len - whole].copy_from_slice(&b[whole..len]);
            // SAFETY: both are eight floats.
            unsafe {
                acc = _mm256_fmadd_ps(_mm256_loadu_ps(a_rest.as_ptr()), _mm256_loadu_ps(b_rest.as_ptr()), acc);
            }
        }
        sum(acc)
    }

    /// `q . row` for eight rows of `q.len()` values, which is a multiple of eight.
    #[target_feature(enable = "avx2,fma")]
    pub fn dots(q: &[f32], block: &[f32]) -> [f32; BLOCK] {
        let dim = q.len();
        assert!(block.len() >= BLOCK * dim && dim.is_multiple_of(LANES), "eight whole rows");
        let mut acc = [_mm256_setzero_ps(); BLOCK];
        for d in (0..dim).step_by(LANES) {
            // SAFETY: `d + 8 <= dim`, and row `r` ends at `(r + 1) * dim`, inside the block.
            unsafe {
                let q = _mm256_loadu_ps(q.as_ptr().add(d));
                for (r, acc) in acc.iter_mut().enumerate() {
                    *acc = _mm256_fmadd_ps(_mm256_loadu_ps(block.as_ptr().add(r * dim + d)), q, *acc);
                }
            }
        }
        reduce(&acc)
    }

    /// `sums += sum_i weights_i row_i`, row after row.
    #[target_feature(enable = "avx2,fma")]
    pub fn add_weighted(weights: &[f32], block: &[f32], sums: &mut [f32]) {
        let dim = sums.len();
        assert!(block.len() >= weights.len() * dim, "a row for every weight");
        let whole = dim / LANES * LANES;
        for d in (0..whole).step_by(LANES) {
            // SAFETY: `d + 8 <= dim`, and row `i` ends at `(i + 1) * dim`, inside the block.
            unsafe {
                let at = sums.as_mut_ptr().add(d);
                let mut acc = _mm256_loadu_ps(at);
                for (i, weight) in weights.iter().enumerate() {
                    let row = _mm256_loadu_ps(block.as_ptr().add(i * dim + d));
                    acc = _mm256_fmadd_ps(_mm256_set1_ps(*weight), row, acc);
                }
                _mm256_storeu_ps(at, acc);
            }
        }
        for d in whole..dim {
            for (i, weight) in weights.iter().enumerate() {
                sums[d] = weight.mul_add(block[i * dim + d], sums[d]);
            }
        }
    }

    /// `exp(x)` for `x <= 0`: `2^n p(r)` with `r = x - n ln 2` in two steps and the minimax polynomial of Cephes `expf`
    /// (S. Moshier), relative error under 2e-7. Underflows to 0 at -87.
    #[target_feature(enable = "avx2,fma")]
    fn exp(x: __m256) -> __m256 {
        let set = |v: f32| _mm256_set1_ps(v);
        let tiny = _mm256_cmp_ps::<_CMP_LT_OQ>(x, set(-87.0));
        let n = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(_mm256_mul_ps(
            x,
            set(std::f32::consts::LOG2_E),
        ));
        let r = _mm256_fnmadd_ps(n, set(0.693_359_4), x);
        let r = _mm256_fnmadd_ps(n, set(-2.121_944_4e-4), r);
        let mut p = set(1.987_569_2e-4);
        for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
            p = _mm256_fmadd_ps(p, r, set(c));
        }
        let p = _mm256_add_ps(_mm256_fmadd_ps(p, _mm256_mul_ps(r, r), r), set(1.0));
        let power = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)));
        _mm256_andnot_ps(tiny, _mm256_mul_ps(p, _mm256_castsi256_ps(power)))
    }

    #[target_feature(enable = "avx2,fma")]
    pub fn exp_sum(most: f32, x: &mut [f32]) -> f32 {
        let shift = _mm256_set1_ps(most);
        let mut acc = _mm256_setzero_ps();
        for x in x.chunks_mut(LANES) {
            // Missing lanes are far below the maximum, so their weight is exactly 0.
            let mut lanes = [f32::NEG_INFINITY; LANES];
            lanes[..x.len()].copy_from_slice(x);
            // SAFETY: `lanes` is eight floats.
            unsafe {
                let weights = exp(_mm256_sub_ps(_mm256_loadu_ps(lanes.as_ptr()), shift));
                acc = _mm256_add_ps(acc, weights);
                _mm256_storeu_ps(lanes.as_mut_ptr(), weights);
            }
            x.copy_from_slice(&lanes[..x.len()]);
        }
        sum(acc)
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use super::avx2::{BLOCK_GRANULES, reduce};
    use super::{GRANULE, GRANULE_K_BF16, GRANULE_K_F32, GRANULE_ROW, LANES, ROWS};
    use std::arch::x86_64::*;

    /// Rows of weights in a register.
    const PAIR: usize = 2;

    /// [`super::avx2::unit_rows`] with two rows of weights in a register, which halves the loads of inputs: each half of an
    /// accumulator has the sums of a row, in the order that they have there.
    #[target_feature(enable = "avx512f,avx2,fma")]
    pub fn unit_rows<const PARTS: usize, const N: usize, const BF16: bool>(
        w: &[u8],
        x: &[f32],
        k: usize,
        out: &mut [[f32; ROWS]],
    ) {
        let granule_k = if BF16 { GRANULE_K_BF16 } else { GRANULE_K_F32 };
        let high = _mm512_set1_epi32(0xffff_0000_u32 as i32);
        let granules = w.len() / GRANULE;
        assert!(x.len() >= N * k && k >= granules * PARTS * granule_k && out.len() >= N, "whole inputs");
        // Both halves have the same eight inputs.
        let both = |x: *const f32| {
            // SAFETY: callers pass the place of eight values inside `x`. The load is unaligned.
            let eight = unsafe { _mm256_loadu_ps(x) };
            _mm512_castpd_ps(_mm512_broadcast_f64x4(_mm256_castps_pd(eight)))
        };
        let mut sums = [[_mm512_setzero_ps(); ROWS / PAIR]; N];
        for block in (0..granules).step_by(BLOCK_GRANULES) {
            let end = granules.min(block + BLOCK_GRANULES);
            for pair in 0..ROWS / PAIR {
                // Two neighbours have the same part of k: there are four parts at most.
                let part = pair * PAIR / (ROWS / PARTS);
                let mut acc = [_mm512_setzero_ps(); N];
                acc.iter_mut().zip(&sums).for_each(|(acc, sums)| *acc = sums[pair]);
                for g in block..end {
                    // SAFETY: granule `g` is 8 rows of 64 bytes inside `w`; input `n` has `k` values from `n * k` on, and the
                    // values of part `part` of granule `g` lie inside them. Loads are unaligned.
                    unsafe {
                        let row = w.as_ptr().add(g * GRANULE + pair * PAIR * GRANULE_ROW);
                        let x = x.as_ptr().add((g * PARTS + part) * granule_k);
                        // As in `avx2::unit_rows`: lines of the next block, which may lie after the weights.
                        let next = row.wrapping_add(BLOCK_GRANULES * GRANULE);
                        _mm_prefetch::<_MM_HINT_T0>(next.cast());
                        _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(GRANULE_ROW).cast());
                        let (this, other) = (_mm512_loadu_ps(row.cast()), _mm512_loadu_ps(row.add(GRANULE_ROW).cast()));
                        // The first halves of both rows, then the second ones.
                        let a = _mm512_shuffle_f32x4::<0b01_00_01_00>(this, other);
                        let b = _mm512_shuffle_f32x4::<0b11_10_11_10>(this, other);
                        if BF16 {
                            let (a, b) = (_mm512_castps_si512(a), _mm512_castps_si512(b));
                            let w0 = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(a));
                            let w1 = _mm512_castsi512_ps(_mm512_and_si512(a, high));
                            let w2 = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(b));
                            let w3 = _mm512_castsi512_ps(_mm512_and_si512(b, high));
                            for (n, acc) in acc.iter_mut().enumerate() {
                                let x = x.add(n * k);
                                *acc = _mm512_fmadd_ps(w0, both(x), *acc);
                                *acc = _mm512_fmadd_ps(w1, both(x.add(LANES)), *acc);
                                *acc = _mm512_fmadd_ps(w2, both(x.add(2 * LANES)), *acc);
                                *acc = _mm512_fmadd_ps(w3, both(x.add(3 * LANES)), *acc);
                            }
                        } else {
                            for (n, acc) in acc.iter_mut().enumerate() {
                                let x = x.add(n * k);
                                *acc = _mm512_fmadd_ps(a, both(x), *acc);
                                *acc = _mm512_fmadd_ps(b, both(x.add(LANES)), *acc);
                            }
                        }
                    }
                }
                sums.iter_mut().zip(&acc).for_each(|(sums, acc)| sums[pair] = *acc);
            }
        }
        for (out, sums) in out.iter_mut().zip(&sums) {
            let mut rows = [_mm256_setzero_ps(); ROWS];
            for (rows, sums) in rows.chunks_exact_mut(PAIR).zip(sums) {
                rows[0] = _mm512_castps512_ps256(*sums);
                rows[1] = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(*sums)));
            }
            *out = reduce(&rows);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interp::synthetic::signed;
    use crate::random::Random;
    use half::bf16;

    fn isas() -> Vec<Isa> {
        let mut isas = vec![Isa::Portable];
        #[cfg(target_arch = "x86_64")]
        if let Isa::Avx2 { wide } = Isa::detect() {
            isas.extend([false, true].into_iter().filter(|asked| wide || !asked).map(|wide| Isa::Avx2 { wide }));
        }
        isas
    }

    fn close(a: f32, b: f64, scale: f64) {
        assert!((f64::from(a) - b).abs() <= 1e-6 * scale, "{a} against {b}, scale {scale}");
    }

    /// Units of `ROWS / PARTS` rows.
    fn units_agree<const PARTS: usize>(random: &mut Random) {
        let unit_rows = ROWS / PARTS;
        for granules in [1, 2, 7, 18] {
            let pieces = granules * PARTS;
            let (k, k2) = (pieces * GRANULE_K_F32, pieces * GRANULE_K_BF16);
            let mut value = || signed(random.word());
            let rows: Vec<Vec<f32>> = (0..unit_rows).map(|_| (0..k).map(|_| value()).collect()).collect();
            let narrow: Vec<Vec<bf16>> =
                (0..unit_rows).map(|_| (0..k2).map(|_| bf16::from_f32(value())).collect()).collect();
            let x: Vec<f32> = (0..k2).map(|_| value()).collect();
            let (mut w32, mut w16) = (vec![], vec![]);
            for p in 0..pieces {
                for r in 0..unit_rows {
                    w32.extend(rows[r][p * GRANULE_K_F32..][..GRANULE_K_F32].iter().flat_map(|v| v.to_le_bytes()));
                    w16.extend(narrow[r][p * GRANULE_K_BF16..][..GRANULE_K_BF16].iter().flat_map(|v| v.to_le_bytes()));
                }
            }
            let mut permuted = x.clone();
            permute_bf16(&mut permuted);
            for isa in isas() {
                let (y32, y16) = (unit_f32::<PARTS>(isa, &w32, &x), unit_bf16::<PARTS>(isa, &w16, &permuted));
                for r in 0..unit_rows {
                    let of = |sums: &[f32; ROWS]| sums.iter().skip(r).step_by(unit_rows).sum::<f32>();
                    let want: f64 = rows[r].iter().zip(&x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
                    close(of(&y32), want, k as f64);
                    let want: f64 = narrow[r].iter().zip(&x).map(|(w, x)| w.to_f64() * f64::from(*x)).sum();
                    close(of(&y16), want, k2 as f64);
                }
            }
        }
    }

    #[test]
    fn units_agree_with_a_plain_sum() {
        let mut random = Random::new(1);
        units_agree::<1>(&mut random);
        units_agree::<2>(&mut random);
        units_agree::<4>(&mut random);
    }

    /// Several inputs of one unit have the bits that each has alone.
    #[test]
    fn rows_of_a_step_have_the_sums_that_they_have_alone() {
        fn agree<const PARTS: usize>(random: &mut Random) {
            for (granules, bf16) in [(1, true), (19, true), (19, false)] {
                let k = granules * PARTS * if bf16 { GRANULE_K_BF16 } else { GRANULE_K_F32 } + 5;
                let mut values = |n: usize| -> Vec<f32> { (0..n).map(|_| signed(random.word())).collect() };
                let weights = values(granules * GRANULE / 4);
                let w: Vec<u8> = match bf16 {
                    true => weights
                        .iter()
                        .flat_map(|v| [bf16::from_f32(*v), bf16::from_f32(-v)])
                        .flat_map(|v| v.to_le_bytes())
                        .collect(),
                    false => weights.iter().flat_map(|v| v.to_le_bytes()).collect(),
                };
                let x = values(STEP_ROWS * k);
                for isa in isas() {
                    for n in 1..=STEP_ROWS {
                        let mut out = [[0.0; ROWS]; STEP_ROWS];
                        unit_rows::<PARTS>(isa, bf16, &w, &x, k, &mut out[..n]);
                        for (out, x) in out[..n].iter().zip(x.chunks_exact(k)) {
                            let alone =
                                if bf16 { unit_bf16::<PARTS>(isa, &w, x) } else { unit_f32::<PARTS>(isa, &w, x) };
                            assert_eq!(out.map(f32::to_bits), alone.map(f32::to_bits), "{n} rows, {isa:?}");
                        }
                    }
                }
            }
        }
        let mut random = Random::new(3);
        agree::<1>(&mut random);
        agree::<2>(&mut random);
        agree::<4>(&mut random);
    }

    #[test]
    fn attention_loops_agree_with_a_plain_sum_at_odd_sizes() {
        let mut random = Random::new(2);
        for (dim, rows, heads, stride) in [(2, 1, 1, 2), (10, 5, 3, 30), (64, 33, 2, 64), (80, 16, 4, 160)] {
            let data: Vec<f32> = (0..rows * stride).map(|_| bf16::from_f32(signed(random.word())).to_f32()).collect();
            let narrow: Vec<u16> = data.iter().map(|&v| bf16::from_f32(v).to_bits()).collect();
            let q: Vec<f32> = (0..heads * dim).map(|_| signed(random.word())).collect();
            let weights: Vec<f32> = (0..heads * rows).map(|_| signed(random.word())).collect();
            for isa in isas() {
                for view in [HistoryRows::F32 { data: &data, stride }, HistoryRows::Bf16 { data: &narrow, stride }] {
                    let (mut block, mut got) = (vec![], vec![0.0; heads * rows]);
                    scores(isa, &q, dim, view, rows, &mut block, &mut got);
                    let mut sums = vec![1.0; heads * dim];
                    weigh(isa, &weights, dim, view, rows, &mut block, &mut sums);
                    for h in 0..heads {
                        for i in 0..rows {
                            let want: f64 =
                                (0..dim).map(|d| f64::from(q[h * dim + d]) * f64::from(data[i * stride + d])).sum();
                            close(got[h * rows + i], want, dim as f64);
                        }
                        for d in 0..dim {
                            let terms = |i: usize| f64::from(weights[h * rows + i]) * f64::from(data[i * stride + d]);
                            close(sums[h * dim + d], 1.0 + (0..rows).map(terms).sum::<f64>(), 1.0 + rows as f64);
                        }
                    }
                }
            }
        }
    }
    #[test]
    fn exponentials_are_exact_to_fp32_and_end_at_zero() {
        for isa in isas() {
            let mut x: Vec<f32> = (0..8603).map(|i| 3.0 - i as f32 * 0.01).collect();
            let wanted: Vec<f64> = x.iter().map(|x| (f64::from(*x) - 3.0).exp()).collect();
            let sum = exp_sum(isa, 3.0, &mut x);
            for (got, want) in x.iter().zip(&wanted) {
                assert!((f64::from(*got) - want).abs() <= 3e-7 * want, "{got} against {want}");
            }
            close(sum, wanted.iter().sum(), 100.0);
            let mut far = [-200.0, f32::NEG_INFINITY, -88.5, 0.0];
            assert_eq!(exp_sum(isa, 0.0, &mut far), 1.0 + far[2]);
            assert_eq!([far[0], far[1], far[3]], [0.0, 0.0, 1.0]);
            let mut poisoned = [0.0, f32::NAN];
            assert!(exp_sum(isa, 0.0, &mut poisoned).is_nan(), "a NaN stays visible");
        }
    }
}
