//! Tests short convolutions and Mamba-2, alone and beside attention, on the checkpoints whose goldens transformers made: rows of several sequences, the
//! proof and the second judge, and the text of kernels.

use monobloc::candidate::Candidate;
use monobloc::codegen::emit::{Trace, emit};
use monobloc::interp::{Arithmetic, Options};
use monobloc::ir::op::{Op, Role};
use monobloc::ir::parse::parse;
use monobloc::ir::print::print;
use monobloc::ir::program::{Content, Program};
use monobloc::ir::schedule::Schedule;
use monobloc::lower::{Batch, lower, lower_batch};
use monobloc::model::config::{Imported, import};
use monobloc::model::graph::{Layer, Mixer, Norm};
use monobloc::pages::Pool;
use monobloc::reference;
use monobloc::rows::{Guard, SequenceId, Shape};
use monobloc::schedule::schedule;
use monobloc::target::Target;
use monobloc::validate::{Rule, check, same, share_caches, validate};

use crate::cli_support::{Place, comma_separated, manifest_text};
use crate::mix::{CONTEXT_MAX, EFFORT, at, candidate, h200, ids, interp, launched, of_rows, placed, program, threads};
use crate::nvrtc::{compiles, nvrtc, quick};
use crate::oracle::Kind;
use crate::oracle::explore::{Verdict, judge};
use crate::proof_support::{BF16, FP32, restream};
use crate::support::{Goldens, fixture, max_difference};

/// A model of each kind: biases and more than three taps; experts; Mamba-2 beside attention with factors, with a norm of groups before its gate; groups;
/// a norm of all columns.
const MODELS: [&str; 8] = [
    "lfm2-biases",
    "lfm2-moe",
    "falcon-h1",
    "falcon-h1-norm",
    "nemotron-h-pattern",
    "granite4-dense",
    "granite4-hybrid",
    "lfm2",
];

fn model(name: &str) -> Imported {
    import(&fixture(&format!("hybrids/{name}"))).unwrap()
}

/// A prompt in chunks, then one token at a time, after the check of the build.
#[test]
fn models_generate_what_transformers_does() {
    for name in MODELS {
        let folder = format!("hybrids/{name}");
        let (place, goldens) = (Place::new(), Goldens::open(&folder));
        let [ids, expected] = ["input_ids", "greedy_ids"].map(|of| goldens.ids(of));
        let (ids, count) = (comma_separated(&ids), expected.len());
        for weights in ["fp32", "bf16"] {
            let text = manifest_text(&format!("path:{}", fixture(&folder).display()), 64);
            place.write("m.toml", text.replace("\"fp32\"", &format!("\"{weights}\"")));
            let answer = place.run(&format!("generate m.toml --ids {ids} --max-tokens {count} --ignore-eos")).code(0);
            assert_eq!(answer.stdout, comma_separated(&expected) + "\n", "{name} in {weights}");
        }
    }
}

#[test]
fn rows_of_several_sequences_keep_states_apart() {
    for name in MODELS {
        let imported = model(name);
        let texts: [Vec<u32>; 3] = [ids(12), ids(12).into_iter().rev().collect(), vec![9; 12]];
        let want: Vec<Vec<Vec<f32>>> =
            texts.iter().map(|ids| reference::forward(&imported.graph, &imported.weights, ids)).collect();
        let placed = of_rows(&imported, 4, false);
        for options in [threads(3), Options::adversarial(Arithmetic::Fast, 5)] {
            let mut interp = interp(&imported, &placed, options);
            let shape = Shape::of(&placed.program).unwrap();
            let (mut guard, mut pool) = (Guard::new(shape), Pool::new(shape));
            let open: Vec<SequenceId> = texts.iter().map(|_| pool.open().unwrap()).collect();
            let mut at = [0u32; 3];
            for rows in [&[(0, 3), (1, 1)][..], &[(1, 1), (0, 1), (2, 2)], &[(1, 4)], &[(2, 1), (0, 1)]] {
                let mut all = vec![];
                for &(text, count) in rows {
                    all.extend((at[text]..at[text] + count).map(|p| (open[text], p, texts[text][p as usize])));
                    at[text] += count;
                }
                launched((&mut interp, &mut guard, &mut pool), &all, |sequence, position, logits| {
                    let text = open.iter().position(|of| *of == sequence).unwrap();
                    let difference = max_difference(&logits, &want[text][position as usize]);
                    assert!(difference < 3e-4, "{name}, {options:?}: text {text}, position {position}: {difference}");
                });
            }
        }
    }
}

#[test]
fn programs_with_convolutions_and_mamba_are_proven() {
    for name in MODELS {
        let graph = model(name).graph;
        for precision in [FP32, BF16] {
            same(&graph, &program(&graph, precision)).unwrap();
            for target in ["cpu", "h200", "a10g"].map(|name| Target::builtin(name).unwrap()) {
                let placed = placed(&graph, &target, precision);
                let text = print(&placed);
                assert_eq!(print(&parse(&text).unwrap()), text);
                if let Err(refused) = validate(placed, &target) {
                    panic!("{name} on {}: {refused}", target.name);
                }
            }
        }
        assert_eq!(
            judge(&placed(&graph, &h200(), FP32), &h200(), &EFFORT),
            Verdict::Safe { exhaustive: false },
            "{name}"
        );
    }
}

#[test]
fn steps_of_several_rows_are_proven() {
    for name in MODELS {
        let imported = model(name);
        // Experts in a batch kernel have widths of whole spans, which these have not.
        let widths =
            [false, true].into_iter().filter(|words| !words || !name.ends_with("moe") && !name.ends_with("4-hybrid"));
        for words in widths {
            let target = if words { h200() } else { Target::builtin("cpu").unwrap() };
            let placed = of_rows(&imported, 8, words);
            same(&imported.graph, &placed.program).unwrap();
            assert_eq!(check(&placed, &target), [], "{name}, words: {words}");
            assert_eq!(judge(&placed, &target, &EFFORT), Verdict::Safe { exhaustive: false }, "{name}");
        }
    }
}

#[test]
fn kernels_share_states_of_the_same_layers_alone() {
    let cpu = Target::builtin("cpu").unwrap();
    let proven = |imported: &Imported, rows| validate(of_rows(imported, rows, false), &cpu).unwrap();
    for name in ["lfm2-biases", "falcon-h1-norm"] {
        let imported = model(name);
        let one = proven(&imported, 1);
        share_caches(&one, &proven(&imported, 4)).unwrap();
        let mut other = imported;
        match &mut other.graph.layers[0].mixer {
            Mixer::ShortConv(conv) => conv.conv_bias = None,
            Mixer::SideBySide(both) => both.mamba.scales[1] *= 2.0,
            mixer => panic!("{}", mixer.name()),
        }
        let error = share_caches(&one, &proven(&other, 4)).unwrap_err();
        assert_eq!(error.what, "states by other weights or attributes", "{name}");
    }
}

type Change<'a> = &'a dyn Fn(&mut Program);

fn op_of<'a>(program: &'a mut Program, grid: &str) -> &'a mut Op {
    let grid = at(program, grid);
    &mut program.grids[grid].op
}

fn scan(change: impl Fn(&mut monobloc::ir::op::Scan)) -> impl Fn(&mut Program) {
    move |program| {
        let Op::Scan(scan) = op_of(program, "scan.0") else { panic!() };
        change(scan);
    }
}

/// Gives two operands of a grid each other's place.
fn swapped(grid: &str, a: Role, b: Role) -> impl Fn(&mut Program) {
    move |program| {
        let grid = at(program, grid);
        let operands = &mut program.grids[grid].operands;
        let [a, b] = [a, b].map(|role| operands.iter().position(|operand| operand.role == role).unwrap());
        let places = [a, b].map(|n| (operands[n].buffer, operands[n].cols));
        (operands[a].buffer, operands[a].cols) = places[1];
        (operands[b].buffer, operands[b].cols) = places[0];
    }
}

fn gains(program: &mut Program, grid: &str) {
    let grid = at(program, grid);
    let buffer = program.grids[grid].operand(Role::NormWeight).unwrap().buffer;
    let Some(Content::Vectors { scale, .. }) = &mut program.buffers[buffer.index()].content else { panic!() };
    *scale *= 2.0;
}

#[test]
fn programs_of_another_mixer_are_refused() {
    let refuses = |name: &str, mutants: &[(&str, Change<'_>)]| {
        let graph = model(name).graph;
        let sound = program(&graph, FP32);
        same(&graph, &sound).unwrap();
        for (what, change) in mutants {
            let mut mutant = sound.clone();
            change(&mut mutant);
            assert_ne!(mutant, sound, "{what}");
            same(&graph, &mutant).expect_err(what);
        }
    };
    refuses(
        "lfm2-biases",
        &[
            ("the gates of each other", &swapped("convolve.0", Role::B, Role::C)),
            ("no bias", &|p| {
                let grid = at(p, "convolve.0");
                p.grids[grid].operands.retain(|operand| operand.role != Role::Bias);
            }),
            ("taps of another layer", &swapped("convolve.0", Role::X, Role::C)),
        ],
    );
    refuses(
        "falcon-h1-norm",
        &[
            ("another scale of x", &scan(|scan| scan.scales[0] *= 2.0)),
            ("another scale of the step", &scan(|scan| scan.scales[3] = 1.0)),
            ("a gate before the norm", &scan(|scan| scan.gate = Some(1.0))),
            ("b as c", &swapped("scan.0", Role::B, Role::C)),
            ("d as the bias of the step", &swapped("scan.0", Role::D, Role::DtBias)),
            ("another factor of the gate", &|p| {
                let Op::GroupNorm(norm) = op_of(p, "group_norm.0") else { panic!() };
                norm.gate = norm.gate.map(|scale| scale + 0.5);
            }),
            ("another eps", &|p| {
                let Op::GroupNorm(norm) = op_of(p, "group_norm.0") else { panic!() };
                norm.eps *= 2.0;
            }),
            ("another factor into attention", &|p| gains(p, "qkv.0")),
            ("another factor into Mamba-2", &|p| gains(p, "in_proj.0")),
            ("another factor out of attention", &|p| {
                let Op::MatVec(m) = op_of(p, "o.0.0") else { panic!() };
                m.epilogue = monobloc::ir::op::Epilogue::Residual { scale: 1.0 };
            }),
            ("an MLP without its factor", &|p| {
                let Op::MatVec(m) = op_of(p, "gate_up.0") else { panic!() };
                let monobloc::ir::op::Epilogue::GatedBy { act, .. } = m.epilogue else { panic!() };
                m.epilogue = monobloc::ir::op::Epilogue::Gated(act);
            }),
        ],
    );
    refuses(
        "granite4-hybrid",
        &[("a projection without its norm", &|p| {
            let Op::MatVec(m) = op_of(p, "o.0") else { panic!() };
            m.norm = None;
        })],
    );
}

/// Moves the first task of a grid to another SM, in one regime.
fn moved(s: &mut Schedule, name: &str) {
    let grid = at(&s.program, name);
    let regime = &mut s.regimes[1];
    let task = regime.tasks.iter().position(|task| task.grid.index() == grid && task.lo == 0).unwrap();
    let from = regime.queues.iter().position(|queue| queue.iter().any(|id| id.index() == task)).unwrap();
    let place = regime.queues[from].iter().position(|id| id.index() == task).unwrap();
    let id = regime.queues[from].remove(place);
    // An SM whose queue has room, after the tasks of earlier grids there.
    let others = (0..regime.queues.len()).filter(|sm| *sm != from);
    let to = others.min_by_key(|sm| regime.queues[*sm].len()).unwrap();
    let place = regime.queues[to].iter().filter(|id| regime.tasks[id.index()].grid.index() < grid).count();
    regime.queues[to].insert(place, id);
    restream(s);
}

#[test]
fn a_state_on_another_sm_is_refused_by_both_judges() {
    for (name, grid) in [("lfm2", "convolve.0"), ("falcon-h1", "scan.0")] {
        let sound = placed(&model(name).graph, &h200(), FP32);
        assert_eq!(check(&sound, &h200()), [], "{name}");
        let mut mutant = sound.clone();
        moved(&mut mutant, grid);
        let rules: Vec<Rule> = check(&mutant, &h200()).iter().map(|violation| violation.rule).collect();
        assert_eq!(rules, [Rule::StateOwner], "{name}");
        let Verdict::Unsafe(fault) = judge(&mutant, &h200(), &EFFORT) else { panic!("{name} is safe") };
        assert!(matches!(fault.kind, Kind::Stale | Kind::Unwritten), "{name}: {fault:?}");
    }
}

#[test]
fn what_no_program_has_is_refused_by_name() {
    let refused = |name: &str, change: fn(&mut Layer)| {
        let mut graph = model(name).graph;
        change(&mut graph.layers[0]);
        let candidate = candidate(&graph, &h200(), FP32);
        lower(&graph, "refused", FP32, CONTEXT_MAX, &candidate).unwrap_err().to_string()
    };
    fn mamba(layer: &mut Layer) -> &mut monobloc::model::graph::Mamba2 {
        match &mut layer.mixer {
            Mixer::SideBySide(both) => &mut both.mamba,
            mixer => panic!("{}", mixer.name()),
        }
    }
    let said = refused("falcon-h1", |layer| mamba(layer).state -= 1);
    assert_eq!(said, "layer 0 has a recurrent state, and heads or states of an odd width; packets need an even one");
    let said = refused("falcon-h1-norm", |layer| mamba(layer).norm.as_mut().unwrap().norm.weight = None);
    assert_eq!(said, "layer 0 has a recurrent state, and a norm beside its gate that is no RMS norm with gains");
    let said = refused("falcon-h1", |layer| layer.attn_norm = None);
    assert_eq!(said, "layer 0 has a recurrent state, and a factor of an input without an RMS norm with gains");
    let said = refused("falcon-h1", |layer| layer.attn_post_norm = layer.attn_norm.clone() as Option<Norm>);
    assert_eq!(said, "layer 0 has a recurrent state, and a norm of the sum of attention and Mamba-2");
    let said = refused("falcon-h1", |layer| layer.mlp_post_norm = layer.mlp_norm.clone());
    assert_eq!(said, "layer 0 has an MLP with factors before a norm");
}

#[test]
fn kernels_with_convolutions_and_mamba_compile() {
    let nvrtc = nvrtc("kernels_with_convolutions_and_mamba_compile");
    let compile = |placed: Schedule, target: &Target, ops: &[&str], prefix: &str| {
        let source = emit(&validate(placed, target).unwrap(), target, Trace::Off);
        for op in ops {
            assert!(source.text.contains(&format!("return {prefix}{op}<Machine, ")), "{op}: {}", source.text);
        }
        nvrtc.iter().for_each(|nvrtc| compiles(quick(nvrtc), &source, &target.name));
    };
    for (name, record, precision, ops) in [
        ("lfm2-biases", "t4", FP32, &["Convolve"][..]),
        ("falcon-h1-norm", "h200", BF16, &["Scan", "GroupNorm"]),
        ("nemotron-h-pattern", "a10g", BF16, &["Scan", "GroupNorm"]),
    ] {
        let (graph, target) = (model(name).graph, Target::builtin(record).unwrap());
        let candidate = Candidate { sms: 8, ..Candidate::default_for(&graph, &target, precision) };
        let program = lower(&graph, "recurrent", precision, CONTEXT_MAX, &candidate).unwrap();
        compile(schedule(program, &target, &candidate).unwrap(), &target, ops, "");
    }
    for (name, precision, ops) in
        [("lfm2-biases", BF16, &["Convolve"][..]), ("falcon-h1-norm", FP32, &["Scan", "GroupNorm"])]
    {
        let (graph, target) = (model(name).graph, h200());
        let candidate = Candidate { sms: 8, splits: 1, ..candidate(&graph, &target, precision) };
        let batch = Batch { rows: 8, sequences: 3, pages: 12, page_rows: 256, words: true };
        let program = lower_batch(&graph, "recurrent", precision, CONTEXT_MAX, &batch, &candidate).unwrap();
        compile(schedule(program, &target, &candidate).unwrap(), &target, ops, "Rows");
    }
}
