//! Group 1, names: what generated code spells out. Everything else is called by its id there.

use super::{Entity, Found, Rule, note};
use crate::ir::GridId;
use crate::ir::schedule::Schedule;

pub(super) fn check(schedule: &Schedule, found: &mut Found) {
    let grids = (0..).zip(&schedule.program.grids).map(|(g, grid)| (Entity::Grid(GridId(g)), &grid.name));
    for (at, name) in std::iter::once((Entity::Schedule, &schedule.program.name)).chain(grids) {
        // They stand in comments, which a line feed ends and a backslash carries on into the next line.
        if let Some(c) = name.chars().find(|c| c.is_control() || matches!(c, '\\' | '\u{2028}' | '\u{2029}')) {
            found.add(Rule::Name, at, || format!("expected a name of one line without backslashes, found {c:?} in it"));
        }
    }
    // Each part is a constant of generated code.
    let parts = &schedule.machine.smem;
    for (i, part) in (0..).zip(parts) {
        if let Some(first) = parts[..i as usize].iter().position(|other| other.kind == part.kind) {
            found.add_with(Rule::SmemPart, Entity::SmemPart(i), || {
                let message = format!("expected one part `{}`, found another", part.kind.name());
                (message, vec![note(Entity::SmemPart(first as u32), "is one already")])
            });
        }
    }
}
