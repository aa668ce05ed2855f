//! Owns `Checked`: a proven schedule whose numbers were compared with a reference. Only a checked schedule can be timed.
//!
//! The reference is the f64 specification of the model graph, which shares no code with lowering. A position is reached in one of two ways.
//! *Prompted*: every token before it is decoded. *Filled*: both sides start one position earlier, from the same cache, and decode two steps, so
//! that the second one reads a row that the first one wrote. That cache is made of keys and values that the model computes for a short text
//! (`lanes`). The cost of a prompt of that length decides which way is taken.
//!
//! How far a kernel may be off is measured at each position: `lanes` computes the same rows with random rounding wherever a kernel rounds, and a
//! kernel may be [`FACTOR`] times as far from the reference as they are.
//!
//! Of a schedule that runs one op alone, the reference is the interpreter in f64, all positions are filled with numbers at random, and the
//! tolerance is fixed.

mod alike;
mod beside;
mod chunks;
mod codes;
mod decode;
mod lanes;
mod left;
mod ragged;
mod rows;
mod shared;
mod spans;
mod states;
mod waves;

pub use alike::{Alike, POSITIONS as ALIKE_POSITIONS, SEQUENCES as ALIKE_SEQUENCES, check_alike};
pub use chunks::{ReadsChunks, check_chunks};
pub use codes::{
    CacheContents, DeviceCaches, OneRow, chooses_experts, compare_codes, compare_cpu_codes, stores_codes,
    takes_from_device,
};
pub use decode::{check_decode, compare_decode};
pub use left::{HostNorm, check_left};
pub use ragged::{BothLogits, check_ragged};
pub use rows::check_rows;
pub use shared::{
    ReadAtRandom, SharedTexts, TextSizes, check_shared, check_texts, compared_choices, expect_texts, read_at_random,
};
pub use waves::{POSITIONS as WAVES_POSITIONS, check_waves};

use std::ops::ControlFlow;

use lanes::{Fill, Filler, Rounding};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::cuda::session::{Session, SessionError};
use crate::dtype::{DType, Precision};
use crate::error::Fault;
use crate::interp::{Arithmetic, StepResult};
use crate::interp::{
    CacheKind, Input, Interp, InterpError, Options, Pack, cache_buffers, cache_code, cache_value, state_value,
};
use crate::ir::layout::placed_bytes;
use crate::ir::op::Role;
use crate::ir::schedule::Schedule;
use crate::ir::variant::{AttentionVariant, swizzled_piece};
use crate::ir::{BufferId, GridId};
use crate::model::graph::{ModelGraph, TensorId};
use crate::model::weights::Weights;
use crate::sample::{SampleError, SampleSettings, Sampler, argmax};
use crate::target::Target;
use crate::validate::Validated;

/// Most multiply-adds of a prompt in one lane of the reference, to check the interpreter: some seconds on one core.
const REFERENCE_COST_MAX: u64 = 1_000_000_000;

/// The same to check a device: seconds on its host, which has more cores.
const PROMPT_COST_MAX: u64 = 10_000_000_000;

/// How many times as far from the reference as the worst lane a kernel may be. Of 47 positions of SmolLM2-135M in bf16, a right kernel is 2 to 4 times
/// as far as lanes that round at random at position 0, where the lane that rounds to the nearest is as far, and at most once at all others
/// (docs/numerics.md).
pub const FACTOR: f64 = 5.0;

/// Multiply-adds of the adversarial orders, which run on one thread.
const ADVERSARY_COST_MAX: u64 = 1_000_000_000;

/// Hostile orders that the interpreter tries.
const ADVERSARY_SEEDS: [u64; 2] = [1, 2];

/// Most decoded tokens of one comparison of orders, and the length of the prompt before them.
const GREEDY_STEPS_MAX: usize = 8;
const GREEDY_PROMPT: usize = 3;

/// Random seed of the tokens that a device samples while it is checked.
const SAMPLE_SEED: u64 = 0x73616d70;

/// Random seed of the generated cache before a filled position.
pub const FILL_SEED: u64 = 0x6d6f_6e6f;

/// Largest weight that a failed check does not blame: the largest number of fp16, so no checkpoint of that type has a larger
/// one, and trained weights stay thousands of times below it. Products of larger ones leave the range of fp32.
const WEIGHT_MAX: f32 = 65504.0;

/// Tolerances for the logits of one position.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tolerance {
    /// Largest difference of one logit, as a multiple of the largest logit, or of 1 if all are smaller.
    pub error_scaled: f64,
    /// Norm of the difference divided by norm of the reference.
    pub error_rel_l2: f64,
    /// Divergence of the distribution from the reference's, nats.
    pub kl: f64,
}

impl Tolerance {
    /// Where rounding was not measured. fp32 differs from f64 only by rounding in another order (the goldens of the test models are within
    /// 3e-4). bf16 has 8 bits: a relative error of 0.2 % in each of some ten rounded vectors of a layer, over tens of layers.
    pub fn of(precision: Precision) -> Tolerance {
        let Precision { weights, cache, wire } = precision;
        if [weights, cache, wire] == [DType::F32; 3] {
            Tolerance { error_scaled: 3e-4, error_rel_l2: 3e-4, kl: 1e-3 }
        } else {
            // A single logit may lie far outside the norm's bound; the arg-max rule and the divergence catch what matters.
            Tolerance { error_scaled: 0.2, error_rel_l2: 0.04, kl: 0.05 }
        }
    }

    /// The tolerance of a device. In fp32 it is tighter: the error of the whole vector, relative to its norm.
    pub fn of_device(precision: Precision) -> Tolerance {
        let tolerance = Tolerance::of(precision);
        Tolerance {
            error_rel_l2: if tolerance.error_rel_l2 < 1e-3 { 1e-4 } else { tolerance.error_rel_l2 },
            ..tolerance
        }
    }

    /// What sums in another order may cost where everything is fp32: the least tolerance of every precision.
    fn least(device: bool) -> Tolerance {
        let fp32 = Precision { weights: DType::F32, cache: DType::F32, wire: DType::F32 };
        if device { Tolerance::of_device(fp32) } else { Tolerance::of(fp32) }
    }

    /// At least this one, and [`FACTOR`] times what rounding was measured to cost. A divergence grows with the square of the differences.
    fn with_noise(self, noise: Noise) -> Tolerance {
        Tolerance {
            error_scaled: worst(self.error_scaled, FACTOR * f64::from(noise.error_scaled)),
            error_rel_l2: worst(self.error_rel_l2, FACTOR * f64::from(noise.error_rel_l2)),
            kl: worst(self.kl, FACTOR * FACTOR * f64::from(noise.kl)),
        }
    }
}

/// How far from the reference rounding at random takes the logits of a position: units as in [`Tolerance`].
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Noise {
    pub error_scaled: f32,
    pub error_rel_l2: f32,
    pub kl: f32,
}

impl Noise {
    /// The largest of several roundings of `exact`.
    fn of<'l>(exact: &[f32], lanes: impl IntoIterator<Item = &'l Vec<f32>>) -> Noise {
        let of_lane = |lane: &Vec<f32>| {
            let row = compare_rows(exact, lane);
            Noise {
                error_scaled: (row.error_abs_max / row.scale) as f32,
                error_rel_l2: row.error_rel_l2 as f32,
                kl: row.kl as f32,
            }
        };
        lanes.into_iter().map(of_lane).fold(Noise::default(), Noise::or_worse)
    }

    fn or_worse(self, other: Noise) -> Noise {
        let larger = |a: f32, b: f32| worst(f64::from(a), f64::from(b)) as f32;
        Noise {
            error_scaled: larger(self.error_scaled, other.error_scaled),
            error_rel_l2: larger(self.error_rel_l2, other.error_rel_l2),
            kl: larger(self.kl, other.kl),
        }
    }

    /// The middle of each figure. A row whose lanes happen to be near the exact one has it in place of its own.
    fn median(all: impl Iterator<Item = Noise> + Clone) -> Noise {
        let middle = |of: fn(Noise) -> f32| {
            let mut values: Vec<f32> = all.clone().map(of).collect();
            values.sort_by(f32::total_cmp);
            values.get(values.len() / 2).copied().unwrap_or(0.0)
        };
        Noise {
            error_scaled: middle(|noise| noise.error_scaled),
            error_rel_l2: middle(|noise| noise.error_rel_l2),
            kl: middle(|noise| noise.kl),
        }
    }
}

/// How far the logits are from the reference, over all checked positions.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Figures {
    /// Positions that were compared.
    pub positions: u32,
    /// Largest absolute difference of a logit.
    pub error_abs_max: f64,
    /// Largest `|difference| / |reference|` of a position.
    pub error_rel_l2: f64,
    /// Largest divergence from the reference's distribution, nats.
    pub kl_max: f64,
    /// Positions whose most likely token agrees.
    pub argmax_agree: u32,
    /// Largest share of its tolerance that a figure of a position took. 1 is the limit.
    #[serde(default)]
    pub of_tolerance: f64,
    /// Of a kernel for rows: the largest cost of rounding at the first positions of a text, and at those after them.
    #[serde(default)]
    pub noise: [Noise; 2],
}

/// Positions of a text at which rounding costs trained weights most, and the index of [`Figures::noise`] of those after them.
const FIRST_POSITIONS: u32 = 8;
const AFTER_FIRST: usize = 1;

/// The index of [`Figures::noise`] of a position.
fn noise_of(position: u32) -> usize {
    if position < FIRST_POSITIONS { 0 } else { AFTER_FIRST }
}

/// Numerics that were compared and are within tolerance. Only the functions of this file make one.
#[derive(Debug, Clone, PartialEq)]
pub struct Checked {
    figures: Figures,
}

impl Checked {
    pub fn figures(&self) -> Figures {
        self.figures
    }

    /// The text for the cache.
    pub(crate) fn to_entry(&self) -> Vec<u8> {
        serde_json::to_vec(&self.figures).expect("numbers")
    }

    /// Reads the output of [`Checked::to_entry`]; the cache guarantees the bytes and their key.
    pub(crate) fn from_entry(bytes: &[u8]) -> Option<Checked> {
        Some(Checked { figures: serde_json::from_slice(bytes).ok()? })
    }
}

/// Why a schedule is not `Checked`.
#[derive(Debug, Error)]
pub enum CheckError {
    #[error("position {position}: {what}: expected at most {expected:e}, found {found:e}")]
    Wrong { position: u32, what: &'static str, expected: f64, found: f64, figures: Figures },
    #[error(
        "position {position}: layer {layer}: norm of how far {what} are from the reference by their norm: expected at most {expected:e}, \
         found {found:e}"
    )]
    Cached { position: u32, layer: u32, what: &'static str, expected: f64, found: f64, figures: Figures },
    #[error(
        "position {position}{}: layer {layer}: experts were chosen whose scores are {found:e} below those of others, expected at most \
         {expected:e}",
        of_row(*.row)
    )]
    Routed { position: u32, row: Option<u32>, layer: u32, expected: f64, found: f64, figures: Figures },
    #[error("position {position}: expected token {expected} as the most likely one, found {found}")]
    Argmax { position: u32, expected: u32, found: u32, figures: Figures },
    #[error("position {position}: logit {index} is {value}")]
    NotFinite { position: u32, index: usize, value: f32, figures: Figures },
    #[error("position {position}: order {seed} of the tasks gives other logits than the ordinary one")]
    OrderMatters { position: u32, seed: u64, figures: Figures },
    #[error("position {position}: two runs give different logits")]
    RunsDiffer { position: u32, figures: Figures },
    #[error("position {position}: keys or values have other bits if the chunk of a prompt ends before position {end}")]
    CutsDiffer { position: u32, end: u32, figures: Figures },
    #[error("position {position}: {what}: {differ} of {vocab} logits have other bits than those of the row alone")]
    NotAlike { position: u32, what: String, differ: usize, vocab: usize },
    #[error(
        "position {position}: expected token {expected}, the choice of {sampler} from the logits before it, found {found}"
    )]
    Selected { position: u32, expected: u32, found: u32, sampler: Sampler, figures: Figures },
    #[error(
        "tensor `{tensor}` has the weight {value:e} in row {row}, column {column}: expected finite weights of at most \
         {WEIGHT_MAX}, which fp32 can multiply and sum ({failed})"
    )]
    Weight { tensor: String, row: u32, column: usize, value: f32, failed: String },
    /// The weights of the reference are not there.
    #[error("{}", .0.message)]
    Pack(Fault),
    #[error(transparent)]
    Sample(#[from] SampleError),
    #[error(transparent)]
    Interp(#[from] InterpError),
    #[error(transparent)]
    Session(#[from] SessionError),
}

/// Names the row of a step.
fn of_row(row: Option<u32>) -> String {
    row.map_or(String::new(), |row| format!(", row {row} of the step"))
}

impl CheckError {
    /// Figures of the positions compared before the fault was found; `None` if there were none.
    pub fn figures(&self) -> Option<Figures> {
        let figures = match self {
            CheckError::Wrong { figures, .. }
            | CheckError::Cached { figures, .. }
            | CheckError::Routed { figures, .. }
            | CheckError::Argmax { figures, .. }
            | CheckError::NotFinite { figures, .. }
            | CheckError::OrderMatters { figures, .. }
            | CheckError::RunsDiffer { figures, .. }
            | CheckError::CutsDiffer { figures, .. }
            | CheckError::Selected { figures, .. } => figures,
            CheckError::NotAlike { .. }
            | CheckError::Weight { .. }
            | CheckError::Pack(_)
            | CheckError::Sample(_)
            | CheckError::Interp(_)
            | CheckError::Session(_) => return None,
        };
        (figures.positions > 0).then_some(*figures)
    }
}

impl From<CheckError> for Fault {
    fn from(error: CheckError) -> Fault {
        match error {
            CheckError::Interp(error) => error.into(),
            CheckError::Session(error) => error.into(),
            CheckError::Pack(fault) => fault,
            CheckError::Weight { .. } => Fault::input(error.to_string())
                .with_remedy("fetch the checkpoint again, or convert it again: nothing was timed"),
            _ => Fault::internal(format!("the check failed: {error}"))
                .with_remedy("nothing was timed; report this with the output of `monobloc show schedule`"),
        }
    }
}

/// What failed, or the weight of the checkpoint that explains it. Weights are read only then: an import reads headers alone.
fn blamed(subject: &Subject<'_>, error: CheckError) -> CheckError {
    if matches!(error, CheckError::Interp(_) | CheckError::Session(_)) || subject.weights.synthetic_seed().is_some() {
        return error;
    }
    let Subject { graph, weights, .. } = subject;
    // Of each tensor the first weight that is no number, else the largest.
    let worst_of = |index: usize| {
        let id = TensorId(index as u32);
        let mut values = vec![0.0; weights.cols(id)];
        let mut worst: Option<(u32, usize, f32)> = None;
        for row in 0..weights.rows(id) {
            weights.read_row_f32(id, row, &mut values);
            for (column, &value) in values.iter().enumerate() {
                if !value.is_finite() {
                    return Some((index, row, column, value));
                }
                if value.abs() > worst.map_or(WEIGHT_MAX, |(_, _, most)| most.abs()) {
                    worst = Some((row, column, value));
                }
            }
        }
        worst.map(|(row, column, value)| (index, row, column, value))
    };
    let found: Vec<_> = (0..graph.tensors.len()).into_par_iter().filter_map(worst_of).collect();
    // In the total order of floats a NaN is the largest of all.
    let worst = found.into_iter().max_by(|(.., a), (.., b)| a.abs().total_cmp(&b.abs()));
    match worst.and_then(|(index, row, column, value)| Some((graph.tensors.get(index)?, row, column, value))) {
        Some((tensor, row, column, value)) => {
            CheckError::Weight { tensor: tensor.name.clone(), row, column, value, failed: error.to_string() }
        }
        None => error,
    }
}

/// The subject of a check.
#[derive(Clone)]
pub struct Subject<'a> {
    pub validated: &'a Validated,
    pub target: &'a Target,
    pub graph: &'a ModelGraph,
    pub weights: &'a Weights,
    pub pack: Pack,
    /// Ascending, each below the context.
    pub positions: &'a [u32],
    /// Of a schedule that runs one op alone: the buffers with its outputs, which are compared too.
    /// `None`: the schedule is that of the model.
    pub alone: Option<Vec<BufferId>>,
}

impl Subject<'_> {
    fn outputs(&self) -> &[BufferId] {
        self.alone.as_deref().unwrap_or_default()
    }
}

/// Logits that every schedule of one model has to reproduce, by position. Made once, compared with many candidates.
#[derive(Debug, Clone, PartialEq)]
pub struct Expected {
    /// Ascending.
    rows: Vec<ExpectedRow>,
    /// What the caches of filled positions are made of.
    fill: Fill,
}

#[derive(Debug, Clone, PartialEq)]
struct ExpectedRow {
    position: u32,
    /// Whether its cache is made up.
    filled: bool,
    /// `None`: rounding was not measured, and a fixed tolerance holds.
    noise: Option<Noise>,
    /// `[vocab]`, and the outputs of an op alone.
    logits: Vec<f32>,
    /// By layer, what the step appends to the caches. None of an op alone.
    appended: Vec<Appended>,
}

/// Keys and values of a row in a layer, `[kv_heads * head_dim]` each, and what rounding costs them: norm of the difference by norm.
#[derive(Debug, Clone, PartialEq)]
struct Appended {
    rows: [Vec<f32>; 2],
    noise: [f64; 2],
}

impl Expected {
    fn prompted(&self) -> impl Iterator<Item = &ExpectedRow> {
        self.rows.iter().filter(|row| !row.filled)
    }

    fn filled(&self) -> impl Iterator<Item = &ExpectedRow> {
        self.rows.iter().filter(|row| row.filled)
    }

    /// The bytes for the cache, all in words of 32 bits, little-endian: layers and tokens of the fill and values of a token, then the values, and of each layer count and values of its state;
    /// of each row its position, whether it is filled, whether noise was measured, that noise, count and values of its logits, the number of layers, and of
    /// each the noise, count and values of keys and of values.
    pub(crate) fn to_entry(&self) -> Vec<u8> {
        let mut bytes = vec![];
        let layers = &self.fill.layers;
        let tokens = layers.first().map_or(0, Vec::len);
        let head = [layers.len(), tokens].map(|count| count as u32);
        bytes.extend(head.into_iter().flat_map(u32::to_le_bytes));
        for values in layers.iter().flatten().flatten().chain(&self.fill.states) {
            bytes.extend((values.len() as u32).to_le_bytes());
            bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        }
        for ExpectedRow { position, filled, noise, logits, appended } in &self.rows {
            for word in [*position, u32::from(*filled), u32::from(noise.is_some())] {
                bytes.extend(word.to_le_bytes());
            }
            let Noise { error_scaled, error_rel_l2, kl } = noise.unwrap_or_default();
            bytes.extend([error_scaled, error_rel_l2, kl].into_iter().flat_map(f32::to_le_bytes));
            bytes.extend((logits.len() as u32).to_le_bytes());
            bytes.extend(logits.iter().flat_map(|value| value.to_le_bytes()));
            bytes.extend((appended.len() as u32).to_le_bytes());
            for (values, noise) in appended.iter().flat_map(|Appended { rows, noise }| rows.iter().zip(noise)) {
                bytes.extend((*noise as f32).to_le_bytes());
                bytes.extend((values.len() as u32).to_le_bytes());
                bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            }
        }
        bytes
    }

    /// Reads the output of [`Expected::to_entry`].
    pub(crate) fn from_entry(bytes: &[u8]) -> Option<Expected> {
        let (words, rest) = bytes.as_chunks::<4>();
        let mut words = words.iter().map(|word| u32::from_le_bytes(*word));
        let mut word = || words.next();
        if !rest.is_empty() {
            return None;
        }
        let values = |word: &mut dyn FnMut() -> Option<u32>| {
            let count = word()? as usize;
            (0..count).map(|_| word().map(f32::from_bits)).collect::<Option<Vec<f32>>>()
        };
        let (layers, tokens) = (word()?, word()?);
        let mut fill = Fill::default();
        for _ in 0..layers {
            let of_token = |_| Some([values(&mut word)?, values(&mut word)?]);
            fill.layers.push((0..tokens).map(of_token).collect::<Option<_>>()?);
        }
        for _ in 0..layers {
            fill.states.push(values(&mut word)?);
        }
        let mut rows = vec![];
        while let Some(position) = word() {
            let (filled, measured) = (word()? != 0, word()? != 0);
            let [error_scaled, error_rel_l2, kl] = [word()?, word()?, word()?].map(f32::from_bits);
            let noise = measured.then_some(Noise { error_scaled, error_rel_l2, kl });
            let (logits, layers) = (values(&mut word)?, word()?);
            let of_layer = |_| {
                let mut of_kind = || Some((f64::from(f32::from_bits(word()?)), values(&mut word)?));
                let [(of_keys, keys), (of_values, values)] = [of_kind()?, of_kind()?];
                Some(Appended { rows: [keys, values], noise: [of_keys, of_values] })
            };
            let appended = (0..layers).map(of_layer).collect::<Option<_>>()?;
            rows.push(ExpectedRow { position, filled, noise, logits, appended });
        }
        Some(Expected { rows, fill })
    }
}

/// Compares the interpreter's fast path with the reference, then with hostile orders of the same schedule. What the reference
/// [`takes_from_device`], it takes.
///
/// If the precision is bf16 and the checkpoint's is not, the reference keeps the checkpoint's own weights, so that the
/// rounding of weights counts as error too. `on_step` is called for each of [`expect_steps`].
///
/// # Errors
/// See [`CheckError`]; the first fault ends the check.
pub fn check_cpu(subject: &Subject<'_>, on_step: &dyn Fn()) -> Result<Checked, CheckError> {
    let check = || {
        let schedule = subject.validated.schedule();
        let mut fast = Interp::new(schedule, subject.pack.clone(), Options::fast())?;
        let checked = if takes_from_device(&schedule.program) {
            compare_cpu_codes(subject, &mut fast, on_step)?
        } else {
            compare_cpu(subject, &expect_cpu(subject, on_step)?, &mut fast)?
        };
        check_orders(subject, &mut fast, checked.figures)?;
        Ok(checked)
    };
    check().map_err(|error| blamed(subject, error))
}

/// How often `on_step` is called for the expected logits, of a device or of the interpreter: for each layer, because the reference computes all
/// positions at once, or for each position of an op alone. They take most of the time of a check.
pub fn expect_steps(subject: &Subject<'_>, device: bool) -> u64 {
    let (prompted, filled) = split(subject, if device { PROMPT_COST_MAX } else { REFERENCE_COST_MAX });
    if subject.alone.is_some() {
        return filled.len() as u64;
    }
    let is_read_first = takes_from_device(&subject.validated.schedule().program) && !filled.is_empty();
    lanes::steps(subject.graph) * (u64::from(is_read_first) + u64::from(!prompted.is_empty() || !filled.is_empty()))
}

/// Expected logits for the interpreter's fast path: from the reference, or of an op alone from the interpreter in f64.
/// `on_step` is called for each of [`expect_steps`].
///
/// # Errors
/// Faults of the interpreter.
pub fn expect_cpu(subject: &Subject<'_>, on_step: &dyn Fn()) -> Result<Expected, CheckError> {
    expect(subject, false, on_step)
}

fn expect(subject: &Subject<'_>, device: bool, on_step: &dyn Fn()) -> Result<Expected, CheckError> {
    let Subject { validated, graph, weights, pack, .. } = subject;
    let (prompted, filled) = split(subject, if device { PROMPT_COST_MAX } else { REFERENCE_COST_MAX });
    if subject.alone.is_some() {
        let mut rows = vec![];
        let mut spec = Interp::new(validated.schedule(), pack.clone(), Options::spec())?;
        for &position in filled {
            let cache = CacheContents::AtRandom { rows: filled_rows(position) };
            let logits = filled_row(&mut spec, graph.vocab, position, &cache, subject.outputs())?;
            rows.push(ExpectedRow { position, filled: true, noise: None, logits, appended: vec![] });
            on_step();
        }
        return Ok(Expected { rows, fill: Fill::default() });
    }
    let rounding = Rounding { precision: validated.schedule().program.precision, staged: device };
    let texts = lanes::texts(graph.vocab, rounding.lanes(), prompted, filled);
    let mut pass = lanes::compute(graph, weights, &rounding, &texts, on_step);
    let fill = std::mem::take(&mut pass.fill);
    let mut rows = expected_rows(graph, &texts, pass);
    rows.sort_by_key(|row| row.position);
    Ok(Expected { rows, fill })
}

/// What is expected of the wanted positions of `texts`, in their order.
fn expected_rows(graph: &ModelGraph, texts: &[lanes::Text], pass: lanes::Pass) -> Vec<ExpectedRow> {
    let mut rows = vec![];
    let all: Vec<Noise> = pass.wanted.iter().map(|wanted| Noise::of(&wanted.exact, &wanted.lanes)).collect();
    let middle = Noise::median(all.iter().copied());
    let middles = pass.middles(graph.layers.len());
    for (lanes::Wanted { text, position, exact, .. }, noise) in pass.wanted.into_iter().zip(all) {
        let (filled, noise) = (texts[text].first > 0, Some(noise.or_worse(middle)));
        // One layer after another.
        let of_row = pass.computed.iter().filter(|of| (of.text, of.position) == (text, position));
        let appended = of_row.map(|of| Appended {
            rows: [0, 1].map(|kind| of.rows[kind].iter().map(|&value| value as f32).collect()),
            noise: [0, 1].map(|kind| of.noise[kind].max(middles[of.layer][kind])),
        });
        rows.push(ExpectedRow { position, filled, noise, logits: exact, appended: appended.collect() });
    }
    rows
}

/// Compares the interpreter's fast path with the expected logits. One that [`stores_codes`] is compared by [`compare_cpu_codes`].
///
/// # Errors
/// See [`CheckError`].
pub fn compare_cpu(subject: &Subject<'_>, expected: &Expected, fast: &mut Interp) -> Result<Checked, CheckError> {
    let Subject { graph, weights, .. } = subject;
    let precision = subject.validated.schedule().program.precision;
    let mut judge = Judge::new(Tolerance::of(precision));
    let caches = DeviceCaches::new(subject.validated.schedule(), fast);
    let appended = |fast: &Interp, position: u32| {
        let bytes = (0..fast.caches().len()).map(|cache| fast.read_cache(cache, position as usize));
        caches.values(graph.layers.len(), &bytes.collect::<Vec<_>>())
    };
    let prompted: Vec<u32> = expected.prompted().map(|row| row.position).collect();
    if let Some(&last) = prompted.last() {
        let mut found = vec![];
        fast.reset();
        fast.launch(&inputs(&check_ids(graph.vocab, last + 1)), |step| {
            keep(step, &prompted, &mut found);
            ControlFlow::Continue(())
        })?;
        for (row, found) in expected.prompted().zip(&found) {
            judge.compare_expected(graph, row, found, || Ok(appended(fast, row.position)), false)?;
        }
    }
    for row in expected.filled() {
        let cache = expected.cache(subject, weights, row);
        let found = filled_row(fast, graph.vocab, row.position, &cache, subject.outputs())?;
        judge.compare_expected(graph, row, &found, || Ok(appended(fast, row.position)), false)?;
    }
    Ok(Checked { figures: judge.figures })
}

impl Expected {
    /// What the cache of a filled position has before it.
    fn cache<'e>(&'e self, subject: &Subject<'e>, weights: &Weights, row: &ExpectedRow) -> CacheContents<'e> {
        let rows = filled_rows(row.position);
        match row.noise {
            None => CacheContents::AtRandom { rows },
            Some(_) => {
                let cache = subject.validated.schedule().program.precision.cache;
                CacheContents::OfText(Filler::new(subject.graph, weights, cache, &self.fill, rows))
            }
        }
    }
}

/// Compares a device with the reference; every launch runs twice into poisoned logits and must give the same
/// bits, and what the device selects must be the arg-max of what it computed. Where the reference [`takes_from_device`], what is expected is
/// different for each kernel.
///
/// `steps_max` is what the session was loaded with. `on_step` is called for each of [`expect_steps`].
///
/// # Errors
/// See [`CheckError`]; a session that hung is lost.
pub fn check_cuda(
    subject: &Subject<'_>,
    session: &mut Session,
    steps_max: u32,
    on_step: &dyn Fn(),
) -> Result<Checked, CheckError> {
    let checked = if takes_from_device(&subject.validated.schedule().program) {
        codes::check_codes(subject, session, steps_max, on_step)
    } else {
        expect_cuda(subject, on_step).and_then(|expected| compare_cuda(subject, &expected, session, steps_max))
    };
    checked.map_err(|error| blamed(subject, error))
}

/// Expected logits for a device. See [`expect_cpu`].
///
/// # Errors
/// Faults of the interpreter.
pub fn expect_cuda(subject: &Subject<'_>, on_step: &dyn Fn()) -> Result<Expected, CheckError> {
    expect(subject, true, on_step)
}

/// Compares a device that stores no codes with the expected logits. See [`check_cuda`].
///
/// # Errors
/// See [`CheckError`]; a session that hung is lost.
pub fn compare_cuda(
    subject: &Subject<'_>,
    expected: &Expected,
    session: &mut Session,
    steps_max: u32,
) -> Result<Checked, CheckError> {
    let schedule = subject.validated.schedule();
    let vocab = subject.graph.vocab;
    let mut judge = Judge::new(Tolerance::of_device(schedule.program.precision));
    let caches = DeviceCaches::of_values(schedule);
    let graph = subject.graph;
    let appended = |session: &Session, position: u32| {
        let bytes = caches.read(u64::from(position), position, &|at, bytes| session.read_cache(at, bytes))?;
        Ok(caches.values(graph.layers.len(), &bytes))
    };
    let prompted: Vec<u32> = expected.prompted().map(|row| row.position).collect();
    if let Some(&last) = prompted.last() {
        let ids = check_ids(vocab, last + 1);
        let found = twice(judge.figures, &prompted, || device_logits(session, &ids, 0, steps_max, vocab, &prompted))?;
        for (row, found) in expected.prompted().zip(&found) {
            judge.compare_expected(graph, row, found, || appended(session, row.position), true)?;
        }
    }
    let outputs = subject.outputs();
    for row in expected.filled() {
        let (position, rows) = (row.position, filled_rows(row.position));
        expected.cache(subject, subject.weights, row).put_on_device(session, schedule)?;
        let states = KeptStates::before(rows, session, schedule)?;
        let ids = check_ids(vocab, position + 1);
        let found = twice(judge.figures, &[position], || {
            states.put_back(session)?;
            let mut row = device_logits(session, &ids, rows, steps_max, vocab, &[position])?.concat();
            for output in outputs {
                row.extend(session.exchanged(*output, 0)?);
            }
            Ok(vec![row])
        })?
        .concat();
        judge.compare_expected(graph, row, &found, || appended(session, position), true)?;
    }
    check_selection(session, vocab, steps_max, schedule.program.context_max, judge.figures)?;
    Ok(Checked { figures: judge.figures })
}

/// Token ids of a check: every bit of the vocabulary takes part, and a length is a prefix of any longer one.
pub fn check_ids(vocab: u32, count: u32) -> Vec<u32> {
    (0..count)
        .map(|i| {
            let hash = blake3::hash(format!("check {i}").as_bytes());
            let word = hash.as_bytes().iter().take(8).fold(0u64, |word, &byte| word << 8 | u64::from(byte));
            (word % u64::from(vocab.max(1))) as u32
        })
        .collect()
}

/// Positions that a prompt may lead to, and those that need a made-up cache.
/// The outputs of an op alone can be read after the last step only, so all of its positions are filled.
fn split<'p>(subject: &Subject<'p>, cost_max: u64) -> (&'p [u32], &'p [u32]) {
    let cost = |position: u32| subject.graph.parameter_count().saturating_mul(u64::from(position) + 1);
    let prompted = |&position: &u32| subject.alone.is_none() && cost(position) <= cost_max;
    subject.positions.split_at(subject.positions.partition_point(prompted))
}

fn inputs(ids: &[u32]) -> Vec<Input> {
    ids.iter().copied().map(Input::Token).collect()
}

fn keep(step: &StepResult<'_>, positions: &[u32], rows: &mut Vec<Vec<f32>>) {
    if positions.contains(&step.position) {
        rows.push(step.logits.to_vec());
    }
}

/// Rows of the made-up cache before a filled position: all but the one that the first of the two steps writes.
fn filled_rows(position: u32) -> u32 {
    position.saturating_sub(1)
}

/// Logits of a filled position, followed by the values that the step left in `outputs`.
fn filled_row(
    interp: &mut Interp,
    vocab: u32,
    position: u32,
    cache: &CacheContents<'_>,
    outputs: &[BufferId],
) -> Result<Vec<f32>, InterpError> {
    interp.reset();
    let rows = cache.rows();
    cache.put(interp)?;
    let ids = check_ids(vocab, position + 1);
    let mut logits = vec![];
    interp.launch(&inputs(ids.get(rows as usize..).unwrap_or(&[])), |step| {
        step.logits.copy_to(&mut logits);
        ControlFlow::Continue(())
    })?;
    outputs.iter().for_each(|output| logits.extend(interp.exchanged(*output, 0)));
    Ok(logits)
}

/// Decodes a few tokens in the ordinary order and in hostile ones: tokens and logits have the same bits.
fn check_orders(subject: &Subject<'_>, fast: &mut Interp, figures: Figures) -> Result<(), CheckError> {
    let schedule = subject.validated.schedule();
    let affordable = ADVERSARY_COST_MAX / subject.graph.parameter_count().max(1) / ADVERSARY_SEEDS.len() as u64;
    let steps = (affordable as usize).clamp(1, GREEDY_STEPS_MAX) + GREEDY_PROMPT;
    let steps = steps.min(schedule.program.context_max as usize);
    let mut inputs = inputs(&check_ids(subject.graph.vocab, GREEDY_PROMPT as u32));
    inputs.resize(steps, Input::Selected);
    let run = |interp: &mut Interp| -> Result<Vec<(u32, Vec<u32>)>, InterpError> {
        let mut rows = vec![];
        interp.reset();
        interp.launch(&inputs, |step| {
            rows.push((step.token, step.logits.to_vec().into_iter().map(f32::to_bits).collect()));
            ControlFlow::Continue(())
        })?;
        Ok(rows)
    };
    let ordinary = run(fast)?;
    for seed in ADVERSARY_SEEDS {
        let options = Options::adversarial(Arithmetic::Fast, seed);
        let hostile = run(&mut Interp::new(schedule, subject.pack.clone(), options)?)?;
        if let Some(position) = ordinary.iter().zip(&hostile).position(|(a, b)| a != b) {
            return Err(CheckError::OrderMatters { position: position as u32, seed, figures });
        }
    }
    Ok(())
}

/// Logits of the wanted positions, teacher-forced from `first` on; the cache holds the positions before it.
fn device_logits(
    session: &mut Session,
    ids: &[u32],
    first: u32,
    steps_max: u32,
    vocab: u32,
    wanted: &[u32],
) -> Result<Vec<Vec<f32>>, SessionError> {
    session.start(ids, &[])?;
    let mut rows = vec![];
    let mut position = first;
    while (position as usize) < ids.len() {
        let steps = steps_max.min(ids.len() as u32 - position);
        session.poison_logits()?;
        session.run(position, steps, true)?;
        let logits = session.logits(steps)?;
        for (at, row) in (position..).zip(logits.chunks_exact(vocab as usize)) {
            if wanted.contains(&at) {
                rows.push(row.to_vec());
            }
        }
        position += steps;
    }
    Ok(rows)
}

/// Runs twice and compares bits: a race that the proof misses would show here.
fn twice(
    figures: Figures,
    positions: &[u32],
    mut run: impl FnMut() -> Result<Vec<Vec<f32>>, SessionError>,
) -> Result<Vec<Vec<f32>>, CheckError> {
    let (first, second) = (run()?, run()?);
    let differ = |a: &[f32], b: &[f32]| a.iter().map(|v| v.to_bits()).ne(b.iter().map(|v| v.to_bits()));
    match positions.iter().zip(first.iter().zip(&second)).find(|(_, (a, b))| differ(a, b)) {
        Some((&position, _)) => Err(CheckError::RunsDiffer { position, figures }),
        None => Ok(first),
    }
}

/// Lets the device choose tokens, greedily and by sampling, and compares each with the choice that the same logits give on
/// the host.
fn check_selection(
    session: &mut Session,
    vocab: u32,
    steps_max: u32,
    context_max: u32,
    figures: Figures,
) -> Result<(), CheckError> {
    let by_chance = |temperature, top_k, top_p| SampleSettings { temperature, top_k, top_p, seed: SAMPLE_SEED };
    let ways = [
        SampleSettings::greedy(),
        by_chance(1.0, None, None),
        by_chance(1.5, Some(20), Some(0.9)),
        by_chance(0.8, None, Some(0.95)),
    ];
    let checked = ways.iter().try_for_each(|settings| {
        let sampler = settings.resolve()?;
        session.sample(sampler);
        check_choices(session, &sampler, vocab, steps_max, context_max, figures)
    });
    session.sample(Sampler::greedy());
    checked
}

fn check_choices(
    session: &mut Session,
    sampler: &Sampler,
    vocab: u32,
    steps_max: u32,
    context_max: u32,
    figures: Figures,
) -> Result<(), CheckError> {
    let prompt = check_ids(vocab, (GREEDY_PROMPT as u32).min(context_max));
    let steps = (prompt.len() as u32 + GREEDY_STEPS_MAX as u32).min(steps_max).min(context_max);
    session.start(&prompt, &[])?;
    session.poison_logits()?;
    session.run(0, steps, true)?;
    let logits = session.logits(steps)?;
    for (position, row) in (1..steps).zip(logits.chunks_exact(vocab as usize)) {
        if (position as usize) < prompt.len() {
            continue;
        }
        let (expected, found) = (sampler.choose(row, position)?, session.token(position)?);
        if expected != found {
            return Err(CheckError::Selected { position, expected, found, sampler: *sampler, figures });
        }
    }
    Ok(())
}

/// Writes rows `0..rows` of every cache of the device with the values that `Interp::fill_cache` makes.
///
/// On the device a cache buffer is `[kv_head][row][pitch]`, so that the history of one head is one run of bytes. Rows are
/// swizzled where the kernel keeps them so.
pub(crate) fn fill_device_cache(
    session: &mut Session,
    schedule: &Schedule,
    seed: u64,
    rows: u32,
) -> Result<(), SessionError> {
    fill_device_states(session, schedule, seed, rows)?;
    let value = |layer, kind, row, column| cache_value(seed, layer, kind, row, column);
    write_device_cache(session, schedule, rows, &|layer, kind, row, columns, is_coded| {
        let values = columns.map(|column| value(layer, kind, row, column));
        values.map(|value| if is_coded { Stored::Code(cache_code(value)) } else { Stored::Value(value) }).collect()
    })
}

/// The recurrent states of a device before a position, for a second run from there: it finds its cache as the first one did, but not its states.
struct KeptStates {
    position: u32,
    /// Place in the arena, and 16-bit words.
    words: Vec<(u64, Vec<u16>)>,
}

impl KeptStates {
    /// Those that are there; none are needed before position 0.
    fn before(position: u32, session: &Session, schedule: &Schedule) -> Result<KeptStates, SessionError> {
        let mut words = vec![];
        for (_, buffer) in schedule.program.states().filter(|_| position > 0) {
            let Some(at) = schedule.placement.get(buffer.index()).copied().flatten() else { continue };
            let bytes = placed_bytes(&schedule.program.buffers[buffer.index()]) as usize;
            words.push((at, session.read_cache(at, bytes)?));
        }
        Ok(KeptStates { position, words })
    }

    fn put_back(&self, session: &mut Session) -> Result<(), SessionError> {
        for (at, words) in &self.words {
            session.upload_cache(*at, bytemuck::cast_slice(words))?;
        }
        session.state_is_before(self.position);
        Ok(())
    }
}

/// Makes the recurrent states of the device those that `Interp::fill_cache` makes.
pub(crate) fn fill_device_states(
    session: &mut Session,
    schedule: &Schedule,
    seed: u64,
    position: u32,
) -> Result<(), SessionError> {
    let state = |layer, count| (0..count).map(|column| state_value(seed, layer, column)).collect();
    write_device_states(session, schedule, position, &state)
}

/// Puts recurrent states on the device, as those before `position`. `state_of` makes the values of a layer from its number and how many they are.
fn write_device_states(
    session: &mut Session,
    schedule: &Schedule,
    position: u32,
    state_of: &dyn Fn(u32, u32) -> Vec<f32>,
) -> Result<(), SessionError> {
    for (layer, buffer) in schedule.program.states() {
        let Some(at) = schedule.placement.get(buffer.index()).copied().flatten() else { continue };
        let values = state_of(layer.0, schedule.program.buffers[buffer.index()].cols);
        session.upload_cache(at, bytemuck::cast_slice(&values))?;
    }
    session.state_is_before(position);
    Ok(())
}

/// What a cache keeps of a value.
#[derive(Clone, Copy)]
enum Stored {
    Value(f32),
    /// In fp8, its code.
    Code(u8),
}

/// The values of columns of a row of a layer's keys or values, by column with padding; the last argument says whether codes are wanted.
type ValuesOf<'a> = dyn Fn(u32, CacheKind, u32, std::ops::Range<u32>, bool) -> Vec<Stored> + Sync + 'a;

/// Writes rows `0..rows` of every cache of the device. On the device a cache buffer is `[kv_head][row][pitch]`.
fn write_device_cache(
    session: &mut Session,
    schedule: &Schedule,
    rows: u32,
    values_of: &ValuesOf<'_>,
) -> Result<(), SessionError> {
    for (layer, (keys, values)) in cache_buffers(&schedule.program) {
        for (kind, id) in [(CacheKind::Key, keys), (CacheKind::Value, values)] {
            let Some(buffer) = schedule.program.buffers.get(id.index()) else { continue };
            let Some(at) = schedule.placement.get(id.index()).copied().flatten() else { continue };
            let reader = reader_of(schedule, id);
            let dim = reader.map_or(buffer.cols, |variant| variant.pitch).max(1);
            let swizzled = reader.is_some_and(|variant| variant.swizzled);
            let row_bytes = dim as usize * buffer.dtype.bytes();
            for head in 0..buffer.cols / dim {
                let mut bytes = vec![0u8; rows as usize * row_bytes];
                bytes.par_chunks_exact_mut(row_bytes).zip(0..rows).for_each(|(out, row)| {
                    let columns = head * dim..(head + 1) * dim;
                    let values = values_of(layer, kind, row, columns, buffer.dtype == DType::E4m3);
                    write_row(buffer.dtype, swizzled.then_some(row), out, &values);
                });
                let offset = at + u64::from(head) * u64::from(buffer.rows) * row_bytes as u64;
                session.upload_cache(offset, &bytes)?;
            }
        }
    }
    Ok(())
}

/// The cache row of one KV head, with the values of its columns; `swizzled`: the position whose swizzle the row has.
fn write_row(dtype: DType, swizzled: Option<u32>, out: &mut [u8], values: &[Stored]) {
    const PIECE: usize = 16;
    let row_bytes = out.len() as u32;
    for (d, value) in values.iter().enumerate() {
        let at = d * dtype.bytes();
        let place = |position| swizzled_piece(position, (at / PIECE) as u32, row_bytes) as usize;
        let piece = swizzled.map_or(at / PIECE, place);
        let out = &mut out[piece * PIECE + at % PIECE..][..dtype.bytes()];
        match (*value, dtype) {
            (Stored::Code(code), _) => out.copy_from_slice(&[code]),
            (Stored::Value(value), DType::Bf16) => out.copy_from_slice(&half::bf16::from_f32(value).to_le_bytes()),
            (Stored::Value(value), _) => out.copy_from_slice(&value.to_le_bytes()),
        }
    }
}

/// How an attention that reads a cache buffer is done.
fn reader_of(schedule: &Schedule, cache: BufferId) -> Option<&AttentionVariant> {
    (0..).map(GridId).zip(&schedule.program.grids).find_map(|(id, grid)| {
        let reads = |role| grid.operand(role).is_some_and(|operand| operand.buffer == cache);
        (reads(Role::HistoryK) || reads(Role::HistoryV)).then(|| schedule.attention_variant(id)).flatten()
    })
}

/// Compares rows of logits and keeps the worst of each figure.
struct Judge {
    tolerance: Tolerance,
    figures: Figures,
}

impl Judge {
    fn new(tolerance: Tolerance) -> Judge {
        Judge { tolerance, figures: Figures::default() }
    }

    /// Compares logits, and the keys and values that the step appended, with tolerances that follow from what rounding costs there. Where that was
    /// not measured, logits and the outputs of an op alone are compared with the fixed tolerance.
    fn compare_expected(
        &mut self,
        graph: &ModelGraph,
        row: &ExpectedRow,
        found: &[f32],
        appended: impl FnOnce() -> Result<Vec<[Vec<f64>; 2]>, SessionError>,
        device: bool,
    ) -> Result<(), CheckError> {
        let Some(noise) = row.noise else { return self.compare_row(graph.vocab, row.position, &row.logits, found) };
        let least = Tolerance::least(device);
        let fixed = std::mem::replace(&mut self.tolerance, least.with_noise(noise));
        let compared = self.compare(row.position, &row.logits, found);
        self.tolerance = fixed;
        compared?;
        for ((layer, expected), found) in (0u32..).zip(&row.appended).zip(appended()?) {
            // A layer with a recurrent state alone appends nothing.
            let Some(attention) = graph.layers[layer as usize].history() else { continue };
            let dim = attention.head_dim as usize;
            for (kind, what) in ["keys", "values"].into_iter().enumerate() {
                let wide: Vec<f64> = expected.rows[kind].iter().map(|&value| f64::from(value)).collect();
                let distance = lanes::head_distance(&wide, &found[kind], dim);
                let allowed = worst(least.error_rel_l2, FACTOR * expected.noise[kind]);
                self.cached(row.position, (layer, what), allowed, distance)?;
            }
        }
        Ok(())
    }

    /// The distance of keys or values of a layer against its tolerance.
    fn cached(
        &mut self,
        position: u32,
        (layer, what): (u32, &'static str),
        expected: f64,
        found: f64,
    ) -> Result<(), CheckError> {
        self.figures.of_tolerance = worst(self.figures.of_tolerance, if found == 0.0 { 0.0 } else { found / expected });
        if is_beyond(found, expected) {
            let figures = self.figures;
            return Err(CheckError::Cached { position, layer, what, expected, found, figures });
        }
        Ok(())
    }

    /// Compares a row of logits with a tolerance of [`FACTOR`] times `noise`, and at least that of sums in another order on a device.
    fn compare_noisy(
        &mut self,
        position: u32,
        expected: &[f32],
        found: &[f32],
        noise: Noise,
    ) -> Result<(), CheckError> {
        let fixed = std::mem::replace(&mut self.tolerance, Tolerance::least(true).with_noise(noise));
        let compared = self.compare(position, expected, found);
        self.tolerance = fixed;
        compared
    }

    /// The figure of a position against its tolerance.
    fn bound(&mut self, position: u32, what: &'static str, expected: f64, found: f64) -> Result<(), CheckError> {
        let figures = &mut self.figures;
        figures.of_tolerance = worst(figures.of_tolerance, if found == 0.0 { 0.0 } else { found / expected });
        if is_beyond(found, expected) {
            return Err(CheckError::Wrong { position, what, expected, found, figures: *figures });
        }
        Ok(())
    }

    /// The first `vocab` values are logits, the rest the outputs of an op alone.
    fn compare_row(&mut self, vocab: u32, position: u32, expected: &[f32], found: &[f32]) -> Result<(), CheckError> {
        let at = |row: &[f32]| row.len().min(vocab as usize);
        let (expected, made) = expected.split_at(at(expected));
        let (found, found_made) = found.split_at(at(found));
        self.compare(position, expected, found)?;
        if made.is_empty() && found_made.is_empty() {
            return Ok(());
        }
        // Activations are no scores: their arg-max means nothing.
        let row = compare_rows(made, found_made);
        self.figures.error_abs_max = worst(self.figures.error_abs_max, row.error_abs_max);
        self.figures.error_rel_l2 = worst(self.figures.error_rel_l2, row.error_rel_l2);
        let figures = self.figures;
        if let Some((index, &value)) = found_made.iter().enumerate().find(|(_, value)| !value.is_finite()) {
            return Err(CheckError::NotFinite { position, index: vocab as usize + index, value, figures });
        }
        let Tolerance { error_scaled, error_rel_l2, .. } = self.tolerance;
        self.bound(position, "largest difference of an output", error_scaled * row.scale, row.error_abs_max)?;
        let what = "norm of the difference of outputs by that of the reference";
        self.bound(position, what, error_rel_l2, row.error_rel_l2)
    }

    fn compare(&mut self, position: u32, expected: &[f32], found: &[f32]) -> Result<(), CheckError> {
        let row = compare_rows(expected, found);
        let (expected_best, found_best) = (argmax(expected).unwrap_or(0), argmax(found).unwrap_or(0));
        let figures = &mut self.figures;
        figures.positions += 1;
        figures.error_abs_max = worst(figures.error_abs_max, row.error_abs_max);
        figures.error_rel_l2 = worst(figures.error_rel_l2, row.error_rel_l2);
        figures.kl_max = worst(figures.kl_max, row.kl);
        figures.argmax_agree += u32::from(expected_best == found_best);
        let figures = *figures;
        if let Some((index, &value)) = found.iter().enumerate().find(|(_, value)| !value.is_finite()) {
            return Err(CheckError::NotFinite { position, index, value, figures });
        }
        let Tolerance { error_scaled, error_rel_l2, kl } = self.tolerance;
        self.bound(position, "largest difference of a logit", error_scaled * row.scale, row.error_abs_max)?;
        self.bound(position, "norm of the difference by norm of the reference", error_rel_l2, row.error_rel_l2)?;
        self.bound(position, "divergence in nats", kl, row.kl)?;
        let figures = self.figures;
        // Another winner is a tie within the tolerance, or a fault that the norms did not see.
        let at = |token: u32| expected.get(token as usize).copied().map_or(0.0, f64::from);
        let margin = at(expected_best) - at(found_best);
        if expected_best != found_best && margin > 2.0 * self.tolerance.error_rel_l2 * row.scale {
            return Err(CheckError::Argmax { position, expected: expected_best, found: found_best, figures });
        }
        Ok(())
    }
}

/// Whether a figure breaks its bound. A NaN does, and nothing keeps a bound that is no number.
fn is_beyond(found: f64, bound: f64) -> bool {
    found.is_nan() || !bound.is_finite() || found > bound
}

/// The larger one; a NaN is larger than any number.
fn worst(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}

struct RowFigures {
    error_abs_max: f64,
    error_rel_l2: f64,
    kl: f64,
    /// Largest absolute logit of the reference, at least 1.
    scale: f64,
}

fn compare_rows(expected: &[f32], found: &[f32]) -> RowFigures {
    // Rows of different lengths differ in what one of them lacks.
    let missing = if expected.len() == found.len() { 0.0 } else { f64::INFINITY };
    let pairs = || expected.iter().zip(found).map(|(&e, &f)| (f64::from(e), f64::from(f)));
    let error_abs_max = pairs().fold(missing, |most, (e, f)| worst(most, (e - f).abs()));
    let difference: f64 = pairs().map(|(e, f)| (e - f) * (e - f)).sum();
    let norm: f64 = pairs().map(|(e, _)| e * e).sum();
    let log_sum = |values: &[f32]| {
        let most = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = values.iter().map(|&v| (f64::from(v) - f64::from(most)).exp()).sum();
        f64::from(most) + sum.ln()
    };
    let (log_expected, log_found) = (log_sum(expected), log_sum(found));
    let kl = pairs()
        .map(|(e, f)| {
            let log_p = e - log_expected;
            log_p.exp() * (log_p - (f - log_found))
        })
        .sum::<f64>();
    RowFigures {
        error_abs_max,
        error_rel_l2: if norm > 0.0 { (difference / norm).sqrt() } else { difference.sqrt() },
        // Rounding may leave a sum of equal terms below zero.
        kl: if kl < 0.0 { 0.0 } else { kl },
        scale: expected.iter().map(|&v| f64::from(v.abs())).fold(1.0, f64::max),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FP32: Tolerance = Tolerance { error_scaled: 3e-4, error_rel_l2: 3e-4, kl: 1e-3 };

    fn judged(expected: &[f32], found: &[f32]) -> (Result<(), CheckError>, Figures) {
        let mut judge = Judge::new(FP32);
        let verdict = judge.compare(7, expected, found);
        (verdict, judge.figures)
    }

    #[test]
    fn differences_are_measured_against_the_largest_logit() {
        let (verdict, figures) = judged(&[10.0, -30.0, 0.0], &[10.0, -30.008, 0.0]);
        assert!(verdict.is_ok(), "{verdict:?}");
        assert!((figures.error_abs_max - 0.008).abs() < 1e-5, "{figures:?}");
        assert_eq!((figures.positions, figures.argmax_agree), (1, 1));
        let (verdict, _) = judged(&[10.0, -30.0, 0.0], &[10.0, -30.01, 0.0]);
        assert!(matches!(verdict, Err(CheckError::Wrong { position: 7, what, .. }) if what.starts_with("largest")));
    }

    #[test]
    fn what_is_no_number_fails_and_stays_visible() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let (verdict, figures) = judged(&[1.0, 2.0], &[1.0, bad]);
            assert!(matches!(verdict, Err(CheckError::NotFinite { index: 1, .. })), "{bad}: {verdict:?}");
            assert!(!figures.error_abs_max.is_finite(), "{figures:?}");
        }
        // A reference of NaN agrees with nothing.
        let (verdict, _) = judged(&[f32::NAN, 2.0], &[1.0, 2.0]);
        assert!(matches!(verdict, Err(CheckError::Wrong { .. })), "{verdict:?}");
        let (verdict, _) = judged(&[1.0, 2.0, 3.0], &[1.0, 2.0]);
        assert!(matches!(verdict, Err(CheckError::Wrong { .. })), "{verdict:?}");
    }

    #[test]
    fn another_winner_is_a_tie_or_a_fault() {
        let (verdict, figures) = judged(&[1.0, 1.0001], &[1.0001, 1.0]);
        assert!(verdict.is_ok(), "{verdict:?}");
        assert_eq!(figures.argmax_agree, 0);
        let mut judge = Judge::new(Tolerance { error_scaled: 1.0, kl: 10.0, ..FP32 });
        let flat = vec![100.0; 100_000];
        let (mut expected, mut found) = (flat.clone(), flat);
        (expected[5], found[6]) = (100.1, 100.1);
        assert!(matches!(judge.compare(0, &expected, &found), Err(CheckError::Argmax { expected: 5, found: 6, .. })));
    }

    #[test]
    fn divergence_is_that_of_the_distributions() {
        let row = compare_rows(&[0.0, 0.0], &[0.0, 3.0_f32.ln()]);
        // p = (1/2, 1/2), q = (1/4, 3/4): 1/2 ln 2 + 1/2 ln 2/3.
        assert!((row.kl - 0.5 * (2.0f64.ln() + (2.0f64 / 3.0).ln())).abs() < 1e-7, "{}", row.kl);
        assert_eq!(compare_rows(&[5.0, 1.0], &[5.0, 1.0]).kl, 0.0);
    }

    #[test]
    fn rounding_widens_a_tolerance_that_is_a_number() {
        let noise = Noise { error_scaled: 1.0 / 64.0, error_rel_l2: 1.0 / 32.0, kl: 1.0 / 1024.0 };
        let least = Tolerance::least(true);
        let wide = least.with_noise(noise);
        assert_eq!((wide.error_scaled, wide.error_rel_l2, wide.kl), (5.0 / 64.0, 5.0 / 32.0, 25.0 / 1024.0));
        assert_eq!(least.with_noise(Noise::default()), least);
        let judged = |error_rel_l2| {
            let mut judge = Judge::new(FP32);
            judge.compare_noisy(3, &[1.0, 2.0], &[1.0, 2.01], Noise { error_rel_l2, ..noise })
        };
        assert!(judged(0.02).is_ok());
        for bad in [0.0, f32::NAN, f32::INFINITY] {
            assert!(matches!(judged(bad), Err(CheckError::Wrong { position: 3, .. })), "{bad}");
        }
    }

    #[test]
    fn expectations_come_back_from_their_bytes() {
        let appended = Appended { rows: [vec![1.0, 2.0], vec![3.0, 4.0]], noise: [0.25, 0.5] };
        let row = |position, noise| {
            let logits = vec![0.5, -1.0, position as f32];
            ExpectedRow { position, filled: position > 0, noise, logits, appended: vec![appended.clone(); 2] }
        };
        let noise = Noise { error_scaled: 0.5, error_rel_l2: 0.125, kl: 0.0625 };
        let layers = vec![vec![[vec![1.0], vec![2.0]], [vec![3.0], vec![4.0]]]; 2];
        let fill = Fill { layers, states: vec![vec![], vec![5.0, 6.0, 7.0]] };
        let expected = Expected { rows: vec![row(0, Some(noise)), row(7, None)], fill };
        let bytes = expected.to_entry();
        assert_eq!(Expected::from_entry(&bytes), Some(expected));
        for cut in [1, 4, 9] {
            assert_eq!(Expected::from_entry(&bytes[..bytes.len() - cut]), None, "{cut} bytes less");
        }
    }

    #[test]
    fn a_longer_check_begins_as_a_shorter_one() {
        let long = check_ids(1000, 50);
        assert_eq!(check_ids(1000, 20), long[..20]);
        assert!(long.iter().all(|&id| id < 1000));
        assert!(long.iter().collect::<std::collections::BTreeSet<_>>().len() > 40);
    }
}
