//! Owns `Candidate`: one unmeasured point of the search space, and `Infeasible`: why a point does not fit.
//!
//! Two different candidates give different artefacts, or a knob has a bug. `Infeasible` is feedback for the search, not a fault.

pub mod wave;

pub use wave::{WAVE_KNOB_COUNT, WAVE_KNOBS, WaveKnob, WaveKnobs};

use crate::ir::op::UNIT_ROWS;
use crate::ir::program::LayerOp;
use crate::ir::schedule::Mechanism;
use crate::ir::variant::{POLL_BATCH, REDUCE_BATCH, prefetch_v_rule, warps_per_head_rule};
use std::fmt;
use thiserror::Error;

/// Most KV splits, for any length of context: each is a task of every layer, and takes memory before a check could refuse it.
pub const SPLITS_MAX: u32 = 1024;

/// All knobs of lowering, scheduling and the kernels of ops. Two candidates that differ give different artefacts, or
/// the difference is a bug of the knob.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Candidate {
    /// SMs that take part, one block each.
    pub sms: u32,
    /// Warps that execute tasks.
    pub consumer_warps: u32,
    pub ring_slots: u32,
    pub slot_bytes: u32,
    /// Most copies in flight while at least `flight_free` slots are free, and otherwise.
    pub flight_high: u32,
    pub flight_low: u32,
    pub flight_free: u32,
    /// Query heads of one attention task while the history is not split.
    pub heads_per_task: u32,
    /// KV splits in the split regime; 1: never split.
    pub splits: u32,
    /// First position of the split regime.
    pub split_from: u32,
    /// How activations travel.
    pub mechanism: Mechanism,
    /// The eighth of the SMs, in the order of their blocks, that streams less; 0: none.
    pub light_eighth: u32,
    /// How much less that eighth streams, percent.
    pub light_percent: u32,
    /// Units of a matvec whose partial sums are reduced at once.
    pub sum_units: u32,
    /// Pairs of packets that a thread waits for at once.
    pub poll_pairs: u32,
    /// Units whose weights a warp holds in registers at once, for each matvec of a layer (`up`: with the gate, if there is
    /// one) and for the head; 0: as many as the rule of `ir::variant::RegisterTiling` says.
    pub hold_qkv: u32,
    pub hold_o: u32,
    pub hold_up: u32,
    pub hold_down: u32,
    pub hold_head: u32,
    /// Warps that share the tiles of a head in attention.
    pub attention_team: u32,
    /// 1: queries stay in registers and values are loaded before the softmax.
    pub attention_ahead: u32,
    /// Rows of the smallest units of a matvec: 8; or 4 or 2, used if they make the longest share shorter.
    pub unit_rows: u32,
    /// 1: every SM adds normalised branches up for itself; 0: the SM that owns the columns does, and publishes.
    pub sums_everywhere: u32,
    /// Of a search of a wave kernel: its choices. The knobs above then decide the schedule from which its plan is derived. Everywhere else all are 0.
    pub waves: WaveKnobs,
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

/// The fields of a candidate, written out once. The code destructures it and builds it from this list, so a new knob does not
/// compile until it is here.
macro_rules! knobs {
    ($($variant:ident $knob:ident)*) => {
        /// A knob of a candidate that decides a schedule; as a number it is its index in [`Values`].
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Knob {
            $($variant,)*
        }

        /// Names of the knobs that decide a schedule.
        const SCHEDULE_KNOBS: [&str; 24] = [$(stringify!($knob)),*];

        impl Candidate {
            /// The knobs as numbers.
            pub fn values(&self) -> Values {
                let Candidate { $($knob,)* waves } = *self;
                let mut values = [0; KNOB_NAMES.len()];
                let (schedule, of_waves) = values.split_at_mut(SCHEDULE_KNOBS.len());
                schedule.copy_from_slice(&[$($knob.number()),*]);
                of_waves.copy_from_slice(&waves.values());
                values
            }

            /// The candidate of these numbers.
            pub fn of_values(values: &Values) -> Candidate {
                let [$($knob,)* waves @ ..] = values;
                Candidate { $($knob: Number::of(*$knob),)* waves: WaveKnobs::of_values(waves) }
            }
        }
    };
}

knobs! {
    Sms sms
    ConsumerWarps consumer_warps
    RingSlots ring_slots
    SlotBytes slot_bytes
    FlightHigh flight_high
    FlightLow flight_low
    FlightFree flight_free
    HeadsPerTask heads_per_task
    Splits splits
    SplitFrom split_from
    Mechanism mechanism
    LightEighth light_eighth
    LightPercent light_percent
    SumUnits sum_units
    PollPairs poll_pairs
    HoldQkv hold_qkv
    HoldO hold_o
    HoldUp hold_up
    HoldDown hold_down
    HoldHead hold_head
    AttentionTeam attention_team
    AttentionAhead attention_ahead
    UnitRows unit_rows
    SumsEverywhere sums_everywhere
}

/// Names of the knobs, in the order in which a candidate is printed: those that decide a schedule, then those of wave kernels.
pub const KNOB_NAMES: [&str; SCHEDULE_KNOBS.len() + WAVE_KNOB_COUNT] = {
    let mut names = [""; SCHEDULE_KNOBS.len() + WAVE_KNOB_COUNT];
    let mut at = 0;
    while at < names.len() {
        names[at] =
            if at < SCHEDULE_KNOBS.len() { SCHEDULE_KNOBS[at] } else { WAVE_KNOBS[at - SCHEDULE_KNOBS.len()].name };
        at += 1;
    }
    names
};

/// Values of a candidate by knob, in the order of [`KNOB_NAMES`]; `mechanism` by its index in [`Mechanism::ALL`].
pub type Values = [u32; KNOB_NAMES.len()];

/// A candidate that this target or model cannot take: ordinary search feedback, never a fault.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Infeasible {
    #[error("`sms` is {sms}, expected 1 to {most} on `{target}`")]
    Sms { sms: u32, most: u32, target: String },
    #[error("`{knob}` is {value}, expected {expected}")]
    Knob { knob: &'static str, value: u32, expected: String },
    #[error("`mechanism` is {mechanism}, expected {expected}")]
    Mechanism { mechanism: &'static str, expected: String },
    #[error("shared memory: the plan takes {bytes} bytes, `{target}` has {most} for one block")]
    SharedMemory { bytes: u64, most: u32, target: String },
    #[error("a ring slot of {slot_bytes} bytes holds fewer than {rows} cache rows of {row_bytes} bytes")]
    HistoryChunk { slot_bytes: u32, rows: u32, row_bytes: u32 },
    #[error(
        "no kernel of `{target}` streams a matrix of {format} (`{matrix}`), expected {expected}; the target `cpu` computes it"
    )]
    Format { matrix: String, format: String, expected: String, cause: FormatCause, target: String },
    #[error("head_dim {head_dim} is odd; rotary pairs and activation packets need an even one")]
    HeadDim { head_dim: u32 },
    #[error("layer {layer} has {what}")]
    Experts { layer: usize, what: String },
    #[error("a norm of whole projections follows the rotation; kernels have norms of heads there")]
    NormAfterRope,
    #[error("layer {layer} has {what}; only ops of attention and of a plain MLP are built alone")]
    Alone { layer: usize, what: &'static str },
    #[error("layer {layer} has a recurrent state, and {what}")]
    State { layer: usize, what: &'static str },
    #[error("layer {layer} has {what}")]
    Feed { layer: usize, what: &'static str },
    #[error("{what} cannot be divided among the {devices} devices of `{target}`")]
    Devices { what: String, devices: u32, target: String },
    #[error("{what} takes {bytes} bytes, `{target}` has {most}")]
    DeviceMemory { what: &'static str, is_cache: bool, bytes: u64, most: u64, target: String },
}

/// Why kernels do not stream a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FormatCause {
    /// Values of another type than those of the other matrices.
    Plain,
    /// Activations are too long for codes of few bits.
    Activations,
    /// Groups of scales that no kernel has.
    Groups,
}

impl Candidate {
    /// The SMs that stream less than the others.
    pub fn light_sms(&self) -> std::ops::Range<u32> {
        match self.light_eighth {
            0 => 0..0,
            eighth => (eighth - 1) * self.sms / 8..eighth * self.sms / 8,
        }
    }

    /// The knob for the units that a warp holds of the matvec `op`, and its value; 0: as many as the rule says.
    pub fn units_per_warp(&self, op: LayerOp) -> Option<(&'static str, u32)> {
        match op {
            LayerOp::Qkv => Some(("hold_qkv", self.hold_qkv)),
            LayerOp::O => Some(("hold_o", self.hold_o)),
            LayerOp::Up => Some(("hold_up", self.hold_up)),
            LayerOp::Down => Some(("hold_down", self.hold_down)),
            LayerOp::Head => Some(("hold_head", self.hold_head)),
            LayerOp::Attention | LayerOp::Router => None,
        }
    }

    /// The base for reading the candidate of an old trial. Knobs that are newer than the first trials have the values that kernels
    /// used before the knob existed, for heads of `head_dim`. The knobs of the first trials are in every text.
    pub fn of_first(head_dim: u32) -> Candidate {
        Candidate {
            light_eighth: 0,
            light_percent: 5,
            sum_units: REDUCE_BATCH,
            poll_pairs: POLL_BATCH,
            hold_qkv: 0,
            hold_o: 0,
            hold_up: 0,
            hold_down: 0,
            hold_head: 0,
            attention_team: warps_per_head_rule(head_dim),
            attention_ahead: u32::from(prefetch_v_rule(head_dim)),
            unit_rows: UNIT_ROWS,
            sums_everywhere: 0,
            waves: WaveKnobs::default(),
            ..Candidate::of_values(&[1; KNOB_NAMES.len()])
        }
    }
}

/// One line, `knob=value` in the order of [`KNOB_NAMES`], as trials store it and `show candidate` prints it. Knobs of wave kernels that are 0 are left
/// out: the text of any other kernel has none.
impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for at in 0..KNOB_NAMES.len() {
            let separator = if at > 0 { ";" } else { "" };
            if at < SCHEDULE_KNOBS.len() || self.values()[at] != 0 {
                write!(f, "{separator}{}", self.knob_text(at))?;
            }
        }
        Ok(())
    }
}

impl Candidate {
    /// `knob=value` of knob number `at` of [`KNOB_NAMES`].
    pub fn knob_text(&self, at: usize) -> String {
        match (KNOB_NAMES.get(at), self.values().get(at)) {
            (Some(&"mechanism"), _) => format!("mechanism={}", self.mechanism.name()),
            (Some(name), Some(value)) => format!("{name}={value}"),
            _ => String::new(),
        }
    }

    /// The candidate of the schedule from which the plan of a wave kernel is derived.
    pub fn without_waves(&self) -> Candidate {
        Candidate { waves: WaveKnobs::default(), ..self.clone() }
    }

    /// Reads what `Display` writes; knobs may come in any order and absent ones keep the value of `base`, whose knobs of wave kernels are 0.
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
            if let Some(wave) = WAVE_KNOBS.iter().find(|wave| wave.name == knob) {
                wave.refuse(*place)?;
            }
        }
        Ok(Candidate::of_values(&values))
    }
}
