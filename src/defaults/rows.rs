//! Owns the kernel for several rows that is built without a search: its candidate, and the pages of its caches.

use crate::candidate::{Candidate, Infeasible};
use crate::dtype::Precision;
use crate::ir::layout::{WARP_ROWS, cache_row_bytes, chunk_rows};
use crate::ir::op::HISTORY_ALIGN;
use crate::ir::schedule::Schedule;
use crate::ir::variant::rows_on_tensor_cores;
use crate::lower::{Batch, heads_per_task_most, lower_batch};
use crate::model::graph::{Layer, ModelGraph};
use crate::schedule::schedule;
use crate::target::{DotMechanism, Target, TargetKind};

/// Rows of the kernels of a target, ascending: a step runs on the smallest that has room for it. More than 16 want tensor cores, whose
/// warps share the rows; some may not fit a target's shared memory.
pub fn kernel_rows(precision: Precision, target: &Target) -> &'static [u32] {
    match rows_on_tensor_cores(precision, target.spec.dot == DotMechanism::Mma) {
        true => &[8, 16, 32, 64],
        false => &[8, 16],
    }
}

/// Bytes of a slot, the first that fits: a block of k of a unit, or a part of one on GPUs with little shared memory.
const SLOT_BYTES: [u32; 3] = [16 << 10, 8 << 10, 4 << 10];
/// Slots that a ring of the largest begins with, and how many copies are in flight while few and while many of them are full; of
/// smaller slots as many bytes. Few: the input of rows comes through the same L2 as their weights (docs/perf-log.md, entry 17).
const RING_SLOTS: u32 = 12;
const FLIGHT_HIGH: u32 = 3;
const FLIGHT_LOW: u32 = 2;
const FLIGHT_FREE: u32 = 4;
/// Slots of a ring at least, before a kernel is said not to fit; more rows take 8 chunks at once, and others are on their way.
const RING_SLOTS_MIN: u32 = 4;
const STAGED_SLOTS_MIN: u32 = 16;

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
    let smaller = SLOT_BYTES[0] / slot_bytes.max(1);
    Candidate {
        splits: 1,
        sums_everywhere: 0,
        heads_per_task: heads_per_task_most(group),
        slot_bytes,
        flight_high: FLIGHT_HIGH * smaller,
        flight_low: FLIGHT_LOW * smaller,
        flight_free: FLIGHT_FREE * smaller,
        ..base.clone()
    }
}

/// Positions of a page: the least that is whole chunks of the history in every layer, with slots of any size, so that kernels for
/// different numbers of rows share pages. Mostly one chunk of the largest. `None`: no slot holds a tile.
fn page_rows(graph: &ModelGraph, precision: Precision) -> Option<u32> {
    let row_bytes = |layer: &Layer| cache_row_bytes(layer.attn.head_dim, precision.cache);
    let chunks = graph.layers.iter().flat_map(|layer| SLOT_BYTES.map(|slot| chunk_rows(slot, row_bytes(layer))));
    let whole = |a: u32, b: u32| (1..=b).map(|n| a.saturating_mul(n)).find(|n| n % b == 0);
    let mut some = chunks.filter(|rows| *rows > 0).peekable();
    some.peek()?;
    some.try_fold(1u32, whole)
}

/// Bytes of slots to try for a kernel of `rows`. Chunks of more than a tile of rows are 4 KiB, but tiles of a wide head want more.
fn slot_bytes(rows: u32) -> &'static [u32] {
    const STAGED: [u32; 2] = [SLOT_BYTES[2], SLOT_BYTES[1]];
    if rows > WARP_ROWS { &STAGED } else { &SLOT_BYTES }
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
    let Some(page_rows) = page_rows(graph, precision) else { return Err(refused) };
    let slots_min = if room.rows > WARP_ROWS { STAGED_SLOTS_MIN } else { RING_SLOTS_MIN };
    for &slot_bytes in slot_bytes(room.rows).iter().filter(|slot| chunk_rows(**slot, row_bytes) > 0) {
        let pages = room.positions.div_ceil(u64::from(page_rows)).min(u64::from(u32::MAX)) as u32;
        let batch = Batch {
            rows: room.rows,
            sequences: room.sequences,
            pages: pages.max(room.sequences),
            page_rows,
            words: target.kind == TargetKind::Cuda,
        };
        let mut candidate = candidate(base, graph, slot_bytes);
        let slots = RING_SLOTS * (SLOT_BYTES[0] / slot_bytes);
        // Of many rows, slots that up to four loaders take in turn.
        let step = if room.rows > WARP_ROWS { 4 } else { 1 };
        for ring_slots in (slots_min..=slots).rev().filter(|slots| slots.is_multiple_of(step)) {
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
