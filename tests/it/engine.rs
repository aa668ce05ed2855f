//! Owns the tests of the engine, over a stepper that is a hash: its logits depend on every token that a row can see through the
//! page table, so a wrong page, an old one or a row out of order changes a token. With recurrent states it also keeps the tokens that each state
//! has seen, which have to be the same.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use monobloc::engine::*;
use monobloc::error::Fault;
use monobloc::grammar::{Grammar, Source, Vocabulary};
use monobloc::random::Random;
use monobloc::rows::{self, Guard, PageId, Row, SequenceId, Shape};
use monobloc::sample::Decided;
use monobloc::sample::{Request, RequestSettings, SampleError, SampleSettings, TokenCounts, TokenSet};

const VOCAB: u32 = 40;

fn logits(tokens: &[u32]) -> Vec<f32> {
    let seed =
        tokens.iter().fold(0x9E37_79B9_7F4A_7C15_u64, |h, &t| (h ^ u64::from(t + 1)).wrapping_mul(0x100_0000_01B3));
    let mut random = Random::new(seed);
    (0..VOCAB).map(|_| random.below(4000) as f32 / 500.0).collect()
}

/// Where each block of each sequence lies.
type Table = BTreeMap<(SequenceId, u32), PageId>;

/// A stepper that runs launches late: a launch is executed when its last step or its end is waited for, with the page table that it was
/// submitted with. Two launches may be queued, as on a device.
struct Toy {
    bounds: Bounds,
    is_deep: bool,
    table: Table,
    /// The tokens of each page.
    pages: Vec<Vec<Option<u32>>>,
    /// The tokens that the recurrent state of each sequence has seen.
    states: BTreeMap<SequenceId, Vec<u32>>,
    /// Judges the tables of every launch, as that of a real stepper does.
    guard: Guard,
    queued: VecDeque<Queued>,
    /// What each row of the launch that was executed last decided; `None`: nothing.
    decided: Vec<Option<u32>>,
    /// Draws what a device may do: report no token before the end, or take no launch ahead. `None`: it does neither.
    moods: Option<Random>,
    log: Vec<Launch>,
    /// The launch that fails.
    fails_at: usize,
    /// A position after which no logit is a number.
    mute_at: u32,
}

struct Queued {
    launch: Launch,
    table: Table,
    allowed: Option<Vec<Option<TokenSet>>>,
    said: Option<Vec<Said>>,
    /// A launch that goes on from it may be submitted.
    is_in_last_step: bool,
}

impl Toy {
    fn new(shape: Shape, chunk_max: u32, is_deep: bool) -> Toy {
        let bounds = Bounds { shape, chunk_max, alone: None, vocab: VOCAB, steps_max: 5, choices: None };
        let pages = vec![vec![None; shape.page_rows as usize]; shape.pages as usize];
        Toy {
            bounds,
            is_deep,
            table: BTreeMap::new(),
            pages,
            states: BTreeMap::new(),
            guard: Guard::new(Shape { rows: u32::MAX, ..shape }),
            queued: VecDeque::new(),
            decided: vec![],
            moods: Some(Random::new(3)),
            log: vec![],
            fails_at: usize::MAX,
            mute_at: u32::MAX,
        }
    }

    fn at(&mut self, table: &Table, sequence: SequenceId, position: u32) -> &mut Option<u32> {
        let page_rows = self.bounds.shape.page_rows;
        let page = table.get(&(sequence, position / page_rows)).expect("a page");
        &mut self.pages[page.index()][(position % page_rows) as usize]
    }

    /// Writes a token of a sequence.
    fn put(&mut self, table: &Table, sequence: SequenceId, position: u32, token: u32) {
        *self.at(table, sequence, position) = Some(token);
        if self.bounds.shape.has_state {
            let state = self.states.entry(sequence).or_default();
            if position == 0 {
                state.clear();
            }
            assert_eq!(state.len(), position as usize, "a state of another position");
            state.push(token);
        }
    }

    /// The logits after a position.
    fn seen(&mut self, table: &Table, sequence: SequenceId, position: u32) -> Vec<f32> {
        let window = self.bounds.shape.window.unwrap_or(u32::MAX);
        let from = (position + 1).saturating_sub(window);
        let tokens: Vec<u32> = (from..=position).map(|p| self.at(table, sequence, p).expect("a written row")).collect();
        if self.bounds.shape.has_state {
            assert_eq!(self.states[&sequence][..=position as usize], tokens, "a state of another text");
        }
        logits(&tokens)
    }

    /// The pages that a launch writes, with the sequences that they are of.
    fn written(launch: &Launch, table: &Table, page_rows: u32) -> Vec<(SequenceId, PageId)> {
        let of = |row: &LaunchRow| {
            let (sequence, first) = (row.sequence, row.position);
            (first..first + launch.steps).map(move |at| (sequence, table[&(sequence, at / page_rows)]))
        };
        launch.rows.iter().flat_map(of).collect()
    }

    /// What a launch asks for, whatever it computes.
    fn judge(&self, launch: &Launch) {
        let Shape { rows, page_rows, context_max, .. } = self.bounds.shape;
        let is_alone = self.bounds.alone.is_some_and(|alone| launch.is(alone));
        assert!(is_alone || (1..=rows as usize).contains(&launch.rows.len()));
        assert!((1..=self.bounds.steps_max).contains(&launch.steps));
        let mut count: BTreeMap<SequenceId, u32> = BTreeMap::new();
        let mut last: BTreeMap<SequenceId, u32> = BTreeMap::new();
        for row in &launch.rows {
            assert!(row.position + launch.steps <= context_max && row.token.is_none_or(|token| token < VOCAB));
            assert!(launch.steps == 1 || matches!(row.want, Want::Token(_) | Want::Choice(_)));
            *count.entry(row.sequence).or_default() += 1;
            if let Some(last) = last.insert(row.sequence, row.position) {
                assert_eq!(row.position, last + 1);
            }
        }
        for (_, page) in Toy::written(launch, &self.table, page_rows) {
            assert_eq!(self.table.values().filter(|other| **other == page).count(), 1, "a shared page is written");
        }
        assert!(is_alone || count.values().all(|count| *count <= self.bounds.chunk_max));
        assert!(launch.steps == 1 || count.values().all(|count| *count == 1));
        assert!(launch.steps == 1 || !launch.is_guided());
        let Some(before) = self.queued.back() else {
            assert!(launch.rows.iter().all(|row| row.token.is_some()), "a token that no launch decides");
            return;
        };
        assert_eq!(self.queued.len(), 1);
        let reads_alone = |launch: &Launch| self.bounds.alone.is_some_and(|alone| launch.is(alone));
        let goes_on = !reads_alone(launch) && !reads_alone(&before.launch);
        assert!(!goes_on || before.is_in_last_step, "a launch that is queued too early");
        assert!(!goes_on || before.launch.rows.len() == launch.rows.len());
        for row in before.launch.rows.iter().chain(&launch.rows) {
            assert!(matches!(row.want, Want::Nothing | Want::Token(_)), "{row:?} beside another launch");
        }
        for (old, new) in before.launch.rows.iter().zip(&launch.rows).filter(|_| goes_on) {
            assert_eq!((old.sequence, old.position + before.launch.steps), (new.sequence, new.position));
            assert!(new.token.is_none() && matches!(new.want, Want::Token(_)));
        }
        // What a launch may still write belongs to no other sequence.
        for (sequence, page) in Toy::written(&before.launch, &before.table, page_rows) {
            let others = self.table.iter().filter(|((other, _), held)| **held == page && *other != sequence);
            assert_eq!(others.count(), 0, "a page was freed early");
        }
    }

    /// Runs the oldest launch that was not run.
    fn execute(&mut self) {
        let at = self.queued.iter().position(|queued| queued.said.is_none()).expect("a launch");
        let (launch, table) = (self.queued[at].launch.clone(), self.queued[at].table.clone());
        let allowed = self.queued[at].allowed.clone();
        assert_eq!(allowed.is_some(), launch.is_guided(), "a launch that was not completed");
        // What has no holder is forgotten: reading it again is a fault.
        for page in (0..self.bounds.shape.pages).map(PageId) {
            if !table.values().any(|held| *held == page) {
                self.pages[page.index()].fill(None);
            }
        }
        for copy in launch.copies.saves.iter().chain(&launch.copies.restores) {
            let state = self.states[&copy.from].clone();
            self.states.insert(copy.to, state);
        }
        let before = std::mem::take(&mut self.decided);
        for (n, row) in launch.rows.iter().enumerate() {
            // A row that decided nothing goes on with any token.
            let token = row.token.unwrap_or_else(|| before[n].unwrap_or(0));
            self.put(&table, row.sequence, row.position, token);
        }
        let rows = launch.rows.iter().enumerate();
        let said: Vec<Said> = rows
            .map(|(n, row)| self.say(&table, row, launch.steps, allowed.as_ref().and_then(|of| of[n].as_ref())))
            .collect();
        let last = |said: &Said| match said {
            Said::Tokens(tokens) if tokens.len() == launch.steps as usize => tokens.last().copied(),
            _ => None,
        };
        self.decided = said.iter().map(last).collect();
        self.queued[at].said = Some(said);
    }

    fn say(&mut self, table: &Table, row: &LaunchRow, steps: u32, allowed: Option<&TokenSet>) -> Said {
        let positions = row.position..row.position + steps;
        match &row.want {
            Want::Nothing => Said::Nothing,
            Want::Logits => Said::Logits(self.seen(table, row.sequence, row.position)),
            Want::Token(sampler) => {
                let mut tokens = vec![];
                for position in positions {
                    if let Some(&token) = tokens.last() {
                        self.put(table, row.sequence, position, token);
                    }
                    if position >= self.mute_at {
                        break;
                    }
                    let logits = self.seen(table, row.sequence, position);
                    tokens.push(sampler.choose(&logits, position + 1).unwrap());
                }
                Said::Tokens(tokens)
            }
            Want::Choice(chooser) => {
                let (mut counts, mut decided) = (chooser.counts().clone(), vec![]);
                for position in positions {
                    if let Some(Ok(Decided { token, .. })) = decided.last() {
                        self.put(table, row.sequence, position, *token);
                        counts.push(*token);
                    }
                    let mut logits = self.seen(table, row.sequence, position);
                    if position >= self.mute_at {
                        logits.fill(f32::NAN);
                    }
                    decided.push(chooser.request().choose(&logits, &counts, allowed));
                    if decided.last().is_some_and(Result::is_err) {
                        break;
                    }
                }
                Said::Choices(decided)
            }
        }
    }
}

impl Stepper for Toy {
    fn bounds(&self) -> Bounds {
        self.bounds
    }

    fn submit(&mut self, launch: Launch) -> Result<(), Fault> {
        if self.log.len() == self.fails_at {
            return Err(Fault::environment("the device is gone"));
        }
        for edit in &launch.edits {
            match edit.page {
                Some(page) => self.table.insert((edit.sequence, edit.block), page),
                None => self.table.remove(&(edit.sequence, edit.block)),
            };
        }
        self.judge(&launch);
        let row = |row: &LaunchRow| Row {
            sequence: row.sequence,
            position: row.position,
            wants_logits: row.want != Want::Nothing,
        };
        let (rows, steps) = (launch.rows.iter().map(row).collect(), launch.steps);
        let tables = rows::Request { rows, steps, edits: launch.edits.clone() };
        match self.guard.admit_after(&launch.copies, &tables) {
            Ok(tables) => tables.finish(steps),
            Err(refused) => panic!("{refused}: {:?}, {:?}", launch.edits, launch.copies),
        }
        self.log.push(launch.clone());
        let table = self.table.clone();
        self.queued.push_back(Queued { launch, table, allowed: None, said: None, is_in_last_step: false });
        Ok(())
    }

    fn allow(&mut self, allowed: Vec<Option<TokenSet>>) -> Result<(), Fault> {
        let last = self.queued.back_mut().expect("a launch");
        assert_eq!(allowed.len(), last.launch.rows.len());
        last.allowed = Some(allowed);
        Ok(())
    }

    fn last_step(&mut self) -> Result<Option<Vec<Vec<u32>>>, Fault> {
        assert_eq!(self.queued.len(), 1);
        let mut draws = |of| self.moods.as_mut().is_some_and(|random| random.below(of) == 0);
        let (refuses, is_silent) = (draws(16), draws(4));
        if !self.is_deep || refuses {
            return Ok(None);
        }
        self.execute();
        self.queued[0].is_in_last_step = true;
        let so_far = |said: &Said| match said {
            Said::Tokens(tokens) if !is_silent => tokens[..tokens.len().saturating_sub(1)].to_vec(),
            _ => vec![],
        };
        Ok(self.queued[0].said.as_ref().map(|said| said.iter().map(so_far).collect()))
    }

    fn collect(&mut self) -> Result<Vec<Said>, Fault> {
        if self.queued.front().is_some_and(|queued| queued.said.is_none()) {
            self.execute();
        }
        Ok(self.queued.pop_front().and_then(|queued| queued.said).expect("a launch"))
    }
}

const SHAPE: Shape =
    Shape { rows: 6, sequences: 11, context_max: 64, page_rows: 4, pages: 40, window: None, has_state: false };
const LIMITS: Limits = Limits { running_max: 6, waiting_max: 100, chunk_rows: 3, steps_max: 1 };

fn greedy() -> RequestSettings {
    RequestSettings::plain(SampleSettings::greedy())
}

fn request(settings: &RequestSettings) -> Request {
    settings.resolve(VOCAB, &[3, 9]).unwrap()
}

fn ask(prompt: &[u32], tokens_max: u32) -> Ask {
    let settings = RequestSettings { ignore_eos: true, ..greedy() };
    Ask {
        prompt: prompt.to_vec(),
        tokens_max,
        choices: vec![request(&settings)],
        scores_prompt: None,
        grammar: None,
        deadline: None,
    }
}

/// Lists of numbers, over a vocabulary in which few ids have bytes.
fn lists() -> Grammar {
    let mut tokens = vec![vec![]; VOCAB as usize];
    for (id, text) in (10..).zip(["[", "]", ",", "1", "2", "0", " ", "[]", "],", "12", "1,", "x"]) {
        tokens[id] = text.as_bytes().to_vec();
    }
    let schema = serde_json::json!({ "type": "array", "maxItems": 5, "items": { "type": ["integer", "array"] } });
    let source = Source::Json(schema.to_string());
    Vocabulary::new(&tokens, &[3, 9]).unwrap().compile(&source).unwrap()
}

/// What a choice is to get, by the hash alone.
fn expected(ask: &Ask, choice: usize, shape: &Shape) -> (Vec<Decided>, End) {
    let window = shape.window.map_or(usize::MAX, |window| window as usize);
    let (mut tokens, mut counts, mut decided) = (ask.prompt.clone(), TokenCounts::new(&ask.prompt), vec![]);
    let request = &ask.choices[choice];
    let mut guide = ask.grammar.as_ref().map(Grammar::begin);
    while decided.len() < ask.tokens_max as usize && tokens.len() <= shape.context_max as usize {
        let seen = &tokens[tokens.len().saturating_sub(window)..];
        let allowed = guide.as_mut().map(|guide| guide.allowed().unwrap());
        let next = request.choose(&logits(seen), &counts, allowed).unwrap();
        let complete = guide.as_mut().is_some_and(|guide| guide.push(next.token).unwrap());
        tokens.push(next.token);
        counts.push(next.token);
        decided.push(next);
        if request.end(tokens[tokens.len() - 1]).is_some() || complete {
            return (decided, End::Stop);
        }
    }
    (decided, End::Length)
}

fn until_idle(engine: &mut Engine<Toy>) -> Vec<Event> {
    let mut events = vec![];
    while !engine.is_idle() {
        engine.turn(Duration::ZERO, &mut events).unwrap();
    }
    events
}

fn decided_of(events: &[Event], of: ChoiceId) -> Vec<Decided> {
    let token = |event: &Event| match event {
        Event::Token { id, decided } if *id == of => Some(decided.clone()),
        _ => None,
    };
    events.iter().filter_map(token).collect()
}

fn end_of(events: &[Event], of: ChoiceId) -> Option<&End> {
    events.iter().find_map(|event| match event {
        Event::Ended { id, end } if *id == of => Some(end),
        _ => None,
    })
}

/// Requests of all kinds that come and go at random over a cache that is too small for them.
fn storm(shape: Shape, chunk_max: u32, is_deep: bool, steps_max: u32) -> (Vec<Event>, Vec<Launch>, Figures, usize) {
    storm_over(Toy::new(shape, chunk_max, is_deep), Limits { steps_max, ..LIMITS }, 6, false)
}

/// `pause`: turns between two requests, on average.
fn storm_over(toy: Toy, limits: Limits, pause: u64, is_plain: bool) -> (Vec<Event>, Vec<Launch>, Figures, usize) {
    let shape = toy.bounds.shape;
    let mut engine = Engine::new(toy, limits).unwrap();
    let grammar = lists();
    let mut random = Random::new(7);
    let mut asks: BTreeMap<RequestId, Ask> = BTreeMap::new();
    let mut cancelled = vec![];
    let mut events = vec![];
    // Launches that are waited for although a row of them has ended.
    let mut leftovers = 0;
    for turn in 0..2000 * pause {
        if turn < 1700 * pause && random.below(pause as usize) == 0 {
            // Few tokens, so that prompts begin alike.
            let prompt: Vec<u32> = (0..1 + random.below(30)).map(|i| (i as u32 / 7) * random.below(2) as u32).collect();
            let mut ask = ask(&prompt, random.below(40) as u32);
            let mut settings = greedy();
            settings.ignore_eos = random.below(2) == 0;
            settings.sampling.temperature = random.below(2) as f32;
            let settings_of_kernels = settings.clone();
            settings.penalties.frequency = random.below(2) as f32 * 0.5;
            settings.logprobs = (random.below(4) == 0).then(|| random.below(3) as u32);
            if is_plain {
                settings = settings_of_kernels;
            }
            let of =
                |seed| RequestSettings { sampling: SampleSettings { seed, ..settings.sampling }, ..settings.clone() };
            let count = if random.below(4) == 0 { 3 } else { 1 };
            ask.choices = (0..count).map(|at| request(&of(turn + at))).collect();
            ask.scores_prompt = (random.below(8) == 0 && !is_plain).then_some(2);
            ask.grammar = (random.below(4) == 0 && !is_plain).then(|| grammar.clone());
            if let Ok(request) = engine.submit(ask.clone()) {
                asks.insert(request, ask);
            }
        }
        if random.below(7 * pause as usize) == 0
            && let Some((&request, ask)) = asks.last_key_value()
        {
            let id = ChoiceId { request, choice: random.below(ask.choices.len()) as u32 };
            engine.cancel(id, &mut events);
            cancelled.push(id);
        }
        engine.turn(Duration::from_millis(turn), &mut events).unwrap();
        let running = engine.figures().running;
        let is_left = |queued: &Queued| queued.launch.rows[0].token.is_none() && queued.launch.rows.len() > running;
        leftovers += usize::from(engine.stepper.queued.front().is_some_and(is_left));
    }
    events.extend(until_idle(&mut engine));
    let mut events_of: BTreeMap<ChoiceId, Vec<Event>> = BTreeMap::new();
    for event in &events {
        let (Event::Began { id, .. } | Event::Prompt { id, .. } | Event::Token { id, .. } | Event::Ended { id, .. }) =
            event;
        events_of.entry(*id).or_default().push(event.clone());
    }
    for (&request, ask) in &asks {
        for choice in 0..ask.choices.len() {
            let id = ChoiceId { request, choice: choice as u32 };
            let events = events_of.get(&id).map_or(&[][..], Vec::as_slice);
            let (decided, end) = expected(ask, choice, &shape);
            let found = decided_of(events, id);
            match end_of(events, id) {
                Some(End::Cancelled) => assert!(cancelled.contains(&id) && decided.starts_with(&found)),
                other => assert_eq!((&found, other), (&decided, Some(&end)), "{id:?}: {ask:?}"),
            }
            let prompt: Vec<u32> = events
                .iter()
                .filter_map(|event| match event {
                    Event::Prompt { scored, .. } => Some(scored.iter().map(|scored| scored.token)),
                    _ => None,
                })
                .flatten()
                .collect();
            let scores = ask.scores_prompt.is_some() && choice == 0 && end_of(events, id) != Some(&End::Cancelled);
            assert!(!scores || prompt == ask.prompt[1..], "{id:?}");
        }
    }
    assert!(asks.len() > 500, "{}", asks.len());
    let figures = engine.figures();
    assert_eq!((figures.running, figures.waiting, figures.pages_used), (0, 0, 0));
    (events, engine.stepper.log, figures, leftovers)
}

#[test]
fn every_request_gets_its_tokens_whatever_runs_beside_it() {
    let none =
        [(1, false, 1), (4, false, 1), (6, false, 5), (4, true, 1), (6, true, 5), (4, true, 3)].map(|of| (of, None));
    // The stepper chooses for requests with up to one log-probability beside that of the token.
    let some = [(6, false, 5), (4, true, 3)].map(|of| (of, Some(1)));
    for ((chunk_max, is_deep, steps), choices) in none.into_iter().chain(some) {
        let mut toy = Toy::new(SHAPE, chunk_max, is_deep);
        toy.bounds.choices = choices;
        let (_, log, figures, _) = storm_over(toy, Limits { steps_max: steps, ..LIMITS }, 6, false);
        let chosen = log.iter().flat_map(|launch| &launch.rows).any(|row| matches!(row.want, Want::Choice(_)));
        assert_eq!(chosen, choices.is_some());
        assert!(figures.preemptions > 20 && figures.prefix_hits > 500, "{figures:?}");
        assert!(log.len() > 1000);
        let most = log.iter().map(|launch| launch.steps).max();
        assert_eq!((most, figures.steps > figures.launches), (Some(steps), steps > 1));
    }
}

/// Few requests at a time, so that most launches are queued while the one before runs: rows end in both, are cancelled between them, and
/// run out of pages.
#[test]
fn launches_that_are_queued_ahead_change_no_token() {
    let storms = [(40, None, 6, false), (40, None, 6, true), (22, None, 6, true), (16, Some(9), 3, true)];
    for (pages, window, running_max, is_plain) in storms {
        let toy = Toy::new(Shape { pages, window, ..SHAPE }, 6, true);
        let limits = Limits { steps_max: 5, running_max, ..LIMITS };
        let (_, log, figures, leftovers) = storm_over(toy, limits, 24, is_plain);
        assert!(leftovers > 20, "{leftovers} launches with a row that has ended");
        let least = if is_plain { 1000 } else { 500 };
        assert!(figures.queued_ahead > least && figures.launches == log.len() as u64, "{figures:?}");
        assert!(pages > 22 || window.is_some() || figures.preemptions > 20, "{figures:?}");
        let ahead = log.iter().filter(|launch| launch.rows[0].token.is_none());
        assert_eq!(ahead.clone().count() as u64, figures.queued_ahead);
        assert!(ahead.clone().any(|launch| launch.rows.len() > 2) && ahead.clone().all(|launch| launch.steps <= 3));
    }
}

/// Chunks that are read alone have more rows than other launches. The last token of a prompt decides one there, or is left out.
#[test]
fn long_prompts_are_read_alone() {
    let storms = [(None, false, 20, true), (None, true, 9, true), (Some(9), true, 20, false)];
    for (decides, (window, is_deep, chunk_rows, is_plain)) in
        [false, true].into_iter().flat_map(|decides| storms.map(|storm| (decides, storm)))
    {
        let alone = Alone { least: 8, most: 20, decides, leaves: 0 };
        let mut toy = Toy::new(Shape { window, ..SHAPE }, 4, is_deep);
        toy.bounds.alone = Some(alone);
        let (_, log, figures, _) = storm_over(toy, Limits { chunk_rows, steps_max: 4, ..LIMITS }, 6, is_plain);
        let long = log.iter().filter(|launch| launch.is(alone)).count();
        assert!(long > 100 && (window.is_some() || figures.preemptions > 0), "{long} of {}, {figures:?}", log.len());
        assert!(log.iter().any(|launch| launch.is(alone) && launch.rows.len() > SHAPE.rows as usize));
        let last = |launch: &Launch| launch.rows.last().is_some_and(|row| row.want != Want::Nothing);
        assert_eq!(log.iter().any(|launch| launch.is(alone) && last(launch)), decides);
        // Beside a launch that runs; in the other storms launches go on from it.
        assert!(is_deep || figures.queued_ahead > 100, "{figures:?}");
    }
}

/// Beside rows that decode, a prompt that fits into three of their steps takes rows of these; a longer one is read alone, and its last token
/// takes a row of a step.
#[test]
fn short_prompts_take_rows_of_the_steps_of_others() {
    let shape =
        Shape { rows: 64, sequences: 20, context_max: 1024, page_rows: 64, pages: 60, window: None, has_state: false };
    let limits = Limits { chunk_rows: 512, steps_max: 1, ..LIMITS };
    for (decoding, prompt, (decides, leaves), expected) in [
        (4, 128, (false, 0), vec![64, 64, 12, 5]),
        (4, 180, (false, 0), vec![64, 64, 64, 5]),
        (4, 181, (false, 0), vec![180, 5, 5]),
        (4, 181, (true, 0), vec![180, 5, 5]),
        (0, 128, (false, 0), vec![127, 1]),
        (0, 128, (true, 0), vec![128, 1]),
        (0, 600, (true, 0), vec![384, 216, 1]),
        // The last ones are not read alone.
        (0, 600, (false, 130), vec![470, 64, 64, 2]),
        (0, 190, (false, 130), vec![64, 64, 62]),
    ] {
        let mut toy = Toy::new(shape, 64, false);
        toy.bounds.alone = Some(Alone { least: 64, most: 512, decides, leaves });
        let mut engine = Engine::new(toy, limits).unwrap();
        let mut events = vec![];
        for at in 0..decoding {
            engine.submit(ask(&[at, 2], 200)).unwrap();
        }
        for _ in 0..6 {
            engine.turn(Duration::ZERO, &mut events).unwrap();
        }
        let before = engine.stepper.log.len();
        let tokens: Vec<u32> = (0..prompt).map(|at| at * at % VOCAB).collect();
        let request = engine.submit(ask(&tokens, 20)).unwrap();
        while decided_of(&events, ChoiceId { request, choice: 0 }).is_empty() {
            engine.turn(Duration::ZERO, &mut events).unwrap();
        }
        until_idle(&mut engine);
        let rows: Vec<usize> = engine.stepper.log[before..].iter().map(|launch| launch.rows.len()).collect();
        assert_eq!(rows[..expected.len()], expected, "{prompt} beside {decoding}");
    }
}

#[test]
fn who_decodes_has_every_second_launch_beside_long_prompts() {
    let mut toy = Toy::new(Shape { pages: 80, ..SHAPE }, 4, false);
    let alone = Alone { least: 8, most: 10, decides: false, leaves: 0 };
    toy.bounds.alone = Some(alone);
    let mut engine = Engine::new(toy, Limits { chunk_rows: 10, ..LIMITS }).unwrap();
    let mut events = vec![];
    engine.submit(ask(&[1, 2], 40)).unwrap();
    for turn in 0..4 {
        engine.turn(Duration::from_millis(turn), &mut events).unwrap();
    }
    let prompt: Vec<u32> = (0..41).map(|n| n % 7).collect();
    engine.submit(ask(&prompt, 3)).unwrap();
    engine.submit(ask(&prompt[3..], 3)).unwrap();
    until_idle(&mut engine);
    let kinds: Vec<bool> = engine.stepper.log.iter().map(|launch| launch.is(alone)).collect();
    // Three chunks of ten of each: what is left of 11 and 8 tokens fits into three steps with five rows for prompts.
    assert_eq!(kinds.iter().filter(|alone| **alone).count(), 6);
    assert!(kinds.windows(2).all(|pair| pair != [true, true]), "{kinds:?}");
}

#[test]
fn windows_give_their_pages_back() {
    // A whole context has 16 pages, and several requests run in fewer.
    let shape = Shape { window: Some(9), pages: 12, ..SHAPE };
    let (_, log, figures, _) = storm(shape, 4, true, 4);
    assert_eq!(figures.prefix_hits, 0);
    let deep = |launch: &Launch| launch.rows.iter().any(|row| row.position > 48);
    let together = |launch: &&Launch| launch.rows.iter().any(|row| row.sequence != launch.rows[0].sequence);
    assert!(log.iter().filter(together).any(deep));
}

#[test]
fn the_same_arrivals_make_the_same_launches() {
    let (a, b) = (storm(SHAPE, 4, true, 5), storm(SHAPE, 4, true, 5));
    assert!(a.0 == b.0 && a.1 == b.1);
}

#[test]
fn a_prompt_beside_decoding_rows_takes_few_of_them() {
    let mut engine = Engine::new(Toy::new(SHAPE, 6, false), LIMITS).unwrap();
    let mut events = vec![];
    let short = engine.submit(ask(&[1], 12)).unwrap();
    engine.turn(Duration::ZERO, &mut events).unwrap();
    let long = engine.submit(ask(&[2; 20], 4)).unwrap();
    events.extend(until_idle(&mut engine));
    for request in [short, long] {
        assert_eq!(end_of(&events, ChoiceId { request, choice: 0 }), Some(&End::Length));
    }
    let rows: Vec<usize> = engine.stepper.log.iter().map(|launch| launch.rows.len()).collect();
    // The prompt alone would take four launches of six rows: 20 rows in threes beside one, then both decode.
    assert_eq!(rows[..9], [1, 4, 4, 4, 4, 4, 4, 3, 2]);
}

/// The steps of each launch until nothing is left to do.
fn steps_of(asks: &[Ask], shape: Shape, steps_max: u32) -> Vec<u32> {
    let mut engine = Engine::new(Toy::new(shape, 6, false), Limits { steps_max, ..LIMITS }).unwrap();
    for ask in asks {
        engine.submit(ask.clone()).unwrap();
    }
    let events = until_idle(&mut engine);
    for (request, ask) in (0..).map(RequestId).zip(asks) {
        let id = ChoiceId { request, choice: 0 };
        let (decided, end) = expected(ask, 0, &shape);
        assert_eq!((decided_of(&events, id), end_of(&events, id)), (decided, Some(&end)));
    }
    engine.stepper.log.iter().map(|launch| launch.steps).collect()
}

#[test]
fn launches_have_several_steps_while_the_stepper_chooses_every_token() {
    // The prompt's launch decides the first token.
    assert_eq!(steps_of(&[ask(&[1, 2], 12)], SHAPE, 4), [1, 4, 4, 3]);
    assert_eq!(steps_of(&[ask(&[1, 2], 12)], SHAPE, 9), [1, 5, 5, 1]);
    // No longer than the shortest request.
    assert_eq!(steps_of(&[ask(&[1, 2], 3), ask(&[2, 3], 7)], SHAPE, 4), [1, 2, 4]);
    // The end of the context.
    assert_eq!(steps_of(&[ask(&[1; 60], 40)], SHAPE, 4).iter().rev().take(3).collect::<Vec<_>>(), [&4, &1, &1]);
    // Temperature is the stepper's; penalties are the host's.
    let with = |settings: RequestSettings| Ask { choices: vec![request(&settings)], ..ask(&[1, 2], 5) };
    let warm = SampleSettings { temperature: 0.9, seed: 3, ..SampleSettings::greedy() };
    let plain = RequestSettings { ignore_eos: true, ..RequestSettings::plain(warm) };
    assert_eq!(steps_of(&[with(plain.clone())], SHAPE, 4), [1, 4]);
    let mut penalised = plain;
    penalised.penalties.presence = 0.5;
    assert_eq!(steps_of(&[with(penalised), ask(&[2, 3], 9)], SHAPE, 4), [1, 1, 1, 1, 1, 4]);
}

/// Rows and steps of each launch between the arrival of a lone request and its first token.
fn launches_to_the_first_token(engine: &mut Engine<Toy>, prompt: usize) -> Vec<(usize, u32)> {
    let before = engine.stepper.log.len();
    let tokens: Vec<u32> = (0..prompt).map(|at| (at * at + prompt) as u32 % VOCAB).collect();
    let request = engine.submit(ask(&tokens, 20)).unwrap();
    let mut events = vec![];
    while decided_of(&events, ChoiceId { request, choice: 0 }).is_empty() {
        engine.turn(Duration::ZERO, &mut events).unwrap();
    }
    let launches = engine.stepper.log[before..].iter().map(|launch| (launch.rows.len(), launch.steps)).collect();
    engine.turn(Duration::ZERO, &mut events).unwrap();
    assert_eq!(engine.stepper.log.last().unwrap().steps, 5);
    engine.cancel_all(&mut events);
    until_idle(engine);
    launches
}

/// As many launches as the prompt has parts, each of one step: what follows the first token does not delay it.
#[test]
fn the_first_token_waits_for_its_prompt_alone() {
    let shape =
        Shape { rows: 64, sequences: 11, context_max: 1024, page_rows: 64, pages: 60, window: None, has_state: false };
    for (rows, chunked) in [(64, vec![(64, 1)]), (32, vec![(32, 1), (32, 1)])] {
        let mut toy = Toy::new(Shape { rows, ..shape }, rows, false);
        toy.bounds.alone = Some(Alone { least: 64, most: 512, decides: false, leaves: 0 });
        let mut engine = Engine::new(toy, Limits { chunk_rows: 512, steps_max: 5, ..LIMITS }).unwrap();
        let found = [16, 64, 100, 512, 513, 1000].map(|prompt| launches_to_the_first_token(&mut engine, prompt));
        let expected = [
            vec![(16, 1)],
            chunked,
            vec![(99, 1), (1, 1)],
            vec![(511, 1), (1, 1)],
            vec![(512, 1), (1, 1)],
            vec![(512, 1), (487, 1), (1, 1)],
        ];
        assert_eq!(found, expected, "{rows} rows");
    }
}

/// An engine over a stepper that takes a launch ahead whenever it may.
fn always_deep(steps_max: u32) -> Engine<Toy> {
    let toy = Toy { moods: None, ..Toy::new(SHAPE, 6, true) };
    Engine::new(toy, Limits { steps_max, ..LIMITS }).unwrap()
}

/// Turns until the stepper has this many launches, of which the first is in its last step.
fn until_queued(engine: &mut Engine<Toy>, count: usize, events: &mut Vec<Event>) {
    let is_there = |toy: &Toy| toy.queued.len() == count && toy.queued[0].is_in_last_step;
    for _ in 0..20 {
        if is_there(&engine.stepper) {
            return;
        }
        engine.turn(Duration::ZERO, events).unwrap();
    }
    panic!("{count} launches were never queued");
}

#[test]
fn a_launch_is_queued_while_the_one_before_runs() {
    let mut engine = always_deep(4);
    let asked = ask(&[1, 2], 12);
    let request = engine.submit(asked.clone()).unwrap();
    let events = until_idle(&mut engine);
    assert_eq!(decided_of(&events, ChoiceId { request, choice: 0 }), expected(&asked, 0, &SHAPE).0);
    let launches: Vec<(u32, bool)> =
        engine.stepper.log.iter().map(|launch| (launch.steps, launch.rows[0].token.is_none())).collect();
    assert_eq!(launches, [(1, false), (4, false), (3, true), (3, true), (1, true)]);
    assert_eq!(engine.figures().queued_ahead, 3);
}

/// A request that arrives is in the launch that follows those that are queued then, and these have no more steps left than a launch may have.
#[test]
fn who_arrives_waits_for_no_more_steps_than_before() {
    for steps_max in [2, 3, 4, 5] {
        for queued in [1, 2] {
            let (mut engine, mut events) = (always_deep(steps_max), vec![]);
            engine.submit(ask(&[1, 2], 40)).unwrap();
            until_queued(&mut engine, queued, &mut events);
            let (before, toy) = (engine.stepper.log.len(), &engine.stepper);
            let left = 1 + toy.queued.iter().skip(1).map(|queued| queued.launch.steps).sum::<u32>();
            assert!(left <= steps_max, "{left} of {steps_max}");
            engine.submit(ask(&[3, 4], 5)).unwrap();
            while engine.stepper.log.len() == before {
                engine.turn(Duration::ZERO, &mut events).unwrap();
            }
            let rows = engine.stepper.log[before].rows.iter().map(|row| row.sequence);
            assert_eq!(rows.collect::<std::collections::BTreeSet<_>>().len(), 2);
            until_idle(&mut engine);
        }
    }
}

/// A row that ends while its next launch is queued leaves nothing in it: no event, and no page for another request before its end.
#[test]
fn who_leaves_is_dropped_from_the_launch_that_is_queued() {
    let (mut engine, mut events) = (always_deep(4), vec![]);
    let [gone, stays] = [3, 4].map(|token| engine.submit(ask(&[1, token], 30)).unwrap());
    until_queued(&mut engine, 2, &mut events);
    let id = ChoiceId { request: gone, choice: 0 };
    engine.cancel(id, &mut events);
    let next = engine.submit(ask(&[2; 20], 30)).unwrap();
    let told = decided_of(&events, id).len();
    events.extend(until_idle(&mut engine));
    assert_eq!((decided_of(&events, id).len(), end_of(&events, id)), (told, Some(&End::Cancelled)));
    for (request, asked) in [(stays, ask(&[1, 4], 30)), (next, ask(&[2; 20], 30))] {
        let (decided, end) = expected(&asked, 0, &SHAPE);
        let id = ChoiceId { request, choice: 0 };
        assert_eq!((decided_of(&events, id), end_of(&events, id)), (decided, Some(&end)));
    }
}

#[test]
fn steps_take_no_pages_from_another_request() {
    // Two requests of five pages each; together they have nine. One step at a time until the pages are full, then the younger waits.
    let shape = Shape { pages: 9, ..SHAPE };
    let steps = steps_of(&[ask(&[1; 15], 5), ask(&[2; 15], 5)], shape, 5);
    assert!(steps.iter().filter(|steps| **steps > 1).count() >= 1, "{steps:?}");
}

#[test]
fn a_stepper_that_finds_no_token_ends_the_request() {
    let mut toy = Toy::new(SHAPE, 6, false);
    toy.mute_at = 5;
    let mut engine = Engine::new(toy, Limits { steps_max: 4, ..LIMITS }).unwrap();
    let request = engine.submit(ask(&[1, 2], 30)).unwrap();
    let events = until_idle(&mut engine);
    let id = ChoiceId { request, choice: 0 };
    let error = SampleError::NoCandidate { position: 6, vocab: VOCAB as usize };
    assert_eq!((end_of(&events, id), decided_of(&events, id).len()), (Some(&End::Choice(error)), 4));
}

#[test]
fn a_prompt_that_was_seen_is_computed_from_its_last_page_on() {
    let mut engine = Engine::new(Toy::new(SHAPE, 6, false), LIMITS).unwrap();
    let prompt: Vec<u32> = (0..18).collect();
    engine.submit(ask(&prompt, 3)).unwrap();
    assert_eq!(began(&until_idle(&mut engine)), [0]);
    engine.submit(ask(&prompt, 3)).unwrap();
    assert_eq!(began(&until_idle(&mut engine)), [16]);
    // The last token is computed in any case.
    engine.submit(ask(&prompt[..16], 3)).unwrap();
    assert_eq!(began(&until_idle(&mut engine)), [12]);
    // What differs early shares nothing that follows.
    engine.submit(ask(&[&[9], &prompt[1..]].concat(), 3)).unwrap();
    assert_eq!(began(&until_idle(&mut engine)), [0]);
    // Choices wait for the first one's prompt.
    let one = ask(&[5; 13], 3);
    engine.submit(Ask { choices: vec![one.choices[0].clone(); 3], ..one }).unwrap();
    assert_eq!(began(&until_idle(&mut engine)), [0, 12, 12]);
}

const WITH_STATE: Shape = Shape { has_state: true, ..SHAPE };

fn began(events: &[Event]) -> Vec<u32> {
    let cached = |event: &Event| match event {
        Event::Began { cached, .. } => Some(*cached),
        _ => None,
    };
    events.iter().filter_map(cached).collect()
}

/// Snapshots in few slots: most are dropped before they are used, and so are pages of those that are kept.
#[test]
fn states_are_those_of_their_texts_whatever_runs_beside() {
    for (pages, sequences, chunk_max, is_deep, steps_max, is_plain) in [
        (40, 11, 4, false, 1, false),
        (40, 11, 6, true, 5, false),
        (40, 9, 6, true, 5, true),
        (22, 8, 6, true, 3, true),
        (22, 30, 4, false, 1, false),
    ] {
        let toy = Toy::new(Shape { pages, sequences, ..WITH_STATE }, chunk_max, is_deep);
        let limits = Limits { steps_max, running_max: 6, ..LIMITS };
        let (_, log, figures, _) = storm_over(toy, limits, 6, is_plain);
        let copies = |of: fn(&Launch) -> usize| log.iter().map(of).sum::<usize>();
        let saves = copies(|launch| launch.copies.saves.len());
        let restores = copies(|launch| launch.copies.restores.len());
        assert!(saves > 200 && restores > 100, "{saves} saves, {restores} restores");
        assert!(figures.prefix_hits > 200 && figures.preemptions > 20, "{figures:?}");
        assert!(figures.snapshots <= figures.snapshots_max && figures.snapshots_max >= 2, "{figures:?}");
    }
}

/// Chunks that are read alone end where a state is kept, too.
#[test]
fn long_prompts_that_are_read_alone_keep_their_states() {
    for decides in [false, true] {
        let mut toy = Toy::new(WITH_STATE, 6, true);
        toy.bounds.alone = Some(Alone { least: 3, most: 16, decides, leaves: 0 });
        let (_, log, figures, _) = storm_over(toy, Limits { steps_max: 3, ..LIMITS }, 6, true);
        let alone = Alone { least: 8, most: 16, decides, leaves: 0 };
        assert!(log.iter().any(|launch| launch.is(alone)) && figures.prefix_hits > 200, "{figures:?}");
    }
}

#[test]
fn prompts_go_on_from_the_longest_snapshot() {
    let shape = Shape { pages: 160, sequences: 20, ..WITH_STATE };
    let mut engine = Engine::new(Toy::new(shape, 6, false), LIMITS).unwrap();
    let mut cached = |prompt: &[u32]| {
        engine.submit(ask(prompt, 3)).unwrap();
        began(&until_idle(&mut engine))[0]
    };
    let system: Vec<u32> = (0..14).collect();
    let with = |user: u32| [&system[..], &[user; 7]].concat();
    assert_eq!(cached(&with(20)), 0);
    // Pages of the common part are found, and no snapshot: the second text leaves one there.
    assert_eq!(cached(&with(21)), 0);
    assert_eq!(cached(&with(22)), 12);
    assert_eq!([20, 21, 22].map(|user| cached(&with(user))), [20; 3]);
    // The next turn of a conversation.
    assert_eq!(cached(&[&with(20)[..], &[8; 9]].concat()), 20);
    assert_eq!(cached(&[1, 2]), 0);
}

/// Snapshots and pages are dropped apart: a state without its pages is as good as none, and so are pages without a state.
#[test]
fn a_snapshot_or_a_page_alone_is_not_used() {
    // Room for one snapshot.
    let mut engine = Engine::new(
        Toy::new(Shape { sequences: 2, pages: 16, ..WITH_STATE }, 6, false),
        Limits { running_max: 1, ..LIMITS },
    )
    .unwrap();
    let cached = |engine: &mut Engine<Toy>, prompt: &[u32]| {
        engine.submit(ask(prompt, 1)).unwrap();
        began(&until_idle(engine))[0]
    };
    assert_eq!([[1; 9], [1; 9], [2; 9], [1; 9]].map(|prompt| cached(&mut engine, &prompt)), [0, 8, 0, 0]);
    assert_eq!(engine.figures().snapshots, 1);
    // A text that takes all pages: the snapshot goes with its page.
    assert_eq!(cached(&mut engine, &[3; 64]), 0);
    assert_eq!([[1; 9], [1; 9]].map(|prompt| cached(&mut engine, &prompt)), [0, 8]);
}

#[test]
fn choices_begin_with_copies_of_one_state() {
    let mut engine = Engine::new(Toy::new(WITH_STATE, 6, false), LIMITS).unwrap();
    let one = ask(&[5; 13], 9);
    let id = engine.submit(Ask { choices: vec![one.choices[0].clone(); 3], ..one.clone() }).unwrap();
    let events = until_idle(&mut engine);
    assert_eq!(began(&events), [0, 12, 12]);
    for choice in 0..3 {
        assert_eq!(decided_of(&events, ChoiceId { request: id, choice }), expected(&one, 0, &SHAPE).0);
    }
}

#[test]
fn who_leaves_in_mid_prompt_leaves_no_wrong_state() {
    for turns in 1..8 {
        let mut engine = Engine::new(Toy::new(WITH_STATE, 6, false), LIMITS).unwrap();
        let prompt: Vec<u32> = (0..30).collect();
        let request = engine.submit(ask(&prompt, 3)).unwrap();
        let mut events = vec![];
        for _ in 0..turns {
            engine.turn(Duration::ZERO, &mut events).unwrap();
        }
        engine.cancel(ChoiceId { request, choice: 0 }, &mut events);
        // They take the sequence of the one that left.
        for prompt in [&[7; 9][..], &prompt] {
            let next = engine.submit(ask(prompt, 5)).unwrap();
            let events = until_idle(&mut engine);
            let found = decided_of(&events, ChoiceId { request: next, choice: 0 });
            assert_eq!(found, expected(&ask(prompt, 5), 0, &SHAPE).0);
        }
    }
}

#[test]
fn what_cannot_run_is_refused_and_a_full_queue_says_so() {
    let shape = Shape { pages: 5, sequences: 3, ..SHAPE };
    let mut engine =
        Engine::new(Toy::new(shape, 4, false), Limits { running_max: 1, waiting_max: 1, ..LIMITS }).unwrap();
    assert_eq!(engine.submit(ask(&[], 1)), Err(Refused::NoPrompt));
    assert_eq!(engine.submit(ask(&[0; 65], 1)), Err(Refused::Context { found: 65, context_max: 64 }));
    assert_eq!(engine.submit(ask(&[VOCAB], 1)), Err(Refused::Token { token: VOCAB, vocab: VOCAB }));
    assert_eq!(engine.submit(ask(&[1; 11], 11)), Err(Refused::Pages { positions: 21, needed: 6, pages: 5 }));
    engine.submit(ask(&[1; 10], 11)).unwrap();
    engine.submit(ask(&[1; 20], 1)).unwrap();
    assert_eq!(engine.submit(ask(&[1], 1)), Err(Refused::Busy { waiting: 2 }));
    let events = until_idle(&mut engine);
    assert_eq!(events.iter().filter(|event| matches!(event, Event::Ended { end: End::Length, .. })).count(), 2);
}

#[test]
fn deadlines_end_what_waits_and_what_runs() {
    let mut engine = Engine::new(Toy::new(SHAPE, 6, false), Limits { running_max: 1, ..LIMITS }).unwrap();
    let late = |deadline| Ask { deadline: Some(Duration::from_secs(deadline)), ..ask(&[1, 2], 30) };
    let runs = engine.submit(late(3)).unwrap();
    let waits = engine.submit(late(2)).unwrap();
    let mut events = vec![];
    for second in 0..5 {
        engine.turn(Duration::from_secs(second), &mut events).unwrap();
    }
    for (request, tokens) in [(runs, 1), (waits, 0)] {
        let id = ChoiceId { request, choice: 0 };
        assert_eq!((end_of(&events, id), decided_of(&events, id).len()), (Some(&End::Deadline), tokens));
    }
    assert!(until_idle(&mut engine).is_empty());
}

#[test]
fn a_lost_device_is_an_error_of_the_turn() {
    let mut toy = Toy::new(SHAPE, 6, false);
    toy.fails_at = 1;
    let mut engine = Engine::new(toy, LIMITS).unwrap();
    engine.submit(ask(&[1, 2], 30)).unwrap();
    let mut events = vec![];
    engine.turn(Duration::ZERO, &mut events).unwrap();
    engine.turn(Duration::ZERO, &mut events).unwrap();
    let fault = engine.turn(Duration::ZERO, &mut events).unwrap_err();
    assert_eq!(fault.message, "the device is gone");
}
