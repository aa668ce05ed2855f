//! Owns all settings of one request for the choice of its tokens, and the choice itself.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use super::counts::{TokenCounts, TokenSet};
use super::error::SampleError;
use super::logprobs::Logprobs;
use super::noise::exp_f32;
use super::sampler::{SampleSettings, Sampler, argmax};

/// How a request wants its tokens chosen, as its user states it. [`RequestSettings::plain`] has everything off.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestSettings {
    /// Temperature, top-k, top-p and seed.
    pub sampling: SampleSettings,
    /// Keep ids whose probability is at least this fraction of the highest one; 0 to 1, 0 is off.
    pub min_p: f32,
    pub penalties: Penalties,
    /// Added to the logit of an id; -100 to 100.
    pub logit_bias: BTreeMap<u32, f32>,
    /// Ids that end the request, besides those that end the model's text.
    pub stop_ids: Vec<u32>,
    /// Tokens before which neither a stop id nor an eos id is chosen.
    pub min_tokens: u32,
    /// Continue after an eos id.
    pub ignore_eos: bool,
    /// `Some(n)`: log-probabilities of the chosen token and of the n most probable ones.
    pub logprobs: Option<u32>,
}

/// Penalties for tokens that occurred before.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Penalties {
    /// For ids in the prompt or among the generated tokens: divides a positive logit, multiplies a negative one. Above 0; 1 is off.
    pub repetition: f32,
    /// Subtracted from the logit of an id that was generated; -2 to 2, 0 is off.
    pub presence: f32,
    /// Subtracted from the logit of an id once for each time that it was generated; -2 to 2, 0 is off.
    pub frequency: f32,
}

impl Penalties {
    /// No penalty.
    pub const OFF: Penalties = Penalties { repetition: 1.0, presence: 0.0, frequency: 0.0 };
}

impl RequestSettings {
    /// These settings and nothing else.
    pub fn plain(sampling: SampleSettings) -> RequestSettings {
        RequestSettings {
            sampling,
            min_p: 0.0,
            penalties: Penalties::OFF,
            logit_bias: BTreeMap::new(),
            stop_ids: vec![],
            min_tokens: 0,
            ignore_eos: false,
            logprobs: None,
        }
    }

    /// Names of the settings in use that the kernel of a step does not support. A sampler after the kernel applies them, or the
    /// host by [`Request::choose`]. If empty, [`Request::sampler`] alone chooses the same tokens.
    pub fn beyond_kernels(&self) -> Vec<&'static str> {
        let RequestSettings {
            sampling,
            min_p,
            penalties,
            logit_bias,
            min_tokens,
            logprobs,
            stop_ids: _,
            ignore_eos: _,
        } = self;
        let Penalties { repetition, presence, frequency } = *penalties;
        let used = [
            ("min-p", *min_p != 0.0 && sampling.temperature != 0.0),
            ("repetition-penalty", repetition != 1.0),
            ("presence-penalty", presence != 0.0),
            ("frequency-penalty", frequency != 0.0),
            ("logit-bias", !logit_bias.is_empty()),
            ("min-tokens", *min_tokens > 0),
            ("logprobs", logprobs.is_some()),
        ];
        used.into_iter().filter(|(_, used)| *used).map(|(name, _)| name).collect()
    }

    /// Checks the ranges, for a model with `vocab` ids whose text ends at one of `eos`.
    ///
    /// # Errors
    /// A setting out of its range, an id that the model does not have.
    pub fn resolve(&self, vocab: u32, eos: &[u32]) -> Result<Request, SampleError> {
        let RequestSettings { sampling, min_p, penalties, logit_bias, stop_ids, min_tokens, ignore_eos, logprobs } =
            self;
        if !(0.0..=1.0).contains(min_p) {
            return Err(SampleError::MinP { found: *min_p });
        }
        let Penalties { repetition, presence, frequency } = *penalties;
        if !(repetition > 0.0 && repetition.is_finite()) {
            return Err(SampleError::RepetitionPenalty { found: repetition });
        }
        for (name, found) in [("presence-penalty", presence), ("frequency-penalty", frequency)] {
            if !(-2.0..=2.0).contains(&found) {
                return Err(SampleError::Penalty { name, found });
            }
        }
        if let Some((&id, &found)) = logit_bias.iter().find(|(_, bias)| !(-100.0..=100.0).contains(*bias)) {
            return Err(SampleError::LogitBias { id, found });
        }
        let named = [("logit-bias", logit_bias.keys().max()), ("stop ids", stop_ids.iter().max())];
        if let Some((name, &id)) = named.iter().find_map(|(name, id)| Some((name, id.filter(|id| **id >= vocab)?))) {
            return Err(SampleError::IdBeyondVocab { name, id, vocab });
        }
        Ok(Request {
            sampler: sampling.resolve()?,
            min_p: *min_p,
            penalties: *penalties,
            logit_bias: logit_bias.iter().map(|(&id, &bias)| (id, bias)).collect(),
            eos: eos.iter().copied().collect(),
            stop_ids: stop_ids.iter().copied().collect(),
            min_tokens: *min_tokens,
            ignore_eos: *ignore_eos,
            logprobs: *logprobs,
            beyond_kernels: self.beyond_kernels(),
        })
    }
}

/// Checked settings of one request. Made by [`RequestSettings::resolve`].
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    sampler: Sampler,
    min_p: f32,
    penalties: Penalties,
    logit_bias: Vec<(u32, f32)>,
    eos: BTreeSet<u32>,
    stop_ids: BTreeSet<u32>,
    min_tokens: u32,
    ignore_eos: bool,
    logprobs: Option<u32>,
    beyond_kernels: Vec<&'static str>,
}

/// Changes of a request to the logits of single ids, at one point of its text. An id is at most once in each list.
#[derive(Debug, Clone, PartialEq)]
pub struct Adjustments {
    /// Ids that must not be chosen now.
    pub banned: Vec<u32>,
    /// Number of choices, this one included, for which `banned` holds.
    pub banned_for: u32,
    pub bias: Vec<(u32, f32)>,
    /// Ids to which a penalty applies, with the number of times that each was generated.
    pub seen: Vec<(u32, u32)>,
}

/// A chosen token, with the log-probabilities that were asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct Decided {
    pub token: u32,
    /// Its log-probability in the model's own distribution; `None` if it was not asked for.
    pub logprob: Option<f64>,
    /// The most probable ids of that distribution with their log-probabilities, as many as were asked for.
    pub top: Vec<(u32, f64)>,
}

/// Why a token ends a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// It ends the model's text.
    Eos,
    /// It is a stop id of the request.
    StopId,
}

impl Request {
    /// The part of the request that the kernel of a step applies; all of it if [`Request::beyond_kernels`] is empty.
    pub fn sampler(&self) -> &Sampler {
        &self.sampler
    }

    /// As [`RequestSettings::beyond_kernels`].
    pub fn beyond_kernels(&self) -> &[&'static str] {
        &self.beyond_kernels
    }

    /// As [`RequestSettings::min_p`].
    pub fn min_p(&self) -> f32 {
        self.min_p
    }

    /// As [`RequestSettings::penalties`].
    pub fn penalties(&self) -> Penalties {
        self.penalties
    }

    /// As [`RequestSettings::logprobs`].
    pub fn logprobs(&self) -> Option<u32> {
        self.logprobs
    }

    /// The changes of the steps `mask`, `bias` and of the penalties, after the tokens of `counts`.
    pub fn adjustments(&self, counts: &TokenCounts) -> Adjustments {
        let banned_for = self.min_tokens.saturating_sub(counts.generated());
        let banned: BTreeSet<u32> = self.eos.iter().chain(&self.stop_ids).copied().filter(|_| banned_for > 0).collect();
        // Presence and frequency apply to generated tokens alone.
        let concerns = |count: u32| count > 0 || self.penalties.repetition != 1.0;
        let seen = counts.seen().filter(|&(_, count)| self.penalties != Penalties::OFF && concerns(count));
        Adjustments {
            banned: banned.into_iter().collect(),
            banned_for,
            bias: self.logit_bias.clone(),
            seen: seen.collect(),
        }
    }

    /// Ids that end the request, ascending.
    pub fn end_ids(&self) -> Vec<u32> {
        let eos = self.eos.iter().filter(|_| !self.ignore_eos);
        eos.chain(&self.stop_ids).copied().collect::<BTreeSet<u32>>().into_iter().collect()
    }

    /// Whether `token` ends the request, and why. An id that is both a stop id and an eos id counts as a stop id.
    pub fn end(&self, token: u32) -> Option<End> {
        if self.stop_ids.contains(&token) {
            Some(End::StopId)
        } else if !self.ignore_eos && self.eos.contains(&token) {
            Some(End::Eos)
        } else {
            None
        }
    }

    /// Chooses the token that follows those of `counts` from the model's `logits` `[vocab]`, among the ids of `allowed`. The
    /// caller adds it to the counts. The result depends on the arguments alone.
    ///
    /// # Errors
    /// No logit is a number above -inf, or no allowed id has such a logit.
    pub fn choose(
        &self,
        logits: &[f32],
        counts: &TokenCounts,
        allowed: Option<&TokenSet>,
    ) -> Result<Decided, SampleError> {
        let position = counts.position();
        let adjusted = self.adjusted(logits, counts, allowed);
        let chosen = if self.sampler.is_greedy() {
            argmax(&adjusted)
        } else {
            let mut admitted = self.sampler.admitted(&adjusted);
            self.keep_min_p(&mut admitted);
            self.sampler.draw(&admitted, position)
        };
        let vocab = logits.len();
        let token = chosen.ok_or_else(|| match argmax(logits) {
            Some(_) => SampleError::NoneAllowed { position, vocab },
            None => SampleError::NoCandidate { position, vocab },
        })?;
        let logprobs = self.logprobs.map(|top| Logprobs::of(logits, token, top as usize));
        let (logprob, top) = logprobs.map_or((None, vec![]), |of| (Some(of.token), of.top));
        Ok(Decided { token, logprob, top })
    }

    /// The logits after mask, bias and penalties; the model's own if all of them are off.
    fn adjusted<'a>(&self, logits: &'a [f32], counts: &TokenCounts, allowed: Option<&TokenSet>) -> Cow<'a, [f32]> {
        let mut adjusted = Cow::Borrowed(logits);
        if let Some(allowed) = allowed {
            for (id, logit) in (0..).zip(adjusted.to_mut()) {
                if !allowed.contains(id) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        let mut change = |id: u32, with: &dyn Fn(f32) -> f32| {
            if (id as usize) < logits.len() {
                let logit = &mut adjusted.to_mut()[id as usize];
                *logit = with(*logit);
            }
        };
        if counts.generated() < self.min_tokens {
            self.eos.iter().chain(&self.stop_ids).for_each(|&id| change(id, &|_| f32::NEG_INFINITY));
        }
        self.logit_bias.iter().for_each(|&(id, bias)| change(id, &|logit| logit + bias));
        let Penalties { repetition, presence, frequency } = self.penalties;
        if self.penalties != Penalties::OFF {
            for (id, count) in counts.seen() {
                change(id, &|mut logit| {
                    if repetition != 1.0 {
                        logit = if logit < 0.0 { logit * repetition } else { logit / repetition };
                    }
                    if count > 0 && frequency != 0.0 {
                        logit -= frequency * count as f32;
                    }
                    if count > 0 && presence != 0.0 {
                        logit -= presence;
                    }
                    logit
                });
            }
        }
        adjusted
    }

    /// Keeps the ids that are probable enough compared with the most probable one, which is always kept.
    fn keep_min_p(&self, admitted: &mut Vec<(u32, f32)>) {
        if self.min_p > 0.0 {
            let most = admitted.iter().map(|&(_, score)| score).fold(f32::NEG_INFINITY, f32::max);
            // Equal ones first: inf - inf would be NaN.
            admitted.retain(|&(_, score)| score == most || exp_f32(score - most) >= self.min_p);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EOS: [u32; 1] = [16];
    const VOCAB: u32 = 50;

    fn sampling(temperature: f32, top_k: Option<u32>, top_p: Option<f32>) -> SampleSettings {
        SampleSettings { temperature, top_k, top_p, seed: 0x0123_4567_89AB_CDEF }
    }

    fn plain(temperature: f32) -> RequestSettings {
        RequestSettings::plain(sampling(temperature, None, None))
    }

    /// Multiples of 2^-13 in [-4, 4), so that any language makes the same bits.
    fn logits() -> Vec<f32> {
        (0..VOCAB).map(|i| (i.wrapping_mul(2_654_435_761) >> 16) as f32 / 8192.0 - 4.0).collect()
    }

    /// Tokens after a prompt of four, each chosen from the same logits.
    fn tokens(settings: &RequestSettings, allowed: Option<&TokenSet>) -> Vec<u32> {
        let request = settings.resolve(VOCAB, &EOS).expect("valid settings");
        let mut counts = TokenCounts::new(&[3, 16, 21, 16]);
        let choose = |counts: &mut TokenCounts| {
            let token = request.choose(&logits(), counts, allowed).expect("a token").token;
            counts.push(token);
            token
        };
        (0..24).map(|_| choose(&mut counts)).collect()
    }

    /// Tokens of an independent implementation of the specification in numpy float32.
    #[test]
    fn choices_are_the_specified_tokens() {
        let penalties = |repetition, presence, frequency| Penalties { repetition, presence, frequency };
        let thirds: TokenSet = (0..VOCAB).step_by(3).collect();
        let everything = RequestSettings {
            sampling: sampling(0.8, Some(30), Some(0.95)),
            min_p: 0.05,
            penalties: penalties(1.2, 0.5, -0.3),
            logit_bias: [(7, 6.5), (42, -100.0), (29, 1.25)].into(),
            stop_ids: vec![21],
            min_tokens: 10,
            ..plain(0.0)
        };
        for (settings, allowed, want) in [
            (
                plain(1.0),
                None,
                [43, 42, 11, 29, 21, 37, 17, 11, 21, 3, 8, 21, 24, 3, 27, 8, 22, 21, 11, 42, 42, 27, 35, 40],
            ),
            (
                RequestSettings { min_p: 0.2, ..plain(1.5) },
                None,
                [21, 42, 11, 27, 21, 37, 29, 11, 40, 6, 8, 3, 24, 3, 27, 8, 21, 21, 27, 42, 42, 27, 24, 40],
            ),
            (
                RequestSettings { sampling: sampling(1.5, Some(20), Some(0.9)), min_p: 0.3, ..plain(0.0) },
                None,
                [21, 42, 11, 29, 21, 37, 29, 11, 21, 3, 8, 3, 24, 3, 21, 8, 21, 21, 11, 42, 42, 37, 24, 8],
            ),
            (
                RequestSettings { penalties: penalties(1.3, 0.0, 0.0), ..plain(0.0) },
                None,
                [42, 8, 29, 21, 21, 21, 21, 21, 21, 21, 21, 21, 21, 21, 21, 21, 21, 21, 21, 21, 21, 21, 21, 21],
            ),
            (
                RequestSettings { penalties: penalties(1.0, 0.6, 0.25), ..plain(0.0) },
                None,
                [21, 42, 8, 29, 16, 21, 37, 3, 42, 21, 8, 24, 42, 29, 45, 21, 8, 11, 42, 29, 16, 21, 32, 8],
            ),
            (everything, None, [7, 37, 11, 29, 3, 8, 29, 11, 40, 7, 7, 7, 24, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7]),
            (
                RequestSettings { penalties: penalties(0.7, -1.0, 0.0), ..plain(2.0) },
                Some(&thirds),
                [21, 42, 15, 27, 21, 3, 21, 21, 21, 3, 3, 3, 24, 3, 27, 21, 21, 21, 27, 15, 42, 27, 24, 42],
            ),
        ] {
            assert_eq!(tokens(&settings, allowed), want, "{settings:?}");
        }
    }

    /// tests/fixtures/make_sampling.py says which steps it takes from transformers.
    #[test]
    fn sets_and_logits_are_those_of_transformers() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/sampling.json");
        let text = std::fs::read_to_string(path).expect("the fixture");
        let goldens: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        let cases = goldens["cases"].as_array().expect("cases");
        assert_eq!(cases.len(), 24);
        for (at, case) in cases.iter().enumerate() {
            let float = |key: &'static str| case[key].as_f64().map(|value| value as f32);
            let floats =
                |key: &'static str| case[key].as_array().expect(key).iter().map(|v| v.as_f64().expect(key) as f32);
            let ids =
                |key: &'static str| case[key].as_array().expect(key).iter().map(|v| v.as_u64().expect(key) as u32);
            let penalties = Penalties {
                repetition: float("repetition").expect("a number"),
                presence: float("presence").expect("a number"),
                frequency: float("frequency").expect("a number"),
            };
            let top_k = case["top_k"].as_u64().map(|k| k as u32);
            let settings = RequestSettings {
                min_p: float("min_p").expect("a number"),
                penalties,
                logprobs: Some(3),
                ..RequestSettings::plain(sampling(float("temperature").expect("a number"), top_k, float("top_p")))
            };
            let logits: Vec<f32> = floats("logits").collect();
            let mut counts = TokenCounts::new(&ids("prompt").collect::<Vec<u32>>());
            ids("generated").for_each(|token| counts.push(token));

            let request = settings.resolve(40, &[]).expect("valid settings");
            let adjusted = request.adjusted(&logits, &counts, None);
            assert_eq!(*adjusted, floats("adjusted").collect::<Vec<f32>>(), "case {at}");
            let mut admitted = request.sampler.admitted(&adjusted);
            request.keep_min_p(&mut admitted);
            let admitted: Vec<u32> = admitted.into_iter().map(|(id, _)| id).collect();
            assert_eq!(admitted, ids("admitted").collect::<Vec<u32>>(), "case {at}");

            let greedy = RequestSettings { sampling: SampleSettings::greedy(), ..settings };
            let request = greedy.resolve(40, &[]).expect("valid settings");
            let decided = request.choose(&logits, &counts, None).expect("a token");
            assert_eq!(Some(u64::from(decided.token)), case["greedy"].as_u64(), "case {at}");
            let near = |found: f64, want: &serde_json::Value| {
                assert!((found - want.as_f64().expect("a number")).abs() < 1e-12, "case {at}: {found} and {want}");
            };
            near(decided.logprob.expect("asked for"), &case["logprob"]);
            for (at, (id, logprob)) in decided.top.into_iter().enumerate() {
                assert_eq!(Some(u64::from(id)), case["top"][at][0].as_u64());
                near(logprob, &case["top"][at][1]);
            }
        }
    }

    #[test]
    fn without_its_own_settings_a_request_chooses_what_its_sampler_chooses() {
        for sampling in [sampling(0.0, None, None), sampling(0.9, Some(9), Some(0.8)), sampling(1.3, None, None)] {
            let settings = RequestSettings::plain(sampling);
            assert_eq!(settings.beyond_kernels(), [] as [&str; 0]);
            let sampler = sampling.resolve().expect("valid settings");
            let alone: Vec<u32> = (4..28).map(|at| sampler.choose(&logits(), at).expect("a token")).collect();
            assert_eq!(tokens(&settings, None), alone);
        }
    }

    /// Logits before the step `score`, computed by hand. Every number is exact in fp32.
    #[test]
    fn logits_are_adjusted_as_defined() {
        let raw = [2.0, -2.0, 0.5, 1.0, -0.5, f32::NEG_INFINITY];
        let mut counts = TokenCounts::new(&[0, 1]);
        [1, 2, 2].into_iter().for_each(|token| counts.push(token));
        let adjusted = |settings: &RequestSettings, allowed: Option<&TokenSet>| {
            settings.resolve(6, &[3]).expect("valid settings").adjusted(&raw, &counts, allowed).into_owned()
        };
        let off = plain(0.0);
        let penalties = |repetition, presence, frequency| RequestSettings {
            penalties: Penalties { repetition, presence, frequency },
            ..off.clone()
        };
        let none = f32::NEG_INFINITY;
        assert_eq!(adjusted(&off, None), raw);
        assert_eq!(adjusted(&penalties(2.0, 0.0, 0.0), None), [1.0, -4.0, 0.25, 1.0, -0.5, none], "prompt, too");
        assert_eq!(adjusted(&penalties(1.0, 0.5, 0.0), None), [2.0, -2.5, 0.0, 1.0, -0.5, none], "generated only");
        assert_eq!(adjusted(&penalties(1.0, 0.0, 0.5), None), [2.0, -2.5, -0.5, 1.0, -0.5, none], "each time");
        assert_eq!(adjusted(&penalties(2.0, 0.5, 0.5), None), [1.0, -5.0, -1.25, 1.0, -0.5, none], "in that order");
        // A bias comes before the penalties: -2 becomes 2, and is divided.
        let biased = RequestSettings { logit_bias: [(1, 4.0), (5, 100.0)].into(), ..penalties(2.0, 0.0, 0.0) };
        assert_eq!(adjusted(&biased, None), [1.0, 1.0, 0.25, 1.0, -0.5, none]);
        // Three tokens were generated. Before the fourth, end ids are masked, whether or not they end the request.
        let waits = |min_tokens| RequestSettings { min_tokens, ignore_eos: true, stop_ids: vec![4], ..off.clone() };
        assert_eq!(adjusted(&waits(4), None), [2.0, -2.0, 0.5, none, none, none]);
        assert_eq!(adjusted(&waits(3), None), raw);
        // No bias makes an id possible that is not allowed.
        let forced = RequestSettings { logit_bias: [(3, 100.0)].into(), ..off.clone() };
        let allowed: TokenSet = [0, 2].into_iter().collect();
        assert_eq!(adjusted(&forced, Some(&allowed)), [2.0, none, 0.5, none, none, none]);
    }

    #[test]
    fn a_token_comes_with_its_logarithms_in_the_models_own_distribution() {
        // Probabilities 1/2, 1/4, 1/8, 1/8.
        let raw = [4f32.ln(), 2f32.ln(), 0.0, 0.0];
        let settings = RequestSettings { logit_bias: [(3, 9.0)].into(), logprobs: Some(2), ..plain(0.0) };
        let counts = TokenCounts::new(&[1]);
        let choose = |settings: &RequestSettings| {
            settings.resolve(4, &[]).expect("valid settings").choose(&raw, &counts, None).expect("a token")
        };
        let decided = choose(&settings);
        let near = |found: f64, p: f64| assert!((found - p.ln()).abs() < 1e-6, "{found} and the logarithm of {p}");
        assert_eq!((decided.token, decided.top.len()), (3, 2), "the bias decides");
        near(decided.logprob.expect("asked for"), 0.125);
        near(decided.top[0].1, 0.5);
        near(decided.top[1].1, 0.25);
        assert_eq!((decided.top[0].0, decided.top[1].0), (0, 1));
        assert_eq!(choose(&RequestSettings { logprobs: Some(0), ..settings.clone() }).top, []);
        assert_eq!(choose(&RequestSettings { logprobs: None, ..settings }).logprob, None);
    }

    #[test]
    fn a_request_ends_at_its_stop_ids_and_at_the_end_of_the_text() {
        let settings = RequestSettings { stop_ids: vec![8, 5], ..plain(0.0) };
        let request = settings.resolve(9, &[3, 5]).expect("valid settings");
        assert_eq!(
            [3, 5, 8, 4].map(|id| request.end(id)),
            [Some(End::Eos), Some(End::StopId), Some(End::StopId), None]
        );
        assert_eq!(request.end_ids(), [3, 5, 8]);
        let request = RequestSettings { ignore_eos: true, ..settings }.resolve(9, &[3, 5]).expect("valid settings");
        assert_eq!([3, 5, 8].map(|id| request.end(id)), [None, Some(End::StopId), Some(End::StopId)]);
        assert_eq!(request.end_ids(), [5, 8]);
    }

    #[test]
    fn a_choice_among_nothing_says_whose_fault_it_is() {
        let request = RequestSettings { min_tokens: 2, ..plain(0.7) }.resolve(3, &[1]).expect("valid settings");
        let counts = TokenCounts::new(&[0, 0]);
        let end_alone: TokenSet = [1].into_iter().collect();
        let error = request.choose(&[0.0; 3], &counts, Some(&end_alone)).expect_err("nothing is allowed");
        assert_eq!(error, SampleError::NoneAllowed { position: 2, vocab: 3 });
        let fault = crate::error::Fault::from(error);
        assert_eq!(fault.tier, crate::error::Tier::Input);
        assert!(fault.remedy.is_some_and(|remedy| remedy.contains("min-tokens")));
        let error = request.choose(&[f32::NAN; 3], &counts, None).expect_err("no number");
        assert_eq!(error, SampleError::NoCandidate { position: 2, vocab: 3 });
    }

    #[test]
    fn settings_out_of_range_are_refused_by_name() {
        let off = plain(1.0);
        let penalties = |repetition, presence, frequency| RequestSettings {
            penalties: Penalties { repetition, presence, frequency },
            ..off.clone()
        };
        for (settings, message) in [
            (RequestSettings { min_p: 1.5, ..off.clone() }, "min-p: expected a number from 0 to 1, found `1.5`"),
            (RequestSettings { min_p: f32::NAN, ..off.clone() }, "min-p: expected a number from 0 to 1, found `NaN`"),
            (penalties(0.0, 0.0, 0.0), "repetition-penalty: expected a number above 0, found `0`"),
            (penalties(f32::INFINITY, 0.0, 0.0), "repetition-penalty: expected a number above 0, found `inf`"),
            (penalties(1.0, 2.5, 0.0), "presence-penalty: expected a number from -2 to 2, found `2.5`"),
            (penalties(1.0, 0.0, f32::NAN), "frequency-penalty: expected a number from -2 to 2, found `NaN`"),
            (
                RequestSettings { logit_bias: [(4, 101.0)].into(), ..off.clone() },
                "logit-bias of id 4: expected a number from -100 to 100, found `101`",
            ),
            (
                RequestSettings { logit_bias: [(4, 1.0), (50, 1.0)].into(), ..off.clone() },
                "logit-bias: expected ids below 50 (the model's vocabulary), found 50",
            ),
            (
                RequestSettings { stop_ids: vec![77, 3], ..off.clone() },
                "stop ids: expected ids below 50 (the model's vocabulary), found 77",
            ),
            (plain(-1.0), "temperature: expected 0 (greedy) or a number from 0.001 to 1000, found `-1`"),
        ] {
            let error = settings.resolve(VOCAB, &EOS).expect_err("out of range");
            assert_eq!(error.to_string(), message);
            assert_eq!(crate::error::Fault::from(error).tier, crate::error::Tier::Input);
        }
    }

    #[test]
    fn what_kernels_do_not_have_is_named() {
        let settings = RequestSettings {
            min_p: 0.1,
            penalties: Penalties { repetition: 1.1, presence: 0.1, frequency: 0.1 },
            logit_bias: [(1, 1.0)].into(),
            min_tokens: 1,
            logprobs: Some(0),
            ..plain(1.0)
        };
        let names = [
            "min-p",
            "repetition-penalty",
            "presence-penalty",
            "frequency-penalty",
            "logit-bias",
            "min-tokens",
            "logprobs",
        ];
        assert_eq!(settings.beyond_kernels(), names);
        // The arg-max does not need min-p, and the host looks for the end.
        let greedy = RequestSettings { min_p: 0.1, stop_ids: vec![2], ignore_eos: true, ..plain(0.0) };
        assert_eq!(greedy.beyond_kernels(), [] as [&str; 0]);
    }
}
