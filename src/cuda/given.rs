//! Owns what a draft reads in addition to its tokens: a vector for each step of a launch of its kernel, and what kernels left of rows for it.

use std::sync::Arc;

use super::driver::{Device, DriverError};
use super::memory::DeviceBuffer;
use super::session::SessionError;
use super::stream::Stream;
use crate::codegen::abi::{GivenParams, Params};
use crate::ir::BufferId;
use crate::ir::layout::{SPAN_BYTES, WORD_ROWS, words_bytes};
use crate::ir::op::{Op, Role};
use crate::ir::program::Program;
use crate::ir::schedule::Schedule;
use crate::model::synthetic::given_value;

/// A word that was not written: `NO_WORD` of rows/words.cuh.
const NO_WORD: u32 = u32::MAX;

/// What the steps of a launch are given.
pub(super) struct GivenRows {
    /// `[steps][hidden]`
    memory: DeviceBuffer,
    hidden: u32,
    ahead: u32,
    /// Those of the next launch, from this position on.
    next: Option<(u32, Vec<f32>)>,
}

impl GivenRows {
    /// Room for launches of up to `steps_max` steps; `None`: the program is not that of a draft.
    pub fn of(device: &Device, program: &Program, steps_max: u32) -> Result<Option<GivenRows>, DriverError> {
        let Some(join) = program.grids.iter().find(|grid| matches!(grid.op, Op::Join { .. })) else { return Ok(None) };
        let table = join.operand(Role::Table).and_then(|table| program.buffers.get(table.buffer.index()));
        let hidden = table.map_or(0, |table| table.cols);
        let memory = device.alloc((u64::from(steps_max) * u64::from(hidden) * 4).max(16))?;
        Ok(Some(GivenRows { memory, hidden, ahead: 0, next: None }))
    }

    /// Says what the next launch is given, from `position` on. The text is `ahead` positions ahead of the cache.
    ///
    /// # Errors
    /// Rows of another width than the draft has.
    pub fn give(&mut self, position: u32, rows: &[Arc<[f32]>], ahead: u32) -> Result<(), SessionError> {
        if let Some(row) = rows.iter().find(|row| row.len() != self.hidden as usize) {
            return Err(SessionError::Given { expected: self.hidden, found: row.len() });
        }
        self.ahead = ahead;
        self.next = Some((position, rows.iter().flat_map(|row| row.iter().copied()).collect()));
        Ok(())
    }

    /// Uploads what `steps` steps from `position` on are given: what the host said, or what follows from the position.
    pub fn upload(&mut self, stream: &Stream, position: u32, steps: u32) -> Result<(), SessionError> {
        let (hidden, count) = (self.hidden, steps as usize * self.hidden as usize);
        let follows = || {
            let of_step = |position| (0..hidden).map(move |column| given_value(position, column));
            (position..position + steps).flat_map(of_step).collect()
        };
        let values: Vec<f32> = match self.next.take() {
            Some((at, values)) if at == position && values.len() == count => values,
            Some((_, values)) => {
                return Err(SessionError::Given { expected: hidden * steps, found: values.len() });
            }
            None => {
                self.ahead = 0;
                follows()
            }
        };
        Ok(self.memory.upload(stream, 0, &values)?)
    }

    /// The parameter of a launch after [`GivenRows::upload`].
    pub fn params(&self, params: Params) -> GivenParams {
        GivenParams { params, given: self.memory.address(), ahead: self.ahead, reserved_of_given: 0 }
    }
}

/// The bytes of the exchange that have the first `rows` rows of a buffer of words after a step with `tag`, as the first one and their number.
pub(super) fn words_of(schedule: &Schedule, buffer: BufferId, rows: usize, tag: u32) -> Option<(u64, u64)> {
    let of = schedule.program.buffers.get(buffer.index()).filter(|of| of.words && rows <= of.rows as usize)?;
    let place = schedule.placement.get(buffer.index()).copied().flatten()?;
    let phase = u64::from(tag & 1) * words_bytes(of.rows, of.cols, of.dtype);
    Some((place + phase, words_bytes(rows as u32, of.cols, of.dtype)))
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
    let (span, per_span) = (SPAN_BYTES as usize / 4, SPAN_BYTES as usize / value_bytes);
    let (of_group, spans) = (WORD_ROWS as usize, cols.div_ceil(per_span));
    let value = |row: usize, col: usize| {
        let at = (row / of_group * spans + col / per_span) * of_group * span + row % of_group * span;
        let word = words.get(at + col % per_span * value_bytes / 4).copied().filter(|word| *word != NO_WORD);
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
    use crate::dtype::DType;

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
