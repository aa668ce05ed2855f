//! Drafts of a checkpoint's own layer (MTP) on a device: the tokens of a text with their proposals, how many are accepted, and how long it takes.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use monobloc::engine::{Ask, Engine, Event, Figures, Limits, RequestId};
use monobloc::pipeline::{Batched, Mtp, Runner, Serving};
use monobloc::sample::{RequestSettings, SampleSettings};
use monobloc::speculate::{Speculated, Speculation};
use monobloc::target::TargetKind;

use crate::cycle::{self, Sizes};
use crate::{Gpu, Place, prepared, runner, say};

const SMALL: Sizes = Sizes { hidden: 256, width: 512, layers: 4, vocab: 512, heads: 4, kv_heads: 2, net_heads: 2 };
/// 0.6 G parameters: 1.1 GB a step.
const LARGE: Sizes =
    Sizes { hidden: 2048, width: 6144, layers: 8, vocab: 32_768, heads: 16, kv_heads: 4, net_heads: 16 };
const TOKENS: usize = 200;

/// Tokens of a text with proposals of at most `most` tokens, what became of these, and milliseconds.
fn with_draft(
    device: &mut Runner<'_>,
    mtp: &Mtp,
    (prompt, sampling): (&[u32], SampleSettings),
    most: usize,
) -> (Vec<u32>, Speculated, f64) {
    let request = RequestSettings::plain(sampling).resolve(device.vocab(), &[]).unwrap();
    let mut draft = mtp.of_text(prompt.len(), &request).unwrap();
    let mut speculation = Speculation::new(&mut draft, most);
    device.make_ready(prompt, most).unwrap();
    let begun = Instant::now();
    let on_token = &mut |_: &_| ControlFlow::Continue(());
    let tokens = device.speculate(prompt, TOKENS, &request, &mut speculation, on_token).unwrap().tokens;
    let (counts, took_ms) = (speculation.counts(), begun.elapsed().as_secs_f64() * 1e3);
    if let Some(fault) = draft.failed() {
        panic!("{fault}");
    }
    (tokens, counts, took_ms)
}

/// In fp32 the tokens are those without a draft, greedy and sampled, after short prompts and after ones that are read in chunks; for bf16 the
/// number of different tokens is printed.
#[test]
fn a_draft_changes_no_token() {
    let Some(gpu) = Gpu::here("a_draft_changes_no_token") else { return };
    for (weights, sizes) in [("fp32", SMALL), ("bf16", SMALL), ("bf16", LARGE)] {
        let place = Place::new();
        let (folder, workspace) = (place.path("checkpoint"), place.workspace(None));
        cycle::write(&folder, &sizes, 1);
        let (source, decode) = (format!("path:{}", folder.display()), "context_max = 2048\nsteps_per_launch = 16");
        let manifest = place.manifest_of(&source, &gpu.record, gpu.record.spec.copy, weights, decode);
        let prepared = prepared(&workspace, &manifest);
        let mtp = prepared.mtp(&workspace).unwrap_or_else(|fault| panic!("{fault}"));
        let mut device = runner(&workspace, &prepared);
        let by_chance = SampleSettings { temperature: 0.8, seed: 7, ..SampleSettings::greedy() };
        let filtered = SampleSettings { top_k: Some(40), top_p: Some(0.9), ..by_chance };
        for (sampling, length) in [
            (SampleSettings::greedy(), 12),
            (SampleSettings::greedy(), 700),
            (by_chance, 12),
            (by_chance, 700),
            (filtered, 40),
        ] {
            let prompt: Vec<u32> = (0..length).map(|at| (at * 37 + 5) % sizes.vocab as u32).collect();
            let decide = |device: &mut Runner<'_>| {
                let begun = Instant::now();
                let go_on = &mut |_| ControlFlow::Continue(());
                (device.generate(&prompt, TOKENS, &[], &sampling, go_on).unwrap(), begun.elapsed().as_secs_f64() * 1e3)
            };
            decide(&mut device);
            let (plain, plain_ms) = decide(&mut device);
            for most in [1, 3, 7] {
                let (found, counts, took_ms) = with_draft(&mut device, &mtp, (&prompt, sampling), most);
                let differ = found.iter().zip(&plain).filter(|(a, b)| a != b).count();
                let case = format!(
                    "{weights}, {} columns, {} of {length} tokens, mtp:{most}",
                    sizes.hidden, sampling.temperature
                );
                let Speculated { proposed, accepted, steps } = counts;
                let each = counts.tokens_per_step().unwrap_or(1.0);
                say(&format!(
                    "{case}: {differ} of {TOKENS} tokens differ, {accepted} of {proposed} accepted in {steps} steps ({each:.2} tokens a step), \
                     {took_ms:.1} ms against {plain_ms:.1} ms"
                ));
                assert!(found.len() == plain.len() && accepted > 0, "{case}: {counts:?}");
                assert!(weights == "bf16" || differ == 0, "{case}: {differ} tokens differ");
            }
        }
    }
}

const RUNNING: u32 = 3;

/// The tokens of requests to a server that come together, what became of proposals, and milliseconds.
fn asked(batched: &Batched, prompts: &[Vec<u32>], sampling: SampleSettings) -> (Vec<Vec<u32>>, Figures, f64) {
    let limits = Limits { running_max: RUNNING, waiting_max: 64, chunk_rows: 512, steps_max: 8 };
    let mut engine = Engine::new(batched.stepper().unwrap(), limits).unwrap();
    let settings = RequestSettings { ignore_eos: true, ..RequestSettings::plain(sampling) };
    let choices = vec![settings.resolve(engine.bounds().vocab, &[]).unwrap()];
    let begun = Instant::now();
    let submit = |prompt: &Vec<u32>| {
        let (prompt, choices) = (prompt.clone(), choices.clone());
        let ask = Ask { prompt, tokens_max: 60, choices, scores_prompt: None, grammar: None, deadline: None };
        engine.submit(ask).unwrap()
    };
    let ids: Vec<RequestId> = prompts.iter().map(submit).collect();
    let mut events = vec![];
    while !engine.is_idle() {
        engine.turn(Duration::ZERO, &mut events).unwrap_or_else(|fault| panic!("{fault}"));
    }
    let took_ms = begun.elapsed().as_secs_f64() * 1e3;
    let tokens = |request: &RequestId| {
        let decided = events.iter().filter_map(|event| match event {
            Event::Token { id, decided } if id.request == *request => Some(decided.token),
            _ => None,
        });
        decided.collect()
    };
    (ids.iter().map(tokens).collect(), engine.figures(), took_ms)
}

/// Requests that come together, one with a prompt that waves read, get the tokens of a server without a draft.
#[test]
fn a_draft_of_a_server_changes_no_token() {
    let Some(gpu) = Gpu::here("a_draft_of_a_server_changes_no_token") else { return };
    for (weights, sizes) in [("fp32", SMALL), ("bf16", LARGE)] {
        let place = Place::new();
        let (folder, workspace) = (place.path("checkpoint"), place.workspace(None));
        cycle::write(&folder, &sizes, 1);
        let (source, decode) = (format!("path:{}", folder.display()), "context_max = 2048\nsteps_per_launch = 16");
        let manifest = place.manifest_of(&source, &gpu.record, gpu.record.spec.copy, weights, decode);
        let prepared = prepared(&workspace, &manifest);
        let serving = Serving { running_max: RUNNING, ..Serving::of_manifest(&manifest, TargetKind::Cuda, 8) };
        let prompts: Vec<Vec<u32>> = [12, 700, 40, 300]
            .map(|length| (0..length).map(|at| (at * 37 + length) % sizes.vocab as u32).collect())
            .into();
        let by_chance = SampleSettings { temperature: 0.8, seed: 7, ..SampleSettings::greedy() };
        for sampling in [SampleSettings::greedy(), by_chance] {
            let plain = prepared.batched(&workspace, &serving).unwrap_or_else(|fault| panic!("{fault}"));
            let (plain, _, plain_ms) = asked(&plain, &prompts, sampling);
            for most in [1, 3] {
                let mtp = prepared.mtp(&workspace).unwrap_or_else(|fault| panic!("{fault}"));
                let drafted = prepared.batched(&workspace, &Serving { proposed: most, ..serving });
                let drafted = drafted.unwrap_or_else(|fault| panic!("{fault}")).with_draft(mtp, most);
                let (found, figures, took_ms) = asked(&drafted, &prompts, sampling);
                let differ: usize =
                    found.iter().zip(&plain).map(|(a, b)| a.iter().zip(b).filter(|(a, b)| a != b).count()).sum();
                let case = format!("{weights}, temperature {}, mtp:{most}", sampling.temperature);
                let (proposals, all) = (figures.proposals, 60 * prompts.len());
                say(&format!(
                    "{case}: {differ} of {all} tokens differ, {} of {} accepted in {} steps, {took_ms:.1} ms against {plain_ms:.1} ms",
                    proposals.accepted, proposals.proposed, proposals.steps
                ));
                assert!(found.iter().all(|tokens| tokens.len() == 60) && proposals.accepted > 0, "{case}");
                assert!(weights == "bf16" || differ == 0, "{case}: {differ} tokens differ");
            }
        }
    }
}
