//! Owns `Schedule`: a program placed on a machine as data: queues, events, chunk runs, memory map.

use super::layout::{QUEUE_ENTRY_BYTES, place_align, placed_bytes};
use super::op::OpKey;
use super::program::{Grid, Program, Space};
use super::variant::{AttentionVariant, MatVecVariant, Variant};
use super::{BufferId, EventId, GridId, SmId, TaskId};
use std::collections::{BTreeMap, HashMap};

#[derive(Debug, Clone, PartialEq)]
pub struct Schedule {
    pub program: Program,
    pub machine: Machine,
    /// How the tasks of each matvec and each attention are done.
    pub variants: BTreeMap<GridId, Variant>,
    /// Offset of each buffer in its arena, bytes, by buffer id; `None` for private buffers. Weights and constants share the arena
    /// of the pack.
    pub placement: Vec<Option<u64>>,
    /// Ascending `from_position`; the first starts at 0. A regime serves positions up to the next one's start.
    pub regimes: Vec<Regime>,
}

/// What one launch occupies on the target.
#[derive(Debug, Clone, PartialEq)]
pub struct Machine {
    /// Name of the target record this was placed for.
    pub target: String,
    /// Participating SMs: one block each.
    pub sms: u32,
    /// Devices that the SMs are divided among. Each has the same number of consecutive SMs.
    pub devices: u32,
    /// Warps that execute tasks.
    pub consumer_warps: u32,
    /// Warps that fill the ring.
    pub loader_warps: u32,
    /// Registers of a consumer thread; also those of a loader thread, unless registers move.
    pub registers_per_thread: u32,
    /// What a loader thread keeps after it gave registers to the consumers (`setmaxnreg`); 0: none move.
    pub loader_registers: u32,
    /// Units of a matvec whose partial sums meet in one reduction across warps.
    pub reduce_batch: u32,
    /// Of a batch kernel: columns of the residual that a block keeps of each row, from its lowest to its highest. 0: rows are not kept apart.
    pub residual_cols: u32,
    pub ring: Ring,
    /// Shared-memory map in address order.
    pub smem: Vec<SmemPart>,
}

/// The ring of shared-memory slots between loader and consumers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ring {
    pub slots: u32,
    pub slot_bytes: u32,
    /// Arrivals that free a slot: the consumer warps.
    pub arrivals: u32,
    /// Most copies in flight while at least `flight_free` slots are free ...
    pub flight_high: u32,
    /// ... and otherwise. Fewer are better then, because a poll waits for every byte already requested.
    pub flight_low: u32,
    pub flight_free: u32,
    /// Loader threads that copy chunks in turn, each into slots of its own: the thread `i` has those whose number is `i` modulo this.
    pub copiers: u32,
}

/// What a part of shared memory is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SmemKind {
    /// The slots that the loader fills.
    Ring,
    /// The input of the running task.
    Stage,
    /// Partial sums of all warps.
    Reduce,
    /// Queries, key and value of an attention task.
    Heads,
    /// The columns of the residual that the block owns.
    Residual,
    /// The queue of the block.
    Queue,
    /// Barriers, what warps carry from task to task, token and watchdog.
    State,
}

impl SmemKind {
    pub const ALL: [SmemKind; 7] = [
        SmemKind::Ring,
        SmemKind::Stage,
        SmemKind::Reduce,
        SmemKind::Heads,
        SmemKind::Residual,
        SmemKind::Queue,
        SmemKind::State,
    ];

    pub fn name(self) -> &'static str {
        match self {
            SmemKind::Ring => "ring",
            SmemKind::Stage => "stage",
            SmemKind::Reduce => "reduce",
            SmemKind::Heads => "heads",
            SmemKind::Residual => "residual",
            SmemKind::Queue => "queue",
            SmemKind::State => "state",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SmemPart {
    pub kind: SmemKind,
    pub offset: u32,
    pub bytes: u32,
}

/// Tasks of the longest queue.
pub fn queue_max(regimes: &[Regime]) -> usize {
    regimes.iter().flat_map(|regime| &regime.queues).map(Vec::len).max().unwrap_or(0)
}

/// The queues of one range of positions.
#[derive(Debug, Clone, PartialEq)]
pub struct Regime {
    pub from_position: u32,
    pub tasks: Vec<Task>,
    pub events: Vec<Event>,
    /// One queue per participating SM.
    pub queues: Vec<Vec<TaskId>>,
    /// One stream per participating SM, in loading order.
    pub streams: Vec<Vec<Run>>,
}

/// Launch indices `lo..hi` (and `j`) of a grid, executed by one SM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Task {
    pub grid: GridId,
    pub lo: u32,
    pub hi: u32,
    pub j: u32,
    /// The row of the step, where the grid has that axis; else 0.
    pub row: u32,
    pub waits: Vec<Wait>,
    pub signals: Vec<EventId>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wait {
    pub event: EventId,
    /// Signals needed in the step.
    pub count: u32,
}

/// Columns `lo..hi` of a buffer, published once a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    pub buffer: BufferId,
    /// The row of the step that it is about; `None`: all rows.
    pub row: Option<u32>,
    pub lo: u32,
    pub hi: u32,
    /// Tasks that signal it in one step.
    pub count: u32,
    pub mechanism: Mechanism,
    pub scope: Scope,
    /// Waited for in the step after it was signalled.
    pub carried: bool,
    /// The waiter is the first task of its queue, and its loader fences the asynchronous proxy before it copies.
    pub proxy: bool,
}

/// How far the accesses of an event reach: it includes the SMs of all tasks that signal it or wait for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// The SM itself.
    Block,
    /// The SMs of a cluster; machines have none yet, so this is the SM itself.
    Cluster,
    /// The SMs of a device.
    Device,
    /// All devices.
    System,
}

impl Scope {
    pub const ALL: [Scope; 4] = [Scope::Block, Scope::Cluster, Scope::Device, Scope::System];

    pub fn name(self) -> &'static str {
        match self {
            Scope::Block => "block",
            Scope::Cluster => "cluster",
            Scope::Device => "device",
            Scope::System => "system",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mechanism {
    Packets,
    Fenced,
    Counter,
    /// A word shows by itself whether its value is there. For buffers of words, and for these only.
    Words,
}

impl Mechanism {
    pub const ALL: [Mechanism; 4] = [Mechanism::Packets, Mechanism::Fenced, Mechanism::Counter, Mechanism::Words];

    pub fn name(self) -> &'static str {
        match self {
            Mechanism::Packets => "packets",
            Mechanism::Fenced => "fenced",
            Mechanism::Counter => "counter",
            Mechanism::Words => "words",
        }
    }

    pub fn parse(name: &str) -> Option<Self> {
        Mechanism::ALL.into_iter().find(|m| m.name() == name)
    }

    /// Whether it orders plain memory, not only what depends on the payload.
    pub fn orders_memory(self) -> bool {
        !matches!(self, Mechanism::Packets | Mechanism::Words)
    }
}

impl Machine {
    /// The device of an SM.
    pub fn device_of(&self, sm: usize) -> u32 {
        (sm as u64 * u64::from(self.devices) / u64::from(self.sms.max(1))) as u32
    }
}

/// Chunks of one task in a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    pub task: TaskId,
    pub source: Source,
    /// The loader waits for this event of the step before it begins the run: its source is made in the step.
    pub after: Option<EventId>,
}

/// What the loader copies for a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// Units `lo..hi` of a matrix, whole along k, in chunks as the grid's variant says. They lie side by side from the matrix's place
    /// in the pack on.
    Units { buffer: BufferId, lo: u32, hi: u32 },
    /// Key and value chunks of the task's share of the history, in turn; `rows` cache rows a chunk.
    History { rows: u32 },
}

impl Regime {
    /// The SM whose queue holds each task; `None` for a task in no queue.
    pub fn owners(&self) -> Vec<Option<SmId>> {
        let mut owners = vec![None; self.tasks.len()];
        for (sm, queue) in self.queues.iter().enumerate() {
            for &task in queue {
                if let Some(owner) = owners.get_mut(task.index()) {
                    *owner = Some(SmId::from(sm));
                }
            }
        }
        owners
    }
}

impl Schedule {
    /// The regime that serves `position`.
    pub fn regime_at(&self, position: u32) -> &Regime {
        let after = self.regimes.partition_point(|r| r.from_position <= position);
        &self.regimes[after.saturating_sub(1)]
    }

    /// Most units that a task of a dealt grid takes, of all parts, if its device has `units` of each part.
    pub fn units_dealt_max(&self, grid: &Grid, units: u32) -> Option<u32> {
        let (_, each) = grid.share_on_device(0, self.machine.devices)?;
        Some(units.saturating_mul(self.program.parts_chosen_max(grid)).div_ceil(each))
    }

    /// Most units of one part that a task takes.
    pub fn units_at_once(&self, grid: &Grid, task: &Task) -> u32 {
        let named = task.hi.saturating_sub(task.lo);
        self.units_dealt_max(grid, named).map_or(named, |dealt| dealt.min(named))
    }

    /// Units of the longest task for each grid, without a break between parts, over all grids with the same op: layers share one kernel, however they are divided.
    pub fn longest_tasks(&self) -> Vec<u32> {
        let grids = &self.program.grids;
        let mut own = vec![1; grids.len()];
        for task in self.regimes.iter().flat_map(|r| &r.tasks) {
            if let (Some(most), Some(grid)) = (own.get_mut(task.grid.index()), grids.get(task.grid.index())) {
                *most = self.units_at_once(grid, task).max(*most);
            }
        }
        // By a key: comparing each op with each would take most of the time of a deep model's proof.
        let ops: Vec<OpKey> = grids.iter().map(|grid| grid.op.key()).collect();
        let mut longest: HashMap<&OpKey, u32> = HashMap::new();
        for (op, own) in ops.iter().zip(own) {
            let most = longest.entry(op).or_insert(1);
            *most = own.max(*most);
        }
        ops.iter().map(|op| longest.get(op).copied().unwrap_or(1)).collect()
    }

    pub fn task_count(&self) -> usize {
        self.regimes.iter().map(|r| r.tasks.len()).sum()
    }

    /// How the tasks of a matvec are done.
    pub fn matvec_variant(&self, grid: GridId) -> Option<&MatVecVariant> {
        match self.variants.get(&grid) {
            Some(Variant::MatVec(variant)) => Some(variant),
            _ => None,
        }
    }

    /// How the tasks of an attention are done.
    pub fn attention_variant(&self, grid: GridId) -> Option<&AttentionVariant> {
        match self.variants.get(&grid) {
            Some(Variant::Attention(variant)) => Some(variant),
            _ => None,
        }
    }

    /// The part of shared memory for `kind`.
    pub fn smem(&self, kind: SmemKind) -> Option<&SmemPart> {
        self.machine.smem.iter().find(|part| part.kind == kind)
    }

    /// Tasks of the longest queue.
    pub fn queue_max(&self) -> usize {
        queue_max(&self.regimes)
    }

    /// Entries of its queue that a block has in shared memory at a time; `None`: all.
    pub fn queue_window(&self) -> Option<u32> {
        let entries = self.smem(SmemKind::Queue)?.bytes / QUEUE_ENTRY_BYTES;
        ((entries as usize) < self.queue_max()).then_some(entries)
    }

    /// Bytes of the arena that holds the buffers of `space`.
    pub fn arena_bytes(&self, space: Space) -> u64 {
        let placed = self.program.buffers.iter().zip(&self.placement).filter(|(b, _)| b.space.arena() == space);
        placed.filter_map(|(b, at)| at.map(|at| at.saturating_add(place_align(placed_bytes(b))))).max().unwrap_or(0)
    }
}
