//! Owns `Search`: what to try next, as a function of a seed and of what came of everything before.
//!
//! Ask and tell: [`Search::ask`] changes nothing and depends on nothing but the seed and what was told, so a search that is
//! told the rows of an interrupted one goes on where that one stopped, and asking a copy that was told "reverted" says
//! what will probably come next, which is what is compiled ahead.
//!
//! Order: the default; warm seeds from the prior; then moves around the incumbent, one knob at a time and the most
//! promising first, mixed with bolder points of several knobs. Moves that gained too little to be kept are tried together.
//! After a run of reverts the moves start from somewhere else.

use std::collections::BTreeSet;

use crate::candidate::{Candidate, Values};
use crate::flywheel::Proposer;

use super::prior::{Group, Opinion, Prior};
use super::space::Space;
use crate::random::Random;

/// When to stop, and with which luck.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    pub seed: u64,
    /// Measured candidates beyond the default.
    pub trials: u32,
    /// Reverts in a row after which nothing more is expected.
    pub plateau: u32,
    /// Stop where the latency is above the floor by no more than this fraction.
    pub floor_gap: f64,
}

impl Limits {
    /// Limits of a budget: a plateau is half of it, and not before 24 reverts; 2 % above the floor is the end.
    pub fn of_budget(trials: u32, seed: u64) -> Limits {
        Limits { seed, trials, plateau: (trials / 2).max(24), floor_gap: 0.02 }
    }
}

/// Reverts in a row after which local moves begin somewhere else.
const RESTART_AFTER: u32 = 10;
/// Infeasible points and repetitions cost milliseconds, but not for ever: this many for each measured trial.
const IDLE_PER_TRIAL: u32 = 20;
/// Random points that one bold proposal is the best of.
const BOLD_POOL: usize = 24;
/// Share of bold proposals.
const BOLD_SHARE: f64 = 0.2;
/// A gain that two medians show, as a log of ratios: less is noise, and not added up.
const SMALL_GAIN: f64 = -0.002;
/// Knobs in which a point differs that gained a little: of more, one cannot say which gained.
const SMALL_MOVES: usize = 3;
/// Worth of the unknown in log ratio: what an unexplored direction may be better than its prediction.
const CURIOSITY: f64 = 0.03;
/// A point that failed near here is tried when nothing else is left.
const RISK_COST: f64 = 0.5;

/// What may come of a trial, for looking ahead: how probable, and its ratio, by what is expected or, where it is kept, by
/// the incumbent. Two reverts, because the ranking behind a bad surprise differs from that behind a tie.
const AHEAD: [(f64, f64, bool); 3] = [(0.55, 1.0, false), (0.3, 1.03, false), (0.15, 0.97, true)];

/// Why nothing more is tried.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Stop {
    Trials(u32),
    Minutes(f64),
    Plateau(u32),
    Floor { gap: f64 },
    Exhausted,
    Interrupted,
}

impl std::fmt::Display for Stop {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Stop::Trials(trials) => write!(f, "the budget of {trials} trials is spent"),
            Stop::Minutes(minutes) => write!(f, "the budget of {minutes} minutes is spent"),
            Stop::Plateau(reverts) => write!(f, "plateau: {reverts} reverts in a row"),
            Stop::Floor { gap } => write!(f, "within {:.1} % of the floor", gap * 100.0),
            Stop::Exhausted => f.write_str("every point that can be reached was tried"),
            Stop::Interrupted => f.write_str("interrupted"),
        }
    }
}

/// What came of a proposal.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Outcome {
    /// Checked and timed. `ratio`: latency by the incumbent's of that moment; 1 for the first.
    Timed { ratio: f64, kept: bool },
    /// Wrong, hung, crashed or rejected.
    Failed,
    /// Does not fit: no trial was spent.
    Infeasible,
    /// Makes what another candidate makes: no trial was spent.
    Duplicate,
}

/// The answer to [`Search::ask`].
#[derive(Debug, Clone, PartialEq)]
pub enum Ask {
    Try { candidate: Candidate, proposer: Proposer },
    Stop(Stop),
}

/// The state of a search.
#[derive(Clone)]
pub struct Search<'a> {
    space: &'a Space,
    limits: Limits,
    prior: Prior,
    /// What this search alone has learned, where others spoke before it: moves are chosen by that as soon as one was reverted, so
    /// that what is different here is found all the same.
    alone: Option<Prior>,
    /// The cost model's log ratio by the default, 0 where it has none.
    guess: &'a (dyn Fn(&Candidate) -> f64 + Sync),
    warm: Vec<Candidate>,
    seen: BTreeSet<Values>,
    incumbent: Option<(Candidate, f64)>,
    /// Timed candidates with the log of their latency by the default's, best first.
    elite: Vec<(f64, Candidate)>,
    /// Measured, the default aside.
    trials: u32,
    idle: u32,
    /// Reverts and failures since the last keep, and since the last keep or restart.
    reverts: u32,
    floor_gap: Option<f64>,
}

impl<'a> Search<'a> {
    /// `first` is tried before the seeds of the prior.
    pub fn new(
        space: &'a Space,
        limits: Limits,
        groups: &[Group],
        prior: Prior,
        first: Vec<Candidate>,
        guess: &'a (dyn Fn(&Candidate) -> f64 + Sync),
    ) -> Search<'a> {
        let mut warm = first;
        warm.retain(|candidate| space.admits(candidate).is_ok());
        warm.extend(prior.seeds(groups, space, &|c| guess(c)));
        let alone = (!prior.is_cold()).then(|| prior.cold());
        Search {
            space,
            limits,
            prior,
            alone,
            guess,
            warm,
            seen: BTreeSet::new(),
            incumbent: None,
            elite: vec![],
            trials: 0,
            idle: 0,
            reverts: 0,
            floor_gap: None,
        }
    }

    /// The best so far and the log of its latency by the default's.
    pub fn incumbent(&self) -> Option<&(Candidate, f64)> {
        self.incumbent.as_ref()
    }

    /// Candidates measured beyond the default.
    pub fn trials(&self) -> u32 {
        self.trials
    }

    pub fn prior(&self) -> &Prior {
        &self.prior
    }

    pub fn default_candidate(&self) -> &Candidate {
        self.space.default_candidate()
    }

    /// What was timed, the best first, with the log of its latency by the default's.
    pub fn tried(&self) -> impl Iterator<Item = (f64, &Candidate)> {
        self.elite.iter().map(|(log, candidate)| (*log, candidate))
    }

    pub fn space(&self) -> &Space {
        self.space
    }

    /// Takes note of the comparison at the end: the default against the best. It is no trial, and decides who is the best.
    pub fn settle(&mut self, default: &Candidate, outcome: Outcome) {
        if matches!(outcome, Outcome::Timed { kept: true, .. }) {
            self.incumbent = Some((default.clone(), 0.0));
        }
    }

    /// Says how far the incumbent's latency is above its floor, as a fraction of the floor.
    pub fn tell_floor(&mut self, gap: Option<f64>) {
        self.floor_gap = gap;
    }

    /// Takes note of what came of a candidate, whoever proposed it.
    pub fn tell(&mut self, candidate: &Candidate, outcome: Outcome) {
        self.seen.insert(candidate.values());
        match outcome {
            Outcome::Infeasible | Outcome::Duplicate => {
                self.idle += 1;
                return;
            }
            Outcome::Timed { ratio, kept } => {
                let base = self.incumbent.as_ref().map_or(0.0, |(_, log)| *log);
                let log = base + ratio.max(f64::MIN_POSITIVE).ln();
                let first = self.incumbent.is_none();
                self.learn(candidate, Some(log));
                let at = self.elite.partition_point(|(other, _)| *other <= log);
                self.elite.insert(at, (log, candidate.clone()));
                if kept || first {
                    self.incumbent = Some((candidate.clone(), log));
                    self.reverts = 0;
                } else {
                    self.reverts += 1;
                }
                if first {
                    return;
                }
            }
            Outcome::Failed => {
                self.learn(candidate, None);
                if self.incumbent.is_none() {
                    // The default itself failed: nothing is there to compare with, and asking again would not end.
                    self.idle += 1;
                    return;
                }
                self.reverts += 1;
            }
        }
        self.trials += 1;
    }

    fn learn(&mut self, candidate: &Candidate, log_ratio: Option<f64>) {
        self.prior.learn(candidate, log_ratio);
        self.alone.iter_mut().for_each(|alone| alone.learn(candidate, log_ratio));
    }

    /// What to try next.
    pub fn ask(&self) -> Ask {
        let Some((incumbent, _)) = &self.incumbent else {
            let default = self.space.default_candidate().clone();
            return match self.is_new(&default) {
                true => Ask::Try { candidate: default, proposer: Proposer::Default },
                false => Ask::Stop(Stop::Exhausted),
            };
        };
        if self.trials >= self.limits.trials {
            return Ask::Stop(Stop::Trials(self.limits.trials));
        }
        if let Some(gap) = self.floor_gap.filter(|gap| *gap <= self.limits.floor_gap) {
            return Ask::Stop(Stop::Floor { gap });
        }
        if self.reverts >= self.limits.plateau {
            return Ask::Stop(Stop::Plateau(self.reverts));
        }
        if self.idle > IDLE_PER_TRIAL * (self.limits.trials + 1) {
            return Ask::Stop(Stop::Exhausted);
        }
        if let Some(candidate) = self.warm.iter().find(|c| self.is_new(c)) {
            return Ask::Try { candidate: candidate.clone(), proposer: Proposer::Prior };
        }
        if let Some(candidate) = self.together() {
            return Ask::Try { candidate, proposer: Proposer::Explore };
        }
        let mut random = Random::stream(self.limits.seed, "ask", u64::from(self.trials));
        let base = self.base(incumbent);
        let bold = random.unit() < BOLD_SHARE * (1.0 + f64::from(self.reverts % RESTART_AFTER) / 8.0);
        let found = match bold {
            true => self.bold(&base, &mut random).or_else(|| self.local(&base, &mut random)),
            false => self.local(&base, &mut random).or_else(|| self.bold(&base, &mut random)),
        };
        match found.or_else(|| self.any(&mut random)) {
            Some((candidate, proposer)) => Ask::Try { candidate, proposer },
            None => Ask::Stop(Stop::Exhausted),
        }
    }

    /// Whether the search was told of this point.
    pub fn is_new(&self, candidate: &Candidate) -> bool {
        !self.seen.contains(&candidate.values())
    }

    /// What the search thinks of a point.
    pub fn opinion(&self, candidate: &Candidate) -> Opinion {
        self.prior.opinion(candidate, (self.guess)(candidate))
    }

    /// Lower is tried sooner.
    fn score(&self, base: &Candidate, candidate: &Candidate) -> f64 {
        let prior = self.alone.as_ref().filter(|_| self.reverts > 0).unwrap_or(&self.prior);
        let Opinion { log_ratio, support, risk } = prior.opinion(candidate, (self.guess)(candidate));
        let curiosity = CURIOSITY * prior.promise(base, candidate);
        log_ratio - curiosity / (1.0 + support).sqrt() + RISK_COST * risk
    }

    /// Where local moves start: the incumbent, and after each run of reverts another good point, or a far one.
    fn base(&self, incumbent: &Candidate) -> Candidate {
        let restarts = self.reverts / RESTART_AFTER;
        if restarts == 0 {
            return incumbent.clone();
        }
        // The same as long as the run of reverts lasts.
        let mut random = Random::stream(self.limits.seed, "restart", u64::from(self.trials / RESTART_AFTER));
        let others: Vec<&Candidate> =
            self.elite.iter().map(|(_, c)| c).filter(|c| *c != incumbent).take(2 + restarts as usize).collect();
        match others.get(random.below(others.len() + 1)) {
            Some(other) => (*other).clone(),
            None => {
                let mut choose = |count| random.below(count);
                self.space.mutated(incumbent, 3, &mut choose).unwrap_or_else(|| incumbent.clone())
            }
        }
    }

    /// The incumbent with all changes of two or more points near it that were a little faster, the best of them first: each was
    /// reverted for gaining less than the margin, and together they may gain more.
    fn together(&self) -> Option<Candidate> {
        let (incumbent, best) = self.incumbent.as_ref()?;
        let of = incumbent.values();
        let (mut sum, mut parts) = (of, 0);
        for (_, candidate) in self.elite.iter().take_while(|(log, _)| log - best < SMALL_GAIN) {
            let values = candidate.values();
            let turned = || (0..of.len()).filter(|&knob| values[knob] != of[knob]);
            let moves = turned().count();
            if moves == 0 || moves > SMALL_MOVES || turned().any(|knob| sum[knob] != of[knob]) {
                continue;
            }
            turned().for_each(|knob| sum[knob] = values[knob]);
            parts += 1;
        }
        let candidate = Candidate::of_values(&sum);
        (parts > 1 && self.is_new(&candidate) && self.space.admits(&candidate).is_ok()).then_some(candidate)
    }

    /// The most promising point one knob away that is new.
    fn local(&self, base: &Candidate, random: &mut Random) -> Option<(Candidate, Proposer)> {
        let fresh = self.space.neighbours(base).into_iter().filter(|c| self.is_new(c));
        let scored = fresh.map(|c| (self.score(base, &c) + 0.002 * random.unit(), c));
        let best = scored.min_by(|a, b| a.0.total_cmp(&b.0));
        best.map(|(_, candidate)| (candidate, Proposer::Local))
    }

    /// The most promising of some points two or three knobs away.
    fn bold(&self, base: &Candidate, random: &mut Random) -> Option<(Candidate, Proposer)> {
        let mut best: Option<(f64, Candidate)> = None;
        for _ in 0..BOLD_POOL {
            let moves = 2 + random.below(2);
            let mut choose = |count| random.below(count);
            let Some(candidate) = self.space.mutated(base, moves, &mut choose).filter(|c| self.is_new(c)) else {
                continue;
            };
            let score = self.score(base, &candidate);
            if best.as_ref().is_none_or(|(least, _)| score < *least) {
                best = Some((score, candidate));
            }
        }
        best.map(|(_, candidate)| (candidate, Proposer::Explore))
    }

    /// A point from anywhere, once all that is near was tried.
    fn any(&self, random: &mut Random) -> Option<(Candidate, Proposer)> {
        (0..64).find_map(|_| {
            let moves = 1 + random.below(6);
            let mut choose = |count| random.below(count);
            let found = self.space.mutated(self.space.default_candidate(), moves, &mut choose);
            found.filter(|c| self.is_new(c)).map(|c| (c, Proposer::Explore))
        })
    }

    /// What will probably be asked next, most likely first: the answers to copies that are told what may come of the
    /// answer before.
    pub fn ahead(&self, count: usize) -> Vec<Candidate> {
        let mut found: Vec<Candidate> = vec![];
        let mut scenarios = vec![(1.0f64, self.clone())];
        // Scenarios often agree on what comes next; four for each candidate is a limit, not a plan.
        for _ in 0..4 * count {
            let likely = scenarios.iter().enumerate().max_by(|a, b| a.1.0.total_cmp(&b.1.0)).map(|(at, _)| at);
            let Some((probability, copy)) = likely.map(|at| scenarios.swap_remove(at)) else { break };
            if found.len() == count {
                break;
            }
            let Ask::Try { candidate, .. } = copy.ask() else { continue };
            let log = copy.opinion(&candidate).log_ratio - copy.incumbent.as_ref().map_or(0.0, |(_, log)| *log);
            for (share, ratio, kept) in AHEAD {
                let mut told = copy.clone();
                let ratio = if kept { ratio } else { log.exp().max(1.0) * ratio };
                told.tell(&candidate, Outcome::Timed { ratio, kept });
                scenarios.push((probability * share, told));
            }
            if !found.contains(&candidate) {
                found.push(candidate);
            }
        }
        found
    }
}
