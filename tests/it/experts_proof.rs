//! Tests that both judges refuse each way in which a mixture of experts can go wrong: what is chosen, when it is loaded, what is computed
//! with it, and what is added up.

use monobloc::candidate::Candidate;
use monobloc::ir::op::{MatVec, Op, Role};
use monobloc::ir::program::{Cols, Content, Operand, Rows, Second};
use monobloc::ir::schedule::{Event, Schedule, Source, Task};
use monobloc::ir::table::TableHome;
use monobloc::ir::{BufferId, EventId, TableId, TaskId};
use monobloc::target::Target;
use monobloc::validate::Rule;

use crate::oracle::Kind;
use crate::oracle::explore::Effort;
use crate::proof_support::{
    MIXTURE, Mixture, Toy, beyond_kernels, buffer, cpu, event, grid, h200, looked_up, looked_up_on, looked_up_rows_on,
    on_cpu, on_h200, operand, restream, rules, small_mixture, swap_queued, task,
};
use crate::rows::both_judges;

const EFFORT: Effort = Effort { steps: 3, states_max: 50_000, walks: 8, stores: 64, seed: 1 };
/// What a reader may find where it does not wait.
const EARLY: &[Kind] = &[Kind::Unwritten, Kind::Stale, Kind::Invisible];

/// Two layers with experts that have biases, and a shared expert with a gate.
fn two_layers() -> (Schedule, Target) {
    let mixture = Mixture { shared: Some(true), ..MIXTURE };
    let toy = Toy { layers: 2, bias: true, ..small_mixture(mixture) };
    (toy.schedule(&h200(), &Candidate { splits: 1, ..on_h200(2) }), h200())
}

fn operands<'a>(s: &'a mut Schedule, name: &str, role: Role) -> Vec<&'a mut Operand> {
    let id = grid(s, name);
    s.program.grids[id.index()].operands.iter_mut().filter(|operand| operand.role == role).collect()
}

fn sets_after(s: &mut Schedule, name: &str, nth: usize, after: Option<EventId>) {
    let id = task(s, 0, name, nth);
    s.regimes[0].streams.iter_mut().flatten().filter(|run| run.task == id).for_each(|run| run.after = after);
}

fn changes_task(s: &mut Schedule, name: &str, nth: usize, change: fn(&mut Task)) {
    let id = task(s, 0, name, nth);
    let task = &mut s.regimes[0].tasks[id.index()];
    change(task);
    let range = (task.lo, task.hi);
    for run in s.regimes[0].streams.iter_mut().flatten().filter(|run| run.task == id) {
        let Source::Units { lo, hi, .. } = &mut run.source else { panic!("weights") };
        (*lo, *hi) = range;
    }
}

/// Waits and loaders of a grid move from events about one buffer to those about the same columns of another one.
fn waits_for(s: &mut Schedule, name: &str, from: BufferId, to: BufferId) {
    let id = grid(s, name);
    let regime = &mut s.regimes[0];
    let events = regime.events.clone();
    let other = |e: EventId| {
        let was = &events[e.index()];
        let same = |event: &Event| (event.buffer, event.row, event.lo, event.hi) == (to, was.row, was.lo, was.hi);
        if was.buffer == from { EventId::from(events.iter().position(same).expect("an event")) } else { e }
    };
    let tasks: Vec<TaskId> =
        (0..regime.tasks.len()).map(TaskId::from).filter(|t| regime.tasks[t.index()].grid == id).collect();
    for t in &tasks {
        regime.tasks[t.index()].waits.iter_mut().for_each(|wait| wait.event = other(wait.event));
    }
    for run in regime.streams.iter_mut().flatten().filter(|run| tasks.contains(&run.task)) {
        run.after = run.after.map(other);
    }
}

#[test]
fn a_stream_waits_for_its_own_choice() {
    both_judges(
        looked_up(),
        &EFFORT,
        &[
            ("no wait", Rule::StreamAfter, EARLY, |s| sets_after(s, "gate_up.0", 1, None)),
            ("the choice of another slot", Rule::StreamAfter, EARLY, |s| {
                let other = event(s, 0, "choices.0", 0, 1);
                sets_after(s, "gate_up.0", 1, Some(other));
            }),
            ("scores", Rule::StreamAfter, EARLY, |s| {
                let other = event(s, 0, "scores.0", 0, 4);
                sets_after(s, "gate_up.0", 0, Some(other));
            }),
            ("shares", Rule::StreamAfter, EARLY, |s| {
                let other = event(s, 0, "shares.0", 0, 2);
                sets_after(s, "gate_up.0", 0, Some(other));
            }),
            // Its own loader waits for the choice, which comes later in the queue.
            ("the choice after the expert", Rule::Deadlock, &[Kind::Hang], |s| {
                let (expert, route) = (task(s, 0, "gate_up.0", 1), task(s, 0, "route.0", 0));
                swap_queued(s, 0, expert, route);
                restream(s);
            }),
        ],
    );
}

/// A counter orders memory, so a loader that waits for it sees the choice.
#[test]
fn a_stream_may_wait_for_a_counter() {
    let base = (looked_up_on(&cpu(), &on_cpu(2)), cpu());
    both_judges(
        base,
        &EFFORT,
        &[
            ("no wait", Rule::StreamAfter, EARLY, |s| sets_after(s, "gate_up.0", 0, None)),
            ("the counter of scores", Rule::StreamAfter, EARLY, |s| {
                let other = event(s, 0, "scores.0", 0, 4);
                sets_after(s, "gate_up.0", 0, Some(other));
            }),
        ],
    );
}

#[test]
fn what_rows_chose_is_dealt_once_and_whole() {
    let base = (looked_up_rows_on(&h200(), &on_h200(2)), beyond_kernels());
    both_judges(
        base,
        &EFFORT,
        &[
            ("a loader that does not wait", Rule::StreamAfter, EARLY, |s| sets_after(s, "gate_up.0", 1, None)),
            ("scores instead of choices", Rule::StreamAfter, EARLY, |s| {
                let other = event(s, 0, "scores.0", 0, 4);
                sets_after(s, "gate_up.0", 0, Some(other));
            }),
            ("inputs that may not be there", Rule::MissingWait, EARLY, |s| {
                let (id, act) = (task(s, 0, "down.0", 0), buffer(s, "act.0"));
                let of: Vec<bool> = s.regimes[0].events.iter().map(|event| event.buffer == act).collect();
                s.regimes[0].tasks[id.index()].waits.retain(|wait| !of[wait.event.index()]);
            }),
            ("sums that wait for one share", Rule::PartialJoin, EARLY, |s| {
                let (id, y) = (task(s, 0, "combine.0", 0), buffer(s, "down.0.y"));
                let of: Vec<bool> = s.regimes[0].events.iter().map(|event| event.buffer == y).collect();
                let waits = &mut s.regimes[0].tasks[id.index()].waits;
                waits.iter_mut().filter(|wait| of[wait.event.index()]).for_each(|wait| wait.count -= 1);
            }),
            ("one row of experts for all", Rule::Table, &[Kind::Malformed], |s| s.program.tables[3].rows = 1),
            ("a share twice", Rule::LaunchTwice, &[Kind::Malformed], |s| changes_task(s, "down.0", 1, |t| t.j = 0)),
            ("a share of some units", Rule::LaunchRange, &[Kind::Malformed], |s| {
                changes_task(s, "gate_up.0", 0, |task| task.lo = 1);
            }),
            ("a share without a task", Rule::LaunchMissing, &[Kind::Malformed], |s| {
                let id = grid(s, "down.0");
                s.program.grids[id.index()].second = Second::Dealt(3);
            }),
            ("the same slot of all rows", Rule::Table, &[Kind::Undeclared], |s| {
                let id = grid(s, "down.0");
                s.program.grids[id.index()].second = Second::Axis(2);
            }),
            ("a row in each task", Rule::Shape, &[Kind::Undeclared], |s| {
                let id = grid(s, "down.0");
                s.program.grids[id.index()].per_row = true;
            }),
            ("the choice of the first slot alone", Rule::Shape, &[Kind::Undeclared], |s| {
                operand(s, "down.0", Role::Choices).cols = Cols::all(1);
            }),
            ("the inputs of the first slot alone", Rule::Shape, &[Kind::Undeclared], |s| {
                operand(s, "down.0", Role::X).cols = Cols::all(16);
            }),
            ("the output of the first slot alone", Rule::Shape, &[Kind::Undeclared], |s| {
                operand(s, "down.0", Role::Out).cols = Cols::all(16);
            }),
        ],
    );
}

#[test]
fn a_choice_is_within_its_table() {
    both_judges(
        two_layers(),
        &EFFORT,
        &[
            ("a part less than experts", Rule::Table, &[Kind::OutOfBounds], |s| {
                s.program.tables[0].bound = 3;
                for (name, role) in [
                    ("gate_up.0", Role::Weight),
                    ("gate_up.0", Role::Bias),
                    ("down.0", Role::Weight),
                    ("down.0", Role::Bias),
                ] {
                    let id = operand(s, name, role).buffer;
                    let buffer = &mut s.program.buffers[id.index()];
                    match buffer.content.as_mut().expect("content") {
                        Content::Rows { parts, .. } => {
                            parts.truncate(parts.len() / 4 * 3);
                            buffer.rows = buffer.rows / 4 * 3;
                        }
                        Content::Vectors { parts, .. } => {
                            parts.truncate(parts.len() / 4 * 3);
                            buffer.cols = buffer.cols / 4 * 3;
                        }
                        _ => panic!("rows or vectors"),
                    }
                }
            }),
            ("more slots than are chosen", Rule::Table, &[Kind::Malformed], |s| s.program.tables[0].cols = 3),
            ("choices that a product writes", Rule::Table, &[Kind::Undeclared], |s| {
                let act = buffer(s, "act.0");
                s.program.tables[0].home = TableHome::Device(act);
            }),
        ],
    );
}

#[test]
fn every_unit_of_a_slot_is_computed_once() {
    both_judges(
        looked_up(),
        &EFFORT,
        &[
            ("a unit never", Rule::LaunchMissing, &[Kind::Malformed], |s| {
                changes_task(s, "gate_up.0", 1, |task| task.lo = 1);
            }),
            ("a slot twice", Rule::LaunchTwice, &[Kind::Malformed], |s| {
                changes_task(s, "down.0", 1, |task| task.j = 0);
            }),
            ("units of two slots", Rule::LaunchRange, &[Kind::Malformed], |s| {
                changes_task(s, "down.0", 0, |task| task.hi += 1);
            }),
            ("weights of the next expert", Rule::StreamBytes, &[Kind::Ring], |s| {
                let id = task(s, 0, "down.0", 0);
                let run = s.regimes[0].streams.iter_mut().flatten().find(|run| run.task == id).expect("its run");
                let Source::Units { lo, hi, .. } = &mut run.source else { panic!("weights") };
                (*lo, *hi) = (*lo + 2, *hi + 2);
            }),
            ("the output of another slot", Rule::Shape, &[Kind::Undeclared, Kind::OutOfBounds], |s| {
                operand(s, "down.0", Role::Out).cols.stride_j = 0;
            }),
        ],
    );
}

/// One layer whose `down` adds up all slots.
fn over_slots() -> (Schedule, Target) {
    let toy = Toy { intermediate: 32, ..small_mixture(MIXTURE) };
    (toy.schedule(&h200(), &Candidate { splits: 1, ..on_h200(2) }), h200())
}

fn product<'a>(s: &'a mut Schedule, name: &str) -> &'a mut MatVec {
    let id = grid(s, name);
    let Op::MatVec(m) = &mut s.program.grids[id.index()].op else { panic!("a product") };
    m
}

#[test]
fn a_product_over_slots_takes_all_of_them() {
    both_judges(
        over_slots(),
        &EFFORT,
        &[
            ("no wait", Rule::StreamAfter, EARLY, |s| sets_after(s, "down.0", 0, None)),
            ("shares that may not be there", Rule::MissingWait, EARLY, |s| {
                let (id, shares) = (task(s, 0, "gate_up.0", 0), buffer(s, "shares.0"));
                let of: Vec<bool> = s.regimes[0].events.iter().map(|event| event.buffer == shares).collect();
                s.regimes[0].tasks[id.index()].waits.retain(|wait| !of[wait.event.index()]);
            }),
            ("a slot less", Rule::Operand, &[Kind::Malformed], |s| product(s, "down.0").slots = 1),
            ("a slot more", Rule::Operand, &[Kind::Malformed], |s| product(s, "down.0").slots = 3),
            ("no slot", Rule::Attribute, &[Kind::Malformed], |s| product(s, "down.0").slots = 0),
            ("slots of half a granule", Rule::Attribute, &[Kind::Malformed], |s| product(s, "down.0").k = 16),
            ("inputs of one slot", Rule::Shape, &[Kind::Undeclared, Kind::OutOfBounds], |s| {
                operand(s, "down.0", Role::X).cols.len = 32;
            }),
            ("the choice of the first slot alone", Rule::Shape, &[Kind::Undeclared], |s| {
                operand(s, "down.0", Role::Choices).cols = Cols::all(1);
            }),
            ("a share of another slot", Rule::Shape, &[Kind::Undeclared], |s| {
                operand(s, "gate_up.0", Role::Shares).cols.stride_j = 0;
            }),
            ("units that two tasks add", Rule::LaunchTwice, &[Kind::Malformed], |s| {
                changes_task(s, "down.0", 1, |task| (task.lo, task.hi) = (0, 1));
            }),
        ],
    );
}

/// What its SM has is one vector, so slots that have inputs of their own cannot read it.
#[test]
fn slots_with_own_inputs_do_not_read_the_residual() {
    let (mut s, target) = two_layers();
    let id = grid(&s, "down.0");
    let Op::MatVec(m) = &mut s.program.grids[id.index()].op else { panic!("a product") };
    m.own_input = true;
    let found = rules(&s, &target);
    assert!(found.contains(&Rule::Space), "{found:?}");
}

#[test]
fn a_sum_takes_every_slot_in_order() {
    both_judges(
        two_layers(),
        &EFFORT,
        &[
            ("a slot less", Rule::Operand, &[Kind::Undeclared], |s| {
                let id = grid(s, "combine.1");
                s.program.grids[id.index()].operands.remove(1);
            }),
            ("another order", Rule::Shape, &[Kind::Undeclared], |s| {
                let id = grid(s, "combine.1");
                s.program.grids[id.index()].operands.swap(0, 1);
            }),
            ("a slot twice", Rule::Shape, &[Kind::Undeclared], |s| {
                let mut inputs = operands(s, "combine.1", Role::X);
                inputs[1].cols = inputs[0].cols;
            }),
            ("inputs of another layer", Rule::Shape, &[Kind::Undeclared], |s| {
                let other = buffer(s, "down.0.y");
                operands(s, "combine.1", Role::X)[1].buffer = other;
            }),
            ("shares of another layer", Rule::MissingWait, EARLY, |s| {
                let other = buffer(s, "shares.0");
                operand(s, "combine.1", Role::Shares).buffer = other;
                let id = grid(s, "combine.1");
                let shares = buffer(s, "shares.1");
                let events: Vec<bool> = s.regimes[0].events.iter().map(|event| event.buffer == shares).collect();
                for task in s.regimes[0].tasks.iter_mut().filter(|task| task.grid == id) {
                    task.waits.retain(|wait| !events[wait.event.index()]);
                }
            }),
            ("a gate of another meaning", Rule::MixedUse, &[Kind::Undeclared], |s| {
                let shares = buffer(s, "shares.1");
                let gate = operand(s, "combine.1", Role::Gate);
                (gate.buffer, gate.cols) = (shares, Cols::all(1));
            }),
        ],
    );
}

#[test]
fn a_part_is_chosen_by_one_table() {
    both_judges(
        two_layers(),
        &EFFORT,
        &[
            ("weights that another layer chose", Rule::Operand, &[Kind::Undeclared], |s| {
                for role in [Role::Weight, Role::Bias] {
                    operand(s, "gate_up.1", role).rows = Rows::Lookup(TableId(0));
                }
                let (from, to) = (buffer(s, "choices.1"), buffer(s, "choices.0"));
                waits_for(s, "gate_up.1", from, to);
            }),
            ("choices of another layer", Rule::Operand, &[Kind::Undeclared], |s| {
                let (from, to) = (buffer(s, "choices.1"), buffer(s, "choices.0"));
                operand(s, "down.1", Role::Choices).buffer = to;
                waits_for(s, "down.1", from, to);
            }),
            ("no choices", Rule::Operand, &[Kind::Undeclared], |s| {
                let id = grid(s, "down.1");
                s.program.grids[id.index()].operands.retain(|operand| operand.role != Role::Choices);
            }),
            ("choices from the second column on", Rule::Operand, &[Kind::Undeclared], |s| {
                // Both layers choose in one buffer, side by side.
                let (first, second) = (buffer(s, "choices.0"), buffer(s, "choices.1"));
                s.program.buffers[first.index()].cols = 4;
                for table in &mut s.program.tables {
                    table.home = TableHome::Device(first);
                }
                for (name, role) in [("route.1", Role::Out), ("gate_up.1", Role::Choices), ("down.1", Role::Choices)] {
                    let operand = operand(s, name, role);
                    operand.buffer = first;
                    (operand.cols.base, operand.cols.limit) = (2, 4);
                }
                for event in s.regimes[0].events.iter_mut().filter(|event| event.buffer == second) {
                    (event.buffer, event.lo, event.hi) = (first, event.lo + 2, event.hi + 2);
                }
                // Loaders poll entries of the table, which are those of the first layer.
                let events = s.regimes[0].events.clone();
                for run in s.regimes[0].streams.iter_mut().flatten() {
                    let Some(after) = run.after.filter(|after| events[after.index()].lo > 1) else { continue };
                    let lo = events[after.index()].lo - 2;
                    let entry = events.iter().position(|event| (event.buffer, event.lo) == (first, lo));
                    run.after = Some(EventId::from(entry.expect("an event of the first layer")));
                }
            }),
            ("the bias of the first part", Rule::Rows, &[Kind::Undeclared], |s| {
                operand(s, "down.1", Role::Bias).rows = Rows::One;
            }),
            ("a bias that another layer chose", Rule::Rows, &[Kind::Undeclared], |s| {
                operand(s, "down.1", Role::Bias).rows = Rows::Lookup(TableId(0));
            }),
            ("a matrix that nothing chooses", Rule::Operand, &[Kind::Undeclared, Kind::Malformed], |s| {
                operand(s, "down.1", Role::Weight).rows = Rows::Units;
            }),
        ],
    );
}

/// What a loader polls is not overwritten before every loader of the step has looked.
#[test]
fn choices_stay_until_they_are_read() {
    both_judges(
        looked_up(),
        &EFFORT,
        &[
            (
                "shares in the place of choices",
                Rule::PlacementOverlap,
                &[Kind::Clobbered, Kind::Stale, Kind::Hang],
                |s| {
                    let (choices, shares) = (buffer(s, "choices.0").index(), buffer(s, "shares.0").index());
                    s.placement[shares] = s.placement[choices];
                },
            ),
            ("a choice of the step before", Rule::Carried, &[Kind::Unwritten, Kind::Stale, Kind::Hang], |s| {
                let choice = event(s, 0, "choices.0", 0, 1);
                s.regimes[0].events[choice.index()].carried = true;
            }),
        ],
    );
}

/// What the second of two buffers has is in the first one, after what that has.
fn side_by_side(s: &mut Schedule, first: &str, second: &str) {
    let (a, b) = (buffer(s, first), buffer(s, second));
    let (by, more) = (s.program.buffers[a.index()].cols, s.program.buffers[b.index()].cols);
    s.program.buffers[a.index()].cols += more;
    s.placement[a.index()] = Some(1 << 20);
    for operand in s.program.grids.iter_mut().flat_map(|grid| &mut grid.operands).filter(|o| o.buffer == b) {
        operand.buffer = a;
        (operand.cols.base, operand.cols.limit) = (operand.cols.base + by, operand.cols.limit + by);
    }
    for event in s.regimes[0].events.iter_mut().filter(|event| event.buffer == b) {
        (event.buffer, event.lo, event.hi) = (a, event.lo + by, event.hi + by);
    }
}

/// An entry names the first packet of what a sum reads, and not where its inputs begin.
#[test]
fn kernels_have_the_inputs_of_a_sum_in_a_buffer_of_their_own() {
    let (mut s, target) = two_layers();
    side_by_side(&mut s, "down.0.y", "down.1.y");
    assert_eq!(rules(&s, &beyond_kernels()), [], "the language allows it");
    assert_eq!(rules(&s, &target), [Rule::Kernel]);
}

/// A choice polls its scores in pairs of packets, which begin at even ones.
#[test]
fn kernels_read_scores_from_a_pair_on() {
    let (mut s, target) = two_layers();
    let x = operand(&mut s, "route.1", Role::X);
    (x.cols.base, x.cols.limit) = (1, 5);
    let scores = buffer(&s, "scores.1");
    let events = s.regimes[0].events.iter_mut().filter(|event| event.buffer == scores && event.lo == 0);
    events.for_each(|event| (event.lo, event.hi) = (1, 5));
    assert_eq!(rules(&s, &beyond_kernels()), [], "the language allows it");
    assert_eq!(rules(&s, &target), [Rule::Kernel]);
}
