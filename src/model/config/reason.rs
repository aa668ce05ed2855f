//! Owns the reasons for which an import is refused; a refusal carries every one that was found.

use crate::model::weights::WeightsError;
use crate::text::printable_line;

/// One thing the importer would have to ignore, guess or get wrong, and therefore does not accept.
#[derive(Debug, thiserror::Error)]
pub enum Reason {
    #[error("`{class}` {why}")]
    Architecture { class: String, why: &'static str },
    #[error("key `{key}` is unknown for `{class}`{}", hint(nearest))]
    UnknownKey { key: String, class: &'static str, nearest: Option<&'static str> },
    #[error("key `{key}`: expected {allowed}, found {found} ({why})")]
    NotNeutral { key: String, allowed: String, found: String, why: &'static str },
    #[error("key `{key}` is listed as modelled and was not read: a fault of monobloc")]
    Unread { key: String },
    #[error("key `{key}`: expected {expected}, found {found}")]
    BadValue { key: String, expected: String, found: String },
    #[error("key `{key}` of `{file}` has {found} ids, expected at most {most}")]
    TooManyIds { key: &'static str, file: &'static str, found: usize, most: usize },
    #[error("key `{key}` is missing")]
    MissingKey { key: String },
    #[error("keys `{first}` and `{second}` disagree: {detail}")]
    Conflict { first: String, second: String, detail: String },
    #[error("tensor `{name}` {shape:?} is missing")]
    MissingTensor { name: String, shape: Vec<u32> },
    #[error("tensor `{name}` {shape:?} is not used by `{class}`")]
    UnknownTensor { name: String, shape: Vec<usize>, class: &'static str },
    #[error("tensor `{name}` is a bias that `{class}` does not have, and is not zero")]
    ExtraBias { name: String, class: &'static str },
    #[error("tensor `{name}`: expected shape {expected:?}, found {found:?}")]
    TensorShape { name: String, expected: Vec<u32>, found: Vec<usize> },
    #[error("tensor `{name}`: expected fp32, bf16 or fp16, found {found}")]
    TensorDType { name: String, found: String },
    #[error("tensor `{name}`: expected {expected}, found {found}")]
    PartDType { name: String, expected: String, found: String },
    #[error("`quantization_config`: {detail}")]
    Quantised { detail: String },
    #[error(
        "tensor `{name}` differs from `{embed}` while `tie_word_embeddings` is true: transformers 4 would use \
         `{embed}`, transformers 5 `{name}`"
    )]
    TiedHeadDiffers { name: String, embed: String },
    #[error(transparent)]
    Weights(#[from] WeightsError),
}

/// Characters of a reason that are shown. Names and values are a stranger's, and a config has room for 16 MiB of them.
const SHOWN_CHARS_MAX: usize = 400;

impl Reason {
    /// The reason, if its keys are those of the object `place`.
    pub fn within(mut self, place: &str) -> Reason {
        let keys: [Option<&mut String>; 2] = match &mut self {
            Reason::UnknownKey { key, .. }
            | Reason::NotNeutral { key, .. }
            | Reason::Unread { key }
            | Reason::BadValue { key, .. }
            | Reason::MissingKey { key } => [Some(key), None],
            Reason::Conflict { first, second, .. } => [Some(first), Some(second)],
            _ => [None, None],
        };
        keys.into_iter().flatten().for_each(|key| key.insert_str(0, &format!("{place}.")));
        self
    }

    /// Whether a file is not what its publisher has, so that another copy may be read.
    pub fn is_incomplete(&self) -> bool {
        matches!(self, Reason::Weights(WeightsError::GgufFile(fault)) if fault.is_incomplete())
    }

    /// The reason on a line of bounded length.
    pub fn shown(&self) -> String {
        let text = printable_line(&self.to_string()).into_owned();
        match text.char_indices().nth(SHOWN_CHARS_MAX) {
            None => text,
            Some((end, _)) => format!("{}... ({} characters in all)", &text[..end], text.chars().count()),
        }
    }
}

fn hint(nearest: &Option<&'static str>) -> String {
    nearest.map(|key| format!("; did you mean `{key}`?")).unwrap_or_default()
}
