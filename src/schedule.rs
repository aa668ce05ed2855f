//! Places a program on a machine: shares of every grid, queues, events derived from regions, streams, memory map.
//!
//! Events are derived from overlapping regions; no event is written by hand. SMs of several devices are one machine (`shards`).

mod shards;

pub use shards::shards;

use crate::candidate::{Candidate, FormatCause, Infeasible};
use crate::ir::layout::{
    BlockLimits, GRANULE_BYTES, RING_SLOTS_MAX, RowNeeds, SmemNeeds, WARP_ROWS, WHOLE_SLOT_BYTES, WORD_ROWS,
    block_granules, cache_row_bytes, chunk_granules, chunk_rows, chunk_rows_of_page, dealt_bytes, held, placed_bytes,
    placement, share_of, smem_map,
};
use crate::ir::op::{Access, Attention, Epilogue, HISTORY_ALIGN, MatVec, Op, Role, UNIT_ROWS};
use crate::ir::program::{Grid, LayerOp, Operand, Program, Rows, Second, Site, Space};
use crate::ir::schedule::{
    Event, Machine, Mechanism, Regime, Ring, Run, Schedule, Scope, Source, Task, Wait, queue_max,
};
use crate::ir::table::Holds;
use crate::ir::variant::{
    AttentionVariant, LANES, MatVecVariant, POLL_BATCH, PassLimits, REDUCE_BATCH_MAX, RegisterTiling, Variant,
    granule_pairs, kernel_refuses, lanes_of_rows, rows_on_tensor_cores, rows_pass_max, warps_per_head_rule,
};
use crate::ir::{BufferId, EventId, GridId, TaskId};
use crate::target::{CopyMechanism, DotMechanism, Target, TargetKind};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::ops::Range;

type Variants = BTreeMap<GridId, Variant>;

/// Places `program` on `target` as `candidate` says, or names what does not fit.
pub fn schedule(program: Program, target: &Target, candidate: &Candidate) -> Result<Schedule, Infeasible> {
    check_formats(&program, target)?;
    check_devices(&program, target, candidate)?;
    let program = shards(program, target.devices);
    let head_units = program.grids.iter().filter(|g| g.site == Some(Site::HEAD)).map(|g| g.n).sum();
    check_knobs(head_units, target, candidate)?;
    check_slots(&program, candidate)?;
    let split = program.grids.iter().any(|g| matches!(g.op, Op::AttentionMerge { .. }));
    let weights = divide(&program, target, candidate, split && candidate.split_from == 0);
    let mut regimes = vec![];
    if !split || candidate.split_from > 0 {
        regimes.push(tasks(&program, target, candidate, &weights, 0, false)?);
    }
    if split {
        regimes.push(tasks(&program, target, candidate, &weights, candidate.split_from, true)?);
    }
    let variants = attention_variants(&program, target, candidate)?;
    let machine = machine(&program, &variants, target, candidate, queue_max(&regimes) as u32)?;
    let placement = placement(&program);
    let mut schedule = Schedule { program, machine, variants, placement, regimes };
    check_memory(&schedule, target)?;
    // Events take most of the time, and candidates are tried until one fits.
    for regime in &mut schedule.regimes {
        derive_events(&schedule.program, regime, candidate.mechanism, target);
        await_choices(&schedule.program, regime);
    }
    resolve_matvecs(&mut schedule, target, candidate)?;
    if for_rows(&schedule.program) {
        schedule.machine.residual_cols = residual_cols(&schedule);
    }
    Ok(schedule)
}

/// Formats of matrices against what the kernels of a CUDA target stream.
fn check_formats(program: &Program, target: &Target) -> Result<(), Infeasible> {
    if target.kind == TargetKind::Cpu {
        return Ok(());
    }
    for grid in program.grids.iter().filter(|grid| matches!(grid.op, Op::MatVec(_))) {
        let format = program.format_of(grid);
        if let Some(expected) = kernel_refuses(format, program.precision) {
            let (matrix, target) = (grid.name.clone(), target.name.clone());
            let cause = match format.is_plain() {
                true => FormatCause::Plain,
                false if granule_pairs(1, format, program.precision) > LANES => FormatCause::Activations,
                false => FormatCause::Groups,
            };
            return Err(Infeasible::Format { matrix, format: format.to_string(), expected, cause, target });
        }
    }
    Ok(())
}

/// Programs and mechanisms of several devices. What crosses must be its own flag: a counter orders memory of one device.
fn check_devices(program: &Program, target: &Target, c: &Candidate) -> Result<(), Infeasible> {
    let devices = target.devices;
    if devices == 1 {
        return Ok(());
    }
    if let Some(what) = shards::refuses(program, target) {
        return Err(Infeasible::Devices { what, devices, target: target.name.clone() });
    }
    if c.mechanism != Mechanism::Packets {
        let expected = format!("packets on `{}`, which has {devices} devices", target.name);
        return Err(Infeasible::Mechanism { mechanism: c.mechanism.name(), expected });
    }
    Ok(())
}

/// Slots against the granules of the program: those of codes are longer than [`GRANULE_BYTES`], because their scales lie in them. In steps of
/// several rows a block of k may be fewer granules than there are warps.
fn check_slots(program: &Program, c: &Candidate) -> Result<(), Infeasible> {
    if for_rows(program) {
        return Ok(());
    }
    for grid in &program.grids {
        if !matches!(grid.op, Op::MatVec(_)) {
            continue;
        }
        let granule = program.format_of(grid).granule_bytes();
        if c.slot_bytes / granule < c.consumer_warps {
            let expected = format!(
                "{} granules of {granule} bytes of `{}` at least, one for each warp",
                c.consumer_warps, grid.name
            );
            return Err(Infeasible::Knob { knob: "slot_bytes", value: c.slot_bytes, expected });
        }
    }
    Ok(())
}

/// The variant of each attention, as the candidate asks for it.
fn attention_variants(program: &Program, target: &Target, c: &Candidate) -> Result<Variants, Infeasible> {
    let (precision, tensor_cores) = (program.precision, target.spec.dot == DotMechanism::Mma);
    let mut variants = Variants::new();
    for (g, grid) in program.grids.iter().enumerate() {
        let Op::Attention(a) = &grid.op else { continue };
        let (warps_per_head, prefetch_v) = (c.attention_team, c.attention_ahead != 0);
        let variant = AttentionVariant::of(a, precision, tensor_cores, c.consumer_warps, warps_per_head, prefetch_v);
        if let Some(expected) = a.refuses_variant(&variant, precision, tensor_cores, c.consumer_warps) {
            let by_rule = warps_per_head == warps_per_head_rule(a.head_dim);
            let (knob, value) =
                if by_rule { ("attention_ahead", c.attention_ahead) } else { ("attention_team", warps_per_head) };
            return Err(Infeasible::Knob { knob, value, expected });
        }
        variants.insert(GridId::from(g), Variant::Attention(variant));
    }
    Ok(variants)
}

/// Resolves the variant of each matvec from what its tasks became.
fn resolve_matvecs(schedule: &mut Schedule, target: &Target, c: &Candidate) -> Result<(), Infeasible> {
    let tensor_cores = target.spec.dot == DotMechanism::Mma;
    let units = schedule.longest_tasks();
    let Schedule { program, machine, variants, .. } = schedule;
    let mut turned = vec![];
    for (g, (grid, units)) in program.grids.iter().zip(units).enumerate() {
        let Op::MatVec(m) = &grid.op else { continue };
        let format = program.format_of(grid);
        let (unit, granule) = (m.streamed_granules(format), format.granule_bytes());
        if for_rows(program) {
            let lanes = lanes_of_rows(program.precision, tensor_cores);
            let (slot_bytes, warps) = (machine.ring.slot_bytes, machine.ring.arrivals);
            let moved = machine.loader_registers > 0;
            let chunk = m.block_of_k(format, BlockLimits { rows: program.rows, lanes, slot_bytes, warps, moved });
            let (parts, rows) = (m.parts(), program.rows);
            let limits = PassLimits { tensor_cores, parts, rows, units, block: chunk, moved };
            let most = rows_pass_max(format, program.precision, limits);
            let pass = units.div_ceil(units.div_ceil(most));
            let mut variant = MatVecVariant {
                units,
                chunk,
                block: unit,
                units_per_warp: 1,
                poll_batch: 1,
                granule,
                pass,
                shared: false,
            };
            variant.shared = shares_code(program, grid, m, &variant, tensor_cores);
            variants.insert(GridId::from(g), Variant::MatVec(variant));
            continue;
        }
        let chunk = chunk_granules(unit, granule, machine.ring.slot_bytes, machine.ring.arrivals);
        let block = block_granules(unit, granule, machine.ring.slot_bytes, units);
        let tiling = RegisterTiling::of(m, machine, program.precision, format, units, chunk);
        let knob = grid.site.and_then(|site| c.units_per_warp(site.op)).filter(|(_, value)| *value > 0);
        let mut units_per_warp = tiling.units_per_warp_rule();
        if let Some((knob, value)) = knob {
            if let Some(expected) = tiling.refuses_units_per_warp(value) {
                return Err(Infeasible::Knob { knob, value, expected });
            }
            turned.extend((value != units_per_warp).then_some(knob));
            units_per_warp = value;
        }
        // A short input may have fewer pairs than the candidate asks for.
        let poll_batch = c.poll_pairs.min(tiling.pairs());
        turned.extend((poll_batch != tiling.poll_batch_rule()).then_some("poll_pairs"));
        let variant =
            MatVecVariant { units, chunk, block, units_per_warp, poll_batch, granule, pass: 0, shared: false };
        variants.insert(GridId::from(g), Variant::MatVec(variant));
    }
    if for_rows(program) {
        return Ok(());
    }
    let asked = LayerOp::ALL.into_iter().filter_map(|op| c.units_per_warp(op)).filter(|(_, units)| *units > 0);
    for (knob, value) in asked.chain(Some(("poll_pairs", c.poll_pairs)).filter(|(_, n)| *n != POLL_BATCH)) {
        // Without this a search would try one kernel twice.
        if !turned.contains(&knob) {
            let expected = "another value: with this one the kernel does what it does by itself".to_string();
            return Err(Infeasible::Knob { knob, value, expected });
        }
    }
    Ok(())
}

/// Columns of the residual from the first to the last of a block, in the block with most: the distance from one row to the next.
fn residual_cols(schedule: &Schedule) -> u32 {
    let of_queue = |regime: &Regime, queue: &[TaskId]| {
        let owned = queue.iter().filter_map(|id| {
            let task = &regime.tasks[id.index()];
            let residual = schedule.program.grids[task.grid.index()].operand(Role::Residual)?;
            Some(residual.cols.range(task.lo, task.hi, task.j))
        });
        let all = owned.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)));
        all.map_or(0, |(lo, hi)| (hi - lo).next_multiple_of(u64::from(UNIT_ROWS)))
    };
    let queues =
        schedule.regimes.iter().flat_map(|regime| regime.queues.iter().map(move |queue| of_queue(regime, queue)));
    queues.max().unwrap_or(0) as u32
}

/// Whether the code of a matvec is that of others: in steps of 16 rows, without a norm. With 8 rows the same costs more than it saves (docs/perf-log.md, entry 42).
fn shares_code(program: &Program, grid: &Grid, m: &MatVec, variant: &MatVecVariant, tensor_cores: bool) -> bool {
    let format = program.format_of(grid);
    let block_k = variant.chunk.min(m.granules(format)) * format.granule_k() * m.parts();
    rows_on_tensor_cores(program.precision, tensor_cores)
        && program.rows.next_multiple_of(WORD_ROWS) == WARP_ROWS
        && m.norm.is_none()
        && !grid.is_dealt()
        && grid.operand(Role::Out).is_none_or(|out| out.cols.base == 0)
        // One with several passes may keep its whole input between them, with code of its own.
        && variant.units <= variant.pass
        && m.k.is_multiple_of(block_k)
        && format.is_plain()
}

/// Whether a program is for a kernel that takes rows.
fn for_rows(program: &Program) -> bool {
    program.buffers.iter().any(|buffer| buffer.words)
}

/// Weights, cache and exchange buffers against the memory of a device: of several, its part of the weights. The record of a CPU says nothing of its host.
fn check_memory(schedule: &Schedule, target: &Target) -> Result<(), Infeasible> {
    if target.kind == TargetKind::Cpu {
        return Ok(());
    }
    let buffers = |space: fn(Space) -> bool| -> u64 {
        schedule.program.buffers.iter().filter(|b| space(b.space)).map(placed_bytes).sum()
    };
    let weights = (0..target.devices).map(|device| held(schedule, device).bytes).max().unwrap_or(0);
    let cache = buffers(|space| space.arena() == Space::Cache);
    let rest = buffers(|space| matches!(space, Space::Exchange | Space::Output));
    let (bytes, most) = (weights + cache + rest, target.spec.memory_bytes);
    if bytes > most {
        let is_cache = cache > weights;
        let what = if is_cache { "the cache, with the weights," } else { "the model" };
        return Err(Infeasible::DeviceMemory { what, is_cache, bytes, most, target: target.name.clone() });
    }
    Ok(())
}

/// Judges those knobs of a candidate that need no program for it. `head_units`: the units of 8 rows of the output matrix.
///
/// # Errors
/// The first knob that is out of its range, or does not fit another one.
pub fn check_knobs(head_units: u32, target: &Target, c: &Candidate) -> Result<(), Infeasible> {
    let most = target.sms();
    if c.sms == 0 || c.sms > most {
        return Err(Infeasible::Sms { sms: c.sms, most, target: target.name.clone() });
    }
    let knob = |knob, value, expected: &str| Err(Infeasible::Knob { knob, value, expected: expected.to_string() });
    if !c.sms.is_multiple_of(target.devices) {
        let expected = format!("a multiple of {}, for devices have equal numbers of SMs", target.devices);
        return knob("sms", c.sms, &expected);
    }
    if c.sms > head_units {
        // Every SM must run a head task: its arg-max store is the release of what it wrote to the cache.
        return knob("sms", c.sms, &format!("at most {head_units}, the units of the head"));
    }
    let warps_max = match target.kind {
        // A worker thread runs what stands for one warp.
        TargetKind::Cpu => 1,
        TargetKind::Cuda => (target.spec.threads_per_block_max / 32).saturating_sub(loader_warps(target)),
    };
    if c.consumer_warps == 0 || c.consumer_warps > warps_max {
        return knob("consumer_warps", c.consumer_warps, &format!("1 to {warps_max}"));
    }
    if c.slot_bytes == 0 || !c.slot_bytes.is_multiple_of(GRANULE_BYTES) {
        return knob("slot_bytes", c.slot_bytes, &format!("a multiple of {GRANULE_BYTES}"));
    }
    if c.slot_bytes / GRANULE_BYTES < c.consumer_warps {
        let expected = format!("{} granules at least, one for each warp", c.consumer_warps);
        return knob("slot_bytes", c.slot_bytes, &expected);
    }
    if !matches!(c.unit_rows, 2 | 4 | UNIT_ROWS) {
        return knob("unit_rows", c.unit_rows, &format!("2, 4 or {UNIT_ROWS}"));
    }
    if c.ring_slots < 2 || c.ring_slots > RING_SLOTS_MAX {
        let expected = format!("2, a key chunk and its value chunk, to {RING_SLOTS_MAX}");
        return knob("ring_slots", c.ring_slots, &expected);
    }
    if c.flight_low == 0 || c.flight_low > c.flight_high || c.flight_high > c.ring_slots {
        return knob("flight_low", c.flight_low, "1 to `flight_high`, which is at most `ring_slots`");
    }
    if c.flight_free > c.ring_slots {
        return knob("flight_free", c.flight_free, "at most `ring_slots`");
    }
    if c.sum_units == 0 || c.sum_units > REDUCE_BATCH_MAX {
        return knob("sum_units", c.sum_units, &format!("1 to {REDUCE_BATCH_MAX}"));
    }
    if c.poll_pairs == 0 {
        return knob("poll_pairs", c.poll_pairs, "at least 1");
    }
    if c.light_eighth > 8 {
        return knob("light_eighth", c.light_eighth, "0, or one of the 8 eighths");
    }
    if c.light_percent == 0 || c.light_percent > 50 {
        return knob("light_percent", c.light_percent, "1 to 50");
    }
    if c.light_eighth > 0 && c.light_sms().is_empty() {
        return knob("light_eighth", c.light_eighth, &format!("an eighth that has one of {} SMs", c.sms));
    }
    if c.sums_everywhere > 1 {
        return knob("sums_everywhere", c.sums_everywhere, "0 or 1");
    }
    if c.splits == 0 {
        return knob("splits", c.splits, "at least 1");
    }
    if (target.kind == TargetKind::Cuda && c.mechanism != Mechanism::Packets) || c.mechanism == Mechanism::Words {
        let expected = "packets: the kernel of a CUDA target has no other".to_string();
        return Err(Infeasible::Mechanism { mechanism: c.mechanism.name(), expected });
    }
    Ok(())
}

/// Warps beside the consumers: bulk copies need one thread, the other mechanisms move every byte through threads.
fn loader_warps(target: &Target) -> u32 {
    match target.spec.copy {
        CopyMechanism::Bulk => 1,
        CopyMechanism::Plain | CopyMechanism::CpAsync => 4,
    }
}

/// Warps that move registers together. The register file has as many parts, and a warpgroup one warp in each.
const WARPGROUP: u32 = 4;
/// What a loader thread needs.
const LOADER_REGISTERS: u32 = 72;

/// Whether the loader is a whole warpgroup and gives registers to the consumers. Batch kernels need more registers per consumer than
/// decode kernels.
pub fn registers_move(target: &Target, consumer_warps: u32) -> bool {
    let spec = &target.spec;
    spec.copy == CopyMechanism::Bulk && spec.register_reallocation && consumer_warps.is_multiple_of(WARPGROUP)
}

/// Loader threads of a kernel for `rows` that copy chunks in turn, each in a warp of its own: more where chunks are short, because a thread takes
/// 0.3 to 0.4 us for a chunk of any size (docs/perf/batch.md, entry 56). Chunks are short for more than 16 rows, and of codes; of experts those of
/// `down` are, and slots are so large that each one counts.
pub fn chunk_copiers(
    target: &Target,
    consumer_warps: u32,
    rows: u32,
    slot_bytes: u32,
    has_codes: bool,
    has_experts: bool,
) -> u32 {
    match registers_move(target, consumer_warps) {
        true if rows > WARP_ROWS || has_codes && !WHOLE_SLOT_BYTES.contains(&slot_bytes) => WARPGROUP,
        true if has_codes || has_experts => 2,
        _ => 1,
    }
}

fn machine(
    program: &Program,
    variants: &Variants,
    target: &Target,
    c: &Candidate,
    queue_max: u32,
) -> Result<Machine, Infeasible> {
    let spec = &target.spec;
    let mut needs = SmemNeeds {
        sms: c.sms,
        k_max: 0,
        head_dim: 0,
        heads_per_task: 1,
        records: 0,
        choice: 0,
        mix: 0,
        residual_units: 0,
        precision: program.precision,
        tensor_cores: spec.dot == DotMechanism::Mma,
        consumer_warps: c.consumer_warps,
        reduce_batch: c.sum_units,
        ring_bytes: c.ring_slots.saturating_mul(c.slot_bytes),
        queue_max,
        copies_ahead: spec.copy != CopyMechanism::Plain,
        rows: row_needs(program, variants, target, c),
    };
    let rows = program.rows;
    for (g, grid) in program.grids.iter().enumerate() {
        match &grid.op {
            Op::MatVec(m) => {
                let granule_k = program.format_of(grid).granule_k();
                needs.k_max = needs.k_max.max(m.inputs().next_multiple_of(granule_k));
                if matches!(m.epilogue, Epilogue::Residual { .. }) {
                    needs.residual_units = needs.residual_units.max(rows * grid.n.div_ceil(c.sms));
                }
            }
            Op::Attention(a) => {
                needs.head_dim = needs.head_dim.max(a.head_dim);
                needs.heads_per_task = needs.heads_per_task.max(a.heads_per_task);
                if let Some(Variant::Attention(variant)) = variants.get(&GridId::from(g)) {
                    needs.records = needs.records.max(variant.records(c.consumer_warps));
                }
            }
            Op::NormAdd { .. } | Op::Embed { .. } | Op::Join { .. } => {
                let owned = grid.operand(Role::Residual).map_or(0, |o| {
                    let units = if grid.op.everywhere() { 1 } else { grid.n.div_ceil(c.sms) };
                    u64::from(rows) * u64::from(units) * u64::from(o.cols.len)
                });
                needs.residual_units = needs.residual_units.max(owned.div_ceil(u64::from(UNIT_ROWS)) as u32);
                if let Op::NormAdd { width, everywhere: false, .. } = grid.op {
                    needs.k_max = needs.k_max.max(width);
                }
            }
            Op::Combine(combine) => {
                if combine.adds {
                    needs.residual_units = needs.residual_units.max(rows * grid.n.div_ceil(c.sms));
                }
                // Shares of all rows.
                if for_rows(program) {
                    needs.choice = needs.choice.max(rows.next_multiple_of(WORD_ROWS) * combine.inputs());
                }
            }
            // Scores and keys of experts, ids and weights of slots, a key for each group.
            Op::Route(route) => {
                let groups = route.groups.map_or(0, |groups| groups.count);
                needs.choice = needs.choice.max(2 * route.experts + 2 * route.top_k + 2 * groups);
            }
            // q, k, v, the gate, beta and the decay; two sums of each part and column.
            Op::Mix(mix) => {
                needs.mix = needs.mix.max(mix.channels() + mix.value_dim + 2);
                needs.choice = needs.choice.max(2 * mix.parts(c.consumer_warps * 32) * mix.value_dim);
            }
            // x, b, c, the gate and the step; a sum of each part and column.
            Op::Scan(scan) => {
                needs.mix = needs.mix.max(scan.head_channels() + scan.head_dim + 2);
                needs.choice = needs.choice.max(scan.parts(c.consumer_warps * 32) * scan.head_dim);
            }
            Op::Select | Op::Report | Op::AttentionMerge { .. } | Op::Convolve(_) | Op::GroupNorm(_) => {}
        }
    }
    let smem = smem_map(&needs);
    let bytes = smem.iter().map(|p| u64::from(p.bytes)).sum::<u64>();
    if bytes > u64::from(spec.smem_bytes_per_block_max) {
        let target = target.name.clone();
        return Err(Infeasible::SharedMemory { bytes, most: spec.smem_bytes_per_block_max, target });
    }
    let moved = for_rows(program) && registers_move(target, c.consumer_warps);
    let loader_warps = if moved { WARPGROUP } else { loader_warps(target) };
    let threads = (c.consumer_warps + loader_warps) * 32;
    // Granted in steps of 8 a thread; 255 is the most an instruction can name.
    let mut registers = (spec.registers_per_sm / threads / 8 * 8).min(248);
    let mut loader_registers = 0;
    if moved {
        loader_registers = LOADER_REGISTERS;
        let given = loader_warps * registers.saturating_sub(loader_registers);
        registers = (registers + given / c.consumer_warps / 8 * 8).min(248);
    }
    Ok(Machine {
        target: target.name.clone(),
        sms: c.sms,
        devices: target.devices,
        consumer_warps: c.consumer_warps,
        loader_warps,
        registers_per_thread: registers,
        loader_registers,
        reduce_batch: c.sum_units,
        residual_cols: 0,
        ring: Ring {
            slots: c.ring_slots,
            slot_bytes: c.slot_bytes,
            arrivals: c.consumer_warps,
            flight_high: c.flight_high,
            flight_low: c.flight_low,
            flight_free: c.flight_free,
            copiers: if for_rows(program) { copiers(program, target, c) } else { 1 },
        },
        smem,
    })
}

/// As [`chunk_copiers`], of a program of rows; one where others would not have equally many slots.
fn copiers(program: &Program, target: &Target, c: &Candidate) -> u32 {
    let mut weights = program.buffers.iter().filter(|buffer| buffer.space == Space::Weight);
    let has_codes = weights.any(|buffer| !buffer.format().is_plain());
    let has_experts = program.tables.iter().any(|table| table.holds == Holds::Choices);
    let several = chunk_copiers(target, c.consumer_warps, program.rows, c.slot_bytes, has_codes, has_experts);
    if c.ring_slots.is_multiple_of(several) { several } else { 1 }
}

/// What a batch kernel needs of shared memory; `None`: it is for one row.
fn row_needs(program: &Program, variants: &Variants, target: &Target, c: &Candidate) -> Option<RowNeeds> {
    if !for_rows(program) {
        return None;
    }
    let precision = program.precision;
    let lanes = lanes_of_rows(precision, target.spec.dot == DotMechanism::Mma);
    let mut needs = RowNeeds {
        rows: program.rows.next_multiple_of(WORD_ROWS),
        block_k: 0,
        pitch_bytes: 0,
        tensor_attention: variants.values().all(|v| matches!(v, Variant::Attention(a) if a.swizzled)),
        dealt_bytes: program.chosen_max().map_or(0, |(parts, slots)| dealt_bytes(program.rows, parts, slots)),
    };
    for grid in &program.grids {
        match &grid.op {
            Op::MatVec(m) if lanes.is_some() => {
                let (format, rows) = (program.format_of(grid), program.rows);
                let (warps, moved) = (c.consumer_warps, registers_move(target, c.consumer_warps));
                let limits = BlockLimits { rows, lanes, slot_bytes: c.slot_bytes, warps, moved };
                let block = m.block_of_k(format, limits);
                needs.block_k = needs.block_k.max(block * m.parts() * format.granule_k());
            }
            Op::Attention(a) => needs.pitch_bytes = needs.pitch_bytes.max(cache_row_bytes(a.head_dim, precision.cache)),
            _ => {}
        }
    }
    Some(needs)
}

/// Whether a regime with or without split attention has tasks of a grid.
fn takes_part(program: &Program, c: &Candidate, grid: &Grid, split: bool) -> bool {
    let has_split_twin = c.splits > 1 && c.split_from < program.context_max;
    match &grid.op {
        Op::Attention(a) => !has_split_twin || (a.splits > 1) == split,
        Op::AttentionMerge { .. } => split,
        _ => true,
    }
}

/// Which SM computes which units of each matvec; the same in every regime. Streams are balanced for the first regime. If attention is not
/// split in it, some SMs stream a history and others do not.
fn divide(program: &Program, target: &Target, c: &Candidate, split: bool) -> Vec<Vec<Share>> {
    // Streamed bytes so far on each SM, times what a byte costs there.
    let mut load = vec![0u64; c.sms as usize];
    let cost = byte_costs(c);
    let mut spread = 0;
    let mut out = vec![vec![]; program.grids.len()];
    for g in coarse_first(program) {
        let grid = &program.grids[g];
        let shares = match &grid.op {
            _ if !takes_part(program, c, grid, split) => vec![],
            Op::MatVec(m) if grid.operand(Role::Residual).is_none() => {
                unit_shares(program, grid, m, &load, &cost, target.devices)
            }
            _ => even_shares(grid, program.rows, load.len(), target.devices, &mut spread),
        };
        for share in &shares {
            load[share.sm] += cost[share.sm]
                * match &grid.op {
                    Op::MatVec(m) => u64::from(share.hi - share.lo) * m.streamed_bytes(program.format_of(grid)),
                    Op::Attention(a) => {
                        let row_bytes = cache_row_bytes(a.head_dim, program.precision.cache);
                        typical_rows(program, c, a) * u64::from(2 * row_bytes)
                    }
                    _ => 0,
                };
        }
        out[g] = shares;
    }
    out
}

/// The grids in program order, except that a matvec of larger units comes before the one whose output it reads. Between the two waits of a
/// layer an SM streams both, so an SM with one more large unit of the one should have fewer small units of the other.
fn coarse_first(program: &Program) -> Vec<usize> {
    let unit = |g: usize| match &program.grids[g].op {
        Op::MatVec(m) => Some(m.streamed_bytes(program.format_of(&program.grids[g]))),
        _ => None,
    };
    let mut order: Vec<usize> = (0..program.grids.len()).collect();
    let mut g = 0;
    while g + 1 < order.len() {
        if let (Some(this), Some(next)) = (unit(g), unit(g + 1))
            && next > this
        {
            order.swap(g, g + 1);
            g += 1;
        }
        g += 1;
    }
    order
}

/// The order of grids in queues: that of the program, except that products with a shared expert and those with chosen ones take turns, the shared one first.
/// SMs do the first while rows choose, and need not wait for the second, whose input is there when the others end (docs/perf/batch.md, entry 62).
fn queue_order(program: &Program) -> Vec<usize> {
    let grids = &program.grids;
    let (mut order, mut g) = (vec![], 0);
    while g < grids.len() {
        if !grids[g].is_dealt() {
            order.push(g);
            g += 1;
            continue;
        }
        let products = grids[g..].iter().take_while(|grid| matches!(grid.op, Op::MatVec(_))).count();
        let (dealt, shared): (Vec<usize>, Vec<usize>) = (g..g + products).partition(|at| grids[*at].is_dealt());
        for turn in 0..dealt.len().max(shared.len()) {
            order.extend(shared.get(turn).into_iter().chain(dealt.get(turn)));
        }
        g += products;
    }
    order
}

/// What streaming a byte costs on each SM, in thousandths of its cost if no SM is spared.
fn byte_costs(c: &Candidate) -> Vec<u64> {
    let light = c.light_sms();
    let spared = 100_000 / u64::from(100 - c.light_percent.min(50));
    (0..c.sms).map(|sm| if light.contains(&sm) { spared } else { 1000 }).collect()
}

/// Rows of history that a task is assumed to read when streams are balanced; in truth they grow with the position. Few, so that
/// steps at short positions, and those of the split regime, do not pay for those in between.
fn typical_rows(program: &Program, c: &Candidate, a: &Attention) -> u64 {
    let position = c.split_from.min(program.context_max) / 4;
    u64::from(a.window.map_or(position, |w| w.min(position)) / a.splits.max(1))
}

/// The tasks of a regime, in queues, with what they stream; without events.
fn tasks(
    program: &Program,
    target: &Target,
    c: &Candidate,
    weights: &[Vec<Share>],
    from_position: u32,
    split: bool,
) -> Result<Regime, Infeasible> {
    let sms = c.sms as usize;
    let mut r =
        Regime { from_position, tasks: vec![], events: vec![], queues: vec![vec![]; sms], streams: vec![vec![]; sms] };
    let (mut spread, divides_pages) = (0usize, for_rows(program));
    for g in queue_order(program) {
        let grid = &program.grids[g];
        if !takes_part(program, c, grid, split) {
            continue;
        }
        let grid_id = GridId::from(g);
        let shares = match &grid.op {
            Op::MatVec(_) => weights[g].clone(),
            _ => even_shares(grid, program.rows, sms, target.devices, &mut spread),
        };
        for share in shares {
            let id = TaskId::from(r.tasks.len());
            let Share { lo, hi, j, row, .. } = share;
            let task = Task { grid: grid_id, lo, hi, j, row, waits: vec![], signals: vec![] };
            match &grid.op {
                Op::MatVec(_) => {
                    if let Some(weight) = grid.operand(Role::Weight) {
                        let source = Source::Units { buffer: weight.buffer, lo: share.lo, hi: share.hi };
                        r.streams[share.sm].push(Run { task: id, source, after: None });
                    }
                }
                Op::Attention(a) => {
                    let row_bytes = cache_row_bytes(a.head_dim, program.precision.cache);
                    let paging = grid.operand(Role::HistoryK).and_then(|o| program.buffers[o.buffer.index()].paging);
                    let rows = match paging.filter(|_| divides_pages) {
                        Some(paging) => chunk_rows_of_page(c.slot_bytes, row_bytes, paging.rows),
                        None => chunk_rows(c.slot_bytes, row_bytes),
                    };
                    if rows == 0 {
                        let slot_bytes = c.slot_bytes;
                        return Err(Infeasible::HistoryChunk { slot_bytes, rows: HISTORY_ALIGN, row_bytes });
                    }
                    r.streams[share.sm].push(Run { task: id, source: Source::History { rows }, after: None });
                }
                _ => {}
            }
            r.queues[share.sm].push(id);
            r.tasks.push(task);
        }
    }
    Ok(r)
}

#[derive(Debug, Clone, Copy)]
struct Share {
    sm: usize,
    lo: u32,
    hi: u32,
    j: u32,
    row: u32,
}

/// Divides the units of a matvec that owns no residual: on each device those that it holds.
fn unit_shares(program: &Program, grid: &Grid, m: &MatVec, load: &[u64], cost: &[u64], devices: u32) -> Vec<Share> {
    let each = load.len() / devices as usize;
    let mut shares = vec![];
    for device in 0..devices {
        let sms = device as usize * each..(device as usize + 1) * each;
        if grid.is_dealt() {
            let own = share_of(grid.n, device, devices);
            shares.extend(sms.map(|sm| Share { sm, lo: own.start, hi: own.end, j: sm as u32, row: 0 }));
            continue;
        }
        let (units, of) = (share_of(grid.n, device, devices), Loads { load: &load[sms.clone()], cost: &cost[sms] });
        // One task of each SM before has an ordinal.
        let ordinal = if matches!(grid.second, Second::Ordinal(_)) { shares.len() } else { 0 };
        let own = units_on(program, grid, m, units, &of, ordinal);
        shares.extend(own.into_iter().map(|share| Share { sm: share.sm + device as usize * each, ..share }));
    }
    shares
}

/// What SMs of a device stream so far, and what a byte costs on each.
struct Loads<'a> {
    load: &'a [u64],
    cost: &'a [u64],
}

/// Divides the units of a device among its SMs. Every SM first gets as many as the longest share has; the surplus is then
/// taken back from the SMs that stream most. So an SM that reads history, has one more unit of a wide k, or is spared, gets fewer.
fn units_on(
    program: &Program,
    grid: &Grid,
    m: &MatVec,
    own: Range<u32>,
    Loads { load, cost }: &Loads<'_>,
    ordinals: usize,
) -> Vec<Share> {
    // Units of all slots.
    let each = own.len().max(1);
    let slots = if let Second::Axis(slots) = grid.second { slots } else { 1 };
    let n = own.len() * slots as usize;
    let (sms, unit) = (load.len(), m.unit_bytes(program.format_of(grid)));
    // Every SM must run a head task: its arg-max store is the release of what it wrote to the cache.
    let least = usize::from(matches!(m.epilogue, Epilogue::Logits { .. }));
    // An SM counts by its speed, one that is not spared as 1, so that the others have room for what spared ones leave.
    let speed: u64 = cost.iter().map(|cost| 1_000_000 / cost).sum();
    let most = (n as u64 * 1000).div_ceil(speed) as usize;
    let mut count = vec![most; sms];
    let all = load.iter().zip(*cost).enumerate();
    let mut fullest: BinaryHeap<(u64, Reverse<usize>)> =
        all.map(|(sm, (load, cost))| (load + most as u64 * unit * cost, Reverse(sm))).collect();
    for _ in n..most * sms {
        // The head has a unit for every SM, so one is left.
        let Some((load, Reverse(sm))) = fullest.pop() else { break };
        count[sm] -= 1;
        if count[sm] > least {
            fullest.push((load - unit * cost[sm], Reverse(sm)));
        }
    }
    let mut lo = 0;
    let busy = count.iter().enumerate().filter(|(_, units)| **units > 0).enumerate();
    let mut shares = vec![];
    for (ordinal, (sm, &units)) in busy {
        let end = lo + units;
        // A task has units of one slot.
        while lo < end {
            let (slot, first) = (lo / each, lo % each);
            let count = (end - lo).min(each - first);
            let j = if matches!(grid.second, Second::Ordinal(_)) { ordinals + ordinal } else { slot };
            let (first, last) = (own.start + first as u32, own.start + (first + count) as u32);
            shares.push(Share { sm, lo: first, hi: last, j: j as u32, row: 0 });
            lo += count;
        }
    }
    shares
}

/// Divides the launch indices of all other grids evenly.
///
/// Grids that touch the residual are divided the same way everywhere, because the residual stays where it is owned:
/// SM s owns units `s n / k .. (s + 1) n / k`.
fn even_shares(grid: &Grid, rows: u32, sms: usize, devices: u32, spread: &mut usize) -> Vec<Share> {
    let n = grid.n as usize;
    match &grid.op {
        // A state stays where it is: in every regime, and so whatever other grids there are, an SM has the same heads and parts of the
        // sequences. Layers begin elsewhere.
        Op::Mix(_) | Op::Scan(_) | Op::GroupNorm(_) => shards::state_shares(grid, sms, devices),
        op if op.everywhere() => {
            (0..n).map(|i| Share { sm: i, lo: i as u32, hi: i as u32 + 1, j: 0, row: 0 }).collect()
        }
        Op::Attention(a) if devices > 1 => {
            let start = *spread;
            *spread = (start + 1) % sms;
            shards::attention_shares(a, grid, rows, sms, devices, start)
        }
        Op::Attention(_) | Op::AttentionMerge { .. } | Op::Route(_) => {
            // One launch index a task, spread evenly over the SMs; each grid starts where the last one ended, so that no SM
            // serves attention in every layer.
            let (shares, rows) = (grid.second.extent() as usize, if grid.per_row { rows as usize } else { 1 });
            let total = n * shares * rows;
            let start = *spread;
            let out = (0..total)
                .map(|index| {
                    let (i, j, row) = (index / shares % n, index % shares, index / shares / n);
                    let sm = if total <= sms { (start + index * sms / total) % sms } else { (start + index) % sms };
                    Share { sm, lo: i as u32, hi: i as u32 + 1, j: j as u32, row: row as u32 }
                })
                .collect();
            *spread = (start + 1) % sms;
            out
        }
        Op::Report => vec![Share { sm: 0, lo: 0, hi: 1, j: 0, row: 0 }],
        _ => (0..sms)
            .map(|s| Share { sm: s, lo: (s * n / sms) as u32, hi: ((s + 1) * n / sms) as u32, j: 0, row: 0 })
            .filter(|share| share.lo < share.hi)
            .collect(),
    }
}

/// A loader begins a run of chosen units when its task's choice is there.
fn await_choices(program: &Program, r: &mut Regime) {
    for run in r.streams.iter_mut().flatten() {
        let task = &r.tasks[run.task.index()];
        let Some(choices) = program.grids[task.grid.index()].operand(Role::Choices) else { continue };
        let (lo, hi) = choices.cols.range(task.lo, task.hi, task.j);
        let of_choice = |event: &Event| {
            let same_row = event.row == row_of(choices, task);
            event.buffer == choices.buffer && same_row && (u64::from(event.lo), u64::from(event.hi)) == (lo, hi)
        };
        run.after = task.waits.iter().map(|wait| wait.event).find(|event| of_choice(&r.events[event.index()]));
    }
}

/// Columns that a task writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Writer {
    lo: u32,
    hi: u32,
    task: TaskId,
}

/// The row that an operand of a task touches; `None`: all.
fn row_of(operand: &Operand, task: &Task) -> Option<u32> {
    (operand.rows == Rows::Own).then_some(task.row)
}

/// Events from overlapping regions: one for each (exchange buffer, columns) that some task reads, signalled by every task
/// that writes any of those columns.
fn derive_events(program: &Program, r: &mut Regime, mechanism: Mechanism, target: &Target) {
    // Writers of each exchange buffer: of all rows, and of each row alone; ascending by first column. Regions of one list do not overlap,
    // but rows may be divided among tasks in different ways.
    let mut writers: Vec<BTreeMap<Option<u32>, Vec<Writer>>> = vec![BTreeMap::new(); program.buffers.len()];
    for (t, task) in r.tasks.iter().enumerate() {
        for operand in &program.grids[task.grid.index()].operands {
            if operand.access.writes() && program.buffers[operand.buffer.index()].space == Space::Exchange {
                let (lo, hi) = operand.cols.range(task.lo, task.hi, task.j);
                if lo < hi {
                    let writer = Writer { lo: lo as u32, hi: hi as u32, task: TaskId::from(t) };
                    writers[operand.buffer.index()].entry(row_of(operand, task)).or_default().push(writer);
                }
            }
        }
    }
    for list in writers.iter_mut().flat_map(|of_buffer| of_buffer.values_mut()) {
        list.sort_unstable();
    }
    // What is dealt has all dealt tasks as its writers, whatever a task reads of it: one event is about all of it.
    let dealt = program.dealt_buffers();
    let bulk = target.spec.copy == CopyMechanism::Bulk;
    // Kernels access all packets at one scope.
    let scope = if target.devices > 1 { Scope::System } else { Scope::Device };
    let mut known: BTreeMap<(BufferId, Option<u32>, u32, u32, bool), EventId> = BTreeMap::new();
    for t in 0..r.tasks.len() {
        let grid = &program.grids[r.tasks[t].grid.index()];
        for operand in &grid.operands {
            if operand.access != Access::Read || program.buffers[operand.buffer.index()].space != Space::Exchange {
                continue;
            }
            let (lo, hi) = operand.cols.range(r.tasks[t].lo, r.tasks[t].hi, r.tasks[t].j);
            if lo >= hi {
                continue;
            }
            let (mut lo, mut hi, row) = (lo as u32, hi as u32, row_of(operand, &r.tasks[t]));
            if dealt[operand.buffer.index()] {
                (lo, hi) = (0, program.buffers[operand.buffer.index()].cols);
                let about = |wait: &Wait| r.events[wait.event.index()].buffer == operand.buffer;
                if r.tasks[t].waits.iter().any(about) {
                    continue;
                }
            }
            // The arg-max pairs end a step: the next one reads them, and their event orders all plain memory of this step.
            let ends_step = operand.role == Role::Best;
            // A draft reads what the step before left.
            let carried = ends_step || matches!(grid.op, Op::Join { .. });
            let event = *known.entry((operand.buffer, row, lo, hi, carried)).or_insert_with(|| {
                let id = EventId::from(r.events.len());
                let mut producers: Vec<TaskId> = vec![];
                for (of, list) in &writers[operand.buffer.index()] {
                    if of.is_none() || row.is_none() || *of == row {
                        let first = list.partition_point(|w| w.hi <= lo);
                        producers.extend(list[first..].iter().take_while(|w| w.lo < hi).map(|w| w.task));
                    }
                }
                for &task in &producers {
                    r.tasks[task.index()].signals.push(id);
                }
                r.events.push(Event {
                    buffer: operand.buffer,
                    row,
                    lo,
                    hi,
                    count: producers.len() as u32,
                    mechanism: match mechanism {
                        _ if program.buffers[operand.buffer.index()].words => Mechanism::Words,
                        Mechanism::Packets if ends_step => Mechanism::Fenced,
                        other => other,
                    },
                    scope,
                    carried,
                    proxy: ends_step && bulk,
                });
                id
            });
            let count = r.events[event.index()].count;
            r.tasks[t].waits.push(Wait { event, count });
        }
    }
}
