//! Compares kernels of waves with a kernel for rows that was checked, over one cache.

use super::{AFTER_FIRST, CheckError, Checked, FACTOR, Figures, Judge, Tolerance, check_ids, is_beyond, worst};
use crate::cuda::rows::{RowLauncher, given};
use crate::cuda::waves::{Last, WavesSession};
use crate::ir::op::{Op, Role};
use crate::ir::program::{Operand, Program};
use crate::ir::schedule::Schedule;
use crate::pages::Pool;
use crate::rows::{Guard, Request, Row, SequenceId, Shape};
use crate::sample::argmax;
use std::ops::Range;

/// Tokens of the chunks that the kernel of waves reads: some blocks of rows, whole and not, and one row.
pub(super) const CHUNKS: [u32; 6] = [200, 1, 440, 300, 100, 1100];
/// Most that keys and values of a position differ from those of the other kernel, norm of the difference by norm. Both kernels round sums of
/// the same values to bf16, but add in different orders, and each layer builds on the differences of the one before.
const CACHE_REL_L2_MAX: f64 = 0.08;
/// The same of the median of all positions.
const CACHE_MEDIAN_MAX: f64 = 0.05;
/// Layers in which no position may differ by more.
const STRICT_LAYERS: usize = 3;
/// In later layers one position in so many may.
const CHAOTIC_ONE_IN: usize = 16;

/// Positions that the check writes with each kernel, at most; and what follows them.
pub const POSITIONS: u32 = {
    let (mut tokens, mut i) = (0, 0);
    while i < CHUNKS.len() {
        tokens += CHUNKS[i];
        i += 1;
    }
    tokens + 1
};

/// Reads one text with both kernels, one after the other into the same pages, and compares the keys and values of every position in every
/// layer, and the logits of the token after them. If chunks have a tail, one is read again up to that token: its keys, values and logits are
/// compared with the same ones, and the token that the tail decides with its logits. `rows` was checked before (`judged`), and both sessions
/// share pack and cache. No more positions are compared than the session's pages hold.
///
/// # Errors
/// The first position that is out of tolerance, or what a device refuses.
pub fn check_waves(
    schedule: &Schedule,
    judged: &Checked,
    rows: &mut dyn RowLauncher,
    waves: &mut WavesSession,
) -> Result<Checked, CheckError> {
    let shape = *waves.shape();
    let (program, vocab) = (&schedule.program, rows.vocab());
    let in_pool = shape.pages.saturating_mul(shape.page_rows);
    let ids = check_ids(vocab, POSITIONS.min(shape.context_max).min(in_pool));
    let (text, next) = ids.split_at(ids.len() - 1);
    let position = text.len() as u32;
    let (mut pool, mut guard) = (Pool::new(shape), Guard::new(shape));
    let open = |pool: &mut Pool| {
        let sequence = pool.open().expect("a sequence for the check");
        pool.reserve(sequence, ids.len() as u32).expect("pages for the check");
        sequence
    };
    let request = |pool: &mut Pool, sequence: SequenceId, position: u32, count: usize, wants_logits: bool| {
        let row = |position| Row { sequence, position, wants_logits };
        let rows = (position..position + count as u32).map(row).collect();
        Request { rows, steps: 1, edits: pool.take_edits() }
    };
    let after = |pool: &mut Pool, guard: &mut Guard, rows: &mut dyn RowLauncher, sequence| {
        let request = request(pool, sequence, position, 1, true);
        let tables = guard.admit(&request).expect("pages of the pool keep all facts");
        rows.poison_logits()?;
        rows.run_whole(tables, &given(next), true)?;
        Ok::<Vec<f32>, CheckError>(rows.logits(0)?)
    };
    let by_rows = open(&mut pool);
    let mut at = 0;
    for tokens in text.chunks(rows.shape().rows as usize) {
        let request = request(&mut pool, by_rows, at, tokens.len(), false);
        let tables = guard.admit(&request).expect("pages of the pool keep all facts");
        rows.run_whole(tables, &given(tokens), false)?;
        at += tokens.len() as u32;
    }
    let expected = after(&mut pool, &mut guard, rows, by_rows)?;
    let kept = Kept::read(schedule, &shape, rows, &pool, by_rows, 0..position + 1)?;
    pool.close(by_rows).expect("an open sequence");

    let by_waves = open(&mut pool);
    let mut at = 0;
    for chunk in CHUNKS {
        let tokens: Vec<u32> = text.iter().copied().skip(at as usize).take(chunk as usize).collect();
        if tokens.is_empty() {
            break;
        }
        let request = request(&mut pool, by_waves, at, tokens.len(), false);
        let tables = guard.admit(&request).expect("pages of the pool keep all facts");
        waves.read(tables, &tokens, Last::Nothing)?;
        at += tokens.len() as u32;
    }
    let noise = judged.figures.noise;
    let mut judge = Judge::new(Tolerance::of_device(program.precision).with_noise(noise[AFTER_FIRST]));
    let found = Kept::read(schedule, &shape, rows, &pool, by_waves, 0..position)?;
    judge.figures = Figures { error_rel_l2: kept.compare(&found)?, ..judged.figures };
    let found = after(&mut pool, &mut guard, rows, by_waves)?;
    judge.compare_row(vocab, position, &expected, &found)?;
    if waves.decides() {
        let count = ids.len().min(CHUNKS[CHUNKS.len() - 1] as usize);
        let first = ids.len() - count;
        let row = |at: usize| Row { sequence: by_waves, position: at as u32, wants_logits: at + 1 == ids.len() };
        let request = Request { rows: (first..ids.len()).map(row).collect(), steps: 1, edits: vec![] };
        let tables = guard.admit(&request).expect("pages of the pool keep all facts");
        waves.poison_logits()?;
        let [row] = given(next)[..] else { panic!("one token") };
        let read = waves.read(tables, &ids[first..], Last::Token { row, with_logits: true })?;
        let found = waves.logits()?;
        judge.compare_row(vocab, position, &expected, &found)?;
        if read.token != argmax(&found) {
            let (expected, found) = (argmax(&found).unwrap_or(0), read.token.unwrap_or(0));
            return Err(CheckError::Argmax { position, expected, found, figures: judge.figures });
        }
        kept.compare(&Kept::read(schedule, &shape, rows, &pool, by_waves, position..position + 1)?)?;
    }
    Ok(Checked { figures: judge.figures })
}

/// A cache of a layer: its place in the arena, KV heads, and bytes of a row of one.
fn caches(program: &Program, placement: &[Option<u64>]) -> Vec<(u64, u64, u64)> {
    let appended = program.grids.iter().filter_map(|grid| match &grid.op {
        Op::Attention(a) => Some([Role::AppendK, Role::AppendV].map(|role| (a.kv_heads(), grid.operand(role)))),
        _ => None,
    });
    let place = |(heads, operand): (u32, Option<&Operand>)| {
        let buffer = operand?.buffer;
        let declared = &program.buffers[buffer.index()];
        let row_bytes = u64::from(declared.cols / heads.max(1)) * declared.dtype.bytes() as u64;
        Some((placement[buffer.index()]?, u64::from(heads), row_bytes))
    };
    appended.flatten().filter_map(place).collect()
}

/// Keys and values of positions of a sequence, in every layer.
struct Kept {
    positions: Range<u32>,
    /// Of each cache the bytes of a row, and for each head the values of one position after another.
    caches: Vec<(usize, Vec<Vec<u16>>)>,
}

impl Kept {
    fn read(
        schedule: &Schedule,
        shape: &Shape,
        session: &dyn RowLauncher,
        pool: &Pool,
        sequence: SequenceId,
        positions: Range<u32>,
    ) -> Result<Kept, CheckError> {
        let pool_rows = u64::from(shape.pages) * u64::from(shape.page_rows);
        let mut kept = vec![];
        for (place, heads, row_bytes) in caches(&schedule.program, &schedule.placement) {
            let mut of_heads = vec![];
            for head in 0..heads {
                let mut values = vec![];
                let mut position = positions.start;
                while position < positions.end {
                    let (block, first) = (position / shape.page_rows, position % shape.page_rows);
                    let rows = (shape.page_rows - first).min(positions.end - position);
                    let page = pool.page(sequence, block).map_or(0, |page| u64::from(page.0));
                    let row = head * pool_rows + page * u64::from(shape.page_rows) + u64::from(first);
                    values.extend(session.read_cache(place + row * row_bytes, rows as usize * row_bytes as usize)?);
                    position += rows;
                }
                of_heads.push(values);
            }
            kept.push((row_bytes as usize, of_heads));
        }
        Ok(Kept { positions, caches: kept })
    }

    /// Compares the positions of `found` with the same ones, cache by cache: the largest relative difference of a position. A position whose
    /// norm is below the mean is measured by the mean: values of the first token of a text are almost 0.
    fn compare(&self, found: &Kept) -> Result<f64, CheckError> {
        let mut most = 0.0;
        for (cache, ((row_bytes, expected), (_, found_heads))) in self.caches.iter().zip(&found.caches).enumerate() {
            let row_values = row_bytes / 2;
            let sums = |position: u32| {
                let of = |values: &[u16], first: u32| -> Vec<u16> {
                    values[(position - first) as usize * row_values..][..row_values].to_vec()
                };
                let (mut difference, mut norm) = (0.0f64, 0.0f64);
                for (expected, found_values) in expected.iter().zip(found_heads) {
                    let both =
                        of(expected, self.positions.start).into_iter().zip(of(found_values, found.positions.start));
                    for (e, f) in both.map(|(e, f)| (bf16(e), bf16(f))) {
                        difference += (e - f) * (e - f);
                        norm += e * e;
                    }
                }
                (difference, norm)
            };
            let sums: Vec<(f64, f64)> = found.positions.clone().map(sums).collect();
            let mean = sums.iter().map(|(_, norm)| norm).sum::<f64>() / sums.len().max(1) as f64;
            let errors: Vec<f64> =
                sums.iter().map(|(difference, norm)| (difference / worst(*norm, mean)).sqrt()).collect();
            most = errors.iter().copied().fold(most, worst);
            // Two caches a layer.
            if let Some((at, allowed)) = beyond(&errors, cache / 2) {
                let (position, error) = (found.positions.start + at as u32, errors[at]);
                let figures = Figures { error_rel_l2: error, ..Figures::default() };
                let what = "norm of the difference of keys or values of a layer by that of the other kernel";
                return Err(CheckError::Wrong { position, what, expected: allowed, found: error, figures });
            }
        }
        Ok(most)
    }
}

/// The first position of a layer whose difference says that a kernel is wrong, and what is allowed there.
///
/// Rounding alone stays below 0.02 in the first layers of trained weights at every position, and every product and every attention of a kernel
/// shows in the second layer. In later layers a few positions of a text are chaotic: a rounding changes half of their values, or nothing
/// (docs/numerics.md). So there one position in [`CHAOTIC_ONE_IN`] may be off, and the median may not.
fn beyond(errors: &[f64], layer: usize) -> Option<(usize, f64)> {
    let strict = errors.iter().position(|error| is_beyond(*error, CACHE_REL_L2_MAX));
    if layer < STRICT_LAYERS {
        return strict.map(|at| (at, CACHE_REL_L2_MAX));
    }
    if errors.len() < CHAOTIC_ONE_IN {
        let allowed = FACTOR * CACHE_REL_L2_MAX;
        return errors.iter().position(|error| is_beyond(*error, allowed)).map(|at| (at, allowed));
    }
    let off = errors.iter().filter(|error| is_beyond(**error, CACHE_REL_L2_MAX)).count();
    let mut ordered: Vec<usize> = (0..errors.len()).collect();
    ordered.sort_by(|a, b| errors[*a].total_cmp(&errors[*b]));
    let median = ordered[errors.len() / 2];
    if is_beyond(errors[median], CACHE_MEDIAN_MAX) {
        return Some((median, CACHE_MEDIAN_MAX));
    }
    strict.filter(|_| off > errors.len() / CHAOTIC_ONE_IN).map(|at| (at, CACHE_REL_L2_MAX))
}

fn bf16(bits: u16) -> f64 {
    f64::from(f32::from_bits(u32::from(bits) << 16))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_chaotic_positions_of_later_layers_pass() {
        let with = |count: usize, error: f64| {
            let mut errors = vec![0.01; 64];
            errors.iter_mut().skip(5).take(count).for_each(|of| *of = error);
            errors
        };
        assert_eq!(beyond(&with(4, 0.7), 3), None);
        assert_eq!(beyond(&with(5, 0.7), 3), Some((5, CACHE_REL_L2_MAX)));
        assert_eq!(beyond(&with(1, 0.09), 2), Some((5, CACHE_REL_L2_MAX)));
        assert_eq!(beyond(&with(1, 0.07), 0), None);
        // Every position is a little off: no rounding does that.
        assert_eq!(beyond(&[0.06; 64], 9).map(|(_, allowed)| allowed), Some(CACHE_MEDIAN_MAX));
        assert!(beyond(&with(5, f64::NAN), 9).is_some() && beyond(&[f64::NAN], 9).is_some());
        assert_eq!((beyond(&[0.3], 9), beyond(&[0.5], 9).is_some()), (None, true));
    }
}
