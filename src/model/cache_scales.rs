//! Owns the scales of a cache in fp8: one for the keys and one for the values of each KV head of a layer.
//!
//! A cached key or value `x` is the e4m3 code nearest to `x / scale`, ties to the even one; beyond 448 it is the code of 448. It is read
//! as `code * scale`. A step reads its own keys and values with the same rounding.
//!
//! The scales are those of the checkpoint, where it has some. Otherwise they follow from the weights, so that nothing has to be
//! measured and the same model always has the same ones: no key or value can be larger than the norms and weights before it allow, and
//! the scale is the smallest power of two that keeps this bound within 448. With `n = |w * g|` of a row `w` of the projection and the
//! gains `g` of the norm before it, the bound is `n sqrt(hidden)`. Values of ordinary inputs are around `n`, and e4m3 keeps all of
//! its bits down to `448 / 2^15`: so they have them, too, and nothing saturates.

use rayon::prelude::*;

use crate::format::E4M3_MAX;
use crate::model::graph::{Attention, Linear, Mixer, ModelGraph, Norm, NormKind, QkNorm, QkNormSpan};
use crate::model::weights::Weights;

/// Powers of two that a scale may be, by exponent: far beyond what weights lead to, and normal in fp32, as their inverses are.
const EXPONENTS: std::ops::RangeInclusive<i32> = -100..=100;

/// The scales of a layer: for each KV head the scale of its keys, then that of its values. 1 if nothing bounds a head; none if the layer
/// has no attention.
///
/// # Panics
/// If the graph has no such layer.
pub fn cache_scales(graph: &ModelGraph, weights: &Weights, layer: usize) -> Vec<[f32; 2]> {
    let layer = &graph.layers[layer];
    let Some(attn) = layer.history() else { return vec![] };
    if let Some(stored) = attn.cache_scales {
        let [keys, values] = stored.map(|id| weights.vector_f32(id)[0]);
        return vec![[keys, values]; attn.kv_heads as usize];
    }
    let input = layer.attn_norm.as_ref().map(|norm| Input::of(weights, norm, graph.hidden));
    // A factor of the input; the bound of a bias stays.
    let factor = match &layer.mixer {
        Mixer::SideBySide(both) => f64::from(both.attention_scales[0]).max(1.0),
        _ => 1.0,
    };
    let projected = |linear: &Linear| -> Vec<f64> {
        let dim = attn.head_dim as usize;
        match &input {
            Some(input) => input.most(weights, linear).chunks_exact(dim).map(|values| factor * most(values)).collect(),
            None => vec![f64::INFINITY; attn.kv_heads as usize],
        }
    };
    let keys = match &attn.k_norm {
        Some(norm) => normed(weights, norm, attn),
        None => projected(&attn.k),
    };
    // A norm that follows the rotation bounds what it leaves.
    let turned = attn.rope.filter(|_| attn.k_norm.is_none() || !attn.norm_after_rope).map_or(1.0, |rope| {
        // A rotation keeps the length of a pair, times the scale of the table.
        let pair = if attn.k_norm.is_some() { 1.0 } else { std::f64::consts::SQRT_2 };
        pair * f64::from(graph.ropes[rope.index()].scale.abs()).max(1.0)
    });
    let scales = keys.into_iter().zip(projected(&attn.v));
    scales.map(|(key, value)| [scale_for(key * turned), scale_for(value)]).collect()
}

/// The smallest power of two with which `most` is within e4m3.
fn scale_for(most: f64) -> f32 {
    if !most.is_finite() || most <= 0.0 {
        return 1.0;
    }
    let exponent = (most / f64::from(E4M3_MAX)).log2().ceil() as i32;
    2f32.powi(exponent.clamp(*EXPONENTS.start(), *EXPONENTS.end()))
}

fn most(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |most, value| most.max(value.abs()))
}

/// The longest key of each head after its norm: that of a pair of its dimensions is no longer.
fn normed(weights: &Weights, norm: &QkNorm, attn: &Attention) -> Vec<f64> {
    let (heads, dim) = (attn.kv_heads as usize, attn.head_dim as usize);
    let gains: Vec<f64> = norm.weights.iter().flat_map(|&id| weights.vector_f32(id)).map(f64::from).collect();
    let width = if norm.span == QkNormSpan::Projection { heads * dim } else { dim };
    let of_head = |head: usize| {
        let own = if norm.span == QkNormSpan::Head { &gains[..] } else { &gains[head * dim..(head + 1) * dim] };
        let gain =
            own.iter().map(|gain| gain + f64::from(norm.weight_offset)).fold(0.0, |most: f64, g| most.max(g.abs()));
        gain * (width as f64).sqrt()
    };
    (0..heads).map(of_head).collect()
}

/// What a norm leaves: a vector of length `sqrt(hidden)` at most, times `gains`, plus `shift`.
struct Input {
    gains: Vec<f64>,
    shift: Option<Vec<f64>>,
}

impl Input {
    fn of(weights: &Weights, norm: &Norm, hidden: u32) -> Input {
        let Norm { kind, eps: _, weight, weight_offset, bias } = norm;
        let vector = |id| -> Vec<f64> { weights.vector_f32(id).into_iter().map(f64::from).collect() };
        let gains = weight.map_or(vec![1.0; hidden as usize], |id| {
            vector(id).into_iter().map(|gain| gain + f64::from(*weight_offset)).collect()
        });
        Input { gains, shift: bias.filter(|_| *kind == NormKind::Layer).map(vector) }
    }

    /// The largest value of each row of `linear`, from the inequality of Cauchy and Schwarz.
    fn most(&self, weights: &Weights, linear: &Linear) -> Vec<f64> {
        let bias = weights.bias_f32(linear);
        let width = linear.cols as usize;
        let of_row = |row: &mut Vec<f32>, r: u32| {
            weights.linear_row_f32(linear, r, row);
            let squares: f64 = row.iter().zip(&self.gains).map(|(&w, g)| (f64::from(w) * g).powi(2)).sum();
            let shift =
                self.shift.as_ref().map_or(0.0, |shift| row.iter().zip(shift).map(|(&w, s)| f64::from(w) * s).sum());
            (squares * width as f64).sqrt()
                + (shift + bias.as_ref().map_or(0.0, |bias| f64::from(bias[r as usize]))).abs()
        };
        (0..linear.rows).into_par_iter().with_min_len(64).map_init(|| vec![0.0; width], of_row).collect()
    }
}
