//! Owns `Candidate`: one unmeasured point of the search space, and `Infeasible`: why a point does not fit.

use crate::dtype::Precision;
use crate::ir::op::{GRANULE_BYTES, HISTORY_ALIGN, PARTIAL_HEADER, UNIT_ROWS, granules};
use crate::ir::schedule::Mechanism;
use crate::ir::variant::{AttentionVariant, MatVecVariant, POLL_PAIRS, SUM_UNITS, ahead_rule, team_rule};
use crate::lower::{cache_row_bytes, finest_unit_rows, heads_per_task_most, refuses_everywhere};
use crate::model::graph::{Layer, ModelGraph};
use crate::target::{CopyMechanism, Target, TargetKind};
use std::fmt;
use thiserror::Error;

/// Slots that the barriers in shared memory are sized for (`state` of the shared-memory map).
pub const RING_SLOTS_MAX: u32 = 64;

/// More shares of the history than this would make the merge longer than the history it saves.
pub const SPLITS_DEFAULT_MAX: u32 = 32;

/// More shares than this are no candidate of any length of context: each is a task of every layer, and takes memory before
/// anything is known of it.
pub const SPLITS_MAX: u32 = 1024;

/// Every knob that lowering, scheduling and the kernels of ops may turn. Two candidates that differ give different artefacts or
/// the difference is a bug of the knob.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Candidate {
    /// SMs that take part, one block each.
    pub sms: u32,
    /// Warps that execute tasks.
    pub consumer_warps: u32,
    pub ring_slots: u32,
    pub slot_bytes: u32,
    /// Copies in flight while at least `flight_free` slots are free, and otherwise.
    pub flight_high: u32,
    pub flight_low: u32,
    pub flight_free: u32,
    /// Query heads of one attention task while the history is not split.
    pub heads_per_task: u32,
    /// Shares of the history in the split regime; 1: never split.
    pub splits: u32,
    /// First position of the split regime.
    pub split_from: u32,
    /// How activations travel.
    pub mechanism: Mechanism,
    /// The eighth of the SMs, in the order of their blocks, that streams less; 0: none.
    pub light_eighth: u32,
    /// By how much less, percent.
    pub light_percent: u32,
    /// Units of a matvec whose partial sums meet in one reduction.
    pub sum_units: u32,
    /// Pairs of packets that a thread waits for at once.
    pub poll_pairs: u32,
    /// Units whose weights a warp holds in registers at once, of each matvec of a layer (`up`: with the gate, where there is
    /// one) and of the head; 0: as many as the rule of `ir::variant::Held` says.
    pub hold_qkv: u32,
    pub hold_o: u32,
    pub hold_up: u32,
    pub hold_down: u32,
    pub hold_head: u32,
    /// Warps that share the tiles of a head in attention.
    pub attention_team: u32,
    /// 1: queries stay in registers and values are loaded before the softmax.
    pub attention_ahead: u32,
    /// Rows of the smallest units of a matvec: 8, or 4 or 2 where shares become shorter by it.
    pub unit_rows: u32,
    /// 1: every SM adds normalised branches up for itself; 0: the SM that owns the columns does, and publishes.
    pub sums_everywhere: u32,
}

/// A knob's value as a number.
trait Number: Copy {
    fn number(self) -> u32;
    fn of(number: u32) -> Self;
}

impl Number for u32 {
    fn number(self) -> u32 {
        self
    }

    fn of(number: u32) -> u32 {
        number
    }
}

impl Number for Mechanism {
    fn number(self) -> u32 {
        Mechanism::ALL.iter().position(|m| *m == self).unwrap_or(0) as u32
    }

    fn of(number: u32) -> Mechanism {
        *Mechanism::ALL.get(number as usize).unwrap_or(&Mechanism::Packets)
    }
}

/// Written out once: what a candidate is destructured into and made of, so that a new knob does not compile until it is here.
macro_rules! knobs {
    ($($knob:ident)*) => {
        /// Names of the knobs, in the order in which a candidate is printed.
        pub const KNOB_NAMES: [&str; 24] = [$(stringify!($knob)),*];

        impl Candidate {
            /// The knobs as numbers.
            pub fn values(&self) -> Values {
                let Candidate { $($knob),* } = *self;
                [$($knob.number()),*]
            }

            /// The candidate of these numbers.
            pub fn of_values(values: &Values) -> Candidate {
                let [$($knob),*] = *values;
                Candidate { $($knob: Number::of($knob)),* }
            }
        }
    };
}

knobs! {
    sms consumer_warps ring_slots slot_bytes flight_high flight_low flight_free heads_per_task splits split_from mechanism
    light_eighth light_percent sum_units poll_pairs hold_qkv hold_o hold_up hold_down hold_head attention_team attention_ahead
    unit_rows sums_everywhere
}

/// Values of a candidate by knob, in the order of [`KNOB_NAMES`]; `mechanism` by its place in [`Mechanism::ALL`].
pub type Values = [u32; KNOB_NAMES.len()];

/// A candidate that this target or model cannot take: ordinary search feedback, never a fault.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Infeasible {
    #[error("`sms` is {sms}, expected 1 to {most} on `{target}`")]
    Sms { sms: u32, most: u32, target: String },
    #[error("`{knob}` is {value}, expected {expected}")]
    Knob { knob: &'static str, value: u32, expected: String },
    #[error("`mechanism` is {mechanism}, expected packets: the kernel of a CUDA target has no other")]
    Mechanism { mechanism: &'static str },
    #[error("shared memory: the plan takes {bytes} bytes, `{target}` has {most} for one block")]
    SharedMemory { bytes: u64, most: u32, target: String },
    #[error("registers: {threads} threads of {registers} take {total}, `{target}` has {most}")]
    Registers { threads: u32, registers: u32, total: u64, most: u32, target: String },
    #[error("a ring slot of {slot_bytes} bytes holds fewer than {rows} cache rows of {row_bytes} bytes")]
    HistoryChunk { slot_bytes: u32, rows: u32, row_bytes: u32 },
    #[error("head_dim {head_dim} is odd; rotary pairs and activation packets need an even one")]
    HeadDim { head_dim: u32 },
    #[error("{what} takes {bytes} bytes, `{target}` has {most}")]
    DeviceMemory { what: &'static str, bytes: u64, most: u64, target: String },
}

impl Candidate {
    /// What an engineer who has read the measurements would pick without measuring: all SMs that get work, eight
    /// consumer warps, a ring as large as shared memory allows, few copies in flight near a hop.
    pub fn default_for(graph: &ModelGraph, target: &Target, precision: Precision) -> Candidate {
        let attention = graph.layers.first().map(|l| &l.attn);
        let (heads, kv_heads, head_dim) = attention.map_or((1, 1, 0), |a| (a.heads, a.kv_heads, a.head_dim));
        let group_most = heads_per_task_most(heads / kv_heads);
        let cpu = target.kind == TargetKind::Cpu;
        // A block without a unit of the head would release nothing at the end of a step.
        let sms = target.spec.sm_count.min(graph.vocab.div_ceil(UNIT_ROWS)).max(1);
        let sms = if cpu { sms } else { even_sms(graph, sms) };
        // Eight warps have 168 registers each and half the barrier and instruction traffic of sixteen, and still take chunks
        // faster than memory brings them (docs/perf-log.md).
        let consumer_warps = if cpu { 1 } else { 8 };
        let fixed = crate::schedule::fixed_smem_bytes(graph, target, precision, consumer_warps, sms);
        let room = u64::from(target.spec.smem_bytes_per_block_max).saturating_sub(fixed);
        // Smaller slots where shared memory is scarce, down to a chunk of the history, so that two have room.
        let history_bytes = attention.map_or(0, |a| HISTORY_ALIGN * cache_row_bytes(a.head_dim, precision.cache));
        let fits = |&bytes: &u32| bytes >= history_bytes && room / u64::from(bytes) >= 2;
        let wanted = default_slot_bytes(graph, precision, sms, room);
        let slot_bytes = [wanted, 8192, 4096].into_iter().find(fits).unwrap_or(wanted);
        let ring_slots = (room / u64::from(slot_bytes)).clamp(2, 12) as u32;
        let flight = Flight::for_layer(graph, precision, sms, slot_bytes, ring_slots);
        Candidate {
            sms,
            consumer_warps,
            ring_slots,
            slot_bytes,
            flight_high: flight.high,
            flight_low: flight.low,
            // Two thirds of them, rounded.
            flight_free: (ring_slots * 2 + 1) / 3,
            heads_per_task: if cpu { group_most } else { 1 },
            splits: if cpu { 1 } else { default_splits(heads / group_most, sms, head_dim) },
            split_from: 384,
            mechanism: if target.spec.copy == CopyMechanism::Plain && cpu {
                Mechanism::Counter
            } else {
                Mechanism::Packets
            },
            light_eighth: 0,
            // What the slowest SMs of an H200 fall behind the mean.
            light_percent: 5,
            sum_units: SUM_UNITS,
            poll_pairs: POLL_PAIRS,
            hold_qkv: 0,
            hold_o: 0,
            hold_up: if cpu { 0 } else { default_hold_up(graph, precision, consumer_warps, sms, slot_bytes) },
            hold_down: 0,
            hold_head: 0,
            attention_team: team_rule(head_dim),
            attention_ahead: u32::from(ahead_rule(head_dim)),
            unit_rows: if cpu { UNIT_ROWS } else { finest_unit_rows(graph, precision, sms, 4) },
            // A hop less for each sum (docs/perf-log.md).
            sums_everywhere: u32::from(!cpu && refuses_everywhere(graph, precision, consumer_warps).is_none()),
        }
    }

    /// The same for contexts of at most so many positions, which are not shared between more than pays the merge.
    pub fn for_context(self, context_max: u32) -> Candidate {
        // A share of fewer positions is read in the time that another share takes to merge (docs/perf-log.md).
        const SHARE_LEAST: u32 = 128;
        Candidate { splits: self.splits.min((context_max / SHARE_LEAST).max(1)), ..self }
    }

    /// The SMs that stream less than the others.
    pub fn light_sms(&self) -> std::ops::Range<u32> {
        match self.light_eighth {
            0 => 0..0,
            eighth => (eighth - 1) * self.sms / 8..eighth * self.sms / 8,
        }
    }

    /// The knob that says how many units a warp holds of the matvec called `grid`, and its value.
    pub fn hold_of(&self, grid: &str) -> Option<(&'static str, u32)> {
        match grid.split('.').next()? {
            "qkv" => Some(("hold_qkv", self.hold_qkv)),
            "o" => Some(("hold_o", self.hold_o)),
            "gate_up" | "up" => Some(("hold_up", self.hold_up)),
            "down" => Some(("hold_down", self.hold_down)),
            "head" => Some(("hold_head", self.hold_head)),
            _ => None,
        }
    }

    /// How the matvec called `grid` is to be done.
    pub fn matvec_variant(&self, grid: &str) -> MatVecVariant {
        let hold = self.hold_of(grid).map(|(_, units)| units).filter(|units| *units > 0);
        MatVecVariant { hold, poll: Some(self.poll_pairs).filter(|pairs| *pairs != POLL_PAIRS) }
    }

    /// How attention over heads of `head_dim` is to be done.
    pub fn attention_variant(&self, head_dim: u32) -> AttentionVariant {
        let ahead = self.attention_ahead != 0;
        AttentionVariant {
            team: Some(self.attention_team).filter(|warps| *warps != team_rule(head_dim)),
            ahead: Some(ahead).filter(|ahead| *ahead != ahead_rule(head_dim)),
        }
    }

    /// What a text is read over: each knob that was added since the first trials were written as kernels were before there was
    /// the knob, for heads of `head_dim`. The knobs of the first trials are in every text.
    pub fn of_first(head_dim: u32) -> Candidate {
        let mut values = [1; KNOB_NAMES.len()];
        let (team, ahead) = (team_rule(head_dim), u32::from(ahead_rule(head_dim)));
        let later = [0, 5, SUM_UNITS, POLL_PAIRS, 0, 0, 0, 0, 0, team, ahead, UNIT_ROWS, 0];
        let first = values.len() - later.len();
        values.iter_mut().skip(first).zip(later).for_each(|(value, later)| *value = later);
        Candidate::of_values(&values)
    }
}

/// Shares of the history that give every SM one where `groups` tasks read it whole: no more than a merge is worth, nor than records
/// of as many values as 32 heads of 128 dimensions have.
pub fn default_splits(groups: u32, sms: u32, head_dim: u32) -> u32 {
    const RECORDS: u32 = SPLITS_DEFAULT_MAX * (128 + PARTIAL_HEADER);
    let most = (RECORDS / (head_dim + PARTIAL_HEADER)).clamp(1, SPLITS_DEFAULT_MAX);
    (sms / groups.max(1)).clamp(1, most)
}

/// Bytes of a unit of a matvec with so many columns: 8 rows of whole granules.
pub fn unit_bytes(cols: u32, precision: Precision) -> u32 {
    granules(cols, precision.weights.bytes() as u32).max(1) * GRANULE_BYTES
}

/// Bytes of a chunk of units of so many bytes: whole units, or one of the equal parts of a unit that slots hold. Ops with many warps
/// round up to granules for each of them (`Ring::chunking`).
pub fn chunk_bytes(unit: u32, slot_bytes: u32) -> u32 {
    let (unit, slot) = (unit.max(1), slot_bytes.max(1));
    if unit <= slot { slot / unit * unit } else { unit.div_ceil(unit.div_ceil(slot)) }
}

/// 16 KiB; where units of the model's width would waste a third of such a slot or be cut by it, 32 KiB, or whole units where
/// those would waste a third of that, if five have room: a unit in one chunk has no wait inside, and a ring runs ahead by what
/// is in its slots. Two units where a layer streams for about as long as its hops take (docs/perf-log.md).
fn default_slot_bytes(graph: &ModelGraph, precision: Precision, sms: u32, room: u64) -> u32 {
    const SLOT: u32 = 16384;
    let unit = unit_bytes(graph.hidden, precision);
    if unit <= SLOT && BALANCED.contains(&layer_bytes(graph, precision, sms)) && room >= 5 * u64::from(2 * unit) {
        return 2 * unit;
    }
    let units_in = |slot: u32| slot / unit * unit;
    let wastes = |slot: u32| units_in(slot) < slot / 3 * 2;
    if !wastes(SLOT) || unit > 2 * SLOT || room < 5 * u64::from(2 * SLOT) {
        return SLOT;
    }
    if wastes(2 * SLOT) { units_in(2 * SLOT) } else { 2 * SLOT }
}

/// Rows of up, with those of the gate.
fn up_rows(layer: &Layer) -> u32 {
    layer.mlp.gate.as_ref().map_or(0, |gate| gate.rows) + layer.mlp.up.rows
}

/// All SMs, or a few less where these have equal shares of every matvec of a layer, in units of 8 rows or halves of them: nobody
/// waits for an SM with more, and fewer SMs exchange (docs/perf-log.md).
fn even_sms(graph: &ModelGraph, sms: u32) -> u32 {
    let Some(layer @ Layer { attn, mlp, .. }) = graph.layers.first() else { return sms };
    let rows = [attn.q.rows + attn.k.rows + attn.v.rows, attn.o.rows, up_rows(layer), mlp.down.rows];
    let even = |unit: u32| {
        (sms - sms / 16..=sms).rev().find(|count| rows.iter().all(|rows| rows.is_multiple_of(count * unit)))
    };
    even(UNIT_ROWS).or_else(|| even(UNIT_ROWS / 2)).unwrap_or(sms)
}

/// Bytes of a layer for an SM from which streaming takes much longer than hops: 15 us at the read peak of an H200.
const STREAM_BOUND: u64 = 512 << 10;
/// Bytes of a layer for an SM that stream for less time than its five hops take, 7.5 us, but not for much less.
const BALANCED: std::ops::Range<u64> = 192 << 10..256 << 10;

/// Bytes of weights that an SM streams for the first layer.
fn layer_bytes(graph: &ModelGraph, precision: Precision, sms: u32) -> u64 {
    let parameters = |l: &Layer| {
        let linears = [
            Some(&l.attn.q),
            Some(&l.attn.k),
            Some(&l.attn.v),
            Some(&l.attn.o),
            l.mlp.gate.as_ref(),
            Some(&l.mlp.up),
            Some(&l.mlp.down),
        ];
        linears.into_iter().flatten().map(|l| u64::from(l.rows) * u64::from(l.cols)).sum::<u64>()
    };
    graph.layers.first().map_or(0, parameters) * precision.weights.bytes() as u64 / u64::from(sms)
}

/// Copies in flight of a ring with many free slots, and of a well filled one.
struct Flight {
    high: u32,
    low: u32,
}

impl Flight {
    /// Of a well filled ring about 32 KiB, at which memory still streams at its rate and a poll waits least; one copy, and 64 KiB of an
    /// emptier ring, where a layer streams for less time than its five hops take; 64 KiB, and never more, where it streams for much longer and
    /// slots hold whole units (docs/perf-log.md).
    fn for_layer(graph: &ModelGraph, precision: Precision, sms: u32, slot_bytes: u32, slots: u32) -> Flight {
        const IN_FLIGHT: u32 = 32768;
        let bytes = layer_bytes(graph, precision, sms);
        let unit = unit_bytes(graph.hidden, precision);
        let chunk = chunk_bytes(unit, slot_bytes);
        let copies = |bytes: u32| ((bytes + chunk / 2) / chunk).clamp(1, slots);
        let (high, low) = match bytes {
            bytes if bytes < BALANCED.end => (copies(2 * IN_FLIGHT), 1),
            STREAM_BOUND.. if unit <= slot_bytes => (copies(2 * IN_FLIGHT), copies(2 * IN_FLIGHT)),
            _ => (4, copies(IN_FLIGHT)),
        };
        Flight { high: high.min(slots), low: low.min(slots) }
    }
}

/// Two units of up at once, a gate's and its up's, where a layer streams for long and the rule of `ir::variant::Held` holds
/// one; 0, the rule, elsewhere (docs/perf-log.md).
fn default_hold_up(graph: &ModelGraph, precision: Precision, warps: u32, sms: u32, slot_bytes: u32) -> u32 {
    // Eight granules of each: registers for as many more are free.
    const UNIT_GRANULES: std::ops::RangeInclusive<u32> = 7..=8;
    let granules = (unit_bytes(graph.hidden, precision) / GRANULE_BYTES).div_ceil(warps);
    let units = graph.layers.first().map_or(0, |layer| up_rows(layer) / UNIT_ROWS / sms);
    let long = layer_bytes(graph, precision, sms) >= STREAM_BOUND && unit_bytes(graph.hidden, precision) <= slot_bytes;
    if long && units >= 2 && UNIT_GRANULES.contains(&granules) { 2 } else { 0 }
}

/// One line, `knob=value` in the order of [`KNOB_NAMES`]: what trials store and what `show candidate` prints.
impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (name, value)) in KNOB_NAMES.iter().zip(self.values()).enumerate() {
            let separator = if at > 0 { ";" } else { "" };
            match *name {
                "mechanism" => write!(f, "{separator}{name}={}", self.mechanism.name())?,
                _ => write!(f, "{separator}{name}={value}")?,
            }
        }
        Ok(())
    }
}

impl Candidate {
    /// Reads what `Display` writes; knobs may come in any order and absent ones keep the value of `base`.
    pub fn parse(text: &str, base: &Candidate) -> Result<Candidate, String> {
        let mut values = base.values();
        for pair in text.split(';').map(str::trim).filter(|p| !p.is_empty()) {
            let (knob, value) = pair.split_once('=').ok_or_else(|| format!("expected `knob=value`, found `{pair}`"))?;
            let at = KNOB_NAMES.iter().position(|name| *name == knob);
            let place = at.and_then(|at| values.get_mut(at)).ok_or_else(|| format!("unknown knob `{knob}`"))?;
            *place = match knob {
                "mechanism" => Mechanism::ALL
                    .iter()
                    .position(|m| m.name() == value)
                    .map(|at| at as u32)
                    .ok_or_else(|| format!("expected `packets`, `fenced` or `counter`, found `{value}`"))?,
                _ => value.parse().map_err(|_| format!("expected a number for `{knob}`, found `{value}`"))?,
            };
        }
        Ok(Candidate::of_values(&values))
    }
}
