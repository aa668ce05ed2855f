//! A judge of schedules that shares no code with `validate`: it executes them.
//!
//! `validate` argues with clocks and covers and never runs anything. This judge simulates the memory model of
//! docs/memory-model.md as a machine: blocks that wait, read and publish, loaders that run ahead, bytes that remember their
//! writers. A schedule that it calls unsafe has an execution that goes wrong. One that it calls safe after an exhaustive
//! exploration has none, for the explored positions.
//!
//! - [`footprint`] derives the accesses of each op from its formulas, and compares them with the declared operands. It also
//!   judges what needs no execution: the resources of a launch, and the contents of streams.
//! - [`machine`] is the state and its moves. Memory is shadowed by byte: every byte of the arenas carries the instance of
//!   the task that wrote it, and a read of any other than the intended one is a fault. Plain memory of other SMs is as
//!   stale as the fences allow.
//! - [`contents`] runs a text with contents, with the regimes of its positions and in the first regime alone: both must compute
//!   the same. The same holds for a text that several kernels over one cache run in turn.
//! - [`states`] runs the launches that a host may make, and looks in which version tasks find recurrent states.
//! - [`words`] looks for words that a step of another regime did not clear.
//! - [`draws`] makes the tables that the host may write.
//! - [`explore`] walks: all interleavings of small schedules, adversarial random ones of large schedules.
//! - [`entries`] reads back the queues of a proven schedule.
//! - [`device`] prepares unproven schedules for a device, for `tests/bench/mutants.rs`.
//! - [`waves`] breaks plans of wave kernels, which [`crate::executor`] executes.
//! - [`mutate`] breaks schedules in named ways, [`population`] judges many of them with both judges.
//!
//! It is below `tests/` because it is no part of the product: if it shipped, the first judge could start to
//! rely on it. `tests/computed` includes it, for the tests in `tests/it` and the benchmarks `tests/bench/proof.rs` and `mutants.rs`.

pub mod bases;
pub mod contents;
pub mod device;
pub mod draws;
pub mod entries;
pub mod explore;
pub mod footprint;
pub mod hybrids;
pub mod machine;
pub mod mutate;
mod mutate_states;
pub mod population;
pub mod states;
pub mod waves;
pub mod words;

use std::fmt;

/// The kinds of faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Meaningless: an id without an entity, a number that no formula takes, a launch that is missing or doubled.
    Malformed,
    /// An op touches other bytes, or bytes of another type, than its operands say.
    Undeclared,
    /// Beyond the end of a buffer, a table or a cache.
    OutOfBounds,
    /// It does not fit the machine: memory, threads, registers, parts of shared memory that overlap.
    Occupancy,
    /// The ring gives a task wrong or broken chunks.
    Ring,
    /// Blocks that wait for ever.
    Hang,
    /// A read of bytes that no task wrote.
    Unwritten,
    /// A read of bytes of another step, or of another producer.
    Stale,
    /// A write over bytes that a task has yet to read.
    Clobbered,
    /// An access to bytes whose write is not yet visible to it.
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
