//! Owns the stepper of CUDA targets: kernels for several rows on a device, with the guard of their tables.

use super::stepper::{Alone, Bounds, Launch, LaunchRow, Said, Stepper, Want, admit};
use crate::cuda::rows::{FirstToken, RowInput, RowLauncher};
use crate::cuda::sampler::{Asked, SamplerSession, decided};
use crate::cuda::waves::WavesSession;
use crate::error::Fault;
use crate::rows::{Edit, Guard, Shape};
use crate::sample::TokenSet;
use crate::waves::CHUNK_MIN;
use std::ops::Range;

/// Queues launches on a device. Greedy choice and temperature are the kernel's. Where a row wants another choice, the sampler chooses
/// the tokens of all rows.
pub struct DeviceStepper {
    /// Ascending by rows, over one cache.
    sessions: Vec<Box<dyn RowLauncher>>,
    /// Reads long chunks of one prompt into the same cache.
    waves: Option<WavesSession>,
    sampler: Option<SamplerSession>,
    guard: Guard,
    /// Rows of a launch, at most. Those of more than the last session has are queued in parts, one after another.
    rows_max: u32,
    /// The launch that is queued or runs.
    rows: Vec<LaunchRow>,
    steps: u32,
    /// The sampler chooses its tokens, and for some of its rows a grammar says which ids may come next.
    is_sampled: bool,
    is_guided: bool,
    /// What grammars allow its rows, once that was told.
    allowed: Vec<Option<TokenSet>>,
    /// The rows that are queued or run, and on what.
    part: Range<usize>,
    running: Kernel,
}

#[derive(Debug, Clone, Copy)]
enum Kernel {
    Rows(usize),
    Waves,
}

impl DeviceStepper {
    /// A stepper over sessions that nothing was launched on yet, ascending by rows; all have the same cache. A launch runs on the first
    /// one that has as many rows, or on that of waves. `None`: there is no session.
    pub fn new(
        sessions: Vec<Box<dyn RowLauncher>>,
        waves: Option<WavesSession>,
        sampler: Option<SamplerSession>,
    ) -> Option<DeviceStepper> {
        let of_rows = *sessions.last()?.shape();
        let rows = waves.as_ref().map_or(0, |waves| waves.shape().rows).max(of_rows.rows);
        Some(DeviceStepper {
            sessions,
            waves,
            sampler,
            guard: Guard::new(Shape { rows, ..of_rows }),
            rows_max: of_rows.rows,
            rows: vec![],
            steps: 0,
            is_sampled: false,
            is_guided: false,
            allowed: vec![],
            part: 0..0,
            running: Kernel::Rows(0),
        })
    }

    /// Takes launches of up to `rows_max` rows, if that is more than the last session has. For kernels whose rows have the bits that they have
    /// alone: a launch in parts may run on several of them.
    pub fn with_rows(self, rows_max: u32) -> DeviceStepper {
        DeviceStepper { rows_max: self.rows_max.max(rows_max), ..self }
    }

    /// Queues the rows of the launch from `from` on, as many as the last session has.
    fn queue(&mut self, from: usize, edits: Vec<Edit>) -> Result<(), Fault> {
        let last = self.sessions.len() - 1;
        let most = self.sessions[last].shape().rows as usize;
        self.part = from..self.rows.len().min(from + most);
        let rows = &self.rows[self.part.clone()];
        let steps = self.steps;
        let tables = admit(&mut self.guard, rows, steps, edits)?;
        let with_logits = rows.iter().any(|row| row.want == Want::Logits);
        // Rows of prompts alone decide nothing.
        let decides = rows.iter().any(|row| row.want != Want::Nothing);
        let inputs: Vec<RowInput> = rows.iter().map(|row| input(row, steps, self.is_sampled)).collect();
        // The guard has judged that the largest has.
        let smallest = self.sessions.iter().position(|session| session.shape().rows as usize >= rows.len());
        let smallest = smallest.unwrap_or(last);
        self.running = Kernel::Rows(smallest);
        let session = &mut self.sessions[smallest];
        match &mut self.sampler {
            Some(_) if self.is_guided && decides => Ok(session.queue_unchosen(tables, &inputs)?),
            Some(sampler) if self.is_sampled && decides => {
                let asked: Vec<Asked<'_>> = (0..).zip(rows).filter_map(|(at, row)| asked(at, row, None)).collect();
                Ok(session.queue_sampled(tables, &inputs, sampler, &asked)?)
            }
            None if self.is_sampled => Err(Fault::internal("a row wants a choice, and there is no sampler")),
            _ => Ok(session.queue(tables, &inputs, with_logits)?),
        }
    }

    /// Queues the sampler after the part that is queued or runs, with what grammars allow.
    fn choose(&mut self) -> Result<(), Fault> {
        let (Kernel::Rows(session), Some(sampler)) = (self.running, &mut self.sampler) else {
            return Err(Fault::internal("ids are allowed for a launch without a sampler"));
        };
        let rows = (0..).zip(&self.rows[self.part.clone()]).zip(&self.allowed[self.part.clone()]);
        let asked: Vec<Asked<'_>> = rows.filter_map(|((at, row), allowed)| asked(at, row, allowed.as_ref())).collect();
        // Nothing of it waits for a choice.
        if asked.is_empty() {
            return Ok(());
        }
        Ok(self.sessions[session].choose(sampler, &asked)?)
    }

    /// Waits for the part that is queued or runs.
    fn collect_part(&mut self) -> Result<Vec<Said>, Fault> {
        let session = match (self.running, &mut self.waves) {
            (Kernel::Rows(session), _) => &mut self.sessions[session],
            (Kernel::Waves, Some(waves)) => {
                waves.finish()?;
                return Ok(vec![Said::Nothing; self.part.len()]);
            }
            (Kernel::Waves, None) => return Err(Fault::internal("a launch of waves without their kernel")),
        };
        let tokens = session.finish()?.tokens;
        let vocab = session.vocab();
        let mut asked = 0;
        let mut choices = |row: &LaunchRow, logprobs: Option<u32>| {
            let Some(sampler) = &self.sampler else { return Err(Fault::internal("answers without a sampler")) };
            let answers = (0..self.steps).map(|step| {
                let answer = sampler.answer(step, asked)?;
                Ok(decided(&answer, row.position + 1 + step, vocab, logprobs))
            });
            let answers = answers.collect::<Result<Vec<_>, Fault>>();
            asked += 1;
            answers
        };
        let said = (0u32..).zip(&self.rows[self.part.clone()]).map(|(at, row)| {
            Ok(match &row.want {
                Want::Nothing => Said::Nothing,
                Want::Logits => Said::Logits(session.logits(at)?),
                Want::Choice(chooser) => Said::Choices(choices(row, chooser.request().logprobs())?),
                Want::Token(_) if self.is_sampled => Said::Choices(choices(row, None)?),
                // The first token of a launch was given.
                Want::Token(_) => Said::Tokens(tokens.iter().skip(1).map(|step| step[at as usize]).collect()),
            })
        });
        said.collect()
    }
}

impl Stepper for DeviceStepper {
    fn bounds(&self) -> Bounds {
        let largest = &self.sessions[self.sessions.len() - 1];
        let shape = Shape { rows: self.rows_max, ..*largest.shape() };
        let (vocab, steps_max) = (largest.vocab(), largest.steps_max());
        let alone = self.waves.as_ref().map(|waves| Alone { least: CHUNK_MIN, most: waves.shape().rows });
        let choices = self.sampler.as_ref().map(SamplerSession::logprobs_max);
        Bounds { shape, chunk_max: shape.rows, alone, vocab, launches: 1, steps_max, choices }
    }

    fn submit(&mut self, launch: Launch) -> Result<(), Fault> {
        let is_alone = self.bounds().alone.is_some_and(|alone| launch.is(alone));
        self.is_guided = launch.is_guided();
        let Launch { rows, steps, edits } = launch;
        self.is_sampled = rows.iter().any(|row| matches!(row.want, Want::Choice(_)));
        (self.rows, self.steps, self.allowed) = (rows, steps, vec![]);
        let Some(waves) = self.waves.as_mut().filter(|_| is_alone) else { return self.queue(0, edits) };
        let tables = admit(&mut self.guard, &self.rows, steps, edits)?;
        (self.running, self.part) = (Kernel::Waves, 0..self.rows.len());
        let tokens: Vec<u32> = self.rows.iter().map(|row| row.token).collect();
        Ok(waves.queue(tables, &tokens)?)
    }

    fn allow(&mut self, allowed: Vec<Option<TokenSet>>) -> Result<(), Fault> {
        if allowed.len() != self.rows.len() {
            return Err(Fault::internal("ids are allowed for other rows than those of a launch"));
        }
        self.allowed = allowed;
        self.choose()
    }

    fn collect(&mut self) -> Result<Vec<Said>, Fault> {
        let mut said = self.collect_part()?;
        while self.part.end < self.rows.len() {
            self.queue(self.part.end, vec![])?;
            if self.is_guided {
                self.choose()?;
            }
            said.extend(self.collect_part()?);
        }
        // They hold what the requests go on with. Only the requests may have it when the tokens are counted.
        self.rows.clear();
        Ok(said)
    }
}

/// What the sampler chooses for row `at` of a launch, if anything.
fn asked<'a>(at: u32, row: &'a LaunchRow, allowed: Option<&'a TokenSet>) -> Option<Asked<'a>> {
    let (sampler, request) = match &row.want {
        Want::Nothing | Want::Logits => return None,
        Want::Token(sampler) => (sampler, None),
        Want::Choice(chooser) => (chooser.request().sampler(), Some((chooser.request(), chooser.counts()))),
    };
    Some(Asked { row: at, position: row.position + 1, sampler, request, allowed })
}

fn input(row: &LaunchRow, steps: u32, is_sampled: bool) -> RowInput {
    let (inverse_temperature, seed) = match &row.want {
        Want::Token(sampler) if !is_sampled => sampler.temperature_of_rows(),
        _ => (0.0, 0),
    };
    RowInput { first: FirstToken::Given(row.token), steps, inverse_temperature, seed }
}
