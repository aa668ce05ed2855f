//! Owns `Search`: what to try next, as a function of a seed and of what came of everything before.
//!
//! Ask and tell: [`Search::ask`] changes nothing and depends on nothing but the seed and what was told, so a search that is
//! told the rows of an interrupted one goes on where that one stopped, and asking a copy that was told "reverted" says
//! what will probably come next, which is what is compiled ahead.
//!
//! Order: the default; seeds from the prior, as long as much is expected of one; then, of the points one knob away from the incumbent, of unions of the best of
//! them, and of random ones of several knobs, the one of which the greatest improvement is expected (Jones, Schonlau and Welch,
//! "Efficient global optimization of expensive black-box functions", 1998), by the additive model of all that was measured. Moves
//! that gained too little to be kept are tried together. After a run of reverts the moves start from somewhere else.

use std::collections::BTreeSet;

use crate::candidate::{Candidate, Values};
use crate::flywheel::Proposer;

use super::additive::Expected;
use super::prior::{Group, Logs, Opinion, Prior, Seed};
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
    /// Limits of a budget: a plateau is three quarters of it, and not before 24 reverts; 2 % above the floor is the end.
    pub fn of_budget(trials: u32, seed: u64) -> Limits {
        Limits { seed, trials, plateau: (trials / 4 * 3).max(24), floor_gap: 0.02 }
    }
}

/// Reverts in a row after which local moves begin somewhere else.
const RESTART_AFTER: u32 = 10;
/// Infeasible points and repetitions cost milliseconds, but not for ever: this many for each measured trial.
const IDLE_PER_TRIAL: u32 = 20;
/// Random points of two or three knobs that are looked at for each proposal.
const BOLD_POOL: usize = 24;
/// Moves of one knob, the most promising ones, of which each two are looked at together.
const JOINED: usize = 8;
/// Share of proposals that are the most promising one of the random points.
const BOLD_SHARE: f64 = 0.2;
/// Standard deviations that an improvement may have, of those that the model has: what is unknown is rarely a gain.
const OPTIMISM: f64 = 0.7;
/// A gain, as a log of ratios, that is worth no trial.
const NO_GAIN: f64 = 0.002;
/// Share of an expected improvement that is luck, so that seeds differ.
const LUCK: f64 = 0.2;
/// A gain that two medians show, as a log of ratios: less is noise, and not added up.
const SMALL_GAIN: f64 = -0.002;
/// Trials that may be seeds, and the improvement, as a log of ratios, that has to be expected of one.
const SEEDS: u32 = 4;
const PROMISING: f64 = 0.01;
/// Points are as good as the best one within this log of ratios, these many of them.
const AS_GOOD: f64 = 0.004;
const ALIKE_MOST: usize = 3;
/// Knobs in which a point differs that gained a little: of more, one cannot say which gained.
const SMALL_MOVES: usize = 3;
/// Power of the chance not to fail: a point near one that failed is tried when little else is left.
const CAUTION: i32 = 4;

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
    /// `deep`: the part of the log of `ratio` that grows with the position; `None` where all was timed at one.
    Timed { ratio: f64, kept: bool, deep: Option<f64> },
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
    /// The cost model's log ratio by the default, 0 where it has none.
    guess: &'a (dyn Fn(&Candidate) -> f64 + Sync),
    /// Tried before anything else.
    first: Vec<Candidate>,
    seeds: Vec<Seed>,
    seen: BTreeSet<Values>,
    incumbent: Option<(Candidate, f64)>,
    /// Of the log of the incumbent, what grows with the position.
    incumbent_deep: f64,
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
        mut first: Vec<Candidate>,
        guess: &'a (dyn Fn(&Candidate) -> f64 + Sync),
    ) -> Search<'a> {
        first.retain(|candidate| space.admits(candidate).is_ok());
        let seeds = prior.seeds(groups, space);
        Search {
            space,
            limits,
            prior,
            guess,
            first,
            seeds,
            seen: BTreeSet::new(),
            incumbent: None,
            incumbent_deep: 0.0,
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
            (self.incumbent, self.incumbent_deep) = (Some((default.clone(), 0.0)), 0.0);
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
                    // The default itself failed: nothing is there to compare with, and asking again would not end.
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
        let first = self.first.iter().find(|c| self.is_new(c));
        if let Some(candidate) = first.or_else(|| self.seed(incumbent, *log)) {
            return Ask::Try { candidate: candidate.clone(), proposer: Proposer::Prior };
        }
        if let Some(candidate) = self.together() {
            return Ask::Try { candidate, proposer: Proposer::Explore };
        }
        let mut random = Random::stream(self.limits.seed, "ask", u64::from(self.trials));
        let best = self.best().unwrap_or(incumbent);
        let base = self.base(best, &mut random);
        let found = self.promising(&base, best, random.unit() < BOLD_SHARE, &mut random);
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

    /// The seed of which the greatest improvement is expected: what came of one says something of the others.
    fn seed(&self, incumbent: &Candidate, log: f64) -> Option<&Candidate> {
        if self.trials >= SEEDS {
            return None;
        }
        let new = self.seeds.iter().filter(|seed| self.is_new(&seed.candidate));
        let gain = |seed: &Seed| {
            let (c, guess) = (&seed.candidate, self.guess);
            let Expected { spread, .. } = self.prior.between((incumbent, guess(incumbent)), (c, guess(c)));
            expected_improvement(log - self.prior.promised(seed, guess(c)), spread)
        };
        let best = new.map(|seed| (gain(seed), &seed.candidate)).max_by(|a, b| a.0.total_cmp(&b.0));
        best.filter(|(gain, _)| *gain > PROMISING).map(|(_, candidate)| candidate)
    }

    /// The incumbent, or a point that is a little faster, though by less than the margin: moves from there may gain the rest.
    fn best(&self) -> Option<&Candidate> {
        let (incumbent, log) = self.incumbent.as_ref()?;
        let found = self.elite.first().filter(|(faster, _)| faster - log < SMALL_GAIN);
        Some(found.map_or(incumbent, |(_, candidate)| candidate))
    }

    /// How much faster than `best` a point may be, on average of what the model thinks possible, where slower counts as
    /// nothing; less where points failed.
    fn improvement(&self, best: &Candidate, candidate: &Candidate) -> f64 {
        let guess = self.guess;
        let Expected { log_ratio, spread } = self.prior.between((best, guess(best)), (candidate, guess(candidate)));
        let safe = (1.0 - self.prior.risk(candidate)).max(0.0).powi(CAUTION);
        let spread = OPTIMISM * spread * self.prior.promise(best, candidate);
        expected_improvement(-log_ratio - NO_GAIN, spread) * safe
    }

    /// Where moves start: the best point or one that is as good, from where other moves may gain; behind each run of reverts another
    /// good one, later a far one.
    fn base(&self, best: &Candidate, random: &mut Random) -> Candidate {
        let restarts = (self.reverts / RESTART_AFTER) as usize;
        let most = self.elite.first().map_or(0.0, |(log, _)| *log);
        let others = self.elite.iter().filter(|(_, c)| c != best);
        if restarts == 0 {
            let alike: Vec<&Candidate> =
                others.take_while(|(log, _)| log - most < AS_GOOD).take(ALIKE_MOST).map(|(_, c)| c).collect();
            // The best one more often than not.
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

    /// Of the points around `base`, the one of which the greatest improvement of `best` is expected; if `bold`, of random ones.
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

    /// Unions of moves from `base` that are expected to gain, the best of each knob: of each two, and of the first three, four, and so on.
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

/// The mean of the positive part of a normal variable: of a gain of `mean`, give or take `spread`.
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
