//! Owns `serve`: a model behind the HTTP API that clients of OpenAI speak.
//!
//! `desk` has the engine's thread and the thread that makes text; `encoders` the threads that read text; `routes` the endpoints,
//! with `params` and `fields` for what they are asked, `tools` for the functions that a text may call, `reply` for what they answer,
//! and `error` for what they refuse; `http` the connections; `metrics` the figures. Async code stays in `http`, `routes` and `reply`: it waits for peers, and computes nothing.
//!
//! Peers are strangers. Sizes are bounded before memory is taken, every wait has an end, and what a peer asks too much of is
//! refused with a status that says so.

mod desk;
mod encoders;
mod error;
mod fields;
mod http;
mod metrics;
mod params;
mod reply;
mod routes;
mod tools;

use std::net::SocketAddr;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};

use crate::engine::{Engine, Limits, Stepper};
use crate::error::Fault;
use desk::Desk;
use encoders::Encoders;
use metrics::Metrics;
use routes::Server;

pub use desk::StartTokens;

/// Threads that read text, and threads that wait for peers.
const ENCODERS: usize = 2;
const HTTP_THREADS: usize = 2;
/// Between two looks at whether to stop.
const LOOK: Duration = Duration::from_millis(100);
/// After the last request was cancelled, for its client to be told.
const FAREWELL: Duration = Duration::from_secs(2);

/// The model that is served.
#[derive(Debug, Clone)]
pub struct Model {
    /// As clients call it.
    pub name: String,
    pub vocab: u32,
    /// Ids that end its text.
    pub eos: Vec<u32>,
    pub context_max: u32,
}

/// What a user may set.
#[derive(Debug, Clone)]
pub struct Settings {
    pub address: SocketAddr,
    /// What clients have to name as bearer token.
    pub key: Option<String>,
    pub running_max: u32,
    pub waiting_max: u32,
    pub chunk_rows: u32,
    /// Steps of a launch.
    pub steps_max: u32,
    /// Of a request, from its arrival to its last token.
    pub time_max: Duration,
    /// For open requests, when the server ends.
    pub grace: Duration,
}

impl Settings {
    /// Those of the engine.
    pub fn limits(&self) -> Limits {
        let Settings { running_max, waiting_max, chunk_rows, steps_max, .. } = *self;
        Limits { running_max, waiting_max: waiting_max as usize, chunk_rows, steps_max }
    }
}

/// How a server ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// SIGTERM, and every request was answered.
    Terminated,
    /// `stop` said so.
    Stopped,
}

/// Serves a model until SIGTERM comes, `stop` says so, or the engine fails for good. `make` makes the engine, and makes it again
/// when it failed; `ready` is told the address.
///
/// # Errors
/// An address that is taken; an engine that failed three times in ten minutes.
pub fn serve<S: Stepper>(
    settings: &Settings,
    model: Model,
    make: impl Fn() -> Result<Engine<S>, Fault> + Send + 'static,
    tokens: &StartTokens,
    stop: impl Fn() -> bool,
    ready: impl FnOnce(SocketAddr) -> Result<(), Fault>,
) -> Result<Ended, Fault> {
    let failed = |what: &str, error: std::io::Error| Fault::environment(format!("{what}: {error}"));
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(HTTP_THREADS)
        .thread_name("http")
        .enable_all()
        .build()
        .map_err(|error| failed("cannot start the threads of HTTP", error))?;
    runtime.block_on(async {
        let address = settings.address;
        let listener = http::listen(address).await.map_err(|error| {
            failed(&format!("cannot listen on {address}"), error).with_remedy("name another port with `--port`")
        })?;
        let address = listener.local_addr().map_err(|error| failed("cannot tell the address", error))?;
        let mut terminate =
            signal(SignalKind::terminate()).map_err(|error| failed("cannot wait for SIGTERM", error))?;
        let desk = Desk::start(make, tokens.clone(), Metrics::new(&model.name))?;
        let encoders = Encoders::start(ENCODERS, tokens)?;
        let router = Server::new(desk.clone(), encoders, model, settings).router();
        ready(address)?;
        let mut ended = Ok(Ended::Stopped);
        let until = async {
            loop {
                tokio::select! {
                    _ = terminate.recv() => {
                        ended = Ok(Ended::Terminated);
                        return;
                    }
                    () = tokio::time::sleep(LOOK) => {}
                }
                if let Some(fault) = desk.health().over {
                    ended = Err(fault);
                    return;
                }
                if stop() {
                    return;
                }
            }
        };
        if !http::serve(listener, router, until, settings.grace).await {
            desk.cancel_all();
            tokio::time::sleep(FAREWELL).await;
        }
        ended
    })
}
