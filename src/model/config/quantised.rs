//! Owns `quantization_config`: which linears of a checkpoint are stored as codes, in which layout, and which tensors they are made of.
//!
//! Closed, as the rest of the importer: each method has its table of keys, and a key that is in none refuses the import. Layouts and
//! their traps are described in docs/formats.md. Weights are computed as they are stored. Activations are never quantised: a note says so
//! where a checkpoint asks for it.

use std::collections::{BTreeMap, BTreeSet};

use fancy_regex::Regex;
use safetensors::Dtype;
use serde_json::{Map, Value, json};

use crate::dtype::DType;
use crate::format::{Code, Format, Groups, ScaleCode};
use crate::model::coded::{CodeLayout, Component, GroupIndex, Recipe, ScaleLayout, Whole, ZeroLayout};
use crate::model::config::reason::Reason;
use crate::model::weights::HeaderTensor;

/// The key of `config.json`.
pub const KEY: &str = "quantization_config";
/// ModelOpt's own file, beside a `config.json` without the key.
pub const MODELOPT_FILE: &str = "hf_quant_config.json";

/// Which linears of a checkpoint are stored as codes.
#[derive(Debug)]
pub struct Quantisation {
    method: Method,
    pub notes: Vec<String>,
    /// Whether attention has a scale for its cached keys and one for its values.
    pub cache_scales: bool,
}

#[derive(Debug)]
enum Method {
    CompressedTensors {
        groups: Vec<(Vec<Target>, Scheme)>,
        ignore: Vec<Target>,
    },
    /// All linears of the layers but those that are named.
    Layers {
        scheme: Scheme,
        skip: Vec<Skip>,
        head: bool,
    },
    /// The stacked experts alone, in blocks (gpt-oss).
    BlocksOfExperts,
}

/// How one linear is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    /// compressed-tensors: words along k.
    Packed {
        bits: u32,
        group: Option<u32>,
        zeros: bool,
        g_idx: bool,
    },
    /// A byte a weight with `weight_scale`.
    Bytes {
        code: Code,
        scales: ScalesOf,
        zeros: bool,
    },
    /// Fp8 of transformers and of vLLM: `weight_scale_inv` or `weight_scale`, which both multiply.
    Fp8 {
        block: Option<[u32; 2]>,
    },
    /// Two floats of 4 bits in a byte; `mx`: scales are powers of two, else e4m3 with one scale for all.
    Fp4 {
        mx: bool,
        modelopt: bool,
    },
    Gptq {
        bits: u32,
        group: Option<u32>,
        v2: bool,
        act_order: bool,
        symmetric: bool,
    },
    Awq {
        group: Option<u32>,
    },
}

/// What shares a scale of `weight_scale`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScalesOf {
    Matrix,
    Row,
    Group(u32),
    Block([u32; 2]),
}

/// A module by class, by its whole name, or by a pattern.
#[derive(Debug)]
enum Target {
    Linear,
    Name(String),
    Pattern(Regex),
}

impl Target {
    fn matches(&self, module: &str) -> bool {
        match self {
            Target::Linear => true,
            Target::Name(name) => name == module,
            Target::Pattern(pattern) => pattern.is_match(module).unwrap_or(false),
        }
    }
}

/// An entry of `modules_to_not_convert`: the whole name, a prefix that ends with a part of it, or its end.
#[derive(Debug)]
struct Skip(String);

impl Skip {
    fn matches(&self, module: &str) -> bool {
        let Skip(name) = self;
        module.strip_prefix(name.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
            || module.ends_with(name.as_str())
    }
}

/// Reads keys of an object, each once, and refuses those that nothing asked for.
struct Keys<'a> {
    path: String,
    map: &'a Map<String, Value>,
    asked: BTreeSet<&'static str>,
    reasons: &'a mut Vec<Reason>,
}

impl<'a> Keys<'a> {
    fn new(path: impl Into<String>, map: &'a Map<String, Value>, reasons: &'a mut Vec<Reason>) -> Keys<'a> {
        Keys { path: path.into(), map, asked: BTreeSet::new(), reasons }
    }

    /// The value of a key; null counts as absent.
    fn get(&mut self, key: &'static str) -> Option<&'a Value> {
        self.asked.insert(key);
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn bad(&mut self, key: &str, expected: impl Into<String>) {
        let found = self.map.get(key).map_or("nothing".to_string(), Value::to_string);
        let key = format!("{}.{key}", self.path);
        self.reasons.push(Reason::BadValue { key, expected: expected.into(), found });
    }

    fn flag(&mut self, key: &'static str, absent: bool) -> bool {
        match self.get(key) {
            None => absent,
            Some(Value::Bool(flag)) => *flag,
            Some(_) => {
                self.bad(key, "true or false");
                absent
            }
        }
    }

    fn text(&mut self, key: &'static str) -> Option<&'a str> {
        let value = self.get(key)?;
        if value.as_str().is_none() {
            self.bad(key, "a string");
        }
        value.as_str()
    }

    fn number(&mut self, key: &'static str) -> Option<i64> {
        let value = self.get(key)?;
        if value.as_i64().is_none() {
            self.bad(key, "an integer");
        }
        value.as_i64()
    }

    fn names(&mut self, key: &'static str) -> Vec<&'a str> {
        let Some(value) = self.get(key) else { return vec![] };
        let names = value.as_array().map(|list| list.iter().map(Value::as_str).collect::<Option<Vec<_>>>());
        match names {
            Some(Some(names)) => names,
            _ => {
                self.bad(key, "a list of names");
                vec![]
            }
        }
    }

    /// Keys that change nothing, whatever they say.
    fn neutral(&mut self, keys: &[&'static str]) {
        self.asked.extend(keys);
    }

    /// Keys that change nothing where they are absent, false, zero or empty.
    fn off(&mut self, keys: &[&'static str]) {
        for &key in keys {
            let off = |value: &Value| match value {
                Value::Bool(on) => !on,
                Value::Array(list) => list.is_empty(),
                Value::Object(map) => map.is_empty(),
                Value::Number(n) => n.as_f64() == Some(0.0),
                _ => false,
            };
            if self.get(key).is_some_and(|value| !off(value)) {
                self.bad(key, "nothing");
            }
        }
    }

    /// Refuses keys that were not asked for.
    fn end(self) {
        let unknown = self.map.keys().filter(|key| !self.asked.contains(key.as_str()));
        for key in unknown {
            let detail = format!("key `{}.{key}` is unknown", self.path);
            self.reasons.push(Reason::Quantised { detail });
        }
    }
}

/// Reads `quantization_config`; `None`: the reasons say why not.
pub fn read(config: &Value, reasons: &mut Vec<Reason>) -> Option<Quantisation> {
    let Some(map) = config.as_object() else {
        let (key, found) = (KEY.to_string(), config.to_string());
        reasons.push(Reason::BadValue { key, expected: "an object".to_string(), found });
        return None;
    };
    let before = reasons.len();
    let mut keys = Keys::new(KEY, map, reasons);
    let refuse = |detail: &str| Reason::Quantised { detail: detail.to_string() };
    let read = match keys.text("quant_method") {
        Some("compressed-tensors") => compressed_tensors(keys),
        Some("fp8") => fp8(keys),
        Some("fbgemm_fp8") => fbgemm(keys),
        Some("gptq") => gptq(keys),
        Some("awq") => awq(keys),
        Some("modelopt") => modelopt(keys),
        Some("bitsandbytes") => {
            reasons.push(refuse(
                "bitsandbytes is not supported: take the checkpoint that it was made from, and let `[precision] weights` \
                 round it, or quantise that with llm-compressor, GPTQModel or AutoAWQ",
            ));
            return None;
        }
        Some("mxfp4") => mxfp4(keys),
        Some(other) => {
            let detail = format!(
                "method `{other}` is not supported: expected compressed-tensors, fp8, fbgemm_fp8, gptq, awq, modelopt or mxfp4"
            );
            reasons.push(Reason::Quantised { detail });
            return None;
        }
        None => {
            reasons.push(Reason::MissingKey { key: format!("{KEY}.quant_method") });
            return None;
        }
    };
    read.filter(|_| reasons.len() == before)
}

fn skips(names: Vec<&str>) -> Vec<Skip> {
    names.into_iter().map(|name| Skip(name.to_string())).collect()
}

/// A method with one scheme for the linears of the layers.
fn layers(scheme: Scheme, skip: Vec<Skip>, notes: Vec<String>) -> Option<Quantisation> {
    Some(Quantisation { method: Method::Layers { scheme, skip, head: false }, notes, cache_scales: false })
}

/// The note for a checkpoint that asks for quantised activations.
fn activations(what: &str) -> String {
    format!("the checkpoint asks for activations in {what}; here they stay as they are: weights alone are quantised")
}

fn fp8(mut keys: Keys<'_>) -> Option<Quantisation> {
    if let Some(fmt) = keys.text("fmt").filter(|fmt| !matches!(*fmt, "e4m3" | "float8_e4m3fn")) {
        let _ = fmt;
        keys.bad("fmt", "e4m3");
    }
    let scheme = keys.text("activation_scheme").unwrap_or("dynamic");
    if !matches!(scheme, "dynamic" | "static") {
        keys.bad("activation_scheme", "dynamic or static");
    }
    let block = match keys.get("weight_block_size") {
        None => None,
        Some(value) => match block_of(value) {
            Some(block) => Some(block),
            None => {
                keys.bad("weight_block_size", "two extents");
                None
            }
        },
    };
    // vLLM's name for the same.
    let names = [keys.names("modules_to_not_convert"), keys.names("ignored_layers")].concat();
    let skip = skips(names);
    if keys.text("scale_fmt").is_some_and(|format| format != "ue8m0") {
        keys.bad("scale_fmt", "ue8m0: scales are used as they are stored");
    }
    keys.off(&["dequantize"]);
    // AutoFP8: whose outputs have scales, which are named where they are left out.
    keys.neutral(&["kv_cache_quant_targets"]);
    keys.end();
    layers(Scheme::Fp8 { block }, skip, vec![activations(&format!("fp8 ({scheme})"))])
}

fn block_of(value: &Value) -> Option<[u32; 2]> {
    let extents = value.as_array()?.iter().map(|n| u32::try_from(n.as_u64()?).ok().filter(|n| *n > 0));
    extents.collect::<Option<Vec<u32>>>()?.try_into().ok()
}

fn fbgemm(mut keys: Keys<'_>) -> Option<Quantisation> {
    keys.neutral(&["activation_scale_ub"]);
    let skip = skips(keys.names("modules_to_not_convert"));
    keys.end();
    let scheme = Scheme::Bytes { code: Code::E4m3, scales: ScalesOf::Row, zeros: false };
    layers(scheme, skip, vec![activations("fp8 (dynamic per token)")])
}

/// A group size of GPTQ and AWQ: -1 is all of a row.
fn group_of(keys: &mut Keys<'_>) -> Option<u32> {
    match keys.number("group_size") {
        Some(-1) => None,
        Some(size) if (1..=1 << 20).contains(&size) => Some(size as u32),
        _ => {
            keys.bad("group_size", "-1, or a number of columns");
            None
        }
    }
}

fn gptq(mut keys: Keys<'_>) -> Option<Quantisation> {
    let bits = keys.number("bits").unwrap_or(0);
    if !matches!(bits, 4 | 8) {
        keys.bad("bits", "4 or 8 (fields of other widths are not supported)");
    }
    let group = group_of(&mut keys);
    let formats = [keys.text("checkpoint_format"), keys.text("format")];
    let mut named = formats.into_iter().flatten();
    let format = named.next().unwrap_or("gptq");
    if !matches!(format, "gptq" | "gptq_v2") || named.any(|other| other != format) {
        keys.bad("checkpoint_format", "gptq or gptq_v2");
    }
    let act_order = keys.flag("desc_act", false);
    if keys.text("pack_dtype").is_some_and(|dtype| dtype != "int32") {
        keys.bad("pack_dtype", "int32");
    }
    keys.off(&["dynamic", "is_marlin_format", "rotation", "adapter", "lora"]);
    let head = keys.flag("lm_head", false);
    if keys.get("modules_in_block_to_quantize").is_some() {
        keys.bad("modules_in_block_to_quantize", "nothing: all linears of a layer are quantised");
    }
    // Zero points are always read. Where the config names `sym`, they have to agree with it.
    let symmetric = keys.flag("sym", false);
    keys.neutral(&[
        "damp_percent",
        "damp_auto_increment",
        "static_groups",
        "true_sequential",
        "model_name_or_path",
        "model_file_base_name",
        "meta",
        "exllama_config",
        "use_exllama",
        "disable_exllama",
        "max_input_length",
        "dataset",
        "tokenizer",
        "batch_size",
        "block_name_to_quantize",
        "module_name_preceding_first_block",
        "cache_block_outputs",
        "model_seqlen",
        "pad_token_id",
        "use_cuda_fp16",
        "backend",
        "mse",
        "parallel_packing",
        "quantizer",
        "uri",
        "act_group_aware",
        "hyb_act",
        "version",
    ]);
    keys.end();
    let scheme = Scheme::Gptq { bits: bits as u32, group, v2: format == "gptq_v2", act_order, symmetric };
    Some(Quantisation { method: Method::Layers { scheme, skip: vec![], head }, notes: vec![], cache_scales: false })
}

fn awq(mut keys: Keys<'_>) -> Option<Quantisation> {
    if keys.number("bits").or(keys.number("w_bit")) != Some(4) {
        keys.bad("bits", "4");
    }
    let group = group_of(&mut keys);
    if keys.text("version").is_some_and(|version| !version.eq_ignore_ascii_case("gemm")) {
        keys.bad("version", "gemm");
    }
    if !keys.flag("zero_point", true) {
        keys.bad("zero_point", "true");
    }
    keys.off(&["do_fuse"]);
    keys.neutral(&["fuse_max_seq_len", "modules_to_fuse", "backend", "exllama_config"]);
    let skip = skips(keys.names("modules_to_not_convert"));
    keys.end();
    layers(Scheme::Awq { group }, skip, vec![])
}

/// The experts of gpt-oss in blocks. The class of transformers stores nothing else so, whatever `modules_to_not_convert` lists.
fn mxfp4(mut keys: Keys<'_>) -> Option<Quantisation> {
    keys.names("modules_to_not_convert");
    keys.off(&["dequantize"]);
    keys.end();
    Some(Quantisation { method: Method::BlocksOfExperts, notes: vec![], cache_scales: false })
}

/// A target, or an entry of `ignore`, of compressed-tensors.
fn target(name: &str, key: &str, keys: &mut Keys<'_>) -> Option<Target> {
    let Some(pattern) = name.strip_prefix("re:") else {
        return Some(if name == "Linear" { Target::Linear } else { Target::Name(name.to_string()) });
    };
    // `re.match`: from the beginning, not to the end.
    match Regex::new(&format!("^(?:{pattern})")) {
        Ok(pattern) => Some(Target::Pattern(pattern)),
        Err(_) => {
            keys.bad(key, "patterns of Python's `re`");
            None
        }
    }
}

fn compressed_tensors(mut keys: Keys<'_>) -> Option<Quantisation> {
    if keys.text("quantization_status").is_some_and(|status| status != "compressed") {
        keys.bad("quantization_status", "compressed");
    }
    keys.neutral(&["global_compression_ratio", "version"]);
    keys.off(&["moe_sparsity_config", "transform_config"]);
    let cache_scales = cache_scheme(&mut keys);
    match keys.get("sparsity_config") {
        Some(Value::Object(map)) if map.is_empty() || map.get("format") == Some(&Value::from("dense")) => {}
        Some(_) => keys.bad("sparsity_config", "nothing, or the format `dense`"),
        None => {}
    }
    let format = keys.text("format");
    let ignore: Vec<Target> =
        keys.names("ignore").into_iter().filter_map(|name| target(name, "ignore", &mut keys)).collect();
    let mut groups = vec![];
    let mut notes = vec![];
    match keys.get("config_groups") {
        Some(Value::Object(map)) => {
            for (name, group) in map {
                let path = format!("{KEY}.config_groups.{name}");
                let Some(group) = group.as_object() else {
                    keys.bad("config_groups", "an object for each group");
                    continue;
                };
                let inner = Keys::new(path, group, keys.reasons);
                if let Some((targets, scheme, note)) = group_scheme(inner, format) {
                    groups.push((targets, scheme));
                    notes.extend(note);
                }
            }
        }
        _ => keys.bad("config_groups", "an object of groups"),
    }
    keys.end();
    notes.dedup();
    notes.extend(cache_scales.then(|| CACHE_NOTE.to_string()));
    Some(Quantisation { method: Method::CompressedTensors { groups, ignore }, notes, cache_scales })
}

/// The note for a checkpoint with scales for its cache.
const CACHE_NOTE: &str =
    "the checkpoint has scales for keys and values in fp8: `cache = \"fp8\"` of `[precision]` uses them";

/// Whether the checkpoint has a scale for the keys and one for the values of each layer, for a cache in fp8: the only scheme that
/// there is.
fn cache_scheme(keys: &mut Keys<'_>) -> bool {
    let Some(asked) = keys.get("kv_cache_scheme") else { return false };
    let Some(scheme) = asked.as_object() else {
        keys.bad("kv_cache_scheme", "nothing, or an object");
        return false;
    };
    let mut inner = Keys::new(format!("{KEY}.kv_cache_scheme"), scheme, keys.reasons);
    inner.neutral(&["observer", "observer_kwargs", "scale_dtype", "zp_dtype"]);
    inner.off(&["dynamic", "group_size", "block_structure", "actorder"]);
    for (key, expected) in [("num_bits", Value::from(8)), ("symmetric", Value::from(true))] {
        if inner.get(key) != Some(&expected) {
            inner.bad(key, expected.to_string());
        }
    }
    for (key, expected) in [("type", "float"), ("strategy", "tensor")] {
        if inner.text(key) != Some(expected) {
            inner.bad(key, expected);
        }
    }
    inner.end();
    true
}

/// Targets and scheme of a config group, and what has to be said of its activations.
fn group_scheme(mut keys: Keys<'_>, whole: Option<&str>) -> Option<(Vec<Target>, Scheme, Option<String>)> {
    let note = keys.get("input_activations").map(|asked| {
        let of = |key: &str| asked.get(key).map_or("?".to_string(), |v| v.to_string().replace('"', ""));
        activations(&format!("{} bits ({}, {})", of("num_bits"), of("type"), of("strategy")))
    });
    if keys.get("output_activations").is_some() {
        keys.bad("output_activations", "nothing");
    }
    let targets: Vec<Target> =
        keys.names("targets").into_iter().filter_map(|name| target(name, "targets", &mut keys)).collect();
    let format = keys.text("format").or(whole).unwrap_or_default();
    let path = format!("{}.weights", keys.path);
    let Some(weights) = keys.get("weights").and_then(Value::as_object) else {
        keys.bad("weights", "an object");
        return None;
    };
    let mut inner = Keys::new(path, weights, keys.reasons);
    let scheme = weights_scheme(&mut inner, format);
    inner.end();
    keys.end();
    Some((targets, scheme?, note))
}

fn weights_scheme(keys: &mut Keys<'_>, format: &str) -> Option<Scheme> {
    keys.neutral(&["observer", "observer_kwargs", "scale_dtype", "zp_dtype"]);
    keys.off(&["dynamic"]);
    let (bits, kind) = (keys.number("num_bits").unwrap_or(0), keys.text("type").unwrap_or("int"));
    let symmetric = keys.flag("symmetric", true);
    let group = keys.number("group_size").filter(|size| *size != -1);
    let strategy = keys.text("strategy").unwrap_or(if group.is_some() { "group" } else { "tensor" });
    let block = keys.get("block_structure").and_then(block_of);
    let g_idx = match keys.get("actorder") {
        None | Some(Value::Bool(false)) => false,
        Some(Value::String(order)) if matches!(order.as_str(), "static" | "weight") => false,
        Some(Value::String(order)) if matches!(order.as_str(), "group" | "dynamic") => true,
        Some(Value::Bool(true)) => true,
        Some(_) => {
            keys.bad("actorder", "group, weight, static or nothing");
            false
        }
    };
    let size = group.and_then(|size| u32::try_from(size).ok()).filter(|size| *size > 0);
    let scales = match (strategy, size, block) {
        ("tensor", _, _) => Some(ScalesOf::Matrix),
        ("channel", _, _) => Some(ScalesOf::Row),
        ("group" | "tensor_group", Some(size), _) => Some(ScalesOf::Group(size)),
        ("block", _, Some(block)) => Some(ScalesOf::Block(block)),
        _ => {
            keys.bad("strategy", "tensor, channel, group with a `group_size`, or block with a `block_structure`");
            None
        }
    }?;
    let scheme = match (format, kind, bits, scales) {
        ("pack-quantized", "int", 4 | 8, ScalesOf::Row) => {
            Some(Scheme::Packed { bits: bits as u32, group: None, zeros: !symmetric, g_idx })
        }
        ("pack-quantized", "int", 4 | 8, ScalesOf::Group(size)) => {
            Some(Scheme::Packed { bits: bits as u32, group: Some(size), zeros: !symmetric, g_idx })
        }
        ("int-quantized" | "naive-quantized", "int", 8, scales) if !g_idx && !matches!(scales, ScalesOf::Block(_)) => {
            Some(Scheme::Bytes { code: Code::Int8, scales, zeros: !symmetric })
        }
        ("float-quantized" | "naive-quantized", "float", 8, scales) if symmetric && !g_idx => {
            Some(Scheme::Bytes { code: Code::E4m3, scales, zeros: false })
        }
        ("nvfp4-pack-quantized", "float", 4, ScalesOf::Group(16)) if symmetric => {
            Some(Scheme::Fp4 { mx: false, modelopt: false })
        }
        ("mxfp4-pack-quantized", "float", 4, ScalesOf::Group(32)) if symmetric => {
            Some(Scheme::Fp4 { mx: true, modelopt: false })
        }
        _ => None,
    };
    if scheme.is_none() {
        let detail = format!(
            "`{}`: weights of {bits} bits ({kind}, {strategy}, symmetric {symmetric}) in the format `{format}` are not \
             supported",
            keys.path
        );
        keys.reasons.push(Reason::Quantised { detail });
    }
    scheme
}

/// Linears as ModelOpt exports them. In fp8 they have a byte for each weight, with `weight_scale` for the matrix or, by channel, for each row.
/// In 4 bits, two codes in a byte of `weight`, the first one in the low nibble. NVFP4 has `weight_scale` in
/// e4m3 for 16 columns, times `weight_scale_2`. MXFP4 has `weight_scale` in e8m0 for 32 columns; ModelOpt writes no `config_groups` for it,
/// and its name in lower case if activations are not fp8 (`modelopt/torch/export/convert_hf_config.py`, `quant_utils.py` and
/// `quantization/qtensor/mxfp4_tensor.py` of NVIDIA/Model-Optimizer).
fn modelopt(mut keys: Keys<'_>) -> Option<Quantisation> {
    let fp4 = |mx| Scheme::Fp4 { mx, modelopt: true };
    let fp8 = |scales| Scheme::Bytes { code: Code::E4m3, scales, zeros: false };
    let (scheme, asked) = match keys.text("quant_algo") {
        Some("FP8") => (fp8(ScalesOf::Matrix), Some("fp8 (static)")),
        Some("FP8_PER_CHANNEL_PER_TOKEN") => (fp8(ScalesOf::Row), Some("fp8 (dynamic per token)")),
        Some("NVFP4") => (fp4(false), Some("fp4 (static)")),
        Some("W4A16_NVFP4") => (fp4(false), None),
        Some("mxfp4" | "MXFP4") => (fp4(true), Some("fp4 (dynamic), unless its recipe left them as they are")),
        Some("W4A8_MXFP4_FP8") => (fp4(true), Some("fp8 (static)")),
        _ => {
            keys.bad("quant_algo", "NVFP4, W4A16_NVFP4, mxfp4, W4A8_MXFP4_FP8, FP8 or FP8_PER_CHANNEL_PER_TOKEN");
            (fp4(false), None)
        }
    };
    // Bits of a weight, and columns of a group.
    let (bits, group_k) = match scheme {
        Scheme::Fp4 { mx, .. } => (4, Some(if mx { 32 } else { 16 })),
        _ => (8, None),
    };
    keys.neutral(&["producer"]);
    let cache_scales = modelopt_cache(&mut keys);
    let ignore: Vec<Target> = keys.names("ignore").into_iter().map(glob).collect();
    let mut targets = vec![];
    match keys.get("config_groups") {
        Some(Value::Object(map)) => {
            for (name, group) in map {
                let Some(group) = group.as_object() else {
                    keys.bad("config_groups", "an object for each group");
                    continue;
                };
                let mut inner = Keys::new(format!("{KEY}.config_groups.{name}"), group, keys.reasons);
                inner.neutral(&["input_activations"]);
                let weights = inner.get("weights");
                let is = |key: &str, value: Value| weights.and_then(|w| w.get(key)) == Some(&value);
                let grouped = group_k.is_none_or(|group_k: u32| is("group_size", group_k.into()));
                if !is("num_bits", bits.into()) || !grouped || !is("type", "float".into()) {
                    let groups = group_k.map(|group_k| format!(" in groups of {group_k}")).unwrap_or_default();
                    inner.bad("weights", format!("floats of {bits} bits{groups}"));
                }
                let named = inner.names("targets");
                targets.extend(named.into_iter().filter_map(|name| target(name, "targets", &mut inner)));
                inner.end();
            }
        }
        None if !matches!(scheme, Scheme::Fp4 { mx: false, .. }) => targets.push(Target::Linear),
        _ => keys.bad("config_groups", "an object of groups"),
    }
    keys.end();
    let groups = vec![(targets, scheme)];
    let mut notes: Vec<String> = asked.map(activations).into_iter().collect();
    notes.extend(cache_scales.then(|| CACHE_NOTE.to_string()));
    Some(Quantisation { method: Method::CompressedTensors { groups, ignore }, notes, cache_scales })
}

/// Whether a checkpoint of ModelOpt has scales for a cache in fp8.
fn modelopt_cache(keys: &mut Keys<'_>) -> bool {
    let by_name = keys.text("kv_cache_quant_algo");
    if by_name.is_some_and(|name| name != "FP8") {
        keys.bad("kv_cache_quant_algo", "FP8, or nothing");
    }
    let scheme = match keys.get("kv_cache_scheme") {
        None => None,
        Some(Value::Object(map)) if map.is_empty() => None,
        Some(scheme) => Some(scheme),
    };
    if let Some(scheme) = scheme {
        let is = |key: &str, value: Value| scheme.get(key).is_none_or(|found| *found == value);
        if !is("num_bits", 8.into()) || !is("type", "float".into()) || !is("dynamic", false.into()) {
            keys.bad("kv_cache_scheme", "floats of 8 bits, not dynamic");
        }
    }
    by_name == Some("FP8") || scheme.is_some()
}

/// What `hf_quant_config.json`, ModelOpt's own file, says, in the form of `quantization_config`. Other keys keep their names, so that unknown ones
/// are refused.
pub fn of_modelopt_file(file: &Map<String, Value>) -> Value {
    let mut config = Map::from_iter([("quant_method".to_string(), Value::from("modelopt"))]);
    for (key, value) in file {
        let Value::Object(inner) = value else {
            config.insert(key.clone(), value.clone());
            continue;
        };
        if key != "quantization" {
            config.insert(key.clone(), value.clone());
            continue;
        }
        for (key, value) in inner {
            match key.as_str() {
                "exclude_modules" => config.insert("ignore".to_string(), value.clone()),
                "group_size" if value.is_null() => None,
                "group_size" => {
                    let weights = json!({ "num_bits": 4, "type": "float", "group_size": value });
                    let groups = json!({ "group_0": { "targets": ["Linear"], "weights": weights } });
                    config.insert("config_groups".to_string(), groups)
                }
                key => config.insert(key.to_string(), value.clone()),
            };
        }
    }
    Value::Object(config)
}

/// A name with `*` for any text, as ModelOpt writes them.
fn glob(name: &str) -> Target {
    if !name.contains('*') {
        return Target::Name(name.to_string());
    }
    let parts: Vec<String> = name.split('*').map(|part| fancy_regex::escape(part).into_owned()).collect();
    match Regex::new(&format!("^{}$", parts.join(".*"))) {
        Ok(pattern) => Target::Pattern(pattern),
        Err(_) => Target::Name(name.to_string()),
    }
}

impl Quantisation {
    /// How the linear called `module` is stored; `None`: as values.
    pub fn scheme(&self, module: &str, is_head: bool) -> Option<Scheme> {
        match &self.method {
            Method::CompressedTensors { groups, ignore } => {
                if ignore.iter().any(|target| target.matches(module)) {
                    return None;
                }
                // A name or a pattern says more than a class.
                let of = |exact: bool| {
                    groups.iter().find(|(targets, _)| {
                        targets.iter().any(|t| matches!(t, Target::Linear) != exact && t.matches(module))
                    })
                };
                of(true).or_else(|| of(false)).map(|(_, scheme)| *scheme)
            }
            Method::Layers { scheme, skip, head } => {
                let skipped = is_head && !head || skip.iter().any(|skip| skip.matches(module));
                (!skipped).then_some(*scheme)
            }
            Method::BlocksOfExperts => None,
        }
    }

    /// Whether stacked experts are stored in blocks.
    pub fn blocks_of_experts(&self) -> bool {
        matches!(self.method, Method::BlocksOfExperts)
    }
}

/// The tensors of a checkpoint, as parts of matrices.
pub struct Parts<'a> {
    pub files: &'a BTreeMap<String, HeaderTensor>,
    /// Names that were asked for and are there.
    pub used: &'a mut BTreeSet<String>,
    pub reasons: &'a mut Vec<Reason>,
}

impl Parts<'_> {
    /// A tensor that has to be there, of one of these types and shapes.
    fn need(&mut self, name: String, dtypes: &[Dtype], shapes: &[&[u32]]) -> Option<(Component, Dtype)> {
        let Some(found) = self.files.get(&name) else {
            let shape = shapes.first().map_or(vec![], |shape| shape.to_vec());
            self.reasons.push(Reason::MissingTensor { name, shape });
            return None;
        };
        self.used.insert(name.clone());
        let same = |shape: &&&[u32]| found.shape.iter().map(|&n| n as u64).eq(shape.iter().map(|&n| u64::from(n)));
        if !shapes.iter().any(|shape| same(&shape)) {
            let (expected, found) = (shapes.first().map_or(vec![], |shape| shape.to_vec()), found.shape.clone());
            self.reasons.push(Reason::TensorShape { name, expected, found });
            return None;
        }
        if !dtypes.contains(&found.dtype) {
            let expected = dtypes.iter().map(|dtype| format!("{dtype:?}")).collect::<Vec<_>>().join(" or ");
            self.reasons.push(Reason::PartDType { name, expected, found: format!("{:?}", found.dtype) });
            return None;
        }
        Some((found.component(), found.dtype))
    }

    /// A tensor that may be there and changes nothing: a scale of activations, a shape that the config gives too.
    fn may(&mut self, name: String) {
        if self.files.contains_key(&name) {
            self.used.insert(name);
        }
    }

    /// Whether the columns of a matrix are whole groups. The libraries read no other matrix: AutoAWQ 0.2.9 (`WQLinear_GEMM.__init__`),
    /// compressed-tensors 0.20.0 (`_process_group`), ModelOpt 0.47.0 (`dequantize` of `NVFP4QTensor` and `MXFP4QTensor`).
    ///
    /// Not asked of blocks, whose last one compressed-tensors and transformers cut, and of GPTQ, where `g_idx` says the group of a column.
    fn whole_groups(&mut self, name: String, cols: u32, group_k: u32) -> Option<()> {
        if cols.is_multiple_of(group_k) {
            return Some(());
        }
        let detail = format!("`{name}`: {cols} columns are no multiple of the group size {group_k}");
        self.reasons.push(Reason::Quantised { detail });
        None
    }

    /// The recipe of the matrix of `module`, `rows` x `cols`; `None`: the reasons say why not.
    pub fn recipe(&mut self, module: &str, scheme: Scheme, rows: u32, cols: u32) -> Option<Recipe> {
        let named = |part: &str| format!("{module}.{part}");
        match scheme {
            Scheme::Packed { bits, group, zeros, g_idx } => {
                self.packed(&named, (bits, group, zeros, g_idx), rows, cols)
            }
            Scheme::Bytes { code, scales, zeros } => {
                self.bytes(&named, code, scales, zeros, "weight_scale", rows, cols)
            }
            Scheme::Fp8 { block } => {
                let scales = block.map_or(ScalesOf::Matrix, ScalesOf::Block);
                self.may(named("activation_scale"));
                let both = ["weight_scale_inv", "weight_scale"];
                let scale = both.into_iter().find(|scale| self.files.contains_key(&named(scale))).unwrap_or(both[0]);
                self.bytes(&named, Code::E4m3, scales, false, scale, rows, cols)
            }
            Scheme::Fp4 { mx, modelopt } => self.fp4(&named, mx, modelopt, rows, cols),
            Scheme::Gptq { .. } | Scheme::Awq { .. } => self.columns(&named, scheme, rows, cols),
        }
    }

    /// Words along k with `weight_scale`, as compressed-tensors packs them.
    fn packed(
        &mut self,
        named: &dyn Fn(&str) -> String,
        (bits, group, zeros, g_idx): (u32, Option<u32>, bool, bool),
        rows: u32,
        cols: u32,
    ) -> Option<Recipe> {
        let fields = 32 / bits;
        let group_k = group.unwrap_or(cols.max(1));
        self.whole_groups(named("weight_packed"), cols, group_k)?;
        let groups = cols.div_ceil(group_k);
        self.may(named("weight_shape"));
        let codes = self.need(named("weight_packed"), &[Dtype::I32], &[&[rows, cols.div_ceil(fields)]]);
        let scales = self.need(named("weight_scale"), FLOATS, &[&[rows, groups]]);
        let zeros = match zeros {
            true => Some(self.need(named("weight_zero_point"), &[Dtype::I32], &[&[rows.div_ceil(fields), groups]])?.0),
            false => None,
        };
        let g_idx = if g_idx { Some(self.need(named("weight_g_idx"), &[Dtype::I32], &[&[cols]])?.0) } else { None };
        let ((codes, _), (scales, dtype)) = (codes?, scales?);
        let code = if bits == 4 { Code::Int4 } else { Code::Int8 };
        let layout = if group.is_some() { ScaleLayout::RowGroups } else { ScaleLayout::Rows };
        Some(Recipe {
            format: format(code, group_k, cols, scale_code(dtype), layout, zeros.is_some(), g_idx.is_some(), false),
            code,
            rows,
            cols,
            codes: (codes, CodeLayout::WordsOfRow),
            group_k,
            scales: (scales, scale_code(dtype), layout),
            zeros: zeros.map(|zeros| (zeros, ZeroLayout::WordsOfColumn)),
            g_idx: g_idx.map(|g_idx| (g_idx, GroupIndex::AnyOrNone)),
            symmetric: false,
            whole: None,
        })
    }

    /// A byte a weight.
    #[allow(clippy::too_many_arguments)] // What a scheme of bytes is, and the extents.
    fn bytes(
        &mut self,
        named: &dyn Fn(&str) -> String,
        code: Code,
        scales: ScalesOf,
        zeros: bool,
        scale_name: &str,
        rows: u32,
        cols: u32,
    ) -> Option<Recipe> {
        self.may(named("input_scale"));
        self.may(named("input_zero_point"));
        self.may(named("input_scale_ub"));
        let stored = if code == Code::Int8 { Dtype::I8 } else { Dtype::F8_E4M3 };
        let codes = self.need(named("weight"), &[stored], &[&[rows, cols]]);
        let (layout, group_k) = match scales {
            ScalesOf::Matrix => (ScaleLayout::One, cols),
            ScalesOf::Row => (ScaleLayout::Rows, cols),
            ScalesOf::Group(k) => (ScaleLayout::RowGroups, k),
            ScalesOf::Block([block_rows, k]) => (ScaleLayout::Blocks { rows: block_rows }, k),
        };
        if layout == ScaleLayout::RowGroups {
            self.whole_groups(named("weight"), cols, group_k)?;
        }
        let groups = cols.div_ceil(group_k);
        let scale_rows = match layout {
            ScaleLayout::Blocks { rows: block } => rows.div_ceil(block),
            _ => rows,
        };
        let shapes: &[&[u32]] = match layout {
            ScaleLayout::One => &[&[1], &[], &[1, 1]],
            ScaleLayout::Rows => &[&[rows, 1], &[rows]],
            _ => &[&[scale_rows, groups]],
        };
        let scales = self.need(named(scale_name), FLOATS, shapes);
        let zeros = match zeros {
            true => {
                let zero_shapes: &[&[u32]] =
                    if layout == ScaleLayout::Rows { &[&[rows, 1]] } else { &[&[rows, groups]] };
                if layout == ScaleLayout::One {
                    let detail = format!("`{}`: a zero point for a whole matrix is not supported", named("weight"));
                    self.reasons.push(Reason::Quantised { detail });
                    return None;
                }
                Some(self.need(named("weight_zero_point"), &[Dtype::I8], zero_shapes)?.0)
            }
            false => None,
        };
        let ((codes, _), (scales, dtype)) = (codes?, scales?);
        Some(Recipe {
            format: format(code, group_k, cols, scale_code(dtype), layout, zeros.is_some(), false, false),
            code,
            rows,
            cols,
            codes: (codes, CodeLayout::Bytes),
            group_k: group_k.min(cols.max(1)),
            scales: (scales, scale_code(dtype), layout),
            zeros: zeros.map(|zeros| (zeros, ZeroLayout::Bytes)),
            g_idx: None,
            symmetric: false,
            whole: None,
        })
    }

    /// Two floats of 4 bits in a byte.
    fn fp4(
        &mut self,
        named: &dyn Fn(&str) -> String,
        mx: bool,
        modelopt: bool,
        rows: u32,
        cols: u32,
    ) -> Option<Recipe> {
        let group_k = if mx { 32 } else { 16 };
        self.may(named("input_scale"));
        self.may(named("input_global_scale"));
        let name = named(if modelopt { "weight" } else { "weight_packed" });
        self.whole_groups(name.clone(), cols, group_k)?;
        let codes = self.need(name, &[Dtype::U8], &[&[rows, cols.div_ceil(2)]]);
        let stored = if mx { Dtype::U8 } else { Dtype::F8_E4M3 };
        let scales = self.need(named("weight_scale"), &[stored], &[&[rows, cols.div_ceil(group_k)]]);
        let whole = match (mx, modelopt) {
            (true, _) => None,
            (false, false) => Some(("weight_global_scale", Whole::Divide)),
            (false, true) => Some(("weight_scale_2", Whole::Multiply)),
        };
        let whole = match whole {
            None => None,
            Some((name, kind)) => Some((self.need(named(name), &[Dtype::F32], &[&[1], &[]])?.0, kind)),
        };
        let ((codes, _), (scales, _)) = (codes?, scales?);
        let scale_code = if mx { ScaleCode::E8m0 } else { ScaleCode::E4m3 };
        let layout = ScaleLayout::RowGroups;
        Some(Recipe {
            format: format(Code::E2m1, group_k, cols, scale_code, layout, false, false, whole.is_some()),
            code: Code::E2m1,
            rows,
            cols,
            codes: (codes, CodeLayout::Halves),
            group_k,
            scales: (scales, scale_code, layout),
            zeros: None,
            g_idx: None,
            symmetric: false,
            whole,
        })
    }

    /// Stacked matrices as gpt-oss stores them: `NAME_blocks` has 16 bytes for each 32 columns of a row, two codes in a byte, the first one in
    /// the low nibble, and `NAME_scales` an e8m0 scale for each block. Their values are those of compressed-tensors' MXFP4
    /// (`convert_moe_packed_tensors` of transformers).
    pub fn stacked_blocks(&mut self, name: &str, [count, rows, cols]: [u32; 3]) -> Option<Recipe> {
        const BLOCK: u32 = 32;
        self.whole_groups(format!("{name}_blocks"), cols, BLOCK)?;
        let groups = cols / BLOCK;
        let codes = self.need(format!("{name}_blocks"), &[Dtype::U8], &[&[count, rows, groups, BLOCK / 2]]);
        let scales = self.need(format!("{name}_scales"), &[Dtype::U8], &[&[count, rows, groups]]);
        let ((codes, _), (scales, _)) = (codes?, scales?);
        let (scale, layout) = (ScaleCode::E8m0, ScaleLayout::RowGroups);
        Some(Recipe {
            format: format(Code::E2m1, BLOCK, cols, scale, layout, false, false, false),
            code: Code::E2m1,
            rows: count * rows,
            cols,
            codes: (codes, CodeLayout::Halves),
            group_k: BLOCK,
            scales: (scales, scale, layout),
            zeros: None,
            g_idx: None,
            symmetric: false,
            whole: None,
        })
    }

    /// Transposed layouts: GPTQ and AWQ.
    fn columns(&mut self, named: &dyn Fn(&str) -> String, scheme: Scheme, rows: u32, cols: u32) -> Option<Recipe> {
        let (bits, group) = match scheme {
            Scheme::Gptq { bits, group, .. } => (bits, group),
            Scheme::Awq { group } => (4, group),
            _ => return None,
        };
        let fields = 32 / bits;
        let awq = matches!(scheme, Scheme::Awq { .. });
        if awq {
            self.whole_groups(named("qweight"), cols, group.unwrap_or(cols.max(1)))?;
        }
        let group_k = group.unwrap_or(cols).min(cols.max(1));
        let groups = cols.div_ceil(group_k);
        if awq && !rows.is_multiple_of(fields) || !awq && !cols.is_multiple_of(fields) {
            let (what, n) = if awq { ("rows", rows) } else { ("columns", cols) };
            let detail = format!("`{}`: {n} {what} are no multiple of the {fields} fields of a word", named("qweight"));
            self.reasons.push(Reason::Quantised { detail });
            return None;
        }
        let shape = if awq { [cols, rows / fields] } else { [cols / fields, rows] };
        let codes = self.need(named("qweight"), &[Dtype::I32], &[&shape]);
        let zeros = self.need(named("qzeros"), &[Dtype::I32], &[&[groups, rows.div_ceil(fields)]]);
        let scales = self.need(named("scales"), FLOATS, &[&[groups, rows]]);
        let (g_idx, act_order, symmetric, zero_layout) = match scheme {
            Scheme::Gptq { v2, act_order, symmetric, .. } => {
                let g_idx = self.need(named("g_idx"), &[Dtype::I32], &[&[cols]])?.0;
                let order = if act_order { GroupIndex::Any } else { GroupIndex::InOrder };
                let zero_layout = if v2 { ZeroLayout::Words } else { ZeroLayout::WordsMinusOne };
                (Some((g_idx, order)), act_order, symmetric, zero_layout)
            }
            _ => (None, false, false, ZeroLayout::WordsAcross),
        };
        let ((codes, _), (zeros, _), (scales, dtype)) = (codes?, zeros?, scales?);
        let code = if bits == 4 { Code::Int4 } else { Code::Int8 };
        let layout = ScaleLayout::GroupRows;
        Some(Recipe {
            format: format(code, group_k, cols, scale_code(dtype), layout, true, act_order, false),
            code,
            rows,
            cols,
            codes: (codes, if awq { CodeLayout::WordsAcross } else { CodeLayout::WordsOfColumn }),
            group_k,
            scales: (scales, scale_code(dtype), layout),
            zeros: Some((zeros, zero_layout)),
            g_idx,
            symmetric,
            whole: None,
        })
    }
}

/// Types of scales.
const FLOATS: &[Dtype] = &[Dtype::F32, Dtype::BF16, Dtype::F16];

fn scale_code(dtype: Dtype) -> ScaleCode {
    match dtype {
        Dtype::BF16 => ScaleCode::Bf16,
        Dtype::F16 => ScaleCode::F16,
        _ => ScaleCode::F32,
    }
}

/// The format that a matrix is packed in; fp32, which holds every value, where its columns do not follow their groups.
#[allow(clippy::too_many_arguments)] // What a recipe is made of.
fn format(
    code: Code,
    group_k: u32,
    cols: u32,
    scale: ScaleCode,
    layout: ScaleLayout,
    zeros: bool,
    out_of_order: bool,
    row_scales: bool,
) -> Format {
    /// Scales are repeated where groups are longer.
    const GROUP_MAX: u32 = 128;
    if !zeros && !out_of_order && matches!(layout, ScaleLayout::One | ScaleLayout::Rows) {
        return Format::by_row(code);
    }
    // The longest group of a format that no stored group ends inside of.
    let k = if group_k >= cols { GROUP_MAX } else { (1 << group_k.trailing_zeros()).min(GROUP_MAX) };
    let format = Format { code, groups: Some(Groups { k, scale, zeros, minima: false }), row_scales };
    if out_of_order || format.refuses().is_some() { Format::plain(DType::F32) } else { format }
}
