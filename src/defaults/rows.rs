//! Owns the batch kernel that is built without a search: its candidate, and the pages of its caches.

use super::even_sms;
use crate::candidate::{Candidate, Infeasible};
use crate::dtype::Precision;
use crate::format::Format;
use crate::ir::layout::{
    BLOCK_VALUES, BlockLimits, GRANULE_BYTES, RING_SLOTS_MAX, WARP_ROWS, WHOLE_SLOT_BYTES, WORD_ROWS, cache_row_bytes,
    chunk_rows,
};
use crate::ir::op::{HISTORY_ALIGN, UNIT_ROWS};
use crate::ir::schedule::Schedule;
use crate::ir::variant::{REDUCE_BATCH, lanes_of_rows, rows_on_tensor_cores};
use crate::lower::{Batch, format_of, heads_per_task_most, lower_batch};
use crate::model::graph::{Attention, Layer, Linear, ModelGraph};
use crate::schedule::{chunk_copiers, registers_move, schedule};
use crate::target::{DotMechanism, Target, TargetKind};

/// Most rows of the kernel that reads prompts, and positions of a prompt chunk: 64 are not faster (docs/perf-log.md, entry 21).
pub const PROMPT_ROWS: u32 = 32;

/// Rows of the steps that every model has on a CUDA target, ascending. [`kernel_rows`] does not say which kernels run them.
pub const STEP_ROWS: [u32; 5] = [8, 16, 32, 64, 128];

/// How many of [`STEP_ROWS`] are those of a batch kernel of several devices.
pub const ROWS_TOGETHER: usize = 2;

/// Rows of the kernels whose tasks wait for words, of a model on a target; ascending. More than 16 need tensor cores, whose warps share the
/// rows, and plain weights; some may not fit a target's shared memory. None has 128 rows; of several devices as many as [`ROWS_TOGETHER`] says.
pub fn kernel_rows(graph: &ModelGraph, precision: Precision, target: &Target) -> &'static [u32] {
    match is_plain(graph, precision) && rows_on_tensor_cores(precision, target.spec.dot == DotMechanism::Mma) {
        true if target.devices == 1 => &STEP_ROWS[..4],
        _ => &STEP_ROWS[..ROWS_TOGETHER],
    }
}

/// Bytes of a slot; the first that fits counts: a block of k of a unit of plain weights, or a part of one on GPUs with little shared memory.
const SLOT_BYTES: [u32; 3] = [16 << 10, 8 << 10, 4 << 10];
/// Most bytes of a slot that holds a longer block of k of plain weights, of steps of up to 16 rows (docs/perf-log.md, entry 43).
const WIDE_SLOT_BYTES: u32 = 20 << 10;
/// Slots of a ring with slots of [`SLOT_BYTES`]`[0]`; with others, as many bytes.
const RING_SLOTS: u32 = 12;

/// Copies in flight of a batch kernel, in slots of [`SLOT_BYTES`]`[0]`: most while at least `free` slots are free, and otherwise.
struct Flight {
    high: u32,
    low: u32,
    free: u32,
}
/// Few, because the input of rows comes through the same L2 as their weights (docs/perf-log.md, entry 17).
const FLIGHT: Flight = Flight { high: 3, low: 2, free: 4 };
/// Those of steps of up to 16 rows if an SM has at least [`LONG_LAYER_BYTES`] of a layer: it waits for inputs for a smaller part of the time
/// (docs/perf-log.md, entry 38). With codes nothing was measured.
const FLIGHT_OF_LONG_LAYERS: Flight = Flight { high: 5, low: 3, free: 4 };
/// Those of mixtures: most chunks are of experts, and a unit of `down` is short (docs/perf/wave.md, entry 52).
const FLIGHT_OF_EXPERTS: Flight = Flight { high: 8, low: 8, free: 4 };
/// Between Llama-3.2-1B with 0.9 MiB, which loses 1 % with more copies in flight, and Qwen3-4B with 1.4 MiB, which gains as much.
const LONG_LAYER_BYTES: u64 = 1200 << 10;

/// Fewest slots of a ring; with fewer a kernel does not fit.
const RING_SLOTS_MIN: u32 = 4;

/// How many sequences and positions a batch kernel has memory for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    pub rows: u32,
    pub sequences: u32,
    /// Positions of all sequences together.
    pub positions: u64,
}

/// The formats of a model's matrices, and their columns.
fn formats(graph: &ModelGraph, precision: Precision) -> impl Iterator<Item = (Format, u32)> {
    let linears = graph.layers.iter().flat_map(Layer::linears).chain([&graph.head]);
    linears.map(move |linear| (format_of(graph, &[linear], precision), linear.cols))
}

/// Whether all matrices have plain weights.
fn is_plain(graph: &ModelGraph, precision: Precision) -> bool {
    formats(graph, precision).all(|(format, _)| format.is_plain())
}

impl Flight {
    /// That of a kernel for `rows` on this number of SMs.
    fn of(graph: &ModelGraph, precision: Precision, rows: u32, sms: u32) -> Flight {
        let bytes =
            |linear: &Linear| u64::from(linear.rows) * u64::from(linear.cols) * precision.weights.bytes() as u64;
        let longest = graph.layers.iter().map(|layer| layer.linears().map(bytes).sum::<u64>()).max().unwrap_or(0);
        let is_long = longest / u64::from(sms.max(1)) >= LONG_LAYER_BYTES;
        match rows <= WARP_ROWS {
            true if graph.has_experts() => FLIGHT_OF_EXPERTS,
            true if is_long && is_plain(graph, precision) => FLIGHT_OF_LONG_LAYERS,
            _ => FLIGHT,
        }
    }
}

/// The ring of a batch kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Slots {
    /// Bytes of a slot, the first that fits.
    bytes: Vec<u32>,
    /// Those of kernels for any number of rows.
    all: Vec<u32>,
    /// Bytes of most chunks where slots have the first size.
    chunk: u32,
    is_plain: bool,
}

impl Slots {
    /// Slots hold a block of k of 8 rows of the matrices that are codes, or are as those of bf16 where there are none. At 16 rows blocks
    /// are half as long; slots are not, because short chunks of the history would cost more. Blocks of more rows are shorter, too, and
    /// tiles of a wide head may want more than 4 KiB.
    fn of(graph: &ModelGraph, precision: Precision, target: &Target, rows: u32, warps: u32) -> Slots {
        let coded: Vec<_> = formats(graph, precision).filter(|(format, _)| !format.is_plain()).collect();
        let granules = |format: Format, k: u32, rows: u32| k.min(BLOCK_VALUES / rows).div_ceil(format.granule_k());
        let Some(granule) = coded.iter().map(|(format, _)| format.granule_bytes()).max() else {
            let [large, middle, small] = SLOT_BYTES;
            let bytes = match rows.div_ceil(WARP_ROWS) {
                0 | 1 => wide_slot(graph, precision, target).into_iter().chain([large, middle, small]).collect(),
                2 => vec![middle, small],
                _ => vec![small, middle],
            };
            return Slots { chunk: bytes[0], bytes, all: SLOT_BYTES.to_vec(), is_plain: true };
        };
        // Bytes of the longest whole unit that a warp holds the input of.
        let whole = |rows: u32| {
            let (slot_bytes, moved) = (*WHOLE_SLOT_BYTES.end(), registers_move(target, warps));
            let lanes = lanes_of_rows(precision, target.spec.dot == DotMechanism::Mma);
            let limits = BlockLimits { rows, lanes, slot_bytes, warps, moved };
            let bytes = |&(format, k): &(Format, u32)| {
                let granules = k.div_ceil(format.granule_k());
                limits.holds_whole(format, granules).then(|| granules * format.granule_bytes())
            };
            coded.iter().filter_map(bytes).filter(|bytes| *bytes <= slot_bytes).max().unwrap_or(0)
        };
        let most = |rows: u32| coded.iter().map(|&(format, k)| granules(format, k, rows)).max().unwrap_or(1);
        // A power of two of codes, and their scales: pages become powers of two, which divide the usual contexts.
        let codes = (most(WORD_ROWS) * GRANULE_BYTES).next_power_of_two();
        // The least is what every ring has: a granule without scales for each warp.
        let bytes = |part: u32| {
            let block = (codes / part / GRANULE_BYTES * granule).max(GRANULE_BYTES * warps);
            block.next_multiple_of(GRANULE_BYTES)
        };
        let parts = [1, 2, 4].map(bytes);
        // Slots that hold them, where those of blocks do not.
        let wide = |rows: u32| Some(whole(rows).next_multiple_of(GRANULE_BYTES)).filter(|bytes| *bytes > parts[0]);
        let all = [WORD_ROWS, WARP_ROWS].into_iter().filter_map(wide).chain(parts).collect();
        let rows = rows.next_multiple_of(WORD_ROWS);
        let bytes = wide(rows).into_iter().chain(parts).collect();
        Slots { all, bytes, chunk: whole(rows).max(most(rows) * granule), is_plain: false }
    }

    /// How many of these chunks are as many bytes as `n` chunks of 16 KiB.
    fn chunks(&self, n: u32) -> u32 {
        let bytes = n * SLOT_BYTES[0];
        if self.is_plain { bytes.div_ceil(self.chunk) } else { (bytes / self.chunk.max(1)).max(n) }
    }

    /// How many of these slots are as many bytes as `n` slots of 16 KiB.
    fn slots(&self, n: u32) -> u32 {
        let slots = n * SLOT_BYTES[0] / self.bytes[0].max(1);
        if self.is_plain { slots } else { slots.max(n) }
    }
}

/// Bytes of a slot for a block of k of units of the model's width, if that saves a block: the thread that copies takes 0.4 us for a chunk of
/// any size, so 9 or 12 KiB at a time are slower than memory. 1152 columns are one block of 18 KiB instead of two, and 2560 are two of 20
/// instead of three.
fn wide_slot(graph: &ModelGraph, precision: Precision, target: &Target) -> Option<u32> {
    if !rows_on_tensor_cores(precision, target.spec.dot == DotMechanism::Mma) {
        return None;
    }
    let granules = graph.hidden.div_ceil(Format::plain(precision.weights).granule_k()).max(1);
    let blocks = |slot: u32| granules.div_ceil(slot / GRANULE_BYTES);
    let blocks_of_wide = blocks(WIDE_SLOT_BYTES);
    (blocks_of_wide < blocks(SLOT_BYTES[0])).then(|| granules.div_ceil(blocks_of_wide) * GRANULE_BYTES)
}

/// The candidate of a batch kernel, from that of the decode kernel. Same tiling; KV splits and replicated sums off. A chunk is a block
/// of k, so slots are no larger. A task takes all query heads of a KV head, because there are enough tasks.
fn candidate(
    base: &Candidate,
    graph: &ModelGraph,
    slots: &Slots,
    flight: &Flight,
    slot_bytes: u32,
    ring_slots: u32,
) -> Candidate {
    let group = graph.layers.iter().filter_map(Layer::history).map(|a| a.heads / a.kv_heads.max(1)).min().unwrap_or(1);
    Candidate {
        splits: 1,
        sums_everywhere: 0,
        sum_units: REDUCE_BATCH,
        heads_per_task: heads_per_task_most(group),
        slot_bytes,
        ring_slots,
        flight_high: slots.chunks(flight.high).min(ring_slots),
        flight_low: slots.chunks(flight.low).min(ring_slots),
        flight_free: slots.slots(flight.free).min(ring_slots),
        ..base.clone()
    }
}

/// Bytes of the longest row of a head in the cache; `None`: no layer has attention.
fn row_bytes_max(graph: &ModelGraph, precision: Precision) -> Option<u32> {
    let attentions = graph.layers.iter().filter_map(Layer::history);
    attentions.map(|attention| cache_row_bytes(attention.head_dim, precision.cache)).max()
}

/// Positions of a page: about one chunk of the history with the largest of `sizes` as a slot. A power of two, so that pages divide the usual
/// contexts, and kernels with slots of any of `sizes` share them. `None`: no slot holds a tile.
fn page_rows(graph: &ModelGraph, precision: Precision, sizes: &[u32]) -> Option<u32> {
    let row_bytes = |attention: &Attention| cache_row_bytes(attention.head_dim, precision.cache);
    let attentions = graph.layers.iter().filter_map(Layer::history);
    let chunks = attentions.flat_map(|a| sizes.iter().map(move |slot| chunk_rows(*slot, row_bytes(a))));
    chunks.filter_map(u32::checked_ilog2).max().map(|log2| 1 << log2)
}

/// `positions` of one sequence in whole pages of the batch kernels: sequences share no page.
pub fn whole_pages(
    graph: &ModelGraph,
    precision: Precision,
    target: &Target,
    candidate: &Candidate,
    positions: u32,
) -> u64 {
    let slots = Slots::of(graph, precision, target, WORD_ROWS, candidate.consumer_warps);
    u64::from(positions).next_multiple_of(page_rows(graph, precision, &slots.all).unwrap_or(1).into())
}

/// Lowers and places the decode kernel over the pages of the kernels for `room`, whose rows do not matter. `candidate` is that of one
/// row, and its steps are those of the kernel that has one sequence's cache.
///
/// # Errors
/// What does not fit the target.
pub fn place_one_row(
    graph: &ModelGraph,
    name: &str,
    precision: Precision,
    context_max: u32,
    target: &Target,
    candidate: &Candidate,
    room: Room,
) -> Result<Schedule, Infeasible> {
    let slots = Slots::of(graph, precision, target, WORD_ROWS, candidate.consumer_warps);
    let Some(page_rows) = page_rows(graph, precision, &slots.all) else {
        let row_bytes = row_bytes_max(graph, precision);
        let (slot_bytes, row_bytes) = (slots.bytes[0], row_bytes.unwrap_or(0));
        return Err(Infeasible::HistoryChunk { slot_bytes, rows: HISTORY_ALIGN, row_bytes });
    };
    let batch = Batch { words: false, ..batch(Room { rows: 1, ..room }, page_rows, target) };
    schedule(lower_batch(graph, name, precision, context_max, &batch, candidate)?, target, candidate)
}

/// The steps and the pages of a kernel for `room`.
fn batch(room: Room, page_rows: u32, target: &Target) -> Batch {
    let Room { rows, sequences, positions } = room;
    let pages = positions.div_ceil(u64::from(page_rows)).min(u64::from(u32::MAX)) as u32;
    Batch { rows, sequences, pages: pages.max(sequences), page_rows, words: target.kind == TargetKind::Cuda }
}

/// Lowers and places the kernel for `room`, with as many slots as fit beside what rows need. `base` is the candidate of one row; a kernel for
/// rows takes from it what fits, and else the default, with the units that the pack has.
///
/// # Errors
/// What does not fit the target.
pub fn place_rows(
    graph: &ModelGraph,
    name: &str,
    precision: Precision,
    context_max: u32,
    target: &Target,
    base: &Candidate,
    room: Room,
) -> Result<Schedule, Infeasible> {
    let model = Model { graph, name, precision, context_max, target };
    let refused = match model.rows(base, room, RING_SLOTS_MIN, &[]) {
        Err(reason) => reason,
        placed => return placed,
    };
    let default = || Candidate { unit_rows: base.unit_rows, ..Candidate::default_for(graph, target, precision) };
    let default = Some(default()).filter(|default| default != base);
    if let Some(Ok(placed)) = default.as_ref().map(|default| model.rows(default, room, RING_SLOTS_MIN, &[])) {
        return Ok(placed);
    }
    // Steps of more rows run in several launches of a kernel for fewer, which loses less than fewer warps do.
    if room.rows > WORD_ROWS || target.kind == TargetKind::Cpu {
        return Err(refused);
    }
    // What warps add up takes most of the shared memory of steps of few rows.
    let row_bytes = model.cache_row_bytes();
    let least = (HISTORY_ALIGN * row_bytes).next_multiple_of(GRANULE_BYTES);
    let base = default.unwrap_or_else(|| base.clone());
    for consumer_warps in [8, 4, 2, 1].into_iter().filter(|warps| *warps <= base.consumer_warps) {
        let base = Candidate { consumer_warps, ..base.clone() };
        if let Ok(placed) = model.rows(&base, room, 2, &[least]) {
            return Ok(placed);
        }
    }
    Err(refused)
}

/// A model that is placed for several rows.
struct Model<'a> {
    graph: &'a ModelGraph,
    name: &'a str,
    precision: Precision,
    context_max: u32,
    target: &'a Target,
}

impl Model<'_> {
    /// Bytes of the longest row of a head in the cache.
    fn cache_row_bytes(&self) -> u32 {
        row_bytes_max(self.graph, self.precision).unwrap_or(0)
    }

    /// The kernel for `room` from this candidate of one row, with at least `slots_min` slots. `sizes`: more sizes of slots to try, bytes.
    fn rows(&self, base: &Candidate, room: Room, slots_min: u32, sizes: &[u32]) -> Result<Schedule, Infeasible> {
        let Model { graph, name, precision, context_max, target } = *self;
        let row_bytes = self.cache_row_bytes();
        // Kernels for one row have no gain from equal shares in halves of units (docs/perf-log.md, entry 42), so `base` may have more SMs.
        let sms = match target.kind {
            TargetKind::Cpu => base.sms,
            TargetKind::Cuda => even_sms(graph, base.sms, &[UNIT_ROWS, UNIT_ROWS / 2]),
        };
        let base = &Candidate { sms, ..base.clone() };
        let slots = Slots::of(graph, precision, target, room.rows, base.consumer_warps);
        let flight = Flight::of(graph, precision, room.rows, base.sms);
        let has_codes = !is_plain(graph, precision);
        let mut refused = Infeasible::HistoryChunk { slot_bytes: slots.bytes[0], rows: HISTORY_ALIGN, row_bytes };
        let Some(page_rows) = page_rows(graph, precision, &slots.all) else { return Err(refused) };
        let batch = batch(room, page_rows, target);
        let holds_tiles = |slot: &&u32| chunk_rows(**slot, row_bytes) > 0;
        for &slot_bytes in slots.bytes.iter().chain(sizes).filter(holds_tiles) {
            let ring = RingSizes {
                slot_bytes,
                most: slots.slots(RING_SLOTS).min(RING_SLOTS_MAX),
                least: slots_min,
                // Threads that copy chunks in turn own slots.
                multiple: chunk_copiers(
                    target,
                    base.consumer_warps,
                    room.rows,
                    slot_bytes,
                    has_codes,
                    graph.has_experts(),
                ),
            };
            let placed = ring.most_that_fit(|ring_slots| {
                let candidate = candidate(base, graph, &slots, &flight, slot_bytes, ring_slots);
                schedule(lower_batch(graph, name, precision, context_max, &batch, &candidate)?, target, &candidate)
            });
            match placed {
                Err(reason @ Infeasible::SharedMemory { .. }) => refused = reason,
                placed => return placed,
            }
        }
        Err(refused)
    }
}

/// The candidate of steps of several rows on a CPU, from that of one row: with fewer or smaller slots of the ring where more rows need the
/// room, and with the default's other knobs where those of `base` do not fit. Histories have no KV splits: splits depend on how a prompt
/// was cut, and a row must have the bits that it has alone.
///
/// # Errors
/// What does not fit the target.
pub fn cpu_candidate(
    graph: &ModelGraph,
    precision: Precision,
    context_max: u32,
    target: &Target,
    base: &Candidate,
    batch: &Batch,
) -> Result<Candidate, Infeasible> {
    let row_bytes = row_bytes_max(graph, precision);
    let holds_tiles = |slot_bytes: u32| chunk_rows(slot_bytes, row_bytes.unwrap_or(0)) > 0;
    let fitting = |base: &Candidate| {
        let of_slots = |slot_bytes: u32| {
            let ring = RingSizes { slot_bytes, most: base.ring_slots, least: 2, multiple: 1 };
            ring.most_that_fit(|slots| {
                let candidate = Candidate { splits: 1, slot_bytes, ..base.clone() };
                let candidate = if slots < base.ring_slots { candidate.with_ring(slots) } else { candidate };
                schedule(lower_batch(graph, "steps", precision, context_max, batch, &candidate)?, target, &candidate)?;
                Ok(candidate)
            })
        };
        of_slots(base.slot_bytes).or_else(|refused| {
            let smaller = SLOT_BYTES.into_iter().filter(|slot| *slot < base.slot_bytes && holds_tiles(*slot));
            smaller.map(of_slots).find_map(Result::ok).ok_or(refused)
        })
    };
    fitting(base).or_else(|refused| {
        let default = Candidate { unit_rows: base.unit_rows, ..Candidate::default_for(graph, target, precision) };
        fitting(&default).map_err(|_| refused)
    })
}

/// Numbers of slots that a ring may have.
struct RingSizes {
    slot_bytes: u32,
    most: u32,
    least: u32,
    /// Every number is a multiple of this.
    multiple: u32,
}

impl RingSizes {
    /// What `place` makes with the most slots that fit. Each slot fewer takes `slot_bytes` less, so a plan that is too large says how many
    /// are too many.
    fn most_that_fit<T>(&self, mut place: impl FnMut(u32) -> Result<T, Infeasible>) -> Result<T, Infeasible> {
        let RingSizes { slot_bytes, most, least, multiple } = *self;
        let multiple = multiple.max(1);
        let mut slots = most / multiple * multiple;
        loop {
            match place(slots) {
                Err(Infeasible::SharedMemory { bytes, most, .. }) if slots >= least + multiple => {
                    let over = bytes.saturating_sub(most.into()).div_ceil(u64::from(slot_bytes.max(1)));
                    let fewer = (over.clamp(1, u64::from(slots)) as u32).next_multiple_of(multiple);
                    slots = slots.saturating_sub(fewer).max(least.next_multiple_of(multiple));
                }
                placed => return placed,
            }
        }
    }
}
