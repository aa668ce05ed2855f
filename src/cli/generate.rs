//! Owns `generate`: turns a prompt into token ids, and prints generated tokens as they arrive.

use std::io::Read;
use std::ops::ControlFlow;
use std::time::Instant;

use serde_json::json;

use super::Outcome;
use super::arguments::Generate;
use super::choosing;
use super::printer::{Form, Printed, Printer, Special};
use super::proposes::Proposes;
use super::session::{Session, Talk, choose_target, tokenizer};
use super::terminal::interrupt;
use crate::error::Fault;
use crate::files::read_text;
use crate::manifest::Manifest;
use crate::pipeline::Tokens;
use crate::sample::{Decided, End, RequestSettings};
use crate::speculate::Speculated;
use crate::text::counted;
use crate::tokenizer::{Chat, Message, Thinking, check_ids, without_thinking};

/// Why the generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stop {
    Eos,
    /// One of `--stop` was generated.
    Text,
    /// `--max-tokens`.
    Length,
    /// The context is full.
    Context,
    Interrupted,
    /// The reader of stdout is gone.
    Closed,
}

impl Stop {
    fn name(self) -> &'static str {
        match self {
            Stop::Eos => "eos",
            Stop::Text => "stop",
            Stop::Length | Stop::Context => "length",
            Stop::Interrupted => "interrupted",
            Stop::Closed => "closed",
        }
    }

    /// The reason as text for people.
    fn words(self) -> &'static str {
        match self {
            Stop::Eos => "the model ended the text",
            Stop::Text => "a text of `--stop` was generated",
            Stop::Length => "`--max-tokens` is reached",
            Stop::Context => "the context is full (`context_max` of the manifest)",
            Stop::Interrupted => "interrupted",
            Stop::Closed => "the reader of the output is gone",
        }
    }
}

/// Largest text that is read as a prompt.
const PROMPT_BYTES_MAX: u64 = 64 << 20;

pub fn generate(session: &Session, asked: &Generate) -> Result<Outcome, Fault> {
    let settings = settings(asked)?;
    let form = match (asked.json, asked.jsonl) {
        (true, _) => Form::Kept,
        (_, true) => Form::Lines,
        _ => Form::Text,
    };
    if form == Form::Text
        && let Some(warning) = choosing::without_effect(&asked.choosing)
    {
        session.terminal.say(&warning);
    }
    let prompt_text = prompt_text(asked)?;
    let given = session.given(&asked.manifest, asked.target.as_deref())?;
    let manifest = &given.manifest;
    let target = choose_target(manifest, asked.target.as_deref())?;
    choosing::refuse_on_kernels(&settings, manifest, &target)?;
    // Before the model is built, so that a fault of the tokenizer is reported at once.
    let mut tokenizer = match &asked.ids {
        Some(_) => None,
        None => Some(tokenizer(manifest)?),
    };
    let mut ready =
        session.ready(&given, &target, if form == Form::Text { Talk::Work } else { Talk::Nothing }, &asked.checks)?;
    let (prompt, thinking) =
        prompt_ids(tokenizer.as_mut(), asked, prompt_text.as_deref().unwrap_or_default(), ready.vocab)?;
    if let Some(tokenizer) = &mut tokenizer {
        ready.end_also(tokenizer.end(ready.vocab)?);
    }
    let request = settings.resolve(ready.vocab, &ready.eos)?;
    let room = room_after(prompt.len(), manifest)?;
    if room < asked.max_tokens && form == Form::Text {
        let (max, context_max) = (asked.max_tokens, manifest.decode.context_max);
        ready
            .report()
            .note(&format!("at most {room} of {}: `context_max` is {context_max}", counted(max as u64, "token")));
    }
    let proposes = Proposes::of(asked, &ready, prompt.len(), &request)?;
    let mut runner = ready.runner()?;
    // Loading kernels does not count as time of the prompt.
    runner.make_ready(&prompt, proposes.most())?;

    let has_text = tokenizer.is_some();
    // With `--ignore-eos` they show what the model says after its end.
    let special = if asked.ignore_eos { Special::Shown } else { Special::of(thinking) };
    let mut printer =
        Printer::new(session, form, tokenizer.as_mut(), special)?.stop_at(&asked.stop, settings.min_tokens as usize);
    // A pipe gets only the generated text; a terminal shows the prompt too.
    let echoes = asked.echo || (session.terminal.stdout_is_terminal() && asked.chat.is_none());
    if let Some(text) = prompt_text.filter(|_| echoes && form == Form::Text) {
        session.terminal.print(&text)?;
    }
    let deferred = interrupt::defer();
    let begun = Instant::now();
    let (mut first, mut last) = (None, begun);
    let (mut stop, mut failed) = (if room < asked.max_tokens { Stop::Context } else { Stop::Length }, None);
    let mut on_token = |decided: &Decided| {
        last = Instant::now();
        first.get_or_insert(last);
        match printer.token(decided) {
            Err(fault) => failed = Some(fault),
            Ok(true) => stop = Stop::Text,
            Ok(false) if interrupt::asked() => stop = Stop::Interrupted,
            Ok(false) if session.terminal.is_closed() => stop = Stop::Closed,
            Ok(false) => {
                if request.end(decided.token) == Some(End::Eos) {
                    stop = Stop::Eos;
                }
                return ControlFlow::Continue(());
            }
        }
        ControlFlow::Break(())
    };
    let tokens_max = asked.max_tokens.min(room);
    let (answer, speculated) = proposes.answer(&mut runner, &prompt, tokens_max, &request, &mut on_token)?;
    drop(deferred);
    if let Some(fault) = failed {
        return Err(fault);
    }
    let printed = printer.finish(stop == Stop::Text)?;
    let first = first.unwrap_or(last);
    let (prompt_s, decode_s) = ((first - begun).as_secs_f64(), (last - first).as_secs_f64());
    let (ids, place) = (&answer.tokens, runner.place());
    let unchecked = ready.is_unchecked();
    let generated =
        Generated { prompt: &prompt, ids, has_text, printed, stop, prompt_s, decode_s, place, speculated, unchecked };
    generated.tell(session, form)?;
    Ok(if stop == Stop::Interrupted { Outcome::Interrupted } else { Outcome::Done })
}

/// The settings for the choice of tokens, checked as far as possible without a model.
fn settings(asked: &Generate) -> Result<RequestSettings, Fault> {
    let settings = choosing::settings(&asked.choosing)?;
    if settings.min_tokens as usize > asked.max_tokens {
        let (min, max) = (settings.min_tokens, asked.max_tokens);
        return Err(Fault::input(format!("expected `--min-tokens` of at most `--max-tokens`, {max}, found {min}"))
            .with_remedy("raise `--max-tokens`, or lower `--min-tokens`"));
    }
    Ok(RequestSettings { ignore_eos: asked.ignore_eos, logprobs: asked.logprobs, ..settings })
}

/// The ids that are continued. Each is one of the model's vocabulary.
fn prompt_ids(
    tokenizer: Option<&mut Tokens>,
    asked: &Generate,
    text: &str,
    vocab: u32,
) -> Result<(Vec<u32>, Thinking), Fault> {
    let (prompt, thinking) = match tokenizer {
        Some(tokenizer) => {
            tokenizer.check_vocab(vocab)?;
            encode(tokenizer, asked, text)?
        }
        None => (asked.ids.iter().flat_map(|ids| ids.0.iter().copied()).collect(), Thinking::None),
    };
    check_ids(&prompt, vocab)?;
    Ok((prompt, thinking))
}

/// The facts for the last line.
struct Generated<'a> {
    prompt: &'a [u32],
    ids: &'a [u32],
    /// `false` if the prompt was given as ids: then there is no tokenizer.
    has_text: bool,
    printed: Printed,
    stop: Stop,
    prompt_s: f64,
    decode_s: f64,
    place: String,
    /// `None` without speculative decoding.
    speculated: Option<Speculated>,
    /// Whether the kernels may not have been checked.
    unchecked: bool,
}

impl Generated<'_> {
    fn tell(&self, session: &Session, form: Form) -> Result<(), Fault> {
        let Generated { prompt, ids, has_text, printed, stop, prompt_s, decode_s, place, speculated, unchecked } = self;
        // The last step of the prompt decides the first token, so `decode_s` is the time of the other tokens.
        let tokens_per_s = (ids.len() > 1 && *decode_s > 0.0).then(|| (ids.len() - 1) as f64 / decode_s);
        if form == Form::Text {
            let rate = tokens_per_s.map(|rate| format!(" at {rate:.0} tokens/s")).unwrap_or_default();
            let accepted = speculated.map(|speculated| {
                let Speculated { proposed, accepted, .. } = speculated;
                let each = speculated.tokens_per_step();
                let each = each.map(|each| format!("{each:.2} tokens a step that verifies, ")).unwrap_or_default();
                format!("; {each}{accepted} of {} accepted", counted(proposed as u64, "proposed token"))
            });
            session.tell(&format!(
                "prompt of {} in {:.0} ms, then {}{rate} ({place}){}; stopped: {}",
                tokens(prompt.len()),
                prompt_s * 1e3,
                tokens(ids.len()),
                accepted.unwrap_or_default(),
                stop.words()
            ));
            return Ok(());
        }
        // With `--jsonl`, earlier lines have all ids and all text except its end.
        let is_whole = form == Form::Kept;
        let text = if is_whole { &printed.text } else { &printed.rest };
        let mut end = json!({
            "prompt_ids": prompt,
            "ids": ids,
            "text": has_text.then_some(text),
            "stop": stop.name(),
            "prompt_s": prompt_s,
            "decode_s": decode_s,
            "tokens_per_s": tokens_per_s,
            "place": place,
        });
        if *unchecked {
            end["unchecked"] = json!(true);
        }
        if let Some(Speculated { proposed, accepted, steps }) = speculated {
            (end["proposed"], end["accepted"]) = (json!(proposed), json!(accepted));
            end["verifying_steps"] = json!(steps);
        }
        if !is_whole {
            return session.terminal.print_json_line(&end);
        }
        if !printed.logprobs.is_empty() {
            end["logprobs"] = json!(printed.logprobs);
        }
        session.terminal.print_json(&end)
    }
}

/// `1 token`, `3 tokens`.
pub fn tokens(count: usize) -> String {
    counted(count as u64, "token")
}

/// The text of the prompt, from an argument, a file, or stdin; `None` if ids are given.
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

fn encode(tokenizer: &mut Tokens, asked: &Generate, text: &str) -> Result<(Vec<u32>, Thinking), Fault> {
    if asked.chat.is_none() || asked.raw {
        return Ok((tokenizer.encode(text, !asked.raw)?, Thinking::None));
    }
    let system = asked.system.iter().map(|system| Message::new("system", system));
    let messages: Vec<Message> = system.chain([Message::new("user", text)]).collect();
    let settings = if asked.no_think { without_thinking() } else { Default::default() };
    let prompt = tokenizer.encode_chat(Chat { settings, ..Chat::new(messages) })?;
    Ok((prompt.ids, prompt.thinking))
}

/// Number of tokens that can be generated after a prompt; the last of them needs no place in the cache.
fn room_after(prompt_count: usize, manifest: &Manifest) -> Result<usize, Fault> {
    let context_max = manifest.decode.context_max as usize;
    if prompt_count == 0 {
        return Err(Fault::input("the prompt has no tokens, and nothing to continue")
            .with_remedy("give it some text, or at least one id"));
    }
    if prompt_count > context_max {
        return Err(Fault::input(format!(
            "expected a prompt of at most {} (`context_max` of manifest `{}`), found {prompt_count}",
            counted(context_max as u64, "token"),
            manifest.name
        ))
        .with_remedy("shorten the prompt, or raise `context_max` in the manifest; `monobloc init` writes one for a model that has none"));
    }
    Ok(context_max - prompt_count + 1)
}
