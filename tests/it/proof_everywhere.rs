//! Tests sums that every SM makes for itself: which models are lowered with them, and what the proof requires of them.

use crate::oracle::entries::disagreement;
use crate::oracle::explore::{Effort, Verdict, judge};
use crate::oracle::{Fault, Kind};
use crate::proof_support::*;
use monobloc::candidate::{Candidate, Infeasible};
use monobloc::codegen::abi::{Entry, NONE, encode};
use monobloc::dtype::Precision;
use monobloc::ir::BufferId;
use monobloc::ir::op::{Access, Op, Role};
use monobloc::ir::program::{Buffer, Cols, Operand, Rows, Space};
use monobloc::ir::schedule::Schedule;
use monobloc::ir::variant::sum_width_max;
use monobloc::lower::lower;
use monobloc::model::graph::{ModelGraph, NormKind};
use monobloc::validate::{Rule, validate};

const GEMMA: Toy = Toy { post_norms: true, ..TOY };

fn everywhere(sms: u32) -> Candidate {
    Candidate { sums_everywhere: 1, ..on_h200(sms) }
}

/// On 4 SMs of an H200: every SM has all of the residual.
fn gemma() -> Schedule {
    GEMMA.schedule(&h200(), &everywhere(4))
}

/// The machine's verdict about a schedule.
fn ran(schedule: &Schedule) -> Verdict {
    let effort = Effort { steps: 2, states_max: 0, walks: 4, stores: 4, seed: 1 };
    judge(schedule, &h200(), &effort)
}

#[track_caller]
fn stale(schedule: &Schedule) {
    let verdict = ran(schedule);
    assert!(matches!(&verdict, Verdict::Unsafe(Fault { kind: Kind::Stale, .. })), "{verdict:?}");
}

fn grid_op<'a>(schedule: &'a mut Schedule, name: &str) -> &'a mut Op {
    let id = grid(schedule, name);
    &mut schedule.program.grids[id.index()].op
}

// ---- Which models are lowered so.

/// The default value of the knob, and the reason if the value 1 is infeasible.
fn by_default_and_asked(graph: &ModelGraph, precision: Precision) -> (u32, Option<Infeasible>) {
    let target = h200();
    let default = Candidate::default_for(graph, &target, precision);
    let asked = Candidate { sums_everywhere: 1, ..default.clone() };
    let program = lower(graph, "toy", precision, 64, &default).expect("the default is lowered");
    let whole = program.grids.iter().filter(|grid| grid.op.everywhere() && !matches!(grid.op, Op::Select)).count();
    assert_eq!(whole > 0, default.sums_everywhere == 1, "the knob says what is lowered");
    (default.sums_everywhere, lower(graph, "toy", precision, 64, &asked).err())
}

#[track_caller]
fn refused(graph: &ModelGraph, precision: Precision, why: &str) {
    let (default, asked) = by_default_and_asked(graph, precision);
    assert_eq!(default, 0);
    match asked {
        Some(Infeasible::Knob { knob: "sums_everywhere", value: 1, expected }) => {
            assert!(expected.contains(why), "expected `{why}` in `{expected}`");
        }
        other => panic!("expected a refusal of `sums_everywhere`, found {other:?}"),
    }
}

#[test]
fn a_model_with_a_norm_after_every_branch_is_summed_everywhere() {
    for toy in [GEMMA, Toy { precision: FP32, ..GEMMA }] {
        assert_eq!(by_default_and_asked(&toy.graph(), toy.precision), (1, None));
    }
}

#[test]
fn a_branch_without_such_a_norm_is_added_by_owners() {
    const WHY: &str = "not every branch has an RMS norm before it is added";
    refused(&TOY.graph(), BF16, WHY);
    let changes: [fn(&mut ModelGraph); 6] = [
        |graph| graph.layers[1].attn_post_norm = None,
        |graph| graph.layers[0].mlp_post_norm = None,
        |graph| graph.layers[0].attn_post_norm.as_mut().expect("a norm").kind = NormKind::Layer,
        |graph| graph.layers[1].mlp_post_norm.as_mut().expect("a norm").weight = None,
        // Readers of the residual may only have such norms: the variance of a LayerNorm is that of packets.
        |graph| graph.layers[1].mlp_norm.as_mut().expect("a norm").kind = NormKind::Layer,
        |graph| graph.final_norm.kind = NormKind::Layer,
    ];
    for change in changes {
        let mut graph = GEMMA.graph();
        change(&mut graph);
        refused(&graph, BF16, WHY);
    }
}

#[test]
fn a_branch_wider_than_the_registers_of_a_block_is_added_by_owners() {
    for precision in [BF16, FP32] {
        let graph = |hidden| Toy { hidden, precision, layers: 1, ..GEMMA }.graph();
        let warps = Candidate::default_for(&graph(64), &h200(), precision).consumer_warps;
        let most = sum_width_max(precision, warps);
        refused(&graph(most + 8), precision, &format!("at most {most} values in registers"));
        assert_eq!(by_default_and_asked(&graph(most), precision), (1, None));
    }
}

// ---- Proofs, and the queues of a device.

#[test]
fn an_own_input_names_no_packets_and_begins_at_column_0() {
    let schedule = gemma();
    assert_eq!(ran(&schedule), Verdict::Safe { exhaustive: false });
    let validated = validate(schedule.clone(), &h200()).expect("proven");
    let tables = encode(&validated);
    assert_eq!(disagreement(&schedule, &tables), None);
    let tasks = |r: usize| schedule.regimes[r].queues.iter().flatten().map(move |id| (r, *id));
    let mut own = 0;
    for (at, (r, id)) in (0..schedule.regimes.len()).flat_map(tasks).enumerate() {
        let task = &schedule.regimes[r].tasks[id.index()];
        if !matches!(&schedule.program.grids[task.grid.index()].op, Op::MatVec(m) if m.own_input) {
            continue;
        }
        own += 1;
        assert_eq!((tables.entries[at].x, tables.entries[at].residual), (NONE, 0), "{id}");
        let turns: [fn(&mut Entry); 2] = [|entry| entry.x = 0, |entry| entry.residual = 8];
        for turn in turns {
            let mut other = tables.clone();
            turn(&mut other.entries[at]);
            assert!(disagreement(&schedule, &other).is_some(), "{id}");
        }
    }
    // qkv and gate_up of two layers and the head, on 4 SMs, in two regimes.
    assert_eq!(own, 5 * 4 * 2);
}

#[test]
fn an_own_input_is_read_after_the_sums_before_it() {
    // sm1 multiplies before it adds; no event makes it wait.
    let schedule = gemma();
    for (sum, reader) in [("o.0.add", "gate_up.0"), ("down.0.add", "qkv.1")] {
        let mut early = schedule.clone();
        let (a, b) = (task(&early, 0, sum, 1), task(&early, 0, reader, 1));
        swap_queued(&mut early, 0, a, b);
        assert_eq!(rules(&early, &h200()), [Rule::PrivateOrder], "{sum}");
        stale(&early);
    }
}

#[test]
fn a_sum_of_owners_is_missing_on_all_others() {
    let mut schedule = gemma();
    let residual = buffer(&schedule, "residual");
    let width = schedule.program.buffers[residual.index()].cols;
    let (name, blocks) = ("down.1.add", Cols::blocks(8, width));
    let out = BufferId::from(schedule.program.buffers.len());
    let like = schedule.program.buffers[buffer(&schedule, "down.1.y").index()].clone();
    schedule.program.buffers.push(Buffer { name: "x.2".to_string(), ..like });
    schedule.placement.push(Some(1 << 20));
    let Op::NormAdd { everywhere, .. } = grid_op(&mut schedule, name) else { panic!("{name} is a sum") };
    *everywhere = false;
    operand(&mut schedule, name, Role::Residual).cols = blocks;
    let id = grid(&schedule, name);
    let sum = &mut schedule.program.grids[id.index()];
    sum.n = width / 8;
    sum.operands.push(Operand { role: Role::Out, access: Access::Write, buffer: out, rows: Rows::One, cols: blocks });
    for regime in &mut schedule.regimes {
        for task in regime.tasks.iter_mut().filter(|task| task.grid == id) {
            (task.lo, task.hi) = (task.lo * 2, task.hi * 2);
        }
    }
    assert_eq!(rules(&schedule, &h200()), [Rule::MixedUse]);
    stale(&schedule);
}

#[test]
fn sums_of_owners_have_no_barrier_after_them() {
    // One SM owns all columns, so that its own input would be complete; a kernel reads it while slower warps still add.
    let mut schedule = TOY.schedule(&h200(), &on_h200(1));
    let residual = buffer(&schedule, "residual");
    let Op::MatVec(m) = grid_op(&mut schedule, "gate_up.0") else { panic!("gate_up.0 is a matvec") };
    m.own_input = true;
    operand(&mut schedule, "gate_up.0", Role::X).buffer = residual;
    for r in 0..schedule.regimes.len() {
        let id = task(&schedule, r, "gate_up.0", 0);
        schedule.regimes[r].tasks[id.index()].waits.clear();
    }
    assert_eq!(rules(&schedule, &h200()), [Rule::Kernel]);
    assert_eq!(rules(&schedule, &beyond_kernels()), []);
    assert!(schedule.program.buffers[residual.index()].space == Space::Private && !ran(&schedule).is_unsafe());
}
