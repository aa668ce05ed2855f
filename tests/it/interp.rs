//! Tests the interpreter on schedules that lowering makes: goldens of every family, both arithmetics, adversarial orders.

use std::ops::ControlFlow;
use std::sync::Arc;

use monobloc::candidate::Candidate;
use monobloc::dtype::{DType, Precision};
use monobloc::interp::{Arithmetic, Input, Interp, InterpError, Options, Order, Pack};
use monobloc::ir::schedule::{Mechanism, Schedule};
use monobloc::lower::lower;
use monobloc::model::config::{Imported, import, import_config_only};
use monobloc::model::graph::ModelGraph;
use monobloc::pack::pack;
use monobloc::reference;
use monobloc::schedule::schedule;
use monobloc::target::{Target, TargetKind};

use crate::support::{Goldens, checkpoints, fixture, max_difference};

/// fp32 against fp32 in another summation order (tests/fixtures/README.md).
const LOGITS_TOLERANCE: f32 = 3e-4;
const FP32: Precision = Precision { weights: DType::F32, cache: DType::F32, wire: DType::F32 };
const BF16: Precision = Precision { weights: DType::Bf16, cache: DType::Bf16, wire: DType::Bf16 };

/// How a test places a model.
#[derive(Clone)]
struct Plan {
    precision: Precision,
    sms: u32,
    heads_per_task: u32,
    splits: u32,
    split_from: u32,
    slot_bytes: u32,
    mechanism: Mechanism,
}

const SMALL: Plan = Plan {
    precision: FP32,
    sms: 3,
    heads_per_task: 1,
    splits: 1,
    split_from: 0,
    slot_bytes: 4096,
    mechanism: Mechanism::Packets,
};

fn place(imported: &Imported, plan: &Plan, context_max: u32) -> Schedule {
    // Kernels have packets only; a machine of worker threads supports the other mechanisms.
    let packets = plan.mechanism == Mechanism::Packets;
    let mut target = Target::builtin("h200").unwrap();
    if !packets {
        target.kind = TargetKind::Cpu;
    }
    let candidate = Candidate {
        consumer_warps: if packets { 4 } else { 1 },
        ring_slots: 4,
        slot_bytes: plan.slot_bytes,
        flight_high: 2,
        flight_low: 1,
        flight_free: 2,
        sms: plan.sms,
        heads_per_task: plan.heads_per_task,
        splits: plan.splits,
        split_from: plan.split_from,
        mechanism: plan.mechanism,
        ..Candidate::default_for(&imported.graph, &target, plan.precision)
    };
    let program = lower(&imported.graph, "test", plan.precision, context_max, &candidate).unwrap();
    schedule(program, &target, &candidate).unwrap()
}

fn packed(imported: &Imported, schedule: &Schedule) -> Pack {
    Arc::new(pack(schedule, &imported.graph, &imported.weights).unwrap())
}

fn family(name: &str) -> Imported {
    import(&fixture("families").join(name)).unwrap()
}

fn threads(n: usize) -> Options {
    Options { arithmetic: Arithmetic::Fast, order: Order::Threads(n) }
}

fn bits(logits: &[Vec<f32>]) -> Vec<u32> {
    logits.iter().flatten().map(|v| v.to_bits()).collect()
}

/// All families that import, with the candidates that exercise every op and every role.
fn plans(group: u32) -> Vec<Plan> {
    vec![
        SMALL,
        Plan { sms: 1, heads_per_task: group, mechanism: Mechanism::Counter, ..SMALL },
        Plan { sms: 7, splits: 3, split_from: 5, mechanism: Mechanism::Fenced, ..SMALL },
        Plan { sms: 5, splits: 2, split_from: 0, slot_bytes: 8192, ..SMALL },
    ]
}

/// Whether programs have the experts of a model: those without a gate have whole units of 8 rows; others are refused by name.
fn has_experts(graph: &ModelGraph) -> bool {
    let mut experts = graph.layers.iter().filter_map(|layer| layer.feed.experts()?.experts.first());
    experts.all(|mlp| mlp.gate.is_some() || mlp.up.rows.is_multiple_of(8))
}

#[test]
fn every_checkpoint_agrees_with_transformers_through_lower_and_schedule() {
    let names = ["families", "variants", "dense", "hybrids"].map(checkpoints).concat();
    let mut wrong = vec![];
    let mut compared = 0;
    for name in &names {
        let imported = import(&fixture(name)).unwrap();
        if !has_experts(&imported.graph) {
            continue;
        }
        compared += 1;
        let goldens = Goldens::open(name);
        let (ids, want, greedy_want) = (goldens.ids("input_ids"), goldens.floats("logits"), goldens.ids("greedy_ids"));
        let context_max = imported.graph.positions_max.min(64);
        // Not every model with a recurrent state has a history. A chunk of one has sixteen rows at least.
        let attn = imported.graph.layers.iter().find_map(|layer| layer.history());
        let row_bytes = attn.map_or(4, |attn| attn.head_dim.next_multiple_of(4) * 4);
        for (p, plan) in plans(attn.map_or(1, |attn| attn.heads / attn.kv_heads)).into_iter().enumerate() {
            let plan = Plan { slot_bytes: plan.slot_bytes.max(16 * row_bytes.next_power_of_two()), ..plan };
            let schedule = place(&imported, &plan, context_max);
            let mut interp = Interp::new(&schedule, packed(&imported, &schedule), threads(2)).unwrap();
            let logits = interp.logits(&ids).unwrap();
            let difference = max_difference(&logits.concat(), &want);
            let greedy = interp.greedy(&ids, greedy_want.len(), |_| ControlFlow::Continue(())).unwrap();
            if difference > LOGITS_TOLERANCE || greedy != greedy_want {
                wrong.push(format!("{name}, plan {p}: largest difference {difference}, greedy {greedy:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(compared >= 81, "{compared}");
}

/// Each record's default candidate computes the same as transformers, for every number of SMs, size of shared memory and copy
/// mechanism.
#[test]
fn every_checkpoint_agrees_on_the_default_candidate_of_every_record() {
    let mut wrong = vec![];
    for name in ["families", "variants", "dense", "hybrids"].map(checkpoints).concat() {
        let imported = import(&fixture(&name)).unwrap();
        if !has_experts(&imported.graph) {
            continue;
        }
        let goldens = Goldens::open(&name);
        let ids = goldens.ids("input_ids");
        let ids = &ids[..ids.len().min(9)];
        let want = &goldens.floats("logits")[..ids.len() * imported.graph.vocab as usize];
        for target in Target::builtin_names().filter_map(Target::builtin) {
            let candidate = Candidate::default_for(&imported.graph, &target, FP32);
            let program = lower(&imported.graph, "test", FP32, ids.len() as u32, &candidate).unwrap();
            let schedule = schedule(program, &target, &candidate).unwrap();
            let mut interp = Interp::new(&schedule, packed(&imported, &schedule), threads(2)).unwrap();
            let difference = max_difference(&interp.logits(ids).unwrap().concat(), want);
            if difference > LOGITS_TOLERANCE {
                wrong.push(format!("{name} on {}: largest difference {difference}", target.name));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Families that together have windows, two RoPE tables, both norms, q/k norms of both spans, a parallel block,
/// biases, softcaps, plain and gated MLPs.
const VARIED: [&str; 5] = ["gemma2", "gemma3", "gpt-neox", "olmo2", "llama-bias"];

#[test]
fn any_number_of_threads_and_any_adversarial_order_give_the_same_bits() {
    for name in VARIED {
        let imported = family(name);
        let ids = &Goldens::open(&format!("families/{name}")).ids("input_ids")[..12];
        for plan in [
            Plan { sms: 4, splits: 3, split_from: 5, ..SMALL },
            Plan { sms: 6, precision: BF16, mechanism: Mechanism::Counter, ..SMALL },
        ] {
            let schedule = place(&imported, &plan, 32);
            let pack = packed(&imported, &schedule);
            let mut one = Interp::new(&schedule, pack.clone(), threads(1)).unwrap();
            let want = bits(&one.logits(ids).unwrap());
            let greedy = one.greedy(ids, 6, |_| ControlFlow::Continue(())).unwrap();
            let mut others = vec![threads(2), threads(3)];
            others.extend((0..4).map(|seed| Options::adversarial(Arithmetic::Fast, seed)));
            for options in others {
                let mut interp = Interp::new(&schedule, pack.clone(), options).unwrap();
                assert!(bits(&interp.logits(ids).unwrap()) == want, "{name}, {options:?}");
                let again = interp.greedy(ids, 6, |_| ControlFlow::Continue(())).unwrap();
                assert_eq!(again, greedy, "{name}, {options:?}");
            }
        }
    }
}

#[test]
fn the_fast_path_agrees_with_f64_and_f64_with_the_reference() {
    for name in VARIED {
        let imported = family(name);
        let ids = &Goldens::open(&format!("families/{name}")).ids("input_ids")[..12];
        let schedule = place(&imported, &Plan { splits: 2, split_from: 6, ..SMALL }, 32);
        let pack = packed(&imported, &schedule);
        let run = |options| Interp::new(&schedule, pack.clone(), options).unwrap().logits(ids).unwrap().concat();
        let (fast, spec) = (run(Options::fast()), run(Options::spec()));
        let hostile = run(Options::adversarial(Arithmetic::Spec, 9));
        assert!(spec == hostile, "{name}: f64 depends on the order");
        let reference = reference::forward(&imported.graph, &imported.weights, ids).concat();
        let (a, b) = (max_difference(&fast, &spec), max_difference(&spec, &reference));
        // Buffers between ops are fp32 in both; the reference keeps f64 throughout.
        assert!(a < 1e-4 && b < 1e-4, "{name}: fast to spec {a}, spec to reference {b}");
    }
}

#[test]
fn sizes_that_nothing_divides_compute_the_same() {
    // 44 of k is 32 and 12 in bf16 granules, 61 rows of the head and 86 of the MLP end in the middle of a unit, and ten
    // dimensions of a head are no vector.
    let config = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 44,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "intermediate_size": 86,
        "num_hidden_layers": 2, "vocab_size": 61, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "max_position_embeddings": 64, "tie_word_embeddings": false, "attention_bias": true, "mlp_bias": true,
        "torch_dtype": "bfloat16"}"#;
    let imported = import_config_only(config, 3).unwrap();
    let ids: Vec<u32> = (0..40).map(|i| i * 7 % 61).collect();
    let reference = reference::forward(&imported.graph, &imported.weights, &ids).concat();
    for plan in [
        Plan { sms: 8, splits: 2, split_from: 17, ..SMALL },
        Plan { sms: 8, heads_per_task: 3, precision: Precision { weights: DType::Bf16, ..FP32 }, ..SMALL },
    ] {
        let schedule = place(&imported, &plan, 64);
        let pack = packed(&imported, &schedule);
        for options in [threads(2), Options::spec(), Options::adversarial(Arithmetic::Fast, 2)] {
            let logits = Interp::new(&schedule, pack.clone(), options).unwrap().logits(&ids).unwrap().concat();
            let difference = max_difference(&logits, &reference);
            assert!(difference < 1e-4, "{options:?}: {difference}");
        }
    }
}

#[test]
fn bf16_stays_within_the_error_of_bf16_eager() {
    for name in VARIED {
        let imported = family(name);
        let goldens = Goldens::open(&format!("families/{name}"));
        let want = goldens.floats("logits");
        let schedule = place(&imported, &Plan { precision: BF16, ..SMALL }, 64);
        let mut interp = Interp::new(&schedule, packed(&imported, &schedule), threads(2)).unwrap();
        let got = interp.logits(&goldens.ids("input_ids")).unwrap().concat();
        let square = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v * v)).sum::<f64>();
        let error = square(&mut got.iter().zip(&want).map(|(a, b)| a - b));
        let relative = (error / square(&mut want.iter().copied())).sqrt();
        // Not zero either: rounding must happen.
        assert!((1e-4..0.02).contains(&relative), "{name}: relative error {relative}");
    }
}

#[test]
fn deep_positions_run_on_a_generated_cache() {
    let imported = family("mistral-swa");
    let plan = Plan { splits: 3, split_from: 20, precision: Precision { cache: DType::Bf16, ..FP32 }, ..SMALL };
    let schedule = place(&imported, &plan, 128);
    let pack = packed(&imported, &schedule);
    let run = |options, position| {
        let mut interp = Interp::new(&schedule, pack.clone(), options).unwrap();
        interp.fill_cache(5, position).unwrap();
        let first = interp.step(Input::Token(7)).unwrap();
        assert_eq!(interp.position(), position + 1);
        [first, interp.step(Input::Selected).unwrap()].concat()
    };
    let shallow = run(threads(1), 3);
    for position in [3, 19, 20, 90, 126] {
        let (fast, spec) = (run(threads(2), position), run(Options::spec(), position));
        let hostile = run(Options::adversarial(Arithmetic::Fast, 3), position);
        assert!(fast == hostile, "position {position}");
        assert!(max_difference(&fast, &spec) < 1e-4, "position {position}: {}", max_difference(&fast, &spec));
        assert!(position == 3 || fast != shallow, "the cache has no effect at {position}");
    }
}

#[test]
fn a_caller_may_choose_tokens_and_stop() {
    let imported = family("llama-gqa");
    let schedule = place(&imported, &SMALL, 32);
    let mut interp = Interp::new(&schedule, packed(&imported, &schedule), threads(2)).unwrap();
    let greedy = interp.greedy(&[1, 2, 3], 8, |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(greedy.len(), 8);
    let chosen = interp.generate(&[1, 2, 3], 8, |logits| Some(reference::argmax(logits))).unwrap();
    assert_eq!(chosen, greedy);
    let mut left = 3;
    let stopped = interp.greedy(&[1, 2, 3], 8, |_| {
        left -= 1;
        if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert_eq!(stopped.unwrap(), greedy[..3]);
    // Continues from there and goes back: rows of later positions are not seen.
    interp.seek(3).unwrap();
    interp.step(Input::Token(greedy[0])).unwrap();
    assert_eq!(interp.selected(), Some(greedy[1]));
    let mut hostile =
        Interp::new(&schedule, packed(&imported, &schedule), Options::adversarial(Arithmetic::Fast, 1)).unwrap();
    hostile.logits(&[1, 2, 3, greedy[0], 9]).unwrap();
    hostile.seek(3).unwrap();
    hostile.step(Input::Token(greedy[0])).unwrap();
    assert_eq!(hostile.selected(), Some(greedy[1]));
}

#[test]
fn bad_input_is_named() {
    let imported = family("llama-gqa");
    let schedule = place(&imported, &SMALL, 8);
    let pack = packed(&imported, &schedule);
    let mut interp = Interp::new(&schedule, pack.clone(), threads(2)).unwrap();
    let text = |error: InterpError| error.to_string();
    assert_eq!(text(interp.logits(&[1; 9]).unwrap_err()), "position 8 is not below the context of 8");
    assert_eq!(text(interp.step(Input::Selected).unwrap_err()), "no token to start from");
    let vocab = interp.vocab() as u32;
    let error = text(interp.step(Input::Token(vocab)).unwrap_err());
    assert_eq!(error, format!("token {vocab} is not below the vocabulary of {vocab}"));
    let short: Pack = Arc::new((*pack).as_ref()[..100].to_vec());
    let error = text(Interp::new(&schedule, short, threads(1)).unwrap_err());
    assert_eq!(error, format!("the pack has 100 bytes, expected {}", (*pack).as_ref().len()));
}

/// Result of adversarial orders with several random seeds for a schedule after `change`.
fn verdicts(change: impl Fn(&mut Schedule)) -> Vec<String> {
    verdicts_of(&Plan { sms: 4, ..SMALL }, change)
}

fn verdicts_of(plan: &Plan, change: impl Fn(&mut Schedule)) -> Vec<String> {
    let imported = family("llama-gqa");
    let mut schedule = place(&imported, plan, 64);
    change(&mut schedule);
    let pack = packed(&imported, &schedule);
    (0..8)
        .map(|seed| {
            let options = Options::adversarial(Arithmetic::Fast, seed);
            match Interp::new(&schedule, pack.clone(), options).unwrap().logits(&[5; 8]) {
                Ok(_) => "fine".to_string(),
                Err(error) => error.to_string(),
            }
        })
        .collect()
}

fn grid_task(schedule: &Schedule, grid: &str, sm: usize) -> usize {
    let regime = &schedule.regimes[0];
    let is = |t: &&monobloc::ir::TaskId| schedule.program.grids[regime.tasks[t.index()].grid.index()].name == grid;
    regime.queues[sm].iter().find(is).unwrap().index()
}

#[test]
fn an_adversarial_order_finds_missing_order_of_a_schedule() {
    assert!(verdicts(|_| ()).iter().all(|v| v == "fine"));

    let unwaited = verdicts(|s| {
        let task = grid_task(s, "gate_up.0", 2);
        s.regimes[0].tasks[task].waits.clear();
    });
    assert!(unwaited.iter().any(|v| v.contains("reads column") && v.contains("expected this step's")), "{unwaited:#?}");

    // Arg-max pairs that travel as plain packets order no cache rows.
    let unordered = verdicts(|s| {
        for event in &mut s.regimes[0].events {
            event.mechanism = Mechanism::Packets;
        }
    });
    assert!(unordered.iter().all(|v| v.contains("before it waited for a carried event")), "{unordered:#?}");

    // No event tells other SMs about the rows of one SM.
    let unreleased = verdicts(|s| {
        let sm =
            (0..4).find(|&sm| s.regimes[0].queues[sm].len() == s.regimes[0].queues.iter().map(Vec::len).max().unwrap());
        let task = grid_task(s, "head", sm.unwrap());
        let event = s.regimes[0].tasks[task].signals[0];
        s.regimes[0].tasks[task].signals.clear();
        s.regimes[0].events[event.index()].count -= 1;
        for wait in s.regimes[0].tasks.iter_mut().flat_map(|t| &mut t.waits).filter(|w| w.event == event) {
            wait.count -= 1;
        }
    });
    assert!(
        unreleased.iter().any(|v| v.contains("no ordered write has reached") || v.contains("reads column")),
        "{unreleased:#?}"
    );

    let swapped = verdicts(|s| s.regimes[0].streams[1].swap(0, 1));
    assert!(swapped.iter().all(|v| v.contains("its stream brings")), "{swapped:#?}");

    let tight = verdicts(|s| s.machine.ring.slots = 1);
    assert!(tight.iter().all(|v| v.contains("needs more than the 1 ring slots")), "{tight:#?}");
}

/// What the SM of a loader appended in earlier steps is there by a barrier and a fence of that SM alone (docs of `ir`).
#[test]
fn a_loader_sees_its_own_appends() {
    // Both query heads of a KV head are one task, so every SM reads the rows that it appended.
    let own = Plan { sms: 4, heads_per_task: 2, ..SMALL };
    let without_order = verdicts_of(&own, |s| {
        for event in &mut s.regimes[0].events {
            event.mechanism = Mechanism::Packets;
        }
    });
    assert!(without_order.iter().all(|v| v == "fine"), "{without_order:#?}");
    // An SM without a task of the head signals nothing after its append.
    let without_signal = verdicts_of(&own, |s| {
        let appends = |sm: &usize| {
            let of = |t: &monobloc::ir::TaskId| s.regimes[0].tasks[t.index()].grid.index();
            s.regimes[0].queues[*sm].iter().any(|t| s.program.grids[of(t)].name == "attn.1")
        };
        let from = (0..4).find(appends).unwrap();
        let to = (from + 1) % 4;
        let task = grid_task(s, "head", from);
        let regime = &mut s.regimes[0];
        regime.queues[from].retain(|t| t.index() != task);
        regime.queues[to].push(monobloc::ir::TaskId::from(task));
        let run = regime.streams[from].iter().position(|run| run.task.index() == task).unwrap();
        let run = regime.streams[from].remove(run);
        regime.streams[to].push(run);
    });
    assert!(without_signal.iter().all(|v| v == "fine"), "{without_signal:#?}");
}

#[test]
fn a_deadlock_says_what_waits_for_what() {
    // Every SM multiplies by the down projection before its input was computed.
    let stuck = verdicts(|s| {
        for sm in 0..4 {
            let (up, down) = (grid_task(s, "gate_up.0", sm), grid_task(s, "down.0", sm));
            let at = |task: usize| s.regimes[0].queues[sm].iter().position(|t| t.index() == task).unwrap();
            let (i, k) = (at(up), at(down));
            s.regimes[0].queues[sm].swap(i, k);
            let at = |task: usize| s.regimes[0].streams[sm].iter().position(|r| r.task.index() == task).unwrap();
            let (i, k) = (at(up), at(down));
            s.regimes[0].streams[sm].swap(i, k);
        }
    });
    for verdict in &stuck {
        assert!(verdict.starts_with("no task can run at position 0:\n  sm0 t"), "{verdict}");
        assert!(verdict.contains(" waits for e") && verdict.contains("(0 of 4 signals; missing t"), "{verdict}");
        assert_eq!(verdict.lines().count(), 5, "{verdict}");
    }
}
