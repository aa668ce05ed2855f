//! Owns the stepper of CUDA targets: the kernels of a server on a device, with the guard of their tables. And its steps for one that verifies
//! proposals.

use std::collections::VecDeque;
use std::ops::Range;

use super::stepper::{Alone, Bounds, Launch, LaunchRow, Said, Stepper, Want, admit};
use super::stepwise::{After, Asks, SEEN_MAX, Steps};
use crate::cuda::rows::{FirstToken, RowInput, RowLauncher};
use crate::cuda::sampler::{Asked, SamplerSession, decided};
use crate::cuda::states::StateRows;
use crate::cuda::stream::Stream;
use crate::cuda::waves::{Last, WavesSession};
use crate::error::Fault;
use crate::rows::{Edit, Guard, Shape, StateCopies, Tables};
use crate::sample::TokenSet;
use crate::speculate::Left;
use crate::waves::CHUNK_MIN;

/// Queues launches on a device. Greedy choice and temperature are the kernel's. Where a row wants another choice, the sampler chooses
/// the tokens of all rows.
pub struct DeviceStepper {
    /// Ascending by rows, over one cache. If two have the same rows, the one with KV splits comes second.
    sessions: Vec<Box<dyn RowLauncher>>,
    /// Reads long chunks of one prompt into the same cache, and maybe decides what follows one.
    waves: Option<WavesSession>,
    sampler: Option<SamplerSession>,
    guard: Guard,
    /// Where the sessions have recurrent states.
    states: StateRows,
    /// Most rows of a launch. One of more rows than the last session has is queued in parts, one after another.
    rows_max: u32,
    /// Launches that were not collected, oldest first. A second one goes on from the first on the same kernel, or one of them reads a prompt.
    flying: VecDeque<Flying>,
}

struct Flying {
    kernel: Kernel,
    rows: Vec<LaunchRow>,
    steps: u32,
    /// The sampler chooses its tokens, and for some of its rows a grammar says which ids may come next.
    is_sampled: bool,
    is_guided: bool,
    /// What grammars allow its rows, once [`Stepper::allow`] was called.
    allowed: Vec<Option<TokenSet>>,
    /// The rows that are queued or run. If these are not all, no other launch is queued.
    part: Range<usize>,
}

#[derive(Debug, Clone, Copy)]
enum Kernel {
    Rows(usize),
    Waves,
}

impl DeviceStepper {
    /// A stepper over sessions that nothing was launched on yet, ascending by rows; all have the same cache. A launch runs on the first
    /// one that has as many rows, on one that gains by cutting its histories, or on that of waves. `None`: there is no session.
    pub fn new(
        sessions: Vec<Box<dyn RowLauncher>>,
        waves: Option<WavesSession>,
        sampler: Option<SamplerSession>,
    ) -> Option<DeviceStepper> {
        let of_rows = *sessions.last()?.shape();
        let rows = waves.as_ref().map_or(0, |waves| waves.shape().rows).max(of_rows.rows);
        let guard = Guard::new(Shape { rows, ..of_rows });
        let rows_max = of_rows.rows;
        Some(DeviceStepper {
            sessions,
            waves,
            sampler,
            guard,
            states: StateRows::default(),
            rows_max,
            flying: VecDeque::new(),
        })
    }

    /// Takes launches of up to `rows_max` rows, if that is more than the last session has. For kernels whose rows have the bits that they have
    /// alone: a launch in parts may run on several of them.
    pub fn with_rows(self, rows_max: u32) -> DeviceStepper {
        DeviceStepper { rows_max: self.rows_max.max(rows_max), ..self }
    }

    /// Copies states of sequences that lie there in the cache. Without this call a launch with copies is refused.
    pub fn with_states(self, states: StateRows) -> DeviceStepper {
        DeviceStepper { states, ..self }
    }

    /// The session for rows at these positions: the smallest with as many rows, or one that gains by cutting their histories. The last one if
    /// there are more rows: the guard refuses these, unless a launch has parts.
    fn session_for(&self, positions: &[u32]) -> usize {
        let smallest = self.sessions.iter().position(|session| session.shape().rows as usize >= positions.len());
        let smallest = smallest.unwrap_or(self.sessions.len() - 1);
        // The decode kernel divides its history among all SMs.
        let rows = self.sessions[smallest].shape().rows;
        if rows == 1 {
            return smallest;
        }
        let gains = self.sessions[smallest..].iter().position(|session| session.gains(positions, rows));
        gains.map_or(smallest, |at| smallest + at)
    }

    /// The kernel of a launch.
    fn kernel(&self, launch: &Launch) -> Result<Kernel, Fault> {
        let rows = launch.rows.len();
        let before = self.flying.back();
        if let Some(before) = before.filter(|before| before.rows.len() == rows)
            && launch.rows.iter().all(|row| row.token.is_none())
        {
            return Ok(before.kernel);
        }
        let of_rows = Kernel::Rows(self.session_for(&positions(&launch.rows, 0)));
        let is_alone = self.waves.is_some() && self.bounds().alone.is_some_and(|alone| launch.is(alone));
        let kernel = if is_alone { Kernel::Waves } else { of_rows };
        match (before.map(|before| before.kernel), kernel) {
            (None | Some(Kernel::Waves), _) | (_, Kernel::Waves) => Ok(kernel),
            _ => Err(Fault::internal("a launch was not collected")),
        }
    }

    /// Lets a launch of `kernel` wait for one of another kernel that was submitted before it.
    fn follow(&mut self, kernel: Kernel) -> Result<(), Fault> {
        let DeviceStepper { sessions, waves: Some(waves), flying, .. } = self else { return Ok(()) };
        match (flying.back().map(|before| before.kernel), kernel) {
            (Some(Kernel::Waves), Kernel::Rows(session)) => {
                waves.last_end().map_or(Ok(()), |end| sessions[session].follow(end))?;
            }
            (Some(Kernel::Rows(session)), Kernel::Waves) => {
                sessions[session].last_end().map_or(Ok(()), |end| waves.follow(end))?;
            }
            _ => {}
        }
        Ok(())
    }

    /// Queues rows of a launch from `from` on, as many as the last session has.
    fn queue(&mut self, flying: &mut Flying, from: usize, edits: Vec<Edit>, copies: &StateCopies) -> Result<(), Fault> {
        let last = self.sessions.len() - 1;
        let most = self.sessions[last].shape().rows as usize;
        flying.part = from..flying.rows.len().min(from + most);
        let Flying { kernel, steps, is_sampled, is_guided, .. } = *flying;
        let rows = &flying.rows[flying.part.clone()];
        let tables = admit(&mut self.guard, rows, steps, edits, copies)?;
        let with_logits = rows.iter().any(|row| row.want == Want::Logits);
        // Rows of prompts alone decide nothing.
        let decides = rows.iter().any(|row| row.want != Want::Nothing);
        let Kernel::Rows(session) = kernel else { return Err(no_waves()) };
        let session = &mut self.sessions[session];
        copy_states(&self.states, &session.streams(), &**session, &tables)?;
        let inputs: Vec<RowInput> = (0..).zip(rows).map(|(at, row)| input(at, row, steps, is_sampled)).collect();
        match &mut self.sampler {
            Some(_) if is_guided && decides => Ok(session.queue_unchosen(tables, &inputs)?),
            Some(sampler) if is_sampled && decides => {
                let asked: Vec<Asked<'_>> = (0..).zip(rows).filter_map(|(at, row)| asked(at, row, None)).collect();
                Ok(session.queue_sampled(tables, &inputs, sampler, &asked)?)
            }
            None if is_sampled => Err(Fault::internal("a row wants a choice, and there is no sampler")),
            _ => Ok(session.queue(tables, &inputs, with_logits)?),
        }
    }

    /// Queues a chunk of a prompt, and what its last row wants.
    fn queue_chunk(
        &mut self,
        flying: &Flying,
        tokens: &[u32],
        edits: Vec<Edit>,
        copies: &StateCopies,
    ) -> Result<(), Fault> {
        let (Some(waves), Some(row)) = (&mut self.waves, flying.rows.last()) else { return Err(no_waves()) };
        let tables = admit(&mut self.guard, &flying.rows, 1, edits, copies)?;
        copy_states(&self.states, &[waves.stream()], &*self.sessions[0], &tables)?;
        let token = |with_logits| Last::Token { row: input(0, row, 1, false), with_logits };
        let asked: Vec<Asked<'_>> = asked(0, row, None).into_iter().collect();
        let last = match (&row.want, &mut self.sampler) {
            (Want::Nothing, _) => Last::Nothing,
            (Want::Logits, _) => token(true),
            (Want::Token(_), _) => token(false),
            (Want::Choice(_), Some(_)) if flying.is_guided => Last::Unchosen,
            (Want::Choice(_), Some(sampler)) => Last::Sampled(sampler, &asked),
            (Want::Choice(_), None) => return Err(Fault::internal("a row wants a choice, and there is no sampler")),
        };
        Ok(waves.queue(tables, tokens, last)?)
    }

    /// Queues the sampler after the part of a launch that is queued or runs, with what grammars allow.
    fn choose(&mut self, flying: &Flying) -> Result<(), Fault> {
        let Some(sampler) = &mut self.sampler else {
            return Err(Fault::internal("ids are allowed for a launch without a sampler"));
        };
        let session = match (flying.kernel, &mut self.waves) {
            (Kernel::Rows(session), _) => session,
            (Kernel::Waves, Some(waves)) => {
                let last = flying.rows.last().zip(flying.allowed.last());
                let asked = last.and_then(|(row, allowed)| asked(0, row, allowed.as_ref()));
                return Ok(waves.choose(sampler, asked.as_slice())?);
            }
            (Kernel::Waves, None) => return Err(no_waves()),
        };
        let rows = (0..).zip(&flying.rows[flying.part.clone()]).zip(&flying.allowed[flying.part.clone()]);
        let asked: Vec<Asked<'_>> = rows.filter_map(|((at, row), allowed)| asked(at, row, allowed.as_ref())).collect();
        // Nothing of it waits for a choice.
        if asked.is_empty() {
            return Ok(());
        }
        Ok(self.sessions[session].choose(sampler, &asked)?)
    }

    /// Waits for the part of a launch that is queued or runs.
    fn collect_part(&mut self, flying: &Flying) -> Result<Vec<Said>, Fault> {
        // The tokens of each step after the given one, and the row that has the first of each: of a chunk the last row alone has one.
        let (tokens, first) = match (flying.kernel, &mut self.waves) {
            (Kernel::Rows(session), _) => (self.sessions[session].finish()?.tokens.into_iter().skip(1).collect(), 0),
            (Kernel::Waves, Some(waves)) => {
                let told = waves.finish()?.token.map(|token| vec![token]);
                (told.into_iter().collect::<Vec<_>>(), flying.part.len() - 1)
            }
            (Kernel::Waves, None) => return Err(no_waves()),
        };
        let vocab = self.sessions[0].vocab();
        let logits = |at: u32| match (flying.kernel, &self.waves) {
            (Kernel::Rows(session), _) => Ok::<_, Fault>(self.sessions[session].logits(at)?),
            (Kernel::Waves, waves) => Ok(waves.as_ref().ok_or_else(no_waves)?.logits()?),
        };
        let mut asked = 0;
        let mut choices = |row: &LaunchRow, logprobs: Option<u32>| {
            let Some(sampler) = &self.sampler else { return Err(Fault::internal("answers without a sampler")) };
            let answers = (0..flying.steps).map(|step| {
                let answer = sampler.answer(step, asked)?;
                Ok(decided(&answer, row.position + 1 + step, vocab, logprobs))
            });
            let answers = answers.collect::<Result<Vec<_>, Fault>>();
            asked += 1;
            answers
        };
        let said = (0u32..).zip(&flying.rows[flying.part.clone()]).map(|(at, row)| {
            Ok(match &row.want {
                Want::Nothing => Said::Nothing,
                Want::Logits => Said::Logits(logits(at)?),
                Want::Choice(chooser) => Said::Choices(choices(row, chooser.request().logprobs())?),
                Want::Token(_) if flying.is_sampled => Said::Choices(choices(row, None)?),
                Want::Token(_) => Said::Tokens(tokens.iter().map(|step| step[at as usize - first]).collect()),
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
        let alone = self.waves.as_ref().map(|waves| Alone {
            least: CHUNK_MIN,
            most: waves.shape().rows,
            decides: waves.decides(),
            leaves: 0,
        });
        let choices = self.sampler.as_ref().map(SamplerSession::logprobs_max);
        Bounds { shape, chunk_max: shape.rows, alone, vocab, steps_max, choices }
    }

    fn submit(&mut self, launch: Launch) -> Result<(), Fault> {
        let kernel = self.kernel(&launch)?;
        self.follow(kernel)?;
        let is_guided = launch.is_guided();
        let tokens = if matches!(kernel, Kernel::Waves) { launch.tokens()? } else { vec![] };
        let Launch { rows, steps, edits, copies } = launch;
        let is_sampled = rows.iter().any(|row| matches!(row.want, Want::Choice(_)));
        let part = 0..rows.len();
        let mut flying = Flying { kernel, rows, steps, is_sampled, is_guided, allowed: vec![], part };
        match kernel {
            Kernel::Rows(_) => self.queue(&mut flying, 0, edits, &copies)?,
            Kernel::Waves => self.queue_chunk(&flying, &tokens, edits, &copies)?,
        }
        self.flying.push_back(flying);
        Ok(())
    }

    fn allow(&mut self, allowed: Vec<Option<TokenSet>>) -> Result<(), Fault> {
        let wrong = || Fault::internal("ids are allowed for other rows than those of a launch");
        let mut flying =
            self.flying.pop_back().filter(|flying| flying.rows.len() == allowed.len()).ok_or_else(wrong)?;
        flying.allowed = allowed;
        let chosen = self.choose(&flying);
        self.flying.push_back(flying);
        chosen
    }

    fn last_step(&mut self) -> Result<Option<Vec<Vec<u32>>>, Fault> {
        match self.flying.front() {
            // If another kernel is faster for the next launch, that waits until this one was collected.
            Some(Flying { kernel: Kernel::Rows(session), rows, part, steps, .. })
                if part.len() == rows.len() && self.session_for(&positions(rows, *steps)) == *session =>
            {
                Ok(self.sessions[*session].last_step()?)
            }
            _ => Ok(None),
        }
    }

    fn collect(&mut self) -> Result<Vec<Said>, Fault> {
        let Some(mut flying) = self.flying.pop_front() else {
            return Err(Fault::internal("a launch is collected, and none was submitted"));
        };
        let mut said = self.collect_part(&flying)?;
        while flying.part.end < flying.rows.len() {
            let from = flying.part.end;
            flying.kernel = Kernel::Rows(self.session_for(&positions(&flying.rows[from..], 0)));
            self.queue(&mut flying, from, vec![], &StateCopies::default())?;
            if flying.is_guided {
                self.choose(&flying)?;
            }
            said.extend(self.collect_part(&flying)?);
        }
        Ok(said)
    }
}

/// Steps of a batch kernel that keeps what a draft reads. Long prompts are read by waves, but for their last tokens.
pub struct DeviceSteps {
    rows: Box<dyn RowLauncher>,
    waves: Option<WavesSession>,
    states: StateRows,
}

impl DeviceSteps {
    /// `rows` and `waves` have one cache, in which the states of sequences lie as `states` says. `None`: `rows` keeps nothing for a draft.
    pub fn new(rows: Box<dyn RowLauncher>, waves: Option<WavesSession>, states: StateRows) -> Option<DeviceSteps> {
        rows.keeps_left().then_some(DeviceSteps { rows, waves, states })
    }
}

impl Steps for DeviceSteps {
    fn shape(&self) -> Shape {
        *self.rows.shape()
    }

    fn vocab(&self) -> u32 {
        self.rows.vocab()
    }

    /// A launch without such a row ends when the cache has its rows.
    fn leaves_with_token(&self) -> bool {
        true
    }

    fn run(
        &mut self,
        tables: Tables<'_>,
        rows: &[(u32, Asks)],
        after: &mut dyn FnMut(usize, After),
    ) -> Result<(), Fault> {
        copy_states(&self.states, &self.rows.streams(), &*self.rows, &tables)?;
        let input = |&(token, asks): &(u32, Asks)| {
            let (inverse_temperature, seed) = match asks {
                Asks::Token(sampler) => sampler.temperature_of_rows(),
                Asks::Nothing | Asks::Logits => (0.0, 0),
            };
            RowInput { first: FirstToken::Given(token), steps: 1, inverse_temperature, seed }
        };
        let inputs: Vec<RowInput> = rows.iter().map(input).collect();
        let with_logits = rows.iter().any(|(_, asks)| *asks == Asks::Logits);
        let launched = self.rows.run_whole(tables, &inputs, with_logits)?;
        let decided = launched.tokens.get(1).map_or(&[][..], Vec::as_slice);
        for (at, (_, asks)) in rows.iter().enumerate() {
            match asks {
                Asks::Nothing => {}
                Asks::Logits => after(at, After::Logits(self.rows.logits(at as u32)?)),
                Asks::Token(_) => {
                    let token = decided.get(at).ok_or_else(|| Fault::internal("a launch decided no token"))?;
                    after(at, After::Token(*token));
                }
            }
        }
        Ok(())
    }

    fn left(&self, rows: usize) -> Result<Vec<Vec<f32>>, Fault> {
        Ok(self.rows.left(rows)?)
    }

    fn left_in_place(&self, rows: usize) -> Result<Option<Left>, Fault> {
        Ok(self.rows.left_in_place(rows)?)
    }

    fn alone(&self) -> Option<Alone> {
        let most = self.waves.as_ref()?.shape().rows;
        Some(Alone { least: CHUNK_MIN, most, decides: false, leaves: SEEN_MAX })
    }

    fn read(&mut self, tables: Tables<'_>, tokens: &[u32]) -> Result<(), Fault> {
        let waves = self.waves.as_mut().ok_or_else(no_waves)?;
        copy_states(&self.states, &[waves.stream()], &*self.rows, &tables)?;
        waves.queue(tables, tokens, Last::Nothing)?;
        waves.finish()?;
        Ok(())
    }
}

/// Queues the copies before a launch in its stream; of several devices, on each.
fn copy_states(
    states: &StateRows,
    streams: &[&Stream],
    session: &dyn RowLauncher,
    tables: &Tables<'_>,
) -> Result<(), Fault> {
    match tables.copies() {
        [] => Ok(()),
        _ if states.bytes() == 0 => Err(Fault::internal("states are copied, and it is not known where they lie")),
        copies => {
            let cache = session.cache();
            for (device, stream) in (0..).zip(streams) {
                states.copy(stream, cache.on(device), copies)?;
            }
            Ok(())
        }
    }
}

/// The positions of rows after a number of steps.
fn positions(rows: &[LaunchRow], steps: u32) -> Vec<u32> {
    rows.iter().map(|row| row.position.saturating_add(steps)).collect()
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

fn no_waves() -> Fault {
    Fault::internal("a launch of waves without their kernel")
}

/// What the kernel is told of row `at` of a launch.
fn input(at: u32, row: &LaunchRow, steps: u32, is_sampled: bool) -> RowInput {
    let (inverse_temperature, seed) = match &row.want {
        Want::Token(sampler) if !is_sampled => sampler.temperature_of_rows(),
        _ => (0.0, 0),
    };
    let first = row.token.map_or(FirstToken::Decided(at), FirstToken::Given);
    RowInput { first, steps, inverse_temperature, seed }
}
