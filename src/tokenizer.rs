//! Owns the conversion between text and token ids: a checkpoint's tokenizer, its chat template, and text from a token stream.
//!
//! A checkpoint's folder defines it in up to three files: `tokenizer.json` (the `tokenizers` crate reads it whole),
//! `tokenizer_config.json` (special tokens, whether a text begins with one, chat templates) and `chat_template.jinja`.
//! A GGUF file has the same in its metadata (`gguf`). The rules by which they combine are those of transformers 5 (`tokenization_utils_tokenizers.py`,
//! `utils/chat_template_utils.py`), so that ids agree with what the model was trained on. Left out on purpose:
//! truncation and padding stored in `tokenizer.json`, and `clean_up_tokenization_spaces`, which removes spaces that a
//! model may have written.
//!
//! Files are not trusted. Their sizes and the work of a template are bounded, and a panic in the libraries becomes an error
//! here. Memory is not bounded here, and a template or a normaliser may double a string again and again, so
//! `pipeline::tokens` runs this module in a process with bounded memory.

mod collections;
mod dialect;
mod gguf;
mod jinja;
mod letters;
mod methods;
mod operators;
mod python;
mod stops;

pub use stops::{Stopped, certain};

use crate::error::Fault;
use crate::files::{self, FileError};
use crate::gguf::{GgufError, Header, files_of};
use minijinja::Value;
use minijinja::value::Serde;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::SystemTime;
use tokenizers::{AddedToken, ModelWrapper};

/// Largest `tokenizer.json` that is read; the largest known one (262144 tokens with merges) has 33 MiB.
const TOKENIZER_BYTES_MAX: u64 = 256 << 20;
/// Largest `tokenizer_config.json` or `chat_template.jinja` that is read; known ones stay below 1 MiB.
const CONFIG_BYTES_MAX: u64 = 16 << 20;

/// A tokenizer that cannot be loaded, or a text, id or conversation that it cannot handle.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    #[error("`{path}` is missing, so text cannot be turned into token ids")]
    Missing { path: PathBuf },
    #[error("`{path}` cannot be read: {source}")]
    Read { path: PathBuf, source: io::Error },
    #[error(transparent)]
    NotRegular(FileError),
    #[error("`{path}`: expected at most {bytes_max} bytes, found more")]
    TooLarge { path: PathBuf, bytes_max: u64 },
    #[error("`{path}` is not a usable tokenizer file: {reason}")]
    Corrupt { path: PathBuf, reason: String },
    #[error(
        "`{path}` belongs to another model: expected token ids below {vocab} (the model's vocabulary), found ids up to \
         {id_max}; the first beyond is {id} (`{token}`)"
    )]
    VocabMismatch { path: PathBuf, vocab: u32, id_max: u32, id: u32, token: String },
    #[error("expected token ids below {vocab} (the model's vocabulary), found {id}{} at index {index}", named(.token))]
    IdBeyondVocab { id: u32, token: Option<String>, index: usize, vocab: u32 },
    #[error(transparent)]
    Gguf(GgufError),
    #[error("`{path}`: text cannot be turned into token ids: {reason}")]
    Metadata { path: PathBuf, reason: String },
    #[error("text cannot be encoded: {reason}")]
    Encode { reason: String },
    #[error("token ids cannot be decoded: {reason}")]
    Decode { reason: String },
    #[error("`{path}`: the bytes of its tokens cannot be determined: {reason}")]
    Bytes { path: PathBuf, reason: String },
    #[error("the checkpoint has no chat template")]
    NoChatTemplate,
    #[error("expected a chat template named `default`, found {}", list(.names))]
    NoDefaultTemplate { names: Vec<String> },
    #[error("the chat template in `{path}` does not support tools")]
    NoTools { path: PathBuf },
    #[error("the chat template in `{path}` reads no `{name}`")]
    NoSetting { path: PathBuf, name: String },
    #[error("the chat template in `{path}` writes calls of tools in an unknown form")]
    CallForm { path: PathBuf },
    #[error("the chat template in `{path}` fails: {reason}")]
    ChatTemplate { path: PathBuf, reason: String },
}

fn named(token: &Option<String>) -> String {
    token.as_ref().map_or_else(String::new, |token| format!(" (`{token}`)"))
}

fn list(names: &[String]) -> String {
    let quoted: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    quoted.join(", ")
}

impl From<TokenizerError> for Fault {
    fn from(error: TokenizerError) -> Fault {
        const IDS: &str = "pass token ids with `--ids`, which works without a tokenizer";
        let message = error.to_string();
        match error {
            TokenizerError::Missing { .. } => Fault::input(message).with_remedy(IDS),
            TokenizerError::Read { .. } => Fault::environment(message),
            TokenizerError::NotRegular(_) | TokenizerError::TooLarge { .. } | TokenizerError::Corrupt { .. } => {
                Fault::input(message).with_remedy(format!("fetch the checkpoint's file again, or {IDS}"))
            }
            TokenizerError::Gguf(_) => Fault::input(message).with_remedy(format!("fetch the file again, or {IDS}")),
            TokenizerError::Metadata { .. } => {
                Fault::input(message).with_remedy(format!("convert the model again with a current llama.cpp, or {IDS}"))
            }
            TokenizerError::VocabMismatch { .. } => {
                Fault::input(message).with_remedy(format!("put this checkpoint's own tokenizer there, or {IDS}"))
            }
            TokenizerError::IdBeyondVocab { .. } => {
                Fault::input(message).with_remedy("leave out what the model has no embedding for")
            }
            TokenizerError::Encode { .. } | TokenizerError::Decode { .. } => Fault::input(message).with_remedy(IDS),
            TokenizerError::Bytes { .. } => Fault::input(message).with_remedy("ask for text without a grammar"),
            TokenizerError::NoTools { .. } | TokenizerError::CallForm { .. } => {
                Fault::input(message).with_remedy("ask without tools")
            }
            TokenizerError::NoSetting { .. } => Fault::input(message).with_remedy("ask without it"),
            TokenizerError::NoChatTemplate | TokenizerError::NoDefaultTemplate { .. } => {
                Fault::input(message).with_remedy("give a plain prompt instead of a chat")
            }
            TokenizerError::ChatTemplate { .. } => Fault::input(message)
                .with_remedy("check that the template allows these roles in this order, or give a plain prompt"),
        }
    }
}

/// One message of a conversation, in the form that chat templates expect.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user` or `assistant`; a template may have more.
    pub role: String,
    pub content: String,
    /// The calls of tools in an answer, with their arguments as objects.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<serde_json::Value>,
    /// For the result of a tool: the call that it answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// The name of a tool, or of who speaks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// For an answer: what the model thought before it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
}

/// A conversation, with what else its template is given.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Chat {
    pub messages: Vec<Message>,
    /// Tools for the template to show.
    pub tools: Vec<serde_json::Value>,
    /// Adds the beginning of the reply.
    pub reply: bool,
    /// Settings of the template by name, such as `enable_thinking`.
    pub settings: serde_json::Map<String, serde_json::Value>,
}

impl Chat {
    /// A conversation that the model is to go on with.
    pub fn new(messages: Vec<Message>) -> Chat {
        Chat { messages, reply: true, ..Chat::default() }
    }
}

/// The prompt of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prompt {
    pub ids: Vec<u32>,
    pub thinking: Thinking,
}

/// Whether texts of a checkpoint begin with what the model thinks, between `<think>` and `</think>`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Thinking {
    /// Its template has no such tags.
    #[default]
    None,
    /// A text begins the block, if it has one.
    Possible,
    /// The prompt has begun it.
    Open,
    /// The prompt has ended it: the model is not to think.
    Over,
    /// Texts have channels, of which one is for thoughts: gpt-oss.
    Channels(Channels),
}

/// The tokens around the parts of a text of channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Channels {
    pub start: u32,
    pub channel: u32,
    pub constrain: u32,
    pub message: u32,
    pub end: u32,
}

/// Which special tokens a text shows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Specials {
    #[default]
    Hidden,
    Shown,
    /// Those around calls of tools and channels, which the reader of a text looks for.
    Marks,
}

impl Specials {
    /// As a client asks for them.
    pub fn of(skip: bool) -> Specials {
        if skip { Specials::Hidden } else { Specials::Shown }
    }
}

/// The tokens that [`Specials::Marks`] shows.
const MARKS: [&str; 10] = [
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|call|>",
    "<|return|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
];

/// A setting of chat templates that turns thinking off; Qwen 3 has it.
pub const THINKING_SETTING: &str = "enable_thinking";
/// A setting of chat templates for how long a model thinks; gpt-oss has it.
pub const EFFORT_SETTING: &str = "reasoning_effort";

/// The settings that turn thinking off.
pub fn without_thinking() -> serde_json::Map<String, serde_json::Value> {
    serde_json::Map::from_iter([(THINKING_SETTING.to_string(), json!(false))])
}

/// The text of a token inside of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    pub text: String,
    /// Those of the text; of a token that is a part of a character its own.
    pub bytes: Vec<u8>,
}

/// How a text calls a tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CallForm {
    /// `<tool_call>`, a line of `{"name": …, "arguments": …}`, `</tool_call>`: Hermes and Qwen. A text may have several.
    Hermes,
    /// The whole text is `{"name": …, "parameters": …}`.
    Llama3,
    /// `<tool_call>`, `<function=NAME>`, for each argument `<parameter=KEY>`, its value and `</parameter>`, then the end tags: Qwen3-Coder, Qwen3.5.
    Xml,
    /// A message on the channel `commentary` to `functions.NAME`, which ends its text: gpt-oss.
    Channels(Channels),
    /// A token `calls`, then a list of objects with `name` and `arguments`; or for each call that token, its name, a token `arguments` and an
    /// object: Mistral.
    Mistral { calls: u32, arguments: Option<u32> },
}

impl Message {
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Message {
        let (role, content) = (role.into(), content.into());
        Message { role, content, tool_calls: vec![], tool_call_id: None, name: None, reasoning_content: None }
    }
}

/// The tokenizer of one checkpoint.
pub struct Tokenizer {
    /// Path of `tokenizer.json`, for messages.
    path: PathBuf,
    backend: tokenizers::Tokenizer,
    /// Ids that `decode` leaves out on request.
    special: BTreeSet<u32>,
    /// Those of [`MARKS`].
    marks: BTreeSet<u32>,
    /// If `tokenizer_config.json` names the tokens around a text, it overrules `tokenizer.json`.
    ends: Option<Ends>,
    /// Named special tokens (`bos_token` ...) that templates may print.
    named: BTreeMap<String, String>,
    /// Chat templates by name, and their file.
    templates: BTreeMap<String, String>,
    templates_path: PathBuf,
    /// Whether the template wants texts as lists of parts: without tools, and with them. Once one was asked.
    wants_parts: [OnceLock<bool>; 2],
    /// The model's vocabulary, once `check_vocab` has compared it.
    vocab: OnceLock<u32>,
}

/// Ids around an encoded text.
struct Ends {
    first: Option<u32>,
    last: Option<u32>,
}

/// Folder of a checkpoint with further chat templates, each a file `NAME.jinja`.
pub const TEMPLATES: &str = "additional_chat_templates";
/// Most further chat templates that are read.
const TEMPLATES_MAX: usize = 32;

/// Every file of a checkpoint that [`Tokenizer::load`] reads, if it is there. Beside them are those of [`TEMPLATES`].
pub const FILES: [&str; 3] = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"];

impl Tokenizer {
    /// Reads the tokenizer of the checkpoint folder `dir`, or of a GGUF file, or of the folder of one.
    pub fn load(dir: &Path) -> Result<Tokenizer, TokenizerError> {
        if let Some((path, converted)) = of_gguf(dir)? {
            let failed = |reason| TokenizerError::Metadata { path: path.clone(), reason };
            let backend = backend(&converted.tokenizer).map_err(failed)?;
            let config = serde_json::to_vec(&converted.config).map_err(|error| error.to_string());
            let config = config.and_then(|bytes| Config::parse(&bytes)).map_err(failed)?;
            return Tokenizer::assemble(path.clone(), backend, path, config);
        }
        let [path, config_path, jinja_path] = FILES.map(|name| dir.join(name));
        let bytes = read(&path, TOKENIZER_BYTES_MAX)?.ok_or_else(|| TokenizerError::Missing { path: path.clone() })?;
        let corrupt = |reason| TokenizerError::Corrupt { path: path.clone(), reason };
        let backend = backend(&bytes).map_err(corrupt)?;
        let config = match read(&config_path, CONFIG_BYTES_MAX)? {
            None => Config::default(),
            Some(bytes) => {
                Config::parse(&bytes).map_err(|reason| TokenizerError::Corrupt { path: config_path.clone(), reason })?
            }
        };
        let mut tokenizer = Tokenizer::assemble(path, backend, config_path, config)?;
        let mut in_files = BTreeMap::new();
        if let Some(text) = template(&jinja_path)? {
            in_files.insert("default".to_owned(), text);
        }
        for (name, path) in further_templates(dir)? {
            in_files.extend(template(&path)?.map(|text| (name, text)));
        }
        // As in transformers, files replace what the config has.
        if !in_files.is_empty() {
            (tokenizer.templates, tokenizer.templates_path) = (in_files, jinja_path);
        }
        Ok(tokenizer)
    }

    /// Joins what `tokenizer.json` and `tokenizer_config.json` say.
    fn assemble(
        path: PathBuf,
        mut backend: tokenizers::Tokenizer,
        config_path: PathBuf,
        config: Config,
    ) -> Result<Tokenizer, TokenizerError> {
        guarded(|| add_tokens(&mut backend, &config))
            .map_err(|reason| TokenizerError::Corrupt { path: config_path.clone(), reason })?;
        let ends = config.ends(&backend);
        let special = backend
            .get_added_tokens_decoder()
            .into_iter()
            .filter(|(_, token)| backend.get_added_vocabulary().is_special_token(&token.content))
            .map(|(id, _)| id)
            .collect();
        let (templates, templates_path) = (config.templates, config_path);
        let marks = MARKS.iter().filter_map(|mark| backend.token_to_id(mark)).collect();
        let named = config.named.into_iter().map(|(name, token)| (name, token.content)).collect();
        let (wants_parts, vocab) = Default::default();
        Ok(Tokenizer { path, backend, special, marks, ends, named, templates, templates_path, wants_parts, vocab })
    }

    /// Compares with `vocab`, the rows of the model's embedding table; afterwards `encode` gives no id beyond it.
    ///
    /// Fewer tokens than rows are normal (tables are padded). A token of the base vocabulary beyond the table means
    /// another model's tokenizer. Tokens *added* beyond it are common (a padding token of a fine-tune, the image token
    /// of a text-only checkpoint) and matter only where a text contains them, which `encode` then refuses.
    pub fn check_vocab(&self, vocab: u32) -> Result<(), TokenizerError> {
        let mut tokens = self.backend.get_vocab(false);
        tokens.retain(|_, id| !self.backend.get_added_vocabulary().get_added_tokens_decoder().contains_key(id));
        let id_max = tokens.values().copied().max().unwrap_or(0);
        // The lowest id, and of equal ids the lowest token, because hash maps have no stable order.
        if let Some((id, token)) =
            tokens.into_iter().map(|(token, id)| (id, token)).filter(|(id, _)| *id >= vocab).min()
        {
            return Err(TokenizerError::VocabMismatch { path: self.path.clone(), vocab, id_max, id, token });
        }
        // A second comparison has the same vocabulary, so its result may be ignored.
        let _ = self.vocab.set(vocab);
        Ok(())
    }

    /// Token ids of `text`; `add_special_tokens` adds the checkpoint's tokens around a text.
    ///
    /// Special tokens that are spelled out in `text` become their ids.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TokenizerError> {
        let by_backend = add_special_tokens && self.ends.is_none();
        let encoding = guarded(|| self.backend.encode_fast(text, by_backend))
            .map_err(|reason| TokenizerError::Encode { reason })?;
        let mut ids = encoding.get_ids().to_vec();
        if let Some(ends) = self.ends.as_ref().filter(|_| add_special_tokens) {
            ids.splice(0..0, ends.first);
            ids.extend(ends.last);
        }
        if let Some(&vocab) = self.vocab.get() {
            check_ids(&ids, vocab).map_err(|error| match error {
                TokenizerError::IdBeyondVocab { id, index, vocab, .. } => {
                    TokenizerError::IdBeyondVocab { id, token: self.backend.id_to_token(id), index, vocab }
                }
                other => other,
            })?;
        }
        Ok(ids)
    }

    /// Text of `ids`; `skip_special` leaves special tokens out. Ids without a token (padding rows) print nothing.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TokenizerError> {
        guarded(|| self.backend.decode(ids, skip_special)).map_err(|reason| TokenizerError::Decode { reason })
    }

    /// One id inside of a text: some decoders print a space there that they leave out at the beginning.
    pub fn piece(&self, id: u32) -> Result<Piece, TokenizerError> {
        let alone = self.decode(&[id], false)?;
        let text = match self.encode("a", false)?.last() {
            None => alone,
            Some(&before) => {
                let (first, both) = (self.decode(&[before], false)?, self.decode(&[before, id], false)?);
                both.strip_prefix(&first).map_or(alone, str::to_owned)
            }
        };
        let bytes = match text.contains(char::REPLACEMENT_CHARACTER) {
            true => self.part_bytes(id),
            false => None,
        };
        Ok(Piece { bytes: bytes.unwrap_or_else(|| text.clone().into_bytes()), text })
    }

    /// The bytes of a token that is a part of a character, where the decoder is known.
    fn part_bytes(&self, id: u32) -> Option<Vec<u8>> {
        let token = self.backend.id_to_token(id).filter(|_| !self.special.contains(&id))?;
        let bytes = Bytes::of(&self.backend).ok()?.token(&token);
        std::str::from_utf8(&bytes).is_err().then_some(bytes)
    }

    /// The token that ends a text by `tokenizer_config.json`, if the model with `vocab` embedding rows has it.
    pub fn end(&self, vocab: u32) -> Option<u32> {
        self.backend.token_to_id(self.named.get("eos_token")?).filter(|id| *id < vocab)
    }

    /// The bytes of each of `vocab` ids inside of a text; none for special tokens and for ids without a token.
    ///
    /// The text of several ids is the concatenation of their bytes. To make sure, every id is decoded and compared.
    ///
    /// # Errors
    /// A decoder that is not known to do so, or a token for which it does not.
    pub fn token_bytes(&self, vocab: u32) -> Result<Vec<Vec<u8>>, TokenizerError> {
        let failed = |reason| TokenizerError::Bytes { path: self.path.clone(), reason };
        let bytes_of = Bytes::of(&self.backend).map_err(failed)?;
        let before = self.encode("a", false)?.last().copied();
        let before = before.ok_or_else(|| failed("`a` is encoded as nothing".to_string()))?;
        let first = self.decode(&[before], false)?;
        let of = |id: u32| {
            let Some(token) = self.backend.id_to_token(id).filter(|_| !self.special.contains(&id)) else {
                return Ok(vec![]);
            };
            let bytes = bytes_of.token(&token);
            let both = self.decode(&[before, id], false)?;
            let same = match (std::str::from_utf8(&bytes), both.strip_prefix(&first)) {
                (Ok(text), Some(found)) => found == text,
                // A part of a character.
                (Err(_), Some(found)) => found.contains(char::REPLACEMENT_CHARACTER),
                (_, None) => false,
            };
            match same {
                true => Ok(bytes),
                false => Err(failed(format!("token {id} (`{token}`) is decoded as something else"))),
            }
        };
        (0..vocab).map(of).collect()
    }

    /// A decoder of ids that arrive one by one.
    pub fn stream(&self, specials: Specials) -> Stream<'_> {
        Stream { tokenizer: self, specials, window: Vec::new(), settled: 0, printed: String::new() }
    }

    /// The file of the chat templates.
    pub fn chat_template_path(&self) -> &Path {
        &self.templates_path
    }

    /// The named special tokens (`bos_token` ...) and the chat template, as `tokenizer_config.json` writes them.
    pub fn config(&self) -> serde_json::Map<String, serde_json::Value> {
        let named = self.named.iter().map(|(name, token)| (name.clone(), json!(token)));
        named.chain([("chat_template".to_string(), json!(self.templates.get("default")))]).collect()
    }

    pub fn has_chat_template(&self) -> bool {
        self.templates.contains_key("default")
    }

    /// The prompt that the checkpoint's template makes of a conversation; `add_generation_prompt` adds the beginning of the reply.
    ///
    /// Templates write the special tokens themselves: encode the result without adding more, or use `encode_chat`.
    /// Some print today's date, in UTC.
    pub fn apply_chat(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String, TokenizerError> {
        let chat = Chat { messages: messages.to_vec(), reply: add_generation_prompt, ..Chat::default() };
        self.apply_chat_at(&chat, SystemTime::now())
    }

    /// Token ids of a conversation.
    ///
    /// # Errors
    /// A template that refuses the conversation; settings that it does not read, which would change nothing without a word.
    pub fn encode_chat(&self, chat: &Chat) -> Result<Prompt, TokenizerError> {
        let template = self.template(!chat.tools.is_empty())?;
        let tags = ["<think>", "</think>"];
        // If a tag is a special token, it does not occur in generated text.
        let visible = |tag: &&str| !self.backend.token_to_id(tag).is_some_and(|id| self.special.contains(&id));
        let thinks = tags.iter().any(|tag| template.contains(tag)) && tags.iter().all(visible);
        let chat = Chat { settings: settings(template, thinks, &chat.settings, &self.templates_path)?, ..chat.clone() };
        let text = self.apply_chat_at(&chat, SystemTime::now())?;
        let channels = self.channels().filter(|_| template.contains("<|channel|>"));
        let thinking = match (channels, thinks) {
            (Some(channels), _) => Thinking::Channels(channels),
            (None, false) => Thinking::None,
            (None, true) if text.trim_end().ends_with(tags[0]) => Thinking::Open,
            (None, true) if text.trim_end().ends_with(tags[1]) => Thinking::Over,
            (None, true) => Thinking::Possible,
        };
        Ok(Prompt { ids: self.encode(&text, false)?, thinking })
    }

    /// The form of Mistral's calls, if a call is written in it.
    fn mistral_form(&self, written: &str) -> Option<CallForm> {
        let calls = self.backend.token_to_id("[TOOL_CALLS]")?;
        let call = written.split_once("[TOOL_CALLS]")?.1.trim_start();
        if let Some(named) = call.strip_prefix("probe_call") {
            let named = named.strip_prefix("[CALL_ID]probe0000").unwrap_or(named);
            let arguments = Some(self.backend.token_to_id("[ARGS]")?);
            return named.starts_with("[ARGS]{\"probe\": 1}").then_some(CallForm::Mistral { calls, arguments });
        }
        let is_list = call.starts_with("[{\"name\": \"probe_call\", \"arguments\": {\"probe\": 1}");
        is_list.then_some(CallForm::Mistral { calls, arguments: None })
    }

    /// The tokens of channels, if the vocabulary has them.
    fn channels(&self) -> Option<Channels> {
        let id = |name: &str| self.backend.token_to_id(name);
        Some(Channels {
            start: id("<|start|>")?,
            channel: id("<|channel|>")?,
            constrain: id("<|constrain|>")?,
            message: id("<|message|>")?,
            end: id("<|end|>")?,
        })
    }

    /// Whether the template shows calls and results of earlier turns where no tools are offered.
    ///
    /// # Errors
    /// A template that leaves them out.
    pub fn shows_calls(&self) -> Result<(), TokenizerError> {
        let call = json!({ "name": "probe_call", "arguments": { "probe": 1 } });
        let calls = vec![json!({ "id": "probe0000", "type": "function", "function": call })];
        let called = Message { tool_calls: calls, ..Message::new("assistant", "") };
        let id = Some("probe0000".to_owned());
        let result =
            Message { tool_call_id: id, name: Some("probe_call".to_owned()), ..Message::new("tool", "probe_result") };
        let chat = Chat::new(vec![Message::new("user", "a"), called, result]);
        let written = self.apply_chat_at(&chat, SystemTime::now()).unwrap_or_default();
        match written.contains("probe_call") && written.contains("probe_result") {
            true => Ok(()),
            false => Err(TokenizerError::NoTools { path: self.templates_path.clone() }),
        }
    }

    /// The form in which texts of this checkpoint call tools: the form in which its template writes earlier calls.
    ///
    /// # Errors
    /// A template that leaves tools out, or that writes calls in another form.
    pub fn call_form(&self) -> Result<CallForm, TokenizerError> {
        let function =
            json!({ "name": "probe_tool", "description": "d", "parameters": { "type": "object", "properties": {} } });
        let tools = vec![json!({ "type": "function", "function": function })];
        let asked = Message::new("user", "a");
        let chat = Chat { tools, ..Chat::new(vec![asked.clone()]) };
        let shown = self.apply_chat_at(&chat, SystemTime::now())?;
        if !shown.contains("probe_tool") {
            return Err(TokenizerError::NoTools { path: self.templates_path.clone() });
        }
        let call = json!({ "name": "probe_call", "arguments": { "probe": 1 } });
        let calls = vec![json!({ "id": "probe0000", "type": "function", "function": call })];
        let called = Message { tool_calls: calls, ..Message::new("assistant", "") };
        // A template that refuses this conversation does not support calls.
        let chat = Chat { messages: vec![asked, called], reply: false, ..chat };
        let written = self.apply_chat_at(&chat, SystemTime::now()).unwrap_or_default();
        let tagged = "<tool_call>\n{\"name\": \"probe_call\", \"arguments\": {\"probe\": 1}}\n</tool_call>";
        let lines = "<tool_call>\n<function=probe_call>\n<parameter=probe>\n1\n</parameter>\n</function>\n</tool_call>";
        // If the tag is a special token, it does not occur in generated text.
        let visible = !self.backend.token_to_id("<tool_call>").is_some_and(|id| self.special.contains(&id));
        if written.contains(tagged) && visible {
            Ok(CallForm::Hermes)
        } else if written.contains(lines) && visible {
            Ok(CallForm::Xml)
        } else if written.contains("{\"name\": \"probe_call\", \"parameters\": {\"probe\": 1}}") {
            Ok(CallForm::Llama3)
        } else if let Some(channels) = self.channels()
            && written.contains(" to=functions.probe_call")
            && written.contains("<|message|>{\"probe\": 1}<|call|>")
        {
            Ok(CallForm::Channels(channels))
        } else if let Some(form) = self.mistral_form(&written) {
            Ok(form)
        } else {
            Err(TokenizerError::CallForm { path: self.templates_path.clone() })
        }
    }

    /// The template of conversations with or without tools, as transformers chooses it (`get_chat_template`).
    fn template(&self, with_tools: bool) -> Result<&str, TokenizerError> {
        let of_tools = self.templates.get("tool_use").filter(|_| with_tools);
        match of_tools.or_else(|| self.templates.get("default")) {
            Some(template) => Ok(template),
            None if self.templates.is_empty() => Err(TokenizerError::NoChatTemplate),
            None => Err(TokenizerError::NoDefaultTemplate { names: self.templates.keys().cloned().collect() }),
        }
    }

    fn apply_chat_at(&self, chat: &Chat, now: SystemTime) -> Result<String, TokenizerError> {
        let has_tools = !chat.tools.is_empty();
        let template = self.template(has_tools)?;
        let wants_parts = &self.wants_parts[usize::from(has_tools)];
        let wants_parts = *wants_parts.get_or_init(|| self.shows_parts_alone(template, chat, now));
        self.rendered(template, chat, wants_parts, now)
    }

    /// Whether a template leaves the text of a message out unless it is a list of parts, as templates of some multimodal models do.
    fn shows_parts_alone(&self, template: &str, chat: &Chat, now: SystemTime) -> bool {
        const TEXT: &str = "probe_text";
        let probe = Chat { messages: vec![Message::new("user", TEXT)], ..chat.clone() };
        let shows = |parts| self.rendered(template, &probe, parts, now).is_ok_and(|written| written.contains(TEXT));
        !shows(false) && shows(true)
    }

    /// What `template` makes of a conversation. `parts`: texts of messages are lists of one part.
    fn rendered(&self, template: &str, chat: &Chat, parts: bool, now: SystemTime) -> Result<String, TokenizerError> {
        let Chat { messages, tools, reply, settings } = chat;
        let mut context: BTreeMap<&str, Value> =
            self.named.iter().map(|(name, token)| (name.as_str(), Value::from(token.as_str()))).collect();
        let messages: Vec<Value> = messages.iter().map(|message| shown(message, template, parts)).collect();
        context.insert("messages", Value::from(messages));
        context.insert("add_generation_prompt", Value::from(*reply));
        // transformers passes these always, so that templates test them with `is none`.
        let tools = if tools.is_empty() { Value::from(()) } else { Value::from(Serde(tools)) };
        context.insert("tools", tools);
        context.insert("documents", Value::from(()));
        context.extend(settings.iter().map(|(name, value)| (name.as_str(), Value::from(Serde(value)))));
        guarded(|| jinja::render(template, context, now).map_err(|error| jinja::chain(&error).into()))
            .map_err(|reason| TokenizerError::ChatTemplate { path: self.templates_path.clone(), reason })
    }
}

/// A message as a template reads it; with its text as a list of one part, if `parts`.
fn shown(message: &Message, template: &str, parts: bool) -> Value {
    let Message { content, tool_calls, tool_call_id, reasoning_content, .. } = message;
    let mut members = json!(message);
    if parts && !content.is_empty() {
        members["content"] = json!([{ "type": "text", "text": content }]);
    }
    let thought = reasoning_content.as_ref().filter(|_| template.contains(".thinking"));
    // The template of gpt-oss refuses a call with thoughts and a text.
    if let Some(thought) = thought.filter(|_| tool_calls.is_empty() || content.is_empty()) {
        members["thinking"] = json!(thought);
    }
    // Templates of Mistral refuse other ids than those of nine letters and digits, which other servers give.
    if template.contains("length != 9") {
        let short = |id: &str| {
            let plain: Vec<char> = id.chars().filter(char::is_ascii_alphanumeric).collect();
            plain[plain.len().saturating_sub(9)..].iter().collect::<String>()
        };
        if let Some(id) = tool_call_id {
            members["tool_call_id"] = json!(short(id));
        }
        for (at, call) in tool_calls.iter().enumerate() {
            if let Some(id) = call["id"].as_str() {
                members["tool_calls"][at]["id"] = json!(short(id));
            }
        }
    }
    Value::from(Serde(members))
}

/// The tokenizer of the GGUF model at a place, as the files that it would have been; `None`: it is no GGUF model.
fn of_gguf(place: &Path) -> Result<Option<(PathBuf, gguf::Converted)>, TokenizerError> {
    let parts = files_of(place).map_err(TokenizerError::Gguf)?;
    let Some(first) = parts.and_then(|parts| parts.into_iter().next()) else { return Ok(None) };
    // A fault of the table of tensors has the name of its place, and the first is enough here.
    let header = Header::read(&first).map_err(|mut faults| TokenizerError::Gguf(faults.swap_remove(0)))?;
    let converted = gguf::convert(&header);
    converted
        .map(|converted| Some((first.clone(), converted)))
        .map_err(|reason| TokenizerError::Metadata { path: first, reason })
}

/// The files that define the tokenizer of a checkpoint, for a copy of them: names and content. Of a GGUF model they are made here.
///
/// # Errors
/// Files that cannot be read, and metadata that is no tokenizer.
pub fn files_to_copy(place: &Path) -> Result<Vec<(&'static str, Copied)>, TokenizerError> {
    let [file, config, _] = FILES;
    if let Some((path, converted)) = of_gguf(place)? {
        let config_bytes = serde_json::to_vec(&converted.config)
            .map_err(|error| TokenizerError::Metadata { path, reason: error.to_string() })?;
        return Ok(vec![(file, Copied::Bytes(converted.tokenizer)), (config, Copied::Bytes(config_bytes))]);
    }
    let there = FILES.into_iter().map(|name| (name, place.join(name))).filter(|(_, path)| path.exists());
    Ok(there.map(|(name, path)| (name, Copied::File(path))).collect())
}

/// The content of a file of [`files_to_copy`].
pub enum Copied {
    File(PathBuf),
    Bytes(Vec<u8>),
}

/// A tokenizer of the library, with the settings of a training run left out: a prompt is neither truncated nor padded.
fn backend(bytes: &[u8]) -> Result<tokenizers::Tokenizer, String> {
    let mut backend = guarded(|| tokenizers::Tokenizer::from_bytes(bytes))?;
    backend.with_truncation(None).map_err(|error| error.to_string())?;
    backend.with_padding(None);
    if let ModelWrapper::BPE(model) = backend.get_model()
        && model.dropout.is_some_and(|dropout| dropout > 0.0)
    {
        return Err("expected `dropout` to be null, since it makes ids random".to_owned());
    }
    Ok(backend)
}

/// The settings that a template reads, of those that are asked for.
///
/// Where a model cannot think, to turn thinking off changes nothing. Where thinking can only be on or off, every effort but `none` turns it on.
fn settings(
    template: &str,
    thinks: bool,
    asked: &serde_json::Map<String, serde_json::Value>,
    path: &Path,
) -> Result<serde_json::Map<String, serde_json::Value>, TokenizerError> {
    const OWN: [&str; 4] = ["messages", "tools", "documents", "add_generation_prompt"];
    let mut read = serde_json::Map::new();
    for (name, value) in asked {
        let has = |name: &str| !OWN.contains(&name) && !NAMED.contains(&name) && jinja::reads(template, name);
        let is_off = match name.as_str() {
            EFFORT_SETTING => value == "none",
            _ => value == false,
        };
        match name.as_str() {
            name if has(name) => {
                read.insert(name.to_owned(), value.clone());
            }
            EFFORT_SETTING if has(THINKING_SETTING) => {
                read.entry(THINKING_SETTING).or_insert(json!(!is_off));
            }
            EFFORT_SETTING | THINKING_SETTING | "thinking" if is_off && !thinks => {}
            name => {
                let path = path.to_path_buf();
                // A template that cannot be read has no settings at all.
                return Err(match jinja::fault(template) {
                    Some(reason) => TokenizerError::ChatTemplate { path, reason },
                    None => TokenizerError::NoSetting { path, name: name.to_owned() },
                });
            }
        }
    }
    Ok(read)
}

/// A chat template in a file of its own.
fn template(path: &Path) -> Result<Option<String>, TokenizerError> {
    let Some(bytes) = read(path, CONFIG_BYTES_MAX)? else { return Ok(None) };
    let text = String::from_utf8(bytes).map_err(|error| TokenizerError::Corrupt {
        path: path.to_owned(),
        reason: format!("expected UTF-8: {error}"),
    })?;
    Ok(Some(text))
}

/// Name and path of each template in [`TEMPLATES`].
///
/// # Errors
/// A folder that cannot be read, or that has more files than any checkpoint.
pub fn further_templates(dir: &Path) -> Result<BTreeMap<String, PathBuf>, TokenizerError> {
    let folder = dir.join(TEMPLATES);
    let entries = match std::fs::read_dir(&folder) {
        Ok(entries) => entries,
        // A GGUF file is no folder.
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(BTreeMap::new());
        }
        Err(source) => return Err(TokenizerError::Read { path: folder, source }),
    };
    let mut found = BTreeMap::new();
    for entry in entries {
        let path = entry.map_err(|source| TokenizerError::Read { path: folder.clone(), source })?.path();
        if path.extension().is_some_and(|ending| ending == "jinja")
            && let Some(name) = path.file_stem().and_then(|name| name.to_str())
        {
            found.insert(name.to_owned(), path);
        }
        if found.len() > TEMPLATES_MAX {
            let reason = format!("expected at most {TEMPLATES_MAX} templates, found more");
            return Err(TokenizerError::Corrupt { path: folder, reason });
        }
    }
    Ok(found)
}

/// Refuses ids for which a model with `vocab` embedding rows has no row.
pub fn check_ids(ids: &[u32], vocab: u32) -> Result<(), TokenizerError> {
    match ids.iter().position(|&id| id >= vocab) {
        Some(index) => Err(TokenizerError::IdBeyondVocab { id: ids[index], token: None, index, vocab }),
        None => Ok(()),
    }
}

/// How a decoder makes bytes of tokens.
enum Bytes {
    /// Each byte is a character, as in GPT-2; a token with any other character is its own text.
    Level(BTreeMap<char, u8>),
    /// Some texts are replaced by others; with `fallback`, `<0xE6>` is a byte.
    Pieces { replaced: Vec<(String, String)>, fallback: bool },
}

impl Bytes {
    /// The decoder of a tokenizer, or why it is not supported.
    fn of(backend: &tokenizers::Tokenizer) -> Result<Bytes, String> {
        let decoder = serde_json::to_value(backend.get_decoder()).map_err(|error| error.to_string())?;
        let steps = match decoder.get("decoders").and_then(serde_json::Value::as_array) {
            Some(steps) => steps.clone(),
            None => vec![decoder],
        };
        let text = |value: &serde_json::Value| value.as_str().map(str::to_owned);
        let (mut replaced, mut fallback, mut fused) = (vec![], false, false);
        for (at, step) in steps.iter().enumerate() {
            let kind = step.get("type").and_then(serde_json::Value::as_str).unwrap_or("none");
            match kind {
                "ByteLevel" if steps.len() == 1 => return Ok(Bytes::Level(byte_level())),
                "Replace" if !fallback && !fused => match (text(&step["pattern"]["String"]), text(&step["content"])) {
                    (Some(from), Some(to)) => replaced.push((from, to)),
                    _ => return Err("its decoder replaces text by a pattern".to_string()),
                },
                "Metaspace" if steps.len() == 1 => {
                    replaced.extend(text(&step["replacement"]).map(|from| (from, " ".to_string())));
                }
                "ByteFallback" if !fused => fallback = true,
                "Fuse" => fused = true,
                // After `Fuse` it strips the beginning of the whole text only.
                "Strip" if fused && step["stop"] == 0 => {}
                _ => return Err(format!("step {at} of its decoder is `{kind}`")),
            }
        }
        Ok(Bytes::Pieces { replaced, fallback })
    }

    fn token(&self, token: &str) -> Vec<u8> {
        match self {
            Bytes::Level(table) => {
                let bytes: Option<Vec<u8>> = token.chars().map(|c| table.get(&c).copied()).collect();
                bytes.unwrap_or_else(|| token.as_bytes().to_vec())
            }
            Bytes::Pieces { replaced, fallback } => {
                let text = replaced.iter().fold(token.to_owned(), |text, (from, to)| text.replace(from, to));
                let digits = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>')).filter(|d| d.len() == 2);
                match digits.filter(|_| *fallback).and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
                    Some(byte) => vec![byte],
                    None => text.into_bytes(),
                }
            }
        }
    }
}

/// The characters that GPT-2 uses for bytes (`bytes_to_unicode`): printable bytes are themselves, the others begin at U+0100.
fn byte_level() -> BTreeMap<char, u8> {
    let printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let own = (0..=u8::MAX).filter(printable).map(|byte| (char::from(byte), byte));
    let others = (0..=u8::MAX).filter(|byte| !printable(byte)).zip('\u{100}'..).map(|(byte, c)| (c, byte));
    own.chain(others).collect()
}

/// Text from ids that arrive one by one, printed as early as it is certain.
///
/// The texts that `push` and `finish` return, joined, equal `decode` of all ids. One id may be a part of a character, so text is
/// held back while it may end in an incomplete one. A decoder may treat the first token specially (it drops the space before
/// a word), so ids are decoded together with earlier ones.
///
/// Where special tokens are hidden, so is the token that ends texts, though its tokenizer may not call it special.
///
/// One exception: tokenizers with byte fallback (`<0xE6>`) decode a run of bytes either as a whole or not at all. Characters of such a
/// run that were printed stay, where `decode` would replace the whole run because a later byte is invalid.
pub struct Stream<'a> {
    tokenizer: &'a Tokenizer,
    specials: Specials,
    /// The newest ids. The first `settled` ones are printed completely, and kept as context.
    window: Vec<u32>,
    settled: usize,
    /// The part of the window's text that is printed.
    printed: String,
}

/// Text that ends in replacement characters is held back up to this number of ids. Then all of these characters except
/// `INCOMPLETE_MAX` print, and the window is cut to its newer half, so that endless garbage costs the same per id as text.
const WINDOW_IDS_MAX: usize = 32;
/// Replacement characters that one incomplete character decodes to: one, or with byte fallback one per byte.
const INCOMPLETE_MAX: usize = 3;

impl Stream<'_> {
    /// Takes the next id. Returns the text that became certain: often none, or more than the id's own.
    pub fn push(&mut self, id: u32) -> Result<String, TokenizerError> {
        let Tokenizer { special, marks, .. } = self.tokenizer;
        let is_hidden = match self.specials {
            Specials::Shown => false,
            Specials::Hidden => special.contains(&id) || self.tokenizer.end(u32::MAX) == Some(id),
            Specials::Marks => special.contains(&id) && !marks.contains(&id),
        };
        // As context, such an id would be taken for a first token that prints.
        if is_hidden {
            return Ok(String::new());
        }
        self.window.push(id);
        let mut text = self.decode(&self.window)?;
        if !text.starts_with(&self.printed) {
            if text.ends_with(char::REPLACEMENT_CHARACTER) && self.window.len() <= WINDOW_IDS_MAX {
                return Ok(String::new());
            }
            // A run of bytes that was valid so far has become invalid: continue after the printed text.
            self.window.drain(..self.settled);
            self.settled = 0;
            self.printed.clear();
            text = self.decode(&self.window)?;
        }
        let incomplete_max = if self.window.len() <= WINDOW_IDS_MAX { usize::MAX } else { INCOMPLETE_MAX };
        let certain = certain_len(&text, incomplete_max).max(self.printed.len());
        let new = text.get(self.printed.len()..certain).unwrap_or_default().to_owned();
        self.printed.push_str(&new);
        if certain == text.len() && !new.is_empty() {
            self.window.drain(..self.settled);
            self.settled = self.window.len();
            self.printed = self.decode(&self.window)?;
        } else if self.window.len() > WINDOW_IDS_MAX {
            self.window.drain(..self.window.len() - WINDOW_IDS_MAX / 2);
            self.settled = 0;
            let mut text = self.decode(&self.window)?;
            text.truncate(certain_len(&text, INCOMPLETE_MAX));
            self.printed = text;
        }
        Ok(new)
    }

    /// Ends the stream and returns what was held back; an incomplete character prints as U+FFFD, as in `decode`.
    pub fn finish(self) -> Result<String, TokenizerError> {
        let text = self.decode(&self.window)?;
        match text.strip_prefix(&self.printed) {
            Some(rest) => Ok(rest.to_owned()),
            None => self.decode(self.window.get(self.settled..).unwrap_or_default()),
        }
    }

    fn decode(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        self.tokenizer.decode(ids, self.specials == Specials::Hidden)
    }
}

/// Bytes of `text` before the replacement characters at its end, of which at most `incomplete_max` count.
fn certain_len(text: &str, incomplete_max: usize) -> usize {
    let trailing = text.chars().rev().take(incomplete_max).take_while(|&c| c == char::REPLACEMENT_CHARACTER).count();
    text.len() - trailing * char::REPLACEMENT_CHARACTER.len_utf8()
}

/// The whole file, or `None` if there is none.
fn read(path: &Path, bytes_max: u64) -> Result<Option<Vec<u8>>, TokenizerError> {
    let failed = |source| TokenizerError::Read { path: path.to_owned(), source };
    let file = match files::open(path) {
        Ok(file) => file,
        Err(FileError::Read { cause, .. }) if cause.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(FileError::Read { cause, .. }) => return Err(failed(cause)),
        Err(error) => return Err(TokenizerError::NotRegular(error)),
    };
    let mut bytes = Vec::new();
    file.take(bytes_max + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > bytes_max {
        return Err(TokenizerError::TooLarge { path: path.to_owned(), bytes_max });
    }
    Ok(Some(bytes))
}

/// Runs library code on data that is not trusted: a panic there becomes an error here, and does not end the process.
fn guarded<T>(work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(error.to_string()),
        Err(panic) => {
            let text = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&str>().copied())
                .unwrap_or("without a message");
            Err(format!("a library panicked: {text}"))
        }
    }
}

/// The fields of `tokenizer_config.json` that are used.
#[derive(Default)]
struct Config {
    /// In ascending order of the id that the file declares.
    added: Vec<AddedToken>,
    /// `bos_token`, `eos_token` ..., if the file names them.
    named: Vec<(String, AddedToken)>,
    /// Special tokens without a name.
    extra: Vec<AddedToken>,
    /// `add_bos_token`, `add_eos_token`; `None` if the file has neither.
    add_ends: Option<(bool, bool)>,
    templates: BTreeMap<String, String>,
}

/// The special tokens with a name, in the order of transformers (`SPECIAL_TOKENS_ATTRIBUTES`).
const NAMED: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

impl Config {
    /// Parses the keys that are used; other keys may have any value.
    fn parse(bytes: &[u8]) -> Result<Config, String> {
        let file: serde_json::Map<String, serde_json::Value> =
            serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        let mut config = Config::default();
        let present = |key: &str| file.get(key).filter(|value| !value.is_null());

        if let Some(value) = present("added_tokens_decoder") {
            let tokens = value.as_object().ok_or("`added_tokens_decoder`: expected an object")?;
            let mut by_id = BTreeMap::new();
            for (id, value) in tokens {
                let place = || format!("`added_tokens_decoder.{id}`");
                let number: u32 = id.parse().map_err(|_| format!("{}: expected a token id as key", place()))?;
                by_id.insert(number, token(value).ok_or_else(|| format!("{}: expected a token", place()))?);
            }
            config.added = by_id.into_values().collect();
        }
        for name in NAMED {
            if let Some(value) = present(name) {
                let mut token = token(value).ok_or_else(|| format!("`{name}`: expected a token"))?;
                token.special = true;
                config.named.push((name.to_owned(), token));
            }
        }
        for name in ["additional_special_tokens", "extra_special_tokens"] {
            let values: Vec<&serde_json::Value> = match present(name) {
                None => Vec::new(),
                Some(serde_json::Value::Array(values)) => values.iter().collect(),
                Some(serde_json::Value::Object(values)) => values.values().collect(),
                Some(_) => return Err(format!("`{name}`: expected a list of tokens")),
            };
            for value in values {
                config.extra.push(token(value).ok_or_else(|| format!("`{name}`: expected a list of tokens"))?);
            }
        }
        if file.contains_key("add_bos_token") || file.contains_key("add_eos_token") {
            let set = |key: &str| file.get(key).and_then(serde_json::Value::as_bool).unwrap_or(false);
            config.add_ends = Some((set("add_bos_token"), set("add_eos_token")));
        }
        match present("chat_template") {
            None => {}
            Some(serde_json::Value::String(text)) => {
                config.templates.insert("default".to_owned(), text.clone());
            }
            Some(value) => {
                #[derive(Deserialize)]
                struct Named {
                    name: String,
                    template: String,
                }
                let templates = Vec::<Named>::deserialize(value).map_err(
                    |_| "`chat_template`: expected a string or a list of objects with `name` and `template`",
                )?;
                config.templates = templates.into_iter().map(|named| (named.name, named.template)).collect();
            }
        }
        Ok(config)
    }

    /// The tokens that `add_bos_token` and `add_eos_token` put around a text, in place of those of `tokenizer.json`.
    fn ends(&self, backend: &tokenizers::Tokenizer) -> Option<Ends> {
        let id = |add: bool, name: &str| {
            let (_, token) = self.named.iter().find(|(named, _)| add && named == name)?;
            backend.token_to_id(&token.content)
        };
        self.add_ends.map(|(bos, eos)| Ends { first: id(bos, "bos_token"), last: id(eos, "eos_token") })
    }
}

/// A token as `tokenizer_config.json` writes it: a string, or an object with `content` and flags.
fn token(value: &serde_json::Value) -> Option<AddedToken> {
    if let Some(text) = value.as_str() {
        return Some(AddedToken::from(text, true));
    }
    let content = value.get("content")?.as_str()?;
    let flag = |name: &str| value.get(name).and_then(serde_json::Value::as_bool);
    let special = flag("special").unwrap_or(false);
    Some(
        AddedToken::from(content, special)
            .normalized(flag("normalized").unwrap_or(!special))
            .single_word(flag("single_word").unwrap_or(false))
            .lstrip(flag("lstrip").unwrap_or(false))
            .rstrip(flag("rstrip").unwrap_or(false)),
    )
}

/// Adds the information that only `tokenizer_config.json` has: flags of added tokens, special tokens.
///
/// A token without an id in both files gets the next free one, as in transformers; `check_vocab` guards its use.
fn add_tokens(backend: &mut tokenizers::Tokenizer, config: &Config) -> tokenizers::Result<()> {
    let names: BTreeSet<&str> = config.named.iter().map(|(_, token)| token.content.as_str()).collect();
    let mut known: BTreeSet<String> = backend.get_added_vocabulary().get_vocab().keys().cloned().collect();
    let mut tokens = Vec::new();
    for token in &config.added {
        known.insert(token.content.clone());
        let special = token.special || names.contains(token.content.as_str());
        tokens.push(token.clone().special(special));
    }
    for token in config.named.iter().map(|(_, token)| token).chain(&config.extra) {
        if known.insert(token.content.clone()) {
            tokens.push(token.clone());
        }
    }
    backend.add_tokens(tokens)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Tier;
    use proptest::prelude::*;
    use serde_json::Value as Json;
    use std::sync::LazyLock;
    use std::time::{Duration, UNIX_EPOCH};

    fn fixture() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tinystories-llama")
    }

    static STORIES: LazyLock<Tokenizer> = LazyLock::new(|| Tokenizer::load(&fixture()).expect("the fixture loads"));

    fn goldens() -> Json {
        let text = std::fs::read_to_string(fixture().join("goldens.json")).expect("goldens.json");
        serde_json::from_str(&text).expect("goldens.json is JSON")
    }

    fn parse<T: serde::de::DeserializeOwned>(value: &Json) -> T {
        T::deserialize(value).unwrap_or_else(|error| panic!("{error}: {value}"))
    }

    /// A folder with these files.
    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a temporary folder");
        for (name, text) in files {
            std::fs::write(dir.path().join(name), text).expect("a file in it");
        }
        dir
    }

    fn fixture_json() -> String {
        std::fs::read_to_string(fixture().join("tokenizer.json")).expect("tokenizer.json")
    }

    /// The fixture's tokenizer with another `tokenizer_config.json`.
    fn with_config(config: Json) -> Tokenizer {
        let dir = folder(&[("tokenizer.json", &fixture_json()), ("tokenizer_config.json", &config.to_string())]);
        Tokenizer::load(dir.path()).expect("it loads")
    }

    /// A tokenizer in the manner of Llama 2: spaces as `▁`, bytes as `<0xE6>`, the first space dropped.
    fn byte_fallback() -> Tokenizer {
        let mut vocab = serde_json::Map::new();
        for token in ["<unk>", "<s>"] {
            vocab.insert(token.to_owned(), json!(vocab.len()));
        }
        for byte in 0..=255u8 {
            vocab.insert(format!("<0x{byte:02X}>"), json!(vocab.len()));
        }
        for token in ["▁", "a", "b", "日", "▁a", "▁▁"] {
            vocab.insert(token.to_owned(), json!(vocab.len()));
        }
        let file = json!({
            "version": "1.0",
            "added_tokens": [{"id": 1, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
                              "normalized": false, "special": true}],
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
            "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true,
                      "vocab": vocab, "merges": ["▁ a", "▁ ▁"]}
        });
        let dir = folder(&[("tokenizer.json", &file.to_string())]);
        Tokenizer::load(dir.path()).expect("it loads")
    }

    fn streamed(tokenizer: &Tokenizer, ids: &[u32], skip_special: bool) -> String {
        let mut stream = tokenizer.stream(Specials::of(skip_special));
        let mut text = String::new();
        for &id in ids {
            text.push_str(&stream.push(id).expect("it decodes"));
            assert!(stream.window.len() <= 2 * WINDOW_IDS_MAX, "the window is bounded");
        }
        text + &stream.finish().expect("it decodes")
    }

    #[test]
    fn every_golden_text_encodes_and_decodes_exactly() {
        let goldens = goldens();
        let cases = goldens["tokenizer_cases"].as_array().expect("tokenizer_cases");
        assert_eq!(cases.len(), 32);
        for case in cases {
            let text: String = parse(&case["text"]);
            let ids: Vec<u32> = parse(&case["ids"]);
            let add_special_tokens: bool = parse(&case["add_special_tokens"]);
            assert_eq!(STORIES.encode(&text, add_special_tokens).expect("it encodes"), ids, "{text:?}");
            let decoded: String = parse(&case["decoded"]);
            assert_eq!(STORIES.decode(&ids, false).expect("it decodes"), decoded);
            assert_eq!(streamed(&STORIES, &ids, false), decoded);
            let plain = STORIES.decode(&ids, true).expect("it decodes");
            assert_eq!(streamed(&STORIES, &ids, true), plain);
        }
    }

    #[test]
    fn every_golden_chat_renders_and_encodes_exactly() {
        let goldens = goldens();
        assert!(STORIES.has_chat_template());
        let cases = goldens["chat_cases"].as_array().expect("chat_cases");
        assert_eq!(cases.len(), 4);
        for case in cases {
            let messages: Vec<Message> = parse(&case["messages"]);
            let opens: bool = parse(&case["add_generation_prompt"]);
            assert_eq!(STORIES.apply_chat(&messages, opens).expect("it renders"), parse::<String>(&case["rendered"]));
            let prompt = STORIES.encode_chat(&Chat { reply: opens, ..Chat::new(messages) }).expect("it encodes");
            assert_eq!((prompt.ids, prompt.thinking), (parse::<Vec<u32>>(&case["ids"]), Thinking::None));
        }
    }

    #[test]
    fn every_golden_prompt_and_continuation() {
        let goldens = goldens();
        let prompts = goldens["prompts"].as_array().expect("prompts");
        assert_eq!(prompts.len(), 8);
        for prompt in prompts {
            let ids = match &prompt["messages"] {
                Json::Null => STORIES.encode(&parse::<String>(&prompt["text"]), true),
                messages => STORIES.encode_chat(&Chat::new(parse(messages))).map(|prompt| prompt.ids),
            };
            assert_eq!(ids.expect("it encodes"), parse::<Vec<u32>>(&prompt["ids"]), "{}", prompt["name"]);
            let greedy: Vec<u32> = parse(&prompt["greedy_ids"]);
            let text: String = parse(&prompt["greedy_text"]);
            assert_eq!(STORIES.decode(&greedy, false).expect("it decodes"), text);
            assert_eq!(streamed(&STORIES, &greedy, false), text);
        }
    }

    #[test]
    fn a_stream_prints_whole_characters_as_soon_as_they_are_whole() {
        let mut stream = STORIES.stream(Specials::Shown);
        // 日本 takes six byte tokens here.
        let pieces: Vec<String> = STORIES
            .encode("日本 a", false)
            .expect("it encodes")
            .into_iter()
            .map(|id| stream.push(id).expect("it decodes"))
            .collect();
        assert_eq!(pieces, ["", "", "日", "", "", "本", " a"]);
        assert_eq!(stream.finish().expect("it decodes"), "");

        let mut stream = STORIES.stream(Specials::Shown);
        let ids = STORIES.encode("🦊", false).expect("it encodes");
        for id in &ids[..ids.len() - 1] {
            assert_eq!(stream.push(*id).expect("it decodes"), "");
        }
        assert_eq!(stream.finish().expect("it decodes"), "\u{FFFD}", "cut short, it prints as `decode` prints it");
    }

    #[test]
    fn a_stream_keeps_spaces_and_bytes_of_a_sentencepiece_decoder() {
        let tokenizer = byte_fallback();
        for text in ["a a  b", " a", "  ", "ba 日 語 a🦊🚀b", "ünï é"] {
            let ids = tokenizer.encode(text, true).expect("it encodes");
            assert_eq!(tokenizer.decode(&ids, false).expect("it decodes"), text);
            assert_eq!(streamed(&tokenizer, &ids, false), text);
        }
        // A special token that is left out is no context: the first word still loses its space, the next keeps it.
        let word = tokenizer.encode("a", false).expect("it encodes");
        let ids = [&[1], &word[..], &[1, 1], &word[..]].concat();
        assert_eq!(streamed(&tokenizer, &ids, true), "a a");
        // A byte run that turns out invalid after a character of it was printed: the character stays.
        let run = [0xE6, 0x97, 0xA5, 0xFF].map(|byte| byte + 2);
        assert_eq!(tokenizer.decode(&run, false).expect("it decodes"), "\u{FFFD}".repeat(4));
        assert_eq!(streamed(&tokenizer, &run, false), "日\u{FFFD}");
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

        /// Any ids at all, most of them broken UTF-8: a quarter of this vocabulary are single bytes.
        #[test]
        fn a_stream_equals_the_whole(
            ids in prop::collection::vec(prop_oneof![0u32..1030, 160u32..260], 0..120), skip_special: bool,
        ) {
            let whole = STORIES.decode(&ids, skip_special).expect("it decodes");
            prop_assert_eq!(streamed(&STORIES, &ids, skip_special), whole);
        }

        #[test]
        fn a_stream_of_real_text_equals_the_text(text in "[ \\PCa-z日🦊\u{FFFD}]{0,60}") {
            for tokenizer in [&*STORIES, &byte_fallback()] {
                let ids = tokenizer.encode(&text, false).expect("it encodes");
                prop_assert_eq!(streamed(tokenizer, &ids, false), tokenizer.decode(&ids, false).expect("it decodes"));
            }
        }
    }

    #[test]
    fn the_bytes_of_tokens_are_the_bytes_of_their_text() {
        let tokenizer = Tokenizer::load(&fixture()).unwrap();
        let bytes = tokenizer.token_bytes(1030).unwrap();
        assert_eq!((bytes[0].len(), bytes[1029].len(), bytes.len()), (0, 0, 1030), "a special token, and none");
        for text in ["Once upon a time", "  a\n\tb", "Füchse 🦊 und 狐", "{\"a\": [1, 2]}", "\u{0}\u{7f}"] {
            let ids = tokenizer.encode(text, false).unwrap();
            let joined: Vec<u8> = ids.iter().flat_map(|id| bytes[*id as usize].clone()).collect();
            assert_eq!(joined, text.as_bytes());
        }
        // Every byte is a token, and pieces have spaces.
        let tokenizer = byte_fallback();
        let vocab = tokenizer.backend.get_vocab_size(true) as u32;
        let bytes = tokenizer.token_bytes(vocab).unwrap();
        for text in ["the fox", "狐", "a\u{1}"] {
            let ids = tokenizer.encode(text, false).unwrap();
            let joined: Vec<u8> = ids.iter().flat_map(|id| bytes[*id as usize].clone()).collect();
            assert_eq!(String::from_utf8_lossy(&joined).trim_start(), text);
        }
    }

    #[test]
    fn a_decoder_that_is_not_known_has_no_bytes() {
        let mut json: Json = serde_json::from_str(&fixture_json()).unwrap();
        for (decoder, expected) in [
            (json!({ "type": "WordPiece", "prefix": "##", "cleanup": true }), "step 0 of its decoder is `WordPiece`"),
            (Json::Null, "step 0 of its decoder is `none`"),
            // It is known, and this vocabulary is not of its kind.
            (
                json!({ "type": "Sequence", "decoders": [{ "type": "Fuse" }, { "type": "Strip", "content": " ", "start": 1, "stop": 1 }] }),
                "step 1 of its decoder is `Strip`",
            ),
        ] {
            json["decoder"] = decoder;
            let dir = folder(&[("tokenizer.json", &json.to_string())]);
            let error = Tokenizer::load(dir.path()).unwrap().token_bytes(1024).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn long_garbage_neither_grows_nor_loses_text() {
        let byte = |b: u8| {
            STORIES.backend.get_vocab(false).values().copied().find(|&id| {
                STORIES.backend.id_to_token(id).is_some_and(|token| token.chars().count() == 1)
                    && STORIES.decode(&[id], false).is_ok_and(|text| text.as_bytes() == [b])
            })
        };
        let letter = byte(b'a').expect("a token for `a`");
        // U+FFFD itself, three byte tokens each, a hundred times over.
        let ids = STORIES.encode(&("\u{FFFD}".repeat(100) + "a"), false).expect("it encodes");
        assert!(ids.len() > 200 && ids.last() == Some(&letter));
        assert_eq!(streamed(&STORIES, &ids, false), "\u{FFFD}".repeat(100) + "a");
        // The same byte, never a character.
        let ids = [vec![ids[0]; 500], vec![letter]].concat();
        assert_eq!(streamed(&STORIES, &ids, false), "\u{FFFD}".repeat(500) + "a");
    }

    #[test]
    fn templates_render_as_transformers_renders_them() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/chat_templates.json");
        let file: Json = serde_json::from_str(&std::fs::read_to_string(file).expect("the file")).expect("JSON");
        let now = UNIX_EPOCH + Duration::from_secs(parse(&file["now_unix_s"]));
        let cases = file["cases"].as_array().expect("cases");
        assert_eq!(cases.len(), 30);
        for case in cases {
            let (name, conversation): (String, String) = (parse(&case["template"]), parse(&case["messages"]));
            let tokenizer = with_config(json!({
                "bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": file["templates"][&name]
            }));
            let messages: Vec<Message> = parse(&file["messages"][&conversation]);
            let chat = Chat { reply: parse(&case["add_generation_prompt"]), ..Chat::new(messages) };
            let rendered = tokenizer.apply_chat_at(&chat, now);
            match &case["rendered"] {
                Json::String(want) => assert_eq!(&rendered.expect(&name), want, "{name}, {conversation}"),
                refused => {
                    let message = rendered.expect_err("the template refuses").to_string();
                    assert!(message.contains(refused["error"].as_str().expect("an error")), "{message}");
                }
            }
        }
    }

    /// Parts of the templates of Qwen 2.5 and of Llama 3.1.
    const QWEN: &str = r#"{%- if tools %}<|im_start|>system
{%- for tool in tools %}{{ "\n" }}{{ tool | tojson }}{%- endfor %}<|im_end|>
{% endif %}{%- for message in messages %}{{- '<|im_start|>' + message.role }}{%- if message.content %}{{- '\n' + message.content }}{%- endif %}
{%- for tool_call in message.tool_calls %}{%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
{{- '\n<tool_call>\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}{{- tool_call.arguments | tojson }}{{- '}\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"#;
    const LLAMA: &str = r#"{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) }}{%- endfor %}{%- endif %}
{%- for message in messages %}{%- if 'tool_calls' in message %}{%- set tool_call = message.tool_calls[0].function %}
{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}
{%- else %}{{- message.content }}{%- endif %}{%- endfor %}"#;

    /// Parts of the template of Qwen3.5.
    const QWEN3_5: &str = r#"{%- for tool in tools %}{{ tool | tojson }}{%- endfor %}{%- for message in messages %}
{%- if message.tool_calls and message.tool_calls is iterable and message.tool_calls is not mapping %}
{%- for tool_call in message.tool_calls %}{%- set tool_call = tool_call.function %}
{{- '<tool_call>\n<function=' + tool_call.name + '>\n' }}{%- for args_name, args_value in tool_call.arguments|items %}
{{- '<parameter=' + args_name + '>\n' }}
{%- set args_value = args_value | tojson | safe if args_value is mapping or (args_value is sequence and args_value is not string) else args_value | string %}
{{- args_value }}{{- '\n</parameter>\n' }}{%- endfor %}{{- '</function>\n</tool_call>' }}{%- endfor %}{%- endif %}{%- endfor %}"#;

    #[test]
    fn a_template_says_how_tools_are_called() {
        let form = |template: &str| with_config(json!({ "chat_template": template })).call_form();
        assert_eq!(form(QWEN).unwrap(), CallForm::Hermes);
        assert_eq!(form(LLAMA).unwrap(), CallForm::Llama3);
        assert_eq!(form(QWEN3_5).unwrap(), CallForm::Xml);
        let none = Tokenizer::load(&fixture()).unwrap().call_form();
        assert!(matches!(none, Err(TokenizerError::NoTools { .. })));
        let other = QWEN.replace("<tool_call>", "[CALL]");
        assert!(matches!(form(&other), Err(TokenizerError::CallForm { .. })));
        // A tag that clients do not see.
        let special = json!({ "chat_template": QWEN, "additional_special_tokens": ["<tool_call>"] });
        assert!(matches!(with_config(special).call_form(), Err(TokenizerError::CallForm { .. })));
    }

    #[test]
    fn a_chat_template_is_found_wherever_checkpoints_keep_it() {
        let hello = [Message::new("user", "hi")];
        assert!(!with_config(json!({})).has_chat_template());
        let error = with_config(json!({})).apply_chat(&hello, true).expect_err("none");
        assert_eq!(error.to_string(), "the checkpoint has no chat template");

        let listed = json!([{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]);
        assert_eq!(with_config(json!({"chat_template": listed})).apply_chat(&hello, true).expect("it renders"), "yes");
        let other = with_config(json!({"chat_template": [{"name": "rag", "template": "no"}]}));
        assert!(!other.has_chat_template());
        let error = other.apply_chat(&hello, true).expect_err("no default");
        assert_eq!(error.to_string(), "expected a chat template named `default`, found `rag`");

        let chat = |tokenizer: &Tokenizer, tools: Vec<Json>| {
            tokenizer
                .apply_chat_at(&Chat { tools, ..Chat::new(hello.to_vec()) }, SystemTime::now())
                .expect("it renders")
        };
        let listed = with_config(json!({"chat_template": [
            {"name": "tool_use", "template": "tools"}, {"name": "default", "template": "none"}
        ]}));
        assert_eq!((chat(&listed, vec![json!(1)]), chat(&listed, vec![])), ("tools".to_string(), "none".to_string()));

        let dir = folder(&[
            ("tokenizer.json", &fixture_json()),
            ("tokenizer_config.json", r#"{"chat_template": "old"}"#),
            ("chat_template.jinja", "{{ messages[0].content }}\n"),
        ]);
        let tokenizer = Tokenizer::load(dir.path()).expect("it loads");
        assert_eq!(tokenizer.apply_chat(&hello, true).expect("it renders"), "hi", "the file of its own wins");
        std::fs::create_dir(dir.path().join(TEMPLATES)).unwrap();
        std::fs::write(dir.path().join(TEMPLATES).join("tool_use.jinja"), "with tools").unwrap();
        let tokenizer = Tokenizer::load(dir.path()).expect("it loads");
        assert_eq!(chat(&tokenizer, vec![json!(1)]), "with tools");
        assert_eq!(chat(&tokenizer, vec![]), "hi");
    }

    #[test]
    fn settings_reach_a_template_that_reads_them() {
        const SWITCH: &str = "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %}\
                              <think></think>{% else %}<think>{% endif %}";
        let prompt = |template: &str, settings: Json| {
            let chat = Chat { settings: parse(&settings), ..Chat::new(vec![Message::new("user", "a")]) };
            let tokenizer = with_config(json!({ "chat_template": template }));
            let prompt = tokenizer.encode_chat(&chat).map_err(|error| error.to_string())?;
            Ok::<_, String>((tokenizer.decode(&prompt.ids, false).unwrap(), prompt.thinking))
        };
        let (off, on) = (("a<think></think>".to_string(), Thinking::Over), ("a<think>".to_string(), Thinking::Open));
        assert_eq!(prompt(SWITCH, json!({})), Ok(on.clone()));
        assert_eq!(prompt(SWITCH, json!({ "enable_thinking": false })), Ok(off.clone()));
        assert_eq!(prompt(SWITCH, json!({ "reasoning_effort": "none" })), Ok(off));
        assert_eq!(prompt(SWITCH, json!({ "reasoning_effort": "high" })), Ok(on));
        let plain = "{{ messages[0].content }} {{ reasoning_effort }}";
        assert_eq!(prompt(plain, json!({ "reasoning_effort": "low" })), Ok(("a low".to_string(), Thinking::None)));
        assert_eq!(prompt(plain, json!({ "enable_thinking": false })), Ok(("a ".to_string(), Thinking::None)));
        for settings in [json!({ "enable_thinking": true }), json!({ "other": 1 }), json!({ "messages": [] })] {
            let error = prompt(plain, settings.clone()).unwrap_err();
            assert!(error.contains("reads no `"), "{settings}: {error}");
        }
        // What is wrong is the template, not the setting.
        let error = prompt("{% if %}", json!({ "other": 1 })).unwrap_err();
        assert!(error.contains("fails: syntax error") && !error.contains("reads no"), "{error}");
    }

    #[test]
    fn a_part_of_a_character_has_its_own_bytes() {
        for tokenizer in [&*STORIES, &byte_fallback()] {
            let ids = tokenizer.encode("a🦊", false).expect("it encodes");
            let pieces: Vec<Piece> = ids.iter().map(|id| tokenizer.piece(*id).expect("a piece")).collect();
            let bytes: Vec<u8> = pieces.iter().flat_map(|piece| piece.bytes.clone()).collect();
            assert!(String::from_utf8(bytes).expect("UTF-8").ends_with("a🦊"));
            assert!(pieces.iter().any(|piece| piece.text == "\u{FFFD}" && piece.bytes.len() == 1));
        }
    }

    #[test]
    fn the_config_names_a_token_that_ends_texts() {
        let end = |config: Json, vocab| with_config(config).end(vocab);
        assert_eq!(end(json!({ "eos_token": "<|end_of_text|>" }), 1024), Some(1));
        assert_eq!(end(json!({ "eos_token": { "content": "<|new|>" } }), 1024), None, "beyond the vocabulary");
        assert_eq!(end(json!({}), 1024), None);
    }

    #[test]
    fn a_template_of_parts_shows_texts() {
        let template = "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}";
        let messages = [Message::new("user", "hi"), Message::new("assistant", "")];
        let written =
            |template: &str| with_config(json!({ "chat_template": template })).apply_chat(&messages, false).unwrap();
        assert_eq!(written(template), "[user]hi[assistant]");
        let both = template.replace("{% for p in", "{% if m.content is string %}{{ m.content }}{% endif %}{% for p in");
        assert_eq!(written(&both), "[user]hi[assistant]");
    }

    #[test]
    fn calls_of_a_conversation_are_shown_or_refused() {
        let shows = |template: &str| with_config(json!({ "chat_template": template })).shows_calls();
        assert!(shows(QWEN).is_ok());
        let without = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}";
        assert!(matches!(shows(without), Err(TokenizerError::NoTools { .. })));
    }

    #[test]
    fn a_hostile_template_ends_in_an_error() {
        let hello = [Message::new("user", "hi")];
        for (template, part) in [
            ("{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}", "fuel"),
            ("{% for a in range(10) %}{{ 'x' * 50000000 }}{% endfor %}", "bytes of text"),
            ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
            ("{% for %}", "syntax error"),
            ("{{ raise_exception('no system role') }}", "no system role"),
            ("{{ strftime_now('%Q') }}", "`%Q`"),
            ("{{ messages | tojson(default=1) }}", "default"),
        ] {
            let error = with_config(json!({"chat_template": template})).apply_chat(&hello, true).expect_err(template);
            assert!(error.to_string().contains(part), "{template}: {error}");
            assert_eq!(Fault::from(error).tier, Tier::Input);
        }
    }

    #[test]
    fn the_config_says_what_begins_and_ends_a_text() {
        let ids = |config: Json| with_config(config).encode("a", true).expect("it encodes");
        let plain = STORIES.encode("a", false).expect("it encodes");
        let ends = json!({"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"});
        let with = |bos: Json, eos: Json| {
            let mut config = ends.clone();
            config["add_bos_token"] = bos;
            config["add_eos_token"] = eos;
            config
        };
        assert_eq!(ids(ends.clone()), [&[0], &plain[..]].concat(), "silent: as in tokenizer.json");
        assert_eq!(ids(with(json!(true), json!(true))), [&[0], &plain[..], &[1]].concat());
        assert_eq!(ids(with(json!(false), json!(true))), [&plain[..], &[1]].concat());
        assert_eq!(ids(with(Json::Null, Json::Null)), plain);
        assert_eq!(ids(json!({"add_bos_token": true})), plain, "no token to add");
    }

    #[test]
    fn special_tokens_of_the_config_count() {
        // A plain token of tokenizer.json that the config declares special.
        let tokenizer = with_config(json!({"eos_token": "Once"}));
        let ids = tokenizer.encode("Once a", false).expect("it encodes");
        assert_eq!(tokenizer.decode(&ids, true).expect("it decodes"), " a");
        assert_eq!(STORIES.decode(&ids, true).expect("it decodes"), "Once a");
    }

    #[test]
    fn the_token_that_ends_texts_is_no_part_of_them() {
        let mut file: Json = serde_json::from_str(&fixture_json()).expect("JSON");
        file["added_tokens"].as_array_mut().unwrap().iter_mut().for_each(|token| token["special"] = json!(false));
        let config = json!({ "eos_token": "<|end_of_text|>" }).to_string();
        let dir = folder(&[("tokenizer.json", &file.to_string()), ("tokenizer_config.json", &config)]);
        let tokenizer = Tokenizer::load(dir.path()).expect("it loads");
        let ids = tokenizer.encode("Once<|end_of_text|>", false).expect("it encodes");
        assert_eq!(ids.last(), Some(&1));
        assert_eq!(streamed(&tokenizer, &ids, true), "Once");
        assert_eq!(streamed(&tokenizer, &ids, false), "Once<|end_of_text|>");
    }

    #[test]
    fn truncation_and_padding_of_the_file_are_ignored() {
        let mut file: Json = serde_json::from_str(&fixture_json()).expect("JSON");
        file["truncation"] = json!({"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0});
        file["padding"] = json!({"strategy": {"Fixed": 64}, "direction": "Left", "pad_to_multiple_of": null,
                                 "pad_id": 1, "pad_type_id": 0, "pad_token": "<|end_of_text|>"});
        let dir = folder(&[("tokenizer.json", &file.to_string())]);
        let tokenizer = Tokenizer::load(dir.path()).expect("it loads");
        assert_eq!(tokenizer.encode("Once upon a time", true).expect("it encodes"), [0, 467, 468, 262, 421]);
    }

    #[test]
    fn a_missing_tokenizer_names_the_file_and_the_way_without() {
        let dir = folder(&[]);
        let error = Tokenizer::load(dir.path()).err().expect("nothing to load");
        let fault = Fault::from(error);
        assert_eq!(fault.tier, Tier::Input);
        assert!(fault.message.contains("tokenizer.json` is missing"), "{fault}");
        assert!(fault.remedy.is_some_and(|remedy| remedy.contains("`--ids`")));
    }

    #[test]
    fn a_tokenizer_of_another_model_is_refused() {
        let load = || Tokenizer::load(&fixture()).expect("the fixture loads");
        for vocab in [1024, 1088, 200_000] {
            load().check_vocab(vocab).expect("a padded vocabulary is normal");
        }
        let error = load().check_vocab(1000).expect_err("ids beyond it");
        let message = error.to_string();
        assert!(
            message.contains("expected token ids below 1000 (the model's vocabulary), found ids up to 1023"),
            "{message}"
        );
        let token = STORIES.backend.id_to_token(1000).expect("a token");
        assert!(message.ends_with(&format!("the first beyond is 1000 (`{token}`)")), "{message}");

        // An added token beyond the table is refused where it is used.
        let tokenizer = with_config(json!({"pad_token": "<pad>"}));
        tokenizer.check_vocab(1024).expect("only an added token is beyond");
        assert_eq!(tokenizer.encode("a", false).expect("it encodes").len(), 1);
        let error = tokenizer.encode("a<pad>", false).expect_err("no embedding");
        assert_eq!(
            error.to_string(),
            "expected token ids below 1024 (the model's vocabulary), found 1024 (`<pad>`) at index 1"
        );
        assert_eq!(
            check_ids(&[5, 7, 9], 8).expect_err("9 is beyond").to_string(),
            "expected token ids below 8 (the model's vocabulary), found 9 at index 2"
        );
    }

    #[test]
    fn corrupt_files_are_named() {
        let json = fixture_json();
        for text in ["", "{}", "[]", "null", "\u{0}", &json[..json.len() / 2], &json.replace("\"BPE\"", "\"Other\"")] {
            let dir = folder(&[("tokenizer.json", text)]);
            let error = Tokenizer::load(dir.path()).err().expect("not a tokenizer");
            assert!(error.to_string().contains("tokenizer.json` is not a usable tokenizer file"), "{error}");
            assert_eq!(Fault::from(error).tier, Tier::Input);
        }
        let random = json.replace("\"dropout\": null", "\"dropout\": 0.1");
        assert_ne!(random, json);
        let dir = folder(&[("tokenizer.json", &random)]);
        let error = Tokenizer::load(dir.path()).err().expect("random ids");
        assert!(error.to_string().contains("`dropout`"), "{error}");

        for (config, part) in [
            ("{", "EOF"),
            ("[]", "expected a map"),
            (r#"{"bos_token": 5}"#, "`bos_token`: expected a token"),
            (r#"{"added_tokens_decoder": {"x": {"content": "y"}}}"#, "`added_tokens_decoder.x`"),
            (r#"{"chat_template": 5}"#, "`chat_template`: expected a string or a list"),
            (r#"{"additional_special_tokens": "x"}"#, "`additional_special_tokens`: expected a list"),
        ] {
            let dir = folder(&[("tokenizer.json", &json), ("tokenizer_config.json", config)]);
            let error = Tokenizer::load(dir.path()).err().expect(config).to_string();
            assert!(error.contains("tokenizer_config.json` is not a usable") && error.contains(part), "{error}");
        }
    }

    #[test]
    fn a_panic_of_the_library_is_an_error() {
        // A post-processor that names a special token which its table lacks: version 0.23 indexes the table.
        let mut file: Json = serde_json::from_str(&fixture_json()).expect("JSON");
        *file.pointer_mut("/post_processor/processors/1/special_tokens").expect("the table") = json!({});
        let dir = folder(&[("tokenizer.json", &file.to_string())]);
        let Ok(tokenizer) = Tokenizer::load(dir.path()) else { panic!("loading does not look at the table") };
        let error = tokenizer.encode("a", true).expect_err("no such token").to_string();
        assert!(error.starts_with("text cannot be encoded: a library panicked"), "{error}");
    }

    /// Values of the file replaced one by one: whatever loads may fail, but must not take the process down.
    #[test]
    fn mutated_tokenizers_never_panic() {
        let base: Json = serde_json::from_str(&fixture_json()).expect("JSON");
        let mut paths = Vec::new();
        collect_paths(&base, String::new(), &mut paths);
        // The vocabulary and merges fill the file; a sample of them will do.
        let (bulk, rest): (Vec<_>, Vec<_>) =
            paths.into_iter().partition(|path| path.starts_with("/model/vocab") || path.starts_with("/model/merges"));
        let values =
            [json!(null), json!(0), json!(-1), json!(4_294_967_295u32), json!(""), json!("$"), json!([]), json!({})];
        let mut loaded = 0;
        for path in rest.iter().chain(bulk.iter().step_by(97)) {
            for value in &values {
                let mut file = base.clone();
                *file.pointer_mut(path).expect("a path of the file") = value.clone();
                let dir = folder(&[("tokenizer.json", &file.to_string())]);
                let Ok(tokenizer) = Tokenizer::load(dir.path()) else { continue };
                loaded += 1;
                let _ = tokenizer.check_vocab(1024);
                if let Ok(ids) = tokenizer.encode("Once upon a time, 日本<|im_end|>", true) {
                    let _ = tokenizer.decode(&ids, true);
                }
            }
        }
        assert!(loaded > 50, "{loaded} mutants loaded");
    }

    fn collect_paths(value: &Json, at: String, paths: &mut Vec<String>) {
        let escape = |key: &str| key.replace('~', "~0").replace('/', "~1");
        match value {
            Json::Object(map) => {
                map.iter().for_each(|(key, value)| collect_paths(value, format!("{at}/{}", escape(key)), paths));
            }
            Json::Array(list) => {
                list.iter().enumerate().for_each(|(i, value)| collect_paths(value, format!("{at}/{i}"), paths));
            }
            _ => {}
        }
        if !at.is_empty() {
            paths.push(at);
        }
    }
}
