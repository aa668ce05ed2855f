//! Group 1, tables: values that are known only at run time, and whether their declared facts are enough for their uses.
//!
//! The later groups identify a cache row with its sequence and position, and assume that a row reads only cache rows that
//! its step does not append. Four facts make that true in memory, so each must be declared where it is used.

use super::operands::EXPERTS_MAX;
use super::{Entity, Found, Rule, note};
use crate::ir::op::{Op, Role};
use crate::ir::program::{Buffer, Program, Rows, Space};
use crate::ir::table::{Fact, Holds, Table, TableHome};
use crate::ir::{BufferId, GridId, TableId};

/// Far above any kernel; below it, rows of a buffer are counted without wrapping.
const ROWS_MAX: u32 = 1 << 10;

pub(super) fn check(program: &Program, found: &mut Found) {
    let rows = program.rows;
    if rows == 0 || rows > ROWS_MAX {
        found.add(Rule::Attribute, Entity::Schedule, || format!("expected 1 to {ROWS_MAX} rows, found {rows}"));
        return;
    }
    for (t, table) in (0..).zip(&program.tables) {
        check_table(TableId(t), table, program, found);
    }
    for (b, buffer) in (0..).zip(&program.buffers) {
        check_rows(BufferId(b), buffer, program, found);
        check_paging(BufferId(b), buffer, program, found);
    }
    launches(program, found);
    lookups(program, found);
    if program.rows > 1 {
        several_rows(program, found);
    }
}

/// A lookup takes one of the choices of a row, or the parts that all rows chose are dealt; a part begins with a unit.
fn lookups(program: &Program, found: &mut Found) {
    for (g, grid) in (0..).zip(&program.grids) {
        for operand in &grid.operands {
            let Rows::Lookup(id) = operand.rows else { continue };
            if program.tables[id.index()].holds != Holds::Choices || grid.is_dealt() != (program.rows > 1) {
                found.add_with(Rule::Table, Entity::Grid(GridId(g)), || {
                    let role = operand.role.name();
                    let message = format!(
                        "expected a table of choices for `{role}`, whose parts are dealt in steps of several rows"
                    );
                    (message, vec![note(Entity::Table(id), "is looked up")])
                });
            }
            if let Op::MatVec(m) = &grid.op {
                // Gate rows and up rows are padded, each part for itself.
                let (rows, unit) = (m.rows, m.unit_rows.max(1));
                if !m.epilogue.is_gated() && !rows.is_multiple_of(unit) {
                    found.add(Rule::Shape, Entity::Grid(GridId(g)), || {
                        format!("expected parts of whole units of {unit} rows, found {rows} rows")
                    });
                }
            }
        }
    }
}

/// Tasks that touch rows of positions take one row of the step each, all others take all of them.
fn launches(program: &Program, found: &mut Found) {
    let own = |rows: Rows| matches!(rows, Rows::Own | Rows::Current | Rows::History);
    for (g, grid) in (0..).zip(&program.grids) {
        let expected = program.rows > 1 && grid.operands.iter().any(|operand| own(operand.rows));
        if grid.per_row != expected {
            found.add(Rule::Shape, Entity::Grid(GridId(g)), || {
                let told = |per_row| if per_row { "one row of the step" } else { "all rows of the step" };
                format!("expected tasks of {}, found tasks of {}", told(expected), told(grid.per_row))
            });
        }
    }
}

fn check_table(id: TableId, table: &Table, program: &Program, found: &mut Found) {
    let at = Entity::Table(id);
    let Table { name: _, home, holds, rows, cols, bound, facts } = table;
    let mut expect = |holds: bool, message: &dyn Fn() -> String| {
        if !holds {
            found.add(Rule::Table, at, message);
        }
    };
    expect(*bound > 0, &|| "expected a bound of at least 1, found 0".to_string());
    expect(facts.is_sorted_by(|a, b| a < b), &|| "expected each fact once, in order".to_string());
    for fact in facts.iter().filter(|fact| !holds.facts().contains(fact)) {
        expect(false, &|| format!("declares `{}`, which says nothing of {}", fact.name(), holds.name()));
    }
    let first = program.table(*holds).map_or(id, |(first, _)| first);
    let (expected_rows, expected_cols) = match holds {
        Holds::Sequences | Holds::Positions => (program.rows, 1),
        // A row for each sequence; the columns are judged with the caches that it pages.
        Holds::Pages => (program.table(Holds::Sequences).map_or(1, |(_, table)| table.bound), *cols),
        // As many as the op that makes them chooses.
        Holds::Choices => (program.rows, *cols),
    };
    expect((*rows, *cols) == (expected_rows, expected_cols) && *cols > 0, &|| {
        format!("expected {expected_rows} x {expected_cols} entries, found {rows} x {cols}")
    });
    match (holds, home) {
        (Holds::Choices, TableHome::Device(buffer)) => {
            expect(*bound <= EXPERTS_MAX, &|| format!("expected at most {EXPERTS_MAX} parts, found {bound}"));
            let writers = program.grids.iter().filter_map(|grid| grid.operand(Role::Out).map(|out| (grid, out.buffer)));
            let ops: Vec<&Op> = writers.filter(|(_, out)| out == buffer).map(|(grid, _)| &grid.op).collect();
            let held = |op: &&Op| matches!(op, Op::Route(route) if route.experts <= *bound && route.top_k == *cols);
            expect(!ops.is_empty() && ops.iter().all(held), &|| {
                format!(
                    "expected {cols} entries below {bound} by a `route` to {buffer}, found other writers, more experts or \
                     another `top_k`"
                )
            });
        }
        (Holds::Choices, TableHome::Host) => expect(false, &|| "expected choices of the device".to_string()),
        (_, TableHome::Device(_)) => expect(false, &|| format!("expected {} of the host", holds.name())),
        (_, TableHome::Host) => expect(first == id, &|| format!("expected one table of {}, as {first}", holds.name())),
    }
    if *holds == Holds::Positions && *bound != program.context_max {
        let context_max = program.context_max;
        expect(false, &|| format!("expected `context_max` {context_max} as the bound of positions, found {bound}"));
    }
}

/// What tasks exchange, keep or hand out has a row for each row of the step.
fn check_rows(id: BufferId, buffer: &Buffer, program: &Program, found: &mut Found) {
    let of_step = matches!(buffer.space, Space::Exchange | Space::Private | Space::Output);
    if of_step && buffer.rows != program.rows {
        found.add(Rule::BufferExtent, Entity::Buffer(id), || {
            let (space, expected) = (buffer.space.name(), program.rows);
            format!("expected rows of the step in {space}, {expected}; found {}", buffer.rows)
        });
    }
    // Places in a buffer of several rows are counted in one number.
    if of_step && u64::from(buffer.rows) * u64::from(buffer.cols) > u64::from(u32::MAX) {
        found.add(Rule::BufferExtent, Entity::Buffer(id), || {
            format!("expected at most 2^32 - 1 elements, found {} x {}", buffer.rows, buffer.cols)
        });
    }
}

fn check_paging(id: BufferId, buffer: &Buffer, program: &Program, found: &mut Found) {
    let at = Entity::Buffer(id);
    let Some(paging) = buffer.paging else {
        if buffer.space == Space::Cache && program.rows > 1 {
            found.add(Rule::Table, at, || "expected pages for a cache of several rows, found none".to_string());
        }
        return;
    };
    let table = program.tables.get(paging.table.index()).filter(|table| table.holds == Holds::Pages);
    let Some(table) = table.filter(|_| buffer.space == Space::Cache && paging.rows > 0) else {
        found.add(Rule::Table, at, || {
            format!("expected pages of at least one row, by a table of pages, of a cache; found {paging:?}")
        });
        return;
    };
    // An entry is a block of positions. The facts that pages are distinct and filled are about one size of blocks, and every lookup of
    // a page assumes one size.
    let mut paged = (0..).zip(&program.buffers).filter_map(|(b, buffer)| Some((b, buffer.paging?)));
    if let Some((first, of_first)) = paged.find(|(_, other)| other.table == paging.table)
        && of_first.rows != paging.rows
    {
        found.add_with(Rule::Table, at, || {
            let message = format!("expected pages of {} rows by that table, found {}", of_first.rows, paging.rows);
            (message, vec![note(Entity::Buffer(BufferId(first)), "has them")])
        });
    }
    let blocks = program.context_max.div_ceil(paging.rows);
    if table.cols < blocks {
        found.add_with(Rule::OutOfBounds, at, || {
            let message = format!("its sequences reach block {}, the table has {}", blocks - 1, table.cols);
            (message, vec![note(Entity::Table(paging.table), "holds its pages")])
        });
    }
    let reach = u64::from(table.bound) * u64::from(paging.rows);
    if reach > u64::from(buffer.rows) {
        found.add_with(Rule::OutOfBounds, at, || {
            let message = format!("its pages reach row {}, it has {} rows", reach - 1, buffer.rows);
            (message, vec![note(Entity::Table(paging.table), "holds its pages")])
        });
    }
    fact(program, Holds::Pages, Fact::Distinct, "two sequences may write one page of it", at, found);
    fact(program, Holds::Pages, Fact::Unshared, "a row may read a page of it that another row writes", at, found);
    fact(program, Holds::Positions, Fact::Filled, "a row may read positions of it that were never written", at, found);
}

/// Rows are told apart by their sequences.
fn several_rows(program: &Program, found: &mut Found) {
    for holds in [Holds::Sequences, Holds::Positions] {
        if program.table(holds).is_none() {
            found.add(Rule::Table, Entity::Schedule, || {
                format!("expected a table of {} for {} rows, found none", holds.name(), program.rows)
            });
        }
    }
    let history = (0..).zip(&program.grids).find(|(_, grid)| grid.operand(Role::HistoryK).is_some());
    if let Some((g, _)) = history {
        let why = "a row may read what another row appends in the same step";
        fact(program, Holds::Sequences, Fact::Consecutive, why, Entity::Grid(GridId(g)), found);
    }
}

/// A fact that the proof of `at` uses.
pub(super) fn fact(program: &Program, holds: Holds, fact: Fact, otherwise: &str, at: Entity, found: &mut Found) {
    let table = program.table(holds);
    if !table.is_some_and(|(_, table)| table.facts.contains(&fact)) {
        found.add_with(Rule::TableFact, at, || {
            let message = format!("expected {} that are `{}`: {otherwise}", holds.name(), fact.name());
            (message, table.map(|(id, _)| note(Entity::Table(id), "does not say so")).into_iter().collect())
        });
    }
}
