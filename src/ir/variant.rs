//! Owns the variants of ops: what a kernel may do in more than one way. They decide how fast an op is and nothing else: the
//! interpreter knows none of them, and results differ by rounding at most.

use super::layout::{WARP_ROWS, WORD_ROWS, cache_pitch};
use super::op::{Attention, MatVec, QkNormAttr, UNIT_ROWS};
use super::schedule::Machine;
use crate::dtype::{DType, Precision};
use crate::format::{Code, Format, Groups, ScaleCode};
use crate::model::graph::QkNormSpan;
use std::ops::Range;

/// Registers of a lane that hold weights, with the scales and zero points of their groups, unless a candidate says otherwise.
const HELD_REGISTERS: u32 = 48;
/// More would leave too few registers for the sums and the staging of the input.
const HELD_REGISTERS_MAX: u32 = 96;
/// Pairs of packets that a thread waits for at once unless a candidate says otherwise: each round of waiting costs a trip to L2, each
/// pair four registers.
pub const POLL_BATCH: u32 = 8;
/// Units whose partial sums meet in one reduction, unless a candidate says otherwise.
pub const REDUCE_BATCH: u32 = 8;
/// Two batches of more would take shared memory that the ring needs.
pub const REDUCE_BATCH_MAX: u32 = 64;
/// Heads of more dimensions share their sums between warps, unless a candidate says otherwise.
const TEAM_DIM: u32 = 128;

/// How the tasks of a grid are done, as far as the op leaves it open. Scheduling resolves it once, from the candidate and from
/// what the tasks became; every later stage reads these numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    MatVec(MatVecVariant),
    Attention(AttentionVariant),
}

/// How the tasks of a matvec are done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MatVecVariant {
    /// Units of the longest task of any grid with this op, so that layers share one kernel.
    pub units: u32,
    /// Granules of a chunk; the last one of a block may be shorter.
    pub chunk: u32,
    /// Granules that no chunk reaches beyond: those of a unit if a unit is several chunks, else those of the longest task.
    pub block: u32,
    /// Units whose weights a warp holds in registers at once.
    pub units_per_warp: u32,
    /// Pairs of packets of the input that a thread waits for at once.
    pub poll_batch: u32,
    /// Bytes of a granule, the scales of its groups included.
    pub granule: u32,
    /// 0: units lie in the stream one after another, each whole. Otherwise units that are streamed together, a chunk of each in
    /// turn: a batch kernel multiplies a block of its input with all of them.
    pub pass: u32,
    /// Whether its code is that of all such matvecs with blocks and units of the same size: the projection after attention and that of the MLP, for instance. The code of a
    /// layer and of what runs between layers competes for 128 KiB of an SM.
    pub shared: bool,
}

/// How the tasks of an attention are done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AttentionVariant {
    /// Warps that share the tiles of a head, each for its part of the dimensions of V. On tensor cores only.
    pub warps_per_head: u32,
    /// Whether queries stay in registers and values are loaded before the softmax. On tensor cores only.
    pub prefetch_v: bool,
    /// Whether tensor cores do it: their kernel keeps cache rows swizzled.
    pub swizzled: bool,
    /// Columns from one KV head to the next in a cache row.
    pub pitch: u32,
}

impl MatVecVariant {
    /// The chunk that comes after `done` of the `total` bytes of a task's weights were streamed: its range of bytes in these
    /// weights.
    pub fn chunk_at(&self, done: u64, total: u64) -> Range<u64> {
        let [chunk, block] = [self.chunk, self.block].map(|n| u64::from(n.max(1)) * u64::from(self.granule));
        if self.pass == 0 {
            let end = (done / block + 1) * block;
            return done..done + chunk.min(end.min(total).saturating_sub(done));
        }
        // A block is a unit here. A task is passes; a pass is chunks of k, each for all units of the pass in turn.
        let pass = block * u64::from(self.pass);
        let first = done / pass * pass;
        let units = ((total.saturating_sub(first)) / block).clamp(1, u64::from(self.pass));
        let (part, in_pass) = (chunk * units, done - first);
        let at = in_pass / part * chunk;
        let bytes = chunk.min(block.saturating_sub(at));
        let begin = first + (in_pass % part) / bytes.max(1) * block + at;
        begin..begin + bytes
    }
}

impl AttentionVariant {
    /// The variant of an attention on `warps` warps, as a candidate asks for it.
    pub fn of(
        a: &Attention,
        precision: Precision,
        tensor_cores: bool,
        warps: u32,
        warps_per_head: u32,
        prefetch_v: bool,
    ) -> AttentionVariant {
        let swizzled = tensor_cores && a.on_tensor_cores(precision, warps, warps_per_head);
        AttentionVariant { warps_per_head, prefetch_v, swizzled, pitch: cache_pitch(a.head_dim, precision.cache) }
    }

    /// The same, with the numbers that the rules give.
    pub fn by_rule(a: &Attention, precision: Precision, tensor_cores: bool, warps: u32) -> AttentionVariant {
        let (warps_per_head, prefetch_v) = (warps_per_head_rule(a.head_dim), prefetch_v_rule(a.head_dim));
        AttentionVariant::of(a, precision, tensor_cores, warps, warps_per_head, prefetch_v)
    }

    /// Records (running maximum, sum, a sum for each dimension) of each query head that meet at the end of a task of `warps` warps:
    /// one for all warps that share a head, and one for the current position.
    pub fn records(&self, warps: u32) -> u32 {
        let teams = if self.swizzled { warps / self.warps_per_head.max(1) } else { warps };
        teams + 1
    }
}

/// What the tasks of a matvec need of registers, which limits its variants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegisterTiling {
    /// Granules of a unit that one warp reads, of one chunk at a time.
    granules: u32,
    /// Registers of a lane for each of them.
    registers: u32,
    /// Units that a chunk holds; 0: a unit is more than one chunk.
    of_chunk: u32,
    /// Units of the longest task.
    units: u32,
    /// Units of a batch of sums.
    batch: u32,
    /// Pairs of packets of the input that a thread stages.
    pairs: u32,
}

impl RegisterTiling {
    /// That of a matvec over a matrix of `format` whose longest task has `units`, in chunks of `chunk` granules.
    pub fn of(
        m: &MatVec,
        machine: &Machine,
        precision: Precision,
        format: Format,
        units: u32,
        chunk: u32,
    ) -> RegisterTiling {
        let (unit, warps) = (m.streamed_granules(format).max(1), machine.consumer_warps.max(1));
        let warp_pairs = warp_pairs(unit, warps, m.parts(), format, precision);
        RegisterTiling {
            granules: unit.min(chunk).div_ceil(warps).max(1),
            registers: granule_registers(format),
            of_chunk: chunk / unit,
            units: units.max(1),
            batch: machine.reduce_batch.max(1),
            pairs: warp_pairs.div_ceil(LANES),
        }
    }

    /// Units held at once unless a candidate says otherwise: all of a short task, so that no wait stands between its input and
    /// its sums, or whole chunks of it, so that a warp finishes one chunk before it waits for the next (docs/perf-log.md). No
    /// group reaches over the end of a batch of sums.
    pub fn units_per_warp_rule(&self) -> u32 {
        let fit = (HELD_REGISTERS / self.registers / self.granules).max(1);
        if self.of_chunk == 0 {
            return 1;
        }
        if self.units <= self.batch {
            // All at once, or whole chunks, or what fits of one.
            let whole = fit / self.of_chunk * self.of_chunk;
            let most = if fit >= self.units || whole == 0 { fit } else { whole };
            return self.units.div_ceil(self.units.div_ceil(most));
        }
        of_long_task(fit, self.batch)
    }

    /// Pairs of packets of the input that a thread stages.
    pub fn pairs(&self) -> u32 {
        self.pairs
    }

    /// Pairs that a thread waits for at once unless a candidate says otherwise.
    pub fn poll_batch_rule(&self) -> u32 {
        self.pairs.min(POLL_BATCH)
    }

    /// Why a warp cannot hold `hold` units; `None`: it can.
    pub fn refuses_units_per_warp(&self, hold: u32) -> Option<String> {
        let RegisterTiling { granules, registers, of_chunk, units, batch, .. } = *self;
        if hold == 0 || hold > units {
            return Some(format!("1 to {units}, the units of the longest task"));
        }
        if hold > 1 && of_chunk == 0 {
            return Some("1, for a unit is more than one chunk".to_string());
        }
        let of_unit = granules.saturating_mul(registers);
        if hold > 1 && hold.saturating_mul(of_unit) > HELD_REGISTERS_MAX {
            let most = (HELD_REGISTERS_MAX / of_unit).max(1);
            return Some(format!(
                "at most {most}: each unit takes {of_unit} registers of a lane, of {HELD_REGISTERS_MAX}"
            ));
        }
        let divides = units <= batch || batch.is_multiple_of(hold);
        (!divides).then(|| format!("a divisor of {batch}, the units of a batch of sums"))
    }

    /// Why a thread cannot wait for `poll` pairs at once; `None`: it can.
    pub fn refuses_poll_batch(&self, poll: u32) -> Option<String> {
        let most = self.pairs.min(2 * POLL_BATCH);
        (poll == 0 || poll > most).then(|| format!("1 to {most}, as many pairs as a thread stages, and registers hold"))
    }
}

/// Bytes of shared memory by which batches of `sum_units` are longer than by default: two batches, each with a sum of each row of a unit and warp.
pub fn longer_sums_bytes(sum_units: u32, warps: u32) -> u64 {
    u64::from(sum_units.saturating_sub(REDUCE_BATCH)) * u64::from(2 * warps * UNIT_ROWS * 4)
}

/// Units that a warp holds at once of a task of more units than a `batch` of sums, by rule: a warp has `granules` of each. No group reaches over the
/// end of a batch.
pub fn units_held(format: Format, granules: u32, batch: u32) -> u32 {
    of_long_task(HELD_REGISTERS / granule_registers(format) / granules.max(1), batch)
}

/// The most units up to `fit` of which a batch has a whole number.
fn of_long_task(fit: u32, batch: u32) -> u32 {
    (1..=batch.min(fit)).rev().find(|n| batch.is_multiple_of(*n)).unwrap_or(1)
}

/// Registers of a lane for a granule: its 16 bytes of weights; for codes also the scales and zero points of the groups that it has sums
/// of, which are half of them on tensor cores (`matvec_formats.cuh`).
fn granule_registers(format: Format) -> u32 {
    let groups = format.granule_groups().div_ceil(2);
    let of_scales = |g: Groups| (groups * g.scale.bytes()).div_ceil(4);
    let of_groups = |g: Groups| match g.scale {
        // Two numbers of fp16, and a word for each two groups.
        ScaleCode::F16x6 => 1 + groups.div_ceil(2),
        _ => of_scales(g) * (1 + u32::from(g.minima)) + u32::from(g.zeros),
    };
    4 + format.groups.map_or(0, of_groups)
}

/// Why no kernel streams a matrix of `format`; `None`: kernels for any number of rows do (`matvec_formats.cuh`).
pub fn kernel_refuses(format: Format, precision: Precision) -> Option<String> {
    if format.is_plain() {
        let plain = Format::plain(precision.weights);
        return (format != plain).then(|| format!("values of {plain}, as the other matrices"));
    }
    if granule_pairs(1, format, precision) > LANES {
        return Some("activations in bf16: a warp has as many lanes as pairs of packets".to_string());
    }
    match format.groups {
        Some(groups) if groups.k < 32 => Some("groups of 32 weights or more".to_string()),
        // The zero point is subtracted from the sums of groups.
        None if format.code == Code::Int4 => Some("scales of groups".to_string()),
        _ => None,
    }
}

/// Whether a batch kernel multiplies on tensor cores. Words and plain weights are their operands as they lie, so both must be bf16.
pub fn rows_on_tensor_cores(precision: Precision, tensor_cores: bool) -> bool {
    tensor_cores && precision.weights == DType::Bf16 && precision.wire == DType::Bf16
}

/// Bytes of a plain weight if the lanes of a batch kernel multiply; `None`: tensor cores do.
pub fn lanes_of_rows(precision: Precision, tensor_cores: bool) -> Option<u32> {
    let lanes = !rows_on_tensor_cores(precision, tensor_cores);
    lanes.then_some(precision.weights.bytes() as u32)
}

/// What limits the units of a pass of a batch kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PassLimits {
    pub tensor_cores: bool,
    /// Parts of k of a unit.
    pub parts: u32,
    /// Rows of a step.
    pub rows: u32,
    /// Units of the longest task.
    pub units: u32,
    /// Granules of a block of k.
    pub block: u32,
    /// Whether the loader's registers are moved to the consumers.
    pub moved: bool,
}

/// Most units of a pass of a batch kernel; more would spill. On tensor cores a lane holds a sum of each unit and part of k for every
/// 4 of its rows, and two blocks of its input; if registers are moved, it has some of the loader's, too. Without tensor cores a lane
/// holds one sum of each row. With codes it also holds scales and the sums of its input, and each unit takes many more instructions,
/// which are fetched once for each task. If the longest task needs one pass only, no input is kept for another.
pub fn rows_pass_max(format: Format, precision: Precision, limits: PassLimits) -> u32 {
    /// Granules of a block that leave registers for 12 units of 16 rows.
    const BLOCK: u32 = 32;
    /// Granules of codes of a block that leave registers for 10.
    const CODES: u32 = 16;
    let PassLimits { tensor_cores, parts, rows, units, block, moved } = limits;
    if !rows_on_tensor_cores(precision, tensor_cores) {
        return 2;
    }
    let most = match (format.is_plain(), rows <= WORD_ROWS, moved) {
        (true, true, true) => 28,
        (true, true, false) => 10,
        (true, false, true) if rows <= WARP_ROWS && units <= 16 / parts.max(1) => 16,
        (true, false, true) if block > BLOCK => 10,
        (true, false, true) => 12,
        (true, false, false) => 8,
        (false, true, true) => 8,
        (false, true, false) => 4,
        (false, false, true) if block > CODES => 8,
        (false, false, true) => 10,
        (false, false, false) => 4,
    };
    (most / parts.max(1)).max(1)
}

/// Pairs of packets that hold the input of one granule of units of `parts` parts. The lanes of a warp take whole granules in turn, so
/// there can be at most 32 (`matvec.cuh`).
pub fn granule_pairs(parts: u32, format: Format, precision: Precision) -> u32 {
    format.granule_k() * parts / pair_values(precision)
}

/// Pairs of packets that the lanes of a warp stage in turn, of the input of a unit of `granules`, which `warps` share.
pub fn warp_pairs(granules: u32, warps: u32, parts: u32, format: Format, precision: Precision) -> u32 {
    granules.div_ceil(warps) * granule_pairs(parts, format, precision)
}

/// Values of a pair of 8-byte packets: two times as many as 4 bytes hold.
fn pair_values(precision: Precision) -> u32 {
    2 * (4 / precision.wire.bytes() as u32)
}

/// Values of a branch that the consumer warps of a block hold at once, to add it up everywhere: 8 pairs of packets a thread
/// (`norm_add.cuh`).
pub fn sum_width_max(precision: Precision, warps: u32) -> u32 {
    warps.saturating_mul(LANES * POLL_BATCH * pair_values(precision))
}

/// Lanes of a warp.
pub const LANES: u32 = 32;

/// Warps that share a head unless a candidate says otherwise: two for large heads, whose sums would take all registers of one.
pub fn warps_per_head_rule(head_dim: u32) -> u32 {
    if head_dim <= TEAM_DIM { 1 } else { 2 }
}

/// Unless a candidate says otherwise, queries and values wait in registers if the sums of a warp leave room for them.
pub fn prefetch_v_rule(head_dim: u32) -> bool {
    head_dim <= TEAM_DIM
}

/// In swizzled rows of a cache, the pieces of 16 bytes of each of these many bytes change places.
const SWIZZLED_BYTES: u32 = 128;

/// Where piece `piece` (16 bytes) of the cache row of `position` lies in that row, if rows of `row_bytes` are swizzled; `swizzle_of` of
/// `attention_tensor.cuh`.
pub fn swizzled_piece(position: u32, piece: u32, row_bytes: u32) -> u32 {
    let within = position >> 1 & 3;
    // Two rows of 64 bytes share 128, and each keeps its half.
    piece ^ if row_bytes < SWIZZLED_BYTES { within } else { (position & 1) << 2 | within }
}

impl Attention {
    /// Whether `attention_tensor.cuh` takes it, where the target has tensor cores: heads rotated whole, not at all, or in halves of a part that lanes share
    /// evenly; normalised alone, in bf16 (with a cache in bf16 or fp8), and of dimensions that the warps of a head share evenly.
    pub fn on_tensor_cores(&self, precision: Precision, warps: u32, warps_per_head: u32) -> bool {
        let Precision { weights: _, cache, wire } = precision;
        let (dim, team) = (self.head_dim, warps_per_head.max(1));
        let alone = |norm: &Option<QkNormAttr>| norm.is_none_or(|n| n.span == QkNormSpan::Head);
        let halves = self.rotary > 0 && !self.interleaved;
        // Pieces change places only inside the part of a row that one warp reads; rows of 64 bytes are a case of their own.
        let row_bytes = dim.saturating_mul(cache.bytes() as u32);
        let shared = row_bytes.is_multiple_of(SWIZZLED_BYTES.saturating_mul(team));
        (cache == DType::Bf16 && shared || cache == DType::E4m3 && (shared || dim == 64 && team == 1))
            && wire == DType::Bf16
            && dim <= 256
            && (self.rotary == 0 || self.rotary == dim || halves && self.rotates_evenly())
            && (!halves || dim == 64 || dim.is_multiple_of(128))
            && alone(&self.q_norm)
            && alone(&self.k_norm)
            && warps.is_multiple_of(team)
    }

    /// Whether q or k have a norm over all heads: then a head is not normalised alone.
    pub fn norms_all_heads(&self) -> bool {
        [&self.q_norm, &self.k_norm].into_iter().flatten().any(QkNormAttr::is_over_all_heads)
    }

    /// The same attention of heads that were normalised before.
    pub fn without_norms(&self) -> Attention {
        Attention { q_norm: None, k_norm: None, ..self.clone() }
    }

    /// Whether lanes share a part of a head that is rotated in halves: pairs of dimensions in lanes, or in the same lane.
    fn rotates_evenly(&self) -> bool {
        matches!(self.rotary, 16 | 32 | 64) || self.rotary.is_multiple_of(128)
    }

    /// Why `warps` warps on such a machine cannot do attention with these two numbers; `None`: they can.
    pub fn refuses_variant(
        &self,
        variant: &AttentionVariant,
        precision: Precision,
        tensor_cores: bool,
        warps: u32,
    ) -> Option<String> {
        let rule = AttentionVariant::by_rule(self, precision, tensor_cores, warps);
        let AttentionVariant { warps_per_head, prefetch_v, .. } = *variant;
        if (warps_per_head, prefetch_v) == (rule.warps_per_head, rule.prefetch_v) {
            return None;
        }
        if !rule.swizzled {
            return Some(format!(
                "{} and `prefetch_v` {}: attention of this kind takes a path that has no variants",
                rule.warps_per_head,
                u32::from(rule.prefetch_v)
            ));
        }
        let sound = warps_per_head > 0 && self.on_tensor_cores(precision, warps, warps_per_head);
        (!sound).then(|| {
            format!("a divisor of {warps} warps that leaves each a multiple of 64 of {} dimensions", self.head_dim)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::ScaleCode;

    /// A task of six units, where a lane reads four granules of each: qkv of Llama-3.1-8B in codes of 4 bits on 132 SMs.
    fn tiling(format: Format) -> RegisterTiling {
        RegisterTiling { granules: 4, registers: granule_registers(format), of_chunk: 1, units: 6, batch: 8, pairs: 8 }
    }

    #[test]
    fn scales_of_groups_leave_registers_for_fewer_units() {
        let (plain, rows) = (tiling(Format::plain(DType::Bf16)), tiling(Format::by_row(Code::Int8)));
        let groups = tiling(Format::by_group(Code::Int4, 128, ScaleCode::F16, false));
        let zeros = tiling(Format::by_group(Code::Int4, 32, ScaleCode::F16, true));
        assert_eq!([plain, rows, groups, zeros].map(|t| t.registers), [4, 4, 5, 6]);
        assert_eq!([plain, rows, groups, zeros].map(|t| t.units_per_warp_rule()), [3, 3, 2, 2]);
        let most = |t: RegisterTiling| (1..=6).filter(|hold| t.refuses_units_per_warp(*hold).is_none()).max();
        assert_eq!([plain, rows, groups, zeros].map(most), [Some(6), Some(6), Some(4), Some(4)]);
    }

    /// A schedule from a file may say any number of units.
    #[test]
    fn a_pass_has_more_units_if_it_is_the_only_one() {
        let bf16 = Precision { weights: DType::Bf16, cache: DType::Bf16, wire: DType::Bf16 };
        let plain = Format::plain(DType::Bf16);
        let most = |parts, rows, units| {
            let limits = PassLimits { tensor_cores: true, parts, rows, units, block: 32, moved: true };
            rows_pass_max(plain, bf16, limits)
        };
        assert_eq!([1, 16, 17, u32::MAX].map(|units| most(1, 16, units)), [16, 16, 12, 12]);
        assert_eq!([8, 9, u32::MAX].map(|units| most(2, 16, units)), [8, 6, 6]);
        assert_eq!(most(1, 32, 16), 12);
    }
}
