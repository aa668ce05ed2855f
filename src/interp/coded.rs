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
    // Consecutive k of a granule that share a scale; a whole row where scales are of rows.
    let group_k = format.groups.map_or(k, |groups| (groups.k as usize).min(granule_k));
    let ones = vec![R::of(1.0); group_k];
    // A group never spans two inputs: `k` is whole granules, and a granule is whole groups.
    let sums: Vec<R> = x.chunks(group_k).map(|x| R::dot(isa, x, &ones[..x.len()])).collect();
    for (u, unit) in w.chunks_exact(unit_bytes).enumerate() {
        for r in 0..ROWS {
            row.clear();
            for granule in unit.chunks_exact(granule_bytes) {
                values.read(&granule[r * ROW_BYTES..(r + 1) * ROW_BYTES], row);
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

/// The value of every code, and where the codes of a row of a granule lie.
struct Values<R> {
    values: Vec<R>,
    /// Byte and shift of each column.
    places: Vec<(usize, u32)>,
    code: Code,
}

impl<R: Real> Values<R> {
    fn of(format: Format) -> Values<R> {
        let Format { code, .. } = format;
        let values = (0..=255).map(|c| R::of(code.value(c))).collect();
        let places = (0..format.granule_k() as usize).map(|k| format.place(k)).collect();
        Values { values, places, code }
    }

    /// Adds the values of a row of a granule in the order of k.
    fn read(&self, codes: &[u8], out: &mut Vec<R>) {
        let mut gathered = [0; CODE_ROW_BYTES as usize];
        for (to, word) in gathered.as_chunks_mut::<4>().0.iter_mut().zip(codes.as_chunks::<4>().0) {
            *to = self.code.gathered(u32::from_le_bytes(*word)).to_le_bytes();
        }
        let value = |&(byte, shift): &(usize, u32)| self.values[usize::from(self.code.loaded(gathered[byte], shift))];
        out.extend(self.places.iter().map(value));
    }
}
