//! Owns the settings of a request that both endpoints share, read from its fields.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use serde_json::value::RawValue;
use std::fmt;

use super::error::ApiError;
use super::fields::{Fields, Sent, few, unsupported};
use crate::grammar::{self, Source};
use crate::sample::{Penalties, RequestSettings, SampleSettings};

/// Most choices of a request; each waits and runs by itself.
const CHOICES_MAX: u32 = 128;
/// Most texts that end a choice, and most bytes of each: every token is compared with all of them.
const STOPS_MAX: usize = 16;
const STOP_BYTES_MAX: usize = 1024;
/// Most log-probabilities beside a token's own.
const LOGPROBS_MAX: u32 = 20;
const STOP_IDS_MAX: usize = 64;
const LOGIT_BIAS_MAX: usize = 1024;
/// Most prompts of a request. The number of choices that the server takes at a time is a second bound.
const PROMPTS_MAX: usize = 4096;

/// Settings that both endpoints have.
#[derive(Debug, Clone)]
pub struct Params {
    /// `logprobs` and the seed are not set here.
    pub settings: RequestSettings,
    /// Most tokens to generate; `None`: the endpoint's default.
    pub tokens_max: Option<u32>,
    /// Choices for each prompt.
    pub choices: u32,
    /// The grammar that `response_format` asks for.
    pub format: Option<Source>,
    pub stops: Vec<String>,
    pub skip_special: bool,
    /// The reply has the ids of its tokens and of the prompt's tokens.
    pub token_ids: bool,
    pub stream: bool,
    /// A stream ends with its usage.
    pub usage: bool,
}

/// A text, or a list of texts.
struct Texts(Vec<String>);

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Texts, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Texts;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text or a list of texts")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Texts, E> {
                Ok(Texts(vec![text.to_string()]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Texts, A::Error> {
                few(list, STOPS_MAX).map(Texts)
            }
        }
        deserializer.deserialize_any(Any)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ResponseFormat {
    #[serde(rename = "type")]
    kind: String,
    json_schema: Option<Sent<JsonSchema>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct JsonSchema {
    // Name and description are for people. Every schema is strict.
    #[serde(rename = "name")]
    _name: Option<String>,
    #[serde(rename = "description")]
    _description: Option<String>,
    #[serde(rename = "strict")]
    _strict: Option<bool>,
    schema: Option<Box<RawValue>>,
}

impl ResponseFormat {
    fn source(self) -> Result<Option<Source>, ApiError> {
        let refused = |message: &dyn fmt::Display| ApiError::field("response_format", message);
        let schema = match (self.kind.as_str(), self.json_schema) {
            ("text", None) => return Ok(None),
            ("json_object", None) => r#"{"type": "object"}"#.to_string(),
            ("json_schema", Some(Sent(JsonSchema { schema: Some(schema), .. }))) => schema.get().to_string(),
            ("json_schema", _) => return Err(refused(&"`json_schema.schema` is missing")),
            ("text" | "json_object", Some(_)) => return Err(refused(&"`json_schema` is for the type `json_schema`")),
            _ => return Err(refused(&"expected the type `text`, `json_object` or `json_schema`")),
        };
        grammar::schema(&schema).map_err(|error| refused(&error))?;
        Ok(Some(Source::Json(schema)))
    }
}

/// Refuses settings that contradict a grammar.
///
/// # Errors
/// Settings that forbid the end of the text, or continue after it.
pub fn within_grammar(settings: &RequestSettings, field: &str) -> Result<(), ApiError> {
    for (name, on) in [("ignore_eos", settings.ignore_eos), ("min_tokens", settings.min_tokens > 0)] {
        if on {
            return Err(ApiError::field(name, format!("expected only without `{field}`")));
        }
    }
    Ok(())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
    /// Padding of events, which this server does not add.
    #[serde(default)]
    include_obfuscation: bool,
}

/// Takes the field `model`, which a request may leave out.
///
/// # Errors
/// Another name than that of `model`, which is served.
pub fn take_model(fields: &mut Fields<'_>, model: &str) -> Result<(), ApiError> {
    let Some(asked) = fields.take::<String>("model")?.filter(|asked| asked != model) else { return Ok(()) };
    let asked: String = asked.chars().take(200).collect();
    let message = format!("`{asked}` is not served here, expected `{model}`");
    let error = ApiError::field("model", message).with_code("model_not_found");
    Err(ApiError { status: axum::http::StatusCode::NOT_FOUND, ..error })
}

impl Params {
    /// # Errors
    /// A field of another type or out of its range, one that asks for an unsupported feature, a model that is not served.
    pub fn take(fields: &mut Fields<'_>, model: &str) -> Result<Params, ApiError> {
        take_model(fields, model)?;
        let number = |fields: &mut Fields<'_>, name| fields.take::<f32>(name);
        let sampling = SampleSettings {
            temperature: number(fields, "temperature")?.unwrap_or(1.0),
            // Other servers write "all" as 0 or -1.
            top_k: fields.take::<i64>("top_k")?.filter(|k| *k > 0).map(|k| u32::try_from(k).unwrap_or(u32::MAX)),
            top_p: number(fields, "top_p")?.filter(|p| *p != 1.0),
            seed: fields.take::<i64>("seed")?.map_or_else(fresh_seed, |seed| seed as u64),
        };
        let penalties = Penalties {
            repetition: number(fields, "repetition_penalty")?.unwrap_or(1.0),
            presence: number(fields, "presence_penalty")?.unwrap_or(0.0),
            frequency: number(fields, "frequency_penalty")?.unwrap_or(0.0),
        };
        let logit_bias = fields.take::<BTreeMap<u32, f32>>("logit_bias")?.unwrap_or_default();
        let stop_ids = fields.take::<Vec<u32>>("stop_token_ids")?.unwrap_or_default();
        for (name, found, most) in
            [("logit_bias", logit_bias.len(), LOGIT_BIAS_MAX), ("stop_token_ids", stop_ids.len(), STOP_IDS_MAX)]
        {
            if found > most {
                return Err(ApiError::field(name, format!("expected at most {most} ids, found {found}")));
            }
        }
        let settings = RequestSettings {
            sampling,
            min_p: number(fields, "min_p")?.unwrap_or(0.0),
            penalties,
            logit_bias,
            stop_ids,
            min_tokens: fields.take("min_tokens")?.unwrap_or(0),
            ignore_eos: fields.take("ignore_eos")?.unwrap_or(false),
            logprobs: None,
        };
        let choices = fields.take::<u32>("n")?.unwrap_or(1);
        if choices == 0 || choices > CHOICES_MAX {
            return Err(ApiError::field("n", format!("expected 1 to {CHOICES_MAX}, found {choices}")));
        }
        let Texts(stops) = fields.take("stop")?.unwrap_or(Texts(vec![]));
        if stops.iter().any(|stop| stop.is_empty() || stop.len() > STOP_BYTES_MAX) {
            let expected = format!("expected at most {STOPS_MAX} texts of 1 to {STOP_BYTES_MAX} bytes");
            return Err(ApiError::field("stop", expected));
        }
        let stream = fields.take("stream")?.unwrap_or(false);
        let options = fields.take::<Sent<StreamOptions>>("stream_options")?.map(|Sent(options)| options);
        if options.as_ref().is_some_and(|options| options.include_obfuscation) {
            return Err(unsupported("stream_options.include_obfuscation"));
        }
        if options.is_some() && !stream {
            return Err(ApiError::field("stream_options", "expected only with `stream`"));
        }
        let skip_special = fields.take("skip_special_tokens")?.unwrap_or(true);
        let token_ids = fields.take("return_token_ids")?.unwrap_or(false);
        // Names of users and hints for caches have no effect on the reply, and nothing is stored.
        for hint in ["user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"] {
            fields.take::<String>(hint)?;
        }
        fields.take::<bool>("store")?;
        fields.take::<BTreeMap<String, String>>("metadata")?;
        for (name, neutral) in [
            ("service_tier", &["\"auto\"", "\"default\""][..]),
            // Of other servers; their clients send the defaults.
            ("bad_words", &["[]"]),
            ("include_stop_str_in_output", &["false"]),
            ("length_penalty", &["1", "1.0"]),
            ("use_beam_search", &["false"]),
        ] {
            fields.neutral(name, neutral)?;
        }
        let format = fields.take::<Sent<ResponseFormat>>("response_format")?;
        let format = format.map(|Sent(format)| format.source()).transpose()?.flatten();
        if format.is_some() {
            within_grammar(&settings, "response_format")?;
        }
        let (tokens_max, usage) = (fields.take("max_tokens")?, options.is_some_and(|options| options.include_usage));
        Ok(Params { settings, tokens_max, choices, format, stops, skip_special, token_ids, stream, usage })
    }
}

/// A count of log-probabilities.
///
/// # Errors
/// More than a reply can have.
pub fn top_logprobs(name: &str, asked: Option<u32>) -> Result<Option<u32>, ApiError> {
    match asked.filter(|count| *count > LOGPROBS_MAX) {
        Some(found) => Err(ApiError::field(name, format!("expected at most {LOGPROBS_MAX}, found {found}"))),
        None => Ok(asked),
    }
}

/// A random seed that cannot be guessed and that, most likely, no other request has.
pub fn fresh_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish()
}

/// A prompt to continue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

/// The field `prompt`: a text, ids, or a list of either.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompts(pub Vec<Prompt>);

/// One entry of a list. Its type is the type of the list.
enum Entry {
    Text(String),
    Id(u32),
    Ids(Vec<u32>),
}

const PROMPT: &str = "a text, a list of token ids, or a list of either";

impl<'de> Deserialize<'de> for Entry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Entry, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Entry;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(PROMPT)
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Entry, E> {
                Ok(Entry::Text(text.to_string()))
            }

            fn visit_u64<E: Error>(self, id: u64) -> Result<Entry, E> {
                u32::try_from(id).map(Entry::Id).map_err(|_| E::custom(format!("{id} is no token id")))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Entry, A::Error> {
                let mut ids = vec![];
                while let Some(id) = list.next_element()? {
                    ids.push(id);
                }
                Ok(Entry::Ids(ids))
            }
        }
        deserializer.deserialize_any(Any)
    }
}

impl<'de> Deserialize<'de> for Prompts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Prompts, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Prompts;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(PROMPT)
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Prompts, E> {
                Ok(Prompts(vec![Prompt::Text(text.to_string())]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Prompts, A::Error> {
                let (mut ids, mut prompts) = (vec![], vec![]);
                while let Some(entry) = list.next_element()? {
                    match entry {
                        Entry::Id(id) if prompts.is_empty() => ids.push(id),
                        Entry::Text(text) if ids.is_empty() => prompts.push(Prompt::Text(text)),
                        Entry::Ids(list) if ids.is_empty() => prompts.push(Prompt::Ids(list)),
                        _ => return Err(A::Error::custom(format!("expected {PROMPT}, found a mixture"))),
                    }
                    if prompts.len() > PROMPTS_MAX {
                        return Err(A::Error::custom(format!("expected at most {PROMPTS_MAX} prompts, found more")));
                    }
                }
                if prompts.is_empty() {
                    prompts.push(Prompt::Ids(ids));
                }
                Ok(Prompts(prompts))
            }
        }
        deserializer.deserialize_any(Any)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_is_text_or_ids_or_many() {
        let text = |text: &str| Prompt::Text(text.to_string());
        for (json, expected) in [
            (r#""once""#, vec![text("once")]),
            (r#"["once", "upon"]"#, vec![text("once"), text("upon")]),
            ("[1, 2]", vec![Prompt::Ids(vec![1, 2])]),
            ("[[1, 2], [3]]", vec![Prompt::Ids(vec![1, 2]), Prompt::Ids(vec![3])]),
            ("[]", vec![Prompt::Ids(vec![])]),
        ] {
            assert_eq!(serde_json::from_str::<Prompts>(json).unwrap(), Prompts(expected), "{json}");
        }
        let many = format!("[{}\"a\"]", "\"a\",".repeat(PROMPTS_MAX));
        for json in [&*many, "1", "[1, \"a\"]", "[[1], 2]", "[[[1]]]", "[-1]", "[4294967296]", "[1.5]", "{}"] {
            assert!(serde_json::from_str::<Prompts>(json).is_err(), "{json}");
        }
    }

    #[test]
    fn what_is_asked_is_read_or_refused_by_name() {
        let read = |json: &str| {
            let mut fields = Fields::of(json.as_bytes()).unwrap();
            let params = Params::take(&mut fields, "m")?;
            fields.finish().map(|()| params)
        };
        let params = read(r#"{"model": "m", "temperature": 0.5, "top_k": -1, "top_p": 1, "seed": 7, "n": 2, "stop": "x", "logit_bias": {"5": -1}}"#).unwrap();
        let SampleSettings { temperature, top_k, top_p, seed } = params.settings.sampling;
        assert_eq!((temperature, top_k, top_p, seed), (0.5, None, None, 7));
        assert_eq!((params.choices, params.stops, params.stream), (2, vec!["x".to_string()], false));
        assert_eq!(params.settings.logit_bias[&5], -1.0);
        for (json, param, code) in [
            (r#"{"model": "other"}"#, "model", Some("model_not_found")),
            (r#"{"n": 0}"#, "n", None),
            (r#"{"n": 1000}"#, "n", None),
            (r#"{"stop": ["", "a"]}"#, "stop", None),
            (r#"{"response_format": {"type": "poem"}}"#, "response_format", None),
            (r#"{"response_format": {"type": "json_schema"}}"#, "response_format", None),
            (r#"{"response_format": {"type": "json_object", "strict": true}}"#, "response_format", None),
            (r#"{"response_format": {"type": "json_schema", "json_schema": {"schema": []}}}"#, "response_format", None),
            (r#"{"response_format": {"type": "json_object"}, "ignore_eos": true}"#, "ignore_eos", None),
            (r#"{"response_format": {"type": "json_object"}, "min_tokens": 3}"#, "min_tokens", None),
            (r#"{"stream_options": {"include_usage": true}}"#, "stream_options", None),
            (r#"{"temperature": "hot"}"#, "temperature", None),
            (r#"{"return_token_ids": 1}"#, "return_token_ids", None),
            (r#"{"temprature": 1}"#, "temprature", Some("unknown_parameter")),
            (r#"{"store": "yes"}"#, "store", None),
            (r#"{"service_tier": "flex"}"#, "service_tier", Some("unsupported_parameter")),
            (r#"{"include_stop_str_in_output": true}"#, "include_stop_str_in_output", Some("unsupported_parameter")),
            (r#"{"stop": 5}"#, "stop", None),
            (r#"{"response_format": 5}"#, "response_format", None),
            (
                r#"{"stream": true, "stream_options": {"include_obfuscation": true}}"#,
                "stream_options.include_obfuscation",
                Some("unsupported_parameter"),
            ),
        ] {
            let error = read(json).unwrap_err();
            assert_eq!((error.param.as_deref(), error.code), (Some(param), code), "{json}");
            assert!(
                !["untagged", "enum", "struct"].iter().any(|word| error.message.contains(word)),
                "{}",
                error.message
            );
        }
    }

    #[test]
    fn hints_and_nulls_change_nothing() {
        let json = r#"{"store": true, "metadata": {"a": "b"}, "user": "u", "prompt_cache_key": "k", "safety_identifier": "s",
            "prompt_cache_retention": "24h", "stop": null, "bad_words": [], "length_penalty": 1.0, "use_beam_search": false, "unknown": null, "stream": true,
            "stream_options": {"include_usage": null, "include_obfuscation": false, "unknown": null},
            "response_format": {"type": "text", "json_schema": null}}"#;
        let mut fields = Fields::of(json.as_bytes()).unwrap();
        let params = Params::take(&mut fields, "m").unwrap();
        fields.finish().unwrap();
        assert!(params.stream && !params.usage && params.format.is_none() && params.stops.is_empty());
    }
}
