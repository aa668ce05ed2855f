//! Group 1, tasks: ids, queues, launches, and who produces which element.

use super::{Entity, Found, Rule, note};
use crate::ir::layout::share_of;
use crate::ir::op::{Access, Op};
use crate::ir::program::{Buffer, Cols, Grid, Operand, Program, Rows, Second, Space};
use crate::ir::schedule::{Regime, Schedule, Task};
use crate::ir::table::TableHome;
use crate::ir::{BufferId, EventId, GridId, SmId, TableId, TaskId};
use std::collections::BTreeMap;

/// Ids and counts: after this, every id may index what it names.
pub(super) fn structure(schedule: &Schedule, found: &mut Found) {
    let program = &schedule.program;
    let (buffers, grids) = (program.buffers.len(), program.grids.len());
    if [buffers, grids, schedule.regimes.len()].iter().any(|&n| n >= u32::MAX as usize) {
        found.add(Rule::Counts, Entity::Schedule, || "expected fewer than 2^32 - 1 entities of a kind".to_string());
        return;
    }
    references(program, found);
    if schedule.placement.len() != buffers {
        let entries = schedule.placement.len();
        found.add(Rule::Counts, Entity::Schedule, || {
            format!("expected {buffers} placement entries, one a buffer, found {entries}")
        });
    }
    if schedule.machine.sms == 0 {
        found.add(Rule::Counts, Entity::Machine, || "expected at least one SM, found `sms` 0".to_string());
    }
    if schedule.regimes.is_empty() {
        found.add(Rule::Counts, Entity::Schedule, || "expected at least one regime, found none".to_string());
    }
    let mut from = 0;
    for (r, regime) in (0..).zip(&schedule.regimes) {
        let position = regime.from_position;
        if r == 0 && position != 0 {
            found.add(Rule::RegimeRange, Entity::Regime(r), || {
                format!("expected the first regime to start at position 0, found {position}")
            });
        } else if r > 0 && position <= from {
            found.add(Rule::RegimeRange, Entity::Regime(r), || {
                format!("expected a start after that of r{}, {from}, found {position}", r - 1)
            });
        }
        if position >= program.context_max {
            let context_max = program.context_max;
            found.add(Rule::RegimeRange, Entity::Regime(r), || {
                format!("expected a start below `context_max` {context_max}, found {position}")
            });
        }
        from = position;
        tables(r, regime, schedule, found);
    }
}

/// What operands, buffers and tables name.
fn references(program: &Program, found: &mut Found) {
    let buffers = program.buffers.len();
    for (g, grid) in (0..).zip(&program.grids) {
        for operand in &grid.operands {
            if operand.buffer.index() >= buffers {
                let (role, id) = (operand.role.name(), operand.buffer);
                found.add(Rule::IdRange, Entity::Grid(GridId(g)), || {
                    format!("`{role}` names {id}, the program has {buffers} buffers")
                });
            }
            if let Rows::Lookup(id) = operand.rows
                && id.index() >= program.tables.len()
            {
                let (role, tables) = (operand.role.name(), program.tables.len());
                found.add(Rule::IdRange, Entity::Grid(GridId(g)), || {
                    format!("`{role}` is looked up in {id}, the program has {tables} tables")
                });
            }
        }
    }
    for (t, table) in (0..).zip(&program.tables) {
        if let TableHome::Device(id) = table.home
            && id.index() >= buffers
        {
            found.add(Rule::IdRange, Entity::Table(TableId(t)), || {
                format!("names {id}, the program has {buffers} buffers")
            });
        }
    }
    for (b, buffer) in (0..).zip(&program.buffers) {
        if let Some(paging) = buffer.paging
            && paging.table.index() >= program.tables.len()
        {
            found.add(Rule::IdRange, Entity::Buffer(BufferId(b)), || {
                let (table, tables) = (paging.table, program.tables.len());
                format!("names {table}, the program has {tables} tables")
            });
        }
    }
}

/// The queue, stream, task and event tables of one regime.
fn tables(r: u32, regime: &Regime, schedule: &Schedule, found: &mut Found) {
    let (tasks, events) = (regime.tasks.len(), regime.events.len());
    let (grids, buffers) = (schedule.program.grids.len(), schedule.program.buffers.len());
    if [tasks, events, regime.queues.len()].iter().any(|&n| n >= u32::MAX as usize) {
        found.add(Rule::Counts, Entity::Regime(r), || "expected fewer than 2^32 - 1 entities of a kind".to_string());
        return;
    }
    for (what, count) in [("queues", regime.queues.len()), ("streams", regime.streams.len())] {
        if count != schedule.machine.sms as usize {
            let sms = schedule.machine.sms;
            found.add(Rule::Counts, Entity::Regime(r), || format!("expected {sms} {what}, one an SM, found {count}"));
        }
    }
    for (t, task) in (0..).zip(&regime.tasks) {
        let at = Entity::Task(r, TaskId(t));
        if task.grid.index() >= grids {
            found.add(Rule::IdRange, at, || format!("is of {}, the program has {grids} grids", task.grid));
        }
        for event in task.waits.iter().map(|w| w.event).chain(task.signals.iter().copied()) {
            if event.index() >= events {
                found.add(Rule::IdRange, at, || format!("names {event}, r{r} has {events} events"));
            }
        }
    }
    for (e, event) in (0..).zip(&regime.events) {
        if event.buffer.index() >= buffers {
            found.add(Rule::IdRange, Entity::Event(r, EventId(e)), || {
                format!("names {}, the program has {buffers} buffers", event.buffer)
            });
        }
    }
    let mut queued = vec![false; tasks];
    for (s, queue) in (0..).zip(&regime.queues) {
        for &task in queue {
            match queued.get_mut(task.index()) {
                None => found.add(Rule::IdRange, Entity::Sm(r, SmId(s)), || {
                    format!("its queue names {task}, r{r} has {tasks} tasks")
                }),
                Some(seen) if *seen => found.add(Rule::TaskQueued, Entity::Task(r, task), || {
                    format!("expected one place in the queues, found a second one on sm{s}")
                }),
                Some(seen) => *seen = true,
            }
        }
    }
    for (t, _) in queued.iter().enumerate().filter(|(_, seen)| !**seen) {
        found.add(Rule::TaskQueued, Entity::Task(r, TaskId::from(t)), || "is in no queue".to_string());
    }
    for (s, stream) in (0..).zip(&regime.streams) {
        for run in stream {
            if run.task.index() >= tasks {
                found.add(Rule::IdRange, Entity::Sm(r, SmId(s)), || {
                    format!("its stream names {}, r{r} has {tasks} tasks", run.task)
                });
            }
            if let Some(event) = run.after.filter(|event| event.index() >= events) {
                found.add(Rule::IdRange, Entity::Sm(r, SmId(s)), || {
                    format!("its stream waits for {event}, r{r} has {events} events")
                });
            }
        }
    }
}

/// Where each task of a regime runs.
pub(super) struct Owners {
    pub sm: Vec<u32>,
    /// Place in the queue.
    pub pos: Vec<u32>,
}

impl Owners {
    pub(super) fn of(regime: &Regime) -> Owners {
        let mut owners = Owners { sm: vec![0; regime.tasks.len()], pos: vec![0; regime.tasks.len()] };
        for (s, queue) in (0..).zip(&regime.queues) {
            for (pos, task) in (0..).zip(queue) {
                owners.sm[task.index()] = s;
                owners.pos[task.index()] = pos;
            }
        }
        owners
    }
}

/// An operand as the later passes see it.
#[derive(Clone, Copy)]
pub(super) struct Flow {
    pub buffer: BufferId,
    pub access: Access,
    pub cols: Cols,
    /// Which of the rows that are told apart a task touches.
    which: Which,
    rows: RowsOf,
}

/// Rows that a task touches of a buffer whose rows are told apart.
#[derive(Clone, Copy)]
enum Which {
    All,
    /// Its own row of the step.
    Own,
    /// Those of its part of the sequences.
    Part,
}

/// How the rows of a buffer are told apart: one by one, or by the part of the sequences that they are in. Each row of a launch is in one
/// part, so what holds of every part holds of every row; a part counts as a row here.
#[derive(Clone, Copy)]
pub(super) struct RowsOf {
    /// Rows that are told apart; 1: a task that touches a column touches it in all rows.
    rows: u32,
    /// Columns of a row.
    cols: u32,
    /// These are parts.
    parts: bool,
}

impl RowsOf {
    /// Columns `lo..hi` of one row or of all, among the columns of all rows side by side.
    pub(super) fn spans(self, row: Option<u32>, lo: u32, hi: u32) -> impl Iterator<Item = (u32, u32)> + Clone {
        let RowsOf { rows, cols, .. } = self;
        let whole = lo == 0 && hi == cols && row.is_none();
        let (first, count, hi) = match row {
            _ if rows == 1 => (0, 1, hi),
            Some(row) => (row, 1, hi),
            None if whole => (0, 1, rows * cols),
            None => (0, rows, hi),
        };
        // They fit `u32`: no limit exceeds its buffer, and no buffer has more elements.
        (first..first + count).map(move |row| (row * cols + lo, row * cols + hi))
    }

    /// The rows among `row`, or among all, that are told apart; `None` where none are.
    pub(super) fn each(self, row: Option<u32>) -> impl Iterator<Item = Option<u32>> {
        let (first, count) = match row {
            Some(row) => (row, 1),
            None => (0, self.rows),
        };
        let apart = self.apart();
        (first..first + count).map(move |row| apart.then_some(row))
    }

    /// Whether its rows are told apart.
    pub(super) fn apart(self) -> bool {
        self.rows > 1
    }

    /// Whether its rows are told apart one by one.
    pub(super) fn single(self) -> bool {
        self.rows > 1 && !self.parts
    }

    /// What is told apart, as a message names it.
    pub(super) fn each_name(self) -> &'static str {
        if self.parts { "part" } else { "row" }
    }

    /// Columns as a message names them.
    pub(super) fn told(self, lo: u32, hi: u32) -> String {
        let RowsOf { rows, cols, .. } = self;
        let each = self.each_name();
        if rows == 1 {
            return format!("columns {lo}..{hi}");
        }
        let (row, last) = (lo / cols, hi.saturating_sub(1) / cols);
        if row == last {
            return format!("columns {}..{} of {each} {row}", lo - row * cols, hi - row * cols);
        }
        format!("columns {}.. of {each} {row} to {} of {each} {last}", lo - row * cols, hi - last * cols)
    }
}

impl Flow {
    /// Columns that a task touches; `None`: none. They fit `u32` because no limit exceeds its buffer.
    pub(super) fn span(&self, task: &Task) -> Option<(u32, u32)> {
        let (lo, hi) = self.cols.range(task.lo, task.hi, task.j);
        (lo < hi).then_some((lo as u32, hi as u32))
    }

    /// The same among the columns of all rows side by side, where rows are told apart.
    pub(super) fn spans(&self, task: &Task) -> impl Iterator<Item = (u32, u32)> + use<> {
        let (rows, row) = (self.rows, self.row(task));
        self.span(task).into_iter().flat_map(move |(lo, hi)| rows.spans(row, lo, hi))
    }

    /// The row, or the part, that a task touches; `None`: all.
    pub(super) fn row(&self, task: &Task) -> Option<u32> {
        match self.which {
            Which::All => None,
            Which::Own => Some(task.row),
            Which::Part => Some(task.j),
        }
    }
}

/// Kinds of flows.
const CLASSES: usize = 5;

/// The operands of all grids, sorted by what they mean for other tasks. Constants and weights are left out: no task
/// writes them.
pub(super) struct Grids {
    flows: Vec<Flow>,
    ends: Vec<[u32; CLASSES]>,
    /// By buffer.
    rows: Vec<RowsOf>,
    /// By grid: whether parts are dealt to its tasks.
    dealt: Vec<bool>,
    /// By buffer: whether some of it is written by tasks to which parts are dealt.
    partly: Vec<bool>,
}

impl Grids {
    pub(super) fn of(program: &Program) -> Grids {
        let own = |rows: Rows| matches!(rows, Rows::Own | Rows::Current | Rows::History);
        let mut rows: Vec<RowsOf> =
            program.buffers.iter().map(|b| RowsOf { rows: 1, cols: b.cols, parts: false }).collect();
        // Where rows are told apart one by one, a task of a part counts as one that touches all of them: then two parts overlap.
        for grid in &program.grids {
            for operand in grid.operands.iter().filter(|o| o.rows == Rows::Part) {
                let of = &mut rows[operand.buffer.index()];
                (of.rows, of.parts) = (of.rows.max(grid.parts()), true);
            }
        }
        if program.rows > 1 {
            let operands = program.grids.iter().flat_map(|grid| &grid.operands);
            operands.filter(|o| own(o.rows)).for_each(|o| {
                let of = &mut rows[o.buffer.index()];
                (of.rows, of.parts) = (program.rows, false);
            });
        }
        let mut grids = Grids {
            flows: Vec::with_capacity(4 * program.grids.len()),
            ends: Vec::with_capacity(program.grids.len()),
            rows,
            dealt: program.grids.iter().map(Grid::is_dealt).collect(),
            partly: program.dealt_buffers(),
        };
        for grid in &program.grids {
            let mut ends = [0; CLASSES];
            for (class, end) in ends.iter_mut().enumerate() {
                for operand in &grid.operands {
                    // A lookup reads the entry of its table, besides the part that the entry chooses.
                    if let Rows::Lookup(table) = operand.rows
                        && operand.access == Access::Stream
                        && let TableHome::Device(buffer) = program.tables[table.index()].home
                        && class == CLASSES - 1
                    {
                        // Slot `j` of the task takes entry `j` of its row, or it takes those of all slots; parts that are dealt depend
                        // on the entries of all rows.
                        let rows = grids.rows[buffer.index()];
                        let limit = program.tables[table.index()].cols;
                        let all = grid.is_dealt() || matches!(&grid.op, Op::MatVec(m) if m.slots > 1);
                        let cols = if all { Cols::all(limit) } else { Cols { stride_j: 1, limit, ..Cols::all(1) } };
                        let which = if rows.single() && !grid.is_dealt() { Which::Own } else { Which::All };
                        let flow = Flow { buffer, access: Access::Read, cols, which, rows };
                        grids.flows.push(flow);
                        continue;
                    }
                    let space = program.buffers[operand.buffer.index()].space;
                    if class_of(space, operand.access, operand.rows) == Some(class) {
                        let Operand { buffer, access, cols, .. } = *operand;
                        let rows = grids.rows[buffer.index()];
                        let which = match operand.rows {
                            Rows::Part if rows.parts => Which::Part,
                            of if rows.single() && own(of) => Which::Own,
                            _ => Which::All,
                        };
                        grids.flows.push(Flow { buffer, access, cols, which, rows });
                    }
                }
                *end = grids.flows.len() as u32;
            }
            grids.ends.push(ends);
        }
        grids
    }

    /// Whether a task of `grid` that waits for all of a buffer knows that all tasks that write it are done. Where parts are dealt, tasks poll no
    /// more than rows of these parts, and may have written nothing: so they know of nothing but the choices.
    pub(super) fn tells(&self, grid: GridId, buffer: BufferId) -> bool {
        !self.partly[buffer.index()]
            && (!self.dealt[grid.index()] || self.lookups(grid).iter().any(|of| of.buffer == buffer))
    }

    fn class(&self, grid: GridId, class: usize) -> &[Flow] {
        let ends = &self.ends[grid.index()];
        let start = match (class, grid.index()) {
            (0, 0) => 0,
            (0, g) => self.ends[g - 1][CLASSES - 1],
            _ => ends[class - 1],
        };
        &self.flows[start as usize..ends[class] as usize]
    }

    /// How the rows of a buffer are told apart.
    pub(super) fn rows(&self, buffer: BufferId) -> RowsOf {
        self.rows[buffer.index()]
    }

    /// Exchange regions that tasks of `grid` read.
    pub(super) fn reads(&self, grid: GridId) -> &[Flow] {
        self.class(grid, 0)
    }

    /// Exchange, cache and output regions that they write.
    pub(super) fn writes(&self, grid: GridId) -> &[Flow] {
        self.class(grid, 1)
    }

    /// Private regions that they read, write or update.
    pub(super) fn privates(&self, grid: GridId) -> &[Flow] {
        self.class(grid, 2)
    }

    /// Entries of tables that choose what their loaders bring in.
    pub(super) fn lookups(&self, grid: GridId) -> &[Flow] {
        self.class(grid, 4)
    }

    /// Cache columns whose history they stream.
    pub(super) fn history(&self, grid: GridId) -> &[Flow] {
        self.class(grid, 3)
    }
}

fn class_of(space: Space, access: Access, rows: Rows) -> Option<usize> {
    match (space, rows) {
        (Space::Private, _) => Some(2),
        (_, Rows::History) => Some(3),
        (Space::Exchange, _) if access == Access::Read => Some(0),
        (Space::Exchange | Space::Cache | Space::State | Space::Output, _) if access.writes() => Some(1),
        _ => None,
    }
}

/// Launch indices: each once in every regime; each queue starts with its `select`.
pub(super) fn launches(schedule: &Schedule, found: &mut Found) {
    let (grids, rows) = (&schedule.program.grids, schedule.program.rows);
    for (r, regime) in (0..).zip(&schedule.regimes) {
        let mut fine = true;
        for (t, task) in (0..).zip(&regime.tasks) {
            let grid = &grids[task.grid.index()];
            let at = Entity::Task(r, TaskId(t));
            if task.lo >= task.hi || task.hi > grid.n || task.j >= grid.second.extent() {
                fine = false;
                found.add(Rule::LaunchRange, at, || {
                    let (Task { lo, hi, j, .. }, extent) = (task, grid.second.extent());
                    format!(
                        "expected a range of indices below {} and `j` below {extent}, found {lo}..{hi} and {j}",
                        grid.n
                    )
                });
            } else if task.row >= if grid.per_row { rows } else { 1 } {
                fine = false;
                found.add(Rule::LaunchRange, at, || {
                    let most = if grid.per_row { rows } else { 1 };
                    format!("expected a row below {most}, found {}", task.row)
                });
            } else if one_index(&grid.op) && task.hi - task.lo != 1 {
                fine = false;
                found.add(Rule::TaskWidth, at, || {
                    format!("expected one index of `{}` a task, found {}..{}", grid.op.name(), task.lo, task.hi)
                });
            }
        }
        for (s, queue) in (0..).zip(&regime.queues) {
            let select = |task: &TaskId| matches!(grids[regime.tasks[task.index()].grid.index()].op, Op::Select);
            if !queue.first().is_some_and(select) {
                found.add(Rule::SelectFirst, Entity::Sm(r, SmId(s)), || {
                    "expected its queue to start with a `select`, found none there".to_string()
                });
            }
            for &task in queue.iter().skip(1).filter(|task| select(task)) {
                found.add(Rule::SelectFirst, Entity::Task(r, task), || {
                    format!("expected `select` once, at the start of the queue of sm{s}")
                });
            }
        }
        if fine {
            domains(r, regime, &schedule.program, schedule.machine.devices, found);
        }
    }
}

/// Ops whose task is one launch index: their stream, record or token is one.
fn one_index(op: &Op) -> bool {
    op.everywhere()
        || matches!(
            op,
            Op::Report
                | Op::Route(_)
                | Op::Attention(_)
                | Op::AttentionMerge { .. }
                | Op::Mix(_)
                | Op::Scan(_)
                | Op::GroupNorm(_)
        )
}

/// Every launch index of every grid has one task; only attention, which has alternatives, may be absent as a whole.
fn domains(r: u32, regime: &Regime, program: &Program, devices: u32, found: &mut Found) {
    let (grids, rows) = (&program.grids, program.rows);
    let (mut by_grid, starts) = tasks_by_grid(regime, grids.len());
    for (g, grid) in grids.iter().enumerate() {
        let tasks = &mut by_grid[starts[g] as usize..starts[g + 1] as usize];
        let at = Entity::Grid(GridId::from(g));
        if tasks.is_empty() {
            if !matches!(grid.op, Op::Attention(_) | Op::AttentionMerge { .. }) {
                found.add(Rule::LaunchMissing, at, || format!("has no task in r{r}, expected {} indices", grid.n));
            }
            continue;
        }
        let of = |id: &TaskId| &regime.tasks[id.index()];
        if let Second::Dealt(shares) = grid.second {
            tasks.sort_by_key(|id| of(id).j);
            all_dealt(r, (GridId::from(g), grid), tasks, regime, (shares, devices), found);
            continue;
        }
        let ordinal = matches!(grid.second, Second::Ordinal(_));
        // Rows follow each other as shares do: axis `row * extent + j`.
        let extent = if ordinal { 1 } else { grid.second.extent() };
        let axes = extent.saturating_mul(if grid.per_row { rows } else { 1 });
        let key = |id: &TaskId| (of(id).row * extent + if ordinal { 0 } else { of(id).j }, of(id).lo);
        if !tasks.is_sorted_by_key(key) {
            tasks.sort_unstable_by_key(key);
        }
        // Indices below `end` of axis `j` are launched; all of every axis below `j` are.
        let (mut j, mut end, mut last) = (0, 0, None);
        for id in tasks.iter() {
            let (task_j, lo) = key(id);
            if task_j > j {
                missing(found, at, r, j, end, grid.n);
                // Only an axis without any task lies between.
                if task_j > j + 1 {
                    missing(found, at, r, j + 1, 0, grid.n);
                }
                (j, end) = (task_j, 0);
            }
            if lo < end {
                found.add_with(Rule::LaunchTwice, Entity::Task(r, *id), || {
                    let message = format!("expected indices from {end} of {} (`j` {j}), found {lo}", GridId::from(g));
                    let other = last.map(|other| note(Entity::Task(r, other), "also launches them"));
                    (message, other.into_iter().collect())
                });
            }
            missing(found, at, r, j, end, lo);
            end = end.max(of(id).hi);
            last = Some(*id);
        }
        missing(found, at, r, j, end, grid.n);
        if j + 1 < axes {
            missing(found, at, r, j + 1, 0, grid.n);
        }
        if ordinal {
            if !tasks.is_sorted_by(|a, b| of(a).j < of(b).j) {
                tasks.sort_unstable_by_key(|id| of(id).j);
            }
            for pair in tasks.windows(2).filter(|pair| of(&pair[0]).j == of(&pair[1]).j) {
                found.add_with(Rule::LaunchTwice, Entity::Task(r, pair[1]), || {
                    let message = format!("expected an ordinal of its own, found {}", of(&pair[1]).j);
                    (message, vec![note(Entity::Task(r, pair[0]), "has the same ordinal")])
                });
            }
        }
    }
}

/// The tasks of one grid after another, and where those of each begin.
fn tasks_by_grid(regime: &Regime, grids: usize) -> (Vec<TaskId>, Vec<u32>) {
    let mut starts = vec![0u32; grids + 1];
    for task in &regime.tasks {
        starts[task.grid.index() + 1] += 1;
    }
    for g in 0..grids {
        starts[g + 1] += starts[g];
    }
    let mut next = starts.clone();
    let mut by_grid = vec![TaskId(0); regime.tasks.len()];
    for (t, task) in (0..).zip(&regime.tasks) {
        let place = &mut next[task.grid.index()];
        by_grid[*place as usize] = TaskId(t);
        *place += 1;
    }
    (by_grid, starts)
}

/// Each share of what is dealt has one task, on the device whose units it is a share of. `tasks`: of the grid, by share.
fn all_dealt(
    r: u32,
    (id, grid): (GridId, &Grid),
    tasks: &[TaskId],
    regime: &Regime,
    (shares, devices): (u32, u32),
    found: &mut Found,
) {
    let each = (shares / devices.max(1)).max(1);
    if !shares.is_multiple_of(devices.max(1)) {
        found.add(Rule::Shape, Entity::Grid(id), || format!("expected shares for {devices} devices, found {shares}"));
    }
    let mut next = 0;
    for &id in tasks {
        let task = &regime.tasks[id.index()];
        if task.j < next {
            found.add(Rule::LaunchTwice, Entity::Task(r, id), || {
                format!("expected share {next}, found {} again", task.j)
            });
        }
        missing(found, Entity::Grid(task.grid), r, next, 0, if next < task.j { grid.n } else { 0 });
        let own = share_of(grid.n, task.j / each, devices);
        if (task.lo, task.hi) != (own.start, own.end) {
            found.add(Rule::LaunchRange, Entity::Task(r, id), || {
                format!("expected all indices that its device has, {own:?}, found {}..{}", task.lo, task.hi)
            });
        }
        next = task.j + 1;
    }
    missing(found, Entity::Grid(id), r, next, 0, if next < shares { grid.n } else { 0 });
}

fn missing(found: &mut Found, at: Entity, r: u32, j: u32, from: u32, to: u32) {
    if from < to {
        found.add(Rule::LaunchMissing, at, || format!("indices {from}..{to} (`j` {j}) have no task in r{r}"));
    }
}

/// Columns that one task writes.
#[derive(Clone, Copy)]
pub(super) struct Region {
    pub lo: u32,
    pub hi: u32,
    pub task: TaskId,
}

/// What a regime writes of exchange, cache and output buffers: for each buffer disjoint regions in ascending order.
pub(super) struct Writes {
    regions: Vec<Region>,
    starts: Vec<u32>,
}

impl Writes {
    /// Collects the regions, and judges that a buffer in use is written whole and once.
    pub(super) fn of(r: u32, regime: &Regime, program: &Program, grids: &Grids, found: &mut Found) -> Writes {
        let buffers = &program.buffers;
        let mut starts = vec![0u32; buffers.len() + 1];
        let mut unsorted = Vec::with_capacity(regime.tasks.len());
        let mut launched = vec![false; grids.ends.len()];
        for (t, task) in (0..).zip(&regime.tasks) {
            launched[task.grid.index()] = true;
            for flow in grids.writes(task.grid) {
                for (lo, hi) in flow.spans(task) {
                    unsorted.push((flow.buffer, Region { lo, hi, task: TaskId(t) }));
                    starts[flow.buffer.index() + 1] += 1;
                }
            }
        }
        for b in 0..buffers.len() {
            starts[b + 1] += starts[b];
        }
        let mut next = starts.clone();
        let mut regions = vec![Region { lo: 0, hi: 0, task: TaskId(0) }; unsorted.len()];
        for (buffer, region) in unsorted {
            let place = &mut next[buffer.index()];
            regions[*place as usize] = region;
            *place += 1;
        }
        let mut used = vec![false; buffers.len()];
        for (g, _) in launched.iter().enumerate().filter(|(_, launched)| **launched) {
            let grid = GridId::from(g);
            for flow in grids.reads(grid).iter().chain(grids.writes(grid)).chain(grids.history(grid)) {
                used[flow.buffer.index()] = true;
            }
        }
        for (b, _) in used.iter().enumerate().filter(|(_, used)| **used) {
            let of_buffer = &mut regions[starts[b] as usize..starts[b + 1] as usize];
            if !of_buffer.is_sorted_by_key(|region| region.lo) {
                of_buffer.sort_unstable_by_key(|region| region.lo);
            }
            cover(r, regime, (BufferId::from(b), &buffers[b]), of_buffer, grids, found);
        }
        Writes { regions, starts }
    }

    /// All regions of a buffer.
    pub(super) fn buffer(&self, buffer: BufferId) -> &[Region] {
        &self.regions[self.starts[buffer.index()] as usize..self.starts[buffer.index() + 1] as usize]
    }

    /// Those that overlap `lo..hi`.
    pub(super) fn overlapping(&self, buffer: BufferId, lo: u32, hi: u32) -> &[Region] {
        let all = self.buffer(buffer);
        let first = all.partition_point(|region| region.hi <= lo);
        let rest = &all[first..];
        &rest[..rest.partition_point(|region| region.lo < hi)]
    }
}

/// Judges that `regions`, ascending, cover the buffer without overlap. A cache row has padding between heads, which
/// no task may read or write.
fn cover(
    r: u32,
    regime: &Regime,
    (buffer, memory): (BufferId, &Buffer),
    regions: &[Region],
    grids: &Grids,
    found: &mut Found,
) {
    let padded = memory.space == Space::Cache;
    // Tasks to which parts are dealt name all that any of them may write; each element is dealt to one.
    let are_dealt = |a: TaskId, b: TaskId| {
        let [a, b] = [a, b].map(|task| regime.tasks[task.index()].grid);
        a == b && grids.dealt[a.index()]
    };
    let mut end = 0;
    let mut last: Option<TaskId> = None;
    for region in regions {
        if region.lo > end {
            uncovered(r, regime, buffer, (end, region.lo), padded, grids, found);
        } else if region.lo < end && !last.is_some_and(|last| are_dealt(last, region.task)) {
            found.add_with(Rule::DoubleProducer, Entity::Task(r, region.task), || {
                let most = region.hi.min(end);
                let columns = grids.rows(buffer).told(region.lo, most);
                let message = format!("writes {columns} of {buffer}, expected one producer");
                (message, last.iter().map(|&other| note(Entity::Task(r, other), "writes them too")).collect())
            });
        }
        if region.hi > end {
            (end, last) = (region.hi, Some(region.task));
        }
    }
    let all = grids.rows(buffer).rows * memory.cols;
    if end < all {
        uncovered(r, regime, buffer, (end, all), padded, grids, found);
    }
}

fn uncovered(
    r: u32,
    regime: &Regime,
    buffer: BufferId,
    (lo, hi): (u32, u32),
    padded: bool,
    grids: &Grids,
    found: &mut Found,
) {
    let touches = |task: &Task| {
        let flows = grids.reads(task.grid).iter().chain(grids.history(task.grid));
        flows.filter(|f| f.buffer == buffer).flat_map(|f| f.spans(task)).any(|s| s.0 < hi && lo < s.1)
    };
    let reader = regime.tasks.iter().position(touches);
    if padded && reader.is_none() {
        return;
    }
    found.add_with(Rule::Uncovered, Entity::Buffer(buffer), || {
        let witness = reader.map(|t| note(Entity::Task(r, TaskId::from(t)), "reads them"));
        (format!("no task of r{r} writes {}", grids.rows(buffer).told(lo, hi)), witness.into_iter().collect())
    });
}

/// Who touched an interval of private columns on one SM last.
#[derive(Clone, Copy)]
struct Touched {
    hi: u32,
    writer: TaskId,
    /// The last task in program order that read it since it was written.
    reader: Option<TaskId>,
}

/// Private data: on each SM an element is written once a step, then updated or read, in program order.
///
/// The map holds disjoint intervals, each with the tasks that touched it last. An update or a read replaces what it covers by one
/// interval, so the work is linear (times a logarithm) in the tasks whatever the regions.
pub(super) fn privates(schedule: &Schedule, grids: &Grids, found: &mut Found) {
    let mut last: BTreeMap<(BufferId, u32), Touched> = BTreeMap::new();
    for (r, regime) in (0..).zip(&schedule.regimes) {
        let grid_of = |task: TaskId| regime.tasks[task.index()].grid;
        for (s, queue) in (0..).zip(&regime.queues) {
            last.clear();
            for &id in queue {
                let task = &regime.tasks[id.index()];
                let at = Entity::Task(r, id);
                for flow in grids.privates(task.grid) {
                    let Some((lo, hi)) = flow.span(task) else { continue };
                    let buffer = flow.buffer;
                    let mut in_order = |touched: &Touched| {
                        let writer = Some(touched.writer).filter(|&writer| grid_of(writer) >= task.grid);
                        // It should have seen what this task writes.
                        let reader = touched.reader.filter(|&reader| grid_of(reader) > task.grid);
                        if let Some(other) = writer.or(reader.filter(|_| flow.access.writes())) {
                            program_order(found, at, buffer, s, task.grid, (other, grid_of(other)), r);
                        }
                    };
                    let later = |a: TaskId, b: TaskId| if grid_of(a) > grid_of(b) { a } else { b };
                    let read = |reader: Option<TaskId>| Some(reader.map_or(id, |reader| later(reader, id)));
                    // By far the most common: exactly the interval of the task before.
                    if flow.access != Access::Write
                        && let Some(entry) = last.get_mut(&(buffer, lo))
                        && entry.hi == hi
                    {
                        in_order(entry);
                        if flow.access == Access::Update {
                            *entry = Touched { hi, writer: id, reader: None };
                        } else {
                            entry.reader = read(entry.reader);
                        }
                        continue;
                    }
                    let mut covered = lo;
                    let before = last.range(..(buffer, lo)).next_back().filter(|(k, v)| k.0 == buffer && v.hi > lo);
                    let inside = last.range((buffer, lo)..(buffer, hi));
                    let parts: Vec<(u32, Touched)> = before.into_iter().chain(inside).map(|(k, v)| (k.1, *v)).collect();
                    if flow.access == Access::Write {
                        for (_, other) in &parts {
                            found.add_with(Rule::DoubleProducer, at, || {
                                let message =
                                    format!("writes columns {lo}..{hi} of {buffer}, expected one producer on sm{s}");
                                (message, vec![note(Entity::Task(r, other.writer), "writes or updates them before it")])
                            });
                        }
                    } else {
                        for (from, other) in &parts {
                            if *from > covered {
                                break;
                            }
                            covered = other.hi;
                            in_order(other);
                        }
                        if covered < hi {
                            found.add_with(Rule::Uncovered, at, || {
                                let message = format!(
                                    "columns {covered}..{hi} of {buffer} have no writer on sm{s} before it in the step"
                                );
                                let writes = |other: &Task| {
                                    let mut flows = grids.privates(other.grid).iter().filter(|f| f.buffer == buffer);
                                    flows.any(|f| {
                                        let span = f.span(other);
                                        f.access.writes() && span.is_some_and(|(from, to)| from < hi && covered < to)
                                    })
                                };
                                // Tasks that write them on another SM, or too late: one of each queue is enough.
                                let queues = regime.queues.iter().enumerate();
                                let elsewhere = queues.flat_map(|(sm, queue)| queue.iter().map(move |t| (sm, *t)));
                                let witness = elsewhere
                                    .filter(|(_, other)| *other != id && writes(&regime.tasks[other.index()]))
                                    .map(|(sm, other)| note(Entity::Task(r, other), format!("writes some on sm{sm}")))
                                    .take(WRITERS_TOLD);
                                (message, witness.collect())
                            });
                        }
                    }
                    if flow.access.writes() {
                        for (from, other) in parts {
                            last.remove(&(buffer, from));
                            if from < lo {
                                last.insert((buffer, from), Touched { hi: lo, ..other });
                            }
                            if other.hi > hi {
                                last.insert((buffer, hi), other);
                            }
                        }
                        last.insert((buffer, lo), Touched { hi, writer: id, reader: None });
                    } else if let Some(&(from, first)) = parts.first() {
                        // Merged, so that the next reader finds one interval. A part that is read only partly counts as read in full.
                        let mut whole = Touched { reader: read(first.reader), ..first };
                        for (from, part) in &parts[1..] {
                            last.remove(&(buffer, *from));
                            let readers = [whole.reader, part.reader].into_iter().flatten().reduce(later);
                            whole = Touched { hi: part.hi, writer: later(whole.writer, part.writer), reader: readers };
                        }
                        last.insert((buffer, from), whole);
                    }
                }
            }
        }
    }
}

/// Writers that a violation lists.
const WRITERS_TOLD: usize = 16;

fn program_order(
    found: &mut Found,
    at: Entity,
    buffer: BufferId,
    sm: u32,
    grid: GridId,
    (other, other_grid): (TaskId, GridId),
    r: u32,
) {
    found.add_with(Rule::PrivateOrder, at, || {
        let message = format!("touches {buffer} on sm{sm} for {grid} after {other_grid}, expected program order");
        (message, vec![note(Entity::Task(r, other), "touches it before in the queue")])
    });
}
