//! Owns the log of requests: one entry for each, told when its reply has been sent or its client is gone.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant, SystemTime};

use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use http_body::{Frame, SizeHint};

/// A request that was answered.
#[derive(Debug, Clone)]
pub struct Entry {
    /// When it arrived.
    pub at: SystemTime,
    pub method: String,
    /// Without the query.
    pub path: String,
    pub status: u16,
    /// Until the head of the reply.
    pub head: Duration,
    /// Until the end of the reply.
    pub took: Duration,
    /// Bytes of the body of the reply.
    pub bytes: u64,
    /// `None`: no tokens were computed for it.
    pub prompt_tokens: Option<u32>,
    pub tokens: Option<u32>,
    /// The message of a refusal.
    pub error: Option<String>,
    /// Whether the client received the whole reply.
    pub is_complete: bool,
}

/// Takes entries, from the threads of HTTP.
pub type Told = Arc<dyn Fn(&Entry) + Send + Sync>;

/// The message of a refusal, beside its response.
#[derive(Debug, Clone)]
pub struct Refusal(pub String);

/// Tokens of a reply, counted while it is sent.
#[derive(Debug, Clone)]
pub struct Spent {
    prompt: u32,
    generated: Arc<AtomicU32>,
}

impl Spent {
    pub fn new(prompt: u32) -> Spent {
        Spent { prompt, generated: Arc::default() }
    }

    /// Counts a part of a reply, which may have a token.
    pub fn count(&self, has_token: bool) {
        self.generated.fetch_add(u32::from(has_token), Ordering::Relaxed);
    }
}

/// Where entries go, and how many requests were refused.
#[derive(Clone)]
pub struct Log {
    told: Option<Told>,
    refused: Arc<AtomicU64>,
}

impl Log {
    pub fn new(told: Option<Told>) -> Log {
        Log { told, refused: Arc::default() }
    }

    /// Requests with a status of 400 and above so far, without those for the health.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }
}

/// Runs a request, and tells of it when its reply ends.
pub async fn logged(State(log): State<Log>, request: Request, next: Next) -> Response {
    let (at, begun) = (SystemTime::now(), Instant::now());
    let (method, path) = (request.method().to_string(), request.uri().path().to_string());
    let mut response = next.run(request).await;
    let status = response.status().as_u16();
    // A server that is not ready yet refuses no request by saying so.
    if status >= 400 && path != "/health" {
        log.refused.fetch_add(1, Ordering::Relaxed);
    }
    let Some(told) = log.told else { return response };
    let spent = response.extensions_mut().remove::<Spent>();
    let entry = Entry {
        at,
        method,
        path,
        status,
        head: begun.elapsed(),
        took: Duration::ZERO,
        bytes: 0,
        prompt_tokens: spent.as_ref().map(|spent| spent.prompt),
        tokens: None,
        error: response.extensions_mut().remove::<Refusal>().map(|Refusal(message)| message),
        is_complete: false,
    };
    response.map(|body| Body::new(Watched { body, entry, spent, begun, told }))
}

/// A body that tells of its request when it is dropped.
struct Watched {
    body: Body,
    entry: Entry,
    spent: Option<Spent>,
    begun: Instant,
    told: Told,
}

impl http_body::Body for Watched {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        match &polled {
            Poll::Ready(Some(Ok(frame))) => {
                self.entry.bytes += frame.data_ref().map_or(0, |data| data.len() as u64);
                self.entry.is_complete = self.body.is_end_stream();
            }
            Poll::Ready(None) => self.entry.is_complete = true,
            _ => {}
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.entry.took = self.begun.elapsed();
        self.entry.tokens = self.spent.as_ref().map(|spent| spent.generated.load(Ordering::Relaxed));
        // A body that was empty from the start is never polled.
        self.entry.is_complete |= http_body::Body::is_end_stream(&self.body);
        (self.told)(&self.entry);
    }
}
