//! Owns `Schedule`: a program placed on a machine as data: queues, events, chunk runs, memory map.

use super::layout::{GRANULE_BYTES, chunk_granules};
use super::program::Program;
use super::{BufferId, EventId, GridId, SmId, TaskId};
use std::collections::HashMap;

#[derive(Debug, Clone, PartialEq)]
pub struct Schedule {
    pub program: Program,
    pub machine: Machine,
    /// Offset of each exchange, cache and output buffer in its arena, bytes, by buffer id; `None` for the other spaces.
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
    /// Blocks per cluster; 1: no clusters.
    pub cluster: u32,
    /// Warps that execute tasks.
    pub consumer_warps: u32,
    /// Warps that fill the ring.
    pub loader_warps: u32,
    pub registers_per_thread: u32,
    /// Units of a matvec whose partial sums meet in one reduction across warps.
    pub sum_units: u32,
    pub ring: Ring,
    /// Shared-memory map in address order.
    pub smem: Vec<SmemPart>,
}

/// The ring of shared-memory slots between loader and consumers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ring {
    pub slots: u32,
    pub slot_bytes: u32,
    /// Warp groups that take chunks in turn.
    pub groups: u32,
    /// Arrivals that free a slot: the warps of one group.
    pub arrivals: u32,
    /// Copies not yet landed, at most, while at least `flight_free` slots are free ...
    pub flight_high: u32,
    /// ... and otherwise: a poll queues behind every byte already asked for.
    pub flight_low: u32,
    pub flight_free: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SmemPart {
    pub name: String,
    pub offset: u32,
    pub bytes: u32,
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
    pub lo: u32,
    pub hi: u32,
    /// Tasks that signal it in one step.
    pub count: u32,
    pub mechanism: Mechanism,
    /// Waited for in the step after it was signalled.
    pub carried: bool,
    /// The waiter also fences the asynchronous proxy.
    pub proxy: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mechanism {
    Packets,
    Fenced,
    Counter,
}

impl Mechanism {
    pub const ALL: [Mechanism; 3] = [Mechanism::Packets, Mechanism::Fenced, Mechanism::Counter];

    pub fn name(self) -> &'static str {
        match self {
            Mechanism::Packets => "packets",
            Mechanism::Fenced => "fenced",
            Mechanism::Counter => "counter",
        }
    }

    pub fn parse(name: &str) -> Option<Self> {
        Mechanism::ALL.into_iter().find(|m| m.name() == name)
    }

    /// Whether it orders plain memory, not only what depends on the payload.
    pub fn orders_memory(self) -> bool {
        !matches!(self, Mechanism::Packets)
    }
}

impl Ring {
    /// How the weights of a task come in when a unit is `unit` granules: chunks of whole units where a slot holds one, else
    /// units of whole chunks, each as many granules for every warp. A slot that is not filled is memory not used; a chunk
    /// that ends inside a unit would be instructions between two hops.
    pub fn chunking(&self, unit: u32) -> Chunking {
        let unit = unit.max(1);
        let chunk = chunk_granules(unit, self.slot_bytes, self.arrivals);
        let whole = unit <= (self.slot_bytes / GRANULE_BYTES).max(1);
        Chunking { chunk, block: if whole { None } else { Some(unit) } }
    }
}

/// Granules of the chunks of a task's weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunking {
    /// Granules of a chunk; the last one of a block may be shorter.
    pub chunk: u32,
    /// Granules that no chunk reaches beyond: a unit. `None`: the weights of the task.
    pub block: Option<u32>,
}

impl Chunking {
    /// Bytes of the chunk that begins `done` bytes into a task's weights of `total` bytes.
    pub fn bytes_at(&self, done: u64, total: u64) -> u64 {
        let granule = u64::from(GRANULE_BYTES);
        let end = match self.block {
            Some(block) => (done / (u64::from(block) * granule) + 1) * u64::from(block) * granule,
            None => total,
        };
        (u64::from(self.chunk) * granule).min(end.min(total).saturating_sub(done))
    }
}

/// Chunks of one task in a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    pub task: TaskId,
    pub bytes: RunBytes,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunBytes {
    /// Weights: this many bytes from `offset` of the SM's pack, in chunks as [`Ring::chunking`] says.
    Fixed { offset: u64, bytes: u64 },
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

    /// Units of the longest task, for each grid: of all grids that do the same, so that layers with other shares are no op of
    /// their own.
    pub fn longest_tasks(&self) -> Vec<u32> {
        let grids = &self.program.grids;
        let mut own = vec![1; grids.len()];
        for task in self.regimes.iter().flat_map(|r| &r.tasks) {
            if let Some(most) = own.get_mut(task.grid.index()) {
                *most = task.hi.saturating_sub(task.lo).max(*most);
            }
        }
        // By the text of the op: a comparison of each with each would be most of the proof of a deep model.
        let ops: Vec<String> = grids.iter().map(|grid| format!("{:?}", grid.op)).collect();
        let mut longest: HashMap<&str, u32> = HashMap::new();
        for (op, own) in ops.iter().zip(own) {
            let most = longest.entry(op).or_insert(1);
            *most = own.max(*most);
        }
        ops.iter().map(|op| longest.get(op.as_str()).copied().unwrap_or(1)).collect()
    }

    pub fn task_count(&self) -> usize {
        self.regimes.iter().map(|r| r.tasks.len()).sum()
    }
}
