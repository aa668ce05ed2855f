//! Derives a plan of waves from the schedule of a batch kernel.

use super::experts::{
    Chosen, FILLED_PLACES, SHARED_EXPERT_PASS_MAX, TILE_UNITS, expert_granules, expert_parts, gather_scratch,
    has_experts, has_groups, is_combined, route_scratch, same_norm, scores_cols, scores_groups, scores_rows,
    scores_scratch, unit_tiles_max,
};
use super::mix::{Carried, GateNorm, POSITIONS, group_channels, row_bytes, scan_cols};
use super::ragged::MERGE_SPLITS;
use super::{
    Action, BOX_PIECE_BYTES_MAX, BOX_UNITS, CHUNK_BLOCK_ROWS, Division, DivisionId, Form, HELD_AND_SUMS_MAX, Input,
    Layout, Machine, NormOf, Over, Plan, Products, ROWS_OF_LINE, Ring, SHARED_PASS_MAX, SHARED_UNITS, SHARED_WARPS,
    Share, Slots, Splits, Sum, Sums, TILE_WARPS, Target as Written, Tiling, WIDE_TILE, WIDE_UNITS, Warps, Wave, Work,
    WorkId, attends_wide, parts_of, sums_max, tile_sums_max, wide_tiles_max,
};
use crate::candidate::wave::{WAVE_KNOBS, WaveKnobs};
use crate::dtype::DType;
use crate::format::{Code, Format};
use crate::ir::layout::{PLACE_ALIGN_BYTES, cache_row_bytes, place_align, share_of};
use crate::ir::op::{
    Attention, Combine, Convolve, Epilogue, GroupNorm, MatVec, Mix, NormAttr, Op, QkNormAttr, Role, Route, Scan,
};
use crate::ir::program::{Grid, Program};
use crate::ir::schedule::Schedule;
use crate::ir::{BufferId, GridId};
use crate::target::{CopyMechanism, DotMechanism, Target, TargetKind};
use std::collections::{BTreeMap, BTreeSet};
use thiserror::Error;

/// Why there is no plan. Batch kernels then read prompts and run steps.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Refused {
    #[error("target `{target}` {lacks}")]
    Target { target: String, lacks: &'static str },
    #[error("{what} of `{grid}`: expected {expected}")]
    Grid { grid: String, what: &'static str, expected: &'static str },
    #[error("the ring has {slots} slots of {slot_bytes} bytes on target `{target}`: expected 2 at least")]
    SharedMemory { slots: u32, slot_bytes: u32, target: String },
    #[error("steps of {rows} rows: expected whole tiles of 16, up to {most}")]
    Rows { rows: u32, most: u32 },
    #[error("no history of up to {context_max} positions is long enough to be cut")]
    Histories { context_max: u32 },
    #[error("`{knob}` is {value}, expected {expected}")]
    Knob { knob: &'static str, value: u32, expected: String },
}

/// Warps that multiply, and warps of the loader. The loader gives registers up, and the others take them.
const WARPS: u32 = 8;
const LOADER_WARPS: u32 = 4;
const REGISTERS: u32 = 216;
const LOADER_REGISTERS: u32 = 72;
const SLOTS_MAX: u32 = 8;
/// Most positions of a tile of attention, and in a step most bytes of its keys and values.
const TILE_MAX: u32 = 64;
const STEP_TILE_BYTES_MAX: u32 = 16 << 10;
/// Bytes of the ring of inputs in a plan of chunks. A slot holds 64 columns of a block of rows, or 128 if a granule of codes is that long.
const CHUNK_INPUT_BYTES: u32 = 96 << 10;
/// The same with both operands in shared memory, which makes room for one more slot of weights.
const CHUNK_INPUT_BYTES_SHARED: u32 = 64 << 10;
/// The same with experts, whose waves take scratch: so the ring of weights keeps as many slots.
const CHUNK_INPUT_BYTES_BESIDE_SCRATCH: u32 = 80 << 10;
/// Least scratch of chunks with experts.
const CHUNK_SCRATCH_BYTES: u32 = 16 << 10;
/// A slot of weights of steps, and of experts in chunks.
const STEP_WEIGHT_BYTES: u32 = 16 << 10;
const CHUNK_EXPERT_BYTES: u32 = 32 << 10;
/// The same of a step: a chunk of sixteen units.
const STEP_EXPERT_BYTES: u32 = 32 << 10;
const STEP_EXPERT_CODES_BYTES: u32 = 18 << 10;
/// Most bytes of heads that a step leaves in packets: more take longer to write and to poll than a meeting takes (docs/perf-log.md, entry 33).
const PACKET_BYTES_MAX: u64 = 4 << 20;
/// Chunks of weights that products hold while blocks meet.
const HELD_CHUNKS: u32 = 4;
/// How many parts of k a product of a step may have. Four are not faster (docs/perf-log.md, entry 23).
const PARTS: [u32; 2] = [1, 2];
/// How many a product of a chunk of one block may have (docs/perf/wave.md, entry 50), and least granules of a part: fewer do not fill the rings.
const CHUNK_PARTS: [u32; 3] = [8, 4, 2];
const CHUNK_PART_GRANULES: u32 = 8;
/// Most parts of a row in a wave of rows. The next product adds up a sum of squares of each.
const ROW_PARTS_MAX: u32 = 8;
const WHOLE_ROWS: Over = Over::Rows { parts: 1 };
/// Single rows, of which neighbouring SMs have neighbouring ones.
const ROWS_IN_TURN: Over = Over::Heads { n: 1, rows: 1, kept: 1 };
/// Bytes of an operand of 16 rows and 32 columns.
const SPAN_BYTES: u32 = 1024;
/// What a step of the loop costs besides its products, as bytes of shared memory that could be read in that time.
const STEP_COST_BYTES: u32 = 32 << 10;

/// Bytes of keys and values of a KV head in a KV split. An SM reads them in about 10 us while all SMs read. At the end of a split warps add up,
/// and meanwhile the ring has enough copies on their way.
const SPLIT_BYTES: u32 = 256 << 10;
/// Most bytes that splits may leave. For longer contexts the splits are longer.
const SPLITS_LEFT_BYTES: u64 = 256 << 20;

/// A plan of launches of `form` of up to `rows` rows for the program of `schedule`, whose pack, caches and pages it shares.
///
/// # Errors
/// What wave kernels cannot do, of this program or on this target.
pub fn derive(schedule: &Schedule, target: &Target, form: Form, rows: u32) -> Result<Plan, Refused> {
    derive_chosen(schedule, target, form, rows, &WaveKnobs::default())
}

/// As [`derive`], with some choices made by `knobs` instead of the rules of this file.
///
/// # Errors
/// As [`derive`]; a knob that the form lacks, or that does not fit the program or the target.
pub fn derive_chosen(
    schedule: &Schedule,
    target: &Target,
    form: Form,
    rows: u32,
    knobs: &WaveKnobs,
) -> Result<Plan, Refused> {
    refuse_knobs(form, knobs)?;
    derive_like(schedule, target, form, rows, Asked { order: None, cuts: Cuts::None, tiles: true, knobs: *knobs })
}

/// Refuses values that knobs do not have, and knobs of another form.
fn refuse_knobs(form: Form, knobs: &WaveKnobs) -> Result<(), Refused> {
    for (knob, value) in WAVE_KNOBS.iter().zip(knobs.values()) {
        let (has, what) = match form {
            Form::Chunk => (knob.of_chunks, "a plan of chunks"),
            Form::Steps => (knob.of_steps, "a plan of steps"),
            Form::Tail => (false, "a tail"),
        };
        if knob.refuse(value).is_err() {
            let all: Vec<String> = knob.values.iter().map(u32::to_string).collect();
            return refused_knob(knob.name, value, format!("one of {}", all.join(", ")));
        }
        if value != 0 && !has {
            return refused_knob(knob.name, value, format!("0, because {what} has no such choice"));
        }
    }
    Ok(())
}

fn refused_knob<T>(knob: &'static str, value: u32, expected: impl Into<String>) -> Result<T, Refused> {
    Err(Refused::Knob { knob, value, expected: expected.into() })
}

/// A plan of steps of up to `rows` rows that cuts into KV splits the histories for which [`super::Ragged::gains`] can be true.
///
/// # Errors
/// As [`derive`]; no history is long enough.
pub fn derive_ragged(schedule: &Schedule, target: &Target, rows: u32) -> Result<Plan, Refused> {
    derive_cut(schedule, target, rows, Cuts::Long)
}

/// As [`derive_ragged`], with splits of `positions` positions: a power of two, and whole tiles. Every longer history is cut.
///
/// # Errors
/// As [`derive_ragged`].
pub fn derive_split(schedule: &Schedule, target: &Target, rows: u32, positions: u32) -> Result<Plan, Refused> {
    derive_cut(schedule, target, rows, Cuts::At(positions))
}

fn derive_cut(schedule: &Schedule, target: &Target, rows: u32, cuts: Cuts) -> Result<Plan, Refused> {
    let asked = Asked { order: None, cuts, tiles: true, knobs: WaveKnobs::default() };
    let plan = derive_like(schedule, target, Form::Steps, rows, asked)?;
    match plan.waves.iter().any(|wave| matches!(wave.action, Action::Merge { .. })) {
        true => Ok(plan),
        false => Err(Refused::Histories { context_max: schedule.program.context_max }),
    }
}

/// A plan of steps for each number in `rows`, ascending. All add up in the order of the plan for most rows. A plan for fewer rows is left out if it
/// cannot take that order.
///
/// # Errors
/// Why there is no plan for most rows.
pub fn derive_alike(schedule: &Schedule, target: &Target, rows: &[u32]) -> Result<Vec<Plan>, Refused> {
    let Some((&most, fewer)) = rows.split_last() else { return Ok(vec![]) };
    // Whether warpgroups add up tiles of 32 and of 64 rows alike is not known.
    let free = Asked { order: None, cuts: Cuts::None, tiles: false, knobs: WaveKnobs::default() };
    let largest = derive_like(schedule, target, Form::Steps, most, free)?;
    let order = largest.order();
    let asked = Asked { order: Some(&order), ..free };
    let alike = |&rows: &u32| derive_like(schedule, target, Form::Steps, rows, asked).ok();
    let mut plans: Vec<Plan> = fewer.iter().filter_map(alike).filter(|plan| plan.order() == order).collect();
    plans.push(largest);
    Ok(plans)
}

/// What the caller decides.
#[derive(Clone, Copy)]
struct Asked<'a> {
    /// The order of the sums of each wave.
    order: Option<&'a [Sums]>,
    cuts: Cuts,
    /// Whether products may be tiles.
    tiles: bool,
    knobs: WaveKnobs,
}

/// Which histories are cut into KV splits.
#[derive(Clone, Copy)]
enum Cuts {
    None,
    /// Only if the longest has more than `MERGE_SPLITS` splits: fewer cannot be faster.
    Long,
    /// Those of more positions than this, the positions of a split.
    At(u32),
}

/// As [`derive`]. If an order is asked for, the plan takes its parts and groups.
fn derive_like(schedule: &Schedule, target: &Target, form: Form, rows: u32, asked: Asked<'_>) -> Result<Plan, Refused> {
    refuse_target(target)?;
    if target.devices > 1 {
        refuse_on_devices(&schedule.program, asked.cuts, target)?;
    }
    let spec = &target.spec;
    let (program, knobs) = (&schedule.program, &asked.knobs);
    let products = chosen_products(program, target, form, knobs)?;
    let Memory { inputs, scratch_bytes, state_bytes } = match form {
        Form::Chunk => Memory::of_chunk(program, spec.sm_count, products, knobs),
        Form::Steps | Form::Tail => {
            let most = super::STEP_ROWS_MAX;
            if !(16..=most).contains(&rows) || !rows.is_power_of_two() {
                return Err(Refused::Rows { rows, most });
            }
            Memory::of_step(program, rows, knobs)
        }
    };
    let block_rows = if form == Form::Chunk { CHUNK_BLOCK_ROWS } else { rows };
    let machine = Machine {
        target: target.name.clone(),
        sms: target.sms(),
        devices: target.devices,
        warps: WARPS,
        products,
        pairs: shares_weights(products, target, knobs),
        loader_warps: LOADER_WARPS,
        registers: REGISTERS,
        loader_registers: LOADER_REGISTERS,
        // Its size follows from the products, at the end.
        weights: Ring { slots: 0, slot_bytes: 0 },
        inputs,
        scratch_bytes,
        state_bytes,
    };
    let rows = rows.next_multiple_of(block_rows);
    let plan = Plan { form, rows, block_rows, machine, work: vec![], waves: vec![], divisions: vec![] };
    let mut b = Builder {
        program,
        schedule,
        plan,
        asked,
        overs: vec![],
        inputs: BTreeMap::new(),
        residual: None,
        published: None,
        normed: None,
        choice: None,
        shared: None,
        gates: BTreeMap::new(),
        cluster_max: spec.cluster_max,
        warpgroup_mma: spec.warpgroup_mma,
    };
    let last = program.last_append();
    let first = if form == Form::Tail { b.take_residual()? } else { 0 };
    for (g, grid) in program.grids.iter().enumerate().skip(first) {
        let ends = form == Form::Chunk && Some(GridId::from(g)) == last;
        b.grid(GridId::from(g), grid, ends)?;
        if ends {
            break;
        }
    }
    b.divide();
    let mut plan = b.plan;
    share_results(&mut plan);
    plan.machine.weights = weight_ring(program, &plan, target, knobs)?;
    box_weights(program, &mut plan);
    if form == Form::Steps {
        hold(program, &mut plan, knobs.held);
    }
    Ok(plan)
}

/// Of several devices: what waves leave that each device has done in part goes to all, unless it is a residual that only the same units add to.
fn share_results(plan: &mut Plan) {
    if plan.machine.devices == 1 {
        return;
    }
    let parted: Vec<usize> = (0..plan.waves.len()).filter(|w| plan.sums_of(*w).is_some()).collect();
    for w in parted {
        let all = !plan.keeps_columns(w);
        if let Action::MatMul { target: Written::Sums { shown, .. }, .. } = &mut plan.waves[w].action {
            *shown = all;
        }
    }
    let is_whole = |id: WorkId, wave: &Wave| match wave.action {
        Action::MatMul { target: Written::Residual(residual), .. } if residual == id => false,
        _ => wave.action.accesses().0.contains(&id),
    };
    let divided = plan.waves.iter().filter(|wave| wave.action.is_divided());
    // Of a residual to which sums are added, waves say themselves where it goes.
    let kept = |wave: &Wave| match wave.action {
        Action::MatMul { target: Written::Sums { residual, .. }, .. } => Some(residual),
        _ => None,
    };
    let written = |wave: &Wave| wave.action.accesses().1.into_iter().filter(|id| kept(wave) != Some(*id)).collect();
    let written: BTreeSet<WorkId> = divided.flat_map::<Vec<_>, _>(written).collect();
    for id in written {
        let layout = plan.work[id.index()].layout;
        // The host reads the best logits, and a tail the residual of its chunk.
        let is_left = layout == Layout::Best || plan.form == Form::Chunk;
        plan.work[id.index()].everywhere = is_left || plan.waves.iter().any(|wave| is_whole(id, wave));
    }
}

fn refuse_target(target: &Target) -> Result<(), Refused> {
    let spec = &target.spec;
    let lacks = |lacks| Err(Refused::Target { target: target.name.clone(), lacks });
    if target.kind != TargetKind::Cuda || spec.copy != CopyMechanism::Bulk || spec.dot != DotMechanism::Mma {
        return lacks("has no bulk copies or no tensor cores");
    }
    if !spec.register_reallocation {
        return lacks("does not move registers between warps");
    }
    Ok(())
}

/// Refuses waves whose work is dealt out by number, or whose state another wave carries on: none of several devices has its part of these.
fn refuse_on_devices(program: &Program, cuts: Cuts, target: &Target) -> Result<(), Refused> {
    let lacks = |lacks| Err(Refused::Target { target: target.name.clone(), lacks });
    let has = |which: fn(&Op) -> bool| program.grids.iter().any(|grid| which(&grid.op));
    match () {
        () if has_experts(program) => lacks("has several devices, and wave kernels with experts run on one"),
        () if has(|op| matches!(op, Op::Mix(_) | Op::Scan(_) | Op::Convolve(_))) => {
            lacks("has several devices, and wave kernels with recurrent states run on one")
        }
        () if !matches!(cuts, Cuts::None) => {
            lacks("has several devices, and KV splits are dealt out among the SMs of one")
        }
        () => Ok(()),
    }
}

/// Shared memory of a block without its ring of weights. That ring gets the rest: the longer it is, the more weights arrive while the SMs meet.
struct Memory {
    inputs: Ring,
    scratch_bytes: u32,
    state_bytes: u32,
}

impl Memory {
    /// Of a chunk. Waves of experts use scratch, and those of states what the ring of inputs has no room for.
    fn of_chunk(program: &Program, sms: u32, products: Products, knobs: &WaveKnobs) -> Memory {
        let (input_bytes, scratch_bytes) = if has_experts(program) {
            let scratch_bytes = experts_scratch(program, Form::Chunk).max(CHUNK_SCRATCH_BYTES);
            match products {
                Products::Shared => (CHUNK_INPUT_BYTES_SHARED, scratch_bytes),
                Products::Warps | Products::Warpgroups => (CHUNK_INPUT_BYTES_BESIDE_SCRATCH, scratch_bytes),
            }
        } else if products == Products::Shared && carried(program).all(|states| !states.solves) {
            (CHUNK_INPUT_BYTES_SHARED, 0)
        } else {
            (CHUNK_INPUT_BYTES, 0)
        };
        let Ring { slots, slot_bytes } = chunk_inputs(program, input_bytes);
        let inputs = Ring { slots: chosen(knobs.input_slots).unwrap_or(slots), slot_bytes };
        let bytes = |states: Carried| states.parts(sms).map_or(0, |parts| states.chunk_bytes(parts));
        let of_states = carried(program).map(bytes).max().unwrap_or(0).saturating_sub(inputs.bytes());
        let scratch_bytes = scratch_bytes.max(of_states.next_multiple_of(128));
        Memory { inputs, scratch_bytes, state_bytes: (2 << 10) + turns_bytes(program) }
    }

    /// Of a step, or a tail. The inputs of 64 rows are twice as long as those of 32, so there is a slot of weights less for one of inputs (docs/perf-log.md,
    /// entry 33). Of 128 rows a slot has 128 columns, one half for each of two warpgroups that share k; scratch has what pairs of blocks send. Most of what a
    /// mixture streams are weights of experts, so it has a slot of inputs less.
    fn of_step(program: &Program, rows: u32, knobs: &WaveKnobs) -> Memory {
        let (slots, slot_bytes) = match rows {
            ..=32 => (4, 16 << 10),
            33..=64 => (5, 16 << 10),
            _ => (3, 32 << 10),
        };
        let slots = if has_experts(program) { slots - 1 } else { slots };
        let slots = chosen(knobs.input_slots).unwrap_or(slots);
        let (scratch_bytes, state_bytes) = if rows <= 64 { (32 << 10, 2 << 10) } else { (36 << 10, 4 << 10) };
        let of_grid = |grid: &Grid| row_bytes(&grid.op, WARPS);
        let of_states = program.grids.iter().map(of_grid).max().unwrap_or(0).next_multiple_of(128);
        let scratch_bytes = experts_scratch(program, Form::Steps).max(scratch_bytes).max(of_states);
        let state_bytes = state_bytes + turns_bytes(program);
        Memory { inputs: Ring { slots, slot_bytes }, scratch_bytes, state_bytes }
    }
}

/// Bytes of the state of a block for turns at items of experts.
fn turns_bytes(program: &Program) -> u32 {
    if has_experts(program) { 1 << 10 } else { 0 }
}

/// The value of a knob; `None`: the rule decides.
fn chosen(value: u32) -> Option<u32> {
    (value > 0).then_some(value)
}

/// The ring of weights of a plan: as many slots as its block has room for beside everything else, unless a knob says how many.
fn weight_ring(program: &Program, plan: &Plan, target: &Target, knobs: &WaveKnobs) -> Result<Ring, Refused> {
    let m = &plan.machine;
    let slot_bytes = weight_bytes(program, plan).next_multiple_of(1024);
    let used = m.state_bytes + m.inputs.bytes() + m.scratch_bytes;
    let room = target.spec.smem_bytes_per_block_max.saturating_sub(used) / slot_bytes.max(1);
    if room < 2 && knobs.input_slots > 0 {
        return refused_knob("wave_input_slots", knobs.input_slots, "fewer, which leave room for two slots of weights");
    }
    if room < 2 {
        return Err(Refused::SharedMemory { slots: room, slot_bytes, target: target.name.clone() });
    }
    match chosen(knobs.slots) {
        Some(slots) if slots > room => {
            refused_knob("wave_slots", slots, format!("at most {room}, as many as shared memory has room for"))
        }
        slots => Ok(Ring { slots: slots.unwrap_or(room.min(SLOTS_MAX)), slot_bytes }),
    }
}

/// Decides which products hold their first chunks of weights: those of whole units, if registers have room. Products of parts of k are slower with it
/// (docs/perf-log.md, entry 34).
fn hold(program: &Program, plan: &mut Plan, knob: u32) {
    let chunks = match knob {
        0 => HELD_CHUNKS,
        1 => 0,
        chunks => chunks,
    };
    let (slots, input_bytes) = (plan.machine.weights.slots, plan.machine.inputs.slot_bytes);
    for wave in &mut plan.waves {
        let grid = &program.grids[wave.grid.index()];
        let Op::MatVec(m) = &grid.op else { continue };
        let Action::MatMul { pass, chunk, warps, tiles: false, ref mut held, .. } = wave.action else { continue };
        let division = &plan.divisions[wave.division.index()];
        if !matches!(division.over, Over::Units { parts: 1, .. }) {
            continue;
        }
        let format = program.format_of(grid);
        let matrix = Matrix::of(m, format);
        let of_warp = pass.div_ceil(warps.units);
        let input_chunks = input_bytes / (plan.block_rows * 64 * matrix.granule_spans) / chunk;
        let sums = plan.block_rows / 16 / warps.rows * of_warp * 4;
        *held = if format.is_plain()
            && chunks < slots
            && chunks.is_multiple_of(input_chunks.max(1))
            && chunks * chunk <= matrix.granules
            && sums + chunks * (chunk / warps.k) * of_warp * 4 <= HELD_AND_SUMS_MAX
        {
            chunks
        } else {
            0
        };
    }
}

/// A matrix that is multiplied with blocks of rows: no router, and none of an expert.
fn of_blocks<'a>(program: &Program, grid: &'a Grid) -> Option<(&'a MatVec, Format)> {
    match &grid.op {
        Op::MatVec(m) if m.epilogue != Epilogue::Scores && Chosen::of(program, grid).is_none() => {
            Some((m, program.format_of(grid)))
        }
        _ => None,
    }
}

/// The ring of inputs of a chunk, in `bytes` bytes.
fn chunk_inputs(program: &Program, bytes: u32) -> Ring {
    let matvecs = program.grids.iter().filter_map(|grid| of_blocks(program, grid));
    let granule_k = matvecs.map(|(m, format)| format.granule_k() * m.parts()).max().unwrap_or(0);
    let slot_bytes = granule_k.max(64) * 2 * CHUNK_BLOCK_ROWS;
    Ring { slots: bytes / slot_bytes, slot_bytes }
}

/// The states with matrices of a program.
fn carried(program: &Program) -> impl Iterator<Item = Carried> {
    program.grids.iter().filter_map(|grid| Carried::of(&grid.op))
}

/// Bytes of scratch that waves of experts need.
fn experts_scratch(program: &Program, form: Form) -> u32 {
    let of_grid = |grid: &Grid| match &grid.op {
        Op::Route(route) => route_scratch(route, WARPS).max(gather_scratch(route.experts, route.top_k)),
        Op::MatVec(m) if m.epilogue == Epilogue::Scores => scores_scratch(WARPS, form),
        _ => 0,
    };
    program.grids.iter().map(of_grid).max().unwrap_or(0).next_multiple_of(128)
}

/// How products of a plan multiply. Warpgroups multiply units of eight rows of one part of k. Their chunk is a whole slot of inputs, so the chunks of
/// all matrices must have equally many columns.
fn products(program: &Program, target: &Target, form: Form) -> Products {
    let of_chunk = program.last_append().map_or(0, |last| last.index());
    let mut matrices = program.grids[..of_chunk].iter().filter_map(|grid| of_blocks(program, grid));
    let chunk_k = |format: Format| format.granule_k().max(64);
    let longest = matrices.clone().map(|(_, format)| chunk_k(format)).max().unwrap_or(0);
    let wide = |(m, format): (&MatVec, Format)| {
        (!format.is_plain() || format == Format::plain(DType::Bf16)) && m.parts() == 1 && chunk_k(format) == longest
    };
    // Matrices of experts, too, although they have no blocks of rows.
    let chosen = program.grids.iter().filter(|grid| Chosen::of(program, grid).is_some());
    let of_experts = chosen.map(|grid| program.format_of(grid));
    let plain = matrices.clone().map(|(_, format)| format).chain(of_experts).all(|format| format.is_plain());
    if form != Form::Chunk || !target.spec.warpgroup_mma || !matrices.all(wide) {
        Products::Warps
    } else if plain {
        Products::Shared
    } else {
        Products::Warpgroups
    }
}

/// The same, unless a knob asks for others.
fn chosen_products(program: &Program, target: &Target, form: Form, knobs: &WaveKnobs) -> Result<Products, Refused> {
    match (knobs.products, products(program, target, form)) {
        (1, _) => Ok(Products::Warps),
        (2, Products::Warps) => refused_knob(
            "wave_products",
            2,
            "1, because warpgroups do not multiply these matrices, or not on this target",
        ),
        (2, _) => Ok(Products::Warpgroups),
        (_, best) => Ok(best),
    }
}

/// Whether the two blocks of a pair share the weights of a chunk (docs/perf/wave.md, entry 48).
fn shares_weights(products: Products, target: &Target, knobs: &WaveKnobs) -> bool {
    let spec = &target.spec;
    products == Products::Shared && knobs.pairs == 0 && spec.cluster_max >= 2 && spec.sm_count.is_multiple_of(2)
}

/// Bytes of the largest chunk of weights of any wave.
fn weight_bytes(program: &Program, plan: &Plan) -> u32 {
    let of_wave = |wave: &Wave| match (&wave.action, &program.grids[wave.grid.index()].op) {
        (Action::MatMul { pass, chunk, warps, tiles, .. }, Op::MatVec(_)) => {
            let format = program.format_of(&program.grids[wave.grid.index()]);
            // A tile also reads units that do not exist: of plain weights what lies there, of codes the last unit again.
            let units = match (tiles, format.is_plain()) {
                (true, true) => Products::Warpgroups.padded(*pass, *warps),
                (true, false) => *pass,
                (false, _) => plan.machine.products.padded(*pass, *warps),
            };
            units * chunk * format.granule_bytes()
        }
        // With both operands in shared memory these slots have the places of a tile.
        (Action::Experts { x, chunk, .. }, Op::MatVec(_)) if plan.machine.products == Products::Shared => {
            let Layout::Grouped(tiling) = plan.work[x.index()].layout else { return 0 };
            tiling.rows * 64 * chunk
        }
        (Action::Experts { pass, chunk, .. }, Op::MatVec(_)) => {
            let format = program.format_of(&program.grids[wave.grid.index()]);
            pass.next_multiple_of(TILE_UNITS) * chunk * format.granule_bytes()
        }
        _ => 0,
    };
    plan.waves.iter().map(of_wave).max().unwrap_or(0)
}

/// Short pieces of weights are copied in boxes: one copy for many units.
fn box_weights(program: &Program, plan: &mut Plan) {
    let swizzled = plan.machine.products == Products::Shared;
    for wave in &mut plan.waves {
        let (Action::MatMul { pass, chunk, .. } | Action::Experts { pass, chunk, .. }) = wave.action else { continue };
        let format = program.format_of(&program.grids[wave.grid.index()]);
        if chunk * format.granule_bytes() <= BOX_PIECE_BYTES_MAX {
            let all = [pass, pass.saturating_sub(1).max(1), BOX_UNITS];
            wave.boxes = if swizzled { vec![BOX_UNITS] } else { all.to_vec() };
        }
    }
}

/// How a block multiplies units of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    pass: u32,
    chunk: u32,
    warps: Warps,
}

/// A matrix as products see it.
#[derive(Debug, Clone, Copy)]
struct Matrix {
    /// Spans of 32 columns in a granule, granules in a unit, and bytes of a granule.
    granule_spans: u32,
    granules: u32,
    granule_bytes: u32,
    /// Whether a group of weights has its own sums in registers.
    grouped: bool,
}

impl Matrix {
    fn of(m: &MatVec, format: Format) -> Matrix {
        let granule_k = format.granule_k() * m.parts();
        Matrix {
            granule_spans: granule_k / 32,
            granules: m.k.div_ceil(granule_k),
            granule_bytes: format.granule_bytes(),
            grouped: format.groups.is_some(),
        }
    }

    /// Fewest granules of a chunk: 64 columns, or one granule that is longer.
    fn least_chunk(&self) -> u32 {
        (2 / self.granule_spans).max(1)
    }

    /// Granules of a part of k. Parts are whole blocks of 64 columns.
    fn part(&self, parts: u32) -> u32 {
        self.granules.div_ceil(parts).next_multiple_of(self.least_chunk())
    }

    /// Whether none of `parts` parts is empty.
    fn divides(&self, parts: u32) -> bool {
        self.part(parts) * (parts - 1) < self.granules
    }

    /// How warps multiply in a plan of chunks: 64 columns of the units of a pass at once, or a granule that is longer.
    fn chunk_shape(&self, longest: u32, knobs: &WaveKnobs) -> Shape {
        let warps = Warps { rows: 2, units: 4, k: 1 };
        let most = sums_max(self.grouped) / (CHUNK_BLOCK_ROWS / 16 / warps.rows * 4) * warps.units;
        let most = chosen(knobs.pass).map_or(most, |pass| most.min(pass));
        let pass = longest.div_ceil(longest.div_ceil(most).max(1)).max(1);
        Shape { pass, chunk: self.least_chunk(), warps }
    }

    /// The same for warpgroups. Together they multiply a tile of 16 units by all rows, or of 8 units if each has half of the rows. In the second case every
    /// weight is read twice, which costs about an eighth.
    fn wide_shape(&self, longest: u32, knobs: &WaveKnobs) -> Shape {
        let shapes = [Warps { rows: 1, units: 8, k: 1 }, Warps { rows: 2, units: 4, k: 1 }].map(|warps| {
            let tile = WIDE_UNITS * warps.units;
            let units = longest.max(1).next_multiple_of(tile);
            let most = wide_tiles_max(CHUNK_BLOCK_ROWS / warps.rows, self.grouped) * tile;
            let most = chosen(knobs.pass).map_or(most, |pass| most.min((pass / tile).max(1) * tile));
            (units * (7 + warps.rows), Shape { pass: units.min(most), chunk: self.least_chunk(), warps })
        });
        let [all, halves] = shapes;
        let by_halves = chosen(knobs.row_groups).map_or(halves.0 < all.0, |groups| groups == 2);
        if by_halves { halves.1 } else { all.1 }
    }

    /// The same with both operands in shared memory.
    fn shared_shape(&self, longest: u32, knobs: &WaveKnobs) -> Shape {
        let most = chosen(knobs.pass).map_or(SHARED_PASS_MAX, |pass| pass.min(SHARED_PASS_MAX));
        let pass = longest.max(1).next_multiple_of(SHARED_UNITS).min(most);
        Shape { pass, chunk: self.least_chunk(), warps: SHARED_WARPS }
    }

    /// How a block multiplies `rows` rows of a step by up to `longest` units: the shape for which warps read fewest bytes of shared memory. `groups` is the
    /// number of groups of k, if it is not free.
    fn step_shape(
        &self,
        rows: u32,
        longest: u32,
        parts: u32,
        machine: &Machine,
        (groups, knobs): (Option<u32>, &WaveKnobs),
        paired: bool,
    ) -> Option<Shape> {
        let (tiles, input_spans) = (rows / 16, machine.inputs.slot_bytes / (rows * 64));
        let (part, weight_bytes) = (self.part(parts), step_weight_bytes(knobs));
        let asked = |knob: u32, value: u32| chosen(knob).is_none_or(|asked| asked == value);
        let mut best: Option<(u64, Shape)> = None;
        let powers = || [1, 2, 4, 8].into_iter();
        for (by_rows, by_units) in powers().flat_map(|rows| powers().map(move |units| (rows, units))) {
            if by_rows * by_units > WARPS || !tiles.is_multiple_of(by_rows) {
                continue;
            }
            if !asked(knobs.row_groups, by_rows) || !asked(knobs.unit_groups, by_units) {
                continue;
            }
            let warps = Warps { rows: by_rows, units: by_units, k: WARPS / (by_rows * by_units) };
            if groups.is_some_and(|groups| groups != warps.k) {
                continue;
            }
            let by_sums = sums_max(self.grouped) / (tiles / by_rows * 4) * by_units;
            let least = self.least_chunk();
            let most = by_sums.min(weight_bytes / (least * self.granule_bytes) / by_units * by_units);
            let most = chosen(knobs.pass).map_or(most, |pass| most.min(pass));
            if most == 0 {
                continue;
            }
            let pass = longest.div_ceil(longest.div_ceil(most)).max(1);
            let padded = pass.next_multiple_of(by_units);
            let room = weight_bytes / (padded * self.granule_bytes);
            let mut chunk = least;
            while 2 * chunk <= room && chunk < part {
                chunk *= 2;
            }
            let step_granules = (chunk * self.granule_spans).min(input_spans) / self.granule_spans;
            let scratch = if paired { pair_scratch(rows, warps, padded) } else { WARPS * tiles / by_rows * 512 };
            let fits = scratch <= machine.scratch_bytes && !(paired && pass < longest);
            if step_granules == 0 || !step_granules.is_multiple_of(warps.k) || !fits || !input_spans.is_multiple_of(2) {
                continue;
            }
            let [passes, spans] = [longest.div_ceil(pass), part * self.granule_spans].map(u64::from);
            // For each span, each group of units reads the input, and each group of rows reads the weights. Groups of k exchange their sums at the end.
            // Each step of the loop has a price of its own.
            let each = tiles * SPAN_BYTES * by_units + padded * 512 * by_rows;
            let ends = if warps.k > 1 { 2 * warps.k * tiles * padded * 512 } else { 0 };
            let steps = part.div_ceil(step_granules);
            // A few SMs with a large vocabulary read more than 4 GiB.
            let cost =
                passes * (u64::from(each) * spans + u64::from(ends) + u64::from(steps) * u64::from(STEP_COST_BYTES));
            if best.is_none_or(|(least, _)| cost < least) {
                best = Some((cost, Shape { pass, chunk, warps }));
            }
        }
        best.map(|(_, shape)| shape)
    }
}

/// Most bytes of a slot of weights of a step.
fn step_weight_bytes(knobs: &WaveKnobs) -> u32 {
    chosen(knobs.slot_kib).map_or(STEP_WEIGHT_BYTES, |kib| kib << 10)
}

/// Bytes of scratch that a block of a pair needs for `padded` units. It holds the sums that the other block sends for half of the rows, and the
/// squares of the block's own half. It also holds the sums of one unit for each warp in half of the groups of k; the other half add theirs to these.
fn pair_scratch(rows: u32, warps: Warps, padded: u32) -> u32 {
    padded * (rows * 16 + rows / 2 * 4) + WARPS / warps.k * (warps.k / 2).max(1) * (rows / 16 / warps.rows) * 512
}

struct Builder<'a> {
    program: &'a Program,
    schedule: &'a Schedule,
    plan: Plan,
    asked: Asked<'a>,
    /// What each wave divides among SMs.
    overs: Vec<Over>,
    /// The buffer of each exchange of the program. Exchanges of sums are in the residual instead.
    inputs: BTreeMap<BufferId, WorkId>,
    residual: Option<WorkId>,
    /// The exchange of the program that has the current value of the residual.
    published: Option<BufferId>,
    /// What the last wave of rows that normalised left.
    normed: Option<Normed>,
    /// What the last router chose.
    choice: Option<Choice>,
    /// What the shared expert of the layer left.
    shared: Option<WorkId>,
    /// Of what Mamba-2 leaves for a norm with its gate: the columns that have the gate.
    gates: BTreeMap<BufferId, WorkId>,
    /// Most blocks of a cluster on the target.
    cluster_max: u32,
    warpgroup_mma: bool,
}

/// A residual, normalised or as it is, whole.
#[derive(Clone, Copy)]
struct Normed {
    to: WorkId,
    /// The exchange of the program that has the residual.
    of: BufferId,
    norm: Option<NormOf>,
    /// Of what lacks the factor of the norm.
    squares: Option<WorkId>,
}

/// Buffers of a choice, and of what follows from it.
#[derive(Clone, Copy)]
struct Choice {
    scores: WorkId,
    choices: WorkId,
    shares: WorkId,
    groups: WorkId,
    places: WorkId,
    tiling: Tiling,
}

fn refused<T>(grid: &Grid, what: &'static str, expected: &'static str) -> Result<T, Refused> {
    Err(Refused::Grid { grid: grid.name.clone(), what, expected })
}

impl Builder<'_> {
    fn grid(&mut self, id: GridId, grid: &Grid, is_last: bool) -> Result<(), Refused> {
        match &grid.op {
            Op::Select | Op::Report => Ok(()),
            Op::Embed { scale, everywhere: false } => self.embed(id, grid, *scale),
            Op::MatVec(m) if m.slots > 1 || grid.operand(Role::Shares).is_some() => {
                refused(grid, "the product", "one of a single slot, which no share multiplies")
            }
            Op::MatVec(m) if m.epilogue == Epilogue::Scores => self.scores(id, grid, m),
            Op::MatVec(m) if Chosen::of(self.program, grid).is_some() => self.experts(id, grid, m),
            Op::MatVec(m) => self.matvec(id, grid, m),
            Op::Route(route) => self.route(id, grid, route),
            Op::Combine(combine) => self.combine(id, grid, combine),
            Op::Attention(a) => self.attention(id, grid, a, is_last),
            Op::Mix(mix) => self.mix(id, grid, mix, is_last),
            Op::Convolve(convolve) => self.short_conv(id, grid, convolve),
            Op::Scan(scan) => self.scan(id, grid, scan),
            Op::GroupNorm(norm) => self.group_norm(id, grid, norm),
            Op::NormAdd { norm, scale, everywhere: false, .. } => self.norm_add(id, grid, *norm, *scale),
            _ => refused(grid, "the op", "one that every row of a step has for itself"),
        }
    }

    /// The buffer of activations of this name, made at its first use. All layers use the same buffers.
    fn work(&mut self, name: &str, layout: Layout, cols: u32) -> WorkId {
        let found = self.plan.work.iter().position(|w| w.name == name && w.layout == layout && w.cols == cols);
        found.map(WorkId::from).unwrap_or_else(|| self.own_work(name, layout, cols))
    }

    /// A buffer of one layer alone, which is still there when the launch has ended.
    fn own_work(&mut self, name: &str, layout: Layout, cols: u32) -> WorkId {
        let place = place_align(self.plan.work_bytes());
        debug_assert!(place.is_multiple_of(PLACE_ALIGN_BYTES));
        self.plan.work.push(Work { name: name.to_string(), layout, cols, place, everywhere: false });
        WorkId::from(self.plan.work.len() - 1)
    }

    fn push(&mut self, grid: GridId, action: Action, over: Over) {
        self.overs.push(over);
        // `divide` sets both: a later wave can still change how this one is divided.
        let meets = !matches!(action, Action::AttendRow { x, .. } if self.plan.holds_packets(x));
        self.plan.waves.push(Wave { grid, action, division: DivisionId(0), sums: Sums::Heads, boxes: vec![], meets });
    }

    /// The order that wave number `wave` must have, if it is not free.
    fn order_of(&self, wave: usize) -> Option<Sums> {
        self.asked.order.and_then(|order| order.get(wave).copied())
    }

    /// Divides the work of each wave among SMs, now that it is known what is divided.
    fn divide(&mut self) {
        for (w, over) in std::mem::take(&mut self.overs).into_iter().enumerate() {
            let division = self.division(over);
            let sums = self.sums(&self.plan.waves[w], over);
            let wave = &mut self.plan.waves[w];
            (wave.division, wave.sums) = (division, sums);
        }
    }

    fn sums(&self, wave: &Wave, over: Over) -> Sums {
        let grid = &self.program.grids[wave.grid.index()];
        match (&wave.action, over, &grid.op) {
            (Action::Rows { .. }, Over::Rows { parts }, _) => Sums::Row { parts },
            (Action::Rows { .. }, Over::Sums { .. }, _) => Sums::Row { parts: 1 },
            (&Action::MatMul { warps, target, then, tiles, .. }, Over::Units { parts, .. }, Op::MatVec(m)) => {
                let matrix = Matrix::of(m, self.program.format_of(grid));
                let paired = target.is_paired(parts);
                let squares = match (then, target) {
                    (None, _) => 0,
                    (_, Written::Sums { .. }) => m.units().div_ceil(SHARED_UNITS),
                    _ => self.plan.machine.sms / 2,
                };
                Sums::Product { parts, granules: matrix.part(parts), groups: warps.k, paired, squares, tiles }
            }
            (&Action::Attend { tile, .. } | &Action::AttendRow { tile, .. }, _, Op::Attention(a)) => {
                let split = match wave.action {
                    Action::AttendRow { splits, .. } => splits.map(|splits| splits.positions),
                    _ => None,
                };
                let scratch_bytes = self.plan.machine.scratch_bytes;
                Sums::History { tile, heads: a.heads_per_task, scratch_bytes, split }
            }
            (Action::Merge { splits, .. }, ..) => Sums::Splits { positions: splits.positions },
            (Action::Scores { .. }, _, Op::MatVec(m)) => {
                let granules = Matrix::of(m, self.program.format_of(grid)).part(1);
                let groups = scores_groups(WARPS, self.plan.form);
                Sums::Product { parts: 1, granules, groups, paired: false, squares: 0, tiles: false }
            }
            (Action::Route { .. }, ..) => Sums::Choice,
            (Action::Gather { .. } | Action::Places { .. } | Action::Fill { .. }, ..) => Sums::Nothing,
            (Action::Experts { x, .. }, _, Op::MatVec(m)) => {
                let granules = Matrix::of(m, self.program.format_of(grid)).granules;
                Sums::of_experts(granules, &self.plan.work[x.index()]).unwrap_or(Sums::Nothing)
            }
            (Action::Combine { slots, .. }, _, Op::Combine(combine)) => {
                Sums::Slots { slots: combine.slots, shared: slots.shared.is_some() }
            }
            (Action::Mix { .. }, ..) => Sums::State { positions: POSITIONS },
            (Action::MixRow { .. }, ..) => Sums::State { positions: 1 },
            (Action::Gated { .. }, _, Op::GroupNorm(_) | Op::MatVec(_)) => Sums::Row { parts: 1 },
            _ => Sums::Heads,
        }
    }

    fn division(&mut self, over: Over) -> DivisionId {
        let (rows, block_rows) = (self.plan.rows, self.plan.block_rows);
        let blocks_of = Blocks::of(&self.plan);
        let divisions = &mut self.plan.divisions;
        let found = divisions.iter().position(|division| division.over == over);
        DivisionId::from(found.unwrap_or_else(|| {
            let shares = |blocks| shares(over, blocks, block_rows, blocks_of);
            let shares = (1..=rows / block_rows).map(shares).collect();
            divisions.push(Division { over, shares });
            divisions.len() - 1
        }))
    }

    fn cols(&self, grid: &Grid, role: Role) -> Option<(BufferId, u32)> {
        let operand = grid.operand(role)?;
        Some((operand.buffer, self.program.buffers[operand.buffer.index()].cols))
    }

    fn constant(&self, grid: &Grid, role: Role) -> Option<BufferId> {
        grid.operand(role).map(|operand| operand.buffer)
    }

    fn norm_of(&self, grid: &Grid, norm: NormAttr) -> NormOf {
        let [weight, bias] = [Role::NormWeight, Role::NormBias].map(|role| self.constant(grid, role));
        NormOf { norm, weight, bias }
    }

    fn embed(&mut self, id: GridId, grid: &Grid, scale: f32) -> Result<(), Refused> {
        let (Some((out, _)), Some((table, cols))) = (self.cols(grid, Role::Out), self.cols(grid, Role::Table)) else {
            return refused(grid, "the operands", "a table, and an exchange that is published");
        };
        if !cols.is_multiple_of(8) {
            return refused(grid, "the width", "whole pieces of 8 values");
        }
        let residual = self.work("residual", Layout::Rows(DType::F32), cols);
        self.residual = Some(residual);
        self.published = Some(out);
        let best = self.plan.form.decides().then(|| self.best());
        let sum = Some(Sum::Embed { table, scale, best });
        self.push(id, Action::Rows { residual, sum, out: None }, WHOLE_ROWS);
        Ok(())
    }

    /// Begins a tail with the residual of its chunk, as the last sum before the last append left it. Returns the first grid after that sum.
    fn take_residual(&mut self) -> Result<usize, Refused> {
        let before = &self.program.grids[..self.program.last_append().map_or(0, |last| last.index())];
        let sums = |grid: &Grid| match &grid.op {
            Op::Embed { .. } | Op::NormAdd { .. } => true,
            Op::MatVec(m) => matches!(m.epilogue, Epilogue::Residual { .. }),
            Op::Combine(combine) => combine.adds,
            _ => false,
        };
        let first = before.iter().rposition(sums).map_or(0, |sum| sum + 1);
        let published = before[..first].last().and_then(|grid| self.cols(grid, Role::Out));
        let Some((out, cols)) = published else {
            return refused(&self.program.grids[first], "the residual", "a sum that is published");
        };
        if !cols.is_multiple_of(8) {
            return refused(&self.program.grids[first], "the width", "whole pieces of 8 values");
        }
        let residual = self.work("residual", Layout::Rows(DType::F32), cols);
        (self.residual, self.published) = (Some(residual), Some(out));
        self.push(GridId::from(first), Action::Rows { residual, sum: Some(Sum::Taken), out: None }, WHOLE_ROWS);
        Ok(first)
    }

    /// The best logit of each row that each block has found.
    fn best(&mut self) -> WorkId {
        self.work("best", Layout::Best, self.plan.machine.sms)
    }

    fn norm_add(&mut self, id: GridId, grid: &Grid, norm: NormAttr, scale: f32) -> Result<(), Refused> {
        let (x, out) = (self.constant(grid, Role::X), self.constant(grid, Role::Out));
        let branch = x.and_then(|x| self.inputs.get(&x).copied());
        let (Some(branch), Some(residual), Some(out)) = (branch, self.residual, out) else {
            return refused(grid, "the operands", "a branch, and a sum that is published");
        };
        self.published = Some(out);
        let norm = Some(self.norm_of(grid, norm));
        let sum = Some(Sum::Branch { branch, norm, scale });
        self.push(id, Action::Rows { residual, sum, out: None }, WHOLE_ROWS);
        Ok(())
    }

    /// The input of a product: what another product or attention wrote, or the residual as a wave of rows or a product in pairs leaves it. If the factor of the
    /// norm is missing, also the buffer of the sums of squares from which it follows.
    fn input(&mut self, id: GridId, grid: &Grid, m: &MatVec, tiles: bool) -> Result<(WorkId, Option<WorkId>), Refused> {
        let Some(x) = self.constant(grid, Role::X) else {
            return refused(grid, "the operands", "an input");
        };
        if let (Some(&at), None) = (self.inputs.get(&x), m.norm) {
            return Ok((at, None));
        }
        if self.gates.contains_key(&x) {
            return Ok((self.gate_norm(id, grid, x, Layout::of_input(tiles))?, None));
        }
        let (Some(residual), true) = (self.residual, self.published == Some(x)) else {
            // In a parallel layer both branches read the sum before either adds to it. One residual cannot hold both values.
            return refused(grid, "the input", "a value that is not overwritten; parallel layers have no wave kernel");
        };
        let to = self.work("normed", Layout::of_input(tiles), m.k);
        let norm = m.norm.map(|norm| self.norm_of(grid, norm));
        // In a layer with experts several products read one norm.
        // Scores and experts take no factor.
        let whole = m.epilogue == Epilogue::Scores || Chosen::of(self.program, grid).is_some();
        let same = |of: &Normed| {
            let taken = of.squares.is_none() || !whole && of.norm == norm;
            taken && (of.to, of.of) == (to, x) && same_norm(self.program, of.norm, norm)
        };
        if let Some(Normed { squares, .. }) = self.normed.filter(same) {
            return Ok((to, squares));
        }
        let factor = norm.is_some_and(|of| of.norm.is_factor() && of.bias.is_none()) && !whole;
        if factor && self.ends_in_pairs() {
            let squares = Some(self.work("squares", Layout::Parts(self.plan.machine.sms / 2), 1));
            if let Some(Action::MatMul { then, .. }) = self.plan.waves.last_mut().map(|wave| &mut wave.action) {
                *then = Some(Input { to, norm, squares, rows: None });
            }
            self.normed = None;
            return Ok((to, squares));
        }
        if factor && let Some(squares) = self.ends_in_sums(residual, Input { to, norm, squares: None, rows: None }) {
            self.normed = Some(Normed { to, of: x, norm, squares: Some(squares) });
            return Ok((to, Some(squares)));
        }
        if !matches!(self.plan.waves.last(), Some(Wave { action: Action::Rows { out: None, .. }, .. })) {
            self.push(id, Action::Rows { residual, sum: None, out: None }, WHOLE_ROWS);
        }
        let sums_whole =
            |wave: &Wave| matches!(wave.action, Action::Rows { sum: Some(Sum::Branch { norm: Some(_), .. }), .. });
        let parts = match norm {
            Some(NormOf { norm, bias: None, .. })
                if norm.is_factor()
                    && !whole
                    && self.plan.form.decides()
                    && !self.plan.waves.last().is_some_and(sums_whole) =>
            {
                self.row_parts(m.k)
            }
            _ => 1,
        };
        let squares = (parts > 1).then(|| self.work("squares", Layout::Parts(parts), 1));
        let last = self.plan.waves.last_mut().map(|wave| &mut wave.action);
        if let (Some(Action::Rows { out, .. }), Some(over)) = (last, self.overs.last_mut()) {
            (*out, *over) = (Some(Input { to, norm, squares, rows: None }), Over::Rows { parts });
        }
        self.normed = squares.is_none().then_some(Normed { to, of: x, norm, squares: None });
        Ok((to, squares))
    }

    /// Whether the last wave is a product whose pairs of blocks add to the residual.
    fn ends_in_pairs(&self) -> bool {
        match (self.plan.waves.last().map(|wave| &wave.action), self.overs.last()) {
            (Some(Action::MatMul { target, .. }), Some(&Over::Units { parts, .. })) => target.is_paired(parts),
            _ => false,
        }
    }

    /// Lets the last product of a chunk leave the input of the next one itself ([`Written::Sums`]), if it adds to the residual and groups of columns are whole
    /// on a device. Returns the sums of squares.
    fn ends_in_sums(&mut self, residual: WorkId, then: Input) -> Option<WorkId> {
        let Plan { form, ref machine, ref waves, .. } = self.plan;
        let last = waves.len().checked_sub(1)?;
        let adds = |wave: &Wave| match wave.action {
            Action::MatMul { squares: None, target, then: None, .. } => Some(target),
            _ => None,
        };
        let (product, branch) = match waves[last].action {
            Action::Rows { sum: Some(Sum::Branch { branch, norm: None, .. }), out: None, .. } if last > 0 => {
                (last - 1, Some(branch))
            }
            _ => (last, None),
        };
        let ends = match (adds(&waves[product])?, branch) {
            (Written::Out(out), Some(branch)) => out == branch,
            (Written::Residual(_), None) => true,
            _ => false,
        };
        let Over::Units { n, parts, .. } = self.overs[product] else { return None };
        let begins = |device| share_of(n, device, machine.devices).start.is_multiple_of(SHARED_UNITS);
        let is_shared = form == Form::Chunk && machine.products == Products::Shared;
        // Kernels with recurrent states have few registers to spare, and were not timed with it.
        if !is_shared || self.program.has_state() || !ends || !(0..machine.devices).all(begins) {
            return None;
        }
        let squares = self.work("squares", Layout::Squares { groups: n.div_ceil(SHARED_UNITS), parts }, 1);
        if let Action::MatMul { target, then: left, .. } = &mut self.plan.waves[product].action {
            *target = Written::Sums { branch, residual, shown: false };
            *left = Some(Input { squares: Some(squares), ..then });
        }
        self.overs[product] = Over::Units { n, parts, step: SHARED_UNITS };
        if let (Some(_), Action::Rows { out, .. }) = (branch, &mut self.plan.waves[last].action) {
            *out = Some(then);
            self.overs[last] = Over::Sums { parts };
        }
        Some(squares)
    }

    /// Number of parts of equal length into which SMs divide each row.
    fn row_parts(&self, cols: u32) -> u32 {
        if let Some(Sums::Row { parts }) = self.order_of(self.plan.waves.len().saturating_sub(1)) {
            return parts;
        }
        let most = (self.plan.machine.sms / self.plan.rows).clamp(1, ROW_PARTS_MAX);
        let most = chosen(self.asked.knobs.row_parts).unwrap_or(most);
        (1..=most).rev().find(|parts| cols.is_multiple_of(8 * parts)).unwrap_or(1)
    }

    fn matvec(&mut self, id: GridId, grid: &Grid, m: &MatVec) -> Result<(), Refused> {
        let format = self.program.format_of(grid);
        if format.is_plain() && format != Format::plain(DType::Bf16) {
            return refused(grid, "weights", "bf16, or codes");
        }
        if format.has_minima() {
            return refused(grid, "weights", "codes without minima");
        }
        if m.own_input {
            return refused(grid, "the input", "an exchange");
        }
        let matrix = Matrix::of(m, format);
        let parts = self.parts(grid, m, &matrix);
        // After a norm, the input has the layout of this product.
        let left = self.constant(grid, Role::X).filter(|_| m.norm.is_none()).and_then(|x| self.inputs.get(&x));
        let as_tiles = left.is_none_or(|x| self.plan.work[x.index()].layout == Layout::Tiles);
        let in_tiles = self.tiles(grid, m).filter(|_| as_tiles);
        let (x, squares) = self.input(id, grid, m, in_tiles.is_some())?;
        let over = Over::Units { n: m.units(), parts, step: 1 };
        let in_pairs = if self.pairs(m, parts) { in_tiles.or_else(|| self.shape(over, &matrix, true)) } else { None };
        let Some(Shape { pass, chunk, warps }) = in_pairs.or(in_tiles).or_else(|| self.shape(over, &matrix, false))
        else {
            return self.no_shape(grid);
        };
        self.plan.machine.pairs |= in_pairs.is_some();
        let target = self.target(id, grid, m, parts, in_pairs.is_some())?;
        self.push(
            id,
            Action::MatMul { x, squares, target, then: None, pass, chunk, warps, tiles: in_tiles.is_some(), held: 0 },
            over,
        );
        if let (Epilogue::Residual { scale }, Written::Out(branch), Some(residual)) =
            (m.epilogue, target, self.residual)
        {
            let sum = Some(Sum::Branch { branch, norm: None, scale });
            self.push(id, Action::Rows { residual, sum, out: None }, WHOLE_ROWS);
        }
        Ok(())
    }

    /// Why no warps multiply the units of a block.
    fn no_shape<T>(&self, grid: &Grid) -> Result<T, Refused> {
        let WaveKnobs { row_groups, unit_groups, .. } = self.asked.knobs;
        let lacks = |what: &str| format!("0, because {what} of `{}` are not divided so", grid.name);
        match (row_groups, unit_groups) {
            (0, 0) => refused(grid, "units", "as many as shared memory holds"),
            (0, units) => refused_knob("wave_unit_groups", units, lacks("units")),
            (rows, _) => refused_knob("wave_row_groups", rows, lacks("rows")),
        }
    }

    /// How warpgroups multiply the units of a block in tiles, if they do. It pays for gated products of 64 rows, and for the MLP in codes of 4 bits of 32 rows: as
    /// operands of warpgroups these are made once for all rows. It does not pay for products that attention reads, or whose input attention writes, nor where more than
    /// a quarter of the units of tiles do not exist (docs/perf-log.md, entries 34 and 35).
    fn tiles(&self, grid: &Grid, m: &MatVec) -> Option<Shape> {
        let Plan { form, rows, .. } = self.plan;
        let format = self.program.format_of(grid);
        let coded = format.code == Code::Int4;
        let plain = format.is_plain() && m.k.is_multiple_of(64);
        let [all, halves] = TILE_WARPS;
        let everywhere = self.asked.knobs.tiles == 2;
        let warps: &[Warps] = match m.epilogue {
            _ if everywhere && (plain || !format.is_plain() && rows <= 64) => &TILE_WARPS,
            _ if plain && rows == 128 => &TILE_WARPS,
            Epilogue::Gated(_) | Epilogue::GatedBy { .. } if plain && rows == 64 => &[all],
            Epilogue::Gated(_) | Epilogue::GatedBy { .. } | Epilogue::Act(_) if coded && rows == 32 => &[all],
            Epilogue::Residual { .. } if coded && rows == 32 => &[halves],
            _ => return None,
        };
        let never = !self.asked.tiles || self.asked.knobs.tiles == 1;
        if form != Form::Steps || never || !self.warpgroup_mma || m.parts() != 1 {
            return None;
        }
        let parts = self.parts(grid, m, &Matrix::of(m, format));
        let longest = self.longest(Over::Units { n: m.units(), parts, step: 1 }, 1).max(1);
        let shapes = warps.iter().filter_map(|&warps| self.tile_shape(format, longest, warps));
        let shape = shapes.min_by_key(|shape| longest.next_multiple_of(WIDE_UNITS * shape.warps.units))?;
        let tile = WIDE_UNITS * shape.warps.units;
        let padded = longest.next_multiple_of(tile);
        // A product in pairs has one pass.
        let fits = !self.pairs(m, parts)
            || shape.pass == longest && pair_scratch(rows, shape.warps, padded) <= self.plan.machine.scratch_bytes;
        (4 * longest >= 3 * padded && fits).then_some(shape)
    }

    /// How `warps` multiply up to `longest` units in tiles.
    fn tile_shape(&self, format: Format, longest: u32, warps: Warps) -> Option<Shape> {
        let (tile, sums) = (WIDE_UNITS * warps.units, self.plan.rows / 2);
        let knobs = &self.asked.knobs;
        let most = tile_sums_max(self.plan.rows) / sums;
        let most = chosen(knobs.pass).map_or(most, |pass| most.min((pass / tile).max(1)));
        let input_spans = self.plan.machine.inputs.slot_bytes / (self.plan.rows * 64);
        let shape = |tiles: u32| {
            // With several tiles, warps take the words of one granule at a time.
            let granules = if !format.is_plain() || tiles * sums > 64 { 1 } else { 64 / format.granule_k() };
            let chunk = warps.k * granules;
            let room = step_weight_bytes(knobs) / (chunk * format.granule_bytes());
            // A slot holds whole tiles of plain weights.
            let room = if format.is_plain() { room / tile * tile } else { room };
            let most = (most * tile).min(room);
            // A slot of inputs is whole chunks.
            let fits = most > 0 && input_spans.is_multiple_of(chunk * format.granule_k() / 32);
            fits.then(|| Shape { pass: longest.div_ceil(longest.div_ceil(most)), chunk, warps })
        };
        let tiles = longest.div_ceil(tile).min(most);
        match shape(tiles) {
            // Slots have room for one of them alone.
            Some(Shape { pass, .. }) if tiles > 1 && pass <= tile => shape(1),
            shape => shape,
        }
    }

    /// The layout of the result of a product that other products read.
    fn operand(&self, buffer: BufferId) -> Layout {
        let mut readers =
            self.program.grids.iter().filter(|grid| self.constant(grid, Role::X) == Some(buffer)).peekable();
        let tiles = |grid: &Grid| matches!(&grid.op, Op::MatVec(m) if self.tiles(grid, m).is_some());
        Layout::of_input(readers.peek().is_some() && readers.all(tiles))
    }

    /// Whether a product is done in pairs: the two blocks of a pair have the two parts of k of the same units, and exchange their sums.
    fn pairs(&self, m: &MatVec, parts: u32) -> bool {
        let asked = self.order_of(self.plan.waves.len());
        let Plan { form, ref machine, .. } = self.plan;
        form.decides()
            && self.asked.knobs.pairs == 0
            && self.cluster_max >= 2
            && machine.sms.is_multiple_of(2)
            && !matches!(asked, Some(Sums::Product { paired: false, .. }))
            && parts == 2
            && matches!(m.epilogue, Epilogue::Residual { .. })
            && m.rows.is_multiple_of(2)
    }

    /// Number of parts of k of a product. With more parts each SM reads less of the input, but SMs exchange more sums.
    fn parts(&self, grid: &Grid, m: &MatVec, matrix: &Matrix) -> u32 {
        let divisible = matches!(m.epilogue, Epilogue::Store | Epilogue::Residual { .. }) && !self.is_shared(grid);
        if self.plan.form == Form::Chunk {
            return self.chunk_parts(m, matrix);
        }
        // Attention takes the sums of parts as they are, each twice as long as the result: too much to go to every device, unless it saves a meeting.
        let attends = |of: &Grid| {
            matches!(of.op, Op::Attention(_)) && self.constant(of, Role::Q) == self.constant(grid, Role::Out)
        };
        let is_long = u64::from(self.plan.rows) * u64::from(m.rows) * 2 * 8 > PACKET_BYTES_MAX;
        let crosses = self.plan.machine.devices > 1 && is_long && self.program.grids.iter().any(attends);
        if !divisible || crosses {
            return 1;
        }
        let sms = self.plan.machine.sms;
        // Bytes that an SM moves for a row: its input, and its sums, which are written and read.
        let bytes = |parts: u32| {
            let sums = if parts > 1 { 8 * (m.rows.div_ceil(sms) * parts) } else { 0 };
            m.k * 2 / parts + sums
        };
        let possible = |parts: &u32| matrix.divides(*parts) && *parts <= sms;
        if let Some(most) = chosen(self.asked.knobs.parts) {
            return CHUNK_PARTS.into_iter().filter(|parts| *parts <= most).find(possible).unwrap_or(1);
        }
        PARTS.into_iter().filter(possible).min_by_key(|&parts| bytes(parts)).unwrap_or(1)
    }

    /// The same in a chunk of one block of rows. With both operands in shared memory a pass of 256 columns reads fewest bytes of them, so products of few
    /// units are divided into parts as long as each SM has about that many columns.
    fn chunk_parts(&self, m: &MatVec, matrix: &Matrix) -> u32 {
        let Machine { products, sms, .. } = self.plan.machine;
        // The check of a mixture with recurrent states compares rows with those of shorter chunks, bit by bit.
        let has_one_order = has_experts(self.program) && self.program.has_state();
        if products != Products::Shared || has_one_order || !matches!(m.epilogue, Epilogue::Residual { .. }) {
            return 1;
        }
        let fits = |parts: &u32| m.units().div_ceil(SHARED_PASS_MAX) * parts <= sms;
        let long = |parts: &u32| matrix.divides(*parts) && matrix.part(*parts) >= CHUNK_PART_GRANULES;
        let most = chosen(self.asked.knobs.parts).unwrap_or(u32::MAX);
        CHUNK_PARTS.into_iter().filter(|parts| *parts <= most).find(|parts| fits(parts) && long(parts)).unwrap_or(1)
    }

    /// The longest share of a division, of this many blocks of rows.
    fn longest(&self, over: Over, blocks: u32) -> u32 {
        let shares = shares(over, blocks, self.plan.block_rows, Blocks::of(&self.plan));
        shares.iter().flatten().map(|share| share.hi - share.lo).max().unwrap_or(0)
    }

    /// How a block multiplies its units.
    fn shape(&self, over: Over, matrix: &Matrix, paired: bool) -> Option<Shape> {
        let Plan { form, rows, block_rows, ref machine, .. } = self.plan;
        let knobs = &self.asked.knobs;
        let parts = if let Over::Units { parts, .. } = over { parts } else { 1 };
        match form {
            Form::Chunk => {
                let mut lengths = (1..=rows / block_rows).map(|blocks| self.longest(over, blocks));
                let shape = match machine.products {
                    Products::Warps => {
                        lengths.map(|units| matrix.chunk_shape(units, knobs)).max_by_key(|shape| shape.pass)
                    }
                    Products::Warpgroups => lengths.next_back().map(|units| matrix.wide_shape(units, knobs)),
                    Products::Shared => lengths.max().map(|units| matrix.shared_shape(units, knobs)),
                };
                shape.filter(|shape| chosen(knobs.row_groups).is_none_or(|rows| rows == shape.warps.rows))
            }
            Form::Steps | Form::Tail => {
                let groups = match self.order_of(self.plan.waves.len()) {
                    Some(Sums::Product { groups, .. }) => Some(groups),
                    _ => None,
                };
                matrix.step_shape(rows, self.longest(over, 1), parts, machine, (groups, knobs), paired)
            }
        }
    }

    /// Whether a grid is the output of a shared expert, which is added up beside the slots of the others.
    fn is_shared(&self, grid: &Grid) -> bool {
        self.constant(grid, Role::Out).is_some_and(|out| is_combined(self.program, out))
    }

    fn target(&mut self, id: GridId, grid: &Grid, m: &MatVec, parts: u32, paired: bool) -> Result<Written, Refused> {
        if m.epilogue == Epilogue::Store && self.is_shared(grid) {
            let to = self.work("shared", Layout::Rows(DType::Bf16), m.rows);
            self.shared = Some(to);
            return Ok(Written::Out(to));
        }
        if let Epilogue::Residual { .. } = m.epilogue {
            let Some(residual) = self.residual else {
                return refused(grid, "the sum", "one of the embedding");
            };
            // Nothing reads a sum that is not published: one between two branches of a layer.
            self.published = self.constant(grid, Role::Out);
            if parts == 1 || paired {
                return Ok(Written::Residual(residual));
            }
            return Ok(Written::Out(self.work("branch", Layout::Parts(parts), m.rows)));
        }
        let Some((out, cols)) = self.cols(grid, Role::Out).or_else(|| self.cols(grid, Role::Logits)) else {
            return refused(grid, "the output", "one that is published");
        };
        match m.epilogue {
            Epilogue::Logits { .. } if self.plan.form.decides() => Ok(Written::Best(self.best())),
            Epilogue::Logits { .. } => refused(grid, "the output", "no logits before the last append"),
            Epilogue::Scores | Epilogue::Clamped(_) | Epilogue::Residual { .. } => {
                refused(grid, "the output", "activations without experts")
            }
            Epilogue::Store | Epilogue::Act(_) | Epilogue::Gated(_) | Epilogue::GatedBy { .. } => {
                if !cols.is_multiple_of(2) {
                    return refused(grid, "the output", "an even number of columns");
                }
                // The input of a product has the layout of operands. Heads and branches are stored row by row. In a step, attention follows heads at once.
                let stored = if self.feeds_scan(out) { "inputs" } else { "branch" };
                let (name, layout) = match m.epilogue {
                    Epilogue::Store if parts > 1 && self.in_packets(id, out, parts) => {
                        ("heads", Layout::Packets(parts))
                    }
                    Epilogue::Store if parts > 1 => (stored, Layout::Parts(parts)),
                    Epilogue::Store => (stored, Layout::Rows(DType::Bf16)),
                    _ => ("act", self.operand(out)),
                };
                let to = self.work(name, layout, cols);
                self.inputs.insert(out, to);
                Ok(Written::Out(to))
            }
        }
    }

    /// Whether grid `id` of a step leaves this exchange in packets: if the next grid is attention over these heads, and they are few bytes. Only one
    /// wave can wait for packets, so there are none if the wave that merges splits reads the gate, too.
    fn in_packets(&self, id: GridId, exchange: BufferId, parts: u32) -> bool {
        let next = self.program.grids.get(id.index() + 1);
        let cuts = !matches!(self.asked.cuts, Cuts::None);
        let attends = |grid: &Grid| {
            matches!(&grid.op, Op::Attention(a) if !(a.gate && cuts || a.norms_all_heads()))
                && self.constant(grid, Role::Q) == Some(exchange)
        };
        let cols = self.program.buffers[exchange.index()].cols;
        let bytes = u64::from(self.plan.rows) * u64::from(cols) * u64::from(parts) * 8;
        let may = self.plan.form.decides() && self.asked.knobs.packets == 0;
        may && bytes <= PACKET_BYTES_MAX && next.is_some_and(attends)
    }

    /// Scores of all experts, from a norm that the products of experts read, too.
    fn scores(&mut self, id: GridId, grid: &Grid, m: &MatVec) -> Result<(), Refused> {
        if self.program.format_of(grid) != Format::plain(DType::Bf16) {
            return refused(grid, "weights of a router", "bf16");
        }
        let Some(out) = self.constant(grid, Role::Out) else {
            return refused(grid, "the operands", "an output");
        };
        let (x, _) = self.input(id, grid, m, false)?;
        let to = self.work("scores", Layout::Rows(DType::F32), m.rows);
        self.inputs.insert(out, to);
        let n = m.rows.div_ceil(scores_cols(self.plan.form));
        let rows = scores_rows(self.plan.form);
        self.push(id, Action::Scores { x, out: to }, Over::Heads { n, rows, kept: 1 });
        Ok(())
    }

    fn route(&mut self, id: GridId, grid: &Grid, route: &Route) -> Result<(), Refused> {
        let scores = self.constant(grid, Role::X).and_then(|x| self.inputs.get(&x).copied());
        let Some(scores) = scores else {
            return refused(grid, "the operands", "scores");
        };
        let Route { experts, top_k: slots, .. } = *route;
        let tile = Tiling::rows_of(self.plan.form, self.plan.machine.products, has_groups(self.program));
        let tiling = Tiling::of(self.plan.rows, slots, experts, tile);
        // The check reads the choices of all layers after the launch.
        let choices = self.own_work("choices", Layout::Rows(DType::I32), slots);
        let places = self.work("places", Layout::Rows(DType::I32), slots);
        let shares = self.work("shares", Layout::Rows(DType::F32), slots);
        let groups = self.work("groups", Layout::Groups(tiling), 4);
        self.choice = Some(Choice { scores, choices, shares, groups, places, tiling });
        self.push(id, Action::Route { scores, choices, shares }, WHOLE_ROWS);
        Ok(())
    }

    /// A product of each place with the matrix of its expert. The first one of a layer finds the places.
    fn experts(&mut self, id: GridId, grid: &Grid, m: &MatVec) -> Result<(), Refused> {
        let format = self.program.format_of(grid);
        if self.plan.form == Form::Chunk && !self.warpgroup_mma {
            return refused(grid, "experts", "a target with products by warpgroups");
        }
        if format.is_plain() && format != Format::plain(DType::Bf16) || format.has_minima() {
            return refused(grid, "weights of experts", "bf16, or codes without minima");
        }
        if m.parts() != 1 || m.own_input || !m.rows.is_multiple_of(2) {
            return refused(grid, "experts", "units of eight rows, an exchange, and an even number of rows");
        }
        let (Some(Choice { choices, groups, places, tiling, .. }), Some(from), Some(out)) =
            (self.choice, self.constant(grid, Role::X), self.constant(grid, Role::Out))
        else {
            return refused(grid, "the operands", "a choice, an input and an output");
        };
        let left = self.inputs.get(&from).copied().filter(|_| m.norm.is_none());
        let x = match left {
            Some(x) => x,
            None => {
                let (x, _) = self.input(id, grid, m, false)?;
                let gathered = self.work("gathered", Layout::Grouped(tiling), m.k);
                self.gather(id, grid, (x, gathered), (choices, groups, places), tiling)?;
                gathered
            }
        };
        let (layout, cols) = match m.epilogue {
            Epilogue::Store => (Layout::Placed(tiling), m.rows),
            Epilogue::Gated(_) | Epilogue::Clamped(_) => (Layout::Grouped(tiling), m.rows / 2),
            Epilogue::Act(_) => (Layout::Grouped(tiling), m.rows),
            _ => return refused(grid, "the output of experts", "activations, or columns as they are"),
        };
        let name = if m.epilogue == Epilogue::Store { "made" } else { "acts" };
        let out_to = self.work(name, layout, cols);
        self.inputs.insert(out, out_to);
        let chunk = expert_granules(self.plan.form, format);
        let rule = if format.is_plain() { STEP_EXPERT_BYTES } else { STEP_EXPERT_CODES_BYTES };
        let of_steps = chosen(self.asked.knobs.slot_kib).map_or(rule, |kib| kib << 10);
        let slot_bytes = if self.plan.form == Form::Chunk { CHUNK_EXPERT_BYTES } else { of_steps };
        let machine = &self.plan.machine;
        let is_shared = machine.products == Products::Shared;
        let tiles = (slot_bytes / (chunk * format.granule_bytes()) / TILE_UNITS)
            .min(unit_tiles_max(tiling.rows, format.groups.is_some()));
        let most = if is_shared { SHARED_EXPERT_PASS_MAX } else { tiles * TILE_UNITS };
        if most == 0 && self.asked.knobs.slot_kib > 0 {
            let expected = format!("more, for a chunk of `{}`", grid.name);
            return refused_knob("wave_slot_kib", self.asked.knobs.slot_kib, expected);
        }
        // With both operands in shared memory slots of inputs have weights.
        let of_inputs = match is_shared {
            true => most * chunk * format.granule_bytes(),
            false => chunk * format.granule_k() / 32 * tiling.rows * 64,
        };
        if most == 0 || of_inputs > machine.inputs.slot_bytes {
            return refused(grid, "experts", "chunks that slots hold");
        }
        let parts = expert_parts(m.units(), most, machine);
        if parts > m.units() {
            return refused(grid, "experts", "a unit for each of two blocks");
        }
        let pass = m.units().div_ceil(parts);
        let tickets = self.asked.knobs.tickets == 0;
        self.push(id, Action::Experts { x, groups, out: out_to, pass, chunk, tickets }, Over::Items { parts, tiling });
        Ok(())
    }

    /// Lets the wave that left `x` leave it row by row, too.
    fn rows_of(&mut self, grid: &Grid, x: WorkId) -> Result<WorkId, Refused> {
        let rows = self.work("normed.rows", Layout::Rows(DType::Bf16), self.plan.work[x.index()].cols);
        let left = self.plan.waves.iter_mut().rev().find_map(|wave| match &mut wave.action {
            Action::Rows { out: Some(out), .. } if out.to == x => Some(out),
            _ => None,
        });
        let Some(out) = left else { return refused(grid, "the input", "what a wave of rows leaves") };
        out.rows = Some(rows);
        Ok(rows)
    }

    /// Copies the rows of `x` to their places in `out`.
    fn gather(
        &mut self,
        id: GridId,
        grid: &Grid,
        (x, out): (WorkId, WorkId),
        (choices, groups, places): (WorkId, WorkId, WorkId),
        tiling: Tiling,
    ) -> Result<(), Refused> {
        if self.plan.form != Form::Chunk {
            self.push(id, Action::Gather { x, choices, groups, places, out }, ROWS_IN_TURN);
            return Ok(());
        }
        let sources = self.work("sources", Layout::Sources(tiling), 1);
        let x = self.rows_of(grid, x)?;
        self.push(id, Action::Places { choices, groups, places, sources }, WHOLE_ROWS);
        self.push(
            id,
            Action::Fill { x, groups, sources, out },
            Over::Items { parts: tiling.rows / FILLED_PLACES, tiling },
        );
        Ok(())
    }

    /// The sum over slots: to the residual, or a branch whose norm is added.
    fn combine(&mut self, id: GridId, grid: &Grid, combine: &Combine) -> Result<(), Refused> {
        let x = self.constant(grid, Role::X).and_then(|x| self.inputs.get(&x).copied());
        let shared = combine.shared.and(self.shared.take());
        let (Some(x), Some(choice), Some(out)) = (x, self.choice, self.constant(grid, Role::Out)) else {
            return refused(grid, "the operands", "what experts made, and a sum that is published");
        };
        if combine.shared.is_some() != shared.is_some() {
            return refused(grid, "the shared expert", "one that was computed");
        }
        if !combine.width.is_multiple_of(8) {
            return refused(grid, "the width", "whole pieces of 8 values");
        }
        let gate = grid.operand(Role::Gate).map(|_| choice.scores);
        let Choice { places, shares, .. } = choice;
        let slots = Slots { x, places, shares, shared, gate };
        let action = match (combine.adds, self.residual) {
            (true, Some(residual)) => {
                self.published = Some(out);
                Action::Rows { residual, sum: Some(Sum::Slots(slots)), out: None }
            }
            (false, _) => {
                let branch = self.work("branch", Layout::Parts(1), combine.width);
                self.inputs.insert(out, branch);
                Action::Combine { slots, out: branch }
            }
            (true, None) => return refused(grid, "the sum", "one of the embedding"),
        };
        self.push(id, action, WHOLE_ROWS);
        Ok(())
    }

    /// A net of a chunk ends with its states if it is the last one: nothing reads what positions read of them.
    fn mix(&mut self, id: GridId, grid: &Grid, mix: &Mix, is_last: bool) -> Result<(), Refused> {
        let left = |role| self.constant(grid, role).and_then(|of| self.inputs.get(&of).copied());
        let (Some(x), Some(scalars), Some((out, values))) =
            (left(Role::Q), left(Role::Beta), self.cols(grid, Role::Out))
        else {
            return refused(grid, "the operands", "columns of products, and an output");
        };
        match self.plan.form {
            Form::Tail => {
                refused(grid, "the state", "one that the chunk has not brought on; a tail would do so a second time")
            }
            Form::Steps => {
                let to = self.work("mixed", self.operand(out), values);
                self.inputs.insert(out, to);
                self.push(
                    id,
                    Action::MixRow { x, scalars, out: to },
                    Over::Heads { n: mix.value_heads, rows: 1, kept: 1 },
                );
                Ok(())
            }
            Form::Chunk => {
                let Some(parts) = Carried::of(&grid.op).and_then(|states| states.parts(self.plan.machine.sms)) else {
                    return refused(grid, "heads", "keys of whole tiles of 16, and values of whole tiles of 8");
                };
                let turned = self.work("turned", Layout::Rows(DType::F32), mix.qkv_cols() + 2 * mix.value_heads);
                self.push(id, Action::Convolve { x, scalars, out: turned }, WHOLE_ROWS);
                let mixed = self.work("mixed", Layout::Rows(DType::F32), values);
                self.push(id, Action::Mix { turned, x, out: mixed }, Over::States { n: mix.value_heads * parts });
                if !is_last {
                    let to = self.work("gated", self.operand(out), values);
                    self.inputs.insert(out, to);
                    self.push(id, Action::Gated { mixed, x, out: to }, WHOLE_ROWS);
                }
                Ok(())
            }
        }
    }

    /// Mamba-2. Where a norm follows, it leaves its output before the gate in fp32.
    fn scan(&mut self, id: GridId, grid: &Grid, scan: &Scan) -> Result<(), Refused> {
        let x = self.constant(grid, Role::X).and_then(|of| self.inputs.get(&of).copied());
        let (Some(x), Some((out, inner))) = (x, self.cols(grid, Role::Out)) else {
            return refused(grid, "the operands", "columns of a product, and an output");
        };
        let normed = GateNorm::follows(self.program, out);
        if scan.gate.is_none() && !normed {
            return refused(grid, "the output", "a gate, or a norm with a gate");
        }
        let to = |b: &mut Self| match normed {
            true => b.work("mixed", Layout::Rows(DType::F32), inner),
            false => b.work("gated", b.operand(out), inner),
        };
        let to = match self.plan.form {
            Form::Tail => {
                return refused(
                    grid,
                    "the state",
                    "one that the chunk has not brought on; a tail would do so a second time",
                );
            }
            Form::Steps => {
                let to = to(self);
                self.push(
                    id,
                    Action::MixRow { x, scalars: x, out: to },
                    Over::Heads { n: scan.heads, rows: 1, kept: 1 },
                );
                to
            }
            Form::Chunk => {
                let Some(parts) = Carried::of(&grid.op).and_then(|states| states.parts(self.plan.machine.sms)) else {
                    return refused(grid, "heads", "states of whole tiles of 16, and heads of whole tiles of 8");
                };
                let turned = self.work("turned", Layout::Rows(DType::F32), scan_cols(scan));
                self.push(id, Action::Convolve { x, scalars: x, out: turned }, WHOLE_ROWS);
                let to = to(self);
                self.push(id, Action::Mix { turned, x, out: to }, Over::States { n: scan.heads * parts });
                to
            }
        };
        self.inputs.insert(out, to);
        if normed {
            self.gates.insert(out, x);
        }
        Ok(())
    }

    /// A norm of groups of what Mamba-2 gives.
    fn group_norm(&mut self, id: GridId, grid: &Grid, norm: &GroupNorm) -> Result<(), Refused> {
        let (Some(x), Some((out, _))) = (self.constant(grid, Role::X), self.cols(grid, Role::Out)) else {
            return refused(grid, "the operands", "an input, and an output");
        };
        if !norm.group().is_multiple_of(2) {
            return refused(grid, "groups", "an even number of columns");
        }
        let to = self.gate_norm(id, grid, x, self.operand(out))?;
        self.inputs.insert(out, to);
        Ok(())
    }

    /// The norm of `grid` of what Mamba-2 has left in `x`, with the gate.
    fn gate_norm(&mut self, id: GridId, grid: &Grid, x: BufferId, layout: Layout) -> Result<WorkId, Refused> {
        let of = (GateNorm::of(self.program, grid), self.inputs.get(&x), self.gates.get(&x));
        let (Some(norm), Some(&mixed), Some(&gate)) = of else {
            return refused(grid, "the norm", "an RMS norm with gains, of Mamba-2 with one gate before or after it");
        };
        let to = self.work("gated", layout, norm.width);
        self.push(id, Action::Gated { mixed, x: gate, out: to }, WHOLE_ROWS);
        Ok(to)
    }

    /// Whether Mamba-2 reads this exchange: in a layer with attention beside it both inputs are needed at once.
    fn feeds_scan(&self, exchange: BufferId) -> bool {
        let reads = |grid: &Grid| matches!(grid.op, Op::Scan(_)) && self.constant(grid, Role::X) == Some(exchange);
        self.program.grids.iter().any(reads)
    }

    /// A short convolution. If it is the last state of a chunk, nothing reads what positions make of it.
    fn short_conv(&mut self, id: GridId, grid: &Grid, convolve: &Convolve) -> Result<(), Refused> {
        let x = self.constant(grid, Role::X).and_then(|of| self.inputs.get(&of).copied());
        let (Some(x), Some((out, cols))) = (x, self.cols(grid, Role::Out)) else {
            return refused(grid, "the operands", "columns of a product, and an output");
        };
        if !cols.is_multiple_of(2) {
            return refused(grid, "the channels", "an even number");
        }
        let n = convolve.channels.div_ceil(group_channels(self.plan.form));
        let over = match self.plan.form {
            Form::Tail => {
                return refused(
                    grid,
                    "the state",
                    "one that the chunk has not brought on; a tail would do so a second time",
                );
            }
            Form::Steps => Over::Heads { n, rows: 1, kept: 1 },
            Form::Chunk => Over::States { n },
        };
        let to = self.work("convolved", self.operand(out), cols);
        self.inputs.insert(out, to);
        self.push(id, Action::ShortConv { x, out: to }, over);
        Ok(())
    }

    fn attention(&mut self, id: GridId, grid: &Grid, a: &Attention, is_last: bool) -> Result<(), Refused> {
        let whole = self.schedule.attention_variant(id).is_some_and(|variant| {
            let heads = if a.norms_all_heads() { a.without_norms() } else { a.clone() };
            heads.on_tensor_cores(self.program.precision, WARPS, variant.warps_per_head)
        });
        if !whole || a.splits != 1 {
            return refused(grid, "attention", "heads that tensor cores take whole");
        }
        if a.norms_all_heads() && !over_all_heads(a) {
            return refused(
                grid,
                "attention",
                "norms of q and k that are both over all heads, or both over single ones",
            );
        }
        if self.program.precision.cache != DType::Bf16 {
            return refused(grid, "the cache", "keys and values in bf16");
        }
        let x = self.constant(grid, Role::Q).and_then(|q| self.inputs.get(&q).copied());
        let (Some(x), Some((out, _))) = (x, self.cols(grid, Role::Out)) else {
            return refused(grid, "the operands", "heads, and an output");
        };
        let x = if a.norms_all_heads() { self.norm_heads(id, x) } else { x };
        // The gate lies after q, k and v.
        let gate = a.gate.then_some(x);
        let cols = a.heads * a.head_dim;
        let appended = match self.plan.form {
            Form::Chunk => {
                let queries = self.work("queries", Layout::Rows(DType::Bf16), cols);
                self.push(id, Action::Append { x, queries }, WHOLE_ROWS);
                Some(queries)
            }
            Form::Steps | Form::Tail => None,
        };
        if is_last {
            return Ok(());
        }
        let cache = grid.operand(Role::AppendK).map(|o| &self.program.buffers[o.buffer.index()]);
        let Some(paging) = cache.and_then(|cache| cache.paging) else {
            return refused(grid, "the cache", "pages");
        };
        let (tile, wide) = self.tile_of(id, grid, a, paging.rows)?;
        let to = self.work("attended", self.operand(out), cols);
        self.inputs.insert(out, to);
        let n = a.head_groups();
        let kept = if self.plan.machine.devices > 1 { a.group / a.heads_per_task } else { 1 };
        if let Some(queries) = appended {
            let rows = WARPS / a.heads_per_task * 16;
            self.push(id, Action::Attend { queries, out: to, tile, wide, gate }, Over::Heads { n, rows, kept });
            return Ok(());
        }
        let splits = self.splits(a, tile);
        self.push(id, Action::AttendRow { x, out: to, tile, splits }, Over::Heads { n, rows: 1, kept });
        if let Some(splits) = splits {
            self.push(id, Action::Merge { out: to, splits, gate }, Over::Heads { n, rows: 1, kept });
        }
        Ok(())
    }

    /// Positions of a tile of attention with pages of `page_rows` positions, and whether warpgroups attend.
    fn tile_of(&self, id: GridId, grid: &Grid, a: &Attention, page_rows: u32) -> Result<(u32, bool), Refused> {
        let inputs = self.plan.machine.inputs;
        let may = self.plan.form == Form::Chunk && self.warpgroup_mma && self.asked.knobs.tile == 0;
        if may && page_rows.is_multiple_of(WIDE_TILE) && attends_wide(self.schedule, id, a, inputs) {
            return Ok((WIDE_TILE, true));
        }
        let tiles = [TILE_MAX, TILE_MAX / 2, TILE_MAX / 4];
        let row_bytes = cache_row_bytes(a.head_dim, self.program.precision.cache);
        let slot_bytes = inputs.slot_bytes;
        let slot_bytes = if self.plan.form.decides() { slot_bytes.min(STEP_TILE_BYTES_MAX) } else { slot_bytes };
        let fits = |tile: &u32| page_rows.is_multiple_of(*tile) && 2 * tile * row_bytes <= slot_bytes;
        let Some(most) = tiles.into_iter().find(fits) else {
            return refused(grid, "pages", "a multiple of 16 positions");
        };
        let tile = chosen(self.asked.knobs.tile).unwrap_or(most);
        if !fits(&tile) {
            return refused_knob("wave_tile", tile, format!("at most {most}, as slots of inputs and pages hold"));
        }
        Ok((tile, false))
    }

    /// A wave that norms q and k over all heads; what it leaves.
    fn norm_heads(&mut self, id: GridId, x: WorkId) -> WorkId {
        let out = self.work("heads_normed", Layout::Parts(1), self.plan.work[x.index()].cols);
        self.push(id, Action::NormHeads { x, out }, WHOLE_ROWS);
        out
    }

    /// How the histories of this attention are cut. `None` if the plan cuts none, or they are too short.
    fn splits(&mut self, a: &Attention, tile: u32) -> Option<Splits> {
        // The first tile of a window is read whole.
        let seen = a.window.unwrap_or(u32::MAX).min(self.program.context_max);
        let longest = seen.saturating_add(tile).min(self.program.context_max);
        let cols = a.heads * (a.head_dim + 2);
        let left = |positions: u32| {
            let most = longest.div_ceil(positions);
            (most, u64::from(self.plan.rows) * u64::from(most) * u64::from(cols) * 4)
        };
        let row_bytes = cache_row_bytes(a.head_dim, self.program.precision.cache);
        let (mut positions, least) = match self.asked.cuts {
            Cuts::None => return None,
            Cuts::Long => (tile << (SPLIT_BYTES / (2 * tile * row_bytes)).max(1).ilog2(), MERGE_SPLITS),
            Cuts::At(positions) => (positions, 1),
        };
        while left(positions).1 > SPLITS_LEFT_BYTES && positions < longest {
            positions *= 2;
        }
        let (most, _) = left(positions);
        (seen > least.saturating_mul(positions)).then(|| Splits {
            positions,
            most,
            left: self.work("left", Layout::Splits(most), cols),
        })
    }
}

/// Whether norms of q and k, as far as there are some, are over all heads.
fn over_all_heads(a: &Attention) -> bool {
    [&a.q_norm, &a.k_norm].into_iter().flatten().all(QkNormAttr::is_over_all_heads)
}

/// The shares of units for blocks of rows, of each part of k. Some SMs work on each block of rows and part of k, and share all units of the
/// matrix. So each weight is read once for each block of rows, from L2 after the first time, and an SM reads only its own rows and its own part of the input.
fn unit_shares(units: Units, blocks: u32, block_rows: u32, sms: u32) -> Vec<Vec<Share>> {
    let Units { n, parts, .. } = units;
    let mut out = vec![vec![]; sms as usize];
    for i in 0..blocks * parts {
        let (first, end) = nearly_equal(sms, i, blocks * parts);
        // If there are fewer SMs than blocks of rows, an SM has several.
        let end = end.max(first + 1);
        for sm in first..end {
            let (lo, hi) = units.share(sm - first, end - first);
            let (row, from) = (i / parts * block_rows, i % parts * n);
            out[sm as usize].push(Share { row, rows: block_rows, lo: from + lo, hi: from + hi });
        }
    }
    out
}

/// The same where the two blocks of a pair have the same units, and blocks of rows side by side.
fn paired_shares(units: Units, blocks: u32, block_rows: u32, sms: u32) -> Vec<Vec<Share>> {
    let cut = cut_shares(units, blocks / 2, block_rows, sms / 2);
    let of_pairs = cut.unwrap_or_else(|| unit_shares(units, blocks / 2, block_rows, sms / 2));
    let of_block = |of: u32| move |share: &Share| Share { row: 2 * share.row + of * block_rows, ..*share };
    let of_pair = |shares: Vec<Share>| [0, 1].map(|of| shares.iter().map(of_block(of)).collect());
    of_pairs.into_iter().flat_map(of_pair).collect()
}

/// Where SMs are no multiple of blocks of rows and parts of k: each of these has equally many SMs, and those that are left take the last units of every share. `None`
/// if no share gets shorter.
///
/// Of 66 pairs of SMs and 16 blocks of rows, two pairs are left. If two blocks had a fifth pair, the other 14 would take as long as without them. What is cut has 192
/// columns at least: products of fewer take less time than copies of their input (docs/perf/wave.md, entry 69).
fn cut_shares(units: Units, blocks: u32, block_rows: u32, sms: u32) -> Option<Vec<Vec<Share>>> {
    let Units { n, parts, .. } = units;
    let groups = blocks.checked_mul(parts).filter(|groups| *groups > 0)?;
    let (of_group, left) = (sms / groups, sms % groups);
    let pieces = of_group.checked_mul(groups).filter(|pieces| *pieces > 0 && left > 0)?;
    // What a share takes, in parts of what 32 columns do: an instruction has multiples of 64, and a pass begins and ends.
    let time = |units: u32| {
        let rest = units % SHARED_PASS_MAX;
        let begun = if rest > 0 { 2 * rest.div_ceil(SHARED_UNITS) + 1 } else { 0 };
        units / SHARED_PASS_MAX * (SHARED_PASS_MAX / 4 + 1) + begun
    };
    let lengths = || (0..of_group).map(|i| units.share(i, of_group)).map(|(lo, hi)| hi - lo);
    let (longest, shortest) = (lengths().max()?, lengths().min()?);
    let with = |cut: u32| time(longest - cut).max(pieces.div_ceil(left) * time(cut));
    let cuts = [SHARED_PASS_MAX - SHARED_UNITS, SHARED_PASS_MAX].into_iter().filter(|cut| *cut < shortest);
    let cut = cuts.min_by_key(|cut| with(*cut)).filter(|cut| with(*cut) < time(longest))?;
    let mut out = vec![vec![]; sms as usize];
    let mut give = |sm: u32, group: u32, lo: u32, hi: u32| {
        let (row, from) = (group / parts * block_rows, group % parts * n);
        out[sm as usize].push(Share { row, rows: block_rows, lo: from + lo, hi: from + hi });
    };
    for i in 0..of_group {
        let (lo, hi) = units.share(i, of_group);
        for group in 0..groups {
            give(group * of_group + i, group, lo, hi - cut);
            // Pieces with the same weights one after another.
            let piece = u64::from(i * groups + group);
            give(pieces + (piece * u64::from(left) / u64::from(pieces)) as u32, group, hi - cut, hi);
        }
    }
    Some(out)
}

/// What SMs divide in a launch: `n` units in each of `parts` parts of k.
#[derive(Debug, Clone, Copy)]
struct Units {
    n: u32,
    parts: u32,
    step: u32,
}

impl Units {
    fn of(n: u32, parts: u32, step: u32) -> Units {
        Units { n, parts, step: if parts == 1 { step.max(1) } else { 1 } }
    }

    /// Those of share `i` of `of` shares of a part.
    fn share(self, i: u32, of: u32) -> (u32, u32) {
        let (lo, hi) = nearly_equal(self.n.div_ceil(self.step), i, of);
        let at = |step: u32| step.saturating_mul(self.step).min(self.n);
        (at(lo), at(hi))
    }
}

/// Rows that a block of `sms` has together: as many up to `most`, a power of two, as give no block more rows than single ones would.
fn rows_together(rows: u32, sms: u32, most: u32) -> u32 {
    let longest = |step: u32| step * (rows / step).div_ceil(sms.max(1));
    let fits = |step: &u32| rows.is_multiple_of(*step) && longest(*step) <= longest(1);
    std::iter::successors(Some(most), |step| Some(step / 2)).take_while(|step| *step > 1).find(fits).unwrap_or(1)
}

/// Part `i` of `of` nearly equal parts of `n`.
fn nearly_equal(n: u32, i: u32, of: u32) -> (u32, u32) {
    let at = |i: u32| (u64::from(n) * u64::from(i) / u64::from(of.max(1))) as u32;
    (at(i), at(i + 1))
}

/// Most shares and SMs of a plan that its text leaves out, as [`usual`] counts them.
pub(super) const UNWRITTEN_MAX: u64 = 1 << 22;

/// The shares that a derived plan has in launches of `blocks` blocks of rows, and a bound of the time and memory that it takes to list them. `None`: no plan with such
/// numbers is derived.
pub(super) fn usual(plan: &Plan, over: Over, blocks: u32) -> Option<(u64, impl FnOnce() -> Vec<Vec<Share>>)> {
    let (block_rows, of) = (plan.block_rows, Blocks::of(plan));
    let Blocks { sms, devices, paired, .. } = of;
    let rows = blocks.checked_mul(block_rows).filter(|rows| *rows > 0)?;
    let product = |of: &[u32]| of.iter().fold(1u64, |product, n| product.saturating_mul(u64::from(*n)));
    let shares_most = match over {
        Over::Rows { parts: 1 } | Over::Sums { .. } | Over::Items { .. } => 0,
        Over::Rows { parts } => product(&[rows, parts]),
        Over::Units { n, parts, .. } if u32::try_from(product(&[n, parts])).is_ok() => {
            product(&[blocks, parts]).saturating_add(u64::from(sms))
        }
        Over::Units { .. } => return None,
        Over::Heads { n, rows: 1, .. } => product(&[rows, n]),
        Over::Heads { n, rows: tile, .. } => product(&[rows.checked_div(tile)?, n, sms]),
        Over::States { n } => u64::from(n),
    };
    let parted = match over {
        Over::Rows { parts } | Over::Sums { parts } | Over::Units { parts, .. } => parts > 0,
        _ => true,
    };
    let even = devices > 0 && sms.is_multiple_of(devices) && !matches!(over, Over::Heads { kept: 0, .. });
    let of_device = sms.checked_div(devices).unwrap_or(0);
    let listed = even && (of_device >= 2 || of_device == 1 && !paired);
    // Far from numbers that would overflow.
    let cost = shares_most.saturating_add(u64::from(sms)).saturating_add(1);
    let list = move || shares(over, blocks, block_rows, of);
    (parted && listed && cost <= UNWRITTEN_MAX).then_some((cost, list))
}

/// The blocks that divide the work of a wave.
#[derive(Debug, Clone, Copy)]
struct Blocks {
    /// Of all devices.
    sms: u32,
    devices: u32,
    /// Whether pairs of blocks share the weights of a chunk.
    paired: bool,
    /// Most rows side by side that a block is given together.
    together: u32,
}

impl Blocks {
    fn of(plan: &Plan) -> Blocks {
        let Machine { sms, devices, pairs, .. } = plan.machine;
        let is_chunk = plan.form == Form::Chunk;
        Blocks { sms, devices, paired: is_chunk && pairs, together: if is_chunk { ROWS_OF_LINE } else { 1 } }
    }
}

/// The shares of each SM of a launch of `blocks` blocks of rows. Each of several devices divides what it has of the launch indices; a wave of rows each does for
/// itself.
fn shares(over: Over, blocks: u32, block_rows: u32, of: Blocks) -> Vec<Vec<Share>> {
    let devices = of.devices;
    let of_device = |device: u32| {
        let own = over.of_device(device, devices);
        let kept = match (over, &own) {
            (Over::Units { parts, step, .. }, Some(own)) => Over::Units { n: own.len() as u32, parts, step },
            (Over::Heads { rows, kept, .. }, Some(own)) => Over::Heads { n: own.len() as u32, rows, kept },
            _ => over,
        };
        let mut shares = shares_of_device(kept, blocks, block_rows, Blocks { sms: of.sms / devices, ..of });
        if let Some(own) = own.filter(|_| devices > 1) {
            for share in shares.iter_mut().flatten() {
                // A share lies in one part of k.
                let (part, first) = (share.lo / own.len() as u32, share.lo % own.len() as u32);
                let lo = part * over.indices() + own.start + first;
                (share.lo, share.hi) = (lo, lo + (share.hi - share.lo));
            }
        }
        shares
    };
    (0..devices).flat_map(of_device).collect()
}

/// The same of one device.
fn shares_of_device(over: Over, blocks: u32, block_rows: u32, of: Blocks) -> Vec<Vec<Share>> {
    let rows = blocks * block_rows;
    let Blocks { sms, paired, together, .. } = of;
    let mut out = vec![vec![]; sms as usize];
    match over {
        Over::Sums { parts } if parts_of(parts, blocks) == 1 => {}
        Over::Rows { parts: 1 } | Over::Sums { .. } => {
            let step = rows_together(rows, sms, together);
            for (sm, shares) in (0..).zip(&mut out) {
                let (lo, hi) = nearly_equal(rows / step, sm, sms);
                shares.push(Share { row: lo * step, rows: (hi - lo) * step, lo: 0, hi: 1 });
            }
        }
        Over::Rows { parts } => {
            for i in 0..rows * parts {
                out[(i % sms) as usize].push(Share { row: i / parts, rows: 1, lo: i % parts, hi: i % parts + 1 });
            }
        }
        // In a step SMs side by side have the parts of the same units.
        Over::Units { n, parts, .. } if blocks == 1 && parts > 1 && sms.is_multiple_of(parts) => {
            for sm in 0..sms {
                let (lo, hi) = nearly_equal(n, sm / parts, sms / parts);
                let from = sm % parts * n;
                out[sm as usize].push(Share { row: 0, rows: block_rows, lo: from + lo, hi: from + hi });
            }
        }
        Over::Units { n, parts, step } => {
            let units = Units::of(n, parts_of(parts, blocks), step);
            let of_pairs = paired && blocks.is_multiple_of(2);
            let shares = if of_pairs { paired_shares } else { unit_shares };
            out = shares(units, blocks, block_rows, sms);
        }
        Over::Items { .. } => {}
        Over::States { n } => {
            for i in 0..n {
                out[(i % sms) as usize].push(Share { row: 0, rows, lo: i, hi: i + 1 });
            }
        }
        // Single rows go to the SMs in turn. So the work is even for fewer rows, too.
        Over::Heads { n, rows: 1, .. } => {
            for i in 0..rows * n {
                out[(i % sms) as usize].push(Share { row: i / n, rows: 1, lo: i % n, hi: i % n + 1 });
            }
        }
        // Later rows see longer histories. The longest tiles are given out first, each to the SM with the least work so far.
        Over::Heads { n, rows: tile, .. } => {
            let mut load = vec![0u64; sms as usize];
            for row in (0..rows / tile).rev().map(|t| t * tile) {
                for i in 0..n {
                    let sm = (0..sms as usize).min_by_key(|sm| load[*sm]).unwrap_or(0);
                    load[sm] += u64::from(row + tile + block_rows);
                    out[sm].push(Share { row, rows: tile, lo: i, hi: i + 1 });
                }
            }
        }
    }
    out.iter_mut().for_each(|shares| shares.retain(|s| s.rows > 0 && s.lo < s.hi));
    out
}
