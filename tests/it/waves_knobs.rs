//! Tests the knobs of wave kernels: what each changes, what is refused and how that is named, and that every plan is proven, compiles and computes the
//! program.

use std::collections::{BTreeMap, BTreeSet};

use monobloc::abba::Round;
use monobloc::candidate::{Candidate, KNOB_NAMES, WAVE_KNOB_COUNT, WAVE_KNOBS, WaveKnob, WaveKnobs};
use monobloc::codegen::emit::Trace;
use monobloc::codegen::waves::emit;
use monobloc::digest::Digest;
use monobloc::flywheel::ModelShape;
use monobloc::model::config::import_config_only;
use monobloc::model::graph::ModelGraph;
use monobloc::random::Random;
use monobloc::search::prior::{Example, Group, Prior, Setting, moves};
use monobloc::search::{
    Arena, BuildOutcome, Limits, RunOutcome, Search, Space, Start, Stop, TrialRecord, TrialResult, drive,
};
use monobloc::target::Target;
use monobloc::validate::Validated;
use monobloc::waves::{Form, Plan, Refused, derive, derive_chosen, prove};

use rayon::prelude::*;

use crate::formats::{all, named, rounded};
use crate::nvrtc::{compiles, nvrtc, quick};
use crate::proof_support::BF16;
use crate::waves::{filling, kernel, listed, small, wide};
use crate::waves_experts::of_layers;

const FORMS: [(Form, u32); 4] = [(Form::Chunk, 512), (Form::Steps, 32), (Form::Steps, 64), (Form::Steps, 128)];

fn h200() -> Target {
    Target::builtin("h200").unwrap()
}

fn with(changes: &[(usize, u32)]) -> WaveKnobs {
    let mut values = [0; WAVE_KNOB_COUNT];
    changes.iter().for_each(|&(at, value)| values[at] = value);
    WaveKnobs::of_values(&values)
}

/// Two layers of Llama-3.2-1B.
fn llama() -> ModelGraph {
    let config = include_str!("../../manifests/configs/llama-3.2-1b.json");
    let mut graph = import_config_only(config, 0).unwrap().graph;
    graph.layers.truncate(2);
    graph
}

/// Models and targets that have every kind of product between them: plain and coded weights, experts, many and few SMs.
fn kernels() -> Vec<(String, Validated, Target)> {
    let mut found = vec![("Llama-3.2-1B".to_string(), kernel(&llama(), &h200()), h200())];
    for (name, target) in [("families/gemma3", h200()), ("families/qwen3", small())] {
        found.push((name.to_string(), kernel(&wide(name).graph, &target), target));
    }
    let experts = of_layers("experts/qwen3-moe", None).graph;
    found.push(("experts/qwen3-moe".to_string(), kernel(&experts, &small()), small()));
    for format in ["int4:32", "int8"] {
        let imported = rounded(filling("families/qwen3"), &all(named(format)));
        found.push((format!("families/qwen3 in {format}"), kernel(&imported.graph, &small()), small()));
    }
    found
}

/// A plan with knobs, which is proven; or why there is none.
fn plan(kernel: &(String, Validated, Target), (form, rows): (Form, u32), knobs: &WaveKnobs) -> Result<Plan, Refused> {
    let (name, validated, target) = kernel;
    let plan = derive_chosen(validated.schedule(), target, form, rows, knobs)?;
    if let Err(violations) = prove(plan.clone(), validated, target) {
        panic!("{name}, {form:?} of {rows}, {knobs}: {}", listed(&violations));
    }
    Ok(plan)
}

fn reaches(knob: &WaveKnob, form: Form) -> bool {
    if form == Form::Chunk { knob.of_chunks } else { knob.of_steps }
}

#[test]
fn without_knobs_a_plan_is_the_default_one() {
    for of in kernels() {
        for (form, rows) in FORMS {
            let default = derive(of.1.schedule(), &of.2, form, rows);
            assert_eq!(plan(&of, (form, rows), &WaveKnobs::default()), default, "{}, {form:?} of {rows}", of.0);
        }
    }
}

/// Whatever the knobs say: a plan is proven, or a knob is named.
#[test]
fn every_value_is_proven_or_refused_by_name() {
    let (mut changed, mut refused) = (BTreeSet::new(), BTreeMap::new());
    for of in kernels() {
        for (form, rows) in FORMS {
            let Ok(default) = derive(of.1.schedule(), &of.2, form, rows) else { continue };
            let mut tried = vec![];
            for (at, knob) in WAVE_KNOBS.iter().enumerate().filter(|(_, knob)| reaches(knob, form)) {
                tried.extend(knob.values.iter().map(|&value| with(&[(at, value)])));
            }
            let mut random = Random::stream(7, &of.0, u64::from(rows));
            for _ in 0..60 {
                let turns = (0..3).map(|_| {
                    let at = random.below(WAVE_KNOB_COUNT);
                    let values = WAVE_KNOBS[at].values;
                    (at, if reaches(&WAVE_KNOBS[at], form) { values[random.below(values.len())] } else { 0 })
                });
                tried.push(with(&turns.collect::<Vec<_>>()));
            }
            for knobs in tried {
                let alone: Vec<usize> = (0..WAVE_KNOB_COUNT).filter(|&at| knobs.values()[at] != 0).collect();
                match plan(&of, (form, rows), &knobs) {
                    Ok(plan) if plan != default && alone.len() == 1 => {
                        changed.insert((form == Form::Chunk, WAVE_KNOBS[alone[0]].name));
                    }
                    Ok(_) => {}
                    Err(Refused::Knob { knob, value, expected }) => {
                        assert!(knobs.to_string().contains(&format!("{knob}={value}")), "{knobs}: {knob}");
                        refused.insert(knob, expected);
                    }
                    Err(other) => panic!("{}, {form:?} of {rows}, {knobs}: {other}", of.0),
                }
            }
        }
    }
    for knob in WAVE_KNOBS {
        for (is_chunk, has) in [(true, knob.of_chunks), (false, knob.of_steps)] {
            assert_eq!(changed.contains(&(is_chunk, knob.name)), has, "{}: {changed:?}", knob.name);
        }
    }
    let named: Vec<&str> = refused.keys().copied().collect();
    let [inputs, products, rows] = ["wave_input_slots", "wave_products", "wave_row_groups"];
    let [slot, slots, tile, units] = ["wave_slot_kib", "wave_slots", "wave_tile", "wave_unit_groups"];
    assert_eq!(named, [inputs, products, rows, slot, slots, tile, units], "{refused:?}");
}

#[test]
fn knobs_that_do_not_fit_are_refused_by_name() {
    let all = kernels();
    let (plain, coded) = (&all[0], &all[4]);
    for (of, form, text, expected) in [
        (plain, FORMS[0], "wave_held=2", "`wave_held` is 2, expected 0, because a plan of chunks has no such choice"),
        (
            plain,
            FORMS[1],
            "wave_products=1",
            "`wave_products` is 1, expected 0, because a plan of steps has no such choice",
        ),
        (
            plain,
            FORMS[1],
            "wave_slots=12",
            "`wave_slots` is 12, expected at most 8, as many as shared memory has room for",
        ),
        (
            plain,
            FORMS[0],
            "wave_row_groups=4",
            "`wave_row_groups` is 4, expected 0, because rows of `qkv.0` are not divided so",
        ),
        (
            coded,
            FORMS[3],
            "wave_row_groups=8;wave_unit_groups=8",
            "`wave_row_groups` is 8, expected 0, because rows of `qkv.0` are not divided so",
        ),
    ] {
        let refused = plan(of, form, &WaveKnobs::parse(text).unwrap()).unwrap_err();
        assert_eq!(refused.to_string(), expected);
    }
    let (_, validated, target) = plain;
    let knobs = WaveKnobs { pass: 9, ..WaveKnobs::default() };
    let refused = derive_chosen(validated.schedule(), target, Form::Steps, 32, &knobs).unwrap_err().to_string();
    assert_eq!(refused, "`wave_pass` is 9, expected one of 0, 8, 16, 24, 32, 48, 64");
    let tail =
        derive_chosen(validated.schedule(), target, Form::Tail, 16, &WaveKnobs { pass: 8, ..WaveKnobs::default() });
    assert_eq!(tail.unwrap_err().to_string(), "`wave_pass` is 8, expected 0, because a tail has no such choice");
}

/// The last value of each knob that changes anything, each in a kernel of Llama-3.2-1B.
#[test]
fn kernels_of_every_knob_compile() {
    let Some(nvrtc) = nvrtc("kernels_of_every_knob_compile") else { return };
    let of = &kernels()[0];
    let mut plans: Vec<(WaveKnobs, Plan)> = vec![];
    for (form, rows) in [FORMS[0], FORMS[2]] {
        let default = plan(of, (form, rows), &WaveKnobs::default()).unwrap();
        for (at, knob) in WAVE_KNOBS.iter().enumerate().filter(|(_, knob)| reaches(knob, form)) {
            let made =
                |value: &u32| Some((with(&[(at, *value)]), plan(of, (form, rows), &with(&[(at, *value)])).ok()?));
            let last = knob.values.iter().rev().filter_map(made).find(|(_, made)| *made != default);
            plans.extend(last);
        }
    }
    assert!(plans.len() > 15, "{}", plans.len());
    plans.into_par_iter().for_each(|(knobs, made)| {
        let what = format!("{:?} of {}, {knobs}", made.form, made.rows);
        let proven = prove(made, &of.1, &of.2).unwrap();
        compiles(quick(nvrtc), &emit(&proven, &of.2, Trace::Off), &what);
    });
}

/// A machine that runs plans of a wave kernel: they are derived and proven, and their times are made up.
struct MadeUp<'a> {
    kernel: &'a (String, Validated, Target),
    form: (Form, u32),
    random: Random,
    infeasible: Vec<String>,
    timed: usize,
}

/// Narrow passes of chunks, whole units of steps, and three slots of inputs are faster. Everything else is a little slower.
fn time_of(form: Form, knobs: &WaveKnobs) -> f64 {
    let first = if form == Form::Chunk { knobs.pass == 16 } else { knobs.parts == 1 };
    let good = [(first, 0.95), (knobs.input_slots == 3, 0.97)];
    let gain: f64 = good.iter().filter(|(is, _)| *is).map(|(_, factor)| factor).product();
    let turned = knobs.values().iter().filter(|value| **value != 0).count() - good.iter().filter(|(is, _)| *is).count();
    gain * 1.01f64.powi(turned as i32)
}

impl Arena for MadeUp<'_> {
    type Built = ();
    type Evidence = ();
    type Fault = String;

    fn make(&mut self, candidate: &Candidate, _: &[Candidate]) -> Result<BuildOutcome<()>, String> {
        match plan(self.kernel, self.form, &candidate.waves) {
            Ok(plan) => {
                let artefact = Digest::of(format!("{plan:?}").as_bytes());
                Ok(BuildOutcome::Ready { artefact, made: () })
            }
            Err(refused) => Ok(BuildOutcome::Infeasible(refused.to_string())),
        }
    }

    fn run(&mut self, candidate: &Candidate, (): &(), incumbent: Option<&Candidate>) -> Result<RunOutcome<()>, String> {
        let Some(incumbent) = incumbent else { return Ok(RunOutcome::Timed { rounds: vec![], evidence: () }) };
        let times = [incumbent, candidate].map(|candidate| time_of(self.form.0, &candidate.waves));
        let mut noisy = |us: f64| us * (0.999 + 0.002 * self.random.unit());
        let round = |_| Round { a: [noisy(times[0]), noisy(times[0])], b: [noisy(times[1]), noisy(times[1])] };
        let rounds = (0..7).map(round).collect();
        Ok(RunOutcome::Timed { rounds: vec![monobloc::search::Rounds { position: 512, rounds }], evidence: () })
    }

    fn record(&mut self, record: &TrialRecord<'_, (), ()>) -> Result<(), String> {
        match record.result {
            TrialResult::Infeasible(reason) => self.infeasible.push(reason.to_string()),
            _ => self.timed += 1,
        }
        Ok(())
    }

    fn stop(&mut self) -> Option<Stop> {
        None
    }

    fn floor_gap(&mut self) -> Option<f64> {
        None
    }
}

fn setting(kernel: &str) -> Setting {
    let dtype = "bf16".to_string();
    let model = ModelShape {
        model_graph: Digest::of(b"model"),
        family: "LlamaForCausalLM".to_string(),
        layers: 16,
        hidden: 2048,
        intermediate: 8192,
        heads: 32,
        kv_heads: 8,
        head_dim: 64,
        vocab: 128_256,
        parameters: 1,
        weights_dtype: dtype.clone(),
        cache_dtype: dtype.clone(),
        wire_dtype: dtype,
        kernel: kernel.to_string(),
    };
    Setting::new(&model, "h200", "cuda")
}

fn space(of_chunks: bool) -> Space {
    let (graph, target) = (llama(), h200());
    let default = Candidate::default_for(&graph, &target, BF16);
    Space::new(&graph, &target, BF16, 512, default, |_| 30_000).of_waves(of_chunks)
}

#[test]
fn a_search_finds_planted_knobs_of_wave_kernels() {
    let of = &kernels()[0];
    for (form, rows) in [FORMS[0], FORMS[2]] {
        let space = space(form == Form::Chunk);
        assert!(space.knobs().all(|(knob, _)| knob.is_wave()), "a schedule is no choice of a wave kernel");
        let mut arena = MadeUp { kernel: of, form: (form, rows), random: Random::new(3), infeasible: vec![], timed: 0 };
        let prior = Prior::new(&[], setting("chunk"), &space);
        let mut search = Search::new(&space, Limits::of_budget(60, 1), &[], prior, vec![], &|_| 0.0);
        let driven = drive(&mut arena, &mut search, Start { past: vec![], margin: 0.01, external: None }, 0).unwrap();
        let best = driven.best.unwrap();
        assert!(time_of(form, &best.waves) < 0.94, "{form:?}: {}", best.waves);
        assert_eq!(best.without_waves(), *space.default_candidate());
        assert!(arena.timed <= 62 && arena.infeasible.iter().all(|reason| reason.starts_with('`')), "{form:?}");
        // Plans that are the same are tried once.
        assert!(!driven.duplicates.is_empty(), "{form:?}");
    }
}

#[test]
fn trials_of_another_kernel_teach_nothing() {
    let space = space(true);
    let default = space.default_candidate().values();
    let mut values = default;
    values[KNOB_NAMES.iter().position(|name| *name == "wave_pass").unwrap()] = 16;
    let example = Example { moves: moves(&values, &default), values, log_ratio: Some(-0.2), deep: None };
    let group =
        |kernel| Group { name: String::new(), setting: setting(kernel), default, examples: vec![example.clone()] };
    let learned = |kernel| !Prior::new(&[group(kernel)], setting("chunk"), &space).is_cold();
    assert_eq!(["chunk", "decode", "wave:32"].map(learned), [true, false, false]);
}
