//! Compares a device whose cache has codes of fp8 with the interpreter, and the interpreter's fast path with the reference.
//!
//! If two values differ in the last bit of a bf16, rounding to e4m3 makes that a step of 6 to 12 % in about every tenth code, and every
//! layer builds on the codes of those before. So two right kernels that add up in different orders differ by about two thirds of what
//! the rounding costs, and a bound that is wide enough for that finds no faults. The check therefore reads the codes that the device
//! stored, and compares in two ways:
//!
//! 1. *Each step of the interpreter takes the device's codes in place of its own keys and values.* The values `x` that it would have
//!    rounded say whether the codes are right: a device that computed `y` stored the code of `y`, so `x` is no further from the nearest
//!    value with this code than from `y`.
//! 2. *Logits* then differ by the arithmetic alone, as with a cache in bf16, and are held to that tolerance.
//!
//! The same holds on `cpu`: there the interpreter's fast path is the device, and the reference takes its codes.

use std::ops::ControlFlow;

use super::{
    CheckError, Checked, FILL_SEED, Figures, Judge, Subject, Tolerance, check_ids, filled_rows, inputs, keep,
    reader_of, split,
};
use super::{PROMPT_COST_MAX, REFERENCE_COST_MAX, check_selection, device_logits, fill_device_cache, twice};
use crate::cuda::session::{Session, SessionError};
use crate::dtype::{DType, Precision};
use crate::format::{E4M3_MAX, e4m3};
use crate::interp::{CacheKind, CacheShape, DeviceCodes, Input, Interp, Options};
use crate::ir::op::{Op, Role};
use crate::ir::schedule::Schedule;
use crate::ir::variant::swizzled_piece;
use crate::model::cache_scales::cache_scales;
use crate::reference;

/// About how many vectors of a layer are rounded to bf16: these errors reach the layers after it.
const ROUNDED_PER_LAYER: f64 = 10.0;
/// Most relative error of a number of 8 bits, and so of a vector of them.
const BF16_ERROR: f64 = 1.0 / 512.0;

/// Whether a device with this cache is compared by the codes that it stores.
pub fn stores_codes(precision: Precision) -> bool {
    precision.cache == DType::E4m3
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

/// The tolerance of a layer's keys and values before they are rounded to codes, norm of the error by norm. Errors of the vectors of one
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
struct OfDevice {
    /// Its first byte in the arena.
    at: u64,
    rows: u64,
    heads: u32,
    head_dim: u32,
    row_bytes: u32,
    swizzled: bool,
}

/// The caches of a device, in the order of those of the interpreter.
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
        let shapes = interp.caches().to_vec();
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
                row_bytes: shape.cols as u32 / heads,
                swizzled: reader_of(schedule, shape.buffer).is_some_and(|variant| variant.swizzled),
            }
        };
        DeviceCaches { places: shapes.iter().map(place).collect(), shapes }
    }

    /// The codes of a row of every cache, by column; the row holds `position` of its sequence. `read` returns 16-bit words of the arena
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
        let of_cache = |place: &OfDevice| {
            let mut codes = vec![];
            for head in 0..place.heads {
                let first = place.at + (u64::from(head) * place.rows + row) * u64::from(place.row_bytes);
                let bytes: Vec<u8> =
                    read(first, place.row_bytes as usize)?.into_iter().flat_map(u16::to_le_bytes).collect();
                let pieces = (0..place.row_bytes / 16).map(|piece| {
                    let lies = if place.swizzled { swizzled_piece(position, piece, place.row_bytes) } else { piece };
                    &bytes[lies as usize * 16..][..16]
                });
                codes.extend(pieces.flatten());
            }
            Ok(codes)
        };
        self.places.iter().map(of_cache).collect()
    }

    /// Whether the codes of the rows of a step are right, given what the interpreter would have rounded. `positions` are those of its rows.
    ///
    /// # Errors
    /// The first head of a row whose codes are too far away.
    pub(super) fn compare(&self, judge: &Judge, codes: &DeviceCodes, positions: &[u32]) -> Result<(), CheckError> {
        for (row, &position) in positions.iter().enumerate() {
            for cache in 0..self.shapes.len() {
                self.compare_row(judge, cache, position, &codes.computed(cache, row), codes.codes(cache, row))?;
            }
        }
        Ok(())
    }

    /// Whether the codes of a row of one cache are right, given the values that should have been rounded, by column.
    fn compare_row(
        &self,
        judge: &Judge,
        cache: usize,
        position: u32,
        computed: &[f32],
        codes: &[u8],
    ) -> Result<(), CheckError> {
        let CacheShape { layer, kind, .. } = self.shapes[cache];
        let allowed = before_rounding(judge.tolerance, layer);
        let found = self.places[cache].most_away(&self.shapes[cache], computed, codes);
        // A NaN is no smaller than the bound.
        if found.is_nan() || found > allowed {
            let what = if kind == CacheKind::Key { "keys" } else { "values" };
            let figures = judge.figures;
            return Err(CheckError::Cached { position, layer, what, expected: allowed, found, figures });
        }
        Ok(())
    }

    /// The same caches with the scales of the reference, which reads no pack.
    fn with_scales_of(mut self, subject: &Subject<'_>) -> DeviceCaches {
        for shape in &mut self.shapes {
            let of_heads = cache_scales(subject.graph, subject.weights, shape.layer as usize);
            shape.scales = of_heads.iter().map(|scales| scales[kind_index(shape.kind)]).collect();
        }
        self
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

    /// Compares the codes of a row with the keys and values of the reference for it, as [`DeviceCaches::decoded`] has them.
    fn compare_reference(
        &self,
        judge: &Judge,
        position: u32,
        computed: &[[Vec<f64>; 2]],
        codes: &[Vec<u8>],
    ) -> Result<(), CheckError> {
        for (cache, (shape, place)) in self.shapes.iter().zip(&self.places).enumerate() {
            let mut by_column = vec![f32::NAN; shape.cols];
            let row = &computed[shape.layer as usize][kind_index(shape.kind)];
            place.columns().zip(row).for_each(|(column, &value)| by_column[column] = value as f32);
            self.compare_row(judge, cache, position, &by_column, &codes[cache])?;
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
        let (pitch, head_dim) = (self.row_bytes as usize, self.head_dim as usize);
        (0..self.heads as usize).flat_map(move |head| head * pitch..head * pitch + head_dim)
    }

    /// The largest distance of a head of the row from its codes, norm by norm. The norm of a head counts as at least that of an average
    /// head, because errors of the layer's input are equally large in all heads.
    fn most_away(&self, shape: &CacheShape, computed: &[f32], codes: &[u8]) -> f64 {
        let pitch = self.row_bytes as usize;
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

    /// Puts the values of [`Interp::fill_cache`] into rows `0..rows` of all caches, with [`FILL_SEED`].
    ///
    /// # Errors
    /// What the device refuses.
    fn fill(&mut self, rows: u32) -> Result<(), CheckError>;

    /// The codes that the row at `position` left in every cache, by column.
    ///
    /// # Errors
    /// What the device refuses.
    fn codes(&self, caches: &DeviceCaches, position: u32) -> Result<Vec<Vec<u8>>, SessionError>;
}

struct OnDevice<'a> {
    subject: &'a Subject<'a>,
    session: &'a mut Session,
    steps_max: u32,
}

impl OneRow for OnDevice<'_> {
    fn decode(
        &mut self,
        figures: Figures,
        ids: &[u32],
        first: u32,
        wanted: &[u32],
    ) -> Result<Vec<Vec<f32>>, CheckError> {
        let (session, vocab, steps_max) = (&mut *self.session, self.subject.graph.vocab, self.steps_max);
        twice(figures, wanted, || {
            let mut rows = device_logits(session, ids, first, steps_max, vocab, wanted)?;
            if let Some(last) = rows.last_mut() {
                for output in self.subject.outputs() {
                    last.extend(session.exchanged(*output)?);
                }
            }
            Ok(rows)
        })
    }

    fn fill(&mut self, rows: u32) -> Result<(), CheckError> {
        Ok(fill_device_cache(self.session, self.subject.validated.schedule(), FILL_SEED, rows)?)
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
            self.subject.outputs().iter().for_each(|output| last.extend(self.fast.exchanged(*output)));
        }
        Ok(rows)
    }

    fn fill(&mut self, rows: u32) -> Result<(), CheckError> {
        self.fast.reset();
        Ok(self.fast.fill_cache(FILL_SEED, rows)?)
    }

    fn codes(&self, caches: &DeviceCaches, position: u32) -> Result<Vec<Vec<u8>>, SessionError> {
        Ok((0..caches.shapes.len()).map(|cache| self.fast.read_cache(cache, position as usize)).collect())
    }
}

/// Compares a device with the interpreter in f64, which takes the device's codes. See [`super::check_cuda`].
pub(super) fn check_codes(
    subject: &Subject<'_>,
    session: &mut Session,
    steps_max: u32,
    on_step: &dyn Fn(),
) -> Result<Checked, CheckError> {
    let checked = compare_codes(subject, &mut OnDevice { subject, session, steps_max }, on_step)?;
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
    let mut judge = Judge::new(tolerance(subject.validated.schedule().program.precision));
    let (prompted, filled) = split(subject, PROMPT_COST_MAX);
    compare_with_interp(subject, device, [prompted, filled], &mut judge, on_step)?;
    Ok(Checked { figures: judge.figures })
}

/// Compares the interpreter's fast path at all positions of `subject`: with the reference, and with the interpreter in f64 at deep
/// positions and of an op alone. Both take its codes. `on_step` is called for each of [`super::expect_steps`].
///
/// # Errors
/// See [`CheckError`]; the first fault ends the comparison.
pub fn compare_cpu_codes(subject: &Subject<'_>, fast: &mut Interp, on_step: &dyn Fn()) -> Result<Checked, CheckError> {
    let Subject { graph, weights, .. } = *subject;
    let schedule = subject.validated.schedule();
    let mut judge = Judge::new(Tolerance::of(of_arithmetic(schedule.program.precision)));
    let (prompted, filled) = split(subject, REFERENCE_COST_MAX);
    if let Some(last) = prompted.last() {
        let caches = DeviceCaches::new(schedule, fast).with_scales_of(subject);
        let mut cpu = OnCpu { subject, fast };
        let mut session = reference::Session::new(graph, weights);
        let ids = check_ids(graph.vocab, last + 1);
        let found = cpu.decode(judge.figures, &ids, 0, prompted)?;
        let mut found = prompted.iter().zip(found).peekable();
        for (position, &id) in (0..).zip(&ids) {
            let codes = cpu.codes(&caches, position)?;
            let mut rows = caches.decoded(graph.layers.len(), &codes);
            let hidden = session.step_taking(id, &mut rows);
            caches.compare_reference(&judge, position, &rows, &codes)?;
            if let Some((_, found)) = found.next_if(|(wanted, _)| **wanted == position) {
                judge.compare(position, &session.logits(&hidden), &found)?;
            }
            on_step();
        }
    }
    compare_with_interp(subject, &mut OnCpu { subject, fast }, [&[], filled], &mut judge, on_step)?;
    Ok(Checked { figures: judge.figures })
}

/// Compares `device` with the interpreter in f64, which takes its codes, at prompted positions and at filled ones.
fn compare_with_interp(
    subject: &Subject<'_>,
    device: &mut dyn OneRow,
    [prompted, filled]: [&[u32]; 2],
    judge: &mut Judge,
    on_step: &dyn Fn(),
) -> Result<(), CheckError> {
    let (schedule, vocab) = (subject.validated.schedule(), subject.graph.vocab);
    let prompt = prompted.last().map(|_| (0, prompted, true));
    let filled = filled.iter().map(|position| (filled_rows(*position), std::slice::from_ref(position), false));
    let mut runs = prompt.into_iter().chain(filled).peekable();
    if runs.peek().is_none() {
        return Ok(());
    }
    let mut interp = Interp::new(schedule, subject.pack.clone(), Options::spec())?;
    let caches = DeviceCaches::new(schedule, &interp);
    for (first, wanted, is_prompt) in runs {
        let ids = check_ids(vocab, wanted.last().map_or(0, |last| last + 1));
        interp.reset();
        if first > 0 {
            device.fill(first)?;
            interp.fill_cache(FILL_SEED, first)?;
        }
        let found = device.decode(judge.figures, &ids, first, wanted)?;
        let mut found = wanted.iter().zip(found).peekable();
        for (position, &id) in (first..).zip(&ids[first as usize..]) {
            let codes = interp.take_codes(1, device.codes(&caches, position)?);
            let mut expected = step(&mut interp, id)?;
            caches.compare(judge, &codes, &[position])?;
            if let Some((_, found)) = found.next_if(|(wanted, _)| **wanted == position) {
                subject.outputs().iter().for_each(|output| expected.extend(interp.exchanged(*output)));
                judge.compare_row(vocab, position, &expected, &found)?;
            }
            if is_prompt || wanted.contains(&position) {
                on_step();
            }
        }
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
