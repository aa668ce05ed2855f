//! From `config.json` and tensor headers to a `ModelGraph`: an allow-list, or a refusal that names every reason.
//!
//! Every key is modelled, or neutral at its value, or the import fails; every tensor is used, or neutral, or the import
//! fails. A model that is accepted and computed wrong is the worst fault of this program, so the importer also refuses
//! what transformers accepts with a warning. If versions of transformers differ, version 5 counts.

mod families;
mod plan;
mod print;
mod reader;
mod reason;
mod rope;
mod schema;

use std::fmt;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::error::Fault;
use crate::files::{FileError, read_text};
use crate::model::config::families::{FAMILIES, Family};
use crate::model::config::plan::{Assembled, Plan, assemble};
use crate::model::config::reader::Reader;
use crate::model::graph::ModelGraph;
use crate::model::weights::{Checkpoint, Weights};

pub use crate::model::config::print::{describe, graph_text, step_cache_bytes, step_weight_bytes};
pub use crate::model::config::reason::Reason;
pub use crate::model::config::schema::schema_table;

/// A model, ready to be lowered, and where its weights are.
#[derive(Debug)]
pub struct Imported {
    pub graph: ModelGraph,
    pub weights: Weights,
    /// Bytes of weight files and their index that the import read: headers only.
    pub header_bytes_read: u64,
    /// `config.json` as it was read.
    pub config_text: String,
    /// Notes for the user: limits that the checkpoint does not have elsewhere. One sentence each.
    pub notes: Vec<String>,
}

/// Why monobloc cannot compute the model of a folder.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error("`{path}` is no JSON object: {detail}")]
    Syntax { path: PathBuf, detail: String },
    #[error("{}", Refusal(place, reasons))]
    Refused { place: String, reasons: Vec<Reason> },
}

/// Reasons shown; a mixture of experts read as a dense model yields thousands.
const REASONS_SHOWN: usize = 40;

struct Refusal<'a>(&'a str, &'a [Reason]);

impl fmt::Display for Refusal<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Refusal(place, reasons) = self;
        write!(f, "`{place}` cannot be imported:")?;
        for reason in reasons.iter().take(REASONS_SHOWN) {
            write!(f, "\n  - {reason}")?;
        }
        if reasons.len() > REASONS_SHOWN {
            write!(f, "\n  - and {} more", reasons.len() - REASONS_SHOWN)?;
        }
        Ok(())
    }
}

impl From<ImportError> for Fault {
    fn from(error: ImportError) -> Fault {
        let message = error.to_string();
        match error {
            ImportError::File(error) => Fault::from(error),
            ImportError::Syntax { .. } => Fault::input(message),
            ImportError::Refused { .. } => Fault::input(message)
                .with_remedy("what is not modelled is refused, because it might change the result; see docs/models.md"),
        }
    }
}

/// Largest `config.json` accepted. Published ones have a few kilobytes, label maps included some hundred.
const CONFIG_BYTES_MAX: u64 = 16 << 20;

/// Imports a checkpoint folder: `config.json`, `generation_config.json` where there is one, and safetensors headers.
///
/// # Errors
/// [`ImportError::Refused`] with every reason found.
pub fn import(dir: &Path) -> Result<Imported, ImportError> {
    let config_path = dir.join("config.json");
    let config_text = read_text(&config_path, CONFIG_BYTES_MAX)?;
    let config = parse_object(&config_path, &config_text)?;
    let generation_path = dir.join("generation_config.json");
    let generation = match generation_path.exists() {
        true => parse_object(&generation_path, &read_text(&generation_path, CONFIG_BYTES_MAX)?)?,
        false => Map::new(),
    };
    let (family, plan, mut reasons) = resolve(&config);
    let checkpoint = match Checkpoint::open(dir) {
        Ok(checkpoint) => Some(checkpoint),
        Err(faults) => {
            reasons.extend(faults.into_iter().map(Reason::Weights));
            None
        }
    };
    let refused = |reasons| Err(ImportError::Refused { place: dir.display().to_string(), reasons });
    let (Some(plan), Some(checkpoint), Some(family)) = (plan, checkpoint, family) else { return refused(reasons) };
    let Assembled { mut graph, consumed, reasons: tensor_reasons } = assemble(&plan, Some(checkpoint.tensors()));
    reasons.extend(tensor_reasons);
    for (name, tensor) in checkpoint.tensors().iter().filter(|(name, _)| !consumed.contains(*name)) {
        let reason = match extra_tensor(name, &plan) {
            Extra::Neutral => continue,
            Extra::TiedHead => match checkpoint.same_bytes(name, plan.names.embed) {
                Ok(true) => continue,
                Ok(false) => Reason::TiedHeadDiffers { name: name.clone(), embed: plan.names.embed.to_string() },
                Err(fault) => Reason::Weights(fault),
            },
            Extra::Unknown => {
                Reason::UnknownTensor { name: name.clone(), shape: tensor.shape.clone(), class: family.class }
            }
        };
        reasons.push(reason);
    }
    if !reasons.is_empty() {
        return refused(reasons);
    }
    set_special_tokens(&mut graph, &config, &generation);
    let header_bytes_read = checkpoint.header_bytes_read();
    match checkpoint.bind(&graph.tensors) {
        Ok(weights) => Ok(Imported { graph, weights, header_bytes_read, config_text, notes: plan.notes }),
        Err(fault) => refused(vec![Reason::Weights(fault)]),
    }
}

/// Imports a config without weights: tensors named and shaped as the family's checkpoint has them, values synthetic.
///
/// # Errors
/// As [`import`].
pub fn import_config_only(config_text: &str, seed: u64) -> Result<Imported, ImportError> {
    let config = parse_object(Path::new("config.json"), config_text)?;
    let (_, plan, reasons) = resolve(&config);
    let Some(plan) = plan.filter(|_| reasons.is_empty()) else {
        return Err(ImportError::Refused { place: "config.json".to_string(), reasons });
    };
    let mut graph = assemble(&plan, None).graph;
    set_special_tokens(&mut graph, &config, &Map::new());
    let weights = Weights::synthetic(&graph, seed);
    let (config_text, notes) = (config_text.to_string(), plan.notes);
    Ok(Imported { graph, weights, header_bytes_read: 0, config_text, notes })
}

fn parse_object(path: &Path, text: &str) -> Result<Map<String, Value>, ImportError> {
    let syntax = |detail: String| ImportError::Syntax { path: path.to_path_buf(), detail };
    match serde_json::from_str(text) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(syntax("expected an object at the top".to_string())),
        Err(error) => Err(syntax(error.to_string())),
    }
}

/// The family and the plan of a config. The plan is there only if its values can be trusted, which unknown keys
/// beside them do not change.
fn resolve(config: &Map<String, Value>) -> (Option<&'static Family>, Option<Plan>, Vec<Reason>) {
    let family = match family_of(config) {
        Ok(family) => family,
        Err(reason) => return (None, None, vec![reason]),
    };
    let mut reasons = Vec::new();
    let groups: Vec<_> = family.keys.iter().copied().chain([schema::COMMON]).collect();
    schema::check(config, family.class, &groups, &mut reasons);
    let mut reader = Reader::new(config);
    for read_elsewhere in ["architectures", "model_type", "bos_token_id", "eos_token_id"] {
        reader.value(read_elsewhere);
    }
    let mut plan = (family.plan)(&mut reader);
    if plan.is_some() {
        // The tables are written by hand beside the code that reads: a key that only the table knows would be
        // accepted and ignored, which is the one thing that must not happen.
        for key in config.keys().filter(|key| schema::is_modelled(key, &groups)) {
            if !reader.asked().contains(key.as_str()) {
                reader.reasons.push(Reason::Unread { key: key.clone() });
            }
        }
    }
    plan = plan.filter(|_| reader.reasons.is_empty());
    reasons.append(&mut reader.reasons);
    (Some(family), plan, reasons)
}

fn family_of(config: &Map<String, Value>) -> Result<&'static Family, Reason> {
    let bad = |key: &str, expected: &str| Reason::BadValue {
        key: key.to_string(),
        expected: expected.to_string(),
        found: config.get(key).map_or("nothing".to_string(), Value::to_string),
    };
    let model_type = match config.get("model_type") {
        None | Some(Value::Null) => None,
        Some(Value::String(name)) => Some(name.as_str()),
        Some(_) => return Err(bad("model_type", "a string")),
    };
    let class = match config.get("architectures") {
        None | Some(Value::Null) => None,
        Some(Value::Array(names)) => match names.as_slice() {
            [Value::String(name)] => Some(name.as_str()),
            _ => return Err(bad("architectures", "exactly one class name")),
        },
        Some(_) => return Err(bad("architectures", "exactly one class name")),
    };
    let unsupported = |name: &str| Reason::Architecture { class: name.to_string(), why: why_unsupported(name) };
    let Some(class) = class else {
        let Some(name) = model_type else { return Err(Reason::MissingKey { key: "architectures".to_string() }) };
        return FAMILIES.iter().find(|f| f.model_type == name).ok_or_else(|| unsupported(name));
    };
    let family = FAMILIES.iter().find(|f| f.class == class).ok_or_else(|| unsupported(class))?;
    match model_type {
        Some(name) if name != family.model_type => Err(Reason::Conflict {
            first: "architectures".to_string(),
            second: "model_type".to_string(),
            detail: format!("`{class}` has the type `{}`, found `{name}`", family.model_type),
        }),
        _ => Ok(family),
    }
}

fn why_unsupported(class: &str) -> &'static str {
    let lower = class.to_lowercase();
    let has = |parts: &[&str]| parts.iter().any(|part| lower.contains(part));
    if has(&[
        "moe",
        "mixtral",
        "deepseekv2",
        "deepseekv3",
        "deepseek_v",
        "dbrx",
        "gptoss",
        "gpt_oss",
        "arctic",
        "jetmoe",
    ]) {
        "(mixture of experts) is not supported yet"
    } else if has(&["mamba", "rwkv", "jamba", "recurrent", "zamba", "bamba", "falconh1", "hybrid"]) {
        "(state-space or recurrent layers) is not supported"
    } else if has(&["conditionalgeneration", "vision", "vl", "audio"]) {
        "(multimodal or encoder-decoder) is not supported"
    } else if !has(&["causallm"]) && class.chars().any(char::is_uppercase) {
        "is not supported: expected a class that ends in `ForCausalLM`"
    } else {
        "is not a supported decoder family"
    }
}

enum Extra {
    Neutral,
    /// A stored copy of the embedding; neutral if its bytes are the embedding's.
    TiedHead,
    Unknown,
}

/// Classifies a tensor that the graph does not read.
fn extra_tensor(name: &str, plan: &Plan) -> Extra {
    let is_buffer = |suffix: &str| name.strip_suffix(suffix).is_some_and(|path| path.is_empty() || path.ends_with('.'));
    // Old checkpoints store what transformers recomputes: rotary frequencies, and GPT-NeoX its causal mask.
    let neox = plan.names.layers == "gpt_neox.layers";
    let mask = |suffix: &str| neox && name.starts_with(plan.names.layers) && is_buffer(suffix);
    if is_buffer("rotary_emb.inv_freq") || mask("attention.bias") || mask("attention.masked_bias") {
        Extra::Neutral
    } else if plan.tied && plan.names.heads.contains(&name) {
        Extra::TiedHead
    } else {
        Extra::Unknown
    }
}

/// `eos` from generation_config.json, else config.json; ids outside the vocabulary can never be produced and are left
/// out (published configs have -1 for "none").
fn set_special_tokens(graph: &mut ModelGraph, config: &Map<String, Value>, generation: &Map<String, Value>) {
    let given = |key: &str| [generation, config].into_iter().filter_map(|map| map.get(key)).find(|v| !v.is_null());
    let vocab = graph.vocab;
    let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok()).filter(|n| *n < vocab);
    let mut eos: Vec<u32> = match given("eos_token_id") {
        Some(Value::Array(ids)) => ids.iter().filter_map(id).collect(),
        Some(single) => id(single).into_iter().collect(),
        None => Vec::new(),
    };
    eos.sort_unstable();
    eos.dedup();
    graph.eos = eos;
    graph.bos = given("bos_token_id").and_then(id);
}

#[cfg(test)]
mod tests;
