//! Owns `serve`: makes the parts of a server, and prints when it listens and when it ends.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use serde_json::{Value, json};

use super::Outcome;
use super::arguments::{DraftOf, LogForm, Serve};
use super::session::{Session, Talk, choose_target, has_tokenizer, tokenizer};
use super::terminal::{self, interrupt};
use crate::engine::Engine;
use crate::error::Fault;
use crate::files::read_text;
use crate::pipeline::{AskedSizes, Batched, Given, Ready, Serving};
use crate::serve::{Ended, Entry, Model, Settings, StartTokens, State, Summary, Told};
use crate::text::{Style, counted};

const KEY_BYTES_MAX: u64 = 4096;
const KEY_VARIABLE: &str = "MONOBLOC_API_KEY";

pub fn serve(session: &Session, asked: &Serve) -> Result<Outcome, Fault> {
    let key = key(asked.api_key_file.as_deref())?;
    let given = session.given(&asked.manifest, asked.target.as_deref())?;
    let manifest = &given.manifest;
    let target = choose_target(manifest, asked.target.as_deref())?;
    let tokens = start_tokens(&given)?;
    let mut ready = session.ready(&given, &target, Talk::Work, &asked.checks)?;
    let name = asked.served_model_name.clone().unwrap_or_else(|| manifest.name.clone());
    let context_max = manifest.decode.context_max;
    let tokens = checked(tokens, &mut ready)?;
    let model = Model { name, vocab: ready.vocab, eos: ready.eos.clone(), context_max };
    let sizes = Serving::of_manifest(manifest, target.kind, asked.max_steps);
    let (running_max, chunk_rows) =
        (asked.max_batch.unwrap_or(sizes.running_max), asked.max_chunk.unwrap_or(sizes.chunk_rows));
    let named = AskedSizes {
        running_max: asked.max_batch.map(|_| "--max-batch").or(sizes.asked.running_max),
        chunk_rows: asked.max_chunk.map(|_| "--max-chunk").or(sizes.asked.chunk_rows),
    };
    let serving = Serving { asked: named, running_max, chunk_rows, cache_tokens: asked.cache_tokens, ..sizes };
    let batched = batched(&ready, serving, asked.draft)?;
    let settings = Settings {
        address: SocketAddr::new(asked.host, asked.port),
        hosts: asked.allow_host.clone(),
        origins: asked.allow_origin.clone(),
        key,
        running_max,
        waiting_max: asked.max_waiting,
        chunk_rows,
        steps_max: asked.max_steps,
        time_max: Duration::from_secs(asked.max_seconds),
        grace: Duration::from_secs(asked.grace_seconds),
        log: log(session, asked.log),
    };
    let limits = settings.limits();
    let make = move || Engine::new(batched.stepper()?, limits);
    let _deferred = interrupt::defer();
    let grace = asked.grace_seconds;
    let tell = |state: State| match state {
        State::Listens(address) => {
            if !address.ip().is_loopback() && settings.key.is_none() {
                session.terminal.say("warning: other machines can use this server, and no API key is asked for");
            }
            session.terminal.print(&format!("serving `{}` at http://{address}\n", model.name))
        }
        State::Ready(after) => {
            session.tell(&format!("ready after {:.1} s; Ctrl-C ends the server", after.as_secs_f64()));
            Ok(())
        }
        State::Ends { open: 0 } => Ok(()),
        State::Ends { open } => {
            let open = counted(open as u64, "open text");
            session.terminal.say(&format!("{open} may finish in {grace} s; Ctrl-C again ends at once"));
            Ok(())
        }
        State::Ended(summary) => {
            session.tell(&summary_text(&summary));
            Ok(())
        }
    };
    match crate::serve::serve(&settings, model.clone(), make, &tokens, interrupt::asked, tell)? {
        Ended::Terminated => Ok(Outcome::Done),
        Ended::Stopped => Ok(Outcome::Interrupted),
    }
}

/// The steps of the server, with those that verify what a draft proposes, if there is one.
fn batched(ready: &Ready, serving: Serving, draft: Option<DraftOf>) -> Result<Batched, Fault> {
    let Some(DraftOf { most }) = draft else { return ready.batched(&serving) };
    // Its weights lie on the device before the cache takes what is left.
    let mtp = ready.mtp()?;
    Ok(ready.batched(&Serving { proposed: most, ..serving })?.with_draft(mtp, most))
}

/// Prints an entry for each request.
fn log(session: &Session, form: Option<LogForm>) -> Option<Told> {
    let style = session.terminal.style;
    let form = form.unwrap_or(if session.is_verbose() { LogForm::Text } else { LogForm::Off });
    match form {
        LogForm::Off => None,
        LogForm::Text => Some(Arc::new(move |entry| terminal::say(&entry_text(entry), style))),
        LogForm::Json => Some(Arc::new(|entry| terminal::say(&entry_json(entry).to_string(), Style::Plain))),
    }
}

/// `POST /v1/completions 200, 12 + 32 tokens in 512 ms (first byte after 20 ms)`.
fn entry_text(entry: &Entry) -> String {
    let Entry { method, path, status, head, took, prompt_tokens, tokens, error, is_complete, .. } = entry;
    let ms = |time: &Duration| time.as_secs_f64() * 1e3;
    let mut text = format!("{method} {path} {status}");
    if let (Some(prompt), Some(tokens)) = (prompt_tokens, tokens) {
        text.push_str(&format!(", {prompt} + {tokens} tokens"));
    }
    text.push_str(&format!(", {:.0} ms (head after {:.0} ms)", ms(took), ms(head)));
    if !is_complete {
        text.push_str(", the client left");
    }
    if let Some(error) = error {
        text.push_str(&format!(": {error}"));
    }
    text
}

fn entry_json(entry: &Entry) -> Value {
    let Entry { at, method, path, status, head, took, bytes, prompt_tokens, tokens, error, is_complete } = entry;
    json!({
        "time_s": at.duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64()),
        "method": method,
        "path": path,
        "status": status,
        "head_s": head.as_secs_f64(),
        "took_s": took.as_secs_f64(),
        "bytes": bytes,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "complete": is_complete,
        "error": error,
    })
}

fn summary_text(summary: &Summary) -> String {
    let Summary { ran, choices, failed, prompt_tokens, tokens, refused } = *summary;
    let failed = if failed > 0 { format!(" ({failed} with an error)") } else { String::new() };
    format!(
        "served {}{failed} in {:.1} s: {}, {} generated; {} refused",
        counted(choices, "text"),
        ran.as_secs_f64(),
        counted(prompt_tokens, "prompt token"),
        counted(tokens, "token"),
        counted(refused, "request")
    )
}

fn key(file: Option<&Path>) -> Result<Option<String>, Fault> {
    let key = match file {
        Some(file) => Some(read_text(file, KEY_BYTES_MAX)?),
        None => std::env::var(KEY_VARIABLE).ok(),
    };
    match key.map(|key| key.trim().to_string()) {
        Some(key) if key.is_empty() => Err(Fault::input("the API key is empty")
            .with_remedy(format!("write a key into the file, or unset `{KEY_VARIABLE}`"))),
        key => Ok(key),
    }
}

/// Starts the tokenizer's process; a model with synthetic weights has none.
fn start_tokens(given: &Given) -> Result<StartTokens, Fault> {
    let (manifest, has_tokenizer) = (given.manifest.clone(), has_tokenizer(given)?);
    Ok(Arc::new(move || if has_tokenizer { tokenizer(&manifest).map(Some) } else { Ok(None) }))
}

/// The tokenizer, after a check that its ids fit the vocabulary. The token that ends its texts ends those of the model.
fn checked(start: StartTokens, ready: &mut Ready) -> Result<StartTokens, Fault> {
    let vocab = ready.vocab;
    let start: StartTokens = Arc::new(move || {
        let mut tokens = start()?;
        tokens.as_mut().map_or(Ok(()), |tokens| tokens.check_vocab(vocab))?;
        Ok(tokens)
    });
    // A fault of the tokenizer is reported before the server listens.
    if let Some(tokens) = &mut start()? {
        ready.end_also(tokens.end(vocab)?);
    }
    Ok(start)
}
