//! Owns `Search`: what to try next, as a function of a random seed and of all results so far.
//!
//! Ask and tell: [`Search::ask`] changes nothing, and depends only on the random seed and on the results told. A search that is told the
//! rows of an interrupted one therefore resumes it. A copy that is told "reverted" answers what will probably be asked next; that
//! candidate is compiled ahead.
//!
//! Order:
//! 1. the default;
//! 2. warm starts from the prior, as long as one promises enough;
//! 3. moves that gained too little to be kept, together;
//! 4. the point with the largest expected improvement (Jones, Schonlau and Welch, "Efficient global optimization of expensive
//!    black-box functions", 1998) by the additive model: among the points one knob away and unions of the best of them, or among
//!    random points several knobs away.
//!
//! After a run of reverts the moves start from another point.

use std::collections::BTreeSet;

use crate::candidate::{Candidate, Values};
use crate::flywheel::Proposer;

use super::additive::Expected;
use super::prior::{Group, Logs, Opinion, Prior, WarmStart};
use super::space::Space;
use crate::random::Random;

/// When to stop, and the random seed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    pub seed: u64,
    /// Measured candidates beyond the default.
    pub trials: u32,
    /// Reverts in a row after which the search stops.
    pub plateau: u32,
    /// The search stops if the latency is above the floor by no more than this fraction.
    pub floor_gap: f64,
}

impl Limits {
    /// Limits of a budget: a plateau is three quarters of the trials and at least 24; 2 % above the floor ends the search.
    pub fn of_budget(trials: u32, seed: u64) -> Limits {
        Limits { seed, trials, plateau: (trials / 4 * 3).max(24), floor_gap: 0.02 }
    }
}

/// Reverts in a row after which local moves start from another point.
const RESTART_AFTER: u32 = 10;
/// Bound on infeasible points and duplicates for each measured trial: they cost milliseconds, but must end.
const IDLE_PER_TRIAL: u32 = 20;
/// Random points of two or three knobs to choose from.
const BOLD_POOL: usize = 24;
/// Most promising moves of one knob whose unions are considered.
const JOINED: usize = 8;
/// Share of proposals that come from the random points.
const BOLD_SHARE: f64 = 0.2;
/// Factor on the model's standard deviation: unknown points are rarely a gain.
const OPTIMISM: f64 = 0.7;
/// A gain, as a log ratio, that is not worth a trial.
const NO_GAIN: f64 = 0.002;
/// Random share of an expected improvement, so that random seeds give different searches.
const LUCK: f64 = 0.2;
/// A gain that two medians can show, as a log ratio. Smaller ones are noise, and are not combined.
const SMALL_GAIN: f64 = -0.002;
/// Number of first trials that may be warm starts, and the least expected improvement of one, as a log ratio.
const WARM_STARTS: u32 = 4;
const PROMISING: f64 = 0.01;
/// Points within this log ratio of the best one are near-ties; at most this many are used.
const AS_GOOD: f64 = 0.004;
const ALIKE_MOST: usize = 3;
/// Most knobs in which a point with a small gain may differ: with more, it is unclear which one gained.
const SMALL_MOVES: usize = 3;
/// Power of the probability of success: a point near a failed one is tried late.
const CAUTION: i32 = 4;

/// Possible results of a trial, for looking ahead: probability, ratio, and whether it is kept. The ratio of a kept trial is relative
/// to the incumbent, otherwise to the expected latency. There are two reverts, because the ranking after a bad surprise differs from the
/// ranking after a tie.
const AHEAD: [(f64, f64, bool); 3] = [(0.55, 1.0, false), (0.3, 1.03, false), (0.15, 0.97, true)];

/// Why the search stops.
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

/// Result of a proposal.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Outcome {
    /// Checked and timed. `ratio`: latency divided by the latency of the incumbent at that moment; 1 for the first trial.
    /// `deep`: the part of the log of `ratio` that grows with the position; `None` if only one position was timed.
    Timed { ratio: f64, kept: bool, deep: Option<f64> },
    /// Wrong, hung, crashed or rejected.
    Failed,
    /// Does not fit: no trial was spent.
    Infeasible,
    /// Gives the same artefact as another candidate: no trial was spent.
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
    /// The cost model's log ratio to the default, 0 if it has none.
    guess: &'a (dyn Fn(&Candidate) -> f64 + Sync),
    /// Tried before anything else.
    first: Vec<Candidate>,
    warm_starts: Vec<WarmStart>,
    seen: BTreeSet<Values>,
    /// Points that run somewhere and have no result yet.
    reserved: BTreeSet<Values>,
    incumbent: Option<(Candidate, f64)>,
    /// The part of the incumbent's log ratio that grows with the position.
    incumbent_deep: f64,
    /// Timed candidates with their log ratio to the default, best first.
    elite: Vec<(f64, Candidate)>,
    /// Measured candidates without the default.
    trials: u32,
    idle: u32,
    /// Reverts and failures since the last keep, and since the last keep or restart.
    reverts: u32,
    floor_gap: Option<f64>,
}

impl<'a> Search<'a> {
    /// `first` is tried before the warm starts of the prior.
    pub fn new(
        space: &'a Space,
        limits: Limits,
        groups: &[Group],
        prior: Prior,
        mut first: Vec<Candidate>,
        guess: &'a (dyn Fn(&Candidate) -> f64 + Sync),
    ) -> Search<'a> {
        first.retain(|candidate| space.admits(candidate).is_ok());
        let warm_starts = prior.warm_starts(groups, space);
        Search {
            space,
            limits,
            prior,
            guess,
            first,
            warm_starts,
            seen: BTreeSet::new(),
            reserved: BTreeSet::new(),
            incumbent: None,
            incumbent_deep: 0.0,
            elite: vec![],
            trials: 0,
            idle: 0,
            reverts: 0,
            floor_gap: None,
        }
    }

    /// The best candidate so far, with its log ratio to the default.
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

    /// Timed candidates with their log ratio to the default, best first.
    pub fn tried(&self) -> impl Iterator<Item = (f64, &Candidate)> {
        self.elite.iter().map(|(log, candidate)| (*log, candidate))
    }

    pub fn space(&self) -> &Space {
        self.space
    }

    /// Learns the comparison at the end, of the default with the best candidate. It is no trial, and decides which one is the best.
    pub fn settle(&mut self, default: &Candidate, outcome: Outcome) {
        if matches!(outcome, Outcome::Timed { kept: true, .. }) {
            (self.incumbent, self.incumbent_deep) = (Some((default.clone(), 0.0)), 0.0);
        }
    }

    /// Learns how far the incumbent's latency is above its floor, as a fraction of the floor.
    pub fn tell_floor(&mut self, gap: Option<f64>) {
        self.floor_gap = gap;
    }

    /// Takes a candidate out of what is asked, until it has a result. It counts as a trial of the budget.
    pub fn reserve(&mut self, candidate: &Candidate) {
        self.reserved.insert(candidate.values());
    }

    /// Learns the result of a candidate, from any proposer.
    pub fn tell(&mut self, candidate: &Candidate, outcome: Outcome) {
        self.seen.insert(candidate.values());
        self.reserved.remove(&candidate.values());
        match outcome {
            Outcome::Infeasible | Outcome::Duplicate => {
                self.idle += 1;
                return;
            }
            Outcome::Timed { ratio, kept, deep } => {
                let base = self.incumbent.as_ref().map_or(0.0, |(_, log)| *log);
                let log = base + ratio.max(f64::MIN_POSITIVE).ln();
                let first = self.incumbent.is_none();
                let deep = deep.map(|deep| self.incumbent_deep + deep);
                self.learn(candidate, Some(Logs { mean: log, deep }));
                let at = self.elite.partition_point(|(other, _)| *other <= log);
                self.elite.insert(at, (log, candidate.clone()));
                if kept || first {
                    self.incumbent = Some((candidate.clone(), log));
                    self.incumbent_deep = deep.unwrap_or(0.0);
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
                    // The default itself failed: there is nothing to compare with, and asking again would not end.
                    self.idle += 1;
                    return;
                }
                self.reverts += 1;
            }
        }
        self.trials += 1;
    }

    fn learn(&mut self, candidate: &Candidate, logs: Option<Logs>) {
        self.prior.learn(candidate, (self.guess)(candidate), logs);
    }

    /// What to try next.
    pub fn ask(&self) -> Ask {
        let Some((incumbent, log)) = &self.incumbent else {
            let default = self.space.default_candidate().clone();
            return match self.is_new(&default) {
                true => Ask::Try { candidate: default, proposer: Proposer::Default },
                false => Ask::Stop(Stop::Exhausted),
            };
        };
        if self.begun() >= self.limits.trials {
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
        let first = self.first.iter().find(|c| self.is_new(c));
        if let Some(candidate) = first.or_else(|| self.warm_start(incumbent, *log)) {
            return Ask::Try { candidate: candidate.clone(), proposer: Proposer::Prior };
        }
        if let Some(candidate) = self.together() {
            return Ask::Try { candidate, proposer: Proposer::Explore };
        }
        let mut random = Random::stream(self.limits.seed, "ask", u64::from(self.begun()));
        let best = self.best().unwrap_or(incumbent);
        let base = self.base(best, &mut random);
        let found = self.promising(&base, best, random.unit() < BOLD_SHARE, &mut random);
        match found.or_else(|| self.any(&mut random)) {
            Some((candidate, proposer)) => Ask::Try { candidate, proposer },
            None => Ask::Stop(Stop::Exhausted),
        }
    }

    /// Trials, and candidates that will be some.
    fn begun(&self) -> u32 {
        self.trials + self.reserved.len() as u32
    }

    /// Whether this point has no result yet, and none is awaited.
    pub fn is_new(&self, candidate: &Candidate) -> bool {
        let values = candidate.values();
        !self.seen.contains(&values) && !self.reserved.contains(&values)
    }

    /// The prediction for a point.
    pub fn opinion(&self, candidate: &Candidate) -> Opinion {
        self.prior.opinion(candidate, (self.guess)(candidate))
    }

    /// The warm start with the largest expected improvement. It depends on the results of the warm starts before.
    fn warm_start(&self, incumbent: &Candidate, log: f64) -> Option<&Candidate> {
        if self.begun() >= WARM_STARTS {
            return None;
        }
        let new = self.warm_starts.iter().filter(|start| self.is_new(&start.candidate));
        let gain = |start: &WarmStart| {
            let (c, guess) = (&start.candidate, self.guess);
            let Expected { spread, .. } = self.prior.between((incumbent, guess(incumbent)), (c, guess(c)));
            expected_improvement(log - self.prior.promised(start, guess(c)), spread)
        };
        let best = new.map(|start| (gain(start), &start.candidate)).max_by(|a, b| a.0.total_cmp(&b.0));
        best.filter(|(gain, _)| *gain > PROMISING).map(|(_, candidate)| candidate)
    }

    /// The incumbent, or a point that is faster by less than the margin: moves from there may gain the rest.
    fn best(&self) -> Option<&Candidate> {
        let (incumbent, log) = self.incumbent.as_ref()?;
        let found = self.elite.first().filter(|(faster, _)| faster - log < SMALL_GAIN);
        Some(found.map_or(incumbent, |(_, candidate)| candidate))
    }

    /// Expected improvement of a point over `best`, lowered near points that failed.
    fn improvement(&self, best: &Candidate, candidate: &Candidate) -> f64 {
        let guess = self.guess;
        let Expected { log_ratio, spread } = self.prior.between((best, guess(best)), (candidate, guess(candidate)));
        let safe = (1.0 - self.prior.risk(candidate)).max(0.0).powi(CAUTION);
        let spread = OPTIMISM * spread * self.prior.promise(best, candidate);
        expected_improvement(-log_ratio - NO_GAIN, spread) * safe
    }

    /// Starts at the best or a near-tie; after each plateau of [`RESTART_AFTER`] reverts at another elite point, later at a random one.
    fn base(&self, best: &Candidate, random: &mut Random) -> Candidate {
        let restarts = (self.reverts / RESTART_AFTER) as usize;
        let most = self.elite.first().map_or(0.0, |(log, _)| *log);
        let others = self.elite.iter().filter(|(_, c)| c != best);
        if restarts == 0 {
            let alike: Vec<&Candidate> =
                others.take_while(|(log, _)| log - most < AS_GOOD).take(ALIKE_MOST).map(|(_, c)| c).collect();
            // The best one in most cases.
            let at = random.below(3 * alike.len() + 1);
            return alike.get(at).map_or(best, |other| *other).clone();
        }
        // The same as long as the run of reverts lasts.
        let mut random = Random::stream(self.limits.seed, "restart", u64::from(self.trials / RESTART_AFTER));
        let others: Vec<&Candidate> = others.take(2 + restarts).map(|(_, c)| c).collect();
        match others.get(random.below(others.len() + usize::from(restarts > 1))) {
            Some(other) => (*other).clone(),
            None => self.space.mutated(best, 3, &mut |count| random.below(count)).unwrap_or_else(|| best.clone()),
        }
    }

    /// The incumbent with the changes of two or more near points that gained less than the margin: together they may gain enough.
    /// Changes of the best points come first.
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

    /// The point around `base` with the largest expected improvement over `best`; if `bold`, among random points.
    fn promising(
        &self,
        base: &Candidate,
        best: &Candidate,
        bold: bool,
        random: &mut Random,
    ) -> Option<(Candidate, Proposer)> {
        let mut pool: Vec<(Candidate, Proposer)> = vec![];
        if bold {
            pool.extend((0..BOLD_POOL).filter_map(|_| {
                let moves = 2 + random.below(2);
                Some((self.space.mutated(base, moves, &mut |count| random.below(count))?, Proposer::Explore))
            }));
        } else {
            let moves = self.space.neighbours(base);
            pool.extend(self.joined(base, &moves).into_iter().map(|c| (c, Proposer::Explore)));
            pool.extend(moves.into_iter().map(|c| (c, Proposer::Local)));
        }
        pool.retain(|(candidate, _)| self.is_new(candidate));
        let lucky = pool.into_iter().map(|(candidate, by)| {
            let much = self.improvement(best, &candidate) * (1.0 - LUCK * random.unit());
            (much, (candidate, by))
        });
        lucky.max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, found)| found)
    }

    /// Unions of moves from `base` that are expected to gain, the best move of each knob: of each two, and of the first three, four, and so
    /// on.
    fn joined(&self, base: &Candidate, moves: &[Candidate]) -> Vec<Candidate> {
        let of = base.values();
        let turned =
            |c: &Candidate| -> Vec<usize> { (0..of.len()).filter(|&knob| c.values()[knob] != of[knob]).collect() };
        let from = (base, (self.guess)(base));
        let gains = moves.iter().map(|c| (self.prior.between(from, (c, (self.guess)(c))).log_ratio, c));
        let mut gains: Vec<(f64, &Candidate)> = gains.filter(|(log, _)| *log < -NO_GAIN).collect();
        gains.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut best: Vec<(Vec<usize>, &Candidate)> = vec![];
        for (_, candidate) in gains {
            let own = turned(candidate);
            if best.iter().all(|(others, _)| others.iter().all(|knob| !own.contains(knob))) {
                best.push((own, candidate));
            }
            if best.len() == JOINED {
                break;
            }
        }
        let union = |parts: &[&(Vec<usize>, &Candidate)]| {
            let mut values = of;
            for (knobs, candidate) in parts {
                knobs.iter().for_each(|&knob| values[knob] = candidate.values()[knob]);
            }
            Candidate::of_values(&values)
        };
        let mut found = vec![];
        for (at, one) in best.iter().enumerate() {
            found.extend(best.iter().take(at).map(|other| union(&[one, other])));
            if at > 1 {
                found.push(union(&best.iter().take(at + 1).collect::<Vec<_>>()));
            }
        }
        found.retain(|c| self.space.admits(c).is_ok());
        found
    }

    /// A random point, once all near points were tried.
    fn any(&self, random: &mut Random) -> Option<(Candidate, Proposer)> {
        (0..64).find_map(|_| {
            let moves = 1 + random.below(6);
            let mut choose = |count| random.below(count);
            let found = self.space.mutated(self.space.default_candidate(), moves, &mut choose);
            found.filter(|c| self.is_new(c)).map(|c| (c, Proposer::Explore))
        })
    }

    /// Candidates that will probably be asked for next, most likely first: answers of copies that were told possible results of the
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
                told.tell(&candidate, Outcome::Timed { ratio, kept, deep: None });
                scenarios.push((probability * share, told));
            }
            if !found.contains(&candidate) {
                found.push(candidate);
            }
        }
        found
    }
}

/// The mean of the positive part of a normal variable with this `mean` and standard deviation `spread`.
fn expected_improvement(mean: f64, spread: f64) -> f64 {
    if spread <= 0.0 {
        return mean.max(0.0);
    }
    let z = mean / spread;
    let density = (-z * z / 2.0).exp() / std::f64::consts::TAU.sqrt();
    // The distribution function: Abramowitz and Stegun, "Handbook of mathematical functions", 26.2.17, right to 7.5e-8.
    let t = 1.0 / (1.0 + 0.231_641_9 * z.abs());
    let series = [0.319_381_53, -0.356_563_782, 1.781_477_937, -1.821_255_978, 1.330_274_429];
    let tail = density * series.iter().rev().fold(0.0, |sum, c| (sum + c) * t);
    let below = if z > 0.0 { 1.0 - tail } else { tail };
    (mean * below + spread * density).max(0.0)
}

#[cfg(test)]
mod tests {
    use super::expected_improvement;

    #[test]
    fn an_improvement_is_expected_of_what_is_unsure() {
        // Closed forms: at 0 the density alone; far above the mean, far below nothing.
        let at = |mean: f64, spread: f64| expected_improvement(mean, spread);
        assert!((at(0.0, 1.0) - 0.398_942_280).abs() < 1e-7);
        assert!((at(1.0, 1.0) - 1.083_315_470).abs() < 1e-6 && (at(-1.0, 1.0) - 0.083_315_470).abs() < 1e-6);
        assert!((at(0.3, 0.01) - 0.3).abs() < 1e-9 && at(-0.3, 0.01) < 1e-12);
        assert_eq!((at(0.2, 0.0), at(-0.2, 0.0)), (0.2, 0.0));
    }
}
