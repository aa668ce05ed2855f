//! Owns the decision about a trial: paired times in, an interval of the ratio out, and whether the candidate is kept.
//!
//! Rounds are those of [`crate::abba`], with the incumbent as A and the candidate as B.
//!
//! Only this module makes an incumbent.

use crate::abba::{Ratio, Round, ratio};
use crate::flywheel::Decision;

/// With fewer rounds, the interval of their median is hardly wider than the observed values.
pub const ROUNDS_MIN: usize = 5;

/// Times at one position, µs per step.
#[derive(Debug, Clone, PartialEq)]
pub struct Rounds {
    pub position: u32,
    pub rounds: Vec<Round>,
}

/// The decision with its evidence.
#[derive(Debug, Clone, PartialEq)]
pub struct Judged {
    pub decision: Decision,
    /// Ratio of candidate to incumbent over all positions with equal weight: the geometric mean of a round's ratios. `None` if there are
    /// too few rounds, or if a time is not positive and finite.
    pub overall: Option<Ratio>,
    /// By position, in the order of the rounds.
    pub positions: Vec<(u32, Option<Ratio>)>,
}

impl Judged {
    /// As [`deep_part`] of the ratios at all positions.
    pub fn deep(&self) -> Option<f64> {
        let logs = self.positions.iter().map(|(position, ratio)| Some((*position, ratio.as_ref()?.ratio.ln())));
        deep_part(&logs.collect::<Option<Vec<_>>>()?)
    }
}

/// Judges a candidate. `margin`: the fraction by which it has to be faster. `simpler`: whether it may replace an equal incumbent, which
/// means within the margin and not certainly slower; otherwise losses below the margin would add up.
///
/// With too few rounds or an invalid time the incumbent stays: a decision needs evidence.
pub fn judge(all: &[Rounds], margin: f64, simpler: bool) -> Judged {
    let positions = all.iter().map(|r| (r.position, ratio(&r.rounds))).collect();
    let count = all.iter().map(|r| r.rounds.len()).min().unwrap_or(0);
    let means: Vec<Round> = (0..count)
        .map(|round| {
            let logs =
                all.iter().filter_map(|r| r.rounds.get(round)).map(|r| (r.b[0] + r.b[1]).ln() - (r.a[0] + r.a[1]).ln());
            let mean = (logs.sum::<f64>() / all.len().max(1) as f64).exp();
            Round { a: [1.0; 2], b: [mean; 2] }
        })
        .collect();
    let overall = ratio(&means).filter(|_| count >= ROUNDS_MIN && all.iter().all(is_sound));
    let decision = match &overall {
        None => Decision::Reverted,
        Some(ratio) if ratio.high <= 1.0 - margin && ratio.high < 1.0 => Decision::Faster,
        Some(Ratio { low, high, .. }) if simpler && (1.0 - margin..=1.0).contains(low) && *high <= 1.0 + margin => {
            Decision::Simpler
        }
        Some(_) => Decision::Reverted,
    };
    Judged { decision, overall, positions }
}

/// Judges the default, which is timed in turns with the best candidate at the end: the best stays only if it is certainly faster. This
/// removes gains that were noise.
pub fn judge_default(all: &[Rounds], margin: f64) -> Judged {
    let judged = judge(all, margin, false);
    let doubtful = judged.overall.is_none_or(|ratio| ratio.low <= 1.0);
    let decision = if judged.decision == Decision::Reverted && doubtful { Decision::Simpler } else { judged.decision };
    Judged { decision, ..judged }
}

/// Least-squares part of the mean log ratio that grows with position; `None` for fewer than two positions.
pub fn deep_part(logs: &[(u32, f64)]) -> Option<f64> {
    let count = logs.len() as f64;
    let depth = logs.iter().map(|(position, _)| f64::from(*position)).sum::<f64>() / count;
    let mean = logs.iter().map(|(_, log)| log).sum::<f64>() / count;
    let apart = |position: u32| f64::from(position) / depth - 1.0;
    let spread: f64 = logs.iter().map(|(position, _)| apart(*position).powi(2)).sum();
    let grown: f64 = logs.iter().map(|(position, log)| apart(*position) * (log - mean)).sum();
    (spread > 0.0).then(|| grown / spread)
}

fn is_sound(rounds: &Rounds) -> bool {
    rounds.rounds.iter().flat_map(|r| r.a.iter().chain(&r.b)).all(|us| us.is_finite() && *us > 0.0)
}

/// Whether these rounds already exclude a win: the whole interval is above `1 - margin / 2`. Only a loss may end early; stopping at the
/// first sign of a win would keep candidates that were fast by chance.
pub fn is_no_win(rounds: &[Round], margin: f64) -> bool {
    ratio(rounds).is_some_and(|ratio| ratio.low > 1.0 - margin / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    /// Rounds of a candidate that takes `ratio` of the incumbent's time, with noise of this size and a drift.
    fn rounds(ratio: f64, noise: f64, count: usize, seed: u64) -> Rounds {
        let mut random = Random::stream(seed, "test", 0);
        let mut clock = 1.0;
        let mut time = |base: f64| {
            clock *= 1.002;
            100.0 * clock * base * (1.0 + noise * (random.unit() - 0.5))
        };
        let rounds = (0..count)
            .map(|_| {
                let (a1, b1, b2, a2) = (time(1.0), time(ratio), time(ratio), time(1.0));
                Round { a: [a1, a2], b: [b1, b2] }
            })
            .collect();
        Rounds { position: 32, rounds }
    }

    #[test]
    fn what_grows_with_the_position_is_told_from_what_is_everywhere() {
        // 3 % everywhere, and 2 % more at the mean of the positions.
        let logs = |positions: &[u32]| -> Vec<(u32, f64)> {
            let mean = positions.iter().sum::<u32>() as f64 / positions.len() as f64;
            positions.iter().map(|p| (*p, -0.03 + 0.02 * f64::from(*p) / mean)).collect()
        };
        for positions in [&[32, 1900][..], &[32, 1024, 2048, 16384]] {
            assert!((deep_part(&logs(positions)).expect("enough of them") - 0.02).abs() < 1e-12);
        }
        assert_eq!((deep_part(&logs(&[32])), deep_part(&[]), deep_part(&[(0, 0.1)])), (None, None, None));
    }

    #[test]
    fn faster_by_the_margin_is_kept_and_an_equal_is_not() {
        for seed in 0..50 {
            assert_eq!(judge(&[rounds(0.95, 0.01, 8, seed)], 0.01, false).decision, Decision::Faster);
            let judged = judge(&[rounds(1.0, 0.01, 8, seed)], 0.01, false);
            assert_eq!(judged.decision, Decision::Reverted, "{judged:?}");
        }
    }

    #[test]
    fn faster_by_less_than_the_margin_is_reverted_and_an_equal_must_be_simpler() {
        let tie = [rounds(0.996, 0.001, 9, 1)];
        assert_eq!(judge(&tie, 0.01, false).decision, Decision::Reverted);
        assert_eq!(judge(&tie, 0.01, true).decision, Decision::Simpler);
        assert_eq!(judge(&tie, 0.0, false).decision, Decision::Faster, "no margin is a margin of nothing");
        for slower in [1.03, 1.005] {
            let rounds = [rounds(slower, 0.001, 9, 1)];
            assert_eq!(judge(&rounds, 0.01, true).decision, Decision::Reverted, "{slower}: simpler, but not as fast");
        }
    }

    #[test]
    fn at_the_end_the_best_has_to_be_faster_beyond_doubt() {
        let end = |ratio, noise| judge_default(&[rounds(ratio, noise, 9, 3)], 0.01).decision;
        assert_eq!(end(1.03, 0.001), Decision::Reverted, "the default is slower: the best stays");
        assert_eq!(end(1.004, 0.001), Decision::Reverted, "by less than the margin, and beyond doubt");
        assert_eq!(end(1.03, 0.4), Decision::Simpler, "in doubt");
        assert_eq!(end(1.0, 0.001), Decision::Simpler);
        assert_eq!(end(0.95, 0.001), Decision::Faster);
        assert_eq!(judge_default(&[], 0.01).decision, Decision::Simpler, "without a time there is no doubt less");
    }

    #[test]
    fn what_is_too_little_or_no_number_keeps_the_incumbent() {
        assert_eq!(judge(&[], 0.01, true).decision, Decision::Reverted);
        assert_eq!(judge(&[rounds(0.5, 0.0, ROUNDS_MIN - 1, 0)], 0.01, true).decision, Decision::Reverted);
        for bad in [f64::NAN, 0.0, -1.0, f64::INFINITY] {
            let mut broken = rounds(0.5, 0.0, 8, 0);
            broken.rounds[3].b[1] = bad;
            assert_eq!(judge(&[broken], 0.01, true).decision, Decision::Reverted, "{bad}");
        }
        let (long, short) = (rounds(0.5, 0.0, 9, 0), Rounds { position: 64, rounds: vec![] });
        assert_eq!(judge(&[long, short], 0.01, true).decision, Decision::Reverted, "a position without a time");
    }

    #[test]
    fn positions_count_alike() {
        let (much, little) = (rounds(0.80, 0.001, 9, 1), Rounds { position: 2048, ..rounds(1.10, 0.001, 9, 2) });
        let judged = judge(&[much, little], 0.01, false);
        assert_eq!(judged.decision, Decision::Faster);
        let expected = (0.80f64 * 1.10).sqrt();
        assert!((judged.overall.expect("sound").ratio - expected).abs() < 0.01, "{judged:?}");
        assert_eq!(judged.positions.iter().map(|(position, _)| *position).collect::<Vec<_>>(), [32, 2048]);
    }

    #[test]
    fn what_is_no_win_ends_early_and_nothing_else_does() {
        for ratio in [1.10, 1.01] {
            assert!(is_no_win(&rounds(ratio, 0.002, ROUNDS_MIN, 1).rounds, 0.01), "{ratio}");
        }
        for ratio in [0.5, 0.98, 0.993] {
            assert!(!is_no_win(&rounds(ratio, 0.002, ROUNDS_MIN, 1).rounds, 0.01), "{ratio}");
        }
        assert!(!is_no_win(&rounds(1.0, 0.2, ROUNDS_MIN, 1).rounds, 0.01), "a wide interval says nothing yet");
    }
}
