//! Owns log-probabilities: the log-softmax of logits in f64, for people and clients. No token is chosen by them.

use super::sampler::in_order;

/// Natural logarithms of the probabilities that logits give, of one token and of the most probable ones.
#[derive(Debug, Clone, PartialEq)]
pub struct Logprobs {
    /// Log-probability of the given token: -inf if its logit is -inf, NaN if there is no such token.
    pub token: f64,
    /// The most probable ids, ties to the lowest id first.
    pub top: Vec<(u32, f64)>,
}

impl Logprobs {
    /// The log-probability of `token` and of the `top` most probable ids under the softmax of `logits`.
    ///
    /// `l - l_max - ln(sum(exp(l - l_max)))`, in f64, summed in order of ids. A logit that is NaN adds nothing to the sum.
    pub fn of(logits: &[f32], token: u32, top: usize) -> Logprobs {
        let softmax = LogSoftmax::of(logits);
        let mut ids: Vec<(u32, f32)> = vec![];
        if top > 0 {
            ids = (0..).zip(logits.iter().copied()).filter(|(_, logit)| !logit.is_nan()).collect();
            if top < ids.len() {
                ids.select_nth_unstable_by(top - 1, in_order);
                ids.truncate(top);
            }
            ids.sort_unstable_by(in_order);
        }
        Logprobs {
            token: logits.get(token as usize).map_or(f64::NAN, |&logit| softmax.logprob(logit)),
            top: ids.into_iter().map(|(id, logit)| (id, softmax.logprob(logit))).collect(),
        }
    }
}

/// The Kullback-Leibler divergence `sum(p ln(p / q))`, in nats, between the softmax of two rows of logits of the same length.
///
/// An id with probability 0 in `p` adds nothing. Infinite if an id has probability 0 in `q` but not in `p`.
pub fn divergence(p: &[f32], q: &[f32]) -> f64 {
    let (of_p, of_q) = (LogSoftmax::of(p), LogSoftmax::of(q));
    let terms = p.iter().zip(q).map(|(&p, &q)| {
        let (p, q) = (of_p.logprob(p), of_q.logprob(q));
        if p == f64::NEG_INFINITY { 0.0 } else { p.exp() * (p - q) }
    });
    terms.sum()
}

/// `l - l_max - ln(sum(exp(l - l_max)))`, in f64.
struct LogSoftmax {
    most: f32,
    ln_sum: f64,
}

impl LogSoftmax {
    fn of(logits: &[f32]) -> LogSoftmax {
        let mut softmax = LogSoftmax { most: logits.iter().copied().fold(f32::NEG_INFINITY, f32::max), ln_sum: 0.0 };
        let known = logits.iter().filter(|logit| !logit.is_nan());
        softmax.ln_sum = known.map(|&logit| softmax.logprob(logit).exp()).sum::<f64>().ln();
        softmax
    }

    fn logprob(&self, logit: f32) -> f64 {
        // Equal ones first: inf - inf would be NaN.
        let beyond = if logit == self.most { 0.0 } else { f64::from(logit) - f64::from(self.most) };
        beyond - self.ln_sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithms_are_those_of_the_softmax() {
        // Probabilities 1/2, 1/8, 1/4, 1/8.
        let logits = [4f32.ln() + 3.0, 3.0, 2f32.ln() + 3.0, 3.0];
        let found = Logprobs::of(&logits, 2, 3);
        let near = |found: f64, p: f64| assert!((found - p.ln()).abs() < 1e-6, "{found} and the logarithm of {p}");
        near(found.token, 0.25);
        assert_eq!(found.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [0, 2, 1], "ties to the lowest id");
        for ((_, found), p) in found.top.iter().zip([0.5, 0.25, 0.125]) {
            near(*found, p);
        }
        assert_eq!(Logprobs::of(&logits, 2, 0).top, []);
        assert_eq!(Logprobs::of(&logits, 2, 9).top.len(), 4);
        assert!(Logprobs::of(&logits, 4, 0).token.is_nan());
    }

    #[test]
    fn odd_logits_have_defined_logarithms() {
        let found = Logprobs::of(&[f32::NAN, 1.0, f32::NEG_INFINITY, 1.0], 2, 4);
        assert_eq!(found.token, f64::NEG_INFINITY);
        assert_eq!(found.top, [(1, -2f64.ln()), (3, -2f64.ln()), (2, f64::NEG_INFINITY)]);
        // Large logits do not overflow; an infinite one takes everything.
        assert_eq!(Logprobs::of(&[3e38, -3e38], 0, 0).token, 0.0);
        assert_eq!(Logprobs::of(&[f32::INFINITY, 5.0], 0, 2).top, [(0, 0.0), (1, f64::NEG_INFINITY)]);
    }

    #[test]
    fn divergence_is_that_of_the_probabilities() {
        // (3/4, 1/4) and (1/2, 1/2): 3/4 ln(3/2) + 1/4 ln(1/2).
        let (p, q) = ([3f32.ln(), 0.0], [7.0, 7.0]);
        let expected = 0.75 * 1.5f64.ln() + 0.25 * 0.5f64.ln();
        assert!((divergence(&p, &q) - expected).abs() < 1e-7);
        assert_eq!(divergence(&q, &q), 0.0);
        assert_eq!(divergence(&[1.0, f32::NEG_INFINITY], &[1.0, f32::NEG_INFINITY]), 0.0);
        assert_eq!(divergence(&q, &[1.0, f32::NEG_INFINITY]), f64::INFINITY);
    }
}
