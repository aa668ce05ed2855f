//! Owns the comparison of two subjects by time: rounds of A B B A, and the ratio with its interval.
//!
//! Clocks, temperatures and neighbours drift while a comparison runs. In a round A B B A both sides have the same mean
//! moment, so a drift that is linear within a round cancels in its ratio. The interval shows the remaining differences between rounds.

use std::time::{Duration, Instant};

use crate::random::Random;

/// Resamples of the bootstrap. The ends of a 95 % interval move by less than a tenth of its width beyond that.
const RESAMPLES: usize = 2000;

/// Share of the resampled medians on each side of the interval.
const TAIL: f64 = 0.025;

/// The rounds of a comparison end after `rounds_max`, or after `time_max`, but not before `rounds_min`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    pub rounds_min: usize,
    pub rounds_max: usize,
    pub time_max: Duration,
}

/// Times of one round, in the order A B B A, all in one unit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Round {
    pub a: [f64; 2],
    pub b: [f64; 2],
}

impl Round {
    /// Time of B divided by the time of A.
    fn ratio(&self) -> f64 {
        (self.b[0] + self.b[1]) / (self.a[0] + self.a[1])
    }
}

/// The result of rounds: B took `ratio` times as long as A.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ratio {
    /// Median over rounds.
    pub ratio: f64,
    /// The interval with 95 % of the medians of resampled rounds.
    pub low: f64,
    pub high: f64,
    pub rounds: usize,
}

/// Times both sides in rounds of A B B A.
///
/// # Errors
/// The first fault of either side.
pub fn rounds<T, E>(
    limits: Limits,
    sides: &mut T,
    mut a: impl FnMut(&mut T) -> Result<f64, E>,
    mut b: impl FnMut(&mut T) -> Result<f64, E>,
) -> Result<Vec<Round>, E> {
    let started = Instant::now();
    let mut rounds = vec![];
    while rounds.len() < limits.rounds_min || (rounds.len() < limits.rounds_max && started.elapsed() < limits.time_max)
    {
        let (first, second) = (a(sides)?, b(sides)?);
        let (third, fourth) = (b(sides)?, a(sides)?);
        rounds.push(Round { a: [first, fourth], b: [second, third] });
    }
    Ok(rounds)
}

/// The paired ratio with its bootstrap interval; `None` without rounds, or if a round has no sound ratio.
///
/// The same rounds give the same interval: the random seed of the resampling is fixed.
pub fn ratio(rounds: &[Round]) -> Option<Ratio> {
    let ratios: Vec<f64> = rounds.iter().map(Round::ratio).collect();
    if ratios.is_empty() || ratios.iter().any(|ratio| !ratio.is_finite() || *ratio <= 0.0) {
        return None;
    }
    let mut random = Random::new(0);
    let mut medians: Vec<f64> = (0..RESAMPLES)
        .map(|_| median((0..ratios.len()).map(|_| ratios[random.below(ratios.len())]).collect()))
        .collect();
    medians.sort_by(f64::total_cmp);
    Some(Ratio {
        low: percentile(&medians, TAIL),
        high: percentile(&medians, 1.0 - TAIL),
        ratio: median(ratios),
        rounds: rounds.len(),
    })
}

/// The middle sample, or the mean of the two in the middle; 0 for none.
pub fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    match samples.len() {
        0 => 0.0,
        n if n % 2 == 1 => samples[n / 2],
        n => (samples[n / 2 - 1] + samples[n / 2]) / 2.0,
    }
}

/// The value at `share` of ascending samples, by nearest rank; 0 for none.
pub fn percentile(ascending: &[f64], share: f64) -> f64 {
    let rank = (share * ascending.len().saturating_sub(1) as f64).round() as usize;
    ascending.get(rank).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_linear_drift_cancels() {
        // B takes 1.5 times as long as A, while everything becomes a fifth slower over the comparison.
        let mut clock = 0.0;
        let mut side = |factor: f64| {
            clock += 1.0;
            factor * (100.0 + clock * 0.25)
        };
        let rounds: Vec<Round> = (0..20)
            .map(|_| {
                let (a1, b1, b2, a2) = (side(1.0), side(1.5), side(1.5), side(1.0));
                Round { a: [a1, a2], b: [b1, b2] }
            })
            .collect();
        let Ratio { ratio, low, high, rounds } = ratio(&rounds).unwrap();
        assert_eq!(rounds, 20);
        for value in [ratio, low, high] {
            assert!((value - 1.5).abs() < 1e-9, "{value}");
        }
    }

    #[test]
    fn the_interval_covers_the_truth_as_often_as_it_says() {
        let mut random = Random::new(7);
        // Times with a spread of 5 % each way: B is truly 1.1 times A.
        let mut noisy = |mean: f64| mean * (0.95 + random.below(1000) as f64 / 10_000.0);
        let covered = (0..200)
            .filter(|_| {
                let round = |noisy: &mut dyn FnMut(f64) -> f64| Round {
                    a: [noisy(100.0), noisy(100.0)],
                    b: [noisy(110.0), noisy(110.0)],
                };
                let rounds: Vec<Round> = (0..15).map(|_| round(&mut noisy)).collect();
                let found = ratio(&rounds).unwrap();
                assert!(found.low <= found.ratio && found.ratio <= found.high);
                found.low <= 1.1 && 1.1 <= found.high
            })
            .count();
        assert!(covered >= 180, "95 % intervals covered the truth {covered} times of 200");
    }

    #[test]
    fn rounds_are_a_b_b_a_within_their_limits() {
        let mut order = String::new();
        let limits = |time_max| Limits { rounds_min: 2, rounds_max: 3, time_max };
        let run = |limits, order: &mut String| {
            let a = |order: &mut String| {
                order.push('a');
                Ok::<_, ()>(1.0)
            };
            let b = |order: &mut String| {
                order.push('b');
                Ok(2.0)
            };
            rounds(limits, order, a, b).unwrap().len()
        };
        assert_eq!(run(limits(Duration::from_secs(3600)), &mut order), 3);
        assert_eq!(order, "abbaabbaabba");
        assert_eq!(run(limits(Duration::ZERO), &mut order), 2, "time is up, and two rounds are the least");
        let failed = rounds(limits(Duration::ZERO), &mut (), |_| Ok(1.0), |_| Err("lost"));
        assert_eq!(failed, Err("lost"));
    }

    #[test]
    fn what_is_no_ratio_is_none() {
        assert_eq!(ratio(&[]), None);
        assert_eq!(ratio(&[Round { a: [0.0, 0.0], b: [1.0, 1.0] }]), None);
        assert_eq!(ratio(&[Round { a: [1.0, 1.0], b: [0.0, 0.0] }]), None);
    }

    #[test]
    fn percentiles_are_samples_and_medians_may_lie_between() {
        let samples: Vec<f64> = (1..=11).map(f64::from).collect();
        assert_eq!([0.1, 0.5, 0.9].map(|share| percentile(&samples, share)), [2.0, 6.0, 10.0]);
        assert_eq!([0.1, 0.5, 0.9].map(|share| percentile(&[3.0], share)), [3.0; 3]);
        assert_eq!(percentile(&[1.0, 2.0, 9.0], 0.9), 9.0);
        assert_eq!(median(vec![4.0, 1.0]), 2.5);
    }
}
