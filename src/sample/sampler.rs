//! Owns the choice of a token by temperature, top-k and top-p, which a kernel can make without the host.

use super::error::SampleError;
use super::noise::{exp_f32, gumbel, philox4x32_10};
use std::cmp::Ordering;
use std::fmt;

/// How to choose tokens, as the user states it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SampleSettings {
    /// 0 is greedy; otherwise in `TEMPERATURE_MIN..=TEMPERATURE_MAX`.
    pub temperature: f32,
    /// Keep the k most probable ids; at least 1.
    pub top_k: Option<u32>,
    /// Keep the smallest set of most probable ids that holds this much probability; above 0, at most 1.
    pub top_p: Option<f32>,
    pub seed: u64,
}

/// Lowest temperature. Below it the reciprocal amplifies bf16 noise of the logits beyond the resolution of fp32 scores; users mean greedy.
pub const TEMPERATURE_MIN: f32 = 1e-3;
/// Highest temperature. Above it every distribution is flat to fp32 precision.
pub const TEMPERATURE_MAX: f32 = 1e3;

/// Resolved settings: the constants that interpreter and kernel compute with. Made by [`SampleSettings::resolve`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampler {
    greedy: bool,
    inv_temperature: f32,
    top_k: u32,
    top_p_q32: u64,
    key: [u32; 2],
}

/// `top_p_q32` that admits all ids.
const TOP_P_ALL: u64 = 1 << 32;

impl SampleSettings {
    /// The settings that always take the most probable id.
    pub fn greedy() -> SampleSettings {
        SampleSettings { temperature: 0.0, top_k: None, top_p: None, seed: 0 }
    }

    /// Checks the ranges and computes the constants of the specification.
    pub fn resolve(&self) -> Result<Sampler, SampleError> {
        let SampleSettings { temperature, top_k, top_p, seed } = *self;
        let greedy = temperature == 0.0;
        if !greedy && !(TEMPERATURE_MIN..=TEMPERATURE_MAX).contains(&temperature) {
            return Err(SampleError::Temperature { found: temperature });
        }
        if top_k == Some(0) {
            return Err(SampleError::TopK);
        }
        let top_p_q32 = match top_p {
            None => TOP_P_ALL,
            // In f64 the product is exact; a top-p below 2^-33 rounds to 0 and still admits one id.
            Some(p) if p > 0.0 && p <= 1.0 => (f64::from(p) * TOP_P_ALL as f64).round() as u64,
            Some(p) => return Err(SampleError::TopP { found: p }),
        };
        Ok(Sampler {
            greedy,
            inv_temperature: if greedy { 1.0 } else { 1.0 / temperature },
            top_k: top_k.unwrap_or(0),
            top_p_q32,
            key: [seed as u32, (seed >> 32) as u32],
        })
    }
}

impl fmt::Display for Sampler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Sampler { greedy, inv_temperature, top_k, top_p_q32, key: _ } = *self;
        if greedy {
            return f.write_str("the arg-max");
        }
        write!(f, "temperature {}", 1.0 / inv_temperature)?;
        if top_k > 0 {
            write!(f, ", top-k {top_k}")?;
        }
        if top_p_q32 < TOP_P_ALL {
            write!(f, ", top-p {}", top_p_q32 as f64 / TOP_P_ALL as f64)?;
        }
        Ok(())
    }
}

impl Sampler {
    /// The most probable id, always.
    pub fn greedy() -> Sampler {
        Sampler { greedy: true, inv_temperature: 1.0, top_k: 0, top_p_q32: TOP_P_ALL, key: [0; 2] }
    }

    /// Whether top-k or top-p may leave ids out.
    pub fn is_filtered(&self) -> bool {
        !self.greedy && (self.top_k > 0 || self.top_p_q32 < TOP_P_ALL)
    }

    pub fn is_greedy(&self) -> bool {
        self.greedy
    }

    /// Factor from logit to score; 1 when greedy.
    pub fn inv_temperature(&self) -> f32 {
        self.inv_temperature
    }

    /// Ids that top-k keeps; 0 means all.
    pub fn top_k(&self) -> u32 {
        self.top_k
    }

    /// Probability that top-p keeps, in units of 2^-32; 2^32 means all.
    pub fn top_p_q32(&self) -> u64 {
        self.top_p_q32
    }

    /// Key of the random numbers: the seed's low word, then its high word.
    pub fn key(&self) -> [u32; 2] {
        self.key
    }

    /// The settings that batch kernels take: the factor from logit to score, and the seed. Both are 0 when greedy.
    pub fn temperature_of_rows(&self) -> (f32, u64) {
        let [low, high] = self.key;
        if self.greedy { (0.0, 0) } else { (self.inv_temperature, u64::from(high) << 32 | u64::from(low)) }
    }

    /// Chooses the id of the token at `position` of its sequence from its logits `[vocab]`.
    ///
    /// # Errors
    /// No logit is a number above -inf.
    pub fn choose(&self, logits: &[f32], position: u32) -> Result<u32, SampleError> {
        let chosen = if self.greedy { argmax(logits) } else { self.draw(&self.admitted(logits), position) };
        chosen.ok_or(SampleError::NoCandidate { position, vocab: logits.len() })
    }

    /// The id with the largest sum of score and noise, ties to the lowest id. `admitted` is in ascending order of ids.
    pub(super) fn draw(&self, admitted: &[(u32, f32)], position: u32) -> Option<u32> {
        // Words of one Philox call serve four neighbouring ids.
        let mut block = u32::MAX;
        let mut words = [0; 4];
        let mut best: Option<(f32, u32)> = None;
        for &(id, score) in admitted {
            if id / 4 != block {
                block = id / 4;
                words = philox4x32_10([position, 0, block, 0], self.key);
            }
            let noisy = score + gumbel(words[id as usize % 4]);
            if best.is_none_or(|(top, _)| noisy > top) {
                best = Some((noisy, id));
            }
        }
        best.map(|(_, id)| id)
    }

    /// The ids that top-k and top-p keep, ascending, with their scores `logit * inv_temperature`.
    pub fn admitted(&self, logits: &[f32]) -> Vec<(u32, f32)> {
        let mut ids: Vec<(u32, f32)> = (0..)
            .zip(logits)
            .map(|(id, &logit)| (id, logit * self.inv_temperature))
            .filter(|&(_, score)| score > f32::NEG_INFINITY)
            .collect();
        let k = self.top_k as usize;
        if k > 0 && k < ids.len() {
            ids.select_nth_unstable_by(k - 1, in_order);
            ids.truncate(k);
        }
        if self.top_p_q32 < TOP_P_ALL {
            ids.sort_unstable_by(in_order);
            let score_max = ids.first().map_or(0.0, |&(_, score)| score);
            let weights: Vec<u64> = ids.iter().map(|&(_, score)| weight(score, score_max)).collect();
            // At most 2^32 ids of 2^40 each: the product with 2^32 needs the 128 bits, the sum itself at most 72.
            let total: u128 = weights.iter().map(|&w| u128::from(w)).sum();
            let need = (total * u128::from(self.top_p_q32)).div_ceil(u128::from(TOP_P_ALL));
            let mut sum = 0;
            let mut kept = 0;
            for w in weights {
                sum += u128::from(w);
                kept += 1;
                if sum >= need {
                    break;
                }
            }
            ids.truncate(kept);
        }
        ids.sort_unstable_by_key(|&(id, _)| id);
        ids
    }
}

/// The id of the largest logit, ties to the lowest id; `None` if no logit is a number above -inf.
pub fn argmax(logits: &[f32]) -> Option<u32> {
    let mut best = None;
    let mut top = f32::NEG_INFINITY;
    for (id, &logit) in (0..).zip(logits) {
        // False for NaN.
        if logit > top {
            top = logit;
            best = Some(id);
        }
    }
    best
}

/// Score descending, then id ascending. Scores are never NaN here; `partial_cmp` keeps -0 equal to +0.
pub(super) fn in_order(a: &(u32, f32), b: &(u32, f32)) -> Ordering {
    b.1.partial_cmp(&a.1).unwrap_or(Ordering::Equal).then(a.0.cmp(&b.0))
}

/// Unnormalised probability in units of 2^-40, so that sums of it are exact in any order.
///
/// With 2^40, a u64 sum of up to 2^23 ids cannot overflow, and only ids below 1e-12 of the most probable one are lost.
fn weight(score: f32, score_max: f32) -> u64 {
    // Equal scores first: +inf - +inf would be NaN.
    let ratio = if score == score_max { 1.0 } else { exp_f32(score - score_max) };
    (ratio * (1u64 << 40) as f32) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(temperature: f32, top_k: Option<u32>, top_p: Option<f32>) -> Sampler {
        SampleSettings { temperature, top_k, top_p, seed: 0x0123_4567_89AB_CDEF }.resolve().expect("valid settings")
    }

    fn ids(sampler: &Sampler, logits: &[f32]) -> Vec<u32> {
        sampler.admitted(logits).into_iter().map(|(id, _)| id).collect()
    }

    fn softmax(scores: &[f64]) -> Vec<f64> {
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = scores.iter().map(|s| (s - max).exp()).sum();
        scores.iter().map(|s| (s - max).exp() / total).collect()
    }

    /// Top-k, then top-p, by their definitions in f64. Also returns the gap between the mass at the edge and `top_p`.
    fn admitted_by_definition(logits: &[f32], temperature: f32, k: usize, top_p: f64) -> (Vec<u32>, f64) {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        order.truncate(k);
        let scores: Vec<f64> = order.iter().map(|&i| f64::from(logits[i]) / f64::from(temperature)).collect();
        let mut mass = 0.0;
        let mut gap = f64::INFINITY;
        let mut kept = 0;
        for p in softmax(&scores) {
            if kept > 0 && mass >= top_p {
                break;
            }
            mass += p;
            kept += 1;
            gap = gap.min((mass - top_p).abs());
        }
        let mut ids: Vec<u32> = order[..kept].iter().map(|&i| i as u32).collect();
        ids.sort_unstable();
        (ids, gap)
    }

    fn random_logits(vocab: u32, seed: u32, scale: f32) -> Vec<f32> {
        (0..vocab).map(|i| gumbel(philox4x32_10([i, seed, 7, 7], [1, 2])[0]) * scale).collect()
    }

    /// Tokens of 24 positions, from an independent implementation of the specification in numpy float32.
    #[test]
    fn choices_are_the_specified_tokens() {
        // Multiples of 2^-13 in [-4, 4), so that any language makes the same bits.
        let logits: Vec<f32> =
            (0..50u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 16) as f32 / 8192.0 - 4.0).collect();
        for (sampler, want) in [
            (
                sampler(1.0, None, None),
                [16, 29, 21, 16, 43, 42, 11, 29, 21, 37, 17, 11, 21, 3, 8, 21, 24, 3, 27, 8, 22, 21, 11, 42],
            ),
            (
                sampler(0.7, None, None),
                [16, 29, 21, 16, 43, 42, 21, 29, 21, 8, 29, 11, 21, 42, 8, 21, 24, 3, 21, 8, 22, 21, 11, 42],
            ),
            (
                sampler(1.5, Some(8), None),
                [16, 29, 21, 16, 21, 42, 21, 29, 21, 37, 29, 16, 21, 3, 8, 3, 24, 3, 21, 8, 21, 21, 42, 42],
            ),
            (
                sampler(1.0, None, Some(0.9)),
                [16, 29, 21, 16, 21, 42, 11, 29, 21, 37, 29, 11, 21, 3, 8, 21, 24, 3, 27, 8, 21, 21, 11, 42],
            ),
            (
                sampler(0.8, Some(20), Some(0.6)),
                [16, 29, 21, 16, 21, 42, 21, 29, 21, 8, 29, 16, 21, 42, 8, 21, 42, 42, 21, 8, 21, 21, 42, 42],
            ),
        ] {
            let got: Vec<u32> = (0..24).map(|position| sampler.choose(&logits, position).expect("a token")).collect();
            assert_eq!(got, want, "{sampler:?}");
        }
    }

    #[test]
    fn a_token_depends_on_seed_and_position_alone() {
        let logits = vec![0.0; 1000];
        let choose = |seed, position| {
            let settings = SampleSettings { temperature: 1.0, top_k: None, top_p: None, seed };
            settings.resolve().expect("valid settings").choose(&logits, position).expect("a token")
        };
        let base = choose(1, 2);
        assert_eq!(choose(1, 2), base);
        assert_ne!(choose(2, 2), base);
        assert_ne!(choose(1 + (1 << 32), 2), base, "the seed's high word takes part");
        assert_ne!(choose(1, 3), base);
        // An id's noise does not depend on which other ids are admitted.
        let mut fewer = logits.clone();
        for (id, logit) in fewer.iter_mut().enumerate() {
            if id % 3 != base as usize % 3 {
                *logit = f32::NEG_INFINITY;
            }
        }
        let settings = SampleSettings { temperature: 1.0, top_k: None, top_p: None, seed: 1 };
        assert_eq!(settings.resolve().expect("valid settings").choose(&fewer, 2), Ok(base));
    }

    #[test]
    fn greedy_takes_the_lowest_id_of_the_largest() {
        let greedy = SampleSettings::greedy().resolve().expect("valid settings");
        assert!(greedy.is_greedy());
        assert_eq!(greedy.choose(&[1.0, 3.0, 2.0, 3.0], 0), Ok(1));
        assert_eq!(greedy.choose(&[-0.0, 0.0], 0), Ok(0), "the zeros are equal");
        assert_eq!(greedy.choose(&[f32::NAN, -5.0, f32::NEG_INFINITY], 0), Ok(1));
        assert_eq!(greedy.choose(&[1.0, f32::INFINITY, f32::INFINITY], 0), Ok(1));
        let none = SampleError::NoCandidate { position: 4, vocab: 2 };
        assert_eq!(greedy.choose(&[f32::NAN, f32::NEG_INFINITY], 4), Err(none));
        // Filters and seed have no effect.
        let filtered = SampleSettings { temperature: 0.0, top_k: Some(2), top_p: Some(0.1), seed: 9 };
        assert_eq!(filtered.resolve().expect("valid settings").choose(&[1.0, 3.0, 2.0, 3.0], 0), Ok(1));
    }

    #[test]
    fn hand_made_sets() {
        let flat = [0.5; 8];
        assert_eq!(ids(&sampler(1.0, None, None), &flat), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(ids(&sampler(1.0, Some(3), None), &flat), [0, 1, 2], "ties to the lowest ids");
        assert_eq!(ids(&sampler(1.0, None, Some(0.5)), &flat), [0, 1, 2, 3], "exactly half is enough");
        assert_eq!(ids(&sampler(1.0, None, Some(0.501)), &flat), [0, 1, 2, 3, 4]);
        assert_eq!(ids(&sampler(1.0, Some(4), Some(0.5)), &flat), [0, 1], "top-p renormalises after top-k");
        assert_eq!(ids(&sampler(1.0, None, Some(1e-12)), &flat), [0], "never empty");
        assert_eq!(ids(&sampler(1.0, Some(100), Some(1.0)), &flat), [0, 1, 2, 3, 4, 5, 6, 7]);

        // Probabilities near 0.64, 0.24, 0.09, 0.03, out of order.
        let steps = [1.0, 3.0, 0.0, 2.0];
        assert_eq!(ids(&sampler(1.0, Some(2), None), &steps), [1, 3]);
        assert_eq!(ids(&sampler(1.0, None, Some(0.6)), &steps), [1]);
        assert_eq!(ids(&sampler(1.0, None, Some(0.7)), &steps), [1, 3]);
        assert_eq!(ids(&sampler(1.0, None, Some(0.9)), &steps), [0, 1, 3]);
        assert_eq!(ids(&sampler(1.0, None, Some(0.99)), &steps), [0, 1, 2, 3]);
        // Among the first two alone, the largest holds 0.73.
        assert_eq!(ids(&sampler(1.0, Some(2), Some(0.7)), &steps), [1]);
        // Temperature comes before top-p: at 2 the largest holds 0.46.
        assert_eq!(ids(&sampler(2.0, None, Some(0.6)), &steps), [1, 3]);

        // An edge inside a group of ties: 0.5 and four times 0.125.
        let tied = [0.0, 4f32.ln(), 0.0, 0.0, 0.0];
        assert_eq!(ids(&sampler(1.0, None, Some(0.7)), &tied), [0, 1, 2]);
        assert_eq!(ids(&sampler(1.0, Some(3), None), &tied), [0, 1, 2]);

        let odd = [f32::NAN, f32::NEG_INFINITY, -3.0, f32::INFINITY];
        assert_eq!(ids(&sampler(1.0, None, None), &odd), [2, 3]);
        assert_eq!(ids(&sampler(1.0, None, Some(0.9)), &odd), [3]);
        assert_eq!(ids(&sampler(1.0, Some(2), Some(0.9)), &[f32::NAN]), [] as [u32; 0]);
    }

    #[test]
    fn sets_agree_with_their_definition() {
        let mut compared = 0;
        for case in 0..300 {
            let [a, b, c, d] = philox4x32_10([case, 0, 0, 1], [5, 6]);
            let vocab = 1 + a % 700;
            let k = 1 + b % (vocab + 20);
            let top_p = (f64::from(c) / f64::from(u32::MAX)).clamp(0.01, 1.0) as f32;
            let temperature = 0.3 + (d % 20) as f32 / 10.0;
            let logits = random_logits(vocab, case, 2.0);
            let (want, gap) = admitted_by_definition(&logits, temperature, k as usize, f64::from(top_p));
            // Within rounding of the edge either set is right.
            if gap > 1e-6 {
                assert_eq!(ids(&sampler(temperature, Some(k), Some(top_p)), &logits), want, "case {case}");
                compared += 1;
            }
        }
        assert!(compared > 280, "{compared} of 300 cases were clear of the edge");
    }

    #[test]
    fn settings_out_of_range_are_refused_by_name() {
        let base = SampleSettings { temperature: 1.0, top_k: None, top_p: None, seed: 0 };
        for temperature in [-1.0, f32::NAN, f32::INFINITY, 1e-4, 1e4] {
            let error = SampleSettings { temperature, ..base }.resolve().expect_err("out of range");
            assert!(error.to_string().starts_with("temperature: expected 0 (greedy) or a number from 0.001 to 1000"));
        }
        for top_p in [0.0, -0.5, 1.5, f32::NAN] {
            let error = SampleSettings { top_p: Some(top_p), ..base }.resolve().expect_err("out of range");
            assert_eq!(error.to_string(), format!("top-p: expected a number above 0 and at most 1, found `{top_p}`"));
        }
        let error = SampleSettings { top_k: Some(0), ..base }.resolve().expect_err("out of range");
        assert_eq!(crate::error::Fault::from(error).tier, crate::error::Tier::Input);
    }
}
