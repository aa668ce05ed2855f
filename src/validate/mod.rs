//! Owns the static proof: `validate` turns a `Schedule` into a `Validated`, or says what is wrong and where.
//!
//! The proof recomputes everything from the schedule and the target record. It believes nothing that lowering or
//! scheduling computed, has no size above which it samples or skips, and never panics on what a user wrote. The memory
//! model it proves against is docs/memory-model.md.
//!
//! # What is proven
//!
//! Groups are judged in this order. A group that builds on facts of an earlier one is judged only where that one found
//! nothing, so that a list of violations names causes and not their consequences.
//!
//! 1. **Well-formed** (`wellformed`, `operands`, `tables`, `devices`, `regimes`, `names`). Every id exists; every task is in one queue;
//!    queues, streams and placements are as many as SMs and buffers. Every grid has the operands of its op's table, each in the right
//!    space, with the right element type, row kind and columns, inside its buffer for every extent: rows of the current
//!    position and of the history below `context_max`, rows of the table up to the vocabulary of the head. Attributes
//!    are finite and positive where they must be. Immutable buffers are filled with the kind of content that their roles
//!    read. Names that generated code spells out fit there. Exchange regions start on packets. Each regime launches every
//!    index of every grid once; only attention has alternatives, they agree, and every regime appends the same columns of
//!    the same caches. Each queue starts with its `select`. What a
//!    regime writes of a shared buffer it writes whole and once: no element is read that was not produced, none has two
//!    producers, and each layer's keys and values are appended once a step. A private element is written, then updated and
//!    read, in program order on the SM that owns it, or by every SM for itself.
//! 2. **Events** (`events`). An event is signalled once by each task that writes any of its columns, by no other, and
//!    its count says how many those are; each wait asks for exactly that count. Every exchange region read is covered
//!    by the reader's own waits, and a task that waits by packets reads them: the poll is the wait. Events about one buffer
//!    are all counters or all packets. An event is carried where program order reads before it writes (the arg-max pairs, and
//!    what a draft goes on with), and only there; the first step of a regime finds the events it carries in the regime before.
//!    The scope of an event includes all tasks that signal it or wait for it; all events about words that cross devices are
//!    of scope `system` (`devices`).
//! 3. **Free of deadlock** (`order`, `variants`). Queues, loaders and the events of a step have no cycle; a witness is the
//!    cycle. The consumers of an SM and its loader are two chains: a task comes after the loader's beginning of its run, a run
//!    after the event that it waits for, and a run after the task that frees its slot. The stream
//!    of an SM lists exactly the streamed operands of its queue, in its order: the units that the task multiplies, the rows that
//!    its share of the history has. A task's chunks fit the ring; the arrivals that free a slot are the consumer warps. The
//!    variants of matvecs and attention are those that tasks, slots and cache rows lead to (`variants`).
//! 4. **Race-free** (`races`), over up to `1 + phases` consecutive steps of each regime and across each change of regime. A
//!    packet or logit is overwritten only after every reader and the writer of the old value (dependency order;
//!    visibility order for what the host reads). A loader reads the history only where each append of the step before
//!    is visible.
//! 5. **Memory** (`memory`). Shared-memory parts, registers, threads and SMs fit the target, parts are large
//!    enough for what runs in them, arenas have no overlap (weights and constants share that of the pack), and everything fits
//!    device memory.
//! 6. **Proxies** (`proxies`). Where the target copies in bulk, an append reaches the loader through a proxy fence, which
//!    the loader makes when it takes over from the first task of its queue. No other task is asked for one.
//!
//! The kernels of a CUDA target can do less than the language says, so the last group compares the schedule with what they
//! take for granted (`kernels`).
//!
//! Every rule has a filetest that violates it, and a mutation of a proven schedule that violates it alone. A violation in the output of
//! our own lowering is our bug and stops the build; in a user's file it is an answer. That a program computes its model is a judgement
//! of its own (`same`).
//!
//! # Rows and tables
//!
//! A row of a cache is its sequence and position, wherever the page table puts it. Rows of a step append different ones, and
//! none reads what another one appends: a sequence with several rows reads the cache below the first of them, and the keys
//! of the step from the exchange. So what is proven of the columns of a one-row step is proven here of the columns of each
//! row: a buffer of which some task touches single rows is taken as `rows x cols` columns side by side, any other as `cols`
//! columns that are always touched in all rows. That no two rows meet in memory is what the facts of the tables say, and
//! nothing else (`tables`): `consecutive`, `filled`, `distinct`, `unshared`, and of states `at`. The host establishes them before a launch
//! ([`crate::rows::Guard`]). A launch of fewer rows than the program has leaves out reads and writes, and the order of the
//! rest stays as it is.
//!
//! # States
//!
//! A recurrent state is updated in place, by one grid, and the columns of a launch index on one SM in every regime (`states`). So program order
//! lies between steps, and no event.
//!
//! Tasks may divide the sequences into parts. Every row of a launch is in one part, the same in all its steps, so what such a task touches is
//! taken as columns of one of `parts` rows, as above: each part must be written once, a reader of all rows waits for all parts, and no event is
//! about one row. A row that takes no part is in one, too: its words are cleared by one task.
//!
//! # Choices
//!
//! The weights of an expert are one of the equal parts of a buffer, and the step chooses which. Three facts make a task that takes a
//! chosen part like any other:
//!
//! - The choice is bounded: only `route`s write what a table of the device names, each with a slot for every column of the table, and each
//!   among at most as many experts as there are parts (`tables`).
//! - It is there before it is used. The task reads the entries that it depends on, and waits for them. Its run waits for the event of
//!   exactly these entries (`events`), which is a part of the order that has no cycle (`order`). The loader looks before the task can read its
//!   chunks, so a choice that is overwritten only after its readers is overwritten after their loaders, too (`races`).
//! - Each unit of each slot is computed once: slots are the second axis of the launch (`wellformed`). The inputs of the sum lie in the order of
//!   slots (`operands`).
//!
//! In a step of several rows the parts that rows chose are dealt. Each share of the list has one task, which names all that its device holds
//! (`wellformed`). Shares do not overlap, and a row chooses a part in one slot, so each unit of each slot of each row is computed once. What a
//! dealt task reads, writes and waits for is what it may: for deadlock it waits for all of it, and where accesses must be ordered, its waits and
//! those for what it writes count for nothing, but for the choices, which it polls all (`races`).
//!
//! That the right experts are chosen, weighed and added is a judgement about the program (`same`).
//!
//! # What the runtime must do for the proof to hold
//!
//! - Program order is the order of the grids: a read sees the last write before it in this order, of the same step,
//!   else of the step before.
//! - The loader brings in chunks of the history of a step only after the first task of its SM's queue in that step is
//!   done; it may bring in weights at any time.
//! - A task has read its exchange operands before the first of its packets can be seen. Its other writes may land later:
//!   seeing a packet says nothing of them, unless the event orders memory.
//! - A carried event is the same object in all regimes whose carried events have its buffer and columns.
//! - A step's phase of a buffer is its position, the largest of its rows, modulo the buffer's phases. Of words it is the number of
//!   steps before it modulo two, counted on from launch to launch.
//! - Tables of the host do not change during a launch, and entries are clamped to their bounds.
//! - A launch may start at any position; its first step waits for no carried event (nothing ran before it).
//! - Private data of an SM begins at the lowest column that the SM owns.
//!
//! # Cross-regime invariants
//!
//! Five things outlive a step: cache rows, states, words, the columns of carried events, and what the host reads. Private data and all
//! other exchange columns are written in the step that reads them, before they are read (`uncovered`, `private-order`,
//! `carried`). Weights and constants never change.
//!
//! - *Cache rows.* A row is appended by the regime that serves its position. A launch may start at any position, so a
//!   regime reads rows of every regime up to it. All regimes append the same columns of every cache (`regime-appends`),
//!   so each of these rows was written.
//! - *The meaning of rows.* Grids that extend one cache at one column, with keys or with values, are the same attention
//!   with the same inputs and the same caches (`alternatives`). Hence each attention of a regime has a counterpart in
//!   every other: in both regimes some grid begins at the lowest column that is appended to a cache, these two are
//!   compared, are the same, and append the same columns; the lowest column of the rest begins the next pair.
//!   They lay out rows alike.
//!   Alternatives leave their heads in the same columns, directly or through the merges of their regime. All other grids
//!   are launched in every regime. So all regimes compute one function of the token, the position and the caches; they
//!   may round differently.
//! - *States.* The columns of a state are updated in place by the task of one launch index, in the rows of its part of the sequences. It is
//!   on the same SM in every regime (`state-owner`, `states`). So program order lies between a step's update and the next one.
//! - *Words.* A word is cleared in the step after the one that stored it, by its owner there, which may be another SM. A launch may end in any regime and the
//!   next one may begin in any, so any regime may follow any. All regimes write the same words (`regime-words`), so each step clears
//!   all that the step before has stored.
//! - *Carried columns.* A carried event has a counterpart in the regime before (`carried-match`), which writes the buffer
//!   whole (`uncovered`).
//! - *What the host reads* is made by grids that have no alternatives.
//!
//! The kernels of an artefact share one cache, and each has a proof of its own. They must agree on the same things as regimes, and
//! [`share_caches`] proves that they do.
//!
//! # Why a few steps are all steps
//!
//! Happens-before between two steps uses only the steps between them, and inserting another step of a regime that is
//! already between them keeps every path: queue order reaches through it, and so does a carried event, to its waiter in
//! the inserted step and along that SM's queue. So what is ordered in a short run is ordered in every longer one, and a
//! short run suffices if it has each pair of steps that must be ordered.
//!
//! - *Exchanges.* A write must be ordered after the readers and writers of the last value in the same phase. A regime
//!   that writes a buffer writes it whole in each of its steps. So that value is `phases` steps old, or it is one of the
//!   last `phases` of an earlier regime and the write is among the first `phases` of its own. A run of
//!   `min(length, 1 + phases)` steps of each regime has all such pairs. Older values follow: their pairs are in the run too.
//! - *Fewer steps.* If every SM begins each step by knowing that all of the step before is done, and with several regimes
//!   sees all that it wrote, then by induction it knows and sees all older steps. Pairs two steps apart and more are
//!   ordered, and two steps of each regime have all pairs one step apart. Both orders are needed: packets that no task
//!   reads may land late, and only visibility says that they have landed. Otherwise the run is `1 + phases` steps long.
//! - *Words.* The owner of a word clears it in step `s` in the other phase, which step `s - 1` wrote and step `s + 1` will write, whether or
//!   not its row takes part in step `s`. So every row is judged as if it took part in every step, and
//!   the clear as a write of a buffer with one phase: after all readers of step `s - 1`. And each SM must see, after
//!   the first task of a step, everything that the step before wrote (`words-unseen`), so that it reads all ones or the new
//!   value and never the one of two steps before. That is asked of whole steps: what it implies for single words is
//!   more than they need, and every schedule of ours has it.
//! - *Launches that only fill the cache* have one step, and execute only its tasks of grids up to the last one that appends. The rule
//!   `kernel-rows` asks that these come first in every queue and stream and wait for no others, so they are ordered as in a whole
//!   step. The tasks left out clear no words: the host fills all words with ones before the next whole step.
//! - *Histories and outputs* are written whole in every step, so pairs one step apart are enough: a task that appends a column
//!   reads its history in the same step, and so has seen the append of the step before.
//!
//! # Rules that the language has no words for
//!
//! The memory model of exchanges (PTX) has more rules than today's schedules can express. Each of these needs new words first:
//!
//! - *Access width*: one width of word for all accesses to a buffer. Today the mechanism decides it, and
//!   `mixed-mechanism` keeps it one; needs widths of their own.
//! - *Copies of exchanges*: every writer fenced before the copy. Needs streams whose source is an exchange; for caches
//!   these are `history-unordered` and `missing-proxy`.
//! - *Parity bits*: every word read in every use. Needs mechanisms beside packets, words, fences and counters.
//! - *Sums in a cluster*: bytes expected are bytes sent, buffers freed before they are sent to again. Needs exchanges
//!   between the blocks of a cluster.
//!
//! # What is not checked
//!
//! Numbers: `check` compares them. Whether a scale is the model's, and whether a layer reads the buffer that the model says, is not known
//! from a schedule alone: [`same`] proves it where the model is known, before anything is compiled.
//! Which bytes the packer puts into weights and constants: whether the checkpoint has the tensor or the rope of an id, and
//! whether its extents fit, is known where the checkpoint is (`pack`).

mod devices;
mod events;
mod kernels;
mod memory;
mod names;
mod operands;
mod order;
mod proxies;
mod races;
mod regimes;
mod same;
mod shared;
mod states;
mod tables;
mod variants;
mod wellformed;

pub use same::{NotSame, same};
pub use shared::{NotShared, all_share_caches, share_caches};

use crate::error::{Fault, Tier};
use crate::ir::parse::Lines;
use crate::ir::schedule::Schedule;
use crate::ir::{BufferId, EventId, GridId, SmId, TableId, TaskId};
use crate::target::Target;
use crate::text::Span;
use std::fmt;

/// A schedule with a proof. Only [`validate`] makes one.
// Transparent, so that `tests/bench/mutants.rs` can run unproven schedules although the library has no way to make them `Validated`.
#[derive(Debug, Clone, PartialEq)]
#[repr(transparent)]
pub struct Validated {
    schedule: Schedule,
}

impl Validated {
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Gives the schedule back; the proof is gone with it.
    pub fn into_schedule(self) -> Schedule {
        self.schedule
    }
}

/// A schedule without a proof, and why.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("`{}` is not proven: {}", self.schedule.program.name, Summary(&self.violations))]
pub struct Rejected {
    pub schedule: Box<Schedule>,
    /// Not empty.
    pub violations: Vec<Violation>,
}

/// A rejection on the way from our own lowering to a kernel is our bug; for schedules of users there is [`check`].
impl From<Rejected> for Fault {
    fn from(rejected: Rejected) -> Fault {
        let mut message = rejected.to_string();
        for violation in rejected.violations.iter().take(SHOWN_MAX) {
            message.push_str("\n  ");
            message.push_str(&violation.to_string().replace('\n', "\n  "));
        }
        Fault { tier: Tier::Internal, message, remedy: Some("report this with the schedule's text".to_string()) }
    }
}

/// Violations that a fault prints; the list has all that were kept.
const SHOWN_MAX: usize = 5;

struct Summary<'a>(&'a [Violation]);

impl fmt::Display for Summary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [] => f.write_str("no violation"),
            [only] => write!(f, "`{}` at {}", only.rule, only.entity),
            [first, rest @ ..] => write!(f, "`{}` at {} and {} more", first.rule, first.entity, rest.len()),
        }
    }
}

/// One broken rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    pub rule: Rule,
    /// Where to look first.
    pub entity: Entity,
    /// Expected before found.
    pub message: String,
    /// What else takes part, in a reader's order: the tasks of a cycle, the two ends of an unordered pair.
    pub witness: Vec<Witness>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Witness {
    pub entity: Entity,
    pub note: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.rule, self.entity, self.message)?;
        for witness in &self.witness {
            write!(f, "\n  {}: {}", witness.entity, witness.note)?;
        }
        Ok(())
    }
}

/// What a violation points at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Entity {
    /// The program or schedule as a whole.
    Schedule,
    Machine,
    /// Index into `machine.smem`.
    SmemPart(u32),
    Table(TableId),
    Buffer(BufferId),
    Grid(GridId),
    /// Index into `regimes`; tasks, events and SMs below name their regime first.
    Regime(u32),
    Task(u32, TaskId),
    Event(u32, EventId),
    Sm(u32, SmId),
    /// Of a plan of waves.
    Wave(u32),
}

impl fmt::Display for Entity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Entity::Schedule => f.write_str("schedule"),
            Entity::Machine => f.write_str("machine"),
            Entity::SmemPart(part) => write!(f, "smem {part}"),
            Entity::Table(table) => write!(f, "{table}"),
            Entity::Buffer(buffer) => write!(f, "{buffer}"),
            Entity::Grid(grid) => write!(f, "{grid}"),
            Entity::Regime(regime) => write!(f, "r{regime}"),
            Entity::Task(regime, task) => write!(f, "{task} of r{regime}"),
            Entity::Event(regime, event) => write!(f, "{event} of r{regime}"),
            Entity::Sm(regime, sm) => write!(f, "{sm} of r{regime}"),
            Entity::Wave(w) => write!(f, "w{w}"),
        }
    }
}

/// Where an entity that a violation of `rule` names is written: an SM on its queue, or on its stream where the rule is
/// about its order. An entity without a line is at the first line of the program.
pub fn line_of(entity: Entity, rule: Rule, lines: &Lines) -> Span {
    let regime = |r: u32| lines.regimes.get(r as usize);
    let span = match entity {
        Entity::Schedule => None,
        Entity::Machine => Some(&lines.machine),
        Entity::SmemPart(part) => lines.smem.get(part as usize),
        Entity::Table(table) => lines.tables.get(table.index()),
        Entity::Buffer(buffer) => lines.buffers.get(buffer.index()),
        Entity::Grid(grid) => lines.grids.get(grid.index()),
        Entity::Regime(r) => regime(r).map(|regime| &regime.regime),
        Entity::Task(r, task) => regime(r).and_then(|regime| regime.tasks.get(task.index())),
        Entity::Event(r, event) => regime(r).and_then(|regime| regime.events.get(event.index())),
        Entity::Sm(r, sm) if rule == Rule::StreamOrder => regime(r).and_then(|regime| regime.streams.get(sm.index())),
        Entity::Sm(r, sm) => regime(r).and_then(|regime| regime.queues.get(sm.index())),
        Entity::Wave(w) => lines.waves.get(w as usize),
    };
    span.unwrap_or(&lines.program).clone()
}

/// Declares the rules once: variant, name in text, group.
macro_rules! rules {
    ($($(#[$doc:meta])* $variant:ident $name:literal $group:literal;)*) => {
        /// What can be broken. Names are stable: tests and `.mkir` expectations use them.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Rule {
            $($(#[$doc])* $variant,)*
        }

        impl Rule {
            pub const ALL: &'static [Rule] = &[$(Rule::$variant,)*];

            /// `partial-join`
            pub fn name(self) -> &'static str {
                match self {
                    $(Rule::$variant => $name,)*
                }
            }

            /// 1 well-formed, 2 events, 3 deadlock, 4 races, 5 memory, 6 proxies, 7 kernels, 8 plans of waves.
            pub fn group(self) -> u8 {
                match self {
                    $(Rule::$variant => $group,)*
                }
            }
        }
    };
}

rules! {
    /// An id names nothing.
    IdRange "id-range" 1;
    /// One queue and one stream per SM, one placement entry per buffer, at least one regime.
    Counts "counts" 1;
    /// A task is in no queue, or in two places.
    TaskQueued "task-queued" 1;
    /// Regimes start at 0, ascend, and start below `context_max`.
    RegimeRange "regime-range" 1;
    /// `lo < hi <= n`, `j` below its extent.
    LaunchRange "launch-range" 1;
    /// Extents and phases of a buffer.
    BufferExtent "buffer-extent" 1;
    /// Immutable buffers have content of the kind and size that is read, others have none.
    Content "content" 1;
    /// A format that no matrix can have.
    Format "format" 1;
    /// A name that generated code cannot spell out.
    Name "name" 1;
    /// A number of an op or of the program that no kernel can take.
    Attribute "attribute" 1;
    /// Operands are not those of the op's table.
    Operand "operand" 1;
    /// An operand's buffer lives in the wrong space.
    Space "space" 1;
    /// An operand's buffer has the wrong element type.
    DType "dtype" 1;
    /// An operand touches rows of the wrong kind.
    Rows "rows" 1;
    /// A table is not what its kind of entries asks for, or what needs one has none; or it names pages of several sizes.
    Table "table" 1;
    /// The proof needs a fact that a table does not declare.
    TableFact "table-fact" 1;
    /// A buffer lies where its space cannot, or is touched by an SM that cannot reach it.
    Home "home" 1;
    /// Launch extents, columns or buffer extents are not those of the op.
    Shape "shape" 1;
    /// A region leaves its buffer for some launch index, position or token.
    OutOfBounds "out-of-bounds" 1;
    /// A region starts or ends inside a packet.
    Misaligned "misaligned" 1;
    /// One exchange buffer carries values of different meaning, or a residual is made by owners and by every SM.
    MixedUse "mixed-use" 1;
    /// Two grids extend one cache and are not the same attention, lay out its rows in two ways, or leave their results in
    /// different places.
    Alternatives "alternatives" 1;
    /// A launch index has no task.
    LaunchMissing "launch-missing" 1;
    /// A launch index has two tasks.
    LaunchTwice "launch-twice" 1;
    /// A task of an op that takes one launch index has more.
    TaskWidth "task-width" 1;
    /// A queue does not start with its only `select`.
    SelectFirst "select-first" 1;
    /// An element is read, or handed out, that no task produced.
    Uncovered "uncovered" 1;
    /// An element has two producers in one step.
    DoubleProducer "double-producer" 1;
    /// A private element is touched against program order.
    PrivateOrder "private-order" 1;
    /// Two regimes append different columns of a cache.
    RegimeAppends "regime-appends" 1;
    /// A state that is not that of one grid alone, or in steps of several rows.
    State "state" 1;
    /// Two regimes write different words, so that in one of them nothing clears those of the other.
    RegimeWords "regime-words" 1;

    /// An event's columns are not columns of an exchange buffer.
    EventRegion "event-region" 2;
    /// An event's count is not the number of its producers.
    EventCount "event-count" 2;
    /// A producer does not signal.
    MissingSignal "missing-signal" 2;
    /// A task signals an event whose columns it does not write.
    StraySignal "stray-signal" 2;
    /// A task signals an event twice.
    DoubleSignal "double-signal" 2;
    /// A wait is satisfied before all producers have signalled.
    PartialJoin "partial-join" 2;
    /// A wait asks for more signals than there are.
    UnreachableWait "unreachable-wait" 2;
    /// A region is read without a wait that covers it.
    MissingWait "missing-wait" 2;
    /// A task waits by packets for columns that it does not read.
    UnreadWait "unread-wait" 2;
    /// An event is carried against program order, or not carried where program order asks for it.
    Carried "carried" 2;
    /// Events about one buffer are counters and packets.
    MixedMechanism "mixed-mechanism" 2;
    /// Words without two phases, or of values that may look like no word; events about them that are not `words`, and `words` about
    /// anything else.
    Words "words" 2;
    /// The scope of an event leaves out a task that signals it or waits for it, or is not that of words that cross devices.
    Scope "scope" 2;
    /// A run does not wait for the choice of its source, or waits for something else.
    StreamAfter "stream-after" 2;
    /// An event carried into a regime has no counterpart in the regime before.
    CarriedMatch "carried-match" 2;

    /// Tasks wait for one another in a circle.
    Deadlock "deadlock" 3;
    /// A stream does not list the streamed operands of its queue, in its order.
    StreamOrder "stream-order" 3;
    /// A run has not the bytes of its task.
    StreamBytes "stream-bytes" 3;
    /// A chunk of the history does not fit a slot or a tile.
    HistoryChunk "history-chunk" 3;
    /// A variant is missing, or its numbers are not those that follow from tasks, slots and caches.
    Variant "variant" 3;
    /// Slots or slot bytes that no kernel can take.
    RingShape "ring-shape" 3;
    /// A task needs more slots at once than there are.
    RingCapacity "ring-capacity" 3;
    /// The arrivals that free a slot are not the consumer warps.
    RingArrivals "ring-arrivals" 3;
    /// Limits of copies in flight under which the loader never starts or never stops.
    Flight "flight" 3;

    /// A value is overwritten before a reader is known to have read it.
    OverwriteUnread "overwrite-unread" 4;
    /// Two writes of one element in different steps are not ordered.
    OverwriteUnordered "overwrite-unordered" 4;
    /// A cache row may be read before its append is visible.
    HistoryUnordered "history-unordered" 4;
    /// Columns of a state are updated by different SMs in two regimes.
    StateOwner "state-owner" 4;
    /// Words of a step may be read before an SM sees that they were cleared in the step before.
    WordsUnseen "words-unseen" 4;

    /// Placed for another target.
    Target "target" 5;
    /// More blocks than SMs: they could not all be resident.
    SmCount "sm-count" 5;
    /// More threads than a block may have.
    Threads "threads" 5;
    /// More registers than an SM has.
    Registers "registers" 5;
    /// A shared-memory part is missing, named twice or misaligned.
    SmemPart "smem-part" 5;
    /// Shared-memory parts overlap or descend.
    SmemOverlap "smem-overlap" 5;
    /// A shared-memory part is smaller than what runs in it.
    SmemSize "smem-size" 5;
    /// Shared memory exceeds what a block may have.
    SmemCapacity "smem-capacity" 5;
    /// A buffer has no place in an arena, has one it must not have, or a misaligned one.
    Placement "placement" 5;
    /// Two buffers of an arena overlap.
    PlacementOverlap "placement-overlap" 5;
    /// Weights, constants and arenas exceed device memory.
    DeviceMemory "device-memory" 5;

    /// Cache rows reach bulk copies without a proxy fence.
    MissingProxy "missing-proxy" 6;
    /// A proxy fence is asked of a task that hands nothing to its loader.
    FenceThread "fence-thread" 6;

    /// Proven, and yet the kernels of a CUDA target cannot run it as it says.
    Kernel "kernel" 7;
    /// Not what the kernels of a CUDA target for one row, or for several rows, take for granted.
    KernelRows "kernel-rows" 7;
    /// More than one device: the kernels of a CUDA target synchronise within one.
    KernelScope "kernel-scope" 7;

    /// A plan of waves does not fit the target, or the form of its launches.
    Machine "machine" 8;
    /// Activations overlap, or lie where no wave can name them.
    Arena "arena" 8;
    /// For some number of blocks of rows a launch index of a row is in no share, or in two.
    Partition "partition" 8;
    /// Two blocks that share weights have other units.
    Pairs "pairs" 8;
    /// A buffer or a division that does not exist.
    Bounds "bounds" 8;
    /// A buffer that is no residual is read and written by one wave, or written twice.
    InPlace "in-place" 8;
    /// The waves are not those of the grids of the program, in order; or one reads, writes or computes something else than its grid.
    Order "order" 8;
    /// What a wave needs of rings and scratch is not there.
    Ring "ring" 8;
    /// Weights are copied in boxes that no tensor map has, or that do not make up a pass.
    Boxes "boxes" 8;
    /// A wave adds up in another order than it declares.
    Sums "sums" 8;
    /// SMs do not meet where a wave reads, or overwrites, what the wave before it accesses.
    Meeting "meeting" 8;
    /// What rows chose is overwritten before the launch ends.
    Kept "kept" 8;
    /// A tail without the plan of chunks before it.
    Tail "tail" 8;
    /// Plans of one order of sums that add up, or read, otherwise.
    Alike "alike" 8;
}

impl Rule {
    pub fn parse(name: &str) -> Option<Self> {
        Rule::ALL.iter().copied().find(|r| r.name() == name)
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Violations kept for each rule; one more entry says how many were left out.
pub const KEPT_PER_RULE: u32 = 100;

/// Proves `schedule` for `target`.
pub fn validate(schedule: Schedule, target: &Target) -> Result<Validated, Rejected> {
    let violations = check(&schedule, target);
    if violations.is_empty() {
        return Ok(Validated { schedule });
    }
    Err(Rejected { schedule: Box::new(schedule), violations })
}

/// Everything that keeps `schedule` from a proof for `target`; empty: it is proven.
pub fn check(schedule: &Schedule, target: &Target) -> Vec<Violation> {
    let mut found = Found::default();
    judge(schedule, target, &mut found);
    found.finish()
}

/// The groups in the order of the contract at the head of this file.
fn judge(schedule: &Schedule, target: &Target, found: &mut Found) {
    wellformed::structure(schedule, found);
    if found.any() {
        return;
    }
    tables::check(&schedule.program, found);
    devices::homes(schedule, found);
    if found.any() {
        return;
    }
    operands::check(schedule, found);
    states::owned(&schedule.program, found);
    names::check(schedule, found);
    memory::machine(&schedule.machine, target, found);
    order::ring(schedule, found);
    if found.any() {
        return;
    }
    let grids = wellformed::Grids::of(&schedule.program);
    wellformed::launches(schedule, found);
    if found.any() {
        return;
    }
    let owners: Vec<_> = schedule.regimes.iter().map(wellformed::Owners::of).collect();
    let program = &schedule.program;
    let numbered = || (0..).zip(&schedule.regimes);
    let writes: Vec<_> =
        numbered().map(|(r, regime)| wellformed::Writes::of(r, regime, program, &grids, found)).collect();
    wellformed::privates(schedule, &grids, found);
    devices::reach(schedule, &grids, &owners, &writes, found);
    order::streams(schedule, found);
    variants::check(schedule, target, found);
    memory::shared(schedule, target, &grids, found);
    memory::device(schedule, target, found);
    if found.any() {
        return;
    }
    regimes::check(schedule, &writes, found);
    if found.any() {
        return;
    }
    let joins = events::check(schedule, &grids, &writes, found);
    proxies::threads(schedule, found);
    devices::scopes(schedule, &owners, found);
    if found.any() {
        return;
    }
    let orders: Vec<_> = numbered()
        .zip(&owners)
        .map(|((r, regime), owners)| order::sort(r, regime, owners, &schedule.machine, found))
        .collect();
    if found.any() {
        return;
    }
    let facts = races::Facts { grids: &grids, owners: &owners, writes: &writes, joins: &joins, orders: &orders };
    races::check(schedule, target, &facts, found);
    // After the races, which begin with nothing found.
    states::stay(schedule, &owners, found);
    if found.any() {
        return;
    }
    kernels::check(schedule, target, found);
}

/// The violations found so far, bounded for each rule.
struct Found {
    counts: [u64; Rule::ALL.len()],
    list: Vec<Violation>,
}

impl Default for Found {
    fn default() -> Self {
        Found { counts: [0; Rule::ALL.len()], list: vec![] }
    }
}

impl Found {
    fn any(&self) -> bool {
        !self.list.is_empty()
    }

    /// Whether another violation of `rule` is counted but not kept.
    fn full(&self, rule: Rule) -> bool {
        self.counts[rule as usize] >= u64::from(KEPT_PER_RULE)
    }

    fn add(&mut self, rule: Rule, entity: Entity, message: impl FnOnce() -> String) {
        self.add_with(rule, entity, || (message(), vec![]));
    }

    fn add_with(&mut self, rule: Rule, entity: Entity, story: impl FnOnce() -> (String, Vec<Witness>)) {
        let count = &mut self.counts[rule as usize];
        *count += 1;
        if *count <= u64::from(KEPT_PER_RULE) {
            let (message, witness) = story();
            self.list.push(Violation { rule, entity, message, witness });
        }
    }

    fn finish(mut self) -> Vec<Violation> {
        for (&rule, &count) in Rule::ALL.iter().zip(&self.counts) {
            if count > u64::from(KEPT_PER_RULE) {
                let message = format!("{} more", count - u64::from(KEPT_PER_RULE));
                self.list.push(Violation { rule, entity: Entity::Schedule, message, witness: vec![] });
            }
        }
        self.list
    }
}

fn note(entity: Entity, note: impl Into<String>) -> Witness {
    Witness { entity, note: note.into() }
}
