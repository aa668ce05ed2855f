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
    Caches::of(a.schedule()).shared_with(&Caches::of(b.schedule()))
}

/// As [`share_caches`], of each of `kernels` and `with`.
///
/// # Errors
/// As [`share_caches`].
pub fn all_share_caches<'a>(kernels: impl Iterator<Item = &'a Validated>, with: &Validated) -> Result<(), NotShared> {
    let with = Caches::of(with.schedule());
    kernels.map(Validated::schedule).try_for_each(|schedule| Caches::of(schedule).shared_with(&with))
}

/// What a schedule does with the caches.
struct Caches<'a> {
    name: &'a str,
    extended: BTreeMap<(Option<u64>, u32), Extends<'a>>,
    updated: BTreeMap<(Option<u64>, u32, u32), Updates<'a>>,
}

impl Caches<'_> {
    fn of(schedule: &Schedule) -> Caches<'_> {
        let mut devices = devices(schedule);
        Caches {
            name: &schedule.program.name,
            extended: extended(schedule, &mut devices),
            updated: updated(schedule, &mut devices),
        }
    }

    fn shared_with(&self, with: &Caches<'_>) -> Result<(), NotShared> {
        for (place, other) in &with.updated {
            let not_shared = |grid: &str, what| Err(NotShared { grid: grid.into(), other: other.name.clone(), what });
            match self.updated.get(place) {
                Some(one) if one.devices != other.devices => return not_shared(&one.name, "states on other devices"),
                Some(one) if one.op == other.op && one.content == other.content => {}
                Some(one) => return not_shared(&one.name, "states by other weights or attributes"),
                None => return not_shared(&other.name, "states at other places or of other sizes"),
            }
        }
        if let (Some(grid), true) = (self.updated.values().next(), self.updated.len() != with.updated.len()) {
            return Err(NotShared { grid: grid.name.clone(), other: with.name.into(), what: "other states" });
        }
        // Each attention of either has its counterpart at the place of its keys, or the two have nothing there.
        for (of, others) in [(&self.extended, &with.extended), (&with.extended, &self.extended)] {
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
    /// The device that has which columns.
    devices: Devices,
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
            (self.devices != other.devices, "heads on other devices"),
        ];
        differs.into_iter().find_map(|(differs, what)| differs.then_some(what))
    }
}

/// The attention that extends each cache, by the place of its keys and their first column. Alternatives of other regimes are the same.
fn extended<'a>(
    schedule: &'a Schedule,
    devices: &mut BTreeMap<Kept, Devices>,
) -> BTreeMap<(Option<u64>, u32), Extends<'a>> {
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
            devices: devices.remove(&(Role::AppendK, keys.at, keys.cols.0)).unwrap_or_default(),
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
    devices: Devices,
}

/// The grid that updates each state, by its place, rows and columns.
fn updated<'a>(
    schedule: &'a Schedule,
    devices: &mut BTreeMap<Kept, Devices>,
) -> BTreeMap<(Option<u64>, u32, u32), Updates<'a>> {
    let grids = schedule.program.grids.iter().filter_map(|grid| Some((grid, grid.operand(Role::State)?.buffer)));
    let of_grid = |(grid, buffer): (&'a Grid, BufferId)| {
        let base = grid.operand(Role::State).map_or(0, |state| state.cols.base);
        let devices = devices.remove(&(Role::State, schedule.placement[buffer.index()], base)).unwrap_or_default();
        let state = &schedule.program.buffers[buffer.index()];
        let inputs = [Role::Q, Role::K, Role::V, Role::Beta, Role::Decay, Role::X, Role::B, Role::C, Role::Step];
        let constants = [Role::Conv, Role::Bias, Role::ALog, Role::DtBias];
        let constants = constants.into_iter().filter_map(|role| content(schedule, grid, role));
        let content = inputs.into_iter().flat_map(|role| sources(schedule, grid, role)).chain(constants).collect();
        let place = (schedule.placement[buffer.index()], state.rows, state.cols);
        (place, Updates { name: grid.name.clone(), op: grid.op.key(), content, devices })
    };
    grids.map(of_grid).collect()
}

/// Columns with their device, ascending: what is plain memory of one device is found only there.
type Devices = Vec<(u64, u64, u32)>;

/// What is appended or kept there: a role, its place, and its first column. Alternatives of other regimes append to one cache.
type Kept = (Role, Option<u64>, u32);

/// The devices of all that tasks append or keep; nothing, if there is one.
fn devices(schedule: &Schedule) -> BTreeMap<Kept, Devices> {
    let mut all: BTreeMap<Kept, Devices> = BTreeMap::new();
    if schedule.machine.devices == 1 {
        return all;
    }
    for regime in &schedule.regimes {
        for (task, owner) in regime.tasks.iter().zip(regime.owners()) {
            let grid = &schedule.program.grids[task.grid.index()];
            let device = owner.map_or(0, |sm| schedule.machine.device_of(sm.index()));
            for (role, operand) in [Role::AppendK, Role::State].into_iter().filter_map(|r| Some((r, grid.operand(r)?)))
            {
                let (lo, hi) = operand.cols.range(task.lo, task.hi, task.j);
                let kept = (role, schedule.placement[operand.buffer.index()], operand.cols.base);
                // One of the tasks of a head appends, and the others nothing.
                if lo < hi {
                    all.entry(kept).or_default().push((lo, hi, device));
                }
            }
        }
    }
    for columns in all.values_mut() {
        columns.sort_unstable();
        columns.dedup();
        // Heads may be divided among tasks in different ways.
        let joined = columns.drain(..).fold(Devices::new(), |mut joined, (lo, hi, device)| {
            match joined.last_mut() {
                Some((_, end, of)) if *of == device && lo <= *end => *end = hi.max(*end),
                _ => joined.push((lo, hi, device)),
            }
            joined
        });
        *columns = joined;
    }
    all
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
