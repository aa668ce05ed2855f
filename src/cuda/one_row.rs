//! Owns `OneRowSession`: the decode kernel over a pool of pages, launched as batch kernels are.

use std::collections::VecDeque;
use std::sync::Arc;

use super::driver::Device;
use super::kernel::Watched;
use super::memory::DeviceBuffer;
use super::rows::{
    FirstToken, RowInput, RowLauncher, RowsLaunched, encode_rows, fits, may_queue, only_fills, out_of_range,
};
use super::sampler::{Asked, SamplerSession};
use super::session::{Session, SessionError};
use super::stream::Stream;
use crate::codegen::abi::Queues;
use crate::codegen::emit::Trace;
use crate::ir::BufferId;
use crate::rows::{Shape, Tables};

/// Steps of one row over the pages of batch kernels.
pub struct OneRowSession {
    session: Session,
    shape: Shape,
    steps_max: u32,
    /// Oldest first.
    flying: VecDeque<Flying>,
    /// What the last launch decided for the step after it, if it was waited for.
    decided: Option<u32>,
    /// The last step of the last launch: its logits can be read.
    logits_step: u32,
}

#[derive(Debug, Clone, Copy)]
struct Flying {
    position: u32,
    steps: u32,
    timeout_ms: u64,
    /// The tokens are those of the kernel: it decides some, and no sampler does.
    has_tokens: bool,
    /// The sampler has still to be queued.
    is_unchosen: bool,
}

impl OneRowSession {
    /// Loads the queues of a proven schedule of one row whose cache has pages. `pack` and, if it is given, `cache` are shared with other
    /// kernels of the model. A launch has at most `steps_max` steps.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn load(
        device: &Device,
        queues: &Queues<'_>,
        cubin: &[u8],
        steps_max: u32,
        pack: Arc<DeviceBuffer>,
        cache: Option<Arc<DeviceBuffer>>,
    ) -> Result<OneRowSession, SessionError> {
        let program = &queues.validated().schedule().program;
        let shape = Shape::of(program).expect("validate: a cache of pages has their tables");
        let session = Session::load_over(device, queues, cubin, Trace::Off, steps_max, pack, cache)?;
        Ok(OneRowSession { session, shape, steps_max, flying: VecDeque::new(), decided: None, logits_step: 0 })
    }

    /// Judges the input of a launch. Tells the kernel where the sequence lies, and the token that it continues with unless the kernel knows it.
    fn begin(&mut self, tables: &Tables<'_>, inputs: &[RowInput]) -> Result<u32, SessionError> {
        let steps = tables.steps();
        let ends = inputs.iter().any(|input| input.steps < steps);
        if !fits(&self.shape, tables, inputs.len()) || ends || steps > self.steps_max {
            return Err(out_of_range(tables));
        }
        let position = tables.rows()[0].position;
        let follows = !self.flying.is_empty();
        if follows && !self.session.goes_on_at(position) {
            return Err(SessionError::NotFinished);
        }
        let (_, pages) = encode_rows(tables, inputs, &[follows || self.decided.is_some()], self.session.vocab())?;
        self.session.place(tables.rows()[0].sequence, pages)?;
        self.session.sample_row(inputs[0].inverse_temperature, inputs[0].seed);
        if follows {
            return Ok(position);
        }
        let token = match inputs[0].first {
            FirstToken::Given(token) => token,
            FirstToken::Decided(row) => self.decided.ok_or(SessionError::Undecided { row })?,
        };
        // If the launch begins where the one before ended, the arg-max pairs of that one decide the token once more.
        if self.session.decided_at(position)? != Some(token) {
            self.session.go_on(position, token)?;
        }
        Ok(position)
    }
}

impl RowLauncher for OneRowSession {
    fn shape(&self) -> &Shape {
        &self.shape
    }

    fn vocab(&self) -> u32 {
        self.session.vocab()
    }

    fn steps_max(&self) -> u32 {
        self.steps_max
    }

    fn cache(&self) -> Arc<DeviceBuffer> {
        self.session.cache()
    }

    fn pack(&self) -> Arc<DeviceBuffer> {
        self.session.pack()
    }

    fn queue(&mut self, tables: Tables<'_>, inputs: &[RowInput], with_logits: bool) -> Result<(), SessionError> {
        let steps = tables.steps();
        // The launch runs the whole step nevertheless.
        let has_tokens = !only_fills(&tables, inputs, with_logits)?;
        may_queue(self.flying.iter().map(|flying| flying.has_tokens), inputs, with_logits)?;
        let position = self.begin(&tables, inputs)?;
        let timeout_ms = self.session.launch(position, steps, with_logits)?;
        self.logits_step = steps - 1;
        self.decided = None;
        self.flying.push_back(Flying { position, steps, timeout_ms, has_tokens, is_unchosen: false });
        tables.finish(steps);
        Ok(())
    }

    fn queue_steps(
        &mut self,
        tables: Tables<'_>,
        inputs: &[RowInput],
        choosing: Option<(&mut SamplerSession, &[Asked<'_>])>,
    ) -> Result<(), SessionError> {
        let steps = tables.steps();
        if only_fills(&tables, inputs, true)? {
            return Err(SessionError::NoLogits);
        }
        may_queue(self.flying.iter().map(|_| false), inputs, true)?;
        let FirstToken::Given(token) = inputs.first().map_or(FirstToken::Decided(0), |input| input.first) else {
            return Err(out_of_range(&tables));
        };
        let position = self.begin(&tables, inputs)?;
        self.session.go_on(position, token)?;
        let is_unchosen = choosing.is_none();
        let timeout_ms = self.session.launch_each(position, steps, choosing)?;
        self.logits_step = 0;
        self.decided = None;
        self.flying.push_back(Flying { position, steps, timeout_ms, has_tokens: false, is_unchosen });
        tables.finish(steps);
        Ok(())
    }

    fn choose(&mut self, sampler: &mut SamplerSession, asked: &[Asked<'_>]) -> Result<(), SessionError> {
        let is_unchosen = self.flying.front_mut().map(|flying| &mut flying.is_unchosen);
        self.session.choose(is_unchosen, sampler, asked)
    }

    fn last_step(&mut self) -> Result<Option<Vec<Vec<u32>>>, SessionError> {
        let Flying { position, steps, timeout_ms, has_tokens, .. } =
            *self.flying.front().ok_or(SessionError::NotQueued)?;
        if self.flying.len() > 1 || !has_tokens || !self.session.goes_on_at(position + steps) {
            return Ok(None);
        }
        self.session.await_decided(position + steps, timeout_ms)?;
        let tokens = (position + 1..position + steps).map(|at| self.session.token(at));
        Ok(Some(vec![tokens.collect::<Result<Vec<u32>, SessionError>>()?]))
    }

    fn finish(&mut self) -> Result<RowsLaunched, SessionError> {
        let Some(Flying { position, steps, timeout_ms, has_tokens, is_unchosen }) = self.flying.pop_front() else {
            return Err(SessionError::NotQueued);
        };
        if is_unchosen {
            return Err(SessionError::NotChosen);
        }
        let launched = self.session.finish(timeout_ms)?;
        let ran = launched.decided.saturating_sub(position + 1).min(steps);
        // One for each step, and one for the step after the last.
        let count = if has_tokens { ran + 1 } else { 0 };
        let tokens = (position..position + count)
            .map(|at| self.session.token(at))
            .collect::<Result<Vec<u32>, SessionError>>()?;
        self.decided = tokens.last().copied().filter(|_| self.flying.is_empty());
        let tokens = tokens.into_iter().map(|token| vec![token]).collect();
        Ok(RowsLaunched { device_us: launched.device_us, steps: ran, tokens })
    }

    fn watched(&self) -> &Watched {
        self.session.watched()
    }

    fn streams(&self) -> Vec<&Stream> {
        self.session.streams()
    }

    fn logits(&self, _row: u32) -> Result<Vec<f32>, SessionError> {
        if !self.flying.is_empty() {
            return Err(SessionError::NotFinished);
        }
        self.session.logits_of_step(self.logits_step)
    }

    fn exchanged(&self, buffer: BufferId, row: u32) -> Result<Vec<f32>, SessionError> {
        if !self.flying.is_empty() {
            return Err(SessionError::NotFinished);
        }
        self.session.exchanged(buffer, row)
    }

    fn poison_logits(&mut self) -> Result<(), SessionError> {
        self.session.poison_logits()
    }

    fn read_cache(&self, at: u64, bytes: usize) -> Result<Vec<u16>, SessionError> {
        self.session.read_cache(at, bytes)
    }
}
