//! Group 7, CUDA targets: what `kernels/` takes for granted. The language can say more, and the interpreter runs more.
//!
//! Code generation prints and decides nothing, so whatever the kernels cannot do must be refused here. Each rule names the
//! place that relies on it; if that place learns to do more, the rule goes.

use std::collections::BTreeSet;

use super::memory::bytes;
use super::{Entity, Found, Rule, Witness, note};
use crate::dtype::DType;
use crate::format::Format;
use crate::ir::op::{Attention, Epilogue, HISTORY_ALIGN, Mix, Op, QkNormAttr, Role, Scan, UNIT_ROWS};
use crate::ir::program::{Grid, Home, Operand, Program, Space};
use crate::ir::schedule::{Mechanism, Schedule, Scope, SmemKind, Source};
use crate::ir::table::Holds;
use crate::ir::variant::{
    LANES, MatVecVariant, PassLimits, REDUCE_BATCH_MAX, RegisterTiling, Variant, granule_pairs, kernel_refuses,
    rows_pass_max, sum_width_max,
};
use crate::ir::{BufferId, EventId, GridId, SmId, TaskId};
use crate::model::graph::{NormKind, QkNormSpan};
use crate::target::{CopyMechanism, DotMechanism, Target, TargetKind};

/// Extents that queue entries and stream runs hold in 16 and 32 bits.
const SHARES_MAX: u32 = 1 << 16;
const RUN_BYTES_MAX: u64 = 1 << 31;
/// Rows of a tile of a tensor core's operand. If every warp has all rows of a step, there is one tile; if tensor cores multiply and each
/// warp has one tile of rows, there may be four.
const TILE_ROWS: u32 = 16;
const ROWS_MAX: u32 = 64;
/// Devices that a kernel stores packets to (context.cuh).
const DEVICES_MAX: u32 = 8;
/// Bytes of a queue entry in the `queue` part of shared memory, and entries of a window of a queue there.
const ENTRY_BYTES: u64 = 64;
const WINDOW: u64 = 64;
/// A span of words: bytes of one row (words.cuh).
const SPAN_BYTES: u32 = 64;
/// Bytes that 32 bits of 8-byte packets, and of 256-byte units, reach; the last unit is the word for none.
const EXCHANGE_BYTES_MAX: u64 = 8 << 32;
const UNITS_BYTES_MAX: u64 = (256 << 32) - 256;

pub(super) fn check(schedule: &Schedule, target: &Target, found: &mut Found) {
    if target.kind != TargetKind::Cuda {
        return;
    }
    let mut rules = Rules { found };
    rules.steps(schedule, target);
    if rules.found.any() {
        // The rest takes one row and one device for granted.
        return;
    }
    rules.program(&schedule.program, schedule.machine.consumer_warps);
    rules.variants(schedule, target);
    rules.regimes(schedule);
    rules.memory(schedule, target);
}

struct Rules<'a> {
    found: &'a mut Found,
}

impl Rules<'_> {
    fn expect(&mut self, holds: bool, at: Entity, message: impl FnOnce() -> String) {
        if !holds {
            self.found.add(Rule::Kernel, at, message);
        }
    }

    fn expect_with(&mut self, holds: bool, at: Entity, story: impl FnOnce() -> (String, Vec<Witness>)) {
        if !holds {
            self.found.add_with(Rule::Kernel, at, story);
        }
    }

    /// Rows, sequences and devices.
    fn steps(&mut self, schedule: &Schedule, target: &Target) {
        let program = &schedule.program;
        if program.rows > 1 {
            self.rows(schedule, target);
            self.residual(schedule);
        } else {
            self.one_row(schedule);
            self.paged(program);
        }
        self.copiers(schedule, target, program.rows > 1);
        self.devices(schedule);
    }

    /// context.cuh of rows: a block keeps as many columns of the residual of each row, from the lowest that it owns in any regime, and its memory has room for all rows.
    fn residual(&mut self, schedule: &Schedule) {
        let Schedule { program, machine, .. } = schedule;
        let (mut least, mut most) = (0, None);
        for (r, regime) in (0..).zip(&schedule.regimes) {
            for (sm, queue) in (0..).zip(&regime.queues) {
                let tasks = queue.iter().map(|id| &regime.tasks[id.index()]);
                let owned = tasks.filter_map(|task| {
                    let residual = program.grids[task.grid.index()].operand(Role::Residual)?;
                    Some(residual.cols.range(task.lo, task.hi, task.j))
                });
                let (lo, hi) = owned.fold((u64::MAX, 0), |(lo, hi), of| (lo.min(of.0), hi.max(of.1)));
                if hi.saturating_sub(lo) > least {
                    (least, most) = (hi - lo, Some(note(Entity::Sm(r, SmId(sm)), "owns the most columns")));
                }
            }
        }
        let found = u64::from(machine.residual_cols);
        let room = machine.smem.iter().find(|part| part.kind == SmemKind::Residual).map_or(0, |part| part.bytes);
        let fits = found.saturating_mul(u64::from(program.rows) * 4) <= room.into();
        if found < least || !fits {
            let witness = most.into_iter().collect();
            let message = format!(
                "expected `residual_cols` of {least} or more, for which {room} bytes of `residual` have room in {} rows, found {found}",
                program.rows
            );
            self.found.add_with(Rule::KernelRows, Entity::Machine, || (message, witness));
        }
    }

    /// context.cuh and sync.cuh: a kernel accesses all packets and words at one scope. On several devices each has all buffers, or its part of a
    /// matrix, and its own part of the SMs.
    fn devices(&mut self, schedule: &Schedule) {
        let Schedule { program, machine, .. } = schedule;
        let several = machine.devices > 1;
        self.expect_rule(Rule::KernelScope, machine.devices <= DEVICES_MAX, Entity::Machine, || {
            format!("expected at most {DEVICES_MAX} devices, found {}", machine.devices)
        });
        let home = |space| match space {
            Space::Weight if several => Home::Divided,
            space if several && space != Space::Private => Home::Everywhere,
            space => Home::of(space),
        };
        for (b, buffer) in (0..).zip(&program.buffers) {
            let expected = home(buffer.space);
            // A device may have a whole matrix.
            let whole = several && buffer.space == Space::Weight && buffer.home == Home::Everywhere;
            self.expect_rule(Rule::KernelScope, buffer.home == expected || whole, Entity::Buffer(BufferId(b)), || {
                format!("expected {expected:?}, the memory that kernels access, found {:?}", buffer.home)
            });
        }
        for (g, _) in (0..).zip(&program.grids).filter(|(_, grid)| several && matches!(grid.op, Op::Join { .. })) {
            self.expect_rule(Rule::KernelScope, false, Entity::Grid(GridId(g)), || {
                "expected one device of a draft, whose parameters say nothing of others".to_string()
            });
        }
        let expected = if several { Scope::System } else { Scope::Device };
        for (r, regime) in (0..).zip(&schedule.regimes) {
            for (e, event) in (0..).zip(&regime.events) {
                self.expect_rule(Rule::KernelScope, event.scope == expected, Entity::Event(r, EventId(e)), || {
                    let (expected, found) = (expected.name(), event.scope.name());
                    format!("expected scope `{expected}`, the scope of all accesses, found `{found}`")
                });
            }
        }
    }

    /// rows/ring.cuh: a thread of each of some warps of the loader copies in turn, into slots of its own. Other kernels, and other ways to copy,
    /// have no turns.
    fn copiers(&mut self, schedule: &Schedule, target: &Target, for_rows: bool) {
        let Schedule { machine, .. } = schedule;
        let (slots, copiers) = (machine.ring.slots, machine.ring.copiers);
        let turns = for_rows && target.spec.copy == CopyMechanism::Bulk;
        let most = if turns { machine.loader_warps } else { 1 };
        let own = (1..=most).contains(&copiers) && slots % copiers.max(1) == 0;
        self.expect_rule(Rule::KernelRows, own, Entity::Machine, || {
            format!("expected at most {most} threads that copy in turn, with as many of {slots} ring slots each, found {copiers}")
        });
    }

    /// rows/*.cuh: what batch kernels take for granted.
    fn rows(&mut self, schedule: &Schedule, target: &Target) {
        let Schedule { program, machine, regimes, .. } = schedule;
        let precision = program.precision;
        let tensor =
            target.spec.dot == DotMechanism::Mma && precision.weights == DType::Bf16 && precision.wire == DType::Bf16;
        let most = if tensor { ROWS_MAX } else { TILE_ROWS };
        self.expect_rule(Rule::KernelRows, program.rows <= most, Entity::Schedule, || {
            format!("expected steps of at most {most} rows, found {}", program.rows)
        });
        // matvec.cuh: a warp has a whole tile of rows, tiles have as many warps each, and codes have one.
        let (tiles, warps) = (program.rows.div_ceil(TILE_ROWS).max(1), machine.consumer_warps);
        let whole = tiles == 1 || program.rows == tiles * TILE_ROWS && warps.is_multiple_of(tiles);
        self.expect_rule(Rule::KernelRows, whole, Entity::Machine, || {
            format!("expected whole tiles of rows that {warps} warps share evenly, found {} rows", program.rows)
        });
        let mut matrices = program.buffers.iter().filter(|buffer| buffer.space == Space::Weight);
        let plain = matrices.all(|buffer| buffer.coded.is_none_or(Format::is_plain));
        self.expect_rule(Rule::KernelRows, tiles == 1 || plain, Entity::Schedule, || {
            format!("expected weights that are no codes in steps of {} rows, found codes", program.rows)
        });
        self.expect_rule(Rule::KernelRows, regimes.len() == 1, Entity::Schedule, || {
            format!("expected one regime of steps of several rows, found {}", regimes.len())
        });
        // matvec.cuh: a thread adds up columns of one row.
        let (threads, sums) = (machine.consumer_warps * 32, program.rows.next_multiple_of(8) * 4);
        self.expect_rule(
            Rule::KernelRows,
            threads % sums == 0 && machine.consumer_warps <= 32,
            Entity::Machine,
            || format!("expected a multiple of {sums} threads that execute tasks, found {threads}"),
        );
        for holds in [Holds::Sequences, Holds::Positions, Holds::Pages] {
            let tables = program.tables.iter().filter(|table| table.holds == holds).count();
            let all = program.tables.iter().filter(|table| table.holds != Holds::Choices).count();
            self.expect_rule(Rule::KernelRows, tables == 1 && all == 3, Entity::Schedule, || {
                format!("expected one table of {} and 3 in all, found {tables} and {}", holds.name(), all)
            });
        }
        for (b, buffer) in (0..).zip(&program.buffers) {
            let words = buffer.space == Space::Exchange && buffer.dtype != DType::I32 && !of_choice(b, program);
            self.expect_rule(Rule::KernelRows, buffer.words == words, Entity::Buffer(BufferId(b)), || {
                let travels = if words { "words" } else { "no words" };
                format!("expected {travels}, as the batch kernel has them")
            });
        }
        self.fills(schedule);
        self.deals(schedule);
        for (g, grid) in (0..).zip(&program.grids) {
            let taken = match &grid.op {
                Op::Attention(a) => a.splits == 1 && grid.per_row,
                Op::MatVec(m) => {
                    !m.own_input
                        && !grid.per_row
                        && grid.is_dealt() == grid.operand(Role::Choices).is_some()
                        && (!grid.is_dealt() || grid.second.extent() == schedule.machine.sms)
                        && m.slots == 1
                        && grid.operand(Role::Shares).is_none()
                }
                Op::Route(_) => grid.per_row,
                Op::Combine(_) => !grid.per_row,
                Op::Mix(_) | Op::Convolve(_) | Op::Scan(_) | Op::GroupNorm(_) => !grid.per_row,
                // No step of several rows is one of a draft.
                Op::AttentionMerge { .. } | Op::Join { .. } => false,
                Op::Select | Op::Report => !grid.per_row,
                Op::Embed { everywhere, .. } | Op::NormAdd { everywhere, .. } => !everywhere && !grid.per_row,
            };
            self.expect_rule(Rule::KernelRows, taken, Entity::Grid(GridId(g)), || {
                format!(
                    "the batch kernel has no such `{}`: expected no KV splits, own input or sums on every SM, \
                     tasks per row in attention alone, and experts dealt to all SMs",
                    grid.op.name()
                )
            });
            // matvec.cuh: slots of the input begin with spans of words.
            let span = SPAN_BYTES / precision.wire.bytes() as u32;
            let pitch = program.input_step(grid);
            self.expect_rule(Rule::KernelRows, pitch % span == 0, Entity::Grid(GridId(g)), || {
                format!("expected slots of a multiple of {span} columns, found {pitch}")
            });
            // ring.cuh: no chunk reaches beyond its page, and chunks begin where pages do.
            let Some(keys) = grid.operand(Role::HistoryK) else { continue };
            let page = program.buffers[keys.buffer.index()].paging.map_or(0, |paging| paging.rows);
            for run in regimes.iter().flat_map(|regime| regime.streams.iter().flatten().map(move |run| (regime, run))) {
                let Source::History { rows } = run.1.source else { continue };
                let whole = rows > 0 && page % rows == 0 && page % HISTORY_ALIGN == 0;
                self.expect_rule(
                    Rule::KernelRows,
                    whole || run.0.tasks[run.1.task.index()].grid != GridId(g),
                    Entity::Grid(GridId(g)),
                    || format!("expected pages of a multiple of {rows} rows, those of a chunk, found {page}"),
                );
            }
        }
    }

    /// deal.cuh: a block keeps the choices of one layer. It takes them before the first of its tasks to which parts are dealt, and keeps them
    /// until the first one of the next layer.
    fn deals(&mut self, schedule: &Schedule) {
        let program = &schedule.program;
        let table = |grid: GridId| program.grids[grid.index()].operand(Role::Weight).map(|weight| weight.rows);
        let first: Vec<bool> = (0..program.grids.len()).map(|g| program.deals_first(GridId::from(g))).collect();
        for (r, regime) in (0..).zip(&schedule.regimes) {
            for queue in &regime.queues {
                let mut kept = None;
                for &id in queue {
                    let grid = regime.tasks[id.index()].grid;
                    if !program.grids[grid.index()].is_dealt() {
                        continue;
                    }
                    if first[grid.index()] {
                        kept = table(grid);
                    }
                    self.expect_rule(Rule::KernelRows, kept == table(grid), Entity::Task(r, id), || {
                        "expected tasks to which parts are dealt layer by layer, in the order of the program"
                            .to_string()
                    });
                }
            }
        }
    }

    /// A launch that only fills the cache executes the beginning of each queue and stream, up to the last grid that appends or updates a state. What it
    /// executes is ordered as in a whole step, if it waits for nothing of the rest.
    fn fills(&mut self, schedule: &Schedule) {
        let last = schedule.program.last_append();
        for (r, regime) in (0..).zip(&schedule.regimes) {
            let fills = |id: TaskId| Some(regime.tasks[id.index()].grid) <= last;
            let queues = regime
                .queues
                .iter()
                .find_map(|queue| queue.windows(2).find(|pair| !fills(pair[0]) && fills(pair[1])).map(|pair| pair[1]));
            let streams = regime.streams.iter().find_map(|stream| {
                stream.windows(2).find(|pair| !fills(pair[0].task) && fills(pair[1].task)).map(|pair| pair[1].task)
            });
            let mut rest: BTreeSet<EventId> = BTreeSet::new();
            for (t, task) in (0..).zip(&regime.tasks) {
                if !fills(TaskId(t)) {
                    rest.extend(task.signals.iter().filter(|event| !regime.events[event.index()].carried));
                }
            }
            let waits = (0..).map(TaskId).zip(&regime.tasks).find_map(|(id, task)| {
                (fills(id) && task.waits.iter().any(|wait| rest.contains(&wait.event))).then_some(id)
            });
            let found = queues.or(streams).or(waits).map(|task| Entity::Task(r, task));
            self.expect_rule(Rule::KernelRows, found.is_none(), found.unwrap_or(Entity::Schedule), || {
                "expected tasks of grids up to the last one that appends to come first and to wait for no others"
                    .to_string()
            });
        }
    }

    /// kernel.cuh and context.cuh: what decode kernels take for granted.
    fn one_row(&mut self, schedule: &Schedule) {
        for (b, _) in (0..).zip(&schedule.program.buffers).filter(|(_, buffer)| buffer.words) {
            self.expect_rule(Rule::KernelRows, false, Entity::Buffer(BufferId(b)), || {
                "expected packets, as the decode kernel has them, found words".to_string()
            });
        }
        let moved = schedule.machine.loader_registers;
        self.expect_rule(Rule::KernelRows, moved == 0, Entity::Machine, || {
            format!("expected as many registers for each thread in steps of one row, found {moved} for the loader")
        });
    }

    /// A step of one row has the cache of one sequence, or the pages of a pool. Then the kernel knows one size of pages (context.cuh).
    fn paged(&mut self, program: &Program) {
        if program.tables.iter().all(|table| table.holds == Holds::Choices) {
            return;
        }
        for holds in [Holds::Sequences, Holds::Positions, Holds::Pages] {
            self.expect_rule(Rule::KernelRows, program.table(holds).is_some(), Entity::Schedule, || {
                format!("expected a table of {} beside the others, found none", holds.name())
            });
        }
        let page = program.buffers.iter().find_map(|buffer| buffer.paging).map_or(0, |paging| paging.rows);
        for (b, buffer) in (0..).zip(&program.buffers).filter(|(_, buffer)| buffer.space == Space::Cache) {
            let found = buffer.paging.map_or(0, |paging| paging.rows);
            self.expect_rule(Rule::KernelRows, found == page && page > 0, Entity::Buffer(BufferId(b)), || {
                format!("expected pages of {page} rows, as the other caches have them, found {found}")
            });
        }
    }

    fn expect_rule(&mut self, rule: Rule, holds: bool, at: Entity, message: impl FnOnce() -> String) {
        if !holds {
            self.found.add(rule, at, message);
        }
    }

    fn program(&mut self, program: &Program, warps: u32) {
        let mut heads = vec![];
        for (g, grid) in (0..).zip(&program.grids) {
            let at = Entity::Grid(GridId(g));
            self.places(at, grid, program);
            match &grid.op {
                Op::MatVec(m) => {
                    if matches!(m.epilogue, Epilogue::Logits { .. }) {
                        heads.push(at);
                    }
                    // matvec_formats.cuh.
                    let format = program.format_of(grid);
                    let refused = kernel_refuses(format, program.precision);
                    self.expect(refused.is_none(), at, || {
                        format!("expected a matrix with {}, found {format}", refused.unwrap_or_default())
                    });
                    // matvec.cuh: the lanes of a warp take whole granules of the input in turn.
                    let pairs = granule_pairs(m.parts(), program.format_of(grid), program.precision);
                    self.expect(pairs <= LANES, at, || {
                        let rows = m.unit_rows;
                        format!("expected units of more than {rows} rows: {pairs} pairs of packets are more than a warp has lanes")
                    });
                    // stage.cuh multiplies by the weights of every norm.
                    self.expect(m.norm.is_none() || grid.operand(Role::NormWeight).is_some(), at, || {
                        "expected weights for its norm, found none".to_string()
                    });
                    // stage.cuh reads packets once more for the variance.
                    self.expect(!m.own_input || m.norm.is_none_or(|n| n.kind == NormKind::Rms), at, || {
                        "expected packets as the input of a LayerNorm, found a residual".to_string()
                    });
                }
                Op::NormAdd { norm, width, everywhere, .. } => {
                    // norm_add.cuh.
                    let most = if *everywhere { sum_width_max(program.precision, warps) } else { u32::MAX };
                    self.expect(*width <= most, at, || {
                        format!("expected at most {most} values, which a block holds in registers, found {width}")
                    });
                    self.expect(grid.operand(Role::NormWeight).is_some(), at, || {
                        "expected weights for its norm, found none".to_string()
                    });
                    self.expect(norm.kind == NormKind::Rms && grid.operand(Role::NormBias).is_none(), at, || {
                        "expected an RMS norm without bias".to_string()
                    });
                }
                Op::Attention(a) => {
                    self.attention(at, grid, a);
                    // norm_add.cuh reads its own columns again while it publishes. So only a task that reads everything
                    // that it publishes knows that it has read. Every op but attention and its merge reads all columns.
                    self.made_by_matvec(at, grid.operand(Role::Q), "q, k and v", program);
                }
                Op::Route(route) => {
                    // route.cuh: a lane of one warp has a slot.
                    self.expect(route.top_k <= LANES, at, || {
                        format!("expected at most {LANES} slots of a row, found {}", route.top_k)
                    });
                }
                Op::Mix(mix) => {
                    self.mix(at, grid, mix);
                    self.made_by_matvec(at, grid.operand(Role::Q), "q, k, v and the gate", program);
                    self.made_by_matvec(at, grid.operand(Role::Beta), "beta and the decay", program);
                }
                Op::Convolve(convolve) => {
                    // convolve.cuh: b, c and x side by side in one buffer.
                    let n = convolve.channels;
                    self.side_by_side(at, grid, &[(Role::B, 0), (Role::C, n), (Role::X, 2 * n)]);
                    self.made_by_matvec(at, grid.operand(Role::X), "b, c and x", program);
                }
                Op::Scan(scan) => {
                    self.scan(at, grid, scan);
                    self.made_by_matvec(at, grid.operand(Role::X), "the inputs of Mamba-2", program);
                }
                // group_norm.cuh: a thread has the same columns of the input as of the output, so a group is read before it is published.
                Op::GroupNorm(_) => {
                    self.made_by_matvec(at, grid.operand(Role::X), "groups of columns", program);
                    self.made_by_matvec(at, grid.operand(Role::Gate), "the gate", program);
                }
                Op::Combine(combine) => {
                    // combine.cuh: a lane of a warp has the share of an input, and a thread one packet of each.
                    self.expect(combine.width.is_multiple_of(UNIT_ROWS), at, || {
                        format!("expected a sum of whole units of {UNIT_ROWS} columns, found {}", combine.width)
                    });
                    // It counts on from the first of the buffer; words lie as the buffer's columns say.
                    let x = grid.operand(Role::X);
                    let cols = x.map(|x| program.buffers[x.buffer.index()].cols);
                    let all = combine.width.saturating_mul(combine.inputs());
                    self.expect(x.is_some_and(|x| x.cols.base == 0) && cols == Some(all), at, || {
                        format!("expected inputs that are the {all} columns of their buffer, found others")
                    });
                    self.expect(combine.inputs() <= LANES, at, || {
                        format!("expected at most {LANES} inputs, found {}", combine.inputs())
                    });
                }
                Op::AttentionMerge { .. } => self.made_by_matvec(at, grid.operand(Role::Gate), "the gate", program),
                // join.cuh: a launch has a row of what is given for each step, and no page table.
                Op::Join { .. } => {
                    let alone = program.rows == 1 && program.tables.iter().all(|table| table.holds == Holds::Choices);
                    self.expect(alone, at, || {
                        "expected a draft of one text at a time, found tables of several sequences".to_string()
                    });
                }
                Op::Select | Op::Report | Op::Embed { .. } => {}
            }
        }
        // stage.cuh: what is read from shared memory is the residual.
        let residual = program.grids.iter().find_map(|grid| grid.operand(Role::Residual));
        for (g, grid) in (0..).zip(&program.grids) {
            let own = grid.operand(Role::X).filter(|_| matches!(&grid.op, Op::MatVec(m) if m.own_input));
            let other = own.filter(|own| residual.is_none_or(|residual| residual.buffer != own.buffer));
            self.expect_with(other.is_none(), Entity::Grid(GridId(g)), || {
                let buffers = [own, residual].into_iter().flatten();
                let witness = buffers.map(|o| note(Entity::Buffer(o.buffer), format!("is `{}`", o.role.name())));
                ("expected the residual as its own input, found another buffer".to_string(), witness.collect())
            });
        }
        // matvec.cuh, norm_add.cuh: no barrier lies between the sums of owners and the reads of an own input.
        let owner = (0..)
            .zip(&program.grids)
            .find(|(_, grid)| grid.operand(Role::Residual).is_some() && !grid.op.everywhere())
            .map(|(g, _)| note(Entity::Grid(GridId(g)), "is done by owners of columns"));
        for (g, grid) in (0..).zip(&program.grids) {
            let own = matches!(&grid.op, Op::MatVec(m) if m.own_input);
            self.expect_with(!own || owner.is_none(), Entity::Grid(GridId(g)), || {
                let message = "expected sums made by every SM as its own input, found sums of owners".to_string();
                (message, owner.iter().cloned().collect())
            });
        }
        // context.cuh: a block has one residual, from the lowest column that it owns, whatever its buffer is called.
        let residuals = (0..).zip(&program.grids).filter_map(|(g, grid)| Some((grid.operand(Role::Residual)?, g)));
        let mut residuals: Vec<_> = residuals.map(|(o, g)| (o.buffer, Entity::Grid(GridId(g)))).collect();
        residuals.dedup_by_key(|(buffer, _)| *buffer);
        let other = residuals.iter().find(|(buffer, _)| Some(*buffer) != residuals.first().map(|first| first.0));
        self.expect_with(other.is_none(), other.map_or(Entity::Schedule, |(_, at)| *at), || {
            let buffers = [residuals.first(), other].into_iter().flatten();
            let witness = buffers.map(|(buffer, _)| note(Entity::Buffer(*buffer), "is a residual")).collect();
            ("expected one buffer of residuals, found another".to_string(), witness)
        });
        // select.cuh: the host counts tokens by one word, which block 0 writes.
        let reports: Vec<Entity> = (0..)
            .zip(&program.grids)
            .filter(|(_, grid)| matches!(grid.op, Op::Report))
            .map(|(g, _)| Entity::Grid(GridId(g)))
            .collect();
        self.expect_with(reports.len() <= 1, reports.get(1).copied().unwrap_or(Entity::Schedule), || {
            let witness = reports.iter().map(|&at| note(at, "reports")).collect();
            (format!("expected one report, found {}", reports.len()), witness)
        });
        // select.cuh reads as many arg-max pairs as the first head has tasks.
        self.expect_with(heads.len() == 1, Entity::Schedule, || {
            let heads: Vec<Witness> = heads.iter().map(|&at| note(at, "makes logits")).collect();
            (format!("expected one head, found {}", heads.len()), heads)
        });
    }

    /// matvec.cuh and attention_tensor.cuh: what is held in registers, and who shares a head.
    fn variants(&mut self, schedule: &Schedule, target: &Target) {
        let Schedule { program, machine, .. } = schedule;
        let sums = machine.reduce_batch;
        self.expect((1..=REDUCE_BATCH_MAX).contains(&sums), Entity::Machine, || {
            format!("expected 1 to {REDUCE_BATCH_MAX} units of a reduction, found {sums}")
        });
        for (g, grid) in (0..).zip(&program.grids) {
            let at = Entity::Grid(GridId(g));
            match (&grid.op, schedule.variants.get(&GridId(g))) {
                (Op::MatVec(m), Some(Variant::MatVec(variant))) => {
                    let MatVecVariant { units, chunk, units_per_warp, poll_batch, pass, .. } = *variant;
                    if program.rows > 1 {
                        let limits = PassLimits {
                            tensor_cores: target.spec.dot == DotMechanism::Mma,
                            parts: m.parts(),
                            rows: program.rows,
                            units,
                            block: chunk,
                            moved: machine.loader_registers > 0,
                        };
                        let most = rows_pass_max(program.format_of(grid), program.precision, limits);
                        self.expect(pass > 0 && pass <= most, at, || {
                            format!("expected a `pass` of 1 to {most} units, whose sums a lane holds, found {pass}")
                        });
                        continue;
                    }
                    self.expect(pass == 0, at, || format!("expected no `pass` in steps of one row, found {pass}"));
                    let tiling =
                        RegisterTiling::of(m, machine, program.precision, program.format_of(grid), units, chunk);
                    for (name, found, refused) in [
                        ("units_per_warp", units_per_warp, tiling.refuses_units_per_warp(units_per_warp)),
                        ("poll_batch", poll_batch, tiling.refuses_poll_batch(poll_batch)),
                    ] {
                        self.expect(refused.is_none(), at, || {
                            format!("expected `{name}` to be {}; found {found}", refused.unwrap_or_default())
                        });
                    }
                }
                (Op::Attention(a), Some(Variant::Attention(variant))) => {
                    let tensor_cores = target.spec.dot == DotMechanism::Mma;
                    let refused = a.refuses_variant(variant, program.precision, tensor_cores, machine.consumer_warps);
                    self.expect(refused.is_none(), at, || {
                        format!("expected `warps_per_head` to be {}", refused.unwrap_or_default())
                    });
                }
                _ => {}
            }
        }
    }

    /// A queue entry holds the place of a buffer and no column: operands begin at its column 0 and take all of it. Only
    /// q, k, v and gates share a buffer, one after another; that of a net has beta and the decay, too.
    fn places(&mut self, at: Entity, grid: &Grid, program: &Program) {
        for operand in &grid.operands {
            let buffer = &program.buffers[operand.buffer.index()];
            let (base, limit) = (operand.cols.base, operand.cols.limit);
            let role = operand.role.name();
            match (buffer.space, operand.role) {
                // Entries have the place of a slot (abi.rs).
                (Space::Exchange, Role::Q | Role::K | Role::V | Role::Gate | Role::Beta | Role::Decay) => {}
                (Space::Exchange, Role::B | Role::C | Role::Step) => {}
                (Space::Exchange, Role::X) if matches!(grid.op, Op::Convolve(_) | Op::Scan(_)) => {}
                // Inputs of a sum are judged with it.
                (Space::Exchange, Role::X) if matches!(grid.op, Op::Combine(_)) => {}
                (Space::Exchange, Role::X | Role::Choices | Role::Out) if beside_others(grid, operand) => {}
                (Space::Exchange, _) => {
                    self.expect_with(base == 0 && limit == buffer.cols, at, || {
                        let message =
                            format!("expected `{role}` to be all columns of its buffer, found {base}..{limit}");
                        (message, vec![note(Entity::Buffer(operand.buffer), format!("has {}", buffer.cols))])
                    });
                }
                (Space::Cache, _) => {
                    self.expect_with(base == 0, at, || {
                        let message = format!("expected `{role}` from column 0 on, found {base}");
                        (message, vec![note(Entity::Buffer(operand.buffer), "is the cache")])
                    });
                }
                _ => {}
            }
            // select.cuh and matvec.cuh have a copy of arg-max pairs for even and odd steps, as words have; nothing else has copies.
            let phases = if operand.role == Role::Best || buffer.words { 2 } else { 1 };
            self.expect_with(buffer.phases == phases, at, || {
                let message = format!("expected {phases} phases of `{role}`, found {}", buffer.phases);
                (message, vec![note(Entity::Buffer(operand.buffer), "has them")])
            });
        }
    }

    /// mix.cuh: q, k, v and the gate side by side in one buffer; beta and the decay in one buffer.
    fn mix(&mut self, at: Entity, grid: &Grid, mix: &Mix) {
        let place = |role| grid.operand(role).map(|o| (o.buffer, o.cols.base));
        let x = place(Role::Q).map(|q| q.0);
        let (keys, values) = (mix.key_heads * mix.key_dim, mix.value_heads * mix.value_dim);
        let follows = [(Role::Q, 0), (Role::K, keys), (Role::V, 2 * keys), (Role::Gate, 2 * keys + values)];
        self.expect(follows.into_iter().all(|(role, base)| place(role) == x.map(|x| (x, base))), at, || {
            "expected q, k, v and the gate one after another from column 0 of one buffer".to_string()
        });
        let [beta, decay] = [Role::Beta, Role::Decay].map(|role| place(role).map(|place| place.0));
        self.expect(beta == decay, at, || "expected `beta` and `decay` in one buffer".to_string());
    }

    /// scan.cuh: the gate, x, b, c and the steps side by side in one buffer, the gate also if another op reads it.
    fn scan(&mut self, at: Entity, grid: &Grid, scan: &Scan) {
        let (inner, grouped) = (scan.heads * scan.head_dim, scan.groups * scan.state);
        let first = [(Role::X, inner), (Role::B, 2 * inner), (Role::C, 2 * inner + grouped)];
        let mut all = vec![(Role::Step, 2 * inner + 2 * grouped)];
        all.extend(scan.gate.map(|_| (Role::Gate, 0)));
        all.extend(first);
        self.side_by_side(at, grid, &all);
    }

    /// Operands begin at these columns of one buffer, of which an entry has the place.
    fn side_by_side(&mut self, at: Entity, grid: &Grid, places: &[(Role, u32)]) {
        let place = |role| grid.operand(role).map(|o| (o.buffer, o.cols.base));
        let x = place(Role::X).map(|x| x.0);
        let lies = |&(role, base): &(Role, u32)| place(role) == x.map(|x| (x, base));
        if let Some((role, base)) = places.iter().find(|of| !lies(of)) {
            self.expect(false, at, || format!("expected `{}` from column {base} of the buffer of `x`", role.name()));
        }
    }

    /// What an op reads in part comes from a `matvec`.
    fn made_by_matvec(&mut self, at: Entity, read: Option<&Operand>, what: &str, program: &Program) {
        let Some(read) = read.map(|operand| operand.buffer) else { return };
        let sum = (0..).zip(&program.grids).find(|(_, grid)| {
            matches!(grid.op, Op::NormAdd { .. }) && grid.operand(Role::Out).map(|o| o.buffer) == Some(read)
        });
        self.expect_with(sum.is_none(), at, || {
            let writes = sum.map(|(g, _)| note(Entity::Grid(GridId(g)), "writes them"));
            let message = format!("expected {what} from a `matvec`, found a `norm_add`");
            (message, writes.into_iter().collect())
        });
    }

    /// attention.cuh.
    fn attention(&mut self, at: Entity, grid: &Grid, a: &Attention) {
        let (q_cols, kv_cols) = (a.heads * a.head_dim, a.kv_heads() * a.head_dim);
        let place = |role| grid.operand(role).map(|o| (o.buffer, o.cols.base));
        let q = place(Role::Q).map(|q| q.0);
        let follows = [(Role::Q, 0), (Role::K, q_cols), (Role::V, q_cols + kv_cols)];
        self.expect(follows.into_iter().all(|(role, base)| place(role) == q.map(|q| (q, base))), at, || {
            "expected q, k and v one after another from column 0 of one buffer".to_string()
        });
        let gate = place(Role::Gate);
        self.expect(gate.is_none() || gate == q.map(|q| (q, q_cols + 2 * kv_cols)), at, || {
            "expected the gate right after v in the buffer of q, k and v".to_string()
        });
        for (norm, role) in [(&a.q_norm, Role::QNormWeight), (&a.k_norm, Role::KNormWeight)] {
            let Some(QkNormAttr { norm, span }) = norm else { continue };
            let kind = if *span == QkNormSpan::OwnGains { NormKind::Layer } else { NormKind::Rms };
            self.expect(norm.kind == kind && grid.operand(role).is_some(), at, || {
                let kind = if kind == NormKind::Layer { "a LayerNorm" } else { "an RMS norm" };
                format!("expected {kind} with gains for `{}`", role.name())
            });
        }
        self.expect(a.splits < SHARES_MAX && a.kv_heads() < SHARES_MAX, at, || {
            let (splits, kv_heads) = (a.splits, a.kv_heads());
            format!("expected fewer than {SHARES_MAX} shares and KV heads, found {splits} and {kv_heads}")
        });
    }

    fn regimes(&mut self, schedule: &Schedule) {
        let program = &schedule.program;
        // kernel.cuh and ring.cuh compare the position with one bound.
        let for_rows = program.buffers.iter().any(|buffer| buffer.words);
        let best: Vec<BufferId> =
            program.grids.iter().filter_map(|grid| Some(grid.operand(Role::Best)?.buffer)).collect();
        let regimes = schedule.regimes.len();
        self.expect(regimes <= 2, Entity::Schedule, || format!("expected at most 2 regimes, found {regimes}"));
        for (r, regime) in (0..).zip(&schedule.regimes) {
            for (e, event) in (0..).zip(&regime.events) {
                // sync.cuh fences once a step, around the arg-max pairs. join.cuh polls what the step before left.
                let mechanism = match event.carried {
                    true if best.contains(&event.buffer) => Mechanism::Fenced,
                    false if program.buffers[event.buffer.index()].words => Mechanism::Words,
                    _ => Mechanism::Packets,
                };
                self.expect(event.mechanism == mechanism, Entity::Event(r, EventId(e)), || {
                    let (expected, found) = (mechanism.name(), event.mechanism.name());
                    format!("expected `{expected}`, the only mechanism of such events, found `{found}`")
                });
            }
            for (s, queue) in (0..).zip(&regime.queues) {
                let at = Entity::Sm(r, SmId(s));
                // The SM that stops reports the token by the entry after its `select`.
                let second = queue.get(1).map(|t| &program.grids[regime.tasks[t.index()].grid.index()].op);
                self.expect(s != 0 || matches!(second, Some(Op::Report)), at, || {
                    "expected `report` after `select` in its queue".to_string()
                });
            }
            for run in regime.streams.iter().flatten() {
                let at = Entity::Task(r, run.task);
                let grid = &program.grids[regime.tasks[run.task.index()].grid.index()];
                match (run.source, &grid.op) {
                    (Source::Units { lo, hi, .. }, Op::MatVec(m)) => {
                        let bytes = u64::from(hi - lo).saturating_mul(m.streamed_bytes(program.format_of(grid)));
                        self.expect(bytes < RUN_BYTES_MAX, at, || {
                            format!("expected fewer than {RUN_BYTES_MAX} bytes of weights a task, found {bytes}")
                        });
                    }
                    (Source::History { rows }, Op::Attention(_)) => {
                        // The consumers know the rows of a chunk when they are compiled: as many as a slot holds; in a kernel for
                        // rows, as many of these as divide a page.
                        let pitch = grid.operand(Role::HistoryK).map_or(1, |o| u64::from(o.cols.stride.max(1)));
                        let row_bytes = pitch * program.precision.cache.bytes() as u64;
                        let align = u64::from(HISTORY_ALIGN);
                        let held = u64::from(schedule.machine.ring.slot_bytes) / row_bytes / align * align;
                        let keys = grid.operand(Role::HistoryK).map(|o| &program.buffers[o.buffer.index()]);
                        let page = keys.and_then(|keys| keys.paging).map(|paging| u64::from(paging.rows));
                        let (expected, why) = match page.filter(|_| for_rows) {
                            Some(page) => (
                                (1..=held / align).map(|n| n * align).filter(|n| page % n == 0).max().unwrap_or(held),
                                ", and a whole number of chunks in a page",
                            ),
                            None => (held, ""),
                        };
                        self.expect(u64::from(rows) == expected, at, || {
                            format!("expected {expected} rows a chunk, as many as a slot holds{why}, found {rows}")
                        });
                    }
                    // `streams` says what is wrong with it.
                    _ => {}
                }
            }
        }
    }

    fn memory(&mut self, schedule: &Schedule, target: &Target) {
        // kernel.cuh: a block keeps its queue in shared memory, or a window of it if it copies the rest while it works.
        let numbered = |(r, queues): (u32, &Vec<Vec<TaskId>>)| -> Vec<(u64, Entity)> {
            (0..).zip(queues).map(|(s, queue)| (queue.len() as u64, Entity::Sm(r, SmId(s)))).collect()
        };
        let queues = (0..).zip(schedule.regimes.iter().map(|regime| &regime.queues)).flat_map(numbered);
        let longest = queues.max_by_key(|(length, _)| *length);
        let queue = schedule.smem(SmemKind::Queue).map_or(0, |p| u64::from(p.bytes));
        let needs = longest.map_or(0, |(length, _)| length * ENTRY_BYTES);
        let windowed = target.spec.copy != CopyMechanism::Plain && queue == WINDOW * ENTRY_BYTES;
        self.expect_with(queue >= needs || windowed, Entity::Machine, || {
            let tasks = longest.map_or(0, |(length, _)| length);
            let message = format!("expected a part `queue` of {needs} bytes, for {tasks} tasks, found {queue}");
            (message, longest.map(|(_, at)| note(at, "has the longest queue")).into_iter().collect())
        });
        let smem = &schedule.machine.smem;
        let part = |kind: SmemKind| (0..).zip(smem).find(|(_, part)| part.kind == kind);
        // ring.cuh: slot `i` is at `i * slot_bytes`.
        if let Some((i, ring)) = part(SmemKind::Ring) {
            self.expect(ring.offset == 0, Entity::SmemPart(i), || {
                format!("expected `ring` at 0, found {}", ring.offset)
            });
        }
        // context.cuh: an op that stages nothing uses both as one.
        if let (Some((_, stage)), Some((i, reduce))) = (part(SmemKind::Stage), part(SmemKind::Reduce)) {
            let end = u64::from(stage.offset) + u64::from(stage.bytes);
            self.expect(u64::from(reduce.offset) == end, Entity::SmemPart(i), || {
                format!("expected `reduce` right after `stage`, at {end}, found {}", reduce.offset)
            });
        }
        // sampling.cuh: the best logit of each task of the head, sums of each warp, two words, and one id at least.
        let tasks = schedule.program.grids.iter().filter(|grid| grid.operand(Role::Logits).is_some());
        let tasks = u64::from(tasks.map(|grid| grid.second.extent()).max().unwrap_or(0));
        let sampling = (tasks * 4).next_multiple_of(16) + u64::from(schedule.machine.consumer_warps) * 56 + 16 + 8;
        let both = [SmemKind::Stage, SmemKind::Reduce].into_iter().filter_map(part);
        let scratch: u64 = both.map(|(_, part)| u64::from(part.bytes)).sum();
        self.expect(scratch >= sampling, Entity::Machine, || {
            format!("expected {sampling} bytes of `stage` and `reduce`, where a token is drawn, found {scratch}")
        });
        // Entries add columns to places in 32 bits: what begins in reach must end in reach.
        let places = schedule.program.buffers.iter().zip(&schedule.placement).enumerate();
        for (b, (buffer, place)) in places {
            let (most, place) = match (buffer.space, *place) {
                (Space::Exchange, Some(place)) => (EXCHANGE_BYTES_MAX, place),
                (Space::Cache | Space::State | Space::Constant, Some(place)) => (UNITS_BYTES_MAX, place),
                _ => continue,
            };
            let end = place.saturating_add(bytes(buffer));
            self.expect(end <= most, Entity::Buffer(b.into()), || {
                format!("expected a place that ends at {most} or before, found {place}..{end}")
            });
        }
    }
}

/// Whether an exchange has scores or shares of experts: these travel as packets in every kernel.
fn of_choice(b: u32, program: &Program) -> bool {
    let touches = |operand: &Operand| operand.buffer.index() == b as usize;
    program.grids.iter().filter(|grid| matches!(grid.op, Op::Route(_))).any(|grid| grid.operands.iter().any(touches))
}

/// Whether an operand may begin within its buffer: of slots and of a shared expert, which end with whole packets and need no padding, and
/// the scores of a router.
fn beside_others(grid: &Grid, operand: &Operand) -> bool {
    let whole = [operand.cols.base, operand.cols.stride_j].iter().all(|at| at.is_multiple_of(UNIT_ROWS / 2));
    match &grid.op {
        Op::MatVec(_) if matches!(operand.role, Role::Choices | Role::Shares) => true,
        Op::MatVec(_) => whole && (operand.role == Role::Out || grid.operand(Role::Choices).is_some()),
        // The gate of a shared expert follows the scores, which are polled in pairs.
        Op::Route(_) => whole && operand.role == Role::X,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::schedule::Regime;

    /// What one of the rules finds, where it finds it.
    fn found_by(rule: impl Fn(&mut Rules<'_>, &Schedule), schedule: &Schedule) -> Vec<Entity> {
        let mut found = Found::default();
        rule(&mut Rules { found: &mut found }, schedule);
        found.list.iter().map(|violation| violation.entity).collect()
    }

    /// A schedule that breaks this rule today waits for itself, too.
    #[test]
    fn a_block_has_choices_before_it_deals() {
        let text = include_str!("../../tests/filetests/validate/proven-looked-up-rows.mkir");
        let mut schedule = crate::ir::parse::parse(text).unwrap();
        let found = |schedule: &Schedule| found_by(|rules, schedule| rules.deals(schedule), schedule);
        assert_eq!(found(&schedule), []);
        let Regime { tasks, queues, .. } = &mut schedule.regimes[0];
        let dealt = |task: &TaskId| schedule.program.grids[tasks[task.index()].grid.index()].is_dealt();
        let all: Vec<usize> = (0..queues[0].len()).filter(|at| dealt(&queues[0][*at])).collect();
        queues[0].swap(all[0], all[1]);
        let early = queues[0][all[0]];
        assert_eq!(found(&schedule), [Entity::Task(0, early)]);
    }

    /// Every schedule that breaks this rule today breaks others, too, which are looked at before it.
    #[test]
    fn a_task_that_is_left_out_before_one_that_fills_the_cache_is_refused() {
        let text = include_str!("../../tests/filetests/validate/proven-two-rows.mkir");
        let mut schedule = crate::ir::parse::parse(text).unwrap();
        let found = |schedule: &Schedule| found_by(|rules, schedule| rules.fills(schedule), schedule);
        assert_eq!(found(&schedule), []);
        let last = schedule.program.last_append();
        let Regime { tasks, queues, .. } = &mut schedule.regimes[0];
        let fills = |task: TaskId| Some(tasks[task.index()].grid) <= last;
        let (queue, at) = queues
            .iter_mut()
            .find_map(|queue| queue.iter().position(|task| !fills(*task)).filter(|at| *at > 0).map(|at| (queue, at)))
            .expect("an SM that fills and goes on");
        queue.swap(at - 1, at);
        let late = queue[at];
        assert_eq!(found(&schedule), [Entity::Task(0, late)]);
    }
}
