//! Owns the reading of a text: what the model thinks in it, the calls of tools, and the rest; and the grammar of JSON after thoughts.

use std::sync::Arc;

use super::calls::{self, Call, Ended, Function, Step, harmony};
use crate::grammar::{self, GrammarError};
use crate::tokenizer::CallForm;

const THINK_BEGIN: &str = "<think>";
const THINK_END: &str = "</think>";

/// A part of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    Text(String),
    /// What the model thinks, without its tags.
    Reasoning(String),
    Call(Call),
}

/// What is looked for in a text.
#[derive(Debug, Clone)]
pub struct Sought {
    /// What the model thinks is split off, as vLLM does; else a block of it is text.
    pub reasoning: bool,
    /// The prompt has begun to think.
    pub thinks: bool,
    /// The text has channels.
    pub channels: bool,
    pub calls: Option<SoughtCalls>,
}

/// The calls that count in a text.
#[derive(Debug, Clone)]
pub struct SoughtCalls {
    pub form: CallForm,
    /// Those that are offered.
    pub functions: Arc<Vec<Function>>,
    /// `tool_choice` names the function.
    pub named: bool,
    /// A text has one call at most, and ends with it.
    pub single: bool,
}

/// The grammar of a text whose answer is JSON of a schema, after what the model thinks. It may leave that out, unless its prompt has `begun` it.
///
/// # Errors
/// A text that is no schema.
pub fn answer(begun: bool, schema: &str) -> Result<String, GrammarError> {
    let schema = grammar::schema(schema)?;
    let thoughts = if begun { "thoughts".to_string() } else { format!("(\"{THINK_BEGIN}\" thoughts)?") };
    Ok(format!(
        "start: {thoughts} answer\nthoughts[lazy]: TEXT \"{THINK_END}\"\nTEXT: /(.|\\n)*/\n\
         answer: (\"\\n\\n\" | \"\\n\")? json\njson: %json {schema}\n"
    ))
}

/// Where a text is read.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    /// It may begin with a block of thoughts.
    Begin,
    /// It begins inside of a block of thoughts. Some models repeat the tag that the prompt has already.
    Begun,
    Thoughts,
    Rest,
    /// No call may follow.
    Plain,
    Channels(harmony::Place),
}

/// A text of channels as other models write theirs: thoughts between tags, then the answer.
#[derive(Debug)]
pub struct OfChannels {
    reader: Reader,
    is_thought: bool,
    pub thoughts: String,
    pub answer: String,
}

impl OfChannels {
    pub fn begin() -> OfChannels {
        let reader = Reader::new(Sought { reasoning: true, thinks: false, channels: true, calls: None });
        OfChannels { reader, is_thought: false, thoughts: String::new(), answer: String::new() }
    }

    /// Takes the next part, with its special tokens. Returns what is certain now.
    pub fn push(&mut self, text: &str) -> String {
        let pieces = self.reader.push(text);
        self.shown(pieces)
    }

    /// Returns the rest.
    pub fn finish(&mut self) -> String {
        let pieces = self.reader.finish("stop");
        self.shown(pieces)
    }

    fn shown(&mut self, pieces: Vec<Piece>) -> String {
        let mut shown = String::new();
        for piece in pieces {
            let (text, is_thought) = match piece {
                Piece::Reasoning(text) => (text, true),
                Piece::Text(text) => (text, false),
                Piece::Call(_) => continue,
            };
            if is_thought != std::mem::replace(&mut self.is_thought, is_thought) {
                shown += &if is_thought { format!("{THINK_BEGIN}\n") } else { format!("\n{THINK_END}\n\n") };
            }
            shown += &text;
            if is_thought { &mut self.thoughts } else { &mut self.answer }.push_str(&text);
        }
        shown
    }
}

/// Reads one text, which arrives in parts.
#[derive(Debug, Clone)]
pub struct Reader {
    sought: Sought,
    place: Place,
    /// Text that may be the beginning of a tag or of a call, or a call without an end yet.
    pending: String,
    calls: u32,
    ended: Option<Ended>,
}

impl Reader {
    pub fn new(sought: Sought) -> Reader {
        let place = match sought.thinks {
            _ if sought.channels => Place::Channels(harmony::Place::Header),
            true => Place::Begun,
            false => Place::Begin,
        };
        Reader { sought, place, pending: String::new(), calls: 0, ended: None }
    }

    /// Takes the next part of the text. Returns the pieces that are certain now.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        if self.is_over() {
            return vec![];
        }
        self.pending.push_str(text);
        let mut pieces = vec![];
        while self.next(&mut pieces) {}
        pieces
    }

    /// Returns the rest at the end of a text that ended for `reason`.
    pub fn finish(&mut self, reason: &str) -> Vec<Piece> {
        if self.is_over() {
            return vec![];
        }
        self.ended = Some(if reason == "stop" { Ended::Complete } else { Ended::Cut });
        let mut pieces = vec![];
        while self.next(&mut pieces) {}
        let rest = std::mem::take(&mut self.pending);
        if matches!(self.place, Place::Begun | Place::Thoughts) {
            if !rest.is_empty() {
                pieces.push(self.thought(rest));
            }
        } else if !rest.is_empty() && !self.is_over() && (self.calls == 0 || !rest.trim().is_empty()) {
            // White space between calls is left out.
            pieces.push(Piece::Text(rest));
        }
        pieces
    }

    /// Whether it looks for special tokens.
    pub fn needs_marks(&self) -> bool {
        self.sought.channels || self.sought.calls.is_some()
    }

    /// Whether a text may have one call alone.
    pub fn is_single(&self) -> bool {
        self.sought.calls.as_ref().is_some_and(|calls| calls.single)
    }

    /// Whether the one call that the text may have is complete: what follows does not count.
    pub fn is_over(&self) -> bool {
        self.calls > 0 && self.is_single()
    }

    /// The `finish_reason` of a text that ended for `reason`.
    pub fn reason(&self, reason: &'static str) -> &'static str {
        let named = self.sought.calls.as_ref().is_some_and(|calls| calls.named);
        // As in the API: a call of the function that `tool_choice` names ends with `stop`.
        if reason == "stop" && self.calls > 0 && !named { "tool_calls" } else { reason }
    }

    fn thought(&self, text: String) -> Piece {
        if self.sought.reasoning { Piece::Reasoning(text) } else { Piece::Text(text) }
    }

    /// Takes the next piece off the beginning. Returns false if that needs more text.
    fn next(&mut self, pieces: &mut Vec<Piece>) -> bool {
        match self.place {
            Place::Begin => self.begin(pieces, Place::Rest),
            Place::Begun => self.begin(pieces, Place::Thoughts),
            Place::Thoughts => self.thoughts(pieces),
            Place::Channels(_) => self.channel(pieces),
            Place::Rest if self.sought.calls.is_some() => self.called(pieces),
            Place::Rest | Place::Plain => {
                self.say(pieces, self.pending.len());
                false
            }
        }
    }

    /// Takes `length` bytes as text.
    fn say(&mut self, pieces: &mut Vec<Piece>, length: usize) {
        let said: String = self.pending.drain(..length).collect();
        if !said.is_empty() {
            pieces.push(Piece::Text(said));
        }
    }

    /// Takes the tag of a block of thoughts; without one, the text goes on at `place`.
    fn begin(&mut self, pieces: &mut Vec<Piece>, place: Place) -> bool {
        let begun = self.pending.trim_start();
        if THINK_BEGIN.starts_with(begun) && begun.len() < THINK_BEGIN.len() {
            return false;
        }
        if !begun.starts_with(THINK_BEGIN) {
            self.place = place;
            return true;
        }
        let length = self.pending.len() - begun.len() + THINK_BEGIN.len();
        if self.sought.reasoning {
            self.pending.drain(..length);
        } else {
            self.say(pieces, length);
        }
        self.place = Place::Thoughts;
        true
    }

    fn thoughts(&mut self, pieces: &mut Vec<Piece>) -> bool {
        let end = self.pending.find(THINK_END);
        let length = end.unwrap_or_else(|| self.pending.len() - held(&self.pending, THINK_END));
        let said: String = self.pending.drain(..length).collect();
        if !said.is_empty() {
            pieces.push(self.thought(said));
        }
        if end.is_none() {
            return false;
        }
        if self.sought.reasoning {
            self.pending.drain(..THINK_END.len());
        } else {
            self.say(pieces, THINK_END.len());
        }
        self.place = Place::Rest;
        true
    }

    /// Takes a part of a message on a channel.
    fn channel(&mut self, pieces: &mut Vec<Piece>) -> bool {
        let Place::Channels(place) = &self.place else { return false };
        let functions = self.sought.calls.as_ref().map_or(&[][..], |calls| &calls.functions);
        if self.pending.is_empty() {
            return false;
        }
        match harmony::step(&self.pending, place, functions, self.ended) {
            harmony::Step::Wait => return false,
            harmony::Step::Skip(length, next) => {
                self.pending.drain(..length);
                self.place = Place::Channels(next);
            }
            harmony::Step::Say(length) => {
                let said: String = self.pending.drain(..length).collect();
                match place {
                    harmony::Place::Thoughts => pieces.push(self.thought(said)),
                    _ => {
                        pieces.push(Piece::Text(said));
                        self.place = Place::Channels(harmony::Place::Answer);
                    }
                }
            }
            harmony::Step::Call { length, name, arguments } => {
                self.pending.drain(..length);
                self.calls += 1;
                let form = self.sought.calls.as_ref().map(|calls| calls.form);
                pieces.extend(form.map(|form| Piece::Call(Call::new(form, name, arguments))));
                self.place = Place::Channels(harmony::Place::Header);
                return !self.is_over();
            }
        }
        true
    }

    /// Takes text up to a call, or a call.
    fn called(&mut self, pieces: &mut Vec<Piece>) -> bool {
        let Some(SoughtCalls { form, functions, single, .. }) = &self.sought.calls else { return false };
        let tags = calls::tags(*form);
        // White space before a call is left out, but not before a tag that begins none.
        let begun = self.pending.trim_start();
        let white = self.pending.len() - begun.len();
        if tags.is_empty() || tags.iter().any(|tag| begun.starts_with(tag)) {
            match calls::step(*form, begun, functions, self.ended) {
                Step::Wait => return false,
                Step::Text(length) => {
                    self.say(pieces, white + length);
                    if tags.is_empty() {
                        self.place = Place::Plain;
                    }
                }
                Step::Calls { length, calls } => {
                    let count = if *single { 1 } else { calls.len() };
                    self.pending.drain(..white + length);
                    self.calls += count as u32;
                    let calls = calls.into_iter().take(count);
                    pieces.extend(calls.map(|(name, arguments)| Piece::Call(Call::new(*form, name, arguments))));
                }
            }
            return !self.pending.is_empty() && !self.is_over();
        }
        let found = tags.iter().filter_map(|tag| self.pending.find(tag)).min();
        if found.is_none() && self.ended.is_some() {
            return false;
        }
        let held = || tags.iter().map(|tag| held(&self.pending, tag)).max().unwrap_or(0);
        let end = found.unwrap_or_else(|| self.pending.len() - held());
        self.say(pieces, self.pending[..end].trim_end().len());
        found.is_some()
    }
}

/// Bytes at the end of a text that may be the beginning of a tag.
fn held(text: &str, tag: &str) -> usize {
    (1..tag.len()).rev().find(|&length| text.ends_with(&tag[..length])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sought(form: CallForm) -> Sought {
        let functions = ["look", "wait"].map(|name| Function::new(name.to_string(), None)).to_vec();
        let calls = Some(SoughtCalls { form, functions: Arc::new(functions), named: false, single: false });
        Sought { reasoning: false, thinks: false, channels: false, calls }
    }

    /// The pieces of a text that arrives character by character; ids are left out.
    fn pieces(sought: Sought, text: &str) -> Vec<String> {
        let mut reader = Reader::new(sought);
        let mut pieces: Vec<Piece> = text.chars().flat_map(|c| reader.push(&c.to_string())).collect();
        pieces.extend(reader.finish("stop"));
        let mut all: Vec<String> = vec![];
        let mut before = None;
        for piece in &pieces {
            let (kind, text) = match piece {
                Piece::Text(text) => ("", text.clone()),
                Piece::Reasoning(text) => ("thinks: ", text.clone()),
                Piece::Call(call) => ("call", format!("{}({})", call.name, call.arguments)),
            };
            match all.last_mut().filter(|_| before == Some(kind) && kind != "call") {
                Some(last) => last.push_str(&text),
                None if kind == "call" => all.push(text),
                None => all.push(format!("{kind}{text}")),
            }
            before = Some(kind);
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
            (call.trim_end_matches("</tool_call>").to_string(), vec![found]),
            // An end tag in a string, also one that is escaped elsewhere.
            (call.replace("\"<tool_\"", "\"a\\\" </tool_call> b\""), vec!["look({\"at\": \"a\\\" </tool_call> b\"})"]),
            (
                format!("{}\n{call}", call.replace("\"<tool_\"", "\"</tool_call>\"")),
                vec!["look({\"at\": \"</tool_call>\"})", found],
            ),
            // Other keys beside those of a call.
            (call.replace("{\"name\"", "{\"type\": \"function\", \"id\": 1, \"name\""), vec![found]),
            (call.replace("}}", "}, \"x\": [\"</tool_call>\"]}"), vec![found]),
            // The last of equal keys counts, and `arguments` before `parameters`.
            (call.replace("{\"name\"", "{\"name\": \"wait\", \"name\""), vec![found]),
            (call.replace("}}", "}, \"parameters\": {}}"), vec![found]),
            // No arguments, and arguments as a text.
            (call.replace("{\"at\": \"<tool_\"}", "null"), vec!["look({})"]),
            (call.replace(", \"arguments\": {\"at\": \"<tool_\"}", ""), vec!["look({})"]),
            (call.replace("{\"at\": \"<tool_\"}", r#""{\"at\": \"b\"}""#), vec!["look({\"at\": \"b\"})"]),
            (call.replace("{\"at\": \"<tool_\"}", "\" \""), vec!["look({})"]),
            // A call as the API of OpenAI has it, and an unknown function in its place.
            (
                call.replace("{\"name\"", "{\"type\": \"function\", \"function\": {\"name\"").replace("}}", "}}}"),
                vec![found],
            ),
            (
                "<tool_call>{\"function\": {\"name\": \"x\"}}</tool_call>".to_string(),
                vec!["<tool_call>{\"function\": {\"name\": \"x\"}}</tool_call>"],
            ),
            (
                call.replace("{\"at\": \"<tool_\"}", "\"[1]\""),
                vec![&*call.replace("{\"at\": \"<tool_\"}", "\"[1]\"").leak()],
            ),
            // White space before a tag that begins no call is a part of the text.
            (
                "a  <tool_call>x</tool_call>\n<tool_call> y".to_string(),
                vec!["a  <tool_call>x</tool_call>\n<tool_call> y"],
            ),
            (format!("a \n{call}\n<tool_call>"), vec!["a", found, "\n<tool_call>"]),
            // Something between the object and its tag.
            (call.replace("}}\n", "}} or "), vec![&*call.replace("}}\n", "}} or ").leak()]),
            (call.replace("{\"at\": \"<tool_\"}", "[]"), vec![&*call.replace("{\"at\": \"<tool_\"}", "[]").leak()]),
        ] {
            assert_eq!(pieces(sought(CallForm::Hermes), &text), expected, "{text}");
        }
        for (text, expected) in [
            ("{\"name\": \"wait\", \"parameters\": {}}", vec!["wait({})"]),
            (" {\"name\": \"look\", \"parameters\": {\"at\": \"a\"}}", vec!["look({\"at\": \"a\"})"]),
            ("{\"type\": \"function\", \"name\": \"wait\", \"parameters\": {}}", vec!["wait({})"]),
            ("{\"name\": \"wait\"}", vec!["{\"name\": \"wait\"}"]),
            ("{\"name\": \"wait\", \"parameters\": null}", vec!["wait({})"]),
            ("Hello {\"name\"", vec!["Hello {\"name\""]),
            // A text before it.
            ("So: {\"name\": \"wait\", \"parameters\": {}}", vec!["So: {\"name\": \"wait\", \"parameters\": {}}"]),
        ] {
            assert_eq!(pieces(sought(CallForm::Llama3), text), expected, "{text}");
        }
    }

    #[test]
    fn a_text_that_may_have_one_call_ends_with_it() {
        let mut sought = sought(CallForm::Hermes);
        sought.calls.as_mut().unwrap().single = true;
        let call = "<tool_call>{\"name\": \"wait\", \"arguments\": {\"a\": \"</tool_call>\"}}</tool_call>";
        assert_eq!(
            pieces(sought, &format!("I wait.\n{call}\nmore {call}")),
            ["I wait.", "wait({\"a\": \"</tool_call>\"})"]
        );
    }

    #[test]
    fn a_draft_in_a_block_of_thoughts_is_no_call() {
        let draft = "perhaps <tool_call>{\"name\": \"wait\", \"arguments\": {}}</tool_call>";
        let text =
            format!("<think>{draft}</think>\n\n<tool_call>{{\"name\": \"look\", \"arguments\": {{}}}}</tool_call>");
        let block = format!("<think>{draft}</think>");
        assert_eq!(pieces(sought(CallForm::Hermes), &text), [&*block, "look({})"]);
        let split = Sought { reasoning: true, ..sought(CallForm::Hermes) };
        assert_eq!(pieces(split.clone(), &text), [&*format!("thinks: {draft}"), "look({})"]);
        let open = Sought { thinks: true, ..split };
        assert_eq!(pieces(open, text.strip_prefix("<think>").unwrap()), [&*format!("thinks: {draft}"), "look({})"]);
    }

    #[test]
    fn thoughts_are_split_from_the_answer() {
        let split = Sought { reasoning: true, thinks: false, channels: false, calls: None };
        for (text, expected) in [
            ("<think>\na < b\n</think>\n\nYes.", vec!["thinks: \na < b\n", "\n\nYes."]),
            (" <think>a", vec!["thinks: a"]),
            ("<think></think>Yes", vec!["Yes"]),
            ("Yes <think>no</think>", vec!["Yes <think>no</think>"]),
            ("<thin", vec!["<thin"]),
            ("  ", vec!["  "]),
        ] {
            assert_eq!(pieces(split.clone(), text), expected, "{text}");
        }
        let open = Sought { thinks: true, ..split };
        for (text, expected) in [
            ("a </thin", vec!["thinks: a </thin"]),
            // The prompt has the tag already.
            ("\n<think>\na</think>b", vec!["thinks: \na", "b"]),
            (" <thin", vec!["thinks:  <thin"]),
            (" a</think>b", vec!["thinks:  a", "b"]),
        ] {
            assert_eq!(pieces(open.clone(), text), expected, "{text}");
        }
    }
}
