//! Group 6: what asynchronous copies need: a fence between proxies. That heads of a cache row start where a copy may
//! start is part of their shape (`operands`).

use super::{Entity, Found, Rule, Witness, note};
use crate::ir::BufferId;
use crate::ir::schedule::Schedule;

/// The fence belongs in the thread that copies, after it has taken over what the first task of its SM's queue acquired.
/// A task after the first hands nothing to its loader: its fence would be on no path to a copy.
pub(super) fn threads(schedule: &Schedule, found: &mut Found) {
    for (r, regime) in (0..).zip(&schedule.regimes) {
        for queue in &regime.queues {
            for &id in queue.iter().skip(1) {
                let waits = &regime.tasks[id.index()].waits;
                let Some(wait) = waits.iter().find(|wait| regime.events[wait.event.index()].proxy) else { continue };
                found.add_with(Rule::FenceThread, Entity::Task(r, id), || {
                    let message = format!(
                        "waits for {}, which has `proxy`, expected that of the first task of a queue alone",
                        wait.event
                    );
                    (message, vec![note(Entity::Event(r, wait.event), "asks for a fence that no loader makes")])
                });
            }
        }
    }
}

/// An append is visible to ordinary loads of `sm`, not to its bulk copies: no proxy fence after it became visible.
pub(super) fn missing(
    at: Entity,
    sm: usize,
    buffer: BufferId,
    story: impl FnOnce() -> Vec<Witness>,
    found: &mut Found,
) {
    found.add_with(Rule::MissingProxy, at, || {
        let message = format!(
            "bulk copies of {buffer} on sm{sm} read an append without a proxy fence, \
             expected `proxy` on a carried event that the SM's first task waits for"
        );
        (message, story())
    });
}
