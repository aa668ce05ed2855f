//! Owns `generate`: from a prompt to token ids, and from decided tokens to text as they come.

use std::ops::ControlFlow;
use std::time::Instant;

use serde_json::json;

use super::Outcome;
use super::arguments::Generate;
use super::session::{Session, Talk, pick_target, tokenizer};
use super::terminal::interrupt;
use crate::error::Fault;
use crate::manifest::Manifest;
use crate::pipeline::{self, Tokens};
use crate::sample::SampleSettings;
use crate::tokenizer::{Message, check_ids};

/// Why no further token came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stop {
    Eos,
    /// As many as were asked for, or as the context has room for.
    Length,
    Interrupted,
    /// Nobody reads any more.
    Closed,
}

impl Stop {
    fn name(self) -> &'static str {
        match self {
            Stop::Eos => "eos",
            Stop::Length => "length",
            Stop::Interrupted => "interrupted",
            Stop::Closed => "closed",
        }
    }
}

pub fn generate(session: &Session, asked: &Generate) -> Result<Outcome, Fault> {
    let Generate { temperature, top_k, top_p, seed, .. } = *asked;
    let sampling = SampleSettings { temperature, top_k, top_p, seed };
    sampling.resolve()?;
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
    let prompt = match (&mut tokenizer, &asked.ids) {
        (Some(tokenizer), _) => {
            tokenizer.check_vocab(graph.vocab)?;
            encode(tokenizer, asked)?
        }
        (None, ids) => ids.iter().flat_map(|ids| ids.0.iter().copied()).collect(),
    };
    check_ids(&prompt, graph.vocab)?;
    let room = room_after(prompt.len(), &manifest)?;
    if room < asked.max_tokens && !asked.json {
        let (max, context_max) = (asked.max_tokens, manifest.decode.context_max);
        workspace.report.note(&format!("at most {room} of {max} tokens: `context_max` is {context_max}"));
    }
    let mut runner = prepared.runner(&workspace)?;
    let eos: &[u32] = if asked.ignore_eos { &[] } else { &graph.eos };

    let has_text = tokenizer.is_some();
    if let Some(tokenizer) = &mut tokenizer {
        // With special tokens only when they are no end: they show what the model says after it.
        tokenizer.stream(!asked.ignore_eos)?;
    }
    let mut printer = Printer { session, stream: tokenizer, hold: asked.json, text: String::new(), count: 0 };
    let deferred = interrupt::defer();
    let begun = Instant::now();
    let (mut first, mut last) = (None, begun);
    let (mut stop, mut failed) = (Stop::Length, None);
    let ids = runner.generate(&prompt, asked.max_tokens.min(room), eos, &sampling, &mut |id| {
        last = Instant::now();
        first.get_or_insert(last);
        match printer.token(id) {
            Err(fault) => failed = Some(fault),
            Ok(()) if interrupt::asked() => stop = Stop::Interrupted,
            Ok(()) if session.terminal.is_closed() => stop = Stop::Closed,
            Ok(()) => {
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
    let text = printer.finish()?;
    let first = first.unwrap_or(last);
    let (prompt_s, decode_s) = ((first - begun).as_secs_f64(), (last - first).as_secs_f64());
    let text = has_text.then_some(text);
    let generated = Generated { prompt: &prompt, ids: &ids, text, stop, prompt_s, decode_s, place: runner.place() };
    generated.tell(session, asked.json)?;
    Ok(if stop == Stop::Interrupted { Outcome::Interrupted } else { Outcome::Done })
}

/// What there is to tell at the end.
struct Generated<'a> {
    prompt: &'a [u32],
    ids: &'a [u32],
    /// `None` where ids went in: nobody has a tokenizer.
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
            "prompt of {} in {:.0} ms, then {}{rate} ({place})",
            tokens(prompt.len()),
            prompt_s * 1e3,
            tokens(ids.len()),
        ));
        Ok(())
    }
}

fn tokens(count: usize) -> String {
    super::units::counted(count as u64, "token")
}

fn encode(tokenizer: &mut Tokens, asked: &Generate) -> Result<Vec<u32>, Fault> {
    match (&asked.chat, &asked.prompt) {
        (Some(chat), _) if !asked.raw => {
            let system = asked.system.iter().map(|system| Message::new("system", system));
            let messages: Vec<Message> = system.chain([Message::new("user", chat)]).collect();
            tokenizer.encode_chat(messages, true)
        }
        (chat, prompt) => {
            let text = chat.as_ref().or(prompt.as_ref()).map_or("", String::as_str);
            tokenizer.encode(text, !asked.raw)
        }
    }
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
}

impl Printer<'_> {
    fn token(&mut self, id: u32) -> Result<(), Fault> {
        let piece = match &mut self.stream {
            Some(stream) => stream.push(id)?,
            None if self.count == 0 => id.to_string(),
            None => format!(",{id}"),
        };
        self.count += 1;
        self.put(&piece)
    }

    fn put(&mut self, piece: &str) -> Result<(), Fault> {
        match self.hold {
            true => self.text.push_str(piece),
            false if piece.is_empty() => {}
            false => self.session.terminal.print_generated(piece)?,
        }
        Ok(())
    }

    /// Prints what was held back, and ends the line. Returns the text that was kept.
    fn finish(mut self) -> Result<String, Fault> {
        let rest = self.stream.as_mut().map(Tokens::finish).transpose()?.unwrap_or_default();
        self.put(&rest)?;
        if !self.hold {
            self.session.terminal.print("\n")?;
        }
        Ok(self.text)
    }
}
