//! Owns `serve`: a server of the OpenAI HTTP API for one model.
//!
//! | module | owns |
//! | --- | --- |
//! | `http`, `access` | connections; the names that a server is called by, and pages of other sites |
//! | `routes` | endpoints |
//! | `params`, `fields`, `tools` | requests: settings, fields of a body, functions that the model may call |
//! | `reply`, `reader`, `scores`, `error` | replies: text, what is read in it, log-probabilities, refusals |
//! | `desk` | the engine thread and the text thread |
//! | `encoders` | threads that tokenize |
//! | `metrics`, `log` | figures; one entry for each request |
//!
//! Only `http`, `routes` and `reply` have async code. It waits for peers and computes nothing.
//!
//! Peers are not trusted. Sizes are checked before memory is allocated, every wait has an end, and a request for too much is refused
//! with a status that says so.

mod access;
mod calls;
mod desk;
mod encoders;
mod error;
mod fields;
mod http;
mod log;
mod metrics;
mod params;
mod reader;
mod reply;
mod routes;
mod scores;
mod tools;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use axum::middleware::from_fn_with_state;
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};

use crate::engine::{Engine, Limits, Stepper};
use crate::error::Fault;
use access::Access;
use desk::Desk;
use encoders::Encoders;
use log::Log;
use metrics::Metrics;
use routes::Server;

pub use desk::StartTokens;
pub use log::{Entry, Told};
pub use reader::OfChannels;

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
#[derive(Clone)]
pub struct Settings {
    pub address: SocketAddr,
    /// Names that clients may call the server by, beside those of this machine.
    pub hosts: Vec<String>,
    /// Origins of web pages that may use the server; `*` is any.
    pub origins: Vec<String>,
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
    /// Takes an entry for each request.
    pub log: Option<Told>,
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

/// What happens to a server.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum State {
    /// It accepts connections. Requests are answered once it is ready.
    Listens(SocketAddr),
    /// The engine runs; time since the server listened.
    Ready(Duration),
    /// It accepts no connection any more; so many choices still run or wait.
    Ends {
        open: usize,
    },
    Ended(Summary),
}

/// Counts of a whole run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Summary {
    pub ran: Duration,
    /// Choices that ended, and of them those that ended with an error.
    pub choices: u64,
    pub failed: u64,
    pub prompt_tokens: u64,
    pub tokens: u64,
    /// Requests with a status of 400 and above.
    pub refused: u64,
}

/// Serves a model until SIGTERM arrives, `stop` becomes true, or the engine fails for good. `make` makes the engine, and makes
/// it again after a failure; `tell` is called with each new state.
///
/// # Errors
/// An address that is taken; an engine that failed three times in ten minutes.
pub fn serve<S: Stepper>(
    settings: &Settings,
    model: Model,
    make: impl Fn() -> Result<Engine<S>, Fault> + Send + 'static,
    tokens: &StartTokens,
    stop: impl Fn() -> bool,
    tell: impl Fn(State) -> Result<(), Fault>,
) -> Result<Ended, Fault> {
    runtime()?.block_on(async {
        let address = settings.address;
        let listener = http::listen(address).await.map_err(|error| {
            failed(&format!("cannot listen on {address}"), error).with_remedy("name another port with `--port`")
        })?;
        let address = listener.local_addr().map_err(|error| failed("cannot tell the address", error))?;
        let mut terminate =
            signal(SignalKind::terminate()).map_err(|error| failed("cannot wait for SIGTERM", error))?;
        let desk = Desk::start(make, tokens.clone(), Metrics::new(&model.name))?;
        let encoders = [Encoders::start(ENCODERS, tokens)?, Encoders::start(1, tokens)?];
        let log = Log::new(settings.log.clone());
        let router = Server::new(desk.clone(), encoders, model, settings).router();
        let router = router.layer(from_fn_with_state(log.clone(), log::logged));
        let access = Access::new(address, &settings.hosts, &settings.origins);
        let listens = Instant::now();
        tell(State::Listens(address))?;
        let mut is_ready = false;
        let mut ended = Ok(Ended::Stopped);
        let until = async {
            loop {
                let is_over = tokio::select! {
                    _ = terminate.recv() => true,
                    () = tokio::time::sleep(LOOK) => false,
                };
                let health = desk.health();
                if let Some(fault) = health.over {
                    ended = Err(fault);
                    return;
                }
                // Also of a server that ends before it was looked at.
                if !is_ready && health.trouble.is_none() {
                    is_ready = true;
                    if let Err(fault) = tell(State::Ready(listens.elapsed())) {
                        ended = Err(fault);
                        return;
                    }
                }
                if is_over {
                    ended = Ok(Ended::Terminated);
                    return;
                }
                if stop() {
                    return;
                }
            }
        };
        let until = async {
            until.await;
            let figures = desk.health().figures;
            // A terminal that is gone is no reason to cut requests off.
            let _ = tell(State::Ends { open: figures.running + figures.waiting });
        };
        if !http::serve(listener, router, access, until, settings.grace).await {
            desk.cancel_all();
            tokio::time::sleep(FAREWELL).await;
        }
        let summary = desk::lock(&desk.metrics).summary(listens.elapsed(), log.refused());
        tell(State::Ended(summary))?;
        ended
    })
}

fn failed(what: &str, error: std::io::Error) -> Fault {
    Fault::environment(format!("{what}: {error}"))
}

/// The threads of connections.
fn runtime() -> Result<Runtime, Fault> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let built = builder.worker_threads(HTTP_THREADS).thread_name("http").enable_all().build();
    built.map_err(|error| failed("cannot start the threads of HTTP", error))
}
