//! Owns calls that are one JSON object: in a tag, as Hermes, Qwen 2.5 and Qwen 3 write them, or as the whole text, as Llama 3 does.

use std::collections::BTreeMap;

use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use super::{ANY, Allowed, CALL_BEGIN, CALL_END, Ended, Function, Step, quoted};
use crate::grammar::{self, GrammarError};

/// The beginning of the grammar of a text that is a call or has none.
pub const FREE: &str = "start: call | TEXT\nTEXT: /([ \\n]*[^{ \\n](.|\\n)*)?/\n";

/// Reads a text that begins with [`CALL_BEGIN`].
pub fn tagged(text: &str, functions: &[Function], ended: Option<Ended>) -> Step {
    let rest = &text[CALL_BEGIN.len()..];
    let (inner, after) = match ends(rest) {
        Some(found) => found,
        None if ended.is_none() => return Step::Wait,
        // A stop may have removed the end of the call.
        None => (rest.len(), rest.len()),
    };
    let length = CALL_BEGIN.len() + after;
    match call(&rest[..inner], functions, true) {
        Some(call) => Step::Calls { length, calls: vec![call] },
        None => Step::Text(length),
    }
}

/// Reads a whole text.
pub fn whole(text: &str, functions: &[Function], ended: Option<Ended>) -> Step {
    let begun = text.trim_start();
    if ended.is_none() && (begun.is_empty() || begun.starts_with('{')) {
        return Step::Wait;
    }
    match call(text, functions, false) {
        Some(call) => Step::Calls { length: text.len(), calls: vec![call] },
        None => Step::Text(text.len()),
    }
}

/// Reads an object as the call of an offered function. Other keys than the name and the arguments, such as `type`, are ignored. The call may
/// also be an object in `function`, as in the API of OpenAI.
fn call(text: &str, functions: &[Function], in_tag: bool) -> Option<(String, String)> {
    let members: BTreeMap<String, &RawValue> = serde_json::from_str(text).ok()?;
    let written = match members.get("function").filter(|_| !members.contains_key("name")) {
        Some(inner) => serde_json::from_str(inner.get()).ok()?,
        None => members,
    };
    let name: String = serde_json::from_str(written.get("name")?.get()).ok()?;
    functions.iter().find(|function| function.name == name)?;
    let sent = written.get("arguments").or(written.get("parameters")).map(|raw| raw.get());
    // Without a tag, an object with a name alone may be an answer.
    let arguments = if sent.is_none() && !in_tag { None } else { arguments(sent.unwrap_or("null")) };
    Some((name, arguments?))
}

/// The arguments of a call as an object: null and an empty text are an empty one, and some models write the object as a text.
pub fn arguments(written: &str) -> Option<String> {
    if written == "null" {
        return Some("{}".to_string());
    }
    if written.starts_with('{') {
        return Some(written.to_string());
    }
    let object: String = serde_json::from_str(written).ok()?;
    if object.trim().is_empty() {
        return Some("{}".to_string());
    }
    serde_json::from_str::<BTreeMap<String, IgnoredAny>>(&object).ok()?;
    Some(object)
}

/// Where the object after [`CALL_BEGIN`] ends, and where its end tag does; `None`: that needs more text. An end tag in a string of the object is
/// not its end. What is no JSON ends at the first tag.
fn ends(rest: &str) -> Option<(usize, usize)> {
    let first = rest.find(CALL_END)?;
    let mut values = serde_json::Deserializer::from_str(rest).into_iter::<IgnoredAny>();
    let end = match values.next() {
        Some(Ok(_)) => values.byte_offset(),
        Some(Err(error)) if error.is_eof() => return None,
        _ => return Some((first, first + CALL_END.len())),
    };
    let after = rest[end..].trim_start();
    let tag = rest.len() - after.len();
    if after.starts_with(CALL_END) {
        Some((end, tag + CALL_END.len()))
    } else if CALL_END.starts_with(after) {
        None
    } else {
        let first = end + rest[end..].find(CALL_END)?;
        Some((first, first + CALL_END.len()))
    }
}

/// The rules of a call: what is before its object, the key of its arguments, and what is after it. Without a schema, its arguments are any object.
///
/// # Errors
/// Parameters that are no schema.
pub fn rules(of: &Allowed<'_>, before: &str, key: &str, after: &str) -> Result<String, GrammarError> {
    let Allowed { at, name, schema } = of;
    let schema = grammar::arguments(schema.unwrap_or(ANY))?;
    let head = quoted(&format!("{before}{{\"name\": \"{name}\", \"{key}\": "));
    let tail = quoted(&format!("}}{after}"));
    Ok(format!("call{at}: {head} arguments{at} {tail}\narguments{at}: %json {schema}\n"))
}
