//! Owns what waves with recurrent states have in common: how blocks share the columns of a state, and the memory that a block needs for its columns; of Mamba-2
//! the norm after it, which gates it; and of short convolutions the channels of a share.

use super::Form;
use crate::ir::op::{Op, Role, Scan};
use crate::ir::program::{Grid, Program};
use crate::ir::{BufferId, GridId};

/// Channels of a short convolution that a share has: in a chunk so few that most SMs have some, in a step two for each lane of a warp.
pub fn group_channels(form: Form) -> u32 {
    if form == Form::Chunk { 16 } else { 64 }
}

/// Positions through which a chunk carries a state at once: a lane of a warp has one.
pub(super) const POSITIONS: u32 = 32;
/// Most columns of a state that a block has, and least if it may have fewer: a tile of products has eight.
const COLUMNS_MAX: u32 = 64;
const COLUMNS_MIN: u32 = 16;

/// The states of a grid: of each head a matrix `[key_dim, value_dim]`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Carried {
    pub heads: u32,
    key_dim: u32,
    value_dim: u32,
    /// Whether positions of a chunk depend on what others add to the state.
    pub solves: bool,
}

impl Carried {
    /// `None`: it carries no matrices.
    pub fn of(op: &Op) -> Option<Carried> {
        match *op {
            Op::Mix(ref mix) => {
                let (heads, key_dim, value_dim) = (mix.value_heads, mix.key_dim, mix.value_dim);
                Some(Carried { heads, key_dim, value_dim, solves: true })
            }
            Op::Scan(Scan { heads, head_dim, state, .. }) => {
                Some(Carried { heads, key_dim: state, value_dim: head_dim, solves: false })
            }
            _ => None,
        }
    }

    /// Whether products of a chunk have whole tiles: 16 rows and 8 columns of a state in each of `parts` parts of its columns.
    pub fn has_tiles(&self, parts: u32) -> bool {
        let columns = self.value_dim / parts.max(1);
        let whole = self.value_dim.is_multiple_of(parts.max(1)) && columns.is_multiple_of(8);
        parts > 0
            && whole
            && (8..=COLUMNS_MAX).contains(&columns)
            && self.key_dim > 0
            && self.key_dim.is_multiple_of(16)
    }

    /// Into how many parts a chunk divides the columns of a state: each is computed alone, and repeats what keys and queries are multiplied for. `None`: there are
    /// no whole tiles.
    pub fn parts(&self, sms: u32) -> Option<u32> {
        let whole = [1, 2, 4, 8, 16].into_iter().filter(|parts| self.has_tiles(*parts));
        let fits = |parts: &u32| self.heads * parts <= sms && self.value_dim / parts >= COLUMNS_MIN;
        whole.clone().rfind(fits).or(whole.clone().next())
    }

    /// Bytes of shared memory of a block that has one of `parts` parts of the columns of a state (`WaveCarry` of waves/state.cuh): keys, queries, a square of positions,
    /// the state, a row of values for each position, and four numbers of each; where it solves another square, and another row of values.
    pub fn chunk_bytes(&self, parts: u32) -> u32 {
        let columns = self.value_dim / parts.max(1);
        // Distances at which rows of four lanes, and columns of eight, lie in different banks.
        let of_keys = self.key_dim + (36 - self.key_dim % 32) % 32;
        let of_values = columns + if columns % 16 == 8 { 0 } else { 8 };
        let twice = if self.solves { 2 } else { 1 };
        let squares = twice * POSITIONS * (POSITIONS + 4);
        4 * (2 * POSITIONS * of_keys + squares + (self.key_dim + twice * POSITIONS) * of_values + 4 * POSITIONS)
    }
}

/// Parts of the `rows` rows of a state of `columns` columns that a step's threads share: each has four columns side by side if they are a multiple of that, else
/// one (`WaveColumns` of kernels/waves/state.cuh).
fn row_parts(rows: u32, columns: u32, threads: u32) -> u32 {
    let wide = if columns.is_multiple_of(4) { 4 } else { 1 };
    let most = (threads / (columns / wide).max(1)).clamp(1, rows.max(1));
    rows.div_ceil(rows.div_ceil(most).max(1))
}

/// Bytes of scratch of a block of `warps` warps that brings a state of `op` to the next position. Of a net: q, k, v and the gate, beta and the decay, and two sums of each
/// column for each part of the rows. Of Mamba-2: x, b and c, the step and the decay, and one such sum.
pub(super) fn row_bytes(op: &Op, warps: u32) -> u32 {
    let (values, sums) = match op {
        Op::Mix(mix) => {
            (mix.channels() + mix.value_dim, 2 * row_parts(mix.key_dim, mix.value_dim, warps * 32) * mix.value_dim)
        }
        Op::Scan(scan) => (scan.head_channels(), row_parts(scan.state, scan.head_dim, warps * 32) * scan.head_dim),
        _ => return 0,
    };
    4 * ((values + 2).next_multiple_of(4) + sums)
}

/// Columns of what the first wave of Mamba-2 in a chunk leaves of a row: x, b and c, then the step of each head and the logarithm of its decay; whole pieces of 16 bytes.
pub(super) fn scan_cols(scan: &Scan) -> u32 {
    (scan.channels() + 2 * scan.heads).next_multiple_of(4)
}

/// A norm of what Mamba-2 gives, together with the gate before or after it: the waves of Mamba-2 then leave the gate to it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GateNorm {
    /// The grid of Mamba-2, whose columns have the gate.
    pub scan: GridId,
    pub width: u32,
    /// Divides `width`.
    pub groups: u32,
    pub eps: f32,
    /// Multiplies the gate.
    pub scale: f32,
    /// Whether the norm comes before the gate.
    pub first: bool,
}

impl GateNorm {
    /// The norm of `grid`: its op, or that of the input of a product. `None`: it has no such norm.
    pub fn of(program: &Program, grid: &Grid) -> Option<GateNorm> {
        let x = grid.operand(Role::X)?.buffer;
        let (width, groups, eps, gate) = match &grid.op {
            Op::GroupNorm(norm) => (norm.width, norm.groups, norm.eps, norm.gate),
            Op::MatVec(m) => {
                let norm = m.norm.filter(|norm| norm.is_factor() && grid.operand(Role::NormBias).is_none())?;
                (m.k, 1, norm.eps, None)
            }
            _ => return None,
        };
        grid.operand(Role::NormWeight)?;
        let writes =
            |of: &&Grid| matches!(of.op, Op::Scan(_)) && of.operand(Role::Out).is_some_and(|to| to.buffer == x);
        let scan = program.grids.iter().position(|of| writes(&of))?;
        let Op::Scan(Scan { gate: before, .. }) = program.grids[scan].op else { return None };
        let (scale, first) = match (before, gate) {
            (Some(scale), None) => (scale, false),
            (None, Some(scale)) => (scale, true),
            _ => return None,
        };
        Some(GateNorm { scan: GridId::from(scan), width, groups, eps, scale, first })
    }

    /// Whether some grid norms what Mamba-2 leaves in `out`.
    pub fn follows(program: &Program, out: BufferId) -> bool {
        let norms =
            |grid: &Grid| matches!(&grid.op, Op::GroupNorm(_)) || matches!(&grid.op, Op::MatVec(m) if m.norm.is_some());
        let reads = |grid: &&Grid| grid.operand(Role::X).is_some_and(|x| x.buffer == out);
        program.grids.iter().filter(reads).any(norms)
    }
}
