//! Owns what a draft reads in addition to its tokens: a vector for each step of a launch of its kernel, and what kernels left of rows for it.

use std::ops::Range;
use std::sync::Arc;

use bytemuck::Zeroable;

use super::driver::Device;
use super::kernel::uploaded;
use super::memory::DeviceBuffer;
use super::session::SessionError;
use super::stream::Stream;
use crate::codegen::abi::{GivenParams, Params, Queues};
use crate::dtype::DType;
use crate::ir::BufferId;
use crate::ir::layout::{SPAN_BYTES, WORD_ROWS, words_bytes};
use crate::ir::op::{Epilogue, Op, Role};
use crate::ir::schedule::{Run, Schedule};
use crate::model::synthetic::given_value;
use crate::speculate::Left;

/// A word that was not written: `NO_WORD` of rows/words.cuh.
const NO_WORD: u32 = u32::MAX;

/// The final RMS norm of a model or of its draft: the factor of each column, and what is added to the mean of squares.
#[derive(Debug, Clone, PartialEq)]
pub struct LeftNorm {
    pub weight: Vec<f32>,
    pub eps: f32,
}

/// What a draft is given with the tokens that it reads.
pub enum GivenWith<'a> {
    /// By the host, with the norm. The text is so many positions ahead of the cache.
    Rows(&'a [Arc<[f32]>], u32),
    /// By a batch kernel that the host has waited for, without the norm.
    Left(Left, u32),
}

impl GivenWith<'_> {
    pub(super) fn count(&self) -> usize {
        match self {
            GivenWith::Rows(rows, _) => rows.len(),
            GivenWith::Left(left, _) => left.count as usize,
        }
    }

    /// Gives `rows` of them to a launch that begins at `position`.
    pub(super) fn give(&self, to: &mut GivenRows, position: u32, rows: Range<usize>) -> Result<(), SessionError> {
        match self {
            GivenWith::Rows(all, ahead) => to.give(position, &all[rows], *ahead),
            GivenWith::Left(left, ahead) => {
                let (first, count) = (left.first + rows.start as u32, rows.len() as u32);
                to.give_left(position, Left { first, count, ..*left }, *ahead)
            }
        }
    }
}

/// What the steps of a launch are given.
pub(super) struct GivenRows {
    /// `[steps][hidden]`
    memory: DeviceBuffer,
    hidden: u32,
    /// Bytes of a value that travels between SMs.
    value_bytes: usize,
    /// Of the model and of the draft, with which kernels go on from what they left.
    norms: Option<[(DeviceBuffer, f32); 2]>,
    ahead: u32,
    /// Those of the next launch, from this position on.
    next: Option<(u32, Source)>,
    /// Of launches that only read tokens; `None`: there are none.
    reading: Option<ReadingRuns>,
    /// The next launch is such a one.
    only_reads: bool,
    /// What the launch after [`GivenRows::upload`] reads.
    launch: GivenParams,
}

/// What loaders bring in where no step chooses a token: everything but the weights of the head.
struct ReadingRuns {
    runs: DeviceBuffer,
    index: DeviceBuffer,
}

impl ReadingRuns {
    /// `None`: the head does not come last in every stream.
    fn of(device: &Device, stream: &Stream, queues: &Queues<'_>) -> Result<Option<ReadingRuns>, SessionError> {
        let (schedule, tables) = (queues.validated().schedule(), queues.tables());
        let (mut runs, mut index) = (vec![], vec![0u32]);
        let streams = schedule.regimes.iter().flat_map(|regime| regime.streams.iter().map(move |of| (regime, of)));
        for ((regime, of_sm), bounds) in streams.zip(tables.run_index.windows(2)) {
            let is_head = |run: &&Run| {
                let grid = &schedule.program.grids[regime.tasks[run.task.index()].grid.index()];
                matches!(&grid.op, Op::MatVec(m) if matches!(m.epilogue, Epilogue::Logits { .. }))
            };
            let before = of_sm.iter().take_while(|run| !is_head(run)).count();
            if of_sm[before..].iter().any(|run| !is_head(&run)) {
                return Ok(None);
            }
            runs.extend_from_slice(&tables.runs[bounds[0] as usize..][..before]);
            index.push(runs.len() as u32);
        }
        let put = |bytes: &[u8]| uploaded(device, stream, bytes);
        Ok(Some(ReadingRuns { runs: put(bytemuck::cast_slice(&runs))?, index: put(bytemuck::cast_slice(&index))? }))
    }
}

/// Where the rows of the first steps of a launch are.
enum Source {
    Host(Vec<f32>),
    /// A batch kernel left them.
    Left(Left),
}

impl GivenRows {
    /// Room for launches of up to `steps_max` steps; `None`: the program is not that of a draft.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn of(
        device: &Device,
        stream: &Stream,
        queues: &Queues<'_>,
        steps_max: u32,
    ) -> Result<Option<GivenRows>, SessionError> {
        let program = &queues.validated().schedule().program;
        let Some(join) = program.grids.iter().find(|grid| matches!(grid.op, Op::Join { .. })) else { return Ok(None) };
        let table = join.operand(Role::Table).and_then(|table| program.buffers.get(table.buffer.index()));
        let hidden = table.map_or(0, |table| table.cols);
        let memory = device.alloc((u64::from(steps_max) * u64::from(hidden) * 4).max(16))?;
        Ok(Some(GivenRows {
            memory,
            hidden,
            value_bytes: program.precision.wire.bytes(),
            norms: None,
            ahead: 0,
            next: None,
            reading: ReadingRuns::of(device, stream, queues)?,
            only_reads: false,
            launch: GivenParams::zeroed(),
        }))
    }

    /// Uploads the norms of the model and of the draft.
    ///
    /// # Errors
    /// Norms of another width than the draft has; what the driver refuses.
    pub fn set_norms(&mut self, device: &Device, stream: &Stream, norms: &[LeftNorm; 2]) -> Result<(), SessionError> {
        if let Some(norm) = norms.iter().find(|norm| norm.weight.len() != self.hidden as usize) {
            return Err(SessionError::Given { expected: self.hidden, found: norm.weight.len() });
        }
        let put = |norm: &LeftNorm| uploaded(device, stream, bytemuck::cast_slice(&norm.weight));
        let [model, draft] = norms;
        self.norms = Some([(put(model)?, model.eps), (put(draft)?, draft.eps)]);
        Ok(())
    }

    /// Whether steps go on with what the step before left.
    pub fn goes_on(&self) -> bool {
        self.norms.is_some()
    }

    /// Whether steps read rows where a batch kernel left them.
    pub fn reads(&self, left: &Left) -> bool {
        self.goes_on() && left.cols == self.hidden && left.value_bytes == self.value_bytes
    }

    /// Whether launches may only read tokens.
    pub fn can_only_read(&self) -> bool {
        self.reading.is_some()
    }

    /// Says that the next launch only reads tokens, if one may.
    pub fn only_read(&mut self) -> bool {
        self.only_reads = self.can_only_read();
        self.only_reads
    }

    /// Says what the first steps of the next launch are given, from `position` on. The text is `ahead` positions ahead of the cache.
    ///
    /// # Errors
    /// Rows of another width than the draft has.
    pub fn give(&mut self, position: u32, rows: &[Arc<[f32]>], ahead: u32) -> Result<(), SessionError> {
        if let Some(row) = rows.iter().find(|row| row.len() != self.hidden as usize) {
            return Err(SessionError::Given { expected: self.hidden, found: row.len() });
        }
        let values = rows.iter().flat_map(|row| row.iter().copied()).collect();
        (self.ahead, self.next) = (ahead, Some((position, Source::Host(values))));
        Ok(())
    }

    /// As [`GivenRows::give`], of rows that a batch kernel left.
    ///
    /// # Errors
    /// As [`GivenRows::give`]; a draft without norms.
    pub fn give_left(&mut self, position: u32, left: Left, ahead: u32) -> Result<(), SessionError> {
        if !self.reads(&left) {
            return Err(SessionError::Given { expected: self.hidden, found: left.cols as usize });
        }
        (self.ahead, self.next) = (ahead, Some((position, Source::Left(left))));
        Ok(())
    }

    /// Prepares what `steps` steps from `position` on are given: what the host said, or what follows from the position. Steps after
    /// those that the host spoke of go on with what the step before left.
    ///
    /// # Errors
    /// Rows for other steps; steps that would go on without norms; what the driver refuses.
    pub fn upload(&mut self, stream: &Stream, position: u32, steps: u32) -> Result<(), SessionError> {
        let hidden = self.hidden;
        let wrong = |found: usize| SessionError::Given { expected: hidden * steps, found };
        let of_norm = |norm: &(DeviceBuffer, f32)| (norm.0.address(), norm.1);
        let [(norm_of_model, eps_of_model), (norm, eps)] =
            self.norms.as_ref().map_or([(0, 0.0); 2], |[model, draft]| [of_norm(model), of_norm(draft)]);
        let norms = GivenParams { norm_of_model, norm, eps_of_model, eps, ..GivenParams::zeroed() };
        let (given, values) = match self.next.take() {
            Some((at, Source::Left(left))) if at == position && left.count <= steps => {
                let (left, left_row, given_steps) = (left.address, left.first, left.count);
                (GivenParams { left, left_row, given_steps, ..norms }, vec![])
            }
            Some((_, Source::Left(left))) => return Err(wrong(left.count as usize * hidden as usize)),
            Some((at, Source::Host(values))) => {
                let given_steps = values.len() as u32 / hidden.max(1);
                if at != position || given_steps > steps || given_steps < steps && !self.goes_on() {
                    return Err(wrong(values.len()));
                }
                (GivenParams { given_steps, ..norms }, values)
            }
            None => {
                self.ahead = 0;
                let of_step = |position| (0..hidden).map(move |column| given_value(position, column));
                (GivenParams { given_steps: steps, ..norms }, (position..position + steps).flat_map(of_step).collect())
            }
        };
        self.memory.upload(stream, 0, &values)?;
        let address = if given.left == 0 { self.memory.address() } else { 0 };
        let only_reads = u32::from(std::mem::take(&mut self.only_reads));
        self.launch = GivenParams { given: address, ahead: self.ahead, only_reads, ..given };
        Ok(())
    }

    /// The parameter of a launch after [`GivenRows::upload`].
    pub fn params(&self, params: Params) -> GivenParams {
        let params = match self.reading.as_ref().filter(|_| self.launch.only_reads != 0) {
            Some(of) => Params { runs: of.runs.address(), run_index: of.index.address(), ..params },
            None => params,
        };
        GivenParams { params, ..self.launch }
    }
}

/// The bytes of the exchange that have the first `rows` rows of a buffer of words after a step with `tag`, as the first one and their number.
pub(super) fn words_of(schedule: &Schedule, buffer: BufferId, rows: usize, tag: u32) -> Option<(u64, u64)> {
    let of = schedule.program.buffers.get(buffer.index()).filter(|of| of.words && rows <= of.rows as usize)?;
    let place = schedule.placement.get(buffer.index()).copied().flatten()?;
    let phase = u64::from(tag & 1) * words_bytes(of.rows, of.cols, of.dtype);
    Some((place + phase, words_bytes(rows as u32, of.cols, of.dtype)))
}

/// The word of a column of a row of `cols` values in bf16 or fp32 (rows/words.cuh).
fn word_at(row: usize, col: usize, cols: usize, value_bytes: usize) -> usize {
    let (span, per_span) = (SPAN_BYTES as usize / 4, SPAN_BYTES as usize / value_bytes);
    let (of_group, spans) = (WORD_ROWS as usize, cols.div_ceil(per_span));
    let at = (row / of_group * spans + col / per_span) * of_group * span + row % of_group * span;
    at + col % per_span * value_bytes / 4
}

/// Rows on a device as a batch kernel leaves them, for a check. Values in bf16 lose the lower half of their bits.
///
/// # Errors
/// What the driver refuses.
pub fn left_of(device: &Device, rows: &[Vec<f32>], dtype: DType) -> Result<(DeviceBuffer, Left), SessionError> {
    let (cols, value_bytes) = (rows.first().map_or(0, Vec::len), dtype.bytes());
    let mut words = vec![NO_WORD; words_bytes(rows.len() as u32, cols as u32, dtype) as usize / 4];
    for (row, values) in rows.iter().enumerate() {
        for (col, value) in values.iter().enumerate() {
            let (word, bits) = (&mut words[word_at(row, col, cols, value_bytes)], value.to_bits());
            *word = match value_bytes {
                4 => bits,
                _ if col.is_multiple_of(2) => *word & 0xffff_0000 | bits >> 16,
                _ => *word & 0xffff | bits & 0xffff_0000,
            };
        }
    }
    let buffer = uploaded(device, &device.stream()?, bytemuck::cast_slice(&words))?;
    let left = Left { address: buffer.address(), first: 0, count: rows.len() as u32, cols: cols as u32, value_bytes };
    Ok((buffer, left))
}

/// The first `rows` rows of words of `cols` values in bf16 or fp32 (rows/words.cuh).
///
/// # Errors
/// A row of which a word was not written.
pub(super) fn values_of_words(
    words: &[u32],
    rows: usize,
    cols: usize,
    value_bytes: usize,
) -> Result<Vec<Vec<f32>>, SessionError> {
    let value = |row: usize, col: usize| {
        let word = words.get(word_at(row, col, cols, value_bytes)).copied().filter(|word| *word != NO_WORD);
        let word = word.ok_or(SessionError::NothingLeft { row: row as u32 })?;
        Ok(f32::from_bits(match value_bytes {
            4 => word,
            _ if col.is_multiple_of(2) => word << 16,
            _ => word & 0xffff_0000,
        }))
    };
    (0..rows).map(|row| (0..cols).map(|col| value(row, col)).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Byte of a column of a row: `Words::at` of rows/words.cuh.
    fn at(row: usize, col: usize, cols: usize, bytes: usize) -> usize {
        let (piece_cols, pieces) = (16 / bytes, cols.div_ceil(16 / bytes));
        let (piece, group) = (col / piece_cols, pieces.div_ceil(4) * 512);
        row / 8 * group + piece / 4 * 512 + row % 8 * 64 + piece % 4 * 16 + col % piece_cols * bytes
    }

    #[test]
    fn words_have_the_values_of_their_rows() {
        for (bytes, dtype) in [(2, DType::Bf16), (4, DType::F32)] {
            let (rows, cols) = (11, 70);
            let mut memory = vec![0xffu8; words_bytes(rows as u32, cols as u32, dtype) as usize];
            let value = |row: usize, col: usize| (row * 100 + col) as f32 / 4.0;
            for (row, col) in (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col))) {
                let all = value(row, col).to_bits().to_le_bytes();
                memory[at(row, col, cols, bytes)..][..bytes].copy_from_slice(&all[4 - bytes..]);
            }
            let word = |bytes: &[u8]| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            let words = |memory: &[u8]| -> Vec<u32> { memory.chunks_exact(4).map(word).collect() };
            let found = values_of_words(&words(&memory), rows, cols, bytes).unwrap();
            for (row, found) in found.iter().enumerate() {
                let exact = |col| f32::from_bits(value(row, col).to_bits() & if bytes == 2 { 0xffff_0000 } else { !0 });
                let expected: Vec<f32> = (0..cols).map(exact).collect();
                assert_eq!(*found, expected, "{bytes}: {row}");
            }
            let lost = at(9, 32, cols, bytes) / 4 * 4;
            memory[lost..lost + 4].fill(0xff);
            let fault = values_of_words(&words(&memory), rows, cols, bytes).unwrap_err();
            assert!(matches!(fault, SessionError::NothingLeft { row: 9 }), "{fault}");
        }
    }
}
