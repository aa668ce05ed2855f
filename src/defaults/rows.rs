//! Owns the kernel for several rows that is built without a search: its candidate, and the pages of its caches.

use crate::candidate::{Candidate, Infeasible};
use crate::dtype::Precision;
use crate::ir::layout::{cache_row_bytes, chunk_rows};
use crate::ir::op::HISTORY_ALIGN;
use crate::ir::schedule::Schedule;
use crate::lower::{Batch, heads_per_task_most, lower_batch};
use crate::model::graph::ModelGraph;
use crate::schedule::schedule;
use crate::target::{Target, TargetKind};

/// Rows of the kernels that there are: a batch runs on the smallest that has room for it.
pub const KERNEL_ROWS: [u32; 2] = [8, 16];

/// Bytes of a slot, the first that fits: a block of k of a unit, or a part of one on GPUs with little shared memory.
const SLOT_BYTES: [u32; 3] = [16 << 10, 8 << 10, 4 << 10];
/// Slots that a ring begins with, and how many copies are in flight while few and while many of them are full. Few: the input of
/// rows comes through the same L2 as their weights (docs/perf-log.md, entry 17).
const RING_SLOTS: u32 = 12;
const FLIGHT_HIGH: u32 = 3;
const FLIGHT_LOW: u32 = 2;
const FLIGHT_FREE: u32 = 4;
/// Slots of a ring at least, before a kernel is said not to fit.
const RING_SLOTS_MIN: u32 = 4;

/// How many sequences and positions a kernel for rows has memory for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    pub rows: u32,
    pub sequences: u32,
    /// Positions of all sequences together.
    pub positions: u64,
}

/// The candidate of a kernel for rows, from that of one row: the same units, without what only one row can have. A chunk is a
/// block of k, so slots are no larger; a task takes all query heads of a KV head, for there are tasks enough.
fn candidate(base: &Candidate, graph: &ModelGraph, slot_bytes: u32) -> Candidate {
    let group = graph.layers.iter().map(|layer| layer.attn.heads / layer.attn.kv_heads.max(1)).min().unwrap_or(1);
    Candidate {
        splits: 1,
        sums_everywhere: 0,
        heads_per_task: heads_per_task_most(group),
        slot_bytes,
        ring_slots: RING_SLOTS,
        flight_high: FLIGHT_HIGH,
        flight_low: FLIGHT_LOW,
        flight_free: FLIGHT_FREE,
        ..base.clone()
    }
}

/// Positions of a page: the least that is whole chunks of the history in every layer, mostly one. `None`: a slot holds no tile.
fn page_rows(graph: &ModelGraph, precision: Precision, slot_bytes: u32) -> Option<u32> {
    let mut chunks =
        graph.layers.iter().map(|layer| chunk_rows(slot_bytes, cache_row_bytes(layer.attn.head_dim, precision.cache)));
    let whole = |a: u32, b: u32| (1..=b).map(|n| a.saturating_mul(n)).find(|n| b > 0 && n % b == 0);
    chunks.try_fold(1u32, whole).filter(|rows| *rows > 0)
}

/// Lowers and places the kernel for `room`, with as many slots as fit beside what rows need. `base` is the candidate of one row.
///
/// # Errors
/// What does not fit the target.
pub fn place_rows(
    graph: &ModelGraph,
    name: &str,
    precision: Precision,
    context_max: u32,
    target: &Target,
    base: &Candidate,
    room: Room,
) -> Result<Schedule, Infeasible> {
    let row_bytes = |dim| cache_row_bytes(dim, precision.cache);
    let row_bytes = graph.layers.iter().map(|layer| row_bytes(layer.attn.head_dim)).max().unwrap_or(0);
    let mut refused = Infeasible::HistoryChunk { slot_bytes: SLOT_BYTES[0], rows: HISTORY_ALIGN, row_bytes };
    for slot_bytes in SLOT_BYTES {
        let Some(page_rows) = page_rows(graph, precision, slot_bytes) else { break };
        let pages = room.positions.div_ceil(u64::from(page_rows)).min(u64::from(u32::MAX)) as u32;
        let batch = Batch {
            rows: room.rows,
            sequences: room.sequences,
            pages: pages.max(room.sequences),
            page_rows,
            words: target.kind == TargetKind::Cuda,
        };
        let mut candidate = candidate(base, graph, slot_bytes);
        for ring_slots in (RING_SLOTS_MIN..=RING_SLOTS).rev() {
            candidate.ring_slots = ring_slots;
            let program = lower_batch(graph, name, precision, context_max, &batch, &candidate)?;
            match schedule(program, target, &candidate) {
                Err(reason @ Infeasible::SharedMemory { .. }) => refused = reason,
                placed => return placed,
            }
        }
    }
    Err(refused)
}
