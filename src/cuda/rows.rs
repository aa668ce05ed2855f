//! Owns `RowsSession`: a kernel for several rows with its device memory, launched with tables that a guard has judged.

use super::driver::Device;
use super::memory::{DeviceBuffer, MappedBuffer};
use super::module::{Function, Module};
use super::session::{DeviceTables, SessionError, Stuck, first_buffer, stuck_of};
use super::stream::{Argument, Event, LaunchShape, Stream, Wait};
use crate::codegen::abi::{EOS_MAX, Params, Queues, Row, RowsParams};
use crate::codegen::emit::ENTRY_POINT;
use crate::ir::layout::WORD_ROWS;
use crate::ir::op::Role;
use crate::ir::schedule::Schedule;
use crate::rows::{Shape, Tables};
use std::sync::Arc;
use std::time::Duration;

/// What decides the tokens of one row of a launch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RowInput {
    pub first: FirstToken,
    /// Steps that the row takes part in; at most those of the launch.
    pub steps: u32,
    /// 0: greedy. Otherwise noise is added to each logit divided by the temperature.
    pub inverse_temperature: f32,
    pub seed: u64,
}

/// The token of a row in the first step of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FirstToken {
    Given(u32),
    /// What this row decided in the last step of the launch before.
    Decided(u32),
}

/// What a launch left.
#[derive(Debug, Clone, PartialEq)]
pub struct RowsLaunched {
    /// Device time between the events around the launch.
    pub device_us: f64,
    /// Of each step that ran, and of the step after the last one: the token of each row.
    pub tokens: Vec<Vec<u32>>,
}

/// A kernel for several rows on a device.
pub struct RowsSession {
    stream: Stream,
    function: Function,
    _module: Module,
    launch_shape: LaunchShape,
    schedule: Schedule,
    shape: Shape,
    pack: Arc<DeviceBuffer>,
    cache: Arc<DeviceBuffer>,
    exchange: DeviceBuffer,
    tables: DeviceTables,
    rows: DeviceBuffer,
    pages: DeviceBuffer,
    logits: DeviceBuffer,
    mailbox: MappedBuffer,
    report: MappedBuffer,
    abort: MappedBuffer,
    started: Event,
    ended: Event,
    /// Rows of a step, as the kernel lays them out.
    padded: u32,
    tag: u32,
    steps_max: u32,
    vocab: u32,
}

impl RowsSession {
    /// Loads the queues of a proven schedule. `pack` and, if it is given, `cache` are shared with other kernels of the model. A launch
    /// has at most `steps_max` steps, and the logits of its last one can be read.
    ///
    /// # Errors
    /// What the driver refuses; a schedule without tables.
    pub fn load(
        device: &Device,
        queues: &Queues<'_>,
        cubin: &[u8],
        steps_max: u32,
        pack: Arc<DeviceBuffer>,
        cache: Option<Arc<DeviceBuffer>>,
    ) -> Result<RowsSession, SessionError> {
        let schedule = queues.validated().schedule();
        let machine = &schedule.machine;
        let shape = Shape::of(&schedule.program).expect("validate: a kernel for rows has tables");
        let tables = queues.tables();
        let stream = device.stream()?;
        let module = device.load(cubin)?;
        let smem = machine.smem.iter().map(|p| p.offset + p.bytes).max().unwrap_or(0);
        let function = device.function(&module, ENTRY_POINT, smem)?;
        let block = (machine.consumer_warps + machine.loader_warps) * 32;
        let padded = shape.rows.next_multiple_of(WORD_ROWS);
        let exchange = device.alloc(tables.exchange_bytes.max(16))?;
        let cache = match cache {
            Some(cache) => cache,
            None => {
                let mut cache = device.alloc(tables.cache_bytes.max(16))?;
                cache.poison(&stream)?;
                Arc::new(cache)
            }
        };
        let vocab = first_buffer(&schedule.program, Role::Logits)
            .map_or(0, |buffer| schedule.program.buffers[buffer.index()].cols);
        let mut logits = device.alloc((u64::from(padded) * u64::from(vocab) * 4).max(16))?;
        logits.poison(&stream)?;
        let mut session = RowsSession {
            launch_shape: LaunchShape { grid: machine.sms, block, smem_dynamic_bytes: smem, cluster: 1 },
            mailbox: device.alloc_mapped((steps_max as usize + 1) * padded as usize + 1)?,
            report: device.alloc_mapped(machine.sms as usize * 8)?,
            abort: device.alloc_mapped(1)?,
            rows: device.alloc(u64::from(padded) * std::mem::size_of::<Row>() as u64)?,
            pages: device.alloc((u64::from(padded) * u64::from(shape.blocks()) * 4).max(16))?,
            started: device.event()?,
            ended: device.event()?,
            tables: DeviceTables::upload(device, &stream, tables)?,
            stream,
            function,
            _module: module,
            schedule: schedule.clone(),
            shape,
            pack,
            cache,
            exchange,
            logits,
            padded,
            tag: 0,
            steps_max,
            vocab,
        };
        session.begin_words()?;
        session.stream.synchronize()?;
        Ok(session)
    }

    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The cache arena, to share with another kernel whose caches lie at the same places.
    pub fn cache(&self) -> Arc<DeviceBuffer> {
        self.cache.clone()
    }

    /// Makes every word of the exchange one that is not there yet. Packets of a tag that was never used are not there either.
    fn begin_words(&mut self) -> Result<(), SessionError> {
        self.exchange.poison(&self.stream)?;
        self.tag = 2;
        Ok(())
    }

    /// Runs a launch and waits. `inputs` has one for each row of `tables`.
    ///
    /// # Errors
    /// Inputs that do not fit the tables; a launch that gave up. After one that gave up the positions of its rows are not written.
    pub fn run(
        &mut self,
        tables: Tables<'_>,
        inputs: &[RowInput],
        eos: &[u32],
        with_logits: bool,
    ) -> Result<RowsLaunched, SessionError> {
        let steps = tables.steps();
        let context_max = self.shape.context_max;
        if tables.shape() != &self.shape || inputs.len() != tables.rows().len() || steps > self.steps_max {
            let position = tables.rows().iter().map(|row| row.position).max().unwrap_or(0);
            return Err(SessionError::Range { position, steps, context_max });
        }
        if eos.len() > EOS_MAX {
            return Err(SessionError::EosCount { found: eos.len() });
        }
        // Tags never repeat: a packet of 2^32 steps ago would pass for a current one.
        if self.tag > u32::MAX - steps - 2 {
            self.begin_words()?;
        }
        self.upload(&tables, inputs)?;
        let timeout = Duration::from_millis(1000 + 20 * u64::from(steps));
        self.abort.store(0, 0)?;
        self.report.fill(0);
        self.mailbox.store(0, 0)?;
        let mut ids = [0i32; EOS_MAX];
        for (to, &id) in ids.iter_mut().zip(eos) {
            *to = id as i32;
        }
        let params = RowsParams {
            params: Params {
                pack: self.pack.address(),
                cache: self.cache.address(),
                exchange: self.exchange.address(),
                logits: if with_logits { self.logits.address() } else { 0 },
                entries: self.tables.entries.address(),
                entry_index: self.tables.entry_index.address(),
                runs: self.tables.runs.address(),
                run_index: self.tables.run_index.address(),
                prompt: 0,
                mailbox: self.mailbox.address(),
                report: self.report.address(),
                abort: self.abort.address(),
                stamps: 0,
                timeout_ns: timeout.as_nanos() as u64,
                seed: 0,
                prompt_len: 0,
                position: 0,
                steps,
                tag: self.tag,
                eos_count: eos.len() as u32,
                eos: ids,
                inverse_temperature: 0.0,
                top_k: 0,
                top_p_q32: 0,
            },
            rows: self.rows.address(),
            pages: self.pages.address(),
            row_count: inputs.len() as u32,
            logits_from: steps - 1,
        };
        self.started.record(&self.stream)?;
        let argument = Argument::Struct(bytemuck::bytes_of(&params));
        self.stream.launch_cooperative(&self.function, &self.launch_shape, &[argument])?;
        self.ended.record(&self.stream)?;
        self.finish(timeout)?;
        let ran = self.mailbox.load(0)?;
        self.tag += steps;
        // Fewer steps: words of the last phase would be cleared in the wrong step.
        if ran != steps + 1 {
            self.begin_words()?;
        }
        let token = |step: u32, row: usize| self.mailbox.load(1 + (step * self.padded) as usize + row);
        let tokens: Vec<Vec<u32>> =
            (0..ran).map(|step| (0..inputs.len()).map(|row| token(step, row)).collect()).collect::<Result<_, _>>()?;
        let device_us = self.started.elapsed_us(&self.ended)?;
        tables.finish(ran.saturating_sub(1).min(steps));
        Ok(RowsLaunched { device_us, tokens })
    }

    fn upload(&mut self, tables: &Tables<'_>, inputs: &[RowInput]) -> Result<(), SessionError> {
        let mut rows = vec![];
        let mut pages: Vec<u32> = vec![];
        for (r, (row, input)) in (0u32..).zip(tables.rows().iter().zip(inputs)) {
            let first = tables.rows().iter().position(|other| other.sequence == row.sequence);
            let (token, from) = match input.first {
                FirstToken::Given(token) if token >= self.vocab => {
                    return Err(SessionError::Token { token, vocab: self.vocab });
                }
                FirstToken::Given(token) => (token as i32, 0),
                FirstToken::Decided(from) => (-1, from.min(self.padded - 1)),
            };
            rows.push(Row {
                // Each row brings the pages of its own sequence.
                sequence: r,
                position: row.position,
                token,
                from,
                first: first.unwrap_or(r as usize) as u32,
                steps: input.steps.min(tables.steps()),
                seed_low: input.seed as u32,
                seed_high: (input.seed >> 32) as u32,
                inverse_temperature: input.inverse_temperature,
                reserved: [0; 3],
            });
            pages.extend(tables.pages(r as usize));
        }
        self.rows.upload(&self.stream, 0, &rows)?;
        self.pages.upload(&self.stream, 0, &pages)?;
        Ok(())
    }

    fn finish(&mut self, timeout: Duration) -> Result<(), SessionError> {
        let timeout_ms = timeout.as_millis() as u64;
        // The kernel's own deadline comes first; the margin is for the launch itself.
        if self.stream.wait_timeout(timeout + Duration::from_secs(1))? == Wait::TimedOut {
            self.abort.store(0, 1)?;
            if self.stream.wait_timeout(Duration::from_secs(2))? == Wait::TimedOut {
                return Err(SessionError::Lost);
            }
        }
        if self.abort.load(0)? != 0 {
            let stuck: Vec<Stuck> = stuck_of(&self.schedule, &self.report);
            self.begin_words()?;
            return Err(SessionError::Hung { timeout_ms, stuck });
        }
        Ok(())
    }

    /// Logits of a row in the last step of the last launch that asked for them.
    pub fn logits(&self, row: u32) -> Result<Vec<f32>, SessionError> {
        let at = u64::from(row.min(self.padded - 1)) * u64::from(self.vocab) * 4;
        Ok(self.logits.download(&self.stream, at, self.vocab as usize)?)
    }

    /// Fills the logits with a pattern that no kernel writes, so that an unwritten row shows.
    pub fn poison_logits(&mut self) -> Result<(), SessionError> {
        Ok(self.logits.poison(&self.stream)?)
    }
}
