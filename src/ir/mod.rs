//! The language between lowering and everything after it: grids of tasks over buffers, and their placement on SMs.
//!
//! A [`Program`] is tile-level and unplaced: grids whose operands are affine regions of buffers, with the position in the
//! cache as a symbol. A [`Schedule`] is a program placed on a machine: tasks in per-SM queues, the events between them,
//! the chunk runs a loader brings in, and the memory map. Both are plain data with one text form (`.mkir`).
//!
//! What orders memory is one page for all kernels: docs/memory-model.md. `validate` proves against it, and
//! `kernels/runtime/sync.cuh` implements it.
//!
//! The language is data. It knows no pass and no CUDA call, and no position: the position is a symbol of every region. A schedule is
//! resolved: it has every number that code generation, the encoder, the interpreter or the packer needs, and none of them computes one
//! again. `validate` computes them again, to compare. Every module except `validate` asks `layout` where bytes lie.

pub mod layout;
pub mod op;
pub mod parse;
pub mod print;
pub mod program;
pub mod schedule;
pub mod table;
pub mod variant;

use crate::define_id;

define_id!(
    /// A buffer of a program.
    BufferId, "b"
);
define_id!(
    /// A table of a program.
    TableId, "v"
);
define_id!(
    /// A grid of a program.
    GridId, "g"
);
define_id!(
    /// A task of one regime of a schedule.
    TaskId, "t"
);
define_id!(
    /// An event of one regime of a schedule.
    EventId, "e"
);
define_id!(
    /// A layer of a model.
    LayerId, "l"
);
define_id!(
    /// A participating SM: a block index of the launch, not a hardware id.
    SmId, "sm"
);
