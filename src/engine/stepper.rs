//! Owns `Stepper`: what an engine knows about the executor of its launches.

use std::sync::Arc;

use super::batch::Ask;
use crate::error::Fault;
use crate::rows::{Edit, Guard, Request, Row, SequenceId, Shape, StateCopies, Tables};
use crate::sample::{self, Decided, SampleError, Sampler, TokenCounts, TokenSet};

/// What a stepper can take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Rows of a launch, sequences, positions, pages.
    pub shape: Shape,
    /// Rows of one sequence in a launch, at consecutive positions.
    pub chunk_max: u32,
    /// Launches that read a prompt of one sequence alone, if they are faster than rows beside others.
    pub alone: Option<Alone>,
    /// Logits of a row; every token is below.
    pub vocab: u32,
    /// Steps of a launch whose rows all want tokens or choices; at least 1.
    pub steps_max: u32,
    /// `Some(n)`: takes [`Want::Choice`] of requests with at most `n` log-probabilities beside that of the token. `None`: takes none.
    pub choices: Option<u32>,
}

impl Bounds {
    /// Whether the pages of a prompt serve another one that begins alike. Pages that a window has left are given back.
    pub fn shares_prefixes(&self) -> bool {
        self.shape.window.is_none()
    }
}

/// What a row of a launch is for.
#[derive(Debug, Clone, PartialEq)]
pub enum Want {
    /// Its keys and values.
    Nothing,
    /// Its logits, too.
    Logits,
    /// The token that this sampler chooses after it. The sampler has neither top-k nor top-p.
    Token(Sampler),
    /// The token that a request chooses after it.
    Choice(Chooser),
}

/// A request with its tokens so far. Together with the logits this decides the next token.
#[derive(Debug, Clone)]
pub struct Chooser {
    ask: Arc<Ask>,
    at: usize,
    counts: Arc<TokenCounts>,
    /// [`Stepper::allow`] tells which ids may come next.
    is_guided: bool,
}

impl Chooser {
    /// Choice `at` of `ask`, after the tokens of `counts`.
    pub(super) fn new(ask: Arc<Ask>, at: usize, counts: Arc<TokenCounts>, is_guided: bool) -> Chooser {
        Chooser { ask, at, counts, is_guided }
    }

    /// A grammar says which ids may come next: [`Stepper::allow`] tells them.
    pub fn is_guided(&self) -> bool {
        self.is_guided
    }

    pub fn request(&self) -> &sample::Request {
        &self.ask.choices[self.at]
    }

    pub fn counts(&self) -> &TokenCounts {
        &self.counts
    }
}

/// The same choice of the same request.
impl PartialEq for Chooser {
    fn eq(&self, other: &Chooser) -> bool {
        Arc::ptr_eq(&self.ask, &other.ask) && self.at == other.at && self.counts == other.counts
    }
}

/// A row with its token.
#[derive(Debug, Clone, PartialEq)]
pub struct LaunchRow {
    pub sequence: SequenceId,
    pub position: u32,
    /// `None`: what the row at the same place of the launch before decided in its last step.
    pub token: Option<u32>,
    pub want: Want,
}

/// Steps of several rows. Rows of one sequence stand together, in the order of their positions.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch {
    pub rows: Vec<LaunchRow>,
    /// More than one only if every row wants a token or a choice and has its own sequence: each row goes on with what it chose.
    pub steps: u32,
    /// What changed in the page table since the launch before.
    pub edits: Vec<Edit>,
    /// Copies of recurrent states, which are done before the launch and after those before it.
    pub copies: StateCopies,
}

impl Launch {
    /// Its tokens, in the order of the rows.
    ///
    /// # Errors
    /// A token that the launch before decides.
    pub fn tokens(&self) -> Result<Vec<u32>, Fault> {
        let token = |row: &LaunchRow| row.token.ok_or_else(|| Fault::internal("a launch without its tokens"));
        self.rows.iter().map(token).collect()
    }

    /// Whether [`Stepper::allow`] completes it. It has one step.
    pub fn is_guided(&self) -> bool {
        self.rows.iter().any(|row| matches!(&row.want, Want::Choice(chooser) if chooser.is_guided))
    }
}

/// A launch of its own for rows of one sequence at consecutive positions. They want nothing, except perhaps the last one.
/// May overlap with one other launch, unless a row of either needs logits or a sampler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alone {
    /// Fewer are read as fast in an ordinary launch.
    pub least: u32,
    pub most: u32,
    /// The last row may want whatever a row of another launch may want.
    pub decides: bool,
    /// So many tokens at the end of a prompt are read in ordinary launches.
    pub leaves: u32,
}

impl Launch {
    /// Whether it has the form of `alone`.
    pub fn is(&self, alone: Alone) -> bool {
        let Some(first) = self.rows.first() else { return false };
        let last = self.rows.len() - 1;
        let same = |(at, row): (usize, &LaunchRow)| {
            row.sequence == first.sequence && (row.want == Want::Nothing || alone.decides && at == last)
        };
        let count = (alone.least as usize..=alone.most as usize).contains(&self.rows.len());
        count && self.steps == 1 && self.rows.iter().enumerate().all(same)
    }
}

/// The tables of a launch, judged.
///
/// # Errors
/// Tables that the guard refuses: the batch asked for what it must not.
pub fn admit<'a>(
    guard: &'a mut Guard,
    rows: &[LaunchRow],
    steps: u32,
    edits: Vec<Edit>,
    copies: &StateCopies,
) -> Result<Tables<'a>, Fault> {
    let row = |row: &LaunchRow| Row {
        sequence: row.sequence,
        position: row.position,
        wants_logits: row.want != Want::Nothing,
    };
    admit_rows(guard, rows.iter().map(row).collect(), steps, edits, copies)
}

/// As [`admit`], of rows of which nothing but their place is known.
///
/// # Errors
/// As [`admit`].
pub fn admit_rows<'a>(
    guard: &'a mut Guard,
    rows: Vec<Row>,
    steps: u32,
    edits: Vec<Edit>,
    copies: &StateCopies,
) -> Result<Tables<'a>, Fault> {
    guard
        .admit_after(copies, &Request { rows, steps, edits })
        .map_err(|refused| Fault::internal(format!("the tables of a launch are refused: {refused}")))
}

/// What a row's [`Want`] got.
#[derive(Debug, Clone, PartialEq)]
pub enum Said {
    Nothing,
    Logits(Vec<f32>),
    /// The token of each step. It ends before a step in which no logit is a number above -inf.
    Tokens(Vec<u32>),
    /// The choice of each step. Nothing is known of the steps after one without a token.
    Choices(Vec<Result<Decided, SampleError>>),
}

/// What became of tokens that a stepper proposed to itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Proposals {
    pub proposed: u64,
    pub accepted: u64,
    /// Steps of a sequence that verified them.
    pub steps: u64,
}

/// Executes launches in the order of their submission. A launch sees the pages that all launches before it wrote.
pub trait Stepper {
    fn bounds(&self) -> Bounds;

    /// Queues a launch; returns before it has run.
    ///
    /// # Errors
    /// What ends the engine: tables that the guard refuses, a device that is lost.
    fn submit(&mut self, launch: Launch) -> Result<(), Fault>;

    /// The ids that may come next, for each row of the launch that was submitted last; `None`: all. Called once after a launch with a
    /// guided [`Want::Choice`], which is not complete before: what a grammar allows is found while the launch runs.
    ///
    /// # Errors
    /// What ends the engine.
    fn allow(&mut self, allowed: Vec<Option<TokenSet>>) -> Result<(), Fault>;

    /// Waits until the only launch that was not collected has begun its last step, or has ended. Returns, for each of its rows, the tokens of
    /// the steps before the last one. Then a launch with the same rows may be submitted before this one is collected: each row goes on from
    /// it. `None`: this stepper takes no such launch.
    ///
    /// # Errors
    /// What ends the engine.
    fn last_step(&mut self) -> Result<Option<Vec<Vec<u32>>>, Fault> {
        Ok(None)
    }

    /// Waits for the oldest launch that was not collected; an entry for each of its rows.
    ///
    /// # Errors
    /// What ends the engine.
    fn collect(&mut self) -> Result<Vec<Said>, Fault>;

    /// The tokens that it proposed to itself; none, if it has no draft.
    fn proposals(&self) -> Proposals {
        Proposals::default()
    }
}

impl<S: Stepper + ?Sized> Stepper for Box<S> {
    fn bounds(&self) -> Bounds {
        (**self).bounds()
    }

    fn submit(&mut self, launch: Launch) -> Result<(), Fault> {
        (**self).submit(launch)
    }

    fn allow(&mut self, allowed: Vec<Option<TokenSet>>) -> Result<(), Fault> {
        (**self).allow(allowed)
    }

    fn last_step(&mut self) -> Result<Option<Vec<Vec<u32>>>, Fault> {
        (**self).last_step()
    }

    fn collect(&mut self) -> Result<Vec<Said>, Fault> {
        (**self).collect()
    }

    fn proposals(&self) -> Proposals {
        (**self).proposals()
    }
}
