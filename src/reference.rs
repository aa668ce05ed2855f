//! Owns the CPU reference: every op of the model graph in plain f64 loops. This file is the specification of the ops.
//!
//! Activations and accumulation are f64 throughout; weights are the checkpoint's, widened. Only rotary angles are
//! computed in fp32, because that rounding is part of the models: transformers computes `position * inv_freq` in fp32,
//! and at position 100 000 the rounding turns the fastest pairs by more than a milliradian.
//!
//! It shares no code with `lower`, so a fault of lowering cannot hide in its own specification.

mod conv;
mod delta;
mod joined;
mod mamba;

use rayon::prelude::*;

use crate::dtype::DType;
use crate::format::{e4m3, to_e4m3};
use crate::model::cache_scales::cache_scales;
use crate::model::graph::{
    Act, Attention, ClampedSwiglu, ExpertGroups, Experts, FeedForward, GroupScore, Layer, Linear, Mixer, Mlp,
    ModelGraph, Norm, NormKind, QkNorm, QkNormSpan, QueryScale, Rope, Router, ScaledMlp, Score, SideBySide,
};
use crate::model::synthetic::given_value;
use crate::model::weights::Weights;

pub use crate::reference::conv::{ConvState, convolve, mix_short_conv, step_short_conv};
pub use crate::reference::delta::{DeltaState, delta_rule, mix_delta, softplus, step_delta};
pub use crate::reference::joined::join;
pub use crate::reference::mamba::{MambaState, gate_silu, mix_mamba, norm_groups, scan, step_mamba, times};

/// Logits of every position of `ids`, `[ids.len()][vocab]`.
///
/// # Panics
/// If an id is outside the vocabulary or the sequence is longer than the model admits.
pub fn forward(graph: &ModelGraph, weights: &Weights, ids: &[u32]) -> Vec<Vec<f32>> {
    let mut session = Session::new(graph, weights);
    ids.iter().map(|&id| session.step(id)).collect()
}

/// One sequence in progress: what every layer keeps of it, and the next position.
#[derive(Debug, Clone)]
pub struct Session<'a> {
    graph: &'a ModelGraph,
    weights: &'a Weights,
    kept: Vec<Kept>,
    /// For a cache in fp8, by layer and KV head: the scale of its keys, and that of its values.
    scales: Option<Vec<Vec<[f32; 2]>>>,
    position: u32,
    /// Of a draft: what the next step reads beside its token.
    given: Option<Vec<f64>>,
}

/// What a layer keeps of a sequence.
#[derive(Debug, Clone)]
enum Kept {
    /// Keys (after norm and rotation) and values by position, `[kv_heads * head_dim]` each.
    History(Cache),
    State(DeltaState),
    Inputs(ConvState),
    Mamba(MambaState),
    Both(Cache, MambaState),
}

#[derive(Debug, Clone, Default)]
struct Cache {
    keys: Vec<Vec<f64>>,
    values: Vec<Vec<f64>>,
}

impl<'a> Session<'a> {
    pub fn new(graph: &'a ModelGraph, weights: &'a Weights) -> Self {
        let kept = graph.layers.iter().map(|layer| match &layer.mixer {
            Mixer::Attention(_) => Kept::History(Cache::default()),
            Mixer::GatedDelta(net) => Kept::State(DeltaState::new(net)),
            Mixer::ShortConv(conv) => Kept::Inputs(ConvState::new(conv.h.rows, conv.kernel)),
            Mixer::Mamba2(mamba) => Kept::Mamba(MambaState::new(mamba)),
            Mixer::SideBySide(both) => Kept::Both(Cache::default(), MambaState::new(&both.mamba)),
        });
        Session { graph, weights, kept: kept.collect(), scales: None, position: 0, given: None }
    }

    /// As [`new`](Self::new), with keys and values that pass through a cache of type `cache` in fp8. Those of other types are not
    /// rounded.
    pub fn with_cache(graph: &'a ModelGraph, weights: &'a Weights, cache: DType) -> Self {
        let of_layer = |layer| cache_scales(graph, weights, layer);
        let scales = (cache == DType::E4m3).then(|| (0..graph.layers.len()).map(of_layer).collect());
        Session { scales, ..Session::new(graph, weights) }
    }

    /// Gives the next step of a draft what it reads beside its token, `[hidden]`. Without it, as in checks, that is [`given_value`] by column.
    pub fn give(&mut self, given: Vec<f64>) {
        self.given = Some(given);
    }

    /// The position that the next step computes.
    pub fn position(&self) -> u32 {
        self.position
    }

    /// Keys (after norm and rotation) and values of a layer by position, `[kv_heads * head_dim]` each; none if the layer has no attention.
    pub fn cached(&self, layer: usize) -> [&[Vec<f64>]; 2] {
        match &self.kept[layer] {
            Kept::History(Cache { keys, values }) | Kept::Both(Cache { keys, values }, _) => [keys, values],
            Kept::State(_) | Kept::Inputs(_) | Kept::Mamba(_) => [&[], &[]],
        }
    }

    /// The state of a layer with a gated delta net after the last position; `None` for another mixer.
    pub fn state(&self, layer: usize) -> Option<&DeltaState> {
        match &self.kept[layer] {
            Kept::State(state) => Some(state),
            Kept::History(_) | Kept::Inputs(_) | Kept::Mamba(_) | Kept::Both(..) => None,
        }
    }

    /// The state of a layer with Mamba-2, alone or beside attention; `None` for another mixer.
    pub fn mamba(&self, layer: usize) -> Option<&MambaState> {
        match &self.kept[layer] {
            Kept::Mamba(state) | Kept::Both(_, state) => Some(state),
            Kept::History(_) | Kept::State(_) | Kept::Inputs(_) => None,
        }
    }

    /// What a layer with a short convolution keeps; `None` of others.
    pub fn inputs(&self, layer: usize) -> Option<&ConvState> {
        match &self.kept[layer] {
            Kept::Inputs(state) => Some(state),
            Kept::History(_) | Kept::State(_) | Kept::Mamba(_) | Kept::Both(..) => None,
        }
    }

    /// Computes `token` at the next position and returns its logits, `[vocab]`.
    ///
    /// # Panics
    /// As [`forward`].
    pub fn step(&mut self, token: u32) -> Vec<f32> {
        let hidden = self.step_hidden(token);
        self.logits(&hidden)
    }

    /// Logits of an output of the final norm, `[vocab]`.
    pub fn logits(&self, hidden: &[f64]) -> Vec<f32> {
        let graph = self.graph;
        let mut logits = linear(self.weights, &graph.head, hidden);
        for logit in &mut logits {
            *logit *= f64::from(graph.logits_scale);
            if let Some(cap) = graph.logits_softcap {
                *logit = softcap(f64::from(cap), *logit);
            }
        }
        logits.into_iter().map(|logit| logit as f32).collect()
    }

    /// As [`step`](Self::step), up to the output of the final norm, `[hidden]`: enough for all but the last token of
    /// a prompt.
    pub fn step_hidden(&mut self, token: u32) -> Vec<f64> {
        let graph = self.graph;
        assert!(token < graph.vocab, "token {token} of a vocabulary of {}", graph.vocab);
        assert!(self.position < graph.positions_max, "position {} of {}", self.position, graph.positions_max);
        let mut row = vec![0.0; graph.hidden as usize];
        self.weights.read_row_f32(graph.embed, token, &mut row);
        let mut x: Vec<f64> = row.iter().map(|&e| f64::from(e) * f64::from(graph.embed_scale)).collect();
        if let Some(joined) = &graph.joined {
            let value = |column| f64::from(given_value(self.position, column));
            let given = self.given.take().unwrap_or_else(|| (0..graph.hidden).map(value).collect());
            x = join(self.weights, joined, &x, &given);
        }
        for (l, (layer, kept)) in graph.layers.iter().zip(&mut self.kept).enumerate() {
            let scales = self.scales.as_ref().map(|scales| &*scales[l]);
            step_layer(graph, self.weights, layer, kept, scales, self.position, &mut x);
        }
        self.position += 1;
        norm(self.weights, &graph.final_norm, &x)
    }
}

/// `scales`: those of each KV head of a cache in fp8, which keys and values pass through.
fn step_layer(
    graph: &ModelGraph,
    weights: &Weights,
    layer: &Layer,
    kept: &mut Kept,
    scales: Option<&[[f32; 2]]>,
    position: u32,
    x: &mut [f64],
) {
    let normed = |op: &Option<Norm>, x: &[f64]| op.as_ref().map_or(x.to_vec(), |op| norm(weights, op, x));
    let mixer_in = normed(&layer.attn_norm, x);
    let mixer_out = match (&layer.mixer, kept) {
        (Mixer::Attention(op), Kept::History(cache)) => {
            step_attention(graph, weights, op, cache, scales, position, &mixer_in)
        }
        (Mixer::GatedDelta(op), Kept::State(state)) => step_delta(weights, op, state, &mixer_in),
        (Mixer::ShortConv(op), Kept::Inputs(state)) => step_short_conv(weights, op, state, &mixer_in),
        (Mixer::Mamba2(op), Kept::Mamba(state)) => step_mamba(weights, op, state, &mixer_in),
        (Mixer::SideBySide(op), Kept::Both(cache, state)) => {
            let SideBySide { attention, attention_scales: [input_scale, output_scale], mamba } = &**op;
            let scaled: Vec<f64> = mixer_in.iter().map(|x| f64::from(*input_scale) * x).collect();
            let attended = step_attention(graph, weights, attention, cache, scales, position, &scaled);
            let mut out = step_mamba(weights, mamba, state, &mixer_in);
            add_scaled(&mut out, *output_scale, &attended);
            out
        }
        _ => unreachable!("a session keeps what its mixers need"),
    };
    let mixer_out = normed(&layer.attn_post_norm, &mixer_out);
    // A parallel branch reads the layer's input, so it has to read before the sum.
    let parallel_in = layer.parallel.then(|| normed(&layer.mlp_norm, x));
    add_scaled(x, layer.residual_scale, &mixer_out);
    let feed_in = parallel_in.unwrap_or_else(|| normed(&layer.mlp_norm, x));
    let feed_out = match &layer.feed {
        FeedForward::None => return,
        FeedForward::Dense(op) => mlp(weights, op, &feed_in),
        FeedForward::Scaled(op) => scaled_mlp(weights, op, &feed_in),
        FeedForward::Experts(op) => experts(weights, op, &feed_in),
    };
    let feed_out = normed(&layer.mlp_post_norm, &feed_out);
    add_scaled(x, layer.residual_scale, &feed_out);
}

/// `x += scale * y`
pub fn add_scaled(x: &mut [f64], scale: f32, y: &[f64]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += f64::from(scale) * y;
    }
}

fn step_attention(
    graph: &ModelGraph,
    weights: &Weights,
    op: &Attention,
    cache: &mut Cache,
    scales: Option<&[[f32; 2]]>,
    position: u32,
    x: &[f64],
) -> Vec<f64> {
    let head_dim = op.head_dim as usize;
    let mut q = linear(weights, &op.q, x);
    let mut k = linear(weights, &op.k, x);
    let mut v = linear(weights, &op.v, x);
    for (norm, projected) in [(op.q_norm.as_ref(), &mut q), (op.k_norm.as_ref(), &mut k)] {
        norm_and_rotate(graph, weights, op, norm, position, projected);
    }
    if let Some(scale) = op.query_scale {
        let factor = query_factor(scale, position);
        q.iter_mut().for_each(|q| *q *= factor);
    }
    for (head, scales) in scales.unwrap_or_default().iter().enumerate() {
        for (values, scale) in [&mut k, &mut v].into_iter().zip(scales) {
            values[head * head_dim..(head + 1) * head_dim].iter_mut().for_each(|x| *x = through_e4m3(*x, *scale));
        }
    }
    cache.keys.push(k);
    cache.values.push(v);
    let seen = op.window.map_or(cache.keys.len(), |window| cache.keys.len().min(window as usize));
    let first = cache.keys.len() - seen;
    let sinks = op.sinks.map(|id| weights.vector_f32(id));
    let mut mixed = attention(
        &AttentionShape { heads: op.heads as usize, kv_heads: op.kv_heads as usize, head_dim },
        op.scale,
        op.softcap,
        sinks.as_deref(),
        &q,
        &cache.keys[first..],
        &cache.values[first..],
    );
    if let Some(gate) = &op.gate {
        gate_output(&linear(weights, gate, x), &mut mixed);
    }
    linear(weights, &op.o, &mixed)
}

/// The norm and the rotation of all heads of q or k, in the order of the model.
pub fn norm_and_rotate(
    graph: &ModelGraph,
    weights: &Weights,
    op: &Attention,
    norm: Option<&QkNorm>,
    position: u32,
    projected: &mut [f64],
) {
    let head_dim = op.head_dim as usize;
    if !op.norm_after_rope {
        qk_norm(weights, norm, head_dim, projected);
    }
    if let Some(id) = op.rope {
        let rope = &graph.ropes[id.index()];
        projected.chunks_exact_mut(head_dim).for_each(|head| rope_apply(rope, position, head));
    }
    if op.norm_after_rope {
        qk_norm(weights, norm, head_dim, projected);
    }
}

/// What q is multiplied by at `position`: `1 + beta * ln(1 + floor(position / original))`.
pub fn query_factor(scale: QueryScale, position: u32) -> f64 {
    1.0 + f64::from(scale.beta) * f64::from(position / scale.original).ln_1p()
}

/// `y *= sigmoid(gate)`
pub fn gate_output(gate: &[f64], y: &mut [f64]) {
    for (y, gate) in y.iter_mut().zip(gate) {
        *y /= 1.0 + (-gate).exp();
    }
}

/// The value of `x` after a cache in fp8: the nearest product of `scale` and an e4m3 code, ties to the even code.
fn through_e4m3(x: f64, scale: f32) -> f64 {
    f64::from(e4m3(to_e4m3((x / f64::from(scale)) as f32))) * f64::from(scale)
}

/// The norm op with its weights fetched; see [`norm_values`].
pub fn norm(weights: &Weights, op: &Norm, x: &[f64]) -> Vec<f64> {
    let weight = op.weight.map(|id| weights.vector_f32(id));
    let bias = op.bias.map(|id| weights.vector_f32(id));
    norm_values(op.kind, op.eps, op.weight_offset, weight.as_deref(), bias.as_deref(), x)
}

/// RMS: `y = x * rsqrt(mean(x^2) + eps) * (w + offset)`.
/// Layer: `y = (x - mean(x)) * rsqrt(mean((x - mean(x))^2) + eps) * (w + offset) + b`.
///
/// `x`, `weight` and `bias` have the width that is normed over; an absent weight is 1, an absent bias 0.
pub fn norm_values(
    kind: NormKind,
    eps: f32,
    weight_offset: f32,
    weight: Option<&[f32]>,
    bias: Option<&[f32]>,
    x: &[f64],
) -> Vec<f64> {
    let n = x.len() as f64;
    let mean = match kind {
        NormKind::Rms => 0.0,
        NormKind::Layer => x.iter().sum::<f64>() / n,
    };
    let variance = x.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / n;
    let scale = 1.0 / (variance + f64::from(eps)).sqrt();
    let gain = |i: usize| weight.map_or(1.0, |w| f64::from(w[i]) + f64::from(weight_offset));
    let shift = |i: usize| bias.map_or(0.0, |b| f64::from(b[i]));
    x.iter().enumerate().map(|(i, x)| (x - mean) * scale * gain(i) + shift(i)).collect()
}

/// Norms a projection in place, head by head or as a whole.
pub fn qk_norm(weights: &Weights, op: Option<&QkNorm>, head_dim: usize, projected: &mut [f64]) {
    let Some(op) = op else { return };
    let gains: Vec<f32> = op.weights.iter().flat_map(|&id| weights.vector_f32(id)).collect();
    qk_norm_values(op, &gains, head_dim, projected);
}

/// As [`qk_norm`], with its gains fetched.
pub fn qk_norm_values(op: &QkNorm, gains: &[f32], head_dim: usize, projected: &mut [f64]) {
    let QkNorm { kind, eps, weights: _, weight_offset, span } = op;
    let width = if *span == QkNormSpan::Projection { projected.len() } else { head_dim };
    for (part, values) in projected.chunks_exact_mut(width).enumerate() {
        let gains = if *span == QkNormSpan::OwnGains { &gains[part * width..(part + 1) * width] } else { gains };
        let normed = norm_values(*kind, *eps, *weight_offset, Some(gains), None, values);
        values.copy_from_slice(&normed);
    }
}

/// The linear op with its rows fetched: `y[r] = sum_c W[r, c] * x[c] + b[r]`, `x` of length `cols`, `y` of `rows`.
pub fn linear(weights: &Weights, op: &Linear, x: &[f64]) -> Vec<f64> {
    assert_eq!(x.len(), op.cols as usize);
    let bias = weights.bias_f32(op);
    let row = |buffer: &mut Vec<f32>, r: u32| {
        weights.linear_row_f32(op, r, buffer);
        dot(buffer, x) + bias.as_ref().map_or(0.0, |b| f64::from(b[r as usize]))
    };
    // Rows are independent, so threads change the time and not the result.
    (0..op.rows).into_par_iter().with_min_len(64).map_init(|| vec![0.0; x.len()], row).collect()
}

/// `y = W x` for `W` of shape `[rows, x.len()]`, row-major.
pub fn matvec(w: &[f32], x: &[f64]) -> Vec<f64> {
    w.chunks_exact(x.len()).map(|row| dot(row, x)).collect()
}

/// Four partial sums, so that additions do not depend on each other.
fn dot(w: &[f32], x: &[f64]) -> f64 {
    let mut sums = [0.0; 4];
    let (w4, w_rest) = w.as_chunks::<4>();
    let (x4, x_rest) = x.as_chunks::<4>();
    for (w, x) in w4.iter().zip(x4) {
        for i in 0..4 {
            sums[i] += f64::from(w[i]) * x[i];
        }
    }
    let rest: f64 = w_rest.iter().zip(x_rest).map(|(w, x)| f64::from(*w) * x).sum();
    (sums[0] + sums[1]) + (sums[2] + sums[3]) + rest
}

/// `(cos, sin)` of pair `i` at `position`, times the table's scale: angle, cosine, sine and product are fp32 values.
pub fn rope_factors(rope: &Rope, position: u32, pair: usize) -> (f32, f32) {
    let angle = f64::from(position as f32 * rope.inv_freq[pair]);
    (angle.cos() as f32 * rope.scale, angle.sin() as f32 * rope.scale)
}

/// Rotates one head in place. With `n` pairs and `(a, b)` = dimensions `(i, i + n)`, or `(2i, 2i + 1)` if interleaved:
/// `a' = a cos - b sin`, `b' = b cos + a sin`. Dimensions from `2n` on pass through.
pub fn rope_apply(rope: &Rope, position: u32, head: &mut [f64]) {
    let pairs = rope.inv_freq.len();
    for i in 0..pairs {
        let (a, b) = if rope.interleaved { (2 * i, 2 * i + 1) } else { (i, i + pairs) };
        let (cos, sin) = rope_factors(rope, position, i);
        let (cos, sin) = (f64::from(cos), f64::from(sin));
        (head[a], head[b]) = (head[a] * cos - head[b] * sin, head[b] * cos + head[a] * sin);
    }
}

/// Sizes of attention; query head `h` reads key and value head `h / (heads / kv_heads)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

/// For each head: `s_j = softcap?(scale * q . k_j)`, `p = softmax(s)`, `y = sum_j p_j v_j`. A sink is one more score of the softmax, with
/// no value.
///
/// `sinks` has a value for each head; `q` and the result are `[heads * head_dim]`; `keys` and `values` are the rows that the query sees, the window
/// applied, `[kv_heads * head_dim]` each.
pub fn attention(
    shape: &AttentionShape,
    scale: f32,
    cap: Option<f32>,
    sinks: Option<&[f32]>,
    q: &[f64],
    keys: &[impl AsRef<[f64]>],
    values: &[impl AsRef<[f64]>],
) -> Vec<f64> {
    let AttentionShape { heads, kv_heads, head_dim } = *shape;
    let mut y = vec![0.0; heads * head_dim];
    for (h, (q, y)) in q.chunks_exact(head_dim).zip(y.chunks_exact_mut(head_dim)).enumerate() {
        let kv = h / (heads / kv_heads) * head_dim..(h / (heads / kv_heads) + 1) * head_dim;
        let mut scores: Vec<f64> = keys
            .iter()
            .map(|k| {
                let score = f64::from(scale) * q.iter().zip(&k.as_ref()[kv.clone()]).map(|(q, k)| q * k).sum::<f64>();
                cap.map_or(score, |cap| softcap(f64::from(cap), score))
            })
            .collect();
        scores.extend(sinks.map(|sinks| f64::from(sinks[h])));
        softmax(&mut scores);
        for (p, v) in scores.iter().zip(values) {
            for (y, v) in y.iter_mut().zip(&v.as_ref()[kv.clone()]) {
                *y += p * v;
            }
        }
    }
    y
}

/// `p_j = exp(s_j - max s) / sum_i exp(s_i - max s)`, in place.
pub fn softmax(scores: &mut [f64]) {
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    scores.iter_mut().for_each(|s| *s = (*s - max).exp());
    let sum: f64 = scores.iter().sum();
    scores.iter_mut().for_each(|s| *s /= sum);
}

/// `cap * tanh(x / cap)`
pub fn softcap(cap: f64, x: f64) -> f64 {
    cap * (x / cap).tanh()
}

/// Gated: `down(act(gate(x)) * up(x))`, or what [`gated`] says; plain: `down(act(up(x)))`.
pub fn mlp(weights: &Weights, op: &Mlp, x: &[f64]) -> Vec<f64> {
    mlp_with(weights, op, 1.0, x)
}

/// As [`mlp`], with a gate that is multiplied by `gate_scale`.
fn mlp_with(weights: &Weights, op: &Mlp, gate_scale: f32, x: &[f64]) -> Vec<f64> {
    let (up, gate_scale) = (linear(weights, &op.up, x), f64::from(gate_scale));
    let inner: Vec<f64> = match &op.gate {
        Some(gate) => linear(weights, gate, x).into_iter().zip(up).map(|(g, u)| gated(op, gate_scale * g, u)).collect(),
        None => up.into_iter().map(|u| act(op.act, u)).collect(),
    };
    linear(weights, &op.down, &inner)
}

/// An MLP with factors; see [`ScaledMlp`].
fn scaled_mlp(weights: &Weights, op: &ScaledMlp, x: &[f64]) -> Vec<f64> {
    let ScaledMlp { mlp, gate_scale, down_scale } = op;
    let mut out = mlp_with(weights, mlp, *gate_scale, x);
    out.iter_mut().for_each(|out| *out *= f64::from(*down_scale));
    out
}

/// What an MLP makes of a value of the gate and one of up: `act(g) * u`, or [`ClampedSwiglu`].
pub fn gated(op: &Mlp, gate: f64, up: f64) -> f64 {
    let Some(ClampedSwiglu { alpha, limit }) = op.swiglu else { return act(op.act, gate) * up };
    let (alpha, limit) = (f64::from(alpha), f64::from(limit));
    let (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
    (up + 1.0) * gate * sigmoid(alpha * gate)
}

/// The experts of a row, added in the order of its slots, then the shared one; see [`Experts`].
pub fn experts(weights: &Weights, op: &Experts, x: &[f64]) -> Vec<f64> {
    let scores = scores(&op.router, &linear(weights, &op.router.linear, x));
    let chosen = choose(weights, &op.router, &scores);
    let mut y = vec![0.0; x.len()];
    let mut add = |weight: f64, out: Vec<f64>| y.iter_mut().zip(out).for_each(|(y, out)| *y += weight * out);
    for (&expert, weight) in chosen.iter().zip(slot_weights(&op.router, &scores, &chosen)) {
        add(weight, mlp(weights, &op.experts[expert as usize], x));
    }
    if let Some(shared) = &op.shared {
        let gate = shared.gate.as_ref().map_or(1.0, |gate| sigmoid(linear(weights, gate, x)[0]));
        add(gate * f64::from(shared.scale), mlp(weights, &shared.mlp, x));
    }
    y
}

/// From the outputs of a router's linear to the scores of its experts.
pub fn scores(op: &Router, logits: &[f64]) -> Vec<f64> {
    let mut scores = logits.to_vec();
    match op.score {
        Score::Softmax => softmax(&mut scores),
        Score::Sigmoid => scores.iter_mut().for_each(|s| *s = sigmoid(*s)),
    }
    scores
}

/// The experts of a row by slot: those that [`Router`] chooses, largest first.
pub fn choose(weights: &Weights, op: &Router, scores: &[f64]) -> Vec<u32> {
    let choice = corrected(weights, op, scores);
    let all: Vec<u32> = (0..choice.len() as u32).collect();
    let Some(ExpertGroups { count, kept, score }) = op.groups else { return largest(&choice, all, op.top_k) };
    let per_group = choice.len() / count as usize;
    let group_scores: Vec<f64> = choice.chunks_exact(per_group).map(|group| group_score(score, group)).collect();
    let kept = largest(&group_scores, (0..count).collect(), kept);
    let may = |e: &u32| kept.contains(&(e / per_group as u32));
    largest(&choice, all.into_iter().filter(may).collect(), op.top_k)
}

/// How far `chosen` is from what [`choose`] allows. See [`missed_by`].
pub fn missed(weights: &Weights, op: &Router, scores: &[f64], chosen: &[u32]) -> f64 {
    missed_by(&corrected(weights, op, scores), op.top_k, op.groups, chosen)
}

/// How far `chosen` is from the `top_k` experts with the largest values of `choice`: by how much an expert that was left out beats one that
/// was chosen, and a group that was left out one that was kept. 0: it is right. Infinite: these are no `top_k` experts, or experts of too many
/// groups.
pub fn missed_by(choice: &[f64], top_k: u32, groups: Option<ExpertGroups>, chosen: &[u32]) -> f64 {
    let mut ids = chosen.to_vec();
    ids.sort_unstable();
    ids.dedup();
    if ids.len() != chosen.len() || ids.len() != top_k as usize {
        return f64::INFINITY;
    }
    if ids.last().is_some_and(|&id| id as usize >= choice.len()) {
        return f64::INFINITY;
    }
    // By how much the best value left out is above the worst value taken.
    let above = |values: &[f64], taken: &[u32], may: &dyn Fn(u32) -> bool| {
        let worst = taken.iter().map(|&at| values[at as usize]).fold(f64::INFINITY, f64::min);
        let out = (0..values.len() as u32).filter(|at| !taken.contains(at) && may(*at));
        (out.map(|at| values[at as usize]).fold(f64::NEG_INFINITY, f64::max) - worst).max(0.0)
    };
    let Some(ExpertGroups { count, kept, score }) = groups else { return above(choice, &ids, &|_| true) };
    let per_group = choice.len() / count as usize;
    let group_scores: Vec<f64> = choice.chunks_exact(per_group).map(|group| group_score(score, group)).collect();
    let mut used: Vec<u32> = ids.iter().map(|id| id / per_group as u32).collect();
    used.dedup();
    if used.len() > kept as usize {
        return f64::INFINITY;
    }
    // Groups of which no expert was chosen may have been kept, the best ones first.
    let rest = (0..count).filter(|group| !used.contains(group)).collect();
    let mut taken = used.clone();
    taken.extend(largest(&group_scores, rest, kept - used.len() as u32));
    let of_groups = above(&group_scores, &taken, &|_| true);
    of_groups.max(above(choice, &ids, &|id| taken.contains(&(id / per_group as u32))))
}

/// What experts are chosen by: their scores, corrected.
fn corrected(weights: &Weights, op: &Router, scores: &[f64]) -> Vec<f64> {
    let correction = op.correction.map(|id| weights.vector_f32(id));
    let corrected = |(e, &score): (usize, &f64)| score + correction.as_ref().map_or(0.0, |c| f64::from(c[e]));
    scores.iter().enumerate().map(corrected).collect()
}

/// The score of a group of experts.
fn group_score(score: GroupScore, group: &[f64]) -> f64 {
    let mut sorted = group.to_vec();
    sorted.sort_by(|a, b| b.total_cmp(a));
    match score {
        GroupScore::Max => sorted[0],
        GroupScore::SumOfTwo => sorted.iter().take(2).sum(),
    }
}

/// The `count` of `ids`, which ascend, with the largest values, largest first; of equal values the lower id first.
fn largest(values: &[f64], mut ids: Vec<u32>, count: u32) -> Vec<u32> {
    // The sort is stable.
    ids.sort_by(|&a, &b| values[b as usize].total_cmp(&values[a as usize]));
    ids.truncate(count as usize);
    ids
}

/// The weights of the chosen experts, by slot.
pub fn slot_weights(op: &Router, scores: &[f64], chosen: &[u32]) -> Vec<f64> {
    let of_slots: Vec<f64> = chosen.iter().map(|&e| scores[e as usize]).collect();
    let divisor = op.normalise.map_or(1.0, |more| of_slots.iter().sum::<f64>() + f64::from(more));
    of_slots.into_iter().map(|score| score / divisor * f64::from(op.scale)).collect()
}

/// `1 / (1 + e^-x)`
pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Silu `x / (1 + e^-x)`; GeluErf `x/2 (1 + erf(x / sqrt 2))`; GeluTanh
/// `x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`; Relu `max(x, 0)`; SquaredRelu `max(x, 0)^2`.
pub fn act(kind: Act, x: f64) -> f64 {
    match kind {
        Act::Silu => x / (1.0 + (-x).exp()),
        Act::GeluErf => 0.5 * x * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2)),
        Act::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
            0.5 * x * (1.0 + inner.tanh())
        }
        Act::Relu => x.max(0.0),
        Act::SquaredRelu => x.max(0.0) * x.max(0.0),
    }
}

/// The error function to within 1e-15: `erf x = 2/sqrt(pi) e^(-x^2) sum_n 2^n x^(2n+1) / (1 * 3 * ... * (2n+1))`.
///
/// Every term has the sign of `x`, so nothing cancels (Abramowitz and Stegun 7.1.6); beyond 6 the result is 1.
pub fn erf(x: f64) -> f64 {
    if x.is_nan() {
        return x;
    }
    if x.abs() > 6.0 {
        return x.signum();
    }
    let mut term = x;
    let mut sum = x;
    let mut n = 1.0;
    while term.abs() > 1e-18 * sum.abs() {
        term *= 2.0 * x * x / (2.0 * n + 1.0);
        sum += term;
        n += 1.0;
    }
    std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum
}

/// Index of the largest value, the first of equal ones: the greedy choice.
pub fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (i, &logit) in logits.iter().enumerate() {
        if logit > logits[best] {
            best = i;
        }
    }
    best as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::graph::{RowView, TensorId};

    #[test]
    fn erf_agrees_with_tabulated_values() {
        // Abramowitz and Stegun, table 7.1, and the limits.
        let table = [
            (0.0, 0.0),
            (0.1, 0.1124629160182849),
            (0.5, 0.5204998778130465),
            (1.0, 0.8427007929497149),
            (2.0, 0.9953222650189527),
            (3.0, 0.9999779095030014),
            (5.0, 0.9999999999984626),
            (7.0, 1.0),
        ];
        for (x, expected) in table {
            assert!((erf(x) - expected).abs() < 2e-15, "erf({x}) = {}", erf(x));
            assert_eq!(erf(-x), -erf(x));
        }
        assert!(erf(f64::NAN).is_nan());
    }

    #[test]
    fn norms_follow_their_formulas() {
        let x = [1.0, 2.0, 3.0, 6.0];
        let w = [1.0, 2.0, 0.5, 0.0];
        let rms = norm_values(NormKind::Rms, 0.5, 1.0, Some(&w), None, &x);
        let scale = 1.0 / (12.5f64 + 0.5).sqrt();
        assert_close(&rms, &[2.0 * scale, 6.0 * scale, 4.5 * scale, 6.0 * scale]);
        let layer = norm_values(NormKind::Layer, 0.5, 0.0, Some(&w), Some(&[0.0, 0.0, 1.0, 7.0]), &x);
        let scale = 1.0 / (3.5f64 + 0.5).sqrt();
        assert_close(&layer, &[-2.0 * scale, -2.0 * scale, 1.0, 7.0]);
    }

    #[test]
    fn rope_turns_pairs_and_passes_the_rest() {
        let table = |interleaved| Rope { inv_freq: vec![0.5, 0.25], scale: 2.0, interleaved };
        let head = [1.0, 2.0, 3.0, 4.0, 5.0];
        let at = |freq: f64| ((3.0 * freq).cos() * 2.0, (3.0 * freq).sin() * 2.0);
        let ((c0, s0), (c1, s1)) = (at(0.5), at(0.25));
        let mut halves = head;
        rope_apply(&table(false), 3, &mut halves);
        assert_close(&halves, &[c0 - 3.0 * s0, 2.0 * c1 - 4.0 * s1, 3.0 * c0 + s0, 4.0 * c1 + 2.0 * s1, 5.0]);
        let mut neighbours = head;
        rope_apply(&table(true), 3, &mut neighbours);
        assert_close(&neighbours, &[c0 - 2.0 * s0, 2.0 * c0 + s0, 3.0 * c1 - 4.0 * s1, 4.0 * c1 + 3.0 * s1, 5.0]);
    }

    #[test]
    fn attention_mixes_values_of_its_group() {
        let shape = AttentionShape { heads: 2, kv_heads: 1, head_dim: 1 };
        let (keys, values) = (vec![vec![0.0], vec![1.0]], vec![vec![10.0], vec![20.0]]);
        let y = attention(&shape, 2.0, Some(1.0), None, &[0.0, 1.0], &keys, &values);
        let p = 2.0f64.tanh().exp() / (1.0 + 2.0f64.tanh().exp());
        assert_close(&y, &[15.0, 10.0 * (1.0 - p) + 20.0 * p]);
        let sinks = [2.0f32.ln(), 0.0];
        let y = attention(&shape, 2.0, Some(1.0), Some(&sinks), &[0.0, 1.0], &keys, &values);
        let e = 2.0f64.tanh().exp();
        assert_close(&y, &[(10.0 + 20.0) / (1.0 + 1.0 + 2.0), (10.0 + 20.0 * e) / (1.0 + e + 1.0)]);
        let mut far = [1000.0, 0.0];
        softmax(&mut far);
        assert_eq!(far, [1.0, 0.0]);
    }

    #[test]
    fn queries_grow_with_position_and_gates_close() {
        let scale = QueryScale { beta: 0.5, original: 8 };
        assert_eq!([0, 7].map(|position| query_factor(scale, position)), [1.0, 1.0]);
        assert_close(
            &[query_factor(scale, 8), query_factor(scale, 31)],
            &[1.0 + 0.5 * 2f64.ln(), 1.0 + 0.5 * 4f64.ln()],
        );
        let mut y = [2.0, 2.0, 2.0];
        gate_output(&[0.0, 3f64.ln(), -1000.0], &mut y);
        assert_close(&y, &[1.0, 1.5, 0.0]);
    }

    #[test]
    fn activations_follow_their_formulas() {
        assert!((act(Act::Silu, 1.0) - 0.731_058_578_630_005).abs() < 1e-15);
        assert!((act(Act::GeluErf, 1.0) - 0.841_344_746_068_543).abs() < 1e-15);
        assert!((act(Act::GeluTanh, 1.0) - 0.841_191_990_608_311).abs() < 1e-12);
        assert_eq!((act(Act::Relu, -2.0), act(Act::Relu, 2.0)), (0.0, 2.0));
        assert_eq!((act(Act::SquaredRelu, -2.0), act(Act::SquaredRelu, 3.0)), (0.0, 9.0));
        assert_eq!(matvec(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[1.0, 1.0, 1.0]), [6.0, 15.0]);
    }

    #[test]
    fn routers_choose_by_their_rules() {
        let config = r#"{"architectures":["LlamaForCausalLM"],"vocab_size":8,"hidden_size":8,"intermediate_size":8,
            "num_hidden_layers":1,"num_attention_heads":1}"#;
        let weights = crate::model::config::import_config_only(config, 0).unwrap().weights;
        let linear = Linear { weight: RowView::range(TensorId(0), 0), bias: None, rows: 6, cols: 1 };
        let router = Router {
            linear,
            top_k: 3,
            score: Score::Sigmoid,
            correction: None,
            groups: None,
            normalise: None,
            scale: 2.0,
        };
        // Of equal values the lower id comes first.
        let scores = [0.25, 0.5, 0.125, 0.5, 0.25, 0.0];
        assert_eq!(choose(&weights, &router, &scores), [1, 3, 0]);
        assert_eq!(slot_weights(&router, &scores, &[1, 3, 0]), [1.0, 1.0, 0.5]);
        let normalised = Router { normalise: Some(0.25), ..router.clone() };
        assert_close(&slot_weights(&normalised, &scores, &[1, 3, 0]), &[2.0 / 3.0, 2.0 / 3.0, 1.0 / 3.0]);
        // Groups of two: sums 0.75, 0.625 and 0.25, largest 0.5, 0.5 and 0.25.
        let grouped =
            |kept, score| Router { groups: Some(ExpertGroups { count: 3, kept, score }), top_k: 2, ..router.clone() };
        assert_eq!(choose(&weights, &grouped(1, GroupScore::SumOfTwo), &scores), [1, 0]);
        assert_eq!(choose(&weights, &grouped(1, GroupScore::Max), &scores), [1, 0]);
        assert_eq!(choose(&weights, &grouped(2, GroupScore::SumOfTwo), &scores), [1, 3]);
        let logits = [0.0, 3f64.ln(), 0.0];
        let of = |score| super::scores(&Router { score, ..router.clone() }, &logits);
        assert_close(&of(Score::Softmax), &[0.2, 0.6, 0.2]);
        assert_close(&of(Score::Sigmoid), &[0.5, 0.75, 0.5]);
    }

    fn assert_close(found: &[f64], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        for (f, e) in found.iter().zip(expected) {
            assert!((f - e).abs() < 1e-6, "expected {expected:?}, found {found:?}");
        }
    }
}
