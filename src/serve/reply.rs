//! Owns replies: what happened to the choices of a request, as one JSON object or as a stream of events.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::fmt::Write as _;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use http_body::Frame;
use serde_json::{Value, json};
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::UnboundedReceiver;

use super::desk::{Answer, Desk, Said, ScoredToken};
use super::error::ApiError;
use super::tools::{Call, Piece, Reader};
use crate::engine::RequestId;

/// Answers that one event of a stream is made of, at most.
const ANSWERS_AT_ONCE: usize = 64;

/// What JSON has for the logarithm of 0.
const LOGPROB_MIN: f64 = -9999.0;

/// Which endpoint it is.
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
}

/// What a reply says of its request.
#[derive(Debug)]
pub struct Head {
    pub kind: Kind,
    pub id: String,
    pub created_s: u64,
    pub model: String,
    /// Choices for each prompt, in the order of the prompts.
    pub choices: u32,
    /// One a prompt, if the request wants it.
    pub echoes: Vec<Echo>,
    pub prompt_tokens: u32,
    /// The ids of each prompt, if the reply has ids of tokens.
    pub prompt_ids: Option<Vec<Vec<u32>>>,
    pub logprobs: bool,
    /// What finds the calls of tools in a text, where there may be some.
    pub reader: Option<Reader>,
    /// A stream ends with its usage.
    pub usage: bool,
}

/// What the engine still does for a reply. Dropped early, it is cancelled.
pub struct Held {
    pub desk: Desk,
    pub requests: Vec<RequestId>,
    pub _permit: OwnedSemaphorePermit,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.requests.iter().for_each(|request| self.desk.cancel(*request));
    }
}

/// The answers to a request.
pub struct Reply {
    pub head: Head,
    /// Answers that came first.
    pub early: VecDeque<Answer>,
    pub answers: UnboundedReceiver<Answer>,
    pub _held: Held,
    /// Choices that did not end.
    pub left: u32,
}

/// Counts for `usage`.
#[derive(Debug, Default)]
struct Usage {
    completion: u32,
    cached: u32,
}

impl Usage {
    fn object(&self, head: &Head) -> Value {
        let Usage { completion, cached } = self;
        json!({
            "prompt_tokens": head.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": head.prompt_tokens + completion,
            "prompt_tokens_details": { "cached_tokens": cached },
        })
    }
}

/// Log-probabilities as the endpoint has them. `offset` is where the first token begins in its choice's text, in characters.
fn logprobs(kind: Kind, first: Option<&str>, scored: &[ScoredToken], offset: &mut usize) -> Value {
    let finite = |logprob: f64| logprob.max(LOGPROB_MIN);
    match kind {
        Kind::Chat => {
            let entry = |text: &str, logprob: f64| json!({ "token": text, "logprob": finite(logprob), "bytes": text.as_bytes() });
            let content = scored.iter().map(|token| {
                let mut object = entry(&token.text, token.logprob);
                object["top_logprobs"] = token.top.iter().map(|(text, logprob)| entry(text, *logprob)).collect();
                object
            });
            json!({ "content": content.collect::<Vec<_>>(), "refusal": null })
        }
        Kind::Completion => {
            let texts = first.into_iter().chain(scored.iter().map(|token| token.text.as_str()));
            let offsets: Vec<usize> =
                texts.clone().map(|text| std::mem::replace(offset, *offset + text.chars().count())).collect();
            let none = first.map(|_| Value::Null);
            let own = none.clone().into_iter().chain(scored.iter().map(|token| json!(finite(token.logprob))));
            let tops = scored.iter().map(|token| {
                // The most probable first; of two tokens with one text the more probable one. The token itself is always there.
                let mut top = serde_json::Map::new();
                for (text, logprob) in
                    token.top.iter().map(|(text, logprob)| (text, *logprob)).chain([(&token.text, token.logprob)])
                {
                    top.entry(text.clone()).or_insert(json!(finite(logprob)));
                }
                Value::Object(top)
            });
            json!({
                "tokens": texts.collect::<Vec<_>>(),
                "token_logprobs": own.collect::<Vec<_>>(),
                "top_logprobs": none.into_iter().chain(tops).collect::<Vec<_>>(),
                "text_offset": offsets,
            })
        }
    }
}

/// A choice of a whole reply.
#[derive(Debug, Default)]
struct Whole {
    text: String,
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
                Piece::Call(call) => self.calls.push(call),
            }
        }
    }

    /// Of a chat.
    fn message(&self) -> Value {
        let Whole { text, calls, .. } = self;
        if calls.is_empty() {
            return json!({ "role": "assistant", "content": text, "refusal": null });
        }
        let content = if text.is_empty() { Value::Null } else { json!(text) };
        let calls: Vec<Value> = calls.iter().map(Call::object).collect();
        json!({ "role": "assistant", "content": content, "refusal": null, "tool_calls": calls })
    }
}

impl Reply {
    /// Waits for the end of all choices.
    ///
    /// # Errors
    /// A choice that ended without a reason that clients know.
    pub async fn whole(mut self) -> Result<Value, ApiError> {
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
                Said::Began { cached } => usage.cached += cached,
                Said::Prompt(scored) => of.prompt.extend(scored),
                Said::Part { text, token, scored } => {
                    usage.completion += u32::from(token.is_some());
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
                        let pieces = reader.finish();
                        of.reason = reader.reason(of.reason);
                        of.take(pieces);
                    }
                    self.left -= 1;
                }
            }
        }
        let head = &self.head;
        // Choices of a prompt share the log-probabilities of its tokens.
        let prompts: Vec<Vec<ScoredToken>> =
            choices.chunks(head.choices as usize).map(|of| of[0].prompt.clone()).collect();
        let choices = choices.into_iter().enumerate().map(|(index, choice)| {
            let prompt = index / head.choices as usize;
            let echo = head.echoes.get(prompt);
            let logprobs = if head.logprobs {
                let scored = [if echo.is_some() { &prompts[prompt][..] } else { &[] }, &choice.scored].concat();
                logprobs(head.kind, echo.map(|echo| &*echo.first), &scored, &mut 0)
            } else {
                Value::Null
            };
            let mut object = match head.kind {
                Kind::Chat => json!({
                    "index": index,
                    "message": choice.message(),
                    "logprobs": logprobs,
                    "finish_reason": choice.reason,
                }),
                Kind::Completion => {
                    let text = echo.map_or(String::new(), |echo| echo.text.clone()) + &choice.text;
                    json!({ "index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.reason })
                }
            };
            if let Some(prompts) = &head.prompt_ids {
                object["token_ids"] = json!(choice.ids);
                if head.kind == Kind::Completion {
                    object["prompt_token_ids"] = json!(prompts[prompt]);
                }
            }
            object
        });
        let choices: Vec<Value> = choices.collect();
        let object = match head.kind {
            Kind::Chat => "chat.completion",
            Kind::Completion => "text_completion",
        };
        let mut reply = json!({
            "id": head.id,
            "object": object,
            "created": head.created_s,
            "model": head.model,
            "choices": choices,
            "usage": usage.object(head),
        });
        if let (Kind::Chat, Some(prompts)) = (head.kind, &head.prompt_ids) {
            reply["prompt_token_ids"] = json!(prompts.concat());
        }
        Ok(reply)
    }

    /// The body of a stream of events.
    pub fn stream(self) -> Body {
        let Head { kind, id, created_s, model, .. } = &self.head;
        let object = match kind {
            Kind::Chat => "chat.completion.chunk",
            Kind::Completion => "text_completion",
        };
        let mut prefix = json!({ "id": id, "object": object, "created": created_s, "model": model }).to_string();
        // The rest of each event follows.
        prefix.pop();
        let choices = self.left as usize;
        Body::new(Events {
            prefix,
            offsets: vec![0; choices],
            begun: vec![false; choices],
            readers: vec![self.head.reader.clone(); choices],
            calls: vec![0; choices],
            usage: Usage::default(),
            over: VecDeque::new(),
            reply: Some(self),
        })
    }
}

/// What an event of a stream says of a choice.
enum Delta<'a> {
    Role,
    Text(&'a str),
    /// With its place among the calls of the choice.
    Call(u32, &'a Call),
    /// The `finish_reason`.
    End(&'static str),
}

impl<'a> Delta<'a> {
    /// `calls` counts those that came before.
    fn of(piece: &'a Piece, calls: &mut u32) -> Delta<'a> {
        match piece {
            Piece::Text(text) => Delta::Text(text),
            Piece::Call(call) => {
                *calls += 1;
                Delta::Call(*calls - 1, call)
            }
        }
    }
}

/// What an event has in addition to its text.
#[derive(Default)]
struct Beside {
    logprobs: Option<Value>,
    /// The token that the text is of, where ids are asked for.
    token: Option<u32>,
}

/// Where the events of a choice are written.
struct Line<'a> {
    prefix: &'a str,
    head: &'a Head,
    index: u32,
    /// The choice has an event.
    begun: &'a mut bool,
    out: &'a mut String,
}

impl Line<'_> {
    /// Which prompt of the request it continues.
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
        // Without its braces.
        let body = &body[1..body.len() - 1];
        let logprobs = logprobs.unwrap_or(Value::Null);
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

/// A stream of events, made as its client reads.
struct Events {
    /// What every event begins with.
    prefix: String,
    /// Of each choice, the characters of its tokens.
    offsets: Vec<usize>,
    begun: Vec<bool>,
    /// Of each choice, what finds calls in its text, and how many it found.
    readers: Vec<Option<Reader>>,
    calls: Vec<u32>,
    usage: Usage,
    /// What follows when no answer does.
    over: VecDeque<Bytes>,
    /// `None`: all answers came.
    reply: Option<Reply>,
}

impl Events {
    /// Takes an answer; whether it was the last one.
    fn take(&mut self, answer: Answer, out: &mut String) -> Result<bool, ApiError> {
        let Events { prefix, offsets, begun, readers, calls, usage, reply, .. } = self;
        let Some(Reply { head, left, .. }) = reply else { return Ok(true) };
        let Answer { choice: index, said } = answer;
        let at = index as usize;
        let mut line = Line { prefix, head, index, begun: &mut begun[at], out };
        match said {
            Said::Refused(error) => return Err(error),
            Said::Taken(_) => {}
            Said::Began { cached } => {
                usage.cached += cached;
                match (head.kind, head.echoes.get(line.prompt())) {
                    (Kind::Chat, _) => line.say(&Delta::Role, Beside::default()),
                    (Kind::Completion, Some(echo)) => {
                        let first =
                            head.logprobs.then(|| logprobs(head.kind, Some(&echo.first), &[], &mut offsets[at]));
                        line.say(&Delta::Text(&echo.text), Beside { logprobs: first, token: None });
                    }
                    (Kind::Completion, None) => {}
                }
            }
            Said::Prompt(scored) => {
                let logprobs = Some(logprobs(head.kind, None, &scored, &mut offsets[at]));
                line.say(&Delta::Text(""), Beside { logprobs, token: None });
            }
            Said::Part { text, token, scored } => {
                usage.completion += u32::from(token.is_some());
                let logprobs = head.logprobs.then(|| logprobs(head.kind, None, &scored, &mut offsets[at]));
                let token = token.filter(|_| head.prompt_ids.is_some());
                let mut pieces = match &mut readers[at] {
                    Some(reader) => reader.push(&text),
                    None if text.is_empty() => vec![],
                    None => vec![Piece::Text(text)],
                };
                // A token that adds no text yet still has its probability and its id.
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
                let rest = readers[at].as_mut().map_or(vec![], Reader::finish);
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

    /// What a stream ends with, after everything or after an error.
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
