//! Owns `History`: a campaign read from its rows, trial by trial, with every latency relative to the default's.
//!
//! Ratios are chained through `incumbent`: they were taken in one process, launch by launch, so they do not drift with
//! clocks and neighbours as latencies do.

use std::collections::BTreeMap;

use crate::candidate::{Candidate, KNOB_NAMES, Values};
use crate::digest::Digest;
use crate::flywheel::{CheckFigures, Cost, Decision, Machine, ModelShape, Proposer, Timing, Trial};

use super::judge::deep_part;
use super::propose::Outcome;

/// The trials of one campaign, in the order in which they were recorded.
#[derive(Debug, Clone, PartialEq)]
pub struct History {
    pub campaign: Digest,
    /// With the op, if one ran alone.
    pub manifest: String,
    pub model: ModelShape,
    /// Of the first trial.
    pub machine: Machine,
    pub context_max: u32,
    pub seed: u64,
    /// Digest of the knobs and values that it could choose from.
    pub space: Digest,
    pub default: Candidate,
    pub entries: Vec<Entry>,
}

/// One trial at all its positions, or an infeasible point.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// `None`: it is infeasible, and nothing ran.
    pub number: Option<u32>,
    pub candidate: Candidate,
    pub proposer: Proposer,
    pub decision: Option<Decision>,
    /// As in the column; of the first row that is not `ok`, if there is one.
    pub verdict: &'static str,
    pub detail: String,
    pub check: Option<CheckFigures>,
    /// By position, ascending; empty unless the verdict is `ok`.
    pub timed: Vec<TimedRow>,
    /// Of the first row; the others have the same.
    pub cost: Cost,
    pub schedule: Option<Digest>,
    pub utc: String,
}

/// One position of a trial.
#[derive(Debug, Clone, PartialEq)]
pub struct TimedRow {
    pub id: Digest,
    pub timing: Timing,
    /// The cost model's prediction before the run.
    pub predicted_us: Option<f64>,
    /// Log ratio of its latency to the default's at this position.
    pub log_ratio: f64,
}

fn mean(of: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = of.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
    (count > 0.0).then(|| sum / count)
}

impl Entry {
    /// log of latency by the default's, the mean of all positions; `None` where it was not timed.
    pub fn log_ratio(&self) -> Option<f64> {
        mean(self.timed.iter().map(|row| row.log_ratio))
    }

    /// The part of it that grows with the position; `None` if it was timed at fewer than two.
    pub fn deep(&self) -> Option<f64> {
        deep_part(&self.timed.iter().map(|row| (row.timing.position, row.log_ratio)).collect::<Vec<_>>())
    }

    /// Log of the predicted time in µs, mean over all positions; `None` if a position has no prediction.
    pub fn log_predicted(&self) -> Option<f64> {
        let logs: Option<Vec<f64>> = self.timed.iter().map(|row| Some(row.predicted_us?.ln())).collect();
        mean(logs?.into_iter())
    }

    pub fn is_kept(&self) -> bool {
        self.decision.is_some_and(Decision::is_kept)
    }

    /// The result as a search is told of it.
    pub fn outcome(&self) -> Outcome {
        if self.number.is_none() {
            return Outcome::Infeasible;
        }
        if self.decision.is_none() || self.timed.is_empty() {
            return Outcome::Failed;
        }
        let ratios = self.timed.iter().filter_map(|row| Some((row.timing.position, row.timing.ratio?.p50)));
        let logs: Vec<(u32, f64)> = ratios.map(|(at, p50)| (at, p50.max(f64::MIN_POSITIVE).ln())).collect();
        let log = mean(logs.iter().map(|(_, log)| *log)).unwrap_or(0.0);
        Outcome::Timed { ratio: log.exp(), kept: self.is_kept(), deep: deep_part(&logs) }
    }

    /// As [`floor_gap`], of all its positions.
    pub fn floor_gap(&self) -> Option<f64> {
        floor_gap(self.timed.iter().map(|row| &row.timing))
    }
}

/// How far latencies are above the floors of their bytes, as a fraction of the floor: the largest of all; `None` if a floor is
/// unknown.
pub fn floor_gap<'a>(timings: impl Iterator<Item = &'a Timing>) -> Option<f64> {
    let gaps = timings.map(|timing| Some(timing.latency_us_p50 / timing.floor_us? - 1.0));
    gaps.collect::<Option<Vec<f64>>>()?.into_iter().max_by(f64::total_cmp)
}

impl History {
    /// The candidate that was kept last; `None` before the default was timed.
    pub fn incumbent(&self) -> Option<&Entry> {
        self.entries.iter().rfind(|entry| entry.is_kept())
    }

    /// The default as it was timed first.
    pub fn first(&self) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.decision == Some(Decision::First))
    }

    /// Candidates that ran, without comparisons with the default.
    pub fn trials(&self) -> usize {
        self.entries.iter().filter(|entry| entry.number.is_some() && entry.proposer != Proposer::Default).count()
    }

    /// How large the effect of each knob was: the largest difference in log ratio between two trials that differ in that
    /// knob alone, and the number of such pairs. The largest effect first; knobs without a pair are left out.
    pub fn importance(&self) -> Vec<Importance> {
        let timed: Vec<(Values, f64)> =
            self.entries.iter().filter_map(|entry| Some((entry.candidate.values(), entry.log_ratio()?))).collect();
        let mut found: BTreeMap<usize, Importance> = BTreeMap::new();
        for (at, (a, a_log)) in timed.iter().enumerate() {
            for (b, b_log) in &timed[..at] {
                let mut turned = (0..KNOB_NAMES.len()).filter(|&knob| a[knob] != b[knob]);
                let (Some(knob), None) = (turned.next(), turned.next()) else { continue };
                let effect = (a_log - b_log).abs();
                let own = found.entry(knob).or_insert(Importance { knob: KNOB_NAMES[knob], pairs: 0, effect: 0.0 });
                own.pairs += 1;
                own.effect = own.effect.max(effect);
            }
        }
        let mut found: Vec<Importance> = found.into_values().collect();
        found.sort_by(|a, b| b.effect.total_cmp(&a.effect));
        found
    }
}

/// What one knob did in a campaign.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Importance {
    pub knob: &'static str,
    /// Pairs of trials that differ in it alone.
    pub pairs: usize,
    /// Of those pairs, the largest difference of log ratios.
    pub effect: f64,
}

/// Reads trials into campaigns, in the order of their first rows. Rows of builds without a search belong to none; a
/// campaign whose default left no row has nothing to be relative to, and is left out.
pub fn histories(trials: &[Trial]) -> Vec<History> {
    let mut order: Vec<Digest> = vec![];
    let mut campaigns: BTreeMap<Digest, Vec<&Trial>> = BTreeMap::new();
    for trial in trials {
        let Some(campaign) = trial.facts().point.campaign else { continue };
        let rows = campaigns.entry(campaign).or_default();
        if rows.is_empty() {
            order.push(campaign);
        }
        rows.push(trial);
    }
    order.iter().filter_map(|campaign| history(*campaign, campaigns.get(campaign)?)).collect()
}

fn history(campaign: Digest, rows: &[&Trial]) -> Option<History> {
    let first = rows.iter().find(|row| row.facts().point.proposer == Proposer::Default)?.facts();
    let default = Candidate::parse(&first.point.candidate, &Candidate::of_first(first.model.head_dim)).ok()?;
    let mut history = History {
        campaign,
        manifest: first.name(),
        model: first.model.clone(),
        machine: first.machine.clone(),
        context_max: first.point.context_max,
        seed: first.point.seed,
        space: first.point.space,
        default,
        entries: vec![],
    };
    // log of latency by the default's, of each row.
    let mut relative: BTreeMap<Digest, f64> = BTreeMap::new();
    let mut at = 0;
    while let Some(first) = rows.get(at) {
        let point = &first.facts().point;
        // Rows of one trial were appended together; of points that do not fit there is one each.
        let same = |row: &&&Trial| {
            let other = &row.facts().point;
            other.trial == point.trial && other.candidate_digest == point.candidate_digest
        };
        let count = if point.trial.is_some() { rows.iter().skip(at).take_while(same).count() } else { 1 };
        let own = rows.get(at..at + count).unwrap_or_default();
        at += count.max(1);
        let Ok(candidate) = Candidate::parse(&point.candidate, &history.default) else { continue };
        let told = own.iter().find(|row| row.verdict().timing().is_none()).unwrap_or(first);
        let mut entry = Entry {
            number: point.trial,
            candidate,
            proposer: point.proposer,
            decision: point.decision,
            verdict: told.verdict().name(),
            detail: told.verdict().detail().to_string(),
            check: first.verdict().check().copied(),
            timed: vec![],
            cost: first.facts().cost.clone(),
            schedule: point.schedule.filter(|_| point.trial.is_some()),
            utc: first.utc().to_string(),
        };
        if told.verdict().timing().is_none() {
            history.entries.push(entry);
            continue;
        }
        for row in own {
            let Some(timing) = row.verdict().timing().cloned() else { continue };
            let point = &row.facts().point;
            let base = point.incumbent.and_then(|id| relative.get(&id));
            let log_ratio = match (timing.ratio, base) {
                (Some(ratio), Some(base)) if ratio.p50 > 0.0 => base + ratio.p50.ln(),
                _ => 0.0,
            };
            relative.insert(row.trial_id(), log_ratio);
            entry.timed.push(TimedRow { id: row.trial_id(), timing, predicted_us: point.predicted_us, log_ratio });
        }
        entry.timed.sort_by_key(|row| row.timing.position);
        history.entries.push(entry);
    }
    Some(history)
}
