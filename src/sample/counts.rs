//! Owns the counts of earlier tokens that a choice needs, and sets of ids that may come next.

use std::collections::HashMap;

/// The tokens of one sequence so far, as penalties and noise need them.
///
/// Plain data. A server that removes a request from the device and computes it again later keeps the counts, or counts again
/// from the prompt and the generated tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenCounts {
    /// Ids that occur, with the number of times that each was generated.
    seen: HashMap<u32, u32>,
    prompt: u32,
    generated: u32,
}

impl TokenCounts {
    /// The state before the first token that follows `prompt`.
    pub fn new(prompt: &[u32]) -> TokenCounts {
        let seen = prompt.iter().map(|&id| (id, 0)).collect();
        TokenCounts { seen, prompt: prompt.len() as u32, generated: 0 }
    }

    /// Counts a token that was generated.
    pub fn push(&mut self, token: u32) {
        *self.seen.entry(token).or_default() += 1;
        self.generated += 1;
    }

    /// Number of generated tokens.
    pub fn generated(&self) -> u32 {
        self.generated
    }

    /// Index of the next token in its sequence: the tokens of the prompt and those that were generated.
    pub fn position(&self) -> u32 {
        self.prompt + self.generated
    }

    /// Every id of the sequence, in no order, with the number of times that it was generated.
    pub(super) fn seen(&self) -> impl Iterator<Item = (u32, u32)> {
        self.seen.iter().map(|(&id, &count)| (id, count))
    }
}

/// A set of token ids, one bit each: those that may come next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenSet(Vec<u32>);

impl TokenSet {
    /// Id `32 * i + b` is in the set if bit `b` of word `i` is 1. Ids beyond the words are not.
    pub fn from_words(words: Vec<u32>) -> TokenSet {
        TokenSet(words)
    }

    /// The words of the set, as in [`TokenSet::from_words`].
    pub fn words(&self) -> &[u32] {
        &self.0
    }

    pub fn contains(&self, id: u32) -> bool {
        self.0.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1)
    }
}

impl FromIterator<u32> for TokenSet {
    /// As large as the largest id needs: 2^29 bytes at most.
    fn from_iter<I: IntoIterator<Item = u32>>(ids: I) -> TokenSet {
        let mut words = vec![];
        for id in ids {
            let at = id as usize / 32;
            if at >= words.len() {
                words.resize(at + 1, 0);
            }
            words[at] |= 1 << (id % 32);
        }
        TokenSet(words)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompt_and_generated_tokens_are_counted_apart() {
        let mut counts = TokenCounts::new(&[7, 7, 3]);
        assert_eq!((counts.generated(), counts.position()), (0, 3));
        [7, 9, 9].into_iter().for_each(|token| counts.push(token));
        assert_eq!((counts.generated(), counts.position()), (3, 6));
        let mut seen: Vec<(u32, u32)> = counts.seen().collect();
        seen.sort();
        assert_eq!(seen, [(3, 0), (7, 1), (9, 2)]);
    }

    #[test]
    fn a_set_has_the_ids_of_its_bits() {
        let set: TokenSet = [0, 31, 32, 70].into_iter().collect();
        let found: Vec<u32> = (0..200).filter(|&id| set.contains(id)).collect();
        assert_eq!(found, [0, 31, 32, 70]);
        assert_eq!(set, TokenSet::from_words(vec![1 << 31 | 1, 1, 1 << 6]));
        assert!(!set.contains(u32::MAX));
    }
}
