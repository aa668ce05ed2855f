//! Owns the gated delta net of one value head: its formula over what the plan resolved. See [`crate::ir::op::Mix`].

use super::memory::{Access, Region, StepRow};
use super::ops::Step;
use super::plan;
use super::real::{self, Real};
use crate::ir::op::Mix;
use crate::model::graph::Act;

/// Brings the state of one head from the position before to the row's own, and stores the output of the head.
pub fn mix<R: Real>(step: &Step<'_>, row: &StepRow, m: &plan::Mix, memory: &mut impl Access) {
    let Mix { key_dim, value_dim, kernel, eps, doubles, .. } = m.op;
    let (key_dim, value_dim, taps) = (key_dim as usize, value_dim as usize, kernel as usize);
    let mut state = vec![0.0; m.kept.region.len];
    // Before the first position there is none, whatever memory holds.
    let kept = m.kept.region.row(row.sequence);
    if row.position > 0 {
        memory.load_state(&kept, row.position, &mut state);
    }
    let (matrix, past) = state.split_at_mut(key_dim * value_dim);

    // The inputs of this position, oldest first after the others.
    let own = [&m.q, &m.k, &m.v].map(|region| loaded(memory, region));
    let (first_key, first_value) = (m.head / m.op.group() as usize * key_dim, m.head * value_dim);
    let of_keys = (m.op.key_heads * m.op.key_dim) as usize;
    let channels = [first_key, of_keys + first_key, 2 * of_keys + first_value];
    let conv = &step.plan.constants[m.conv.clone()];
    let mut at = 0;
    let mixed = [0, 1, 2].map(|kind| {
        let first = at;
        at += own[kind].len();
        let of_channel = |i: usize| {
            let tap = &conv[(channels[kind] + i) * taps..][..taps];
            let before = past.get(first + i..).unwrap_or_default().iter().step_by(m.op.channels() as usize);
            let sum =
                before.chain([&own[kind][i]]).zip(tap).fold(R::of(0.0), |sum, (x, t)| sum + R::of(*x) * R::of(*t));
            real::act(Act::Silu, sum)
        };
        (0..own[kind].len()).map(of_channel).collect::<Vec<R>>()
    });
    past.rotate_left((m.op.channels() as usize).min(past.len()));
    let newest = past.len().saturating_sub(m.op.channels() as usize);
    past[newest..].iter_mut().zip(own.iter().flatten()).for_each(|(kept, x)| *kept = *x);

    let [q, k, mut v] = mixed;
    let q = unit_length(q, R::of_f64(1.0 / (key_dim as f64).sqrt()));
    let k = unit_length(k, R::of(1.0));
    let [beta, decay] = [&m.beta, &m.decay].map(|region| loaded(memory, region)[m.head]);
    let of_head = |constant: &std::ops::Range<usize>| f64::from(step.plan.constants[constant.start + m.head]);
    let by = softplus(f64::from(decay) + of_head(&m.dt_bias));
    let decay = R::of_f64((-of_head(&m.a_log).exp() * by).exp());
    let beta = real::sigmoid(R::of(beta)) * R::of(if doubles { 2.0 } else { 1.0 });
    // v becomes beta * (v - S^T k), of the decayed S.
    let mut matrix_of: Vec<R> = matrix.iter().map(|s| R::of(*s) * decay).collect();
    for (row, k) in matrix_of.chunks_exact(value_dim).zip(&k) {
        v.iter_mut().zip(row).for_each(|(v, s)| *v = *v - *s * *k);
    }
    v.iter_mut().for_each(|v| *v = *v * beta);
    let mut y = vec![R::of(0.0); value_dim];
    for ((row, k), q) in matrix_of.chunks_exact_mut(value_dim).zip(&k).zip(&q) {
        for ((s, v), y) in row.iter_mut().zip(&v).zip(&mut y) {
            *s = *s + *k * *v;
            *y = *y + *s * *q;
        }
    }
    matrix.iter_mut().zip(&matrix_of).for_each(|(kept, s)| *kept = s.to_f32());
    memory.store_state(&kept, row.position, &state);

    let squares = y.iter().fold(R::of(0.0), |sum, y| sum + *y * *y);
    let factor = R::of(1.0) / (squares / R::of(value_dim as f32) + R::of(eps)).sqrt();
    let gates = loaded(memory, &m.gate);
    let gains = &step.plan.constants[m.norm.clone()];
    let out: Vec<f32> = y
        .iter()
        .zip(gains)
        .zip(gates)
        .map(|((y, gain), gate)| (*y * factor * R::of(*gain) * real::act(Act::Silu, R::of(gate))).to_f32())
        .collect();
    memory.store(&m.out, &out);
}

pub(super) fn loaded(memory: &mut impl Access, region: &Region) -> Vec<f32> {
    let mut values = vec![0.0; region.len];
    memory.load(region, &mut values);
    values
}

/// `x / sqrt(|x|^2 + L2_EPS)`, times `scale`.
fn unit_length<R: Real>(x: Vec<R>, scale: R) -> Vec<R> {
    let squares = x.iter().fold(R::of(0.0), |sum, x| sum + *x * *x);
    let by = scale / (squares + R::of(Mix::L2_EPS)).sqrt();
    x.into_iter().map(|x| x * by).collect()
}

/// `ln(1 + e^x)`
pub(super) fn softplus(x: f64) -> f64 {
    if x > 0.0 { x + (-x).exp().ln_1p() } else { x.exp().ln_1p() }
}
