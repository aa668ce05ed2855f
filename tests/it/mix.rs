//! Tests layers with a recurrent state, gated delta nets, on small models: the interpreter against the reference, the proof and the second judge on
//! schedules that lose a state, and the text of decode kernels.

use std::ops::ControlFlow;
use std::sync::Arc;

use monobloc::candidate::Candidate;
use monobloc::codegen::emit::{Trace, emit};
use monobloc::dtype::{DType, Precision};
use monobloc::interp::{Arithmetic, CacheKind, CacheShape, Input, Interp, Options, Order};
use monobloc::ir::op::{Mix, Op, Role};
use monobloc::ir::parse::parse;
use monobloc::ir::print::print;
use monobloc::ir::program::{Content, Program};
use monobloc::ir::schedule::{Schedule, Task};
use monobloc::ir::table::Fact;
use monobloc::lower::{Batch, lower, lower_batch};
use monobloc::model::config::{Imported, import_config_only};
use monobloc::model::graph::{GatedDelta, Linear, Mixer, ModelGraph, Norm, NormKind, RowView, Tensor, TensorId};
use monobloc::model::weights::Weights;
use monobloc::pack::pack;
use monobloc::pages::Pool;
use monobloc::reference::{self, argmax};
use monobloc::rows::{Guard, Request, Row, SequenceId, Shape};
use monobloc::schedule::schedule;
use monobloc::target::Target;
use monobloc::validate::{Rule, check, same, share_caches, validate};

use crate::cli_support::{Place, comma_separated};
use crate::nvrtc::{compiles, nvrtc, quick};
use crate::oracle::Kind;
use crate::oracle::explore::{Effort, Verdict, judge};
use crate::proof_support::{BF16, FP32, restream};
use crate::support::{Goldens, fixture, max_difference};

pub const CONTEXT_MAX: u32 = 32;
const VOCAB: u32 = 64;
pub const EFFORT: Effort = Effort { steps: 2, states_max: 0, walks: 2, stores: 2, seed: 1 };

pub struct Net {
    pub key_heads: u32,
    pub value_heads: u32,
    pub key_dim: u32,
    pub value_dim: u32,
    pub kernel: u32,
    pub doubles: bool,
}

/// More value heads than key heads, and other widths of both.
pub const NET: Net = Net { key_heads: 2, value_heads: 4, key_dim: 6, value_dim: 8, kernel: 4, doubles: false };

fn tensor(graph: &mut ModelGraph, name: &str, shape: &[u32]) -> TensorId {
    let id = TensorId::from(graph.tensors.len());
    graph.tensors.push(Tensor { name: name.to_string(), dtype: DType::Bf16, shape: shape.to_vec() });
    id
}

fn linear(graph: &mut ModelGraph, name: &str, rows: u32, cols: u32) -> Linear {
    let weight = RowView::range(tensor(graph, name, &[rows, cols]), 0);
    Linear { weight, bias: None, rows, cols }
}

fn net(graph: &mut ModelGraph, l: usize, of: &Net) -> GatedDelta {
    let hidden = graph.hidden;
    let &Net { key_heads, value_heads, key_dim, value_dim, kernel, doubles } = of;
    let (keys, values) = (key_heads * key_dim, value_heads * value_dim);
    let mut part = |name: &str, rows, cols| linear(graph, &format!("{l}.{name}"), rows, cols);
    let [q, k] = ["q", "k"].map(|name| part(name, keys, hidden));
    let [v, z] = ["v", "z"].map(|name| part(name, values, hidden));
    let [b, a] = ["b", "a"].map(|name| part(name, value_heads, hidden));
    let o = part("o", hidden, values);
    let mut vector = |name: &str, len| tensor(graph, &format!("{l}.{name}"), &[len]);
    let weight = Some(vector("norm", value_dim));
    GatedDelta {
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        kernel,
        q,
        k,
        v,
        z,
        b,
        a,
        // Tensors that end within a head.
        conv: vec![vector("conv.0", 5 * kernel), vector("conv.1", (2 * keys + values - 5) * kernel)],
        a_log: vector("a_log", value_heads),
        dt_bias: vector("dt_bias", value_heads),
        norm: Norm { kind: NormKind::Rms, eps: 1e-6, weight, weight_offset: 0.0, bias: None },
        negative_eigenvalues: doubles,
        o,
    }
}

/// Three layers, of which the first and the last are nets.
pub fn model(of: &Net) -> Imported {
    let config = format!(
        r#"{{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": {VOCAB},
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", "max_position_embeddings": 64,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16"}}"#
    );
    let mut imported = import_config_only(&config, 5).unwrap();
    for l in [0, 2] {
        let net = net(&mut imported.graph, l, of);
        imported.graph.layers[l].mixer = Mixer::GatedDelta(Box::new(net));
    }
    imported.weights = Weights::synthetic(&imported.graph, 5);
    imported
}

pub fn candidate(graph: &ModelGraph, target: &Target, precision: Precision) -> Candidate {
    Candidate {
        sms: 4,
        splits: 3,
        split_from: 9,
        heads_per_task: 1,
        ring_slots: 4,
        slot_bytes: 8192,
        flight_high: 2,
        flight_low: 1,
        flight_free: 2,
        sums_everywhere: 0,
        ..Candidate::default_for(graph, target, precision)
    }
}

pub fn program(graph: &ModelGraph, precision: Precision) -> Program {
    let target = Target::builtin("h200").unwrap();
    lower(graph, "mix", precision, CONTEXT_MAX, &candidate(graph, &target, precision)).unwrap()
}

pub fn placed(graph: &ModelGraph, target: &Target, precision: Precision) -> Schedule {
    schedule(program(graph, precision), target, &candidate(graph, target, precision)).unwrap()
}

pub fn h200() -> Target {
    Target::builtin("h200").unwrap()
}

pub fn ids(count: u32) -> Vec<u32> {
    (0..count).map(|i| (i * 37 + 5) % VOCAB).collect()
}

pub fn interp(imported: &Imported, schedule: &Schedule, options: Options) -> Interp {
    let pack = Arc::new(pack(schedule, &imported.graph, &imported.weights).unwrap());
    Interp::new(schedule, pack, options).unwrap()
}

pub fn threads(n: usize) -> Options {
    Options { arithmetic: Arithmetic::Fast, order: Order::Threads(n) }
}

#[test]
fn the_interpreter_computes_states_as_the_reference_does() {
    let square = Net { key_heads: 2, value_heads: 2, key_dim: 8, value_dim: 8, kernel: 1, doubles: true };
    for of in [NET, square] {
        let imported = model(&of);
        let ids = ids(CONTEXT_MAX);
        let want = reference::forward(&imported.graph, &imported.weights, &ids).concat();
        let schedule = placed(&imported.graph, &h200(), FP32);
        for options in [threads(1), threads(3), Options::spec(), Options::adversarial(Arithmetic::Fast, 3)] {
            let mut interp = interp(&imported, &schedule, options);
            // A second text finds nothing of the first one.
            for _ in 0..2 {
                let difference = max_difference(&interp.logits(&ids).unwrap().concat(), &want);
                assert!(difference < 1e-4, "{options:?}: {difference}");
            }
        }
    }
}

#[test]
fn greedy_tokens_are_those_of_the_reference() {
    let imported = model(&NET);
    let schedule = placed(&imported.graph, &h200(), FP32);
    let mut session = reference::Session::new(&imported.graph, &imported.weights);
    let prompt = ids(7);
    let mut logits = vec![];
    prompt.iter().for_each(|&id| logits = session.step(id));
    let mut want = vec![];
    for _ in 0..12 {
        want.push(argmax(&logits));
        logits = session.step(*want.last().unwrap());
    }
    let mut interp = interp(&imported, &schedule, threads(2));
    assert_eq!(interp.greedy(&prompt, 12, |_| ControlFlow::Continue(())).unwrap(), want);
}

#[test]
fn a_position_that_does_not_follow_is_refused() {
    let imported = model(&NET);
    let schedule = placed(&imported.graph, &h200(), FP32);
    for options in [threads(2), Options::adversarial(Arithmetic::Fast, 1)] {
        let mut interp = interp(&imported, &schedule, options);
        let all = interp.logits(&ids(8)).unwrap();
        interp.seek(5).unwrap();
        let error = interp.step(Input::Token(1)).unwrap_err().to_string();
        assert!(error.starts_with("position 5 does not follow the one whose recurrent state is kept"), "{error}");
        // The next one does, and the first one needs no state.
        interp.seek(8).unwrap();
        interp.step(Input::Token(1)).unwrap();
        interp.seek(0).unwrap();
        assert_eq!(interp.step(Input::Token(ids(1)[0])).unwrap(), all[0], "{options:?}");
        assert!(interp.seek(5).is_ok());
        assert!(interp.step(Input::Token(1)).is_err());
        // A filled cache has states of its own.
        interp.fill_cache(3, 20).unwrap();
        interp.step(Input::Token(1)).unwrap();
    }
}

/// A schedule of several rows over pages, and its guard.
pub fn of_rows(imported: &Imported, rows: u32, words: bool) -> Schedule {
    of_rows_on(4, imported, rows, words)
}

/// A CPU with as many workers as some schedules have SMs.
pub fn eight_workers() -> Target {
    let mut target = Target::builtin("cpu").unwrap();
    target.spec.sm_count = 8;
    target
}

/// The same on other numbers of SMs: with more than there are heads, tasks divide the sequences.
pub fn of_rows_on(sms: u32, imported: &Imported, rows: u32, words: bool) -> Schedule {
    // Pages of a batch kernel begin with chunks.
    let (page_rows, target) = if words { (256, h200()) } else { (8, eight_workers()) };
    let batch = Batch { rows, sequences: 3, pages: 40, page_rows, words };
    let candidate = Candidate { splits: 1, sms, ..candidate(&imported.graph, &target, FP32) };
    let program = lower_batch(&imported.graph, "mix", FP32, CONTEXT_MAX, &batch, &candidate).unwrap();
    schedule(program, &target, &candidate).unwrap()
}

/// Launches of rows (sequence, position, token) of steps one after another; calls `row` with each row's sequence, position and logits.
pub fn launched(
    (interp, guard, pool): (&mut Interp, &mut Guard, &mut Pool),
    rows: &[(SequenceId, u32, u32)],
    mut each: impl FnMut(SequenceId, u32, Vec<f32>),
) {
    for &(sequence, position, _) in rows {
        pool.reserve(sequence, position + 1).unwrap();
    }
    let row = |&(sequence, position, _): &(SequenceId, u32, u32)| Row { sequence, position, wants_logits: true };
    let request = Request { rows: rows.iter().map(row).collect(), steps: 1, edits: pool.take_edits() };
    let tables = guard.admit(&request).unwrap();
    let tokens: Vec<u32> = rows.iter().map(|row| row.2).collect();
    interp
        .launch_rows(tables, &tokens, |result| each(rows[result.row].0, result.position, result.logits.to_vec()))
        .unwrap();
}

#[test]
fn rows_of_several_sequences_have_states_of_their_own() {
    let imported = model(&NET);
    let texts = [ids(20), ids(20).into_iter().rev().collect(), vec![9; 20]];
    let want: Vec<Vec<Vec<f32>>> =
        texts.iter().map(|ids| reference::forward(&imported.graph, &imported.weights, ids)).collect();
    for (sms, options) in [
        (4, threads(3)),
        (4, Options::adversarial(Arithmetic::Fast, 5)),
        (8, threads(3)),
        (8, Options::adversarial(Arithmetic::Fast, 5)),
    ] {
        let placed = of_rows_on(sms, &imported, 4, false);
        assert_eq!(placed.program.grids[at(&placed.program, "mix.0")].parts(), sms / 4);
        let mut interp = interp(&imported, &placed, options);
        let shape = Shape::of(&placed.program).unwrap();
        let (mut guard, mut pool) = (Guard::new(shape), Pool::new(shape));
        let mut open: Vec<(SequenceId, usize)> = vec![];
        // A chunk of one text beside single rows of others; the third text takes the place of the first one.
        let mut at = [0u32; 3];
        let mut step = |interp: &mut Interp, guard: &mut Guard, pool: &mut Pool, rows: &[(usize, u32)]| {
            let mut all = vec![];
            for &(text, count) in rows {
                if !open.iter().any(|(_, of)| *of == text) {
                    open.push((pool.open().unwrap(), text));
                }
                let sequence = open.iter().find(|(_, of)| *of == text).unwrap().0;
                all.extend((at[text]..at[text] + count).map(|p| (sequence, p, texts[text][p as usize])));
                at[text] += count;
            }
            let open = open.clone();
            launched((interp, guard, pool), &all, |sequence, position, logits| {
                let text = open.iter().find(|(of, _)| *of == sequence).unwrap().1;
                let difference = max_difference(&logits, &want[text][position as usize]);
                assert!(difference < 1e-4, "{options:?}: text {text}, position {position}: {difference}");
            });
        };
        for rows in [
            &[(0, 3), (1, 1)][..],
            &[(1, 1), (0, 1)],
            &[(0, 1), (1, 2)],
            &[(1, 4)],
            &[(0, 2), (2, 2)],
            &[(2, 1), (1, 1), (0, 1)],
        ] {
            step(&mut interp, &mut guard, &mut pool, rows);
        }
    }
}

#[test]
fn guards_refuse_a_row_beside_its_state() {
    let shape = Shape::of(&of_rows(&model(&NET), 4, false).program).unwrap();
    let (mut guard, mut pool) = (Guard::new(shape), Pool::new(shape));
    let sequence = pool.open().unwrap();
    pool.reserve(sequence, 16).unwrap();
    let mut admit = |guard: &mut Guard, positions: std::ops::Range<u32>, finishes: bool| {
        let rows = positions.map(|position| Row { sequence, position, wants_logits: true }).collect();
        let request = Request { rows, steps: 1, edits: pool.take_edits() };
        let tables = guard.admit(&request).map_err(|refused| refused.to_string())?;
        if finishes {
            tables.finish(1);
        }
        Ok::<_, String>(())
    };
    admit(&mut guard, 0..3, true).unwrap();
    let error = admit(&mut guard, 2..3, true).unwrap_err();
    assert_eq!(
        error,
        "`at`: row 0 is at position 2 of seq0, whose recurrent state is that before position 3; expected position 0, or the one after"
    );
    admit(&mut guard, 3..4, true).unwrap();
    // A launch of which nobody knows how it ended.
    admit(&mut guard, 4..5, false).unwrap();
    assert!(admit(&mut guard, 4..5, true).unwrap_err().contains("whose recurrent state is not known"));
    admit(&mut guard, 0..2, true).unwrap();
    admit(&mut guard, 2..3, true).unwrap();
}

#[test]
fn steps_of_several_rows_with_states_are_proven() {
    for (sms, words) in [(4, false), (4, true), (8, false), (8, true)] {
        let placed = of_rows_on(sms, &model(&NET), 8, words);
        same(&model(&NET).graph, &placed.program).unwrap();
        assert_eq!(print(&parse(&print(&placed)).unwrap()), print(&placed));
        let target = if words { h200() } else { eight_workers() };
        assert_eq!(check(&placed, &target), [], "words: {words}");
        assert_eq!(judge(&placed, &target, &EFFORT), Verdict::Safe { exhaustive: false }, "{sms} SMs, words: {words}");
        for fact in [Fact::At, Fact::Consecutive] {
            let mut mutant = placed.clone();
            mutant.program.tables.iter_mut().for_each(|table| table.facts.retain(|other| *other != fact));
            let found = check(&mutant, &target);
            assert!(found.iter().any(|v| v.rule == Rule::TableFact), "{found:?}");
        }
    }
}

#[test]
fn programs_with_states_are_proven_and_parse() {
    for target in ["cpu", "h200", "a10g"].map(|name| Target::builtin(name).unwrap()) {
        for precision in [FP32, BF16] {
            let graph = model(&NET).graph;
            same(&graph, &program(&graph, precision)).unwrap();
            let placed = placed(&graph, &target, precision);
            let text = print(&placed);
            assert_eq!(print(&parse(&text).unwrap()), text);
            if let Err(refused) = validate(placed, &target) {
                panic!("{}: {refused}", target.name);
            }
        }
    }
}

pub fn at(program: &Program, name: &str) -> usize {
    program.grids.iter().position(|grid| grid.name == name).unwrap_or_else(|| panic!("a grid `{name}`"))
}

fn changed(change: impl Fn(&mut Mix)) -> impl Fn(&mut Program) {
    move |p| {
        let grid = at(p, "mix.2");
        let Op::Mix(mix) = &mut p.grids[grid].op else { panic!() };
        change(mix);
    }
}

fn swapped(p: &mut Program, a: Role, b: Role) {
    let grid = at(p, "mix.2");
    let place = |p: &Program, role| p.grids[grid].operand(role).map(|o| (o.buffer, o.cols)).unwrap();
    let (of_a, of_b) = (place(p, a), place(p, b));
    for operand in &mut p.grids[grid].operands {
        if operand.role == a {
            (operand.buffer, operand.cols) = of_b;
        } else if operand.role == b {
            (operand.buffer, operand.cols) = of_a;
        }
    }
}

#[test]
fn programs_of_another_net_are_refused() {
    let graph = model(&NET).graph;
    let sound = program(&graph, FP32);
    let doubled = changed(|mix| mix.doubles = true);
    let eps = changed(|mix| mix.eps *= 2.0);
    type Change<'a> = &'a dyn Fn(&mut Program);
    let mutants: [(&str, Change<'_>); 6] = [
        ("a doubled beta", &doubled),
        ("another eps", &eps),
        ("q and k swapped", &|p| swapped(p, Role::Q, Role::K)),
        ("beta as the decay", &|p| swapped(p, Role::Beta, Role::Decay)),
        ("a_log as the bias", &|p| swapped(p, Role::ALog, Role::DtBias)),
        ("taps of the other layer", &|p| {
            let [from, to] = ["mix.0", "mix.2"].map(|name| p.grids[at(p, name)].operand(Role::Conv).unwrap().buffer);
            p.buffers[to.index()].content = p.buffers[from.index()].content.clone();
            assert!(matches!(p.buffers[to.index()].content, Some(Content::Vectors { .. })));
        }),
    ];
    for (what, change) in mutants {
        let mut mutant = sound.clone();
        change(&mut mutant);
        assert_ne!(mutant, sound, "{what}");
        same(&graph, &mutant).expect_err(what);
    }
}

/// Moves the task of the first head of a net to another SM in one regime.
pub fn moved(s: &mut Schedule) {
    moved_part(s, 0);
}

/// The same of one part of the sequences.
pub fn moved_part(s: &mut Schedule, part: u32) {
    let grid = at(&s.program, "mix.0");
    let regime = &mut s.regimes[1];
    let of_part = |task: &Task| (task.grid.index(), task.lo, task.j) == (grid, 0, part);
    let task = regime.tasks.iter().position(of_part).unwrap();
    let from = regime.queues.iter().position(|queue| queue.iter().any(|id| id.index() == task)).unwrap();
    let place = regime.queues[from].iter().position(|id| id.index() == task).unwrap();
    let id = regime.queues[from].remove(place);
    // After the tasks of earlier grids there.
    let to = (from + 1) % regime.queues.len();
    let before = |id: &&monobloc::ir::TaskId| regime.tasks[id.index()].grid.index() < grid;
    let place = regime.queues[to].iter().filter(before).count();
    regime.queues[to].insert(place, id);
    restream(s);
}

#[test]
fn a_state_that_changes_its_owner_is_refused_by_both_judges() {
    let (imported, target) = (model(&NET), h200());
    let sound = placed(&imported.graph, &target, FP32);
    assert_eq!(check(&sound, &target), []);
    assert_eq!(judge(&sound, &target, &EFFORT), Verdict::Safe { exhaustive: false });
    let mut mutant = sound.clone();
    moved(&mut mutant);
    let rules: Vec<Rule> = check(&mutant, &target).iter().map(|violation| violation.rule).collect();
    assert_eq!(rules, [Rule::StateOwner]);
    let Verdict::Unsafe(fault) = judge(&mutant, &target, &EFFORT) else { panic!("safe") };
    assert!(matches!(fault.kind, Kind::Stale | Kind::Unwritten), "{fault:?}");
    // What the interpreter computes differs from where the regime begins.
    let ids = ids(16);
    let [want, found] = [&sound, &mutant].map(|s| interp(&imported, s, threads(2)).logits(&ids).unwrap());
    assert!(want[..9] == found[..9] && want[9] != found[9]);
}

/// A schedule with the states of two nets.
pub fn with_states() -> (Schedule, Target) {
    let target = h200();
    (placed(&model(&NET).graph, &target, FP32), target)
}

/// Both nets update the state of the first one.
pub fn shared(s: &mut Schedule) {
    let [from, to] = ["mix.0", "mix.2"].map(|name| at(&s.program, name));
    let buffer = s.program.grids[from].operand(Role::State).unwrap().buffer;
    s.program.grids[to].operands.iter_mut().filter(|o| o.role == Role::State).for_each(|o| o.buffer = buffer);
}

#[test]
fn kernels_share_states_of_the_same_net_alone() {
    let imported = model(&NET);
    let cpu = Target::builtin("cpu").unwrap();
    let proven = |schedule: Schedule| validate(schedule, &cpu).unwrap();
    let [one, four] = [1, 4].map(|rows| proven(of_rows(&imported, rows, false)));
    share_caches(&one, &four).unwrap();
    let doubled = model(&Net { doubles: true, ..NET });
    let error = share_caches(&one, &proven(of_rows(&doubled, 4, false))).unwrap_err();
    assert_eq!(error.what, "states by other weights or attributes");
    // Without pages there is a state for one sequence alone.
    let (alone, h200) = with_states();
    let error = share_caches(&validate(alone, &h200).unwrap(), &four).unwrap_err();
    assert_eq!(error.what, "states at other places or of other sizes");
}

#[test]
fn a_state_of_two_grids_is_refused() {
    let (mut mutant, target) = with_states();
    shared(&mut mutant);
    let rules: Vec<Rule> = check(&mutant, &target).iter().map(|violation| violation.rule).collect();
    assert_eq!(rules, [Rule::State, Rule::State], "two owners, and a state that no grid has");
}

#[test]
fn decode_kernels_with_states_compile() {
    let nvrtc = nvrtc("decode_kernels_with_states_compile");
    // As Qwen3.5 has them: heads of 128.
    let wide = Net { key_heads: 2, value_heads: 4, key_dim: 128, value_dim: 128, kernel: 4, doubles: false };
    for (of, record, precision) in [(&NET, "t4", FP32), (&wide, "h200", BF16)] {
        let (graph, target) = (model(of).graph, Target::builtin(record).unwrap());
        let candidate = Candidate { sms: 8, ..Candidate::default_for(&graph, &target, precision) };
        let program = lower(&graph, "mix", precision, CONTEXT_MAX, &candidate).unwrap();
        let placed = schedule(program, &target, &candidate).unwrap();
        let source = emit(&validate(placed, &target).unwrap(), &target, Trace::Off);
        assert!(source.text.contains("return Mix<Machine, "), "{}", source.text);
        nvrtc.iter().for_each(|nvrtc| compiles(quick(nvrtc), &source, record));
    }
}

#[test]
fn kernels_of_rows_with_states_compile() {
    let nvrtc = nvrtc("kernels_of_rows_with_states_compile");
    let wide = Net { key_heads: 2, value_heads: 4, key_dim: 128, value_dim: 128, kernel: 4, doubles: false };
    let target = h200();
    for (of, precision) in [(&NET, FP32), (&wide, BF16)] {
        let graph = model(of).graph;
        for rows in [1, 8] {
            let candidate = Candidate { sms: 8, ..candidate(&graph, &target, precision) };
            let candidate = Candidate { splits: 1, ..candidate };
            let batch = Batch { rows, sequences: 3, pages: 12, page_rows: 256, words: rows > 1 };
            let program = lower_batch(&graph, "mix", precision, CONTEXT_MAX, &batch, &candidate).unwrap();
            let placed = schedule(program, &target, &candidate).unwrap();
            let source = emit(&validate(placed, &target).unwrap(), &target, Trace::Off);
            assert!(source.text.contains(if rows > 1 { "return RowsMix<Machine, " } else { "return Mix<Machine, " }));
            // Four heads on eight SMs.
            assert_eq!(source.text.contains("static constexpr int PARTS = 2;"), rows > 1);
            nvrtc.iter().for_each(|nvrtc| compiles(quick(nvrtc), &source, "h200"));
        }
    }
}

#[test]
fn a_state_of_the_reference_goes_on_elsewhere() {
    let imported = model(&NET);
    let (ids, first) = (ids(12), 7);
    let mut session = reference::Session::new(&imported.graph, &imported.weights);
    ids[..first].iter().for_each(|&id| drop(session.step(id)));
    let states: Vec<Vec<f32>> = (0..3)
        .map(|layer| match &imported.graph.layers[layer].mixer {
            Mixer::GatedDelta(net) => session.state(layer).unwrap().by_head(net),
            _ => vec![],
        })
        .collect();
    let cached = session.clone();
    let want: Vec<Vec<f32>> = ids[first..].iter().map(|&id| session.step(id)).collect();
    for options in [threads(2), Options::adversarial(Arithmetic::Fast, 2)] {
        let mut interp = interp(&imported, &placed(&imported.graph, &h200(), FP32), options);
        interp.fill_states(first as u32, |layer, _| states[layer as usize].clone());
        let row = |cache: &CacheShape, row: u32| {
            let kind = usize::from(cache.kind == CacheKind::Value);
            cached.cached(cache.layer as usize)[kind][row as usize].iter().map(|&value| value as f32).collect()
        };
        interp.fill_cache_with(first as u32, row).unwrap();
        for (&id, want) in ids[first..].iter().zip(&want) {
            let difference = max_difference(&interp.step(Input::Token(id)).unwrap(), want);
            assert!(difference < 1e-4, "{options:?}: {difference}");
        }
    }
}

/// A prompt in chunks, then one token at a time, after the check of the build.
#[test]
fn hybrids_generate_what_transformers_does() {
    for name in ["olmo-hybrid", "qwen3-next", "qwen35", "qwen35-moe"] {
        let name = format!("hybrids/{name}");
        let (place, goldens) = (Place::new(), Goldens::open(&name));
        place.manifest(&fixture(&name), 64);
        let [ids, expected] = ["input_ids", "greedy_ids"].map(|of| goldens.ids(of));
        let (ids, count) = (comma_separated(&ids), expected.len());
        let answer = place.run(&format!("generate m.toml --ids {ids} --max-tokens {count} --ignore-eos")).code(0);
        assert_eq!(answer.stdout, comma_separated(&expected) + "\n", "{name}");
        for most in [1, 4, 15] {
            let command = format!("generate m.toml --ids {ids} --max-tokens {count} --ignore-eos --lookup {most}");
            let answer = place.run(&command).code(0);
            assert_eq!(answer.stdout, comma_separated(&expected) + "\n", "{name}: {most}");
        }
    }
}
