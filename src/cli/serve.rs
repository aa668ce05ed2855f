//! Owns `serve`: makes the parts of a server, and prints when it listens and when it ends.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::Outcome;
use super::arguments::Serve;
use super::session::{Session, Talk, choose_target, has_tokenizer, tokenizer};
use super::terminal::interrupt;
use crate::engine::Engine;
use crate::error::Fault;
use crate::files::read_text;
use crate::pipeline::{Given, Serving};
use crate::serve::{Ended, Model, Settings, StartTokens};

const KEY_BYTES_MAX: u64 = 4096;
const KEY_VARIABLE: &str = "MONOBLOC_API_KEY";

pub fn serve(session: &Session, asked: &Serve) -> Result<Outcome, Fault> {
    let key = key(asked.api_key_file.as_deref())?;
    let given = session.given(&asked.manifest, asked.target.as_deref())?;
    let manifest = &given.manifest;
    let target = choose_target(manifest, asked.target.as_deref())?;
    let tokens = start_tokens(&given)?;
    let ready = session.ready(&given, &target, Talk::Work)?;
    let name = asked.served_model_name.clone().unwrap_or_else(|| manifest.name.clone());
    let context_max = manifest.decode.context_max;
    let model = Model { name, vocab: ready.vocab, eos: ready.eos.clone(), context_max };
    let tokens = checked(tokens, ready.vocab)?;
    let Serving { running_max, chunk_rows, .. } = Serving::of_manifest(manifest, target.kind, asked.max_steps);
    let (running_max, chunk_rows) = (asked.max_batch.unwrap_or(running_max), asked.max_chunk.unwrap_or(chunk_rows));
    let serving = Serving { running_max, chunk_rows, steps_max: asked.max_steps, cache_tokens: asked.cache_tokens };
    let batched = ready.batched(&serving)?;
    let settings = Settings {
        address: SocketAddr::new(asked.host, asked.port),
        key,
        running_max,
        waiting_max: asked.max_waiting,
        chunk_rows,
        steps_max: asked.max_steps,
        time_max: Duration::from_secs(asked.max_seconds),
        grace: Duration::from_secs(asked.grace_seconds),
    };
    let limits = settings.limits();
    let make = move || Engine::new(batched.stepper()?, limits);
    let _deferred = interrupt::defer();
    let listens = |address: SocketAddr| {
        if !address.ip().is_loopback() && settings.key.is_none() {
            session.terminal.say("warning: other machines can use this server, and no API key is asked for");
        }
        session.terminal.print(&format!("serving `{}` at http://{address}\n", model.name))
    };
    match crate::serve::serve(&settings, model.clone(), make, &tokens, interrupt::asked, listens)? {
        Ended::Terminated => Ok(Outcome::Done),
        Ended::Stopped => Ok(Outcome::Interrupted),
    }
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

/// The tokenizer, after a check that its ids fit the vocabulary.
fn checked(start: StartTokens, vocab: u32) -> Result<StartTokens, Fault> {
    let start: StartTokens = Arc::new(move || {
        let mut tokens = start()?;
        tokens.as_mut().map_or(Ok(()), |tokens| tokens.check_vocab(vocab))?;
        Ok(tokens)
    });
    // A fault of the tokenizer is reported before the server listens.
    start()?;
    Ok(start)
}
