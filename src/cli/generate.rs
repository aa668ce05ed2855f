//! Owns `generate`: from a prompt to token ids, and from decided tokens to text as they come.

use std::io::Read;
use std::ops::ControlFlow;
use std::time::Instant;

use serde_json::json;

use super::Outcome;
use super::arguments::Generate;
use super::session::{Session, Talk, pick_target, tokenizer};
use super::terminal::interrupt;
use crate::error::Fault;
use crate::files::read_text;
use crate::manifest::Manifest;
use crate::pipeline::{self, Tokens};
use crate::sample::SampleSettings;
use crate::tokenizer::{Message, check_ids};

/// Why no further token came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stop {
    Eos,
    /// One of `--stop` was generated.
    Text,
    /// As many as were asked for, or as the context has room for.
    Length,
    Interrupted,
    /// The reader of stdout is gone.
    Closed,
}

impl Stop {
    fn name(self) -> &'static str {
        match self {
            Stop::Eos => "eos",
            Stop::Text => "stop",
            Stop::Length => "length",
            Stop::Interrupted => "interrupted",
            Stop::Closed => "closed",
        }
    }

    /// As people are told.
    fn words(self) -> &'static str {
        match self {
            Stop::Eos => "the model ended the text",
            Stop::Text => "a `--stop` text came",
            Stop::Length => "as many tokens as asked for, or as the context holds",
            Stop::Interrupted => "interrupted",
            Stop::Closed => "nothing reads the output any more",
        }
    }
}

/// A prompt of more text than this is no prompt.
const PROMPT_BYTES_MAX: u64 = 64 << 20;

pub fn generate(session: &Session, asked: &Generate) -> Result<Outcome, Fault> {
    let Generate { temperature, top_k, top_p, seed, .. } = *asked;
    let sampling = SampleSettings { temperature, top_k, top_p, seed: seed.unwrap_or(0) };
    sampling.resolve()?;
    refuse_unspecified(asked)?;
    if !asked.json {
        warn_of_no_effect(session, asked);
    }
    let prompt_text = prompt_text(asked)?;
    let manifest = session.manifest(&asked.manifest)?;
    let target = pick_target(&manifest, asked.target.as_deref())?;
    let workspace = session.workspace(if asked.json { Talk::Nothing } else { Talk::Work })?;
    // Before the model is built: what is wrong with a tokenizer is known at once.
    let mut tokenizer = match &asked.ids {
        Some(_) => None,
        None => Some(tokenizer(&manifest)?),
    };
    let prepared = pipeline::prepare(&workspace, &manifest, &target)?;
    let graph = &prepared.imported.graph;
    let prompt = prompt_ids(tokenizer.as_mut(), asked, prompt_text.as_deref().unwrap_or_default(), graph.vocab)?;
    let room = room_after(prompt.len(), &manifest)?;
    if room < asked.max_tokens && !asked.json {
        let (max, context_max) = (asked.max_tokens, manifest.decode.context_max);
        workspace.report.note(&format!("at most {room} of {max} tokens: `context_max` is {context_max}"));
    }
    let mut runner = prepared.runner(&workspace)?;
    let eos: &[u32] = if asked.ignore_eos { &[] } else { &graph.eos };

    let has_text = tokenizer.is_some();
    let mut printer = Printer::new(session, asked, tokenizer)?;
    // A reader of a pipe wants the continuation; a person wants to see what is continued.
    let echoes = asked.echo || (session.terminal.stdout_is_terminal() && asked.chat.is_none());
    if let Some(text) = prompt_text.filter(|_| echoes && !asked.json) {
        session.terminal.print(&text)?;
    }
    let deferred = interrupt::defer();
    let begun = Instant::now();
    let (mut first, mut last) = (None, begun);
    let (mut stop, mut failed) = (Stop::Length, None);
    let ids = runner.generate(&prompt, asked.max_tokens.min(room), eos, &sampling, &mut |id| {
        last = Instant::now();
        first.get_or_insert(last);
        match printer.token(id) {
            Err(fault) => failed = Some(fault),
            Ok(true) => stop = Stop::Text,
            Ok(false) if interrupt::asked() => stop = Stop::Interrupted,
            Ok(false) if session.terminal.is_closed() => stop = Stop::Closed,
            Ok(false) => {
                stop = if eos.contains(&id) { Stop::Eos } else { Stop::Length };
                return ControlFlow::Continue(());
            }
        }
        ControlFlow::Break(())
    })?;
    drop(deferred);
    if let Some(fault) = failed {
        return Err(fault);
    }
    let text = printer.finish(stop == Stop::Text)?;
    let first = first.unwrap_or(last);
    let (prompt_s, decode_s) = ((first - begun).as_secs_f64(), (last - first).as_secs_f64());
    let text = has_text.then_some(text);
    let generated = Generated { prompt: &prompt, ids: &ids, text, stop, prompt_s, decode_s, place: runner.place() };
    generated.tell(session, asked.json)?;
    Ok(if stop == Stop::Interrupted { Outcome::Interrupted } else { Outcome::Done })
}

/// The ids that are continued, each one of the model.
fn prompt_ids(tokenizer: Option<&mut Tokens>, asked: &Generate, text: &str, vocab: u32) -> Result<Vec<u32>, Fault> {
    let prompt = match tokenizer {
        Some(tokenizer) => {
            tokenizer.check_vocab(vocab)?;
            encode(tokenizer, asked, text)?
        }
        None => asked.ids.iter().flat_map(|ids| ids.0.iter().copied()).collect(),
    };
    check_ids(&prompt, vocab)?;
    Ok(prompt)
}

/// What there is to tell at the end.
struct Generated<'a> {
    prompt: &'a [u32],
    ids: &'a [u32],
    /// `None` where ids went in, and there is no tokenizer.
    text: Option<String>,
    stop: Stop,
    prompt_s: f64,
    decode_s: f64,
    place: String,
}

impl Generated<'_> {
    fn tell(&self, session: &Session, as_json: bool) -> Result<(), Fault> {
        let Generated { prompt, ids, text, stop, prompt_s, decode_s, place } = self;
        // The first token is decided by the prompt's last step; the time between it and the last is that of the others.
        let tokens_per_s = (ids.len() > 1 && *decode_s > 0.0).then(|| (ids.len() - 1) as f64 / decode_s);
        if as_json {
            return session.terminal.print_json(&json!({
                "prompt_ids": prompt,
                "ids": ids,
                "text": text,
                "stop": stop.name(),
                "prompt_s": prompt_s,
                "decode_s": decode_s,
                "tokens_per_s": tokens_per_s,
                "place": place,
            }));
        }
        let rate = tokens_per_s.map(|rate| format!(" at {rate:.0} tokens/s")).unwrap_or_default();
        session.terminal.say(&format!(
            "prompt of {} in {:.0} ms, then {}{rate} ({place}); stopped: {}",
            tokens(prompt.len()),
            prompt_s * 1e3,
            tokens(ids.len()),
            stop.words()
        ));
        Ok(())
    }
}

fn tokens(count: usize) -> String {
    super::units::counted(count as u64, "token")
}

/// What the user gives as text: an argument, a file, or stdin; `None` for ids.
fn prompt_text(asked: &Generate) -> Result<Option<String>, Fault> {
    let stdin = || -> Result<String, Fault> {
        let mut bytes = vec![];
        std::io::stdin()
            .lock()
            .take(PROMPT_BYTES_MAX)
            .read_to_end(&mut bytes)
            .map_err(|error| Fault::environment(format!("cannot read the prompt from stdin: {error}")))?;
        String::from_utf8(bytes).map_err(|_| Fault::input("the prompt on stdin is not UTF-8 text"))
    };
    Ok(match (asked.prompt.as_deref().or(asked.chat.as_deref()), &asked.prompt_file) {
        (Some("-"), _) => Some(stdin()?),
        (Some(text), _) => Some(text.to_string()),
        (None, Some(file)) => Some(read_text(file, PROMPT_BYTES_MAX)?),
        (None, None) => None,
    })
}

/// Options of other programs that have no specification here to the bit: with them, a device and the interpreter could choose
/// different tokens.
fn refuse_unspecified(asked: &Generate) -> Result<(), Fault> {
    let Generate { min_p, repetition_penalty, presence_penalty, frequency_penalty, .. } = asked;
    let given = [
        ("--min-p", min_p),
        ("--repetition-penalty", repetition_penalty),
        ("--presence-penalty", presence_penalty),
        ("--frequency-penalty", frequency_penalty),
    ];
    match given.iter().find(|(_, value)| value.is_some()) {
        None => Ok(()),
        Some((name, _)) => Err(Fault::input(format!("`{name}` is not supported: kernels do not have it"))
            .with_remedy("use `--temperature`, `--top-k` and `--top-p`")),
    }
}

fn warn_of_no_effect(session: &Session, asked: &Generate) {
    if asked.temperature != 0.0 {
        return;
    }
    let given =
        [("--top-k", asked.top_k.is_some()), ("--top-p", asked.top_p.is_some()), ("--seed", asked.seed.is_some())];
    let names: Vec<String> = given.iter().filter(|(_, given)| *given).map(|(name, _)| format!("`{name}`")).collect();
    if !names.is_empty() {
        session.terminal.say(&format!(
            "warning: {} has no effect at temperature 0, which takes the most probable token",
            names.join(", ")
        ));
    }
}

fn encode(tokenizer: &mut Tokens, asked: &Generate, text: &str) -> Result<Vec<u32>, Fault> {
    if asked.chat.is_none() || asked.raw {
        return tokenizer.encode(text, !asked.raw);
    }
    let system = asked.system.iter().map(|system| Message::new("system", system));
    let messages: Vec<Message> = system.chain([Message::new("user", text)]).collect();
    tokenizer.encode_chat(messages, true)
}

/// Tokens that can be decided after a prompt: the last of them needs no place in the cache.
fn room_after(prompt_count: usize, manifest: &Manifest) -> Result<usize, Fault> {
    let context_max = manifest.decode.context_max as usize;
    if prompt_count == 0 {
        return Err(Fault::input("the prompt has no tokens, and nothing to continue")
            .with_remedy("give it some text, or at least one id"));
    }
    if prompt_count > context_max {
        return Err(Fault::input(format!(
            "expected a prompt of at most {context_max} tokens (`context_max` of manifest `{}`), found {prompt_count}",
            manifest.name
        ))
        .with_remedy("shorten the prompt, or raise `context_max` in the manifest"));
    }
    Ok(context_max - prompt_count + 1)
}

/// Prints tokens as they are decided: text as soon as it is certain, or ids with commas between them.
struct Printer<'a> {
    session: &'a Session,
    /// `None`: ids.
    stream: Option<Tokens>,
    /// Whether the text is kept instead of printed.
    hold: bool,
    text: String,
    count: usize,
    /// Texts that end the generation, and are not printed.
    stops: &'a [String],
    /// What may be the beginning of one of them.
    pending: String,
}

impl<'a> Printer<'a> {
    fn new(session: &'a Session, asked: &'a Generate, mut stream: Option<Tokens>) -> Result<Printer<'a>, Fault> {
        if let Some(tokenizer) = &mut stream {
            // With special tokens only when they are no end: they show what the model says after it.
            tokenizer.stream(!asked.ignore_eos)?;
        }
        let (hold, stops) = (asked.json, asked.stop.as_slice());
        Ok(Printer { session, stream, hold, text: String::new(), count: 0, stops, pending: String::new() })
    }

    /// Takes one token; whether it completed a text that ends the generation.
    fn token(&mut self, id: u32) -> Result<bool, Fault> {
        let piece = match &mut self.stream {
            Some(stream) => stream.push(id)?,
            None if self.count == 0 => id.to_string(),
            None => format!(",{id}"),
        };
        self.count += 1;
        self.pending.push_str(&piece);
        let (ready, found) = certain(&self.pending, self.stops);
        let piece: String = self.pending.drain(..ready).collect();
        self.put(&piece)?;
        Ok(found)
    }

    fn put(&mut self, piece: &str) -> Result<(), Fault> {
        match self.hold {
            true => self.text.push_str(piece),
            false if piece.is_empty() => {}
            false => self.session.terminal.print_generated(piece)?,
        }
        Ok(())
    }

    /// Prints what was held back, if no text of `--stop` came, and ends the line. Returns the text that was kept.
    fn finish(mut self, stopped: bool) -> Result<String, Fault> {
        let rest = self.stream.as_mut().map(Tokens::finish).transpose()?.unwrap_or_default();
        if !stopped {
            self.pending.push_str(&rest);
            let (ready, found) = certain(&self.pending, self.stops);
            let end = if found { ready } else { self.pending.len() };
            let piece: String = self.pending.drain(..end).collect();
            self.put(&piece)?;
        }
        if !self.hold {
            self.session.terminal.print("\n")?;
        }
        Ok(self.text)
    }
}

/// How many bytes of `text` can be printed: up to the first of `stops`, and whether there is one; else all but what may be the
/// beginning of one.
fn certain(text: &str, stops: &[String]) -> (usize, bool) {
    if let Some(at) = stops.iter().filter_map(|stop| text.find(stop.as_str())).min() {
        return (at, true);
    }
    let begins = |at: usize| stops.iter().any(|stop| stop.starts_with(&text[at..]));
    let held = text.char_indices().map(|(at, _)| at).find(|&at| begins(at));
    (held.unwrap_or(text.len()), false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_begin_a_stop_text_is_held_back() {
        let stops = ["\n\n".to_string(), "END".to_string()];
        for (text, expected) in [
            ("once", (4, false)),
            ("once\n", (4, false)),
            ("once\n\n upon", (4, true)),
            ("the E", (4, false)),
            ("the EN", (4, false)),
            ("the ENG", (7, false)),
            ("the END", (4, true)),
            ("END\n\n", (0, true)),
            ("", (0, false)),
            ("µE", (2, false)),
        ] {
            assert_eq!(certain(text, &stops), expected, "{text:?}");
        }
        assert_eq!(certain("END", &[]), (3, false));
    }
}
