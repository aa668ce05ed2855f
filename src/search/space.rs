//! Owns `Space`: the knobs that a search may turn for one model on one target, and the values each may take.
//!
//! A knob is in the space of a target only if it changes what runs there. The values are a fixed grid, so that `digest` names the space
//! across models and machines, and rows of an older grid can be told from rows of this one.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use crate::candidate::{Candidate, Infeasible, KNOB_NAMES, Values, WAVE_KNOB_COUNT, WAVE_KNOBS};
use crate::digest::Digest;
use crate::dtype::Precision;
use crate::ir::layout::{RING_SLOTS_MAX, chunk_bytes, unit_bytes};
use crate::ir::op::UNIT_ROWS;
use crate::ir::variant::longer_sums_bytes;
use crate::lower::{LayerOp, finest_unit_rows, heads_of_task, lower};
use crate::model::graph::{Layer, ModelGraph};
use crate::schedule::{check_knobs, schedule};
use crate::target::{Target, TargetKind};

/// What a knob's values mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Grid {
    /// The values themselves.
    Values(&'static [u32]),
    /// The SMs of the target: all, and that many eighths or single SMs fewer.
    EighthsLess(&'static [u32]),
}

/// One knob of a candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Knob {
    /// The name that `Candidate` prints.
    pub name: &'static str,
    /// For documentation, and for external proposers.
    pub meaning: &'static str,
    pub grid: Grid,
    /// Whether it changes what the interpreter does, which has no ring and no warps.
    pub on_cpu: bool,
    /// Whether it changes what a kernel does.
    pub on_cuda: bool,
    /// The ops whose kernel variant it chooses; empty: it belongs to the whole schedule.
    pub ops: &'static [&'static str],
    /// Whether it is a choice of wave kernels that read prompt chunks, and of those that run steps. Neither: it decides a schedule.
    pub of_chunks: bool,
    pub of_steps: bool,
}

const fn knob(name: &'static str, grid: Grid, on_cpu: bool, on_cuda: bool, meaning: &'static str) -> Knob {
    Knob { name, meaning, grid, on_cpu, on_cuda, ops: &[], of_chunks: false, of_steps: false }
}

impl Knob {
    /// Whether a search of `op` alone changes it. On `cpu` it also changes `sms`, the number of shares of the work.
    pub fn reaches(&self, op: LayerOp, kind: TargetKind) -> bool {
        self.ops.contains(&op.name()) || (kind == TargetKind::Cpu && self.name == "sms")
    }

    /// Whether it is a choice of wave kernels.
    pub fn is_wave(&self) -> bool {
        self.of_chunks || self.of_steps
    }

    /// The same knob, for these ops alone.
    const fn of(self, ops: &'static [&'static str]) -> Knob {
        Knob { ops, ..self }
    }
}

const MATVECS: &[&str] = &["qkv", "o", "up", "down", "head"];
const ATTENTION: &[&str] = &["attention"];
const HOLD: Grid = Grid::Values(&[0, 1, 2, 3, 4, 6, 8]);

/// All knobs, in the order in which a candidate prints them (a test holds that).
pub const KNOBS: [Knob; KNOB_NAMES.len()] = {
    let mut knobs = [SCHEDULE_KNOBS[0]; KNOB_NAMES.len()];
    let mut at = 0;
    while at < SCHEDULE_KNOBS.len() {
        knobs[at] = SCHEDULE_KNOBS[at];
        at += 1;
    }
    while at < knobs.len() {
        let wave = WAVE_KNOBS[at - SCHEDULE_KNOBS.len()];
        let own = knob(wave.name, Grid::Values(wave.values), false, true, wave.meaning);
        knobs[at] = Knob { of_chunks: wave.of_chunks, of_steps: wave.of_steps, ..own };
        at += 1;
    }
    knobs
};

/// The knobs that decide a schedule.
const SCHEDULE_KNOBS: [Knob; KNOB_NAMES.len() - WAVE_KNOB_COUNT] = [
    knob(
        "sms",
        Grid::EighthsLess(&[0, 1, 2, 3, 4, 5, 6]),
        true,
        true,
        "SMs that take part, one persistent block each (on `cpu`: shares of the work)",
    ),
    knob("consumer_warps", Grid::Values(&[4, 8, 12, 16]), false, true, "warps of a block that execute tasks"),
    knob(
        "ring_slots",
        Grid::Values(&[2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48]),
        false,
        true,
        "slots of the weight ring in shared memory: how far the loader can run ahead",
    ),
    knob(
        "slot_bytes",
        Grid::Values(&[4096, 8192, 12_288, 16_384, 24_576, 32_768, 49_152]),
        false,
        true,
        "bytes of a slot, which is one bulk copy and one barrier; also the sizes of one to four units of the model's width; sizes that leave a quarter of the slot empty are left out",
    ),
    knob(
        "flight_high",
        Grid::Values(&[1, 2, 3, 4, 6, 8, 12]),
        false,
        true,
        "most bulk copies in flight while at least `flight_free` slots are free",
    ),
    knob(
        "flight_low",
        Grid::Values(&[1, 2, 3, 4, 6]),
        false,
        true,
        "most bulk copies in flight otherwise; polls of an exchange queue after them",
    ),
    knob(
        "flight_free",
        Grid::Values(&[0, 1, 2, 3, 4, 5, 6, 8, 10, 12]),
        false,
        true,
        "free slots from which on `flight_high` applies",
    ),
    knob(
        "heads_per_task",
        // Divisors of 3, 5, 6 and 7 query heads to a KV head, too.
        Grid::Values(&[1, 2, 3, 4, 5, 6, 7, 8]),
        true,
        true,
        "query heads that share one read of their KV head in one task",
    )
    .of(ATTENTION),
    knob(
        "splits",
        Grid::Values(&[1, 2, 3, 4, 6, 8, 12, 16, 24, 32]),
        true,
        true,
        "KV splits of attention (flash decoding); 1 never splits",
    )
    .of(ATTENTION),
    knob(
        "split_from",
        Grid::Values(&[128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096]),
        true,
        true,
        "first position whose attention is split",
    )
    .of(ATTENTION),
    knob(
        "mechanism",
        Grid::Values(&[0, 1, 2]),
        false,
        false,
        "how activations travel: tagged packets, fenced packets, or counters; kernels implement tagged packets only",
    ),
    knob(
        "light_eighth",
        Grid::Values(&[0, 1, 2, 3, 4, 5, 6, 7, 8]),
        false,
        true,
        "the eighth of the SMs that streams less than its share, because it is slow; 0: none",
    ),
    knob(
        "light_percent",
        Grid::Values(&[3, 5, 8, 12, 20]),
        false,
        true,
        "how much less `light_eighth` streams, percent",
    ),
    knob(
        "sum_units",
        Grid::Values(&[4, 8, 16, 32]),
        false,
        true,
        "units of 8 rows whose partial sums are reduced across warps at once, in a matvec",
    )
    .of(MATVECS),
    knob(
        "poll_pairs",
        Grid::Values(&[1, 2, 4, 8, 16]),
        false,
        true,
        "most pairs of input packets that a thread of a matvec polls at once",
    )
    .of(MATVECS),
    knob(
        "hold_qkv",
        HOLD,
        false,
        true,
        "units of qkv whose weights a warp holds in registers at once; 0: as many as 48 registers hold",
    )
    .of(&["qkv"]),
    knob("hold_o", HOLD, false, true, "the same for the projection after attention").of(&["o"]),
    knob("hold_up", HOLD, false, true, "the same for up, or for gate and up together").of(&["up"]),
    knob("hold_down", HOLD, false, true, "the same for down").of(&["down"]),
    knob("hold_head", HOLD, false, true, "the same for the output matrix").of(&["head"]),
    knob(
        "attention_team",
        Grid::Values(&[1, 2, 4, 8]),
        false,
        true,
        "warps that share a head's tiles; each computes some dimensions of V",
    )
    .of(ATTENTION),
    knob(
        "attention_ahead",
        Grid::Values(&[0, 1]),
        false,
        true,
        "1: queries stay in registers, and V is loaded before the softmax",
    )
    .of(ATTENTION),
    knob(
        "unit_rows",
        Grid::Values(&[2, 4, 8]),
        false,
        true,
        "fewest rows of a unit of a matvec; smaller units are used only if they shorten the longest share of an SM",
    )
    .of(&["qkv", "o", "up", "down"]),
    knob(
        "sums_everywhere",
        Grid::Values(&[0, 1]),
        false,
        true,
        "1: every SM adds a normalised branch to its own copy of the residual; 0: the SM that owns the columns adds and publishes",
    ),
];

/// The knobs as a table, as `docs/search.md` shows them.
pub fn knob_table() -> String {
    let mut table = String::from("| knob | means | values | on |\n| --- | --- | --- | --- |\n");
    for Knob { name, meaning, grid, on_cpu, on_cuda, ops: _, of_chunks, of_steps } in KNOBS {
        let values = match grid {
            Grid::Values(values) => values.iter().map(u32::to_string).collect::<Vec<_>>().join(", "),
            Grid::EighthsLess(_) => "all; one to six fewer; one to six eighths fewer".to_string(),
        };
        let on = match (on_cpu, on_cuda) {
            _ if of_chunks && of_steps => "chunk, wave",
            _ if of_chunks => "chunk",
            _ if of_steps => "wave",
            (true, true) => "cpu, cuda",
            (true, false) => "cpu",
            (false, true) => "cuda",
            (false, false) => "none yet",
        };
        table += &format!("| `{name}` | {meaning} | {values} | {on} |\n");
    }
    table
}

/// Knobs that differ from the default, in the syntax of a manifest's `candidate`; `default` where none does.
pub fn changed(candidate: &Candidate, default: &Candidate) -> String {
    let values = candidate.values().into_iter().zip(default.values()).enumerate();
    let pairs: Vec<String> = values.filter(|(_, (a, b))| a != b).map(|(at, _)| candidate.knob_text(at)).collect();
    if pairs.is_empty() { "default".to_string() } else { pairs.join(";") }
}

/// The points that a search may visit for one model on one target.
#[derive(Debug, Clone)]
pub struct Space {
    default: Candidate,
    /// Index into [`KNOBS`] and legal values, ascending; a knob with one value is left out.
    knobs: Vec<(usize, Vec<u32>)>,
    rules: Rules,
    /// Whether its points are those of a wave kernel: no knob depends on another one, and the plan says what does not fit.
    is_wave: bool,
}

/// Facts of model and target that decide legality before anything is lowered. Lowering may still refuse.
#[derive(Debug, Clone)]
struct Rules {
    target: Target,
    head_units: u32,
    context_max: u32,
    fixed_smem: BTreeMap<u32, u64>,
    group: u32,
    /// Bytes of a unit of the model's width.
    unit: u32,
    /// Bytes of a unit of each op whose `hold_*` knob sets how many units are held at once, by that knob.
    held: [(&'static str, u32); 5],
}

/// Upper bound on shared memory of a block beside the ring, bytes: it grows with larger batches of sums than the default's.
fn fixed_bytes(of_warps: &BTreeMap<u32, u64>, c: &Candidate) -> u64 {
    of_warps.get(&c.consumer_warps).copied().unwrap_or(0) + longer_sums_bytes(c.sum_units, c.consumer_warps)
}

/// With larger slots the ring has so few of them that the loader hardly runs ahead.
const SLOT_BYTES_MAX: u32 = 65536;
/// Less than one part in this many of a slot may be empty.
const SLOT_WASTE: u32 = 4;

impl Space {
    /// The points around `default`, where a search begins. `fixed_smem_bytes(consumer_warps)`: bytes of a block's shared memory beside the
    /// ring. A lower bound or an estimate is enough, because [`Space::admits`] only saves the time of lowering.
    pub fn new(
        graph: &ModelGraph,
        target: &Target,
        precision: Precision,
        context_max: u32,
        default: Candidate,
        fixed_smem_bytes: impl Fn(u32) -> u64,
    ) -> Space {
        let cpu = target.kind == TargetKind::Cpu;
        let group = graph
            .layers
            .iter()
            .filter_map(Layer::history)
            .map(|a| a.heads / a.kv_heads.max(1))
            .max()
            .unwrap_or(1)
            .max(1);
        let head_units = graph.vocab.div_ceil(UNIT_ROWS);
        let unit = unit_bytes(graph.hidden, precision);
        // Devices have equal numbers of SMs.
        let whole = |sms: u32| sms / target.devices * target.devices;
        let sms_max = whole(target.sms().min(head_units)).max(target.devices);
        let own = default.values();
        // One layer shows which variants its ops have.
        let mut layer = graph.clone();
        layer.layers.truncate(1);
        // Some variants need slots that hold whole units: legal is what fits the default's ring, or a ring of such slots.
        let slot = (1..=4).rev().map(|units| units * unit).find(|bytes| *bytes <= SLOT_BYTES_MAX);
        let of_units = slot.filter(|_| !cpu).map(|slot_bytes| {
            let ring_slots = (default.ring_slots * default.slot_bytes / slot_bytes).max(2);
            let [flight_high, flight_low] = [default.flight_high, default.flight_low].map(|n| n.min(ring_slots));
            let flight_free = default.flight_free.min(ring_slots);
            Candidate { slot_bytes, ring_slots, flight_high, flight_low, flight_free, ..default.clone() }
        });
        let rings = [Some(default.clone()), of_units];
        let fits = |at: usize, value: u32| {
            rings.iter().flatten().any(|ring| {
                let mut values = ring.values();
                if let Some(knob) = values.get_mut(at) {
                    *knob = value;
                }
                let c = Candidate::of_values(&values);
                lower(&layer, "", precision, context_max, &c).and_then(|program| schedule(program, target, &c)).is_ok()
            })
        };
        let mut knobs = vec![];
        for (at, knob) in KNOBS.iter().enumerate() {
            if knob.is_wave() || !(if cpu { knob.on_cpu } else { knob.on_cuda }) {
                continue;
            }
            let mut values: Vec<u32> = match knob.grid {
                Grid::Values(values) => values.to_vec(),
                Grid::EighthsLess(eighths) => eighths
                    .iter()
                    .flat_map(|e| {
                        [whole(sms_max - sms_max * e / 8), sms_max.saturating_sub(e.saturating_mul(target.devices))]
                    })
                    .filter(|sms| *sms > 0)
                    .collect(),
            };
            match knob.name {
                "heads_per_task" => values.retain(|&heads| heads <= group && group.is_multiple_of(heads)),
                // Also sizes that whole units of the model's width fill.
                "slot_bytes" if !cpu => {
                    values.extend((1..=4).map(|units| units * unit).filter(|bytes| *bytes <= SLOT_BYTES_MAX));
                    // A smaller size has the same chunks and leaves room for more of them.
                    values.retain(|&slot| slot - chunk_bytes(unit, slot) < slot / SLOT_WASTE);
                }
                // A first position beyond the context would never split, like `splits = 1`.
                "split_from" => values.retain(|&from| from < context_max),
                // Smaller units are used only if they make shares shorter.
                "unit_rows" => values.retain(|&least| finest_unit_rows(graph, precision, least) == least),
                "sum_units" => {}
                "sums_everywhere" => values.retain(|&value| value == own[at] || fits(at, value)),
                _ if !knob.ops.is_empty() => values.retain(|&value| value == own[at] || fits(at, value)),
                _ => {}
            }
            values.push(own[at]);
            values.sort_unstable();
            values.dedup();
            if values.len() > 1 {
                knobs.push((at, values));
            }
        }
        let warps = match KNOBS[crate::candidate::Knob::ConsumerWarps as usize].grid {
            Grid::Values(warps) => warps,
            Grid::EighthsLess(_) => &[],
        };
        let fixed_smem =
            warps.iter().chain([&default.consumer_warps]).map(|&warps| (warps, fixed_smem_bytes(warps))).collect();
        let first = graph.layers.first();
        let inputs = [
            first.and_then(|l| l.attention()).map_or(graph.hidden, |a| a.o.cols),
            first.and_then(|l| l.feed.mlps().next()).map_or(graph.hidden, |mlp| mlp.down.cols),
        ];
        let [o, down] = inputs.map(|cols| unit_bytes(cols, precision));
        let held = [("hold_qkv", unit), ("hold_o", o), ("hold_up", unit), ("hold_down", down), ("hold_head", unit)];
        let rules = Rules { target: target.clone(), head_units, context_max, fixed_smem, group, unit, held };
        Space { default, knobs, rules, is_wave: false }
    }

    /// The choices of the wave kernel that reads prompt chunks (`of_chunks`), or of one that runs steps, around the same default: that of the schedule
    /// from which the plan is derived.
    pub fn of_waves(self, of_chunks: bool) -> Space {
        let reaches = |knob: &Knob| if of_chunks { knob.of_chunks } else { knob.of_steps };
        let values = |knob: &Knob| match knob.grid {
            Grid::Values(values) => values.to_vec(),
            Grid::EighthsLess(_) => vec![],
        };
        let own = KNOBS.iter().enumerate().filter(|(_, knob)| reaches(knob));
        Space { knobs: own.map(|(at, knob)| (at, values(knob))).collect(), is_wave: true, ..self }
    }

    /// The knobs that reach one op.
    pub fn of_op(mut self, op: LayerOp) -> Space {
        let kind = self.rules.target.kind;
        self.knobs.retain(|(at, _)| KNOBS.get(*at).is_some_and(|knob| knob.reaches(op, kind)));
        self
    }

    /// The candidate that is built without a search, and that others are compared with.
    pub fn default_candidate(&self) -> &Candidate {
        &self.default
    }

    /// The knobs that have more than one value here, with their values, ascending.
    pub fn knobs(&self) -> impl Iterator<Item = (&'static Knob, &[u32])> {
        self.knobs.iter().filter_map(|(at, values)| Some((KNOBS.get(*at)?, values.as_slice())))
    }

    /// The same as indices into [`KNOBS`].
    pub fn grid(&self) -> &[(usize, Vec<u32>)] {
        &self.knobs
    }

    /// Digest of the grid of all knobs: rows with another digest come from another space. It is the same for every model and target, so that
    /// knowledge carries over.
    pub fn digest() -> Digest {
        Space::digest_of(&KNOBS)
    }

    /// Whether the points of the space with this digest are points of this one: it has the same knobs, or a prefix of them. The missing knobs
    /// are assumed to have the values of [`Candidate::of_first`].
    pub fn contains(digest: &Digest) -> bool {
        // Asked for each row of a corpus.
        static KNOWN: LazyLock<Vec<Digest>> =
            LazyLock::new(|| (1..=KNOBS.len()).filter_map(|first| KNOBS.get(..first)).map(Space::digest_of).collect());
        KNOWN.contains(digest)
    }

    fn digest_of(knobs: &[Knob]) -> Digest {
        let mut text = String::new();
        for Knob { name, meaning: _, grid, on_cpu, on_cuda, ops: _, of_chunks: _, of_steps: _ } in knobs {
            text.push_str(&format!("{name} {grid:?} {on_cpu} {on_cuda}\n"));
        }
        Digest::of(text.as_bytes())
    }

    /// Decides in microseconds what lowering decides in milliseconds; an admitted point may still be infeasible.
    ///
    /// # Errors
    /// Why the point does not fit.
    pub fn admits(&self, c: &Candidate) -> Result<(), Infeasible> {
        let Rules { target, head_units, fixed_smem, group, .. } = &self.rules;
        check_knobs(*head_units, target, c)?;
        heads_of_task(*group, c)?;
        if target.kind == TargetKind::Cuda {
            let bytes = fixed_bytes(fixed_smem, c) + u64::from(c.ring_slots) * u64::from(c.slot_bytes);
            let most = target.spec.smem_bytes_per_block_max;
            if bytes > u64::from(most) {
                return Err(Infeasible::SharedMemory { bytes, most, target: target.name.clone() });
            }
        }
        Ok(())
    }

    /// One-knob moves, nearest values first. A new slot size keeps the bytes of the ring and in flight. A new slot count rescales
    /// `flight_free`, and lowers the copies in flight if they would not fit.
    pub fn neighbours(&self, from: &Candidate) -> Vec<Candidate> {
        let mut found: Vec<(usize, usize, Candidate)> = vec![];
        let own = from.values();
        for (order, (at, choices)) in self.knobs.iter().enumerate() {
            let Some(&now) = own.get(*at) else { continue };
            let below = choices.iter().rev().filter(|&&v| v < now).zip(1..);
            let above = choices.iter().filter(|&&v| v > now).zip(1..);
            for (&value, distance) in below.chain(above) {
                let moved = self.with(from, *at, value);
                // Several values may be clamped to one.
                let new = moved != *from && found.iter().all(|(_, _, other)| *other != moved);
                if new && self.admits(&moved).is_ok() {
                    found.push((distance, order, moved));
                }
            }
        }
        found.sort_by_key(|(distance, order, _)| (*distance, *order));
        found.into_iter().map(|(_, _, candidate)| candidate).collect()
    }

    /// The point with one knob set, and the knobs that depend on it brought back into their range.
    fn with(&self, from: &Candidate, at: usize, value: u32) -> Candidate {
        let mut numbers = from.values();
        if let Some(number) = numbers.get_mut(at) {
            *number = value;
        }
        let mut to = Candidate::of_values(&numbers);
        if self.is_wave {
            return to;
        }
        let changed = KNOBS.get(at).map_or("", |knob| knob.name);
        if self.rules.target.kind == TargetKind::Cuda {
            // Several units can be held at once only if slots have whole units.
            if let Some((_, unit)) =
                self.rules.held.iter().find(|(knob, unit)| *knob == changed && value > 1 && to.slot_bytes < *unit)
                && let Some(whole) = self.slot_sizes().iter().find(|slot| *slot >= unit)
            {
                to.slot_bytes = *whole;
            }
            // A new slot size keeps the bytes of the ring and in flight.
            if to.slot_bytes != from.slot_bytes {
                let most = u64::from(RING_SLOTS_MAX);
                let [own, size] = [from, &to].map(|c| u64::from(chunk_bytes(self.rules.unit, c.slot_bytes)));
                let nearest = |slots: u32| ((u64::from(slots) * own + size / 2) / size).clamp(1, most) as u32;
                let ring = u64::from(from.ring_slots) * u64::from(from.slot_bytes);
                to.ring_slots = (ring / u64::from(to.slot_bytes.max(1))).clamp(2, most) as u32;
                (to.flight_high, to.flight_low) = (nearest(from.flight_high), nearest(from.flight_low));
            }
            // Larger slots leave room for fewer of them; a count without room is no move.
            if changed != "ring_slots" {
                self.cut_ring(&mut to);
            }
            if changed == "flight_low" {
                to.flight_high = to.flight_high.max(to.flight_low);
            }
            if changed != "flight_free" {
                // Unscaled, `flight_free` could be all of fewer slots, and `flight_high` would never apply.
                let slots = from.ring_slots.max(1);
                to.flight_free = (from.flight_free * to.ring_slots + slots / 2) / slots;
            }
        }
        self.one_name(&mut to);
        to
    }

    /// Sizes that slots may have, ascending.
    fn slot_sizes(&self) -> &[u32] {
        let sizes = self.knobs().find(|(knob, _)| knob.name == "slot_bytes");
        sizes.map_or(&[], |(_, sizes)| sizes)
    }

    /// Reduces the slots to those that fit.
    fn cut_ring(&self, to: &mut Candidate) {
        let fixed = fixed_bytes(&self.rules.fixed_smem, to);
        let room = u64::from(self.rules.target.spec.smem_bytes_per_block_max).saturating_sub(fixed)
            / u64::from(to.slot_bytes.max(1));
        to.ring_slots = to.ring_slots.min(room.min(u64::from(RING_SLOTS_MAX)) as u32);
    }

    /// Brings knobs that depend on others into their range, and chooses one of several candidates that give the same schedule.
    fn one_name(&self, to: &mut Candidate) {
        if self.rules.target.kind == TargetKind::Cuda {
            to.flight_high = to.flight_high.min(to.ring_slots);
            to.flight_low = to.flight_low.min(to.flight_high);
            // With equal limits, `flight_free` has no effect.
            if to.flight_high == to.flight_low {
                to.flight_free = self.default.flight_free;
            }
            to.flight_free = to.flight_free.min(to.ring_slots);
        }
        // Without a slow eighth, the percentage has no effect.
        if to.light_eighth == 0 {
            to.light_percent = self.default.light_percent;
        }
        // All points that never split give the same schedule: the space has one of them.
        let never_splits = |c: &Candidate| c.splits == 1 || c.split_from >= self.rules.context_max;
        if never_splits(to) {
            to.splits = if never_splits(&self.default) { self.default.splits } else { 1 };
            to.split_from = self.default.split_from;
        }
    }

    /// `moves` knobs set to random values: `choose(n)` gives a number below `n`. `None` if no legal point was found.
    pub fn mutated(&self, from: &Candidate, moves: usize, choose: &mut dyn FnMut(usize) -> usize) -> Option<Candidate> {
        // Half of all random points are legal on the records that come with the tool; 32 tries miss one in 10^9.
        for _ in 0..32 {
            let mut to = from.clone();
            for _ in 0..moves {
                let (at, choices) = self.knobs.get(choose(self.knobs.len().max(1)))?;
                let value = *choices.get(choose(choices.len()))?;
                to = self.with(&to, *at, value);
            }
            if to != *from && self.admits(&to).is_ok() {
                return Some(to);
            }
        }
        None
    }

    /// The legal point of the grid nearest to these numbers. Knobs that are not in this space keep the default.
    pub fn snap(&self, numbers: &Values) -> Option<Candidate> {
        let mut to = self.default.values();
        for (at, choices) in &self.knobs {
            let (Some(to), Some(&wanted)) = (to.get_mut(*at), numbers.get(*at)) else { continue };
            let octaves = |value: u32| ((f64::from(value) + 1.0) / (f64::from(wanted) + 1.0)).log2().abs();
            *to = *choices.iter().min_by(|a, b| octaves(**a).total_cmp(&octaves(**b)))?;
        }
        let mut to = Candidate::of_values(&to);
        if self.rules.target.kind == TargetKind::Cuda && !self.is_wave {
            self.cut_ring(&mut to);
        }
        if !self.is_wave {
            self.one_name(&mut to);
        }
        self.admits(&to).is_ok().then_some(to)
    }

    /// Knobs in which two points differ; the simpler of two candidates has fewer that differ from the default.
    pub fn distance(a: &Candidate, b: &Candidate) -> usize {
        a.values().iter().zip(b.values()).filter(|(a, b)| **a != *b).count()
    }

    /// Points of the grid, legal or not: how large the space is.
    pub fn size(&self) -> u64 {
        self.knobs.iter().map(|(_, values)| values.len() as u64).product()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::ir::layout::streamed_bytes;
    use crate::ir::print::print;
    use crate::lower::lower;
    use crate::model::config::import_config_only;
    use crate::schedule::schedule;
    use std::collections::BTreeMap;

    const CONFIGS: [&str; 3] = [
        include_str!("../../manifests/configs/llama-3.2-1b.json"),
        include_str!("../../manifests/configs/smollm2-135m.json"),
        include_str!("../../manifests/configs/qwen3-0.6b.json"),
    ];

    const BF16: Precision = Precision { weights: DType::Bf16, cache: DType::Bf16, wire: DType::Bf16 };

    /// A model, the record of an H200, and the default candidate.
    fn on_h200(config: &str) -> (ModelGraph, Target, Candidate) {
        let graph = import_config_only(config, 0).expect("a config of the repository").graph;
        let target = Target::builtin("h200").expect("a record");
        let default = Candidate::default_for(&graph, &target, BF16);
        (graph, target, default)
    }

    #[test]
    fn the_documentation_shows_these_knobs() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/search.md");
        let page = std::fs::read_to_string(&path).expect("the page on searching");
        let (start, end) = ("<!-- knobs -->\n", "<!-- end of knobs -->");
        let (head, rest) = page.split_once(start).expect("its table");
        let (table, tail) = rest.split_once(end).expect("the end of it");
        if std::env::var_os("BLESS").is_some() {
            std::fs::write(&path, format!("{head}{start}{}{end}{tail}", knob_table())).expect("a checkout");
            return;
        }
        assert_eq!(table, knob_table(), "BLESS=1 writes the table");
    }

    #[test]
    fn several_devices_have_equal_numbers_of_sms() {
        let (graph, one, _) = on_h200(CONFIGS[0]);
        for devices in [2, 4, 8] {
            let target = one.clone().on_devices(devices);
            let default = Candidate::default_for(&graph, &target, BF16);
            let space = Space::new(&graph, &target, BF16, 4096, default.clone(), |_| 0);
            let (_, sms) = space.knobs().find(|(knob, _)| knob.name == "sms").expect("a knob");
            assert!(sms.len() > 8 && sms.iter().all(|sms| sms.is_multiple_of(devices)), "{devices}: {sms:?}");
            assert_eq!(sms.last(), Some(&(132 * devices)));
            let odd = Candidate { sms: default.sms - 1, ..default };
            let refused = space.admits(&odd).expect_err("devices with other numbers of SMs").to_string();
            assert!(refused.contains(&format!("expected a multiple of {devices}")), "{refused}");
        }
    }

    #[test]
    fn rows_of_fewer_knobs_are_points_of_this_space_and_others_are_not() {
        assert!(Space::contains(&Space::digest()));
        assert!(Space::contains(&Space::digest_of(&KNOBS[..11])));
        let mut other = KNOBS;
        other[3].grid = Grid::Values(&[1, 2]);
        assert!(!Space::contains(&Space::digest_of(&other)));
        assert!(!Space::contains(&Space::digest_of(&KNOBS[1..])));
        assert!(!Space::contains(&Digest::of(b"")));
    }

    #[test]
    fn an_eighth_that_is_spared_streams_less_by_about_its_percentage() {
        let (graph, target, default) = on_h200(CONFIGS[0]);
        let streamed = |c: &Candidate| -> Vec<u64> {
            let program = lower(&graph, "test", BF16, 1024, c).expect("it fits");
            let placed = schedule(program, &target, c).expect("it fits");
            streamed_bytes(&placed)
        };
        let spared = Candidate { light_eighth: 3, light_percent: 12, ..default.clone() };
        let (even, uneven) = (streamed(&default), streamed(&spared));
        assert_eq!(even.iter().sum::<u64>(), uneven.iter().sum::<u64>());
        let light = spared.light_sms();
        assert_eq!(light.len(), 16);
        let mean = |of: &[u64]| of.iter().sum::<u64>() as f64 / of.len() as f64;
        let range = light.start as usize..light.end as usize;
        let ratio = mean(&uneven[range.clone()]) / mean(&even[range]);
        assert!((0.86..0.92).contains(&ratio), "{ratio}");
    }

    #[test]
    fn a_ring_is_carried_over_as_it_is() {
        let (graph, target, default) = on_h200(CONFIGS[1]);
        let space = Space::new(&graph, &target, BF16, 2048, default.clone(), |_| 30_000);
        let ring = "ring_slots=4;slot_bytes=49152;flight_high=2;flight_low=1;flight_free=2;heads_per_task=3";
        let carried = Candidate::parse(ring, &default).expect("a candidate");
        assert_eq!(space.snap(&carried.values()), Some(carried.clone()));
        // A count of slots beyond the room is cut to the room.
        let large = Candidate { ring_slots: 9, ..carried.clone() };
        assert_eq!(space.snap(&large.values()), Some(carried));
    }

    #[test]
    fn a_move_to_other_slots_keeps_what_is_in_flight() {
        let (graph, target, default) = on_h200(CONFIGS[0]);
        let small = "ring_slots=12;slot_bytes=16384;flight_high=3;flight_low=3;flight_free=0;hold_up=0";
        let from = Candidate::parse(small, &default).expect("a candidate");
        let space = Space::new(&graph, &target, BF16, 2048, from.clone(), |_| 30_000);
        let sizes = |(knob, values): (&Knob, &[u32])| (knob.name == "slot_bytes").then(|| values.to_vec());
        // Units of the model's width have 32 KiB: a third of 48 KiB would be empty.
        assert_eq!(space.knobs().find_map(sizes), Some(vec![4096, 8192, 12_288, 16_384, 32_768, 65_536]));
        let neighbours = space.neighbours(&from);
        let moved = neighbours.iter().find(|c| c.slot_bytes == 32_768).expect("it fits");
        assert_eq!((moved.ring_slots, moved.flight_high, moved.flight_low), (6, 2, 2));
        // Two units held at once need slots of whole ones.
        let held = neighbours.iter().find(|c| c.hold_up == 2).expect("it fits");
        assert_eq!(*held, Candidate { hold_up: 2, ..moved.clone() });
        let program = lower(&graph, "test", BF16, 2048, held).expect("it fits");
        assert!(schedule(program, &target, held).is_ok());
        // With three slots, all larger numbers of copies in flight become three.
        let short = Candidate { ring_slots: 3, flight_high: 1, flight_low: 1, ..from };
        let many =
            |c: &&Candidate| c.ring_slots == 3 && c.slot_bytes == 16_384 && (c.flight_high, c.flight_low) == (3, 1);
        assert_eq!(space.neighbours(&short).iter().filter(many).count(), 1);
    }

    /// A knob that changes nothing would waste trials.
    #[test]
    fn every_move_of_one_knob_makes_another_schedule() {
        for (config, target, context_max) in
            CONFIGS.iter().flat_map(|c| [("h200", 4096), ("cpu", 4096), ("h200", 300)].map(|(t, n)| (*c, t, n)))
        {
            let mut graph = import_config_only(config, 0).expect("a config of the repository").graph;
            // Layers are alike, so two suffice.
            graph.layers.truncate(2);
            let target = Target::builtin(target).expect("a record");
            let default = Candidate::default_for(&graph, &target, BF16);
            let space = Space::new(&graph, &target, BF16, context_max, default.clone(), |_| 0);
            let split = space.with(&default, 8, if default.splits == 1 { 4 } else { 1 });
            let mut schedules: BTreeMap<String, Candidate> = BTreeMap::new();
            let mut points: Vec<Candidate> = vec![default.clone(), split.clone()];
            points.extend(space.neighbours(&default).into_iter().chain(space.neighbours(&split)));
            points.sort_by_key(ToString::to_string);
            points.dedup();
            let mut made = 0;
            for point in points {
                let Ok(program) = lower(&graph, "test", BF16, context_max, &point) else { continue };
                let Ok(placed) = schedule(program, &target, &point) else { continue };
                made += 1;
                if let Some(same) = schedules.insert(print(&placed), point.clone()) {
                    panic!("{} at {context_max}: `{point}` makes the schedule of `{same}`", target.name);
                }
            }
            assert!(made > 10, "{} at {context_max}: {made} points fit", target.name);
        }
    }
}
