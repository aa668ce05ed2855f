//! Computes the model for many rows at once, layer by layer: exactly in f64, and in lanes that round where a kernel rounds. The first lane rounds to the
//! nearest, the others up or down at random.
//!
//! The distance of the lanes from the exact result is what rounding costs at a row: a kernel that is right is about as far away. Lanes
//! share the formulas of `reference` and no code with lowering or the interpreter, so a fault of those does not widen its own tolerance.
//! Every row of weights is read once for all rows and lanes.
//!
//! A row at a deep position needs keys and values of the positions before it. They are made of a short text that the model reads here:
//! row `j` of the cache has the value of one of its tokens, and its key, turned to position `j`. Trained weights answer such a cache as they
//! answer a text. They answer numbers at random chaotically, so that rounding decides the logits.

mod states;

use std::borrow::BorrowMut;
use std::ops::Range;

use rayon::prelude::*;

use super::{check_ids, filled_rows};
use crate::dtype::{DType, Precision};
use crate::format::{e4m3, to_e4m3};
use crate::interp::CacheKind;
use crate::model::cache_scales::cache_scales;
use crate::model::graph::{
    Attention, Experts, FeedForward, Layer, Linear, Mamba2, Mixer, Mlp, ModelGraph, Norm, Rope, ScaledMlp, SideBySide,
};
use crate::model::synthetic::given_value;
use crate::model::weights::Weights;
use crate::random::Random;
use crate::reference::{
    AttentionShape, act, add_scaled, attention, choose, gate_output, gate_silu, gated, join, missed, norm,
    norm_and_rotate, norm_groups, qk_norm, qk_norm_values, query_factor, rope_factors, scores, sigmoid, slot_weights,
    softcap, times,
};
use states::{Mixed, Recurrent};

/// Lanes that round. The largest distance counts, because one of them may be right by chance. The lane that rounds to the nearest does in every layer the
/// same to a large activation that stays the same, as a kernel does: at the first position of SmolLM2-135M that costs four times as much as
/// rounding at random.
const LANES: usize = 3;

/// Tokens of the text that caches of deep positions are made of, and how many of them are used once, in their places: the first token of
/// a text is special to most trained models, and a text has it once.
const TEXT: u32 = 16;
const TEXT_ONCE: u32 = 4;

/// Random seed of the lanes.
const SEED: u64 = 0x6c61_6e65;

/// What a kernel rounds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rounding {
    pub precision: Precision,
    /// Whether the inputs of products are rounded to the type of the weights, as tensor cores take them.
    pub staged: bool,
}

impl Rounding {
    /// Lanes of a row. With fp32 alone no lane differs from the exact one by more than the least tolerance.
    pub fn lanes(&self) -> usize {
        if self.is_coarse() { LANES } else { 0 }
    }

    /// Whether the result differs from the exact one by more than sums in another order do.
    fn is_coarse(&self) -> bool {
        let Precision { weights, cache, wire } = self.precision;
        [weights, cache, wire] != [DType::F32; 3]
    }
}

/// Rows that follow one another in one text.
pub struct Text {
    /// Position of the first one.
    pub first: u32,
    pub ids: Vec<u32>,
    /// Of the lanes that round; the exact one is always computed.
    pub lanes: usize,
    /// Positions whose logits are wanted, ascending.
    pub wanted: Vec<u32>,
    /// Keys and values that its rows have in place of their own: by row, by layer, `[kv_heads * head_dim]` each.
    pub taken: Option<Vec<Vec<[Vec<f64>; 2]>>>,
    /// The experts that its rows are computed by in place of those that the exact lane would choose: by row, by layer, by slot. None in a
    /// layer without experts.
    pub chosen: Option<Vec<Vec<Vec<u32>>>>,
}

/// Logits of a wanted position.
pub struct Wanted {
    pub text: usize,
    pub position: u32,
    pub exact: Vec<f32>,
    pub lanes: Vec<Vec<f32>>,
}

/// The keys and values that a row computed in a layer, and how far those of the lanes are from them, norm by norm: of the wanted rows, and of all
/// rows of a text that has others in their place.
pub struct Computed {
    pub text: usize,
    pub position: u32,
    pub layer: usize,
    pub rows: [Vec<f64>; 2],
    pub noise: [f64; 2],
}

/// How right the experts are that a text has chosen for a row.
pub struct Routed {
    pub text: usize,
    pub position: u32,
    pub layer: usize,
    /// See [`missed`]; of the exact lane.
    pub missed: f64,
    /// The largest distance of a score of a lane from the exact one, and the largest exact score.
    pub noise: f64,
    pub most: f64,
}

/// What caches of deep positions are made of: keys before rotation (and before the norm, if that follows), and values, by layer and token of the text.
/// Layers with a recurrent state have none.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Fill {
    /// `[layer][token]`: the key, then the value, `[kv_heads * head_dim]` each.
    pub(super) layers: Vec<Vec<[Vec<f32>; 2]>>,
    /// By layer, the recurrent state after the text, as programs keep it; empty in a layer with attention alone.
    pub(super) states: Vec<Vec<f32>>,
}

/// What keys and values of a cache go through.
struct Tables {
    cache: DType,
    /// In fp8, by layer and KV head: the scale of keys and of values.
    scales: Vec<Vec<[f32; 2]>>,
    /// By rotary table: cosines and sines of all pairs, row after row.
    turns: Vec<Vec<(f32, f32)>>,
    /// By layer: the gains of the norm of keys that follows their rotation.
    gains: Vec<Option<Vec<f32>>>,
}

impl Tables {
    fn new(graph: &ModelGraph, weights: &Weights, cache: DType, rows: u32) -> Tables {
        let scales = match cache {
            DType::E4m3 => (0..graph.layers.len()).map(|layer| cache_scales(graph, weights, layer)).collect(),
            _ => vec![],
        };
        let of_rope = |rope: &Rope| {
            let of_row = |row| (0..rope.inv_freq.len()).map(move |pair| rope_factors(rope, row, pair));
            (0..rows).flat_map(of_row).collect()
        };
        let gains = |layer: &Layer| {
            let norm = layer.history().filter(|attention| attention.norm_after_rope)?.k_norm.as_ref()?;
            Some(norm.weights.iter().flat_map(|&id| weights.vector_f32(id)).collect())
        };
        let gains = graph.layers.iter().map(gains).collect();
        Tables { cache, scales, turns: graph.ropes.iter().map(of_rope).collect(), gains }
    }
}

/// The first rows of all caches, as a kernel would have stored them.
pub struct Filler<'a> {
    graph: &'a ModelGraph,
    fill: &'a Fill,
    tables: Tables,
    rows: u32,
}

impl Pass {
    /// Of keys and of values of each layer, the middle of what rounding costs the rows. A row whose lanes happen to be near the exact one has it in
    /// place of its own.
    pub fn middles(&self, layers: usize) -> Vec<[f64; 2]> {
        let middle = |layer: usize, kind: usize| {
            let of_layer = self.computed.iter().filter(|of| of.layer == layer);
            let mut all: Vec<f64> = of_layer.map(|of| of.noise[kind]).collect();
            all.sort_by(f64::total_cmp);
            all.get(all.len() / 2).copied().unwrap_or(0.0)
        };
        (0..layers).map(|layer| [0, 1].map(|kind| middle(layer, kind))).collect()
    }
}

impl<'a> Filler<'a> {
    /// For rows `0..rows` of every cache of type `cache`.
    pub fn new(graph: &'a ModelGraph, weights: &Weights, cache: DType, fill: &'a Fill, rows: u32) -> Filler<'a> {
        Filler { graph, fill, tables: Tables::new(graph, weights, cache, rows), rows }
    }

    pub fn rows(&self) -> u32 {
        self.rows
    }

    pub fn graph(&self) -> &ModelGraph {
        self.graph
    }

    /// The keys or values of a row: `[kv_heads * head_dim]`.
    pub fn row(&self, layer: usize, kind: CacheKind, row: u32) -> Vec<f32> {
        filled(self.graph, &self.tables, self.fill, layer, kind, row)
    }

    /// The recurrent state of a layer; empty if it has none.
    pub fn state(&self, layer: usize) -> &[f32] {
        &self.fill.states[layer]
    }

    /// What values of a KV head are multiples of.
    pub fn scale(&self, layer: usize, kind: CacheKind, head: usize) -> f32 {
        let of_kind = usize::from(kind == CacheKind::Value);
        self.tables.scales.get(layer).map_or(1.0, |heads| heads[head][of_kind])
    }
}

/// The attention of a layer with a cache.
///
/// # Panics
/// If the layer has another mixer.
pub fn attention_of(graph: &ModelGraph, layer: usize) -> &Attention {
    graph.layers[layer].history().expect("a layer with a cache has attention")
}

fn filled(graph: &ModelGraph, tables: &Tables, fill: &Fill, layer: usize, kind: CacheKind, row: u32) -> Vec<f32> {
    let text = &fill.layers[layer];
    let attn = attention_of(graph, layer);
    let dim = attn.head_dim as usize;
    let [key, value] = &text[token_of(row, text.len() as u32) as usize];
    let mut values = match kind {
        CacheKind::Value => value.clone(),
        CacheKind::Key => key.clone(),
    };
    if let (CacheKind::Key, Some(id)) = (kind, attn.rope) {
        let rope = &graph.ropes[id.index()];
        let pairs = rope.inv_freq.len();
        let turns = &tables.turns[id.index()][row as usize * pairs..][..pairs];
        for head in values.chunks_exact_mut(dim) {
            for (i, &(cos, sin)) in turns.iter().enumerate() {
                let (a, b) = if rope.interleaved { (2 * i, 2 * i + 1) } else { (i, i + pairs) };
                (head[a], head[b]) = (head[a] * cos - head[b] * sin, head[b] * cos + head[a] * sin);
            }
        }
    }
    if let (CacheKind::Key, Some(norm), Some(gains)) = (kind, &attn.k_norm, &tables.gains[layer]) {
        let mut key: Vec<f64> = values.into_iter().map(f64::from).collect();
        qk_norm_values(norm, gains, dim, &mut key);
        values = key.into_iter().map(|value| value as f32).collect();
    }
    let of_kind = usize::from(kind == CacheKind::Value);
    for (at, value) in values.iter_mut().enumerate() {
        *value = match tables.cache {
            DType::Bf16 => half::bf16::from_f32(*value).to_f32(),
            DType::E4m3 => {
                let scale = tables.scales[layer][at / dim][of_kind];
                e4m3(to_e4m3(*value / scale)) * scale
            }
            _ => *value,
        };
    }
    values
}

/// The token of a text of `count` that row `row` of a cache is made of.
fn token_of(row: u32, count: u32) -> u32 {
    let once = TEXT_ONCE.min(count.saturating_sub(1));
    if row < count { row } else { once + (row - count) % (count - once) }
}

/// How often [`compute`] calls `on_layer`.
pub fn steps(graph: &ModelGraph) -> u64 {
    graph.layers.len() as u64 + 1
}

/// The texts of a check: the one that caches are made of, if there are filled positions, the one that leads to the prompted positions, and two tokens up to each
/// filled position.
pub fn texts(vocab: u32, lanes: usize, prompted: &[u32], filled: &[u32]) -> Vec<Text> {
    let text = |first: u32, wanted: &[u32]| {
        let last = wanted.last().copied().unwrap_or(0);
        let ids = check_ids(vocab, last + 1).split_off(first as usize);
        Text { first, ids, lanes, wanted: wanted.to_vec(), taken: None, chosen: None }
    };
    let ids = check_ids(vocab, TEXT);
    let of_caches = Text { first: 0, ids, lanes: 0, wanted: vec![], taken: None, chosen: None };
    let of_caches = Some(of_caches).filter(|_| !filled.is_empty());
    let of_prompt = (!prompted.is_empty()).then(|| text(0, prompted));
    let filled = filled.iter().map(|position| text(filled_rows(*position), std::slice::from_ref(position)));
    of_caches.into_iter().chain(of_prompt).chain(filled).collect()
}

/// What was computed.
pub struct Pass {
    pub wanted: Vec<Wanted>,
    pub computed: Vec<Computed>,
    /// Of texts that have chosen experts: one for each row and layer with experts.
    pub routed: Vec<Routed>,
    pub fill: Fill,
}

/// How a lane rounds.
enum Rounds {
    ToNearest,
    AtRandom(Random),
}

/// A row in one lane.
struct Vector {
    text: usize,
    position: u32,
    /// Of the texts that are `taken`: its row.
    row: usize,
    /// `None`: exact.
    noise: Option<Rounds>,
    x: Vec<f64>,
    /// Keys and values of this layer.
    kv: [Vec<f64>; 2],
}

/// Computes `texts`. The caches of those that begin later than at position 0 are made of the first [`TEXT`] tokens of the first one.
/// `on_layer` is called for each layer and for the head.
///
/// # Panics
/// If an id is outside of the vocabulary, or a text that begins at 0 is missing.
pub fn compute(
    graph: &ModelGraph,
    weights: &Weights,
    rounding: &Rounding,
    texts: &[Text],
    on_layer: &dyn Fn(),
) -> Pass {
    let model = Model { graph, weights, rounding: *rounding };
    let mut vectors = vec![];
    for (t, text) in texts.iter().enumerate() {
        for (row, &id) in text.ids.iter().enumerate() {
            let mut embedded = vec![0.0; graph.hidden as usize];
            weights.read_row_f32(graph.embed, id, &mut embedded);
            let mut x: Vec<f64> = embedded.iter().map(|&e| f64::from(e) * f64::from(graph.embed_scale)).collect();
            let position = text.first + row as u32;
            if let Some(joined) = &graph.joined {
                // As in all checks. Values and weights are exact in bf16, so that only sums round.
                let given: Vec<f64> = (0..graph.hidden).map(|column| given_value(position, column).into()).collect();
                x = join(weights, joined, &x, &given);
            }
            for lane in 0..=text.lanes {
                let seed =
                    || Random::stream(SEED, "lane", (lane as u64) << 40 | (t as u64) << 32 | u64::from(position));
                let noise = match lane {
                    0 => None,
                    1 => Some(Rounds::ToNearest),
                    _ => Some(Rounds::AtRandom(seed())),
                };
                vectors.push(Vector { text: t, position, row, noise, x: x.clone(), kv: [vec![], vec![]] });
            }
        }
    }
    let text_count = texts.first().map_or(0, |text| text.ids.len().min(TEXT as usize));
    let deepest = texts.iter().map(|text| text.first).max().unwrap_or(0);
    let tables = Tables::new(graph, weights, rounding.precision.cache, deepest);
    let mut pass = Pass { wanted: vec![], computed: vec![], routed: vec![], fill: Fill::default() };
    for layer in 0..graph.layers.len() {
        let Layer { attn_norm, mlp_norm, parallel, .. } = &graph.layers[layer];
        let inputs = model.normed(attn_norm.as_ref(), &mut vectors);
        // The branch of an MLP that reads the input of the layer.
        let parallel = parallel.then(|| model.normed(mlp_norm.as_ref(), &mut vectors));
        let branches = model.branches(layer, &inputs, texts, &tables, &mut vectors, &mut pass, text_count);
        model.finish_layer(layer, texts, branches, parallel, &mut vectors, &mut pass);
        on_layer();
    }
    model.head(texts, vectors, &mut pass);
    on_layer();
    pass
}

/// `by * x` of every vector.
fn multiplied(all: &[Vec<f64>], by: f32) -> Vec<Vec<f64>> {
    all.iter().map(|x| times(by, x.clone())).collect()
}

/// The rows of the cache before position `first` that attention may see: keys, then values.
fn history(graph: &ModelGraph, tables: &Tables, fill: &Fill, layer: usize, first: u32) -> [Vec<Vec<f64>>; 2] {
    let seen = attention_of(graph, layer).window.map_or(first, |window| window.min(first));
    [CacheKind::Key, CacheKind::Value].map(|kind| {
        let row = |row| filled(graph, tables, fill, layer, kind, row).into_iter().map(f64::from).collect();
        (first - seen..first).into_par_iter().map(row).collect()
    })
}

struct Model<'a> {
    graph: &'a ModelGraph,
    weights: &'a Weights,
    rounding: Rounding,
}

/// Queries of each vector, and its gates of attention's output.
struct Projected {
    queries: Vec<Vec<f64>>,
    gates: Option<Vec<Vec<f64>>>,
}

impl Model<'_> {
    /// What the mixers of a layer add to the residual: inputs of products, and factors.
    #[allow(clippy::too_many_arguments)] // What every mixer gets.
    fn branches(
        &self,
        layer: usize,
        inputs: &[Vec<f64>],
        texts: &[Text],
        tables: &Tables,
        vectors: &mut [Vector],
        pass: &mut Pass,
        text_count: usize,
    ) -> Vec<(Vec<Vec<f64>>, &Linear, f32)> {
        let attended = |inputs: &[Vec<f64>], attn: &Attention, vectors: &mut [Vector], pass: &mut Pass| {
            let projected = self.project(layer, attn, inputs, texts, vectors, pass, text_count);
            let before = |text: &Text| history(self.graph, tables, &pass.fill, layer, text.first);
            let filled: Vec<[Vec<Vec<f64>>; 2]> = texts.iter().map(before).collect();
            let attended = self.attend(attn, &filled, projected, vectors);
            self.published(attended, vectors)
        };
        let mixed = |inputs: &[Vec<f64>], of: Recurrent<'_>, vectors: &mut [Vector], pass: &mut Pass| {
            self.mix(layer, of, inputs, texts, vectors, pass, text_count)
        };
        let alone = |of: Recurrent<'_>, vectors: &mut [Vector], pass: &mut Pass| {
            let mixed = mixed(inputs, of, vectors, pass).into_iter().map(|mixed| mixed.y).collect();
            self.published(mixed, vectors)
        };
        let mut branches = vec![];
        match &self.graph.layers[layer].mixer {
            Mixer::Attention(attn) => branches.push((attended(inputs, attn, vectors, pass), &attn.o, 1.0)),
            Mixer::GatedDelta(net) => {
                branches.push((alone(Recurrent::Delta(net), vectors, pass), &net.o, 1.0));
            }
            Mixer::ShortConv(conv) => {
                branches.push((alone(Recurrent::Conv(conv), vectors, pass), &conv.o, 1.0));
            }
            Mixer::Mamba2(mamba) => {
                let out = mixed(&multiplied(inputs, mamba.input_scale), Recurrent::Mamba(mamba), vectors, pass);
                branches.push((self.gate_mamba(mamba, out, vectors), &mamba.o, mamba.output_scale));
            }
            Mixer::SideBySide(both) => {
                let SideBySide { attention, attention_scales: [input_scale, output_scale], mamba } = &**both;
                let out = attended(&multiplied(inputs, *input_scale), attention, vectors, pass);
                branches.push((out, &attention.o, *output_scale));
                let out = mixed(&multiplied(inputs, mamba.input_scale), Recurrent::Mamba(mamba), vectors, pass);
                branches.push((self.gate_mamba(mamba, out, vectors), &mamba.o, mamba.output_scale));
            }
        }
        branches
    }

    /// What the vectors of an exchange hold, as it travels.
    fn published(&self, mut all: Vec<Vec<f64>>, vectors: &mut [Vector]) -> Vec<Vec<f64>> {
        let wire = self.rounding.precision.wire;
        self.each(vectors, &mut all, |vector, x| vector.round(wire, x));
        all
    }

    /// Queries, keys and values of a layer; the text's keys before rotation go into the fill.
    #[allow(clippy::too_many_arguments)] // What every mixer gets.
    fn project(
        &self,
        layer: usize,
        attn: &Attention,
        inputs: &[Vec<f64>],
        texts: &[Text],
        vectors: &mut [Vector],
        pass: &mut Pass,
        text_count: usize,
    ) -> Projected {
        let mut queries = self.linear(&attn.q, inputs, vectors);
        let keys = self.linear(&attn.k, inputs, vectors);
        let values = self.linear(&attn.v, inputs, vectors);
        let mut gates = attn.gate.as_ref().map(|gate| self.linear(gate, inputs, vectors));
        if let Some(gates) = &mut gates {
            let wire = self.rounding.precision.wire;
            self.each(vectors, gates, |vector, x| vector.round(wire, x));
        }
        let dim = attn.head_dim as usize;
        let mut of_text = vec![];
        let all = vectors.par_iter_mut().zip(queries.par_iter_mut()).zip(keys.into_par_iter().zip(values));
        let unrotated: Vec<Vec<f64>> = all
            .map(|((vector, q), (mut k, mut v))| {
                let wire = self.rounding.precision.wire;
                [&mut *q, &mut k, &mut v].into_iter().for_each(|x| vector.round(wire, x));
                let mut before = k.clone();
                if !attn.norm_after_rope {
                    qk_norm(self.weights, attn.k_norm.as_ref(), dim, &mut before);
                }
                for (norm, projected) in [(attn.q_norm.as_ref(), &mut *q), (attn.k_norm.as_ref(), &mut k)] {
                    norm_and_rotate(self.graph, self.weights, attn, norm, vector.position, projected);
                }
                if let Some(scale) = attn.query_scale {
                    let factor = query_factor(scale, vector.position);
                    q.iter_mut().for_each(|q| *q *= factor);
                }
                // The codes of a cache in fp8 are those of the kernel: no lane has its own.
                let cache = self.rounding.precision.cache;
                if cache != DType::E4m3 {
                    [&mut k, &mut v].into_iter().for_each(|x| vector.round(cache, x));
                }
                vector.kv = [k, v];
                before
            })
            .collect();
        for (vector, before) in vectors.iter().zip(unrotated) {
            if vector.text == 0 && vector.noise.is_none() && vector.row < text_count {
                let narrow = |values: &[f64]| values.iter().map(|&value| value as f32).collect::<Vec<f32>>();
                of_text.push([narrow(&before), narrow(&vector.kv[1])]);
            }
        }
        pass.fill.layers.push(of_text);
        pass.fill.states.push(vec![]);
        self.take(layer, texts, vectors, pass);
        Projected { queries, gates }
    }

    /// A mixer with a recurrent state, from the first position of each text on, or from the state that the first text left; that goes into the fill.
    #[allow(clippy::too_many_arguments)] // What every mixer gets.
    fn mix(
        &self,
        layer: usize,
        of: Recurrent<'_>,
        inputs: &[Vec<f64>],
        texts: &[Text],
        vectors: &mut [Vector],
        pass: &mut Pass,
        text_count: usize,
    ) -> Vec<Mixed> {
        let wire = self.rounding.precision.wire;
        let mut projected: Vec<Vec<Vec<f64>>> = vec![vec![]; vectors.len()];
        for projection in of.projections() {
            let mut all = self.linear(projection, inputs, vectors);
            self.each(vectors, &mut all, |vector, x| vector.round(wire, x));
            projected.iter_mut().zip(all).for_each(|(of, x)| of.push(x));
        }
        // The vectors of a text are one row after another, each with all of its lanes.
        let mut mixed: Vec<Mixed> = vectors.iter().map(|_| Mixed { y: vec![], gate: vec![] }).collect();
        let run = |from: usize, count: usize, first: u32, lane: usize, fill: &[f32], kept: usize| {
            let mut state = if first == 0 { of.start() } else { of.read(fill) };
            let (mut out, mut after) = (vec![], None);
            for row in 0..count {
                let at = from + row * (texts[vectors[from].text].lanes + 1) + lane;
                out.push((at, of.mix(self.weights, &mut state, &projected[at])));
                if row + 1 == kept {
                    after = Some(of.values(&state));
                }
            }
            (out, after)
        };
        let mut from = 0;
        let mut all = vec![];
        for (t, text) in texts.iter().enumerate() {
            all.extend((0..=text.lanes).map(|lane| (t, from, lane)));
            from += text.ids.len() * (text.lanes + 1);
        }
        let mut put = |out: Vec<(usize, Mixed)>| out.into_iter().for_each(|(at, y)| mixed[at] = y);
        let mut fill = vec![];
        if let Some(first) = texts.first() {
            let (out, after) = run(0, first.ids.len(), first.first, 0, &[], text_count);
            put(out);
            fill = after.unwrap_or_default();
        }
        let rest: Vec<_> = all
            .into_par_iter()
            .skip(1)
            .map(|(t, from, lane)| run(from, texts[t].ids.len(), texts[t].first, lane, &fill, 0).0)
            .collect();
        rest.into_iter().for_each(put);
        // Attention in the same layer has kept its keys and values.
        if pass.fill.layers.len() > layer {
            pass.fill.states[layer] = fill;
            return mixed;
        }
        pass.fill.layers.push(vec![[vec![], vec![]]; text_count]);
        pass.fill.states.push(fill);
        for vector in vectors.iter().filter(|vector| vector.noise.is_none()) {
            let &Vector { text, position, .. } = vector;
            if texts[text].taken.is_some() || texts[text].wanted.contains(&position) {
                let rows = [vec![], vec![]];
                pass.computed.push(Computed { text, position, layer, rows, noise: [0.0; 2] });
            }
        }
        mixed
    }

    /// What the output projection of Mamba-2 reads. A norm of all columns is that of the projection, so its result does not travel.
    fn gate_mamba(&self, mamba: &Mamba2, mixed: Vec<Mixed>, vectors: &mut [Vector]) -> Vec<Vec<f64>> {
        let wire = self.rounding.precision.wire;
        let of = |(vector, Mixed { mut y, gate }): (&mut Vector, Mixed)| {
            let before_gate = mamba.norm.as_ref().is_some_and(|norm| norm.before_gate);
            if !before_gate {
                gate_silu(&gate, &mut y);
            }
            vector.round(wire, &mut y);
            let Some(norm) = &mamba.norm else { return y };
            y = norm_groups(self.weights, norm, &y);
            if before_gate {
                gate_silu(&gate, &mut y);
            }
            if before_gate || norm.groups > 1 {
                vector.round(wire, &mut y);
            }
            y
        };
        vectors.par_iter_mut().zip(mixed).map(of).collect()
    }

    /// Keeps what was computed, and replaces keys and values by those that a text has taken.
    fn take(&self, layer: usize, texts: &[Text], vectors: &mut [Vector], pass: &mut Pass) {
        let mut at = 0;
        while at < vectors.len() {
            let text = &texts[vectors[at].text];
            let lanes = &mut vectors[at..at + text.lanes + 1];
            at += text.lanes + 1;
            if text.taken.is_none() && !text.wanted.contains(&lanes[0].position) {
                continue;
            }
            let rows = lanes[0].kv.clone();
            let dim = attention_of(self.graph, layer).head_dim as usize;
            let noise = [0, 1].map(|kind| {
                let of_lane = |lane: &Vector| head_distance(&rows[kind], &lane.kv[kind], dim);
                lanes[1..].iter().map(of_lane).fold(0.0, super::worst)
            });
            let Vector { text: of, position, row, .. } = lanes[0];
            pass.computed.push(Computed { text: of, position, layer, rows, noise });
            if let Some(taken) = &text.taken {
                lanes.iter_mut().for_each(|lane| lane.kv = taken[row][layer].clone());
            }
        }
    }

    /// The outputs of mixers with their factors, and what follows them in a layer.
    fn finish_layer(
        &self,
        layer: usize,
        texts: &[Text],
        branches: Vec<(Vec<Vec<f64>>, &Linear, f32)>,
        parallel: Option<Vec<Vec<f64>>>,
        vectors: &mut [Vector],
        pass: &mut Pass,
    ) {
        let Layer { attn_post_norm, mlp_norm, feed, mlp_post_norm, residual_scale, .. } = &self.graph.layers[layer];
        for (mixed, o, factor) in branches {
            let mut out = self.linear(o, &mixed, vectors);
            self.add(attn_post_norm.as_ref(), *residual_scale * factor, &mut out, vectors);
        }
        if *feed == FeedForward::None {
            return;
        }
        let input = parallel.unwrap_or_else(|| self.normed(mlp_norm.as_ref(), vectors));
        let (mut out, factor) = match feed {
            FeedForward::None => return,
            FeedForward::Dense(mlp) => (self.mlp(mlp, 1.0, &input, vectors), 1.0),
            FeedForward::Scaled(scaled) => {
                let ScaledMlp { mlp, gate_scale, down_scale } = &**scaled;
                (self.mlp(mlp, *gate_scale, &input, vectors), *down_scale)
            }
            FeedForward::Experts(experts) => (self.experts(layer, experts, texts, &input, vectors, pass), 1.0),
        };
        self.add(mlp_post_norm.as_ref(), *residual_scale * factor, &mut out, vectors);
    }

    /// An MLP whose gate is multiplied by `scale`.
    fn mlp<V: BorrowMut<Vector> + Send>(
        &self,
        mlp: &Mlp,
        scale: f32,
        input: &[Vec<f64>],
        vectors: &mut [V],
    ) -> Vec<Vec<f64>> {
        let scale = f64::from(scale);
        let up = self.linear(&mlp.up, input, vectors);
        let mut inner: Vec<Vec<f64>> = match &mlp.gate {
            Some(gate) => {
                let gate = self.linear(gate, input, vectors);
                let of = |(gate, up): (Vec<f64>, Vec<f64>)| {
                    gate.iter().zip(up).map(|(&g, u)| gated(mlp, scale * g, u)).collect()
                };
                gate.into_par_iter().zip(up).map(of).collect()
            }
            None => up.into_par_iter().map(|up| up.into_iter().map(|u| act(mlp.act, u)).collect()).collect(),
        };
        let wire = self.rounding.precision.wire;
        self.each(vectors, &mut inner, |vector, x| vector.round(wire, x));
        self.linear(&mlp.down, &inner, vectors)
    }

    /// The lanes of a row are computed by the experts that its exact lane chooses, or its text has chosen, with weights of their own: a
    /// choice that rounding turns is no rounding error, and is compared apart.
    fn experts(
        &self,
        layer: usize,
        op: &Experts,
        texts: &[Text],
        input: &[Vec<f64>],
        vectors: &mut [Vector],
        pass: &mut Pass,
    ) -> Vec<Vec<f64>> {
        let router = &op.router;
        let logits = self.linear(&router.linear, input, vectors);
        let mut chosen: Vec<Vec<u32>> = vec![];
        let mut slots: Vec<Vec<f64>> = vec![];
        let mut exact: Vec<f64> = vec![];
        for (at, logits) in logits.iter().enumerate() {
            let scores = scores(router, logits);
            let Vector { text, position, row, noise, .. } = &vectors[at];
            let taken = texts[*text].chosen.as_ref().map(|chosen| &chosen[*row][layer]);
            let own = match (noise, chosen.last()) {
                (Some(_), Some(of_exact)) => {
                    if let Some(routed) = pass.routed.last_mut().filter(|_| taken.is_some()) {
                        let distance = exact.iter().zip(&scores).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                        routed.noise = super::worst(routed.noise, distance);
                    }
                    of_exact.clone()
                }
                _ => match taken {
                    Some(taken) => {
                        let (missed, text, position) = (missed(self.weights, router, &scores, taken), *text, *position);
                        let most = scores.iter().copied().fold(0.0, f64::max);
                        pass.routed.push(Routed { text, position, layer, missed, noise: 0.0, most });
                        exact.clone_from(&scores);
                        // What is no choice at all is refused, whatever it leads to.
                        if missed.is_finite() { taken.clone() } else { choose(self.weights, router, &scores) }
                    }
                    None => choose(self.weights, router, &scores),
                },
            };
            slots.push(slot_weights(router, &scores, &own));
            chosen.push(own);
        }
        // By vector, by slot: sums are made in the order of slots.
        let mut by_slot: Vec<Vec<Vec<f64>>> = chosen.iter().map(|own| vec![vec![]; own.len()]).collect();
        for (id, mlp) in (0..).zip(&op.experts) {
            let slot_of = |at: usize| chosen[at].iter().position(|&expert| expert == id);
            let places: Vec<(usize, usize)> = (0..input.len()).filter_map(|at| Some((at, slot_of(at)?))).collect();
            let inputs: Vec<Vec<f64>> = places.iter().map(|&(at, _)| input[at].clone()).collect();
            let mut own: Vec<&mut Vector> =
                vectors.iter_mut().enumerate().filter(|(at, _)| slot_of(*at).is_some()).map(|(_, v)| v).collect();
            let out = self.mlp(mlp, 1.0, &inputs, &mut own);
            places.into_iter().zip(out).for_each(|((at, slot), out)| by_slot[at][slot] = out);
        }
        let sum = |(outs, slots): (Vec<Vec<f64>>, &Vec<f64>)| {
            let mut y = vec![0.0; self.graph.hidden as usize];
            for (out, weight) in outs.iter().zip(slots) {
                y.iter_mut().zip(out).for_each(|(y, out)| *y += weight * out);
            }
            y
        };
        let mut y: Vec<Vec<f64>> = by_slot.into_iter().zip(&slots).map(sum).collect();
        if let Some(shared) = &op.shared {
            let gates = shared.gate.as_ref().map(|gate| self.linear(gate, input, vectors));
            let out = self.mlp(&shared.mlp, 1.0, input, vectors);
            for (at, (y, out)) in y.iter_mut().zip(out).enumerate() {
                let gate = gates.as_ref().map_or(1.0, |gates| sigmoid(gates[at][0])) * f64::from(shared.scale);
                y.iter_mut().zip(out).for_each(|(y, out)| *y += gate * out);
            }
        }
        y
    }

    /// Each vector over the rows of its own lane, and the rows before its text; gated, if attention is.
    fn attend(
        &self,
        attn: &Attention,
        filled: &[[Vec<Vec<f64>>; 2]],
        Projected { queries, gates }: Projected,
        vectors: &[Vector],
    ) -> Vec<Vec<f64>> {
        let shape = AttentionShape {
            heads: attn.heads as usize,
            kv_heads: attn.kv_heads as usize,
            head_dim: attn.head_dim as usize,
        };
        let sinks = attn.sinks.map(|id| self.weights.vector_f32(id));
        // The vectors of a text are one row after another, each with all of its lanes.
        let mut starts: Vec<Range<usize>> = vec![];
        for (at, vector) in vectors.iter().enumerate() {
            match starts.get_mut(vector.text) {
                Some(range) => range.end = at + 1,
                None => starts.push(at..at + 1),
            }
        }
        let of = |(at, q): (usize, Vec<f64>)| {
            let vector = &vectors[at];
            let range = &starts[vector.text];
            let lanes = vectors[range.clone()].iter().filter(|other| other.row == 0).count();
            let own = (range.start + (at - range.start) % lanes..=at).step_by(lanes);
            let seen = attn.window.map_or(usize::MAX, |window| window as usize);
            let [keys, values] = [0, 1].map(|kind| {
                let before = filled[vector.text][kind].iter();
                let mut rows: Vec<&Vec<f64>> = before.chain(own.clone().map(|at| &vectors[at].kv[kind])).collect();
                rows.drain(..rows.len().saturating_sub(seen));
                rows
            });
            attention(&shape, attn.scale, attn.softcap, sinks.as_deref(), &q, &keys, &values)
        };
        let mut mixed: Vec<Vec<f64>> = queries.into_par_iter().enumerate().map(of).collect();
        for (gate, mixed) in gates.iter().flatten().zip(&mut mixed) {
            gate_output(gate, mixed);
        }
        mixed
    }

    fn head(&self, texts: &[Text], vectors: Vec<Vector>, pass: &mut Pass) {
        let wanted = |vector: &Vector| texts[vector.text].wanted.contains(&vector.position);
        let mut vectors: Vec<Vector> = vectors.into_iter().filter(wanted).collect();
        let inputs = self.normed(Some(&self.graph.final_norm), &mut vectors);
        let logits = self.linear(&self.graph.head, &inputs, &mut vectors);
        for (vector, logits) in vectors.iter().zip(logits) {
            let scaled = logits.into_iter().map(|logit| {
                let logit = logit * f64::from(self.graph.logits_scale);
                self.graph.logits_softcap.map_or(logit, |cap| softcap(f64::from(cap), logit)) as f32
            });
            let logits: Vec<f32> = scaled.collect();
            match (&vector.noise, pass.wanted.last_mut()) {
                (Some(_), Some(last)) => last.lanes.push(logits),
                _ => {
                    let Vector { text, position, .. } = *vector;
                    pass.wanted.push(Wanted { text, position, exact: logits, lanes: vec![] });
                }
            }
        }
    }

    fn each<V: BorrowMut<Vector> + Send>(
        &self,
        vectors: &mut [V],
        all: &mut [Vec<f64>],
        change: impl Fn(&mut Vector, &mut Vec<f64>) + Sync,
    ) {
        vectors.par_iter_mut().zip(all).for_each(|(vector, x)| change(vector.borrow_mut(), x));
    }

    /// The input of a product: what travels is rounded before the norm.
    fn normed(&self, op: Option<&Norm>, vectors: &mut [Vector]) -> Vec<Vec<f64>> {
        let wire = self.rounding.precision.wire;
        let of = |vector: &mut Vector| {
            let mut x = vector.x.clone();
            vector.round(wire, &mut x);
            op.map_or_else(|| x.clone(), |op| norm(self.weights, op, &x))
        };
        vectors.par_iter_mut().map(of).collect()
    }

    fn add(&self, op: Option<&Norm>, scale: f32, all: &mut [Vec<f64>], vectors: &mut [Vector]) {
        let wire = self.rounding.precision.wire;
        self.each(vectors, all, |vector, y| {
            if let Some(op) = op {
                vector.round(wire, y);
                *y = norm(self.weights, op, y);
            }
            add_scaled(&mut vector.x, scale, y);
        });
    }

    /// `y = W x + b` for every vector. Lanes that round multiply in fp32, with weights of the type that the kernel has.
    fn linear<V: BorrowMut<Vector> + Send>(
        &self,
        op: &Linear,
        inputs: &[Vec<f64>],
        vectors: &mut [V],
    ) -> Vec<Vec<f64>> {
        let cols = op.cols as usize;
        let Rounding { precision, staged } = self.rounding;
        let rounds: Vec<bool> = vectors.iter().map(|vector| vector.borrow().noise.is_some()).collect();
        let narrow: Vec<Vec<f32>> = vectors
            .par_iter_mut()
            .zip(inputs)
            .map(|(vector, x)| {
                let vector = vector.borrow_mut();
                if vector.noise.is_none() {
                    return vec![];
                }
                let mut x = x.clone();
                if staged {
                    vector.round(precision.weights, &mut x);
                }
                x.into_iter().map(|value| value as f32).collect()
            })
            .collect();
        let bias = self.weights.bias_f32(op);
        let is_coded = self.weights.format(op.weight.tensor).is_some();
        let rounds_weights = precision.weights == DType::Bf16 && !is_coded;
        let count = inputs.len();
        let mut by_row = vec![0.0f64; op.rows as usize * count];
        let of_row = |(row, wide): &mut (Vec<f32>, Vec<f64>), (r, out): (usize, &mut [f64])| {
            row.resize(cols, 0.0);
            self.weights.linear_row_f32(op, r as u32, row);
            wide.clear();
            wide.extend(row.iter().map(|&w| f64::from(w)));
            if rounds_weights {
                row.iter_mut().for_each(|w| *w = half::bf16::from_f32(*w).to_f32());
            }
            let bias = bias.as_ref().map_or(0.0, |bias| f64::from(bias[r]));
            for (at, out) in out.iter_mut().enumerate() {
                let sum = if rounds[at] { dot_f32(row, &narrow[at]) } else { dot_f64(wide, &inputs[at]) };
                *out = sum + bias;
            }
        };
        by_row.par_chunks_mut(count.max(1)).enumerate().with_min_len(16).for_each_init(|| (vec![], vec![]), of_row);
        let of = |at: usize| by_row.iter().skip(at).step_by(count).copied().collect();
        (0..count).into_par_iter().map(of).collect()
    }
}

impl Vector {
    /// Rounds to `dtype` as the lane does. The exact lane and other types stay.
    fn round(&mut self, dtype: DType, values: &mut [f64]) {
        let (Some(rounds), DType::Bf16) = (&mut self.noise, dtype) else { return };
        let random = match rounds {
            Rounds::ToNearest => {
                values.iter_mut().for_each(|value| *value = f64::from(half::bf16::from_f64(*value).to_f32()));
                return;
            }
            Rounds::AtRandom(random) => random,
        };
        // Up or down so that the mean is right.
        for values in values.chunks_mut(4) {
            let mut word = random.word();
            for value in values {
                let bits = (*value as f32).to_bits();
                let rounded = f32::from_bits(bits.wrapping_add(word as u32 & 0xffff) & 0xffff_0000);
                // A number near the end of the range would become infinite.
                *value = f64::from(if rounded.is_finite() { rounded } else { *value as f32 });
                word >>= 16;
            }
        }
    }
}

/// The largest norm of the difference of a head by its norm, which counts as at least that of an average head: errors of the input of a layer
/// are equally large in all heads.
pub(super) fn head_distance(expected: &[f64], found: &[f64], dim: usize) -> f64 {
    let sums = expected.chunks_exact(dim).zip(found.chunks_exact(dim)).map(|(expected, found)| {
        let difference: f64 = expected.iter().zip(found).map(|(e, f)| (e - f) * (e - f)).sum();
        [difference, expected.iter().map(|e| e * e).sum()]
    });
    let heads: Vec<[f64; 2]> = sums.collect();
    let average = heads.iter().map(|[_, norm]| norm).sum::<f64>() / heads.len().max(1) as f64;
    let relative = |&[away, norm]: &[f64; 2]| if away == 0.0 { 0.0 } else { (away / norm.max(average)).sqrt() };
    heads.iter().map(relative).fold(0.0, super::worst)
}

/// Eight partial sums, so that additions do not depend on each other.
fn dot_f64(w: &[f64], x: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    let (w8, w_rest) = w.as_chunks::<8>();
    let (x8, x_rest) = x.as_chunks::<8>();
    for (w, x) in w8.iter().zip(x8) {
        for i in 0..8 {
            sums[i] += w[i] * x[i];
        }
    }
    let rest: f64 = w_rest.iter().zip(x_rest).map(|(w, x)| w * x).sum();
    sums.iter().sum::<f64>() + rest
}

/// Sixteen partial sums.
fn dot_f32(w: &[f32], x: &[f32]) -> f64 {
    let mut sums = [0.0f32; 16];
    let (w16, w_rest) = w.as_chunks::<16>();
    let (x16, x_rest) = x.as_chunks::<16>();
    for (w, x) in w16.iter().zip(x16) {
        for i in 0..16 {
            sums[i] += w[i] * x[i];
        }
    }
    let rest: f32 = w_rest.iter().zip(x_rest).map(|(w, x)| w * x).sum();
    f64::from(sums.iter().sum::<f32>() + rest)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::model::config::import;
    use crate::reference::forward;

    /// The exact lane of every mixture is the reference, and its other lanes are near: they compute with the choices of the exact one.
    #[test]
    fn lanes_of_experts_agree_with_the_reference() {
        let bf16 = Precision { weights: DType::Bf16, cache: DType::Bf16, wire: DType::Bf16 };
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/experts");
        let mut models = 0;
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let imported = import(&path).unwrap();
            let (graph, weights) = (&imported.graph, &imported.weights);
            let rounding = Rounding { precision: bf16, staged: true };
            let texts = texts(graph.vocab, rounding.lanes(), &[0, 5, 11], &[]);
            let expected = forward(graph, weights, &texts[0].ids);
            let pass = compute(graph, weights, &rounding, &texts, &|| ());
            assert_eq!(pass.wanted.len(), 3, "{}", path.display());
            for Wanted { position, exact, lanes, .. } in pass.wanted {
                let expected = &expected[position as usize];
                let norm = expected.iter().map(|x| x * x).sum::<f32>().sqrt();
                let distance = |found: &[f32]| {
                    let squares = found.iter().zip(expected).map(|(a, b)| (a - b) * (a - b));
                    squares.sum::<f32>().sqrt() / norm
                };
                assert!(distance(&exact) < 1e-5, "{}: {}", path.display(), distance(&exact));
                assert_eq!(lanes.len(), rounding.lanes());
                let far: Vec<f32> = lanes.iter().map(|lane| distance(lane)).collect();
                assert!(far.iter().all(|far| (1e-5..0.1).contains(far)), "{}: {far:?}", path.display());
            }
            models += 1;
        }
        assert!(models > 20, "{models}");
    }
}
