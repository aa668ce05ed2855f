//! Owns `Program`: buffers and grids with affine operand regions; no SM, no order, no position baked in.

use super::op::{Access, Op, Role};
use super::table::{Holds, Table};
use super::{BufferId, GridId, LayerId, TableId};
use crate::dtype::{DType, Precision};
use crate::format::Format;
use crate::model::graph::{RopeId, RowView, TensorId};
use std::ops::Range;

/// A tile-level task graph with the cache position as its symbol: one program serves every position below `context_max`.
#[derive(Debug, Clone, PartialEq)]
pub struct Program {
    pub name: String,
    pub precision: Precision,
    /// Positions run from 0 to `context_max - 1`.
    pub context_max: u32,
    /// Rows of a step, at most: tokens that are decoded together.
    pub rows: u32,
    pub tables: Vec<Table>,
    pub buffers: Vec<Buffer>,
    pub grids: Vec<Grid>,
}

/// Memory of one kind: a matrix `rows x cols` of `dtype`.
#[derive(Debug, Clone, PartialEq)]
pub struct Buffer {
    pub name: String,
    pub space: Space,
    pub dtype: DType,
    /// How a matrix stores its weights; `None`: as values of `dtype`.
    pub coded: Option<Format>,
    pub rows: u32,
    pub cols: u32,
    /// Copies used in turn, one a step: 2 lets a step write while late readers of the previous step still read.
    pub phases: u32,
    /// Whether values of an exchange travel as words, in two phases: their owner clears them for the next step. If not, as packets.
    pub words: bool,
    /// Where the rows of a cache lie; `None`: row `p` is position `p` of the only sequence.
    pub paging: Option<Paging>,
    pub home: Home,
    /// Where an immutable buffer's bytes come from; `None` for what the kernel writes.
    pub content: Option<Content>,
}

/// A paged cache: position `p` of sequence `s` is row `p % rows` of the page that the table holds for `s` and `p / rows`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Paging {
    pub table: TableId,
    /// Rows of a page.
    pub rows: u32,
}

/// Whose memory holds a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Home {
    /// Each SM has one of its own.
    Sm,
    /// The memory of one device.
    Device(u32),
    /// Each device has one of its own. What is published is published to all of them, and each device polls its own;
    /// plain memory is read where it was written.
    Everywhere,
    /// Of a matrix each device has the units of [`share_of`](super::layout::share_of), in each part that a table chooses among.
    Divided,
}

impl Home {
    /// Where a buffer lies on a machine of one device.
    pub fn of(space: Space) -> Home {
        if space == Space::Private { Home::Sm } else { Home::Device(0) }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Space {
    /// Linear weights in the order SMs consume them; read through the stream only.
    Weight,
    /// Small immutable data read with ordinary loads: norms, biases, RoPE table, embedding table.
    Constant,
    /// Activations that travel between SMs.
    Exchange,
    /// One instance per SM, in shared memory.
    Private,
    /// Keys or values of one layer: a row per position, KV heads side by side.
    Cache,
    /// The recurrent state of one layer: a row for each sequence, heads side by side. A task of each step updates its columns in place; the
    /// next step finds them. It lies in the arena of caches.
    State,
    /// Written by the kernel, read by the host after the launch or while it runs.
    Output,
}

impl Space {
    pub const ALL: [Space; 7] =
        [Space::Weight, Space::Constant, Space::Exchange, Space::Private, Space::Cache, Space::State, Space::Output];

    pub fn name(self) -> &'static str {
        match self {
            Space::Weight => "weight",
            Space::Constant => "constant",
            Space::Exchange => "exchange",
            Space::Private => "private",
            Space::Cache => "cache",
            Space::State => "state",
            Space::Output => "output",
        }
    }

    pub fn parse(name: &str) -> Option<Self> {
        Space::ALL.into_iter().find(|s| s.name() == name)
    }

    /// The space whose arena has it.
    pub fn arena(self) -> Space {
        if self == Space::State { Space::Cache } else { self }
    }

    /// Never written by a task.
    pub fn immutable(self) -> bool {
        matches!(self, Space::Weight | Space::Constant)
    }
}

/// How the packer fills an immutable buffer from the checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub enum Content {
    /// Rows of linears, one part after another; with `interleave` 4 parts are pairs, one pair after another, 4 rows of each of a pair in
    /// turn. Padded with zero rows.
    Rows { parts: Vec<Part>, interleave: u32 },
    /// Vectors one after another, each value plus `offset`, times `scale`; `interleave` as for rows. `None` is zeros (a part without bias).
    Vectors { parts: Vec<VectorPart>, offset: f32, scale: f32, interleave: u32 },
    /// A whole tensor, row-major.
    Tensor(TensorId),
    /// cos then sin of every position: row p is `[cos(p f_0) .. cos(p f_n-1), sin(p f_0) ..] * scale`.
    RopeTable(RopeId),
    /// Scales of the cached keys and values of a layer: for each KV head, the scale of its keys, then that of its values
    /// ([`crate::model::cache_scales`]).
    CacheScales(LayerId),
}

#[derive(Debug, Clone, PartialEq)]
pub struct Part {
    pub view: RowView,
    pub rows: u32,
}

#[derive(Debug, Clone, PartialEq)]
pub struct VectorPart {
    pub view: Option<RowView>,
    pub len: u32,
}

/// An op of a layer, or the head: a kernel with variants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LayerOp {
    Qkv,
    Attention,
    O,
    /// Scores of experts, and the choice among them.
    Router,
    /// Up, or gate and up together.
    Up,
    Down,
    Head,
}

impl LayerOp {
    pub const ALL: [LayerOp; 7] =
        [LayerOp::Qkv, LayerOp::Attention, LayerOp::O, LayerOp::Router, LayerOp::Up, LayerOp::Down, LayerOp::Head];

    /// Those that are built, checked and searched alone. What a router chooses depends on more than an op's input.
    pub const ALONE: [LayerOp; 6] =
        [LayerOp::Qkv, LayerOp::Attention, LayerOp::O, LayerOp::Up, LayerOp::Down, LayerOp::Head];

    pub fn name(self) -> &'static str {
        match self {
            LayerOp::Qkv => "qkv",
            LayerOp::Attention => "attention",
            LayerOp::O => "o",
            LayerOp::Router => "router",
            LayerOp::Up => "up",
            LayerOp::Down => "down",
            LayerOp::Head => "head",
        }
    }

    /// By its name, or by the name of one of its grids.
    pub fn parse(name: &str) -> Option<LayerOp> {
        LayerOp::ALL.into_iter().find(|op| op.name() == name).or(match name {
            "attn" | "attn_split" | "attn_merge" => Some(LayerOp::Attention),
            "gate_up" => Some(LayerOp::Up),
            _ => None,
        })
    }
}

/// Which part of the model a grid computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Site {
    pub op: LayerOp,
    /// `None` for the head.
    pub layer: Option<LayerId>,
}

impl Site {
    pub const HEAD: Site = Site { op: LayerOp::Head, layer: None };

    pub fn of_layer(op: LayerOp, layer: usize) -> Site {
        Site { op, layer: Some(LayerId::from(layer)) }
    }
}

/// `n x j` launch indices of one op.
#[derive(Debug, Clone, PartialEq)]
pub struct Grid {
    /// For readers: nothing is decided by it.
    pub name: String,
    /// `None` for work outside the layers: a step also decides and embeds the token.
    pub site: Option<Site>,
    pub op: Op,
    /// Launch extent: units, head groups, SMs.
    pub n: u32,
    pub second: Second,
    /// Whether the rows of the step are a third launch axis: then a task takes one row. If not, it takes all of them.
    pub per_row: bool,
    pub operands: Vec<Operand>,
}

/// What a task's `j` means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Second {
    /// A second launch axis of this extent: every pair (i, j) is launched once.
    Axis(u32),
    /// The ordinal of the task within its grid, below this bound: every i is launched once, every j at most once.
    Ordinal(u32),
    /// Parts that a table chooses among are dealt to so many tasks when the rows of the step have chosen. The units of the distinct parts, in
    /// ascending order, are one list; task j takes its share of it ([`dealt`]), for all rows that chose a part. Which units those are is known
    /// only then, so a task names all indices. Of several devices each has as many tasks, one device after another, which share what it holds.
    Dealt(u32),
}

/// Which of `units` in a row task `j` of `tasks` takes.
pub fn dealt(units: usize, j: u32, tasks: u32) -> Range<usize> {
    let begin = |j: u32| (units as u64 * u64::from(j) / u64::from(tasks.max(1))) as usize;
    begin(j)..begin(j + 1)
}

impl Second {
    pub fn extent(self) -> u32 {
        match self {
            Second::Axis(n) | Second::Ordinal(n) | Second::Dealt(n) => n,
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct Operand {
    pub role: Role,
    pub access: Access,
    pub buffer: BufferId,
    pub rows: Rows,
    pub cols: Cols,
}

/// Which rows of its buffer an operand touches: its index in the first dimension. [`Cols`] is the index in the second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rows {
    /// Row 0 of a vector.
    One,
    /// All rows of a step with several rows, as many as the launch has: row `r` of the buffer belongs to row `r` of the step.
    All,
    /// The row of the step that the task takes.
    Own,
    /// The row of the current position (cache append, RoPE table; a key of the step is rotated at its own position).
    Current,
    /// Rows before the first row of the sequence in the step: the share `j` that
    /// [`super::op::Attention::history_share`] gives.
    History,
    /// The row of the current token, a runtime index below the buffer's `rows`.
    Token,
    /// Weight rows of the launch range; `cols` are then units of the stream.
    Units,
    /// The rows of the step's sequences: row `s` of the buffer belongs to sequence `s`.
    Sequences,
    /// Those of [`Rows::Sequences`] of a state, or of [`Rows::All`] elsewhere, that are in part `j` of the sequences. The second axis has
    /// the parts; [`part_of`] divides sequences among them.
    Part,
    /// As [`Rows::Units`], of the part of the buffer that the table chooses in the step. The parts are equal, as many as its bound.
    Lookup(TableId),
}

impl Rows {
    /// All but [`Rows::Lookup`], which names a table.
    pub const ALL: [Rows; 9] = [
        Rows::One,
        Rows::All,
        Rows::Own,
        Rows::Current,
        Rows::History,
        Rows::Token,
        Rows::Units,
        Rows::Sequences,
        Rows::Part,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Rows::One => "one",
            Rows::All => "all",
            Rows::Own => "own",
            Rows::Current => "current",
            Rows::History => "history",
            Rows::Token => "token",
            Rows::Units => "units",
            Rows::Sequences => "sequences",
            Rows::Part => "part",
            Rows::Lookup(_) => "lookup",
        }
    }

    pub fn parse(name: &str) -> Option<Self> {
        Rows::ALL.into_iter().find(|r| r.name() == name)
    }
}

/// The part of a sequence, and of its rows of a step, if `parts` tasks divide the sequences. A row that a launch does not have is in the
/// part that its number in the step has in place of a sequence. No row of a launch changes its sequence, so none changes its part.
pub fn part_of(sequence: u32, parts: u32) -> u32 {
    sequence % parts.max(1)
}

/// Columns of launch index (i, j): `start..start + len` with `start = base + stride * (i / div) + stride_j * j`,
/// cut off at `limit`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Cols {
    pub base: u32,
    pub stride: u32,
    pub div: u32,
    pub stride_j: u32,
    pub len: u32,
    pub limit: u32,
    /// Only launch indices with `i % div == 0` touch the buffer (the first head group of a KV head appends).
    pub first: bool,
    /// Only launch indices with this `j` touch it (the share that holds the current position).
    pub only_j: Option<u32>,
}

impl Cols {
    /// The same columns for every launch index.
    pub fn all(len: u32) -> Self {
        Cols { base: 0, stride: 0, div: 1, stride_j: 0, len, limit: len, first: false, only_j: None }
    }

    /// Consecutive blocks of `len` columns, the last one cut off at `limit`.
    pub fn blocks(len: u32, limit: u32) -> Self {
        Cols { stride: len, limit, ..Cols::all(len) }
    }

    fn start(&self, i: u32, j: u32) -> u64 {
        u64::from(self.base)
            + u64::from(self.stride) * u64::from(i / self.div.max(1))
            + u64::from(self.stride_j) * u64::from(j)
    }

    /// Union over launch indices `lo..hi`, as `start..end`; `(0, 0)` when nothing is touched.
    /// Free of holes only if [`Cols::contiguous`]; 64-bit, so that no input can wrap.
    pub fn range(&self, lo: u32, hi: u32, j: u32) -> (u64, u64) {
        let (mut lo, mut hi) = (lo, hi);
        if self.first {
            let div = self.div.max(1);
            lo = lo.div_ceil(div).saturating_mul(div);
            hi = hi.div_ceil(div).saturating_mul(div).saturating_sub(div - 1);
        }
        if lo >= hi || self.only_j.is_some_and(|only| only != j) {
            return (0, 0);
        }
        let end = (self.start(hi - 1, j) + u64::from(self.len)).min(u64::from(self.limit));
        let start = self.start(lo, j);
        if start < end { (start, end) } else { (0, 0) }
    }

    /// Whether the union over `lo..hi` has no holes.
    pub fn contiguous(&self, lo: u32, hi: u32) -> bool {
        hi <= lo + 1 || self.stride <= self.len || lo / self.div.max(1) == (hi - 1) / self.div.max(1)
    }
}

impl Buffer {
    /// How its values are stored.
    pub fn format(&self) -> Format {
        self.coded.unwrap_or(Format::plain(self.dtype))
    }
}

impl Program {
    /// The last grid that appends rows to a cache, or updates a state. A launch that only fills the cache ends after it.
    pub fn last_append(&self) -> Option<GridId> {
        self.grids.iter().rposition(Grid::leaves).map(GridId::from)
    }

    /// Whether it is the program of a draft, which is given a vector with each token.
    pub fn joins(&self) -> bool {
        self.grids.iter().any(|grid| matches!(grid.op, Op::Join { .. }))
    }

    /// The exchange that the head reads: what the last layer leaves, before the final norm. `None`: every SM has that for itself.
    pub fn head_input(&self) -> Option<BufferId> {
        let head = self.grids.iter().rfind(|grid| grid.site == Some(Site::HEAD))?;
        let input = head.operand(Role::X)?.buffer;
        self.buffers.get(input.index()).filter(|buffer| buffer.space == Space::Exchange).map(|_| input)
    }

    /// Whether sequences keep a recurrent state.
    pub fn has_state(&self) -> bool {
        self.buffers.iter().any(|buffer| buffer.space == Space::State)
    }

    /// Grids with a recurrent state: its layer and buffer.
    pub fn states(&self) -> impl Iterator<Item = (LayerId, BufferId)> {
        self.grids.iter().filter_map(|grid| Some((grid.site?.layer?, grid.operand(Role::State)?.buffer)))
    }

    /// The format of the matrix that a grid streams; that of plain weights if it streams none.
    pub fn format_of(&self, grid: &Grid) -> Format {
        let weight = grid.operand(Role::Weight).and_then(|o| self.buffers.get(o.buffer.index()));
        weight.map_or(Format::plain(self.precision.weights), Buffer::format)
    }

    /// The most parts that tasks may divide sequences into: each has a row of the step, and a sequence.
    pub fn parts_max(&self) -> u32 {
        self.table(Holds::Sequences).map_or(1, |(_, table)| table.bound.min(self.rows).max(1))
    }

    /// The table that chooses which part of its matrix a grid computes with.
    pub fn looked_up(&self, grid: &Grid) -> Option<&Table> {
        match grid.operand(Role::Weight)?.rows {
            Rows::Lookup(table) => self.tables.get(table.index()),
            _ => None,
        }
    }

    /// Whether a grid is the first to which parts are dealt of those that look up one table.
    pub fn deals_first(&self, id: GridId) -> bool {
        let table = |grid: &Grid| grid.operand(Role::Weight).map(|weight| weight.rows).filter(|_| grid.is_dealt());
        let own = self.grids.get(id.index()).and_then(table);
        own.is_some() && self.grids[..id.index()].iter().all(|grid| table(grid) != own)
    }

    /// For each buffer, whether tasks to which parts are dealt write some of it.
    pub fn dealt_buffers(&self) -> Vec<bool> {
        let mut dealt = vec![false; self.buffers.len()];
        let operands = self.grids.iter().filter(|grid| grid.is_dealt()).flat_map(|grid| &grid.operands);
        operands.filter(|operand| operand.access.writes()).for_each(|operand| dealt[operand.buffer.index()] = true);
        dealt
    }

    /// Columns from slot to slot of the input of a product whose parts are dealt; 0: all slots have one input.
    pub fn input_step(&self, grid: &Grid) -> u32 {
        let (Op::MatVec(m), Some(table), Some(x)) = (&grid.op, self.looked_up(grid), grid.operand(Role::X)) else {
            return 0;
        };
        if x.cols.len == m.k { 0 } else { x.cols.len / table.cols.max(1) }
    }

    /// The most parts that a table of choices chooses among, and the most that it chooses for a row; `None`: there is no choice.
    pub fn chosen_max(&self) -> Option<(u32, u32)> {
        let of_choices = self.tables.iter().filter(|table| table.holds == Holds::Choices);
        of_choices.map(|table| (table.bound, table.cols)).reduce(|a, b| (a.0.max(b.0), a.1.max(b.1)))
    }

    /// Most distinct parts that the rows of a step choose among those of a grid.
    pub fn parts_chosen_max(&self, grid: &Grid) -> u32 {
        self.looked_up(grid).map_or(1, |table| table.rows.saturating_mul(table.cols).min(table.bound))
    }

    /// The table of the host that holds `holds`.
    pub fn table(&self, holds: Holds) -> Option<(TableId, &Table)> {
        (0..).map(TableId).zip(&self.tables).find(|(_, table)| table.holds == holds)
    }
}

impl Grid {
    /// Of what is dealt, which share task `j` has of how many of its device, if so many devices have its tasks.
    pub fn share_on_device(&self, j: u32, devices: u32) -> Option<(u32, u32)> {
        let Second::Dealt(tasks) = self.second else { return None };
        let each = (tasks / devices.max(1)).max(1);
        Some((j % each, each))
    }

    /// Whether its parts are dealt when the rows of the step have chosen them.
    pub fn is_dealt(&self) -> bool {
        matches!(self.second, Second::Dealt(_))
    }

    /// Parts of the sequences that its tasks divide among them: 1 unless it touches [`Rows::Part`].
    pub fn parts(&self) -> u32 {
        match self.second {
            Second::Axis(parts) if self.operands.iter().any(|operand| operand.rows == Rows::Part) => parts,
            _ => 1,
        }
    }

    /// Whether a later step finds what it does: a row of a cache, or a state.
    pub fn leaves(&self) -> bool {
        self.operand(Role::AppendK).or(self.operand(Role::State)).is_some()
    }

    pub fn operand(&self, role: Role) -> Option<&Operand> {
        self.operands.iter().find(|o| o.role == role)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_a_deal_are_even_and_cover_it() {
        for (units, tasks) in [(0, 4), (1, 4), (5, 1), (77, 128), (12_288, 132), (u32::MAX as usize, 3)] {
            let shares: Vec<Range<usize>> = (0..tasks).map(|j| dealt(units, j, tasks)).collect();
            assert_eq!((shares[0].start, shares[shares.len() - 1].end), (0, units));
            assert!(shares.windows(2).all(|pair| pair[0].end == pair[1].start), "{units} units, {tasks} tasks");
            let least = units / tasks as usize;
            assert!(
                shares.iter().all(|share| (least..=least + 1).contains(&share.len())),
                "{units} units, {tasks} tasks"
            );
        }
    }
}
