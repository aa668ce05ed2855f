//! Owns what each op computes: the formulas of `ir::op`, written once over both arithmetics and both kinds of memory.

use super::coded;
use super::kernel::{HistoryRows, Isa};
use super::memory::{Access, OfRow, Region, StepRows, round_to_cache};
use super::mix::mix;
use super::plan::{self, Current, DealtPart, Norm, Plan, Table, TaskPlan, Work};
use super::real::{self, Real, read_value};
use super::recurrent::{convolve, group_norm, scan};
use crate::dtype::DType;
use crate::format::{Code, Format};
use crate::ir::GridId;
use crate::ir::op::{Epilogue, PARTIAL_HEADER, QkNormAttr};
use crate::model::graph::{ExpertGroups, GroupScore, NormKind, QkNormSpan, QueryScale, Score};
use std::ops::Range;

/// Everything of a task that is not its operands in memory.
#[derive(Clone, Copy)]
pub struct Step<'a> {
    pub plan: &'a Plan,
    pub pack: &'a [u8],
    pub isa: Isa,
    pub rows: &'a StepRows,
    /// Different for every step executed, also if a position is decoded again.
    pub serial: u64,
    /// Ordinals whose arg-max pairs the previous step wrote.
    pub previous_parts: &'a [u32],
}

/// Where the token of a step comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Input {
    /// The prompt, or a choice of the caller.
    Token(u32),
    /// The arg-max over the arg-max pairs of the previous step.
    Selected,
}

/// Cache rows that the loader brought in for a task.
#[derive(Clone, Copy)]
pub struct History<'a> {
    pub keys: HistoryRows<'a>,
    pub values: HistoryRows<'a>,
    pub rows: usize,
}

/// What the task's stream delivered.
#[derive(Clone, Copy)]
pub enum Streamed<'a> {
    Nothing,
    Weights(&'a [u8]),
    History(History<'a>),
}

/// Buffers that are reused from task to task.
pub struct Scratch<R> {
    load: Vec<f32>,
    /// The inputs of a matvec, one for each row that it computes, normalised and staged, what their results are multiplied by,
    /// and which grid of which step reads them. All tasks of a grid read the same inputs: a thread that stands in for many SMs
    /// stages them once.
    input: Vec<R>,
    input_scales: Vec<R>,
    input_of: InputOf,
    /// What the next product is computed for.
    asked: Vec<Asked>,
    /// Keys and values of prompt chunks of this step, and which grid of which step they are of: all rows of a chunk see them.
    step_keys: Vec<StepKeys>,
    step_keys_of: Option<(u64, GridId)>,
    /// Weights of several chosen parts, one after another.
    pub gathered: Vec<u8>,
    x: Vec<R>,
    y: Vec<R>,
    /// Values of the codes of a row.
    row: Vec<R>,
    q: Vec<R>,
    k: Vec<R>,
    v: Vec<R>,
    scores: Vec<R>,
    sums: Vec<R>,
}

/// Whose inputs are staged.
#[derive(Default)]
struct InputOf {
    /// The grid, and the number of the step; `None`: there are none.
    grid: Option<(u64, GridId)>,
    /// Of each input its row and the first of its columns.
    rows: Vec<(usize, usize)>,
}

impl InputOf {
    /// Becomes those of `grid` for `asked`; returns whether it was before.
    fn replace(&mut self, grid: (u64, GridId), asked: &[Asked]) -> bool {
        let rows = asked.iter().map(|asked| (asked.row, asked.x.first));
        let same = self.grid == Some(grid) && rows.clone().eq(self.rows.iter().copied());
        if !same {
            self.grid = Some(grid);
            self.rows.clear();
            self.rows.extend(rows);
        }
        same
    }
}

/// Keys and values of one KV head for the rows of a prompt chunk, one row after another.
struct StepKeys {
    kv_head: usize,
    /// The chunk's first row in the step.
    first: usize,
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl<R: Real> Scratch<R> {
    pub fn new() -> Self {
        Scratch {
            load: vec![],
            input: vec![],
            input_scales: vec![],
            input_of: InputOf::default(),
            asked: vec![],
            step_keys: vec![],
            step_keys_of: None,
            gathered: vec![],
            x: vec![],
            y: vec![],
            row: vec![],
            q: vec![],
            k: vec![],
            v: vec![],
            scores: vec![],
            sums: vec![],
        }
    }
}

/// Executes one task: one row of the step, or all of them, or of its part of the sequences, one after another. For a row that the launch does
/// not have, it does nothing.
pub fn run<R: Real>(
    task: &TaskPlan,
    step: &Step<'_>,
    stream: Streamed<'_>,
    memory: &mut impl Access,
    s: &mut Scratch<R>,
) {
    if let Work::MatVec(m) = &task.work {
        let weights = if let Streamed::Weights(weights) = stream { weights } else { &[] };
        return mat_vec(step, m, task.row, weights, memory, s);
    }
    let rows = match task.row {
        Some(row) => row..row + 1,
        None => 0..step.rows.rows.len(),
    };
    for row in rows.filter(|row| step.rows.rows.get(*row).is_some_and(|of| task.has(of.sequence))) {
        run_row(&task.work, step, row, stream, memory, s);
    }
}

fn run_row<R: Real>(
    work: &Work,
    step: &Step<'_>,
    row: usize,
    stream: Streamed<'_>,
    memory: &mut impl Access,
    s: &mut Scratch<R>,
) {
    let of_step = &step.rows.rows[row];
    let memory = &mut OfRow { memory, row };
    match work {
        Work::Select { best, token } => select(step, of_step.input, best, token, memory),
        Work::Report { token, out } => {
            let mut word = [0];
            memory.load_words(token, &mut word);
            memory.store_words(out, &word);
        }
        Work::Embed { token, table, residual, out, scale } => {
            let mut word = [0];
            memory.load_words(token, &mut word);
            s.load.clear();
            table_values(step.pack, table, word[0], residual.first, residual.len, &mut s.load);
            s.load.iter_mut().for_each(|v| *v *= scale);
            memory.store(residual, &s.load);
            out.iter().for_each(|out| memory.store(out, &s.load));
        }
        Work::Join { token, table, residual, given, out, scale } => {
            let mut word = [0];
            memory.load_words(token, &mut word);
            s.load.clear();
            table_values(step.pack, table, word[0], residual.first, residual.len, &mut s.load);
            s.load.iter_mut().for_each(|v| *v *= scale);
            memory.store(out, &s.load);
            let columns = residual.first..residual.first + residual.len;
            memory.store(given, &columns.map(|column| of_step.given(column)).collect::<Vec<f32>>());
            memory.store(residual, &vec![0.0; residual.len]);
        }
        Work::Route(route) => choose(step, row, route, memory, s),
        Work::Combine(combine) => add_up(combine, memory, s),
        // `run` does it for all rows at once.
        Work::MatVec(_) => {}
        // It reads keys of other rows, too.
        Work::Attention(a) => attention(step, row, a, stream, memory.memory, s),
        Work::AttentionMerge { head_dim, splits, heads } => {
            heads.iter().for_each(|head| merge(*head_dim, *splits, head, memory, s));
        }
        Work::NormAdd(n) => norm_add(step, n, memory, s),
        Work::Mix(m) => mix::<R>(step, of_step, m, memory),
        Work::Convolve(m) => convolve::<R>(step, of_step, m, memory),
        Work::Scan(m) => scan::<R>(step, of_step, m, memory),
        Work::GroupNorm(m) => group_norm::<R>(step, m, memory),
    }
}

/// Appends columns `first..first + len` of a row of the embedding table; the last row stands in for a token beyond the table, which
/// callers exclude.
fn table_values(pack: &[u8], t: &Table, token: u32, first: usize, len: usize, out: &mut Vec<f32>) {
    let row = token.min(t.rows.saturating_sub(1)) as usize;
    let row = &pack[t.bytes.start + row * t.row_bytes..][..t.row_bytes];
    let bytes = t.dtype.bytes();
    match t.coded {
        Some(format) => out.extend(format.table_values(row, t.cols, first).take(len)),
        None => {
            let values = row[first * bytes..(first + len) * bytes].chunks_exact(bytes);
            out.extend(values.map(|v| read_value(t.dtype, v)));
        }
    }
}

/// The better of two arg-max pairs: the larger logit, and of equal ones the lower row. Any number is better than none.
fn better(a: (f32, u32), b: (f32, u32)) -> (f32, u32) {
    if b.0 > a.0 || (b.0 == a.0 && b.1 < a.1) || (a.0.is_nan() && !b.0.is_nan()) { b } else { a }
}

/// Arg-max over the pairs (bits of a logit, row) that the tasks with these ordinals wrote in the previous step.
pub fn decided(best: &Region, parts: &[u32], memory: &mut impl Access) -> Option<u32> {
    let mut pair = |part: &u32| {
        let mut words = [0; 2];
        memory.load_previous_words(&best.columns(2 * *part as usize, 2), &mut words);
        (f32::from_bits(words[0]), words[1])
    };
    let first = pair(parts.first()?);
    Some(parts[1..].iter().map(pair).fold(first, better).1)
}

fn select(step: &Step<'_>, input: Input, best: &Region, token: &Region, memory: &mut impl Access) {
    let chosen = match input {
        Input::Token(token) => token,
        // The caller excludes a first step without a token.
        Input::Selected => decided(best, step.previous_parts, memory).unwrap_or(0),
    };
    memory.store_words(token, &[chosen]);
}

/// Loads `region` into `out`.
fn load<R: Real>(memory: &mut impl Access, region: &Region, words: &mut Vec<f32>, out: &mut Vec<R>) {
    words.resize(region.len, 0.0);
    memory.load(region, words);
    out.clear();
    out.extend(words.iter().map(|&v| R::of(v)));
}

/// Does the part of a norm of `x` that comes before a dot product, and returns what the result is multiplied by.
///
/// RMS statistics commute with a dot product, so a device applies the gain before and the statistic after it; the mean
/// of a LayerNorm does not.
fn norm_stage<R: Real>(isa: Isa, norm: &Norm, constants: &[f32], x: &mut [R]) -> R {
    let one = R::of(1.0);
    let count = R::of_f64(x.len() as f64);
    let eps = R::of(norm.attr.eps);
    let weight = norm.weight.as_ref().map(|w| &constants[w.clone()]);
    match norm.attr.kind {
        NormKind::Rms => {
            let mean = R::dot(isa, x, x) / count;
            if let Some(weight) = weight {
                x.iter_mut().zip(weight).for_each(|(x, w)| *x = *x * R::of(*w));
            }
            one / (mean + eps).sqrt()
        }
        NormKind::Layer => {
            let mean = x.iter().fold(R::of(0.0), |sum, &x| sum + x) / count;
            x.iter_mut().for_each(|x| *x = *x - mean);
            let scale = one / (R::dot(isa, x, x) / count + eps).sqrt();
            x.iter_mut().for_each(|x| *x = *x * scale);
            if let Some(weight) = weight {
                x.iter_mut().zip(weight).for_each(|(x, w)| *x = *x * R::of(*w));
            }
            if let Some(bias) = norm.bias.as_ref().map(|b| &constants[b.clone()]) {
                x.iter_mut().zip(bias).for_each(|(x, b)| *x = *x + R::of(*b));
            }
            one
        }
    }
}

fn norm_whole<R: Real>(isa: Isa, norm: &Norm, constants: &[f32], x: &mut [R]) {
    let scale = norm_stage(isa, norm, constants, x);
    x.iter_mut().for_each(|x| *x = *x * scale);
}

/// The type of the weights of a matrix that stores them as values.
fn plain(format: Format) -> Option<DType> {
    match format.code {
        Code::F32 => Some(DType::F32),
        Code::Bf16 => Some(DType::Bf16),
        _ => None,
    }
}

/// A row of the step that a product is computed for, in one of its slots if it has some.
struct Asked {
    row: usize,
    x: Region,
    /// Where its results go.
    out: Option<Region>,
}

/// Units that a task multiplies with inputs of some rows.
struct Product<'a> {
    units: usize,
    weights: &'a [u8],
    /// In the pack.
    row_scales: Range<usize>,
    /// In the constants.
    bias: Option<Range<usize>>,
}

/// All rows of the step, or those that want logits, or row `only`: the task's units are read once for all of them. Where parts are dealt, the
/// units of each part are read once for the rows that chose it.
fn mat_vec<R: Real>(
    step: &Step<'_>,
    m: &plan::MatVec,
    only: Option<usize>,
    mut weights: &[u8],
    memory: &mut impl Access,
    s: &mut Scratch<R>,
) {
    if let (Some(chosen), Some(parts)) = (&m.chosen, m.dealt(step.rows.rows.len(), memory)) {
        for DealtPart { part, units, rows } in parts {
            let (own, rest) = weights.split_at(units.len() * chosen.piece_bytes);
            weights = rest;
            // Slots lie side by side, unless all of them read one input.
            let slots = chosen.entry.len;
            let rows_of_units = units.start * m.unit_rows..units.end * m.unit_rows;
            s.asked.extend(rows.into_iter().map(|(row, slot)| {
                let x = if m.x.len == m.k { m.x.clone() } else { m.x.columns(slot * (m.x.len / slots), m.k) };
                let out = m.out.as_ref().map(|out| {
                    let (each, columns) =
                        (out.len / slots, if m.epilogue.is_gated() { m.unit_rows / 2 } else { m.unit_rows });
                    let (begin, end) = ((m.first_unit + units.start) * columns, (m.first_unit + units.end) * columns);
                    out.columns(slot * each + begin.min(each), end.min(each) - begin.min(each))
                });
                Asked { row, x, out }
            }));
            let row_scales = if m.row_scales.is_empty() {
                0..0
            } else {
                let scales = m.row_scales.start + part * chosen.scale_bytes;
                scales + 4 * rows_of_units.start..scales + 4 * rows_of_units.end
            };
            let bias = m.bias.as_ref().map(|bias| {
                let first = bias.start + part * chosen.biases;
                first + rows_of_units.start..first + rows_of_units.end
            });
            multiply(step, m, Product { units: units.len(), weights: own, row_scales, bias }, memory, s);
        }
        return;
    }
    // Of several parts neither scales nor biases lie elsewhere.
    let part = m.chosen.as_ref().map(|chosen| (chosen, chosen.part(memory)));
    let first = part.map_or(0, |(chosen, part)| part * chosen.scale_bytes);
    let row_scales = if m.row_scales.is_empty() { 0..0 } else { m.row_scales.start + first..m.row_scales.end + first };
    let biases = part.map_or(0, |(chosen, part)| part * chosen.biases);
    let bias = m.bias.as_ref().map(|bias| bias.start + biases..bias.end + biases);
    let rows = (0..step.rows.rows.len()).filter(|row| only.is_none_or(|only| only == *row));
    s.asked.extend(rows.map(|row| Asked { row, x: m.x.clone(), out: m.out.clone() }));
    multiply(step, m, Product { units: m.units, weights, row_scales, bias }, memory, s);
}

/// For what is asked of the scratch.
fn multiply<R: Real>(
    step: &Step<'_>,
    m: &plan::MatVec,
    product: Product<'_>,
    memory: &mut impl Access,
    s: &mut Scratch<R>,
) {
    let Product { units, weights, row_scales, bias } = product;
    let mut asked = std::mem::take(&mut s.asked);
    asked.retain(|asked| m.best.is_none() || step.rows.rows[asked.row].wants_logits);
    let count = asked.len();
    if count == 0 {
        return;
    }
    if !s.input_of.replace((step.serial, m.grid), &asked) || !memory.trusted() {
        s.input.clear();
        s.input_scales.clear();
        for &Asked { row, ref x, .. } in &asked {
            load(&mut OfRow { memory, row }, x, &mut s.load, &mut s.x);
            s.input_scales.push(match &m.norm {
                Some(norm) => norm_stage(step.isa, norm, &step.plan.constants, &mut s.x),
                None => R::of(1.0),
            });
            if let Some(at_random) = step.rows.at_random.filter(|of| of.staged && plain(m.format) != Some(DType::F32)) {
                let place = (m.grid.index() as u64) << 32 | (row as u64) << 20 | x.first as u64;
                s.load.clear();
                s.load.extend(s.x.iter().map(|x| x.to_f32()));
                let rounded = at_random.round(step.rows.position, place, s.load.iter().copied());
                s.x.iter_mut().zip(rounded).for_each(|(x, value)| *x = R::of(value));
            }
            s.x.resize(m.k.next_multiple_of(m.format.granule_k() as usize), R::of(0.0));
            if let Some(dtype) = plain(m.format) {
                R::stage(dtype, &mut s.x);
            }
            s.input.extend_from_slice(&s.x);
        }
    }
    let each = units * m.unit_rows;
    s.y.resize(count * each, R::of(0.0));
    match plain(m.format) {
        Some(dtype) => R::units(step.isa, dtype, m.unit_rows, weights, count, &s.input, &mut s.y),
        None => {
            let granule_bytes = m.format.granule_bytes() as usize;
            coded::units(step.isa, m.format, granule_bytes, weights, count, &s.input, &mut s.row, &mut s.y);
            s.y.chunks_exact_mut(each).for_each(|y| coded::scale_rows(&step.pack[row_scales.clone()], y));
        }
    }
    for (at, Asked { row, out, .. }) in asked.drain(..).enumerate() {
        let y = &mut s.y[at * each..][..each];
        if m.norm.is_some() {
            y.iter_mut().for_each(|y| *y = *y * s.input_scales[at]);
        }
        let share = m.share.as_ref().map(|share| {
            let mut loaded = [0.0];
            OfRow { memory: &mut *memory, row }.load(share, &mut loaded);
            R::of(loaded[0])
        });
        let bias = bias.clone().map(|bias| &step.plan.constants[bias]);
        epilogue(m, bias, share, y, (out.as_ref(), &mut OfRow { memory, row }), &mut s.load);
    }
    s.asked = asked;
}

/// The epilogue of a matvec, for the products of one row, which go to `out`; `share` multiplies the result.
fn epilogue<R: Real>(
    m: &plan::MatVec,
    bias: Option<&[f32]>,
    share: Option<R>,
    y: &mut [R],
    (out, memory): (Option<&Region>, &mut impl Access),
    values: &mut Vec<f32>,
) {
    if let Some(bias) = bias {
        y.iter_mut().zip(bias).for_each(|(y, b)| *y = *y + R::of(*b));
    }
    values.clear();
    match m.epilogue {
        Epilogue::Store | Epilogue::Scores => values.extend(y.iter().map(|y| y.to_f32())),
        Epilogue::Act(act) => values.extend(y.iter().map(|&y| real::act(act, y).to_f32())),
        Epilogue::Gated(act) => {
            for unit in y.chunks_exact(m.unit_rows) {
                let (gate, up) = unit.split_at(m.unit_rows / 2);
                values.extend(gate.iter().zip(up).map(|(&g, &u)| (real::act(act, g) * u).to_f32()));
            }
        }
        Epilogue::GatedBy { act, scale } => {
            for unit in y.chunks_exact(m.unit_rows) {
                let (gate, up) = unit.split_at(m.unit_rows / 2);
                values.extend(gate.iter().zip(up).map(|(&g, &u)| (real::act(act, R::of(scale) * g) * u).to_f32()));
            }
        }
        Epilogue::Clamped(swiglu) => {
            for unit in y.chunks_exact(m.unit_rows) {
                let (gate, up) = unit.split_at(m.unit_rows / 2);
                values.extend(gate.iter().zip(up).map(|(&g, &u)| real::clamped(swiglu, g, u).to_f32()));
            }
        }
        Epilogue::Residual { scale } => {
            if let Some(residual) = &m.residual {
                values.resize(residual.len, 0.0);
                memory.load(residual, values);
                let scale = R::of(scale);
                values.iter_mut().zip(&*y).for_each(|(r, &y)| *r = (R::of(*r) + scale * y).to_f32());
                memory.store(residual, values);
            }
        }
        Epilogue::Logits { scale, softcap } => {
            let scale = R::of(scale);
            values.extend(y.iter().map(|&y| real::softcap(softcap, scale * y).to_f32()));
        }
    }
    if let Some(share) = share {
        values.iter_mut().for_each(|value| *value = (R::of(*value) * share).to_f32());
    }
    if let Some(out) = out {
        values.truncate(out.len);
        memory.store(out, values);
        if let Some(pair) = &m.best {
            let rows = out.first as u32..;
            let (logit, row) = values.iter().copied().zip(rows).reduce(better).unwrap_or((f32::NEG_INFINITY, 0));
            memory.store_words(pair, &[logit.to_bits(), row]);
        }
    }
}

/// Chooses the experts of row `row`.
fn choose<R: Real>(step: &Step<'_>, row: usize, route: &plan::Route, memory: &mut impl Access, s: &mut Scratch<R>) {
    let op = &route.op;
    load(memory, &route.scores, &mut s.load, &mut s.x);
    let correction = route.correction.as_ref().map(|range| &step.plan.constants[range.clone()]);
    let zero = R::of(0.0);
    // Scores, in `y`.
    s.y.clear();
    let most = s.x.iter().copied().fold(R::NEG_INFINITY, |most, x| if x > most { x } else { most });
    match op.score {
        Score::Sigmoid => s.y.extend(s.x.iter().map(|&x| real::sigmoid(x))),
        Score::Softmax => {
            s.y.extend(s.x.iter().map(|&x| (x - most).exp()));
            let sum = s.y.iter().fold(zero, |sum, &y| sum + y);
            s.y.iter_mut().for_each(|y| *y = *y / sum);
        }
    }
    // What the choice is made by. Scores keep the order of what they are made of, which differs where scores may not.
    if correction.is_some() || op.groups.is_some() {
        s.x.copy_from_slice(&s.y);
        s.x.iter_mut().zip(correction.into_iter().flatten()).for_each(|(x, c)| *x = *x + R::of(*c));
    }
    if let Some(ExpertGroups { count, kept, score }) = op.groups {
        let each = s.x.len() / count.max(1) as usize;
        s.scores.clear();
        for group in s.x.chunks_exact(each.max(1)) {
            let best = first(group, &[]);
            s.scores.push(match score {
                GroupScore::SumOfTwo if each > 1 => group[best] + group[first(group, &[best])],
                _ => group[best],
            });
        }
        let mut keep = vec![];
        for _ in 0..kept {
            keep.push(first(&s.scores, &keep));
        }
        for group in (0..s.scores.len()).filter(|group| !keep.contains(group)) {
            s.x[group * each..(group + 1) * each].fill(R::of(f32::NAN));
        }
    }
    let mut chosen = vec![];
    for _ in 0..op.top_k {
        chosen.push(first(&s.x, &chosen));
    }
    if let Some(device) = &step.rows.device {
        device.choose(route.router, row, &s.y, &mut chosen);
    }
    let sum = chosen.iter().fold(zero, |sum, &expert| sum + s.y[expert]);
    let divisor = op.normalise.map(|added| sum + R::of(added));
    s.load.clear();
    s.load.extend(chosen.iter().map(|&expert| {
        let score = s.y[expert];
        (divisor.map_or(score, |divisor| score / divisor) * R::of(op.scale)).to_f32()
    }));
    memory.store(&route.shares, &s.load);
    let ids: Vec<u32> = chosen.iter().map(|&expert| expert as u32).collect();
    memory.store_words(&route.out, &ids);
}

/// Where the largest value is that is not at one of the places `taken`, the first of equal ones. What is no number comes last, as in
/// route.cuh; 0 if all are taken.
fn first<R: Real>(values: &[R], taken: &[usize]) -> usize {
    let mut best: Option<usize> = None;
    for at in (0..values.len()).filter(|at| !taken.contains(at)) {
        let is_larger = |best: usize| {
            let (value, best) = (values[at], values[best]);
            value > best || (best.to_f32().is_nan() && !value.to_f32().is_nan())
        };
        if best.is_none_or(is_larger) {
            best = Some(at);
        }
    }
    best.unwrap_or(0)
}

/// The sum of what experts made of a row.
fn add_up<R: Real>(combine: &plan::Combine, memory: &mut impl Access, s: &mut Scratch<R>) {
    let op = &combine.op;
    load(memory, &combine.shares, &mut s.load, &mut s.scores);
    if let Some(scale) = op.shared {
        let mut share = R::of(scale);
        if let Some(gate) = &combine.gate {
            load(memory, gate, &mut s.load, &mut s.x);
            share = share * real::sigmoid(s.x[0]);
        }
        s.scores.push(share);
    }
    s.y.clear();
    for (slot, input) in combine.inputs.iter().enumerate() {
        load(memory, input, &mut s.load, &mut s.x);
        s.y.resize(s.x.len(), R::of(0.0));
        let share = s.scores[slot];
        s.y.iter_mut().zip(&s.x).for_each(|(y, &x)| *y = *y + share * x);
    }
    let scale = R::of(op.scale);
    let values = &mut s.load;
    values.clear();
    match &combine.residual {
        Some(residual) => {
            values.resize(residual.len, 0.0);
            memory.load(residual, values);
            values.iter_mut().zip(&s.y).for_each(|(r, &y)| *r = (R::of(*r) + scale * y).to_f32());
            memory.store(residual, values);
        }
        None => values.extend(s.y.iter().map(|&y| (scale * y).to_f32())),
    }
    combine.out.iter().for_each(|out| memory.store(out, values));
}

fn norm_add<R: Real>(step: &Step<'_>, n: &plan::NormAdd, memory: &mut impl Access, s: &mut Scratch<R>) {
    load(memory, &n.y, &mut s.load, &mut s.x);
    norm_whole(step.isa, &n.norm, &step.plan.constants, &mut s.x);
    let values = &mut s.load;
    values.resize(n.residual.len, 0.0);
    memory.load(&n.residual, values);
    let scale = R::of(n.scale);
    values.iter_mut().zip(&s.x[n.residual.first..]).for_each(|(r, &y)| *r = (R::of(*r) + scale * y).to_f32());
    memory.store(&n.residual, values);
    n.out.iter().for_each(|out| memory.store(out, values));
}

/// Norm of each head or of the whole projection, then the columns of heads `first..first + heads`.
fn normalised_heads<R: Real>(
    step: &Step<'_>,
    norm: Option<&Norm>,
    span: QkNormSpan,
    dim: usize,
    first: usize,
    heads: usize,
    x: &mut Vec<R>,
) {
    let Some(norm) = norm else { return };
    let constants = &step.plan.constants;
    match span {
        QkNormSpan::Head => x.chunks_exact_mut(dim).for_each(|head| norm_whole(step.isa, norm, constants, head)),
        QkNormSpan::OwnGains => {
            for (head, x) in (first..).zip(x.chunks_exact_mut(dim)) {
                let gains = |all: &Range<usize>| all.start + head * dim..all.start + (head + 1) * dim;
                let own = Norm { weight: norm.weight.as_ref().map(gains), ..norm.clone() };
                norm_whole(step.isa, &own, constants, x);
            }
        }
        QkNormSpan::Projection => {
            norm_whole(step.isa, norm, constants, x);
            x.drain(..first * dim);
            x.truncate(heads * dim);
        }
    }
}

/// Rotates the first dimensions of one head by a row of the table, cos then sin.
fn rotate<R: Real>(table: &[f32], interleaved: bool, head: &mut [R]) {
    let n = table.len() / 2;
    let (cos, sin) = table.split_at(n);
    for i in 0..n {
        let (a, b) = if interleaved { (2 * i, 2 * i + 1) } else { (i, i + n) };
        let (cos, sin) = (R::of(cos[i]), R::of(sin[i]));
        let (x, y) = (head[a], head[b]);
        head[a] = x * cos - y * sin;
        head[b] = y * cos + x * sin;
    }
}

/// The row of the RoPE table for `position`.
fn rope_at<'a>(step: &Step<'a>, a: &plan::Attention, position: u32) -> Option<&'a [f32]> {
    let rotary = a.op.rotary as usize;
    let begin = a.rope.as_ref()?.start + position as usize * rotary;
    Some(&step.plan.constants[begin..begin + rotary])
}

fn span_of(norm: Option<QkNormAttr>) -> QkNormSpan {
    norm.map_or(QkNormSpan::Head, |norm| norm.span)
}

/// Key and value of row `row` of the step, in `s.k` and `s.v` as every later position will see them: through the cache's
/// type.
fn key_and_value<R: Real>(
    step: &Step<'_>,
    row: usize,
    a: &plan::Attention,
    current: &Current,
    memory: &mut impl Access,
    s: &mut Scratch<R>,
) {
    let op = &a.op;
    let (dim, head) = (op.head_dim as usize, (a.i * op.heads_per_task / op.group) as usize);
    load(memory, &current.k.row(row), &mut s.load, &mut s.k);
    let norm = |k: &mut Vec<R>| normalised_heads(step, a.k_norm.as_ref(), span_of(op.k_norm), dim, head, 1, k);
    if !op.norm_after_rope {
        norm(&mut s.k);
    }
    if let Some(rope) = rope_at(step, a, step.rows.rows[row].position) {
        rotate(rope, op.interleaved, &mut s.k);
    }
    if op.norm_after_rope {
        norm(&mut s.k);
    }
    load(memory, &current.v.row(row), &mut s.load, &mut s.v);
    let caches = a.cache_scales.into_iter().zip([a.keys, a.values]);
    for (values, (scale, columns)) in [&mut s.k, &mut s.v].into_iter().zip(caches) {
        if let Some(device) = step.rows.device.as_ref().filter(|device| device.has_codes()) {
            device.take(row, columns, scale, values);
        } else {
            values.iter_mut().for_each(|v| *v = R::of(round_to_cache(a.cache_dtype, scale, v.to_f32())));
        }
    }
}

/// Whether the sequence of row `row` has other rows in the step.
fn in_chunk(step: &Step<'_>, row: usize) -> bool {
    let rows = &step.rows.rows;
    rows[row].before > 0 || rows.get(row + 1).is_some_and(|next| next.before > 0)
}

/// Which of `s.step_keys` has the keys and values of the prompt chunk that row `row` is of: made by the first task that
/// asks for them.
fn chunk_keys<R: Real>(
    step: &Step<'_>,
    row: usize,
    a: &plan::Attention,
    current: &Current,
    memory: &mut impl Access,
    s: &mut Scratch<R>,
) -> usize {
    let (kv_head, first) = ((a.i * a.op.heads_per_task / a.op.group) as usize, row - step.rows.rows[row].before);
    let of = Some((step.serial, a.grid));
    if s.step_keys_of != of || !memory.trusted() {
        s.step_keys.clear();
        s.step_keys_of = of;
    }
    if let Some(at) = s.step_keys.iter().position(|of| (of.kv_head, of.first) == (kv_head, first)) {
        return at;
    }
    let (mut keys, mut values) = (vec![], vec![]);
    let rest = step.rows.rows[first + 1..].iter().take_while(|row| row.before > 0).count();
    for row in first..=first + rest {
        key_and_value(step, row, a, current, memory, s);
        keys.extend(s.k.iter().map(|k| k.to_f32()));
        values.extend(s.v.iter().map(|v| v.to_f32()));
    }
    s.step_keys.push(StepKeys { kv_head, first, keys, values });
    s.step_keys.len() - 1
}

/// Row `row` of the step over its history, the rows of its sequence before it in the step, and itself, in this order: that
/// of their positions.
fn attention<R: Real>(
    step: &Step<'_>,
    row: usize,
    a: &plan::Attention,
    stream: Streamed<'_>,
    memory: &mut impl Access,
    s: &mut Scratch<R>,
) {
    let (op, of_step) = (&a.op, &step.rows.rows[row]);
    let (dim, heads) = (op.head_dim as usize, op.heads_per_task as usize);
    let empty = HistoryRows::F32 { data: &[], stride: 0 };
    let nothing = History { keys: empty, values: empty, rows: 0 };
    let mut history = if let Streamed::History(history) = stream { history } else { nothing };
    let first = a.i as usize * heads;

    load(&mut OfRow { memory, row }, &a.q, &mut s.load, &mut s.q);
    let norm = |q: &mut Vec<R>| normalised_heads(step, a.q_norm.as_ref(), span_of(op.q_norm), dim, first, heads, q);
    if !op.norm_after_rope {
        norm(&mut s.q);
    }
    if let Some(rope) = rope_at(step, a, of_step.position) {
        s.q.chunks_exact_mut(dim).for_each(|head| rotate(rope, op.interleaved, head));
    }
    if op.norm_after_rope {
        norm(&mut s.q);
    }
    if let Some(QueryScale { beta, original }) = op.query_scale {
        let factor = R::of_f64(1.0 + f64::from(beta) * f64::from(of_step.position / original.max(1)).ln_1p());
        s.q.iter_mut().for_each(|q| *q = *q * factor);
    }

    let past = history;
    if let Some(current) = &a.current {
        if in_chunk(step, row) {
            let of_chunk = chunk_keys(step, row, a, current, memory, s);
            let StepKeys { keys, values, .. } = &s.step_keys[of_chunk];
            // Those before the row that its window reaches.
            let before = of_step.before;
            let seen = op.window.map_or(before, |window| before.min(window as usize - 1));
            let own = (before - seen) * dim..before * dim;
            for (own, all) in [(&mut s.k, keys), (&mut s.v, values)] {
                own.clear();
                own.extend(all[before * dim..][..dim].iter().map(|&value| R::of(value)));
            }
            let count = history.rows;
            history = History {
                keys: HistoryRows::Then { past: &past.keys, count, own: &keys[own.clone()] },
                values: HistoryRows::Then { past: &past.values, count, own: &values[own] },
                rows: count + seen,
            };
        } else {
            key_and_value(step, row, a, current, memory, s);
        }
        if let Some((keys, values)) = current.append {
            for (values, columns) in [(&s.k, keys), (&s.v, values)] {
                s.load.clear();
                s.load.extend(values.iter().map(|v| v.to_f32()));
                memory.append(row, columns, &s.load);
            }
        }
    }
    let rows = history.rows;

    let (scale, cap) = (R::of(op.scale), op.softcap);
    s.scores.clear();
    s.scores.resize(heads * rows, R::of(0.0));
    R::scores(step.isa, &s.q, dim, history.keys, rows, &mut s.load, &mut s.scores);
    s.scores.iter_mut().for_each(|score| *score = real::softcap(cap, *score * scale));
    s.sums.clear();
    s.sums.resize(heads * dim, R::of(0.0));
    // Maximum, sum and weight of the current position of each head.
    s.y.clear();
    for h in 0..heads {
        let scores = &mut s.scores[h * rows..(h + 1) * rows];
        let own = a.current.as_ref().map(|_| {
            let dot = R::dot(step.isa, &s.q[h * dim..(h + 1) * dim], &s.k);
            real::softcap(cap, dot * scale)
        });
        let sink = a.sinks.as_ref().map(|sinks| R::of(step.plan.constants[sinks.start + h]));
        let all = scores.iter().copied().chain(own).chain(sink);
        let most = all.fold(R::NEG_INFINITY, |most, x| if x > most { x } else { most });
        let sum = R::exp_sum(step.isa, most, scores);
        let [own, sink] = [own, sink].map(|one| one.map_or(R::of(0.0), |one| (one - most).exp()));
        s.y.extend([most, sum + own + sink, own]);
    }
    R::weigh(step.isa, &s.scores, dim, history.values, rows, &mut s.load, &mut s.sums);

    if let Some(gate) = &a.gate {
        load(&mut OfRow { memory, row }, gate, &mut s.load, &mut s.x);
    }
    let values = &mut s.load;
    values.clear();
    for (h, state) in s.y.chunks_exact(3).enumerate() {
        let sums = &mut s.sums[h * dim..(h + 1) * dim];
        if a.current.is_some() {
            sums.iter_mut().zip(&s.v).for_each(|(sum, &v)| *sum = *sum + state[2] * v);
        }
        if op.splits > 1 {
            values.extend([state[0].to_f32(), state[1].to_f32()]);
            values.extend(sums.iter().map(|sum| sum.to_f32()));
        } else {
            sums.iter_mut().for_each(|sum| *sum = *sum / state[1]);
            if a.gate.is_some() {
                sums.iter_mut().zip(&s.x[h * dim..]).for_each(|(sum, &gate)| *sum = *sum * real::sigmoid(gate));
            }
            values.extend(sums.iter().map(|sum| sum.to_f32()));
        }
    }
    memory.store(&a.out.row(row), values);
}

/// `out = sum_s exp(m_s - m) sums_s / sum_s exp(m_s - m) l_s` with `m` the largest maximum; shares without rows have
/// `m_s` = -inf and weigh nothing.
fn merge<R: Real>(dim: usize, splits: usize, head: &plan::MergeHead, memory: &mut impl Access, s: &mut Scratch<R>) {
    load(memory, &head.partial, &mut s.load, &mut s.x);
    let header = PARTIAL_HEADER as usize;
    let record = |share: usize| &s.x[share * head.stride + head.first..][..header + dim];
    let most = (0..splits).map(|s| record(s)[0]).fold(R::NEG_INFINITY, |most, x| if x > most { x } else { most });
    s.sums.clear();
    s.sums.resize(dim, R::of(0.0));
    let mut sum = R::of(0.0);
    for share in 0..splits {
        let record = record(share);
        let weight = (record[0] - most).exp();
        sum = sum + weight * record[1];
        s.sums.iter_mut().zip(&record[header..]).for_each(|(o, &v)| *o = *o + weight * v);
    }
    s.sums.iter_mut().for_each(|v| *v = *v / sum);
    if let Some(gate) = &head.gate {
        load(memory, gate, &mut s.load, &mut s.x);
        s.sums.iter_mut().zip(&s.x).for_each(|(v, &gate)| *v = *v * real::sigmoid(gate));
    }
    s.load.clear();
    s.load.extend(s.sums.iter().map(|v| v.to_f32()));
    memory.store(&head.out, &s.load);
}

/// Converts chunk bytes of a cache of type `dtype` to the elements that [`HistoryRows`] shows; codes of fp8 are in units of `scale`.
pub fn history_rows<'a>(dtype: DType, bytes: &'a [u32], dim: usize, scale: f32) -> HistoryRows<'a> {
    match dtype {
        DType::E4m3 => HistoryRows::E4m3 { data: bytemuck::cast_slice(bytes), stride: dim, scale },
        DType::Bf16 => HistoryRows::Bf16 { data: bytemuck::cast_slice(bytes), stride: dim },
        _ => HistoryRows::F32 { data: bytemuck::cast_slice(bytes), stride: dim },
    }
}
