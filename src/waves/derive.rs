//! From the schedule of a kernel for rows to a plan of waves.

use super::{
    Action, BLOCK_ROWS, Division, DivisionId, GROUPED_PASS_MAX, Input, Layout, Machine, NormOf, Over, PASS_MAX, Plan,
    Share, Sum, Target as Written, UNIT_GROUPS, Wave, Work, WorkId,
};
use crate::dtype::DType;
use crate::format::Format;
use crate::ir::layout::{PLACE_ALIGN_BYTES, cache_row_bytes, place_align};
use crate::ir::op::{Attention, Epilogue, MatVec, NormAttr, Op, Role};
use crate::ir::program::{Grid, Program};
use crate::ir::schedule::Schedule;
use crate::ir::{BufferId, GridId};
use crate::target::{CopyMechanism, DotMechanism, Target, TargetKind};
use std::collections::BTreeMap;
use thiserror::Error;

/// Why there is no plan. Prompts are then read by kernels for rows.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Refused {
    #[error("target `{target}` {lacks}")]
    Target { target: String, lacks: &'static str },
    #[error("{what} of `{grid}`: expected {expected}")]
    Grid { grid: String, what: &'static str, expected: &'static str },
    #[error("the ring has {slots} slots of {slot_bytes} bytes on target `{target}`: expected 2 at least")]
    SharedMemory { slots: u32, slot_bytes: u32, target: String },
}

/// Warps that multiply, and those of the loader, which gives them registers.
const WARPS: u32 = 8;
const LOADER_WARPS: u32 = 4;
const REGISTERS: u32 = 216;
const LOADER_REGISTERS: u32 = 72;
const SLOTS_MAX: u32 = 8;
const STATE_BYTES: u32 = 512;
/// Positions of a tile of attention at most.
const TILE_MAX: u32 = 64;

/// A plan of chunks of up to `rows` rows for the program of `schedule`, whose pack, caches and pages it shares.
///
/// # Errors
/// What kernels of waves cannot do of the program or on the target.
pub fn derive(schedule: &Schedule, target: &Target, rows: u32) -> Result<Plan, Refused> {
    let spec = &target.spec;
    let lacks = |lacks| Err(Refused::Target { target: target.name.clone(), lacks });
    if target.kind != TargetKind::Cuda || spec.copy != CopyMechanism::Bulk || spec.dot != DotMechanism::Mma {
        return lacks("has no bulk copies or no tensor cores");
    }
    if !spec.register_reallocation {
        return lacks("does not move registers between warps");
    }
    let program = &schedule.program;
    let machine = Machine {
        target: target.name.clone(),
        sms: spec.sm_count,
        warps: WARPS,
        loader_warps: LOADER_WARPS,
        registers: REGISTERS,
        loader_registers: LOADER_REGISTERS,
        slots: 0,
        slot_bytes: 0,
        state_bytes: STATE_BYTES,
    };
    let rows = rows.next_multiple_of(BLOCK_ROWS);
    let plan = Plan { rows, machine, work: vec![], waves: vec![], divisions: vec![] };
    let mut b = Builder { program, schedule, plan, inputs: BTreeMap::new(), residual: None, published: None };
    let last = program.last_append();
    for (g, grid) in program.grids.iter().enumerate() {
        b.grid(GridId::from(g), grid, Some(GridId::from(g)) == last)?;
        if Some(GridId::from(g)) == last {
            break;
        }
    }
    let mut plan = b.plan;
    let slot_bytes = slot_bytes(program, &plan);
    let slots = (spec.smem_bytes_per_block_max.saturating_sub(STATE_BYTES) / slot_bytes.max(1)).min(SLOTS_MAX);
    if slots < 2 {
        return Err(Refused::SharedMemory { slots, slot_bytes, target: target.name.clone() });
    }
    plan.machine.slots = slots;
    plan.machine.slot_bytes = slot_bytes;
    Ok(plan)
}

/// Bytes of the k of a chunk of the ring, of the input and of each unit: 64 of k, or a granule of more.
fn chunk_bytes(m: &MatVec, format: Format) -> (u32, u32) {
    let granule_k = format.granule_k() * m.parts();
    let k = granule_k.max(64);
    (k * BLOCK_ROWS * 2, k / granule_k * format.granule_bytes(m.k))
}

/// Units of a pass at most: codes of groups have sums of their own for each group.
fn pass_max(format: Format) -> u32 {
    if format.groups.is_some() { GROUPED_PASS_MAX } else { PASS_MAX }
}

/// Bytes of the largest chunk of any wave.
fn slot_bytes(program: &Program, plan: &Plan) -> u32 {
    let of_wave = |wave: &Wave| match (&wave.action, &program.grids[wave.grid.index()].op) {
        (Action::MatMul { pass, .. }, Op::MatVec(m)) => {
            let (input, unit) = chunk_bytes(m, program.format_of(&program.grids[wave.grid.index()]));
            input + pass.next_multiple_of(UNIT_GROUPS) * unit
        }
        (Action::Attend { tile, .. }, Op::Attention(a)) => {
            2 * tile * cache_row_bytes(a.head_dim, program.precision.cache)
        }
        _ => 0,
    };
    plan.waves.iter().map(of_wave).max().unwrap_or(0).next_multiple_of(1024)
}

struct Builder<'a> {
    program: &'a Program,
    schedule: &'a Schedule,
    plan: Plan,
    /// Where each exchange of the program that is no sum lies.
    inputs: BTreeMap<BufferId, WorkId>,
    residual: Option<WorkId>,
    /// The exchange that holds what the residual is now.
    published: Option<BufferId>,
}

fn refused<T>(grid: &Grid, what: &'static str, expected: &'static str) -> Result<T, Refused> {
    Err(Refused::Grid { grid: grid.name.clone(), what, expected })
}

impl Builder<'_> {
    fn grid(&mut self, id: GridId, grid: &Grid, is_last: bool) -> Result<(), Refused> {
        match &grid.op {
            Op::Select | Op::Report => Ok(()),
            Op::Embed { scale, everywhere: false } => self.embed(id, grid, *scale),
            Op::MatVec(m) => self.matvec(id, grid, m),
            Op::Attention(a) => self.attention(id, grid, a, is_last),
            Op::NormAdd { norm, scale, everywhere: false, .. } => self.norm_add(id, grid, *norm, *scale),
            _ => refused(grid, "the op", "one that every row of a step has for itself"),
        }
    }

    /// Activations of a name, made at the first use. Layers use the same ones.
    fn work(&mut self, name: &str, layout: Layout, cols: u32) -> WorkId {
        let found = self.plan.work.iter().position(|w| w.name == name && w.layout == layout && w.cols == cols);
        WorkId::from(found.unwrap_or_else(|| {
            let place = place_align(self.plan.work_bytes());
            debug_assert!(place.is_multiple_of(PLACE_ALIGN_BYTES));
            self.plan.work.push(Work { name: name.to_string(), layout, cols, place });
            self.plan.work.len() - 1
        }))
    }

    fn push(&mut self, grid: GridId, action: Action, over: Over) {
        let division = self.division(over);
        self.plan.waves.push(Wave { grid, action, division });
    }

    fn division(&mut self, over: Over) -> DivisionId {
        let (rows, sms) = (self.plan.rows, self.plan.machine.sms);
        let divisions = &mut self.plan.divisions;
        let found = divisions.iter().position(|division| division.over == over);
        DivisionId::from(found.unwrap_or_else(|| {
            let shares = (1..=rows / BLOCK_ROWS).map(|blocks| shares(over, blocks, sms)).collect();
            divisions.push(Division { over, shares });
            divisions.len() - 1
        }))
    }

    fn cols(&self, grid: &Grid, role: Role) -> Option<(BufferId, u32)> {
        let operand = grid.operand(role)?;
        Some((operand.buffer, self.program.buffers[operand.buffer.index()].cols))
    }

    fn constant(&self, grid: &Grid, role: Role) -> Option<BufferId> {
        grid.operand(role).map(|operand| operand.buffer)
    }

    fn norm_of(&self, grid: &Grid, norm: NormAttr) -> NormOf {
        let [weight, bias] = [Role::NormWeight, Role::NormBias].map(|role| self.constant(grid, role));
        NormOf { norm, weight, bias }
    }

    fn embed(&mut self, id: GridId, grid: &Grid, scale: f32) -> Result<(), Refused> {
        let (Some((out, _)), Some((table, cols))) = (self.cols(grid, Role::Out), self.cols(grid, Role::Table)) else {
            return refused(grid, "the operands", "a table, and an exchange that is published");
        };
        if !cols.is_multiple_of(8) {
            return refused(grid, "the width", "whole pieces of 8 values");
        }
        let residual = self.work("residual", Layout::Rows(DType::F32), cols);
        self.residual = Some(residual);
        self.published = Some(out);
        self.push(id, Action::Rows { residual, sum: Some(Sum::Embed { table, scale }), out: None }, Over::Rows);
        Ok(())
    }

    fn norm_add(&mut self, id: GridId, grid: &Grid, norm: NormAttr, scale: f32) -> Result<(), Refused> {
        let (x, out) = (self.constant(grid, Role::X), self.constant(grid, Role::Out));
        let branch = x.and_then(|x| self.inputs.get(&x).copied());
        let (Some(branch), Some(residual), Some(out)) = (branch, self.residual, out) else {
            return refused(grid, "the operands", "a branch, and a sum that is published");
        };
        self.published = Some(out);
        let norm = self.norm_of(grid, norm);
        let sum = Some(Sum::Branch { branch, norm, scale });
        self.push(id, Action::Rows { residual, sum, out: None }, Over::Rows);
        Ok(())
    }

    /// The input of a product: what another product or attention wrote, or the residual by way of a wave of rows.
    fn input(&mut self, id: GridId, grid: &Grid, m: &MatVec) -> Result<WorkId, Refused> {
        let Some(x) = self.constant(grid, Role::X) else {
            return refused(grid, "the operands", "an input");
        };
        if let (Some(&at), None) = (self.inputs.get(&x), m.norm) {
            return Ok(at);
        }
        let (Some(residual), true) = (self.residual, self.published == Some(x)) else {
            // Both branches of a parallel layer read the sum before the first one adds to it.
            return refused(grid, "the input", "the last sum, or what one product or attention wrote");
        };
        let to = self.work("normed", Layout::Operand, m.k);
        let norm = m.norm.map(|norm| self.norm_of(grid, norm));
        let out = Some(Input { to, norm });
        match self.plan.waves.last_mut().map(|wave| &mut wave.action) {
            Some(Action::Rows { out: empty @ None, .. }) => *empty = out,
            _ => self.push(id, Action::Rows { residual, sum: None, out }, Over::Rows),
        }
        Ok(to)
    }

    fn matvec(&mut self, id: GridId, grid: &Grid, m: &MatVec) -> Result<(), Refused> {
        let format = self.program.format_of(grid);
        if format.is_plain() && format != Format::plain(DType::Bf16) {
            return refused(grid, "weights", "bf16, or codes");
        }
        if m.own_input {
            return refused(grid, "the input", "an exchange");
        }
        let x = self.input(id, grid, m)?;
        let n = m.units();
        let (blocks, sms) = (self.plan.rows / BLOCK_ROWS, self.plan.machine.sms);
        let target = match m.epilogue {
            Epilogue::Residual { .. } => {
                let (Some(residual), Some((out, _))) = (self.residual, self.cols(grid, Role::Out)) else {
                    return refused(grid, "the sum", "one that is published");
                };
                self.published = Some(out);
                Written::Residual(residual)
            }
            Epilogue::Logits { .. } => return refused(grid, "the output", "no logits before the last append"),
            Epilogue::Store | Epilogue::Act(_) | Epilogue::Gated(_) => {
                let Some((out, cols)) = self.cols(grid, Role::Out) else {
                    return refused(grid, "the operands", "an output");
                };
                if !cols.is_multiple_of(2) {
                    return refused(grid, "the output", "an even number of columns");
                }
                // What a product reads next lies as products read it; heads and branches are read row by row.
                let (name, layout) = match m.epilogue {
                    Epilogue::Store => ("branch", Layout::Rows(DType::Bf16)),
                    _ => ("act", Layout::Operand),
                };
                let to = self.work(name, layout, cols);
                self.inputs.insert(out, to);
                Written::Out(to)
            }
        };
        let longest = |blocks: u32| {
            let of_sm = |shares: &Vec<Share>| shares.iter().map(|s| s.hi - s.lo).max().unwrap_or(0);
            shares(Over::Units { n }, blocks, sms).iter().map(of_sm).max().unwrap_or(0)
        };
        let most = pass_max(format);
        let pass = (1..=blocks).map(longest).map(|units| units.div_ceil(units.div_ceil(most).max(1)));
        let pass = pass.max().unwrap_or(1).max(1);
        self.push(id, Action::MatMul { x, target, pass }, Over::Units { n });
        Ok(())
    }

    fn attention(&mut self, id: GridId, grid: &Grid, a: &Attention, is_last: bool) -> Result<(), Refused> {
        let swizzled = self.schedule.attention_variant(id).is_some_and(|variant| variant.swizzled);
        if !swizzled || a.splits != 1 {
            return refused(grid, "attention", "heads that tensor cores take whole");
        }
        let x = self.constant(grid, Role::Q).and_then(|q| self.inputs.get(&q).copied());
        let (Some(x), Some((out, _))) = (x, self.cols(grid, Role::Out)) else {
            return refused(grid, "the operands", "heads, and an output");
        };
        let cols = a.heads * a.head_dim;
        let queries = self.work("queries", Layout::Rows(DType::Bf16), cols);
        self.push(id, Action::Append { x, queries }, Over::Rows);
        if is_last {
            return Ok(());
        }
        let cache = grid.operand(Role::AppendK).map(|o| &self.program.buffers[o.buffer.index()]);
        let Some(paging) = cache.and_then(|cache| cache.paging) else {
            return refused(grid, "the cache", "pages");
        };
        let tiles = [TILE_MAX, TILE_MAX / 2, TILE_MAX / 4];
        let row_bytes = cache_row_bytes(a.head_dim, self.program.precision.cache);
        // As many bytes as 64 rows of 128 dimensions have.
        let fits = |tile: &u32| paging.rows.is_multiple_of(*tile) && tile * row_bytes <= TILE_MAX * 256;
        let Some(tile) = tiles.into_iter().find(fits) else {
            return refused(grid, "pages", "a multiple of 16 positions");
        };
        let to = self.work("attended", Layout::Operand, cols);
        self.inputs.insert(out, to);
        let over = Over::Heads { n: a.head_groups(), rows: WARPS / a.heads_per_task * 16 };
        self.push(id, Action::Attend { queries, out: to, tile }, over);
        Ok(())
    }
}

/// The shares of each SM of a chunk of `blocks` blocks of rows.
fn shares(over: Over, blocks: u32, sms: u32) -> Vec<Vec<Share>> {
    let rows = blocks * BLOCK_ROWS;
    // Part `i` of `of` nearly equal parts of `n`.
    let part = |n: u32, i: u32, of: u32| {
        let at = |i: u32| (u64::from(n) * u64::from(i) / u64::from(of.max(1))) as u32;
        (at(i), at(i + 1))
    };
    let mut out = vec![vec![]; sms as usize];
    match over {
        Over::Rows => {
            for (sm, shares) in (0..).zip(&mut out) {
                let (lo, hi) = part(rows, sm, sms);
                shares.push(Share { row: lo, rows: hi - lo, lo: 0, hi: 1 });
            }
        }
        // The SMs of a block of rows have all units of the matrix among them: weights are read as often as there are blocks, which
        // L2 serves, and an SM reads no more of its input than its own rows.
        Over::Units { n } => {
            for block in 0..blocks {
                let (first, end) = part(sms, block, blocks);
                // Of fewer SMs than blocks, one has several.
                let end = end.max(first + 1);
                for sm in first..end {
                    let (lo, hi) = part(n, sm - first, end - first);
                    out[sm as usize].push(Share { row: block * BLOCK_ROWS, rows: BLOCK_ROWS, lo, hi });
                }
            }
        }
        // Later rows see more. The longest tiles first, each to the SM with the least so far.
        Over::Heads { n, rows: tile } => {
            let mut load = vec![0u64; sms as usize];
            for row in (0..rows / tile).rev().map(|t| t * tile) {
                for i in 0..n {
                    let sm = (0..sms as usize).min_by_key(|sm| load[*sm]).unwrap_or(0);
                    load[sm] += u64::from(row + tile + BLOCK_ROWS);
                    out[sm].push(Share { row, rows: tile, lo: i, hi: i + 1 });
                }
            }
        }
    }
    out.iter_mut().for_each(|shares| shares.retain(|s| s.rows > 0 && s.lo < s.hi));
    out
}
