//! Owns the choice of a token from logits, and the specification by which interpreter and device choose the same one.
//!
//! Every operation below is a plain fp32 or integer operation with one defined result, so a kernel that follows the
//! list gives the same token for the same logits, bit for bit. A kernel writes them as `__fadd_rn`, `__fsub_rn`,
//! `__fmul_rn` and `__fdiv_rn` (never contracted to fma, subnormals kept), and no library function takes part: `logf`
//! and `expf` differ by ulps between libraries, and one ulp is enough to change a token.
//!
//! ```text
//! sampler      host, once     inv_t = 1 / temperature; top_p_q32 = round(top_p * 2^32); key = (seed low, seed high)
//! score        per id         s = logit * inv_t                      NaN and -inf are never chosen
//! greedy       temperature 0  argmax of the logits, ties to the lowest id; no noise, no filter
//! order        ranking        s descending, then id ascending; -0 equals +0 (a packed integer key adds +0 first)
//! top-k        if top_k > 0   the first top_k ids of the order
//! top-p        if < 2^32      w = trunc(exp_f32(s - s_max) * 2^40) as u64, s_max over the vocabulary;
//!                             total = sum of w over the top-k set; need = ceil(total * top_p_q32 / 2^32);
//!                             the shortest prefix of the order whose sum of w reaches need, at least one id
//! noise        per id         x = word (id mod 4) of Philox4x32-10(counter = (position, row, id / 4, 0), key)
//!                             g = -ln_f32(exponential(x))
//! choice                      argmax of s + g over the admitted ids, ties to the lowest id
//! ```
//!
//! Why these: the Gumbel-max trick turns sampling into an arg-max, which is the reduction a greedy kernel has already.
//! The noise of an id depends on (seed, position, row, id) alone, so neither the number of threads nor the batch's
//! other rows nor a repeated step changes it. Top-p sums integers, whose order does not matter: a kernel may use
//! atomics or a binary search over the score instead of a sort. Among equal scores at the edge of top-p each adds the
//! same w, so the count of ids to keep there is one division.
//!
//! Top-k precedes top-p, and top-p sees probabilities renormalised over the top-k set, as in transformers
//! (`TemperatureLogitsWarper`, `TopKLogitsWarper`, `TopPLogitsWarper`). One difference: transformers keeps every id
//! that ties with the k-th score, here the lowest ids win, so the set never exceeds k.

use crate::error::Fault;
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

/// Below this the reciprocal amplifies bf16 noise of the logits beyond what fp32 scores resolve; greedy is meant.
pub const TEMPERATURE_MIN: f32 = 1e-3;
/// Above this every distribution is flat to fp32 precision.
pub const TEMPERATURE_MAX: f32 = 1e3;

/// Settings or logits that no token can be chosen from.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SampleError {
    #[error(
        "temperature: expected 0 (greedy) or a number from {TEMPERATURE_MIN} to {TEMPERATURE_MAX}, found `{found}`"
    )]
    Temperature { found: f32 },
    #[error("top-k: expected at least 1, found `0`")]
    TopK,
    #[error("top-p: expected a number above 0 and at most 1, found `{found}`")]
    TopP { found: f32 },
    #[error("logits at position {position}, row {row}: expected at least one number above -inf among {vocab}")]
    NoCandidate { position: u32, row: u32, vocab: usize },
}

impl From<SampleError> for Fault {
    fn from(error: SampleError) -> Fault {
        let message = error.to_string();
        match error {
            SampleError::Temperature { .. } => Fault::input(message),
            SampleError::TopK => Fault::input(message).with_remedy("leave top-k out to keep every token"),
            SampleError::TopP { .. } => Fault::input(message).with_remedy("leave top-p out to keep every token"),
            SampleError::NoCandidate { .. } => Fault::internal(message)
                .with_remedy("the model produced only NaN or -inf; compare with the reference on the same prompt"),
        }
    }
}

/// Resolved settings: the constants that interpreter and kernel compute with. Made by [`SampleSettings::resolve`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampler {
    greedy: bool,
    inv_temperature: f32,
    top_k: u32,
    top_p_q32: u64,
    key: [u32; 2],
}

/// `top_p_q32` that admits everything.
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

    /// Chooses the id of the token at `position` of sequence `row` from its logits `[vocab]`.
    ///
    /// `position` is the index in its sequence of the token that is being chosen, `row` the sequence's index in the
    /// batch. Fails only where no logit is a number above -inf.
    pub fn choose(&self, logits: &[f32], position: u32, row: u32) -> Result<u32, SampleError> {
        let chosen = if self.greedy {
            argmax(logits)
        } else {
            // Words of one Philox call serve four neighbouring ids; the ids come in ascending order.
            let mut block = u32::MAX;
            let mut words = [0; 4];
            let mut best: Option<(f32, u32)> = None;
            for (id, score) in self.admitted(logits) {
                if id / 4 != block {
                    block = id / 4;
                    words = philox4x32_10([position, row, block, 0], self.key);
                }
                let noisy = score + gumbel(words[id as usize % 4]);
                if best.is_none_or(|(top, _)| noisy > top) {
                    best = Some((noisy, id));
                }
            }
            best.map(|(_, id)| id)
        };
        chosen.ok_or(SampleError::NoCandidate { position, row, vocab: logits.len() })
    }

    /// The ids that top-k and top-p leave, ascending, with their scores `logit * inv_temperature`.
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

/// The id of the largest logit, ties to the lowest id; `None` where no logit is a number above -inf.
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
fn in_order(a: &(u32, f32), b: &(u32, f32)) -> Ordering {
    b.1.partial_cmp(&a.1).unwrap_or(Ordering::Equal).then(a.0.cmp(&b.0))
}

/// Unnormalised probability in units of 2^-40, so that sums of it are exact in any order.
///
/// 2^40 leaves 2^23 ids before a u64 sum can overflow, and loses only ids below 1e-12 of the most probable one.
fn weight(score: f32, score_max: f32) -> u64 {
    // Equal scores first: +inf - +inf would be NaN.
    let ratio = if score == score_max { 1.0 } else { exp_f32(score - score_max) };
    (ratio * (1u64 << 40) as f32) as u64
}

/// Philox4x32 with 10 rounds: four random words per counter and key.
///
/// J. K. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; the constants are Random123's.
pub fn philox4x32_10(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let [mut c0, mut c1, mut c2, mut c3] = counter;
    let [mut k0, mut k1] = key;
    for _ in 0..10 {
        let p0 = 0xD251_1F53 * u64::from(c0);
        let p1 = 0xCD9E_8D57 * u64::from(c2);
        (c0, c1, c2, c3) = ((p1 >> 32) as u32 ^ c1 ^ k0, p1 as u32, (p0 >> 32) as u32 ^ c3 ^ k1, p0 as u32);
        k0 = k0.wrapping_add(0x9E37_79B9);
        k1 = k1.wrapping_add(0xBB67_AE85);
    }
    [c0, c1, c2, c3]
}

/// Standard exponential variate of a random word: `-ln(1 - v)` for the uniform `v = (x + 1/2) / 2^32`, above 0 always.
///
/// The form matters because the arg-max picks the *smallest* of many exponentials, about 1 / vocab. `-ln(u)` of a
/// 24-bit `u` near 1 has steps of 6e-8 there and would starve improbable ids; here the steps are 2^-32 and the relative
/// error stays below 2^-21.8 (measured over all words).
///
/// ```text
/// x <  2^31: v = (f32(x) + 0.5) * 2^-32;  w = 1 - v;  w == 1 ? v : -ln_f32(w) * (v / (1 - w))
/// x >= 2^31: -ln_f32((f32(!x) + 0.5) * 2^-32)
/// ```
/// `f32(x)` rounds to nearest even. The quotient undoes the rounding of `w` (W. Kahan's log1p); `1 - w` is exact.
pub fn exponential(x: u32) -> f32 {
    const TWO_POW_MINUS_32: f32 = 1.0 / 4_294_967_296.0;
    if x < 1 << 31 {
        let v = (x as f32 + 0.5) * TWO_POW_MINUS_32;
        let w = 1.0 - v;
        if w == 1.0 { v } else { -ln_f32(w) * (v / (1.0 - w)) }
    } else {
        -ln_f32((!x as f32 + 0.5) * TWO_POW_MINUS_32)
    }
}

/// Standard Gumbel variate of a random word, from -3.13 to 22.88; error at most 2^-19.9 (measured over all words).
pub fn gumbel(x: u32) -> f32 {
    -ln_f32(exponential(x))
}

/// Natural logarithm of a positive normal number, by a fixed sequence of fp32 operations.
///
/// Error at most 0.85 ulp and 2^-23.5 of the value (measured over every positive normal number). Scheme and
/// coefficients: S. Moshier's Cephes, `logf`; the decimals below name each fp32 coefficient exactly.
///
/// ```text
/// x = m * 2^e, sqrt(1/2) <= m < sqrt(2);  f = m - 1 (exact);  z = f * f
/// p = Horner(P0..P8, f);  y = (f * z) * p;  y = y + e * Q1;  y = y - z * 0.5;  r = f + y;  r = r + e * Q2
/// ```
/// Each `a * b + c` is two rounded operations.
pub fn ln_f32(x: f32) -> f32 {
    debug_assert!(x >= f32::MIN_POSITIVE && x.is_finite());
    const P: [f32; 9] = [
        0.070376836,
        -0.1151461,
        0.116769984,
        -0.12420141,
        0.14249323,
        -0.16668057,
        0.20000714,
        -0.24999994,
        0.3333333,
    ];
    // ln 2 in two parts; the larger has few bits, so that its product with the exponent is exact.
    const Q1: f32 = -0.00021219444;
    const Q2: f32 = 0.6933594;
    // Subtracting the bits of sqrt(1/2) lets the exponent field count from there.
    const SQRT_HALF_BITS: u32 = 0x3F35_04F3;
    let shifted = x.to_bits().wrapping_sub(SQRT_HALF_BITS);
    let e = (shifted as i32 >> 23) as f32;
    let m = f32::from_bits((shifted & 0x007F_FFFF) + SQRT_HALF_BITS);
    let f = m - 1.0;
    let z = f * f;
    let mut p = P[0];
    for c in &P[1..] {
        p = p * f + c;
    }
    let mut y = (f * z) * p;
    y += e * Q1;
    y -= z * 0.5;
    let r = f + y;
    r + e * Q2
}

/// `e^d` for `d <= 0`, by a fixed sequence of fp32 operations; 0 below -30, where no weight is left.
///
/// Error at most 0.99 ulp (measured over every argument). Scheme and coefficients: S. Moshier's Cephes, `expf`:
///
/// ```text
/// n = floor(d * log2(e) + 0.5);  r = d - n * Q2;  r = r - n * Q1;  z = r * r
/// p = Horner(P0..P5, r);  y = p * z;  y = y + r;  y = y + 1;  y * 2^n
/// ```
pub fn exp_f32(d: f32) -> f32 {
    const P: [f32; 6] = [0.00019875691, 0.0013981999, 0.008333452, 0.041665796, 0.16666666, 0.5];
    const Q1: f32 = -0.00021219444;
    const Q2: f32 = 0.6933594;
    // Also the case of -inf.
    if d < -30.0 {
        return 0.0;
    }
    let n = (d * std::f32::consts::LOG2_E + 0.5).floor();
    let mut r = d - n * Q2;
    r -= n * Q1;
    let z = r * r;
    let mut p = P[0];
    for c in &P[1..] {
        p = p * r + c;
    }
    let mut y = p * z;
    y += r;
    y += 1.0;
    // n is in -43..=0, so the power of two is a normal number and the product exact.
    y * f32::from_bits(((n as i32 + 127) as u32) << 23)
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

    /// Pearson's statistic of counts against probabilities.
    fn chi_square(counts: &[u32], probabilities: &[f64]) -> f64 {
        let draws: f64 = counts.iter().map(|&c| f64::from(c)).sum();
        counts.iter().zip(probabilities).map(|(&c, p)| (f64::from(c) - draws * p).powi(2) / (draws * p)).sum()
    }

    fn softmax(scores: &[f64]) -> Vec<f64> {
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = scores.iter().map(|s| (s - max).exp()).sum();
        scores.iter().map(|s| (s - max).exp() / total).collect()
    }

    /// Top-k, then top-p, written as their definitions in f64. Also the gap between the mass at the edge and `top_p`.
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

    #[test]
    fn philox_gives_the_known_answers_of_random123() {
        assert_eq!(philox4x32_10([0; 4], [0; 2]), [0x6627_E8D5, 0xE169_C58D, 0xBC57_AC4C, 0x9B00_DBD8]);
        assert_eq!(philox4x32_10([u32::MAX; 4], [u32::MAX; 2]), [0x408F_276D, 0x41C8_3B0E, 0xA20B_C7C6, 0x6D54_51FD]);
        assert_eq!(
            philox4x32_10([0x243F_6A88, 0x85A3_08D3, 0x1319_8A2E, 0x0370_7344], [0xA409_3822, 0x299F_31D0]),
            [0xD16C_FE09, 0x94FD_CCEB, 0x5001_E420, 0x2412_6EA1]
        );
    }

    /// The bits come from an independent implementation of the module's head in numpy float32.
    #[test]
    fn noise_has_the_specified_bits() {
        for (x, exponential_bits, gumbel_bits) in [
            (0x0000_0000, 0x2F00_0000, 0x41B6_FDA9),
            (0x0000_0001, 0x2FC0_0000, 0x41AE_33B3),
            (0x0000_0002, 0x3020_0000, 0x41AA_1D88),
            (0x0000_007F, 0x32FF_0000, 0x418A_A927),
            (0x010D_8015, 0x3B87_0728, 0x40AF_BC38),
            (0x3FFF_FFFF, 0x3E93_4B10, 0x3F9F_79A2),
            (0x7FFF_FFFF, 0x3F31_7218, 0x3EBB_A795),
            (0x8000_0000, 0x3F31_7218, 0x3EBB_A795),
            (0xA1FD_2BCF, 0x3F80_39D7, 0xBAE7_27CA),
            (0xC0FF_EE00, 0x3FB3_75FE, 0xBEAD_04C9),
            (0xFFFF_FF7F, 0x418A_9927, 0xC036_896E),
            (0xFFFF_FFFE, 0x41AE_33B3, 0xC045_2B66),
            (0xFFFF_FFFF, 0x41B6_FDA9, 0xC048_51D5),
        ] {
            assert_eq!(exponential(x).to_bits(), exponential_bits, "exponential of {x:#010x}");
            assert_eq!(gumbel(x).to_bits(), gumbel_bits, "gumbel of {x:#010x}");
        }
        for (x, bits) in [
            (1e-30, 0xC28A_27B5),
            (0.1, 0xC013_5D8E),
            (f32::from_bits(0x3F35_04F3), 0xBEB1_7218),
            (f32::from_bits(0x3F35_04F4), 0xBEB1_7216),
            (1.0, 0),
            (1.1, 0x3DC3_31FF),
            (1e10, 0x41B8_34F1),
        ] {
            assert_eq!(ln_f32(x).to_bits(), bits, "ln of {x}");
        }
        for (d, bits) in [
            (-0.0, 0x3F80_0000),
            (-1e-3, 0x3F7F_BE7F),
            (-0.5, 0x3F1B_4598),
            (-7.25, 0x3A3A_2AFF),
            (-30.0, 0x29D2_B706),
            (-31.0, 0),
            (f32::NEG_INFINITY, 0),
        ] {
            assert_eq!(exp_f32(d).to_bits(), bits, "exp of {d}");
        }
    }

    /// Tokens of 24 positions in three rows, from the same independent implementation.
    #[test]
    fn choices_are_the_specified_tokens() {
        // Multiples of 2^-13 in [-4, 4), so that any language makes the same bits.
        let logits: Vec<f32> =
            (0..50u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 16) as f32 / 8192.0 - 4.0).collect();
        for (sampler, want) in [
            (
                sampler(1.0, None, None),
                [16, 29, 42, 16, 8, 42, 11, 40, 11, 37, 21, 45, 21, 15, 16, 21, 32, 29, 27, 29, 16, 21, 32, 42],
            ),
            (
                sampler(0.7, None, None),
                [16, 29, 42, 16, 8, 42, 21, 42, 8, 8, 21, 8, 21, 29, 16, 21, 21, 29, 21, 29, 16, 21, 32, 42],
            ),
            (
                sampler(1.5, Some(8), None),
                [16, 29, 42, 16, 8, 42, 21, 42, 16, 37, 21, 16, 21, 24, 16, 3, 24, 29, 21, 29, 16, 21, 29, 42],
            ),
            (
                sampler(1.0, None, Some(0.9)),
                [16, 29, 42, 16, 8, 42, 11, 40, 11, 37, 21, 45, 21, 24, 16, 21, 32, 29, 27, 29, 16, 21, 32, 42],
            ),
            (
                sampler(0.8, Some(20), Some(0.6)),
                [16, 29, 42, 16, 8, 42, 21, 42, 8, 8, 21, 8, 21, 29, 16, 21, 21, 29, 21, 29, 16, 21, 42, 42],
            ),
        ] {
            let got: Vec<u32> =
                (0..24).map(|position| sampler.choose(&logits, position, position % 3).expect("a token")).collect();
            assert_eq!(got, want, "{sampler:?}");
        }
    }

    #[test]
    fn ln_and_exp_stay_within_their_documented_error() {
        let ulps = |got: f32, want: f64| {
            let bits = (want as f32).abs().to_bits();
            let ulp = f64::from(f32::from_bits(bits + 1)) - f64::from(f32::from_bits(bits));
            (f64::from(got) - want).abs() / ulp
        };
        // A prime stride visits every exponent and all residues of the mantissa.
        for bits in (f32::MIN_POSITIVE.to_bits()..f32::INFINITY.to_bits()).step_by(2011) {
            let x = f32::from_bits(bits);
            assert!(ulps(ln_f32(x), f64::from(x).ln()) <= 0.85, "ln of {x:e}");
        }
        for bits in ((-0.0f32).to_bits()..=(-30.0f32).to_bits()).step_by(1009) {
            let d = f32::from_bits(bits);
            assert!(ulps(exp_f32(d), f64::from(d).exp()) <= 0.99, "exp of {d:e}");
        }
        for x in (0..=u32::MAX).step_by(4099) {
            let want = -(-(f64::from(x) + 0.5) / 4_294_967_296.0).ln_1p();
            assert!(((f64::from(exponential(x)) - want) / want).abs() < 2f64.powf(-21.8), "exponential of {x:#x}");
            assert!((f64::from(gumbel(x)) + want.ln()).abs() < 2f64.powf(-19.9), "gumbel of {x:#x}");
        }
    }

    #[test]
    fn tokens_follow_the_softmax_of_the_scores() {
        let logits = [1.0, -0.5, 2.0, 0.0, 0.25, -2.0, 1.5, 0.75];
        // 99.9 % quantiles of chi-square: 24.3 for 7 degrees of freedom, 13.8 for 2.
        for (temperature, seed) in [(1.0f32, 1), (0.6, 2), (2.0, 3)] {
            let sampler =
                SampleSettings { temperature, top_k: None, top_p: None, seed }.resolve().expect("valid settings");
            let mut counts = [0; 8];
            for position in 0..40_000 {
                counts[sampler.choose(&logits, position, 5).expect("a token") as usize] += 1;
            }
            let scores = logits.map(|l| f64::from(l) / f64::from(temperature));
            let statistic = chi_square(&counts, &softmax(&scores));
            assert!(statistic < 24.3, "temperature {temperature}: chi-square {statistic}, counts {counts:?}");
        }

        // The filters leave 2, 6 and 0, and the rest is renormalised.
        let sampler = sampler(1.0, Some(4), Some(0.8));
        let mut counts = [0; 8];
        for row in 0..40_000 {
            counts[sampler.choose(&logits, 9, row).expect("a token") as usize] += 1;
        }
        assert_eq!(counts.iter().sum::<u32>(), counts[2] + counts[6] + counts[0]);
        let statistic = chi_square(&[counts[2], counts[6], counts[0]], &softmax(&[2.0, 1.5, 1.0]));
        assert!(statistic < 13.8, "chi-square {statistic}, counts {counts:?}");
    }

    /// The place where coarse noise shows: many near-equal ids, where the winner has the smallest of many exponentials,
    /// and an improbable tail.
    #[test]
    fn a_large_vocabulary_has_neither_a_bias_to_low_ids_nor_a_starved_tail() {
        let sampler = sampler(1.0, None, None);
        let flat = vec![0.0; 4096];
        let mut counts = [0; 16];
        for position in 0..4000 {
            counts[sampler.choose(&flat, position, 0).expect("a token") as usize / 256] += 1;
        }
        // 99.9 % quantile for 15 degrees of freedom.
        let statistic = chi_square(&counts, &[1.0 / 16.0; 16]);
        assert!(statistic < 37.7, "chi-square {statistic}, counts {counts:?}");

        // Id 0 holds half of the mass, 4095 ids share the other half.
        let mut peaked = flat;
        peaked[0] = 4095f32.ln();
        let mut counts = [0; 2];
        for position in 0..4000 {
            counts[(sampler.choose(&peaked, position, 1).expect("a token") != 0) as usize] += 1;
        }
        // 99.9 % quantile for 1 degree of freedom.
        let statistic = chi_square(&counts, &[0.5; 2]);
        assert!(statistic < 10.8, "chi-square {statistic}, counts {counts:?}");
    }

    #[test]
    fn a_token_depends_on_seed_position_and_row_alone() {
        let logits = vec![0.0; 1000];
        let choose = |seed, position, row| {
            let settings = SampleSettings { temperature: 1.0, top_k: None, top_p: None, seed };
            settings.resolve().expect("valid settings").choose(&logits, position, row).expect("a token")
        };
        let base = choose(1, 2, 3);
        assert_eq!(choose(1, 2, 3), base);
        assert_ne!(choose(2, 2, 3), base);
        assert_ne!(choose(1 + (1 << 32), 2, 3), base, "the seed's high word takes part");
        assert_ne!(choose(1, 3, 3), base);
        assert_ne!(choose(1, 2, 4), base);
        // An id's noise does not depend on which other ids are admitted.
        let mut fewer = logits.clone();
        for (id, logit) in fewer.iter_mut().enumerate() {
            if id % 3 != base as usize % 3 {
                *logit = f32::NEG_INFINITY;
            }
        }
        let settings = SampleSettings { temperature: 1.0, top_k: None, top_p: None, seed: 1 };
        assert_eq!(settings.resolve().expect("valid settings").choose(&fewer, 2, 3), Ok(base));
    }

    #[test]
    fn greedy_takes_the_lowest_id_of_the_largest() {
        let greedy = SampleSettings::greedy().resolve().expect("valid settings");
        assert!(greedy.is_greedy());
        assert_eq!(greedy.choose(&[1.0, 3.0, 2.0, 3.0], 0, 0), Ok(1));
        assert_eq!(greedy.choose(&[-0.0, 0.0], 0, 0), Ok(0), "the zeros are equal");
        assert_eq!(greedy.choose(&[f32::NAN, -5.0, f32::NEG_INFINITY], 0, 0), Ok(1));
        assert_eq!(greedy.choose(&[1.0, f32::INFINITY, f32::INFINITY], 0, 0), Ok(1));
        let none = SampleError::NoCandidate { position: 4, row: 2, vocab: 2 };
        assert_eq!(greedy.choose(&[f32::NAN, f32::NEG_INFINITY], 4, 2), Err(none));
        // Filters and seed play no part.
        let filtered = SampleSettings { temperature: 0.0, top_k: Some(2), top_p: Some(0.1), seed: 9 };
        assert_eq!(filtered.resolve().expect("valid settings").choose(&[1.0, 3.0, 2.0, 3.0], 0, 0), Ok(1));
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
        // Of the first two alone the largest holds 0.73.
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
        assert_eq!(Fault::from(error).tier, crate::error::Tier::Input);
    }
}
