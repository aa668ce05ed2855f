//! Owns where bytes lie: units and granules of weights, chunks of the ring, cache rows, places in arenas, shared memory.
//!
//! Scheduling, packing, code generation and the interpreter all ask this module for it. Only the validator keeps arithmetic
//! of its own, because it judges what this module decides.

use super::op::{Epilogue, HISTORY_ALIGN, MatVec, Op, PARTIAL_HEADER, Role, UNIT_ROWS};
use super::program::{Buffer, Home, Program, Rows, Space};
use super::schedule::{Run, Schedule, SmemKind, SmemPart, Source};
use crate::dtype::{DType, Precision};
use crate::format::{CODE_BYTES, CODE_ROW_BYTES, Format};
use std::ops::{Range, RangeInclusive};

/// Bytes of one granule without scales: 8 rows of 64 bytes, one 16-byte load for each lane of a warp. In a unit of `r` rows, row
/// `p r + i` of a granule is part `p` of row `i`: the parts of 64 bytes follow each other.
pub const GRANULE_BYTES: u32 = CODE_BYTES;
/// Bytes of one row of a granule.
pub const GRANULE_ROW_BYTES: u32 = CODE_ROW_BYTES;

/// Bytes of a unit of 8 rows of `cols` plain weights.
pub fn unit_bytes(cols: u32, precision: Precision) -> u32 {
    cols.div_ceil(Format::plain(precision.weights).granule_k()).max(1) * GRANULE_BYTES
}

impl MatVec {
    /// Launch extent: units of 8 rows, or of 4 gate and 4 up rows.
    pub fn units(&self) -> u32 {
        match self.epilogue {
            Epilogue::Gated(_) | Epilogue::Clamped(_) => (self.rows / 2).div_ceil(UNIT_ROWS / 2),
            _ => self.rows.div_ceil(self.unit_rows.max(1)),
        }
    }

    /// Whether units may have `rows` rows. Fewer than 8 are for plain weights, if a unit is only columns of the output and its k is
    /// whole granules.
    pub fn takes_unit_rows(&self, rows: u32, format: Format) -> bool {
        rows == UNIT_ROWS
            || matches!(rows, 2 | 4)
                && format.is_plain()
                && matches!(self.epilogue, Epilogue::Store | Epilogue::Scores | Epilogue::Act(_))
                && self.k.is_multiple_of(format.granule_k() * (UNIT_ROWS / rows))
    }

    /// Parts of k side by side in a granule.
    pub fn parts(&self) -> u32 {
        UNIT_ROWS / self.unit_rows.clamp(1, UNIT_ROWS)
    }

    /// Granules of one unit.
    pub fn granules(&self, format: Format) -> u32 {
        self.k.div_ceil(format.granule_k() * self.parts())
    }

    /// Bytes of one unit.
    pub fn unit_bytes(&self, format: Format) -> u64 {
        u64::from(self.granules(format)) * u64::from(format.granule_bytes())
    }

    /// Columns of the input: those of all slots.
    pub fn inputs(&self) -> u32 {
        self.k.saturating_mul(self.slots)
    }

    /// Granules that a task streams for a unit: its unit of the matrix of each slot, one after another.
    pub fn streamed_granules(&self, format: Format) -> u32 {
        self.granules(format).saturating_mul(self.slots)
    }

    /// The same in bytes.
    pub fn streamed_bytes(&self, format: Format) -> u64 {
        self.unit_bytes(format).saturating_mul(self.slots.into())
    }
}

/// A matrix as it lies in the pack: its units one after another, in the order of its rows, each whole along k; then, if its
/// format has them, the fp32 scales of all rows of all units.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Matrix {
    pub units: u32,
    pub unit_rows: u32,
    pub unit_bytes: u64,
    pub format: Format,
}

impl Matrix {
    pub fn bytes(&self) -> u64 {
        let scales = u64::from(self.units).saturating_mul(u64::from(self.unit_rows)) * 4;
        if self.format.row_scales { self.row_scales_at().saturating_add(scales) } else { self.units_bytes() }
    }

    /// Bytes of its units.
    pub fn units_bytes(&self) -> u64 {
        u64::from(self.units).saturating_mul(self.unit_bytes)
    }

    /// Where the scales of its rows begin, from its place: scale `8 u + r` is that of row `r` of unit `u`.
    pub fn row_scales_at(&self) -> u64 {
        place_align(self.units_bytes())
    }
}

/// The matrices of a program by buffer: what a matvec streams.
pub fn matrices(program: &Program) -> Vec<Option<Matrix>> {
    let mut matrices = vec![None; program.buffers.len()];
    for grid in &program.grids {
        let (Op::MatVec(m), Some(weight)) = (&grid.op, grid.operand(Role::Weight)) else { continue };
        let Some(buffer) = program.buffers.get(weight.buffer.index()) else { continue };
        // The parts that a table chooses among follow one another.
        let parts = match weight.rows {
            Rows::Lookup(table) => program.tables.get(table.index()).map_or(1, |table| table.bound),
            _ => 1,
        };
        let format = buffer.format();
        let (units, unit_bytes) = (m.units().saturating_mul(parts), m.unit_bytes(format));
        matrices[weight.buffer.index()] = Some(Matrix { units, unit_rows: m.unit_rows, unit_bytes, format });
    }
    matrices
}

/// Where a pack ends: the bytes of all weights and constants, by their places.
pub fn pack_bytes(schedule: &Schedule) -> u64 {
    let Schedule { program, placement, .. } = schedule;
    let matrices = matrices(program);
    let ends = program.buffers.iter().zip(placement).zip(&matrices).filter_map(|((b, place), matrix)| {
        let bytes = match b.space {
            Space::Weight => matrix.map_or(0, |m| m.bytes()),
            Space::Constant => placed_bytes(b),
            _ => return None,
        };
        Some(place_align((*place)?.saturating_add(bytes)))
    });
    ends.max().unwrap_or(0)
}

/// The units of a matrix of `units` that a device of several has: as many as others, or one more.
pub fn share_of(units: u32, device: u32, devices: u32) -> Range<u32> {
    let begin = |device: u32| (u64::from(units) * u64::from(device) / u64::from(devices.max(1))) as u32;
    begin(device)..begin(device + 1)
}

/// What of a pack a device holds. Of a matrix that is divided it has its units, without a gap between the parts that a table chooses among.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// Where each weight and constant lies on the device; what the device has of a weight begins there.
    pub placement: Vec<Option<u64>>,
    /// Of each weight: its units on the device, of each part.
    pub units: Vec<Range<u32>>,
    /// Of each weight: where the scales of its rows lie on the device, those of all rows.
    pub row_scales: Vec<u64>,
    /// Bytes of the pack, each range with its place on the device.
    pub ranges: Vec<(Range<u64>, u64)>,
    pub bytes: u64,
}

/// Most bytes that one device of a schedule's machine holds of its pack.
pub fn held_bytes_max(schedule: &Schedule) -> u64 {
    (0..schedule.machine.devices).map(|device| held(schedule, device).bytes).max().unwrap_or(0)
}

/// What device `device` of a schedule's machine holds of its pack. The only device has the whole pack, byte for byte.
pub fn held(schedule: &Schedule, device: u32) -> Held {
    let Schedule { program, placement, machine, .. } = schedule;
    let (matrices, parts, several) = (matrices(program), parts(program), machine.devices > 1);
    let mut held = Held {
        placement: vec![None; placement.len()],
        units: vec![0..0; placement.len()],
        row_scales: vec![0; placement.len()],
        ranges: vec![],
        bytes: 0,
    };
    let is_packed = |b: &usize| matches!(program.buffers[*b].space, Space::Weight | Space::Constant);
    let mut order: Vec<usize> = (0..placement.len()).filter(|b| placement[*b].is_some()).filter(is_packed).collect();
    order.sort_by_key(|b| placement[*b]);
    for b in order {
        let (buffer, place) = (&program.buffers[b], placement[b].unwrap_or(0));
        let begin = if several { held.bytes } else { place };
        held.placement[b] = Some(begin);
        let Some(matrix) = matrices[b].filter(|_| buffer.space == Space::Weight) else {
            held.keep(begin, place..place + placed_bytes(buffer));
            continue;
        };
        let each = matrix.units / parts[b].max(1);
        let own = if buffer.home == Home::Divided { share_of(each, device, machine.devices) } else { 0..each };
        let unit = |count: u64| count * matrix.unit_bytes;
        let bytes = unit(u64::from(own.len() as u32));
        for part in 0..u64::from(parts[b].max(1)) {
            let from = place + unit(part * u64::from(each) + u64::from(own.start));
            held.keep(begin + part * bytes, from..from + bytes);
        }
        held.row_scales[b] = begin + place_align(u64::from(parts[b].max(1)) * bytes);
        if matrix.format.row_scales {
            held.keep(held.row_scales[b], place + matrix.row_scales_at()..place + matrix.bytes());
        }
        held.units[b] = own;
        held.bytes = place_align(held.bytes);
    }
    held.bytes = place_align(held.bytes);
    held
}

impl Held {
    /// Notes that `range` of the pack lies at `at`.
    fn keep(&mut self, at: u64, range: Range<u64>) {
        self.bytes = self.bytes.max(place_align(at + (range.end - range.start)));
        match self.ranges.last_mut() {
            Some((last, place)) if last.end == range.start && *place + (last.end - last.start) == at => {
                last.end = range.end
            }
            _ => self.ranges.push((range, at)),
        }
    }
}

/// For each buffer, how many parts of it a table chooses among.
fn parts(program: &Program) -> Vec<u32> {
    let mut parts = vec![1; program.buffers.len()];
    let operands = program.grids.iter().filter_map(|grid| grid.operand(Role::Weight));
    for (buffer, rows) in operands.map(|weight| (weight.buffer.index(), weight.rows)) {
        if let Rows::Lookup(table) = rows {
            parts[buffer] = program.tables.get(table.index()).map_or(1, |table| table.bound);
        }
    }
    parts
}

/// Bytes of weights that each SM streams in a step of the first regime, at most.
pub fn streamed_bytes(schedule: &Schedule) -> Vec<u64> {
    let (program, first) = (&schedule.program, schedule.regimes.first());
    let bytes = |run: &Run| {
        let grid = first.and_then(|regime| program.grids.get(regime.tasks.get(run.task.index())?.grid.index()));
        match (run.source, grid.map(|grid| (&grid.op, grid))) {
            (Source::Units { buffer: _, lo, hi }, Some((Op::MatVec(m), grid))) => {
                let units = hi.saturating_sub(lo);
                let units = schedule.units_dealt_max(grid, units).unwrap_or(units);
                u64::from(units) * m.streamed_bytes(program.format_of(grid))
            }
            _ => 0,
        }
    };
    let streams = first.map(|regime| regime.streams.as_slice()).unwrap_or_default();
    streams.iter().map(|stream| stream.iter().map(bytes).sum()).collect()
}

/// Granules of a chunk when a unit is `unit` granules of `granule` bytes: whole units if a slot holds one, else equal parts of a
/// unit that give each of `warps` warps the same number of granules. A chunk that ended inside a second unit would add
/// instructions between two exchanges.
pub fn chunk_granules(unit: u32, granule: u32, slot_bytes: u32, warps: u32) -> u32 {
    let (unit, slot, warps) = (unit.max(1), (slot_bytes / granule.max(1)).max(1), warps.max(1));
    if unit <= slot {
        return slot / unit * unit;
    }
    // The validator refuses a slot without a granule for every warp.
    let most = (slot / warps * warps).max(1);
    unit.div_ceil(unit.div_ceil(most)).next_multiple_of(warps).min(most)
}

/// Granules of a block, which no chunk crosses: one unit if it does not fit a slot, else all `units` of a task.
pub fn block_granules(unit: u32, granule: u32, slot_bytes: u32, units: u32) -> u32 {
    let unit = unit.max(1);
    if unit <= (slot_bytes / granule.max(1)).max(1) { unit.saturating_mul(units.max(1)) } else { unit }
}

/// Most rows of a step that a warp of a batch kernel multiplies: a tile of a tensor core's operand.
pub const WARP_ROWS: u32 = 16;

/// Groups of warps that divide k, in a kernel for `rows`. The warps of one group have the same k and different rows.
fn k_groups(rows: u32, warps: u32) -> u32 {
    (warps / rows.div_ceil(WARP_ROWS).max(1)).max(1)
}

/// What limits the blocks of k of a batch kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockLimits {
    /// Rows of a step.
    pub rows: u32,
    /// Lanes multiply, the input is in shared memory, and a plain weight has this many bytes. `None`: tensor cores multiply, and the
    /// input is in registers.
    pub lanes: Option<u32>,
    pub slot_bytes: u32,
    pub warps: u32,
    /// Whether the loader's registers are moved to the consumers.
    pub moved: bool,
}

impl BlockLimits {
    /// Whether a warp can hold its input of whole units of `granules` granules of codes of 4 bits, and no other block. Then each norm is computed once, and each
    /// chunk is waited for once.
    pub fn holds_whole(&self, format: Format, granules: u32) -> bool {
        if self.lanes.is_some() || format.code.bits() != 4 || self.rows > WARP_ROWS || !self.moved {
            return false;
        }
        let eights = self.rows.div_ceil(WORD_ROWS).max(1);
        let granules = granules.div_ceil(k_groups(self.rows, self.warps));
        let input = granules * format.granule_k() / 32 * 4 * eights;
        let sums = if format.takes_sums() { granules * format.granule_groups().max(1) * SUM_REGISTERS } else { 0 };
        input + sums <= WHOLE_REGISTERS[eights as usize - 1]
    }
}

impl MatVec {
    /// Granules of a block of k of a batch kernel: a chunk of the stream, and the part of its input that a warp holds at once. Blocks
    /// are equal. If there are enough granules, a block gives every group of warps along k the same number; blocks of plain weights on
    /// tensor cores are as few as possible before that, because each has a wait for its input and one for its chunk.
    pub fn block_of_k(&self, format: Format, limits: BlockLimits) -> u32 {
        let BlockLimits { rows, lanes, slot_bytes, warps, .. } = limits;
        let (unit, groups) = (self.granules(format).max(1), k_groups(rows, warps));
        let few = lanes.is_none() && format.is_plain() && rows <= WARP_ROWS;
        let held = match lanes {
            _ if few => BLOCK_PIECES / self.parts() / rows.div_ceil(WORD_ROWS).max(1) * groups,
            _ if format.is_plain() => BLOCK_GRANULES / rows.div_ceil(WARP_ROWS).max(1) / self.parts(),
            None if limits.holds_whole(format, unit) => unit,
            None => BLOCK_VALUES / rows.next_multiple_of(WORD_ROWS) / format.granule_k(),
            // As much of k as a slot would hold of plain weights.
            Some(bytes) => slot_bytes / (UNIT_ROWS * bytes) / format.granule_k(),
        };
        let slot = (slot_bytes / format.granule_bytes()).min(held).max(1);
        if unit <= slot {
            return unit;
        }
        if few {
            let equal = unit.div_ceil(unit.div_ceil(slot));
            return Some(equal.next_multiple_of(groups)).filter(|even| *even <= slot).unwrap_or(equal);
        }
        let (most, multiple) = if slot < groups { (slot, 1) } else { (slot / groups * groups, groups) };
        unit.div_ceil(unit.div_ceil(most)).next_multiple_of(multiple).min(most)
    }
}

/// Most pieces of 16 bytes of its input that a lane holds at once of a block of k, with plain weights and up to 16 rows: one of each granule
/// and part, for each 8 rows. They take 40 registers, and as many again when they become operands (docs/perf-log.md, entry 43).
const BLOCK_PIECES: u32 = 10;
/// Most granules of plain weights in a block of k, of one part, with more rows or where lanes multiply.
const BLOCK_GRANULES: u32 = 32;
/// Most input values of all rows in a block of k of codes: 32 registers of each lane of 8 warps.
pub const BLOCK_VALUES: u32 = 16 << 10;
/// Most registers of a lane for the input of whole units of codes, and its sums, of up to 8 and 16 rows. More would spill, as compiled for sm_90a.
const WHOLE_REGISTERS: [u32; 2] = [80, 104];
/// How many of these sums of the input of a group take: with 3, kernels of 16 rows in int4:32 spill.
const SUM_REGISTERS: u32 = 6;
/// Bytes of slots that hold whole units of codes of 4 bits and no more. Two threads copy chunks so long fast enough, and others have fewer slots. Longer ones, of 4096
/// columns, leave a ring too few of them: steps of 8 rows of Llama-3.1-8B take 1.03 times as long (docs/perf/batch.md, entry 63).
pub const WHOLE_SLOT_BYTES: RangeInclusive<u32> = 12 << 10..=14 << 10;

/// Cache rows of a chunk: as many tiles of the history as a slot holds.
pub fn chunk_rows(slot_bytes: u32, row_bytes: u32) -> u32 {
    slot_bytes / row_bytes.max(1) / HISTORY_ALIGN * HISTORY_ALIGN
}

/// Cache rows of a chunk of a batch kernel, whose chunks divide pages of `page_rows`: as many tiles as a slot holds.
pub fn chunk_rows_of_page(slot_bytes: u32, row_bytes: u32, page_rows: u32) -> u32 {
    let most = chunk_rows(slot_bytes, row_bytes);
    (HISTORY_ALIGN..=most)
        .rev()
        .step_by(HISTORY_ALIGN as usize)
        .find(|rows| page_rows.is_multiple_of(*rows))
        .unwrap_or(most)
}

/// Bytes of a chunk of units of `unit` bytes in a slot of `slot_bytes`, before chunks are rounded to granules for every warp.
pub fn chunk_bytes(unit: u32, slot_bytes: u32) -> u32 {
    let (unit, slot) = (unit.max(1), slot_bytes.max(1));
    if unit <= slot { slot / unit * unit } else { unit.div_ceil(unit.div_ceil(slot)) }
}

/// Bulk and 16-byte asynchronous copies take addresses and lengths in multiples of this.
pub const COPY_ALIGN_BYTES: u32 = 16;

/// Columns from one KV head to the next in a cache row: `head_dim`, rounded up to what a bulk copy can start at.
pub fn cache_pitch(head_dim: u32, dtype: DType) -> u32 {
    let bytes = dtype.bytes() as u32;
    (head_dim * bytes).next_multiple_of(COPY_ALIGN_BYTES) / bytes
}

/// Bytes of a cache row of one KV head.
pub fn cache_row_bytes(head_dim: u32, dtype: DType) -> u32 {
    cache_pitch(head_dim, dtype) * dtype.bytes() as u32
}

/// Places in arenas are multiples of this, and entries of the kernel's tables count in it: bulk copies want 16 bytes, and whole
/// cache lines cost nothing.
pub const PLACE_ALIGN_BYTES: u64 = 256;

/// Bytes of a packet: two 16-bit values or one of 32 bits, and a tag.
pub const PACKET_BYTES: u64 = 8;

/// `bytes`, rounded up to where the next place begins.
pub fn place_align(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(PLACE_ALIGN_BYTES).unwrap_or(u64::MAX)
}

/// A span of words has this many rows, and `SPAN_BYTES` of each.
pub const WORD_ROWS: u32 = 8;
pub const SPAN_BYTES: u32 = 64;

/// Bytes of one phase of words that hold `rows` rows of `cols` values of `dtype`, span by span (`kernels/rows/words.cuh`).
pub fn words_bytes(rows: u32, cols: u32, dtype: DType) -> u64 {
    let spans = (u64::from(cols) * dtype.bytes() as u64).div_ceil(u64::from(SPAN_BYTES));
    u64::from(rows.next_multiple_of(WORD_ROWS)) * spans * u64::from(SPAN_BYTES)
}

/// Bytes of a row of packets: pairs of them, since packets are read in pairs.
pub fn packet_row_bytes(b: &Buffer) -> u64 {
    u64::from(b.cols).div_ceil(4 / b.dtype.bytes() as u64).next_multiple_of(2) * PACKET_BYTES
}

/// Bytes a buffer takes where it lies, all phases. Packets are read in pairs, and every row begins with one.
pub fn placed_bytes(b: &Buffer) -> u64 {
    let rows = u64::from(b.rows);
    match b.space {
        Space::Exchange if b.words => words_bytes(b.rows, b.cols, b.dtype).saturating_mul(u64::from(b.phases)),
        Space::Exchange => packet_row_bytes(b).saturating_mul(rows).saturating_mul(u64::from(b.phases)),
        _ => rows.saturating_mul(constant_row_bytes(b)),
    }
}

/// Bytes of a row of a buffer whose rows lie one after another: of values, or of a table of codes.
pub fn constant_row_bytes(b: &Buffer) -> u64 {
    match b.coded {
        Some(format) => format.table_row(b.cols).bytes,
        None => u64::from(b.cols) * b.dtype.bytes() as u64,
    }
}

/// Places of the buffers of a program, by id: weights and constants in the arena of the pack, exchange, cache and output buffers
/// each in an arena of their own. Within an arena they lie in the order of their ids, so the places in the pack are a function of
/// the model, its formats and nothing else.
pub fn placement(program: &Program) -> Vec<Option<u64>> {
    let matrices = matrices(program);
    let mut pack = 0u64;
    let (mut exchange, mut cache, mut output) = (0u64, 0u64, 0u64);
    let place = |(b, matrix): (&Buffer, &Option<Matrix>)| {
        let (arena, bytes) = match b.space {
            Space::Weight => (&mut pack, matrix.map_or(0, |m| m.bytes())),
            Space::Constant => (&mut pack, placed_bytes(b)),
            Space::Exchange => (&mut exchange, placed_bytes(b)),
            Space::Cache | Space::State => (&mut cache, placed_bytes(b)),
            Space::Output => (&mut output, placed_bytes(b)),
            Space::Private => return None,
        };
        let at = *arena;
        *arena = place_align(at.saturating_add(bytes));
        Some(at)
    };
    program.buffers.iter().zip(&matrices).map(place).collect()
}

/// Slots that the barriers in shared memory are sized for (`state` of the shared-memory map).
pub const RING_SLOTS_MAX: u32 = 64;

/// Bytes of a queue entry in the kernel's tables.
pub const QUEUE_ENTRY_BYTES: u32 = 64;

/// Tasks of the longest queue that a block has whole in shared memory although it could copy while it works. The window of a longer one leaves
/// room for a slot of the ring or more (docs/perf-log.md, entry 55).
pub const QUEUE_WHOLE_MAX: u32 = 192;

/// Entries of a longer queue that a block has there at a time: while the tasks of one half run, the other half is copied.
pub const QUEUE_WINDOW: u32 = 64;

/// What the parts of shared memory are sized by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SmemNeeds {
    pub sms: u32,
    /// Values of the longest input that a task stages, padded to whole granules of its matrix.
    pub k_max: u32,
    pub head_dim: u32,
    pub heads_per_task: u32,
    /// Records of a query head that meet at the end of attention.
    pub records: u32,
    /// 32-bit values that a choice of experts is made with.
    pub choice: u32,
    /// Values of heads that a `mix` has at hand.
    pub mix: u32,
    /// Most units of 8 columns of the residual in one block, for all rows of the step. Scratch is sized for one row, because
    /// a task takes its rows one after another.
    pub residual_units: u32,
    pub precision: Precision,
    /// Whether tensor cores compute the dot products.
    pub tensor_cores: bool,
    pub consumer_warps: u32,
    /// Units of a matvec whose partial sums meet in one reduction.
    pub reduce_batch: u32,
    pub ring_bytes: u32,
    /// Tasks of the longest queue.
    pub queue_max: u32,
    /// Whether a block copies to shared memory while it works.
    pub copies_ahead: bool,
    /// Of a batch kernel.
    pub rows: Option<RowNeeds>,
}

/// What a batch kernel keeps in shared memory beside what one row needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowNeeds {
    /// Rows of a step, a multiple of [`WORD_ROWS`].
    pub rows: u32,
    /// Values of k of a block of the input, where lanes multiply; tensor cores hold it in registers.
    pub block_k: u32,
    /// Bytes of a row of a head in the cache.
    pub pitch_bytes: u32,
    /// Whether attention runs on tensor cores.
    pub tensor_attention: bool,
    /// Bytes of what rows have chosen, where parts are dealt: see [`dealt_bytes`].
    pub dealt_bytes: u32,
}

/// Bytes that a block of a batch kernel of `rows` rows keeps of the choices of a layer, if each row chooses `slots` of `parts`: two barriers and
/// two counts, for each part the rows that chose it, a bit each, the distinct parts, and what each row chose.
pub fn dealt_bytes(rows: u32, parts: u32, slots: u32) -> u32 {
    let (rows, masks) = (rows.next_multiple_of(WORD_ROWS), rows.div_ceil(32));
    32 + parts * masks * 4 + (rows * slots).min(parts) * 2 + rows * slots * 2
}

/// Rows of the step in a tile of attention on tensor cores.
pub const OWN_TILE: u32 = 16;

impl SmemNeeds {
    /// The parts that differ in a batch kernel: `stage`, `sums`, `heads`, `state`.
    fn of_rows(&self, n: RowNeeds) -> [u32; 4] {
        let stage = n.rows * n.block_k * 4;
        // Two batches of sums. A batch has as many units as the consumer threads have columns for.
        let batch = (self.consumer_warps * 32 / (n.rows * 4)).max(1);
        let sums = 2 * batch * k_groups(n.rows, self.consumer_warps) * n.rows * UNIT_ROWS * 4;
        let heads = if n.tensor_attention {
            self.heads_per_task * self.head_dim * 2 + 2 * n.rows.next_multiple_of(OWN_TILE) * n.pitch_bytes
        } else {
            (self.heads_per_task + 2 * n.rows) * self.head_dim * 4
        };
        let heads = heads.max(self.mix * 4);
        // Which rows take part, their tokens, two statistics and the best logit of each warp.
        let state = RING_SLOTS_MAX * 16 + self.consumer_warps * 64 + 512;
        [stage, sums, heads, state + 16 + n.rows * 4 + self.consumer_warps * n.rows * 24 + n.dealt_bytes]
    }
}

/// The shared-memory map in address order. The running task uses `stage`, `reduce` and `heads` as scratch, and the next task
/// reuses them after the block barrier between tasks; `residual` and `state` live as long as the launch.
pub fn smem_map(n: &SmemNeeds) -> Vec<SmemPart> {
    // The staged input: bf16 where tensor cores read it, fp32 otherwise. A granule reads 64 bytes of bf16 k at a time.
    let stage_bytes = match n.precision.weights {
        DType::Bf16 if n.tensor_cores => n.k_max.next_multiple_of(32) * 2,
        _ => n.k_max.next_multiple_of(32) * 4,
    };
    // Two batches of partial sums, so that a warp may start the next batch while others still add up this one. Attention
    // stages nothing, so both places hold its records (maximum, sum, accumulators): one for each team of warps and one for the
    // current position; in a merge, one for each warp.
    let sums = 2 * n.reduce_batch * n.consumer_warps * UNIT_ROWS * 4;
    let attention = n.records * n.heads_per_task * (n.head_dim + PARTIAL_HEADER) * 4;
    // For sampling: the best logit of each SM, seven sums of each warp, and a list of ids, of which few are enough.
    let sampling = n.sms * 4 + n.consumer_warps * 56 + 64;
    let merge = n.consumer_warps * (n.head_dim + PARTIAL_HEADER) * 4;
    let scratch = attention.max(merge).max(sampling).max(n.choice * 4);
    // q of a task, k, v, in fp32, and q once more as the tensor cores take it.
    let heads = (n.heads_per_task + 2) * n.head_dim * 4 + n.heads_per_task * n.head_dim.next_multiple_of(32) * 2;
    let heads = heads.max(n.mix * 4);
    // Ring barriers; what each warp carries from task to task, and its statistics; token, watchdog.
    let state = RING_SLOTS_MAX * 16 + n.consumer_warps * 64 + 512;
    let [stage_bytes, sums, heads, state] = n.rows.map_or([stage_bytes, sums, heads, state], |rows| n.of_rows(rows));
    let windowed = n.copies_ahead && n.queue_max > QUEUE_WHOLE_MAX;
    let entries = if windowed { QUEUE_WINDOW } else { n.queue_max };
    let parts = [
        (SmemKind::Ring, n.ring_bytes),
        (SmemKind::Stage, stage_bytes),
        (SmemKind::Reduce, sums.max(scratch.saturating_sub(stage_bytes.next_multiple_of(128)))),
        (SmemKind::Heads, heads),
        (SmemKind::Residual, n.residual_units * UNIT_ROWS * 4),
        // The queue of this SM, copied once for each launch, and where the regime changes; or a window of it.
        (SmemKind::Queue, entries.saturating_mul(QUEUE_ENTRY_BYTES)),
        (SmemKind::State, state),
    ];
    let mut offset = 0u32;
    parts
        .into_iter()
        .map(|(kind, bytes)| {
            let part = SmemPart { kind, offset, bytes: bytes.next_multiple_of(128) };
            offset += part.bytes;
            part
        })
        .collect()
}
