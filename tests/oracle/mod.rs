//! A judge of schedules that shares no code with `validate`: it executes them.
//!
//! `validate` argues with clocks and covers and never runs anything. This one plays the memory model at the head of
//! `core/src/ir/mod.rs` as a machine: blocks that wait, read and publish, loaders that run ahead, bytes that remember who
//! wrote them. What it calls unsafe comes with an execution that goes wrong; what it calls safe after an exhaustive
//! exploration has none, for the positions that were explored.
//!
//! - [`footprint`] says what each op touches, from the formulas of the op, and compares it with what operands declare;
//!   and it judges what needs no execution: what a launch occupies, what streams bring in.
//! - [`machine`] is the state and its moves. Memory is shadowed by byte: every byte of the arenas carries the instance of
//!   the task that wrote it, and a read of any other than the intended one is a fault. Plain memory of other SMs is as
//!   stale as the fences allow.
//! - [`contents`] runs a text with real contents, as its positions ask and in the first regime alone: both must compute
//!   the same.
//!   So must a text that several kernels over one cache run in turn.
//! - [`words`] looks for words that a step of another regime has left.
//! - [`draws`] makes the tables that the host may write.
//! - [`explore`] walks: all interleavings of small schedules, hostile random ones of large schedules.
//! - [`entries`] reads back what the queues of a proven schedule say to a device.
//! - [`device`] gives a device what is not proven, for `tests/bench/mutants.rs`.
//! - [`mutate`] breaks schedules in named ways, [`population`] judges many of them with both judges.
//!
//! It lives below `tests/` because it is no part of the tool: if it shipped, the first judge could start to
//! rely on it. The tests in `tests/it` and the benchmarks `tests/bench/proof.rs` and `mutants.rs` include it.

pub mod bases;
pub mod contents;
pub mod device;
pub mod draws;
pub mod entries;
pub mod explore;
pub mod footprint;
pub mod machine;
pub mod mutate;
pub mod population;
pub mod words;

use std::fmt;

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// It means nothing: an id of nothing, a number that no formula takes, a launch that is missing or doubled.
    Malformed,
    /// An op touches other bytes, or bytes of another type, than its operands say.
    Undeclared,
    /// Beyond the end of a buffer, a table or a cache.
    OutOfBounds,
    /// It does not fit the machine: memory, threads, registers, parts of shared memory that overlap.
    Occupancy,
    /// The ring hands a task chunks that are not its own, or breaks them.
    Ring,
    /// Blocks that wait for ever.
    Hang,
    /// A read of bytes that no task wrote.
    Unwritten,
    /// A read of bytes of another step, or of another producer.
    Stale,
    /// A write over bytes that a task has yet to read.
    Clobbered,
    /// Bytes in memory that are not yet visible to who reads or overwrites them.
    Invisible,
    /// A text that depends on where a regime begins.
    Border,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Kind::Malformed => "malformed",
            Kind::Undeclared => "undeclared",
            Kind::OutOfBounds => "out-of-bounds",
            Kind::Occupancy => "occupancy",
            Kind::Ring => "ring",
            Kind::Hang => "hang",
            Kind::Unwritten => "unwritten",
            Kind::Stale => "stale",
            Kind::Clobbered => "clobbered",
            Kind::Invisible => "invisible",
            Kind::Border => "border",
        }
    }
}

/// One way in which a schedule goes wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    pub kind: Kind,
    pub what: String,
}

impl Fault {
    pub fn new(kind: Kind, what: impl Into<String>) -> Fault {
        Fault { kind, what: what.into() }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind.name(), self.what)
    }
}
