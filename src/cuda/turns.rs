//! Owns `TurnsSession`: launches of more rows than a kernel has, as several launches of the kernel in order.
//!
//! Each launch of the kernel takes its rows through all steps. Rows of a sequence that one of them begins and the next one goes on with
//! have one step ([`crate::rows`]), and the second launch finds the keys of the first in the cache. All use one exchange, because each
//! begins after the one before has ended.

use super::driver::Device;
use super::kernel::{Kernel, Watched, cache_or_own, vocab};
use super::memory::{DeviceBuffer, MappedBuffer};
use super::rows::{
    FirstToken, RowInput, RowLauncher, RowsLaunched, Steps, choose_now, encode_rows, fits, only_fills, out_of_range,
    queue_each, rows_of_steps, timeout,
};
use super::sampler::{Asked, SamplerSession};
use super::session::SessionError;
use super::step_memory::StepMemory;
use crate::codegen::abi::{Params, Queues, Row, RowsParams};
use crate::codegen::emit::Trace;
use crate::ir::BufferId;
use crate::ir::layout::WORD_ROWS;
use crate::rows::{Shape, Tables};
use bytemuck::Zeroable;
use std::sync::Arc;

/// A launch that is queued or runs.
#[derive(Clone, Copy)]
struct Flying {
    rows: usize,
    steps: u32,
    only_fills: bool,
    /// Each step was a kernel of its own for each turn, and a sampler chose the tokens after it.
    is_sampled: bool,
    /// The sampler is not queued yet.
    is_unchosen: bool,
}

/// A batch kernel on a device, for launches of more rows.
pub struct TurnsSession {
    kernel: Kernel,
    /// That of a launch.
    shape: Shape,
    /// Rows of the kernel, and those of a step as it lays them out.
    kernel_rows: u32,
    padded: u32,
    cache: Arc<DeviceBuffer>,
    memory: StepMemory,
    rows: DeviceBuffer,
    pages: DeviceBuffer,
    /// For each turn, one after another: a count, and the tokens of each step.
    mailbox: MappedBuffer,
    tag: u32,
    /// The tokens that rows decided in the last launch; empty if it decided none.
    decided: Vec<u32>,
    /// The last launch only filled the cache.
    filled: bool,
    flying: Option<Flying>,
    steps_max: u32,
    vocab: u32,
}

impl TurnsSession {
    /// Loads the queues of a proven schedule, for launches of up to `rows` rows and `steps_max` steps. `pack` and, if it is given, `cache`
    /// are shared with other kernels of the model.
    ///
    /// # Errors
    /// What the driver refuses; a schedule without tables.
    pub fn load(
        device: &Device,
        queues: &Queues<'_>,
        cubin: &[u8],
        (rows, steps_max): (u32, u32),
        pack: Arc<DeviceBuffer>,
        cache: Option<Arc<DeviceBuffer>>,
    ) -> Result<TurnsSession, SessionError> {
        // Turns follow one another in one stream.
        if device.count() != 1 {
            return Err(SessionError::Devices { expected: 1, found: device.count() });
        }
        let mut kernel = Kernel::load(device, queues, cubin, Trace::Off, steps_max, pack)?;
        let (stream, program, tables) = (&kernel.watched.stream, &kernel.schedule.program, queues.tables());
        let of_kernel = Shape::of(program).expect("validate: a batch kernel has tables");
        let kernel_rows = of_kernel.rows;
        let shape = Shape { rows: rows.max(kernel_rows), ..of_kernel };
        let padded = kernel_rows.next_multiple_of(WORD_ROWS);
        let turns = shape.rows.div_ceil(kernel_rows);
        // The last turn has room for as many rows as the kernel lays out.
        let rows_max = u64::from((turns - 1) * kernel_rows + padded);
        let cache = cache_or_own(cache, device, stream, tables.cache_bytes)?;
        let vocab = vocab(program);
        let memory = StepMemory::alloc(device, stream, tables.exchange_bytes, rows_max * u64::from(vocab))?;
        kernel.watched.shape.kept = memory.kept();
        let mut session = TurnsSession {
            memory,
            // A table for each step that is a kernel of its own.
            rows: device.alloc(u64::from(steps_max.max(1)) * rows_max * size_of::<Row>() as u64)?,
            pages: device.alloc((rows_max * u64::from(shape.blocks()) * 4).max(16))?,
            mailbox: device.alloc_mapped(turns as usize * mailbox_words(steps_max, padded))?,
            kernel,
            shape,
            kernel_rows,
            padded,
            cache,
            tag: 0,
            decided: vec![],
            filled: false,
            flying: None,
            steps_max,
            vocab,
        };
        session.begin_words()?;
        session.kernel.watched.stream.synchronize()?;
        Ok(session)
    }

    /// Sets every word of the exchange to all ones: no word is there yet.
    fn begin_words(&mut self) -> Result<(), SessionError> {
        self.memory.poison_exchange(&self.kernel.watched.stream)?;
        (self.tag, self.filled) = (2, false);
        self.decided.clear();
        Ok(())
    }

    fn turns(&self, rows: usize) -> u32 {
        (rows as u32).div_ceil(self.kernel_rows)
    }

    /// The word of the mailbox where a turn counts its steps; tokens follow.
    fn mailbox_at(&self, turn: u32) -> usize {
        turn as usize * mailbox_words(self.steps_max, self.padded)
    }

    /// Judges the inputs of a launch, clears words that it must not find, and uploads its tables: those of each step, where `each` is a
    /// kernel of its own. Returns whether it only fills the cache.
    fn begin(
        &mut self,
        tables: &Tables<'_>,
        inputs: &[RowInput],
        with_logits: bool,
        each: bool,
    ) -> Result<bool, SessionError> {
        let (steps, turns) = (tables.steps(), self.turns(inputs.len()));
        if self.flying.is_some() {
            return Err(SessionError::NotFinished);
        }
        let ends = inputs.iter().any(|input| input.steps < steps);
        if !fits(&self.shape, tables, inputs.len()) || ends || steps > self.steps_max {
            return Err(out_of_range(tables));
        }
        let only_fills = only_fills(tables, inputs, with_logits)?;
        let (rows, pages) = encode_rows(tables, &self.told(inputs), &[], self.vocab)?;
        let rows = in_turns(rows, self.kernel_rows);
        // Tags never repeat, and launches that only fill the cache leave words uncleared.
        let last = u64::from(self.tag) + u64::from(steps) * u64::from(turns) + 2;
        if last > u64::from(u32::MAX) || self.filled && !only_fills {
            self.begin_words()?;
        }
        let stream = &self.kernel.watched.stream;
        self.rows.upload(stream, 0, &if each { rows_of_steps(&rows, steps) } else { rows })?;
        self.pages.upload(stream, 0, &pages)?;
        (0..turns).try_for_each(|turn| self.mailbox.store(self.mailbox_at(turn), 0))?;
        Ok(only_fills)
    }

    /// The inputs with the tokens that the host was told.
    fn told(&self, inputs: &[RowInput]) -> Vec<RowInput> {
        let first = |first| match first {
            FirstToken::Decided(row) => self.decided.get(row as usize).map_or(first, |token| FirstToken::Given(*token)),
            FirstToken::Given(_) => first,
        };
        inputs.iter().map(|input| RowInput { first: first(input.first), ..*input }).collect()
    }

    /// A turn of `count` rows, whose tables are at `rows`. The caller fills in what differs from a launch of one whole step.
    fn turn(&self, turn: u32, count: usize, rows: u64, logits: bool, steps: u32) -> Result<RowsParams, SessionError> {
        let first = turn * self.kernel_rows;
        let logits_at = self.memory.logits() + u64::from(first) * u64::from(self.vocab) * 4;
        let params = Params {
            cache: self.cache.address(),
            exchange: self.memory.exchange(),
            logits: if logits { logits_at } else { 0 },
            mailbox: self.mailbox.address() + self.mailbox_at(turn) as u64 * 4,
            steps,
            ..self.kernel.params(timeout(steps), &[])?
        };
        Ok(RowsParams {
            params,
            rows: rows + u64::from(first) * size_of::<Row>() as u64,
            pages: self.pages.address(),
            row_count: (count as u32 - first).min(self.kernel_rows),
            logits_from: steps - 1,
            ..RowsParams::zeroed()
        })
    }
}

impl RowLauncher for TurnsSession {
    fn shape(&self) -> &Shape {
        &self.shape
    }

    fn vocab(&self) -> u32 {
        self.vocab
    }

    fn steps_max(&self) -> u32 {
        self.steps_max
    }

    fn cache(&self) -> Arc<DeviceBuffer> {
        self.cache.clone()
    }

    fn pack(&self) -> Arc<DeviceBuffer> {
        self.kernel.pack.clone()
    }

    fn queue(&mut self, tables: Tables<'_>, inputs: &[RowInput], with_logits: bool) -> Result<(), SessionError> {
        let (steps, rows) = (tables.steps(), inputs.len());
        let only_fills = self.begin(&tables, inputs, with_logits, false)?;
        let (watched, fills) = (&self.kernel.watched, if only_fills { self.kernel.fills() } else { 0 });
        watched.begin()?;
        for turn in 0..self.turns(rows) {
            let of_turn = self.turn(turn, rows, self.rows.address(), with_logits, steps)?;
            let params = Params { tag: self.tag + turn * steps, ..of_turn.params };
            watched.queue(&RowsParams { params, fills, ..of_turn })?;
        }
        watched.end()?;
        self.flying = Some(Flying { rows, steps, only_fills, is_sampled: false, is_unchosen: false });
        tables.finish(steps);
        Ok(())
    }

    fn queue_steps(
        &mut self,
        tables: Tables<'_>,
        inputs: &[RowInput],
        choosing: Option<(&mut SamplerSession, &[Asked<'_>])>,
    ) -> Result<(), SessionError> {
        let (steps, row_count) = (tables.steps(), inputs.len());
        self.begin(&tables, inputs, true, true)?;
        let (watched, logits, turns) = (&self.kernel.watched, self.memory.logits(), self.turns(row_count));
        let all = Steps { rows: self.rows.address(), row_count, steps };
        let is_unchosen = choosing.is_none();
        queue_each(watched, all, logits, choosing, |step, rows| {
            (0..turns).try_for_each(|turn| {
                let of_turn = self.turn(turn, row_count, rows, true, 1)?;
                // Without a mailbox: the sampler has the tokens.
                let params = Params { tag: self.tag + step * turns + turn, mailbox: 0, ..of_turn.params };
                watched.queue(&RowsParams { params, ..of_turn })
            })
        })?;
        self.flying = Some(Flying { rows: row_count, steps, only_fills: false, is_sampled: true, is_unchosen });
        tables.finish(steps);
        Ok(())
    }

    fn choose(&mut self, sampler: &mut SamplerSession, asked: &[Asked<'_>]) -> Result<(), SessionError> {
        let is_unchosen = self.flying.as_mut().map(|flying| &mut flying.is_unchosen);
        choose_now(is_unchosen, &self.kernel.watched, self.memory.logits(), sampler, asked)
    }

    // Its tokens go to the next launch through the host.
    fn last_step(&mut self) -> Result<Option<Vec<Vec<u32>>>, SessionError> {
        self.flying.map(|_| None).ok_or(SessionError::NotQueued)
    }

    fn watched(&self) -> &Watched {
        &self.kernel.watched
    }

    fn finish(&mut self) -> Result<RowsLaunched, SessionError> {
        let Some(Flying { rows, steps, only_fills, is_sampled, is_unchosen }) = self.flying.take() else {
            return Err(SessionError::NotQueued);
        };
        if is_unchosen {
            return Err(SessionError::NotChosen);
        }
        let turns = self.turns(rows);
        // A launch of the kernel keeps its own deadline.
        let finished = self.kernel.finish(timeout(steps) * turns);
        if let Err(SessionError::Hung { .. }) = finished {
            self.begin_words()?;
        }
        let device_us = finished?;
        self.tag += steps * turns;
        self.filled = only_fills;
        self.decided.clear();
        if is_sampled {
            return Ok(RowsLaunched { device_us, steps, tokens: vec![] });
        }
        // Steps that each launch of the kernel began; a launch of whole steps also began the step after the last.
        let expected = if only_fills { 1 } else { steps + 1 };
        let counts = (0..turns).map(|turn| self.mailbox.load(self.mailbox_at(turn)));
        if counts.collect::<Result<Vec<u32>, _>>()?.iter().any(|count| *count != expected) {
            self.begin_words()?;
            return Ok(RowsLaunched { device_us, steps: 0, tokens: vec![] });
        }
        if only_fills {
            return Ok(RowsLaunched { device_us, steps, tokens: vec![] });
        }
        let token = |step: u32, row: u32| {
            let at =
                self.mailbox_at(row / self.kernel_rows) + 1 + (step * self.padded + row % self.kernel_rows) as usize;
            self.mailbox.load(at)
        };
        let of_step = |step| (0..rows as u32).map(|row| token(step, row)).collect();
        let tokens: Vec<Vec<u32>> = (0..=steps).map(of_step).collect::<Result<_, _>>()?;
        self.decided = tokens.last().cloned().unwrap_or_default();
        Ok(RowsLaunched { device_us, steps, tokens })
    }

    fn logits(&self, row: u32) -> Result<Vec<f32>, SessionError> {
        if self.flying.is_some() {
            return Err(SessionError::NotFinished);
        }
        let first = u64::from(row.min(self.shape.rows - 1)) * u64::from(self.vocab);
        Ok(self.memory.read_logits(&self.kernel.watched.stream, first, self.vocab as usize)?)
    }

    fn exchanged(&self, buffer: BufferId, row: u32) -> Result<Vec<f32>, SessionError> {
        if self.flying.is_some() {
            return Err(SessionError::NotFinished);
        }
        let stream = &self.kernel.watched.stream;
        let packets = |at, count| Ok(self.memory.read_packets(stream, at, count)?);
        self.kernel.exchanged(buffer, row, self.tag.wrapping_sub(1), packets)
    }

    fn rows_kept(&self) -> u32 {
        self.kernel_rows
    }

    fn poison_logits(&mut self) -> Result<(), SessionError> {
        Ok(self.memory.poison_logits(&self.kernel.watched.stream)?)
    }

    fn read_cache(&self, at: u64, bytes: usize) -> Result<Vec<u16>, SessionError> {
        Ok(self.cache.download(&self.kernel.watched.stream, at, bytes / 2)?)
    }
}

/// Words of the mailbox of one launch of a kernel.
fn mailbox_words(steps_max: u32, padded: u32) -> usize {
    1 + (steps_max as usize + 1) * padded as usize
}

/// The rows of launches of a kernel that has `kernel_rows` rows: each counts rows from its own first one.
fn in_turns(mut rows: Vec<Row>, kernel_rows: u32) -> Vec<Row> {
    for (at, row) in (0u32..).zip(&mut rows) {
        row.first = row.first.saturating_sub(at / kernel_rows * kernel_rows);
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A run that two launches share ends its history, in each, where its rows of that launch begin.
    #[test]
    fn rows_of_each_launch_of_a_kernel_count_from_its_first() {
        let row = |first| Row { first, ..Row::zeroed() };
        let rows = [0, 1, 2, 2, 2, 2, 6].map(row).to_vec();
        let firsts: Vec<u32> = in_turns(rows, 3).iter().map(|row| row.first).collect();
        assert_eq!(firsts, [0, 1, 2, 0, 0, 0, 0]);
    }
}
