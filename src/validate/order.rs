//! Group 3: an order in which all tasks of a step can run, and what the loader brings in for them.

use super::wellformed::Owners;
use super::{Entity, Found, Rule, Witness, note};
use crate::ir::layout::GRANULE_BYTES;
use crate::ir::op::{HISTORY_ALIGN, Op, Role};
use crate::ir::schedule::{Machine, Regime, Schedule, Source};
use crate::ir::{EventId, GridId, SmId, TaskId};

/// A topological order of the tasks of one step under queue order and the events of the step; empty if there is none.
///
/// Carried events point from one step to the next, so steps one after another are free of deadlock if each step is.
///
/// The loader of an SM is a chain of its own: it begins its runs in order, each after the event that the run waits for and
/// with a slot for its first chunk. A task that streams comes after the beginning of its run. Its other chunks follow: if
/// slots hold only chunks of this task, it consumes them; if they hold some of later tasks, all of its own are there.
pub(super) fn sort(r: u32, regime: &Regime, owners: &Owners, machine: &Machine, found: &mut Found) -> Vec<TaskId> {
    let sms = regime.queues.len();
    let slots = machine.ring.slots as usize;
    // Runs that each loader has begun, and those whose task is done.
    let (mut begun, mut consumed) = (vec![0usize; sms], vec![0usize; sms]);
    let mut missing: Vec<u32> = regime.events.iter().map(|e| if e.carried { 0 } else { e.count }).collect();
    let mut next = vec![0u32; sms];
    // Waits of an SM's next task that are known to be satisfied: each is looked at once.
    let mut satisfied = vec![0usize; sms];
    // SMs whose next task, or (after them all) whose loader, waits for an event, as one list for each event.
    let mut first_blocked: Vec<Option<u32>> = vec![None; regime.events.len()];
    let mut next_blocked: Vec<Option<u32>> = vec![None; 2 * sms];
    let mut blocked = vec![false; 2 * sms];
    let mut ready: Vec<u32> = (0..sms as u32).rev().collect();
    let mut order = Vec::with_capacity(regime.tasks.len());
    while let Some(sm) = ready.pop() {
        loop {
            let (stream, loader) = (&regime.streams[sm as usize], sms + sm as usize);
            let (begun, consumed) = (&mut begun[sm as usize], &mut consumed[sm as usize]);
            while !blocked[loader] && *begun < *consumed + slots {
                let Some(run) = stream.get(*begun) else { break };
                if let Some(event) = run.after.filter(|e| missing[e.index()] > 0) {
                    blocked[loader] = true;
                    next_blocked[loader] = first_blocked[event.index()].replace(loader as u32);
                    break;
                }
                *begun += 1;
            }
            let Some(&id) = regime.queues[sm as usize].get(next[sm as usize] as usize) else { break };
            let streams = stream.get(*consumed).is_some_and(|run| run.task == id);
            if blocked[sm as usize] || (streams && *begun == *consumed) {
                break;
            }
            let task = &regime.tasks[id.index()];
            let waits = &task.waits[satisfied[sm as usize]..];
            if let Some(i) = waits.iter().position(|w| missing[w.event.index()] > 0) {
                let wait = &waits[i];
                satisfied[sm as usize] += i;
                blocked[sm as usize] = true;
                next_blocked[sm as usize] = first_blocked[wait.event.index()].replace(sm);
                break;
            }
            order.push(id);
            *consumed += usize::from(streams);
            next[sm as usize] += 1;
            satisfied[sm as usize] = 0;
            for event in task.signals.iter().filter(|e| !regime.events[e.index()].carried) {
                let left = &mut missing[event.index()];
                *left -= 1;
                if *left == 0 {
                    let mut woken = first_blocked[event.index()].take();
                    while let Some(waiter) = woken {
                        blocked[waiter as usize] = false;
                        ready.push(waiter % sms as u32);
                        woken = next_blocked[waiter as usize].take();
                    }
                }
            }
        }
    }
    if order.len() < regime.tasks.len() {
        found.add_with(Rule::Deadlock, Entity::Regime(r), || {
            let cycle = cycle(r, regime, owners, &missing, &next, &begun);
            ("tasks wait for one another in a circle".to_string(), cycle)
        });
        order.clear();
    }
    order
}

/// Walks from a stuck SM to the task at its head, the event that this waits for, a producer that has not run, and its SM, until
/// an SM comes again.
fn cycle(r: u32, regime: &Regime, owners: &Owners, missing: &[u32], next: &[u32], begun: &[usize]) -> Vec<Witness> {
    let mut producer: Vec<Option<TaskId>> = vec![None; regime.events.len()];
    for (t, task) in (0..).zip(&regime.tasks) {
        if owners.pos[t as usize] >= next[owners.sm[t as usize] as usize] {
            for event in &task.signals {
                producer[event.index()].get_or_insert(TaskId(t));
            }
        }
    }
    let head = |sm: usize| regime.queues[sm].get(next[sm] as usize).copied();
    let Some(mut sm) = (0..next.len()).find(|&sm| head(sm).is_some()) else { return vec![] };
    let mut at = vec![None; next.len()];
    let mut path: Vec<(usize, TaskId, EventId, TaskId)> = vec![];
    while at[sm].is_none() {
        at[sm] = Some(path.len());
        let step = head(sm).and_then(|task| {
            let waits = regime.tasks[task.index()].waits.iter().map(|w| w.event);
            // What the task waits for; if all of that is there, what its loader waits for.
            let after = regime.streams[sm].get(begun[sm]).and_then(|run| run.after);
            let event = waits.chain(after).find(|e| missing[e.index()] > 0)?;
            Some((sm, task, event, producer[event.index()]?))
        });
        let Some(step) = step else { return vec![] };
        path.push(step);
        sm = owners.sm[step.3.index()] as usize;
    }
    let mut witness = vec![];
    for &(sm, task, event, producer) in &path[at[sm].unwrap_or(0)..] {
        let own = regime.tasks[task.index()].waits.iter().any(|w| w.event == event);
        let who = if own { "" } else { "'s loader" };
        witness.push(note(Entity::Task(r, task), format!("on sm{sm}{who} waits for {event}")));
        let other = owners.sm[producer.index()];
        let blocked_by = match head(other as usize) {
            Some(blocked) if blocked != producer => format!(", after {blocked}"),
            _ => String::new(),
        };
        witness.push(note(Entity::Task(r, producer), format!("on sm{other} signals {event}{blocked_by}")));
    }
    witness
}

/// The ring by itself, and what every op needs of it.
pub(super) fn ring(schedule: &Schedule, found: &mut Found) {
    let (ring, warps) = (&schedule.machine.ring, schedule.machine.consumer_warps);
    let at = Entity::Machine;
    if ring.slots == 0 || warps == 0 {
        found.add(Rule::RingShape, at, || {
            format!("expected slots and consumer warps, found {} and {warps}", ring.slots)
        });
    }
    if ring.slot_bytes == 0 || ring.slot_bytes % GRANULE_BYTES != 0 {
        found.add(Rule::RingShape, at, || {
            format!("expected slots of whole granules of {GRANULE_BYTES} bytes, found {} bytes", ring.slot_bytes)
        });
    } else if ring.slot_bytes / GRANULE_BYTES < ring.arrivals {
        found.add(Rule::RingShape, at, || {
            let granules = ring.slot_bytes / GRANULE_BYTES;
            format!("expected a granule in a slot for each of {} warps, found {granules}", ring.arrivals)
        });
    }
    if ring.arrivals != warps {
        found.add(Rule::RingArrivals, at, || {
            format!("expected all {warps} consumer warps to free a slot, found {} arrivals", ring.arrivals)
        });
    }
    let (low, high, free) = (ring.flight_low, ring.flight_high, ring.flight_free);
    if low == 0 || low > high || high > ring.slots || free > ring.slots {
        found.add(Rule::Flight, at, || {
            format!(
                "expected 1 <= `flight_low` <= `flight_high` <= {} slots and \
                 `flight_free` up to them, found {low}, {high}, {free}",
                ring.slots
            )
        });
    }
    for (g, grid) in (0..).zip(&schedule.program.grids) {
        if grid.op.ring_demand() > ring.slots {
            found.add_with(Rule::RingCapacity, Entity::Grid(GridId(g)), || {
                let (op, demand, slots) = (grid.op.name(), grid.op.ring_demand(), ring.slots);
                let message = format!("`{op}` holds {demand} chunks at once, the ring has {slots} slots");
                (message, vec![note(at, "has the ring")])
            });
        }
    }
}

/// Each stream is the streamed operands of its queue, in its order.
pub(super) fn streams(schedule: &Schedule, found: &mut Found) {
    for (r, regime) in (0..).zip(&schedule.regimes) {
        for s in 0..schedule.machine.sms as usize {
            stream(r, s, schedule, regime, found);
        }
    }
}

/// The stream of one SM is the one that its queue asks for.
fn stream(r: u32, s: usize, schedule: &Schedule, regime: &Regime, found: &mut Found) {
    let program = &schedule.program;
    let slot_bytes = schedule.machine.ring.slot_bytes;
    let sm = Entity::Sm(r, SmId::from(s));
    let mut runs = regime.streams[s].iter();
    for &id in &regime.queues[s] {
        let task = &regime.tasks[id.index()];
        let grid = &program.grids[task.grid.index()];
        let op = &grid.op;
        if !matches!(op, Op::MatVec(_) | Op::Attention(_)) {
            continue;
        }
        let at = Entity::Task(r, id);
        let run = match runs.next() {
            Some(run) if run.task == id => run,
            other => {
                found.add_with(Rule::StreamOrder, sm, || {
                    let seen = other.map_or("the end".to_string(), |run| run.task.to_string());
                    let message = format!("expected the chunks of {id} next in its stream, found {seen}");
                    let others = other.map(|run| note(Entity::Task(r, run.task), "is next in the stream"));
                    (message, std::iter::once(note(at, "is next in the queue")).chain(others).collect())
                });
                return;
            }
        };
        match (op, run.source) {
            (Op::MatVec(_), Source::Units { buffer, lo, hi }) => {
                let weight = grid.operand(Role::Weight).map(|o| o.buffer);
                if (weight, lo, hi) != (Some(buffer), task.lo, task.hi) {
                    found.add(Rule::StreamBytes, at, || {
                        let matrix = weight.map_or("its matrix".to_string(), |b| b.to_string());
                        format!("expected units {}..{} of {matrix}, found {lo}..{hi} of {buffer}", task.lo, task.hi)
                    });
                }
            }
            (Op::Attention(a), Source::History { rows }) => {
                // From head to head, because a copy brings in whole rows with their padding.
                let pitch = grid.operand(Role::HistoryK).map_or(a.head_dim, |o| o.cols.stride);
                let row = u64::from(pitch) * program.precision.cache.bytes() as u64;
                if rows == 0 || rows % HISTORY_ALIGN != 0 || u64::from(rows) * row > u64::from(slot_bytes) {
                    found.add_with(Rule::HistoryChunk, at, || {
                        let message = format!(
                            "expected a multiple of {HISTORY_ALIGN} rows of {row} bytes in a slot \
                             of {slot_bytes}, found {rows} rows"
                        );
                        (message, vec![note(Entity::Machine, "has the slots")])
                    });
                }
            }
            (_, other) => {
                found.add(Rule::StreamBytes, at, || {
                    let expected = if matches!(op, Op::MatVec(_)) { "weights" } else { "rows of the history" };
                    format!("expected {expected}, found {other:?}")
                });
            }
        }
    }
    if let Some(extra) = runs.next() {
        found.add_with(Rule::StreamOrder, sm, || {
            let message = format!("expected the end of its stream, found {}", extra.task);
            (message, vec![note(Entity::Task(r, extra.task), "has no chunks left to bring in here")])
        });
    }
}
