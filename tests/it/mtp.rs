//! Tests drafts of the layer that predicts further tokens (MTP): their numbers, the proof of their programs, and texts with their proposals.

use std::fs;
use std::sync::Arc;

use monobloc::candidate::Candidate;
use monobloc::codegen::KernelSource;
use monobloc::codegen::emit::{Trace, emit};
use monobloc::defaults::rows::{Room, place_one_row, place_rows};
use monobloc::dtype::Precision;
use monobloc::interp::{Arithmetic, Interp, Options};
use monobloc::ir::op::{Op, Role};
use monobloc::ir::program::Program;
use monobloc::ir::schedule::Schedule;
use monobloc::lower::lower;
use monobloc::model::config::{Imported, import, import_draft};
use monobloc::model::graph::ModelGraph;
use monobloc::pack::pack;
use monobloc::reference;
use monobloc::schedule::schedule;
use monobloc::target::Target;
use monobloc::validate::{same, share_caches, validate};
use serde_json::{Value, json};

use crate::cli_support::{Place, manifest_text};
use crate::cycle::{self, Sizes};
use crate::mix::candidate;
use crate::nvrtc::{compiles, nvrtc};
use crate::proof_support::{BF16, FP32};
use crate::serve::Server;
use crate::snapshots::with_words;
use crate::support::{Goldens, fixture, max_difference};

const VOCAB: u32 = 64;
const DRAFTS: [&str; 2] = ["mtp/qwen35", "mtp/qwen35-moe"];

fn small(graph: &ModelGraph) -> Candidate {
    Candidate { splits: 1, ..candidate(graph, &Target::builtin("cpu").unwrap(), FP32) }
}

fn program(graph: &ModelGraph) -> Program {
    lower(graph, "draft", FP32, 64, &small(graph)).unwrap()
}

fn placed(graph: &ModelGraph) -> Schedule {
    schedule(program(graph), &Target::builtin("cpu").unwrap(), &small(graph)).unwrap()
}

fn interp(draft: &Imported, schedule: &Schedule, options: Options) -> Interp {
    let pack = Arc::new(pack(schedule, &draft.graph, &draft.weights).unwrap());
    Interp::new(schedule, pack, options).unwrap()
}

/// Tokens, and what is given with each.
fn inputs(goldens: &Goldens, hidden: usize) -> Vec<(u32, Vec<f32>)> {
    let given = goldens.floats("given");
    let rows = given.chunks_exact(hidden).map(<[f32]>::to_vec);
    goldens.ids("input_ids").into_iter().zip(rows).collect()
}

#[test]
fn a_draft_has_the_logits_of_its_formula() {
    for name in DRAFTS {
        let (draft, goldens) = (import_draft(&fixture(name)).unwrap(), Goldens::open(name));
        let (hidden, vocab) = (draft.graph.hidden as usize, draft.graph.vocab as usize);
        let (expected, left) = (goldens.floats("logits"), goldens.floats("hidden"));
        let schedule = placed(&draft.graph);
        let mut session = reference::Session::new(&draft.graph, &draft.weights);
        let orders = [Options::fast(), Options::spec(), Options::adversarial(Arithmetic::Fast, 3)];
        let mut interps = orders.map(|options| interp(&draft, &schedule, options));
        for (at, (token, given)) in inputs(&goldens, hidden).into_iter().enumerate() {
            let (expected, left) = (&expected[at * vocab..][..vocab], &left[at * hidden..][..hidden]);
            session.give(given.iter().map(|&value| value.into()).collect());
            let found = session.step_hidden(token);
            let as_f32: Vec<f32> = found.iter().map(|&value| value as f32).collect();
            assert!(max_difference(&as_f32, left) < 1e-5, "{name}: {at}: {as_f32:?}, expected {left:?}");
            assert!(max_difference(&session.logits(&found), expected) < 1e-5, "{name}: {at}");
            for interp in &mut interps {
                let logits = interp.step_given(token, given.clone().into(), true).unwrap().unwrap();
                assert!(max_difference(&logits, expected) < 1e-3, "{name}: {at}");
                let x: Vec<f64> = interp.left(0).unwrap().into_iter().map(f64::from).collect();
                let normed = reference::norm(&draft.weights, &draft.graph.final_norm, &x);
                let normed: Vec<f32> = normed.into_iter().map(|value| value as f32).collect();
                assert!(max_difference(&normed, left) < 1e-3, "{name}: {at}");
            }
        }
    }
}

#[test]
fn a_model_is_the_same_with_its_draft_left_out() {
    for name in DRAFTS {
        let imported = import(&fixture(name)).unwrap();
        assert!(imported.graph.joined.is_none() && imported.graph.tensors.iter().all(|t| !t.name.starts_with("mtp.")));
        let note = imported.notes.iter().find(|note| note.contains("MTP")).unwrap();
        assert!(note.ends_with("`--draft mtp` proposes tokens with them"), "{note}");
    }
}

#[test]
fn a_checkpoint_without_a_whole_draft_says_what_it_lacks() {
    let refused = |name: &str| import_draft(&fixture(name)).unwrap_err().to_string();
    let incomplete = refused("hybrids/qwen35");
    assert!(incomplete.contains("`mtp.pre_fc_norm_hidden.weight`"), "{incomplete}");
    for name in ["hybrids/qwen3-next", "families/llama-gqa", "gguf"] {
        if fixture(name).exists() {
            assert!(refused(name).contains("MTP"), "{name}");
        }
    }
}

type Change<'a> = &'a dyn Fn(&mut Program);

fn grid<'a>(program: &'a mut Program, name: &str) -> &'a mut monobloc::ir::program::Grid {
    program.grids.iter_mut().find(|grid| grid.name == name).unwrap()
}

/// Gives two operands of grids each other's buffer.
fn swapped((a, of_a): (&str, Role), (b, of_b): (&str, Role)) -> impl Fn(&mut Program) {
    move |program| {
        let buffer = |program: &mut Program, name: &str, role: Role| grid(program, name).operand(role).unwrap().buffer;
        let found = [buffer(program, a, of_a), buffer(program, b, of_b)];
        for (name, role, to) in [(a, of_a, found[1]), (b, of_b, found[0])] {
            let operand = grid(program, name).operands.iter_mut().find(|operand| operand.role == role).unwrap();
            operand.buffer = to;
        }
    }
}

#[test]
fn programs_of_another_draft_are_refused() {
    let graph = import_draft(&fixture(DRAFTS[0])).unwrap().graph;
    let sound = program(&graph);
    same(&graph, &sound).unwrap();
    let mutants: [(&str, Change<'_>); 5] = [
        ("what is given as the embedding", &swapped(("join", Role::Given), ("join", Role::Out))),
        ("halves of the matrix", &swapped(("join.embedded", Role::Weight), ("join.given", Role::Weight))),
        ("norms of each other", &swapped(("join.embedded", Role::NormWeight), ("join.given", Role::NormWeight))),
        ("another scale", &|program| grid(program, "join").op = Op::Join { scale: 2.0 }),
        ("no half of what is given", &|program| program.grids.retain(|grid| grid.name != "join.given")),
    ];
    for (what, change) in mutants {
        let mut mutant = sound.clone();
        change(&mut mutant);
        assert_ne!(mutant, sound, "{what}");
        same(&graph, &mutant).expect_err(what);
    }
    // A model is none without its own beginning.
    let model = ModelGraph { joined: None, ..graph.clone() };
    same(&model, &sound).expect_err("a draft as a model");
    same(&graph, &program(&model)).expect_err("a model as a draft");
}

/// Proven for each kind of target, and refused where a launch has nothing to give it.
#[test]
fn a_draft_is_proven_as_one_text_on_one_device() {
    let h200 = Target::builtin("h200").unwrap();
    for name in DRAFTS {
        let graph = import_draft(&fixture(name)).unwrap().graph;
        validate(placed(&graph), &Target::builtin("cpu").unwrap()).unwrap_or_else(|faults| panic!("{faults}"));
        kernel_of(&graph, FP32, &h200);
    }
    let graph = import_draft(&fixture(DRAFTS[0])).unwrap().graph;
    let base = Candidate::default_for(&graph, &h200, BF16);
    let room = |rows| Room { rows, sequences: 4, positions: 256 };
    let paged = place_one_row(&graph, "draft", BF16, 64, &h200, &base, room(1)).unwrap();
    let rows = place_rows(&graph, "draft", BF16, 64, &h200, &base, room(8)).unwrap();
    for (placed, why) in [(paged, "`kernel` at g2"), (rows, "`kernel-rows` at g2")] {
        let refused = validate(placed, &h200).unwrap_err().to_string();
        assert!(refused.contains(why), "{refused}");
    }
}

fn kernel_of(graph: &ModelGraph, precision: Precision, target: &Target) -> KernelSource {
    let candidate = Candidate::default_for(graph, target, precision).for_context(64);
    let program = lower(graph, "draft", precision, 64, &candidate).unwrap();
    let placed = schedule(program, target, &candidate).unwrap();
    emit(&validate(placed, target).unwrap_or_else(|faults| panic!("{faults}")), target, Trace::Off)
}

#[test]
fn the_kernel_of_a_draft_compiles() {
    let Some(nvrtc) = nvrtc("the_kernel_of_a_draft_compiles") else { return };
    for (name, precision, target) in
        [(DRAFTS[0], BF16, "h200"), (DRAFTS[1], BF16, "h200"), (DRAFTS[0], FP32, "a100"), (DRAFTS[1], BF16, "b200")]
    {
        let graph = import_draft(&fixture(name)).unwrap().graph;
        let source = kernel_of(&graph, precision, &Target::builtin(target).unwrap());
        assert!(
            source.text.contains("InText<MatVec<") && source.text.contains("const __grid_constant__ GivenParams p")
        );
        compiles(nvrtc, &source, &format!("{name} for {target}"));
    }
}

/// On a GPU the batch kernel verifies over the cache of the decode kernel, and keeps what the draft reads.
#[test]
fn what_verifies_lies_over_the_cache_of_one_row() {
    let (place, h200) = (Place::new(), Target::builtin("h200").unwrap());
    let folder = place.path("checkpoint");
    let sizes = Sizes { hidden: 256, width: 512, layers: 4, vocab: 512, heads: 4, kv_heads: 2, net_heads: 2 };
    cycle::write(&folder, &sizes, 1);
    let (graph, draft) = (import(&folder).unwrap().graph, import_draft(&folder).unwrap().graph);
    for precision in [FP32, BF16] {
        kernel_of(&draft, precision, &h200);
        let base = Candidate::default_for(&graph, &h200, precision);
        let one = base.clone().for_context(2048);
        let program = lower(&graph, "model", precision, 2048, &one).unwrap();
        let one = validate(schedule(program, &h200, &one).unwrap(), &h200).unwrap();
        for rows in [8, 16] {
            let room = Room { rows, sequences: 1, positions: 2048 };
            let placed = place_rows(&graph, "model", precision, 2048, &h200, &base, room).unwrap();
            let rows = validate(placed, &h200).unwrap();
            share_caches(&rows, &one).unwrap();
            let program = &rows.schedule().program;
            assert!(program.buffers[program.head_input().unwrap().index()].words);
        }
    }
}

/// Texts with proposals of the draft, greedy and sampled, with states that go back; what became of the proposals.
#[test]
fn texts_with_a_draft_are_those_without() {
    for name in DRAFTS {
        let place = Place::new();
        place.manifest(&fixture(name), 96);
        let (mut proposed, mut accepted, mut steps) = (0, 0, 0);
        for options in [
            "",
            "--temperature 0.7 --seed 3",
            "--temperature 1 --seed 5 --top-k 20 --repetition-penalty 1.1",
            "--logprobs 2",
        ] {
            for most in ["mtp:1", "mtp", "mtp:4", "mtp:15"] {
                let ids = "5,9,33,12,7,40,41,42,8,9,10,11,12,13,14,15,16,17,18,19";
                let command = format!("generate m.toml --ids {ids} --max-tokens 70 --ignore-eos --json {options}");
                let plain = place.run(&command).code(0).json();
                let found = place.run(&format!("{command} --draft {most}")).code(0).json();
                for key in ["ids", "stop", "logprobs"] {
                    assert_eq!(found[key], plain[key], "{name}: {options} {most}: {key}");
                }
                let count = |key: &str| found[key].as_u64().unwrap();
                println!("{name} {options} {most}: {} of {}", count("accepted"), count("proposed"));
                proposed += count("proposed");
                accepted += count("accepted");
                steps += count("verifying_steps");
            }
        }
        assert!(
            accepted > 200 && proposed > accepted + 100 && steps > 100,
            "{name}: {accepted} of {proposed}, {steps}"
        );
        let told = place.run("generate m.toml --ids 5,9 --max-tokens 30 --ignore-eos --draft mtp").code(0).stderr;
        assert!(told.contains(" tokens a step that verifies, "), "{told}");
    }
}

/// Of two devices the first one runs the draft. Texts are those of one device, with the draft and without.
#[test]
fn texts_with_a_draft_of_two_devices_are_those_of_one() {
    for name in DRAFTS {
        let place = Place::new();
        place.manifest(&fixture(name), 96);
        let text = fs::read_to_string(place.path("m.toml")).expect("a manifest");
        place.write("two.toml", text.replace("record = \"cpu\"", "record = \"cpu\"\ndevices = 2"));
        for options in ["--lookup 3", "--draft mtp:4", "--draft mtp --temperature 0.7 --seed 3"] {
            let ids = "5,9,33,12,7,40,41,42,8,9,10,11";
            let run = |of: &str| {
                let command = format!("generate {of} --ids {ids} --max-tokens 40 --ignore-eos --json {options}");
                place.run(&command).code(0).json()
            };
            let (one, two) = (run("m.toml"), run("two.toml"));
            for key in ["ids", "accepted", "proposed", "verifying_steps"] {
                assert!(one[key] == two[key] && !one[key].is_null(), "{name}: {options}: {key}");
            }
        }
    }
}

#[test]
fn a_draft_that_cannot_run_is_refused_by_name() {
    let place = Place::new();
    let run = |options: &str| place.run(&format!("generate m.toml --ids 5,9 --max-tokens 4 {options}"));
    place.manifest(&fixture(DRAFTS[0]), 64);
    for wrong in ["mtp:0", "mtp:x", "eagle", "mtp:500"] {
        run(&format!("--draft {wrong}")).refused(&["expected `mtp` or `mtp:N`"]);
    }
    run("--draft mtp --lookup 2").refused(&["--lookup"]);
    run("--draft mtp:16").refused(&["`--draft mtp:16` needs steps of 17 rows", "lower `--draft mtp` below 16"]);
    place.run("export m.toml --out m.export").code(0);
    place
        .run("generate m.export --ids 5,9 --draft mtp")
        .refused(&["`--draft mtp` needs a manifest or a checkpoint", "propose with `--lookup`"]);
    // Also where there is no device.
    let on_gpu = manifest_text(&format!("path:{}", with_words(&place, DRAFTS[0], VOCAB).display()), 64);
    let on_gpu = on_gpu.replace("\"cpu\"", "\"h200\"");
    place.write(
        "i.toml",
        on_gpu.replace("\"fp32\"", "\"bf16\"").replace("[search]", "batch_invariant = true\n[search]"),
    );
    place
        .run("generate i.toml --ids 5,9 --draft mtp")
        .refused(&["with `batch_invariant` no batch kernel runs", "`decode.batch_invariant`"]);
    for (fixture_of, why) in [
        ("hybrids/qwen35", "`mtp.pre_fc_norm_hidden.weight`"),
        ("families/llama-gqa", "no layer that predicts further tokens"),
    ] {
        place.manifest(&fixture(fixture_of), 64);
        run("--draft mtp").refused(&[why, "--lookup"]);
    }
}

/// Requests that come together, some with prompts that begin alike, get the same texts from a server with a draft.
#[test]
fn a_server_with_a_draft_gives_the_same_texts() {
    for (name, most) in [(DRAFTS[0], "mtp"), (DRAFTS[1], "mtp:3")] {
        let serve = |devices: u32, options: &str| {
            let place = Place::new();
            let text = manifest_text(&format!("path:{}", with_words(&place, name, VOCAB).display()), 96);
            let text = text.replace("record = \"cpu\"", &format!("record = \"cpu\"\ndevices = {devices}"));
            Server::start_of_manifest(place, &text, &format!("--max-batch 4 --max-chunk 5 {options}"), |_| {})
        };
        // Of a server with a draft, also on two devices.
        let devices = if name == DRAFTS[0] { 1 } else { 2 };
        let servers = [serve(1, ""), serve(devices, &format!("--draft {most}"))];
        let body = |case: u32| {
            // Every other prompt begins with a common part of more than a page.
            let common = if case.is_multiple_of(2) { 20 } else { case % 3 };
            let prompt: Vec<u32> = (0..common).map(|i| 2 + (i * 37 + 5) % 60).chain([9 + case, 20]).collect();
            let temperature = [0.0, 0.0, 0.8][case as usize % 3];
            let mut body = json!({
                "prompt": prompt, "max_tokens": 20 + case, "temperature": temperature, "seed": case, "ignore_eos": true, "n": 1 + case % 2,
            });
            match case % 4 {
                1 => body["logprobs"] = json!(2),
                2 => body["top_k"] = json!(12),
                3 => body["frequency_penalty"] = json!(0.7),
                _ => {}
            }
            body
        };
        let texts = |server: &Server| {
            let choices = |case| server.ok("/v1/completions", &body(case))["choices"].clone();
            std::thread::scope(|scope| {
                let choices = &choices;
                let asked: Vec<_> = (0..24).map(|case| scope.spawn(move || choices(case))).collect();
                asked.into_iter().map(|asked| asked.join().unwrap()).collect::<Vec<Value>>()
            })
        };
        let [plain, drafted] = [&servers[0], &servers[1]].map(texts);
        for (case, (plain, drafted)) in plain.iter().zip(&drafted).enumerate() {
            assert_eq!(drafted, plain, "{name}: {case}: {}", body(case as u32));
        }
        let figure = |of: &str| servers[1].metric(&format!("vllm:spec_decode_num_{of}_total"));
        let (drafts, proposed, accepted) = (figure("drafts"), figure("draft_tokens"), figure("accepted_tokens"));
        assert!(drafts > 50.0 && accepted > 40.0 && proposed > accepted, "{drafts}: {accepted} of {proposed}");
        assert!(servers[1].metric("vllm:prefix_cache_hits_total") > 0.0);
        assert_eq!(servers[0].metric("vllm:spec_decode_num_drafts_total"), 0.0);
        println!("{name}: {accepted} of {proposed} accepted in {drafts} steps");
    }
}
