//! Groups 1 and 2, several devices: buffers lie where the tasks that touch them look, and events reach that far.
//!
//! An SM stores packets into the memory of any device, and polls its own device's memory. Plain memory never crosses: what
//! a task appends or hands out stays where the task runs. A matrix that is divided has only some of its units on a device.

use super::wellformed::{Grids, Owners, Writes};
use super::{Entity, Found, Rule, note};
use crate::ir::program::{Buffer, Home, Space};
use crate::ir::schedule::{Event, Machine, Mechanism, Regime, Schedule, Scope};
use crate::ir::{BufferId, EventId, TaskId};

/// The machine, and homes by themselves.
pub(super) fn homes(schedule: &Schedule, found: &mut Found) {
    let Machine { sms, devices, .. } = schedule.machine;
    if devices == 0 || !sms.is_multiple_of(devices) {
        found.add(Rule::SmCount, Entity::Machine, || {
            format!("expected devices that divide {sms} SMs evenly, found {devices}")
        });
        return;
    }
    for (b, buffer) in (0..).zip(&schedule.program.buffers) {
        let Buffer { space, home, .. } = buffer;
        let fits = match home {
            Home::Sm => *space == Space::Private,
            Home::Device(device) => *space != Space::Private && *device < devices,
            Home::Everywhere => *space != Space::Private,
            // Of other buffers no device has a part that tasks would find.
            Home::Divided => *space == Space::Weight,
        };
        if !fits {
            found.add(Rule::Home, Entity::Buffer(BufferId(b)), || {
                format!("expected a home for {} among {devices} devices, found {home:?}", space.name())
            });
        }
    }
}

/// Every task finds what it touches on its own device.
pub(super) fn reach(schedule: &Schedule, grids: &Grids, all: &[Owners], writes: &[Writes], found: &mut Found) {
    if schedule.machine.devices == 1 {
        return;
    }
    let program = &schedule.program;
    for (r, (regime, owners)) in (0..).zip(schedule.regimes.iter().zip(all)) {
        let device = |task: TaskId| schedule.machine.device_of(owners.sm[task.index()] as usize);
        for (t, task) in (0..).zip(&regime.tasks) {
            let (id, grid) = (TaskId(t), &program.grids[task.grid.index()]);
            for operand in &grid.operands {
                let buffer = &program.buffers[operand.buffer.index()];
                // Of each part that a step chooses, as of the only one, a device has as many units as others, or one more.
                let own = |at: u32| (u64::from(at) * u64::from(grid.n) / u64::from(schedule.machine.devices)) as u32;
                let (begin, end) = (own(device(id)), own(device(id) + 1));
                if buffer.home == Home::Divided && (task.lo < begin || task.hi > end) {
                    found.add_with(Rule::Home, Entity::Task(r, id), || {
                        let (lo, hi, at) = (task.lo, task.hi, device(id));
                        let message = format!(
                            "reads units {lo}..{hi}, expected units in {begin}..{end}, which device {at} holds"
                        );
                        (message, vec![note(Entity::Buffer(operand.buffer), "is divided")])
                    });
                }
                // Packets are stored into any memory.
                let stores = buffer.space == Space::Exchange && operand.access.writes();
                if let Home::Device(home) = buffer.home
                    && !stores
                    && home != device(id)
                {
                    found.add_with(Rule::Home, Entity::Task(r, id), || {
                        let (role, at) = (operand.role.name(), device(id));
                        let message = format!("touches `{role}` on device {at}, expected to run on device {home}");
                        (message, vec![note(Entity::Buffer(operand.buffer), "lies there")])
                    });
                }
            }
            for flow in grids.history(task.grid) {
                // Rows of the past were appended by any regime.
                for (other, writes) in (0..).zip(writes) {
                    let place =
                        |task: TaskId| schedule.machine.device_of(all[other as usize].sm[task.index()] as usize);
                    let appends = flow.spans(task).flat_map(|(lo, hi)| writes.overlapping(flow.buffer, lo, hi));
                    if let Some(append) = appends.into_iter().find(|append| place(append.task) != device(id)) {
                        found.add_with(Rule::Home, Entity::Task(r, id), || {
                            let message = format!("reads the history of {} on another device", flow.buffer);
                            (message, vec![note(Entity::Task(other, append.task), "appends to it")])
                        });
                    }
                }
            }
        }
    }
}

/// The scope of an event includes all tasks that signal it or wait for it; that of words that cross devices is all devices.
pub(super) fn scopes(schedule: &Schedule, owners: &[Owners], found: &mut Found) {
    let mut crossed: Vec<Option<Entity>> = vec![None; schedule.program.buffers.len()];
    for (r, (regime, owners)) in (0..).zip(schedule.regimes.iter().zip(owners)) {
        let needs = needed(schedule, regime, owners);
        for ((e, event), (scope, who)) in (0..).zip(&regime.events).zip(&needs) {
            let at = Entity::Event(r, EventId(e));
            if event.scope < *scope {
                found.add_with(Rule::Scope, at, || {
                    let message = format!("expected scope `{}`, found `{}`", scope.name(), event.scope.name());
                    (message, who.iter().map(|&task| note(Entity::Task(r, task), "takes part")).collect())
                });
            }
            if *scope == Scope::System {
                crossed[event.buffer.index()].get_or_insert(at);
            }
        }
    }
    // All accesses to such a word must have one scope, or a reader may see half of it.
    for (r, regime) in (0..).zip(&schedule.regimes) {
        for (e, event) in (0..).zip(&regime.events) {
            let Event { buffer, scope, mechanism, .. } = event;
            let Some(other) = crossed[buffer.index()] else { continue };
            if *scope != Scope::System && *mechanism != Mechanism::Counter {
                found.add_with(Rule::Scope, Entity::Event(r, EventId(e)), || {
                    let message = format!("expected scope `system`, words of {buffer} cross devices");
                    (message, vec![note(other, "crosses")])
                });
            }
        }
    }
}

/// For each event of a regime the least scope that includes its signallers and waiters, and two tasks that need it.
fn needed(schedule: &Schedule, regime: &Regime, owners: &Owners) -> Vec<(Scope, Vec<TaskId>)> {
    let mut first: Vec<Option<(u32, TaskId)>> = vec![None; regime.events.len()];
    let mut needs: Vec<(Scope, Vec<TaskId>)> = vec![(Scope::Block, vec![]); regime.events.len()];
    let after = regime.streams.iter().flatten().filter_map(|run| run.after.map(|event| (run.task, event)));
    let tasks = (0..).map(TaskId).zip(&regime.tasks).flat_map(|(id, task)| {
        let events = task.waits.iter().map(|w| w.event).chain(task.signals.iter().copied());
        events.map(move |event| (id, event))
    });
    for (id, event) in tasks.chain(after) {
        let sm = owners.sm[id.index()];
        let (other, task) = *first[event.index()].get_or_insert((sm, id));
        let device = |sm: u32| schedule.machine.device_of(sm as usize);
        let scope = match () {
            () if sm == other => Scope::Block,
            () if device(sm) == device(other) => Scope::Device,
            () => Scope::System,
        };
        if scope > needs[event.index()].0 {
            needs[event.index()] = (scope, vec![task, id]);
        }
    }
    needs
}
