//! Owns the gated delta net: one position of it, from the state that the positions before left.
//!
//! The formulas are those of [`GatedDelta`].

use std::ops::Range;

use crate::model::graph::{Act, GatedDelta};
use crate::model::weights::Weights;
use crate::reference::{act, convolve, linear, norm, sigmoid};

/// What a layer keeps of a sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct DeltaState {
    /// Inputs of the convolution at the last `kernel - 1` positions, oldest first; `[channels]` each.
    pub inputs: Vec<Vec<f64>>,
    /// `S`: `[value_heads, key_dim, value_dim]`.
    pub matrices: Vec<f64>,
}

impl DeltaState {
    /// The state before the first position.
    pub fn new(net: &GatedDelta) -> DeltaState {
        let of_head = net.key_dim as usize * net.value_dim as usize;
        DeltaState {
            inputs: vec![vec![0.0; net.channels() as usize]; net.kernel as usize - 1],
            matrices: vec![0.0; net.value_heads as usize * of_head],
        }
    }
}

impl DeltaState {
    /// The state as programs keep it ([`crate::ir::op::Mix`]): of each value head its matrix, then the inputs of its q, k and v.
    pub fn by_head(&self, net: &GatedDelta) -> Vec<f32> {
        let (key_dim, value_dim) = (net.key_dim as usize, net.value_dim as usize);
        let matrices = self.matrices.chunks_exact(key_dim * value_dim);
        let of_head = |(head, matrix): (usize, &[f64])| {
            let mut values = matrix.to_vec();
            for input in &self.inputs {
                DeltaState::channels(net, head).into_iter().for_each(|range| values.extend(&input[range]));
            }
            values.into_iter().map(|value| value as f32).collect::<Vec<f32>>()
        };
        matrices.enumerate().flat_map(of_head).collect()
    }

    /// Reads what [`by_head`](Self::by_head) has made.
    ///
    /// # Panics
    /// If these are not the values of a state of `net`.
    pub fn from_heads(net: &GatedDelta, values: &[f32]) -> DeltaState {
        let mut state = DeltaState::new(net);
        let (count, of_head) = (net.value_heads as usize, net.key_dim as usize * net.value_dim as usize);
        for (head, values) in values.chunks_exact(values.len() / count).enumerate() {
            let mut values = values.iter().map(|&value| f64::from(value));
            let mut fill = |to: &mut [f64]| to.iter_mut().for_each(|to| *to = values.next().expect("a value"));
            fill(&mut state.matrices[head * of_head..(head + 1) * of_head]);
            for input in &mut state.inputs {
                DeltaState::channels(net, head).into_iter().for_each(|range| fill(&mut input[range]));
            }
        }
        state
    }

    /// The channels of a value head: of its q, k and v.
    fn channels(net: &GatedDelta, head: usize) -> [Range<usize>; 3] {
        let (key_dim, value_dim, keys) = (net.key_dim as usize, net.value_dim as usize, net.q.rows as usize);
        let key = head / (net.value_heads / net.key_heads) as usize * key_dim;
        let value = 2 * keys + head * value_dim;
        [key..key + key_dim, keys + key..keys + key + key_dim, value..value + value_dim]
    }
}

/// The output of a layer at a position with input `x`, `[hidden]` each; brings `state` to it.
pub fn step_delta(weights: &Weights, net: &GatedDelta, state: &mut DeltaState, x: &[f64]) -> Vec<f64> {
    let projected = net.projections().map(|projection| linear(weights, projection, x));
    linear(weights, &net.o, &mix_delta(weights, net, state, projected))
}

/// What the output projection reads, `[value_heads * value_dim]`, of the [projections](GatedDelta::projections) of a position; brings `state` to it.
pub fn mix_delta(weights: &Weights, net: &GatedDelta, state: &mut DeltaState, projected: [Vec<f64>; 6]) -> Vec<f64> {
    let [q, k, v, z, b, a] = projected;
    let taps: Vec<f32> = net.conv.iter().flat_map(|&id| weights.vector_f32(id)).collect();
    state.inputs.push([q, k, v].concat());
    let mixed: Vec<f64> = convolve(&taps, None, &state.inputs).into_iter().map(|x| act(Act::Silu, x)).collect();
    state.inputs.remove(0);
    let (key_dim, value_dim) = (net.key_dim as usize, net.value_dim as usize);
    let keys = net.q.rows as usize;
    let (q, k, v) = (&mixed[..keys], &mixed[keys..2 * keys], &mixed[2 * keys..]);
    let (a_log, dt_bias) = (weights.vector_f32(net.a_log), weights.vector_f32(net.dt_bias));
    let group = (net.value_heads / net.key_heads) as usize;
    let mut y = vec![0.0; v.len()];
    for (h, (s, y)) in
        state.matrices.chunks_exact_mut(key_dim * value_dim).zip(y.chunks_exact_mut(value_dim)).enumerate()
    {
        let own_key = h / group * key_dim..(h / group + 1) * key_dim;
        let own_value = h * value_dim..(h + 1) * value_dim;
        let scale = 1.0 / (key_dim as f64).sqrt();
        let q: Vec<f64> = unit_length(&q[own_key.clone()]).into_iter().map(|q| q * scale).collect();
        let k = unit_length(&k[own_key]);
        let decay = (-f64::from(a_log[h]).exp() * softplus(a[h] + f64::from(dt_bias[h]))).exp();
        let beta = sigmoid(b[h]) * if net.negative_eigenvalues { 2.0 } else { 1.0 };
        delta_rule(s, &q, &k, &v[own_value.clone()], decay, beta, y);
        let gate = z[own_value].iter().map(|&z| act(Act::Silu, z));
        let gated: Vec<f64> = norm(weights, &net.norm, y).into_iter().zip(gate).map(|(y, gate)| y * gate).collect();
        y.copy_from_slice(&gated);
    }
    y
}

/// `S = decay * S; S = S + k (beta * (v - S^T k))^T; y = S^T q`, with `S` of shape `[k.len(), v.len()]`.
pub fn delta_rule(s: &mut [f64], q: &[f64], k: &[f64], v: &[f64], decay: f64, beta: f64, y: &mut [f64]) {
    s.iter_mut().for_each(|s| *s *= decay);
    let mut delta = v.to_vec();
    for (row, k) in s.chunks_exact(v.len()).zip(k) {
        delta.iter_mut().zip(row).for_each(|(delta, s)| *delta -= s * k);
    }
    y.fill(0.0);
    for ((row, k), q) in s.chunks_exact_mut(v.len()).zip(k).zip(q) {
        for ((s, delta), y) in row.iter_mut().zip(&delta).zip(y.iter_mut()) {
            *s += k * beta * delta;
            *y += *s * q;
        }
    }
}

/// `x / sqrt(|x|^2 + 1e-6)`
fn unit_length(x: &[f64]) -> Vec<f64> {
    let square: f64 = x.iter().map(|x| x * x).sum();
    let by = 1.0 / (square + f64::from(GatedDelta::L2_EPS)).sqrt();
    x.iter().map(|x| x * by).collect()
}

/// `ln(1 + e^x)`
pub fn softplus(x: f64) -> f64 {
    if x > 0.0 { x + (-x).exp().ln_1p() } else { x.exp().ln_1p() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_delta_rule_overwrites_what_a_key_held() {
        let (mut s, mut y) = ([0.0; 4], [0.0; 2]);
        // With beta 1 and no decay, a unit key holds the last value that was written to it.
        delta_rule(&mut s, &[1.0, 0.0], &[1.0, 0.0], &[3.0, 4.0], 0.5, 1.0, &mut y);
        assert_eq!(y, [3.0, 4.0]);
        delta_rule(&mut s, &[1.0, 0.0], &[1.0, 0.0], &[5.0, 6.0], 1.0, 1.0, &mut y);
        assert_eq!((s, y), ([5.0, 6.0, 0.0, 0.0], [5.0, 6.0]));
        // Another key leaves it, and the decay does not.
        delta_rule(&mut s, &[1.0, 2.0], &[0.0, 1.0], &[1.0, 1.0], 0.5, 0.5, &mut y);
        assert_eq!((s, y), ([2.5, 3.0, 0.5, 0.5], [3.5, 4.0]));
        // Beta 2 turns the sign of what a key held.
        delta_rule(&mut s, &[1.0, 0.0], &[1.0, 0.0], &[0.0, 0.0], 1.0, 2.0, &mut y);
        assert_eq!(y, [-2.5, -3.0]);
    }

    #[test]
    fn softplus_and_unit_length_follow_their_formulas() {
        assert!((softplus(0.0) - 2f64.ln()).abs() < 1e-15);
        assert_eq!((softplus(800.0), softplus(-800.0)), (800.0, 0.0));
        let unit = unit_length(&[3.0, 4.0]);
        assert!((unit[0] - 0.6).abs() < 1e-7 && (unit[1] - 0.8).abs() < 1e-7, "{unit:?}");
        assert_eq!(unit_length(&[0.0]), [0.0]);
    }
}
