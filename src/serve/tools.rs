//! Owns tools: the functions that a client offers, and the grammar of a text that has to call one.
//!
//! A checkpoint's chat template shows the model its tools, and says in which form it calls them ([`CallForm`]). A text that has to
//! call one follows a grammar of that form. Any other text is free but for calls of functions that are strict, and its calls are found in it.

use std::sync::Arc;

use serde::Deserialize;
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::calls::{self, Allowed, Function};
use super::error::ApiError;
use super::fields::{Few, Fields, Sent, beyond_64_bits, unsupported};
use super::reader::SoughtCalls;
use crate::grammar::Source;
use crate::tokenizer::CallForm;

const TOOLS_MAX: usize = 128;
/// Most characters of a function's name. The API allows only characters that neither JSON nor a grammar escapes.
const NAME_MAX: usize = 64;

/// A function that a model may call.
#[derive(Debug, Clone, PartialEq)]
struct Tool {
    name: String,
    description: Option<String>,
    /// The schema of its arguments as text, with exact numbers.
    schema: String,
    /// The schema as templates show it.
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
    function: Option<Sent<SentFunction>>,
    /// A hint for caches of other servers.
    #[serde(rename = "cache_control")]
    _cache_control: Option<IgnoredAny>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SentFunction {
    name: String,
    description: Option<String>,
    parameters: Option<Box<RawValue>>,
    strict: Option<bool>,
}

enum SentChoice {
    Word(String),
    Named(SentNamed),
}

impl<'de> Deserialize<'de> for SentChoice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<SentChoice, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = SentChoice;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("`none`, `auto`, `required` or an object that names a function")
            }

            fn visit_str<E: Error>(self, word: &str) -> Result<SentChoice, E> {
                Ok(SentChoice::Word(word.to_string()))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<SentChoice, A::Error> {
                Sent::of_map(map).map(|Sent(named)| SentChoice::Named(named))
            }
        }
        deserializer.deserialize_any(Any)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SentNamed {
    #[serde(rename = "type")]
    kind: String,
    function: Option<Sent<SentName>>,
    #[serde(rename = "allowed_tools")]
    _allowed: Option<IgnoredAny>,
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
        let Few(sent) = fields.take::<Few<Sent<SentTool>, TOOLS_MAX>>("tools")?.unwrap_or(Few(vec![]));
        let choice: Option<SentChoice> = fields.take("tool_choice")?;
        let parallel = fields.take("parallel_tool_calls")?.unwrap_or(true);
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
            Some(SentChoice::Named(SentNamed { kind, function, .. })) => {
                if kind != "function" {
                    return Err(unsupported(&format!(
                        "tool_choice.type={}",
                        kind.chars().take(40).collect::<String>()
                    )));
                }
                let Some(Sent(SentName { name })) = function else {
                    return Err(ApiError::field("tool_choice.function", "is missing"));
                };
                let at = tools.iter().position(|tool| tool.name == name);
                Choice::Named(at.ok_or_else(|| ApiError::field("tool_choice", "expected a function of `tools`"))?)
            }
        };
        match (tools.is_empty(), &choice) {
            (true, Choice::Auto) => return Ok(None),
            (true, _) => return Err(ApiError::field("tool_choice", "expected only with `tools`")),
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

    /// Whether a text has to call a function.
    pub fn must_call(&self) -> bool {
        self.choice != Choice::Auto
    }

    /// The grammar of a text that has to call a function, or whose calls have to be strict; `None` if it is free.
    ///
    /// # Errors
    /// Parameters that are no schema.
    pub fn source(&self, form: CallForm) -> Result<Option<Source>, ApiError> {
        let free = !self.must_call();
        if free && !self.tools.iter().any(|tool| tool.strict) {
            return Ok(None);
        }
        let many = self.parallel && !matches!(self.choice, Choice::Named(_));
        let lark = calls::lark(form, &self.allowed(), free, many);
        let lark = lark.map_err(|(at, error)| ApiError::field(parameters_of(at), error))?;
        Ok(Some(Source::Lark(lark)))
    }

    /// The functions that a grammar allows.
    fn allowed(&self) -> Vec<Allowed<'_>> {
        let callable = match self.choice {
            Choice::Auto | Choice::Required => 0..self.tools.len(),
            Choice::Named(at) => at..at + 1,
        };
        let allowed = callable.clone().zip(&self.tools[callable]).map(|(at, tool)| {
            // Only the arguments of a strict function follow its schema in a text that is free otherwise.
            Allowed { at, name: &tool.name, schema: (self.must_call() || tool.strict).then_some(&tool.schema) }
        });
        allowed.collect()
    }

    /// The fields of the schemas that a grammar keeps to, and the schemas.
    pub fn schemas(&self) -> Vec<(String, Source)> {
        let allowed = self.allowed().into_iter();
        allowed.filter_map(|of| Some((parameters_of(of.at), Source::Arguments(of.schema?.to_string())))).collect()
    }

    /// The calls that count in a text.
    pub fn calls(&self, form: CallForm) -> SoughtCalls {
        let function =
            |tool: &Tool| Function::new(tool.name.clone(), tool.parameters.as_ref().and_then(Value::as_object));
        let functions = Arc::new(self.tools.iter().map(function).collect());
        let named = matches!(self.choice, Choice::Named(_));
        SoughtCalls { form, functions, named, single: calls::is_single(form, self.parallel) }
    }
}

/// The field of the parameters of a function.
fn parameters_of(at: usize) -> String {
    format!("tools[{at}].function.parameters")
}

fn tool((at, Sent(sent)): (usize, Sent<SentTool>)) -> Result<Tool, ApiError> {
    let place = |rest: &str| format!("tools[{at}]{rest}");
    let SentTool { kind, function, _cache_control: _ } = sent;
    if kind != "function" {
        return Err(unsupported(&place(&format!(".type={}", kind.chars().take(40).collect::<String>()))));
    }
    let Some(Sent(SentFunction { name, description, parameters, strict })) = function else {
        return Err(ApiError::field(place(".function"), "is missing"));
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if name.is_empty() || name.len() > NAME_MAX || !name.chars().all(plain) {
        let message = format!("expected 1 to {NAME_MAX} letters, digits, `_` or `-`");
        return Err(ApiError::field(place(".function.name"), message));
    }
    let refused = |message: String| ApiError::field(parameters_of(at), message);
    let shown = parameters.as_ref().map(|parameters| serde_json::from_str::<Value>(parameters.get())).transpose();
    let shown = shown.map_err(|error| refused(error.to_string()))?;
    if shown.as_ref().is_some_and(|parameters| !parameters.is_object()) {
        return Err(refused("expected an object".to_string()));
    }
    let schema = parameters.map_or("{}".to_string(), |parameters| parameters.get().to_string());
    if let Some(number) = beyond_64_bits(&schema) {
        return Err(refused(format!(
            "the number {number} has more than 64 bits, and the chat template would show another one"
        )));
    }
    Ok(Tool { name, description, schema, parameters: shown, strict: strict.unwrap_or(false) })
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
        assert_eq!((alone.calls(CallForm::Hermes).single, alone.calls(CallForm::Llama3).single), (true, false));
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
                r#"{"tools": [{"type": "function", "function": {"name": "a", "parameters": {"const": 123456789012345678901234567890}}}]}"#,
                "tools[0].function.parameters",
            ),
            (r#"{"tools": [{"type": "function", "function": {"name": "a", "x": 1}}]}"#, "tools[0]"),
            (r#"{"tools": [5]}"#, "tools[0]"),
            (r#"{"tool_choice": {}}"#, "tool_choice"),
            (r#"{"tool_choice": {"type": "function"}}"#, "tool_choice.function"),
            (r#"{"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}"#, "tool_choice.type=allowed_tools"),
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
