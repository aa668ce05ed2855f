//! Tests tasks that divide the sequences of a recurrent state among them: how many parts there are, and schedules that divide them wrongly.

use monobloc::candidate::Candidate;
use monobloc::ir::op::Role;
use monobloc::ir::program::{Rows, Second};
use monobloc::ir::schedule::{Schedule, Task};
use monobloc::lower::{Batch, lower_batch};
use monobloc::schedule::schedule;
use monobloc::target::Target;
use monobloc::validate::{Rule, check};

use crate::mix::{CONTEXT_MAX, EFFORT, NET, Net, at, candidate, eight_workers, model, moved_part, of_rows_on};
use crate::oracle::Kind;
use crate::oracle::explore::{Verdict, judge};
use crate::proof_support::{BF16, FP32};

#[test]
fn parts_of_sequences_follow_from_rows_and_sms() {
    let graph = model(&Net { key_heads: 2, value_heads: 16, ..NET }).graph;
    let target = Target::builtin("h200").unwrap();
    let parts = |rows, sequences, sms| {
        let batch = Batch { rows, sequences, pages: 2 * sequences, page_rows: 256, words: true };
        let candidate = Candidate { sms, splits: 1, ..candidate(&graph, &target, BF16) };
        let program = lower_batch(&graph, "mix", BF16, CONTEXT_MAX, &batch, &candidate).unwrap();
        program.grids[at(&program, "mix.0")].parts()
    };
    // As many as give each SM one head of one part; of 16 rows, 8 parts have two each, as 16 parts with two tasks an SM.
    assert_eq!([2, 4, 8, 16].map(|rows| parts(rows, 16, 132)), [2, 4, 8, 8]);
    // More parts make no SM faster, and no part is without a sequence.
    assert_eq!([parts(8, 16, 16), parts(8, 16, 32), parts(8, 3, 132), parts(1, 16, 132)], [1, 2, 3, 1]);
}

/// A schedule whose nets have two parts, and its target.
fn divided(words: bool) -> (Schedule, Target) {
    let schedule = of_rows_on(8, &model(&NET), 4, words);
    (schedule, if words { Target::builtin("h200").unwrap() } else { eight_workers() })
}

/// The tasks of the first net.
fn tasks(s: &mut Schedule) -> impl Iterator<Item = &mut Task> {
    let grid = at(&s.program, "mix.0");
    s.regimes.iter_mut().flat_map(|regime| &mut regime.tasks).filter(move |task| task.grid.index() == grid)
}

/// Gives an operand of the first net other rows.
fn rows_of(s: &mut Schedule, role: Role, rows: Rows) {
    let grid = at(&s.program, "mix.0");
    s.program.grids[grid].operands.iter_mut().filter(|o| o.role == role).for_each(|o| o.rows = rows);
}

#[test]
fn sequences_divided_wrongly_are_refused_by_both_judges() {
    type Mutate = fn(&mut Schedule);
    let mutants: [(&str, &[Rule], Mutate); 8] = [
        ("two tasks of one part", &[Rule::LaunchTwice, Rule::LaunchMissing], |s| {
            tasks(s).filter(|task| task.lo == 1).for_each(|task| task.j = 0);
        }),
        ("a part without a task", &[Rule::LaunchMissing], |s| {
            let grid = at(&s.program, "mix.0");
            s.program.grids[grid].second = Second::Axis(3);
        }),
        ("a part that is not there", &[Rule::LaunchRange], |s| {
            tasks(s).filter(|task| task.lo == 1 && task.j == 1).for_each(|task| task.j = 2);
        }),
        ("more parts than sequences", &[Rule::Shape], |s| {
            let grid = at(&s.program, "mix.0");
            s.program.grids[grid].second = Second::Axis(4);
        }),
        ("an output of all rows", &[Rule::Rows], |s| rows_of(s, Role::Out, Rows::All)),
        ("a state of all sequences", &[Rule::Rows], |s| rows_of(s, Role::State, Rows::Sequences)),
        ("an input of one part", &[Rule::Rows], |s| rows_of(s, Role::V, Rows::Part)),
        ("a part of a product", &[Rule::Rows], |s| {
            let grid = at(&s.program, "o.0");
            s.program.grids[grid].operands.iter_mut().filter(|o| o.role == Role::X).for_each(|o| o.rows = Rows::Part);
        }),
    ];
    for words in [false, true] {
        let (sound, target) = divided(words);
        assert_eq!(check(&sound, &target), []);
        for (what, expected, mutate) in mutants {
            let mut mutant = sound.clone();
            mutate(&mut mutant);
            assert_ne!(mutant, sound, "{what}");
            let found = check(&mutant, &target);
            assert!(!found.is_empty() && found.iter().all(|v| expected.contains(&v.rule)), "{what}: {found:?}");
            let Verdict::Unsafe(fault) = judge(&mutant, &target, &EFFORT) else { panic!("{what}: safe") };
            assert!(matches!(fault.kind, Kind::Malformed | Kind::Undeclared), "{what}: {fault}");
        }
    }
}

#[test]
fn readers_wait_for_all_parts() {
    for words in [false, true] {
        let (mut mutant, target) = divided(words);
        // One part of a head says nothing.
        let out = mutant.program.grids[at(&mutant.program, "mix.0")].operand(Role::Out).unwrap().buffer;
        let events: Vec<bool> = mutant.regimes[0].events.iter().map(|event| event.buffer == out).collect();
        let silent = tasks(&mut mutant).find(|task| task.lo == 1 && task.j == 1).unwrap();
        silent.signals.retain(|event| !events[event.index()]);
        let found = check(&mutant, &target);
        assert_eq!(found.iter().map(|v| v.rule).collect::<Vec<_>>(), [Rule::MissingSignal], "{found:?}");
        assert!(matches!(judge(&mutant, &target, &EFFORT), Verdict::Unsafe(_)), "words: {words}");
    }
}

#[test]
fn a_part_that_changes_its_owner_is_refused_by_both_judges() {
    // Two regimes, by KV splits.
    let (imported, target) = (model(&NET), eight_workers());
    let candidate = Candidate { sms: 8, ..candidate(&imported.graph, &target, FP32) };
    let batch = Batch { rows: 4, sequences: 3, pages: 40, page_rows: 8, words: false };
    let program = lower_batch(&imported.graph, "mix", FP32, CONTEXT_MAX, &batch, &candidate).unwrap();
    let sound = schedule(program, &target, &candidate).unwrap();
    assert_eq!(sound.regimes.len(), 2);
    assert_eq!(check(&sound, &target), []);
    assert_eq!(judge(&sound, &target, &EFFORT), Verdict::Safe { exhaustive: false });
    for part in 0..2 {
        let mut mutant = sound.clone();
        moved_part(&mut mutant, part);
        let found = check(&mutant, &target);
        assert_eq!(found.iter().map(|v| v.rule).collect::<Vec<_>>(), [Rule::StateOwner], "{found:?}");
        assert!(found[0].message.contains(&format!("the state of index 0, part {part}, of")), "{}", found[0].message);
        let Verdict::Unsafe(fault) = judge(&mutant, &target, &EFFORT) else { panic!("safe") };
        assert!(matches!(fault.kind, Kind::Stale | Kind::Unwritten), "{fault}");
    }
}
