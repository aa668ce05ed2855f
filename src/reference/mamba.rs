//! Owns Mamba-2: one position of it, from the state that the positions before left.
//!
//! The formulas are those of [`Mamba2`].

use std::ops::Range;

use crate::model::graph::{Act, GatedNorm, Mamba2};
use crate::model::weights::Weights;
use crate::reference::{ConvState, act, linear, norm_values, softplus};

/// What a layer keeps of a sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct MambaState {
    pub conv: ConvState,
    /// `S`: `[heads, head_dim, state]`.
    pub matrices: Vec<f64>,
}

impl MambaState {
    /// The state before the first position.
    pub fn new(op: &Mamba2) -> MambaState {
        let of_head = op.head_dim as usize * op.state as usize;
        MambaState { conv: ConvState::new(op.channels(), op.kernel), matrices: vec![0.0; op.heads as usize * of_head] }
    }

    /// The state as programs keep it ([`crate::ir::op::Scan`]): of each head its matrix, transposed, then the inputs of its x, b and c.
    pub fn by_head(&self, op: &Mamba2) -> Vec<f32> {
        let mut values = vec![];
        for head in 0..op.heads as usize {
            values.extend(MambaState::cells(op, head).map(|cell| self.matrices[cell] as f32));
            for input in &self.conv.inputs {
                let channels = MambaState::channels(op, head).into_iter().flatten();
                values.extend(channels.map(|channel| input[channel] as f32));
            }
        }
        values
    }

    /// Reads what [`by_head`](Self::by_head) has made.
    ///
    /// # Panics
    /// If these are not the values of a state of `op`.
    pub fn from_heads(op: &Mamba2, values: &[f32]) -> MambaState {
        let mut state = MambaState::new(op);
        let mut values = values.iter().map(|&value| f64::from(value));
        let mut next = || values.next().expect("a value");
        for head in 0..op.heads as usize {
            MambaState::cells(op, head).for_each(|cell| state.matrices[cell] = next());
            for input in &mut state.conv.inputs {
                MambaState::channels(op, head).into_iter().flatten().for_each(|channel| input[channel] = next());
            }
        }
        state
    }

    /// Where `matrices` has the values of a head, column by column.
    fn cells(op: &Mamba2, head: usize) -> impl Iterator<Item = usize> {
        let (dim, width) = (op.head_dim as usize, op.state as usize);
        (0..width).flat_map(move |n| (0..dim).map(move |d| (head * dim + d) * width + n))
    }

    /// The channels of a head: of its h, b and c.
    fn channels(op: &Mamba2, head: usize) -> [Range<usize>; 3] {
        let (dim, width) = (op.head_dim as usize, op.state as usize);
        let (inner, group) = (op.h.rows as usize, head / (op.heads / op.groups) as usize * width);
        let [b, c] = [inner + group, inner + op.b.rows as usize + group];
        [head * dim..(head + 1) * dim, b..b + width, c..c + width]
    }
}

/// The output of a layer at a position with input `x`, `[hidden]` each; brings `state` to it.
pub fn step_mamba(weights: &Weights, op: &Mamba2, state: &mut MambaState, x: &[f64]) -> Vec<f64> {
    let x = times(op.input_scale, x.to_vec());
    let projected = op.projections().map(|projection| linear(weights, projection, &x));
    let (y, z) = mix_mamba(weights, op, state, projected);
    times(op.output_scale, linear(weights, &op.o, &gated(weights, op.norm.as_ref(), y, &z)))
}

/// What the gate and the norm read, y and z, `[heads * head_dim]` each, of the [projections](Mamba2::projections) of a position, before their
/// scales; brings `state` to it.
pub fn mix_mamba(
    weights: &Weights,
    op: &Mamba2,
    state: &mut MambaState,
    projected: [Vec<f64>; 5],
) -> (Vec<f64>, Vec<f64>) {
    let vector = |id| weights.vector_f32(id);
    let mut scales = op.scales.into_iter();
    let [z, h, b, c, dt] = projected.map(|x| times(scales.next().unwrap_or(1.0), x));
    let (taps, bias) = (vector(op.conv), op.conv_bias.map(vector));
    let mixed = state.conv.step(&taps, bias.as_deref(), [h, b, c].concat());
    let mixed: Vec<f64> = mixed.into_iter().map(|x| act(Act::Silu, x)).collect();
    let (h, rest) = mixed.split_at(op.h.rows as usize);
    let (b, c) = rest.split_at(op.b.rows as usize);

    let (head_dim, width) = (op.head_dim as usize, op.state as usize);
    let (a_log, d, dt_bias) = (vector(op.a_log), vector(op.d), vector(op.dt_bias));
    let heads_of_group = (op.heads / op.groups) as usize;
    let mut y = vec![0.0; h.len()];
    let heads = state.matrices.chunks_exact_mut(head_dim * width).zip(y.chunks_exact_mut(head_dim));
    for (i, ((s, y), h)) in heads.zip(h.chunks_exact(head_dim)).enumerate() {
        let group = i / heads_of_group;
        let [b, c] = [b, c].map(|all| &all[group * width..(group + 1) * width]);
        let step = softplus(dt[i] + f64::from(dt_bias[i]));
        let decay = (-f64::from(a_log[i]).exp() * step).exp();
        scan(s, h, b, c, step, decay, y);
        y.iter_mut().zip(h).for_each(|(y, h)| *y += f64::from(d[i]) * h);
    }
    (y, z)
}

/// `S = decay * S + step * h b^T; y = S c`, with `S` of shape `[h.len(), b.len()]`.
pub fn scan(s: &mut [f64], h: &[f64], b: &[f64], c: &[f64], step: f64, decay: f64, y: &mut [f64]) {
    for ((row, h), y) in s.chunks_exact_mut(b.len()).zip(h).zip(y) {
        *y = 0.0;
        for ((s, b), c) in row.iter_mut().zip(b).zip(c) {
            *s = decay * *s + step * h * b;
            *y += *s * c;
        }
    }
}

/// `y * silu(z)`, with the norm before or after it.
fn gated(weights: &Weights, norm: Option<&GatedNorm>, mut y: Vec<f64>, z: &[f64]) -> Vec<f64> {
    let before_gate = norm.is_some_and(|norm| norm.before_gate);
    if !before_gate {
        gate_silu(z, &mut y);
    }
    if let Some(norm) = norm {
        y = norm_groups(weights, norm, &y);
    }
    if before_gate {
        gate_silu(z, &mut y);
    }
    y
}

/// `y = y * silu(z)`
pub fn gate_silu(z: &[f64], y: &mut [f64]) {
    y.iter_mut().zip(z).for_each(|(y, z)| *y *= act(Act::Silu, *z));
}

/// The norm of each group of `y` alone.
pub fn norm_groups(weights: &Weights, op: &GatedNorm, y: &[f64]) -> Vec<f64> {
    let gains = op.norm.weight.map(|id| weights.vector_f32(id));
    let width = y.len() / op.groups as usize;
    let of_group = |(group, values): (usize, &[f64])| {
        let gains = gains.as_ref().map(|gains| &gains[group * width..(group + 1) * width]);
        norm_values(op.norm.kind, op.norm.eps, op.norm.weight_offset, gains, None, values)
    };
    y.chunks_exact(width).enumerate().flat_map(of_group).collect()
}

/// `scale * x`
pub fn times(scale: f32, mut x: Vec<f64>) -> Vec<f64> {
    x.iter_mut().for_each(|x| *x *= f64::from(scale));
    x
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config::import_config_only;
    use crate::model::graph::{Norm, NormKind};

    #[test]
    fn a_scan_decays_and_adds_an_outer_product() {
        let (mut s, mut y) = ([0.0; 4], [0.0; 2]);
        scan(&mut s, &[1.0, 2.0], &[3.0, 4.0], &[1.0, 0.5], 0.5, 0.25, &mut y);
        assert_eq!((s, y), ([1.5, 2.0, 3.0, 4.0], [2.5, 5.0]));
        scan(&mut s, &[0.0, 1.0], &[1.0, 1.0], &[0.0, 1.0], 2.0, 0.5, &mut y);
        assert_eq!((s, y), ([0.75, 1.0, 3.5, 4.0], [1.0, 4.0]));
    }

    #[test]
    fn gates_multiply_before_or_after_the_norm() {
        let config = r#"{"architectures":["LlamaForCausalLM"],"vocab_size":8,"hidden_size":8,"intermediate_size":8,
            "num_hidden_layers":1,"num_attention_heads":1}"#;
        let weights = import_config_only(config, 0).unwrap().weights;
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let (y, z) = (vec![3.0, -1.0], [1.0, 2.0]);
        let products = [3.0 * silu(1.0), -silu(2.0)];
        let of = |norm: Option<&GatedNorm>| gated(&weights, norm, y.clone(), &z);
        assert_eq!(of(None), products);
        let norm = Norm { kind: NormKind::Rms, eps: 0.0, weight: None, weight_offset: 0.0, bias: None };
        let root = ((products[0].powi(2) + products[1].powi(2)) / 2.0).sqrt();
        let close = |found: Vec<f64>, expected: [f64; 2]| {
            assert!(found.iter().zip(expected).all(|(f, e)| (f - e).abs() < 1e-12), "{found:?} {expected:?}");
        };
        let after = GatedNorm { norm, groups: 1, before_gate: false };
        close(of(Some(&after)), products.map(|x| x / root));
        let before = GatedNorm { before_gate: true, ..after.clone() };
        close(of(Some(&before)), products.map(|x| x / 5f64.sqrt()));
        // Groups of one value leave its sign alone.
        close(of(Some(&GatedNorm { groups: 2, ..after })), [1.0, -1.0]);
    }
}
