//! Owns the errors of a choice: wrong settings, and logits from which no token can be chosen.

use super::{TEMPERATURE_MAX, TEMPERATURE_MIN};
use crate::error::Fault;

/// Settings or logits from which no token can be chosen.
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
    #[error("min-p: expected a number from 0 to 1, found `{found}`")]
    MinP { found: f32 },
    #[error("repetition-penalty: expected a number above 0, found `{found}`")]
    RepetitionPenalty { found: f32 },
    /// `name` is `presence-penalty` or `frequency-penalty`.
    #[error("{name}: expected a number from -2 to 2, found `{found}`")]
    Penalty { name: &'static str, found: f32 },
    #[error("logit-bias of id {id}: expected a number from -100 to 100, found `{found}`")]
    LogitBias { id: u32, found: f32 },
    /// `name` is the setting that names the id.
    #[error("{name}: expected ids below {vocab} (the model's vocabulary), found {id}")]
    IdBeyondVocab { name: &'static str, id: u32, vocab: u32 },
    #[error("logits at position {position}: expected at least one number above -inf among {vocab}")]
    NoCandidate { position: u32, vocab: usize },
    #[error("position {position}: expected at least one token that may come next, found none among {vocab}")]
    NoneAllowed { position: u32, vocab: usize },
}

impl From<SampleError> for Fault {
    fn from(error: SampleError) -> Fault {
        let message = error.to_string();
        match error {
            SampleError::Temperature { .. } => Fault::input(message),
            SampleError::TopK => Fault::input(message).with_remedy("leave top-k out to keep every token"),
            SampleError::TopP { .. } => Fault::input(message).with_remedy("leave top-p out to keep every token"),
            SampleError::MinP { .. } => Fault::input(message).with_remedy("leave min-p out to keep every token"),
            SampleError::RepetitionPenalty { .. } => Fault::input(message)
                .with_remedy("1 changes nothing; 1.1 makes tokens that the text already has less probable"),
            SampleError::Penalty { .. } => Fault::input(message)
                .with_remedy("0 changes nothing; 0.5 makes tokens that were generated before less probable"),
            SampleError::LogitBias { .. } => {
                Fault::input(message).with_remedy("-100 bans a token in practice, 100 forces it")
            }
            SampleError::IdBeyondVocab { .. } => {
                Fault::input(message).with_remedy("leave the id out; the model cannot generate it")
            }
            SampleError::NoCandidate { .. } => Fault::internal(message)
                .with_remedy("the model produced only NaN or -inf; compare with the reference on the same prompt"),
            SampleError::NoneAllowed { .. } => Fault::input(message).with_remedy(
                "the allowed ids and `min-tokens` exclude each other: allow more ids, or lower `min-tokens`",
            ),
        }
    }
}
