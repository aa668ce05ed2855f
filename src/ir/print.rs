//! Owns `.mkir` on its way out: the one text form of programs and schedules.
//!
//! One entity a line, in id order, every field written; `;` starts a comment. Text after a `;` repeats
//! names for the reader and is not read back. Left out are only `rows=1` of a program, `phases=1`, `j=0`, `row=0`, granules of 512
//! bytes, absent options and false flags.
//!
//! ```text
//! mkir 2
//! program "tiny" context_max=64 weights=bf16 cache=bf16 wire=fp32
//! v0 = host pages [4, 8] <32 "pages" distinct unshared
//! b6 = weight bf16 [96, 32] "qkv.0.weight" from rows interleave=1 w2[0..+32] w3[0..+32 block 16 stride 48]
//! g3 = matvec "qkv.0" n=12 axis=1 site=qkv.l0 rows=96 k=32 norm=rms:0.00001 epilogue=store
//!   read x b5 one [0..32] ; x.0
//!   stream weight b6 units [1*i..+1 <12] ; qkv.0.weight
//! machine "cpu" sms=2 consumer_warps=1 loader_warps=4 registers_per_thread=24 reduce_batch=8
//! ring slots=12 slot_bytes=16384 arrivals=1 flight_high=4 flight_low=2 flight_free=8
//! smem ring 0..+196608
//! variant g3 units=6 chunk=32 block=6 units_per_warp=6 poll_batch=4
//! variant g4 warps_per_head=1 prefetch_v=1 swizzled=0 pitch=64
//! place b0@0 b1@- b2@32
//! regime r0 from 0
//!   e5 = b5[0..32] count=2 packets ; x.0
//!   t12 = g3[4..6] j=1 wait e5>=2 signal e7 e8 ; matvec qkv.0
//!   queue sm0: t0 t4
//!   stream sm0: t4+b6[0..6] t9+hist:128
//! ```
//!
//! Columns of an operand read as in [`Cols`]: `[base + stride*(i/div) + stride_j*j..+len <limit]`, or `[base..limit]`
//! where every launch index touches the same, then `first` and `only_j=`. Rows of a checkpoint tensor read
//! `w3[first..+rows block B stride S]`. A run in a stream is a task, then `+b6[lo..hi]` for units of a matrix or
//! `+hist:rows` for chunks of that many cache rows; with `after e3` the loader waits for that event first.
//!
//! A matrix that does not store values of its type says how: `code=int8 row_scales`, `code=int4 group=128:fp16 zeros`, or
//! `code=int4 group=32:fp16 minima`.
//!
//! Version 2 is resolved: a `variant` line for each matvec and each attention says what version 1 left to rules, weights and
//! constants have places in the pack, parts of shared memory are of a closed set, and a grid says by `site` what of the model it does; its name is for
//! readers. Clusters and groups of warps, always one in version 1, are gone. Version 1 is not read.

use super::op::{
    Attention, Combine, Convolve, Epilogue, GroupNorm, MatVec, Mix, NormAttr, Op, QkNormAttr, Route, Scan, UNIT_ROWS,
};
use super::program::{Buffer, Cols, Content, Grid, Home, Operand, Paging, Program, Rows, Second, Site};
use super::schedule::{Event, Machine, Regime, Ring, Run, Schedule, Scope, SmemPart, Source, Task, Wait};
use super::table::{Table, TableHome};
use super::variant::{AttentionVariant, MatVecVariant, Variant};
use super::{BufferId, GridId, TableId, TaskId};
use crate::dtype::Precision;
use crate::format::{CODE_BYTES, Format, Groups};
use crate::model::graph::{Act, ClampedSwiglu, ExpertGroups, GroupScore, NormKind, QueryScale, RowView, Score};
use std::fmt::{self, Write};

/// The version of the text form that [`print()`] writes and [`super::parse::parse`] reads.
pub const VERSION: u32 = 2;

/// Precedes a fault, at the end of the line that is guilty of it.
pub const FAULT: &str = "; error: ";

/// Buffers named on one `place` line.
const PLACES_PER_LINE: usize = 8;

/// The text form of a schedule; [`super::parse::parse`] reads it back.
pub fn print(schedule: &Schedule) -> String {
    // Destructured, here and below, so that a new field does not compile until it is printed.
    let Schedule { program, machine, variants, placement, regimes } = schedule;
    let mut text = String::new();
    let whole = |out: &mut String| -> fmt::Result {
        write_program(out, program)?;
        write_machine(out, machine)?;
        variants.iter().try_for_each(|(grid, variant)| write_variant(out, program, *grid, variant))?;
        write_placement(out, placement)?;
        regimes.iter().enumerate().try_for_each(|(r, regime)| write_regime(out, program, r, regime))
    };
    whole(&mut text).expect("a string takes every write");
    text
}

/// The text form of a program alone; [`super::parse::parse_program`] reads it back.
pub fn print_program(program: &Program) -> String {
    let mut text = String::new();
    write_program(&mut text, program).expect("a string takes every write");
    text
}

/// A text with faults at the ends of the lines that hold the given bytes; still `.mkir` if it was: they are comments.
pub fn mark(text: &str, faults: &[(usize, String)]) -> String {
    let mut order: Vec<&(usize, String)> = faults.iter().collect();
    order.sort_by_key(|(at, _)| *at);
    // A fault at the end of the text goes to the last line, not after its newline.
    let last = text.strip_suffix('\n').unwrap_or(text).len();
    let mut out = String::with_capacity(text.len());
    let mut done = 0;
    for (at, fault) in order {
        let from = (*at).min(last);
        let end = text.bytes().skip(from).position(|b| b == b'\n').map_or(text.len(), |newline| from + newline);
        out.push_str(text[done..end].trim_end_matches('\r'));
        out.push(' ');
        out.push_str(FAULT);
        fault.lines().enumerate().for_each(|(i, line)| {
            out.push_str(if i == 0 { "" } else { "; " });
            out.push_str(line.trim());
        });
        done = end;
    }
    out.push_str(&text[done..]);
    out
}

pub(super) fn act_name(act: Act) -> &'static str {
    match act {
        Act::Silu => "silu",
        Act::GeluErf => "gelu_erf",
        Act::GeluTanh => "gelu_tanh",
        Act::Relu => "relu",
        Act::SquaredRelu => "relu2",
    }
}

pub(super) fn score_name(score: Score) -> &'static str {
    match score {
        Score::Softmax => "softmax",
        Score::Sigmoid => "sigmoid",
    }
}

pub(super) fn group_score_name(score: GroupScore) -> &'static str {
    match score {
        GroupScore::Max => "max",
        GroupScore::SumOfTwo => "sum_of_two",
    }
}

pub(super) fn norm_name(kind: NormKind) -> &'static str {
    match kind {
        NormKind::Rms => "rms",
        NormKind::Layer => "layer",
    }
}

fn write_program(out: &mut String, program: &Program) -> fmt::Result {
    let Program { name, precision: Precision { weights, cache, wire }, context_max, rows, tables, buffers, grids } =
        program;
    writeln!(out, "mkir {VERSION}")?;
    write!(out, "program {} context_max={context_max}", Quoted(name))?;
    write_optional(out, "rows", &Some(rows).filter(|rows| **rows != 1))?;
    writeln!(out, " weights={weights} cache={cache} wire={wire}")?;
    for (t, table) in tables.iter().enumerate() {
        write_table(out, TableId::from(t), table)?;
    }
    for (b, buffer) in buffers.iter().enumerate() {
        write_buffer(out, BufferId::from(b), buffer)?;
    }
    for (g, grid) in grids.iter().enumerate() {
        write_grid(out, program, GridId::from(g), grid)?;
    }
    Ok(())
}

fn write_table(out: &mut String, id: TableId, table: &Table) -> fmt::Result {
    let Table { name, home, holds, rows, cols, bound, facts } = table;
    match home {
        TableHome::Host => write!(out, "{id} = host")?,
        TableHome::Device(buffer) => write!(out, "{id} = device {buffer}")?,
    }
    write!(out, " {} [{rows}, {cols}] <{bound} {}", holds.name(), Quoted(name))?;
    facts.iter().try_for_each(|fact| write!(out, " {}", fact.name()))?;
    out.push('\n');
    Ok(())
}

fn write_buffer(out: &mut String, id: BufferId, buffer: &Buffer) -> fmt::Result {
    let Buffer { name, space, dtype, coded, rows, cols, phases, words, paging, home, content } = buffer;
    write!(out, "{id} = {} {dtype} [{rows}, {cols}] ", space.name())?;
    if let Some(Format { code, groups, row_scales }) = coded {
        write!(out, "code={} ", code.name())?;
        if let Some(Groups { k, scale, zeros, minima }) = groups {
            let (zeros, minima) = (if *zeros { "zeros " } else { "" }, if *minima { "minima " } else { "" });
            write!(out, "group={k}:{} {zeros}{minima}", scale.name())?;
        }
        out.push_str(if *row_scales { "row_scales " } else { "" });
    }
    if *phases != 1 {
        write!(out, "phases={phases} ")?;
    }
    if *words {
        write!(out, "words ")?;
    }
    if let Some(Paging { table, rows }) = paging {
        write!(out, "pages={table}:{rows} ")?;
    }
    if *home != Home::of(*space) {
        match home {
            Home::Sm => write!(out, "home=sm ")?,
            Home::Device(device) => write!(out, "home=device:{device} ")?,
            Home::Everywhere => write!(out, "home=everywhere ")?,
            Home::Divided => write!(out, "home=divided ")?,
        }
    }
    write!(out, "{}", Quoted(name))?;
    match content {
        None => {}
        Some(Content::Rows { parts, interleave }) => {
            write!(out, " from rows interleave={interleave}")?;
            for part in parts {
                write_view(out, &part.view, part.rows)?;
            }
        }
        Some(Content::Vectors { parts, offset, scale, interleave }) => {
            write!(out, " from vectors offset={offset}")?;
            write_optional(out, "scale", &Some(scale).filter(|scale| **scale != 1.0))?;
            write!(out, " interleave={interleave}")?;
            for part in parts {
                match &part.view {
                    Some(view) => write_view(out, view, part.len)?,
                    None => write!(out, " zeros[..+{}]", part.len)?,
                }
            }
        }
        Some(Content::Tensor(tensor)) => write!(out, " from tensor {tensor}")?,
        Some(Content::RopeTable(rope)) => write!(out, " from rope {rope}")?,
        Some(Content::CacheScales(layer)) => write!(out, " from cache_scales {layer}")?,
    }
    out.push('\n');
    Ok(())
}

fn write_view(out: &mut String, view: &RowView, rows: u32) -> fmt::Result {
    let RowView { tensor, first, block, stride } = view;
    write!(out, " {tensor}[{first}..+{rows}")?;
    if (*block, *stride) != (1, 1) {
        write!(out, " block {block} stride {stride}")?;
    }
    out.write_char(']')
}

fn write_grid(out: &mut String, program: &Program, id: GridId, grid: &Grid) -> fmt::Result {
    let Grid { name, site, op, n, second, per_row, operands } = grid;
    let (axis, extent) = match second {
        Second::Axis(extent) => ("axis", extent),
        Second::Ordinal(extent) => ("ordinal", extent),
        Second::Dealt(extent) => ("dealt", extent),
    };
    write!(out, "{id} = {} {} n={n} {axis}={extent}", op.name(), Quoted(name))?;
    if let Some(Site { op, layer }) = site {
        write!(out, " site={}", op.name())?;
        layer.iter().try_for_each(|layer| write!(out, ".{layer}"))?;
    }
    write_flag(out, "per_row", *per_row)?;
    write_op(out, op)?;
    out.push('\n');
    for Operand { role, access, buffer, rows, cols } in operands {
        write!(out, "  {} {} {buffer} {}", access.name(), role.name(), rows.name())?;
        if let Rows::Lookup(table) = rows {
            write!(out, ":{table}")?;
        }
        write!(out, " {cols}")?;
        write_buffer_comment(out, program, *buffer)?;
    }
    Ok(())
}

fn write_scan(out: &mut String, scan: &Scan) -> fmt::Result {
    let Scan { heads, head_dim, groups, state, kernel, scales: [x, b, c, step], gate } = scan;
    write!(out, " heads={heads} head_dim={head_dim} groups={groups} state={state} kernel={kernel}")?;
    write!(out, " x_scale={x} b_scale={b} c_scale={c} step_scale={step}")?;
    write_optional(out, "gate_scale", gate)
}

fn write_op(out: &mut String, op: &Op) -> fmt::Result {
    match op {
        Op::Select | Op::Report => Ok(()),
        Op::Route(Route { experts, top_k, score, groups, normalise, scale }) => {
            write!(out, " experts={experts} top_k={top_k} score={}", score_name(*score))?;
            if let Some(ExpertGroups { count, kept, score }) = groups {
                write!(out, " groups={count} kept={kept} by={}", group_score_name(*score))?;
            }
            write_optional(out, "normalise", normalise)?;
            write!(out, " scale={scale}")
        }
        Op::Combine(Combine { width, slots, shared, scale, adds }) => {
            write!(out, " width={width} slots={slots}")?;
            write_optional(out, "shared", shared)?;
            write!(out, " scale={scale}")?;
            write_flag(out, "adds", *adds)
        }
        Op::Mix(Mix { key_heads, value_heads, key_dim, value_dim, kernel, eps, doubles }) => {
            write!(out, " key_heads={key_heads} value_heads={value_heads} key_dim={key_dim} value_dim={value_dim}")?;
            write!(out, " kernel={kernel} eps={eps}")?;
            write_flag(out, "doubles", *doubles)
        }
        Op::Convolve(Convolve { channels, kernel }) => write!(out, " channels={channels} kernel={kernel}"),
        Op::Scan(scan) => write_scan(out, scan),
        Op::GroupNorm(GroupNorm { width, groups, eps, gate }) => {
            write!(out, " width={width} groups={groups} eps={eps}")?;
            write_optional(out, "gate_scale", gate)
        }
        Op::Join { scale } => write!(out, " scale={scale}"),
        Op::Embed { scale, everywhere } => {
            write!(out, " scale={scale}")?;
            write_flag(out, "everywhere", *everywhere)
        }
        Op::MatVec(MatVec { rows, k, slots, norm, own_input, epilogue, unit_rows }) => {
            write!(out, " rows={rows} k={k}")?;
            write_optional(out, "slots", &Some(*slots).filter(|slots| *slots != 1))?;
            if let Some(norm) = norm {
                write!(out, " norm={}", NormText(norm))?;
            }
            write_flag(out, "own_input", *own_input)?;
            if *unit_rows != UNIT_ROWS {
                write!(out, " unit_rows={unit_rows}")?;
            }
            match epilogue {
                Epilogue::Store => write!(out, " epilogue=store"),
                Epilogue::Scores => write!(out, " epilogue=scores"),
                Epilogue::Act(act) => write!(out, " epilogue=act:{}", act_name(*act)),
                Epilogue::Gated(act) => write!(out, " epilogue=gated:{}", act_name(*act)),
                Epilogue::GatedBy { act, scale } => write!(out, " epilogue=gated_by:{} scale={scale}", act_name(*act)),
                Epilogue::Clamped(ClampedSwiglu { alpha, limit }) => {
                    write!(out, " epilogue=clamped alpha={alpha} limit={limit}")
                }
                Epilogue::Residual { scale } => write!(out, " epilogue=residual scale={scale}"),
                Epilogue::Logits { scale, softcap } => {
                    write!(out, " epilogue=logits scale={scale}")?;
                    write_optional(out, "softcap", softcap)
                }
            }
        }
        Op::Attention(attention) => write_attention(out, attention),
        Op::AttentionMerge { head_dim, splits, heads_per_task, gate } => {
            write!(out, " head_dim={head_dim} splits={splits} heads_per_task={heads_per_task}")?;
            write_flag(out, "gate", *gate)
        }
        Op::NormAdd { norm, width, scale, everywhere } => {
            write!(out, " norm={} width={width} scale={scale}", NormText(norm))?;
            write_flag(out, "everywhere", *everywhere)
        }
    }
}

fn write_attention(out: &mut String, attention: &Attention) -> fmt::Result {
    let Attention {
        heads_per_task,
        group,
        heads,
        head_dim,
        scale,
        softcap,
        window,
        rotary,
        interleaved,
        q_norm,
        k_norm,
        splits,
        sinks,
        gate,
        query_scale,
        norm_after_rope,
    } = attention;
    write!(out, " heads={heads} group={group} heads_per_task={heads_per_task} head_dim={head_dim} splits={splits}")?;
    write!(out, " scale={scale}")?;
    write_optional(out, "softcap", softcap)?;
    write_optional(out, "window", window)?;
    write!(out, " rotary={rotary}")?;
    write_flag(out, "interleaved", *interleaved)?;
    for (key, norm) in [("q_norm", q_norm), ("k_norm", k_norm)] {
        if let Some(QkNormAttr { norm, span }) = norm {
            write!(out, " {key}={}:{}", NormText(norm), span.name())?;
        }
    }
    write_flag(out, "norm_after_rope", *norm_after_rope)?;
    if let Some(QueryScale { beta, original }) = query_scale {
        write!(out, " query_scale={beta}:{original}")?;
    }
    write_flag(out, "sinks", *sinks)?;
    write_flag(out, "gate", *gate)
}

fn write_variant(out: &mut String, program: &Program, grid: GridId, variant: &Variant) -> fmt::Result {
    write!(out, "variant {grid}")?;
    match variant {
        Variant::MatVec(MatVecVariant { units, chunk, block, units_per_warp, poll_batch, granule, pass, shared }) => {
            write!(out, " units={units} chunk={chunk} block={block}")?;
            write!(out, " units_per_warp={units_per_warp} poll_batch={poll_batch}")?;
            write_optional(out, "granule", &Some(granule).filter(|bytes| **bytes != CODE_BYTES))?;
            write_optional(out, "pass", &Some(pass).filter(|pass| **pass != 0))?;
            write_flag(out, "shared", *shared)?;
        }
        Variant::Attention(AttentionVariant { warps_per_head, prefetch_v, swizzled, pitch }) => {
            let [prefetch_v, swizzled] = [prefetch_v, swizzled].map(|set| u32::from(*set));
            write!(out, " warps_per_head={warps_per_head} prefetch_v={prefetch_v} swizzled={swizzled} pitch={pitch}")?;
        }
    }
    if let Some(grid) = program.grids.get(grid.index()) {
        write!(out, " ; {}", Escaped(&grid.name))?;
    }
    out.push('\n');
    Ok(())
}

fn write_flag(out: &mut String, name: &str, set: bool) -> fmt::Result {
    if set { write!(out, " {name}") } else { Ok(()) }
}

fn write_optional(out: &mut String, key: &str, value: &Option<impl fmt::Display>) -> fmt::Result {
    match value {
        Some(value) => write!(out, " {key}={value}"),
        None => Ok(()),
    }
}

fn write_machine(out: &mut String, machine: &Machine) -> fmt::Result {
    let Machine {
        target,
        sms,
        devices,
        consumer_warps,
        loader_warps,
        registers_per_thread,
        loader_registers,
        reduce_batch,
        residual_cols,
        ring,
        smem,
    } = machine;
    let Ring { slots, slot_bytes, arrivals, flight_high, flight_low, flight_free, copiers } = ring;
    let many = Some(devices).filter(|devices| **devices != 1).map_or(String::new(), |n| format!("devices={n} "));
    let moved = Some(loader_registers).filter(|n| **n != 0).map_or(String::new(), |n| format!("loader_registers={n} "));
    write!(
        out,
        "machine {} sms={sms} {many}consumer_warps={consumer_warps} loader_warps={loader_warps} \
         registers_per_thread={registers_per_thread} {moved}reduce_batch={reduce_batch}",
        Quoted(target)
    )?;
    write_optional(out, "residual_cols", &Some(residual_cols).filter(|n| **n != 0))?;
    out.push('\n');
    write!(
        out,
        "ring slots={slots} slot_bytes={slot_bytes} arrivals={arrivals} flight_high={flight_high} \
         flight_low={flight_low} flight_free={flight_free}"
    )?;
    write_optional(out, "copiers", &Some(copiers).filter(|n| **n != 1))?;
    out.push('\n');
    for SmemPart { kind, offset, bytes } in smem {
        writeln!(out, "smem {} {offset}..+{bytes}", kind.name())?;
    }
    Ok(())
}

fn write_placement(out: &mut String, placement: &[Option<u64>]) -> fmt::Result {
    for (line, places) in placement.chunks(PLACES_PER_LINE).enumerate() {
        out.push_str("place");
        for (i, place) in places.iter().enumerate() {
            let id = BufferId::from(line * PLACES_PER_LINE + i);
            match place {
                Some(offset) => write!(out, " {id}@{offset}")?,
                None => write!(out, " {id}@-")?,
            }
        }
        out.push('\n');
    }
    Ok(())
}

fn write_regime(out: &mut String, program: &Program, index: usize, regime: &Regime) -> fmt::Result {
    let Regime { from_position, tasks, events, queues, streams } = regime;
    writeln!(out, "regime r{index} from {from_position}")?;
    for (e, Event { buffer, row, lo, hi, count, mechanism, scope, carried, proxy }) in (0..).zip(events) {
        write_number(out, "  e", e);
        write_number(out, " = b", buffer.0);
        write_range(out, *lo, *hi);
        if let Some(row) = row {
            write_number(out, " row=", *row);
        }
        write_number(out, " count=", *count);
        out.push(' ');
        out.push_str(mechanism.name());
        write_optional(out, "scope", &Some(scope.name()).filter(|_| *scope != Scope::Device))?;
        if *carried {
            out.push_str(" carried");
        }
        if *proxy {
            out.push_str(" proxy");
        }
        write_buffer_comment(out, program, *buffer)?;
    }
    let comments: Vec<String> = program.grids.iter().map(grid_comment).collect();
    for (t, task) in (0..).zip(tasks) {
        write_task(out, TaskId(t), task, comments.get(task.grid.index()));
    }
    for (sm, queue) in (0..).zip(queues) {
        write_number(out, "  queue sm", sm);
        out.push(':');
        queue.iter().for_each(|task| write_number(out, " t", task.0));
        out.push('\n');
    }
    for (sm, stream) in (0..).zip(streams) {
        write_number(out, "  stream sm", sm);
        out.push(':');
        for Run { task, source, after } in stream {
            write_number(out, " t", task.0);
            match source {
                Source::Units { buffer, lo, hi } => {
                    write_number(out, "+b", buffer.0);
                    write_range(out, *lo, *hi);
                }
                Source::History { rows } => write_number(out, "+hist:", *rows),
            }
            if let Some(event) = after {
                write_number(out, " after e", event.0);
            }
        }
        out.push('\n');
    }
    Ok(())
}

fn write_task(out: &mut String, id: TaskId, task: &Task, comment: Option<&String>) {
    let Task { grid, lo, hi, j, row, waits, signals } = task;
    write_number(out, "  t", id.0);
    write_number(out, " = g", grid.0);
    write_range(out, *lo, *hi);
    if *j != 0 {
        write_number(out, " j=", *j);
    }
    if *row != 0 {
        write_number(out, " row=", *row);
    }
    if !waits.is_empty() {
        out.push_str(" wait");
        for Wait { event, count } in waits {
            write_number(out, " e", event.0);
            write_number(out, ">=", *count);
        }
    }
    if !signals.is_empty() {
        out.push_str(" signal");
        signals.iter().for_each(|event| write_number(out, " e", event.0));
    }
    out.push_str(comment.map_or("", String::as_str));
    out.push('\n');
}

/// The comment at the end of the line of each task of a grid.
fn grid_comment(grid: &Grid) -> String {
    let op = grid.op.name();
    if grid.name == op { format!(" ; {op}") } else { format!(" ; {op} {}", Escaped(&grid.name)) }
}

/// `[lo..hi]`
fn write_range(out: &mut String, lo: u32, hi: u32) {
    write_number(out, "[", lo);
    write_number(out, "..", hi);
    out.push(']');
}

/// Appends `before` and a number. Every load of a kernel prints its schedule, a text of megabytes that is mostly numbers, so they do not pass
/// through `fmt`.
fn write_number(out: &mut String, before: &str, number: u32) {
    out.push_str(before);
    let (mut digits, mut at, mut rest) = ([0; 10], 10, number);
    loop {
        at -= 1;
        digits[at] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    out.push_str(std::str::from_utf8(&digits[at..]).expect("digits are ASCII"));
}

/// Ends a line with the name of a buffer, if there is such a buffer.
fn write_buffer_comment(out: &mut String, program: &Program, id: BufferId) -> fmt::Result {
    if let Some(buffer) = program.buffers.get(id.index()) {
        write!(out, " ; {}", Escaped(&buffer.name))?;
    }
    out.push('\n');
    Ok(())
}

/// As in the text form: `[16 + 8*(i/2)..+8 <48] first only_j=0`, or `[0..32]` where all launch indices touch the same.
impl fmt::Display for Cols {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Cols { base, stride, div, stride_j, len, limit, first, only_j } = self;
        let (by_i, by_j) = ((*stride, *div) != (0, 1), *stride_j != 0);
        if !by_i && !by_j && base.checked_add(*len) == Some(*limit) {
            write!(f, "[{base}..{limit}]")?;
        } else {
            let mut plus = "[";
            if *base != 0 || !(by_i || by_j) {
                write!(f, "{plus}{base}")?;
                plus = " + ";
            }
            if by_i {
                match div {
                    1 => write!(f, "{plus}{stride}*i")?,
                    _ => write!(f, "{plus}{stride}*(i/{div})")?,
                }
                plus = " + ";
            }
            if by_j {
                write!(f, "{plus}{stride_j}*j")?;
            }
            write!(f, "..+{len} <{limit}]")?;
        }
        f.write_str(if *first { " first" } else { "" })?;
        only_j.map_or(Ok(()), |j| write!(f, " only_j={j}"))
    }
}

pub(crate) struct NormText<'a>(pub(crate) &'a NormAttr);

impl fmt::Display for NormText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NormAttr { kind, eps } = self.0;
        write!(f, "{}:{eps}", norm_name(*kind))
    }
}

pub(crate) struct Quoted<'a>(pub(crate) &'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", Escaped(self.0))
    }
}

/// A name from outside on one line: no character of it can end the string or the line, or command a terminal.
struct Escaped<'a>(&'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut plain = 0;
        for (at, c) in self.0.char_indices().filter(|(_, c)| c.is_control() || matches!(c, '"' | '\\')) {
            f.write_str(&self.0[plain..at])?;
            match c {
                '"' | '\\' => write!(f, "\\{c}")?,
                _ => write!(f, "\\u{{{:x}}}", u32::from(c))?,
            }
            plain = at + c.len_utf8();
        }
        f.write_str(&self.0[plain..])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_stand_on_the_lines_that_hold_them() {
        let marked = |text: &str, faults: &[(usize, &str)]| {
            let faults: Vec<(usize, String)> = faults.iter().map(|(at, fault)| (*at, fault.to_string())).collect();
            mark(text, &faults)
        };
        assert_eq!(marked("one\ntwo\n", &[(5, "b"), (0, "a")]), "one ; error: a\ntwo ; error: b\n");
        assert_eq!(marked("one\ntwo", &[(3, "a"), (1, "b\n  c")]), "one ; error: b; c ; error: a\ntwo");
        assert_eq!(marked("one\ntwo\n", &[(8, "end"), (99, "past")]), "one\ntwo ; error: end ; error: past\n");
        assert_eq!(marked("é\r\n", &[(1, "a")]), "é ; error: a\n");
        assert_eq!(marked("", &[(0, "a")]), " ; error: a");
        assert_eq!(marked("one\n", &[]), "one\n");
    }

    #[test]
    fn names_from_outside_stay_on_their_line() {
        let name = "a\"b\\c\nd\u{1b}[31m é";
        assert_eq!(Quoted(name).to_string(), r#""a\"b\\c\u{a}d\u{1b}[31m é""#);
    }
}
