//! Owns tables: values that are known when a kernel runs, and the facts about them that a proof may use.
//!
//! An operand may be indexed by a value that a table holds: the page of a position, the weights of an expert. The proof
//! knows nothing of such a value but what its table declares: that it is below a bound, and the facts below. The
//! writer of the table must make them true. For a table of the host, [`crate::rows::Guard`] checks them before a launch; for
//! a table of the device, the op that writes the value keeps it below the bound. Kernels clamp entries to the bound.
//!
//! Tables of the host do not change during a launch. So a launch of several steps has the pages of all its steps.

use super::BufferId;

/// Values that are known when a kernel runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    pub name: String,
    pub home: TableHome,
    pub holds: Holds,
    pub rows: u32,
    pub cols: u32,
    /// Every entry is below it.
    pub bound: u32,
    /// Ascending.
    pub facts: Vec<Fact>,
}

/// Who writes a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TableHome {
    /// The host, before a launch.
    Host,
    /// Tasks of the step: entry `i` is column `i` of this buffer.
    Device(BufferId),
}

/// What the entries of a table are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Holds {
    /// The sequence of each row of the step.
    Sequences,
    /// The position of each row in the first step of a launch; a step later it is one more.
    Positions,
    /// The page of each block of positions of each sequence: a row for a sequence.
    Pages,
    /// Part of a buffer that the step chose, such as an expert.
    Choices,
}

impl Holds {
    pub const ALL: [Holds; 4] = [Holds::Sequences, Holds::Positions, Holds::Pages, Holds::Choices];

    pub fn name(self) -> &'static str {
        match self {
            Holds::Sequences => "sequences",
            Holds::Positions => "positions",
            Holds::Pages => "pages",
            Holds::Choices => "choices",
        }
    }

    /// The facts that can be declared about such a table.
    pub fn facts(self) -> &'static [Fact] {
        match self {
            Holds::Sequences => &[Fact::Consecutive],
            Holds::Positions => &[Fact::Filled, Fact::At],
            Holds::Pages => &[Fact::Distinct, Fact::Unshared],
            Holds::Choices => &[],
        }
    }
}

/// What the proof may assume of a table beside its bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fact {
    /// Rows of one sequence are neighbours in the table, at consecutive ascending positions, in a launch of one step. So a
    /// row reads of the cache what is below the first of them, and no row reads there what its step appends.
    Consecutive,
    /// The cache rows that a sequence's rows of the first step may read are written: positions below the first of them, as
    /// far as windows reach.
    Filled,
    /// No page is written for two sequences of a launch, or for two blocks of one.
    Distinct,
    /// A page that a launch writes is held by one sequence, so no row of another one reads it.
    Unshared,
    /// The first row of a sequence in a launch is at position 0, or at the one after the last that the sequence ran. So its recurrent state
    /// is that of the position before.
    At,
}

impl Fact {
    pub const ALL: [Fact; 5] = [Fact::Consecutive, Fact::Filled, Fact::Distinct, Fact::Unshared, Fact::At];

    pub fn name(self) -> &'static str {
        match self {
            Fact::Consecutive => "consecutive",
            Fact::Filled => "filled",
            Fact::Distinct => "distinct",
            Fact::Unshared => "unshared",
            Fact::At => "at",
        }
    }
}
