//! Owns the two arithmetics of the interpreter: fp32 with the vector loops of `kernel`, and f64 with plain loops, which
//! is what the first is judged by. Formulas are written once, in `ops`, over [`Real`].

use super::kernel::{self, HistoryRows, Isa};
use crate::dtype::DType;
use crate::ir::layout::GRANULE_ROW_BYTES;
use crate::ir::op::UNIT_ROWS;
use crate::model::graph::{Act, ClampedSwiglu};
use std::fmt::Debug;
use std::ops::{Add, Div, Mul, Sub};

pub trait Real:
    Copy
    + Debug
    + Default
    + PartialOrd
    + Send
    + Sync
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + 'static
{
    const NEG_INFINITY: Self;

    fn of(value: f32) -> Self;
    fn of_f64(value: f64) -> Self;
    fn to_f32(self) -> f32;
    fn exp(self) -> Self;
    fn tanh(self) -> Self;
    fn sqrt(self) -> Self;
    fn erf(self) -> Self;

    /// `sum a_i b_i`
    fn dot(isa: Isa, a: &[Self], b: &[Self]) -> Self;

    /// Puts the input of [`units`](Self::units) into the order that its loops read, in place; `x` is padded with zeros to
    /// whole granules of `dtype`.
    fn stage(dtype: DType, x: &mut [Self]);

    /// `y = W x` for whole units of `rows` rows of weights of type `dtype` and `count` staged inputs, one after another in
    /// `x`; `y` has as many values a unit, all units of an input one after another.
    fn units(isa: Isa, dtype: DType, rows: usize, w: &[u8], count: usize, x: &[Self], y: &mut [Self]);

    /// `scores[h * rows + i] = q_h . k_i` for heads of `dim` values; `block` is scratch.
    fn scores(
        isa: Isa,
        q: &[Self],
        dim: usize,
        keys: HistoryRows<'_>,
        rows: usize,
        block: &mut Vec<f32>,
        scores: &mut [Self],
    );

    /// `sums[h] += sum_i weights[h * rows + i] v_i` for heads of `dim` values; `block` is scratch.
    fn weigh(
        isa: Isa,
        weights: &[Self],
        dim: usize,
        values: HistoryRows<'_>,
        rows: usize,
        block: &mut Vec<f32>,
        sums: &mut [Self],
    );

    /// `x_i = exp(x_i - most)`; returns their sum.
    fn exp_sum(isa: Isa, most: Self, x: &mut [Self]) -> Self;
}

/// k of one granule.
pub fn granule_k(dtype: DType) -> usize {
    GRANULE_ROW_BYTES as usize / dtype.bytes()
}

/// Bytes of one unit of `rows` rows whose input is `x` padded to whole granules.
fn unit_bytes(dtype: DType, rows: usize, x_len: usize) -> usize {
    x_len / granule_k(dtype) * rows * GRANULE_ROW_BYTES as usize
}

/// Rows of units of `y.len()` rows from sums of each part of k.
fn add_parts(sums: &[f32; UNIT_ROWS as usize], y: &mut [f32]) {
    y.fill(0.0);
    for part in sums.chunks_exact(y.len()) {
        y.iter_mut().zip(part).for_each(|(y, sum)| *y += sum);
    }
}

impl Real for f32 {
    const NEG_INFINITY: f32 = f32::NEG_INFINITY;

    fn of(value: f32) -> f32 {
        value
    }

    fn of_f64(value: f64) -> f32 {
        value as f32
    }

    fn to_f32(self) -> f32 {
        self
    }

    fn exp(self) -> f32 {
        f32::exp(self)
    }

    fn tanh(self) -> f32 {
        f32::tanh(self)
    }

    fn sqrt(self) -> f32 {
        f32::sqrt(self)
    }

    /// Abramowitz and Stegun 7.1.26, absolute error under 1.5e-7: about one step of fp32 at 1.
    fn erf(self) -> f32 {
        let x = self.abs();
        let t = 1.0 / (1.0 + 0.327_591_1 * x);
        let poly = t * (0.254_829_6 + t * (-0.284_496_74 + t * (1.421_413_8 + t * (-1.453_152_1 + t * 1.061_405_4))));
        (1.0 - poly * f32::exp(-x * x)).copysign(self)
    }

    fn dot(isa: Isa, a: &[f32], b: &[f32]) -> f32 {
        kernel::dot(isa, a, b)
    }

    fn stage(dtype: DType, x: &mut [f32]) {
        if dtype == DType::Bf16 {
            kernel::permute_bf16(x);
        }
    }

    fn units(isa: Isa, dtype: DType, rows: usize, w: &[u8], count: usize, x: &[f32], y: &mut [f32]) {
        let (k, each) = (x.len() / count.max(1), y.len() / count.max(1));
        if count > 1 {
            let of_rows = match UNIT_ROWS as usize / rows {
                1 => kernel::unit_rows::<1>,
                2 => kernel::unit_rows::<2>,
                _ => kernel::unit_rows::<4>,
            };
            for (u, w) in w.chunks_exact(unit_bytes(dtype, rows, k)).enumerate() {
                for first in (0..count).step_by(kernel::STEP_ROWS) {
                    let mut sums = [[0.0; UNIT_ROWS as usize]; kernel::STEP_ROWS];
                    let sums = &mut sums[..kernel::STEP_ROWS.min(count - first)];
                    of_rows(isa, dtype == DType::Bf16, w, &x[first * k..], k, sums);
                    for (row, sums) in (first..).zip(sums.iter()) {
                        add_parts(sums, &mut y[row * each + u * rows..][..rows]);
                    }
                }
            }
            return;
        }
        let units = w.chunks_exact(unit_bytes(dtype, rows, x.len())).zip(y.chunks_exact_mut(rows));
        let unit = match (dtype, UNIT_ROWS as usize / rows) {
            (DType::Bf16, 1) => kernel::unit_bf16::<1>,
            (DType::Bf16, 2) => kernel::unit_bf16::<2>,
            (DType::Bf16, _) => kernel::unit_bf16::<4>,
            (_, 1) => kernel::unit_f32::<1>,
            (_, 2) => kernel::unit_f32::<2>,
            (_, _) => kernel::unit_f32::<4>,
        };
        units.for_each(|(w, y)| add_parts(&unit(isa, w, x), y));
    }

    fn scores(
        isa: Isa,
        q: &[f32],
        dim: usize,
        keys: HistoryRows<'_>,
        rows: usize,
        block: &mut Vec<f32>,
        scores: &mut [f32],
    ) {
        kernel::scores(isa, q, dim, keys, rows, block, scores);
    }

    fn weigh(
        isa: Isa,
        weights: &[f32],
        dim: usize,
        values: HistoryRows<'_>,
        rows: usize,
        block: &mut Vec<f32>,
        sums: &mut [f32],
    ) {
        kernel::weigh(isa, weights, dim, values, rows, block, sums);
    }

    fn exp_sum(isa: Isa, most: f32, x: &mut [f32]) -> f32 {
        kernel::exp_sum(isa, most, x)
    }
}

impl Real for f64 {
    const NEG_INFINITY: f64 = f64::NEG_INFINITY;

    fn of(value: f32) -> f64 {
        f64::from(value)
    }

    fn of_f64(value: f64) -> f64 {
        value
    }

    fn to_f32(self) -> f32 {
        self as f32
    }

    fn exp(self) -> f64 {
        f64::exp(self)
    }

    fn tanh(self) -> f64 {
        f64::tanh(self)
    }

    fn sqrt(self) -> f64 {
        f64::sqrt(self)
    }

    /// `2/sqrt(pi) exp(-x^2) sum 2^n x^(2n+1) / (2n+1)!!` (Abramowitz and Stegun 7.1.6): all terms have one sign, so nothing
    /// cancels. From 6 on the complement is under 2^-53.
    fn erf(self) -> f64 {
        let x = self.abs();
        if x >= 6.0 {
            return 1.0_f64.copysign(self);
        }
        let (mut term, mut sum, mut n) = (x, x, 0.0);
        while term > sum * 1e-17 {
            n += 1.0;
            term *= 2.0 * x * x / (2.0 * n + 1.0);
            sum += term;
        }
        (std::f64::consts::FRAC_2_SQRT_PI * f64::exp(-x * x) * sum).copysign(self)
    }

    fn dot(_: Isa, a: &[f64], b: &[f64]) -> f64 {
        a.iter().zip(b).map(|(a, b)| a * b).sum()
    }

    fn stage(_: DType, _: &mut [f64]) {}

    fn units(_: Isa, dtype: DType, rows: usize, w: &[u8], count: usize, x: &[f64], y: &mut [f64]) {
        let (k, each) = (x.len() / count.max(1), y.len() / count.max(1));
        for (x, y) in x.chunks_exact(k.max(1)).zip(y.chunks_exact_mut(each.max(1))) {
            for (w, y) in w.chunks_exact(unit_bytes(dtype, rows, k)).zip(y.chunks_exact_mut(rows)) {
                y.fill(0.0);
                // Parts of granules follow each other as k does.
                let parts = w.chunks_exact(rows * GRANULE_ROW_BYTES as usize);
                for (part, x) in parts.zip(x.chunks_exact(granule_k(dtype))) {
                    for (row, y) in part.chunks_exact(GRANULE_ROW_BYTES as usize).zip(y.iter_mut()) {
                        for (w, x) in row.chunks_exact(dtype.bytes()).zip(x) {
                            *y += f64::from(read_value(dtype, w)) * x;
                        }
                    }
                }
            }
        }
    }

    fn scores(
        isa: Isa,
        q: &[f64],
        dim: usize,
        keys: HistoryRows<'_>,
        rows: usize,
        block: &mut Vec<f32>,
        scores: &mut [f64],
    ) {
        block.resize(dim, 0.0);
        for i in 0..rows {
            keys.read(i, dim, block);
            let key: Vec<f64> = block.iter().copied().map(f64::from).collect();
            for (h, q) in q.chunks_exact(dim).enumerate() {
                scores[h * rows + i] = f64::dot(isa, q, &key);
            }
        }
    }

    fn weigh(
        _: Isa,
        weights: &[f64],
        dim: usize,
        values: HistoryRows<'_>,
        rows: usize,
        block: &mut Vec<f32>,
        sums: &mut [f64],
    ) {
        block.resize(dim, 0.0);
        for i in 0..rows {
            values.read(i, dim, block);
            for (h, sums) in sums.chunks_exact_mut(dim).enumerate() {
                sums.iter_mut().zip(block.iter()).for_each(|(s, v)| *s += weights[h * rows + i] * f64::from(*v));
            }
        }
    }

    fn exp_sum(_: Isa, most: f64, x: &mut [f64]) -> f64 {
        x.iter_mut().for_each(|x| *x = f64::exp(*x - most));
        x.iter().sum()
    }
}

/// One little-endian value of `dtype` as fp32; 0 if `bytes` is too short, which callers exclude.
pub fn read_value(dtype: DType, bytes: &[u8]) -> f32 {
    match (dtype, bytes) {
        (DType::Bf16, &[a, b, ..]) => f32::from_bits(u32::from(u16::from_le_bytes([a, b])) << 16),
        (_, &[a, b, c, d, ..]) => f32::from_le_bytes([a, b, c, d]),
        _ => 0.0,
    }
}

/// Formulas as in [`Act`].
pub fn act<R: Real>(act: Act, x: R) -> R {
    let one = R::of(1.0);
    match act {
        Act::Silu => x / (one + (R::of(0.0) - x).exp()),
        Act::GeluErf => R::of(0.5) * x * (one + (x * R::of_f64(std::f64::consts::FRAC_1_SQRT_2)).erf()),
        Act::GeluTanh => {
            // sqrt(2 / pi) = FRAC_2_SQRT_PI / sqrt(2)
            let scale = R::of_f64(std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2);
            R::of(0.5) * x * (one + (scale * (x + R::of_f64(0.044_715) * x * x * x)).tanh())
        }
        Act::Relu => {
            if x > R::of(0.0) {
                x
            } else {
                R::of(0.0)
            }
        }
        Act::SquaredRelu => {
            if x > R::of(0.0) {
                x * x
            } else {
                R::of(0.0)
            }
        }
    }
}

/// `1 / (1 + e^-x)`
pub fn sigmoid<R: Real>(x: R) -> R {
    R::of(1.0) / (R::of(1.0) + (R::of(0.0) - x).exp())
}

/// The formula of [`ClampedSwiglu`].
pub fn clamped<R: Real>(swiglu: ClampedSwiglu, gate: R, up: R) -> R {
    let (limit, least) = (R::of(swiglu.limit), R::of(-swiglu.limit));
    let gate = if gate > limit { limit } else { gate };
    let up = if up > limit {
        limit
    } else if up < least {
        least
    } else {
        up
    };
    (up + R::of(1.0)) * gate * sigmoid(R::of(swiglu.alpha) * gate)
}

/// `cap * tanh(x / cap)`
pub fn softcap<R: Real>(cap: Option<f32>, x: R) -> R {
    match cap {
        Some(cap) => R::of(cap) * (x / R::of(cap)).tanh(),
        None => x,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn erf_has_the_tabulated_values() {
        // Abramowitz and Stegun, table 7.1.
        for (x, want) in
            [(0.0, 0.0), (0.5, 0.520_499_877_813_046_5), (1.0, 0.842_700_792_949_714_9), (2.0, 0.995_322_265_018_952_7)]
        {
            for sign in [1.0_f64, -1.0] {
                assert!((Real::erf(sign * x) - sign * want).abs() < 1e-15, "erf({x})");
                assert!((f64::from(Real::erf((sign * x) as f32)) - sign * want).abs() < 3e-7, "erf({x}) in fp32");
            }
        }
        assert_eq!(Real::erf(7.0_f64), 1.0);
        assert!((Real::erf(5.9_f64) - 1.0).abs() < 1e-15);
    }

    #[test]
    fn activations_have_known_values() {
        let close = |kind, x: f64, want: f64| {
            assert!((act(kind, x) - want).abs() < 1e-9, "{kind:?}({x})");
            assert!((f64::from(act(kind, x as f32)) - want).abs() < 1e-6, "{kind:?}({x}) in fp32");
        };
        // torch.nn.functional in float64.
        close(Act::Silu, 1.0, 0.731_058_578_630_004_9);
        close(Act::Silu, -2.0, -0.238_405_844_044_234_2);
        close(Act::GeluErf, 1.0, 0.841_344_746_068_543);
        close(Act::GeluErf, -0.5, -0.154_268_769_363_464_6);
        close(Act::GeluTanh, 1.0, 0.841_191_990_608_303_7);
        close(Act::Relu, -3.0, 0.0);
        close(Act::Relu, 3.0, 3.0);
        assert!((softcap(Some(5.0), 10.0_f64) - 5.0 * 2.0_f64.tanh()).abs() < 1e-12);
        assert!(softcap(Some(30.0), 1e30_f32) == 30.0, "a score beyond any cap stays finite");
    }
}
