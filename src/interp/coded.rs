//! Owns the dot products over matrices of codes and scales: exact values of codes, scales applied to sums.
//!
//! `y_r = sum over groups g of scale_rg * sum over k in g of (value(code_rk) - zero_rg) x_k`; the zero point is left out of the inner
//! sum and comes in by `zero_rg * sum of x_k`, which all rows share. So does a minimum: `scale_rg * sum of value(code_rk) x_k +
//! minimum_rg * sum of x_k`.

use super::kernel::Isa;
use super::real::Real;
use crate::format::{CODE_ROW_BYTES, Code, Format, ScaleCode};
use crate::ir::op::UNIT_ROWS;

const ROWS: usize = UNIT_ROWS as usize;
const ROW_BYTES: usize = CODE_ROW_BYTES as usize;

/// `y = W x` without the scales of rows, for whole units of 8 rows in granules of `granule_bytes` and `count` inputs, one after
/// another in `x` and padded with zeros to whole granules; `y` has all units of an input one after another. A row of codes is
/// read once for all inputs, and each has the sums that it has alone. `row` is scratch.
#[allow(clippy::too_many_arguments)] // A matrix, its inputs, and where the sums go.
pub fn units<R: Real>(
    isa: Isa,
    format: Format,
    granule_bytes: usize,
    w: &[u8],
    count: usize,
    x: &[R],
    row: &mut Vec<R>,
    y: &mut [R],
) {
    let granule_k = format.granule_k() as usize;
    let (k, each) = (x.len() / count, y.len() / count);
    let unit_bytes = k / granule_k * granule_bytes;
    y.fill(R::of(0.0));
    if unit_bytes == 0 {
        return;
    }
    let values = Values::<R>::of(format);
    row.resize(k, R::of(0.0));
    // Consecutive k of a granule that share a scale; a whole row where scales are of rows.
    let group_k = format.groups.map_or(k, |groups| (groups.k as usize).min(granule_k));
    let ones = vec![R::of(1.0); group_k];
    // A group never spans two inputs: `k` is whole granules, and a granule is whole groups.
    let sums: Vec<R> = x.chunks(group_k).map(|x| R::dot(isa, x, &ones[..x.len()])).collect();
    for (u, unit) in w.chunks_exact(unit_bytes).enumerate() {
        for r in 0..ROWS {
            for (granule, out) in unit.chunks_exact(granule_bytes).zip(row.chunks_exact_mut(granule_k)) {
                values.read(&granule[r * ROW_BYTES..(r + 1) * ROW_BYTES], out);
            }
            for (g, codes) in row.chunks(group_k).enumerate() {
                let granule = &unit[g * group_k / granule_k * granule_bytes..];
                let (scale, zero, least) = scale(format, granule, r, g * group_k % granule_k / group_k);
                for (at, x) in x.chunks_exact(k).enumerate() {
                    let sum = R::dot(isa, codes, &x[g * group_k..][..codes.len()]);
                    let of_x = sums[at * (k / group_k) + g];
                    let sum = if zero == 0.0 { sum } else { sum - R::of(zero) * of_x };
                    let y = &mut y[at * each + u * ROWS + r];
                    *y = *y + R::of(scale) * sum;
                    if least != 0.0 {
                        *y = *y + R::of(least) * of_x;
                    }
                }
            }
        }
    }
}

/// Scale, zero point and minimum of a group of row `r` of a granule.
fn scale(format: Format, granule: &[u8], r: usize, group: usize) -> (f32, f32, f32) {
    let code = format.code;
    match format.groups {
        None => (1.0, code.implied_zero(), 0.0),
        Some(groups) if groups.scale == ScaleCode::F16x6 => {
            let (scale, least) = format.six_bits(granule, r, group).values();
            (scale, 0.0, least)
        }
        Some(groups) if groups.minima => {
            let read = |at: usize| groups.scale.read(&granule[at..]);
            (read(format.scale_at(r, group)), 0.0, read(format.minimum_at(r, group)))
        }
        Some(groups) => {
            let zero = if groups.zeros { code.zero(granule[format.zero_at(r, group)]) } else { code.implied_zero() };
            (groups.scale.read(&granule[format.scale_at(r, group)..]), zero, 0.0)
        }
    }
}

/// Multiplies each row by its scale (fp32, in the order of rows); does nothing if there are none.
pub fn scale_rows<R: Real>(scales: &[u8], y: &mut [R]) {
    for (y, scale) in y.iter_mut().zip(scales.as_chunks::<4>().0) {
        *y = *y * R::of(f32::from_le_bytes(*scale));
    }
}

/// Codes of a row of a granule that lie side by side: those of a word of 4 bits each, or of two of 8 bits.
const RUN: usize = 8;

/// The value of every code, and where the codes of a row of a granule lie.
struct Values<R> {
    code: Code,
    of_codes: Box<[R; 256]>,
    /// The column with which each run of codes begins, in the order of bytes.
    runs: Vec<usize>,
    /// Where each code of 4 bits lies in its word.
    shifts: [u32; RUN],
}

impl<R: Real> Values<R> {
    fn of(format: Format) -> Values<R> {
        let Format { code, .. } = format;
        // Bytes of a run are as many as bits of a code.
        let run_bytes = code.bits() as usize;
        let mut runs = vec![0; ROW_BYTES / run_bytes];
        for first in (0..format.granule_k() as usize).step_by(RUN) {
            runs[format.place(first).0 / run_bytes] = first;
        }
        let shifts = std::array::from_fn(|i| {
            let (byte, shift) = format.place(i);
            byte as u32 * 8 + shift
        });
        Values { code, of_codes: Box::new(code.values().map(R::of)), runs, shifts }
    }

    /// The values of a row of a granule in the order of k.
    fn read(&self, codes: &[u8], out: &mut [R]) {
        if self.code.bits() == 8 {
            for (codes, &first) in codes.as_chunks::<RUN>().0.iter().zip(&self.runs) {
                let run = codes.iter().zip(&mut out[first..first + RUN]);
                run.for_each(|(&code, out)| *out = self.of_codes[usize::from(code)]);
            }
            return;
        }
        let few: &[R; 16] = self.of_codes.first_chunk().expect("16 of 256");
        for (word, &first) in codes.as_chunks::<4>().0.iter().zip(&self.runs) {
            let word = self.code.gathered(u32::from_le_bytes(*word));
            let run = self.shifts.iter().zip(&mut out[first..first + RUN]);
            run.for_each(|(shift, out)| *out = few[(word >> shift) as usize % 16]);
        }
    }
}
