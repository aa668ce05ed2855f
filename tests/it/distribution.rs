//! Tests that tokens have the distribution that a request asks for: counts of thousands of choices against their probabilities.

use monobloc::reference::softmax;
use monobloc::sample::{SampleSettings, Sampler};

/// A seed of both words.
const SEED: u64 = 0x0123_4567_89AB_CDEF;

fn sampler(temperature: f32, top_k: Option<u32>, top_p: Option<f32>, seed: u64) -> Sampler {
    SampleSettings { temperature, top_k, top_p, seed }.resolve().expect("valid settings")
}

/// Pearson's statistic of counts against probabilities.
fn chi_square(counts: &[u32], probabilities: &[f64]) -> f64 {
    let draws: f64 = counts.iter().map(|&c| f64::from(c)).sum();
    counts.iter().zip(probabilities).map(|(&c, p)| (f64::from(c) - draws * p).powi(2) / (draws * p)).sum()
}

fn softmax_of(scores: &[f64]) -> Vec<f64> {
    let mut probabilities = scores.to_vec();
    softmax(&mut probabilities);
    probabilities
}

#[test]
fn tokens_follow_the_softmax_of_the_scores() {
    let logits = [1.0, -0.5, 2.0, 0.0, 0.25, -2.0, 1.5, 0.75];
    // 99.9 % quantiles of chi-square: 24.3 for 7 degrees of freedom, 13.8 for 2.
    for (temperature, seed) in [(1.0f32, 1), (0.6, 2), (2.0, 3)] {
        let sampler = sampler(temperature, None, None, seed);
        let mut counts = [0; 8];
        for position in 0..40_000 {
            counts[sampler.choose(&logits, position).expect("a token") as usize] += 1;
        }
        let scores = logits.map(|l| f64::from(l) / f64::from(temperature));
        let statistic = chi_square(&counts, &softmax_of(&scores));
        assert!(statistic < 24.3, "temperature {temperature}: chi-square {statistic}, counts {counts:?}");
    }

    // The filters leave 2, 6 and 0, and the rest is renormalised.
    let sampler = sampler(1.0, Some(4), Some(0.8), SEED);
    let mut counts = [0; 8];
    for position in 0..40_000 {
        counts[sampler.choose(&logits, position).expect("a token") as usize] += 1;
    }
    assert_eq!(counts.iter().sum::<u32>(), counts[2] + counts[6] + counts[0]);
    let statistic = chi_square(&[counts[2], counts[6], counts[0]], &softmax_of(&[2.0, 1.5, 1.0]));
    assert!(statistic < 13.8, "chi-square {statistic}, counts {counts:?}");
}

/// Coarse noise would show here: with many near-equal ids, where the winner has the smallest of many exponentials, and with an
/// improbable tail.
#[test]
fn a_large_vocabulary_has_neither_a_bias_to_low_ids_nor_a_starved_tail() {
    let sampler = sampler(1.0, None, None, SEED);
    let flat = vec![0.0; 4096];
    let mut counts = [0; 16];
    for position in 0..4000 {
        counts[sampler.choose(&flat, position).expect("a token") as usize / 256] += 1;
    }
    // 99.9 % quantile for 15 degrees of freedom.
    let statistic = chi_square(&counts, &[1.0 / 16.0; 16]);
    assert!(statistic < 37.7, "chi-square {statistic}, counts {counts:?}");

    // Id 0 holds half of the mass, 4095 ids share the other half.
    let mut peaked = flat;
    peaked[0] = 4095f32.ln();
    let mut counts = [0; 2];
    for position in 0..4000 {
        counts[(sampler.choose(&peaked, position).expect("a token") != 0) as usize] += 1;
    }
    // 99.9 % quantile for 1 degree of freedom.
    let statistic = chi_square(&counts, &[0.5; 2]);
    assert!(statistic < 10.8, "chi-square {statistic}, counts {counts:?}");
}
