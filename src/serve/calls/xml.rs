//! Owns calls in tags, as Qwen3-Coder, Qwen3.5 and Nemotron 3 write them: reading them, and their grammar.
//!
//! ```text
//! <tool_call>
//! <function=NAME>
//! <parameter=KEY>
//! VALUE
//! </parameter>
//! </function>
//! </tool_call>
//! ```
//!
//! A value has no quotes and no escapes, so a tag may also be a part of it. `</parameter>` ends a value if another parameter or the end of the call
//! follows, and if no tag of the value is open. Models leave tags out: a call may begin with `<function=NAME>`, and an end tag may be missing.

use std::fmt::Write as _;

use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::values::{self, Kind};
use super::{Allowed, CALL_BEGIN, CALL_END, Ended, Function, Step, is_begun, quoted};
use crate::grammar::{self, GrammarError, Path};

pub const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";
/// Most bytes between `=` and `>` of a tag.
const NAME_BYTES_MAX: usize = 256;

/// The kinds of a function's parameters.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Parameters {
    known: Map<String, Value>,
    root: Map<String, Value>,
}

impl Parameters {
    /// Those of a schema of arguments.
    pub fn of(schema: &Map<String, Value>) -> Parameters {
        let mut known = Map::new();
        gather(&Value::Object(schema.clone()), schema, 16, &mut known);
        Parameters { known, root: schema.clone() }
    }

    fn kinds(&self, name: &str) -> Vec<Kind> {
        let others = self.root.get("additionalProperties");
        self.known.get(name).or(others).map_or(vec![], |schema| values::kinds(schema, &self.root))
    }
}

/// Adds the properties of a schema and of its parts.
fn gather(schema: &Value, root: &Map<String, Value>, depth: usize, into: &mut Map<String, Value>) {
    let (Some(members), Some(depth)) = (schema.as_object(), depth.checked_sub(1)) else { return };
    if let Some(Value::Object(properties)) = members.get("properties") {
        for (name, schema) in properties {
            into.entry(name.clone()).or_insert_with(|| schema.clone());
        }
    }
    if let Some(target) = members.get("$ref").and_then(Value::as_str).and_then(|to| grammar::target(root, to)) {
        gather(target, root, depth, into);
    }
    for key in ["allOf", "anyOf", "oneOf"] {
        if let Some(Value::Array(schemas)) = members.get(key) {
            schemas.iter().for_each(|schema| gather(schema, root, depth, into));
        }
    }
}

/// Reads a text that begins with the tag of a call or with that of a function.
pub fn step(text: &str, functions: &[Function], ended: Option<Ended>) -> Step {
    let wait = |begun: usize| if ended.is_some() { Step::Text(begun) } else { Step::Wait };
    let is_tagged = text.starts_with(CALL_BEGIN);
    let at = if is_tagged { text.len() - text[CALL_BEGIN.len()..].trim_start().len() } else { 0 };
    if is_begun(&text[at..], FUNCTION) {
        return wait(text.len());
    }
    let Some(inner) = text[at..].strip_prefix(FUNCTION) else { return Step::Text(CALL_BEGIN.len()) };
    let begun = at + FUNCTION.len();
    let Some(end) = inner.find(['>', '\n', '<']) else {
        return if inner.len() > NAME_BYTES_MAX { Step::Text(begun) } else { wait(text.len()) };
    };
    let name = inner[..end].trim();
    let function = functions.iter().find(|function| function.name == name);
    // Without the tag of a call, only an offered function begins one.
    if !inner[end..].starts_with('>') || (function.is_none() && !is_tagged) {
        return Step::Text(begun);
    }
    let begin = begun + end + 1;
    let none = Parameters::default();
    let parameters = function.map_or(&none, |function| &function.parameters);
    match body(&text[begin..], parameters, ended) {
        Body::Open => wait(text.len()),
        Body::Other => Step::Text(begin),
        Body::Ends { length, arguments } => {
            let after = text[begin + length..].trim_start();
            let tag = text.len() - after.len();
            let length = match after.strip_prefix(CALL_END) {
                Some(_) => tag + CALL_END.len(),
                None if ended.is_none() && is_begun(after, CALL_END) => return Step::Wait,
                None => begin + length,
            };
            match function {
                Some(function) => {
                    Step::Calls { length, calls: vec![(function.name.clone(), written(&arguments, parameters))] }
                }
                None => Step::Text(length),
            }
        }
    }
}

/// The text after the tag of a function.
enum Body<'a> {
    /// The call has this length. Names and values of its parameters.
    Ends { length: usize, arguments: Vec<(&'a str, &'a str)> },
    /// More text may end it.
    Open,
    /// It is no call.
    Other,
}

fn body<'a>(text: &'a str, parameters: &Parameters, ended: Option<Ended>) -> Body<'a> {
    let mut arguments: Vec<(&str, &str)> = vec![];
    let mut rest = text.trim_start();
    loop {
        let length = text.len() - rest.len();
        if rest.starts_with(FUNCTION_END) {
            return Body::Ends { length: length + FUNCTION_END.len(), arguments };
        }
        if rest.starts_with(CALL_END) || (rest.is_empty() && ended == Some(Ended::Complete) && !arguments.is_empty()) {
            return Body::Ends { length, arguments };
        }
        if [FUNCTION_END, CALL_END, PARAMETER].iter().any(|tag| is_begun(rest, tag)) {
            return Body::Open;
        }
        let Some(inner) = rest.strip_prefix(PARAMETER) else { return Body::Other };
        let Some((name, value)) = inner.split_once('>') else {
            return if inner.len() > NAME_BYTES_MAX { Body::Other } else { Body::Open };
        };
        let name = name.trim();
        let kinds = parameters.kinds(name);
        let is_new = |other: &str| {
            let has = arguments.iter().any(|(before, _)| *before == other);
            other != name && !has && parameters.known.contains_key(other)
        };
        let Some((end, after)) = value_end(value, values::is_text(&kinds), is_new, ended) else { return Body::Open };
        arguments.push((name, &value[..end]));
        rest = value[after..].trim_start();
    }
}

/// Where a value ends, and where the text after its tag begins; `None`: that needs more text. `is_new`: a parameter that the call may have still.
fn value_end(text: &str, is_text: bool, is_new: impl Fn(&str) -> bool, ended: Option<Ended>) -> Option<(usize, usize)> {
    if !is_text && text.trim_start().starts_with(['{', '[']) {
        let mut values = serde_json::Deserializer::from_str(text).into_iter::<&RawValue>();
        match values.next() {
            Some(Ok(_)) => {
                let end = values.byte_offset();
                let after = text[end..].trim_start();
                if after.starts_with(PARAMETER_END) {
                    return Some((end, text.len() - after.len() + PARAMETER_END.len()));
                }
                if ended.is_none() && is_begun(after, PARAMETER_END) {
                    return None;
                }
            }
            Some(Err(error)) if error.is_eof() && ended.is_none() => return None,
            _ => {}
        }
    }
    // Tags that the value itself has opened.
    let (mut parameters, mut functions, mut from) = (0_u32, 0_u32, 0);
    while let Some(at) = text[from..].find('<').map(|at| from + at) {
        let (before, rest) = text.split_at(at);
        let begins_line = before.is_empty() || before.ends_with('\n');
        from = at + 1;
        if let Some(after) = rest.strip_prefix(PARAMETER_END) {
            let next = after.trim_start();
            if parameters > 0 {
                parameters -= 1;
            } else if [PARAMETER, FUNCTION_END, CALL_END].iter().any(|tag| next.starts_with(tag)) {
                return Some((at, at + PARAMETER_END.len()));
            } else if [PARAMETER, FUNCTION_END, CALL_END].iter().any(|tag| is_begun(next, tag)) {
                return ended.map(|_| (at, at + PARAMETER_END.len()));
            }
        } else if begins_line && rest.starts_with(PARAMETER) {
            parameters += 1;
        } else if begins_line && rest.starts_with(FUNCTION) {
            functions += 1;
        } else if let Some(after) = rest.strip_prefix(FUNCTION_END) {
            let next = after.trim_start();
            if functions > 0 {
                functions -= 1;
            } else if next.starts_with(CALL_END) || (next.is_empty() && ended.is_some()) {
                return Some(unclosed_end(before, is_new));
            }
        }
    }
    None
}

/// As [`value_end`], where the end tag is missing or belongs to a tag in the value.
fn unclosed_end(text: &str, is_new: impl Fn(&str) -> bool) -> (usize, usize) {
    let next = text.match_indices(PARAMETER).map(|(at, _)| at).find(|&at| {
        let name = text[at + PARAMETER.len()..].split_once('>').map(|(name, _)| name.trim());
        text[..at].ends_with('\n') && name.is_some_and(&is_new)
    });
    let after = next.unwrap_or(text.len());
    let value = &text[..after];
    let end = value.trim_end().strip_suffix(PARAMETER_END).map_or(after, str::len);
    (end, after)
}

/// The arguments as JSON.
fn written(arguments: &[(&str, &str)], parameters: &Parameters) -> String {
    let mut values: Vec<(&str, String)> = vec![];
    for (name, value) in arguments {
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = values::json(value.strip_suffix('\n').unwrap_or(value), &parameters.kinds(name));
        match values.iter_mut().find(|(before, _)| before == name) {
            Some((_, before)) => *before = value,
            None => values.push((name, value)),
        }
    }
    let members: Vec<String> = values.iter().map(|(name, value)| format!("{}: {value}", Value::from(*name))).collect();
    format!("{{{}}}", members.join(", "))
}

/// The rules of a call, whose text begins with `before`. Without a schema, its parameters are free.
///
/// # Errors
/// A schema that a text without quotes cannot be held to exactly.
pub fn rules(of: &Allowed<'_>, before: &str) -> Result<String, GrammarError> {
    let Allowed { at, name, schema } = of;
    let head = quoted(&format!("{before}{FUNCTION}{name}>\n"));
    let Some(schema) = schema else {
        let tail = quoted(&format!("\n{CALL_END}"));
        let end = quoted(FUNCTION_END);
        return Ok(format!("call{at}: {head} body{at} {tail}\nbody{at}[lazy]: BODY{at} {end}\nBODY{at}: /(.|\\n)*/\n"));
    };
    let root = grammar::arguments(schema)?;
    let empty = Map::new();
    let root = root.as_object().unwrap_or(&empty);
    let refused = |path: Path| GrammarError::Schema {
        path,
        reason: "cannot be kept to in the form of this model's calls, which writes texts without quotes".to_string(),
        remedy: "leave it out, and check the arguments yourself",
    };
    let top = Path::default();
    const KNOWN: [&str; 6] = ["type", "properties", "required", "additionalProperties", "$defs", "definitions"];
    let beyond = |key: &&String| !KNOWN.contains(&key.as_str()) && !is_note(key);
    if let Some(key) = root.keys().find(beyond) {
        return Err(refused(top.key(key)));
    }
    let properties = root.get("properties").and_then(Value::as_object).unwrap_or(&empty);
    let required: Vec<&str> =
        root.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect();
    if let Some(at) = required.iter().position(|name| !properties.contains_key(*name)) {
        return Err(refused(top.key("required").item(at)));
    }
    let (mut call, mut rules) = (format!("call{at}: {head}"), String::new());
    for (index, (key, schema)) in properties.iter().enumerate() {
        if schema == &Value::Bool(false) && !required.contains(&key.as_str()) {
            continue;
        }
        let path = top.key("properties").key(key);
        if key.contains(['<', '>', '\n']) || key.trim() != key {
            return Err(refused(path));
        }
        let place = format!("{at}_{index}");
        let value = value_rules(&place, schema, root, &path).map_err(refused)?;
        let tag = quoted(&format!("{PARAMETER}{key}>\n"));
        let _ = write!(call, " p{place}{}", if required.contains(&key.as_str()) { "" } else { "?" });
        let _ = write!(rules, "p{place}: {tag} v{place}\n{value}");
    }
    let tail = quoted(&format!("{FUNCTION_END}\n{CALL_END}"));
    Ok(format!("{call} {tail}\n{rules}"))
}

/// Keywords that hold no value to anything.
fn is_note(key: &str) -> bool {
    const NOTES: [&str; 13] = [
        "title",
        "description",
        "default",
        "example",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "x-guidance",
        "$schema",
        "$id",
        "$comment",
        "strict",
    ];
    NOTES.contains(&key)
}

/// The rules of a value with its end tag. The error is the path of a keyword.
fn value_rules(place: &str, schema: &Value, root: &Map<String, Value>, path: &Path) -> Result<String, Path> {
    let kinds = values::kinds(schema, root);
    let end = quoted(&format!("\n{PARAMETER_END}\n"));
    if !values::is_text(&kinds) {
        let mut schema = without_texts(schema, root).ok_or_else(|| path.key("type"))?;
        for key in ["$defs", "definitions", "x-guidance"] {
            if let Some(shared) = root.get(key) {
                schema.insert(key.to_string(), shared.clone());
            }
        }
        return Ok(format!("v{place}: j{place} {end}\nj{place}: %json {}\n", Value::Object(schema)));
    }
    let mut texts = vec![];
    if kinds != [Kind::Null] {
        collect_texts(schema, root, path, 16, &mut texts)?;
    }
    let mut ways = vec![];
    let mut rules = String::new();
    if kinds.contains(&Kind::Null) {
        ways.push(quoted(&format!("null\n{PARAMETER_END}\n")));
    }
    for (index, text) in texts.iter().enumerate() {
        match text {
            Texts::One(text) => ways.push(quoted(&format!("{text}\n{PARAMETER_END}\n"))),
            Texts::Of { pattern, least, most } => {
                let tags = r"(<\/parameter>|<parameter=|<\/function>)";
                let most = most.map_or(String::new(), |most| most.to_string());
                let _ = write!(
                    rules,
                    "t{place}_{index}[lazy]: T{place}_{index} {end}\n\
                     T{place}_{index}: /(.|\\n){{{least},{most}}}/ & ~/(.|\\n)*{tags}(.|\\n)*/{}\n",
                    pattern.as_ref().map_or(String::new(), |pattern| format!(" & /{pattern}/"))
                );
                ways.push(format!("t{place}_{index}"));
            }
        }
    }
    Ok(format!("v{place}: {}\n{rules}", ways.join(" | ")))
}

/// Texts that a schema allows.
enum Texts {
    One(String),
    /// `least` and `most` count characters.
    Of {
        pattern: Option<String>,
        least: u64,
        most: Option<u64>,
    },
}

/// The texts that a schema allows. What it allows of other kinds is left out. The error is the path of a keyword.
fn collect_texts(
    schema: &Value,
    root: &Map<String, Value>,
    path: &Path,
    depth: usize,
    into: &mut Vec<Texts>,
) -> Result<(), Path> {
    const KNOWN: [&str; 10] =
        ["type", "enum", "const", "minLength", "maxLength", "pattern", "$ref", "anyOf", "oneOf", "allOf"];
    let Some(members) = schema.as_object() else {
        if schema == &Value::Bool(true) {
            into.push(Texts::Of { pattern: None, least: 0, most: None });
        }
        return Ok(());
    };
    let depth = depth.checked_sub(1).ok_or_else(|| path.clone())?;
    let kinds = values::kinds(schema, root);
    if !kinds.is_empty() && !kinds.contains(&Kind::Text) {
        return Ok(());
    }
    let has: Vec<&str> = members.keys().map(String::as_str).filter(|key| !is_note(key)).collect();
    let ruled = |key: &str| has.iter().find(|other| **other != key && **other != "type").map(|other| path.key(other));
    if let Some(key) = has.iter().find(|key| !KNOWN.contains(key)) {
        return Err(path.key(key));
    }
    for key in ["$ref", "anyOf", "oneOf", "allOf"] {
        let Some(inner) = members.get(key) else { continue };
        if let Some(other) = ruled(key) {
            return Err(other);
        }
        let path = path.key(key);
        match (key, inner) {
            ("$ref", Value::String(reference)) => {
                let target = grammar::target(root, reference).ok_or_else(|| path.clone())?;
                return collect_texts(target, root, &path, depth, into);
            }
            (_, Value::Array(schemas)) => {
                let before = into.len();
                for (at, schema) in schemas.iter().enumerate() {
                    collect_texts(schema, root, &path.item(at), depth, into)?;
                }
                let is_sum = key == "anyOf" || into.len() <= before + 1 && (key == "oneOf" || schemas.len() == 1);
                return if is_sum { Ok(()) } else { Err(path) };
            }
            _ => return Err(path),
        }
    }
    let listed = match (members.get("enum"), members.get("const")) {
        (Some(Value::Array(values)), None) => ("enum", values.as_slice()),
        (None, Some(value)) => ("const", std::slice::from_ref(value)),
        _ => {
            let number = |key| members.get(key).map(|value| value.as_u64().ok_or_else(|| path.key(key))).transpose();
            let pattern = members.get("pattern").map(|pattern| searched(pattern.as_str()?));
            let pattern = pattern.map(|pattern| pattern.ok_or_else(|| path.key("pattern"))).transpose()?;
            into.push(Texts::Of { pattern, least: number("minLength")?.unwrap_or(0), most: number("maxLength")? });
            return Ok(());
        }
    };
    let (key, values) = listed;
    for text in values.iter().filter_map(Value::as_str) {
        let has_tag = [PARAMETER_END, PARAMETER, FUNCTION_END].iter().any(|tag| text.contains(tag));
        if let Some(other) = ruled(key).or(has_tag.then(|| path.key(key))) {
            return Err(other);
        }
        into.push(Texts::One(text.to_string()));
    }
    Ok(())
}

/// A pattern of a schema, which may match anywhere in a text, as one of a whole text; `None`: it cannot be written so.
fn searched(pattern: &str) -> Option<String> {
    let begins = pattern.starts_with('^');
    let rest = pattern.strip_prefix('^').unwrap_or(pattern);
    let escapes = rest.strip_suffix('$').map(|rest| rest.len() - rest.trim_end_matches('\\').len());
    let ends = escapes.is_some_and(|count| count % 2 == 0);
    let inner = if ends { &rest[..rest.len() - 1] } else { rest };
    // A class may have classes in it.
    let (mut plain, mut depth, mut classes) = (String::new(), 0_u32, 0_u32);
    let mut characters = inner.chars().peekable();
    while let Some(c) = characters.next() {
        match c {
            '\\' => {
                let escaped = characters.next()?;
                // Assertions and references to groups are no part of a regular language.
                if classes == 0 && (matches!(escaped, 'b' | 'B' | 'k') || escaped.is_ascii_digit()) {
                    return None;
                }
                plain.push('\\');
                plain.push(escaped);
                continue;
            }
            '[' => classes += 1,
            ']' => classes = classes.saturating_sub(1),
            '(' if classes == 0 => {
                depth += 1;
                if characters.peek() == Some(&'?') {
                    plain.push_str("(?");
                    characters.next();
                    if characters.peek() != Some(&':') {
                        return None;
                    }
                    continue;
                }
            }
            ')' if classes == 0 => depth = depth.checked_sub(1)?,
            '^' | '$' if classes == 0 => return None,
            '|' if classes == 0 && depth == 0 && (begins || ends) => return None,
            '/' => plain.push('\\'),
            _ => {}
        }
        plain.push(c);
    }
    let any = |is_bound: bool| if is_bound { "" } else { "(.|\\n)*" };
    Some(format!("{}({plain}){}", any(begins), any(ends)))
}

/// A schema that allows texts and values of other kinds, without the texts; `None`: it cannot be written so.
fn without_texts(schema: &Value, root: &Map<String, Value>) -> Option<Map<String, Value>> {
    let mut members = schema.as_object().cloned().unwrap_or_default();
    let kinds = values::kinds(schema, root);
    if !kinds.contains(&Kind::Text) {
        // Keywords of objects or lists stand for the type: a value of another one would be read as a text.
        let kind = match kinds.as_slice() {
            [Kind::Object] => Some("object"),
            [Kind::List] => Some("array"),
            _ => None,
        };
        if let Some(kind) = kind.filter(|_| ["properties", "items"].iter().any(|key| members.contains_key(*key))) {
            members.insert("type".to_string(), Value::from(kind));
        }
        return Some(members);
    }
    let is_other = |schema: &Value| !values::kinds(schema, root).contains(&Kind::Text);
    for key in ["type", "enum", "anyOf", "oneOf"] {
        let Some(Value::Array(items)) = members.get_mut(key) else { continue };
        let had = items.len();
        match key {
            "type" => items.retain(|item| item != "string"),
            "enum" => items.retain(|item| !item.is_string()),
            _ => items.retain(is_other),
        }
        if items.len() < had && !items.is_empty() {
            return Some(members);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn function(schema: Value) -> Vec<Function> {
        let schema = schema.as_object().unwrap();
        vec![Function { name: "look".to_string(), parameters: Parameters::of(schema) }]
    }

    fn call(values: &str) -> String {
        format!("<tool_call>\n<function=look>\n{values}</function>\n</tool_call>")
    }

    #[test]
    fn a_pattern_is_searched_in_a_text() {
        for (pattern, expected) in [
            ("^[a-z]+$", Some("([a-z]+)")),
            ("a/b", Some("(.|\\n)*(a\\/b)(.|\\n)*")),
            ("a\\$", Some("(.|\\n)*(a\\$)(.|\\n)*")),
            ("^(?:a|b)", Some("((?:a|b))(.|\\n)*")),
            ("a|b", Some("(.|\\n)*(a|b)(.|\\n)*")),
            ("^a|b$", None),
            ("(?=a)b", None),
            ("a$b", None),
            ("\\bword", None),
            ("^[[^ ](]|b", None),
            ("^[[^ ]$(]b$", Some("([[^ ]$(]b)")),
        ] {
            assert_eq!(searched(pattern).as_deref(), expected, "{pattern}");
        }
    }

    #[test]
    fn a_value_ends_where_its_call_goes_on() {
        let functions = function(json!({ "properties": {
            "a": { "type": "string" }, "b": { "type": "string" }, "o": { "type": "object" }, "n": { "type": "integer" }
        } }));
        let one = |key: &str, value: &str| format!("<parameter={key}>\n{value}\n</parameter>\n");
        let literal = call("<parameter=x>\n1\n</parameter>\n");
        for (values, expected) in [
            (one("a", "x </parameter> y"), json!({ "a": "x </parameter> y" })),
            (one("a", "x\n</parameter>\n y"), json!({ "a": "x\n</parameter>\n y" })),
            (one("a", "x</function></tool_callx"), json!({ "a": "x</function></tool_callx" })),
            (one("a", "</tool_call>"), json!({ "a": "</tool_call>" })),
            // A call that is a value.
            (one("a", &literal), json!({ "a": literal })),
            (one("o", "{\"k\": \"</parameter> </function>\"}"), json!({ "o": { "k": "</parameter> </function>" } })),
            (one("a", "1") + &one("n", " 2 "), json!({ "a": "1", "n": 2 })),
            // Empty, without line breaks, with more of them.
            ("<parameter=a></parameter>".to_string(), json!({ "a": "" })),
            ("<parameter=a>x</parameter><parameter=n>3</parameter>".to_string(), json!({ "a": "x", "n": 3 })),
            (one("a", "\nx\n"), json!({ "a": "\nx\n" })),
            (String::new(), json!({})),
            // End tags are missing.
            ("<parameter=a>\nx\n<parameter=b>\ny\n</parameter>\n".to_string(), json!({ "a": "x", "b": "y" })),
            ("<parameter=a>\nx\n".to_string(), json!({ "a": "x" })),
            (one("a", "\n<parameter=z>"), json!({ "a": "\n<parameter=z>" })),
            // A parameter that the schema lacks, and one that comes twice.
            (one("z", "5"), json!({ "z": "5" })),
            (one("n", "5") + &one("a", "x") + &one("n", "6"), json!({ "n": 6, "a": "x" })),
        ] {
            let text = call(&values);
            let Step::Calls { length, calls } = step(&text, &functions, None) else { panic!("{text}") };
            assert_eq!((length, &*calls[0].0), (text.len(), "look"), "{text}");
            assert_eq!(serde_json::from_str::<Value>(&calls[0].1).unwrap(), expected, "{text}");
            // Every beginning waits.
            for end in CALL_BEGIN.len()..text.len() {
                let found = step(&text[..end], &functions, None);
                assert_eq!(found, Step::Wait, "{}", &text[..end]);
            }
        }
    }
}
