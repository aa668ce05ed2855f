//! Owns `CampaignArena`: candidates are made through the chain, run by a child process, and recorded in the user's trials.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::abba::Ratio;
use crate::candidate::Candidate;
use crate::digest::Digest;
use crate::error::Fault;
use crate::flywheel::{Decision, Origin, Proposer, RatioInterval, Timing, Trial, Verdict};
use crate::manifest::SearchKernel;
use crate::report::{Progress, Report};
use crate::search::space::changed;
use crate::search::{Arena, BuildOutcome, RunOutcome, Stop, TrialRecord, TrialResult, floor_gap};

use super::ahead::Ahead;
use super::chain::{Chain, Host};
use super::keys::Hardware;
use super::made::{Made, Maker, Unmade};
use super::rows::{Asked, PositionVerdict, TrialRow, WaveRow, check_figures, timing};
use super::search_start::{Incumbent, predicted_us};
use super::stages::BuildContext;
use super::trial::{Answer, Job};
use super::worker::{Done, Worker};

/// A child that has to import, compare and load first.
const DEADLINE_COLD: Duration = Duration::from_secs(900);
/// A trial of a warm child: seconds, unless something hangs. Slow models get a multiple of what trials took so far.
const DEADLINE_WARM: Duration = Duration::from_secs(120);
const DEADLINE_FACTOR: u32 = 10;

/// Time that a campaign spent outside of the search itself.
#[derive(Default)]
pub(super) struct Spent {
    /// Lowering, placing, proving and compiling, or waiting for a thread that does.
    pub made: Duration,
    pub child: Duration,
    /// Check and measure, in the child.
    pub measured: Duration,
    /// The full check of the best, at the end.
    pub checked: Duration,
}

/// The arena of a real campaign.
pub(super) struct CampaignArena<'a> {
    pub context: BuildContext<'a>,
    pub host: &'a Host<'a>,
    pub maker: &'a Maker<'a>,
    pub report: &'a Report,
    /// Trials of the campaign that are done, beyond the first.
    pub progress: Progress<'a>,
    pub hardware: &'a Hardware,
    pub campaign: Digest,
    pub default: Candidate,
    /// Lines to tell before the first candidate is made: a campaign that has nothing to do says nothing.
    pub intro: Vec<String>,
    pub worker: Worker<'a>,
    pub ahead: &'a Ahead<'a>,
    pub started: Instant,
    pub minutes: f64,
    pub trial_timeout: Option<Duration>,
    pub stop: &'a dyn Fn() -> bool,
    /// Row of the incumbent at each position.
    pub incumbent_rows: BTreeMap<u32, Incumbent>,
    pub floor_gap: Option<f64>,
    /// What went wrong with the trial that failed last.
    pub last_failure: Option<String>,
    /// Time of the slowest trial that was timed.
    pub slowest: Duration,
    pub spent: Spent,
}

/// What the child told of a trial.
pub(super) struct Evidence {
    /// One for each timed position, or one for the whole trial.
    verdicts: Vec<Verdict>,
    check_ms: Option<f64>,
    measure_ms: Option<f64>,
    /// The worker of another machine that told it, and what that ran on.
    pub elsewhere: Option<(Origin, Hardware)>,
}

impl Evidence {
    pub fn failed(verdict: Verdict) -> Evidence {
        Evidence { verdicts: vec![verdict], check_ms: None, measure_ms: None, elsewhere: None }
    }
}

/// Time limit of a trial. `slowest`: the time of the slowest trial so far.
pub(super) fn deadline(trial_timeout: Option<Duration>, is_warm: bool, slowest: Duration) -> Duration {
    match (trial_timeout, is_warm) {
        (Some(deadline), _) => deadline,
        (None, true) => DEADLINE_WARM.max(slowest * DEADLINE_FACTOR),
        (None, false) => DEADLINE_COLD,
    }
}

/// What became of a candidate.
///
/// # Errors
/// A fault of the child that is not about the candidate.
pub(super) fn outcome_of(done: Done) -> Result<RunOutcome<Evidence>, Fault> {
    Ok(match done {
        Done::Interrupted => RunOutcome::Interrupted,
        Done::Late(after) => {
            let detail = format!("no answer within {after:?}; the child process was killed");
            RunOutcome::Failed(Evidence::failed(Verdict::Timeout { detail, check: None }))
        }
        Done::Died(detail) => RunOutcome::Failed(Evidence::failed(Verdict::Crash { detail, check: None })),
        Done::Answer(Answer::Fault(fault)) => return Err(fault),
        Done::Answer(Answer::Failed { failure, detail, figures, check_ms }) => {
            RunOutcome::Failed(Evidence { check_ms, ..Evidence::failed(failure.verdict(detail, figures)) })
        }
        Done::Answer(Answer::Timed { figures, timed, rounds, check_ms, measure_ms }) => {
            let check = check_figures(figures);
            let verdicts = timed.iter().map(|timed| Verdict::Ok { check, timing: timing(timed, None) }).collect();
            let (check_ms, measure_ms) = (Some(check_ms), Some(measure_ms));
            let evidence = Evidence { verdicts, check_ms, measure_ms, elsewhere: None };
            RunOutcome::Timed { rounds: Answer::rounds(&rounds), evidence }
        }
    })
}

impl CampaignArena<'_> {
    fn asked(&self, number: Option<u32>, proposer: Proposer, decision: Option<Decision>) -> Asked {
        Asked { campaign: self.campaign, trial: number, seed: self.context.manifest.search.seed, proposer, decision }
    }

    /// Appends the rows of a trial. `against` says whether it took turns with the incumbent.
    fn append(&self, made: &Made<'_>, asked: Asked, evidence: &Evidence, against: bool) -> Result<Vec<Trial>, Fault> {
        match made {
            Made::Decode(chain) => self.append_row((chain, None), asked, evidence, against),
            Made::Wave(wave) => {
                let row = WaveRow { candidate: &wave.candidate, made: Some(wave) };
                self.append_row((&wave.chain, Some(row)), asked, evidence, against)
            }
        }
    }

    /// The same of a candidate that was not made.
    fn append_unmade(&self, candidate: &Candidate, asked: Asked, verdict: Verdict) -> Result<(), Fault> {
        let evidence = Evidence::failed(verdict);
        let chain = Chain::new(self.context, self.host, candidate.without_waves());
        let wave = (self.context.searched() != SearchKernel::Decode).then_some(WaveRow { candidate, made: None });
        self.append_row((&chain, wave), asked, &evidence, false).map(drop)
    }

    fn append_row(
        &self,
        (chain, wave): (&Chain<'_>, Option<WaveRow<'_>>),
        asked: Asked,
        evidence: &Evidence,
        against: bool,
    ) -> Result<Vec<Trial>, Fault> {
        let candidate = wave.map_or(&chain.candidate, |wave| wave.candidate);
        let (origin, hardware) = match &evidence.elsewhere {
            Some((origin, hardware)) => (origin.clone(), hardware),
            None => (Origin::default(), self.hardware),
        };
        // A candidate that was never placed ran on no hardware.
        let ran = wave.map_or(chain.made().0.is_some(), |wave| wave.made.is_some());
        let row = TrialRow { chain, wave, hardware: ran.then_some(hardware), origin, asked: Some(asked) };
        let rows = evidence.verdicts.iter().map(|verdict| {
            let position = verdict.timing().map(|timing| timing.position);
            let incumbent = match position {
                Some(position) => self.incumbent_rows.get(&position),
                // A trial without times still names the incumbent that it was compared with.
                None => self.incumbent_rows.values().next(),
            };
            let mut verdict = verdict.clone();
            if let Verdict::Ok { timing, .. } = &mut verdict {
                timing.ratio_vs_default = match (*candidate == self.default, timing.ratio, incumbent) {
                    (true, ..) => Some(1.0),
                    (false, Some(ratio), Some(incumbent)) => Some(incumbent.ratio_vs_default * ratio.p50),
                    _ => None,
                };
            }
            PositionVerdict {
                verdict,
                incumbent: incumbent.map(|incumbent| incumbent.row).filter(|_| against),
                predicted_us: position.and_then(|position| predicted_us(&self.context, candidate, position)),
            }
        });
        row.append_rows(evidence.check_ms, evidence.measure_ms, rows.collect())
    }
}

impl<'a> Arena for CampaignArena<'a> {
    type Built = Made<'a>;
    type Evidence = Evidence;
    type Fault = Fault;

    fn make(&mut self, candidate: &Candidate, ahead: &[Candidate]) -> Result<BuildOutcome<Made<'a>>, Fault> {
        self.intro.drain(..).for_each(|line| self.report.note(&line));
        let started = Instant::now();
        let made = match self.ahead.take(candidate, ahead) {
            Some(made) => made,
            None => match self.maker.make(candidate) {
                Ok(made) => made,
                Err(Unmade::Infeasible(reason)) => return Ok(BuildOutcome::Infeasible(reason)),
                Err(Unmade::Unproven(fault)) => {
                    // A schedule or a plan of our own that cannot be proven is our bug: it stops the search, and is a row, so
                    // that the same command goes on without it.
                    let (detail, asked) = (fault.message.clone(), self.asked(None, Proposer::Local, None));
                    self.append_unmade(candidate, asked, Verdict::Rejected { detail })?;
                    return Err(fault);
                }
                Err(Unmade::Fault(fault)) => return Err(fault),
            },
        };
        self.spent.made += started.elapsed();
        Ok(BuildOutcome::Ready { artefact: made.artefact()?, made })
    }

    fn run(
        &mut self,
        candidate: &Candidate,
        _made: &Made<'a>,
        incumbent: Option<&Candidate>,
    ) -> Result<RunOutcome<Evidence>, Fault> {
        let job = Job {
            campaign: self.campaign.to_string(),
            candidate: candidate.to_string(),
            incumbent: incumbent.map(ToString::to_string),
        };
        let deadline = deadline(self.trial_timeout, self.worker.is_warm(), self.slowest);
        let started = Instant::now();
        let done = self.worker.run(&job, deadline, self.stop)?;
        let took = started.elapsed();
        self.spent.child += took;
        if let Done::Answer(Answer::Timed { check_ms, measure_ms, .. }) = &done {
            self.slowest = self.slowest.max(took);
            self.spent.measured += Duration::from_secs_f64((check_ms + measure_ms).max(0.0) / 1e3);
        }
        outcome_of(done)
    }

    fn record(&mut self, record: &TrialRecord<'_, Made<'a>, Evidence>) -> Result<(), Fault> {
        let TrialRecord { number, candidate, proposer, result } = record;
        let what = changed(candidate, &self.default);
        let line = |of: String| match number {
            Some(number) => format!("trial {number} {proposer}: {what}: {of}"),
            None => format!("{proposer}: {what}: {of}"),
        };
        match result {
            TrialResult::Infeasible(reason) => {
                let asked = self.asked(None, *proposer, None);
                self.append_unmade(candidate, asked, Verdict::Infeasible { detail: reason.to_string() })?;
                self.report.note(&line(format!("infeasible: {reason}")));
            }
            TrialResult::Failed { made, evidence } => {
                self.progress.inc(1);
                let asked = self.asked(*number, *proposer, None);
                self.append(made, asked, evidence, true)?;
                let verdict = evidence.verdicts.first();
                let said =
                    verdict.map(|verdict| format!("{}: {}", verdict.name(), verdict.detail())).unwrap_or_default();
                self.report.note(&line(said.clone()));
                self.last_failure = Some(said);
            }
            TrialResult::First { made, evidence } => {
                let asked = self.asked(*number, *proposer, Some(Decision::First));
                let rows = self.append(made, asked, evidence, false)?;
                self.keep(&rows);
                let times: Vec<String> = rows
                    .iter()
                    .filter_map(|row| row.verdict().timing())
                    .map(|timing| format!("{:.1} µs at position {}", timing.latency_us_p50, timing.position))
                    .collect();
                self.report.note(&line(times.join(", ")));
            }
            TrialResult::Judged { made, evidence, judged } => {
                self.progress.inc(1);
                let asked = self.asked(*number, *proposer, Some(judged.decision));
                let ratios: BTreeMap<u32, RatioInterval> = judged
                    .positions
                    .iter()
                    .filter_map(|(position, ratio)| {
                        let Ratio { ratio, low, high, .. } = (*ratio)?;
                        Some((*position, RatioInterval { p50: ratio, low: low.min(ratio), high: high.max(ratio) }))
                    })
                    .collect();
                let with_ratio = |verdict: &Verdict| match verdict {
                    Verdict::Ok { check, timing } => {
                        let ratio = ratios.get(&timing.position).copied();
                        Verdict::Ok { check: *check, timing: Timing { ratio, ..timing.clone() } }
                    }
                    other => other.clone(),
                };
                let verdicts = evidence.verdicts.iter().map(with_ratio).collect();
                let Evidence { check_ms, measure_ms, elsewhere, .. } = evidence;
                let evidence =
                    Evidence { verdicts, check_ms: *check_ms, measure_ms: *measure_ms, elsewhere: elsewhere.clone() };
                let rows = self.append(made, asked, &evidence, true)?;
                if judged.decision.is_kept() {
                    self.keep(&rows);
                }
                let all: Vec<RatioInterval> = ratios.values().copied().collect();
                let mean = judged.overall.as_ref().and_then(|_| RatioInterval::mean(&all));
                self.report.note(&match proposer {
                    Proposer::Default => duel_text(mean, judged.decision),
                    _ => line(judged_text(mean, judged.decision)),
                });
            }
        }
        Ok(())
    }

    fn stop(&mut self) -> Option<Stop> {
        if (self.stop)() {
            return Some(Stop::Interrupted);
        }
        (self.started.elapsed().as_secs_f64() >= self.minutes * 60.0).then_some(Stop::Minutes(self.minutes))
    }

    fn floor_gap(&mut self) -> Option<f64> {
        self.floor_gap
    }
}

/// `mean`: over positions, as `status` and `report` read it from the rows.
fn judged_text(mean: Option<RatioInterval>, decision: Decision) -> String {
    match mean {
        Some(RatioInterval { p50, low, high }) => {
            format!("{p50:.3} of the incumbent's time, {low:.3} to {high:.3}: {decision}")
        }
        None => "no sound times".to_string(),
    }
}

/// As [`judged_text`], of the default in turns with the best candidate, at the end.
fn duel_text(mean: Option<RatioInterval>, decision: Decision) -> String {
    let stays = if decision.is_kept() { "the default stays" } else { "the best stays" };
    match mean {
        Some(RatioInterval { p50, low, high }) => {
            format!("closing duel: default / best = {p50:.3} ({low:.3} to {high:.3}): {stays}")
        }
        None => format!("closing duel: no sound times: {stays}"),
    }
}

impl CampaignArena<'_> {
    fn keep(&mut self, rows: &[Trial]) {
        let incumbents = rows.iter().filter_map(|row| {
            let timing = row.verdict().timing()?;
            let ratio_vs_default = timing.ratio_vs_default.unwrap_or(1.0);
            Some((timing.position, Incumbent { row: row.trial_id(), ratio_vs_default }))
        });
        self.incumbent_rows = incumbents.collect();
        self.floor_gap = floor_gap(rows.iter().filter_map(|row| row.verdict().timing()));
    }
}
