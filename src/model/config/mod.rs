//! From `config.json` and tensor headers to a `ModelGraph`: an allow-list, or a refusal that names every reason.
//!
//! Every key is modelled, or neutral at its value, or the import fails; every tensor is used, or neutral, or the import
//! fails. A model that is accepted and computed wrong is the worst fault of this program, so the importer also refuses
//! what transformers accepts with a warning. If versions of transformers differ, version 5 counts.

mod families;
mod gguf;
mod json;
mod plan;
mod print;
mod quantised;
mod reader;
mod reason;
mod rope;
mod schema;
mod wrapper;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::error::Fault;
use crate::files::{FileError, read_text};
use crate::gguf::{files_of, read_parts};
use crate::model::blocks::Blocks;
use crate::model::config::families::{FAMILIES, Family};
use crate::model::config::plan::{Ahead, Assembled, Ignored, Plan, Prefix, assemble, assemble_draft};
use crate::model::config::reader::Reader;
use crate::model::config::wrapper::{Unwrapped, unwrap};
use crate::model::graph::{ModelGraph, TensorId};
use crate::model::weights::{Checkpoint, HeaderTensor, Weights, WeightsError};

pub use crate::model::config::print::{describe, graph_text, step_cache_bytes, step_weight_bytes};
pub use crate::model::config::reason::Reason;
pub use crate::model::config::schema::{schema_json, schema_table};

/// A model, ready to be lowered, and where its weights are.
#[derive(Debug)]
pub struct Imported {
    pub graph: ModelGraph,
    pub weights: Weights,
    /// Bytes of weight files and their index that the import read: headers only.
    pub header_bytes_read: u64,
    /// `config.json` as it was read, with what `hf_quant_config.json` adds.
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
    #[error("`{place}` has no layer that predicts further tokens (MTP) which can be a draft: {why}")]
    NoDraft { place: String, why: String },
}

/// Reasons shown; a mixture of experts read as a dense model yields thousands.
const REASONS_SHOWN: usize = 40;

struct Refusal<'a>(&'a str, &'a [Reason]);

impl fmt::Display for Refusal<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Refusal(place, reasons) = self;
        write!(f, "`{place}` cannot be imported:")?;
        for reason in reasons.iter().take(REASONS_SHOWN) {
            write!(f, "\n  - {}", reason.shown())?;
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
            ImportError::NoDraft { .. } => Fault::input(message).with_remedy(NO_DRAFT),
            ImportError::Refused { reasons, .. } if reasons.iter().any(Reason::is_incomplete) => {
                Fault::input(message).with_remedy(FETCH_AGAIN)
            }
            ImportError::Refused { .. } => Fault::input(message)
                .with_remedy("what is not modelled is refused, because it might change the result; see docs/models.md"),
        }
    }
}

/// What to do about a file that is not what its publisher has.
pub const FETCH_AGAIN: &str =
    "fetch it again, with all parts of the model beside each other; `git lfs pull` replaces a pointer of Git LFS";

/// What to do without a draft.
const NO_DRAFT: &str = "leave out `--draft`, or propose tokens of the text itself with `--lookup`; docs/models.md names the families that have one";

/// Largest `config.json` accepted. Published ones have a few kilobytes, label maps included some hundred.
const CONFIG_BYTES_MAX: u64 = 16 << 20;

/// Imports a checkpoint: a folder with `config.json`, `generation_config.json` where there is one, and safetensors headers; or a GGUF
/// file, or a folder of one, by its header.
///
/// # Errors
/// [`ImportError::Refused`] with every reason found.
pub fn import(place: &Path) -> Result<Imported, ImportError> {
    match files_of(place) {
        Ok(Some(parts)) => return import_gguf(place, &parts),
        Ok(None) => {}
        Err(error) => return Err(refusal(place, vec![Reason::Weights(error.into())])),
    }
    let dir = place;
    let Folder { config, config_text, quantised, generation, checkpoint, faults } = Folder::read(dir)?;
    let opened = open(&config, checkpoint.as_ref().map(Checkpoint::tensors));
    let Opened { family, plan, text, mut reasons } = opened;
    let special = plan.as_ref().and_then(|plan| special_tokens(plan.vocab, &text, &generation, &mut reasons));
    let quantisation = quantised.as_ref().and_then(|value| quantised::read(value, &mut reasons));
    reasons.extend(faults.into_iter().map(Reason::Weights));
    if quantised.is_some() && quantisation.is_none() {
        // Every tensor of codes would be one more reason.
        return Err(refusal(dir, reasons));
    }
    let refused = |reasons| Err(refusal(dir, reasons));
    let (Some(plan), Some(checkpoint), Some(family)) = (plan, checkpoint, family) else { return refused(reasons) };
    let assembled = assemble(&plan, Some(checkpoint.tensors()), quantisation.as_ref());
    let Assembled { mut graph, consumed, recipes, blocks, transposed, reasons: tensor_reasons } = assembled;
    reasons.extend(tensor_reasons);
    let extra = |name: &str| extra_tensor(name, &plan, quantisation.is_some(), &graph);
    let (extra_notes, extra_reasons) = judge_extras(&checkpoint, &consumed, extra, &plan, family.class);
    reasons.extend(extra_reasons);
    let Some(special) = special.filter(|_| reasons.is_empty()) else { return refused(reasons) };
    let mut notes = special.apply(&mut graph, plan.notes);
    notes.extend(quantisation.map(|quantisation| quantisation.notes).unwrap_or_default());
    notes.extend(extra_notes);
    let wide = recipes.values().filter(|recipe| recipe.format.is_plain()).count();
    if wide > 0 {
        notes.push(format!(
            "{wide} matrices have groups that do not follow each other along k: they are computed as stored, in fp32, which takes \
             4 bytes a weight and runs on `cpu` alone"
        ));
    }
    let header_bytes_read = checkpoint.header_bytes_read();
    match checkpoint.bind(&graph.tensors, recipes, blocks, &transposed) {
        Ok(weights) => Ok(Imported { graph, weights, header_bytes_read, config_text, notes }),
        Err(fault) => refused(vec![Reason::Weights(fault)]),
    }
}

/// What a checkpoint folder has, as far as an import reads it.
struct Folder {
    /// Without `quantization_config`.
    config: Map<String, Value>,
    config_text: String,
    quantised: Option<Value>,
    generation: Map<String, Value>,
    checkpoint: Option<Checkpoint>,
    faults: Vec<WeightsError>,
}

impl Folder {
    fn read(dir: &Path) -> Result<Folder, ImportError> {
        let config_path = dir.join("config.json");
        let mut config_text = read_text(&config_path, CONFIG_BYTES_MAX)?;
        let mut config = parse_object(&config_path, &config_text)?;
        let modelopt_path = dir.join(quantised::MODELOPT_FILE);
        if modelopt_path.exists() && config.get(quantised::KEY).is_none_or(Value::is_null) {
            let file = parse_object(&modelopt_path, &read_text(&modelopt_path, CONFIG_BYTES_MAX)?)?;
            config.insert(quantised::KEY.to_string(), quantised::of_modelopt_file(&file));
            config_text = Value::Object(config.clone()).to_string();
        }
        let quantised = take_quantisation(&mut config);
        let generation_path = dir.join("generation_config.json");
        let generation = match generation_path.exists() {
            true => parse_object(&generation_path, &read_text(&generation_path, CONFIG_BYTES_MAX)?)?,
            false => Map::new(),
        };
        let (checkpoint, faults) = match Checkpoint::open(dir) {
            Ok(checkpoint) => (Some(checkpoint), vec![]),
            Err(faults) => (None, faults),
        };
        Ok(Folder { config, config_text, quantised, generation, checkpoint, faults })
    }
}

/// Imports the layer of a checkpoint folder that predicts further tokens, with the embedding and the head of the model, as a model of its own: a
/// draft. The model itself was imported before, and nothing was wrong with it.
///
/// # Errors
/// [`ImportError::NoDraft`]: there is no such layer, or not in a form that is known.
pub fn import_draft(dir: &Path) -> Result<Imported, ImportError> {
    let none = |why: String| ImportError::NoDraft { place: dir.display().to_string(), why };
    if matches!(files_of(dir), Ok(Some(_))) {
        return Err(none("it is a GGUF file".to_string()));
    }
    let Folder { config, config_text, quantised, checkpoint, .. } = Folder::read(dir)?;
    let Opened { plan, mut reasons, .. } = open(&config, checkpoint.as_ref().map(Checkpoint::tensors));
    let quantisation = quantised.as_ref().and_then(|value| quantised::read(value, &mut reasons));
    let (Some(plan), Some(checkpoint), true) = (plan, checkpoint, reasons.is_empty()) else {
        return Err(refusal(dir, reasons));
    };
    let class = plan.class;
    let assembled = match assemble_draft(&plan, checkpoint.tensors(), quantisation.as_ref()) {
        None => {
            return Err(none(format!(
                "its files have no such layer, or not in the one form of `{class}` that is known"
            )));
        }
        Some(Err(reasons)) => {
            return Err(none(reasons.iter().map(Reason::shown).collect::<Vec<_>>().join("; ")));
        }
        Some(Ok(assembled)) => assembled,
    };
    let Assembled { mut graph, recipes, blocks, transposed, .. } = assembled;
    // Named as a model of its own, so that its trials and keys are not those of the whole model.
    graph.family = format!("{class}:mtp");
    let header_bytes_read = checkpoint.header_bytes_read();
    let weights = checkpoint.bind(&graph.tensors, recipes, blocks, &transposed);
    let weights = weights.map_err(|fault| none(fault.to_string()))?;
    Ok(Imported { graph, weights, header_bytes_read, config_text, notes: vec![] })
}

fn refusal(place: &Path, reasons: Vec<Reason>) -> ImportError {
    ImportError::Refused { place: place.display().to_string(), reasons }
}

/// Imports the parts of a GGUF model by their headers.
fn import_gguf(place: &Path, parts: &[PathBuf]) -> Result<Imported, ImportError> {
    let refused = |reasons| Err(refusal(place, reasons));
    let headers = match read_parts(parts) {
        Ok(headers) => headers,
        Err(faults) => return refused(faults.into_iter().map(|fault| Reason::Weights(fault.into())).collect()),
    };
    let (mut reasons, mut notes) = (vec![], vec![]);
    let checkpoint = match Checkpoint::of_gguf(&headers) {
        Ok(checkpoint) => checkpoint,
        Err(faults) => return refused(faults.into_iter().map(Reason::Weights).collect()),
    };
    let Some((_, first)) = headers.first() else { return refused(vec![]) };
    let mut factors = BTreeMap::new();
    for name in gguf::ROPE_TENSORS {
        match checkpoint.small_values(name) {
            Ok(values) => factors.extend(values.map(|values| (name, values))),
            Err(fault) => reasons.push(Reason::Weights(fault)),
        }
    }
    let shape = |name: &str| Some(checkpoint.tensors().get(name)?.shape.clone());
    let read = gguf::read(first, &shape, &|name| factors.get(name).cloned(), &mut reasons);
    let Some(gguf::Read { architecture, config, rope_divisors, rope_tensors }) = read else { return refused(reasons) };
    let (family, plan, own) = resolve(&config);
    reasons.extend(own);
    let special = plan.as_ref().and_then(|plan| special_tokens(plan.vocab, &config, &Map::new(), &mut reasons));
    let (Some(mut plan), Some(family)) = (plan, family) else { return refused(reasons) };
    gguf::rename(&mut plan, architecture);
    plan.paired = architecture.paired;
    if architecture.norms_plus_one {
        plan.norm.weight_offset = 0.0;
    }
    if let Some(divisors) = rope_divisors {
        divide(&mut plan, &divisors, &mut reasons);
    }
    let assembled = assemble(&plan, Some(checkpoint.tensors()), None);
    let Assembled { mut graph, consumed, recipes, blocks, transposed, reasons: tensor_reasons } = assembled;
    reasons.extend(tensor_reasons);
    let known = |name: &str| consumed.contains(name) || rope_tensors.contains(name);
    let mut ahead = 0;
    for (name, tensor) in checkpoint.tensors().iter().filter(|(name, _)| !known(name)) {
        if is_ahead(name, &plan) {
            ahead += 1;
            continue;
        }
        let (name, shape) = (name.clone(), tensor.shape.clone());
        reasons.push(Reason::UnknownTensor { name, shape, class: family.class });
    }
    let Some(special) = special.filter(|_| reasons.is_empty()) else { return refused(reasons) };
    notes.extend(special.apply(&mut graph, plan.notes));
    notes.extend(note_of_values(&blocks));
    notes.extend(note_of_ahead(ahead, false));
    let header_bytes_read = checkpoint.header_bytes_read();
    let config_text = serde_json::to_string_pretty(&config).unwrap_or_default();
    match checkpoint.bind(&graph.tensors, recipes, blocks, &transposed) {
        Ok(weights) => Ok(Imported { graph, weights, header_bytes_read, config_text, notes }),
        Err(fault) => refused(vec![Reason::Weights(fault)]),
    }
}

/// Divides rotary frequencies by the factors that a file stores for them.
fn divide(plan: &mut Plan, divisors: &[f32], reasons: &mut Vec<Reason>) {
    for rope in &mut plan.ropes {
        if rope.inv_freq.len() != divisors.len() || divisors.iter().any(|by| !(by.is_finite() && *by > 0.0)) {
            let expected = format!("{} numbers above 0, one for each rotated pair", rope.inv_freq.len());
            let (key, found) = (gguf::ROPE_TENSORS[0].to_string(), format!("{} numbers", divisors.len()));
            return reasons.push(Reason::BadValue { key, expected, found });
        }
        rope.inv_freq.iter_mut().zip(divisors).for_each(|(freq, by)| *freq /= by);
    }
}

/// What is said of matrices in blocks that are packed as values.
fn note_of_values(blocks: &BTreeMap<TensorId, Blocks>) -> Option<String> {
    let mut kinds: BTreeMap<&str, usize> = BTreeMap::new();
    for own in blocks.values().filter(|own| own.kind.block() > 1 && own.format().is_none()) {
        *kinds.entry(own.kind.name()).or_default() += 1;
    }
    let listed: Vec<String> = kinds.iter().map(|(kind, count)| format!("{count} of {kind}")).collect();
    (!listed.is_empty()).then(|| {
        format!(
            "matrices that are not streamed as they are stored ({}) are computed as values of the precision: exact in fp32, rounded in \
             bf16",
            listed.join(", ")
        )
    })
}

/// Notes about tensors that the graph does not read, and the reasons to refuse them.
fn judge_extras(
    checkpoint: &Checkpoint,
    consumed: &BTreeSet<String>,
    extra: impl Fn(&str) -> Extra,
    plan: &Plan,
    class: &'static str,
) -> (Vec<String>, Vec<Reason>) {
    let (mut notes, mut reasons) = (vec![], vec![]);
    let (mut zero_biases, mut loose_scales, mut ahead) = (0, 0, 0);
    let mut left_out: BTreeMap<&str, (BTreeSet<&str>, usize)> = BTreeMap::new();
    let embed = plan.prefix.of(plan.names.embed);
    for (name, tensor) in checkpoint.tensors().iter().filter(|(name, _)| !consumed.contains(*name)) {
        let name = name.clone();
        reasons.push(match extra(&name) {
            Extra::Neutral => continue,
            Extra::Ignored(Ignored { prefix, what }) => {
                let (prefixes, tensors) = left_out.entry(what).or_default();
                prefixes.insert(prefix);
                *tensors += 1;
                continue;
            }
            Extra::Ahead => {
                ahead += 1;
                continue;
            }
            Extra::CacheScale => {
                loose_scales += 1;
                continue;
            }
            Extra::Bias => match checkpoint.is_zero(&name) {
                Ok(true) => {
                    zero_biases += 1;
                    continue;
                }
                Ok(false) => Reason::ExtraBias { name, class },
                Err(fault) => Reason::Weights(fault),
            },
            Extra::TiedHead => match checkpoint.same_bytes(&name, &embed) {
                Ok(true) => continue,
                Ok(false) => Reason::TiedHeadDiffers { name, embed: embed.clone() },
                Err(fault) => Reason::Weights(fault),
            },
            Extra::Unknown => Reason::UnknownTensor { name, shape: tensor.shape.clone(), class },
        });
    }
    for (what, (prefixes, tensors)) in left_out {
        let prefixes: Vec<String> = prefixes.into_iter().map(|prefix| format!("`{prefix}*`")).collect();
        notes.push(format!(
            "text alone is computed: {tensors} tensors of {what} ({}) are left out",
            prefixes.join(", ")
        ));
    }
    notes.extend(note_of_ahead(ahead, plan.ahead.is_joined));
    if zero_biases > 0 {
        notes.push(format!("{zero_biases} biases that a `{class}` does not have are all zero, and left out"));
    }
    if loose_scales > 0 {
        notes.push(format!(
            "{loose_scales} scales of cached keys and values have no scheme in the config, and are left out: the cache does not use them"
        ));
    }
    (notes, reasons)
}

/// Imports a config without weights: tensors named and shaped as the family's checkpoint has them, values synthetic.
///
/// # Errors
/// As [`import`].
pub fn import_config_only(config_text: &str, seed: u64) -> Result<Imported, ImportError> {
    let config = parse_object(Path::new("config.json"), config_text)?;
    let Opened { plan, text, mut reasons, .. } = open(&config, None);
    let special = plan.as_ref().and_then(|plan| special_tokens(plan.vocab, &text, &Map::new(), &mut reasons));
    let (Some(plan), Some(special), true) = (plan, special, reasons.is_empty()) else {
        return Err(ImportError::Refused { place: "config.json".to_string(), reasons });
    };
    let mut graph = assemble(&plan, None, None).graph;
    let notes = special.apply(&mut graph, plan.notes);
    let weights = Weights::synthetic(&graph, seed);
    let config_text = config_text.to_string();
    Ok(Imported { graph, weights, header_bytes_read: 0, config_text, notes })
}

fn parse_object(path: &Path, text: &str) -> Result<Map<String, Value>, ImportError> {
    let syntax = |detail: String| ImportError::Syntax { path: path.to_path_buf(), detail };
    match json::parse(text) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(syntax("expected an object at the top".to_string())),
        Err(error) => Err(syntax(error.to_string())),
    }
}

/// `quantization_config`, of the config or of the text model in it, which no longer have it.
fn take_quantisation(config: &mut Map<String, Value>) -> Option<Value> {
    let own = config.remove(quantised::KEY).filter(|value| !value.is_null());
    let text = config.get_mut("text_config").and_then(Value::as_object_mut);
    match (own, text.and_then(|text| text.remove(quantised::KEY)).filter(|value| !value.is_null())) {
        // Two that differ stay, and are refused as keys that are not null.
        (Some(own), Some(inner)) if own != inner => {
            config.insert(quantised::KEY.to_string(), inner);
            Some(own)
        }
        (own, inner) => own.or(inner),
    }
}

/// A config with its text model taken out of a wrapper.
struct Opened<'a> {
    family: Option<&'static Family>,
    /// As [`resolve`] gives it.
    plan: Option<Plan>,
    text: Cow<'a, Map<String, Value>>,
    reasons: Vec<Reason>,
}

/// The family and the plan of a config that may be one of a wrapper, for the tensors of `files`, where there are any.
fn open<'a>(config: &'a Map<String, Value>, files: Option<&BTreeMap<String, HeaderTensor>>) -> Opened<'a> {
    let Unwrapped { wrapper, text, mut reasons } = unwrap(config, files);
    if wrapper.is_some() && text.is_empty() {
        return Opened { family: None, plan: None, text, reasons };
    }
    let (family, mut plan, own) = resolve(&text);
    let Some(wrapper) = wrapper else {
        if let (Some(plan), Some(files)) = (&mut plan, files)
            && files.contains_key(&Prefix::NONE.of(plan.names.embed))
        {
            // As transformers 5 names modules inside.
            plan.prefix = Prefix::NONE;
        }
        return Opened { family, plan, text, reasons: own };
    };
    reasons.extend(own.into_iter().map(|reason| reason.within("text_config")));
    if let Some(plan) = &mut plan {
        plan.prefix = wrapper::layout(files, plan.names.embed);
        plan.ignored.extend(wrapper.beside);
    }
    let plan = plan.filter(|_| reasons.is_empty());
    Opened { family, plan, text, reasons }
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
    if let (Some(plan), Some(code)) = (&mut plan, config.get("auto_map").filter(|code| !code.is_null())) {
        plan.notes.push(not_run(code, family.class));
    }
    reasons.append(&mut reader.reasons);
    (Some(family), plan, reasons)
}

/// What a checkpoint that brings Python code of its own is told: it is computed as transformers computes it without
/// `trust_remote_code`, by the class that transformers has under the same name.
fn not_run(code: &Value, class: &str) -> String {
    let named = code.get("AutoModelForCausalLM").and_then(Value::as_str).map(|name| format!(" (`{}`)", short(name)));
    format!(
        "the checkpoint brings Python code of its own in `auto_map`{}, which is not run: this is the `{class}` of \
         transformers, as it is computed without `trust_remote_code`",
        named.unwrap_or_default()
    )
}

/// The beginning of a stranger's text, for a note.
fn short(text: &str) -> String {
    let start: String = text.chars().take(80).collect();
    if start.len() == text.len() { start } else { start + "..." }
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

/// What families lack that are known and not imported yet, by parts of their names without underscores.
const LACKING: &[(&[&str], &str)] = &[
    (&["deepseekv4"], "(compressed sparse attention and hyper-connections) is not supported yet"),
    (&["qwen4exp"], "(a sparse index, hyper-connections and n-gram embeddings) is not supported yet"),
    (&["glmmoedsa", "deepseekv32"], "(latent attention with a sparse index) is not supported yet"),
    (&["kimilinear"], "(Kimi's delta attention and latent attention) is not supported yet"),
    (&["deepseekv2", "deepseekv3", "glm4moelite", "mistral4", "kimik2"], "(latent attention) is not supported yet"),
    (&["gemma4"], "(heads that differ by layer, and keys that are values or shared) is not supported yet"),
    (&["gemma3n"], "(several streams, embeddings per layer and shared keys) is not supported yet"),
    (&["llama4"], "(chunked attention) is not supported yet"),
    (&["mimov2"], "(heads that differ by layer, values narrower than keys) is not supported yet"),
    (&["lfm3"], "(a gate for each head, and two rotary tables beside short convolutions) is not supported yet"),
    (&["bamba", "zamba2", "mamba2"], "(Mamba-2 layers of another kind) is not supported yet"),
];

fn why_unsupported(class: &str) -> &'static str {
    let lower = class.to_lowercase();
    let has = |parts: &[&str]| parts.iter().any(|part| lower.contains(part));
    let plain: String = lower.chars().filter(char::is_ascii_alphanumeric).collect();
    if let Some((_, why)) = LACKING.iter().find(|(parts, _)| parts.iter().any(|part| plain.contains(part))) {
        why
    } else if has(&[
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
    /// Beside the text model.
    Ignored(Ignored),
    /// A part of what predicts further tokens.
    Ahead,
    /// A scale of cached keys, values or queries that no scheme asks for.
    CacheScale,
    /// A bias of a linear that has none in this family: AutoGPTQ writes zeros.
    Bias,
    /// A stored copy of the embedding; neutral if its bytes are the embedding's.
    TiedHead,
    Unknown,
}

/// Classifies a tensor that the graph does not read.
fn extra_tensor(name: &str, plan: &Plan, quantised: bool, graph: &ModelGraph) -> Extra {
    let is_buffer = |suffix: &str| name.strip_suffix(suffix).is_some_and(|path| path.is_empty() || path.ends_with('.'));
    // Old checkpoints store what transformers recomputes: rotary frequencies, and GPT-NeoX its causal mask.
    let neox = plan.names.layers == "gpt_neox.layers";
    let layers = plan.prefix.of(plan.names.layers);
    let mask = |suffix: &str| neox && name.starts_with(&layers) && is_buffer(suffix);
    if let Some(ignored) = plan.ignored.iter().find(|ignored| name.starts_with(ignored.prefix)) {
        Extra::Ignored(*ignored)
    } else if is_buffer("rotary_emb.inv_freq") || mask("attention.bias") || mask("attention.masked_bias") {
        Extra::Neutral
    } else if is_ahead(name, plan) {
        Extra::Ahead
    } else if plan.tied && plan.names.heads.iter().any(|head| plan.prefix.of(head) == name) {
        Extra::TiedHead
    } else if quantised && is_cache_scale(name, &layers) {
        Extra::CacheScale
    } else if quantised && is_bias_of_linear(name, graph) {
        Extra::Bias
    } else {
        Extra::Unknown
    }
}

/// What is said of the tensors of what predicts further tokens; `is_draft`: they can be one.
fn note_of_ahead(count: usize, is_draft: bool) -> Option<String> {
    let draft = if is_draft { "; `--draft mtp` proposes tokens with them" } else { "" };
    let note = || {
        format!(
            "{count} tensors of layers that predict further tokens (MTP) are left out: no logit depends on them{draft}"
        )
    };
    (count > 0).then(note)
}

/// Whether a tensor is one of what predicts further tokens: of a layer after the last one, or by its name.
fn is_ahead(name: &str, plan: &Plan) -> bool {
    let Ahead { layers, prefix, is_joined: _ } = plan.ahead;
    let first = plan.layers.len() as u32;
    let of_layer = |rest: &str| {
        let index = rest.split_once('.').and_then(|(index, _)| index.parse::<u32>().ok());
        index.is_some_and(|index| (first..first.saturating_add(layers)).contains(&index))
    };
    let beyond = name
        .strip_prefix(&plan.prefix.of(plan.names.layers))
        .and_then(|rest| rest.strip_prefix('.'))
        .is_some_and(of_layer);
    beyond || prefix.is_some_and(|prefix| name.starts_with(prefix))
}

/// Whether a tensor has one of the names that vLLM knows for scales of a cache (`maybe_remap_kv_scale_name`).
fn is_cache_scale(name: &str, layers: &str) -> bool {
    let Some((module, last)) = name.rsplit_once('.') else { return false };
    let of_cache = matches!(last, "k_scale" | "v_scale" | "q_scale" | "kv_scale" | "prob_scale");
    let of_output =
        last == "output_scale" && ["q_proj", "k_proj", "v_proj", "qkv_proj"].iter().any(|end| module.ends_with(end));
    name.starts_with(layers) && (of_cache || of_output)
}

fn is_bias_of_linear(name: &str, graph: &ModelGraph) -> bool {
    name.strip_suffix("bias").is_some_and(|module| {
        let weight = format!("{module}weight");
        graph
            .tensors
            .iter()
            .enumerate()
            .any(|(at, tensor)| tensor.name == weight && graph.formats.contains_key(&TensorId::from(at)))
    })
}

/// Distinct ids that may end a text. Published checkpoints name up to ten. A device looks for eight by itself, and more are
/// looked for by the process that reads its tokens.
const EOS_MAX: usize = 64;

/// What config.json and generation_config.json say about special tokens.
struct Special {
    bos: Option<u32>,
    /// Ascending.
    eos: Vec<u32>,
    note: Option<String>,
}

impl Special {
    /// Puts the ids into the graph, and appends the notes about them.
    fn apply(self, graph: &mut ModelGraph, mut notes: Vec<String>) -> Vec<String> {
        (graph.bos, graph.eos) = (self.bos, self.eos);
        notes.extend(self.note);
        notes
    }
}

/// Special tokens from generation_config.json, else config.json.
///
/// `eos_token_id` is an integer or a list of them, as transformers makes a tensor of 64-bit integers from it; anything else is
/// a reason, where transformers rounds (1.5), raises ("x", 2^70) or asks Python (true). Ids outside the vocabulary can never be
/// produced: transformers goes on to the maximum length, and so is it here, with a note.
fn special_tokens(
    vocab: u32,
    config: &Map<String, Value>,
    generation: &Map<String, Value>,
    reasons: &mut Vec<Reason>,
) -> Option<Special> {
    let files = [("generation_config.json", generation), ("config.json", config)];
    let given = |key: &str| {
        files.into_iter().find_map(|(file, map)| Some((file, map.get(key).filter(|value| !value.is_null())?)))
    };
    let inside = |id: i64| u32::try_from(id).ok().filter(|id| *id < vocab);
    let bos = given("bos_token_id").and_then(|(_, id)| id.as_i64()).and_then(inside);
    let Some((file, value)) = given("eos_token_id") else { return Some(Special { bos, eos: vec![], note: None }) };
    let listed = match value {
        Value::Array(ids) => ids.as_slice(),
        single => std::slice::from_ref(single),
    };
    let bad = |found: &Value| Reason::BadValue {
        key: format!("eos_token_id` of `{file}"),
        expected: "a token id, or a list of them".to_string(),
        found: found.to_string(),
    };
    if let Some(found) = listed.iter().find(|id| id.as_i64().is_none()) {
        reasons.push(bad(found));
        return None;
    }
    let (mut eos, mut outside) = (vec![], vec![]);
    for id in listed.iter().filter_map(Value::as_i64) {
        match inside(id) {
            Some(id) => eos.push(id),
            None => outside.push(id),
        }
    }
    eos.sort_unstable();
    eos.dedup();
    if eos.len() > EOS_MAX {
        reasons.push(Reason::TooManyIds { key: "eos_token_id", file, found: eos.len(), most: EOS_MAX });
        return None;
    }
    let note = outside.first().map(|first| {
        let more = match outside.len() - 1 {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let so = if eos.is_empty() { ": a text ends at its maximum length alone" } else { "" };
        format!("`eos_token_id` {first}{more} of `{file}` is outside the vocabulary of {vocab} and never comes{so}")
    });
    Some(Special { bos, eos, note })
}

#[cfg(test)]
mod tests;
