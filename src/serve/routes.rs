//! Owns the endpoints: each reads a request, and asks the tokenizer and the desk.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, Response, StatusCode, header};
use axum::routing::{get, post};
use serde::Deserialize;
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::Model;
use super::calls::harmony;
use super::desk::{Answer, Desk, Order, Said, TextSettings, lock};
use super::encoders::Encoders;
use super::error::ApiError;
use super::fields::{Few, Fields, Sent, beyond_64_bits, few, unsupported};
use super::log::Spent;
use super::params::{Params, Prompt, Prompts, fresh_seed, take_model, top_logprobs, within_grammar};
use super::reader::{self, Reader, Sought};
use super::reply::{Echo, Head, Held, Kind, Reply};
use super::scores::widths;
use super::tools::Tools;
use crate::engine::Ask;
use crate::error::Fault;
use crate::grammar::{Grammar, Source, Vocabulary};
use crate::pipeline::{TextPart, Tokens};
use crate::sample::{RequestSettings, SampleSettings};
use crate::tokenizer::{CallForm, Chat, EFFORT_SETTING, Message, Specials, Thinking};

/// Most bytes of a body: more than the ids of the largest context take.
const BODY_BYTES_MAX: usize = 16 << 20;
/// Most bytes of all large bodies that are read at a time, and of all small ones. The two are counted apart, so that slow peers
/// with large bodies do not block the others.
const BODIES_BYTES_MAX: usize = 64 << 20;
const SMALL_BODY_BYTES: usize = 64 << 10;
/// Time limit for reading a body.
const BODY_TIME: Duration = Duration::from_secs(30);
/// Default `max_tokens` of a completion, as in the API.
const COMPLETION_TOKENS: u32 = 16;
const MESSAGES_MAX: usize = 4096;
const RESPONSE_FORMAT: &str = "response_format";
/// Settings of the chat template.
const SETTINGS_FIELD: &str = "chat_template_kwargs";
/// Most parts of a message.
const PARTS_MAX: usize = 4096;
/// Most bytes of text for each token of the context. Longer texts are refused before a tokenizer reads them, because it takes
/// microseconds for each byte while other requests wait.
const TOKEN_BYTES: usize = 64;
const TEXT_BYTES: usize = 64 << 10;

/// Most log-probabilities of all replies that are computed or read at a time. As JSON one takes about 120 bytes, so all take 1 GB at most.
const SCORES_MAX: u64 = 1 << 23;

/// The state that all endpoints share.
pub struct Server {
    pub desk: Desk,
    pub encoders: Encoders,
    /// Compiles grammars, in a thread of its own, because that can take seconds and texts must not wait for it.
    pub grammars: Encoders,
    pub model: Model,
    /// Digest of the key that clients have to send.
    pub key: Option<blake3::Hash>,
    /// One for each choice that waits or runs.
    pub choices: Arc<Semaphore>,
    pub choices_max: u32,
    /// One for each log-probability of a reply.
    scores: Arc<Semaphore>,
    /// Longest time of a request.
    pub time_max: Duration,
    pub started_s: u64,
    /// The bytes of the model's tokens, once a grammar was asked for.
    vocabulary: Arc<Mutex<Option<Vocabulary>>>,
    large_bodies: Arc<Semaphore>,
    small_bodies: Arc<Semaphore>,
}

type Answered = Result<Response<Body>, ApiError>;

impl Server {
    pub fn new(desk: Desk, [encoders, grammars]: [Encoders; 2], model: Model, settings: &super::Settings) -> Server {
        let choices_max = settings.running_max.saturating_add(settings.waiting_max).max(1);
        Server {
            desk,
            encoders,
            grammars,
            model,
            key: settings.key.as_ref().map(|key| blake3::hash(key.as_bytes())),
            choices: Arc::new(Semaphore::new(choices_max as usize)),
            choices_max,
            scores: Arc::new(Semaphore::new(SCORES_MAX as usize)),
            time_max: settings.time_max,
            started_s: now_s(),
            vocabulary: Arc::new(Mutex::new(None)),
            large_bodies: Arc::new(Semaphore::new(BODIES_BYTES_MAX)),
            small_bodies: Arc::new(Semaphore::new(BODIES_BYTES_MAX)),
        }
    }

    /// All endpoints.
    pub fn router(self) -> Router {
        let router = Router::new()
            .route("/", get(page))
            .route("/health", get(health))
            .route("/metrics", get(metrics))
            .route("/version", get(version))
            .route("/v1/models", get(models))
            .route("/v1/models/{*model}", get(model))
            .route(
                "/v1/completions",
                post(|State(server): Shared, request: Request| respond(server, request, completions)),
            )
            .route(
                "/v1/chat/completions",
                post(|State(server): Shared, request: Request| respond(server, request, chat)),
            )
            .route("/tokenize", post(|State(server): Shared, request: Request| respond(server, request, tokenize)))
            .route("/detokenize", post(|State(server): Shared, request: Request| respond(server, request, detokenize)))
            .route("/tokenizer_info", get(tokenizer_info))
            .route("/v1/embeddings", post(embeddings))
            .fallback(nothing)
            .method_not_allowed_fallback(wrong_method);
        router.with_state(Arc::new(self))
    }

    /// Whether the request has the key, if there is one. Digests are compared, in constant time.
    fn authorised(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let Some(key) = &self.key else { return Ok(()) };
        let given = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let given = given.and_then(|value| value.strip_prefix("Bearer "));
        match given {
            Some(given) if blake3::hash(given.trim().as_bytes()) == *key => Ok(()),
            _ => Err(ApiError::new(StatusCode::UNAUTHORIZED, "expected this server's API key as bearer token")
                .with_code("invalid_api_key")),
        }
    }

    /// The body of a JSON request. The permit is for the memory of the body.
    async fn body(&self, request: Request) -> Result<(Bytes, OwnedSemaphorePermit), ApiError> {
        let (parts, body) = request.into_parts();
        self.authorised(&parts.headers)?;
        let text =
            |name| parts.headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok()).unwrap_or_default();
        let coding = text(header::CONTENT_ENCODING);
        if !coding.is_empty() && !coding.eq_ignore_ascii_case("identity") {
            let coding: String = coding.chars().take(40).collect();
            let message = format!("expected a body without `Content-Encoding`, found `{coding}`");
            return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
        }
        let transfer = text(header::TRANSFER_ENCODING);
        if !transfer.is_empty() && !transfer.eq_ignore_ascii_case("chunked") {
            let transfer: String = transfer.chars().take(40).collect();
            let message = format!("expected `Transfer-Encoding: chunked` or none, found `{transfer}`");
            return Err(ApiError::new(StatusCode::NOT_IMPLEMENTED, message));
        }
        // Browsers let a page of another site post a form here without a preflight request, but not JSON.
        if !text(header::CONTENT_TYPE).to_ascii_lowercase().starts_with("application/json") {
            let message = "expected a body with `Content-Type: application/json`";
            return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
        }
        let large = || {
            let message = format!("expected a body of at most {BODY_BYTES_MAX} bytes");
            ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message).with_code("request_too_large")
        };
        let length = text(header::CONTENT_LENGTH).parse::<usize>().unwrap_or(BODY_BYTES_MAX);
        if length > BODY_BYTES_MAX {
            return Err(large());
        }
        let bodies = if length <= SMALL_BODY_BYTES { &self.small_bodies } else { &self.large_bodies };
        let permit = bodies.clone().try_acquire_many_owned(length.max(1) as u32);
        let permit = permit.map_err(|_| ApiError::busy("too many large requests are being read"))?;
        match tokio::time::timeout(BODY_TIME, to_bytes(body, BODY_BYTES_MAX)).await {
            Ok(Ok(bytes)) => Ok((bytes, permit)),
            Ok(Err(error)) if error.to_string().contains("length limit") => Err(large()),
            Ok(Err(_)) => Err(ApiError::bad("the body ended early")),
            Err(_) => Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time")),
        }
    }

    /// Refuses a text that is too long to be tokenized. `field` names it.
    fn check_text(&self, field: &str, bytes: usize) -> Result<(), ApiError> {
        let most = (TOKEN_BYTES * self.model.context_max as usize).max(TEXT_BYTES);
        if bytes <= most {
            return Ok(());
        }
        let message = format!("expected at most {most} bytes of text, found {bytes}");
        Err(ApiError::field(field, message).with_code("context_length_exceeded"))
    }

    /// As [`Server::check_text`], for messages with all fields that a template may print.
    fn check_messages(&self, messages: &[Message]) -> Result<(), ApiError> {
        let bytes = |message: &Message| {
            let Message { role, content, tool_calls, tool_call_id, name, reasoning_content } = message;
            let named = tool_call_id.iter().chain(name).chain(reasoning_content).map(String::len).sum::<usize>();
            role.len() + content.len() + named + json_bytes(tool_calls)
        };
        self.check_text("messages", messages.iter().map(bytes).sum())
    }

    /// Takes permits for the choices of `prompts` prompts.
    fn reserve(&self, prompts: usize, params: &Params) -> Result<OwnedSemaphorePermit, ApiError> {
        let count = (prompts as u32).saturating_mul(params.choices);
        if count > self.choices_max {
            let message = format!("expected at most {} choices of all prompts, found {count}", self.choices_max);
            return Err(ApiError::field("n", message));
        }
        let permit = self.choices.clone().try_acquire_many_owned(count);
        permit.map_err(|_| ApiError::busy("too many requests wait already"))
    }

    /// Takes permits for the log-probabilities of a reply: the largest number that it can have.
    fn reserve_scores(&self, asked: &Asked, choices: u32) -> Result<Option<OwnedSemaphorePermit>, ApiError> {
        let Some(top) = asked.settings.logprobs else { return Ok(None) };
        let context_max = u64::from(self.model.context_max);
        let tokens = |prompt: &Vec<u32>| {
            let length = prompt.len() as u64;
            let generated = context_max.saturating_sub(length).min(u64::from(asked.tokens_max));
            asked.scores_prompt.map_or(0, |_| length) + u64::from(choices) * generated
        };
        let count = asked.prompts.iter().map(tokens).sum::<u64>() * (1 + u64::from(top));
        if count > SCORES_MAX {
            let message = format!(
                "expected at most {SCORES_MAX} log-probabilities of all tokens and choices, found up to {count}"
            );
            return Err(ApiError::field("logprobs", message));
        }
        let permit = self.scores.clone().try_acquire_many_owned(count as u32);
        permit.map(Some).map_err(|_| ApiError::busy("too many log-probabilities are being computed"))
    }

    /// Compiles a grammar; `field` names the field that asks for it.
    async fn grammar(&self, source: Source, field: &str) -> Result<Grammar, ApiError> {
        let (vocabulary, vocab, eos) = (self.vocabulary.clone(), self.model.vocab, self.model.eos.clone());
        let question = move |tokens: &mut Tokens| {
            tokens.check_grammar(&source, vocab, &eos)?;
            let mut made = lock(&vocabulary);
            let vocabulary = match &*made {
                Some(vocabulary) => vocabulary.clone(),
                None => made.insert(Vocabulary::new(&tokens.token_bytes(vocab)?, &eos)?).clone(),
            };
            drop(made);
            Ok(vocabulary.compile(&source)?)
        };
        self.grammars.ask(question).await.map_err(|error| match error.status {
            StatusCode::BAD_REQUEST => ApiError::field(field, error.message),
            _ => error,
        })
    }

    /// Compiles the grammar of a text. If it is refused, the error names the schema and the part of it.
    async fn wanted(&self, wanted: Wanted) -> Result<Grammar, ApiError> {
        let Wanted { source, field, schemas } = wanted;
        let refused = match self.grammar(source, field).await {
            Err(error) if error.status == StatusCode::BAD_REQUEST => error,
            made => return made,
        };
        for (field, schema) in schemas {
            self.grammar(schema, &field).await?;
        }
        Err(refused)
    }

    /// Sends requests to the engine, and replies once it has taken all of them. `permit` is from [`Server::reserve`].
    async fn order(&self, kind: Kind, params: Params, asked: Asked, permit: OwnedSemaphorePermit) -> Answered {
        let arrived = Instant::now();
        let scores = self.reserve_scores(&asked, params.choices)?;
        let Asked { prompts, echoes, tokens_max, settings, scores_prompt, grammar, reader } = asked;
        if settings.min_tokens > tokens_max {
            let message = format!("expected at most {tokens_max}, as `max_tokens`, found {}", settings.min_tokens);
            return Err(ApiError::field("min_tokens", message));
        }
        let health = self.desk.health();
        if let Some(trouble) = health.trouble {
            return Err(ApiError::dead(trouble));
        }
        let count = prompts.len() as u32 * params.choices;
        let (vocab, eos) = (self.model.vocab, &self.model.eos);
        let seed = settings.sampling.seed;
        let seeded = |at: u32| {
            let sampling = SampleSettings { seed: seed.wrapping_add(u64::from(at)), ..settings.sampling };
            RequestSettings { sampling, ..settings.clone() }.resolve(vocab, eos)
        };
        let choices = (0..params.choices).map(seeded).collect::<Result<Vec<_>, _>>()?;
        let prompt_ids = params.token_ids.then(|| prompts.clone());
        let prompt_tokens = prompts.iter().map(|prompt| prompt.len() as u32).sum();
        let (answers, mut answered) = unbounded_channel();
        let deadline = Some(self.desk.now() + self.time_max);
        for (prompt, first_choice) in prompts.into_iter().zip((0..).step_by(params.choices as usize)) {
            let (choices, grammar) = (choices.clone(), grammar.clone());
            let ask = Ask { prompt, tokens_max, choices, scores_prompt, grammar, deadline };
            let text = TextSettings {
                stops: params.stops.clone(),
                min_tokens: settings.min_tokens,
                specials: match params.skip_special && reader.as_ref().is_some_and(Reader::needs_marks) {
                    true => Specials::Marks,
                    false => Specials::of(params.skip_special),
                },
                one_call: reader.clone().filter(Reader::is_single),
            };
            let order = Order { text, first_choice, choices: params.choices, answers: answers.clone(), arrived };
            self.desk.order(ask, order);
        }
        drop(answers);
        let mut held = Held { desk: self.desk.clone(), requests: vec![], _permit: permit, scores };
        let orders = (count / params.choices) as usize;
        let early = all_taken(&mut held, orders, &mut answered).await.map_err(|error| of_kind(kind, error))?;
        lock(&self.desk.metrics).prompt_tokens += u64::from(prompt_tokens);
        let id = format!("{:016x}", fresh_seed());
        let head = Head {
            kind,
            id: match kind {
                Kind::Chat => format!("chatcmpl-{id}"),
                Kind::Completion => format!("cmpl-{id}"),
            },
            created_s: now_s(),
            model: self.model.name.clone(),
            choices: params.choices,
            echoes,
            prompt_tokens,
            prompt_ids,
            logprobs: settings.logprobs.is_some(),
            reader,
            usage: params.usage,
            spent: Spent::new(prompt_tokens),
        };
        let spent = head.spent.clone();
        let reply = Reply { head, early, answers: answered, held, left: count };
        let mut response = if params.stream { as_events(reply.stream()) } else { as_json(reply.whole().await?) };
        response.extensions_mut().insert(spent);
        Ok(response)
    }
}

fn as_events(body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

/// Waits until the engine has taken `orders` requests. Returns the answers that came in the meantime.
async fn all_taken(
    held: &mut Held,
    orders: usize,
    answers: &mut UnboundedReceiver<Answer>,
) -> Result<VecDeque<Answer>, ApiError> {
    let mut early = VecDeque::new();
    while held.requests.len() < orders {
        let answer = answers.recv().await.ok_or_else(|| ApiError::dead("the engine ended"))?;
        match answer.said {
            Said::Refused(error) => return Err(error),
            Said::Taken(request) => held.requests.push(request),
            _ => early.push_back(answer),
        }
    }
    Ok(early)
}

/// Names `messages` instead of `prompt` in an error of a chat.
fn of_kind(kind: Kind, error: ApiError) -> ApiError {
    match (kind, error.param.as_deref()) {
        (Kind::Chat, Some("prompt")) => {
            let message = error.message.replacen("`prompt`", "`messages`", 1);
            ApiError { message, param: Some("messages".to_string()), ..error }
        }
        _ => error,
    }
}

/// The requests that an endpoint orders, with the extras of their reply.
struct Asked {
    prompts: Vec<Vec<u32>>,
    echoes: Vec<Echo>,
    tokens_max: u32,
    settings: RequestSettings,
    scores_prompt: Option<u32>,
    grammar: Option<Grammar>,
    reader: Option<Reader>,
}

type Shared = State<Arc<Server>>;

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn json_response(value: &Value) -> Response<Body> {
    as_json(Body::from(value.to_string()))
}

/// Bytes that values take as JSON.
fn json_bytes(values: &[Value]) -> usize {
    values.iter().map(|value| value.to_string().len()).sum()
}

fn as_json(body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Reads a body and answers it.
async fn respond<F>(
    server: Arc<Server>,
    request: Request,
    endpoint: impl FnOnce(Arc<Server>, Bytes) -> F,
) -> Response<Body>
where
    F: Future<Output = Answered>,
{
    let answered = match server.body(request).await {
        Ok((body, _permit)) => endpoint(server, body).await,
        Err(error) => Err(error),
    };
    answered.unwrap_or_else(|error| error.response())
}

/// The chat page: one file that loads no other. It asks for the API key itself.
async fn page() -> Response<Body> {
    const PAGE: &str = include_str!("page.html");
    let mut response = Response::new(Body::from(PAGE));
    for (name, value) in [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CACHE_CONTROL, "no-cache"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (
            header::CONTENT_SECURITY_POLICY,
            // The page's own policy says what it may load.
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        ),
    ] {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Facts for clients that count tokens themselves, with the names that vLLM uses.
async fn tokenizer_info(State(server): Shared, headers: HeaderMap) -> Response<Body> {
    if let Err(error) = server.authorised(&headers) {
        return error.response();
    }
    match server.encoders.ask(Tokens::config).await {
        Ok(config) => json_response(&Value::Object(config)),
        Err(error) => error.response(),
    }
}

async fn health(State(server): Shared) -> Response<Body> {
    let health = server.desk.health();
    match health.trouble {
        None => json_response(&json!({ "status": "ok" })),
        Some(trouble) => ApiError::dead(trouble).response(),
    }
}

async fn metrics(State(server): Shared, headers: HeaderMap) -> Response<Body> {
    if let Err(error) = server.authorised(&headers) {
        return error.response();
    }
    let figures = server.desk.health().figures;
    let mut response = Response::new(Body::from(lock(&server.desk.metrics).print(&figures)));
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

async fn version() -> Response<Body> {
    json_response(&json!({ "version": env!("CARGO_PKG_VERSION") }))
}

impl Server {
    fn model_object(&self) -> Value {
        let Model { name, context_max, .. } = &self.model;
        json!({
            "id": name,
            "object": "model",
            "created": self.started_s,
            "owned_by": "monobloc",
            "max_model_len": context_max,
        })
    }
}

async fn models(State(server): Shared, headers: HeaderMap) -> Response<Body> {
    match server.authorised(&headers) {
        Ok(()) => json_response(&json!({ "object": "list", "data": [server.model_object()] })),
        Err(error) => error.response(),
    }
}

async fn model(State(server): Shared, name: Result<Path<String>, PathRejection>, headers: HeaderMap) -> Response<Body> {
    match server.authorised(&headers) {
        Ok(()) if name.is_ok_and(|Path(name)| name == server.model.name) => json_response(&server.model_object()),
        Ok(()) => {
            let message = format!("no such model is served here, expected `{}`", server.model.name);
            ApiError::new(StatusCode::NOT_FOUND, message).with_code("model_not_found").response()
        }
        Err(error) => error.response(),
    }
}

async fn embeddings(State(server): Shared, headers: HeaderMap) -> Response<Body> {
    let refused = match server.authorised(&headers) {
        Ok(()) => ApiError::new(StatusCode::NOT_IMPLEMENTED, "this server decodes text and has no embeddings")
            .with_code("not_implemented"),
        Err(error) => error,
    };
    refused.response()
}

async fn nothing(method: Method, request: Request) -> Response<Body> {
    let path: String = request.uri().path().chars().take(200).collect();
    ApiError::new(StatusCode::NOT_FOUND, format!("there is no `{method} {path}` here")).response()
}

async fn wrong_method(method: Method, request: Request) -> Response<Body> {
    let path: String = request.uri().path().chars().take(200).collect();
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, format!("`{path}` has no `{method}`")).response()
}

/// How a reply repeats a prompt; `scored`: with log-probabilities of its tokens.
fn echoed(tokens: &mut Tokens, ids: &[u32], text: String, scored: bool) -> Result<Echo, Fault> {
    let first = tokens.pieces(ids.first().copied().into_iter().collect())?;
    let first = first.into_iter().map(|piece| piece.text).collect();
    if !scored {
        return Ok(Echo { text, first, widths: vec![] });
    }
    let part = TextPart { text: fresh_seed(), ids: ids.to_vec(), specials: Specials::Shown, ends: true };
    let mut parts = tokens.texts(vec![part])?.concat();
    // What is held back to the end belongs to the last token.
    let rest = parts.pop().unwrap_or_default();
    if let Some(last) = parts.last_mut() {
        last.push_str(&rest);
    }
    Ok(Echo { widths: widths(&text, &parts), text, first })
}

async fn completions(server: Arc<Server>, body: Bytes) -> Answered {
    let mut fields = Fields::of(&body)?;
    let params = Params::take(&mut fields, &server.model.name)?;
    let Prompts(prompts) = fields.need("prompt")?;
    let logprobs = top_logprobs("logprobs", fields.take("logprobs")?)?;
    let echo = fields.take("echo")?.unwrap_or(false);
    let special = fields.take("add_special_tokens")?.unwrap_or(true);
    fields.neutral("best_of", &["1"])?;
    fields.neutral("suffix", &["\"\""])?;
    fields.finish()?;
    drop(body);
    let scores_prompt = logprobs.filter(|_| echo);
    if params.stream && scores_prompt.is_some() && params.choices > 1 {
        return Err(ApiError::field("n", "a stream repeats the prompt's log-probabilities for one choice only"));
    }
    // Taken before the tokenizer does any work for the request.
    let permit = server.reserve(prompts.len(), &params)?;
    let skip_special = params.skip_special;
    let (mut all, mut echoes) = (vec![], vec![]);
    for prompt in prompts {
        match &prompt {
            Prompt::Text(text) => server.check_text("prompt", text.len())?,
            // A prompt that is too long is refused when it is ordered, without work of the tokenizer.
            Prompt::Ids(ids) if !echo || ids.len() > server.model.context_max as usize => {
                all.push(ids.clone());
                continue;
            }
            Prompt::Ids(_) => {}
        }
        // One question for each prompt, so that other requests get their turn in between.
        let question = move |tokens: &mut Tokens| {
            let (ids, text) = match prompt {
                Prompt::Text(text) => (tokens.encode(&text, special)?, Some(text)),
                Prompt::Ids(ids) => (ids, None),
            };
            if !echo {
                return Ok((ids, None));
            }
            let text = match text {
                Some(text) => text,
                None => tokens.decode(vec![ids.clone()], skip_special)?.concat(),
            };
            let echo = echoed(tokens, &ids, text, scores_prompt.is_some())?;
            Ok((ids, Some(echo)))
        };
        let (ids, echo) = server.encoders.ask(question).await?;
        all.push(ids);
        echoes.extend(echo);
    }
    let prompts = all;
    let grammar = match params.format.clone() {
        Some(source) => Some(server.grammar(source, RESPONSE_FORMAT).await?),
        None => None,
    };
    let settings = RequestSettings { logprobs, ..params.settings.clone() };
    let tokens_max = params.tokens_max.unwrap_or(COMPLETION_TOKENS);
    let asked = Asked { prompts, echoes, tokens_max, settings, scores_prompt, grammar, reader: None };
    server.order(Kind::Completion, params, asked, permit).await
}

/// A message as clients send it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SentMessage {
    role: String,
    content: Option<Content>,
    refusal: Option<IgnoredAny>,
    /// Clients of OpenAI send an empty list.
    annotations: Option<Vec<IgnoredAny>>,
    tool_calls: Option<Vec<Sent<SentCall>>>,
    tool_call_id: Option<String>,
    /// Name of who speaks, or of the tool whose result this is.
    name: Option<String>,
    /// What the model thought, as replies have it.
    reasoning_content: Option<String>,
    /// The same, as newer servers name it.
    reasoning: Option<String>,
    /// What a client of OpenAI made of the content; templates show the content.
    #[serde(rename = "parsed")]
    _parsed: Option<IgnoredAny>,
    /// A hint for caches of other servers.
    #[serde(rename = "cache_control")]
    _cache_control: Option<IgnoredAny>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SentCall {
    id: Option<String>,
    /// `function` where it is left out.
    #[serde(rename = "type")]
    kind: Option<String>,
    function: Sent<SentCalled>,
    /// Where the call was in a stream. Clients that put a stream together send it back; the order of the list counts.
    #[serde(rename = "index")]
    _index: Option<u32>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SentCalled {
    name: String,
    /// A JSON object as text, or itself; an empty text for a call without arguments.
    arguments: Option<Box<RawValue>>,
    /// What a client of OpenAI made of the arguments.
    #[serde(rename = "parsed_arguments")]
    _parsed: Option<IgnoredAny>,
}

enum Content {
    Text(String),
    Parts(Vec<Part>),
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Content, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Content;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a text or a list of parts")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Content, E> {
                Ok(Content::Text(text.to_string()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Content, A::Error> {
                few(list, PARTS_MAX).map(Content::Parts)
            }
        }
        deserializer.deserialize_any(Any)
    }
}

/// A part of a message. Any other field belongs to another kind of part.
struct Part {
    kind: String,
    text: Option<String>,
    /// The first field beyond these.
    other: Option<String>,
}

impl<'de> Deserialize<'de> for Part {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Part, D::Error> {
        struct Named;
        impl<'de> Visitor<'de> for Named {
            type Value = Part;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a part with its `type`")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Part, A::Error> {
                let (mut kind, mut text, mut other) = (None, None, None);
                while let Some(key) = map.next_key::<String>()? {
                    match key.as_str() {
                        "type" => kind = map.next_value()?,
                        "text" => text = map.next_value()?,
                        // A hint for caches of other servers.
                        "cache_control" => drop(map.next_value::<IgnoredAny>()?),
                        _ => {
                            if map.next_value::<Option<IgnoredAny>>()?.is_some() {
                                other.get_or_insert(key);
                            }
                        }
                    }
                }
                Ok(Part { kind: kind.ok_or_else(|| A::Error::missing_field("type"))?, text, other })
            }
        }
        deserializer.deserialize_map(Named)
    }
}

/// The arguments of a call as an object: templates print it as JSON themselves.
fn object_of(sent: Option<&RawValue>) -> Result<Map<String, Value>, String> {
    let no_object = || "expected a JSON object, as text or itself".to_string();
    let sent = sent.map_or("{}", RawValue::get);
    let text = match sent.starts_with('"') {
        true => serde_json::from_str(sent).map_err(|_| no_object())?,
        false => sent.to_string(),
    };
    let text = if matches!(text.trim(), "" | "null") { "{}" } else { &text };
    if let Some(number) = beyond_64_bits(text) {
        return Err(format!("the number {number} has more than 64 bits, and the chat template would show another one"));
    }
    serde_json::from_str(text).map_err(|_| no_object())
}

fn messages(fields: &mut Fields<'_>) -> Result<Vec<Message>, ApiError> {
    let Few(sent) = fields.need::<Few<Sent<SentMessage>, MESSAGES_MAX>>("messages")?;
    if sent.is_empty() {
        return Err(ApiError::field("messages", format!("expected 1 to {MESSAGES_MAX}, found 0")));
    }
    let message = |(at, Sent(sent)): (usize, Sent<SentMessage>)| {
        let SentMessage {
            role,
            content,
            refusal,
            annotations,
            tool_calls,
            tool_call_id,
            name,
            reasoning_content,
            reasoning,
            _parsed: _,
            _cache_control: _,
        } = sent;
        let reasoning_content = reasoning_content.or(reasoning);
        for (name, sent) in
            [("refusal", refusal.is_some()), ("annotations", annotations.is_some_and(|list| !list.is_empty()))]
        {
            if sent {
                return Err(unsupported(&format!("messages[{at}].{name}")));
            }
        }
        let tool_calls = tool_calls.unwrap_or_default().into_iter().enumerate();
        let tool_calls = tool_calls.map(|(call, Sent(sent))| {
            let SentCall { id, kind, function: Sent(SentCalled { name, arguments, _parsed: _ }), _index: _ } = sent;
            let place = |rest: &str| format!("messages[{at}].tool_calls[{call}].{rest}");
            if kind.is_some_and(|kind| kind != "function") {
                return Err(unsupported(&place("type")));
            }
            let refused = |message: String| ApiError::field(place("function.arguments"), message);
            let arguments = object_of(arguments.as_deref()).map_err(refused)?;
            Ok(json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } }))
        });
        let tool_calls = tool_calls.collect::<Result<Vec<_>, ApiError>>()?;
        let content = match content {
            // An answer may have calls and no text.
            None if role != "assistant" => {
                return Err(ApiError::field(format!("messages[{at}].content"), "is missing"));
            }
            None => String::new(),
            Some(Content::Text(text)) => text,
            Some(Content::Parts(parts)) => {
                let short = |text: &str| text.chars().take(40).collect::<String>();
                let text = |Part { kind, text, other }: Part| {
                    let place = format!("messages[{at}].content[type={}]", short(&kind));
                    match other {
                        _ if kind != "text" => Err(unsupported(&place)),
                        Some(other) => Err(unsupported(&format!("{place}.{}", short(&other)))),
                        None => text.ok_or_else(|| ApiError::field(format!("{place}.text"), "is missing")),
                    }
                };
                // As vLLM and llama.cpp join them.
                parts.into_iter().map(text).collect::<Result<Vec<_>, _>>()?.join("\n")
            }
        };
        Ok(Message { role, content, tool_calls, tool_call_id, name, reasoning_content })
    };
    sent.into_iter().enumerate().map(message).collect()
}

/// The grammar that a chat asks for.
struct Wanted {
    source: Source,
    /// The field that asks for it.
    field: &'static str,
    /// Schemas in the source, by their fields.
    schemas: Vec<(String, Source)>,
}

impl Wanted {
    /// That of `response_format`.
    fn format(source: Source) -> Wanted {
        Wanted { source, field: RESPONSE_FORMAT, schemas: vec![] }
    }

    /// Lets the answer come after thoughts, if the model may think. Returns whether it may.
    fn after_thoughts(&mut self, thinking: Thinking) -> Result<bool, ApiError> {
        let Source::Json(schema) = &self.source else { return Ok(false) };
        let lark = match thinking {
            Thinking::Channels(channels) => harmony::answer(channels, schema),
            Thinking::Open => reader::answer(true, schema),
            Thinking::Possible => reader::answer(false, schema),
            Thinking::None | Thinking::Over => return Ok(false),
        };
        let lark = lark.map_err(|error| ApiError::field(self.field, error))?;
        let schema = std::mem::replace(&mut self.source, Source::Lark(lark));
        self.schemas = vec![(self.field.to_string(), schema)];
        Ok(true)
    }
}

/// What a chat template is given, and how its texts call tools.
struct Conversation {
    messages: Vec<Message>,
    tools: Option<Tools>,
    settings: Map<String, Value>,
    /// The field that asks for a setting which the template may not read.
    settings_field: &'static str,
}

impl Conversation {
    /// # Errors
    /// Fields of another form; a conversation that is too long.
    fn take(fields: &mut Fields<'_>, server: &Server) -> Result<Conversation, ApiError> {
        const EFFORTS: [&str; 6] = ["none", "minimal", "low", "medium", "high", "xhigh"];
        let messages = messages(fields)?;
        server.check_messages(&messages)?;
        let tools = Tools::take(fields)?;
        let mut settings: Map<String, Value> = fields.take(SETTINGS_FIELD)?.unwrap_or_default();
        let mut settings_field = SETTINGS_FIELD;
        if let Some(effort) = fields.take::<String>(EFFORT_SETTING)? {
            if !EFFORTS.contains(&effort.as_str()) {
                return Err(ApiError::field(EFFORT_SETTING, format!("expected one of {}", EFFORTS.join(", "))));
            }
            if settings.is_empty() {
                settings_field = EFFORT_SETTING;
            }
            settings.entry(EFFORT_SETTING).or_insert(Value::from(effort));
        }
        Ok(Conversation { messages, tools, settings, settings_field })
    }

    /// The form of calls; `None`: no tools are offered. Refuses tools, or earlier calls, that the template does not show.
    async fn call_form(&self, server: &Server) -> Result<Option<CallForm>, ApiError> {
        let in_field = |field: &str| {
            let field = field.to_string();
            move |error: ApiError| ApiError { param: Some(field), ..error }.with_code("unsupported_parameter")
        };
        let calls =
            self.messages.iter().any(|message| !message.tool_calls.is_empty() || message.tool_call_id.is_some());
        if self.tools.is_some() {
            return server.encoders.ask(Tokens::call_form).await.map(Some).map_err(in_field("tools"));
        }
        if calls {
            server.encoders.ask(Tokens::shows_calls).await.map_err(in_field("messages"))?;
        }
        Ok(None)
    }

    async fn encode(self, server: &Server, reply: bool) -> Result<crate::tokenizer::Prompt, ApiError> {
        let Conversation { messages, tools, settings, settings_field } = self;
        let tools = tools.map_or(vec![], |tools| tools.for_template());
        server.check_text("tools", json_bytes(&tools))?;
        let chat = Chat { messages, tools, reply, settings };
        let encoded = server.encoders.ask(move |tokens| tokens.encode_chat(chat)).await;
        encoded.map_err(|error| {
            let of_settings = error.message.contains(" reads no `");
            let field = if of_settings { settings_field } else { "messages" };
            ApiError { param: Some(field.to_string()), ..error }
        })
    }
}

async fn chat(server: Arc<Server>, body: Bytes) -> Answered {
    let mut fields = Fields::of(&body)?;
    let params = Params::take(&mut fields, &server.model.name)?;
    let conversation = Conversation::take(&mut fields, &server)?;
    let wants = fields.take("logprobs")?.unwrap_or(false);
    let top = top_logprobs("top_logprobs", fields.take("top_logprobs")?)?;
    if top.is_some() && !wants {
        return Err(ApiError::field("top_logprobs", "expected only with `logprobs`"));
    }
    let tokens_max = fields.take::<u32>("max_completion_tokens")?.or(params.tokens_max);
    let reply = fields.take("add_generation_prompt")?.unwrap_or(true);
    for (name, neutral) in [
        ("functions", &["[]"][..]),
        ("function_call", &["\"none\""]),
        ("modalities", &["[\"text\"]"]),
        ("audio", &[]),
        ("prediction", &[]),
        ("verbosity", &["\"medium\""]),
        ("web_search_options", &[]),
        ("documents", &["[]"]),
        ("echo", &["false"]),
        ("include_reasoning", &["true"]),
    ] {
        fields.neutral(name, neutral)?;
    }
    fields.finish()?;
    drop(body);
    let permit = server.reserve(1, &params)?;
    let form = conversation.call_form(&server).await?;
    let tools = conversation.tools.clone().zip(form);
    let mut wanted = params.format.clone().map(Wanted::format);
    if let Some((tools, form)) = &tools {
        if wanted.is_some() {
            return Err(ApiError::field(RESPONSE_FORMAT, "expected only where no tool may be called"));
        }
        if !params.skip_special {
            return Err(ApiError::field("skip_special_tokens", "expected `true` beside `tools`"));
        }
        wanted = tools.source(*form)?.map(|source| Wanted { source, field: "tools", schemas: tools.schemas() });
        if wanted.is_some() {
            within_grammar(&params.settings, if tools.must_call() { "tool_choice" } else { "strict" })?;
        }
    }
    let prompt = conversation.encode(&server, reply).await?;
    // A text that has to be a call begins with that and not with thoughts.
    let free = match (&mut wanted, &tools) {
        (Some(wanted), None) => wanted.after_thoughts(prompt.thinking)?,
        (_, tools) => tools.as_ref().is_none_or(|(tools, _)| !tools.must_call()),
    };
    let sought = Sought {
        reasoning: free && prompt.thinking != Thinking::None,
        thinks: free && prompt.thinking == Thinking::Open,
        channels: matches!(prompt.thinking, Thinking::Channels(_)),
        calls: tools.map(|(tools, form)| tools.calls(form)),
    };
    let reader = (sought.reasoning || sought.calls.is_some()).then(|| Reader::new(sought));
    let grammar = match wanted {
        Some(wanted) => Some(server.wanted(wanted).await?),
        None => None,
    };
    let settings = RequestSettings { logprobs: wants.then_some(top.unwrap_or(0)), ..params.settings.clone() };
    // By default, as many as fit into the context.
    let tokens_max = tokens_max.unwrap_or(u32::MAX);
    let asked =
        Asked { prompts: vec![prompt.ids], echoes: vec![], tokens_max, settings, scores_prompt: None, grammar, reader };
    server.order(Kind::Chat, params, asked, permit).await
}

async fn tokenize(server: Arc<Server>, body: Bytes) -> Answered {
    let mut fields = Fields::of(&body)?;
    take_model(&mut fields, &server.model.name)?;
    let prompt: Option<String> = fields.take_long("prompt")?;
    let special = fields.take("add_special_tokens")?.unwrap_or(true);
    let reply = fields.take("add_generation_prompt")?.unwrap_or(true);
    let tokens = match prompt {
        Some(prompt) => {
            fields.finish()?;
            server.check_text("prompt", prompt.len())?;
            server.encoders.ask(move |tokens| tokens.encode(&prompt, special)).await?
        }
        None => {
            let conversation = Conversation::take(&mut fields, &server)?;
            fields.finish()?;
            conversation.call_form(&server).await?;
            conversation.encode(&server, reply).await?.ids
        }
    };
    let (count, context_max) = (tokens.len(), server.model.context_max);
    Ok(json_response(&json!({ "count": count, "max_model_len": context_max, "tokens": tokens })))
}

async fn detokenize(server: Arc<Server>, body: Bytes) -> Answered {
    let mut fields = Fields::of(&body)?;
    take_model(&mut fields, &server.model.name)?;
    let ids: Vec<u32> = fields.need("tokens")?;
    fields.finish()?;
    let (most, vocab) = ((server.model.context_max as usize).max(TEXT_BYTES), server.model.vocab);
    if ids.len() > most {
        return Err(ApiError::field("tokens", format!("expected at most {most}, found {}", ids.len())));
    }
    if let Some(id) = ids.iter().find(|&&id| id >= vocab) {
        return Err(ApiError::field("tokens", format!("token {id} is not below the vocabulary of {vocab}")));
    }
    let text = server.encoders.ask(move |tokens| tokens.decode(vec![ids], false)).await?;
    Ok(json_response(&json!({ "prompt": text.concat() })))
}
