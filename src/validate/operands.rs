//! Group 1, grids: each op's attributes, and what each of its operands must be.

use super::{Entity, Found, Rule, note};
use crate::dtype::{DType, Precision};
use crate::format::Format;
use crate::ir::op::{
    Attention, Combine, Convolve, Epilogue, GroupNorm, MatVec, Mix, NormAttr, Op, PARTIAL_HEADER, QkNormAttr, Role,
    Route, SLOTS_MAX, Scan, UNIT_ROWS,
};
use crate::ir::program::{Buffer, Cols, Content, Grid, Operand, Program, Rows, Second, Space};
use crate::ir::schedule::Schedule;
use crate::ir::table::{Holds, TableHome};
use crate::ir::{BufferId, GridId};
use crate::model::graph::{ClampedSwiglu, ExpertGroups, NormKind, QkNormSpan, RowView};
use std::collections::BTreeMap;

/// A KV head in a cache row starts at a multiple of these bytes.
const CACHE_HEAD_BYTES: u32 = 16;

/// Query heads of one attention task: the rows of one half of a tensor-core operand.
const HEADS_PER_TASK_MAX: u32 = 8;
/// Each phase is one more step of the loop to prove, and one more copy in memory.
const PHASES_MAX: u32 = 8;
/// Far above any model; below it, shares of the history are computed without wrapping.
const CONTEXT_MAX: u32 = 1 << 30;
/// Far above any model.
pub(super) const EXPERTS_MAX: u32 = 4096;
/// Gate rows, and up rows, of a unit.
const GATED_INTERLEAVE: u32 = UNIT_ROWS / 2;

pub(super) fn check(schedule: &Schedule, found: &mut Found) {
    let program = &schedule.program;
    let Precision { weights, cache, wire } = program.precision;
    for (name, dtype) in [("weights", weights), ("wire", wire)] {
        if !matches!(dtype, DType::F32 | DType::Bf16) {
            found.add(Rule::DType, Entity::Schedule, || format!("expected fp32 or bf16 for `{name}`, found {dtype}"));
        }
    }
    if !matches!(cache, DType::F32 | DType::Bf16 | DType::E4m3) {
        found.add(Rule::DType, Entity::Schedule, || format!("expected fp32, bf16 or fp8 for `cache`, found {cache}"));
    }
    if program.context_max == 0 || program.context_max > CONTEXT_MAX {
        let context_max = program.context_max;
        found.add(Rule::Attribute, Entity::Schedule, || {
            format!("expected `context_max` of 1 to {CONTEXT_MAX}, found {context_max}")
        });
    }
    for (b, buffer) in (0..).zip(&program.buffers) {
        check_buffer(BufferId(b), buffer, found);
    }
    let mut uses = vec![None; program.buffers.len()];
    for (g, grid) in (0..).zip(&program.grids) {
        let id = GridId(g);
        if !attributes(id, &grid.op, grid.n, program.format_of(grid), found) {
            continue;
        }
        launch_extents(id, grid, program, schedule.machine.sms, found);
        check_grid(id, grid, program, found);
        meanings(id, grid, program, &mut uses, found);
    }
    tokens_in_table(program, found);
    if schedule.machine.sms > 1 {
        makers_of_sums(program, found);
    }
    alternatives(program, found);
}

fn check_buffer(id: BufferId, buffer: &Buffer, found: &mut Found) {
    let at = Entity::Buffer(id);
    let Buffer { space, rows, cols, phases, .. } = *buffer;
    if rows == 0 || cols == 0 {
        found.add(Rule::BufferExtent, at, || format!("expected at least one row and column, found {rows} x {cols}"));
    }
    let most = if space == Space::Exchange { PHASES_MAX } else { 1 };
    if phases == 0 || phases > most {
        found
            .add(Rule::BufferExtent, at, || format!("expected 1 to {most} phases in {}, found {phases}", space.name()));
    }
    if space.immutable() != buffer.content.is_some() {
        let expected = if space.immutable() { "content, its bytes come from the checkpoint" } else { "no content" };
        found.add(Rule::Content, at, || format!("is in {}, expected {expected}", space.name()));
    }
    if let Some(format) = buffer.coded {
        // table.cuh decodes rows of a table; nothing else decodes constants.
        let table =
            space == Space::Constant && matches!(buffer.content, Some(Content::Tensor(_))) && !format.is_plain();
        if space != Space::Weight && !table {
            found.add(Rule::Format, at, || format!("is in {}, expected codes in weights and tables", space.name()));
        }
        if let Some(expected) = format.refuses() {
            found.add(Rule::Format, at, || format!("expected {expected}"));
        }
    }
    let Some(content) = &buffer.content else { return };
    // The packer turns weights into units of rows; a constant lies as it is read.
    if (space == Space::Weight) != matches!(content, Content::Rows { .. }) && space.immutable() {
        let expected =
            if space == Space::Weight { "rows" } else { "vectors, a tensor, a rope table or scales of a cache" };
        found.add(Rule::Content, at, || {
            format!("is in {}, expected {expected} as its content, found {}", space.name(), kind_of(content))
        });
    }
    if !matches!(buffer.dtype, DType::F32 | DType::Bf16) {
        let dtype = buffer.dtype;
        found.add(Rule::DType, at, || format!("expected content of fp32 or bf16, found {dtype}"));
    }
    // 64 bits: the sums of untrusted 32-bit extents.
    let total = |lens: &mut dyn Iterator<Item = u32>| lens.map(u64::from).sum::<u64>();
    let views = |views: Vec<&RowView>, found: &mut Found| {
        if views.iter().any(|view| view.block == 0) {
            found.add(Rule::Content, at, || "expected blocks of at least one row, found a view of none".to_string());
        }
    };
    match content {
        Content::Rows { parts, interleave } => {
            let found_rows = total(&mut parts.iter().map(|p| p.rows));
            if found_rows != u64::from(rows) {
                found.add(Rule::Content, at, || format!("expected {rows} rows of content, found {found_rows}"));
            }
            let pair = parts.len() % 2 == 0 && parts.iter().all(|part| part.rows == parts[0].rows);
            interleaved(at, *interleave, pair, found);
            views(parts.iter().map(|part| &part.view).collect(), found);
        }
        Content::Vectors { parts, interleave, offset, scale } => {
            let len = total(&mut parts.iter().map(|p| p.len));
            if len > u64::from(cols) {
                found.add(Rule::Content, at, || format!("expected at most {cols} values of content, found {len}"));
            }
            if !offset.is_finite() {
                found.add(Rule::Content, at, || format!("expected a finite `offset`, found {offset}"));
            }
            if !scale.is_finite() {
                found.add(Rule::Content, at, || format!("expected a finite `scale`, found {scale}"));
            }
            let pair = parts.len() % 2 == 0 && parts.iter().all(|part| part.len == parts[0].len);
            interleaved(at, *interleave, pair, found);
            views(parts.iter().filter_map(|part| part.view.as_ref()).collect(), found);
        }
        Content::Tensor(_) | Content::RopeTable(_) | Content::CacheScales(_) => {}
    }
}

fn interleaved(at: Entity, interleave: u32, pair: bool, found: &mut Found) {
    if interleave != 1 && !(interleave == GATED_INTERLEAVE && pair) {
        found.add(Rule::Content, at, || {
            format!("expected `interleave` 1, or {GATED_INTERLEAVE} of pairs of equal parts, found {interleave}")
        });
    }
}

/// Numbers that no kernel can take; after this, sizes derived from the op fit 32 bits.
fn attributes(id: GridId, op: &Op, n: u32, weights: Format, found: &mut Found) -> bool {
    let mut fine = true;
    let mut expect = |holds: bool, what: &str, value: &dyn std::fmt::Display| {
        if !holds {
            fine = false;
            found.add(Rule::Attribute, Entity::Grid(id), || format!("expected {what}, found {value}"));
        }
    };
    let fits = |product: u128| product <= u128::from(u32::MAX / 16);
    let wide = |x: u32| u128::from(x);
    match op {
        Op::Select | Op::Report => {}
        Op::Route(Route { experts, top_k, score: _, groups, normalise, scale }) => {
            expect(*experts > 0 && *experts <= EXPERTS_MAX, "`experts` of 1 to 4096", experts);
            expect(*top_k > 0 && top_k <= experts, "`top_k` of at least 1, up to `experts`", top_k);
            expect(scale.is_finite(), "a finite `scale`", scale);
            if let Some(normalise) = normalise {
                expect(normalise.is_finite() && *normalise >= 0.0, "a finite `normalise` of at least 0", normalise);
            }
            if let Some(ExpertGroups { count, kept, score: _ }) = groups {
                expect(*count > 0 && experts % count == 0, "`groups` that divides `experts`", count);
                let enough = *count > 0 && kept <= count && wide(experts / count) * wide(*kept) >= wide(*top_k);
                expect(*kept > 0 && enough, "`kept` groups with `top_k` experts, up to `groups`", kept);
            }
        }
        Op::Combine(Combine { width, slots, shared, scale, adds: _ }) => {
            expect(shared.is_none_or(f32::is_finite), "a finite `shared`", &shared.unwrap_or(0.0));
            expect(*slots > 0 && *slots <= EXPERTS_MAX, "`slots` of 1 to 4096", slots);
            let columns = wide(*width) * (wide(*slots) + 1);
            expect(*width > 0 && fits(columns), "`width` and `slots` whose product is below 2^28", width);
            expect(scale.is_finite(), "a finite `scale`", scale);
        }
        Op::Mix(Mix { key_heads, value_heads, key_dim, value_dim, kernel, eps, doubles: _ }) => {
            let whole = *key_heads > 0 && *value_heads > 0 && value_heads % key_heads == 0;
            expect(whole, "`value_heads` that `key_heads` divides", value_heads);
            expect(*key_dim > 0 && key_dim % 2 == 0, "an even `key_dim` above 0", key_dim);
            expect(*value_dim > 0 && value_dim % 2 == 0, "an even `value_dim` above 0", value_dim);
            expect(*kernel > 0, "`kernel` of at least 1", kernel);
            expect(eps.is_finite() && *eps > 0.0, "a finite `eps` above 0", eps);
            let channels = 2 * wide(*key_dim) + wide(*value_dim);
            let state = wide(*key_dim) * wide(*value_dim) + wide(*kernel) * channels;
            expect(fits(wide(*value_heads).saturating_mul(state)), "a state of fewer than 2^28 values", &state);
        }
        Op::Convolve(Convolve { channels, kernel }) => {
            expect(*channels > 0 && channels % 2 == 0, "an even number of `channels` above 0", channels);
            // Without a position before its own there is no state.
            expect(*kernel > 1, "`kernel` of at least 2", kernel);
            let columns = wide(*channels) * wide((*kernel).max(3));
            expect(fits(columns), "`channels` and `kernel` whose product is below 2^28", channels);
        }
        Op::Scan(Scan { heads, head_dim, groups, state, kernel, scales, gate }) => {
            expect(*heads > 0 && *groups > 0 && heads % groups == 0, "`heads` that `groups` divides", heads);
            expect(*head_dim > 0 && head_dim % 2 == 0, "an even `head_dim` above 0", head_dim);
            expect(*state > 0 && state % 2 == 0, "an even `state` above 0", state);
            expect(*kernel > 0, "`kernel` of at least 1", kernel);
            for scale in scales.iter().chain(gate) {
                expect(scale.is_finite(), "finite scales", scale);
            }
            let channels = wide(*head_dim) + 2 * wide(*state);
            let kept = wide(*state) * wide(*head_dim) + wide(*kernel) * channels;
            expect(fits(wide(*heads).saturating_mul(kept)), "a state of fewer than 2^28 values", &kept);
        }
        Op::GroupNorm(GroupNorm { width, groups, eps, gate }) => {
            let whole = *groups > 0 && *width > 0 && width % groups == 0 && (width / groups) % 2 == 0;
            expect(
                whole && fits(wide(*width)),
                "`width` below 2^28 of whole `groups` of an even number of columns",
                width,
            );
            expect(eps.is_finite() && *eps > 0.0, "a finite `eps` above 0", eps);
            if let Some(scale) = gate {
                expect(scale.is_finite(), "a finite `gate_scale`", scale);
            }
        }
        Op::Embed { scale, everywhere: _ } | Op::Join { scale } => expect(scale.is_finite(), "a finite `scale`", scale),
        Op::MatVec(m) => {
            expect(m.rows > 0 && fits(wide(m.rows)), "`rows` of at least 1, below 2^28", &m.rows);
            expect(m.k > 0 && fits(wide(m.k)), "`k` of at least 1, below 2^28", &m.k);
            // Each slot has whole granules of whole units, and no scales of rows.
            let whole = m.k.is_multiple_of(weights.granule_k()) && m.unit_rows == UNIT_ROWS && !weights.row_scales;
            let sums = matches!(m.epilogue, Epilogue::Store | Epilogue::Residual { .. });
            let plain = m.norm.is_none() && !m.own_input && sums;
            expect(
                m.slots == 1 || (1..=SLOTS_MAX).contains(&m.slots) && fits(wide(m.inputs())) && whole && plain,
                "`slots` of 1, or up to 16 without a norm, of whole granules and units of 8 rows",
                &m.slots,
            );
            if let Some(norm) = &m.norm {
                expect(eps_ok(norm), "a finite `eps` above 0", &norm.eps);
            }
            expect(
                m.takes_unit_rows(m.unit_rows, weights),
                "`unit_rows` of 8, or of 4 or 2 where columns are stored and k is whole granules",
                &m.unit_rows,
            );
            match m.epilogue {
                Epilogue::Store | Epilogue::Scores | Epilogue::Act(_) => {}
                Epilogue::Clamped(ClampedSwiglu { alpha, limit }) => {
                    expect(alpha.is_finite(), "a finite `alpha`", &alpha);
                    expect(limit.is_finite() && limit > 0.0, "a finite `limit` above 0", &limit);
                    expect(m.rows % 2 == 0, "as many gate rows as up rows", &m.rows);
                }
                Epilogue::Gated(_) => expect(m.rows % 2 == 0, "as many gate rows as up rows", &m.rows),
                Epilogue::GatedBy { act: _, scale } => {
                    expect(scale.is_finite(), "a finite `scale`", &scale);
                    expect(m.rows % 2 == 0, "as many gate rows as up rows", &m.rows);
                }
                Epilogue::Residual { scale } => expect(scale.is_finite(), "a finite `scale`", &scale),
                Epilogue::Logits { scale, softcap } => {
                    expect(scale.is_finite(), "a finite `scale`", &scale);
                    if let Some(cap) = softcap {
                        expect(cap.is_finite() && cap > 0.0, "a finite `softcap` above 0", &cap);
                    }
                }
            }
        }
        Op::Attention(a) => {
            let Attention { heads_per_task: per_task, group, heads, head_dim: dim, splits, rotary, .. } = *a;
            expect(dim > 0 && dim % 2 == 0, "an even `head_dim` above 0", &dim);
            expect(group > 0, "`group` of at least 1", &group);
            expect(heads > 0 && group > 0 && heads % group == 0, "`heads` that `group` divides", &heads);
            expect(
                per_task > 0 && per_task <= HEADS_PER_TASK_MAX && group % per_task == 0,
                "`heads_per_task` of 1 to 8 that divides `group`",
                &per_task,
            );
            expect(rotary % 2 == 0 && rotary <= dim, "an even `rotary` up to `head_dim`", &rotary);
            expect(splits > 0, "`splits` of at least 1", &splits);
            let columns = wide(heads) * wide(splits) * (wide(dim) + wide(PARTIAL_HEADER));
            expect(fits(columns), "heads, head_dim and splits whose product is below 2^28", &columns);
            // No model has another one, and a kernel may take the best score before or after it scales.
            expect(a.scale.is_finite() && a.scale > 0.0, "a finite `scale` above 0", &a.scale);
            if let Some(cap) = a.softcap {
                expect(cap.is_finite() && cap > 0.0, "a finite `softcap` above 0", &cap);
            }
            if let Some(window) = a.window {
                expect(window > 0, "a `window` of at least 1", &window);
            }
            for norm in [&a.q_norm, &a.k_norm].into_iter().flatten() {
                expect(eps_ok(&norm.norm), "a finite `eps` above 0", &norm.norm.eps);
                // Who rotates one head does not have the others.
                let alone = !a.norm_after_rope || norm.span != QkNormSpan::Projection;
                expect(alone, "norms of single heads after RoPE", &norm.span.name());
            }
            if let Some(scale) = a.query_scale {
                expect(scale.beta.is_finite() && scale.beta >= 0.0, "a finite `query_scale` of 0 or more", &scale.beta);
                expect(scale.original > 0, "a `query_scale` from a position above 0 on", &scale.original);
            }
        }
        Op::AttentionMerge { head_dim: dim, splits, heads_per_task: per_task, gate: _ } => {
            expect(*dim > 0 && dim % 2 == 0, "an even `head_dim` above 0", dim);
            expect(*splits > 0, "`splits` of at least 1", splits);
            expect(n > 0, "at least one head", &n);
            expect(*per_task > 0 && n.is_multiple_of(*per_task), "`heads_per_task` that divides the heads", per_task);
            let columns = wide(n) * wide(*splits) * (wide(*dim) + wide(PARTIAL_HEADER));
            expect(fits(columns), "heads, head_dim and splits whose product is below 2^28", &columns);
        }
        Op::NormAdd { norm, width, scale, everywhere: _ } => {
            expect(*width > 0 && fits(wide(*width)), "`width` of at least 1, below 2^28", width);
            expect(scale.is_finite(), "a finite `scale`", scale);
            expect(eps_ok(norm), "a finite `eps` above 0", &norm.eps);
        }
    }
    fine
}

fn eps_ok(norm: &NormAttr) -> bool {
    norm.eps.is_finite() && norm.eps > 0.0
}

/// `n` and the second axis follow from the op.
fn launch_extents(id: GridId, grid: &Grid, program: &Program, sms: u32, found: &mut Found) {
    let n = match &grid.op {
        op if op.everywhere() => Some(sms),
        Op::Select | Op::Report | Op::Route(_) => Some(1),
        Op::Combine(combine) => Some(combine.width.div_ceil(UNIT_ROWS)),
        Op::Mix(mix) => Some(mix.value_heads),
        Op::Convolve(convolve) => Some(convolve.channels.div_ceil(UNIT_ROWS)),
        Op::Scan(scan) => Some(scan.heads),
        Op::GroupNorm(norm) => Some(norm.groups),
        Op::MatVec(m) => Some(m.units()),
        Op::Attention(a) => Some(a.head_groups()),
        Op::NormAdd { width, .. } => Some(width.div_ceil(UNIT_ROWS)),
        Op::Embed { .. } | Op::Join { .. } => Some(table_width(grid, program).div_ceil(UNIT_ROWS)),
        // The number of its heads is judged by the records that it reads, and by what else writes its output.
        Op::AttentionMerge { .. } => None,
    };
    if let Some(n) = n.filter(|&n| n != grid.n) {
        found.add(Rule::Shape, Entity::Grid(id), || format!("expected {n} launch indices, found {}", grid.n));
    }
    let expected = match (&grid.op, grid.second) {
        (Op::Attention(a), _) => Second::Axis(a.splits),
        // A launch index for each part of the sequences. Each part has a row of a step, and a sequence.
        (Op::Mix(_) | Op::Scan(_), Second::Axis(parts)) => Second::Axis(parts.clamp(1, program.parts_max())),
        (Op::MatVec(MatVec { epilogue: Epilogue::Logits { .. }, .. }), Second::Ordinal(most)) => {
            Second::Ordinal(most.clamp(1, grid.n.max(1)))
        }
        (Op::MatVec(MatVec { epilogue: Epilogue::Logits { .. }, .. }), Second::Axis(_)) => Second::Ordinal(grid.n),
        // A launch index for each slot of the table that is looked up, unless each has all slots; of several rows parts are dealt.
        (Op::MatVec(m), _) if m.slots > 1 => Second::Axis(1),
        (Op::MatVec(_), Second::Dealt(tasks)) if program.rows > 1 && program.looked_up(grid).is_some() => {
            Second::Dealt(tasks.max(1))
        }
        (Op::MatVec(_), _) => Second::Axis(program.looked_up(grid).map_or(1, |table| table.cols)),
        _ => Second::Axis(1),
    };
    if grid.second != expected {
        found.add(Rule::Shape, Entity::Grid(id), || {
            format!("expected {expected:?} as second axis, found {:?}", grid.second)
        });
    }
}

/// What an operand must be. `cols` is relative to the operand's base.
struct Want {
    space: Space,
    dtype: DType,
    rows: Rows,
    cols: Cols,
    extent: Extent,
}

/// How the buffer's extents follow from the op.
enum Extent {
    /// A vector that other operands may share: the columns lie anywhere in it.
    Shared,
    /// A matrix of this many rows, all of its columns.
    Rows(u32),
    /// One row for each position, all of its columns.
    Positions,
    /// One row for each position, columns anywhere.
    PositionsShared,
    /// Any number of rows, all columns: the rows are the bound of a runtime index.
    Table,
    /// `[rows, k]` weights, read as units.
    Weight { rows: u32, k: u32 },
    /// A vector of this many equal parts, of which one is read.
    Parts(u32),
}

fn check_grid(id: GridId, grid: &Grid, program: &Program, found: &mut Found) {
    let at = Entity::Grid(id);
    let mut operands = grid.operands.iter().peekable();
    for slot in grid.op.signature() {
        // Several operands of one role, one after another, each but the last.
        let several = grid.op.operands_of(slot.role);
        for nth in 1..several {
            let Some(operand) = operands.next_if(|o| o.role == slot.role) else {
                found.add(Rule::Operand, at, || {
                    format!("expected {several} operands `{}`, found {}", slot.role.name(), nth - 1)
                });
                return;
            };
            if let Some(want) = want(grid, operand, program).filter(|_| operand.access == slot.access) {
                check_operand(id, grid, operand, &want, program, found);
            } else {
                found.add(Rule::Operand, at, || format!("expected {} of `{}`", slot.access.name(), slot.role.name()));
            }
        }
        match operands.next_if(|o| o.role == slot.role) {
            Some(operand) => {
                let role = slot.role.name();
                if operand.access != slot.access {
                    found.add(Rule::Operand, at, || {
                        format!("expected {} of `{role}`, found {}", slot.access.name(), operand.access.name())
                    });
                } else if let Some(want) = want(grid, operand, program) {
                    check_operand(id, grid, operand, &want, program, found);
                } else {
                    found.add(Rule::Operand, at, || format!("expected no `{role}`, the op has no such attribute"));
                }
            }
            None if slot.optional => {}
            None => {
                let next = operands.peek().map_or("the end of the operands", |o| o.role.name());
                found.add(Rule::Operand, at, || format!("expected `{}`, found {next}", slot.role.name()));
                return;
            }
        }
    }
    if let Some(extra) = operands.next() {
        found.add(Rule::Operand, at, || {
            format!("expected the operands of `{}` in order, found `{}`", grid.op.name(), extra.role.name())
        });
        return;
    }
    contents(id, grid, program, found);
    if gates(&grid.op) && grid.operand(Role::Gate).is_none() {
        found.add(Rule::Operand, at, || "expected the `gate` of its output, found none".to_string());
    }
    inputs_of_sum(id, grid, found);
    choices(id, grid, program, found);
    if let Op::Attention(a) = &grid.op {
        if a.rotary > 0 && grid.operand(Role::Rope).is_none() {
            found.add(Rule::Operand, at, || format!("expected `rope` for {} rotated dimensions, found none", a.rotary));
        }
        if program.precision.cache == DType::E4m3 && grid.operand(Role::CacheScales).is_none() {
            found.add(Rule::Operand, at, || "expected `cache_scales` of a cache in fp8, found none".to_string());
        }
        if a.sinks && grid.operand(Role::Sinks).is_none() {
            found.add(Rule::Operand, at, || "expected `sinks` of its heads, found none".to_string());
        }
        for (history, append) in [(Role::HistoryK, Role::AppendK), (Role::HistoryV, Role::AppendV)] {
            let place = |role| grid.operand(role).map(|o| (o.buffer, o.cols.base));
            if place(history) != place(append) {
                found.add(Rule::Shape, at, || {
                    format!("expected `{}` to extend what `{}` reads", append.name(), history.name())
                });
            }
        }
    }
}

/// Whether an op multiplies its output by gates: attention of one share, the merge of several, Mamba-2, or a norm before its gate.
fn gates(op: &Op) -> bool {
    match op {
        Op::Attention(a) => a.gate && a.splits == 1,
        Op::AttentionMerge { gate, .. } => *gate,
        Op::Scan(scan) => scan.gate.is_some(),
        Op::GroupNorm(norm) => norm.gate.is_some(),
        _ => false,
    }
}

/// The inputs of a sum over experts lie one after another in one buffer.
fn inputs_of_sum(id: GridId, grid: &Grid, found: &mut Found) {
    let Op::Combine(combine) = &grid.op else { return };
    let mut inputs = (0..).zip(grid.operands.iter().filter(|operand| operand.role == Role::X));
    let Some((_, first)) = inputs.next() else { return };
    for (slot, input) in inputs {
        let place = first.cols.base.checked_add(combine.width.saturating_mul(slot));
        if input.buffer != first.buffer || Some(input.cols.base) != place {
            found.add(Rule::Shape, Entity::Grid(id), || {
                let (width, buffer) = (combine.width, first.buffer);
                format!("expected input {slot} of a sum {width} columns after the one before it in {buffer}")
            });
        }
    }
}

/// A task that computes with a chosen part reads the choice itself: where the part's scales and biases lie depends on it.
fn choices(id: GridId, grid: &Grid, program: &Program, found: &mut Found) {
    let table = program.looked_up(grid);
    if let Op::MatVec(m) = &grid.op
        && m.slots > 1
        && (table.map(|table| table.cols) != Some(m.slots) || grid.operand(Role::Bias).is_some())
    {
        found.add(Rule::Operand, Entity::Grid(id), || {
            let slots = m.slots;
            format!("expected a table of {slots} slots to look up, and no biases, for a product over {slots} slots")
        });
    }
    let Some(table) = table else { return };
    // Its loader takes entry `j` of the table: column `j` of this buffer.
    let choices = grid.operand(Role::Choices).filter(|choices| choices.cols.base == 0);
    if choices.map(|choices| TableHome::Device(choices.buffer)) != Some(table.home) {
        found.add(Rule::Operand, Entity::Grid(id), || {
            "expected `choices` of the table that is looked up, from its first column on; found others or none"
                .to_string()
        });
    }
    for operand in grid.operands.iter().filter(|operand| matches!(operand.role, Role::Weight | Role::Bias)) {
        let same = grid.operand(Role::Weight).is_some_and(|weight| weight.rows == operand.rows);
        if !same {
            found.add(Rule::Rows, Entity::Grid(id), || {
                format!("expected `{}` of the part whose weights are streamed", operand.role.name())
            });
        }
    }
}

/// Each immutable operand of a grid has content of the kind and size that its role reads.
fn contents(id: GridId, grid: &Grid, program: &Program, found: &mut Found) {
    let rows_of_matvec = match &grid.op {
        Op::MatVec(m) => {
            let parts = program.looked_up(grid).map_or(1, |table| table.bound);
            let interleave = if m.epilogue.is_gated() { GATED_INTERLEAVE } else { 1 };
            Some((m.rows.saturating_mul(parts), interleave))
        }
        _ => None,
    };
    for operand in &grid.operands {
        let Some(content) = &program.buffers[operand.buffer.index()].content else { continue };
        let mut expect = |holds: bool, what: &dyn Fn() -> String| {
            if !holds {
                found.add_with(Rule::Content, Entity::Grid(id), || {
                    let message = format!("expected `{}` with {}", operand.role.name(), what());
                    (message, vec![note(Entity::Buffer(operand.buffer), "holds it")])
                });
            }
        };
        let (kind, fits) = match operand.role {
            Role::Weight => ("rows", matches!(content, Content::Rows { .. })),
            Role::Table => ("a tensor", matches!(content, Content::Tensor(_))),
            Role::Rope => ("a rope table", matches!(content, Content::RopeTable(_))),
            Role::CacheScales => ("scales of a cache", matches!(content, Content::CacheScales(_))),
            Role::NormWeight
            | Role::NormBias
            | Role::QNormWeight
            | Role::KNormWeight
            | Role::Bias
            | Role::Sinks
            | Role::Conv
            | Role::ALog
            | Role::D
            | Role::DtBias => ("vectors", matches!(content, Content::Vectors { .. })),
            // In the wrong space, which is judged elsewhere.
            _ => continue,
        };
        expect(fits, &|| format!("{kind} as its content, found {}", kind_of(content)));
        if let Content::Vectors { parts, .. } = content {
            // Values after the rows of a matvec are padding; a norm has a gain for every column.
            let expected = match rows_of_matvec {
                Some((rows, _)) if operand.role == Role::Bias => rows,
                _ => program.buffers[operand.buffer.index()].cols,
            };
            let len = parts.iter().map(|part| u64::from(part.len)).sum::<u64>();
            expect(len == u64::from(expected), &|| format!("{expected} values of content, found {len}"));
        }
        if let (Some((_, expected)), Role::Weight | Role::Bias) = (rows_of_matvec, operand.role)
            && let Content::Rows { interleave, .. } | Content::Vectors { interleave, .. } = content
        {
            expect(*interleave == expected, &|| format!("`interleave` {expected}, found {interleave}"));
        }
    }
}

/// The word of the text form.
fn kind_of(content: &Content) -> &'static str {
    match content {
        Content::Rows { .. } => "rows",
        Content::Vectors { .. } => "vectors",
        Content::Tensor(_) => "a tensor",
        Content::RopeTable(_) => "a rope table",
        Content::CacheScales(_) => "scales of a cache",
    }
}

fn check_operand(id: GridId, grid: &Grid, operand: &Operand, want: &Want, program: &Program, found: &mut Found) {
    let at = Entity::Grid(id);
    let buffer = &program.buffers[operand.buffer.index()];
    let (role, name) = (operand.role.name(), operand.buffer);
    let seen = || vec![note(Entity::Buffer(name), format!("`{}`", buffer.name))];
    if buffer.space != want.space {
        found.add_with(Rule::Space, at, || {
            let (expected, space) = (want.space.name(), buffer.space.name());
            (format!("expected `{role}` in {expected}, {name} is in {space}"), seen())
        });
        return;
    }
    if buffer.dtype != want.dtype {
        found.add_with(Rule::DType, at, || {
            (format!("expected `{role}` of {}, {name} is of {}", want.dtype, buffer.dtype), seen())
        });
    }
    if operand.rows != want.rows {
        found.add(Rule::Rows, at, || {
            format!("expected rows `{}` of `{role}`, found `{}`", want.rows.name(), operand.rows.name())
        });
        return;
    }
    let Some(cols) = relative(&operand.cols, grid.second.extent()) else {
        found.add(Rule::Shape, at, || format!("the columns of `{role}` end before their base"));
        return;
    };
    let wanted = relative(&want.cols, grid.second.extent()).unwrap_or(want.cols);
    if cols != wanted {
        found.add_with(Rule::Shape, at, || {
            (format!("the columns of `{role}`: expected {wanted:?}, found {cols:?}"), seen())
        });
        return;
    }
    let context_max = program.context_max;
    let (limit, base) = (operand.cols.limit, operand.cols.base);
    let extent = |expected: String, found: &mut Found| {
        found.add_with(Rule::Shape, at, || {
            let message = format!("expected {expected} for `{role}`, {name} is {} x {}", buffer.rows, buffer.cols);
            (message, seen())
        });
    };
    let whole = |found: &mut Found| {
        if base != 0 || limit != buffer.cols {
            extent(format!("{} columns, all of them", want.cols.limit), found);
        }
    };
    let inside = |found: &mut Found| {
        if limit > buffer.cols {
            found.add_with(Rule::OutOfBounds, at, || {
                (format!("`{role}` ends at column {limit}, {name} has {}", buffer.cols), seen())
            });
        }
    };
    let positions = |found: &mut Found| {
        // How far pages reach is judged with their table (`tables`).
        if buffer.rows < context_max && buffer.paging.is_none() {
            found.add_with(Rule::OutOfBounds, at, || {
                let message = format!("`{role}` reaches row {}, {name} has {} rows", context_max - 1, buffer.rows);
                (message, seen())
            });
        }
    };
    match want.extent {
        Extent::Shared => {
            if want.space == Space::Private && base != 0 {
                extent("columns from 0 on".to_string(), found);
            }
            inside(found);
            if want.space == Space::Exchange {
                aligned(id, operand, buffer, found);
            }
        }
        Extent::Rows(rows) => {
            whole(found);
            if buffer.rows != rows {
                extent(format!("{rows} rows"), found);
            }
        }
        Extent::Positions => {
            whole(found);
            positions(found);
        }
        Extent::PositionsShared => {
            inside(found);
            positions(found);
        }
        Extent::Table => whole(found),
        Extent::Parts(parts) => {
            if base != 0 || buffer.rows != 1 || u64::from(limit) * u64::from(parts) != u64::from(buffer.cols) {
                extent(format!("{parts} parts of {} columns", want.cols.limit), found);
            }
        }
        Extent::Weight { rows, k } => {
            if base != 0 || buffer.rows != rows || buffer.cols != k {
                extent(format!("{rows} x {k}"), found);
            }
        }
    }
}

/// Columns relative to their base, in a form in which equal regions are equal values. `None`: the limit is below the
/// base.
fn relative(cols: &Cols, axis: u32) -> Option<Cols> {
    let mut cols = Cols { limit: cols.limit.checked_sub(cols.base)?, base: 0, ..*cols };
    if axis == 1 {
        cols.stride_j = 0;
        if cols.only_j == Some(0) {
            cols.only_j = None;
        }
    }
    if cols.div == 1 {
        cols.first = false;
    }
    Some(cols)
}

/// A packet is the unit that a reader polls: two 16-bit values or one of 32 bits. Two producers must not share one.
fn aligned(id: GridId, operand: &Operand, buffer: &Buffer, found: &mut Found) {
    let per_packet = 4 / buffer.dtype.bytes() as u32;
    let Cols { base, stride, stride_j, len, limit, .. } = operand.cols;
    let ends = |at: u64| at.is_multiple_of(u64::from(per_packet)) || at == u64::from(buffer.cols);
    let single = stride == 0 && stride_j == 0;
    let block = if single { ends(u64::from(base) + u64::from(len)) } else { len % per_packet == 0 };
    if [base, stride, stride_j].iter().any(|x| x % per_packet != 0) || !block || !ends(u64::from(limit)) {
        found.add_with(Rule::Misaligned, Entity::Grid(id), || {
            let role = operand.role.name();
            let message =
                format!("regions of `{role}`: expected whole packets of {per_packet} values, found {:?}", operand.cols);
            (message, vec![note(Entity::Buffer(operand.buffer), format!("of {}", buffer.dtype))])
        });
    }
}

/// Equal parts of a buffer that an operand chooses among.
fn parts(operand: &Operand, program: &Program) -> u32 {
    match operand.rows {
        Rows::Lookup(table) => program.tables[table.index()].bound,
        _ => 1,
    }
}

/// Columns of the table that an `embed` reads.
fn table_width(grid: &Grid, program: &Program) -> u32 {
    grid.operand(Role::Table).map_or(0, |o| program.buffers[o.buffer.index()].cols)
}

/// Columns of a launch index of an op that adds to the residual.
fn columns_of_sum(width: u32, everywhere: bool) -> Cols {
    if everywhere { Cols::all(width) } else { Cols::blocks(UNIT_ROWS, width) }
}

/// A state has a row for each sequence.
fn state_of(program: &Program, cols: Cols) -> Want {
    let sequences = program.table(Holds::Sequences).map(|(_, table)| table.bound);
    let (rows, count) = sequences.map_or((Rows::One, 1), |bound| (Rows::Sequences, bound));
    Want { space: Space::State, dtype: DType::F32, rows, cols, extent: Extent::Rows(count) }
}

/// What `operand` of `grid` must be; `None`: the op's attributes exclude it.
fn want(grid: &Grid, operand: &Operand, program: &Program) -> Option<Want> {
    let Precision { weights, cache, wire } = program.precision;
    let role = operand.role;
    // Attention takes one row of the step, and keys and values of all of them; everything else takes all rows.
    let rows = match (program.rows, &grid.op) {
        (1, _) => Rows::One,
        (_, Op::Attention(_) | Op::AttentionMerge { .. } | Op::Route(_)) => Rows::Own,
        _ => Rows::All,
    };
    let exchange = |dtype, cols| Want { space: Space::Exchange, dtype, rows, cols, extent: Extent::Shared };
    let private = |dtype, cols| Want { space: Space::Private, dtype, rows, cols, extent: Extent::Shared };
    let output = |dtype, cols| Want { space: Space::Output, dtype, rows, cols, extent: Extent::Rows(program.rows) };
    let vector =
        |cols| Want { space: Space::Constant, dtype: DType::F32, rows: Rows::One, cols, extent: Extent::Rows(1) };
    let token = private(DType::I32, Cols::all(1));
    let of_part = |rows| if grid.second.extent() > 1 { Rows::Part } else { rows };
    match &grid.op {
        Op::Select => match role {
            // All arg-max pairs; their number is judged with the head.
            Role::Best => Some(exchange(DType::I32, Cols::all(program.buffers[operand.buffer.index()].cols))),
            Role::Token => Some(token),
            _ => None,
        },
        Op::Route(Route { experts, top_k, .. }) => match role {
            Role::X => Some(exchange(DType::F32, Cols::all(*experts))),
            Role::Bias => Some(vector(Cols::all(*experts))),
            Role::Shares => Some(exchange(DType::F32, Cols::all(*top_k))),
            Role::Out => Some(exchange(DType::I32, Cols::all(*top_k))),
            _ => None,
        },
        Op::Mix(mix) => {
            let key_cols = mix.key_heads * mix.key_dim;
            let of_key = Cols { stride: mix.key_dim, div: mix.group(), limit: key_cols, ..Cols::all(mix.key_dim) };
            let of_value = Cols::blocks(mix.value_dim, mix.value_heads * mix.value_dim);
            let heads = Cols::all(mix.value_heads);
            match role {
                Role::Q | Role::K => Some(exchange(wire, of_key)),
                Role::V | Role::Gate => Some(exchange(wire, of_value)),
                Role::Out => Some(Want { rows: of_part(rows), ..exchange(wire, of_value) }),
                Role::Beta | Role::Decay => Some(exchange(wire, heads)),
                Role::NormWeight => Some(vector(Cols::all(mix.value_dim))),
                Role::Conv => Some(vector(Cols::all(mix.qkv_cols().saturating_mul(mix.kernel)))),
                Role::ALog | Role::DtBias => Some(vector(heads)),
                Role::State => {
                    let cols = mix.state_cols();
                    let of_state = state_of(program, Cols::blocks(cols, mix.value_heads * cols));
                    Some(Want { rows: of_part(of_state.rows), ..of_state })
                }
                _ => None,
            }
        }
        Op::Convolve(Convolve { channels, kernel }) => {
            let units = |each: u32| Cols::blocks(UNIT_ROWS * each, channels * each);
            match role {
                Role::X | Role::B | Role::C | Role::Out => Some(exchange(wire, units(1))),
                Role::Conv => Some(vector(units(*kernel))),
                Role::Bias => Some(vector(units(1))),
                Role::State => Some(state_of(program, units(kernel - 1))),
                _ => None,
            }
        }
        Op::Scan(scan) => {
            let &Scan { heads, head_dim, groups, state, kernel, scales: _, gate } = scan;
            let of_head = Cols::blocks(head_dim, heads * head_dim);
            let of_group = Cols { div: heads / groups, ..Cols::blocks(state, groups * state) };
            let channels = heads * head_dim + 2 * groups * state;
            match role {
                Role::X => Some(exchange(wire, of_head)),
                Role::Out => Some(Want { rows: of_part(rows), ..exchange(wire, of_head) }),
                Role::Gate => gate.map(|_| exchange(wire, of_head)),
                Role::B | Role::C => Some(exchange(wire, of_group)),
                Role::Step => Some(exchange(wire, Cols::all(heads))),
                Role::Conv => Some(vector(Cols::all(channels.saturating_mul(kernel)))),
                Role::Bias => Some(vector(Cols::all(channels))),
                Role::ALog | Role::D | Role::DtBias => Some(vector(Cols::all(heads))),
                Role::State => {
                    let cols = state * head_dim + (kernel - 1) * (head_dim + 2 * state);
                    let of_state = state_of(program, Cols::blocks(cols, heads * cols));
                    Some(Want { rows: of_part(of_state.rows), ..of_state })
                }
                _ => None,
            }
        }
        Op::GroupNorm(GroupNorm { width, groups, eps: _, gate }) => {
            let of_group = Cols::blocks(width / groups, *width);
            match role {
                Role::X | Role::Out => Some(exchange(wire, of_group)),
                Role::Gate => gate.map(|_| exchange(wire, of_group)),
                Role::NormWeight => Some(vector(of_group)),
                _ => None,
            }
        }
        Op::Combine(Combine { width, slots, shared, scale: _, adds }) => match role {
            Role::X | Role::Out => Some(exchange(wire, Cols::blocks(UNIT_ROWS, *width))),
            Role::Shares => Some(exchange(DType::F32, Cols::all(*slots))),
            Role::Gate => shared.map(|_| exchange(DType::F32, Cols::all(1))),
            Role::Residual => adds.then(|| private(DType::F32, Cols::blocks(UNIT_ROWS, *width))),
            _ => None,
        },
        Op::Report => match role {
            Role::Token => Some(token),
            Role::Out => Some(output(DType::I32, Cols::all(1))),
            _ => None,
        },
        Op::Embed { .. } | Op::Join { .. } => {
            let everywhere = matches!(grid.op, Op::Embed { everywhere: true, .. });
            let blocks = columns_of_sum(table_width(grid, program), everywhere);
            match role {
                Role::Token => Some(token),
                Role::Table => Some(Want {
                    space: Space::Constant,
                    dtype: weights,
                    rows: Rows::Token,
                    cols: blocks,
                    extent: Extent::Table,
                }),
                // What the step before left, of which every task takes the norm.
                Role::X => Some(exchange(wire, Cols::all(table_width(grid, program)))),
                Role::Residual => Some(private(DType::F32, blocks)),
                Role::Out | Role::Given => Some(exchange(wire, blocks)),
                _ => None,
            }
        }
        Op::MatVec(m) => {
            let units = m.units();
            let table = program.looked_up(grid);
            // A task takes all slots, or one.
            let (all_slots, table_of_slot) = (m.slots > 1, table.filter(|_| m.slots == 1));
            // Columns of one slot where each has its own, side by side; of all slots if parts are dealt.
            let of_slots = |cols: Cols, width: u32| match table_of_slot {
                Some(table) if grid.is_dealt() => Cols::all(width.saturating_mul(table.cols)),
                Some(table) => Cols { stride_j: width, limit: width.saturating_mul(table.cols), ..cols },
                None => cols,
            };
            // Or all of them have the same input.
            let input_cols = program.buffers[operand.buffer.index()].cols;
            let shared_input = input_cols == m.k;
            match role {
                Role::Choices if all_slots => Some(exchange(DType::I32, Cols::all(m.slots))),
                // Slots that add to one residual one after another would have no order.
                Role::Choices if matches!(m.epilogue, Epilogue::Residual { .. }) => None,
                // The entry of a table of choices, or what else each slot has one of.
                Role::Choices => table.map(|_| exchange(DType::I32, of_slots(Cols::all(1), 1))),
                Role::Shares => table_of_slot.map(|_| exchange(DType::F32, of_slots(Cols::all(1), 1))),
                // Before the inputs of slots: what its SM has is one vector, so a slot has no input of its own there.
                Role::X if m.own_input => Some(private(DType::F32, Cols::all(m.k))),
                Role::X if table_of_slot.is_some() && !shared_input => {
                    let pitch = table.map_or(m.k, |table| input_cols / table.cols.max(1)).max(m.k);
                    Some(exchange(wire, of_slots(Cols::all(m.k), pitch)))
                }
                Role::X => Some(exchange(wire, Cols::all(m.inputs()))),
                Role::NormWeight => m.norm.map(|_| vector(Cols::all(m.k))),
                Role::NormBias => m.norm.filter(|n| n.kind == NormKind::Layer).map(|_| vector(Cols::all(m.k))),
                Role::Weight => Some(Want {
                    space: Space::Weight,
                    dtype: weights,
                    // One of the parts that a table chooses among, or all there is (`tables` judges the table).
                    rows: if matches!(operand.rows, Rows::Lookup(_)) { operand.rows } else { Rows::Units },
                    cols: Cols::blocks(1, units),
                    extent: Extent::Weight { rows: m.rows.saturating_mul(parts(operand, program)), k: m.k },
                }),
                Role::Bias => {
                    let bias = vector(Cols::blocks(m.unit_rows, units.saturating_mul(m.unit_rows)));
                    Some(match table {
                        Some(table) => Want { rows: operand.rows, extent: Extent::Parts(table.bound), ..bias },
                        None => bias,
                    })
                }
                Role::Residual => Some(private(DType::F32, Cols::blocks(UNIT_ROWS, m.rows))),
                Role::Out => match m.epilogue {
                    Epilogue::Gated(_) | Epilogue::GatedBy { .. } | Epilogue::Clamped(_) => {
                        let cols = Cols::blocks(GATED_INTERLEAVE, m.rows / 2);
                        // Slots are whole units.
                        Some(exchange(wire, of_slots(cols, units.saturating_mul(GATED_INTERLEAVE))))
                    }
                    Epilogue::Scores => Some(exchange(DType::F32, Cols::blocks(m.unit_rows, m.rows))),
                    _ => Some(exchange(wire, of_slots(Cols::blocks(m.unit_rows, m.rows), m.rows))),
                },
                Role::Logits => Some(output(DType::F32, Cols::blocks(UNIT_ROWS, m.rows))),
                Role::Best => {
                    let cols = Cols { stride_j: 2, limit: grid.second.extent().saturating_mul(2), ..Cols::all(2) };
                    Some(exchange(DType::I32, cols))
                }
                _ => None,
            }
        }
        Op::Attention(a) => {
            let (q_cols, kv_cols) = (a.heads * a.head_dim, a.kv_heads() * a.head_dim);
            let last = Some(a.splits - 1);
            let head =
                Cols { stride: a.head_dim, div: a.group / a.heads_per_task, limit: kv_cols, ..Cols::all(a.head_dim) };
            // Heads of a cache row start where a copy may start.
            let pitch = (a.head_dim * cache.bytes() as u32).next_multiple_of(CACHE_HEAD_BYTES) / cache.bytes() as u32;
            let cached = Cols { stride: pitch, limit: a.kv_heads() * pitch, ..head };
            let rows_of_cache =
                |rows, cols| Want { space: Space::Cache, dtype: cache, rows, cols, extent: Extent::PositionsShared };
            let all = if program.rows == 1 { Rows::One } else { Rows::All };
            let of_step = |cols| Want { rows: all, ..exchange(wire, cols) };
            let projection = |norm: &Option<QkNormAttr>| norm.is_some_and(|n| matches!(n.span, QkNormSpan::Projection));
            // A task's heads may be any of all heads, so it gets the gains of all.
            let norm_weight = |norm: &Option<QkNormAttr>, all_heads: u32| {
                norm.map(|n| match n.span {
                    QkNormSpan::Head => vector(Cols::all(a.head_dim)),
                    QkNormSpan::OwnGains | QkNormSpan::Projection => vector(Cols::all(all_heads)),
                })
            };
            match role {
                Role::Q if projection(&a.q_norm) => Some(exchange(wire, Cols::all(q_cols))),
                Role::Q => Some(exchange(wire, Cols::blocks(a.heads_per_task * a.head_dim, q_cols))),
                Role::K if projection(&a.k_norm) => Some(of_step(Cols { only_j: last, ..Cols::all(kv_cols) })),
                Role::K | Role::V => Some(of_step(Cols { only_j: last, ..head })),
                Role::Gate => {
                    gates(&grid.op).then(|| exchange(wire, Cols::blocks(a.heads_per_task * a.head_dim, q_cols)))
                }
                Role::Sinks => {
                    a.sinks.then(|| vector(Cols { only_j: last, ..Cols::blocks(a.heads_per_task, a.heads) }))
                }
                Role::QNormWeight => norm_weight(&a.q_norm, q_cols),
                Role::KNormWeight => norm_weight(&a.k_norm, kv_cols),
                Role::Rope => (a.rotary > 0).then(|| Want {
                    space: Space::Constant,
                    dtype: DType::F32,
                    rows: Rows::Current,
                    cols: Cols::all(a.rotary),
                    extent: Extent::Positions,
                }),
                // The KV head's scale of keys and its scale of values, side by side.
                Role::CacheScales => (cache == DType::E4m3).then(|| {
                    vector(Cols { stride: 2, div: a.group / a.heads_per_task, limit: 2 * a.kv_heads(), ..Cols::all(2) })
                }),
                Role::HistoryK | Role::HistoryV => Some(rows_of_cache(Rows::History, cached)),
                Role::AppendK | Role::AppendV => {
                    Some(rows_of_cache(Rows::Current, Cols { first: true, only_j: last, ..cached }))
                }
                Role::Out if a.splits == 1 => Some(exchange(wire, Cols::blocks(a.heads_per_task * a.head_dim, q_cols))),
                Role::Out => {
                    let record = a.heads_per_task * (a.head_dim + PARTIAL_HEADER);
                    let limit = a.head_groups() * a.splits * record;
                    let cols = Cols { stride: a.splits * record, stride_j: record, limit, ..Cols::all(record) };
                    Some(exchange(DType::F32, cols))
                }
                _ => None,
            }
        }
        Op::AttentionMerge { head_dim, splits, heads_per_task, gate } => match role {
            Role::Gate => gate.then(|| exchange(wire, Cols::blocks(*head_dim, grid.n * head_dim))),
            Role::Partial => {
                let records = splits * heads_per_task * (head_dim + PARTIAL_HEADER);
                let limit = grid.n / heads_per_task * records;
                Some(exchange(DType::F32, Cols { div: *heads_per_task, ..Cols::blocks(records, limit) }))
            }
            Role::Out => Some(exchange(wire, Cols::blocks(*head_dim, grid.n * head_dim))),
            _ => None,
        },
        Op::NormAdd { norm, width, everywhere, .. } => match role {
            Role::X => Some(exchange(wire, Cols::all(*width))),
            Role::NormWeight => Some(vector(Cols::all(*width))),
            Role::NormBias => (norm.kind == NormKind::Layer).then(|| vector(Cols::all(*width))),
            Role::Residual => Some(private(DType::F32, columns_of_sum(*width, *everywhere))),
            Role::Out => Some(exchange(wire, Cols::blocks(UNIT_ROWS, *width))),
            _ => None,
        },
    }
}

/// What the elements of an exchange buffer are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Meaning {
    Activations,
    /// Arg-max pairs.
    Best,
    /// Entries of a table.
    Choices,
    /// How much each of them counts.
    Shares,
    /// Of experts.
    Scores,
    /// Records of split attention in one layout.
    Partial {
        head_dim: u32,
        splits: u32,
        heads_per_task: u32,
        /// Whether who merges them multiplies by a gate.
        gate: bool,
    },
}

/// An exchange buffer means one thing to all grids that touch it. Types cannot tell: fp32 activations and fp32 records are
/// alike.
fn meanings(id: GridId, grid: &Grid, program: &Program, uses: &mut [Option<(Meaning, GridId)>], found: &mut Found) {
    for operand in &grid.operands {
        if program.buffers[operand.buffer.index()].space != Space::Exchange {
            continue;
        }
        let meaning = match (&grid.op, operand.role) {
            (_, Role::Best) => Meaning::Best,
            (Op::Route(_), Role::Out) | (_, Role::Choices) => Meaning::Choices,
            (_, Role::Shares) => Meaning::Shares,
            (Op::Route(_), Role::X) | (Op::Combine(_), Role::Gate) => Meaning::Scores,
            (Op::MatVec(MatVec { epilogue: Epilogue::Scores, .. }), Role::Out) => Meaning::Scores,
            (&Op::AttentionMerge { head_dim, splits, heads_per_task, gate }, Role::Partial) => {
                Meaning::Partial { head_dim, splits, heads_per_task, gate }
            }
            (&Op::Attention(Attention { head_dim, splits, heads_per_task, gate, .. }), Role::Out) if splits > 1 => {
                Meaning::Partial { head_dim, splits, heads_per_task, gate }
            }
            _ => Meaning::Activations,
        };
        match &mut uses[operand.buffer.index()] {
            Some((other, _)) if *other == meaning => {}
            Some((other, first)) => found.add_with(Rule::MixedUse, Entity::Grid(id), || {
                let message = format!("touches {} as {meaning:?}, expected {other:?}", operand.buffer);
                (message, vec![note(Entity::Grid(*first), "touches it so"), note(Entity::Buffer(operand.buffer), "")])
            }),
            empty => *empty = Some((meaning, id)),
        }
    }
}

/// The token is the winning row of the head and indexes the table, so the table must have as many rows.
fn tokens_in_table(program: &Program, found: &mut Found) {
    let heads = (0..).zip(&program.grids).filter_map(|(g, grid)| match &grid.op {
        Op::MatVec(MatVec { rows, epilogue: Epilogue::Logits { .. }, .. }) => Some((GridId(g), *rows)),
        _ => None,
    });
    let Some((head, rows)) = heads.max_by_key(|(_, rows)| *rows) else { return };
    for (g, grid) in (0..).zip(&program.grids) {
        let Some(table) = grid.operand(Role::Table) else { continue };
        let table_rows = program.buffers[table.buffer.index()].rows;
        if table_rows < rows {
            found.add_with(Rule::OutOfBounds, Entity::Grid(GridId(g)), || {
                let message = format!("reads the row of a token below {rows}, {} has {table_rows} rows", table.buffer);
                let witness = vec![
                    note(Entity::Grid(head), "chooses among that many tokens"),
                    note(Entity::Buffer(table.buffer), "is the table"),
                ];
                (message, witness)
            });
        }
    }
}

/// A residual is made by the SMs that own its columns, or by every SM for itself. If all SMs have a column, what only one of them
/// adds to it is missing on the others.
fn makers_of_sums(program: &Program, found: &mut Found) {
    let mut first: BTreeMap<BufferId, (GridId, bool)> = BTreeMap::new();
    let told = |everywhere| if everywhere { "every SM" } else { "an owner of its columns" };
    for (g, grid) in (0..).zip(&program.grids) {
        let Some(residual) = grid.operand(Role::Residual) else { continue };
        let (id, everywhere) = (GridId(g), grid.op.everywhere());
        let (other, expected) = *first.entry(residual.buffer).or_insert((id, everywhere));
        if everywhere != expected {
            found.add_with(Rule::MixedUse, Entity::Grid(id), || {
                let (expected, makes) = (told(expected), told(everywhere));
                let message = format!("{} is made by {makes}, expected {expected}", residual.buffer);
                (message, vec![note(Entity::Grid(other), format!("is done by {expected}"))])
            });
        }
    }
}

/// Attention has alternatives, one for each regime. Those that extend one cache, with keys or with values, are the same
/// attention, shared out differently: a text must not depend on where a regime begins.
fn alternatives(program: &Program, found: &mut Found) {
    let mut first: BTreeMap<(BufferId, u32), (GridId, &Attention)> = BTreeMap::new();
    for (g, grid) in (0..).zip(&program.grids) {
        let Op::Attention(attention) = &grid.op else { continue };
        let id = GridId(g);
        let place = |id: GridId, role| program.grids[id.index()].operand(role).map(|o| (o.buffer, o.cols.base));
        let caches: Vec<_> = [Role::AppendK, Role::AppendV].into_iter().filter_map(|role| place(id, role)).collect();
        let Some(&(other, same)) = caches.iter().find_map(|cache| first.get(cache)) else {
            first.extend(caches.into_iter().map(|cache| (cache, (id, attention))));
            continue;
        };
        let alone = |a: &Attention| Attention { heads_per_task: 1, splits: 1, ..a.clone() };
        let roles = [
            Role::Q,
            Role::K,
            Role::V,
            Role::QNormWeight,
            Role::KNormWeight,
            Role::Rope,
            Role::CacheScales,
            Role::Sinks,
            Role::HistoryK,
            Role::HistoryV,
        ];
        let differs = roles.into_iter().find(|&role| place(id, role) != place(other, role));
        if alone(attention) != alone(same) || differs.is_some() {
            found.add_with(Rule::Alternatives, Entity::Grid(id), || {
                let what = differs.map_or("attributes".to_string(), |role| format!("`{}`", role.name()));
                let message = format!("extends a cache of {other}, expected the same attention, found other {what}");
                (message, vec![note(Entity::Grid(other), "extends it too")])
            });
        }
    }
    // Whoever leaves the heads of one buffer multiplies them by the same gate.
    type Place = (BufferId, u32);
    let mut gated: BTreeMap<Place, (GridId, Option<Place>)> = BTreeMap::new();
    for (g, grid) in (0..).zip(&program.grids).filter(|(_, grid)| makes_heads(&grid.op)) {
        let place = |role| grid.operand(role).map(|o| (o.buffer, o.cols.base));
        let (id, Some(out), gate) = (GridId(g), place(Role::Out), place(Role::Gate)) else { continue };
        let (other, expected) = *gated.entry(out).or_insert((id, gate));
        if gate != expected {
            found.add_with(Rule::Alternatives, Entity::Grid(id), || {
                let message = format!("makes the heads that {other} makes, expected the same `gate`, found another");
                (message, vec![note(Entity::Grid(other), "makes them too")])
            });
        }
    }
}

/// Whether an op leaves heads, and no records of their shares.
fn makes_heads(op: &Op) -> bool {
    matches!(op, Op::Attention(Attention { splits: 1, .. }) | Op::AttentionMerge { .. })
}
