//! Owns what an engine knows of the thing that executes launches.

use crate::error::Fault;
use crate::rows::{Edit, Guard, Request, Row, SequenceId, Shape, Tables};
use crate::sample::Sampler;

/// What a stepper can take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Rows of a launch, sequences, positions, pages.
    pub shape: Shape,
    /// Rows of one sequence in a launch, at consecutive positions.
    pub chunk_max: u32,
    /// Where a launch of rows of one sequence alone reads a prompt faster than rows beside others.
    pub alone: Option<Alone>,
    /// Logits of a row; every token is below.
    pub vocab: u32,
    /// Launches that may be submitted before the first of them is collected; at least 1.
    pub launches: usize,
    /// Steps of a launch whose rows all want tokens; at least 1.
    pub steps_max: u32,
}

/// What a row of a launch is for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Want {
    /// Its keys and values.
    Nothing,
    /// Its logits, too.
    Logits,
    /// The token that this sampler chooses after it. The sampler has neither top-k nor top-p.
    Token(Sampler),
}

/// A row with its token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LaunchRow {
    pub sequence: SequenceId,
    pub position: u32,
    pub token: u32,
    pub want: Want,
}

/// Steps of several rows. Rows of one sequence stand together, in the order of their positions.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch {
    pub rows: Vec<LaunchRow>,
    /// More than one only if every row wants a token and has its own sequence: each row goes on with what it chose.
    pub steps: u32,
    /// What changed in the page table since the launch before.
    pub edits: Vec<Edit>,
}

/// Rows of one sequence, at consecutive positions and wanting nothing, that have a launch of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alone {
    /// Fewer are read as fast beside others.
    pub least: u32,
    pub most: u32,
}

impl Launch {
    /// Whether it has the form of `alone`.
    pub fn is(&self, alone: Alone) -> bool {
        let Some(first) = self.rows.first() else { return false };
        let same = |row: &LaunchRow| row.sequence == first.sequence && row.want == Want::Nothing;
        let count = (alone.least as usize..=alone.most as usize).contains(&self.rows.len());
        count && self.steps == 1 && self.rows.iter().all(same)
    }
}

/// The tables of a launch, judged.
///
/// # Errors
/// Tables that the guard refuses: the batch asked for what it must not.
pub(super) fn admit<'a>(
    guard: &'a mut Guard,
    rows: &[LaunchRow],
    steps: u32,
    edits: Vec<Edit>,
) -> Result<Tables<'a>, Fault> {
    let row = |row: &LaunchRow| {
        let LaunchRow { sequence, position, want, .. } = *row;
        Row { sequence, position, wants_logits: want != Want::Nothing }
    };
    let request = Request { rows: rows.iter().map(row).collect(), steps, edits };
    guard.admit(&request).map_err(|refused| Fault::internal(format!("the tables of a launch are refused: {refused}")))
}

/// What a row's [`Want`] got.
#[derive(Debug, Clone, PartialEq)]
pub enum Said {
    Nothing,
    Logits(Vec<f32>),
    /// The token of each step. It ends before a step in which no logit is a number above -inf.
    Tokens(Vec<u32>),
}

/// Executes launches in the order of their submission. A launch sees the pages that all launches before it wrote.
pub trait Stepper {
    fn bounds(&self) -> Bounds;

    /// Queues a launch; returns before it has run.
    ///
    /// # Errors
    /// What ends the engine: tables that the guard refuses, a device that is lost.
    fn submit(&mut self, launch: Launch) -> Result<(), Fault>;

    /// Waits for the oldest launch that was not collected; an entry for each of its rows.
    ///
    /// # Errors
    /// What ends the engine.
    fn collect(&mut self) -> Result<Vec<Said>, Fault>;
}

impl<S: Stepper + ?Sized> Stepper for Box<S> {
    fn bounds(&self) -> Bounds {
        (**self).bounds()
    }

    fn submit(&mut self, launch: Launch) -> Result<(), Fault> {
        (**self).submit(launch)
    }

    fn collect(&mut self) -> Result<Vec<Said>, Fault> {
        (**self).collect()
    }
}
