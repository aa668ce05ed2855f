//! Derives the accesses of each task from the formula of its op, and judges what needs no execution.

use super::{Fault, Kind};
use monobloc::dtype::DType;
use monobloc::format::{Format, Groups, ScaleCode};
use monobloc::ir::op::{
    Access, Attention, Combine, Convolve, Epilogue, GroupNorm, MatVec, NormAttr, Op, QkNormAttr, Role, Route, Scan,
};
use monobloc::ir::program::{Buffer, Cols, Content, Grid, Home, Operand, Rows, Second, Space};
use monobloc::ir::schedule::{Mechanism, Schedule, Scope, Source, Task};
use monobloc::ir::table::{Holds, Table, TableHome};
use monobloc::ir::variant::Variant;
use monobloc::ir::{BufferId, EventId, GridId, TableId};
use monobloc::model::graph::{NormKind, QkNormSpan};
use monobloc::target::{CopyMechanism, DotMechanism, Target, TargetKind};
use std::collections::{BTreeMap, BTreeSet};

/// Columns `lo..hi` of one row of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Touch {
    pub buffer: BufferId,
    /// The row of the step.
    pub row: u32,
    pub lo: u32,
    pub hi: u32,
}

/// Reads and writes of one task, by kind of memory.
#[derive(Debug, Clone, Default)]
pub struct Foot {
    /// Exchange buffers.
    pub reads: Vec<Touch>,
    pub writes: Vec<Touch>,
    /// Reads in the shared memory of its SM, in the order of its op.
    pub private_reads: Vec<Touch>,
    pub private_writes: Vec<Touch>,
    /// Writes to the cache row of the step's position.
    pub appends: Vec<Touch>,
    /// Earlier cache rows, which the loader brings in: columns, which of how many KV splits, and the window.
    pub history: Vec<Touch>,
    pub outputs: Vec<Touch>,
    /// Entries of tables that choose what its loader brings in.
    pub choices: Vec<Touch>,
    /// Columns of recurrent states that it brings on, for each of its rows.
    pub states: Vec<Touch>,
    /// Which of how many parts of the sequences the task takes; `None`: all sequences. The touches above are of all rows.
    pub part: Option<(u32, u32)>,
    /// What decides the touches of a task to which parts of a matrix are dealt. Those above are all that it may have.
    pub deal: Option<Deal>,
}

/// A share of the units of those parts of a matrix that rows choose.
#[derive(Debug, Clone, Copy)]
pub struct Deal {
    pub table: TableId,
    pub parts: u32,
    /// Parts that a row chooses.
    pub slots: u32,
    /// Which of how many shares.
    pub j: u32,
    pub shares: u32,
    /// Units of each part that are dealt, and their columns of the output.
    units: (u32, u32),
    unit_cols: u32,
    /// Columns from slot to slot of the input, 0 if slots share one, and of the output.
    x: (BufferId, u32),
    out: (BufferId, u32),
}

impl Deal {
    /// The touches of the task if row `row` chooses `choices[row]`: the input of rows that chose its parts, and what is made of it.
    fn touches(&self, choices: &[Vec<u32>], foot: &Foot) -> (Vec<Touch>, Vec<Touch>) {
        let mut chosen: BTreeMap<u32, Vec<(u32, u32)>> = BTreeMap::new();
        for (row, parts) in choices.iter().enumerate() {
            for (slot, &part) in parts.iter().enumerate() {
                chosen.entry(part).or_default().push((row as u32, slot as u32));
            }
        }
        // One unit of one part after another, in equal shares.
        let each = self.units.1 - self.units.0;
        let all = chosen.len() as u64 * u64::from(each);
        let mut reads: BTreeSet<Touch> = foot.reads.iter().filter(|read| read.buffer != self.x.0).copied().collect();
        let mut writes = vec![];
        for (place, rows) in chosen.values().enumerate() {
            for unit in 0..each {
                let at = place as u64 * u64::from(each) + u64::from(unit);
                // Share `j` ends where `j + 1` begins.
                if at < all * u64::from(self.j) / u64::from(self.shares)
                    || at >= all * u64::from(self.j + 1) / u64::from(self.shares)
                {
                    continue;
                }
                for &(row, slot) in rows {
                    let whole = foot.reads.iter().filter(|read| read.buffer == self.x.0 && read.row == row);
                    reads.extend(whole.map(|read| match self.x.1 {
                        0 => *read,
                        step => Touch { lo: read.lo + slot * step, hi: read.lo + (slot + 1) * step, ..*read },
                    }));
                    let first = slot * self.out.1;
                    let [lo, hi] =
                        [unit, unit + 1].map(|u| first + ((self.units.0 + u) * self.unit_cols).min(self.out.1));
                    let base = foot.writes.iter().find(|write| write.buffer == self.out.0).map_or(0, |write| write.lo);
                    writes.push(Touch { buffer: self.out.0, row, lo: base + lo, hi: base + hi });
                }
            }
        }
        (reads.into_iter().collect(), merged(writes))
    }
}

/// Touches of columns that follow one another as one.
fn merged(mut touches: Vec<Touch>) -> Vec<Touch> {
    touches.sort();
    let mut all: Vec<Touch> = vec![];
    for touch in touches {
        match all.last_mut() {
            Some(last) if (last.buffer, last.row, last.hi) == (touch.buffer, touch.row, touch.lo) => last.hi = touch.hi,
            _ => all.push(touch),
        }
    }
    all
}

impl Foot {
    /// Whether the task takes row `row` of a launch with a row of each of `sequences`.
    pub fn takes(&self, row: u32, sequences: &[u32]) -> bool {
        let sequence = sequences.get(row as usize);
        sequence.is_some_and(|sequence| self.part.is_none_or(|(part, parts)| sequence % parts == part))
    }

    /// The accesses of a step in which row `row` chooses `choices(table, parts, slots)[row]` of what is dealt.
    pub fn of_step(&self, sequences: &[u32], choices: impl Fn(&Deal) -> Vec<Vec<u32>>) -> Foot {
        let mut foot = self.of_rows(sequences);
        if let Some(deal) = &self.deal {
            (foot.reads, foot.writes) = deal.touches(&choices(deal), &foot);
        }
        foot
    }

    /// The accesses that remain in a launch with a row of each of `sequences`.
    pub fn of_rows(&self, sequences: &[u32]) -> Foot {
        let of = |touches: &[Touch]| touches.iter().copied().filter(|touch| self.takes(touch.row, sequences)).collect();
        Foot {
            part: self.part,
            deal: self.deal,
            reads: of(&self.reads),
            writes: of(&self.writes),
            private_reads: of(&self.private_reads),
            private_writes: of(&self.private_writes),
            appends: of(&self.appends),
            history: of(&self.history),
            outputs: of(&self.outputs),
            choices: of(&self.choices),
            states: of(&self.states),
        }
    }
}

const GRANULE: u64 = 512;
const GRANULE_ROW: u64 = 64;
/// Rows of the history that an op processes at once.
const TILE_ROWS: u32 = 16;
/// Heads in a cache row begin at multiples of this many bytes, for copies.
const HEAD_BYTES: u64 = 16;

/// An operand by the op's formula.
struct Part {
    role: Role,
    access: Access,
    space: Space,
    dtype: DType,
    rows: Rows,
    /// Columns from the operand's first column on.
    lo: u64,
    hi: u64,
    /// The required shape of the whole buffer, if it is indexed by a token, a position or a unit.
    must: Must,
}

enum Must {
    /// Columns only.
    Inside,
    /// A row for each position.
    Positions,
    /// A row for each token.
    Tokens,
    /// `rows x cols` exactly: weights.
    Exactly(u32, u32),
    /// A number of values for each of the parts that a table may name, and nothing else.
    Parts(u64, u32),
}

fn malformed<T>(what: impl Into<String>) -> Result<T, Fault> {
    Err(Fault::new(Kind::Malformed, what))
}

/// Columns that an operand declares for launch indices `lo..hi`; `None` if it is not accessed.
fn declared(c: &Cols, lo: u32, hi: u32, j: u32) -> Option<(u64, u64)> {
    let div = u64::from(c.div.max(1));
    if c.only_j.is_some_and(|only| only != j) {
        return None;
    }
    let mut range: Option<(u64, u64)> = None;
    // Columns grow with the index, so its first and last value suffice.
    let (mut first, mut last) = (u64::from(lo), u64::from(hi) - 1);
    if c.first {
        (first, last) = (first.next_multiple_of(div), last / div * div);
    }
    if first > last {
        return None;
    }
    for i in [first, last] {
        let start = u64::from(c.base) + u64::from(c.stride) * (i / div) + u64::from(c.stride_j) * u64::from(j);
        let end = (start + u64::from(c.len)).min(u64::from(c.limit));
        if start < end {
            range = Some(range.map_or((start, end), |(a, b)| (a.min(start), b.max(end))));
        }
    }
    range
}

/// The accesses of a schedule, by regime and task. The error is the first fault that can be found without running it.
pub fn footprints(s: &Schedule, target: &Target) -> Result<Vec<Vec<Foot>>, Fault> {
    ids(s)?;
    numbers(s)?;
    occupancy(s, target)?;
    launches(s)?;
    let vocab = s.program.grids.iter().filter_map(|g| match &g.op {
        Op::MatVec(MatVec { rows, epilogue: Epilogue::Logits { .. }, .. }) => Some(*rows),
        _ => None,
    });
    let vocab = vocab.max().unwrap_or(0);
    meanings(s)?;
    let mut feet = vec![];
    for regime in &s.regimes {
        let mut of_regime = vec![];
        for (t, task) in regime.tasks.iter().enumerate() {
            let grid = &s.program.grids[task.grid.index()];
            of_regime.push(foot(s, grid, task, vocab).map_err(|f| Fault::new(f.kind, format!("t{t}: {}", f.what)))?);
        }
        feet.push(of_regime);
    }
    devices(s, &feet)?;
    streamed(s)?;
    arenas(s, target)?;
    shared_memory(s, target)?;
    Ok(feet)
}

/// Of a divided matrix a task reads units that its device holds: unit by unit, the first device whose part ends after it.
fn holds_units(s: &Schedule, (r, t): (usize, usize), task: &Task, here: u32) -> Result<(), Fault> {
    let (grid, devices) = (&s.program.grids[task.grid.index()], u64::from(s.machine.devices));
    let is_divided = |operand: &&Operand| s.program.buffers[operand.buffer.index()].home == Home::Divided;
    let Some(part) = grid.operands.iter().find(is_divided) else { return Ok(()) };
    let ends_after = |device: u64, unit: u32| (device + 1) * u64::from(grid.n) / devices > u64::from(unit);
    let holder = |unit: u32| (0..devices).find(|device| ends_after(*device, unit));
    if (task.lo..task.hi).all(|unit| holder(unit) == Some(u64::from(here))) {
        return Ok(());
    }
    let what = format!("t{t} of r{r} reads units of {} that device {here} does not hold", part.buffer);
    Err(Fault::new(Kind::Unwritten, what))
}

/// Each device has its own memory. Packets are stored into all memories that have the buffer, and polled in the local one;
/// other data stay where they were written. A word that another device stores is atomic only if its scope is all devices.
fn devices(s: &Schedule, feet: &[Vec<Foot>]) -> Result<(), Fault> {
    let (sms, devices) = (s.machine.sms, s.machine.devices);
    if devices == 0 || sms % devices != 0 {
        return malformed(format!("{devices} devices of {sms} SMs"));
    }
    let device = |sm: u32| sm / (sms / devices);
    let home = |id: BufferId| s.program.buffers[id.index()].home;
    let has = |id: BufferId, device: u32| match home(id) {
        Home::Device(of) => of == device,
        Home::Everywhere | Home::Divided => true,
        Home::Sm => false,
    };
    // Which device appends which columns of a cache.
    let mut appends: Vec<(Touch, u32)> = vec![];
    let owners: Vec<_> = s.regimes.iter().map(|regime| regime.owners()).collect();
    let at = |r: usize, t: usize| owners[r][t].map_or(0, |sm| device(sm.0));
    for (r, feet) in feet.iter().enumerate() {
        appends.extend(
            feet.iter()
                .enumerate()
                .flat_map(|(t, f)| f.appends.iter().map(move |a| (*a, t)))
                .map(|(a, t)| (a, at(r, t))),
        );
    }
    for (b, buffer) in s.program.buffers.iter().enumerate() {
        let fits = match buffer.home {
            Home::Sm => buffer.space == Space::Private,
            Home::Device(of) => buffer.space != Space::Private && of < devices,
            Home::Everywhere => buffer.space != Space::Private,
            Home::Divided => buffer.space == Space::Weight,
        };
        if !fits {
            return malformed(format!("b{b} lies nowhere"));
        }
    }
    for (r, (regime, feet)) in s.regimes.iter().zip(feet).enumerate() {
        for (t, (task, foot)) in regime.tasks.iter().zip(feet).enumerate() {
            let here = at(r, t);
            let local = foot.reads.iter().chain(&foot.choices).chain(&foot.appends).chain(&foot.history);
            let constants = s.program.grids[task.grid.index()].operands.iter().map(|o| o.buffer);
            let constants = constants.filter(|id| s.program.buffers[id.index()].space.immutable());
            let local = local.chain(&foot.outputs).map(|touch| touch.buffer).chain(constants);
            for buffer in local {
                if !has(buffer, here) {
                    let what = format!("t{t} of r{r} looks for {buffer} on device {here}, where no task stores it");
                    return Err(Fault::new(Kind::Unwritten, what));
                }
            }
            holds_units(s, (r, t), task, here)?;
            for touch in &foot.history {
                let meets =
                    |a: &Touch| (a.buffer, a.row) == (touch.buffer, touch.row) && a.lo < touch.hi && touch.lo < a.hi;
                if appends.iter().any(|(a, device)| meets(a) && *device != here) {
                    let what = format!("t{t} of r{r} reads a history that another device appends");
                    return Err(Fault::new(Kind::Unwritten, what));
                }
            }
        }
    }
    // Stores and polls of each buffer by event: the narrowest scope, and whether two devices meet there.
    let mut words: BTreeMap<BufferId, (Scope, bool)> = BTreeMap::new();
    for (r, regime) in s.regimes.iter().enumerate() {
        for (e, event) in regime.events.iter().enumerate() {
            let id = EventId(e as u32);
            let part = |t: &Task| t.signals.contains(&id) || t.waits.iter().any(|w| w.event == id);
            let loads = regime.streams.iter().flatten().filter(|run| run.after == Some(id)).map(|run| run.task.index());
            let tasks = regime.tasks.iter().enumerate().filter(|(_, t)| part(t)).map(|(t, _)| t).chain(loads);
            let sms: BTreeSet<u32> = tasks.filter_map(|t| owners[r][t]).map(|sm| sm.0).collect();
            let devices: BTreeSet<u32> = sms.iter().map(|sm| device(*sm)).collect();
            let reaches = match event.scope {
                Scope::Block | Scope::Cluster => sms.len() <= 1,
                Scope::Device => devices.len() <= 1,
                Scope::System => true,
            };
            if !reaches {
                let what = format!("e{e} of r{r} meets SMs beyond its scope");
                return Err(Fault::new(Kind::Invisible, what));
            }
            let word = words.entry(event.buffer).or_insert((Scope::System, false));
            let tagged = event.mechanism != Mechanism::Counter;
            *word = (if tagged { word.0.min(event.scope) } else { word.0 }, word.1 || devices.len() > 1);
        }
    }
    if let Some((buffer, _)) = words.iter().find(|(_, (scope, crosses))| *crosses && *scope != Scope::System) {
        return Err(Fault::new(Kind::Invisible, format!("halves of a word of {buffer} may be seen")));
    }
    Ok(())
}

fn ids(s: &Schedule) -> Result<(), Fault> {
    let p = &s.program;
    if s.placement.len() != p.buffers.len() || s.regimes.is_empty() || s.machine.sms == 0 {
        return malformed("counts");
    }
    let mut from = None;
    for (r, regime) in s.regimes.iter().enumerate() {
        let at = regime.from_position;
        if at >= p.context_max || (r == 0) != (at == 0) || from.is_some_and(|f| at <= f) {
            return malformed(format!("r{r} starts at {at}"));
        }
        from = Some(at);
        if regime.queues.len() != s.machine.sms as usize || regime.streams.len() != s.machine.sms as usize {
            return malformed("queues and streams");
        }
        let mut seen = BTreeSet::new();
        for id in regime.queues.iter().flatten() {
            if id.index() >= regime.tasks.len() || !seen.insert(*id) {
                return malformed(format!("{id} in the queues of r{r}"));
            }
        }
        if seen.len() != regime.tasks.len() {
            return malformed(format!("a task of r{r} that never runs"));
        }
        for task in &regime.tasks {
            let events = task.waits.iter().map(|w| w.event).chain(task.signals.iter().copied());
            if task.grid.index() >= p.grids.len() || events.into_iter().any(|e| e.index() >= regime.events.len()) {
                return malformed("a task names nothing");
            }
        }
        if regime.events.iter().any(|e| e.buffer.index() >= p.buffers.len())
            || regime.streams.iter().flatten().any(|run| run.task.index() >= regime.tasks.len())
            || regime.streams.iter().flatten().any(|run| run.after.is_some_and(|e| e.index() >= regime.events.len()))
        {
            return malformed("an event or a run names nothing");
        }
    }
    if p.grids.iter().flat_map(|g| &g.operands).any(|o| o.buffer.index() >= p.buffers.len()) {
        return malformed("an operand names nothing");
    }
    Ok(())
}

/// Checks the numbers that formulas need.
fn numbers(s: &Schedule) -> Result<(), Fault> {
    let p = &s.program;
    if p.rows == 0 {
        return malformed("no rows");
    }
    for (b, buffer) in p.buffers.iter().enumerate() {
        let of_step = matches!(buffer.space, Space::Exchange | Space::Private | Space::Output);
        if of_step && buffer.rows != p.rows {
            return Err(Fault::new(Kind::OutOfBounds, format!("b{b} has {} rows, a step {}", buffer.rows, p.rows)));
        }
    }
    let norm = |n: &NormAttr| n.eps.is_finite() && n.eps > 0.0;
    for (g, grid) in p.grids.iter().enumerate() {
        // Each row has a history and a choice of its own. Then all rows that chose an expert take it at once.
        let alone = matches!(grid.op, Op::Attention(_) | Op::AttentionMerge { .. } | Op::Route(_));
        if grid.per_row != (p.rows > 1 && alone) {
            return Err(Fault::new(Kind::Undeclared, format!("g{g} takes other rows than its op")));
        }
        if matches!(grid.second, Second::Dealt(_)) != (p.rows > 1 && table_of(s, grid).is_some()) {
            return Err(Fault::new(Kind::Undeclared, format!("g{g} deals what no row chooses, or deals nothing")));
        }
        let fine = match &grid.op {
            Op::Select | Op::Report => true,
            Op::Route(r) => {
                // Groups are equal, and those that are kept have an expert for every slot.
                let groups = r.groups.is_none_or(|g| {
                    let each = r.experts.checked_div(g.count).unwrap_or(0);
                    g.count > 0 && each * g.count == r.experts && g.kept <= g.count && each * g.kept >= r.top_k
                });
                let sums = r.normalise.is_none_or(|added| added.is_finite() && added >= 0.0);
                (1..1 << 16).contains(&r.experts)
                    && (1..=r.experts).contains(&r.top_k)
                    && groups
                    && sums
                    && r.scale.is_finite()
            }
            Op::Mix(m) => {
                let sizes = [m.key_heads, m.value_heads, m.key_dim, m.value_dim, m.kernel];
                let [keys, values] = [m.key_dim, m.value_dim].map(u64::from);
                let state = (keys * values).saturating_add(u64::from(m.kernel).saturating_mul(2 * keys + values));
                sizes.iter().all(|&n| n > 0)
                    && m.value_heads % m.key_heads == 0
                    && m.key_dim % 2 == 0
                    && m.value_dim % 2 == 0
                    && state.saturating_mul(u64::from(m.value_heads)) < 1 << 29
                    && m.eps.is_finite()
                    && m.eps > 0.0
            }
            Op::Convolve(Convolve { channels, kernel }) => {
                let state = u64::from(*channels).saturating_mul(u64::from(*kernel));
                *channels > 0 && channels % 2 == 0 && *kernel > 1 && state < 1 << 29
            }
            Op::Scan(Scan { heads, head_dim, groups, state, kernel, scales, gate }) => {
                let [dim, width, taps] = [*head_dim, *state, *kernel].map(u64::from);
                let kept = (dim * width).saturating_add(taps.saturating_mul(dim + 2 * width));
                [*heads, *head_dim, *groups, *state, *kernel].iter().all(|&n| n > 0)
                    && heads % groups == 0
                    && head_dim % 2 == 0
                    && state % 2 == 0
                    && kept.saturating_mul(u64::from(*heads)) < 1 << 29
                    && scales.iter().chain(gate).all(|scale| scale.is_finite())
            }
            Op::GroupNorm(GroupNorm { width, groups, eps, gate }) => {
                *groups > 0
                    && *width > 0
                    && *width < 1 << 29
                    && width % (2 * u64::from(*groups).min(1 << 29) as u32) == 0
                    && eps.is_finite()
                    && *eps > 0.0
                    && gate.is_none_or(f32::is_finite)
            }
            Op::Combine(c) => {
                let columns = u64::from(c.width) * (u64::from(c.slots) + 1);
                c.width > 0 && c.slots > 0 && columns < 1 << 29 && c.scale.is_finite()
            }
            Op::Embed { scale, .. } | Op::Join { scale } => scale.is_finite(),
            Op::MatVec(m) => {
                let tail = match m.epilogue {
                    Epilogue::Store | Epilogue::Scores | Epilogue::Act(_) => true,
                    Epilogue::Gated(_) => m.rows % 2 == 0,
                    Epilogue::GatedBy { scale, .. } => m.rows % 2 == 0 && scale.is_finite(),
                    Epilogue::Clamped(c) => {
                        m.rows % 2 == 0 && c.alpha.is_finite() && c.limit.is_finite() && c.limit > 0.0
                    }
                    Epilogue::Residual { scale } => scale.is_finite(),
                    Epilogue::Logits { scale, softcap } => {
                        scale.is_finite() && softcap.is_none_or(|c| c.is_finite() && c > 0.0)
                    }
                };
                let sums = match m.slots {
                    0 => false,
                    1 => true,
                    2..=16 => {
                        let stored = matches!(m.epilogue, Epilogue::Store | Epilogue::Residual { .. });
                        stored && m.norm.is_none() && !m.own_input && m.unit_rows == 8 && m.k < 1 << 24
                    }
                    _ => false,
                };
                let norms = m.norm.as_ref().is_none_or(norm);
                m.rows > 0 && m.rows < 1 << 29 && m.k > 0 && m.k < 1 << 29 && norms && tail && sums
            }
            Op::Attention(a) => {
                let sizes = [a.heads_per_task, a.group, a.heads, a.head_dim, a.splits];
                let most = |n: u64| n < 1 << 29;
                sizes.iter().all(|&n| n > 0)
                    && a.heads % a.group == 0
                    && a.group % a.heads_per_task == 0
                    && a.head_dim % 2 == 0
                    && a.rotary <= a.head_dim
                    && a.rotary % 2 == 0
                    && most(u64::from(a.heads) * u64::from(a.head_dim))
                    && most(u64::from(a.heads) * u64::from(a.splits).saturating_mul(u64::from(a.head_dim) + 2))
                    && a.window != Some(0)
                    && a.scale.is_finite()
                    && a.scale > 0.0
                    && a.softcap.is_none_or(|c| c.is_finite() && c > 0.0)
                    && a.q_norm
                        .iter()
                        .chain(&a.k_norm)
                        .all(|n| norm(&n.norm) && !(a.norm_after_rope && n.span == QkNormSpan::Projection))
                    && a.query_scale.is_none_or(|q| q.beta.is_finite() && q.beta >= 0.0 && q.original > 0)
            }
            Op::AttentionMerge { head_dim, splits, heads_per_task, gate: _ } => {
                [*head_dim, *splits, *heads_per_task].iter().all(|&n| n > 0)
                    && grid.n % heads_per_task == 0
                    && u64::from(grid.n) * u64::from(*splits).saturating_mul(u64::from(*head_dim) + 2) < 1 << 29
            }
            Op::NormAdd { norm: n, width, scale, .. } => norm(n) && *width > 0 && *width < 1 << 29 && scale.is_finite(),
        };
        if !fine {
            return malformed(format!("g{g}: a number that `{}` cannot take", grid.op.name()));
        }
        // Extents of the launch are those of the op.
        let n = match &grid.op {
            Op::Select | Op::Embed { everywhere: true, .. } | Op::NormAdd { everywhere: true, .. } => {
                Some(s.machine.sms)
            }
            Op::Report | Op::Route(_) => Some(1),
            Op::Combine(c) => Some(c.width.div_ceil(8)),
            Op::Mix(mix) => Some(mix.value_heads),
            Op::Convolve(convolve) => Some(convolve.channels.div_ceil(8)),
            Op::Scan(scan) => Some(scan.heads),
            Op::GroupNorm(norm) => Some(norm.groups),
            Op::Embed { .. } | Op::Join { .. } => {
                grid.operand(Role::Table).map(|o| p.buffers[o.buffer.index()].cols.div_ceil(8))
            }
            Op::MatVec(m) => Some(units(m)),
            Op::Attention(a) => Some(a.heads / a.heads_per_task),
            Op::AttentionMerge { .. } => None,
            Op::NormAdd { width, .. } => Some(width.div_ceil(8)),
        };
        if n.is_some_and(|n| n != grid.n) {
            return malformed(format!("g{g} launches {} of {n:?} indices", grid.n));
        }
        if matches!(grid.op, Op::Mix(_) | Op::Scan(_)) {
            let sequences =
                p.tables.iter().find(|table| table.holds == Holds::Sequences).map_or(1, |table| table.bound);
            match grid.second {
                Second::Axis(parts) if (1..=sequences.min(p.rows).max(1)).contains(&parts) => {}
                second => return malformed(format!("g{g} launches {second:?} for {sequences} sequences")),
            }
        }
        if let Op::Attention(a) = &grid.op
            && grid.second != Second::Axis(a.splits)
        {
            return malformed(format!("g{g} launches other shares than it has"));
        }
        // A task has one slot, or all.
        let slots = if let Op::MatVec(m) = &grid.op { m.slots } else { 1 };
        let table = table_of(s, grid).map(|(_, table)| table.cols);
        if slots > 1 && (table != Some(slots) || grid.operand(Role::Bias).is_some() || !is_gathered(s, grid)) {
            return malformed(format!("g{g} adds up {slots} slots of {table:?}"));
        }
        if p.rows > 1 && table.is_some() {
            // Its shares are those of all SMs of a device, or of some of them.
            let (shares, devices) = (grid.second.extent(), s.machine.devices.max(1));
            if shares == 0 || shares % devices != 0 || slots > 1 {
                return malformed(format!("g{g} deals {shares} shares to {devices} devices"));
            }
        } else if table.is_some_and(|table| grid.second != Second::Axis(if slots > 1 { 1 } else { table })) {
            return malformed(format!("g{g} launches other slots than its table has"));
        }
    }
    // A position is a row, and no memory holds this number of rows.
    if p.context_max >= 1 << 30 {
        return malformed("context_max");
    }
    let floats = [DType::F32, DType::Bf16, DType::F16];
    let precision = [p.precision.weights, p.precision.cache, p.precision.wire];
    // Only what is cached may have 8 bits.
    let narrow = p.precision.cache == DType::E4m3;
    if precision.iter().enumerate().any(|(i, d)| !(floats.contains(d) || i == 1 && narrow)) {
        return malformed("numbers that are none");
    }
    Ok(())
}

fn units(m: &MatVec) -> u32 {
    let (each, columns) = columns_of(m);
    columns.div_ceil(each)
}

/// Columns of the output that a unit makes, and all of them.
pub(super) fn columns_of(m: &MatVec) -> (u32, u32) {
    match m.epilogue {
        Epilogue::Gated(_) | Epilogue::GatedBy { .. } | Epilogue::Clamped(_) => (4, m.rows / 2),
        _ => (m.unit_rows.max(1), m.rows),
    }
}

/// The table that names the part of its matrix that a product takes.
/// Whether the units of several slots follow one another without a gap in k, and have no scales of rows.
fn is_gathered(s: &Schedule, grid: &Grid) -> bool {
    let Some(buffer) = grid.operand(Role::Weight).and_then(|weight| s.program.buffers.get(weight.buffer.index()))
    else {
        return false;
    };
    let Op::MatVec(m) = &grid.op else { return false };
    let values = match buffer.coded {
        Some(format) if format.row_scales => return false,
        Some(format) => GRANULE_ROW * 8 / u64::from(format.code.bits()),
        None => GRANULE_ROW / buffer.dtype.bytes() as u64,
    };
    u64::from(m.k) % values == 0
}

/// Slots that a task of a grid chooses for: one, or all of a step.
fn slots_of(s: &Schedule, grid: &Grid, task: &Task) -> std::ops::Range<u32> {
    match (&grid.op, table_of(s, grid)) {
        (Op::MatVec(m), _) if m.slots > 1 => 0..m.slots,
        (_, Some((_, table))) if s.program.rows > 1 => 0..table.cols,
        _ => task.j..task.j + 1,
    }
}

/// The units of a grid that a device holds.
fn units_of_device(s: &Schedule, grid: &Grid, device: u32) -> (u32, u32) {
    let begin = |device: u32| (u64::from(grid.n) * u64::from(device) / u64::from(s.machine.devices.max(1))) as u32;
    (begin(device), begin(device + 1))
}

pub(super) fn table_of<'a>(s: &'a Schedule, grid: &Grid) -> Option<(TableId, &'a Table)> {
    let Rows::Lookup(id) = grid.operand(Role::Weight)?.rows else { return None };
    Some((id, s.program.tables.get(id.index())?))
}

fn launches(s: &Schedule) -> Result<(), Fault> {
    for (r, regime) in s.regimes.iter().enumerate() {
        let mut launched: Vec<BTreeMap<(u32, u32), u32>> = vec![BTreeMap::new(); s.program.grids.len()];
        let mut ordinals: BTreeSet<(GridId, u32)> = BTreeSet::new();
        for (t, task) in regime.tasks.iter().enumerate() {
            let grid = &s.program.grids[task.grid.index()];
            let extent = grid.second.extent();
            let rows = if grid.per_row { s.program.rows } else { 1 };
            if task.lo >= task.hi || task.hi > grid.n || task.j >= extent || task.row >= rows {
                return malformed(format!("t{t} of r{r} launches what is not there"));
            }
            let one = matches!(
                grid.op,
                Op::Select
                    | Op::Report
                    | Op::Route(_)
                    | Op::Attention(_)
                    | Op::AttentionMerge { .. }
                    | Op::Mix(_)
                    | Op::Scan(_)
                    | Op::GroupNorm(_)
                    | Op::Embed { everywhere: true, .. }
                    | Op::NormAdd { everywhere: true, .. }
            );
            if one && task.hi - task.lo != 1 {
                return malformed(format!("t{t} of r{r} launches several indices of one-index op"));
            }
            let ordinal = matches!(grid.second, Second::Ordinal(_));
            if ordinal && !ordinals.insert((task.grid, task.j)) {
                return malformed(format!("t{t} of r{r} has the ordinal of another"));
            }
            let axis = task.row * if ordinal { 1 } else { extent } + if ordinal { 0 } else { task.j };
            // Ranges by their start: (axis, lo) to hi.
            if launched[task.grid.index()].insert((axis, task.lo), task.hi).is_some() {
                return malformed(format!("t{t} of r{r} launches again"));
            }
        }
        for (g, grid) in s.program.grids.iter().enumerate() {
            let list = &launched[g];
            if let Second::Dealt(shares) = grid.second {
                let each = (shares / s.machine.devices.max(1)).max(1);
                let all = |j: u32| {
                    let (lo, hi) = units_of_device(s, grid, j / each);
                    list.get(&(j, lo)) == Some(&hi)
                };
                if list.len() != shares as usize || !(0..shares).all(all) {
                    return malformed(format!("g{g} deals its units to other tasks than {shares} in r{r}"));
                }
                continue;
            }
            if list.is_empty() && matches!(grid.op, Op::Attention(_) | Op::AttentionMerge { .. }) {
                continue;
            }
            let axes = match grid.second {
                Second::Axis(n) => n,
                Second::Ordinal(_) | Second::Dealt(_) => 1,
            };
            let axes = axes.saturating_mul(if grid.per_row { s.program.rows } else { 1 });
            if u64::from(axes) > regime.tasks.len() as u64 {
                return malformed(format!("g{g} has axes that are not launched"));
            }
            for axis in 0..axes {
                let mut end = 0;
                for (&(_, lo), &hi) in list.range((axis, 0)..=(axis, u32::MAX)) {
                    if lo != end {
                        return malformed(format!("g{g} launches {lo} after {end} in r{r}"));
                    }
                    end = hi;
                }
                if end != grid.n {
                    return malformed(format!("g{g} ends at {end} of {} in r{r}", grid.n));
                }
            }
        }
    }
    Ok(())
}

/// The operands of a task by the formula of its op.
fn parts(s: &Schedule, grid: &Grid, task: &Task) -> Vec<Part> {
    let pr = s.program.precision;
    let (lo, hi, j) = (u64::from(task.lo), u64::from(task.hi), u64::from(task.j));
    let part = |role, access, space, dtype, lo: u64, hi: u64| Part {
        role,
        access,
        space,
        dtype,
        rows: Rows::One,
        lo,
        hi,
        must: Must::Inside,
    };
    use Access::{Read, Stream, Update, Write};
    use Space::{Cache, Constant, Exchange, Output, Private, State, Weight};
    let vector = |role, lo, hi| part(role, Read, Constant, DType::F32, lo, hi);
    match &grid.op {
        Op::Select => {
            let all = grid.operand(Role::Best).map_or(0, |o| s.program.buffers[o.buffer.index()].cols);
            vec![
                part(Role::Best, Read, Exchange, DType::I32, 0, u64::from(all)),
                part(Role::Token, Write, Private, DType::I32, 0, 1),
            ]
        }
        Op::Route(Route { experts, top_k, .. }) => {
            let (experts, slots) = (u64::from(*experts), u64::from(*top_k));
            vec![
                part(Role::X, Read, Exchange, DType::F32, 0, experts),
                vector(Role::Bias, 0, experts),
                part(Role::Shares, Write, Exchange, DType::F32, 0, slots),
                part(Role::Out, Write, Exchange, DType::I32, 0, slots),
            ]
        }
        Op::Combine(Combine { width, slots, shared, adds, .. }) => {
            let (from, to) = (8 * lo, (8 * hi).min(u64::from(*width)));
            let sum = |role, access, space, dtype| part(role, access, space, dtype, from, to);
            let inputs = *slots + u32::from(shared.is_some());
            let mut parts: Vec<Part> = (0..inputs).map(|_| sum(Role::X, Read, Exchange, pr.wire)).collect();
            parts.push(part(Role::Shares, Read, Exchange, DType::F32, 0, u64::from(*slots)));
            parts.extend(shared.map(|_| part(Role::Gate, Read, Exchange, DType::F32, 0, 1)));
            parts.extend(adds.then(|| sum(Role::Residual, Update, Private, DType::F32)));
            parts.push(sum(Role::Out, Write, Exchange, pr.wire));
            parts
        }
        Op::Mix(mix) => {
            let [keys, values, heads] = [mix.key_dim, mix.value_dim, mix.value_heads].map(u64::from);
            let (group, kernel) = (heads / u64::from(mix.key_heads), u64::from(mix.kernel));
            let (key, state) = (lo / group, keys * values + (kernel - 1) * (2 * keys + values));
            let channels = 2 * u64::from(mix.key_heads) * keys + heads * values;
            let read = |role, lo, hi| part(role, Read, Exchange, pr.wire, lo, hi);
            vec![
                read(Role::Q, key * keys, (key + 1) * keys),
                read(Role::K, key * keys, (key + 1) * keys),
                read(Role::V, lo * values, (lo + 1) * values),
                read(Role::Gate, lo * values, (lo + 1) * values),
                vector(Role::NormWeight, 0, values),
                read(Role::Beta, 0, heads),
                read(Role::Decay, 0, heads),
                vector(Role::Conv, 0, channels * kernel),
                vector(Role::ALog, 0, heads),
                vector(Role::DtBias, 0, heads),
                part(Role::State, Update, State, DType::F32, lo * state, (lo + 1) * state),
                part(Role::Out, Write, Exchange, pr.wire, lo * values, (lo + 1) * values),
            ]
        }
        Op::Convolve(Convolve { channels, kernel }) => {
            let (from, to) = (8 * lo, (8 * hi).min(u64::from(*channels)));
            let read = |role| part(role, Read, Exchange, pr.wire, from, to);
            let taps = u64::from(*kernel);
            vec![
                read(Role::X),
                read(Role::B),
                read(Role::C),
                vector(Role::Conv, from * taps, to * taps),
                vector(Role::Bias, from, to),
                part(Role::State, Update, State, DType::F32, from * (taps - 1), to * (taps - 1)),
                part(Role::Out, Write, Exchange, pr.wire, from, to),
            ]
        }
        Op::Scan(scan) => {
            let [dim, width, heads, taps] = [scan.head_dim, scan.state, scan.heads, scan.kernel].map(u64::from);
            let groups = u64::from(scan.groups);
            let (group, state) = (lo / (heads / groups), dim * width + (taps - 1) * (dim + 2 * width));
            let channels = heads * dim + 2 * groups * width;
            let read = |role, lo, hi| part(role, Read, Exchange, pr.wire, lo, hi);
            let mut parts = vec![
                read(Role::X, lo * dim, (lo + 1) * dim),
                read(Role::B, group * width, (group + 1) * width),
                read(Role::C, group * width, (group + 1) * width),
                read(Role::Step, 0, heads),
            ];
            parts.extend(scan.gate.map(|_| read(Role::Gate, lo * dim, (lo + 1) * dim)));
            parts.extend([
                vector(Role::Conv, 0, channels * taps),
                vector(Role::Bias, 0, channels),
                vector(Role::ALog, 0, heads),
                vector(Role::D, 0, heads),
                vector(Role::DtBias, 0, heads),
                part(Role::State, Update, State, DType::F32, lo * state, (lo + 1) * state),
                part(Role::Out, Write, Exchange, pr.wire, lo * dim, (lo + 1) * dim),
            ]);
            parts
        }
        Op::GroupNorm(norm) => {
            let each = u64::from(norm.width / norm.groups);
            let (from, to) = (lo * each, (lo + 1) * each);
            let read = |role| part(role, Read, Exchange, pr.wire, from, to);
            let mut parts = vec![read(Role::X)];
            parts.extend(norm.gate.map(|_| read(Role::Gate)));
            // Unlike other norms, it has gains.
            parts.push(vector(Role::NormWeight, from, to));
            parts.push(part(Role::Out, Write, Exchange, pr.wire, from, to));
            parts
        }
        Op::Report => {
            vec![part(Role::Token, Read, Private, DType::I32, 0, 1), part(Role::Out, Write, Output, DType::I32, 0, 1)]
        }
        Op::Embed { .. } | Op::Join { .. } => {
            let everywhere = &matches!(grid.op, Op::Embed { everywhere: true, .. });
            let width = grid.operand(Role::Table).map_or(0, |o| u64::from(s.program.buffers[o.buffer.index()].cols));
            let (lo, hi) = if *everywhere { (0, width) } else { (8 * lo, (8 * hi).min(width)) };
            let mut parts = vec![
                part(Role::Token, Read, Private, DType::I32, 0, 1),
                Part { rows: Rows::Token, must: Must::Tokens, ..part(Role::Table, Read, Constant, pr.weights, lo, hi) },
                part(Role::Residual, Write, Private, DType::F32, lo, hi),
            ];
            // If every SM makes all of it, none publishes it.
            parts.extend((!everywhere).then(|| part(Role::Out, Write, Exchange, pr.wire, lo, hi)));
            let given = matches!(grid.op, Op::Join { .. });
            parts.extend(given.then(|| part(Role::Given, Write, Exchange, pr.wire, lo, hi)));
            parts
        }
        Op::MatVec(m) => {
            let (rows, k) = (u64::from(m.rows), u64::from(m.k));
            let each = u64::from(m.unit_rows);
            let (from, to) = (each * lo, (each * hi).min(rows));
            let x = if m.own_input { (Private, DType::F32) } else { (Exchange, pr.wire) };
            // Slots lie side by side in the output, and in the input, unless all have the same.
            let slots = u64::from(m.slots);
            let of_slot = table_of(s, grid).filter(|_| slots == 1);
            let dealt = of_slot.filter(|_| s.program.rows > 1).map(|(_, table)| u64::from(table.cols));
            let slot = if of_slot.is_some() && dealt.is_none() { j } else { 0 };
            let pitch = grid.operand(Role::X).map_or(0, |x| u64::from(x.cols.stride_j));
            let first = slot * pitch;
            // Where parts are dealt, a task may have any slot.
            let input = grid.operand(Role::X).map_or(0, |x| u64::from(s.program.buffers[x.buffer.index()].cols));
            let inputs = match dealt {
                Some(slots) if input != k => (input / slots.max(1)).max(k) * slots,
                _ => k * slots,
            };
            let mut parts = vec![part(Role::X, Read, x.0, x.1, first, first + inputs)];
            if let Some(norm) = &m.norm {
                parts.push(vector(Role::NormWeight, 0, k));
                if norm.kind == NormKind::Layer {
                    parts.push(vector(Role::NormBias, 0, k));
                }
            }
            parts.push(Part {
                rows: Rows::Units,
                must: Must::Exactly(m.rows, m.k),
                ..part(Role::Weight, Stream, Weight, pr.weights, lo, hi)
            });
            parts.push(vector(Role::Bias, each * lo, each * hi));
            let chosen = slots_of(s, grid, task);
            let chosen = (u64::from(chosen.start), u64::from(chosen.end));
            let choices = part(Role::Choices, Read, Exchange, DType::I32, chosen.0, chosen.1);
            parts.extend(table_of(s, grid).map(|_| choices));
            parts.extend(of_slot.map(|_| part(Role::Shares, Read, Exchange, DType::F32, chosen.0, chosen.1)));
            match m.epilogue {
                Epilogue::Store
                | Epilogue::Act(_)
                | Epilogue::Gated(_)
                | Epilogue::GatedBy { .. }
                | Epilogue::Clamped(_) => {
                    let (each, columns) = columns_of(m);
                    // A slot is whole units: packets are polled in pairs.
                    let columns = if of_slot.is_some() { columns.next_multiple_of(each) } else { columns };
                    let (each, columns) = (u64::from(each), u64::from(columns));
                    let (from, to) = match dealt {
                        Some(slots) => (0, slots * columns),
                        None => (slot * columns + each * lo, slot * columns + (each * hi).min(columns)),
                    };
                    parts.push(part(Role::Out, Write, Exchange, pr.wire, from, to));
                }
                Epilogue::Scores => parts.push(part(Role::Out, Write, Exchange, DType::F32, from, to)),
                Epilogue::Residual { .. } => {
                    parts.push(part(Role::Residual, Update, Private, DType::F32, from, to));
                    parts.push(part(Role::Out, Write, Exchange, pr.wire, from, to));
                }
                Epilogue::Logits { .. } => {
                    parts.push(part(Role::Logits, Write, Output, DType::F32, from, to));
                    parts.push(part(Role::Best, Write, Exchange, DType::I32, 2 * j, 2 * j + 2));
                }
            }
            parts
        }
        Op::Attention(a) => attention(s, a, lo, j),
        Op::AttentionMerge { head_dim, splits, heads_per_task, gate } => {
            let (dim, splits, each) = (u64::from(*head_dim), u64::from(*splits), u64::from(*heads_per_task));
            let records = splits * each * (dim + 2);
            let group = lo / each;
            let mut parts = vec![
                part(Role::Partial, Read, Exchange, DType::F32, group * records, (group + 1) * records),
                part(Role::Out, Write, Exchange, pr.wire, lo * dim, (lo + 1) * dim),
            ];
            parts.extend(gate.then(|| part(Role::Gate, Read, Exchange, pr.wire, lo * dim, (lo + 1) * dim)));
            parts
        }
        Op::NormAdd { norm, width, everywhere, .. } => {
            let width = u64::from(*width);
            let (from, to) = if *everywhere { (0, width) } else { (8 * lo, (8 * hi).min(width)) };
            let mut parts = vec![part(Role::X, Read, Exchange, pr.wire, 0, width), vector(Role::NormWeight, 0, width)];
            if norm.kind == NormKind::Layer {
                parts.push(vector(Role::NormBias, 0, width));
            }
            parts.push(part(Role::Residual, Update, Private, DType::F32, from, to));
            parts.extend((!everywhere).then(|| part(Role::Out, Write, Exchange, pr.wire, from, to)));
            parts
        }
    }
    .into_iter()
    .map(|mut p| {
        // Operands in a cache are added below.
        if p.space == Cache && p.rows == Rows::One {
            p.rows = Rows::Current;
        }
        p
    })
    .collect()
}

/// Elements from one head of a cache row to the next.
pub(super) fn pitch(s: &Schedule, a: &Attention) -> u64 {
    let each = s.program.precision.cache.bytes() as u64;
    (u64::from(a.head_dim) * each).next_multiple_of(HEAD_BYTES) / each
}

fn attention(s: &Schedule, a: &Attention, i: u64, j: u64) -> Vec<Part> {
    let pr = s.program.precision;
    let (dim, each, splits) = (u64::from(a.head_dim), u64::from(a.heads_per_task), u64::from(a.splits));
    let q_cols = u64::from(a.heads) * dim;
    let kv_cols = u64::from(a.heads / a.group) * dim;
    let kv = i * each / u64::from(a.group);
    let pitch = pitch(s, a);
    // The last split takes the current position from the projection; the first task of a KV head appends it.
    let current = j + 1 == splits;
    let appends = current && (i * each).is_multiple_of(u64::from(a.group));
    let part = |role, access, space, dtype, rows, lo: u64, hi: u64, must| Part {
        role,
        access,
        space,
        dtype,
        rows,
        lo,
        hi,
        must,
    };
    let read = |role, lo, hi| part(role, Access::Read, Space::Exchange, pr.wire, Rows::One, lo, hi, Must::Inside);
    let vector = |role, hi| part(role, Access::Read, Space::Constant, DType::F32, Rows::One, 0, hi, Must::Inside);
    let cache = |role, access, rows, touched: bool| {
        let (lo, hi) = if touched { (kv * pitch, kv * pitch + dim) } else { (0, 0) };
        part(role, access, Space::Cache, pr.cache, rows, lo, hi, Must::Positions)
    };
    let whole = |norm: Option<QkNormAttr>| norm.is_some_and(|n| n.span == QkNormSpan::Projection);
    let (whole_q, whole_k) = (whole(a.q_norm), whole(a.k_norm));
    let mut parts =
        vec![if whole_q { read(Role::Q, 0, q_cols) } else { read(Role::Q, i * each * dim, (i + 1) * each * dim) }];
    let (k, v) = if current { ((kv * dim, (kv + 1) * dim), (kv * dim, (kv + 1) * dim)) } else { ((0, 0), (0, 0)) };
    parts.push(if whole_k && current { read(Role::K, 0, kv_cols) } else { read(Role::K, k.0, k.1) });
    parts.push(read(Role::V, v.0, v.1));
    // Records of splits are not gated yet: their merge does it.
    if a.gate && splits == 1 {
        parts.push(read(Role::Gate, i * each * dim, (i + 1) * each * dim));
    }
    if a.sinks {
        // Each head's sink is added once, by the split with the current position.
        let (lo, hi) = if current { (i * each, (i + 1) * each) } else { (0, 0) };
        let (read, constant) = (Access::Read, Space::Constant);
        parts.push(part(Role::Sinks, read, constant, DType::F32, Rows::One, lo, hi, Must::Inside));
    }
    for (role, norm, all) in [(Role::QNormWeight, a.q_norm, q_cols), (Role::KNormWeight, a.k_norm, kv_cols)] {
        if let Some(norm) = norm {
            parts.push(vector(role, if norm.span == QkNormSpan::Head { dim } else { all }));
        }
    }
    if a.rotary > 0 {
        let rotary = u64::from(a.rotary);
        let (read, constant) = (Access::Read, Space::Constant);
        parts.push(part(Role::Rope, read, constant, DType::F32, Rows::Current, 0, rotary, Must::Positions));
    }
    if pr.cache == DType::E4m3 {
        // The scales of codes of keys and of values, for its KV head.
        let (read, constant) = (Access::Read, Space::Constant);
        let (lo, hi) = (2 * kv, 2 * kv + 2);
        parts.push(part(Role::CacheScales, read, constant, DType::F32, Rows::One, lo, hi, Must::Inside));
    }
    parts.push(cache(Role::HistoryK, Access::Stream, Rows::History, true));
    parts.push(cache(Role::HistoryV, Access::Stream, Rows::History, true));
    parts.push(cache(Role::AppendK, Access::Write, Rows::Current, appends));
    parts.push(cache(Role::AppendV, Access::Write, Rows::Current, appends));
    let (space, write) = (Space::Exchange, Access::Write);
    parts.push(if splits == 1 {
        part(Role::Out, write, space, pr.wire, Rows::One, i * each * dim, (i + 1) * each * dim, Must::Inside)
    } else {
        let record = each * (dim + 2);
        let at = (i * splits + j) * record;
        part(Role::Out, write, space, DType::F32, Rows::One, at, at + record, Must::Inside)
    });
    parts
}

/// Roles that an op may lack.
fn optional(op: &Op, role: Role) -> bool {
    let norms = [Role::NormWeight, Role::NormBias, Role::QNormWeight, Role::KNormWeight];
    let adds = match op {
        Op::MatVec(m) => matches!(m.epilogue, Epilogue::Residual { .. }),
        Op::Combine(combine) => combine.adds,
        _ => false,
    };
    let gate = role == Role::Gate && matches!(op, Op::Combine(_));
    let normed = norms.contains(&role) && !matches!(op, Op::GroupNorm(_));
    let share = role == Role::Shares && matches!(op, Op::MatVec(_));
    role == Role::Bias || gate || share || normed || adds && role == Role::Out
}

fn foot(s: &Schedule, grid: &Grid, task: &Task, vocab: u32) -> Result<Foot, Fault> {
    let parts = parts(s, grid, task);
    // The inputs of a sum have one role. They are told apart by their order.
    let mut of_role: BTreeMap<Role, Vec<&Operand>> = BTreeMap::new();
    for operand in &grid.operands {
        let taken = parts.iter().filter(|p| p.role == operand.role).count();
        let same = of_role.entry(operand.role).or_default();
        same.push(operand);
        if same.len() > taken {
            return Err(Fault::new(Kind::Undeclared, format!("`{}` is no operand of its op", operand.role.name())));
        }
    }
    side_by_side(grid)?;
    let mut foot = Foot::default();
    let mut taken: BTreeMap<Role, usize> = BTreeMap::new();
    for part in parts {
        let nth = taken.entry(part.role).or_default();
        *nth += 1;
        let Some(&operand) = of_role.get(&part.role).and_then(|same| same.get(*nth - 1)) else {
            if optional(&grid.op, part.role) {
                continue;
            }
            return Err(Fault::new(Kind::Undeclared, format!("no `{}`", part.role.name())));
        };
        let buffer = &s.program.buffers[operand.buffer.index()];
        let mut part = part;
        if let (Rows::Lookup(id), Rows::Units) = (operand.rows, part.rows) {
            chosen(s, grid, task, id, &mut part, &mut foot)?;
        }
        if let (Role::Bias, Op::MatVec(m), Some((id, table))) = (part.role, &grid.op, table_of(s, grid)) {
            // As many values for each part, of which the same part is taken as of the matrix.
            let each = u64::from(grid.n) * u64::from(m.unit_rows);
            part.rows = Rows::Lookup(id);
            part.must = Must::Parts(each, table.bound);
        }
        let of_step = matches!(part.space, Space::Exchange | Space::Private | Space::Output);
        if of_step && s.program.rows > 1 {
            // Keys and values are those of all rows: a row of a prompt sees the rows before it.
            let of_all = !grid.per_row || matches!(part.role, Role::K | Role::V);
            part.rows = if of_all { Rows::All } else { Rows::Own };
        }
        if part.space == Space::State {
            // A row for each sequence.
            let sequences = s.program.tables.iter().find(|table| table.holds == Holds::Sequences);
            part.rows = if sequences.is_some() { Rows::Sequences } else { Rows::One };
            if buffer.rows != sequences.map_or(1, |table| table.bound) {
                return Err(Fault::new(Kind::OutOfBounds, format!("`state`: {} rows", buffer.rows)));
            }
        }
        // What a net or Mamba-2 leaves is of its part of the sequences; it reads no rows of another part.
        let divides = matches!(grid.op, Op::Mix(_) | Op::Scan(_)) && grid.second.extent() > 1;
        if divides && matches!(part.role, Role::State | Role::Out) {
            part.rows = Rows::Part;
        }
        foot.part = divides.then(|| (task.j, grid.second.extent()));
        compare(&part, operand, buffer, task, s.program.context_max, vocab)?;
        if part.lo >= part.hi {
            continue;
        }
        // They fit, because they were compared with the columns of the buffer.
        let base = u64::from(operand.cols.base);
        let (lo, hi) = ((base + part.lo) as u32, (base + part.hi) as u32);
        let own = grid.per_row && part.rows != Rows::All;
        let rows = if own { task.row..task.row + 1 } else { 0..s.program.rows };
        let touches = rows.map(|row| Touch { buffer: operand.buffer, row, lo, hi });
        let list = match (part.space, part.access) {
            (Space::Exchange, Access::Read) => &mut foot.reads,
            (Space::Exchange, _) => &mut foot.writes,
            (Space::Private, Access::Read) => &mut foot.private_reads,
            (Space::Private, Access::Update) => {
                foot.private_reads.extend(touches.clone());
                &mut foot.private_writes
            }
            (Space::Private, _) => &mut foot.private_writes,
            (Space::Cache, Access::Stream) => &mut foot.history,
            (Space::Cache, _) => &mut foot.appends,
            (Space::Output, _) => &mut foot.outputs,
            // Of a state, an SM finds what it left itself: `contents` and `states` judge that.
            (Space::State, _) => &mut foot.states,
            (Space::Weight | Space::Constant, _) => continue,
        };
        list.extend(touches);
    }
    Ok(foot)
}

/// The weights are one of the parts that the table may name; the writer of the table must not name another one.
fn chosen(s: &Schedule, grid: &Grid, task: &Task, id: TableId, part: &mut Part, foot: &mut Foot) -> Result<(), Fault> {
    let Some(table) = s.program.tables.get(id.index()) else { return malformed(format!("{id} is no table")) };
    let TableHome::Device(buffer) = table.home else { return malformed(format!("no task chooses {id} in the step")) };
    if table.holds != Holds::Choices || buffer.index() >= s.program.buffers.len() {
        return malformed(format!("{id} chooses nothing for `{}`", grid.op.name()));
    }
    if table.rows != s.program.rows {
        return malformed(format!("{id} has choices of {} rows, a step {}", table.rows, s.program.rows));
    }
    let Op::MatVec(m) = &grid.op else { return malformed(format!("`{}` takes no part of a matrix", grid.op.name())) };
    // A part begins with a unit.
    let (each, columns) = columns_of(m);
    if columns % each != 0 && each * 2 != 8 {
        return malformed(format!("parts of {columns} columns, in units of {each}"));
    }
    let makers = s.program.grids.iter().filter(|g| g.operand(Role::Out).is_some_and(|out| out.buffer == buffer));
    for maker in makers {
        match maker.op {
            Op::Route(route) if route.experts > table.bound => {
                let what = format!("an expert below {} of {}", route.experts, table.bound);
                return Err(Fault::new(Kind::OutOfBounds, what));
            }
            Op::Route(route) if route.top_k == table.cols => {}
            Op::Route(route) => return malformed(format!("{} choices in {} slots", route.top_k, table.cols)),
            _ => return Err(Fault::new(Kind::Undeclared, format!("{buffer} holds no choice"))),
        }
    }
    // Its loader and the task itself, which looks for scales and biases, take the same choices.
    if grid.operand(Role::Choices).is_some_and(|choices| choices.buffer != buffer || choices.cols.base != 0) {
        return Err(Fault::new(Kind::Undeclared, format!("takes a choice that is no entry of {id}")));
    }
    if let Must::Exactly(rows, _) = &mut part.must {
        *rows = rows.saturating_mul(table.bound);
    }
    part.rows = Rows::Lookup(id);
    let slots = slots_of(s, grid, task);
    let rows = if s.program.rows > 1 { 0..s.program.rows } else { 0..1 };
    foot.choices.extend(rows.map(|row| Touch { buffer, row, lo: slots.start, hi: slots.end }));
    if s.program.rows > 1 {
        let (Some(x), Some(out)) = (grid.operand(Role::X), grid.operand(Role::Out)) else {
            return malformed(format!("parts of {id} are dealt and make nothing"));
        };
        let each_share = (grid.second.extent() / s.machine.devices.max(1)).max(1);
        let input = s.program.buffers[x.buffer.index()].cols;
        foot.deal = Some(Deal {
            table: id,
            parts: table.bound,
            slots: table.cols,
            j: task.j % each_share,
            shares: each_share,
            units: (task.lo, task.hi),
            unit_cols: each,
            x: (x.buffer, if input == m.k { 0 } else { input / table.cols.max(1) }),
            out: (out.buffer, columns.next_multiple_of(each)),
        });
    }
    Ok(())
}

/// A sum reads on from its first input, one input after another.
fn side_by_side(grid: &Grid) -> Result<(), Fault> {
    let Op::Combine(combine) = &grid.op else { return Ok(()) };
    let mut inputs = grid.operands.iter().filter(|operand| operand.role == Role::X);
    let Some(first) = inputs.next() else { return Ok(()) };
    let mut place = u64::from(first.cols.base);
    for input in inputs {
        place += u64::from(combine.width);
        if (input.buffer, u64::from(input.cols.base)) != (first.buffer, place) {
            return Err(Fault::new(Kind::Undeclared, "inputs of a sum that do not lie side by side"));
        }
    }
    Ok(())
}

/// Compares a declared operand with the accesses of the op.
fn compare(
    part: &Part,
    operand: &Operand,
    buffer: &Buffer,
    task: &Task,
    context_max: u32,
    vocab: u32,
) -> Result<(), Fault> {
    let role = part.role.name();
    let undeclared = |what: String| Err(Fault::new(Kind::Undeclared, format!("`{role}`: {what}")));
    if operand.access != part.access || operand.rows != part.rows {
        return undeclared("touched in another way".to_string());
    }
    if buffer.space != part.space {
        return undeclared(format!("in {}, the op looks in {}", buffer.space.name(), part.space.name()));
    }
    if buffer.dtype != part.dtype {
        return undeclared(format!("holds {}, the op takes {}", buffer.dtype, part.dtype));
    }
    if buffer.rows == 0 || buffer.cols == 0 || buffer.phases == 0 {
        return malformed("a buffer of nothing");
    }
    let immutable = matches!(buffer.space, Space::Weight | Space::Constant);
    if immutable != buffer.content.is_some() {
        return Err(Fault::new(Kind::Unwritten, format!("`{role}`: content")));
    }
    // The packer fills an operand according to its role, or not at all.
    let filled = match (&buffer.content, part.role) {
        (None, _) => true,
        (Some(Content::Rows { parts, .. }), Role::Weight) => {
            parts.iter().map(|p| u64::from(p.rows)).sum::<u64>() == u64::from(buffer.rows)
        }
        (Some(Content::Tensor(_)), Role::Table)
        | (Some(Content::RopeTable(_)), Role::Rope)
        | (Some(Content::CacheScales(_)), Role::CacheScales) => true,
        (Some(Content::Vectors { parts, .. }), role)
            if ![Role::Weight, Role::Table, Role::Rope, Role::CacheScales].contains(&role) =>
        {
            let len = parts.iter().map(|p| u64::from(p.len)).sum::<u64>();
            // Rows of padding have no bias.
            role == Role::Bias || len == u64::from(buffer.cols)
        }
        _ => false,
    };
    if !filled {
        return Err(Fault::new(Kind::Unwritten, format!("`{role}`: content of another kind or size")));
    }
    let beyond = |what: String| Err(Fault::new(Kind::OutOfBounds, format!("`{role}`: {what}")));
    match part.must {
        // Pages are judged where they are drawn.
        Must::Positions if buffer.rows < context_max && buffer.paging.is_none() => {
            return beyond(format!("{} rows", buffer.rows));
        }
        Must::Tokens if buffer.rows < vocab => return beyond(format!("{} rows, {vocab} tokens", buffer.rows)),
        Must::Exactly(rows, cols) => {
            if (buffer.rows, buffer.cols) != (rows, cols) {
                return undeclared(format!("{} x {}, the op takes {rows} x {cols}", buffer.rows, buffer.cols));
            }
            // Columns are units of the stream.
            let range = declared(&operand.cols, task.lo, task.hi, task.j);
            if range != Some((part.lo, part.hi)) {
                return undeclared(format!("units {range:?}, the op takes {}..{}", part.lo, part.hi));
            }
            return Ok(());
        }
        Must::Parts(each, parts) => {
            let all = each.saturating_mul(u64::from(parts));
            if (buffer.rows, u64::from(buffer.cols), operand.cols.base) != (1, all, 0) {
                return undeclared(format!("{} values, the op takes {parts} times {each}", buffer.cols));
            }
        }
        _ => {}
    }
    let base = u64::from(operand.cols.base);
    let implied = (part.lo < part.hi).then_some((base + part.lo, base + part.hi));
    let range = declared(&operand.cols, task.lo, task.hi, task.j);
    if implied.is_some_and(|(_, hi)| hi > u64::from(buffer.cols)) {
        return beyond(format!("columns {implied:?} of {}", buffer.cols));
    }
    if range != implied {
        return undeclared(format!("columns {range:?}, the op touches {implied:?}"));
    }
    Ok(())
}

/// Bytes have one meaning: fp32 activations and fp32 records of attention have the same type, but are different data.
fn meanings(s: &Schedule) -> Result<(), Fault> {
    let mut meaning: BTreeMap<BufferId, (u32, u32, u32, u32)> = BTreeMap::new();
    for grid in &s.program.grids {
        for operand in &grid.operands {
            if s.program.buffers[operand.buffer.index()].space != Space::Exchange {
                continue;
            }
            let is = match (&grid.op, operand.role) {
                (_, Role::Best) => (1, 0, 0, 0),
                (Op::Route(_), Role::Out) | (_, Role::Choices) => (3, 0, 0, 0),
                (_, Role::Shares) => (6, 0, 0, 0),
                (Op::Route(_), Role::X) | (Op::Combine(_), Role::Gate) => (5, 0, 0, 0),
                (Op::MatVec(MatVec { epilogue: Epilogue::Scores, .. }), Role::Out) => (5, 0, 0, 0),
                (Op::AttentionMerge { head_dim, splits, heads_per_task, gate }, Role::Partial) => {
                    (if *gate { 4 } else { 2 }, *head_dim, *splits, *heads_per_task)
                }
                (Op::Attention(a), Role::Out) if a.splits > 1 => {
                    (if a.gate { 4 } else { 2 }, a.head_dim, a.splits, a.heads_per_task)
                }
                _ => (0, 0, 0, 0),
            };
            if *meaning.entry(operand.buffer).or_insert(is) != is {
                return Err(Fault::new(Kind::Undeclared, format!("{} means two things", operand.buffer)));
            }
        }
    }
    Ok(())
}

/// Whether everything fits at once.
fn occupancy(s: &Schedule, target: &Target) -> Result<(), Fault> {
    let (m, spec) = (&s.machine, &target.spec);
    let no = |what: &str| Err(Fault::new(Kind::Occupancy, what.to_string()));
    if m.target != target.name {
        return no("made for another target");
    }
    // A device has as many blocks as any other, or one more.
    if m.sms.div_ceil(m.devices.max(1)) > spec.sm_count {
        // The blocks beyond the last SM start when others end, and those wait for them.
        return no("more blocks than SMs");
    }
    if target.kind == TargetKind::Cuda {
        let threads = (u64::from(m.consumer_warps) + u64::from(m.loader_warps)) * 32;
        if m.consumer_warps == 0 || m.loader_warps == 0 || threads > u64::from(spec.threads_per_block_max) {
            return no("threads");
        }
        let (registers, kept) = (u64::from(m.registers_per_thread), u64::from(m.loader_registers));
        if kept > 0 {
            let given = u64::from(spec.registers_per_sm) / threads / 8 * 8;
            let groups = m.consumer_warps % 4 == 0 && m.loader_warps % 4 == 0;
            let used = u64::from(m.consumer_warps) * registers + u64::from(m.loader_warps) * kept;
            let most = given * threads / 32;
            let fits = registers % 8 == 0 && kept % 8 == 0 && kept >= 24 && kept <= registers && registers <= 248;
            if !spec.register_reallocation || !groups || used > most || !fits {
                return no("registers moved");
            }
        } else if !(24..=255).contains(&registers) || threads * registers > u64::from(spec.registers_per_sm) {
            return no("registers");
        }
    }
    let r = &m.ring;
    if r.slots == 0 || r.slot_bytes == 0 || u64::from(r.slot_bytes) % GRANULE != 0 {
        return Err(Fault::new(Kind::Ring, "slots"));
    }
    // A slot is free when the required number of warps have left it; each warp leaves it once.
    if r.arrivals != m.consumer_warps {
        let what = if r.arrivals > m.consumer_warps {
            "slots that are never free"
        } else {
            "slots that are free while a warp still reads them"
        };
        return Err(Fault::new(Kind::Ring, what));
    }
    // A chunk of a unit that is larger than a slot has the same number of granules for every warp.
    if r.slot_bytes / (GRANULE as u32) < r.arrivals {
        return Err(Fault::new(Kind::Ring, "a slot without a granule for every warp"));
    }
    // While too few slots are free, only `flight_low` copies may be in flight. If that is 0 and slots are never free enough, the
    // loader never starts.
    let starts = if r.flight_free > r.slots { r.flight_low } else { r.flight_high.min(r.flight_low) };
    if starts == 0 {
        return Err(Fault::new(Kind::Hang, "a loader that never asks"));
    }
    Ok(())
}

/// Compares streams with queues: the loader must bring in what the next task takes.
fn streamed(s: &Schedule) -> Result<(), Fault> {
    let ring = |what: String| Err(Fault::new(Kind::Ring, what));
    let slot = u64::from(s.machine.ring.slot_bytes);
    for (r, regime) in s.regimes.iter().enumerate() {
        for (sm, (queue, stream)) in regime.queues.iter().zip(&regime.streams).enumerate() {
            let mut runs = stream.iter();
            for id in queue {
                let task = &regime.tasks[id.index()];
                let grid = &s.program.grids[task.grid.index()];
                let needs = match &grid.op {
                    Op::MatVec(_) => 1,
                    Op::Attention(_) => 2,
                    _ => continue,
                };
                if needs > s.machine.ring.slots {
                    return ring(format!("{id} of r{r} needs {needs} slots"));
                }
                let Some(run) = runs.next() else {
                    return ring(format!("{id} of r{r} waits for chunks that never come"));
                };
                if run.task != *id {
                    return ring(format!("{id} of r{r} gets the chunks of {}", run.task));
                }
                match (&grid.op, run.source) {
                    (Op::MatVec(_), Source::Units { buffer, lo, hi }) => {
                        let matrix = grid.operand(Role::Weight).map(|o| o.buffer);
                        if (matrix, lo, hi) != (Some(buffer), task.lo, task.hi) {
                            return ring(format!("{id} of r{r} gets units {lo}..{hi} of {buffer}"));
                        }
                    }
                    (Op::Attention(a), Source::History { rows }) => {
                        let row = pitch(s, a) * s.program.precision.cache.bytes() as u64;
                        if rows == 0 || rows % TILE_ROWS != 0 || u64::from(rows) * row > slot {
                            return ring(format!("{id} of r{r} gets {rows} rows a chunk"));
                        }
                    }
                    _ => return ring(format!("{id} of r{r} gets bytes of another kind")),
                }
            }
            if runs.next().is_some() {
                return ring(format!("sm{sm} of r{r} gets chunks that no task takes"));
            }
        }
    }
    Ok(())
}

/// Bytes from the first of a buffer to the first of its next phase.
pub fn phase_bytes(buffer: &Buffer) -> u64 {
    if buffer.words {
        let pieces = u64::from(buffer.cols).div_ceil(u64::from(piece_cols(buffer)));
        return pieces * 128 * u64::from(buffer.rows).div_ceil(8);
    }
    row_bytes(buffer).saturating_mul(u64::from(buffer.rows))
}

/// Columns of a piece of words: 16 bytes.
fn piece_cols(buffer: &Buffer) -> u32 {
    16 / buffer.dtype.bytes().clamp(2, 4) as u32
}

/// The places of columns `lo..hi` of a row in a phase of words, where pieces of 8 rows are side by side. Whole words; the writer of the
/// last column fills its piece.
pub fn word_spans(buffer: &Buffer, row: u32, lo: u32, hi: u32) -> Vec<(u64, u64)> {
    let (each, piece) = ((buffer.dtype.bytes() as u64).clamp(2, 4), piece_cols(buffer));
    let pieces = u64::from(buffer.cols.div_ceil(piece));
    let (group, in_group) = (u64::from(row / 8), u64::from(row % 8));
    let of_piece = |p: u32| {
        let first = u64::from(lo.max(p * piece) - p * piece) * each / 4 * 4;
        let end = if hi == buffer.cols { piece } else { hi.min((p + 1) * piece) - p * piece };
        let last = (u64::from(end.min(piece)) * each).next_multiple_of(4);
        let at = (group * pieces + u64::from(p)) * 128 + in_group * 16;
        (at + first, at + last)
    };
    if lo < hi { (lo / piece..hi.div_ceil(piece)).map(of_piece).collect() } else { vec![] }
}

/// Bytes from the first of a row of packets to the first of the next row.
pub fn row_bytes(buffer: &Buffer) -> u64 {
    let per_packet = 4 / (buffer.dtype.bytes() as u64).min(4);
    u64::from(buffer.cols).div_ceil(per_packet).next_multiple_of(2) * 8
}

/// Key of the arena that weights and constants share.
const PACK: u8 = u8::MAX;

/// Bytes of a unit of a matrix: whole granules along k, each 64 bytes of 8 rows, and the scales and zero points of their groups. Granules
/// of codes, all of one size, begin at multiples of 16 bytes, and so do units.
pub fn unit_bytes(buffer: &Buffer, m: &MatVec) -> u64 {
    let k = u64::from(m.k);
    let Some(Format { code, groups, .. }) = buffer.coded else {
        let element = buffer.dtype.bytes() as u64;
        return k.div_ceil(GRANULE_ROW / element * 8 / u64::from(m.unit_rows).clamp(1, 8)) * GRANULE;
    };
    let granule_k = GRANULE_ROW * 8 / u64::from(code.bits());
    let granules = k.div_ceil(granule_k);
    let of_groups = |g: Groups| {
        let count = granule_k.div_ceil(u64::from(g.k).max(1));
        let each = match g.scale {
            ScaleCode::F32 => 4,
            ScaleCode::F16 | ScaleCode::Bf16 => 2,
            ScaleCode::E4m3 | ScaleCode::E8m0 => 1,
            // Numbers of fp16 for a scale and a minimum, and 12 bits for each group.
            ScaleCode::F16x6 => return 8 * (2 * 2 + count * 12 / 8),
        };
        8 * count * (each * (1 + u64::from(g.minima)) + u64::from(g.zeros))
    };
    granules * (GRANULE + groups.map_or(0, of_groups)).next_multiple_of(16)
}

/// Bytes of the units of a matrix that some op streams, and of the scales of their rows.
fn matrix_bytes(s: &Schedule, b: usize) -> u64 {
    let of_grid = |grid: &Grid| match (&grid.op, grid.operand(Role::Weight)) {
        (Op::MatVec(m), Some(weight)) if weight.buffer.index() == b => {
            let buffer = &s.program.buffers[b];
            let scales = if buffer.coded.is_some_and(|format| format.row_scales) { 8 * 4 } else { 0 };
            let unit = unit_bytes(buffer, m) + scales;
            // One copy for each choice of a table.
            let chosen = match weight.rows {
                Rows::Lookup(id) => s.program.tables.get(id.index()).map_or(1, |table| u64::from(table.bound)),
                _ => 1,
            };
            u64::from(grid.n).saturating_mul(unit).saturating_mul(chosen)
        }
        _ => 0,
    };
    s.program.grids.iter().map(of_grid).max().unwrap_or(0)
}

/// Bytes of the units of a matrix that even the device with most of them does not have.
fn bytes_elsewhere(s: &Schedule, b: usize) -> u64 {
    let devices = u64::from(s.machine.devices.max(1));
    let of_grid = |grid: &Grid| match (&grid.op, grid.operand(Role::Weight)) {
        (Op::MatVec(m), Some(weight)) if weight.buffer.index() == b => {
            let chosen = match weight.rows {
                Rows::Lookup(id) => s.program.tables.get(id.index()).map_or(1, |table| u64::from(table.bound)),
                _ => 1,
            };
            let units = u64::from(grid.n) - u64::from(grid.n).div_ceil(devices);
            units.saturating_mul(chosen).saturating_mul(unit_bytes(&s.program.buffers[b], m))
        }
        _ => 0,
    };
    s.program.grids.iter().map(of_grid).max().unwrap_or(0)
}

/// Bytes of a row of a table of codes: codes, scales and zero points of groups, the scale of the row, each aligned to a word.
fn table_row(buffer: &Buffer) -> u64 {
    let Format { code, groups, row_scales } = buffer.format();
    let cols = u64::from(buffer.cols);
    let words = |bytes: u64| 4 * bytes.div_ceil(4);
    let of_groups = groups.map_or(0, |g| {
        cols.div_ceil(u64::from(g.k.max(1)))
            * u64::from(g.scale.bytes() * (1 + u32::from(g.minima)) + u32::from(g.zeros))
    });
    let bytes = words((cols * u64::from(code.bits())).div_ceil(8)) + words(of_groups) + if row_scales { 4 } else { 0 };
    16 * bytes.div_ceil(16)
}

/// Checks the places of buffers. Exchange memory is shadowed during a run. Caches and outputs are written at every position of a
/// text, so two in one place are a fault without a run.
fn arenas(s: &Schedule, target: &Target) -> Result<(), Fault> {
    let (mut total, mut elsewhere) = (0u64, 0u64);
    let mut extents: Vec<(u8, u64, u64)> = vec![];
    for (b, (buffer, place)) in s.program.buffers.iter().zip(&s.placement).enumerate() {
        let elements = u64::from(buffer.rows).saturating_mul(u64::from(buffer.cols));
        let bytes = match buffer.space {
            Space::Exchange => phase_bytes(buffer).saturating_mul(u64::from(buffer.phases)),
            Space::Constant if buffer.coded.is_some() => u64::from(buffer.rows).saturating_mul(table_row(buffer)),
            _ => elements.saturating_mul(buffer.dtype.bytes() as u64),
        };
        match buffer.space {
            Space::Exchange | Space::Cache | Space::State | Space::Output => {
                let Some(place) = place else { return malformed(format!("b{b} has no place")) };
                // A queue entry holds places in units, so a remainder would be lost.
                if place % if buffer.space == Space::Exchange { 8 } else { 256 } != 0 {
                    return Err(Fault::new(Kind::Stale, format!("b{b} is read elsewhere than at {place}")));
                }
                // Packets are polled in pairs, each pair with one load.
                if buffer.space == Space::Exchange && place % 16 != 0 {
                    return malformed(format!("pairs of packets of b{b} begin at {place}"));
                }
                let Some(end) = place.checked_add(bytes) else { return malformed("a place beyond all memory") };
                if buffer.space != Space::Exchange {
                    extents.push((buffer.space.arena() as u8, *place, end));
                }
                total = total.max(end);
            }
            Space::Weight | Space::Constant => {
                let Some(place) = place else { return malformed(format!("b{b} is nowhere in the pack")) };
                if place % 256 != 0 {
                    return Err(Fault::new(Kind::Stale, format!("b{b} is read elsewhere than at {place}")));
                }
                let bytes = if buffer.space == Space::Weight { matrix_bytes(s, b) } else { bytes };
                if buffer.home == Home::Divided {
                    elsewhere = elsewhere.saturating_add(bytes_elsewhere(s, b));
                }
                let Some(end) = place.checked_add(bytes) else { return malformed("a place beyond all memory") };
                extents.push((PACK, *place, end));
                total = total.max(end);
            }
            Space::Private => {}
        }
    }
    if total.saturating_sub(elsewhere) > target.spec.memory_bytes {
        return Err(Fault::new(Kind::Occupancy, "device memory"));
    }
    extents.sort();
    if extents.windows(2).any(|w| w[0].0 == w[1].0 && w[1].1 < w[0].2) {
        return Err(Fault::new(Kind::Clobbered, "caches, outputs, or parts of the pack in one place"));
    }
    Ok(())
}

/// Teams of warps that share the dimensions of a head on tensor cores, 64 at least for each warp; `None`: this attention takes the
/// other path, where every warp has all of them.
fn teams(grid: GridId, a: &Attention, s: &Schedule, target: &Target) -> Option<u64> {
    let (warps, precision) = (s.machine.consumer_warps, s.program.precision);
    let each = s.attention_variant(grid)?.warps_per_head.max(1);
    let fits = target.spec.dot == DotMechanism::Mma
        && precision.wire == DType::Bf16
        && matches!(precision.cache, DType::Bf16 | DType::E4m3)
        && warps % each == 0
        && a.head_dim <= 256
        // A warp reads whole 128 bytes of a row, or a whole row of 64.
        && ((u64::from(a.head_dim) * precision.cache.bytes() as u64).is_multiple_of(128 * u64::from(each))
            || (a.head_dim, each, precision.cache) == (64, 1, DType::E4m3));
    // The two halves of a rotated pair are in the same lanes.
    let turned = match (a.rotary, a.interleaved) {
        (0, _) => true,
        (rotary, true) => rotary == a.head_dim,
        (rotary, false) => rotary == a.head_dim && (rotary == 64 || rotary % 128 == 0),
    };
    let alone = [a.q_norm, a.k_norm].into_iter().flatten().all(|norm| norm.span == QkNormSpan::Head);
    (fits && turned && alone).then_some(u64::from(warps / each))
}

/// Checks shared memory: parts that overlap, are missing, or are too small for the ops that use them.
fn shared_memory(s: &Schedule, target: &Target) -> Result<(), Fault> {
    let m = &s.machine;
    let no = |what: String| Err(Fault::new(Kind::Occupancy, what));
    let mut parts: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for part in &m.smem {
        let here = (u64::from(part.offset), u64::from(part.offset) + u64::from(part.bytes));
        let name = part.kind.name();
        if parts.insert(name, here).is_some() {
            return no(format!("`{name}` twice"));
        }
        if here.1 > u64::from(target.spec.smem_bytes_per_block_max) {
            return no(format!("`{}` ends at {}", name, here.1));
        }
        if here.0 % 16 != 0 {
            return no(format!("`{}` begins at {}", name, here.0));
        }
    }
    let mut places: Vec<(u64, u64)> = parts.values().copied().filter(|p| p.0 < p.1).collect();
    places.sort_unstable();
    if places.windows(2).any(|w| w[1].0 < w[0].1) {
        return no("parts of shared memory that overlap".to_string());
    }
    let precision = s.program.precision;
    let tensor_cores = precision.weights == DType::Bf16 && target.spec.dot == DotMechanism::Mma;
    let staged = if tensor_cores { 2 } else { 4 };
    let mut needs: BTreeMap<&str, u64> = BTreeMap::new();
    let mut need = |part: &'static str, bytes: u64| {
        let most = needs.entry(part).or_default();
        *most = (*most).max(bytes);
    };
    need("ring", u64::from(m.ring.slots) * u64::from(m.ring.slot_bytes));
    // Sums of 8 units of 8 rows by every warp, twice, so that a batch may begin before the last one is added up.
    let warps = u64::from(m.consumer_warps);
    // In a batch kernel: sums of all rows, for as many units as its threads have four pairs of columns.
    let for_rows = s.program.buffers.iter().any(|b| b.words);
    let rows = u64::from(s.program.rows).next_multiple_of(8);
    let sums = if for_rows { (warps * 32 / (rows * 4)).max(1) * rows } else { 8 };
    need("reduce", 2 * sums * warps * 8 * 4);
    // Records of attention begin at the staged input, which attention does not have, and overlap the sums.
    let mut scratch = 0;
    for (g, grid) in s.program.grids.iter().enumerate() {
        match &grid.op {
            // Words of bf16 are the operands of tensor cores. Elsewhere a block of k of every row is widened.
            Op::MatVec(m) if for_rows => {
                let block = match s.variants.get(&GridId::from(g)) {
                    Some(Variant::MatVec(variant)) => u64::from(variant.chunk),
                    _ => 0,
                };
                let granule = 64 / precision.weights.bytes() as u64 * 8 / u64::from(m.unit_rows).clamp(1, 8);
                let block = block.min(u64::from(m.k).div_ceil(granule));
                let lanes = !tensor_cores || precision.wire != DType::Bf16;
                need("stage", if lanes { rows * block * granule * 4 } else { 0 });
            }
            Op::NormAdd { .. } if for_rows => {}
            // Whole granules of 32 values, padded with zeros.
            Op::MatVec(MatVec { k: width, slots, .. }) => {
                need("stage", (u64::from(*width) * u64::from(*slots)).next_multiple_of(32) * staged);
            }
            Op::NormAdd { width, everywhere: false, .. } => {
                need("stage", u64::from(*width).next_multiple_of(32) * staged);
            }
            Op::Attention(a) => {
                let (heads, dim) = (u64::from(a.heads_per_task), u64::from(a.head_dim));
                let tensor = precision.cache == DType::Bf16 && target.spec.dot == DotMechanism::Mma && dim % 8 == 0;
                let operands = if tensor { heads * dim.div_ceil(32) * 64 } else { 0 };
                // In a batch kernel: queries, and keys and values of the step's own rows, as a tile in the cache's layout or in fp32.
                let pitch = pitch(s, a) * precision.cache.bytes() as u64;
                need(
                    "heads",
                    match (for_rows, teams(GridId::from(g), a, s, target)) {
                        (false, _) => (heads + 2) * dim * 4 + operands,
                        (true, Some(_)) => heads * dim * 2 + 2 * 16 * pitch,
                        (true, None) => (heads + 2 * rows) * dim * 4,
                    },
                );
                // One record of each head and warp, or of each team of warps that share a head's dimensions, and the score of the
                // current position.
                let teams = teams(GridId::from(g), a, s, target).unwrap_or(warps);
                let current = if for_rows { 0 } else { ((heads - 1) * (dim + 2) + 1) * 4 };
                scratch = scratch.max(teams * heads * (dim + 2) * 4 + current);
            }
            Op::AttentionMerge { head_dim, splits, .. } => {
                // For each warp that has a split.
                scratch = scratch.max(warps.min(u64::from(*splits)) * (u64::from(*head_dim) + 2) * 4);
            }
            // The score and the key of each expert, the id and the weight of each slot, the key of each group.
            Op::Route(route) => {
                let groups = route.groups.map_or(0, |groups| u64::from(groups.count));
                let values = 2 * u64::from(route.experts) + 2 * u64::from(route.top_k) + groups;
                scratch = scratch.max(4 * values);
            }
            // In a batch kernel, the share of every input of every row; else a lane has that of an input.
            Op::Combine(combine) if for_rows => {
                let inputs = u64::from(combine.slots) + u64::from(combine.shared.is_some());
                scratch = scratch.max(4 * rows * inputs);
            }
            // What a head has at hand, and two sums of each column and part of its rows.
            Op::Mix(m) => {
                let (keys, values) = (u64::from(m.key_dim), u64::from(m.value_dim));
                need("heads", (2 * (keys + values) + 2) * 4);
                scratch = scratch.max((32 * warps / values).clamp(1, keys) * values * 2 * 4);
            }
            Op::Scan(scan) => {
                let (dim, width) = (u64::from(scan.head_dim), u64::from(scan.state));
                let gates = if scan.gate.is_some() { dim } else { 0 };
                need("heads", (dim + 2 * width + gates + 1) * 4);
                scratch = scratch.max((32 * warps / dim).clamp(1, width) * dim * 4);
            }
            // Threads have channels and columns in registers.
            Op::Convolve(_) | Op::GroupNorm(_) => {}
            Op::Select | Op::Report | Op::Combine(_) | Op::Embed { .. } | Op::Join { .. } | Op::NormAdd { .. } => {}
        }
    }
    let room = match (parts.get("stage"), parts.get("reduce")) {
        (Some(stage), Some(reduce)) if stage.1 == reduce.0 => reduce.1 - stage.0,
        (_, Some(reduce)) => reduce.1 - reduce.0,
        _ => 0,
    };
    if room < scratch {
        return no(format!("records of attention, or keys of experts, have {room} bytes, {scratch} are used"));
    }
    for regime in &s.regimes {
        for queue in &regime.queues {
            // All entries of a queue, or 64 in two halves (`Queue` of kernels/runtime/kernel.cuh), where a block copies while it works.
            let halves = target.spec.copy != CopyMechanism::Plain
                && parts.get("queue").is_some_and(|p| p.1 - p.0 == 2 * 32 * 64);
            if target.kind == TargetKind::Cuda && !halves {
                need("queue", queue.len() as u64 * 64);
            }
            // The columns of the residual on an SM are contiguous from its first column on.
            let mut owned: Option<(u32, u32)> = None;
            for id in queue {
                let task = &regime.tasks[id.index()];
                let grid = &s.program.grids[task.grid.index()];
                if let Some(o) = grid.operand(Role::Residual)
                    && let Some((lo, hi)) = declared(&o.cols, task.lo, task.hi, task.j)
                {
                    let (lo, hi) = (lo as u32, hi as u32);
                    owned = Some(owned.map_or((lo, hi), |(a, b)| (a.min(lo), b.max(hi))));
                }
            }
            if let Some((lo, hi)) = owned {
                need("residual", u64::from(hi - lo) * 4 * u64::from(s.program.rows));
            }
        }
    }
    for (part, bytes) in needs {
        let found = parts.get(part).map_or(0, |p| p.1 - p.0);
        if found < bytes {
            return no(format!("`{part}` has {found} bytes, {bytes} are used"));
        }
    }
    Ok(())
}
