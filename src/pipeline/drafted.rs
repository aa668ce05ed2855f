//! Owns steps on a CPU for a server that verifies what a draft proposes. The engine knows nothing of it.
//!
//! The engine asks for a launch of several steps, in which every row goes on from what it decides. Here these are steps of several rows: each
//! sequence has the row of its last token and those of proposed tokens, and what is chosen after them counts up to the first difference. Steps follow
//! until every sequence has as many tokens as the engine asked for. A choice depends on its logits, the seed and the position, so the tokens are
//! those of steps of one row.
//!
//! A recurrent state that has seen a refused token goes back, as in `speculative`: every sequence that may run has a slot of its own, beyond the
//! sequences that the engine knows. The last step of a launch has no refused token, because it has no more proposals than tokens are missing, so the
//! engine finds the states of all sequences where it expects them.

use std::collections::BTreeMap;

use super::mtp::{After, DraftRows, Mtp};
use crate::engine::{Bounds, Launch, LaunchRow, Proposals, Queue, Said, Stepper, Want, admit, admit_rows};
use crate::error::Fault;
use crate::interp::{Interp, Options, Pack};
use crate::ir::schedule::Schedule;
use crate::pages::Pool;
use crate::rows::{Edit, Guard, Row, SequenceId, Shape, StateCopies, StateCopy};
use crate::sample::{Decided, SampleError, TokenCounts, TokenSet};

/// Runs launches on threads of this process, each when it is collected.
pub struct Drafted {
    interp: Interp,
    guard: Guard,
    bounds: Bounds,
    mtp: Mtp,
    /// Tokens of a proposal, at most.
    most: usize,
    texts: BTreeMap<SequenceId, Text>,
    queued: Queue,
    proposals: Proposals,
}

/// The draft of the text of a sequence, and its tokens by position, as far as launches had them. Of positions that were found in pages they are unknown.
struct Text {
    rows: DraftRows,
    tokens: Vec<u32>,
}

/// A sequence in a launch of several steps.
struct Going<'l> {
    row: &'l LaunchRow,
    /// The position of `tokens[0]`: of the first row of its next step.
    at: u32,
    /// Known tokens from there on: one, or more after its state went back.
    tokens: Vec<u32>,
    proposed: Vec<u32>,
    /// The position that its snapshot is of.
    kept: Option<u32>,
    goes_back: bool,
    counts: Option<TokenCounts>,
    decided: Vec<Result<Decided, SampleError>>,
}

impl Going<'_> {
    fn new(row: &LaunchRow) -> Result<Going<'_>, Fault> {
        let token = row.token.ok_or_else(|| Fault::internal("a launch without its tokens"))?;
        let counts = match &row.want {
            Want::Choice(chooser) => Some(chooser.counts().clone()),
            _ => None,
        };
        let (at, tokens) = (row.position, vec![token]);
        Ok(Going { row, at, tokens, proposed: vec![], kept: None, goes_back: false, counts, decided: vec![] })
    }

    /// Tokens that it still has to decide. A sequence without a choice ends.
    fn missing(&self, steps: u32) -> usize {
        let failed = self.decided.last().is_some_and(Result::is_err);
        if failed { 0 } else { steps as usize - self.decided.len() }
    }

    /// What the request chooses after the token at `position`.
    fn choose(&self, logits: &[f32], position: u32, counts: Option<&TokenCounts>) -> Result<Decided, SampleError> {
        match (&self.row.want, counts) {
            (Want::Choice(chooser), Some(counts)) => chooser.request().choose(logits, counts, None),
            (Want::Token(sampler), _) => {
                let token = sampler.choose(logits, position + 1)?;
                Ok(Decided { token, logprob: None, top: vec![] })
            }
            _ => Err(SampleError::NoCandidate { position: position + 1, vocab: logits.len() }),
        }
    }

    /// Takes the logits after row `row` of its step. Whether those after the next row count, too.
    fn take(&mut self, row: usize, logits: &[f32]) -> bool {
        let decided = self.choose(logits, self.at + row as u32, self.counts.as_ref());
        let token = decided.as_ref().ok().map(|decided| decided.token);
        self.decided.push(decided);
        if let (Some(counts), Some(token)) = (&mut self.counts, token) {
            counts.push(token);
        }
        token.is_some() && self.proposed.get(row + 1 - self.tokens.len()).copied() == token
    }

    /// Ends a step after which it chose `chosen` tokens.
    fn finish(&mut self, chosen: &[u32], has_state: bool) {
        self.goes_back = has_state && chosen.len() <= self.proposed.len();
        self.tokens.extend(chosen);
        self.proposed.clear();
        if !self.goes_back {
            let last = self.tokens.len() - 1;
            self.at += last as u32;
            self.tokens.drain(..last);
        }
    }
}

impl Drafted {
    /// Prepares a validated schedule of several rows with its pack. It has a sequence more for each that may run.
    ///
    /// # Errors
    /// A schedule without tables or with too few rows, or one whose cache is larger than this machine's memory.
    pub fn new(schedule: &Schedule, pack: Pack, options: Options, mtp: Mtp, most: usize) -> Result<Drafted, Fault> {
        let shape =
            Shape::of(&schedule.program).ok_or_else(|| Fault::internal("a schedule of one row cannot be batched"))?;
        if most >= shape.rows as usize {
            return Err(Fault::internal(format!("a proposal of {most} tokens in steps of {} rows", shape.rows)));
        }
        let interp = Interp::new(schedule, pack, options)?;
        let running = shape.sequences.saturating_sub(Pool::keepers(&shape)) / 2;
        let bounds = Bounds {
            shape: Shape { sequences: shape.sequences - running, ..shape },
            chunk_max: shape.rows,
            alone: None,
            vocab: interp.vocab() as u32,
            // A launch that verifies one proposal and is right has as many.
            steps_max: most as u32 + 1,
            choices: Some(u32::MAX),
        };
        let (guard, queued) = (Guard::new(shape), Queue::default());
        let (texts, proposals) = (BTreeMap::new(), Proposals::default());
        Ok(Drafted { interp, guard, bounds, mtp, most, texts, queued, proposals })
    }

    /// The slot of a sequence that may run.
    fn slot(&self, sequence: SequenceId) -> SequenceId {
        SequenceId(self.bounds.shape.sequences + sequence.0)
    }

    /// Forgets texts whose pages were given to others.
    fn forget(&mut self, edits: &[Edit]) {
        let page_rows = self.bounds.shape.page_rows as usize;
        for edit in edits {
            if let Some(text) = self.texts.get_mut(&edit.sequence)
                && edit.block as usize * page_rows < text.tokens.len()
            {
                text.rows.reset();
                text.tokens.clear();
            }
        }
    }

    /// Notes a token of a text. Rows before those of a launch may be in pages alone.
    fn note(&mut self, sequence: SequenceId, position: u32, token: u32) -> Result<(), Fault> {
        let text = match self.texts.entry(sequence) {
            std::collections::btree_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::btree_map::Entry::Vacant(none) => {
                none.insert(Text { rows: self.mtp.rows()?, tokens: vec![] })
            }
        };
        let position = position as usize;
        if text.tokens.get(position) != Some(&token) {
            text.rows.go_back(position);
            text.tokens.resize(position, 0);
            text.tokens.push(token);
        }
        Ok(())
    }

    /// Shows a draft what rows `from..from + count` of the last step left, the first of which is at `position`.
    fn show(&mut self, sequence: SequenceId, position: u32, from: usize, count: usize) -> Result<(), Fault> {
        let left = |row| self.interp.left(row).ok_or_else(|| Fault::internal("a schedule that publishes no last sum"));
        let rows = (from..from + count).map(left).collect::<Result<Vec<_>, _>>()?;
        if let Some(text) = self.texts.get_mut(&sequence) {
            text.rows.see(position as usize, rows.iter().map(Vec::as_slice));
        }
        Ok(())
    }

    /// A launch of one step.
    fn one_step(&mut self, launch: Launch, allowed: &[Option<TokenSet>]) -> Result<Vec<Said>, Fault> {
        let tokens = launch.tokens()?;
        let Launch { rows, steps, edits, copies } = launch;
        let mut said = vec![Said::Nothing; rows.len()];
        let mut logits = vec![];
        let tables = admit(&mut self.guard, &rows, steps, edits, &copies)?;
        self.interp.launch_rows(tables, &tokens, |result| {
            result.logits.copy_to(&mut logits);
            said[result.row] = match &rows[result.row].want {
                Want::Nothing => Said::Nothing,
                Want::Logits => Said::Logits(logits.clone()),
                Want::Choice(chooser) => {
                    let allowed = allowed.get(result.row).and_then(Option::as_ref);
                    Said::Choices(vec![chooser.request().choose(&logits, chooser.counts(), allowed)])
                }
                Want::Token(sampler) => {
                    Said::Tokens(sampler.choose(&logits, result.position + 1).into_iter().collect())
                }
            };
        })?;
        for (at, (row, token)) in rows.iter().zip(tokens).enumerate() {
            self.note(row.sequence, row.position, token)?;
            self.show(row.sequence, row.position, at, 1)?;
        }
        Ok(said)
    }

    /// A launch of several steps.
    fn several_steps(&mut self, launch: &Launch) -> Result<Vec<Said>, Fault> {
        let mut all = launch.rows.iter().map(Going::new).collect::<Result<Vec<_>, _>>()?;
        let (mut edits, mut copies) = (launch.edits.clone(), launch.copies.clone());
        for going in &all {
            self.note(going.row.sequence, going.at, going.tokens[0])?;
        }
        while all.iter().any(|going| going.missing(launch.steps) > 0) {
            self.step(&mut all, launch.steps, std::mem::take(&mut edits), std::mem::take(&mut copies))?;
        }
        let said = |going: Going<'_>| match going.row.want {
            Want::Choice(_) => Said::Choices(going.decided),
            _ => Said::Tokens(going.decided.into_iter().map_while(Result::ok).map(|decided| decided.token).collect()),
        };
        Ok(all.into_iter().map(said).collect())
    }

    /// One step of those that have tokens to decide and for which there are rows.
    fn step(
        &mut self,
        all: &mut [Going<'_>],
        steps: u32,
        edits: Vec<Edit>,
        mut copies: StateCopies,
    ) -> Result<(), Fault> {
        let mut room = self.bounds.shape.rows as usize;
        let mut taken: Vec<&mut Going<'_>> = vec![];
        for going in all.iter_mut().filter(|going| going.missing(steps) > 0) {
            if going.tokens.len() <= room {
                room -= going.tokens.len();
                taken.push(going);
            }
        }
        for going in &mut taken {
            going.proposed = self.propose(going, self.most.min(going.missing(steps) - 1).min(room))?;
            room -= going.proposed.len();
            let (sequence, slot) = (going.row.sequence, self.slot(going.row.sequence));
            if std::mem::take(&mut going.goes_back) {
                copies.restores.push(StateCopy { from: slot, to: sequence });
            }
            let wants = self.bounds.shape.has_state && !going.proposed.is_empty();
            if wants && going.kept.replace(going.at) != Some(going.at) {
                copies.saves.push(StateCopy { from: sequence, to: slot });
            }
        }
        let (mut rows, mut tokens, mut begins) = (vec![], vec![], vec![]);
        for (of, going) in taken.iter().enumerate() {
            begins.push(rows.len());
            for (at, token) in going.tokens.iter().chain(&going.proposed).enumerate() {
                rows.push((of, at));
                tokens.push(*token);
            }
        }
        let asked = |&(of, at): &(usize, usize)| {
            let going = &taken[of];
            let (position, wants_logits) = (going.at + at as u32, at + 1 >= going.tokens.len());
            Row { sequence: going.row.sequence, position, wants_logits }
        };
        let asked = rows.iter().map(asked).collect();
        let tables = admit_rows(&mut self.guard, asked, 1, edits, &copies)?;
        let (mut logits, mut counting) = (vec![], vec![true; taken.len()]);
        let before: Vec<usize> = taken.iter().map(|going| going.decided.len()).collect();
        self.interp.launch_rows(tables, &tokens, |result| {
            let (of, at) = rows[result.row];
            if counting[of] && at + 1 >= taken[of].tokens.len() {
                result.logits.copy_to(&mut logits);
                counting[of] = taken[of].take(at, &logits);
            }
        })?;
        for ((going, begin), before) in taken.into_iter().zip(begins).zip(before) {
            let chosen: Vec<u32> = going.decided[before..].iter().flatten().map(|decided| decided.token).collect();
            self.count(going.proposed.len(), chosen.len());
            let (sequence, at, known) = (going.row.sequence, going.at, going.tokens.len());
            for (position, token) in (at + known as u32..).zip(&chosen) {
                self.note(sequence, position, *token)?;
            }
            // Rows of tokens that were not chosen come last.
            self.show(sequence, at, begin, known + chosen.len().saturating_sub(1))?;
            going.finish(&chosen, self.bounds.shape.has_state);
        }
        Ok(())
    }

    /// The tokens that the draft of a text chooses after those that are known.
    fn propose(&mut self, going: &Going<'_>, most: usize) -> Result<Vec<u32>, Fault> {
        let Some(text) = self.texts.get_mut(&going.row.sequence).filter(|_| most > 0) else { return Ok(vec![]) };
        let mut counts = going.counts.clone();
        let mut position = going.at + going.tokens.len() as u32 - 1;
        let mut choose = |after: After| {
            let token = after.token(|logits| Some(going.choose(logits, position, counts.as_ref()).ok()?.token))?;
            position += 1;
            counts.iter_mut().for_each(|counts| counts.push(token));
            Some(token)
        };
        text.rows.chosen(&text.tokens, most, &mut choose)
    }

    fn count(&mut self, proposed: usize, chosen: usize) {
        if proposed > 0 {
            self.proposals.steps += 1;
            self.proposals.proposed += proposed as u64;
            self.proposals.accepted += chosen.saturating_sub(1) as u64;
        }
    }
}

impl Stepper for Drafted {
    fn bounds(&self) -> Bounds {
        self.bounds
    }

    fn submit(&mut self, launch: Launch) -> Result<(), Fault> {
        self.queued.submit(launch);
        Ok(())
    }

    fn allow(&mut self, allowed: Vec<Option<TokenSet>>) -> Result<(), Fault> {
        self.queued.allow(allowed);
        Ok(())
    }

    fn collect(&mut self) -> Result<Vec<Said>, Fault> {
        let Some((launch, allowed)) = self.queued.take() else { return Ok(vec![]) };
        self.forget(&launch.edits);
        if launch.steps == 1 { self.one_step(launch, &allowed) } else { self.several_steps(&launch) }
    }

    fn proposals(&self) -> Proposals {
        self.proposals
    }
}
