//! Owns texts of channels, as gpt-oss writes them (the format *harmony*): what it thinks, its answer, its calls, and their grammar.
//!
//! ```text
//! <|channel|>analysis<|message|>THOUGHTS<|end|><|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
//! ```
//!
//! A text is a list of messages. The prompt has `<|start|>assistant` of the first one. The recipient of a call may also be before `<|channel|>`.

use serde_json::value::RawValue;

use super::{ANY, Allowed, Ended, Function, object, quoted};
use crate::grammar::{self, GrammarError};
use crate::tokenizer::Channels;

const MESSAGE: &str = "<|message|>";
const CHANNEL: &str = "<|channel|>";
const START: &str = "<|start|>";
/// Tags that end a message. The last two begin another header: a model may leave the end tag out.
const ENDS: [&str; 5] = ["<|end|>", "<|call|>", "<|return|>", START, CHANNEL];
const TAG_BEGIN: &str = "<|";

/// Where a text of channels is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// Before [`MESSAGE`].
    Header,
    Thoughts,
    Answer,
    /// A call of this function. Its header has so many bytes and is still there, because what is no call is text.
    Call {
        header: usize,
        name: String,
    },
}

/// What a text begins with at a place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// More text has to tell.
    Wait,
    /// So many bytes are no part of any message; the text goes on there.
    Skip(usize, Place),
    /// So many bytes are thoughts or answer.
    Say(usize),
    /// So many bytes are a call with these arguments.
    Call { length: usize, name: String, arguments: String },
}

/// Reads the beginning of a text that is not empty.
pub fn step(text: &str, place: &Place, functions: &[Function], ended: Option<Ended>) -> Step {
    match place {
        Place::Header => header(text, functions, ended),
        Place::Thoughts | Place::Answer => message(text, ended),
        Place::Call { header, name } => call(text, *header, name, ended),
    }
}

fn header(text: &str, functions: &[Function], ended: Option<Ended>) -> Step {
    let Some(end) = text.find(MESSAGE) else {
        let begun = text.trim_start();
        let is_header =
            ["<|", "assistant", "to="].iter().any(|word| word.starts_with(begun) || begun.starts_with(word));
        return match ended {
            _ if !is_header => Step::Skip(0, Place::Answer),
            // A header alone says nothing.
            Some(_) if begun.starts_with(TAG_BEGIN) => Step::Skip(text.len(), Place::Answer),
            Some(_) => Step::Skip(0, Place::Answer),
            None => Step::Wait,
        };
    };
    let (words, length) = (&text[..end], end + MESSAGE.len());
    let word_after = |tag: &str| {
        let rest = words.rfind(tag).map_or("", |at| &words[at + tag.len()..]).trim_start();
        rest.split(|c: char| c.is_whitespace() || c == '<').next().unwrap_or_default()
    };
    let recipient = word_after("to=");
    let name = recipient.strip_prefix("functions.").unwrap_or(recipient);
    let is_offered = functions.iter().any(|function| function.name == name);
    match word_after(CHANNEL) {
        _ if is_offered => Step::Skip(0, Place::Call { header: length, name: name.to_string() }),
        "analysis" => Step::Skip(length, Place::Thoughts),
        // A call of something else is a part of the text.
        _ if !recipient.is_empty() && recipient != "assistant" => {
            Step::Skip(0, Place::Call { header: length, name: String::new() })
        }
        _ => Step::Skip(length, Place::Answer),
    }
}

/// Where the first tag that ends a message begins.
fn first_end(text: &str) -> Option<(usize, &'static str)> {
    ENDS.iter().filter_map(|tag| text.find(tag).map(|at| (at, *tag))).min()
}

/// Bytes of a tag that belong to the message that it ends.
fn taken(tag: &str) -> usize {
    if tag == START || tag == CHANNEL { 0 } else { tag.len() }
}

fn message(text: &str, ended: Option<Ended>) -> Step {
    match first_end(text) {
        Some((0, tag)) => Step::Skip(taken(tag), Place::Header),
        Some((at, _)) => Step::Say(at),
        None if ended.is_some() => Step::Say(text.len()),
        None => {
            let held =
                ENDS.iter().flat_map(|tag| (1..tag.len()).filter(|&length| text.ends_with(&tag[..length]))).max();
            match text.len() - held.unwrap_or(0) {
                0 => Step::Wait,
                length => Step::Say(length),
            }
        }
    }
}

fn call(text: &str, header: usize, name: &str, ended: Option<Ended>) -> Step {
    let body = &text[header..];
    let other = || match first_end(body) {
        Some((at, _)) => Step::Say(header + at),
        None if ended.is_some() => Step::Say(text.len()),
        None => Step::Wait,
    };
    let mut values = serde_json::Deserializer::from_str(body).into_iter::<&RawValue>();
    let (arguments, end) = match values.next() {
        Some(Ok(value)) => (object::arguments(value.get()), values.byte_offset()),
        None => (Some("{}".to_string()), body.len()),
        // A tag in a text that the limit cuts ends no message.
        Some(Err(error)) if error.is_eof() => return ended.map_or(Step::Wait, |_| Step::Say(text.len())),
        // No arguments at all.
        Some(Err(_)) if body.trim_start().starts_with(TAG_BEGIN) => (Some("{}".to_string()), 0),
        Some(Err(_)) => (None, 0),
    };
    let after = body[end..].trim_start();
    let tag = ENDS.iter().find(|tag| after.starts_with(**tag));
    match (arguments, tag) {
        // A function that is not offered.
        (Some(_), Some(_)) if name.is_empty() => Step::Say(text.len() - after.len()),
        (Some(_), None) if name.is_empty() && after.is_empty() && ended.is_some() => Step::Say(text.len()),
        (Some(arguments), Some(tag)) => {
            let length = text.len() - after.len() + taken(tag);
            Step::Call { length, name: name.to_string(), arguments }
        }
        (Some(arguments), None) if after.is_empty() && ended.is_some() => {
            Step::Call { length: text.len(), name: name.to_string(), arguments }
        }
        (Some(_), None) if ended.is_none() && ENDS.iter().any(|tag| tag.starts_with(after)) => Step::Wait,
        _ => other(),
    }
}

/// The contents of a message.
const TEXT: &str = "TEXT: /(.|\\n)*/ & ~/(.|\\n)*<\\|(start|end|message|channel|call|return)\\|>(.|\\n)*/\n";

/// The rule `start` of a text whose `last` message is another rule, after any number of messages on other channels.
fn after_others(channels: Channels, others: &str) -> String {
    let Channels { start, channel, message, end, .. } = channels;
    format!("start: (<[{channel}]> {others} <[{message}]> TEXT <[{end}]> <[{start}]> \"assistant\")* last\n{TEXT}")
}

/// The beginning of the grammar of a text with a call. A `free` text may also have none.
pub fn start(channels: Channels, free: bool) -> String {
    let Channels { channel, message, .. } = channels;
    if !free {
        return "start: call\n".to_string();
    }
    let start = after_others(channels, "(\"analysis\" | \"commentary\")");
    format!("{start}last: <[{channel}]> (\"analysis\" | \"commentary\" | \"final\") <[{message}]> TEXT | call\n")
}

/// The grammar of a text whose answer is JSON of a schema. The model may think before it.
///
/// # Errors
/// A text that is no schema.
pub fn answer(channels: Channels, schema: &str) -> Result<String, GrammarError> {
    let Channels { channel, message, constrain, .. } = channels;
    let (start, schema) = (after_others(channels, "\"analysis\""), grammar::schema(schema)?);
    Ok(format!(
        "{start}last: <[{channel}]> \"final\" (\" \" <[{constrain}]> \"json\")? <[{message}]> answer\nanswer: %json {schema}\n"
    ))
}

/// The rules of a call. In a `free` text, its recipient may also be before its channel.
///
/// # Errors
/// Parameters that are no schema.
pub fn rules(channels: Channels, of: &Allowed<'_>, free: bool) -> Result<String, GrammarError> {
    let Channels { channel, message, constrain, .. } = channels;
    let Allowed { at, name, schema } = of;
    let arguments = grammar::arguments(schema.unwrap_or(ANY))?;
    let to = quoted(&format!("commentary to=functions.{name} "));
    let other = match free {
        true => {
            let to = quoted(&format!(" to=functions.{name}"));
            format!(" | {to} <[{channel}]> \"commentary \" (<[{constrain}]>)? \"json\" <[{message}]> arguments{at}")
        }
        false => String::new(),
    };
    Ok(format!(
        "call{at}: <[{channel}]> {to} <[{constrain}]> \"json\" <[{message}]> arguments{at}{other}\narguments{at}: %json {arguments}\n"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The parts of a text: kind and content.
    fn parts(text: &str, ended: Ended) -> Vec<(String, String)> {
        let functions = [Function::new("look".to_string(), None)];
        let (mut rest, mut place, mut parts) = (text, Place::Header, vec![]);
        while !rest.is_empty() {
            match step(rest, &place, &functions, Some(ended)) {
                Step::Wait => panic!("{rest}"),
                Step::Skip(length, next) => (rest, place) = (&rest[length..], next),
                Step::Say(length) => {
                    let kind = if place == Place::Thoughts { "thoughts" } else { "answer" };
                    parts.push((kind.to_string(), rest[..length].to_string()));
                    if matches!(place, Place::Call { .. }) {
                        place = Place::Answer;
                    }
                    rest = &rest[length..];
                }
                Step::Call { length, name, arguments } => {
                    parts.push((name, arguments));
                    (rest, place) = (&rest[length..], Place::Header);
                }
            }
        }
        parts
    }

    #[test]
    fn messages_are_read_by_their_channels() {
        let thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant";
        let hm = ("thoughts", "Hm.");
        let call = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>{\"a\": \"<|call|>\"}";
        let look = ("look", "{\"a\": \"<|call|>\"}");
        for (text, expected) in [
            (format!("{thought}<|channel|>final<|message|>Yes <b>.<|return|>"), vec![hm, ("answer", "Yes <b>.")]),
            (format!("{thought}{call}<|call|>"), vec![hm, look]),
            (format!("{thought}{call}"), vec![hm, look]),
            // Other forms, which models and templates also write.
            (call.replace("<|constrain|>", ""), vec![look]),
            (call.replace("functions.", ""), vec![look]),
            (" to=functions.look<|channel|>commentary json<|message|>{} <|call|>".to_string(), vec![("look", "{}")]),
            ("<|channel|>commentary to=functions.look<|message|><|call|>".to_string(), vec![("look", "{}")]),
            ("<|channel|>analysis to=functions.look code<|message|>{}<|call|>".to_string(), vec![("look", "{}")]),
            (
                "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant".to_string() + call,
                vec![("answer", "I look."), look],
            ),
            // End tags are missing.
            (
                "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Yes".to_string(),
                vec![hm, ("answer", "Yes")],
            ),
            (
                "<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>final<|message|>Yes".to_string(),
                vec![hm, ("answer", "Yes")],
            ),
            // No call: another function, no JSON, a list, half an object.
            (call.replace("look", "find"), vec![("answer", &*call.replace("look", "find").leak())]),
            (
                "<|channel|>commentary to=functions.look json<|message|>{a}<|call|>".to_string(),
                vec![("answer", "<|channel|>commentary to=functions.look json<|message|>{a}")],
            ),
            (call[..call.len() - 1].to_string(), vec![("answer", &call[..call.len() - 1])]),
            // A header alone, and a text without one.
            ("<|channel|>fin".to_string(), vec![]),
            ("Plain.".to_string(), vec![("answer", "Plain.")]),
        ] {
            let found = parts(&text, Ended::Complete);
            let found: Vec<(&str, &str)> = found.iter().map(|(kind, text)| (&**kind, &**text)).collect();
            assert_eq!(found, expected, "{text}");
        }
    }
}
