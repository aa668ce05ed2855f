//! Group 5: what the launch occupies: SMs, threads, registers, shared memory, arenas.

use super::variants::granules;
use super::wellformed::Grids;
use super::{Entity, Found, Rule, note};
use crate::dtype::DType;
use crate::format::Format;
use crate::ir::op::{Epilogue, Op, Role, UNIT_ROWS};
use crate::ir::program::{Buffer, Home, Rows, Space};
use crate::ir::schedule::{Machine, Schedule, SmemKind};
use crate::ir::{BufferId, GridId, SmId};
use crate::target::{DotMechanism, Target, TargetKind};

/// A compiler cannot work with fewer registers than this.
const REGISTERS_MIN: u32 = 24;
/// Alignment in shared memory that vector loads, tensor-core operands and bulk copies need, bytes.
const ALIGN: u64 = 16;
/// Unit in which the kernel gets places in arenas, bytes.
const PLACE_ALIGN: u64 = 256;
/// The staged input is padded with zeros to whole granules of the narrowest weights.
const STAGE_VALUES: u64 = 32;

/// The machine by itself.
pub(super) fn machine(machine: &Machine, target: &Target, found: &mut Found) {
    let (spec, at) = (&target.spec, Entity::Machine);
    if machine.target != target.name {
        found.add(Rule::Target, at, || format!("expected `{}`, found `{}`", target.name, machine.target));
    }
    let each = machine.sms / machine.devices.max(1);
    if each > spec.sm_count {
        found.add(Rule::SmCount, at, || {
            format!("expected at most {} SMs, all blocks resident at once; found {each}", spec.sm_count)
        });
    }
    // The CPU stands for SMs with one thread each; it has neither warps nor registers to run out of.
    if target.kind == TargetKind::Cuda {
        let consumers = u64::from(machine.consumer_warps) * 32;
        let threads = consumers + u64::from(machine.loader_warps) * 32;
        if machine.loader_warps == 0 || threads > u64::from(spec.threads_per_block_max) {
            found.add(Rule::Threads, at, || {
                format!(
                    "expected a loader warp or more and at most {} threads, found {threads}",
                    spec.threads_per_block_max
                )
            });
        }
        let (each, kept) = (machine.registers_per_thread, machine.loader_registers);
        if kept > 0 {
            // Registers move by whole warpgroups, in steps of 8 for each thread; there are no more than the launch gave.
            let loaders = threads - consumers;
            let given = u64::from(spec.registers_per_sm) / threads.max(1) / 8 * 8 * threads;
            let total = consumers * u64::from(each) + loaders * u64::from(kept);
            let whole = consumers.is_multiple_of(128) && loaders.is_multiple_of(128);
            let steps = each.is_multiple_of(8) && kept.is_multiple_of(8);
            let sizes = (REGISTERS_MIN..=248).contains(&each) && kept >= REGISTERS_MIN && kept <= each;
            if !(spec.register_reallocation && whole && steps && sizes && total <= given) {
                found.add(Rule::Registers, at, || {
                    format!(
                        "expected warpgroups that share {given} registers in steps of 8 on a target with `setmaxnreg`; \
                         found {each} a consumer thread and {kept} a loader thread, {total} in all"
                    )
                });
            }
        }
        let total = threads * u64::from(each);
        if kept == 0 && (!(REGISTERS_MIN..=255).contains(&each) || total > u64::from(spec.registers_per_sm)) {
            found.add(Rule::Registers, at, || {
                format!(
                    "expected {REGISTERS_MIN} to 255 registers a thread and at most {} in all; \
                     found {each} and {total}",
                    spec.registers_per_sm
                )
            });
        }
    }
    let mut end = 0u64;
    for (i, part) in (0..).zip(&machine.smem) {
        let (offset, bytes) = (u64::from(part.offset), u64::from(part.bytes));
        if offset < end {
            found.add(Rule::SmemOverlap, Entity::SmemPart(i), || {
                format!("expected `{}` at {end} or later, found {offset}", part.kind.name())
            });
        }
        if offset % ALIGN != 0 {
            found.add(Rule::SmemPart, Entity::SmemPart(i), || {
                format!("expected `{}` on a multiple of {ALIGN} bytes, found {offset}", part.kind.name())
            });
        }
        end = end.max(offset + bytes);
    }
    if end > u64::from(spec.smem_bytes_per_block_max) {
        found.add(Rule::SmemCapacity, at, || {
            format!("expected at most {} bytes of shared memory, found {end}", spec.smem_bytes_per_block_max)
        });
    }
}

/// Shared-memory parts hold what runs in them.
pub(super) fn shared(schedule: &Schedule, target: &Target, grids: &Grids, found: &mut Found) {
    let machine = &schedule.machine;
    let warps = u64::from(machine.consumer_warps);
    let weights = schedule.program.precision.weights;
    let cache_bytes = schedule.program.precision.cache.bytes() as u64;
    // Tensor cores read the staged input as bf16; everything else reads fp32.
    let element = if weights == DType::Bf16 && target.spec.dot == DotMechanism::Mma { 2 } else { 4 };
    // A batch kernel keeps its input in registers or by blocks of k, and has a tile of keys and values of the step's own rows.
    let for_rows = schedule.program.buffers.iter().any(|buffer| buffer.words);
    let padded = u64::from(schedule.program.rows).next_multiple_of(8);
    let (mut stage, mut heads, mut scratch) = (0, 0, 0);
    // Two batches of partial sums.
    let mut reduce =
        (2 * u64::from(machine.reduce_batch)).saturating_mul(warps).saturating_mul(u64::from(UNIT_ROWS) * 4);
    for (g, grid) in (0..).zip(&schedule.program.grids) {
        match &grid.op {
            Op::MatVec(m) if for_rows => {
                let chunk = schedule.matvec_variant(GridId(g)).map_or(0, |variant| u64::from(variant.chunk));
                let parts = u64::from(UNIT_ROWS / m.unit_rows.clamp(1, UNIT_ROWS));
                // Tensor cores take bf16 words as they lie.
                let lanes = element == 4 || schedule.program.precision.wire != DType::Bf16;
                let k = if lanes { chunk * parts * 64 / weights.bytes() as u64 } else { 0 };
                stage = stage.max(padded * k * 4);
            }
            Op::NormAdd { .. } if for_rows => {}
            Op::MatVec(m) => {
                let values = u64::from(m.inputs()).next_multiple_of(granules(schedule, grid).0);
                stage = stage.max(values.next_multiple_of(STAGE_VALUES) * element);
            }
            Op::NormAdd { width, everywhere: false, .. } => {
                stage = stage.max(u64::from(*width).next_multiple_of(STAGE_VALUES) * element);
            }
            Op::Attention(a) => {
                let (per_task, dim) = (u64::from(a.heads_per_task), u64::from(a.head_dim));
                // Maximum, sum and accumulators of each head, of all warps that share it and for the current position.
                let shared = schedule.attention_variant(GridId(g)).filter(|variant| variant.swizzled);
                let records = warps / shared.map_or(1, |variant| u64::from(variant.warps_per_head)).max(1) + 1;
                scratch = scratch.max(records * per_task * (dim + 2) * 4);
                // Queries, key and value in fp32, queries in bf16 and whole granules.
                heads = heads.max(match for_rows {
                    false => (per_task + 2) * dim * 4 + per_task * dim.next_multiple_of(32) * 2,
                    // Queries, and keys and values of whole tiles of 16 rows as the cache has them; or all rows in fp32.
                    true if shared.is_some() => {
                        per_task * dim * 2 + 2 * padded.next_multiple_of(16) * dim * cache_bytes
                    }
                    true => (per_task + 2 * padded) * dim * 4,
                });
            }
            Op::AttentionMerge { head_dim, .. } => {
                // One record of each warp.
                scratch = scratch.max(warps.saturating_mul((u64::from(*head_dim) + 2) * 4));
            }
            // Scores and what they are chosen by, and as many ids and values as there are slots; one more value for each group.
            Op::Route(route) => {
                let groups = route.groups.map_or(0, |groups| u64::from(groups.count));
                scratch = scratch.max((2 * u64::from(route.experts) + 2 * u64::from(route.top_k) + 2 * groups) * 4);
            }
            // Shares of all inputs of all rows; of one row they are in registers.
            Op::Combine(combine) => {
                let rows = if for_rows { padded } else { 0 };
                scratch = scratch.max(rows * u64::from(combine.inputs()) * 4);
            }
            // q, k, v, the gate, beta and the decay; two sums of each part of the rows of a state and column.
            Op::Mix(mix) => {
                let (keys, values) = (u64::from(mix.key_dim), u64::from(mix.value_dim));
                heads = heads.max((2 * keys + 2 * values + 2) * 4);
                scratch = scratch.max((warps * 32 / values).clamp(1, keys) * values * 8);
            }
            // x, b, c and the gate, and the step; a sum of each part of the rows of a state and column.
            Op::Scan(scan) => {
                let (dim, state) = (u64::from(scan.head_dim), u64::from(scan.state));
                heads = heads.max((2 * dim + 2 * state + 2) * 4);
                scratch = scratch.max((warps * 32 / dim).clamp(1, state) * dim * 4);
            }
            // An `everywhere` sum is held in registers, as are channels and groups of columns.
            Op::Select
            | Op::Report
            | Op::Embed { .. }
            | Op::Join { .. }
            | Op::NormAdd { .. }
            | Op::Convolve(_)
            | Op::GroupNorm(_) => {}
        }
    }
    if for_rows {
        // Two batches of sums. A batch has a thread for each of a unit's four pairs of columns, in every row; a row's sums come from all
        // warps that have it, and a warp has 16 rows.
        let batch = (warps * 32 / (padded * 4)).max(1);
        reduce = 2 * batch * (warps / padded.div_ceil(16).max(1)) * padded * u64::from(UNIT_ROWS) * 4;
    }
    // Attention stages nothing: its scratch is `stage` and `reduce` together, which lie side by side.
    if let (Some(a), Some(b)) = (schedule.smem(SmemKind::Stage), schedule.smem(SmemKind::Reduce))
        && a.offset.checked_add(a.bytes) == Some(b.offset)
    {
        scratch = scratch.saturating_sub(u64::from(a.bytes));
    }
    reduce = reduce.max(scratch);
    let (residual, owner) = residual(schedule, grids);
    let ring = u64::from(machine.ring.slots) * u64::from(machine.ring.slot_bytes);
    // Two barriers of 8 bytes for each slot; for each warp what it carries from task to task, its norm statistics and its
    // arg-max pairs; token, stop and watchdog.
    let mut state = u64::from(machine.ring.slots) * 16 + warps * 56 + 128;
    if for_rows {
        // Which rows take part, tokens; two statistics of two tasks and the best (value, id) of each warp and row.
        state += padded.div_ceil(32) * 4 + padded * 4 + warps * padded * 24;
        // Of the choices of a layer: two barriers and counts, which rows chose each part, the distinct parts, and what each row chose.
        if let Some((parts, slots)) = schedule.program.chosen_max() {
            let (parts, slots) = (u64::from(parts), u64::from(slots));
            state += 24 + parts * padded.div_ceil(32) * 4 + (padded * slots).min(parts) * 2 + padded * slots * 2;
        }
    }
    for (kind, least) in [
        (SmemKind::Ring, ring),
        (SmemKind::Stage, stage),
        (SmemKind::Reduce, reduce),
        (SmemKind::Heads, heads),
        (SmemKind::Residual, residual),
        (SmemKind::State, state),
    ] {
        let name = kind.name();
        let Some((i, part)) = (0..).zip(&machine.smem).find(|(_, part)| part.kind == kind) else {
            found
                .add(Rule::SmemPart, Entity::Machine, || format!("expected a shared-memory part `{name}`, found none"));
            continue;
        };
        if u64::from(part.bytes) < least {
            found.add_with(Rule::SmemSize, Entity::SmemPart(i), || {
                let message = format!("expected at least {least} bytes for `{name}`, found {}", part.bytes);
                let decided = match kind {
                    SmemKind::Residual => owner.map(|at| note(at, "owns the most columns")),
                    SmemKind::Stage | SmemKind::Heads => None,
                    _ => Some(note(Entity::Machine, "its ring and its consumer warps decide how many")),
                };
                (message, decided.into_iter().collect())
            });
        }
    }
}

/// Bytes of the fp32 columns that the largest owner keeps, from its lowest to its highest in whole units; and that SM.
fn residual(schedule: &Schedule, grids: &Grids) -> (u64, Option<Entity>) {
    let buffers = &schedule.program.buffers;
    let mut spans = vec![(u32::MAX, 0u32); buffers.len()];
    let mut touched: Vec<BufferId> = vec![];
    let mut most = (0, None);
    for (r, regime) in (0..).zip(&schedule.regimes) {
        for (s, queue) in (0..).zip(&regime.queues) {
            for id in queue {
                let task = &regime.tasks[id.index()];
                for flow in grids.privates(task.grid).iter().filter(|f| buffers[f.buffer.index()].dtype == DType::F32) {
                    if let Some((lo, hi)) = flow.span(task) {
                        let span = &mut spans[flow.buffer.index()];
                        if span.0 > span.1 {
                            touched.push(flow.buffer);
                        }
                        *span = (span.0.min(lo), span.1.max(hi));
                    }
                }
            }
            let mut bytes = 0;
            for buffer in touched.drain(..) {
                let (lo, hi) = std::mem::replace(&mut spans[buffer.index()], (u32::MAX, 0));
                bytes += u64::from(hi - lo).next_multiple_of(u64::from(UNIT_ROWS)) * 4;
            }
            bytes *= u64::from(schedule.program.rows);
            if bytes > most.0 {
                most = (bytes, Some(Entity::Sm(r, SmId(s))));
            }
        }
    }
    most
}

/// Bytes of a matrix in the pack, and those that one device of several has of it at most.
#[derive(Debug, Clone, Copy, Default)]
struct Matrix {
    bytes: u64,
    of_device: u64,
}

/// The matrix of each buffer: rows padded to whole units, k to whole granules of 8 rows of 64 bytes. A unit of fewer rows fills a granule with
/// several parts of k.
fn matrices(schedule: &Schedule, found: &mut Found) -> Vec<Matrix> {
    let (program, devices) = (&schedule.program, u64::from(schedule.machine.devices.max(1)));
    // Units, bytes of one, equal parts that they are, and the grid that streams them first.
    let mut matrices: Vec<Option<(u64, u64, u64, GridId)>> = vec![None; program.buffers.len()];
    for (g, grid) in (0..).zip(&program.grids) {
        let (Op::MatVec(m), Some(weight)) = (&grid.op, grid.operand(Role::Weight)) else { continue };
        let unit_rows = u64::from(m.unit_rows.clamp(1, UNIT_ROWS));
        let units = match m.epilogue {
            Epilogue::Gated(_) | Epilogue::GatedBy { .. } | Epilogue::Clamped(_) => {
                (u64::from(m.rows) / 2).div_ceil(u64::from(UNIT_ROWS) / 2)
            }
            _ => u64::from(m.rows).div_ceil(unit_rows),
        };
        let (of_row, granule) = granules(schedule, grid);
        let granule_k = of_row * (u64::from(UNIT_ROWS) / unit_rows);
        let unit = u64::from(m.k).div_ceil(granule_k).saturating_mul(granule);
        let parts = match weight.rows {
            Rows::Lookup(table) => u64::from(program.tables[table.index()].bound),
            _ => 1,
        };
        let here = (units.saturating_mul(parts), unit);
        match matrices[weight.buffer.index()] {
            Some((units, unit, _, other)) if (units, unit) != here => {
                found.add_with(Rule::MixedUse, Entity::Grid(GridId(g)), || {
                    let message = format!(
                        "expected {units} units of {unit} bytes of {}, found {} of {}",
                        weight.buffer, here.0, here.1
                    );
                    (message, vec![note(Entity::Grid(other), "streams them so")])
                });
            }
            Some(_) => {}
            None => matrices[weight.buffer.index()] = Some((here.0, here.1, parts, GridId(g))),
        }
    }
    let rows =
        |buffer: &Buffer| if buffer.coded.is_some_and(|format| format.row_scales) { u64::from(UNIT_ROWS) } else { 0 };
    let aligned = |bytes: u64| bytes.div_ceil(PLACE_ALIGN).saturating_mul(PLACE_ALIGN);
    let of = |(matrix, buffer): (Option<(u64, u64, u64, GridId)>, &Buffer)| {
        let Some((units, unit, parts, _)) = matrix else { return Matrix::default() };
        // A scale of 4 bytes for each row of each unit, from an aligned place on. Every device has those of all rows.
        let scales = units.saturating_mul(rows(buffer) * 4);
        let with_scales = |units: u64| {
            let units_bytes = units.saturating_mul(unit);
            if scales == 0 { units_bytes } else { aligned(units_bytes).saturating_add(scales) }
        };
        // Devices have as many units of each part as others, or one more.
        let parts = parts.max(1);
        let own =
            if buffer.home == Home::Divided { (units / parts).div_ceil(devices).saturating_mul(parts) } else { units };
        Matrix { bytes: with_scales(units), of_device: with_scales(own) }
    };
    matrices.into_iter().zip(&program.buffers).map(of).collect()
}

/// Arenas of the pack, of exchange, cache and output buffers, and the sum of everything in device memory.
pub(super) fn device(schedule: &Schedule, target: &Target, found: &mut Found) {
    let program = &schedule.program;
    let matrices = matrices(schedule, found);
    // Of several devices, each has a part of the pack.
    let (mut total, mut elsewhere) = (0u64, 0u64);
    let mut placed: Vec<(&str, u64, u64, BufferId)> = vec![];
    for ((b, buffer), &place) in (0..).zip(&program.buffers).zip(&schedule.placement) {
        let id = BufferId(b);
        let (arena, bytes) = match buffer.space {
            Space::Weight => {
                let Matrix { bytes, of_device } = matrices[b as usize];
                // Rounded down, as much as its place may be rounded up.
                elsewhere += (bytes - of_device) / PLACE_ALIGN * PLACE_ALIGN;
                ("pack", bytes)
            }
            Space::Constant => ("pack", bytes(buffer)),
            Space::Exchange | Space::Cache | Space::State | Space::Output => {
                (buffer.space.arena().name(), bytes(buffer))
            }
            Space::Private => {
                if let Some(offset) = place {
                    found.add(Rule::Placement, Entity::Buffer(id), || {
                        format!("expected no place for a buffer in {}, found {offset}", buffer.space.name())
                    });
                }
                continue;
            }
        };
        let Some(offset) = place else {
            found.add(Rule::Placement, Entity::Buffer(id), || {
                format!("expected a place in the arena of {arena}, found none")
            });
            continue;
        };
        if offset % PLACE_ALIGN != 0 {
            found.add(Rule::Placement, Entity::Buffer(id), || {
                format!("expected a multiple of {PLACE_ALIGN} bytes as its place, found {offset}")
            });
        }
        placed.push((arena, offset, offset.saturating_add(bytes), id));
    }
    placed.sort_unstable_by_key(|&(arena, offset, end, _)| (arena, offset, end));
    for arena in placed.chunk_by(|a, b| a.0 == b.0) {
        let mut last = (0, BufferId(0));
        for &(_, offset, end, id) in arena {
            if offset < last.0 {
                found.add_with(Rule::PlacementOverlap, Entity::Buffer(id), || {
                    (
                        format!("expected a place from {} on, found {offset}", last.0),
                        vec![note(Entity::Buffer(last.1), "ends there")],
                    )
                });
            }
            if end > last.0 {
                last = (end, id);
            }
        }
        total = total.saturating_add(last.0);
    }
    total = total.saturating_sub(elsewhere);
    if total > target.spec.memory_bytes {
        found.add(Rule::DeviceMemory, Entity::Schedule, || {
            format!("expected at most {} bytes in device memory, found {total}", target.spec.memory_bytes)
        });
    }
}

/// Bytes of a buffer in device memory. A packet of 8 bytes holds two 16-bit values or one of 32 bits, and a tag;
/// packets are read in pairs, and each row has packets of its own.
pub(super) fn bytes(buffer: &Buffer) -> u64 {
    let (rows, cols) = (u64::from(buffer.rows), u64::from(buffer.cols));
    match buffer.space {
        // Words of 8 rows by 64 bytes at a time.
        Space::Exchange if buffer.words => {
            let spans = cols.saturating_mul(buffer.dtype.bytes() as u64).div_ceil(64);
            spans.saturating_mul(64 * rows.next_multiple_of(8)).saturating_mul(u64::from(buffer.phases))
        }
        Space::Exchange => {
            let packets = cols.div_ceil(4 / buffer.dtype.bytes() as u64).next_multiple_of(2);
            packets.saturating_mul(8).saturating_mul(rows).saturating_mul(u64::from(buffer.phases))
        }
        Space::Constant if buffer.coded.is_some() => rows.saturating_mul(table_row_bytes(buffer)),
        _ => (rows * cols).saturating_mul(buffer.dtype.bytes() as u64),
    }
}

/// Bytes of a row of a table of codes: its codes and scales in whole words, and all of it in 16 bytes.
fn table_row_bytes(buffer: &Buffer) -> u64 {
    let Format { code, groups, row_scales } = buffer.format();
    let cols = u64::from(buffer.cols);
    let codes = if code.bits() == 4 { cols.div_ceil(2) } else { cols }.next_multiple_of(4);
    let of_groups = groups.map_or(0, |groups| {
        let scale = u64::from(groups.scale.bytes());
        let each = scale + u64::from(groups.zeros) + if groups.minima { scale } else { 0 };
        cols.div_ceil(u64::from(groups.k.max(1))) * each
    });
    (codes + of_groups.next_multiple_of(4) + if row_scales { 4 } else { 0 }).next_multiple_of(16)
}
