//! Owns multimodal wrappers: classes whose config has a text model in `text_config`. Text alone is imported.
//!
//! A wrapper is in the table only if its class computes text as the class of the text model does: PaliGemma, which lets a
//! prompt look forwards, is not.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::model::config::plan::{Ignored, Prefix};
use crate::model::config::reason::Reason;
use crate::model::config::schema::{self, Entry, When, modelled, neutral};
use crate::model::weights::HeaderTensor;

/// A class of transformers around a text model.
pub struct Wrapper {
    /// As in `architectures`.
    pub class: &'static str,
    pub model_type: &'static str,
    /// Types that `text_config` may have; the first where it names none.
    pub texts: &'static [&'static str],
    /// Keys of `text_config` that the wrapper's class does not apply, although the text model's does: only null is accepted.
    pub not_applied: &'static [&'static str],
    /// Tensors beside the text model.
    pub beside: &'static [Ignored],
}

pub static WRAPPERS: &[Wrapper] = &[
    Wrapper {
        class: "Gemma3ForConditionalGeneration",
        model_type: "gemma3",
        texts: &["gemma3_text"],
        not_applied: &["final_logit_softcapping"],
        beside: TOWER_AND_PROJECTOR,
    },
    Wrapper {
        class: "Mistral3ForConditionalGeneration",
        model_type: "mistral3",
        texts: &["mistral", "ministral3"],
        not_applied: &[],
        beside: TOWER_AND_PROJECTOR,
    },
    Wrapper {
        class: "Qwen3_5ForConditionalGeneration",
        model_type: "qwen3_5",
        texts: &["qwen3_5_text"],
        not_applied: &[],
        beside: VISUAL,
    },
    Wrapper {
        class: "Qwen3_5MoeForConditionalGeneration",
        model_type: "qwen3_5_moe",
        texts: &["qwen3_5_moe_text"],
        not_applied: &[],
        beside: VISUAL,
    },
    Wrapper {
        class: "LlavaForConditionalGeneration",
        model_type: "llava",
        texts: &["llama", "mistral", "qwen2"],
        not_applied: &[],
        beside: TOWER_AND_PROJECTOR,
    },
];

const VISUAL: &[Ignored] =
    &[Ignored { prefix: "model.visual.", what: "vision" }, Ignored { prefix: "visual.", what: "vision" }];
const TOWER_AND_PROJECTOR: &[Ignored] = &[
    Ignored { prefix: "vision_tower.", what: "vision" },
    Ignored { prefix: "model.vision_tower.", what: "vision" },
    Ignored { prefix: "multi_modal_projector.", what: "vision" },
    Ignored { prefix: "model.multi_modal_projector.", what: "vision" },
];

/// Where a wrapper's checkpoint has the text model: as transformers 5 writes it, as transformers 4 did.
const LAYOUTS: [Prefix; 2] = [
    Prefix { model: "model.language_model.", head: "" },
    Prefix { model: "language_model.model.", head: "language_model." },
];

/// Extents that a text class fills in. Configs of wrappers leave out what equals them (Gemma 3), other configs do not.
const EXTENTS: [&str; 5] =
    ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"];
const EXTENTS_OF_CLASS: &[(&str, [u32; 5])] = &[
    ("gemma3_text", [262_208, 2304, 9216, 26, 8]),
    ("llama", [32_000, 4096, 11_008, 32, 32]),
    ("ministral3", [131_072, 4096, 14_336, 34, 32]),
    ("mistral", [32_000, 4096, 14_336, 32, 32]),
    ("qwen2", [151_936, 4096, 22_016, 32, 32]),
    ("qwen3_5_text", [248_320, 4096, 12_288, 32, 16]),
    // Its class has no width of an MLP, and ignores one.
    ("qwen3_5_moe_text", [248_320, 2048, 1, 40, 16]),
];

const IMAGES: &str = "speaks about images, and text alone is computed";

/// Keys beside `text_config`, for every wrapper.
pub const WRAPPER_KEYS: &[Entry] = &[
    modelled("architectures", "selects the wrapper"),
    modelled("model_type", "selects the wrapper; must agree with `architectures`"),
    modelled("text_config", "the config of the text model, with the keys of its class"),
    modelled("tie_word_embeddings", "whether the head is the embedding; before that of `text_config`"),
    modelled("bos_token_id", "first token of a text; before that of `text_config`"),
    modelled("eos_token_id", "tokens that end generation; before those of `text_config`"),
    neutral("vision_config", When::Any, IMAGES),
    neutral("image_token_id", When::Any, IMAGES),
    neutral("image_token_index", When::Any, IMAGES),
    neutral("image_seq_length", When::Any, IMAGES),
    neutral("video_token_id", When::Any, IMAGES),
    neutral("vision_start_token_id", When::Any, IMAGES),
    neutral("vision_end_token_id", When::Any, IMAGES),
    neutral("vision_feature_layer", When::Any, IMAGES),
    neutral("vision_feature_select_strategy", When::Any, IMAGES),
    neutral("mm_tokens_per_image", When::Any, IMAGES),
    neutral("boi_token_id", When::Any, IMAGES),
    neutral("boi_token_index", When::Any, IMAGES),
    neutral("eoi_token_id", When::Any, IMAGES),
    neutral("eoi_token_index", When::Any, IMAGES),
    neutral("multimodal_projector_bias", When::Any, IMAGES),
    neutral("projector_hidden_act", When::Any, IMAGES),
    neutral("spatial_merge_size", When::Any, IMAGES),
    neutral("language_model_only", When::Any, IMAGES),
    neutral("ignore_index", When::Any, "used in training only"),
];

/// The config of the model that computes text, and what wraps it.
pub struct Unwrapped<'a> {
    pub wrapper: Option<&'static Wrapper>,
    /// Empty if the wrapper has no text model that is supported.
    pub text: Cow<'a, Map<String, Value>>,
    pub reasons: Vec<Reason>,
}

/// Takes the text model out of a config of a wrapper; another config is what it is.
///
/// The keys of both levels that speak about the same thing are those of the wrapper, as in transformers 5. Where neither says
/// whether the head is tied, the files do: transformers 5 ties a head that they do not have.
pub fn unwrap<'a>(config: &'a Map<String, Value>, files: Option<&BTreeMap<String, HeaderTensor>>) -> Unwrapped<'a> {
    let Some(wrapper) = wrapper_of(config) else {
        return Unwrapped { wrapper: None, text: Cow::Borrowed(config), reasons: vec![] };
    };
    let mut reasons = Vec::new();
    let mut text = match config.get("text_config") {
        Some(Value::Object(text)) => text.clone(),
        found => {
            reasons.push(Reason::BadValue {
                key: "text_config".to_string(),
                expected: "the config of the text model".to_string(),
                found: found.map_or("nothing".to_string(), Value::to_string),
            });
            return Unwrapped { wrapper: Some(wrapper), text: Cow::Owned(Map::new()), reasons };
        }
    };
    check_types(wrapper, config, &mut text, &mut reasons);
    if !reasons.is_empty() {
        return Unwrapped { wrapper: Some(wrapper), text: Cow::Owned(Map::new()), reasons };
    }
    let named = text.get("model_type").and_then(Value::as_str).unwrap_or_default();
    if let Some((_, extents)) = EXTENTS_OF_CLASS.iter().find(|(name, _)| *name == named) {
        for (key, extent) in EXTENTS.into_iter().zip(extents) {
            text.entry(key).or_insert(Value::from(*extent));
        }
    }
    for key in wrapper.not_applied.iter().filter(|key| text.get(**key).is_some_and(|value| !value.is_null())) {
        reasons.push(Reason::NotNeutral {
            key: format!("text_config.{key}"),
            allowed: "null".to_string(),
            found: text[*key].to_string(),
            why: "the class of the wrapper does not apply it, that of the text model does",
        });
    }
    check_keys(wrapper, config, &text, &mut reasons);
    for key in ["tie_word_embeddings", "bos_token_id", "eos_token_id", "auto_map"] {
        if let Some(value) = config.get(key).filter(|value| !value.is_null()) {
            text.insert(key.to_string(), value.clone());
        }
    }
    if let Some(files) = files
        && !text.contains_key("tie_word_embeddings")
    {
        let stored = LAYOUTS.iter().any(|prefix| files.contains_key(&format!("{}lm_head.weight", prefix.head)));
        text.insert("tie_word_embeddings".to_string(), Value::Bool(!stored));
    }
    Unwrapped { wrapper: Some(wrapper), text: Cow::Owned(text), reasons }
}

fn wrapper_of(config: &Map<String, Value>) -> Option<&'static Wrapper> {
    let class = match config.get("architectures") {
        Some(Value::Array(names)) => names.first().and_then(Value::as_str),
        _ => None,
    };
    let model_type = config.get("model_type").and_then(Value::as_str);
    WRAPPERS.iter().find(|wrapper| match class {
        Some(class) => wrapper.class == class,
        None => Some(wrapper.model_type) == model_type,
    })
}

/// Compares the types of both levels with the wrapper's, and fills in that of a text model that names none.
fn check_types(
    wrapper: &Wrapper,
    config: &Map<String, Value>,
    text: &mut Map<String, Value>,
    reasons: &mut Vec<Reason>,
) {
    let mut bad = |key: &str, expected: String, found: &Value| {
        reasons.push(Reason::BadValue { key: key.to_string(), expected, found: found.to_string() });
    };
    if let Some(found) = config.get("model_type").filter(|found| !found.is_null() && *found != wrapper.model_type) {
        bad("model_type", format!("`{}`, the type of `{}`", wrapper.model_type, wrapper.class), found);
    }
    let single = |found: &Value| found.as_array().is_some_and(|names| names.len() == 1);
    if let Some(found) = config.get("architectures").filter(|found| !found.is_null() && !single(found)) {
        bad("architectures", "exactly one class name".to_string(), found);
    }
    match text.get("model_type").filter(|found| !found.is_null()) {
        None => {
            text.insert("model_type".to_string(), Value::from(wrapper.texts[0]));
        }
        Some(found) if !wrapper.texts.iter().any(|known| found == known) => {
            let known: Vec<String> = wrapper.texts.iter().map(|known| format!("`{known}`")).collect();
            let expected =
                format!("{}, the text models that `{}` is supported with", known.join(" or "), wrapper.class);
            bad("text_config.model_type", expected, found);
        }
        Some(_) => {}
    }
}

/// Reasons for every key beside `text_config` that is neither known there nor repeats the text model's.
fn check_keys(wrapper: &Wrapper, config: &Map<String, Value>, text: &Map<String, Value>, reasons: &mut Vec<Reason>) {
    let own = |key: &str| WRAPPER_KEYS.iter().any(|entry| entry.key == key);
    // A key that the families model would be passed over here, unless the text model says the same.
    let repeated = |key: &str, value: &Value| !own(key) && text.get(key) == Some(value);
    let rest = config.iter().filter(|(key, value)| !repeated(key, value) && !value.is_null());
    let rest: Map<String, Value> = rest.map(|(key, value)| (key.clone(), value.clone())).collect();
    let modelled_in_text = |key: &str| !own(key) && schema::is_modelled(key, &[schema::COMMON]);
    for (key, value) in rest.iter().filter(|(key, _)| modelled_in_text(key)) {
        let found = text.get(key).map_or("nothing".to_string(), Value::to_string);
        let (first, second) = (key.clone(), format!("text_config.{key}"));
        reasons.push(Reason::Conflict { first, second, detail: format!("{value} and {found}") });
    }
    let rest: Map<String, Value> = rest.into_iter().filter(|(key, _)| !modelled_in_text(key)).collect();
    schema::check(&rest, wrapper.class, &[WRAPPER_KEYS, schema::COMMON], reasons);
}

/// Where the files have the text model of a wrapper: the first layout whose embedding they have.
pub fn layout(files: Option<&BTreeMap<String, HeaderTensor>>, embed: &str) -> Prefix {
    let there = |prefix: &&Prefix| files.is_some_and(|files| files.contains_key(&prefix.of(embed)));
    *LAYOUTS.iter().find(there).unwrap_or(&LAYOUTS[0])
}
