//! Owns the order of weight bytes: from checkpoint tensors to the streams that SMs consume, and the constants beside them.
//!
//! A pack is one blob: the stream of each SM, then the constant buffers in the order of their ids, each starting at a
//! multiple of [`crate::ir::layout::PLACE_ALIGN_BYTES`]. A stream is the units of the SM's tasks one after another; a unit of a matvec is
//! `granules(k)` granules of 512 bytes; a granule is row-major, 8 rows of 64 bytes of k. Rows past the end of the linear
//! and k past the end of a row are zero.
//!
//! Every regime streams the same bytes, so that one pack serves all positions.

use crate::dtype::DType;
use crate::error::Fault;
use crate::ir::layout::{GRANULE_ROW_BYTES, place_align, placed_bytes};
use crate::ir::op::{Op, Role, UNIT_ROWS};
use crate::ir::program::{Buffer, Content, Part, Space, VectorPart};
use crate::ir::schedule::{RunBytes, Schedule};
use crate::ir::{BufferId, SmId, TaskId};
use crate::model::graph::{ModelGraph, Rope, RowView};
use crate::model::weights::Weights;
use half::bf16;
use rayon::prelude::*;
use std::collections::BTreeMap;
use thiserror::Error;

/// Where everything lies in a pack; a function of the schedule alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// First byte of each SM's stream.
    pub stream_base: Vec<u64>,
    /// Bytes of each SM's stream, without padding.
    pub stream_bytes: Vec<u64>,
    /// First byte of each constant buffer, by buffer id; `None` for the other spaces.
    pub constant_offset: Vec<Option<u64>>,
    pub total_bytes: u64,
}

/// A schedule whose streams cannot be filled, or weights of another model. Faults of monobloc, unless the schedule came
/// from somebody else.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PackError {
    #[error("{sm} streams {task}, which is no matvec over weight rows")]
    NotWeights { sm: SmId, task: TaskId },
    #[error("{sm} streams {found} bytes for {task}, its {units} units take {expected}")]
    RunBytes { sm: SmId, task: TaskId, units: u32, expected: u64, found: u64 },
    #[error("{sm} streams {task} at byte {offset}, where {other} ends at byte {end}")]
    Overlap { sm: SmId, task: TaskId, offset: u64, other: TaskId, end: u64 },
    #[error("{sm} streams other units in {task} at byte {offset} than in an earlier regime")]
    Regimes { sm: SmId, task: TaskId, offset: u64 },
    #[error("{buffer} (`{name}`) has no content to pack")]
    NoContent { buffer: BufferId, name: String },
    #[error("{buffer} (`{name}`) has {parts} parts interleaved by {interleave}, expected 8 rows in all")]
    Interleave { buffer: BufferId, name: String, parts: usize, interleave: u32 },
    #[error("{buffer} (`{name}`) has rows of {cols} values, tensor `{tensor}` has {found}")]
    Cols { buffer: BufferId, name: String, cols: u32, tensor: String, found: usize },
    #[error("{buffer} (`{name}`) needs row {row} of tensor `{tensor}`, which has {rows}")]
    Row { buffer: BufferId, name: String, row: u64, tensor: String, rows: u64 },
    #[error("expected {expected} bytes to fill, found {found}")]
    Length { expected: u64, found: u64 },
    #[error("the pack takes {bytes} bytes, more than this machine can address")]
    Size { bytes: u64 },
}

impl From<PackError> for Fault {
    fn from(error: PackError) -> Fault {
        match error {
            PackError::Size { .. } => Fault::environment(error.to_string()),
            _ => Fault::internal(error.to_string()),
        }
    }
}

/// A whole pack in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightPack {
    pub layout: Layout,
    pub bytes: Vec<u8>,
}

/// Computes the layout of the pack for `schedule`.
pub fn layout(schedule: &Schedule) -> Layout {
    let sms = schedule.machine.sms as usize;
    let mut stream_bytes = vec![0u64; sms];
    for regime in &schedule.regimes {
        for (bytes, stream) in stream_bytes.iter_mut().zip(&regime.streams) {
            for run in stream {
                if let RunBytes::Fixed { offset, bytes: run_bytes } = run.bytes {
                    *bytes = (*bytes).max(offset.saturating_add(run_bytes));
                }
            }
        }
    }
    let mut total = 0u64;
    let mut take = |bytes: u64| {
        let at = total;
        total = place_align(total.saturating_add(bytes));
        at
    };
    let stream_base = stream_bytes.iter().map(|&bytes| take(bytes)).collect();
    let base = total;
    let places = schedule.program.buffers.iter().zip(&schedule.placement);
    let constant_offset = places
        .map(|(b, place)| place.filter(|_| b.space == Space::Constant).map(|at| base.saturating_add(at)))
        .collect();
    let total_bytes = base.saturating_add(schedule.arena_bytes(Space::Constant));
    Layout { stream_base, stream_bytes, constant_offset, total_bytes }
}

/// Fills a whole pack in memory.
pub fn pack(schedule: &Schedule, graph: &ModelGraph, weights: &Weights) -> Result<WeightPack, PackError> {
    let layout = layout(schedule);
    let too_large = PackError::Size { bytes: layout.total_bytes };
    let length = usize::try_from(layout.total_bytes).map_err(|_| too_large.clone())?;
    let mut bytes = vec![];
    bytes.try_reserve_exact(length).map_err(|_| too_large)?;
    bytes.resize(length, 0);
    let mut rest = bytes.as_mut_slice();
    let mut streams = vec![];
    for &stream in &layout.stream_bytes {
        let (head, tail) = rest.split_at_mut(place_align(stream) as usize);
        streams.push(&mut head[..stream as usize]);
        rest = tail;
    }
    streams
        .into_par_iter()
        .enumerate()
        .try_for_each(|(sm, out)| pack_stream(schedule, graph, weights, SmId::from(sm), out))?;
    pack_constants(schedule, graph, weights, rest)?;
    Ok(WeightPack { layout, bytes })
}

/// Hands out a pack piece by piece, in the order of its bytes and without a gap: each stream with its padding, then the
/// constants. Holds one piece at a time, so that a pack larger than memory can be written or uploaded.
pub fn pack_pieces<E: From<PackError>>(
    schedule: &Schedule,
    graph: &ModelGraph,
    weights: &Weights,
    mut piece: impl FnMut(u64, &[u8]) -> Result<(), E>,
) -> Result<Layout, E> {
    let layout = layout(schedule);
    let size = |bytes: u64| usize::try_from(bytes).map_err(|_| PackError::Size { bytes });
    let mut buffer = vec![];
    for (sm, (&base, &bytes)) in layout.stream_base.iter().zip(&layout.stream_bytes).enumerate() {
        buffer.clear();
        buffer.resize(size(place_align(bytes))?, 0);
        pack_stream(schedule, graph, weights, SmId::from(sm), &mut buffer[..bytes as usize])?;
        piece(base, &buffer)?;
    }
    let base = constants_base(&layout);
    buffer.clear();
    buffer.resize(size(layout.total_bytes - base)?, 0);
    pack_constants(schedule, graph, weights, &mut buffer)?;
    piece(base, &buffer)?;
    Ok(layout)
}

/// What a buffer holds, whatever its id: the same words, the same values.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct ContentKey(Vec<u32>);

impl ContentKey {
    fn of(b: &Buffer) -> ContentKey {
        fn view(key: &mut Vec<u32>, view: &RowView, rows: u32) {
            let RowView { tensor, first, block, stride } = view;
            key.extend([tensor.0, *first, *block, *stride, rows]);
        }
        let Buffer { name: _, space: _, dtype, rows, cols, phases: _, content } = b;
        let mut key = vec![*dtype as u32, *rows, *cols];
        match content {
            None => key.push(0),
            Some(Content::Rows { parts, interleave }) => {
                key.extend([1, *interleave]);
                parts.iter().for_each(|part| view(&mut key, &part.view, part.rows));
            }
            Some(Content::Vectors { parts, offset, interleave }) => {
                key.extend([2, offset.to_bits(), *interleave]);
                for part in parts {
                    match &part.view {
                        Some(of) => view(&mut key, of, part.len),
                        None => key.extend([u32::MAX, part.len]),
                    }
                }
            }
            Some(Content::Tensor(tensor)) => key.extend([3, tensor.0]),
            Some(Content::RopeTable(rope)) => key.extend([4, rope.0]),
        }
        ContentKey(key)
    }

    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

/// Names the bytes of a pack without making them: schedules of one model with the same name have the same pack, so that an
/// executor that holds one may run the other with it. blake3 of where everything lies and what it is.
///
/// # Errors
/// Streams that cannot be filled.
pub fn identity(schedule: &Schedule) -> Result<[u8; 32], PackError> {
    let Layout { stream_base, stream_bytes, constant_offset, total_bytes } = layout(schedule);
    let mut hasher = blake3::Hasher::new();
    // Numbers of 8 bytes, each list behind its length: nothing can be read in two ways.
    let mut add = |numbers: &[u64], content: &[u8]| {
        hasher.update(bytemuck::cast_slice(&[numbers.len() as u64, content.len() as u64]));
        hasher.update(bytemuck::cast_slice(numbers)).update(content).count()
    };
    add(&[total_bytes], &[]);
    add(&stream_base, &[]);
    add(&stream_bytes, &[]);
    for (offset, buffer) in constant_offset.iter().zip(&schedule.program.buffers) {
        // Ids shift when a candidate has more buffers of another kind.
        if let Some(offset) = offset {
            add(&[*offset], ContentKey::of(buffer).bytes());
        }
    }
    let contents: Vec<ContentKey> = schedule.program.buffers.iter().map(ContentKey::of).collect();
    for sm in 0..schedule.machine.sms {
        for run in weight_runs(schedule, SmId(sm))?.values() {
            let WeightRun { task: _, buffer, lo, hi, offset, bytes, unit_bytes, unit_rows } = run;
            let numbers = [sm, *lo, *hi, *unit_rows].map(u64::from).into_iter().chain([*offset, *bytes, *unit_bytes]);
            let content = contents.get(buffer.index()).map_or(&[][..], ContentKey::bytes);
            add(&numbers.collect::<Vec<u64>>(), content);
        }
    }
    Ok(*hasher.finalize().as_bytes())
}

/// Bytes of one pack that are also bytes of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Move {
    /// First byte in the pack that is there.
    pub from: u64,
    /// First byte in the pack that is to be.
    pub to: u64,
    pub bytes: u64,
}

/// By the first unit of a run: the unit behind it, and where its bytes are.
type UnitsAt = BTreeMap<u32, (u32, u64)>;

/// How the pack of `from` becomes that of `to`, two schedules of one model with the same weights: moves that fill all of it but
/// its padding, which is zero. Candidates give units to other SMs, so their packs hold the same bytes in another order, and
/// copying them where they lie costs a fraction of reading the weights again. `None`: some bytes of `to` are not in `from`.
///
/// # Errors
/// Streams that cannot be filled.
pub fn moves(from: &Schedule, to: &Schedule) -> Result<Option<Vec<Move>>, PackError> {
    let (from_layout, to_layout) = (layout(from), layout(to));
    let buffers = |of: &Schedule| -> Vec<ContentKey> { of.program.buffers.iter().map(ContentKey::of).collect() };
    let (from_contents, to_contents) = (buffers(from), buffers(to));
    // Units of each content that there is, and of as many rows, by the first of them: how many, and where.
    let mut there: BTreeMap<(&ContentKey, u32), UnitsAt> = BTreeMap::new();
    for (sm, base) in from_layout.stream_base.iter().enumerate() {
        for run in weight_runs(from, SmId::from(sm))?.values() {
            let Some(content) = from_contents.get(run.buffer.index()) else { return Ok(None) };
            there.entry((content, run.unit_rows)).or_default().insert(run.lo, (run.hi, base + run.offset));
        }
    }
    let mut moves: Vec<Move> = vec![];
    let mut push = |from: u64, to: u64, bytes: u64| match moves.last_mut() {
        Some(last) if last.from + last.bytes == from && last.to + last.bytes == to => last.bytes += bytes,
        _ => moves.push(Move { from, to, bytes }),
    };
    for (sm, base) in to_layout.stream_base.iter().enumerate() {
        for run in weight_runs(to, SmId::from(sm))?.values() {
            let Some(content) = to_contents.get(run.buffer.index()) else { return Ok(None) };
            let Some(units) = there.get(&(content, run.unit_rows)) else { return Ok(None) };
            let mut next = run.lo;
            while next < run.hi {
                let Some((&lo, &(hi, at))) = units.range(..=next).next_back() else { return Ok(None) };
                if hi <= next {
                    return Ok(None);
                }
                let (unit, end) = (run.unit_bytes, hi.min(run.hi));
                let to = base + run.offset + u64::from(next - run.lo) * unit;
                push(at + u64::from(next - lo) * unit, to, u64::from(end - next) * unit);
                next = end;
            }
        }
    }
    let constants = |layout: &Layout| layout.constant_offset.clone().into_iter().enumerate();
    let mut places: BTreeMap<&ContentKey, u64> = BTreeMap::new();
    for (b, offset) in constants(&from_layout) {
        if let (Some(offset), Some(content)) = (offset, from_contents.get(b)) {
            places.insert(content, offset);
        }
    }
    for ((b, offset), buffer) in constants(&to_layout).zip(&to.program.buffers) {
        let Some(offset) = offset else { continue };
        let there = to_contents.get(b).and_then(|content| places.get(content));
        let Some(&place) = there else { return Ok(None) };
        push(place, offset, placed_bytes(buffer));
    }
    Ok(Some(moves))
}

/// First byte of the arena of constants, which places of constants count from.
pub fn constants_base(layout: &Layout) -> u64 {
    match (layout.stream_base.last(), layout.stream_bytes.last()) {
        (Some(base), Some(bytes)) => place_align(base + bytes),
        _ => 0,
    }
}

/// Fills the stream of one SM; `out` has exactly `stream_bytes` bytes of it.
pub fn pack_stream(
    schedule: &Schedule,
    graph: &ModelGraph,
    weights: &Weights,
    sm: SmId,
    out: &mut [u8],
) -> Result<(), PackError> {
    out.fill(0);
    let runs = weight_runs(schedule, sm)?;
    let expected = runs.values().map(|r| r.offset + r.bytes).max().unwrap_or(0);
    if out.len() as u64 != expected {
        return Err(PackError::Length { expected, found: out.len() as u64 });
    }
    let mut rest = out;
    let mut at = 0u64;
    let mut pieces = vec![];
    for run in runs.values() {
        let (_, tail) = rest.split_at_mut((run.offset - at) as usize);
        let (bytes, tail) = tail.split_at_mut(run.bytes as usize);
        (rest, at) = (tail, run.offset + run.bytes);
        pieces.push((run, bytes));
    }
    pieces.into_par_iter().try_for_each(|(run, bytes)| pack_units(schedule, graph, weights, run, bytes))
}

/// Units `lo..hi` of a weight buffer at one place of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
struct WeightRun {
    task: TaskId,
    buffer: BufferId,
    lo: u32,
    hi: u32,
    offset: u64,
    bytes: u64,
    unit_bytes: u64,
    unit_rows: u32,
}

/// The weight runs of an SM over all regimes, by offset. Adjacent runs of one task are one.
fn weight_runs(schedule: &Schedule, sm: SmId) -> Result<BTreeMap<u64, WeightRun>, PackError> {
    let program = &schedule.program;
    let mut all: BTreeMap<u64, WeightRun> = BTreeMap::new();
    for regime in &schedule.regimes {
        let mut joined: Vec<(TaskId, u64, u64)> = vec![];
        for run in regime.streams.get(sm.index()).into_iter().flatten() {
            if let RunBytes::Fixed { offset, bytes } = run.bytes {
                match joined.last_mut() {
                    Some((task, first, length)) if *task == run.task && *first + *length == offset => *length += bytes,
                    _ => joined.push((run.task, offset, bytes)),
                }
            }
        }
        for (id, offset, bytes) in joined {
            let not_weights = PackError::NotWeights { sm, task: id };
            let task = regime.tasks.get(id.index()).ok_or(not_weights.clone())?;
            let grid = program.grids.get(task.grid.index()).ok_or(not_weights.clone())?;
            let (Op::MatVec(m), Some(weight)) = (&grid.op, grid.operand(Role::Weight)) else { return Err(not_weights) };
            let dtype = program.buffers.get(weight.buffer.index()).ok_or(not_weights)?.dtype;
            let unit_bytes = m.unit_bytes(dtype.bytes() as u32);
            let units = task.hi.saturating_sub(task.lo);
            let expected = u64::from(units) * unit_bytes;
            if bytes != expected {
                return Err(PackError::RunBytes { sm, task: id, units, expected, found: bytes });
            }
            if bytes == 0 {
                continue;
            }
            let (lo, hi) = (task.lo, task.hi);
            let unit_rows = m.unit_rows;
            let run = WeightRun { task: id, buffer: weight.buffer, lo, hi, offset, bytes, unit_bytes, unit_rows };
            if let Some(known) = all.get(&offset) {
                let same = (known.buffer, known.lo, known.hi) == (run.buffer, run.lo, run.hi);
                if !same {
                    return Err(PackError::Regimes { sm, task: id, offset });
                }
                continue;
            }
            all.insert(offset, run);
        }
    }
    for (run, next) in all.values().zip(all.values().skip(1)) {
        let end = run.offset + run.bytes;
        if next.offset < end {
            return Err(PackError::Overlap { sm, task: next.task, offset: next.offset, other: run.task, end });
        }
    }
    Ok(all)
}

/// The tensor row behind row `r` of unit `u` of `unit_rows`; `None` is a row of zeros.
fn unit_row(parts: &[Part], interleave: u32, unit_rows: u32, u: u32, r: u32) -> Option<(&Part, u32)> {
    if interleave > 1 {
        let part = parts.get((r / interleave) as usize)?;
        let row = u64::from(u) * u64::from(interleave) + u64::from(r % interleave);
        return (row < u64::from(part.rows)).then_some((part, row as u32));
    }
    let mut row = u64::from(u) * u64::from(unit_rows) + u64::from(r);
    for part in parts {
        if row < u64::from(part.rows) {
            return Some((part, row as u32));
        }
        row -= u64::from(part.rows);
    }
    None
}

fn checked_row(
    id: BufferId,
    b: &Buffer,
    graph: &ModelGraph,
    view: &RowView,
    i: u32,
    rows: u64,
) -> Result<u32, PackError> {
    // 64-bit, so that a view of another model cannot wrap into a wrong row.
    let block = u64::from(view.block.max(1));
    let i = u64::from(i);
    let row = u64::from(view.first) + i / block * u64::from(view.stride) + i % block;
    if row < rows {
        return Ok(row as u32);
    }
    Err(PackError::Row { buffer: id, name: b.name.clone(), row, tensor: graph.tensor(view.tensor).name.clone(), rows })
}

fn pack_units(
    schedule: &Schedule,
    graph: &ModelGraph,
    weights: &Weights,
    run: &WeightRun,
    out: &mut [u8],
) -> Result<(), PackError> {
    let id = run.buffer;
    let buffer = &schedule.program.buffers[id.index()];
    let Some(Content::Rows { parts, interleave }) = &buffer.content else {
        return Err(PackError::NoContent { buffer: id, name: buffer.name.clone() });
    };
    if *interleave > 1 && parts.len() as u64 * u64::from(*interleave) != u64::from(UNIT_ROWS) {
        let (name, parts, interleave) = (buffer.name.clone(), parts.len(), *interleave);
        return Err(PackError::Interleave { buffer: id, name, parts, interleave });
    }
    for part in parts {
        let found = weights.cols(part.view.tensor);
        if found != buffer.cols as usize {
            let (name, cols, tensor) = (buffer.name.clone(), buffer.cols, graph.tensor(part.view.tensor).name.clone());
            return Err(PackError::Cols { buffer: id, name, cols, tensor, found });
        }
    }
    let cols = buffer.cols as usize;
    out.par_chunks_exact_mut(run.unit_bytes as usize).zip(run.lo..run.hi).try_for_each_init(
        || (vec![bf16::ZERO; cols], vec![0.0f32; cols]),
        |(narrow, wide), (out, u)| {
            for r in 0..run.unit_rows {
                let Some((part, i)) = unit_row(parts, *interleave, run.unit_rows, u, r) else { continue };
                let tensor = part.view.tensor;
                let row = checked_row(id, buffer, graph, &part.view, i, u64::from(weights.rows(tensor)))?;
                if buffer.dtype == DType::Bf16 {
                    weights.read_row_bf16(tensor, row, narrow);
                    scatter(bytemuck::cast_slice(narrow), r, run.unit_rows, out);
                } else {
                    weights.read_row_f32(tensor, row, wide);
                    scatter(bytemuck::cast_slice(wide), r, run.unit_rows, out);
                }
            }
            Ok(())
        },
    )
}

/// Spreads row `r` over the granules of its unit of `unit_rows` rows, 64 bytes to each part of each.
fn scatter(row: &[u8], r: u32, unit_rows: u32, unit: &mut [u8]) {
    let row_bytes = GRANULE_ROW_BYTES as usize;
    let places = unit.chunks_exact_mut(row_bytes).skip(r as usize).step_by(unit_rows.max(1) as usize);
    for (piece, place) in row.chunks(row_bytes).zip(places) {
        place[..piece.len()].copy_from_slice(piece);
    }
}

/// Fills the constants; `out` is everything behind the last stream.
pub fn pack_constants(
    schedule: &Schedule,
    graph: &ModelGraph,
    weights: &Weights,
    out: &mut [u8],
) -> Result<(), PackError> {
    let layout = layout(schedule);
    let base = constants_base(&layout);
    if out.len() as u64 != layout.total_bytes - base {
        return Err(PackError::Length { expected: layout.total_bytes - base, found: out.len() as u64 });
    }
    out.fill(0);
    for (b, (buffer, offset)) in schedule.program.buffers.iter().zip(&layout.constant_offset).enumerate() {
        let Some(offset) = *offset else { continue };
        let begin = (offset - base) as usize;
        let out = &mut out[begin..begin + placed_bytes(buffer) as usize];
        pack_constant(BufferId::from(b), buffer, graph, weights, out)?;
    }
    Ok(())
}

fn pack_constant(
    id: BufferId,
    buffer: &Buffer,
    graph: &ModelGraph,
    weights: &Weights,
    out: &mut [u8],
) -> Result<(), PackError> {
    match &buffer.content {
        Some(Content::Vectors { parts, offset, interleave }) => {
            let values = vectors(id, buffer, graph, weights, parts, *offset, *interleave)?;
            write_values(buffer.dtype, &values, out);
        }
        Some(Content::Tensor(tensor)) => {
            let tensor = *tensor;
            let (found, rows) = (weights.cols(tensor), u64::from(weights.rows(tensor)));
            let name = || (buffer.name.clone(), graph.tensor(tensor).name.clone());
            if found != buffer.cols as usize {
                let (name, tensor) = name();
                return Err(PackError::Cols { buffer: id, name, cols: buffer.cols, tensor, found });
            }
            if rows < u64::from(buffer.rows) {
                let (name, tensor) = name();
                return Err(PackError::Row { buffer: id, name, row: u64::from(buffer.rows) - 1, tensor, rows });
            }
            let row_bytes = found * buffer.dtype.bytes();
            out.par_chunks_exact_mut(row_bytes.max(1)).zip(0..buffer.rows).for_each_init(
                || (vec![bf16::ZERO; found], vec![0.0f32; found]),
                |(narrow, wide), (out, row)| {
                    if buffer.dtype == DType::Bf16 {
                        weights.read_row_bf16(tensor, row, narrow);
                        out.copy_from_slice(bytemuck::cast_slice(narrow));
                    } else {
                        weights.read_row_f32(tensor, row, wide);
                        out.copy_from_slice(bytemuck::cast_slice(wide));
                    }
                },
            );
        }
        Some(Content::RopeTable(rope)) => {
            let no_content = PackError::NoContent { buffer: id, name: buffer.name.clone() };
            let rope = graph.ropes.get(rope.index()).ok_or(no_content)?;
            let cols = 2 * rope.inv_freq.len();
            let rows = out.par_chunks_exact_mut((cols * buffer.dtype.bytes()).max(1)).zip(0..buffer.rows);
            rows.for_each(|(out, position)| write_values(buffer.dtype, &rope_row(rope, position), out));
        }
        Some(Content::Rows { .. }) | None => {
            return Err(PackError::NoContent { buffer: id, name: buffer.name.clone() });
        }
    }
    Ok(())
}

/// Values of a vector buffer, in the order of its matvec's rows: entry `8 u + r` belongs to row `r` of unit `u`.
fn vectors(
    id: BufferId,
    buffer: &Buffer,
    graph: &ModelGraph,
    weights: &Weights,
    parts: &[VectorPart],
    offset: f32,
    interleave: u32,
) -> Result<Vec<f32>, PackError> {
    let mut columns = vec![];
    for part in parts {
        columns.push(match &part.view {
            None => vec![0.0; part.len as usize],
            Some(view) => {
                let whole = weights.vector_f32(view.tensor);
                (0..part.len)
                    .map(|i| Ok(whole[checked_row(id, buffer, graph, view, i, whole.len() as u64)? as usize] + offset))
                    .collect::<Result<_, PackError>>()?
            }
        });
    }
    let mut values = vec![0.0; buffer.cols as usize];
    if interleave > 1 {
        for (p, column) in columns.iter().enumerate() {
            for (i, &value) in column.iter().enumerate() {
                let (interleave, at) = (interleave as usize, i);
                let place = at / interleave * UNIT_ROWS as usize + p * interleave + at % interleave;
                if let Some(slot) = values.get_mut(place) {
                    *slot = value;
                }
            }
        }
    } else {
        values.iter_mut().zip(columns.iter().flatten()).for_each(|(slot, value)| *slot = *value);
    }
    Ok(values)
}

/// `[cos(p f_0) .., sin(p f_0) ..] * scale`; the angle is rounded to fp32, as transformers computes it.
fn rope_row(rope: &Rope, position: u32) -> Vec<f32> {
    let angles = || rope.inv_freq.iter().map(|f| f64::from(position as f32 * f));
    angles().map(|a| a.cos() as f32 * rope.scale).chain(angles().map(|a| a.sin() as f32 * rope.scale)).collect()
}

fn write_values(dtype: DType, values: &[f32], out: &mut [u8]) {
    for (value, out) in values.iter().zip(out.chunks_exact_mut(dtype.bytes())) {
        match dtype {
            DType::Bf16 => out.copy_from_slice(&bf16::from_f32(*value).to_le_bytes()),
            _ => out.copy_from_slice(&value.to_le_bytes()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::candidate::Candidate;
    use crate::dtype::Precision;
    use crate::ir::program::Grid;
    use crate::ir::schedule::Regime;
    use crate::lower::lower;
    use crate::model::config::{Imported, import, import_config_only};
    use crate::schedule::schedule;
    use crate::target::Target;
    use std::path::Path;

    /// Nothing divides anything: 40 = 32 + 8 of k, 44 of k, 61 rows of the head, 22 units of 4 gate and 4 up rows.
    const ODD: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 40,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "intermediate_size": 86,
        "num_hidden_layers": 2, "vocab_size": 61, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "max_position_embeddings": 64, "tie_word_embeddings": false, "attention_bias": true, "mlp_bias": true,
        "torch_dtype": "bfloat16"}"#;

    fn place(imported: &Imported, weights: DType, change: impl Fn(&mut Candidate)) -> Schedule {
        let target = Target::builtin("h200").unwrap();
        let precision = Precision { weights, cache: DType::F32, wire: DType::F32 };
        let mut candidate = Candidate { sms: 3, ..Candidate::default_for(&imported.graph, &target, precision) };
        change(&mut candidate);
        let program = lower(&imported.graph, "test", precision, 32, &candidate).unwrap();
        schedule(program, &target, &candidate).unwrap()
    }

    fn fixture(name: &str) -> Imported {
        import(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families").join(name)).unwrap()
    }

    fn value(dtype: DType, bytes: &[u8]) -> f32 {
        match dtype {
            DType::Bf16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
            _ => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
        }
    }

    /// Row `r` of unit `u` of a grid, as the graph's linears have it; zeros where there is none.
    fn wanted_row(imported: &Imported, grid: &str, unit_rows: u32, u: u32, r: u32, cols: usize) -> Vec<f32> {
        let (kind, layer) = grid.split_once('.').unwrap_or((grid, "0"));
        let layer = &imported.graph.layers[layer.parse::<usize>().unwrap()];
        let flat = unit_rows * u + r;
        let (linear, row) = match kind {
            "qkv" if flat < layer.attn.q.rows => (&layer.attn.q, flat),
            "qkv" if flat < layer.attn.q.rows + layer.attn.k.rows => (&layer.attn.k, flat - layer.attn.q.rows),
            "qkv" => (&layer.attn.v, flat - layer.attn.q.rows - layer.attn.k.rows),
            "o" => (&layer.attn.o, flat),
            "gate_up" if r < 4 => (layer.mlp.gate.as_ref().unwrap(), 4 * u + r),
            "gate_up" => (&layer.mlp.up, 4 * u + r - 4),
            "down" => (&layer.mlp.down, flat),
            _ => (&imported.graph.head, flat),
        };
        let mut values = vec![0.0; cols];
        if row < linear.rows {
            imported.weights.linear_row_f32(linear, row, &mut values);
        }
        values
    }

    fn check_streams(imported: &Imported, schedule: &Schedule, regime: &Regime, pack: &WeightPack) {
        let dtype = schedule.program.precision.weights;
        let granule_k = 64 / dtype.bytes();
        let mut runs = 0;
        for (sm, stream) in regime.streams.iter().enumerate() {
            for run in stream {
                let RunBytes::Fixed { offset, bytes } = run.bytes else { continue };
                let task = &regime.tasks[run.task.index()];
                let grid = &schedule.program.grids[task.grid.index()];
                let Op::MatVec(m) = &grid.op else { panic!("{} streams weights", grid.name) };
                let (cols, unit_rows) = (m.k as usize, m.unit_rows);
                // A granule is 8 rows of 64 bytes; where a unit has fewer, rows of the next parts of k follow.
                let parts = 8 / unit_rows as usize;
                let unit_bytes = cols.div_ceil(granule_k * parts) * 512;
                assert_eq!(bytes as usize, (task.hi - task.lo) as usize * unit_bytes, "{}", grid.name);
                let begin = (pack.layout.stream_base[sm] + offset) as usize;
                for (unit, u) in pack.bytes[begin..][..bytes as usize].chunks_exact(unit_bytes).zip(task.lo..) {
                    for r in 0..unit_rows {
                        let want = wanted_row(imported, &grid.name, unit_rows, u, r, cols);
                        for k in 0..cols.next_multiple_of(granule_k) {
                            let row = (k / granule_k * unit_rows as usize) + r as usize;
                            let at = row * 64 + k % granule_k * dtype.bytes();
                            let want = want.get(k).copied().unwrap_or(0.0);
                            assert_eq!(value(dtype, &unit[at..]), want, "{} unit {u} row {r} k {k}", grid.name);
                        }
                    }
                }
                runs += 1;
            }
        }
        assert!(runs > 20, "{runs} runs");
    }

    #[test]
    fn every_weight_lies_where_its_unit_says() {
        let odd = import_config_only(ODD, 3).unwrap();
        for (imported, dtype, sms, unit_rows) in [
            (&odd, DType::Bf16, 3, 8),
            (&odd, DType::F32, 3, 8),
            (&fixture("llama-gqa"), DType::F32, 3, 8),
            (&fixture("phi3"), DType::Bf16, 3, 8),
            (&fixture("gemma2"), DType::Bf16, 7, 4),
            (&fixture("gemma2"), DType::F32, 9, 2),
        ] {
            let schedule = place(imported, dtype, |c| {
                (c.splits, c.split_from, c.sms, c.unit_rows) = (2, 8, sms, unit_rows);
            });
            let pack = pack(&schedule, &imported.graph, &imported.weights).unwrap();
            assert_eq!(schedule.regimes.len(), 2);
            let units = |grid: &Grid| if let Op::MatVec(m) = &grid.op { m.unit_rows } else { 8 };
            assert_eq!(schedule.program.grids.iter().map(units).min(), Some(unit_rows));
            for regime in &schedule.regimes {
                check_streams(imported, &schedule, regime, &pack);
            }
        }
    }

    /// Values of the constant buffer called `name`.
    fn constant(schedule: &Schedule, pack: &WeightPack, name: &str) -> Vec<f32> {
        let b = schedule.program.buffers.iter().position(|b| b.name == name).unwrap();
        let buffer = &schedule.program.buffers[b];
        let begin = pack.layout.constant_offset[b].unwrap() as usize;
        let bytes = &pack.bytes[begin..begin + placed_bytes(buffer) as usize];
        bytes.chunks_exact(buffer.dtype.bytes()).map(|v| value(buffer.dtype, v)).collect()
    }

    #[test]
    fn constants_follow_the_streams() {
        let odd = import_config_only(ODD, 3).unwrap();
        let schedule = place(&odd, DType::Bf16, |_| ());
        let pack = pack(&schedule, &odd.graph, &odd.weights).unwrap();
        let layer = &odd.graph.layers[1];
        let (gate, up) = (layer.mlp.gate.as_ref().unwrap(), &layer.mlp.up);
        let (gate, up) = (odd.weights.bias_f32(gate).unwrap(), odd.weights.bias_f32(up).unwrap());
        let bias = constant(&schedule, &pack, "gate_up.1.bias");
        assert_eq!(bias.len(), 22 * 8);
        for (i, value) in bias.iter().enumerate() {
            let (u, r) = (i / 8, i % 8);
            let part = if r < 4 { &gate } else { &up };
            assert_eq!(*value, part.get(4 * u + r % 4).copied().unwrap_or(0.0), "unit {u} row {r}");
        }
        let qkv = [&layer.attn.q, &layer.attn.k, &layer.attn.v].map(|l| odd.weights.bias_f32(l).unwrap()).concat();
        assert_eq!(constant(&schedule, &pack, "qkv.1.bias"), qkv);

        let table = constant(&schedule, &pack, "embed");
        let mut row = vec![0.0; 40];
        odd.weights.read_row_f32(odd.graph.embed, 60, &mut row);
        assert_eq!(table.len(), 61 * 40);
        assert_eq!(table[60 * 40..], row);

        let rope = constant(&schedule, &pack, "rope.r0");
        assert_eq!(rope.len(), 32 * 10);
        assert_eq!(rope[..10], [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
        for (i, f) in odd.graph.ropes[0].inv_freq.iter().enumerate() {
            assert_eq!(rope[31 * 10 + i], f64::from(31.0 * f).cos() as f32);
            assert_eq!(rope[31 * 10 + 5 + i], f64::from(31.0 * f).sin() as f32);
        }
    }

    #[test]
    fn a_gain_carries_its_offset_and_a_part_without_bias_is_zero() {
        let gemma = fixture("gemma2");
        let schedule = place(&gemma, DType::F32, |_| ());
        let pack = pack(&schedule, &gemma.graph, &gemma.weights).unwrap();
        let norm = gemma.graph.layers[0].attn_norm.as_ref().unwrap();
        assert_eq!(norm.weight_offset, 1.0);
        let want: Vec<f32> = gemma.weights.vector_f32(norm.weight.unwrap()).iter().map(|w| w + 1.0).collect();
        assert_eq!(constant(&schedule, &pack, "qkv.0.norm_weight"), want);

        let parts = [
            VectorPart { view: None, len: 3 },
            VectorPart { view: Some(RowView::range(norm.weight.unwrap(), 1)), len: 2 },
        ];
        let buffer = Buffer { cols: 8, ..schedule.program.buffers[0].clone() };
        let got = vectors(BufferId(0), &buffer, &gemma.graph, &gemma.weights, &parts, 0.5, 1).unwrap();
        let whole = gemma.weights.vector_f32(norm.weight.unwrap());
        assert_eq!(got, [0.0, 0.0, 0.0, whole[1] + 0.5, whole[2] + 0.5, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn pieces_are_the_whole_pack() {
        let odd = import_config_only(ODD, 3).unwrap();
        let schedule = place(&odd, DType::Bf16, |_| ());
        let whole = pack(&schedule, &odd.graph, &odd.weights).unwrap();
        assert_eq!(whole.bytes.len() as u64, whole.layout.total_bytes);
        let starts = whole.layout.stream_base.iter().chain(whole.layout.constant_offset.iter().flatten());
        let starts: Vec<u64> = starts.copied().collect();
        assert!(
            starts.is_sorted() && starts.iter().all(|s| s % crate::ir::layout::PLACE_ALIGN_BYTES == 0),
            "{starts:?}"
        );
        let mut bytes = vec![];
        let layout = pack_pieces::<PackError>(&schedule, &odd.graph, &odd.weights, |at, piece| {
            assert_eq!(at, bytes.len() as u64);
            bytes.extend_from_slice(piece);
            Ok(())
        });
        assert_eq!((layout.unwrap(), bytes), (whole.layout, whole.bytes));
    }

    #[test]
    fn the_bytes_of_one_pack_become_another_where_they_lie() {
        let imported = fixture("qwen3");
        for weights in [DType::F32, DType::Bf16] {
            let of = |change: &dyn Fn(&mut Candidate)| {
                let schedule = place(&imported, weights, change);
                let pack = pack(&schedule, &imported.graph, &imported.weights).unwrap();
                (schedule, pack.bytes)
            };
            let all = [of(&|_| ()), of(&|c| c.sms = 3), of(&|c| (c.splits, c.split_from) = (3, 8))];
            for ((from, source), (to, wanted)) in all.iter().flat_map(|a| all.iter().map(move |b| (a, b))) {
                let moves = moves(from, to).unwrap().expect("the same model");
                let mut made = vec![0; wanted.len()];
                for Move { from, to, bytes } in moves {
                    let (from, to, bytes) = (from as usize, to as usize, bytes as usize);
                    made[to..to + bytes].copy_from_slice(&source[from..from + bytes]);
                }
                assert!(made == *wanted, "{weights}: other bytes");
            }
        }
        let gemma = fixture("gemma2");
        let units = |rows: u32| place(&gemma, DType::Bf16, |c| (c.sms, c.unit_rows) = (7, rows));
        assert_eq!(moves(&units(8), &units(4)).unwrap(), None, "units of fewer rows lie otherwise");
        let (other, own) = (fixture("llama-gqa"), place(&imported, DType::F32, |_| ()));
        assert_eq!(moves(&place(&other, DType::F32, |_| ()), &own).unwrap(), None, "another model");
    }

    #[test]
    fn streams_that_cannot_be_filled_are_named() {
        let odd = import_config_only(ODD, 3).unwrap();
        let good = place(&odd, DType::Bf16, |c| (c.splits, c.split_from) = (2, 8));
        let fails = |change: &dyn Fn(&mut Schedule)| {
            let mut schedule = good.clone();
            change(&mut schedule);
            pack(&schedule, &odd.graph, &odd.weights).unwrap_err().to_string()
        };
        let short = fails(&|s| {
            if let RunBytes::Fixed { bytes, .. } = &mut s.regimes[0].streams[1][0].bytes {
                *bytes -= 512;
            }
        });
        assert!(short.starts_with("sm1 streams ") && short.contains(" units take "), "{short}");
        let overlap = fails(&|s| {
            for regime in &mut s.regimes {
                let late = regime.streams[1].iter_mut().filter_map(|r| match &mut r.bytes {
                    RunBytes::Fixed { offset, .. } => Some(offset),
                    RunBytes::History { .. } => None,
                });
                *late.last().unwrap() -= 512;
            }
        });
        assert!(overlap.contains(" ends at byte "), "{overlap}");
        let other = fails(&|s| {
            let task = s.regimes[1].streams[0][0].task;
            let task = &mut s.regimes[1].tasks[task.index()];
            (task.lo, task.hi) = (task.lo + 1, task.hi + 1);
        });
        assert!(other.contains("than in an earlier regime"), "{other}");
        let content = fails(&|s| s.program.buffers.iter_mut().for_each(|b| b.content = None));
        assert!(content.contains("has no content to pack"), "{content}");
    }
}
