//! Owns speculative decoding: proposals of tokens, and which of them a step verifies.
//!
//! A step that verifies decodes the last token and k proposed ones at consecutive positions. After each of these positions the
//! request chooses a token, as it does without proposals. The choices count up to and including the first that differs from the
//! proposed token: later rows followed a token that the text does not have.
//!
//! The choice after a position is a function of its logits, of the seed and of the position ([`crate::sample`]). So it does not
//! depend on what was proposed: the same logits give the same text with proposals and without them, greedy or sampled. There is no
//! test of acceptance by chance as in Leviathan et al. 2023 (arXiv:2211.17192), and none is needed. A proposal from the text itself is
//! a distribution with one token `t`. Their rule accepts it with probability p(t); here the request chooses `t` with probability p(t),
//! and any other token with its own probability. Both rules therefore have the distribution of the model and accept equally
//! often, and this one also has the same tokens.
//!
//! Without a proposal, a step is an ordinary one. The row of a token that was not accepted stays in the cache until the next launch writes
//! its position. So in a text with proposals one guard ([`crate::rows::Guard`]) judges the launches of all kernels that write its cache.

use std::collections::HashMap;

/// Where a launch on a device left what its last layer made of rows, before the final norm. The next launch of its kernel overwrites it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Left {
    /// Device address of row 0, in words.
    pub address: u64,
    /// Rows from this one on.
    pub first: u32,
    pub count: u32,
    /// Values of a row.
    pub cols: u32,
    pub value_bytes: usize,
}

/// Proposes the tokens that may come next: a lookup in the text, or a draft model.
pub trait Draft {
    /// At most `most` tokens that may follow `sequence`, which is the prompt and all chosen tokens; none if there is no good guess.
    /// From call to call the sequence of a text only grows. A wrong guess costs time and changes no token.
    fn propose(&mut self, sequence: &[u32], most: usize) -> Vec<u32>;

    /// Whether it proposes by what the model leaves of the tokens before, which it is then shown.
    fn sees(&self) -> bool {
        false
    }

    /// Shows what the last layer of the model left of the tokens from position `first` on, a row for each: all are tokens of the text. A position
    /// that was computed again is shown again.
    fn see(&mut self, first: usize, rows: Vec<Vec<f32>>) {
        let _ = (first, rows);
    }

    /// As [`Draft::see`], of rows that are still where a kernel left them. The next call proposes, before that kernel is launched again. False: the
    /// draft does not read them there, and they have to be shown.
    fn see_in_place(&mut self, first: usize, left: Left) -> bool {
        let _ = (first, left);
        false
    }
}

/// Shortest n-gram that is looked up. One token alone recurs nearly everywhere in a text, and rarely with the same continuation.
const NGRAM_MIN: usize = 2;
/// Longest n-gram that is compared; longer matches count as equal.
const NGRAM_MAX: usize = 16;
/// Most earlier occurrences that are compared, the latest first. Bounds the time of a lookup in a text that repeats one pair of tokens.
const OCCURRENCES_MAX: usize = 64;
/// No earlier occurrence.
const NONE: u32 = u32::MAX;

/// Finds the last tokens of a text earlier in the same text, and proposes what followed them there (prompt lookup decoding).
#[derive(Debug, Default)]
pub struct NgramLookup {
    /// For each pair of tokens, the last position of its second token.
    last: HashMap<[u32; NGRAM_MIN], u32>,
    /// For each token of the text except the last, the previous position of the pair that ends with it; [`NONE`]: nowhere.
    before: Vec<u32>,
}

impl NgramLookup {
    pub fn new() -> NgramLookup {
        NgramLookup::default()
    }

    /// Adds the pairs that end before the last token.
    fn index(&mut self, sequence: &[u32]) {
        if self.before.len() >= sequence.len() {
            *self = NgramLookup::new();
        }
        for at in self.before.len()..sequence.len() - 1 {
            let pair = at.checked_sub(1).map(|first| [sequence[first], sequence[at]]);
            let before = pair.and_then(|pair| self.last.insert(pair, at as u32));
            self.before.push(before.unwrap_or(NONE));
        }
    }

    /// End of the longest earlier n-gram that equals the end of the sequence; of equal lengths the latest.
    fn longest(&self, sequence: &[u32]) -> Option<usize> {
        let (mut best, mut length_best) = (None, NGRAM_MIN - 1);
        let mut at = self.last.get(sequence.last_chunk()?).copied().unwrap_or(NONE);
        for _ in 0..OCCURRENCES_MAX {
            let Some(occurrence) = sequence.get(..=at as usize) else { break };
            let pairs = occurrence.iter().rev().zip(sequence.iter().rev()).take(NGRAM_MAX);
            let length = pairs.take_while(|(a, b)| a == b).count();
            if length > length_best {
                (best, length_best) = (Some(at as usize), length);
            }
            at = self.before[at as usize];
        }
        best
    }
}

impl Draft for NgramLookup {
    fn propose(&mut self, sequence: &[u32], most: usize) -> Vec<u32> {
        if sequence.len() < NGRAM_MIN {
            return vec![];
        }
        self.index(sequence);
        let Some(end) = self.longest(sequence) else { return vec![] };
        let mut text = sequence[end + 1..].to_vec();
        // If the match ends less than `most` tokens before the end of the text, the text has a period, which is continued.
        let period = text.len();
        (period..most).for_each(|at| text.push(text[at - period]));
        text.truncate(most);
        text
    }
}

/// Number of tokens that steps verified, and of those that were accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Speculated {
    pub proposed: usize,
    pub accepted: usize,
    /// Steps that verified them.
    pub steps: usize,
}

impl Speculated {
    /// Tokens that a step decided which verified proposals: those that were accepted, and one more. `None`: there was no such step.
    pub fn tokens_per_step(&self) -> Option<f64> {
        (self.steps > 0).then(|| (self.accepted + self.steps) as f64 / self.steps as f64)
    }
}

/// The tokens that may come next in a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Proposal {
    pub tokens: Vec<u32>,
    /// Whether the next step verifies them. Otherwise it is an ordinary step.
    pub is_tried: bool,
}

/// Failures in a row after which the pause does not grow: 30 tokens.
const MISSES_MAX: u32 = 5;
/// Ordinary launches in a row after which a launch does not grow: 8 steps. The wait for a launch may end 0.1 ms late, which is 0.4 %
/// of 8 steps of Llama-3.1-8B on an H200. Text that begins to repeat itself is noticed after at most 8 tokens.
const LAUNCHES_GROWING: u32 = 3;

/// Decides which proposals are tried in one text, and counts them.
///
/// A step that verifies takes longer than an ordinary one, so proposals pause after failures. The second failure in a row gives a
/// pause of 2 tokens, the next ones 6, 14 and 30. During a pause each proposal is still compared with the tokens of ordinary
/// steps, which costs nothing; the first one that is right ends the pause.
pub struct Speculation<'a> {
    draft: &'a mut dyn Draft,
    /// Most tokens of a proposal.
    most: usize,
    counts: Speculated,
    /// Failures since a token was last accepted.
    misses: u32,
    /// Remaining tokens of the pause.
    pause: usize,
    /// Ordinary launches since a proposal was last right.
    launches: u32,
}

impl Speculation<'_> {
    /// Speculation with proposals of `draft`, at most `most` tokens at a time.
    pub fn new(draft: &mut dyn Draft, most: usize) -> Speculation<'_> {
        Speculation { draft, most, counts: Speculated::default(), misses: 0, pause: 0, launches: 0 }
    }

    /// Most tokens of a proposal.
    pub fn most(&self) -> usize {
        self.most
    }

    pub fn counts(&self) -> Speculated {
        self.counts
    }

    /// As [`Draft::sees`].
    pub fn sees(&self) -> bool {
        self.draft.sees()
    }

    /// As [`Draft::see`].
    pub fn see(&mut self, first: usize, rows: Vec<Vec<f32>>) {
        self.draft.see(first, rows);
    }

    /// As [`Draft::see_in_place`].
    pub fn see_in_place(&mut self, first: usize, left: Left) -> bool {
        self.draft.see_in_place(first, left)
    }

    /// Whether [`Speculation::propose`] asks the draft for tokens.
    pub fn asks(&self, room: usize) -> bool {
        self.most.min(room) > 0
    }

    /// Proposes at most `room` tokens that may follow `sequence`.
    pub fn propose(&mut self, sequence: &[u32], room: usize) -> Proposal {
        // What is only compared costs a draft model a step for each token, and one tells whether the pause ends.
        let most = self.most.min(room).min(if self.pause > 0 && self.sees() { 1 } else { usize::MAX });
        let mut tokens = if most > 0 { self.draft.propose(sequence, most) } else { vec![] };
        tokens.truncate(most);
        Proposal { is_tried: !tokens.is_empty() && self.pause == 0, tokens }
    }

    /// Steps of the next launch if it is an ordinary one: few while proposals are right, because the next proposal has to wait for its
    /// end.
    pub fn steps(&self) -> u32 {
        1 << self.launches.min(LAUNCHES_GROWING)
    }

    /// Takes the tokens that a launch chose after `proposal` was made.
    pub fn learn(&mut self, proposal: &Proposal, chosen: &[u32]) {
        let right = proposal.tokens.iter().zip(chosen).take_while(|(a, b)| a == b).count();
        self.launches = if right > 0 { 0 } else { self.launches.saturating_add(1) };
        if !proposal.is_tried {
            self.pause = if right > 0 { 0 } else { self.pause.saturating_sub(chosen.len()) };
            return;
        }
        self.counts.steps += 1;
        self.counts.proposed += proposal.tokens.len();
        self.counts.accepted += right;
        if right > 0 {
            self.misses = 0;
        } else {
            self.misses = (self.misses + 1).min(MISSES_MAX);
            self.pause = (1 << self.misses) - 2;
        }
    }
}

/// Where the next step of a text begins.
#[derive(Debug)]
pub struct Begun {
    at: usize,
    has_state: bool,
    /// The position of the snapshot.
    kept: Option<usize>,
}

impl Begun {
    /// At `at`, the position of the last token of the text.
    pub fn new(at: usize, has_state: bool) -> Begun {
        Begun { at, has_state, kept: None }
    }

    /// The position of its first row: that of the last token, or an earlier one to which the recurrent state went back.
    pub fn at(&self) -> usize {
        self.at
    }

    /// Whether the state is to be kept before a step that verifies `tried`. After it went back, it is there already.
    pub fn wants_snapshot(&mut self, tried: &[u32]) -> bool {
        self.has_state && !tried.is_empty() && self.kept.replace(self.at) != Some(self.at)
    }

    /// Notes that a step which verified `tried` tokens chose `chosen`, after which the text has `length`. Whether the state has to go back: it has
    /// seen tokens that were not chosen.
    pub fn ends(&mut self, length: usize, chosen: usize, tried: usize) -> bool {
        let goes_back = self.has_state && chosen <= tried;
        if !goes_back {
            self.at = length - 1;
        }
        goes_back
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::{Request, RequestSettings, SampleSettings, TokenCounts};

    fn proposed(sequence: &[u32], most: usize) -> Vec<u32> {
        NgramLookup::new().propose(sequence, most)
    }

    #[test]
    fn what_followed_the_longest_match_is_proposed() {
        assert_eq!(proposed(&[1, 2, 3, 4, 5, 1, 2], 2), [3, 4]);
        // The longer match is the earlier one.
        assert_eq!(proposed(&[9, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2], 1), [3]);
        // The latest of equally long matches.
        assert_eq!(proposed(&[8, 1, 2, 3, 7, 1, 2, 4, 9, 1, 2], 1), [4]);
        // A single token is no match.
        for none in [&[][..], &[1], &[1, 2], &[1, 2, 3, 1], &[1, 2, 3, 4]] {
            assert!(proposed(none, 4).is_empty(), "{none:?}");
        }
    }

    #[test]
    fn a_text_that_repeats_goes_on_with_its_period() {
        assert_eq!(proposed(&[7, 7, 7], 4), [7; 4]);
        assert_eq!(proposed(&[1, 2, 1, 2, 1], 5), [2, 1, 2, 1, 2]);
        assert_eq!(proposed(&[1, 2, 3, 1, 2, 3], 7), [1, 2, 3, 1, 2, 3, 1]);
    }

    /// The index grows with the text, and gives the same proposals as a new one.
    #[test]
    fn a_text_that_grows_is_indexed_once() {
        let text: Vec<u32> = (0..600u32).map(|i| i.wrapping_mul(2_654_435_761) >> 29).collect();
        let mut lookup = NgramLookup::new();
        let mut found = 0;
        for end in 0..text.len() {
            let tokens = lookup.propose(&text[..end], 4);
            assert_eq!(tokens, proposed(&text[..end], 4), "{end}");
            found += usize::from(!tokens.is_empty());
        }
        assert!(found > 400, "{found}");
        // A text that became shorter counts as a new one.
        assert_eq!(lookup.propose(&[1, 2, 3, 1, 2], 1), [3]);
        let repeated = vec![5; 10_000];
        assert_eq!(lookup.propose(&repeated, 3), [5; 3]);
    }

    /// Always proposes the same tokens.
    struct Always(Vec<u32>);

    impl Draft for Always {
        fn propose(&mut self, _: &[u32], _: usize) -> Vec<u32> {
            self.0.clone()
        }
    }

    #[test]
    fn a_proposal_has_no_more_tokens_than_there_is_room_for() {
        let mut draft = Always(vec![1; 9]);
        let mut speculation = Speculation::new(&mut draft, 4);
        assert_eq!(speculation.propose(&[1], 9).tokens.len(), 4);
        assert_eq!(speculation.propose(&[1], 2).tokens.len(), 2);
        assert_eq!(speculation.propose(&[1], 0), Proposal { tokens: vec![], is_tried: false });
    }

    #[test]
    fn proposals_pause_while_they_fail_and_return_when_one_is_right() {
        let mut draft = Always(vec![1, 2]);
        let mut speculation = Speculation::new(&mut draft, 2);
        let mut tried = 0;
        for _ in 0..1000 {
            let proposal = speculation.propose(&[0], 2);
            tried += u32::from(proposal.is_tried);
            speculation.learn(&proposal, &[3]);
        }
        // One step in 31, and a few more in the beginning.
        assert!((30..40).contains(&tried), "{tried}");
        assert_eq!(
            (speculation.counts(), speculation.steps()),
            (Speculated { proposed: 2 * tried as usize, accepted: 0, steps: tried as usize }, 8)
        );
        let mut proposal = speculation.propose(&[0], 2);
        while proposal.is_tried {
            speculation.learn(&proposal, &[3]);
            proposal = speculation.propose(&[0], 2);
        }
        speculation.learn(&proposal, &[1]);
        assert_eq!(speculation.steps(), 1);
        let proposal = speculation.propose(&[0], 2);
        assert!(proposal.is_tried);
        let before = speculation.counts();
        speculation.learn(&proposal, &[1, 3]);
        let after =
            Speculated { proposed: before.proposed + 2, accepted: before.accepted + 1, steps: before.steps + 1 };
        assert_eq!(speculation.counts(), after);
    }

    /// Proposes as many tokens as it is asked for, all wrong, and counts them.
    struct Wrong(usize);

    impl Draft for Wrong {
        fn propose(&mut self, _: &[u32], most: usize) -> Vec<u32> {
            self.0 += most;
            vec![1; most]
        }

        fn sees(&self) -> bool {
            true
        }
    }

    #[test]
    fn a_draft_model_makes_one_token_while_proposals_pause() {
        let mut draft = Wrong(0);
        let mut speculation = Speculation::new(&mut draft, 4);
        let mut tried = 0;
        for _ in 0..100 {
            let proposal = speculation.propose(&[0], 9);
            assert_eq!(proposal.tokens.len(), if proposal.is_tried { 4 } else { 1 });
            tried += usize::from(proposal.is_tried);
            speculation.learn(&proposal, &[3]);
        }
        assert_eq!(draft.0, 100 + 3 * tried);
    }

    const VOCAB: u32 = 8;

    /// A model whose logits depend on the last two tokens, and which repeats itself often.
    fn logits(sequence: &[u32]) -> Vec<f32> {
        let [a, b] = *sequence.last_chunk().expect("two tokens");
        let logit = |id: u32| (a * 31 + b * 7 + id).wrapping_mul(2_654_435_761) >> 24;
        (0..VOCAB).map(|id| logit(id) as f32 / 64.0).collect()
    }

    const PROMPT: [u32; 4] = [1, 2, 1, 2];

    fn request(seed: u64) -> Request {
        let sampling = SampleSettings { temperature: 0.8, seed, ..SampleSettings::greedy() };
        RequestSettings::plain(sampling).resolve(VOCAB, &[]).expect("valid settings")
    }

    /// Tokens after the prompt, with proposals of at most `most` tokens.
    fn decode(seed: u64, count: usize, most: usize) -> (Vec<u32>, Speculated) {
        let (request, mut counts) = (request(seed), TokenCounts::new(&PROMPT));
        let mut sequence = PROMPT.to_vec();
        let mut lookup = NgramLookup::new();
        let mut speculation = Speculation::new(&mut lookup, most);
        while sequence.len() < PROMPT.len() + count {
            let proposal = speculation.propose(&sequence, PROMPT.len() + count - sequence.len() - 1);
            let mut rows = sequence.clone();
            rows.extend(proposal.tokens.iter().filter(|_| proposal.is_tried));
            let mut chosen = vec![];
            for end in sequence.len()..=rows.len() {
                let token = request.choose(&logits(&rows[..end]), &counts, None).expect("a token").token;
                counts.push(token);
                chosen.push(token);
                if rows.get(end) != Some(&token) {
                    break;
                }
            }
            speculation.learn(&proposal, &chosen);
            sequence.extend(chosen);
        }
        (sequence.split_off(PROMPT.len()), speculation.counts())
    }

    #[test]
    fn sampled_tokens_are_those_without_proposals() {
        let mut counts = Speculated::default();
        for seed in 0..200 {
            let (tokens, told) = decode(seed, 40, 4);
            assert_eq!(tokens, decode(seed, 40, 0).0, "seed {seed}");
            counts.proposed += told.proposed;
            counts.accepted += told.accepted;
        }
        assert!(counts.accepted > 300 && counts.proposed > counts.accepted, "{counts:?}");
    }

    /// The second token after the prompt, over many seeds, against its probability under the model; the first is often accepted.
    #[test]
    fn sampled_tokens_have_the_distribution_of_the_model() {
        let probabilities = |sequence: &[u32]| {
            let weights: Vec<f64> = logits(sequence).iter().map(|&logit| (f64::from(logit) / 0.8).exp()).collect();
            let total: f64 = weights.iter().sum();
            weights.into_iter().map(move |weight| weight / total).collect::<Vec<f64>>()
        };
        let mut expected = [0.0; VOCAB as usize];
        for (first, of_first) in (0..).zip(probabilities(&PROMPT)) {
            let sequence = [&PROMPT[..], &[first]].concat();
            for (sum, of_second) in expected.iter_mut().zip(probabilities(&sequence)) {
                *sum += of_first * of_second;
            }
        }
        const TEXTS: u64 = 20_000;
        let (mut found, mut accepted) = ([0u32; VOCAB as usize], 0);
        for seed in 0..TEXTS {
            let (tokens, told) = decode(seed, 3, 4);
            found[tokens[1] as usize] += 1;
            accepted += told.accepted;
        }
        assert!(accepted > TEXTS as usize / 100, "{accepted}");
        let difference = |(found, p): (&u32, f64)| (f64::from(*found) - TEXTS as f64 * p).powi(2) / (TEXTS as f64 * p);
        let chi_square: f64 = found.iter().zip(expected).map(difference).sum();
        // Seven degrees of freedom: 24.3 is exceeded once in a thousand times.
        assert!(chi_square < 24.3, "{chi_square}: {found:?}, {expected:?}");
    }
}
