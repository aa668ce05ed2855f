//! Compares the contents of memory on both sides of a border between regimes. A text is run with the regimes of its positions, and in
//! the first regime alone; or by two kernels in turn over one cache, and by the first of them alone.
//!
//! A value is a number made of everything that it depends on: the token, the position, the contents of the weights, the
//! attributes of ops, the rows of the history. Contributions of history rows are added up, so that attention is the same
//! number with any number of KV splits. If the two runs differ, the text depends on where a regime begins.
//!
//! Steps are run in program order, one task after another. [`super::machine`] judges whether other orders give the same.
//! Long texts are run near their beginning, their borders and their end; rows of other positions are left out in both runs.

use super::footprint::{columns_of, pitch, table_of};
use super::machine::share;
use super::{Fault, Kind};
use monobloc::ir::op::{Attention, Combine, Convolve, Epilogue, GroupNorm, MatVec, Mix, Op, Role, Route, Scan};
use monobloc::ir::program::{Grid, Space};
use monobloc::ir::schedule::{Schedule, Task};
use monobloc::ir::table::Holds;
use monobloc::model::graph::QkNormSpan;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;
use std::ops::Range;

/// Longest text that is run whole, in positions.
const WHOLE: u32 = 10;
/// Positions on each side of a border.
const NEAR: u32 = 3;

/// Runs the text of a schedule whose operands agree with the accesses of their ops.
pub fn judge(s: &Schedule) -> Result<(), Fault> {
    if s.regimes.len() < 2 {
        return Ok(());
    }
    let positions = positions(s);
    // A text for each part of the sequences.
    let nets = s.program.grids.iter().filter(|grid| matches!(grid.op, Op::Mix(_) | Op::Scan(_)));
    for sequence in 0..nets.map(|grid| grid.second.extent()).max().unwrap_or(1) {
        let of_sequence = || Text { sequence, ..Text::new(s, &positions) };
        let (mut text, mut reference) = (of_sequence(), of_sequence());
        for (at, &position) in positions.iter().enumerate() {
            let regime = text.regime(position);
            text.step(at, regime)?;
            reference.step(at, 0)?;
            if text.outputs != reference.outputs {
                let what = format!("at position {position} r{regime} computes something else than r0 would");
                return Err(Fault::new(Kind::Border, what));
            }
        }
    }
    Ok(())
}

/// Runs a text by two kernels over one cache in turn, a launch for each position, and by the first of them alone.
pub fn judge_shared(a: &Schedule, b: &Schedule) -> Result<(), Fault> {
    let positions = positions(a);
    // Both look up pages in the table of the first kernel. Pages are out of order, unless one of them has block `b` in page `b`.
    let paged = [a, b].iter().all(|s| s.program.buffers.iter().any(|b| b.paging.is_some()));
    let last = a.program.table(Holds::Pages).filter(|_| paged).map(|(_, table)| table.bound - 1);
    let [first, second, mut alone] =
        [a, b, a].map(|s| Text { launches: true, last_page: last, ..Text::new(s, &positions) });
    let (mut texts, mut cache) = ([first, second], HashMap::new());
    for (at, &position) in positions.iter().enumerate() {
        let turn = &mut texts[at % 2];
        std::mem::swap(&mut turn.caches, &mut cache);
        turn.step(at, turn.regime(position))?;
        alone.step(at, alone.regime(position))?;
        if turn.logits() != alone.logits() {
            let what = format!("at position {position} a kernel computes something else over the cache of another one");
            return Err(Fault::new(Kind::Border, what));
        }
        std::mem::swap(&mut turn.caches, &mut cache);
    }
    Ok(())
}

fn positions(s: &Schedule) -> Vec<u32> {
    let most = s.program.context_max;
    let borders = s.regimes.iter().map(|r| r.from_position).chain([most]);
    let mut all: Vec<u32> = borders.flat_map(|b| b.saturating_sub(NEAR)..(b + NEAR).min(most)).collect();
    // A state has seen every position before.
    if most <= WHOLE || s.program.buffers.iter().any(|buffer| buffer.space == Space::State) {
        all.extend(0..most);
    }
    all.sort_unstable();
    all.dedup();
    all
}

fn mix(a: u64, b: u64) -> u64 {
    let h = (a ^ b.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ b;
    (h ^ h >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ h >> 32
}

fn fold(values: impl IntoIterator<Item = u64>) -> u64 {
    values.into_iter().fold(0x6a09_e667_f3bc_c908, mix)
}

fn said(value: &impl Debug) -> u64 {
    fold(format!("{value:?}").bytes().map(u64::from))
}

/// A value, the position of the step that wrote it (from 1 on; 0: none), and its place in a record of attention, or the
/// layout of a row of a cache.
#[derive(Clone, Copy, Default, PartialEq)]
struct Cell {
    value: u64,
    at: u32,
    mark: u32,
}

struct Text<'a> {
    s: &'a Schedule,
    positions: &'a [u32],
    /// Of a text, where tasks divide the sequences among them.
    sequence: u32,
    /// For each buffer, the number of its contents from the checkpoint.
    contents: Vec<u64>,
    /// By buffer: columns of all phases, of all SMs.
    cells: Vec<Vec<Cell>>,
    /// By the place of an element in the arena of caches.
    caches: HashMap<u64, Cell>,
    /// Whether each step is a separate launch, so that the host gives its token.
    launches: bool,
    /// `Some(last)`: the page table has block `b` in page `last - b`; `None`: in page `b`.
    last_page: Option<u32>,
    /// Outputs for the host, by buffer.
    outputs: Vec<Vec<u64>>,
}

impl<'a> Text<'a> {
    fn new(s: &'a Schedule, positions: &'a [u32]) -> Text<'a> {
        let copies = |space, phases: u32| match space {
            Space::Exchange => phases as usize,
            // What an SM keeps, no other one finds: a state has one owner.
            Space::Private | Space::State => s.machine.sms as usize,
            Space::Cache | Space::Weight | Space::Constant | Space::Output => 0,
        };
        let buffers = &s.program.buffers;
        Text {
            s,
            positions,
            sequence: 0,
            contents: buffers.iter().map(|b| said(&b.content)).collect(),
            cells: buffers.iter().map(|b| vec![Cell::default(); copies(b.space, b.phases) * b.cols as usize]).collect(),
            outputs: buffers
                .iter()
                .map(|b| vec![0; if b.space == Space::Output { b.cols as usize } else { 0 }])
                .collect(),
            caches: HashMap::new(),
            launches: false,
            last_page: None,
        }
    }

    /// The regime that serves a position.
    fn regime(&self, position: u32) -> usize {
        self.s.regimes.iter().rposition(|r| r.from_position <= position).unwrap_or(0)
    }

    fn logits(&self) -> Option<&[u64]> {
        let operand = self.s.program.grids.iter().find_map(|grid| grid.operand(Role::Logits))?;
        Some(&self.outputs[operand.buffer.index()])
    }

    /// Step `at` of those that are run, in a regime.
    fn step(&mut self, at: usize, regime: usize) -> Result<(), Fault> {
        let regime = &self.s.regimes[regime];
        let owners = regime.owners();
        let mut by_grid: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (t, task) in regime.tasks.iter().enumerate() {
            by_grid.entry(task.grid.index()).or_default().push(t);
        }
        for (g, tasks) in by_grid {
            // All tasks of a product read the same input, if they are of one slot.
            let mut input = BTreeMap::new();
            // Only the first row of a step of several: tasks do the same for each row.
            for t in tasks.into_iter().filter(|t| regime.tasks[*t].row == 0) {
                let sm = owners[t].map_or(0, |sm| sm.index());
                let grid = &self.s.program.grids[g];
                let parts = grid.second.extent();
                if matches!(grid.op, Op::Mix(_) | Op::Scan(_)) && regime.tasks[t].j != self.sequence % parts {
                    continue;
                }
                let step = Step { at, position: self.positions[at], sm, grid, task: &regime.tasks[t] };
                self.task(&step, &mut input)?;
            }
        }
        Ok(())
    }

    fn task(&mut self, step: &Step, input: &mut BTreeMap<u32, u64>) -> Result<(), Fault> {
        let Step { task, grid, .. } = *step;
        match &grid.op {
            Op::Select => self.select(step),
            Op::Route(route) => self.route(step, route),
            Op::Combine(combine) => self.combine(step, combine),
            Op::Mix(mix) => self.mix(step, mix),
            Op::Convolve(convolve) => self.convolve(step, convolve),
            Op::Scan(scan) => self.scan(step, scan),
            Op::GroupNorm(norm) => self.group_norm(step, norm),
            Op::Report => {
                let token = self.read(step, Role::Token, 0)?;
                self.output(step, Role::Out, 0, token);
                Ok(())
            }
            Op::Join { scale } => {
                let token = self.read(step, Role::Token, 0)?;
                let width = self.cols(step, Role::Table);
                for c in columns(task, width, false) {
                    let x = fold([token, said(scale), self.content(step, Role::Table), c.into()]);
                    self.write(step, Role::Residual, c, fold([u64::MAX, 0]));
                    self.write(step, Role::Given, c, fold([u64::MAX, 1, c.into()]));
                    self.write(step, Role::Out, c, x);
                }
                Ok(())
            }
            Op::Embed { scale, everywhere } => {
                let token = self.read(step, Role::Token, 0)?;
                let width = self.cols(step, Role::Table);
                for c in columns(task, width, *everywhere) {
                    let x = fold([token, said(scale), self.content(step, Role::Table), c.into()]);
                    self.write(step, Role::Residual, c, x);
                    self.write(step, Role::Out, c, x);
                }
                Ok(())
            }
            Op::MatVec(m) => {
                // Columns of the slot, if each has its own. Parts that are dealt are here those of one slot after another.
                let table = table_of(self.s, grid).filter(|_| m.slots == 1).map(|(_, table)| table.cols);
                let dealt = table.filter(|_| self.s.program.rows > 1);
                let (each, devices) = (task.hi - task.lo, self.s.machine.devices.max(1));
                let shares = (grid.second.extent() / devices).max(1);
                let pitch = grid.operand(Role::X).map_or(0, |x| match dealt {
                    Some(_) if self.cols(step, Role::X) == m.k => 0,
                    Some(slots) => self.cols(step, Role::X) / slots,
                    None => x.cols.stride_j,
                });
                let begin = |j: u32, slots: u32| u64::from(slots * each) * u64::from(j) / u64::from(shares);
                for slot in 0..dealt.unwrap_or(1) {
                    let of = if dealt.is_some() { slot } else { task.j };
                    let units = match dealt {
                        Some(slots) => {
                            let (j, first) = (task.j % shares, u64::from(slot * each));
                            let within = |at: u64| (at.clamp(first, first + u64::from(each)) - first) as u32 + task.lo;
                            within(begin(j, slots))..within(begin(j + 1, slots))
                        }
                        None => task.lo..task.hi,
                    };
                    if units.is_empty() {
                        continue;
                    }
                    let first = if table.is_some() { of * pitch } else { 0 };
                    let x = match input.get(&first) {
                        Some(x) if !m.own_input => *x,
                        _ => self.digest(step, Role::X, first, m.k * m.slots)?,
                    };
                    input.insert(first, x);
                    self.matvec(step, m, x, of, units)?;
                }
                Ok(())
            }
            Op::Attention(a) => self.attention(step, a),
            Op::AttentionMerge { head_dim, splits, heads_per_task, gate } => {
                self.merge(step, *head_dim, *splits, *heads_per_task, *gate)
            }
            Op::NormAdd { norm, width, scale, everywhere } => {
                let norms =
                    [said(norm), said(scale), self.content(step, Role::NormWeight), self.content(step, Role::NormBias)];
                let x = mix(self.digest(step, Role::X, 0, *width)?, fold(norms));
                for c in columns(task, *width, *everywhere) {
                    let sum = fold([self.read(step, Role::Residual, c)?, x, c.into()]);
                    self.write(step, Role::Residual, c, sum);
                    self.write(step, Role::Out, c, sum);
                }
                Ok(())
            }
        }
    }

    fn select(&mut self, step: &Step) -> Result<(), Fault> {
        let follows = !self.launches && step.at > 0 && self.positions[step.at - 1] + 1 == step.position;
        let mut token = mix(u64::from(step.position), 1);
        if follows {
            // The best of all arg-max pairs, with any division of rows among them.
            token = 0;
            for c in 0..self.cols(step, Role::Best) {
                token = token.max(self.read(step, Role::Best, c)?);
            }
        }
        self.write(step, Role::Token, 0, token);
        Ok(())
    }

    /// The expert of each slot, and its share.
    fn route(&mut self, step: &Step, route: &Route) -> Result<(), Fault> {
        let scores = self.digest(step, Role::X, 0, route.experts)?;
        let all = fold([scores, said(route), self.content(step, Role::Bias)]);
        for slot in 0..route.top_k {
            self.write(step, Role::Out, slot, fold([all, slot.into(), 1]));
            self.write(step, Role::Shares, slot, fold([all, slot.into(), 2]));
        }
        Ok(())
    }

    /// What the experts of all slots made, each with its share.
    fn combine(&mut self, step: &Step, combine: &Combine) -> Result<(), Fault> {
        let Combine { width, slots, shared, scale, adds } = *combine;
        let mut shares: Vec<u64> = (0..slots).map(|s| self.read(step, Role::Shares, s)).collect::<Result<_, _>>()?;
        if let Some(by) = shared {
            let gate = step.grid.operand(Role::Gate).map(|_| self.read(step, Role::Gate, 0)).transpose()?;
            shares.push(mix(gate.map_or(1, |gate| mix(gate, 2)), said(&by)));
        }
        for c in columns(step.task, width, false) {
            let mut y = said(&scale);
            for (slot, share) in (0..).zip(&shares) {
                // The first input leads, and the others lie behind it.
                y = fold([y, *share, self.read(step, Role::X, slot * width + c)?]);
            }
            if adds {
                y = mix(self.read(step, Role::Residual, c)?, y);
                self.write(step, Role::Residual, c, y);
            }
            self.write(step, Role::Out, c, y);
        }
        Ok(())
    }

    /// Units of a product, with the part that slot `of` chose if there is a choice.
    fn matvec(&mut self, step: &Step, m: &MatVec, x: u64, of: u32, units: Range<u32>) -> Result<(), Fault> {
        let (lo, hi, j) = (units.start, units.end, step.task.j);
        let chosen = match table_of(self.s, step.grid) {
            Some(_) if m.slots == 1 => self.read(step, Role::Choices, of)?,
            Some(_) => {
                let all: Vec<u64> =
                    (0..m.slots).map(|slot| self.read(step, Role::Choices, slot)).collect::<Result<_, _>>()?;
                all.into_iter().fold(1, mix)
            }
            None => 0,
        };
        let share = step.grid.operand(Role::Shares).map(|_| self.read(step, Role::Shares, of)).transpose()?;
        let parts = [
            share.map_or(chosen, |share| mix(chosen, share)),
            x,
            said(&m.norm),
            said(&m.epilogue),
            self.content(step, Role::NormWeight),
            self.content(step, Role::NormBias),
            self.content(step, Role::Weight),
            self.content(step, Role::Bias),
        ];
        let x = fold(parts);
        let (each, rows) = columns_of(m);
        // A slot is whole units.
        let of_slot = table_of(self.s, step.grid).is_some() && m.slots == 1;
        let slot = if of_slot { of * rows.next_multiple_of(each) } else { 0 };
        let most = if of_slot { rows.next_multiple_of(each) } else { rows };
        let mut best = 0;
        for row in each * lo..(each * hi).min(most) {
            let y = mix(x, row.into());
            match m.epilogue {
                Epilogue::Residual { .. } => {
                    let sum = mix(self.read(step, Role::Residual, row)?, y);
                    self.write(step, Role::Residual, row, sum);
                    self.write(step, Role::Out, row, sum);
                }
                Epilogue::Logits { .. } => {
                    best = best.max(y);
                    self.output(step, Role::Logits, row, y);
                }
                Epilogue::Store
                | Epilogue::Scores
                | Epilogue::Act(_)
                | Epilogue::Gated(_)
                | Epilogue::GatedBy { .. }
                | Epilogue::Clamped(_) => self.write(step, Role::Out, slot + row, y),
            }
        }
        if matches!(m.epilogue, Epilogue::Logits { .. }) {
            self.write(step, Role::Best, 2 * j, best);
            self.write(step, Role::Best, 2 * j + 1, best);
        }
        Ok(())
    }

    /// Every value of the state depends on all of the head's inputs, and on what the position before left of it.
    fn mix(&mut self, step: &Step, op: &Mix) -> Result<(), Fault> {
        let (head, keys, values) = (step.task.lo, op.key_dim, op.value_dim);
        let key = head / (op.value_heads / op.key_heads);
        let of_state = keys * values + (op.kernel - 1) * (2 * keys + values);
        let constants = [Role::NormWeight, Role::Conv, Role::ALog, Role::DtBias].map(|role| self.content(step, role));
        let inputs = [
            self.digest(step, Role::Q, key * keys, keys)?,
            self.digest(step, Role::K, key * keys, keys)?,
            self.digest(step, Role::V, head * values, values)?,
            self.digest(step, Role::Gate, head * values, values)?,
            self.read(step, Role::Beta, head)?,
            self.read(step, Role::Decay, head)?,
            said(op),
        ];
        let x = fold(inputs.into_iter().chain(constants));
        self.update(step, x, head * of_state..(head + 1) * of_state, head * values..(head + 1) * values)
    }

    /// Brings columns of a state on by `x`, and leaves `out` of all of them.
    fn update(&mut self, step: &Step, x: u64, columns: Range<u32>, out: Range<u32>) -> Result<(), Fault> {
        let mut all = x;
        for c in columns {
            let old = if step.position == 0 { 0 } else { self.kept(step, c)? };
            let new = fold([old, x, c.into()]);
            all = mix(all, new);
            self.write(step, Role::State, c, new);
        }
        out.for_each(|c| self.write(step, Role::Out, c, fold([all, c.into()])));
        Ok(())
    }

    /// The same of each channel by itself.
    fn convolve(&mut self, step: &Step, op: &Convolve) -> Result<(), Fault> {
        for channel in 8 * step.task.lo..(8 * step.task.hi).min(op.channels) {
            let [x, b, c] = [Role::X, Role::B, Role::C].map(|role| self.read(step, role, channel));
            let constants = [Role::Conv, Role::Bias].map(|role| self.content(step, role));
            let x = fold([x?, b?, c?, said(op), channel.into()].into_iter().chain(constants));
            let past = op.kernel - 1;
            self.update(step, x, channel * past..(channel + 1) * past, channel..channel + 1)?;
        }
        Ok(())
    }

    fn scan(&mut self, step: &Step, op: &Scan) -> Result<(), Fault> {
        let (head, dim, width) = (step.task.lo, op.head_dim, op.state);
        let group = head / (op.heads / op.groups) * width;
        let of_state = dim * width + (op.kernel - 1) * (dim + 2 * width);
        let constants =
            [Role::Conv, Role::Bias, Role::ALog, Role::D, Role::DtBias].map(|role| self.content(step, role));
        let gate = if op.gate.is_some() { self.digest(step, Role::Gate, head * dim, dim)? } else { 0 };
        let inputs = [
            self.digest(step, Role::X, head * dim, dim)?,
            self.digest(step, Role::B, group, width)?,
            self.digest(step, Role::C, group, width)?,
            self.read(step, Role::Step, head)?,
            gate,
            said(op),
        ];
        let x = fold(inputs.into_iter().chain(constants));
        self.update(step, x, head * of_state..(head + 1) * of_state, head * dim..(head + 1) * dim)
    }

    fn group_norm(&mut self, step: &Step, op: &GroupNorm) -> Result<(), Fault> {
        let each = op.width / op.groups;
        let columns = step.task.lo * each..(step.task.lo + 1) * each;
        let gate = if op.gate.is_some() { self.digest(step, Role::Gate, columns.start, each)? } else { 0 };
        let x = self.digest(step, Role::X, columns.start, each)?;
        let x = fold([x, gate, said(op), self.content(step, Role::NormWeight)]);
        columns.for_each(|c| self.write(step, Role::Out, c, fold([x, c.into()])));
        Ok(())
    }

    /// Column `c` of a state, as the step before has left it on this SM.
    fn kept(&self, step: &Step, c: u32) -> Result<u64, Fault> {
        let Some((b, at)) = self.index(step, Role::State, c, 0) else { return Ok(0) };
        let cell = self.cells[b][at];
        if cell.at == step.position {
            return Ok(cell.value);
        }
        let kind = if cell.at == 0 { Kind::Unwritten } else { Kind::Stale };
        Err(step.fault(kind, format!("finds column {c} of its state as the step before has not left it")))
    }

    fn attention(&mut self, step: &Step, a: &Attention) -> Result<(), Fault> {
        let (i, j, dim, each) = (step.task.lo, step.task.j, a.head_dim, a.heads_per_task);
        let kv = i * each / a.group;
        let first = kv * pitch(self.s, a) as u32;
        let turned =
            [said(&(a.rotary, a.interleaved, a.norm_after_rope)), self.content(step, Role::Rope), step.position.into()];
        let turned = fold(turned);
        // The values of codes depend on their scales.
        let scales = self.content(step, Role::CacheScales);
        // Rows of the share, then the row of this position.
        let mut rows: Vec<u64> = vec![];
        let (start, end) = share(a.window, a.splits, step.position, step.position, j);
        for row in (0..step.at).filter(|&row| (start..end).contains(&self.positions[row])) {
            let mut both = [0; 2];
            for (role, both) in [Role::HistoryK, Role::HistoryV].into_iter().zip(&mut both) {
                let row = self.positions[row];
                *both = fold((0..dim).map(|d| self.cached(step, role, row, first + d)).collect::<Result<Vec<_>, _>>()?);
            }
            rows.push(fold([fold(both), scales]));
        }
        if j + 1 == a.splits {
            let whole = a.k_norm.is_some_and(|n| n.span == QkNormSpan::Projection);
            let all = if whole { self.digest(step, Role::K, 0, a.heads / a.group * dim)? } else { 0 };
            let norm = [said(&a.k_norm), self.content(step, Role::KNormWeight), all, turned];
            let k = mix(self.digest(step, Role::K, kv * dim, dim)?, fold(norm));
            let keys: Vec<u64> = (0..dim).map(|d| mix(k, d.into())).collect();
            let values: Result<Vec<u64>, Fault> = (0..dim).map(|d| self.read(step, Role::V, kv * dim + d)).collect();
            let values = values?;
            rows.push(fold([fold([fold(keys.iter().copied()), fold(values.iter().copied())]), scales]));
            if (i * each).is_multiple_of(a.group) {
                for d in 0..dim {
                    self.append(step, Role::AppendK, first + d, keys[d as usize]);
                    self.append(step, Role::AppendV, first + d, values[d as usize]);
                }
            }
        }
        let whole = a.q_norm.is_some_and(|n| n.span == QkNormSpan::Projection);
        let all = if whole { self.digest(step, Role::Q, 0, a.heads * dim)? } else { 0 };
        for h in 0..each {
            let head = i * each + h;
            let norm = [said(&a.q_norm), self.content(step, Role::QNormWeight), all, turned];
            let q = mix(self.digest(step, Role::Q, head * dim, dim)?, fold(norm));
            let q = fold([q, said(&a.scale), said(&a.softcap), said(&a.query_scale)]);
            let mut sum = rows.iter().fold(0u64, |sum, &row| sum.wrapping_add(mix(q, row)));
            if a.sinks && j + 1 == a.splits {
                sum = sum.wrapping_add(fold([self.content(step, Role::Sinks), head.into(), 1]));
            }
            if a.splits == 1 {
                for d in 0..dim {
                    self.head(step, a.gate, head * dim + d, fold([sum, d.into()]))?;
                }
                continue;
            }
            let place = (j * each + h) * (dim + 2);
            for c in 0..dim + 2 {
                let column = i * a.splits * each * (dim + 2) + place + c;
                self.write_marked(step, Role::Out, column, sum, place + c + 1);
            }
        }
        Ok(())
    }

    /// A column of a head that is done, times its gate.
    fn head(&mut self, step: &Step, gate: bool, column: u32, value: u64) -> Result<(), Fault> {
        let value = if gate { mix(value, self.read(step, Role::Gate, column)?) } else { value };
        self.write(step, Role::Out, column, value);
        Ok(())
    }

    fn merge(&mut self, step: &Step, dim: u32, splits: u32, each: u32, gate: bool) -> Result<(), Fault> {
        let (group, h) = (step.task.lo / each, step.task.lo % each);
        let mut sums = vec![0u64; dim as usize + 2];
        for j in 0..splits {
            let place = (j * each + h) * (dim + 2);
            for c in 0..dim + 2 {
                let column = group * splits * each * (dim + 2) + place + c;
                let cell = self.cell(step, Role::Partial, column)?;
                if cell.mark != place + c + 1 {
                    return Err(step.fault(Kind::Stale, "reads the record of another head or share".to_string()));
                }
                sums[c as usize] = sums[c as usize].wrapping_add(cell.value);
            }
        }
        for d in 0..dim {
            // Maximum, sum and the sums of all dimensions must come from the same rows.
            let sum = sums[d as usize + 2];
            let of_one = if sums[0] == sum && sums[1] == sum { sum } else { fold(sums.iter().copied()) };
            self.head(step, gate, step.task.lo * dim + d, fold([of_one, d.into()]))?;
        }
        Ok(())
    }

    /// The contents of an immutable operand as a number; 0 if it is absent.
    fn content(&self, step: &Step, role: Role) -> u64 {
        step.grid.operand(role).map_or(0, |o| mix(self.contents[o.buffer.index()], o.cols.base.into()))
    }

    fn cols(&self, step: &Step, role: Role) -> u32 {
        step.grid.operand(role).map_or(0, |o| self.s.program.buffers[o.buffer.index()].cols)
    }

    /// Index of column `c` of an operand in the cells of its buffer, in the step `back` before this one.
    fn index(&self, step: &Step, role: Role, c: u32, back: u32) -> Option<(usize, usize)> {
        let operand = step.grid.operand(role)?;
        let buffer = &self.s.program.buffers[operand.buffer.index()];
        let copy = match buffer.space {
            Space::Exchange => ((step.position - back) % buffer.phases) as usize,
            Space::Private | Space::State => step.sm,
            _ => 0,
        };
        Some((operand.buffer.index(), copy * buffer.cols as usize + (operand.cols.base + c) as usize))
    }

    fn cell(&self, step: &Step, role: Role, c: u32) -> Result<Cell, Fault> {
        let back = u32::from(role == Role::Best);
        let Some((b, at)) = self.index(step, role, c, back) else { return Ok(Cell::default()) };
        let cell = self.cells[b][at];
        if cell.at + back == step.position + 1 {
            return Ok(cell);
        }
        let kind = if cell.at == 0 { Kind::Unwritten } else { Kind::Stale };
        Err(step.fault(kind, format!("reads column {c} of its `{}`, written by no task of that step", role.name())))
    }

    fn read(&self, step: &Step, role: Role, c: u32) -> Result<u64, Fault> {
        self.cell(step, role, c).map(|cell| cell.value)
    }

    fn digest(&self, step: &Step, role: Role, from: u32, len: u32) -> Result<u64, Fault> {
        (from..from + len).try_fold(1, |hash, c| Ok(mix(hash, self.read(step, role, c)?)))
    }

    fn write(&mut self, step: &Step, role: Role, c: u32, value: u64) {
        self.write_marked(step, role, c, value, 0);
    }

    fn write_marked(&mut self, step: &Step, role: Role, c: u32, value: u64, mark: u32) {
        if let Some((b, at)) = self.index(step, role, c, 0) {
            self.cells[b][at] = Cell { value, at: step.position + 1, mark };
        }
    }

    fn output(&mut self, step: &Step, role: Role, c: u32, value: u64) {
        if let Some((b, at)) = self.index(step, role, c, 0) {
            self.outputs[b][at] = value;
        }
    }

    /// The place of column `c` of an operand in the cache row of a position.
    fn place(&self, step: &Step, role: Role, position: u32, c: u32) -> Option<u64> {
        let Op::Attention(a) = &step.grid.op else { return None };
        let operand = step.grid.operand(role)?;
        let (b, buffer) = (operand.buffer.index(), &self.s.program.buffers[operand.buffer.index()]);
        let row = match buffer.paging {
            Some(paging) => {
                let block = position / paging.rows;
                u64::from(
                    self.last_page.map_or(block, |last| last.saturating_sub(block)) * paging.rows
                        + position % paging.rows,
                )
            }
            None => position.into(),
        };
        // Heads lie one after the other, each with all rows.
        let (pitch, column) = (pitch(self.s, a), u64::from(operand.cols.base + c));
        let element = (column / pitch * u64::from(buffer.rows) + row) * pitch + column % pitch;
        let begin = self.s.placement[b].unwrap_or((b as u64) << 40);
        Some(begin + element * buffer.dtype.bytes() as u64)
    }

    fn cached(&self, step: &Step, role: Role, position: u32, c: u32) -> Result<u64, Fault> {
        let Some(place) = self.place(step, role, position, c) else { return Ok(0) };
        let Some(cell) = self.caches.get(&place) else {
            let what = format!("reads row {position} of its `{}`, which no task appended", role.name());
            return Err(step.fault(Kind::Unwritten, what));
        };
        if cell.mark != self.layout(step) {
            return Err(step.fault(Kind::Border, format!("reads a row of its `{}` in another layout", role.name())));
        }
        Ok(cell.value)
    }

    fn append(&mut self, step: &Step, role: Role, c: u32, value: u64) {
        if let Some(place) = self.place(step, role, step.position, c) {
            self.caches.insert(place, Cell { value, at: step.position + 1, mark: self.layout(step) });
        }
    }

    /// How the kernel of a task lays out rows of a cache.
    fn layout(&self, step: &Step) -> u32 {
        self.s.attention_variant(step.task.grid).map_or(0, |variant| u32::from(variant.swizzled))
    }
}

/// A task in a step.
struct Step<'a> {
    /// Index among the steps that are run.
    at: usize,
    position: u32,
    sm: usize,
    grid: &'a Grid,
    task: &'a Task,
}

impl Step<'_> {
    fn fault(&self, kind: Kind, what: String) -> Fault {
        let Task { grid, lo, hi, j, .. } = self.task;
        Fault::new(kind, format!("{grid}[{lo}..{hi}] j={j} at position {} {what}", self.position))
    }
}

/// Columns of a task of an op that adds up, of `width`.
fn columns(task: &Task, width: u32, everywhere: bool) -> std::ops::Range<u32> {
    if everywhere { 0..width } else { 8 * task.lo..(8 * task.hi).min(width) }
}
