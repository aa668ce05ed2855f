//! Owns the stepper that runs its launches step by step, each when it is collected: that of the interpreter, and one that verifies what a draft
//! proposes. The engine knows nothing of drafts.
//!
//! With a draft, the engine asks for a launch of several steps, in which every row goes on from what it decides. Here these are steps of several rows: each
//! sequence has the row of its last token and those of proposed tokens, and what is chosen after them counts up to the first difference. Steps follow
//! until every sequence has as many tokens as the engine asked for. A choice depends on its logits, the seed and the position, so the tokens are
//! those of steps of one row.
//!
//! A recurrent state that has seen a refused token goes back ([`Begun`]): every sequence that may run has a slot of its own, beyond
//! the sequences that the engine knows. The last step of a launch has no refused token, because it has no more proposals than tokens are missing, so
//! the engine finds the states of all sequences where it expects them.
//!
//! [`Steps`] runs the steps: an interpreter, or a batch kernel of a device. [`Drafts`] begins the draft of each text.

use std::collections::{BTreeMap, VecDeque};

use super::stepper::{Alone, Bounds, Launch, LaunchRow, Proposals, Said, Stepper, Want, admit, admit_rows};
use crate::error::Fault;
use crate::pages::Pool;
use crate::rows::{Edit, Guard, Row, SequenceId, Shape, StateCopies, StateCopy, Tables};
use crate::sample::{Decided, SampleError, Sampler, TokenCounts, TokenSet};
use crate::speculate::{Begun, Left};

/// Tokens of a prompt, its last ones, that a draft on a device is shown. Their rows are whole steps of a batch kernel, which reads 16 tokens at a
/// time, and then steps of the draft, one token at a time. For Qwen3.5-27B on an H200, where a step reads 54 GB, 256 tokens are 16 steps of about
/// 15 ms; a draft that reads 3.4 GB a step takes about as long for its 256.
pub const SEEN_MAX: u32 = 256;

/// What is known of the token after a row.
pub enum After {
    Logits(Vec<f32>),
    /// A kernel chose it.
    Token(u32),
}

impl After {
    /// The token after it: the kernel's, or what `choose` takes from the logits.
    pub fn token(self, choose: impl FnOnce(&[f32]) -> Option<u32>) -> Option<u32> {
        match self {
            After::Logits(logits) => choose(&logits),
            After::Token(token) => Some(token),
        }
    }
}

/// What a row of a step is for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Asks {
    /// Its keys and values.
    Nothing,
    /// Its logits.
    Logits,
    /// The token that this sampler chooses after it, or the logits. The sampler has neither top-k nor top-p.
    Token(Sampler),
}

impl Asks {
    fn of(want: &Want) -> Asks {
        match want {
            Want::Nothing => Asks::Nothing,
            Want::Logits | Want::Choice(_) => Asks::Logits,
            Want::Token(sampler) => Asks::Token(*sampler),
        }
    }
}

/// What runs steps of several rows, one at a time.
pub trait Steps {
    /// What bounds the tables of a step.
    fn shape(&self) -> Shape;

    /// Logits of a row; every token is below.
    fn vocab(&self) -> u32;

    /// Whether rows leave something only in a step in which one of them has a token after it.
    fn leaves_with_token(&self) -> bool;

    /// Runs a step of rows with these tokens, each for what it asks, and passes what is known after the rows that ask for it, in their order.
    ///
    /// # Errors
    /// What ends the server: a device that is lost.
    fn run(
        &mut self,
        tables: Tables<'_>,
        rows: &[(u32, Asks)],
        after: &mut dyn FnMut(usize, After),
    ) -> Result<(), Fault>;

    /// What the last layer left of the first `rows` rows of the last step, before the final norm, `[hidden]` each.
    ///
    /// # Errors
    /// Steps that keep nothing of it.
    fn left(&self, rows: usize) -> Result<Vec<Vec<f32>>, Fault>;

    /// Where that is until the next step, if it is on a device.
    ///
    /// # Errors
    /// As [`Steps::left`].
    fn left_in_place(&self, _rows: usize) -> Result<Option<Left>, Fault> {
        Ok(None)
    }

    /// Parts of a prompt that [`Steps::read`] reads faster. It leaves nothing for a draft.
    fn alone(&self) -> Option<Alone> {
        None
    }

    /// Reads such a part.
    ///
    /// # Errors
    /// As [`Steps::run`]; steps without such parts.
    fn read(&mut self, _tables: Tables<'_>, _tokens: &[u32]) -> Result<(), Fault> {
        Err(Fault::internal("a part of a prompt is read alone, and nothing reads it"))
    }
}

/// The drafts of texts.
pub trait Drafts {
    /// The draft of a text of which it knows nothing yet.
    ///
    /// # Errors
    /// A cache that is larger than the memory; what a device refuses.
    fn begin(&self) -> Result<Box<dyn TextDraft>, Fault>;
}

/// The draft of a text, which is shown what a model left of the tokens.
pub trait TextDraft {
    /// Begins another text.
    fn reset(&mut self);

    /// Forgets what it was shown of positions from `position` on: the text goes on differently there.
    fn go_back(&mut self, position: usize);

    /// Takes what the model left of positions from `first` on, `[hidden]` each, before its final norm. It forgets what lies before a gap.
    fn see(&mut self, first: usize, rows: &[Vec<f32>]);

    /// As [`TextDraft::see`], of rows that are still where a kernel left them. [`TextDraft::chosen`] is called next, before that kernel is launched
    /// again. False: the draft does not read them there, and they have to be shown.
    fn see_in_place(&mut self, _first: usize, _left: Left) -> bool {
        false
    }

    /// How the tokens that follow are chosen. `None`: from logits.
    fn choose_by(&mut self, sampler: Option<&Sampler>);

    /// At most `most` tokens after `sequence`, each as `choose` takes it from what the draft left, which ends them with `None`. None at all, if it was
    /// not shown every position but the last one of its part of the sequence.
    ///
    /// # Errors
    /// What ends the server.
    fn chosen(
        &mut self,
        sequence: &[u32],
        most: usize,
        choose: &mut dyn FnMut(After) -> Option<u32>,
    ) -> Result<Vec<u32>, Fault>;
}

/// Runs launches step by step, each when it is collected.
pub struct Stepwise {
    steps: Box<dyn Steps>,
    drafts: Option<Box<dyn Drafts>>,
    guard: Guard,
    bounds: Bounds,
    /// Tokens of a proposal, at most.
    most: usize,
    texts: BTreeMap<SequenceId, Text>,
    /// Rows of the last step that drafts were not shown yet.
    unseen: Vec<Unseen>,
    /// The earliest first, with the ids that may come next for each row; empty: all, for every row.
    queued: VecDeque<(Launch, Vec<Option<TokenSet>>)>,
    proposals: Proposals,
}

/// Rows of a step that the draft of a sequence was not shown yet.
struct Unseen {
    sequence: SequenceId,
    /// The position of the first row, and the row of the step.
    position: usize,
    row: usize,
    count: usize,
}

/// The draft of the text of a sequence, and its tokens by position, as far as launches had them. Of positions that were found in pages they are unknown.
struct Text {
    draft: Box<dyn TextDraft>,
    tokens: Vec<u32>,
}

/// What `want` chooses after the token at `position`; `counts`: the tokens before, if they are more than those of the request.
fn choose(
    want: &Want,
    after: After,
    position: u32,
    counts: Option<&TokenCounts>,
    allowed: Option<&TokenSet>,
) -> Result<Decided, SampleError> {
    let plain = |token| Decided { token, logprob: None, top: vec![] };
    let logits = match after {
        After::Token(token) => return Ok(plain(token)),
        After::Logits(logits) => logits,
    };
    match want {
        Want::Choice(chooser) => chooser.request().choose(&logits, counts.unwrap_or_else(|| chooser.counts()), allowed),
        Want::Token(sampler) => sampler.choose(&logits, position + 1).map(plain),
        Want::Nothing | Want::Logits => Err(SampleError::NoCandidate { position: position + 1, vocab: logits.len() }),
    }
}

/// What `want` gets of the choice of each step.
fn stepped(want: &Want, decided: Vec<Result<Decided, SampleError>>) -> Said {
    match want {
        Want::Choice(_) => Said::Choices(decided),
        _ => Said::Tokens(decided.into_iter().map_while(Result::ok).map(|decided| decided.token).collect()),
    }
}

/// A sequence in a launch of several steps.
struct Going<'l> {
    row: &'l LaunchRow,
    begun: Begun,
    /// Known tokens from there on: one, or more after its state went back.
    tokens: Vec<u32>,
    proposed: Vec<u32>,
    goes_back: bool,
    counts: Option<TokenCounts>,
    decided: Vec<Result<Decided, SampleError>>,
}

impl Going<'_> {
    fn new(row: &LaunchRow, has_state: bool) -> Result<Going<'_>, Fault> {
        let token = row.token.ok_or_else(|| Fault::internal("a launch without its tokens"))?;
        let counts = match &row.want {
            Want::Choice(chooser) => Some(chooser.counts().clone()),
            _ => None,
        };
        let (begun, tokens) = (Begun::new(row.position as usize, has_state), vec![token]);
        Ok(Going { row, begun, tokens, proposed: vec![], goes_back: false, counts, decided: vec![] })
    }

    /// The position of the first row of its next step.
    fn at(&self) -> u32 {
        self.begun.at() as u32
    }

    /// Tokens that it still has to decide. A sequence without a choice ends.
    fn missing(&self, steps: u32) -> usize {
        let failed = self.decided.last().is_some_and(Result::is_err);
        if failed { 0 } else { steps as usize - self.decided.len() }
    }

    /// Takes what is known after row `row` of its step. Whether the next row counts, too.
    fn take(&mut self, row: usize, after: After) -> bool {
        let decided = choose(&self.row.want, after, self.at() + row as u32, self.counts.as_ref(), None);
        let token = decided.as_ref().ok().map(|decided| decided.token);
        self.decided.push(decided);
        if let (Some(counts), Some(token)) = (&mut self.counts, token) {
            counts.push(token);
        }
        token.is_some() && self.proposed.get(row + 1 - self.tokens.len()).copied() == token
    }

    /// Ends a step after which it chose `chosen` tokens.
    fn finish(&mut self, chosen: &[u32]) {
        self.tokens.extend(chosen);
        let length = self.begun.at() + self.tokens.len();
        self.goes_back = self.begun.ends(length, chosen.len(), self.proposed.len());
        self.proposed.clear();
        if !self.goes_back {
            self.tokens.drain(..self.tokens.len() - 1);
        }
    }
}

impl Stepwise {
    /// A stepper over steps that nothing ran on yet.
    pub fn new(steps: Box<dyn Steps>) -> Stepwise {
        Stepwise::over(steps, None, 0)
    }

    /// As [`Stepwise::new`], with proposals of `drafts`. If the steps have recurrent states, it takes half of the sequences that may be open for itself.
    ///
    /// # Errors
    /// Steps with too few rows for a proposal of `most` tokens.
    pub fn drafted(steps: Box<dyn Steps>, drafts: Box<dyn Drafts>, most: usize) -> Result<Stepwise, Fault> {
        let rows = steps.shape().rows;
        if most >= rows as usize {
            return Err(Fault::internal(format!("a proposal of {most} tokens in steps of {rows} rows")));
        }
        Ok(Stepwise::over(steps, Some(drafts), most))
    }

    fn over(steps: Box<dyn Steps>, drafts: Option<Box<dyn Drafts>>, most: usize) -> Stepwise {
        let shape = steps.shape();
        let open = shape.sequences.saturating_sub(Pool::keepers(&shape));
        let own = if drafts.is_some() && shape.has_state { open.div_ceil(2) } else { 0 };
        let bounds = Bounds {
            shape: Shape { sequences: shape.sequences - own, ..shape },
            chunk_max: shape.rows,
            alone: steps.alone(),
            vocab: steps.vocab(),
            // A launch that verifies one proposal and is right has as many.
            steps_max: most as u32 + 1,
            choices: Some(u32::MAX),
        };
        // A part of a prompt that is read alone has more rows than a step.
        let rows = bounds.alone.map_or(0, |alone| alone.most).max(shape.rows);
        let guard = Guard::new(Shape { rows, ..shape });
        let (texts, queued, proposals) = (BTreeMap::new(), VecDeque::new(), Proposals::default());
        Stepwise { steps, drafts, guard, bounds, most, texts, unseen: vec![], queued, proposals }
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
                text.draft.reset();
                text.tokens.clear();
                self.unseen.retain(|unseen| unseen.sequence != edit.sequence);
            }
        }
    }

    /// Notes a token of a text. Rows before those of a launch may be in pages alone.
    fn note(&mut self, sequence: SequenceId, position: u32, token: u32) -> Result<(), Fault> {
        let Some(drafts) = &self.drafts else { return Ok(()) };
        let text = match self.texts.entry(sequence) {
            std::collections::btree_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::btree_map::Entry::Vacant(none) => {
                none.insert(Text { draft: drafts.begin()?, tokens: vec![] })
            }
        };
        let position = position as usize;
        if text.tokens.get(position) != Some(&token) {
            text.draft.go_back(position);
            text.tokens.resize(position, 0);
            text.tokens.push(token);
        }
        Ok(())
    }

    /// Shows a draft what rows of the last step left, the first of which is at `position`.
    fn show(&mut self, sequence: SequenceId, position: u32, rows: &[Vec<f32>]) {
        if let Some(text) = self.texts.get_mut(&sequence) {
            text.draft.see(position as usize, rows);
        }
    }

    /// Shows drafts what they were not shown of the last step, before the next one overwrites it.
    fn show_unseen(&mut self) -> Result<(), Fault> {
        let Some(rows) = self.unseen.iter().map(|unseen| unseen.row + unseen.count).max() else { return Ok(()) };
        let left = self.steps.left(rows)?;
        for Unseen { sequence, position, row, count } in std::mem::take(&mut self.unseen) {
            self.show(sequence, position as u32, &left[row..row + count]);
        }
        Ok(())
    }

    /// Shows the draft of a sequence, of which tokens are asked next, what it was not shown yet: where it is, if the draft reads it there.
    fn show_in_place(&mut self, sequence: SequenceId) -> Result<(), Fault> {
        let Some(at) = self.unseen.iter().position(|unseen| unseen.sequence == sequence) else { return Ok(()) };
        let Unseen { position, row, count, .. } = self.unseen[at];
        let left = self.steps.left_in_place(row + count)?;
        let left = left.map(|left| Left { first: left.first + row as u32, count: count as u32, ..left });
        let text = self.texts.get_mut(&sequence);
        if left.zip(text).is_some_and(|(left, text)| text.draft.see_in_place(position, left)) {
            self.unseen.remove(at);
            return Ok(());
        }
        self.show_unseen()
    }

    /// A launch that reads a part of a prompt alone.
    fn read(&mut self, launch: Launch) -> Result<Vec<Said>, Fault> {
        self.show_unseen()?;
        let tokens = launch.tokens()?;
        let Launch { rows, steps, edits, copies } = launch;
        let tables = admit(&mut self.guard, &rows, steps, edits, &copies)?;
        self.steps.read(tables, &tokens)?;
        for (row, token) in rows.iter().zip(tokens) {
            self.note(row.sequence, row.position, token)?;
        }
        Ok(vec![Said::Nothing; rows.len()])
    }

    /// A launch of one step.
    fn one_step(&mut self, launch: Launch, allowed: &[Option<TokenSet>]) -> Result<Vec<Said>, Fault> {
        self.show_unseen()?;
        let tokens = launch.tokens()?;
        let Launch { rows, edits, copies, .. } = launch;
        let mut said = vec![Said::Nothing; rows.len()];
        let mut asked: Vec<(u32, Asks)> =
            tokens.iter().zip(&rows).map(|(token, row)| (*token, Asks::of(&row.want))).collect();
        if let Some((_, asks)) = asked.last_mut().filter(|_| self.drafts.is_some() && self.steps.leaves_with_token())
            && *asks == Asks::Nothing
        {
            *asks = Asks::Token(Sampler::greedy());
        }
        let admitted = rows.iter().zip(&asked).map(|(row, (_, asks))| Row {
            sequence: row.sequence,
            position: row.position,
            wants_logits: *asks != Asks::Nothing,
        });
        let tables = admit_rows(&mut self.guard, admitted.collect(), 1, edits, &copies)?;
        self.steps.run(tables, &asked, &mut |at, after| {
            let row = &rows[at];
            said[at] = match (&row.want, after) {
                (Want::Nothing, _) => Said::Nothing,
                (Want::Logits, After::Logits(logits)) => Said::Logits(logits),
                (want, after) => {
                    let allowed = allowed.get(at).and_then(Option::as_ref);
                    stepped(want, vec![choose(want, after, row.position, None, allowed)])
                }
            };
        })?;
        if self.drafts.is_none() {
            return Ok(said);
        }
        let left = self.steps.left(rows.len())?;
        for ((row, token), left) in rows.iter().zip(tokens).zip(left.chunks(1)) {
            self.note(row.sequence, row.position, token)?;
            self.show(row.sequence, row.position, left);
        }
        Ok(said)
    }

    /// A launch of several steps.
    fn several_steps(&mut self, launch: &Launch) -> Result<Vec<Said>, Fault> {
        let has_state = self.bounds.shape.has_state;
        let mut all = launch.rows.iter().map(|row| Going::new(row, has_state)).collect::<Result<Vec<_>, _>>()?;
        let (mut edits, mut copies) = (launch.edits.clone(), launch.copies.clone());
        let goes_on = |going: &Going<'_>| {
            let text = self.texts.get(&going.row.sequence);
            text.is_some_and(|text| text.tokens.get(going.begun.at()) == Some(&going.tokens[0]))
        };
        if !all.iter().all(goes_on) {
            self.show_unseen()?;
        }
        for going in &all {
            self.note(going.row.sequence, going.at(), going.tokens[0])?;
        }
        while all.iter().any(|going| going.missing(launch.steps) > 0) {
            self.step(&mut all, launch.steps, std::mem::take(&mut edits), std::mem::take(&mut copies))?;
        }
        Ok(all.into_iter().map(|going| stepped(&going.row.want, going.decided)).collect())
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
            if going.begun.wants_snapshot(&going.proposed) {
                copies.saves.push(StateCopy { from: sequence, to: slot });
            }
        }
        self.show_unseen()?;
        let (mut rows, mut asked, mut begins) = (vec![], vec![], vec![]);
        for (of, going) in taken.iter().enumerate() {
            begins.push(rows.len());
            for (at, token) in going.tokens.iter().chain(&going.proposed).enumerate() {
                rows.push((of, at));
                asked.push((
                    *token,
                    if at + 1 < going.tokens.len() { Asks::Nothing } else { Asks::of(&going.row.want) },
                ));
            }
        }
        let admitted = rows.iter().zip(&asked).map(|(&(of, at), (_, asks))| Row {
            sequence: taken[of].row.sequence,
            position: taken[of].at() + at as u32,
            wants_logits: *asks != Asks::Nothing,
        });
        let tables = admit_rows(&mut self.guard, admitted.collect(), 1, edits, &copies)?;
        let mut counting = vec![true; taken.len()];
        let before: Vec<usize> = taken.iter().map(|going| going.decided.len()).collect();
        self.steps.run(tables, &asked, &mut |row, after| {
            let (of, at) = rows[row];
            if counting[of] {
                counting[of] = taken[of].take(at, after);
            }
        })?;
        for ((going, begin), before) in taken.into_iter().zip(begins).zip(before) {
            let chosen: Vec<u32> = going.decided[before..].iter().flatten().map(|decided| decided.token).collect();
            self.count(going.proposed.len(), chosen.len());
            let (sequence, at, known) = (going.row.sequence, going.at(), going.tokens.len());
            for (position, token) in (at + known as u32..).zip(&chosen) {
                self.note(sequence, position, *token)?;
            }
            // Rows of tokens that were not chosen come last.
            let count = known + chosen.len().saturating_sub(1);
            if self.drafts.is_some() {
                self.unseen.push(Unseen { sequence, position: at as usize, row: begin, count });
            }
            going.finish(&chosen);
        }
        Ok(())
    }

    /// The tokens that the draft of a text chooses after those that are known.
    fn propose(&mut self, going: &Going<'_>, most: usize) -> Result<Vec<u32>, Fault> {
        let sequence = going.row.sequence;
        let Some(text) = self.texts.get_mut(&sequence).filter(|_| most > 0) else { return Ok(vec![]) };
        text.draft.choose_by(match &going.row.want {
            Want::Token(sampler) => Some(sampler),
            _ => None,
        });
        self.show_in_place(sequence)?;
        let mut counts = going.counts.clone();
        let mut position = going.at() + going.tokens.len() as u32 - 1;
        let mut choose = |after: After| {
            let token = choose(&going.row.want, after, position, counts.as_ref(), None).ok()?.token;
            position += 1;
            counts.iter_mut().for_each(|counts| counts.push(token));
            Some(token)
        };
        let Some(text) = self.texts.get_mut(&sequence) else { return Ok(vec![]) };
        text.draft.chosen(&text.tokens, most, &mut choose)
    }

    fn count(&mut self, proposed: usize, chosen: usize) {
        if proposed > 0 {
            self.proposals.steps += 1;
            self.proposals.proposed += proposed as u64;
            self.proposals.accepted += chosen.saturating_sub(1) as u64;
        }
    }
}

impl Stepper for Stepwise {
    fn bounds(&self) -> Bounds {
        self.bounds
    }

    fn submit(&mut self, launch: Launch) -> Result<(), Fault> {
        self.queued.push_back((launch, vec![]));
        Ok(())
    }

    fn allow(&mut self, allowed: Vec<Option<TokenSet>>) -> Result<(), Fault> {
        if let Some((_, of_launch)) = self.queued.back_mut() {
            *of_launch = allowed;
        }
        Ok(())
    }

    fn collect(&mut self) -> Result<Vec<Said>, Fault> {
        let Some((launch, allowed)) = self.queued.pop_front() else { return Ok(vec![]) };
        self.forget(&launch.edits);
        match (self.bounds.alone, launch.steps) {
            (Some(alone), 1) if launch.is(alone) => self.read(launch),
            (_, 1) => self.one_step(launch, &allowed),
            _ => self.several_steps(&launch),
        }
    }

    fn proposals(&self) -> Proposals {
        self.proposals
    }
}
