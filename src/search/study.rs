//! Owns the comparison of cold campaigns with warm ones: the trials that each needed to get near the best cold result.

use super::history::History;
use crate::flywheel::Proposer;

/// Near the best cold result: a latency of at most this factor of it.
const NEAR: f64 = 1.02;

/// Campaigns of one model on one target.
#[derive(Debug, Clone, PartialEq)]
pub struct Study {
    /// `manifest on target`.
    pub name: String,
    /// Log ratio to the default of the best candidate that any cold campaign kept.
    pub cold_best: f64,
    pub cold: Vec<Run>,
    pub warm: Vec<Run>,
}

/// A campaign of a study.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    pub seed: u64,
    /// Log ratio of the incumbent to the default after each trial; starts with the default's 0.
    pub curve: Vec<f64>,
    /// Trials until the incumbent was near the best cold result; `None`: never.
    pub reached: Option<usize>,
}

/// Whether a campaign tried a warm start, which needs trials of other campaigns.
pub fn had_warm_starts(history: &History) -> bool {
    history.entries.iter().any(|entry| entry.proposer == Proposer::Prior)
}

/// Pairs cold campaigns with warm ones of the same model. Models without both are left out.
pub fn studies(cold: &[History], warm: &[History]) -> Vec<Study> {
    let mut studies: Vec<(&History, Study)> = vec![];
    let both = cold.iter().map(|history| (history, false)).chain(warm.iter().map(|history| (history, true)));
    for (history, warm) in both {
        let curve = curve(history);
        if curve.is_empty() {
            continue;
        }
        let same = |of: &History| of.model == history.model && of.machine.target == history.machine.target;
        let at = studies.iter().position(|(of, _)| same(of)).unwrap_or_else(|| {
            let name = format!("{} on {}", history.manifest, history.machine.target);
            studies.push((history, Study { name, cold_best: 0.0, cold: vec![], warm: vec![] }));
            studies.len() - 1
        });
        let Some((_, study)) = studies.get_mut(at) else { continue };
        let runs = if warm { &mut study.warm } else { &mut study.cold };
        runs.push(Run { seed: history.seed, curve, reached: None });
    }
    let both = |study: &Study| !study.cold.is_empty() && !study.warm.is_empty();
    let mut studies: Vec<Study> = studies.into_iter().map(|(_, study)| study).filter(both).collect();
    for study in &mut studies {
        study.cold_best = study.cold.iter().flat_map(|run| run.curve.last()).fold(0.0, |best, log| best.min(*log));
        let near = study.cold_best + NEAR.ln();
        for run in study.cold.iter_mut().chain(&mut study.warm) {
            run.reached = run.curve.iter().position(|log| *log <= near);
        }
    }
    studies
}

/// The comparison with the default at the end is no trial. If the default won it, the campaign found nothing: what it kept before was
/// noise.
fn curve(history: &History) -> Vec<f64> {
    let mut curve: Vec<f64> = vec![];
    for entry in history.entries.iter().filter(|entry| entry.number.is_some()) {
        if entry.proposer == Proposer::Default && entry.number != Some(0) {
            continue;
        }
        let before = curve.last().copied();
        let now = if entry.is_kept() { entry.log_ratio() } else { None };
        curve.extend(now.or(before));
    }
    let last = history.incumbent();
    if last.is_some_and(|entry| entry.proposer == Proposer::Default && entry.number != Some(0)) {
        curve.fill(0.0);
    }
    curve
}

/// Median of the trials that runs needed; "never" counts as more than any number. `None` if the median is "never".
pub fn median_reached(runs: &[Run]) -> Option<usize> {
    // An f64 holds counts of trials exactly.
    middle(runs.iter().map(|run| run.reached.map(|trials| trials as f64))).map(|trials| trials as usize)
}

/// The median, with `None` as the largest value; of an even number of values the larger one, so that no run looks faster than it was.
fn middle(of: impl Iterator<Item = Option<f64>>) -> Option<f64> {
    let mut sorted: Vec<f64> = of.map(|value| value.unwrap_or(f64::INFINITY)).collect();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().filter(|value| value.is_finite())
}

/// Log ratios that two medians do not tell apart: two campaigns that found the same point can differ by this much.
const ALIKE: f64 = 0.002;

/// Trials until the warm run matched the cold run's end, within [`ALIKE`], and the number of trials of the cold run; `None`: never.
pub fn caught_up(warm: &Run, cold: &Run) -> Option<(usize, usize)> {
    let end = cold.curve.last()?;
    let at = warm.curve.iter().position(|log| *log <= end + ALIKE)?;
    Some((at, cold.curve.len() - 1))
}

/// Median of these trials as shares of the cold runs' trials, as in [`median_reached`].
pub fn median_share(shares: &[Option<(usize, usize)>]) -> Option<f64> {
    let share = |(at, of): (usize, usize)| if of == 0 { 0.0 } else { at as f64 / of as f64 };
    middle(shares.iter().map(|caught| caught.map(share)))
}

/// The mean of the runs' curves at each trial, as latency divided by the default's; a run that ended keeps its last value.
pub fn mean_curve(runs: &[Run]) -> Vec<f64> {
    let longest = runs.iter().map(|run| run.curve.len()).max().unwrap_or(0);
    let at = |run: &Run, trial: usize| run.curve.get(trial).or(run.curve.last()).copied().unwrap_or(0.0);
    (0..longest)
        .map(|trial| (runs.iter().map(|run| at(run, trial)).sum::<f64>() / runs.len().max(1) as f64).exp())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_means_are_of_all_runs() {
        let run = |curve: &[f64], reached| Run { seed: 0, curve: curve.to_vec(), reached };
        let runs = [run(&[0.0, -0.1], Some(1)), run(&[0.0, 0.0, -0.3], Some(2)), run(&[0.0], None)];
        assert_eq!(median_reached(&runs), Some(2));
        assert_eq!(median_reached(&runs[1..]), None, "half of them never got there");
        assert_eq!(median_reached(&[]), None);
        let caught: Vec<_> = runs.iter().map(|warm| caught_up(warm, &runs[0])).collect();
        assert_eq!(caught, [Some((1, 1)), Some((2, 1)), None]);
        assert_eq!(
            (median_share(&caught), median_share(&caught[..1]), median_share(&[])),
            (Some(2.0), Some(1.0), None)
        );
        assert_eq!(median_share(&caught[1..]), None, "half of them never caught up");
        assert_eq!(caught_up(&runs[0], &runs[2]), Some((0, 0)), "no gain was found, and none is needed");
        let mean = mean_curve(&runs);
        assert_eq!(mean.len(), 3);
        assert!((mean[2].ln() - (-0.1 - 0.3) / 3.0).abs() < 1e-12);
    }
}
