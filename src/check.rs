//! Owns `Checked`: a proven schedule whose numbers were compared with a reference. Only a checked schedule can be timed.
//!
//! A position is reached in one of two ways. *Prompted*: every token before it is decoded, and the reference is the f64
//! specification of the model graph, which shares no code with lowering. *Filled*: both sides start from the same
//! generated cache one position earlier and decode two steps, so that the second one reads a row that the first one wrote;
//! the reference is then the interpreter in f64. The cost of a prompt of that length decides which way is taken.

mod alike;
mod codes;
mod ragged;
mod rows;
mod waves;

pub use alike::{Alike, POSITIONS as ALIKE_POSITIONS, SEQUENCES as ALIKE_SEQUENCES, check_alike};
pub use codes::{DeviceCaches, OneRow, compare_codes, compare_cpu_codes, stores_codes};
pub use ragged::{BothLogits, check_ragged};
pub use rows::check_rows;
pub use waves::{POSITIONS as WAVES_POSITIONS, check_waves};

use std::ops::ControlFlow;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::cuda::session::{Session, SessionError};
use crate::dtype::{DType, Precision};
use crate::error::Fault;
use crate::interp::{Arithmetic, StepResult};
use crate::interp::{CacheKind, Input, Interp, InterpError, Options, Pack, cache_buffers, cache_code, cache_value};
use crate::ir::op::Role;
use crate::ir::schedule::Schedule;
use crate::ir::variant::{AttentionVariant, swizzled_piece};
use crate::ir::{BufferId, GridId};
use crate::model::graph::{ModelGraph, TensorId};
use crate::model::weights::Weights;
use crate::reference;
use crate::sample::{SampleError, SampleSettings, Sampler, argmax};
use crate::target::Target;
use crate::validate::Validated;

/// Most multiply-adds of the f64 reference: some seconds on one core.
const REFERENCE_COST_MAX: u64 = 2_000_000_000;

/// Most multiply-adds of a prompt through the f64 interpreter, to check a device: seconds on its host.
const PROMPT_COST_MAX: u64 = 10_000_000_000;

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
    /// fp32 differs from f64 only by rounding in another order (the goldens of the test models are within 3e-4). bf16
    /// has 8 bits: a relative error of 0.2 % in each of some ten rounded vectors of a layer, over tens of layers.
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
        serde_json::to_vec(&self.figures).expect("five numbers")
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
        "position {position}: layer {layer}: norm of how far {what} are from their codes by their norm: expected at most {expected:e}, \
         found {found:e}"
    )]
    Cached { position: u32, layer: u32, what: &'static str, expected: f64, found: f64, figures: Figures },
    #[error("position {position}: expected token {expected} as the most likely one, found {found}")]
    Argmax { position: u32, expected: u32, found: u32, figures: Figures },
    #[error("position {position}: logit {index} is {value}")]
    NotFinite { position: u32, index: usize, value: f32, figures: Figures },
    #[error("position {position}: order {seed} of the tasks gives other logits than the ordinary one")]
    OrderMatters { position: u32, seed: u64, figures: Figures },
    #[error("position {position}: two runs give different logits")]
    RunsDiffer { position: u32, figures: Figures },
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
    #[error(transparent)]
    Sample(#[from] SampleError),
    #[error(transparent)]
    Interp(#[from] InterpError),
    #[error(transparent)]
    Session(#[from] SessionError),
}

impl CheckError {
    /// Figures of the positions compared before the fault was found; `None` if there were none.
    pub fn figures(&self) -> Option<Figures> {
        let figures = match self {
            CheckError::Wrong { figures, .. }
            | CheckError::Cached { figures, .. }
            | CheckError::Argmax { figures, .. }
            | CheckError::NotFinite { figures, .. }
            | CheckError::OrderMatters { figures, .. }
            | CheckError::RunsDiffer { figures, .. }
            | CheckError::Selected { figures, .. } => figures,
            CheckError::NotAlike { .. }
            | CheckError::Weight { .. }
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
    /// Ascending: position, whether its cache is generated, and logits `[vocab]`.
    rows: Vec<(u32, bool, Vec<f32>)>,
}

impl Expected {
    fn prompted(&self) -> Vec<u32> {
        self.rows.iter().filter(|(_, filled, _)| !filled).map(|(position, ..)| *position).collect()
    }

    fn filled(&self) -> impl Iterator<Item = (u32, &[f32])> {
        self.rows.iter().filter(|(_, filled, _)| *filled).map(|(position, _, row)| (*position, row.as_slice()))
    }

    fn prompted_rows(&self) -> impl Iterator<Item = &[f32]> {
        self.rows.iter().filter(|(_, filled, _)| !filled).map(|(.., row)| row.as_slice())
    }

    /// The bytes for the cache: position, whether it is filled, length and values of each row, all in 32 bits,
    /// little-endian.
    pub(crate) fn to_entry(&self) -> Vec<u8> {
        let mut bytes = vec![];
        for (position, filled, row) in &self.rows {
            for word in [*position, u32::from(*filled), row.len() as u32] {
                bytes.extend(word.to_le_bytes());
            }
            bytes.extend(row.iter().flat_map(|value| value.to_le_bytes()));
        }
        bytes
    }

    /// Reads the output of [`Expected::to_entry`].
    pub(crate) fn from_entry(bytes: &[u8]) -> Option<Expected> {
        let mut words = bytes.chunks(4).map(|word| word.try_into().ok().map(u32::from_le_bytes));
        let mut rows = vec![];
        while let Some(position) = words.next() {
            let (position, filled, count) = (position?, words.next()?? != 0, words.next()??);
            let row =
                (&mut words).take(count as usize).map(|word| word.map(f32::from_bits)).collect::<Option<Vec<f32>>>()?;
            if row.len() != count as usize {
                return None;
            }
            rows.push((position, filled, row));
        }
        Some(Expected { rows })
    }
}

/// Compares the interpreter's fast path with the reference, then with hostile orders of the same schedule. If it [`stores_codes`], the
/// reference takes them.
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
        let checked = if stores_codes(schedule.program.precision) {
            compare_cpu_codes(subject, &mut fast, on_step)?
        } else {
            compare_cpu(subject, &expect_cpu(subject, on_step)?, &mut fast)?
        };
        check_orders(subject, &mut fast, checked.figures)?;
        Ok(checked)
    };
    check().map_err(|error| blamed(subject, error))
}

/// Steps that are computed for the expected logits, of a device or of the interpreter; they take most of the time of a check.
pub fn expect_steps(subject: &Subject<'_>, device: bool) -> u64 {
    let (prompted, filled) = split(subject, if device { PROMPT_COST_MAX } else { REFERENCE_COST_MAX });
    prompted.last().map_or(0, |&last| u64::from(last) + 1) + filled.len() as u64
}

/// Expected logits for the interpreter's fast path: from the reference, and from the interpreter in f64 at deep positions.
/// `on_step` is called for each of [`expect_steps`].
///
/// # Errors
/// Faults of the interpreter.
pub fn expect_cpu(subject: &Subject<'_>, on_step: &dyn Fn()) -> Result<Expected, CheckError> {
    let Subject { validated, graph, pack, .. } = subject;
    let (prompted, filled) = split(subject, REFERENCE_COST_MAX);
    let mut rows = vec![];
    if let Some(&last) = prompted.last() {
        let cache = validated.schedule().program.precision.cache;
        let mut session = reference::Session::with_cache(graph, subject.weights, cache);
        for (position, &id) in (0..).zip(&check_ids(graph.vocab, last + 1)) {
            if prompted.contains(&position) {
                rows.push((position, false, session.step(id)));
            } else {
                session.step_hidden(id);
            }
            on_step();
        }
    }
    if !filled.is_empty() {
        let mut spec = Interp::new(validated.schedule(), pack.clone(), Options::spec())?;
        for &position in filled {
            rows.push((position, true, filled_row(&mut spec, graph.vocab, position, subject.outputs())?));
            on_step();
        }
    }
    Ok(Expected { rows })
}

/// Compares the interpreter's fast path with the expected logits. One that [`stores_codes`] is compared by [`compare_cpu_codes`].
///
/// # Errors
/// See [`CheckError`].
pub fn compare_cpu(subject: &Subject<'_>, expected: &Expected, fast: &mut Interp) -> Result<Checked, CheckError> {
    let vocab = subject.graph.vocab;
    let mut judge = Judge::new(Tolerance::of(subject.validated.schedule().program.precision));
    let prompted = expected.prompted();
    if let Some(&last) = prompted.last() {
        let mut found = vec![];
        fast.reset();
        fast.launch(&inputs(&check_ids(vocab, last + 1)), |step| {
            keep(step, &prompted, &mut found);
            ControlFlow::Continue(())
        })?;
        for ((&position, expected), found) in prompted.iter().zip(expected.prompted_rows()).zip(&found) {
            judge.compare(position, expected, found)?;
        }
    }
    for (position, expected) in expected.filled() {
        let found = filled_row(fast, vocab, position, subject.outputs())?;
        judge.compare_row(vocab, position, expected, &found)?;
    }
    Ok(Checked { figures: judge.figures })
}

/// Compares a device with the interpreter in f64; every launch runs twice into poisoned logits and must give the same
/// bits, and what the device selects must be the arg-max of what it computed. Where the device [`stores_codes`], the interpreter takes
/// them, so what is expected is different for each kernel.
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
    let checked = if stores_codes(subject.validated.schedule().program.precision) {
        codes::check_codes(subject, session, steps_max, on_step)
    } else {
        expect_cuda(subject, on_step).and_then(|expected| compare_cuda(subject, &expected, session, steps_max))
    };
    checked.map_err(|error| blamed(subject, error))
}

/// Expected logits for a device: from the interpreter in f64. `on_step` is called for each of [`expect_steps`].
///
/// # Errors
/// Faults of the interpreter.
pub fn expect_cuda(subject: &Subject<'_>, on_step: &dyn Fn()) -> Result<Expected, CheckError> {
    let Subject { validated, graph, pack, .. } = subject;
    let (prompted, filled) = split(subject, PROMPT_COST_MAX);
    let mut spec = Interp::new(validated.schedule(), pack.clone(), Options::spec())?;
    let mut rows = vec![];
    if let Some(&last) = prompted.last() {
        let mut expected = vec![];
        spec.reset();
        spec.launch(&inputs(&check_ids(graph.vocab, last + 1)), |step| {
            keep(step, prompted, &mut expected);
            on_step();
            ControlFlow::Continue(())
        })?;
        rows.extend(prompted.iter().zip(expected).map(|(&position, row)| (position, false, row)));
    }
    for &position in filled {
        rows.push((position, true, filled_row(&mut spec, graph.vocab, position, subject.outputs())?));
        on_step();
    }
    Ok(Expected { rows })
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
    let prompted = expected.prompted();
    if let Some(&last) = prompted.last() {
        let ids = check_ids(vocab, last + 1);
        let found = twice(judge.figures, &prompted, || device_logits(session, &ids, 0, steps_max, vocab, &prompted))?;
        for ((&position, expected), found) in prompted.iter().zip(expected.prompted_rows()).zip(&found) {
            judge.compare(position, expected, found)?;
        }
    }
    let outputs = subject.outputs();
    for (position, expected) in expected.filled() {
        let rows = filled_rows(position);
        fill_device_cache(session, schedule, FILL_SEED, rows)?;
        let ids = check_ids(vocab, position + 1);
        let found = twice(judge.figures, &[position], || {
            let mut row = device_logits(session, &ids, rows, steps_max, vocab, &[position])?.concat();
            for output in outputs {
                row.extend(session.exchanged(*output)?);
            }
            Ok(vec![row])
        })?
        .concat();
        judge.compare_row(vocab, position, expected, &found)?;
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

/// Positions that a prompt may lead to, and those that need a generated cache.
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

/// Rows of the generated cache before a filled position: all but the one that the first of the two steps writes.
fn filled_rows(position: u32) -> u32 {
    position.saturating_sub(1)
}

/// Logits of a filled position, followed by the values that the step left in `outputs`.
fn filled_row(interp: &mut Interp, vocab: u32, position: u32, outputs: &[BufferId]) -> Result<Vec<f32>, InterpError> {
    interp.reset();
    let rows = filled_rows(position);
    interp.fill_cache(FILL_SEED, rows)?;
    let ids = check_ids(vocab, position + 1);
    let mut logits = vec![];
    interp.launch(&inputs(ids.get(rows as usize..).unwrap_or(&[])), |step| {
        step.logits.copy_to(&mut logits);
        ControlFlow::Continue(())
    })?;
    outputs.iter().for_each(|output| logits.extend(interp.exchanged(*output)));
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
    for (layer, (keys, values)) in (0u32..).zip(cache_buffers(&schedule.program)) {
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
                    write_row(buffer.dtype, swizzled.then_some(row), out, |d| {
                        cache_value(seed, layer, kind, row, head * dim + d)
                    });
                });
                let offset = at + u64::from(head) * u64::from(buffer.rows) * row_bytes as u64;
                session.upload_cache(offset, &bytes)?;
            }
        }
    }
    Ok(())
}

/// The cache row of one KV head, with `value` of each column; `swizzled`: the position whose swizzle the row has.
fn write_row(dtype: DType, swizzled: Option<u32>, out: &mut [u8], value: impl Fn(u32) -> f32) {
    const PIECE: usize = 16;
    let row_bytes = out.len() as u32;
    for d in 0..(out.len() / dtype.bytes()) as u32 {
        let at = d as usize * dtype.bytes();
        let place = |position| swizzled_piece(position, (at / PIECE) as u32, row_bytes) as usize;
        let piece = swizzled.map_or(at / PIECE, place);
        let out = &mut out[piece * PIECE + at % PIECE..][..dtype.bytes()];
        match dtype {
            DType::Bf16 => out.copy_from_slice(&half::bf16::from_f32(value(d)).to_le_bytes()),
            DType::E4m3 => out.copy_from_slice(&[cache_code(value(d))]),
            _ => out.copy_from_slice(&value(d).to_le_bytes()),
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
        for (what, expected, found) in [
            ("largest difference of an output", self.tolerance.error_scaled * row.scale, row.error_abs_max),
            (
                "norm of the difference of outputs by that of the reference",
                self.tolerance.error_rel_l2,
                row.error_rel_l2,
            ),
        ] {
            if found.is_nan() || found > expected {
                return Err(CheckError::Wrong { position, what, expected, found, figures });
            }
        }
        Ok(())
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
        let error_abs = self.tolerance.error_scaled * row.scale;
        for (what, expected, found) in [
            ("largest difference of a logit", error_abs, row.error_abs_max),
            ("norm of the difference by norm of the reference", self.tolerance.error_rel_l2, row.error_rel_l2),
            ("divergence in nats", self.tolerance.kl, row.kl),
        ] {
            if found.is_nan() || found > expected {
                return Err(CheckError::Wrong { position, what, expected, found, figures });
            }
        }
        // Another winner is a tie within the tolerance, or a fault that the norms did not see.
        let at = |token: u32| expected.get(token as usize).copied().map_or(0.0, f64::from);
        let margin = at(expected_best) - at(found_best);
        if expected_best != found_best && margin > 2.0 * self.tolerance.error_rel_l2 * row.scale {
            return Err(CheckError::Argmax { position, expected: expected_best, found: found_best, figures });
        }
        Ok(())
    }
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
    fn a_longer_check_begins_as_a_shorter_one() {
        let long = check_ids(1000, 50);
        assert_eq!(check_ids(1000, 20), long[..20]);
        assert!(long.iter().all(|&id| id < 1000));
        assert!(long.iter().collect::<std::collections::BTreeSet<_>>().len() > 40);
    }
}
