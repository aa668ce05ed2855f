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

/// Positions that the check writes for each of two sequences, at most; and what follows them.
pub const POSITIONS: u32 = {
    let (mut tokens, mut i) = (0, 0);
    while i < CHUNKS.len() {
        tokens += CHUNKS[i];
        i += 1;
    }
    tokens + 1
};

/// Reads one text with both kernels, each into pages of its own, and compares the keys and values of every position in every layer, and
/// the logits of the token after them. If chunks have a tail, one is read again up to that token: its keys, values and logits are compared
/// with the same ones, and the token that the tail decides with its logits. `rows` was checked before (`judged`), and both sessions share
/// pack and cache.
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
    let ids = check_ids(vocab, POSITIONS.min(shape.context_max));
    let (text, next) = ids.split_at(ids.len() - 1);
    let (mut pool, mut guard) = (Pool::new(shape), Guard::new(shape));
    let mut open = || {
        let sequence = pool.open().expect("two sequences");
        pool.reserve(sequence, ids.len() as u32).expect("pages for the check");
        sequence
    };
    let [by_rows, by_waves] = [open(), open()];
    let mut edits = pool.take_edits();
    let mut request = |sequence: SequenceId, position: u32, count: usize, wants_logits: bool| {
        let row = |position| Row { sequence, position, wants_logits };
        let rows = (position..position + count as u32).map(row).collect();
        Request { rows, steps: 1, edits: std::mem::take(&mut edits) }
    };
    let mut position = 0;
    for tokens in text.chunks(rows.shape().rows as usize) {
        let request = request(by_rows, position, tokens.len(), false);
        let tables = guard.admit(&request).expect("pages of the pool keep all facts");
        rows.run_whole(tables, &given(tokens), false)?;
        position += tokens.len() as u32;
    }
    let mut position = 0;
    for chunk in CHUNKS {
        let tokens: Vec<u32> = text.iter().copied().skip(position as usize).take(chunk as usize).collect();
        if tokens.is_empty() {
            break;
        }
        let request = request(by_waves, position, tokens.len(), false);
        let tables = guard.admit(&request).expect("pages of the pool keep all facts");
        waves.read(tables, &tokens, Last::Nothing)?;
        position += tokens.len() as u32;
    }
    let noise = judged.figures.noise;
    let mut judge = Judge::new(Tolerance::of_device(program.precision).with_noise(noise[AFTER_FIRST]));
    judge.figures = Figures {
        error_rel_l2: compare_caches(schedule, &shape, rows, &pool, [by_rows, by_waves], 0..position, &noise)?,
        ..judged.figures
    };
    let mut after = |sequence: SequenceId| -> Result<Vec<f32>, CheckError> {
        let tables = guard.admit(&request(sequence, position, 1, true)).expect("pages of the pool keep all facts");
        rows.poison_logits()?;
        rows.run_whole(tables, &given(next), true)?;
        Ok(rows.logits(0)?)
    };
    let (expected, found) = (after(by_rows)?, after(by_waves)?);
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
        compare_caches(schedule, &shape, rows, &pool, [by_rows, by_waves], position..position + 1, &noise)?;
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

/// Keys and values of positions of two sequences, in every layer: the largest relative difference of a position.
fn compare_caches(
    schedule: &Schedule,
    shape: &Shape,
    session: &dyn RowLauncher,
    pool: &Pool,
    sequences: [SequenceId; 2],
    positions: Range<u32>,
    noise: &[Noise; 2],
) -> Result<f64, CheckError> {
    let pool_rows = u64::from(shape.pages) * u64::from(shape.page_rows);
    let mut most = 0.0;
    for (place, heads, row_bytes) in caches(&schedule.program, &schedule.placement) {
        for block in positions.start / shape.page_rows..positions.end.div_ceil(shape.page_rows) {
            let rows = (positions.end - block * shape.page_rows).min(shape.page_rows) as usize;
            let mut sums = vec![(0.0f64, 0.0f64); rows];
            for head in 0..heads {
                let of = |sequence: SequenceId| {
                    let page = pool.page(sequence, block).map_or(0, |page| u64::from(page.0));
                    let row = head * pool_rows + page * u64::from(shape.page_rows);
                    session.read_cache(place + row * row_bytes, rows * row_bytes as usize)
                };
                let (expected, found) = (of(sequences[0])?, of(sequences[1])?);
                let values = expected.iter().zip(&found).map(|(&e, &f)| (bf16(e), bf16(f)));
                for (i, (e, f)) in values.enumerate() {
                    let (difference, norm) = &mut sums[i / (row_bytes as usize / 2)];
                    *difference += (e - f) * (e - f);
                    *norm += e * e;
                }
            }
            for (row, (difference, norm)) in (0u32..).zip(sums) {
                let error = (difference / norm).sqrt();
                most = worst(most, error);
                let position = block * shape.page_rows + row;
                let allowed = worst(CACHE_REL_L2_MAX, FACTOR * f64::from(noise[noise_of(position)].error_rel_l2));
                if is_beyond(error, allowed) {
                    let figures = Figures { error_rel_l2: error, ..Figures::default() };
                    let what = "norm of the difference of keys or values of a layer by that of the other kernel";
                    return Err(CheckError::Wrong { position, what, expected: allowed, found: error, figures });
                }
            }
        }
    }
    Ok(most)
}

fn bf16(bits: u16) -> f64 {
    f64::from(f32::from_bits(u32::from(bits) << 16))
}
