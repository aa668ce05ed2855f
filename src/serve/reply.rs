//! Owns replies: the choices of a request, as one JSON object or as a stream of events.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::fmt::Write as _;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use http_body::{Frame, SizeHint};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::UnboundedReceiver;

use super::calls::Call;
use super::desk::{Answer, Desk, Said, ScoredToken};
use super::error::ApiError;
use super::log::Spent;
use super::reader::{Piece, Reader};
use super::scores::Scores;
use crate::engine::RequestId;

/// Most answers that one event of a stream combines.
const ANSWERS_AT_ONCE: usize = 64;

/// The endpoint of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Chat,
    Completion,
}

/// A prompt of a request, as its reply repeats it.
#[derive(Debug, Clone, Default)]
pub struct Echo {
    pub text: String,
    /// The first token, which has no log-probability.
    pub first: String,
    /// Characters of the text that each token adds, if the reply scores the prompt.
    pub widths: Vec<u32>,
}

impl Echo {
    fn first(&self) -> (&str, u32) {
        (&self.first, self.widths.first().copied().unwrap_or(0))
    }

    /// Gives scored tokens of the prompt their characters; `before` of them, without the first one, came earlier.
    fn place(&self, scored: &mut [ScoredToken], before: usize) {
        for (token, width) in scored.iter_mut().zip(self.widths.iter().skip(1 + before)) {
            token.characters = *width;
        }
    }
}

/// The part of a request that its reply needs.
#[derive(Debug)]
pub struct Head {
    pub kind: Kind,
    pub id: String,
    pub created_s: u64,
    pub model: String,
    /// Choices for each prompt, in the order of the prompts.
    pub choices: u32,
    /// One for each prompt, if the request asks for it.
    pub echoes: Vec<Echo>,
    pub prompt_tokens: u32,
    /// The ids of each prompt, if the reply shall have ids of tokens.
    pub prompt_ids: Option<Vec<Vec<u32>>>,
    pub logprobs: bool,
    /// Reads a text, if the request offers tools or the model thinks.
    pub reader: Option<Reader>,
    /// A stream ends with its usage.
    pub usage: bool,
    /// Counts the tokens for the log.
    pub spent: Spent,
}

/// The requests of a reply and its permits. Dropping it cancels requests that still run.
pub struct Held {
    pub desk: Desk,
    pub requests: Vec<RequestId>,
    pub _permit: OwnedSemaphorePermit,
    /// Permits for the log-probabilities of the reply, until the client has read them.
    pub scores: Option<OwnedSemaphorePermit>,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.requests.iter().for_each(|request| self.desk.cancel(*request));
    }
}

/// The answers to a request.
pub struct Reply {
    pub head: Head,
    /// Answers that arrived before the engine had taken all requests of the reply.
    pub early: VecDeque<Answer>,
    pub answers: UnboundedReceiver<Answer>,
    pub held: Held,
    /// Choices that did not end yet.
    pub left: u32,
}

/// Counts for `usage`.
#[derive(Debug, Default)]
struct Usage {
    completion: u32,
    /// For each prompt, its tokens that the cache had when the first of its choices began: later ones find what that one has computed.
    cached: BTreeMap<usize, u32>,
}

impl Usage {
    fn began(&mut self, prompt: usize, cached: u32) {
        let known = self.cached.entry(prompt).or_insert(cached);
        *known = cached.min(*known);
    }

    fn object(&self, head: &Head) -> Value {
        let Usage { completion, cached } = self;
        let cached: u32 = cached.values().sum();
        json!({
            "prompt_tokens": head.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": head.prompt_tokens + completion,
            "prompt_tokens_details": { "cached_tokens": cached },
        })
    }
}

/// The bytes of a whole reply, with the permits of its log-probabilities until the client has read them.
struct WholeBody {
    bytes: Option<Bytes>,
    _scores: Option<OwnedSemaphorePermit>,
}

impl http_body::Body for WholeBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.get_mut().bytes.take().map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.bytes.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.bytes.as_ref().map_or(0, |bytes| bytes.len() as u64))
    }
}

/// JSON of a value whose keys are texts.
pub fn json_text(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_else(|_| "null".to_string())
}

/// A whole reply in the form of its JSON.
#[derive(Serialize)]
struct WholeReply<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<WholeChoice<'a>>,
    usage: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
}

#[derive(Serialize)]
struct WholeChoice<'a> {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    logprobs: Option<Scores<'a>>,
    finish_reason: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
}

/// A choice of a whole reply.
#[derive(Debug, Default)]
struct Whole {
    text: String,
    reasoning: String,
    calls: Vec<Call>,
    reader: Option<Reader>,
    prompt: Vec<ScoredToken>,
    scored: Vec<ScoredToken>,
    ids: Vec<u32>,
    reason: &'static str,
}

impl Whole {
    fn take(&mut self, pieces: Vec<Piece>) {
        for piece in pieces {
            match piece {
                Piece::Text(text) => self.text.push_str(&text),
                Piece::Reasoning(text) => self.reasoning.push_str(&text),
                Piece::Call(call) => self.calls.push(call),
            }
        }
    }

    /// The message of a chat's choice.
    fn message(&self) -> Value {
        let Whole { text, reasoning, calls, .. } = self;
        let is_answer = calls.is_empty() && reasoning.is_empty();
        let content = if text.is_empty() && !is_answer { Value::Null } else { json!(text) };
        let mut message = json!({ "role": "assistant", "content": content, "refusal": null });
        if !reasoning.is_empty() {
            message["reasoning_content"] = json!(reasoning);
        }
        if !calls.is_empty() {
            message["tool_calls"] = calls.iter().map(Call::object).collect();
        }
        message
    }
}

impl Reply {
    /// Waits for the end of all choices.
    ///
    /// # Errors
    /// A choice that ended with an error.
    pub async fn whole(mut self) -> Result<Body, ApiError> {
        let count = self.left as usize;
        let empty = || Whole { reader: self.head.reader.clone(), ..Whole::default() };
        let mut choices: Vec<Whole> = std::iter::repeat_with(empty).take(count).collect();
        let mut usage = Usage::default();
        while self.left > 0 {
            let next = match self.early.pop_front() {
                Some(answer) => Some(answer),
                None => self.answers.recv().await,
            };
            let Some(Answer { choice, said }) = next else { return Err(ApiError::dead("the engine ended")) };
            let Some(of) = choices.get_mut(choice as usize) else { continue };
            match said {
                Said::Refused(error) => return Err(error),
                Said::Taken(_) => {}
                Said::Began { cached } => usage.began((choice / self.head.choices) as usize, cached),
                Said::Prompt(mut scored) => {
                    if let Some(echo) = self.head.echoes.get((choice / self.head.choices) as usize) {
                        echo.place(&mut scored, of.prompt.len());
                    }
                    of.prompt.extend(scored);
                }
                Said::Part { text, token, scored } => {
                    usage.completion += u32::from(token.is_some());
                    self.head.spent.count(token.is_some());
                    of.ids.extend(token);
                    match &mut of.reader {
                        Some(reader) => {
                            let pieces = reader.push(&text);
                            of.take(pieces);
                        }
                        None => of.text.push_str(&text),
                    }
                    of.scored.extend(scored);
                }
                Said::Ended(reason) => {
                    of.reason = reason?;
                    if let Some(reader) = &mut of.reader {
                        let pieces = reader.finish(of.reason);
                        of.reason = reader.reason(of.reason);
                        of.take(pieces);
                    }
                    self.left -= 1;
                }
            }
        }
        let bytes = Some(Bytes::from(self.written(&choices, &usage)));
        Ok(Body::new(WholeBody { bytes, _scores: self.held.scores.take() }))
    }

    fn written(&self, choices: &[Whole], usage: &Usage) -> String {
        let head = &self.head;
        let written = choices.iter().enumerate().map(|(index, choice)| {
            let prompt = index / head.choices as usize;
            let echo = head.echoes.get(prompt);
            // Choices of a prompt share the log-probabilities of its tokens.
            let scored_prompt: &[ScoredToken] =
                if echo.is_some() { &choices[prompt * head.choices as usize].prompt } else { &[] };
            let scores = Scores {
                kind: head.kind,
                first: echo.map(Echo::first),
                scored: [scored_prompt, &choice.scored],
                offset: 0,
            };
            let (message, text) = match head.kind {
                Kind::Chat => (Some(choice.message()), None),
                Kind::Completion => (None, Some(echo.map_or(String::new(), |echo| echo.text.clone()) + &choice.text)),
            };
            let prompt_ids = head.prompt_ids.as_ref().filter(|_| head.kind == Kind::Completion);
            WholeChoice {
                index,
                message,
                text,
                logprobs: head.logprobs.then_some(scores),
                finish_reason: choice.reason,
                token_ids: head.prompt_ids.as_ref().map(|_| &*choice.ids),
                prompt_token_ids: prompt_ids.map(|prompts| &*prompts[prompt]),
            }
        });
        // A chat has one prompt.
        let prompt_ids = head.prompt_ids.as_ref().filter(|_| head.kind == Kind::Chat);
        json_text(&WholeReply {
            id: &head.id,
            object: match head.kind {
                Kind::Chat => "chat.completion",
                Kind::Completion => "text_completion",
            },
            created: head.created_s,
            model: &head.model,
            choices: written.collect(),
            usage: usage.object(head),
            prompt_token_ids: prompt_ids.and_then(|prompts| prompts.first()).map(|ids| &**ids),
        })
    }

    /// The body of a stream of events.
    pub fn stream(self) -> Body {
        let Head { kind, id, created_s, model, .. } = &self.head;
        let object = match kind {
            Kind::Chat => "chat.completion.chunk",
            Kind::Completion => "text_completion",
        };
        let mut prefix = json!({ "id": id, "object": object, "created": created_s, "model": model }).to_string();
        // Without the closing brace: the rest of each event follows.
        prefix.pop();
        let choices = self.left as usize;
        Body::new(Events {
            prefix,
            offsets: vec![0; choices],
            begun: vec![false; choices],
            prompted: vec![0; choices],
            readers: vec![self.head.reader.clone(); choices],
            calls: vec![0; choices],
            usage: Usage::default(),
            over: VecDeque::new(),
            reply: Some(self),
        })
    }
}

/// The news of a choice in an event of a stream.
enum Delta<'a> {
    Role,
    Text(&'a str),
    Reasoning(&'a str),
    /// A call, with its index among the calls of the choice.
    Call(u32, &'a Call),
    /// The `finish_reason`.
    End(&'static str),
}

impl<'a> Delta<'a> {
    /// `calls` counts the calls of the choice so far.
    fn of(piece: &'a Piece, calls: &mut u32) -> Delta<'a> {
        match piece {
            Piece::Text(text) => Delta::Text(text),
            Piece::Reasoning(text) => Delta::Reasoning(text),
            Piece::Call(call) => {
                *calls += 1;
                Delta::Call(*calls - 1, call)
            }
        }
    }
}

/// What an event has besides its text.
#[derive(Default)]
struct Beside {
    logprobs: Option<String>,
    /// The id of the token, if the request asks for ids.
    token: Option<u32>,
}

/// Writes the events of a choice.
struct Line<'a> {
    prefix: &'a str,
    head: &'a Head,
    index: u32,
    /// Whether the choice has had an event.
    begun: &'a mut bool,
    out: &'a mut String,
}

impl Line<'_> {
    /// Index of the prompt that the choice continues.
    fn prompt(&self) -> usize {
        (self.index / self.head.choices) as usize
    }

    fn say(&mut self, delta: &Delta<'_>, Beside { logprobs, token }: Beside) {
        let Line { prefix, head, index, .. } = *self;
        let body = match (head.kind, delta) {
            (Kind::Completion, Delta::Text(text)) => json!({ "text": text }),
            (Kind::Completion, _) => json!({ "text": "" }),
            (Kind::Chat, Delta::Role) => json!({ "delta": { "role": "assistant", "content": "" } }),
            (Kind::Chat, Delta::Text(text)) => json!({ "delta": { "content": text } }),
            (Kind::Chat, Delta::Reasoning(text)) => json!({ "delta": { "reasoning_content": text } }),
            (Kind::Chat, Delta::Call(at, call)) => {
                let mut object = json!({ "index": at });
                if let (Value::Object(object), Value::Object(call)) = (&mut object, call.object()) {
                    object.extend(call);
                }
                json!({ "delta": { "tool_calls": [object] } })
            }
            (Kind::Chat, Delta::End(_)) => json!({ "delta": {} }),
        };
        let body = body.to_string();
        // Without the object's braces.
        let body = &body[1..body.len() - 1];
        let logprobs = logprobs.as_deref().unwrap_or("null");
        let reason = if let Delta::End(reason) = delta { Value::from(*reason) } else { Value::Null };
        // The first event of a choice has the ids of its prompt: next to `choices` in a chat, inside the choice in a completion.
        let first = !std::mem::replace(self.begun, true);
        let prompt = head.prompt_ids.as_ref().filter(|_| first).map(|prompts| &prompts[self.prompt()]);
        let prompt = prompt.map_or(String::new(), |ids| format!(",\"prompt_token_ids\":{}", json!(ids)));
        let (in_choice, beside_choices) = match head.kind {
            Kind::Chat => ("", &*prompt),
            Kind::Completion => (&*prompt, ""),
        };
        let ids = match (&head.prompt_ids, token) {
            (None, _) => String::new(),
            (Some(_), None) => ",\"token_ids\":[]".to_string(),
            (Some(_), Some(id)) => format!(",\"token_ids\":[{id}]"),
        };
        let usage = if head.usage { ",\"usage\":null" } else { "" };
        let _ = write!(
            self.out,
            "data: {prefix},\"choices\":[{{\"index\":{index},{body},\"logprobs\":{logprobs},\"finish_reason\":{reason}{ids}{in_choice}}}]{beside_choices}{usage}}}\n\n"
        );
    }
}

/// A stream of events, made while its client reads.
struct Events {
    /// The text with which every event begins.
    prefix: String,
    /// For each choice, the characters of its tokens so far.
    offsets: Vec<usize>,
    begun: Vec<bool>,
    /// For each choice, scored tokens of its prompt so far.
    prompted: Vec<usize>,
    /// For each choice, the reader that finds calls in its text, and the number of calls so far.
    readers: Vec<Option<Reader>>,
    calls: Vec<u32>,
    usage: Usage,
    /// Bytes still to be sent after the last answer.
    over: VecDeque<Bytes>,
    /// `None` once all answers have arrived.
    reply: Option<Reply>,
}

impl Events {
    /// Takes an answer. Returns whether it was the last one.
    fn take(&mut self, answer: Answer, out: &mut String) -> Result<bool, ApiError> {
        let Events { prefix, offsets, begun, prompted, readers, calls, usage, reply, .. } = self;
        let Some(Reply { head, left, .. }) = reply else { return Ok(true) };
        let Answer { choice: index, said } = answer;
        let at = index as usize;
        let mut line = Line { prefix, head, index, begun: &mut begun[at], out };
        let mut scores = |first, scored: &[ScoredToken]| {
            let scores = Scores { kind: head.kind, first, scored: [&[], scored], offset: offsets[at] };
            head.logprobs.then(|| scores.event(&mut offsets[at]))
        };
        match said {
            Said::Refused(error) => return Err(error),
            Said::Taken(_) => {}
            Said::Began { cached } => {
                usage.began(line.prompt(), cached);
                match (head.kind, head.echoes.get(line.prompt())) {
                    (Kind::Chat, _) => line.say(&Delta::Role, Beside::default()),
                    (Kind::Completion, Some(echo)) => {
                        let first = scores(Some(echo.first()), &[]);
                        line.say(&Delta::Text(&echo.text), Beside { logprobs: first, token: None });
                    }
                    (Kind::Completion, None) => {}
                }
            }
            Said::Prompt(mut scored) => {
                if let Some(echo) = head.echoes.get(line.prompt()) {
                    echo.place(&mut scored, prompted[at]);
                }
                prompted[at] += scored.len();
                let logprobs = scores(None, &scored);
                line.say(&Delta::Text(""), Beside { logprobs, token: None });
            }
            Said::Part { text, token, scored } => {
                usage.completion += u32::from(token.is_some());
                head.spent.count(token.is_some());
                let logprobs = scores(None, &scored);
                let token = token.filter(|_| head.prompt_ids.is_some());
                let mut pieces = match &mut readers[at] {
                    Some(reader) => reader.push(&text),
                    None if text.is_empty() => vec![],
                    None => vec![Piece::Text(text)],
                };
                // A token that adds no text yet still needs an event for its probability and its id.
                if pieces.is_empty() && (token.is_some() || !scored.is_empty()) {
                    pieces.push(Piece::Text(String::new()));
                }
                let mut beside = Beside { logprobs, token };
                for piece in &pieces {
                    line.say(&Delta::of(piece, &mut calls[at]), std::mem::take(&mut beside));
                }
            }
            Said::Ended(reason) => {
                let reason = reason?;
                if head.kind == Kind::Chat && !*line.begun {
                    line.say(&Delta::Role, Beside::default());
                }
                let rest = readers[at].as_mut().map_or(vec![], |reader| reader.finish(reason));
                for piece in &rest {
                    line.say(&Delta::of(piece, &mut calls[at]), Beside::default());
                }
                let reason = readers[at].as_ref().map_or(reason, |reader| reader.reason(reason));
                line.say(&Delta::End(reason), Beside::default());
                *left -= 1;
            }
        }
        Ok(*left == 0)
    }

    /// Adds the end of the stream: the usage and `[DONE]`, or an error.
    fn end(&mut self, error: Option<&ApiError>) {
        if let Some(reply) = self.reply.take() {
            match error {
                Some(error) => self.over.push_back(Bytes::from(format!("data: {}\n\n", error.object()))),
                None if reply.head.usage => {
                    let usage = self.usage.object(&reply.head);
                    let event = format!("data: {},\"choices\":[],\"usage\":{usage}}}\n\n", self.prefix);
                    self.over.push_back(Bytes::from(event));
                }
                None => {}
            }
            self.over.push_back(Bytes::from_static(b"data: [DONE]\n\n"));
        }
    }
}

impl http_body::Body for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = self.get_mut();
        loop {
            if let Some(bytes) = this.over.pop_front() {
                return Poll::Ready(Some(Ok(Frame::data(bytes))));
            }
            let Some(reply) = &mut this.reply else { return Poll::Ready(None) };
            let mut answers: Vec<Answer> = reply.early.drain(..).collect();
            let count = answers.len();
            let count = if count > 0 {
                count
            } else {
                std::task::ready!(reply.answers.poll_recv_many(context, &mut answers, ANSWERS_AT_ONCE))
            };
            if count == 0 {
                this.end(Some(&ApiError::dead("the engine ended")));
                continue;
            }
            let mut out = String::new();
            for answer in answers {
                match this.take(answer, &mut out) {
                    Ok(false) => {}
                    Ok(true) => {
                        this.end(None);
                        break;
                    }
                    Err(error) => {
                        this.end(Some(&error));
                        break;
                    }
                }
            }
            if !out.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(Bytes::from(out)))));
            }
        }
    }
}
