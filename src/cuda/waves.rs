//! Owns `WavesSession`: a kernel of waves with its device memory, which reads prompt chunks of one sequence into a shared cache.

use super::driver::Device;
use super::kernel::{Watched, uploaded, vocab};
use super::memory::DeviceBuffer;
use super::session::{SessionError, Stuck};
use super::stream::LaunchShape;
use crate::codegen::emit::Trace;
use crate::codegen::waves::{ENTRY_POINT, WaveParams, encode};
use crate::rows::{Shape, Tables, runs};
use crate::trace::STAMP_WORDS;
use crate::waves::Proven;
use std::sync::Arc;
use std::time::Duration;

/// How long a launch may take.
const TIMEOUT: Duration = Duration::from_secs(5);

/// A kernel of waves on a device.
pub struct WavesSession {
    watched: Watched,
    shape: Shape,
    vocab: u32,
    /// The grid of each wave, for errors.
    grids: Vec<String>,
    pack: Arc<DeviceBuffer>,
    cache: Arc<DeviceBuffer>,
    waves: DeviceBuffer,
    shares: DeviceBuffer,
    share_index: DeviceBuffer,
    work: DeviceBuffer,
    tokens: DeviceBuffer,
    pages: DeviceBuffer,
    arrived: DeviceBuffer,
    stamps: DeviceBuffer,
    /// Words of the stamps of a launch; 0 without them.
    stamp_words: usize,
    /// A chunk is queued or being read.
    is_flying: bool,
}

impl WavesSession {
    /// Loads the waves of a proven plan; `trace` is what the cubin was compiled with. `pack` and `cache` are those of the kernel for rows
    /// that the plan was proven against.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn load(
        device: &Device,
        proven: &Proven<'_>,
        cubin: &[u8],
        trace: Trace,
        pack: Arc<DeviceBuffer>,
        cache: Arc<DeviceBuffer>,
    ) -> Result<WavesSession, SessionError> {
        let (plan, program) = (proven.plan(), &proven.validated().schedule().program);
        let of_rows = Shape::of(program).expect("validate: a kernel for rows has tables");
        let shape = Shape { rows: plan.rows, ..of_rows };
        let m = &plan.machine;
        let launch = LaunchShape {
            grid: m.sms,
            block: (m.warps + m.loader_warps) * 32,
            smem_dynamic_bytes: plan.smem_bytes(),
            cluster: 1,
        };
        let registers = 32 * (m.warps * m.registers + m.loader_warps * m.loader_registers);
        let watched = Watched::load(device, cubin, ENTRY_POINT, launch, registers)?;
        let tables = encode(proven);
        let stream = &watched.stream;
        // Columns that pad the input of a product stay what they are here.
        let mut work = device.alloc(plan.work_bytes())?;
        work.zero(stream)?;
        let stamp_words = if trace == Trace::On { m.sms as usize * plan.waves.len() * STAMP_WORDS } else { 0 };
        let session = WavesSession {
            shape,
            stamps: device.alloc((stamp_words as u64 * 8).max(16))?,
            stamp_words,
            is_flying: false,
            vocab: vocab(program),
            grids: plan.waves.iter().map(|wave| program.grids[wave.grid.index()].name.clone()).collect(),
            pack,
            cache,
            waves: uploaded(device, stream, bytemuck::cast_slice(&tables.waves))?,
            shares: uploaded(device, stream, bytemuck::cast_slice(&tables.shares))?,
            share_index: uploaded(device, stream, bytemuck::cast_slice(&tables.share_index))?,
            work,
            tokens: device.alloc(u64::from(plan.rows) * 4)?,
            pages: device.alloc(u64::from(shape.blocks()) * 4)?,
            arrived: device.alloc(16)?,
            watched,
        };
        session.watched.stream.synchronize()?;
        Ok(session)
    }

    /// What bounds the tables of a launch; its rows are those of a chunk at most.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Reads a chunk of one sequence and waits: keys and values of its tokens are in the cache when this returns. `tables` has a row for
    /// each token, at consecutive positions, and none wants logits. Returns the time on the device, in microseconds.
    ///
    /// # Errors
    /// Tables of another shape, or of several sequences; tokens beyond the vocabulary; a launch that gave up, after which the positions are
    /// not written.
    pub fn read(&mut self, tables: Tables<'_>, tokens: &[u32]) -> Result<f64, SessionError> {
        self.launch(&tables, tokens)?;
        let device_us = self.finish()?;
        tables.finish(1);
        Ok(device_us)
    }

    /// Queues the reading of a chunk and returns at once. Its positions count as written for later launches, which the caller queues
    /// after [`WavesSession::finish`].
    ///
    /// # Errors
    /// As [`WavesSession::read`]; a chunk that was not waited for.
    pub fn queue(&mut self, tables: Tables<'_>, tokens: &[u32]) -> Result<(), SessionError> {
        self.launch(&tables, tokens)?;
        tables.finish(1);
        Ok(())
    }

    fn launch(&mut self, tables: &Tables<'_>, tokens: &[u32]) -> Result<(), SessionError> {
        if self.is_flying {
            return Err(SessionError::NotFinished);
        }
        let rows = tables.rows();
        let position = rows.first().map_or(0, |row| row.position);
        // The guard may be that of a kernel for other numbers of rows over the same cache.
        let fits = Shape { rows: self.shape.rows, ..*tables.shape() } == self.shape
            && rows.len() <= self.shape.rows as usize
            && rows.len() == tokens.len()
            && tables.steps() == 1
            && runs(rows).count() == 1;
        if !fits {
            let (steps, context_max) = (tables.steps(), self.shape.context_max);
            return Err(SessionError::Range { position, steps, context_max });
        }
        if rows.iter().any(|row| row.wants_logits) {
            return Err(SessionError::NoLogits);
        }
        if let Some(&token) = tokens.iter().find(|token| **token >= self.vocab) {
            return Err(SessionError::Token { token, vocab: self.vocab });
        }
        let stream = &self.watched.stream;
        self.tokens.upload(stream, 0, tokens)?;
        let pages: Vec<u32> = tables.pages(0).collect();
        self.pages.upload(stream, 0, &pages)?;
        self.arrived.zero(stream)?;
        let (report, abort) = self.watched.watch_words();
        let params = WaveParams {
            pack: self.pack.address(),
            cache: self.cache.address(),
            work: self.work.address(),
            waves: self.waves.address(),
            shares: self.shares.address(),
            share_index: self.share_index.address(),
            tokens: self.tokens.address(),
            pages: self.pages.address(),
            arrived: self.arrived.address(),
            report,
            abort,
            stamps: self.stamps.address(),
            timeout_ns: TIMEOUT.as_nanos() as u64,
            wave_count: self.grids.len() as u32,
            row_count: rows.len() as u32,
            position,
            reserved: 0,
        };
        self.watched.launch(&params)?;
        self.is_flying = true;
        Ok(())
    }

    /// Waits for the queued chunk: its time on the device, in microseconds.
    ///
    /// # Errors
    /// No chunk is queued, or its launch gave up.
    pub fn finish(&mut self) -> Result<f64, SessionError> {
        if !std::mem::take(&mut self.is_flying) {
            return Err(SessionError::NotQueued);
        }
        let grid = |stuck: &Stuck| self.grids.get(stuck.step as usize).cloned();
        self.watched.finish(TIMEOUT, grid)
    }

    /// Stamps of the last launch, `[sms][waves][STAMP_WORDS]`; none if the kernel was compiled without.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn stamps(&self) -> Result<Vec<u64>, SessionError> {
        Ok(self.stamps.download(&self.watched.stream, 0, self.stamp_words)?)
    }
}
