//! Owns the lessons of the corpus: examples from earlier trials, and predictions from them for untried points.
//!
//! An example is a trial with its knobs and its latency *relative to the default of its own campaign*, so that "twice the bytes per
//! slot" carries over from one model to another. [`Additive`] predicts latency; the nearest neighbours that failed predict risk. Rows from
//! another space, and targets of another kind, teach nothing.

use std::rc::Rc;

use crate::candidate::{Candidate, Knob, Values};
use crate::flywheel::{ModelShape, Trial};
use crate::format::bits_of;

use super::additive::{Additive, Expected};
use super::history::{Entry, History, histories};
use super::space::{KNOBS, Space};

/// Knobs relative to the default: log2 of (value + 1) / (default + 1).
pub type Moves = [f64; KNOBS.len()];

/// Model and target of a campaign, which decide how similar two campaigns are.
#[derive(Debug, Clone, PartialEq)]
pub struct Setting {
    pub target: String,
    pub target_kind: String,
    /// The kernel that ran.
    kernel: String,
    /// log2 of layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, and bits of weights and cache.
    shape: [f64; 9],
}

impl Setting {
    pub fn new(model: &ModelShape, target: &str, target_kind: &str) -> Setting {
        let bits = |name: &str| f64::from(bits_of(name).unwrap_or(32));
        let log = |value: u32| f64::from(value.max(1)).log2();
        let shape = [
            log(model.layers),
            log(model.hidden),
            log(model.intermediate),
            log(model.heads),
            log(model.kv_heads),
            log(model.head_dim),
            log(model.vocab),
            f64::log2(bits(&model.weights_dtype)),
            f64::log2(bits(&model.cache_dtype)),
        ];
        let [target, target_kind] = [target, target_kind].map(str::to_string);
        Setting { target, target_kind, kernel: model.kernel.clone(), shape }
    }

    /// log2 of the weights of a layer. Streaming them hides exchanges, and how long it does decides the effect of most knobs.
    fn layer(&self) -> f64 {
        let [_, hidden, intermediate, heads, kv_heads, head_dim, ..] = self.shape.map(f64::exp2);
        (hidden * head_dim * 2.0 * (heads + kv_heads) + 3.0 * hidden * intermediate).log2()
    }

    /// The part of a gain at another shape that is expected at this one: 1 if layers have the same size.
    fn likeness(&self, other: &Setting) -> f64 {
        let apart = self.layer() - other.layer();
        (-apart * apart / (2.0 * LAYER_WIDTH * LAYER_WIDTH)).exp()
    }

    /// Squared distance in octaves; `None` between different kernels and kinds of target, where a knob has unrelated effects.
    pub(super) fn distance(&self, other: &Setting) -> Option<f64> {
        if self.target_kind != other.target_kind || self.kernel != other.kernel {
            return None;
        }
        let shape: f64 = self.shape.iter().zip(&other.shape).map(|(a, b)| (a - b).powi(2)).sum();
        Some(shape + if self.target == other.target { 0.0 } else { 1.0 })
    }
}

/// One trial, relative to its campaign's default.
#[derive(Debug, Clone, PartialEq)]
pub struct Example {
    pub moves: Moves,
    pub values: Values,
    /// Log ratio of its latency to the default's; `None`: it failed.
    pub log_ratio: Option<f64>,
    /// The part of it that grows with the position; `None` if unknown.
    pub deep: Option<f64>,
}

/// Log ratios of a latency to the default's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Logs {
    /// Mean over all positions.
    pub mean: f64,
    /// The part of it that grows with the position; `None` if unknown.
    pub deep: Option<f64>,
}

/// The trials of one campaign.
#[derive(Debug, Clone, PartialEq)]
pub struct Group {
    pub name: String,
    pub setting: Setting,
    pub default: Values,
    pub examples: Vec<Example>,
}

/// Examples of a corpus, and the number of trials that cannot be examples.
#[derive(Debug, Clone, Default)]
pub struct Lessons {
    pub groups: Vec<Group>,
    /// Trials of another space of knobs.
    pub stale: usize,
}

pub fn moves(of: &Values, default: &Values) -> Moves {
    let mut moves = [0.0; KNOBS.len()];
    for ((to, v), d) in moves.iter_mut().zip(of).zip(default) {
        *to = ((f64::from(*v) + 1.0) / (f64::from(*d) + 1.0)).log2();
    }
    moves
}

/// Reads trials into examples. A candidate that was timed at several positions is one example, their mean.
pub fn lessons(trials: &[Trial]) -> Lessons {
    let of_campaign = trials.iter().map(|trial| &trial.facts().point).filter(|point| point.campaign.is_some());
    let mut lessons =
        Lessons { groups: vec![], stale: of_campaign.filter(|point| !Space::contains(&point.space)).count() };
    for history in histories(trials).iter().filter(|history| Space::contains(&history.space)) {
        let History { manifest, model, machine, default, entries, .. } = history;
        let default = default.values();
        let mut group = Group {
            name: format!("{manifest} on {}", machine.target),
            setting: Setting::new(model, &machine.target, &machine.target_kind),
            default,
            examples: vec![],
        };
        for entry in entries.iter().filter(|entry| entry.number.is_some()) {
            let values = entry.candidate.values();
            let moves = moves(&values, &default);
            group.examples.push(Example { moves, values, log_ratio: entry.log_ratio(), deep: entry.deep() });
        }
        lessons.groups.push(group);
    }
    lessons
}

/// Rank correlation of each model's predictions with campaigns that it did not see.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct HeldOut {
    /// Campaigns that were left out in turn.
    pub campaigns: usize,
    pub trials: usize,
    pub nearest: f64,
    pub linear: f64,
    pub additive: f64,
}

/// The knowledge before and during one campaign.
#[derive(Debug, Clone)]
pub struct Prior {
    setting: Setting,
    default: Values,
    /// Trials, failed or not, with the similarity of their setting: of earlier campaigns, and of this one.
    earlier: Rc<Vec<(f64, Example)>>,
    own: Vec<Example>,
    /// Failures among both.
    failures: usize,
    additive: Additive,
    effects: Effects,
}

/// A good candidate of an earlier campaign.
#[derive(Debug, Clone, PartialEq)]
pub struct WarmStart {
    pub candidate: Candidate,
    /// Its log ratio to the default of that campaign, discounted towards 0 as the shapes differ.
    there: f64,
    /// Standard deviation of its prediction before the first trial.
    spread: f64,
}

/// A prediction for one point.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Opinion {
    /// Log ratio of its latency to the default's.
    pub log_ratio: f64,
    /// Its standard deviation.
    pub spread: f64,
    /// Share of failures among the trials near it.
    pub risk: f64,
}

/// Squared distance in octaves at which an example's weight falls to 1/e: of knobs, and of settings.
const KNOB_WIDTH: f64 = 1.0;
const SETTING_WIDTH: f64 = 4.0;
/// Weight of the assumption that a point equals the default and does not fail, in examples.
const DOUBT: f64 = 0.3;
/// Ridge: the weight of "this coefficient is 0", in examples.
const RIDGE: f64 = 1.0;
/// An effect that is worth looking for, as a log ratio.
const EFFECT: f64 = 0.02;
/// Weight of the initial promise of a knob, in comparisons.
const UNTURNED: f64 = 0.5;
/// Most examples of a campaign that are compared with each other.
const PAIRED_MAX: usize = 200;
/// Least gain of a warm start in its campaign, as a log ratio; and how many candidates of one campaign are considered.
const GOOD: f64 = -0.005;
const GOOD_MOST: usize = 3;
/// Knobs of the ring, indices into [`KNOBS`](super::space::KNOBS): their best values do not depend on the default.
const RING: std::ops::RangeInclusive<usize> = Knob::RingSlots as usize..=Knob::FlightFree as usize;
/// Knobs of slow SMs: they describe a machine, not a model.
const LIGHT: std::ops::RangeInclusive<usize> = Knob::LightEighth as usize..=Knob::LightPercent as usize;
/// Weight of a warm start's measured gain against the model's prediction, at equal layer size and before similar points were tried.
const WARM_START_TRUST: f64 = 0.7;
/// Octaves of layer size over which that weight falls.
const LAYER_WIDTH: f64 = 1.0;
/// Number of nearest shapes that give warm starts, and of the best candidates of each.
const WARM_START_SHAPES: usize = 4;
const WARM_STARTS_OF_SHAPE: usize = 32;
const TERMS: usize = 2 * KNOBS.len();
/// Most examples that risk is estimated from; the nearest settings first.
const EXAMPLES_MAX: usize = 1000;

impl Prior {
    /// Prepares the lessons of `groups` for a setting whose candidates are those of `space`.
    pub fn new(groups: &[Group], setting: Setting, space: &Space) -> Prior {
        let default = space.default_candidate().values();
        let additive = Additive::new(groups, &setting, &default, space.grid());
        let mut examples = vec![];
        for (distance, group) in nearest_settings(groups, &setting) {
            let weight = (-distance / SETTING_WIDTH).exp();
            let room = EXAMPLES_MAX.saturating_sub(examples.len());
            examples.extend(group.examples.iter().take(room).map(|example| (weight, example.clone())));
        }
        let mut effects = Effects { of_knobs: [(0.0, 0.0); KNOBS.len()] };
        for (distance, group) in nearest_settings(groups, &setting) {
            effects.learn_all((-distance / SETTING_WIDTH).exp(), &group.examples);
        }
        let failures = examples.iter().filter(|(_, example)| example.log_ratio.is_none()).count();
        Prior { setting, default, earlier: Rc::new(examples), own: vec![], failures, additive, effects }
    }

    pub fn setting(&self) -> &Setting {
        &self.setting
    }

    /// Whether anything was learned before the first trial.
    pub fn is_cold(&self) -> bool {
        self.earlier.is_empty()
    }

    /// Learns from a trial of this campaign; `None`: it failed. `guess`: the cost model's log ratio.
    pub fn learn(&mut self, candidate: &Candidate, guess: f64, logs: Option<Logs>) {
        let values = candidate.values();
        if let Some(logs) = &logs {
            self.additive.learn(&values, guess, logs);
        }
        let (log_ratio, deep) = (logs.map(|logs| logs.mean), logs.and_then(|logs| logs.deep));
        let example = Example { moves: moves(&values, &self.default), values, log_ratio, deep };
        self.own.iter().for_each(|other| self.effects.learn(1.0, other, &example));
        self.failures += usize::from(log_ratio.is_none());
        self.own.push(example);
    }

    /// The prediction for a point. `guess`: the cost model's log ratio, weighted by how right it was so far.
    pub fn opinion(&self, candidate: &Candidate, guess: f64) -> Opinion {
        let Expected { log_ratio, spread } = self.additive.expected(&candidate.values(), guess);
        Opinion { log_ratio, spread, risk: self.risk(candidate) }
    }

    /// Log ratio of one candidate's latency to another's; each comes with the cost model's log ratio.
    pub fn between(&self, (from, from_guess): (&Candidate, f64), (to, to_guess): (&Candidate, f64)) -> Expected {
        self.additive.between((&from.values(), from_guess), (&to.values(), to_guess))
    }

    /// How likely the knobs in which two points differ have an effect, by their effects so far: 1 if they were never changed, about 0 if
    /// changing them never had an effect.
    pub fn promise(&self, from: &Candidate, to: &Candidate) -> f64 {
        let turned = from.values().into_iter().zip(to.values()).enumerate().filter(|(_, (a, b))| a != b);
        turned.map(|(knob, _)| self.effects.promise(knob)).fold(0.0, f64::max)
    }

    /// Share of failures near a point.
    pub fn risk(&self, candidate: &Candidate) -> f64 {
        // Most campaigns have none, and a search asks thousands of times between two trials.
        if self.failures == 0 {
            return 0.0;
        }
        let at = moves(&candidate.values(), &self.default);
        let (mut failed, mut weights) = (0.0, DOUBT);
        let earlier = self.earlier.iter().map(|(similar, example)| (*similar, example));
        for (similar, example) in earlier.chain(self.own.iter().map(|example| (1.0, example))) {
            let weight = similar * nearness(&at, &example.moves);
            weights += weight;
            if example.log_ratio.is_none() {
                failed += weight;
            }
        }
        failed / weights
    }

    /// Good candidates of the most similar shapes, carried over to this space. A move that gained elsewhere needs no warm start: the model
    /// expects it to gain here. A combination needs one, because the sum of its moves predicts it less well.
    pub fn warm_starts(&self, groups: &[Group], space: &Space) -> Vec<WarmStart> {
        let near = nearest_settings(groups, &self.setting);
        let mut starts: Vec<WarmStart> = vec![];
        for shape in near.chunk_by(|(_, a), (_, b)| a.setting == b.setting).take(WARM_START_SHAPES) {
            let like = shape.first().map_or(0.0, |(_, group)| self.setting.likeness(&group.setting));
            let mut good: Vec<(f64, Candidate)> =
                shape.iter().flat_map(|(_, group)| self.carried(group, space)).collect();
            good.sort_by(|a, b| a.0.total_cmp(&b.0));
            let mut left = WARM_STARTS_OF_SHAPE;
            for (there, candidate) in good {
                let known =
                    candidate == *space.default_candidate() || starts.iter().any(|start| start.candidate == candidate);
                if left > 0 && !known {
                    let Expected { spread, .. } = self.additive.expected(&candidate.values(), 0.0);
                    starts.push(WarmStart { candidate, there: like * there, spread: spread.max(f64::MIN_POSITIVE) });
                    left -= 1;
                }
            }
        }
        starts
    }

    /// The expected log ratio of a warm start to the default, by all that was learned so far. `guess`: the cost model's log ratio.
    pub fn promised(&self, start: &WarmStart, guess: f64) -> f64 {
        let Opinion { log_ratio, spread, risk } = self.opinion(&start.candidate, guess);
        let there = WARM_START_TRUST * (spread / start.spread).min(1.0);
        there * start.there + (1.0 - there) * log_ratio + risk
    }

    /// The fastest candidates of a campaign as points of this space, with their log ratio to that campaign's default. Each comes twice: as
    /// it is, and with all knobs but the ring's relative to the default.
    fn carried(&self, group: &Group, space: &Space) -> Vec<(f64, Candidate)> {
        let mut good: Vec<(f64, &Example)> =
            group.examples.iter().filter_map(|e| Some((e.log_ratio?, e))).filter(|(log, _)| *log < GOOD).collect();
        good.sort_by(|a, b| a.0.total_cmp(&b.0));
        let both = good.into_iter().take(GOOD_MOST).flat_map(|(log, example)| {
            let mut values = example.values;
            LIGHT.for_each(|knob| values[knob] = self.default[knob]);
            let mut scaled = values;
            let relative = (0..scaled.len()).filter(|knob| !RING.contains(knob) && !LIGHT.contains(knob));
            for knob in relative {
                let from = f64::from(self.default[knob]) + 1.0;
                scaled[knob] = (from * example.moves[knob].exp2() - 1.0).round().max(0.0) as u32;
            }
            [space.snap(&scaled), space.snap(&values)].into_iter().flatten().map(move |c| (log, c))
        });
        both.collect()
    }
}

/// Campaigns on this kind of target with their squared distances, the nearest first, those of one setting together.
pub(super) fn nearest_settings<'g>(groups: &'g [Group], setting: &Setting) -> Vec<(f64, &'g Group)> {
    let mut near: Vec<(f64, &Group)> =
        groups.iter().filter_map(|group| Some((setting.distance(&group.setting)?, group))).collect();
    near.sort_by(|(a, of), (b, other)| a.total_cmp(b).then_with(|| of.setting.target.cmp(&other.setting.target)));
    near
}

/// 1 at the same place, 1/e at [`KNOB_WIDTH`].
fn nearness(a: &Moves, b: &Moves) -> f64 {
    let distance: f64 = a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum();
    (-distance / KNOB_WIDTH).exp()
}

/// Effects of changing one knob alone, in either direction: a knob without an effect is not worth a trial for each of its values.
#[derive(Debug, Clone)]
struct Effects {
    /// Weight of the comparisons, and the sum of their effects by [`EFFECT`].
    of_knobs: [(f64, f64); KNOBS.len()],
}

impl Effects {
    fn learn_all(&mut self, weight: f64, examples: &[Example]) {
        let examples = examples.get(..PAIRED_MAX.min(examples.len())).unwrap_or_default();
        for (at, example) in examples.iter().enumerate() {
            examples.iter().take(at).for_each(|other| self.learn(weight, other, example));
        }
    }

    fn learn(&mut self, weight: f64, a: &Example, b: &Example) {
        let (Some(log_a), Some(log_b)) = (a.log_ratio, b.log_ratio) else { return };
        let mut turned = (0..KNOBS.len()).filter(|&knob| a.values[knob] != b.values[knob]);
        if let (Some(knob), None) = (turned.next(), turned.next()) {
            let (weights, effects) = &mut self.of_knobs[knob];
            *weights += weight;
            *effects += weight * ((log_a - log_b).abs() / EFFECT).min(1.0);
        }
    }

    fn promise(&self, knob: usize) -> f64 {
        let (weight, effects) = self.of_knobs[knob];
        (UNTURNED + effects) / (UNTURNED + weight)
    }
}

/// Weighted ridge regression on each move and its square. At the default all terms are 0, and so is the prediction.
struct Ridge(Vec<f64>);

impl Ridge {
    fn of(examples: &[(f64, &Example)]) -> Ridge {
        let mut sums = vec![[0.0; TERMS + 1]; TERMS];
        for (i, row) in sums.iter_mut().enumerate() {
            row[i] = RIDGE;
        }
        for (weight, example) in examples {
            let Some(log) = example.log_ratio else { continue };
            let terms = terms(&example.moves);
            for (row, a) in sums.iter_mut().zip(&terms).filter(|(_, a)| **a != 0.0) {
                for (cell, b) in row.iter_mut().zip(&terms) {
                    *cell += weight * a * b;
                }
                row[TERMS] += weight * a * log;
            }
        }
        Ridge(solve(sums))
    }

    fn says(&self, moves: &Moves) -> f64 {
        terms(moves).iter().zip(&self.0).map(|(t, c)| t * c).sum()
    }
}

/// The mean of earlier trials weighted by nearness, with [`DOUBT`] for "nothing changes".
fn neighbours_say(examples: &[(f64, &Example)], at: &Moves) -> f64 {
    let (mut sum, mut weights) = (0.0, DOUBT);
    for (similar, example) in examples {
        let Some(log) = example.log_ratio else { continue };
        let weight = similar * nearness(at, &example.moves);
        sum += weight * log;
        weights += weight;
    }
    sum / weights
}

fn terms(moves: &Moves) -> [f64; TERMS] {
    let mut terms = [0.0; TERMS];
    for (at, moved) in moves.iter().enumerate() {
        terms[at] = *moved;
        terms[KNOBS.len() + at] = moved * moved;
    }
    terms
}

/// Gauss-Jordan with pivoting; the ridge keeps the matrix regular.
fn solve(mut matrix: Vec<[f64; TERMS + 1]>) -> Vec<f64> {
    for column in 0..TERMS {
        let pivot = (column..TERMS).max_by(|&a, &b| matrix[a][column].abs().total_cmp(&matrix[b][column].abs()));
        matrix.swap(column, pivot.unwrap_or(column));
        let row = matrix[column];
        if row[column] == 0.0 {
            continue;
        }
        for (at, other) in matrix.iter_mut().enumerate() {
            if at != column {
                let factor = other[column] / row[column];
                other.iter_mut().zip(&row).for_each(|(cell, value)| *cell -= factor * value);
            }
        }
    }
    (0..TERMS).map(|at| if matrix[at][at] == 0.0 { 0.0 } else { matrix[at][TERMS] / matrix[at][at] }).collect()
}

/// Holds each campaign out in turn, and correlates the predictions of models learned from the others with its measurements: nearest
/// neighbours, a ridge regression on moves and their squares, and the additive model, which searches use.
pub fn held_out(groups: &[Group]) -> HeldOut {
    let mut found = HeldOut::default();
    for (at, group) in groups.iter().enumerate() {
        let others: Vec<Group> = groups
            .iter()
            .enumerate()
            .filter(|(i, g)| *i != at && g.setting.distance(&group.setting).is_some())
            .map(|(_, g)| g.clone())
            .collect();
        let measured: Vec<(&Example, f64)> = group.examples.iter().filter_map(|e| Some((e, e.log_ratio?))).collect();
        if others.is_empty() || measured.len() < 3 {
            continue;
        }
        let truth: Vec<f64> = measured.iter().map(|(_, log)| *log).collect();
        let rank = |says: &dyn Fn(&Example) -> f64| {
            let said: Vec<f64> = measured.iter().map(|(example, _)| says(example)).collect();
            rank_correlation(&said, &truth).unwrap_or(0.0)
        };
        let examples: Vec<(f64, &Example)> = nearest_settings(&others, &group.setting)
            .into_iter()
            .flat_map(|(distance, g)| g.examples.iter().map(move |e| ((-distance / SETTING_WIDTH).exp(), e)))
            .collect();
        let ridge = Ridge::of(&examples);
        let values = |knob: usize| measured.iter().map(|(e, _)| e.values[knob]).collect();
        let grid: Vec<(usize, Vec<u32>)> = (0..KNOBS.len()).map(|knob| (knob, values(knob))).collect();
        let additive = Additive::new(&others, &group.setting, &group.default, &grid);
        let weight = truth.len() as f64;
        found.nearest += weight * rank(&|e| neighbours_say(&examples, &e.moves));
        found.linear += weight * rank(&|e| ridge.says(&e.moves));
        found.additive += weight * rank(&|e| additive.expected(&e.values, 0.0).log_ratio);
        found.trials += truth.len();
        found.campaigns += 1;
    }
    if found.trials > 0 {
        for sum in [&mut found.nearest, &mut found.linear, &mut found.additive] {
            *sum /= found.trials as f64;
        }
    }
    found
}

/// How the cost model ranked one campaign.
#[derive(Debug, Clone, PartialEq)]
pub struct Ranked {
    pub name: String,
    /// Trials with a time and a prediction.
    pub trials: usize,
    /// Rank correlation of predicted with measured; `None` for fewer than three trials, or if all predictions are equal.
    pub predicted: Option<f64>,
}

/// Correlates predictions with measurements, campaign by campaign. `predicted`: log of the time of a trial, either
/// [`Entry::log_predicted`] from before the run, or from a cost model now.
pub fn ranked(histories: &[History], predicted: impl Fn(&Entry) -> Option<f64>) -> Vec<Ranked> {
    histories
        .iter()
        .map(|history| {
            let pairs: Vec<(f64, f64)> =
                history.entries.iter().filter_map(|e| Some((predicted(e)?, e.log_ratio()?))).collect();
            let (said, truth): (Vec<f64>, Vec<f64>) = pairs.iter().copied().unzip();
            Ranked {
                name: format!("{} on {}", history.manifest, history.machine.target),
                trials: pairs.len(),
                predicted: rank_correlation(&said, &truth),
            }
        })
        .collect()
}

/// Spearman's rank correlation; `None` for fewer than three pairs, or if all values of one side are equal.
pub fn rank_correlation(a: &[f64], b: &[f64]) -> Option<f64> {
    if a.len() < 3 || a.len() != b.len() {
        return None;
    }
    let (a, b) = (ranks(a), ranks(b));
    let mean = (a.len() as f64 - 1.0) / 2.0;
    let moment = |x: &[f64], y: &[f64]| -> f64 { x.iter().zip(y).map(|(x, y)| (x - mean) * (y - mean)).sum() };
    let scale = (moment(&a, &a) * moment(&b, &b)).sqrt();
    (scale > 0.0).then(|| moment(&a, &b) / scale)
}

/// Ranks from 0; equal values share the mean of theirs.
fn ranks(values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[a].total_cmp(&values[b]));
    let mut ranks = vec![0.0; values.len()];
    let mut at = 0;
    while at < order.len() {
        let mut end = at + 1;
        while end < order.len() && values[order[end]] == values[order[at]] {
            end += 1;
        }
        for &index in &order[at..end] {
            ranks[index] = (at + end - 1) as f64 / 2.0;
        }
        at = end;
    }
    ranks
}
