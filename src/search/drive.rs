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
    entries
        .map(|entry| PastTrial {
            number: entry.number.unwrap_or(0),
            candidate: entry.candidate.clone(),
            artefact: entry.schedule,
            proposer: entry.proposer,
            outcome: entry.outcome(),
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
fn asked<F>(search: &Search<'_>, external: &mut Option<Proposes<'_, F>>) -> Result<Ask, F> {
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

#[cfg(test)]
mod tests {
    use super::super::prior::{Prior, Setting};
    use super::super::propose::Limits;
    use super::super::space::KNOBS;
    use super::*;
    use crate::abba::Round;
    use crate::dtype::{DType, Precision};
    use crate::flywheel::ModelShape;
    use crate::model::config::import_config_only;
    use crate::random::Random;
    use crate::target::Target;

    const BF16: Precision = Precision { weights: DType::Bf16, cache: DType::Bf16, wire: DType::Bf16 };

    fn space() -> Space {
        let config = include_str!("../../manifests/configs/llama-3.2-1b.json");
        let graph = import_config_only(config, 0).expect("a config of the repository").graph;
        let target = Target::builtin("h200").expect("a record");
        let space = Space::new(&graph, &target, BF16, 4096, Candidate::default_for(&graph, &target, BF16), |_| 30_000);
        assert_eq!(space.admits(space.default_candidate()), Ok(()));
        space
    }

    fn setting() -> Setting {
        let model = ModelShape {
            model_graph: Digest::of(b"model"),
            family: "LlamaForCausalLM".to_string(),
            layers: 16,
            hidden: 2048,
            intermediate: 8192,
            heads: 32,
            kv_heads: 8,
            head_dim: 64,
            vocab: 128_256,
            parameters: 1,
            weights_dtype: "bf16".to_string(),
            cache_dtype: "bf16".to_string(),
            wire_dtype: "bf16".to_string(),
        };
        Setting::new(&model, "h200", "cuda")
    }

    /// Latency divided by the default's: a valley whose bottom is some octaves away from the default in a few knobs.
    fn landscape(candidate: &Candidate, default: &Candidate) -> f64 {
        let moves = super::super::prior::moves(&candidate.values(), &default.values());
        let (mut cost, mut least) = (0.0, 0.0);
        for (at, best) in [(2, -0.4), (3, 0.9), (6, -0.8), (9, 1.0)] {
            cost += 0.05 * (moves[at] - best).powi(2);
            least += 0.05 * f64::powi(best, 2);
        }
        let rest: f64 = [0, 1, 4, 5, 7, 8].iter().map(|&at: &usize| 0.03 * moves[at].powi(2)).sum();
        1.0 + cost + rest - least
    }

    /// A simulated machine, on which one trial in `one_in` fails in some way.
    struct MadeUp {
        default: Candidate,
        random: Random,
        one_in: usize,
        wrong: BTreeMap<String, &'static str>,
        recorded: Vec<(String, bool)>,
        stop_after: usize,
        disk_is_full: bool,
    }

    impl Arena for MadeUp {
        type Built = ();
        type Evidence = &'static str;
        type Fault = &'static str;

        fn make(&mut self, candidate: &Candidate, _: &[Candidate]) -> Result<BuildOutcome<()>, &'static str> {
            if *candidate != self.default && self.random.below(self.one_in) == 0 {
                return Ok(BuildOutcome::Infeasible("injected".to_string()));
            }
            Ok(BuildOutcome::Ready { artefact: Digest::of(candidate.to_string().as_bytes()), made: () })
        }

        fn run(
            &mut self,
            candidate: &Candidate,
            (): &(),
            incumbent: Option<&Candidate>,
        ) -> Result<RunOutcome<&'static str>, &'static str> {
            if let Some(incumbent) = incumbent {
                assert!(!self.wrong.contains_key(&incumbent.to_string()), "a wrong candidate became the incumbent");
                if *candidate != self.default && self.random.below(self.one_in) == 0 {
                    let how = ["wrong result", "hang", "crash", "below the floor"][self.random.below(4)];
                    self.wrong.insert(candidate.to_string(), how);
                    return Ok(RunOutcome::Failed(how));
                }
            }
            let Some(incumbent) = incumbent else { return Ok(RunOutcome::Timed { rounds: vec![], evidence: "ok" }) };
            let times = [incumbent, candidate].map(|c| landscape(c, &self.default));
            let mut noisy = |us: f64| us * (0.998 + 0.004 * self.random.unit());
            let rounds = (0..7)
                .map(|_| Round { a: [noisy(times[0]), noisy(times[0])], b: [noisy(times[1]), noisy(times[1])] })
                .collect();
            Ok(RunOutcome::Timed { rounds: vec![Rounds { position: 32, rounds }], evidence: "ok" })
        }

        fn record(&mut self, settled: &TrialRecord<'_, (), &'static str>) -> Result<(), &'static str> {
            if self.disk_is_full {
                return Err("disk full");
            }
            let failed = matches!(settled.result, TrialResult::Failed { .. });
            self.recorded.push((settled.candidate.to_string(), failed));
            Ok(())
        }

        fn stop(&mut self) -> Option<Stop> {
            (self.recorded.len() >= self.stop_after).then_some(Stop::Interrupted)
        }

        fn floor_gap(&mut self) -> Option<f64> {
            None
        }
    }

    fn made_up(space: &Space, seed: u64, one_in: usize) -> MadeUp {
        MadeUp {
            default: space.default_candidate().clone(),
            random: Random::stream(seed, "faults", 0),
            one_in,
            wrong: BTreeMap::new(),
            recorded: vec![],
            stop_after: usize::MAX,
            disk_is_full: false,
        }
    }

    fn search<'s>(space: &'s Space, trials: u32, seed: u64) -> Search<'s> {
        let prior = Prior::new(&[], setting(), space);
        Search::new(space, Limits { plateau: trials, ..Limits::of_budget(trials, seed) }, &[], prior, vec![], &|_| 0.0)
    }

    fn start() -> Start<'static, &'static str> {
        Start { past: vec![], margin: 0.01, external: None }
    }

    #[test]
    fn sixty_trials_find_the_valley_and_a_seed_decides_them() {
        let space = space();
        let mut found = vec![];
        for seed in 0..8 {
            let run = || {
                let (mut arena, mut search) = (made_up(&space, seed, usize::MAX), search(&space, 60, seed));
                let driven = drive(&mut arena, &mut search, start(), 0).expect("no fault");
                (driven, arena.recorded)
            };
            let (driven, recorded) = run();
            let best = driven.best.clone().expect("measured");
            let ratio = landscape(&best, space.default_candidate());
            assert!(best == *space.default_candidate() || ratio < 0.99, "seed {seed}: {best}, {ratio}");
            found.push(ratio);
            if seed == 0 {
                assert_eq!((driven, recorded), run(), "the same seed asks the same");
            }
        }
        // The bottom is at 0.886; a few seeds come half way, and none ends worse than the default.
        found.sort_by(f64::total_cmp);
        assert!(found[4] < 0.92 && found[7] <= 1.0, "{found:?}");
    }

    #[test]
    fn what_gained_too_little_alone_is_tried_together() {
        let space = space();
        let mut search = search(&space, 60, 3);
        let default = space.default_candidate().clone();
        search.tell(&default, Outcome::Timed { ratio: 1.0, kept: true, deep: None });
        let with = |changes: &str| Candidate::parse(changes, &default).expect("a candidate");
        for (changes, ratio) in
            [("heads_per_task=2", 0.994), ("splits=8", 0.995), ("heads_per_task=4", 0.997), ("hold_qkv=3", 1.01)]
        {
            assert_ne!(search.ask(), try_of(&with("heads_per_task=2;splits=8")), "before {changes}");
            search.tell(&with(changes), Outcome::Timed { ratio, kept: false, deep: None });
            if changes == "splits=8" {
                assert_eq!(
                    search.ask(),
                    try_of(&with("heads_per_task=2;splits=8")),
                    "both, and each the best of its knob"
                );
                search
                    .tell(&with("heads_per_task=2;splits=8"), Outcome::Timed { ratio: 0.989, kept: true, deep: None });
            }
        }
    }

    fn try_of(candidate: &Candidate) -> Ask {
        Ask::Try { candidate: candidate.clone(), proposer: Proposer::Explore }
    }

    #[test]
    fn of_a_thousand_injected_faults_none_becomes_the_incumbent_and_none_is_lost() {
        let space = space();
        let (mut faults, mut seed) = (0, 0);
        while faults < 1000 {
            let (mut arena, mut search) = (made_up(&space, seed, 2), search(&space, 100, seed));
            let driven = drive(&mut arena, &mut search, start(), 0).expect("no fault of the arena");
            let best = driven.best.expect("the default at least").to_string();
            assert!(!arena.wrong.contains_key(&best));
            for wrong in arena.wrong.keys() {
                assert!(arena.recorded.contains(&(wrong.clone(), true)), "{wrong} is not recorded as failed");
            }
            faults += arena.wrong.len();
            seed += 1;
        }
    }

    #[test]
    fn a_trial_that_cannot_be_recorded_did_not_take_place() {
        let space = space();
        let (mut arena, mut search) = (made_up(&space, 1, usize::MAX), search(&space, 10, 1));
        arena.disk_is_full = true;
        assert_eq!(drive(&mut arena, &mut search, start(), 0), Err("disk full"));
        assert_eq!(search.incumbent(), None);
    }

    #[test]
    fn knobs_are_those_that_a_candidate_prints_and_neighbours_are_legal() {
        let space = space();
        let default = space.default_candidate();
        let printed: Vec<String> =
            default.to_string().split(';').map(|pair| pair.split('=').next().unwrap_or_default().to_string()).collect();
        assert_eq!(printed, KNOBS.map(|knob| knob.name));
        let neighbours = space.neighbours(default);
        assert!(neighbours.len() > 10, "{}", neighbours.len());
        for neighbour in neighbours {
            assert_eq!(space.admits(&neighbour), Ok(()), "{neighbour}");
            assert!(Space::distance(&neighbour, default) >= 1);
        }
        assert!(space.knobs().all(|(knob, _)| knob.name != "mechanism"), "kernels have packets alone");
    }
}
