//! Owns the schema of every family: which `config.json` keys are modelled, which are neutral and under what condition.
//!
//! A key that is in neither set is unknown, and an unknown key refuses the import: it may change the arithmetic.

use std::fmt::{self, Write};

use serde_json::{Map, Value, json};

use crate::model::config::families::{FAMILIES, Family};
use crate::model::config::reason::Reason;
use crate::model::config::wrapper::{WRAPPER_KEYS, WRAPPERS, Wrapper};

/// What the importer does with one key.
#[derive(Debug, Clone, Copy)]
pub enum Rule {
    /// Read; says what it becomes.
    Modelled(&'static str),
    /// Without effect on the logits while the condition holds; says why. Null always counts as absent.
    Neutral(When, &'static str),
}

/// Values at which a neutral key is neutral.
#[derive(Debug, Clone, Copy)]
pub enum When {
    Any,
    Only(&'static [Literal]),
    /// Equal to the value of another key, where that one is given.
    SameAs(&'static str),
    /// Any value while another key is given.
    Given(&'static str),
}

#[derive(Debug, Clone, Copy)]
pub enum Literal {
    Bool(bool),
    Number(f64),
    Text(&'static str),
    /// `[]` or `{}`
    Empty,
}

pub struct Entry {
    pub key: &'static str,
    pub rule: Rule,
}

pub const fn modelled(key: &'static str, becomes: &'static str) -> Entry {
    Entry { key, rule: Rule::Modelled(becomes) }
}

pub const fn neutral(key: &'static str, when: When, why: &'static str) -> Entry {
    Entry { key, rule: Rule::Neutral(when, why) }
}

pub const OFF: When = When::Only(&[Literal::Bool(false)]);
pub const ON: When = When::Only(&[Literal::Bool(true)]);
const ZERO: When = When::Only(&[Literal::Number(0.0)]);
const EMPTY: When = When::Only(&[Literal::Empty]);

pub const RECORD: &str = "record of how the checkpoint was made";
const PYTHON: &str = "names Python code; the class in `architectures` decides";
const TRAINING: &str = "used in training only";
const GENERATION: &str = "generation advice; the caller chooses";
const OTHER_HEAD: &str = "speaks about heads other than the language model";
const OUTPUTS: &str = "selects what Python code returns";

/// Keys that `PreTrainedConfig` may write for any family.
pub const COMMON: &[Entry] = &[
    modelled("architectures", "selects the family"),
    modelled("model_type", "selects the family; must agree with `architectures`"),
    modelled("vocab_size", "rows of the embedding and the head"),
    modelled("hidden_size", "width of the residual stream"),
    modelled("num_hidden_layers", "number of layers"),
    modelled("num_attention_heads", "query heads"),
    modelled("max_position_embeddings", "largest context"),
    modelled("tie_word_embeddings", "whether the head is the embedding"),
    modelled("bos_token_id", "first token of a text"),
    modelled("eos_token_id", "tokens that end generation; generation_config.json wins"),
    neutral("pad_token_id", When::Any, "sequences are not padded"),
    neutral("sep_token_id", When::Any, "not used by a decoder"),
    neutral("unk_token_id", When::Any, "the tokenizer decides what an unknown text becomes"),
    neutral("decoder_start_token_id", When::Any, "not used by a decoder"),
    neutral("torch_dtype", When::Any, "the tensor headers say the type"),
    neutral("dtype", When::Any, "the tensor headers say the type"),
    neutral("transformers_version", When::Any, RECORD),
    neutral("_name_or_path", When::Any, RECORD),
    neutral("_model_name_or_path", When::Any, RECORD),
    neutral("_commit_hash", When::Any, RECORD),
    neutral("auto_map", When::Any, PYTHON),
    neutral("custom_pipelines", When::Any, PYTHON),
    neutral("custom_pipeline", When::Any, PYTHON),
    neutral("tokenizer_class", When::Any, "speaks about the tokenizer"),
    neutral("transformers.js_config", When::Any, "speaks about another runtime"),
    neutral("unsloth_version", When::Any, RECORD),
    neutral("unsloth_fixed", When::Any, RECORD),
    neutral("use_cache", When::Any, "the cache is always used; it changes no value"),
    neutral("cache_implementation", When::Any, "storage of the cache; it changes no value"),
    neutral("_attn_implementation", When::Any, "which Python kernel; same formula"),
    neutral("_attn_implementation_autoset", When::Any, "which Python kernel; same formula"),
    neutral("attn_implementation", When::Any, "which Python kernel; same formula"),
    neutral("_flash_attn_2_enabled", When::Any, "which Python kernel; same formula"),
    neutral("initializer_range", When::Any, TRAINING),
    neutral("attention_dropout", When::Any, TRAINING),
    neutral("hidden_dropout", When::Any, TRAINING),
    neutral("attention_probs_dropout_prob", When::Any, TRAINING),
    neutral("hidden_dropout_prob", When::Any, TRAINING),
    neutral("classifier_dropout", When::Any, TRAINING),
    neutral("gradient_checkpointing", When::Any, TRAINING),
    neutral("is_decoder", When::Any, "every family here is a decoder"),
    neutral("type_vocab_size", When::Any, "no family here has token types"),
    neutral("is_encoder_decoder", OFF, "encoder-decoders are not supported"),
    neutral("add_cross_attention", OFF, "cross attention is not supported"),
    neutral("cross_attention_hidden_size", When::Only(&[]), "cross attention is not supported"),
    neutral("tie_encoder_decoder", OFF, "encoder-decoders are not supported"),
    neutral("chunk_size_feed_forward", ZERO, "chunked feed-forward is not supported"),
    neutral("pruned_heads", EMPTY, "pruned heads are not supported"),
    neutral("quantization_config", When::Only(&[]), "read with the tensors of a checkpoint (docs/formats.md)"),
    neutral("use_bfloat16", When::Any, "speaks about another runtime"),
    neutral("torchscript", When::Any, "speaks about another runtime"),
    neutral("tf_legacy_loss", When::Any, TRAINING),
    neutral("id2label", When::Any, OTHER_HEAD),
    neutral("label2id", When::Any, OTHER_HEAD),
    neutral("num_labels", When::Any, OTHER_HEAD),
    neutral("problem_type", When::Any, OTHER_HEAD),
    neutral("finetuning_task", When::Any, OTHER_HEAD),
    neutral("task_specific_params", When::Any, OTHER_HEAD),
    neutral("output_attentions", When::Any, OUTPUTS),
    neutral("output_hidden_states", When::Any, OUTPUTS),
    neutral("output_scores", When::Any, OUTPUTS),
    neutral("return_dict", When::Any, OUTPUTS),
    neutral("return_dict_in_generate", When::Any, OUTPUTS),
    neutral("prefix", When::Any, GENERATION),
    neutral("max_length", When::Any, GENERATION),
    neutral("min_length", When::Any, GENERATION),
    neutral("do_sample", When::Any, GENERATION),
    neutral("early_stopping", When::Any, GENERATION),
    neutral("num_beams", When::Any, GENERATION),
    neutral("num_beam_groups", When::Any, GENERATION),
    neutral("diversity_penalty", When::Any, GENERATION),
    neutral("temperature", When::Any, GENERATION),
    neutral("top_k", When::Any, GENERATION),
    neutral("top_p", When::Any, GENERATION),
    neutral("typical_p", When::Any, GENERATION),
    neutral("repetition_penalty", When::Any, GENERATION),
    neutral("length_penalty", When::Any, GENERATION),
    neutral("no_repeat_ngram_size", When::Any, GENERATION),
    neutral("encoder_no_repeat_ngram_size", When::Any, GENERATION),
    neutral("bad_words_ids", When::Any, GENERATION),
    neutral("num_return_sequences", When::Any, GENERATION),
    neutral("forced_bos_token_id", When::Any, GENERATION),
    neutral("forced_eos_token_id", When::Any, GENERATION),
    neutral("remove_invalid_values", When::Any, GENERATION),
    neutral("exponential_decay_length_penalty", When::Any, GENERATION),
    neutral("suppress_tokens", When::Any, GENERATION),
    neutral("begin_suppress_tokens", When::Any, GENERATION),
];

/// Rotary keys of families with one table.
pub const ROPE: &[Entry] = &[
    modelled("rope_theta", "base of the rotary frequencies (v4)"),
    modelled(
        "rope_scaling",
        "kind of rotary scaling (v4): default, linear, llama3, yarn; dynamic and longrope up to the trained length",
    ),
    modelled("rope_parameters", "base and kind together (v5); kinds as in `rope_scaling`"),
    modelled("partial_rotary_factor", "share of the head that is rotated; 1 where the family rotates whole heads"),
];
pub const TRAINED: &[Entry] =
    &[modelled("original_max_position_embeddings", "trained length, for llama3, yarn and longrope")];

pub const GROUPED: &[Entry] = &[modelled("num_key_value_heads", "key and value heads")];
pub const HEAD_DIM: &[Entry] = &[modelled("head_dim", "width of a head")];
pub const GATED_MLP: &[Entry] = &[
    modelled("intermediate_size", "width of the MLP"),
    modelled("hidden_act", "activation: silu, swish, gelu, gelu_new, gelu_fast, gelu_pytorch_tanh, gelu_python, relu"),
];
pub const RMS: &[Entry] = &[modelled("rms_norm_eps", "epsilon of every RMS norm")];
pub const LAYER_NORM: &[Entry] = &[modelled("layer_norm_eps", "epsilon of every LayerNorm")];

fn entry_of<'a>(key: &str, groups: &[&'a [Entry]]) -> Option<&'a Entry> {
    groups.iter().copied().flatten().find(|entry| entry.key == key)
}

/// Whether the family reads this key.
pub fn is_modelled(key: &str, groups: &[&[Entry]]) -> bool {
    entry_of(key, groups).is_some_and(|entry| matches!(entry.rule, Rule::Modelled(_)))
}

/// Reasons for every key of `config` that the family does not model and that is not neutral at its value.
pub fn check(config: &Map<String, Value>, class: &'static str, groups: &[&[Entry]], reasons: &mut Vec<Reason>) {
    for (key, value) in config {
        let Some(entry) = entry_of(key, groups) else {
            let nearest = nearest(key, groups);
            reasons.push(Reason::UnknownKey { key: key.clone(), class, nearest });
            continue;
        };
        if let Rule::Neutral(when, why) = entry.rule
            && !value.is_null()
            && !when.holds(value, config)
        {
            let (allowed, found) = (when.to_string(), value.to_string());
            reasons.push(Reason::NotNeutral { key: key.clone(), allowed, found, why });
        }
    }
}

impl When {
    fn holds(self, value: &Value, config: &Map<String, Value>) -> bool {
        match self {
            When::Any => true,
            When::Only(literals) => literals.iter().any(|literal| literal.is(value)),
            When::SameAs(other) => config
                .get(other)
                .is_some_and(|other| other == value || value.as_f64().is_some_and(|x| other.as_f64() == Some(x))),
            When::Given(other) => config.get(other).is_some_and(|v| !v.is_null()),
        }
    }
}

impl fmt::Display for When {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            When::Any => f.write_str("any value"),
            When::Only([]) => f.write_str("null"),
            When::Only(literals) => {
                for (i, literal) in literals.iter().enumerate() {
                    write!(f, "{}{literal}", if i == 0 { "" } else { " or " })?;
                }
                Ok(())
            }
            When::SameAs(other) => write!(f, "the value of `{other}`"),
            When::Given(other) => write!(f, "a config that also gives `{other}`"),
        }
    }
}

impl Literal {
    fn is(self, value: &Value) -> bool {
        match self {
            Literal::Bool(b) => value.as_bool() == Some(b),
            Literal::Number(x) => value.as_f64() == Some(x),
            Literal::Text(s) => value.as_str() == Some(s),
            Literal::Empty => {
                value.as_array().is_some_and(Vec::is_empty) || value.as_object().is_some_and(Map::is_empty)
            }
        }
    }
}

impl fmt::Display for Literal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Literal::Bool(b) => write!(f, "{b}"),
            Literal::Number(x) => write!(f, "{x}"),
            Literal::Text(s) => write!(f, "\"{s}\""),
            Literal::Empty => f.write_str("an empty value"),
        }
    }
}

/// Far more than any known key has.
const KEY_BYTES_MAX: usize = 256;

/// The known key closest to a misspelt one, where one is close.
fn nearest(key: &str, groups: &[&[Entry]]) -> Option<&'static str> {
    // The distance takes time by the product of the lengths, and a key much longer than every known one has none close.
    if key.len() > KEY_BYTES_MAX {
        return None;
    }
    let known = groups.iter().copied().flatten().map(|entry| entry.key);
    let (distance, best) = known.map(|known| (strsim::levenshtein(key, known), known)).min()?;
    (distance <= (key.len() / 4).max(1)).then_some(best)
}

/// The schema as JSON: the keys of each family, those common to all and those of wrappers, and of each key what it becomes, or where
/// it is neutral.
pub fn schema_json() -> Value {
    let keys = |entries: &[Entry]| {
        let key = |Entry { key, rule }: &Entry| match rule {
            Rule::Modelled(becomes) => json!({ "key": key, "treatment": "modelled", "becomes": becomes }),
            Rule::Neutral(when, why) => {
                json!({ "key": key, "treatment": "neutral", "at": when.to_string(), "why": why })
            }
        };
        entries.iter().map(key).collect::<Vec<Value>>()
    };
    let family = |family: &Family| json!({ "class": family.class, "keys": family.keys.iter().flat_map(|entries| keys(entries)).collect::<Vec<_>>() });
    let wrapper = |wrapper: &Wrapper| json!({ "class": wrapper.class, "text_models": wrapper.texts });
    json!({
        "families": FAMILIES.iter().map(family).collect::<Vec<_>>(),
        "every_family": keys(COMMON),
        "wrappers": WRAPPERS.iter().map(wrapper).collect::<Vec<_>>(),
        "every_wrapper": keys(WRAPPER_KEYS),
    })
}

/// The schema as markdown, for the documentation: the keys of each family, then those common to all.
pub fn schema_table() -> String {
    let mut out = String::new();
    let mut section = |title: &str, groups: &[&[Entry]]| {
        out.push_str(&format!("### {title}\n\n| key | treatment |\n| --- | --- |\n"));
        for entry in groups.iter().copied().flatten() {
            let _ = match entry.rule {
                Rule::Modelled(becomes) => writeln!(out, "| `{}` | modelled: {becomes} |", entry.key),
                Rule::Neutral(when, why) => writeln!(out, "| `{}` | neutral at {when}: {why} |", entry.key),
            };
        }
        out.push('\n');
    };
    for family in FAMILIES {
        section(&format!("`{}`", family.class), family.keys);
    }
    section("Every family", &[COMMON]);
    section("Around `text_config`", &[WRAPPER_KEYS]);
    let _ = writeln!(
        out,
        "Keys of every family that are neutral are so here, too. A key of the text model may be repeated. The classes:\n"
    );
    for Wrapper { class, texts, .. } in WRAPPERS {
        let texts: Vec<String> = texts.iter().map(|text| format!("`{text}`")).collect();
        let _ = writeln!(out, "- `{class}`, around {}", texts.join(", "));
    }
    out
}
