//! Owns the tests of the engine, over a stepper that is a hash: its logits depend on every token that a row can see through the
//! page table, so a wrong page, an old one or a row out of order changes a token.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::*;
use crate::error::Fault;
use crate::grammar::{self, Grammar, Source, Vocabulary};
use crate::random::Random;
use crate::rows::{PageId, SequenceId, Shape};
use crate::sample::Decided;
use crate::sample::{Request, RequestSettings, SampleError, SampleSettings, TokenCounts, TokenSet};

const VOCAB: u32 = 40;

fn logits(tokens: &[u32]) -> Vec<f32> {
    let seed =
        tokens.iter().fold(0x9E37_79B9_7F4A_7C15_u64, |h, &t| (h ^ u64::from(t + 1)).wrapping_mul(0x100_0000_01B3));
    let mut random = Random::new(seed);
    (0..VOCAB).map(|_| random.below(4000) as f32 / 500.0).collect()
}

struct Toy {
    bounds: Bounds,
    table: BTreeMap<(SequenceId, u32), PageId>,
    /// Of each page its tokens.
    pages: Vec<Vec<Option<u32>>>,
    results: VecDeque<Vec<Said>>,
    /// Rows of the last launch that wait for the ids that may come next, with their logits.
    guided: Vec<(usize, Chooser, Vec<f32>)>,
    log: Vec<Launch>,
    /// The launch that fails.
    fails_at: usize,
    /// A position after which no logit is a number.
    mute_at: u32,
}

impl Toy {
    fn new(shape: Shape, chunk_max: u32, launches: usize) -> Toy {
        let bounds = Bounds { shape, chunk_max, alone: None, vocab: VOCAB, launches, steps_max: 5, choices: None };
        let pages = vec![vec![None; shape.page_rows as usize]; shape.pages as usize];
        Toy {
            bounds,
            table: BTreeMap::new(),
            pages,
            results: VecDeque::new(),
            guided: vec![],
            log: vec![],
            fails_at: usize::MAX,
            mute_at: u32::MAX,
        }
    }

    fn at(&mut self, sequence: SequenceId, position: u32) -> &mut Option<u32> {
        let page_rows = self.bounds.shape.page_rows;
        let page = self.table.get(&(sequence, position / page_rows)).expect("a page");
        &mut self.pages[page.index()][(position % page_rows) as usize]
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
        let Shape { rows, page_rows, context_max, .. } = self.bounds.shape;
        for edit in &launch.edits {
            let old = match edit.page {
                Some(page) => self.table.insert((edit.sequence, edit.block), page),
                None => self.table.remove(&(edit.sequence, edit.block)),
            };
            // What loses its last holder is forgotten: reading it again is a fault.
            if let Some(old) = old.filter(|old| !self.table.values().any(|page| page == old)) {
                self.pages[old.index()].fill(None);
            }
        }
        let is_alone = self.bounds.alone.is_some_and(|alone| launch.is(alone));
        assert!(is_alone || (1..=rows as usize).contains(&launch.rows.len()));
        assert!((1..=self.bounds.steps_max).contains(&launch.steps));
        let mut count: BTreeMap<SequenceId, u32> = BTreeMap::new();
        let mut last: BTreeMap<SequenceId, u32> = BTreeMap::new();
        for row in &launch.rows {
            assert!(row.position + launch.steps <= context_max && row.token < VOCAB);
            *count.entry(row.sequence).or_default() += 1;
            if let Some(last) = last.insert(row.sequence, row.position) {
                assert_eq!(row.position, last + 1);
            }
            for position in row.position..row.position + launch.steps {
                let page = self.table[&(row.sequence, position / page_rows)];
                assert_eq!(self.table.values().filter(|other| **other == page).count(), 1, "a shared page is written");
            }
            *self.at(row.sequence, row.position) = Some(row.token);
        }
        assert!(is_alone || count.values().all(|count| *count <= self.bounds.chunk_max));
        assert!(launch.steps == 1 || count.values().all(|count| *count == 1));
        let window = self.bounds.shape.window.unwrap_or(u32::MAX);
        let mut said = vec![];
        assert_eq!(self.guided.len(), 0, "a launch that was not completed");
        assert!(launch.steps == 1 || !launch.is_guided());
        for row in &launch.rows {
            let seen = |toy: &mut Toy, position: u32| {
                let from = (position + 1).saturating_sub(window);
                logits(&(from..=position).map(|p| toy.at(row.sequence, p).expect("a written row")).collect::<Vec<_>>())
            };
            said.push(match &row.want {
                Want::Nothing => Said::Nothing,
                Want::Logits => Said::Logits(seen(self, row.position)),
                Want::Token(sampler) => {
                    let mut tokens = vec![];
                    for position in row.position..row.position + launch.steps {
                        if let Some(&token) = tokens.last() {
                            *self.at(row.sequence, position) = Some(token);
                        }
                        if position >= self.mute_at {
                            break;
                        }
                        tokens.push(sampler.choose(&seen(self, position), position + 1).unwrap());
                    }
                    Said::Tokens(tokens)
                }
                Want::Choice(chooser) if chooser.is_guided() => {
                    let logits = seen(self, row.position);
                    self.guided.push((said.len(), chooser.clone(), logits));
                    Said::Nothing
                }
                Want::Choice(chooser) => {
                    let (mut counts, mut decided) = (chooser.counts().clone(), vec![]);
                    for position in row.position..row.position + launch.steps {
                        if let Some(Ok(Decided { token, .. })) = decided.last() {
                            *self.at(row.sequence, position) = Some(*token);
                            counts.push(*token);
                        }
                        let mut logits = seen(self, position);
                        if position >= self.mute_at {
                            logits.fill(f32::NAN);
                        }
                        decided.push(chooser.request().choose(&logits, &counts, None));
                        if decided.last().is_some_and(Result::is_err) {
                            break;
                        }
                    }
                    Said::Choices(decided)
                }
            });
            assert!(launch.steps == 1 || matches!(row.want, Want::Token(_) | Want::Choice(_)));
        }
        self.results.push_back(said);
        assert!(self.results.len() <= self.bounds.launches);
        self.log.push(launch);
        Ok(())
    }

    fn allow(&mut self, allowed: Vec<Option<TokenSet>>) -> Result<(), Fault> {
        let last = self.results.back_mut().expect("a launch");
        assert_eq!(allowed.len(), last.len());
        for (row, chooser, logits) in self.guided.drain(..) {
            let choice = chooser.request().choose(&logits, chooser.counts(), allowed[row].as_ref());
            last[row] = Said::Choices(vec![choice]);
        }
        Ok(())
    }

    fn collect(&mut self) -> Result<Vec<Said>, Fault> {
        Ok(self.results.pop_front().expect("a launch"))
    }
}

const SHAPE: Shape = Shape { rows: 6, sequences: 11, context_max: 64, page_rows: 4, pages: 40, window: None };
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
    let source = Source::Json(grammar::schema(&schema).unwrap().to_string());
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
fn storm(shape: Shape, chunk_max: u32, launches: usize, steps_max: u32) -> (Vec<Event>, Vec<Launch>, Figures) {
    storm_over(Toy::new(shape, chunk_max, launches), Limits { steps_max, ..LIMITS })
}

fn storm_over(toy: Toy, limits: Limits) -> (Vec<Event>, Vec<Launch>, Figures) {
    let shape = toy.bounds.shape;
    let mut engine = Engine::new(toy, limits).unwrap();
    let grammar = lists();
    let mut random = Random::new(7);
    let mut asks: BTreeMap<RequestId, Ask> = BTreeMap::new();
    let mut cancelled = vec![];
    let mut events = vec![];
    for turn in 0..6000_u64 {
        if turn < 5000 && random.below(3) == 0 {
            // Few tokens, so that prompts begin alike.
            let prompt: Vec<u32> = (0..1 + random.below(30)).map(|i| (i as u32 / 7) * random.below(2) as u32).collect();
            let mut ask = ask(&prompt, random.below(40) as u32);
            let mut settings = greedy();
            settings.ignore_eos = random.below(2) == 0;
            settings.sampling.temperature = random.below(2) as f32;
            settings.penalties.frequency = random.below(2) as f32 * 0.5;
            settings.logprobs = (random.below(4) == 0).then(|| random.below(3) as u32);
            let of =
                |seed| RequestSettings { sampling: SampleSettings { seed, ..settings.sampling }, ..settings.clone() };
            let count = if random.below(4) == 0 { 3 } else { 1 };
            ask.choices = (0..count).map(|at| request(&of(turn + at))).collect();
            ask.scores_prompt = (random.below(8) == 0).then_some(2);
            ask.grammar = (random.below(4) == 0).then(|| grammar.clone());
            if let Ok(request) = engine.submit(ask.clone()) {
                asks.insert(request, ask);
            }
        }
        if random.below(20) == 0
            && let Some((&request, ask)) = asks.last_key_value()
        {
            let id = ChoiceId { request, choice: random.below(ask.choices.len()) as u32 };
            engine.cancel(id, &mut events);
            cancelled.push(id);
        }
        engine.turn(Duration::from_millis(turn), &mut events).unwrap();
    }
    events.extend(until_idle(&mut engine));
    for (&request, ask) in &asks {
        for choice in 0..ask.choices.len() {
            let id = ChoiceId { request, choice: choice as u32 };
            let (decided, end) = expected(ask, choice, &shape);
            let found = decided_of(&events, id);
            match end_of(&events, id) {
                Some(End::Cancelled) => assert!(cancelled.contains(&id) && decided.starts_with(&found)),
                other => assert_eq!((&found, other), (&decided, Some(&end)), "{id:?}: {ask:?}"),
            }
            let prompt: Vec<u32> = events
                .iter()
                .filter_map(|event| match event {
                    Event::Prompt { id: of, scored } if *of == id => Some(scored.iter().map(|scored| scored.token)),
                    _ => None,
                })
                .flatten()
                .collect();
            let scores = ask.scores_prompt.is_some() && choice == 0 && end_of(&events, id) != Some(&End::Cancelled);
            assert!(!scores || prompt == ask.prompt[1..], "{id:?}");
        }
    }
    assert!(asks.len() > 500, "{}", asks.len());
    let figures = engine.figures();
    assert_eq!((figures.running, figures.waiting, figures.pages_used), (0, 0, 0));
    (events, engine.stepper.log, figures)
}

#[test]
fn every_request_gets_its_tokens_whatever_runs_beside_it() {
    let none = [(1, 1, 1), (4, 1, 1), (6, 1, 1), (4, 2, 1), (6, 3, 1), (6, 1, 5), (4, 2, 3)].map(|of| (of, None));
    // The stepper chooses for requests with up to one log-probability beside that of the token.
    let some = [(6, 1, 5), (4, 2, 3)].map(|of| (of, Some(1)));
    for ((chunk_max, launches, steps), choices) in none.into_iter().chain(some) {
        let mut toy = Toy::new(SHAPE, chunk_max, launches);
        toy.bounds.choices = choices;
        let (_, log, figures) = storm_over(toy, Limits { steps_max: steps, ..LIMITS });
        let chosen = log.iter().flat_map(|launch| &launch.rows).any(|row| matches!(row.want, Want::Choice(_)));
        assert_eq!(chosen, choices.is_some());
        assert!(figures.preemptions > 20 && figures.prefix_hits > 500, "{figures:?}");
        assert!(log.len() > 1000);
        let most = log.iter().map(|launch| launch.steps).max();
        assert_eq!((most, figures.steps > figures.launches), (Some(steps), steps > 1));
    }
}

/// Chunks that are read alone have more rows than other launches, and leave out the last token of a prompt.
#[test]
fn long_prompts_are_read_alone() {
    let alone = Alone { least: 8, most: 20 };
    for (window, launches, chunk_rows) in [(None, 1, 20), (None, 2, 9), (Some(9), 1, 20)] {
        let mut toy = Toy::new(Shape { window, ..SHAPE }, 4, launches);
        toy.bounds.alone = Some(alone);
        let (_, log, figures) = storm_over(toy, Limits { chunk_rows, steps_max: 4, ..LIMITS });
        let long = log.iter().filter(|launch| launch.is(alone)).count();
        assert!(long > 100 && (window.is_some() || figures.preemptions > 0), "{long} of {}, {figures:?}", log.len());
        assert!(log.iter().any(|launch| launch.is(alone) && launch.rows.len() > SHAPE.rows as usize));
    }
}

/// Beside rows that decode, a prompt that fits into three of their steps takes rows of these; a longer one is read alone.
#[test]
fn short_prompts_take_rows_of_the_steps_of_others() {
    let shape = Shape { rows: 64, sequences: 20, context_max: 512, page_rows: 64, pages: 60, window: None };
    let limits = Limits { chunk_rows: 512, steps_max: 1, ..LIMITS };
    for (decoding, prompt, expected) in [
        (4, 128, vec![64, 64, 12, 5]),
        (4, 180, vec![64, 64, 64, 5]),
        (4, 181, vec![180, 5, 5]),
        (0, 128, vec![127, 1]),
    ] {
        let mut toy = Toy::new(shape, 64, 1);
        toy.bounds.alone = Some(Alone { least: 64, most: 512 });
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
        let rows: Vec<usize> = engine.stepper.log[before..].iter().map(|launch| launch.rows.len()).collect();
        assert_eq!(rows[..expected.len()], expected, "{prompt} beside {decoding}");
    }
}

#[test]
fn who_decodes_has_every_second_launch_beside_long_prompts() {
    let mut toy = Toy::new(Shape { pages: 80, ..SHAPE }, 4, 1);
    let alone = Alone { least: 8, most: 10 };
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
    let (_, log, figures) = storm(shape, 4, 1, 4);
    assert_eq!(figures.prefix_hits, 0);
    let deep = |launch: &Launch| launch.rows.iter().any(|row| row.position > 48);
    let together = |launch: &&Launch| launch.rows.iter().any(|row| row.sequence != launch.rows[0].sequence);
    assert!(log.iter().filter(together).any(deep));
}

#[test]
fn the_same_arrivals_make_the_same_launches() {
    let (a, b) = (storm(SHAPE, 4, 2, 5), storm(SHAPE, 4, 2, 5));
    assert!(a.0 == b.0 && a.1 == b.1);
}

#[test]
fn a_prompt_beside_decoding_rows_takes_few_of_them() {
    let mut engine = Engine::new(Toy::new(SHAPE, 6, 1), LIMITS).unwrap();
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
    let mut engine = Engine::new(Toy::new(shape, 6, 1), Limits { steps_max, ..LIMITS }).unwrap();
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
    // The turn that told of the first token has launched what follows it.
    let told = engine.stepper.log.len() - 1;
    let launches = engine.stepper.log[before..told].iter().map(|launch| (launch.rows.len(), launch.steps)).collect();
    assert_eq!(engine.stepper.log[told].steps, 5);
    engine.cancel_all(&mut events);
    until_idle(engine);
    launches
}

/// As many launches as the prompt has parts, each of one step: what follows the first token does not delay it.
#[test]
fn the_first_token_waits_for_its_prompt_alone() {
    let shape = Shape { rows: 64, sequences: 11, context_max: 1024, page_rows: 64, pages: 60, window: None };
    for (rows, chunked) in [(64, vec![(64, 1)]), (32, vec![(32, 1), (32, 1)])] {
        let mut toy = Toy::new(Shape { rows, ..shape }, rows, 1);
        toy.bounds.alone = Some(Alone { least: 64, most: 512 });
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

#[test]
fn steps_take_no_pages_from_another_request() {
    // Two requests of five pages each; together they have nine. One step at a time until the pages are full, then the younger waits.
    let shape = Shape { pages: 9, ..SHAPE };
    let steps = steps_of(&[ask(&[1; 15], 5), ask(&[2; 15], 5)], shape, 5);
    assert!(steps.iter().filter(|steps| **steps > 1).count() >= 1, "{steps:?}");
}

#[test]
fn a_stepper_that_finds_no_token_ends_the_request() {
    let mut toy = Toy::new(SHAPE, 6, 1);
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
    let mut engine = Engine::new(Toy::new(SHAPE, 6, 1), LIMITS).unwrap();
    let prompt: Vec<u32> = (0..18).collect();
    let began = |events: &[Event]| {
        let cached = |event: &Event| match event {
            Event::Began { cached, .. } => Some(*cached),
            _ => None,
        };
        events.iter().filter_map(cached).collect::<Vec<_>>()
    };
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

#[test]
fn what_cannot_run_is_refused_and_a_full_queue_says_so() {
    let shape = Shape { pages: 5, sequences: 3, ..SHAPE };
    let mut engine = Engine::new(Toy::new(shape, 4, 1), Limits { running_max: 1, waiting_max: 1, ..LIMITS }).unwrap();
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
    let mut engine = Engine::new(Toy::new(SHAPE, 6, 1), Limits { running_max: 1, ..LIMITS }).unwrap();
    let late = |deadline| Ask { deadline: Some(Duration::from_secs(deadline)), ..ask(&[1, 2], 30) };
    let runs = engine.submit(late(3)).unwrap();
    let waits = engine.submit(late(2)).unwrap();
    let mut events = vec![];
    for second in 0..5 {
        engine.turn(Duration::from_secs(second), &mut events).unwrap();
    }
    for (request, tokens) in [(runs, 2), (waits, 0)] {
        let id = ChoiceId { request, choice: 0 };
        assert_eq!((end_of(&events, id), decided_of(&events, id).len()), (Some(&End::Deadline), tokens));
    }
    assert!(until_idle(&mut engine).is_empty());
}

#[test]
fn a_lost_device_is_an_error_of_the_turn() {
    let mut toy = Toy::new(SHAPE, 6, 1);
    toy.fails_at = 1;
    let mut engine = Engine::new(toy, LIMITS).unwrap();
    engine.submit(ask(&[1, 2], 30)).unwrap();
    let mut events = vec![];
    engine.turn(Duration::ZERO, &mut events).unwrap();
    let fault = engine.turn(Duration::ZERO, &mut events).unwrap_err();
    assert_eq!(fault.message, "the device is gone");
}
