//! Compares kernels of waves with a kernel for rows that was checked, over one cache.

use super::{
    AFTER_FIRST, CheckError, Checked, FACTOR, Figures, Judge, Noise, Tolerance, check_ids, is_beyond, noise_of, worst,
};
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
const CHUNKS: [u32; 5] = [200, 1, 440, 300, 100];
/// Most that keys and values of a position differ from those of the other kernel, norm of the difference by norm. Both kernels round sums of
/// the same values to bf16, but add in different orders, and each layer builds on the differences of the one before. Trained weights need more at
/// the first positions of a text: there it is [`FACTOR`] times what rounding cost the logits of the kernel for rows.
const CACHE_REL_L2_MAX: f64 = 0.08;

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
    judge.figures = Figures { error_rel_l2: kept.compare(&found, &noise)?, ..judged.figures };
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
        kept.compare(&Kept::read(schedule, &shape, rows, &pool, by_waves, position..position + 1)?, &noise)?;
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

    /// Compares the positions of `found` with the same ones: the largest relative difference of one.
    fn compare(&self, found: &Kept, noise: &[Noise; 2]) -> Result<f64, CheckError> {
        let mut most = 0.0;
        for ((row_bytes, expected), (_, found_heads)) in self.caches.iter().zip(&found.caches) {
            let row_values = row_bytes / 2;
            for position in found.positions.clone() {
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
                let error = (difference / norm).sqrt();
                most = worst(most, error);
                let allowed = worst(CACHE_REL_L2_MAX, FACTOR * f64::from(noise[noise_of(position)].error_rel_l2));
                if is_beyond(error, allowed) {
                    let figures = Figures { error_rel_l2: error, ..Figures::default() };
                    let what = "norm of the difference of keys or values of a layer by that of the other kernel";
                    return Err(CheckError::Wrong { position, what, expected: allowed, found: error, figures });
                }
            }
        }
        Ok(most)
    }
}

fn bf16(bits: u16) -> f64 {
    f64::from(f32::from_bits(u32::from(bits) << 16))
}
