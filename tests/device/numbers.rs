//! Tests logits and tokens of the device against the interpreter and the goldens.

use std::ops::ControlFlow;

use monobloc::check::check_ids;
use monobloc::flywheel::Corpus;
use monobloc::pipeline::build;
use monobloc::sample::{RequestSettings, SampleSettings, argmax};
use monobloc::speculate::{Draft, Speculation};

use crate::faults::{self, prepare_small};
use crate::support::Goldens;
use crate::{Gpu, Place, bits, error_rel_l2, interpreter, logits, prepared, runner, say};

const CONTEXT: &str = "context_max = 512";

/// A whole build, with check and measurement, for every copy mechanism of this device.
#[test]
fn every_way_into_shared_memory_is_checked_and_timed() {
    let Some(gpu) = Gpu::here("every_way_into_shared_memory_is_checked_and_timed") else { return };
    for copy in gpu.copies() {
        for weights in ["fp32", "bf16"] {
            let place = Place::new();
            let workspace = place.workspace(None);
            let manifest = place.manifest(&gpu.record, copy, weights, "context_max = 1024\ntime_positions = [32, 960]");
            let report = build(&workspace, &manifest).unwrap_or_else(|fault| panic!("{copy}, {weights}: {fault}"));
            assert_eq!(report.waiting, Vec::<String>::new(), "{copy}, {weights}");
            let rows = Corpus::read(&[place.path("trials.csv")]).unwrap().trials;
            let positions: Vec<u32> =
                rows.iter().filter_map(|row| row.verdict().timing()).map(|timing| timing.position).collect();
            assert_eq!(positions, [32, 960], "{copy}, {weights}: {rows:?}");
            let check = rows[0].verdict().check().expect("checked before it was timed");
            let at_32 = rows[0].verdict().timing().expect("timed").latency_us_p50;
            say(&format!("{copy}, {weights}: relative L2 {:.2e}, {at_32:.1} us a step at 32", check.error_rel_l2));
        }
    }
}

/// A position too deep for a prompt is checked with a cache that the host generated, in the layout of the kernels.
#[test]
fn made_up_caches_are_read_as_they_were_written() {
    let Some(gpu) = Gpu::here("made_up_caches_are_read_as_they_were_written") else { return };
    let shape = include_str!("../../manifests/configs/qwen3-0.6b.json");
    for head_dim in [64, 80, 128, 256] {
        let mut config: serde_json::Value = serde_json::from_str(shape).unwrap();
        for (key, value) in [
            ("hidden_size", 512),
            ("intermediate_size", 2048),
            ("num_hidden_layers", 4),
            ("num_attention_heads", 4),
            ("num_key_value_heads", 2),
            ("head_dim", head_dim),
            ("vocab_size", 8192),
            ("bos_token_id", 0),
            ("eos_token_id", 1),
        ] {
            config[key] = value.into();
        }
        let place = Place::new();
        std::fs::write(place.path("config.json"), config.to_string()).unwrap();
        let decode = "context_max = 1536\ncheck_positions = [0, 1, 1201]\ntime_positions = [32]";
        let copy = gpu.record.spec.copy;
        let manifest = place.manifest_of("synthetic:config.json", &gpu.record, copy, "bf16", decode);
        let workspace = place.workspace(None);
        build(&workspace, &manifest).unwrap_or_else(|fault| panic!("heads of {head_dim}: {fault}"));
        let rows = Corpus::read(&[place.path("trials.csv")]).unwrap().trials;
        let check = rows[0].verdict().check().expect("checked");
        assert_eq!(check.positions, 3, "heads of {head_dim}");
        say(&format!("heads of {head_dim}, position 1201: relative L2 {:.2e} at most", check.error_rel_l2));
    }
}

#[test]
fn fp32_logits_are_those_of_the_interpreter_and_of_every_other_run() {
    let Some(gpu) = Gpu::here("fp32_logits_are_those_of_the_interpreter_and_of_every_other_run") else { return };
    for copy in gpu.copies() {
        let place = Place::new();
        let workspace = place.workspace(None);
        let prepared = prepared(&workspace, &place.manifest(&gpu.record, copy, "fp32", CONTEXT));
        let ids = check_ids(prepared.imported.graph.vocab, 512);
        let mut device = runner(&workspace, &prepared);
        let found = logits(&mut device, &ids);
        let expected = interpreter(&prepared).logits(&ids).unwrap();
        for position in [0, 1, 31, 200, 511] {
            let error = error_rel_l2(&expected[position], &found[position]);
            say(&format!("{copy}, position {position}: relative L2 {error:.2e}"));
            assert!(error <= 1e-4, "{copy}, position {position}: {error:e}");
        }
        // Again in the same session, and in another one with another cache.
        assert!(bits(&found) == bits(&logits(&mut device, &ids)), "{copy}: a second run differs");
        drop(device);
        let mut other = runner(&workspace, &prepared);
        assert!(bits(&found) == bits(&logits(&mut other, &ids)), "{copy}: another session differs");
    }
}

#[test]
fn greedy_tokens_are_those_of_transformers() {
    let Some(gpu) = Gpu::here("greedy_tokens_are_those_of_transformers") else { return };
    let place = Place::new();
    let workspace = place.workspace(None);
    let prepared =
        prepared(&workspace, &place.manifest(&gpu.record, gpu.record.spec.copy, "fp32", "context_max = 1024"));
    let mut device = runner(&workspace, &prepared);
    let goldens = Goldens::open("tinystories-llama");
    let greedy = goldens.ids("greedy_ids");
    for (prompt, expected) in greedy.chunks_exact(64).enumerate() {
        let ids = goldens.ids(&format!("prompt_ids.{prompt}"));
        let settings = SampleSettings::greedy();
        let found = device.generate(&ids, 64, &[], &settings, &mut |_| ControlFlow::Continue(())).unwrap();
        assert_eq!(found, expected, "prompt {prompt}");
    }
}

/// Each of 512 tokens is the interpreter's own choice after the same earlier tokens, or a tie within the tolerance.
#[test]
fn five_hundred_greedy_tokens_do_not_diverge() {
    let Some(gpu) = Gpu::here("five_hundred_greedy_tokens_do_not_diverge") else { return };
    // Tolerance of logits at this size of model: bf16 rounds activations, fp32 only sums.
    for (weights, tolerance) in [("fp32", 1e-3), ("bf16", 0.5)] {
        let place = Place::new();
        let workspace = place.workspace(None);
        let manifest =
            place.manifest(&gpu.record, gpu.record.spec.copy, weights, "context_max = 560\nsteps_per_launch = 128");
        let prepared = prepared(&workspace, &manifest);
        let prompt = Goldens::open("tinystories-llama").ids("prompt_ids.0");
        let settings = SampleSettings::greedy();
        let mut device = runner(&workspace, &prepared);
        let tokens = device.generate(&prompt, 512, &[], &settings, &mut |_| ControlFlow::Continue(())).unwrap();
        assert_eq!(tokens.len(), 512);
        let ids: Vec<u32> = prompt.iter().chain(&tokens).copied().collect();
        let rows = interpreter(&prepared).logits(&ids[..ids.len() - 1]).unwrap();
        let mut ties = 0;
        for (at, (&token, row)) in tokens.iter().zip(&rows[prompt.len() - 1..]).enumerate() {
            let best = argmax(row).unwrap();
            let margin = row[best as usize] - row[token as usize];
            assert!(margin <= tolerance, "{weights}, token {at}: expected {best}, found {token}, {margin} below");
            ties += usize::from(token != best);
        }
        say(&format!("{weights}: 512 tokens, {ties} of them the other one of a tie"));
    }
}

/// Over several launches of 16 steps. Logits differ in the last bits, so a choice could differ if two noisy scores are
/// that close; for these tokens none are. `check` asserts in every build that equal logits give equal choices.
#[test]
fn the_same_seed_gives_the_same_tokens_on_device_and_interpreter() {
    let Some(gpu) = Gpu::here("the_same_seed_gives_the_same_tokens_on_device_and_interpreter") else { return };
    let place = Place::new();
    let workspace = place.workspace(None);
    let manifest =
        place.manifest(&gpu.record, gpu.record.spec.copy, "fp32", "context_max = 256\nsteps_per_launch = 16");
    let prepared = prepared(&workspace, &manifest);
    let mut device = runner(&workspace, &prepared);
    let mut interp = interpreter(&prepared);
    let prompt = Goldens::open("tinystories-llama").ids("prompt_ids.2");
    let by_chance = |temperature, top_k, top_p, seed| SampleSettings { temperature, top_k, top_p, seed };
    let mut all = vec![];
    for settings in [
        by_chance(1.0, None, None, 1),
        by_chance(1.0, None, None, 2),
        by_chance(1.3, Some(40), None, 1),
        by_chance(1.3, Some(300), None, 1),
        by_chance(1.3, None, Some(0.9), 1),
        by_chance(1.3, Some(40), Some(0.9), 1),
    ] {
        let mut decide = || device.generate(&prompt, 100, &[], &settings, &mut |_| ControlFlow::Continue(())).unwrap();
        let (found, again) = (decide(), decide());
        assert_eq!(found, again, "{settings:?}");
        let sampler = settings.resolve().unwrap();
        let mut position = prompt.len() as u32 - 1;
        interp.reset();
        let expected = interp.generate(&prompt, 100, |logits| {
            position += 1;
            sampler.choose(logits, position).ok()
        });
        assert_eq!(found, expected.unwrap(), "{settings:?}");
        say(&format!("{settings:?}: 100 tokens as on the interpreter"));
        all.push(found);
    }
    assert_ne!(all[0], all[1], "another seed");
}

/// Proposes the tokens of an earlier text, every seventh of them wrong.
struct Recorded(Vec<u32>);

impl Draft for Recorded {
    fn propose(&mut self, sequence: &[u32], most: usize) -> Vec<u32> {
        let is_recorded = self.0.starts_with(sequence);
        let next = (sequence.len()..self.0.len()).take(if is_recorded { most } else { 0 });
        next.map(|at| if at % 7 == 0 { 1 } else { self.0[at] }).collect()
    }
}

/// Steps that verify run on another kernel than those that decode one token. In fp32 both choose the same tokens; for bf16 the number of
/// different tokens is printed.
#[test]
fn proposed_tokens_are_chosen_as_without_proposals() {
    let Some(gpu) = Gpu::here("proposed_tokens_are_chosen_as_without_proposals") else { return };
    for weights in ["fp32", "bf16"] {
        let place = Place::new();
        let workspace = place.workspace(None);
        let prepared =
            prepared(&workspace, &place.manifest(&gpu.record, gpu.record.spec.copy, weights, "context_max = 512"));
        let mut device = runner(&workspace, &prepared);
        let prompt = Goldens::open("tinystories-llama").ids("prompt_ids.0");
        let by_chance = SampleSettings { temperature: 0.8, seed: 7, ..SampleSettings::greedy() };
        let filtered = SampleSettings { top_k: Some(40), top_p: Some(0.9), ..by_chance };
        for sampling in [SampleSettings::greedy(), by_chance, filtered] {
            let plain = device.generate(&prompt, 200, &[], &sampling, &mut |_| ControlFlow::Continue(())).unwrap();
            let request = RequestSettings::plain(sampling).resolve(device.vocab(), &[]).unwrap();
            let mut draft = Recorded(prompt.iter().chain(&plain).copied().collect());
            let mut speculation = Speculation::new(&mut draft, 4);
            let on_token = &mut |_: &_| ControlFlow::Continue(());
            let found = device.speculate(&prompt, 200, &request, &mut speculation, on_token).unwrap().tokens;
            let differ = found.iter().zip(&plain).filter(|(a, b)| a != b).count();
            let counts = speculation.counts();
            say(&format!("{weights}, {}: {differ} of 200 tokens differ, {counts:?}", request.sampler()));
            assert!(found.len() == plain.len() && counts.accepted > 0, "{weights}: {counts:?}");
            assert!(weights == "bf16" || differ == 0, "{weights}, {}: {differ} tokens differ", request.sampler());
        }
    }
}

/// A turn of a conversation decodes only its new tokens, and gets the same answer as if all were decoded from the beginning.
#[test]
fn a_conversation_continues_from_the_cache() {
    let Some(gpu) = Gpu::here("a_conversation_continues_from_the_cache") else { return };
    let place = Place::new();
    let workspace = place.workspace(None);
    let manifest =
        place.manifest(&gpu.record, gpu.record.spec.copy, "fp32", "context_max = 256\nsteps_per_launch = 16");
    let prepared = prepared(&workspace, &manifest);
    let (mut device, mut fresh) = (runner(&workspace, &prepared), runner(&workspace, &prepared));
    let first = Goldens::open("tinystories-llama").ids("prompt_ids.2");
    let by_chance = SampleSettings { temperature: 1.2, top_k: Some(40), top_p: Some(0.9), seed: 5 };
    for sampling in [SampleSettings::greedy(), by_chance] {
        let request = RequestSettings::plain(sampling).resolve(device.vocab(), &[]).unwrap();
        let mut prompt = first.clone();
        let mut reused = vec![];
        for turn in 0..3 {
            let answer = device.answer(&prompt, 30, &request, &mut |_| ControlFlow::Continue(())).unwrap();
            let expected = fresh.generate(&prompt, 30, &[], &sampling, &mut |_| ControlFlow::Continue(())).unwrap();
            assert_eq!(answer.tokens, expected, "turn {turn}, {sampling:?}");
            reused.push(answer.reused);
            // The answer is cut, and another message follows.
            prompt.extend(&answer.tokens[..25]);
            prompt.extend([7, 8, 9]);
        }
        assert_eq!(reused[1..], [first.len() + 25, first.len() + 53], "{sampling:?}");
    }
}

/// Tags of steps have 32 bits. Tests a session after 2^32 steps, in launches that end before, at and after the last tag.
#[test]
fn tokens_are_the_same_when_tags_wrap_around() {
    let Some(gpu) = Gpu::here("tokens_are_the_same_when_tags_wrap_around") else { return };
    let place = Place::new();
    let prepared = prepare_small(&gpu.record, &place);
    let prompt = Goldens::open("tinystories-llama").ids("prompt_ids.0");
    let expected = &Goldens::open("tinystories-llama").ids("greedy_ids")[..];
    for left in [STEPS_OF_A_LAUNCH - 1, STEPS_OF_A_LAUNCH, STEPS_OF_A_LAUNCH + 1, 2 * STEPS_OF_A_LAUNCH + 5] {
        let mut session = faults::session(&gpu, &prepared, &[]);
        session.age(u32::MAX - left);
        session.start(&prompt, &[]).unwrap();
        for launch in 0..faults::STEPS / STEPS_OF_A_LAUNCH {
            session.run(launch * STEPS_OF_A_LAUNCH, STEPS_OF_A_LAUNCH, false).unwrap_or_else(|error| panic!("{error}"));
        }
        let found: Vec<u32> =
            (prompt.len() as u32..=faults::STEPS).map(|position| session.token(position).unwrap()).collect();
        assert_eq!(found, expected[..found.len()], "{left} tags before the last");
    }
}

const STEPS_OF_A_LAUNCH: u32 = 16;
