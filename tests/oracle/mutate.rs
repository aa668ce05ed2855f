//! Breaks schedules in named ways. A mutation returns the entities that it touched: a rejection must name one of them.

use super::explore::Rng;
use super::mutate_states::{
    any_position, chosen_twice, columns_of_state, inputs_of_state, other_device, other_state, part_of_sequences,
    place_of_state, slots_of_state, state_elsewhere,
};
use crate::proof_support::as_words;
use monobloc::dtype::DType;
use monobloc::ir::op::{Access, MatVec, Op, Role};
use monobloc::ir::program::{Content, Grid, Home, Operand, Part, Rows, Second, Space, VectorPart};
use monobloc::ir::schedule::{Event, Mechanism, Regime, Run, Schedule, Scope, SmemKind, Source, Task, Wait};
use monobloc::ir::table::{Holds, TableHome};
use monobloc::ir::{BufferId, EventId, GridId, LayerId, SmId, TableId, TaskId};
use monobloc::model::graph::{ExpertGroups, GroupScore, QueryScale, RopeId, RowView, TensorId};
use monobloc::target::{Target, TargetKind};
use monobloc::validate::{Entity, Violation};

/// Changes a schedule or its machine; `None` if it cannot be broken in this way.
pub type Mutate = fn(&mut Schedule, &mut Target, &mut Rng) -> Option<Vec<Entity>>;

/// The ways to break a schedule. Whether a mutant is unsafe depends on its place; the population counts both.
pub const CLASSES: &[(&str, Mutate)] = &[
    ("dropped wait", dropped_wait),
    ("threshold lowered", |s, _, r| threshold(s, r, false)),
    ("threshold raised", |s, _, r| threshold(s, r, true)),
    ("partial join", partial_join),
    ("wrong event", wrong_event),
    ("dropped signal", dropped_signal),
    ("doubled signal", doubled_signal),
    ("stray signal", stray_signal),
    ("self wait", self_wait),
    ("event count", event_count),
    ("event columns", event_columns),
    ("carried or not", carried),
    ("mechanism of one event", mechanism),
    ("queue entries swapped", queue_swapped),
    ("queue cycle over SMs", queue_cycle),
    ("task on another SM", moved),
    ("task dropped", task_dropped),
    ("missing producer", missing_producer),
    ("duplicate producer", duplicate_producer),
    ("index launched twice", launched_twice),
    ("overlapping regions", overlapping),
    ("misplaced buffer", misplaced),
    ("out-of-bounds region", out_of_bounds),
    ("uncovered element", uncovered),
    ("dtype mismatch", dtype),
    ("shape mismatch", shape),
    ("operand of another buffer", other_buffer),
    ("wrong space", space),
    ("wrong access", access),
    ("attribute", attribute),
    ("misaligned chunk", misaligned_chunk),
    ("ring order swapped", ring_order),
    ("ring over capacity", ring_capacity),
    ("chunk list unequal", chunk_list),
    ("other weights", other_weights),
    ("barrier count", barrier_count),
    ("flight limits", flight),
    (REUSED, reused),
    ("late reader", late_reader),
    ("cache row read before append", before_append),
    ("missing proxy fence", proxy),
    ("shared-memory overlap", smem_overlap),
    ("shared memory too small", smem_small),
    ("too many blocks", too_many_blocks),
    ("runtime index over its bound", runtime_index),
    ("regime borders", regime_border),
    ("fresh cache in one regime", fresh_cache),
    ("keys and values swapped in one regime", keys_as_values),
    ("cache of another layer", cache_of_another),
    ("regime between two alike", between_two_alike),
    ("attributes of one alternative", attributes_of_one),
    ("result of one alternative elsewhere", result_elsewhere),
    ("phases of a buffer", phases),
    ("owner changes with the regime", owner_changes),
    ("content of another kind", content),
    ("part of shared memory repeated", repeated_part),
    ("proxy after the first task", late_proxy),
    ("words of one regime", words_of_one_regime),
    ("words or packets", words_or_packets),
    ("pages of two sizes", page_sizes),
    ("fact that is not declared", undeclared),
    ("row of a task", row_of_task),
    ("row of an event", row_of_event),
    ("scope or home", scope_or_home),
    ("choice that a run does not wait for", early_choice),
    ("choice of another slot", other_slot),
    ("choice of another layer", other_layer),
    ("expert beyond the weights", beyond_weights),
    ("units of an expert", units_of_expert),
    ("inputs of a sum", inputs_of_sum),
    ("shares of another layer", other_shares),
    ("bias of another part", other_bias),
    ("choices overwritten", choices_overwritten),
    ("experts chosen twice", chosen_twice),
    ("state on another SM", state_elsewhere),
    ("slots of a state", slots_of_state),
    (OTHER_NET, other_state),
    ("place of a state", place_of_state),
    (PARTS, part_of_sequences),
    ("state of any position", any_position),
    ("columns of a state", columns_of_state),
    ("inputs of a state", inputs_of_state),
    ("task on another device", other_device),
];

/// Classes that need features that decoders of one row do not have.
pub const SEVERAL: [&str; 4] = ["pages of two sizes", "fact that is not declared", "row of a task", "row of an event"];

/// Classes that need experts.
pub const EXPERTS: [&str; 10] = [
    "choice that a run does not wait for",
    "choice of another slot",
    "choice of another layer",
    "expert beyond the weights",
    "units of an expert",
    "inputs of a sum",
    "shares of another layer",
    "bias of another part",
    "choices overwritten",
    "experts chosen twice",
];

/// Classes that need recurrent states.
pub const STATES: [&str; 8] = [
    "state on another SM",
    "slots of a state",
    OTHER_NET,
    "place of a state",
    PARTS,
    "state of any position",
    "columns of a state",
    "inputs of a state",
];

/// Classes that need several devices.
pub const DEVICES: [&str; 2] = ["scope or home", "task on another device"];

/// These need two nets, and one that divides the sequences.
pub const OTHER_NET: &str = "state of another net";
pub const PARTS: &str = "part of the sequences";

pub const REUSED: &str = "packet buffer reused across steps";

pub(super) fn pick<T>(random: &mut Rng, list: &[T]) -> Option<usize> {
    (!list.is_empty()).then(|| random.below(list.len()))
}

/// A regime and one of its tasks that satisfies `wanted`.
pub(super) fn a_task(
    s: &Schedule,
    random: &mut Rng,
    wanted: impl Fn(usize, TaskId) -> bool,
) -> Option<(usize, TaskId)> {
    let r = random.below(s.regimes.len());
    let all: Vec<TaskId> = (0..s.regimes[r].tasks.len()).map(TaskId::from).filter(|t| wanted(r, *t)).collect();
    Some((r, all[pick(random, &all)?]))
}

fn an_event(s: &Schedule, random: &mut Rng) -> Option<(usize, EventId)> {
    let r = random.below(s.regimes.len());
    Some((r, EventId::from(pick(random, &s.regimes[r].events)?)))
}

fn a_buffer(s: &Schedule, random: &mut Rng, wanted: impl Fn(Space) -> bool) -> Option<BufferId> {
    let all: Vec<usize> = (0..s.program.buffers.len()).filter(|&b| wanted(s.program.buffers[b].space)).collect();
    Some(BufferId::from(all[pick(random, &all)?]))
}

pub(super) fn task_at(r: usize, id: TaskId) -> Entity {
    Entity::Task(r as u32, id)
}

fn event_at(r: usize, id: EventId) -> Entity {
    Entity::Event(r as u32, id)
}

fn a_wait(s: &Schedule, random: &mut Rng) -> Option<(usize, TaskId, usize)> {
    let (r, id) = a_task(s, random, |r, t| !s.regimes[r].tasks[t.index()].waits.is_empty())?;
    Some((r, id, pick(random, &s.regimes[r].tasks[id.index()].waits)?))
}

fn dropped_wait(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let (r, id, w) = a_wait(s, random)?;
    let wait = s.regimes[r].tasks[id.index()].waits.remove(w);
    Some(vec![task_at(r, id), event_at(r, wait.event)])
}

fn threshold(s: &mut Schedule, random: &mut Rng, raised: bool) -> Option<Vec<Entity>> {
    let (r, id, w) = a_wait(s, random)?;
    let wait = &mut s.regimes[r].tasks[id.index()].waits[w];
    let by = 1 + random.below(2) as u32;
    wait.count = if raised { wait.count + by } else { wait.count.saturating_sub(by) };
    Some(vec![task_at(r, id), event_at(r, wait.event)])
}

/// Consistently waits for one producer less: it does not signal, and all counts are lower.
fn partial_join(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let (r, e) = an_event(s, random)?;
    let regime = &mut s.regimes[r];
    let by: Vec<usize> = (0..regime.tasks.len()).filter(|&t| regime.tasks[t].signals.contains(&e)).collect();
    if by.len() < 2 {
        return None;
    }
    let silent = by[random.below(by.len())];
    regime.tasks[silent].signals.retain(|x| *x != e);
    regime.events[e.index()].count -= 1;
    for task in &mut regime.tasks {
        task.waits.iter_mut().filter(|w| w.event == e).for_each(|w| w.count = w.count.saturating_sub(1));
    }
    Some(vec![task_at(r, TaskId::from(silent)), event_at(r, e)])
}

fn wrong_event(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let (r, id, w) = a_wait(s, random)?;
    let regime = &mut s.regimes[r];
    let other = EventId::from(pick(random, &regime.events)?);
    let count = regime.events[other.index()].count;
    let wait = &mut regime.tasks[id.index()].waits[w];
    let was = wait.event;
    if was == other {
        return None;
    }
    *wait = Wait { event: other, count };
    Some(vec![task_at(r, id), event_at(r, was), event_at(r, other)])
}

fn a_signal(s: &Schedule, random: &mut Rng) -> Option<(usize, TaskId, usize)> {
    let (r, id) = a_task(s, random, |r, t| !s.regimes[r].tasks[t.index()].signals.is_empty())?;
    Some((r, id, pick(random, &s.regimes[r].tasks[id.index()].signals)?))
}

fn dropped_signal(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let (r, id, at) = a_signal(s, random)?;
    let event = s.regimes[r].tasks[id.index()].signals.remove(at);
    Some(vec![task_at(r, id), event_at(r, event)])
}

fn doubled_signal(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let (r, id, at) = a_signal(s, random)?;
    let event = s.regimes[r].tasks[id.index()].signals[at];
    s.regimes[r].tasks[id.index()].signals.push(event);
    Some(vec![task_at(r, id), event_at(r, event)])
}

fn stray_signal(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let (r, e) = an_event(s, random)?;
    let id = TaskId::from(random.below(s.regimes[r].tasks.len()));
    if s.regimes[r].tasks[id.index()].signals.contains(&e) {
        return None;
    }
    s.regimes[r].tasks[id.index()].signals.push(e);
    // Half of the time, the event is changed, too.
    if random.below(2) == 0 {
        s.regimes[r].events[e.index()].count += 1;
    }
    Some(vec![task_at(r, id), event_at(r, e)])
}

fn self_wait(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let (r, id, at) = a_signal(s, random)?;
    let event = s.regimes[r].tasks[id.index()].signals[at];
    let count = s.regimes[r].events[event.index()].count;
    s.regimes[r].tasks[id.index()].waits.push(Wait { event, count });
    Some(vec![task_at(r, id), event_at(r, event)])
}

fn event_count(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let (r, e) = an_event(s, random)?;
    let event = &mut s.regimes[r].events[e.index()];
    let raised = random.below(2) == 0;
    event.count = if raised { event.count + 1 } else { event.count - 1 };
    // Half of the time, waits are changed, too.
    if random.below(2) == 0 {
        let count = event.count;
        for task in &mut s.regimes[r].tasks {
            task.waits.iter_mut().filter(|w| w.event == e).for_each(|w| w.count = count);
        }
    }
    Some(vec![event_at(r, e)])
}

fn event_columns(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let (r, e) = an_event(s, random)?;
    let event = &mut s.regimes[r].events[e.index()];
    match random.below(4) {
        0 => event.hi += 2,
        1 => event.hi = event.lo + (event.hi - event.lo) / 2,
        2 => event.lo += 2,
        _ => event.buffer = BufferId(random.below(s.program.buffers.len()) as u32),
    }
    Some(vec![event_at(r, e), Entity::Buffer(s.regimes[r].events[e.index()].buffer)])
}

fn carried(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let (r, e) = an_event(s, random)?;
    let event = &mut s.regimes[r].events[e.index()];
    event.carried = !event.carried;
    Some(vec![event_at(r, e)])
}

fn mechanism(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let (r, e) = an_event(s, random)?;
    let event = &mut s.regimes[r].events[e.index()];
    let was = event.mechanism;
    event.mechanism = Mechanism::ALL[random.below(3)];
    // The mutation counts only if the mechanism changed.
    (event.mechanism != was).then(|| vec![event_at(r, e), Entity::Buffer(event.buffer)])
}

/// Lists the runs of a regime's queues again.
pub(super) fn restream(s: &mut Schedule, r: usize) {
    let regime = &mut s.regimes[r];
    let runs: Vec<Run> = regime.streams.iter().flatten().copied().collect();
    for (stream, queue) in regime.streams.iter_mut().zip(&regime.queues) {
        *stream = queue.iter().filter_map(|id| runs.iter().find(|run| run.task == *id).copied()).collect();
    }
}

/// Swaps two entries of a queue at the distance `apart`, in all regimes that have them, with their streams.
fn swap_in_queue(s: &mut Schedule, random: &mut Rng, apart: usize) -> Option<Vec<Entity>> {
    let r = random.below(s.regimes.len());
    let sm = random.below(s.regimes[r].queues.len());
    let length = s.regimes[r].queues[sm].len();
    if length < apart + 1 {
        return None;
    }
    let at = random.below(length - apart);
    let (a, b) = (s.regimes[r].queues[sm][at], s.regimes[r].queues[sm][at + apart]);
    let key = |s: &Schedule, r: usize, t: TaskId| {
        let task = &s.regimes[r].tasks[t.index()];
        (task.grid, task.lo, task.j)
    };
    let (key_a, key_b) = (key(s, r, a), key(s, r, b));
    let mut touched = vec![Entity::Sm(r as u32, SmId::from(sm))];
    for other in 0..s.regimes.len() {
        let find = |wanted| {
            let tasks = (0..s.regimes[other].tasks.len()).map(TaskId::from);
            tasks.clone().find(|&t| key(s, other, t) == wanted)
        };
        if let (Some(a), Some(b)) = (find(key_a), find(key_b)) {
            for id in s.regimes[other].queues.iter_mut().flatten() {
                *id = if *id == a {
                    b
                } else if *id == b {
                    a
                } else {
                    *id
                };
            }
            touched.extend([task_at(other, a), task_at(other, b)]);
            restream(s, other);
        }
    }
    // Entries between them change their order relative to both.
    for t in s.regimes[r].queues[sm][at..=at + apart].iter() {
        touched.push(task_at(r, *t));
    }
    Some(touched)
}

fn queue_swapped(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    swap_in_queue(s, random, 1)
}

fn queue_cycle(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let apart = 2 + random.below(4);
    let mut touched = swap_in_queue(s, random, apart)?;
    if random.below(2) == 0 {
        let apart = 2 + random.below(4);
        touched.extend(swap_in_queue(s, random, apart).unwrap_or_default());
    }
    Some(touched)
}

/// Moves a task to a place in another queue, with its stream.
fn moved(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let (r, id) = a_task(s, random, |_, _| true)?;
    let queues = &mut s.regimes[r].queues;
    let from = queues.iter().position(|q| q.contains(&id))?;
    let to = random.below(queues.len());
    let place = queues[from].iter().position(|t| *t == id)?;
    queues[from].remove(place);
    // About as far along, or anywhere.
    let at = if random.below(2) == 0 { place.min(queues[to].len()) } else { random.below(queues[to].len() + 1) };
    queues[to].insert(at, id);
    restream(s, r);
    let sms = [from, to].map(|sm| Entity::Sm(r as u32, SmId::from(sm)));
    Some(vec![task_at(r, id), sms[0], sms[1]])
}

fn task_dropped(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let (r, id) = a_task(s, random, |_, _| true)?;
    s.regimes[r].queues.iter_mut().for_each(|q| q.retain(|t| *t != id));
    restream(s, r);
    Some(vec![task_at(r, id)])
}

/// A launch range without its first or last index, and without its weights.
fn missing_producer(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let wide = |r: usize, t: TaskId| {
        let task = &s.regimes[r].tasks[t.index()];
        task.hi - task.lo > 1
    };
    let (r, id) = a_task(s, random, wide)?;
    let regime = &mut s.regimes[r];
    let task = &mut regime.tasks[id.index()];
    if random.below(2) == 0 {
        task.lo += 1;
    } else {
        task.hi -= 1;
    }
    let range = (task.lo, task.hi);
    let run = regime.streams.iter_mut().flatten().find(|run| run.task == id);
    if let Some(Run { source: Source::Units { lo, hi, .. }, .. }) = run {
        (*lo, *hi) = range;
    }
    let grid = task.grid;
    restream(s, r);
    Some(vec![task_at(r, id), Entity::Grid(grid)])
}

/// An output goes to the buffer that another grid of the same width writes.
fn duplicate_producer(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let p = &mut s.program;
    let written = |g: usize| p.grids[g].operand(Role::Out).map(|o| o.buffer);
    let all: Vec<usize> = (0..p.grids.len()).filter(|&g| written(g).is_some()).collect();
    let (a, b) = (all[pick(random, &all)?], all[pick(random, &all)?]);
    let (from, to) = (written(a)?, written(b)?);
    let (x, y) = (&p.buffers[from.index()], &p.buffers[to.index()]);
    if from == to || (x.space, x.dtype, x.cols) != (y.space, y.dtype, y.cols) {
        return None;
    }
    p.grids[a].operands.iter_mut().filter(|o| o.role == Role::Out).for_each(|o| o.buffer = to);
    Some(vec![Entity::Grid(GridId::from(a)), Entity::Buffer(from), Entity::Buffer(to)])
}

fn launched_twice(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let (r, id) = a_task(s, random, |r, t| {
        let task = &s.regimes[r].tasks[t.index()];
        task.lo > 0 || s.program.grids[task.grid.index()].second.extent() > 1
    })?;
    let regime = &mut s.regimes[r];
    let task = &mut regime.tasks[id.index()];
    if task.lo > 0 {
        task.lo -= 1;
    } else {
        task.j = if task.j > 0 { task.j - 1 } else { 1 };
    }
    let (range, grid) = ((task.lo, task.hi), task.grid);
    let run = regime.streams.iter_mut().flatten().find(|run| run.task == id);
    if let Some(Run { source: Source::Units { lo, hi, .. }, .. }) = run {
        (*lo, *hi) = range;
    }
    restream(s, r);
    Some(vec![task_at(r, id), Entity::Grid(grid)])
}

/// Two buffers of an arena in one place, or one a little into the other.
fn overlapping(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let a = a_buffer(s, random, |space| space != Space::Private)?;
    let arena = |space| if space == Space::Constant { Space::Weight } else { space };
    let space = arena(s.program.buffers[a.index()].space);
    let b = a_buffer(s, random, |other| arena(other) == space)?;
    if a == b {
        return None;
    }
    let place = s.placement[b.index()]?;
    s.placement[a.index()] = Some(if random.below(2) == 0 { place } else { place.saturating_sub(256) });
    Some(vec![Entity::Buffer(a), Entity::Buffer(b)])
}

fn misplaced(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let b = a_buffer(s, random, |_| true)?;
    let place = &mut s.placement[b.index()];
    *place = match (random.below(4), *place) {
        (0, Some(_)) => None,
        (0, None) => Some(0),
        (1, Some(at)) => Some(at + 4),
        (2, Some(at)) => Some(at + 8),
        _ => Some(u64::MAX - 255),
    };
    Some(vec![Entity::Buffer(b), Entity::Schedule])
}

fn an_operand(s: &Schedule, random: &mut Rng) -> Option<(GridId, usize)> {
    let g = pick(random, &s.program.grids)?;
    Some((GridId::from(g), pick(random, &s.program.grids[g].operands)?))
}

fn out_of_bounds(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let (g, o) = an_operand(s, random)?;
    let operand = &mut s.program.grids[g.index()].operands[o];
    let buffer = operand.buffer;
    match random.below(4) {
        0 => {
            operand.cols.base += 8;
            operand.cols.limit += 8;
        }
        1 => operand.cols.limit += 8,
        2 => {
            let cols = &mut s.program.buffers[buffer.index()].cols;
            *cols = cols.saturating_sub(8);
        }
        _ => operand.cols.stride += 8,
    }
    Some(vec![Entity::Grid(g), Entity::Buffer(buffer)])
}

/// More columns than are written, or fewer writes than there are columns.
fn uncovered(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    if random.below(2) == 0 {
        let b = a_buffer(s, random, |space| space != Space::Weight)?;
        s.program.buffers[b.index()].cols += 8;
        return Some(vec![Entity::Buffer(b)]);
    }
    let (g, o) = an_operand(s, random)?;
    let operand = &mut s.program.grids[g.index()].operands[o];
    operand.cols.len = operand.cols.len.saturating_sub(2);
    Some(vec![Entity::Grid(g), Entity::Buffer(operand.buffer)])
}

fn dtype(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let b = a_buffer(s, random, |_| true)?;
    let buffer = &mut s.program.buffers[b.index()];
    let was = buffer.dtype;
    buffer.dtype = [DType::F32, DType::Bf16, DType::F16, DType::I32][random.below(4)];
    (buffer.dtype != was).then(|| vec![Entity::Buffer(b)])
}

fn shape(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let g = pick(random, &s.program.grids)?;
    let k = random.below(3);
    let grid = &mut s.program.grids[g];
    match &mut grid.op {
        Op::MatVec(m) if k == 0 => m.k += 8,
        Op::MatVec(m) if k == 1 => m.rows += 8,
        Op::MatVec(m) if random.below(2) == 0 => m.own_input = !m.own_input,
        Op::Attention(a) if k == 0 => a.head_dim *= 2,
        Op::Attention(a) if k == 1 => a.heads *= 2,
        Op::Attention(a) => a.splits += 1,
        Op::AttentionMerge { splits, .. } if k == 0 => *splits += 1,
        Op::AttentionMerge { head_dim, .. } => *head_dim += 8,
        Op::Embed { everywhere, .. } | Op::NormAdd { everywhere, .. } if k == 0 => *everywhere = !*everywhere,
        Op::NormAdd { width, .. } => *width += 8,
        Op::Route(route) if k == 0 => route.experts += 1,
        Op::Route(route) if k == 1 => route.top_k += 1,
        Op::Combine(combine) if k == 0 => combine.slots += 1,
        Op::Combine(combine) if k == 1 => combine.shared = combine.shared.is_none().then_some(1.0),
        Op::Combine(combine) => combine.width += 8,
        _ if k == 2 => grid.n += 1,
        _ => {
            grid.second = match grid.second {
                Second::Axis(n) => Second::Axis(n + 1),
                Second::Ordinal(n) => Second::Ordinal(n + 1),
                Second::Dealt(n) => Second::Dealt(n + 1),
            }
        }
    }
    Some(vec![Entity::Grid(GridId::from(g))])
}

fn other_buffer(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let (g, o) = an_operand(s, random)?;
    let was = s.program.grids[g.index()].operands[o].buffer;
    let space = s.program.buffers[was.index()].space;
    let b = a_buffer(s, random, |other| other == space)?;
    let (x, y) = (&s.program.buffers[was.index()], &s.program.buffers[b.index()]);
    // A buffer of the same shape, so that only the contents differ.
    if b == was || (x.dtype, x.rows, x.cols) != (y.dtype, y.rows, y.cols) {
        return None;
    }
    s.program.grids[g.index()].operands[o].buffer = b;
    Some(vec![Entity::Grid(g), Entity::Buffer(was), Entity::Buffer(b)])
}

fn space(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let b = a_buffer(s, random, |_| true)?;
    let was = s.program.buffers[b.index()].space;
    let now = Space::ALL[random.below(Space::ALL.len())];
    s.program.buffers[b.index()].space = now;
    (was != now).then(|| vec![Entity::Buffer(b)])
}

fn access(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let (g, o) = an_operand(s, random)?;
    let operand = &mut s.program.grids[g.index()].operands[o];
    let was = operand.clone();
    match random.below(4) {
        0 => operand.access = [Access::Read, Access::Write, Access::Update, Access::Stream][random.below(4)],
        1 => operand.rows = Rows::ALL[random.below(5)],
        2 => operand.role = Role::ALL[random.below(Role::ALL.len())],
        _ => operand.cols.only_j = [None, Some(0), Some(1)][random.below(3)],
    }
    let is_changed = *operand != was;
    // Values of a table that lie in the buffer are checked where the table is declared.
    let of_tables = (0u32..).zip(&s.program.tables).filter(|(_, table)| table.home == TableHome::Device(was.buffer));
    let tables = of_tables.map(|(t, _)| Entity::Table(TableId::from(t as usize)));
    is_changed.then(|| tables.chain([Entity::Grid(g)]).collect())
}

fn attribute(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let g = pick(random, &s.program.grids)?;
    let k = random.below(5);
    match &mut s.program.grids[g].op {
        Op::MatVec(MatVec { norm: Some(norm), .. }) if k < 2 => norm.eps = [f32::NAN, 0.0][k],
        Op::MatVec(MatVec { rows, .. }) if k == 2 => *rows = 0,
        Op::MatVec(MatVec { k, .. }) => *k = 0,
        Op::Attention(a) => match k {
            0 => a.scale = f32::NAN,
            1 => a.window = Some(0),
            2 => a.group = 0,
            3 => a.head_dim += 1,
            _ => a.rotary = a.head_dim + 2,
        },
        Op::AttentionMerge { splits, .. } => *splits = 0,
        Op::NormAdd { norm, .. } => norm.eps = -1.0,
        Op::Embed { scale, .. } | Op::Join { scale } => *scale = f32::INFINITY,
        Op::Route(route) => match k {
            0 => route.experts = 0,
            1 => route.top_k = route.experts + 1,
            2 => route.scale = f32::NAN,
            3 => route.normalise = Some(-1.0),
            _ => route.groups = Some(ExpertGroups { count: route.experts + 1, kept: 1, score: GroupScore::Max }),
        },
        Op::Combine(combine) if k < 2 => combine.scale = [f32::NAN, f32::INFINITY][k],
        Op::Combine(combine) if k == 2 => combine.width = 0,
        Op::Combine(combine) => combine.slots = 0,
        Op::Mix(mix) => match k {
            0 => mix.eps = f32::NAN,
            1 => mix.kernel = 0,
            2 => mix.key_heads = 0,
            3 => mix.key_dim += 1,
            _ => mix.value_dim = 0,
        },
        Op::Convolve(convolve) if k < 2 => convolve.kernel = k as u32,
        Op::Convolve(convolve) => convolve.channels += 1,
        Op::Scan(scan) => match k {
            0 => scan.scales[1] = f32::NAN,
            1 => scan.kernel = 0,
            2 => scan.groups = 0,
            3 => scan.head_dim += 1,
            _ => scan.state = 0,
        },
        Op::GroupNorm(norm) if k < 2 => norm.eps = [f32::NAN, 0.0][k],
        Op::GroupNorm(norm) if k == 2 => norm.groups = 0,
        Op::GroupNorm(norm) => norm.gate = Some(f32::INFINITY),
        Op::Select | Op::Report => return None,
    }
    Some(vec![Entity::Grid(GridId::from(g))])
}

fn a_run(s: &Schedule, random: &mut Rng, wanted: fn(&Source) -> bool) -> Option<(usize, usize, usize)> {
    let r = random.below(s.regimes.len());
    let all: Vec<(usize, usize)> = s.regimes[r]
        .streams
        .iter()
        .enumerate()
        .flat_map(|(sm, stream)| stream.iter().enumerate().map(move |(i, run)| (sm, i, run.source)))
        .filter(|(_, _, source)| wanted(source))
        .map(|(sm, i, _)| (sm, i))
        .collect();
    let (sm, i) = all[pick(random, &all)?];
    Some((r, sm, i))
}

fn run_entities(s: &Schedule, r: usize, sm: usize, i: usize) -> Vec<Entity> {
    vec![Entity::Sm(r as u32, SmId::from(sm)), task_at(r, s.regimes[r].streams[sm][i].task)]
}

fn misaligned_chunk(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    if random.below(4) == 0 {
        s.machine.ring.slot_bytes -= [16, 256, 512][random.below(3)];
        return Some(vec![Entity::Machine, Entity::Schedule]);
    }
    let (r, sm, i) = a_run(s, random, |source| matches!(source, Source::History { .. }))?;
    let touched = run_entities(s, r, sm, i);
    if let Source::History { rows } = &mut s.regimes[r].streams[sm][i].source {
        *rows = match random.below(4) {
            0 => *rows + 8,
            1 => rows.saturating_sub(1),
            2 => 0,
            _ => *rows * 2,
        };
    }
    Some(touched)
}

fn ring_order(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let r = random.below(s.regimes.len());
    let sm = random.below(s.regimes[r].streams.len());
    let length = s.regimes[r].streams[sm].len();
    if length < 2 {
        return None;
    }
    let at = random.below(length - 1);
    let to = if random.below(2) == 0 { at + 1 } else { random.below(length) };
    if at == to {
        return None;
    }
    let mut touched = run_entities(s, r, sm, at);
    touched.extend(run_entities(s, r, sm, to));
    s.regimes[r].streams[sm].swap(at, to);
    Some(touched)
}

fn ring_capacity(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let ring = &mut s.machine.ring;
    match random.below(3) {
        0 => (ring.slots, ring.flight_low, ring.flight_high, ring.flight_free) = (1, 1, 1, 1),
        1 => (ring.slots, ring.flight_low, ring.flight_high, ring.flight_free) = (0, 0, 0, 0),
        _ => ring.slots *= 2,
    }
    Some(vec![Entity::Machine, Entity::SmemPart(0)])
}

fn chunk_list(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let (r, sm, i) = a_run(s, random, |_| true)?;
    let touched = run_entities(s, r, sm, i);
    let stream = &mut s.regimes[r].streams[sm];
    match (random.below(4), &mut stream[i].source) {
        (0, _) => drop(stream.remove(i)),
        (1, _) => stream.insert(i, stream[i]),
        (2, Source::Units { hi, .. }) => *hi += 1,
        (_, Source::Units { hi, .. }) => *hi -= 1,
        (_, source) => *source = Source::Units { buffer: BufferId(0), lo: 0, hi: 1 },
    }
    Some(touched)
}

/// A run streams other units, or those of another matrix.
fn other_weights(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let (r, sm, i) = a_run(s, random, |source| matches!(source, Source::Units { .. }))?;
    let mut touched = run_entities(s, r, sm, i);
    let other = a_buffer(s, random, |space| space == Space::Weight)?;
    if let Source::Units { buffer, lo, hi } = &mut s.regimes[r].streams[sm][i].source {
        match random.below(3) {
            0 if *lo > 0 => (*lo, *hi) = (*lo - 1, *hi - 1),
            1 if *buffer != other => {
                *buffer = other;
                touched.push(Entity::Buffer(other));
            }
            _ => (*lo, *hi) = (*lo + 1, *hi + 1),
        }
    }
    Some(touched)
}

fn barrier_count(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let (ring, warps) = (&mut s.machine.ring, &mut s.machine.consumer_warps);
    match random.below(4) {
        0 => ring.arrivals += 1,
        1 => ring.arrivals = ring.arrivals.saturating_sub(1),
        2 => ring.arrivals *= 2,
        _ => *warps += 1,
    }
    Some(vec![Entity::Machine])
}

fn flight(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let ring = &mut s.machine.ring;
    match random.below(4) {
        0 => ring.flight_low = 0,
        1 => (ring.flight_low, ring.flight_high) = (0, 0),
        2 => ring.flight_free = ring.slots + 1,
        _ => ring.flight_high = ring.slots + 1,
    }
    Some(vec![Entity::Machine])
}

/// Fewer copies of a buffer that is written before all reads of the previous step are done.
fn reused(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let several: Vec<usize> = (0..s.program.buffers.len()).filter(|&b| s.program.buffers[b].phases > 1).collect();
    let b = several[pick(random, &several)?];
    s.program.buffers[b].phases = 1;
    Some(vec![Entity::Buffer(BufferId::from(b))])
}

/// A task that reads after everything else of its SM: the next step may come first.
fn late_reader(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let r = random.below(s.regimes.len());
    let sm = random.below(s.regimes[r].queues.len());
    let queue = &mut s.regimes[r].queues[sm];
    if queue.len() < 3 {
        return None;
    }
    let at = 1 + random.below(queue.len() - 1);
    let id = queue.remove(at);
    queue.push(id);
    let mut touched = vec![Entity::Sm(r as u32, SmId::from(sm))];
    touched.extend(queue[at..].iter().map(|t| task_at(r, *t)));
    restream(s, r);
    Some(touched)
}

fn before_append(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let mut touched = vec![];
    if random.below(2) == 0 {
        // The release at the end of a step is gone.
        for r in 0..s.regimes.len() {
            for e in 0..s.regimes[r].events.len() {
                let event = &mut s.regimes[r].events[e];
                if event.carried && event.mechanism == Mechanism::Fenced {
                    event.mechanism = Mechanism::Packets;
                    touched.push(event_at(r, EventId::from(e)));
                }
            }
        }
    } else {
        // One SM begins a step without it.
        let (r, id) = a_task(s, random, |r, t| {
            let task = &s.regimes[r].tasks[t.index()];
            task.waits.iter().any(|w| s.regimes[r].events[w.event.index()].carried)
        })?;
        let events: Vec<EventId> = s.regimes[r].tasks[id.index()].waits.iter().map(|w| w.event).collect();
        s.regimes[r].tasks[id.index()].waits.clear();
        touched.push(task_at(r, id));
        touched.extend(events.into_iter().map(|e| event_at(r, e)));
    }
    (!touched.is_empty()).then_some(touched)
}

fn proxy(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let r = random.below(s.regimes.len());
    let all: Vec<usize> = (0..s.regimes[r].events.len()).filter(|&e| s.regimes[r].events[e].proxy).collect();
    let e = all[pick(random, &all)?];
    s.regimes[r].events[e].proxy = false;
    // The loaders of the regime fail.
    let mut touched = vec![event_at(r, EventId::from(e))];
    touched.extend((0..s.regimes[r].tasks.len()).map(|t| task_at(r, TaskId::from(t))).filter(|at| match at {
        Entity::Task(r, t) => s.regimes[*r as usize].tasks[t.index()].waits.iter().any(|w| w.event.index() == e),
        _ => false,
    }));
    Some(touched)
}

fn smem_overlap(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let i = pick(random, &s.machine.smem)?;
    let part = &mut s.machine.smem[i];
    part.offset = match random.below(3) {
        0 => part.offset.saturating_sub(128),
        1 => part.offset + 128,
        _ => 0,
    };
    let i = i as u32;
    Some(vec![Entity::SmemPart(i), Entity::SmemPart(i + 1), Entity::Machine])
}

fn smem_small(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let i = pick(random, &s.machine.smem)?;
    let part = &mut s.machine.smem[i];
    part.bytes = match random.below(3) {
        0 => part.bytes / 2,
        1 => 0,
        _ => part.bytes.saturating_mul(1000),
    };
    Some(vec![Entity::SmemPart(i as u32), Entity::SmemPart(i as u32 + 1), Entity::Machine])
}

fn too_many_blocks(s: &mut Schedule, target: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    match random.below(3) {
        0 => target.spec.sm_count = s.machine.sms - 1,
        1 => target.spec.registers_per_sm = 4096,
        _ => target.spec.threads_per_block_max = 128,
    }
    Some(vec![Entity::Machine])
}

fn runtime_index(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let p = &mut s.program;
    let of =
        |role: Role| -> Vec<BufferId> { p.grids.iter().filter_map(|g| g.operand(role)).map(|o| o.buffer).collect() };
    let (what, buffers) = match random.below(4) {
        0 => (0, of(Role::Table)),
        1 => (1, of(Role::Rope)),
        2 => (1, of(Role::HistoryK)),
        _ => (2, vec![]),
    };
    if what == 2 {
        let cache = *of(Role::HistoryK).first()?;
        p.context_max += 1;
        // Tables bound positions by it.
        let tables = (0..p.tables.len()).map(|t| Entity::Table(TableId::from(t)));
        return Some(tables.chain([Entity::Schedule, Entity::Buffer(cache)]).collect());
    }
    let b = buffers[pick(random, &buffers)?];
    p.buffers[b.index()].rows -= 1;
    Some(vec![Entity::Buffer(b)])
}

fn regime_border(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let r = random.below(s.regimes.len());
    let context_max = s.program.context_max;
    let regime = &mut s.regimes[r];
    let was = regime.from_position;
    regime.from_position = [0, was + 1, context_max, context_max - 1][random.below(4)];
    (regime.from_position != was).then(|| vec![Entity::Regime(r as u32), Entity::Regime(r as u32 + 1)])
}

/// A grid of attention, mostly one that not every regime launches.
fn an_alternative(s: &Schedule, random: &mut Rng) -> Option<GridId> {
    let all: Vec<usize> =
        (0..s.program.grids.len()).filter(|&g| matches!(s.program.grids[g].op, Op::Attention(_))).collect();
    let everywhere = |g: &usize| {
        let launches = |regime: &Regime| regime.tasks.iter().any(|task| task.grid.index() == *g);
        s.regimes.iter().all(launches)
    };
    let some: Vec<usize> = all.iter().copied().filter(|g| !everywhere(g)).collect();
    let list = if some.is_empty() || random.below(8) == 0 { &all } else { &some };
    Some(GridId::from(list[pick(random, list)?]))
}

const KEYS: [Role; 2] = [Role::HistoryK, Role::AppendK];
const VALUES: [Role; 2] = [Role::HistoryV, Role::AppendV];

fn cache_of(s: &Schedule, g: GridId, roles: [Role; 2]) -> Option<BufferId> {
    s.program.grids[g.index()].operand(roles[1]).map(|o| o.buffer)
}

fn set_cache(s: &mut Schedule, g: GridId, roles: [Role; 2], buffer: BufferId) {
    let operands = &mut s.program.grids[g.index()].operands;
    operands.iter_mut().filter(|o| roles.contains(&o.role)).for_each(|o| o.buffer = buffer);
}

/// The first free place at the end of the arena of a space.
fn arena_end(s: &Schedule, space: Space) -> u64 {
    let placed = s.program.buffers.iter().zip(&s.placement).filter(|(b, _)| b.space == space);
    let ends = placed.filter_map(|(b, place)| Some((*place)? + u64::from(b.rows) * u64::from(b.cols) * 16 * 8));
    ends.max().unwrap_or(0).next_multiple_of(1 << 16)
}

fn fresh_cache(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let g = an_alternative(s, random)?;
    let mut touched = vec![Entity::Grid(g)];
    let sides = [&[KEYS, VALUES][..], &[KEYS], &[VALUES]][random.below(3)];
    for &roles in sides {
        let was = cache_of(s, g, roles)?;
        let fresh = BufferId::from(s.program.buffers.len());
        s.placement.push(Some(arena_end(s, Space::Cache)));
        s.program.buffers.push(s.program.buffers[was.index()].clone());
        set_cache(s, g, roles, fresh);
        touched.extend([was, fresh].map(Entity::Buffer));
    }
    Some(touched)
}

fn keys_as_values(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let g = an_alternative(s, random)?;
    let (k, v) = (cache_of(s, g, KEYS)?, cache_of(s, g, VALUES)?);
    set_cache(s, g, KEYS, v);
    set_cache(s, g, VALUES, k);
    // Sometimes an attribute changes, too. An attention that is compared with no other one may have any.
    if random.below(3) == 0 {
        attribute_of(s, g, random);
    }
    Some(vec![Entity::Grid(g), Entity::Buffer(k), Entity::Buffer(v)])
}

/// Two layers that use each other's caches, in one regime or in all, or one layer that uses those of another.
fn cache_of_another(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let (a, b) = (an_alternative(s, random)?, an_alternative(s, random)?);
    let both = random.below(4) > 0;
    let mut touched = vec![Entity::Grid(a), Entity::Grid(b)];
    for roles in [KEYS, VALUES] {
        let (of_a, of_b) = (cache_of(s, a, roles)?, cache_of(s, b, roles)?);
        if of_a == of_b {
            return None;
        }
        set_cache(s, a, roles, of_b);
        if both {
            set_cache(s, b, roles, of_a);
        }
        touched.extend([of_a, of_b].map(Entity::Buffer));
    }
    Some(touched)
}

/// The first regime comes back after the second, whose attention sometimes has caches of its own.
fn between_two_alike(s: &mut Schedule, target: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let last = s.regimes.last()?.from_position;
    if s.regimes.len() != 2 || last + 1 >= s.program.context_max {
        return None;
    }
    let room = (s.program.context_max - last - 1) as usize;
    let third = Regime { from_position: last + 1 + random.below(room) as u32, ..s.regimes[0].clone() };
    s.regimes.push(third);
    let mut touched = vec![Entity::Regime(2), Entity::Schedule];
    match random.below(4) {
        0 => {}
        1 => touched.extend(keys_as_values(s, target, random)?),
        _ => touched.extend(fresh_cache(s, target, random)?),
    }
    Some(touched)
}

fn attribute_of(s: &mut Schedule, g: GridId, random: &mut Rng) {
    let other_constant = |s: &Schedule, random: &mut Rng, role: Role| {
        let was = s.program.grids[g.index()].operand(role)?.buffer;
        let is = |b: &usize| {
            let (x, y) = (&s.program.buffers[*b], &s.program.buffers[was.index()]);
            (x.space, x.dtype, x.rows, x.cols) == (y.space, y.dtype, y.rows, y.cols) && *b != was.index()
        };
        let all: Vec<usize> = (0..s.program.buffers.len()).filter(is).collect();
        Some(BufferId::from(all[pick(random, &all)?]))
    };
    let roles = [Role::Rope, Role::QNormWeight, Role::KNormWeight, Role::CacheScales, Role::Sinks];
    let role = roles[random.below(5)];
    let constant = other_constant(s, random, role);
    let grid = &mut s.program.grids[g.index()];
    let Op::Attention(a) = &mut grid.op else { return };
    match (random.below(11), constant) {
        (0, Some(buffer)) => {
            grid.operands.iter_mut().filter(|o| o.role == role).for_each(|o| o.buffer = buffer);
        }
        (1, _) => a.softcap = if a.softcap.is_none() { Some(20.0) } else { None },
        (2, _) => a.window = if a.window.is_none() { Some(2) } else { None },
        (3, _) => a.window = Some(a.window.unwrap_or(3) + 1),
        (4, _) => a.interleaved = !a.interleaved,
        (5, _) if a.q_norm.is_some() => a.q_norm.iter_mut().for_each(|n| n.norm.eps *= 2.0),
        (6, _) => a.norm_after_rope = !a.norm_after_rope,
        (7, _) => a.query_scale = Some(QueryScale { beta: 0.5, original: 4 }).filter(|_| a.query_scale.is_none()),
        (8, _) => a.sinks = !a.sinks,
        (9, _) => a.gate = !a.gate,
        _ => a.scale *= 0.5,
    }
}

fn attributes_of_one(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let g = an_alternative(s, random)?;
    let was = s.program.grids[g.index()].clone();
    attribute_of(s, g, random);
    (s.program.grids[g.index()] != was).then(|| vec![Entity::Grid(g)])
}

/// The results of two grids that make heads change places.
fn result_elsewhere(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let made = |g: &usize| matches!(s.program.grids[*g].op, Op::Attention(_) | Op::AttentionMerge { .. });
    let all: Vec<usize> = (0..s.program.grids.len()).filter(made).collect();
    let (a, b) = (all[pick(random, &all)?], all[pick(random, &all)?]);
    let out = |g: usize| s.program.grids[g].operand(Role::Out).map(|o| o.buffer);
    let (of_a, of_b) = (out(a)?, out(b)?);
    if of_a == of_b {
        return None;
    }
    for (g, buffer) in [(a, of_b), (b, of_a)] {
        s.program.grids[g].operands.iter_mut().filter(|o| o.role == Role::Out).for_each(|o| o.buffer = buffer);
    }
    let grids = [a, b].map(|g| Entity::Grid(GridId::from(g)));
    Some(grids.into_iter().chain([of_a, of_b].map(Entity::Buffer)).collect())
}

/// Another number of copies of an exchange buffer, with room for them; sometimes its writer moves with the regime.
fn phases(s: &mut Schedule, target: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let b = a_buffer(s, random, |space| space == Space::Exchange)?;
    s.placement[b.index()] = Some(arena_end(s, Space::Exchange));
    s.program.buffers[b.index()].phases = [1, 2, 3, 4, 5, 8][random.below(6)];
    let mut touched = vec![Entity::Buffer(b)];
    if random.below(2) == 0 {
        touched.extend(owner_changes(s, target, random).unwrap_or_default());
    }
    Some(touched)
}

/// A task without weights runs on another SM in one regime.
fn owner_changes(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let free = |r: usize, t: TaskId| {
        let op = &s.program.grids[s.regimes[r].tasks[t.index()].grid.index()].op;
        matches!(op, Op::Report | Op::Attention(_) | Op::AttentionMerge { .. })
    };
    let (r, id) = a_task(s, random, free)?;
    let (grid, queues) = (s.regimes[r].tasks[id.index()].grid, &mut s.regimes[r].queues);
    let from = queues.iter().position(|q| q.contains(&id))?;
    let to = random.below(queues.len());
    let place = queues[from].iter().position(|t| *t == id)?;
    queues[from].remove(place);
    let at = place.clamp(1, queues[to].len().max(1)).min(queues[to].len());
    queues[to].insert(at, id);
    restream(s, r);
    let sms = [from, to].map(|sm| Entity::Sm(r as u32, SmId::from(sm)));
    Some(vec![task_at(r, id), Entity::Grid(grid), sms[0], sms[1]])
}

fn content(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let b = a_buffer(s, random, Space::immutable)?;
    let buffer = &mut s.program.buffers[b.index()];
    let was = buffer.content.clone();
    buffer.content = match random.below(6) {
        0 => Some(Content::RopeTable(RopeId(9))),
        5 => Some(Content::CacheScales(LayerId(0))),
        1 => Some(Content::Tensor(TensorId(0))),
        2 => Some(Content::Vectors {
            parts: vec![VectorPart { view: None, len: buffer.cols }],
            scale: 1.0,
            offset: 0.0,
            interleave: 1,
        }),
        3 => {
            let part = Part { view: RowView::range(TensorId(0), 0), rows: buffer.rows };
            Some(Content::Rows { parts: vec![part], interleave: 1 })
        }
        _ => None,
    };
    let kind = |content: &Option<Content>| content.as_ref().map(std::mem::discriminant);
    (kind(&was) != kind(&buffer.content)).then(|| vec![Entity::Buffer(b)])
}

fn repeated_part(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let i = pick(random, &s.machine.smem)?;
    let was = std::mem::replace(&mut s.machine.smem[i].kind, SmemKind::ALL[random.below(7)]);
    let mut touched: Vec<Entity> = (0..s.machine.smem.len() as u32).map(Entity::SmemPart).collect();
    touched.push(Entity::Machine);
    (s.machine.smem[i].kind != was).then_some(touched)
}

fn late_proxy(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let (r, e) = an_event(s, random)?;
    let event = &mut s.regimes[r].events[e.index()];
    if event.carried {
        return None;
    }
    event.proxy = true;
    Some(vec![event_at(r, e)])
}

/// Words instead of packets, with the buffers that kernels of words need. Other regimes do not clear the records of attention.
fn words_of_one_regime(s: &mut Schedule, target: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    // Kernels for one row have no words.
    target.kind = TargetKind::Cpu;
    let written = |regime: &Regime, b: BufferId| {
        let out = |t: &Task| s.program.grids[t.grid.index()].operand(Role::Out).map(|o| o.buffer);
        regime.tasks.iter().any(|t| out(t) == Some(b))
    };
    let tagged = |b: &BufferId| {
        let mut events = s.regimes.iter().flat_map(|r| &r.events).filter(|e| e.buffer == *b);
        events.all(|e| e.mechanism == Mechanism::Packets)
    };
    let of_values = |b: &BufferId| {
        let buffer = &s.program.buffers[b.index()];
        buffer.space == Space::Exchange && buffer.dtype != DType::I32 && !buffer.words
    };
    let all = (0..s.program.buffers.len()).map(BufferId::from).filter(|b| of_values(b) && tagged(b));
    let (everywhere, some): (Vec<_>, Vec<_>) = all.partition(|b| s.regimes.iter().all(|r| written(r, *b)));
    let list = if some.is_empty() || random.below(4) == 0 { everywhere } else { some };
    let b = list[pick(random, &list)?];
    as_words(s, b);
    let mut touched: Vec<Entity> = (0..s.machine.smem.len() as u32).map(Entity::SmemPart).collect();
    touched.extend([Entity::Buffer(b), Entity::Machine]);
    Some(touched)
}

/// A buffer of words without events about words, or one of packets with events about words.
fn words_or_packets(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let (r, e) = an_event(s, random)?;
    let event = &mut s.regimes[r].events[e.index()];
    event.mechanism = if event.mechanism == Mechanism::Words { Mechanism::Packets } else { Mechanism::Words };
    Some(vec![event_at(r, e), Entity::Buffer(event.buffer)])
}

/// Half as many rows in the pages of one cache, sometimes with as many entries as its positions then need.
fn page_sizes(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let paged: Vec<usize> = (0..s.program.buffers.len()).filter(|&b| s.program.buffers[b].paging.is_some()).collect();
    let b = paged[pick(random, &paged)?];
    let rows = |of: usize| s.program.buffers[of].paging.map_or(0, |paging| paging.rows);
    // A second mutation of this kind may give all caches the same pages again: smaller ones, with nothing wrong.
    if paged.iter().all(|&other| other == b || rows(other) == rows(b) / 2) {
        return None;
    }
    let buffer = &mut s.program.buffers[b];
    let paging = buffer.paging.as_mut()?;
    paging.rows /= 2;
    let table = paging.table;
    if random.below(2) == 0 {
        buffer.rows /= 2;
    }
    if random.below(4) > 0 {
        s.program.tables[table.index()].cols *= 2;
    }
    let caches = paged.into_iter().map(|b| Entity::Buffer(BufferId::from(b)));
    Some(caches.chain([Entity::Table(table)]).collect())
}

fn undeclared(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let with: Vec<usize> = (0..s.program.tables.len()).filter(|&t| !s.program.tables[t].facts.is_empty()).collect();
    let t = with[pick(random, &with)?];
    let fact = random.below(s.program.tables[t].facts.len());
    s.program.tables[t].facts.remove(fact);
    Some(vec![Entity::Table(TableId::from(t))])
}

fn row_of_task(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let per_row = |r: usize, t: TaskId| s.program.grids[s.regimes[r].tasks[t.index()].grid.index()].per_row;
    let (r, id) = a_task(s, random, per_row)?;
    let task = &mut s.regimes[r].tasks[id.index()];
    task.row = (task.row + 1) % (s.program.rows + random.below(2) as u32);
    Some(vec![task_at(r, id), Entity::Grid(task.grid)])
}

fn row_of_event(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let (r, e) = an_event(s, random)?;
    let rows = s.program.rows;
    let event = &mut s.regimes[r].events[e.index()];
    event.row = match event.row {
        Some(row) if rows > 1 && random.below(3) > 0 => Some((row + 1) % rows),
        Some(_) => None,
        None => Some(random.below(rows as usize) as u32),
    };
    Some(vec![event_at(r, e), Entity::Buffer(event.buffer)])
}

fn scope_or_home(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    if s.machine.devices < 2 {
        return None;
    }
    if random.below(2) == 0 {
        let (r, e) = an_event(s, random)?;
        let event = &mut s.regimes[r].events[e.index()];
        event.scope = if random.below(2) == 0 { Scope::Device } else { Scope::Block };
        return Some(vec![event_at(r, e), Entity::Buffer(event.buffer)]);
    }
    let b = random.below(s.program.buffers.len());
    s.program.buffers[b].home = Home::Device(random.below(2) as u32);
    Some(vec![Entity::Buffer(BufferId::from(b))])
}

fn early_choice(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let r = random.below(s.regimes.len());
    let events = s.regimes[r].events.len();
    let mut runs: Vec<&mut Run> = s.regimes[r].streams.iter_mut().flatten().filter(|run| run.after.is_some()).collect();
    let i = pick(random, &runs)?;
    let run = &mut runs[i];
    let was = run.after?;
    let other = EventId::from(random.below(events));
    run.after = (random.below(2) == 0 && other != was).then_some(other);
    Some(vec![task_at(r, run.task), event_at(r, was), event_at(r, other)])
}

/// A grid that takes a chosen part, and the table that names the part.
fn a_chosen(s: &Schedule, random: &mut Rng) -> Option<(GridId, TableId)> {
    let of = |grid: &Grid| match grid.operand(Role::Weight)?.rows {
        Rows::Lookup(table) => Some(table),
        _ => None,
    };
    let all: Vec<_> = s.program.grids.iter().enumerate().filter_map(|(g, grid)| Some((g, of(grid)?))).collect();
    let (g, table) = all[pick(random, &all)?];
    Some((GridId::from(g), table))
}

fn choices_of(s: &Schedule, table: TableId) -> Option<BufferId> {
    match s.program.tables[table.index()].home {
        TableHome::Device(buffer) => Some(buffer),
        TableHome::Host => None,
    }
}

pub(super) fn operands_of(s: &mut Schedule, g: GridId, role: Role) -> impl Iterator<Item = &mut Operand> {
    s.program.grids[g.index()].operands.iter_mut().filter(move |operand| operand.role == role)
}

/// A run waits for the choice of another slot, or for another result of the same op; sometimes its task does, too.
fn other_slot(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let (g, table) = a_chosen(s, random)?;
    let choices = choices_of(s, table)?;
    let made = s.program.grids.iter().find(|grid| grid.operand(Role::Out).is_some_and(|out| out.buffer == choices))?;
    let related = [Role::X, Role::Shares, Role::Out].map(|role| made.operand(role).map(|operand| operand.buffer));
    let r = random.below(s.regimes.len());
    let regime = &mut s.regimes[r];
    let of_route: Vec<usize> =
        (0..regime.events.len()).filter(|&e| related.contains(&Some(regime.events[e].buffer))).collect();
    let other = EventId::from(of_route[pick(random, &of_route)?]);
    let tasks = &regime.tasks;
    let mut runs: Vec<&mut Run> =
        regime.streams.iter_mut().flatten().filter(|run| tasks[run.task.index()].grid == g).collect();
    let i = pick(random, &runs)?;
    let (was, id) = (runs[i].after?, runs[i].task);
    if was == other {
        return None;
    }
    runs[i].after = Some(other);
    if random.below(3) == 0 {
        let count = regime.events[other.index()].count;
        let waits = regime.tasks[id.index()].waits.iter_mut().filter(|wait| wait.event == was);
        waits.for_each(|wait| *wait = Wait { event: other, count });
    }
    Some(vec![task_at(r, id), event_at(r, was), event_at(r, other)])
}

/// Waits and loaders of a grid's tasks move from events about one buffer to those about the same columns of another one.
fn wait_for_other(s: &mut Schedule, g: GridId, from: BufferId, to: BufferId) {
    for regime in &mut s.regimes {
        let events = regime.events.clone();
        let other = |e: EventId| {
            let was = &events[e.index()];
            let place = |event: &Event| (event.row, event.lo, event.hi);
            let found = events.iter().position(|event| event.buffer == to && place(event) == place(was));
            if was.buffer == from { found.map_or(e, EventId::from) } else { e }
        };
        for task in regime.tasks.iter_mut().filter(|task| task.grid == g) {
            task.waits.iter_mut().for_each(|wait| wait.event = other(wait.event));
        }
        let tasks = &regime.tasks;
        for run in regime.streams.iter_mut().flatten().filter(|run| tasks[run.task.index()].grid == g) {
            run.after = run.after.map(other);
        }
    }
}

/// A grid takes the choice of another layer, or a part of it does.
fn other_layer(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let (g, table) = a_chosen(s, random)?;
    let tables: Vec<usize> = (0..s.program.tables.len())
        .filter(|&t| t != table.index() && s.program.tables[t].holds == Holds::Choices)
        .collect();
    let other = TableId::from(tables[pick(random, &tables)?]);
    let (from, to) = (choices_of(s, table)?, choices_of(s, other)?);
    let parts = 1 + random.below(15);
    for (bit, role) in [(1, Role::Weight), (2, Role::Bias)] {
        operands_of(s, g, role).filter(|_| parts & bit != 0).for_each(|operand| operand.rows = Rows::Lookup(other));
    }
    operands_of(s, g, Role::Choices).filter(|_| parts & 4 != 0).for_each(|operand| operand.buffer = to);
    if parts & 8 != 0 {
        wait_for_other(s, g, from, to);
    }
    let tables = [table, other].map(Entity::Table);
    Some(tables.into_iter().chain([Entity::Grid(g), Entity::Buffer(from), Entity::Buffer(to)]).collect())
}

/// A table with a part less than its op chooses from, and matrices and biases of as many parts.
fn beyond_weights(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let (_, table) = a_chosen(s, random)?;
    let mut touched = vec![Entity::Table(table), Entity::Buffer(choices_of(s, table)?)];
    let bound = &mut s.program.tables[table.index()].bound;
    let was = *bound as usize;
    *bound -= 1;
    for (g, grid) in s.program.grids.iter().enumerate() {
        for operand in grid.operands.iter().filter(|operand| operand.rows == Rows::Lookup(table)) {
            let buffer = &mut s.program.buffers[operand.buffer.index()];
            match &mut buffer.content {
                Some(Content::Rows { parts, .. }) => {
                    parts.truncate(parts.len() / was * (was - 1));
                    buffer.rows = parts.iter().map(|part| part.rows).sum();
                }
                Some(Content::Vectors { parts, .. }) => {
                    parts.truncate(parts.len() / was * (was - 1));
                    buffer.cols = parts.iter().map(|part| part.len).sum();
                }
                _ => return None,
            }
            touched.extend([Entity::Grid(GridId::from(g)), Entity::Buffer(operand.buffer)]);
        }
    }
    Some(touched)
}

/// A task takes units of another slot, or those beyond a slot or a part.
fn units_of_expert(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let (g, _) = a_chosen(s, random)?;
    let (n, slots) = (s.program.grids[g.index()].n, s.program.grids[g.index()].second.extent());
    let (r, id) = a_task(s, random, |r, t| s.regimes[r].tasks[t.index()].grid == g)?;
    let regime = &mut s.regimes[r];
    let task = &mut regime.tasks[id.index()];
    match random.below(4) {
        0 if slots > 1 => task.j = (task.j + 1) % slots,
        1 => task.hi = n + 1,
        2 => task.lo += 1,
        _ => (task.lo, task.hi) = (n, 2 * n),
    }
    let range = (task.lo, task.hi);
    // Sometimes the loader brings what it brought before.
    if random.below(3) > 0 {
        for run in regime.streams.iter_mut().flatten().filter(|run| run.task == id) {
            if let Source::Units { lo, hi, .. } = &mut run.source {
                (*lo, *hi) = range;
            }
        }
    }
    Some(vec![task_at(r, id), Entity::Grid(g)])
}

/// A sum over experts misses an input, takes one twice, or has them in another order or elsewhere.
fn inputs_of_sum(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let sums: Vec<usize> =
        (0..s.program.grids.len()).filter(|&g| matches!(s.program.grids[g].op, Op::Combine(_))).collect();
    let g = sums[pick(random, &sums)?];
    let grid = &mut s.program.grids[g];
    let at: Vec<usize> = (0..grid.operands.len()).filter(|&o| grid.operands[o].role == Role::X).collect();
    let buffer = grid.operands[at[0]].buffer;
    let (a, b) = (at[random.below(at.len())], at[random.below(at.len())]);
    let Op::Combine(combine) = &mut grid.op else { return None };
    match random.below(5) {
        0 => drop(grid.operands.remove(a)),
        1 if combine.slots > 1 => {
            combine.slots -= 1;
            grid.operands.remove(a);
            let shares = grid.operands.iter_mut().filter(|operand| operand.role == Role::Shares);
            shares
                .for_each(|shares| (shares.cols.len, shares.cols.limit) = (shares.cols.len - 1, shares.cols.limit - 1));
        }
        2 if a != b => grid.operands.swap(a, b),
        3 if a != b => grid.operands[a].cols = grid.operands[b].cols,
        _ => {
            // All of them begin later, in a wider buffer.
            for &at in &at {
                let cols = &mut grid.operands[at].cols;
                (cols.base, cols.limit) = (cols.base + 8, cols.limit + 8);
            }
            s.program.buffers[buffer.index()].cols += 8;
        }
    }
    Some(vec![Entity::Grid(GridId::from(g)), Entity::Buffer(buffer)])
}

/// A sum weighs by what another layer chose, or a choice corrects by another vector.
fn other_shares(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let sums: Vec<usize> =
        (0..s.program.grids.len()).filter(|&g| matches!(s.program.grids[g].op, Op::Combine(_))).collect();
    let (a, b) = (sums[pick(random, &sums)?], sums[pick(random, &sums)?]);
    let shares = |g: usize| s.program.grids[g].operand(Role::Shares).map(|shares| shares.buffer);
    let (from, to) = (shares(a)?, shares(b)?);
    if from == to {
        return None;
    }
    let a = GridId::from(a);
    operands_of(s, a, Role::Shares).for_each(|operand| operand.buffer = to);
    if random.below(2) == 0 {
        wait_for_other(s, a, from, to);
    }
    Some(vec![Entity::Grid(a), Entity::Buffer(from), Entity::Buffer(to)])
}

/// The bias of a product is that of one part, while the matrix is that of another; or it begins in the middle of a part.
fn other_bias(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let chosen: Vec<usize> = (0..s.program.grids.len())
        .filter(|&g| {
            let grid = &s.program.grids[g];
            grid.operand(Role::Choices).is_some() && grid.operand(Role::Bias).is_some()
        })
        .collect();
    let g = GridId::from(chosen[pick(random, &chosen)?]);
    let tables = s.program.tables.len();
    let k = random.below(5);
    let bias = operands_of(s, g, Role::Bias).next()?;
    let (was, buffer) = (bias.rows, bias.buffer);
    match k {
        0 => bias.rows = Rows::One,
        1 => bias.rows = Rows::Units,
        2 => bias.rows = Rows::Lookup(TableId::from(random.below(tables))),
        3 => (bias.cols.base, bias.cols.limit) = (bias.cols.base + 8, bias.cols.limit + 8),
        _ => bias.cols.stride_j += 8,
    }
    if k == 2 && bias.rows == was {
        return None;
    }
    Some(vec![Entity::Grid(g), Entity::Buffer(buffer)])
}

/// Choices lie where other values do, or a task with a chosen part comes last in its queue.
fn choices_overwritten(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let (g, table) = a_chosen(s, random)?;
    let choices = choices_of(s, table)?;
    if random.below(2) == 0 {
        let other = a_buffer(s, random, |space| space == Space::Exchange)?;
        if other == choices {
            return None;
        }
        s.placement[choices.index()] = s.placement[other.index()];
        return Some(vec![Entity::Buffer(choices), Entity::Buffer(other)]);
    }
    let (r, id) = a_task(s, random, |r, t| s.regimes[r].tasks[t.index()].grid == g)?;
    let sm = s.regimes[r].queues.iter().position(|queue| queue.contains(&id))?;
    let queue = &mut s.regimes[r].queues[sm];
    let at = queue.iter().position(|t| *t == id)?;
    queue[at..].rotate_left(1);
    let mut touched = vec![Entity::Sm(r as u32, SmId::from(sm))];
    touched.extend(queue[at..].iter().map(|t| task_at(r, *t)));
    restream(s, r);
    Some(touched)
}

/// Whether a violation names one of the entities, or something that is a part of one: a task of a grid, an event or an
/// operand of a buffer, an SM of a regime.
pub fn names(violation: &Violation, touched: &[Entity], s: &Schedule) -> bool {
    let said = std::iter::once(violation.entity).chain(violation.witness.iter().map(|w| w.entity));
    said.into_iter().any(|entity| touched.iter().any(|t| concerns(entity, *t, s)))
}

fn concerns(said: Entity, touched: Entity, s: &Schedule) -> bool {
    if said == touched {
        return true;
    }
    let task = |r: u32, t: TaskId| s.regimes.get(r as usize).and_then(|regime| regime.tasks.get(t.index()));
    let event = |r: u32, e: EventId| s.regimes.get(r as usize).and_then(|regime| regime.events.get(e.index()));
    let uses = |g: GridId, b: BufferId| {
        s.program.grids.get(g.index()).is_some_and(|grid| grid.operands.iter().any(|o| o.buffer == b))
    };
    match (said, touched) {
        (Entity::Task(r, t), Entity::Grid(g)) => task(r, t).is_some_and(|task| task.grid == g),
        (Entity::Grid(g), Entity::Task(r, t)) => task(r, t).is_some_and(|task| task.grid == g),
        (Entity::Task(r, t), Entity::Buffer(b)) => task(r, t).is_some_and(|task| uses(task.grid, b)),
        (Entity::Grid(g), Entity::Buffer(b)) | (Entity::Buffer(b), Entity::Grid(g)) => uses(g, b),
        (Entity::Event(r, e), Entity::Buffer(b)) | (Entity::Buffer(b), Entity::Event(r, e)) => {
            event(r, e).is_some_and(|event| event.buffer == b)
        }
        (Entity::Event(r, e), Entity::Task(q, t)) | (Entity::Task(q, t), Entity::Event(r, e)) => {
            r == q
                && task(q, t).is_some_and(|task| task.waits.iter().any(|w| w.event == e) || task.signals.contains(&e))
        }
        // A regime that was added as a whole.
        (Entity::Task(r, _) | Entity::Event(r, _) | Entity::Sm(r, _), Entity::Regime(q)) => r == q,
        (Entity::Event(r, e), Entity::Grid(g)) => event(r, e).is_some_and(|event| uses(g, event.buffer)),
        // A table of choices lies in what a grid writes.
        (Entity::Table(t), Entity::Grid(g)) => match s.program.tables.get(t.index()).map(|table| table.home) {
            Some(TableHome::Device(b)) => uses(g, b),
            _ => false,
        },
        (Entity::Sm(r, sm), Entity::Task(q, t)) => {
            r == q && s.regimes[q as usize].queues.get(sm.index()).is_some_and(|queue| queue.contains(&t))
        }
        _ => false,
    }
}
