//! Group 2: who signals an event, who waits for it, and which reads that covers.

use super::wellformed::{Flow, Grids, Writes};
use super::{Entity, Found, Rule, note};
use crate::dtype::DType;
use crate::ir::op::Op;
use crate::ir::program::{Program, Space};
use crate::ir::schedule::{Event, Mechanism, Regime, Run, Schedule, Scope, Task, Wait};
use crate::ir::{BufferId, EventId, GridId, TaskId};
use std::collections::BTreeMap;

/// What later passes need to know about the events of a regime.
pub(super) struct Joins {
    /// Waits for each event in a step.
    pub waits: Vec<u32>,
    /// For each carried event that is waited for: its counterpart in the regime before. Empty for the first regime.
    pub before: BTreeMap<EventId, EventId>,
    /// For each task: the event that its loader waits for before it begins the task's run.
    pub after: Vec<Option<EventId>>,
    /// Buffers that tasks of the regime read as the step before left them; ascending.
    pub carried: Vec<BufferId>,
}

pub(super) fn check(schedule: &Schedule, grids: &Grids, writes: &[Writes], found: &mut Found) -> Vec<Joins> {
    let mut joins: Vec<Joins> = vec![];
    mechanisms(schedule, found);
    for (r, (regime, writes)) in (0..).zip(schedule.regimes.iter().zip(writes)) {
        let waits = check_regime(r, regime, &schedule.program, grids, writes, found);
        let before = match schedule.regimes.get((r as usize).wrapping_sub(1)) {
            Some(earlier) => carried_from(r, regime, &waits, earlier, found),
            None => BTreeMap::new(),
        };
        let waited = regime.events.iter().zip(&waits).filter(|(event, waits)| event.carried && **waits > 0);
        let mut carried: Vec<BufferId> = waited.map(|(event, _)| event.buffer).collect();
        carried.sort_unstable();
        carried.dedup();
        let mut after = vec![None; regime.tasks.len()];
        regime.streams.iter().flatten().for_each(|run| after[run.task.index()] = run.after);
        joins.push(Joins { waits, before, after, carried });
    }
    joins
}

/// Packets have tags, and values that a counter announces have none, so all events about a buffer, in all regimes, are of one kind.
fn mechanisms(schedule: &Schedule, found: &mut Found) {
    let mut first: Vec<Option<(Mechanism, Entity)>> = vec![None; schedule.program.buffers.len()];
    for (b, buffer) in (0..).zip(&schedule.program.buffers) {
        let holds = !buffer.words
            || (buffer.space == Space::Exchange
                && buffer.phases == 2
                && matches!(buffer.dtype, DType::Bf16 | DType::F32));
        if !holds {
            found.add(Rule::Words, Entity::Buffer(BufferId(b)), || {
                let (space, phases, dtype) = (buffer.space.name(), buffer.phases, buffer.dtype);
                format!(
                    "expected words in two phases of an exchange, of bf16 or f32; found {phases} in {space}, of {dtype}"
                )
            });
        }
    }
    let tagged = |mechanism| mechanism != Mechanism::Counter;
    for (r, regime) in (0..).zip(&schedule.regimes) {
        for (e, event) in (0..).zip(&regime.events) {
            let at = Entity::Event(r, EventId(e));
            let words = schedule.program.buffers[event.buffer.index()].words;
            if words != (event.mechanism == Mechanism::Words) {
                found.add_with(Rule::Words, at, || {
                    let has = if words { "has words" } else { "has none" };
                    let message = format!("is `{}`, and {} {has}", event.mechanism.name(), event.buffer);
                    (message, vec![note(Entity::Buffer(event.buffer), has)])
                });
                continue;
            }
            let (mechanism, other) = *first[event.buffer.index()].get_or_insert((event.mechanism, at));
            if tagged(mechanism) != tagged(event.mechanism) {
                found.add_with(Rule::MixedMechanism, at, || {
                    let (buffer, name) = (event.buffer, event.mechanism.name());
                    let message = format!("is `{name}`, other events about {buffer} are `{}`", mechanism.name());
                    (message, vec![note(other, format!("is `{}`", mechanism.name()))])
                });
            }
        }
    }
}

/// How the tasks of a regime use one event.
#[derive(Clone)]
struct Signals {
    /// Tasks that write any of its columns; `None`: its columns make no sense.
    producers: Option<u32>,
    signalled: u32,
    last: Option<TaskId>,
    /// Grids of the signallers.
    first_grid: GridId,
    last_grid: GridId,
    waits: u32,
    carried_reported: bool,
}

fn check_regime(
    r: u32,
    regime: &Regime,
    program: &Program,
    grids: &Grids,
    writes: &Writes,
    found: &mut Found,
) -> Vec<u32> {
    let mut state: Vec<Signals> = (0..)
        .zip(&regime.events)
        .map(|(e, event)| {
            let in_buffer = region(Entity::Event(r, EventId(e)), event, program, grids, found);
            let producers = in_buffer.then(|| producers(event, grids, writes).len() as u32);
            let (first_grid, last_grid) = (GridId(u32::MAX), GridId(0));
            Signals { producers, signalled: 0, last: None, first_grid, last_grid, waits: 0, carried_reported: false }
        })
        .collect();
    for (t, task) in (0..).zip(&regime.tasks) {
        let id = TaskId(t);
        for &e in &task.signals {
            let (event, signals) = (&regime.events[e.index()], &mut state[e.index()]);
            if signals.last == Some(id) {
                found.add(Rule::DoubleSignal, Entity::Task(r, id), || format!("signals {e} twice, expected once"));
                continue;
            }
            signals.last = Some(id);
            let writes_it = grids.writes(task.grid).iter().any(|flow| {
                let meets = |row: u32| event.row.is_none_or(|of| of == row);
                flow.buffer == event.buffer
                    && flow.row(task).is_none_or(meets)
                    && flow.span(task).is_some_and(|s| s.0 < event.hi && event.lo < s.1)
            });
            if !writes_it {
                found.add(Rule::StraySignal, Entity::Task(r, id), || {
                    format!("signals {e} and writes none of columns {}..{} of {}", event.lo, event.hi, event.buffer)
                });
                continue;
            }
            signals.signalled += 1;
            signals.first_grid = signals.first_grid.min(task.grid);
            signals.last_grid = signals.last_grid.max(task.grid);
        }
    }
    for (e, (event, signals)) in (0..).zip(regime.events.iter().zip(&state)) {
        let Some(producers) = signals.producers else { continue };
        let id = EventId(e);
        if signals.signalled < producers {
            // The search takes long, so it is done only for violations that are kept.
            let all = if found.full(Rule::MissingSignal) { vec![] } else { self::producers(event, grids, writes) };
            let silent = all.iter().find(|task| !regime.tasks[task.index()].signals.contains(&id));
            let at = silent.map_or(Entity::Event(r, id), |&task| Entity::Task(r, task));
            found.add_with(Rule::MissingSignal, at, || {
                let message = format!(
                    "writes columns of {id} and does not signal it: {} of {producers} producers signal",
                    signals.signalled
                );
                (message, vec![note(Entity::Event(r, id), "is about columns it writes")])
            });
        }
        if event.count != producers || producers == 0 {
            found.add(Rule::EventCount, Entity::Event(r, id), || {
                format!("expected a count of {producers}, its producers, at least 1; found {}", event.count)
            });
        }
    }
    for (t, task) in (0..).zip(&regime.tasks) {
        check_waits(r, TaskId(t), task, regime, program, &mut state, found);
        for wait in task.waits.iter().filter(|w| state[w.event.index()].producers.is_some()) {
            unread(r, TaskId(t), task, wait, regime, grids, found);
        }
        for flow in grids.reads(task.grid) {
            let Some((lo, hi)) = flow.span(task) else { continue };
            for row in grids.rows(flow.buffer).each(flow.row(task)) {
                if let Some((from, to)) = unwaited(regime, task, flow.buffer, row, lo, hi) {
                    found.add(Rule::MissingWait, Entity::Task(r, TaskId(t)), || {
                        let each = grids.rows(flow.buffer).each_name();
                        let of_row = row.map_or(String::new(), |row| format!(" of {each} {row}"));
                        format!("reads columns {from}..{to}{of_row} of {} without a wait for them", flow.buffer)
                    });
                }
            }
        }
    }
    for run in regime.streams.iter().flatten() {
        check_after(r, run, regime, grids, &mut state, found);
    }
    state.iter().map(|s| s.waits).collect()
}

/// A loader waits before each run whose source the step chooses, for that choice, and before no other run.
fn check_after(r: u32, run: &Run, regime: &Regime, grids: &Grids, state: &mut [Signals], found: &mut Found) {
    let task = &regime.tasks[run.task.index()];
    let lookup = grids.lookups(task.grid).first();
    let at = Entity::Task(r, run.task);
    let (flow, id) = match (lookup, run.after) {
        (None, None) => return,
        (Some(flow), Some(id)) => (flow, id),
        (Some(flow), None) => {
            found.add(Rule::StreamAfter, at, || {
                format!("expected its run to wait for the choice in {}, found no wait", flow.buffer)
            });
            return;
        }
        (None, Some(id)) => {
            found.add_with(Rule::StreamAfter, at, || {
                let message = format!("expected its run to wait for nothing that the step makes, found {id}");
                (message, vec![note(Entity::Event(r, id), "is waited for")])
            });
            return;
        }
    };
    let (event, signals) = (&regime.events[id.index()], &mut state[id.index()]);
    signals.waits += 1;
    let row = event.row.is_none() || event.row == flow.row(task);
    let covers =
        row && event.buffer == flow.buffer && flow.span(task).is_some_and(|s| event.lo <= s.0 && s.1 <= event.hi);
    // The loader takes the choice from the word that it polls: packets of other columns may be overwritten before they are polled. A
    // counter orders memory, so the word is read after it as by any task.
    let exact = event.mechanism == Mechanism::Counter || flow.span(task) == Some((event.lo, event.hi));
    let ordered = !event.carried && signals.signalled > 0 && signals.last_grid < task.grid;
    if !(covers && exact && ordered) {
        found.add_with(Rule::StreamAfter, at, || {
            let message =
                format!("expected its run to wait for the choice of this step in {}, found {id}", flow.buffer);
            (message, vec![note(Entity::Event(r, id), "is waited for")])
        });
    }
}

/// The tasks that write any of an event's columns.
fn producers(event: &Event, grids: &Grids, writes: &Writes) -> Vec<TaskId> {
    let rows = grids.rows(event.buffer);
    let spans = rows.spans(event.row, event.lo, event.hi);
    let mut tasks: Vec<TaskId> =
        spans.flat_map(|(lo, hi)| writes.overlapping(event.buffer, lo, hi)).map(|w| w.task).collect();
    if rows.apart() {
        // A task that writes several rows is one producer.
        tasks.sort_unstable();
        tasks.dedup();
    }
    tasks
}

/// Whether an event's columns are whole packets of an exchange buffer.
fn region(at: Entity, event: &Event, program: &Program, grids: &Grids, found: &mut Found) -> bool {
    let buffer = &program.buffers[event.buffer.index()];
    let Event { lo, hi, .. } = *event;
    if buffer.space != Space::Exchange {
        found.add(Rule::EventRegion, at, || {
            format!("expected columns of an exchange buffer, {} is in {}", event.buffer, buffer.space.name())
        });
        return false;
    }
    // Which rows are in a part is not known here, so events are about single rows, or about all.
    let most = if grids.rows(event.buffer).single() { program.rows } else { 0 };
    if let Some(row) = event.row.filter(|row| *row >= most) {
        found.add(Rule::EventRegion, at, || match most {
            0 => format!("expected all rows of {}, which no task touches one by one; found row {row}", event.buffer),
            _ => format!("expected a row of {} below {most}, found {row}", event.buffer),
        });
        return false;
    }
    let per_packet = 4 / buffer.dtype.bytes() as u32;
    if lo >= hi || hi > buffer.cols || lo % per_packet != 0 || (hi % per_packet != 0 && hi != buffer.cols) {
        found.add(Rule::EventRegion, at, || {
            let (id, cols) = (event.buffer, buffer.cols);
            format!("expected whole packets of {per_packet} values below column {cols} of {id}, found {lo}..{hi}")
        });
        return false;
    }
    true
}

fn check_waits(
    r: u32,
    id: TaskId,
    task: &Task,
    regime: &Regime,
    program: &Program,
    state: &mut [Signals],
    found: &mut Found,
) {
    for wait in &task.waits {
        let (event, signals) = (&regime.events[wait.event.index()], &mut state[wait.event.index()]);
        signals.waits += 1;
        let Some(producers) = signals.producers.filter(|&p| p > 0) else { continue };
        let rule = if wait.count < producers { Rule::PartialJoin } else { Rule::UnreachableWait };
        if wait.count != producers {
            found.add_with(rule, Entity::Task(r, id), || {
                let message = format!("waits for {} signals of {}, expected {producers}", wait.count, wait.event);
                (message, vec![note(Entity::Event(r, wait.event), format!("has {producers} producers"))])
            });
        }
        if signals.signalled == 0 || signals.carried_reported {
            continue;
        }
        // Program order: the last write before the read is of this step, or else of the step before.
        let expected = if signals.last_grid < task.grid {
            Some(false)
        } else if signals.first_grid >= task.grid {
            Some(true)
        } else {
            None
        };
        let op = &program.grids[task.grid.index()].op;
        let wrong = match expected {
            None => Some("its producers lie on both sides of the reader in program order, expected one side"),
            Some(false) if event.carried => Some("expected the value of this step, it is carried from the step before"),
            Some(true) if !event.carried => Some("expected the value of the step before, it is not carried"),
            // In the first step of a text there is no step before; only these have another source: the prompt, and what is given.
            Some(true) if !matches!(op, Op::Select | Op::Join { .. }) => {
                Some("expected only `select` and `join` to read the step before")
            }
            Some(_) => None,
        };
        if let Some(wrong) = wrong {
            signals.carried_reported = true;
            found.add_with(Rule::Carried, Entity::Event(r, wait.event), || {
                (wrong.to_string(), vec![note(Entity::Task(r, id), format!("of {} waits for it", task.grid))])
            });
        }
    }
}

/// A reader polls the packets that it reads, and no others: a wait for more would order less than it says.
fn unread(r: u32, id: TaskId, task: &Task, wait: &Wait, regime: &Regime, grids: &Grids, found: &mut Found) {
    let event = &regime.events[wait.event.index()];
    let polls = |flow: &Flow| {
        flow.buffer == event.buffer
            && flow.row(task).is_none_or(|row| event.row == Some(row))
            && flow.span(task).is_some_and(|s| s.0 <= event.lo && event.hi <= s.1)
    };
    // What tells of no task orders nothing, so a wait for all that is dealt says no more than one for what a task polls of it.
    let orders = event.mechanism != Mechanism::Counter && grids.tells(task.grid, event.buffer);
    if orders && !grids.reads(task.grid).iter().any(polls) {
        found.add_with(Rule::UnreadWait, Entity::Task(r, id), || {
            let Event { buffer, lo, hi, .. } = *event;
            let message = format!("waits by packets for columns {lo}..{hi} of {buffer}, expected to read all of them");
            (message, vec![note(Entity::Event(r, wait.event), "is about them")])
        });
    }
}

/// The first columns of `lo..hi` that no wait of the task covers, of one row where rows are told apart.
fn unwaited(regime: &Regime, task: &Task, buffer: BufferId, row: Option<u32>, lo: u32, hi: u32) -> Option<(u32, u32)> {
    let about = |e: &&Event| e.buffer == buffer && e.row.is_none_or(|of| row == Some(of));
    let events = || task.waits.iter().map(|w| &regime.events[w.event.index()]).filter(about);
    if events().any(|e| e.lo <= lo && hi <= e.hi) {
        return None;
    }
    let mut parts: Vec<(u32, u32)> = events().map(|e| (e.lo, e.hi)).collect();
    parts.sort_unstable();
    let mut covered = lo;
    for (from, to) in parts {
        if from > covered {
            return Some((covered, from.min(hi)));
        }
        covered = covered.max(to);
        if covered >= hi {
            return None;
        }
    }
    Some((covered, hi))
}

/// What an event is about: buffer, row, first column, end.
type Columns = (BufferId, Option<u32>, u32, u32);

/// The first step of a regime waits for what the last step of the regime before has signalled.
fn carried_from(
    r: u32,
    regime: &Regime,
    waits: &[u32],
    earlier: &Regime,
    found: &mut Found,
) -> BTreeMap<EventId, EventId> {
    let carried = |regime: &Regime| -> Vec<(EventId, Event)> {
        (0..).map(EventId).zip(regime.events.iter().copied()).filter(|(_, e)| e.carried).collect()
    };
    let earlier: BTreeMap<Columns, (EventId, Event)> =
        carried(earlier).into_iter().map(|(id, e)| ((e.buffer, e.row, e.lo, e.hi), (id, e))).collect();
    let mut before = BTreeMap::new();
    for (id, event) in carried(regime).into_iter().filter(|(id, _)| waits[id.index()] > 0) {
        let same = |e: &Event| (e.mechanism, e.scope, e.count) == (event.mechanism, event.scope, event.count);
        match earlier.get(&(event.buffer, event.row, event.lo, event.hi)) {
            Some((other, e)) if same(e) => {
                before.insert(id, *other);
            }
            Some((other, e)) => found.add_with(Rule::CarriedMatch, Entity::Event(r, id), || {
                let told = |e: &Event| match e.scope {
                    Scope::Device => format!("{} signals by {}", e.count, e.mechanism.name()),
                    scope => format!("{} signals by {} of scope {}", e.count, e.mechanism.name(), scope.name()),
                };
                let message = format!("expected {}, found {}", told(e), told(&event));
                (message, vec![note(Entity::Event(r - 1, *other), "is the same event in the regime before")])
            }),
            None => found.add(Rule::CarriedMatch, Entity::Event(r, id), || {
                let Event { buffer, lo, hi, .. } = event;
                format!("r{} carries no event about columns {lo}..{hi} of {buffer} into r{r}", r - 1)
            }),
        }
    }
    before
}
