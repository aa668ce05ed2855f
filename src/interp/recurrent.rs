//! Owns short convolutions, Mamba-2 and norms of groups: their formulas over what the plan resolved. See [`crate::ir::op::Convolve`],
//! [`crate::ir::op::Scan`] and [`crate::ir::op::GroupNorm`].

use super::memory::{Access, Region, StepRow};
use super::mix::{loaded, softplus};
use super::ops::Step;
use super::plan::{self, Kept};
use super::real::{self, Real};
use crate::ir::op::Scan;
use crate::model::graph::Act;

/// The state before a row's own position. Before the first one there is none, whatever memory holds.
fn state_before(kept: &Kept, row: &StepRow, memory: &mut impl Access) -> Vec<f32> {
    let mut state = vec![0.0; kept.region.len];
    if row.position > 0 {
        memory.load_state(&kept.region.row(row.sequence), row.position, &mut state);
    }
    state
}

/// `sum over taps of tap * input`, the past inputs first, and the bias.
fn convolved<R: Real>(past: impl Iterator<Item = f32>, own: f32, taps: &[f32], bias: Option<f32>) -> R {
    let sum = past.chain([own]).zip(taps).fold(R::of(0.0), |sum, (x, tap)| sum + R::of(x) * R::of(*tap));
    bias.map_or(sum, |bias| sum + R::of(bias))
}

/// `silu(scale * gate)`
fn gate_of<R: Real>(scale: f32, gate: f32) -> R {
    real::act(Act::Silu, R::of(scale) * R::of(gate))
}

/// Brings the state of channels from the position before to the row's own, and stores their outputs.
pub fn convolve<R: Real>(step: &Step<'_>, row: &StepRow, m: &plan::Convolve, memory: &mut impl Access) {
    let taps = &step.plan.constants[m.conv.clone()];
    let bias = m.bias.clone().map(|bias| &step.plan.constants[bias]);
    let kernel = m.op.kernel as usize;
    let mut state = state_before(&m.kept, row, memory);
    let [x, b, c] = [&m.x, &m.b, &m.c].map(|region| loaded(memory, region));
    let mut out = vec![];
    for (i, past) in state.chunks_exact_mut(kernel - 1).enumerate() {
        let own = (R::of(b[i]) * R::of(x[i])).to_f32();
        let taps = &taps[i * kernel..][..kernel];
        let sum: R = convolved(past.iter().copied(), own, taps, bias.map(|bias| bias[i]));
        out.push((R::of(c[i]) * sum).to_f32());
        past.rotate_left(1);
        past[kernel - 2] = own;
    }
    memory.store_state(&m.kept.region.row(row.sequence), row.position, &state);
    memory.store(&m.out, &out);
}

/// Brings the state of one head from the position before to the row's own, and stores the output of the head.
pub fn scan<R: Real>(step: &Step<'_>, row: &StepRow, m: &plan::Scan, memory: &mut impl Access) {
    let Scan { head_dim, state: width, kernel, scales, gate, .. } = m.op;
    let (dim, width, kernel) = (head_dim as usize, width as usize, kernel as usize);
    let constants = &step.plan.constants;
    let (taps, bias) = (&constants[m.conv.clone()], m.bias.clone().map(|bias| &constants[bias]));
    let mut state = state_before(&m.kept, row, memory);
    let (matrix, past) = state.split_at_mut(width * dim);

    let inner = m.op.inner() as usize;
    let (first, group) = (m.head * dim, m.head / m.op.group() as usize * width);
    let firsts = [first, inner + group, inner + m.op.groups as usize * width + group];
    let channels = m.op.head_channels() as usize;
    let mut inputs: Vec<f32> = vec![];
    let mut mixed: Vec<R> = vec![];
    for ((region, scale), first) in [&m.x, &m.b, &m.c].into_iter().zip(scales).zip(firsts) {
        for (i, input) in loaded(memory, region).into_iter().enumerate() {
            let (own, channel) = ((R::of(scale) * R::of(input)).to_f32(), first + i);
            let before = past.get(inputs.len()..).unwrap_or_default().iter().step_by(channels).copied();
            let sum = convolved(before, own, &taps[channel * kernel..][..kernel], bias.map(|bias| bias[channel]));
            mixed.push(real::act(Act::Silu, sum));
            inputs.push(own);
        }
    }
    past.rotate_left(channels.min(past.len()));
    let newest = past.len().saturating_sub(channels);
    past[newest..].iter_mut().zip(&inputs).for_each(|(kept, x)| *kept = *x);

    let of_head = |range: &std::ops::Range<usize>| f64::from(constants[range.start + m.head]);
    let (x, rest) = mixed.split_at(dim);
    let (b, c) = rest.split_at(width);
    let by = softplus(f64::from(scales[3]) * f64::from(loaded(memory, &m.step)[m.head]) + of_head(&m.dt_bias));
    let decay = R::of_f64((-of_head(&m.a_log).exp() * by).exp());
    let by = R::of_f64(by);
    let mut y: Vec<R> = x.iter().map(|x| R::of_f64(of_head(&m.d)) * *x).collect();
    for ((kept, b), c) in matrix.chunks_exact_mut(dim).zip(b).zip(c) {
        for ((kept, x), y) in kept.iter_mut().zip(x).zip(&mut y) {
            let s = decay * R::of(*kept) + *b * (by * *x);
            *y = *y + s * *c;
            *kept = s.to_f32();
        }
    }
    memory.store_state(&m.kept.region.row(row.sequence), row.position, &state);
    if let (Some(scale), Some(region)) = (gate, &m.gate) {
        let gates = loaded(memory, region);
        y.iter_mut().zip(gates).for_each(|(y, gate)| *y = *y * gate_of(scale, gate));
    }
    memory.store(&m.out, &y.into_iter().map(R::to_f32).collect::<Vec<f32>>());
}

/// The norm of one group of columns, and what multiplies it.
pub fn group_norm<R: Real>(step: &Step<'_>, m: &plan::GroupNorm, memory: &mut impl Access) {
    let values = |memory: &mut _, region: &Region| loaded(memory, region);
    let x = values(memory, &m.x);
    let squares = x.iter().fold(R::of(0.0), |sum, x| sum + R::of(*x) * R::of(*x));
    let factor = R::of(1.0) / (squares / R::of(x.len() as f32) + R::of(m.op.eps)).sqrt();
    let gains = &step.plan.constants[m.norm.clone()];
    let mut out: Vec<R> = x.iter().zip(gains).map(|(x, gain)| R::of(*x) * factor * R::of(*gain)).collect();
    if let (Some(scale), Some(region)) = (m.op.gate, &m.gate) {
        let gates = values(memory, region);
        out.iter_mut().zip(gates).for_each(|(out, gate)| *out = *out * gate_of(scale, gate));
    }
    memory.store(&m.out, &out.into_iter().map(R::to_f32).collect::<Vec<f32>>());
}
