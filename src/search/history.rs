//! Owns `History`: a campaign read from its rows, trial by trial, with every latency relative to the default's.
//!
//! Ratios are chained through `incumbent`: they were taken in one process, launch by launch, so they do not drift with
//! clocks and neighbours as latencies do. A chain of kept trials is biased, because luck helps a candidate to be kept. So
//! [`Headline`] gives the result of a campaign in the figures of the closing duel between the best and the default.

use std::collections::BTreeMap;

use crate::candidate::{Candidate, KNOB_NAMES, Values};
use crate::digest::Digest;
use crate::flywheel::{CheckFigures, Cost, Decision, Machine, ModelShape, Proposer, RatioInterval, Timing, Trial};

use super::judge::deep_part;
use super::propose::Outcome;

/// A campaign whose median interval is wider says little: most knobs change the time by less.
const NOISY_WIDTH: f64 = 0.2;

/// The trials of one campaign, in the order in which they were recorded.
#[derive(Debug, Clone, PartialEq)]
pub struct History {
    pub campaign: Digest,
    /// Name of the manifest, with the op if one ran alone.
    pub manifest: String,
    pub model: ModelShape,
    /// The machine of the first trial.
    pub machine: Machine,
    pub context_max: u32,
    pub seed: u64,
    /// Digest of the knobs and values from which it could choose.
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
    /// The verdict of the first row that is not `ok`, else `ok`.
    pub verdict: &'static str,
    pub detail: String,
    pub check: Option<CheckFigures>,
    /// By position, ascending; empty unless the verdict is `ok`.
    pub timed: Vec<TimedRow>,
    /// Cost of the first row; the others have the same.
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
    /// Log ratio of latency to the default's, chained through the incumbents, mean over all positions; `None` if it was
    /// not timed.
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

    /// Half the width of the interval of its log ratio to the incumbent, mean over all positions; 0 for the first trial of the default.
    pub fn log_spread(&self) -> f64 {
        let ratios = self.timed.iter().filter_map(|row| row.timing.ratio.filter(|ratio| ratio.low > 0.0));
        mean(ratios.map(|ratio| (ratio.high / ratio.low).ln() / 2.0)).unwrap_or(0.0)
    }

    pub fn is_kept(&self) -> bool {
        self.decision.is_some_and(Decision::is_kept)
    }

    /// The result in the form that a search learns from.
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

    /// As [`floor_gap`], over all its positions.
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

/// What a campaign found: the candidate that builds take, in the figures of the closing duel.
#[derive(Debug, Clone, PartialEq)]
pub struct Headline<'a> {
    pub best: &'a Entry,
    pub is_default: bool,
    /// Latency of the best divided by the default's: exactly 1 for the default; `None` until the two were timed in turns. Over
    /// several positions, the geometric mean of each bound.
    pub ratio: Option<RatioInterval>,
    /// Ascending.
    pub positions: Vec<HeadlineRow>,
}

/// One position of a [`Headline`].
#[derive(Debug, Clone, PartialEq)]
pub struct HeadlineRow {
    pub position: u32,
    /// Median of the closing duel; before there was one, of the trial that timed the default first.
    pub default_us: f64,
    /// In the closing duel `default_us * ratio`; before there was one, the median of the best candidate's own trial.
    pub best_us: f64,
    pub ratio: Option<RatioInterval>,
    /// Floor of the best candidate.
    pub floor_us: Option<f64>,
    pub bytes_per_step: u64,
}

impl Headline<'_> {
    /// How many times as fast as the default the best is.
    pub fn speed(&self) -> Option<RatioInterval> {
        self.ratio.map(RatioInterval::inverse)
    }
}

impl History {
    /// The result of this campaign; `None` before the default was timed.
    pub fn headline(&self) -> Option<Headline<'_>> {
        let (best, first) = (self.incumbent()?, self.first()?);
        let is_default = best.candidate == self.default;
        let duel = self.duel();
        let against = duel.unwrap_or(first);
        let mut positions = vec![];
        for row in &against.timed {
            let Timing { position, latency_us_p50: default_us, ratio, .. } = row.timing;
            let own = best.timed.iter().map(|row| &row.timing).find(|timing| timing.position == position);
            let own = own.unwrap_or(&row.timing);
            let ratio = match (is_default, duel) {
                (true, _) => Some(RatioInterval::ONE),
                // The duel's ratio is that of the default to the best.
                (false, Some(_)) => ratio.map(RatioInterval::inverse),
                (false, None) => None,
            };
            let best_us = match (is_default, ratio) {
                (true, _) => default_us,
                (false, Some(ratio)) => default_us * ratio.p50,
                (false, None) => own.latency_us_p50,
            };
            let (floor_us, bytes_per_step) = (own.floor_us, own.bytes_per_step);
            positions.push(HeadlineRow { position, default_us, best_us, ratio, floor_us, bytes_per_step });
        }
        let ratios: Option<Vec<RatioInterval>> = positions.iter().map(|row| row.ratio).collect();
        let ratio =
            if is_default { Some(RatioInterval::ONE) } else { ratios.and_then(|all| RatioInterval::mean(&all)) };
        Some(Headline { best, is_default, ratio, positions })
    }

    /// The last comparison of the default with the best; `None` if there was none, or if a candidate was kept after it.
    fn duel(&self) -> Option<&Entry> {
        let closes = |entry: &&Entry| {
            entry.proposer == Proposer::Default && entry.decision.is_some_and(|decision| decision != Decision::First)
        };
        let at = self.entries.iter().rposition(|entry| closes(&entry))?;
        let rest = self.entries.get(at + 1..).unwrap_or_default();
        if rest.iter().any(Entry::is_kept) { None } else { self.entries.get(at) }
    }

    /// Log ratio of latency to the default's, as it is shown to people: exactly 0 for the default, whatever its chained ratio is.
    pub fn shown_log_ratio(&self, entry: &Entry) -> Option<f64> {
        entry.log_ratio().map(|log| if entry.candidate == self.default { 0.0 } else { log })
    }

    /// The candidate that was kept last; `None` before the default was timed.
    pub fn incumbent(&self) -> Option<&Entry> {
        self.entries.iter().rfind(|entry| entry.is_kept())
    }

    /// The first timed trial of the default.
    pub fn first(&self) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.decision == Some(Decision::First))
    }

    /// Candidates that ran, without comparisons with the default.
    pub fn trials(&self) -> usize {
        self.entries.iter().filter(|entry| entry.number.is_some() && entry.proposer != Proposer::Default).count()
    }

    /// Median width of the intervals of ratios, as a fraction of the ratio; `None` if no candidate was timed in turns.
    pub fn interval_width(&self) -> Option<f64> {
        let timed = self.entries.iter().flat_map(|entry| &entry.timed);
        let ratios = timed.filter_map(|row| row.timing.ratio.filter(|ratio| ratio.p50 > 0.0));
        let mut widths: Vec<f64> = ratios.map(|ratio| (ratio.high - ratio.low) / ratio.p50).collect();
        widths.sort_by(f64::total_cmp);
        widths.get(widths.len() / 2).copied()
    }

    /// [`History::interval_width`], if the intervals are so wide that the campaign says little.
    pub fn too_noisy(&self) -> Option<f64> {
        self.interval_width().filter(|width| *width > NOISY_WIDTH)
    }

    /// How large the effect of each knob was: the difference in log ratio between two trials that differ in that knob alone, of
    /// the pair whose difference is certainly the largest, and the number of such pairs. The largest effect first. Knobs
    /// without a pair, and knobs whose effect may be 0 in every pair, are left out.
    pub fn importance(&self) -> Vec<Importance> {
        let timed: Vec<(Values, f64, f64)> = self
            .entries
            .iter()
            .filter_map(|entry| Some((entry.candidate.values(), entry.log_ratio()?, entry.log_spread())))
            .collect();
        let mut found: BTreeMap<usize, Importance> = BTreeMap::new();
        for (at, (a, a_log, a_spread)) in timed.iter().enumerate() {
            for (b, b_log, b_spread) in &timed[..at] {
                let mut turned = (0..KNOB_NAMES.len()).filter(|&knob| a[knob] != b[knob]);
                let (Some(knob), None) = (turned.next(), turned.next()) else { continue };
                let (effect, spread) = ((a_log - b_log).abs(), a_spread.hypot(*b_spread));
                let none = Importance { knob: KNOB_NAMES[knob], pairs: 0, effect: 0.0, low: 0.0, high: 0.0 };
                let own = found.entry(knob).or_insert(none);
                own.pairs += 1;
                if effect - spread > own.low {
                    (own.effect, own.low, own.high) = (effect, effect - spread, effect + spread);
                }
            }
        }
        let mut found: Vec<Importance> = found.into_values().filter(|importance| importance.low > 0.0).collect();
        found.sort_by(|a, b| b.effect.total_cmp(&a.effect));
        found
    }
}

/// The effect of one knob in a campaign.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Importance {
    pub knob: &'static str,
    /// Pairs of trials that differ in it alone.
    pub pairs: usize,
    /// A difference of log ratios in those pairs, with its interval.
    pub effect: f64,
    pub low: f64,
    pub high: f64,
}

/// Reads trials into campaigns, in the order of their first rows. Rows of builds without a search belong to none. A campaign
/// without a row of its default is left out, because there is nothing to compare with.
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
    // Log ratio of latency to the default's, of each row.
    let mut relative: BTreeMap<Digest, f64> = BTreeMap::new();
    let mut at = 0;
    while let Some(first) = rows.get(at) {
        let point = &first.facts().point;
        // Rows of one trial were appended together; a point that does not fit has one row.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flywheel::{Facts, Point, Verdict};
    use std::time::SystemTime;

    const DEFAULT: &str = "sms=132;consumer_warps=8;ring_slots=6;slot_bytes=32768;flight_high=4;flight_low=2;flight_free=4;heads_per_task=1;splits=32;split_from=384;mechanism=packets";

    /// A campaign of rows at positions 32 and 1024, in the order in which a search appends them.
    struct MadeUp {
        rows: Vec<Trial>,
        /// Rows of the incumbent.
        incumbent: [Option<Digest>; 2],
    }

    impl MadeUp {
        fn new() -> MadeUp {
            MadeUp { rows: vec![], incumbent: [None; 2] }
        }

        /// One trial: candidate, latencies, and its ratios to the incumbent.
        fn trial(&mut self, splits: u32, us: [f64; 2], ratios: Option<[f64; 2]>, decision: Decision) {
            let number = self.rows.len() as u32 / 2;
            let candidate = DEFAULT.replace("splits=32", &format!("splits={splits}"));
            let proposer = if splits == 32 { Proposer::Default } else { Proposer::Local };
            let mut ids = [None; 2];
            for (at, position) in [32, 1024].into_iter().enumerate() {
                let ratio = ratios.map(|ratios| RatioInterval {
                    p50: ratios[at],
                    low: ratios[at] * 0.99,
                    high: ratios[at] * 1.01,
                });
                let Verdict::Ok { check, timing } = crate::flywheel::trial::tests::ok(position, us[at]) else {
                    panic!("a timing")
                };
                let (p10, p90) = (us[at] * 0.99, us[at] * 1.01);
                let timing = Timing {
                    position,
                    latency_us_p10: p10,
                    latency_us_p50: us[at],
                    latency_us_p90: p90,
                    ratio,
                    floor_us: Some(40.0),
                    ..timing
                };
                let facts = crate::flywheel::trial::tests::facts();
                let point = Point {
                    candidate: candidate.clone(),
                    candidate_digest: Digest::of(candidate.as_bytes()),
                    trial: Some(number),
                    proposer,
                    decision: Some(decision),
                    incumbent: self.incumbent[at],
                    ..facts.point.clone()
                };
                let row =
                    Trial::new(Facts { point, ..facts }, Verdict::Ok { check, timing }, SystemTime::UNIX_EPOCH, 0)
                        .expect("a sound row");
                ids[at] = Some(row.trial_id());
                self.rows.push(row);
            }
            if decision.is_kept() {
                self.incumbent = ids;
            }
        }

        fn history(&self) -> History {
            histories(&self.rows).pop().expect("a campaign")
        }
    }

    fn assert_near(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-9, "{found}, expected {expected}");
    }

    #[test]
    fn a_default_that_wins_the_closing_duel_is_exactly_1() {
        let mut campaign = MadeUp::new();
        campaign.trial(32, [100.0, 200.0], None, Decision::First);
        campaign.trial(16, [50.0, 90.0], Some([0.5, 0.5]), Decision::Faster);
        // Timed in turns, the two are equal: the gain was noise. By chained ratios, the default would be twice as fast as itself.
        campaign.trial(32, [101.0, 202.0], Some([1.0, 1.0]), Decision::Simpler);
        let history = campaign.history();
        let headline = history.headline().expect("timed");
        assert!(headline.is_default);
        assert_eq!((headline.ratio, headline.speed()), (Some(RatioInterval::ONE), Some(RatioInterval::ONE)));
        let rows: Vec<_> = headline.positions.iter().map(|row| (row.position, row.default_us, row.best_us)).collect();
        assert_eq!(rows, [(32, 101.0, 101.0), (1024, 202.0, 202.0)]);
        assert!(headline.positions.iter().all(|row| row.ratio == Some(RatioInterval::ONE)));
        let shown: Vec<f64> = history.entries.iter().filter_map(|entry| history.shown_log_ratio(entry)).collect();
        assert_eq!((shown[0], shown[2]), (0.0, 0.0));
        assert_near(shown[1], 0.5_f64.ln());
    }

    #[test]
    fn a_winner_has_the_figures_of_the_closing_duel_and_not_of_the_chain() {
        let mut campaign = MadeUp::new();
        campaign.trial(32, [100.0, 200.0], None, Decision::First);
        campaign.trial(16, [80.0, 160.0], Some([0.8, 0.8]), Decision::Faster);
        campaign.trial(8, [60.0, 120.0], Some([0.7, 0.7]), Decision::Faster);
        let before = campaign.history();
        let headline = before.headline().expect("timed");
        assert_eq!((headline.is_default, headline.ratio), (false, None), "no duel, no figure");
        assert_eq!((headline.positions[0].default_us, headline.positions[0].best_us), (100.0, 60.0));

        // The chain says 0.56; in turns, the default takes 1.25 and 1.6 of the best's time.
        campaign.trial(32, [110.0, 210.0], Some([1.25, 1.6]), Decision::Reverted);
        let history = campaign.history();
        let headline = history.headline().expect("timed");
        assert_eq!(headline.best.candidate.splits, 8);
        let ratio = headline.ratio.expect("a duel");
        assert_near(ratio.p50, (1.0_f64 / (1.25 * 1.6)).sqrt());
        assert_near(headline.speed().expect("a duel").p50, 2.0_f64.sqrt());
        assert!(ratio.low < ratio.p50 && ratio.p50 < ratio.high);
        assert_near(headline.positions[0].best_us, 110.0 / 1.25);
        assert_near(headline.positions[1].best_us, 210.0 / 1.6);

        // A later candidate that was kept has had no duel yet.
        campaign.trial(4, [50.0, 100.0], Some([0.9, 0.9]), Decision::Faster);
        assert_eq!(campaign.history().headline().expect("timed").ratio, None);
    }
}
