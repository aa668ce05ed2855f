//! Tests snapshots of recurrent states on the interpreter: requests that begin alike, texts that go back, and proposed tokens get the tokens
//! that a text has alone.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use monobloc::cache::Cache;
use monobloc::candidate::Candidate;
use monobloc::embed::{self, Model, SequenceKey};
use monobloc::engine::{Ask, ChoiceId, CpuSteps, Engine, Event, Limits, RequestId, Stepwise};
use monobloc::interp::{Arithmetic, Options, Order};
use monobloc::lower::{Batch, lower_batch};
use monobloc::manifest::Manifest;
use monobloc::model::config::{Imported, import};
use monobloc::pack::pack;
use monobloc::pipeline::{Answer, Runner, Workspace, prepare};
use monobloc::random::Random;
use monobloc::reference::{self, argmax};
use monobloc::report::Report;
use monobloc::sample::{Request, RequestSettings, SampleSettings};
use monobloc::schedule::schedule;
use monobloc::speculate::{Draft, Speculated, Speculation};
use monobloc::target::Target;
use serde_json::{Value, json};

use crate::cli_support::{Place, manifest_text};
use crate::mix::candidate;
use crate::proof_support::FP32;
use crate::serve::Server;
use crate::support::fixture;

const VOCAB: u32 = 112;
/// One with attention of its own kind for each.
const HYBRIDS: [&str; 2] = ["hybrids/qwen35", "hybrids/olmo-hybrid"];

fn greedy() -> Request {
    RequestSettings { ignore_eos: true, ..RequestSettings::plain(SampleSettings::greedy()) }
        .resolve(VOCAB, &[])
        .unwrap()
}

/// The tokens that the reference decides after a prompt, without any state from before.
fn alone(imported: &Imported, prompt: &[u32], count: usize) -> Vec<u32> {
    let mut session = reference::Session::new(&imported.graph, &imported.weights);
    let mut logits = vec![];
    prompt.iter().for_each(|&id| logits = session.step(id));
    let mut tokens = vec![];
    for _ in 0..count {
        tokens.push(argmax(&logits));
        logits = session.step(tokens[tokens.len() - 1]);
    }
    tokens
}

fn engine(imported: &Imported, batch: Batch, options: Options) -> Engine<Stepwise> {
    let target = Target::builtin("cpu").unwrap();
    let candidate = Candidate { splits: 1, ..candidate(&imported.graph, &target, FP32) };
    let program = lower_batch(&imported.graph, "snapshots", FP32, 64, &batch, &candidate).unwrap();
    let schedule = schedule(program, &target, &candidate).unwrap();
    let pack = Arc::new(pack(&schedule, &imported.graph, &imported.weights).unwrap());
    let stepper = Stepwise::new(Box::new(CpuSteps::new(&schedule, pack, options).unwrap()));
    let limits = Limits { running_max: 3, waiting_max: 100, chunk_rows: 3, steps_max: 1 };
    Engine::new(stepper, limits).unwrap()
}

/// Requests that begin alike come, wait and leave, over a cache that has no room for all of their pages and snapshots. Hostile orders also judge
/// which position each state is of.
#[test]
fn requests_that_begin_alike_get_their_own_tokens() {
    for name in HYBRIDS {
        let imported = import(&fixture(name)).unwrap();
        let hostile = Options::adversarial(Arithmetic::Fast, 9);
        let threads = Options { arithmetic: Arithmetic::Fast, order: Order::Threads(2) };
        for (options, asked) in [(threads, 40), (hostile, 12)] {
            // Three sequences, and three that keep pages and snapshots.
            let batch = Batch { rows: 6, sequences: 6, pages: 40, page_rows: 4, words: false };
            let mut engine = engine(&imported, batch, options);
            let mut random = Random::new(11);
            let system: Vec<u32> = (0..14).map(|i| (i * 37 + 5) % VOCAB).collect();
            let (mut asks, mut cancelled, mut events) = (BTreeMap::<RequestId, Ask>::new(), vec![], vec![]);
            while asks.len() < asked || !engine.is_idle() {
                if asks.len() < asked && random.below(3) == 0 {
                    let shared = random.below(system.len() + 1);
                    let own = (0..1 + random.below(9)).map(|_| random.below(3) as u32 + 40);
                    let prompt: Vec<u32> = system[..shared].iter().copied().chain(own).collect();
                    let choices = vec![greedy(); 1 + random.below(2)];
                    let tokens_max = 1 + random.below(8) as u32;
                    let ask = Ask { prompt, tokens_max, choices, scores_prompt: None, grammar: None, deadline: None };
                    let id = engine.submit(ask.clone()).unwrap();
                    asks.insert(id, ask);
                    if random.below(6) == 0 {
                        (0..random.below(4)).for_each(|_| engine.turn(Duration::ZERO, &mut events).unwrap());
                        engine.cancel_request(id, &mut events);
                        cancelled.push(id);
                    }
                }
                engine.turn(Duration::ZERO, &mut events).unwrap_or_else(|fault| panic!("{options:?}: {fault}"));
            }
            for (&request, Ask { prompt, tokens_max, choices, .. }) in &asks {
                let expected = alone(&imported, prompt, *tokens_max as usize);
                for choice in 0..choices.len() as u32 {
                    let of = ChoiceId { request, choice };
                    let token = |event: &Event| match event {
                        Event::Token { id, decided } if *id == of => Some(decided.token),
                        _ => None,
                    };
                    let found: Vec<u32> = events.iter().filter_map(token).collect();
                    let is_whole = found == expected || (cancelled.contains(&request) && expected.starts_with(&found));
                    assert!(is_whole, "{name}: {options:?}: {of:?}: {prompt:?}: {found:?}, expected {expected:?}");
                }
            }
            let figures = engine.figures();
            assert!(figures.prefix_hits > 30 && figures.snapshots == 3, "{figures:?}");
        }
    }
}

/// With a runner of a hybrid.
fn with_runner(name: &str, test: impl FnOnce(&mut Runner<'_>)) {
    let place = Place::new();
    let workspace = Workspace {
        cache: Cache::open(place.path("cache")).unwrap(),
        report: Report::quiet(),
        trials: place.path("trials.csv"),
    };
    let path = place.write("m.toml", manifest_text(&format!("path:{}", fixture(name).display()), 64));
    let manifest = Manifest::load(&path).unwrap();
    let target = Target::builtin("cpu").unwrap();
    let prepared = prepare(&workspace, &manifest, &target).unwrap_or_else(|fault| panic!("{fault}"));
    test(&mut prepared.runner(&workspace).unwrap_or_else(|fault| panic!("{fault}")));
}

fn answer(runner: &mut Runner<'_>, prompt: &[u32], count: usize, stops_after: usize) -> Answer {
    let mut told = 0;
    let answer = runner.answer(prompt, count, &greedy(), &mut |_| {
        told += 1;
        if told == stops_after { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    answer.unwrap_or_else(|fault| panic!("{fault}"))
}

#[test]
fn a_text_goes_back_to_its_prompt() {
    for name in HYBRIDS {
        let imported = import(&fixture(name)).unwrap();
        with_runner(name, |runner| {
            let first: Vec<u32> = (0..19).map(|i| (i * 29 + 3) % VOCAB).collect();
            let mut check = |prompt: &[u32], stops_after: usize, reused: usize| {
                let answer = answer(runner, prompt, 6, stops_after);
                let expected = alone(&imported, prompt, 6);
                assert_eq!((answer.tokens.len(), answer.reused), (6.min(stops_after), reused), "{name}: {prompt:?}");
                assert!(expected.starts_with(&answer.tokens), "{name}: {prompt:?}: {answer:?}, expected {expected:?}");
                [prompt, &answer.tokens].concat()
            };
            check(&first, 9, 0);
            // Another end of the prompt, and its text once more.
            let second = [&first[..], &[50, 51, 52]].concat();
            check(&second, 3, first.len());
            let text = check(&second, 9, first.len());
            // All of the text, and then a text that goes on differently within the last answer.
            let longer = check(&[&text[..], &[7, 8]].concat(), 9, text.len() - 1);
            check(&[&longer[..text.len() + 4], &[9, 9, 1]].concat(), 2, text.len() + 2);
            // Before all snapshots that are left, and another text.
            check(&[&first[..10], &[60]].concat(), 9, 0);
            check(&[61; 12], 9, 0);
            check(&[&[61; 12][..], &[1]].concat(), 9, 12);
        });
    }
}

/// Proposes tokens that will be chosen, some of them wrong, and sometimes none.
struct Knowing {
    text: Vec<u32>,
    random: Random,
}

impl Draft for Knowing {
    fn propose(&mut self, sequence: &[u32], most: usize) -> Vec<u32> {
        assert_eq!(sequence, &self.text[..sequence.len()]);
        let count = self.random.below(most + 1);
        let mut tokens: Vec<u32> = self.text[sequence.len()..].iter().copied().take(count).collect();
        if let Some(token) = tokens.get_mut(self.random.below(2 * most.max(1))) {
            *token = (*token + 1) % VOCAB;
        }
        tokens
    }
}

#[test]
fn proposed_tokens_change_no_token_with_states() {
    for name in HYBRIDS {
        with_runner(name, |runner| {
            let mut all = Speculated::default();
            for case in 0..24u64 {
                let prompt: Vec<u32> = (0..1 + case as u32 % 20).map(|i| (i * 31 + case as u32) % VOCAB).collect();
                let temperature = if case % 3 == 0 { 0.9 } else { 0.0 };
                let sampling = SampleSettings { temperature, seed: case, ..SampleSettings::greedy() };
                let settings = RequestSettings { ignore_eos: true, ..RequestSettings::plain(sampling) };
                let request = settings.resolve(VOCAB, &[]).unwrap();
                let count = 30;
                let plain = runner.answer(&prompt, count, &request, &mut |_| ControlFlow::Continue(())).unwrap();
                let text = [&prompt[..], &plain.tokens].concat();
                let mut draft = Knowing { text, random: Random::new(case) };
                let mut speculation = Speculation::new(&mut draft, [1, 4, 15][case as usize % 3]);
                // Some end between tokens that a step verified.
                let stops_after = if case % 4 == 0 { 11 } else { count };
                let mut told = vec![];
                let mut tell = |decided: &monobloc::sample::Decided| {
                    told.push(decided.token);
                    if told.len() == stops_after { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
                };
                let found = runner.speculate(&prompt, count, &request, &mut speculation, &mut tell).unwrap();
                assert_eq!((&found.tokens[..], &told[..]), (&plain.tokens[..stops_after], &found.tokens[..]), "{case}");
                let Speculated { proposed, accepted, .. } = speculation.counts();
                (all.proposed, all.accepted) = (all.proposed + proposed, all.accepted + accepted);
                // A text that goes on after it finds no state of a token that was not chosen.
                let next = [&prompt[..], &found.tokens, &[5]].concat();
                let went_on = answer(runner, &next, 4, 9);
                runner.logits(&[1], &mut |_, _| {}).unwrap();
                assert_eq!(went_on.tokens, answer(runner, &next, 4, 9).tokens, "{case}");
            }
            assert!(all.accepted > 100 && all.proposed > all.accepted + 20, "{all:?}");
        });
    }
}

/// Sequences of a program with its own scheduler: forks, and texts that go back into their last page, before it, and to their beginning.
#[test]
fn sequences_fork_and_go_back_with_their_states() {
    for name in HYBRIDS {
        let place = Place::new();
        let path = place.write("m.toml", manifest_text(&format!("path:{}", fixture(name).display()), 64));
        // Three contexts of four pages: as many snapshots, less the one sequence more.
        let sizes = embed::Options { sequences_max: Some(3), cache_tokens: Some(192), ..embed::Options::default() };
        let model = Model::load(&path, embed::Options { cache: Some(place.path("cache")), ..sizes }).unwrap();
        let logits = |ids: &[u32]| {
            let all = model.logits(ids.to_vec()).wait().unwrap();
            all[all.len() - VOCAB as usize..].to_vec()
        };
        let mut random = Random::new(5);
        let mut open: Vec<(SequenceKey, Vec<u32>)> = vec![];
        let mut went_back = 0;
        for round in 0..120 {
            let at = random.below(open.len().max(1));
            match random.below(6) {
                0 if open.len() < 3 => {
                    let key = SequenceKey::unique();
                    model.open(key).wait().unwrap();
                    open.push((key, vec![]));
                }
                1 if !open.is_empty() && open.len() < 3 => {
                    let key = SequenceKey::unique();
                    model.fork(open[at].0, key).wait().unwrap();
                    let tokens = open[at].1.clone();
                    open.push((key, tokens));
                }
                2 if !open.is_empty() => {
                    let (key, tokens) = &mut open[at];
                    tokens.truncate(random.below(tokens.len() + 1));
                    model.truncate(*key, tokens.len()).wait().unwrap();
                    went_back += 1;
                }
                3 if open.len() > 1 => {
                    let (key, _) = open.swap_remove(at);
                    model.free(key).wait().unwrap();
                }
                _ if !open.is_empty() && open[at].1.len() < 40 => {
                    let (key, tokens) = &mut open[at];
                    let more: Vec<u32> = (0..1 + random.below(20)).map(|_| random.below(9) as u32).collect();
                    tokens.extend(&more);
                    let found = model.prefill(*key, more).wait().unwrap_or_else(|fault| panic!("{fault}"));
                    assert_eq!(found, logits(tokens), "{name}: round {round}: {tokens:?}");
                }
                _ => {}
            }
        }
        assert!(went_back > 10, "{went_back}");
    }
}

/// A copy of a fixture whose requests are ids, with a word for each of them.
pub fn with_words(place: &Place, name: &str, vocab: u32) -> PathBuf {
    let checkpoint = place.path("hybrid");
    std::fs::create_dir_all(&checkpoint).unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(fixture(name).join(file), checkpoint.join(file)).unwrap();
    }
    let words: serde_json::Map<String, Value> = (0..vocab).map(|id| (format!("w{id}"), json!(id))).collect();
    let tokenizer = json!({
        "version": "1.0",
        "model": { "type": "WordLevel", "vocab": words, "unk_token": "w0" },
        "pre_tokenizer": { "type": "Whitespace" },
        "added_tokens": [],
    });
    std::fs::write(checkpoint.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    checkpoint
}

#[test]
fn a_server_finds_prefixes_of_a_model_with_states() {
    let (place, name) = (Place::new(), "hybrids/qwen35");
    let checkpoint = with_words(&place, name, VOCAB);
    let imported = import(&fixture(name)).unwrap();
    let server = Server::start_of(place, &checkpoint, 64, "--max-batch 3 --max-chunk 5", |_| {});
    let system: Vec<u32> = (0..21).map(|i| (i * 37 + 5) % VOCAB).collect();
    let ask = |prompt: &[u32], n: u32| {
        let body = json!({ "prompt": prompt, "max_tokens": 6, "temperature": 0, "n": n, "ignore_eos": true });
        let reply = server.ok("/v1/completions", &body);
        let expected: Vec<String> = alone(&imported, prompt, 6).iter().map(|id| format!("w{id}")).collect();
        for choice in reply["choices"].as_array().unwrap() {
            let text: Vec<&str> = choice["text"].as_str().unwrap().split_whitespace().collect();
            assert_eq!(text, expected, "{prompt:?}");
        }
        reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    let with = |user: u32| [&system[..], &[user; 14]].concat();
    // Pages have 16 tokens: the common part has one, and a prompt two.
    assert_eq!([40, 41, 42, 40].map(|user| ask(&with(user), 1)), [0, 0, 16, 32]);
    assert_eq!(ask(&with(43), 3), 16);
    std::thread::scope(|scope| {
        for user in 50..58 {
            scope.spawn(move || ask(&with(user), 1 + user % 2));
        }
    });
    assert_eq!((server.metric("monobloc:state_snapshots"), server.metric("monobloc:state_snapshots_max")), (4.0, 4.0));
}
