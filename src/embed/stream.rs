//! Owns generation as a stream of tokens with their text.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::desk::{Desk, lost};
use super::{Model, TextJob, Words};
use crate::error::Fault;
use crate::pipeline::TextPart;
use crate::sample::{Decided, End, RequestSettings};
use crate::tokenizer::{Specials, Stopped, certain};

/// A text to be continued.
#[derive(Debug, Clone, PartialEq)]
pub struct Asked {
    /// One or more tokens.
    pub prompt: Vec<u32>,
    /// Most tokens to generate; a full context ends the text earlier.
    pub max_tokens: usize,
    pub settings: RequestSettings,
    /// Texts that end the generation, and are not part of its text. They are ignored before `settings.min_tokens` tokens.
    pub stop: Vec<String>,
}

/// The next piece of a stream.
#[derive(Debug, Clone, PartialEq)]
pub struct Piece {
    /// `None` for text after the last token, which was held back.
    pub token: Option<Decided>,
    /// Text that became certain. Empty without a tokenizer.
    pub text: String,
}

/// Why the generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// The model ended the text.
    Eos,
    /// One of the stop texts or stop ids was generated.
    Stop,
    /// The requested number of tokens, or a full context.
    Length,
}

impl Stop {
    /// `eos`, `stop` or `length`.
    pub fn name(self) -> &'static str {
        match self {
            Stop::Eos => "eos",
            Stop::Stop => "stop",
            Stop::Length => "length",
        }
    }
}

enum Next {
    Piece(Piece),
    End(Result<Stop, Fault>),
}

/// A running generation. Dropping it stops the generation at its next token.
pub struct Stream {
    next: Receiver<Next>,
    /// The consumer dropped the stream, or a stop text was generated.
    stopped: Arc<AtomicBool>,
    /// All pieces were taken, or a fault was returned.
    is_over: bool,
    end: Option<Stop>,
}

impl Stream {
    /// Waits at most `time` for the next piece; `None`: there is none yet. `Some(Ok(None))`: the generation has ended. A fault is
    /// returned once.
    pub fn next_for(&mut self, time: Duration) -> Option<Result<Option<Piece>, Fault>> {
        if self.is_over {
            return Some(Ok(None));
        }
        let ended = match self.next.recv_timeout(time) {
            Ok(Next::Piece(piece)) => return Some(Ok(Some(piece))),
            Err(RecvTimeoutError::Timeout) => return None,
            Ok(Next::End(ended)) => ended,
            Err(RecvTimeoutError::Disconnected) => Err(lost()),
        };
        self.is_over = true;
        Some(ended.map(|stop| {
            self.end = Some(stop);
            None
        }))
    }

    /// Why it ended; `None` while it runs, and after a fault.
    pub fn end(&self) -> Option<Stop> {
        self.end
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::Relaxed);
    }
}

impl Model {
    /// Continues a prompt. Tokens that the prompt shares with the previous text are not decoded again.
    ///
    /// The stream also returns faults of the prompt: an id outside the vocabulary, settings out of range, more tokens than the context.
    pub fn generate(&self, asked: Asked) -> Stream {
        let (sender, next) = channel();
        let stopped = Arc::new(AtomicBool::new(false));
        let stream = Stream { next, stopped: stopped.clone(), is_over: false, end: None };
        let Asked { prompt, max_tokens, settings, stop } = asked;
        let writer = Writer {
            out: sender,
            stopped: stopped.clone(),
            number: self.texts.fetch_add(1, Ordering::Relaxed),
            hidden: !settings.ignore_eos,
            stops_after: settings.min_tokens as usize,
            stops: stop.clone(),
            pending: String::new(),
            count: 0,
        };
        let pen = Pen { writer: Arc::new(Mutex::new(writer)), text: self.text.clone() };
        let (vocab, eos, stops) = (self.facts.vocab, self.facts.eos.clone(), stop);
        self.on.give(Box::new(move |loaded| {
            if stopped.load(Ordering::Relaxed) {
                return;
            }
            let request = check(&prompt, max_tokens, &settings, &stops)
                .and_then(|()| settings.resolve(vocab, &eos).map_err(Fault::from));
            let answer = request.and_then(|request| {
                let mut end = Stop::Length;
                loaded.runner()?.answer(&prompt, max_tokens, &request, &mut |decided| {
                    if stopped.load(Ordering::Relaxed) {
                        return ControlFlow::Break(());
                    }
                    match request.end(decided.token) {
                        Some(End::Eos) => end = Stop::Eos,
                        Some(End::StopId) => end = Stop::Stop,
                        None => {}
                    }
                    pen.token(decided.clone());
                    ControlFlow::Continue(())
                })?;
                Ok(end)
            });
            pen.end(answer);
        }));
        stream
    }
}

/// Refuses a request that cannot be fulfilled. Its faults name no option of the command line, which a program does not have.
fn check(prompt: &[u32], max_tokens: usize, settings: &RequestSettings, stops: &[String]) -> Result<(), Fault> {
    if prompt.is_empty() {
        return Err(Fault::input("the prompt has no token, expected at least one"));
    }
    if settings.min_tokens as usize > max_tokens {
        let min = settings.min_tokens;
        return Err(Fault::input(format!("`min_tokens` is {min}, expected at most `max_tokens`, {max_tokens}")));
    }
    match stops.iter().any(String::is_empty) {
        true => Err(Fault::input("`stop` has a text without a character, expected at least one")),
        false => Ok(()),
    }
}

/// Passes tokens to the thread of the tokenizer, which writes the stream in their order.
struct Pen {
    writer: Arc<Mutex<Writer>>,
    text: Option<Arc<Desk<TextJob>>>,
}

impl Pen {
    fn token(&self, decided: Decided) {
        self.write(move |writer, words| writer.token(decided, words));
    }

    fn end(&self, end: Result<Stop, Fault>) {
        self.write(move |writer, words| writer.end(end, words));
    }

    fn write(&self, write: impl FnOnce(&mut Writer, Option<&mut Words>) + Send + 'static) {
        let writer = self.writer.clone();
        let write = move |words: Option<&mut Words>| {
            write(&mut writer.lock().unwrap_or_else(|poisoned| poisoned.into_inner()), words);
        };
        match &self.text {
            Some(text) => text.give(Box::new(move |words| write(Some(words)))),
            None => write(None),
        }
    }
}

/// The text of a stream so far.
struct Writer {
    out: Sender<Next>,
    stopped: Arc<AtomicBool>,
    /// The tokenizer's number for the text.
    number: u64,
    /// Special tokens are left out.
    hidden: bool,
    stops: Vec<String>,
    /// Stops are ignored before this number of tokens.
    stops_after: usize,
    /// Text that may be the beginning of a stop text.
    pending: String,
    count: usize,
}

impl Writer {
    fn token(&mut self, decided: Decided, words: Option<&mut Words>) {
        if self.stopped.load(Ordering::Relaxed) {
            return;
        }
        let text = match words {
            Some(words) => self.text(words, vec![decided.token], false),
            None => Ok(String::new()),
        };
        match text {
            Ok(text) => self.piece(Some(decided), &text, false),
            Err(fault) => self.finish(Err(fault)),
        }
    }

    fn end(&mut self, end: Result<Stop, Fault>, words: Option<&mut Words>) {
        let rest = match words {
            Some(words) if self.count > 0 => self.text(words, vec![], true),
            _ => Ok(String::new()),
        };
        if self.stopped.load(Ordering::Relaxed) {
            return;
        }
        match (end, rest) {
            (Ok(stop), Ok(rest)) => {
                self.piece(None, &rest, true);
                if !self.stopped.load(Ordering::Relaxed) {
                    self.finish(Ok(stop));
                }
            }
            (Err(fault), _) | (_, Err(fault)) => self.finish(Err(fault)),
        }
    }

    /// Text that became certain with these ids.
    fn text(&mut self, words: &mut Words, ids: Vec<u32>, ends: bool) -> Result<String, Fault> {
        let part = TextPart { text: self.number, ids, specials: Specials::of(self.hidden), ends };
        Ok(words.tokens()?.texts(vec![part])?.concat().concat())
    }

    /// Sends a token with the text that is certain. A stop text ends the stream.
    fn piece(&mut self, token: Option<Decided>, text: &str, last: bool) {
        self.count += usize::from(token.is_some());
        self.pending.push_str(text);
        let stops: &[String] = if self.count > self.stops_after { &self.stops } else { &[] };
        let Stopped { ready, found } = certain(&self.pending, stops);
        let ready = if last && !found { self.pending.len() } else { ready };
        let text: String = self.pending.drain(..ready).collect();
        if token.is_some() || !text.is_empty() {
            let _ = self.out.send(Next::Piece(Piece { token, text }));
        }
        if found {
            self.finish(Ok(Stop::Stop));
        }
    }

    fn finish(&mut self, end: Result<Stop, Fault>) {
        self.stopped.store(true, Ordering::Relaxed);
        let _ = self.out.send(Next::End(end));
    }
}
