//! Owns the bytes of the pack: from checkpoint tensors to the units that SMs stream, and the constants beside them.
//!
//! A pack is one blob. Each matrix lies at its buffer's place in the schedule ([`crate::ir::layout::placement`]): its units in
//! the order of its rows, each whole along k. A unit of a matvec is `granules(k)` granules of 512 bytes; a granule is
//! row-major, 8 rows of 64 bytes of k. Rows past the end of the linear and k past the end of a row are zero.
//!
//! A matrix of codes has the scales of its groups in its granules ([`crate::format`]), and those of its rows after its units.
//!
//! Of a candidate, only the knob `unit_rows` changes it: schedules of one model and precision read the same pack, on any number of SMs.
//!
//! A matrix that a checkpoint stores as codes is packed with those codes, or as values that hold them exactly.

use crate::dtype::DType;
use crate::error::Fault;
use crate::format::{Code, Format, ScaleCode, TableRow};
use crate::ir::layout::{GRANULE_ROW_BYTES, Matrix, matrices, pack_bytes, place_align, placed_bytes};
use crate::ir::op::UNIT_ROWS;
use crate::ir::program::{Buffer, Content, Part, Space, VectorPart};
use crate::ir::schedule::Schedule;
use crate::ir::{BufferId, LayerId};
use crate::model::cache_scales::cache_scales;
use crate::model::coded::PartFault;
use crate::model::graph::{ModelGraph, Rope, RowView, TensorId};
use crate::model::weights::{CodedRow, Weights};
use half::bf16;
use rayon::prelude::*;
use thiserror::Error;

/// Most bytes that a pack is written in at once.
const PIECE_BYTES: u64 = 64 << 20;

/// A schedule whose pack cannot be filled, or weights of another model. Faults of monobloc, unless another program wrote the
/// schedule.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PackError {
    #[error("{buffer} (`{name}`) has no place in the pack")]
    Place { buffer: BufferId, name: String },
    #[error("{buffer} (`{name}`) begins at byte {offset} of the pack, where {other} ends at byte {end}")]
    Overlap { buffer: BufferId, name: String, offset: u64, other: BufferId, end: u64 },
    #[error("{buffer} (`{name}`) has no content to pack")]
    NoContent { buffer: BufferId, name: String },
    #[error("{buffer} (`{name}`) has {parts} parts interleaved by {interleave}, expected units of 8 rows")]
    Interleave { buffer: BufferId, name: String, parts: usize, interleave: u32 },
    #[error("{buffer} (`{name}`) has rows of {cols} values, tensor `{tensor}` has {found}")]
    Cols { buffer: BufferId, name: String, cols: u32, tensor: String, found: usize },
    #[error("{buffer} (`{name}`) needs row {row} of tensor `{tensor}`, which has {rows}")]
    Row { buffer: BufferId, name: String, row: u64, tensor: String, rows: u64 },
    #[error("{buffer} (`{name}`) stores {expected}, tensor `{tensor}` is stored as {found}")]
    Format { buffer: BufferId, name: String, expected: Format, tensor: String, found: String },
    #[error(
        "{buffer} (`{name}`) needs row {row} of tensor `{tensor}`, whose {what} of column {column} is no number that kernels take"
    )]
    NotANumber { buffer: BufferId, name: String, tensor: String, row: u32, column: usize, what: &'static str },
    /// `name` is that of the part.
    #[error("tensor `{name}` {fault}")]
    Part { name: String, fault: PartFault },
    #[error("layer {} has the scale {scale} for cached keys or values, expected a number above 0", layer.0)]
    CacheScale { layer: LayerId, scale: String },
    #[error("the pack takes {bytes} bytes, more than this machine can address")]
    Size { bytes: u64 },
}

impl From<PackError> for Fault {
    fn from(error: PackError) -> Fault {
        match error {
            PackError::Size { .. } => Fault::environment(error.to_string()),
            PackError::NotANumber { .. } | PackError::Part { .. } | PackError::CacheScale { .. } => {
                Fault::input(error.to_string())
            }
            _ => Fault::internal(error.to_string()),
        }
    }
}

/// Makes a whole pack in memory.
pub fn pack(schedule: &Schedule, graph: &ModelGraph, weights: &Weights) -> Result<Vec<u8>, PackError> {
    let mut bytes = zeros(pack_bytes(schedule))?;
    fill(schedule, graph, weights, &mut bytes)?;
    Ok(bytes)
}

/// Fills a whole pack: `bytes` has [`pack_bytes`] bytes, zero.
pub fn fill(schedule: &Schedule, graph: &ModelGraph, weights: &Weights, bytes: &mut [u8]) -> Result<(), PackError> {
    let mut row_scales = vec![];
    for Packed { id, place, bytes: length, part } in packed(schedule)? {
        let out = &mut bytes[place as usize..(place + length) as usize];
        match part {
            PartOf::Units(matrix) => row_scales = pack_units(schedule, graph, weights, id, matrix, 0, out)?,
            PartOf::RowScales => out.copy_from_slice(&row_scales),
            PartOf::Constant => pack_constant(id, &schedule.program.buffers[id.index()], graph, weights, out)?,
        }
    }
    Ok(())
}

/// Hands out a pack piece by piece, in the order of its bytes and without a gap. Holds one piece at a time, so that a pack
/// larger than memory can be written or uploaded.
pub fn pack_pieces<E: From<PackError>>(
    schedule: &Schedule,
    graph: &ModelGraph,
    weights: &Weights,
    mut piece: impl FnMut(u64, &[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let mut end = 0;
    let mut row_scales = vec![];
    for Packed { id, place, bytes, part } in packed(schedule)? {
        while end < place {
            let gap = (place - end).min(PIECE_BYTES);
            piece(end, &zeros(gap)?)?;
            end += gap;
        }
        end += place_align(bytes);
        let padding = place_align(bytes) - bytes;
        let PartOf::Units(matrix) = part else {
            let mut buffer = zeros(bytes + padding)?;
            let out = &mut buffer[..bytes as usize];
            match part {
                PartOf::RowScales => out.copy_from_slice(&row_scales),
                _ => pack_constant(id, &schedule.program.buffers[id.index()], graph, weights, out)?,
            }
            piece(place, &buffer)?;
            continue;
        };
        let units_at_once = (PIECE_BYTES / matrix.unit_bytes.max(1)).max(1);
        let mut unit = 0;
        row_scales.clear();
        while unit < u64::from(matrix.units) {
            let units = units_at_once.min(u64::from(matrix.units) - unit);
            let last = unit + units == u64::from(matrix.units);
            let length = units * matrix.unit_bytes;
            let mut buffer = zeros(length + if last { padding } else { 0 })?;
            let out = &mut buffer[..length as usize];
            row_scales.extend(pack_units(schedule, graph, weights, id, matrix, unit as u32, out)?);
            piece(place + unit * matrix.unit_bytes, &buffer)?;
            unit += units;
        }
    }
    Ok(())
}

fn zeros(bytes: u64) -> Result<Vec<u8>, PackError> {
    let too_large = || PackError::Size { bytes };
    let length = usize::try_from(bytes).map_err(|_| too_large())?;
    // Asked for first, because `vec!` ends the process where there is no memory.
    Vec::<u8>::new().try_reserve_exact(length).map_err(|_| too_large())?;
    // Pages come from the system when they are first written, which the threads that fill them do at once.
    Ok(vec![0; length])
}

/// What of a buffer lies in one piece.
#[derive(Clone, Copy)]
enum PartOf {
    Units(Matrix),
    /// The scales of the rows of the matrix before it.
    RowScales,
    Constant,
}

/// A buffer of the pack, or a part of one.
struct Packed {
    id: BufferId,
    place: u64,
    /// Without padding.
    bytes: u64,
    part: PartOf,
}

/// The buffers of a pack in the order of their places, none over another.
fn packed(schedule: &Schedule) -> Result<Vec<Packed>, PackError> {
    let Schedule { program, placement, .. } = schedule;
    let mut all = vec![];
    for ((b, buffer), matrix) in program.buffers.iter().enumerate().zip(matrices(program)) {
        let (id, name) = (BufferId::from(b), || buffer.name.clone());
        let (bytes, part) = match (buffer.space, matrix) {
            (Space::Weight, Some(matrix)) => (matrix.units_bytes(), PartOf::Units(matrix)),
            // No op streams it.
            (Space::Weight, None) => continue,
            (Space::Constant, _) => (placed_bytes(buffer), PartOf::Constant),
            _ => continue,
        };
        let place = placement.get(b).copied().flatten().ok_or_else(|| PackError::Place { buffer: id, name: name() })?;
        all.push(Packed { id, place, bytes, part });
        if let (PartOf::Units(matrix), true) = (part, buffer.format().row_scales) {
            let at = matrix.row_scales_at();
            let (place, bytes) = (place.saturating_add(at), matrix.bytes() - at);
            all.push(Packed { id, place, bytes, part: PartOf::RowScales });
        }
    }
    all.sort_by_key(|packed| (packed.place, packed.bytes));
    let mut end = (0, BufferId(0));
    for &Packed { id, place, bytes, .. } in &all {
        if place < end.0 {
            let name = program.buffers[id.index()].name.clone();
            return Err(PackError::Overlap { buffer: id, name, offset: place, other: end.1, end: end.0 });
        }
        end = (place_align(place.saturating_add(bytes)), id);
    }
    Ok(all)
}

/// What a buffer holds, whatever its id: the same words, the same values.
struct ContentKey(Vec<u32>);

impl ContentKey {
    fn of(b: &Buffer) -> ContentKey {
        fn view(key: &mut Vec<u32>, view: &RowView, rows: u32) {
            let RowView { tensor, first, block, stride } = view;
            key.extend([tensor.0, *first, *block, *stride, rows]);
        }
        let Buffer { name: _, space: _, dtype, coded, rows, cols, phases: _, words: _, paging: _, home: _, content } =
            b;
        let mut key = vec![*dtype as u32, *rows, *cols];
        if let Some(Format { code, groups, row_scales }) = *coded {
            let groups =
                groups.map_or([0; 3], |g| [g.k, g.scale as u32, u32::from(g.zeros) | u32::from(g.minima) << 1]);
            key.extend([u32::MAX, code as u32, u32::from(row_scales)]);
            key.extend(groups);
        }
        match content {
            None => key.push(0),
            Some(Content::Rows { parts, interleave }) => {
                key.extend([1, *interleave]);
                parts.iter().for_each(|part| view(&mut key, &part.view, part.rows));
            }
            Some(Content::Vectors { parts, offset, scale, interleave }) => {
                key.extend([2, offset.to_bits(), *interleave]);
                if *scale != 1.0 {
                    // No tensor has this number.
                    key.extend([u32::MAX - 1, scale.to_bits()]);
                }
                for part in parts {
                    match &part.view {
                        Some(of) => view(&mut key, of, part.len),
                        None => key.extend([u32::MAX, part.len]),
                    }
                }
            }
            Some(Content::Tensor(tensor)) => key.extend([3, tensor.0]),
            Some(Content::RopeTable(rope)) => key.extend([4, rope.0]),
            Some(Content::CacheScales(layer)) => key.extend([5, layer.0]),
        }
        ContentKey(key)
    }

    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

/// Names the bytes of a pack without making them: schedules of one model with the same name read the same pack. blake3 of where
/// everything lies and what it is.
pub fn identity(schedule: &Schedule) -> [u8; 32] {
    let Schedule { program, placement, .. } = schedule;
    let mut hasher = blake3::Hasher::new();
    for ((buffer, place), matrix) in program.buffers.iter().zip(placement).zip(matrices(program)) {
        // Ids shift when a candidate has more buffers of another kind.
        if let (Space::Weight | Space::Constant, Some(place)) = (buffer.space, place) {
            let (units, unit_rows, unit_bytes) = matrix.map_or((0, 0, 0), |m| (m.units, m.unit_rows, m.unit_bytes));
            let content = ContentKey::of(buffer);
            // Numbers of 8 bytes, and content after its length: nothing can be read in two ways.
            let numbers = [*place, units.into(), unit_rows.into(), unit_bytes, content.bytes().len() as u64];
            hasher.update(bytemuck::cast_slice(&numbers)).update(content.bytes());
            hasher.update(buffer.format().code.layout());
        }
    }
    *hasher.finalize().as_bytes()
}

/// The tensor row of row `r` of unit `u` of `unit_rows`; `None` is a row of zeros.
fn unit_row(parts: &[Part], interleave: u32, unit_rows: u32, u: u32, r: u32) -> Option<(&Part, u32)> {
    if interleave > 1 {
        let (turns, mut row) = ((UNIT_ROWS / interleave) as usize, u64::from(u) * u64::from(interleave));
        for turn in parts.chunks_exact(turns.max(1)) {
            let part = turn.get((r / interleave) as usize)?;
            let rows = u64::from(part.rows.next_multiple_of(interleave));
            if row < rows {
                let row = row + u64::from(r % interleave);
                return (row < u64::from(part.rows)).then_some((part, row as u32));
            }
            row -= rows;
        }
        return None;
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

/// Fills the units of a matrix from `first` on; `out` is whole units. Returns the scales of their rows as they lie after the units of a matrix of codes:
/// to round a row again for its scale alone would take as long.
fn pack_units(
    schedule: &Schedule,
    graph: &ModelGraph,
    weights: &Weights,
    id: BufferId,
    matrix: Matrix,
    first: u32,
    out: &mut [u8],
) -> Result<Vec<u8>, PackError> {
    let buffer = &schedule.program.buffers[id.index()];
    let Some(Content::Rows { parts, interleave }) = &buffer.content else {
        return Err(PackError::NoContent { buffer: id, name: buffer.name.clone() });
    };
    let turns = UNIT_ROWS.checked_div(*interleave).filter(|turns| turns * interleave == UNIT_ROWS).unwrap_or(0);
    if *interleave > 1 && (turns == 0 || parts.len() % turns as usize != 0) {
        let (name, parts, interleave) = (buffer.name.clone(), parts.len(), *interleave);
        return Err(PackError::Interleave { buffer: id, name, parts, interleave });
    }
    for part in parts {
        let found = weights.cols(part.view.tensor);
        if found != buffer.cols as usize {
            let (name, cols, tensor) = (buffer.name.clone(), buffer.cols, graph.tensor(part.view.tensor).name.clone());
            return Err(PackError::Cols { buffer: id, name, cols, tensor, found });
        }
        whole_parts(graph, weights, part.view.tensor)?;
    }
    let cols = buffer.cols as usize;
    let coded = Some(matrix.format).filter(|format| !format.code.plain());
    if let Some(expected) = coded {
        same_format(id, buffer, graph, weights, parts, expected)?;
    }
    let units = out.par_chunks_exact_mut((matrix.unit_bytes as usize).max(1));
    let scale_bytes = (matrix.unit_rows as usize * 4).max(1);
    let mut row_scales = vec![0; units.len() * scale_bytes];
    let units = units.zip(row_scales.par_chunks_exact_mut(scale_bytes));
    units.zip(first..matrix.units).try_for_each_init(
        || (vec![bf16::ZERO; cols], vec![0.0f32; cols], CodedRow::default()),
        |(narrow, wide, codes), ((out, row_scales), u)| {
            for r in 0..matrix.unit_rows {
                let Some((part, i)) = unit_row(parts, *interleave, matrix.unit_rows, u, r) else { continue };
                let tensor = part.view.tensor;
                let row = checked_row(id, buffer, graph, &part.view, i, u64::from(weights.rows(tensor)))?;
                if let Some(format) = coded {
                    weights.read_row_coded(tensor, row, codes);
                    numbers(id, buffer, graph, tensor, row, format, codes)?;
                    put_codes(format, codes, r as usize, out);
                    row_scales.as_chunks_mut::<4>().0[r as usize] = codes.row_scale.to_le_bytes();
                } else if matrix.format.code == Code::Bf16 {
                    weights.read_row_bf16(tensor, row, narrow);
                    scatter(bytemuck::cast_slice(narrow), r, matrix.unit_rows, out);
                } else {
                    weights.read_row_f32(tensor, row, wide);
                    scatter(bytemuck::cast_slice(wide), r, matrix.unit_rows, out);
                }
            }
            Ok(())
        },
    )?;
    Ok(row_scales)
}

/// All parts of a matrix of codes are stored as its format says.
fn same_format(
    id: BufferId,
    buffer: &Buffer,
    graph: &ModelGraph,
    weights: &Weights,
    parts: &[Part],
    expected: Format,
) -> Result<(), PackError> {
    parts.iter().try_for_each(|part| stored_as(id, buffer, graph, weights, part.view.tensor, expected))
}

fn stored_as(
    id: BufferId,
    buffer: &Buffer,
    graph: &ModelGraph,
    weights: &Weights,
    tensor: TensorId,
    expected: Format,
) -> Result<(), PackError> {
    let found = weights.format(tensor);
    if found == Some(expected) { Ok(()) } else { Err(other_format(buffer, (id, expected), graph, tensor, found)) }
}

fn other_format(
    buffer: &Buffer,
    (id, expected): (BufferId, Format),
    graph: &ModelGraph,
    tensor: TensorId,
    found: Option<Format>,
) -> PackError {
    let (name, tensor) = (buffer.name.clone(), graph.tensor(tensor).name.clone());
    let found = found.map_or("values".to_string(), |format| format.to_string());
    PackError::Format { buffer: id, name, expected, tensor, found }
}

/// Refuses a matrix whose parts have values that contradict the config, or lead nowhere.
fn whole_parts(graph: &ModelGraph, weights: &Weights, tensor: TensorId) -> Result<(), PackError> {
    match weights.part_fault(tensor) {
        None => Ok(()),
        Some(fault) => {
            let name = &graph.tensor(tensor).name;
            let module = name.strip_suffix(".weight").unwrap_or(name);
            Err(PackError::Part { name: format!("{module}.{}", fault.part()), fault })
        }
    }
}

/// Refuses codes and scales that are no numbers: a kernel would read other values in them. The scale 2^127 is refused, too: batch kernels
/// compute with twice the scale, and the largest code times 2^127 is beyond fp32.
fn numbers(
    id: BufferId,
    buffer: &Buffer,
    graph: &ModelGraph,
    tensor: TensorId,
    row: u32,
    format: Format,
    codes: &CodedRow,
) -> Result<(), PackError> {
    let fault = |what, column| PackError::NotANumber {
        buffer: id,
        name: buffer.name.clone(),
        tensor: graph.tensor(tensor).name.clone(),
        row,
        column,
        what,
    };
    if format.code == Code::E4m3
        && let Some(column) = codes.codes.iter().position(|code| code & 0x7f == 0x7f)
    {
        return Err(fault("code", column));
    }
    let group_k = format.groups.map_or(0, |groups| groups.k as usize);
    let powers = format.groups.is_some_and(|groups| groups.scale == ScaleCode::E8m0);
    let most = if powers { f32::powi(2.0, 126) } else { f32::MAX };
    let infinite = |of: &[f32]| of.iter().position(|scale| scale.is_nan() || scale.abs() > most);
    if let Some(group) = infinite(&codes.minima) {
        return Err(fault("minimum", group * group_k));
    }
    match infinite(&codes.scales) {
        Some(group) => Err(fault("scale", group * group_k)),
        None if !codes.row_scale.is_finite() => Err(fault("scale", 0)),
        None => Ok(()),
    }
}

/// Spreads the codes, scales and zero points of row `r` over the granules of its unit. Codes past the end of the row are zero
/// points, so that they add nothing, whatever the input is.
fn put_codes(format: Format, row: &CodedRow, r: usize, unit: &mut [u8]) {
    let (granule_k, row_bytes) = (format.granule_k() as usize, GRANULE_ROW_BYTES as usize);
    let places: Vec<(usize, u32)> = (0..granule_k).map(|k| format.place(k)).collect();
    let pairs = (format.code.bits() == 4).then(|| pairs_of(&places, row_bytes));
    let group_k = format.groups.map_or(granule_k, |groups| groups.k as usize);
    let granules = unit.chunks_exact_mut(format.granule_bytes() as usize).zip(row.codes.chunks(granule_k));
    for (granule, codes) in granules.enumerate().map(|(g, (granule, codes))| ((g, granule), codes)) {
        let (g, granule) = granule;
        let own = &mut granule[r * row_bytes..(r + 1) * row_bytes];
        match &pairs {
            Some(pairs) if codes.len() == granule_k => put_pairs(codes, pairs, own),
            _ => {
                for (code, (byte, shift)) in codes.iter().zip(&places) {
                    own[*byte] |= code << shift;
                }
            }
        }
        format.code.spread(own);
        if let Some(groups) = format.groups {
            for i in 0..format.granule_groups() as usize {
                let group = (g * granule_k + i * group_k) / group_k;
                let Some(&scale) = row.scales.get(group) else { break };
                if let Some(&of) = row.six_bits.get(group) {
                    format.put_six_bits(granule, r, i, of);
                    continue;
                }
                let at = format.scale_at(r, i);
                groups.scale.write(scale, &mut granule[at..at + groups.scale.bytes() as usize]);
                if groups.zeros {
                    granule[format.zero_at(r, i)] = row.zeros[group];
                }
                if groups.minima {
                    let at = format.minimum_at(r, i);
                    groups.scale.write(row.minima[group], &mut granule[at..at + groups.scale.bytes() as usize]);
                }
            }
        }
    }
}

/// For each byte of a row of a granule, the columns of its two codes of 4 bits.
fn pairs_of(places: &[(usize, u32)], row_bytes: usize) -> Vec<[usize; 2]> {
    let mut pairs = vec![[0; 2]; row_bytes];
    for (k, &(byte, shift)) in places.iter().enumerate() {
        pairs[byte][usize::from(shift > 0)] = k;
    }
    pairs
}

/// Writes a whole row of codes of 4 bits, a byte at a time.
fn put_pairs(codes: &[u8], pairs: &[[usize; 2]], out: &mut [u8]) {
    for (byte, &[low, high]) in out.iter_mut().zip(pairs) {
        *byte = codes[low] | codes[high] << 4;
    }
}

/// Spreads row `r` over the granules of its unit of `unit_rows` rows, 64 bytes to each part of each.
fn scatter(row: &[u8], r: u32, unit_rows: u32, unit: &mut [u8]) {
    let row_bytes = GRANULE_ROW_BYTES as usize;
    let places = unit.chunks_exact_mut(row_bytes).skip(r as usize).step_by(unit_rows.max(1) as usize);
    for (piece, place) in row.chunks(row_bytes).zip(places) {
        place[..piece.len()].copy_from_slice(piece);
    }
}

fn pack_constant(
    id: BufferId,
    buffer: &Buffer,
    graph: &ModelGraph,
    weights: &Weights,
    out: &mut [u8],
) -> Result<(), PackError> {
    match &buffer.content {
        Some(Content::Vectors { parts, offset, scale, interleave }) => {
            let mut values = vectors(id, buffer, graph, weights, parts, *offset, *interleave)?;
            values.iter_mut().for_each(|value| *value *= scale);
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
            if let Some(format) = buffer.coded {
                return pack_table(id, buffer, graph, weights, (tensor, format), out);
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
        Some(Content::CacheScales(layer)) => {
            if layer.index() >= graph.layers.len() {
                return Err(PackError::NoContent { buffer: id, name: buffer.name.clone() });
            }
            let scales = cache_scales(graph, weights, layer.index());
            if let Some(&scale) = scales.as_flattened().iter().find(|scale| !scale.is_normal() || **scale < 0.0) {
                return Err(PackError::CacheScale { layer: *layer, scale: scale.to_string() });
            }
            write_values(buffer.dtype, scales.as_flattened(), out);
        }
        Some(Content::Rows { .. }) | None => {
            return Err(PackError::NoContent { buffer: id, name: buffer.name.clone() });
        }
    }
    Ok(())
}

/// The rows of a table of codes.
fn pack_table(
    id: BufferId,
    buffer: &Buffer,
    graph: &ModelGraph,
    weights: &Weights,
    (tensor, format): (TensorId, Format),
    out: &mut [u8],
) -> Result<(), PackError> {
    let found = weights.format(tensor);
    if found.map(Format::of_table) != Some(format) {
        return Err(other_format(buffer, (id, format), graph, tensor, found));
    }
    whole_parts(graph, weights, tensor)?;
    let at = format.table_row(buffer.cols);
    let rows = out.par_chunks_exact_mut((at.bytes as usize).max(1)).zip(0..buffer.rows);
    rows.try_for_each_init(CodedRow::default, |codes, (out, row)| {
        weights.read_row_coded(tensor, row, codes);
        numbers(id, buffer, graph, tensor, row, format, codes)?;
        put_table_row(format, at, codes, out);
        Ok(())
    })
}

/// One row as [`Format::table_row`] says.
fn put_table_row(format: Format, at: TableRow, row: &CodedRow, out: &mut [u8]) {
    let wide = format.code.bits() == 8;
    for (col, code) in row.codes.iter().enumerate() {
        if wide { out[col] = *code } else { out[col / 2] |= code << (col % 2 * 4) }
    }
    if let Some(groups) = format.groups {
        let each = groups.scale.bytes() as usize;
        let scales = out[at.scales as usize..].chunks_exact_mut(each);
        row.scales.iter().zip(scales).for_each(|(scale, out)| groups.scale.write(*scale, out));
        out[at.zeros as usize..][..row.zeros.len()].copy_from_slice(&row.zeros);
        let minima = out[at.zeros as usize..].chunks_exact_mut(each);
        row.minima.iter().zip(minima).for_each(|(least, out)| groups.scale.write(*least, out));
    }
    if format.row_scales {
        ScaleCode::F32.write(row.row_scale, &mut out[at.row_scale as usize..][..4]);
    }
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
        let interleave = interleave as usize;
        let turns = (UNIT_ROWS as usize / interleave).max(1);
        let mut first = 0;
        for turn in columns.chunks(turns) {
            for (p, column) in turn.iter().enumerate() {
                for (i, &value) in column.iter().enumerate() {
                    let place = first + i / interleave * UNIT_ROWS as usize + p * interleave + i % interleave;
                    if let Some(slot) = values.get_mut(place) {
                        *slot = value;
                    }
                }
            }
            first += turn[0].len().div_ceil(interleave) * UNIT_ROWS as usize;
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
    use crate::ir::op::Op;
    use crate::ir::program::Grid;
    use crate::ir::schedule::{Regime, Source};
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
        let attn = layer.attention().unwrap();
        let mlp = layer.feed.dense().unwrap();
        let flat = unit_rows * u + r;
        let (linear, row) = match kind {
            "qkv" if flat < attn.q.rows => (&attn.q, flat),
            "qkv" if flat < attn.q.rows + attn.k.rows => (&attn.k, flat - attn.q.rows),
            "qkv" => (&attn.v, flat - attn.q.rows - attn.k.rows),
            "o" => (&attn.o, flat),
            "gate_up" if r < 4 => (mlp.gate.as_ref().unwrap(), 4 * u + r),
            "gate_up" => (&mlp.up, 4 * u + r - 4),
            "down" => (&mlp.down, flat),
            _ => (&imported.graph.head, flat),
        };
        let mut values = vec![0.0; cols];
        if row < linear.rows {
            imported.weights.linear_row_f32(linear, row, &mut values);
        }
        values
    }

    fn check_streams(imported: &Imported, schedule: &Schedule, regime: &Regime, pack: &[u8]) {
        let dtype = schedule.program.precision.weights;
        let granule_k = 64 / dtype.bytes();
        let mut runs = 0;
        for run in regime.streams.iter().flatten() {
            let Source::Units { buffer, lo, hi } = run.source else { continue };
            let task = &regime.tasks[run.task.index()];
            let grid = &schedule.program.grids[task.grid.index()];
            let Op::MatVec(m) = &grid.op else { panic!("{} streams weights", grid.name) };
            let (cols, unit_rows) = (m.k as usize, m.unit_rows);
            // A granule is 8 rows of 64 bytes; if a unit has fewer, its rows of the next parts of k follow.
            let parts = 8 / unit_rows as usize;
            let unit_bytes = cols.div_ceil(granule_k * parts) * 512;
            assert_eq!((lo, hi), (task.lo, task.hi), "{}", grid.name);
            let begin = schedule.placement[buffer.index()].unwrap() as usize + lo as usize * unit_bytes;
            for (unit, u) in pack[begin..].chunks_exact(unit_bytes).zip(lo..hi) {
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
        assert!(runs > 20, "{runs} runs");
    }

    /// Whole granules of 4-bit codes are written a byte at a time; a row that ends inside one, code by code.
    #[test]
    fn codes_lie_where_their_format_says() {
        for code in [Code::Int4, Code::E2m1] {
            let format = Format { code, groups: None, row_scales: true };
            let (granule_k, row_bytes) = (format.granule_k() as usize, GRANULE_ROW_BYTES as usize);
            let codes: Vec<u8> = (0..2 * granule_k + 5).map(|at| (at * 7 % 16) as u8).collect();
            let mut unit = vec![0; 3 * format.granule_bytes() as usize];
            put_codes(format, &CodedRow { codes: codes.clone(), ..CodedRow::default() }, 3, &mut unit);
            for (at, &expected) in codes.iter().enumerate() {
                let (byte, shift) = format.place(at % granule_k);
                let word = at / granule_k * format.granule_bytes() as usize + 3 * row_bytes + byte / 4 * 4;
                let word = code.gathered(u32::from_le_bytes(unit[word..word + 4].try_into().unwrap()));
                let found = word.to_le_bytes()[byte % 4] >> shift & 15;
                assert_eq!(found, expected, "{code:?}, column {at}");
            }
        }
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
    fn constant(schedule: &Schedule, pack: &[u8], name: &str) -> Vec<f32> {
        let b = schedule.program.buffers.iter().position(|b| b.name == name).unwrap();
        let buffer = &schedule.program.buffers[b];
        let begin = schedule.placement[b].unwrap() as usize;
        let bytes = &pack[begin..begin + placed_bytes(buffer) as usize];
        bytes.chunks_exact(buffer.dtype.bytes()).map(|v| value(buffer.dtype, v)).collect()
    }

    #[test]
    fn constants_lie_beside_the_matrices() {
        let odd = import_config_only(ODD, 3).unwrap();
        let schedule = place(&odd, DType::Bf16, |_| ());
        let pack = pack(&schedule, &odd.graph, &odd.weights).unwrap();
        let layer = &odd.graph.layers[1];
        let mlp = layer.feed.dense().unwrap();
        let (gate, up) = (mlp.gate.as_ref().unwrap(), &mlp.up);
        let (gate, up) = (odd.weights.bias_f32(gate).unwrap(), odd.weights.bias_f32(up).unwrap());
        let bias = constant(&schedule, &pack, "gate_up.1.bias");
        assert_eq!(bias.len(), 22 * 8);
        for (i, value) in bias.iter().enumerate() {
            let (u, r) = (i / 8, i % 8);
            let part = if r < 4 { &gate } else { &up };
            assert_eq!(*value, part.get(4 * u + r % 4).copied().unwrap_or(0.0), "unit {u} row {r}");
        }
        let attn = layer.attention().unwrap();
        let qkv = [&attn.q, &attn.k, &attn.v].map(|l| odd.weights.bias_f32(l).unwrap()).concat();
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
        assert_eq!(whole.len() as u64, pack_bytes(&schedule));
        let mut bytes = vec![];
        let made = pack_pieces::<PackError>(&schedule, &odd.graph, &odd.weights, |at, piece| {
            assert_eq!(at, bytes.len() as u64);
            bytes.extend_from_slice(piece);
            Ok(())
        });
        assert_eq!((made, bytes), (Ok(()), whole));
    }

    #[test]
    fn candidates_share_a_pack_and_models_do_not() {
        let imported = fixture("qwen3");
        for weights in [DType::F32, DType::Bf16] {
            let of = |change: &dyn Fn(&mut Candidate)| {
                let schedule = place(&imported, weights, change);
                let pack = pack(&schedule, &imported.graph, &imported.weights).unwrap();
                (identity(&schedule), pack)
            };
            let first = of(&|_| ());
            let more: [&dyn Fn(&mut Candidate); 4] =
                [&|c| c.sms = 2, &|c| c.sms = 7, &|c| (c.splits, c.split_from) = (3, 8), &|c| {
                    (c.consumer_warps, c.slot_bytes) = (4, 8192)
                }];
            for change in more {
                assert!(of(change) == first, "{weights}: another pack");
            }
        }
        let (other, own) = (fixture("llama-gqa"), place(&imported, DType::F32, |_| ()));
        assert_ne!(identity(&place(&other, DType::F32, |_| ())), identity(&own));
        assert_ne!(identity(&place(&imported, DType::Bf16, |_| ())), identity(&own));
    }

    #[test]
    fn packs_that_cannot_be_filled_are_named() {
        let odd = import_config_only(ODD, 3).unwrap();
        let good = place(&odd, DType::Bf16, |c| (c.splits, c.split_from) = (2, 8));
        let fails = |change: &dyn Fn(&mut Schedule)| {
            let mut schedule = good.clone();
            change(&mut schedule);
            pack(&schedule, &odd.graph, &odd.weights).unwrap_err().to_string()
        };
        let weight = good.program.buffers.iter().rposition(|b| b.space == Space::Weight).unwrap();
        let unplaced = fails(&|s| s.placement[weight] = None);
        assert!(unplaced.contains("has no place in the pack"), "{unplaced}");
        let overlap = fails(&|s| s.placement[weight] = s.placement[weight].map(|at| at - 512));
        assert!(overlap.contains(" ends at byte "), "{overlap}");
        let content = fails(&|s| s.program.buffers.iter_mut().for_each(|b| b.content = None));
        assert!(content.contains("has no content to pack"), "{content}");
    }
}
