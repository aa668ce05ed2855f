//! Owns Mamba-2: one position of it, from the state that the positions before left.
//!
//! The formulas are those of [`Mamba2`].

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
}

/// The output of a layer at a position with input `x`, `[hidden]` each; brings `state` to it.
pub fn step_mamba(weights: &Weights, op: &Mamba2, state: &mut MambaState, x: &[f64]) -> Vec<f64> {
    let vector = |id| weights.vector_f32(id);
    let x = times(op.input_scale, x.to_vec());
    let mut scales = op.scales.into_iter();
    let mut project = |projection| times(scales.next().unwrap_or(1.0), linear(weights, projection, &x));
    let [z, h, b, c, dt] = op.projections().map(&mut project);
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
    times(op.output_scale, linear(weights, &op.o, &gated(weights, op.norm.as_ref(), y, &z)))
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
    let gate = |y: &mut Vec<f64>| y.iter_mut().zip(z).for_each(|(y, z)| *y *= act(Act::Silu, *z));
    let Some(op) = norm else {
        gate(&mut y);
        return y;
    };
    if !op.before_gate {
        gate(&mut y);
    }
    let gains = op.norm.weight.map(|id| weights.vector_f32(id));
    let width = y.len() / op.groups as usize;
    let of_group = |(group, values): (usize, &[f64])| {
        let gains = gains.as_ref().map(|gains| &gains[group * width..(group + 1) * width]);
        norm_values(op.norm.kind, op.norm.eps, op.norm.weight_offset, gains, None, values)
    };
    y = y.chunks_exact(width).enumerate().flat_map(of_group).collect();
    if op.before_gate {
        gate(&mut y);
    }
    y
}

/// `scale * x`
fn times(scale: f32, mut x: Vec<f64>) -> Vec<f64> {
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
