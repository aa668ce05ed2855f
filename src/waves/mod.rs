//! Owns `Plan`: a kernel that computes wave by wave, long prompt chunks or steps of many rows.
//!
//! A step of a few rows is bound by the bytes of its weights. Its tasks therefore wait for single words of each other, and the stream of weights
//! never stops. With more rows, each input that an SM has read must be multiplied with many weights, and each weight with many rows. A *wave*
//! is the work of one grid of the program for all rows of a launch, or a part of that work. All SMs meet between two waves, except where the
//! second one waits for packets of the first (below).
//!
//! A plan is derived from the proven schedule of a batch kernel. It computes the same program with the same pack, cache and pages. A plan of
//! steps computes the whole program. A plan of chunks ends with the last grid that appends to the cache. A *tail* computes the rest of the
//! program for a few rows of a chunk, in a separate launch that follows the chunk on its stream.
//!
//! Code generation takes nothing but a [`Proven`] plan. A tail is proven after the plan of chunks that it follows ([`WithTail`]), and begins
//! with the residual that this plan leaves.
//!
//! What orders memory between waves, between the blocks of a pair and between a wave and its packets is argued in docs/memory-model.md.
//!
//! # Weights before a meeting
//!
//! Weights are never written, so a wave may take them before all SMs have met: the loader copies them as soon as a slot is free, and warps of a product may
//! take its first chunks into registers (`held`) before their block enters the wave. Weights have a ring of their own, and always arrive. An SM reports the end
//! of the previous wave first, so no other SM waits for it.
//!
//! # Tiles
//!
//! A product of a step may be multiplied by warpgroups (`tiles`), which read its input from shared memory: warps then do not read it again for each unit,
//! and make operands of codes once for all rows. With 128 rows all products of plain weights are tiles that fill warpgroups. The previous wave writes
//! that input in the order of warpgroups ([`Layout::Tiles`]). Tiles add up in another order than warps, so plans in one order ([`prove_alike`])
//! have no tiles.
//!
//! # Sums of a chunk
//!
//! A product of a chunk whose operands are both in shared memory adds to the residual itself if its launch is long enough for one part of k ([`Target::Sums`]), and
//! leaves the input of the next product: the residual times the weight of the norm. The factor of the norm follows from sums of squares by groups of columns
//! ([`Layout::Squares`]), and multiplies what the next product makes of it. So no wave reads whole rows.
//!
//! # Histories of many lengths
//!
//! A wave of attention of a step has shares of rows and heads. If one row has a long history and others have short ones, few SMs read it
//! while the others wait. A plan made by [`derive_ragged`] cuts histories into KV splits ([`Splits`]) instead: at multiples of a number of
//! positions, beginning with the first tile that the row sees. The device orders all splits of a step by the positions of the rows, and deals
//! them out in turn: SM `n mod sms` has split `n`. That is a partition for every table. Each split writes its largest scores, sums and
//! values to its own place, by row, split and head. The next wave ([`Action::Merge`]) adds them up; a row with one split needs no merge.
//!
//! The bits of a row follow from its own position, but they differ from those without splits. The deal and the second wave cost 4 to 16 % of a
//! step with short histories (docs/perf-log.md, entry 29), so there is also a kernel without splits. The host chooses one of them for each
//! launch by the positions in its table ([`Ragged::gains`]).
//!
//! # Norms over all heads
//!
//! An attention task has some heads of a row. If q and k have norms over all heads, a wave of whole rows comes first ([`Action::NormHeads`]). Batch kernels take the heads of such a
//! layer without tensor cores, so rows of its caches are not swizzled, and wave kernels read them as they lie.
//!
//! # Mixtures of experts
//!
//! Rows of a launch that chose one expert are multiplied together: what a block does then depends on the choice. Each slot of a row has a *place*, in the order of
//! experts; a *tile* is some places of one expert. Every block counts the choices itself and finds the same places. A step copies rows to their places in the
//! same wave; a chunk in the next one, where a block copies neighbouring places, each from the row that the wave before wrote down for it. Items (a tile, and a part of the
//! units of its expert) are numbered, and each is done by the SM that draws its ticket from a counter ([`Over::Items`]): a partition for every choice, whichever SM is faster. Without tickets SM `s` has item
//! `r * sms + (s + r) mod sms` of each round `r`. The wave that
//! finds places sets the counters to 0, no other access of a wave meets them, and an item is computed alike by every SM. Buffers have room for the worst
//! choice ([`Tiling::most`]). `experts.rs` has the bounds. Choices of each layer have a buffer of their own, and the proof says that they are still there
//! when a launch has ended ([`Proven::choices`]): the check reads them.
//!
//! In a chunk whose weights are all plain, tensor cores read both operands of experts from shared memory, too ([`Products::Shared`]). The two blocks of a pair then have one ticket for two parts of a tile,
//! and share its places: in launches in which they share weights ([`Plan::shares_weights`]), each copies half of a chunk of the input to both, so the number of parts is even. Rows have the ring of weights then, and weights that of
//! inputs.
//!
//! # Recurrent states
//!
//! A state has one owner in a launch. In a chunk each SM has some columns of the state of a head ([`Over::States`]) for all rows, and takes them in the order of their
//! positions: a column of a state depends on no other one. The wave before makes what the columns of a head have in common, because they would all read the past inputs of
//! the convolution that one of them writes. A norm needs whole rows, so it is the wave after. In a step the SM with the first row of a sequence and a head has their
//! state, and takes all rows of the sequence; shares of its later rows do nothing. A tail has no state: it would bring it on a second time. `mix.rs` has the sizes.
//!
//! Mamba-2 has the same waves. Its norm also gates it, and may have groups of columns of any heads, so in a step it is a wave of whole rows, too. Where no norm
//! follows, the wave that brings states on gates its output.
//!
//! A short convolution keeps inputs alone. One wave has all rows of some channels ([`group_channels`]), in a chunk on one SM and in a step in one warp.
//!
//! # Several devices
//!
//! The blocks of all devices are one machine, as in the other kernels (decision 0069). A device has its part of the units of each matrix, and the groups of the KV heads that
//! it keeps; each launch index still has one block ([`Action::is_divided`]). What such waves leave for others goes to every device ([`Work::everywhere`]), each of which
//! has an arena of its own, and all blocks of all devices meet. Waves of single rows write whole rows: each device runs them for itself, and nothing of them crosses.
//!
//! # In which order numbers are added up
//!
//! Sums of floating-point numbers depend on their order. Each wave of a plan declares its order ([`Sums`]), and [`prove`] compares that with
//! its own. If each wave also reads what the same waves left, nothing else that decides the bits of a row differs between plans of steps for
//! different numbers of rows: a row is one row of a tile of a tensor-core product, whose other rows do not matter. Such plans of
//! one schedule therefore give a row the same bits, whatever other rows its launch has ([`prove_alike`]). One thing is not proven: that the compiler translates the same formula
//! to the same machine instructions in two kernels. `bench --rows` compares bits on the device.

mod derive;
mod experts;
mod mix;
pub mod parse;
mod print;
mod prove;
mod ragged;

pub use derive::{Refused, derive, derive_alike, derive_chosen, derive_ragged, derive_split};
pub use experts::Tiling;
pub(crate) use experts::scores_cols;
pub use mix::{GateNorm, group_channels};
pub use print::print;
pub use prove::{Alike, Proven, WithTail, check, prove, prove_alike, prove_tail};
pub use ragged::Ragged;

use crate::define_id;
use crate::dtype::DType;
use crate::ir::layout::{cache_row_bytes, share_of};
use crate::ir::op::{Attention, NormAttr};
use crate::ir::program::Program;
use crate::ir::schedule::Schedule;
use crate::ir::{BufferId, GridId};
use std::ops::Range;

define_id!(
    /// A buffer of the activations of a chunk.
    WorkId, "a"
);
define_id!(
    /// A division of the work of a wave among SMs.
    DivisionId, "d"
);

/// Most rows of a chunk, unless asked for otherwise: in a context that is not longer than the first, and in others. A chunk reads all weights, of a mixture
/// those of nearly all experts, however many rows it has.
const CHUNK_ROWS: [u32; 2] = [2048, 4096];
/// Most rows of a chunk of `program`, unless asked for otherwise.
pub fn chunk_rows(program: &Program) -> u32 {
    let [short, long] = CHUNK_ROWS;
    if program.context_max > short { long } else { short }
}
/// Least rows of a chunk. Below 64 rows the batch kernel is at least as fast.
pub const CHUNK_MIN: u32 = 64;
/// Rows that a product of a chunk multiplies at once.
pub const CHUNK_BLOCK_ROWS: u32 = 128;
/// Rows of the next chunk of a prompt of which `left` are left, if a chunk has at most `most`. All chunks are nearly as long, in whole blocks, so the last
/// one is not short.
pub fn next_chunk(left: u32, most: u32) -> u32 {
    let each = left.div_ceil(left.div_ceil(most.max(1)).max(1));
    each.next_multiple_of(CHUNK_BLOCK_ROWS).min(most).min(left)
}
/// Parts of k in a launch of `blocks` blocks of rows, if one of a single block has `most`: sums of all parts then have as many rows, whatever the blocks.
pub fn parts_of(most: u32, blocks: u32) -> u32 {
    (most / blocks.max(1).next_power_of_two()).max(most.min(1))
}
/// Rows of a tail: a sequence has one row that decides.
pub const TAIL_ROWS: u32 = 16;
/// Most rows of a step.
pub const STEP_ROWS_MAX: u32 = 128;
/// Most rows of a step of plans that add up in one order.
pub const ALIKE_ROWS_MAX: u32 = 64;
/// Least rows of a step for which waves pay: with fewer, tasks that wait for single words are faster.
pub const STEP_ROWS_MIN: u32 = 32;

/// What a launch computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// A part of the prompt of one sequence: nothing is decided.
    Chunk,
    /// Steps of rows of any sequences: each row continues with the token that it decided.
    Steps,
    /// The grids that a chunk leaves out, for a few of its rows: each decides a token.
    Tail,
}

impl Form {
    /// Whether the rows of a launch decide tokens: they are one block, each of any sequence.
    pub fn decides(self) -> bool {
        self != Form::Chunk
    }
}

/// Which threads multiply together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Products {
    /// Each warp for itself (`mma.sync`): both operands are in registers.
    Warps,
    /// Four warps together (`wgmma`): weights are in registers, and the tensor cores read the input from shared memory.
    Warpgroups,
    /// Four warps together, which read both operands from shared memory. All weights are plain.
    Shared,
}

impl Products {
    /// Units for which a slot has room, for a pass of `pass` units: whole tiles of all warps.
    fn padded(self, pass: u32, warps: Warps) -> u32 {
        match self {
            Products::Warps => pass.next_multiple_of(warps.units),
            Products::Warpgroups => pass.next_multiple_of(WIDE_UNITS * warps.units),
            Products::Shared => pass.next_multiple_of(SHARED_UNITS),
        }
    }
}

/// With both operands in shared memory: units of a copy, and most units of a pass, of which an instruction takes 8 columns each.
const SHARED_UNITS: u32 = 8;
const SHARED_PASS_MAX: u32 = 32;
/// The place of its warps: each of two warpgroups has half of the rows and all units.
const SHARED_WARPS: Warps = Warps { rows: 2, units: 4, k: 1 };

/// Units of the box that copies what is left over of a pass, and most bytes of a unit in a box: 256 elements of 8 bytes, the largest that a map has.
const BOX_UNITS: u32 = 8;
const BOX_PIECE_BYTES_MAX: u32 = 2048;

/// Rows side by side of a chunk, of which the input of a product has the same 16 bytes in one line: a block has them together.
const ROWS_OF_LINE: u32 = 8;
/// Positions of a tile of attention by warpgroups: columns of their instruction.
const WIDE_TILE: u32 = 64;

/// Whether warpgroups can do the attention of grid `id` in a chunk, with slots of inputs that hold keys or values of a tile: waves/attend.cuh.
fn attends_wide(schedule: &Schedule, id: GridId, a: &Attention, inputs: Ring) -> bool {
    let swizzled = schedule.attention_variant(id).is_some_and(|variant| variant.swizzled);
    let row_bytes = cache_row_bytes(a.head_dim, schedule.program.precision.cache);
    let lines = [64, 128].contains(&a.head_dim) && row_bytes == 2 * a.head_dim;
    swizzled
        && lines
        && a.scale > 0.0
        && WIDE_TILE * row_bytes <= inputs.slot_bytes
        && inputs.slot_bytes.is_multiple_of(1024)
}

/// Units that a warp of a warpgroup has side by side: rows of a tile of 16.
const WIDE_UNITS: u32 = 2;

/// How a step multiplies tiles: warps share the rows, and each has two units of a tile. Either the two warpgroups have units of their own, or they share k.
const TILE_WARPS: [Warps; 2] = [Warps { rows: 1, units: 8, k: 1 }, Warps { rows: 1, units: 4, k: 2 }];
/// Most sums of a lane for tiles of a step of this many rows. Codes, which have tiles of up to 64 rows, need as many again for the sums of a group. Both have words
/// of two chunks.
fn tile_sums_max(rows: u32) -> u32 {
    if rows > 64 { 128 } else { 32 }
}

/// Most registers of a lane for its sums and for weights that it holds while blocks meet: more do not fit beside what a wave of products needs.
const HELD_AND_SUMS_MAX: u32 = 96;

/// Most registers of a lane for the sums of a product by warps. Codes with scales of groups need more, for the sums of a group.
fn sums_max(grouped: bool) -> u32 {
    if grouped { 64 } else { 112 }
}

/// Most tiles whose sums a warpgroup has, if it multiplies this many rows. Sums of a group of codes take the place of a tile.
fn wide_tiles_max(rows: u32, grouped: bool) -> u32 {
    const LANE_SUMS: u32 = 128;
    (LANE_SUMS / (rows / 2).max(1)).saturating_sub(grouped.into())
}

/// Waves in order, and the work of each SM in each.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    pub form: Form,
    /// Most rows of a launch: whole blocks.
    pub rows: u32,
    /// Rows that a matrix product multiplies at once.
    pub block_rows: u32,
    pub machine: Machine,
    /// Activations; they have their own arena.
    pub work: Vec<Work>,
    pub waves: Vec<Wave>,
    pub divisions: Vec<Division>,
}

/// What a launch occupies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    pub target: String,
    /// Blocks, one an SM, of all devices.
    pub sms: u32,
    /// Devices, each with as many of these blocks, side by side.
    pub devices: u32,
    pub warps: u32,
    pub products: Products,
    /// Blocks 2 i and 2 i + 1 are a cluster, and write to each other's shared memory: in steps sums of products, in a chunk copies of weights and of the places of experts
    /// ([`Plan::shares_weights`]).
    pub pairs: bool,
    pub loader_warps: u32,
    /// Of a consumer and of a loader thread, after registers moved.
    pub registers: u32,
    pub loader_registers: u32,
    /// The ring of weights.
    pub weights: Ring,
    /// The ring of what earlier waves wrote: inputs of products, and the cache.
    pub inputs: Ring,
    /// Where sums of warps meet, after the rings.
    pub scratch_bytes: u32,
    /// Barriers and watchdog, last.
    pub state_bytes: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ring {
    pub slots: u32,
    pub slot_bytes: u32,
}

impl Ring {
    pub fn bytes(&self) -> u32 {
        self.slots.saturating_mul(self.slot_bytes)
    }
}

/// `rows x cols` activations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Work {
    pub name: String,
    pub layout: Layout,
    pub cols: u32,
    /// Offset in the arena, bytes.
    pub place: u64,
    /// Of several devices: whether what one of them writes goes to all. Otherwise each reads only what it has written itself.
    pub everywhere: bool,
}

/// Where the elements of activations lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Row by row.
    Rows(DType),
    /// bf16, as the lanes of a product read it (`OperandPlace` of waves/context.cuh): 64 columns of a block of rows side by side. Columns
    /// that pad the last 128 are zero.
    Operand,
    /// The same of a step, as warpgroups read it.
    Tiles,
    /// Sums of this many parts of k, fp32: part by part, row by row. In a launch of several blocks of rows there are fewer parts ([`parts_of`]).
    Parts(u32),
    /// The same, each sum in a packet: 8 bytes, which are written and read as one. The upper half is a tag, the number of the wave that wrote the packet.
    Packets(u32),
    /// Sums of squares of each row, fp32: of as many groups of columns, each those of [`SHARED_UNITS`] units of the product that leaves them. Only launches in which
    /// that product has one part of k have them; it has `parts` parts in a launch of one block.
    Squares { groups: u32, parts: u32 },
    /// A score and an id of each row and block (a column), 8 bytes.
    Best,
    /// The results of up to this many KV splits of each row, fp32: row by row, split by split.
    Splits(u32),
    /// The number of tiles, how many tickets are drawn for items of the first product and of the second, and how many times eight places the fullest tile has. Then a record of 16 bytes for each tile:
    /// its expert, and the first tile, the tiles and the slots of that expert.
    Groups(Tiling),
    /// The row of each place, 4 bytes. Places after the last row of a tile have none.
    Sources(Tiling),
    /// bf16 by place, as warpgroups read it: tile by tile.
    Grouped(Tiling),
    /// bf16, place by place.
    Placed(Tiling),
}

impl Layout {
    /// The layout of the input of products: tiles, or the order in which warps read it.
    fn of_input(tiles: bool) -> Layout {
        if tiles { Layout::Tiles } else { Layout::Operand }
    }

    /// Whether products read it.
    pub fn is_input(self) -> bool {
        matches!(self, Layout::Operand | Layout::Tiles)
    }
}

impl Work {
    /// Bytes of a chunk of `rows` rows, whole blocks.
    pub fn bytes(&self, rows: u32) -> u64 {
        let (rows, cols) = (u64::from(rows), u64::from(self.cols));
        match self.layout {
            Layout::Rows(dtype) => (rows * cols).saturating_mul(dtype.bytes() as u64),
            Layout::Operand | Layout::Tiles => rows.saturating_mul(cols.next_multiple_of(128) * 2),
            Layout::Parts(count) => {
                let of_parts = rows.min(CHUNK_BLOCK_ROWS.into()).saturating_mul(count.into());
                rows.max(of_parts).saturating_mul(cols).saturating_mul(4)
            }
            Layout::Squares { groups, .. } => (rows * cols).saturating_mul(4).saturating_mul(groups.into()),
            Layout::Splits(count) => (rows * cols).saturating_mul(4).saturating_mul(u64::from(count)),
            Layout::Packets(count) => (rows * cols).saturating_mul(8).saturating_mul(u64::from(count)),
            Layout::Best => (rows * cols).saturating_mul(8),
            Layout::Groups(tiling) => (1 + u64::from(tiling.most)) * 16,
            Layout::Sources(tiling) => tiling.places().saturating_mul(4),
            Layout::Grouped(tiling) => tiling.places().saturating_mul(cols.next_multiple_of(128) * 2),
            Layout::Placed(tiling) => tiling.places().saturating_mul(cols * 2),
        }
    }
}

/// One wave.
#[derive(Debug, Clone, PartialEq)]
pub struct Wave {
    /// The grid of the program that it belongs to.
    pub grid: GridId,
    pub action: Action,
    pub division: DivisionId,
    pub sums: Sums,
    /// Units of each box in which a pass of weights is copied: all of them, one less, and those of what is left over; in swizzled lines one box alone. Empty: unit by unit.
    pub boxes: Vec<u32>,
    /// Whether all SMs meet before it. If not, it waits for packets of the wave before it.
    pub meets: bool,
}

/// The order in which a wave adds up everything on which the bits of a row depend. It names no row and no SM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sums {
    /// Columns of a row in `parts` parts. All warps of a block add up a part.
    Row { parts: u32 },
    /// k in `parts` parts of `granules` granules each, fewer and longer ones in a launch of several blocks of rows ([`parts_of`]); of each part, groups of warps take granules in turn. Groups are added up first, then parts.
    /// `paired`: before bias and scales, by pairs of blocks. `squares`: sums of squares of the result that pairs leave of each row; 0 if none.
    /// `tiles`: by warpgroups, which add up 16 of k at once.
    Product { parts: u32, granules: u32, groups: u32, paired: bool, squares: u32, tiles: bool },
    /// Sums within a head only, by the lanes that share it.
    Heads,
    /// Tiles of `tile` positions. Heads of a task and the scratch decide how many teams of warps take them in turn. Where histories are cut,
    /// each split of `split` positions is added up alone.
    History { tile: u32, heads: u32, scratch_bytes: u32, split: Option<u32> },
    /// KV splits of this many positions, the earliest first.
    Splits { positions: u32 },
    /// Shares of experts, within a row.
    Choice,
    /// Nothing is added up.
    Nothing,
    /// k in `granules` granules, for tiles of `tile` places: by warpgroups in a chunk, by warps in a step.
    Experts { granules: u32, tile: u32 },
    /// Slots of a row in their order, then the shared expert.
    Slots { slots: u32, shared: bool },
    /// A state through this many positions at once, by products between them; one position by the parts of its rows that threads have.
    State { positions: u32 },
}

/// How histories are cut into KV splits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Splits {
    /// Positions of a split: whole tiles.
    pub positions: u32,
    /// Most splits of a row.
    pub most: u32,
    /// The results of splits for each head: the largest score, the sum, and the values.
    pub left: WorkId,
}

/// A vector of the pack that scales or shifts.
pub type Vector = Option<BufferId>;

/// A norm and where its weight and bias are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NormOf {
    pub norm: NormAttr,
    pub weight: Vector,
    pub bias: Vector,
}

/// What a wave does. Attributes of matrices and of attention are those of the grid.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Each row by itself: sets the residual or adds to it, and writes the input of the next product.
    Rows { residual: WorkId, sum: Option<Sum>, out: Option<Input> },
    /// `y = x W^T`, then the epilogue. Either `out` or the residual is written.
    MatMul {
        x: WorkId,
        /// If `x` lacks the factor of its norm: the sums of squares from which the factor follows.
        squares: Option<WorkId>,
        target: Target,
        /// For a product that leaves a whole residual, in pairs or by [`Target::Sums`]: the input of the next product.
        then: Option<Input>,
        /// Most units that a block multiplies at once.
        pass: u32,
        /// Granules of each unit in a chunk of weights.
        chunk: u32,
        warps: Warps,
        /// In a step: whether warpgroups multiply tiles. A tile has two units for each warp, and the input is [`Layout::Tiles`].
        tiles: bool,
        /// Chunks of weights that warps take into registers before the block enters the wave. So the loader continues while blocks meet.
        held: u32,
    },
    /// Norms q and k of a row over all their heads, and leaves them in fp32, with the other columns of `x` as they are. Attention of the same grid reads that.
    NormHeads { x: WorkId, out: WorkId },
    /// Of a chunk: norms and rotates heads, and appends keys and values to the cache.
    Append { x: WorkId, queries: WorkId },
    /// Of a chunk: attention over the cache, in tiles of `tile` positions. `gate`: the heads with the gates of the output, if it is gated.
    /// `wide`: by warpgroups.
    Attend { queries: WorkId, out: WorkId, tile: u32, wide: bool, gate: Option<WorkId> },
    /// Of a step: both. It reads only positions of earlier steps from the cache, and computes those of its own step from `x`, which may be sums of
    /// parts. With `splits` its tasks are KV splits, and the wave after it merges them.
    AttendRow { x: WorkId, out: WorkId, tile: u32, splits: Option<Splits> },
    /// Of a step: adds up the results of the splits of each row that has several. `gate` is as of [`Action::Attend`].
    Merge { out: WorkId, splits: Splits, gate: Option<WorkId> },
    /// The scores of a router, in fp32: a product without rings, because a router is small.
    Scores { x: WorkId, out: WorkId },
    /// The experts of each row by slot, and how much each counts.
    Route { scores: WorkId, choices: WorkId, shares: WorkId },
    /// Of a step: finds the place of each slot, and copies its row there.
    Gather { x: WorkId, choices: WorkId, groups: WorkId, places: WorkId, out: WorkId },
    /// Of a chunk: finds the place of each slot, and the row of each place.
    Places { choices: WorkId, groups: WorkId, places: WorkId, sources: WorkId },
    /// Of a chunk: copies rows to their places, eight neighbouring places at a time, because those lie side by side in memory.
    Fill { x: WorkId, groups: WorkId, sources: WorkId, out: WorkId },
    /// A product of the places of each tile with the matrix of its expert. `pass` and `chunk` are as of [`Action::MatMul`]. `tickets`: an item goes to the SM that draws its ticket,
    /// otherwise to one that follows from its number.
    Experts { x: WorkId, groups: WorkId, out: WorkId, pass: u32, chunk: u32, tickets: bool },
    /// What experts made of each row, in fp32: a branch whose norm another wave adds.
    Combine { slots: Slots, out: WorkId },
    /// Of a chunk: q, k and v of a net after its convolution, betas and decays. `x` has q, k, v and the gate of all heads; `scalars` beta and decay, beside them or apart.
    /// Of Mamba-2 c, b, x, steps and decays, all of one `x`.
    Convolve { x: WorkId, scalars: WorkId, out: WorkId },
    /// Of a chunk: brings states through all positions, and leaves what each position reads of them. `x` has the inputs that states keep.
    Mix { turned: WorkId, x: WorkId, out: WorkId },
    /// Norms what [`Action::Mix`] left, and gates it by `x`; of Mamba-2 also what [`Action::MixRow`] left.
    Gated { mixed: WorkId, x: WorkId, out: WorkId },
    /// Of a step: all three, for one position of each row; of Mamba-2 without a norm.
    MixRow { x: WorkId, scalars: WorkId, out: WorkId },
    /// A short convolution: brings states through all positions, and leaves what each position makes of them.
    ShortConv { x: WorkId, out: WorkId },
}

/// What a matrix product writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// The output, or its sums of parts of k; for a product that adds to the residual, the addend.
    Out(WorkId),
    /// In place: one share writes each element.
    Residual(WorkId),
    /// Of a chunk. A launch with one part of k adds to the residual in place, and leaves the input of the next product without the factor of its norm. One with several
    /// leaves sums of parts in `branch`, and the wave of rows after it does both. `shown`: of several devices, whether the residual goes to all, or each keeps the
    /// columns to which it adds.
    Sums { branch: Option<WorkId>, residual: WorkId, shown: bool },
    /// For each row, the best of the logits that a block computes.
    Best(WorkId),
}

impl Target {
    /// Whether the two blocks of a pair exchange and add the sums of a product in `parts` parts of k.
    pub fn is_paired(self, parts: u32) -> bool {
        parts > 1 && matches!(self, Target::Residual(_))
    }

    /// The residual to which it adds in place.
    pub fn residual(self) -> Option<WorkId> {
        match self {
            Target::Residual(residual) | Target::Sums { residual, .. } => Some(residual),
            Target::Out(_) | Target::Best(_) => None,
        }
    }

    /// All that it writes, in one launch or another.
    pub fn written(self) -> Vec<WorkId> {
        match self {
            Target::Out(to) | Target::Residual(to) | Target::Best(to) => vec![to],
            Target::Sums { branch, residual, .. } => branch.into_iter().chain([residual]).collect(),
        }
    }
}

/// How the warps of a block share a product: groups of rows x groups of units x groups of k, which take granules in turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Warps {
    pub rows: u32,
    pub units: u32,
    pub k: u32,
}

/// How a wave of rows changes the residual.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Sum {
    /// It becomes the embedding of the row's token, times `scale`. After the first step of a launch the token follows from the best logits of all blocks.
    Embed { table: BufferId, scale: f32, best: Option<WorkId> },
    /// A branch is added, normalised or as it is. It may be sums of parts.
    Branch { branch: WorkId, norm: Option<NormOf>, scale: f32 },
    /// What experts made is added, times the scale of the op.
    Slots(Slots),
    /// It becomes the residual of a row of the preceding chunk, which is in another arena.
    Taken,
}

/// What experts made of each row: the sum over its slots, each at its place and times its share, in their order, then the shared expert. `gate`: scores, one of which says how
/// much of the shared expert is added.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Slots {
    pub x: WorkId,
    pub places: WorkId,
    pub shares: WorkId,
    pub shared: Option<WorkId>,
    pub gate: Option<WorkId>,
}

impl Slots {
    fn reads(self) -> impl Iterator<Item = WorkId> {
        let Slots { x, places, shares, shared, gate } = self;
        [x, places, shares].into_iter().chain(shared).chain(gate)
    }
}

/// The input of a product: the residual, normalised or as it is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Input {
    pub to: WorkId,
    pub norm: Option<NormOf>,
    /// `to` is the residual times the norm's weight, and the product multiplies by the norm's factor. These are the sums of squares of parts of a row, from which it follows.
    /// After [`Target::Sums`] both are so in launches with one part of k alone; in others `to` has its factor.
    pub squares: Option<WorkId>,
    /// The same row by row, of a chunk with experts: an operand has 16 bytes of a row here and 16 bytes there, which takes waves that copy rows twice as long.
    pub rows: Option<WorkId>,
}

/// The work of each SM, for each number of blocks of rows that a chunk may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Division {
    pub over: Over,
    /// For each number of blocks, from one on, and for each SM.
    pub shares: Vec<Vec<Vec<Share>>>,
}

/// What is divided among SMs. There are `n` launch indices for every row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Over {
    /// Single rows, in parts of their columns (multiples of 8, nearly equal): a launch index each.
    Rows { parts: u32 },
    /// Single whole rows, in launches in which a product of `parts` parts of k has several. In others no block has any.
    Sums { parts: u32 },
    /// Units of a matrix, for blocks of rows, of each part of k: index `part * n + unit`. A launch of one block has `parts` parts, one of several fewer ([`parts_of`]).
    /// Of launches with one part, shares begin at multiples of `step` units of a device.
    Units { n: u32, parts: u32, step: u32 },
    /// Groups of heads, or of columns of scores, for tiles of `rows` rows. Of several devices one has `kept` groups in a row, those of a KV head.
    Heads { n: u32, rows: u32, kept: u32 },
    /// Tiles of experts, of which there are at most `tiling.most`, in `parts` parts of their units. Devices deal them out by number, so there are no shares.
    Items { parts: u32, tiling: Tiling },
    /// Columns of the states of a sequence, in `n` groups, each for all rows of the launch.
    States { n: u32 },
}

impl Over {
    /// Of units, those of a part of k, and of groups of heads all; 0 of others.
    fn indices(self) -> u32 {
        match self {
            Over::Units { n, .. } | Over::Heads { n, .. } => n,
            Over::Rows { .. } | Over::Sums { .. } | Over::Items { .. } | Over::States { .. } => 0,
        }
    }

    /// Which of the [`Over::indices`] one of several devices has: the units that it holds, and the groups of the KV heads that it keeps, as the other kernels
    /// divide them. `None`: each device has all.
    pub(crate) fn of_device(self, device: u32, devices: u32) -> Option<Range<u32>> {
        match self {
            Over::Units { n, .. } => Some(share_of(n, device, devices)),
            Over::Heads { n, kept, .. } => {
                let heads = u64::from(n / kept.max(1));
                let first = |device: u32| (heads * u64::from(device)).div_ceil(u64::from(devices.max(1))) as u32 * kept;
                Some(first(device)..first(device + 1))
            }
            Over::Rows { .. } | Over::Sums { .. } | Over::Items { .. } | Over::States { .. } => None,
        }
    }
}

/// Launch indices `lo..hi` for rows `row..row + rows`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    pub row: u32,
    pub rows: u32,
    pub lo: u32,
    pub hi: u32,
}

impl Plan {
    /// Whether the two blocks of a pair multiply the same weights in launches of this many blocks of rows. Each then has a block of rows of its own, and
    /// copies half of every chunk of weights to both. Of experts they have units of their own, and the same places.
    pub fn shares_weights(&self, blocks: u32) -> bool {
        self.form == Form::Chunk && self.machine.pairs && blocks.is_multiple_of(2)
    }

    /// The residual, units and parts of k of wave `w`, if it is a product that leaves sums ([`Target::Sums`]).
    fn sums_of(&self, w: usize) -> Option<(WorkId, u32, u32)> {
        let wave = self.waves.get(w)?;
        match (&wave.action, self.divisions.get(wave.division.index())?.over) {
            (&Action::MatMul { target: Target::Sums { residual, .. }, .. }, Over::Units { n, parts, .. }) => {
                Some((residual, n, parts))
            }
            _ => None,
        }
    }

    /// Of several devices: whether nothing but a product that adds to the same columns of the residual, in the same launches, reads what wave `w` leaves of it, so each device
    /// keeps its own columns.
    fn keeps_columns(&self, w: usize) -> bool {
        let Some(sums) = self.sums_of(w) else { return false };
        let accesses = |wave: &Wave| {
            let (reads, writes) = wave.action.accesses();
            reads.contains(&sums.0) || writes.contains(&sums.0)
        };
        // The wave of rows of the same sum is one of other launches.
        let rows = |wave: &Wave| {
            wave.grid == self.waves[w].grid
                && self.divisions.get(wave.division.index()).is_some_and(|d| d.over == Over::Sums { parts: sums.2 })
        };
        let next = (w + 1..self.waves.len()).find(|v| accesses(&self.waves[*v]) && !rows(&self.waves[*v]));
        next.is_some_and(|v| self.sums_of(v) == Some(sums))
    }

    /// Whether blocks draw tickets for items of experts.
    pub(crate) fn has_items(&self) -> bool {
        self.waves.iter().any(|wave| matches!(wave.action, Action::Experts { .. }))
    }

    /// How many turns at items a block remembers. The loader of inputs is ahead of consumers by as many turns as it has slots at most. If the other block of a pair tells them, it is
    /// ahead of this one by the slots of weights that they share, too.
    pub(crate) fn turns_told(&self) -> u32 {
        let Machine { inputs, weights, pairs, .. } = self.machine;
        let ahead = if pairs && self.form == Form::Chunk { weights.slots.saturating_add(1) } else { 0 };
        inputs.slots.saturating_add(2).saturating_add(ahead)
    }

    /// Bytes of the arena of activations.
    pub fn work_bytes(&self) -> u64 {
        self.work.iter().map(|work| work.place.saturating_add(work.bytes(self.rows))).max().unwrap_or(0)
    }

    pub fn smem_bytes(&self) -> u32 {
        let m = &self.machine;
        m.weights.bytes() + m.inputs.bytes() + m.scratch_bytes + m.state_bytes
    }

    /// Number of waves until keys and values of all rows are in the cache, and all states are those after them. A launch that decides nothing ends there.
    pub fn fills(&self) -> usize {
        let appends = |wave: &Wave| {
            matches!(
                wave.action,
                Action::Append { .. }
                    | Action::AttendRow { .. }
                    | Action::Mix { .. }
                    | Action::MixRow { .. }
                    | Action::ShortConv { .. }
            )
        };
        self.waves.iter().rposition(appends).map_or(0, |last| last + 1)
    }

    /// Meetings of all SMs in a step. The one before the first wave follows the step before.
    pub fn meetings(&self) -> usize {
        self.waves.iter().filter(|wave| wave.meets).count()
    }

    /// Whether each value carries its own flag, so that a reader needs no meeting.
    pub fn holds_packets(&self, id: WorkId) -> bool {
        matches!(self.work[id.index()].layout, Layout::Packets(_))
    }

    /// Bytes of the arena that hold packets.
    pub fn packets(&self) -> Vec<Range<u64>> {
        let holds = |work: &&Work| matches!(work.layout, Layout::Packets(_));
        let bytes = |work: &Work| work.place..work.place + work.bytes(self.rows);
        self.work.iter().filter(holds).map(bytes).collect()
    }

    /// The order of all sums, wave by wave.
    pub fn order(&self) -> Vec<Sums> {
        self.waves.iter().map(|wave| wave.sums).collect()
    }

    /// Where the blocks of a step write what they decided.
    pub fn best(&self) -> Option<WorkId> {
        self.waves.iter().find_map(|wave| match wave.action {
            Action::MatMul { target: Target::Best(best), .. } => Some(best),
            _ => None,
        })
    }
}

impl Action {
    /// Whether each of several devices does a part of the wave. Otherwise each does all of it.
    pub fn is_divided(&self) -> bool {
        matches!(self, Action::MatMul { .. } | Action::Attend { .. } | Action::AttendRow { .. })
    }

    /// Chunks of weights that warps hold before the block enters the wave.
    pub fn held(&self) -> u32 {
        match self {
            Action::MatMul { held, .. } => *held,
            _ => 0,
        }
    }

    /// Whether it is a product that warpgroups of a step multiply in tiles.
    pub fn is_tiles(&self) -> bool {
        matches!(self, Action::MatMul { tiles: true, .. })
    }

    /// For readers.
    pub fn name(&self) -> &'static str {
        match self {
            Action::Rows { .. } => "rows",
            Action::MatMul { .. } => "matmul",
            Action::NormHeads { .. } => "norm-heads",
            Action::Append { .. } => "append",
            Action::Attend { .. } => "attend",
            Action::AttendRow { .. } => "attend-row",
            Action::Merge { .. } => "merge",
            Action::Scores { .. } => "scores",
            Action::Route { .. } => "route",
            Action::Gather { .. } => "gather",
            Action::Places { .. } => "places",
            Action::Fill { .. } => "fill",
            Action::Experts { .. } => "experts",
            Action::Combine { .. } => "combine",
            Action::Convolve { .. } => "convolve",
            Action::Mix { .. } => "mix",
            Action::Gated { .. } => "gated",
            Action::MixRow { .. } => "mix-row",
            Action::ShortConv { .. } => "short-conv",
        }
    }

    /// The activations that the wave reads, then those that it writes. A residual that is summed in place is in both.
    pub fn accesses(&self) -> (Vec<WorkId>, Vec<WorkId>) {
        match *self {
            Action::Rows { residual, sum, out } => {
                let sets = matches!(sum, Some(Sum::Embed { .. } | Sum::Taken));
                let mut reads = if sets { vec![] } else { vec![residual] };
                let mut writes = if sum.is_some() { vec![residual] } else { vec![] };
                match sum {
                    Some(Sum::Branch { branch, .. }) => reads.push(branch),
                    Some(Sum::Slots(slots)) => reads.extend(slots.reads()),
                    Some(Sum::Embed { best, .. }) => reads.extend(best),
                    Some(Sum::Taken) | None => {}
                }
                writes.extend(out.into_iter().flat_map(|out| [Some(out.to), out.squares, out.rows]).flatten());
                (reads, writes)
            }
            Action::MatMul { x, squares, target, then, .. } => {
                let mut reads = vec![x];
                reads.extend(squares);
                reads.extend(target.residual());
                let mut writes = target.written();
                writes.extend(then.into_iter().flat_map(|then| [Some(then.to), then.squares, then.rows]).flatten());
                (reads, writes)
            }
            Action::NormHeads { x, out } | Action::ShortConv { x, out } => (vec![x], vec![out]),
            Action::Append { x, queries } => (vec![x], vec![queries]),
            Action::Attend { queries, out, gate, .. } => ([queries].into_iter().chain(gate).collect(), vec![out]),
            Action::AttendRow { x, out, splits, .. } => {
                (vec![x], [out].into_iter().chain(splits.map(|splits| splits.left)).collect())
            }
            Action::Merge { out, splits, gate } => ([splits.left].into_iter().chain(gate).collect(), vec![out]),
            Action::Scores { x, out } => (vec![x], vec![out]),
            Action::Route { scores, choices, shares } => (vec![scores], vec![choices, shares]),
            Action::Gather { x, choices, groups, places, out } => (vec![x, choices], vec![groups, places, out]),
            Action::Places { choices, groups, places, sources } => (vec![choices], vec![groups, places, sources]),
            Action::Fill { x, groups, sources, out } => (vec![x, groups, sources], vec![out]),
            Action::Experts { x, groups, out, .. } => (vec![x, groups], vec![out]),
            Action::Convolve { x, scalars, out } | Action::MixRow { x, scalars, out } => (vec![x, scalars], vec![out]),
            Action::Mix { turned, x, out } => (vec![turned, x], vec![out]),
            Action::Gated { mixed, x, out } => (vec![mixed, x], vec![out]),
            Action::Combine { slots, out } => (slots.reads().collect(), vec![out]),
        }
    }
}
