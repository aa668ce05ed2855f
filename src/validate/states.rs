//! Groups 1 and 4, recurrent states: what outlives a step in place.
//!
//! A state is plain memory that one step leaves to the next. One grid alone touches it, and reads and writes the columns of its own launch
//! index: each index has one task in a step (`launch-twice`), and these columns are not those of another index (`shape`). The task of an index
//! is on the same SM in every regime. So the SM that reads columns is the one that wrote them in the step before, program order lies
//! between, and no event is needed. Between two launches the host waits for all of the first.
//!
//! The state has a row for each sequence. The second axis divides the sequences into parts: all tasks of one `i` have the same columns, each
//! in the rows of its own part, and each part has one task (`launch-twice`, `launch-missing`). Each sequence is in one part, that of all its
//! steps ([`crate::ir::program::part_of`]), so what holds of the columns of an index holds of those of an index and a part.
//!
//! The task takes its rows of a step one after another. So rows of one sequence, which are at
//! ascending positions (`consecutive`), find what the row before left. At position 0 the op takes zeros for the state, so that a text depends on
//! nothing that ran before. That each later position follows the one whose state is there is a fact of the launch (`at`): with one sequence
//! the session establishes it, with several the guard of the tables.

use super::wellformed::Owners;
use super::{Entity, Found, Rule, note, tables};
use crate::ir::op::Role;
use crate::ir::program::{Program, Space};
use crate::ir::schedule::Schedule;
use crate::ir::table::{Fact, Holds};
use crate::ir::{BufferId, GridId, SmId, TaskId};
use std::collections::BTreeMap;

/// Each state belongs to one grid, and the host keeps to the order of positions.
pub(super) fn owned(program: &Program, found: &mut Found) {
    let mut first: BTreeMap<BufferId, GridId> = BTreeMap::new();
    for (g, grid) in (0..).zip(&program.grids) {
        let Some(state) = grid.operand(Role::State) else { continue };
        let id = GridId(g);
        if let Some(&other) = first.get(&state.buffer) {
            found.add_with(Rule::State, Entity::Grid(id), || {
                let message = format!("expected a state of its own, found {} of {other}", state.buffer);
                (message, vec![note(Entity::Grid(other), "updates it, too")])
            });
        }
        first.entry(state.buffer).or_insert(id);
        if program.table(Holds::Sequences).is_some() {
            let why = "a state may be that of another position";
            tables::fact(program, Holds::Positions, Fact::At, why, Entity::Grid(id), found);
            let why = "rows of one sequence may find its state out of order";
            tables::fact(program, Holds::Sequences, Fact::Consecutive, why, Entity::Grid(id), found);
        }
    }
    for (b, _) in (0..).zip(&program.buffers).filter(|(_, buffer)| buffer.space == Space::State) {
        if !first.contains_key(&BufferId(b)) {
            found.add(Rule::State, Entity::Buffer(BufferId(b)), || "expected a grid that updates it".to_string());
        }
    }
}

/// The tasks of a launch index and a part are on one SM in all regimes.
pub(super) fn stay(schedule: &Schedule, all: &[Owners], found: &mut Found) {
    let mut first: BTreeMap<(GridId, u32, u32), (TaskId, u32)> = BTreeMap::new();
    for (r, (regime, owners)) in (0..).zip(schedule.regimes.iter().zip(all)) {
        for (t, task) in (0..).zip(&regime.tasks) {
            if schedule.program.grids[task.grid.index()].operand(Role::State).is_none() {
                continue;
            }
            let sm = owners.sm[t as usize];
            for index in task.lo..task.hi {
                let &mut (other, expected) = first.entry((task.grid, index, task.j)).or_insert((TaskId(t), sm));
                if sm != expected {
                    found.add_with(Rule::StateOwner, Entity::Task(r, TaskId(t)), || {
                        let parts = schedule.program.grids[task.grid.index()].parts();
                        let part = if parts > 1 { format!(", part {},", task.j) } else { String::new() };
                        let (expected, grid, sm) = (SmId(expected), task.grid, SmId(sm));
                        let message = format!(
                            "expected {expected} to have the state of index {index}{part} of {grid}, as in r0, found {sm}"
                        );
                        (message, vec![note(Entity::Task(0, other), "leaves it on another SM")])
                    });
                    break;
                }
            }
        }
    }
}
