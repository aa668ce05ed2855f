//! Kernels over one cache: any of them may append the positions that another one reads.
//!
//! The regimes of a schedule are compared by the rules `regime-appends` and `alternatives`. The kernels of an artefact (for one row, for
//! several rows, of waves) are proven one by one, and share an arena of caches and a table of pages. What two of them must agree on is the
//! same: which attention extends which cache, and how a row of it lies in memory.

use super::Validated;
use crate::dtype::DType;
use crate::ir::op::{Attention, Op, OpKey, Role};
use crate::ir::program::{Content, Grid, Operand};
use crate::ir::schedule::Schedule;
use crate::ir::{BufferId, GridId};
use std::collections::BTreeMap;

/// Two kernels cannot share a cache. Says which attention differs, and in what.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{grid}` and `{other}` cannot share a cache: they have {what}")]
pub struct NotShared {
    pub grid: String,
    pub other: String,
    /// What differs: `other places`.
    pub what: &'static str,
}

/// Proves that one cache serves two kernels: a row that one of them appends is the row that the other one would have appended, and lies
/// where the other one reads it. A cache without pages has block `b` of a sequence in page `b`.
///
/// # Errors
/// The first attention that differs, or the first recurrent state.
pub fn share_caches(a: &Validated, b: &Validated) -> Result<(), NotShared> {
    let (of_a, of_b) = (updated(a.schedule()), updated(b.schedule()));
    for (place, other) in &of_b {
        let not_shared = |grid: String, what| Err(NotShared { grid, other: other.name.clone(), what });
        match of_a.get(place) {
            Some(one) if one.op == other.op && one.content == other.content => {}
            Some(one) => return not_shared(one.name.clone(), "states by other weights or attributes"),
            None => return not_shared(other.name.clone(), "states at other places or of other sizes"),
        }
    }
    if let (Some(grid), true) = (of_a.values().next(), of_a.len() != of_b.len()) {
        return Err(NotShared {
            grid: grid.name.clone(),
            other: b.schedule().program.name.clone(),
            what: "other states",
        });
    }
    let (a, b) = (extended(a.schedule()), extended(b.schedule()));
    // Each attention of either has its counterpart at the place of its keys, or the two have nothing there.
    for (of, others) in [(&a, &b), (&b, &a)] {
        for (place, one) in of {
            let Some(other) = others.get(place) else {
                let near = others.values().next().map_or_else(String::new, |other| other.name.clone());
                return Err(NotShared { grid: one.name.clone(), other: near, what: "keys at other places" });
            };
            if let Some(what) = one.differs(other) {
                return Err(NotShared { grid: one.name.clone(), other: other.name.clone(), what });
            }
        }
    }
    Ok(())
}

/// Where the rows of a cache lie: place in the arena, rows from one KV head to the next, columns, and the rows of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    at: Option<u64>,
    rows: u32,
    cols: (u32, u32, u32),
    dtype: DType,
    page_rows: Option<u32>,
}

impl Place {
    fn of(schedule: &Schedule, operand: &Operand) -> Place {
        let buffer = &schedule.program.buffers[operand.buffer.index()];
        Place {
            at: schedule.placement[operand.buffer.index()],
            rows: buffer.rows,
            cols: (operand.cols.base, operand.cols.stride, operand.cols.limit),
            dtype: buffer.dtype,
            page_rows: buffer.paging.map(|paging| paging.rows),
        }
    }

    fn same(&self, other: &Place) -> bool {
        let pages = self.page_rows.zip(other.page_rows).is_none_or(|(one, other)| one == other);
        pages && Place { page_rows: other.page_rows, ..*self } == *other
    }
}

/// An attention, as far as the rows that it appends depend on it, and what reads them.
struct Extends<'a> {
    name: String,
    keys: Place,
    values: Place,
    /// Without the numbers that say how heads and history are divided among tasks.
    attention: Attention,
    /// Gains of the norms of q and k, and the rope table.
    constants: [Option<&'a Content>; 3],
    /// The weights and biases that make its keys, and its values: the layer.
    sources: [Vec<&'a Content>; 2],
    /// Whether its rows are swizzled, and elements from one head to the next.
    layout: Option<(bool, u32)>,
}

impl Extends<'_> {
    fn differs(&self, other: &Extends<'_>) -> Option<&'static str> {
        let differs = [
            (
                !self.keys.same(&other.keys) || !self.values.same(&other.values),
                "caches at other places or of other sizes",
            ),
            (self.attention != other.attention, "other attributes"),
            (self.constants != other.constants, "other norms or another rope"),
            (self.sources != other.sources, "keys or values by other weights"),
            (self.layout != other.layout, "rows of another layout"),
        ];
        differs.into_iter().find_map(|(differs, what)| differs.then_some(what))
    }
}

/// The attention that extends each cache, by the place of its keys and their first column. Alternatives of other regimes are the same.
fn extended(schedule: &Schedule) -> BTreeMap<(Option<u64>, u32), Extends<'_>> {
    let mut all = BTreeMap::new();
    for (id, grid) in (0..).map(GridId).zip(&schedule.program.grids) {
        let Op::Attention(attention) = &grid.op else { continue };
        let cache = |role| grid.operand(role).map(|operand| Place::of(schedule, operand));
        let (Some(keys), Some(values)) = (cache(Role::AppendK), cache(Role::AppendV)) else { continue };
        let content = |role| content(schedule, grid, role);
        let sources = |role| sources(schedule, grid, role);
        all.entry((keys.at, keys.cols.0)).or_insert_with(|| Extends {
            name: grid.name.clone(),
            keys,
            values,
            attention: Attention { heads_per_task: 1, splits: 1, ..attention.clone() },
            constants: [Role::QNormWeight, Role::KNormWeight, Role::Rope].map(content),
            sources: [Role::K, Role::V].map(sources),
            layout: schedule.attention_variant(id).map(|variant| (variant.swizzled, variant.pitch)),
        });
    }
    all
}

/// What a grid with a recurrent state leaves to a later step depends on this.
struct Updates<'a> {
    name: String,
    op: OpKey,
    /// The weights and biases of its inputs, and its constants.
    content: Vec<&'a Content>,
}

/// The grid that updates each state, by its place, rows and columns.
fn updated(schedule: &Schedule) -> BTreeMap<(Option<u64>, u32, u32), Updates<'_>> {
    let grids = schedule.program.grids.iter().filter_map(|grid| Some((grid, grid.operand(Role::State)?.buffer)));
    let of_grid = |(grid, buffer): (&'_ Grid, BufferId)| {
        let state = &schedule.program.buffers[buffer.index()];
        let inputs = [Role::Q, Role::K, Role::V, Role::Beta, Role::Decay, Role::X, Role::B, Role::C, Role::Step];
        let constants = [Role::Conv, Role::Bias, Role::ALog, Role::DtBias];
        let constants = constants.into_iter().filter_map(|role| content(schedule, grid, role));
        let content = inputs.into_iter().flat_map(|role| sources(schedule, grid, role)).chain(constants).collect();
        let place = (schedule.placement[buffer.index()], state.rows, state.cols);
        (place, Updates { name: grid.name.clone(), op: grid.op.key(), content })
    };
    grids.map(of_grid).collect()
}

/// What fills a constant operand.
fn content<'a>(schedule: &'a Schedule, grid: &Grid, role: Role) -> Option<&'a Content> {
    schedule.program.buffers[grid.operand(role)?.buffer.index()].content.as_ref()
}

/// What fills the weights and the biases of the grids that make an operand.
fn sources<'a>(schedule: &'a Schedule, grid: &Grid, role: Role) -> Vec<&'a Content> {
    let made = grid.operand(role).map(|operand| operand.buffer);
    let grids = schedule.program.grids.iter().filter(|by| by.operand(Role::Out).map(|out| out.buffer) == made);
    grids.flat_map(|by| [Role::Weight, Role::Bias].map(|role| content(schedule, by, role))).flatten().collect()
}
