//! Breaks what only schedules with recurrent states, experts or several devices have. As in [`super::mutate`], a mutation returns the entities
//! that it touched.

use super::explore::Rng;
use super::mutate::{a_task, operands_of, pick, restream, task_at};
use monobloc::ir::op::{Access, Op, Role};
use monobloc::ir::program::{Rows, Second, Space};
use monobloc::ir::schedule::{Event, Regime, Run, Schedule, Task};
use monobloc::ir::table::{Fact, Holds, TableHome};
use monobloc::ir::{BufferId, EventId, GridId, SmId, TableId, TaskId};
use monobloc::target::Target;
use monobloc::validate::Entity;

/// A grid that keeps a state.
fn a_state(s: &Schedule, random: &mut Rng) -> Option<(GridId, BufferId)> {
    let grids = s.program.grids.iter().enumerate();
    let all: Vec<_> =
        grids.filter_map(|(g, grid)| Some((GridId::from(g), grid.operand(Role::State)?.buffer))).collect();
    Some(all[pick(random, &all)?])
}

/// The same again from a later position on, if there is one regime.
fn two_regimes(s: &mut Schedule, random: &mut Rng) -> Option<()> {
    if s.regimes.len() == 1 {
        let from_position = 1 + random.below(s.program.context_max.saturating_sub(2).max(1) as usize) as u32;
        if from_position >= s.program.context_max {
            return None;
        }
        s.regimes.push(Regime { from_position, ..s.regimes[0].clone() });
    }
    Some(())
}

/// A task that brings on a state runs on another SM in one regime: the state was left where it does not look.
pub(super) fn state_elsewhere(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let (g, buffer) = a_state(s, random)?;
    two_regimes(s, random)?;
    let of_grid = |s: &Schedule, r: usize, t: TaskId| s.regimes[r].tasks[t.index()].grid == g;
    let (r, id) = a_task(s, random, |r, t| of_grid(s, r, t))?;
    let from = s.regimes[r].queues.iter().position(|queue| queue.contains(&id))?;
    let mut touched = vec![Entity::Grid(g), Entity::Buffer(buffer), task_at(r, id)];
    let others: Vec<(usize, usize)> = s.regimes[r]
        .queues
        .iter()
        .enumerate()
        .filter(|(sm, _)| *sm != from)
        .flat_map(|(sm, queue)| {
            let here = queue.iter().enumerate().filter(|(_, id)| of_grid(s, r, **id));
            here.map(move |(at, _)| (sm, at)).collect::<Vec<_>>()
        })
        .collect();
    let place = s.regimes[r].queues[from].iter().position(|t| *t == id)?;
    if random.below(2) == 0
        && let Some(n) = pick(random, &others)
    {
        // Two tasks of the grid change places.
        let (sm, at) = others[n];
        let other = s.regimes[r].queues[sm][at];
        (s.regimes[r].queues[from][place], s.regimes[r].queues[sm][at]) = (other, id);
        touched.extend([task_at(r, other), Entity::Sm(r as u32, SmId::from(sm))]);
    } else {
        let sms: Vec<usize> = (0..s.regimes[r].queues.len()).filter(|sm| *sm != from).collect();
        let to = sms[pick(random, &sms)?];
        let regime = &mut s.regimes[r];
        regime.queues[from].remove(place);
        // After the tasks of earlier grids there.
        let at = regime.queues[to].iter().filter(|t| regime.tasks[t.index()].grid < g).count();
        regime.queues[to].insert(at, id);
        touched.push(Entity::Sm(r as u32, SmId::from(to)));
    }
    touched.push(Entity::Sm(r as u32, SmId::from(from)));
    restream(s, r);
    Some(touched)
}

/// A state has other rows than there are sequences, or its grid takes other ones.
pub(super) fn slots_of_state(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let (g, buffer) = a_state(s, random)?;
    let touched = vec![Entity::Grid(g), Entity::Buffer(buffer)];
    match random.below(3) {
        0 => {
            let rows = &mut s.program.buffers[buffer.index()].rows;
            let was = *rows;
            *rows = [1, was - 1, was + 1][random.below(3)];
            (*rows != was).then_some(touched)
        }
        1 => {
            let now = [Rows::One, Rows::Sequences, Rows::Part, Rows::All, Rows::Own][random.below(5)];
            let state = operands_of(s, g, Role::State).next()?;
            let was = std::mem::replace(&mut state.rows, now);
            (was != now).then_some(touched)
        }
        _ => {
            // One sequence less in the tables of the host.
            let sequences = s.program.tables.iter().position(|table| table.holds == Holds::Sequences)?;
            let bound = &mut s.program.tables[sequences].bound;
            *bound = if random.below(2) == 0 { *bound + 1 } else { bound.checked_sub(1)? };
            let table = Entity::Table(TableId::from(sequences));
            Some(
                touched
                    .into_iter()
                    .chain([table, Entity::Schedule])
                    .chain((0..s.program.tables.len()).map(|t| Entity::Table(TableId::from(t))))
                    .collect(),
            )
        }
    }
}

/// A grid takes the state of another one, or both change theirs.
pub(super) fn other_state(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let ((a, from), (b, to)) = (a_state(s, random)?, a_state(s, random)?);
    if a == b {
        return None;
    }
    operands_of(s, a, Role::State).for_each(|state| state.buffer = to);
    if random.below(3) == 0 {
        operands_of(s, b, Role::State).for_each(|state| state.buffer = from);
    }
    Some(vec![Entity::Grid(a), Entity::Grid(b), Entity::Buffer(from), Entity::Buffer(to)])
}

/// A state lies over a part of another one, or where its own next row does.
pub(super) fn place_of_state(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let ((_, a), (_, b)) = (a_state(s, random)?, a_state(s, random)?);
    let buffer = &s.program.buffers[b.index()];
    let row = u64::from(buffer.cols) * 4;
    let place = s.placement[b.index()]?;
    let was = s.placement[a.index()]?;
    let now = match random.below(3) {
        0 => place,
        1 => place + row / 256 * 256,
        _ => was + 4 * (1 + random.below(8) as u64),
    };
    s.placement[a.index()] = Some(now);
    (now != was).then(|| vec![Entity::Buffer(a), Entity::Buffer(b)])
}

/// A task takes another part of the sequences, or there are other parts.
pub(super) fn part_of_sequences(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let all: Vec<GridId> = (0..s.program.grids.len())
        .map(GridId::from)
        .filter(|g| s.program.grids[g.index()].operand(Role::State).is_some_and(|state| state.rows == Rows::Part))
        .collect();
    let g = all[pick(random, &all)?];
    let parts = s.program.grids[g.index()].second.extent();
    let touched = vec![Entity::Grid(g)];
    match random.below(4) {
        0 => {
            s.program.grids[g.index()].second = Second::Axis(if random.below(2) == 0 { parts + 1 } else { parts - 1 });
            Some(touched)
        }
        1 => {
            // All rows in the tasks of one part.
            let role = [Role::State, Role::Out][random.below(2)];
            let rows = if role == Role::State { Rows::Sequences } else { Rows::All };
            operands_of(s, g, role).for_each(|operand| operand.rows = rows);
            Some(touched)
        }
        k => {
            two_regimes(s, random)?;
            let (r, id) = a_task(s, random, |r, t| s.regimes[r].tasks[t.index()].grid == g)?;
            let regime = &mut s.regimes[r];
            let (index, was) = (regime.tasks[id.index()].lo, regime.tasks[id.index()].j);
            let now = (was + 1 + random.below(parts as usize - 1) as u32) % parts;
            let same = |task: &Task| task.grid == g && task.lo == index && task.j == now;
            let other = regime.tasks.iter().position(same);
            regime.tasks[id.index()].j = now;
            let mut touched = vec![Entity::Grid(g), task_at(r, id)];
            // The two tasks of an index change their parts.
            if let (2, Some(other)) = (k, other) {
                regime.tasks[other].j = was;
                touched.push(task_at(r, TaskId::from(other)));
            }
            Some(touched)
        }
    }
}

/// The host may begin at any position, or in any order of rows: a state of another position, of another text, or one that was not cleared.
pub(super) fn any_position(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let (g, buffer) = a_state(s, random)?;
    let fact = if random.below(3) == 0 { Fact::Consecutive } else { Fact::At };
    let t = s.program.tables.iter().position(|table| table.facts.contains(&fact))?;
    s.program.tables[t].facts.retain(|of| *of != fact);
    let states = s.program.grids.iter().enumerate().filter(|(_, grid)| grid.operand(Role::State).is_some());
    let states = states.map(|(g, _)| Entity::Grid(GridId::from(g)));
    Some(states.chain([Entity::Table(TableId::from(t)), Entity::Grid(g), Entity::Buffer(buffer)]).collect())
}

/// Columns of a state that are those of another index, or an op that only reads or only writes it.
pub(super) fn columns_of_state(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let (g, buffer) = a_state(s, random)?;
    let k = random.below(6);
    let state = operands_of(s, g, Role::State).next()?;
    let was = state.clone();
    match k {
        0 => state.cols.stride /= 2,
        1 => state.cols.base += 2,
        2 => state.cols.len += 2,
        3 => state.access = [Access::Read, Access::Write][random.below(2)],
        4 => state.cols.limit = state.cols.limit.saturating_sub(2),
        _ => state.cols.stride_j += 2,
    }
    (*state != was).then(|| vec![Entity::Grid(g), Entity::Buffer(buffer)])
}

/// What a state is made of: operands of a grid exchanged, one that it lacks, or another width of its rule.
pub(super) fn inputs_of_state(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let (g, buffer) = a_state(s, random)?;
    let k = random.below(4);
    let grid = &mut s.program.grids[g.index()];
    let was = (grid.operands.clone(), grid.op.clone());
    if k == 0 {
        match &mut grid.op {
            Op::Mix(mix) => mix.kernel += 1,
            Op::Convolve(convolve) => convolve.kernel += 1,
            Op::Scan(scan) => scan.state += 2,
            _ => return None,
        }
    } else {
        let (a, b) = (random.below(grid.operands.len()), random.below(grid.operands.len()));
        match k {
            1 => drop(grid.operands.remove(a)),
            2 => {
                let (of_a, of_b) = (grid.operands[a].buffer, grid.operands[b].buffer);
                (grid.operands[a].buffer, grid.operands[b].buffer) = (of_b, of_a);
            }
            _ => {
                let (of_a, of_b) = (grid.operands[a].cols, grid.operands[b].cols);
                (grid.operands[a].cols, grid.operands[b].cols) = (of_b, of_a);
            }
        }
    }
    let grid = &s.program.grids[g.index()];
    let is_changed = (&grid.operands, &grid.op) != (&was.0, &was.1);
    // Their buffers may now be without a reader or a writer.
    let of_grid = was.0.iter().map(|operand| Entity::Buffer(operand.buffer));
    is_changed.then(|| of_grid.chain([Entity::Grid(g), Entity::Buffer(buffer)]).collect())
}

/// A second `route` over the same scores, on another SM: products of one matrix take its choices. On a device both break ties alike, so the
/// schedule is sound, unless the second one comes too late or its readers do not wait for it.
pub(super) fn chosen_twice(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let takes = |grid: &monobloc::ir::program::Grid| match grid.operand(Role::Weight)?.rows {
        Rows::Lookup(table) => Some(table),
        _ => None,
    };
    let users: Vec<(GridId, TableId)> =
        (0..s.program.grids.len()).filter_map(|g| Some((GridId::from(g), takes(&s.program.grids[g])?))).collect();
    let (user, table) = users[pick(random, &users)?];
    let TableHome::Device(choices) = s.program.tables[table.index()].home else { return None };
    let made = |grid: &monobloc::ir::program::Grid| grid.operand(Role::Out).is_some_and(|out| out.buffer == choices);
    let route = s.program.grids.iter().position(made)?;
    let shares = s.program.grids[route].operand(Role::Shares)?.buffer;
    let copies = [choices, shares].map(|of| copy_of_exchange(s, of));
    let other = |id: BufferId| {
        if id == choices {
            copies[0]
        } else if id == shares {
            copies[1]
        } else {
            id
        }
    };
    // The copy of the grid comes last in the program, so tasks of all grids keep their ids.
    let mut grid = s.program.grids[route].clone();
    grid.name += ".again";
    grid.operands.iter_mut().for_each(|operand| operand.buffer = other(operand.buffer));
    let again = GridId::from(route + 1);
    s.program.grids.insert(route + 1, grid);
    let moved = |g: GridId| if g.index() > route { GridId(g.0 + 1) } else { g };
    s.variants = std::mem::take(&mut s.variants).into_iter().map(|(g, variant)| (moved(g), variant)).collect();
    s.regimes.iter_mut().flat_map(|regime| &mut regime.tasks).for_each(|task| task.grid = moved(task.grid));
    let user = moved(user);
    let mut copied = s.program.tables[table.index()].clone();
    (copied.name, copied.home) = (format!("{} again", copied.name), TableHome::Device(copies[0]));
    let new = TableId::from(s.program.tables.len());
    s.program.tables.push(copied);
    for operand in &mut s.program.grids[user.index()].operands {
        if operand.rows == Rows::Lookup(table) {
            operand.rows = Rows::Lookup(new);
        }
        operand.buffer = other(operand.buffer);
    }
    let mut touched = vec![Entity::Grid(GridId::from(route)), Entity::Grid(again), Entity::Grid(user)];
    touched.extend([table, new].map(Entity::Table));
    touched.extend([choices, shares].into_iter().chain(copies).map(Entity::Buffer));
    // Sometimes its readers wait for the first one.
    let waits = random.below(4) > 0;
    for r in 0..s.regimes.len() {
        touched.extend(route_again(s, r, (GridId::from(route), again, user), [choices, shares], copies, waits, random));
    }
    Some(touched)
}

/// A buffer of the same shape after all others of the exchange.
fn copy_of_exchange(s: &mut Schedule, of: BufferId) -> BufferId {
    let mut buffer = s.program.buffers[of.index()].clone();
    buffer.name += ".again";
    s.program.buffers.push(buffer);
    let places = s.program.buffers.iter().zip(&s.placement).filter(|(buffer, _)| buffer.space == Space::Exchange);
    let last = places.filter_map(|(_, place)| *place).max().unwrap_or(0);
    s.placement.push(Some((last + (1 << 16)).next_multiple_of(256)));
    BufferId::from(s.program.buffers.len() - 1)
}

/// Tasks of the second route in a regime, each after the first one of its queue or in another queue, and their events.
fn route_again(
    s: &mut Schedule,
    r: usize,
    (route, again, user): (GridId, GridId, GridId),
    was: [BufferId; 2],
    copies: [BufferId; 2],
    waits: bool,
    random: &mut Rng,
) -> Vec<Entity> {
    let regime = &mut s.regimes[r];
    let mut events = vec![None; regime.events.len()];
    for (e, copy) in events.iter_mut().enumerate() {
        let event = regime.events[e];
        let place = was.iter().position(|of| *of == event.buffer);
        *copy = place.map(|n| {
            regime.events.push(Event { buffer: copies[n], ..event });
            EventId::from(regime.events.len() - 1)
        });
    }
    let other = |e: EventId| events.get(e.index()).copied().flatten();
    let mut touched = vec![];
    for t in 0..regime.tasks.len() {
        if regime.tasks[t].grid == user && waits {
            regime.tasks[t].waits.iter_mut().for_each(|wait| wait.event = other(wait.event).unwrap_or(wait.event));
        }
        if regime.tasks[t].grid != route {
            continue;
        }
        let mut task = regime.tasks[t].clone();
        (task.grid, task.signals) = (again, task.signals.iter().filter_map(|e| other(*e)).collect());
        let id = TaskId::from(regime.tasks.len());
        regime.tasks.push(task);
        let here = regime.queues.iter().position(|queue| queue.contains(&TaskId::from(t))).unwrap_or(0);
        let sm = if random.below(2) == 0 { here } else { random.below(regime.queues.len()) };
        // Its place in program order there.
        let at = regime.queues[sm].iter().filter(|t| regime.tasks[t.index()].grid <= route).count();
        regime.queues[sm].insert(at, id);
        touched.extend([task_at(r, TaskId::from(t)), task_at(r, id), Entity::Sm(r as u32, SmId::from(sm))]);
    }
    // Events that have lost all their readers are no fault of the mutation: nothing else in the schedule is about them.
    if waits {
        let tasks = &regime.tasks;
        let runs: Vec<&mut Run> =
            regime.streams.iter_mut().flatten().filter(|run| tasks[run.task.index()].grid == user).collect();
        runs.into_iter().for_each(|run| run.after = run.after.map(|e| other(e).unwrap_or(e)));
    }
    let copied = events.iter().enumerate().filter_map(|(e, copy)| Some([EventId::from(e), (*copy)?]));
    touched.extend(copied.flatten().map(|e| Entity::Event(r as u32, e)));
    touched
}

/// A task runs on an SM of another device, or there are other devices.
pub(super) fn other_device(s: &mut Schedule, _: &mut Target, random: &mut Rng) -> Option<Vec<Entity>> {
    let devices = s.machine.devices;
    if devices < 2 {
        return None;
    }
    if random.below(4) == 0 {
        s.machine.devices = [1, devices + 1, 2 * devices, 0][random.below(4)];
        let events = (0..s.regimes.len()).flat_map(|r| (0..s.regimes[r].events.len()).map(move |e| (r, e)));
        let events: Vec<Entity> = events.map(|(r, e)| Entity::Event(r as u32, EventId::from(e))).collect();
        let tasks =
            (0..s.regimes.len()).flat_map(|r| (0..s.regimes[r].tasks.len()).map(move |t| task_at(r, TaskId::from(t))));
        return Some(tasks.chain(events).chain([Entity::Machine, Entity::Schedule]).collect());
    }
    let of_device = s.machine.sms / devices;
    let (r, id) = a_task(s, random, |r, t| {
        let op = &s.program.grids[s.regimes[r].tasks[t.index()].grid.index()].op;
        // Tasks that leave or read what stays on a device are drawn more often.
        matches!(op, Op::Attention(_) | Op::Mix(_) | Op::Convolve(_) | Op::Scan(_))
    })
    .or_else(|| a_task(s, random, |_, _| true))?;
    let regime = &mut s.regimes[r];
    let from = regime.queues.iter().position(|queue| queue.contains(&id))?;
    let others: Vec<usize> =
        (0..regime.queues.len()).filter(|sm| *sm as u32 / of_device != from as u32 / of_device).collect();
    let to = others[pick(random, &others)?];
    let grid = regime.tasks[id.index()].grid;
    regime.queues[from].retain(|t| *t != id);
    let at = regime.queues[to].iter().filter(|t| regime.tasks[t.index()].grid < grid).count();
    regime.queues[to].insert(at, id);
    restream(s, r);
    Some(vec![
        task_at(r, id),
        Entity::Grid(grid),
        Entity::Sm(r as u32, SmId::from(from)),
        Entity::Sm(r as u32, SmId::from(to)),
    ])
}
