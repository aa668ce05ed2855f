//! Owns the path of a request: handler, engine thread, text thread (tokens to text), and back to the handler.
//!
//! ```text
//! handlers --Command--> engine thread --Batch--> text thread --Answer--> handlers
//! ```
//!
//! Queues are bounded. Handlers need a permit for each command. The queue of batches is short, so an engine that is faster than its
//! tokenizer waits. A request has at most one answer for each token, so a slow client holds only its own text. A client that disconnects
//! cancels its request. If the engine or the tokenizer fails, its requests end with an error, and it is started again.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::UnboundedSender;

use super::error::{ApiError, finish_reason};
use super::metrics::Metrics;
use super::reader::Reader;
use crate::engine::{Ask, ChoiceId, Engine, Event, Figures, RequestId, Stepper};
use crate::error::Fault;
use crate::pipeline::{TextPart, Tokens};
use crate::sample::Decided;
use crate::tokenizer::{Piece, Specials, Stopped, certain};

/// Batches that wait for the text thread.
const BATCHES_MAX: usize = 16;
/// Stack of the engine's thread: matching a grammar recurses for each level of the text.
const STACK_BYTES: usize = 16 << 20;
/// An engine that fails this often within [`FAILURES_WITHIN`] ends the server.
const FAILURES_MAX: usize = 3;
const FAILURES_WITHIN: Duration = Duration::from_secs(600);

/// Starts the tokenizer's process; `None`: the model has none, and its text is its ids.
pub type StartTokens = Arc<dyn Fn() -> Result<Option<Tokens>, Fault> + Send + Sync>;

/// What the desk does for a request.
pub struct Order {
    pub text: TextSettings,
    /// Index in the reply of this request's first choice.
    pub first_choice: u32,
    pub choices: u32,
    pub answers: UnboundedSender<Answer>,
    pub arrived: Instant,
}

/// How tokens become text.
#[derive(Debug, Clone, Default)]
pub struct TextSettings {
    /// Texts that end a choice, and are not part of its text.
    pub stops: Vec<String>,
    /// Stops are ignored before this number of tokens.
    pub min_tokens: u32,
    pub specials: Specials,
    /// A choice ends with its first call of a tool.
    pub one_call: Option<Reader>,
}

/// What happened to a choice of a reply.
#[derive(Debug)]
pub struct Answer {
    pub choice: u32,
    pub said: Said,
}

#[derive(Debug)]
pub enum Said {
    /// Nothing follows.
    Refused(ApiError),
    Taken(RequestId),
    /// The choice began to run; with the prompt tokens that were already in the cache.
    Began {
        cached: u32,
    },
    /// Tokens of the prompt, from the second one on.
    Prompt(Vec<ScoredToken>),
    /// The text that a token adds; without a token, the end of the text. `scored` has one entry for the token, or none.
    Part {
        text: String,
        token: Option<u32>,
        scored: Vec<ScoredToken>,
    },
    /// The `finish_reason`. Nothing of this choice follows.
    Ended(Result<&'static str, ApiError>),
}

/// A token as clients see it.
#[derive(Debug, Clone, PartialEq)]
pub struct ScoredToken {
    /// Shared by all tokens of one id, because a reply may have millions of tokens.
    pub piece: Arc<Piece>,
    pub logprob: f64,
    pub top: Vec<(Arc<Piece>, f64)>,
    /// Characters that it adds to the text of its choice: none for a special token that is left out, and for a part of a character all but
    /// the last have none.
    pub characters: u32,
}

enum Command {
    Order(Ask, Box<Order>),
    /// All choices of a request.
    Cancel(RequestId),
    CancelChoice(ChoiceId),
    /// Ends all choices that run or wait.
    CancelAll,
}

enum Batch {
    Opened(RequestId, Box<Order>),
    Events(Vec<Event>, Instant),
    /// The engine has ended.
    Lost(Fault),
}

/// State of the engine.
#[derive(Debug, Clone, Default)]
pub struct Health {
    /// Why the engine does not run at present.
    pub trouble: Option<String>,
    /// Why the engine will not run again.
    pub over: Option<Fault>,
    pub figures: Figures,
}

/// The part of the desk that handlers use.
#[derive(Clone)]
pub struct Desk {
    commands: Sender<Command>,
    health: Arc<Mutex<Health>>,
    pub metrics: Arc<Mutex<Metrics>>,
    started: Instant,
}

impl Desk {
    /// Starts both threads. `make` makes the engine, in the thread in which it runs.
    ///
    /// # Errors
    /// Threads that cannot be started.
    pub fn start<S: Stepper>(
        make: impl Fn() -> Result<Engine<S>, Fault> + Send + 'static,
        tokens: StartTokens,
        metrics: Metrics,
    ) -> Result<Desk, Fault> {
        let (commands, orders) = channel();
        let (batches, texts) = sync_channel(BATCHES_MAX);
        let health = Health { trouble: Some("the engine starts".to_string()), ..Health::default() };
        let (health, metrics) = (Arc::new(Mutex::new(health)), Arc::new(Mutex::new(metrics)));
        let desk = Desk { commands, health, metrics, started: Instant::now() };
        let (state, started) = (desk.health.clone(), desk.started);
        let of_text = desk.clone();
        let spawn = |name: &str, run: Box<dyn FnOnce() + Send>| {
            let spawned = thread::Builder::new().name(name.to_string()).stack_size(STACK_BYTES).spawn(run);
            spawned.map_err(|error| Fault::environment(format!("cannot start a thread: {error}")))
        };
        spawn("engine", Box::new(move || run_engine(&make, &orders, &batches, &state, started)))?;
        spawn("text", Box::new(move || TextThread::new(of_text, tokens).run(&texts)))?;
        Ok(desk)
    }

    /// The time on the engine's clock.
    pub fn now(&self) -> Duration {
        self.started.elapsed()
    }

    pub fn order(&self, ask: Ask, order: Order) {
        // If the engine has ended, the sender of answers is dropped, and the handler sees that.
        let _ = self.commands.send(Command::Order(ask, Box::new(order)));
    }

    pub fn cancel(&self, request: RequestId) {
        let _ = self.commands.send(Command::Cancel(request));
    }

    pub fn cancel_all(&self) {
        let _ = self.commands.send(Command::CancelAll);
    }

    pub fn health(&self) -> Health {
        lock(&self.health).clone()
    }
}

/// Locks even after a panic: the data are plain figures, which are always valid.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn run_engine<S: Stepper>(
    make: &dyn Fn() -> Result<Engine<S>, Fault>,
    orders: &Receiver<Command>,
    batches: &SyncSender<Batch>,
    health: &Mutex<Health>,
    started: Instant,
) {
    let mut failures: VecDeque<Instant> = VecDeque::new();
    loop {
        let served = catch_unwind(AssertUnwindSafe(|| {
            let mut engine = make()?;
            *lock(health) = Health { figures: engine.figures(), ..Health::default() };
            serve_orders(&mut engine, orders, batches, health, started)
        }));
        let fault = match served {
            Ok(Ok(())) => return,
            Ok(Err(fault)) => fault,
            Err(_) => Fault::internal("the engine panicked"),
        };
        failures.push_back(Instant::now());
        failures.retain(|at| at.elapsed() < FAILURES_WITHIN);
        let trouble = format!("the engine ended: {}", fault.message);
        let over = failures.len() >= FAILURES_MAX;
        let figures = lock(health).figures;
        *lock(health) = Health { trouble: Some(trouble), over: over.then(|| fault.clone()), figures };
        if batches.send(Batch::Lost(fault)).is_err() || over {
            return;
        }
    }
}

/// Runs until all senders of commands are gone.
fn serve_orders<S: Stepper>(
    engine: &mut Engine<S>,
    orders: &Receiver<Command>,
    batches: &SyncSender<Batch>,
    health: &Mutex<Health>,
    started: Instant,
) -> Result<(), Fault> {
    let gone = || Fault::internal("the thread that makes text has ended");
    loop {
        let mut events = vec![];
        // Without work, the engine thread sleeps until a command arrives.
        let first = if engine.is_idle() {
            lock(health).figures = engine.figures();
            match orders.recv() {
                Ok(command) => Some(command),
                Err(_) => return Ok(()),
            }
        } else {
            None
        };
        for command in first.into_iter().chain(orders.try_iter()) {
            match command {
                Command::Cancel(request) => engine.cancel_request(request, &mut events),
                Command::CancelChoice(id) => engine.cancel(id, &mut events),
                Command::CancelAll => engine.cancel_all(&mut events),
                Command::Order(ask, order) => match engine.submit(ask) {
                    Ok(request) => batches.send(Batch::Opened(request, order)).map_err(|_| gone())?,
                    Err(refused) => {
                        let said = Said::Refused(refused.into());
                        let _ = order.answers.send(Answer { choice: order.first_choice, said });
                    }
                },
            }
        }
        engine.turn(started.elapsed(), &mut events)?;
        lock(health).figures = engine.figures();
        if !events.is_empty() {
            batches.send(Batch::Events(events, Instant::now())).map_err(|_| gone())?;
        }
    }
}

/// A request with choices that did not end.
struct Open {
    order: Box<Order>,
    left: u32,
}

/// A choice that did not end.
struct Text {
    /// The tokenizer's number for its text.
    number: u64,
    /// What may be the beginning of a stop.
    pending: String,
    one_call: Option<Reader>,
    tokens: u32,
    times: Times,
}

/// Times of the events of a choice.
#[derive(Debug, Clone, Copy)]
pub struct Times {
    pub arrived: Instant,
    pub began: Option<Instant>,
    pub first: Option<Instant>,
    pub last: Option<Instant>,
}

struct TextThread {
    desk: Desk,
    start: StartTokens,
    tokens: Option<Tokens>,
    /// Single ids inside of a text.
    pieces: HashMap<u32, Arc<Piece>>,
    open: BTreeMap<RequestId, Open>,
    texts: BTreeMap<ChoiceId, Text>,
    numbers: u64,
    /// Numbers of ended texts that the tokenizer does not know to have ended.
    closing: Vec<u64>,
    /// The model has a tokenizer.
    has_text: bool,
}

impl TextThread {
    fn new(desk: Desk, start: StartTokens) -> TextThread {
        let (pieces, open, texts) = (HashMap::new(), BTreeMap::new(), BTreeMap::new());
        TextThread { desk, start, tokens: None, pieces, open, texts, numbers: 0, closing: vec![], has_text: true }
    }

    fn run(mut self, batches: &Receiver<Batch>) {
        while let Ok(batch) = batches.recv() {
            match batch {
                Batch::Opened(request, order) => self.begin(request, order),
                Batch::Events(events, at) => {
                    if let Err(fault) = self.events(events, at) {
                        // The texts of all requests were lost with the process.
                        (self.tokens, self.closing) = (None, vec![]);
                        self.lose(&ApiError::from(fault));
                        self.desk.cancel_all();
                    }
                }
                Batch::Lost(fault) => {
                    self.lose(&ApiError::dead(format!("the engine ended: {}", fault.message)));
                    if self.desk.health().over.is_some() {
                        return;
                    }
                }
            }
        }
    }

    fn begin(&mut self, request: RequestId, order: Box<Order>) {
        for choice in 0..order.choices {
            self.numbers += 1;
            let times = Times { arrived: order.arrived, began: None, first: None, last: None };
            let one_call = order.text.one_call.clone();
            let text = Text { number: self.numbers, pending: String::new(), one_call, tokens: 0, times };
            self.texts.insert(ChoiceId { request, choice }, text);
        }
        let (answers, choice, left) = (order.answers.clone(), order.first_choice, order.choices);
        self.open.insert(request, Open { order, left });
        if answers.send(Answer { choice, said: Said::Taken(request) }).is_err() {
            self.desk.cancel(request);
        }
    }

    /// Ends every request with an error.
    fn lose(&mut self, error: &ApiError) {
        for id in std::mem::take(&mut self.texts).into_keys() {
            if let Some(open) = self.open.get(&id.request) {
                let choice = open.order.first_choice + id.choice;
                let _ = open.order.answers.send(Answer { choice, said: Said::Ended(Err(error.clone())) });
            }
        }
        self.open.clear();
    }

    fn events(&mut self, events: Vec<Event>, at: Instant) -> Result<(), Fault> {
        let mut parts: Vec<TextPart> = vec![];
        let mut of: BTreeMap<ChoiceId, usize> = BTreeMap::new();
        let mut unknown = BTreeSet::new();
        for event in &events {
            let (id, decided, ends) = match event {
                Event::Token { id, decided } => (*id, Some(decided), false),
                Event::Ended { id, .. } => (*id, None, true),
                Event::Prompt { scored, .. } => {
                    scored.iter().for_each(|decided| self.unknown(decided, &mut unknown));
                    continue;
                }
                Event::Began { .. } => continue,
            };
            let (Some(text), Some(open)) = (self.texts.get(&id), self.open.get(&id.request)) else { continue };
            let specials = open.order.text.specials;
            let part = *of.entry(id).or_insert_with(|| {
                parts.push(TextPart { text: text.number, ids: vec![], specials, ends: false });
                parts.len() - 1
            });
            parts[part].ids.extend(decided.map(|decided| decided.token));
            parts[part].ends |= ends;
            if let Some(decided) = decided {
                self.unknown(decided, &mut unknown);
            }
        }
        self.learn(unknown)?;
        let mut made = self.make(parts)?;
        let mut next: BTreeMap<ChoiceId, std::vec::IntoIter<String>> = BTreeMap::new();
        for (id, part) in of {
            next.insert(id, std::mem::take(&mut made[part]).into_iter());
        }
        for event in events {
            match event {
                Event::Began { id, cached } => {
                    if let Some(text) = self.texts.get_mut(&id) {
                        text.times.began = Some(at);
                        self.say(id, Said::Began { cached });
                    }
                }
                Event::Prompt { id, scored } => {
                    let scored = scored.iter().filter_map(|decided| self.scored(decided, 0)).collect();
                    self.say(id, Said::Prompt(scored));
                }
                Event::Token { id, decided } => {
                    let piece = next.get_mut(&id).and_then(Iterator::next).unwrap_or_default();
                    self.token(id, &decided, &piece, at);
                }
                Event::Ended { id, end } => {
                    let rest = next.get_mut(&id).and_then(Iterator::next).unwrap_or_default();
                    self.end(id, finish_reason(&end), &rest);
                }
            }
        }
        Ok(())
    }

    fn token(&mut self, id: ChoiceId, decided: &Decided, piece: &str, at: Instant) {
        let (Some(text), Some(open)) = (self.texts.get_mut(&id), self.open.get(&id.request)) else { return };
        let before = text.times.last.replace(at);
        text.times.first.get_or_insert(at);
        lock(&self.desk.metrics).token(&text.times, before);
        text.tokens += 1;
        text.pending.push_str(piece);
        let TextSettings { stops, min_tokens, .. } = &open.order.text;
        let stops: &[String] = if text.tokens > *min_tokens { stops } else { &[] };
        let Stopped { ready, found } = certain(&text.pending, stops);
        let said: String = text.pending.drain(..ready).collect();
        let called = text.one_call.as_mut().is_some_and(|reader| {
            reader.push(&said);
            reader.is_over()
        });
        let found = found || called;
        let scored = self.scored(decided, piece.chars().count() as u32).into_iter().collect();
        self.say(id, Said::Part { text: said, token: Some(decided.token), scored });
        if found {
            self.desk.cancel_choice(id);
            if let Some(text) = self.texts.get_mut(&id) {
                text.pending.clear();
                self.closing.push(text.number);
            }
            self.end(id, Ok("stop"), "");
        }
    }

    fn end(&mut self, id: ChoiceId, reason: Result<&'static str, ApiError>, rest: &str) {
        let (Some(text), Some(open)) = (self.texts.get_mut(&id), self.open.get(&id.request)) else { return };
        text.pending.push_str(rest);
        let Stopped { ready, found } = certain(&text.pending, &open.order.text.stops);
        // No token follows, so text that looked like the beginning of a stop is plain text.
        let ready = if found { ready } else { text.pending.len() };
        let said: String = text.pending.drain(..ready).collect();
        let reason = if found { Ok("stop") } else { reason };
        lock(&self.desk.metrics).ended(&text.times, reason.as_ref().ok().copied());
        if !said.is_empty() {
            self.say(id, Said::Part { text: said, token: None, scored: vec![] });
        }
        self.say(id, Said::Ended(reason));
        self.texts.remove(&id);
        if let Some(open) = self.open.get_mut(&id.request) {
            open.left -= 1;
            if open.left == 0 {
                self.open.remove(&id.request);
            }
        }
    }

    fn say(&mut self, id: ChoiceId, said: Said) {
        let Some(open) = self.open.get(&id.request) else { return };
        let choice = open.order.first_choice + id.choice;
        if open.order.answers.send(Answer { choice, said }).is_err() {
            self.desk.cancel(id.request);
        }
    }

    fn scored(&self, decided: &Decided, characters: u32) -> Option<ScoredToken> {
        let none = || Arc::new(Piece { text: String::new(), bytes: vec![] });
        let piece = |id: &u32| self.pieces.get(id).cloned().unwrap_or_else(none);
        let top = decided.top.iter().map(|(id, logprob)| (piece(id), *logprob)).collect();
        Some(ScoredToken { piece: piece(&decided.token), logprob: decided.logprob?, top, characters })
    }

    fn unknown(&self, decided: &Decided, unknown: &mut BTreeSet<u32>) {
        if decided.logprob.is_some() {
            let ids = decided.top.iter().map(|(id, _)| *id).chain([decided.token]);
            unknown.extend(ids.filter(|id| !self.pieces.contains_key(id)));
        }
    }

    fn learn(&mut self, ids: BTreeSet<u32>) -> Result<(), Fault> {
        if ids.is_empty() {
            return Ok(());
        }
        let ids: Vec<u32> = ids.into_iter().collect();
        let pieces = match self.tokens()? {
            Some(tokens) => tokens.pieces(ids.clone())?,
            None => {
                ids.iter().map(|id| format!(" {id}")).map(|text| Piece { bytes: text.clone().into(), text }).collect()
            }
        };
        self.pieces.extend(ids.into_iter().zip(pieces.into_iter().map(Arc::new)));
        Ok(())
    }

    fn make(&mut self, mut parts: Vec<TextPart>) -> Result<Vec<Vec<String>>, Fault> {
        let closing = self.closing.drain(..);
        parts.extend(closing.map(|text| TextPart { text, ids: vec![], specials: Specials::Hidden, ends: true }));
        if parts.is_empty() {
            return Ok(vec![]);
        }
        match self.tokens()? {
            Some(tokens) => tokens.texts(parts),
            None => Ok(parts.iter().map(|part| part.ids.iter().map(|id| format!(" {id}")).collect()).collect()),
        }
    }

    fn tokens(&mut self) -> Result<Option<&mut Tokens>, Fault> {
        if self.tokens.is_none() && self.has_text {
            self.tokens = (self.start)()?;
            self.has_text = self.tokens.is_some();
        }
        Ok(self.tokens.as_mut())
    }
}

impl Desk {
    fn cancel_choice(&self, id: ChoiceId) {
        let _ = self.commands.send(Command::CancelChoice(id));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

    use super::*;
    use crate::engine::{Bounds, Launch, Limits, Said as Computed, Want};
    use crate::rows::Shape;
    use crate::sample::{RequestSettings, SampleSettings, TokenSet};

    const SHAPE: Shape =
        Shape { rows: 2, sequences: 6, context_max: 32, page_rows: 4, pages: 32, window: None, has_state: false };
    const LIMITS: Limits = Limits { running_max: 2, waiting_max: 4, chunk_rows: 2, steps_max: 1 };

    /// A stepper that always decides token 7; launches that are marked fail.
    struct Breaks {
        queued: VecDeque<Launch>,
        /// Launches of all steppers until the next failure.
        left: Arc<AtomicUsize>,
    }

    impl Stepper for Breaks {
        fn bounds(&self) -> Bounds {
            Bounds { shape: SHAPE, chunk_max: 2, alone: None, vocab: 10, steps_max: 1, choices: None }
        }

        fn submit(&mut self, launch: Launch) -> Result<(), Fault> {
            self.queued.push_back(launch);
            Ok(())
        }

        fn allow(&mut self, _: Vec<Option<TokenSet>>) -> Result<(), Fault> {
            Ok(())
        }

        fn collect(&mut self) -> Result<Vec<Computed>, Fault> {
            if self.left.fetch_sub(1, Ordering::SeqCst) == 1 {
                return Err(Fault::environment("the device is gone"));
            }
            let launch = self.queued.pop_front().expect("a launch");
            let said = launch.rows.iter().map(|row| match row.want {
                Want::Nothing => Computed::Nothing,
                Want::Logits => Computed::Logits((0..10).map(|id| f32::from(id == 7)).collect()),
                Want::Token(_) | Want::Choice(_) => Computed::Tokens(vec![7]),
            });
            Ok(said.collect())
        }
    }

    fn desk(left: &Arc<AtomicUsize>) -> Desk {
        let left = left.clone();
        let make = move || Engine::new(Breaks { queued: VecDeque::new(), left: left.clone() }, LIMITS);
        Desk::start(make, Arc::new(|| Ok(None)), Metrics::new("m")).unwrap()
    }

    fn order(desk: &Desk, tokens_max: u32, text: TextSettings) -> UnboundedReceiver<Answer> {
        let (answers, answered) = unbounded_channel();
        let request = RequestSettings::plain(SampleSettings::greedy()).resolve(10, &[]).unwrap();
        let choices = vec![request];
        let ask = Ask { prompt: vec![1, 2], tokens_max, choices, scores_prompt: None, grammar: None, deadline: None };
        desk.order(ask, Order { text, first_choice: 3, choices: 1, answers, arrived: Instant::now() });
        answered
    }

    /// The text of a choice, and how it ended.
    fn end(mut answered: UnboundedReceiver<Answer>) -> (String, Result<&'static str, ApiError>) {
        let mut all = String::new();
        loop {
            let Answer { choice, said } = answered.blocking_recv().expect("an end");
            assert_eq!(choice, 3);
            match said {
                Said::Part { text, .. } => all.push_str(&text),
                Said::Ended(reason) => return (all, reason),
                _ => {}
            }
        }
    }

    #[test]
    fn a_text_ends_where_it_was_asked_to() {
        let desk = desk(&Arc::new(AtomicUsize::new(usize::MAX)));
        assert_eq!(end(order(&desk, 3, TextSettings::default())), (" 7 7 7".to_string(), Ok("length")));
        let stops = |min_tokens| TextSettings {
            stops: vec!["7 7".to_string()],
            min_tokens,
            specials: Specials::Hidden,
            one_call: None,
        };
        assert_eq!(end(order(&desk, 9, stops(0))), (" ".to_string(), Ok("stop")));
        // The text looked like the beginning of a stop, but was none.
        assert_eq!(end(order(&desk, 1, stops(0))), (" 7".to_string(), Ok("length")));
        assert_eq!(end(order(&desk, 9, stops(2))), (" 7 7 ".to_string(), Ok("stop")));
    }

    #[test]
    fn an_engine_that_fails_is_made_again_until_it_fails_too_often() {
        let left = Arc::new(AtomicUsize::new(usize::MAX));
        let desk = desk(&left);
        for failure in 1..=3 {
            assert_eq!(end(order(&desk, 2, TextSettings::default())).1, Ok("length"));
            left.store(3, Ordering::SeqCst);
            let (_, reason) = end(order(&desk, 30, TextSettings::default()));
            let error = reason.expect_err("it failed");
            assert_eq!((error.status.as_u16(), &*error.message), (503, "the engine ended: the device is gone"));
            let begun = Instant::now();
            while desk.health().trouble.is_some() && failure < 3 {
                assert!(begun.elapsed() < Duration::from_secs(60));
                thread::yield_now();
            }
        }
        assert_eq!(desk.health().over.expect("for good").message, "the device is gone");
        // A new order gets no answer.
        assert!(order(&desk, 1, TextSettings::default()).blocking_recv().is_none());
    }
}
