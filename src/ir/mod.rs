//! The language between lowering and everything after it: grids of tasks over buffers, and their placement on SMs.
//!
//! A [`Program`] is tile-level and unplaced: grids whose operands are affine regions of buffers, with the position in the
//! cache as a symbol. A [`Schedule`] is a program placed on a machine: tasks in per-SM queues, the events between them,
//! the chunk runs a loader brings in, and the memory map. Both are plain data with one text form (`.mkir`).
//!
//! # The memory model that `validate` proves against and `kernels/runtime/sync.cuh` implements
//!
//! - **Step.** One decoded token. Steps run one after another in program text, but SMs do not stop between them: an SM
//!   starts step `s + 1` as soon as its own queue for step `s` is done. Position `p` is the same on all SMs in a step.
//! - **Queue order.** The consumer warps of an SM execute its queue one task after another; a block barrier separates
//!   two tasks, so everything a task wrote is visible to later tasks of the same SM.
//! - **Loader order.** The loader of an SM copies the chunk runs of its stream in order into a ring of slots. It waits for a
//!   free slot, and before the first history of a step for the first task of its SM's queue in that step, which acquires what
//!   earlier steps appended. It may run ahead of the queue by the ring's capacity, across task and step boundaries. It reads
//!   weights (never written) and cache rows of positions before `p` of the step it loads for.
//! - **Events.** An event is "the columns `lo..hi` of a buffer were published in this step by `count` tasks". A task waits
//!   for its events before it reads any operand but streams and constants, and signals after its last write.
//!   A *carried* event is waited for in the step after it was signalled.
//! - **Mechanisms.** `packets`: each 8-byte packet carries its payload and the step's tag in one single-copy-atomic word, so
//!   the reader's poll is the wait. A packet orders what *depends* on its payload and nothing else: plain memory written
//!   before it is not made visible. `fenced`: packets behind a release fence, followed by an acquire fence at the reader;
//!   orders all memory. `counter`: release add, acquire poll; orders all memory.
//! - **Two orders.** *Dependency order* (queue order and every event) decides deadlock and whether a write may overwrite
//!   what an earlier read needed. *Visibility order* (queue order, `fenced` and `counter` events) decides whether plain
//!   memory written on one SM may be read on another.
//! - **Proxies.** The ring is filled by the asynchronous proxy where the target copies in bulk. Cache rows written by
//!   ordinary stores and read by bulk copies need a proxy fence between; the event on that path must say `proxy`.
//!   The history of the cache is acquired once a step, by the carried event that every SM waits for first.

pub mod layout;
pub mod op;
pub mod parse;
pub mod print;
pub mod program;
pub mod schedule;
pub mod variant;

use crate::define_id;

define_id!(
    /// A buffer of a program.
    BufferId, "b"
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
