//! Group 3: how the tasks of matvecs and attention are done, against arithmetic of our own.
//!
//! What a variant may choose freely is judged with the kernels (`kernels`). Here is what follows from other parts of the
//! schedule: how long tasks are, which chunks slots hold, where rows of the cache lie.

use super::{Entity, Found, Rule, note};
use crate::dtype::DType;
use crate::format::{Code, Format, ScaleCode};
use crate::ir::GridId;
use crate::ir::op::{MatVec, Op, Role};
use crate::ir::program::Grid;
use crate::ir::schedule::Schedule;
use crate::ir::variant::{AttentionVariant, MatVecVariant, Variant};
use crate::target::{DotMechanism, Target};

/// Bytes of 8 rows of 64 bytes, the least that a chunk holds.
const GRANULE: u64 = 512;
const GRANULE_ROW: u64 = 64;
const UNIT_ROWS: u64 = 8;

pub(super) fn check(schedule: &Schedule, target: &Target, found: &mut Found) {
    let mut longest = vec![0u32; schedule.program.grids.len()];
    for task in schedule.regimes.iter().flat_map(|regime| &regime.tasks) {
        let most = &mut longest[task.grid.index()];
        *most = schedule.units_at_once(&schedule.program.grids[task.grid.index()], task).max(*most);
    }
    for ((g, grid), longest) in (0..).zip(&schedule.program.grids).zip(longest) {
        let (at, variant) = (GridId(g), schedule.variants.get(&GridId(g)));
        match (&grid.op, variant) {
            (Op::MatVec(m), Some(Variant::MatVec(variant))) => {
                matvec(schedule, target, (at, grid), m, variant, longest, found);
            }
            (Op::Attention(a), Some(Variant::Attention(variant))) => {
                attention(at, grid, variant, found);
                let tensor_cores = target.spec.dot == DotMechanism::Mma;
                let (precision, warps) = (schedule.program.precision, schedule.machine.consumer_warps);
                let expected = tensor_cores && a.on_tensor_cores(precision, warps, variant.warps_per_head);
                if variant.swizzled != expected {
                    found.add(Rule::Variant, Entity::Grid(at), || {
                        format!("expected `swizzled` to be {expected}, as the path of the kernel decides")
                    });
                }
            }
            (Op::MatVec(_) | Op::Attention(_), _) => found.add(Rule::Variant, Entity::Grid(at), || {
                format!("expected a variant of `{}`, found {}", grid.op.name(), kind(variant))
            }),
            (_, Some(_)) => found.add(Rule::Variant, Entity::Grid(at), || {
                format!("expected no variant of `{}`, which has none", grid.op.name())
            }),
            (_, None) => {}
        }
    }
    if let Some((&grid, _)) = schedule.variants.iter().find(|(g, _)| g.index() >= schedule.program.grids.len()) {
        found.add(Rule::IdRange, Entity::Schedule, || format!("a variant of {grid}, which is not there"));
    }
}

/// Whether the code that several matvecs share does what this one needs: it multiplies 16 rows on tensor cores, with plain weights, in one pass of whole blocks of k, all rows at
/// once. It does no norm, and begins at the first column of its output.
fn may_share(schedule: &Schedule, target: &Target, grid: &Grid, m: &MatVec, variant: &MatVecVariant) -> bool {
    let parts = UNIT_ROWS / u64::from(m.unit_rows).clamp(1, UNIT_ROWS);
    let (granule_k, _) = granules(schedule, grid);
    let unit = u64::from(m.k).div_ceil(granule_k * parts).max(1);
    let block_k = u64::from(variant.chunk).clamp(1, unit) * granule_k * parts;
    let begins = grid.operand(Role::Out).is_none_or(|out| out.cols.base == 0);
    (9..=16).contains(&schedule.program.rows)
        && on_tensor_cores(schedule, target)
        && has_plain_weights(schedule, grid)
        && (variant.pass > 0 && variant.units <= variant.pass)
        && u64::from(m.k).is_multiple_of(block_k)
        && (m.norm.is_none() && !grid.is_dealt() && begins)
}

fn kind(variant: Option<&Variant>) -> &'static str {
    match variant {
        None => "none",
        Some(Variant::MatVec(_)) => "one of a matvec",
        Some(Variant::Attention(_)) => "one of an attention",
    }
}

/// Weights of a row of a granule, and bytes of a granule: 8 rows of 64 bytes of codes, then the scales and zero points of its groups, in
/// the least multiple of 16 bytes, which is what copies take.
pub(super) fn granules(schedule: &Schedule, grid: &Grid) -> (u64, u64) {
    let weight = grid.operand(Role::Weight).map(|o| &schedule.program.buffers[o.buffer.index()]);
    let dtype_bits = schedule.program.precision.weights.bytes() as u64 * 8;
    let Some(Format { code, groups, .. }) = weight.and_then(|buffer| buffer.coded) else {
        return (GRANULE_ROW * 8 / dtype_bits, GRANULE);
    };
    let bits = match code {
        Code::F32 => 32,
        Code::Bf16 => 16,
        Code::Int8 | Code::E4m3 => 8,
        Code::Int4 | Code::E2m1 => 4,
    };
    let granule_k = GRANULE_ROW * 8 / bits;
    let Some(groups) = groups else { return (granule_k, GRANULE) };
    let count = granule_k.div_ceil(u64::from(groups.k.max(1)));
    let each = |scale: u64| count * (scale * (1 + u64::from(groups.minima)) + u64::from(groups.zeros));
    let of_row = match groups.scale {
        ScaleCode::F32 => each(4),
        ScaleCode::F16 | ScaleCode::Bf16 => each(2),
        ScaleCode::E4m3 | ScaleCode::E8m0 => each(1),
        // Two fp16 numbers; each two groups have two scales and two minima of six bits.
        ScaleCode::F16x6 => 4 + count.div_ceil(2) * 3,
    };
    (granule_k, (GRANULE + UNIT_ROWS * of_row).div_ceil(16) * 16)
}

fn matvec(
    schedule: &Schedule,
    target: &Target,
    (at, grid): (GridId, &Grid),
    m: &MatVec,
    variant: &MatVecVariant,
    longest: u32,
    found: &mut Found,
) {
    let MatVecVariant { units, chunk, block, granule, pass, .. } = *variant;
    let ring = &schedule.machine.ring;
    let (granule_k, bytes) = granules(schedule, grid);
    let parts = UNIT_ROWS / u64::from(m.unit_rows).clamp(1, UNIT_ROWS);
    let unit = u64::from(m.k).div_ceil(granule_k * parts).max(1);
    // What a task streams for a unit: one of each slot.
    let unit = unit.saturating_mul(u64::from(m.slots.max(1)));
    let (slot, warps) = (u64::from(ring.slot_bytes) / bytes, u64::from(ring.arrivals.max(1)));
    if u64::from(granule) != bytes {
        found.add(Rule::Variant, Entity::Grid(at), || format!("expected granules of {bytes} bytes, found {granule}"));
    }
    // In a step of several rows a block of k may be fewer granules than there are warps.
    let least = if pass > 0 { 1 } else { warps };
    if slot < least {
        // `order` judges the same for granules without scales.
        found.add_with(Rule::RingShape, Entity::Machine, || {
            let message =
                format!("expected a granule of {bytes} bytes in a slot for each of {least} warps, found {slot}");
            (message, vec![note(Entity::Grid(at), "streams them")])
        });
        return;
    }
    if units < longest {
        found.add(Rule::Variant, Entity::Grid(at), || {
            format!("expected `units` of {longest} or more, as its longest task has, found {units}")
        });
    }
    if variant.shared && !may_share(schedule, target, grid, m, variant) {
        found.add(Rule::Variant, Entity::Grid(at), || {
            "expected code of its own: shared code has steps of 16 rows in one pass of whole blocks, and no norm"
                .to_string()
        });
    }
    if pass > 0 {
        // Blocks of k of one unit, as equal as whole granules for every warp allow; with more than 16 rows, for every
        // group of warps that together have all rows.
        let most =
            block_max(schedule, target, grid, parts, granule_k).max(whole_max(schedule, target, grid, granule_k, unit));
        let slot = slot.min(most).max(1);
        let warps = (warps / u64::from(schedule.program.rows).div_ceil(16)).max(1);
        let chunks = if unit <= slot {
            unit
        } else if holds_pieces(schedule, target, grid) {
            // No more blocks than a slot asks for, whether or not warps have as many granules each.
            let equal = unit.div_ceil(unit.div_ceil(slot));
            let whole = equal.div_ceil(warps) * warps;
            if whole > slot { equal } else { whole }
        } else {
            let warps = if slot < warps { 1 } else { warps };
            let most = slot / warps * warps;
            (unit.div_ceil(unit.div_ceil(most)).div_ceil(warps) * warps).min(most)
        };
        if (u64::from(chunk), u64::from(block)) != (chunks, unit) {
            found.add_with(Rule::Variant, Entity::Grid(at), || {
                let message =
                    format!("expected chunks of {chunks} granules of units of {unit}, found {chunk} and {block}");
                (message, vec![note(Entity::Machine, "has the slots")])
            });
        }
        return;
    }
    // Whole units if a slot holds one; else parts of a unit, as equal as whole granules for every warp allow.
    let (chunks, blocks) = if unit <= slot {
        (slot / unit * unit, unit.saturating_mul(u64::from(units)))
    } else {
        let most = slot / warps * warps;
        (unit.div_ceil(unit.div_ceil(most)).div_ceil(warps) * warps, unit)
    };
    if (u64::from(chunk), u64::from(block)) != (chunks, blocks) {
        found.add_with(Rule::Variant, Entity::Grid(at), || {
            let message =
                format!("expected chunks of {chunks} granules in blocks of {blocks}, found {chunk} and {block}");
            (message, vec![note(Entity::Machine, "has the slots")])
        });
    }
}

/// Whether a kernel for up to 16 rows multiplies plain weights on tensor cores.
fn holds_pieces(schedule: &Schedule, target: &Target, grid: &Grid) -> bool {
    schedule.program.rows <= 16 && has_plain_weights(schedule, grid) && on_tensor_cores(schedule, target)
}

fn has_plain_weights(schedule: &Schedule, grid: &Grid) -> bool {
    let weight = grid.operand(Role::Weight).map(|o| &schedule.program.buffers[o.buffer.index()]);
    weight.is_none_or(|buffer| buffer.coded.is_none_or(Format::is_plain))
}

fn on_tensor_cores(schedule: &Schedule, target: &Target) -> bool {
    let precision = schedule.program.precision;
    target.spec.dot == DotMechanism::Mma && precision.weights == DType::Bf16 && precision.wire == DType::Bf16
}

/// Most granules of a block of k of a batch kernel, which holds the input of a block at once. Of plain weights on tensor cores, up to 16
/// rows: ten vectors of 16 bytes a lane, one of each granule of its warp, part of k and 8 rows; otherwise 32 granules, divided by the tiles
/// of 16 rows and by the parts of k. Of codes: on tensor cores, as many as 16 Ki values of all rows fill; otherwise as much of k as a slot
/// would hold of values.
fn block_max(schedule: &Schedule, target: &Target, grid: &Grid, parts: u64, granule_k: u64) -> u64 {
    let Schedule { program, machine, .. } = schedule;
    let rows = u64::from(program.rows);
    if holds_pieces(schedule, target, grid) {
        let vectors = parts * rows.div_ceil(8).max(1);
        return 10 / vectors * u64::from(machine.ring.arrivals.max(1));
    }
    if has_plain_weights(schedule, grid) {
        return 32 / rows.div_ceil(16).max(1) / parts;
    }
    if on_tensor_cores(schedule, target) {
        (16 << 10) / (rows.div_ceil(8) * 8) / granule_k
    } else {
        u64::from(machine.ring.slot_bytes) / (8 * program.precision.weights.bytes() as u64) / granule_k
    }
}

/// `unit`, the granules of a unit, if warps hold the input of whole units; otherwise 0. They do so for codes of 4 bits in steps of up to 16 rows, if consumers have the loader's registers.
/// With 8 rows a lane has 80 registers for it, with 16 rows 104. Each granule of its warp takes 16 of them for each 8 rows. If multiples of sums of the input are
/// subtracted, the sum of a group takes 6, or that of the row.
fn whole_max(schedule: &Schedule, target: &Target, grid: &Grid, granule_k: u64, unit: u64) -> u64 {
    let Schedule { program, machine, .. } = schedule;
    let weight = grid.operand(Role::Weight).map(|o| &program.buffers[o.buffer.index()]);
    let coded = weight.and_then(|buffer| buffer.coded);
    let Some(format) = coded.filter(|format| matches!(format.code, Code::Int4 | Code::E2m1)) else { return 0 };
    if !on_tensor_cores(schedule, target) || machine.loader_registers == 0 || program.rows > 16 {
        return 0;
    }
    let (eights, registers) = if program.rows <= 8 { (1, 80) } else { (2, 104) };
    let sums = match format.groups {
        Some(groups) if groups.zeros || groups.minima || format.code == Code::Int4 => {
            granule_k.div_ceil(u64::from(groups.k.max(1)))
        }
        None if format.code == Code::Int4 => 1,
        _ => 0,
    };
    let of_warp = unit.div_ceil(u64::from(machine.ring.arrivals.max(1)));
    if of_warp * (16 * eights + 6 * sums) <= registers { unit } else { 0 }
}

fn attention(at: GridId, grid: &Grid, variant: &AttentionVariant, found: &mut Found) {
    let Some(keys) = grid.operand(Role::HistoryK) else { return };
    if keys.cols.stride != variant.pitch {
        found.add_with(Rule::Variant, Entity::Grid(at), || {
            let message = format!("expected a `pitch` of {} columns, found {}", keys.cols.stride, variant.pitch);
            (message, vec![note(Entity::Buffer(keys.buffer), "has rows of its KV heads side by side")])
        });
    }
    // Only the swizzled path limits the number: the other one gives every warp all dimensions, whatever this says.
    if variant.warps_per_head == 0 {
        found.add(Rule::Variant, Entity::Grid(at), || "expected `warps_per_head` of 1 or more, found 0".to_string());
    }
}
