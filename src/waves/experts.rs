//! Owns what waves of mixtures of experts have in common: tiles, their bounds, and what a program says of a chosen matrix.

use super::{Form, Layout, Machine, NormOf, Products, Sums, Vector, Work};
use crate::format::Format;
use crate::ir::BufferId;
use crate::ir::op::{Op, Role, Route};
use crate::ir::program::{Grid, Program, Rows};
use crate::ir::table::TableHome;

/// Rows of scores that a block computes at once: 16 of a warp, or of several warps that divide k. Many rows of a chunk read the weights once.
pub(super) fn scores_rows(form: Form) -> u32 {
    if form == Form::Chunk { 64 } else { 16 }
}
/// Columns of the same. A step has few rows, so its columns are divided among more blocks.
pub(crate) fn scores_cols(form: Form) -> u32 {
    if form == Form::Chunk { 32 } else { 8 }
}
/// Units that the two warpgroups of a block have side by side.
pub(super) const TILE_UNITS: u32 = 16;
/// Places that a block fills at once: their pieces of 16 bytes lie side by side.
pub(super) const FILLED_PLACES: u32 = 8;
/// Places of a tile for which there is an instruction, and a plan.
const TILE_ROWS: [u32; 3] = [32, 64, 128];
/// The same with both operands in shared memory: twice the 144 columns for which a thread has registers.
const SHARED_TILE_ROWS: u32 = 288;
/// Most units of a pass then: eight of each warpgroup.
pub(super) const SHARED_EXPERT_PASS_MAX: u32 = 16;
/// Most sums of a lane of a product of experts.
const SUMS_MAX: u32 = 128;

/// Tiles of the rows of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiling {
    /// Places of a tile.
    pub rows: u32,
    /// Most tiles, whatever is chosen.
    pub most: u32,
}

impl Tiling {
    /// Of `rows` rows with `slots` slots each, tiles of `tile` places. If expert `e` has `n_e` slots, it has `ceil(n_e / tile)` tiles, at most
    /// `(n_e + tile - 1) / tile`. Only experts with a slot have tiles.
    pub(super) fn of(rows: u32, slots: u32, experts: u32, tile: u32) -> Tiling {
        let slots = u64::from(rows) * u64::from(slots);
        let most = (slots + slots.min(experts.into()) * u64::from(tile.max(1) - 1)) / u64::from(tile.max(1));
        Tiling { rows: tile, most: u32::try_from(most).unwrap_or(u32::MAX) }
    }

    /// Places of all tiles.
    pub fn places(&self) -> u64 {
        u64::from(self.rows) * u64::from(self.most)
    }

    /// Whether there is an instruction for its places.
    pub(super) fn is_multiplied(&self, products: Products) -> bool {
        match products {
            Products::Shared => self.rows == SHARED_TILE_ROWS,
            Products::Warps | Products::Warpgroups => TILE_ROWS.contains(&self.rows),
        }
    }

    /// Places of the tiles of a plan. Prompts have more rows for each expert than steps, and each tile reads the weights of its expert again. `grouped`: codes
    /// have a scale for each group of k, whose sums take the registers of half of the places.
    pub(super) fn rows_of(form: Form, products: Products, grouped: bool) -> u32 {
        let [few, some, many] = TILE_ROWS;
        match form {
            Form::Chunk if products == Products::Shared => SHARED_TILE_ROWS,
            Form::Chunk if grouped => some,
            Form::Chunk => many,
            Form::Steps | Form::Tail => few,
        }
    }
}

/// Granules of a unit in a chunk: in a step copies of 2 KiB, or of 1 KiB of codes. In a chunk of a prompt the input takes as many bytes as the weights.
pub(super) fn expert_granules(form: Form, format: Format) -> u32 {
    let of_plain = if format.is_plain() { 2 } else { 1 };
    if form == Form::Chunk { of_plain } else { 2 * of_plain }
}

/// Most tiles of units whose sums a lane has. Sums of a group of codes take the place of one.
pub(super) fn unit_tiles_max(tile: u32, grouped: bool) -> u32 {
    (SUMS_MAX / (tile / 2).max(1)).saturating_sub(grouped.into())
}

/// Parts of the units of an expert in passes of `pass` units. If blocks of a chunk share what they copy, those of a pair have parts side by side.
pub(super) fn expert_parts(units: u32, pass: u32, machine: &Machine) -> u32 {
    let parts = units.div_ceil(pass.max(1));
    let beside = machine.products == Products::Shared && machine.pairs;
    if beside { parts.next_multiple_of(2) } else { parts }
}

/// What a program says of the matrix of a grid that is chosen among those of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Chosen {
    pub experts: u32,
    pub slots: u32,
    /// The exchange with the choices.
    pub choices: BufferId,
}

impl Chosen {
    /// `None`: there is one matrix.
    pub fn of(program: &Program, grid: &Grid) -> Option<Chosen> {
        let Rows::Lookup(table) = grid.operand(Role::Weight)?.rows else { return None };
        let table = program.tables.get(table.index())?;
        let TableHome::Device(choices) = table.home else { return None };
        Some(Chosen { experts: table.bound, slots: table.cols, choices })
    }
}

/// Whether two norms are the same: grids have vectors of their own, with the same content.
pub(super) fn same_norm(program: &Program, a: Option<NormOf>, b: Option<NormOf>) -> bool {
    let content = |id: Vector| id.map(|id| program.buffers.get(id.index()).map(|buffer| &buffer.content));
    let same = |a: NormOf, b: NormOf| {
        let [of_a, of_b] = [a, b].map(|of| [of.weight, of.bias].map(content));
        a.norm == b.norm && of_a == of_b
    };
    a == b || a.zip(b).is_some_and(|(a, b)| same(a, b))
}

/// Whether a grid adds up the slots of experts in `buffer`.
pub(super) fn is_combined(program: &Program, buffer: BufferId) -> bool {
    let reads = |grid: &Grid| {
        matches!(grid.op, Op::Combine(_)) && grid.operand(Role::X).is_some_and(|operand| operand.buffer == buffer)
    };
    program.grids.iter().any(reads)
}

/// Whether experts have codes with a scale for each group of k.
pub(super) fn has_groups(program: &Program) -> bool {
    let grouped = |grid: &Grid| Chosen::of(program, grid).is_some() && program.format_of(grid).groups.is_some();
    program.grids.iter().any(grouped)
}

/// Whether a program has experts.
pub(super) fn has_experts(program: &Program) -> bool {
    program.grids.iter().any(|grid| matches!(grid.op, Op::Route(_)))
}

/// Bytes of scratch of a wave that chooses: for each warp keys of the experts of a row and of their groups, if there are groups.
pub(super) fn route_scratch(route: &Route, warps: u32) -> u32 {
    let keys = route.groups.map_or(0, |groups| route.experts + groups.count);
    warps * keys * 4
}

/// Warps that divide k.
pub(super) fn scores_groups(warps: u32, form: Form) -> u32 {
    warps / (scores_rows(form) / 16)
}

/// Bytes of scratch of a wave of scores: sums of 16 rows and [`scores_cols`] columns for each warp.
pub(super) fn scores_scratch(warps: u32, form: Form) -> u32 {
    warps * 16 * scores_cols(form) * 4
}

/// Bytes of scratch of a wave that finds places: three counts for each expert, and the places of a row.
pub(super) fn gather_scratch(experts: u32, slots: u32) -> u32 {
    (3 * experts + slots) * 4
}

impl Sums {
    /// Of a wave of [`super::Action::Experts`] that reads `x`.
    pub(super) fn of_experts(granules: u32, x: &Work) -> Option<Sums> {
        match x.layout {
            Layout::Grouped(Tiling { rows, .. }) => Some(Sums::Experts { granules, tile: rows }),
            _ => None,
        }
    }
}
