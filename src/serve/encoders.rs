//! Owns the threads that turn text into tokens for handlers. Each has its own tokenizer process.

use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread;

use tokio::sync::oneshot;

use super::desk::{StartTokens, lock};
use super::error::ApiError;
use crate::error::Fault;
use crate::pipeline::Tokens;

/// Stack of a thread: the compiler of schemas recurses once for each level of a schema.
const STACK_BYTES: usize = 16 << 20;
/// Questions that wait for a thread.
const WAITING_MAX: usize = 256;

type Job = Box<dyn FnOnce(Result<&mut Tokens, ApiError>) + Send>;

/// Sends questions of handlers to the threads.
#[derive(Clone)]
pub struct Encoders {
    jobs: SyncSender<Job>,
}

impl Encoders {
    /// # Errors
    /// Threads that cannot be started.
    pub fn start(threads: usize, start: &StartTokens) -> Result<Encoders, Fault> {
        let (jobs, queue) = sync_channel(WAITING_MAX);
        let queue = Arc::new(Mutex::new(queue));
        for _ in 0..threads {
            let (queue, start) = (queue.clone(), start.clone());
            let spawned = thread::Builder::new()
                .name("encode".to_string())
                .stack_size(STACK_BYTES)
                .spawn(move || run(&queue, &start));
            spawned.map_err(|error| Fault::environment(format!("cannot start a thread: {error}")))?;
        }
        Ok(Encoders { jobs })
    }

    /// Asks a tokenizer.
    ///
    /// # Errors
    /// Too many questions wait; the model has no tokenizer; or the error of the tokenizer.
    pub async fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&mut Tokens) -> Result<T, Fault> + Send + 'static,
    ) -> Result<T, ApiError> {
        let (answer, answered) = oneshot::channel();
        let job = Box::new(move |tokens: Result<&mut Tokens, ApiError>| {
            // The client disconnected while the question waited.
            if answer.is_closed() {
                return;
            }
            let asked = tokens.and_then(|tokens| {
                let folder = format!("{}/", tokens.folder().display());
                question(tokens).map_err(|fault| {
                    let error = ApiError::from(fault);
                    // Clients do not learn the paths of this machine.
                    ApiError { message: error.message.replace(&folder, ""), ..error }
                })
            });
            // The client may have disconnected meanwhile.
            let _ = answer.send(asked);
        });
        match self.jobs.try_send(job) {
            Ok(()) => answered.await.unwrap_or_else(|_| Err(ApiError::dead("the tokenizer's thread ended"))),
            Err(TrySendError::Full(_)) => Err(ApiError::busy("too many texts wait for the tokenizer")),
            Err(TrySendError::Disconnected(_)) => Err(ApiError::dead("the tokenizer's threads ended")),
        }
    }
}

fn run(queue: &Mutex<Receiver<Job>>, start: &StartTokens) {
    let mut tokens: Option<Tokens> = None;
    loop {
        let job = lock(queue).recv();
        let Ok(job) = job else { return };
        if tokens.as_ref().is_none_or(Tokens::is_lost) {
            tokens = match start() {
                Ok(Some(started)) => Some(started),
                Ok(None) => {
                    job(Err(ApiError::bad("this model has no tokenizer: give token ids")));
                    continue;
                }
                Err(fault) => {
                    job(Err(fault.into()));
                    continue;
                }
            };
        }
        if let Some(tokens) = &mut tokens {
            job(Ok(tokens));
        }
    }
}
