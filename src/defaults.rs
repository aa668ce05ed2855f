//! Owns the default candidate: what an engineer who has read the measurements picks without measuring.
//!
//! Every threshold here stands for a measurement in docs/perf-log.md. Nothing below depends on them: lowering and scheduling
//! take a candidate as it is, and a search starts from this one.

pub mod rows;

use crate::candidate::{Candidate, Infeasible, WaveKnobs};
use crate::dtype::Precision;
use crate::format::Format;
use crate::ir::layout::{
    GRANULE_BYTES, QUEUE_ENTRY_BYTES, QUEUE_WHOLE_MAX, SmemNeeds, cache_row_bytes, chunk_bytes, smem_map, unit_bytes,
};
use crate::ir::op::{Attention, HISTORY_ALIGN, PARTIAL_HEADER, UNIT_ROWS};
use crate::ir::schedule::{Mechanism, Schedule};
use crate::ir::variant::{
    AttentionVariant, LANES, POLL_BATCH, REDUCE_BATCH, longer_sums_bytes, prefetch_v_rule, units_held, warp_pairs,
    warps_per_head_rule,
};
use crate::lower::{
    HEADS_PER_TASK_MAX, attention_of, finest_unit_rows, format_of, heads_per_task_most, lower, refuses_everywhere,
};
use crate::model::graph::{self, Experts, Layer, Linear, Mixer, Mlp, ModelGraph};
use crate::schedule::schedule;
use crate::target::{CopyMechanism, DotMechanism, Target, TargetKind};

/// With more KV splits than this the merge would take longer than the reads that they save.
pub const SPLITS_DEFAULT_MAX: u32 = 32;

impl Candidate {
    /// What an engineer who has read the measurements would pick without measuring: all SMs that get work, eight
    /// consumer warps, a ring as large as shared memory allows, few copies in flight near a hop. If that does not fit the target: a smaller
    /// ring, or fewer warps, which share less scratch.
    pub fn default_for(graph: &ModelGraph, target: &Target, precision: Precision) -> Candidate {
        let cpu = target.kind == TargetKind::Cpu;
        // A block without a unit of the head would release nothing at the end of a step.
        let sms = target.sms().min(graph.vocab.div_ceil(UNIT_ROWS)).max(1);
        let sms = if cpu { sms } else { even_sms(graph, sms, &[UNIT_ROWS]) };
        // Devices have equal numbers of SMs.
        let sms = (sms / target.devices * target.devices).max(target.devices);
        let sized = |warps: u32, fixed: u64| Candidate::beside(graph, target, precision, (sms, warps), fixed);
        // Eight warps have 168 registers each and half the barrier and instruction traffic of sixteen, and still take chunks
        // faster than memory brings them (docs/perf-log.md).
        let warps = if cpu { 1 } else { 8 };
        let wanted = sized(warps, smem_bytes(&fixed_needs(graph, target, precision, warps, sms)));
        if surely_fits(graph, target, precision, &wanted) || fits(graph, target, precision, &wanted) {
            return wanted;
        }
        let fitting = |warps: u32| {
            // The smallest ring says how much a block needs beside it.
            let slot_bytes = least_slot_bytes(graph, precision, warps);
            let (hold_up, poll_pairs, sum_units) = (0, POLL_BATCH, REDUCE_BATCH);
            let smallest = Candidate { hold_up, poll_pairs, sum_units, slot_bytes, ..sized(warps, 0) }.with_ring(2);
            let fixed = placed_smem_bytes(graph, target, precision, &smallest)?.saturating_sub(smallest.ring_bytes());
            Some(sized(warps, fixed)).filter(|candidate| fits(graph, target, precision, candidate))
        };
        [8, 4, 2, 1].into_iter().filter(|fewer| *fewer <= warps).find_map(fitting).unwrap_or(wanted)
    }

    /// The default on these SMs with these warps, where a block needs `fixed` bytes of shared memory beside its ring.
    fn beside(
        graph: &ModelGraph,
        target: &Target,
        precision: Precision,
        (sms, consumer_warps): (u32, u32),
        fixed: u64,
    ) -> Candidate {
        let attention = graph.layers.iter().find_map(Layer::history);
        let (heads, kv_heads, head_dim) = attention.map_or((1, 1, 0), |a| (a.heads, a.kv_heads, a.head_dim));
        let group_most = heads_per_task_most(heads / kv_heads);
        let cpu = target.kind == TargetKind::Cpu;
        let room = u64::from(target.spec.smem_bytes_per_block_max).saturating_sub(fixed);
        // Smaller slots where shared memory is scarce, down to a chunk of the history, so that two have room.
        let least = least_slot_bytes(graph, precision, consumer_warps);
        let fits = |bytes: &u32| *bytes >= least && room / u64::from(*bytes) >= 2;
        let wanted = default_slot_bytes(graph, precision, sms, room);
        // Measured with bulk copies alone.
        let is_bulk = target.spec.copy == CopyMechanism::Bulk;
        let held = if is_bulk { slot_of_held(graph, precision, consumer_warps, room) } else { None };
        let sum_units = if held.is_some() { SUMS_OF_HELD } else { REDUCE_BATCH };
        let slot_bytes = held.or_else(|| [wanted, 8192, 4096, least].into_iter().find(fits)).unwrap_or(wanted);
        let room = room - longer_sums_bytes(sum_units, consumer_warps);
        let ring_slots = (room / u64::from(slot_bytes)).clamp(2, 12) as u32;
        let flight = Flight::for_layer(graph, precision, sms, slot_bytes, ring_slots);
        Candidate {
            sms,
            consumer_warps,
            ring_slots,
            slot_bytes,
            flight_high: flight.high,
            flight_low: flight.low,
            flight_free: flight.free,
            heads_per_task: if cpu { group_most } else { 1 },
            splits: if cpu { 1 } else { default_splits(heads / group_most, sms, head_dim) },
            split_from: 384,
            mechanism: if target.spec.copy == CopyMechanism::Plain && cpu && target.devices == 1 {
                Mechanism::Counter
            } else {
                Mechanism::Packets
            },
            light_eighth: 0,
            // By how much the slowest SMs of an H200 are below the mean.
            light_percent: 5,
            sum_units,
            poll_pairs: if cpu { POLL_BATCH } else { default_poll_pairs(graph, precision, consumer_warps) },
            hold_qkv: 0,
            hold_o: 0,
            hold_up: if cpu { 0 } else { default_hold_up(graph, precision, consumer_warps, sms, slot_bytes) },
            hold_down: 0,
            hold_head: 0,
            attention_team: warps_per_head_rule(head_dim),
            attention_ahead: u32::from(prefetch_v_rule(head_dim)),
            unit_rows: if cpu { UNIT_ROWS } else { default_unit_rows(graph, precision) },
            // A hop less for each sum (docs/perf-log.md).
            sums_everywhere: u32::from(!cpu && refuses_everywhere(graph, precision, consumer_warps).is_none()),
            waves: WaveKnobs::default(),
        }
    }

    /// Bytes of the ring.
    fn ring_bytes(&self) -> u64 {
        u64::from(self.ring_slots) * u64::from(self.slot_bytes)
    }

    /// The same with a ring of `slots` slots: no more copies in flight, and no more free slots asked for, than it has.
    fn with_ring(self, slots: u32) -> Candidate {
        let flight_high = self.flight_high.min(slots);
        let (flight_low, flight_free) = (self.flight_low.min(flight_high), self.flight_free.min(slots));
        Candidate { ring_slots: slots, flight_high, flight_low, flight_free, ..self }
    }

    /// The same for contexts of at most `context_max` positions: no more KV splits than pay for their merge.
    pub fn for_context(self, context_max: u32) -> Candidate {
        // A share of fewer positions is read in the time that another share takes to merge (docs/perf-log.md).
        const SHARE_LEAST: u32 = 128;
        Candidate { splits: self.splits.min((context_max / SHARE_LEAST).max(1)), ..self }
    }
}

/// KV splits that occupy every SM, if `groups` tasks would read the whole history. Capped by what a merge is worth, and by the size of
/// the records: that of 32 splits of heads of 128 dimensions.
pub fn default_splits(groups: u32, sms: u32, head_dim: u32) -> u32 {
    const RECORDS: u32 = SPLITS_DEFAULT_MAX * (128 + PARTIAL_HEADER);
    let most = (RECORDS / (head_dim + PARTIAL_HEADER)).clamp(1, SPLITS_DEFAULT_MAX);
    (sms / groups.max(1)).clamp(1, most)
}

/// 16 KiB. If units of the model's width would waste a third of such a slot or not fit it, 32 KiB, or the whole units in 32 KiB if
/// they would waste a third of that; both only if a unit fits 32 KiB and five such slots have room. A unit in one chunk has no wait
/// inside, and a ring runs ahead by what is in its slots. Two units, if one does not fill 16 KiB and a layer streams for about as long as its
/// hops take (docs/perf-log.md, entries 13 and 42).
fn default_slot_bytes(graph: &ModelGraph, precision: Precision, sms: u32, room: u64) -> u32 {
    const SLOT: u32 = 16384;
    let unit = width_unit_bytes(graph, precision);
    // Granules of codes are longer than those of plain weights, and slots are whole granules of plain weights.
    let whole = |bytes: u32| bytes.next_multiple_of(GRANULE_BYTES);
    if unit < SLOT && BALANCED.contains(&layer_bytes(graph, precision, sms)) && room >= 5 * u64::from(2 * unit) {
        return whole(2 * unit);
    }
    let units_in = |slot: u32| slot / unit * unit;
    let wastes = |slot: u32| units_in(slot) < slot / 3 * 2;
    if !wastes(SLOT) || unit > 2 * SLOT || room < 5 * u64::from(2 * SLOT) {
        return SLOT;
    }
    if wastes(2 * SLOT) { whole(units_in(2 * SLOT)) } else { 2 * SLOT }
}

/// Units of a batch of sums where a slot holds what a warp holds.
const SUMS_OF_HELD: u32 = 2 * REDUCE_BATCH;

/// With codes of 4 bits: a slot for those units of the model's width that a warp holds at once. So a warp waits for one chunk at a time, and the
/// compiler knows where each unit lies in it. Batches of sums are twice as long: half of the barriers of a long task (docs/perf/decode.md, entry 60).
/// `None`: other weights, or too little room for four such slots and the sums.
fn slot_of_held(graph: &ModelGraph, precision: Precision, warps: u32, room: u64) -> Option<u32> {
    let format = up_format(graph, precision);
    let granules = graph.hidden.div_ceil(format.granule_k()).max(1);
    let units = units_held(format, granules.div_ceil(warps), SUMS_OF_HELD);
    let slot = (units * granules * format.granule_bytes()).next_multiple_of(GRANULE_BYTES);
    let needed = 4 * u64::from(slot) + longer_sums_bytes(SUMS_OF_HELD, warps);
    let is_enough = slot >= least_slot_bytes(graph, precision, warps);
    (format.code.bits() == 4 && is_enough && room >= needed).then_some(slot)
}

/// The format of up, and of the gate where there is one: most of the bytes of a layer.
fn up_format(graph: &ModelGraph, precision: Precision) -> Format {
    let plain = Format::plain(precision.weights);
    graph.layers.first().and_then(|layer| layer.feed.mlps().next()).map_or(plain, |mlp| {
        let linears: Vec<_> = mlp.gate.iter().chain([&mlp.up]).collect();
        format_of(graph, &linears, precision)
    })
}

/// Bytes of a unit of the model's width, in the format of up.
fn width_unit_bytes(graph: &ModelGraph, precision: Precision) -> u32 {
    let format = up_format(graph, precision);
    graph.hidden.div_ceil(format.granule_k()).max(1) * format.granule_bytes()
}

/// Rows of the smallest units. Wave kernels multiply units of eight rows by warpgroups, and if a matrix of a prompt has others they multiply all by
/// warps. With Mamba-2 all units have eight rows: of Granite-4.0-H-1B, SMs then share the inputs of a layer less evenly by a thirteenth, which
/// is at most a fortieth of the bytes of a step.
fn default_unit_rows(graph: &ModelGraph, precision: Precision) -> u32 {
    let scans = |layer: &Layer| matches!(layer.mixer, Mixer::Mamba2(_) | Mixer::SideBySide(_));
    if graph.layers.iter().any(scans) { UNIT_ROWS } else { finest_unit_rows(graph, precision, 4) }
}

/// Rows of up, with those of the gate.
fn up_rows(mlp: &Mlp) -> u32 {
    mlp.gate.as_ref().map_or(0, |gate| gate.rows) + mlp.up.rows
}

/// `sms`; or a few less, if these then have equal shares of every matvec of a layer: no SM waits for one with more, and fewer SMs exchange
/// (docs/perf-log.md, entries 12, 13 and 56). A share is whole units. `unit_rows` has the rows of a unit to try, and the
/// first that gives equal shares counts. Of a mixture, the layer is the first one with attention and experts, and each slot has the rows of an
/// expert.
fn even_sms(graph: &ModelGraph, sms: u32, unit_rows: &[u32]) -> u32 {
    let is_mixture = |layer: &&Layer| layer.attention().is_some() && layer.feed.experts().is_some();
    let Some(layer) = graph.layers.iter().find(is_mixture).or(graph.layers.first()) else { return sms };
    let mlp = layer.feed.dense().or(layer.feed.experts().and_then(|experts| experts.experts.first()));
    let (Some(attn), Some(mlp)) = (layer.attention(), mlp) else { return sms };
    let slots = layer.feed.experts().map_or(1, |experts| experts.router.top_k);
    let rows =
        [attn.projections().iter().map(|part| part.rows).sum(), attn.o.rows, slots * up_rows(mlp), mlp.down.rows];
    let even = |unit: &u32| {
        (sms - sms / 16..=sms).rev().find(|count| rows.iter().all(|rows| rows.is_multiple_of(count * unit)))
    };
    unit_rows.iter().find_map(even).unwrap_or(sms)
}

/// Eight, or two where at least half of the lanes of a warp have no pair left to stage in the last turn of `down`: there two are as fast or
/// faster, and elsewhere slower (docs/perf-log.md, entry 42). With codes nothing was measured.
fn default_poll_pairs(graph: &ModelGraph, precision: Precision, warps: u32) -> u32 {
    const FEW: u32 = 2;
    let Some(mlp) = graph.layers.first().and_then(|layer| layer.feed.mlps().next()) else { return POLL_BATCH };
    let format = format_of(graph, &[&mlp.down], precision);
    let pairs = warp_pairs(mlp.down.cols.div_ceil(format.granule_k()), warps, 1, format, precision);
    let is_few = format.is_plain() && pairs > FEW * LANES && (1..=LANES / 2).contains(&(pairs % LANES));
    if is_few { FEW } else { POLL_BATCH }
}

/// From this many bytes of a layer for each SM on, streaming takes much longer than hops: 15 us at the read peak of an H200.
const STREAM_BOUND: u64 = 512 << 10;
/// With these bytes of a layer for each SM, streaming takes less time than the layer's five hops, 7.5 us, but not much less.
const BALANCED: std::ops::Range<u64> = 192 << 10..256 << 10;

/// Bytes of weights that an SM streams for the first layer.
fn layer_bytes(graph: &ModelGraph, precision: Precision, sms: u32) -> u64 {
    let plain = Format::plain(precision.weights);
    let bytes = |l: &Layer| {
        // Of experts, those that a row chooses.
        let slots = l.feed.experts().map_or(1, |experts| experts.router.top_k) as usize;
        let all = l.feed.mlps().count();
        let shared = l.feed.experts().map_or(all, |experts| experts.experts.len());
        let mlps = l.feed.mlps().enumerate().filter(|(at, _)| *at < slots || *at >= shared).map(|(_, mlp)| mlp);
        let linears = l.mixer.linears().into_iter().chain(l.feed.choosing()).chain(mlps.flat_map(Mlp::linears));
        let of = |l: &Linear| {
            let format = graph.formats.get(&l.weight.tensor).copied().unwrap_or(plain);
            f64::from(l.rows) * f64::from(l.cols) * format.bytes_per_weight()
        };
        linears.map(of).sum::<f64>()
    };
    graph.layers.first().map_or(0, |layer| bytes(layer) as u64) / u64::from(sms)
}

/// Copies in flight of a ring with at least `free` free slots, and of a well filled one.
struct Flight {
    high: u32,
    low: u32,
    free: u32,
}

impl Flight {
    /// Copies in flight, by how long a layer streams (docs/perf-log.md). For less time than its five hops take: 64 KiB while many slots
    /// are free, else one copy. For much longer, with slots of whole units: always 64 KiB. Otherwise four copies, and about 32 KiB in a
    /// well filled ring: memory then still streams at its rate, and polls wait least; with gated delta nets half as much again, because their
    /// states come through the same memory (entry 56). Codes of 4 bits: all slots; a prototype lost 7 % of a step of Llama-3.2-1B with fewer.
    fn for_layer(graph: &ModelGraph, precision: Precision, sms: u32, slot_bytes: u32, slots: u32) -> Flight {
        const IN_FLIGHT: u32 = 32768;
        let bytes = layer_bytes(graph, precision, sms);
        let unit = width_unit_bytes(graph, precision);
        let chunk = chunk_bytes(unit, slot_bytes);
        let copies = |bytes: u32| ((bytes + chunk / 2) / chunk).clamp(1, slots);
        let (high, low) = match bytes {
            _ if up_format(graph, precision).code.bits() == 4 => (slots, slots),
            bytes if bytes < BALANCED.end => (copies(2 * IN_FLIGHT), 1),
            STREAM_BOUND.. if unit <= slot_bytes => (copies(2 * IN_FLIGHT), copies(2 * IN_FLIGHT)),
            STREAM_BOUND.. if graph.layers.iter().any(|layer| matches!(layer.mixer, Mixer::GatedDelta(_))) => {
                (6, copies(2 * IN_FLIGHT))
            }
            _ => (4, copies(IN_FLIGHT)),
        };
        // Two thirds of the slots, rounded; a third where a layer streams for about as long as its hops take and slots are single units.
        let thirds = if BALANCED.contains(&bytes) && unit == slot_bytes { 1 } else { 2 };
        let free = (slots * thirds + 1) / 3;
        Flight { high: high.min(slots), low: low.min(slots), free }
    }
}

/// Two units of up at once, with their gates, if a layer streams for long and the rule of `ir::variant::RegisterTiling` holds one. Else 0,
/// the rule (docs/perf-log.md); also for codes, for which nothing was measured.
fn default_hold_up(graph: &ModelGraph, precision: Precision, warps: u32, sms: u32, slot_bytes: u32) -> u32 {
    // With up to eight granules of each, registers for as many more are free.
    const UNIT_GRANULES: std::ops::RangeInclusive<u32> = 7..=8;
    if !up_format(graph, precision).is_plain() {
        return 0;
    }
    let granules = (unit_bytes(graph.hidden, precision) / GRANULE_BYTES).div_ceil(warps);
    let slots = |l: &Layer| l.feed.experts().map_or(1, |experts| experts.router.top_k);
    let rows = |l: &Layer| l.feed.mlps().next().map_or(0, |mlp| up_rows(mlp) * slots(l));
    let units = graph.layers.first().map_or(0, |l| rows(l) / UNIT_ROWS / sms);
    let long = layer_bytes(graph, precision, sms) >= STREAM_BOUND && unit_bytes(graph.hidden, precision) <= slot_bytes;
    if long && units >= 2 && UNIT_GRANULES.contains(&granules) { 2 } else { 0 }
}

/// Bytes of the smallest slot that a decode kernel can have: a granule for each warp, and a chunk of the history.
fn least_slot_bytes(graph: &ModelGraph, precision: Precision, warps: u32) -> u32 {
    let granule = granules(graph, precision).map(|(_, bytes)| bytes).max().unwrap_or(0);
    let history = |a: &graph::Attention| HISTORY_ALIGN * cache_row_bytes(a.head_dim, precision.cache);
    let history = graph.layers.iter().filter_map(Layer::history).map(history).max().unwrap_or(0);
    (granule * warps).max(history).max(GRANULE_BYTES).next_multiple_of(GRANULE_BYTES)
}

/// Values and bytes of a granule of each matrix that kernels stream.
fn granules(graph: &ModelGraph, precision: Precision) -> impl Iterator<Item = (u32, u32)> {
    let formats = graph.layers.iter().flat_map(move |layer| {
        let of = move |linears: &[&Linear]| format_of(graph, linears, precision);
        let of_mlp = of_each_kind(layer).flat_map(move |mlp| {
            let up: Vec<_> = mlp.gate.iter().chain([&mlp.up]).collect();
            [of(&up), of(&[&mlp.down])]
        });
        let choosing: Vec<&Linear> = layer.feed.choosing().collect();
        let router = (!choosing.is_empty()).then(|| of(&choosing));
        let attn = layer.history().map(|a| [of(&a.projections()), of(&[&a.o])]);
        attn.into_iter().flatten().chain(router).chain(of_mlp)
    });
    let head = format_of(graph, &[&graph.head], precision);
    formats.chain([head]).map(|format| (format.granule_k(), format.granule_bytes()))
}

/// The MLPs of a layer that differ in shape: one expert, and the shared one.
fn of_each_kind(layer: &Layer) -> impl Iterator<Item = &Mlp> {
    let shared = layer.feed.experts().and_then(|experts| experts.shared.as_ref()).map(|shared| &shared.mlp);
    layer.feed.mlps().take(1).chain(shared)
}

/// Whether a default surely fits. `false`: it may fit all the same; [`fits`] knows.
fn surely_fits(graph: &ModelGraph, target: &Target, precision: Precision, c: &Candidate) -> bool {
    // Queues are as long as tasks fall on one SM, which [`fixed_smem_bytes`] estimates by their mean: by one task of each grid of a layer at most.
    let tasks = 3 * graph.layers.len() as u64 + 1;
    let fixed = fixed_smem_bytes(graph, target, precision, c.consumer_warps, c.sms)
        + longer_sums_bytes(c.sum_units, c.consumer_warps);
    let granule = granules(graph, precision).map(|(values, _)| values).max().unwrap_or(0);
    let spare = tasks * u64::from(QUEUE_ENTRY_BYTES) + u64::from(granule) * 4;
    let slots = c.slot_bytes >= least_slot_bytes(graph, precision, c.consumer_warps)
        && c.slot_bytes.is_multiple_of(GRANULE_BYTES);
    slots && fixed + spare + c.ring_bytes() <= u64::from(target.spec.smem_bytes_per_block_max)
}

/// Places a default for the longest context. Device memory is no matter of defaults.
fn placed(graph: &ModelGraph, target: &Target, precision: Precision, c: &Candidate) -> Result<Schedule, Infeasible> {
    let mut unbounded = target.clone();
    unbounded.spec.memory_bytes = u64::MAX;
    schedule(lower(graph, "default", precision, graph.positions_max, c)?, &unbounded, c)
}

/// Whether a default fits: lowering and scheduling say so.
fn fits(graph: &ModelGraph, target: &Target, precision: Precision, c: &Candidate) -> bool {
    placed(graph, target, precision, c).is_ok()
}

/// Shared memory of a block, bytes; `None`: the candidate does not fit for another reason.
fn placed_smem_bytes(graph: &ModelGraph, target: &Target, precision: Precision, c: &Candidate) -> Option<u64> {
    match placed(graph, target, precision, c) {
        Ok(placed) => Some(placed.machine.smem.iter().map(|part| u64::from(part.bytes)).sum()),
        Err(Infeasible::SharedMemory { bytes, .. }) => Some(bytes),
        Err(_) => None,
    }
}

/// Shared memory that does not depend on the ring, bytes: an upper bound for the default candidate.
pub fn fixed_smem_bytes(
    graph: &ModelGraph,
    target: &Target,
    precision: Precision,
    consumer_warps: u32,
    sms: u32,
) -> u64 {
    let needs = fixed_needs(graph, target, precision, consumer_warps, sms);
    // The true queue may be shorter, and whole where this one has a window, which takes less.
    let queue_max = if needs.copies_ahead { needs.queue_max.min(QUEUE_WHOLE_MAX) } else { needs.queue_max };
    smem_bytes(&SmemNeeds { queue_max, ..needs })
}

fn smem_bytes(needs: &SmemNeeds) -> u64 {
    smem_map(needs).last().map_or(0, |p| u64::from(p.offset) + u64::from(p.bytes))
}

/// What decides it: of each part the most that the default candidate may need.
fn fixed_needs(graph: &ModelGraph, target: &Target, precision: Precision, consumer_warps: u32, sms: u32) -> SmemNeeds {
    let k_max = graph
        .layers
        .iter()
        .flat_map(|l| {
            let mlp = of_each_kind(l).flat_map(|mlp| [mlp.up.cols, mlp.down.cols]);
            l.history().into_iter().flat_map(|a| [a.q.cols, a.o.cols]).chain(mlp)
        })
        .chain([graph.head.cols])
        .max()
        .unwrap_or(0);
    let attentions = || graph.layers.iter().filter_map(Layer::history);
    let dim = attentions().map(|a| a.head_dim).max().unwrap_or(0);
    let mma = target.spec.dot == DotMechanism::Mma;
    let attention: Vec<Attention> = attentions().map(|a| attention_of(graph, a)).collect();
    // Tasks of the longest queue: its part of split attention and of the merge, rounded up, and the tasks that every SM has once in a
    // layer and once in a step.
    let shares = |a: &Attention| a.head_groups() * default_splits(a.head_groups(), sms, a.head_dim) + a.heads;
    let posts = |l: &Layer| [&l.attn_post_norm, &l.mlp_post_norm].into_iter().flatten().count() as u32;
    // With experts: q, k and v; o; scores and the choice; slots of up and of down, of which one may begin and one may end on an SM; the
    // shared expert; the sum.
    let feed = |l: &Layer| match l.feed.experts() {
        None => 2,
        Some(experts) => {
            let shared = 2 * u32::from(experts.shared.is_some());
            2 + 2 * (experts.router.top_k.div_ceil(sms) + 1) + shared + 1
        }
    };
    let whole_tasks: u32 = graph.layers.iter().map(|l| 2 + feed(l) + posts(l)).sum();
    let routers = graph.layers.iter().filter_map(|l| l.feed.experts());
    let choice = |experts: &Experts| {
        let router = &experts.router;
        2 * (experts.experts.len() as u32 + router.top_k + router.groups.map_or(0, |groups| groups.count))
    };
    let shared_tasks: u32 = attention.iter().map(shares).sum();
    let units = graph.hidden.div_ceil(UNIT_ROWS);
    let whole = refuses_everywhere(graph, precision, consumer_warps).is_none();
    let records = |a: &Attention| AttentionVariant::by_rule(a, precision, mma, consumer_warps).records(consumer_warps);
    SmemNeeds {
        sms,
        k_max,
        head_dim: dim,
        heads_per_task: HEADS_PER_TASK_MAX.min(attentions().map(|a| a.heads / a.kv_heads).max().unwrap_or(1)),
        residual_units: if whole { units } else { units.div_ceil(sms) },
        records: attention.iter().map(records).max().unwrap_or(0),
        choice: routers.map(choice).max().unwrap_or(0),
        mix: 0,
        precision,
        tensor_cores: mma,
        consumer_warps,
        reduce_batch: REDUCE_BATCH,
        ring_bytes: 0,
        // Select, report, embedding and head; a share may begin anywhere.
        queue_max: whole_tasks + shared_tasks.div_ceil(sms) + 1 + 4,
        copies_ahead: target.spec.copy != CopyMechanism::Plain,
        rows: None,
    }
}
