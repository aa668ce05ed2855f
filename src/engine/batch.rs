//! Owns the engine: waiting and running requests, and what the next launch has in it.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

use super::prefix::{Chain, Prefixes};
use super::snapshots::Snapshots;
use super::stepper::{Alone, Bounds, Chooser, Launch, LaunchRow, Proposals, Said, Stepper, Want};
use crate::error::Fault;
use crate::grammar::{Grammar, GrammarError, Guide};
use crate::pages::Pool;
use crate::rows::{PageId, SequenceId, Shape, StateCopies, StateCopy};
use crate::sample::{Decided, Logprobs, Request, SampleError, TokenCounts, TokenSet};
use crate::waves;

/// While others decode, the rest of a prompt shares at most this many of their steps. A longer one is read alone, if the stepper can.
const STEPS_BESIDE: usize = 3;

/// A request, in the order of arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// One of the continuations that a request asks for. The order is by age, the oldest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChoiceId {
    pub request: RequestId,
    /// From 0.
    pub choice: u32,
}

/// What an engine does for a request.
#[derive(Debug, Clone)]
pub struct Ask {
    /// One or more tokens of the vocabulary.
    pub prompt: Vec<u32>,
    /// Tokens to decide, at most: the context may end before.
    pub tokens_max: u32,
    /// How each continuation of the prompt chooses its tokens. Each has a seed of its own, or they are the same.
    pub choices: Vec<Request>,
    /// Log-probabilities of the prompt's tokens, with those of this many others beside each.
    pub scores_prompt: Option<u32>,
    /// What the text of each choice has to be.
    pub grammar: Option<Grammar>,
    /// When the request ends, done or not, on the clock of [`Engine::turn`].
    pub deadline: Option<Duration>,
}

/// Why a choice ended.
#[derive(Debug, Clone, PartialEq)]
pub enum End {
    /// A token was decided that ends it, or that completes its grammar: the last one.
    Stop,
    /// As many tokens as asked for, or as the context holds.
    Length,
    Cancelled,
    Deadline,
    /// No token can be chosen from the model's logits.
    Choice(SampleError),
    /// The tokens that its grammar allows cannot be found.
    Grammar(GrammarError),
}

/// What happened to a choice.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// It runs, for the first time; this many tokens of its prompt were found in pages.
    Began {
        id: ChoiceId,
        cached: u32,
    },
    /// Log-probabilities of the next tokens of the prompt, from the second one on: the first follows nothing.
    Prompt {
        id: ChoiceId,
        scored: Vec<Decided>,
    },
    Token {
        id: ChoiceId,
        decided: Decided,
    },
    /// Nothing of it follows.
    Ended {
        id: ChoiceId,
        end: End,
    },
}

/// Why a request was not taken.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Refused {
    #[error("{waiting} requests wait already")]
    Busy { waiting: usize },
    #[error("the prompt has no token, expected at least one")]
    NoPrompt,
    #[error("the prompt has {found} tokens, the context has room for {context_max}")]
    Context { found: usize, context_max: u32 },
    #[error("token {token} is not below the vocabulary of {vocab}")]
    Token { token: u32, vocab: u32 },
    #[error("{positions} positions take {needed} pages, the cache has {pages}")]
    Pages { positions: u32, needed: u32, pages: u32 },
}

/// What a user may set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Choices that run at a time; at most the rows of a launch and the sequences that can be open.
    pub running_max: u32,
    /// Choices that wait at a time.
    pub waiting_max: usize,
    /// Rows of prompts in a launch that decodes, too; at least 1.
    pub chunk_rows: u32,
    /// Steps of a launch, at most those of the stepper; at least 1.
    pub steps_max: u32,
}

/// What dashboards show.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Figures {
    pub running: usize,
    pub waiting: usize,
    pub pages: u32,
    /// Pages of running requests.
    pub pages_used: u32,
    /// Prompt tokens that were looked for in pages, and those found.
    pub prefix_queries: u64,
    pub prefix_hits: u64,
    /// Snapshots of recurrent states that are kept, and those that there is room for.
    pub snapshots: usize,
    pub snapshots_max: usize,
    pub preemptions: u64,
    pub launches: u64,
    /// Those that were queued while the launch before them ran.
    pub queued_ahead: u64,
    /// Steps of all launches.
    pub steps: u64,
    /// Rows of all steps.
    pub rows: u64,
    pub proposals: Proposals,
}

/// A choice that did not end.
#[derive(Debug)]
struct Choice {
    ask: Arc<Ask>,
    /// Place in [`Ask::choices`].
    at: usize,
    /// As [`Ask::scores_prompt`]; one choice of a request does it.
    scores_prompt: Option<u32>,
    /// The prompt, then what was decided.
    tokens: Vec<u32>,
    /// The counts of `tokens`, shared with the launch that goes on from them.
    counts: Arc<TokenCounts>,
    /// What may come next, if there is a grammar and the choice has run. A preemption leaves it as it is.
    guide: Option<Guide>,
    /// Tokens of the prompt whose log-probabilities were told, and the first one, which has none.
    scored: usize,
    /// Whether it has run before.
    began: bool,
    /// Names of the full pages of `tokens`, as far as they were needed.
    chains: Vec<Chain>,
}

impl Choice {
    fn prompt_count(&self) -> usize {
        self.ask.prompt.len()
    }

    /// The name of a full page of its tokens.
    fn chain(&mut self, block: usize, page_rows: usize) -> Chain {
        while self.chains.len() <= block {
            let at = self.chains.len();
            let before = self.chains.last().copied();
            self.chains.push(Chain::of(before, &self.tokens[at * page_rows..(at + 1) * page_rows]));
        }
        self.chains[block]
    }

    /// Positions whose keys may come from pages: the last token is computed in any case, and so are those that are scored.
    fn reusable(&self) -> usize {
        let scored = if self.scores_prompt.is_some() { self.scored - 1 } else { usize::MAX };
        (self.tokens.len() - 1).min(scored)
    }
}

/// A choice that has pages.
#[derive(Debug)]
struct Running {
    choice: Choice,
    sequence: SequenceId,
    /// Positions below are in a launch, or in pages.
    submitted: usize,
    /// Positions below are in pages.
    computed: usize,
    /// Full pages that have been offered to others.
    offered: usize,
    /// Positions before which its recurrent state is to be kept, ascending: ends of pages.
    to_keep: Vec<usize>,
    /// Tells this run of the choice from runs before a preemption.
    run: u64,
    /// Its rows want nothing but tokens that kernels choose.
    is_plain: bool,
}

impl Running {
    /// Tokens that are known and in no launch. A launch of several steps is ahead of what is known.
    fn left(&self) -> usize {
        self.choice.tokens.len().saturating_sub(self.submitted)
    }

    /// Rows of its prompt that a launch may have: it ends where the state is kept.
    fn rows_max(&self) -> usize {
        self.to_keep.first().map_or(usize::MAX, |at| at - self.submitted)
    }
}

/// A launch that was submitted.
#[derive(Debug)]
struct Flying {
    /// For each row: its choice, the run of that choice, and its position in the first step.
    rows: Vec<(ChoiceId, u64, usize)>,
    steps: u32,
    /// The stepper decides the tokens of all rows from what the kernel knows: a launch may go on from them.
    is_decoding: bool,
    /// It reads a prompt alone.
    is_alone: bool,
    /// For each row, the tokens that it decided before its last step. Known when the last step has begun.
    so_far: Option<Vec<Vec<u32>>>,
}

impl Flying {
    fn of(launch: &Launch, rows: Vec<(ChoiceId, u64, usize)>, alone: Option<Alone>) -> Flying {
        let is_decoding = launch.rows.iter().all(|row| matches!(row.want, Want::Token(_)));
        let is_alone = alone.is_some_and(|alone| launch.is(alone));
        Flying { rows, steps: launch.steps, is_decoding, is_alone, so_far: None }
    }
}

/// Requests over a stepper. Its caller has the clock, and calls [`Engine::turn`] while there is something to do.
#[derive(Debug)]
pub struct Engine<S> {
    /// What executes the launches.
    pub stepper: S,
    bounds: Bounds,
    limits: Limits,
    pool: Pool,
    prefixes: Prefixes,
    snapshots: Snapshots,
    /// Copies of states before the next launch.
    copies: StateCopies,
    waiting: BTreeMap<ChoiceId, Choice>,
    running: BTreeMap<ChoiceId, Running>,
    flying: VecDeque<Flying>,
    requests: u64,
    runs: u64,
    /// The last launch read a prompt alone, and those that decode waited.
    was_alone: bool,
    figures: Figures,
}

impl<S: Stepper> Engine<S> {
    /// # Errors
    /// A stepper without a row, a page or a sequence to spare.
    pub fn new(stepper: S, limits: Limits) -> Result<Engine<S>, Fault> {
        let bounds = stepper.bounds();
        let pool = Pool::keeping(bounds.shape)
            .map_err(|error| Fault::internal(format!("a stepper that an engine cannot use: {error}")))?;
        let running_max = limits.running_max.min(bounds.shape.rows).min(pool.open_max());
        if running_max == 0 || bounds.chunk_max == 0 || bounds.steps_max == 0 {
            return Err(Fault::internal("a stepper that an engine cannot use: it takes no row"));
        }
        let steps_max = limits.steps_max.clamp(1, bounds.steps_max);
        let limits = Limits { running_max, chunk_rows: limits.chunk_rows.max(1), steps_max, ..limits };
        let slots = pool.slots().filter(|_| bounds.shape.has_state && bounds.shares_prefixes());
        Ok(Engine {
            snapshots: Snapshots::over(slots),
            copies: StateCopies::default(),
            stepper,
            bounds,
            limits,
            pool,
            prefixes: Prefixes::default(),
            waiting: BTreeMap::new(),
            running: BTreeMap::new(),
            flying: VecDeque::new(),
            requests: 0,
            runs: 0,
            was_alone: false,
            figures: Figures { pages: bounds.shape.pages, ..Figures::default() },
        })
    }

    pub fn bounds(&self) -> &Bounds {
        &self.bounds
    }

    pub fn figures(&self) -> Figures {
        let (running, waiting) = (self.running.len(), self.waiting.len());
        let pages_used = self.bounds.shape.pages - self.pool.free_pages() - self.pool.idle_pages();
        let (snapshots, snapshots_max) = (self.snapshots.kept(), self.snapshots.most());
        let proposals = self.stepper.proposals();
        Figures { running, waiting, pages_used, snapshots, snapshots_max, proposals, ..self.figures }
    }

    /// Nothing runs and nothing waits.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty() && self.flying.is_empty()
    }

    /// Takes a request; its choices have the numbers from 0 on.
    ///
    /// # Errors
    /// A request that can never run, or one too many.
    pub fn submit(&mut self, ask: Ask) -> Result<RequestId, Refused> {
        let Bounds { shape, vocab, .. } = self.bounds;
        let found = ask.prompt.len();
        if found == 0 {
            return Err(Refused::NoPrompt);
        }
        if found > shape.context_max as usize {
            return Err(Refused::Context { found, context_max: shape.context_max });
        }
        if let Some(&token) = ask.prompt.iter().find(|token| **token >= vocab) {
            return Err(Refused::Token { token, vocab });
        }
        let positions = self.held_at_once(positions(&ask, shape.context_max));
        let needed = positions.div_ceil(shape.page_rows);
        if needed > shape.pages {
            return Err(Refused::Pages { positions, needed, pages: shape.pages });
        }
        // Choices that could run count as waiting until the next turn looks at them.
        let free = (self.limits.running_max as usize).saturating_sub(self.running.len());
        if self.waiting.len() + ask.choices.len() > self.limits.waiting_max + free {
            return Err(Refused::Busy { waiting: self.waiting.len() });
        }
        let request = RequestId(self.requests);
        self.requests += 1;
        let ask = Arc::new(ask);
        for at in 0..ask.choices.len() {
            let waiting = Choice {
                ask: ask.clone(),
                at,
                scores_prompt: ask.scores_prompt.filter(|_| at == 0),
                tokens: ask.prompt.clone(),
                counts: Arc::new(TokenCounts::new(&ask.prompt)),
                guide: None,
                scored: 1,
                began: false,
                chains: vec![],
            };
            self.waiting.insert(ChoiceId { request, choice: at as u32 }, waiting);
        }
        Ok(request)
    }

    /// Ends a choice, with an event unless it had ended before.
    pub fn cancel(&mut self, id: ChoiceId, events: &mut Vec<Event>) {
        self.end(id, End::Cancelled, events);
    }

    /// Ends all choices of a request.
    pub fn cancel_request(&mut self, request: RequestId, events: &mut Vec<Event>) {
        let of = ChoiceId { request, choice: 0 }..=ChoiceId { request, choice: u32::MAX };
        let waiting = self.waiting.range(of.clone()).map(|(&id, _)| id);
        let ids: Vec<ChoiceId> = waiting.chain(self.running.range(of).map(|(&id, _)| id)).collect();
        ids.into_iter().for_each(|id| self.cancel(id, events));
    }

    /// Ends everything that waits or runs.
    pub fn cancel_all(&mut self, events: &mut Vec<Event>) {
        let ids: Vec<ChoiceId> = self.waiting.keys().chain(self.running.keys()).copied().collect();
        ids.into_iter().for_each(|id| self.cancel(id, events));
    }

    /// Does one thing: launches what is ready, waits for the last step of the launch that runs, queues the one that goes on from it, or
    /// collects a launch. Whatever arrived until then is looked at in the next turn. Without anything to do it does nothing.
    ///
    /// # Errors
    /// The stepper's: this engine has ended, and nothing of its requests follows.
    pub fn turn(&mut self, now: Duration, events: &mut Vec<Event>) -> Result<(), Fault> {
        let late = |ask: &Ask| ask.deadline.is_some_and(|deadline| deadline <= now);
        let waiting = self.waiting.iter().filter(|(_, choice)| late(&choice.ask)).map(|(&id, _)| id);
        let running = self.running.iter().filter(|(_, running)| late(&running.choice.ask)).map(|(&id, _)| id);
        for id in waiting.chain(running).collect::<Vec<_>>() {
            self.end(id, End::Deadline, events);
        }
        if self.flying.is_empty() {
            self.admit(events);
            return match self.launch(events) {
                Some((launch, flying)) => self.fly(launch, flying),
                None => Ok(()),
            };
        }
        if let Some((launch, flying)) = self.launch_beside(events) {
            return self.fly(launch, flying);
        }
        match (self.steps_ahead(), self.flying.front_mut()) {
            (1.., Some(Flying { so_far: so_far @ None, .. })) => {
                *so_far = self.stepper.last_step()?;
                // The caller looks for what arrived before the next launch is queued.
                if so_far.is_some() { Ok(()) } else { self.collect(events) }
            }
            (steps @ 1.., _) => match self.launch_ahead(steps, events) {
                Some((launch, flying)) => self.fly(launch, flying),
                None => self.collect(events),
            },
            _ => self.collect(events),
        }
    }

    fn fly(&mut self, launch: Launch, flying: Flying) -> Result<(), Fault> {
        self.figures.launches += 1;
        self.figures.queued_ahead += self.flying.len() as u64;
        self.figures.steps += u64::from(launch.steps);
        self.figures.rows += u64::from(launch.steps) * launch.rows.len() as u64;
        let is_guided = launch.is_guided();
        self.stepper.submit(launch)?;
        let allowed = self.allowed(&flying);
        if is_guided {
            self.stepper.allow(allowed)?;
        }
        self.flying.push_back(flying);
        Ok(())
    }

    /// A launch to queue while the only other one runs, if one of the two reads a prompt alone. No row of it depends on the launch that runs,
    /// or takes pages from another request.
    fn launch_beside(&mut self, events: &mut Vec<Event>) -> Option<(Launch, Flying)> {
        if self.flying.len() > 1 || self.bounds.alone.is_none() {
            return None;
        }
        let before = self.flying.front()?;
        let is_alone = before.is_alone;
        let runs =
            |(id, run, _): &(ChoiceId, u64, usize)| self.running.get(id).is_some_and(|running| running.run == *run);
        if !before.rows.iter().all(runs) || !self.running.values().all(|running| running.is_plain) {
            return None;
        }
        self.admit(events);
        if !self.running.values().all(|running| running.is_plain) || !self.has_pages_to_read() {
            return None;
        }
        if is_alone { self.launch(events) } else { self.launch_alone(events) }
    }

    /// Whether there are pages for all tokens that are known, and for one more of each request, without any from another request.
    fn has_pages_to_read(&self) -> bool {
        let page_rows = self.bounds.shape.page_rows;
        let missing = |running: &Running| {
            let (from, to) = (running.submitted as u32, running.choice.tokens.len() as u32);
            let blocks = from / page_rows..(to + 1).min(self.bounds.shape.context_max).div_ceil(page_rows);
            blocks.filter(|block| self.pool.page(running.sequence, *block).is_none()).count()
        };
        let needed: usize = self.running.values().map(missing).sum();
        needed as u32 <= self.pool.free_pages() + self.pool.idle_pages()
    }

    /// Steps of a launch that continues the only launch in flight, with the same rows. 0: a row ends with that one as far as is known, a
    /// request waits or has still to read its prompt, or pages are short.
    fn steps_ahead(&self) -> u32 {
        let Some(before) = self.flying.front().filter(|before| before.is_decoding) else { return 0 };
        if self.flying.len() > 1 || !self.waiting.is_empty() || before.rows.len() != self.running.len() {
            return 0;
        }
        let Shape { context_max, .. } = self.bounds.shape;
        // With the last step of the launch before it a request waits for fewer steps than `steps_max`, and no longer on average.
        let mut steps = self.limits.steps_max - self.limits.steps_max.div_ceil(4);
        for (at, (id, run, position)) in before.rows.iter().enumerate() {
            let Some(Running { choice, .. }) = self.running.get(id).filter(|running| running.run == *run) else {
                return 0;
            };
            let request = &choice.ask.choices[choice.at];
            let so_far = before.so_far.as_ref().map_or(&[][..], |so_far| &so_far[at]);
            if so_far.iter().any(|token| request.end(*token).is_some()) {
                return 0;
            }
            let decided = (choice.tokens.len() - choice.prompt_count()) as u32 + before.steps;
            let of_context = context_max.saturating_sub(*position as u32 + before.steps);
            steps = steps.min(choice.ask.tokens_max.saturating_sub(decided)).min(of_context);
        }
        if self.has_pages(steps) { steps } else { 0 }
    }

    /// A launch of `steps` steps that continues the launch in flight.
    fn launch_ahead(&mut self, steps: u32, events: &mut Vec<Event>) -> Option<(Launch, Flying)> {
        let before = self.flying.front()?;
        let after = before.steps as usize;
        let of: Vec<(ChoiceId, u64, usize)> =
            before.rows.iter().map(|&(id, run, position)| (id, run, position + after)).collect();
        // There are pages for all of them.
        if !of.iter().all(|&(id, _, position)| self.make_room(id, position as u32 + steps, events)) {
            return None;
        }
        let mut rows = Vec::with_capacity(of.len());
        for (id, _, position) in &of {
            let running = self.running.get_mut(id)?;
            let request = &running.choice.ask.choices[running.choice.at];
            let (sequence, position, want) = (running.sequence, *position as u32, Want::Token(*request.sampler()));
            rows.push(LaunchRow { sequence, position, token: None, want });
            running.submitted += steps as usize;
        }
        let launch = self.launch_of(rows, steps);
        let flying = Flying::of(&launch, of, self.bounds.alone);
        Some((launch, flying))
    }

    /// A launch with all changes since the one before it.
    fn launch_of(&mut self, rows: Vec<LaunchRow>, steps: u32) -> Launch {
        let (edits, copies) = (self.pool.take_edits(), std::mem::take(&mut self.copies));
        self.keep_states(&rows);
        Launch { rows, steps, edits, copies }
    }

    /// Keeps the states that rows of a launch bring to where they are wanted, by copies before the launch after it.
    fn keep_states(&mut self, rows: &[LaunchRow]) {
        if self.snapshots.most() == 0 {
            return;
        }
        let page_rows = self.bounds.shape.page_rows as usize;
        for running in self.running.values_mut().filter(|running| running.rows_max() == 0) {
            if !rows.iter().any(|row| row.sequence == running.sequence) {
                continue;
            }
            let position = running.to_keep.remove(0);
            let chain = running.choice.chain(position / page_rows - 1, page_rows);
            if let Some(to) = self.snapshots.insert(chain) {
                self.copies.saves.push(StateCopy { from: running.sequence, to });
            }
        }
    }

    /// Frees a page that no running choice holds, with the snapshot at its end. False: there is none.
    fn free_page(&mut self) -> bool {
        let freed = self.prefixes.free_one(&mut self.pool);
        freed.inspect(|chain| self.snapshots.forget(*chain)).is_some()
    }

    /// Positions for which a choice holds pages at a time: `positions`, or fewer if attention has a window.
    fn held_at_once(&self, positions: u32) -> u32 {
        let Shape { window, rows, page_rows, .. } = self.bounds.shape;
        let rows = rows.max(self.bounds.alone.map_or(0, |alone| alone.most));
        window.map_or(positions, |window| positions.min(window + rows + 2 * page_rows))
    }

    /// Lets the oldest waiting choices run.
    fn admit(&mut self, events: &mut Vec<Event>) {
        let ready: Vec<ChoiceId> = self.waiting.keys().copied().collect();
        for id in ready {
            if self.running.len() >= self.limits.running_max as usize {
                return;
            }
            if self.waits_for_prompt(id) {
                continue;
            }
            let Some(mut choice) = self.waiting.remove(&id) else { continue };
            // Nothing to decide and nothing to score.
            if choice.ask.tokens_max == 0 && choice.scores_prompt.is_none() {
                events.extend([Event::Began { id, cached: 0 }, Event::Ended { id, end: End::Length }]);
                continue;
            }
            let page_rows = self.bounds.shape.page_rows as usize;
            let mut found = found_pages(&mut choice, &self.prefixes, &self.bounds);
            // Where pages end that others have, too.
            let common = found.len();
            let state = self.found_state(&mut choice, &mut found);
            // Pages for the prompt and its first token; those that were found need no free page.
            let positions = positions(&choice.ask, self.bounds.shape.context_max).min(choice.tokens.len() as u32 + 1);
            let positions = self.held_at_once(positions);
            let needed = (positions as usize).div_ceil(page_rows) - found.len();
            let idle_found = found.iter().filter(|page| self.pool.holders(**page) == 1).count();
            let free = self.pool.free_pages() as usize + self.pool.idle_pages() as usize - idle_found;
            let sequence = if needed + self.running.len() <= free { self.pool.open().ok() } else { None };
            let Some(sequence) = sequence else {
                self.waiting.insert(id, choice);
                return;
            };
            for &page in &found {
                // Cannot fail: these pages are kept, and have fewer positions than the context.
                let _ = self.pool.share(sequence, page);
                self.prefixes.touch(page);
            }
            while self.pool.reserve(sequence, positions).is_err() && self.free_page() {}
            if let Some((chain, from)) = state {
                self.snapshots.touch(chain);
                self.copies.restores.push(StateCopy { from, to: sequence });
            }
            let computed = found.len() * page_rows;
            let to_keep = self.states_to_keep(&choice, common, found.len());
            if !std::mem::replace(&mut choice.began, true) {
                self.figures.prefix_queries += choice.tokens.len() as u64;
                self.figures.prefix_hits += computed as u64;
                events.push(Event::Began { id, cached: computed as u32 });
                // Not earlier: a guide takes memory, and more choices wait than run.
                choice.guide = choice.ask.grammar.as_ref().map(Grammar::begin);
            }
            self.runs += 1;
            let (submitted, offered, run) = (computed, found.len(), self.runs);
            let wants_token = matches!(want(&choice, choice.tokens.len() - 1, &self.bounds), Want::Token(_));
            let is_plain = wants_token && choice.scores_prompt.is_none();
            self.running.insert(id, Running { choice, sequence, submitted, computed, offered, to_keep, run, is_plain });
        }
    }

    /// Shortens the pages that were found to those at whose end there is a snapshot, and returns this. Without a recurrent state it does nothing.
    fn found_state(&self, choice: &mut Choice, found: &mut Vec<PageId>) -> Option<(Chain, SequenceId)> {
        let Shape { page_rows, has_state, .. } = self.bounds.shape;
        let mut state = None;
        while has_state && !found.is_empty() && state.is_none() {
            let chain = choice.chain(found.len() - 1, page_rows as usize);
            state = self.snapshots.find(chain).map(|slot| (chain, slot));
            found.truncate(found.len() - usize::from(state.is_none()));
        }
        state
    }

    /// Where a choice that begins after `found` pages keeps its state: at the end of the `common` pages that other texts have, too, and at the end
    /// of the last page that its tokens fill.
    fn states_to_keep(&self, choice: &Choice, common: usize, found: usize) -> Vec<usize> {
        if self.snapshots.most() == 0 {
            return vec![];
        }
        let page_rows = self.bounds.shape.page_rows as usize;
        let full = (choice.tokens.len() - 1) / page_rows;
        let blocks = [common, full].into_iter().filter(|block| *block > found);
        let mut to_keep: Vec<usize> = blocks.map(|block| block * page_rows).collect();
        to_keep.dedup();
        to_keep
    }

    /// Whether another choice is still writing pages that this one would write, too.
    fn waits_for_prompt(&self, id: ChoiceId) -> bool {
        let first = ChoiceId { choice: 0, ..id };
        if id.choice == 0 || !self.bounds.shares_prefixes() {
            return false;
        }
        if self.waiting.contains_key(&first) {
            return true;
        }
        let page_rows = self.bounds.shape.page_rows as usize;
        let full = |choice: &Choice| (choice.prompt_count() - 1) / page_rows * page_rows;
        self.running.get(&first).is_some_and(|first| first.computed < full(&first.choice))
    }

    /// Steps of the next launch, if the stepper can choose all of its tokens and there are pages for all of them.
    fn steps(&self) -> u32 {
        let Shape { context_max, .. } = self.bounds.shape;
        let mut steps = self.limits.steps_max;
        for running in self.running.values().filter(|running| running.left() > 0) {
            let (choice, position) = (&running.choice, running.submitted as u32);
            let want = want(choice, running.submitted, &self.bounds);
            let is_chosen = matches!(want, Want::Token(_) | Want::Choice(_)) && choice.guide.is_none();
            if running.left() > 1 || !is_chosen {
                return 1;
            }
            let decided = (choice.tokens.len() - choice.prompt_count()) as u32;
            // All tokens of a launch come at its end: a client waits for its first one, which tells it that the text has begun.
            if decided == 0 {
                return 1;
            }
            steps = steps.min(choice.ask.tokens_max - decided).min(context_max - position);
        }
        if self.has_pages(steps) { steps } else { 1 }
    }

    /// Whether the choices that decode have pages for `steps` more steps, without any from another request.
    fn has_pages(&self, steps: u32) -> bool {
        let page_rows = self.bounds.shape.page_rows;
        // Positions below those that were submitted have pages.
        let blocks = |running: &Running| {
            let from = running.submitted as u32;
            (from + steps).div_ceil(page_rows) - from.div_ceil(page_rows)
        };
        let needed: u32 = self.running.values().map(blocks).sum();
        needed <= self.pool.free_pages() + self.pool.idle_pages()
    }

    /// Rows of prompts that a launch has beside the rows that decode.
    fn chunk_rows(&self, decoding: usize) -> usize {
        let left = (self.bounds.shape.rows as usize).saturating_sub(decoding);
        if decoding == 0 { left } else { left.min(self.limits.chunk_rows as usize) }
    }

    /// Rows of the prompt of a choice that a launch of their own may read. If others decode, the prompt's last token takes a row of a
    /// step of theirs, which costs them less.
    fn alone(&self, running: &Running, decoding: usize) -> usize {
        let Some(Alone { least, most, decides, leaves }) = self.bounds.alone else { return 0 };
        if decoding > 0 && running.left() <= STEPS_BESIDE * self.chunk_rows(decoding) {
            return 0;
        }
        let most = if decoding == 0 { most } else { most.min(self.limits.chunk_rows) };
        let most = running.rows_max().min(most as usize);
        let (choice, from) = (&running.choice, running.submitted);
        let others = usize::from(!decides || decoding > 0).max(leaves as usize);
        let count = waves::next_chunk(running.left().saturating_sub(others) as u32, most as u32) as usize;
        let wants_nothing = choice.scores_prompt.is_none() || choice.scored >= choice.prompt_count();
        if count >= least as usize && wants_nothing && want(choice, from, &self.bounds) == Want::Nothing {
            count
        } else {
            0
        }
    }

    /// Requests that decode: at most one of their tokens is in no launch.
    fn decoding(&self) -> usize {
        self.running.values().filter(|running| running.left() <= 1).count()
    }

    /// A launch that reads the oldest long prompt alone. If others decode, every second launch is theirs.
    fn launch_alone(&mut self, events: &mut Vec<Event>) -> Option<(Launch, Flying)> {
        let decoding = self.decoding();
        let may = decoding == 0 || !self.was_alone;
        let mut long = self.running.iter().map(|(&id, running)| (id, self.alone(running, decoding)));
        let (id, count) = long.find(|(_, count)| *count > 0).filter(|_| may)?;
        let from = self.running.get(&id)?.submitted;
        if !self.make_room(id, (from + count) as u32, events) {
            return None;
        }
        let running = self.running.get_mut(&id)?;
        let row = |position: usize| {
            let (token, want) = (Some(running.choice.tokens[position]), want(&running.choice, position, &self.bounds));
            LaunchRow { sequence: running.sequence, position: position as u32, token, want }
        };
        let rows = (from..from + count).map(row).collect();
        let flying = (from..from + count).map(|position| (id, running.run, position)).collect();
        running.submitted += count;
        self.was_alone = true;
        let launch = self.launch_of(rows, 1);
        let flying = Flying::of(&launch, flying, self.bounds.alone);
        Some((launch, flying))
    }

    /// The next launch; `None`: nothing is ready.
    fn launch(&mut self, events: &mut Vec<Event>) -> Option<(Launch, Flying)> {
        let decoding = self.decoding();
        let alone = self.launch_alone(events);
        self.was_alone = alone.is_some();
        if alone.is_some() {
            return alone;
        }
        let chunk_max = self.bounds.chunk_max;
        let steps = self.steps();
        let mut chunk_rows = self.chunk_rows(decoding);
        let (mut rows, mut flying) = (vec![], vec![]);
        let ids: Vec<ChoiceId> = self.running.keys().copied().collect();
        for id in ids {
            let Some(running) = self.running.get(&id) else { continue };
            let count = match running.left() {
                0 => continue,
                1 => 1,
                // It is read alone.
                _ if self.alone(running, decoding) > 0 => continue,
                left => left.min(chunk_rows).min(chunk_max as usize).min(running.rows_max()),
            };
            let from = running.submitted;
            if count == 0 || !self.make_room(id, (from + count - 1) as u32 + steps, events) {
                continue;
            }
            let Some(running) = self.running.get_mut(&id) else { continue };
            if running.left() > 1 {
                chunk_rows -= count;
            }
            for position in from..from + count {
                let (token, want) =
                    (Some(running.choice.tokens[position]), want(&running.choice, position, &self.bounds));
                rows.push(LaunchRow { sequence: running.sequence, position: position as u32, token, want });
                flying.push((id, running.run, position));
            }
            running.submitted += count - 1 + steps as usize;
        }
        if rows.is_empty() {
            return None;
        }
        let launch = self.launch_of(rows, steps);
        let flying = Flying::of(&launch, flying, self.bounds.alone);
        Some((launch, flying))
    }

    /// Finds what may follow the last tokens of a launch, while it runs. A failure shows again when the token is decided.
    fn allowed(&mut self, flying: &Flying) -> Vec<Option<TokenSet>> {
        let of_row = |(id, _, position): &(ChoiceId, u64, usize)| {
            let Running { choice, .. } = self.running.get_mut(id)?;
            let guide = choice.guide.as_mut().filter(|_| position + 1 == choice.tokens.len())?;
            guide.allowed().ok().cloned()
        };
        flying.rows.iter().map(of_row).collect()
    }

    /// Gives a choice pages for all positions below `positions`, from those that are free, then from prefixes, then from the
    /// youngest other choice. False: it is the youngest itself, and waits now.
    fn make_room(&mut self, id: ChoiceId, positions: u32, events: &mut Vec<Event>) -> bool {
        loop {
            let Some(running) = self.running.get(&id) else { return false };
            let sequence = running.sequence;
            // The first row in flight still reads the pages that it sees; older ones may go.
            let _ = self.pool.drop_behind(sequence, running.computed as u32);
            if self.pool.reserve(sequence, positions).is_ok() {
                return true;
            }
            if self.free_page() {
                continue;
            }
            let Some((&youngest, _)) = self.running.last_key_value() else { return false };
            if youngest == id && self.running.len() == 1 {
                // Refused at its arrival, if its pages are more than the cache has.
                self.end(id, End::Length, events);
                return false;
            }
            self.preempt(youngest);
            if youngest == id {
                return false;
            }
        }
    }

    fn preempt(&mut self, id: ChoiceId) {
        let Some(running) = self.running.remove(&id) else { return };
        self.close(&running);
        self.figures.preemptions += 1;
        self.waiting.insert(id, running.choice);
    }

    fn close(&mut self, running: &Running) {
        // In reverse, so that the end of a text counts as used earlier: it is wanted less often than the beginning.
        for block in (0..running.offered as u32).rev() {
            if let Some(page) = self.pool.page(running.sequence, block) {
                self.prefixes.touch(page);
            }
        }
        // Cannot fail: the sequence is open.
        let _ = self.pool.close(running.sequence);
    }

    fn end(&mut self, id: ChoiceId, end: End, events: &mut Vec<Event>) {
        if let Some(running) = self.running.remove(&id) {
            self.close(&running);
        } else if self.waiting.remove(&id).is_none() {
            return;
        }
        events.push(Event::Ended { id, end });
    }

    fn collect(&mut self, events: &mut Vec<Event>) -> Result<(), Fault> {
        let Some(flying) = self.flying.pop_front() else { return Ok(()) };
        let said = self.stepper.collect()?;
        if said.len() != flying.rows.len() {
            return Err(Fault::internal("a stepper answered for other rows than it was asked for"));
        }
        let mut scores: BTreeMap<ChoiceId, Vec<Decided>> = BTreeMap::new();
        for ((id, run, position), said) in flying.rows.into_iter().zip(said) {
            // It may have ended or been preempted meanwhile.
            let Some(running) = self.running.get_mut(&id).filter(|running| running.run == run) else { continue };
            running.computed = position + 1;
            let choice = &mut running.choice;
            if let Some(top) = choice.scores_prompt.filter(|_| position + 1 < choice.prompt_count())
                && position + 1 == choice.scored
            {
                let Said::Logits(logits) = &said else { return Err(unasked()) };
                let token = choice.tokens[position + 1];
                let Logprobs { token: logprob, top } = Logprobs::of(logits, token, top as usize);
                scores.entry(id).or_default().push(Decided { token, logprob: Some(logprob), top });
                choice.scored += 1;
            }
            if position + 1 == choice.tokens.len() {
                self.offer(id);
                if let Some(scored) = scores.remove(&id) {
                    events.push(Event::Prompt { id, scored });
                }
                self.decide(id, said, flying.steps, events)?;
            }
        }
        for (id, scored) in scores {
            events.push(Event::Prompt { id, scored });
        }
        let ids: Vec<ChoiceId> = self.running.keys().copied().collect();
        ids.into_iter().for_each(|id| self.offer(id));
        Ok(())
    }

    /// Offers the pages that became full to requests to come.
    fn offer(&mut self, id: ChoiceId) {
        let page_rows = self.bounds.shape.page_rows as usize;
        let Some(running) = self.running.get_mut(&id).filter(|_| self.bounds.shares_prefixes()) else { return };
        while (running.offered + 1) * page_rows <= running.computed {
            let chain = running.choice.chain(running.offered, page_rows);
            if let Some(page) = self.pool.page(running.sequence, running.offered as u32) {
                self.prefixes.insert(&mut self.pool, chain, page);
            }
            running.offered += 1;
        }
    }

    /// Decides what follows all tokens of a choice: one token, or one in each of several steps.
    fn decide(&mut self, id: ChoiceId, said: Said, steps: u32, events: &mut Vec<Event>) -> Result<(), Fault> {
        let Some(Running { choice, .. }) = self.running.get_mut(&id) else { return Ok(()) };
        if choice.ask.tokens_max == 0 {
            self.end(id, End::Length, events);
            return Ok(());
        }
        let allowed = match choice.guide.as_mut().map(Guide::allowed).transpose() {
            Ok(allowed) => allowed,
            Err(error) => {
                self.end(id, End::Grammar(error), events);
                return Ok(());
            }
        };
        let without = |token: u32| Ok(Decided { token, logprob: None, top: vec![] });
        let decided: Vec<Result<Decided, SampleError>> = match said {
            Said::Tokens(tokens) => tokens.into_iter().map(without).collect(),
            Said::Choices(decided) => decided,
            Said::Logits(logits) => {
                match choice.ask.choices[choice.at].choose(&logits, &choice.counts, allowed) {
                    Ok(decided) => drop(self.take(id, decided, events)),
                    Err(error) => self.end(id, End::Choice(error), events),
                }
                return Ok(());
            }
            Said::Nothing => return Err(unasked()),
        };
        let mut decided = decided.into_iter();
        for step in 0..steps {
            let Some(running) = self.running.get_mut(&id) else { return Ok(()) };
            if step > 0 {
                // The row of the token before.
                running.computed += 1;
                self.offer(id);
            }
            let (position, vocab) = (self.running[&id].choice.counts.position(), self.bounds.vocab as usize);
            match decided.next().unwrap_or(Err(SampleError::NoCandidate { position, vocab })) {
                Ok(decided) => {
                    if !self.take(id, decided, events) {
                        return Ok(());
                    }
                }
                Err(error) => self.end(id, End::Choice(error), events),
            }
        }
        Ok(())
    }

    /// Adds a token to a choice; false if the choice ends with it.
    fn take(&mut self, id: ChoiceId, decided: Decided, events: &mut Vec<Event>) -> bool {
        let context_max = self.bounds.shape.context_max as usize;
        let Some(Running { choice, .. }) = self.running.get_mut(&id) else { return false };
        choice.tokens.push(decided.token);
        Arc::make_mut(&mut choice.counts).push(decided.token);
        let count = choice.tokens.len() - choice.prompt_count();
        let guided = choice.guide.as_mut().map_or(Ok(false), |guide| guide.push(decided.token));
        let end = if let Err(error) = &guided {
            Some(End::Grammar(error.clone()))
        } else if choice.ask.choices[choice.at].end(decided.token).is_some() || guided == Ok(true) {
            Some(End::Stop)
        } else if count >= choice.ask.tokens_max as usize || choice.tokens.len() > context_max {
            Some(End::Length)
        } else {
            None
        };
        events.push(Event::Token { id, decided });
        if let Some(end) = end {
            self.end(id, end, events);
            return false;
        }
        true
    }
}

/// Positions that a request computes at most: its last token is decided at the one before.
fn positions(ask: &Ask, context_max: u32) -> u32 {
    let last = ask.prompt.len() as u64 + u64::from(ask.tokens_max.max(1)) - 1;
    last.min(u64::from(context_max)) as u32
}

/// The kept pages with the first tokens of a choice.
fn found_pages(choice: &mut Choice, prefixes: &Prefixes, bounds: &Bounds) -> Vec<PageId> {
    let page_rows = bounds.shape.page_rows as usize;
    let blocks = if bounds.shares_prefixes() { choice.reusable() / page_rows } else { 0 };
    (0..blocks).map_while(|block| prefixes.find(choice.chain(block, page_rows))).collect()
}

/// What the row of a choice at a position is computed for.
fn want(choice: &Choice, position: usize, bounds: &Bounds) -> Want {
    if choice.scores_prompt.is_some() && position + 1 < choice.prompt_count() && position + 1 >= choice.scored {
        return Want::Logits;
    }
    if position + 1 < choice.tokens.len() || choice.ask.tokens_max == 0 {
        return Want::Nothing;
    }
    let request = &choice.ask.choices[choice.at];
    let is_guided = choice.guide.is_some();
    if !request.sampler().is_filtered() && request.beyond_kernels().is_empty() && !is_guided {
        return Want::Token(*request.sampler());
    }
    match bounds.choices {
        Some(most) if request.logprobs().unwrap_or(0) <= most => {
            Want::Choice(Chooser::new(choice.ask.clone(), choice.at, choice.counts.clone(), is_guided))
        }
        _ => Want::Logits,
    }
}

fn unasked() -> Fault {
    Fault::internal("a stepper gave no logits where they were asked for")
}
