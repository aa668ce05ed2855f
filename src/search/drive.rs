//! Owns the loop of a campaign: ask the search, build, run, judge, record, tell the search; until there is a reason to stop.
//!
//! An [`Arena`] builds and runs candidates: the pipeline with a device in a child process, or a simulated landscape in a test. A trial is
//! recorded before the search learns its result, so that later campaigns read everything that this one acted on.

use std::collections::BTreeMap;

use crate::candidate::Candidate;
use crate::digest::Digest;
use crate::flywheel::{Decision, Proposer};

use super::history::History;
use super::judge::{Judged, Rounds, judge, judge_default};
use super::propose::{Ask, Outcome, Search, Stop};
use super::space::Space;

/// Log ratios of one trial by two ways differ by rounding alone, unless its incumbent was another one.
const STALE: f64 = 1e-9;

/// Builds and times candidates.
pub trait Arena {
    /// A candidate that was built.
    type Built;
    /// What the arena records about a trial, besides its times.
    type Evidence;
    type Fault;

    /// Lowers, places, proves and compiles. `ahead`: the candidates that will probably be asked for next.
    ///
    /// # Errors
    /// Faults that end the campaign.
    fn make(&mut self, candidate: &Candidate, ahead: &[Candidate]) -> Result<BuildOutcome<Self::Built>, Self::Fault>;

    /// Checks and times a candidate, in turns with the incumbent if there is one.
    ///
    /// # Errors
    /// As [`Arena::make`].
    fn run(
        &mut self,
        candidate: &Candidate,
        made: &Self::Built,
        incumbent: Option<&Candidate>,
    ) -> Result<RunOutcome<Self::Evidence>, Self::Fault>;

    /// Records the result of a candidate, before the search acts on it.
    ///
    /// # Errors
    /// As [`Arena::make`]: a trial that cannot be recorded did not take place.
    fn record(&mut self, settled: &TrialRecord<'_, Self::Built, Self::Evidence>) -> Result<(), Self::Fault>;

    /// A reason to stop from outside the search: an interrupt, or the clock.
    fn stop(&mut self) -> Option<Stop>;

    /// How far the candidate that was kept last is above the floor of its bytes, as a fraction; `None` if unknown.
    fn floor_gap(&mut self) -> Option<f64>;
}

/// Result of building a candidate.
pub enum BuildOutcome<T> {
    /// `artefact` names what would run: two candidates with the same one are duplicates.
    Ready {
        artefact: Digest,
        made: T,
    },
    Infeasible(String),
}

/// Result of running one.
pub enum RunOutcome<E> {
    /// Checked. `rounds` is empty for the first candidate, which has no incumbent to take turns with.
    Timed { rounds: Vec<Rounds>, evidence: E },
    /// Wrong, hung or crashed, or a time that cannot be true.
    Failed(E),
    /// The user stopped it: the trial does not count.
    Interrupted,
}

/// A candidate with its result.
pub struct TrialRecord<'a, T, E> {
    /// Number in the campaign; `None` for an infeasible candidate.
    pub number: Option<u32>,
    pub candidate: &'a Candidate,
    pub proposer: Proposer,
    pub result: TrialResult<'a, T, E>,
}

pub enum TrialResult<'a, T, E> {
    Infeasible(&'a str),
    Failed { made: &'a T, evidence: &'a E },
    First { made: &'a T, evidence: &'a E },
    Judged { made: &'a T, evidence: &'a E, judged: &'a Judged },
}

/// A trial of an interrupted campaign, read from its rows.
#[derive(Debug, Clone, PartialEq)]
pub struct PastTrial {
    pub number: u32,
    pub candidate: Candidate,
    pub artefact: Option<Digest>,
    pub proposer: Proposer,
    pub outcome: Outcome,
}

/// How a campaign ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Driven {
    pub best: Option<Candidate>,
    pub stop: Stop,
    /// Measured by this run, the default included.
    pub ran: u32,
    /// Duplicates, each with the candidate that gives the same artefact.
    pub duplicates: Vec<(Candidate, Candidate)>,
}

/// The state that a campaign resumes from, and its settings.
pub struct Start<'p, F> {
    pub past: Vec<PastTrial>,
    /// Fraction by which a candidate has to be faster to be kept.
    pub margin: f64,
    /// An external proposer. It is asked first; the answer `None` leaves the trial to the search.
    pub external: Option<Proposes<'p, F>>,
}

/// An external proposer: sees the search and answers a candidate, or none.
pub type Proposes<'p, F> = &'p mut dyn FnMut(&Search<'_>) -> Result<Option<Candidate>, F>;

/// The trials of a campaign. A default that failed is left out, so that it is tried again: without a default there is nothing to compare
/// with.
pub fn past_trials(history: &History) -> Vec<PastTrial> {
    let entries = history.entries.iter().filter(|e| e.number != Some(0) || e.outcome() != Outcome::Failed);
    // Log ratio of the incumbent to the default, as its rows have it.
    let mut incumbent = 0.0;
    entries
        .map(|entry| {
            let mut outcome = entry.outcome();
            if let (Outcome::Timed { ratio, kept, deep }, Some(log)) = (&mut outcome, entry.log_ratio()) {
                // A trial of many machines may have been timed against an earlier incumbent than the last one.
                if !*kept && (log - incumbent - ratio.ln()).abs() > STALE {
                    (*ratio, *deep) = ((log - incumbent).exp(), None);
                }
                if *kept {
                    incumbent = log;
                }
            }
            PastTrial {
                number: entry.number.unwrap_or(0),
                candidate: entry.candidate.clone(),
                artefact: entry.schedule,
                proposer: entry.proposer,
                outcome,
            }
        })
        .collect()
}

/// The point where an earlier run left a campaign.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Resumed {
    /// Number of the next trial.
    pub number: u32,
    /// Candidates by the digest of their artefact.
    pub artefacts: BTreeMap<Digest, Candidate>,
    /// The trial that compared the best candidate with the default at the end.
    pub compared: Option<u32>,
}

/// Tells a new search the results of the trials so far.
pub fn replay(search: &mut Search<'_>, past: &[PastTrial]) -> Resumed {
    let mut resumed = Resumed::default();
    for PastTrial { number, candidate, artefact, proposer, outcome } in past {
        resumed.number = resumed.number.max(number + 1);
        if let Some(artefact) = artefact {
            resumed.artefacts.entry(*artefact).or_insert_with(|| candidate.clone());
        }
        if *proposer == Proposer::Default && *number > 0 {
            search.settle(candidate, *outcome);
            // Another trial reopens the decision at the end of an earlier run.
            resumed.compared = Some(*number);
        } else {
            search.tell(candidate, *outcome);
        }
    }
    resumed
}

/// Runs a campaign to its end, from where `start.past` left it.
///
/// At the end the default is timed in turns with the best candidate: a campaign ends with the default unless the best is certainly faster.
///
/// # Errors
/// The first fault of the arena. What was recorded before stays recorded.
pub fn drive<A: Arena>(
    arena: &mut A,
    search: &mut Search<'_>,
    mut start: Start<'_, A::Fault>,
    ahead: usize,
) -> Result<Driven, A::Fault> {
    let default = search.default_candidate().clone();
    let Resumed { mut number, mut artefacts, compared } = replay(search, &start.past);
    let mut driven = Driven { best: None, stop: Stop::Interrupted, ran: 0, duplicates: vec![] };
    loop {
        if let Some(stop) = arena.stop() {
            driven.stop = stop;
            break;
        }
        search.tell_floor(arena.floor_gap());
        let (candidate, proposer) = match asked(search, &mut start.external)? {
            Ask::Stop(stop) => {
                driven.stop = stop;
                break;
            }
            Ask::Try { candidate, proposer } => (candidate, proposer),
        };
        let likely = search.ahead(ahead);
        let (artefact, made) = match arena.make(&candidate, &likely)? {
            BuildOutcome::Ready { artefact, made } => (artefact, made),
            BuildOutcome::Infeasible(reason) => {
                let result = TrialResult::Infeasible(&reason);
                arena.record(&TrialRecord { number: None, candidate: &candidate, proposer, result })?;
                search.tell(&candidate, Outcome::Infeasible);
                continue;
            }
        };
        if let Some(other) = artefacts.get(&artefact) {
            driven.duplicates.push((candidate.clone(), other.clone()));
            search.tell(&candidate, Outcome::Duplicate);
            continue;
        }
        let incumbent = search.incumbent().map(|(candidate, _)| candidate.clone());
        let simpler = incumbent
            .as_ref()
            .is_some_and(|incumbent| Space::distance(&candidate, &default) < Space::distance(incumbent, &default));
        let decide = |rounds: &[Rounds]| judge(rounds, start.margin, simpler);
        let Some(outcome) = settle(arena, number, &candidate, proposer, &made, incumbent.as_ref(), &decide)? else {
            driven.stop = Stop::Interrupted;
            break;
        };
        artefacts.insert(artefact, candidate.clone());
        search.tell(&candidate, outcome);
        number += 1;
        driven.ran += 1;
    }
    let incumbent = search.incumbent().map(|(candidate, _)| candidate.clone());
    if let Some(best) = incumbent.filter(|best| *best != default)
        && driven.stop != Stop::Interrupted
        && compared.is_none_or(|at| at + 1 < number)
        && let BuildOutcome::Ready { made, .. } = arena.make(&default, &[])?
    {
        let proposer = Proposer::Default;
        let decide = |rounds: &[Rounds]| judge_default(rounds, start.margin);
        if let Some(outcome) = settle(arena, number, &default, proposer, &made, Some(&best), &decide)? {
            search.settle(&default, outcome);
            driven.ran += 1;
        }
    }
    driven.best = search.incumbent().map(|(candidate, _)| candidate.clone());
    Ok(driven)
}

/// The next proposal: of the external proposer if it has a new one, else of the search.
pub(super) fn asked<F>(search: &Search<'_>, external: &mut Option<Proposes<'_, F>>) -> Result<Ask, F> {
    let ask = search.ask();
    if let (Some(external), Ask::Try { proposer, .. }) = (external, &ask)
        && *proposer != Proposer::Default
        && let Some(candidate) = external(search)?
        && search.is_new(&candidate)
    {
        return Ok(Ask::Try { candidate, proposer: Proposer::External });
    }
    Ok(ask)
}

/// Runs, judges and records one candidate; `None` if the user stopped it.
fn settle<A: Arena>(
    arena: &mut A,
    number: u32,
    candidate: &Candidate,
    proposer: Proposer,
    made: &A::Built,
    incumbent: Option<&Candidate>,
    decide: &dyn Fn(&[Rounds]) -> Judged,
) -> Result<Option<Outcome>, A::Fault> {
    let number = Some(number);
    Ok(match arena.run(candidate, made, incumbent)? {
        RunOutcome::Interrupted => None,
        RunOutcome::Failed(evidence) => {
            let result = TrialResult::Failed { made, evidence: &evidence };
            arena.record(&TrialRecord { number, candidate, proposer, result })?;
            Some(Outcome::Failed)
        }
        RunOutcome::Timed { evidence, .. } if incumbent.is_none() => {
            let result = TrialResult::First { made, evidence: &evidence };
            arena.record(&TrialRecord { number, candidate, proposer, result })?;
            Some(Outcome::Timed { ratio: 1.0, kept: true, deep: None })
        }
        RunOutcome::Timed { rounds, evidence } => {
            let judged = decide(&rounds);
            let result = TrialResult::Judged { made, evidence: &evidence, judged: &judged };
            arena.record(&TrialRecord { number, candidate, proposer, result })?;
            Some(match &judged.overall {
                Some(overall) => Outcome::Timed {
                    ratio: overall.ratio,
                    kept: judged.decision != Decision::Reverted,
                    deep: judged.deep(),
                },
                // Without sound times a candidate failed; the default stays the default.
                None if judged.decision.is_kept() => Outcome::Timed { ratio: 1.0, kept: true, deep: None },
                None => Outcome::Failed,
            })
        }
    })
}
