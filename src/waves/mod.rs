//! Owns `Plan`: a kernel that reads long prompt chunks wave by wave.
//!
//! A step of a few rows is bound by the bytes of its weights, so its tasks wait for single words of each other and weights never
//! stop. A chunk of hundreds of rows is bound by arithmetic: there a wait costs little, and what counts is that a weight that reached an
//! SM is multiplied with many rows. A *wave* is what one grid of the program does for all rows of a chunk, or a part of that.
//! All SMs meet between two waves.
//!
//! A plan is made of the proven schedule of a kernel for rows. It computes the same program over the same pack, the same cache and the same
//! pages, up to the last grid that appends to the cache: what comes after a chunk is another kernel's.
//!
//! # What orders memory
//!
//! Waves are counted. After its last write of a wave an SM's warps pass a block barrier; then one thread adds one to the count
//! (`red.release.gpu`). Who reads in wave `w` polls the count until it is `w` times the number of SMs (`ld.acquire.gpu`): one warp of the
//! consumers, then a block barrier; and the loader, in each lane that copies, which then fences the asynchronous proxy. Each addition
//! is a read-modify-write, so all of them are one release sequence, and the poll acquires what every SM released (PTX ISA 9, 8.8 and
//! 8.9.4). So a wave sees everything that earlier waves of the launch wrote, by ordinary loads and by bulk copies alike. It waits for
//! nothing else. The loader brings weights of later waves before that, and no wave writes those.
//!
//! Within a wave nothing is ordered between SMs. [`prove`] therefore asks that a wave writes no buffer that it reads, apart from
//! sums in place, and that the shares of its SMs are disjoint.

mod derive;
mod print;
mod prove;

pub use derive::{Refused, derive};
pub use prove::{Proven, Violation, prove};

use crate::define_id;
use crate::dtype::DType;
use crate::ir::op::NormAttr;
use crate::ir::{BufferId, GridId};

define_id!(
    /// A buffer of the activations of a chunk.
    WorkId, "a"
);
define_id!(
    /// A division of the work of a wave among SMs.
    DivisionId, "d"
);

/// Rows of a chunk at most, unless asked for otherwise.
pub const CHUNK_ROWS: u32 = 512;
/// Rows of a chunk that are worth waves: fewer take as long, and kernels for rows read them as fast.
pub const CHUNK_MIN: u32 = 64;
/// Rows that a matrix product has of a chunk at once: `BLOCK_ROWS` of waves/context.cuh.
pub const BLOCK_ROWS: u32 = 128;
/// Units of a pass of a product at most: a warp holds the sums of 64 rows by 7 units, 112 registers of a lane.
pub const PASS_MAX: u32 = 28;
/// The same of codes whose scales are of groups: a warp holds sums of a group, too.
pub const GROUPED_PASS_MAX: u32 = 16;
/// Groups of warps of a product that have other units each.
pub const UNIT_GROUPS: u32 = 4;

/// Waves in order, and who does what in each.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Rows of a chunk at most: whole blocks of [`BLOCK_ROWS`].
    pub rows: u32,
    pub machine: Machine,
    /// Activations, in an arena of their own.
    pub work: Vec<Work>,
    pub waves: Vec<Wave>,
    pub divisions: Vec<Division>,
}

/// What a launch occupies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    pub target: String,
    /// Blocks, one an SM.
    pub sms: u32,
    pub warps: u32,
    pub loader_warps: u32,
    /// Of a consumer and of a loader thread, after registers moved.
    pub registers: u32,
    pub loader_registers: u32,
    pub slots: u32,
    pub slot_bytes: u32,
    /// Barriers and watchdog, after the ring.
    pub state_bytes: u32,
}

/// `rows x cols` activations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Work {
    pub name: String,
    pub layout: Layout,
    pub cols: u32,
    /// Offset in the arena, bytes.
    pub place: u64,
}

/// Where the elements of activations lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Row by row.
    Rows(DType),
    /// bf16, as the lanes of a product read it (`OperandPlace` of waves/context.cuh): 16 KiB for 128 rows and 64 columns. Columns
    /// that pad the last 128 are zero.
    Operand,
}

impl Work {
    /// Bytes of a chunk of `rows` rows, whole blocks.
    pub fn bytes(&self, rows: u32) -> u64 {
        let (rows, cols) = (u64::from(rows), u64::from(self.cols));
        match self.layout {
            Layout::Rows(dtype) => (rows * cols).saturating_mul(dtype.bytes() as u64),
            Layout::Operand => rows.saturating_mul(cols.next_multiple_of(128) * 2),
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
    /// Each row alone: sets the residual or adds to it, and writes the input of the next product.
    Rows { residual: WorkId, sum: Option<Sum>, out: Option<Input> },
    /// `y = x W^T`, then the epilogue. Either `out` or the residual is written.
    MatMul {
        x: WorkId,
        target: Target,
        /// Units that a block multiplies at once, at most.
        pass: u32,
    },
    /// Norms and rotates heads, and appends keys and values to the cache.
    Append { x: WorkId, queries: WorkId },
    /// Attention over the cache, in tiles of `tile` positions.
    Attend { queries: WorkId, out: WorkId, tile: u32 },
}

/// What a matrix product writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    Out(WorkId),
    /// In place: each element by the one share that has it.
    Residual(WorkId),
}

/// How a wave of rows changes the residual.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Sum {
    /// It becomes the embedding of the row's token, times `scale`.
    Embed { table: BufferId, scale: f32 },
    /// A branch is normalised and added.
    Branch { branch: WorkId, norm: NormOf, scale: f32 },
}

/// The input of a product: the residual, normalised or as it is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Input {
    pub to: WorkId,
    pub norm: Option<NormOf>,
}

/// Who does what, for each number of blocks of rows that a chunk may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Division {
    pub over: Over,
    /// Of each number of blocks, from one on, and of each SM.
    pub shares: Vec<Vec<Vec<Share>>>,
}

/// What is divided, of `n` launch indices for every row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Over {
    /// Single rows, whole: one launch index.
    Rows,
    /// Units of a matrix, for blocks of [`BLOCK_ROWS`] rows.
    Units { n: u32 },
    /// Groups of heads, for tiles of `rows` rows.
    Heads { n: u32, rows: u32 },
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
    /// Bytes of the arena of activations.
    pub fn work_bytes(&self) -> u64 {
        self.work.iter().map(|work| work.place.saturating_add(work.bytes(self.rows))).max().unwrap_or(0)
    }

    pub fn smem_bytes(&self) -> u32 {
        self.machine.slots * self.machine.slot_bytes + self.machine.state_bytes
    }
}

impl Action {
    /// For readers.
    pub fn name(&self) -> &'static str {
        match self {
            Action::Rows { .. } => "rows",
            Action::MatMul { .. } => "matmul",
            Action::Append { .. } => "append",
            Action::Attend { .. } => "attend",
        }
    }

    /// What the wave reads of activations, then what it writes. A residual that is summed in place is both.
    pub fn accesses(&self) -> (Vec<WorkId>, Vec<WorkId>) {
        match *self {
            Action::Rows { residual, sum, out } => {
                let sets = matches!(sum, Some(Sum::Embed { .. }));
                let mut reads = if sets { vec![] } else { vec![residual] };
                let mut writes = if sum.is_some() { vec![residual] } else { vec![] };
                if let Some(Sum::Branch { branch, .. }) = sum {
                    reads.push(branch);
                }
                writes.extend(out.map(|out| out.to));
                (reads, writes)
            }
            Action::MatMul { x, target: Target::Out(out), .. } => (vec![x], vec![out]),
            Action::MatMul { x, target: Target::Residual(residual), .. } => (vec![x, residual], vec![residual]),
            Action::Append { x, queries } => (vec![x], vec![queries]),
            Action::Attend { queries, out, .. } => (vec![queries], vec![out]),
        }
    }
}
