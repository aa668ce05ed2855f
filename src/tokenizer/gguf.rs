//! Owns the tokenizer of a GGUF file: its metadata as the `tokenizer.json` and `tokenizer_config.json` that the model had before it was
//! converted.
//!
//! A `gpt2` vocabulary has its merges in the file; the rule that splits a text into words has only a name there (`tokenizer.ggml.pre`).
//! `RULES` has the rule that the tokenizers of that name have. A `llama` vocabulary (SentencePiece) has scores: its merges are made
//! of them as transformers makes them (`generate_merges` of `convert_slow_tokenizer.py`).
//!
//! The schema is closed, as that of the model: keys of `tokenizer.` are used, neutral, or refused.

use std::collections::{BTreeMap, HashMap};

use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::{Map, Value as Json, json};

use crate::gguf::{Header, Texts, Value};

/// The two files, without the paths that they would have.
pub struct Converted {
    /// As `tokenizer.json`.
    pub tokenizer: Vec<u8>,
    /// As `tokenizer_config.json`, the chat templates in it.
    pub config: Map<String, Json>,
}

/// How tokenizers with one name of `tokenizer.ggml.pre` split a text.
struct Rule {
    names: &'static [&'static str],
    /// Unicode normalisation of the text, before it is split.
    nfc: bool,
    words: Words,
    /// Whether a word that is a token is taken whole, whatever the merges say.
    ignore_merges: bool,
    /// Whether a text begins with a token, where `add_bos_token` says nothing.
    add_bos: bool,
}

/// What words are.
enum Words {
    /// The pattern of GPT-2.
    Gpt2,
    /// The same, after digits were split off one by one.
    Digits,
    Pattern(&'static str),
}

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

static RULES: &[Rule] = &[
    Rule {
        ignore_merges: true,
        add_bos: true,
        ..rule(&["llama-bpe", "llama3", "llama-v3", "lfm2"], Words::Pattern(LLAMA3))
    },
    // SmolLM3, whose vocabulary is that of Llama 3.
    Rule { ignore_merges: true, ..rule(&["smaug-bpe"], Words::Pattern(LLAMA3)) },
    rule(&["dbrx", "glm4", "chatglm-bpe"], Words::Pattern(LLAMA3)),
    Rule { nfc: true, ..rule(&["qwen2", "deepseek-r1-qwen"], Words::Pattern(QWEN2)) },
    Rule { nfc: true, ..rule(&["stablelm2"], Words::Pattern(QWEN2)) },
    Rule { ignore_merges: true, ..rule(&["gpt-4o", "llama4"], Words::Pattern(GPT4O)) },
    Rule { ignore_merges: true, add_bos: true, ..rule(&["tekken"], Words::Pattern(TEKKEN)) },
    rule(&["smollm", "starcoder", "refact"], Words::Digits),
    Rule { nfc: true, ..rule(&["command-r"], Words::Digits) },
    rule(&["gpt-2", "phi-2"], Words::Gpt2),
    Rule { nfc: true, ..rule(&["olmo"], Words::Gpt2) },
];

const fn rule(names: &'static [&'static str], words: Words) -> Rule {
    Rule { names, nfc: false, words, ignore_merges: false, add_bos: false }
}

/// Types of tokens (`tokenizer.ggml.token_type`).
const NORMAL: i64 = 1;
const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;
/// Fills the rows of a table up; no text has it.
const UNUSED: i64 = 5;
const BYTE: i64 = 6;

/// Stands for a space in SentencePiece.
const SPACE: &str = "\u{2581}";
/// Longest token; published ones stay below 512 bytes.
const TOKEN_BYTES_MAX: usize = 4096;

/// Keys that change nothing: ids that no text has by itself, and records.
const NEUTRAL: [&str; 13] = [
    "tokenizer.ggml.eos_token_ids",
    "tokenizer.ggml.fim_pre_token_id",
    "tokenizer.ggml.fim_suf_token_id",
    "tokenizer.ggml.fim_mid_token_id",
    "tokenizer.ggml.fim_pad_token_id",
    "tokenizer.ggml.fim_rep_token_id",
    "tokenizer.ggml.fim_sep_token_id",
    "tokenizer.ggml.prefix_token_id",
    "tokenizer.ggml.suffix_token_id",
    "tokenizer.ggml.middle_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
    "tokenizer.huggingface.json",
];
/// The named tokens of `tokenizer_config.json`, and the keys of their ids.
const NAMED: [(&str, &str); 7] = [
    ("bos_token", "tokenizer.ggml.bos_token_id"),
    ("eos_token", "tokenizer.ggml.eos_token_id"),
    ("unk_token", "tokenizer.ggml.unknown_token_id"),
    ("sep_token", "tokenizer.ggml.seperator_token_id"),
    ("pad_token", "tokenizer.ggml.padding_token_id"),
    ("cls_token", "tokenizer.ggml.cls_token_id"),
    ("mask_token", "tokenizer.ggml.mask_token_id"),
];
const TEMPLATE: &str = "tokenizer.chat_template";

/// Reads keys, each once.
struct Keys<'a> {
    metadata: &'a BTreeMap<String, Value>,
    asked: Vec<&'a str>,
}

impl<'a> Keys<'a> {
    fn get(&mut self, key: &'a str) -> Option<&'a Value> {
        self.asked.push(key);
        self.metadata.get(key)
    }

    fn typed<T>(
        &mut self,
        key: &'a str,
        expected: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, String> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match read(value) {
            Some(read) => Ok(Some(read)),
            None => Err(format!("key `{key}`: expected {expected}, found {value}")),
        }
    }

    fn text(&mut self, key: &'a str) -> Result<Option<&'a str>, String> {
        self.typed(key, "a string", Value::text)
    }

    fn truth(&mut self, key: &'a str) -> Result<Option<bool>, String> {
        self.typed(key, "true or false", Value::truth)
    }

    fn texts(&mut self, key: &'a str) -> Result<&'a Texts, String> {
        let list = self.typed(key, "a list of strings", |value| match value {
            Value::Texts(list) => Some(list),
            _ => None,
        })?;
        list.ok_or_else(|| format!("key `{key}` is missing"))
    }

    /// Numbers of the tokens, as many as there are.
    fn integers(&mut self, key: &'a str, count: usize) -> Result<&'a [i64], String> {
        let list = self.typed(key, "a list of integers", |value| match value {
            Value::Integers(list) => Some(list.as_slice()),
            _ => None,
        })?;
        let list = list.ok_or_else(|| format!("key `{key}` is missing"))?;
        if list.len() == count {
            return Ok(list);
        }
        Err(format!("key `{key}`: expected {count} integers, one for each token, found {}", list.len()))
    }

    /// Refuses keys of `tokenizer.` that nothing asked for.
    fn end(self) -> Result<(), String> {
        let own = self.metadata.keys().filter(|key| key.starts_with("tokenizer."));
        match own.map(String::as_str).find(|key| !self.asked.contains(key) && !NEUTRAL.contains(key)) {
            None => Ok(()),
            Some(key) => Err(format!("key `{key}` is not known, and may change how a text is split")),
        }
    }
}

/// A token: text, id and type.
#[derive(Clone, Copy)]
struct Token<'a> {
    text: &'a str,
    id: u32,
    kind: i64,
}

/// Makes the files of a tokenizer.
///
/// # Errors
/// Why not: a vocabulary or a rule that is not supported, or keys that contradict each other.
pub fn convert(header: &Header) -> Result<Converted, String> {
    let mut keys = Keys { metadata: &header.metadata, asked: vec![] };
    let model =
        keys.text("tokenizer.ggml.model")?.ok_or("it has no tokenizer: key `tokenizer.ggml.model` is missing")?;
    let texts = keys.texts("tokenizer.ggml.tokens")?;
    let kinds = keys.integers("tokenizer.ggml.token_type", texts.len())?;
    if let Some((id, kind)) = kinds.iter().enumerate().find(|(_, kind)| !(NORMAL..=BYTE).contains(kind)) {
        return Err(format!(
            "key `tokenizer.ggml.token_type`: expected {NORMAL} to {BYTE}, found {kind} for token {id}"
        ));
    }
    if let Some(long) = texts.iter().find(|text| text.len() > TOKEN_BYTES_MAX) {
        return Err(format!("expected tokens of at most {TOKEN_BYTES_MAX} bytes, found one of {}", long.len()));
    }
    let tokens: Vec<Token> = (0u32..)
        .zip(texts.iter().zip(kinds))
        .map(|(id, (text, &kind))| Token { text, id, kind })
        .filter(|token| token.kind != UNUSED && !token.text.is_empty())
        .collect();
    let (tokenizer, add_bos) = match model {
        "gpt2" => byte_level(&mut keys, &tokens)?,
        "llama" => (sentencepiece(&mut keys, header, &tokens, texts.len())?, true),
        other => {
            return Err(format!("its tokenizer is `{other}`, which is not supported: expected `gpt2` or `llama`"));
        }
    };
    for (key, allowed) in [("tokenizer.ggml.remove_extra_whitespaces", false), ("tokenizer.ggml.add_sep_token", false)]
    {
        if keys.truth(key)?.is_some_and(|found| found != allowed) {
            return Err(format!("key `{key}`: expected {allowed}, found {}", !allowed));
        }
    }
    let mut config = Map::new();
    named_tokens(&mut keys, &tokens, model == "llama", &mut config)?;
    let add_bos = keys.truth("tokenizer.ggml.add_bos_token")?.unwrap_or(add_bos);
    config.insert("add_bos_token".to_string(), json!(add_bos));
    config.insert("add_eos_token".to_string(), json!(keys.truth("tokenizer.ggml.add_eos_token")?.unwrap_or(false)));
    templates(&mut keys, &mut config)?;
    keys.end()?;
    Ok(Converted { tokenizer, config })
}

/// The tokens with a name.
fn named_tokens<'a>(
    keys: &mut Keys<'a>,
    tokens: &[Token<'_>],
    sentencepiece: bool,
    config: &mut Map<String, Json>,
) -> Result<(), String> {
    for (name, key) in NAMED {
        let default = match name {
            "unk_token" if sentencepiece => Some(0),
            "bos_token" if sentencepiece => Some(1),
            "eos_token" if sentencepiece => Some(2),
            _ => None,
        };
        let Some(id) = keys.typed(key, "a token id", Value::integer)?.or(default) else { continue };
        let Some(token) = tokens.iter().find(|token| i64::from(token.id) == id) else { continue };
        // A plain token that pads would be cut out of every text.
        if matches!(name, "bos_token" | "eos_token") || matches!(token.kind, UNKNOWN | CONTROL) {
            config.insert(name.to_string(), json!(token.text));
        }
    }
    Ok(())
}

/// The chat template, and others by name.
fn templates<'a>(keys: &mut Keys<'a>, config: &mut Map<String, Json>) -> Result<(), String> {
    let mut listed = vec![];
    if let Some(template) = keys.text(TEMPLATE)? {
        listed.push(json!({ "name": "default", "template": template }));
    }
    let metadata = keys.metadata;
    for (key, _) in metadata.range(format!("{TEMPLATE}.")..) {
        let Some(name) = key.strip_prefix(TEMPLATE).and_then(|rest| rest.strip_prefix('.')) else { break };
        if let Some(template) = keys.text(key)? {
            listed.push(json!({ "name": name, "template": template }));
        }
    }
    // The names of the others.
    keys.get("tokenizer.chat_templates");
    if !listed.is_empty() {
        config.insert("chat_template".to_string(), Json::Array(listed));
    }
    Ok(())
}

/// A byte-level vocabulary with merges, and whether a text begins with a token.
fn byte_level<'a>(keys: &mut Keys<'a>, tokens: &[Token<'a>]) -> Result<(Vec<u8>, bool), String> {
    const PRE: &str = "tokenizer.ggml.pre";
    let name = keys.text(PRE)?;
    let Some(rule) = name.and_then(|name| RULES.iter().find(|rule| rule.names.contains(&name))) else {
        let known: Vec<&str> = RULES.iter().flat_map(|rule| rule.names).copied().collect();
        let found = name.map_or("nothing".to_string(), |name| format!("`{name}`"));
        return Err(format!("key `{PRE}`: expected a known rule ({}), found {found}", known.join(", ")));
    };
    if keys.truth("tokenizer.ggml.add_space_prefix")? == Some(true) {
        return Err("key `tokenizer.ggml.add_space_prefix`: expected false with `gpt2`, found true".to_string());
    }
    let whole = |regex: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": regex });
    let mut words = match rule.words {
        Words::Gpt2 => vec![],
        Words::Digits => vec![json!({ "type": "Digits", "individual_digits": true })],
        Words::Pattern(regex) => {
            vec![json!({ "type": "Split", "pattern": { "Regex": regex }, "behavior": "Isolated", "invert": false })]
        }
    };
    words.push(whole(!matches!(rule.words, Words::Pattern(_))));
    // Old converters wrote scores, which merges need not.
    keys.get("tokenizer.ggml.scores");
    let merges = keys.texts("tokenizer.ggml.merges")?;
    let mut pairs = Vec::with_capacity(merges.len());
    for merge in merges.iter() {
        // The first part has at least one character, which may be a space.
        let after = merge.chars().next().map_or(0, char::len_utf8);
        let space = merge[after..].find(' ').map(|at| at + after);
        let Some(space) = space else { return Err(format!("merge `{merge}`: expected two tokens")) };
        pairs.push([&merge[..space], &merge[space + 1..]]);
    }
    let file = File {
        version: "1.0",
        truncation: None,
        padding: None,
        added_tokens: added(tokens, false),
        normalizer: if rule.nfc { json!({ "type": "NFC" }) } else { Json::Null },
        pre_tokenizer: json!({ "type": "Sequence", "pretokenizers": words }),
        post_processor: whole(false),
        decoder: whole(true),
        model: Model {
            r#type: "BPE",
            unk_token: None,
            fuse_unk: false,
            byte_fallback: false,
            ignore_merges: rule.ignore_merges,
            vocab: Vocabulary(tokens.iter().map(|token| (token.text, token.id)).collect()),
            merges: pairs,
        },
    };
    Ok((file.bytes()?, rule.add_bos))
}

/// A vocabulary of SentencePiece: spaces are visible, bytes stand in for characters that it lacks.
fn sentencepiece<'a>(
    keys: &mut Keys<'a>,
    header: &Header,
    tokens: &[Token<'a>],
    count: usize,
) -> Result<Vec<u8>, String> {
    const SCORES: &str = "tokenizer.ggml.scores";
    let scores = keys.typed(SCORES, "a list of floats", |value| match value {
        Value::Floats(list) => Some(list.as_slice()),
        _ => None,
    })?;
    let scores = scores.ok_or_else(|| format!("key `{SCORES}` is missing"))?;
    if scores.len() != count {
        return Err(format!("key `{SCORES}`: expected {count} floats, one for each token, found {}", scores.len()));
    }
    if keys.text("tokenizer.ggml.pre")?.is_some_and(|pre| pre != "default") {
        return Err("key `tokenizer.ggml.pre`: expected `default` with `llama`".to_string());
    }
    let prefix = keys.truth("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    // The converter writes plain spaces in tokens that users defined.
    let spaced: Vec<String> = tokens
        .iter()
        .map(|token| if token.kind == USER_DEFINED { token.text.replace(' ', SPACE) } else { token.text.to_string() })
        .collect();
    let tokens: Vec<Token> =
        tokens.iter().zip(&spaced).map(|(token, text)| Token { text: text.as_str(), ..*token }).collect();
    let merges = merges_of(&tokens, scores);
    let replace = json!({ "type": "Replace", "pattern": { "String": " " }, "content": SPACE });
    let mut decoders = vec![
        json!({ "type": "Replace", "pattern": { "String": SPACE }, "content": " " }),
        json!({ "type": "ByteFallback" }),
        json!({ "type": "Fuse" }),
    ];
    let normalizer = if prefix {
        decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
        json!({ "type": "Sequence", "normalizers": [json!({ "type": "Prepend", "prepend": SPACE }), replace] })
    } else {
        replace
    };
    let unknown = tokens.iter().find(|token| token.kind == UNKNOWN).map(|token| token.text);
    let file = File {
        version: "1.0",
        truncation: None,
        padding: None,
        added_tokens: added(&tokens, strips_after(header)),
        normalizer,
        pre_tokenizer: Json::Null,
        post_processor: Json::Null,
        decoder: json!({ "type": "Sequence", "decoders": decoders }),
        model: Model {
            r#type: "BPE",
            unk_token: unknown,
            fuse_unk: true,
            byte_fallback: true,
            ignore_merges: false,
            vocab: Vocabulary(tokens.iter().map(|token| (token.text, token.id)).collect()),
            merges,
        },
    };
    file.bytes()
}

/// Whether special tokens take the spaces after them: those of Phi-3, which nothing but its name tells (as in llama.cpp).
fn strips_after(header: &Header) -> bool {
    let name = header.metadata.get("general.name").and_then(Value::text).unwrap_or_default().to_lowercase();
    ["phi-3", "phi3"].iter().any(|part| name.contains(part))
}

/// Pairs of tokens that make a token, the best first: by the score of what they make, then by their lengths.
fn merges_of<'t>(tokens: &[Token<'t>], scores: &[f32]) -> Vec<[&'t str; 2]> {
    let ids: HashMap<&str, u32> = tokens.iter().map(|token| (token.text, token.id)).collect();
    let mut found = vec![];
    for token in tokens.iter().filter(|token| !matches!(token.kind, UNKNOWN | CONTROL | BYTE)) {
        // Tokens that users defined come before all others; their scores say nothing.
        let own = scores.get(token.id as usize).copied().unwrap_or_default();
        let score = if token.kind == USER_DEFINED { f32::INFINITY } else { own };
        let chars = token.text.chars().count();
        for (before, (at, _)) in token.text.char_indices().enumerate().skip(1) {
            let (left, right) = token.text.split_at(at);
            if let (Some(&l), Some(&r)) = (ids.get(left), ids.get(right)) {
                found.push(((score, before, chars - before), (token.id, l, r), [left, right]));
            }
        }
    }
    found.sort_by(|((score_a, left_a, right_a), ids_a, _), ((score_b, left_b, right_b), ids_b, _)| {
        let better = score_b.total_cmp(score_a).then((left_b, right_b).cmp(&(left_a, right_a)));
        better.then(ids_a.cmp(ids_b))
    });
    found.into_iter().map(|(_, _, pair)| pair).collect()
}

/// Tokens that are found in a text before it is split.
fn added<'t>(tokens: &[Token<'t>], strips_after: bool) -> Vec<Json> {
    let own = tokens.iter().filter(|token| matches!(token.kind, UNKNOWN | CONTROL | USER_DEFINED));
    let plain = ["<unk>", "<s>", "<|endoftext|>"];
    own.map(|Token { text, id, kind }| {
        let special = *kind != USER_DEFINED;
        let rstrip = strips_after && !plain.contains(text);
        json!({
            "id": id, "content": text, "special": special, "normalized": false,
            "single_word": false, "lstrip": false, "rstrip": rstrip,
        })
    })
    .collect()
}

/// `tokenizer.json`.
#[derive(serde::Serialize)]
struct File<'t> {
    version: &'static str,
    truncation: Option<()>,
    padding: Option<()>,
    added_tokens: Vec<Json>,
    normalizer: Json,
    pre_tokenizer: Json,
    post_processor: Json,
    decoder: Json,
    model: Model<'t>,
}

impl File<'_> {
    fn bytes(&self) -> Result<Vec<u8>, String> {
        serde_json::to_vec(self).map_err(|error| error.to_string())
    }
}

#[derive(serde::Serialize)]
struct Model<'t> {
    r#type: &'static str,
    unk_token: Option<&'t str>,
    fuse_unk: bool,
    byte_fallback: bool,
    ignore_merges: bool,
    vocab: Vocabulary<'t>,
    merges: Vec<[&'t str; 2]>,
}

/// An object of texts and ids.
struct Vocabulary<'t>(Vec<(&'t str, u32)>);

impl Serialize for Vocabulary<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (text, id) in &self.0 {
            map.serialize_entry(text, id)?;
        }
        map.end()
    }
}
