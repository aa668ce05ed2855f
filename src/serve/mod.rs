//! Owns `serve`: a server of the OpenAI HTTP API for one model.
//!
//! | module | owns |
//! | --- | --- |
//! | `http` | connections |
//! | `routes` | endpoints |
//! | `params`, `fields`, `tools` | requests: settings, fields of a body, functions that the model may call |
//! | `reply`, `scores`, `error` | replies: text, log-probabilities, refusals |
//! | `desk` | the engine thread and the text thread |
//! | `encoders` | threads that tokenize |
//! | `metrics` | figures |
//!
//! Only `http`, `routes` and `reply` have async code. It waits for peers and computes nothing.
//!
//! Peers are not trusted. Sizes are checked before memory is allocated, every wait has an end, and a request for too much is refused
//! with a status that says so.

mod desk;
mod encoders;
mod error;
mod fields;
mod http;
mod metrics;
mod params;
mod reply;
mod routes;
mod scores;
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

/// Threads that tokenize text, and threads that wait for peers.
const ENCODERS: usize = 2;
const HTTP_THREADS: usize = 2;
/// Time between two checks whether to stop.
const LOOK: Duration = Duration::from_millis(100);
/// Time for clients to receive the error of a cancelled request.
const FAREWELL: Duration = Duration::from_secs(2);

/// The model that is served.
#[derive(Debug, Clone)]
pub struct Model {
    /// The name that clients use.
    pub name: String,
    pub vocab: u32,
    /// Ids that end its text.
    pub eos: Vec<u32>,
    pub context_max: u32,
}

/// The settings of a server.
#[derive(Debug, Clone)]
pub struct Settings {
    pub address: SocketAddr,
    /// The bearer token that clients have to send.
    pub key: Option<String>,
    pub running_max: u32,
    pub waiting_max: u32,
    pub chunk_rows: u32,
    /// Steps of a launch.
    pub steps_max: u32,
    /// Longest time from the arrival of a request to its last token.
    pub time_max: Duration,
    /// Time for open requests when the server ends.
    pub grace: Duration,
}

impl Settings {
    /// The limits of the engine.
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
    /// `stop` became true.
    Stopped,
}

/// Serves a model until SIGTERM arrives, `stop` becomes true, or the engine fails for good. `make` makes the engine, and makes
/// it again after a failure; `ready` is called with the address.
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
        let encoders = [Encoders::start(ENCODERS, tokens)?, Encoders::start(1, tokens)?];
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
