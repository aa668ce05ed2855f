//! Owns the bytes a launch uploads beside the weights: queue entries and stream runs, as `kernels/runtime/queue.cuh`
//! declares them.

use super::emit::classes;
use crate::digest::Digest;
use crate::ir::TaskId;
use crate::ir::layout::{Matrix, PACKET_BYTES, PLACE_ALIGN_BYTES, matrices};
use crate::ir::op::{Op, Role};
use crate::ir::program::{Grid, Space};
use crate::ir::schedule::{Regime, Run, Schedule, Source, Task};
use crate::ir::variant::{AttentionVariant, MatVecVariant};
use crate::validate::Validated;
use bytemuck::{Pod, Zeroable};

/// `Entry` of queue.cuh; the last fields mean different things for different ops.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Entry {
    pub op: u32,
    pub task: u32,
    pub event: u32,
    pub lo: u32,
    pub hi: u32,
    pub j: u32,
    pub x: u32,
    pub out: u32,
    pub aux: u32,
    /// Scales of the rows of a matrix of codes; else the row of the step that the task takes.
    pub row_scales_or_row: u32,
    pub residual: u32,
    /// Norm weight of the input, or of q.
    pub norm_weight: u32,
    /// Norm bias of the input, or the norm weight of k.
    pub norm_bias: u32,
    /// Bias, rotary table, or embedding table.
    pub table: u32,
    pub k_cache: u32,
    pub v_cache: u32,
}

/// `StreamRun` of queue.cuh; the second to fourth field mean different things for weights and for history.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct StreamRun {
    pub bytes: u32,
    /// History: place of the keys. Weights: bytes that no chunk reaches beyond.
    pub k_cache: u32,
    /// History: place of the values. Weights: bytes of a chunk.
    pub v_cache: u32,
    /// History: KV head and share. Weights: their first byte in the pack, in units of 256 bytes.
    pub head_j: u32,
    pub splits: u32,
    pub window: u32,
    pub row_bytes: u32,
    pub rows: u32,
}

/// End-of-sequence ids a launch takes; `EOS_MAX` of context.cuh.
pub const EOS_MAX: usize = 8;

/// `Params` of context.cuh: the one kernel parameter. Pointers are device addresses.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct Params {
    pub pack: u64,
    pub cache: u64,
    pub exchange: u64,
    pub logits: u64,
    pub entries: u64,
    pub entry_index: u64,
    pub runs: u64,
    pub run_index: u64,
    pub prompt: u64,
    pub mailbox: u64,
    pub report: u64,
    pub abort: u64,
    pub stamps: u64,
    pub timeout_ns: u64,
    pub seed: u64,
    pub prompt_len: u32,
    pub position: u32,
    pub steps: u32,
    pub tag: u32,
    pub eos_count: u32,
    pub eos: [i32; EOS_MAX],
    /// 0: greedy.
    pub inverse_temperature: f32,
    /// 0: all.
    pub top_k: u32,
    /// In units of 2^-32; 0: all.
    pub top_p_q32: u32,
}

/// `Row` of rows/context.cuh: a row of a launch.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct Row {
    /// Row of the page table.
    pub sequence: u32,
    /// In the first step.
    pub position: u32,
    /// Of the first step; below 0: what row `from` decided in the step before the launch.
    pub token: i32,
    pub from: u32,
    /// The first row of the launch of the same sequence.
    pub first: u32,
    /// Steps that the row takes part in.
    pub steps: u32,
    pub seed_low: u32,
    pub seed_high: u32,
    /// 0: greedy.
    pub inverse_temperature: f32,
    pub reserved: [u32; 3],
}

/// `RowsParams` of rows/context.cuh: the one parameter of a kernel for rows.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct RowsParams {
    pub params: Params,
    /// Rows of the launch.
    pub rows: u64,
    /// The page table: a row for each sequence.
    pub pages: u64,
    /// Of each SM, entries and runs of a launch that only fills the cache; 0: the launch executes whole steps.
    pub fills: u64,
    pub row_count: u32,
    /// First step whose logits are written.
    pub logits_from: u32,
}

/// Absent operand.
pub const NONE: u32 = u32::MAX;

/// Everything the kernel walks, encoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tables {
    pub entries: Vec<Entry>,
    /// First entry of queue `regime * sms + sm`; one more at the end.
    pub entry_index: Vec<u32>,
    pub runs: Vec<StreamRun>,
    pub run_index: Vec<u32>,
    /// Of each queue, how many of its entries and runs a launch executes that only fills the cache.
    pub fills: Vec<[u32; 2]>,
    /// Bytes of the exchange, cache and output arenas.
    pub exchange_bytes: u64,
    pub cache_bytes: u64,
}

/// Encodes the queues and streams of a proven schedule.
pub fn encode(validated: &Validated) -> Tables {
    let schedule = validated.schedule();
    let program = &schedule.program;
    let (_, class_of_grid) = classes(schedule);
    let matrices = matrices(program);
    let mut tables = Tables {
        entries: vec![],
        entry_index: vec![0],
        runs: vec![],
        run_index: vec![0],
        fills: vec![],
        exchange_bytes: schedule.arena_bytes(Space::Exchange),
        cache_bytes: schedule.arena_bytes(Space::Cache),
    };
    for regime in &schedule.regimes {
        for (queue, stream) in regime.queues.iter().zip(&regime.streams) {
            let residual = |task: &Task| {
                let operand = program.grids[task.grid.index()].operand(Role::Residual)?;
                Some(operand.cols.range(task.lo, task.hi, task.j).0)
            };
            let residual_base = queue.iter().filter_map(|id| residual(&regime.tasks[id.index()])).min().unwrap_or(0);
            for &id in queue {
                let task = &regime.tasks[id.index()];
                let op = class_of_grid[task.grid.index()] as u32;
                let residual = residual(task).map_or(0, |first| first - residual_base) as u32;
                let grid = &program.grids[task.grid.index()];
                let row_scales_or_row = row_scales(schedule, &matrices, grid).unwrap_or(task.row);
                tables.entries.push(Entry { op, residual, row_scales_or_row, ..entry(schedule, id, task) });
            }
            tables.entry_index.push(tables.entries.len() as u32);
            tables.runs.extend(stream.iter().map(|run| stream_run(schedule, &matrices, regime, run)));
            tables.run_index.push(tables.runs.len() as u32);
            let fills = |task: TaskId| Some(regime.tasks[task.index()].grid) <= program.last_append();
            let entries = queue.iter().filter(|id| fills(**id)).count();
            let runs = stream.iter().filter(|run| fills(run.task)).count();
            tables.fills.push([entries as u32, runs as u32]);
        }
    }
    tables
}

/// The place of an operand in `space`, in units of `unit` bytes; [`NONE`] if the grid has none there.
fn place(schedule: &Schedule, grid: &Grid, role: Role, space: Space, unit: u64) -> u32 {
    grid.operand(role)
        .filter(|o| schedule.program.buffers[o.buffer.index()].space == space)
        .and_then(|o| schedule.placement[o.buffer.index()])
        .map_or(NONE, |at| (at / unit) as u32)
}

/// The entry of a task, without its class, its row and its place in the residual.
fn entry(schedule: &Schedule, id: TaskId, task: &Task) -> Entry {
    let grid = &schedule.program.grids[task.grid.index()];
    let packets = |role: Role| place(schedule, grid, role, Space::Exchange, PACKET_BYTES);
    let constant = |role: Role| place(schedule, grid, role, Space::Constant, PLACE_ALIGN_BYTES);
    let cache = |role: Role| place(schedule, grid, role, Space::Cache, PLACE_ALIGN_BYTES);
    let first_read = [Role::X, Role::Q, Role::Partial].into_iter().map(packets).find(|&p| p != NONE);
    // An op has at most one of the operands that share a field.
    let either = |roles: &[Role]| roles.iter().map(|&r| constant(r)).find(|&at| at != NONE).unwrap_or(NONE);
    let reads_candidates = matches!(grid.op, Op::Select);
    Entry {
        op: 0,
        task: id.0,
        event: task.waits.first().map_or(NONE, |w| w.event.0),
        lo: task.lo,
        hi: task.hi,
        j: task.j,
        x: if reads_candidates { packets(Role::Candidates) } else { first_read.unwrap_or(NONE) },
        out: packets(Role::Out),
        aux: if reads_candidates { NONE } else { packets(Role::Candidates) },
        row_scales_or_row: 0,
        residual: 0,
        norm_weight: either(&[Role::NormWeight, Role::QNormWeight]),
        norm_bias: either(&[Role::NormBias, Role::KNormWeight]),
        table: either(&[Role::Bias, Role::Rope, Role::Table]),
        k_cache: cache(Role::AppendK),
        v_cache: cache(Role::AppendV),
    }
}

/// Where the scales of the rows of a grid's matrix lie in the pack, if it has them.
pub(super) fn row_scales(schedule: &Schedule, matrices: &[Option<Matrix>], grid: &Grid) -> Option<u32> {
    let buffer = grid.operand(Role::Weight)?.buffer.index();
    let (matrix, place) = (matrices[buffer]?, schedule.placement[buffer]?);
    matrix.format.row_scales.then(|| ((place + matrix.row_scales_at()) / PLACE_ALIGN_BYTES) as u32)
}

fn stream_run(schedule: &Schedule, matrices: &[Option<Matrix>], regime: &Regime, run: &Run) -> StreamRun {
    let task = &regime.tasks[run.task.index()];
    let grid = &schedule.program.grids[task.grid.index()];
    let cache = |role: Role| place(schedule, grid, role, Space::Cache, PLACE_ALIGN_BYTES);
    match (run.source, &grid.op) {
        (Source::History { rows }, Op::Attention(a)) => {
            let variant = schedule.attention_variant(task.grid);
            let AttentionVariant { pitch, .. } = variant.expect("validate: every attention has a variant");
            StreamRun {
                bytes: 0,
                k_cache: cache(Role::HistoryK),
                v_cache: cache(Role::HistoryV),
                head_j: (task.lo * a.heads_per_task / a.group) << 16 | task.j,
                // A kernel for rows has one share of each row's history, and the row here.
                splits: if schedule.program.rows > 1 { task.row } else { a.splits },
                window: a.window.unwrap_or(0),
                row_bytes: pitch * schedule.program.precision.cache.bytes() as u32,
                rows,
            }
        }
        (Source::Units { buffer, lo, hi }, Op::MatVec(_)) => {
            let variant = schedule.matvec_variant(task.grid);
            let MatVecVariant { chunk, block, granule, pass, .. } =
                variant.expect("validate: every matvec has a variant");
            let matrix = matrices[buffer.index()].expect("validate: a matvec streams its matrix");
            let bytes = u64::from(hi - lo) * matrix.unit_bytes;
            let place = schedule.placement[buffer.index()].expect("validate: every matrix has a place");
            StreamRun {
                bytes: bytes as u32,
                k_cache: bytes.min(u64::from(*block) * u64::from(*granule)) as u32,
                v_cache: chunk * granule,
                head_j: ((place + u64::from(lo) * matrix.unit_bytes) / PLACE_ALIGN_BYTES) as u32,
                splits: *pass,
                ..StreamRun::zeroed()
            }
        }
        _ => unreachable!("validate: matvecs stream weights, attention streams history"),
    }
}

/// The queues of a proven schedule, and the digest of every byte of them that is uploaded. There is no other way to make
/// one, so what reaches a device was proven.
#[derive(Debug, Clone, PartialEq)]
pub struct Queues<'a> {
    validated: &'a Validated,
    tables: Tables,
    digest: Digest,
}

impl<'a> Queues<'a> {
    pub fn of(validated: &'a Validated) -> Queues<'a> {
        let tables = encode(validated);
        let Tables { entries, entry_index, runs, run_index, fills, exchange_bytes, cache_bytes } = &tables;
        let parts: [&[u8]; 5] = [
            bytemuck::cast_slice(entries),
            bytemuck::cast_slice(entry_index),
            bytemuck::cast_slice(runs),
            bytemuck::cast_slice(run_index),
            bytemuck::cast_slice(fills),
        ];
        let digests = parts.map(Digest::of);
        let digest = Digest::of(format!("{digests:?} {exchange_bytes} {cache_bytes}").as_bytes());
        Queues { validated, tables, digest }
    }

    /// The proof.
    pub fn validated(&self) -> &'a Validated {
        self.validated
    }

    pub fn tables(&self) -> &Tables {
        &self.tables
    }

    pub fn digest(&self) -> Digest {
        self.digest
    }
}
