//! Reads the queues of a proven schedule back, as a kernel reads them, and compares them with the schedule.
//!
//! Between the proof and the device are an encoder and 32-bit numbers. This judge decodes each entry and run in 64 bits, with its
//! own formulas, and looks for differences from the proven schedule: a place that wraps, a buffer that overlaps another
//! one, an op with other numbers.

use super::footprint::unit_bytes;
use monobloc::codegen::abi::{Entry, NONE, StreamRun, Tables};
use monobloc::dtype::DType;
use monobloc::format::Format;
use monobloc::ir::op::{Attention, MatVec, Op, Role};
use monobloc::ir::program::{Buffer, Grid, Operand, Rows, Space};
use monobloc::ir::schedule::{Regime, Schedule, SmemKind, Source, Task};
use std::collections::BTreeMap;

/// The first difference of an entry or a run.
pub fn disagreement(schedule: &Schedule, tables: &Tables) -> Option<String> {
    Reader { schedule, tables }.queues().err()
}

struct Reader<'a> {
    schedule: &'a Schedule,
    tables: &'a Tables,
}

type Said = Result<(), String>;

fn expect(holds: bool, what: impl FnOnce() -> String) -> Said {
    if holds { Ok(()) } else { Err(what()) }
}

/// Packets of one phase of an exchange buffer: two values of 16 bits or one of 32 in each, in pairs.
fn packets(buffer: &Buffer) -> u64 {
    let each = if buffer.dtype.bytes() == 2 { 2 } else { 1 };
    u64::from(buffer.cols).div_ceil(each).div_ceil(2) * 2
}

impl Reader<'_> {
    fn queues(&self) -> Said {
        let (sms, tables) = (self.schedule.machine.sms as usize, self.tables);
        let queues = self.schedule.regimes.len() * sms;
        expect(tables.entry_index.len() == queues + 1 && tables.run_index.len() == queues + 1, || {
            format!("{} queues have {} and {} beginnings", queues, tables.entry_index.len(), tables.run_index.len())
        })?;
        let mut ops: BTreeMap<u32, &Grid> = BTreeMap::new();
        for (r, regime) in self.schedule.regimes.iter().enumerate() {
            for sm in 0..sms {
                let queue = r * sms + sm;
                let range = |index: &[u32]| index[queue] as usize..index[queue + 1] as usize;
                let entries = tables.entries.get(range(&tables.entry_index)).unwrap_or_default();
                let here = |task: &dyn std::fmt::Display, what: String| format!("{task} of r{r} on sm{sm}: {what}");
                expect(entries.len() == regime.queues[sm].len(), || here(&"the queue", "another length".to_string()))?;
                let mut residuals = vec![];
                for (id, entry) in regime.queues[sm].iter().zip(entries) {
                    let task = &regime.tasks[id.index()];
                    let grid = &self.schedule.program.grids[task.grid.index()];
                    expect(entry.task == id.0, || here(id, format!("is called t{}", entry.task)))?;
                    self.entry(task, grid, entry).map_err(|what| here(id, what))?;
                    let ops_most = self.schedule.program.grids.len();
                    expect((entry.op as usize) < ops_most, || here(id, format!("is op {} of {ops_most}", entry.op)))?;
                    let first = *ops.entry(entry.op).or_insert(grid);
                    self.same_kernel(first, grid).map_err(|what| here(id, what))?;
                    match grid.operand(Role::Residual) {
                        Some(o) => {
                            let (lo, hi) = o.cols.range(task.lo, task.hi, task.j);
                            residuals.push((o.buffer, lo, hi, u64::from(entry.residual)));
                        }
                        None => self.in_place_of_residual(grid, entry.residual).map_err(|what| here(id, what))?,
                    }
                    // The input is read from the first value of the residual on, four at a time, so it must be the whole buffer from its first column.
                    if let (Op::MatVec(MatVec { k, own_input: true, .. }), Some(o)) = (&grid.op, grid.operand(Role::X))
                    {
                        let (lo, hi) = o.cols.range(task.lo, task.hi, task.j);
                        expect((lo, hi) == (0, u64::from(*k)), || here(id, format!("reads columns {lo}..{hi}")))?;
                        residuals.push((o.buffer, 0, hi.next_multiple_of(4), 0));
                    }
                }
                self.residuals(&residuals).map_err(|what| here(&"the residual", what))?;
                self.fill(regime, sm, queue)?;
                let runs = tables.runs.get(range(&tables.run_index)).unwrap_or_default();
                expect(runs.len() == regime.streams[sm].len(), || here(&"the stream", "another length".to_string()))?;
                for (said, run) in runs.iter().zip(&regime.streams[sm]) {
                    let task = &regime.tasks[run.task.index()];
                    let grid = &self.schedule.program.grids[task.grid.index()];
                    self.run(task, grid, run.source, said).map_err(|what| here(&run.task, what))?;
                }
            }
        }
        Ok(())
    }

    /// Checks the queue of a launch that only fills the cache: everything up to the last append of the step or the last state, and no task that waits for later ones.
    fn fill(&self, regime: &Regime, sm: usize, queue: usize) -> Said {
        let grids = &self.schedule.program.grids;
        let leaves = |grid: &Grid| matches!(grid.op, Op::Attention(_)) || grid.operand(Role::State).is_some();
        let last = grids.iter().rposition(leaves);
        let fills = |grid: usize| last.is_some_and(|last| grid <= last);
        let entries = regime.queues[sm].iter().filter(|id| fills(regime.tasks[id.index()].grid.index())).count();
        let runs = regime.streams[sm].iter().filter(|run| fills(regime.tasks[run.task.index()].grid.index())).count();
        let found = self.tables.fills.get(queue);
        expect(found == Some(&[entries as u32, runs as u32]), || {
            format!("queue {queue} fills the cache with {found:?}, expected {entries} entries and {runs} runs")
        })
    }

    fn entry(&self, task: &Task, grid: &Grid, entry: &Entry) -> Said {
        expect((entry.lo, entry.hi, entry.j) == (task.lo, task.hi, task.j), || "launches other indices".to_string())?;
        let exchange = |role| grid.operand(role).filter(|o| self.buffer(o).space == Space::Exchange);
        let (x, aux) = match grid.op {
            Op::Select => (exchange(Role::Best), None),
            Op::Route(_) | Op::Combine(_) => (exchange(Role::X), exchange(Role::Shares)),
            Op::Mix(_) => (exchange(Role::Q), exchange(Role::Beta)),
            // A product has the best of its rows, or what its slot counts.
            _ => (
                [Role::X, Role::Q, Role::Partial].into_iter().find_map(exchange),
                [Role::Best, Role::Shares].into_iter().find_map(exchange),
            ),
        };
        for (name, said, operand) in
            [("x", entry.x, x), ("out", entry.out, exchange(Role::Out)), ("aux", entry.aux_or_scales, aux)]
        {
            if name == "aux" && matches!(grid.op, Op::Attention(_)) {
                let place = grid.operand(Role::CacheScales).map(|o| self.place(o));
                units(said, place).map_err(|what| format!("`cache_scales` {what}"))?;
                continue;
            }
            self.exchange(said, operand, task, grid).map_err(|what| format!("`{name}` {what}"))?;
        }
        let constant = |roles: &[Role]| roles.iter().find_map(|&role| grid.operand(role));
        let of_table = [Role::Bias, Role::Rope, Role::Table];
        for (name, said, roles) in [
            ("norm_weight", entry.norm_weight, &[Role::NormWeight, Role::QNormWeight, Role::D][..]),
            ("norm_bias", entry.norm_bias, &[Role::NormBias, Role::KNormWeight, Role::ALog]),
            ("table", entry.table, if grid.operand(Role::Conv).is_some() { &[Role::Conv] } else { &of_table }),
        ] {
            let place = constant(roles).map(|o| self.place(o));
            units(said, place).map_err(|what| format!("`{name}` {what}"))?;
        }
        // Where a task finds its choice, or the sum the gate of a shared expert.
        match grid.op {
            Op::MatVec(_) => {
                let choices = exchange(Role::Choices);
                self.exchange(entry.k_cache, choices, task, grid).map_err(|what| format!("`choice` {what}"))?;
                let first = choices.map(|_| u32::from(self.deals_first(grid)));
                return match first {
                    Some(first) => expect(entry.v_cache == first, || format!("says {} of the choices", entry.v_cache)),
                    None => units(entry.v_cache, None).map_err(|what| format!("`v_cache` {what}")),
                };
            }
            Op::Combine(_) => {
                let gate = exchange(Role::Gate);
                self.exchange(entry.k_cache, gate, task, grid).map_err(|what| format!("`gate` {what}"))?;
                return units(entry.v_cache, None).map_err(|what| format!("`v_cache` {what}"));
            }
            _ => {}
        }
        // An op with a state has it in the place of a cache.
        let kept = match grid.operand(Role::State) {
            Some(_) => [Role::State, Role::DtBias],
            None => [Role::AppendK, Role::AppendV],
        };
        for (name, said, role) in [("k_cache", entry.k_cache, kept[0]), ("v_cache", entry.v_cache, kept[1])] {
            units(said, grid.operand(role).map(|o| self.place(o))).map_err(|what| format!("`{name}` {what}"))?;
        }
        Ok(())
    }

    /// What an entry of an op without a residual has in its place: the place of a constant, or packets of a gate.
    fn in_place_of_residual(&self, grid: &Grid, said: u32) -> Said {
        let role = match grid.op {
            Op::Convolve(_) | Op::Scan(_) => Role::Bias,
            Op::Attention(Attention { sinks: true, .. }) => Role::Sinks,
            Op::GroupNorm(_) | Op::AttentionMerge { gate: true, .. } => Role::Gate,
            _ => return expect(said == 0, || "has a residual".to_string()),
        };
        let place = grid.operand(role).map(|operand| self.place(operand));
        if role != Role::Gate {
            return units(said, place).map_err(|what| format!("`{}` {what}", role.name()));
        }
        let packet = place.map_or(u64::from(NONE), |place| place / 8);
        expect(u64::from(said) == packet, || format!("names packet {said} of a gate at {packet}"))
    }

    fn buffer(&self, operand: &Operand) -> &Buffer {
        &self.schedule.program.buffers[operand.buffer.index()]
    }

    fn place(&self, operand: &Operand) -> u64 {
        self.schedule.placement[operand.buffer.index()].unwrap_or(u64::MAX)
    }

    /// The packet with which an operand of a task begins. Entries of attention name the first of all rows; of words an entry names the
    /// first of all, because the kernel knows where columns and rows lie among them.
    fn packet(&self, operand: &Operand, task: &Task, grid: &Grid) -> u64 {
        let (first, buffer) = (self.place(operand) / 8, self.buffer(operand));
        if buffer.words || !matches!(grid.op, Op::MatVec(_) | Op::Route(_) | Op::Combine(_)) {
            return first;
        }
        let column = u64::from(operand.cols.base) + u64::from(operand.cols.stride_j) * u64::from(task.j);
        // Pairs of the head begin at its first.
        let column = if operand.role == Role::Best { 0 } else { column };
        let row = if operand.rows == Rows::Own { u64::from(task.row) } else { 0 };
        first + row * packets(buffer) + column / if buffer.dtype.bytes() == 2 { 2 } else { 1 }
    }

    /// A kernel adds packets to the place in 32 bits, rows and phases one after another.
    fn exchange(&self, said: u32, operand: Option<&Operand>, task: &Task, grid: &Grid) -> Said {
        let Some(operand) = operand else {
            return expect(said == NONE, || "names a place that no operand has".to_string());
        };
        let (place, buffer) = (self.place(operand), self.buffer(operand));
        let end = place / 8 + packets(buffer) * u64::from(buffer.phases);
        let packet = self.packet(operand, task, grid);
        expect(u64::from(said) == packet, || format!("names packet {said}, its columns begin at {packet}"))?;
        expect(end <= 1 << 32, || format!("ends at packet {end}, which wraps"))?;
        expect(end * 8 <= self.tables.exchange_bytes, || format!("ends at packet {end}, beyond the arena"))
    }

    /// All residuals of an SM must be one array of fp32 in shared memory, because a kernel has no names of buffers.
    fn residuals(&self, all: &[(monobloc::ir::BufferId, u64, u64, u64)]) -> Said {
        let Some(&(buffer, lo, _, at)) = all.first() else { return Ok(()) };
        let part = self.schedule.machine.smem.iter().find(|part| part.kind == SmemKind::Residual);
        let values = part.map_or(0, |part| u64::from(part.bytes) / 4);
        for &(other, from, to, said) in all {
            expect(other == buffer, || format!("of {other} lies over that of {buffer}"))?;
            expect(from + at == lo + said, || format!("of column {from} is value {said}, of {lo} it is {at}"))?;
            expect(said + (to - from) <= values, || format!("ends beyond its {values} values"))?;
        }
        Ok(())
    }

    /// Whether the choices of a grid are those of no grid before it, in a step of several rows.
    fn deals_first(&self, grid: &Grid) -> bool {
        let table = |grid: &Grid| grid.operand(Role::Weight).map(|weight| weight.rows);
        let before = self.schedule.program.grids.iter().take_while(|other| !std::ptr::eq(*other, grid));
        self.schedule.program.rows > 1 && before.into_iter().all(|other| table(other) != table(grid))
    }

    /// Entries with one op number run the same code. So everything that entries do not have must be constant among their grids.
    fn same_kernel(&self, a: &Grid, b: &Grid) -> Said {
        // A product over all slots of a choice has the code of one over as many inputs: its loader brings unit by unit what the slots chose.
        let slots = |grid: &Grid| match &grid.op {
            Op::MatVec(m) => m.slots,
            _ => 1,
        };
        let op = |grid: &Grid| match &grid.op {
            Op::MatVec(m) => Op::MatVec(through_slots(m)),
            other => other.clone(),
        };
        let parts = |grid: &Grid, o: &Operand| match o.rows {
            Rows::Lookup(table) if slots(grid) == 1 => self.schedule.program.tables[table.index()].bound,
            _ => 1,
        };
        let shape = |grid: &Grid| -> Vec<(Role, DType, Option<Format>, u32, u32, u32)> {
            let of = |o: &Operand| {
                let buffer = self.buffer(o);
                // An entry names the row of the table, and the place of all; how far columns go on is in the code.
                (o.role, buffer.dtype, buffer.coded, o.cols.len, o.cols.limit - o.cols.base, parts(grid, o))
            };
            grid.operands.iter().filter(|o| o.role != Role::Choices || slots(grid) == 1).map(of).collect()
        };
        // From the gate of one row to that of the next; and where gates begin, if an entry names their buffer alone.
        let several = self.schedule.program.rows > 1;
        let pitch = |grid: &Grid| {
            let first = |gate: &Operand| if matches!(grid.op, Op::GroupNorm(_)) { gate.cols.base } else { 0 };
            grid.operand(Role::Gate).map(|gate| (several.then(|| self.buffer(gate).cols), first(gate)))
        };
        expect(op(a) == op(b) && a.n == b.n && shape(a) == shape(b) && pitch(a) == pitch(b), || {
            format!("shares the code of `{}`, which is another op", a.name)
        })
    }

    fn run(&self, task: &Task, grid: &Grid, source: Source, said: &StreamRun) -> Said {
        match (source, &grid.op) {
            (Source::Units { .. }, Op::MatVec(m)) => {
                let Some(weight) = grid.operand(Role::Weight) else { return Err("has no matrix".to_string()) };
                let unit = unit_bytes(self.buffer(weight), m);
                let bytes = unit * u64::from(task.hi - task.lo) * u64::from(m.slots);
                // The code counts granules through all slots, so each slot ends with a whole one.
                let all = unit_bytes(self.buffer(weight), &through_slots(m));
                expect(all == unit * u64::from(m.slots), || format!("has slots of {unit} bytes in units of {all}"))?;
                let (begin, rest) = (self.place(weight) + u64::from(task.lo) * unit, u64::from(said.splits >> 16));
                expect(u64::from(said.head_j) * 256 + rest == begin && rest < 256, || {
                    format!("begins at {} * 256 + {rest}, not at byte {begin}", said.head_j)
                })?;
                expect(u64::from(said.bytes) == bytes, || format!("brings {} of {bytes} bytes", said.bytes))?;
                let (block, chunk) = (u64::from(said.k_cache), u64::from(said.v_cache));
                let slot = u64::from(self.schedule.machine.ring.slot_bytes);
                expect(chunk > 0 && chunk <= slot, || format!("chunks of {chunk} bytes in slots of {slot}"))?;
                expect(block > 0 && bytes.is_multiple_of(block), || format!("blocks of {block} bytes in {bytes}"))?;
                let Rows::Lookup(table) = weight.rows else {
                    return expect(said.window == 0, || "waits for a choice that it does not have".to_string());
                };
                // From part to part, and how many there are: a loader adds as many parts as the choice says.
                let Some(choice) = grid.operand(Role::Choices) else { return Err("has no choice".to_string()) };
                let packet = self.packet(choice, task, grid);
                expect(u64::from(said.window) == packet + 1, || format!("polls packet {}, not {packet}", said.window))?;
                let part = u64::from(grid.n) * unit;
                expect(u64::from(said.row_bytes) * 16 == part, || {
                    format!("has parts of {} * 16 bytes, not of {part}", said.row_bytes)
                })?;
                let bound = self.schedule.program.tables[table.index()].bound;
                let parts = (said.rows & 0xffff, said.rows >> 16);
                if m.slots > 1 {
                    let (slots, piece) = (said.splits & 0xffff, u64::from(parts.1) * 16);
                    return expect((slots, parts.0, piece) == (m.slots, bound, unit), || {
                        format!("has {slots} slots of {} parts in pieces of {piece} bytes", parts.0)
                    });
                }
                let (is_dealt, first) = (self.schedule.program.rows > 1, u32::from(self.deals_first(grid)));
                let share = if is_dealt { task.j | (first << 15) } else { 0 };
                expect(parts == (bound, share), || format!("has parts and share {parts:?}, not {bound}, {share}"))
            }
            (Source::History { rows }, Op::Attention(a)) => {
                expect(said.bytes == 0, || "is said to be weights".to_string())?;
                let head = u64::from(task.lo) * u64::from(a.heads_per_task) / u64::from(a.group);
                let (said_head, said_j) = (u64::from(said.head_j >> 16), said.head_j & 0xffff);
                expect((said_head, said_j) == (head, task.j), || format!("reads head {said_head}, share {said_j}"))?;
                expect((said.splits, said.rows) == (a.splits, rows), || "has other shares or chunks".to_string())?;
                expect(said.window == a.window.unwrap_or(0), || format!("has a window of {}", said.window))?;
                let Some(k) = grid.operand(Role::HistoryK) else { return Err("has no keys".to_string()) };
                let pitch = u64::from(k.cols.stride) * self.buffer(k).dtype.bytes() as u64;
                expect(u64::from(said.row_bytes) == pitch, || format!("has rows of {} bytes", said.row_bytes))?;
                // Head after head, each with a row for every position.
                let end = self.place(k) + (head + 1) * u64::from(self.schedule.program.context_max) * pitch;
                expect(end <= self.tables.cache_bytes, || format!("ends at byte {end}, beyond the arena"))?;
                units(said.k_cache, Some(self.place(k)))?;
                units(said.v_cache, grid.operand(Role::HistoryV).map(|v| self.place(v)))
            }
            _ => Err("streams what its op does not".to_string()),
        }
    }
}

/// A product over all slots of a choice as one of a single input that has all of them.
fn through_slots(m: &MatVec) -> MatVec {
    MatVec { k: m.k * m.slots, slots: 1, ..*m }
}

/// Places in units of 256 bytes.
fn units(said: u32, place: Option<u64>) -> Said {
    match place {
        None => expect(said == NONE || said == 0, || format!("names unit {said} of nothing")),
        Some(place) => expect(said != NONE && u64::from(said) * 256 == place, || {
            format!("names unit {said}, it is at byte {place}")
        }),
    }
}
