//! Owns `TextSteps`: one text on a device by kernels that add up in one order, which read its prompt, decode it, and verify what is proposed.

use std::ops::ControlFlow;

use crate::cuda::rows::{FirstToken, RowInput, RowLauncher, RowsLaunched, given};
use crate::error::Fault;
use crate::sample::{Decided, Request, TokenCounts};
use crate::speculate::Speculation;

use super::device_rows::OneText;
use super::speculative::refuse_rows;

/// Called with each token; `Break` ends the text.
type Tell<'a> = &'a mut dyn FnMut(&Decided) -> ControlFlow<()>;

/// Kernels over the cache of one text. Every launch is a part of the text: rows at consecutive positions in one step, or one row in several.
pub struct TextSteps {
    /// Ascending by rows; at least one.
    sessions: Vec<Box<dyn RowLauncher>>,
    text: OneText,
    steps_max: u32,
}

/// What a launch leaves in addition to its rows of the cache.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Nothing,
    Tokens,
    Logits,
}

/// A text that is being decided.
struct Telling<'a> {
    request: &'a Request,
    counts: TokenCounts,
    /// The host chooses from logits: the kernels do not have all settings of the request.
    on_host: bool,
    sequence: Vec<u32>,
    tell: Tell<'a>,
    stopped: bool,
}

impl Telling<'_> {
    fn take(&mut self, decided: &Decided) {
        self.counts.push(decided.token);
        self.sequence.push(decided.token);
        self.stopped = (self.tell)(decided).is_break();
    }

    fn input(&self, token: u32, steps: u32) -> RowInput {
        let sampler = self.request.sampler();
        let (inverse_temperature, seed) = if self.on_host { (0.0, 0) } else { sampler.temperature_of_rows() };
        RowInput { first: FirstToken::Given(token), steps, inverse_temperature, seed }
    }
}

impl TextSteps {
    /// `sessions` are ascending by rows and have one cache, on which nothing was launched yet. `None`: there is no session.
    pub fn new(sessions: Vec<Box<dyn RowLauncher>>, steps_max: u32) -> Option<TextSteps> {
        let shape = *sessions.last()?.shape();
        Some(TextSteps { text: OneText::new(shape), sessions, steps_max })
    }

    /// Whether a step at `position` finds the recurrent states that it needs.
    pub fn goes_on_at(&self, position: u32) -> bool {
        self.text.goes_on_at(position)
    }

    fn rows_max(&self) -> usize {
        self.sessions.last().map_or(0, |session| session.shape().rows as usize)
    }

    /// Launches rows from `position` on, on the smallest kernel that has as many: its number, and what the launch left.
    fn launch(
        &mut self,
        position: u32,
        inputs: &[RowInput],
        steps: u32,
        wanted: Wanted,
    ) -> Result<(usize, RowsLaunched), Fault> {
        let at = self.sessions.iter().position(|session| session.shape().rows as usize >= inputs.len());
        let at = at.ok_or_else(|| Fault::internal("more rows than kernels have"))?;
        let tables = self.text.admit_rows(position, inputs.len() as u32, steps, wanted != Wanted::Nothing)?;
        Ok((at, self.sessions[at].run_whole(tables, inputs, wanted == Wanted::Logits)?))
    }

    /// Tells the logits after each of `ids`, from position 0 on.
    ///
    /// # Errors
    /// What the device refuses; a launch that gave up.
    pub fn logits(&mut self, ids: &[u32], on_row: &mut dyn FnMut(u32, &[f32])) -> Result<(), Fault> {
        let mut position = 0;
        for chunk in ids.chunks(self.rows_max().max(1)) {
            let (at, _) = self.launch(position, &given(chunk), 1, Wanted::Logits)?;
            for (row, _) in (0..).zip(chunk) {
                on_row(position + row, &self.sessions[at].logits(row)?);
            }
            position += chunk.len() as u32;
        }
        Ok(())
    }

    /// Reads `prompt` from position `from` on, below which the cache has it, and continues it with at most `count` tokens, which `request`
    /// chooses. With `speculation`, steps verify what that proposes, and the tokens are the same.
    ///
    /// # Errors
    /// Proposals of more tokens than a step has rows for; what the device refuses; a launch that gave up; nothing that may come next.
    pub fn decide(
        &mut self,
        prompt: &[u32],
        from: usize,
        count: usize,
        request: &Request,
        mut speculation: Option<&mut Speculation<'_>>,
        tell: Tell<'_>,
    ) -> Result<Vec<u32>, Fault> {
        if let Some(speculation) = &speculation {
            refuse_rows(speculation, self.rows_max() as u32, "")?;
        }
        let on_host = request.sampler().is_filtered() || !request.beyond_kernels().is_empty();
        let (counts, sequence) = (TokenCounts::new(prompt), prompt.to_vec());
        let mut text = Telling { request, counts, on_host, sequence, tell, stopped: false };
        let mut position = from;
        while prompt.len() - position > self.rows_max() {
            let chunk = &prompt[position..position + self.rows_max()];
            self.launch(position as u32, &given(chunk), 1, Wanted::Nothing)?;
            position += chunk.len();
        }
        self.choose_after(position, &prompt[position..], &[], &mut text)?;
        let end = prompt.len() + count;
        while !text.stopped && text.sequence.len() < end {
            let before = text.sequence.len();
            let (position, last, left) = (before - 1, text.sequence[before - 1], end - before);
            let proposal = speculation.as_deref_mut().map(|speculation| speculation.propose(&text.sequence, left - 1));
            match proposal.as_ref().filter(|proposal| proposal.is_tried) {
                Some(proposal) => self.choose_after(position, &[last], &proposal.tokens, &mut text)?,
                None if text.on_host => self.choose_after(position, &[last], &[], &mut text)?,
                None => {
                    let steps = speculation.as_ref().map_or(self.steps_max, |speculation| speculation.steps());
                    self.go_on(position, last, steps.min(self.steps_max).min(left as u32), &mut text)?;
                }
            }
            if let (Some(speculation), Some(proposal)) = (speculation.as_deref_mut(), &proposal) {
                speculation.learn(proposal, &text.sequence[before..]);
            }
        }
        Ok(text.sequence.split_off(prompt.len()))
    }

    /// One step of `tokens` and of what is `proposed` after them: takes what is chosen after the last of `tokens`, and after each that was
    /// proposed and chosen.
    fn choose_after(
        &mut self,
        position: usize,
        tokens: &[u32],
        proposed: &[u32],
        text: &mut Telling<'_>,
    ) -> Result<(), Fault> {
        let inputs: Vec<RowInput> = tokens.iter().chain(proposed).map(|&token| text.input(token, 1)).collect();
        let wanted = if text.on_host { Wanted::Logits } else { Wanted::Tokens };
        let (at, launched) = self.launch(position as u32, &inputs, 1, wanted)?;
        for row in tokens.len() - 1..inputs.len() {
            let decided = if text.on_host {
                text.request.choose(&self.sessions[at].logits(row as u32)?, &text.counts, None)?
            } else {
                let token = launched.tokens.get(1).and_then(|decided| decided.get(row).copied());
                let token = token.ok_or_else(|| Fault::internal("a launch decided no token"))?;
                Decided { token, logprob: None, top: vec![] }
            };
            text.take(&decided);
            if text.stopped || proposed.get(row + 1 - tokens.len()) != Some(&decided.token) {
                break;
            }
        }
        Ok(())
    }

    /// `steps` steps that go on by themselves after `last` at `position`.
    fn go_on(&mut self, position: usize, last: u32, steps: u32, text: &mut Telling<'_>) -> Result<(), Fault> {
        let (_, launched) = self.launch(position as u32, &[text.input(last, steps)], steps, Wanted::Tokens)?;
        for token in launched.tokens.iter().skip(1).flatten() {
            text.take(&Decided { token: *token, logprob: None, top: vec![] });
            if text.stopped {
                break;
            }
        }
        Ok(())
    }
}
