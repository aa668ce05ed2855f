//! The language between lowering and everything after it: grids of tasks over buffers, and their placement on SMs.
//!
//! A [`Program`] is tile-level and unplaced: grids whose operands are affine regions of buffers, with the position in the
//! cache as a symbol. A [`Schedule`] is a program placed on a machine: tasks in per-SM queues, the events between them,
//! the chunk runs a loader brings in, and the memory map. Both are plain data with one text form (`.mkir`).
//!
//! # The memory model that `validate` proves against and `kernels/runtime/sync.cuh` implements
//!
//! - **Step.** One decoded token of each row. Steps run one after another in program text, but SMs do not stop between them:
//!   an SM starts step `s + 1` as soon as its own queue for step `s` is done.
//! - **Rows.** A program bounds the rows of a step; a launch has any number of them from one on, the same in each of its steps.
//!   A row is one token of one sequence at one position, and goes on to the next position in the next step. The position of a
//!   step is the largest of its rows; it is the same on all SMs, it decides the regime, and the phase of a buffer. Rows beyond
//!   the launch's number have no values: no task reads, writes or polls any, and a task of such a row only signals. A row may
//!   want no logits in a launch of one step: the head leaves it out.
//! - **Rows of one sequence.** A sequence has one row in a step, or several at consecutive positions (part of a prompt) in a
//!   launch of one step. Its *history* is the positions below the first of these rows; attention reads it from the cache.
//!   Keys and values of the step itself, up to the row's own, come from the exchange: normed, rotated at their own
//!   positions and rounded to the cache's type, as they are appended. No row reads a cache row that its step appends.
//! - **Order over keys.** Attention without KV splits sums over keys in ascending order of absolute positions, from the first
//!   that the row sees to its own, wherever each key comes from. What else is fixed about this order depends on the row's
//!   position alone: a row's value does not depend on where a prompt was cut, or on the other rows of its step.
//! - **Tables.** The host writes the rows of a launch and the pages of their sequences before the launch, and never during
//!   it. A row of a paged cache is named by its sequence and position; the page table says where it lies. The facts that a
//!   table declares ([`table`]) keep rows apart in memory: no two rows write one page, and no row reads a page that another
//!   row writes.
//! - **Queue order.** The consumer warps of an SM execute its queue one task after another. A warp may begin a task while
//!   other warps of the SM still finish the one before. Inside each op a block barrier lies between what one warp writes
//!   and another one reads, also where the other one reads it in a later task.
//! - **Loader order.** The loader of an SM copies the chunk runs of its stream in order into a ring of slots. It waits for a
//!   free slot; and before the first history chunk of a step, it waits until the first task of its SM's queue in that step is
//!   done, which acquires what earlier steps appended. It may run ahead of the queue by the ring's capacity, across task and
//!   step boundaries. It reads weights (never written) and cache rows of positions before `p` of the step it loads for.
//! - **Events.** An event is "the columns `lo..hi` of a buffer were published in this step by `count` tasks". A task waits
//!   for its events before it reads any operand but streams and constants, and signals after its last write.
//!   A *carried* event is waited for in the step after it was signalled.
//! - **Mechanisms.** `packets`: each 8-byte packet carries its payload and the step's tag in one single-copy-atomic word, so
//!   the reader's poll is the wait. A packet orders what *depends* on its payload and nothing else: plain memory written
//!   before it is not made visible. `fenced`: packets after a release fence, followed by an acquire fence at the reader;
//!   orders all memory. `counter`: release add, acquire poll; orders all memory.
//!   `words`: of a buffer of words, each 4 bytes and single-copy atomic. All ones say that nothing is there yet, and no value has
//!   these bits, so the reader's poll is the wait. Such a buffer has two phases, which steps use in turn. The owner of a word
//!   clears it in the other phase, for the next step, even in a step in which its row takes no part and stores none. A word
//!   orders what depends on it and nothing else.
//! - **Streams that wait.** A run whose source the step chooses, such as the weights of an expert, names the event after
//!   which the choice is there. The event is packets or words: the loader polls the choice itself before it begins the run, and
//!   nothing after the run is loaded before. The choice is clamped to its table's bound.
//! - **Devices.** The SMs of a machine may belong to several devices. A packet is stored into the memory of each device
//!   that has the buffer, and an SM polls the memory of its own device; every access to words that cross devices is of
//!   scope `system` and one address, so that no half of a packet is seen. Tags are unique, so packets that cross need no
//!   fence, and they order nothing else. Cache rows and other plain memory stay on the device of the task that wrote them.
//! - **Scopes.** An event names how far its accesses reach: to all SMs whose tasks signal it or wait for it.
//! - **Two orders.** *Dependency order* (queue order and every event) decides deadlock and whether a write may overwrite
//!   what an earlier read needed. *Visibility order* (queue order, `fenced` and `counter` events) decides whether plain
//!   memory written on one SM may be read on another.
//! - **Proxies.** The ring is filled by the asynchronous proxy where the target copies in bulk. Cache rows written by
//!   ordinary stores and read by bulk copies need a proxy fence between, in the loader that copies; the event on that path
//!   must say `proxy`.
//!   The history of the cache is acquired once a step, by the carried event that every SM waits for first.
//!
//! # Why each mechanism of the kernels is sound
//!
//! Numbers are sections of the PTX ISA, version 9: chapter 8 is its memory consistency model. The test `ring_proxy` finds the
//! instructions named here in the PTX of every CUDA target.
//!
//! - **A packet is read whole.** Store and load are relaxed, at `gpu` scope, in the generic proxy and 8 bytes wide, so they are
//!   morally strong (8.7) and single-copy atomic (8.10.3). A vector of two packets is two accesses in no order (8.2.4).
//!   Every access to a packet has this width and this strength, also one that reads it again: a race of two widths
//!   takes the program out of the model (8.7.2).
//! - **A packet is read again without a fence.** Once a thread has observed it, its block reads it or a newer one after a block
//!   barrier (observation, 8.9.5; coherence, 8.10.5). The overwrite comes after all readers in dependency order.
//! - **A packet is overwritten after its readers.** Between the read and the overwrite lie relaxed packets only. The overwrite
//!   depends on values that exist because the read returned; values out of thin air are excluded (8.10.4). PTX gives
//!   nothing stronger for this case.
//! - **A word is read whole and is never an old one.** Store, clear and load are relaxed, at `gpu` scope and 4 bytes wide (a vector load is
//!   four accesses, 8.2.4), so they are morally strong (8.7) and single-copy atomic (8.10.3). A word has three values in turn: that
//!   of step `s - 1`, all ones, that of step `s + 1`. In step `s` its owner clears it, whether or not a row takes part in `s` that took
//!   part in `s - 1`: it may be back in `s + 1`. The clear comes after the step before is acquired and so after
//!   every reader of step `s - 1`; the release of step `s` follows, and the reader of step `s + 1` acquires it before it loads. So
//!   the clear precedes the load in causality order (8.9.5), and the load returns all ones or the new value. The rule
//!   `words-unseen` asks for both edges. Kernel launches order everything else, and the host fills the words with ones before
//!   the first launch and after one that ended early.
//! - **A step is released and acquired.** Writer: block barrier, then one thread executes `fence.release.gpu` and stores the
//!   step's packets (the arg-max pairs). Reader: each thread that polls them executes `fence.acquire.gpu` after its last poll,
//!   then comes a block barrier. Fence and store, load and fence are a release and an acquire pattern (8.8), which
//!   synchronise (8.9.4) because the fence is in the thread of the access. A fence of another thread after the barrier
//!   would be no acquire. Barriers extend the order to the other threads of both blocks (8.9.5). Before sm_90, and
//!   before PTX 8.6, both fences are `fence.acq_rel.gpu`.
//! - **The loader gets the acquired step.** After that barrier one thread stores the tag with `st.release.cta`, and each
//!   loading thread polls it with `ld.acquire.cta` (8.9.4); causality order is transitive over scopes (8.9.5).
//! - **A bulk copy reads cache rows.** The thread that issues it executes `fence.proxy.async.global` between that acquire and
//!   the copy. Section 8.9.5 has no rule for this fence. The argument uses the rule of the mixed-proxy model (Lustig,
//!   Cooksey, Giroux, ISCA 2022): the fence lies on the path, in the block of the access that is not generic. A fence at
//!   the writer alone permits the stale row there.
//! - **A slot is full.** Bulk copies complete a transaction on the slot's mbarrier, and completion contains the proxy fence
//!   (`cp.async.bulk`, "Async Proxy"). Arrival releases and the wait acquires at `cta` scope (`mbarrier.arrive`,
//!   `mbarrier.try_wait`). Plain copies count with `red.release.cta` and `ld.acquire.cta`.
//! - **A slot is empty.** The lanes of a warp meet (`bar.warp.sync` orders their reads), one arrives on the mbarrier, the loader
//!   waits. That orders the reads before the loader's next generic access and before no bulk copy: the loader executes
//!   `fence.proxy.async.shared::cta` between the wait and the copy. `ldmatrix` and `cp.async` that is not bulk are generic.
//! - **Waves** have an order of their own, argued at the head of `crate::waves`: a count that every SM adds to after each wave, and sums that the two
//!   blocks of a pair send each other.
//! - **Constants.** Weights, tables and prompts are not written during a launch; only they are read with `ld.global.nc`, which
//!   is outside the model (8.1).

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
