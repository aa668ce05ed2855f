//! Owns the forms in which texts call functions: reading calls, and the grammar of a text that has to call one.
//!
//! A form is a file here: `object` (Hermes, Llama 3), `xml` (Qwen3-Coder, Qwen3.5), `harmony` (gpt-oss) and `mistral`. [`step`] takes the next call off a text, and [`lark`] writes
//! a grammar whose texts [`step`] reads back exactly.

pub mod harmony;
mod mistral;
mod object;
mod values;
mod xml;

use serde_json::{Map, Value, json};

use super::params::fresh_seed;
use crate::grammar::GrammarError;
use crate::tokenizer::CallForm;

const CALL_BEGIN: &str = "<tool_call>";
const CALL_END: &str = "</tool_call>";
/// The schema of arguments that are free.
const ANY: &str = "{\"type\": \"object\"}";

/// A call of a function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    pub id: String,
    pub name: String,
    /// A JSON object.
    pub arguments: String,
}

impl Call {
    pub fn new(form: CallForm, name: String, arguments: String) -> Call {
        let id = match form {
            // Mistral's templates refuse other ids than those of nine letters and digits.
            CallForm::Mistral { .. } => format!("{:09x}", fresh_seed() >> 28),
            _ => format!("call_{:016x}", fresh_seed()),
        };
        Call { id, name, arguments }
    }

    /// The call in the form of replies.
    pub fn object(&self) -> Value {
        let Call { id, name, arguments } = self;
        json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } })
    }
}

/// A function that is offered, as its calls are read.
#[derive(Debug, Clone, PartialEq)]
pub struct Function {
    pub name: String,
    parameters: xml::Parameters,
}

impl Function {
    /// `schema` is that of its arguments.
    pub fn new(name: String, schema: Option<&Map<String, Value>>) -> Function {
        let parameters = schema.map(xml::Parameters::of).unwrap_or_default();
        Function { name, parameters }
    }
}

/// How a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The model, or a stop, ended it.
    Complete,
    /// At the limit of its tokens.
    Cut,
}

/// What a text begins with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// More text has to tell.
    Wait,
    /// So many bytes are no call.
    Text(usize),
    /// Names and arguments of calls, which take so many bytes.
    Calls { length: usize, calls: Vec<(String, String)> },
}

/// The tags with which a call begins. Without any, the whole text is one.
pub fn tags(form: CallForm) -> &'static [&'static str] {
    match form {
        CallForm::Hermes => &[CALL_BEGIN],
        CallForm::Llama3 | CallForm::Channels(_) => &[],
        CallForm::Xml => &[CALL_BEGIN, xml::FUNCTION],
        CallForm::Mistral { .. } => &[mistral::CALLS],
    }
}

/// Takes the next call off a text that begins with one of the [`tags`]. At the end of a text the answer is not [`Step::Wait`].
pub fn step(form: CallForm, text: &str, functions: &[Function], ended: Option<Ended>) -> Step {
    match form {
        CallForm::Hermes => object::tagged(text, functions, ended),
        CallForm::Llama3 => object::whole(text, functions, ended),
        CallForm::Xml => xml::step(text, functions, ended),
        CallForm::Mistral { .. } => mistral::step(text, functions, ended),
        // Its messages are read by `harmony::step`.
        CallForm::Channels(_) => Step::Text(text.len()),
    }
}

/// Whether a text may have several calls.
pub fn has_several(form: CallForm) -> bool {
    match form {
        CallForm::Hermes | CallForm::Xml | CallForm::Mistral { .. } => true,
        CallForm::Llama3 | CallForm::Channels(_) => false,
    }
}

/// Whether a text ends with its first call. A message of channels ends with its call, and its text does.
pub fn is_single(form: CallForm, parallel: bool) -> bool {
    matches!(form, CallForm::Channels(_)) || (has_several(form) && !parallel)
}

/// A function that a grammar allows.
pub struct Allowed<'a> {
    /// Its index among those that are offered.
    pub at: usize,
    pub name: &'a str,
    /// The schema of its arguments; `None`: they are free.
    pub schema: Option<&'a str>,
}

/// The grammar of a text that calls one of `functions`, or several of them if `many`. A `free` text may also have none.
///
/// # Errors
/// The index of a function whose schema cannot be kept to, and why.
pub fn lark(
    form: CallForm,
    functions: &[Allowed<'_>],
    free: bool,
    many: bool,
) -> Result<String, (usize, GrammarError)> {
    let begin = if free { "\n".to_string() } else { format!("{CALL_BEGIN}\n") };
    let (start, calls) = match form {
        CallForm::Hermes => {
            let end = format!("\n{CALL_END}");
            let rules = each(functions, |of| object::rules(of, &begin, "arguments", &end))?;
            (in_tags("", free, many), rules)
        }
        CallForm::Xml => (in_tags(xml::FUNCTION, free, many), each(functions, |of| xml::rules(of, &begin))?),
        CallForm::Channels(channels) => {
            (harmony::start(channels, free), each(functions, |of| harmony::rules(channels, of, free))?)
        }
        CallForm::Mistral { calls, arguments } => {
            let start = mistral::start(calls, arguments, free, many);
            (start, each(functions, |of| mistral::rules(arguments, of))?)
        }
        CallForm::Llama3 => {
            let start = if free { object::FREE } else { "start: call\n" };
            (start.to_string(), each(functions, |of| object::rules(of, "", "parameters", ""))?)
        }
    };
    Ok(format!("{start}{calls}"))
}

/// The rule `call` for any of several functions, and the rules of each.
fn each(
    functions: &[Allowed<'_>],
    rules: impl Fn(&Allowed<'_>) -> Result<String, GrammarError>,
) -> Result<String, (usize, GrammarError)> {
    let names: Vec<String> = functions.iter().map(|function| format!("call{}", function.at)).collect();
    let rules = functions.iter().map(|function| rules(function).map_err(|error| (function.at, error)));
    Ok(format!("call: {}\n{}", names.join(" | "), rules.collect::<Result<String, _>>()?))
}

/// The beginning of the grammar of a text with calls in tags. A free text has no `other` beginning of a call.
fn in_tags(other: &str, free: bool, many: bool) -> String {
    let start = match (free, many) {
        (false, true) => return "start: call (\"\\n\" call)*\n".to_string(),
        (false, false) => return "start: call\n".to_string(),
        (true, true) => "(before call)* TEXT",
        // Without more than one call, a text ends with its call or has none.
        (true, false) => "TEXT | before call",
    };
    let others = if other.is_empty() { String::new() } else { format!(" & ~/(.|\\n)*{other}(.|\\n)*/") };
    // In a free text, the tag ends what is before the call.
    format!("start: {start}\nbefore[lazy]: TEXT {}\nTEXT: /(.|\\n)*/{others}\n", quoted(CALL_BEGIN))
}

/// A text in the notation of Lark.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// Whether a text may be the beginning of a tag.
fn is_begun(text: &str, tag: &str) -> bool {
    text.len() < tag.len() && tag.starts_with(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grammar::{Grammar, Source, Vocabulary};
    use crate::random::Random;

    use crate::serve::reader::{Piece, Reader, Sought, SoughtCalls};
    use crate::tokenizer::Channels;

    const END: u32 = 256;
    const LISTS: CallForm = CallForm::Mistral { calls: 262, arguments: None };
    const NAMES: CallForm = CallForm::Mistral { calls: 262, arguments: Some(263) };
    const CHANNELS: Channels = Channels { start: 257, channel: 258, constrain: 259, message: 260, end: 261 };
    /// The special tokens after [`END`].
    const MARKS: [&str; 7] =
        ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "[TOOL_CALLS]", "[ARGS]"];

    fn compiled(lark: String) -> Grammar {
        let mut tokens: Vec<Vec<u8>> = (0..=u8::MAX).map(|byte| vec![byte]).collect();
        tokens.resize(END as usize + 1 + MARKS.len(), vec![]);
        Vocabulary::new(&tokens, &[END]).unwrap().compile(&Source::Lark(lark)).unwrap()
    }

    /// A text of bytes drawn from those that a grammar allows.
    fn drawn(grammar: &Grammar, random: &mut Random) -> String {
        let (mut guide, mut text) = (grammar.begin(), vec![]);
        for _ in 0..2000 {
            let allowed = guide.allowed().unwrap();
            let ids: Vec<u32> = (0..=END + MARKS.len() as u32).filter(|id| allowed.contains(*id)).collect();
            let id = ids[random.below(ids.len())];
            match u8::try_from(id) {
                Ok(byte) => text.push(byte),
                Err(_) if id > END => text.extend(MARKS[(id - END - 1) as usize].bytes()),
                Err(_) => {}
            }
            if guide.push(id).unwrap() {
                return String::from_utf8(text).unwrap();
            }
        }
        panic!("no end: {}", String::from_utf8_lossy(&text));
    }

    #[test]
    fn what_a_grammar_allows_is_read_back_exactly() {
        let schema = json!({ "type": "object", "additionalProperties": false, "required": ["s", "e", "n", "b", "z", "o", "p"],
            "properties": {
                "s": { "type": "string", "maxLength": 4 }, "e": { "enum": ["red", "5", "</tool_call>"] },
                "n": { "type": ["integer", "string"], "minimum": 3, "maximum": 20 }, "b": { "type": "boolean" },
                "z": { "anyOf": [{ "$ref": "#/$defs/c" }, { "type": "null" }] }, "p": { "type": "string", "pattern": "^[a-c]{2}$" },
                "o": { "type": "object", "properties": { "k": { "enum": ["</parameter>\n</function>"] } }, "required": ["k"], "additionalProperties": false },
                "m": { "type": "number", "enum": [1.5, 2] },
            }, "$defs": { "c": { "type": "string", "const": "c" } } });
        let text = schema.to_string();
        let functions = std::sync::Arc::new(vec![Function::new("look".to_string(), schema.as_object())]);
        let mut random = Random::new(5);
        for form in [CallForm::Hermes, CallForm::Xml, CallForm::Channels(CHANNELS), LISTS, NAMES] {
            let allowed = [Allowed { at: 0, name: "look", schema: Some(&text) }];
            let grammar = compiled(lark(form, &allowed, false, false).unwrap());
            for _ in 0..40 {
                let text = drawn(&grammar, &mut random);
                let calls = SoughtCalls { form, functions: functions.clone(), named: false, single: false };
                let channels = matches!(form, CallForm::Channels(_));
                let mut reader = Reader::new(Sought { reasoning: false, thinks: false, channels, calls: Some(calls) });
                let mut pieces = reader.push(&text);
                pieces.extend(reader.finish("stop"));
                let [Piece::Call(Call { name, arguments, .. })] = &*pieces else { panic!("{text}: {pieces:?}") };
                assert_eq!(name, "look");
                let value: Value = serde_json::from_str(arguments).unwrap();
                assert!(value["s"].as_str().unwrap().chars().count() <= 4, "{text}");
                assert!(["red", "5", "</tool_call>"].contains(&value["e"].as_str().unwrap()), "{text}");
                assert!(value["n"].is_string() || (3..=20).contains(&value["n"].as_i64().unwrap()), "{text}");
                assert!(value["b"].is_boolean() && [json!("c"), json!(null)].contains(&value["z"]), "{text}");
                assert_eq!(value["o"], json!({ "k": "</parameter>\n</function>" }), "{text}");
                let found = value["p"].as_str().unwrap();
                assert!(found.len() == 2 && found.bytes().all(|byte| (b'a'..=b'c').contains(&byte)), "{text}");
                assert!(value.get("m").is_none_or(|m| m == 1.5 || m == 2), "{text}");
            }
        }
    }

    #[test]
    fn values_between_tags_have_the_kind_that_their_keywords_speak_of() {
        let schema = json!({ "required": ["o", "l", "s"], "properties": {
            "o": { "properties": { "k": { "type": "null" } }, "additionalProperties": false },
            "l": { "items": { "maximum": 1, "type": "integer", "minimum": 0 }, "maxItems": 2 }, "s": { "pattern": "^\\d[\\S(].$" },
        } });
        let text = schema.to_string();
        let functions = std::sync::Arc::new(vec![Function::new("look".to_string(), schema.as_object())]);
        let grammar = compiled(
            lark(CallForm::Xml, &[Allowed { at: 0, name: "look", schema: Some(&text) }], false, false).unwrap(),
        );
        let mut random = Random::new(7);
        for _ in 0..40 {
            let text = drawn(&grammar, &mut random);
            let calls = SoughtCalls { form: CallForm::Xml, functions: functions.clone(), named: false, single: false };
            let mut reader =
                Reader::new(Sought { reasoning: false, thinks: false, channels: false, calls: Some(calls) });
            let mut pieces = reader.push(&text);
            pieces.extend(reader.finish("stop"));
            let [Piece::Call(Call { arguments, .. })] = &*pieces else { panic!("{text}: {pieces:?}") };
            let value: Value = serde_json::from_str(arguments).unwrap();
            assert!([json!({}), json!({ "k": null })].contains(&value["o"]), "{text}");
            assert!(
                value["l"].as_array().is_some_and(|list| list.iter().all(|item| *item == 0 || *item == 1)),
                "{text}"
            );
            let found: Vec<char> = value["s"].as_str().unwrap().chars().collect();
            assert!(found.len() == 3 && found[0].is_ascii_digit() && !"\n\r".contains(found[2]), "{text:?}");
        }
    }

    #[test]
    fn what_a_text_without_quotes_cannot_keep_to_is_refused_by_name() {
        for (schema, named) in [
            (json!({ "properties": { "a": { "type": "string", "format": "email" } } }), "`properties.a.format`: "),
            (json!({ "properties": { "a": { "type": "string", "pattern": "^a|b$" } } }), "`properties.a.pattern`: "),
            (json!({ "properties": { "a": { "enum": ["</parameter>"] } } }), "`properties.a.enum`: "),
            (
                json!({ "properties": { "a": { "anyOf": [{ "const": "a" }, { "type": "string", "format": "date" }] } } }),
                "`properties.a.anyOf[1].format`: ",
            ),
            (json!({ "properties": { "a": {} }, "minProperties": 1 }), "`minProperties`: "),
            (json!({ "required": ["a"] }), "`required[0]`: "),
        ] {
            let text = schema.to_string();
            let allowed = [Allowed { at: 3, name: "look", schema: Some(&text) }];
            let (at, error) = lark(CallForm::Xml, &allowed, false, false).unwrap_err();
            assert!(at == 3 && error.to_string().starts_with(named), "{schema}: {error}");
        }
    }
}
