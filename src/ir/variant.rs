//! Owns the variants of ops: what a kernel may do in more than one way. They decide how fast an op is and nothing else: the
//! interpreter knows none of them, and results differ by rounding at most.

use super::layout::GRANULE_ROW_BYTES;
use super::op::{Attention, MatVec};
use super::schedule::Machine;
use crate::dtype::{DType, Precision};
use crate::model::graph::QkNormSpan;

/// Granules of weights that a warp keeps in registers where nobody says how many units it holds: 48 registers of a lane.
const HELD_GRANULES: u32 = 12;
/// More would leave fewer registers than the sums and the staging of the input take.
const HELD_GRANULES_MAX: u32 = 24;
/// Pairs of packets that a thread waits for at once where nobody says how many: each round of waiting costs a trip to L2, each
/// pair four registers.
pub const POLL_PAIRS: u32 = 8;
/// Units whose partial sums meet in one reduction, unless a candidate says otherwise.
pub const SUM_UNITS: u32 = 8;
/// Two batches of more would take shared memory that the ring needs.
pub const SUM_UNITS_MAX: u32 = 64;
/// Heads of more dimensions share their sums between warps, unless a candidate says otherwise.
const TEAM_DIM: u32 = 128;

/// Of a matvec; `None`: as the rules of [`Held`] say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MatVecVariant {
    /// Units whose weights a warp holds in registers at once.
    pub hold: Option<u32>,
    /// Pairs of packets of the input that a thread waits for at once.
    pub poll: Option<u32>,
}

/// Of attention on tensor cores; `None`: as [`team_rule`] and [`ahead_rule`] say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AttentionVariant {
    /// Warps that share the tiles of a head, each for its part of the dimensions of V.
    pub team: Option<u32>,
    /// Whether queries stay in registers and values are loaded before the softmax.
    pub ahead: Option<bool>,
}

/// How the tasks of a matvec lie in registers: what decides its variants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held {
    /// Granules of a unit that one warp reads, of one chunk at a time.
    granules: u32,
    /// Units that a chunk holds; 0: a unit is more than one chunk.
    of_chunk: u32,
    /// Units of the longest task.
    units: u32,
    /// Units of a batch of sums.
    batch: u32,
    /// Pairs of packets of the input that a thread stages.
    pairs: u32,
}

impl Held {
    /// Of a matvec whose longest task has `units`.
    pub fn of(m: &MatVec, machine: &Machine, precision: Precision, units: u32) -> Held {
        let weight_bytes = precision.weights.bytes() as u32;
        let (unit, warps) = (m.granules(weight_bytes).max(1), machine.consumer_warps.max(1));
        let chunk = machine.ring.chunking(unit).chunk;
        let of_chunk = chunk / unit;
        let granule_pairs = granule_pairs(m.parts(), precision);
        Held {
            granules: unit.min(chunk).div_ceil(warps),
            of_chunk,
            units: units.max(1),
            batch: machine.sum_units.max(1),
            pairs: (unit.div_ceil(warps) * granule_pairs).div_ceil(32),
        }
    }

    /// Units held at once where nobody says how many: all of a short task, so that nothing is between its input and its sums, or
    /// whole chunks of it, so that each is done with before the next is waited for (docs/perf-log.md). No group reaches over the
    /// end of a batch of sums.
    pub fn hold_rule(&self) -> u32 {
        let fit = (HELD_GRANULES / self.granules).max(1);
        if self.of_chunk == 0 {
            return 1;
        }
        if self.units <= self.batch {
            // All at once, or whole chunks, or what fits of one.
            let whole = fit / self.of_chunk * self.of_chunk;
            let most = if fit >= self.units || whole == 0 { fit } else { whole };
            return self.units.div_ceil(self.units.div_ceil(most));
        }
        (1..=self.batch.min(fit)).rev().find(|n| self.batch.is_multiple_of(*n)).unwrap_or(1)
    }

    /// Pairs of packets of the input that a thread stages.
    pub fn pairs(&self) -> u32 {
        self.pairs
    }

    pub fn poll_rule(&self) -> u32 {
        self.pairs.min(POLL_PAIRS)
    }

    /// Why a warp cannot hold `hold` units; `None`: it can.
    pub fn refuses_hold(&self, hold: u32) -> Option<String> {
        let Held { granules, of_chunk, units, batch, .. } = *self;
        if hold == 0 || hold > units {
            return Some(format!("1 to {units}, the units of the longest task"));
        }
        if hold > 1 && of_chunk == 0 {
            return Some("1, for a unit is more than one chunk".to_string());
        }
        if hold > 1 && hold.saturating_mul(granules) > HELD_GRANULES_MAX {
            let most = (HELD_GRANULES_MAX / granules).max(1);
            return Some(format!(
                "at most {most}: of each unit a lane holds {granules} granules, of {HELD_GRANULES_MAX}"
            ));
        }
        let divides = units <= batch || batch.is_multiple_of(hold);
        (!divides).then(|| format!("a divisor of {batch}, the units of a batch of sums"))
    }

    /// Why a thread cannot wait for `poll` pairs at once; `None`: it can.
    pub fn refuses_poll(&self, poll: u32) -> Option<String> {
        let most = self.pairs.min(2 * POLL_PAIRS);
        (poll == 0 || poll > most).then(|| format!("1 to {most}, as many pairs as a thread stages, and registers hold"))
    }
}

/// Pairs of packets that hold the input of one granule of units of `parts` parts. The lanes of a warp take whole granules in turn, so
/// that no more than 32 can be (`matvec.cuh`).
pub fn granule_pairs(parts: u32, precision: Precision) -> u32 {
    GRANULE_ROW_BYTES / precision.weights.bytes() as u32 * parts / pair_values(precision)
}

/// Values of a pair of 8-byte packets: two times as many as 4 bytes hold.
fn pair_values(precision: Precision) -> u32 {
    2 * (4 / precision.wire.bytes() as u32)
}

/// Values of a branch that the consumer warps of a block hold at once, to add it up everywhere: 8 pairs of packets a thread
/// (`norm_add.cuh`).
pub fn sum_width_max(precision: Precision, warps: u32) -> u32 {
    warps.saturating_mul(LANES * POLL_PAIRS * pair_values(precision))
}

/// Lanes of a warp.
pub const LANES: u32 = 32;

/// Warps of a team where nobody says how many: two for large heads, whose sums would take all registers of one.
pub fn team_rule(head_dim: u32) -> u32 {
    if head_dim <= TEAM_DIM { 1 } else { 2 }
}

/// Where nobody says so, queries and values wait in registers where the sums of a warp leave room for them.
pub fn ahead_rule(head_dim: u32) -> bool {
    head_dim <= TEAM_DIM
}

/// Bytes of a cache row whose pieces of 16 bytes change places where rows are swizzled.
const SWIZZLED_BYTES: u32 = 128;

/// Where piece `piece` (16 bytes) of the cache row of `position` lies in it, where rows are swizzled; `swizzle` of
/// `attention_tensor.cuh`.
pub fn swizzled_piece(position: u32, piece: u32) -> u32 {
    piece ^ ((position & 1) << 2 | (position >> 1 & 3))
}

impl Attention {
    /// Whether a kernel with `warps` warps keeps the rows of these caches swizzled, on a target with tensor cores. On others none
    /// does.
    pub fn swizzles(&self, precision: Precision, warps: u32) -> bool {
        self.on_tensor_cores(precision) && warps.is_multiple_of(self.team())
    }

    /// Records (running maximum, sum, a sum for each dimension) of each query head that meet at the end of a task of `warps` warps:
    /// one of each team, and the current position.
    pub fn records(&self, precision: Precision, tensor_cores: bool, warps: u32) -> u32 {
        let teams = if tensor_cores && self.swizzles(precision, warps) { warps / self.team() } else { warps };
        teams + 1
    }

    fn team(&self) -> u32 {
        self.variant.team.unwrap_or(team_rule(self.head_dim)).max(1)
    }

    /// Whether heads are rotated whole (or not at all), normalised alone, and in bf16: what `attention_tensor.cuh` takes.
    fn on_tensor_cores(&self, precision: Precision) -> bool {
        let Precision { weights: _, cache, wire } = precision;
        let dim = self.head_dim;
        let alone = |norm: &Option<super::op::QkNormAttr>| norm.is_none_or(|n| n.span == QkNormSpan::Head);
        let halves = self.rotary > 0 && !self.interleaved;
        cache == DType::Bf16
            && wire == DType::Bf16
            && (dim * 2).is_multiple_of(SWIZZLED_BYTES.saturating_mul(self.team()))
            && dim <= 256
            && (self.rotary == 0 || self.rotary == dim)
            && (!halves || dim == 64 || dim.is_multiple_of(128))
            && alone(&self.q_norm)
            && alone(&self.k_norm)
    }

    /// Why `warps` warps on such a machine cannot do attention as its variant says; `None`: they can.
    pub fn refuses_variant(&self, precision: Precision, tensor_cores: bool, warps: u32) -> Option<String> {
        let AttentionVariant { team, ahead } = self.variant;
        if team.is_none() && ahead.is_none() {
            return None;
        }
        let by_rule = Attention { variant: AttentionVariant::default(), ..self.clone() };
        if !tensor_cores || !by_rule.swizzles(precision, warps) {
            return Some("none: attention of this kind takes a path that has no variants".to_string());
        }
        let team = team?;
        let sound = team > 0 && self.swizzles(precision, warps);
        (!sound).then(|| {
            format!("a divisor of {warps} warps that leaves each a multiple of 64 of {} dimensions", self.head_dim)
        })
    }
}
