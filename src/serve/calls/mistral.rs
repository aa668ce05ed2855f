//! Owns calls after the token `[TOOL_CALLS]`, as Mistral's models write them: a list of objects, or since version 11 of their tokenizers the name of a
//! function and its arguments.
//!
//! ```text
//! [TOOL_CALLS] [{"name": "NAME", "arguments": {…}}, …]
//! [TOOL_CALLS]NAME[ARGS]{…}[TOOL_CALLS]NAME[ARGS]{…}
//! ```

use std::collections::BTreeMap;

use serde_json::value::RawValue;

use super::{ANY, Allowed, Ended, Function, Step, object, quoted};
use crate::grammar::{self, GrammarError};

pub const CALLS: &str = "[TOOL_CALLS]";
const ARGUMENTS: &str = "[ARGS]";
/// The id of a call, which some versions write between its name and its arguments.
const ID: &str = "[CALL_ID]";
/// Most bytes before arguments: a name, an id and tags.
const HEAD_BYTES_MAX: usize = 256;

/// Reads a text that begins with [`CALLS`].
pub fn step(text: &str, functions: &[Function], ended: Option<Ended>) -> Step {
    let wait = || if ended.is_some() { Step::Text(text.len()) } else { Step::Wait };
    let inner = text[CALLS.len()..].trim_start();
    let at = text.len() - inner.len();
    let is_list = inner.starts_with(['[', '{']) && ![ARGUMENTS, ID].iter().any(|tag| inner.starts_with(tag));
    if inner.is_empty() {
        return wait();
    }
    let (name, begin) = if is_list {
        (None, at)
    } else {
        let Some(end) = inner.find('{') else {
            return if inner.len() > HEAD_BYTES_MAX { Step::Text(CALLS.len()) } else { wait() };
        };
        let head = inner[..end].trim_end();
        let head = head.strip_suffix(ARGUMENTS).unwrap_or(head);
        (Some(head.split(ID).next().unwrap_or_default().trim()), at + end)
    };
    let mut values = serde_json::Deserializer::from_str(&text[begin..]).into_iter::<&RawValue>();
    let value = match values.next() {
        Some(Ok(value)) => value.get(),
        Some(Err(error)) if error.is_eof() => return wait(),
        _ => return Step::Text(CALLS.len()),
    };
    let length = begin + values.byte_offset();
    let offered = |name: &str| functions.iter().any(|function| function.name == name);
    let calls = match name {
        Some(name) => Some((name.to_string(), value.to_string())).filter(|_| offered(name)).map(|call| vec![call]),
        None => listed(value).filter(|calls| !calls.is_empty() && calls.iter().all(|(name, _)| offered(name))),
    };
    calls.map_or(Step::Text(length), |calls| Step::Calls { length, calls })
}

/// The calls of a list, or of one object.
fn listed(value: &str) -> Option<Vec<(String, String)>> {
    let list: Vec<&RawValue> = match value.starts_with('[') {
        true => serde_json::from_str(value).ok()?,
        false => vec![serde_json::from_str(value).ok()?],
    };
    let call = |raw: &&RawValue| {
        let written: BTreeMap<String, &RawValue> = serde_json::from_str(raw.get()).ok()?;
        let arguments = object::arguments(written.get("arguments").map_or("null", |raw| raw.get()))?;
        Some((serde_json::from_str(written.get("name")?.get()).ok()?, arguments))
    };
    list.iter().map(call).collect()
}

/// The beginning of the grammar of a text with a call, or with several if `many`. `calls` and `arguments` are ids of tokens; without `arguments`,
/// the calls are a list. A `free` text may also have none.
pub fn start(calls: u32, arguments: Option<u32>, free: bool, many: bool) -> String {
    let several = match (arguments, many) {
        (None, true) => format!("<[{calls}]> /[ ]?/ \"[\" call (\", \" call)* \"]\""),
        (None, false) => format!("<[{calls}]> /[ ]?/ \"[\" call \"]\""),
        (Some(_), true) => format!("(<[{calls}]> call)+"),
        (Some(_), false) => format!("<[{calls}]> call"),
    };
    match free {
        false => format!("start: {several}\n"),
        true => {
            format!("start: TEXT ({several})?\nTEXT: /(.|\\n)*/ & ~/(.|\\n)*\\[TOOL_CALLS\\](.|\\n)*/\n")
        }
    }
}

/// The rules of a call.
///
/// # Errors
/// Parameters that are no schema.
pub fn rules(arguments: Option<u32>, of: &Allowed<'_>) -> Result<String, GrammarError> {
    let Allowed { at, name, schema } = of;
    let schema = grammar::arguments(schema.unwrap_or(ANY))?;
    let call = match arguments {
        Some(token) => format!("{} <[{token}]> arguments{at}", quoted(name)),
        None => format!("{} arguments{at} \"}}\"", quoted(&format!("{{\"name\": \"{name}\", \"arguments\": "))),
    };
    Ok(format!("call{at}: {call}\narguments{at}: %json {schema}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_of_calls_are_read() {
        let functions = ["look", "wait"].map(|name| Function::new(name.to_string(), None));
        let one = |name: &str, arguments: &str| (name.to_string(), arguments.to_string());
        for (text, calls, rest) in [
            (
                "[TOOL_CALLS] [{\"name\": \"look\", \"arguments\": {\"a\": \"[TOOL_CALLS]\"}}]",
                vec![one("look", "{\"a\": \"[TOOL_CALLS]\"}")],
                "",
            ),
            (
                "[TOOL_CALLS][{\"name\": \"look\", \"arguments\": {}, \"id\": \"123456789\"}, {\"arguments\": \"{\\\"a\\\": 1}\", \"name\": \"wait\"}]\n\nmore",
                vec![one("look", "{}"), one("wait", "{\"a\": 1}")],
                "\n\nmore",
            ),
            ("[TOOL_CALLS]{\"name\": \"look\"}", vec![one("look", "{}")], ""),
            (
                "[TOOL_CALLS]look[ARGS]{\"a\": {\"b\": \"}\"}}[TOOL_CALLS]wait[ARGS]{}",
                vec![one("look", "{\"a\": {\"b\": \"}\"}}")],
                "[TOOL_CALLS]wait[ARGS]{}",
            ),
            ("[TOOL_CALLS]look[CALL_ID]a1b2c3d4e[ARGS]{}", vec![one("look", "{}")], ""),
            ("[TOOL_CALLS] look {}", vec![one("look", "{}")], ""),
        ] {
            let length = text.len() - rest.len();
            for ended in [None, Some(Ended::Complete)] {
                assert_eq!(step(text, &functions, ended), Step::Calls { length, calls: calls.clone() }, "{text}");
            }
            for end in CALLS.len()..length {
                assert_eq!(step(&text[..end], &functions, None), Step::Wait, "{}", &text[..end]);
                assert_eq!(step(&text[..end], &functions, Some(Ended::Cut)), Step::Text(end), "{}", &text[..end]);
            }
        }
        for (text, length) in [
            ("[TOOL_CALLS][{\"name\": \"find\", \"arguments\": {}}] x", 47),
            ("[TOOL_CALLS]find[ARGS]{} x", 24),
            ("[TOOL_CALLS][a]", CALLS.len()),
            ("[TOOL_CALLS]look[ARGS]{a}", CALLS.len()),
        ] {
            assert_eq!(step(text, &functions, None), Step::Text(length), "{text}");
        }
    }
}
