//! Owns `serve`: what a server is made of, and what is said when it listens and when it ends.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::Outcome;
use super::arguments::Serve;
use super::session::{Session, Talk, pick_target, tokenizer};
use super::terminal::interrupt;
use crate::engine::Engine;
use crate::error::Fault;
use crate::files::read_text;
use crate::lower::Batch;
use crate::manifest::Manifest;
use crate::model::source::Source;
use crate::pages::Pool;
use crate::pipeline::{self, PAGE_ROWS};

use crate::rows::Shape;
use crate::serve::{Ended, Model, Settings, StartTokens};
use crate::target::{Target, TargetKind};

/// Requests that run at a time, prompt tokens beside them, and contexts that the cache holds, where nobody says otherwise.
const RUNNING_MAX: u32 = 8;
const CHUNK_ROWS: u32 = 8;
const CONTEXTS: u32 = 4;
const KEY_BYTES_MAX: u64 = 4096;
const KEY_VARIABLE: &str = "MONOBLOC_API_KEY";

pub fn serve(session: &Session, asked: &Serve) -> Result<Outcome, Fault> {
    let key = key(asked.api_key_file.as_deref())?;
    let manifest = session.manifest(&asked.manifest)?;
    let target = target(&manifest, asked.target.as_deref())?;
    let workspace = session.workspace(Talk::Work)?;
    let tokens = start_tokens(&manifest)?;
    let prepared = pipeline::prepare(&workspace, &manifest, &target)?;
    let graph = &prepared.imported.graph;
    let name = asked.served_model_name.clone().unwrap_or_else(|| manifest.name.clone());
    let context_max = manifest.decode.context_max;
    let model = Model { name, vocab: graph.vocab, eos: graph.eos.clone(), context_max };
    let tokens = checked(tokens, graph.vocab)?;
    let (running_max, chunk_rows) = (running_max(asked, &manifest), chunk_rows(asked, &manifest));
    let batched = prepared.batched(&workspace, &batch(asked, &manifest))?;
    let settings = Settings {
        address: SocketAddr::new(asked.host, asked.port),
        key,
        running_max,
        waiting_max: asked.max_waiting,
        chunk_rows,
        time_max: Duration::from_secs(asked.max_seconds),
        grace: Duration::from_secs(asked.grace_seconds),
    };
    let limits = settings.limits();
    let make = move || Engine::new(batched.stepper()?, limits);
    let _deferred = interrupt::defer();
    let ready = |address: SocketAddr| {
        if !address.ip().is_loopback() && settings.key.is_none() {
            session.terminal.say("warning: other machines can use this server, and no API key is asked for");
        }
        session.terminal.print(&format!("serving `{}` at http://{address}\n", model.name))
    };
    match crate::serve::serve(&settings, model.clone(), make, &tokens, interrupt::asked, ready)? {
        Ended::Terminated => Ok(Outcome::Done),
        Ended::Stopped => Ok(Outcome::Interrupted),
    }
}

/// The target of that name; the manifest's first that can be served where none is given.
fn target(manifest: &Manifest, name: Option<&str>) -> Result<Target, Fault> {
    let cpu = manifest.targets.iter().find(|target| target.kind == TargetKind::Cpu);
    match (name, cpu) {
        (None, Some(target)) => Ok(target.clone()),
        (name, _) => pick_target(manifest, name),
    }
}

fn running_max(asked: &Serve, manifest: &Manifest) -> u32 {
    asked.max_batch.or(manifest.decode.sequences_max).unwrap_or(RUNNING_MAX)
}

fn chunk_rows(asked: &Serve, manifest: &Manifest) -> u32 {
    asked.max_chunk.or(manifest.decode.chunk_max).unwrap_or(CHUNK_ROWS)
}

/// Rows of a step, and the pages of their sequences.
fn batch(asked: &Serve, manifest: &Manifest) -> Batch {
    let context_max = manifest.decode.context_max;
    let asked_pages = asked.cache_tokens.map(|tokens| tokens.div_ceil(PAGE_ROWS)).or(manifest.decode.cache_pages);
    let pages = asked_pages.unwrap_or(context_max.div_ceil(PAGE_ROWS).saturating_mul(CONTEXTS)).max(1);
    let running_max = running_max(asked, manifest);
    let rows = running_max + chunk_rows(asked, manifest);
    let shape = Shape { rows, sequences: 0, context_max, page_rows: PAGE_ROWS, pages, window: None };
    let sequences = running_max + Pool::keepers(&shape);
    Batch { rows, sequences, pages: shape.pages, page_rows: PAGE_ROWS, words: false }
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
fn start_tokens(manifest: &Manifest) -> Result<StartTokens, Fault> {
    let manifest = manifest.clone();
    let synthetic =
        matches!(Source::parse(&manifest.source, &manifest.revision, manifest.seed)?, Source::Synthetic { .. });
    Ok(Arc::new(move || if synthetic { Ok(None) } else { tokenizer(&manifest).map(Some) }))
}

/// A tokenizer of this vocabulary, once it is known to be one.
fn checked(start: StartTokens, vocab: u32) -> Result<StartTokens, Fault> {
    let start: StartTokens = Arc::new(move || {
        let mut tokens = start()?;
        tokens.as_mut().map_or(Ok(()), |tokens| tokens.check_vocab(vocab))?;
        Ok(tokens)
    });
    // What is wrong with it is known before anything listens.
    start()?;
    Ok(start)
}
