//! Owns values that a call writes as text: which kinds a schema has, and the JSON of a text of such a kind.
//!
//! Forms of calls without JSON write a string without quotes, so only the schema tells `5` from `"5"`. The rules are those of vLLM's parser
//! `qwen3_coder`: the first kind of a schema decides, and a text that is no value of its kinds stays a text.

use std::fmt::Write as _;

use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::grammar;

/// Deepest nesting of references and alternatives, and of a value in the notation of Python.
const DEPTH_MAX: usize = 64;

/// A kind of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Null,
    Boolean,
    Integer,
    Number,
    Text,
    Object,
    List,
}

impl Kind {
    /// The kind of this `type` of a schema.
    pub fn named(name: &str) -> Option<Kind> {
        Some(match name {
            "null" => Kind::Null,
            "boolean" => Kind::Boolean,
            "integer" => Kind::Integer,
            "number" => Kind::Number,
            "string" => Kind::Text,
            "object" => Kind::Object,
            "array" => Kind::List,
            _ => return None,
        })
    }

    fn of(value: &Value) -> Kind {
        match value {
            Value::Null => Kind::Null,
            Value::Bool(_) => Kind::Boolean,
            Value::Number(number) if number.is_f64() => Kind::Number,
            Value::Number(_) => Kind::Integer,
            Value::String(_) => Kind::Text,
            Value::Object(_) => Kind::Object,
            Value::Array(_) => Kind::List,
        }
    }
}

/// The kinds of a schema in their order; none: it does not say. References lead into `root`.
pub fn kinds(schema: &Value, root: &Map<String, Value>) -> Vec<Kind> {
    let mut kinds = vec![];
    collect(schema, root, DEPTH_MAX, &mut kinds);
    kinds
}

fn collect(schema: &Value, root: &Map<String, Value>, depth: usize, into: &mut Vec<Kind>) {
    let (Some(members), Some(depth)) = (schema.as_object(), depth.checked_sub(1)) else { return };
    let mut add = |kind: Kind| {
        if !into.contains(&kind) {
            into.push(kind);
        }
    };
    match members.get("type") {
        Some(Value::String(name)) => return Kind::named(name).into_iter().for_each(add),
        Some(Value::Array(names)) => {
            return names.iter().filter_map(Value::as_str).filter_map(Kind::named).for_each(add);
        }
        _ => {}
    }
    if let Some(Value::Array(values)) = members.get("enum") {
        return values.iter().map(Kind::of).for_each(add);
    }
    if let Some(value) = members.get("const") {
        return add(Kind::of(value));
    }
    if let Some(target) = members.get("$ref").and_then(Value::as_str).and_then(|to| grammar::target(root, to)) {
        return collect(target, root, depth, into);
    }
    for key in ["anyOf", "oneOf", "allOf"] {
        if let Some(Value::Array(schemas)) = members.get(key) {
            return schemas.iter().for_each(|schema| collect(schema, root, depth, into));
        }
    }
    if members.contains_key("properties") {
        add(Kind::Object);
    } else if members.contains_key("items") {
        add(Kind::List);
    }
}

/// Whether a value of these kinds is written as text.
pub fn is_text(kinds: &[Kind]) -> bool {
    matches!(kinds.iter().find(|kind| **kind != Kind::Null), None | Some(Kind::Text))
}

/// The JSON of a text that is a value of these kinds.
pub fn json(text: &str, kinds: &[Kind]) -> String {
    let trimmed = text.trim();
    // Templates write null as Python does.
    let is_null = ["null", "none"].contains(&trimmed.to_ascii_lowercase().as_str());
    if is_null && (kinds.contains(&Kind::Null) || !is_text(kinds)) {
        return "null".to_string();
    }
    let found = if is_text(kinds) { None } else { kinds.iter().find_map(|kind| of_kind(trimmed, *kind)) };
    found.unwrap_or_else(|| Value::from(text).to_string())
}

fn of_kind(text: &str, kind: Kind) -> Option<String> {
    match kind {
        Kind::Null | Kind::Text => None,
        Kind::Boolean => Some(text.to_ascii_lowercase()).filter(|word| word == "true" || word == "false"),
        Kind::Integer => whole(text).or_else(|| number(text).filter(|number| whole(number).is_some())),
        Kind::Number => whole(text).or_else(|| number(text)),
        Kind::Object => container(text, '{'),
        Kind::List => container(text, '['),
    }
}

/// A whole number with all its digits.
fn whole(text: &str) -> Option<String> {
    let (sign, digits) = match text.strip_prefix('-') {
        Some(digits) => ("-", digits),
        None => ("", text.strip_prefix('+').unwrap_or(text)),
    };
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let short = digits.trim_start_matches('0');
    Some(if short.is_empty() { "0".to_string() } else { format!("{sign}{short}") })
}

/// A number; one without a fraction is written as a whole one.
fn number(text: &str) -> Option<String> {
    const EXACT_MAX: f64 = 9_007_199_254_740_992.0;
    let plain = text.bytes().all(|byte| byte.is_ascii_digit() || b"+-.eE".contains(&byte));
    let value = text.parse::<f64>().ok().filter(|value| plain && value.is_finite())?;
    if value.fract() == 0.0 && value.abs() < EXACT_MAX {
        return Some(format!("{}", value as i64));
    }
    // As it is written, so that no digit is lost.
    Some(if serde_json::from_str::<Value>(text).is_ok() { text.to_string() } else { Value::from(value).to_string() })
}

/// An object or a list: JSON, JSON in a text, or the notation of Python.
fn container(text: &str, begin: char) -> Option<String> {
    let is_json = |text: &str| text.starts_with(begin) && serde_json::from_str::<&RawValue>(text).is_ok();
    if is_json(text) {
        return Some(text.to_string());
    }
    let python = |text: &str| python(text).filter(|json| json.starts_with(begin));
    match serde_json::from_str::<String>(text) {
        Ok(inner) if is_json(inner.trim()) => Some(inner.trim().to_string()),
        Ok(inner) => python(inner.trim()),
        Err(_) => python(text),
    }
}

/// The JSON of a literal of Python.
fn python(text: &str) -> Option<String> {
    let mut literal = Literal { rest: text, json: String::new() };
    literal.value(DEPTH_MAX)?;
    literal.rest.trim().is_empty().then_some(literal.json)
}

/// A literal of Python that is read from its beginning.
struct Literal<'a> {
    rest: &'a str,
    json: String,
}

impl Literal<'_> {
    /// Takes a text, with white space before it.
    fn take(&mut self, text: &str) -> Option<()> {
        self.rest = self.rest.trim_start().strip_prefix(text)?;
        Some(())
    }

    fn value(&mut self, depth: usize) -> Option<()> {
        let depth = depth.checked_sub(1)?;
        self.rest = self.rest.trim_start();
        match self.rest.chars().next()? {
            '{' => self.items('{', "}", depth),
            '[' => self.items('[', "]", depth),
            '(' => self.items('(', ")", depth),
            quote @ ('\'' | '"') => self.text(quote),
            _ => {
                let end = self.rest.find([',', ':', '}', ']', ')']).unwrap_or(self.rest.len());
                let (word, rest) = self.rest.split_at(end);
                self.rest = rest;
                self.json.push_str(&match word.trim_end() {
                    "None" | "null" => "null".to_string(),
                    "True" | "true" => "true".to_string(),
                    "False" | "false" => "false".to_string(),
                    word => whole(word).or_else(|| number(word))?,
                });
                Some(())
            }
        }
    }

    /// The values of a list, or the keys and values of a dictionary.
    fn items(&mut self, begin: char, end: &str, depth: usize) -> Option<()> {
        self.rest = &self.rest[1..];
        self.json.push(if begin == '{' { '{' } else { '[' });
        let mut first = true;
        while self.take(end).is_none() {
            if !first {
                self.take(",")?;
                if self.take(end).is_some() {
                    break;
                }
                self.json.push_str(", ");
            }
            first = false;
            if begin == '{' {
                self.rest = self.rest.trim_start();
                let quote = self.rest.chars().next().filter(|c| ['\'', '"'].contains(c))?;
                self.text(quote)?;
                self.take(":")?;
                self.json.push_str(": ");
            }
            self.value(depth)?;
        }
        self.json.push(if begin == '{' { '}' } else { ']' });
        Some(())
    }

    fn text(&mut self, quote: char) -> Option<()> {
        let mut text = String::new();
        let mut rest = self.rest[1..].chars();
        loop {
            match rest.next()? {
                '\\' => match rest.next()? {
                    'n' => text.push('\n'),
                    't' => text.push('\t'),
                    'r' => text.push('\r'),
                    digits @ ('x' | 'u') => {
                        let count = if digits == 'x' { 2 } else { 4 };
                        let code: String = rest.by_ref().take(count).collect();
                        text.push(char::from_u32(u32::from_str_radix(&code, 16).ok()?)?);
                    }
                    plain @ ('\\' | '\'' | '"') => text.push(plain),
                    other => text.extend(['\\', other]),
                },
                end if end == quote => break,
                plain => text.push(plain),
            }
        }
        self.rest = rest.as_str();
        let _ = write!(self.json, "{}", Value::from(text));
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_text_is_read_as_its_schema_says() {
        for (schema, text, expected) in [
            (json!({ "type": "string" }), "5", json!("5")),
            (json!({ "type": "string" }), "null", json!("null")),
            (json!({ "type": "string" }), "  a\n", json!("  a\n")),
            (json!({ "type": "string" }), "{\"a\": 1}", json!("{\"a\": 1}")),
            (json!({}), "5", json!("5")),
            (json!({ "type": "integer" }), "5", json!(5)),
            (json!({ "type": "integer" }), " -07\n", json!(-7)),
            (json!({ "type": "integer" }), "5.0", json!(5)),
            (json!({ "type": "integer" }), "5.5", json!("5.5")),
            (json!({ "type": "integer" }), "five", json!("five")),
            (json!({ "type": "integer" }), "None", json!(null)),
            (json!({ "type": "number" }), "2.50", json!(2.5)),
            (json!({ "type": "number" }), "3.0", json!(3)),
            (json!({ "type": "number" }), "1e3", json!(1000)),
            (json!({ "type": "number" }), ".5", json!(0.5)),
            (json!({ "type": "number" }), "inf", json!("inf")),
            (json!({ "type": "boolean" }), "True", json!(true)),
            (json!({ "type": "boolean" }), "false", json!(false)),
            (json!({ "type": "boolean" }), "maybe", json!("maybe")),
            (json!({ "type": "null" }), "null", json!(null)),
            (json!({ "type": "array" }), "[1, \"a\"]", json!([1, "a"])),
            (json!({ "type": "array" }), "a, b", json!("a, b")),
            (json!({ "type": "object" }), "{\"a\": {\"b\": null}}", json!({ "a": { "b": null } })),
            (json!({ "type": "object" }), "\"{\\\"a\\\": 1}\"", json!({ "a": 1 })),
            (
                json!({ "type": "object" }),
                "{'a': True, 'b': (1, 2.5,), 'c': 'it\\'s'}",
                json!({ "a": true, "b": [1, 2.5], "c": "it's" }),
            ),
            (json!({ "type": ["string", "null"] }), "null", json!(null)),
            (json!({ "type": ["string", "null"] }), "nullable", json!("nullable")),
            (json!({ "anyOf": [{ "type": "string" }, { "type": "null" }] }), "None", json!(null)),
            (json!({ "anyOf": [{ "type": "string" }, { "type": "integer" }] }), "5", json!("5")),
            (json!({ "anyOf": [{ "type": "integer" }, { "type": "string" }] }), "5", json!(5)),
            (json!({ "anyOf": [{ "type": "integer" }, { "type": "string" }] }), "five", json!("five")),
            (json!({ "enum": [1, 2] }), "2", json!(2)),
            (json!({ "const": true }), "true", json!(true)),
            (json!({ "$ref": "#/$defs/count" }), "4", json!(4)),
            (json!({ "allOf": [{ "$ref": "#/$defs/self" }] }), "4", json!("4")),
            (json!({ "items": {} }), "[]", json!([])),
        ] {
            let root = json!({ "$defs": { "count": { "type": "integer" }, "self": { "$ref": "#/$defs/self" } } });
            let found = json(text, &kinds(&schema, root.as_object().unwrap()));
            assert_eq!(serde_json::from_str::<Value>(&found).unwrap(), expected, "{schema} {text}");
        }
        // No digit is lost.
        for text in ["123456789012345678901234567890", "0.1234567890123456789", "-9007199254740993"] {
            assert_eq!(json(text, &[Kind::Number]), text);
        }
    }
}
