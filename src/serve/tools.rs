//! Owns tools: the functions that a client offers, the grammar of a text that has to call one, and the calls in a text.
//!
//! A checkpoint's chat template shows the model its tools, and says in which form it calls them ([`CallForm`]). A text that has to
//! call one follows a grammar of that form. Any other text is free, and its calls are found in it.

use std::fmt::Write as _;

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::error::ApiError;
use super::fields::{Fields, unsupported};
use super::params::fresh_seed;
use crate::grammar::{self, Source};
use crate::tokenizer::CallForm;

const TOOLS_MAX: usize = 128;
/// Most characters of a function's name. The API allows only characters that neither JSON nor a grammar escapes.
const NAME_MAX: usize = 64;
const BEGIN: &str = "<tool_call>";
const END: &str = "</tool_call>";

/// A function that a model may call.
#[derive(Debug, Clone, PartialEq)]
struct Tool {
    name: String,
    description: Option<String>,
    /// The schema of its arguments.
    parameters: Option<Value>,
    strict: bool,
}

/// Which function a text has to call.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Choice {
    /// A call of any function, or none.
    Auto,
    /// At least one call, of any function.
    Required,
    /// A call of the function with this index.
    Named(usize),
}

/// The functions that a request offers its model.
#[derive(Debug, Clone, PartialEq)]
pub struct Tools {
    tools: Vec<Tool>,
    choice: Choice,
    /// A text may have several calls.
    parallel: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SentTool {
    #[serde(rename = "type")]
    kind: String,
    function: Option<SentFunction>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SentFunction {
    name: String,
    description: Option<String>,
    parameters: Option<Value>,
    strict: Option<bool>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum SentChoice {
    Word(String),
    Named(SentNamed),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SentNamed {
    #[serde(rename = "type")]
    kind: String,
    function: SentName,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SentName {
    name: String,
}

impl Tools {
    /// Reads `tools`, `tool_choice` and `parallel_tool_calls`; `None`: the model is offered nothing.
    ///
    /// # Errors
    /// A field of another form; a combination that is not supported.
    pub fn take(fields: &mut Fields<'_>) -> Result<Option<Tools>, ApiError> {
        let sent: Vec<SentTool> = fields.take("tools")?.unwrap_or_default();
        let choice: Option<SentChoice> = fields.take("tool_choice")?;
        let parallel = fields.take("parallel_tool_calls")?.unwrap_or(true);
        if sent.len() > TOOLS_MAX {
            return Err(ApiError::field("tools", format!("expected at most {TOOLS_MAX}, found {}", sent.len())));
        }
        let tools = sent.into_iter().enumerate().map(tool).collect::<Result<Vec<_>, _>>()?;
        if let Some(twice) = (1..tools.len()).find(|&at| tools[..at].iter().any(|tool| tool.name == tools[at].name)) {
            return Err(ApiError::field(format!("tools[{twice}].function.name"), "is there twice"));
        }
        let choice = match choice {
            None => Choice::Auto,
            Some(SentChoice::Word(word)) => match word.as_str() {
                "none" => return Ok(None),
                "auto" => Choice::Auto,
                "required" => Choice::Required,
                _ => return Err(ApiError::field("tool_choice", "expected `none`, `auto`, `required` or a function")),
            },
            Some(SentChoice::Named(SentNamed { kind, function: SentName { name } })) => {
                let at = tools.iter().position(|tool| kind == "function" && tool.name == name);
                Choice::Named(at.ok_or_else(|| ApiError::field("tool_choice", "expected a function of `tools`"))?)
            }
        };
        match (tools.is_empty(), &choice) {
            (true, Choice::Auto) => return Ok(None),
            (true, _) => return Err(ApiError::field("tool_choice", "expected only with `tools`")),
            (false, Choice::Auto) => {
                if let Some(at) = tools.iter().position(|tool| tool.strict) {
                    let name = format!("tools[{at}].function.strict");
                    let message = "is supported only if `tool_choice` asks for a call, not with `auto`";
                    return Err(ApiError::field(name, message).with_code("unsupported_parameter"));
                }
            }
            (false, _) => {}
        }
        Ok(Some(Tools { tools, choice, parallel }))
    }

    /// The tools in the form that chat templates expect.
    pub fn for_template(&self) -> Vec<Value> {
        let shown = |tool: &Tool| {
            let mut function = json!({ "name": tool.name });
            for (key, value) in
                [("description", tool.description.clone().map(Value::from)), ("parameters", tool.parameters.clone())]
            {
                if let Some(value) = value {
                    function[key] = value;
                }
            }
            json!({ "type": "function", "function": function })
        };
        self.tools.iter().map(shown).collect()
    }

    /// The grammar of a text that has to call a function; `None` if it need not.
    ///
    /// # Errors
    /// Parameters that are no schema.
    pub fn source(&self, form: CallForm) -> Result<Option<Source>, ApiError> {
        let (callable, many) = match self.choice {
            Choice::Auto => return Ok(None),
            Choice::Required => (0..self.tools.len(), self.parallel),
            Choice::Named(at) => (at..at + 1, false),
        };
        let quoted = |text: &str| Value::from(text).to_string();
        let (before, key, after) = match form {
            CallForm::Hermes => (format!("{BEGIN}\n"), "arguments", format!("\n{END}")),
            CallForm::Llama3 => (String::new(), "parameters", String::new()),
        };
        let names: Vec<String> = callable.clone().map(|at| format!("call{at}")).collect();
        let more = if many && form == CallForm::Hermes { " (\"\\n\" call)*" } else { "" };
        let mut lark = format!("start: call{more}\ncall: {}\n", names.join(" | "));
        for (at, tool) in callable.clone().zip(&self.tools[callable]) {
            let none = json!({ "type": "object", "properties": {}, "additionalProperties": false });
            let schema = grammar::schema(tool.parameters.as_ref().unwrap_or(&none))
                .map_err(|error| ApiError::field(format!("tools[{at}].function.parameters"), error))?;
            let head = quoted(&format!("{before}{{\"name\": \"{}\", \"{key}\": ", tool.name));
            let tail = quoted(&format!("}}{after}"));
            let _ = write!(lark, "call{at}: {head} arguments{at} {tail}\narguments{at}: %json {schema}\n");
        }
        Ok(Some(Source::Lark(lark)))
    }

    /// The stop text with which a text has only one call.
    pub fn stop(&self, form: CallForm) -> Option<String> {
        (self.choice == Choice::Auto && !self.parallel && form == CallForm::Hermes).then(|| END.to_string())
    }

    /// The reader that finds the calls of a text.
    pub fn reader(&self, form: CallForm) -> Reader {
        let names = self.tools.iter().map(|tool| tool.name.clone()).collect();
        let named = matches!(self.choice, Choice::Named(_));
        Reader { form, names, named, pending: String::new(), calls: 0 }
    }
}

fn tool((at, sent): (usize, SentTool)) -> Result<Tool, ApiError> {
    let place = |rest: &str| format!("tools[{at}]{rest}");
    let SentTool { kind, function } = sent;
    if kind != "function" {
        return Err(unsupported(&place(&format!(".type={}", kind.chars().take(40).collect::<String>()))));
    }
    let Some(SentFunction { name, description, parameters, strict }) = function else {
        return Err(ApiError::field(place(".function"), "is missing"));
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if name.is_empty() || name.len() > NAME_MAX || !name.chars().all(plain) {
        let message = format!("expected 1 to {NAME_MAX} letters, digits, `_` or `-`");
        return Err(ApiError::field(place(".function.name"), message));
    }
    if parameters.as_ref().is_some_and(|parameters| !parameters.is_object()) {
        return Err(ApiError::field(place(".function.parameters"), "expected an object"));
    }
    Ok(Tool { name, description, parameters, strict: strict.unwrap_or(false) })
}

/// A call of a function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    pub id: String,
    pub name: String,
    /// A JSON object, as the model wrote it.
    pub arguments: String,
}

impl Call {
    /// The call in the form of replies.
    pub fn object(&self) -> Value {
        let Call { id, name, arguments } = self;
        json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } })
    }
}

/// A part of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    Text(String),
    Call(Call),
}

/// Finds the calls of one text, which arrives in parts.
#[derive(Debug, Clone)]
pub struct Reader {
    form: CallForm,
    names: Vec<String>,
    named: bool,
    /// Text that may be the beginning of a call, or a call without an end yet.
    pending: String,
    calls: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written<'a> {
    name: String,
    #[serde(borrow, alias = "parameters")]
    arguments: &'a RawValue,
}

impl Reader {
    /// Takes the next part of the text. Returns the pieces that are certain now.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        self.pending.push_str(text);
        let mut pieces = vec![];
        match self.form {
            CallForm::Hermes => while self.next(&mut pieces) {},
            // Either the whole text is a call, or it has none.
            CallForm::Llama3 => {
                let begun = self.pending.trim_start();
                if !begun.is_empty() && !begun.starts_with('{') {
                    pieces.push(Piece::Text(std::mem::take(&mut self.pending)));
                }
            }
        }
        pieces
    }

    /// Returns the rest at the end of the text.
    pub fn finish(&mut self) -> Vec<Piece> {
        let rest = std::mem::take(&mut self.pending);
        // A stop may have removed the end of a call, and white space between calls is left out.
        let inner = match self.form {
            CallForm::Hermes => rest.strip_prefix(BEGIN),
            CallForm::Llama3 => Some(rest.as_str()),
        };
        match inner.and_then(|inner| self.call(inner)) {
            Some(call) => vec![Piece::Call(call)],
            None if rest.is_empty() || (self.calls > 0 && rest.trim().is_empty()) => vec![],
            None => vec![Piece::Text(rest)],
        }
    }

    /// The `finish_reason` of a text that ended for `reason`.
    pub fn reason(&self, reason: &'static str) -> &'static str {
        // As in the API: a call of the function that `tool_choice` names ends with `stop`.
        if reason == "stop" && self.calls > 0 && !self.named { "tool_calls" } else { reason }
    }

    /// Takes the next piece off the beginning. Returns false if that needs more text.
    fn next(&mut self, pieces: &mut Vec<Piece>) -> bool {
        if let Some(rest) = self.pending.strip_prefix(BEGIN) {
            let Some(end) = rest.find(END) else { return false };
            let inner = rest[..end].to_string();
            let after = BEGIN.len() + end + END.len();
            let raw: String = self.pending.drain(..after).collect();
            pieces.push(self.call(&inner).map_or(Piece::Text(raw), Piece::Call));
            return true;
        }
        let (text, found) = match self.pending.find(BEGIN) {
            Some(at) => (self.pending[..at].trim_end().len(), Some(at)),
            None => (settled(&self.pending), None),
        };
        let said: String = self.pending.drain(..text).collect();
        if !said.is_empty() {
            pieces.push(Piece::Text(said));
        }
        if let Some(at) = found {
            self.pending.drain(..at - text);
        }
        found.is_some()
    }

    /// Reads a text as the call of an offered function.
    fn call(&mut self, text: &str) -> Option<Call> {
        let Written { name, arguments } = serde_json::from_str(text).ok()?;
        if !self.names.contains(&name) || !arguments.get().starts_with('{') {
            return None;
        }
        self.calls += 1;
        Some(Call { id: format!("call_{:016x}", fresh_seed()), name, arguments: arguments.get().to_string() })
    }
}

/// Length of the text that certainly belongs to no call. The rest is white space at its end, then a beginning of [`BEGIN`].
fn settled(text: &str) -> usize {
    let held = (1..BEGIN.len()).rev().find(|&length| text.ends_with(&BEGIN[..length])).unwrap_or(0);
    text[..text.len() - held].trim_end().len()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OFFERED: &str = r#""tools": [
        {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters":
            {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}}},
        {"type": "function", "function": {"name": "wait"}}]"#;

    fn take(rest: &str) -> Result<Option<Tools>, ApiError> {
        let json = format!("{{{OFFERED}{rest}}}");
        let mut fields = Fields::of(json.as_bytes())?;
        let tools = Tools::take(&mut fields)?;
        fields.finish().map(|()| tools)
    }

    /// The pieces of a text that arrives character by character; ids are left out.
    fn pieces(form: CallForm, text: &str) -> Vec<String> {
        let mut reader = take("").unwrap().unwrap().reader(form);
        let mut pieces: Vec<Piece> = text.chars().flat_map(|c| reader.push(&c.to_string())).collect();
        pieces.extend(reader.finish());
        let mut all: Vec<String> = vec![];
        let mut open = false;
        for piece in &pieces {
            match piece {
                Piece::Text(text) if open => all.last_mut().unwrap().push_str(text),
                Piece::Text(text) => all.push(text.clone()),
                Piece::Call(call) => all.push(format!("{}({})", call.name, call.arguments)),
            }
            open = !matches!(piece, Piece::Call(_));
        }
        all
    }

    #[test]
    fn calls_are_found_in_a_text_that_comes_in_parts() {
        let call = "<tool_call>\n{\"name\": \"look\", \"arguments\": {\"at\": \"<tool_\"}}\n</tool_call>";
        let found = "look({\"at\": \"<tool_\"})";
        for (text, expected) in [
            (call.to_string(), vec![found]),
            (format!("I look.\n{call}\n{call}\n"), vec!["I look.", found, found]),
            (format!("{call}\nDone <b>"), vec![found, "\nDone <b>"]),
            ("no call < here \n".to_string(), vec!["no call < here \n"]),
            // A function that is not offered, a call without JSON, a call that is cut.
            (call.replace("look", "find"), vec![&*call.replace("look", "find").leak()]),
            ("<tool_call>x</tool_call>".to_string(), vec!["<tool_call>x</tool_call>"]),
            (call[..30].to_string(), vec![&call[..30]]),
            // A stop removed its end.
            (call.trim_end_matches(END).to_string(), vec![found]),
        ] {
            assert_eq!(pieces(CallForm::Hermes, &text), expected, "{text}");
        }
        for (text, expected) in [
            ("{\"name\": \"wait\", \"parameters\": {}}", vec!["wait({})"]),
            (" {\"name\": \"look\", \"parameters\": {\"at\": \"a\"}}", vec!["look({\"at\": \"a\"})"]),
            ("{\"name\": \"wait\"}", vec!["{\"name\": \"wait\"}"]),
            ("Hello {\"name\"", vec!["Hello {\"name\""]),
        ] {
            assert_eq!(pieces(CallForm::Llama3, text), expected, "{text}");
        }
    }

    #[test]
    fn a_choice_says_what_a_text_has_to_call() {
        let source = |rest: &str, form| take(rest).unwrap().unwrap().source(form).unwrap();
        assert_eq!(source("", CallForm::Hermes), None);
        let Some(Source::Lark(all)) = source(r#", "tool_choice": "required""#, CallForm::Hermes) else { panic!() };
        assert!(all.starts_with("start: call (\"\\n\" call)*\ncall: call0 | call1\n"), "{all}");
        let named = r#", "tool_choice": {"type": "function", "function": {"name": "wait"}}"#;
        let Some(Source::Lark(one)) = source(named, CallForm::Llama3) else { panic!() };
        assert!(
            one.starts_with("start: call\ncall: call1\ncall1: \"{\\\"name\\\": \\\"wait\\\", \\\"parameters\\\": \" ")
        );
        assert_eq!(take(r#", "tool_choice": "none""#), Ok(None));
        let alone = take(r#", "parallel_tool_calls": false"#).unwrap().unwrap();
        assert_eq!((alone.stop(CallForm::Hermes).as_deref(), alone.stop(CallForm::Llama3)), (Some(END), None));
        let shown = alone.for_template();
        assert_eq!(shown[1], json!({ "type": "function", "function": { "name": "wait" } }));
    }

    #[test]
    fn tools_that_cannot_be_offered_are_refused_by_name() {
        let read = |json: &str| Tools::take(&mut Fields::of(json.as_bytes()).unwrap());
        for (json, param) in [
            (r#"{"tools": [{"type": "web_search"}]}"#, "tools[0].type=web_search"),
            (r#"{"tools": [{"type": "function", "function": {"name": "a b"}}]}"#, "tools[0].function.name"),
            (
                r#"{"tools": [{"type": "function", "function": {"name": "a", "parameters": 1}}]}"#,
                "tools[0].function.parameters",
            ),
            (
                r#"{"tools": [{"type": "function", "function": {"name": "a", "strict": true}}]}"#,
                "tools[0].function.strict",
            ),
            (r#"{"tools": [{"type": "function", "function": {"name": "a", "x": 1}}]}"#, "tools"),
            (r#"{"tool_choice": "required"}"#, "tool_choice"),
            (r#"{"tool_choice": "some"}"#, "tool_choice"),
            (r#"{"tool_choice": {"type": "function", "function": {"name": "a"}}}"#, "tool_choice"),
            (
                r#"{"tools": [{"type": "function", "function": {"name": "a"}}, {"type": "function", "function": {"name": "a"}}]}"#,
                "tools[1].function.name",
            ),
        ] {
            assert_eq!(read(json).unwrap_err().param.as_deref(), Some(param), "{json}");
        }
        assert_eq!(read(r#"{"tools": [], "tool_choice": "auto"}"#), Ok(None));
    }
}
