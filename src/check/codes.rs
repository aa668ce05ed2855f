//! Compares a device whose cache has codes of fp8 with the interpreter, and the interpreter's fast path with the reference.
//!
//! If two values differ in the last bit of a bf16, rounding to e4m3 makes that a step of 6 to 12 % in about every tenth code, and every
//! layer builds on the codes of those before. So two right kernels that add up in different orders differ by about two thirds of what
//! the rounding costs, and a bound that is wide enough for that finds no faults. The check therefore reads the codes that the device
//! stored, and compares in two ways:
//!
//! 1. *Each step of the reference takes the device's codes in place of its own keys and values.* The values `x` that it would have
//!    rounded say whether the codes are right: a device that computed `y` stored the code of `y`, so `x` is no further from the nearest
//!    value with this code than from `y`. How far `y` may be from `x` is measured, as it is for logits.
//! 2. *Logits* then differ by the arithmetic alone, as with a cache in bf16, and are held to that tolerance.
//!
//! The same holds on `cpu`, where the interpreter's fast path is the device. Of batch kernels, of exports and of an op alone, the reference is the
//! interpreter.

use std::ops::{ControlFlow, Range};

use super::lanes::{self, Computed, Filler, Rounding, Text};
use super::{
    CheckError, Checked, FACTOR, FILL_SEED, Figures, Judge, Noise, Stored, Subject, Tolerance, check_ids,
    expected_rows, filled_rows, inputs, keep, reader_of, split,
};
use super::{
    KeptStates, PROMPT_COST_MAX, REFERENCE_COST_MAX, check_selection, device_logits, fill_device_cache, twice,
    write_device_cache, write_device_states,
};
use crate::cuda::session::{Session, SessionError};
use crate::dtype::{DType, Precision};
use crate::format::{E4M3_MAX, e4m3, to_e4m3};
use crate::interp::{
    CacheKind, CacheShape, FromDevice, Input, Interp, InterpError, Options, Taken, cache_buffers, choice_buffers,
    read_value,
};
use crate::ir::BufferId;
use crate::ir::op::{Op, Role};
use crate::ir::program::{Buffer, Program};
use crate::ir::schedule::Schedule;
use crate::ir::variant::swizzled_piece;
use crate::model::cache_scales::cache_scales;

/// About how many vectors of a layer are rounded to bf16: these errors reach the layers after it.
const ROUNDED_PER_LAYER: f64 = 10.0;
/// Most relative error of a number of 8 bits, and so of a vector of them.
const BF16_ERROR: f64 = 1.0 / 512.0;

/// Whether a device with this cache is compared by the codes that it stores.
pub fn stores_codes(precision: Precision) -> bool {
    precision.cache == DType::E4m3
}

/// Whether rows choose experts.
pub fn chooses_experts(program: &Program) -> bool {
    !choice_buffers(program).is_empty()
}

/// Whether the reference takes something that the device stored in place of its own: codes of fp8, or the choice of experts. Both turn the
/// last bit of a number into a step.
pub fn takes_from_device(program: &Program) -> bool {
    stores_codes(program.precision) || chooses_experts(program)
}

/// Experts of one row by router and slot, from what `exchanged` says of a buffer.
fn choices_of<E>(program: &Program, exchanged: impl Fn(BufferId) -> Result<Vec<f32>, E>) -> Result<Vec<Vec<u32>>, E> {
    let of_router = |(_, buffer)| Ok(exchanged(buffer)?.into_iter().map(f32::to_bits).collect());
    choice_buffers(program).into_iter().map(of_router).collect()
}

/// The tolerance of a device's logits if both sides have the same codes.
pub(super) fn tolerance(precision: Precision) -> Tolerance {
    Tolerance::of_device(of_arithmetic(precision))
}

/// The precision that tolerances follow if both sides have the same codes: the cache adds no error of its own.
fn of_arithmetic(precision: Precision) -> Precision {
    let cache = if stores_codes(precision) { precision.wire } else { precision.cache };
    Precision { cache, ..precision }
}

/// The tolerance of a layer's keys and values before they are rounded to codes, where rounding was not measured: norm of the error by norm. Errors of the vectors of one
/// layer add up as independent ones do. Errors of different layers need not, because a layer may amplify its input (attention does, if
/// values of many positions cancel), so they are summed. No layer may be further off than logits.
fn before_rounding(tolerance: Tolerance, layer: u32) -> f64 {
    let of_layer = BF16_ERROR * ROUNDED_PER_LAYER.sqrt();
    tolerance.error_rel_l2.min(of_layer * f64::from(layer + 1))
}

/// Distance from `x` to the nearest value that rounds to `code`, both in units of the scale. NaN for a code that is no number.
fn away(code: u8, x: f64) -> f64 {
    let value = |size: u8| f64::from(e4m3(size));
    let size = code & 0x7f;
    let x = if code & 0x80 == 0 { x } else { -x };
    // Zero has two codes, one of each sign, and the largest code stands for all larger values.
    let least = if size == 0 { -value(1) / 2.0 } else { (value(size - 1) + value(size)) / 2.0 };
    let most = if value(size) >= f64::from(E4M3_MAX) { f64::INFINITY } else { (value(size) + value(size + 1)) / 2.0 };
    if value(size).is_nan() { f64::NAN } else { (least - x).max(x - most).max(0.0) }
}

/// A cache of a device.
#[derive(Clone)]
struct OfDevice {
    /// Its first byte in the arena.
    at: u64,
    rows: u64,
    heads: u32,
    head_dim: u32,
    /// Columns of a head, with padding.
    pitch: u32,
    row_bytes: u32,
    swizzled: bool,
}

/// The caches of a device, in the order of those of the interpreter.
#[derive(Clone)]
pub struct DeviceCaches {
    shapes: Vec<CacheShape>,
    places: Vec<OfDevice>,
}

impl DeviceCaches {
    /// Those of the schedule that `interp` executes.
    ///
    /// # Panics
    /// If `interp` executes another schedule.
    pub fn new(schedule: &Schedule, interp: &Interp) -> DeviceCaches {
        DeviceCaches::of_shapes(schedule, interp.caches().to_vec())
    }

    /// Those of a schedule that stores no codes, so that no pack has to be read: of each layer keys, then values.
    pub(super) fn of_values(schedule: &Schedule) -> DeviceCaches {
        let shape = |layer: u32, kind: CacheKind, buffer: BufferId| {
            let Buffer { dtype, rows, cols, .. } = schedule.program.buffers[buffer.index()];
            let (rows, cols) = (rows as usize, cols as usize);
            CacheShape { buffer, dtype, rows, cols, layer, kind, scales: vec![] }
        };
        let of_layer = |(layer, (keys, values)): (u32, (BufferId, BufferId))| {
            [shape(layer, CacheKind::Key, keys), shape(layer, CacheKind::Value, values)]
        };
        DeviceCaches::of_shapes(schedule, cache_buffers(&schedule.program).into_iter().flat_map(of_layer).collect())
    }

    fn of_shapes(schedule: &Schedule, shapes: Vec<CacheShape>) -> DeviceCaches {
        let place = |shape: &CacheShape| {
            let attention = schedule.program.grids.iter().find_map(|grid| match &grid.op {
                Op::Attention(a) => {
                    let reads = |role| grid.operand(role).is_some_and(|operand| operand.buffer == shape.buffer);
                    (reads(Role::HistoryK) || reads(Role::HistoryV)).then_some(a)
                }
                _ => None,
            });
            let attention = attention.expect("interp: a cache is that of an attention");
            let heads = attention.kv_heads();
            OfDevice {
                at: schedule.placement[shape.buffer.index()].expect("validate: a cache has a place"),
                rows: shape.rows as u64,
                heads,
                head_dim: attention.head_dim,
                pitch: shape.cols as u32 / heads,
                row_bytes: shape.cols as u32 / heads * shape.dtype.bytes() as u32,
                swizzled: reader_of(schedule, shape.buffer).is_some_and(|variant| variant.swizzled),
            }
        };
        DeviceCaches { places: shapes.iter().map(place).collect(), shapes }
    }

    /// The codes of a row of every cache, or the bytes of its values, by column; the row holds `position` of its sequence. `read` returns 16-bit words of the arena
    /// from a byte on.
    ///
    /// # Errors
    /// Those of `read`.
    pub fn read(
        &self,
        row: u64,
        position: u32,
        read: &dyn Fn(u64, usize) -> Result<Vec<u16>, SessionError>,
    ) -> Result<Vec<Vec<u8>>, SessionError> {
        Ok(self.read_run(row, position..position + 1, read)?.remove(0))
    }

    /// The same of rows side by side, from `row` on, which hold `positions`: of each row what every cache has.
    pub(super) fn read_run(
        &self,
        row: u64,
        positions: Range<u32>,
        read: &dyn Fn(u64, usize) -> Result<Vec<u16>, SessionError>,
    ) -> Result<Vec<Vec<Vec<u8>>>, SessionError> {
        let mut rows = vec![vec![]; positions.len()];
        for place in &self.places {
            let row_bytes = place.row_bytes as usize;
            let mut codes = vec![vec![]; positions.len()];
            for head in 0..place.heads {
                let first = place.at + (u64::from(head) * place.rows + row) * u64::from(place.row_bytes);
                let words = read(first, positions.len() * row_bytes)?;
                let bytes: Vec<u8> = words.into_iter().flat_map(u16::to_le_bytes).collect();
                for ((position, codes), bytes) in positions.clone().zip(&mut codes).zip(bytes.chunks_exact(row_bytes)) {
                    let pieces = (0..place.row_bytes / 16).map(|piece| {
                        let swizzled = swizzled_piece(position, piece, place.row_bytes);
                        let lies = if place.swizzled { swizzled } else { piece };
                        &bytes[lies as usize * 16..][..16]
                    });
                    codes.extend(pieces.flatten());
                }
            }
            rows.iter_mut().zip(codes).for_each(|(row, codes)| row.push(codes));
        }
        Ok(rows)
    }

    /// Number of caches: of each layer that attends keys, and values.
    pub(super) fn count(&self) -> usize {
        self.shapes.len()
    }

    /// The layer of a cache, and what it has.
    pub(super) fn of(&self, cache: usize) -> (u32, &'static str) {
        let CacheShape { layer, kind, .. } = self.shapes[cache];
        (layer, if kind == CacheKind::Key { "keys" } else { "values" })
    }

    /// The largest distance of a head of two rows of a cache by column, norm by norm.
    pub(super) fn distance(&self, cache: usize, computed: &[f32], other: &[f32]) -> f64 {
        self.places[cache].distance(computed, other)
    }

    /// The values of a row of one cache by column, from its codes or the bytes of its values; 0 in columns that no head has.
    pub(super) fn by_column(&self, cache: usize, bytes: &[u8]) -> Vec<f32> {
        let (shape, size) = (&self.shapes[cache], self.shapes[cache].dtype.bytes());
        let mut values = vec![0.0; shape.cols];
        for column in self.places[cache].columns() {
            values[column] = match shape.scale_of(column as u32) {
                Some(scale) => e4m3(bytes[column]) * scale,
                None => read_value(shape.dtype, &bytes[column * size..][..size]),
            };
        }
        values
    }

    /// Whether the codes of the rows of a step are right, given what the interpreter would have rounded. `positions` are those of its rows.
    ///
    /// # Errors
    /// The first head of a row whose codes are too far away.
    pub(super) fn compare(
        &self,
        judge: &mut Judge,
        codes: &FromDevice,
        positions: &[u32],
        noise: Option<&FromDevice>,
    ) -> Result<(), CheckError> {
        for (row, &position) in positions.iter().enumerate() {
            for cache in 0..self.shapes.len() {
                let computed = codes.computed(cache, row);
                let mut allowed = before_rounding(judge.tolerance, self.shapes[cache].layer);
                if let Some(lane) = noise {
                    let cost = self.places[cache].distance(&computed, &lane.computed(cache, row));
                    allowed = super::worst(allowed, FACTOR * cost);
                }
                self.compare_row(judge, cache, position, &computed, codes.codes(cache, row), allowed)?;
            }
        }
        Ok(())
    }

    /// Whether the codes of a row of one cache are right, given the values that should have been rounded, by column.
    fn compare_row(
        &self,
        judge: &mut Judge,
        cache: usize,
        position: u32,
        computed: &[f32],
        codes: &[u8],
        allowed: f64,
    ) -> Result<(), CheckError> {
        let (layer, what) = self.of(cache);
        let found = self.places[cache].most_away(&self.shapes[cache], computed, codes);
        judge.cached(position, (layer, what), allowed, found)
    }

    /// The same caches with the scales of the reference, which reads no pack.
    fn with_scales_of(mut self, subject: &Subject<'_>) -> DeviceCaches {
        for shape in &mut self.shapes {
            let of_heads = cache_scales(subject.graph, subject.weights, shape.layer as usize);
            shape.scales = of_heads.iter().map(|scales| scales[kind_index(shape.kind)]).collect();
        }
        self
    }

    /// The keys and values of a row of bytes of every cache that has no codes: by layer, without padding.
    pub(super) fn values(&self, layers: usize, bytes: &[Vec<u8>]) -> Vec<[Vec<f64>; 2]> {
        let mut rows = vec![[vec![], vec![]]; layers];
        for ((shape, place), bytes) in self.shapes.iter().zip(&self.places).zip(bytes) {
            let size = shape.dtype.bytes();
            let value = |column: usize| f64::from(read_value(shape.dtype, &bytes[column * size..][..size]));
            rows[shape.layer as usize][kind_index(shape.kind)] = place.columns().map(value).collect();
        }
        rows
    }

    /// The keys and values of a row of codes as the reference has them: by layer, without padding.
    fn decoded(&self, layers: usize, codes: &[Vec<u8>]) -> Vec<[Vec<f64>; 2]> {
        let mut rows = vec![[vec![], vec![]]; layers];
        for ((shape, place), codes) in self.shapes.iter().zip(&self.places).zip(codes) {
            let value = |column: usize| {
                let scale = shape.scale_of(column as u32).unwrap_or(1.0);
                f64::from(e4m3(codes[column])) * f64::from(scale)
            };
            rows[shape.layer as usize][kind_index(shape.kind)] = place.columns().map(value).collect();
        }
        rows
    }

    /// Compares the codes of a row with the keys and values of a layer that the reference computed for it. `allowed` are the distances of keys and of
    /// values.
    fn compare_reference(
        &self,
        judge: &mut Judge,
        computed: &Computed,
        allowed: [f64; 2],
        codes: &[Vec<u8>],
    ) -> Result<(), CheckError> {
        for (cache, (shape, place)) in self.shapes.iter().zip(&self.places).enumerate() {
            if shape.layer as usize != computed.layer {
                continue;
            }
            let kind = kind_index(shape.kind);
            let mut by_column = vec![f32::NAN; shape.cols];
            place.columns().zip(&computed.rows[kind]).for_each(|(column, &value)| by_column[column] = value as f32);
            self.compare_row(judge, cache, computed.position, &by_column, &codes[cache], allowed[kind])?;
        }
        Ok(())
    }
}

fn kind_index(kind: CacheKind) -> usize {
    match kind {
        CacheKind::Key => 0,
        CacheKind::Value => 1,
    }
}

impl OfDevice {
    /// The columns of a row that have a dimension of a head, in order.
    fn columns(&self) -> impl Iterator<Item = usize> {
        let (pitch, head_dim) = (self.pitch as usize, self.head_dim as usize);
        (0..self.heads as usize).flat_map(move |head| head * pitch..head * pitch + head_dim)
    }

    /// The largest distance of a head of two rows by column, norm by norm, as [`OfDevice::most_away`] has it.
    fn distance(&self, computed: &[f32], other: &[f32]) -> f64 {
        let values = |row: &[f32]| self.columns().map(|column| f64::from(row[column])).collect::<Vec<f64>>();
        lanes::head_distance(&values(computed), &values(other), self.head_dim as usize)
    }

    /// The largest distance of a head of the row from its codes, norm by norm. The norm of a head counts as at least that of an average
    /// head, because errors of the layer's input are equally large in all heads.
    fn most_away(&self, shape: &CacheShape, computed: &[f32], codes: &[u8]) -> f64 {
        let pitch = self.pitch as usize;
        let of_head = |head: usize| {
            let columns = head * pitch..head * pitch + self.head_dim as usize;
            let scale = f64::from(shape.scale_of(columns.start as u32).unwrap_or(1.0));
            let units = computed[columns.clone()].iter().map(|&x| f64::from(x) / scale);
            let sums = units.zip(&codes[columns]).map(|(x, &code)| [away(code, x).powi(2), x * x]);
            let [away, norm] = sums.fold([0.0; 2], |[a, b], [c, d]| [a + c, b + d]);
            // Scales differ from head to head.
            [away, norm].map(|squares| squares * scale * scale)
        };
        let heads: Vec<[f64; 2]> = (0..self.heads as usize).map(of_head).collect();
        let average = heads.iter().map(|[_, norm]| norm).sum::<f64>() / heads.len().max(1) as f64;
        let relative = |&[away, norm]: &[f64; 2]| if away == 0.0 { 0.0 } else { (away / norm.max(average)).sqrt() };
        heads.iter().map(relative).fold(0.0, super::worst)
    }
}

/// What caches have before a filled position.
pub enum CacheContents<'a> {
    /// Numbers at random, with [`FILL_SEED`]: before an op alone.
    AtRandom { rows: u32 },
    /// Keys and values of a text that the model read.
    OfText(Filler<'a>),
}

impl CacheContents<'_> {
    /// Rows that are filled, from row 0 on.
    pub fn rows(&self) -> u32 {
        match self {
            CacheContents::AtRandom { rows } => *rows,
            CacheContents::OfText(filler) => filler.rows(),
        }
    }

    /// Fills the caches of an interpreter and makes the row after them its next position.
    ///
    /// # Errors
    /// Those of [`Interp::fill_cache`].
    pub fn put(&self, interp: &mut Interp) -> Result<(), InterpError> {
        match self {
            CacheContents::AtRandom { rows } => interp.fill_cache(FILL_SEED, *rows),
            CacheContents::OfText(filler) => {
                interp.fill_states(filler.rows(), |layer, _| filler.state(layer as usize).to_vec());
                interp.fill_cache_with(filler.rows(), |cache, row| {
                    let layer = cache.layer as usize;
                    let attn = lanes::attention_of(filler.graph(), layer);
                    let pitch = cache.cols / attn.kv_heads as usize;
                    // Columns that no head has stay 0.
                    let mut by_column = vec![0.0; cache.cols];
                    let row = filler.row(layer, cache.kind, row);
                    for (columns, head) in
                        by_column.chunks_exact_mut(pitch).zip(row.chunks_exact(attn.head_dim as usize))
                    {
                        columns[..head.len()].copy_from_slice(head);
                    }
                    by_column
                })
            }
        }
    }

    /// Fills the caches of a device.
    ///
    /// # Errors
    /// What the device refuses.
    pub(super) fn put_on_device(&self, session: &mut Session, schedule: &Schedule) -> Result<(), SessionError> {
        let filler = match self {
            CacheContents::AtRandom { rows } => return fill_device_cache(session, schedule, FILL_SEED, *rows),
            CacheContents::OfText(filler) => filler,
        };
        write_device_states(session, schedule, filler.rows(), &|layer, _| filler.state(layer as usize).to_vec())?;
        write_device_cache(session, schedule, filler.rows(), &|layer, kind, row, columns, is_coded| {
            let layer = layer as usize;
            let (dim, pitch) = (lanes::attention_of(filler.graph(), layer).head_dim as usize, columns.len());
            let head = columns.start as usize / pitch;
            let values = filler.row(layer, kind, row);
            let values = values[head * dim..(head + 1) * dim].iter().copied();
            let scale = filler.scale(layer, kind, head);
            let stored =
                |value: f32| if is_coded { Stored::Code(to_e4m3(value / scale)) } else { Stored::Value(value) };
            values.chain(std::iter::repeat(0.0)).take(pitch).map(stored).collect()
        })
    }
}

/// A kernel for one row, or the interpreter's fast path, as the check drives it.
pub trait OneRow {
    /// Logits of the `wanted` positions, and after them the outputs of an op alone, where `ids` are decoded from position `first` on.
    /// `figures` are those of the positions before.
    ///
    /// # Errors
    /// What the device refuses; other bits in a second run.
    fn decode(
        &mut self,
        figures: Figures,
        ids: &[u32],
        first: u32,
        wanted: &[u32],
    ) -> Result<Vec<Vec<f32>>, CheckError>;

    /// Puts `cache` into the first rows of all caches.
    ///
    /// # Errors
    /// What the device refuses.
    fn fill(&mut self, cache: &CacheContents<'_>) -> Result<(), CheckError>;

    /// Decodes `ids` from position `first` on once more: the experts that each row chose, by router and slot.
    ///
    /// # Errors
    /// What the device refuses.
    fn choices(&mut self, ids: &[u32], first: u32) -> Result<Vec<Vec<Vec<u32>>>, CheckError>;

    /// The codes that the row at `position` left in every cache, by column.
    ///
    /// # Errors
    /// What the device refuses.
    fn codes(&self, caches: &DeviceCaches, position: u32) -> Result<Vec<Vec<u8>>, SessionError>;
}

/// The decode kernel over a cache of its own.
pub(super) struct OnDevice<'a> {
    pub schedule: &'a Schedule,
    /// Of an op alone.
    pub outputs: &'a [BufferId],
    pub session: &'a mut Session,
    pub steps_max: u32,
}

impl OneRow for OnDevice<'_> {
    fn decode(
        &mut self,
        figures: Figures,
        ids: &[u32],
        first: u32,
        wanted: &[u32],
    ) -> Result<Vec<Vec<f32>>, CheckError> {
        let (vocab, steps_max) = (self.session.vocab(), self.steps_max);
        let session = &mut *self.session;
        let states = KeptStates::before(first, session, self.schedule)?;
        twice(figures, wanted, || {
            states.put_back(session)?;
            let mut rows = device_logits(session, ids, first, steps_max, vocab, wanted)?;
            if let Some(last) = rows.last_mut() {
                for output in self.outputs {
                    last.extend(session.exchanged(*output, 0)?);
                }
            }
            Ok(rows)
        })
    }

    fn fill(&mut self, cache: &CacheContents<'_>) -> Result<(), CheckError> {
        Ok(cache.put_on_device(self.session, self.schedule)?)
    }

    fn choices(&mut self, ids: &[u32], first: u32) -> Result<Vec<Vec<Vec<u32>>>, CheckError> {
        self.session.start(ids, &[])?;
        let mut rows = vec![];
        for position in first..ids.len() as u32 {
            self.session.run(position, 1, true)?;
            rows.push(choices_of(&self.schedule.program, |buffer| self.session.exchanged(buffer, 0))?);
        }
        Ok(rows)
    }

    fn codes(&self, caches: &DeviceCaches, position: u32) -> Result<Vec<Vec<u8>>, SessionError> {
        caches.read(u64::from(position), position, &|at, bytes| self.session.read_cache(at, bytes))
    }
}

/// The interpreter's fast path.
struct OnCpu<'a> {
    subject: &'a Subject<'a>,
    fast: &'a mut Interp,
}

impl OneRow for OnCpu<'_> {
    fn decode(&mut self, _: Figures, ids: &[u32], first: u32, wanted: &[u32]) -> Result<Vec<Vec<f32>>, CheckError> {
        if first == 0 {
            self.fast.reset();
        }
        let mut rows = vec![];
        self.fast.launch(&inputs(&ids[first as usize..]), |step| {
            keep(step, wanted, &mut rows);
            ControlFlow::Continue(())
        })?;
        if let Some(last) = rows.last_mut() {
            self.subject.outputs().iter().for_each(|output| last.extend(self.fast.exchanged(*output, 0)));
        }
        Ok(rows)
    }

    fn fill(&mut self, cache: &CacheContents<'_>) -> Result<(), CheckError> {
        self.fast.reset();
        Ok(cache.put(self.fast)?)
    }

    fn choices(&mut self, ids: &[u32], first: u32) -> Result<Vec<Vec<Vec<u32>>>, CheckError> {
        let program = &self.subject.validated.schedule().program;
        if first == 0 {
            self.fast.reset();
        }
        let mut rows = vec![];
        for input in inputs(&ids[first as usize..]) {
            self.fast.launch(&[input], |_| ControlFlow::Continue(()))?;
            rows.push(choices_of(program, |buffer| Ok::<_, CheckError>(self.fast.exchanged(buffer, 0)))?);
        }
        Ok(rows)
    }

    fn codes(&self, caches: &DeviceCaches, position: u32) -> Result<Vec<Vec<u8>>, SessionError> {
        Ok((0..caches.shapes.len()).map(|cache| self.fast.read_cache(cache, position as usize)).collect())
    }
}

/// Compares a device with the reference, which takes the device's codes. See [`super::check_cuda`].
pub(super) fn check_codes(
    subject: &Subject<'_>,
    session: &mut Session,
    steps_max: u32,
    on_step: &dyn Fn(),
) -> Result<Checked, CheckError> {
    let (schedule, outputs) = (subject.validated.schedule(), subject.outputs());
    let checked = compare_codes(subject, &mut OnDevice { schedule, outputs, session, steps_max }, on_step)?;
    let (vocab, context_max) = (subject.graph.vocab, subject.validated.schedule().program.context_max);
    check_selection(session, vocab, steps_max, context_max, checked.figures)?;
    Ok(checked)
}

/// Compares what a kernel for one row computes at all positions of `subject`. `on_step` is called for each of [`super::expect_steps`].
///
/// # Errors
/// See [`CheckError`]; the first fault ends the comparison.
pub fn compare_codes(
    subject: &Subject<'_>,
    device: &mut dyn OneRow,
    on_step: &dyn Fn(),
) -> Result<Checked, CheckError> {
    let schedule = subject.validated.schedule();
    let caches = if stores_codes(schedule.program.precision) {
        DeviceCaches::new(schedule, &Interp::new(schedule, subject.pack.clone(), Options::spec())?)
    } else {
        DeviceCaches::of_values(schedule)
    };
    compare_one_row(subject, device, &caches, true, on_step)
}

/// As [`compare_codes`], for the interpreter's fast path.
///
/// # Errors
/// See [`CheckError`]; the first fault ends the comparison.
pub fn compare_cpu_codes(subject: &Subject<'_>, fast: &mut Interp, on_step: &dyn Fn()) -> Result<Checked, CheckError> {
    let schedule = subject.validated.schedule();
    let caches = if stores_codes(schedule.program.precision) {
        DeviceCaches::new(schedule, fast)
    } else {
        DeviceCaches::of_values(schedule)
    };
    compare_one_row(subject, &mut OnCpu { subject, fast }, &caches, false, on_step)
}

fn compare_one_row(
    subject: &Subject<'_>,
    device: &mut dyn OneRow,
    caches: &DeviceCaches,
    is_device: bool,
    on_step: &dyn Fn(),
) -> Result<Checked, CheckError> {
    let precision = subject.validated.schedule().program.precision;
    let mut judge = Judge::new(tolerance(precision));
    let (prompted, filled) = split(subject, if is_device { PROMPT_COST_MAX } else { REFERENCE_COST_MAX });
    if subject.alone.is_some() {
        compare_with_interp(subject, device, filled, &mut judge, on_step)?;
    } else {
        let rounding = Rounding { precision, staged: is_device };
        let compare = if stores_codes(precision) { compare_with_reference } else { compare_by_choices };
        compare(subject, device, caches, [prompted, filled], &rounding, &mut judge, on_step)?;
    }
    Ok(Checked { figures: judge.figures })
}

/// Compares `device` with the reference, which takes its codes, at prompted positions and at filled ones.
fn compare_with_reference(
    subject: &Subject<'_>,
    device: &mut dyn OneRow,
    caches: &DeviceCaches,
    [prompted, filled]: [&[u32]; 2],
    rounding: &Rounding,
    judge: &mut Judge,
    on_step: &dyn Fn(),
) -> Result<(), CheckError> {
    let Subject { graph, weights, .. } = *subject;
    let (mut texts, fill) = texts_and_fill(subject, [prompted, filled], rounding, on_step);
    let of_reference = caches.clone().with_scales_of(subject);
    // Of each text: the codes of its rows, and the logits of its wanted positions.
    let mut codes: Vec<Vec<Vec<Vec<u8>>>> = vec![];
    let mut found = vec![];
    for text in &mut texts {
        let Text { first, ids, wanted, taken, chosen, .. } = text;
        let (first, mut of_rows) = (*first, vec![]);
        if !wanted.is_empty() {
            fill_before(first, subject, device, &fill)?;
            let all = check_ids(graph.vocab, first + ids.len() as u32);
            found.extend(device.decode(judge.figures, &all, first, wanted)?);
            for position in first..all.len() as u32 {
                of_rows.push(device.codes(caches, position)?);
            }
            *taken = Some(of_rows.iter().map(|codes| of_reference.decoded(graph.layers.len(), codes)).collect());
            *chosen = take_choices(subject, device, &fill, &all, first)?;
        }
        codes.push(of_rows);
    }
    let pass = lanes::compute(graph, weights, rounding, &texts, on_step);
    judge_choices(judge, &pass, Tolerance::least(rounding.staged))?;
    // The fault that comes first in the text and in the model is the cause of others.
    let mut computed: Vec<&Computed> = pass.computed.iter().collect();
    computed.sort_by_key(|of| (of.text, of.position, of.layer));
    let least = Tolerance::least(rounding.staged);
    let middles = pass.middles(graph.layers.len());
    let all: Vec<Noise> = pass.wanted.iter().map(|wanted| Noise::of(&wanted.exact, &wanted.lanes)).collect();
    let of_logits = Noise::median(all.iter().copied());
    let mut wanted = pass.wanted.iter().zip(&all).zip(&found).peekable();
    for of in computed {
        let allowed =
            [0, 1].map(|kind| super::worst(least.error_rel_l2, FACTOR * of.noise[kind].max(middles[of.layer][kind])));
        let row = (of.position - texts[of.text].first) as usize;
        of_reference.compare_reference(judge, of, allowed, &codes[of.text][row])?;
        let is_last = of.layer + 1 == graph.layers.len();
        let here = |((wanted, _), _): &((&lanes::Wanted, &Noise), &Vec<f32>)| {
            (wanted.text, wanted.position) == (of.text, of.position)
        };
        if is_last && let Some(((expected, noise), found)) = wanted.next_if(here) {
            let tolerance = least.with_noise(noise.or_worse(of_logits));
            let fixed = std::mem::replace(&mut judge.tolerance, tolerance);
            judge.compare(of.position, &expected.exact, found)?;
            judge.tolerance = fixed;
        }
    }
    Ok(())
}

/// The texts of a comparison, and what the model makes of the one that fills caches.
fn texts_and_fill(
    subject: &Subject<'_>,
    [prompted, filled]: [&[u32]; 2],
    rounding: &Rounding,
    on_step: &dyn Fn(),
) -> (Vec<Text>, lanes::Fill) {
    let texts = lanes::texts(subject.graph.vocab, rounding.lanes(), prompted, filled);
    if filled.is_empty() {
        return (texts, lanes::Fill::default());
    }
    let fill = lanes::compute(subject.graph, subject.weights, rounding, &texts[..1], on_step).fill;
    (texts, fill)
}

/// Fills the device's cache before position `first` with what the model makes of a text.
fn fill_before(
    first: u32,
    subject: &Subject<'_>,
    device: &mut dyn OneRow,
    fill: &lanes::Fill,
) -> Result<(), CheckError> {
    if first == 0 {
        return Ok(());
    }
    let cache = subject.validated.schedule().program.precision.cache;
    device.fill(&CacheContents::OfText(Filler::new(subject.graph, subject.weights, cache, fill, first)))
}

/// What a device chose of the experts of the rows of a text, by row, layer and slot; `None`: the model has none.
fn take_choices(
    subject: &Subject<'_>,
    device: &mut dyn OneRow,
    fill: &lanes::Fill,
    ids: &[u32],
    first: u32,
) -> Result<Option<Vec<Vec<Vec<u32>>>>, CheckError> {
    let routers = choice_buffers(&subject.validated.schedule().program);
    if routers.is_empty() {
        return Ok(None);
    }
    fill_before(first, subject, device, fill)?;
    let by_layer = |row: Vec<Vec<u32>>| {
        let mut layers = vec![vec![]; subject.graph.layers.len()];
        routers.iter().zip(row).for_each(|((layer, _), ids)| layers[layer.index()] = ids);
        layers
    };
    Ok(Some(device.choices(ids, first)?.into_iter().map(by_layer).collect()))
}

/// The middle of some distances; 0 if there are none.
pub(super) fn median(distances: &[f64]) -> f64 {
    let mut sorted = distances.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}

/// Whether a choice is right within what rounding costs the scores that it was made by, or, if that is more, those of the `middle` choice. The
/// group scores of a router add up two of them. `row`: that of the step, if it has several.
///
/// # Errors
/// [`CheckError::Routed`].
pub(super) fn judge_choice(
    judge: &mut Judge,
    of: &lanes::Routed,
    row: Option<u32>,
    middle: f64,
    least: Tolerance,
) -> Result<(), CheckError> {
    let lanes::Routed { position, layer, missed, noise, most, .. } = *of;
    let expected = 2.0 * FACTOR * noise.max(middle) + least.error_rel_l2 * most;
    judge.figures.of_tolerance =
        super::worst(judge.figures.of_tolerance, if missed == 0.0 { 0.0 } else { missed / expected });
    if super::is_beyond(missed, expected) {
        let (layer, found, figures) = (layer as u32, missed, judge.figures);
        return Err(CheckError::Routed { position, row, layer, expected, found, figures });
    }
    Ok(())
}

/// Judges every choice of texts.
fn judge_choices(judge: &mut Judge, pass: &lanes::Pass, least: Tolerance) -> Result<(), CheckError> {
    let mut routed: Vec<&lanes::Routed> = pass.routed.iter().collect();
    routed.sort_by_key(|of| (of.text, of.position, of.layer));
    let middle = median(&routed.iter().map(|of| of.noise).collect::<Vec<f64>>());
    routed.into_iter().try_for_each(|of| judge_choice(judge, of, None, middle, least))
}

/// Compares `device`, which stores no codes, with the reference, which takes its choices of experts.
fn compare_by_choices(
    subject: &Subject<'_>,
    device: &mut dyn OneRow,
    caches: &DeviceCaches,
    [prompted, filled]: [&[u32]; 2],
    rounding: &Rounding,
    judge: &mut Judge,
    on_step: &dyn Fn(),
) -> Result<(), CheckError> {
    let Subject { graph, weights, .. } = *subject;
    let (mut texts, fill) = texts_and_fill(subject, [prompted, filled], rounding, on_step);
    /// Keys and values of a layer.
    type Appended = [Vec<f64>; 2];
    // Of each wanted position: logits, and what it appended.
    let mut found: Vec<(Vec<f32>, Vec<Appended>)> = vec![];
    for text in texts.iter_mut().filter(|text| !text.wanted.is_empty()) {
        let Text { first, ids, wanted, chosen, .. } = text;
        fill_before(*first, subject, device, &fill)?;
        let all = check_ids(graph.vocab, *first + ids.len() as u32);
        for (&position, logits) in wanted.iter().zip(device.decode(judge.figures, &all, *first, wanted)?) {
            let appended = caches.values(graph.layers.len(), &device.codes(caches, position)?);
            found.push((logits, appended));
        }
        *chosen = take_choices(subject, device, &fill, &all, *first)?;
    }
    let pass = lanes::compute(graph, weights, rounding, &texts, on_step);
    judge_choices(judge, &pass, Tolerance::least(rounding.staged))?;
    let rows = expected_rows(graph, &texts, pass);
    for (row, (logits, appended)) in rows.iter().zip(found) {
        judge.compare_expected(graph, row, &logits, || Ok(appended), rounding.staged)?;
    }
    Ok(())
}

/// Compares `device` with the interpreter in f64, which takes its codes, at the positions of an op alone.
fn compare_with_interp(
    subject: &Subject<'_>,
    device: &mut dyn OneRow,
    filled: &[u32],
    judge: &mut Judge,
    on_step: &dyn Fn(),
) -> Result<(), CheckError> {
    let (schedule, vocab) = (subject.validated.schedule(), subject.graph.vocab);
    let mut interp = Interp::new(schedule, subject.pack.clone(), Options::spec())?;
    let caches = DeviceCaches::new(schedule, &interp);
    for &wanted in filled {
        let first = filled_rows(wanted);
        let ids = check_ids(vocab, wanted + 1);
        interp.reset();
        let cache = CacheContents::AtRandom { rows: first };
        device.fill(&cache)?;
        cache.put(&mut interp)?;
        let found = device.decode(judge.figures, &ids, first, &[wanted])?.concat();
        for (position, &id) in (first..).zip(&ids[first as usize..]) {
            let codes = interp.take(1, Taken { codes: device.codes(&caches, position)?, choices: vec![] });
            let mut expected = step(&mut interp, id)?;
            caches.compare(judge, &codes, &[position], None)?;
            if position == wanted {
                subject.outputs().iter().for_each(|output| expected.extend(interp.exchanged(*output, 0)));
                judge.compare_row(vocab, position, &expected, &found)?;
            }
        }
        on_step();
    }
    Ok(())
}

fn step(interp: &mut Interp, id: u32) -> Result<Vec<f32>, CheckError> {
    let mut logits = vec![];
    interp.launch(&[Input::Token(id)], |step| {
        step.logits.copy_to(&mut logits);
        ControlFlow::Continue(())
    })?;
    Ok(logits)
}
